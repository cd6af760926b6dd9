"""The field is the same in every layout, and has the spectrum that it should have."""

import sys

import numpy as np
import pytest
from helpers.paths import EXAMPLES

sys.path.append(str(EXAMPLES))

import gaussian_random_field as example

# Mesh, layout, and the all-to-alls of three transforms.
LAYOUTS = [
    ("rows:2,cols:2", example.LAYOUT, 6),
    ("rows:2,cols:2", "x:rows,y:cols,kx:rows,ky:cols", 12),
    ("all:4", "z:all,kz:all", 6),
    ("all:4", "z:all,kx:all", 3),
]


@pytest.fixture(scope="module")
def whole():
    return example.main(["--quick", "--mesh_shape=", "--layout="])


@pytest.mark.parametrize("mesh_shape, layout, moves", LAYOUTS)
def test_same_field_in_every_layout(mesh_shape, layout, moves, whole, capsys):
    result = example.main(["--quick", f"--mesh_shape={mesh_shape}", f"--layout={layout}"])
    scale = np.abs(whole.field).max()
    np.testing.assert_allclose(result.field / scale, whole.field / scale, atol=1e-5)
    np.testing.assert_allclose(result.power, whole.power, rtol=1e-4)
    collectives = result.lowering.collectives
    kinds = [c.kind for name, _, c in collectives if name == "FourierOperation"]
    assert kinds == ["alltoall"] * moves
    assert f"layout   {layout}" in capsys.readouterr().out


def test_spectrum(whole):
    """Against NumPy, and against the spectrum that was asked for."""
    power = np.abs(np.fft.fftn(whole.field)) ** 2 * 1000.0**3 / whole.field.size**2
    step = 2 * np.pi / 1000
    k = 2 * np.pi * np.fft.fftfreq(16, 1000 / 16)
    length = np.sqrt(sum(np.square(part) for part in np.meshgrid(k, k, k)))
    shells = [np.abs(length / step - i) < 0.5 for i in range(1, 9)]
    np.testing.assert_allclose(whole.count, [shell.sum() for shell in shells])
    np.testing.assert_allclose(whole.power, [power[s].mean() for s in shells], rtol=1e-3)
    np.testing.assert_allclose(whole.wavenumber, [length[s].mean() for s in shells], rtol=1e-3)
    ratio = whole.power / example.spectrum(whole.wavenumber)
    assert np.abs((ratio - 1) / np.sqrt(2 / whole.count)).max() < 4
    assert abs(whole.field.mean()) < 1e-5


def test_plot(tmp_path):
    path = tmp_path / "field.png"
    example.main(["--quick", f"--plot={path}"])
    assert path.read_bytes().startswith(b"\x89PNG")


def test_seeds_differ(whole):
    other = example.main(["--quick", "--seed=2", "--mesh_shape=", "--layout="])
    assert abs(np.corrcoef(other.field.ravel(), whole.field.ravel())[0, 1]) < 0.2
