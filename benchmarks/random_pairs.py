"""A dataset of random ids for programs of gin files: `--module_import=random_pairs`."""

from collections.abc import Mapping
from typing import Any

import gin
import tensorflow as tf

__all__ = ["random_pairs"]


@gin.configurable
def random_pairs(
    sequence_length: Mapping[str, int], vocabulary: Any, dataset_split: str = "train"
) -> tf.data.Dataset:
    """Returns examples of full length without end.

    Args:
      sequence_length: how many ids each feature has.
      vocabulary: ignored; ids are below 256.
      dataset_split: ignored.
    """
    del vocabulary, dataset_split

    def example(seed: tf.Tensor) -> dict[str, tf.Tensor]:
        return {
            feature: tf.random.stateless_uniform([length], [seed, number], 2, 256, tf.int32)
            for number, (feature, length) in enumerate(sequence_length.items())
        }

    return tf.data.Dataset.counter().map(example)
