"""The layer stack of the Universal Transformer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Optional, Union

import gin
import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow import layers as mtf_layers
from mesh_tensorflow.transformer import transformer
from mesh_tensorflow.transformer.transformer._context import Context, nonpadding_of
from mesh_tensorflow.transformer.universal_transformer._gating import Gates
from mesh_tensorflow.transformer.universal_transformer._timing import TimingSignals

__all__ = ["UTLayerStack"]


@gin.configurable(module="mesh_tensorflow.transformer.universal_transformer")
class UTLayerStack(TimingSignals, Gates, transformer.TransformerLayer):
    """Layers that are applied recurrently, with the same variables at each step.

    See Dehghani et al., "Universal transformers" (2018). With `recurrence_type` "act", the number
    of steps adapts to each position; see Graves, "Adaptive computation time for recurrent neural
    networks" (2016).

    Attributes:
      num_vanilla_transformer_layers: the number of times that the layers are applied before and
        after the recurrence, if at all.
      couple_carry_transform_gates: whether the gates of a highway sum to 1.
      act_type: "basic", "accumulated", "global" or "random".
      recurrence_type: "basic", "highway" or "act".
      act_max_steps: the number of the last step with "act", from 0.
      act_epsilon: a position halts when the sum of its halting probabilities exceeds 1 -
        act_epsilon.
      num_rec_steps: the number of steps without "act", and the number of step signals.
      num_inrecurrence_layers: the number of times that a step applies the layers.
      position_start_index: None, "random" or "step".
      add_or_concat_timing_signal: "add" or "concat".
      step_timing_signal_type: "learned" or "sinusoid".
      add_position_timing_signal: whether each step begins with a position signal.
      add_step_timing_signal: whether each step begins with a step signal.
      mix_with_transformer_before_ut: whether the layers are also applied before the recurrence.
      mix_with_transformer_after_ut: whether the layers are also applied after the recurrence.
      gates_inputs: the inputs of the highway gates, as letters: "s" the state, "t" the transformed
        state, "i" the inputs of the recurrence.
      gate_ffn_layer: "dense" or "dense_relu_dense".
      use_gated_transformer: whether layers have gates.
      gating_type: the type of these gates, "highway" or "gru".
    """

    def __init__(
        self,
        layers: Sequence[Any],
        dropout_rate: float = 0.0,
        norm_epsilon: float = 1e-6,
        num_vanilla_transformer_layers: int = 2,
        couple_carry_transform_gates: bool = True,
        act_type: str = gin.REQUIRED,
        recurrence_type: str = gin.REQUIRED,
        act_max_steps: int = gin.REQUIRED,
        act_epsilon: float = gin.REQUIRED,
        num_rec_steps: int = gin.REQUIRED,
        num_inrecurrence_layers: int = gin.REQUIRED,
        position_start_index: Optional[str] = gin.REQUIRED,
        add_or_concat_timing_signal: str = gin.REQUIRED,
        step_timing_signal_type: str = gin.REQUIRED,
        add_position_timing_signal: bool = gin.REQUIRED,
        add_step_timing_signal: bool = gin.REQUIRED,
        mix_with_transformer_before_ut: bool = gin.REQUIRED,
        mix_with_transformer_after_ut: bool = gin.REQUIRED,
        gates_inputs: str = gin.REQUIRED,
        gate_ffn_layer: str = gin.REQUIRED,
        use_gated_transformer: bool = gin.REQUIRED,
        gating_type: str = gin.REQUIRED,
    ):
        """Creates the stack; see the attributes.

        Args:
          layers: a list of TransformerLayers with names.
          dropout_rate: a number, the dropout rate of the inputs, of each layer's output, and of the
            output.
          norm_epsilon: a number, the epsilon of the layer norms.
          num_vanilla_transformer_layers: an integer.
          couple_carry_transform_gates: a boolean.
          act_type: a string.
          recurrence_type: a string.
          act_max_steps: an integer.
          act_epsilon: a number.
          num_rec_steps: an integer.
          num_inrecurrence_layers: an integer.
          position_start_index: a string or None.
          add_or_concat_timing_signal: a string.
          step_timing_signal_type: a string.
          add_position_timing_signal: a boolean.
          add_step_timing_signal: a boolean.
          mix_with_transformer_before_ut: a boolean.
          mix_with_transformer_after_ut: a boolean.
          gates_inputs: a string.
          gate_ffn_layer: a string.
          use_gated_transformer: a boolean.
          gating_type: a string.
        """
        self._layers = layers
        self._dropout_rate = dropout_rate
        self._norm_epsilon = norm_epsilon
        self.num_vanilla_transformer_layers = num_vanilla_transformer_layers
        self.couple_carry_transform_gates = couple_carry_transform_gates
        self.act_type = act_type
        self.recurrence_type = recurrence_type
        self.act_max_steps = act_max_steps
        self.act_epsilon = act_epsilon
        self.num_rec_steps = num_rec_steps
        self.num_inrecurrence_layers = num_inrecurrence_layers
        self.position_start_index = position_start_index
        self.add_or_concat_timing_signal = add_or_concat_timing_signal
        self.step_timing_signal_type = step_timing_signal_type
        self.add_position_timing_signal = add_position_timing_signal
        self.add_step_timing_signal = add_step_timing_signal
        self.mix_with_transformer_before_ut = mix_with_transformer_before_ut
        self.mix_with_transformer_after_ut = mix_with_transformer_after_ut
        self.gates_inputs = gates_inputs
        self.gate_ffn_layer = gate_ffn_layer
        self.use_gated_transformer = use_gated_transformer
        self.gating_type = gating_type

    @property
    def num_layers(self) -> int:
        """The number of layers."""
        return len(self.layers)

    @property
    def layers(self) -> Sequence[Any]:
        """The layers."""
        return self._layers

    def call(self, context: Context, x: mtf.Tensor) -> mtf.Tensor:
        """Returns the output of the stack; see TransformerLayer.call."""
        recurrences: dict[str, Callable] = {
            "basic": self.ut_basic,
            "highway": lambda context, x, mask: self.ut_highway(context, (x, x, x), mask),
            "act": self.act_layer,
        }
        if self.recurrence_type not in recurrences:
            raise ValueError(
                f"UTLayerStack: recurrence_type={self.recurrence_type!r} is none of "
                f"{', '.join(map(repr, recurrences))}"
            )
        nonpadding = nonpadding_of(context)
        mask = 1.0 if nonpadding is None else nonpadding
        x = self._dropout(context, x)
        context.layer_outputs.append(x)
        if self.mix_with_transformer_before_ut:
            x = self._vanilla_layers(context, x, mask)
        x = recurrences[self.recurrence_type](context, x, mask)
        if self.mix_with_transformer_after_ut:
            x = self._vanilla_layers(context, x, mask)
        x = mtf_layers.layer_norm(x, x.shape.dims[-1], self._norm_epsilon)
        x = self._dropout(context, x) * mask
        context.layer_outputs.append(x)
        return x

    def _dropout(self, context: Context, x: mtf.Tensor) -> mtf.Tensor:
        if not context.train or not self._dropout_rate:
            return x
        return mtf.dropout(
            x,
            context.train,
            rate=self._dropout_rate,
            noise_shape=x.shape - context.length_dim,
        )

    def _vanilla_layers(
        self, context: Context, x: mtf.Tensor, mask: Union[mtf.Tensor, float]
    ) -> mtf.Tensor:
        for _ in range(self.num_vanilla_transformer_layers):
            x = self.vanilla_transformer_layer(context, x, mask)
        return x

    def vanilla_transformer_layer(
        self, context: Context, x: mtf.Tensor, mask: Union[mtf.Tensor, float]
    ) -> mtf.Tensor:
        """Applies the layers once, each after a norm and with a residual connection.

        Args:
          context: the Context of this call of the model: its mode, positions, states and losses.
          x: a Tensor with dimensions [..., d_model].
          mask: a Tensor or a number, 0 at padding.
        """
        for number, layer in enumerate(self._layers):
            with tf.variable_scope(layer.name or ""):
                normed = self._masked_norm(x, mask)
                with tf.variable_scope(type(layer).__name__):
                    y = layer.call(context, normed)
                    if y.shape != x.shape:
                        raise ValueError(
                            f"UTLayerStack: layer {type(layer).__name__} made {y.shape} of "
                            f"{x.shape}; a layer of a stack must keep the shape"
                        )
                    if self.use_gated_transformer:
                        y = self.gating(context, x, y, mask)
                x += self._dropout(context, y)
            if number != len(self._layers) - 1:
                context.layer_outputs.append(x)
            context.layer_index += 1
        return x

    def _step(self, context: Context, x: mtf.Tensor, mask: Union[mtf.Tensor, float]) -> mtf.Tensor:
        for _ in range(self.num_inrecurrence_layers):
            x = self.vanilla_transformer_layer(context, x, mask)
        return x

    def ut_basic(
        self, context: Context, x: mtf.Tensor, mask: Union[mtf.Tensor, float]
    ) -> mtf.Tensor:
        """Applies the layers `num_rec_steps` times.

        Args:
          context: the Context of this call of the model: its mode, positions, states and losses.
          x: a Tensor with dimensions [..., d_model].
          mask: a Tensor or a number, 0 at padding.
        """
        for step in range(self.num_rec_steps):
            x = self._step(context, self.step_preprocess(context, x, step), mask)
        return x

    def ut_highway(
        self, context: Context, layer_inputs: Sequence[mtf.Tensor], mask: Union[mtf.Tensor, float]
    ) -> mtf.Tensor:
        """Applies the layers `num_rec_steps` times, with highway gates around each step.

        See Srivastava et al., "Highway networks" (2015).

        Args:
          context: the Context of this call of the model: its mode, positions, states and losses.
          layer_inputs: the state, the inputs of the recurrence, and an unused memory:
            Tensors with dimensions [..., d_model].
          mask: a Tensor or a number, 0 at padding.
        """
        state, inputs, *_ = layer_inputs
        for step in range(self.num_rec_steps):
            transformed = self._step(context, self.step_preprocess(context, state, step), mask)
            choices = {"s": state, "t": transformed, "i": inputs}
            chosen = [x for letter, x in choices.items() if letter in self.gates_inputs]
            transform, carry = self._transform_and_carry(
                context, mask, chosen, self.couple_carry_transform_gates
            )
            state = state * carry + transformed * transform
            mtf.scalar_summary("highway_transform_gate_layer", mtf.reduce_mean(transform))
            mtf.scalar_summary("highway_carry_gate_layer", mtf.reduce_mean(carry))
        return state

    def act_layer(
        self, context: Context, x: mtf.Tensor, mask: Union[mtf.Tensor, float]
    ) -> mtf.Tensor:
        """Applies the layers `act_max_steps` + 1 times; halted positions no longer change.

        Args:
          context: the Context of this call of the model: its mode, positions, states and losses.
          x: a Tensor with dimensions [..., d_model].
          mask: a Tensor or a number, 0 at padding.
        """
        shape = x.shape - x.shape.dims[-1]
        zeros = mtf.zeros(x.mesh, shape, dtype=x.dtype)
        halting, remainders, updates = zeros, zeros, zeros
        output = mtf.zeros_like(x)
        threshold = 1.0 - self.act_epsilon
        for step in range(self.act_max_steps + 1):
            x = self.step_preprocess(context, x, step)
            p = self._halting_probability(context, x, mask)
            running = mtf.cast(mtf.less(halting, 1.0), x.dtype)
            reached = halting + p * running
            halted = mtf.cast(mtf.greater(reached, threshold), x.dtype) * running
            running = mtf.cast(mtf.less_equal(reached, threshold), x.dtype) * running
            halting += p * running
            remainders += halted * (1.0 - halting)
            halting += halted * remainders
            updates += running + halted
            weights = p * running + halted * remainders
            x = self._step(context, x, mask)
            kept = output if self.act_type == "accumulated" else output * (1.0 - weights)
            output = x * weights + kept
        mtf.scalar_summary("ponder_times", mtf.reduce_mean(updates))
        return output

    def _halting_probability(
        self, context: Context, x: mtf.Tensor, mask: Union[mtf.Tensor, float]
    ) -> mtf.Tensor:
        """Returns each position's halting probability at this step, without the last dimension."""
        shape = x.shape - x.shape.dims[-1]
        if self.act_type == "random":
            return mtf.random_uniform(x.mesh, shape, dtype=x.dtype)
        if self.act_type not in ("basic", "accumulated", "global"):
            raise ValueError(
                f"UTLayerStack: act_type={self.act_type!r} is none of 'basic', 'accumulated', "
                "'global', 'random'"
            )
        with tf.variable_scope("sigmoid_activation_for_pondering"):
            p = mtf_layers.dense(
                x,
                [mtf.Dimension("halting", 1)],
                reduced_dims=x.shape.dims[-1:],
                activation=mtf.sigmoid,
                variable_dtype=context.variable_dtype,
            )
            p = mtf.reshape(p, shape)
        if self.act_type != "global" or context.length_dim not in shape:
            return p
        counted = mtf.ones_like(p) * mask
        rest = shape - context.length_dim
        total = mtf.reduce_sum(p * counted, output_shape=rest)
        number = mtf.maximum(mtf.reduce_sum(counted, output_shape=rest), 1.0)
        return mtf.broadcast(total / number, shape)
