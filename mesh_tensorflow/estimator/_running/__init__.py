"""Training, evaluation and prediction: sessions, hooks, checkpoints and progress."""
