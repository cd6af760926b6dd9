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


def refused(use, variables, **mesh):
    """Returns the text of the error of a function that uses weights in one process alone."""
    try:
        use(linear.model_fn, linear.DATA, directory=variables, dims=linear.DIMS, **mesh)
    except ValueError as error:
        return str(error)
    return ""


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
    mesh = {name: arguments[name] for name in ("mesh_shape", "layout", "simd")}
    uses = [mtf.train.evaluate, mtf.train.predict]
    index = launch.processes().index
    with open(f"{output}.{index}", "w") as file:
        record = {
            "losses": first.losses + second.losses,
            "evaluations": [e["loss"] for e in first.evaluations + second.evaluations],
            "norm": float(np.sum(np.abs(second.variables["linear/kernel"]))),
            "checkpoint": second.checkpoint,
            "refused": [refused(use, second.variables, **mesh) for use in uses],
        }
        json.dump(record, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
