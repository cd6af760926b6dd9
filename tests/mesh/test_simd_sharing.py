"""Replicated programs of one memory: what is equal is computed once, and handed over."""

import ast
import collections
import gc
import pathlib
import sys
import weakref
from unittest import mock

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import mesh_tensorflow as mtf
from mesh_tensorflow._mesh.simd import execution, sharing
from mesh_tensorflow.simd_mesh_impl import SimdMeshImpl, replicate

ROWS, COLS, WIDE = mtf.Dimension("rows", 12), mtf.Dimension("cols", 24), mtf.Dimension("wide", 48)
VALUES = np.random.RandomState(0).randn(12, 24).astype(np.float32)


@pytest.fixture(autouse=True)
def own_graph(monkeypatch):
    monkeypatch.setattr(sharing, "LEAST_ELEMENTS", 32)
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


def functions():
    """The operations of each processor's function, by type."""
    library = tf.get_default_graph().as_graph_def().library
    return {
        f.signature.name[-1]: collections.Counter(node.op for node in f.node_def)
        for f in library.function
        if "_on_" in f.signature.name
    }


def losses(step, config=None, target=""):
    with tf.Session(target, config=config or tf.ConfigProto(device_count={"CPU": 8})) as session:
        session.run(tf.global_variables_initializer())
        return [float(session.run(step)["loss"]) for _ in range(4)]


@pytest.mark.slow("x:2,y:2,z:2*", "x:3*", "x:4*")
@pytest.mark.parametrize(
    "mesh_shape, layout, n",
    [
        ("x:2,y:2", "rows:x,wide:y", 4),
        ("x:3,y:2", "rows:x,wide:y", 6),
        ("x:4", "cols:x", 4),
        ("x:2,y:2,z:2", "rows:x,wide:z", 8),
        ("x:3", "", 3),
    ],
)
def test_losses_are_those_of_programs_that_share_nothing(mesh_shape, layout, n):
    found = []
    for share in (True, False):
        with tf.Graph().as_default():
            tf.set_random_seed(3)
            step = replicate(lambda: model(mesh_shape, layout), devices=cpus(n), share_memory=share)
            assert len(functions()) == (n if share else 0)
            found.append(losses(step))
    np.testing.assert_allclose(found[0], found[1], rtol=1e-5)


def test_what_is_equal_is_computed_once():
    replicate(lambda: model("x:2,y:2", "rows:x,wide:y"), devices=cpus(4))
    found = functions()
    # Normalization and exp are equal along y: processors 0 and 2 compute them for 1 and 3.
    assert [found[p]["Exp"] for p in "0123"] == [1, 0, 1, 0]
    assert [found[p]["Rsqrt"] > 0 for p in "0123"] == [True, False, True, False]
    # Hidden units are cut along y: everyone has its own.
    assert len({found[p]["Relu"] for p in "0123"}) == 1 and found["3"]["Relu"] > 0
    assert not any("CollectiveReduceV2" in ops for ops in found.values())
    assert sum(ops["Send"] for ops in found.values()) == sum(ops["Recv"] for ops in found.values())


@pytest.mark.slow
def test_large_meshes_run_the_one_program():
    step = replicate(lambda: model("x:12", "rows:x"), devices=cpus(12))
    assert not functions()
    many = losses(step, tf.ConfigProto(device_count={"CPU": 12}))
    with tf.Graph().as_default():
        tf.set_random_seed(3)
        one = losses(replicate(lambda: model("x:1", ""), devices=cpus(1)))
    np.testing.assert_allclose(many, one, rtol=1e-5)


@pytest.mark.slow_but(1)
@pytest.mark.slow("server*")
@pytest.mark.parametrize("optimizers", ["all", "none"])
@pytest.mark.parametrize("where", ["session", "server"])
def test_whatever_executes_the_graph(optimizers, where):
    """Functions have to become part of the graph, or what they send stays within them."""
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
    assert len(functions()) == 4
    with tf.Graph().as_default():
        tf.set_random_seed(3)
        one = losses(replicate(lambda: model("x:1", ""), devices=cpus(1)))
    np.testing.assert_allclose(found, one, rtol=1e-5)


def test_two_programs_in_one_step():
    def total(scale):
        def program():
            graph = mtf.Graph()
            mesh = mtf.Mesh(graph, "mesh")
            x = mtf.import_tf_tensor(mesh, tf.constant(VALUES * scale), [ROWS, COLS])
            y = mtf.reduce_sum(x)
            lowering = mtf.Lowering(graph, {mesh: SimdMeshImpl("x:4", "rows:x")})
            return lowering.export_to_tf_tensor(y)

        return replicate(program, devices=cpus(4))

    both = [total(1.0), total(10.0)]
    with tf.Session(config=tf.ConfigProto(device_count={"CPU": 4})) as session:
        for _ in range(20):
            np.testing.assert_allclose(
                session.run(both), [VALUES.sum(), 10 * VALUES.sum()], rtol=1e-4
            )


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


