"""Layers that mix channels, or near positions: feed-forward layers and convolutions."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Optional, Union

import gin
import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow import layers
from mesh_tensorflow._calls import arguments_of
from mesh_tensorflow.transformer.transformer import TransformerLayer
from mesh_tensorflow.transformer.transformer._context import dropout_of
from mesh_tensorflow.transformer.transformer_layers._self_attention import SelfAttention

if TYPE_CHECKING:
    from mesh_tensorflow.transformer.transformer._context import Context


# -- feed-forward layers


@gin.configurable(module="mesh_tensorflow.transformer.transformer_layers")
@dataclasses.dataclass(eq=False, repr=False)
class DenseReluDense(TransformerLayer):
    """Two dense layers with a hidden dimension `d_ff` and an activation between them.

    Variables are `wi/kernel` and `wo/kernel`; `wi_0/kernel`, `wi_1/kernel`, ... for gated units.

    Attributes:
      hidden_size: an integer.
      dropout_rate: the dropout rate of the hidden units; all positions share one dropout mask.
      activation: the name of a function of mtf, or a list of names for the product of as many
        dense layers, such as ["gelu", "linear"]; Shazeer, "GLU variants improve transformer"
        (2020).
      use_bias: whether the dense layers have biases.
    """

    hidden_size: int = 4096
    dropout_rate: float = 0.0
    activation: Union[str, list] = "relu"
    use_bias: bool = False

    def call(
        self, context: Context, x: mtf.Tensor, losses: Optional[list[mtf.Tensor]] = None
    ) -> mtf.Tensor:
        """Returns the output of the layer.

        Args:
          context: the Context of this call of the model: its mode, positions, states and losses.
          x: a Tensor with dimensions [batch..., length, d_model]; without `length` when decoding.
          losses: not used.

        Returns:
          A Tensor of the same shape.
        """
        del losses
        io = x.shape.dims[-1]
        hidden = mtf.Dimension("d_ff", self.hidden_size)
        options = {
            "use_bias": self.use_bias,
            "variable_dtype": context.variable_dtype,
            # Members of an ensemble have their own weights, as experts have.
            "expert_dims": context.model.ensemble_dims,
        }
        h = layers.dense_product(
            x,
            reduced_dims=[io],
            new_dims=hidden,
            activation_functions=self.activation,
            name="wi",
            **options,
        )
        h = dropout_of(h, context, self.dropout_rate)
        return layers.dense(h, io, reduced_dims=[hidden], name="wo", **options)


@gin.configurable(module="mesh_tensorflow.transformer.transformer_layers")
@dataclasses.dataclass(eq=False, repr=False)
class ParallelLayer(TransformerLayer):
    """The sum of n layers of the same input, divided by sqrt(n) unless `divided` is false.

    Variables are in the scopes `parallel_layer_0`, `parallel_layer_1`, ...

    Attributes:
      layer_classes: a list of layer classes, or of other callables without arguments; then of the
        layers that they have made.
      use_scope: whether each layer has its own variable scope; if not, variables of the same
        name are shared.
      divided: whether the sum is divided by sqrt(n).
      norm: a sublayer, such as `sublayer_rms_norm`, that each layer's input passes through in
        the layer's scope, as in GPT-NeoX; None for none.
    """

    layer_classes: Sequence[Any] = (DenseReluDense, SelfAttention)
    use_scope: bool = True
    divided: bool = True
    norm: Optional[Callable[..., mtf.Tensor]] = None

    def __post_init__(self) -> None:
        self.layer_classes = [cls() for cls in self.layer_classes]

    def call(
        self, context: Context, x: mtf.Tensor, losses: Optional[list[mtf.Tensor]] = None
    ) -> mtf.Tensor:
        """Returns the output of the layer.

        Args:
          context: the Context of this call of the model: its mode, positions, states and losses.
          x: a Tensor with dimensions [batch..., length, d_model]; without `length` when decoding.
          losses: not used.

        Returns:
          A Tensor of the same shape.
        """
        del losses
        outputs = []
        for i, layer in enumerate(self.layer_classes):
            scope: Any = contextlib.nullcontext()
            # Without scopes of their own, two layers of one class would ask for the same variables.
            if self.use_scope:
                scope = tf.variable_scope(f"parallel_layer_{i}")
            with scope:
                normalized = x if self.norm is None else self.norm(x, self, context)
                outputs.append(layer.call(context, normalized))
        total = mtf.add_n(outputs)
        # The sum of n independent outputs of variance 1 has the variance n.
        return total * (1.0 / math.sqrt(len(outputs))) if self.divided else total


# -- convolutions along the length


def activated(name: str, x: mtf.Tensor) -> mtf.Tensor:
    """Applies the mtf function of that name to `x`; returns `x` itself for "linear"."""
    return x if name == "linear" else getattr(mtf, name)(x)


class Conv1D(TransformerLayer):
    """Base class of convolutions; in decoding, the state is the last inputs.

    For whole sequences, inputs of the id 0 are padding, and 0. As in the classic, steps of decoding
    do not set them to 0: not even at the first position, to which models feed the id 0 unless
    `bos_id` is another one. To decode what such a model computes in training, set
    `Conv1D.masks_decoded_padding = True`, for all layers of this kind.

    Attributes:
      masks_decoded_padding: whether steps of decoding set inputs of the id 0 to 0, too.
    """

    masks_decoded_padding: bool = False

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
            x = self._without_padding(context, x) if self.masks_decoded_padding else x
            return self.record_states_incremental_mode(context, x, filter_size)
        masked = self._without_padding(context, x)
        if context.mode == "first_part":
            # What steps would have recorded, which mask padding only if they are asked to.
            recorded = masked if self.masks_decoded_padding else x
            self.record_states_first_part_mode(context, recorded, filter_size)
        return masked

    def _without_padding(self, context: Context, x: mtf.Tensor) -> mtf.Tensor:
        # Filters read their neighbors: padding is 0 for them, as what is beyond the ends.
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
        # The state has one input more than a step needs: the next step shifts the oldest out.
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
        # Convolutions take the dimension before the channels for the length.
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
        # The oldest input falls out, and the place of the latest one becomes free.
        moved = mtf.shift(old_state, -1, filter_dim, wrap=False)
        written = mtf.one_hot(position, filter_dim, dtype=dtype)
        # state[t] = x at the position, and the old state[t + 1] elsewhere.
        return mtf.cast(moved, dtype) * (1.0 - written) + mtf.einsum(
            [mtf.cast(x, dtype), written], output_shape=old_state.shape
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
        # In a step the window has just the inputs of one output.
        padding = "VALID" if context.mode == "incremental" else "SAME"
        y = layers.conv1d(
            # The kernel has both sides, which cannot have one name.
            mtf.rename_dimension(x, channels.name, "input_dim"),
            mtf.Dimension(channels.name, self._output_size),
            filter_size=self.filter_size,
            padding=padding,
            variable_dtype=mtf.VariableDType(tf.float32, tf.float32, context.activation_dtype),
        )
        if context.mode == "incremental":  # one position is left, the current one
            y = mtf.reshape(y, mtf.Shape([*y.shape.dims[:-2], y.shape.dims[-1]]))
        return activated(self._activation, y)


@gin.configurable(module="mesh_tensorflow.transformer.transformer_layers")
class SeparableConv1DLayer(Conv1D):
    """A depthwise convolution along the length, then a pointwise one across channels.

    The filter covers the positions from `min_relative_pos` to `max_relative_pos`, relative to the
    current one; in a decoder the latter should be 0. See `mtf.layers.separable_conv1d`.
    """

    def __init__(
        self,
        min_relative_pos: int,
        max_relative_pos: int,
        output_size: int,
        depthwise_filter_initializer_scale: float = 1.0,
        pointwise_filter_initializer_scale: float = 1.0,
        activation: str = "linear",
    ) -> None:
        """Creates the layer.

        Args:
          min_relative_pos: an integer, the first position of the filter, relative to the current
            one.
          max_relative_pos: an integer, the last one.
          output_size: an integer, the number of output channels.
          depthwise_filter_initializer_scale: the variance scale of the depthwise kernel's
            initializer.
          pointwise_filter_initializer_scale: the variance scale of the pointwise kernel's
            initializer.
          activation: the name of a function of mtf, or "linear".
        """
        self._min_relative_pos = min_relative_pos
        self._max_relative_pos = max_relative_pos
        self._output_size = output_size
        self._depthwise_filter_initializer_scale = depthwise_filter_initializer_scale
        self._pointwise_filter_initializer_scale = pointwise_filter_initializer_scale
        self._activation = activation

    @property
    def filter_size(self) -> int:
        """The number of positions that the filter covers."""
        return self._max_relative_pos - self._min_relative_pos + 1

    def call(
        self,
        context: Context,
        x: mtf.Tensor,
        losses: Optional[list[mtf.Tensor]] = None,
        all_kernel_wts: Optional[Sequence[mtf.Tensor]] = None,
    ) -> mtf.Tensor:
        """Returns the output of the layer.

        Args:
          context: the Context of this call of the model: its mode, positions, states and losses.
          x: a Tensor with dimensions [batch..., length, d_model]; without `length` when decoding.
          losses: not used.
          all_kernel_wts: a list with a Tensor for each position of the filter, with dimensions
            [d_model] or [batch..., length, d_model], instead of variables.

        Returns:
          A Tensor with as many channels as `output_size`.
        """
        del losses
        x = self.inputs_of_conv(context, x, self.filter_size)
        channels = x.shape.dims[-1]
        y = layers.separable_conv1d(
            x,
            mtf.Dimension(channels.name, self._output_size),
            min_relative_pos=self._min_relative_pos,
            max_relative_pos=self._max_relative_pos,
            depthwise_filter_initializer_scale=self._depthwise_filter_initializer_scale,
            pointwise_filter_initializer_scale=self._pointwise_filter_initializer_scale,
            use_bias=True,
            kernel_depth_weights=all_kernel_wts,
        )
        if context.mode == "incremental":
            # Only the last position of the window has all of its filter's inputs in it.
            window = y.shape.dims[-2]
            y = mtf.gather(y, window.size - 1, window)
        return activated(self._activation, y)


@gin.configurable(module="mesh_tensorflow.transformer.transformer_layers")
class Conv1DLocalAttn(SeparableConv1DLayer):
    """A separable convolution whose kernels are softmaxed over their width.

    Wu et al., "Pay less attention with lightweight and dynamic convolutions" (2019). Subclasses
    define `get_kernel_wt`.
    """

    def __init__(
        self,
        min_relative_pos: int,
        max_relative_pos: int,
        output_size: int,
        depthwise_filter_initializer_scale: float = 1.0,
        pointwise_filter_initializer_scale: float = 1.0,
        activation: str = "linear",
        num_unique_depth_filters: int = 1,
    ) -> None:
        """Creates the layer.

        Args:
          min_relative_pos: an integer, the first position of the filter, relative to the current
            one.
          max_relative_pos: an integer, the last one.
          output_size: an integer, the number of output channels.
          depthwise_filter_initializer_scale: the variance scale of the depthwise kernels'
            initializer.
          pointwise_filter_initializer_scale: the variance scale of the pointwise kernel's
            initializer.
          activation: the name of a function of mtf, or "linear".
          num_unique_depth_filters: an integer, the number of channels that share a kernel: channels
            c, c + d_model / num_unique_depth_filters, ...
        """
        super().__init__(**arguments_of(SeparableConv1DLayer, locals()))
        self._num_unique_depth_filters = num_unique_depth_filters

    def get_kernel_wt(
        self,
        x: mtf.Tensor,
        repeated_kernel_dim: Union[mtf.Dimension, Sequence[mtf.Dimension]],
        kernel_initializer: Callable[..., tf.Tensor],
        i: int,
        context: Context,
        variable_dtype: Optional[mtf.VariableDType],
        master_dtype: tf.DType = tf.float32,
        slice_dtype: tf.DType = tf.float32,
    ) -> mtf.Tensor:
        """Returns the kernel at one position, before the softmax.

        Args:
          x: a Tensor with dimensions [batch..., length, d_model].
          repeated_kernel_dim: a Dimension, the channels that have their own kernels; or a list of
            it.
          kernel_initializer: an initializer.
          i: an integer, the position in the filter.
          context: the Context of this call of the model: its mode, positions, states and losses.
          variable_dtype: the dtypes of variables: in checkpoints, in memory and in computations.
          master_dtype: used if `variable_dtype` is None.
          slice_dtype: used if `variable_dtype` is None.

        Returns:
          A Tensor with dimensions [..., repeated_kernel_dim].
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no get_kernel_wt; use LightweightConv1DLocalAttn or "
            "DynamicConv1DLocalAttn"
        )

    # The classic's signature: kernels are not given, as in the base class, but computed here.
    def call(  # type: ignore[override]
        self, context: Context, x: mtf.Tensor, losses: Optional[list[mtf.Tensor]] = None
    ) -> mtf.Tensor:
        """Returns the output of the layer.

        Args:
          context: the Context of this call of the model: its mode, positions, states and losses.
          x: a Tensor with dimensions [batch..., length, d_model]; without `length` when decoding.
          losses: not used.

        Returns:
          A Tensor with `output_size` channels.

        Raises:
          ValueError: `num_unique_depth_filters` does not divide the channels.
        """
        return super().call(context, x, losses, all_kernel_wts=self._kernels(context, x))

    def _kernels(self, context: Context, x: mtf.Tensor) -> Sequence[mtf.Tensor]:
        channels, shared_by = x.shape.dims[-1], self._num_unique_depth_filters
        if channels.size % shared_by:
            raise ValueError(
                f"{type(self).__name__}: num_unique_depth_filters={shared_by} must divide the "
                f"channels {channels}, which share kernels"
            )
        repeated = mtf.Dimension("repeated_kernel_dim", channels.size // shared_by)
        initializer = layers.VarianceScalingInitializer(
            scale=self._depthwise_filter_initializer_scale / self.filter_size
        )
        width = mtf.Dimension("conv_window", self.filter_size)
        # A variable for each position, whose name has its number, as in checkpoints of the classic.
        logits = mtf.stack(
            [
                self.get_kernel_wt(x, repeated, initializer, i, context, context.variable_dtype)
                for i in range(self.filter_size)
            ],
            width.name,
        )
        # Over the width: the depthwise sum is a weighted mean of neighbors (Wu et al., 2019).
        kernels = mtf.unstack(mtf.softmax(logits, width), width)
        return [self._tiled(kernel, channels) for kernel in kernels]

    def _tiled(self, kernel: mtf.Tensor, channels: mtf.Dimension) -> mtf.Tensor:
        """Repeats the kernels that channels share, so that each channel has one."""
        *others, repeated = kernel.shape.dims
        copies = mtf.Dimension("copies_of_kernel", self._num_unique_depth_filters)
        # Channel c has the kernel of the number c modulo how many there are.
        kernel = mtf.broadcast(kernel, mtf.Shape([*others, copies, repeated]))
        return mtf.reshape(kernel, mtf.Shape([*others, channels]))


@gin.configurable(module="mesh_tensorflow.transformer.transformer_layers")
class LightweightConv1DLocalAttn(Conv1DLocalAttn):
    """Lightweight convolution, with variables `lightwt_depthwise_dense_<i>/kernel`."""

    def get_kernel_wt(
        self,
        x: mtf.Tensor,
        repeated_kernel_dim: Union[mtf.Dimension, Sequence[mtf.Dimension]],
        kernel_initializer: Callable[..., tf.Tensor],
        i: int,
        context: Context,
        variable_dtype: Optional[mtf.VariableDType],
        master_dtype: tf.DType = tf.float32,
        slice_dtype: tf.DType = tf.float32,
    ) -> mtf.Tensor:
        """Returns a variable; see `Conv1DLocalAttn.get_kernel_wt`."""
        return layers.get_dense_kernel_weights(
            x,
            new_dims=mtf.Shape(_as_list(repeated_kernel_dim)).dims,
            reduced_dims=[],
            expert_dims=[],
            kernel_initializer=kernel_initializer,
            name=f"lightwt_depthwise_dense_{i}",
            variable_dtype=variable_dtype,
            master_dtype=master_dtype,
            slice_dtype=slice_dtype,
        )


@gin.configurable(module="mesh_tensorflow.transformer.transformer_layers")
class DynamicConv1DLocalAttn(Conv1DLocalAttn):
    """Dynamic convolution: predicts a kernel at each position by `dyn_conv_depthwise_dense_<i>`."""

    def get_kernel_wt(
        self,
        x: mtf.Tensor,
        repeated_kernel_dim: Union[mtf.Dimension, Sequence[mtf.Dimension]],
        kernel_initializer: Callable[..., tf.Tensor],
        i: int,
        context: Context,
        variable_dtype: Optional[mtf.VariableDType],
        master_dtype: tf.DType = tf.float32,
        slice_dtype: tf.DType = tf.float32,
    ) -> mtf.Tensor:
        """Returns a dense layer of `x`; see `Conv1DLocalAttn.get_kernel_wt`."""
        return layers.dense(
            x,
            _as_list(repeated_kernel_dim),
            reduced_dims=x.shape.dims[-1:],
            kernel_initializer=kernel_initializer,
            name=f"dyn_conv_depthwise_dense_{i}",
            variable_dtype=variable_dtype,
            master_dtype=master_dtype,
            slice_dtype=slice_dtype,
        )


def _as_list(dims: Union[mtf.Dimension, Sequence[mtf.Dimension]]) -> list[mtf.Dimension]:
    return [dims] if isinstance(dims, mtf.Dimension) else list(dims)


_ATTENTION_TYPES = {
    "lightweight_conv": LightweightConv1DLocalAttn,
    "dynamic_conv": DynamicConv1DLocalAttn,
}


@gin.configurable(module="mesh_tensorflow.transformer.transformer_layers")
class LocalConvAttnBlock(TransformerLayer):
    """A gated linear unit, a lightweight or dynamic convolution, and a dense layer.

    Wu et al., "Pay less attention with lightweight and dynamic convolutions" (2019), figure 2.
    """

    def __init__(
        self,
        min_relative_pos: int,
        max_relative_pos: int,
        output_size: int,
        depthwise_filter_initializer_scale: float = 1.0,
        pointwise_filter_initializer_scale: float = 1.0,
        activation: str = "linear",
        num_unique_depth_filters: int = 1,
        attention_type: str = "lightweight_conv",
    ) -> None:
        """Creates the layer.

        Args:
          min_relative_pos: as for `Conv1DLocalAttn`.
          max_relative_pos: as for `Conv1DLocalAttn`.
          output_size: as for `Conv1DLocalAttn`.
          depthwise_filter_initializer_scale: as for `Conv1DLocalAttn`.
          pointwise_filter_initializer_scale: as for `Conv1DLocalAttn`.
          activation: as for `Conv1DLocalAttn`.
          num_unique_depth_filters: ignored, for compatibility with checkpoints of earlier releases:
            each channel has its own kernel.
          attention_type: "lightweight_conv" or "dynamic_conv".

        Raises:
          NotImplementedError: `attention_type` is unknown.
        """
        # First, as further names would be among the arguments.
        arguments = arguments_of(SeparableConv1DLayer, locals())
        if attention_type not in _ATTENTION_TYPES:
            raise NotImplementedError(
                f"LocalConvAttnBlock: attention_type={attention_type!r} is none of "
                f"{', '.join(_ATTENTION_TYPES)}"
            )
        self.conv_local_attn_layer = _ATTENTION_TYPES[attention_type](**arguments)

    def call(
        self, context: Context, x: mtf.Tensor, losses: Optional[list[mtf.Tensor]] = None
    ) -> mtf.Tensor:
        """Returns the output of the layer.

        Args:
          context: the Context of this call of the model: its mode, positions, states and losses.
          x: a Tensor with dimensions [batch..., length, d_model]; without `length` when decoding.
          losses: not used.

        Returns:
          A Tensor of the same shape.
        """
        del losses
        channels = x.shape.dims[-1]
        # y = x W * sigmoid(x V), a gated linear unit (Dauphin et al., 2017).
        y = layers.dense_product(
            x,
            reduced_dims=[channels],
            new_dims=channels,
            activation_functions=["linear", "sigmoid"],
            variable_dtype=context.variable_dtype,
            name="local_conv_inp",
        )
        y = self.conv_local_attn_layer.call(context, y)
        return layers.dense(
            y,
            channels,
            reduced_dims=y.shape.dims[-1:],
            variable_dtype=context.variable_dtype,
            name="local_conv_attn_op_projection",
        )
