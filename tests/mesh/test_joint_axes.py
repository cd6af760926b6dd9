"""Several mesh axes that split one dimension together."""

import copy
import pickle

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import mesh_tensorflow as mtf
from mesh_tensorflow._core.layout import coordinate_of
from mesh_tensorflow._core.shape import JointAxis
from mesh_tensorflow.testing import harness

MESH = mtf.convert_to_shape("x:2,y:3")
A, B = mtf.Dimension("a", 12), mtf.Dimension("b", 6)
XY, YX = JointAxis([0, 1]), JointAxis([1, 0])


def test_rules():
    rules = mtf.convert_to_layout_rules("a:y+x,b:x")
    assert str(rules) == "LayoutRules{a:y+x, b:x}"
    layout = rules.tensor_layout([mtf.Dimension("c", 5), A], MESH)
    assert repr(layout) == "TensorLayout(None, (1, 0))"
    assert layout == mtf.TensorLayout([None, YX]) == mtf.TensorLayout([None, [1, 0]])
    assert layout != mtf.TensorLayout([None, XY])
    assert layout.mesh_axis_to_tensor_axis(3) == (1, 1, None)
    assert rules.mesh_axis(A, MESH) == YX
    assert rules.mesh_dimension_name_to_tensor_dimension_names("x") == ["a", "b"]
    assert mtf.tensor_dim_to_size_per_split(rules, MESH, A) == 2
    for again in (copy.deepcopy(YX), pickle.loads(pickle.dumps(YX))):
        assert again == YX
        assert again.axes == (1, 0)


def test_mesh_dimensions_that_are_not_there():
    """They are left out, as if their size were 1: one layout is used for several meshes."""
    rules = mtf.convert_to_layout_rules("a:z+y+x,b:z+q")
    assert rules.tensor_layout([A, B], MESH) == mtf.TensorLayout([YX, None])
    assert rules.tensor_layout([A], "y:3") == mtf.TensorLayout([0])
    # Of one processor, they split nothing.
    for mesh, layout in [("q:2,y:1,x:3,z:1", [2, 0]), ("x:1,y:1", [None, None])]:
        impl = mtf.MeshImpl(mesh, rules)
        assert impl.tensor_layout(mtf.Shape([A, B])) == mtf.TensorLayout(layout)
    assert rules.unknown_mesh_dimensions(MESH) == ["q", "z"]
    # A name may have the sign in it.
    assert rules.tensor_layout([A, B], "z+q:2") == mtf.TensorLayout([None, 0])


@pytest.mark.parametrize("rule", ["a:x+x", "a:x+", "a:+x", "a:x++y"])
def test_malformed_rules(rule):
    with pytest.raises(ValueError, match="joins mesh dimensions by '\\+': write each of them once"):
        mtf.convert_to_layout_rules(rule)


def test_answers_for_one_axis():
    impl = mtf.placement_mesh_impl.PlacementMeshImpl(MESH, "a:x+y,b:x", [""] * 6)
    assert impl.tensor_dimension_to_mesh_axis(B) == 0
    with pytest.raises(ValueError, match=r"a=12 is split over several .* x=2, y=3.*Call mesh_axis"):
        impl.tensor_dimension_to_mesh_axis(A)
    assert impl.mesh_axis(A) == XY
    assert impl.splitting_axes([B, A]) == [0, 0, 1]
    assert impl.shape[XY] == mtf.Dimension("x+y", 6)


@pytest.mark.slips
def test_a_misspelled_name():
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")
    mtf.zeros(mesh, [A])
    impl = mtf.placement_mesh_impl.PlacementMeshImpl(MESH, "a:x+yy", [""] * 6)
    with mtf.strict(), pytest.raises(
        ValueError, match=r"a:x\+yy splits less than it says: 'yy' is not there.*did you mean y"
    ):  # fmt: skip
        mtf.Lowering(graph, {mesh: impl})


def test_two_dimensions_of_a_tensor():
    rules = mtf.convert_to_layout_rules("a:x+y,b:y")
    with pytest.raises(ValueError, match=r"a=12, b=6 of .* are both split over mesh dim.* y=3"):
        rules.tensor_layout([A, B], MESH)


@pytest.mark.parametrize("axis", [XY, YX])
def test_processors(axis):
    """Groups are in the order of coordinates, of which the first axis is the outer part."""
    [group] = mtf.processor_groups(MESH, [axis])
    assert [coordinate_of(MESH, pnum, axis) for pnum in group] == list(range(6))
    assert group == (list(range(6)) if axis == XY else [0, 3, 1, 4, 2, 5])


