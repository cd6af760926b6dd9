"""Contractions of slices: the same as tf.einsum, and by matrix products where one index is shared."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from mesh_tensorflow._mesh.slices.matrix_product import contract

SIZES = {"s": 1, "t": 1, "a": 3, "b": 4, "c": 5, "d": 2}


def values(labels):
    sizes = [SIZES[c] for c in labels]
    return np.random.RandomState(len(labels)).normal(size=sizes).astype("float32")


@pytest.mark.parametrize("equation", [
    "sab,sbc->sac", "asb,bsc->sac", "sab,sac->sbc", "stab,stbc->stac", "asb,cb->asc", "sab,sab->sb",
    "sa,sa->s", "dab,dbc->dac",
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
