"""Scripts of users: training loops, variables, devices."""

import os

import numpy as np
import tensorflow.compat.v1 as tf

import mesh_tensorflow as mtf
from helpers.oracle.oracle_runner import array
from helpers.oracle.script_helpers import D, placement, script, value_of


def bigram_model(mesh, features, vocab, scale=0.3):
    """Returns (loss, logits) of a model with one variable: logits of the next id."""
    table = mtf.get_variable(
        mesh,
        "bigram",
        mtf.Shape([vocab, D("next", vocab.size)]),
        initializer=tf.constant_initializer(scale * array("normal", [vocab.size] * 2, "bigram")),
    )
    next_dim = table.shape.dims[1]
    logits = mtf.gather(table, features, vocab)
    length = features.shape.dims[1]
    targets = mtf.shift(features, -1, length, wrap=False)
    loss = mtf.layers.softmax_cross_entropy_with_logits(
        logits, mtf.one_hot(targets, next_dim), next_dim
    )
    weights = mtf.to_float(mtf.not_equal(targets, 0))
    return mtf.reduce_sum(loss * weights) / mtf.reduce_sum(weights), logits


@script
def language_model_loop(tmp):
    """A loop over a tf.data set, with a schedule from the global step and Adafactor."""
    batch, length, vocab = D("batch", 8), D("length", 6), D("vocab", 12)
    data = array(12, [32, 6], "lm")
    dataset = tf.data.Dataset.from_tensor_slices(data).repeat().batch(8, drop_remainder=True)
    ids = tf.data.make_one_shot_iterator(dataset).get_next()
    global_step = tf.train.get_or_create_global_step()
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "lm_mesh")
    loss, logits = bigram_model(
        mesh, mtf.import_tf_tensor(mesh, ids, mtf.Shape([batch, length])), vocab
    )
    grads = mtf.gradients([loss], [v.outputs[0] for v in graph.trainable_variables])
    rate = 0.5 * tf.minimum(1.0, (tf.to_float(global_step) + 1.0) / 4.0)
    optimizer = mtf.optimize.AdafactorOptimizer(learning_rate=rate, min_dim_size_to_factor=4)
    updates = optimizer.apply_grads(grads, graph.trainable_variables)
    impl = placement(layout="batch:x,vocab:y")
    lowering = mtf.Lowering(graph, {mesh: impl})
    tf_loss = lowering.export_to_tf_tensor(loss)
    tf_updates = [lowering.lowered_operation(op) for op in updates]
    with tf.control_dependencies(tf_updates):
        train_op = tf.assign_add(global_step, 1)
    losses = []
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        session.run(lowering.copy_masters_to_slices())
        for _ in range(8):
            losses.append(session.run([tf_loss, train_op])[0])
        session.run(lowering.copy_slices_to_masters())
        table = value_of(session, "bigram")
    return {"losses": np.array(losses), "table": table, "logits": str(logits.shape.to_string)}


@script
def monitored_session(tmp):
    """MonitoredTrainingSession with the restore hook and the saver's listener, then a restart."""
    losses, names = [], None
    for run in range(2):
        with tf.Graph().as_default():
            step = tf.train.get_or_create_global_step()
            graph = mtf.Graph()
            mesh = mtf.Mesh(graph, "mesh")
            batch, length, vocab = D("batch", 4), D("length", 6), D("vocab", 12)
            ids = tf.constant(array(12, [4, 6], "monitored"))
            loss, _ = bigram_model(
                mesh, mtf.import_tf_tensor(mesh, ids, mtf.Shape([batch, length])), vocab
            )
            grads = mtf.gradients([loss], [v.outputs[0] for v in graph.trainable_variables])
            optimizer = mtf.optimize.AdamWeightDecayOptimizer(learning_rate=0.05)
            updates = optimizer.apply_grads(grads, graph.trainable_variables)
            lowering = mtf.Lowering(graph, {mesh: placement(layout="batch:x,vocab:y")})
            tf_loss = tf.to_float(lowering.export_to_tf_tensor(loss))
            train = [lowering.lowered_operation(op) for op in updates]
            with tf.control_dependencies(train):
                train_op = tf.assign_add(step, 1)
            saver = tf.train.Saver(
                tf.global_variables(), sharded=True, max_to_keep=3, save_relative_paths=True
            )
            tf.add_to_collection(tf.GraphKeys.SAVERS, saver)
            hooks = [
                mtf.MtfRestoreHook(lowering),
                tf.train.CheckpointSaverHook(
                    tmp,
                    save_steps=2,
                    saver=saver,
                    listeners=[mtf.MtfCheckpointSaverListener(lowering)],
                ),
                tf.train.StopAtStepHook(num_steps=4),
            ]
            with tf.train.MonitoredTrainingSession(
                checkpoint_dir=tmp,
                hooks=hooks,
                save_checkpoint_secs=None,
                save_summaries_steps=None,
                log_step_count_steps=None,
            ) as session:
                while not session.should_stop():
                    losses.append(session.run([tf_loss, train_op])[0])
    path = tf.train.latest_checkpoint(tmp)
    reader = tf.train.load_checkpoint(path)
    types = reader.get_variable_to_dtype_map()
    names = [
        [n, list(s), types[n].name] for n, s in sorted(reader.get_variable_to_shape_map().items())
    ]
    values = {n: reader.get_tensor(n) for n, _, _ in names}
    return {
        "losses": np.array(losses),
        "names": names,
        "path": os.path.basename(path),
        **{"saved/" + n: v for n, v in values.items()},
    }


