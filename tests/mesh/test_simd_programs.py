"""Replicated programs: what executes them, their collectives and slices, what they leave behind."""

import functools
import gc
import itertools
import weakref
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf2
import tensorflow.compat.v1 as tf

import mesh_tensorflow as mtf
from mesh_tensorflow._mesh.replicate import SimdProgram
from mesh_tensorflow.placement_mesh_impl import PlacementMeshImpl, group_key
from mesh_tensorflow.simd_mesh_impl import SimdMeshImpl, replicate

ROWS, COLS, WIDE = mtf.Dimension("rows", 12), mtf.Dimension("cols", 24), mtf.Dimension("wide", 48)
VALUES = np.random.RandomState(0).randn(12, 24).astype(np.float32)


@pytest.fixture(autouse=True)
def own_graph():
    with tf.Graph().as_default():
        tf.set_random_seed(3)
        yield


def model(mesh_shape, layout, counters=None):
    """A residual block with normalization, trained; only its rows and its hidden units are cut."""
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")
    x = mtf.import_tf_tensor(mesh, tf.constant(VALUES), [ROWS, COLS])
    y = mtf.layers.layer_norm(x, COLS)
    y = mtf.layers.dense_relu_dense(mtf.exp(y), WIDE, is_training=True, dropout=0.1)
    loss = mtf.reduce_mean(mtf.square(x + y)) + mtf.reduce_max(y)
    variables = graph.trainable_variables
    gradients = mtf.gradients([loss], [v.outputs[0] for v in variables])
    updates = mtf.optimize.AdamWeightDecayOptimizer(0.01).apply_grads(gradients, variables)
    lowering = mtf.Lowering(graph, {mesh: SimdMeshImpl(mesh_shape, layout)})
    if counters is not None:
        counters.extend(lowering.counters)
    return {
        "loss": lowering.export_to_tf_tensor(loss),
        "y": lowering.export_to_tf_tensor(y),
        "train": tf.group([lowering.lowered_operation(op) for op in updates]),
    }


def cpus(n):
    return [f"/cpu:{i}" for i in range(n)]


def losses(step, config=None, target=""):
    with tf.Session(target, config=config or tf.ConfigProto(device_count={"CPU": 8})) as session:
        session.run(tf.global_variables_initializer())
        return [float(session.run(step)["loss"]) for _ in range(4)]


@pytest.mark.slow("x:2,y:2,z:2*", "x:3*", "x:4*", "x:12*")
@pytest.mark.parametrize(
    "mesh_shape, layout, n",
    [
        ("x:2,y:2", "rows:x,wide:y", 4),
        ("x:3,y:2", "rows:x,wide:y", 6),
        ("x:4", "cols:x", 4),
        ("x:2,y:2,z:2", "rows:x,wide:z", 8),
        ("x:3", "", 3),
        ("x:12", "rows:x", 12),
    ],
)
def test_losses_are_those_of_one_processor(mesh_shape, layout, n):
    step = replicate(lambda: model(mesh_shape, layout), devices=cpus(n))
    many = losses(step, tf.ConfigProto(device_count={"CPU": n}))
    with tf.Graph().as_default():
        tf.set_random_seed(3)
        one = losses(replicate(lambda: model("x:1", ""), devices=cpus(1)))
    np.testing.assert_allclose(many, one, rtol=1e-5)


def test_losses_with_and_without_share_memory():
    """The argument of earlier releases is accepted, and changes nothing."""
    found = []
    for share in (True, False):
        with tf.Graph().as_default():
            tf.set_random_seed(3)
            step = replicate(lambda: model("x:2", "rows:x"), devices=cpus(2), share_memory=share)
            nodes = [(node.op, node.name) for node in tf.get_default_graph().as_graph_def().node]
            found.append((nodes, losses(step)))
    assert found[0] == found[1]


@pytest.mark.slow("server*")
@pytest.mark.parametrize("optimizers", ["all", "none"])
@pytest.mark.parametrize("where", ["session", "server"])
def test_whatever_executes_the_graph(optimizers, where):
    config = tf.ConfigProto(
        device_count={"CPU": 4}, operation_timeout_in_ms=60000, isolate_session_state=True
    )
    if optimizers == "none":
        config.graph_options.rewrite_options.disable_meta_optimizer = True
        config.graph_options.optimizer_options.opt_level = tf.OptimizerOptions.L0
    server = tf.train.Server.create_local_server(config=config) if where == "server" else None
    found = losses(
        replicate(lambda: model("x:2,y:2", "rows:x,wide:y"), devices=cpus(4)),
        config,
        server.target if server else "",
    )
    with tf.Graph().as_default():
        tf.set_random_seed(3)
        one = losses(replicate(lambda: model("x:1", ""), devices=cpus(1)))
    np.testing.assert_allclose(found, one, rtol=1e-5)


