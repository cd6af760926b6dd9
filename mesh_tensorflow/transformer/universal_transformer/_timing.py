"""Position and step signals of recurrent layers."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Union

import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow import layers

if TYPE_CHECKING:
    from mesh_tensorflow.transformer.transformer._context import Context

__all__ = ["TimingSignals", "concat_channels"]


def _sinusoids(
    positions: mtf.Tensor, channels: mtf.Dimension, min_timescale: float, max_timescale: float
) -> mtf.Tensor:
    """Returns sines in the first half of the channels, and cosines in the second.

    Wavelengths form a geometric progression. With an odd number of channels, the last one is 0.
    """
    half = channels.size // 2
    steps = max(half - 1, 1)
    index = mtf.mod(mtf.range(positions.mesh, channels, tf.int32), max(half, 1))
    rate = -math.log(max_timescale / min_timescale) / steps
    scales = mtf.exp(mtf.to_float(index) * rate) / min_timescale
    angles = mtf.einsum([mtf.to_float(positions), scales], output_shape=positions.shape + channels)
    channel = mtf.range(positions.mesh, channels, tf.int32)
    # A cosine is a sine shifted by a quarter of a period.
    phase = mtf.cast(mtf.greater_equal(channel, half), tf.float32) * (math.pi / 2)
    signal = mtf.sin(mtf.add(angles, phase, output_shape=angles.shape))
    return signal * mtf.cast(mtf.less(channel, 2 * half), tf.float32)


def concat_channels(xs: list[mtf.Tensor]) -> mtf.Tensor:
    """Concatenates Tensors along their last dimension, under a name that no layout splits."""
    name = f"_{xs[0].shape.dims[-1].name.lstrip('_')}_concat"
    whole = [mtf.rename_dimension(x, x.shape.dims[-1].name, name) for x in xs]
    return mtf.concat(whole, name)


class TimingSignals:
    """The methods of `UTLayerStack` that add position and step signals."""

    num_rec_steps: int
    position_start_index: Any
    add_or_concat_timing_signal: str
    step_timing_signal_type: str
    add_position_timing_signal: bool
    add_step_timing_signal: bool

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
        def random() -> Union[int, mtf.Tensor]:
            if not context.train:
                return 0
            return mtf.random_uniform(
                context.mesh, mtf.Shape([]), maxval=length.size, dtype=tf.int32
            )

        starts = {
            None: lambda: 0,
            0: lambda: 0,
            "step": lambda: step * length.size // self.num_rec_steps,
            "random": random,
        }
        if self.position_start_index not in starts:
            raise ValueError(
                f"UTLayerStack: position_start_index={self.position_start_index!r} is none of "
                "None, 'random', 'step'"
            )
        return starts[self.position_start_index]()

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
        return mtf.gather(table * channels.size**0.5, layer, layer_dim)

    def _layer_timing_signal_sinusoid_1d(
        self,
        context: Context,
        channels: mtf.Dimension,
        layer: Union[int, mtf.Tensor],
        num_layers: int,
    ) -> mtf.Tensor:
        del num_layers
        if not isinstance(layer, mtf.Tensor):
            layer = mtf.constant(context.mesh, layer, dtype=tf.int32)
        return _sinusoids(layer, channels, 1.0, 1.0e4)

    def add_step_timing_signal_func(
        self, context: Context, x: mtf.Tensor, step: Union[int, mtf.Tensor]
    ) -> mtf.Tensor:
        """Adds or concatenates a signal of the step to `x`.

        Args:
          context: the Context of this call of the model: its mode, positions, states and losses.
          x: a Tensor with dimensions [..., channels].
          step: an integer or an integer scalar, the number of the step.
        """
        signals = {
            "learned": self.get_layer_timing_signal_learned_1d,
            "sinusoid": self._layer_timing_signal_sinusoid_1d,
        }
        if self.step_timing_signal_type not in signals:
            raise ValueError(
                f"UTLayerStack: step_timing_signal_type={self.step_timing_signal_type!r} is none "
                f"of {', '.join(map(repr, signals))}"
            )
        make = signals[self.step_timing_signal_type]
        return self._with_signal(x, make(context, x.shape.dims[-1], step, self.num_rec_steps))

    def _with_signal(self, x: mtf.Tensor, signal: mtf.Tensor) -> mtf.Tensor:
        signal = mtf.cast(signal, x.dtype)
        if self.add_or_concat_timing_signal == "add":
            return mtf.add(x, signal, output_shape=x.shape)
        if self.add_or_concat_timing_signal == "concat":
            signal = mtf.broadcast(signal, x.shape - x.shape.dims[-1] + signal.shape.dims[-1])
            return concat_channels([x, signal])
        raise ValueError(
            f"UTLayerStack: add_or_concat_timing_signal={self.add_or_concat_timing_signal!r} is "
            "none of 'add', 'concat'"
        )

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
        return layers.dense(
            x,
            [model_dim],
            reduced_dims=x.shape.dims[-1:],
            use_bias=False,
            variable_dtype=context.variable_dtype,
            name="timing_projection",
        )
