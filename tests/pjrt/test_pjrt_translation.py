"""What is given to TensorFlow's compiler: few operations that it is slow to translate."""

import numpy as np
import pytest
import tensorflow as tf
from helpers.pjrt import DATA, LAYOUT, MESH, on_jax

import mesh_tensorflow as mtf
from mesh_tensorflow._mesh.gspmd import matrix_product

PRODUCTS = ["ab,bc->ac", "ab,cb->ac", "ba,bc->ac", "ba,cb->ac", "xab,xbc->xac", "xyab,xycb->xyac"]
OTHERS = [
    "ab,bc->ca",  # transposed
    "abc,cx->abx",  # more than two dimensions, and no batch
    "xab,yab->xy",
    "axb,xbc->xac",  # the batch is not first
    "ab,ab->ab",
    "ab,cd->ac",
    "a,bd->a",  # nothing in common
    "ab,bc,cd->ad",
    "a,ab->b",
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


@pytest.mark.parametrize("equation", OTHERS)
def test_other_products_are_left_to_einsum(equation):
    assert matrix_product(equation, *map(tf.constant, operands(equation))) is None


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
