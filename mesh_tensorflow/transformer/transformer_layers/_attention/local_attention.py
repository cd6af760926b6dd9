"""Attention to a window of nearby positions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Optional

import gin
import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow.transformer import attention
from mesh_tensorflow.transformer.transformer_layers._attention import states as _states
from mesh_tensorflow.transformer.transformer_layers._attention.self_attention import SelfAttention

if TYPE_CHECKING:
    from mesh_tensorflow.transformer.transformer._context import Context

__all__ = ["LocalSelfAttention"]


@gin.configurable(module="mesh_tensorflow.transformer.transformer_layers")
class LocalSelfAttention(SelfAttention):
    """Self-attention to the `radius` positions up to each one, and as many after it in an encoder.

    In decoding, the states are ring buffers of `radius` positions.

    Attributes:
      radius: an integer.
    """

    def __init__(
        self,
        radius: int = 128,
        num_heads: int = 8,
        num_memory_heads: int = 0,
        key_value_size: int = 128,
        shared_kv: bool = False,
        dropout_rate: float = 0.0,
        attention_kwargs: Optional[dict[str, Any]] = None,
    ) -> None:
        """Creates the layer.

        Args:
          radius: the number of positions on each side; those before include the position itself.
          num_heads: this and the following arguments are those of `SelfAttention`.
          num_memory_heads: an integer.
          key_value_size: an integer.
          shared_kv: a bool.
          dropout_rate: the share of elements that are dropped in training, from 0 to less than 1.
          attention_kwargs: a dictionary of further arguments of `attention`, or None.

        Raises:
          ValueError: the radius is below 1.
        """
        super().__init__(
            num_heads=num_heads,
            num_memory_heads=num_memory_heads,
            key_value_size=key_value_size,
            shared_kv=shared_kv,
            dropout_rate=dropout_rate,
            attention_kwargs=attention_kwargs,
        )
        if radius < 1:
            raise ValueError(f"LocalSelfAttention: radius must be 1 or more, got {radius}")
        self.radius = radius

    def call(
        self, context: Context, x: mtf.Tensor, losses: Optional[list[mtf.Tensor]] = None
    ) -> mtf.Tensor:
        """Returns the local self-attention output of each position.

        Args:
          context: the Context of this call of the model: its mode, positions, states and losses.
          x: a Tensor with dimensions [batch..., length, d_model].
          losses: a list or None.

        Returns:
          A Tensor of the shape of `x`.
        """
        params = self.make_params(context)
        q = params.compute_q(x)
        if params.shared_kv:
            new = [params.compute_kv(x)]
        else:
            new = [params.compute_k(x), params.compute_v(x)]
        if context.mode == "incremental":
            o = self._attend_to_window(context, q, new)
        else:
            if context.mode == "first_part":
                context.record_new_states([self._last_positions(context, t) for t in new])
            o = self._attend_to_blocks(context, q, new)
        y = params.compute_output(o, output_shape=x.shape)
        return self.layer_output_from_attention_output(context, y, losses)

    def _attend_to_blocks(
        self, context: Context, q: mtf.Tensor, kv: list[mtf.Tensor]
    ) -> mtf.Tensor:
        model = context.model
        num_splits = 1
        if model.layout is not None and model.mesh_shape is not None:
            num_splits = mtf.tensor_dim_to_mesh_dim_size(
                model.layout, model.mesh_shape, context.length_dim
            )
        sequence_id = (
            context.sequence_id if context.subsequence_id is None else context.subsequence_id
        )
        priorities = {}
        # Otherwise the window is one-sided, which hides later positions already.
        if not model.fully_autoregressive:
            priorities["write_priority"] = context.write_priority
            priorities["read_priority"] = context.read_priority
        return attention.local_attention_1d(
            q,
            kv[0],
            kv[-1],
            length_dim=context.length_dim,
            key_dim=self.kv_dim,
            value_dim=self.kv_dim,
            fully_autoregressive=model.fully_autoregressive,
            length_dim_num_splits=num_splits,
            radius=self.radius,
            sequence_id=sequence_id,
            attention_kwargs={"context": context, **self.attention_kwargs_from_context(context)},
            **priorities,
        )

    def _state_dim(self, context: Context) -> mtf.Dimension:
        """Returns the Dimension of the states: at most as long as the sequence."""
        window = self.window_dim
        return mtf.Dimension(window.name, min(window.size, context.length_dim.size))

    def _last_positions(self, context: Context, x: mtf.Tensor) -> mtf.Tensor:
        """Returns keys or values of the last positions before decoding begins.

        Args:
          context: a Context in mode "first_part".
          x: a Tensor with dimensions [batch..., length, ...].

        Returns:
          A Tensor with dimensions [batch..., window, ...]; position p is at p modulo its size.
        """
        window = self._state_dim(context)
        slot = mtf.range(context.mesh, window, tf.int32)
        begin = context.initial_position
        if begin is None:
            begin = mtf.zeros(context.mesh, mtf.Shape([]), dtype=tf.int32)
        last = begin - 1
        # The latest position p up to the last one with p mod window = slot; it is negative for
        # slots that are empty yet, which `_attend_to_window` hides.
        position = last - mtf.mod(last - slot, window.size)
        return mtf.gather(
            x,
            position,
            context.length_dim,
            mtf.replace_dimensions(x.shape, context.length_dim, window),
        )

    def _attend_to_window(
        self, context: Context, q: mtf.Tensor, new: list[mtf.Tensor]
    ) -> mtf.Tensor:
        window = self._state_dim(context)
        here = mtf.mod(context.position, window.size)
        # This overwrites the position of one window ago, which is just out of reach.
        kv = _states.updated_states(context, new, window, position=here)
        slot = mtf.range(context.mesh, window, tf.int32)
        # The latest position up to the current one that has this slot in the ring buffer.
        position = context.position - mtf.mod(context.position - slot, window.size)
        # Slots that nothing has been written to yet would be those of positions before the first.
        visible = mtf.greater_equal(position, 0)
        bias = attention.visibility_mask_to_attention_bias(visible, context.activation_dtype)
        return self._attend(context, q, kv[0], kv[-1], window, bias)

    def min_relative_position(self, context: Context) -> Optional[int]:
        """Returns how far back a position attends, a negative number.

        Args:
          context: the Context of this call of the model: its mode, positions, states and losses.
        """
        return 1 - self.radius

    def max_relative_position(self, context: Context) -> Optional[int]:
        """Returns how far ahead a position attends; None if a mask hides later positions.

        Args:
          context: the Context of this call of the model: its mode, positions, states and losses.
        """
        return None if context.model.fully_autoregressive else self.radius

    @property
    def window_dim(self) -> mtf.Dimension:
        """The Dimension of the states."""
        return mtf.Dimension("window", self.radius)
