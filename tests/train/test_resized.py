"""Beginning with weights of another vocabulary: larger, smaller, on every layout; what is told."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import mesh_tensorflow as mtf

BATCH, WIDTH = mtf.Dimension("batch", 4), mtf.Dimension("width", 6)
IDS = np.arange(8, dtype=np.int32) % 3
PLACES = {
    "plain": {},
    "split": {"mesh_shape": "rows:2,cols:2", "layout": "batch:rows,vocab:cols"},
    "uneven": {"mesh_shape": "cols:3", "layout": "vocab:cols?"},
    "zero": {"mesh_shape": "rows:2", "layout": "batch:rows", "zero": 3},
    "simd": {"mesh_shape": "rows:2", "layout": "vocab:rows", "simd": True, "zero": 3},
    "pjrt": {"mesh_shape": "rows:2", "layout": "vocab:rows", "mesh_impl": "pjrt"},
}


def loss(mesh, ids, words):
    vocab = mtf.Dimension("vocab", words)
    table = mtf.layers.embedding_weights(mesh, vocab, WIDTH, tf.float32, "embedding")
    bias = mtf.get_variable(mesh, "logits/bias", [vocab], initializer=tf.constant_initializer(0.5))
    scale = mtf.get_variable(mesh, "scale", [WIDTH])
    logits = mtf.einsum([mtf.gather(table, ids, vocab) * scale, table], [BATCH, vocab]) + bias
    return mtf.reduce_mean(
        mtf.layers.softmax_cross_entropy_with_logits(logits, mtf.one_hot(ids, vocab), vocab)
    )


def begin(words, given, **arguments):
    """Returns the weights that a model with so many words begins with."""
    adam = mtf.optimize.AdamWeightDecayOptimizer(0.0)
    arguments = {"optimizer": adam, "progress": False, **arguments}
    return mtf.train.fit(
        lambda mesh, ids: loss(mesh, ids, words),
        IDS,
        1,
        dims=[BATCH],
        init_checkpoint=given,
        **arguments,
    ).variables


def weights(words):
    random = np.random.RandomState(words)
    return {
        "embedding": random.randn(words, 6).astype("f"),
        "logits/bias": random.randn(words).astype("f"),
        "scale": random.randn(6).astype("f"),
        "old": np.zeros(3, "f"),
    }


SLOW = [name for name in PLACES if name not in ("plain", "simd")]


@pytest.mark.slow(*[f"*{name}*" for name in SLOW])
@pytest.mark.parametrize("place", PLACES)
def test_a_vocabulary_that_has_grown(place, capsys):
    if place == "pjrt":
        pytest.importorskip("jax", reason="JAX is not installed")
    arguments = {"average": 0.5, "progress": True, **PLACES[place]}
    given = weights(6)
    own = begin(10, None, **PLACES["plain"])
    found = begin(10, given, init_resize="vocab", **arguments)
    for name in ("embedding", "logits/bias"):
        np.testing.assert_array_equal(found[name][:6], given[name])
        np.testing.assert_allclose(found[name][6:], own[name][6:], rtol=1e-6)
        np.testing.assert_array_equal(found[f"{name}/ExponentialMovingAverage"], found[name])
        assert set(found[f"{name}/adam_m"].shape) == set(found[name].shape)
    np.testing.assert_array_equal(found["scale"], given["scale"])
    told = capsys.readouterr().err
    assert "Initializing 3 variables from" in told and "As they are there (1):\n    scale" in told
    assert "Resized (2):\n    embedding [6, 6] to [10, 6]\n    logits/bias [6] to [10]" in told
    assert "In the checkpoint only (1):\n    old" in told


def test_a_vocabulary_that_has_shrunk():
    given = weights(6)
    with pytest.raises(
        ValueError,
        match=r"embedding has shape \[6, 6\], but embedding in the model has \[4, 6\]: the last 2 of "
        r"vocab would be lost, which has to be asked for \(1 more differ\); give .*init_shrink",
    ):
        begin(4, given, init_resize="vocab")
    found = begin(4, given, init_resize=["vocab"], init_shrink=True)
    np.testing.assert_array_equal(found["embedding"], given["embedding"][:4])
    np.testing.assert_array_equal(found["logits/bias"], given["logits/bias"][:4])


def test_what_is_not_asked_for():
    given = weights(6)
    with pytest.raises(
        ValueError, match=r"in the model has \[8, 6\] \(1 more differ\); give .* by init_resize"
    ):
        begin(8, given)
    with pytest.raises(ValueError, match=r"has \[8, 6\]: vocab is none of the dimensions that may"):
        begin(8, given, init_resize="width")
    with pytest.raises(
        ValueError,
        match=r"'vocb' is to be resized, but no variable has this dimension; did you .*vocab",
    ):
        begin(8, given, init_resize="vocb")
    with pytest.raises(
        ValueError, match="may be smaller than in the checkpoint, but none is named"
    ):
        begin(8, given, init_shrink=True)
    with pytest.raises(ValueError, match="are names of dimensions, such as 'vocab', but is 'a,,b'"):
        begin(8, given, init_resize="a,,b")
    with pytest.raises(ValueError, match=r"scale has shape \[1, 6\].*these are other dimensions"):
        begin(8, {**given, "scale": np.zeros([1, 6], "f")}, init_resize="vocab")


@pytest.mark.slow
def test_a_step_function():
    def program(ids):
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        found = loss(mesh, mtf.import_tf_tensor(mesh, ids, [BATCH]), 8)
        impl = mtf.placement_mesh_impl.PlacementMeshImpl("all:2", "vocab:all", ["cpu:0"] * 2)
        return mtf.Lowering(mesh.graph, {mesh: impl}).export_to_tf_tensor(found)

    given = weights(6)

    def begun(**arguments):
        step_fn = mtf.function(program)
        return mtf.train.fit(
            step_fn, IDS, 1, dims=[BATCH], progress=False, init_checkpoint=given, **arguments
        ).variables

    found = begun(init_resize="vocab")
    np.testing.assert_array_equal(found["embedding"][:6], given["embedding"])
    np.testing.assert_array_equal(found["logits/bias"], [*given["logits/bias"], 0.5, 0.5])
