"""Loads a checkpoint of this package into the classic, and one of the classic into this package.

Run by hand, in two steps and two Pythons (see README.md):

    python -m oracle.check_ours_in_classic save DIR      # with this package
    python -m oracle.check_ours_in_classic load DIR      # with the classic
"""

import os
import sys

if "oracle" in sys.executable:
    import classic_shim  # noqa: F401

import numpy as np
import tensorflow.compat.v1 as tf

tf.disable_v2_behavior()

from helpers.oracle import checkpoints, oracle_runner  # noqa: E402

LAYOUT = "batch:x,hidden:y"


def main():
    command, directory = sys.argv[1:]
    path = os.path.join(directory, "ours.ckpt")
    if command == "save":
        os.makedirs(directory, exist_ok=True)
        logits, loss = checkpoints.save(path, oracle_runner.MESH, LAYOUT)
        np.savez(path + ".npz", logits=logits, loss=loss)
        return
    expected = np.load(path + ".npz")
    assert checkpoints.listing(path) == checkpoints.listing(checkpoints.PATH)
    for mesh_shape, layout in [("", ""), (oracle_runner.MESH, LAYOUT)]:
        logits, loss = checkpoints.evaluate(path, mesh_shape, layout)
        worst = np.abs(logits - expected["logits"]).max() / np.abs(expected["logits"]).max()
        print(
            f"mesh {mesh_shape or 1}: logits differ by {worst:.1e}, loss {loss} {expected['loss']}"
        )
        assert worst < 1e-5


if __name__ == "__main__":
    main()
