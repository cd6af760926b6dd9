"""A script of sessions in several processes of JAX: fit, an estimator, and a session itself."""

import json
import os
import signal
import sys

import numpy as np

MESH, LAYOUT = "rows:2,cols:2", "batch:rows,hidden:cols"
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
    return {"losses": result.losses, "evaluations": result.evaluations, "sums": sums}


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
        lowering = mtf.Lowering(mesh.graph, {mesh: mtf.GspmdMeshImpl(MESH, LAYOUT)})
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


def with_utils(directory):
    """Trains a language model by transformer.utils.run."""
    import tensorflow.compat.v1 as tf

    from helpers.oracle import utils_runs as runs
    from mesh_tensorflow.transformer import dataset, utils

    runs.register(dataset)
    tf.flags.FLAGS(["test"])
    further = "run.train_steps = 2\nrun.save_checkpoints_steps = 1\n"
    mesh = 'run.mesh_shape = "rows:2,cols:2"\nrun.mesh_impl = "pjrt"\n'
    runs.call(utils.run, directory, "lm", "train", further + mesh)
    return sorted(name for name in os.listdir(directory) if "tfevents" in name)


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


RUNS = {"fit": with_fit, "session": with_a_session, "utils": with_utils}

if __name__ == "__main__":
    main(*sys.argv[1:])
