"""Draws the figures of the documentation: python docs/make_figures.py (needs matplotlib)."""

import itertools
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from matplotlib.patches import FancyArrowPatch, Rectangle

FOLDER = Path(__file__).parent / "figures"
COLOURS = [["#4477aa", "#88bbee"], ["#cc6644", "#f2b48c"]]  # by row, by column
ROW_COLOURS = ["#6699cc", "#e08e66"]
COL_COLOURS = ["#55907a", "#a9d6c4"]
EMPTY, EDGE, GREY = "#f4f4f4", "#333333", "#777777"
MESH = (2, 2)


def colour(rows, cols, row, col):
    """Returns the color of slice (row, col) of a tensor split along rows, columns or both."""
    if rows and cols:
        return COLOURS[row][col]
    return ROW_COLOURS[row] if rows else COL_COLOURS[col]


def outline(axes, x, y, width, height, face=EMPTY, **kwargs):
    """Draws a rectangle."""
    style = {"facecolor": face, "edgecolor": EDGE, "lw": 0.8, **kwargs}
    axes.add_patch(Rectangle((x, y), width, height, **style))


def tensor(axes, x, y, size, split, held=None):
    """Draws a matrix.

    Args:
      axes: the Matplotlib axes to draw on.
      x: the left edge.
      y: the bottom edge.
      size: (width, height).
      split: the mesh axes that split the vertical and the horizontal dimension, or None.
      held: (row, column) of the processor whose slice is colored; None colors all slices.
    """
    width, height = size
    counts = [1 if axis is None else MESH[axis] for axis in split]
    outline(axes, x, y, width, height)
    for i, j in itertools.product(*map(range, counts)):
        place = [0, 0]
        for axis, k in zip(split, (i, j)):
            if axis is not None:
                place[axis] = k
        mine = held is None or all(a is None or held[a] == place[a] for a in split)
        if mine:
            face = colour(0 in split, 1 in split, *place)
            outline(
                axes,
                x + j * width / counts[1],
                y + height - (i + 1) * height / counts[0],
                width / counts[1],
                height / counts[0],
                face,
            )


def label(axes, x, y, text, size=9, **kwargs):
    """Writes text around a point."""
    kwargs = {"ha": "center", "va": "center", "color": EDGE, **kwargs}
    axes.text(x, y, text, fontsize=size, **kwargs)


def canvas(width, height):
    """Returns an empty figure, measured in inches."""
    figure, axes = plt.subplots(figsize=(width, height))
    figure.subplots_adjust(0, 0, 1, 1)
    axes.set_xlim(0, width)
    axes.set_ylim(0, height)
    axes.set_aspect("equal")
    axes.axis("off")
    return figure, axes


def save(figure, name):
    """Writes a figure."""
    FOLDER.mkdir(exist_ok=True)
    figure.savefig(FOLDER / name, facecolor="white", metadata={"Date": None})
    plt.close(figure)


# Name, (vertical, horizontal) dimensions, drawn size, mesh axes that split the dimensions.
TENSORS = [
    ("x", ("batch", "d_model"), (0.9, 1.3), (0, None)),
    ("w", ("d_model", "d_ff"), (1.5, 0.9), (None, 1)),
    ("h", ("batch", "d_ff"), (1.5, 1.3), (0, 1)),
]


def draw_layout():
    """Draws the slices of x, w and h on four processors, in the layout batch:rows, d_ff:cols."""
    figure, axes = canvas(9.0, 5.1)
    centres = [1.55, 4.5, 7.45]
    head = ["h = einsum([x, w])", 'layout "batch:rows,d_ff:cols"', 'mesh "rows:2,cols:2"']
    label(axes, 4.5, 4.85, "      ".join(head), 10)
    for (name, dims, size, split), centre in zip(TENSORS, centres):
        x, y = centre - size[0] / 2, 3.65 - size[1] / 2
        tensor(axes, x, y, size, split)
        label(axes, centre, 4.48, f"{name} [{dims[0]}, {dims[1]}]", 10, weight="bold")
        label(axes, x - 0.12, y + size[1] / 2, dims[0], 8, rotation=90, color=GREY)
        label(axes, centre, y - 0.13, dims[1], 8, color=GREY)
        for row, col in itertools.product(range(2), range(2)):
            left, bottom = centre - 1.22 + col * 1.24, 1.42 - row * 1.16
            outline(axes, left, bottom, 1.2, 1.1, "white")
            small = (size[0] * 0.62, size[1] * 0.62)
            corner = (left + 0.6 - small[0] / 2, bottom + 0.47 - small[1] / 2)
            tensor(axes, *corner, small, split, (row, col))
            label(axes, left + 0.6, bottom + 1.0, f"processor {2 * row + col}", 7, color=GREY)
    label(axes, 0.17, 1.97, "row 0", 8, rotation=90, color=GREY)
    label(axes, 0.17, 0.81, "row 1", 8, rotation=90, color=GREY)
    save(figure, "layout.svg")