def test_collectives_become_computations():
    """Every kind of them, with devices in another order than TensorFlow's ranks."""

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
    for share in (True, False):
        found = replicate(program, devices=[f"/cpu:{i}" for i in (2, 0, 3, 1)], share_memory=share)
        kinds = {kind for ops in functions().values() for kind in ops}
        assert kinds and not any(kind.startswith("Collective") for kind in kinds)
        with tf.Session(config=tf.ConfigProto(device_count={"CPU": 4})) as session:
            values = session.run(found)
        for value, expected in zip(
            values, [np.roll(VALUES, 3, axis=0), VALUES, VALUES, VALUES.sum(0)], strict=True
        ):
            np.testing.assert_allclose(value, expected, rtol=1e-4, atol=1e-5)
    assert {"allreduce", "alltoall", "allconcat"} <= set(counters), counters


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
    assert [ops["CollectiveReduceV2"] for ops in functions().values()] == [1] * 4
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


@pytest.mark.parametrize("loop", [False, True], ids=["one memory", "collectives in a loop"])
def test_equal_slices_are_one_variable(loop):
    """Only its owner assigns to it; what waits for that on other processors waits for the owner."""
    *found, stored = replicate(lambda: weights_and_positions(loop), devices=cpus(4))
    names = sorted(v.op.name for v in tf.get_collection("TPU_VAR"))
    assert names == ["positions_slice_0", "positions_slice_2", "weights_slice_0"]
    assert len(functions()) == (0 if loop else 4)
    if not loop:
        adds = [functions()[p]["AssignAddVariableOp"] for p in "0123"]
        assert adds == [2, 0, 1, 0]  # processor 2 stores the second half of the positions
        assert [functions()[p]["ReadVariableOp"] for p in "0123"] == [3, 0, 1, 0]
    [weights, positions] = tf.global_variables()
    with tf.Session(config=tf.ConfigProto(device_count={"CPU": 4})) as session:
        session.run(tf.global_variables_initializer())
        for step in range(4):
            before, after, _ = session.run([*found, stored])
            assert set(before) == {2**step - 1} and set(after) == {2 ** (step + 1) - 1}
        assert set(session.run(weights.read_value())) == {15.0}
        assert set(session.run(positions.read_value())) == {15.0}


def test_programs_that_share_nothing_store_every_slice():
    replicate(lambda: weights_and_positions(False), devices=cpus(4), share_memory=False)
    assert len(tf.get_collection("TPU_VAR")) == 8


@pytest.mark.slow
def test_the_traced_graph_is_freed():
    graphs = []

    def program():
        graphs.append(weakref.ref(tf.get_default_graph()))
        return weights_and_positions(False)

    results = replicate(program, devices=cpus(4))
    gc.collect()
    assert graphs[0]() is None and results


@pytest.fixture
def no_collection():
    gc.disable()
    yield
    gc.enable()


def test_a_large_traced_graph_is_freed_at_once(no_collection):
    graphs = []

    def program():
        graphs.append(weakref.ref(tf.get_default_graph()))
        return weights_and_positions(False)

    with mock.patch.object(sys.modules["mesh_tensorflow._mesh.simd.replicate"], "_LARGE", 1):
        results = replicate(program, devices=cpus(4))
    assert graphs[0]() is None and results


@pytest.mark.parametrize("share_memory", [True, False])
def test_a_lowering_is_freed_with_its_last_reference(share_memory, no_collection):
    lowerings = []

    class Noted(mtf.Lowering):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            lowerings.append(weakref.ref(self))

    with mock.patch.object(mtf, "Lowering", Noted):
        step = replicate(
            lambda: model("x:2,y:2", "rows:x,wide:y"), devices=cpus(4), share_memory=share_memory
        )
    assert [lowering() for lowering in lowerings] == [None] and step


# -- a TensorFlow that lacks what sharing needs

MESHES = [("x:2", "rows:x", 2), ("x:2,y:2", "rows:x,wide:y", 4)]
ROWS_OF_TABLE = execution.TABLE
NEEDED_TO_SHARE = [a for a in ROWS_OF_TABLE if a.needed_by == "sharing"]
NEEDED_BY_ALL = [a for a in ROWS_OF_TABLE if a.needed_by == "programs"]


def attribute_id(attribute):
    return f"{attribute.owner}.{attribute.name}"


def owner_of(attribute):
    return execution._OWNERS[attribute.owner]()


@pytest.fixture
def warnings_given():
    execution.warn_of_no_sharing.cache_clear()
    with mock.patch.object(tf.logging, "warning") as warning:
        yield lambda: [call.args[0] % call.args[1:] for call in warning.call_args_list]
    execution.warn_of_no_sharing.cache_clear()


def run(mesh_shape, layout, n, share=True):
    """Returns the names of the functions that share, four losses, and the counters."""
    counters = []
    with tf.Graph().as_default():
        tf.set_random_seed(3)
        step = replicate(
            lambda: model(mesh_shape, layout, counters), devices=cpus(n), share_memory=share
        )
        return sorted(functions()), losses(step), counters


