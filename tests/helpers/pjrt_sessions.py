"""A script of sessions in several processes of JAX: fit, an estimator, and a session itself."""

import contextlib
import glob
import json
import os
import shutil
import signal
import sys
import warnings

import numpy as np

MESH, LAYOUT = "rows:2,cols:2", "batch:rows,hidden:cols"
SHAPES = {"split": "hidden:8,batch:4", "whole": "other:3", "short": "hidden:4", "single": ""}
INITIAL = {
    "split": np.arange(32.0, dtype=np.float32).reshape(8, 4),
    "whole": np.arange(3.0, dtype=np.float32),
    "short": np.arange(4.0, dtype=np.float32),
    "single": np.float32(5.0),
}
DATA = np.linspace(-1, 1, 64).reshape(16, 4).astype(np.float32)


def with_fit(directory, mesh_impl="pjrt", steps=4):
    """Returns the losses, evaluations and sums of variables of a training."""
    import mesh_tensorflow as mtf

    result = mtf.train.fit(
        lambda mesh, x: loss_of(x),
        DATA,
        steps=steps,
        dims=mtf.Shape([("batch", 8), ("d_in", 4)]).dims,
        optimizer=mtf.optimize.AdamWOptimizer(0.01),
        mesh_shape=MESH,
        layout=LAYOUT,
        mesh_impl=mesh_impl,
        eval_data=DATA[:8],
        eval_every=2,
        directory=directory,
        save_every=2,
        log_every=1,
        seed=1,
        progress=False,
    )
    sums = {name: float(np.abs(value).sum()) for name, value in result.variables.items()}
    means = mtf.train.evaluate(
        lambda mesh, x: loss_of(x),
        DATA[:8],
        directory=result.variables,
        dims=mtf.Shape([("batch", 8), ("d_in", 4)]).dims,
        mesh_shape=MESH,
        layout=LAYOUT,
        mesh_impl=mesh_impl,
    )
    evaluations = [*result.evaluations, means]
    return {"losses": result.losses, "evaluations": evaluations, "sums": sums}


def loss_of(x):
    """Returns the loss of an autoencoder with dropout."""
    import mesh_tensorflow as mtf

    h = mtf.layers.dense(
        x, mtf.Dimension("hidden", 16), x.shape[1:], activation=mtf.relu, name="encode"
    )
    h = mtf.dropout(h, True, keep_prob=0.8)
    y = mtf.layers.dense(h, x.shape[1:], h.shape[1:], name="decode")
    return mtf.reduce_mean(mtf.square(y - x))


def with_a_session(directory):
    """Returns what a session of the first process reads and computes."""
    import tensorflow.compat.v1 as tf

    import mesh_tensorflow as mtf

    return mtf.pjrt.run_in_chief(lambda: _in_session(mtf, tf), lambda found: (found, []))


def _in_session(mtf, tf):
    def program(x):
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        w = mtf.get_variable(mesh, "w", "hidden:16", initializer=tf.ones_initializer())
        double = mtf.assign(mesh.graph.name_to_variable["w"], 2.0 * w)
        whole = 1.0 * w
        total = mtf.reduce_sum(w * mtf.import_tf_tensor(mesh, x, w.shape))
        # The body of a loop is a function, which the other process has to know, too.
        first = mtf.constant(mesh, 0, dtype=tf.int32)
        total = mtf.while_loop(
            lambda i, u: mtf.less(i, 2), lambda i, u: [i + 1, 2.0 * u], [first, total]
        )[1]
        # Processes tell each other what splits a value, also if it is several mesh dimensions.
        impl = mtf.GspmdMeshImpl(MESH, "hidden:cols+rows")
        lowering = mtf.Lowering(mesh.graph, {mesh: impl})
        step = tf.train.get_or_create_global_step()
        done = tf.group(lowering.lowered_operation(double), tf.assign_add(step, 1))
        return lowering.export_to_tf_tensor(total), lowering.export_to_tf_tensor(whole), done

    with tf.Graph().as_default(), tf.Session() as session:
        x = np.arange(16, dtype=np.float32)
        total, whole, done = mtf.pjrt.in_session(program, [tf.constant(x)])
        session.run(tf.global_variables_initializer())
        totals = [float(session.run([total, done])[0]) for _ in range(2)]
        found = session.run(tf.global_variables())
        return {
            "totals": totals,
            "whole": session.run(whole).tolist(),
            "variables": {v.op.name: x.tolist() for v, x in zip(tf.global_variables(), found)},
        }


def with_savers(directory):
    """Returns what is in a checkpoint that two processes wrote, and what they were asked for."""
    import mesh_tensorflow as mtf

    return mtf.pjrt.run_in_chief(lambda: _saved(directory), lambda found: (found, []))


