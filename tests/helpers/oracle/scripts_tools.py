"""Scripts of users: looking at the graph, small tools."""

import numpy as np
import tensorflow.compat.v1 as tf

import mesh_tensorflow as mtf
from helpers.oracle.oracle_runner import array
from helpers.oracle.script_helpers import D, fetch, placement, script


@script
def introspection(tmp):
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")
    batch, d, h = D("batch", 4), D("d", 6), D("h", 2)
    with tf.variable_scope("model"):
        x = mtf.import_tf_tensor(mesh, tf.zeros([4, 6]), mtf.Shape([batch, d]))
        y = mtf.layers.dense(x, h, reduced_dims=[d], activation=mtf.relu, name="hidden")
        z = mtf.reduce_mean(mtf.square(y))
    before = len(graph.operations)
    grads = mtf.gradients([z], [v.outputs[0] for v in graph.trainable_variables])
    forward = graph.operations[:before]
    makers = {}
    for op in forward:
        for t in op.outputs:
            makers[t.name] = op.name
    return {
        "operations": [[op.name, type(op).__name__] for op in forward],
        "inputs": [[t.name for t in op.inputs] for op in forward],
        "outputs": [
            [[t.name, str(t.shape.to_string), t.dtype.name, t.size] for t in op.outputs]
            for op in forward
        ],
        "consistent": all(t.name in makers for op in forward for t in op.inputs),
        "has_gradient": {op.name: bool(op.has_gradient) for op in forward},
        "variables": [
            [
                v.name,
                str(v.shape.to_string),
                v.size,
                v.master_dtype.name,
                v.slice_dtype.name,
                v.activation_dtype.name,
                bool(v.trainable),
            ]
            for v in graph.all_variables
        ],
        "trainable": [v.name for v in graph.trainable_variables],
        "found": sorted(graph.name_to_variable),
        "splittable": {
            op.name: [sorted(op.splittable_dims), sorted(op.unsplittable_dims)] for op in forward
        },
        "gradient_shapes": [str(g.shape.to_string) for g in grads],
        "tensor": [z.operation.name, z.mesh is mesh, z.graph is graph, z.name],
        "unique_name": [
            graph.unique_name("fresh"),
            graph.unique_name("fresh"),
            graph.unique_name("Fresh"),
        ],
        "shape_of_string": [
            str(mtf.convert_to_shape("a:2;b:3.c:4").to_string),
            mtf.Shape([batch, d]).cumprod,
        ],
    }


@script
def pretty_counters(tmp):
    counters = [("a/b", 2), ("a/b", 3), ("a/c/d", 4), ("b", 1234567), ("a", 1)]
    lines = mtf.pretty_print_counters(counters)
    return {"names": [line.split()[0].rstrip(":") for line in lines.splitlines() if line.strip()]}


@script
def activation_summaries(tmp):
    """Tags and values of what is noted where gradients of activations are clipped."""
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")
    shape = mtf.Shape([D("batch", 4), D("length", 2), D("d", 6)])
    x = mtf.import_tf_tensor(mesh, tf.constant(array("normal", [4, 2, 6], "summaries")), shape)
    with tf.variable_scope("layer"):
        mtf.layers.clip_activation_gradient(x, 1.0)
    summary = mtf.layers.summary_for_clip_activation_gradient
    summary(x, name="mine", batch_dims=shape.dims[:1])
    summary(x)
    summary(x, batch_dims=shape.dims[1:])
    mtf.Lowering(graph, {mesh: placement()})
    found = tf.get_collection(mtf.utils.SCALAR_SUMMARIES_COLLECTION_KEY)
    with tf.Session() as session:
        values = session.run([value for _, value in found])
    return {"tags": [tag for tag, _ in found], "values": np.array(values)}


@script
def summaries_and_print(tmp):
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")
    x = mtf.import_tf_tensor(
        mesh, tf.constant(array("normal", [4, 6], "print")), mtf.Shape([D("batch", 4), D("d", 6)])
    )
    mtf.scalar_summary("loss", mtf.reduce_mean(x))
    printed = mtf.Print(x, [x], "x is", summarize=2)
    lowering = mtf.Lowering(graph, {mesh: placement()})
    values = fetch(lowering, {"printed": printed})
    found = tf.get_collection(mtf.utils.SCALAR_SUMMARIES_COLLECTION_KEY)
    with tf.Session() as session:
        values["summary"] = session.run(found[0][1])
    mtf.utils.remove_summaries()
    return {
        **values,
        "tags": [name for name, _ in found],
        "left": len(tf.get_collection(mtf.utils.SCALAR_SUMMARIES_COLLECTION_KEY)),
    }


