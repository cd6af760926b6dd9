"""mtf.pjrt.function: training on devices of JAX, arguments, results and errors."""

import contextlib
import pathlib
import re

import jax
import numpy as np
import pytest
import tensorflow as tf
from helpers import processes
from helpers.pjrt import DATA, LAYOUT, MESH, losses, on_jax, on_placed_devices, placed, training
from jax.sharding import NamedSharding, PartitionSpec

import mesh_tensorflow as mtf


@pytest.mark.slow
def test_trains_as_on_placed_devices():
    """With dropout: random values, also the initial ones, are those of other implementations."""
    expected = losses(on_placed_devices())
    assert expected[-1] < expected[0]
    for mesh_shape, layout in [(MESH, LAYOUT), ("rows:4", "batch:rows"), ("one:1", "")]:
        found = losses(on_jax(mesh_shape, layout))
        np.testing.assert_allclose(found, expected, rtol=1e-5, err_msg=layout)


def test_variables_are_split_and_given_to_the_step():
    step = on_jax()
    step(DATA)
    before = step.store.array("first/kernel")
    assert before.sharding == NamedSharding(step.mesh, PartitionSpec(None, "cols"))
    assert [s.data.shape for s in before.addressable_shards] == [(4, 8)] * 4
    step(DATA)
    assert before.is_deleted()
    assert step.mesh.axis_names == ("rows", "cols") and step.mesh.devices.shape == (2, 2)


def test_initial_values_are_equal_to_the_bit():
    ours = on_jax(trains=False)
    ours(DATA)
    theirs = on_placed_devices(trains=False)
    theirs(tf.constant(DATA))
    assert ours.store.names == theirs.store.names
    for name in theirs.store.names:
        np.testing.assert_array_equal(ours.store.value(name), theirs.store.value(name))


def exported(fn, layout="a:rows", mesh_shape="rows:4", **options):
    """Returns a function of mtf.pjrt from one of arguments and a mesh that returns a Tensor."""

    @mtf.pjrt.function(mesh_shape=mesh_shape, layout=layout, **options)
    def program(*args, **named):
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        y = fn(mesh, *args, **named)
        lowering = mtf.Lowering(mesh.graph, {mesh: mtf.pjrt.mesh_impl()})
        return {"y": lowering.export_to_tf_tensor(y), "nothing": None}

    return program


def test_arguments_of_all_kinds():
    calls = []

    def scaled(mesh, data, by, more=None):
        calls.append(by)
        x = mtf.import_tf_tensor(mesh, data["x"], mtf.Shape([("a", 8)]))
        return x * by if more is None else x * by + mtf.import_tf_tensor(mesh, more, mtf.Shape([]))

    program = exported(scaled)
    array = np.arange(8, dtype="int64")
    for x in [array, tf.constant(array), jax.device_put(array.astype("int32"))]:
        found = program({"x": x}, 3)
        assert found["nothing"] is None and isinstance(found["y"], jax.Array)
        assert found["y"].dtype == np.asarray(x).dtype  # also one of 64 bits
        np.testing.assert_array_equal(found["y"], 3 * array)
    program({"x": array}, 3)
    np.testing.assert_array_equal(program({"x": array}, 5)["y"], 5 * array)
    np.testing.assert_array_equal(program({"x": array}, 5, more=array[1])["y"], 5 * array + 1)
    assert calls == [3, 3, 5, 5]  # one program for int64, and one for int32


def test_arguments_are_split_by_their_layout():
    program = exported(
        lambda mesh, x, by=2.0: mtf.import_tf_tensor(mesh, x, mtf.Shape([("a", 8)])) * by
    )
    (placed, by), named = program.place(np.ones(8, "float32"), 3.0)
    assert placed.sharding.spec == PartitionSpec("rows") and (by, named) == (3.0, {})
    assert program.place(placed, 3.0)[0][0] is placed
    np.testing.assert_array_equal(program(placed, by)["y"], [3] * 8)
    text = program.lower(np.ones(8, "float32")).compiled_text
    # Each of four partitions gets two of the eight elements; how XLA writes a sharding varies.
    assert "num_partitions=4" in text and "f32[2]{0} parameter(0)" in text


