"""Models of volumes too large for one processor: U-Nets, input, augmentation, training."""
