r"""Trains and evaluates a U-Net in its own training loop, on a TPU, on CPUs or on GPUs.

python -m mesh_tensorflow.experimental.model_executor --train_file_pattern=... \
        --eval_file_pattern=... --checkpoint_dir=... --mesh_shape="rows:2,columns:2"
"""

from mesh_tensorflow.experimental.model_executor._flags import FLAGS
from mesh_tensorflow.experimental.model_executor._model import MeshContext, main, train_and_eval

__all__ = ["FLAGS", "MeshContext", "main", "train_and_eval"]
