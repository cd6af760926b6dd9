"""Variables that are stored in parts, by ZeRO or rules of their own: the same results everywhere."""

import re

import numpy as np
import pytest
import tensorflow as tf2
import tensorflow.compat.v1 as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.ops._control.gradients import DelayOperation
from mesh_tensorflow.simd_mesh_impl import SimdMeshImpl, replicate
from mesh_tensorflow.testing import harness

BATCH, MODEL, FF = mtf.convert_to_shape("batch:16,d_model:8,d_ff:24").dims
DATA = np.random.RandomState(0).randn(16, 8).astype(np.float32)
TARGETS = np.random.RandomState(1).randn(16, 8).astype(np.float32)
ROWS = ("rows:4", "batch:rows")
BOTH = ("rows:2,cols:2", "batch:rows,d_ff:cols")
OPTIMIZERS = {
    "sgd": lambda: mtf.optimize.SgdOptimizer(0.1),
    "momentum": lambda: mtf.optimize.MomentumOptimizer(0.1, 0.9),
    "adamw": lambda: mtf.optimize.AdamWeightDecayOptimizer(0.01, weight_decay_rate=0.1),
    "lion": lambda: mtf.optimize.LionOptimizer(0.01),
    "adafactor": lambda: mtf.optimize.AdafactorOptimizer(
        learning_rate=0.1, min_dim_size_to_factor=4, beta1=0.9
    ),
}


@pytest.fixture
def own_graph():
    with tf.Graph().as_default():
        tf.set_random_seed(1)
        yield


def dense(x, dim, name, **kwargs):
    return mtf.layers.dense(x, [dim], reduced_dims=x.shape.dims[-1:], name=name, **kwargs)


def examples(mesh):
    arrays = {"x": DATA, "targets": TARGETS}
    return {
        n: mtf.import_tf_tensor(mesh, tf.constant(a), [BATCH, MODEL]) for n, a in arrays.items()
    }


def model(inputs, recompute=False):
    """The loss: two layers, of which the first is used twice, normalized between."""
    x = inputs["x"]

    def layer(x):
        h = dense(x, FF, "wi", activation=mtf.relu)
        return x + dense(h, MODEL, "wo", use_bias=False)

    def again(x):
        with tf.variable_scope(tf.get_variable_scope(), reuse=True):
            return layer(x)

    for fn in (layer, again):
        x = mtf.recompute_grad(fn, [x]) if recompute else fn(x)
        x = x + mtf.layers.layer_norm(x, MODEL, name=f"norm_{fn.__name__}")
    return mtf.reduce_mean(mtf.square(x - inputs["targets"]))


class Training:
    """A training in a session."""

    def __init__(
        self, place=ROWS, optimizer="adamw", recompute=False, clip=False, microbatches=1, **zero
    ):
        self.results = {}
        self.microbatches = microbatches
        if place[-1] == "simd":
            mesh = place[:-1]
            size = mtf.convert_to_shape(mesh[0]).size
            self.loss, self.train = replicate(
                lambda: self.build(SimdMeshImpl(*mesh, **zero), optimizer, recompute, clip),
                devices=[f"/cpu:{i}" for i in range(size)],
            )
        else:
            size = mtf.convert_to_shape(place[0]).size
            impl = mtf.placement_mesh_impl.PlacementMeshImpl(
                *place, [f"cpu:{i}" for i in range(size)], **zero
            )
            self.loss, self.train = self.build(impl, optimizer, recompute, clip)

    def build(self, impl, optimizer, recompute, clip):
        self.impl = impl
        self.graph = mtf.Graph()
        mesh = mtf.Mesh(self.graph, "mesh")
        if self.microbatches == 1:
            loss = model(examples(mesh), recompute)
            self.variables = list(self.graph.trainable_variables)
            gradients = mtf.gradients([loss], [v.value for v in self.variables])
        else:
            loss, gradients, self.variables = mtf.optimize.accumulate_gradients(
                lambda inputs: model(inputs, recompute), examples(mesh), BATCH, self.microbatches
            )
        if clip:
            gradients, _ = mtf.optimize.clip_by_global_norm(gradients, 0.1)
        updates = OPTIMIZERS[optimizer]().apply_grads(gradients, self.variables)
        self.all_variables = list(self.graph.all_variables)
        self.lowering = mtf.Lowering(self.graph, {mesh: impl})
        train = [self.lowering.lowered_operation(op) for op in updates]
        return self.lowering.export_to_tf_tensor(loss), tf.group(train)

    def run(self, steps=3, restore=None, save=None):
        """Returns the losses, and then the values of the variables."""
        saver = tf.train.Saver()
        with tf.Session(config=tf.ConfigProto(device_count={"CPU": 4})) as session:
            session.run(tf.global_variables_initializer())
            if restore:
                saver.restore(session, restore)
            session.run(self.lowering.copy_masters_to_slices())
            losses = [session.run([self.loss, self.train])[0] for _ in range(steps)]
            if save:
                saver.save(session, save)
            return losses, session.run({v.op.name: v for v in tf.global_variables()})

    def sizes(self):
        """The elements that a processor holds of weights, and of slots."""
        size = lambda v: self.impl.slice_size(v.stored_shape)  # noqa: E731
        slots = set(self.all_variables) - set(self.variables)
        return sum(map(size, self.variables)), sum(map(size, slots))

    def sent(self):
        """The elements of collectives, by kind, without those of small tensors."""
        found = {}
        for _, _, c in self.lowering.collectives:
            if c.elements >= self.impl.size * FF.size:
                found[c.kind] = found.get(c.kind, 0) + c.elements
        return found


