"""One copy of each weight: masters whose value is in the slices alone."""

import gc
import math
import os
import weakref

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.testing import harness
from mesh_tensorflow.testing.harness import Placing

A, B = mtf.Dimension("a", 8), mtf.Dimension("b", 16)
VALUE = np.arange(128.0, dtype=np.float32).reshape(8, 16)
PLACINGS = [
    Placing("x:1", ""),
    Placing("x:4", "a:x"),
    Placing("x:2,y:4", "a:x,b:y"),
    Placing("x:2,y:2", "b:x", apart=True),
]
SPLIT = Placing("x:2,y:2", "a:x,b:y", apart=True)


class Program:
    """A matrix, and vectors that are stacked, in one layout; each step adds 1."""

    def __init__(
        self, placing, dtype=tf.float32, before=None, names=("v", "w"), reused=False, **options
    ):
        self.graph = graph = mtf.Graph()
        mesh = mtf.Mesh(graph, "mesh")
        dtype = mtf.VariableDType(dtype, tf.float32, tf.float32)
        start = tf.constant_initializer
        self.values = {"m": mtf.get_variable(mesh, "m", [A, B], dtype, initializer=start(VALUE))}
        for i, name in enumerate(names):
            self.values[name] = mtf.get_variable(
                mesh, name, [A], dtype, initializer=start(VALUE[i, :8])
            )
        updates = [mtf.assign_add(v, mtf.ones_like(v)) for v in self.values.values()]
        updates = graph.combine_assignments(updates)
        self.before = before() if before else None
        # Slices are named after their variables; those of a second program go elsewhere.
        with tf.variable_scope("again" if reused else tf.get_variable_scope()):
            self.lowering = mtf.Lowering(graph, {mesh: placing.impl()}, **options)
        self.update = tf.group([self.lowering.lowered_operation(op) for op in updates])
        self.exports = {n: self.lowering.export_to_tf_tensor(v) for n, v in self.values.items()}
        self.masters = {v.op.name: v for v in tf.global_variables()}
        self.copy_in = self.lowering.copy_masters_to_slices()
        self.copy_out = self.lowering.copy_slices_to_masters()


@pytest.fixture(autouse=True)
def own_graph():
    with tf.Graph().as_default(), harness.separate_memories():
        yield


def new_session():
    return tf.Session(config=tf.ConfigProto(device_count={"CPU": harness.CPUS}))


def tensors_in_memory(session, program):
    """The tf variables, whole ones and slices, that hold memory; by name."""
    graph = tf.get_default_graph()
    handles = [op for op in graph.get_operations() if op.type == "VarHandleOp"]
    with graph.as_default():
        held = session.run(
            [tf.raw_ops.VarIsInitializedOp(resource=op.outputs[0]) for op in handles]
        )
    del program
    return {
        op.name: math.prod(d.size for d in op.get_attr("shape").dim)
        for op, is_held in zip(handles, held)
        if is_held
    }


@pytest.mark.parametrize("placing", PLACINGS)
def test_old_scripts_run_as_they_are(placing):
    p = Program(placing)
    with new_session() as session:
        session.run(tf.global_variables_initializer())
        session.run(p.copy_in)
        assert not session.run(tf.report_uninitialized_variables()).size
        session.run(p.update)
        np.testing.assert_array_equal(session.run(p.exports["m"]), VALUE + 1)
        session.run(p.copy_out)
        np.testing.assert_array_equal(session.run(p.masters["m"]), VALUE + 1)
        np.testing.assert_array_equal(session.run(p.masters["w"]), VALUE[1, :8] + 1)


def test_only_slices_hold_memory():
    p = Program(SPLIT)
    with new_session() as session:
        session.run(tf.global_variables_initializer())
        held = tensors_in_memory(session, p)
    assert held == {
        **{f"m_slice_{i}": 32 for i in range(4)},
        # The vectors are split over x and the same along y, where memories are apart.
        **{f"stacked/v_slice_{i}": 8 for i in range(4)},
    }


@pytest.mark.parametrize(
    "ask",
    [
        lambda: tf.global_variables_initializer(),
        lambda: tf.train.Saver(),
        lambda: [v.read_value() for v in tf.global_variables()],
    ],
    ids=["initializer", "saver", "read"],
)
def test_masters_in_use_before_the_lowering_stay(ask):
    p = Program(SPLIT, before=ask)
    assert all(v.in_use and not v.is_bound for v in p.masters.values())
    with new_session() as session:
        session.run(tf.global_variables_initializer())
        session.run(p.copy_in)
        session.run(p.update)
        np.testing.assert_array_equal(session.run(p.masters["m"]), VALUE)  # stale until copied
        session.run(p.copy_out)
        np.testing.assert_array_equal(session.run(p.masters["m"]), VALUE + 1)
        np.testing.assert_array_equal(session.run(p.masters["v"]), VALUE[0, :8] + 1)


def test_keep_masters():
    p = Program(SPLIT, keep_masters=True)
    with new_session() as session:
        session.run(tf.global_variables_initializer())
        session.run(p.copy_in)
        session.run(p.update)
        np.testing.assert_array_equal(session.run(p.masters["m"]), VALUE)
        assert {"m", "v", "w"} < set(tensors_in_memory(session, p))


