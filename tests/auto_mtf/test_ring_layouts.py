"""Layouts of ring attention: the length and the memory are split alike, or no layout is proposed."""

import itertools

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from auto_mtf.test_step_time import SLOW
from transformer.test_ring_language_model import model

import mesh_tensorflow as mtf
from mesh_tensorflow.auto_mtf.layout_optimizer import LayoutOptimizer
from mesh_tensorflow.auto_mtf.memory_estimator import MemoryEstimator
from mesh_tensorflow.auto_mtf.step_time import StepEstimator
from mesh_tensorflow.placement_mesh_impl import PlacementMeshImpl
from mesh_tensorflow.transformer import transformer

MESH = "m:2,n:2"


def attention(ring, length=8, hidden=0):
    """Returns (mesh, outputs): causal attention, a dense layer if it is `hidden`, and updates."""
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    shape = mtf.convert_to_shape(f"batch:{3 if hidden else 2},length:{length},d:4")
    x = mtf.import_tf_tensor(mesh, tf.zeros(shape.to_integer_list), shape)
    w = [mtf.get_variable(mesh, name, "d:4,e:4") for name in "qkv"]
    q, k, v = (mtf.rename_dimension(mtf.einsum([x, t], reduced_dims=shape[2:]), "e", "d")
               for t in w)  # fmt: skip
    k, v = (mtf.rename_dimension(t, "length", "memory") for t in (k, v))
    memory, d = k.shape.dims[1:]
    ids = [mtf.range(mesh, dim, tf.int32) for dim in (shape[1], memory)]
    x = mtf.layers.blocked_attention(
        q, k, v, memory, d, d, visible=[("greater_equal", *ids)], ring=ring
    )
    if hidden:
        x = mtf.einsum([x, mtf.get_variable(mesh, "w", f"d:4,h:{hidden}")], reduced_dims=[d])
    loss = mtf.reduce_sum(mtf.square(x))
    variables = mesh.graph.trainable_variables
    grads = mtf.gradients([loss], [t.value for t in variables])
    mtf.optimize.SgdOptimizer(0.1).apply_grads(grads, variables)
    return mesh, [loss]


def lower(mesh, layout, mesh_shape=MESH):
    """Lowers a program, and all its updates.

    Raises:
      ValueError: it cannot be lowered so.
    """
    rules = ",".join(f"{d}:{m}" for d, m in layout.items())
    devices = [f"cpu:{i}" for i in range(mtf.convert_to_shape(mesh_shape).size)]
    impl = PlacementMeshImpl(mesh_shape, rules, devices)
    with tf.variable_scope("_".join(["split", *itertools.chain(*layout.items())])):
        lowering = mtf.Lowering(mesh.graph, {mesh: impl}, autostack=False)
        for op in mesh.graph.operations:
            if isinstance(op, mtf.Assign):
                lowering.lowered_operation(op)


def every_layout(space, names=("batch", "length", "memory", "d", "e")):
    """Returns all assignments of mesh dimensions to dimensions, legal or not."""
    picks = itertools.product([None, *space.mesh_sizes], repeat=len(names))
    return [{d: m for d, m in zip(names, pick) if m} for pick in picks]