@pytest.mark.slow
def test_processors_of_a_named_task():
    server = tf.train.Server(
        {"worker": ["localhost:0"]}, config=tf.ConfigProto(device_count={"CPU": 4})
    )
    devices = [f"/job:worker/task:0/cpu:{i}" for i in (2, 0, 3, 1)]
    found = losses(
        replicate(lambda: model("x:2,y:2", "rows:x,wide:y"), devices=devices), target=server.target
    )
    with tf.Graph().as_default():
        tf.set_random_seed(3)
        one = losses(replicate(lambda: model("x:1", ""), devices=cpus(1)))
    np.testing.assert_allclose(found, one, rtol=1e-5)


@pytest.mark.parametrize("second", [cpus(4), cpus(2), cpus(4)[1:3]])
def test_two_programs_in_one_step(second):
    def total(scale, devices):
        def program():
            graph = mtf.Graph()
            mesh = mtf.Mesh(graph, "mesh")
            x = mtf.import_tf_tensor(mesh, tf.constant(VALUES * scale), [ROWS, COLS])
            y = mtf.reduce_sum(x)
            impl = SimdMeshImpl(f"x:{len(devices)}", "rows:x")
            return mtf.Lowering(graph, {mesh: impl}).export_to_tf_tensor(y)

        return replicate(program, devices=devices)

    both = [total(1.0, cpus(4)), total(10.0, second)]
    with tf.Session(config=tf.ConfigProto(device_count={"CPU": 4})) as session:
        for _ in range(20):
            np.testing.assert_allclose(
                session.run(both), [VALUES.sum(), 10 * VALUES.sum()], rtol=1e-4
            )


def test_keys_of_long_programs_and_of_placed_collectives():
    """A program that takes more keys than are set aside for one does not take the next one's."""
    first, second = [SimdProgram(cpus(2), [0, 1]) for _ in range(2)]
    count = 2**15 - 1
    taken = [p.new_keys(count) for _ in range(5) for p in (first, second)]
    keys = sorted([*taken, group_key(cpus(2))])
    assert all(b - a >= count for a, b in itertools.pairwise(keys)) and keys[-1] < 2**31


def test_a_slice_of_another_processor():
    """Nothing is made of what the last processors receive."""

    def program():
        graph = mtf.Graph()
        mesh = mtf.Mesh(graph, "mesh")
        x = mtf.import_tf_tensor(mesh, tf.constant(VALUES), [ROWS, COLS])
        shifted = mtf.shift(x, 1, ROWS, wrap=True)
        impl = SimdMeshImpl("x:4", "rows:x")
        first = mtf.Lowering(graph, {mesh: impl}).tensors[shifted].to_laid_out_tensor().one_slice
        return [tf.where(tf.equal(impl.pnum_tensor, 0), first, tf.zeros_like(first))]

    [found] = replicate(program, devices=cpus(4))
    with tf.Session(
        config=tf.ConfigProto(device_count={"CPU": 4}, operation_timeout_in_ms=60000)
    ) as session:
        np.testing.assert_array_equal(session.run(found), np.roll(VALUES, 1, axis=0)[:3])


def test_devices_in_another_order_than_ranks():
    """Every kind of collective, where TensorFlow's ranks are not the processors' coordinates."""

    def program():
        graph = mtf.Graph()
        mesh = mtf.Mesh(graph, "mesh")
        x = mtf.import_tf_tensor(mesh, tf.constant(VALUES), [ROWS, COLS])
        by_cols = mtf.reshape(x, [mtf.Dimension("r", 12), mtf.Dimension("c", 24)])
        gathered = mtf.rename_dimension(x, "rows", "whole")
        impl = SimdMeshImpl("x:4", "rows:x,c:x")
        results = [
            mtf.shift(x, 3, ROWS, wrap=True),
            by_cols,
            gathered,
            mtf.reduce_sum(x, reduced_dim=ROWS),
        ]
        lowering = mtf.Lowering(graph, {mesh: impl})
        exports = [lowering.export_to_tf_tensor(result) for result in results]
        counters.extend(name.split("/")[0] for name, _ in lowering.counters)
        return exports

    counters = []
    found = replicate(program, devices=[f"/cpu:{i}" for i in (2, 0, 3, 1)])
    with tf.Session(config=tf.ConfigProto(device_count={"CPU": 4})) as session:
        values = session.run(found)
    for value, expected in zip(
        values, [np.roll(VALUES, 3, axis=0), VALUES, VALUES, VALUES.sum(0)], strict=True
    ):
        np.testing.assert_allclose(value, expected, rtol=1e-4, atol=1e-5)
    assert {"allreduce", "alltoall", "allconcat"} <= set(counters), counters


