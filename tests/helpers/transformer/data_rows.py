"""Data sets of few examples, and what is in them."""

import numpy as np
import tensorflow.compat.v1 as tf

from mesh_tensorflow.transformer import vocabulary


def rows(dataset):
    """Returns the elements of a data set, as lists."""
    return [{k: np.asarray(v).tolist() for k, v in e.items()} for e in dataset.as_numpy_iterator()]


def strings(**features):
    return tf.data.Dataset.from_tensor_slices(features)


class Small(vocabulary.Vocabulary):
    """A vocabulary of ten ids."""

    vocab_size = 10
