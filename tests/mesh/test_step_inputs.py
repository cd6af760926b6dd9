"""What a step reads of TensorFlow: values of variables before the step increments them, and what is fed."""

import contextlib
import functools
import time

import numpy as np
import pytest
import tensorflow as tf2
import tensorflow.compat.v1 as tf
from helpers.train import effects

import mesh_tensorflow as mtf
from mesh_tensorflow import estimator
from mesh_tensorflow.simd_mesh_impl import SimdMeshImpl, replicate
from mesh_tensorflow.testing import harness

STEPS = 4


def _late():
    """An int64 zero that takes its time, so that a read that waits for it comes late."""

    def wait():
        time.sleep(0.02)
        return np.int64(0)

    zero = tf.py_func(wait, [], tf.int64)
    zero.set_shape([])
    return zero


def _read_late(step):
    if isinstance(step, tf.Variable) and hasattr(step, "handle"):
        with tf.control_dependencies([_late()]):
            return tf.cast(step.read_value(), tf.float32)
    return tf.cast(tf.add(step, _late()), tf.float32)


def _imported(mesh, rate):
    return mtf.import_fully_replicated(mesh, rate, mtf.Shape([]))


USES = {
    "imported": lambda mesh, rate: _imported(mesh, rate),
    "scalar": lambda mesh, rate: mtf.constant(mesh, 0.0) + rate,
    "factor": lambda mesh, rate: mtf.constant(mesh, 1.0) * rate,
}


def _program(rate, use, impl):
    """Lowers the assignment of a rate to the variable "used"."""
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    used = effects.state(mesh, "used")
    mtf.assign(used, USES[use](mesh, rate))
    lowering = mtf.Lowering(mesh.graph, {mesh: impl})
    return lowering, used.operation


def _values(train, lowering, used):
    """Returns the rate that each step has used."""
    to_masters, value = lowering.copy_slices_to_masters(), used.get_master().read_value()
    found = []
    with harness.session() as session:
        session.run(tf.global_variables_initializer())
        session.run(lowering.copy_masters_to_slices())
        for _ in range(STEPS):
            session.run(train)
            session.run(to_masters)
            found.append(float(session.run(value)))
    return found


INCREMENTS = {
    "assign_add": lambda step: tf.assign_add(step, 1),
    "method": lambda step: step.assign_add(1),
    "sum": lambda step: tf.assign(step, step + 1),
}


def _branch(step):
    late = tf.equal(_late(), 0)
    return tf.cond(late, lambda: tf.cast(step + 0, tf.float32), lambda: -1.0)


def _branch_in_branch(step):
    return tf.cond(tf.constant(True), lambda: _branch(step), lambda: -2.0)


def _loop(step):
    start = [0, 0.0]
    return tf.while_loop(lambda i, y: i < 2, lambda i, y: (i + 1, _read_late(step)), start)[1]


def _branch_in_loop(step):
    start = [0, 0.0]
    return tf.while_loop(lambda i, y: i < 1, lambda i, y: (i + 1, _branch(step)), start)[1]


READS = {
    "branch": _branch,
    "branch in branch": _branch_in_branch,
    "loop": _loop,
    "branch in loop": _branch_in_loop,
}


@contextlib.contextmanager
def _control_flow(functions):
    """Branches and loops as functions, or in the form of TensorFlow 1."""
    before = tf.control_flow_v2_enabled()
    (tf.enable_control_flow_v2 if functions else tf.disable_control_flow_v2)()
    yield
    (tf.enable_control_flow_v2 if before else tf.disable_control_flow_v2)()


@pytest.fixture(params=[False, True], ids=["switches", "functions"])
def control_flow(request):
    with _control_flow(request.param):
        yield request.param


def _count_in_loop(step):
    return tf.while_loop(
        lambda i: i < 1, lambda i: [tf.cast(tf.assign_add(step, 1), tf.int32)], [0]
    )


