"""Values by name: whole and of one processor, in all front ends and mesh implementations."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.placement_mesh_impl import PlacementMeshImpl

A, B, C = mtf.Dimension("a", 4), mtf.Dimension("b", 6), mtf.Dimension("c", 2)
DATA = np.arange(24, dtype=np.float32).reshape(4, 6) - 8
SUMS = np.stack([DATA.sum(1)] * 2, 1)


def build(mesh, data):
    x = mtf.import_tf_tensor(mesh, data, [A, B])
    with tf.variable_scope("layer"):
        sums = mtf.einsum([x, mtf.ones(mesh, [B, C])], [A, C], name="sums")
        large = mtf.inspect(mtf.greater(mtf.relu(sums), 20.0), "large")
    return mtf.reduce_sum(mtf.cast(large, tf.float32))


def placed(merge):
    return lambda: PlacementMeshImpl("x:2,y:2", "a:x,b:y", ["cpu:0"] * 4, merge=merge)


def simd():
    return mtf.simd_mesh_impl.SimdMeshImpl("x:2,y:2", "a:x,b:y")


def lowered(data, impl):
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    y = build(mesh, data)
    return mtf.Lowering(mesh.graph, {mesh: impl()}).export_to_tf_tensor(y)


def eager(names, processor, merge="device"):
    with mtf.debug.collect(names, processor) as values:
        lowered(tf.constant(DATA), placed(merge))
    return {name: value.numpy() for name, value in values.items()}


def function(names, processor):
    @mtf.function
    def step(data):
        return lowered(data, placed("device"))

    result = step(DATA)
    with mtf.debug.collect(names, processor) as values:
        assert np.array_equal(step(DATA), result)
        step(DATA + 1)
        first = dict(values)
        step(DATA)
    if names:
        assert not np.array_equal(first["layer/sums"], values["layer/sums"])
    assert np.array_equal(step(DATA), result)
    return {name: value.numpy() for name, value in values.items()}


def session(names, processor, merge="none"):
    with tf.Graph().as_default(), tf.Session() as sess:
        with mtf.debug.collect(names, processor) as values:
            lowered(tf.constant(DATA), placed(merge))
        return sess.run(dict(values))


def replicated(names, processor):
    devices = [f"/cpu:{i}" for i in range(4)]
    with tf.Graph().as_default():
        with mtf.debug.collect(names, processor) as values:
            y = mtf.simd_mesh_impl.replicate(
                lambda: lowered(tf.constant(DATA), simd),
                devices=devices,
            )
        assert y.shape == []
        with tf.Session(config=tf.ConfigProto(device_count={"CPU": 4})) as sess:
            return sess.run(dict(values))


RUNS = {
    "eager": eager,
    "eager, not merged": lambda *asked: eager(*asked, "none"),
    "function": function,
    "session": session,
    "session, merged": lambda *asked: session(*asked, "device"),
    "replicated": replicated,
}


@pytest.mark.slow("*merged*")
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("processor", [None, 2])
def test_collected(run, processor):
    found = RUNS[run]("layer/s*", processor)
    rows = slice(None) if processor is None else slice(2, 4)
    assert set(found) == {"layer/sums", "layer/large"}
    assert np.array_equal(found["layer/sums"], SUMS[rows])
    assert found["layer/large"].dtype == bool
    assert np.array_equal(found["layer/large"], (SUMS > 20)[rows])


def test_inspected_without_patterns():
    assert set(eager((), None)) == {"layer/large"}
    assert set(function((), None)) == {"layer/large"}


def test_values_of_a_lowering(tf_graph):
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    build(mesh, tf.constant(DATA))
    lowering = mtf.Lowering(mesh.graph, {mesh: placed("none")()})
    values = mtf.debug.values(lowering, ["layer/sums", "import"], processor=1)
    with tf.Session() as sess:
        found = sess.run(dict(values))
    assert np.array_equal(found["import"], DATA[:2, 3:])
    with pytest.raises(KeyError, match=r"'layer/sum' was not collected.*did you mean layer/sums"):
        values["layer/sum"]
    with pytest.raises(ValueError, match=r"processor 4 of mesh 'mesh' does not exist.*0 to 3"):
        mtf.debug.values(lowering, processor=4)
    with pytest.raises(TypeError, match="patterns of names"):
        mtf.debug.values(lowering, 4)


def test_names_of_inspected_values(tf_graph):
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    x = mtf.zeros(mesh, [A])
    y = mtf.relu(x)
    operations = list(mesh.graph.operations)
    assert mtf.inspect(x, "it") is x
    mtf.inspect(x, "it")
    mtf.inspect(y, "it")
    assert mesh.graph.inspected == {"it": x, "it_1": y}
    assert mesh.graph.operations == operations
    with pytest.raises(TypeError, match="inspect: input 3"):
        mtf.inspect(3, "it")


@pytest.mark.slips
def test_values_in_loops_are_left_out(tf_graph):
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    x = mtf.zeros(mesh, [A])
    i = mtf.constant(mesh, 0, dtype=tf.int32)
    mtf.while_loop(
        lambda i, y: mtf.less(i, 3), lambda i, y: [i + 1, mtf.inspect(y + 1, "inner")], [i, x]
    )
    with mtf.debug.collect("while*") as values:
        mtf.Lowering(mesh.graph, {mesh: placed("none")()})
    assert set(values) == {"while_loop:0", "while_loop:1"}
