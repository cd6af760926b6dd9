"""Inference with trained models: decoding, scoring and export."""
