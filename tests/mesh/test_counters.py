"""What lowering counts, and how it is told."""

import pytest
import tensorflow.compat.v1 as tf

import mesh_tensorflow as mtf
from mesh_tensorflow._core.operation import Collective, Cost
from mesh_tensorflow.testing import harness
from mesh_tensorflow.testing.harness import Placing

A, B, C = mtf.Dimension("a", 8), mtf.Dimension("b", 16), mtf.Dimension("c", 4)


def lowered(build, mesh_shape, layout, **kwargs):
    """Returns the Lowering of a program of two imported tensors."""
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")
    x = mtf.import_tf_tensor(mesh, tf.zeros([8, 16]), [A, B])
    y = mtf.import_tf_tensor(mesh, tf.zeros([16, 4]), [B, C])
    tensors = build(x, y)
    lowering = mtf.Lowering(graph, {mesh: Placing(mesh_shape, layout).impl()}, **kwargs)
    for t in tensors:
        lowering.export_to_tf_tensor(t)
    return lowering


def total(lowering, name):
    return sum(value for key, value in lowering.counters if key == name)


def test_einsum_over_a_split_dimension(tf_graph):
    lowering = lowered(lambda x, y: [mtf.einsum([x, y])], "x:4,y:2", "b:x,a:y")
    # Four processors along x have partial sums of all of [a, c]; a is in two parts along y.
    assert lowering.counters == [
        ("output/ImportOperation", 128),
        ("output_unique/ImportOperation", 128),
        ("output/ImportOperation", 128),
        ("output_unique/ImportOperation", 64),
        ("einsum", 512),
        ("einsum_unique", 512),
        ("output/EinsumOperation", 128),
        ("output_unique/EinsumOperation", 32),
        ("allreduce/[0]/einsum_op", 128),
    ]
    assert [c for _, _, c in lowering.collectives] == [Collective("allreduce", (0,), 128, 512)]


def test_sums_over_two_axes(tf_graph):
    lowering = lowered(lambda x, y: [mtf.reduce_sum(x), mtf.reduce_max(x)], "x:4,y:2", "a:x,b:y")
    assert total(lowering, "allreduce/[0, 1]/reduce_op") == 16


def sums_of(lowering):
    return [key for key, _ in lowering.counters if key.startswith("allreduce")]


def test_mesh_axes_are_counted_in_the_order_of_dimensions(tf_graph):
    layout = "b:x,a:y,c:y"

    def build(x, y):  # [a, b], [b, c]
        z = mtf.zeros(x.mesh, [A])
        return [
            mtf.reduce_sum(x),
            mtf.reduce_max(x),
            mtf.reduce_sum(y),
            mtf.einsum([x, z], []),
            mtf.einsum([z, mtf.reduce_sum(x, output_shape=[B])], []),
        ]

    lowering = lowered(build, "x:4,y:2", layout)
    # An einsum goes by the input that has all dimensions, or by the names of dimensions.
    assert sorted(sums_of(lowering)) == sorted(
        ["allreduce/[1, 0]/reduce_op"] * 2
        + ["allreduce/[0, 1]/reduce_op"]
        + ["allreduce/[1, 0]/einsum_op"] * 2
        + ["allreduce/[1]/reduce_op"]
    )
    assert {c.mesh_axes for _, _, c in lowering.collectives} == {(0, 1), (1,)}


def test_sums_counted_in_another_order_are_still_made_together(tf_graph):
    def build(x, y):
        return [mtf.reduce_sum(x) + mtf.reduce_sum(mtf.transpose(x, [B, A]))]

    lowering = lowered(build, "x:4,y:2", "b:x,a:y")
    assert sums_of(lowering) == ["allreduce/[1, 0]/reduce_op"]
    assert lowering.communication_table().count("allreduce") == 1


def test_a_sum_that_nobody_needs_is_not_counted(tf_graph):
    lowering = lowered(lambda x, y: mtf.einsum([x, y]) and [], "x:4", "b:x")
    assert total(lowering, "allreduce/[0]/einsum_op") == 0 and lowering.collectives == []


def test_a_sum_of_sums_is_made_once(tf_graph):
    def build(x, y):
        first = mtf.reduce_sum(x, output_shape=[A])
        second = mtf.einsum([x, y], output_shape=[A])
        return [first + second]

    lowering = lowered(build, "x:4", "b:x")
    assert [c.elements for _, _, c in lowering.collectives] == [32]