def run_at_once(operations):
    """Returns how many of some operations of a graph may run at once, at most."""

    @functools.cache
    def ended(op):
        """Those of them that have ended when an operation begins."""
        needs = [x.op for x in op.inputs] + op.control_inputs
        return frozenset(x for x in needs if x in operations).union(*map(ended, needs))

    # If each waits for the one k places before it, they are k rows, and one of each row can run.
    n = len(operations)
    return next(
        k
        for k in range(1, n + 1)
        if all(operations[i - k] in ended(operations[i]) for i in range(k, n))
    )


@pytest.mark.slow_but(3)
@pytest.mark.parametrize("kind", ["sum", "gather", "alltoall", "shift"])
@pytest.mark.parametrize("loop", [False, True])
def test_few_collectives_run_at_once(kind, loop):
    graphs = []

    def program():
        impl = SimdMeshImpl("x:4", "")

        def total(x):
            graphs.append(tf.get_default_graph())
            results = []
            for i in range(20):
                y = impl.LaidOutTensor([x + float(i)])
                results.append(
                    impl.allreduce(y, [0], "SUM")
                    if kind == "sum"
                    else impl.allconcat(y, 0, 0)
                    if kind == "gather"
                    else impl.alltoall(y, 0, 0, 0)
                    if kind == "alltoall"
                    else impl.receive(y, 0, [3, 0, 1, 2])
                )
            return tf.add_n([tf.reduce_sum(y.one_slice) for y in results])

        x = tf.ones([4]) * tf.cast(impl.pnum_tensor, tf.float32)
        if not loop:
            return impl.allreduce(impl.LaidOutTensor([total(x)]), [0], "SUM").one_slice
        y = tf.while_loop(lambda y: y[0] < 1.0, lambda y: [y + 1.0 + 0.0 * total(x)], [0 * x])
        return impl.allreduce(impl.LaidOutTensor([tf.reduce_sum(y)]), [0], "SUM").one_slice

    found = replicate(program, devices=cpus(4))
    operations = [
        op
        for op in graphs[-1].get_operations()
        if op.type.startswith("Collective") and "Recv" not in op.type
    ][:20]
    assert len(operations) == 20 and run_at_once(operations) == (8 if kind == "shift" else 1)
    with tf.Session(config=tf.ConfigProto(device_count={"CPU": 4})) as session:
        value = session.run(found)
    each = {"sum": 4, "gather": 4, "alltoall": 1, "shift": 1}[kind]
    whole = sum(4 * (p + i) for p in range(4) for i in range(20)) * each
    assert value == (16 if loop else whole)


def nested_loops(impl):
    """The gradient of a loop around a loop that communicates, in each iteration of both."""
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")
    rows = mtf.Dimension("rows", 8)
    x = mtf.import_tf_tensor(mesh, np.linspace(0.1, 0.8, 8, dtype=np.float32), [rows])

    def inner(i, h):
        return i + 1, h * mtf.reduce_mean(h) + x

    def outer(i, h):
        _, h = mtf.while_loop(lambda i, _: mtf.less(i, 2), inner, [zero, h], maximum_iterations=2)
        return i + 1, h

    zero = mtf.constant(mesh, 0, dtype=tf.int32)
    _, y = mtf.while_loop(lambda i, _: mtf.less(i, 3), outer, [zero, x], maximum_iterations=3)
    [dx] = mtf.gradients([mtf.reduce_sum(y)], [x])
    lowering = mtf.Lowering(graph, {mesh: impl("all:2", "rows:all")})
    return [lowering.export_to_tf_tensor(t) for t in (y, dx)]


