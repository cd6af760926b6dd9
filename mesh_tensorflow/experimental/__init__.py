"""Volumes too large for one processor: U-Nets, reading and augmentation of scans, training."""
