"""Trains in several processes in a layout that is chosen, or fails in one of them."""

import json
import sys

import mesh_tensorflow as mtf
from helpers.train import linear
from mesh_tensorflow import launch

__all__ = ["main"]

CALLS = 1  # of the model in the second process: for the cost model, and not in a layout


def failing(mesh, features, training):
    """The linear model, which the second process cannot make any more after a while."""
    global CALLS
    CALLS -= launch.processes().index
    if CALLS < 0:
        raise KeyError("nothing of that name is here")
    return linear.model_fn(mesh, features, training)


def main(output, cache, impl, what):
    """Trains; each process writes what it has, or why it has nothing.

    Args:
      output: the path of a file, without the number of the process.
      cache: that of the times and choices.
      impl: the mesh implementation.
      what: "runs", "limit" or "other": what fails.
    """
    limit = 10.0 if what == "limit" else None
    # Without threads of sessions that are timed, which the times of steps here need not have.
    auto = mtf.auto_mtf.Auto(20, 1, limit, profile=what == "runs", cache=cache)
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