@contextlib.contextmanager
def calls_of_crew():
    """Context that yields a list, to which the calls of the chief are added."""
    from mesh_tensorflow.pjrt._programs import PeerProcesses

    usual, calls = PeerProcesses.do, []

    def do(self, message, own):
        calls.append(message.call)
        return usual(self, message, own)

    PeerProcesses.do = do
    try:
        yield calls
    finally:
        PeerProcesses.do = usual


def variables_program(mesh_impl):
    """Returns the step of a program with a variable of each kind; see `INITIAL`."""
    import tensorflow.compat.v1 as tf

    import mesh_tensorflow as mtf

    def program():
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        made = [
            mtf.get_variable(
                mesh,
                name,
                shape,
                master_dtype=tf.float32,
                slice_dtype=tf.bfloat16 if name == "short" else tf.float32,
                activation_dtype=tf.float32,
                initializer=tf.constant_initializer(INITIAL[name]),
            )
            for name, shape in SHAPES.items()
        ]
        variables = mesh.graph.name_to_variable
        doubled = [mtf.assign(variables[w.operation.name], 2.0 * w) for w in made]
        lowering = mtf.Lowering(mesh.graph, {mesh: mesh_impl})
        return tf.group([lowering.lowered_operation(x) for x in doubled])

    return program


def restored(path, mesh_impl, pjrt=True):
    """Returns the values after a step from a checkpoint, and the calls of the chief."""
    import tensorflow.compat.v1 as tf

    import mesh_tensorflow as mtf

    config = tf.ConfigProto(device_count={"CPU": 4})
    with tf.Graph().as_default(), tf.Session(config=config) as session, calls_of_crew() as calls:
        tf.train.get_or_create_global_step()
        program = variables_program(mesh_impl)
        step = mtf.pjrt.in_session(program) if pjrt else program()
        mtf.checkpoint.Saver(sharded=True).restore(session, path)
        before = list(calls)
        session.run(step)
        values = {v.op.name: v.eval(session).tolist() for v in tf.global_variables()}
        return values, before


def _saved(directory):
    import tensorflow.compat.v1 as tf

    import mesh_tensorflow as mtf

    with tf.Graph().as_default(), tf.Session() as session, calls_of_crew() as calls:
        count = tf.train.get_or_create_global_step()
        step = mtf.pjrt.in_session(variables_program(mtf.GspmdMeshImpl(MESH, LAYOUT)))
        saver = mtf.checkpoint.Saver(sharded=True)
        unsharded = mtf.checkpoint.Saver([v for v in tf.global_variables() if v is not count])
        plain = tf.train.Saver()
        session.run(tf.global_variables_initializer())
        session.run([step, count.assign_add(1)])
        del calls[:]
        path = saver.save(session, f"{directory}/model", global_step=count)
        unsharded.save(session, os.path.relpath(f"{directory}/without-step"), write_state=False)
        written = list(calls)
        plain.save(session, f"{directory}/plain", write_state=False)
        plain.restore(session, f"{directory}/plain")
        whole = calls[len(written) :]
        errors = _faults(session, saver, directory, path)
    with_nan = _warnings(lambda: restored(f"{directory}/with-nan", mtf.GspmdMeshImpl(MESH, LAYOUT)))
    other = mtf.GspmdMeshImpl("rows:4", "hidden:rows")
    by_calls = {name: restored(f"{directory}/{name}", other) for name in ("model-1", "plain")}
    return {"written": written, "plain": whole, "with_nan": with_nan, **errors, "again": by_calls}


def _faults(session, saver, directory, path):
    """Returns errors of a process that cannot write, and of damaged and other files."""
    import tensorflow.compat.v1 as tf

    import mesh_tensorflow as mtf

    errors = {"fails": []}
    for process in range(2):  # where it wants to have its file, there is a directory
        os.makedirs(f"{directory}/fails_temp/parts-0-{process}-of-2.data-00000-of-00001")
        errors["fails"].append(_error(lambda: saver.save(session, f"{directory}/fails")))
    for what in ("damaged", "lacks"):
        os.makedirs(f"{directory}/{what}")
    for file in glob.glob(f"{path}.*"):
        shutil.copy(file, f"{directory}/damaged")
    last = sorted(glob.glob(f"{directory}/damaged/*.data-*"))[-1]
    os.truncate(last, 4)
    copy = f"{directory}/damaged/{os.path.basename(path)}"
    errors["damaged"] = _error(lambda: saver.restore(session, copy))
    with tf.Graph().as_default(), tf.Session() as other:
        w = tf.get_variable("split", [4, 4], use_resource=True)
        other.run(w.initializer)
        mtf.checkpoint.Saver([w]).save(other, f"{directory}/lacks/model")
    errors["lacks"] = _error(lambda: saver.restore(session, f"{directory}/lacks/model"))
    unchanged = {v.op.name: v.eval(session).tolist() for v in tf.global_variables()}
    tf.global_variables()[1].load(np.full([8, 4], np.nan, np.float32), session)
    saver.save(session, f"{directory}/with-nan", write_state=False)
    return {**errors, "unchanged": unchanged}


