"""Exported models: inputs, outputs and exporters."""
