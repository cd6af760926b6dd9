"""Meshes of TensorFlow devices; slices are separate tensors, each on its device."""
