"""Models of today: from a Hugging Face folder to a model that one string splits over a mesh."""

from mesh_tensorflow.models._pretrained import LanguageModel, from_config, from_pretrained
from mesh_tensorflow.models._tokenizer import Tokenizer

__all__ = ["LanguageModel", "Tokenizer", "from_config", "from_pretrained"]
