"""Volumes that are too large for one processor: U-Nets, what reads and augments scans, training."""
