"""Convolutions of two or three spatial dimensions, ordinary and transposed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Optional

import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops as mtf
from mesh_tensorflow._core.cost import Cost
from mesh_tensorflow._core.interfaces import LoweringLike
from mesh_tensorflow._core.operation import Operation, PendingSums, gradient_of_output
from mesh_tensorflow._core.shape import Shape, list_product
from mesh_tensorflow._core.tensor import Tensor
from mesh_tensorflow._mesh.mesh_impl import MeshImpl
from mesh_tensorflow._mesh.slice_functions import merged_sizes, never_with_bias
from mesh_tensorflow.ops._contractions.conv_compiled import wide_by_filter
from mesh_tensorflow.ops._contractions.conv_kind import (
    FILTER,
    NARROW,
    WIDE,
    ConvForm,
    ConvKind,
    check_shapes,
    conv_kind,
)
from mesh_tensorflow.ops._elementwise.binary import check_dtypes

__all__ = [
    "Conv2dOperation",
    "Conv2dTransposeOperation",
    "Conv3dOperation",
    "Conv3dTransposeOperation",
]

# For each computed tensor: the TensorFlow operation for each number of spatial dimensions, its
# argument names for the two operands, and its argument name for the sizes of the result, if any.
_KERNELS: dict[str, tuple[dict[int, Any], dict[str, str], Optional[str]]] = {
    NARROW: (
        {2: tf.raw_ops.Conv2D, 3: tf.raw_ops.Conv3D},
        {WIDE: "input", FILTER: "filter"},
        None,
    ),
    WIDE: (
        {2: tf.raw_ops.Conv2DBackpropInput, 3: tf.raw_ops.Conv3DBackpropInputV2},
        {NARROW: "out_backprop", FILTER: "filter"},
        "input_sizes",
    ),
    FILTER: (
        {2: tf.raw_ops.Conv2DBackpropFilter, 3: tf.raw_ops.Conv3DBackpropFilterV2},
        {WIDE: "input", NARROW: "out_backprop"},
        "filter_sizes",
    ),
}


class ConvNdOperation(Operation):
    """One of the three tensors of a convolution, computed from the other two."""

    def __init__(
        self,
        kind: ConvKind,
        operands: dict[str, Tensor],
        output_shape: Optional[Shape],
        name: Optional[str],
    ):
        """Creates the operation.

        Args:
          kind: a ConvKind.
          operands: Tensors by their role, for two of the three roles.
          output_shape: Shape of the third; None for an image of the default size.
          name: a string or None.

        Raises:
          ValueError: shapes or dtypes do not match, or TensorFlow does not convolve the dtype.
        """
        computed = next(role for role in _KERNELS if role not in operands)
        what = name or kind.names(kind.product(computed))[1]
        tensors = list(operands.values())
        self._check_inputs(tensors, what)
        check_dtypes(what, tensors)
        dtype = tensors[0].dtype
        if not dtype.is_floating and (kind.rank, dtype) != (2, tf.int32):
            raise ValueError(
                f"{what}: TensorFlow does not convolve {dtype.name} in {kind.rank} dimensions; "
                "use mtf.to_float on the inputs"
            )
        shapes = {role: x.shape for role, x in operands.items()}
        if output_shape is not None:
            shapes[computed] = output_shape
        check_shapes(what, kind, shapes)
        if output_shape is None:
            image = shapes[kind.input_role]
            shapes[computed] = kind.image_shape(computed, image, shapes[FILTER])
        super().__init__(tensors, name=what)
        self._form = ConvForm(kind, list(operands), computed, shapes)
        self._strides, self._padding = kind.tf_strides, kind.padding
        self._outputs = [Tensor(self, shapes[computed], dtype)]

    @functools.cached_property
    def _form(self) -> ConvForm:
        """What it computes, which the constructor sets."""
        raise AttributeError(f"{type(self).__name__} has no _form: call super().__init__")

    @property
    def _product(self) -> str:
        return self._form.kind.product(self._form.computed)

    def _unsplittable(self) -> list[str]:
        kind, _, _, shapes = self._form
        # A window reaches over neighboring pixels: to split the image, its halos would have to be
        # exchanged.
        spatial = slice(-kind.rank - 1, -1)
        window = shapes[FILTER][: kind.rank]
        return [d.name for d in window + shapes[WIDE][spatial] + shapes[NARROW][spatial]]

    # -- gradient

    def gradient(self, grad_ys: Sequence[Optional[Tensor]]) -> Sequence[Tensor]:
        """Returns the two other products of the same kind: each role is bilinear in the others."""
        # Each product is linear in either operand, and its gradients are the other two products.
        _, roles, computed, _ = self._form
        tensors = {**dict(zip(roles, self._inputs)), computed: gradient_of_output(grad_ys)}
        return [self._product_of(role, tensors) for role in roles]

    def _product_of(self, role: str, tensors: dict[str, Tensor]) -> Tensor:
        """Returns the tensor with the given role in this convolution, computed from the others."""
        kind, _, _, shapes = self._form
        rank, transposed = kind.rank, kind.transposed
        movement = (kind.tf_strides, kind.padding)
        if role == FILTER:
            images = tensors[kind.input_role], shapes[FILTER], tensors[kind.output_role]
            op = mtf.Conv2or3dBackpropFilterOperation(rank, transposed, *images, *movement)
            return op.outputs[0]
        given = NARROW if role == WIDE else WIDE
        usual = kind.image_shape(role, shapes[given], shapes[FILTER])
        if role == kind.output_role and usual == shapes[role]:
            cls = _FORWARD[rank, transposed]
            return cls(tensors[given], tensors[FILTER], *movement).outputs[0]
        # A wide image that has not the default size of a transposed convolution needs its shape.
        return mtf.Conv2or3dBackpropInputOperation(
            rank, role == NARROW, shapes[role], tensors[FILTER], tensors[given], *movement
        ).outputs[0]

    # -- lowering

    def _summed_axes(self, mesh_impl: MeshImpl) -> list[int]:
        """Returns the mesh axes that split the summed dimensions, in the order of these."""
        kind, _, computed, shapes = self._form
        # Spatial dimensions, over which products sum too, are never split.
        summed = {
            NARROW: shapes[FILTER][-2:-1],
            WIDE: shapes[FILTER][-1:],
            FILTER: shapes[WIDE][: -kind.rank - 1],
        }[computed]
        return mesh_impl.splitting_axes(summed)

    def lower(self, lowering: LoweringLike) -> None:
        """Convolves slice by slice; leaves a partial sum over split summed dimensions."""
        mesh_impl = lowering.mesh_impl(self)
        output = self.outputs[0]
        self._count(lowering, lowering.requested_impl(self))
        result = mesh_impl.slicewise(
            self._slice_fn(mesh_impl), *[lowering.tensors[x] for x in self.inputs]
        )
        axes = self._summed_axes(mesh_impl)
        _, _, label = self._form.kind.names(self._product)
        lowering.set_partial_sum(output, result, axes, label)

    def _slice_fn(self, mesh_impl: MeshImpl) -> Callable[..., tf.Tensor]:
        """Returns a function of one processor's slices of the inputs."""
        kind, roles, computed, shapes = self._form
        kernels, argument_names, sizes_name = _KERNELS[computed]

        def batch_dims(role: str) -> int:
            # The batch dimensions of an image are merged; a filter's window stays as it is.
            return 1 if role == FILTER else len(shapes[role]) - kind.rank - 1

        def apply(*slices: tf.Tensor) -> tf.Tensor:
            merged = {
                role: mesh_impl.merge_dims(x, shapes[role], batch_dims(role))
                for role, x in zip(roles, slices)
            }
            sizes = merged_sizes(mesh_impl, shapes[computed], batch_dims(computed))
            y = None
            if computed == WIDE and mesh_impl.needs_static_sizes:
                y = wide_by_filter(kind, merged[NARROW], merged[FILTER], sizes)
            if y is None:
                arguments: dict[str, Any] = {argument_names[r]: x for r, x in merged.items()}
                if sizes_name is not None:
                    arguments[sizes_name] = sizes
                y = kernels[kind.rank](strides=kind.tf_strides, padding=kind.padding, **arguments)
                y = never_with_bias(y)
            return mesh_impl.split_dims(y, shapes[computed], batch_dims(computed))

        return apply

    # -- cost

    def _multiply_adds(self, image: str, sizes_of: Callable[[Shape], list[int]]) -> int:
        """Returns the number of products of elements of `image` and elements of the filter."""
        *window, wide, narrow = sizes_of(self._form.shapes[FILTER])
        pixels = list_product(sizes_of(self._form.shapes[image]))
        return pixels * list_product(window) * (wide if image == NARROW else narrow)

    def _count(self, lowering: LoweringLike, mesh_impl: MeshImpl) -> None:
        counter, _, _ = self._form.kind.names(self._product)
        image = self._form.kind.output_role
        laid_out = self._multiply_adds(image, mesh_impl.slice_shape) * mesh_impl.size
        unique = self._multiply_adds(image, lambda shape: shape.to_integer_list)
        lowering.add_counter(f"{counter}/{self._product}", laid_out)
        lowering.add_counter(f"{counter}_unique/{self._product}", unique)

    def cost(self, mesh_impl: MeshImpl) -> Cost:
        """Two flops for each multiply-add of every processor."""
        multiply_adds = self._multiply_adds(NARROW, mesh_impl.slice_shape) * mesh_impl.size
        return Cost(flops=2 * multiply_adds, bytes=super().cost(mesh_impl).bytes)

    def cost_key(self) -> tuple:
        """The kind of convolution, and which of its tensors is computed."""
        return self._form.kind, tuple(self._form.roles)

    def pending_sums(self, mesh_impl: MeshImpl, pending: PendingSums) -> dict:
        """The output is pending over the mesh axes that split summed dimensions."""
        summed = self._summed_axes(mesh_impl)
        return {self.outputs[0]: tuple(sorted(summed))} if summed else {}