@pytest.mark.slow_but(1)
@pytest.mark.slow("saved_in0-*-dtype0", "saved_in1-False-*", "saved_in1-True-dtype1", "saved_in2-*")
@pytest.mark.parametrize("dtype", [tf.float32, tf.bfloat16])
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("saved_in", PLACINGS[1:])
def test_savers_write_slices_under_the_masters_names(saved_in, sharded, dtype, tmp_path):
    p = Program(saved_in, dtype)
    with new_session() as session:
        session.run(tf.global_variables_initializer())
        session.run(p.update)
        path = tf.train.Saver(sharded=sharded).save(session, str(tmp_path / "model"))
    reader = tf.train.load_checkpoint(path)
    assert reader.get_variable_to_shape_map() == {"m": [8, 16], "v": [8], "w": [8]}
    assert set(reader.get_variable_to_dtype_map().values()) == {dtype}
    np.testing.assert_array_equal(reader.get_tensor("m").astype(np.float32), VALUE + 1)
    for placing in PLACINGS:
        with tf.Graph().as_default():
            p = Program(placing, dtype)
            saver = tf.train.Saver()
            with new_session() as session:  # no initializer is run
                saver.restore(session, path)
                session.run(p.copy_in)
                assert not session.run(tf.report_uninitialized_variables()).size
                values = session.run(p.exports)
        np.testing.assert_array_equal(values["m"], VALUE + 1)
        np.testing.assert_array_equal(values["v"], VALUE[0, :8] + 1)
    with tf.Graph().as_default():  # on no mesh at all
        whole = tf.get_variable("m", [8, 16], dtype)
        with tf.Session() as session:
            tf.train.Saver([whole]).restore(session, path)
            np.testing.assert_array_equal(session.run(tf.cast(whole, tf.float32)), VALUE + 1)


def test_a_saver_may_rename(tmp_path):
    p = Program(SPLIT)
    saver = tf.train.Saver({f"other/{name}": v for name, v in p.masters.items()})
    with new_session() as session:
        session.run(tf.global_variables_initializer())
        path = saver.save(session, str(tmp_path / "model"))
        assert tf.train.load_checkpoint(path).get_variable_to_shape_map() == {
            "other/m": [8, 16],
            "other/v": [8],
            "other/w": [8],
        }
        session.run(p.update)
        saver.restore(session, path)
        np.testing.assert_array_equal(session.run(p.exports["m"]), VALUE)
        np.testing.assert_array_equal(session.run(p.exports["w"]), VALUE[1, :8])


@pytest.mark.parametrize("after", [True, False], ids=["after", "before"])
def test_init_from_checkpoint(after, tmp_path):
    p = Program(Placing("x:1", ""))
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        session.run(p.update)
        path = tf.train.Saver().save(session, str(tmp_path / "model"))

    def from_checkpoint():
        tf.train.init_from_checkpoint(path, {"m": "m", "v": "w"})

    with tf.Graph().as_default(), harness.separate_memories():
        p = Program(SPLIT, before=None if after else from_checkpoint)
        if after:
            from_checkpoint()
        with new_session() as session:
            session.run(tf.global_variables_initializer())
            session.run(p.copy_in)
            values = session.run(p.exports)
    np.testing.assert_array_equal(values["m"], VALUE + 1)
    np.testing.assert_array_equal(values["w"], VALUE[0, :8] + 1)
    np.testing.assert_array_equal(values["v"], VALUE[0, :8])  # its own initial value


def test_slices_are_loaded_in_a_session():
    """As tf variables are: processors are numbered by rows, then by columns."""
    p = Program(SPLIT)
    slices = p.lowering.variables[p.values["m"].operation].laid_out_tensor.all_slices
    with new_session() as session:
        session.run(tf.global_variables_initializer())
        for i, v in enumerate(slices):
            v.load(np.full([4, 8], i, np.float32), session)
        found = session.run(p.exports["m"])
    np.testing.assert_array_equal(found, np.kron([[0, 1], [2, 3]], np.ones([4, 8])))


def test_masters_are_read_and_set_as_tf_variables_are():
    p = Program(SPLIT)
    m = p.masters["m"]
    doubled, norm = m * 2.0, tf.nn.l2_loss(m)
    set_m, add_v = tf.assign(m, -VALUE), tf.assign_add(p.masters["v"], tf.ones([8]))
    with new_session() as session:
        session.run(tf.global_variables_initializer())
        np.testing.assert_array_equal(session.run(doubled), VALUE * 2)
        np.testing.assert_allclose(session.run(norm), np.sum(VALUE**2) / 2, rtol=1e-6)
        np.testing.assert_array_equal(session.run(set_m), -VALUE)
        np.testing.assert_array_equal(session.run(add_v), VALUE[0, :8] + 1)
        np.testing.assert_array_equal(session.run(p.exports["m"]), -VALUE)
        p.masters["w"].load(np.full(8, 5, np.float32), session)
        values = session.run(p.exports)
        np.testing.assert_array_equal(values["w"], np.full(8, 5))
        np.testing.assert_array_equal(values["v"], VALUE[0, :8] + 1)
        np.testing.assert_array_equal(m.eval(session), -VALUE)
    with pytest.raises(AttributeError, match=r"kept in slices.*keep_masters=True"):
        m.scatter_update(0)


