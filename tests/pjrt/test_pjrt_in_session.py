"""Programs of sessions on devices of JAX."""

import pytest

pytest.importorskip("jax", "0.8", reason="mesh_tensorflow.pjrt needs jax>=0.8")

import numpy as np
import tensorflow as tf2
import tensorflow.compat.v1 as tf
from helpers.pjrt import placed

import mesh_tensorflow as mtf
from mesh_tensorflow.pjrt._trace import imported, operations_of

MESH, LAYOUT = "rows:2,cols:2", "batch:rows,hidden:cols"
DATA = np.linspace(-1, 1, 32).reshape(8, 4).astype(np.float32)


def gspmd():
    return mtf.GspmdMeshImpl(MESH, LAYOUT)


def training(make_impl, data, optimizer, lowerings):
    """Returns a program with dropout, a statistic that is no weight, and a step of an optimizer."""

    def program():
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        x = mtf.import_tf_tensor(mesh, data, mtf.Shape([("batch", 8), ("d_in", 4)]))
        hidden = mtf.Dimension("hidden", 16)
        h = mtf.layers.dense(x, hidden, x.shape[1:], activation=mtf.relu, name="encode")
        h = mtf.dropout(h, True, keep_prob=0.8)
        y = mtf.layers.dense(h, x.shape[1:], h.shape[1:], name="decode")
        loss = mtf.reduce_mean(mtf.square(y - x))
        count = mtf.get_variable(
            mesh, "count", [], initializer=tf.zeros_initializer(), trainable=False
        )
        weights = mesh.graph.trainable_variables
        grads = mtf.gradients([loss], [v.value for v in weights])
        updates = [*optimizer().apply_grads(grads, weights), mtf.assign_add(
            mesh.graph.name_to_variable["count"], mtf.ones_like(count))]  # fmt: skip
        lowering = mtf.Lowering(mesh.graph, {mesh: make_impl()})
        lowerings.append(lowering)
        done = tf.group([lowering.lowered_operation(op) for op in updates])
        return {"loss": lowering.export_to_tf_tensor(loss), "update": done}

    return program


def train(make_impl, run, optimizer, directory, restored=None):
    """Returns three losses; saves a checkpoint."""
    with tf.Graph().as_default():
        tf.set_random_seed(4)
        data = tf.placeholder(tf.float32, [8, 4])
        tf.train.get_or_create_global_step()
        lowerings = []
        made = run(training(make_impl, data, optimizer, lowerings))
        hooks = [mtf.MtfRestoreHook(lowerings[0])]
        with tf.control_dependencies([made["update"]]):
            step = tf.assign_add(tf.train.get_global_step(), 1)
        saver = mtf.checkpoint.Saver(tf.global_variables())
        saved = tf.train.CheckpointSaverHook(
            directory, save_steps=1, saver=saver,
            listeners=[mtf.MtfCheckpointSaverListener(lowerings[0])],
        )  # fmt: skip
        scaffold = tf.train.Scaffold(saver=saver)
        creator = tf.train.ChiefSessionCreator(scaffold, checkpoint_filename_with_path=restored)
        with tf.train.MonitoredSession(creator, [*hooks, saved]) as session:
            fetches = [made["loss"], made["update"], step]
            return [float(session.run(fetches, {data: DATA})[0]) for _ in range(3)]


def values(directory):
    reader = tf.train.load_checkpoint(directory)
    return {n: reader.get_tensor(n) for n in reader.get_variable_to_shape_map()}


