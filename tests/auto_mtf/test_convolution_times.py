"""How long convolutions take by the cost model of logical CPUs."""

import pytest
import tensorflow.compat.v1 as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.auto_mtf import hardware, models, step_time

SHAPE = mtf.convert_to_shape("rows:2,cols:2")
# A rate of 1 and nothing else that takes time, so that seconds are flops.
CORES = hardware.Hardware("test", {"float32": 1.0}, 1e30, 1e30, hardware.Link(1e30, 0.0))
VECTORS = CORES.replace(vector_bytes=64)


def convolution(channels=16, padding="SAME", size=8, window=3):
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    x = mtf.ones(mesh, f"batch:4,h:{size},w:{size},in:16")
    w = mtf.ones(mesh, f"fh:{window},fw:{window},in:16,out:{channels}")
    return mtf.Conv2dOperation(x, w, [1, 1, 1, 1], padding)


def flops(op, layout, known=VECTORS):
    model = hardware.CostModel(SHAPE, known)
    return model.operation(op, model.impl(layout)).compute


@pytest.mark.parametrize("channels, of_vectors", [(1, 16), (8, 16), (16, 16), (17, 32), (32, 32)])
def test_parts_of_vectors_take_as_long_as_whole_ones(channels, of_vectors):
    op = convolution(channels, padding="VALID")
    multiplied = 2 * (4 * 6 * 6) * 9 * 16
    assert flops(op, {}, CORES) == pytest.approx(multiplied * channels)
    assert flops(op, {}) == pytest.approx(multiplied * of_vectors)
    # The wide channels are summed over, and not in vectors.
    assert flops(op, {"in": "rows"}) == pytest.approx(multiplied * of_vectors / 2)


def test_a_split_of_16_channels_saves_nothing():
    op = convolution(padding="VALID")
    assert flops(op, {"out": "rows"}) == pytest.approx(flops(op, {}))
    assert flops(op, {"batch": "rows"}) == pytest.approx(flops(op, {}) / 2)


def test_vectors_hold_more_narrow_numbers():
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    x = mtf.ones(mesh, "batch:4,h:8,w:8,in:16", dtype=tf.bfloat16)
    w = mtf.ones(mesh, "fh:3,fw:3,in:16,out:16", dtype=tf.bfloat16)
    op = mtf.Conv2dOperation(x, w, [1, 1, 1, 1], "VALID")
    assert flops(op, {}) == pytest.approx(2 * flops(op, {}, CORES))


def test_padding_of_whole_images_is_not_computed():
    op = convolution()
    # Of the windows of 8 pixels with 3 each, two lack one.
    inside, every = 22 / 24, flops(op, {}, CORES)
    assert flops(op, {}) == pytest.approx(every * inside**2, rel=1e-4)
    # A part with edges of others has the zeros beyond the image as numbers, on all sides.
    assert flops(op, {"h": "rows"}) == pytest.approx(every / 2, rel=1e-4)
    assert flops(op, {"h": "rows", "w": "cols"}) == pytest.approx(every / 4, rel=1e-4)
    assert flops(convolution(padding="VALID"), {}) == flops(convolution(padding="VALID"), {}, CORES)


@pytest.mark.parametrize("kind", ["forward", "filter", "strides", "transposed"])
def test_products_with_padding_are_counted_one_by_one(kind):
    """By a window over an image of ones: what is summed are the products within it."""
    size, window, stride = 7, 4, 2 if kind == "strides" else 1
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")
    x = mtf.ones(mesh, f"batch:1,h:{size},w:{size},in:1")
    transposed = kind == "transposed"
    w = mtf.ones(
        mesh, f"fh:{window},fw:{window}" + (",out:1,in:1" if transposed else ",in:1,out:1")
    )
    strides = [1, stride, stride, 1]
    of_kind = mtf.Conv2dTransposeOperation if transposed else mtf.Conv2dOperation
    y = of_kind(x, w, strides, "SAME").outputs[0]
    op = y.operation
    if kind == "filter":
        op = mtf.gradients([mtf.reduce_sum(y)], [w])[0].operation
    total = mtf.reduce_sum(y)
    with tf.Graph().as_default() as made, tf.Session(graph=made) as session:
        impl = mtf.placement_mesh_impl.PlacementMeshImpl("", "", [""])
        products = session.run(mtf.Lowering(graph, {mesh: impl}).export_to_tf_tensor(total))
    share = op.share_inside(hardware.CostModel(SHAPE, CORES).impl({}))
    assert share == pytest.approx(products / (y.shape.size * window**2))


def test_accelerators_compute_all():
    op = convolution(channels=1)
    for known in hardware.PROFILES.values():
        assert known.vector_bytes == 0
    assert hardware.local_machine(4, one_memory=True).vector_bytes in (16, 32, 64)
    whole = hardware.CostModel(SHAPE, CORES).impl({})
    assert flops(op, {}, CORES) * SHAPE.size == op.cost(whole).flops


@pytest.mark.parametrize("rank, of_window, of_filter", [(2, 58, 63), (3, 300, 720)])
def test_windows_are_copied_where_xla_compiles(rank, of_window, of_filter):
    """Which takes the time of narrow convolutions; wide ones take that of their products."""

    def kept(channels, narrow=False):
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        size = ",".join(f"{name}:8" for name in "hwd"[:rank])
        x = mtf.ones(mesh, f"batch:4,{size},in:{3 if narrow else 16}")
        y = getattr(mtf.layers, f"conv{rank}d")(x, mtf.Dimension("out", channels), padding="VALID")
        w = y.operation.inputs[1]
        by_w, by_x = (t.operation for t in mtf.gradients([mtf.reduce_sum(y)], [w, x]))
        known = CORES.replace(compiled=True)
        return [flops(op, {}, known) / flops(op, {}, CORES) for op in (y.operation, by_w, by_x)]

    narrow = [of_window / (2 * 16), of_filter / (2 * 16), of_window / (2 * 16)]
    assert kept(16) == pytest.approx([max(1, one) for one in narrow], rel=1e-3)
    assert kept(4096)[0] == 1.0
    # Three channels are read as eight.
    assert kept(16, narrow=True)[0] == pytest.approx(8 / 3 * of_window / 32, rel=1e-3)


def test_images_are_split_rather_than_channels_of_a_vector():
    """With the cost of sums, a program of narrow channels is split by examples."""
    with tf.Graph().as_default():
        graph = mtf.Graph()
        x = mtf.ones(mtf.Mesh(graph, "mesh"), "batch:4,h:32,w:32,in:16")
        y = mtf.layers.conv2d(x, mtf.Dimension("out", 16), filter_size=(5, 5))
        program = models.Program(graph, y.mesh, [mtf.reduce_sum(mtf.square(y))], [])
    known = hardware.local_machine(2, one_memory=True).replace(cores=2, vector_bytes=64)
    parts = step_time.ProgramParts.of(program)
    best = step_time.StepEstimator(parts.graph, "rows:2", parts.outputs, known, parts=parts).solve()
    assert best.text == "batch:rows"