def test_random_values_differ_in_each_step_and_are_the_same_in_each_layout():
    def uniform(mesh):
        return mtf.random_uniform(mesh, mtf.Shape([("a", 8), ("b", 4)]), seed=5)

    found = {}
    for layout in ["", "a:rows", "b:rows"]:
        tf.random.set_seed(1)
        program = exported(uniform, layout)
        found[layout] = [np.asarray(program()["y"]) for _ in range(3)]
        np.testing.assert_array_equal(found[layout], found[""])
    assert len(np.unique(found[""])) == 3 * 32


def test_all_variables_that_a_program_reads_and_assigns_to():
    """The value that is read after an assignment is the new one."""

    @mtf.pjrt.function(mesh_shape="rows:2", layout="a:rows")
    def program(by):
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        kept = mtf.get_variable(mesh, "kept", "a:4", initializer=tf.ones_initializer())
        v = mtf.get_variable(mesh, "v", "a:4", initializer=tf.zeros_initializer())
        more = mtf.import_tf_tensor(mesh, by, mtf.Shape([])) * kept
        once = mtf.assign_add(v, more)
        late = mtf.read_variable(v)
        lowering = mtf.Lowering(mesh.graph, {mesh: mtf.pjrt.mesh_impl()})
        lowering.lowered_operation(once)
        return lowering.export_to_tf_tensor(v), lowering.export_to_tf_tensor(late)

    found = [np.asarray(program(np.float32(2))) for _ in range(2)]
    np.testing.assert_array_equal(found, [[[0] * 4, [2] * 4], [[2] * 4, [4] * 4]])
    np.testing.assert_array_equal(program.store.value("v"), [4] * 4)


def test_programs_share_a_store_on_meshes_of_their_own():
    train = on_jax()
    step_losses = losses(train)
    evaluate = on_jax("cols:8", "hidden:cols", store=train.store, keep_prob=1.0, trains=False)
    first = float(evaluate(DATA))
    assert first < step_losses[0] and first == float(evaluate(DATA))
    assert len(train.store.array("first/kernel").sharding.device_set) == 8
    train(DATA)
    assert len(train.store.array("first/kernel").sharding.device_set) == 4
    assert float(evaluate(DATA)) != first


def test_chosen_devices():
    step = on_jax(devices=jax.devices()[4:])
    step(DATA)
    assert step.store.array("first/bias").sharding.device_set == set(jax.devices()[4:])


def test_stored_layouts():
    """With ZeRO, a variable is stored in parts along a dimension that the layout does not split."""
    expected = losses(on_placed_devices())
    tf.random.set_seed(3)
    step = mtf.pjrt.function(mesh_shape="rows:4", layout="batch:rows", zero=1)(
        training(mtf.pjrt.mesh_impl)
    )
    np.testing.assert_allclose(losses(step), expected, rtol=1e-5)
    slot = step.store.array("first/kernel_momentum_v")
    assert {s.data.size for s in slot.addressable_shards} == {16}
    assert {s.data.size for s in step.store.array("first/kernel").addressable_shards} == {64}


def test_microbatches_of_stage_3_gather_weights_themselves():
    """XLA would move the gathers out of the loop, as weights are the same for all of them."""
    batch, d, hidden = mtf.convert_to_shape("batch:16,d:8,hidden:32").dims

    def step_of(zero):
        @mtf.pjrt.function(mesh_shape="rows:4", layout="batch:rows", zero=zero)
        def step(x):
            mesh = mtf.Mesh(mtf.Graph(), "mesh")

            def loss_fn(x):
                h = mtf.layers.dense(x, [hidden], [d], activation=mtf.tanh, name="wi")
                y = mtf.layers.dense(h, [d], [hidden], name="wo")
                return mtf.reduce_mean(mtf.square(y - x))

            x = mtf.import_tf_tensor(mesh, x, [batch, d])
            loss, grads, variables = mtf.optimize.accumulate_gradients(loss_fn, x, batch, 4)
            mtf.optimize.SgdOptimizer(0.5).apply_grads(grads, variables)
            lowering = mtf.Lowering(mesh.graph, {mesh: mtf.pjrt.mesh_impl()})
            return lowering.export_to_tf_tensor(loss)

        tf.random.set_seed(3)
        return step

    data = np.random.RandomState(0).randn(16, 8).astype(np.float32)
    steps = {zero: step_of(zero) for zero in (0, 3)}
    expected, found = ([float(step(data)) for _ in range(3)] for step in steps.values())
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    before, _, entry = steps[3].lower(data).compiled_text.partition("\nENTRY ")
    assert "all-gather(" in before and "all-gather(" not in entry


# -- errors


