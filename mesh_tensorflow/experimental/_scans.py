"""Scans in TFRecord files: compressed records of an image and a label for each voxel."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, Optional

import tensorflow as tf2
import tensorflow.compat.v1 as tf

from mesh_tensorflow._mesh.variables import checkpoint_files

__all__ = ["COMPRESSION", "IMAGE", "LABEL", "mapped", "parse_scan", "read_scans", "scaled"]

COMPRESSION = "GZIP"
IMAGE, LABEL = "image/ct_image", "image/label"  # features: bytes of float32 values
_HOUNSFIELD = (-512.0, 512.0)  # mapped to 0 and 1


def scaled(image: tf.Tensor) -> tf.Tensor:
    """Scales intensities from [-512, 512] Hounsfield units to [0, 1], and clips them.

    Args:
      image: a tf.Tensor in Hounsfield units.
    """
    low, high = _HOUNSFIELD
    return tf.clip_by_value((image - low) / (high - low), 0.0, 1.0)


def parse_scan(record: tf.Tensor, reso: int) -> tuple[tf.Tensor, tf.Tensor]:
    """Parses a serialized tf.train.Example to (image, label), both float32 [reso, reso, reso].

    Args:
      record: a string tf scalar.
      reso: the size of a scan along each axis.
    """
    feature = tf.io.FixedLenFeature([], tf.string)
    found = tf.io.parse_single_example(record, {IMAGE: feature, LABEL: feature})
    image, label = (
        tf.reshape(tf.io.decode_raw(found[name], tf.float32), [reso] * 3) for name in (IMAGE, LABEL)
    )
    return image, label


def mapped(
    ds: tf.data.Dataset, fn: Callable[..., Any], at_a_time: Optional[int] = None
) -> tf.data.Dataset:
    """Returns a dataset with a function applied to its elements.

    Args:
      ds: a tf.data.Dataset.
      fn: a function of an element; the graph seed may seed its random operations.
      at_a_time: the number of elements to process in parallel; 1 if None.
    """
    with warnings.catch_warnings():
        # Seeding by the graph is intended.
        warnings.filterwarnings("ignore", message="Seed .* from outer graph")
        return ds.map(fn, num_parallel_calls=at_a_time)


def read_scans(flag: str, shuffled: bool, at_a_time: int) -> tf.data.Dataset:
    """Returns a tf.data.Dataset of the records in files, repeated without end.

    Args:
      flag: the name of the flag with the file pattern.
      shuffled: whether to read files in random order instead of by name.
      at_a_time: the number of files to read in parallel.

    Raises:
      ValueError: no file matches the pattern.
    """
    pattern = getattr(tf.flags.FLAGS, flag)
    files = checkpoint_files.matching(pattern) if pattern else []
    if not files:
        raise ValueError(
            f"--{flag}={pattern!r} names no file; give a pattern such as /data/scan-*.tfrecords"
        )
    ds = tf2.data.Dataset.from_tensor_slices(files)
    if shuffled:
        # The buffer holds all names: the order of each pass is uniformly random, and a new one.
        ds = ds.shuffle(len(files))
    # One file after another in evaluation, so that the order of scans does not depend on timing.
    options: dict[str, Any] = {"cycle_length": 1}
    if shuffled:
        options = {
            "cycle_length": min(at_a_time, len(files)),
            "num_parallel_calls": tf2.data.AUTOTUNE,
            "deterministic": False,
        }
    return ds.interleave(
        lambda path: tf2.data.TFRecordDataset(path, compression_type=COMPRESSION), **options
    ).repeat()
