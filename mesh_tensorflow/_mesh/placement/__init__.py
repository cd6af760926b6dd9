"""Slices as separate tensors, each on its device."""
