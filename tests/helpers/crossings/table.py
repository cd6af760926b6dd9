"""The table: which feature is tried in which front end on which mesh implementation, and how.

`python tests/helpers/crossings/table.py` prints it.
"""

from __future__ import annotations

import contextlib
import fnmatch
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import tensorflow.compat.v1 as tf

from helpers.crossings.feature import STEPS, Outcome
from helpers.crossings.features import FEATURES
from helpers.crossings.front_ends import FRONT_ENDS
from mesh_tensorflow.testing import harness
from mesh_tensorflow.testing.harness import WHOLE, Placing

__all__ = ["CELLS", "MESHES", "Cell", "check_saved", "compare", "run"]

MESH = "rows:2,cols:2"
MESHES = {
    "one device": Placing(MESH, ""),
    "logical CPUs": Placing(MESH, "", apart=True),
    "merged": Placing(MESH, "", merge="device"),
    "SIMD": Placing(MESH, "", simd=True),
    "pjrt": Placing(MESH, "", pjrt=True),
    "processes": Placing(MESH, "", simd=True),  # two of them, in crossings_worker.py
}


class Cell(NamedTuple):
    """A cell of the table.

    Attributes:
      feature: the name of a feature.
      front_end: the name of a front end.
      mesh: the name of a mesh implementation.
      kind: "test", "error" or "dash".
      text: the text of the error, a regular expression; or why there is a dash.
    """

    feature: str
    front_end: str
    mesh: str
    kind: str = "test"
    text: str = ""

    def __str__(self) -> str:
        return f"{self.feature}-{self.front_end}-{self.mesh}".replace(" ", "_")


# Patterns of a feature, a front end and a mesh, and what such cells are: the first that fits.
RULES = [
    ("*", "compiled *", "logical CPUs|SIMD|pjrt|processes", "dash",
     "XLA compiles a step for one device, whose processors are merged: tests/train/test_compiled.py has the "
     "errors"),
    ("Print", "compiled *", "*", "dash", "what XLA compiles cannot print; a warning says so"),
    ("*", "eager|mtf.function|fit of a step", "processes", "dash",
     "such programs are those of one process; several run SIMD programs in sessions, or pjrt's"),
    ("*", "estimator|TPUEstimator|utils.run", "processes", "dash",
     "there the first process has the program, and others its devices: tests/estimator/test_cluster.py "
     "and tests/transformer/test_utils_training.py try that"),
    ("checkpoint of a*", "utils.run", "*", "dash", "its model is not that of the other front ends"),
    ("checkpoint of a*", "*", "processes", "dash",
     "two processes go on where one has ended in the row of a checkpoint of another mesh"),
    ("averages of*|evaluation of av*", "fit", "processes", "error", "fit: average is offered in one process only"),
    ("scalar_summary", "pjrt.function", "*", "dash",
     "what is recorded in a tf.function is a tensor of that function: return it as a metric"),
    ("evaluation*", "eager", "*", "dash", "it evaluates as mtf.function does, whose row is enough"),
    ("evaluation of a counter", "*mtf.function|fit of a step|pjrt.function", "*", "dash",
     "a function does all that it builds, assignments too: an evaluation is built without them"),
    ("evaluation of av*", "*mtf.function|fit of a step|pjrt.function|*stimator|utils.run", "*", "dash",
     "they evaluate the weights of a checkpoint or a store; `fit` knows which are averages"),
    ("evaluation*", "session|pjrt.function", "processes", "dash",
     "what several processes evaluate is a program as that of a step"),
    ("Print", "pjrt.function", "processes", "dash", "XLA runs the program whole"),
    ("*", "eager|mtf.function|fit of a step", "SIMD", "error",
     "replicate makes programs of tf.compat.v1 graphs: call it within"),
    ("*", "eager|mtf.function|fit of a step", "pjrt", "error",
     "in_session makes programs of tf.compat.v1 graphs.*In eager code use mtf.pjrt.function"),
    ("*", "pjrt.function", "one device|logical CPUs|merged|SIMD", "dash",
     "mtf.pjrt.function has a mesh implementation of its own; for the others it is mtf.function"),
    ("*", "eager|mtf.function|fit of a step", "logical CPUs", "dash",
     "a process has the logical devices that it was started with: see tests/mesh and test_eager"),
    ("*", "utils.run", "one device", "dash", "there processors of one device are merged"),
    ("masters of bf*", "utils.run", "*", "dash", "its model is not that of the other front ends"),
    ("ZeRO of bfloat16*", "utils.run", "*", "dash",
     "the order of sums, which rounds bfloat16 otherwise, changes 4 of 512 slots by a third, without ZeRO "
     "too, and those of float32 by 4e-7; its parts are rows of their own"),
    ("averages*", "utils.run", "*", "dash", "it has no such option: its users add what updates them"),
    ("pipeline with dropout*", "utils.run", "*", "dash",
     "the layer is that of the other front ends; a transformer's first dimension is not its batch"),
    ("clipping*", "utils.run", "*", "dash",
     "it has no such option, as the classic: its optimizers clip by themselves"),
    ("scalar_summary", "*mtf.function|fit of a step|pjrt.function", "*", "dash",
     "what is recorded in a tf.function is a tensor of that function: return it as a metric"),
    ("Print", "pjrt.function", "*", "dash", "what XLA compiles cannot print"),
    ("Print", "*", "pjrt", "dash", "what XLA compiles cannot print; a warning says so"),
    ("Operation that no*|convolution*|gather|while_loop|dropout in a loop", "utils.run", "*", "dash",
     "the layer is that of the other front ends; a transformer has no such dimension"),
]  # fmt: skip