def slices(n, shape=(6, 12)):
    return [np.random.default_rng(i).normal(size=shape).astype(np.float32) for i in range(n)]


def on_placement(fn, xs):
    impl = mtf.placement_mesh_impl.PlacementMeshImpl(
        MESH, "", [f"cpu:{i}" for i in range(6)], merge="none"
    )
    laid_out = fn(impl, impl.LaidOutTensor.from_tensor_list(list(map(tf.constant, xs))))
    return laid_out.to_laid_out_tensor().tensor_list


def on_separate_memories(fn, xs):
    with harness.separate_memories():
        return on_placement(fn, xs)


def on_simd(fn, xs):
    def program():
        impl = mtf.simd_mesh_impl.SimdMeshImpl(MESH, "")
        own = tf.gather(tf.constant(np.stack(xs)), impl.laid_out_pnum().one_slice)
        value = fn(impl, impl.LaidOutTensor([own])).one_slice
        # All processors return the same: the slices of all, by number.
        stacked = impl.LaidOutTensor([value[None]])
        for axis in (1, 0):
            stacked = impl.allconcat(stacked, axis, 0)
        return stacked.one_slice

    return mtf.simd_mesh_impl.replicate(program, devices=[f"/cpu:{i}" for i in range(6)])


COLLECTIVES = {
    "allreduce": (
        lambda impl, x, axis: impl.allreduce(x, [axis], "SUM"),
        lambda xs, i: sum(xs),
    ),
    "reduce_scatter": (
        lambda impl, x, axis: impl.reduce_scatter(x, axis, 1),
        lambda xs, i: np.split(sum(xs), 6, 1)[i],
    ),
    "allsplit": (
        lambda impl, x, axis: impl.allsplit(x, axis, 0),
        lambda xs, i: np.split(xs[i], 6, 0)[i],
    ),
    "allconcat": (
        lambda impl, x, axis: impl.allconcat(x, axis, 1),
        lambda xs, i: np.concatenate(xs, 1),
    ),
    "alltoall": (
        lambda impl, x, axis: impl.alltoall(x, axis, 1, 0),
        lambda xs, i: np.concatenate([np.split(x, 6, 1)[i] for x in xs], 0),
    ),
    "shift": (
        lambda impl, x, axis: impl.shift_by_n_processors(x, axis, 2, wrap=False),
        lambda xs, i: xs[i - 2] if i >= 2 else np.zeros_like(xs[0]),
    ),
    "several receivers": (
        lambda impl, x, axis: impl.receive(x, axis, [4, 4, None, 3, 0, 1]),
        lambda xs, i: [xs[4], xs[4], 0 * xs[0], xs[3], xs[0], xs[1]][i],
    ),
    "coordinate": (
        lambda impl, x, axis: impl.laid_out_pcoord(axis),
        lambda xs, i: np.int32(i),
    ),
}  # fmt: skip


@pytest.mark.parametrize("axis", [XY, YX], ids=["xy", "yx"])
@pytest.mark.parametrize("on", [on_placement, on_separate_memories, on_simd])
def test_collectives(on, axis, tf_graph):
    xs = slices(6)
    [group] = mtf.processor_groups(MESH, [axis])
    made = {
        name: on(lambda i, x, fn=fn: fn(i, x, axis), xs) for name, (fn, _) in COLLECTIVES.items()
    }
    with harness.session() as session:
        found = session.run(made)
    for name, (_, expected) in COLLECTIVES.items():
        for i, pnum in enumerate(group):
            np.testing.assert_allclose(
                found[name][pnum], expected([xs[p] for p in group], i), rtol=1e-5, err_msg=name
            )


def test_slices_begin_where_the_outer_axis_says():
    shape = mtf.Shape([A, mtf.Dimension("c", 5)])
    for layout, begins in [("a:x+y", [0, 2, 4, 6, 8, 10]), ("a:y+x", [0, 4, 8, 2, 6, 10])]:
        impl = mtf.placement_mesh_impl.PlacementMeshImpl(MESH, layout, [""] * 6)
        assert impl.slice_shape(shape) == [2, 5]
        assert [impl.slice_begin(shape, pnum)[0] for pnum in range(6)] == begins
    assert impl.mesh_axis_to_cumprod(mtf.Shape([mtf.Dimension("c", 5), A])) == [15, 5]


