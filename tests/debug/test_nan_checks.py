"""Checks for NaNs: what they say, in all front ends and mesh implementations."""

import re

import numpy as np
import pytest
import tensorflow as tf2
import tensorflow.compat.v1 as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.placement_mesh_impl import PlacementMeshImpl

A, B, C = mtf.Dimension("a", 4), mtf.Dimension("b", 6), mtf.Dimension("c", 2)
GOOD = np.arange(1, 25, dtype=np.float32).reshape(4, 6)
BAD = np.concatenate([GOOD[:3], -GOOD[3:]])


def build(mesh, data):
    """Sums of rows, whose logarithm is NaN in the last row of BAD."""
    x = mtf.import_tf_tensor(mesh, data, [A, B])
    sums = mtf.einsum([x, mtf.ones(mesh, [B, C])], [A, C], name="sums")
    return mtf.reduce_sum(mtf.log(sums, name="logs"))  # the line


def placed(merge):
    return PlacementMeshImpl("x:2,y:2", "a:x,b:y", ["cpu:0"] * 4, merge=merge)


def lowered(data, impl):
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    y = build(mesh, data)
    return mtf.Lowering(mesh.graph, {mesh: impl()}).export_to_tf_tensor(y)


def eager(data, merge="device"):
    with mtf.debug.nan_checks():
        return lowered(tf.constant(data), lambda: placed(merge))


@mtf.function
def step(data):
    return lowered(data, lambda: placed("device"))


def function(data):
    with mtf.debug.nan_checks():
        return step(data)


def session(data, merge="none"):
    with tf.Graph().as_default(), tf.Session() as sess, mtf.debug.nan_checks():
        fed = tf.placeholder(tf.float32, [4, 6])
        return sess.run(lowered(fed, lambda: placed(merge)), {fed: data})


def replicated(data):
    devices = [f"/cpu:{i}" for i in range(4)]
    with tf.Graph().as_default(), mtf.debug.nan_checks():
        fed = tf.placeholder(tf.float32, [4, 6])
        y = mtf.simd_mesh_impl.replicate(
            lambda: lowered(fed, lambda: mtf.simd_mesh_impl.SimdMeshImpl("x:2,y:2", "a:x,b:y")),
            devices=devices,
        )
        with tf.Session(config=tf.ConfigProto(device_count={"CPU": 4})) as sess:
            return sess.run(y, {fed: data})


RUNS = {
    "eager": eager,
    "eager, not merged": lambda data: eager(data, "none"),
    "function": function,
    "session": session,
    "session, merged": lambda data: session(data, "device"),
    "replicated": replicated,
}


@pytest.mark.slow_but(2)
@pytest.mark.slow("*merged*")
@pytest.mark.parametrize("run", RUNS)
def test_error_says_where(run):
    assert np.allclose(RUNS[run](GOOD), 2 * np.log(GOOD.sum(1)).sum())
    with pytest.raises(mtf.debug.NonFiniteError) as caught:
        RUNS[run](BAD)
    text = str(caught.value)
    assert re.match(r"NaN in logs:0 \(a=4, c=2, float32\) of SlicewiseOperation logs on ", text)
    assert re.search(r"processor [23] \(x=1, y=[01]\) of mesh mesh, whose slice is a 2:4, c", text)
    assert "its slice: 2 NaN of 4 elements" in text
    # Merged processors see all of an input, the others their own rows.
    assert re.search(r"input sums:0 \(.*\): [48] finite elements from -129 to 93, 0 of", text)
    assert "# the line" in text


def test_errors_are_those_of_tensorflow():
    with pytest.raises(tf2.errors.InvalidArgumentError):
        function(BAD)
    with pytest.raises(ArithmeticError):
        eager(BAD)


@pytest.mark.slow
def test_partial_sums_are_checked_where_they_are_made():
    data = GOOD.copy()
    data[0, 5] = np.inf
    with pytest.raises(mtf.debug.NonFiniteError) as caught:
        session(data)
    assert str(caught.value).startswith("Inf in import:0")
    assert "processor 1 (x=0, y=1)" in str(caught.value)
    assert "1 Inf of 6 elements" in str(caught.value)


def test_what_is_checked(monkeypatch):
    zeros = np.zeros([4, 6], np.float32)

    def impl():
        return placed("device")

    with mtf.debug.nan_checks(infinities=False):
        assert np.isinf(lowered(tf.constant(zeros), impl))
    with mtf.debug.nan_checks(operations="encoder/*"):
        assert np.isinf(lowered(tf.constant(zeros), impl))
    assert np.isinf(lowered(tf.constant(zeros), impl))
    monkeypatch.setenv("MTF_DEBUG_NANS", "1")
    with pytest.raises(mtf.debug.NonFiniteError, match=r"^Inf in logs:0(.|\n)*[48] of them 0"):
        lowered(tf.constant(zeros[:, :]), impl)
    with mtf.debug.nan_checks(False):
        assert np.isinf(lowered(tf.constant(zeros), impl))
    with pytest.raises(TypeError, match=r'such as "encoder/\*".*not 3'):
        with mtf.debug.nan_checks(operations=3):
            pass


def test_complex_numbers():
    data = np.array([1, 2 + 1j * np.inf, np.nan, 4], np.complex64)
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    mtf.import_tf_tensor(mesh, tf.constant(data), "a:4")
    impl = mtf.placement_mesh_impl.PlacementMeshImpl("x:2", "a:x", ["", ""], merge="none")
    with mtf.debug.nan_checks(), pytest.raises(mtf.debug.NonFiniteError) as caught:
        mtf.Lowering(mesh.graph, {mesh: impl})
    assert "import:0 (a=4, complex64)" in str(caught.value)
    assert "processor 0 (x=0)" in str(caught.value)
    assert "1 Inf of 4 elements" in str(caught.value)  # two numbers of two parts


