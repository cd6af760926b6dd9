"""Programs as users wrote them: whole scripts, with sessions, hooks, laid-out tensors, subclasses.

Each takes a directory and returns a dictionary of arrays and of plain values.  Where something
is trained there is one trainable variable, so that the classic's steps are deterministic.
"""

import os

import numpy as np
import oracle_runner
import tensorflow.compat.v1 as tf
from oracle_runner import array

import mesh_tensorflow as mtf

SCRIPTS = {}
D = mtf.Dimension


def script(fn):
    SCRIPTS[fn.__name__] = fn
    return fn


def placement(shape="x:2,y:2", layout="batch:x,d:y", cls=mtf.placement_mesh_impl.PlacementMeshImpl):
    size = mtf.Shape(mtf.convert_to_shape(shape).dims).size
    arguments = oracle_runner.IMPL_ARGUMENTS if cls is mtf.placement_mesh_impl.PlacementMeshImpl else {}
    return cls(shape, layout, ["cpu:0"] * size, **arguments)


def value_of(session, name):
    """Returns the value of a global variable."""
    (v,) = [v for v in tf.global_variables() if v.op.name == name]
    return session.run(v)


def fetch(lowering, tensors, feed=None):
    fetches = {k: lowering.export_to_tf_tensor(v) for k, v in tensors.items()}
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        session.run(lowering.copy_masters_to_slices())
        return session.run(fetches, feed)


# -- training loops


def bigram_model(mesh, features, vocab, scale=0.3):
    """Returns (loss, logits) of a model with one variable: logits of the next id."""
    table = mtf.get_variable(
        mesh, "bigram", mtf.Shape([vocab, D("next", vocab.size)]),
        initializer=tf.constant_initializer(scale * array("normal", [vocab.size] * 2, "bigram")),
    )
    next_dim = table.shape.dims[1]
    logits = mtf.gather(table, features, vocab)
    length = features.shape.dims[1]
    targets = mtf.shift(features, -1, length, wrap=False)
    loss = mtf.layers.softmax_cross_entropy_with_logits(
        logits, mtf.one_hot(targets, next_dim), next_dim
    )
    weights = mtf.to_float(mtf.not_equal(targets, 0))
    return mtf.reduce_sum(loss * weights) / mtf.reduce_sum(weights), logits


@script
def language_model_loop(tmp):
    """A loop over a tf.data set, with a schedule from the global step and Adafactor."""
    batch, length, vocab = D("batch", 8), D("length", 6), D("vocab", 12)
    data = array(12, [32, 6], "lm")
    dataset = tf.data.Dataset.from_tensor_slices(data).repeat().batch(8, drop_remainder=True)
    ids = tf.data.make_one_shot_iterator(dataset).get_next()
    global_step = tf.train.get_or_create_global_step()
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "lm_mesh")
    loss, logits = bigram_model(
        mesh, mtf.import_tf_tensor(mesh, ids, mtf.Shape([batch, length])), vocab
    )
    grads = mtf.gradients([loss], [v.outputs[0] for v in graph.trainable_variables])
    rate = 0.5 * tf.minimum(1.0, (tf.to_float(global_step) + 1.0) / 4.0)
    optimizer = mtf.optimize.AdafactorOptimizer(learning_rate=rate, min_dim_size_to_factor=4)
    updates = optimizer.apply_grads(grads, graph.trainable_variables)
    impl = placement(layout="batch:x,vocab:y")
    lowering = mtf.Lowering(graph, {mesh: impl})
    tf_loss = lowering.export_to_tf_tensor(loss)
    tf_updates = [lowering.lowered_operation(op) for op in updates]
    with tf.control_dependencies(tf_updates):
        train_op = tf.assign_add(global_step, 1)
    losses = []
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        session.run(lowering.copy_masters_to_slices())
        for _ in range(8):
            losses.append(session.run([tf_loss, train_op])[0])
        session.run(lowering.copy_slices_to_masters())
        table = value_of(session, "bigram")
    return {"losses": np.array(losses), "table": table, "logits": str(logits.shape.to_string)}


