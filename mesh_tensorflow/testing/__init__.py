"""Programs with known results, and a suite for mesh implementations of others."""