def draw_allreduce():
    """Draws how y = h v is computed: partial sums on each processor, then an allreduce."""
    figure, axes = canvas(9.0, 3.3)
    label(axes, 4.5, 3.08, "y = einsum([h, v]) sums over d_ff, which cols splits", 10)
    heads = ["slices of h and v", "partial sums (LazyAllreduceSum)", "allreduce over cols: y"]
    for centre, head in zip((1.6, 4.7, 7.6), heads):
        label(axes, centre, 2.72, head, 9, weight="bold")
    for row, col in itertools.product(range(2), range(2)):
        bottom = 1.4 - row * 1.3
        shift = col * 1.35
        left = 0.35 + shift
        outline(axes, left, bottom, 1.25, 1.15, "white")
        tensor(axes, left + 0.08, bottom + 0.4, (0.6, 0.5), (0, 1), (row, col))
        tensor(axes, left + 0.78, bottom + 0.35, (0.4, 0.6), (1, None), (row, col))
        label(axes, left + 0.625, bottom + 0.17, f"processor {2 * row + col}", 7, color=GREY)
        left = 3.9 + shift * 0.72
        face = ROW_COLOURS[row]
        hatch = "///" if col else "\\\\\\"
        outline(axes, left, bottom + 0.4, 0.6, 0.5, face, hatch=hatch, alpha=0.55)
        outline(axes, 6.8 + shift * 0.72, bottom + 0.4, 0.6, 0.5, face)
    for row in range(2):
        bottom = 1.4 - row * 1.3 + 0.65
        label(axes, 4.7, bottom, "+", 12)
        for start, end in ((3.15, 3.75), (5.65, 6.65)):
            style = {"arrowstyle": "-|>", "mutation_scale": 12, "color": EDGE}
            axes.add_patch(FancyArrowPatch((start, bottom), (end, bottom), **style))
        label(axes, 6.15, bottom + 0.16, "only when\nneeded", 7, color=GREY, va="bottom")
        label(axes, 7.6, bottom, "=", 12)
    save(figure, "allreduce.svg")


STAGES, MICROBATCHES = 4, 8
MICROBATCH_COLOURS = plt.get_cmap("tab20c").colors


def draw_pipeline():
    """Draws what each of four processors computes and sends at each tick of a pipeline."""
    from mesh_tensorflow.layers import PipelineSchedule

    schedule = PipelineSchedule(STAGES, MICROBATCHES)
    figure, axes = canvas(9.0, 3.5)
    head = f"{STAGES} stages, {MICROBATCHES} microbatches: {schedule.ticks} ticks"
    label(axes, 4.5, 3.3, f"{head}, bubble {STAGES - 1}/{schedule.ticks}", 10, weight="bold")
    width, height, left, top = 0.62, 0.42, 1.75, 2.55
    for tick in range(schedule.ticks):
        label(axes, left + (tick + 0.5) * width, top + 0.62, f"tick {tick}", 7, color=GREY)
    for stage in range(STAGES):
        bottom = top - stage * 0.7
        label(axes, 0.1, bottom + 0.3, f"processor {stage}", 8, ha="left")
        label(axes, 0.1, bottom + 0.1, f"weights of stage {stage}", 7, ha="left", color=GREY)
        for tick in range(schedule.ticks):
            found, x = schedule.at(tick, stage), left + tick * width
            face = EMPTY if found is None else MICROBATCH_COLOURS[found[1]]
            hatch = "////" if found is None else None
            outline(axes, x + 0.03, bottom, width - 0.06, height, face, hatch=hatch, lw=0.6)
            if found is None:
                continue
            label(axes, x + width / 2, bottom + height / 2, str(found[1]), 9)
            if stage + 1 < STAGES:
                ends = ((x + width / 2, bottom), (x + width * 1.4, bottom - 0.7 + height))
                style = {"arrowstyle": "-|>", "mutation_scale": 8, "color": GREY, "lw": 0.7}
                axes.add_patch(FancyArrowPatch(*ends, **style))
    text = "number: the microbatch computed; arrow: its activations, sent; hatched: bubble"
    label(axes, 4.5, 0.2, text, 8, color=GREY)
    save(figure, "pipeline.svg")


PROCESSORS = 4
PART_COLOURS = ["#6699cc", "#e08e66", "#55907a", "#c9a84c"]  # by the processor that stores it
# Tick, what is sent before it, and for each of two weights and their gradients how much is held:
# a part, the whole, or nothing.
PART, WHOLE, NONE = "part", "whole", ""
SHARDED_TICKS = [
    ("stored", "", (PART, PART), (NONE, NONE)),
    ("forward,\nlayer 0", "allgather", (WHOLE, PART), (NONE, NONE)),
    ("forward,\nlayer 1", "allgather", (PART, WHOLE), (NONE, NONE)),
    ("backward,\nlayer 1", "allgather", (PART, WHOLE), (NONE, WHOLE)),
    ("backward,\nlayer 0", "reduce-scatter\nallgather", (WHOLE, PART), (WHOLE, PART)),
    ("update", "reduce-scatter", (PART, PART), (PART, PART)),
]


