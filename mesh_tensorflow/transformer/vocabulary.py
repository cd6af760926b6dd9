"""Vocabularies, which convert between text and token ids.

Id 0 is padding and id 1 the end of a sequence (EOS), in every vocabulary. `encode` does not append
EOS, and an empty text has no ids.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Optional, Union

import gin
import numpy as np
import tensorflow.compat.v1 as tf

from mesh_tensorflow._core.errors import missing_package as missing_package

__all__ = [
    "ByteVocabulary",
    "EOS_ID",
    "PAD_ID",
    "SentencePieceVocabulary",
    "TFDSVocabulary",
    "Vocabulary",
    "get_tfds_vocabulary",
    "missing_package",
    "tfds_function",
    "vocabulary_of_feature",
]

PAD_ID = 0
EOS_ID = 1

_MODULE = "mesh_tensorflow.transformer.vocabulary"


def tfds_function(user: str, function: str) -> Callable[..., Any]:
    """Returns a function of TensorFlow Datasets.

    Args:
      user: a string, the name of what needs it.
      function: a string, its name in `tensorflow_datasets`.

    Raises:
      ImportError: tensorflow_datasets is not installed, or does not work.
    """
    try:
        import tensorflow_datasets as tfds
    except ImportError as e:
        raise missing_package(user, "tensorflow-datasets", "pip install tensorflow-datasets") from e
    # If importing its parts fails, it only logs that, and is empty.
    if not hasattr(tfds, function):
        raise ImportError(
            f"{user} needs tensorflow_datasets.{function}, but the package tensorflow-datasets "
            "could not import its parts. Import tensorflow_datasets.public_api to see why: often "
            "tensorflow-metadata is of a release for a later protobuf than TensorFlow's"
        )
    return getattr(tfds, function)


class Vocabulary:
    """Base class of vocabularies; subclasses define `encode`, `decode` and `vocab_size`."""

    @property
    def vocab_size(self) -> int:
        """The number of ids, including padding and EOS."""
        raise NotImplementedError(f"{type(self).__name__} must define vocab_size")

    def encode(self, s: str) -> list[int]:
        """Returns the ids of a text, without EOS.

        Args:
          s: a string.

        Returns:
          A list of integers, empty for an empty text.
        """
        raise NotImplementedError(f"{type(self).__name__} must define encode")

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of ids.

        Args:
          ids: integers.

        Returns:
          A string.
        """
        raise NotImplementedError(f"{type(self).__name__} must define decode")

    def encode_tf(self, s: tf.Tensor) -> tf.Tensor:
        """Returns the ids of a text as a tensor.

        The default calls `encode` in this process: it works in input pipelines, but not in saved
        models.

        Args:
          s: a tf scalar of type string.

        Returns:
          An int32 tf Tensor [length].
        """

        def encode(text: Union[bytes, np.ndarray]) -> np.ndarray:
            # Bytes in a graph, an array with one element in eager mode.
            # An error would end the whole input pipeline at the first text that is not UTF-8.
            decoded = np.asarray(text, object).item().decode("utf-8", "replace")
            return np.asarray(self.encode(decoded), np.int32)

        ids = tf.numpy_function(encode, [s], tf.int32)
        # TensorFlow does not know what a Python function returns, not even the rank.
        ids.set_shape([None])
        return ids

    def decode_tf(self, ids: tf.Tensor) -> tf.Tensor:
        """Returns the texts of sequences of ids as a tensor.

        The default calls `decode` in this process, like `encode_tf`.

        Args:
          ids: an integer tf Tensor [..., length].

        Returns:
          A tf Tensor [...] of type string.
        """

        def decode(ids: np.ndarray) -> np.ndarray:
            rows = ids.reshape([-1, ids.shape[-1]]).tolist() if ids.size else []
            texts = [self.decode(row).encode("utf-8") for row in rows]
            # Rows without any ids have texts too, though `rows` leaves them out.
            texts += [b""] * (int(np.prod(ids.shape[:-1])) - len(texts))
            return np.array(texts, object).reshape(ids.shape[:-1])

        ids = tf.convert_to_tensor(ids)
        texts = tf.numpy_function(decode, [ids], tf.string)
        texts.set_shape(ids.shape[:-1])
        return texts


def vocabulary_of_feature(
    vocabulary: Union[Vocabulary, Sequence[Vocabulary]], key: str
) -> Vocabulary:
    """Returns the vocabulary of a feature.

    Args:
      vocabulary: a Vocabulary, or a pair of them, of inputs and of targets.
      key: a string, the name of a feature.

    Returns:
      The first of a pair for names that begin with "inputs", else the second.
    """
    if not isinstance(vocabulary, (tuple, list)):
        return vocabulary  # type: ignore[return-value]
    if len(vocabulary) != 2:
        raise ValueError(
            f"a vocabulary for inputs and one for targets are needed, got {len(vocabulary)}"
        )
    return vocabulary[0 if key.startswith("inputs") else 1]


