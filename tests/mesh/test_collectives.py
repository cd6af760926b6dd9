"""Rings, reducers and the collectives of PlacementMeshImpl against NumPy."""

import functools
import itertools
import types

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import mesh_tensorflow as mtf
from mesh_tensorflow import placement_mesh_impl as placement
from mesh_tensorflow.placement_mesh_impl import PlacedReducer
from mesh_tensorflow.testing import harness

SIZES = [1, 2, 3, 4, 5]
FNS = {"SUM": np.sum, "MAX": np.max, "MIN": np.min}


def cpus(n):
    return [f"cpu:{i}" for i in range(n)]


def arrays(n, size, seed=0):
    rng = np.random.RandomState(seed)
    return [rng.normal(size=size).astype(np.float32) for _ in range(n)]


def evaluate(tensors):
    with harness.session() as session:
        return session.run(tensors)


def on_devices(xs):
    """Returns one placeholder-free tensor on each device."""
    tensors = []
    for x, device in zip(xs, cpus(len(xs))):
        with tf.device(device):
            tensors.append(tf.identity(tf.constant(x)))
    return tensors


# Small tensors are reduced whole, large ones in shards, unless the devices do not divide them.
@pytest.mark.parametrize("fn", [placement.allreduce_ring, placement.allreduce_ring_single_shard])
@pytest.mark.parametrize("size", [[3, 4], [40, 60], [1031]])
@pytest.mark.parametrize("n", SIZES)
def test_allreduce_ring(fn, size, n, tf_graph):
    xs = arrays(n, size)
    for name, oracle in FNS.items():
        results = fn(on_devices(xs), cpus(n), name)
        for i, (value, tensor) in enumerate(zip(evaluate(results), results, strict=True)):
            np.testing.assert_allclose(value, oracle(xs, axis=0), rtol=1e-5, atol=1e-6)
            assert tf.DeviceSpec.from_string(tensor.device).device_index == i


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("n", SIZES)
def test_allconcat_ring(axis, n, tf_graph):
    xs = arrays(n, [2, 3])
    for value in evaluate(placement.allconcat_ring(on_devices(xs), cpus(n), axis)):
        np.testing.assert_array_equal(value, np.concatenate(xs, axis))


@pytest.mark.parametrize("fn", [placement.alltoall_ring, placement.alltoall_pointtwise])
@pytest.mark.parametrize("n", SIZES)
def test_alltoall(fn, n, tf_graph):
    for split_axis, concat_axis in itertools.product([0, 1], repeat=2):
        xs = arrays(n, [60, 120])
        parts = [np.split(x, n, split_axis) for x in xs]
        values = evaluate(fn(on_devices(xs), cpus(n), split_axis, concat_axis))
        for i, value in enumerate(values):
            expected = np.concatenate([part[i] for part in parts], concat_axis)
            np.testing.assert_array_equal(value, expected)


def test_rings_need_a_tensor_for_each_device(tf_graph):
    with pytest.raises(ValueError, match="got 1 tensors for 2 devices"):
        placement.allreduce_ring([tf.zeros([2])], cpus(2))


