"""Models of one stack, of two stacks, and of several models."""