def test_in_loops_and_gradients(tf_graph):
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    fed = tf.placeholder(tf.bfloat16, [4])
    x = mtf.import_tf_tensor(mesh, fed, [A])
    i = mtf.constant(mesh, 0, dtype=tf.int32)
    [_, y] = mtf.while_loop(lambda i, y: mtf.less(i, 3), lambda i, y: [i + 1, mtf.sqrt(y)], [i, x])
    [grad] = mtf.gradients([mtf.reduce_sum(mtf.sqrt(y))], [y])
    with mtf.debug.nan_checks(), tf.Session() as sess:
        impl = PlacementMeshImpl("x:2", "a:x", ["cpu:0"] * 2, merge="none")
        lowering = mtf.Lowering(mesh.graph, {mesh: impl})
        value, gradient = map(lowering.export_to_tf_tensor, (y, grad))
        assert np.allclose(sess.run(value, {fed: [1] * 4}).astype(float), 1)
    for fetched, fault, text in [
        (value, -1, r"^NaN in sqrt\S* (.|\n)*x=1\)"),
        (gradient, 0, "part of the gradient of sqrt"),
    ]:
        with tf.Session() as sess, pytest.raises(mtf.debug.NonFiniteError, match=text):
            with mtf.debug.user_errors(lowering):
                sess.run(fetched, {fed: [1, 1, 1, fault]})


def assigning(mesh, data):
    """Assigns before and after what may fail, and what is read after an assignment."""
    x = mtf.import_tf_tensor(mesh, data, [A, B])
    first, middle, last, average = (
        mtf.get_variable(mesh, name, [A], initializer=tf.ones_initializer(), trainable=False)
        for name in ("first", "middle", "last", "average")
    )
    sums = mtf.reduce_sum(x, output_shape=[A])
    add = mtf.assign_add(first, sums)
    mtf.assign(middle, mtf.log(sums))
    mtf.assign(average, mtf.read_variable(first) * 0.5)
    mtf.assign(last, mtf.depend(first, [add]) + sums)


def _in_store(run, store):
    run(GOOD)
    before = {name: store.value(name).numpy() for name in store.names}
    with pytest.raises(mtf.debug.NonFiniteError):
        run(BAD)
    after = {name: store.value(name).numpy() for name in store.names}
    run(GOOD)
    return before, after, store.value("first").numpy()


def _eagerly(merge):
    store = mtf.VariableStore()

    def run(data):
        with store.scope(), mtf.debug.nan_checks():
            mesh = mtf.Mesh(mtf.Graph(), "mesh")
            assigning(mesh, tf.constant(data))
            mtf.Lowering(mesh.graph, {mesh: placed(merge)})

    return _in_store(run, store)


def _in_function(merge):
    @mtf.function
    def step(data):
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        assigning(mesh, data)
        mtf.Lowering(mesh.graph, {mesh: placed(merge)})

    def run(data):
        with mtf.debug.nan_checks():
            step(data)

    return _in_store(run, step.store)


def _in_session(how):
    with tf.Graph().as_default(), mtf.debug.nan_checks():
        fed = tf.placeholder(tf.float32, [4, 6])
        made = []

        def program():
            mesh = mtf.Mesh(mtf.Graph(), "mesh")
            assigning(mesh, fed)
            args = ("x:2,y:2", "a:x,b:y")
            simd = mtf.simd_mesh_impl.SimdMeshImpl
            impl = simd(*args) if how == "simd" else placed(how)
            mesh.graph.assigns = "all"
            made.append(mtf.Lowering(mesh.graph, {mesh: impl}))
            return made[-1].effects

        if how == "simd":
            devices = [f"/cpu:{i}" for i in range(4)]
            step = mtf.simd_mesh_impl.replicate(program, devices=devices)
        else:
            step = program()
        to_slices, to_masters = made[0].copy_masters_to_slices(), made[0].copy_slices_to_masters()
        values = {v.op.name: v.read_value() for v in tf.global_variables()}
        with tf.Session(config=tf.ConfigProto(device_count={"CPU": 4})) as session:

            def read():
                session.run(to_masters)
                return session.run(values)

            session.run(tf.global_variables_initializer())
            session.run(to_slices)
            session.run(step, {fed: GOOD})
            before = read()
            with pytest.raises(mtf.debug.NonFiniteError), mtf.debug.user_errors(made[0]):
                session.run(step, {fed: BAD})
            after = read()
            session.run(step, {fed: GOOD})
            return before, after, read()["first"]


STEPS = {
    "eager": lambda: _eagerly("none"),
    "function": lambda: _in_function("none"),
    "function, merged": lambda: _in_function("device"),
    "session": lambda: _in_session("none"),
    "session, merged": lambda: _in_session("device"),
    "replicated": lambda: _in_session("simd"),
}


@pytest.mark.slow("function*")
@pytest.mark.parametrize(
    "front",
    [f if f in ("function", "session") else pytest.param(f, marks=pytest.mark.slow) for f in STEPS],
)
def test_a_step_that_fails_assigns_nothing(front):
    before, after, first = STEPS[front]()
    sums = GOOD.sum(1)
    expected = {
        "first": 1 + sums,
        "middle": np.log(sums),
        "last": 1 + 2 * sums,
        "average": (1 + sums) / 2,
    }
    assert set(before) == set(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(before[name], value, rtol=1e-5, err_msg=name)
        np.testing.assert_array_equal(after[name], before[name], err_msg=name)
    np.testing.assert_allclose(first, 1 + 2 * sums, rtol=1e-5)