def test_a_checkpoint_of_another_shape_changes_nothing(tmp_path):
    with tf.Graph().as_default(), tf.Session() as session:
        for name, shape in {"m": [16, 8], "v": [8], "w": [8]}.items():
            tf.get_variable(name, shape, initializer=tf.ones_initializer())
        session.run(tf.global_variables_initializer())
        path = tf.train.Saver().save(session, str(tmp_path / "model"))
    p = Program(SPLIT)
    saver = tf.train.Saver()
    with new_session() as session:
        session.run(tf.global_variables_initializer())
        with pytest.raises(tf.errors.InvalidArgumentError, match=r"16,8"):
            saver.restore(session, path)
        values = session.run(p.exports)
    np.testing.assert_array_equal(values["m"], VALUE)
    np.testing.assert_array_equal(values["v"], VALUE[0, :8])


def test_two_lowerings_of_one_program_have_one_value():
    p = Program(Placing("x:4", "a:x"), autostack=False)
    mesh = p.graph.meshes[0] if hasattr(p.graph, "meshes") else p.values["m"].mesh
    with tf.variable_scope("second"):
        second = mtf.Lowering(p.graph, {mesh: SPLIT.impl()}, autostack=False)
    copy = second.copy_masters_to_slices()
    value = second.export_to_tf_tensor(p.values["m"])
    with new_session() as session:
        session.run(tf.global_variables_initializer())
        session.run(p.update)
        session.run(copy)
        np.testing.assert_array_equal(session.run(value), VALUE + 1)


def test_a_second_program_that_reuses_variables(tmp_path):
    """Training on a mesh, and the same variables in a program on one processor."""
    p = Program(SPLIT)
    with tf.variable_scope(tf.get_variable_scope(), reuse=tf.AUTO_REUSE):
        q = Program(Placing("x:1", ""), autostack=False, reused=True)
    with new_session() as session:
        session.run(tf.global_variables_initializer())
        session.run(p.update)
        session.run(q.copy_in)
        for name, value in session.run(q.exports).items():
            np.testing.assert_array_equal(value, session.run(p.exports[name]))
        np.testing.assert_array_equal(session.run(q.exports["m"]), VALUE + 1)


def test_meta_graphs_are_written(tmp_path):
    p = Program(SPLIT)
    saver = tf.train.Saver()
    with new_session() as session:
        session.run(tf.global_variables_initializer())
        session.run(p.update)
        path = saver.save(session, str(tmp_path / "model"))
        name = p.exports["m"].name
    assert os.path.exists(path + ".meta")
    with tf.Graph().as_default(), new_session() as session:
        tf.train.import_meta_graph(path + ".meta").restore(session, path)
        np.testing.assert_array_equal(session.run(name), VALUE + 1)


@pytest.mark.slow
def test_graphs_are_freed():
    """Nothing of this package keeps a tf graph that its program has done with."""
    with tf.Graph().as_default() as graph:
        p = Program(SPLIT)
        with new_session() as session:
            session.run(tf.global_variables_initializer())
            session.run(p.update)
        reference = weakref.ref(graph)
    del graph, p, session
    gc.collect()
    assert reference() is None


@pytest.mark.parametrize("twice", [False, True], ids=["once", "twice"])
@pytest.mark.parametrize("placing", [SPLIT, Placing("x:1", "")])
def test_values_of_a_checkpoint_to_begin_with(placing, twice, tmp_path):
    p = Program(Placing("x:1", ""))
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        session.run(p.update)
        path = tf.train.Saver().save(session, str(tmp_path / "model"))
    with tf.Graph().as_default(), harness.separate_memories():
        p = Program(placing)
        given = {"m": p.masters["m"], "v": p.masters["w"]}
        # Pairs may have a name of the file twice.
        pairs = [*given.items(), ("v", p.masters["v"])]
        mtf.checkpoint.init_from_checkpoint(path, pairs if twice else given)
        with pytest.raises(mtf.checkpoint.CheckpointError, match=r"Missing in the file(.|\n)*none"):
            mtf.checkpoint.init_from_checkpoint(path, {"none": p.masters["m"]})
        (tmp_path / "empty").mkdir()
        with pytest.raises(
            ValueError, match=r"there is no checkpoint in .*empty.*lists none. Give"
        ):
            mtf.checkpoint.init_from_checkpoint(str(tmp_path / "empty"), {"m": p.masters["m"]})
        with new_session() as session:
            session.run(tf.global_variables_initializer())
            session.run(p.copy_in)
            values = session.run(p.exports)
    np.testing.assert_array_equal(values["m"], VALUE + 1)
    np.testing.assert_array_equal(values["w"], VALUE[0, :8] + 1)
    np.testing.assert_array_equal(values["v"], VALUE[0, :8] + twice)
