"""Replicated programs of one memory: what is equal is computed once, and handed over."""

import collections

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import mesh_tensorflow as mtf
from mesh_tensorflow._mesh.simd import sharing
from mesh_tensorflow.simd_mesh_impl import SimdMeshImpl, replicate

ROWS, COLS, WIDE = mtf.Dimension("rows", 12), mtf.Dimension("cols", 24), mtf.Dimension("wide", 48)
VALUES = np.random.RandomState(0).randn(12, 24).astype(np.float32)


@pytest.fixture(autouse=True)
def own_graph(monkeypatch):
    monkeypatch.setattr(sharing, "LEAST_ELEMENTS", 32)
    with tf.Graph().as_default():
        tf.set_random_seed(3)
        yield


def model(mesh_shape, layout):
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


def test_large_meshes_run_the_one_program():
    step = replicate(lambda: model("x:12", "rows:x"), devices=cpus(12))
    assert not functions()
    many = losses(step, tf.ConfigProto(device_count={"CPU": 12}))
    with tf.Graph().as_default():
        tf.set_random_seed(3)
        one = losses(replicate(lambda: model("x:1", ""), devices=cpus(1)))
    np.testing.assert_allclose(many, one, rtol=1e-5)


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


def test_collectives_are_run_by_all():
    """Nothing is made of what the last processors receive; still, the others wait for them."""

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