def _cell(feature: str, front_end: str, mesh: str) -> Cell:
    names = (feature, front_end, mesh)
    for *patterns, kind, text in RULES:
        if all(
            any(fnmatch.fnmatchcase(name, p) for p in pattern.split("|"))
            for name, pattern in zip(names, patterns)
        ):
            return Cell(*names, kind, text)
    raises = FEATURES[feature].raises
    return Cell(*names, "error" if raises else "test", raises)


CELLS = [_cell(f, e, m) for f in FEATURES for e in FRONT_ENDS for m in MESHES]


def run(feature: str, front_end: str, placing: Placing, plain: bool = False) -> Outcome:
    """Trains the model of a feature, in a folder of its own.

    Args:
      feature: the name of a feature.
      front_end: the name of a front end.
      placing: where it runs.
      plain: whether to leave the feature out.
    """
    chosen, trained = FEATURES[feature], FRONT_ENDS[front_end]
    begins = None if plain and front_end != "utils.run" else chosen.begins  # whose data begin anew
    chosen = chosen.unsplit() if plain else chosen
    first: list[float] = []
    with tempfile.TemporaryDirectory() as directory, chosen.around(), _stderr() as written:
        if begins:
            begun, mesh = begins
            place = MESHES[mesh] if mesh else WHOLE
            first = FRONT_ENDS[begun or front_end](chosen, place, directory, 1).losses
        found = trained(chosen, placing, directory, STEPS)
        found.printed = written()
        check_saved(directory, found)
    if len(found.losses) > 1:
        found.losses = first + found.losses
    return found


def check_saved(directory: str, found: Outcome) -> None:
    """Raises AssertionError if the last checkpoint does not have the variables that were found.

    Args:
      directory: its folder.
      found: what a training there has left.
    """
    reader = tf.train.load_checkpoint(directory)
    for name, value in found.variables.items():
        saved = reader.get_tensor(name)
        # A store tells the values of slices, and files have the dtype of masters.
        np.testing.assert_array_equal(saved, np.asarray(value).astype(saved.dtype), name)


@contextlib.contextmanager
def _stderr() -> Iterator:
    """Context that yields a function of what has been written to stderr, by C++ too."""
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        try:

            def written() -> str:
                sys.stderr.flush()
                file.seek(0)
                return file.read().decode(errors="replace")

            yield written
        finally:
            sys.stderr.flush()
            os.dup2(kept, 2)
            os.close(kept)


def compare(cell: Cell, found: Outcome, wanted: Outcome, checks: bool = True) -> None:
    """Raises AssertionError if a training has other results than it should.

    Args:
      cell: the cell.
      found: what came out.
      wanted: what should.
      checks: whether to do the check of the feature, too.
    """
    feature = FEATURES[cell.feature]
    tolerance = max(feature.tolerance, 1e-3 if cell.front_end == "utils.run" else 0.0)
    harness.assert_close(found.losses, wanted.losses, tolerance, "losses")
    assert found.variables.keys() >= wanted.variables.keys()
    for name, value in wanted.variables.items():
        value = np.asarray(value, np.float32)
        harness.assert_close(np.asarray(found.variables[name], np.float32), value, tolerance, name)
    if wanted.evaluation is not None:
        harness.assert_close(found.evaluation, wanted.evaluation, tolerance, "evaluation")
        if found.predictions is not None:
            harness.assert_close(found.predictions, wanted.predictions, tolerance, "predictions")
    if checks and not (cell.front_end == "utils.run" and feature.gin):
        feature.check(found)


def text() -> str:
    """Returns the table in Markdown, a column for each front end, with notes."""
    notes: dict[str, int] = {}
    short = {"test": "x", "error": "e", "dash": "-"}
    lines = ["| | " + " | ".join(FRONT_ENDS) + " |", "|---" * (len(FRONT_ENDS) + 1) + "|"]
    for feature in FEATURES:
        row = []
        for front_end in FRONT_ENDS:
            cells = [c for c in CELLS if (c.feature, c.front_end) == (feature, front_end)]
            marks = "".join(
                short[c.kind]
                + (f"{notes.setdefault(c.text, len(notes) + 1)}" if c.kind != "test" else "")
                + " "
                for c in cells
            )
            row.append(marks.strip())
        lines.append(f"| {feature} | " + " | ".join(row) + " |")
    lines.append("")
    lines += [f"{number}. {re.sub('[.][*]', ' ... ', note)}" for note, number in notes.items()]
    return "\n".join(lines)


if __name__ == "__main__":
    print(text())
