"""Features, front ends and mesh implementations, which tests/crossings tries together."""
