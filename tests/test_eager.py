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


@pytest.mark.slow
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
    np.testing.assert_array_equal(converter.convert_mtf_tensor_to_np_array(x + w), [[2, 3], [4, 5]])
    with tf.Graph().as_default():
        converter = NumpyConverter()
        x = converter.convert_np_array_to_mtf_tensor([1, 2])
        np.testing.assert_array_equal(converter.convert_mtf_tensor_to_np_array(2 * x), [2, 4])


@pytest.mark.parametrize("saver_class", [tf.train.Saver, mtf.checkpoint.Saver])
def test_savers(tmp_path, saver_class):
    """Files are of whole variables, and go from layout to layout and to sessions."""
    training = Training()
    training.lower("x:2,y:2", "a:x,b:y")
    master = training.w.get_master()
    saver = saver_class([master])
    path = saver.save(None, str(tmp_path / "model"), global_step=3)
    assert tf.train.list_variables(path) == [("w", [4, 2])]
    master.assign(tf.zeros([4, 2]))
    training.lower("x:4", "a:x")
    saver.restore(None, path)
    np.testing.assert_array_equal(master, START / 2)
    other = Training()
    mtf.checkpoint.init_from_checkpoint(path, {"w": other.w.get_master()})
    np.testing.assert_array_equal(other.w.get_master(), START / 2)
    with tf.Graph().as_default(), tf.Session() as session:
        third = Training()
        saver_class([third.w.get_master()]).restore(session, path)
        np.testing.assert_array_equal(session.run(third.w.get_master()), START / 2)
    checkpoint = tf2.train.Checkpoint(w=master)
    path = checkpoint.write(str(tmp_path / "object"))
    master.assign(tf.zeros([4, 2]))
    checkpoint.read(path).assert_consumed()
    np.testing.assert_array_equal(master, START / 2)


def test_saver_of_another_shape(tmp_path):
    path = mtf.checkpoint.Saver([Training().w.get_master()]).save(None, str(tmp_path / "model"))
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    master = mtf.get_variable(mesh, "w", [B]).operation.get_master()
    before = master.numpy()
    with pytest.raises(mtf.checkpoint.CheckpointError, match=r"\bw\b"):
        mtf.checkpoint.Saver([master]).restore(None, path)
    np.testing.assert_array_equal(master, before)


def test_what_sessions_need_does_no_harm():
    mtf.utils.remove_summaries()
    training = Training()
    doubled = mtf.scalar_summary("loss", 2.0 * training.loss).outputs[0]
    for step in range(2):
        lowering = training.lower("x:2", "a:x")
        mtf.MtfRestoreHook(lowering).begin()
        mtf.MtfCheckpointSaverListener(lowering).begin()
        expected = 2 * np.sum((START / 2**step) ** 2)
        np.testing.assert_allclose(lowering.export_to_tf_tensor(doubled), expected)
        # The collection has the last value.
        [(name, value)] = tf.get_collection(mtf.utils.SCALAR_SUMMARIES_COLLECTION_KEY)
        assert name == "loss" and float(value) == expected
    mtf.utils.remove_summaries()
    assert not tf.get_collection(mtf.utils.SCALAR_SUMMARIES_COLLECTION_KEY)


def test_what_a_function_has_stays():
    """A graph that is built eagerly may be lowered in a tf.function, which settles its layout."""
    training = Training()

    @tf2.function(autograph=False)
    def step():
        return training.lower("x:2", "a:x").export_to_tf_tensor(training.loss)

    for i in range(3):
        np.testing.assert_allclose(step(), np.sum((START / 2**i) ** 2))
    training.lower("x:2", "a:x")
    np.testing.assert_array_equal(training.w.get_master(), START / 16)
    with pytest.raises(ValueError, match=r"A tf\.function has its slices, so they stay"):
        training.lower("x:2", "b:x")
    np.testing.assert_allclose(step(), np.sum((START / 16) ** 2))


class Fails(mtf.Operation):
    """It is lowered after what is before it in the program."""

    def __init__(self, x):
        super().__init__([x], name="fails")
        self._outputs = [mtf.Tensor(self, x.shape, x.dtype)]

    def lower(self, lowering):
        raise ValueError("not on this day")


@pytest.mark.parametrize("mesh_shape, layout", LAYOUTS)
def test_a_lowering_that_fails_assigns_nothing(mesh_shape, layout):
    training = Training()
    training.lower()  # halves the variable
    Fails(training.loss)  # after the assignment
    with pytest.raises(ValueError, match="not on this day"):
        training.lower(mesh_shape, layout)
    np.testing.assert_array_equal(training.w.get_master().numpy(), START / 2)


def test_initializers():
    """Those of the scope, defaults by dtype; one that fails leaves nothing behind."""
    mesh = mtf.Mesh(mtf.Graph(), "mesh")

    def value(name, **kwargs):
        return mtf.get_variable(mesh, name, [A], **kwargs).operation.get_master().numpy()

    with tf.variable_scope("scope", initializer=tf.constant_initializer(7.0)):
        np.testing.assert_array_equal(value("v"), 4 * [7])
    np.testing.assert_array_equal(value("count", dtype=tf.int32), 4 * [0])
    np.testing.assert_array_equal(
        value("f", initializer=lambda shape, dtype, partition_info: tf.ones(shape, dtype)), 4 * [1]
    )
    for found in (None, tf.ones([3])):
        with pytest.raises(ValueError, match="the initializer of variable 'bad' returned"):
            value("bad", initializer=lambda shape, dtype, found=found: found)
        assert "bad" not in mesh.graph.name_to_variable
    np.testing.assert_array_equal(value("bad", initializer=tf.ones_initializer), 4 * [1])
    assert mesh.graph.variable_store.names == ["scope/v", "count", "f", "bad"]


def test_seeds_and_default_names():
    """A program with a seed has the same values each time; in a store the same names."""
    values, names = [], []
    for _ in range(2):
        tf2.random.set_seed(5)
        with mtf.VariableStore().scope() as store:
            mesh = mtf.Mesh(mtf.Graph(), "mesh")
            x = mtf.ones(mesh, mtf.Shape([A]))
            y = mtf.layers.dense(x, [B], reduced_dims=[A])
            y = mtf.dropout(mtf.layers.dense(y, [A], reduced_dims=[B]), keep_prob=0.5)
            lowering = mtf.Lowering(mesh.graph, {mesh: implementation("x:2", "a:x")})
        values.append(lowering.export_to_tf_tensor(y).numpy())
        names.append(store.names)
    np.testing.assert_array_equal(*values)
    assert names[0] == names[1] and len(names[0]) == 4


def test_replicate_says_what_to_do():
    from mesh_tensorflow.simd_mesh_impl import SimdMeshImpl, replicate

    with pytest.raises(ValueError, match=r"call it within `with tf.Graph\(\).as_default"):
        replicate(lambda: 1, devices=["cpu:0", "cpu:1"])
    with pytest.raises(ValueError, match="make the graph, the mesh and the Lowering in a function"):
        SimdMeshImpl("x:2", "a:x")
