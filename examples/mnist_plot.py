"""Progress of the MNIST example: tables in the terminal, and a plot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

# --- In the terminal ---


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Formats rows as text in columns."""
    widths = [max(map(len, column)) for column in zip(header, *rows)]
    lines = [header, ["-" * width for width in widths], *rows]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in lines
    )


def layout_text(lowering: Any, mesh_impl: Any, variables: Sequence[Any]) -> str:
    """Describes the mesh, how variables are split, and what a step communicates.

    Args:
      lowering: a Lowering.
      mesh_impl: a PlacementMeshImpl.
      variables: mtf Variables.
    """
    mesh = ", ".join(f"{d.name}={d.size}" for d in mesh_impl.shape) or "one processor"
    chosen = "" if any(mesh_impl.devices) else ", which XLA may choose otherwise"
    return f"""\
mesh     {mesh} on {", ".join(filter(None, mesh_impl.devices)) or "devices of JAX"}
layout   {mesh_impl.layout_rules}

{variable_table(mesh_impl, variables)}

Communication in a training step{chosen}:
{lowering.communication_table()}
"""


def variable_table(mesh_impl: Any, variables: Sequence[Any]) -> str:
    """Returns a table of mtf Variables and how the mesh splits them."""
    rows = []
    for variable in variables:
        axes = mesh_impl.tensor_layout(variable.shape)
        splits = [
            f"{d.name} over {mesh_impl.shape[axis].name}"
            for d, axis in zip(variable.shape, axes)
            if axis is not None
        ]
        shapes = [variable.shape.to_integer_list, mesh_impl.slice_shape(variable.shape)]
        shape, slice_shape = ("x".join(map(str, sizes)) for sizes in shapes)
        rows.append([variable.name, shape, slice_shape, ", ".join(splits) or "replicated"])
    return table(["variable", "shape", "slice", "split"], rows)


# --- The plot ---


def tile_owners(image_shape: Any, mesh_impl: Any) -> list[list[tuple[int, ...]]]:
    """Returns, for each block of an image by row and column, the processors that hold it.

    Args:
      image_shape: [batch, row_blocks, col_blocks, ...].
      mesh_impl: a MeshImpl.
    """
    _, num_rows, num_columns, *_ = image_shape.to_integer_list
    owners: list[list[list[int]]] = [[[] for _ in range(num_columns)] for _ in range(num_rows)]
    _, rows, columns, *_ = mesh_impl.slice_shape(image_shape)
    for pnum in range(mesh_impl.size):
        _, row, column, *_ = mesh_impl.slice_begin(image_shape, pnum)
        for i in range(row, row + rows):
            for j in range(column, column + columns):
                owners[i][j].append(pnum)
    return [[tuple(pnums) for pnums in line] for line in owners]


def plot(
    path: str, history: Sequence[Any], image: np.ndarray, owners: list[list[tuple[int, ...]]]
) -> None:
    """Writes a PNG with the learning curves and the processor that holds each block of an image.

    Args:
      path: the file to write.
      history: the epochs, with `number`, `loss` and `accuracy`.
      image: pixels from 0 to 1.
      owners: the result of `tile_owners`.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.8), layout="constrained")
    FigureCanvasAgg(figure)
    curves, tiles = figure.subplots(1, 2, width_ratios=[1.3, 1])
    _draw_curves(curves, history)
    _draw_tiles(tiles, image, owners)
    figure.savefig(path, format="png", dpi=120)


def _draw_curves(axes: Any, history: Sequence[Any]) -> None:
    loss_color, accuracy_color = "tab:blue", "tab:orange"
    axes.semilogy(
        [e.number for e in history], [e.loss for e in history], color=loss_color, marker="."
    )
    axes.set_xlim(history[0].number - 0.5, history[-1].number + 0.5)
    axes.set_xlabel("epoch")
    axes.set_ylabel("training loss", color=loss_color)
    axes.grid(alpha=0.3)
    tested = [e for e in history if e.accuracy is not None]
    right = axes.twinx()
    right.plot(
        [e.number for e in tested],
        [100 * e.accuracy for e in tested],
        color=accuracy_color,
        marker=".",
    )
    right.set_ylabel("test accuracy (%)", color=accuracy_color)
    right.set_ylim(top=100)
    axes.set_title(f"final test accuracy {tested[-1].accuracy:.2%}")
    axes.xaxis.get_major_locator().set_params(integer=True)


def _draw_tiles(axes: Any, image: np.ndarray, owners: list[list[tuple[int, ...]]]) -> None:
    from matplotlib import colormaps
    from matplotlib.patches import Patch

    groups = sorted({pnums for row in owners for pnums in row})
    palette = colormaps["tab10" if len(groups) <= 10 else "tab20"]
    colors = {pnums: np.array(palette(i % palette.N)[:3]) for i, pnums in enumerate(groups)}
    rows, columns = len(owners), len(owners[0])
    height, width = image.shape[0] // rows, image.shape[1] // columns
    block_colors = np.array([[colors[pnums] for pnums in row] for row in owners])
    tint = block_colors.repeat(height, axis=0).repeat(width, axis=1)
    ink = image[:, :, None]
    axes.imshow(ink * (0.35 * tint) + (1 - ink) * (0.45 * tint + 0.55), interpolation="nearest")
    for i in range(rows + 1):
        axes.axhline(i * height - 0.5, color="white", linewidth=2)
    for j in range(columns + 1):
        axes.axvline(j * width - 0.5, color="white", linewidth=2)
    axes.set_axis_off()
    axes.set_title(f"{rows} by {columns} blocks of {height} by {width} pixels, by processor")
    axes.legend(
        handles=[Patch(color=colors[pnums], label=_processors(pnums)) for pnums in groups],
        loc="center left",
        bbox_to_anchor=(1.0, 0.5),
        frameon=False,
    )


def _processors(pnums: tuple[int, ...]) -> str:
    noun = "processor" if len(pnums) == 1 else "processors"
    shown = ", ".join(map(str, pnums[:8])) + (", ..." if len(pnums) > 8 else "")
    return f"{noun} {shown}"
