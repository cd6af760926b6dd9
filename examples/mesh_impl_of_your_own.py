"""A custom mesh implementation: all processors on one device, written as in NumPy.

    python examples/mesh_impl_of_your_own.py

A laid-out tensor is a list with one slice per processor. A variable is stored whole, in its master:
reading it splits the master into slices, and assigning to it joins the slices again. This is close
to the minimum that a MeshImpl needs, and a starting point for one that targets another kind of
device. The program below trains a small layer in several layouts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Optional

import mesh_tensorflow as mtf  # isort: skip (TensorFlow is quiet if it is imported afterwards)
import numpy as np
import tensorflow.compat.v1 as tf


class ListTensor(mtf.LaidOutTensor):
    """One tf.Tensor per processor, in order of processor number."""


class WholeVariable:
    """A variable that is stored whole, in its master."""

    needs_copies = False  # no slices are stored besides the master

    def __init__(self, variable: mtf.Variable, mesh_impl: OneDeviceMeshImpl):
        self._variable, self._mesh_impl = variable, mesh_impl
        self.laid_out_tensor = self.read()  # the value at the start of the step

    def read(self) -> ListTensor:
        """Returns the current value."""
        value = tf.cast(self._variable.tf_master.read_value(), self._variable.slice_dtype)
        return ListTensor(self._mesh_impl.make_slices(value, self._variable.shape))

    def assign_to_slices(self, assign_fn: Callable, values: Sequence[tf.Tensor]) -> tf.Operation:
        """Assigns the joined slices, after the value of this step has been read."""
        whole = self._mesh_impl.combine_slices(values, self._variable.shape)
        with tf.control_dependencies(self.laid_out_tensor.all_slices):
            return assign_fn(self._variable, self._variable.tf_master, whole)


class OneDeviceMeshImpl(mtf.MeshImpl):
    """All processors on one device, which computes their slices one after another."""

    LaidOutTensor = ListTensor
    LaidOutVariable = WholeVariable

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
        """Returns `fn(slices of its group, its index in the group)` for each processor."""
        slices, out = x.to_laid_out_tensor().all_slices, [None] * self.size
        for group in mtf.processor_groups(self.shape, mesh_axes):
            for i, n in enumerate(group):
                out[n] = fn([slices[m] for m in group], i)
        return ListTensor(out)

    def allreduce(self, x: Any, mesh_axes: Sequence[int], reduction_fn_string: str) -> ListTensor:
        """Reduces the slices of each group by sum, maximum or minimum."""
        reduce = mtf.reduction_fn(reduction_fn_string)
        return self._exchange(x, mesh_axes, lambda parts, _: reduce(tf.stack(parts), 0))

    def allconcat(self, x: Any, mesh_axis: int, concat_axis: int) -> ListTensor:
        """Concatenates the slices of each group."""
        return self._exchange(x, [mesh_axis], lambda parts, _: tf.concat(parts, concat_axis))

    def alltoall(self, x: Any, mesh_axis: int, split_axis: int, concat_axis: int) -> ListTensor:
        """Sends part i of every slice in a group to member i of the group."""

        def received(parts: list[tf.Tensor], i: int) -> tf.Tensor:
            return tf.concat([tf.split(p, len(parts), split_axis)[i] for p in parts], concat_axis)

        return self._exchange(x, [mesh_axis], received)

    def receive(self, x: Any, mesh_axis: int, source_pcoord: Sequence[Optional[int]]) -> ListTensor:
        """Passes each processor the slice of another member of its group, or zeros."""

        def received(parts: list[tf.Tensor], i: int) -> tf.Tensor:
            source = source_pcoord[i]
            return tf.zeros_like(parts[i]) if source is None else parts[source]

        return self._exchange(x, [mesh_axis], received)

    def laid_out_pnum(self) -> ListTensor:
        """Returns the processor numbers."""
        return ListTensor([tf.constant(n) for n in range(self.size)])

    def random(self, shape: mtf.Shape, tf_fn: Callable, kwargs: dict) -> ListTensor:
        """Generates the whole random tensor and splits it."""
        return ListTensor(self.make_slices(tf_fn(shape.to_integer_list, **kwargs), shape))

    def import_tf_tensor(self, x: mtf.Tensor, tf_x: tf.Tensor) -> ListTensor:
        """Splits a whole tensor."""
        return ListTensor(self.make_slices(tf_x, x.shape))

    def export_to_tf_tensor(self, x: mtf.Tensor, laid_out_x: Any) -> tf.Tensor:
        """Joins the slices of a tensor."""
        return self.combine_slices(laid_out_x.to_laid_out_tensor().all_slices, x.shape)


def losses(mesh_shape: str, layout: str, steps: int = 5) -> list[float]:
    """Trains one layer on random data and returns the loss of each step."""
    batch, d_in, d_out = (mtf.Dimension(*d) for d in [("batch", 8), ("d_in", 4), ("d_out", 6)])
    random = np.random.RandomState(0)
    with tf.Graph().as_default(), tf.Session() as session:
        tf.set_random_seed(0)
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        arrays = [(random.randn(8, d.size).astype("float32"), [batch, d]) for d in (d_in, d_out)]
        x, target = (mtf.import_tf_tensor(mesh, array, dims) for array, dims in arrays)
        y = mtf.layers.dense(x, [d_out], reduced_dims=[d_in], activation=mtf.tanh)
        loss = mtf.reduce_mean(mtf.square(y - target))
        variables = mesh.graph.trainable_variables
        grads = mtf.gradients([loss], [v.outputs[0] for v in variables])
        updates = mtf.optimize.SgdOptimizer(0.5).apply_grads(grads, variables)
        lowering = mtf.Lowering(mesh.graph, {mesh: OneDeviceMeshImpl(mesh_shape, layout)})
        fetches = [lowering.export_to_tf_tensor(loss), *map(lowering.lowered_operation, updates)]
        session.run(tf.global_variables_initializer())
        return [float(session.run(fetches)[0]) for _ in range(steps)]


def main() -> None:
    """Prints the losses of three layouts; they are equal."""
    for mesh_shape, layout in [
        ("all:1", ""),
        ("rows:2,cols:2", "batch:rows,d_in:cols"),
        ("rows:2,cols:3", "d_in:rows,d_out:cols"),
    ]:
        values = [f"{loss:.6f}" for loss in losses(mesh_shape, layout)]
        print(f"{mesh_shape:14s} {layout:22s}", *values)


if __name__ == "__main__":
    main()