def expect_collectives(mesh_shape, layout, n):
    shared, found, counters = run(mesh_shape, layout, n)
    _, expected, expected_counters = run(mesh_shape, layout, n, share=False)
    assert shared == []
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert counters == expected_counters
    assert any("allreduce" in name for name, _ in counters)


@pytest.mark.slow("x:2,y:2*")
@pytest.mark.parametrize("mesh_shape, layout, n", MESHES)
def test_nothing_is_missing(mesh_shape, layout, n, warnings_given):
    shared, found, counters = run(mesh_shape, layout, n)
    _, expected, expected_counters = run(mesh_shape, layout, n, share=False)
    assert len(shared) == n
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert counters == expected_counters
    assert warnings_given() == []


@pytest.mark.slow("*Send*", "*add_to_graph*", "*function_def*", "*x:2,y:2*")
@pytest.mark.parametrize("mesh_shape, layout, n", MESHES)
@pytest.mark.parametrize("attribute", NEEDED_TO_SHARE, ids=attribute_id)
def test_without_an_attribute_collectives_take_over(
    attribute, mesh_shape, layout, n, monkeypatch, warnings_given
):
    monkeypatch.delattr(owner_of(attribute), attribute.name)
    expect_collectives(mesh_shape, layout, n)
    [warning] = warnings_given()
    assert attribute_id(attribute) in warning and "results are the same" in warning


@pytest.mark.slow_but(1)
@pytest.mark.slow("raw_ops*")
@pytest.mark.parametrize("attribute", NEEDED_TO_SHARE, ids=attribute_id)
def test_with_another_signature_collectives_take_over(attribute, monkeypatch, warnings_given):
    monkeypatch.setattr(owner_of(attribute), attribute.name, lambda self, other: None)
    expect_collectives(*MESHES[0])
    [warning] = warnings_given()
    assert attribute_id(attribute) in warning


def renamed_node(definition):
    definition.node_def[-1].name = "renamed"


def renamed_input(definition):
    next(node for node in definition.node_def if node.input).input[0] = "renamed:0"


def another_argument(definition):
    definition.signature.input_arg.add(name="another")


def another_result(definition):
    definition.signature.output_arg.add(name="another")


@pytest.mark.slow("another*", "renamed_input*")
@pytest.mark.parametrize(
    "change",
    [renamed_node, renamed_input, another_argument, another_result],
    ids=lambda f: f.__name__,
)
def test_with_another_form_of_functions_collectives_take_over(change, monkeypatch, warnings_given):
    [attribute] = [a for a in NEEDED_TO_SHARE if a.name == "function_def"]
    original = vars(owner_of(attribute))["function_def"]

    def changed(self):
        definition = original.fget(self)
        copy = type(definition)()
        copy.CopyFrom(definition)
        change(copy)
        return copy

    monkeypatch.setattr(owner_of(attribute), "function_def", property(changed))
    expect_collectives(*MESHES[1])
    [warning] = warnings_given()
    assert "functions" in warning


@pytest.mark.parametrize("attribute", NEEDED_BY_ALL, ids=attribute_id)
@pytest.mark.parametrize("share", [False, True])
def test_what_every_program_needs_is_checked_before_it_is_traced(attribute, share, monkeypatch):
    monkeypatch.delattr(owner_of(attribute), attribute.name)
    program = mock.Mock()
    with pytest.raises(RuntimeError, match=f"lacks {attribute_id(attribute)}.*PlacementMeshImpl"):
        replicate(program, devices=cpus(2), share_memory=share)
    program.assert_not_called()
    assert not tf.get_default_graph().get_operations()


@pytest.mark.slow("x:2,y:2*")
@pytest.mark.parametrize("mesh_shape, layout, n", MESHES)
def test_collectives_without_extras(mesh_shape, layout, n, monkeypatch, warnings_given):
    """Functions are called, and slices of variables made, with documented names alone."""
    _, expected, counters = run(mesh_shape, layout, n, share=False)
    extras = [a for a in ROWS_OF_TABLE if a.needed_by == "extras"]
    for attribute in extras:
        monkeypatch.delattr(owner_of(attribute), attribute.name)
    _, found, found_counters = run(mesh_shape, layout, n, share=False)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert found_counters == counters
    assert warnings_given() == []


@pytest.mark.slow
def test_every_reason_is_warned_of_once(monkeypatch, warnings_given):
    for attribute in NEEDED_TO_SHARE[:2]:
        with monkeypatch.context() as patch:
            patch.delattr(owner_of(attribute), attribute.name)
            for _ in range(2):
                run(*MESHES[0])
    assert len(warnings_given()) == 2


def test_the_table_has_all_private_attributes():
    """What SIMD programs take from TensorFlow begins with no underscore elsewhere."""
    folder = pathlib.Path(execution.__file__).parent
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and node.attr.startswith("_"):
                own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
                assert own or node.attr.startswith("__"), (path, ast.unparse(node))


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
