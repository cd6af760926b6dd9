"""A linear regression with dropout, and its training in a process of its own."""

import sys

import numpy as np

import mesh_tensorflow as mtf

__all__ = ["BATCH", "DATA", "DIMS", "IN", "OUT", "fit", "model_fn", "train_and_note"]

BATCH, IN, OUT = mtf.Dimension("batch", 4), mtf.Dimension("in", 6), mtf.Dimension("out", 2)
DIMS = {"x": [BATCH, IN], "y": [BATCH, OUT]}
_X = np.random.RandomState(0).randn(12, 6).astype(np.float32)
DATA = {"x": _X, "y": np.stack([_X.sum(1), _X[:, 0]], 1)}


def model_fn(mesh, features, training):
    """The mean squared error, and that of each example."""
    x = mtf.dropout(features["x"], training, rate=0.2)
    y = mtf.layers.dense(x, [OUT], reduced_dims=[IN], name="linear")
    errors = mtf.reduce_mean(mtf.square(y - features["y"]), reduced_dim=OUT)
    return {"loss": mtf.reduce_mean(errors), "error": errors}


def fit(steps, data=None, **arguments):
    """Trains it silently; every step is logged."""
    arguments = {
        "dims": DIMS,
        "optimizer": mtf.optimize.MomentumOptimizer(0.05, 0.9),
        "log_every": 1,
        "progress": False,
        **arguments,
    }
    return mtf.train.fit(
        arguments.pop("model_fn", model_fn), DATA if data is None else data, steps, **arguments
    )


class _Note(mtf.train.Callback):
    """Writes the number of each step to a file."""

    def __init__(self, path):
        self._file = open(path, "w", buffering=1)

    def on_step(self, run, values):
        self._file.write(f"{run.step}\n")


def train_and_note(directory, steps_path, errors_path, **arguments):
    """Trains for very many steps in a process; notes the steps and what is written to stderr."""
    if errors_path is not None:
        sys.stderr = open(errors_path, "w", buffering=1)
    fit(
        10**6,
        directory=directory,
        callbacks=[_Note(steps_path)],
        progress=True,
        log_every=1000,
        **arguments,
    )
