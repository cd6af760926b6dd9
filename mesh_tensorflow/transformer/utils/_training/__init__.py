"""Training and evaluation, variables and checkpoints."""
