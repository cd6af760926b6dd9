"""Functions on the slices of one processor."""
