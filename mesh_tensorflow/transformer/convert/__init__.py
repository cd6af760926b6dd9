"""Converts T5's weights between checkpoints of this package and files for Hugging Face's T5.

    python -m mesh_tensorflow.transformer.convert to-huggingface MODEL_DIR OUTPUT_DIR
    python -m mesh_tensorflow.transformer.convert from-huggingface INPUT_DIR MODEL_DIR
    python -m mesh_tensorflow.transformer.convert with-draft MODEL_DIR DRAFT_DIR BOTH_DIR

One side is a TensorFlow checkpoint with the variables of a Bitransformer of T5 layers; the other is
a directory with `model.safetensors` and `config.json`, which T5ForConditionalGeneration reads and
writes. Weights keep their values and dtypes, so a round trip is exact. Optimizer slots are dropped.
T5: https://arxiv.org/abs/1910.10683. `with-draft` joins checkpoints of a model and of its draft,
for speculative decoding.
"""

from mesh_tensorflow.transformer.convert._weights import (
    from_huggingface,
    huggingface_to_mesh,
    mesh_to_huggingface,
    read_checkpoint,
    read_huggingface,
    to_huggingface,
    with_draft,
    write_checkpoint,
    write_huggingface,
)

__all__ = [
    "from_huggingface",
    "huggingface_to_mesh",
    "mesh_to_huggingface",
    "read_checkpoint",
    "read_huggingface",
    "to_huggingface",
    "with_draft",
    "write_checkpoint",
    "write_huggingface",
]