@script
def stacked_variables(tmp):
    """Autostacking: names in the graph, and masters as they were."""
    result = {}
    for autostack in (True, False):
        with tf.Graph().as_default():
            graph = mtf.Graph()
            mesh = mtf.Mesh(graph, "mesh")
            shape = mtf.Shape([D("d", 6)])
            vs = [
                mtf.get_variable(
                    mesh, f"v{i}", shape, initializer=tf.constant_initializer(float(i))
                )
                for i in range(3)
            ]
            y = mtf.add_n([v * float(i + 1) for i, v in enumerate(vs)])
            grads = mtf.gradients([mtf.reduce_sum(mtf.square(y))], vs)
            updates = mtf.optimize.SgdOptimizer(0.01).apply_grads(grads, graph.trainable_variables)
            lowering = mtf.Lowering(graph, {mesh: placement(layout="d:x")}, autostack=autostack)
            tf_y, train = (
                lowering.export_to_tf_tensor(y),
                [lowering.lowered_operation(u) for u in updates],
            )
            to_masters = lowering.copy_slices_to_masters()
            with tf.Session() as session:
                session.run(tf.global_variables_initializer())
                session.run(lowering.copy_masters_to_slices())
                first = session.run(tf_y)
                session.run(train)
                session.run(to_masters)
                after = [value_of(session, f"v{i}") for i in range(3)]
            key = "stacked" if autostack else "apart"
            result[key + "/first"], result[key + "/after"] = first, np.stack(after)
            result[key + "/all"] = [v.name for v in graph.all_variables]
            result[key + "/masters"] = [v.op.name for v in tf.global_variables()]
            result[key + "/slices"] = sorted(v.op.name for v in tf.trainable_variables())
    return result


@script
def assignments_in_order(tmp):
    """A moving average read after its update, and assignments joined by the graph."""
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")
    shape = mtf.Shape([D("d", 6)])
    average = mtf.get_variable(
        mesh, "average", shape, initializer=tf.zeros_initializer(), trainable=False
    )
    count = mtf.get_variable(
        mesh, "count", [], dtype=tf.int32, initializer=tf.zeros_initializer(), trainable=False
    )
    x = mtf.import_tf_tensor(mesh, tf.constant(array("normal", [6], "average")), shape)
    update = mtf.assign(average, average * 0.5 + x * 0.5)
    more = mtf.assign_add(count, mtf.constant(mesh, 2, dtype=tf.int32))
    after = mtf.depend(average, [update])
    impl = placement(layout="d:x")
    lowering = mtf.Lowering(graph, {mesh: impl})
    tf_after, tf_count = lowering.export_to_tf_tensor(after), lowering.lowered_operation(more)
    to_masters = lowering.copy_slices_to_masters()
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        session.run(lowering.copy_masters_to_slices())
        session.run(tf_count)
        values = [session.run([tf_after, tf_count])[0] for _ in range(3)]
        stale = value_of(session, "count")
        session.run(to_masters)
        masters = {name: value_of(session, name) for name in ("average", "count")}
    return {
        "values": np.stack(values),
        "after": masters["average"],
        "count": masters["count"],
        "names": [op.name for op in graph.operations],
        "stale": int(stale),
    }


@script
def several_devices(tmp):
    """Four CPU devices of the session, a device function for masters, no autostacking, a log."""
    graph = mtf.Graph()
    mesh = mtf.Mesh(
        graph, "mesh", mtf.utils.BalancedVariablePlacer(["/device:CPU:1", "/device:CPU:2"])
    )
    batch, d, h = D("batch", 4), D("d", 6), D("h", 4)
    x = mtf.import_tf_tensor(
        mesh, tf.constant(array("normal", [4, 6], "devices")), mtf.Shape([batch, d])
    )
    w = mtf.get_variable(
        mesh,
        "w",
        mtf.Shape([d, h]),
        initializer=tf.constant_initializer(array("normal", [6, 4], "w")),
    )
    y = mtf.tanh(mtf.einsum([x, w], output_shape=[batch, h]))
    (dw,) = mtf.gradients([mtf.reduce_sum(mtf.square(y))], [w])
    impl = mtf.placement_mesh_impl.PlacementMeshImpl(
        "x:2,y:2", "batch:x,h:y", [f"/device:CPU:{i}" for i in range(4)]
    )
    log = os.path.join(tmp, "log")
    lowering = mtf.Lowering(graph, {mesh: impl}, autostack=False, log_file=log)
    exported = [lowering.export_to_tf_tensor(t) for t in (y, dw)]
    config = tf.ConfigProto(device_count={"CPU": 4})
    with tf.Session(config=config) as session:
        session.run(tf.global_variables_initializer())
        session.run(lowering.copy_masters_to_slices())
        y, dw = session.run(exported)
    return {
        "y": y,
        "dw": dw,
        "devices": impl.devices,
        "logged": os.path.exists(log),
        "master": [v.device for v in tf.global_variables()],
    }
