"""Meshes whose program works on whole tensors, which XLA's partitioner splits."""
