"""GspmdMeshImpl: a program on whole tensors, which XLA's partitioner splits over devices.

The program is lowered as on one processor. Each tensor is a whole value, annotated by its layout
where XLA compiles the program. XLA's partitioner (GSPMD) then makes the program of one device, and
puts in the collectives: here, a sum over processors is nothing more than the sum itself.
`mesh_tensorflow.pjrt` runs such programs on any device that XLA knows. In a plain tf.function, or a
session, they run on one device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Optional, Union

import tensorflow.compat.v1 as tf

from mesh_tensorflow._core.interfaces import LaidOutLike
from mesh_tensorflow._core.layout import LayoutLike, TensorLayout
from mesh_tensorflow._core.shape import Dimension, Shape, ShapeLike
from mesh_tensorflow._core.tensor import Tensor
from mesh_tensorflow._mesh.gspmd.merging import merge_parts, split_parts
from mesh_tensorflow._mesh.gspmd.product import matrix_product
from mesh_tensorflow._mesh.gspmd.sharding import annotated, current_compilation, sharding_text
from mesh_tensorflow._mesh.gspmd.tensor import GspmdTensor
from mesh_tensorflow._mesh.gspmd.variable import GspmdVariable
from mesh_tensorflow._mesh.laid_out import convert_args_to_laid_out_tensors
from mesh_tensorflow._mesh.mesh_impl import MeshImpl
from mesh_tensorflow._mesh.naming import named_collective
from mesh_tensorflow._mesh.slices import random_values
from mesh_tensorflow._mesh.stored_layout import given_stored_layout

__all__ = ["GspmdMeshImpl"]


class GspmdMeshImpl(MeshImpl[GspmdTensor]):
    """A mesh of devices that XLA's partitioner splits whole tensors over.

    Its laid-out tensors are whole values, and operations are lowered through `execution_impl`,
    which has one processor. Layouts, counters and checks are those of the mesh.

    >>> import mesh_tensorflow as mtf
    >>> impl = mtf.GspmdMeshImpl("rows:2,cols:2", "batch:rows")
    >>> impl.slice_shape(mtf.Shape([("batch", 4)])), impl.execution_impl.size
    ([2], 1)

    Attributes:
      devices: one device, of TensorFlow's choice.
      copy_master_to_slice_ops: the tf operations that copy masters to slices, in order.
    """

    LaidOutVariable = GspmdVariable
    needs_execution_impl = True

    def __init__(
        self,
        shape: ShapeLike,
        layout: LayoutLike,
        annotate: Optional[bool] = None,
        variable_layout: Optional[LayoutLike] = None,
        zero: Optional[int] = None,
        zero_axis: Optional[str] = None,
    ):
        """Creates a GspmdMeshImpl.

        Args:
          shape: the mesh shape; a Shape, or what converts to one, such as "rows:2,cols:2".
          layout: LayoutRules, or what converts to them, such as "batch:rows,d_ff:cols".
          annotate: whether values are annotated by their layouts. If None, in the programs of
            `mesh_tensorflow.pjrt`. On one device, annotations do nothing.
          variable_layout: rules by which variables are stored in parts, such as "d_model:rows".
          zero: the stage of ZeRO: 1 or 2 to store optimizers' slots in parts, 3 for weights too.
          zero_axis: the mesh dimension of ZeRO; that of a mesh with just one if None.
        """
        super().__init__(shape, layout)
        self.stored_layout = given_stored_layout(self.shape, variable_layout, zero, zero_axis)
        self._annotate = annotate
        self.devices = [""]
        self.copy_master_to_slice_ops: list[tf.Operation] = []
        self.LaidOutTensor = type("GspmdTensor", (GspmdTensor,), {"mesh_impl": self})

    @property
    def execution_impl(self) -> MeshImpl:
        """The mesh of one processor that operations are lowered through."""
        compilation = current_compilation()
        if compilation is not None:
            compilation.has_impl(self)
        return self._whole

    @functools.cached_property
    def _whole(self) -> MeshImpl:
        return self if self.size == 1 else _WholeMeshImpl(self)

    @property
    def needs_static_sizes(self) -> bool:  # type: ignore[override]
        """Whether a compiler must know all sizes: where XLA compiles the program."""
        return current_compilation() is not None

    def same_memory(self, device1: str, device2: str) -> bool:
        """Whether two devices are in one memory domain: there is one device."""
        return True

    def annotate(self, value: tf.Tensor, tensor_shape: Shape) -> tf.Tensor:
        """Returns a whole value annotated by the layout of its Shape, where XLA compiles it.

        Args:
          value: a whole value.
          tensor_shape: its Shape.
        """
        # Eager tensors have no graph, and nothing compiles them.
        if not self.annotates or not tf.is_tensor(value) or not hasattr(value, "graph"):
            return value
        layout = self.tensor_layout(tensor_shape)
        result = self.annotate_axes(value, layout)
        compilation = current_compilation()
        if compilation is not None:
            compilation.has_layout(value, layout)
            compilation.has_layout(result, layout)
        return result

    @property
    def annotates(self) -> bool:
        """Whether values are annotated."""
        return current_compilation() is not None if self._annotate is None else self._annotate

    def annotate_axes(self, value: tf.Tensor, axes: Iterable) -> tf.Tensor:
        """Returns a whole value annotated by the mesh axes that split its dimensions."""
        sharding = sharding_text(axes, self.shape)
        return value if sharding is None else annotated(value, sharding)

    # -- computation

    def slicewise(self, fn: Callable, *inputs: object) -> Any:
        """Calls `fn` with the whole values; see MeshImpl."""
        values = [
            x.tensor_list[0] if isinstance(x, GspmdTensor) else x
            for x in convert_args_to_laid_out_tensors(inputs)
        ]
        result = fn(*values)
        if isinstance(result, tuple):
            return tuple(self.LaidOutTensor([part]) for part in result)
        return self.LaidOutTensor([result])

    def einsum(self, equation: str, *slices: tf.Tensor) -> tf.Tensor:
        """Contracts whole values; see MeshImpl."""
        product = None if current_compilation() is None else matrix_product(equation, *slices)
        return super().einsum(equation, *slices) if product is None else product

    def Print(
        self, x: GspmdTensor, data: Sequence[GspmdTensor], message: str, **kwargs: object
    ) -> GspmdTensor:
        """Returns `x`, and prints `data`; where XLA compiles the program, it cannot print.

        Args:
          x: a LaidOutTensor.
          data: a list of LaidOutTensors.
          message: a string.
          **kwargs: `summarize`, `first_n` and `name` of tf.Print.
        """
        if current_compilation() is not None:
            return super().Print(x, data, message, **kwargs)
        shown = [d.to_laid_out_tensor().tensor_list[0] for d in data]
        return self.slicewise(lambda t: tf.Print(t, shown, message, **kwargs), x)

    def random(self, shape: Shape, tf_fn: Callable, kwargs: dict[str, Any]) -> GspmdTensor:
        """Returns a random tensor, the same as that of any other mesh implementation.

        Args:
          shape: a Shape.
          tf_fn: a function of tf.random.
          kwargs: its keyword arguments, including `seed`; or `key`, from random_values.new_key,
            instead of the seed.
        """
        kwargs, sizes = dict(kwargs), shape.to_integer_list
        seed, key = kwargs.pop("seed", None), kwargs.pop("key", None)
        if not random_values.is_known(tf_fn):
            return self.LaidOutTensor([tf_fn(sizes, seed=seed, **kwargs)])
        if key is None:
            key = self.random_key(seed)
        begin = [0] * len(sizes)
        value = random_values.random_slice(key, sizes, begin, sizes, tf_fn, kwargs)
        return self.LaidOutTensor([value])

    def random_key(self, seed: Optional[int]) -> tf.Tensor:
        """Returns a new key for random numbers; see MeshImpl."""
        compilation = current_compilation()
        return super().random_key(seed) if compilation is None else compilation.random_key(seed)

    # -- communication, which is left to the partitioner

    @named_collective
    def allreduce(
        self, x: GspmdTensor, mesh_axes: Sequence[int], reduction_fn_string: str
    ) -> GspmdTensor:
        """Returns the value: a sum over a whole dimension is complete."""
        return x.to_laid_out_tensor()

    @named_collective
    def reduce_scatter(self, x: GspmdTensor, mesh_axis: int, split_axis: int) -> GspmdTensor:
        """Returns the value, which is complete and whole."""
        return x.to_laid_out_tensor()

    def allsplit(
        self, x: GspmdTensor, mesh_axis: int, split_axis: int, which: Optional[GspmdTensor] = None
    ) -> GspmdTensor:
        """Returns the value, which stays whole."""
        return x.to_laid_out_tensor()

    @named_collective
    def allconcat(self, x: GspmdTensor, mesh_axis: int, concat_axis: int) -> GspmdTensor:
        """Returns the value, which is whole."""
        return x.to_laid_out_tensor()

    @named_collective
    def alltoall(
        self, x: GspmdTensor, mesh_axis: int, split_axis: int, concat_axis: int
    ) -> GspmdTensor:
        """Returns the value, which stays whole."""
        return x.to_laid_out_tensor()

    @named_collective
    def receive(
        self, x: GspmdTensor, mesh_axis: int, source_pcoord: Sequence[Optional[int]]
    ) -> GspmdTensor:
        """Returns the value if the only processor sends it to itself, else zeros."""
        x = x.to_laid_out_tensor()
        # Operations are lowered on the executed mesh, whose only processor has coordinate 0.
        return x if source_pcoord[0] is not None else self.slicewise(tf.zeros_like, x)

    def laid_out_pnum(self) -> GspmdTensor:
        """Returns a LaidOutTensor of the number of the only processor, 0."""
        return self.LaidOutTensor([tf.constant(0)])

    # -- whole tensors

    def export_to_tf_tensor(self, x: Tensor, laid_out_x: LaidOutLike) -> tf.Tensor:
        """Returns the whole value of a Tensor."""
        return laid_out_x.to_laid_out_tensor().tensor_list[0]

    def import_tf_tensor(self, x: Tensor, tf_x: tf.Tensor) -> GspmdTensor:
        """Returns the LaidOutTensor of a whole tf.Tensor."""
        self.slice_shape(x.shape)  # checks that it can be split
        return self.LaidOutTensor([tf.convert_to_tensor(tf_x)])


class _WholeMeshImpl(GspmdMeshImpl):
    """The executed mesh of a GspmdMeshImpl: one processor, for which slices are whole tensors."""

    def __init__(self, requested: GspmdMeshImpl):
        shape = Shape([Dimension(d.name, 1) for d in requested.shape])
        super().__init__(shape, requested.layout_rules)
        self.requested = requested
        self.stored_layout = None

    def annotate(self, value: tf.Tensor, tensor_shape: Shape) -> tf.Tensor:
        """Returns a value annotated by the layout on the requested mesh."""
        return self.requested.annotate(value, tensor_shape)

    def tensor_layout(self, arg: Union[Tensor, Shape]) -> TensorLayout:
        """Returns the layout of a Tensor or Shape, after checking that on the requested mesh."""
        self.requested.tensor_layout(arg)
        return super().tensor_layout(arg)

    def slice_shape(self, tensor_shape: Shape) -> list[int]:
        """Returns the sizes of a tensor, after checking that it can be split."""
        # Nothing is split here, so only the requested mesh can tell that a layout does not fit.
        self.requested.slice_shape(tensor_shape)
        return super().slice_shape(tensor_shape)

    def _cuts(self, tensor_shape: Shape, count: int) -> bool:
        """Whether annotations split another than the first of the dimensions to merge."""
        mesh_impl = self.requested
        return mesh_impl.annotates and bool(mesh_impl.splitting_axes(tensor_shape[1:count]))

    def merge_dims(self, x: tf.Tensor, tensor_shape: Shape, count: int) -> tf.Tensor:
        """Merges dimensions such that devices keep their parts; see MeshImpl."""
        if not self._cuts(tensor_shape, count):
            return super().merge_dims(x, tensor_shape, count)
        return self._requested_parts(merge_parts, x, tensor_shape, count)

    def split_dims(self, x: tf.Tensor, tensor_shape: Shape, count: int) -> tf.Tensor:
        """Undoes `merge_dims`; see MeshImpl."""
        if not self._cuts(tensor_shape, count):
            return super().split_dims(x, tensor_shape, count)
        return self._requested_parts(split_parts, x, tensor_shape, count)

    def _requested_parts(
        self, fn: Callable, x: tf.Tensor, tensor_shape: Shape, count: int
    ) -> tf.Tensor:
        mesh_impl = self.requested
        axes = [mesh_impl.splitting_axis(d) for d in tensor_shape]
        return fn(x, tensor_shape, axes, mesh_impl.shape, count, mesh_impl.annotate_axes)
