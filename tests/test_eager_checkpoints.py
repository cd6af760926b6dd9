"""Checkpoints of VariableStores: whole variables, whatever the layout and the front end."""

import numpy as np
import pytest
import tensorflow as tf2
import tensorflow.compat.v1 as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.placement_mesh_impl import PlacementMeshImpl

A, B = mtf.Dimension("a", 4), mtf.Dimension("b", 2)
START = np.arange(8, dtype=np.float32).reshape(4, 2) / 4 - 1
LAYOUTS = [("x:1", ""), ("x:2", "a:x"), ("x:2,y:2", "a:x,b:y"), ("x:2", "b:x")]
NAMES = ["inner/w", "inner/w/adam_m", "inner/w/adam_v"]


def implementation(mesh_shape, layout):
    size = mtf.convert_to_shape(mesh_shape).size
    return PlacementMeshImpl(mesh_shape, layout, ["cpu:0"] * size, merge="none")


def build(data):
    """Returns (mesh, loss, updates) of a step of Adam."""
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    with tf.variable_scope("inner"):
        w = mtf.get_variable(mesh, "w", [A, B], initializer=tf.constant_initializer(START))
    loss = mtf.reduce_sum(mtf.square(w - mtf.import_tf_tensor(mesh, data, [A, B])))
    optimizer = mtf.optimize.AdamWeightDecayOptimizer(learning_rate=0.1)
    return mesh, loss, optimizer.apply_grads(mtf.gradients([loss], [w]), [w.operation])


def stepper(mesh_shape, layout):
    """Returns an mtf.function that makes one step and returns the loss."""

    @mtf.function
    def step():
        mesh, loss, updates = build(tf.zeros([4, 2]))
        lowering = mtf.Lowering(mesh.graph, {mesh: implementation(mesh_shape, layout)})
        with tf.control_dependencies([lowering.lowered_operation(op) for op in updates]):
            return tf.identity(lowering.export_to_tf_tensor(loss))

    return step


def values(store):
    return {name: store.value(name).numpy() for name in store.names}


def assert_same(found, expected):
    assert sorted(found) == sorted(expected)
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """(the path of a checkpoint after two steps, its values, the loss of the third step)."""
    step = stepper("x:2,y:2", "a:x,b:y")
    step(), step()
    count = tf2.Variable(2, dtype=tf.int64, name="global_step")
    step.store.track(count)
    path = str(tmp_path_factory.mktemp("saved") / "model")
    path = tf2.train.Checkpoint(store=step.store).write(path)
    kept = values(step.store)
    return path, kept, float(step())


def test_names_and_whole_values_in_files(saved):
    path, expected, _ = saved
    reader = tf.train.load_checkpoint(path)
    found = {name: reader.get_tensor(name) for name in [*NAMES, "global_step"]}
    assert found.pop("global_step") == 2
    assert_same(found, expected)
    others = set(reader.get_variable_to_shape_map()) - {*NAMES, "global_step"}
    assert others == {"_CHECKPOINTABLE_OBJECT_GRAPH"}


@pytest.mark.slow("x:1--*", "x:2-[ab]:x-True*", "x:2-b:x-False*")
@pytest.mark.parametrize("made_before", [True, False])
@pytest.mark.parametrize("mesh_shape, layout", LAYOUTS)
def test_restored_in_any_layout(saved, mesh_shape, layout, made_before):
    """Before the variables are made, or after; training goes on as it would have."""
    path, expected, loss = saved
    step = stepper(mesh_shape, layout)
    count = tf2.Variable(0, dtype=tf.int64, name="global_step")
    step.store.track(count)
    if made_before:
        step()
    status = tf2.train.Checkpoint(store=step.store).read(path)
    if made_before:
        status.assert_consumed()
        assert_same(values(step.store), expected)
    np.testing.assert_allclose(step(), loss, rtol=1e-6)
    status.assert_consumed()
    assert int(count) == 2


def test_eager_graphs(saved, tmp_path):
    path, expected, loss = saved
    mesh, eager_loss, _ = build(tf.zeros([4, 2]))
    store = mesh.graph.variable_store
    tf2.train.Checkpoint(store=store).read(path).expect_partial()
    np.testing.assert_allclose(eager_loss.numpy(), loss, rtol=1e-6)
    mtf.Lowering(mesh.graph, {mesh: implementation("x:4", "a:x")})
    after = values(store)
    again = tf2.train.Checkpoint(store).write(str(tmp_path / "again"))
    other = stepper("x:2", "b:x")
    tf2.train.Checkpoint(other.store).read(again)
    other.tf_function.get_concrete_function()  # makes the variables, and runs nothing
    assert_same(values(other.store), after)


