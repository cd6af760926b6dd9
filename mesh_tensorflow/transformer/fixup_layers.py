"""Fixup layers: residual networks without normalization, with depth-dependent initializers.

See Zhang, Dauphin and Ma, "Fixup initialization: residual learning without normalization"
(2019).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Optional, Union

import gin
import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow import layers
from mesh_tensorflow._calls import arguments_of
from mesh_tensorflow._core.errors import check_choice
from mesh_tensorflow.transformer import attention, transformer, transformer_layers
from mesh_tensorflow.transformer.transformer._context import dropout_of

if TYPE_CHECKING:
    from mesh_tensorflow.transformer.transformer._context import Context
    from mesh_tensorflow.transformer.transformer._stack import LayerStack

__all__ = [
    "AttentionParamsFixup",
    "DenseReluDenseFixup",
    "EncDecAttentionFixup",
    "SelfAttentionFixup",
    "dense_product_fixup",
    "get_single_scalar_bias",
    "sublayer_fixup_scale",
    "sublayer_fixup_shift",
]

_MODULE = "mesh_tensorflow.transformer.fixup_layers"

# In a residual branch of m linear maps, the last is initialized to 0, and the others are scaled by
# num_blocks ** (-1 / (2 m - 2)) (Zhang et al., 2019), their variance by the square of this. m is 2
# in a feed-forward layer, and 4 in attention: q, k, v and o.
_DENSE_EXPONENT = -1.0
_ATTENTION_EXPONENT = -1.0 / 3.0
# (scale of the variance, fan).
_DEFAULT_INITS = {"he": (2.0, "fan_in"), "glorot": (1.0, "fan_avg")}


def _scaled_initializer(
    what: str,
    num_blocks: Optional[int],
    exponent: float,
    default_init: str,
    init_distribution: str,
) -> Any:
    """Returns a TensorFlow initializer whose variance is scaled by the number of blocks."""
    check_choice(what, "default_init", default_init, _DEFAULT_INITS)
    if num_blocks is None or num_blocks < 1:
        raise ValueError(
            f"{what}: num_blocks={num_blocks} must be the number of residual blocks of the stack, "
            "at least 1"
        )
    scale, fan = _DEFAULT_INITS[default_init]
    return tf.variance_scaling_initializer(
        scale=scale * num_blocks**exponent, mode=fan, distribution=init_distribution
    )


def _learned_scalar(
    x: mtf.Tensor, name: str, dim_name: str, initializer: Callable[..., tf.Tensor]
) -> mtf.Tensor:
    return mtf.get_variable(
        x.mesh,
        name,
        # One element and not a scalar: the shape that checkpoints of the classic have.
        mtf.Shape([mtf.Dimension(dim_name, 1)]),
        initializer=initializer,
        dtype=mtf.VariableDType(activation_dtype=x.dtype),
    )


def _as_scalar(variable: mtf.Tensor) -> mtf.Tensor:
    # A dimension of size 1 is not broadcast: the result would have it as one of its own.
    return mtf.reshape(variable, mtf.Shape([]))


@gin.configurable(module=_MODULE)
def sublayer_fixup_scale(x: mtf.Tensor, layer_stack: LayerStack, context: Context) -> mtf.Tensor:
    """Returns `x` times a learned scalar that is initialized to 1."""
    del layer_stack, context
    scale = _learned_scalar(x, "fixup_scale_weight", "single_scale", tf.ones_initializer())
    return x * _as_scalar(scale)


@gin.configurable(module=_MODULE)
def sublayer_fixup_shift(x: mtf.Tensor, layer_stack: LayerStack, context: Context) -> mtf.Tensor:
    """Returns `x` plus a learned scalar that is initialized to 0."""
    del layer_stack, context
    return _shifted(x, "fixup_bias")


def get_single_scalar_bias(x: mtf.Tensor, name: str) -> mtf.Tensor:
    """Creates a variable of one element, initialized to 0.

    Args:
      x: a Tensor, for its mesh and dtype.
      name: a string.

    Returns:
      A Tensor with the dimension [single_bias=1].
    """
    return _learned_scalar(x, name, "single_bias", tf.zeros_initializer())


def _shifted(x: mtf.Tensor, name: str) -> mtf.Tensor:
    return x + _as_scalar(get_single_scalar_bias(x, name))


def dense_product_fixup(
    x: mtf.Tensor,
    reduced_dims: Sequence[mtf.Dimension],
    new_dims: Union[mtf.Dimension, Sequence[mtf.Dimension]],
    kernel_initializer: Callable[..., tf.Tensor],
    activation_functions: Optional[Union[str, Callable, list, tuple]] = None,
    name: str = "dense_product",
    **kwargs: Any,
) -> mtf.Tensor:
    """Returns the product of several dense layers with a given initializer.

    Args:
      x: a Tensor.
      reduced_dims: a list of Dimensions of `x`.
      new_dims: a list of Dimensions, or one.
      kernel_initializer: a TensorFlow initializer.
      activation_functions: as for `mtf.layers.dense_product`.
      name: a string.
      **kwargs: further arguments of `mtf.layers.dense`.
    """
    return layers.dense_product(
        x,
        reduced_dims,
        new_dims,
        activation_functions,
        name=name,
        kernel_initializer=kernel_initializer,
        **kwargs,
    )


@gin.configurable(module=_MODULE)
@dataclasses.dataclass(eq=False, repr=False)
class DenseReluDenseFixup(transformer.TransformerLayer):
    """A feed-forward layer: a dense layer, a shift, and a dense layer initialized to 0.

    Attributes:
      hidden_size: an integer.
      dropout_rate: the share of hidden units that are dropped in training, from 0 to less than 1.
      activation: a function, the name of a function of mtf, or a list of them.
      use_bias: whether the dense layers have biases.
      default_init: "he" or "glorot", the initializer that is scaled by the number of blocks.
      init_distribution: a distribution of `tf.variance_scaling_initializer`.
      num_blocks: an integer, the number of residual blocks of the stack.
      upproject_initializer: a TensorFlow initializer.
      downproject_initializer: a TensorFlow initializer.
    """

    hidden_size: int = 4096
    dropout_rate: float = 0.0
    activation: Union[str, Callable, list, tuple] = "relu"
    use_bias: bool = False
    default_init: str = "he"
    init_distribution: str = "uniform"
    num_blocks: int = gin.REQUIRED

    def __post_init__(self) -> None:
        self.upproject_initializer = _scaled_initializer(
            "DenseReluDenseFixup",
            self.num_blocks,
            _DENSE_EXPONENT,
            self.default_init,
            self.init_distribution,
        )
        # Each branch begins as 0, so that a stack of any depth begins as the identity.
        self.downproject_initializer = tf.zeros_initializer()

    def call(self, context: Context, x: mtf.Tensor, losses: Optional[list] = None) -> mtf.Tensor:
        """Returns the output of the layer; see TransformerLayer.call."""
        del losses
        io_channels = x.shape.dims[-1]
        hidden_channels = mtf.Dimension("d_ff", self.hidden_size)
        expert_dims = context.model.ensemble_dims
        h = dense_product_fixup(
            x,
            reduced_dims=x.shape.dims[-1:],
            new_dims=hidden_channels,
            kernel_initializer=self.upproject_initializer,
            activation_functions=self.activation,
            use_bias=self.use_bias,
            variable_dtype=context.variable_dtype,
            name="wi",
            expert_dims=expert_dims,
        )
        h = dropout_of(h, context, self.dropout_rate)
        return layers.dense(
            # A scalar bias before a linear map, which no norm centers here (Zhang et al., 2019).
            _shifted(h, "shift"),
            io_channels,
            reduced_dims=h.shape.dims[-1:],
            use_bias=self.use_bias,
            activation=None,
            variable_dtype=context.variable_dtype,
            name="wo",
            expert_dims=expert_dims,
            kernel_initializer=self.downproject_initializer,
        )


class AttentionParamsFixup(attention.AttentionParams):
    """Fixup attention weights: the output is initialized to 0, the others are scaled.

    Attributes:
      num_blocks: an integer, the number of residual blocks of the stack.
      default_init: "he" or "glorot", the initializer that is scaled by the number of blocks.
      init_distribution: a distribution of `tf.variance_scaling_initializer`.
    """

    def __init__(
        self,
        mesh: mtf.Mesh,
        query_input_dim: mtf.Dimension,
        memory_input_dim: mtf.Dimension,
        output_dim: mtf.Dimension,
        key_dim: mtf.Dimension,
        value_dim: mtf.Dimension,
        query_heads_dims: list,
        memory_heads_dims: list,
        variable_dtype: mtf.VariableDType,
        shared_kv: bool = False,
        fold_scaling_into_initializer: bool = False,
        num_blocks: Optional[int] = None,
        default_init: str = "he",
        init_distribution: str = "uniform",
        **kwargs: Any,
    ):
        """Creates the variables; see `AttentionParams`.

        Raises:
          ValueError: `fold_scaling_into_initializer` or `unit_scaling_convention` is true, or an
            argument is out of range.
        """
        if fold_scaling_into_initializer:
            raise ValueError(
                "AttentionParamsFixup: the initializers are scaled by the depth and cannot hold "
                "the scale of the logits too; set fold_scaling_into_initializer = False"
            )
        if layers.unit_scaling_convention():
            raise ValueError(
                "AttentionParamsFixup: unit_scaling_convention scales products instead of the "
                "initial values, which Fixup scales by the depth; set "
                "mesh_tensorflow.layers.unit_scaling_convention.value = False"
            )
        # Before the base class, whose constructor calls `init_weights`.
        self.num_blocks = num_blocks
        self.default_init = default_init
        self.init_distribution = init_distribution
        super().__init__(**arguments_of(attention.AttentionParams, locals()), **kwargs)

    def _weight(self, name: str, shape: mtf.Shape, deviation: float) -> mtf.Tensor:
        """Creates `q_fixup`, `k_fixup`, `v_fixup` (or `kv_fixup`) or `o_fixup`."""
        initializer = _scaled_initializer(
            "AttentionParamsFixup",
            self.num_blocks,
            _ATTENTION_EXPONENT,
            self.default_init,
            self.init_distribution,
        )
        if name == "o":
            # The last map of the branch, which begins as 0.
            initializer = tf.zeros_initializer()
        # Names of their own, as in the classic: weights of usual attention do not fit these layers.
        return mtf.get_variable(
            self.mesh, f"{name}_fixup", shape, initializer=initializer, dtype=self.variable_dtype
        )


@gin.configurable(module=_MODULE)
class SelfAttentionFixup(transformer_layers.SelfAttention):
    """Self-attention with AttentionParamsFixup.

    Set `fold_scaling_into_initializer` to False.

    Attributes:
      num_blocks: an integer, the number of residual blocks of the stack.
      default_init: "he" or "glorot", the initializer that is scaled by the number of blocks.
      init_distribution: a distribution of `tf.variance_scaling_initializer`.
    """

    def __init__(
        self,
        num_blocks: int = gin.REQUIRED,
        default_init: str = "glorot",
        init_distribution: str = "uniform",
        **kwargs: Any,
    ):
        super().__init__(**kwargs)
        self.num_blocks = num_blocks
        self.default_init = default_init
        self.init_distribution = init_distribution

    def make_params(self, context: Context) -> attention.AttentionParams:
        """Returns the weights; creates their variables."""
        return AttentionParamsFixup(
            context.mesh,
            **self._params_arguments(context),
            num_blocks=self.num_blocks,
            default_init=self.default_init,
            init_distribution=self.init_distribution,
        )


@gin.configurable(module=_MODULE)
class EncDecAttentionFixup(transformer_layers.EncDecAttention):
    """Encoder-decoder attention for Fixup stacks; see `EncDecAttention`."""

    def __init__(self, relative_attention_type: Optional[str] = None, **kwargs: Any):
        # Weights are those of EncDecAttention, as in the classic; the class lets gin bind its own
        # arguments.
        super().__init__(relative_attention_type=relative_attention_type, **kwargs)
