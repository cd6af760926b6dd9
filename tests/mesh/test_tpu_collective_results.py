"""TpuCollectives: the results on XLA's CPU replicas.

The results are those of the very operations of the program, `xla_cpu_replicas.py` says how. AllToAll,
CollectivePermute, While and all that is around them is lowered by TensorFlow. What is not:

* CrossReplicaSum becomes `mhlo.cross-replica-sum`, for which StableHLO has no name; the tests write
  the all_reduce that it is for XLA.
* TPUReplicatedInput, TPUReplicatedOutput and TPUReplicateMetadata are what a TPU's host does: each
  replica gets its part directly.

XLA adds bfloat16 in float32 on CPUs anyway, so what dtype is summed in only shows in the operations;
and what a TPU's own compiler makes of a program is not tested.
"""

import ml_dtypes
import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from helpers.mesh import xla_cpu_replicas
from helpers.mesh.tpu_mesh import L2P, MESH, P2L

import mesh_tensorflow as mtf
from mesh_tensorflow._core.layout import coordinate_of
from mesh_tensorflow._core.shape import JointAxis, single_axes
from mesh_tensorflow._mesh.tpu_program import TpuCollectives

# The whole mesh as one axis, of which b is the outer part.
ALL = JointAxis([1, 0])


def members(logical, mesh_axes):
    """Returns the logical numbers of a processor's group, in order."""
    own, single = mtf.pnum_to_processor_coordinates(MESH, logical), single_axes(mesh_axes)
    found = [
        pnum
        for pnum in range(MESH.size)
        if all(
            c == o
            for axis, (c, o) in enumerate(zip(mtf.pnum_to_processor_coordinates(MESH, pnum), own))
            if axis not in single
        )
    ]
    return sorted(found, key=lambda pnum: [coordinate(pnum, axis) for axis in mesh_axes])


def coordinate(logical, axis):
    return coordinate_of(MESH, logical, axis)


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
    "gather ba": (lambda c, x: c.allgather(x, ALL), gathered(ALL), ["float32"]),
    "sum ba": (lambda c, x: c.allreduce(x, [ALL], "SUM"), reduced([0, 1], "SUM"), ["int32"]),
    "max ba": (lambda c, x: c.allreduce(x, [ALL], "MAX"), reduced([0, 1], "MAX"), ["float32"]),
    "alltoall ba": (lambda c, x: c.alltoall(x, ALL, 1, 0), exchanged(ALL, 1, 0), ["float32"]),
    "shift ba": (
        lambda c, x: c.permute(x, ALL, [None, *range(7)]),
        permuted(ALL, [None, *range(7)]),
        ["float32"],
    ),
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
