"""A script that trains in several processes of JAX, and writes down what it saw."""

import json
import os
import signal
import sys


def main(directory, killed=""):
    import jax
    import tensorflow as tf

    import mesh_tensorflow as mtf
    from helpers import pjrt

    step = mtf.pjrt.function(
        pjrt.training(mtf.pjrt.mesh_impl), mesh_shape=pjrt.MESH, layout=pjrt.LAYOUT
    )
    index = jax.process_index()
    if not killed:
        tf.random.set_seed(5)
    losses = [float(step(pjrt.DATA)) for _ in range(3)]
    path = mtf.pjrt.save(step.store, f"{directory}/model.ckpt", step=3)
    losses.append(float(step(pjrt.DATA)))
    mtf.pjrt.restore(step.store, path)
    found = {
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


if __name__ == "__main__":
    main(*sys.argv[1:])
