"""Trains the linear model in several processes, as `mesh_tensorflow.launch` starts them."""

import json
import sys

import numpy as np

import mesh_tensorflow as mtf
from helpers.train import linear
from mesh_tensorflow import launch

__all__ = ["EVALUATION", "main"]

# Its last row is not split over the processes.
EVALUATION = {name: array[:11] for name, array in linear.DATA.items()}


class StopsAtTheEnd(mtf.train.Callback):
    """Asks for a stop after the last step, in the process that has callbacks."""

    def on_step(self, run, values):
        if run.step == run.steps:
            run.stop("enough")


def main(directory, output):
    """Trains in two runs, with evaluation; each process writes what it has."""
    arguments = {
        "mesh_shape": "rows:2,cols:2",
        "layout": "batch:rows,in:cols",
        "simd": True,
        "eval_data": EVALUATION,
        "eval_every": 2,
        "save_every": 2,
    }
    first = linear.fit(3, directory=directory, **arguments)
    second = linear.fit(5, directory=directory, callbacks=[StopsAtTheEnd()], **arguments)
    index = launch.processes().index
    with open(f"{output}.{index}", "w") as file:
        record = {
            "losses": first.losses + second.losses,
            "evaluations": [e["loss"] for e in first.evaluations + second.evaluations],
            "norm": float(np.sum(np.abs(second.variables["linear/kernel"]))),
            "checkpoint": second.checkpoint,
        }
        json.dump(record, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