@pytest.mark.slips
@pytest.mark.parametrize("before", ["a:x+y", "a:y+x", "b:x+y", "a:x,b:y", "a:y"])
@pytest.mark.parametrize("after", ["c:x+y", "c:y+x", "d:y+x", "c:y,d:x", "d:x"])
def test_reshapes_between_layouts(before, after, tf_graph):
    x = np.arange(72, dtype=np.float32).reshape(12, 6)
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")
    y = mtf.reshape(mtf.import_tf_tensor(mesh, x, [A, B]), "c:6,d:12")
    impl = mtf.placement_mesh_impl.PlacementMeshImpl(
        MESH, f"{before},{after}", [""] * 6, merge="none"
    )
    lowering = mtf.Lowering(graph, {mesh: impl})
    value = lowering.export_to_tf_tensor(y)
    with tf.Session() as session:
        np.testing.assert_array_equal(session.run(value), x.reshape(6, 12))


@pytest.mark.parametrize("layout, there, back", [
    ("b:x+y,d:x,c:y", ["alltoall"], ["alltoall"]),  # as of a batch and experts
    ("b:y+x,d:y,c:x", ["alltoall"], ["alltoall"]),
    ("b:x+y,d:y,c:x", ["alltoall", "allconcat"], ["allconcat", "allconcat"]),  # the outer axis
    ("b:x+y,d:x", ["allconcat"], []),
    ("b:x+y,d:x+y", [], []),
])  # fmt: skip
@pytest.mark.parametrize("is_back", [False, True])
def test_reshapes_to_other_names(layout, there, back, is_back, tf_graph):
    """Sizes stay, and parts of one dimension are exchanged for parts of another one."""
    x = np.arange(216, dtype=np.float32).reshape(6, 12, 3)
    shapes = ["a:6,b:12,e:3", "c:6,d:12,e:3"]
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")
    before, after = shapes[::-1] if is_back else shapes
    y = mtf.reshape(mtf.import_tf_tensor(mesh, x, before), after)
    impl = mtf.placement_mesh_impl.PlacementMeshImpl(MESH, layout, [""] * 6, merge="none")
    lowering = mtf.Lowering(graph, {mesh: impl})
    with tf.Session() as session:
        np.testing.assert_array_equal(session.run(lowering.export_to_tf_tensor(y)), x)
    assert [c.kind for _, _, c in lowering.collectives] == (back if is_back else there)


@pytest.mark.parametrize("rules", ["a:y+x,b:x+y", "a:x+y,b:x,d:y", "a:x,b:y+x", "a:x,b:x+z", "b:y"])
@pytest.mark.parametrize("merged", [{}, {"merge": "memory"}, {"apart": True, "pairs": True}])
def test_reshapes_of_partial_sums(rules, merged, tf_graph):
    """Merged processors count, and delay, what the requested ones do, whatever moves in them."""
    placing = harness.Placing("x:2,y:2,z:2", f"k:z,{rules}", **merged)
    rng = np.random.RandomState(0)
    p, q, w = rng.randn(16, 8), rng.randn(16, 8), rng.randn(8)
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")
    x, y, by = (
        mtf.import_tf_tensor(mesh, t.astype("float32"), shape)
        for t, shape in [(p, "a:16,k:8"), (q, "a:16,k:8"), (w, "k:8")]
    )
    sums = [mtf.einsum([t, by], output_shape="a:16") for t in (x, y)]
    # Two sums of one allreduce, if the reshapes leave both of them partial.
    total = mtf.add(*(mtf.reshape(s, "b:4,d:4") for s in sums))
    lowered = harness.lower(graph, mesh, placing, [total])
    assert lowered.counted == lowered.predicted
    with harness.session() as session:
        [value] = session.run(lowered.exports)
    np.testing.assert_allclose(value, ((p + q) @ w).reshape(4, 4), rtol=1e-5)


def test_a_sum_over_all_is_one_allreduce(tf_graph):
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")
    a = mtf.zeros(mesh, [A, mtf.Dimension("c", 5)])
    total = mtf.reduce_sum(a, reduced_dim=A)
    impl = mtf.placement_mesh_impl.PlacementMeshImpl(MESH, "a:y+x", [""] * 6, merge="none")
    lowering = mtf.Lowering(graph, {mesh: impl})
    lowering.export_to_tf_tensor(total)
    [(_, _, collective)] = lowering.collectives
    assert (collective.kind, collective.mesh_axes) == ("allreduce", (0, 1))
    assert "allreduce/[1, 0]/reduce_op" in {c[0] for c in lowering.counters}
