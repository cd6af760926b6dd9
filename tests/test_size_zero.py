"""Tensors without elements: what NumPy says, in every kind of program, and no process ends."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from helpers import processes
from helpers.paths import WORKERS

import mesh_tensorflow as mtf

# Of each kind of operation one that reduces, moves or keeps the dimension b, which has no elements.
CASES = [
    "sin",
    "maximum_suffix",
    "add_crossed",
    "einsum_summed_out",
    "einsum_outer",
    "reduce_sum_dim",
    "reduce_sum_permuted_only",
    "reduce_all_dim",
    "reduce_any_to_scalar",
    "softmax_a",
    "softmax_b",
    "log_softmax_b",
    "top_3_of_a",
    "argmax",
    "shift_lazy",
    "transpose_3d",
    "anonymize",
    "shift_3_wrap",
    "shift_-5",
    "cumsum",
    "recompute_grad",
    "slicewise",
    "dense",
    "layer_norm",
    "concat",
    "stack_first",
]


@pytest.mark.slow
def test_cases():
    done = processes.python(WORKERS / "size_zero_worker.py", *CASES, MTF_CASE_SIZES="b:0")
    placings = {line.split()[0]: int(line.split()[1]) for line in done.stdout.splitlines()}
    assert list(placings) == CASES
    assert sum(placings.values()) > 3 * len(CASES)


def test_mean_of_nothing(tf_graph):
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    x = mtf.ones(mesh, [("a", 2), ("b", 0)])
    mean = mtf.reduce_mean(x, reduced_dim=x.shape[1])
    impl = mtf.placement_mesh_impl.PlacementMeshImpl("", "", [""])
    lowering = mtf.Lowering(mesh.graph, {mesh: impl})
    with tf.Session() as session:
        assert np.isnan(session.run(lowering.export_to_tf_tensor(mean))).tolist() == [True, True]


def test_gather_from_nothing(tf_graph):
    """Every index is out of range, and what is out of range is 0."""
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    x = mtf.ones(mesh, [("a", 2), ("b", 0)])
    index = mtf.zeros(mesh, [("i", 3)], dtype=tf.int32)
    taken = mtf.gather(x, index, x.shape[1])
    impl = mtf.placement_mesh_impl.PlacementMeshImpl("x:2", "b:x", ["", ""])
    lowering = mtf.Lowering(mesh.graph, {mesh: impl})
    with tf.Session() as session:
        found = session.run(lowering.export_to_tf_tensor(taken))
    np.testing.assert_array_equal(found, np.zeros(taken.shape.to_integer_list))


def test_top_k_of_nothing(tf_graph):
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    x = mtf.ones(mesh, [("a", 2), ("b", 0)])
    with pytest.raises(ValueError, match=r"k=1 must be between 1 and b=0"):
        mtf.top_k(x, x.shape[1], mtf.Dimension("k", 1))