def bar(axes, x, y, size, processor, held, alpha=1.0):
    """Draws what a processor holds of a weight that all of them store in parts."""
    width, height = size
    outline(axes, x, y, width, height)
    for part in range(PROCESSORS):
        if held == WHOLE or (held == PART and part == processor):
            left = x + part * width / PROCESSORS
            face = PART_COLOURS[part]
            outline(axes, left, y, width / PROCESSORS, height, face, alpha=alpha, lw=0.5)


def draw_fully_sharded():
    """Draws what four processors hold and send in a step of two layers, with zero=3."""
    figure, axes = canvas(9.0, 5.0)
    label(axes, 4.5, 4.8, "zero=3: a step of two layers on four processors", 10, weight="bold")
    left, step, width = 1.3, 1.28, 0.72
    for tick, (name, sent, weights, gradients) in enumerate(SHARDED_TICKS):
        x = left + tick * step
        label(axes, x + width / 2, 4.35, name, 8)
        label(axes, x - (step - width) / 2 + 0.02, 3.9, sent, 6.5, color=GREY)
        for processor in range(PROCESSORS):
            y = 3.1 - processor * 0.82
            for layer in range(2):
                bar(axes, x, y + 0.42 - 0.16 * layer, (width, 0.13), processor, weights[layer])
                held = gradients[layer]
                bar(axes, x, y + 0.1 - 0.16 * layer, (width, 0.13), processor, held, 0.45)
    for processor in range(PROCESSORS):
        y = 3.1 - processor * 0.82
        label(axes, 0.1, y + 0.25, f"processor {processor}", 8, ha="left")
        for row, name in enumerate(["w0", "w1", "g0", "g1"]):
            offset = 0.485 - 0.16 * row
            label(axes, left - 0.12, y + offset, name, 6, color=GREY)
    text = "color: the processor that stores this part; pale: gradients, of the own rows or summed"
    label(axes, 4.5, 0.2, text, 8, color=GREY)
    save(figure, "fully_sharded.svg")


def draw_ring():
    """Draws which keys and values four processors hold in each turn of a ring."""
    figure, axes = canvas(7.2, 3.4)
    label(
        axes, 3.6, 3.2, "ring attention: a part of keys and values goes around", 10, weight="bold"
    )
    width, height, left, top = 1.15, 0.42, 1.9, 2.25
    for turn in range(PROCESSORS):
        label(axes, left + turn * 1.3 + width / 2, top + 0.6, f"turn {turn}", 8, color=GREY)
    for processor in range(PROCESSORS):
        y = top - processor * 0.6
        label(axes, 0.1, y + height / 2, f"processor {processor}", 8, ha="left")
        outline(axes, 1.2, y, 0.42, height, PART_COLOURS[processor])
        label(axes, 1.41, y + height / 2, f"q{processor}", 8)
        for turn in range(PROCESSORS):
            part, x = (processor - turn) % PROCESSORS, left + turn * 1.3
            outline(axes, x, y, width, height, PART_COLOURS[part])
            label(axes, x + width / 2, y + height / 2, f"k{part}, v{part}", 8)
            if turn + 1 == PROCESSORS:
                continue
            end = top - (processor + 1) % PROCESSORS * 0.6 + height / 2
            ends = ((x + width, y + height / 2), (x + 1.3, end))
            style = {"arrowstyle": "-|>", "mutation_scale": 7, "color": GREY, "lw": 0.6}
            axes.add_patch(FancyArrowPatch(*ends, **style))
    text = (
        "queries, and the sums of their softmax, stay; arrow: what is sent while a turn is computed"
    )
    label(axes, 3.6, 0.12, text, 7.5, color=GREY)
    save(figure, "ring.svg")


def draw_by_visualize():
    """Draws tiles, communication and memory of a language model by mtf.visualize."""
    import mesh_tensorflow as mtf
    from mesh_tensorflow.auto_mtf import models

    sizes = {"batch": 64, "length": 256, "vocab": 8192, "d_model": 512, "d_ff": 2048}
    made = models.language_model(**sizes, layers=4, heads=8, d_kv=64, optimizer="adafactor")
    layout = "batch:rows,d_ff:cols,heads:cols,vocab:cols"
    impl = mtf.placement_mesh_impl.PlacementMeshImpl("rows:2,cols:4", layout, ["cpu:0"] * 8)
    wi = next(
        v for v in made.graph.trainable_variables if v.name == "layer_0/feed_forward/wi/kernel"
    )
    mtf.visualize.visualize_sharding(wi, impl).save(FOLDER / "tiles.svg")
    found = mtf.visualize.communication(made.graph, impl, made.outputs)
    found.picture(depth=1).save(FOLDER / "communication.svg")
    mtf.visualize.memory(made.graph, impl, made.outputs).save(FOLDER / "memory.svg")


def main():
    """Draws all figures."""
    matplotlib.rcParams["svg.hashsalt"] = "mesh"
    matplotlib.rcParams["svg.fonttype"] = "path"
    matplotlib.rcParams["font.family"] = "DejaVu Sans"
    draw_layout()
    draw_allreduce()
    draw_pipeline()
    draw_fully_sharded()
    draw_ring()
    draw_by_visualize()


if __name__ == "__main__":
    main()
