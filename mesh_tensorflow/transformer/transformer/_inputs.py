"""Inputs of models: shifted targets, masks of inputs, and checks of ids."""

from __future__ import annotations

from typing import Optional

import gin
import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf

__all__ = ["autoregressive_inputs", "check_ids", "delimited_lm_inputs_mask", "shift_targets"]


def _shifted(ids: mtf.Tensor) -> mtf.Tensor:
    """Returns the ids shifted by one along the last dimension, with 0 in the first position."""
    return mtf.shift(ids, offset=1, dim=ids.shape.dims[-1], wrap=False)


def autoregressive_inputs(
    targets: mtf.Tensor, sequence_id: Optional[mtf.Tensor] = None
) -> mtf.Tensor:
    """Returns the inputs of an autoregressive model: the targets shifted by one position.

    The absolute value is taken, as a negative target is an id that need not be predicted.

    Args:
      targets: an integer Tensor with dimensions [..., length].
      sequence_id: a Tensor of the same shape that numbers the examples packed into a row. The
        inputs of each example begin with 0, not with the last target of the previous example.

    Returns:
      A Tensor of the shape of `targets`.
    """
    inputs = mtf.abs(_shifted(targets))
    if sequence_id is not None:
        goes_on = mtf.equal(sequence_id, _shifted(sequence_id))
        inputs *= mtf.cast(goes_on, inputs.dtype)
    return inputs


@gin.configurable(module="mesh_tensorflow.transformer.transformer")
def shift_targets(targets: mtf.Tensor, bos_id: int = 0, eos_id: int = 1) -> mtf.Tensor:
    """Returns the targets shifted by one position; an older form of `autoregressive_inputs`.

    Examples packed into a row are told apart by their end symbols.

    Args:
      targets: an integer Tensor with dimensions [..., length].
      bos_id: an integer, the first input of each example.
      eos_id: an integer, the end symbol.

    Returns:
      A Tensor of the shape of `targets`.
    """
    shifted = _shifted(targets)
    shifted *= mtf.cast(mtf.not_equal(shifted, eos_id), shifted.dtype)
    if bos_id:
        begins = mtf.logical_and(mtf.equal(shifted, 0), mtf.not_equal(targets, 0))
        shifted += mtf.cast(begins, shifted.dtype) * bos_id
    return shifted


def delimited_lm_inputs_mask(ids: mtf.Tensor, eos_id: int = 1) -> mtf.Tensor:
    """Returns a mask of the inputs, in rows of inputs, end, targets, end, inputs, ...

    Args:
      ids: an integer Tensor with dimensions [..., length].
      eos_id: an integer, the end symbol.

    Returns:
      A boolean Tensor of the shape of `ids`: whether an even number of end symbols comes before.
      The end symbol of the inputs is thus one of the inputs.
    """
    ends = mtf.to_int32(mtf.equal(ids, eos_id))
    ends_before = mtf.cumsum(ends, ids.shape.dims[-1], exclusive=True)
    return mtf.equal(mtf.mod(ends_before, 2), 0)


def check_ids(what: str, ids: mtf.Tensor, vocab_dim: mtf.Dimension) -> None:
    """Checks that ids are integers and, if their values are known, within the vocabulary.

    Args:
      what: a string for the error message: the caller, and what the ids are.
      ids: a Tensor.
      vocab_dim: the Dimension of ids, of the size of the vocabulary.

    Raises:
      ValueError: they are not.
    """
    if not ids.dtype.is_integer:
        raise ValueError(
            f"{what} {ids.name} {ids.shape} must be integers, got {ids.dtype.name}; use "
            "mtf.to_int32"
        )
    if not isinstance(ids.operation, mtf.ImportOperation):
        return
    value = tf.get_static_value(ids.operation._tf_tensor)
    if value is not None and value.size and value.max() >= vocab_dim.size:
        raise ValueError(
            f"{what} {ids.name} {ids.shape} have the id {value.max()}, but the vocabulary "
            f"{vocab_dim.name}={vocab_dim.size} ends at {vocab_dim.size - 1}; make the model "
            "with a larger vocabulary size"
        )
