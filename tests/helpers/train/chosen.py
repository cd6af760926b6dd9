"""Trains in several processes in a layout that is chosen, or fails in one of them."""

import itertools
import json
import sys

import mesh_tensorflow as mtf
from helpers.train import linear
from mesh_tensorflow import launch
from mesh_tensorflow.auto_mtf import profiles

__all__ = ["main"]

CALLS = 1  # of the model in the second process: for the cost model, and not in a layout


def failing(mesh, features, training):
    """The linear model, which the second process cannot make any more after a while."""
    global CALLS
    CALLS -= launch.processes().index
    if CALLS < 0:
        raise KeyError("nothing of that name is here")
    return linear.model_fn(mesh, features, training)


def failing_alone():
    """Makes the second process fail where the first one is in a step, which needs both."""
    runner, count = profiles.Processors.runner, itertools.count(1)

    def made(self, *arguments):
        step = runner(self, *arguments)

        def run():
            if next(count) == 30 and launch.processes().index == 1:
                raise OSError("nothing more is here")
            return step()

        return run

    profiles.Processors.runner = made


def main(output, cache, impl, what):
    """Trains; each process writes what it has, or why it has nothing.

    Args:
      output: the path of a file, without the number of the process.
      cache: that of the times and choices.
      impl: the mesh implementation.
      what: "runs", "limit", "other" or "step": what fails.
    """
    if what == "step":
        failing_alone()
    limit = 10.0 if what == "limit" else None
    # Without threads of sessions that are timed, which the times of steps here need not have.
    auto = mtf.auto_mtf.Auto(20, 1, limit, profile=what in ("runs", "step"), cache=cache)
    record = {}
    try:
        result = linear.fit(
            3,
            mesh_shape="rows:2,cols:2",
            mesh_impl=impl,
            layout=auto,
            model_fn=failing if what == "other" else linear.model_fn,
            progress=True,
        )
        record = {"layout": result.layout, "losses": result.losses}
    except Exception as error:
        record = {"error": f"{type(error).__name__}: {error}"}
    with open(f"{output}.{launch.processes().index}", "w") as file:
        json.dump(record, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
