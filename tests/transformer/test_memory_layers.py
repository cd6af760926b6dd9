"""The product-key memory against a search among all keys, in layouts and one by one."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from helpers.transformer import decoding_models as models
from helpers.transformer import further_models as further
from helpers.transformer.further_models import LENGTH, ROWS, Mix, softmax, weights

import mesh_tensorflow as mtf
from mesh_tensorflow.testing.harness import Placing
from mesh_tensorflow.transformer import transformer
from mesh_tensorflow.transformer.memory_layers import ProductKeyValueMemory

D, KEY, KEYS, HEADS = 8, 6, 5, 2
X = np.random.RandomState(5).normal(size=(ROWS, LENGTH, D)).astype("float32")


class Model:
    """What the layer asks of a model."""

    model_dim = mtf.Dimension("d_model", D)
    ensemble_dims = ()


def called(knn, x=X, key_size=KEY):
    def build(mesh):
        layer = ProductKeyValueMemory(key_size=key_size, n_keys=KEYS, n_heads=HEADS, knn=knn)
        dims = [mtf.Dimension(n, s) for n, s in zip(["batch", "length"], x.shape[:-1])]
        given = mtf.import_tf_tensor(mesh, tf.constant(x), mtf.Shape([*dims, Model.model_dim]))
        context = transformer.Context(Model(), mesh, dims[:1], dims[-1], further.FLOAT)
        return [layer.call(context, given)]

    return build


def queries(x):
    q = np.einsum("bld,dhpk->blhpk", x, weights("query/kernel", D, HEADS, 2, KEY // 2))
    q = q + weights("query/bias", HEADS, 2, KEY // 2)
    q = q - q.mean(-1, keepdims=True)
    q = q / np.sqrt((q**2).mean(-1, keepdims=True) + 1e-6)
    norm = "layer_prepostprocess/layer_norm/layer_norm_"
    return q * weights(norm + "scale", KEY // 2) + weights(norm + "bias", KEY // 2)


def expected(knn, x=X):
    """Scores of all pairs of keys, of which the best are read."""
    halves = np.einsum("blhpk,hpnk->blhpn", queries(x), weights("keys", HEADS, 2, KEYS, KEY // 2))
    scores = (halves[..., 0, :, None] + halves[..., 1, None, :]).reshape(*x.shape[:2], HEADS, -1)
    best = np.argsort(-scores, -1)[..., :knn]
    read = weights("values", KEYS**2, D)[best]
    weight = softmax(np.take_along_axis(scores, best, -1))
    return np.einsum("blhk,blhkd->bld", weight, read)


@pytest.mark.parametrize("knn", [1, 3, KEYS])
def test_equals_a_search_among_all_keys(knn):
    [found] = models.run(called(knn), scale=0.5).values()
    np.testing.assert_allclose(found, expected(knn), rtol=1e-4, atol=1e-5)


def test_one_position_without_length():
    """As in decoding."""
    x = X[:, 0]

    def build(mesh):
        layer = ProductKeyValueMemory(key_size=KEY, n_keys=KEYS, n_heads=HEADS, knn=2)
        batch = mtf.Dimension("batch", ROWS)
        given = mtf.import_tf_tensor(mesh, tf.constant(x), mtf.Shape([batch, Model.model_dim]))
        context = transformer.Context(
            Model(),
            mesh,
            [batch],
            mtf.Dimension("length", LENGTH),
            further.FLOAT,
            mode="incremental",
        )
        return [layer.call(context, given)]

    [found] = models.run(build, scale=0.5).values()
    np.testing.assert_allclose(found, expected(2, X[:, :1])[:, 0], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_equal_in_layouts():
    def layers():
        memory = ProductKeyValueMemory(key_size=KEY, n_keys=4, n_heads=HEADS, knn=3)
        return models.stack([Mix(), memory])

    further.equal_in_placings(further.language_model(layers), [
        Placing("x:2", "batch:x"), Placing("x:2", "n_values:x"), Placing("x:2", "n_heads:x"),
        Placing("x:2,y:2", "batch:x,n_keys:y"), Placing("x:2,y:2", "d_model:x,n_values:y"),
        Placing("x:2,y:2", "batch:x,n_values:y", simd=True),
    ])  # fmt: skip


def test_more_keys_than_there_are():
    with pytest.raises(ValueError, match="knn=6 between 1 and n_keys=5"):
        ProductKeyValueMemory(key_size=6, n_keys=5, n_heads=2, knn=6)
