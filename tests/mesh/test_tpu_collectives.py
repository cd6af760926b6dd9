"""TpuCollectives: the operations that they are made of."""

import pytest
import tensorflow.compat.v1 as tf
from helpers.mesh.tpu_mesh import L2P, MESH, P2L, device_assignment

from mesh_tensorflow import Shape
from mesh_tensorflow._mesh.tpu_program import TpuCollectives


def build(fn, mesh=MESH, l2p=None, dtype=tf.float32, shape=(4, 8)):
    """Returns (what the function returned, operations by type) of a replicated computation."""
    collectives = TpuCollectives(mesh, l2p or list(range(mesh.size)))
    returned = []

    def computation(x):
        returned.append(fn(collectives, tf.cast(x, dtype)))
        return tf.ones([])

    with tf.Graph().as_default() as graph:
        tf.tpu.replicate(
            computation,
            [[tf.zeros(shape)]] * mesh.size,
            device_assignment=device_assignment(mesh.size),
        )
        operations = {}
        for op in graph.get_operations():
            operations.setdefault(op.type, []).append(op)
    return returned[0], operations


def value(tensor):
    return tf.make_ndarray(tensor.op.get_attr("value")).tolist()


def test_pnum():
    (pnum, again), ops = build(lambda c, x: (c.pnum(), c.pnum()), l2p=L2P)
    assert pnum is again and pnum.dtype == tf.int32 and pnum.shape.as_list() == []
    (numbers,) = (op for op in ops["TPUReplicatedInput"] if "pnum" in op.name)
    assert [value(x) for x in numbers.inputs] == list(range(8))
    assert "_tpu_replicate" not in numbers.node_def.attr
    assert "_tpu_replicate" in pnum.op.node_def.attr
    assert pnum.op.inputs[1] is numbers.outputs[0] and value(pnum.op.inputs[0]) == P2L
    in_order, _ = build(lambda c, x: c.pnum())
    assert in_order.op.type == "Identity"


def test_pnum_of_two_computations():
    collectives = TpuCollectives(Shape([("a", 1)]), [0])
    numbers = []
    with tf.Graph().as_default():
        for _ in range(2):
            tf.tpu.rewrite(lambda: numbers.append(collectives.pnum()) or numbers[-1] + 1)
    clusters = {n.op.get_attr("_tpu_replicate") for n in numbers}
    assert len(clusters) == 2


def test_pnum_within_shard():
    collectives = TpuCollectives(Shape([("a", 2)]), [1, 0])
    with tf.Graph().as_default():
        (y,) = tf.tpu.shard(
            lambda x: x + tf.cast(collectives.pnum(), tf.float32), [tf.zeros([4])], num_shards=2
        )
        assert y.shape.as_list() == [4]


@pytest.mark.parametrize(
    "toggle, loop_op",
    [(tf.enable_control_flow_v2, "StatelessWhile"), (tf.disable_control_flow_v2, "Enter")],
)
def test_pnum_first_needed_in_a_loop(control_flow, toggle, loop_op):
    toggle()

    def loop(c, x):
        return (
            tf.while_loop(
                lambda i, s: i < 3,
                lambda i, s: (i + 1, s + c.pnum() + c.own([5, 6, 7, 8] * 2)),
                [0, 0],
            )[1]
            + c.pnum()
        )

    total, ops = build(loop)
    assert any("pnum" in x.name for op in ops[loop_op] for x in op.inputs)
    assert total.dtype == tf.int32
    (numbers,) = (op for op in ops["TPUReplicatedInput"] if "pnum" in op.name)
    assert [x.op.type for x in numbers.inputs] == ["Const"] * 8


@pytest.fixture
def control_flow():
    """Restores the kind of loops in force."""
    v2 = tf.control_flow_v2_enabled()
    yield
    (tf.enable_control_flow_v2 if v2 else tf.disable_control_flow_v2)()


def test_own():
    own, _ = build(lambda c, x: c.own([[p, 2 * p] for p in range(8)], tf.int64), l2p=L2P)
    assert own.dtype == tf.int64 and own.shape.as_list() == [2]
    constant, ops = build(lambda c, x: c.own([3] * 8))
    assert value(constant) == 3 and len(ops["TPUReplicatedInput"]) == 1