class _ForwardConvOperation(ConvNdOperation):
    """A convolution of an image with a filter; subclasses define the kind."""

    _family = (0, False)

    def __init__(
        self,
        conv_input: Tensor,
        conv_filter: Tensor,
        strides: Sequence[int],
        padding: str,
        name: Optional[str] = None,
    ):
        """Creates the operation.

        Args:
          conv_input: a Tensor [batch..., spatial..., in]; any number of batch dimensions.
          conv_filter: a Tensor [window..., in, out]; [window..., out, in] if transposed.
          strides: a list [1, stride of each spatial dimension..., 1].
          padding: "SAME" or "VALID". The output sizes are those of TensorFlow. For a spatial
            dimension of size n, a stride s and a window k they are ceil(n / s) for "SAME" and
            floor((n - k) / s) + 1 for "VALID"; if transposed, n * s for "SAME" and
            (n - 1) * s + max(k, s) for "VALID".
          name: a string or None.

        Raises:
          ValueError: dtypes, ranks, channels, strides or padding are invalid or do not match, or
            the window is larger than the image.
        """
        kind = conv_kind(name or type(self).__name__, *self._family, strides, padding)
        operands = {kind.input_role: conv_input, FILTER: conv_filter}
        super().__init__(kind, operands, None, name)
        x, w, y = conv_input.shape.dims, conv_filter.shape.dims, self._outputs[0].shape.dims
        first = -kind.rank - 1
        self._batch_dims, self._in_dim, self._out_dim = x[:first], x[-1], y[-1]
        # For subclasses that read what the classic's constructor sets.
        for letter, *dims in zip("dhw"[-kind.rank :], x[first:-1], w, y[first:-1]):
            for prefix, dim in zip(("in_", "f", "out_"), dims):
                setattr(self, f"_{prefix}{letter}_dim", dim)

    @functools.cached_property
    def _form(self) -> ConvForm:
        """What it computes, if a subclass sets the fields instead of calling this constructor."""
        kind = conv_kind(self.name, *self._family, self._strides, self._padding)
        x, w = self._inputs
        shapes = {kind.input_role: x.shape, FILTER: w.shape}
        form = ConvForm(kind, list(shapes), kind.output_role, shapes)
        return form._replace(shapes={**shapes, form.computed: self._outputs[0].shape})


class Conv2dOperation(_ForwardConvOperation):
    """Convolves [batch..., h, w, in] with [fh, fw, in, out] to [batch..., h, w, out]."""

    _family = (2, False)


class Conv3dOperation(_ForwardConvOperation):
    """Convolves [batch..., d, h, w, in] with [fd, fh, fw, in, out] to [batch..., d, h, w, out]."""

    _family = (3, False)


class Conv2dTransposeOperation(_ForwardConvOperation):
    """Transposed convolution of [batch..., h, w, in] with [fh, fw, out, in]."""

    _family = (2, True)


class Conv3dTransposeOperation(_ForwardConvOperation):
    """Transposed convolution of [batch..., d, h, w, in] with [fd, fh, fw, out, in]."""

    _family = (3, True)


_FORWARD = {cls._family: cls for cls in _ForwardConvOperation.__subclasses__()}
