"""A script for mesh_tensorflow.launch: trains in stages, whose weights processes store.

    pipeline_weights_worker.py FOLDER

Each process writes its slices of variables after the training, and how many elements all variables
have that exist in it; the chief writes the losses.
"""

import pathlib
import sys

import numpy as np
import tensorflow.compat.v1 as tf

from helpers.choices import choose
from helpers.mesh import pipelined_training
from mesh_tensorflow import launch
from mesh_tensorflow.simd_mesh_impl import SimdMeshImpl, replicate


def main(folder):
    tf.disable_v2_behavior()
    mine = launch.processes()
    server = mine.start_server(1)
    lowerings = []

    def program():
        impl = SimdMeshImpl(f"all:{mine.count}", "stages:all")
        results, lowering = pipelined_training.step_of(impl, mine.count)
        lowerings.append(lowering)
        return results

    with tf.Graph().as_default():
        tf.set_random_seed(3)
        step = replicate(program, devices=mine.devices(per_process=1), local=mine.local(1))
        [lowering] = lowerings
        stored = {v.name: x.slices[mine.index] for v, x in lowering.variables.items()}
        operations = tf.get_default_graph().get_operations()
        handles = [
            op.outputs[0]
            for op in operations
            if op.type == "VarHandleOp"
            and not op.get_attr("shared_name").startswith(b"mtf_number_among")  # a check of devices
        ]
        exist = [tf.raw_ops.VarIsInitializedOp(resource=handle) for handle in handles]
        with tf.Session(server.target, config=mine.config(1)) as session:
            mine.initialize(session, None)
            run = range(pipelined_training.STEPS)
            losses = [float(mine.run(session, step)["loss"]) for _ in run]
            path = pathlib.Path(folder)
            np.savez(path / f"stored{mine.index}.npz", **session.run(stored))
            shapes = [
                tf.TensorShape(handle.op.get_attr("shape"))
                for handle, exists in zip(handles, session.run(exist))
                if exists
            ]
            np.save(path / f"elements{mine.index}.npy", sum(x.num_elements() for x in shapes))
            if mine.is_chief:
                np.save(path / "losses.npy", losses)
            mine.finish(server)


if __name__ == "__main__":
    choose()
    main(*sys.argv[1:])