def test_loops_within_loops_communicate():
    """In each of several programs of a process: once TensorFlow has made some, names differ."""
    for _ in range(8):
        with tf.Graph().as_default():
            whole = nested_loops(lambda *args: PlacementMeshImpl(*args, ["cpu:0"] * 2))
            on_each = replicate(lambda: nested_loops(SimdMeshImpl), devices=cpus(2))
            config = tf.ConfigProto(device_count={"CPU": 2}, operation_timeout_in_ms=60000)
            with tf.Session(config=config) as session:
                for want, found in zip(*session.run([whole, on_each])):
                    np.testing.assert_allclose(found, want, rtol=1e-5)


def test_collectives_of_others_are_run_by_all():
    """Nothing is made of what the last processors receive; still, the others wait for them."""

    def program():
        impl = SimdMeshImpl("x:4", "")
        total = tf.raw_ops.CollectiveReduceV2(
            input=tf.ones([2]) + tf.cast(impl.pnum_tensor, tf.float32),
            group_size=4,
            group_key=77,
            instance_key=78,
            ordering_token=[],
            merge_op="Add",
            final_op="Id",
        )
        return [tf.where(tf.equal(impl.pnum_tensor, 0), total, tf.zeros_like(total))]

    [found] = replicate(program, devices=cpus(4))
    with tf.Session(
        config=tf.ConfigProto(device_count={"CPU": 4}, operation_timeout_in_ms=60000)
    ) as session:
        np.testing.assert_array_equal(session.run(found), [10.0, 10.0])


def test_what_is_drawn_is_drawn_by_each():
    """An operation with side effects gives each processor its own, though its inputs are equal."""

    def program():
        graph = mtf.Graph()
        mesh = mtf.Mesh(graph, "mesh")
        x = mtf.zeros(mesh, [ROWS, COLS])
        y = mtf.slicewise(
            lambda t: t + tf.random.uniform(t.shape), [x], splittable_dims=[ROWS, COLS]
        )
        lowering = mtf.Lowering(graph, {mesh: SimdMeshImpl("x:2", "rows:x")})
        return [lowering.export_to_tf_tensor(y)]

    tf.set_random_seed(None)
    [found] = replicate(program, devices=cpus(2))
    with tf.Session(config=tf.ConfigProto(device_count={"CPU": 2})) as session:
        first, second = np.split(session.run(found), 2)
    assert np.mean(first == second) < 0.01


def test_tables_within_loops_are_not_those_outside():
    """In the loop, all processors have the same; what has the same name outside is their own."""

    def program():
        impl = SimdMeshImpl("x:4", "rows:x")
        names = []

        def body(i):
            entry = impl._collectives.own([1, 1, 1, 2])
            names.append(entry.op.name)
            return [i + entry]

        looped = tf.while_loop(lambda i: i < 3, body, [tf.constant(0)])
        own = tf.gather(tf.range(4 * 64.0), impl.pnum_tensor * 64 + tf.range(64), name=names[0])
        assert own.op.name == names[0]
        total = impl.allreduce(impl.LaidOutTensor([tf.exp(-own / 64)]), [0], "SUM")
        return [total.one_slice, looped]

    [total, looped] = replicate(program, devices=cpus(4))
    with tf.Session(config=tf.ConfigProto(device_count={"CPU": 4})) as session:
        found, count = session.run([total, looped])
    np.testing.assert_allclose(found, np.exp(-np.arange(256) / 64).reshape(4, 64).sum(0), rtol=1e-5)
    assert count == 3


def weights_and_positions(loop):
    """A program that adds to weights, then stores them at every row; its layout cuts rows only."""
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")
    weights, positions = [
        mtf.get_variable(mesh, name, [dim], initializer=tf.zeros_initializer())
        for name, dim in (("weights", COLS), ("positions", ROWS))
    ]
    lowering = mtf.Lowering(graph, {mesh: SimdMeshImpl("x:2,y:2", "rows:x")})
    weights, positions = [lowering.variables[v.operation] for v in (weights, positions)]

    def add(_, variable, value):
        return variable.assign_add(value, read_value=False)

    before = weights.laid_out_tensor.one_slice
    added = weights.assign_to_slices(add, [tf.ones([24]) + before])  # 0, 1, 3, 7, ...
    with tf.control_dependencies([added]):
        after = weights.read().one_slice
        stored = positions.assign_to_slices(add, [tf.fill([6], after[3] - before[3])])
    if loop:
        impl = weights.mesh_impl
        total = tf.while_loop(
            lambda i: i[0] < 3,
            lambda i: [impl.allreduce(impl.LaidOutTensor([i]), [0], "SUM").one_slice],
            [tf.ones([1])],
        )
        after += 0 * tf.reduce_sum(total)
    return before, after, stored


