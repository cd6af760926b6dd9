"""Attention layers, their biases, weights and decoding states."""
