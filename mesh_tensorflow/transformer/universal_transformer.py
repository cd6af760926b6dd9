"""The Universal Transformer: one stack of layers, applied recurrently."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, Optional, Union

import gin
import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow import layers
from mesh_tensorflow._core.errors import check_choice
from mesh_tensorflow.transformer import transformer
from mesh_tensorflow.transformer.transformer._context import Context, dropout_of, nonpadding_of
from mesh_tensorflow.transformer.transformer._stack import concat_channels

__all__ = ["UTLayerStack"]

_ACT_TYPES = ("basic", "accumulated", "global", "random")


def _sinusoids(
    positions: mtf.Tensor, channels: mtf.Dimension, min_timescale: float, max_timescale: float
) -> mtf.Tensor:
    """Returns sines in the first half of the channels, and cosines in the second.

    Wavelengths form a geometric progression. With an odd number of channels, the last one is 0.
    """
    half = channels.size // 2
    steps = max(half - 1, 1)
    # With a single channel half is 0, by which mod cannot divide.
    index = mtf.mod(mtf.range(positions.mesh, channels, tf.int32), max(half, 1))
    rate = -math.log(max_timescale / min_timescale) / steps
    # scales[c] = (max_timescale / min_timescale) ** -((c mod half) / (half - 1)) / min_timescale.
    scales = mtf.exp(mtf.to_float(index) * rate) / min_timescale
    angles = mtf.einsum([mtf.to_float(positions), scales], output_shape=positions.shape + channels)
    channel = mtf.range(positions.mesh, channels, tf.int32)
    # A cosine is a sine shifted by a quarter of a period.
    phase = mtf.cast(mtf.greater_equal(channel, half), tf.float32) * (math.pi / 2)
    signal = mtf.sin(mtf.add(angles, phase, output_shape=angles.shape))
    # With an odd number of channels the last one has no signal.
    return signal * mtf.cast(mtf.less(channel, 2 * half), tf.float32)


@gin.configurable(module="mesh_tensorflow.transformer.universal_transformer")
@dataclasses.dataclass(eq=False, repr=False)
class UTLayerStack(transformer.TransformerLayer):
    """Layers that are applied recurrently, with the same variables at each step, but for gates.

    Each step has its own gates of a highway, as in the classic.

    See Dehghani et al., "Universal transformers" (2018). With `recurrence_type` "act", the number
    of steps adapts to each position; see Graves, "Adaptive computation time for recurrent neural
    networks" (2016).

    Args:
      layers: a list of TransformerLayers with names.
      dropout_rate: the dropout rate of the inputs, of each layer's output, and of the output.
      norm_epsilon: the epsilon of the layer norms.

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

    layers: dataclasses.InitVar[Sequence[Any]]
    dropout_rate: dataclasses.InitVar[float] = 0.0
    norm_epsilon: dataclasses.InitVar[float] = 1e-6
    num_vanilla_transformer_layers: int = 2
    couple_carry_transform_gates: bool = True
    act_type: str = gin.REQUIRED
    recurrence_type: str = gin.REQUIRED
    act_max_steps: int = gin.REQUIRED
    act_epsilon: float = gin.REQUIRED
    num_rec_steps: int = gin.REQUIRED
    num_inrecurrence_layers: int = gin.REQUIRED
    position_start_index: Optional[str] = gin.REQUIRED
    add_or_concat_timing_signal: str = gin.REQUIRED
    step_timing_signal_type: str = gin.REQUIRED
    add_position_timing_signal: bool = gin.REQUIRED
    add_step_timing_signal: bool = gin.REQUIRED
    mix_with_transformer_before_ut: bool = gin.REQUIRED
    mix_with_transformer_after_ut: bool = gin.REQUIRED
    gates_inputs: str = gin.REQUIRED
    gate_ffn_layer: str = gin.REQUIRED
    use_gated_transformer: bool = gin.REQUIRED
    gating_type: str = gin.REQUIRED

    def __post_init__(
        self, layers: Sequence[Any], dropout_rate: float, norm_epsilon: float
    ) -> None:
        # Subclasses that were written for the classic read these three by these names.
        self._layers, self._dropout_rate, self._norm_epsilon = layers, dropout_rate, norm_epsilon

    @property
    def num_layers(self) -> int:
        """The number of layers."""
        return len(self._layers)

    def call(self, context: Context, x: mtf.Tensor) -> mtf.Tensor:
        """Returns the output of the stack; see TransformerLayer.call."""
        recurrences: dict[str, Callable] = {
            "basic": self.ut_basic,
            # The state, the inputs, and a memory that the classic passes on as well and never
            # reads.
            "highway": lambda context, x, mask: self.ut_highway(context, (x, x, x), mask),
            "act": self.act_layer,
        }
        check_choice("UTLayerStack", "recurrence_type", self.recurrence_type, recurrences)
        nonpadding = nonpadding_of(context)
        mask = 1.0 if nonpadding is None else nonpadding
        x = dropout_of(x, context, self._dropout_rate)
        context.layer_outputs.append(x)
        if self.mix_with_transformer_before_ut:
            x = self._times(self.num_vanilla_transformer_layers, context, x, mask)
        x = recurrences[self.recurrence_type](context, x, mask)
        if self.mix_with_transformer_after_ut:
            x = self._times(self.num_vanilla_transformer_layers, context, x, mask)
        # Layers normalize their inputs, so what they have added up is not normalized yet.
        # In the scope of the stack, where gates of a highway have their norms: it has their
        # variables.
        x = layers.layer_norm(x, x.shape.dims[-1], self._norm_epsilon)
        x = dropout_of(x, context, self._dropout_rate) * mask
        context.layer_outputs.append(x)
        return x

    def _times(
        self, number: int, context: Context, x: mtf.Tensor, mask: Union[mtf.Tensor, float]
    ) -> mtf.Tensor:
        """Applies the layers several times."""
        for _ in range(number):
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
                x += dropout_of(y, context, self._dropout_rate)
            if number != len(self._layers) - 1:
                context.layer_outputs.append(x)
            context.layer_index += 1
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
        # Each step enters the layers' scopes anew: names in them are those of the first step.
        for step in range(self.num_rec_steps):
            x = self.step_preprocess(context, x, step)
            x = self._times(self.num_inrecurrence_layers, context, x, mask)
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
            transformed = self.step_preprocess(context, state, step)
            transformed = self._times(self.num_inrecurrence_layers, context, transformed, mask)
            choices = {"s": state, "t": transformed, "i": inputs}
            # Not in the order of `gates_inputs`: it would tell which rows of a kernel are whose.
            chosen = [x for letter, x in choices.items() if letter in self.gates_inputs]
            # Outside of the layers' scopes names are numbered on: each step has gates of its own.
            if self.couple_carry_transform_gates:
                # One gate for both: the new state is a weighted mean of the old one and its
                # transform.
                transform = self._gate(context, mask, chosen)
                carry = 1.0 - transform
            else:
                transform, carry = self._two_gates(context, mask, chosen)
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
        # Below 1, or no position could halt after a single step (Graves, 2016).
        threshold = 1.0 - self.act_epsilon
        # Each position goes through all steps, as shapes cannot depend on values; of halted ones
        # the weight is 0.
        for step in range(self.act_max_steps + 1):
            x = self.step_preprocess(context, x, step)
            p = self._halting_probability(context, x, mask)
            # Positions that have halted have exactly 1 here, as h + (1 - h) rounds to it for all h
            # from 0 to 1: the rest of the step adds 0 for them.
            running = mtf.cast(mtf.less(halting, 1.0), x.dtype)
            reached = halting + p * running
            halted = mtf.cast(mtf.greater(reached, threshold), x.dtype) * running
            running = mtf.cast(mtf.less_equal(reached, threshold), x.dtype) * running
            halting += p * running
            # What is left of 1 is the weight of the last step (Graves, 2016).
            remainders += halted * (1.0 - halting)
            halting += halted * remainders
            updates += running + halted
            # A position that goes on counts with p, and one that halts here with its remainder.
            weights = p * running + halted * remainders
            x = self._times(self.num_inrecurrence_layers, context, x, mask)
            # Graves (2016) adds weighted states up, which is "accumulated"; other types move the
            # output towards the state.
            kept = output if self.act_type == "accumulated" else output * (1.0 - weights)
            output = x * weights + kept
        mtf.scalar_summary("ponder_times", mtf.reduce_mean(updates))
        return output

    def _halting_probability(
        self, context: Context, x: mtf.Tensor, mask: Union[mtf.Tensor, float]
    ) -> mtf.Tensor:
        """Returns each position's halting probability at this step, without the last dimension."""
        shape = x.shape - x.shape.dims[-1]
        check_choice("UTLayerStack", "act_type", self.act_type, _ACT_TYPES)
        if self.act_type == "random":
            return mtf.random_uniform(x.mesh, shape, dtype=x.dtype)
        with tf.variable_scope("sigmoid_activation_for_pondering"):
            p = layers.dense(
                x,
                [mtf.Dimension("halting", 1)],
                reduced_dims=x.shape.dims[-1:],
                activation=mtf.sigmoid,
                variable_dtype=context.variable_dtype,
            )
            p = mtf.reshape(p, shape)
        if self.act_type != "global" or context.length_dim not in shape:
            return p
        # Padding has no part in the mean of the sequence.
        # The mask may be the number 1, and the count has to be one for each sequence all the same.
        counted = mtf.ones_like(p) * mask
        rest = shape - context.length_dim
        total = mtf.reduce_sum(p * counted, output_shape=rest)
        # A row of padding alone has no position to count.
        number = mtf.maximum(mtf.reduce_sum(counted, output_shape=rest), 1.0)
        return mtf.broadcast(total / number, shape)

    # -- signals of positions and steps

    def get_timing_signal_1d(
        self,
        context: Context,
        length: mtf.Dimension,
        channels: mtf.Dimension,
        min_timescale: float = 1.0,
        max_timescale: float = 1.0e4,
        start_index: Union[int, mtf.Tensor] = 0,
    ) -> mtf.Tensor:
        """Returns sinusoids of different wavelengths for each position.

        See Vaswani et al., "Attention is all you need" (2017), section 3.5.

        Args:
          context: the Context of this call of the model: its mode, positions, states and losses.
          length: a Dimension.
          channels: a Dimension.
          min_timescale: a number, the shortest wavelength divided by 2 pi.
          max_timescale: a number, the longest wavelength divided by 2 pi.
          start_index: an integer or an integer Tensor, the first position.

        Returns:
          A float32 Tensor with dimensions [length, channels].
        """
        positions = mtf.range(context.mesh, length, tf.int32)
        if isinstance(start_index, mtf.Tensor) or start_index:
            positions = positions + start_index
        return _sinusoids(positions, channels, min_timescale, max_timescale)

    def add_position_timing_signal_func(
        self, context: Context, x: mtf.Tensor, step: Union[int, mtf.Tensor]
    ) -> mtf.Tensor:
        """Adds or concatenates sinusoids of the positions to `x`.

        With `position_start_index` "step", the positions are shifted by the step; with "random",
        they begin at a random index in training.

        Args:
          context: the Context of this call of the model: its mode, positions, states and losses.
          x: a Tensor with dimensions [batch..., length, channels]; no length in mode
            "incremental".
          step: an integer or an integer scalar, the number of the step.
        """
        channels, length = x.shape.dims[-1], context.length_dim
        # A whole row has signals by the place in it, also behind other examples that are packed
        # into it; a step of decoding has its own position.
        start = self._start_index(context, length, step)
        if length in x.shape:
            signal = self.get_timing_signal_1d(context, length, channels, start_index=start)
        else:
            assert context.position is not None  # in mode "incremental"
            signal = _sinusoids(context.position + start, channels, 1.0, 1.0e4)
        return self._with_signal(x, signal)

    def _start_index(
        self, context: Context, length: mtf.Dimension, step: Union[int, mtf.Tensor]
    ) -> Union[int, mtf.Tensor]:
        start = self.position_start_index
        # Gin files of the classic may have 0 in place of None.
        if start == 0:
            start = None
        check_choice("UTLayerStack", "position_start_index", start, (None, "random", "step"))
        if start is None or (start == "random" and not context.train):
            return 0
        if start == "step":
            return step * length.size // self.num_rec_steps
        return mtf.random_uniform(context.mesh, mtf.Shape([]), maxval=length.size, dtype=tf.int32)

    def get_layer_timing_signal_learned_1d(
        self,
        context: Context,
        channels: mtf.Dimension,
        layer: Union[int, mtf.Tensor],
        num_layers: int,
    ) -> mtf.Tensor:
        """Returns a learned embedding of a step, from the variable `layer_embedding`.

        Args:
          context: the Context of this call of the model: its mode, positions, states and losses.
          channels: a Dimension.
          layer: an integer or an integer scalar, the number of the step; beyond the last one
            the vector is 0.
          num_layers: an integer, the number of steps.

        Returns:
          A Tensor with dimensions [channels].
        """
        layer_dim = mtf.Dimension("layer", num_layers)
        table = mtf.get_variable(
            context.mesh,
            "layer_embedding",
            mtf.Shape([layer_dim, channels]),
            dtype=context.variable_dtype,
            initializer=tf.random_normal_initializer(0, channels.size**-0.5),
        )
        # The factor gives the signal the variance 1.
        return mtf.gather(table * channels.size**0.5, layer, layer_dim)

    def add_step_timing_signal_func(
        self, context: Context, x: mtf.Tensor, step: Union[int, mtf.Tensor]
    ) -> mtf.Tensor:
        """Adds or concatenates a signal of the step to `x`.

        Args:
          context: the Context of this call of the model: its mode, positions, states and losses.
          x: a Tensor with dimensions [..., channels].
          step: an integer or an integer scalar, the number of the step.
        """
        channels = x.shape.dims[-1]
        kind = self.step_timing_signal_type
        check_choice("UTLayerStack", "step_timing_signal_type", kind, ("learned", "sinusoid"))
        if kind == "learned":
            signal = self.get_layer_timing_signal_learned_1d(
                context, channels, step, self.num_rec_steps
            )
        else:
            if not isinstance(step, mtf.Tensor):
                step = mtf.constant(context.mesh, step, dtype=tf.int32)
            signal = _sinusoids(step, channels, 1.0, 1.0e4)
        return self._with_signal(x, signal)

    def _with_signal(self, x: mtf.Tensor, signal: mtf.Tensor) -> mtf.Tensor:
        how = self.add_or_concat_timing_signal
        check_choice("UTLayerStack", "add_or_concat_timing_signal", how, ("add", "concat"))
        signal = mtf.cast(signal, x.dtype)
        if how == "add":
            return mtf.add(x, signal, output_shape=x.shape)
        signal = mtf.broadcast(signal, x.shape - x.shape.dims[-1] + signal.shape.dims[-1])
        # Under the other name, as a dense layer makes the model's channels of it again.
        return concat_channels([x, signal])

    def step_preprocess(
        self, context: Context, x: mtf.Tensor, step: Union[int, mtf.Tensor]
    ) -> mtf.Tensor:
        """Adds the configured position and step signals to the state.

        Concatenated signals are projected back to the size of the state.

        Args:
          context: the Context of this call of the model: its mode, positions, states and losses.
          x: a Tensor with dimensions [..., d_model], the state.
          step: an integer or an integer scalar, the number of the step.
        """
        model_dim, shape = x.shape.dims[-1], x.shape
        if self.add_position_timing_signal:
            x = self.add_position_timing_signal_func(context, x, step)
        if self.add_step_timing_signal:
            x = self.add_step_timing_signal_func(context, x, step)
        if x.shape == shape:
            return x
        # Signals that were concatenated are more channels than layers of the stack return.
        return layers.dense(
            x,
            [model_dim],
            reduced_dims=x.shape.dims[-1:],
            use_bias=False,
            variable_dtype=context.variable_dtype,
            name="timing_projection",
        )

    # -- gates

    def _masked_norm(self, x: mtf.Tensor, mask: Union[mtf.Tensor, float]) -> mtf.Tensor:
        """Returns the layer norm of `x` with padding masked; its variables are shared."""
        return layers.layer_norm(x * mask, x.shape.dims[-1], self._norm_epsilon)

    def ffn_layer_multi_inputs(
        self,
        context: Context,
        mask: Union[mtf.Tensor, float],
        inputs_list: list[mtf.Tensor],
        ffn_layer_type: str = "dense",
        kernel_initializer: Optional[Callable[..., tf.Tensor]] = None,
        activation: Optional[Callable[[mtf.Tensor], mtf.Tensor]] = None,
        preprocess: bool = False,
        postprocess: bool = False,
    ) -> mtf.Tensor:
        """Applies a feed-forward layer to several inputs, concatenated.

        Args:
          context: the Context of this call of the model: its mode, positions, states and losses.
          mask: a Tensor or a number, 0 at padding.
          inputs_list: a list of Tensors with dimensions [..., d_model].
          ffn_layer_type: "dense", or "dense_relu_dense" for one with a hidden layer of the
            concatenated size.
          kernel_initializer: a TensorFlow initializer, a DenseInitializer, or None.
          activation: a function of a Tensor, or None.
          preprocess: whether inputs are normalized.
          postprocess: whether the output is normalized.

        Returns:
          A Tensor with dimensions [..., d_model].

        Raises:
          ValueError: there are no inputs, or the type is unknown.
        """
        if not inputs_list:
            raise ValueError(
                "UTLayerStack: a gate has no inputs; gates_inputs must have some of 's', 't', 'i'"
            )
        kinds = ("dense", "dense_relu_dense")
        check_choice("UTLayerStack", "gate_ffn_layer", ffn_layer_type, kinds)
        output_dim = inputs_list[0].shape.dims[-1]
        if preprocess:
            inputs_list = [self._masked_norm(x, mask) for x in inputs_list]
        x = inputs_list[0] if len(inputs_list) == 1 else concat_channels(inputs_list)
        arguments: dict[str, Any] = {
            "variable_dtype": context.variable_dtype,
            "kernel_initializer": kernel_initializer,
        }
        if ffn_layer_type == "dense_relu_dense":
            # As many hidden units as inputs, whatever d_ff the layers have; a rule for d_ff splits
            # these too.
            hidden_dim = mtf.Dimension("d_ff", x.shape.dims[-1].size)
            x = layers.dense(x, [hidden_dim], x.shape.dims[-1:], activation=mtf.relu, **arguments)
        y = layers.dense(x, [output_dim], x.shape.dims[-1:], activation=activation, **arguments)
        return self._masked_norm(y, mask) if postprocess else y

    def _gate(
        self, context: Context, mask: Union[mtf.Tensor, float], inputs_list: list[mtf.Tensor]
    ) -> mtf.Tensor:
        return self.ffn_layer_multi_inputs(
            context,
            mask,
            inputs_list,
            ffn_layer_type=self.gate_ffn_layer,
            activation=mtf.sigmoid,
            preprocess=True,
        )

    def gating(
        self,
        context: Context,
        x: mtf.Tensor,
        transformed_x: mtf.Tensor,
        mask: Union[mtf.Tensor, float],
    ) -> mtf.Tensor:
        """Mixes a layer's input and output by gates computed from both.

        Args:
          context: the Context of this call of the model: its mode, positions, states and losses.
          x: a Tensor with dimensions [..., d_model], the input.
          transformed_x: a Tensor of the same shape, the output.
          mask: a Tensor or a number, 0 at padding.

        Raises:
          ValueError: the stack's `gating_type` is unknown.
        """
        check_choice("UTLayerStack", "gating_type", self.gating_type, ("highway", "gru"))
        if self.gating_type == "highway":
            transform, carry = self._two_gates(context, mask, [x])
            # y = C(x) * x + T(x) * H(x), a highway (Srivastava et al., 2015).
            return x * carry + transformed_x * transform
        update, reset = self._two_gates(context, mask, [x, transformed_x])
        # Not quite the GRU of Cho et al. (2014): its candidate has a tanh instead of the sigmoid,
        # and what it is mixed with is the old state, here `transformed_x`.
        candidate = self._gate(context, mask, [reset * x, transformed_x])
        return (1.0 - update) * transformed_x + update * candidate

    def _two_gates(
        self, context: Context, mask: Union[mtf.Tensor, float], inputs_list: list[mtf.Tensor]
    ) -> tuple[mtf.Tensor, mtf.Tensor]:
        """Returns two gates; the second reads the normalized inputs of the first."""
        # Kernels are numbered in the order of these calls, and checkpoints know them by the
        # numbers.
        first = self._gate(context, mask, inputs_list)
        # The classic normalizes its list of inputs in place, so the second gate gets them
        # normalized twice.
        normalized = [self._masked_norm(x, mask) for x in inputs_list]
        return first, self._gate(context, mask, normalized)