def test_sums_over_different_axes_are_made_apart(tf_graph):
    def build(x, y):  # over a, and over b
        over_a = mtf.reduce_sum(mtf.ones(x.mesh, [A, C]), output_shape=[C])
        return [over_a + mtf.reduce_sum(y, output_shape=[C])]

    lowering = lowered(build, "x:4,y:2", "a:x,b:y")
    made = [c.mesh_axes for _, _, c in lowering.collectives if c.kind == "allreduce"]
    assert sorted(made) == [(0,), (1,)]


def test_reshape(tf_graph):
    cases = {
        "allconcat/0/reshape_op": (lambda x, y: [mtf.rename_dimension(x, "b", "z")], 512),
        "alltoall/0/reshape_op": (lambda x, y: [mtf.reshape(x, [("b", 8), ("z", 16)])], 128),
    }
    lowering = lowered(cases["allconcat/0/reshape_op"][0], "x:4", "b:x")
    assert total(lowering, "allconcat/0/reshape_op") == 512
    lowering = lowered(lambda x, y: [mtf.reshape(x, [("z", 8), ("q", 16)])], "x:4", "b:x,z:x")
    assert total(lowering, "alltoall/0/reshape_op") == 128
    lowering = lowered(lambda x, y: [mtf.rename_dimension(x, "b", "z")], "x:4", "z:x")
    assert lowering.collectives == []  # cutting needs no communication


# By layout on x:4,y:2: the sum over b of a product, split by another name of c, and what it sends.
SPLIT_SUMS = {
    "b:x,p:x": ["reduce_scatter/0/reshape_op 256"],
    "b:x,p:y": ["allreduce/[0]/reshape_op 128"],  # each has half of the sum to make
    "b:x,a:y,p:x": ["reduce_scatter/0/reshape_op 128"],
    "b:x,a:y": ["allreduce/[0]/einsum_op 128"],
    "b:x,a:y,q:x,p:y": ["allreduce/[0]/einsum_op 128", "alltoall/1/reshape_op 128"],
}


@pytest.mark.parametrize("layout", SPLIT_SUMS)
def test_a_sum_that_is_split(tf_graph, layout):
    """It is not made whole first, if each processor keeps what it has a part of."""

    def build(x, y):
        names = ("q", "p") if "q:" in layout else ("a", "p")
        return [mtf.relu(mtf.reshape(mtf.einsum([x, y]), list(zip(names, (8, 4)))))]

    lowering = lowered(build, "x:4,y:2", layout)
    sent = [f"{k} {n}" for k, n in lowering.counters if k.endswith(("einsum_op", "reshape_op"))]
    assert sorted(sent) == SPLIT_SUMS[layout]
    counted, predicted = harness.counted_and_predicted(lowering)
    assert counted == predicted


def test_shift(tf_graph):
    lowering = lowered(lambda x, y: [mtf.shift(x, 5, B, wrap=False)], "x:4", "b:x")
    assert total(lowering, "shift[1]") == 8 * 3 * 4 and total(lowering, "shift[2]") == 8 * 4
    assert sorted(c.elements for _, _, c in lowering.collectives) == [32, 96]


@pytest.mark.parametrize(
    "offset, wrap, expected",
    [
        (5, False, {"shift[1]": 96, "shift[2]": 32}),
        (14, False, {"shift[3]": 64}),  # the rest would go four processors further on
        (-13, False, {"shift[-3]": 96}),
        (14, True, {"shift[3]": 64, "shift[4]": 64}),
        (16, False, {}),
        (-40, False, {}),
        (1, False, {"shift[0]": 96, "shift[1]": 32}),
    ],
)
def test_what_is_shifted_out_is_not_counted(tf_graph, offset, wrap, expected):
    lowering = lowered(lambda x, y: [mtf.shift(x, offset, B, wrap)], "x:4", "b:x")
    assert {k: v for k, v in lowering.counters if k.startswith("shift")} == expected
    moved = [v for k, v in expected.items() if k not in ("shift[0]", "shift[4]")]
    assert sorted(c.elements for _, _, c in lowering.collectives) == sorted(moved)


def test_the_gradient_of_logsumexp_makes_no_sum_for_the_maximum(tf_graph):
    def build(x, y):
        z = mtf.reduce_logsumexp(x, B)
        return [z, *mtf.gradients([z], [x])]

    lowering = lowered(build, "x:4", "b:x")
    # The maximum, and the sum of exponentials.
    assert sums_of(lowering) == ["allreduce/[0]/reduce_op"] * 2


