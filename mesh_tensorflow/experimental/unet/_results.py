"""Writes predictions to files, and computes scores over all of them."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow import layers
from mesh_tensorflow.experimental.unet._flags import FLAGS
from mesh_tensorflow.experimental.unet._loss import probability_of
from mesh_tensorflow.experimental.unet._shapes import LESION, LIVER

__all__ = ["PostProcessor", "results_to_record"]

_NAMES = ("pred_liver", "pred_lesion", "label")
_EPSILON = 1e-6


def results_to_record(logits: mtf.Tensor, labels: mtf.Tensor) -> list[mtf.Tensor]:
    """Returns probabilities of liver and of lesions and labels of lesions, downsampled.

    Args:
      logits: a Tensor [batch, ..., label_c].
      labels: a Tensor of the same shape, one-hot.
    """
    classes = logits.shape.dims[-1]
    pool, size = (layers.avg_pool2d, 2) if FLAGS.sampled_2d_slices else (layers.avg_pool3d, 3)
    window = (FLAGS.pred_downsample,) * size
    p, of_lesions = mtf.softmax(logits, classes), mtf.slice(labels, LESION, 1, "label_c")
    p, of_lesions = pool(p, ksize=window), pool(of_lesions, ksize=window)
    return [
        probability_of(p, LIVER),
        probability_of(p, LESION),
        mtf.reduce_sum(of_lesions, reduced_dim=of_lesions.shape.dims[-1]),
    ]


def _joined(volume: np.ndarray) -> np.ndarray:
    """Joins the blocks of an image: [x blocks, y blocks, x, y, ...] to [x, y, ...]."""
    nx, ny, sx, sy, *rest = volume.shape
    return np.swapaxes(volume, 1, 2).reshape([nx * sx, ny * sy, *rest])


class PostProcessor:
    """Writes predictions to files, and computes scores over all images of an evaluation."""

    def __init__(self) -> None:
        """Creates a PostProcessor without results."""
        self._area_int: list[np.ndarray] = []
        self._area_sum: list[np.ndarray] = []
        self._instance_i = 0

    def record(self, results: Sequence[np.ndarray], pred_output_dir: str) -> None:
        """Records the results of a batch.

        Args:
          results: the values of the record of `unet_with_spatial_partition`, then the loss, then
            the global step.
          pred_output_dir: a directory for the files pred_liver_STEP_I.npy, pred_lesion_STEP_I.npy
            and, with --output_ground_truth, label_STEP_I.npy of each image; "" to write none.
        """
        *volumes, found, total, _, step = results
        for images in zip(*volumes):
            for name, image in zip(_NAMES, images):
                if not pred_output_dir or (name == "label" and not FLAGS.output_ground_truth):
                    continue
                path = os.path.join(pred_output_dir, f"{name}_{step}_{self._instance_i}.npy")
                with tf.io.gfile.GFile(path, "wb") as f:
                    np.save(f, _joined(np.asarray(image, np.float32)))
            self._instance_i += 1
        self._area_int.append(np.asarray(found, np.float32))
        self._area_sum.append(np.asarray(total, np.float32))

    def finish(self) -> dict[str, float]:
        """Returns and logs the Dice coefficients of lesions, and resets the results.

        Returns:
          "lesion_dice_per_case", the mean over images, and "lesion_dice_global", over all voxels.

        Raises:
          ValueError: nothing was recorded.
        """
        if not self._area_int:
            raise ValueError("PostProcessor.finish: no results were recorded; call record before")
        common, total = np.concatenate(self._area_int), np.concatenate(self._area_sum)
        scores = {
            "lesion_dice_per_case": float(np.mean(2.0 * common / (total + _EPSILON))),
            "lesion_dice_global": float(2.0 * common.sum() / (total.sum() + _EPSILON)),
        }
        tf.logging.info("Scores of %d images: %s", self._instance_i, scores)
        self._area_int, self._area_sum, self._instance_i = [], [], 0
        return scores