GROUPS_OF_B = [[0, 3, 5, 6], [1, 7, 2, 4]]
GROUPS_OF_A = [[0, 1], [3, 7], [5, 2], [6, 4]]


@pytest.mark.parametrize(
    "axes, groups", [([0], GROUPS_OF_A), ([1], GROUPS_OF_B), ([1, 0], [[0, 3, 5, 6, 1, 7, 2, 4]])]
)
def test_sum(axes, groups):
    y, ops = build(lambda c, x: c.allreduce(x, axes, "SUM"), l2p=L2P)
    (op,) = ops["CrossReplicaSum"]
    assert y is op.outputs[0] and value(op.inputs[1]) == groups
    assert "Cast" not in ops and "AllToAll" not in ops


@pytest.mark.parametrize(
    "dtype, summed_as",
    [
        (tf.float32, tf.float32),
        (tf.float64, tf.float64),
        (tf.float16, tf.float32),
        (tf.bfloat16, tf.bfloat16),
        (tf.int32, tf.int32),
        (tf.uint32, tf.uint32),
        (tf.bool, tf.int32),
        (tf.uint8, tf.int32),
    ],
)
def test_dtype_of_sums(dtype, summed_as):
    y, ops = build(lambda c, x: c.allreduce(x, [0, 1], "SUM"), dtype=dtype)
    (op,) = ops["CrossReplicaSum"]
    assert op.inputs[0].dtype == summed_as and y.dtype == dtype


def test_sum_of_what_tpus_do_not_sum():
    y, ops = build(lambda c, x: c.allreduce(x, [0, 1], "SUM"), dtype=tf.int64)
    assert "CrossReplicaSum" not in ops and y.dtype == tf.int64
    assert [op.get_attr("split_count") for op in ops["AllToAll"]] == [2, 4]


@pytest.mark.parametrize(
    "reduction, dtype, kind",
    [
        ("MAX", tf.float32, "Max"),
        ("MIN", tf.bfloat16, "Min"),
        ("MAX", tf.bool, "Any"),
        ("MIN", tf.bool, "All"),
    ],
)
def test_maximum(reduction, dtype, kind):
    y, ops = build(lambda c, x: c.allreduce(x, [0, 1], reduction), dtype=dtype, l2p=L2P)
    assert y.dtype == dtype and y.shape.as_list() == [4, 8]
    first, second = ops["AllToAll"]
    assert value(first.inputs[1]) == GROUPS_OF_A and value(second.inputs[1]) == GROUPS_OF_B
    assert [len(ops[kind]), first.inputs[0].dtype] == [2, dtype]


def test_axes_of_size_one():
    mesh = Shape([("a", 1), ("b", 4)])
    (x, y, z), ops = build(
        lambda c, x: (x, c.allreduce(x, [0], "SUM"), c.allreduce(x, [], "MAX")), mesh=mesh
    )
    assert x is y is z
    _, ops = build(lambda c, x: c.allreduce(x, [0, 1, 0], "MAX"), mesh=mesh)
    assert [op.get_attr("split_count") for op in ops["AllToAll"]] == [4]


def test_gather():
    y, ops = build(lambda c, x: c.allgather(x, 1), l2p=L2P)
    (op,) = ops["AllToAll"]
    assert (
        y is op.outputs[0] and y.shape.as_list() == [4, 4, 8] and value(op.inputs[1]) == GROUPS_OF_B
    )
    assert [op.get_attr(a + "_dimension") for a in ("split", "concat")] == [0, 0]


@pytest.mark.parametrize(
    "split, concat, shape", [(0, 1, [1, 32]), (-1, 0, [16, 2]), (1, 1, [4, 8])]
)
def test_alltoall(split, concat, shape):
    y, ops = build(lambda c, x: c.alltoall(x, 1, split, concat), l2p=L2P)
    (op,) = ops["AllToAll"]
    assert value(op.inputs[1]) == GROUPS_OF_B and op.inputs[0].dtype == tf.float32
    attributes = ("split_dimension", "concat_dimension", "split_count")
    assert [op.get_attr(a) for a in attributes] == [split % 2, concat, 4]
    assert y.shape.as_list() == shape and "Cast" not in ops


