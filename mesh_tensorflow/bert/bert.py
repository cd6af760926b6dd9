"""The BERT model on a mesh, its configuration and its layers."""

from mesh_tensorflow.bert._config import BertConfig
from mesh_tensorflow.bert._model import BertModel, get_activation, layer_norm
from mesh_tensorflow.bert._training import get_assignment_map_from_checkpoint

__all__ = [
    "BertConfig",
    "BertModel",
    "get_activation",
    "get_assignment_map_from_checkpoint",
    "layer_norm",
]