@pytest.mark.slow("x:2-a:x*")
@pytest.mark.parametrize("mesh_shape, layout", LAYOUTS[1:3])
def test_to_sessions_and_back(saved, tmp_path, mesh_shape, layout):
    path, expected, loss = saved
    with tf.Graph().as_default(), tf.Session() as session:
        count = tf.train.get_or_create_global_step()
        mesh, tf_loss, updates = build(tf.zeros([4, 2]))
        masters = {v.name: v.get_master() for v in mesh.graph.all_variables}
        lowering = mtf.Lowering(mesh.graph, {mesh: implementation(mesh_shape, layout)})
        saver = mtf.checkpoint.Saver()
        saver.restore(session, path)
        assert session.run(count) == 2
        exported = lowering.export_to_tf_tensor(tf_loss)
        np.testing.assert_allclose(session.run(exported), loss, rtol=1e-6)
        session.run([lowering.lowered_operation(op) for op in updates])
        after = session.run(masters)
        written = saver.save(session, str(tmp_path / "of_session"), global_step=3)
    with tf.Graph().as_default(), tf.Session() as session:
        mesh, tf_loss, _ = build(tf.zeros([4, 2]))
        masters = {v.name: v.get_master() for v in mesh.graph.all_variables}
        mtf.checkpoint.init_from_checkpoint(path, masters)
        mtf.Lowering(mesh.graph, {mesh: implementation(mesh_shape, layout)})
        session.run(tf.global_variables_initializer())
        assert_same(session.run(masters), expected)
    step = stepper("x:2", "b:x")
    step()
    mtf.checkpoint.Saver(step.store.masters).restore(None, written)
    assert_same(values(step.store), after)
    mtf.checkpoint.init_from_checkpoint(path, step.store.masters)
    assert_same(values(step.store), expected)
    tf2.train.Checkpoint(store=step.store).read(written).expect_partial()
    assert_same(values(step.store), after)


def test_manager(tmp_path):
    """Checkpoints in turn, the oldest removed; a new process goes on from the last."""

    def managed(*place):
        step, count = stepper(*place), tf2.Variable(0, dtype=tf.int64)
        checkpoint = tf2.train.Checkpoint(store=step.store, step=count)
        manager = tf2.train.CheckpointManager(
            checkpoint, str(tmp_path), max_to_keep=2, step_counter=count
        )
        return step, count, manager

    step, count, manager = managed("x:2", "a:x")
    for _ in range(3):
        step()
        manager.save(count.assign_add(1))
    assert [path.rpartition("-")[2] for path in manager.checkpoints] == ["1", "2", "3"][1:]
    expected = values(step.store)
    other, count, manager = managed("x:2,y:2", "b:y")
    assert manager.restore_or_initialize() == manager.latest_checkpoint
    other.tf_function.get_concrete_function()
    assert_same(values(other.store), expected)
    assert int(count) == 3
    np.testing.assert_allclose(other(), step(), rtol=1e-6)


def test_several_stores_in_one_file(tmp_path):
    stores = {}
    for i, name in enumerate(["store", "teacher"]):
        step = stepper(*LAYOUTS[1 + i])
        for _ in range(1 + i):
            step()
        stores[name] = step.store
    path = tf2.train.Checkpoint(**stores).write(str(tmp_path / "both"))
    names = [name for name, _ in tf.train.list_variables(path) if not name.startswith("_")]
    assert names == sorted(NAMES + [f"teacher/{name}" for name in NAMES])
    kept = {name: values(store) for name, store in stores.items()}
    for store in stores.values():
        store.assign("inner/w", np.zeros([4, 2]))
    tf2.train.Checkpoint(**stores).read(path).assert_consumed()
    for name, store in stores.items():
        assert_same(values(store), kept[name])


