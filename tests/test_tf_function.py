"""Programs within tf.function, in graphs with v2 control flow, and after disable_v2_behavior."""

import functools

import numpy as np
import pytest
import tensorflow as tf2
import tensorflow.compat.v1 as tf
from helpers import processes

import mesh_tensorflow as mtf
from mesh_tensorflow.placement_mesh_impl import PlacementMeshImpl
from mesh_tensorflow.simd_mesh_impl import SimdMeshImpl

IN, HIDDEN, OUT = mtf.Dimension("in", 8), mtf.Dimension("hidden", 16), mtf.Dimension("out", 4)
RATE = 0.1
LAYOUTS = [("x:1", ""), ("x:4", "batch:x"), ("x:4", "hidden:x"), ("x:2,y:2", "batch:x,hidden:y")]


def weights(seed=0):
    rng = np.random.RandomState(seed)
    return {"w1": rng.normal(size=[8, 16]) * 0.3, "w2": rng.normal(size=[16, 4]) * 0.3}


def data(batch, seed=1):
    rng = np.random.RandomState(seed)
    return (
        rng.normal(size=[batch, 8]).astype(np.float32),
        rng.normal(size=[batch, 4]).astype(np.float32),
    )


def numpy_step(w, x, t):
    """Returns the loss, and takes one step of gradient descent in place."""
    h = np.tanh(x @ w["w1"])
    error = h @ w["w2"] - t
    dy = 2 * error / error.size
    dh = (dy @ w["w2"].T) * (1 - h * h)
    w["w2"] -= RATE * (h.T @ dy)
    w["w1"] -= RATE * (x.T @ dh)
    return (error**2).mean()


def lowered_step(x, t, mesh_shape, layout, calls):
    """Builds and lowers one training step; returns the loss after its updates."""
    calls.append(x.shape[0])
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")
    batch = mtf.Dimension("batch", x.shape[0])
    mx = mtf.import_tf_tensor(mesh, x, [batch, IN])
    mt = mtf.import_tf_tensor(mesh, t, [batch, OUT])
    w1, w2 = (
        mtf.get_variable(mesh, name, dims, initializer=tf.constant_initializer(weights()[name]))
        for name, dims in [("w1", [IN, HIDDEN]), ("w2", [HIDDEN, OUT])]
    )
    y = mtf.einsum([mtf.tanh(mtf.einsum([mx, w1])), w2])
    loss = mtf.reduce_mean(mtf.square(y - mt))
    grads = mtf.gradients([loss], [w1, w2])
    updates = [mtf.assign_sub(w, g * RATE) for w, g in zip([w1, w2], grads)]
    devices = [""] * mtf.convert_to_shape(mesh_shape).size
    impl = PlacementMeshImpl(mesh_shape, layout, devices, merge="none")
    lowering = mtf.Lowering(graph, {mesh: impl})
    result = lowering.export_to_tf_tensor(loss)
    with tf.control_dependencies([lowering.lowered_operation(op) for op in updates]):
        return tf.identity(result)


def training_function(mesh_shape="x:1", layout=""):
    """Returns (an mtf.function, the list of batch sizes for which it was traced)."""
    calls = []

    @mtf.function
    def step(x, t):
        return lowered_step(x, t, mesh_shape, layout, calls)

    return step, calls


