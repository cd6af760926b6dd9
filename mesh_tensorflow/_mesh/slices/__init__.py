"""One processor's slice: cutting, filling and computing it."""
