"""Losses and scores of a segmentation into other, liver and lesion."""

from __future__ import annotations

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow.experimental.unet._flags import FLAGS
from mesh_tensorflow.experimental.unet._shapes import LESION, LIVER

__all__ = ["losses_and_scores", "probability_of"]

_EPSILON = 1e-6  # of scores, where neither prediction nor label has a lesion


def probability_of(x: mtf.Tensor, number: int) -> mtf.Tensor:
    """Returns the values of one class of a Tensor with the dimension label_c.

    Args:
      x: a Tensor [..., label_c].
      number: the index of the class.
    """
    one = mtf.slice(x, number, 1, "label_c")
    return mtf.reduce_sum(one, reduced_dim=one.shape.dims[-1])


def _overlap(a: mtf.Tensor, b: mtf.Tensor) -> tuple[mtf.Tensor, mtf.Tensor]:
    """Returns (the sum of a * b, the sum of a + b) for each image."""
    batch = mtf.Shape([a.shape.dims[0]])
    return mtf.reduce_sum(a * b, output_shape=batch), mtf.reduce_sum(a + b, output_shape=batch)


def _dice(common: mtf.Tensor, total: mtf.Tensor, factor: float, epsilon: float) -> tuple:
    """Returns `factor` times Dice coefficients: (the mean over images, the one over all voxels)."""
    per_case = mtf.reduce_mean(factor * common / (total + epsilon))
    of_all = factor * mtf.reduce_sum(common) / (mtf.reduce_sum(total) + epsilon)
    return per_case, of_all


def _cross_entropy(
    logits: mtf.Tensor, labels: mtf.Tensor, liver: mtf.Tensor, lesion: mtf.Tensor
) -> mtf.Tensor:
    """Returns the mean of the weighted cross entropy over voxels."""
    classes = labels.shape.dims[-1]
    log_p = mtf.log_softmax(logits, classes)
    xen = mtf.negative(mtf.reduce_sum(log_p * labels, reduced_dim=classes))
    # The weight of lesions is relative to that of the liver, so that losses stay comparable with
    # those of models trained before.
    more_for_lesions = FLAGS.xen_lesion_weight - FLAGS.xen_liver_weight
    if FLAGS.xen_liver_weight < 0 or more_for_lesions < -1:
        raise ValueError(
            f"--xen_liver_weight={FLAGS.xen_liver_weight} and --xen_lesion_weight="
            f"{FLAGS.xen_lesion_weight} reward wrong predictions: a voxel of a lesion weighs 1 + "
            "xen_lesion_weight - xen_liver_weight, and one of the liver xen_liver_weight. Choose a "
            "larger weight of lesions"
        )
    weights = 1.0 + (FLAGS.xen_liver_weight - 1.0) * liver + more_for_lesions * lesion
    return mtf.reduce_mean(xen * weights)


def losses_and_scores(
    logits: mtf.Tensor, labels: mtf.Tensor
) -> tuple[mtf.Tensor, dict[str, mtf.Tensor], tuple[mtf.Tensor, mtf.Tensor]]:
    """Computes the loss and the scores of a segmentation.

    The loss is a weighted sum of the Dice loss of lesions (Milletari, Navab and Ahmadi, "V-Net",
    2016), as the mean of the losses per image and over all voxels, and of the cross entropy.

    Args:
      logits: a Tensor [batch, ..., label_c].
      labels: a Tensor of the same shape, one-hot.

    Returns:
      (the loss, scores by name, overlaps). The overlaps are, for each image [batch], the number of
      lesion voxels that were predicted correctly, and the sum of the numbers of predicted and of
      labeled lesion voxels.
    """
    classes = labels.shape.dims[-1]
    true, found = mtf.argmax(labels, classes), mtf.argmax(logits, classes)
    liver, lesion, found_lesion = (
        mtf.cast(mtf.equal(x, number), logits.dtype)
        for x, number in ((true, LIVER), (true, LESION), (found, LESION))
    )
    accuracy = mtf.cast(mtf.equal(true, found), logits.dtype)
    scores = {
        "lesion_pred_ratio": mtf.reduce_mean(found_lesion),
        "lesion_label_ratio": mtf.reduce_mean(lesion),
        "accuracy_of_all_classes": mtf.reduce_mean(accuracy),
    }
    xen = _cross_entropy(logits, labels, liver, lesion)
    p_lesion = probability_of(mtf.softmax(logits, classes), LESION)
    loss_per_case, loss_global = _dice(*_overlap(p_lesion, lesion), -2.0, FLAGS.dice_epsilon)
    loss_dice = (loss_per_case + loss_global) * 0.5
    loss = FLAGS.dice_loss_weight * loss_dice + (1.0 - FLAGS.dice_loss_weight) * xen
    areas = _overlap(found_lesion, lesion)
    dice_per_case, dice_global = _dice(*areas, 2.0, _EPSILON)
    scores.update(
        lesion_dice_per_case=dice_per_case,
        lesion_dice_global=dice_global,
        loss_xen=xen,
        loss_dice=loss_dice,
        loss_dice_per_case=loss_per_case,
        loss_dice_global=loss_global,
    )
    return loss, scores, areas
