"""TpuCollectives: the operations they are made of, and their results on XLA's CPU replicas.

The results are those of the very operations of the program, `xla_cpu_replicas.py` says how. AllToAll,
CollectivePermute, While and all that is around them is lowered by TensorFlow. What is not:

* CrossReplicaSum becomes `mhlo.cross-replica-sum`, for which StableHLO has no name; the tests write
  the all_reduce that it is for XLA.
* TPUReplicatedInput, TPUReplicatedOutput and TPUReplicateMetadata are what a TPU's host does: each
  replica gets its part directly.

XLA adds bfloat16 in float32 on CPUs anyway, so what dtype is summed in only shows in the operations;
and what a TPU's own compiler makes of a program is not tested.
"""

import itertools

import ml_dtypes
import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from helpers.mesh import xla_cpu_replicas

from mesh_tensorflow import Shape
from mesh_tensorflow._core.processors import pnum_to_processor_coordinates
from mesh_tensorflow._mesh.tpu.collectives import TpuCollectives

MESH = Shape([("a", 2), ("b", 4)])
L2P = [0, 3, 5, 6, 1, 7, 2, 4]
P2L = [L2P.index(p) for p in range(8)]


# -- the operations


def device_assignment(replicas):
    """Returns an assignment of cores of a TPU of 2 x 2 chips with two cores each."""
    cores = np.array(list(itertools.product(range(2), range(2), range(1), range(2))))
    topology = tf.tpu.experimental.Topology(mesh_shape=[2, 2, 1, 2], device_coordinates=cores[None])
    return tf.tpu.experimental.DeviceAssignment(topology, cores[:replicas, None])


def build(fn, mesh=MESH, l2p=None, dtype=tf.float32, shape=(4, 8), **kwargs):
    """Returns (what the function returned, operations by type) of a replicated computation."""
    collectives = TpuCollectives(mesh, l2p or list(range(mesh.size)), **kwargs)
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
    "dtype, limit, summed_as",
    [
        (tf.float32, 8, tf.float32),
        (tf.float64, 8, tf.float64),
        (tf.float16, 8, tf.float32),
        (tf.bfloat16, 8, tf.bfloat16),
        (tf.bfloat16, 7, tf.float32),
        (tf.int32, 8, tf.int32),
        (tf.uint32, 8, tf.uint32),
        (tf.bool, 8, tf.int32),
        (tf.uint8, 8, tf.int32),
    ],
)
def test_dtype_of_sums(dtype, limit, summed_as):
    y, ops = build(
        lambda c, x: c.allreduce(x, [0, 1], "SUM"),
        dtype=dtype,
        allreduce_in_bfloat16_max_group_size=limit,
    )
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
            "unknown reduction 'MEAN'; known are MAX, MIN, SUM",
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


# -- the results


def members(logical, mesh_axes):
    """Returns the logical numbers of a processor's group, in order."""
    own = pnum_to_processor_coordinates(MESH, logical)
    return [
        pnum
        for pnum in range(MESH.size)
        if all(
            c == o
            for axis, (c, o) in enumerate(zip(pnum_to_processor_coordinates(MESH, pnum), own))
            if axis not in mesh_axes
        )
    ]


def coordinate(logical, axis):
    return pnum_to_processor_coordinates(MESH, logical)[axis]


def reduced(axes, reduction):
    fn = {"SUM": np.add, "MAX": np.maximum, "MIN": np.minimum}[reduction]
    return lambda xs, l: fn.reduce([xs[m] for m in members(l, axes)]).astype(xs[0].dtype)


def gathered(axis):
    return lambda xs, l: np.stack([xs[m] for m in members(l, [axis])])


def exchanged(axis, split, concat):
    n = MESH[axis].size
    return lambda xs, l: np.concatenate(
        [np.split(xs[m], n, split)[coordinate(l, axis)] for m in members(l, [axis])], concat
    )


def permuted(axis, sources):
    def expected(xs, l):
        source = sources[coordinate(l, axis)]
        return np.zeros_like(xs[l]) if source is None else xs[members(l, [axis])[source]]

    return expected


ANY = ["float32", "bfloat16", "int32", "bool", "int64", "float16", "uint8", "uint32", "float64"]
# name: (what the core does, what comes out, dtypes).
CASES = {
    "pnum": (lambda c, x: c.pnum(), lambda xs, l: np.int32(l), ["float32"]),
    "own": (
        lambda c, x: c.own([p * p for p in range(8)]),
        lambda xs, l: np.int32(l * l),
        ["float32"],
    ),
    "sum a": (lambda c, x: c.allreduce(x, [0], "SUM"), reduced([0], "SUM"), ANY),
    "sum ab": (
        lambda c, x: c.allreduce(x, [0, 1], "SUM"),
        reduced([0, 1], "SUM"),
        ["float32", "int32", "int64", "uint8"],
    ),
    "max b": (lambda c, x: c.allreduce(x, [1], "MAX"), reduced([1], "MAX"), ANY),
    "min ab": (lambda c, x: c.allreduce(x, [1, 0], "MIN"), reduced([0, 1], "MIN"), ANY),
    "gather a": (lambda c, x: c.allgather(x, 0), gathered(0), ANY),
    "gather b": (lambda c, x: c.allgather(x, 1), gathered(1), ANY),
    "alltoall b": (lambda c, x: c.alltoall(x, 1, 1, 0), exchanged(1, 1, 0), ANY),
    "alltoall same": (lambda c, x: c.alltoall(x, 0, 0, 0), exchanged(0, 0, 0), ["float32"]),
    "shift": (lambda c, x: c.permute(x, 1, [None, 0, 1, 2]), permuted(1, [None, 0, 1, 2]), ANY),
    "wrap": (lambda c, x: c.permute(x, 1, [3, 0, 1, 2]), permuted(1, [3, 0, 1, 2]), ["float32"]),
    "swap": (lambda c, x: c.permute(x, 0, [1, 0]), permuted(0, [1, 0]), ["float32"]),
    "stay": (lambda c, x: c.permute(x, 1, [0, 2, 1, 3]), permuted(1, [0, 2, 1, 3]), ["float32"]),
    "broadcast": (
        lambda c, x: c.permute(x, 1, [2, 2, None, 0]),
        permuted(1, [2, 2, None, 0]),
        ["float32", "int64", "bool"],
    ),
    "nobody": (lambda c, x: c.permute(x, 1, [None] * 4), permuted(1, [None] * 4), ["float32"]),
    "scalar": (
        lambda c, x: c.permute(c.allreduce(x[0, 0], [1], "MAX"), 0, [1, None]),
        lambda xs, l: permuted(0, [1, None])(
            [reduced([1], "MAX")([x[0, 0] for x in xs], m) for m in range(8)], l
        ),
        ["float32"],
    ),
}
ROWS = [(name, dtype) for name, (_, _, dtypes) in CASES.items() for dtype in dtypes]