@pytest.mark.parametrize("loop", [False, True], ids=["straight", "collectives in a loop"])
def test_every_processor_has_its_own_slice(loop):
    *found, stored = replicate(lambda: weights_and_positions(loop), devices=cpus(4))
    names = {v.op.name for v in tf.get_collection("TPU_VAR")}
    assert names == {f"{name}_slice_{i}" for name in ("weights", "positions") for i in range(4)}
    [weights, positions] = tf.global_variables()
    with tf.Session(config=tf.ConfigProto(device_count={"CPU": 4})) as session:
        session.run(tf.global_variables_initializer())
        for step in range(4):
            before, after, _ = session.run([*found, stored])
            assert set(before) == {2**step - 1} and set(after) == {2 ** (step + 1) - 1}
        assert set(session.run(weights.read_value())) == {15.0}
        assert set(session.run(positions.read_value())) == {15.0}
        for v in tf.get_collection("TPU_VAR"):
            assert set(session.run(v)) == {15.0}, v.name


@pytest.fixture
def no_collection():
    gc.disable()
    yield
    gc.enable()


def test_a_lowering_is_freed_with_its_last_reference(no_collection):
    lowerings = []

    class Noted(mtf.Lowering):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            lowerings.append(weakref.ref(self))

    with mock.patch.object(mtf, "Lowering", Noted):
        step = replicate(lambda: model("x:2,y:2", "rows:x,wide:y"), devices=cpus(4))
    assert [lowering() for lowering in lowerings] == [None] and step


# -- a TensorFlow that lacks what programs use


def function_class():
    """The class of TensorFlow's concrete functions."""
    return tf2.types.experimental.ConcreteFunction.__subclasses__()[0]


@pytest.mark.parametrize("name", ["captured_inputs", "inputs", "outputs"])
def test_what_every_program_needs_is_checked_before_it_is_traced(name, monkeypatch):
    monkeypatch.delattr(function_class(), name)
    program = mock.Mock()
    text = rf"lacks ConcreteFunction\.{name} \(.*PlacementMeshImpl"
    with pytest.raises(RuntimeError, match=text):
        replicate(program, devices=cpus(2))
    program.assert_not_called()
    assert not tf.get_default_graph().get_operations()


@pytest.mark.slow("x:2,y:2*")
@pytest.mark.parametrize(
    "mesh_shape, layout, n", [("x:2", "rows:x", 2), ("x:2,y:2", "rows:x,wide:y", 4)]
)
def test_what_programs_can_do_without(mesh_shape, layout, n, monkeypatch):
    """Functions are called, and slices of variables made, with documented names alone."""

    def run():
        counters = []
        with tf.Graph().as_default():
            tf.set_random_seed(3)
            step = replicate(lambda: model(mesh_shape, layout, counters), devices=cpus(n))
            return losses(step), counters

    expected, counters = run()
    called = tf2.types.experimental.AtomicFunction.__subclasses__()[0]
    monkeypatch.delattr(called, "call_flat")
    monkeypatch.delattr(tf.Graph, "_device_functions_outer_to_inner")
    monkeypatch.delattr(tf.Graph, "_get_function")
    found, found_counters = run()
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert found_counters == counters


# -- the global step


@pytest.mark.parametrize("made", ["before", "within", "outside, within", "added within"])
def test_programs_find_the_global_step(made):
    if made == "before":
        tf.train.create_global_step()

    def program():
        assert (tf.train.get_global_step() is not None) == (made == "before")
        if made == "within":
            tf.train.create_global_step()
        elif made == "outside, within":
            with tf.init_scope():
                tf.train.create_global_step()
        elif made == "added within":
            step = tf.get_variable("step", [], tf.int64, tf.zeros_initializer(), trainable=False)
            tf.add_to_collection(tf.GraphKeys.GLOBAL_STEP, step)
        step = tf.train.get_global_step()
        assert step is tf.train.get_or_create_global_step()
        return tf.assign_add(step, 1)

    counted = replicate(program, devices=cpus(2))
    assert len(tf.get_collection(tf.GraphKeys.GLOBAL_STEP)) == 1
    with tf.Session(config=tf.ConfigProto(device_count={"CPU": 2})) as session:
        session.run(tf.global_variables_initializer())
        for _ in range(3):
            session.run(counted)
        assert session.run(tf.train.get_global_step()) == 3
