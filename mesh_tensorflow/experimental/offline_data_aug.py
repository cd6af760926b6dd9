r"""Augments scans of livers once, before training.

python -m mesh_tensorflow.experimental.offline_data_aug --process_no=0 --num_data_aug=1000 \
        --input_file_pattern="/data/scan-*.tfrecords" --output_folder=/data/augmented

Reads files of scans in Hounsfield units, and writes --num_data_aug files of one augmented scan
each, with intensities between 0 and 1. Several processes can write to one folder, each with its own
--process_no.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Union

import numpy as np
import tensorflow.compat.v1 as tf
from absl import flags

from mesh_tensorflow._programs import FLAGS, define, run_with_flags
from mesh_tensorflow._progress import Progress
from mesh_tensorflow.experimental import data_aug_lib

__all__ = ["FLAGS", "apply_data_aug", "main", "save_to_tfrecord"]

define(
    # Without a number as its default, so that it has to be given.
    [(flags.DEFINE_integer, "process_no", None, "Number of this process, a part of file names.")],
    ct_resolution=(128, "Size of a scan along each of its three axes, in voxels."),
    input_file_pattern=("", "Files of scans in Hounsfield units."),
    output_folder=("", "Directory of the files that are written."),
    output_file_prefix=("augmented", "How their names begin."),
    num_data_aug=(1000, "How many scans to write."),
    gen_fake_probability=(0.5, "How often lesions are made up."),
    min_fake_lesion_ratio=(0.05, "Least part of the liver that these are, on average."),
)


def save_to_tfrecord(
    image: np.ndarray,
    label: np.ndarray,
    process_no: Union[int, str],
    idx: int,
    output_path: str,
    output_file_prefix: str,
) -> None:
    """Writes one scan to the file PREFIX-PROCESS-INDEX.tfrecords, compressed.

    Args:
      image: an array [x, y, z]; written as float32.
      label: the classes of the voxels, an array of the same shape; written as float32.
      process_no: the number of the process.
      idx: the number of the scan.
      output_path: an existing directory.
      output_file_prefix: the prefix of the file name.

    Raises:
      ValueError: image and label have different shapes.
    """
    if np.shape(image) != np.shape(label):
        raise ValueError(
            f"save_to_tfrecord: the image has the shape {np.shape(image)}, but its label "
            f"{np.shape(label)}; each voxel needs a class"
        )
    features = {
        name: tf.train.Feature(
            bytes_list=tf.train.BytesList(value=[np.ascontiguousarray(array, np.float32).tobytes()])
        )
        for name, array in ((data_aug_lib.IMAGE, image), (data_aug_lib.LABEL, label))
    }
    example = tf.train.Example(features=tf.train.Features(feature=features))
    path = os.path.join(output_path, f"{output_file_prefix}-{process_no}-{idx}.tfrecords")
    with tf.io.TFRecordWriter(path, data_aug_lib.COMPRESSION) as writer:
        writer.write(example.SerializeToString())


def _augmented(record: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns a scan with synthetic lesions, rotated at random."""
    image, label = data_aug_lib.parse_scan(record, FLAGS.ct_resolution)
    image, label = data_aug_lib.maybe_gen_fake_data_based_on_real_data(
        data_aug_lib.scaled(image),
        label,
        FLAGS.ct_resolution,
        FLAGS.min_fake_lesion_ratio,
        FLAGS.gen_fake_probability,
    )
    for axis in range(3):
        image, label = data_aug_lib.maybe_rot180(image, label, axis)
    # Changed lesions may be brighter or darker than the range that training expects.
    return tf.clip_by_value(image, 0.0, 1.0), label


def apply_data_aug() -> None:
    """Reads, augments and writes scans, as configured by flags.

    The seed of the default graph seeds the random operations.

    Raises:
      ValueError: --output_folder, --process_no or the input files are missing.
    """
    # Not `not FLAGS.process_no`, as the first process is number 0.
    if not FLAGS.output_folder or FLAGS.process_no is None:
        raise ValueError(
            "--output_folder must name a directory and --process_no must be a number, else "
            "processes would write over each other's files"
        )
    tf.io.gfile.makedirs(FLAGS.output_folder)
    # A new graph has no seed, so it is given that of the caller's.
    seed = tf.get_default_graph().seed
    with tf.Graph().as_default():
        tf.set_random_seed(seed)
        ds = data_aug_lib.mapped(data_aug_lib.read_scans("input_file_pattern", True, 1), _augmented)
        # Another scan is augmented while one is written.
        scan = tf.data.make_one_shot_iterator(ds.prefetch(1)).get_next()
        with tf.Session() as session, Progress(FLAGS.num_data_aug, "augment", "scan") as progress:
            for idx in range(FLAGS.num_data_aug):
                image, label = session.run(scan)
                save_to_tfrecord(
                    image,
                    label,
                    FLAGS.process_no,
                    idx,
                    FLAGS.output_folder,
                    FLAGS.output_file_prefix,
                )
                progress.update()


def main(argv: Sequence[str]) -> None:
    """Calls `apply_data_aug`.

    Args:
      argv: the remaining command-line arguments.

    Raises:
      ValueError: a flag without which there is nothing to do is not set.
    """
    del argv
    needed = ("input_file_pattern", "output_folder", "process_no")
    missing = [f"--{name}" for name in needed if getattr(FLAGS, name) in ("", None)]
    if missing:
        raise ValueError(f"{', '.join(missing)} must be given")
    apply_data_aug()


if __name__ == "__main__":
    run_with_flags(main, "mesh_tensorflow.experimental.offline_data_aug")