def assert_equal(found, expected):
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-6)
    assert found[1].keys() == expected[1].keys()
    for name, value in expected[1].items():
        np.testing.assert_allclose(found[1][name], value, rtol=1e-4, atol=5e-5, err_msg=name)


@pytest.fixture(scope="module")
def whole():
    """What trainings give whose variables are stored as they are computed with."""
    known = {}

    def results(optimizer, **options):
        key = optimizer, *options.items()
        if key not in known:
            with tf.Graph().as_default():
                tf.set_random_seed(1)
                known[key] = Training(optimizer=optimizer, **options).run()
        return known[key]

    return results


@pytest.mark.slow
@pytest.mark.usefixtures("own_graph")
@pytest.mark.parametrize(
    "optimizer, stage",
    [("adamw", 2), ("adamw", 3), ("adafactor", 2), ("momentum", 3)]
    + [
        pytest.param(name, stage, marks=pytest.mark.slow)
        for name, stage in [("sgd", 3), ("lion", 2), ("lion", 3), ("adafactor", 3)]
    ],
)
def test_optimizers(optimizer, stage, whole):
    training = Training(optimizer=optimizer, zero=stage)
    assert_equal(training.run(), whole(optimizer))
    weights, slots = training.sizes()
    count = sum(v.size for v in training.variables)
    assert weights == (count // 4 if stage == 3 else count)
    if optimizer in ("momentum", "adamw", "lion"):
        assert slots == (2 if optimizer == "adamw" else 1) * count // 4


@pytest.mark.slow("place1*", "place[023]*")
@pytest.mark.usefixtures("own_graph")
@pytest.mark.parametrize(
    "place", [(*ROWS, "simd"), BOTH, (*BOTH, "simd"), ("rows:2,cols:2", "d_model:cols,batch:rows")]
)
def test_meshes(place, whole):
    training = Training(place, recompute=True, clip=True, zero=3, zero_axis="rows")
    assert_equal(training.run(), whole("adamw", clip=True))


@pytest.mark.slow("*simd*", "*cols+rows*")
@pytest.mark.usefixtures("own_graph")
@pytest.mark.parametrize("zero_axis", ["rows+cols", "cols+rows"])
@pytest.mark.parametrize("kind", [[], ["simd"]], ids=["placement", "simd"])
def test_over_all_processors_of_a_mesh(kind, zero_axis, whole):
    place = ("rows:2,cols:2", "batch:rows+cols", *kind)
    training = Training(place, clip=True, zero=3, zero_axis=zero_axis)
    assert_equal(training.run(), whole("adamw", clip=True))
    count = sum(v.size for v in training.variables)
    assert training.sizes() == (count // 4, 2 * count // 4)


@pytest.mark.slow("*False*")
@pytest.mark.usefixtures("own_graph")
@pytest.mark.parametrize("stage, clip", [(0, False), (1, True), (3, False), (3, True)])
def test_what_is_communicated(stage, clip):
    """What data parallelism reduces is reduce-scattered, and gathered; weights of stage 3 twice."""
    training = Training(clip=clip, zero=stage)
    large = 4 * 2 * MODEL.size * FF.size  # the two kernels on four processors
    expected = {"reduce_scatter": large, "allconcat": large} if stage else {"allreduce": large}
    bias = 4 * FF.size
    expected = {kind: n + bias for kind, n in expected.items()}
    if stage == 3:
        expected["allconcat"] += large  # not the bias, which the backward pass does not use
    assert training.sent() == expected
    on_a_ring = {"allreduce": 2, "reduce_scatter": 1, "allconcat": 1}
    sent = sum(n * on_a_ring[kind] for kind, n in training.sent().items())
    assert sent <= (1.5 if stage == 3 else 1) * 2 * (large + bias)
    counted, predicted = harness.counted_and_predicted(training.lowering)
    assert counted == predicted


@pytest.mark.usefixtures("own_graph")
def test_recomputed_layers_gather_no_more_often():
    plain, again = Training(zero=3).sent(), None
    with tf.Graph().as_default():
        again = Training(zero=3, recompute=True).sent()
    bias = 4 * FF.size  # what is recomputed needs it, a gradient does not
    assert again == {**plain, "allconcat": plain["allconcat"] + bias}


@pytest.mark.usefixtures("own_graph")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gradients_are_scattered_one_by_one(stage):
    """From stage 2 on, the operation that makes a gradient waits for the one before it."""
    operations = Training(zero=stage).graph.operations
    scattered = [
        op
        for op in operations
        if op.name.endswith("_layout") and op.inputs[0].operation.gradient_of
    ]
    waited_for = {
        x.operation for op in operations if isinstance(op, DelayOperation) for x in op.inputs[1:]
    }
    assert len(scattered) == 7  # of two kernels and five vectors
    assert [op in waited_for for op in scattered] == [stage > 1] * 6 + [False]


@pytest.mark.slow("*simd*", "1-*")
@pytest.mark.usefixtures("own_graph")
@pytest.mark.parametrize(
    "place",
    [ROWS, (*BOTH, "simd"), ("rows:2,cols:2", "batch:rows")],
    ids=["placement", "simd", "over cols"],
)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_microbatches(stage, place, whole):
    """From stage 2 on, a loop over microbatches holds and sums parts alone."""
    axis = "cols" if place[1] == "batch:rows" and "cols" in place[0] else "rows"
    training = Training(
        place, recompute=True, clip=True, microbatches=2, zero=stage, zero_axis=axis
    )
    assert_equal(training.run(), whole("adamw", clip=True, microbatches=2))
    [loop] = [op for op in training.graph.operations if op.inner_operations]
    shapes = {v: v.stored_shape for v in training.variables}
    if stage < 3:  # only slots are stored in parts then, and these have the shapes of their weights
        stored = {v.name.rpartition("/")[0]: v.stored_shape for v in training.all_variables}
        shapes = {v: stored[v.name] if stage == 2 else v.shape for v in training.variables}
    assert len(loop.gradient_sums) == len(training.variables)
    assert {v: loop.outputs[i].shape for i, v in loop.gradient_sums.items()} == shapes
    read = {x.operation: x.shape for x in loop.inputs if x.operation in training.variables}
    assert len(read) >= 3  # small variables may have been stacked
    assert all(shape == v.stored_shape for v, shape in read.items())


def gradient(zero):
    """The gradient of the first weight of two microbatches: whole, and a processor's slice."""
    tf2.random.set_seed(1)
    with mtf.VariableStore().scope(), mtf.debug.collect() as values:
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        [grad, *others], _ = mtf.serialize_training_step(
            examples(mesh), lambda inputs: {"loss": model(inputs)}, BATCH, 2
        )
        mtf.inspect(grad, "gradient")
        OPTIMIZERS["sgd"]().apply_grads([grad, *others], mesh.graph.trainable_variables)
        impl = mtf.placement_mesh_impl.PlacementMeshImpl(*ROWS, [""] * 4, merge="none", zero=zero)
        lowering = mtf.Lowering(mesh.graph, {mesh: impl})
    whole = lowering.export_to_tf_tensor(grad)
    np.testing.assert_array_equal(values["gradient"], whole)
    return whole, lowering


def test_a_gradient_in_parts_is_gathered_for_the_user():
    found, lowering = gradient(3)
    np.testing.assert_allclose(found, gradient(0)[0], rtol=1e-5, atol=1e-6)
    # When it is asked for, since no step needs it.
    assert [str(c) for _, _, c in lowering.collectives][-1].startswith(
        "Collective(kind='allconcat'"
    )


@pytest.mark.slow_but(1)
@pytest.mark.usefixtures("own_graph")
@pytest.mark.parametrize("place", [ROWS, (*ROWS, "simd")])
def test_slices_keep_no_whole_tensors_in_memory(place):
    """A slice of an initial value that is cut along its first axis is a view of it all."""
    training = Training(place, zero=3)
    with tf.Session(config=tf.ConfigProto(device_count={"CPU": 4})) as session:
        session.run(tf.global_variables_initializer())
        session.run(training.lowering.copy_masters_to_slices())
        slices = [
            v for variable in training.lowering.variables.values() for v in variable.slice_variables
        ]
        reads = [v.read_value().op.inputs[0] for v in slices]
        metadata = tf.RunMetadata()
        options = tf.RunOptions(trace_level=tf.RunOptions.FULL_TRACE)
        session.run(reads, options=options, run_metadata=metadata)
    nodes = {n.node_name: n for d in metadata.step_stats.dev_stats for n in d.node_stats}
    for x in reads:
        description = nodes[x.op.name].output[0].tensor_description.allocation_description
        assert description.requested_bytes == 4 * x.shape.num_elements(), x


@pytest.mark.slow("place[03]*", "place[12]*")
@pytest.mark.usefixtures("own_graph")
@pytest.mark.parametrize(
    "place, zero", [(ROWS, 0), ((*ROWS, "simd"), 2), ((*BOTH, "simd"), 3), (("all:1", ""), 0)]
)
def test_checkpoints_of_any_stage(place, zero, tmp_path):
    """The file has whole variables under the names that they always have."""
    path = str(tmp_path / "model")
    trained = Training(zero=3).run(save=path)
    found = dict(tf.train.list_variables(path))
    assert found["wi/kernel"] == [8, 24] and found["wi/kernel/adam_m"] == [8, 24]
    with tf.Graph().as_default():
        axis = {"zero_axis": "rows"} if zero else {}
        restored = Training(place, zero=zero, **axis).run(0, restore=path)
    for name, value in trained[1].items():
        np.testing.assert_array_equal(restored[1][name], value, err_msg=name)


@pytest.mark.slow
@pytest.mark.usefixtures("own_graph")
def test_rules_of_variables(whole):
    training = Training(variable_layout="d_ff:rows")
    assert_equal(training.run(), whole("adamw"))
    stored = {v.name: str(v.stored_shape) for v in training.variables}
    assert stored["wi/kernel"] == "Shape[d_model=8, d_ff@rows=24]"
    assert (
        stored["norm_layer/layer_norm/layer_norm_scale"] == "Shape[d_model=8]"
    )  # no rule is of it


def test_values_by_the_tensors_of_the_model():
    """What the user has of weights and slots gives their whole values."""
    with mtf.VariableStore().scope() as store:
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        w = mtf.get_variable(mesh, "w", "a:8", initializer=tf.ones_initializer())
        slot = mtf.get_variable(mesh, "slot", "a:8", trainable=False)
        new = mtf.assign(slot, slot + w)
        update = mtf.assign_sub(w, mtf.read_variable(slot) * 0.5)
        impl = mtf.placement_mesh_impl.PlacementMeshImpl(
            "rows:2", "", [""] * 2, merge="none", zero=3
        )
        lowering = mtf.Lowering(mesh.graph, {mesh: impl})
        del new, update
        for x in (w, slot, mesh.graph.trainable_variables[0].value):
            assert lowering.export_to_tf_tensor(x).shape == [8]
        assert all(v.shape == [4] for v in store.slice_variables("w").values())
        np.testing.assert_allclose(store.value("w"), 1 - 0.5 * store.value("slot"), rtol=1e-6)


def test_a_store_moves_between_stages():
    store, losses = mtf.VariableStore(), []
    for zero in (0, 3, 2, 3, 0):
        with store.scope():
            graph = mtf.Graph()
            mesh = mtf.Mesh(graph, "mesh")
            loss = model(examples(mesh))
            variables = graph.trainable_variables
            gradients = mtf.gradients([loss], [v.value for v in variables])
            OPTIMIZERS["adamw"]().apply_grads(gradients, variables)
            impl = mtf.placement_mesh_impl.PlacementMeshImpl(*ROWS, [""] * 4, zero=zero)
            lowering = mtf.Lowering(graph, {mesh: impl})
            losses.append(float(lowering.export_to_tf_tensor(loss)))
    assert losses == sorted(losses, reverse=True) and losses[-1] < 0.99 * losses[0]


def test_an_argument_of_mtf_function():
    """It holds for what the function makes, and no longer."""
    impls = []

    def step():
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        loss = model(examples(mesh))
        impls.append(mtf.placement_mesh_impl.PlacementMeshImpl(*ROWS, [""] * 4))
        lowering = mtf.Lowering(mesh.graph, {mesh: impls[-1]})
        return lowering.export_to_tf_tensor(loss)

    stored, plain = mtf.function(zero=3, zero_axis="rows")(step), mtf.function(step)
    losses = []
    for fn in (stored, plain):
        tf2.random.set_seed(1)
        losses.append(float(fn()))
    assert [str(impl.stored_layout) for impl in (impls[0], impls[-1])] == [
        "zero=3 over rows",
        "None",
    ]
    layouts = [list(fn.store._known.variables["wi/kernel"].form.layout) for fn in (stored, plain)]
    assert layouts == [[None, 0], [None, None]]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_by_gin():
    import gin

    gin.parse_config("stored_layout.zero = 3")
    impl = mtf.placement_mesh_impl.PlacementMeshImpl(*ROWS, [""] * 4)
    assert str(impl.stored_layout) == "zero=3 over rows"


def place_on_one_device(**stored):
    impl = mtf.placement_mesh_impl.PlacementMeshImpl
    return impl("rows:2,cols:2", "a:cols", ["cpu:0"] * 4, **stored)


@pytest.mark.parametrize(
    "make", [place_on_one_device, lambda **k: mtf.GspmdMeshImpl("rows:2,cols:2", "a:cols", **k)]
)
@pytest.mark.parametrize(
    "by_gin, given", [("zero = 3", {"zero_axis": "rows"}), ("zero_axis = 'rows'", {"zero": 3})]
)
def test_by_gin_and_an_argument_where_one_processor_runs_all(make, by_gin, given, own_graph):
    """The executed mesh of one processor is no mesh that the user makes: gin does not bind it."""
    import gin

    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    variable = mtf.get_variable(mesh, "w", "a:4,b:4").operation
    gin.parse_config(f"stored_layout.{by_gin}")
    mtf.Lowering(mesh.graph, {mesh: make(**given)})
    assert list(map(str, variable.outputs[0].shape.dimension_names)) == ["a", "b@rows"]


@pytest.mark.parametrize("zero", [1, 3])
def test_a_kernel_with_one_name_for_both_channels(zero):
    """What is split is found by name, and a name that is there twice would split both."""
    found = []
    for stored in ({}, {"zero": zero}):
        with tf.Graph().as_default():
            mesh = mtf.Mesh(mtf.Graph(), "mesh")
            x = mtf.ones(mesh, "batch:2,y:3,x:3,c:2")
            kernel = mtf.get_variable(
                mesh, "k", "h:2,w:2,c:2,c:4", initializer=tf.ones_initializer()
            )
            loss = mtf.reduce_sum(
                mtf.square(mtf.Conv2dOperation(x, kernel, [1] * 4, "SAME").outputs[0])
            )
            optimizer = mtf.optimize.MomentumOptimizer(0.001, 0.9)
            updates = optimizer.apply_grads(mtf.gradients([loss], [kernel]), [kernel.operation])
            impl = mtf.placement_mesh_impl.PlacementMeshImpl(
                "rows:2", "batch:rows", ["cpu:0"] * 2, merge="none", **stored
            )
            lowering = mtf.Lowering(mesh.graph, {mesh: impl})
            train = [lowering.lowered_operation(op) for op in updates]
            with tf.Session() as session:
                session.run(tf.global_variables_initializer())
                session.run(lowering.copy_masters_to_slices())
                session.run(train)
                found.append(session.run(lowering.export_to_tf_tensor(loss)))
    assert found[0] == pytest.approx(found[1], rel=1e-5)


def test_a_graph_has_one_stored_layout():
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    mtf.get_variable(mesh, "w", "a:8")
    for zero in (3, 3, 1):
        impl = mtf.placement_mesh_impl.PlacementMeshImpl("rows:2", "", [""] * 2, zero=zero)
        if zero == 3:
            mtf.Lowering(mesh.graph, {mesh: impl})
            continue
        with pytest.raises(ValueError, match="lowered before, with its variables stored in anot"):
            mtf.Lowering(mesh.graph, {mesh: impl})


WRONG = [
    ({"zero": 4}, "zero=4: the stage of ZeRO is 1 or 2 (what optimizers keep is stored in"),
    (
        {"zero": 3},
        "zero=3 on the mesh rows=2, cols=2: say over which of its dimensions, by zero_a",
    ),
    (
        {"zero": 3, "zero_axis": "row"},
        "zero_axis='row' is no dimension of the mesh rows=2, cols=2; did you mean rows?",
    ),
    (
        {"variable_layout": "d_model:row"},
        "variable_layout LayoutRules{d_model:row}: 'row' is no dimension of the mesh rows=2, cols=",
    ),
    (
        {"zero": 3, "zero_axis": "data"},
        "zero_axis='data' is no dimension of the mesh rows=2, cols=2. Name one of these",
    ),
    (
        {"zero": 3, "zero_axis": "rows+col"},
        "zero_axis='rows+col': 'col' is no dimension of the mesh rows=2, cols=2; did you mean cols",
    ),
    (
        {"variable_layout": "d_ff:rows,d_model:data"},
        "'data' is no dimension of the mesh rows=2, cols=2. Name one of these",
    ),
    ({"zero_axis": "rows"}, "zero_axis='rows' has no effect without zero=1, 2 or 3"),
]


@pytest.mark.parametrize("kwargs, message", WRONG)
def test_mistakes(kwargs, message):
    with pytest.raises(ValueError) as error:
        mtf.placement_mesh_impl.PlacementMeshImpl("rows:2,cols:2", "", [""] * 4, **kwargs)
    assert message in str(error.value)


@pytest.mark.parametrize("kwargs, message", [
    ({"zero": 1}, "zero=1 on a mesh without dimensions: one processor stores everything. Give the "
     "mesh a dimension, such as all=1, or leave zero out"),
    ({"zero": 1, "zero_axis": "all"}, "zero_axis='all' is no dimension of the mesh, which has none."
     " Give it one, or leave this out"),
    ({"variable_layout": "d_ff:all"}, "'all' is no dimension of the mesh, which has none."),
])  # fmt: skip
def test_mistakes_on_one_processor(kwargs, message):
    with pytest.raises(ValueError, match=message):
        mtf.placement_mesh_impl.PlacementMeshImpl("", "", [""], **kwargs)


@pytest.mark.parametrize("rule, message", [
    ("d_modle:rows", "variable_layout rule d_modle:rows stores nothing in parts: no variable has "
     "'d_modle'. Variables have d_ff, d_model; did you mean d_model? Correct the rule or leave it"),
    ("batch:rows", "no variable has 'batch'. Variables have d_ff, d_model. Correct the rule or le"),
])  # fmt: skip
def test_rules_that_no_variable_has(rule, message):
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")
    w = mtf.get_variable(mesh, "w", "d_model:4,d_ff:6")
    mtf.einsum([mtf.ones(mesh, "batch:2,d_model:4"), w], output_shape="batch:2,d_ff:6")
    place = "rows:2", "batch:rows", [""] * 2
    impl = mtf.placement_mesh_impl.PlacementMeshImpl(*place, variable_layout=rule)
    with mtf.strict(), pytest.raises(ValueError, match=re.escape(message)):
        mtf.Lowering(graph, {mesh: impl})
    impl = mtf.placement_mesh_impl.PlacementMeshImpl(*place, variable_layout="d_ff:rows")
    with mtf.strict():
        mtf.Lowering(graph, {mesh: impl})


def test_summary_says_what_is_split_and_what_is_whole():
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    for name, shape in (("w", "a:8,b:6"), ("odd", "c:7")):
        w = mtf.get_variable(mesh, name, shape)
        mtf.optimize.MomentumOptimizer(0.1, 0.9).apply_grad(mtf.ones_like(w), w.operation)
    impl = mtf.placement_mesh_impl.PlacementMeshImpl("rows:4", "", [""] * 4, zero=2)
    rows = {row.name: row.split_text for row in mtf.summary(mesh.graph, impl).rows}
    slots = {name: text for name, text in rows.items() if name not in ("w", "odd")}
    assert rows["w"] == rows["odd"] == "-" and sorted(slots.values()) == ["-", "a:rows"]
    assert "stored with zero=2 over rows" in str(mtf.summary(mesh.graph, impl))


# -- names that a program gives may have any characters

NAMES = ["a@b", "a@all", "@", "@all", "a@", "all@all", "a@all@all", "d@a:"]


def with_a_name(name, layout, zero, mesh_dim="all", steps=3):
    """Trains a weight with a dimension of that name; returns losses and the weight."""
    with tf.Graph().as_default(), tf.Session() as session:
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        dims = [mtf.Dimension(name, 8), mtf.Dimension("out", 4)]
        x = mtf.import_tf_tensor(mesh, tf.constant(DATA), [BATCH, dims[0]])
        w = mtf.get_variable(mesh, "w", dims, initializer=tf.ones_initializer())
        other = mtf.get_variable(
            mesh, "o", [mtf.Dimension("a", 8)], initializer=tf.ones_initializer()
        )
        variable = w.operation
        loss = mtf.reduce_mean(mtf.square(mtf.einsum([x, w], [BATCH, dims[1]])))
        loss += mtf.reduce_sum(mtf.square(other))
        grads = mtf.gradients([loss], [w, other])
        updates = mtf.optimize.MomentumOptimizer(0.1, 0.9).apply_grads(
            grads, mesh.graph.trainable_variables
        )
        impl = mtf.placement_mesh_impl.PlacementMeshImpl(
            [(mesh_dim, 2)], layout, ["cpu:0"] * 2, zero=zero, merge="none"
        )
        lowering = mtf.Lowering(mesh.graph, {mesh: impl})
        fetched = lowering.export_to_tf_tensor(loss), lowering.export_to_tf_tensor(w)
        train = [lowering.lowered_operation(op) for op in updates]
        shape = impl.slice_shape(variable.stored_shape)
        session.run(tf.global_variables_initializer())
        session.run(lowering.copy_masters_to_slices())
        results = []
        for _ in range(steps):
            results.append(session.run(fetched))
            session.run(train)
        return results, shape


@pytest.mark.slow_but(5)
@pytest.mark.parametrize("zero", [0, 1, 3])
@pytest.mark.parametrize("name", NAMES)
def test_any_name_of_a_dimension(name, zero):
    found, shape = with_a_name(name, [("batch", "all")], zero)
    expected, _ = with_a_name("plain", [("batch", "all")], 0)
    for one, other in zip(found, expected):
        np.testing.assert_allclose(one[0], other[0], rtol=1e-5)
        np.testing.assert_allclose(one[1], other[1], rtol=1e-5)
    assert shape == ([4, 4] if zero == 3 else [8, 4])  # no rule splits it


def test_rules_for_such_names():
    for name in NAMES:
        found, shape = with_a_name(name, [(name, "all")], 0)
        assert shape == [4, 4] and len(found) == 3


def test_mesh_dimensions_of_such_names():
    for mesh_dim in ("m@n", "@", "all@"):
        _, shape = with_a_name("a@b", [("batch", mesh_dim)], 3, mesh_dim)
        assert shape == [4, 4]


@pytest.mark.parametrize("devices", [["cpu:0"] * 2, ["cpu:0", "cpu:1"]])
@pytest.mark.parametrize(
    "stored", [{}, {"zero": 3, "zero_axis": "rows"}, {"variable_layout": "d:rows"}]
)
def test_a_loop_assigns(stored, devices):
    """To one of several variables of a shape, which are stacked and stored in parts elsewhere."""
    with tf.Graph().as_default():
        graph = mtf.Graph()
        mesh = mtf.Mesh(graph, "mesh")
        ones = tf.ones_initializer()
        kept, factor = (
            mtf.get_variable(mesh, name, "d:4", initializer=ones, trainable=name == "w")
            for name in ("kept", "w")
        )

        def body(i, x):
            mtf.assign(kept.operation, kept + x)
            return [i + 1, x * 2.0]

        start = [mtf.constant(mesh, 0, dtype=tf.int32), mtf.ones(mesh, "a:4,d:4") * factor]
        start[1] = mtf.reduce_max(start[1], output_shape=factor.shape)
        x = mtf.while_loop(lambda i, x: mtf.less(i, 3), body, start)[1]
        impl = mtf.placement_mesh_impl.PlacementMeshImpl("rows:2", "a:rows", devices, **stored)
        lowering = mtf.Lowering(graph, {mesh: impl})
        result = lowering.export_to_tf_tensor(x)
        with tf.Session(config=tf.ConfigProto(device_count={"CPU": 2})) as session:
            session.run(tf.global_variables_initializer())
            session.run(lowering.copy_masters_to_slices())
            found, _ = session.run([result, lowering.effects])
            session.run(lowering.copy_slices_to_masters())
            value = session.run(kept.operation.masters[0])
    np.testing.assert_array_equal(found, [8.0] * 4)
    np.testing.assert_array_equal(value, [5.0] * 4)  # each iteration reads what there was before


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_waits_for_a_weight(zero):
    """Also for one that nothing else reads."""
    with mtf.VariableStore().scope():
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        start = tf.ones_initializer()
        v, w = (mtf.get_variable(mesh, name, "d:4", initializer=start) for name in "vw")
        x = mtf.depend(mtf.ones(mesh, "a:4,d:4") * v, [w, v])
        impl = mtf.placement_mesh_impl.PlacementMeshImpl(
            "rows:2", "a:rows", ["cpu:0"] * 2, zero=zero, zero_axis="rows"
        )
        lowering = mtf.Lowering(mesh.graph, {mesh: impl})
        np.testing.assert_array_equal(lowering.export_to_tf_tensor(x), np.ones([4, 4]))


@pytest.mark.parametrize("simd", [False, True])
@pytest.mark.parametrize("zero", [None, 1, 3])
def test_what_is_assigned_is_differentiated_by_tensorflow(simd, zero):
    """From the tensors that it was computed from, which are in one layout with it."""
    stored = {"zero": zero, "zero_axis": "rows"} if zero else {}
    devices = ["cpu:0", "cpu:1"]
    with tf.Graph().as_default():
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        v, w, last = (
            mtf.get_variable(mesh, name, "d:4", initializer=tf.constant_initializer(value))
            for name, value in [("v", 2.0), ("w", 0.5), ("last", 0.0)]
        )
        y = mtf.cwise(lambda t, u: t * tf.cos(u), [v, w])
        grads = mtf.gradients([mtf.reduce_sum(y * y)], [v, w])
        update = mtf.assign(last.operation, y)

        def lowered():
            impl = SimdMeshImpl if simd else mtf.placement_mesh_impl.PlacementMeshImpl
            given = [] if simd else [devices]
            lowering = mtf.Lowering(mesh.graph, {mesh: impl("rows:2", "", *given, **stored)})
            exported = [lowering.export_to_tf_tensor(g) for g in grads]
            return [*exported, lowering.lowered_operation(update)]

        fetches = replicate(lowered, devices=devices) if simd else lowered()
        with tf.Session(config=tf.ConfigProto(device_count={"CPU": 2})) as session:
            session.run(tf.global_variables_initializer())
            found = session.run(fetches)[:2]
    expected = 4 * np.cos(0.5) ** 2, -8 * np.cos(0.5) * np.sin(0.5)
    for value, e in zip(found, expected):
        np.testing.assert_allclose(value, [e] * 4, rtol=1e-5)


def test_an_update_that_reads_a_weight_which_is_stored_otherwise(own_graph):
    """Over what the layout leaves of joined mesh dimensions: rows for one, both for the other."""

    def values(**options):
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        w = mtf.get_variable(mesh, "w", [FF, MODEL], initializer=tf.ones_initializer())
        rates = mtf.get_variable(mesh, "rates", [MODEL], initializer=tf.ones_initializer())
        x = mtf.import_tf_tensor(mesh, tf.constant(DATA), [BATCH, MODEL])
        loss = mtf.reduce_mean(mtf.square(mtf.einsum([x, w], reduced_dims=[MODEL])))
        # The rates are read by this update alone, before anything has gathered them.
        [dw] = mtf.gradients([loss], [w])
        update = mtf.assign_sub(w, dw * rates)
        impl = mtf.placement_mesh_impl.PlacementMeshImpl(
            "rows:2,cols:2", "d_ff:cols", ["cpu:0"] * 4, merge="none", **options
        )
        lowering = mtf.Lowering(mesh.graph, {mesh: impl})
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            session.run(lowering.copy_masters_to_slices())
            session.run(lowering.lowered_operation(update))
            return session.run(mesh.graph.trainable_variables[0].master)

    with tf.variable_scope("whole"):
        expected = values()
    with tf.variable_scope("parts"):
        np.testing.assert_allclose(values(zero=3, zero_axis="rows+cols"), expected, rtol=1e-6)
