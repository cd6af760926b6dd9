"""Programs with known results, and a conformance suite for mesh implementations."""
