"""Draws a Gaussian random field with a given power spectrum, in a box that is split over a mesh.

    python examples/gaussian_random_field.py
    python examples/gaussian_random_field.py --points=128 --plot=field.png
    python examples/gaussian_random_field.py --mesh_shape=all:4 --layout=x:all,ky:all

White noise is transformed to frequencies, multiplied by the square root of the spectrum, and
transformed back. Then the spectrum of the field is measured. Each of the 2 by 2 processors of the
default mesh has a pencil of the box, which is whole along z. Frequencies are split along ky and kz,
so that a transform in either direction takes two all-to-alls. The field is the same in all layouts.

The spectrum is that of the matter in the universe at early times, in the form of Bardeen et al.,
"The statistics of peaks of Gaussian random fields" (1986). Lengths are in Mpc/h.
"""

from __future__ import annotations

import argparse
import math
import pathlib
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

sys.path.append(str(pathlib.Path(__file__).resolve().parent))


MESH_SHAPE = "rows:2,cols:2"
LAYOUT = "x:rows,y:cols,ky:rows,kz:cols"


def options_of(argv: Sequence[str]) -> argparse.Namespace:
    """Returns the options of a command line."""
    parser = argparse.ArgumentParser(
        prog="python examples/gaussian_random_field.py",
        description=__doc__.splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--points", type=int, default=64, help="of the box, along each side")
    parser.add_argument("--side", type=float, default=1000.0, help="of the box, in Mpc/h")
    parser.add_argument("--seed", type=int, default=1, help="of the noise")
    parser.add_argument("--mesh_shape", default=MESH_SHAPE, help="the mesh")
    parser.add_argument("--layout", default=LAYOUT, help="of x, y, z and kx, ky, kz")
    parser.add_argument("--plot", default="", help="PNG file")
    parser.add_argument("--quick", action="store_true", help="a box of 16 points along each side")
    options = parser.parse_args(argv)
    if options.quick:
        options.points = 16
    if options.points < 8:
        parser.error(f"--points is {options.points}: it has to be 8 or more")
    return options


import numpy as np
import tensorflow as tf

import mesh_tensorflow as mtf


class Box(NamedTuple):
    """A cube with its points and its frequencies.

    Attributes:
      side: the length of an edge.
      space: the Dimensions x, y and z.
      frequencies: the Dimensions kx, ky and kz.
      shells: the Dimension of spherical shells of frequencies.
    """

    side: float
    space: list[mtf.Dimension]
    frequencies: list[mtf.Dimension]
    shells: mtf.Dimension

    @classmethod
    def of(cls, points: int, side: float) -> Box:
        """Returns the box of a number of points along each edge."""
        space, frequencies = (
            [mtf.Dimension(name, points) for name in names.split()]
            for names in ("x y z", "kx ky kz")
        )
        return cls(side, space, frequencies, mtf.Dimension("shell", points // 2))

    @property
    def lowest(self) -> float:
        """The lowest wavenumber but 0; shells are as thick."""
        return 2.0 * math.pi / self.side

    def wavenumber(self, mesh: mtf.Mesh) -> mtf.Tensor:
        """Returns the absolute value of the wave vector of each frequency."""
        distance = self.side / self.space[0].size
        parts = [mtf.signal.fftfreq(mesh, d, distance) * (2.0 * math.pi) for d in self.frequencies]
        squares = mtf.add_n([mtf.square(k) for k in parts])
        return mtf.sqrt(mtf.transpose(squares, self.frequencies))


def transfer(q: Any, log: Any, power: Any) -> Any:
    """Returns the transfer function of cold dark matter, of Tensors or of arrays."""
    polynomial = 1.0 + 3.89 * q + (16.1 * q) ** 2 + (5.46 * q) ** 3 + (6.71 * q) ** 4
    return log(1.0 + 2.34 * q) / (2.34 * q) * power(polynomial, -0.25)


def spectrum(k: Any, log: Any = np.log, power: Any = np.power) -> Any:
    """Returns the power at wavenumbers above 0, of a Tensor or of an array."""
    return 3e6 * k * transfer(k / 0.2, log, power) ** 2


def random_field(mesh: mtf.Mesh, box: Box) -> mtf.Tensor:
    """Returns a Gaussian random field with the power spectrum, over x, y and z."""
    noise = mtf.random_normal(mesh, box.space)
    waves = mtf.signal.fft3d(mtf.cast(noise, tf.complex64), box.space, box.frequencies)
    k = box.wavenumber(mesh)
    # The mean of the field is 0, whatever the spectrum is there.
    power = spectrum(mtf.maximum(k, box.lowest), mtf.log, mtf.pow)
    power *= mtf.cast(mtf.greater(k, 0.0), power.dtype)
    points_per_volume = noise.size / box.side**3
    waves *= mtf.cast(mtf.sqrt(power * points_per_volume), waves.dtype)
    return mtf.real(mtf.signal.ifft3d(waves, box.frequencies, box.space))


def measured_spectrum(field: mtf.Tensor, box: Box) -> list[mtf.Tensor]:
    """Returns the mean wavenumber, the power and the number of waves of each shell."""
    waves = mtf.signal.fft3d(mtf.cast(field, tf.complex64), box.space, box.frequencies)
    power = mtf.square(mtf.abs(waves)) * (box.side**3 / field.size**2)
    k = box.wavenumber(field.mesh)
    number = mtf.to_int32(k * (1.0 / box.lowest) + 0.5) - 1  # frequency 0 is in none
    shell = mtf.one_hot(number, box.shells)
    count = mtf.reduce_sum(shell, output_shape=[box.shells])
    sums = [mtf.einsum([shell, t], output_shape=[box.shells]) for t in (k, power)]
    return [total / count for total in sums] + [count]


class Result(NamedTuple):
    """A field and its spectrum, as arrays, with the sizes of a slice of the field."""

    field: np.ndarray
    wavenumber: np.ndarray
    power: np.ndarray
    count: np.ndarray
    slice_sizes: list[int]
    lowering: mtf.Lowering


def drawn(options: argparse.Namespace) -> Result:
    """Draws a field in a layout, and measures its spectrum."""
    tf.random.set_seed(options.seed)
    mesh = mtf.Mesh(mtf.Graph(), "box")
    box = Box.of(options.points, options.side)
    field = random_field(mesh, box)
    tensors = [field, *measured_spectrum(field, box)]
    processors = mtf.convert_to_shape(options.mesh_shape).size
    mesh_impl = mtf.placement_mesh_impl.PlacementMeshImpl(
        options.mesh_shape, options.layout, [""] * processors, merge="none"
    )
    lowering = mtf.Lowering(mesh.graph, {mesh: mesh_impl})
    arrays = (lowering.export_to_tf_tensor(t).numpy() for t in tensors)
    return Result(*arrays, mesh_impl.slice_shape(field.shape), lowering)


def report(result: Result) -> str:
    """Returns a table of the spectrum, and how far it is from what it should be."""
    given = spectrum(result.wavenumber)
    lines = [f"{'k in h/Mpc':>12}{'waves':>9}{'given':>10}{'measured':>10}{'ratio':>8}"]
    for i in np.unique(np.geomspace(1, len(given), 8).astype(int)) - 1:
        ratio = result.power[i] / given[i]
        lines.append(
            f"{result.wavenumber[i]:12.4f}{result.count[i]:9.0f}{given[i]:10.0f}"
            f"{result.power[i]:10.0f}{ratio:8.3f}"
        )
    # Each wave and its opposite are one: their power varies by its own size.
    deviation = (result.power / given - 1.0) / np.sqrt(2.0 / result.count)
    typical = np.sqrt(np.mean(np.square(deviation)))
    return "\n".join(
        [
            *lines,
            "",
            f"standard deviation of the field {result.field.std():.4f}",
            f"measured and given spectrum differ by {typical:.2f} standard deviations",
        ]
    )


def plot(path: str, result: Result, side: float) -> None:
    """Writes a PNG with a slab of the field, and the measured spectrum over the given one."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.8), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, width_ratios=[1, 1.1])
    limit = 3.0 * result.field.std()
    image = left.imshow(
        result.field[:, :, 0].T, origin="lower", extent=(0, side, 0, side), cmap="RdBu_r",
        vmin=-limit, vmax=limit,
    )  # fmt: skip
    left.set(xlabel="x in Mpc/h", ylabel="y in Mpc/h")
    for line, size in zip((left.axvline, left.axhline), result.slice_sizes):
        for at in range(size, len(result.field), size):
            line(at * side / len(result.field), color="black", lw=0.8)
    left.set_title("the field at z = 0, and the slices of processors")
    figure.colorbar(image, ax=left, shrink=0.85)
    k = np.geomspace(result.wavenumber[0] / 1.2, result.wavenumber[-1] * 1.1, 200)
    right.loglog(k, spectrum(k), color="gray", label="given")
    error = result.power * np.sqrt(2.0 / result.count)
    right.errorbar(
        result.wavenumber, result.power, error, fmt="o", ms=4, color="#d5673a", label="measured"
    )
    right.set(xlabel="k in h/Mpc", ylabel="P(k) in (Mpc/h)³", title="power spectrum")
    right.grid(alpha=0.3)
    right.legend()
    figure.savefig(path, format="png", dpi=120, bbox_inches="tight")


@mtf.strict()
def main(argv: Sequence[str]) -> Result:
    """Prints the communication and the spectrum, and returns the field."""
    options = options_of(argv)
    print(f"mesh     {options.mesh_shape or 'one processor'}")
    print(f"layout   {options.layout or 'no splits'}")
    print(f"box      {options.points} points along each side of {options.side:g} Mpc/h", flush=True)
    result = drawn(options)
    print(f"\n{result.lowering.communication_table()}\n\n{report(result)}")
    if options.plot:
        plot(options.plot, result, options.side)
    return result


if __name__ == "__main__":
    main(sys.argv[1:])
