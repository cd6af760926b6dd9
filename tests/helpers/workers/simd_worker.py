"""A script for mesh_tensorflow.launch: trains with SIMD over all processes.

    simd_worker.py MESH_SHAPE LAYOUT PER_PROCESS DIRECTORY [FAIL [RESUME]]

FAIL is the number of a process that kills itself, RESUME anything to start from the checkpoint.
The chief writes losses and weights to a file in the directory, and a checkpoint.
"""

import os
import sys

import numpy as np
import tensorflow.compat.v1 as tf

import mesh_tensorflow as mtf
from helpers.choices import choose
from helpers.mesh.residual_network import STEPS, network
from mesh_tensorflow import launch
from mesh_tensorflow.simd_mesh_impl import SimdMeshImpl, replicate


def main(mesh_shape, layout, per_process, directory, fail="", resume=""):
    tf.disable_v2_behavior()
    mine, per_process = launch.processes(), int(per_process)
    server = mine.start_server(per_process)
    with tf.Graph().as_default():
        tf.set_random_seed(3)
        step = replicate(
            lambda: network(lambda: SimdMeshImpl(mesh_shape, layout)),
            devices=mine.devices(per_process=per_process),
            local=mine.local(per_process),
        )
        saver = mtf.checkpoint.Saver(sharded=True)
        masters = {v.op.name: v for v in tf.global_variables()}
        limit = tf.RunOptions(timeout_in_ms=60000)
        checkpoint = os.path.join(directory, "model") if resume else None
        with tf.Session(server.target, config=mine.config(per_process)) as session:
            mine.initialize(session, checkpoint)
            if fail and mine.index == int(fail):
                os.kill(os.getpid(), 9)
            seconds = 20 if fail else 60
            losses = [
                mine.run(session, step, timeout_seconds=seconds)["loss"] for _ in range(STEPS)
            ]
            if mine.is_chief:
                weights = session.run(masters, options=limit)
                saver.save(session, os.path.join(directory, "model"), write_meta_graph=False)
                np.savez(
                    os.path.join(directory, "chief.npz"),
                    losses=losses,
                    **{name.replace("/", "|"): w for name, w in weights.items()},
                )
                print("chief is done", flush=True)
            else:
                print("not to be shown", flush=True)
            mine.finish(server)


if __name__ == "__main__":
    choose()
    main(*sys.argv[1:])
