"""Functions of single elements: unary, binary, comparisons, and functions of slices."""
