"""Dense layers and embeddings: their kernels and initializers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Optional, Union

import gin
import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow import layers
from mesh_tensorflow._core.errors import WrongTypeError, check_flag, dims_text
from mesh_tensorflow._core.shape import list_of_dimensions
from mesh_tensorflow.layers._attention import trains_if_not_told
from mesh_tensorflow.ops._variable import InputDType


@gin.configurable(module="mesh_tensorflow.layers")
def unit_scaling_convention(value: bool = False) -> bool:
    """Returns whether weights have unit variance and contractions are scaled instead.

    Set it through gin: `mesh_tensorflow.layers.unit_scaling_convention.value = True`.

    >>> print(mtf.layers.unit_scaling_convention())
    False
    """
    return value


def us_einsum(xs: Sequence[mtf.Tensor], *args: Any, **kwargs: Any) -> mtf.Tensor:
    """Computes an einsum, scaled under the unit scaling convention.

    With `unit_scaling_convention`, the result is divided by the square root of the product of the
    sizes of the contracted dimensions.

    >>> x = mtf.ones(mesh, "batch:2,d:4")
    >>> w = mtf.ones(mesh, "d:4,out:3")
    >>> print(mtf.layers.us_einsum([x, w], reduced_dims=w.shape.dims[:1]).shape)
    Shape[batch=2, out=3]

    Args:
      xs: a list of Tensors.
      *args: further arguments of mtf.einsum.
      **kwargs: further arguments of mtf.einsum.
    """
    y = mtf.einsum(xs, *args, **kwargs)
    if not layers.unit_scaling_convention():
        return y
    # A set: a dimension that several factors have is summed over once.
    contracted = {d for x in xs for d in x.shape} - set(y.shape)
    # A sum of n products of variance 1 has the variance n.
    return y * (max(1, mtf.list_product(d.size for d in contracted)) ** -0.5)


class DenseInitializer:
    """Base class of initializers of dense kernels, which depend on the layer's dimensions.

    >>> print(issubclass(mtf.layers.VarianceScalingInitializer, mtf.layers.DenseInitializer))
    True
    """

    def __call__(
        self, reduced_dims: Sequence[mtf.Dimension], new_dims: Sequence[mtf.Dimension]
    ) -> Any:
        """Returns a TensorFlow initializer.

        Args:
          reduced_dims: the input Dimensions, which the layer contracts.
          new_dims: the output Dimensions.
        """
        raise NotImplementedError(f"{type(self).__name__} does not say how to initialize")


_MODES = {
    "fan_in": lambda fan_in, fan_out: fan_in,
    "fan_out": lambda fan_in, fan_out: fan_out,
    "fan_avg": lambda fan_in, fan_out: (fan_in + fan_out) / 2.0,
}
_DISTRIBUTIONS = {
    "normal": lambda variance: tf.truncated_normal_initializer(stddev=math.sqrt(variance)),
    # A uniform distribution on [-a, a] has the variance a ** 2 / 3.
    "uniform": lambda variance: tf.random_uniform_initializer(
        minval=-math.sqrt(3.0 * variance), maxval=math.sqrt(3.0 * variance)
    ),
}


@gin.configurable(module="mesh_tensorflow.layers")
class VarianceScalingInitializer(DenseInitializer):
    """An initializer with variance inversely proportional to the fan-in, fan-out, or their mean.

    "normal" is a truncated normal distribution, without a correction for the variance that
    truncation removes.

    >>> x = mtf.ones(mesh, "batch:2,d:4")
    >>> glorot = mtf.layers.VarianceScalingInitializer(mode="fan_avg", distribution="uniform")
    >>> out = mtf.Dimension("out", 8)
    >>> y = mtf.layers.dense(x, [out], x.shape.dims[1:], kernel_initializer=glorot)
    >>> print(y.shape)
    Shape[batch=2, out=8]

    Attributes:
      scale: a factor applied to the variance.
      mode: "fan_in", "fan_out" or "fan_avg".
      distribution: "normal" or "uniform".
    """

    def __init__(self, scale: float = 1.0, mode: str = "fan_in", distribution: str = "normal"):
        self.scale = scale
        self.mode = mode.lower()
        self.distribution = distribution.lower()
        for value, table in ((self.mode, _MODES), (self.distribution, _DISTRIBUTIONS)):
            if value not in table:
                raise ValueError(
                    f"VarianceScalingInitializer: {value!r} is none of {', '.join(sorted(table))}"
                )

    def __call__(
        self, reduced_dims: Sequence[mtf.Dimension], new_dims: Sequence[mtf.Dimension]
    ) -> Any:
        # TensorFlow's own initializer would take all axes but the last two for a window of a
        # convolution.
        fan_in = mtf.list_product(d.size for d in reduced_dims)
        fan_out = mtf.list_product(d.size for d in new_dims)
        fan = _MODES[self.mode](fan_in, fan_out)
        # Dimensions of size 0 have fan 0; a kernel without elements takes any variance.
        variance = self.scale / max(1.0, fan)
        if layers.unit_scaling_convention():
            # What `us_einsum` divides by is known of an einsum alone: what it contracts, which is
            # the fan-in.
            if self.mode != "fan_in":
                raise ValueError(
                    "the unit scaling convention scales by fan_in; VarianceScalingInitializer "
                    f"has mode {self.mode!r}"
                )
            # `us_einsum` divides by the root of the fan-in instead.
            variance = self.scale
        return _DISTRIBUTIONS[self.distribution](variance)


def get_dense_kernel_weights(
    x: mtf.Tensor,
    new_dims: Sequence[mtf.Dimension],
    reduced_dims: Sequence[mtf.Dimension],
    expert_dims: Optional[Sequence[mtf.Dimension]],
    kernel_initializer: Optional[Callable],
    name: Optional[str] = None,
    variable_dtype: Optional[mtf.VariableDType] = None,
    master_dtype: tf.DType = tf.float32,
    slice_dtype: tf.DType = tf.float32,
) -> mtf.Tensor:
    """Creates the kernel variable of a dense layer; returns it cast to the dtype of `x`.

    >>> x = mtf.ones(mesh, "batch:2,d:4")
    >>> out, initializer = mtf.Dimension("out", 8), mtf.layers.VarianceScalingInitializer()
    >>> w = mtf.layers.get_dense_kernel_weights(x, [out], x.shape.dims[1:], [], initializer)
    >>> print(w.shape)
    Shape[d=4, out=8]

    Args:
      x: a Tensor.
      new_dims: a list of Dimensions.
      reduced_dims: a list of Dimensions of `x`, under the names they have in the kernel.
      expert_dims: a list of Dimensions with separate weights for each index, or None.
      kernel_initializer: a TensorFlow initializer, a DenseInitializer, or None.
      name: a string, the variable scope; "dense" if None.
      variable_dtype: a VariableDType or None.
      master_dtype: used if `variable_dtype` is None.
      slice_dtype: used if `variable_dtype` is None.

    Returns:
      A Tensor of shape [expert_dims..., reduced_dims..., new_dims...].
    """
    if kernel_initializer is None:
        kernel_initializer = VarianceScalingInitializer()
    if isinstance(kernel_initializer, DenseInitializer):
        # Without the expert dimensions: each expert has its own inputs and outputs, so its own fan.
        kernel_initializer = kernel_initializer(reduced_dims, new_dims)
    with tf.variable_scope(name, default_name="dense"):
        kernel = mtf.get_variable(
            x.mesh,
            "kernel",
            mtf.Shape([*(expert_dims or []), *reduced_dims, *new_dims]),
            initializer=kernel_initializer,
            dtype=variable_dtype or InputDType(master_dtype, slice_dtype, x.dtype),
        )
    # The caller's VariableDType may say another dtype of activations than that of `x`.
    return mtf.cast(kernel, x.dtype)


def dense(
    x: mtf.Tensor,
    new_dims: Union[mtf.Dimension, Sequence[mtf.Dimension]],
    reduced_dims: Optional[Sequence[mtf.Dimension]] = None,
    expert_dims: Optional[Sequence[mtf.Dimension]] = None,
    use_bias: bool = True,
    activation: Optional[Union[Callable, list, tuple]] = None,
    master_dtype: tf.DType = tf.float32,
    slice_dtype: tf.DType = tf.float32,
    variable_dtype: Optional[mtf.VariableDType] = None,
    kernel_initializer: Optional[Callable] = None,
    kernel_weights: Optional[mtf.Tensor] = None,
    name: Optional[str] = None,
) -> mtf.Tensor:
    """Applies a linear map from some dimensions to others, a bias and an activation function.

    A reduced dimension that is also a new one is renamed with a leading "_", so that a layout
    rule for it splits only the output side of the kernel.

    >>> x = mtf.ones(mesh, "batch:2,d:4")
    >>> out = mtf.Dimension("out", 8)
    >>> y = mtf.layers.dense(x, [out], x.shape.dims[1:], activation=mtf.relu, name="encode")
    >>> print(y.shape, [v.name for v in graph.trainable_variables])
    Shape[batch=2, out=8] ['encode/kernel', 'encode/bias']

    Args:
      x: a Tensor.
      new_dims: a list of Dimensions, or one.
      reduced_dims: a list of Dimensions of `x`; if None, the last one, with a warning.
      expert_dims: a list of Dimensions of `x` with separate weights for each index.
      use_bias: whether to add a bias.
      activation: a function of a Tensor, a list of functions applied in order, or None.
      master_dtype: used if `variable_dtype` is None.
      slice_dtype: used if `variable_dtype` is None.
      variable_dtype: a VariableDType; if None, made of `master_dtype`, `slice_dtype` and the dtype
        of `x` for activations.
      kernel_initializer: a TensorFlow initializer, a DenseInitializer, or None.
      kernel_weights: a Tensor to use as the kernel instead of a variable, or None.
      name: a string, the variable scope; "dense" if None.

    Returns:
      A Tensor of shape [remaining dims of x..., new_dims...].

    Raises:
      ValueError: a reduced or expert dimension is not in `x`, or a new one is also kept.
      WrongTypeError: an activation is no function.
    """
    check_flag("dense", "use_bias", use_bias, "dense(x, new_dims, activation={value})")
    functions = activation if isinstance(activation, (list, tuple)) else [activation]
    for fn in functions:
        if fn is not None and not callable(fn):
            raise WrongTypeError(
                f"dense: activation is a function of a Tensor, such as mtf.relu, not {fn!r}"
            )
    new_dims = list_of_dimensions("dense: new_dims", new_dims)
    expert_dims = list(expert_dims or [])
    if reduced_dims is None:
        tf.logging.warning(
            "dense: reduced_dims should be given; taking the last dimension of %s %s",
            x.name,
            x.shape,
        )
        reduced_dims = x.shape.dims[-1:]
    reduced_dims = list_of_dimensions("dense: reduced_dims", reduced_dims)
    # Of the dimensions as they are given: errors name them as the caller does.
    kept = _kept_dims(x, new_dims, reduced_dims, expert_dims)
    # Of one name, a reduced and a new dimension would be one to the einsum, multiplied elementwise
    # and not summed.
    inner = [mtf.Dimension("_" + d.name, d.size) if d in new_dims else d for d in reduced_dims]
    for d, renamed in zip(reduced_dims, inner):
        if d != renamed:
            x = mtf.rename_dimension(x, d.name, renamed.name)
    if kernel_weights is None:
        # By way of the package, where programs and tests replace the function.
        kernel_weights = layers.get_dense_kernel_weights(
            x,
            new_dims,
            inner,
            expert_dims,
            kernel_initializer,
            name=name,
            variable_dtype=variable_dtype,
            master_dtype=master_dtype,
            slice_dtype=slice_dtype,
        )
    # A second scope: without a name the bias is dense_1/bias, beside dense/kernel, as it is in
    # checkpoints of the classic.
    with tf.variable_scope(name, default_name="dense"):
        output_shape = mtf.Shape(kept + new_dims)
        # Expert dimensions are in the output, too: so they are not summed over, and each expert has
        # its kernel.
        y = layers.us_einsum([x, kernel_weights], output_shape=output_shape)
        if use_bias:
            bias = mtf.get_variable(
                x.mesh,
                "bias",
                mtf.Shape(expert_dims + new_dims),
                initializer=tf.zeros_initializer(),
                dtype=variable_dtype or InputDType(master_dtype, slice_dtype, x.dtype),
            )
            # Several dimensions of experts may be in another order than in `y`.
            y = mtf.add(y, mtf.cast(bias, y.dtype), output_shape=y.shape)
        for fn in functions:
            y = y if fn is None else fn(y)
        return y


def _kept_dims(
    x: mtf.Tensor,
    new_dims: Sequence[mtf.Dimension],
    reduced_dims: Sequence[mtf.Dimension],
    expert_dims: Sequence[mtf.Dimension],
) -> list[mtf.Dimension]:
    """Returns the dimensions of `x` that the result keeps, in front of the new ones.

    Raises:
      ValueError: a reduced or expert dimension is not in `x`, or a new one is also kept.
    """
    missing = [d for d in [*reduced_dims, *expert_dims] if d not in x.shape]
    if missing:
        raise ValueError(
            f"dense: {x.name} {x.shape} has no dimension {dims_text(missing)}; reduced_dims and "
            "expert_dims must be among its dimensions"
        )
    kept = [d for d in x.shape if d not in reduced_dims]
    twice = [d for d in kept if d in new_dims]
    if twice and reduced_dims:  # without reduced dimensions, an elementwise product is meant
        raise ValueError(
            f"dense: the result would have {dims_text(twice)} twice: {x.name} {x.shape} keeps it, "
            f"reducing {dims_text(reduced_dims)}, and new_dims is {dims_text(new_dims)}. Rename it "
            "in x with mtf.rename_dimension, or reduce it, too"
        )
    # Those of an elementwise product are among the new ones, where the result has them once.
    return [d for d in kept if d not in new_dims]


def _activation(fn: Optional[Union[str, Callable]]) -> Optional[Callable]:
    if fn is None or fn == "linear":
        return None
    return getattr(mtf, fn) if isinstance(fn, str) else fn


def dense_product(
    x: mtf.Tensor,
    reduced_dims: Sequence[mtf.Dimension],
    new_dims: Union[mtf.Dimension, Sequence[mtf.Dimension]],
    activation_functions: Optional[Union[str, Callable, list, tuple]] = None,
    name: str = "dense_product",
    **kwargs: Any,
) -> mtf.Tensor:
    """Multiplies the results of several dense layers, as in gated linear units (GLU).

    Shazeer, "GLU variants improve transformer" (2020).

    >>> x = mtf.ones(mesh, "batch:2,d:4")
    >>> out = mtf.Dimension("out", 8)
    >>> y = mtf.layers.dense_product(x, x.shape.dims[1:], [out], ["linear", "sigmoid"])
    >>> print(y.shape)
    Shape[batch=2, out=8]

    Args:
      x: a Tensor.
      reduced_dims: a list of Dimensions of `x`.
      new_dims: a list of Dimensions, or one.
      activation_functions: a list with the activation of each layer: a function, the name of a
        function in mtf, "linear" or None; or one of these, for a single layer.
      name: a string; several layers are named `<name>_0`, `<name>_1`, ...
      **kwargs: further arguments of `dense`.
    """
    if not isinstance(activation_functions, (list, tuple)):
        activation_functions = [activation_functions]
    # As in checkpoints of the classic: a single layer has no number in its name.
    several = len(activation_functions) > 1
    factors = [
        dense(
            x,
            new_dims,
            reduced_dims=reduced_dims,
            activation=_activation(fn),
            name=f"{name}_{i}" if several else name,
            **kwargs,
        )
        for i, fn in enumerate(activation_functions)
    ]
    product = factors[0]
    for factor in factors[1:]:
        product *= factor
    return product


@trains_if_not_told
def dense_relu_dense(
    x: mtf.Tensor,
    hidden_channels: mtf.Dimension,
    is_training: bool,
    dropout: float = 0.0,
    dropout_broadcast_dims: Optional[Sequence[mtf.Dimension]] = None,
    master_dtype: tf.DType = tf.float32,
    slice_dtype: tf.DType = tf.float32,
    name: Optional[str] = None,
) -> mtf.Tensor:
    """Applies a feed-forward block: a dense layer with relu, dropout, and a second dense layer.

    >>> x = mtf.ones(mesh, "batch:2,d:4")
    >>> print(mtf.layers.dense_relu_dense(x, mtf.Dimension("hidden", 16), is_training=True).shape)
    Shape[batch=2, d=4]

    Args:
      x: a Tensor with dimensions [..., io].
      hidden_channels: a Dimension, the output of the first layer.
      is_training: whether dropout is applied; if it is left out, as before 0.1.19, it is.
      dropout: the dropout rate.
      dropout_broadcast_dims: Dimensions along which dropout is shared, or None.
      master_dtype: a dtype.
      slice_dtype: a dtype.
      name: a string, the variable scope; "dense_relu_dense" if None.

    Returns:
      A Tensor of the shape of `x`.
    """
    with tf.variable_scope(name, default_name="dense_relu_dense"):
        io_channels = x.shape.dims[-1]
        dtypes = {"master_dtype": master_dtype, "slice_dtype": slice_dtype}
        h = dense(
            x,
            hidden_channels,
            reduced_dims=[io_channels],
            use_bias=False,
            activation=mtf.relu,
            name="wi",
            **dtypes,
        )
        noise_shape = h.shape - dropout_broadcast_dims  # type: ignore[operator]
        h = mtf.dropout(h, is_training, keep_prob=1.0 - dropout, noise_shape=noise_shape)
        return dense(
            h,
            io_channels,
            reduced_dims=[hidden_channels],
            use_bias=False,
            name="wo",
            **dtypes,
        )


def embedding_weights(
    mesh: mtf.Mesh,
    vocab_dim: mtf.Dimension,
    output_dim: mtf.Dimension,
    variable_dtype: mtf.VariableDType,
    name: str = "embedding",
    ensemble_dim: Optional[Union[mtf.Dimension, Sequence[mtf.Dimension]]] = None,
    initializer: Optional[Callable] = None,
) -> mtf.Tensor:
    """Creates the variable that holds the embedding vectors.

    >>> vocab, d = mtf.convert_to_shape("vocab:10,d:4").dims
    >>> print(mtf.layers.embedding_weights(mesh, vocab, d, mtf.VariableDType()).shape)
    Shape[vocab=10, d=4]

    Args:
      mesh: a Mesh.
      vocab_dim: the Dimension of ids, of the size of the vocabulary.
      output_dim: a Dimension.
      variable_dtype: a VariableDType.
      name: a string, the name of the variable.
      ensemble_dim: a Dimension or a list of them, for separate vectors per model of an ensemble.
      initializer: a TensorFlow initializer; standard normal if None.

    Returns:
      A Tensor with dimensions [ensemble_dim..., vocab_dim, output_dim].
    """
    ensemble_dims = list_of_dimensions("embedding_weights: ensemble_dim", ensemble_dim or [])
    return mtf.get_variable(
        mesh,
        name,
        mtf.Shape([*ensemble_dims, vocab_dim, output_dim]),
        dtype=variable_dtype,
        # Of compat.v1, whose deviation is 1; in TensorFlow 2 the initializer of this name has 0.05.
        initializer=tf.random_normal_initializer() if initializer is None else initializer,
    )


def embedding(
    indices: mtf.Tensor,
    vocab_dim: mtf.Dimension,
    output_dim: mtf.Dimension,
    variable_dtype: mtf.VariableDType,
    name: str = "embedding",
) -> mtf.Tensor:
    """Looks up embedding vectors in a variable that it creates.

    An id out of range gives a vector of zeros.

    >>> vocab, d = mtf.convert_to_shape("vocab:10,d:4").dims
    >>> ids = mtf.constant(mesh, [3, 1], "batch:2", tf.int32)
    >>> print(mtf.layers.embedding(ids, vocab, d, mtf.VariableDType()).shape)
    Shape[batch=2, d=4]

    Args:
      indices: ids, an integer Tensor with dimensions [...].
      vocab_dim: the Dimension of ids, of the size of the vocabulary.
      output_dim: a Dimension.
      variable_dtype: a VariableDType.
      name: a string, the name of the variable.

    Returns:
      A Tensor with dimensions [..., output_dim].

    Raises:
      ValueError: the ids are not integers, or have the dimension `vocab_dim`.
    """
    # A lookup contracts the vocabulary, so ids with this dimension would be contracted, too.
    if not indices.dtype.is_integer or vocab_dim in indices.shape:
        raise ValueError(
            f"embedding: indices {indices.name} {indices.shape} {indices.dtype.name} must be "
            f"integers without the dimension {dims_text([vocab_dim])}; use mtf.to_int32 or "
            "mtf.rename_dimension"
        )
    weights = embedding_weights(indices.mesh, vocab_dim, output_dim, variable_dtype, name)
    return mtf.gather(weights, indices, vocab_dim)