def test_permute():
    y, ops = build(lambda c, x: c.permute(x, 1, [3, None, 1, 0]), l2p=L2P)
    (op,) = ops["CollectivePermute"]
    assert value(op.inputs[1]) == [[6, 0], [3, 5], [0, 6], [4, 1], [7, 2], [1, 4]]
    assert "TPUReplicatedInput" in ops and not [
        op for op in ops["TPUReplicatedInput"] if "pnum" in op.name
    ]


@pytest.mark.parametrize(
    "dtype, moved_as",
    [
        (tf.float32, tf.float32),
        (tf.bfloat16, tf.bfloat16),
        (tf.int32, tf.int32),
        (tf.bool, tf.int32),
        (tf.uint8, tf.int32),
        (tf.float16, tf.float32),
        (tf.int64, tf.int32),
        (tf.uint32, tf.int32),
        (tf.float64, tf.int32),
    ],
)
def test_dtype_of_permute(dtype, moved_as):
    y, ops = build(lambda c, x: c.permute(x, 0, [1, 0]), dtype=dtype)
    (op,) = ops["CollectivePermute"]
    assert op.inputs[0].dtype == moved_as
    assert y.dtype == dtype and y.shape.as_list() == [4, 8]


def test_permute_to_several():
    y, ops = build(lambda c, x: c.permute(x, 1, [0, 0, 2, None]))
    assert "CollectivePermute" not in ops and len(ops["AllToAll"]) == 1
    assert y.shape.as_list() == [4, 8]
    _, ops = build(lambda c, x: c.permute(x, 1, [0, 0, 2, 1]))
    assert not [op for op in ops if op.startswith("Select")]


def test_permute_from_nobody():
    y, ops = build(lambda c, x: c.permute(x, 1, [None] * 4))
    assert "CollectivePermute" not in ops and y.shape.as_list() == [4, 8]


# -- errors


def test_numbers_must_be_a_permutation():
    with pytest.raises(ValueError, match=r"each of 0 to 7 once, for the mesh a=2, b=4; got \[0, 0"):
        TpuCollectives(MESH, [0] * 8)


def test_outside_of_a_computation():
    with tf.Graph().as_default():
        with pytest.raises(ValueError, match=r"mesh a=2, b=4 are used outside of a replicated"):
            TpuCollectives(MESH, L2P).pnum()
        with pytest.raises(ValueError, match=r"are used outside of a replicated"):
            TpuCollectives(MESH, L2P).allreduce(tf.zeros([2]), [0], "MAX")


def test_other_numbers_of_replicas():
    collectives = TpuCollectives(MESH, L2P)
    with tf.Graph().as_default():
        with pytest.raises(ValueError, match=r"has 1 replicas, the mesh a=2, b=4 has 8 processors"):
            tf.tpu.rewrite(lambda: collectives.pnum() + 1)


@pytest.mark.parametrize(
    "fn, text",
    [
        (
            lambda c, x: c.allreduce(x, [0], "MEAN"),
            "reduction_fn_string='MEAN' is none of 'SUM', 'MAX', 'MIN'",
        ),
        (
            lambda c, x: c.alltoall(x[:, :6], 1, 1, 0),
            r"axis 1 of a slice of shape \(4, 6\) in 4 parts, for the mesh dimension b=4, which does not",
        ),
        (
            lambda c, x: c.permute(x, 1, [0, 1]),
            r"each of the 4 coordinates along the mesh dimension b=4, another of them or None; got \[0, 1",
        ),
        (lambda c, x: c.permute(x, 1, [0, 1, 4, None]), r"got \[0, 1, 4, None\]"),
    ],
    ids=["reduction", "parts", "sources", "source"],
)
def test_errors(fn, text):
    with pytest.raises(ValueError, match=text):
        build(fn)
