"""Transformer models: language models, encoders and decoders, and their training and inference."""

from mesh_tensorflow.transformer import (
    attention,
    dataset,
    learning_rate_schedules,
    metrics,
    moe,
    t2t_vocabulary,
    transformer,
    transformer_layers,
    utils,
    vocabulary,
)

__all__ = [
    "attention",
    "dataset",
    "learning_rate_schedules",
    "metrics",
    "moe",
    "t2t_vocabulary",
    "transformer",
    "transformer_layers",
    "utils",
    "vocabulary",
]
