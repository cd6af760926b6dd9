"""Programs that are built and lowered eagerly, without sessions and without tf.function."""

import gc
import weakref

import numpy as np
import pytest
import tensorflow as tf2
import tensorflow.compat.v1 as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.placement_mesh_impl import PlacementMeshImpl
from mesh_tensorflow.test_utils import NumpyConverter

A, B = mtf.Dimension("a", 4), mtf.Dimension("b", 2)
START = np.arange(8, dtype=np.float32).reshape(4, 2) / 4 - 1
LAYOUTS = [("x:1", ""), ("x:2", ""), ("x:2", "a:x"), ("x:2,y:2", "a:x,b:y")]


def implementation(mesh_shape="x:1", layout="", merge="none"):
    devices = [""] * mtf.convert_to_shape(mesh_shape).size
    return PlacementMeshImpl(mesh_shape, layout, devices, merge=merge)


class Training:
    """The squares of a variable, and a step of gradient descent, as one graph."""

    def __init__(self, **kwargs):
        self.graph = mtf.Graph()
        self.mesh = mtf.Mesh(self.graph, "mesh")
        initializer = tf.constant_initializer(START)
        w = mtf.get_variable(self.mesh, "w", [A, B], initializer=initializer, **kwargs)
        self.loss = mtf.reduce_sum(mtf.square(w))
        [grad] = mtf.gradients([self.loss], [w])
        self.update = mtf.assign_sub(w, 0.25 * grad)  # halves it
        self.w = w.operation

    def lower(self, *args, **kwargs):
        return mtf.Lowering(self.graph, {self.mesh: implementation(*args, **kwargs)})


@pytest.mark.parametrize("merge", ["none", "device"])
@pytest.mark.parametrize("mesh_shape, layout", LAYOUTS)
def test_lowerings_share_variables(mesh_shape, layout, merge):
    """Each Lowering is one step: it has computed its exports and run its assignments."""
    training = Training()
    for step in range(3):
        lowering = training.lower(mesh_shape, layout, merge=merge)
        # What users of sessions do must not set trained values back.
        assert tf.global_variables_initializer() is None
        assert lowering.copy_masters_to_slices() is None
        assert lowering.lowered_operation(training.update) is None
        assert lowering.copy_slices_to_masters() is None
        expected = START / 2 ** (step + 1)
        loss = lowering.export_to_tf_tensor(training.loss)
        np.testing.assert_allclose(loss, np.sum((2 * expected) ** 2), rtol=1e-6)
        np.testing.assert_array_equal(lowering.export_to_tf_tensor(training.w.value), expected)
        np.testing.assert_array_equal(training.w.get_master().numpy(), expected)
    assert training.graph.variable_store.names == ["w"]


def test_layouts_in_turn(tmp_path):
    """Values move to the layout of the Lowering; slices that are the same stay."""
    training = Training()
    lowerings = []
    for step, (mesh_shape, layout) in enumerate(LAYOUTS[::-1] + LAYOUTS):
        lowerings.append(training.lower(mesh_shape, layout))
        expected = START / 2 ** (step + 1)
        np.testing.assert_array_equal(training.w.read_master(), expected)
        for lowering in lowerings:  # the earlier ones have the present value, too
            np.testing.assert_array_equal(lowering.export_to_tf_tensor(training.w.value), expected)
    store = training.graph.variable_store
    assert len(store.variables) == 4
    training.lower("x:1", "")
    [before] = store.variables
    training.lower("x:4", "")
    [after] = store.variables
    assert after is before
    value = training.w.get_master().numpy()
    checkpoint = tf2.train.Checkpoint(store=store)
    path = checkpoint.write(str(tmp_path / "slices"))
    training.lower()
    checkpoint.read(path).assert_consumed()
    np.testing.assert_array_equal(training.w.get_master().numpy(), value)


def test_master():
    """It is a variable: of the whole value, before and after a Lowering, in every layout."""
    training = Training(dtype=mtf.VariableDType(tf.float32, tf.bfloat16, tf.float32))
    master = training.w.get_master()
    assert (master.name, master.dtype, master.trainable) == ("w:0", tf.float32, True)
    assert master.shape.as_list() == [4, 2] and "CPU:0" in master.device
    for place in [None, *LAYOUTS]:
        if place is not None:
            training.lower(*place)
        assert training.w.assign_to_master(tf.ones([4, 2])) is None
        np.testing.assert_array_equal(master, np.ones([4, 2]))
        np.testing.assert_array_equal(master.assign(START), START)
        np.testing.assert_array_equal(master.assign_add(START), 2 * START)
        np.testing.assert_array_equal(master.assign_sub(START).numpy(), START)
        np.testing.assert_array_equal(master + 1, START + 1)
        np.testing.assert_array_equal(tf.reduce_sum(master), START.sum())
        np.testing.assert_array_equal(master.value(), training.w.read_master())
        assert master.read_value().dtype == tf.float32 and master.is_initialized()
    scalar = mtf.get_variable(training.mesh, "scalar", [])
    np.testing.assert_array_equal(scalar.operation.get_master().assign(2.0), 2.0)
    with pytest.raises(ValueError, match="incompatible"):
        master.assign(np.zeros([2, 4]))


def test_variables_die_with_their_graph():
    training = Training()
    training.lower("x:2", "a:x")
    known = [weakref.ref(v) for v in training.graph.variable_store.variables]
    known.append(weakref.ref(training.graph.variable_store))
    del training
    gc.collect()
    assert [ref() for ref in known] == [None] * 3


def test_front_ends_are_apart():
    """One after the other, and within each other, each has its own variables."""
    training = Training()
    store = mtf.VariableStore()
    with tf.Graph().as_default(), tf.Session() as session:
        other = Training()
        assert other.w.store is None and other.graph.variable_store is None
        lowering = other.lower("x:2", "a:x")
        session.run(tf.global_variables_initializer())
        session.run(lowering.copy_masters_to_slices())
        session.run(lowering.lowered_operation(other.update))
        np.testing.assert_array_equal(session.run(other.w.get_master()), START / 2)
    with store.scope():
        third = Training()
        third.lower()
    assert third.w.store is store and third.graph.variable_store is None
    np.testing.assert_array_equal(third.w.get_master().numpy(), START / 2)
    np.testing.assert_array_equal(training.w.get_master().numpy(), START)


def test_converter():
    converter = NumpyConverter()
    x = converter.convert_np_array_to_mtf_tensor([[1, 2], [3, 4]], dtype=tf.float32)
    w = mtf.get_variable(converter.mesh, "w", x.shape, initializer=tf.ones_initializer())
    np.testing.assert_array_equal(
        converter.convert_mtf_tensor_to_np_array(x + w), [[2, 3], [4, 5]])
    with tf.Graph().as_default():
        converter = NumpyConverter()
        x = converter.convert_np_array_to_mtf_tensor([1, 2])
        np.testing.assert_array_equal(converter.convert_mtf_tensor_to_np_array(2 * x), [2, 4])
