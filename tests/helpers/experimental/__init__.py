"""Data of the U-Net."""
