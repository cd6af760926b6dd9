"""Trains the linear model in as many processes as there are; the second one is killed now and then."""

import json
import os
import pathlib
import signal
import sys

import mesh_tensorflow as mtf
from helpers.train import linear
from mesh_tensorflow import launch

__all__ = ["STEPS", "losses", "main"]

STEPS = 12
_FATAL = {5: "first", 9: "second"}  # steps that the second process does not survive, once each


def _batches(directory, index):
    """Yields the batches of linear.DATA in order."""
    for step in range(1, STEPS + 1):
        if index == 1 and step in _FATAL:
            note = directory / _FATAL[step]
            if not note.exists():
                note.touch()
                os.kill(os.getpid(), signal.SIGKILL)
        start = 4 * ((step - 1) % 3)
        yield {name: array[start : start + 4] for name, array in linear.DATA.items()}


def losses(directory):
    """Returns the loss of each step, as the runs together have logged them."""
    lines = (pathlib.Path(directory) / "model" / "log.jsonl").read_text().splitlines()
    return [record["loss"] for line in lines if "loss" in (record := json.loads(line))]


def main(directory):
    """Trains in processes of a launcher, or goes on."""
    found = launch.processes()
    linear.fit(
        STEPS,
        _batches(pathlib.Path(directory), found.index),
        directory=f"{directory}/model",
        mesh_shape=f"rows:{found.count}",
        layout="batch:rows",
        simd=True,
        save_every=2,
        save_in_background=True,
        eval_data=linear.DATA,
        eval_every=3,
        keep_best="loss",
        callbacks=[mtf.train.JsonLinesLog()],
    )


if __name__ == "__main__":
    main(sys.argv[1])
