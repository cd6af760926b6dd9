"""A script that trains in several processes of JAX, and writes down what it saw."""

import glob
import json
import os
import shutil
import signal
import sys

WEIGHTS = [[float(i + j) for j in range(6)] for i in range(4)]


def main(directory, killed=""):
    import jax
    import tensorflow as tf

    import mesh_tensorflow as mtf
    from helpers import pjrt
    from mesh_tensorflow.pjrt import _devices

    devices = None
    if killed:
        # As a script that has joined them itself, and chooses devices.
        _devices.make_cpus(4)
        _devices.join()
        devices = jax.devices()
    step = mtf.pjrt.function(
        pjrt.training(mtf.pjrt.mesh_impl),
        mesh_shape=pjrt.MESH,
        layout=pjrt.LAYOUT,
        devices=devices,
    )
    index = jax.process_index()
    if not killed:
        tf.random.set_seed(5)
    losses = [float(step(pjrt.DATA)) for _ in range(3)]
    path = mtf.pjrt.save(step.store, f"{directory}/model.ckpt", step=3)
    if not killed:
        save_copies(f"{directory}/copies")
    losses.append(float(step(pjrt.DATA)))
    mtf.pjrt.restore(step.store, path)
    found = {
        "files": [] if killed else exported(f"{directory}/exported"),
        "error": error_of_damaged(step.store, path),
        "unwritten": errors_of_files(step.store, directory),
        "losses": losses,
        "devices": [len(jax.devices()), len(jax.local_devices())],
        "sums": {name: float(tf.reduce_sum(step.store.value(name))) for name in step.store.names},
    }
    with open(f"{directory}/{index}.json", "w") as f:
        json.dump(found, f)
    if killed == str(index):
        os.kill(os.getpid(), signal.SIGKILL)
    while killed:
        step(pjrt.DATA)


def product(layout):
    """Returns a program with a weight."""
    import tensorflow as tf

    import mesh_tensorflow as mtf
    from helpers import pjrt

    @mtf.pjrt.function(mesh_shape=pjrt.MESH, layout=layout)
    def program(data):
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        x = mtf.import_tf_tensor(mesh, data, mtf.Shape([("batch", 8), ("d", 4)]))
        shape = mtf.Shape([("d", 4), ("hidden", 6)])
        w = mtf.get_variable(mesh, "w", shape, initializer=tf.constant_initializer(WEIGHTS))
        y = mtf.einsum([x, w], mtf.Shape([("batch", 8), ("hidden", 6)]))
        lowering = mtf.Lowering(mesh.graph, {mesh: mtf.pjrt.mesh_impl()})
        return lowering.export_to_tf_tensor(y)

    return program


def exported(directory):
    """Exports a program whose weight no process has all of; returns the names of the files."""
    import mesh_tensorflow as mtf
    from helpers import pjrt

    program = product("hidden:rows")
    return [os.path.basename(path) for path in mtf.pjrt.export(program, directory, pjrt.DATA)]


def save_copies(directory):
    """Saves a weight that the first process has, where the other one was killed as it saved."""
    import jax
    import numpy as np

    import mesh_tensorflow as mtf
    from helpers import pjrt
    from mesh_tensorflow._mesh.variables.checkpoint_files import Shard, write_parts

    program = product("batch:rows")
    program(pjrt.DATA)
    path = f"{directory}/copies"
    os.makedirs(directory, exist_ok=True)
    if jax.process_index() == 1:
        write_parts(f"{path}.part-1-of-2", [Shard("w", "", np.zeros([4, 6], np.float32))])
    mtf.pjrt.save(program.store, path)


def error_of_damaged(store, path):
    """Returns the error of restoring a copy of which the first part is damaged."""
    import jax

    import mesh_tensorflow as mtf
    from mesh_tensorflow.pjrt._devices import in_any_process

    copy = f"{os.path.dirname(path)}/damaged/model"
    if jax.process_index() == 0:
        os.makedirs(os.path.dirname(copy))
        for file in glob.glob(f"{path}.*"):
            shutil.copy(file, copy + file[len(path) :])
        os.truncate(sorted(glob.glob(f"{copy}.data-*"))[0], 4)
    in_any_process(False)  # once it is copied
    try:
        mtf.pjrt.restore(store, copy)
    except mtf.checkpoint.CheckpointError as error:
        return str(error)
    return None


def errors_of_files(store, directory):
    """Returns the error of an export and of a checkpoint, of which one process cannot write."""
    import jax

    import mesh_tensorflow as mtf

    # A file is where the first process wants a directory, and a directory where it wants a file.
    if jax.process_index() == 0:
        with open(f"{directory}/file", "w"):
            pass
        os.makedirs(f"{directory}/unwritten.part-0-of-2.data-00000-of-00001")
    found = []
    for call in (
        lambda: exported(f"{directory}/file/folder"),
        lambda: mtf.pjrt.save(store, f"{directory}/unwritten"),
    ):
        try:
            call()
        except (OSError, RuntimeError) as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


def with_some(directory):
    """Computes with the devices of the last two of three processes, then with those of all."""
    import jax
    import numpy as np

    import mesh_tensorflow as mtf
    from mesh_tensorflow.pjrt import _devices

    _devices.make_cpus(6)
    _devices.join()
    index = jax.process_index()
    found = []
    for members in ([1, 2], [0, 1], [1, 2], [0, 1, 2]):
        if index not in members:
            continue
        devices = [d for d in jax.devices() if d.process_index in members]

        @mtf.pjrt.function(mesh_shape=f"rows:{len(devices)}", layout="batch:rows", devices=devices)
        def program(n):
            mesh = mtf.Mesh(mtf.Graph(), "mesh")
            # Each device has all of it, so that each process shows its own values.
            y = mtf.random_uniform(mesh, mtf.Shape([("d", n)]))
            lowering = mtf.Lowering(mesh.graph, {mesh: mtf.pjrt.mesh_impl()})
            return lowering.export_to_tf_tensor(y)

        found.append([members, np.asarray(program(4).addressable_data(0)).tolist()])
    with open(f"{directory}/{index}.json", "w") as f:
        json.dump(found, f)


if __name__ == "__main__":
    if sys.argv[2:] == ["some"]:
        with_some(sys.argv[1])
    else:
        main(*sys.argv[1:])
