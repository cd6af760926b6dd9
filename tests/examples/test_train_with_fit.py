"""The example of mtf.train.fit: what it learns, in which layouts, and how it goes on."""

import sys

import pytest
from helpers import noise, processes
from helpers.paths import EXAMPLES

sys.path.append(str(EXAMPLES))

import train_with_fit as example

SMALL = {"steps": 12, "hidden_size": 16, "eval_every": 12}


@pytest.mark.slow
def test_learns_in_every_layout():
    results = [
        example.run(example.Options(steps=100, hidden_size=64, **more))
        for more in [{}, {"mesh_shape": "all:2", "layout": "batch:all", "simd": True}]
    ]
    assert all(r.final["eval_accuracy"] > 0.85 for r in results)
    assert results[0].losses == pytest.approx(results[1].losses, rel=1e-2)


@pytest.mark.slow
def test_goes_on_in_another_layout(tmp_path):
    whole = example.run(example.Options(**SMALL))
    directory = str(tmp_path / "digits")
    first = example.run(example.Options(**{**SMALL, "steps": 10}, directory=directory))
    again = example.run(
        example.Options(**SMALL, directory=directory, mesh_shape="all:2", layout="hidden:all")
    )
    assert first.step == 10 and again.step == 12
    assert set(again.variables) == set(whole.variables)


def test_mistakes():
    done = processes.run(EXAMPLES / "train_with_fit.py", "--layout=batch:row")
    assert done.returncode == 2
    assert "row" in noise.check(done).stderr and "Traceback" not in done.stderr