def test_too_few_devices():
    with pytest.raises(
        ValueError,
        match=r"rows=16 has 16 processors, but there are 8 devices.*jax_num_cpu_devices.+ 16",
    ):
        exported(None, mesh_shape="rows:16")


def test_mesh_impl_belongs_to_a_function():
    with pytest.raises(ValueError, match=r"Elsewhere, make an mtf\.GspmdMeshImpl"):
        mtf.pjrt.mesh_impl()


def test_other_mesh_implementations():
    step = mtf.pjrt.function(mesh_shape=MESH, layout=LAYOUT)(training(placed))
    with pytest.raises(ValueError, match=r"Lower programs with mtf\.pjrt\.mesh_impl\(\)"):
        step(DATA)


def test_variables_of_tensorflow():
    outside = tf.Variable(2.0, name="outside")
    program = exported(lambda mesh: mtf.import_tf_tensor(mesh, outside.read_value(), mtf.Shape([])))
    with pytest.raises(ValueError) as caught:
        program()
    text = r"1 variables or resources of TensorFlow: outside:0\. .*Pass their values.*get_variable$"
    assert re.search(text, str(caught.value)), str(caught.value)


def test_rates_of_a_step_that_is_not_told():
    def descent(mesh, step=None):
        w = mtf.get_variable(mesh, "w", "a:4", initializer=tf.compat.v1.ones_initializer())
        grads = mtf.gradients([mtf.reduce_sum(mtf.square(w))], [w])
        optimizer = mtf.optimize.SgdOptimizer(lambda step: 0.25 / (1.0 + step))
        with contextlib.nullcontext() if step is None else mtf.utils.counted_steps(step):
            optimizer.apply_grads(grads, mesh.graph.trainable_variables)
        return w

    with pytest.raises(ValueError, match=r"TensorFlow: global_step:0\..*counted_steps\(step\)"):
        exported(descent)()
    program = exported(descent)
    found = [program(np.int64(step))["y"][0] for step in range(3)]
    np.testing.assert_allclose(found, [1.0, 0.5, 0.375])


def test_arguments_that_are_no_arrays():
    with pytest.raises(TypeError, match=r"of a function of mtf\.pjrt: pass arrays of NumPy"):
        exported(None)({1, 2})


def test_forms_of_variables():
    step = on_jax()
    step(DATA)
    other = exported(lambda mesh: mtf.get_variable(mesh, "first/bias", "a:4"), store=step.store)
    with pytest.raises(
        ValueError, match=r"'first/bias' is stored as .*hidden=16.* asked for as .*a=4"
    ):
        other()


@pytest.mark.parametrize("zero", [None, 3])
def test_a_function_is_of_use_after_a_first_call_that_failed(zero):
    @mtf.pjrt.function(mesh_shape="x:2", layout="batch:x", zero=zero)
    def product(x, fails):
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        dims = mtf.Shape([("batch", x.shape[0]), ("in", x.shape[1])])
        w = mtf.get_variable(mesh, "w", dims.dims[1:], initializer=tf.ones_initializer())
        y = mtf.import_tf_tensor(mesh, x, dims) @ w
        lowering = mtf.Lowering(mesh.graph, {mesh: mtf.pjrt.mesh_impl()})
        if fails:
            raise OverflowError("of this call")
        return lowering.export_to_tf_tensor(y)

    for inputs in (6, 8):
        with pytest.raises(OverflowError, match="of this call"):
            product(np.ones([4, inputs], np.float32), True)
    assert product.store.names == []
    np.testing.assert_array_equal(product(np.ones([4, 8], np.float32), False), [8] * 4)


