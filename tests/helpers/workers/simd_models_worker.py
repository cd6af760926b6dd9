"""A script for mesh_tensorflow.launch: trains the models by SIMD, a processor in each process.

    simd_models_worker.py FILE

The chief writes the losses to the file.
"""

import sys

import numpy as np
import tensorflow.compat.v1 as tf

from helpers.choices import choose
from helpers.mesh import simd_models
from mesh_tensorflow import launch
from mesh_tensorflow.simd_mesh_impl import SimdMeshImpl, replicate


def losses_of(name, mine, server):
    with tf.Graph().as_default():
        tf.set_random_seed(3)
        step = replicate(
            lambda: simd_models.step_of(name, SimdMeshImpl),
            devices=mine.devices(),
            local=mine.local(),
        )
        limit = tf.RunOptions(timeout_in_ms=60000)
        with tf.Session(server.target, config=mine.config()) as session:
            mine.initialize(session)
            return [session.run(step, options=limit)["loss"] for _ in range(simd_models.STEPS)]


def main(path):
    tf.disable_v2_behavior()
    mine = launch.processes()
    server = mine.start_server()
    losses = {name: losses_of(name, mine, server) for name in simd_models.MODELS}
    if mine.is_chief:
        np.savez(path, **losses)
    mine.finish(server)


if __name__ == "__main__":
    choose()
    main(*sys.argv[1:])
