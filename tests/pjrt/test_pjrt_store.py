"""ArrayStore: values, and checkpoints that other mesh implementations and the classic read."""

import jax
import numpy as np
import pytest
import tensorflow as tf
from helpers.pjrt import DATA, losses, on_jax, on_placed_devices

import mesh_tensorflow as mtf


def test_values():
    step = on_jax()
    step(DATA)
    store, name = step.store, "first/kernel"
    assert repr(store).startswith(
        "<VariableStore: 8 variables, 296 parameters, in slices on a mesh"
    )
    value = store.value(name).numpy()
    np.testing.assert_array_equal(store.array(name), value)
    where = store.array(name).sharding
    store.assign(name, value.tolist())
    np.testing.assert_array_equal(store.value(name), value)
    assert store.array(name).sharding == where
    store.masters[name].assign(value * 2)
    np.testing.assert_array_equal(store.value(name), value * 2)
    with pytest.raises(KeyError, match="no variable 'third' in the store"):
        store.array("third")
    with pytest.raises(ValueError, match=r"cannot be assigned a value of shape"):
        store.assign(name, value[:1])


@pytest.mark.slow
def test_checkpoints_go_both_ways(tmp_path):
    """Training continues on the other kind of mesh as it would have on the first."""
    expected = losses(on_placed_devices(keep_prob=1.0), 4)
    for first, second in [(on_jax, on_placed_devices), (on_placed_devices, on_jax)]:
        before = first(keep_prob=1.0)
        losses(before, 2)
        path = tf.train.Checkpoint(store=before.store).write(str(tmp_path / first.__name__))
        shapes = dict(tf.train.list_variables(path))
        assert shapes["first/kernel"] == [4, 16] and shapes["second/bias_momentum_v"] == [4]
        after = second(keep_prob=1.0)
        status = tf.train.Checkpoint(store=after.store).read(path)
        np.testing.assert_allclose(losses(after, 2), expected[2:], rtol=1e-5)
        status.assert_consumed()


def test_checkpoints_are_restored_part_by_part(tmp_path, monkeypatch):
    step = on_jax()
    step(DATA)
    checkpoint = tf.train.Checkpoint(store=step.store)
    path = checkpoint.write(str(tmp_path / "model"))
    name, sizes = "first/kernel", []
    value, put = step.store.value(name).numpy(), step.store._assign_part
    step.store.assign(name, np.zeros_like(value))

    def noted(name, index, part):
        sizes.append(part.size)
        put(name, index, part)

    monkeypatch.setattr(step.store, "_assign_part", noted)
    checkpoint.read(path).assert_consumed()
    np.testing.assert_array_equal(step.store.value(name), value)
    assert max(sizes) == value.size // 2
    assert len(step.store.array(name).sharding.device_set) == 4


def test_savers_of_sessions(tmp_path):
    """Files of mtf.checkpoint.Saver, which have the names that the classic's have."""
    step = on_jax()
    step(DATA)
    expected = {name: step.store.value(name).numpy() for name in step.store.names}
    saver = mtf.checkpoint.Saver(step.store.masters)
    path = saver.save(None, str(tmp_path / "model"))
    reader = tf.train.load_checkpoint(path)
    for name, value in expected.items():
        np.testing.assert_array_equal(reader.get_tensor(name), value)
        step.store.assign(name, np.zeros_like(value))
    saver.restore(None, path)
    for name, value in expected.items():
        np.testing.assert_array_equal(step.store.value(name), value)


def test_what_is_tracked_is_saved_too(tmp_path):
    step = on_jax()
    step(DATA)
    seen = tf.Variable([1, 2], dtype=tf.int64, name="seen")
    path = mtf.pjrt.save(step.store, str(tmp_path / "before"))
    step.store.track(seen)
    mtf.pjrt.restore(step.store, path)  # of before it was tracked
    path = mtf.pjrt.save(step.store, str(tmp_path / "model"), step=3)
    seen.assign([0, 0])
    mtf.pjrt.restore(step.store, path)
    assert seen.numpy().tolist() == [1, 2]
    step.store.track(tf.Variable([1.0], name="new"))
    seen.assign([0, 0])
    bad = {"seen": np.ones(3, np.int64), **{n: step.store.value(n) for n in step.store.names}}
    tf.raw_ops.SaveV2(
        prefix=str(tmp_path / "bad"),
        tensor_names=list(bad),
        shape_and_slices=[""] * len(bad),
        tensors=list(bad.values()),
    )
    with pytest.raises(mtf.checkpoint.CheckpointError, match=r"seen: int64 \[3\] in the file"):
        mtf.pjrt.restore(step.store, str(tmp_path / "bad"))


def test_averages_begin_as_what_weights_are_given():
    @mtf.pjrt.function(mesh_shape="rows:2", layout="a:rows")
    def program():
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        v = mtf.get_variable(mesh, "v", "a:4", initializer=tf.ones_initializer())
        average = mtf.optimize.ExponentialMovingAverage(0.5)
        average.apply(mesh.graph.trainable_variables)
        lowering = mtf.Lowering(mesh.graph, {mesh: mtf.pjrt.mesh_impl()})
        return lowering.export_to_tf_tensor(v)

    program.store.begin_with({"v": np.full(4, 3.0, np.float32)})
    program()
    average = program.store.value("v/ExponentialMovingAverage").numpy()
    np.testing.assert_array_equal(average, [3.0] * 4)


def test_dtypes_of_masters_and_slices(tmp_path):
    """Slices of bfloat16 are what is on the devices; files have the master's dtype."""

    @mtf.pjrt.function(mesh_shape="rows:2", layout="a:rows")
    def program():
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        dtype = mtf.VariableDType(tf.float32, tf.bfloat16, tf.float32)
        v = mtf.get_variable(mesh, "v", "a:4", dtype, initializer=tf.ones_initializer())
        update = mtf.assign_add(v, v * 0.5)
        lowering = mtf.Lowering(mesh.graph, {mesh: mtf.pjrt.mesh_impl()})
        lowering.lowered_operation(update)
        return lowering.export_to_tf_tensor(v)

    assert program().dtype == jax.numpy.float32
    assert program.store.array("v").dtype == jax.numpy.bfloat16
    path = tf.train.Checkpoint(store=program.store).write(str(tmp_path / "model"))
    found = tf.train.load_checkpoint(path).get_tensor("v")
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, [1.5] * 4)
