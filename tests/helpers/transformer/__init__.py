"""Layers and models of transformers."""
