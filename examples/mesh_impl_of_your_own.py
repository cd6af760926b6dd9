"""A mesh implementation in a hundred lines: all processors on one device, as NumPy would do it.

    python examples/mesh_impl_of_your_own.py

A laid-out tensor is a list with a slice for each processor; a variable is its whole master, cut
when it is read and joined when it is assigned to. It is the least that a MeshImpl has to be, and a
start for one that runs on something else. The program trains a small layer in several layouts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Optional

import numpy as np
import tensorflow.compat.v1 as tf

import mesh_tensorflow as mtf


class ListTensor(mtf.LaidOutTensor):
    """One tf.Tensor for each processor, in order of processor number."""


class WholeVariable:
    """A variable that is kept whole: its master."""

    needs_copies = False  # there are no slices beside the master

    def __init__(self, variable: mtf.Variable, mesh_impl: OneDeviceMeshImpl):
        self._variable, self._mesh_impl = variable, mesh_impl
        self._master = variable.tf_master
        self._first = self._master.read_value()

    @property
    def laid_out_tensor(self) -> ListTensor:
        """The value at the beginning of the step."""
        return self._cut(self._first)

    def read(self) -> ListTensor:
        """The value where it is called."""
        return self._cut(self._master.read_value())

    def assign_to_slices(self, assign_fn: Callable, values: Sequence[tf.Tensor]) -> tf.Operation:
        """Assigns the whole of the slices, after all reads of the old value."""
        whole = self._mesh_impl.combine_slices(values, self._variable.shape)
        with tf.control_dependencies([self._first]):
            return assign_fn(self._variable, self._master, whole)

    def _cut(self, value: tf.Tensor) -> ListTensor:
        value = tf.cast(value, self._variable.slice_dtype)
        return ListTensor(self._mesh_impl.make_slices(value, self._variable.shape))


class OneDeviceMeshImpl(mtf.MeshImpl):
    """All processors on one device; what each of them does is done one after the other."""

    LaidOutTensor = ListTensor
    LaidOutVariable = WholeVariable

    def _groups(self, mesh_axes: Sequence[int]) -> list[list[int]]:
        return mtf.processor_groups(self.shape, mesh_axes)

    def slicewise(self, fn: Callable, *inputs: Any) -> Any:
        """Calls a function on each processor's slices."""
        inputs = mtf.convert_args_to_laid_out_tensors(inputs)
        results = [
            fn(*[x.all_slices[n] if isinstance(x, ListTensor) else x for x in inputs])
            for n in range(self.size)
        ]
        if isinstance(results[0], tuple):
            return tuple(map(ListTensor, zip(*results)))
        return ListTensor(results)

    def _exchange(self, x: Any, mesh_axes: Sequence[int], fn: Callable) -> ListTensor:
        """Gives each processor `fn(slices of its group, its place in the group)`."""
        slices, out = x.to_laid_out_tensor().all_slices, [None] * self.size
        for group in self._groups(mesh_axes):
            for place, n in enumerate(group):
                out[n] = fn([slices[m] for m in group], place)
        return ListTensor(out)

    def allreduce(self, x: Any, mesh_axes: Sequence[int], reduction_fn_string: str) -> ListTensor:
        """Sums, or takes the largest or the smallest."""
        reduce = mtf.reduction_fn(reduction_fn_string)
        return self._exchange(x, mesh_axes, lambda parts, _: reduce(tf.stack(parts), 0))

    def allconcat(self, x: Any, mesh_axis: int, concat_axis: int) -> ListTensor:
        """Joins the slices of a group."""
        return self._exchange(x, [mesh_axis], lambda parts, _: tf.concat(parts, concat_axis))

    def alltoall(self, x: Any, mesh_axis: int, split_axis: int, concat_axis: int) -> ListTensor:
        """Gives the processor at place i of a group the part i of every member."""
        return self._exchange(
            x,
            [mesh_axis],
            lambda parts, place: tf.concat(
                [tf.split(part, len(parts), split_axis)[place] for part in parts], concat_axis
            ),
        )

    def receive(self, x: Any, mesh_axis: int, source_pcoord: Sequence[Optional[int]]) -> ListTensor:
        """Gives each processor the slice of a member of its group, or zeros."""

        def taken(parts: list[tf.Tensor], place: int) -> tf.Tensor:
            source = source_pcoord[place]
            return tf.zeros_like(parts[place]) if source is None else parts[source]

        return self._exchange(x, [mesh_axis], taken)

    def laid_out_pnum(self) -> ListTensor:
        """The processors' numbers."""
        return ListTensor([tf.constant(n) for n in range(self.size)])

    def random(self, shape: mtf.Shape, tf_fn: Callable, kwargs: dict) -> ListTensor:
        """One random tensor, cut."""
        kwargs = {k: v for k, v in kwargs.items() if k != "key"}
        return ListTensor(self.make_slices(tf_fn(shape.to_integer_list, **kwargs), shape))

    def import_tf_tensor(self, x: mtf.Tensor, tf_x: tf.Tensor) -> ListTensor:
        """Cuts a whole tensor."""
        return ListTensor(self.make_slices(tf_x, x.shape))

    def export_to_tf_tensor(self, x: mtf.Tensor, laid_out_x: Any) -> tf.Tensor:
        """Joins slices."""
        return self.combine_slices(laid_out_x.to_laid_out_tensor().all_slices, x.shape)


def losses(mesh_shape: str, layout: str, steps: int = 5) -> list[float]:
    """Trains a layer of random targets; returns its losses."""
    batch, d_in, d_out = (mtf.Dimension(*d) for d in [("batch", 8), ("d_in", 4), ("d_out", 6)])
    random = np.random.RandomState(0)
    with tf.Graph().as_default(), tf.Session() as session:
        tf.set_random_seed(0)
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        x, target = (
            mtf.import_tf_tensor(mesh, random.randn(8, d.size).astype("float32"), [batch, d])
            for d in (d_in, d_out)
        )
        y = mtf.layers.dense(x, [d_out], reduced_dims=[d_in], activation=mtf.tanh)
        loss = mtf.reduce_mean(mtf.square(y - target))
        variables = mesh.graph.trainable_variables
        grads = mtf.gradients([loss], [v.outputs[0] for v in variables])
        updates = mtf.optimize.SgdOptimizer(0.5).apply_grads(grads, variables)
        lowering = mtf.Lowering(mesh.graph, {mesh: OneDeviceMeshImpl(mesh_shape, layout)})
        step = tf.group(*map(lowering.lowered_operation, updates))
        fetches = [lowering.export_to_tf_tensor(loss), step]
        session.run(tf.global_variables_initializer())
        return [float(session.run(fetches)[0]) for _ in range(steps)]


def main() -> None:
    """Prints the losses in three layouts, which are the same."""
    for mesh_shape, layout in [
        ("all:1", ""),
        ("rows:2,cols:2", "batch:rows,d_in:cols"),
        ("rows:2,cols:3", "d_in:rows,d_out:cols"),
    ]:
        values = [f"{loss:.6f}" for loss in losses(mesh_shape, layout)]
        print(f"{mesh_shape:14s} {layout:22s}", *values)


if __name__ == "__main__":
    tf.disable_v2_behavior()
    main()