@script
def monitored_session(tmp):
    """MonitoredTrainingSession with the restore hook and the saver's listener, then a restart."""
    losses, names = [], None
    for run in range(2):
        with tf.Graph().as_default():
            step = tf.train.get_or_create_global_step()
            graph = mtf.Graph()
            mesh = mtf.Mesh(graph, "mesh")
            batch, length, vocab = D("batch", 4), D("length", 6), D("vocab", 12)
            ids = tf.constant(array(12, [4, 6], "monitored"))
            loss, _ = bigram_model(mesh, mtf.import_tf_tensor(mesh, ids, mtf.Shape([batch, length])), vocab)
            grads = mtf.gradients([loss], [v.outputs[0] for v in graph.trainable_variables])
            optimizer = mtf.optimize.AdamWeightDecayOptimizer(learning_rate=0.05)
            updates = optimizer.apply_grads(grads, graph.trainable_variables)
            lowering = mtf.Lowering(graph, {mesh: placement(layout="batch:x,vocab:y")})
            tf_loss = tf.to_float(lowering.export_to_tf_tensor(loss))
            train = [lowering.lowered_operation(op) for op in updates]
            with tf.control_dependencies(train):
                train_op = tf.assign_add(step, 1)
            saver = tf.train.Saver(
                tf.global_variables(), sharded=True, max_to_keep=3, save_relative_paths=True
            )
            tf.add_to_collection(tf.GraphKeys.SAVERS, saver)
            hooks = [
                mtf.MtfRestoreHook(lowering),
                tf.train.CheckpointSaverHook(
                    tmp, save_steps=2, saver=saver,
                    listeners=[mtf.MtfCheckpointSaverListener(lowering)],
                ),
                tf.train.StopAtStepHook(num_steps=4),
            ]
            with tf.train.MonitoredTrainingSession(
                checkpoint_dir=tmp, hooks=hooks, save_checkpoint_secs=None,
                save_summaries_steps=None, log_step_count_steps=None,
            ) as session:
                while not session.should_stop():
                    losses.append(session.run([tf_loss, train_op])[0])
    path = tf.train.latest_checkpoint(tmp)
    reader = tf.train.load_checkpoint(path)
    types = reader.get_variable_to_dtype_map()
    names = [
        [n, list(s), types[n].name] for n, s in sorted(reader.get_variable_to_shape_map().items())
    ]
    values = {n: reader.get_tensor(n) for n, _, _ in names}
    return {"losses": np.array(losses), "names": names, "path": os.path.basename(path),
            **{"saved/" + n: v for n, v in values.items()}}


# -- laid-out tensors by hand


@script
def laid_out_tensors(tmp):
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")
    impl = placement(layout="batch:x,d:y")
    shape = mtf.Shape([D("batch", 4), D("d", 6)])
    whole = array("normal", [4, 6], "laid_out")
    parts = [tf.constant(whole[2 * i : 2 * i + 2, 3 * j : 3 * j + 3]) for i in range(2) for j in range(2)]
    x = mtf.import_laid_out_tensor(mesh, impl.LaidOutTensor.from_tensor_list(parts), shape)
    y = mtf.import_laid_out_tensor(mesh, impl.LaidOutTensor([t * 2.0 for t in parts]), shape, name="mine")
    out = {"x": x, "sum": mtf.reduce_sum(x + y, reduced_dim=shape.dims[1]), "y": y}
    lowering = mtf.Lowering(graph, {mesh: impl})
    values = fetch(lowering, out)
    laid_out = lowering.tensors[x].to_laid_out_tensor()
    pnum = impl.laid_out_pnum()
    rows, columns = impl.laid_out_pcoord(0), impl.laid_out_pcoord(1)
    marked = impl.slicewise(
        lambda t, n, r, c: t * 0.0 + tf.to_float(n) + 10.0 * tf.to_float(r) + 100.0 * tf.to_float(c),
        laid_out, pnum, rows, columns,
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
    w = mtf.import_tf_tensor(mesh, tf.constant(array("normal", [6, 2], "impl_w")), mtf.Shape([j, k]))
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


# -- looking at the graph


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
            [v.name, str(v.shape.to_string), v.size, v.master_dtype.name,
             v.slice_dtype.name, v.activation_dtype.name, bool(v.trainable)]
            for v in graph.all_variables
        ],
        "trainable": [v.name for v in graph.trainable_variables],
        "found": sorted(graph.name_to_variable),
        "splittable": {
            op.name: [sorted(op.splittable_dims), sorted(op.unsplittable_dims)] for op in forward
        },
        "gradient_shapes": [str(g.shape.to_string) for g in grads],
        "tensor": [z.operation.name, z.mesh is mesh, z.graph is graph, z.name],
        "unique_name": [graph.unique_name("fresh"), graph.unique_name("fresh"), graph.unique_name("Fresh")],
        "shape_of_string": [str(mtf.convert_to_shape("a:2;b:3.c:4").to_string), mtf.Shape([batch, d]).cumprod],
    }


