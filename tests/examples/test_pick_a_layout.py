"""The example picks a layout, and measures it beside others."""

import sys

import pytest
from helpers.paths import EXAMPLES

from mesh_tensorflow.auto_mtf import hardware

sys.path.append(str(EXAMPLES))

import pick_a_layout


@pytest.mark.slow("mnist-simd*", "transformer*")
@pytest.mark.parametrize("model, placement", [("mnist", "simd"), ("transformer", "shared")])
def test_example(model, placement, tmp_path, capsys, tf_graph):
    machine = hardware.Hardware(
        "here",
        {"float32": 3e10},
        1e10,
        1e9,
        hardware.Link(1e9, 5e-5),
        operation_seconds=1e-5,
        one_memory=placement == "shared",
    )
    path, plot = tmp_path / "machine.json", tmp_path / "layouts.png"
    machine.save(str(path))
    found = pick_a_layout.main(
        [
            f"--model={model}",
            "--layouts=3",
            "--runs=1",
            "--rounds=1",
            f"--hardware={path}",
            f"--placement={placement}",
            f"--plot={plot}",
        ]
    )
    tried = found[model]
    assert len(tried) >= 3 and min(t.measured for t in tried) > 0
    assert tried[0].estimated == min(t.estimated for t in tried)
    printed = capsys.readouterr().out
    assert "<- chosen" in printed and "rank correlation" in printed
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_spearman():
    assert pick_a_layout.spearman([(1, 10), (2, 20), (3, 30)]) == pytest.approx(1)
    assert pick_a_layout.spearman([(1, 3), (2, 2), (3, 1)]) == pytest.approx(-1)
    assert pick_a_layout.spearman([(1, 1), (1, 2), (2, 2), (3, 4)]) == pytest.approx(
        0.8333, abs=1e-3
    )