COUNTING = {
    "branch": lambda step: tf.cond(
        tf.constant(True), lambda: tf.assign_add(step, 1) + 0, lambda: step + 0
    ),
    "sum in a branch": lambda step: tf.cond(
        tf.constant(True), lambda: tf.assign(step, step + 1) + 0, lambda: step + 0
    ),
    "branch in a branch": lambda step: tf.cond(
        tf.constant(True), lambda: COUNTING["branch"](step), lambda: step + 0
    ),
    "loop": _count_in_loop,
}


@pytest.mark.parametrize("first", [False, True], ids=["after", "before"])
@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("resource", [False, True], ids=["ref", "resource"])
def test_reads_in_branches_and_loops(resource, read, first, control_flow, tf_graph):
    with tf.variable_scope("", use_resource=resource):
        step = tf.train.get_or_create_global_step()
    done = [tf.assign_add(step, 1)] if first else []
    lowering, used = _program(READS[read](step), "imported", effects.placed("merged"))
    train = tf.group(*(done or [tf.assign_add(step, 1)]), *lowering.effects)
    assert _values(train, lowering, used) == list(range(STEPS))


@pytest.mark.parametrize("first", [False, True], ids=["after", "before"])
def test_reads_in_functions_and_of_rows(first, tf_graph):
    with tf.variable_scope("", use_resource=True):
        step = tf.train.get_or_create_global_step()
        rows = tf.get_variable("rows", [2], initializer=tf.zeros_initializer())
    done = [tf.assign_add(step, 1), tf.assign_add(rows, [1.0, 1.0])]
    done = done if first else []
    read = tf2.function(lambda: _read_late(step), autograph=False)
    rate = 10 * read() + tf.gather(rows, tf.cast(_late(), tf.int32))
    lowering, used = _program(rate, "imported", effects.placed("merged"))
    done = done or [tf.assign_add(step, 1), tf.assign_add(rows, [1.0, 1.0])]
    found = _values(tf.group(*done, *lowering.effects), lowering, used)
    assert found == [11 * i for i in range(STEPS)]


@pytest.mark.parametrize("first", [False, True], ids=["after", "before"])
@pytest.mark.parametrize("read", ["outside", "inside"])
@pytest.mark.parametrize("increment", COUNTING)
def test_increments_in_branches(increment, read, first, control_flow, tf_graph):
    """As of programs that count only some of their steps."""
    # Functions of TensorFlow assign to resource variables alone.
    with tf.variable_scope("", use_resource=control_flow):
        step = tf.train.get_or_create_global_step()
    increment = functools.partial(COUNTING[increment], step)
    done = [increment()] if first else []
    rate = _read_late(step) if read == "outside" else _branch(step)
    lowering, used = _program(rate, "imported", effects.placed("merged"))
    done = done or [increment()]
    train = tf.group(*done, *lowering.effects)
    assert _values(train, lowering, used) == list(range(STEPS))


def test_a_function_that_increments(tf_graph):
    with tf.variable_scope("", use_resource=True):
        step = tf.train.get_or_create_global_step()
    lowering, used = _program(_read_late(step), "imported", effects.placed("merged"))
    count = tf2.function(lambda: step.assign_add(1), autograph=False)
    assert _values(tf.group(count(), *lowering.effects), lowering, used) == list(range(STEPS))


@pytest.mark.slow_but(11)
@pytest.mark.parametrize("first", [False, True], ids=["after", "before"])
@pytest.mark.parametrize("increment", INCREMENTS)
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("resource", [False, True], ids=["ref", "resource"])
def test_increments_wait_for_reads(resource, use, increment, first, tf_graph):
    """Whether they are made before the program or after it."""
    with tf.variable_scope("", use_resource=resource):
        step = tf.train.get_or_create_global_step()
    done = [INCREMENTS[increment](step)] if first else []
    lowering, used = _program(_read_late(step), use, effects.placed("merged"))
    done = done or [INCREMENTS[increment](step)]
    train = tf.group(*done, *lowering.effects)
    assert _values(train, lowering, used) == list(range(STEPS))


