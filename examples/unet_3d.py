r"""Trains a 3-D U-Net to segment lesions in volumes that are split over a mesh.

Examples of use:

    python examples/unet_3d.py
    python examples/unet_3d.py --quick
    python examples/unet_3d.py --nouse_tpu --mesh_shape=all:4 --layout=batch:all
    python examples/unet_3d.py --layout=auto

The volumes are synthetic and noisy: a "liver" with up to three darker balls as lesions, next to
other organs that are as dark as the lesions. Commands of the package do the rest:
`offline_data_aug` augments the volumes with rotations and artificial lesions, and `model_executor`
trains on them and evaluates on other volumes. In the default layout, each volume is cut into 2 by 2
blocks, one for each processor of a 2 by 2 mesh; convolutions exchange halos with neighbors. All
processors run the same program; with --nouse_tpu, each operation is placed on a device instead.

The score is the Dice coefficient of lesions, 2 * (voxels found) / (voxels found + voxels there),
over all volumes of an evaluation: about 0.9 after a minute on two cores; expect 0.7 with --quick,
in less than half of that. All flags of `mesh_tensorflow.experimental.unet` and
`model_executor` can be given too.
"""

from __future__ import annotations

import pathlib
import sys
import tempfile
import time
from typing import Any

sys.path.append(str(pathlib.Path(__file__).resolve().parent))

import command_line
from absl import app, flags

FLAGS = flags.FLAGS
QUICK_DICE = 0.7  # the lower bound with --quick
LIVER, LESION = 1, 2
# Hounsfield units of the materials in a volume.
AIR, TISSUE, LIVER_HU, LESION_HU = -300.0, -50.0, 110.0, 20.0
NOISE = 25.0
SCANS = {"train": 16, "eval": 8}

# Default flags of this example; the second column is for --quick.
SETTINGS: dict[str, tuple[Any, Any]] = {
    "mesh_shape": ("rows:2,columns:2", "rows:2,columns:2"),
    "layout": ("image_nx_block:rows,image_ny_block:columns",) * 2,
    "image_nx_block": (2, 2),
    "image_ny_block": (2, 2),
    "ct_resolution": (32, 16),
    "network_depth": (3, 2),
    "n_base_filters": (8, 8),
    "n_conv_per_block": (1, 1),
    "dropout_keep_p": (1.0, 1.0),
    "mtf_dtype": ("float32", "float32"),
    "batch_size_train": (4, 4),
    "batch_size_eval": (8, 8),
    "num_eval_iterations_per_loop": (1, 1),
    "num_train_iterations_per_loop": (60, 50),
    "num_training_loops": (5, 6),
    "num_data_aug": (64, 48),
    "lr": (0.03, 0.03),
    "lr_drop_steps": (75.0, 75.0),
    "pred_downsample": (1, 1),
    "n_dataset_processes": (2, 2),
}
OWN_FLAGS: tuple[command_line.Flag, ...] = (
    (flags.DEFINE_bool, "quick", False, "Small volumes and few steps."),
    (flags.DEFINE_integer, "seed", 0, "Seed of the volumes."),
)


import numpy as np
import tensorflow.compat.v1 as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.experimental import model_executor, offline_data_aug


def ball(reso: int, center: np.ndarray, radii: Any) -> np.ndarray:
    """Returns the mask of an ellipsoid, a bool array [reso, reso, reso]."""
    grid = np.stack(np.meshgrid(*[np.arange(reso)] * 3, indexing="ij"), -1)
    return np.square((grid - center) / radii).sum(-1) < 1


def scan(random: np.random.RandomState, reso: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns (image in Hounsfield units, label) of a generated volume [reso, reso, reso]."""
    middle = np.full(3, (reso - 1) / 2)
    image = np.where(ball(reso, middle, 0.48 * reso), TISSUE, AIR)
    center = middle + random.uniform(-0.06, 0.06, 3) * reso
    radii = random.uniform(0.26, 0.34, 3) * reso
    liver = ball(reso, center, radii)
    image[liver], label = LIVER_HU, liver.astype(np.float32) * LIVER
    for _ in range(random.randint(1, 4)):
        at = center + random.uniform(-0.5, 0.5, 3) * radii
        lesion = ball(reso, at, random.uniform(0.1, 0.16) * reso) & liver
        image[lesion], label[lesion] = LESION_HU, LESION
    for _ in range(4):  # other organs, as dark as lesions
        away = random.normal(size=3)
        at = center + away / np.linalg.norm(away) * radii * 1.25
        organ = ball(reso, at, 0.09 * reso) & ~liver
        image[organ] = LESION_HU
    return image + NOISE * random.normal(size=image.shape), label


def write_scans(folder: str, reso: int, seed: int) -> None:
    """Writes generated volumes, with separate files for training and evaluation."""
    random = np.random.RandomState(seed)
    for kind, count in SCANS.items():
        for i in range(count):
            offline_data_aug.save_to_tfrecord(*scan(random, reso), 0, i, folder, f"{kind}-scan")


def train(folder: str) -> float:
    """Augments the volumes in a folder, trains, and returns the last Dice coefficient."""
    FLAGS.input_file_pattern = f"{folder}/train-scan-*"
    FLAGS.output_folder, FLAGS.process_no = folder, 0
    offline_data_aug.apply_data_aug()
    FLAGS.train_file_pattern = f"{folder}/{FLAGS.output_file_prefix}-*"
    FLAGS.eval_file_pattern = f"{folder}/eval-scan-*"
    start = time.time()

    def report(step: int, trained: dict[str, float], tested: dict[str, float]) -> None:
        total = FLAGS.num_training_loops * FLAGS.num_train_iterations_per_loop
        print(
            f"step {step}/{total}  loss {trained['loss']:.3f}  held out: voxels right "
            f"{tested['accuracy_of_all_classes']:.2%}, lesion Dice "
            f"{tested['lesion_dice_global']:.3f}  {time.time() - start:.0f} s",
            flush=True,
        )

    return model_executor.train_and_eval(report).get("lesion_dice_global", 0.0)


@mtf.strict()
def main(_: Any) -> None:
    """Sets default flags, generates volumes, trains and prints the score."""
    for name, values in SETTINGS.items():
        if not FLAGS[name].present:
            setattr(FLAGS, name, values[FLAGS.quick])
    tf.logging.set_verbosity(tf.logging.ERROR)
    tf.set_random_seed(FLAGS.seed)
    with tempfile.TemporaryDirectory() as folder:
        write_scans(folder, FLAGS.ct_resolution, FLAGS.seed)
        print(
            f"{SCANS['train']} volumes of {FLAGS.ct_resolution} voxels a side to train on, "
            f"{SCANS['eval']} held out; mesh {FLAGS.mesh_shape}, layout {FLAGS.layout}",
            flush=True,
        )
        try:
            dice = train(folder)
        except (ValueError, OSError) as error:
            command_line.fail(error)
    print(f"lesion Dice {dice:.3f} on held-out volumes")


if __name__ == "__main__":
    command_line.define(OWN_FLAGS)
    tf.disable_eager_execution()
    app.run(main)
