"""A script for mesh_tensorflow.launch: trains with variables that processes store in parts.

    stored_layouts_worker.py STAGE FOLDER [joint]

With "joint" over both dimensions of a mesh. Each process checks what it stores; the chief writes the losses and the variables.
"""

import pathlib
import sys

import numpy as np
import tensorflow.compat.v1 as tf

from helpers.choices import choose
from helpers.mesh import stored_training
from mesh_tensorflow import launch
from mesh_tensorflow.simd_mesh_impl import SimdMeshImpl, replicate


def main(stage, folder, joint=""):
    tf.disable_v2_behavior()
    mine = launch.processes()
    server = mine.start_server(1)
    lowerings = []

    def program():
        if joint:
            mesh, layout, axis = f"rows:2,cols:{mine.count // 2}", "batch:cols+rows", "rows+cols"
        else:
            mesh, layout, axis = f"all:{mine.count}", "batch:all", "all"
        impl = SimdMeshImpl(mesh, layout, zero=int(stage), zero_axis=axis)
        results, lowering = stored_training.step_of(impl)
        lowerings.append(lowering)
        return results

    with tf.Graph().as_default():
        tf.set_random_seed(3)
        step = replicate(program, devices=mine.devices(per_process=1), local=mine.local(1))
        [lowering] = lowerings
        slices = [laid_out.slices[mine.index] for laid_out in lowering.variables.values()]
        stored = sum(v.shape.num_elements() for v in slices)
        assert stored == stored_training.stored_elements(lowering, int(stage), mine.count)
        with tf.Session(server.target, config=mine.config(1)) as session:
            mine.initialize(session, None)
            losses = [float(mine.run(session, step)["loss"]) for _ in range(stored_training.STEPS)]
            if mine.is_chief:
                values = session.run({v.op.name: v for v in tf.global_variables()})
                np.savez(pathlib.Path(folder) / "found.npz", losses=losses, **values)
            mine.finish(server)


if __name__ == "__main__":
    choose()
    main(*sys.argv[1:])