@pytest.mark.parametrize("mesh_shape, layout", LAYOUTS)
def test_training(mesh_shape, layout):
    step, calls = training_function(mesh_shape, layout)
    expected, (x, t) = weights(), data(16)
    losses = [step(tf2.constant(x), tf2.constant(t)) for _ in range(5)]
    assert all(isinstance(loss, tf2.Tensor) and hasattr(loss, "numpy") for loss in losses)
    numbers = [float(loss) for loss in losses]
    np.testing.assert_allclose(numbers, [numpy_step(expected, x, t) for _ in range(5)], rtol=1e-5)
    assert numbers == sorted(numbers, reverse=True)
    assert calls == [16] and step.store.names == ["w1", "w2"]
    for name, value in expected.items():
        np.testing.assert_allclose(step.store.value(name), value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mesh_shape, layout", LAYOUTS[-1:])
def test_training_compiled_by_xla(mesh_shape, layout):
    @mtf.function(jit_compile=True)
    def step(x, t):
        return lowered_step(x, t, mesh_shape, layout, [])

    expected, (x, t) = weights(), data(16)
    losses = [float(step(tf2.constant(x), tf2.constant(t))) for _ in range(3)]
    np.testing.assert_allclose(losses, [numpy_step(expected, x, t) for _ in range(3)], rtol=1e-5)
    for name, value in expected.items():
        np.testing.assert_allclose(step.store.value(name), value, rtol=1e-5, atol=1e-6)


COMPILED_MESHES = [
    ("all:1", "", "none", mtf.placement_mesh_impl.PlacementMeshImpl),
    ("rows:2,cols:2", "batch:rows,d:cols", "none", mtf.placement_mesh_impl.PlacementMeshImpl),
    ("rows:2,cols:2", "batch:rows,d:cols", "device", mtf.placement_mesh_impl.PlacementMeshImpl),
    ("rows:2,cols:2", "batch:rows,d:cols", None, mtf.GspmdMeshImpl),
]


def on_one_device(program, place, **options):
    """Returns an mtf.function of what a program makes of a tensor [batch, d] on one device."""
    shape, layout, merge, kind = place
    rest = [["cpu:0"] * mtf.convert_to_shape(shape).size] if merge else []

    @mtf.function(**options)
    def call(x):
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        y = program(mtf.import_tf_tensor(mesh, x, "batch:4,d:6"))
        impl = kind(shape, layout, *rest, **({"merge": merge} if merge else {}))
        return mtf.Lowering(mesh.graph, {mesh: impl}).export_to_tf_tensor(y)

    return call


@pytest.mark.parametrize("place", COMPILED_MESHES)
def test_gradients_of_loops_that_xla_compiles(place):
    def program(x, **kwargs):
        y = mtf.while_loop(
            lambda i, y: mtf.less(i, 3),
            lambda i, y: [i + 1, mtf.sin(y)],
            [mtf.constant(x.mesh, 0, dtype=tf2.int32), x],
            **kwargs,
            back_prop=True,
        )[1]
        return mtf.gradients([mtf.reduce_sum(y)], [x])[0]

    x = tf2.constant(np.linspace(-1.0, 1.0, 24, dtype=np.float32).reshape(4, 6))
    step = on_one_device(lambda x: program(x, maximum_iterations=5), place, jit_compile=True)
    y = x.numpy()
    expected = np.cos(y) * np.cos(np.sin(y)) * np.cos(np.sin(np.sin(y)))
    np.testing.assert_allclose(step(x), expected, rtol=1e-5)
    with pytest.raises(ValueError, match=r"Pass it to mtf.while_loop as maximum_iterations=n"):
        on_one_device(program, place, jit_compile=True)(x)


@pytest.mark.parametrize("place", COMPILED_MESHES)
def test_the_first_nan_of_what_xla_compiles(place):
    step = on_one_device(lambda x: mtf.log(x, name="logarithm"), place, jit_compile=True)
    x = tf2.constant([[-1.0] * 6] * 4)
    assert np.isnan(step(x)).all()
    with mtf.debug.nan_checks(), pytest.raises(mtf.debug.NonFiniteError, match="logarithm"):
        step(x)
    assert np.isnan(step(x)).all()


@pytest.mark.parametrize("place", COMPILED_MESHES[1:])
def test_what_xla_cannot_print_is_left_out(place, caplog):
    step = on_one_device(lambda x: mtf.Print(x, [x], "the input"), place, jit_compile=True)
    with caplog.at_level("WARNING", logger="tensorflow"):
        np.testing.assert_array_equal(step(tf2.ones([4, 6])), np.ones([4, 6]))
    assert "nothing is printed for 'the input'" in caplog.text


def noisy(place, jit_compile):
    """Returns an mtf.function that drops values, adds noise, and drops values in a loop."""
    shape, layout, merge, kind = place
    rest = [["cpu:0"] * mtf.convert_to_shape(shape).size] if merge else []

    @mtf.function(jit_compile=jit_compile)
    def call(x):
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        x = mtf.import_tf_tensor(mesh, x, mtf.Shape([("batch", x.shape[0]), ("d", 6)]))
        noise = mtf.random_normal(mesh, x.shape, seed=0)
        _, y = mtf.while_loop(
            lambda i, y: mtf.less(i, 2),
            lambda i, y: [i + 1, mtf.dropout(y, True, rate=0.2)],
            [mtf.constant(mesh, 0, dtype=tf.int32), mtf.dropout(x, True, rate=0.5) + noise],
            maximum_iterations=2,
        )
        impl = kind(shape, layout, *rest, **({"merge": merge} if merge else {}))
        return mtf.Lowering(mesh.graph, {mesh: impl}).export_to_tf_tensor(y)

    return call


LONG, SHORT = np.ones([4, 6], np.float32), np.ones([2, 6], np.float32)


def seeded_values(call, seed):
    """Returns the values of calls, also of a function that is traced again, and seeded again."""
    tf2.random.set_seed(seed)
    values = [call(tf2.constant(x)).numpy() for x in (LONG, LONG, SHORT, LONG)]
    tf2.random.set_seed(seed)
    again = [call(tf2.constant(x)).numpy() for x in (LONG, SHORT)]
    np.testing.assert_array_equal(again[0], values[0])
    np.testing.assert_array_equal(again[1], values[2])
    return np.concatenate(values)


@functools.cache
def uncompiled_values():
    return seeded_values(noisy(COMPILED_MESHES[0], False), 0)


@pytest.mark.parametrize("place", COMPILED_MESHES)
def test_seeds_of_what_xla_compiles(place):
    whole = uncompiled_values()
    assert len(np.unique(whole[whole != 0])) > 20  # calls differ
    compiled = seeded_values(noisy(place, True), 0)
    np.testing.assert_array_equal(compiled == 0, whole == 0)
    np.testing.assert_allclose(compiled, whole, rtol=1e-5, atol=1e-6)
    # Another function, as the seed is part of a trace.
    tf2.random.set_seed(1)
    assert not np.allclose(noisy(place, True)(tf2.constant(LONG)), whole[: len(LONG)])


def test_xla_draws_other_values_without_a_seed():
    tf2.random.set_seed(None)
    draws = [
        on_one_device(
            lambda x: mtf.dropout(x, True, rate=0.5), COMPILED_MESHES[1], jit_compile=True
        )
        for _ in range(2)
    ]
    values = [draw(LONG).numpy().tobytes() for draw in draws for _ in range(2)]
    assert len(set(values)) == 4


@pytest.mark.parametrize("traced_before", [False, True])
def test_seeds_of_a_function_within_one_that_xla_compiles(traced_before):
    x = tf2.constant(LONG)
    tf2.random.set_seed(3)
    direct = noisy(COMPILED_MESHES[1], False)
    wanted = np.stack([direct(x) for _ in range(4)])
    assert not np.allclose(wanted[0], wanted[1])
    tf2.random.set_seed(3)
    inner = noisy(COMPILED_MESHES[1], False)
    if traced_before:
        np.testing.assert_array_equal(inner(x), wanted[0])
    outer = mtf.function(lambda x: tf.stack([inner(x), inner(x)]), jit_compile=True)
    found = np.concatenate([outer(x), outer(x)])
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


def test_a_session_seeds_a_function_that_xla_compiles():
    found = []
    for compiled in (False, True):
        with tf.Graph().as_default(), tf.Session() as session:
            tf.set_random_seed(3)
            y = noisy(COMPILED_MESHES[1], compiled)(tf.constant(LONG))
            found.append([session.run(y) for _ in range(2)])
            assert not tf.global_variables()
    np.testing.assert_allclose(found[1], found[0], rtol=1e-5, atol=1e-6)
    assert not np.allclose(found[0][0], found[0][1])


def test_a_saved_function_of_xla_draws_by_its_seed(tmp_path):
    x = tf2.constant(LONG)
    tf2.random.set_seed(3)
    step = noisy(COMPILED_MESHES[1], True)
    values = [step(x) for _ in range(3)]
    tf2.random.set_seed(3)
    step(x)
    module = tf2.Module()
    module.a_store, module.step = step.store, step.tf_function
    path = tf2.train.Checkpoint(module).write(tmp_path / "weights")
    assert [n for n, _ in tf.train.list_variables(path)] == ["_CHECKPOINTABLE_OBJECT_GRAPH"]
    assert not step.store.variables
    serving = step.tf_function.get_concrete_function(tf2.TensorSpec([4, 6]))
    tf2.saved_model.save(module, str(tmp_path / "model"), signatures=serving)
    loaded = tf2.saved_model.load(str(tmp_path / "model"))
    serve = loaded.signatures["serving_default"]
    # A trace that was saved goes on; a function is traced again to be saved, and begins anew.
    for wanted in values[1:]:
        [found] = serve(x=x).values()
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
    for wanted in values:
        np.testing.assert_allclose(loaded.step(x), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mesh_shape, layout", LAYOUTS)
def test_another_batch_size_keeps_the_variables(mesh_shape, layout):
    step, calls = training_function(mesh_shape, layout)
    expected = weights()
    variables = None
    for batch in (16, 8, 16, 24):
        x, t = data(batch)
        loss = float(step(tf2.constant(x), tf2.constant(t)))
        np.testing.assert_allclose(loss, numpy_step(expected, x, t), rtol=1e-5)
        found = [id(v) for v in step.store.variables]
        variables = variables or found
        assert found == variables
    assert calls == [16, 8, 24]


def test_slices_are_stored_once():
    """One for each part of a split variable, however many processors hold it."""
    step, _ = training_function("x:2,y:2", "hidden:y")
    x, t = data(8)
    step(tf2.constant(x), tf2.constant(t))
    assert sorted(tuple(v.shape) for v in step.store.variables) == [(8, 4), (8, 4), (8, 8), (8, 8)]
    assert len(step.store.trainable_variables) == 4


def test_numpy_arguments_and_options():
    traces = []

    @mtf.function(input_signature=[tf2.TensorSpec([4], tf2.float32)])
    def double(x):
        traces.append(1)
        graph = mtf.Graph()
        mesh = mtf.Mesh(graph, "mesh")
        y = mtf.import_tf_tensor(mesh, x, "a:4") * 2.0
        lowering = mtf.Lowering(graph, {mesh: PlacementMeshImpl("x:2", "a:x", ["", ""])})
        return lowering.export_to_tf_tensor(y)

    np.testing.assert_array_equal(double(np.arange(4, dtype=np.float32)), [0, 2, 4, 6])
    np.testing.assert_array_equal(double(np.ones(4, np.float32)), [2, 2, 2, 2])
    assert traces == [1] and double.store.names == []
    with pytest.raises((ValueError, TypeError)):
        double(np.ones(5, np.float32))


def test_checkpoint(tmp_path):
    step, _ = training_function("x:4", "hidden:x")
    x, t = (tf2.constant(a) for a in data(16))
    step(x, t)
    path = tf2.train.Checkpoint(store=step.store).save(str(tmp_path / "ckpt"))
    after = [float(step(x, t)) for _ in range(3)]
    tf2.train.Checkpoint(store=step.store).restore(path).assert_consumed()
    assert [float(step(x, t)) for _ in range(3)] == after
    # Into a function whose variables are there, and into one whose are not yet.
    other, _ = training_function("x:4", "hidden:x")
    other(x, t)
    other(x, t)
    tf2.train.Checkpoint(store=other.store).restore(path).assert_consumed()
    assert [float(other(x, t)) for _ in range(3)] == after
    fresh, _ = training_function("x:4", "hidden:x")
    tf2.train.Checkpoint(store=fresh.store).restore(path)
    assert [float(fresh(x, t)) for _ in range(3)] == after


@pytest.mark.parametrize("traced", [True, False])
@pytest.mark.parametrize("layout", ["", "a:x"])
def test_gradients_and_saved_models_of_tensorflow(layout, traced, tmp_path):
    """Tapes know tf variables: that of a whole value, and those of slices; saved models, the store."""

    def total(x):
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        w = mtf.get_variable(mesh, "w", "a:4", initializer=tf.constant_initializer(3.0))
        y = mtf.reduce_sum(mtf.square(w) * mtf.import_tf_tensor(mesh, x, "a:4"))
        impl = PlacementMeshImpl("x:2", layout, ["cpu:0"] * 2, merge="none")
        return mtf.Lowering(mesh.graph, {mesh: impl}).export_to_tf_tensor(y)

    store, x = mtf.VariableStore(), np.arange(4.0, dtype=np.float32)
    with store.scope():
        if traced:
            total = mtf.function(total, store=store)
        total(tf.constant(x))
        with tf2.GradientTape(persistent=True) as tape:
            y = total(tf.constant(x))
    slices = list(store.slice_variables("w").values())
    np.testing.assert_allclose(np.concatenate(tape.gradient(y, slices)), 6 * x)
    if layout:
        mend = r"'w' is kept in 2 slices.*store\.slice_variables\('w'\); or .*mtf\.gradients"
        with pytest.raises(ValueError, match=mend):
            tape.gradient(y, store.masters)
    else:
        np.testing.assert_allclose(tape.gradient(y, store.masters)["w"], 6 * x)
    module = tf2.Module()
    module.kept = store.masters["w"]
    with pytest.raises(ValueError, match=r"hold the store, module\.store = store"):
        tf2.saved_model.save(module, str(tmp_path))
    module = tf2.Module()
    module.store = store
    tf2.saved_model.save(module, str(tmp_path))
    assert "w" in tf2.saved_model.load(str(tmp_path)).store._by_name


def test_moving_values_to_another_layout():
    step, _ = training_function("x:4", "hidden:x")
    other, _ = training_function("x:2,y:2", "batch:x,hidden:y")
    x, t = (tf2.constant(a) for a in data(16))
    for fn, times in ((step, 3), (other, 1)):
        for _ in range(times):
            fn(x, t)
    for name in step.store.names:
        other.store.assign(name, step.store.value(name))
    np.testing.assert_allclose(float(other(x, t)), float(step(x, t)), rtol=1e-5)
    with pytest.raises(KeyError, match=r"no variable 'w3' in the store: it has w1, w2"):
        step.store.value("w3")


@pytest.mark.slow
def test_without_a_store():
    with pytest.raises(ValueError, match=r"@mtf.function instead of @tf.function, or make"):
        tf2.function(lambda: lowered_step(*map(tf2.constant, data(8)), "x:1", "", []))()


def test_bare_tf_function_without_variables():
    @tf2.function(autograph=False)
    def double(x):
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        y = mtf.import_tf_tensor(mesh, x, "a:4") * 2.0
        lowering = mtf.Lowering(mesh.graph, {mesh: PlacementMeshImpl("x:2", "a:x", ["", ""])})
        return lowering.export_to_tf_tensor(y)

    np.testing.assert_array_equal(double(tf2.range(4.0)), [0, 2, 4, 6])


def test_default_names_when_traced_again():
    @mtf.function
    def run(x):
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        y = mtf.import_tf_tensor(mesh, x, [mtf.Dimension("batch", x.shape[0]), IN])
        for dims in ([IN, HIDDEN], [HIDDEN, OUT]):
            y = mtf.layers.dense(y, dims[1:], reduced_dims=dims[:1])
        lowering = mtf.Lowering(mesh.graph, {mesh: PlacementMeshImpl("x:1", "", [""])})
        return lowering.export_to_tf_tensor(y)

    x, _ = data(8)
    whole = run(tf2.constant(x))
    names = run.store.names
    np.testing.assert_allclose(run(tf2.constant(x[:3])), whole[:3], rtol=1e-5, atol=1e-6)
    assert run.store.names == names and len(names) == 4


def test_eager_with_a_store():
    """Without any tf.function: each call builds, lowers and computes."""
    store, calls, expected = mtf.VariableStore(), [], weights()
    x, t = data(8)
    for _ in range(2):
        with store.scope():
            loss = lowered_step(tf2.constant(x), tf2.constant(t), "x:2", "hidden:x", calls)
        np.testing.assert_allclose(float(loss), numpy_step(expected, x, t), rtol=1e-5)
    assert calls == [8, 8] and len(store.variables) == 4
    np.testing.assert_allclose(store.value("w1"), expected["w1"], rtol=1e-5, atol=1e-6)


# -- first calls that fail


class MistakeError(Exception):
    """What the functions of these tests raise on purpose."""


def failing_step(mesh_shape, layout, **kwargs):
    """Returns an mtf.function that raises an error after a step is lowered, if it is told to."""

    @mtf.function(**kwargs)
    def step(x, t, fails):
        loss = lowered_step(x, t, mesh_shape, layout, [])
        if fails:
            raise MistakeError("of this call")
        return loss

    return step


@pytest.mark.parametrize("mesh_shape, layout", LAYOUTS)
@pytest.mark.parametrize("zero", [None, 3])
def test_a_function_is_of_use_after_a_first_call_that_failed(mesh_shape, layout, zero):
    options = {"zero": zero, "zero_axis": "x"} if zero else {}
    step, w = failing_step(mesh_shape, layout, **options), weights()
    for _ in range(2):
        with pytest.raises(MistakeError, match="of this call"):
            step(*data(8), True)
    for seed in (1, 2):
        np.testing.assert_allclose(
            step(*data(8, seed), False), numpy_step(w, *data(8, seed)), rtol=1e-5
        )
    # With variables a later mistake harms no more than the first.
    with pytest.raises(MistakeError):
        step(*data(4), True)
    np.testing.assert_allclose(step(*data(4), False), numpy_step(w, *data(4)), rtol=1e-5)
    for name, value in w.items():
        np.testing.assert_allclose(step.store.value(name), value, rtol=1e-5)


def test_what_a_failed_call_made_takes_another_layout_or_shape():
    @mtf.function
    def product(x, layout):
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        dims = mtf.Shape([("batch", x.shape[0]), ("in", x.shape[1])])
        w = mtf.get_variable(mesh, "w", dims.dims[1:], initializer=tf.ones_initializer())
        impl = PlacementMeshImpl("x:2", layout, ["cpu:0"] * 2)
        y = mtf.import_tf_tensor(mesh, x, dims) @ w
        lowering = mtf.Lowering(mesh.graph, {mesh: impl})
        if layout == "in:x":
            raise MistakeError("of this layout")
        return lowering.export_to_tf_tensor(y)

    for inputs in (6, 8):  # the second is also of another size
        with pytest.raises(MistakeError):
            product(tf.ones([4, inputs]), "in:x")
    # Before another call has used it, a value that was given it stays.
    product.store.assign("w", np.arange(8))
    with pytest.raises(ValueError, match=r"'w' is stored as Shape\[in=8\].*asked for as .*in=4"):
        product(tf.ones([4, 4]), "batch:x")
    np.testing.assert_array_equal(product(tf.ones([4, 8]), "batch:x"), [28] * 4)
    with pytest.raises(ValueError, match=r"A tf\.function has its slices"):
        product(tf.ones([4, 8]), "in:x")
    np.testing.assert_array_equal(product(tf.ones([2, 8]), "batch:x"), [28] * 2)


def test_a_failed_call_leaves_the_variables_of_other_functions_of_its_store():
    step, w = failing_step("x:2", "hidden:x"), weights()
    other = failing_step("x:4", "batch:x", store=step.store)
    x, t = data(8)
    step(x, t, False)
    loss = numpy_step(w, x, t)
    with pytest.raises(ValueError, match=r"'w1' is stored as .* on mesh .*x=2.*x=4"):
        other(x, t, True)
    alike = failing_step("x:2", "hidden:x", store=step.store)
    with pytest.raises(MistakeError):
        alike(x, t, True)
    for function in (alike, step):
        after = function(x, t, False)
        np.testing.assert_allclose(after, numpy_step(w, x, t), rtol=1e-5)
    assert after < loss

    # And the other way around: the second function makes what the first has failed with its own.
    first, w = failing_step("x:2", "hidden:x"), weights()
    second = failing_step("x:4", "batch:x", store=first.store)
    with pytest.raises(MistakeError):
        first(x, t, True)
    np.testing.assert_allclose(second(x, t, False), numpy_step(w, x, t), rtol=1e-5)
    with pytest.raises(ValueError, match=r"'w1' is stored as .* on mesh .*x=4.*x=2"):
        first(x, t, False)


def test_a_checkpoint_reaches_variables_of_a_failed_call(tmp_path):
    trained, w = failing_step("x:2", "hidden:x"), weights()
    trained(*data(8), False)
    numpy_step(w, *data(8))
    path = tf2.train.Checkpoint(store=trained.store).save(str(tmp_path / "model"))
    step = failing_step("x:4", "batch:x")
    status = tf2.train.Checkpoint(store=step.store).restore(path)
    with pytest.raises(MistakeError):
        step(*data(8), True)
    np.testing.assert_allclose(step(*data(8), False), numpy_step(w, *data(8)), rtol=1e-5)
    status.assert_existing_objects_matched()


def test_a_mesh_that_no_function_has_is_an_error_and_another_is_none():
    @mtf.function
    def ones(simd):
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        w = mtf.get_variable(mesh, "w", "a:4", initializer=tf.ones_initializer())
        cls = SimdMeshImpl if simd else PlacementMeshImpl
        impl = cls("x:2", "a:x", ["cpu:0", "cpu:0"])
        return mtf.Lowering(mesh.graph, {mesh: impl}).export_to_tf_tensor(w + 0)

    with pytest.raises(ValueError, match="SimdMeshImpl works within a program"):
        ones(True)
    np.testing.assert_array_equal(ones(False), [1] * 4)


def test_another_layout_is_an_error():
    store = mtf.VariableStore()
    x, t = (tf2.constant(a) for a in data(8))

    def run(mesh_shape, layout):
        def step(x, t):
            with store.scope():
                return lowered_step(x, t, mesh_shape, layout, [])

        return tf2.function(step, autograph=False)(x, t)

    run("x:4", "hidden:x")
    with pytest.raises(
        ValueError,
        match=r"'w1' is stored as Shape\[in=8, hidden=16\] float32 with "
        r"TensorLayout\(None, 0\) on mesh Shape\[x=4\], but is asked for as .*"
        r"Shape\[x=2\].*Use another VariableStore",
    ):
        run("x:2", "hidden:x")


def test_randomness_within_a_function():
    @mtf.function
    def noise():
        graph = mtf.Graph()
        mesh = mtf.Mesh(graph, "mesh")
        y = mtf.random_uniform(mesh, "a:64")
        lowering = mtf.Lowering(graph, {mesh: PlacementMeshImpl("x:2", "a:x", ["", ""])})
        return lowering.export_to_tf_tensor(y)

    try:
        tf2.random.set_seed(3)
        first, second = noise().numpy(), noise().numpy()
        assert np.mean(first == second) < 0.1
    finally:
        tf2.random.set_seed(None)


def test_loops_and_their_gradients_within_a_function():
    @mtf.function
    def loop(x):
        graph = mtf.Graph()
        mesh = mtf.Mesh(graph, "mesh")
        mx = mtf.import_tf_tensor(mesh, x, "a:8")
        zero = mtf.constant(mesh, 0, dtype=tf.int32)
        _, y = mtf.while_loop(lambda i, _: mtf.less(i, 3), lambda i, y: [i + 1, y * mx], [zero, mx])
        [dx] = mtf.gradients([y], [mx])
        lowering = mtf.Lowering(graph, {mesh: PlacementMeshImpl("x:4", "a:x", [""] * 4)})
        return lowering.export_to_tf_tensor(y), lowering.export_to_tf_tensor(dx)

    x = np.linspace(0.5, 1.5, 8).astype(np.float32)
    y, dx = loop(tf2.constant(x))
    np.testing.assert_allclose(y, x**4, rtol=1e-5)
    np.testing.assert_allclose(dx, 4 * x**3, rtol=1e-5)


# -- fresh processes

COMMON = """
import numpy as np, tensorflow.compat.v1 as tf, mesh_tensorflow as mtf
def build():
    graph = mtf.Graph(); mesh = mtf.Mesh(graph, "mesh")
    x = mtf.import_tf_tensor(mesh, np.linspace(0.5, 1.5, 8).astype(np.float32), "a:8")
    v = mtf.get_variable(mesh, "v", "a:8", initializer=tf.constant_initializer(2.0))
    u = mtf.get_variable(mesh, "u", "a:8", initializer=tf.constant_initializer(1.0))
    zero = mtf.constant(mesh, 0, dtype=tf.int32)
    def body(i, y):
        return [i + 1, y * x + mtf.dropout(u, rate=0.0), mtf.reduce_sum(y)]
    _, y, total = mtf.while_loop(
        lambda i, _: mtf.less(i, 3), body, [zero, v], has_accumulators=True)
    loss = mtf.reduce_sum(y)
    grads = mtf.gradients([loss], [v, u])
    image = mtf.broadcast(x, "n:2,h:4,w:4,a:8")
    filters = mtf.ones(mesh, "fh:1,fw:1,a:8,o:2")
    conv = mtf.Conv2dOperation(image, filters, [1, 1, 1, 1], "SAME").outputs[0]
    updates = [mtf.assign_sub(w, g) for w, g in zip([v, u], grads)]
    return graph, mesh, [y, total, conv, *grads], updates

def check(run, values):
    x = np.linspace(0.5, 1.5, 8)
    y1 = 2 * x + 1; y2 = y1 * x + 1; y3 = y2 * x + 1
    expected = [y3, (2 + y1 + y2).sum(), np.full([2, 4, 4, 2], x.sum()), x**3, x**2 + x + 1]
    for value, e in zip(values, expected):
        np.testing.assert_allclose(value, e, rtol=1e-5)
"""

SESSION = (
    COMMON
    + """
graph, mesh, tensors, updates = build()
impl = mtf.placement_mesh_impl.PlacementMeshImpl("x:4", "a:x", [f"cpu:{i}" for i in range(4)])
lowering = mtf.Lowering(graph, {mesh: impl})
exports = [lowering.export_to_tf_tensor(t) for t in tensors]
train = [lowering.lowered_operation(op) for op in updates]
to_masters = lowering.copy_slices_to_masters()
with tf.Session(config=tf.ConfigProto(device_count={"CPU": 4})) as session:
    session.run(tf.global_variables_initializer())
    session.run(lowering.copy_masters_to_slices())
    check(session.run, session.run(exports))
    session.run(train)
    session.run(to_masters)
    x = np.linspace(0.5, 1.5, 8)
    masters = {v.op.name: session.run(v) for v in tf.global_variables()}
    np.testing.assert_allclose(masters["v"], 2 - x**3, rtol=1e-5)
    np.testing.assert_allclose(masters["u"], 1 - (x**2 + x + 1), rtol=1e-5)
print("passed")
"""
)

LOGICAL_DEVICES = (
    COMMON
    + """
import tensorflow as tf2
tf2.config.set_logical_device_configuration(
    tf2.config.list_physical_devices("CPU")[0], [tf2.config.LogicalDeviceConfiguration()] * 4)
devices = []
@mtf.function
def step():
    graph, mesh, tensors, updates = build()
    impl = mtf.placement_mesh_impl.PlacementMeshImpl("x:4", "a:x")
    devices[:] = impl.devices
    lowering = mtf.Lowering(graph, {mesh: impl})
    exports = [lowering.export_to_tf_tensor(t) for t in tensors]
    with tf.control_dependencies([lowering.lowered_operation(op) for op in updates]):
        return [tf.identity(e) for e in exports]
check(None, [value.numpy() for value in step()])
assert devices == [f"/device:CPU:{i}" for i in range(4)]
assert sorted(v.device[-1] for v in step.store.variables) == sorted("01230123"), [
    v.device for v in step.store.variables]
print("passed")
"""
)

PROCESSES = {
    "v1_behaviour": "import tensorflow.compat.v1 as tf; tf.disable_v2_behavior()\n" + SESSION,
    "graph_mode": "import tensorflow.compat.v1 as tf; tf.disable_eager_execution()\n" + SESSION,
    "v1_control_flow": (
        "import tensorflow.compat.v1 as tf; tf.disable_eager_execution(); "
        "tf.disable_control_flow_v2()\n" + SESSION
    ),
    "v1_variables": (
        "import tensorflow.compat.v1 as tf; tf.disable_eager_execution(); "
        "tf.disable_resource_variables()\n" + SESSION
    ),
    "logical_devices": LOGICAL_DEVICES,
}


@pytest.mark.slow_but(1)
@pytest.mark.slow("graph_mode*", "v1_control_flow*", "v1_variables*")
@pytest.mark.parametrize("name", PROCESSES)
def test_in_a_fresh_process(name):
    done = processes.run("-c", PROCESSES[name])
    assert done.stdout.strip() == "passed", done.stderr[-3000:]