@pytest.mark.parametrize("method", ["ring", "collective", "auto"])
@pytest.mark.parametrize("reduction", FNS)
@pytest.mark.parametrize(
    "domains",
    [["m"] * 4, ["m0", "m1", "m2", "m3"], ["m0", "m0", "m1", "m1"], ["m0", "m1", "m0", "m1"]],
)
def test_reducer(method, reduction, domains, tf_graph):
    """All in one memory, each in its own, and two and two."""
    xs = arrays(4, [5, 6])
    reducer = PlacedReducer(mtf.convert_to_shape("a:2,b:2"), cpus(4), domains, method)
    for axes, groups in [
        ([0, 1], [[0, 1, 2, 3]]),
        ([1], [[0, 1], [2, 3]]),
        ([0], [[0, 2], [1, 3]]),
        ([], [[0], [1], [2], [3]]),
    ]:
        values = evaluate(reducer.allreduce(on_devices(xs), axes, reduction))
        for group in groups:
            expected = FNS[reduction]([xs[p] for p in group], axis=0)
            for p in group:
                np.testing.assert_allclose(values[p], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("domains", [["m"] * 4, ["m0", "m1", "m2", "m3"], ["m0", "m0", "m1", "m1"]])
def test_reduce_scatter_of_memories(domains, tf_graph):
    """What goes from one memory to another is parts of slices, never whole ones."""
    xs = arrays(4, [5, 8])
    reducer = PlacedReducer(mtf.convert_to_shape("a:1,b:4"), cpus(4), domains, "auto")
    assert reducer.reduce_scatter(xs, 0, 1) == xs
    parts = reducer.reduce_scatter(on_devices(xs), 1, 1)
    for p, (value, part) in enumerate(zip(evaluate(parts), parts, strict=True)):
        np.testing.assert_allclose(value, np.split(sum(xs), 4, 1)[p], rtol=1e-5, atol=1e-6)
        for operation in tf_graph.get_operations():
            for x in operation.inputs:
                memories = {domains[device(t)] for t in (x, operation) if t.device}
                assert len(memories) < 2 or x.shape.num_elements() <= 10, operation
        assert device(part) == p or domains == ["m"] * 4


def device(x):
    return tf.DeviceSpec.from_string(x.device).device_index


def test_reducer_shares_equal_work(tf_graph):
    x, y = on_devices(arrays(2, [3]))
    reducer = PlacedReducer(mtf.convert_to_shape("a:2,b:2"), cpus(4), ["m"] * 4, "auto")
    out = reducer.allreduce([x, y, x, y], [1], "SUM")
    assert out[0] is out[1] is out[2] is out[3]


@pytest.mark.parametrize("method", ["ring", "collective", "auto"])
def test_einsum_on_separate_memories(method, tf_graph):
    rng = np.random.RandomState(0)
    x, w = rng.normal(size=[8, 16]), rng.normal(size=[16, 4])
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")
    mx = mtf.import_tf_tensor(mesh, tf.constant(x, tf.float32), "a:8,b:16")
    mw = mtf.import_tf_tensor(mesh, tf.constant(w, tf.float32), "b:16,c:4")
    y = mtf.relu(mtf.einsum([mx, mw]))
    with harness.separate_memories():
        impl = placement.PlacementMeshImpl("x:2,y:4", "a:x,b:y", cpus(8), allreduce=method)
        lowering = mtf.Lowering(graph, {mesh: impl})
    assert len(set(impl.domains)) == 8
    value = evaluate(lowering.export_to_tf_tensor(y))
    np.testing.assert_allclose(value, np.maximum(x @ w, 0), rtol=1e-5, atol=1e-5)
    kinds = {op.type for op in tf_graph.get_operations()}
    assert ("CollectiveReduceV2" in kinds) == (method == "collective")


# -- the vocabulary of MeshImpl, on a mesh of 2 x 3

MESH = "x:2,y:3"


def laid_out(impl, seed=0, size=(6, 6)):
    xs = arrays(impl.size, size, seed)
    return xs, impl.LaidOutTensor(on_devices(xs))


@pytest.fixture(params=[False, True], ids=["shared", "separate"])
def impl(request, tf_graph):
    if not request.param:
        yield placement.PlacementMeshImpl(MESH, "", cpus(6))
        return
    with harness.separate_memories():
        yield placement.PlacementMeshImpl(MESH, "", cpus(6))


def slices_of(value):
    return evaluate(value.to_laid_out_tensor().tensor_list)


@pytest.mark.parametrize("axes", [[0], [1], [0, 1], []])
def test_allreduce(impl, axes):
    xs, x = laid_out(impl)
    for name, fn in FNS.items():
        expected = fn(np.reshape(xs, [2, 3, 6, 6]), axis=tuple(axes), keepdims=True)
        expected = np.broadcast_to(expected, [2, 3, 6, 6]).reshape(6, 6, 6)
        np.testing.assert_allclose(
            slices_of(impl.allreduce(x, axes, name)), expected, rtol=1e-5, atol=1e-6
        )


@pytest.mark.parametrize("mesh_axis", [0, 1])
@pytest.mark.parametrize("of", ["placement", "base class"])
def test_reduce_scatter(impl, mesh_axis, of):
    """The base class builds it of other collectives, for mesh implementations that have none."""
    xs, x = laid_out(impl)
    base = functools.partial(mtf.MeshImpl.reduce_scatter, impl)
    method = {"placement": impl.reduce_scatter, "base class": base}[of]
    parts = slices_of(method(x, mesh_axis, 1))
    for group in mtf.processor_groups(impl.shape, [mesh_axis]):
        total = sum(xs[p] for p in group)
        for p, expected in zip(group, np.split(total, len(group), 1), strict=True):
            np.testing.assert_allclose(parts[p], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mesh_axis", [0, 1])
def test_allconcat_allsplit_alltoall(impl, mesh_axis):
    xs, x = laid_out(impl)
    n = [2, 3][mesh_axis]
    groups = mtf.processor_groups(impl.shape, [mesh_axis])
    joined = slices_of(impl.allconcat(x, mesh_axis, 1))
    kept = slices_of(impl.allsplit(x, mesh_axis, 0))
    sent = slices_of(impl.alltoall(x, mesh_axis, 0, 1))
    for group in groups:
        for i, p in enumerate(group):
            np.testing.assert_array_equal(joined[p], np.concatenate([xs[q] for q in group], 1))
            np.testing.assert_array_equal(kept[p], np.split(xs[p], n)[i])
            expected = np.concatenate([np.split(xs[q], n)[i] for q in group], 1)
            np.testing.assert_array_equal(sent[p], expected)


@pytest.mark.parametrize("wrap", [True, False])
@pytest.mark.parametrize("offset", [-4, -1, 0, 1, 2, 5])
def test_shift_by_n_processors(impl, offset, wrap):
    xs, x = laid_out(impl)
    values = slices_of(impl.shift_by_n_processors(x, 1, offset, wrap))
    for p, value in enumerate(values):
        row, source = p // 3 * 3, p % 3 - offset
        inside = 0 <= source < 3
        expected = xs[row + source % 3] if wrap or inside else np.zeros([6, 6])
        np.testing.assert_array_equal(value, expected)


def test_where_a_processor_is(impl):
    assert impl.laid_out_pnum().tensor_list == list(range(6))
    assert slices_of(impl.laid_out_pcoord(0)) == [0, 0, 0, 1, 1, 1]
    assert slices_of(impl.laid_out_pcoord(1)) == [0, 1, 2, 0, 1, 2]


def test_slice_numbers(tf_graph):
    impl = placement.PlacementMeshImpl(MESH, "a:y", cpus(6))
    assert slices_of(impl.laid_out_slice_num(mtf.Shape([("a", 6)]))) == [0, 1, 2, 0, 1, 2]
    assert slices_of(impl.laid_out_slice_num(mtf.Shape([("b", 6)]))) == [0] * 6
    assert impl.slice_begin(mtf.Shape([("b", 4), ("a", 6)]), 5) == [0, 4]
    assert impl.slice_shape(mtf.Shape([("b", 4), ("a", 6)])) == [4, 2]
    assert impl.laid_out_size(mtf.Shape([("b", 4), ("a", 6)])) == 48
    assert impl.mesh_axis_to_cumprod(mtf.Shape([("b", 4), ("a", 6)])) == [None, 4]


def test_slicewise(impl):
    xs, x = laid_out(impl)
    total = impl.slicewise(lambda a, n, rest: a * n + rest[0], x, 2.0, [1, 2])
    np.testing.assert_allclose(slices_of(total), np.array(xs) * 2 + 1, rtol=1e-6)
    pair = impl.slicewise(lambda a: (a, a + 1), x)
    assert isinstance(pair, tuple) and len(pair) == 2
    np.testing.assert_allclose(slices_of(pair[1]), np.array(xs) + 1, rtol=1e-6)


def test_what_is_equal_is_computed_in_each_memory(impl):
    devices = [t.device for t in impl.slicewise(lambda: tf.random_uniform([4])).tensor_list]
    assert len(set(devices)) == len(set(impl.domains))
    same = impl.slicewise(lambda x: x + 1.0, impl.LaidOutTensor([tf.zeros([4])] * 6)).tensor_list
    assert len({id(t) for t in same}) == len(set(impl.domains))


def test_import_laid_out_tensor(tf_graph):
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")
    impl = placement.PlacementMeshImpl(MESH, "a:y,b:x", cpus(6))
    whole = np.arange(24.0, dtype=np.float32).reshape(6, 4)
    shape = mtf.Shape([("a", 6), ("b", 4)])
    pieces = impl.LaidOutTensor.from_tensor_list(impl.make_slices(tf.constant(whole), shape))
    y = mtf.import_laid_out_tensor(mesh, pieces, shape) * 2
    total = mtf.ReduceOperation(y, mtf.Shape([]), "sum").outputs[0]
    lowering = mtf.Lowering(graph, {mesh: impl})
    np.testing.assert_array_equal(evaluate(lowering.export_to_tf_tensor(y)), whole * 2)
    assert evaluate(lowering.export_to_tf_tensor(total)) == whole.sum() * 2
    own = types.SimpleNamespace(tensor_list=pieces.tensor_list)  # a user's own class
    imported = mtf.import_laid_out_tensor(mesh, own, shape)
    assert imported.dtype == tf.float32
    assert imported.operation.unsplittable_dims == {"a", "b"}


def test_import_laid_out_tensor_that_does_not_fit(tf_graph):
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")
    impl = placement.PlacementMeshImpl(MESH, "a:y", cpus(6))
    wrong = impl.LaidOutTensor([tf.zeros([6, 4])] * 6)
    mtf.import_laid_out_tensor(mesh, wrong, "a:6,b:4")
    with pytest.raises(ValueError, match=r"have shape \[2, 4\] in this layout, but have \[6, 4\]"):
        mtf.Lowering(graph, {mesh: impl})


def test_lazy_sum_is_made_once(tf_graph):
    calls = []
    impl = placement.PlacementMeshImpl("x:2", "", cpus(2))
    xs, x = laid_out(impl)
    lazy = mtf.LazyAllreduceSum(impl, x, [0], add_counter_fn=lambda: calls.append(1))
    assert lazy.slice_shape == [6, 6] and calls == []
    first = lazy.to_laid_out_tensor()
    assert lazy.to_laid_out_tensor() is first and calls == [1]
    np.testing.assert_allclose(slices_of(first)[0], xs[0] + xs[1], rtol=1e-6)
    other = mtf.LazyAllreduceSum(impl, x, [0])
    assert not mtf.compatible_lazy_allreduce_sums([lazy, other])  # one is summed already
    assert mtf.compatible_lazy_allreduce_sums([other, mtf.LazyAllreduceSum(impl, x, [0])])
    assert not mtf.compatible_lazy_allreduce_sums([other, x])
    assert mtf.convert_args_to_laid_out_tensors([3, other])[0] == 3
    made = []
    again = mtf.LazyLaidOutTensor(lambda: made.append(1) or x, [6, 6])
    assert again.to_laid_out_tensor() is again.to_laid_out_tensor() and made == [1, 1]


def test_default_devices(tf_graph):
    impl = placement.PlacementMeshImpl([], "")
    assert impl.size == 1 and len(impl.devices) == 1 and "CPU:0" in impl.devices[0]


def test_parallel(tf_graph):
    def fn(x, y, z=0):
        v = tf.get_variable("v", [], initializer=tf.constant_initializer(x))
        return v.name, v.device, x + y + z

    results = mtf.parallel(cpus(3), fn, [1.0, 2.0, 3.0], 10, z=[100, 200, 300])
    assert [r[0] for r in results] == [f"parallel_{i}/v:0" for i in range(3)]
    assert [tf.DeviceSpec.from_string(r[1]).device_index for r in results] == [0, 1, 2]
    assert [r[2] for r in results] == [111, 212, 313]


class Assignment:
    """A TPU of 2 x 4 x 2 chips, or of 4 x 2 chips with two cores each; replicas row by row."""

    num_replicas = 16

    def __init__(self, mesh_shape):
        self.topology = type("Topology", (), {"mesh_shape": mesh_shape})()

    def coordinates(self, replica, logical_core):
        assert logical_core == 0
        return np.array(np.unravel_index(replica, self.topology.mesh_shape))


def test_processor_numbers_of_a_tpu():
    """What the classic release gives."""
    chips, cores = Assignment([2, 4, 2, 1]), Assignment([4, 2, 1, 2])
    coordinates = [mtf.pnum_to_processor_coordinates_nd([8, 2, 1], p, chips) for p in (0, 1, 5)]
    assert coordinates == [(0, 0, 0, 0), (0, 0, 1, 0), (0, 2, 1, 0)]

    def numbers(assignment, sizes):
        walk = list(itertools.product(*map(range, sizes)))
        return mtf.processor_coordinates_to_pnum_map_nd(sizes, walk, assignment)

    assert numbers(chips, [2, 4, 1]) == [0, 2, 4, 6, 8, 10, 12, 14]
    assert numbers(chips, [8, 2, 1]) == [0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15]
    assert numbers(chips, [2, 8]) == [0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15]
    assert numbers(cores, [8, 1, 2]) == [1, 1, 5, 5, 9, 9, 13, 13, 3, 3, 7, 7, 11, 11, 15, 15]
    assert numbers(cores, [2, 8]) == [1, 9, 3, 11, -1, -1, -1, -1, 5, 13, 7, 15, -1, -1, -1, -1]
    assert mtf.utils.topology_rank(cores.topology) == 4
