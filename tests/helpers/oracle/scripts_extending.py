"""Scripts of users: laid-out tensors, operations and mesh implementations of one's own."""

import numpy as np
import tensorflow.compat.v1 as tf

import mesh_tensorflow as mtf
from helpers.oracle.oracle_runner import array
from helpers.oracle.script_helpers import D, fetch, placement, script

# -- laid-out tensors by hand


@script
def laid_out_tensors(tmp):
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")
    impl = placement(layout="batch:x,d:y")
    shape = mtf.Shape([D("batch", 4), D("d", 6)])
    whole = array("normal", [4, 6], "laid_out")
    parts = [
        tf.constant(whole[2 * i : 2 * i + 2, 3 * j : 3 * j + 3]) for i in range(2) for j in range(2)
    ]
    x = mtf.import_laid_out_tensor(mesh, impl.LaidOutTensor.from_tensor_list(parts), shape)
    y = mtf.import_laid_out_tensor(
        mesh, impl.LaidOutTensor([t * 2.0 for t in parts]), shape, name="mine"
    )
    out = {"x": x, "sum": mtf.reduce_sum(x + y, reduced_dim=shape.dims[1]), "y": y}
    lowering = mtf.Lowering(graph, {mesh: impl})
    values = fetch(lowering, out)
    laid_out = lowering.tensors[x].to_laid_out_tensor()
    pnum = impl.laid_out_pnum()
    rows, columns = impl.laid_out_pcoord(0), impl.laid_out_pcoord(1)
    marked = impl.slicewise(
        lambda t, n, r, c: (
            t * 0.0 + tf.to_float(n) + 10.0 * tf.to_float(r) + 100.0 * tf.to_float(c)
        ),
        laid_out,
        pnum,
        rows,
        columns,
    )
    first, second = impl.slicewise(lambda t: (t + 1.0, t * 2.0), laid_out)
    each = impl.slicewise(lambda t, k: t * tf.to_float(k), laid_out, 3)
    with tf.Session() as session:
        run = session.run
        values["marked"] = run(impl.combine_slices(marked.tensor_list, shape))
        values["first"] = run(impl.combine_slices(first.all_slices, shape))
        values["second"] = run(impl.export_to_tf_tensor(x, second))
        values["each"] = run(impl.combine_slices(each.tensor_list, shape))
        values["made"] = np.stack(run(impl.make_slices(tf.constant(whole), shape)))
        for name, op in {
            "allreduce": lambda: impl.allreduce(laid_out, [0, 1], "SUM"),
            "allreduce_max": lambda: impl.allreduce(laid_out, [1], "MAX"),
            "allconcat": lambda: impl.allconcat(laid_out, 1, 1),
            "allsplit": lambda: impl.allsplit(laid_out, 0, 0),
            "alltoall": lambda: impl.alltoall(impl.allconcat(laid_out, 0, 0), 1, 0, 1),
            "receive": lambda: impl.receive(laid_out, 0, [1, None]),
            "shift": lambda: impl.shift_by_n_processors(laid_out, 1, 1, wrap=False),
            "shift_wrap": lambda: impl.shift_by_n_processors(laid_out, 0, -1, wrap=True),
        }.items():
            values[name] = np.stack(run(op().to_laid_out_tensor().tensor_list))
        slice_num = impl.laid_out_slice_num(mtf.Shape([D("batch", 4)]))
        for name, numbers in {"pnum": pnum, "pcoord": columns, "slice_num": slice_num}.items():
            tensors = [tf.reshape(tf.convert_to_tensor(t), []) for t in numbers.tensor_list]
            values[name] = np.array(run(tensors))
    return {
        **values,
        "python_numbers": isinstance(pnum.tensor_list[0], int),
        "slice_shape": list(laid_out.slice_shape),
        "begin": [list(impl.slice_begin(shape, n)) for n in range(4)],
        "sizes": [list(impl.slice_shape(shape)), impl.slice_size(shape), impl.laid_out_size(shape)],
        "layout": str(impl.tensor_layout(shape)),
        "ndims": impl.ndims,
        "size": impl.size,
    }


# -- operations of one's own


class HaloSum(mtf.Operation):
    """Adds the neighbours' slices along the split first dimension, around the mesh."""

    def __init__(self, x, dim, name=None):
        super().__init__([x], name=name or "halo_sum")
        self._dim = dim
        self._outputs = [mtf.Tensor(self, x.shape, x.dtype)]

    def gradient(self, grad_ys):
        return HaloSum(grad_ys[0], self._dim).outputs

    def lower(self, lowering):
        impl = lowering.mesh_impl(self)
        x = lowering.tensors[self.inputs[0]].to_laid_out_tensor()
        axis = impl.tensor_dimension_to_mesh_axis(self._dim)
        if axis is None:
            lowering.set_tensor_lowering(self.outputs[0], impl.slicewise(lambda t: 3.0 * t, x))
            return
        left = impl.shift_by_n_processors(x, axis, 1, wrap=True)
        right = impl.shift_by_n_processors(x, axis, -1, wrap=True)
        lowering.add_counter("halo_sum", lowering.laid_out_size(self.outputs[0]))
        y = impl.slicewise(lambda a, b, c: a + b + c, x, left, right)
        lowering.set_tensor_lowering(self.outputs[0], y)