def test_files_of_slices(tmp_path):
    """What earlier releases wrote is read in its layout."""
    step = stepper("x:2", "a:x")
    step()
    old = tf2.Module()
    old._slices = {
        name: {pnum: tf2.Variable(tf2.ones([2, 2]) * (1 + int(pnum))) for pnum in ("0", "1")}
        for name in NAMES
    }
    path = tf2.train.Checkpoint(store=old).write(str(tmp_path / "slices"))
    tf2.train.Checkpoint(store=step.store).read(path).assert_consumed()
    for name in NAMES:
        np.testing.assert_array_equal(step.store.value(name), [[1, 1]] * 2 + [[2, 2]] * 2)


def test_dtypes(tmp_path):
    """Files have the master's dtype; slices of another one are converted."""
    dtype = mtf.VariableDType(tf.float32, tf.bfloat16, tf.float32)
    stores = [mtf.VariableStore() for _ in range(2)]
    for i, store in enumerate(stores):
        with store.scope():
            mesh = mtf.Mesh(mtf.Graph(), "mesh")
            initializer = tf.constant_initializer(START * i)
            mtf.get_variable(mesh, "w", [A, B], dtype=dtype, initializer=initializer)
            mtf.Lowering(mesh.graph, {mesh: implementation(*LAYOUTS[1 + i])})
    path = tf2.train.Checkpoint(stores[1]).write(str(tmp_path / "mixed"))
    assert tf.train.load_checkpoint(path).get_variable_to_dtype_map()["w"] == tf.float32
    tf2.train.Checkpoint(stores[0]).read(path).assert_consumed()
    np.testing.assert_array_equal(tf.cast(stores[0].value("w"), tf.float32), START)


def test_another_shape(saved):
    path, _, _ = saved
    store = mtf.VariableStore()
    with store.scope(), tf.variable_scope("inner"):
        mtf.get_variable(mtf.Mesh(mtf.Graph(), "mesh"), "w", [B, A])
    with pytest.raises(
        ValueError, match=r"variable 'inner/w' has shape \(4, 2\) in the checkpoint"
    ):
        tf2.train.Checkpoint(store=store).read(path)


def test_track():
    store = mtf.VariableStore()
    count = tf2.Variable(1, dtype=tf.int64, name="global_step")
    store.track(count)
    store.track(count)
    store.track(count, "also")
    assert store.masters == {"global_step": count, "also": count} and not store.names
    with pytest.raises(ValueError, match="there is a variable 'global_step' already"):
        store.track(tf2.Variable(2), "global_step")
    with store.scope(), pytest.raises(ValueError, match="there is a variable 'also' already"):
        mtf.get_variable(mtf.Mesh(mtf.Graph(), "mesh"), "also", [], dtype=tf.int64)
    assert not store.names


def test_an_assigned_slice_keeps_no_whole_value():
    step = stepper("x:2", "a:x")
    step()
    value = tf.constant(START)
    step.store.masters["inner/w"].assign(value)
    slices = step.store.slice_variables("inner/w").values()
    assert len(slices) == 2
    for v in slices:
        assert not np.shares_memory(memoryview(value), memoryview(v.read_value()))


def test_a_saver_of_eager_code_writes_one_file():
    v = mtf.get_variable(mtf.Mesh(mtf.Graph(), "mesh"), "v", "d:2").operation.get_master()
    with pytest.raises(ValueError, match=r"sharded=True .* eager code has none\. Leave it out"):
        mtf.checkpoint.Saver([v], sharded=True)


def test_paths_that_are_not_those_of_checkpoints(tmp_path):
    v = mtf.get_variable(mtf.Mesh(mtf.Graph(), "mesh"), "v", "d:2").operation.get_master()
    saver = mtf.checkpoint.Saver([v])
    with pytest.raises(mtf.checkpoint.CheckpointError, match=r"a directory, and .*lists no check"):
        saver.restore(None, str(tmp_path))
    path = saver.save(None, str(tmp_path / "model"), global_step=3)
    v.assign([5.0, 6.0])
    for folder in (tmp_path, f"{tmp_path}/"):
        with pytest.raises(mtf.checkpoint.CheckpointError, match=r"directory, .*model-3: restore"):
            saver.restore(None, folder)
    for end in (".index", ".data-00000-of-00001"):
        with pytest.raises(mtf.checkpoint.CheckpointError, match=r"Its path is .*model-3$"):
            saver.restore(None, path + end)
    assert v.numpy().tolist() == [5.0, 6.0]