@script
def tools(tmp):
    shape = mtf.convert_to_shape("rows:2,cols:3")
    rules = mtf.convert_to_layout_rules("batch:rows;d:cols")
    x_shape = mtf.Shape([D("batch", 4), D("length", 5), D("d", 6)])
    placer = mtf.utils.BalancedVariablePlacer(["/device:CPU:0", "/device:CPU:1"])
    with tf.Graph().as_default(), tf.device(placer.device_function):
        placed = [tf.get_variable(f"placed{i}", [4 * (i + 1)]) for i in range(3)]
    with tf.device("cpu:0"):
        doubled = mtf.parallel(
            ["cpu:0", "cpu:1"], lambda a, b, c: a * b + c, [1.0, 2.0], [3.0, 4.0], c=[5.0, 6.0]
        )
    v = mtf.VariableDType(tf.bfloat16, tf.float32)
    with tf.Session() as session:
        joined = session.run(
            mtf.placement_mesh_impl.allreduce_ring(
                [tf.constant([1.0, 2.0]), tf.constant([3.0, 4.0])], ["cpu:0"] * 2
            )
        )
        gathered = session.run(
            mtf.placement_mesh_impl.allconcat_ring(
                [tf.constant([1.0]), tf.constant([3.0])], ["cpu:0"] * 2, 0
            )
        )
        swapped = session.run(
            mtf.placement_mesh_impl.alltoall_ring(
                [tf.constant([1.0, 2.0]), tf.constant([3.0, 4.0])], ["cpu:0"] * 2, 0, 0
            )
        )
    return {
        "coordinates": [mtf.pnum_to_processor_coordinates(shape, n) for n in range(6)],
        "numbers": [
            mtf.processor_coordinates_to_pnum(shape, [i, j]) for i in range(2) for j in range(3)
        ],
        "groups": mtf.processor_groups(shape, [1]),
        "group": [mtf.pnum_to_group(shape, [0], n) for n in range(6)],
        "axis": [rules.tensor_dimension_to_mesh_axis(d, shape) for d in x_shape],
        "layout": str(rules.tensor_layout(x_shape, shape)),
        "inverse": rules.tensor_layout(x_shape, shape).mesh_axis_to_tensor_axis(2),
        "names": sorted(rules.mesh_dimension_name_to_tensor_dimension_names("rows")),
        "splits": mtf.tensor_dim_to_mesh_dim_size("d:cols", "rows:2,cols:3", D("d", 6)),
        "per_split": mtf.tensor_dim_to_size_per_split("d:cols", "rows:2,cols:3", D("d", 6)),
        "combined": list(mtf.combined_dimension([D("a", 2), D("b", 3)])),
        "anonymous": str(mtf.anonymous_shape(x_shape).to_string),
        "subsequence": [
            mtf.is_subsequence([1, 3], [1, 2, 3]),
            mtf.is_subsequence([3, 1], [1, 2, 3]),
        ],
        "cumprod": [
            x_shape.cumprod,
            x_shape.cumprod_to_tensor_axis(20),
            x_shape.cumprod_to_tensor_axis(3),
        ],
        "renamed": str(x_shape.rename_dimension("d", "e").to_string),
        "resized": str(x_shape.resize_dimension("d", 7).to_string),
        "minus": str((x_shape - D("d", 6)).to_string) + str((x_shape - None).to_string),
        "plus": str((x_shape + [D("e", 2)]).to_string),
        "by_name": [
            list(x_shape.get_dim_by_name("d")),
            x_shape.dimension_names,
            x_shape.size,
            len(x_shape),
        ],
        "text": [str(x_shape), repr(D("a", 2)), str(rules.tensor_layout(x_shape, shape)[0])],
        "equal": [
            x_shape == mtf.Shape(x_shape.dims),
            x_shape != mtf.Shape([]),
            D("a", 2) == ("a", 2),
        ],
        "product": [mtf.list_product([2, 3]), mtf.list_product([])],
        "transposed": mtf.transpose_list_of_lists([[1, 2], [3, 4]]),
        "placed": [p.device for p in placed],
        "parallel": doubled,
        "dtypes": [v.master_dtype.name, v.slice_dtype.name, v.activation_dtype.name],
        "joined": np.stack(joined),
        "gathered": np.stack(gathered),
        "swapped": np.stack(swapped),
        "reductions": [
            mtf.reduction_fn("SUM") is tf.reduce_sum,
            mtf.binary_reduction_fn("MAX") is tf.maximum,
        ],
    }


@script
def numpy_converter(tmp):
    from mesh_tensorflow import test_utils

    converter = test_utils.NumpyConverter()
    x = converter.convert_np_array_to_mtf_tensor(array("normal", [2, 3], "np"), dtype=tf.float32)
    y = converter.convert_np_array_to_mtf_tensor(array(5, [2], "np"), dim_names=["a"])
    return {
        "x": converter.convert_mtf_tensor_to_np_array(mtf.tanh(x)),
        "y": converter.convert_mtf_tensor_to_np_array(y + 1),
        "shapes": [str(x.shape.to_string), str(y.shape.to_string), y.dtype.name],
    }
