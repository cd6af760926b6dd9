"""Contractions of slices: the same as tf.einsum, and by matrix products where one index is shared."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import mesh_tensorflow as mtf
from mesh_tensorflow._mesh.slice_functions import contract, einsum_equation, einsum_slice

SIZES = {"s": 1, "t": 1, "a": 3, "b": 4, "c": 5, "d": 2}


def values(labels):
    sizes = [SIZES[c] for c in labels]
    return np.random.RandomState(len(labels)).normal(size=sizes).astype("float32")


@pytest.mark.parametrize("equation", [
    "sab,sbc->sac", "asb,bsc->sac", "sab,sac->sbc", "stab,stbc->stac", "asb,cb->asc", "sab,sab->sb",
    "sa,sa->s", "dab,dbc->dac", "dab,dcb->dac", "dba,dbc->dac", "dsab,dscb->dsac", "dabc,dbc->da",
])  # fmt: skip
def test_equals_einsum(equation):
    left, right = map(values, equation.split("->")[0].split(","))
    with tf.Graph().as_default() as graph, tf.Session() as session:
        y = contract(equation, tf.constant(left), tf.constant(right))
        np.testing.assert_allclose(
            session.run(y), np.einsum(equation, left, right), rtol=1e-5, atol=1e-6
        )
        kinds = {op.type for op in graph.get_operations()}
    assert y.shape.as_list() == [SIZES[c] for c in equation.split("->")[1]]
    if equation in ("sab,sbc->sac", "stab,stbc->stac"):
        assert "MatMul" in kinds and not kinds & {"BatchMatMulV2", "Einsum"}
    if equation.startswith("dab,d") and equation.endswith("->dac"):
        assert "BatchMatMulV3" in kinds and "Einsum" not in kinds


@pytest.mark.parametrize("rows, kind", [(1, "MatMul"), (8, "BatchMatMulV2"), (65, "MatMul")])
@pytest.mark.parametrize("equation", ["ab,bc->ac", "ab,cb->ac", "ab,bde->ade", "ade,dec->ac"])
def test_products_of_steps_of_decoding(equation, rows, kind):
    """Few rows times a kernel are a batch of one product, which has faster kernels."""
    sizes = {"a": rows, "b": 66, "c": 68, "d": 6, "e": 11}
    left, right = (
        np.random.RandomState(1).normal(size=[sizes[c] for c in labels]).astype("f")
        for labels in equation.split("->")[0].split(",")
    )
    with tf.Graph().as_default() as graph, tf.Session() as session:
        y = contract(equation, tf.constant(left), tf.constant(right))
        found = session.run(y)
        kinds = {op.type for op in graph.get_operations()}
    np.testing.assert_allclose(found, np.einsum(equation, left, right), rtol=1e-4, atol=1e-4)
    assert kinds & {"MatMul", "BatchMatMulV2", "BatchMatMulV3", "Einsum"} == {kind}


@pytest.mark.parametrize("left, right, output", [
    ("dab", "dac", "dcb"), ("dab", "dac", "dbc"), ("dba", "dac", "dcb"), ("ab", "ac", "cb"),
    ("bc", "dab", "dac"), ("dab", "bc", "dac"), ("cb", "ab", "ac"),
])  # fmt: skip
def test_operands_are_in_the_order_of_the_output(left, right, output):
    """Dimensions of the first operand alone come first, so kernels transpose no output."""

    def shape(labels):
        return mtf.Shape([mtf.Dimension(c, SIZES[c]) for c in labels])

    equations = []

    def einsum(input_shapes, output_shape, *slices):
        equations.append(einsum_equation(input_shapes, output_shape))
        return tf.einsum(equations[-1], *slices)

    with tf.Graph().as_default(), tf.Session() as session:
        y = einsum_slice(
            [tf.constant(values(left)), tf.constant(values(right))],
            [shape(left), shape(right)],
            shape(output),
            einsum,
        )
        expected = np.einsum(f"{left},{right}->{output}", values(left), values(right))
        np.testing.assert_allclose(session.run(y), expected, rtol=1e-5, atol=1e-6)
    [equation] = equations
    inputs, result = equation.split("->")
    first, second = inputs.split(",")
    sides = [c in second for c in result if (c in first) != (c in second)]
    assert sides == sorted(sides)


@pytest.mark.parametrize("equation", [
    "bc,bca->a", "da,dabc->dbc", "dab,dcab->dc", "dab,dabc->dc", "ab,cab->c",
    "bc,bac->a", "cb,bca->a", "da,dabc->dcb",
])  # fmt: skip
def test_sums_by_weights_are_products_of_matrices(equation):
    """No product of all elements is in memory, where the weights' dimensions are in one row."""
    sizes = {"a": 32, "b": 33, "c": 34, "d": 2}
    inputs, output = equation.split("->")
    shapes = [mtf.Shape([mtf.Dimension(c, sizes[c]) for c in x]) for x in inputs.split(",")]
    result = mtf.Shape([mtf.Dimension(c, sizes[c]) for c in output])
    random = np.random.RandomState(1)
    left, right = (random.normal(size=s.to_integer_list).astype("f") for s in shapes)
    with tf.Graph().as_default() as graph, tf.Session() as session:
        slices = [tf.constant(left), tf.constant(right)]
        y = einsum_slice(slices, shapes, result, lambda *args: None)
        found = session.run(y)
        kinds = {op.type for op in graph.get_operations()}
    np.testing.assert_allclose(found, np.einsum(equation, left, right), rtol=1e-4, atol=1e-4)
    in_rows = equation not in ("bc,bac->a", "cb,bca->a", "da,dabc->dcb")
    assert bool(kinds & {"MatMul", "BatchMatMulV2"}) == in_rows
    assert ("Mul" in kinds) != in_rows


def test_gradients_of_stages_are_products_of_matrices():
    """A processor's weight [stages=1, d, f] gets its gradient without a transpose."""
    with tf.Graph().as_default():
        stages, rows, d, f = mtf.convert_to_shape("stages:2,rows:512,d:256,f:128").dims
        mtf_graph = mtf.Graph()
        mesh = mtf.Mesh(mtf_graph, "mesh")
        x, w = mtf.ones(mesh, [stages, rows, d]), mtf.ones(mesh, [stages, d, f])
        y = mtf.einsum([x, w], output_shape=[stages, rows, f])
        [dw] = mtf.gradients([mtf.reduce_sum(mtf.square(y))], [w])
        impl = mtf.placement_mesh_impl.PlacementMeshImpl("all:2", "stages:all", ["cpu:0", "cpu:1"])
        lowering = mtf.Lowering(mtf_graph, {mesh: impl})
        slices = lowering.tensors[dw].to_laid_out_tensor().all_slices
    products = [x.op.inputs[0].op for x in slices]  # before the dimension of size 1 is back
    assert [op.type for op in products] == ["MatMul", "MatMul"]
    assert all(op.get_attr("transpose_a") for op in products)
