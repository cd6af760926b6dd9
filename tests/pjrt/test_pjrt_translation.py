"""What is given to TensorFlow's compiler: few operations that it is slow to translate."""

import re

import numpy as np
import pytest
import tensorflow as tf
from helpers.pjrt import DATA, LAYOUT, MESH, on_jax

import mesh_tensorflow as mtf
from mesh_tensorflow._mesh.gspmd import matrix_product

PRODUCTS = [
    "ab,bc->ac", "ab,cb->ac", "ba,bc->ac", "ba,cb->ac", "xab,xbc->xac", "xyab,xycb->xyac",
    "ab,bc->ca",  # transposed
    "axb,xbc->xac",  # the batch is not first
    "axb,bxc->cxa",
]  # fmt: skip
MERGED = [
    "abc,cx->abx",  # rows of two dimensions
    "abc,dbc->da",  # two that are contracted
    "abcd,xcb->adx",  # which are in another order
    "abxcd,xcbd->axb",
    "ab,b->a",  # and a vector, which is no matrix
    "a,ab->b",
    "ab,ab->",
    "xab,xb->xa",
]
OTHERS = [
    "xab,yab->",  # x is summed over
    "ab,ab->ab",  # nothing is contracted
    "ab,cd->acbd",
    "a,bd->a",  # nothing in common
    "ab,bc,cd->ad",
]
SIZES = dict(zip("abcdxy", range(2, 8)))


def operands(equation):
    rng = np.random.default_rng(0)
    texts = equation.split("->")[0].split(",")
    return [rng.standard_normal([SIZES[c] for c in text]).astype("float32") for text in texts]


@pytest.mark.parametrize("equation", PRODUCTS)
def test_products_of_matrices(equation):
    values = operands(equation)
    found = matrix_product(equation, *map(tf.constant, values))
    np.testing.assert_allclose(found, np.einsum(equation, *values), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("equation", MERGED)
def test_several_dimensions_are_merged_where_none_is_split(equation):
    values = operands(equation)
    assert matrix_product(equation, *map(tf.constant, values)) is None
    found = matrix_product(equation, *map(tf.constant, values), may_merge=True)
    np.testing.assert_allclose(found, np.einsum(equation, *values), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("equation", OTHERS)
def test_other_products_are_left_to_einsum(equation):
    values = map(tf.constant, operands(equation))
    assert matrix_product(equation, *values, may_merge=True) is None


def test_what_results_do_not_need_is_left_out():
    """A function of Python has no kernel in XLA, and side effects: it is not even translated."""

    @mtf.pjrt.function(mesh_shape=MESH, layout=LAYOUT)
    def double(x):
        tf.py_function(lambda: None, [], [])
        return x + x, x

    twice, once = double(DATA)
    np.testing.assert_array_equal(twice, 2 * DATA)
    np.testing.assert_array_equal(once, DATA)


def test_a_layer_is_one_product():
    text = on_jax(keep_prob=1.0).lower(DATA).stablehlo
    assert text.count("stablehlo.dot") == 5  # two layers and gradients, but not of the data


def test_masks_are_no_constants():
    """TensorFlow would write a mask into the program as often as it is read."""

    @mtf.pjrt.function(mesh_shape="all:1", layout="")
    def causal(x):
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        row, column = mtf.convert_to_shape("row:32,column:32").dims
        hidden = mtf.less(mtf.range(mesh, row, tf.int32), mtf.range(mesh, column, tf.int32))
        y = mtf.import_tf_tensor(mesh, x, mtf.Shape([row, column]))
        y = mtf.where(hidden, mtf.zeros_like(y), y)
        return mtf.Lowering(mesh.graph, {mesh: mtf.pjrt.mesh_impl()}).export_to_tf_tensor(y)

    x = np.ones([32, 32], "float32")
    np.testing.assert_array_equal(causal(x), np.tril(x))
    assert "32x32xi1>" in causal.lower(x).stablehlo
    assert not re.search(r"stablehlo.constant.*32x32x", causal.lower(x).stablehlo)
