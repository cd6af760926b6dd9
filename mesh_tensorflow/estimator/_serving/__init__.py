"""Exported models: their inputs, outputs, and when to export."""