@pytest.mark.parametrize("stored", [{}, {"zero": 3, "zero_axis": "rows"}])
def test_the_first_nan(stored):
    """Checks say which part of the mesh; a step that fails leaves variables as they were."""

    @mtf.pjrt.function(mesh_shape=MESH, layout="a:rows,b:cols", **stored)
    def step(x):
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        w = mtf.get_variable(mesh, "w", "b:4,c:2", initializer=tf.ones_initializer())
        x = mtf.import_tf_tensor(mesh, x, "a:4,b:4")
        y = mtf.log(x * mtf.reduce_mean(w, output_shape="b:4"), name="logarithm")
        updated = mtf.assign_add(w, mtf.broadcast(mtf.reduce_mean(y, output_shape="b:4"), w.shape))
        lowering = mtf.Lowering(mesh.graph, {mesh: mtf.pjrt.mesh_impl()})
        with tf.control_dependencies([lowering.lowered_operation(updated)]):
            return lowering.export_to_tf_tensor(mtf.reduce_sum(y))

    good, bad = np.full([4, 4], 2, np.float32), np.full([4, 4], 2, np.float32)
    bad[3, 0] = -1
    with mtf.debug.nan_checks():
        for _ in range(2):
            with pytest.raises(mtf.debug.NonFiniteError) as caught:
                step(bad)
        checked = [float(step(good)) for _ in range(2)]
        assert step.lower(good).collectives()  # of what XLA compiles
    text = str(caught.value)
    assert re.search(r"NaN in logarithm:0 .*slice is a \d:4, b 0:\d", text), text
    assert "input " in text and __file__ in text
    w = step.store.array("w")
    assert w.sharding.shard_shape(w.shape) == (2, 1 if stored else 2)
    compiled = mtf.pjrt.function(step.fn, mesh_shape=MESH, layout="a:rows,b:cols")
    np.testing.assert_allclose(checked, [float(compiled(good)) for _ in range(2)], rtol=1e-6)
    np.testing.assert_allclose(w, compiled.store.array("w"), rtol=1e-6)
    assert np.isnan(step(bad))


def test_collected_values():
    @mtf.pjrt.function(mesh_shape=MESH, layout="a:rows,b:cols")
    def squares(x):
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        y = mtf.square(mtf.import_tf_tensor(mesh, x, "a:4,b:4"), name="squared")
        lowering = mtf.Lowering(mesh.graph, {mesh: mtf.pjrt.mesh_impl()})
        return {"total": lowering.export_to_tf_tensor(mtf.reduce_sum(y))}

    x = np.arange(16, dtype=np.float32).reshape(4, 4)
    for factor in (1, 3):
        with mtf.debug.collect("squared") as whole, mtf.debug.collect("squared", 2) as part:
            assert float(squares(x * factor)["total"]) == 1240 * factor**2
            assert len(squares.lower(x).compiled.in_avals[0][0]) == 1  # of the program itself
        np.testing.assert_array_equal(whole["squared"], x * x * factor**2)
        np.testing.assert_array_equal(part["squared"], (x * x * factor**2)[2:, :2])
    assert list(squares(x)) == ["total"]


def test_variables_outside_of_functions():
    with mtf.pjrt.ArrayStore().scope(), pytest.raises(ValueError, match="call it while that"):
        mtf.get_variable(mtf.Mesh(mtf.Graph(), "mesh"), "v", "a:4")


IMPORTING = """
import sys
{before}
import mesh_tensorflow as mtf
try:
    mtf.pjrt.function
except ImportError as e:
    print(e)
"""


OF_JAX = {
    "not installed": ('sys.modules["jax"] = None', "JAX, which is not installed: pip install"),
    "old": (
        'import jax; jax.__version__, jax.__version_info__ = "0.4.34", (0, 4, 34)',
        "needs JAX 0.8 or newer, but 0.4.34 is installed: pip install",
    ),
}


@pytest.mark.parametrize("case", OF_JAX)
def test_without_a_jax_that_it_can_use(case):
    before, text = OF_JAX[case]
    done = processes.run("-c", IMPORTING.format(before=before))
    assert f'{text} "jax>=0.8"' in done.stdout, done


def test_jax_is_imported_when_it_is_used():
    """By modules that nothing but users import."""
    package = pathlib.Path(mtf.__file__).parent
    importing = re.compile(r"^(from|import) +(jax|mesh_tensorflow\.pjrt)\b", re.M)
    found = {p.parent for p in package.rglob("*.py") if importing.search(p.read_text("utf-8"))}
    assert found == {package / "pjrt"}


def test_repr():
    assert repr(on_jax()) == (
        "<mtf.pjrt.function step on <GspmdMeshImpl rows=2, cols=2; layout batch:rows, hidden:cols; "
        "4 processors>>"
    )


def test_values_that_python_equates():
    """Each value has a program of its own, also a NaN, which is found again."""
    made = []

    @mtf.pjrt.function(mesh_shape="rows:1", layout="")
    def fn(x, value):
        made.append(value)
        return x * float(len(made))

    values = [1, True, 1.0, 0.0, -0.0, 0, False, float("nan")]
    for _ in range(2):
        found = [float(fn(tf.constant(1.0), value)) for value in values]
        assert found == [float(i + 1) for i in range(len(values))]
    assert list(map(repr, made)) == list(map(repr, values))