class TFDSVocabulary(Vocabulary):
    """A text encoder of TensorFlow Datasets, its ids shifted up by 1.

    The encoder's id 0 is padding, and it has no EOS; here 0 is padding and 1 is EOS. Both decode to
    no text.
    """

    def __init__(self, tfds_encoder: Any):
        """
        Args:
          tfds_encoder: a text encoder, with `encode`, `decode` and `vocab_size`.
        """
        self._encoder = tfds_encoder

    @property
    def vocab_size(self) -> int:
        """The size of the encoder's vocabulary, plus one for EOS."""
        return self._encoder.vocab_size + 1

    def encode(self, s: str) -> list[int]:
        """Returns the ids of a text, one above the encoder's."""
        return [i + 1 for i in self._encoder.encode(s)]

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of ids, padding and end of sequence left out."""
        return self._encoder.decode([int(i) - 1 for i in ids if i > EOS_ID])


@gin.configurable(module=_MODULE)
def get_tfds_vocabulary(
    dataset_name: str = gin.REQUIRED, tfds_data_dir: Optional[str] = None
) -> TFDSVocabulary:
    """Returns the vocabulary of the targets of a data set of TensorFlow Datasets.

    Args:
      dataset_name: a string, as in "lm1b/subwords32k".
      tfds_data_dir: a string, the directory of the data, where most encoders are stored; by default
        that of TensorFlow Datasets.

    Returns:
      A TFDSVocabulary.

    Raises:
      ImportError: tensorflow_datasets is not installed.
      ValueError: the data set has no encoded targets.
    """
    builder = tfds_function("get_tfds_vocabulary", "builder")(dataset_name, data_dir=tfds_data_dir)
    info = builder.info
    if info.supervised_keys is None:
        raise ValueError(
            f"get_tfds_vocabulary: data set {dataset_name!r} names no pair of inputs and targets "
            "(supervised_keys), so none of its features has the vocabulary"
        )
    key = info.supervised_keys[1]
    encoder = getattr(info.features[key], "encoder", None)
    if encoder is None:
        raise ValueError(
            f"get_tfds_vocabulary: feature {key!r} of data set {dataset_name!r} has no encoder. "
            f"Either it is kept with the data, which are not in {str(builder.data_dir)!r}: say "
            "where by tfds_data_dir, or TFDS_DATA_DIR in the environment; or the feature is not "
            "encoded: take a configuration that is, or untokenized_tfds_dataset with another "
            "vocabulary"
        )
    return TFDSVocabulary(encoder)


@gin.configurable(module=_MODULE)
class ByteVocabulary(Vocabulary):
    """The bytes of UTF-8 text: 0 padding, 1 EOS, 2 unknown, then the 256 bytes, then extra ids.

    It needs no file, and its `encode_tf` and `decode_tf` are TensorFlow operations, which work in
    saved models. Decoding ends at the first EOS and drops ids that are not bytes, and bytes that
    are not valid UTF-8. The ids are those of ByT5 (https://arxiv.org/abs/2105.13626).
    """

    _SPECIAL = 3

    def __init__(self, extra_ids: int = 0):
        """
        Args:
          extra_ids: an integer, the number of ids without text at the end.
        """
        if extra_ids < 0:
            raise ValueError(f"ByteVocabulary: extra_ids {extra_ids} must not be negative")
        self._extra_ids = extra_ids

    @property
    def vocab_size(self) -> int:
        """The number of special ids, bytes and extra ids."""
        return self._SPECIAL + 256 + self._extra_ids

    def encode(self, s: Union[str, bytes]) -> list[int]:
        """Returns an id for each byte of the text in UTF-8."""
        data = s.encode("utf-8") if isinstance(s, str) else s
        return [byte + self._SPECIAL for byte in data]

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of the ids before the end of sequence."""
        numbers = [i - self._SPECIAL for i in _before_eos(ids)]
        # A model may stop within a character, whose first bytes are then no text.
        return bytes(n for n in numbers if 0 <= n < 256).decode("utf-8", "ignore")

    def encode_tf(self, s: tf.Tensor) -> tf.Tensor:
        """Returns an id for each byte of a scalar string tensor."""
        return tf.cast(tf.decode_raw(s, tf.uint8), tf.int32) + self._SPECIAL

    def decode_tf(self, ids: tf.Tensor) -> tf.Tensor:
        """Returns texts of the ids before the end of sequence along the last axis."""
        numbers = tf.cast(ids, tf.int32) - self._SPECIAL
        ended = tf.cumsum(tf.cast(tf.equal(ids, EOS_ID), tf.int32), axis=-1) > 0
        has_text = (numbers >= 0) & (numbers < 256) & tf.logical_not(ended)
        # The last entry stands for all ids without text.
        table = tf.constant(np.array([bytes([n]) for n in range(256)] + [b""], object))
        texts = tf.gather(table, tf.where_v2(has_text, numbers, 256))
        joined = tf.strings.reduce_join(texts, axis=-1)
        # As `decode` does: bytes that are no UTF-8 are left out.
        return tf.strings.unicode_transcode(joined, "UTF-8", "UTF-8", errors="ignore")


def _before_eos(ids: Iterable[int]) -> list[int]:
    """Returns the ids before the first EOS, as Python integers."""
    numbers = [int(i) for i in ids]
    return numbers[: numbers.index(EOS_ID)] if EOS_ID in numbers else numbers


@gin.configurable(module=_MODULE)
class SentencePieceVocabulary(Vocabulary):
    """A SentencePiece model with padding 0 and EOS 1, like those of T5.

    Extra ids follow the pieces of the model; the last is <extra_id_0>, the one before it
    <extra_id_1>, and so on; these names in a text are encoded as their ids. Decoding ends at the
    first EOS and treats ids that are not in the vocabulary as unknown. Bytes that are not valid
    UTF-8 are encoded as U+FFFD.

    SentencePiece: https://arxiv.org/abs/1808.06226. Extra ids: https://arxiv.org/abs/1910.10683.
    """

    def __init__(self, sentencepiece_model_file: str = gin.REQUIRED, extra_ids: int = 0):
        """
        Args:
          sentencepiece_model_file: a string, the path of the model.
          extra_ids: an integer, the number of ids to add; 100 in T5's own vocabularies.

        Raises:
          ImportError: sentencepiece is not installed.
          ValueError: the model has other ids for padding or EOS.
        """
        try:
            import sentencepiece
        except ImportError as e:
            raise missing_package(
                "SentencePieceVocabulary",
                "sentencepiece",
                "pip install sentencepiece",
            ) from e
        if extra_ids < 0:
            raise ValueError(f"SentencePieceVocabulary: extra_ids {extra_ids} is negative")
        with tf.io.gfile.GFile(sentencepiece_model_file, "rb") as f:
            # Its content and not its path, which may be one that only TensorFlow can read (gs://).
            self._model = sentencepiece.SentencePieceProcessor(model_proto=f.read())
        if (self._model.pad_id(), self._model.eos_id()) != (PAD_ID, EOS_ID):
            raise ValueError(
                f"SentencePieceVocabulary: {sentencepiece_model_file!r} has id "
                f"{self._model.pad_id()} for padding and {self._model.eos_id()} for EOS; they must "
                f"be {PAD_ID} and {EOS_ID}: train with pad_id=0, eos_id=1, unk_id=2, bos_id=-1"
            )
        self._extra_ids = extra_ids

    @property
    def vocab_size(self) -> int:
        """The number of pieces of the model and extra ids."""
        return self._model.get_piece_size() + self._extra_ids

    def encode(self, s: Union[str, bytes]) -> list[int]:
        """Returns the ids of a text's pieces; `<extra_id_N>` has an id of its own."""
        text = s.decode("utf-8", "replace") if isinstance(s, bytes) else s
        if not self._extra_ids:
            return self._model.encode(text)
        ids: list[int] = []
        # With the space before it, which decoding puts there again.
        for i, part in enumerate(re.split(r"\s*<extra_id_(\d+)>", text)):
            # Odd elements are the groups of the pattern: the numbers of extra ids.
            if i % 2 == 0:
                ids += self._model.encode(part)
            elif int(part) < self._extra_ids:
                # They count down from the end, as in T5: `<extra_id_0>` has the last id.
                ids.append(self.vocab_size - 1 - int(part))
            else:
                ids += self._model.encode(f"<extra_id_{part}>")
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of the ids before the end of sequence."""
        pieces = self._model.get_piece_size()
        texts: list[str] = []
        run: list[int] = []
        for i in _before_eos(ids):
            if pieces <= i < self.vocab_size:
                texts += [self._model.decode(run), f"<extra_id_{self.vocab_size - 1 - i}>"]
                run = []
            else:
                # SentencePiece raises an error for ids that it does not have.
                run.append(i if 0 <= i < pieces else self._model.unk_id())
        texts.append(self._model.decode(run))
        return " ".join(part for part in texts if part)
