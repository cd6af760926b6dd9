"""Subword vocabularies in Tensor2Tensor's file format."""

from __future__ import annotations

import os
from collections.abc import Iterable

import gin

from mesh_tensorflow.transformer import vocabulary

__all__ = ["T2tVocabulary", "get_t2t_vocabulary"]


class T2tVocabulary(vocabulary.Vocabulary):
    """A subword vocabulary of Tensor2Tensor; padding and EOS decode to no text.

    Creating one requires the package tensor2tensor.
    """

    def __init__(self, filepath: str):
        """
        Args:
          filepath: a string, the path of the vocabulary.

        Raises:
          ImportError: tensor2tensor is not installed.
        """
        try:
            from tensor2tensor.data_generators import text_encoder
        except ImportError as e:
            # Its declared dependencies pin an old TensorFlow, and this module needs none of them.
            raise vocabulary.missing_package(
                "T2tVocabulary", "tensor2tensor", "pip install --no-deps tensor2tensor"
            ) from e
        self._encoder = text_encoder.SubwordTextEncoder(filepath)

    @property
    def vocab_size(self) -> int:
        """The number of subwords, padding and EOS included."""
        return self._encoder.vocab_size

    def encode(self, s: str) -> list[int]:
        """Returns the ids of a text by the Tensor2Tensor encoder."""
        return self._encoder.encode(s)

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of ids, padding and end of sequence left out."""
        # The encoder would decode padding and EOS to "<pad>" and "<EOS>".
        return self._encoder.decode([int(i) for i in ids if i > vocabulary.EOS_ID])


@gin.configurable(module="mesh_tensorflow.transformer.t2t_vocabulary")
def get_t2t_vocabulary(
    data_dir: str = gin.REQUIRED, vocabulary_filename: str = gin.REQUIRED
) -> T2tVocabulary:
    """Loads a vocabulary from a file in a directory.

    Args:
      data_dir: a string, the directory.
      vocabulary_filename: a string, as in "vocab.translate_ende_wmt32k.32768.subwords".

    Returns:
      A T2tVocabulary.
    """
    return T2tVocabulary(os.path.join(data_dir, vocabulary_filename))