def numpy_dtype(name):
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def slices(dtype):
    """Returns, for each logical processor, a slice whose bits all matter, sums fit the dtype."""
    rng = np.random.default_rng(0)
    dtype = numpy_dtype(dtype)
    if dtype.kind == "b":
        return [rng.random([4, 8]) < 0.8 for _ in range(8)]
    if dtype.kind in "iu":
        high = np.iinfo(dtype).max // 8
        return [rng.integers(0, high, [4, 8]).astype(dtype) for _ in range(8)]
    if dtype.itemsize == 2:
        # Sums are exact, whatever their order.
        return [rng.integers(-16, 16, [4, 8]).astype(dtype) for _ in range(8)]
    return [rng.standard_normal([4, 8]).astype(dtype) for _ in range(8)]


def by_physical(logical_values):
    return [[logical_values[P2L[p]]] for p in range(8)]


@pytest.fixture(scope="module")
def results():
    """What comes out of each case, by logical processor; all run in one process."""
    pytest.importorskip("jax")
    programs, keys = [], []
    for dtype in ANY:
        names = [name for name, d in ROWS if d == dtype]
        collectives = TpuCollectives(MESH, L2P)

        def computation(x, names=names, collectives=collectives):
            return [CASES[name][0](collectives, x) for name in names]

        programs.append(xla_cpu_replicas.Program(computation, by_physical(slices(dtype))))
        keys.append([(name, dtype) for name in names])
    special = list(SPECIAL.values())
    programs += [xla_cpu_replicas.Program(fn, by_physical(xs)) for fn, xs, _ in special]
    keys += [[("special", name)] for name in SPECIAL]
    out = {}
    for own, outputs in zip(keys, xla_cpu_replicas.run(programs)):
        for i, key in enumerate(own):
            out[key] = [outputs[L2P[l]][i] for l in range(8)]
    return out


@pytest.mark.parametrize("name, dtype", ROWS)
def test_results(results, name, dtype):
    xs = slices(dtype)
    for l in range(8):
        got, want = results[name, dtype][l], CASES[name][1](xs, l)
        assert got.dtype == want.dtype and got.shape == want.shape
        if name.startswith("sum") and dtype in ("float32", "float64"):
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
        else:
            np.testing.assert_array_equal(got, want)


def in_a_loop(x):
    """Sums x + 0, x + pnum, ... over "b" in a loop that is the first to ask for the number."""
    collectives = TpuCollectives(MESH, L2P)
    return tf.while_loop(
        lambda i, s: i < 3,
        lambda i, s: (
            i + 1,
            s + collectives.allreduce(x + tf.cast(i * collectives.pnum(), x.dtype), [1], "SUM"),
        ),
        [0, tf.zeros_like(x)],
    )[1]


NANS = [np.array([np.nan if l == 1 else l, -0.0], "float32") for l in range(8)]
BIG = [np.array([2**24 + l], "int32") for l in range(8)]
THIRDS = [np.arange(8, dtype="float32") + np.float32(1) / 3 + l for l in range(8)]
# name: (computation of a core, slices by logical number, what comes out).
SPECIAL = {
    "NaN does not spread": (
        lambda x: TpuCollectives(MESH, L2P).permute(x, 1, [2, 2, 3, 1]),
        NANS,
        lambda xs, l: xs[members(l, [1])[[2, 2, 3, 1][coordinate(l, 1)]]],
    ),
    "int32 beyond float32": (
        lambda x: TpuCollectives(MESH, L2P).allreduce(x, [1], "SUM"),
        BIG,
        lambda xs, l: sum(xs[m] for m in members(l, [1])),
    ),
    "float32 beyond bfloat16": (
        lambda x: TpuCollectives(MESH, L2P).alltoall(x, 1, 0, 0),
        THIRDS,
        exchanged(1, 0, 0),
    ),
    "loop": (
        in_a_loop,
        THIRDS,
        lambda xs, l: sum(3 * xs[m] + 3 * m for m in members(l, [1])).astype("float32"),
    ),
}


@pytest.mark.parametrize("name", SPECIAL)
def test_special_results(results, name):
    _, xs, expected = SPECIAL[name]
    for l in range(8):
        got, want = results["special", name][l], expected(xs, l)
        np.testing.assert_allclose(got, want, rtol=1e-6 if name == "loop" else 0)
        if name != "loop":
            assert np.asarray(got).tobytes() == np.asarray(want, got.dtype).tobytes()