@pytest.mark.parametrize("inside", [False, True], ids=["captured", "read inside"])
def test_simd_programs(inside, tf_graph):
    with tf.variable_scope("", use_resource=True):
        step = tf.train.get_or_create_global_step()
    rate = None if inside else _read_late(step)
    found = []

    def program():
        value = tf.cast(step.read_value(), tf.float32) if inside else rate
        found.append(_program(value, "imported", SimdMeshImpl("rows:2", "")))
        return found[-1][0].effects

    done = replicate(program, devices=["/cpu:0", "/cpu:1"])
    train = tf.group(*done, tf.assign_add(step, 1))
    assert _values(train, *found[-1]) == list(range(STEPS))
    with harness.session() as session:  # an increment by itself runs nothing else
        session.run(tf.global_variables_initializer())
        session.run(tf.assign_add(step, 1))
        assert session.run(found[-1][1].get_master().read_value()) == 0.0


def test_what_is_read_after_an_increment_stays_so(tf_graph):
    with tf.variable_scope("", use_resource=True):
        step = tf.train.get_or_create_global_step()
    with tf.control_dependencies([tf.assign_add(step, 1)]):
        rate = tf.cast(step.read_value(), tf.float32)
    lowering, used = _program(rate, "imported", effects.placed("merged"))
    found = _values(tf.group(*lowering.effects), lowering, used)
    assert found == list(range(1, STEPS + 1))


def test_what_sets_a_variable_waits_for_nothing(tf_graph):
    """Initializers and savers run where nothing can be read yet."""
    with tf.variable_scope("", use_resource=True):
        step = tf.train.get_or_create_global_step()
    _program(_read_late(step), "imported", effects.placed("merged"))
    reset = step.assign(7, read_value=False)
    assert not reset.control_inputs
    with harness.session() as session:
        session.run(reset)
        assert session.run(step) == 7


@pytest.mark.parametrize("kind", ["plain", "tpu"])
def test_estimators(kind, tmp_path):
    """Their model function increments the step beside what the program assigns."""
    spec = estimator.EstimatorSpec if kind == "plain" else estimator.tpu.TPUEstimatorSpec

    def model_fn(features, mode, params=None):
        step = tf.train.get_global_step()
        lowering, used = _program(_read_late(step), "imported", effects.placed("merged"))
        return spec(
            mode,
            loss=tf.reduce_mean(features),
            train_op=tf.group(*lowering.effects, tf.assign_add(step, 1)),
            training_hooks=[mtf.MtfRestoreHook(lowering)],
        )

    def data(params=None):
        return tf.data.Dataset.from_tensors(np.ones([4], np.float32)).repeat()

    folder = str(tmp_path)
    if kind == "plain":
        config = estimator.RunConfig(log_step_count_steps=None)
        made = estimator.Estimator(model_fn, folder, config)
    else:
        config = estimator.tpu.RunConfig(model_dir=folder, log_step_count_steps=None)
        made = estimator.tpu.TPUEstimator(
            model_fn, config=config, use_tpu=False, train_batch_size=4
        )
    made.train(data, steps=STEPS)
    assert made.get_variable_value("used") == STEPS - 1


@pytest.mark.parametrize("make", [tf.constant, lambda x: tf.placeholder_with_default(x, [])])
def test_a_number_that_is_fed_reaches_all_processors(tf_graph, make):
    """Sessions may feed any tensor, such as the constant of a learning rate."""
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    rate = make(0.5)
    y = mtf.range(mesh, mtf.Dimension("d", 8), tf.float32) * (
        mtf.import_tf_tensor(mesh, rate, []) * 2.0
    )
    impl = mtf.placement_mesh_impl.PlacementMeshImpl(
        "p:4", "d:p", [f"/device:CPU:{i}" for i in range(4)]
    )
    found = mtf.Lowering(mesh.graph, {mesh: impl}).export_to_tf_tensor(y)
    with tf.Session(config=mtf.session_config("p:4", "d:p")) as session:
        np.testing.assert_array_equal(session.run(found, {rate: 1.0}), 2.0 * np.arange(8))