@script
def pretty_counters(tmp):
    counters = [("a/b", 2), ("a/b", 3), ("a/c/d", 4), ("b", 1234567), ("a", 1)]
    lines = mtf.pretty_print_counters(counters)
    return {"names": [line.split()[0].rstrip(":") for line in lines.splitlines() if line.strip()]}


@script
def summaries_and_print(tmp):
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")
    x = mtf.import_tf_tensor(mesh, tf.constant(array("normal", [4, 6], "print")), mtf.Shape([D("batch", 4), D("d", 6)]))
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
def stacked_variables(tmp):
    """Autostacking: names in the graph, and masters as they were."""
    result = {}
    for autostack in (True, False):
        with tf.Graph().as_default():
            graph = mtf.Graph()
            mesh = mtf.Mesh(graph, "mesh")
            shape = mtf.Shape([D("d", 6)])
            vs = [
                mtf.get_variable(mesh, f"v{i}", shape, initializer=tf.constant_initializer(float(i)))
                for i in range(3)
            ]
            y = mtf.add_n([v * float(i + 1) for i, v in enumerate(vs)])
            grads = mtf.gradients([mtf.reduce_sum(mtf.square(y))], vs)
            updates = mtf.optimize.SgdOptimizer(0.01).apply_grads(grads, graph.trainable_variables)
            lowering = mtf.Lowering(graph, {mesh: placement(layout="d:x")}, autostack=autostack)
            tf_y, train = lowering.export_to_tf_tensor(y), [lowering.lowered_operation(u) for u in updates]
            to_masters = lowering.copy_slices_to_masters()
            with tf.Session() as session:
                session.run(tf.global_variables_initializer())
                session.run(lowering.copy_masters_to_slices())
                first = session.run(tf_y)
                session.run(train)
                session.run(to_masters)
                after = [value_of(session, f"v{i}") for i in range(3)]
            key = "stacked" if autostack else "apart"
            result[key + "/first"], result[key + "/after"] = first, np.stack(after)
            result[key + "/all"] = [v.name for v in graph.all_variables]
            result[key + "/masters"] = [v.op.name for v in tf.global_variables()]
            result[key + "/slices"] = sorted(v.op.name for v in tf.trainable_variables())
    return result


# -- small tools that scripts use