@pytest.mark.every
@pytest.mark.parametrize("exchanges", [False, True])
def test_brute_force(exchanges, tf_graph):
    """Legal layouts are lowered; the choice is the best of them, in time and in memory."""
    mesh, outputs = attention(True)
    one = StepEstimator(mesh.graph, MESH, outputs, SLOW, exchanges=exchanges)
    legal = [layout for layout in every_layout(one.space) if one.space.is_legal(layout)]
    assert all(layout.get("length") == layout.get("memory") for layout in legal)
    for m in "mn":
        assert {"length": m, "memory": m} in legal
    for layout in legal:
        lower(mesh, layout)
    dims = tuple(one.space.dims)
    rows = one.space.assignments(dims)
    found = sorted(sorted(one.space.layout(dims, row).items()) for row in rows)
    assert found == sorted(sorted(layout.items()) for layout in legal)
    estimates = [one.estimate(layout) for layout in legal]
    seconds = sorted({float(f"{e.seconds.total:.6g}") for e in estimates})
    peaks = sorted({e.peak_bytes for e in estimates})
    for limit in (None, peaks[1], peaks[0]):
        found = one.solve(limit)
        assert found.layout in legal
        fits = [e.seconds.total for e in estimates if limit is None or e.peak_bytes <= limit]
        assert found.seconds.total <= min(fits) * (1 + 2e-6)
    best = one.best(len(legal))
    assert all(e.layout in legal for e in best)
    np.testing.assert_allclose([e.seconds.total for e in best], seconds, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("mesh_shape, hidden", [(MESH, 0), ("m:2", 64)])
def test_brute_force_of_memory(mesh_shape, hidden, tf_graph):
    """A large layer is split instead of the length, which leaves the memory whole, too."""
    mesh, outputs = attention(True, length=2 if hidden else 8, hidden=hidden)
    optimizer = LayoutOptimizer(MemoryEstimator(mesh.graph, mesh_shape, outputs))
    space = StepEstimator(mesh.graph, mesh_shape, outputs, SLOW).space
    found = optimizer.solve()
    pairs = dict(piece.split(":") for piece in found.split(";"))
    assert space.is_legal(pairs)
    assert not hidden or pairs["h"] == "m"
    texts = [";".join(f"{d}:{m}" for d, m in layout.items())
             for layout in every_layout(space, space.dims) if space.is_legal(layout)]  # fmt: skip
    assert optimizer.evaluate_layout(found) == min(map(optimizer.evaluate_layout, texts))


@pytest.mark.parametrize("split", ["length", "memory"])
def test_what_makes_no_ring_is_not_proposed(split, tf_graph):
    mesh, outputs = attention(True)
    space = StepEstimator(mesh.graph, MESH, outputs, SLOW).space
    assert not space.is_legal({split: "m"})
    with pytest.warns(mtf.MeshTensorFlowWarning, match="where not one mesh dimension splits both"):
        lower(mesh, {split: "m"})


def test_without_a_ring_one_is_split_alone(tf_graph):
    mesh, outputs = attention(False)
    space = StepEstimator(mesh.graph, MESH, outputs, SLOW).space
    assert not space.alike
    assert space.is_legal({"length": "m"}) and space.is_legal({"memory": "m"})


@pytest.mark.parametrize("ring, dims", [
    ("zigzag", {"batch", "d", "e"}), (True, {"batch", "d", "e", "length", "memory"}),
])  # fmt: skip
def test_halves_have_to_be_whole(ring, dims, tf_graph):
    """Two processors cut 6 positions into four parts, or into two."""
    mesh, outputs = attention(ring, length=6)
    assert {*StepEstimator(mesh.graph, "m:2", outputs, SLOW).space.dims} == dims


def test_lengths_that_meet_elsewhere_are_whole(tf_graph):
    """No operation may have both if they are split over one mesh dimension."""
    mesh, outputs = attention(True)
    x = mtf.zeros(mesh, "length:8,memory:8")
    space = StepEstimator(mesh.graph, MESH, [*outputs, mtf.relu(x)], SLOW).space
    assert {*space.dims} == {"batch", "d", "e"}


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["time", "memory"])
@pytest.mark.parametrize("mesh_shape", ["m:4", "m:2,n:2"])
def test_a_language_model(objective, mesh_shape, tf_graph):
    """Few sequences of many positions: the ring is split, and what is proposed is lowered."""
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    shape = mtf.convert_to_shape("batch:1,length:16")
    targets = mtf.import_tf_tensor(mesh, tf.ones(shape.to_integer_list, tf.int32), shape)
    made = model(True)
    _, loss = made.call_simple(transformer.autoregressive_inputs(targets), targets, True)
    variables = mesh.graph.trainable_variables
    grads = mtf.gradients([loss], [v.value for v in variables])
    mtf.optimize.SgdOptimizer(0.1).apply_grads(grads, variables)
    rules = mtf.auto_mtf.layout(mesh.graph, mesh_shape, [loss], objective=objective)
    found = dict(rules.pairs)
    assert found.get("length") == found.get("memory_length")
    lower(mesh, found, mesh_shape)
