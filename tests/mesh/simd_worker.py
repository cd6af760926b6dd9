"""A script for mesh_tensorflow.launch: trains with SIMD over all processes.

    simd_worker.py MESH_SHAPE LAYOUT PER_PROCESS DIRECTORY [fail]

The chief writes losses and weights to a file in the directory, and a checkpoint.
"""

import os
import sys
import time

import numpy as np
import tensorflow.compat.v1 as tf
from test_simd import STEPS, network

import mesh_tensorflow as mtf
from mesh_tensorflow import launch
from mesh_tensorflow.simd_mesh_impl import SimdMeshImpl, replicate


def main(mesh_shape, layout, per_process, directory, fail=""):
    tf.disable_v2_behavior()
    mine, per_process = launch.processes(), int(per_process)
    server = mine.start_server(per_process)
    with tf.Graph().as_default():
        tf.set_random_seed(3)
        step = replicate(
            lambda: network(lambda: SimdMeshImpl(mesh_shape, layout)),
            devices=mine.devices(per_process=per_process), local=mine.local(per_process))
        saver = mtf.checkpoint.Saver(sharded=True)
        init, missing = tf.global_variables_initializer(), tf.report_uninitialized_variables()
        masters = {v.op.name: v for v in tf.global_variables()}
        limit = tf.RunOptions(timeout_in_ms=60000)
        with tf.Session(server.target, config=mine.config(per_process)) as session:
            if mine.is_chief:
                session.run(init, options=limit)
            while session.run(missing, options=limit).size:
                time.sleep(0.1)
            if fail and mine.index == int(fail):
                os.kill(os.getpid(), 9)
            losses = [session.run(step, options=limit)["loss"] for _ in range(STEPS)]
            if mine.is_chief:
                weights = session.run(masters, options=limit)
                saver.save(session, os.path.join(directory, "model"), write_meta_graph=False)
                np.savez(os.path.join(directory, "chief.npz"), losses=losses,
                         **{name.replace("/", "|"): w for name, w in weights.items()})
                print("chief is done", flush=True)
            else:
                print("not to be shown", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
