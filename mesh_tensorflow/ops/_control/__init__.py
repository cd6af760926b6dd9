"""Loops, order, recomputation, and gradients given by hand."""
