"""Convolutions along the length, and their decoding states."""

from __future__ import annotations

from typing import TYPE_CHECKING, Optional

import gin
import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow import layers
from mesh_tensorflow.transformer.transformer import TransformerLayer

if TYPE_CHECKING:
    from mesh_tensorflow.transformer.transformer._context import Context

__all__ = ["Conv1D", "Conv1DLayer"]


def activated(name: str, x: mtf.Tensor) -> mtf.Tensor:
    """Applies the mtf function of that name to `x`; returns `x` itself for "linear"."""
    return x if name == "linear" else getattr(mtf, name)(x)


class Conv1D(TransformerLayer):
    """Base class of convolutions; in decoding, the state is the last inputs."""

    def inputs_of_conv(self, context: Context, x: mtf.Tensor, filter_size: int) -> mtf.Tensor:
        """Returns the input of the convolution; records states when decoding.

        Args:
          context: the Context of this call of the model: its mode, positions, states and losses.
          x: a Tensor with dimensions [batch..., length, d_model]; without `length` in mode
            "incremental".
          filter_size: an integer.

        Returns:
          A Tensor with dimensions [batch..., length, d_model]: `x` with padding set to 0; in mode
          "incremental" the last `filter_size` inputs.
        """
        if context.mode == "incremental":
            return self.record_states_incremental_mode(context, x, filter_size)
        if context.mode == "first_part":
            self.record_states_first_part_mode(context, x, filter_size)
        if context.inputs is not None:
            return x * mtf.cast(mtf.not_equal(context.inputs, 0), x.dtype)
        nonpadding = getattr(context, "nonpadding", None)  # a user's own context class may lack it
        return x * mtf.cast(nonpadding, x.dtype) if isinstance(nonpadding, mtf.Tensor) else x

    def record_states_first_part_mode(
        self, context: Context, x: mtf.Tensor, filter_size: int, length_dim_name: str = "length"
    ) -> None:
        """Records the inputs before the position at which decoding begins.

        Args:
          context: the Context of this call of the model: its mode, positions, states and losses.
          x: a Tensor with dimensions [batch..., length, d_model].
          filter_size: an integer, how many.
          length_dim_name: a string, the name of their dimension.
        """
        window = mtf.Dimension("conv_window", filter_size)
        before = mtf.range(x.mesh, window, dtype=tf.int32) - filter_size
        # Indices before the beginning are negative, for which gather returns zeros.
        positions = mtf.add(
            context.initial_position,
            before,
            output_shape=context.initial_position.shape + window,  # type: ignore[union-attr]
        )
        length_dim = x.shape.dims[-2]
        last = mtf.gather(x, positions, length_dim)
        shape = x.shape - length_dim
        last = mtf.transpose(last, mtf.Shape([*shape.dims[:-1], window, shape.dims[-1]]))
        context.record_new_states([mtf.rename_dimension(last, window.name, length_dim_name)])

    def record_states_incremental_mode(
        self, context: Context, x: mtf.Tensor, filter_size: int, length_dim_name: str = "length"
    ) -> mtf.Tensor:
        """Records and returns the last inputs, of which `x` is the latest.

        Args:
          context: the Context of this call of the model: its mode, positions, states and losses.
          x: a Tensor with dimensions [batch..., d_model].
          filter_size: an integer, how many.
          length_dim_name: a string, the name of their dimension.

        Returns:
          A Tensor with dimensions [batch..., length, d_model].
        """
        filter_dim = mtf.Dimension(length_dim_name, filter_size)
        [old_state] = context.get_states(1)
        latest = mtf.constant(x.mesh, filter_size - 1, dtype=tf.int32)
        new_state = self.update_state(old_state, x, latest, filter_dim, dtype=x.dtype)
        context.record_new_states([new_state])
        return new_state

    def update_state(
        self,
        old_state: mtf.Tensor,
        x: mtf.Tensor,
        position: mtf.Tensor,
        filter_dim: mtf.Dimension,
        dtype: tf.DType,
    ) -> mtf.Tensor:
        """Shifts the state by one position and writes the new input.

        Args:
          old_state: a Tensor with dimensions [batch..., filter_dim, d_model].
          x: a Tensor with dimensions [batch..., d_model].
          position: an int32 Tensor, where `x` goes.
          filter_dim: a Dimension.
          dtype: a dtype.
        """
        moved = mtf.shift(old_state, -1, filter_dim, wrap=False)
        there = mtf.one_hot(position, filter_dim, dtype=dtype)
        return mtf.cast(moved, dtype) * (1.0 - there) + mtf.einsum(
            [mtf.cast(x, dtype), there], output_shape=old_state.shape
        )


@gin.configurable(module="mesh_tensorflow.transformer.transformer_layers")
class Conv1DLayer(Conv1D):
    """A convolution along the length.

    The filter is centered: half of its `filter_size` positions are before the current one and half
    after. Decoding has only those before, so a decoder should use a SeparableConv1DLayer instead.
    The variable is `conv2d/kernel`.
    """

    def __init__(self, filter_size: int, output_size: int, activation: str = "linear") -> None:
        """Creates the layer.

        Args:
          filter_size: an integer.
          output_size: an integer, the number of output channels.
          activation: the name of a function of mtf, or "linear".
        """
        self._filter_size = filter_size
        self._output_size = output_size
        self._activation = activation

    @property
    def filter_size(self) -> int:
        """The number of positions that the filter covers."""
        return self._filter_size

    def call(
        self, context: Context, x: mtf.Tensor, losses: Optional[list[mtf.Tensor]] = None
    ) -> mtf.Tensor:
        """Returns the output of the layer.

        Args:
          context: the Context of this call of the model: its mode, positions, states and losses.
          x: a Tensor with dimensions [batch..., length, d_model]; without `length` when decoding.
          losses: not used.

        Returns:
          A Tensor with `output_size` channels.
        """
        del losses
        x = self.inputs_of_conv(context, x, self.filter_size)
        channels = x.shape.dims[-1]
        padding = "VALID" if context.mode == "incremental" else "SAME"
        y = layers.conv1d(
            mtf.rename_dimension(x, channels.name, "input_dim"),
            mtf.Dimension(channels.name, self._output_size),
            filter_size=self.filter_size,
            padding=padding,
            variable_dtype=mtf.VariableDType(tf.float32, tf.float32, context.activation_dtype),
        )
        if context.mode == "incremental":  # one position is left, the current one
            y = mtf.reshape(y, mtf.Shape([*y.shape.dims[:-2], y.shape.dims[-1]]))
        return activated(self._activation, y)