OPTIMIZERS = {
    "adam": lambda: mtf.optimize.AdamWeightDecayOptimizer(0.01),
    "adafactor": lambda: mtf.optimize.AdafactorOptimizer(learning_rate=0.01),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_trains_and_resumes_as_on_placed_devices(name, tmp_path):
    a, b, c = (str(tmp_path / part) for part in "abc")
    here = lambda program: program()  # noqa: E731
    expected = train(lambda: placed(MESH, LAYOUT), here, OPTIMIZERS[name], a)
    found = train(gspmd, mtf.pjrt.in_session, OPTIMIZERS[name], b)
    np.testing.assert_allclose(found, expected, rtol=1e-4)
    wanted, saved = values(a), values(b)
    assert saved.keys() == wanted.keys() and saved["count"] == 3
    for key, value in wanted.items():
        np.testing.assert_allclose(saved[key], value, rtol=1e-4, atol=1e-6, err_msg=key)
    path = tf.train.latest_checkpoint(a)
    resumed = train(gspmd, mtf.pjrt.in_session, OPTIMIZERS[name], b, path)
    expected = train(lambda: placed(MESH, LAYOUT), here, OPTIMIZERS[name], c, path)
    np.testing.assert_allclose(resumed, expected, rtol=1e-4)
    assert values(b)["count"] == 6


def test_variables_are_split_over_the_devices(tf_graph):
    lowerings = []
    made = mtf.pjrt.in_session(training(gspmd, tf.constant(DATA), OPTIMIZERS["adam"], lowerings))
    kernel = next(v for v in tf.global_variables() if v.op.name == "encode/kernel")
    slices = {
        v.name: laid_out.slices[0] for v, laid_out in lowerings[0].variables.items()
    }  # fmt: skip
    with tf.Session() as session:
        assert not session.run(kernel.is_initialized())
        with pytest.raises(
            tf.errors.InvalidArgumentError, match=r"has no value: run tf.global_var"
        ):
            session.run(made["loss"])
        session.run(tf.global_variables_initializer())
        assert session.run(kernel.is_initialized())
        session.run(made)
        array = slices["encode/kernel"].array
        assert tuple(array.sharding.spec) == (None, "cols")
        assert {s.data.shape for s in array.addressable_shards} == {(4, 8)}
        kernel.load(np.ones([4, 16]), session)
        np.testing.assert_array_equal(session.run(kernel), np.ones([4, 16]))


def test_what_a_program_does_not_use_is_not_computed(tf_graph):
    """Names of files and tables of other features, which are not on the devices."""
    words = tf.constant(["a", "b"])

    def program(data, names):
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        twice = 2.0 * mtf.import_tf_tensor(mesh, data, mtf.Shape([("batch", 2)]))
        lowering = mtf.Lowering(mesh.graph, {mesh: mtf.GspmdMeshImpl("rows:2", "batch:rows")})
        return {"twice": lowering.export_to_tf_tensor(twice), "of": tf.shape(data)}

    made = mtf.pjrt.in_session(program, [tf.constant([1.0, 2.0]), words])
    with tf.Session() as session:
        found = session.run(made)
    np.testing.assert_array_equal(found["twice"], [2.0, 4.0])
    np.testing.assert_array_equal(found["of"], [2])


def stepping(change, after=None):
    """Returns a program that changes the global step, and what it returns as well."""

    def program():
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        x = mtf.ones(mesh, "batch:2")
        lowering = mtf.Lowering(mesh.graph, {mesh: mtf.GspmdMeshImpl("rows:2", "batch:rows")})
        step = tf.train.get_global_step()
        before = tf.identity(step.read_value())
        value = lowering.export_to_tf_tensor(x)
        changed = change(step)
        return {
            "value": value,
            "before": before,
            "changed": changed,
            **(after(step) if after else {}),
        }

    return program


def test_collected_values(tf_graph):
    x = np.arange(16, dtype=np.float32).reshape(4, 4)

    def program(x):
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        y = mtf.square(mtf.import_tf_tensor(mesh, x, "a:4,b:4"), name="squared")
        impl = mtf.GspmdMeshImpl("rows:2,cols:2", "a:rows,b:cols")
        return mtf.Lowering(mesh.graph, {mesh: impl}).export_to_tf_tensor(mtf.reduce_sum(y))

    with mtf.debug.collect("squared") as whole, mtf.debug.collect("squared", 2) as part:
        total = mtf.pjrt.in_session(program, [tf.constant(x)])
    with tf.Session() as session:
        found = session.run([total, whole["squared"], part["squared"]])
    assert found[0] == 1240
    np.testing.assert_array_equal(found[1], x * x)
    np.testing.assert_array_equal(found[2], (x * x)[2:, :2])


def test_none_stays_none(tf_graph):
    tf.train.get_or_create_global_step()
    made = mtf.pjrt.in_session(stepping(lambda step: None, lambda step: {"nothing": [None]}))
    assert made["changed"] is None
    assert made["nothing"] == [None]
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        np.testing.assert_array_equal(session.run(made["value"]), [1, 1])


def test_loops_of_another_process():
    """Whose bodies TensorFlow does not know here, nor in this process once their graph is gone."""
    with tf.Graph().as_default() as graph:
        x = tf.placeholder(tf.float32, [], name="x")
        y = tf.while_loop(lambda y: y < 5.0, lambda y: 2.0 * y, [x])
        names = {op.name for op in graph.get_operations()} - {x.op.name}
        whole = operations_of(graph.as_graph_def(), names).SerializeToString()
    for prefix in (b"other_", b"third_"):
        told = tf.GraphDef.FromString(whole.replace(b"while_", prefix))
        compiled = tf2.function(imported(told, ["x"], [y.name]), jit_compile=True)
        assert [float(compiled(tf.constant(x))[0]) for x in (1.0, 3.0)] == [8, 6]


def test_assignments_to_variables_of_tensorflow_come_after_the_program(tf_graph):
    def change(step):
        return tf.group(tf.assign_add(step, 2), tf.assign_sub(step, 1))

    tf.train.get_or_create_global_step()
    made = mtf.pjrt.in_session(stepping(change))
    read = mtf.pjrt.in_session(stepping(lambda step: tf.assign_add(step, 10)))
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        assert [session.run(made)["before"] for _ in range(3)] == [0, 1, 2]
        assert session.run([read["before"], read["changed"]]) == [3, 13]
        assert session.run(tf.train.get_global_step()) == 13


def test_what_is_read_after_assignments_is_the_new_value(tf_graph):
    """Also in what is computed of it: another assignment, a loop, and what is read in between."""
    other = tf.get_variable("other", [], tf.int64, initializer=tf.zeros_initializer())
    between = []

    def change(step):
        tf.assign(step, 2 * step.read_value())
        between.append(3 * step.read_value())
        tf.assign_sub(other, step.read_value())
        return tf.assign_add(step, 1)

    def after(step):
        read = step.read_value()
        doubled = tf.while_loop(lambda x: x < 100, lambda x: x + read, [read])
        return {"between": between[-1], "twice": 2 * read, "looped": doubled}

    tf.train.get_or_create_global_step()
    made = mtf.pjrt.in_session(stepping(change, after))
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        found = [session.run(made) for _ in range(3)]
        assert [x["before"] for x in found] == [0, 1, 3]
        assert [x["between"] for x in found] == [0, 6, 18]
        assert [x["changed"] for x in found] == [1, 3, 7]
        assert [x["twice"] for x in found] == [2, 6, 14]
        assert [x["looped"] for x in found] == [100, 102, 105]
        assert session.run([tf.train.get_global_step(), other]) == [7, -8]


def test_wrong_assignments(tf_graph):
    def change(step):
        return tf.cond(tf.equal(step.read_value(), 1), lambda: tf.assign_add(step, 1).op, tf.no_op)

    tf.train.get_or_create_global_step()
    with pytest.raises(ValueError, match=r"not within a loop or a condition\. Do this outside"):
        mtf.pjrt.in_session(stepping(change))


def on_two_meshes():
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    x = mtf.ones(mesh, "batch:2")
    for _ in range(2):
        lowering = mtf.Lowering(mesh.graph, {mesh: mtf.GspmdMeshImpl("rows:2", "batch:rows")})
    return lowering.export_to_tf_tensor(x)


def of_words():
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    length = tf.strings.length(
        words := tf.get_default_graph().outer_graph.get_tensor_by_name("w:0")
    )
    del words
    x = mtf.import_tf_tensor(mesh, length, mtf.Shape([("batch", 2)]))
    lowering = mtf.Lowering(mesh.graph, {mesh: mtf.GspmdMeshImpl("rows:2", "batch:rows")})
    return lowering.export_to_tf_tensor(x)


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (lambda: tf.constant(1), "runs on 0 meshes: lower it with one mtf.GspmdMeshImpl"),
        (on_two_meshes, "runs on 2 meshes"),
        (of_words, "is a string of TensorFlow, and not on these devices. Compute what depends"),
        (lambda: mtf.pjrt.in_session(on_two_meshes), "within a program that XLA compiles"),
        (lambda: {"loss": None}, "returns no tensor and no operation, so no session could run it"),
    ],
    ids=["no mesh", "two meshes", "words", "nested", "nothing"],
)
def test_wrong_programs(program, message, tf_graph):
    tf.placeholder(tf.string, [2], name="w")
    with pytest.raises(ValueError, match=message):
        mtf.pjrt.in_session(program)


def test_in_eager_code():
    with pytest.raises(ValueError, match=r"In eager code use mtf\.pjrt\.function"):
        mtf.pjrt.in_session(on_two_meshes)