class GlobalNorm(mtf.Operation):
    """The root of the sum of squares, reduced by hand, with a gradient in mtf."""

    def __init__(self, x, name=None):
        super(GlobalNorm, self).__init__([x], mesh=x.mesh, name=name or "global_norm")  # noqa: UP008
        self._outputs = [mtf.Tensor(self, mtf.Shape([]), x.dtype)]

    @property
    def has_gradient(self):
        return True

    def gradient(self, grad_ys):
        return [self.inputs[0] * (grad_ys[0] / self.outputs[0])]

    def lower(self, lowering):
        x = self.inputs[0]
        impl = lowering.mesh_impl(self)
        squares = impl.slicewise(lambda t: tf.reduce_sum(tf.square(t)), lowering.tensors[x])
        axes = [a for a in impl.tensor_layout(x.shape) if a is not None]
        total = impl.allreduce(squares, axes, "SUM")
        lowering.set_tensor_lowering(self.outputs[0], impl.slicewise(tf.sqrt, total))


class SwapSplit(mtf.Operation):
    """Moves a split from one dimension to another: two outputs, no gradient given."""

    def __init__(self, x, old, new, name=None):
        super().__init__([x], name=name or "swap_split")
        shape = mtf.Shape([D(d.name + "_whole", d.size) if d == old else d for d in x.shape.dims])
        shape = shape.rename_dimension(new.name, new.name + "_split")
        self._dims = [x.shape.dims.index(old), x.shape.dims.index(new)]
        self._outputs = [
            mtf.Tensor(self, shape, x.dtype, index=0),
            mtf.Tensor(self, mtf.Shape([]), tf.int32, index=1),
        ]

    def lower(self, lowering):
        impl = lowering.mesh_impl(self)
        x = lowering.tensors[self.inputs[0]].to_laid_out_tensor()
        old, new = self._dims
        axis = impl.tensor_layout(self.inputs[0].shape)[old]
        if axis is not None:
            lowering.add_counter(f"alltoall/{axis}/swap", lowering.laid_out_size(self.inputs[0]))
            x = impl.alltoall(x, axis, split_axis=new, concat_axis=old)
        lowering.set_tensor_lowering(self.outputs[0], x)
        count = impl.slicewise(lambda t: tf.constant(impl.size, tf.int32), x)
        lowering.set_tensor_lowering(self.outputs[1], count)


@script
def custom_operations(tmp):
    result = {}
    for name, layout in {"xy": "a:x,b:y,b_split:x", "x": "a:x,b_split:x", "none": ""}.items():
        with tf.Graph().as_default():
            graph = mtf.Graph()
            mesh = mtf.Mesh(graph, "mesh")
            shape = mtf.Shape([D("a", 2), D("b", 4)])
            a, b = shape.dims
            x = mtf.import_tf_tensor(mesh, tf.constant(array("normal", [2, 4], "custom")), shape)
            norm = GlobalNorm(mtf.square(x), name="norm").outputs[0]
            (d_norm,) = mtf.gradients([norm], [x])
            summed = HaloSum(x * 2.0, a).outputs[0]
            (d_summed,) = mtf.gradients([mtf.reduce_sum(summed * x)], [x])
            out = {"norm": norm, "d_norm": d_norm}
            if layout:
                out.update(summed=summed, d_summed=d_summed)
            if name != "xy":
                swap = SwapSplit(x, a, b)
                out["swapped"], out["count"] = swap.outputs
            lowering = mtf.Lowering(graph, {mesh: placement("x:2,y:2", layout)})
            result.update({f"{name}/{k}": v for k, v in fetch(lowering, out).items()})
            result[name + "/counters"] = sorted(
                [k, int(v)] for k, v in lowering.counters if "swap" in k or "halo" in k
            )
            result[name + "/names"] = [
                op.name for op in graph.operations if type(op) in (GlobalNorm, HaloSum, SwapSplit)
            ]
    return result


# -- a mesh implementation of one's own


class CountingMeshImpl(mtf.placement_mesh_impl.PlacementMeshImpl):
    """Counts what goes through its methods; multiplies matrices in its own way."""

    def __init__(self, shape, layout, devices):
        super().__init__(shape, layout, devices)
        self.reduced, self.equations, self.called = [], [], 0

    def allreduce(self, x, mesh_axes, reduction_fn_string):
        self.reduced.append([list(mesh_axes), reduction_fn_string])
        return super().allreduce(x, mesh_axes, reduction_fn_string)

    def einsum(self, equation, *slices):
        self.equations.append(equation)
        return tf.einsum(equation, *slices)

    def slicewise(self, fn, *inputs):
        self.called += 1
        return super().slicewise(fn, *inputs)


@script
def custom_mesh_impl(tmp):
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")
    i, j, k = D("batch", 4), D("d", 6), D("k", 2)
    x = mtf.import_tf_tensor(mesh, tf.constant(array("normal", [4, 6], "impl")), mtf.Shape([i, j]))
    w = mtf.import_tf_tensor(
        mesh, tf.constant(array("normal", [6, 2], "impl_w")), mtf.Shape([j, k])
    )
    y = mtf.einsum([x, w], output_shape=[i, k])
    total = mtf.reduce_max(y)
    impl = placement(cls=CountingMeshImpl)
    lowering = mtf.Lowering(graph, {mesh: impl})
    values = fetch(lowering, {"y": y, "total": total})
    assert impl.called > 0
    return {
        **values,
        "reduced": [[sorted(set(axes)), fn] for axes, fn in impl.reduced],
        "equations": sorted(set(impl.equations)),
    }
