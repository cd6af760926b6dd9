"""Trains a model of a folder in several processes, each of which reads its slices."""

import json
import sys

import numpy as np

import mesh_tensorflow as mtf
from mesh_tensorflow import launch
from mesh_tensorflow.models._weights import Weights

__all__ = ["main", "on_jax", "train"]


def train(folder, **place):
    """Returns the model, and the Result of three steps from its weights."""
    model = mtf.models.from_pretrained(folder)
    ids = np.arange(2 * 24).reshape(2, 24).astype(np.int32) % 90
    result = mtf.train.fit(
        model.loss, ids, steps=3, dims="batch:2,length:24", progress=False, seed=0,
        optimizer=mtf.optimize.AdamWOptimizer(learning_rate=0.01), init_checkpoint=model.weights,
        **place,
    )  # fmt: skip
    return model, result


def on_jax(folder, output):
    """Each process makes the same calls, on the devices of all, and gets all values."""
    place = {"mesh_shape": "x:4", "layout": "batch:x", "zero": 3, "mesh_impl": "pjrt"}
    model = mtf.models.from_pretrained(folder, **place)
    ids = np.arange(4 * 24).reshape(4, 24).astype(np.int32) % 90
    record = {
        "logits": model.logits(ids).numpy().tolist(),
        "ids": model.generate([[5, 9, 0], [7]], 8),
        "log_probs": model.log_probs([[5, 9, 0]]),
        "losses": mtf.train.fit(
            model.loss, ids, steps=2, dims="batch:4,length:24", progress=False, seed=0,
            optimizer=mtf.optimize.SgdOptimizer(0.1), init_checkpoint=model.weights, **place,
        ).losses,
    }  # fmt: skip
    with open(f"{output}.{launch.processes().index}", "w") as file:
        json.dump(record, file)


def main(folder, output):
    """Each process writes what it has, and how many numbers it has read of the file."""
    parts, read = Weights.parts, []

    def counted(self, name):
        part = parts(self, name)

        def noted(index):
            found = part(index)
            read.append(found.size)
            return found

        return noted

    Weights.parts = counted
    model, result = train(folder, mesh_shape="x:4", layout="batch:x?", simd=True, zero=3)
    total = sum(read)
    # Each process has programs of its own.
    model = mtf.models.from_pretrained(
        folder, mesh_shape="x:2", layout="vocab:x", mesh_impl="simd", zero=3
    )
    model.assign(result.variables)
    record = {
        "losses": result.losses,
        "norms": {n: float(np.abs(v).sum()) for n, v in result.variables.items()},
        "ids": model.generate([[5, 9, 0]], 8),
        "read": total,
    }
    with open(f"{output}.{launch.processes().index}", "w") as file:
        json.dump(record, file)


if __name__ == "__main__":
    {"tensorflow": main, "pjrt": on_jax}[sys.argv[1]](*sys.argv[2:])