def test_every_operation_has_a_public_name():
    def below(cls):
        return {cls}.union(*(below(c) for c in cls.__subclasses__()))

    package = {c for c in below(mtf.Operation) if c.__module__.startswith("mesh_tensorflow.")}
    private = {c for c in package if c.__name__.startswith("_")}
    assert not [c for c in private if not c.__subclasses__()]  # what others have in common


def test_variables(tf_graph):
    def build(x, y):
        mtf.get_variable(x.mesh, "u", [A, B])
        mtf.get_variable(x.mesh, "v", [B], trainable=False)
        return []

    lowering = lowered(build, "x:4", "b:x")
    assert total(lowering, "variables/trainable") == 128
    assert total(lowering, "variables/untrainable") == 16


def test_pretty_print_counters():
    text = mtf.pretty_print_counters(
        [("b/x", 1), ("a/b/c", 2), ("a/b/d", 3), ("a/b/c", 10), ("big", 12_345_678)]
    )
    assert text.splitlines() == [
        "a: 15",
        " a/b: 15",
        "  a/b/c: 12",
        "  a/b/d: 3",
        "b: 1",
        " b/x: 1",
        "big: 1.23e+07",
    ]


def test_log_file(tf_graph, tmp_path):
    path = tmp_path / "log"

    def build(x, y):
        mtf.get_variable(x.mesh, "some/weights", [A, B])
        return [mtf.einsum([x, y])]

    lowered(build, "x:4", "b:x", log_file=str(path))
    text = path.read_text()
    assert "Variable some/weights" in text
    assert "size 128" in text and "slice_size 32" in text and "Shape[a=8, b=16]" in text
    assert "Trainable Variables" in text and "Total slice_size: 32" in text
    assert "Counters:\n" in text and "einsum_unique: 512" in text


def test_log_variable_sizes(tf_graph, tmp_path):
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")
    for name in "vu":
        mtf.get_variable(mesh, name, [A])
    path = tmp_path / "sizes"
    mtf.log_variable_sizes(graph.all_variables, "All", True, log_file=str(path))
    mtf.log_variable_sizes(graph.all_variables, "Again", False, log_file=str(path))
    lines = path.read_text().splitlines()
    assert [line.split()[:2] for line in lines[:2]] == [["Variable", "u"], ["Variable", "v"]]
    assert "count: 2" in lines[2] and "Total size: 16" in lines[2] and lines[2].startswith("All")
    assert len(lines) == 4 and lines[3].startswith("Again")


def test_communication_table(tf_graph):
    lowering = lowered(
        lambda x, y: [mtf.einsum([x, y]), mtf.shift(x, 4, B, True)], "x:4,y:2", "b:x,a:y"
    )
    rows = [line.split("  ") for line in lowering.communication_table().splitlines()]
    rows = [[cell.strip() for cell in row if cell.strip()] for row in rows]
    assert rows[0] == ["operation", "collective", "mesh axes", "count", "elements", "bytes"]
    assert rows[2] == ["ShiftOperation", "shift", "x=4", "1", "128", "512"]
    assert rows[3] == ["export", "allreduce", "x=4", "1", "128", "512"]
    assert rows[4] == ["total", "2", "256", "1,024"]
    assert lowered(lambda x, y: [], "x:2", "").communication_table() == "no communication"


def test_cost():
    first = Cost(1, 2, (Collective("shift", (0,), 1, 4),))
    second = Cost(10, 20, (Collective("allreduce", (1,), 2, 8),))
    both = first + second
    assert (both.flops, both.bytes, both.collectives) == (
        11,
        22,
        first.collectives + second.collectives,
    )
    assert first + None is first


def test_cost_of_an_einsum(tf_graph):
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")
    x = mtf.import_tf_tensor(mesh, tf.zeros([8, 16]), [A, B])
    y = mtf.import_tf_tensor(mesh, tf.zeros([16, 4]), [B, C])
    cost = mtf.einsum([x, y]).operation.cost(Placing("x:4", "b:x").impl())
    assert cost.flops == 2 * 8 * 16 * 4
    assert cost.bytes == 4 * (128 + 64 + 4 * 32)  # each of four processors holds all of [a, c]