def _warnings(function):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        function()
    return [str(w.message) for w in caught if "not numbers" in str(w.message)]


def _error(function):
    try:
        function()
    except ValueError as error:
        return str(error)
    return None


def with_utils(directory):
    """Trains a language model by transformer.utils.run."""
    import tensorflow.compat.v1 as tf

    from helpers.oracle import utils_runs as runs
    from mesh_tensorflow.transformer import dataset, utils

    runs.register(dataset)
    tf.flags.FLAGS(["test"])
    further = "run.train_steps = 2\nrun.save_checkpoints_steps = 1\n"
    mesh = 'run.mesh_shape = "rows:2,cols:2"\nrun.mesh_impl = "pjrt"\n'
    with calls_of_crew() as calls:
        runs.call(utils.run, directory, "lm", "train", further + mesh)
    events = sorted(name for name in os.listdir(directory) if "tfevents" in name)
    return {"events": events, "calls": sorted(set(calls))}


def with_an_estimator(directory):
    """Returns metrics, a prediction and the calls of the chief in training, and after it."""
    import tensorflow.compat.v1 as tf

    import mesh_tensorflow as mtf
    from mesh_tensorflow.estimator import tpu

    def input_fn(params):
        return tf.data.Dataset.from_tensors(tf.ones([params["batch_size"], 4])).repeat(2)

    def main():
        config = tpu.RunConfig(
            model_dir=directory,
            save_checkpoints_steps=1,
            tpu_config=tpu.TPUConfig(mesh_impl="pjrt"),
        )
        sizes = {f"{name}_batch_size": 8 for name in ("train", "eval", "predict")}
        model = tpu.TPUEstimator(_model_fn, config=config, **sizes)
        with calls_of_crew() as calls:
            model.train(input_fn, steps=1)
            first = sorted(set(calls))
            del calls[:]
            model.train(input_fn, steps=1)
            metrics = {name: float(value) for name, value in model.evaluate(input_fn).items()}
            predicted = next(model.predict(input_fn))["y"].tolist()
            return {
                "metrics": metrics,
                "predicted": predicted,
                "first": first,
                "then": sorted(set(calls)),
            }

    return mtf.pjrt.run_in_chief(main, lambda found: (found, []))


def _model_fn(features, labels, mode, params):
    import tensorflow.compat.v1 as tf

    import mesh_tensorflow as mtf
    from mesh_tensorflow.estimator import tpu

    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    x = mtf.import_tf_tensor(mesh, features, f"batch:{params['batch_size']},hidden:4")
    w = mtf.get_variable(mesh, "w", x.shape[1:], initializer=tf.ones_initializer())
    y = x * w
    loss = mtf.reduce_mean(mtf.square(y - 2.0))
    if mode == "train":
        [gradient] = mtf.gradients([loss], [w])
        update = mtf.assign(mesh.graph.name_to_variable["w"], w - gradient)
    lowering = mtf.Lowering(mesh.graph, {mesh: mtf.GspmdMeshImpl(MESH, LAYOUT)})
    values, loss = (lowering.export_to_tf_tensor(t) for t in (y, loss))
    with mtf.utils.outside_all_rewrites():
        hooks = [mtf.MtfRestoreHook(lowering)]
    if mode == "infer":
        return tpu.TPUEstimatorSpec(mode, predictions={"y": values}, prediction_hooks=hooks)
    if mode == "eval":
        mean = (lambda y: {"mean": tf.metrics.mean(y)}), [values]
        return tpu.TPUEstimatorSpec(mode, loss=loss, eval_metrics=mean, evaluation_hooks=hooks)
    step = tf.assign_add(tf.train.get_global_step(), 1)
    done = tf.group(lowering.lowered_operation(update), step)
    return tpu.TPUEstimatorSpec(mode, loss=loss, train_op=done, training_hooks=hooks)


def main(what, directory, killed=""):
    """Writes what was found, in each process."""
    index = int(json.loads(os.environ["TF_CONFIG"])["task"]["type"] == "worker")
    if killed == str(index):
        _die_later(directory)
    found = RUNS[what](directory, **({"steps": 10**6} if killed else {}))
    print(f"{what} is done in process {index}")
    with open(f"{directory}/{index}.json", "w") as f:
        json.dump(found, f)


def _die_later(directory):
    """Kills this process once there is a checkpoint."""
    import threading
    import time

    def wait():
        while not os.path.exists(f"{directory}/checkpoint"):
            time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, daemon=True).start()


RUNS = {
    "estimator": with_an_estimator,
    "fit": with_fit,
    "savers": with_savers,
    "session": with_a_session,
    "utils": with_utils,
}

if __name__ == "__main__":
    main(*sys.argv[1:])
