"""A script for mesh_tensorflow.launch: trains a model in stages, one in each process.

    pipeline_worker.py FILE

The chief writes the losses to the file.
"""

import sys

import numpy as np
import tensorflow.compat.v1 as tf

from helpers.choices import choose
from helpers.transformer import pipelined
from mesh_tensorflow import launch
from mesh_tensorflow.simd_mesh_impl import SimdMeshImpl, replicate


def losses_of(mine, server):
    count = mine.count
    with tf.Graph().as_default():
        tf.set_random_seed(3)
        step = replicate(
            lambda: pipelined.step_of(SimdMeshImpl(f"all:{count}", "stages:all"), count, True),
            devices=mine.devices(per_process=1),
            local=mine.local(1),
        )
        with tf.Session(server.target, config=mine.config(1)) as session:
            mine.initialize(session, None)
            return [float(mine.run(session, step)["loss"]) for _ in range(pipelined.STEPS)]


def main(path):
    tf.disable_v2_behavior()
    mine = launch.processes()
    server = mine.start_server(1)
    losses = losses_of(mine, server)
    if mine.is_chief:
        np.save(path, losses)
    mine.finish(server)


if __name__ == "__main__":
    choose()
    main(*sys.argv[1:])
