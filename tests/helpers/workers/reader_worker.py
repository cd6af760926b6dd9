"""A script for mesh_tensorflow.launch: each process reads data for its own processors.

    reader_worker.py LAYOUT PER_PROCESS DIRECTORY

Process N writes the first two batches, as the mesh has them, to N.npy in the directory.
"""

import os
import sys

import numpy as np
import tensorflow.compat.v1 as tf

import mesh_tensorflow as mtf
from mesh_tensorflow import launch
from mesh_tensorflow.experimental import input_reader
from mesh_tensorflow.simd_mesh_impl import SimdMeshImpl, replicate

SHAPE = "batch:4,w:4"


def main(layout, per_process, directory):
    tf.disable_v2_behavior()
    mine, per_process = launch.processes(), int(per_process)
    server = mine.start_server(per_process)
    readers = []

    def program():
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        mesh_impl = SimdMeshImpl("rows:2,cols:2", layout)
        readers.append(
            input_reader.SimdMeshImplInputReader(
                mesh_impl,
                lambda: tf.data.Dataset.range(32).batch(4, drop_remainder=True),
                [mtf.convert_to_shape(SHAPE)],
            )
        )
        [piece] = readers[-1].infeed_queue.generate_dequeue_op()
        x = mtf.import_laid_out_tensor(mesh, mesh_impl.LaidOutTensor([piece]), SHAPE)
        x = mtf.cast(x, tf.float32)
        lowering = mtf.Lowering(mesh.graph, {mesh: mesh_impl})
        return lowering.export_to_tf_tensor(x)

    with tf.Graph().as_default():
        whole = replicate(
            program, devices=mine.devices(per_process=per_process), local=mine.local(per_process)
        )
        with tf.Session(server.target, config=mine.config(per_process)) as session:
            mine.initialize(session)
            readers[-1].start_infeed_thread(session)
            found = [mine.run(session, whole, timeout_seconds=60) for _ in range(2)]
    mine.finish(server)
    np.save(os.path.join(directory, f"{mine.index}.npy"), found)


if __name__ == "__main__":
    main(*sys.argv[1:])