@script
def tools(tmp):
    shape = mtf.convert_to_shape("rows:2,cols:3")
    rules = mtf.convert_to_layout_rules("batch:rows;d:cols")
    x_shape = mtf.Shape([D("batch", 4), D("length", 5), D("d", 6)])
    placer = mtf.utils.BalancedVariablePlacer(["/device:CPU:0", "/device:CPU:1"])
    with tf.Graph().as_default(), tf.device(placer.device_function):
        placed = [tf.get_variable(f"placed{i}", [4 * (i + 1)]) for i in range(3)]
    with tf.device("cpu:0"):
        doubled = mtf.parallel(["cpu:0", "cpu:1"], lambda a, b, c: a * b + c, [1.0, 2.0], [3.0, 4.0], c=[5.0, 6.0])
    v = mtf.VariableDType(tf.bfloat16, tf.float32)
    with tf.Session() as session:
        joined = session.run(
            mtf.placement_mesh_impl.allreduce_ring([tf.constant([1.0, 2.0]), tf.constant([3.0, 4.0])], ["cpu:0"] * 2)
        )
        gathered = session.run(
            mtf.placement_mesh_impl.allconcat_ring([tf.constant([1.0]), tf.constant([3.0])], ["cpu:0"] * 2, 0)
        )
        swapped = session.run(
            mtf.placement_mesh_impl.alltoall_ring([tf.constant([1.0, 2.0]), tf.constant([3.0, 4.0])], ["cpu:0"] * 2, 0, 0)
        )
    return {
        "coordinates": [mtf.pnum_to_processor_coordinates(shape, n) for n in range(6)],
        "numbers": [mtf.processor_coordinates_to_pnum(shape, [i, j]) for i in range(2) for j in range(3)],
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
        "subsequence": [mtf.is_subsequence([1, 3], [1, 2, 3]), mtf.is_subsequence([3, 1], [1, 2, 3])],
        "cumprod": [x_shape.cumprod, x_shape.cumprod_to_tensor_axis(20), x_shape.cumprod_to_tensor_axis(3)],
        "renamed": str(x_shape.rename_dimension("d", "e").to_string),
        "resized": str(x_shape.resize_dimension("d", 7).to_string),
        "minus": str((x_shape - D("d", 6)).to_string) + str((x_shape - None).to_string),
        "plus": str((x_shape + [D("e", 2)]).to_string),
        "by_name": [list(x_shape.get_dim_by_name("d")), x_shape.dimension_names, x_shape.size, len(x_shape)],
        "text": [str(x_shape), repr(D("a", 2)), str(rules.tensor_layout(x_shape, shape)[0])],
        "equal": [x_shape == mtf.Shape(x_shape.dims), x_shape != mtf.Shape([]), D("a", 2) == ("a", 2)],
        "product": [mtf.list_product([2, 3]), mtf.list_product([])],
        "transposed": mtf.transpose_list_of_lists([[1, 2], [3, 4]]),
        "placed": [p.device for p in placed],
        "parallel": doubled,
        "dtypes": [v.master_dtype.name, v.slice_dtype.name, v.activation_dtype.name],
        "joined": np.stack(joined), "gathered": np.stack(gathered), "swapped": np.stack(swapped),
        "reductions": [mtf.reduction_fn("SUM") is tf.reduce_sum, mtf.binary_reduction_fn("MAX") is tf.maximum],
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


@script
def assignments_in_order(tmp):
    """A moving average read after its update, and assignments joined by the graph."""
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")
    shape = mtf.Shape([D("d", 6)])
    average = mtf.get_variable(mesh, "average", shape, initializer=tf.zeros_initializer(), trainable=False)
    count = mtf.get_variable(mesh, "count", [], dtype=tf.int32, initializer=tf.zeros_initializer(), trainable=False)
    x = mtf.import_tf_tensor(mesh, tf.constant(array("normal", [6], "average")), shape)
    update = mtf.assign(average, average * 0.5 + x * 0.5)
    more = mtf.assign_add(count, mtf.constant(mesh, 2, dtype=tf.int32))
    after = mtf.depend(average, [update])
    impl = placement(layout="d:x")
    lowering = mtf.Lowering(graph, {mesh: impl})
    tf_after, tf_count = lowering.export_to_tf_tensor(after), lowering.lowered_operation(more)
    to_masters = lowering.copy_slices_to_masters()
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        session.run(lowering.copy_masters_to_slices())
        session.run(tf_count)
        values = [session.run([tf_after, tf_count])[0] for _ in range(3)]
        stale = value_of(session, "count")
        session.run(to_masters)
        masters = {name: value_of(session, name) for name in ("average", "count")}
    return {"values": np.stack(values), "after": masters["average"], "count": masters["count"],
            "names": [op.name for op in graph.operations], "stale": int(stale)}


@script
def several_devices(tmp):
    """Four CPU devices of the session, a device function for masters, no autostacking, a log."""
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh", mtf.utils.BalancedVariablePlacer(["/device:CPU:1", "/device:CPU:2"]))
    batch, d, h = D("batch", 4), D("d", 6), D("h", 4)
    x = mtf.import_tf_tensor(mesh, tf.constant(array("normal", [4, 6], "devices")), mtf.Shape([batch, d]))
    w = mtf.get_variable(
        mesh, "w", mtf.Shape([d, h]), initializer=tf.constant_initializer(array("normal", [6, 4], "w"))
    )
    y = mtf.tanh(mtf.einsum([x, w], output_shape=[batch, h]))
    (dw,) = mtf.gradients([mtf.reduce_sum(mtf.square(y))], [w])
    impl = mtf.placement_mesh_impl.PlacementMeshImpl(
        "x:2,y:2", "batch:x,h:y", [f"/device:CPU:{i}" for i in range(4)]
    )
    log = os.path.join(tmp, "log")
    lowering = mtf.Lowering(graph, {mesh: impl}, autostack=False, log_file=log)
    exported = [lowering.export_to_tf_tensor(t) for t in (y, dw)]
    config = tf.ConfigProto(device_count={"CPU": 4})
    with tf.Session(config=config) as session:
        session.run(tf.global_variables_initializer())
        session.run(lowering.copy_masters_to_slices())
        y, dw = session.run(exported)
    return {"y": y, "dw": dw, "devices": impl.devices, "logged": os.path.exists(log),
            "master": [v.device for v in tf.global_variables()]}


def run(name, directory):
    with tf.Graph().as_default():
        return SCRIPTS[name](directory)
