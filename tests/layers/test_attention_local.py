"""What local attention sees, and what it returns."""

import numpy as np
import pytest
from helpers.layer_runs import dims, run

import mesh_tensorflow as mtf
import mesh_tensorflow.transformer
from mesh_tensorflow.testing import harness

KV, HEADS = mtf.Dimension("kv", 4), mtf.Dimension("heads", 4)
layers = mtf.layers


def reach(build, text, axis=1):
    """Returns [place that sees, place that is seen] as booleans, by gradients."""

    def gradients(mesh, given):
        x = given(text)
        y = build(mesh, x)
        batch, *places, io = x.shape.dims
        at = mtf.Dimension("at", mtf.Shape(places).size)
        y = mtf.reshape(y, [batch, at, io])
        return [mtf.gradients([row], [x])[0] for row in mtf.unstack(y, at)]

    values, _ = run(gradients)
    seen = [np.abs(v).sum(axis=(0, -1)).reshape(-1) > 0 for v in values]
    return np.stack(seen)


def test_reach_of_local_attention():
    seen = reach(lambda mesh, x: layers.masked_local_attention_1d(
        x, KV, HEADS, True, 3, length_per_split=3), "batch:2,length:12,io:8")  # fmt: skip
    at = np.arange(12)
    np.testing.assert_array_equal(seen, (at <= at[:, None]) & (at > at[:, None] - 3))


@pytest.mark.parametrize("one_sided", [True, False])
@pytest.mark.parametrize("length", [1, 12, 256])
def test_a_radius_beyond_the_length(length, one_sided):
    """It is one of the length, without room for what is farther away."""

    def build(radius):
        def layer(mesh, given):
            q, k, v = (given(f"batch:2,length:{length},kv:4") for _ in range(3))
            y = mtf.transformer.attention.local_attention_1d(
                q, k, v, q.shape.dims[1], KV, KV, one_sided, radius=radius
            )
            sizes = [t.shape.size for op in mesh.graph.operations for t in op.outputs]
            assert max(sizes) <= 2 * length * 3 * max(length, 128)
            return y

        return layer

    [y], _ = run(build(2**18))
    [expected], _ = run(build(length))
    harness.assert_close(y, expected, 1e-6)


def test_reach_of_masked_blocks():
    seen = reach(lambda mesh, x: layers.local_self_attention_spatial_blocks(
        x, KV, HEADS, True, mask_right=True), "batch:2,blocks:3,w:4,io:8")  # fmt: skip
    at = np.arange(12)
    np.testing.assert_array_equal(seen, (at <= at[:, None]) & (at // 4 >= at[:, None] // 4 - 1))


@pytest.mark.slow
def test_reach_of_masked_2d_blocks():
    """Nothing that comes later, blocks and places within them being in reading order."""
    seen = reach(lambda mesh, x: layers.local_2d_self_attention_spatial_blocks(
        x, KV, HEADS, True, mask_right=True), "batch:2,rows:2,columns:3,h:2,w:3,io:8")  # fmt: skip
    r, c, i = (a.reshape(-1) for a in np.meshgrid(range(2), range(3), range(6), indexing="ij"))
    above, left = r[:, None] - r, c[:, None] - c
    near = (above >= 0) & (above <= 1) & (left >= 0) & (left <= 1)
    same = (above == 0) & (left == 0)
    np.testing.assert_array_equal(seen, near & (~same | (i <= i[:, None])))


@pytest.mark.parametrize("text", ["blocks:3,w:4,io:8", "a:2,batch:2,blocks:3,w:4,io:8"])
def test_blocks_with_other_batch_dims(text):
    """None, or two of them; the same numbers as with one."""

    def build(one):
        def layer(mesh, given):
            x = given(text)
            if one:
                rest = x.shape.dims[-3:]
                x = mtf.reshape(x, mtf.Shape([("one", x.size // mtf.Shape(rest).size), *rest]))
            return layers.local_self_attention_spatial_blocks(x, KV, HEADS, True, mask_right=True)

        return layer

    [y], _ = run(build(False))
    [expected], _ = run(build(True))
    assert list(y.shape) == mtf.convert_to_shape(text).to_integer_list
    harness.assert_close(y.reshape(expected.shape), expected, 1e-6)


@pytest.mark.parametrize(
    "text", ["rows:2,columns:2,h:2,w:2,io:8", "a:2,b:2,rows:2,columns:2,h:2,w:2,io:8"]
)
def test_2d_blocks_with_other_batch_dims(text):
    def layer(mesh, given):
        x = given(text)
        return layers.local_2d_self_attention_spatial_blocks(x, KV, HEADS, True)

    [y], _ = run(layer)
    assert list(y.shape) == mtf.convert_to_shape(text).to_integer_list
    assert np.all(np.isfinite(y))


def test_keys_and_values_are_returned():
    def build(mesh, given):
        x, kept = given("batch:2,length:8,io:8"), []
        layers.masked_local_attention_1d(x, KV, HEADS, True, 4, return_kv=kept)
        [qkvo] = [v.value for v in mesh.graph.all_variables]
        batch, length, io = x.shape.dims
        _, wk, wv, _ = mtf.unstack(qkvo, qkvo.shape.dims[0])
        shape = mtf.Shape([batch, HEADS, length, KV])
        assert [t.shape for t in kept] == [shape, shape]
        return [*kept, *(mtf.einsum([x, w], output_shape=shape) for w in (wk, wv))]

    (k, v, expected_k, expected_v), _ = run(build)
    harness.assert_close(k, expected_k, 1e-6)
    harness.assert_close(v, expected_v, 1e-6)


def test_mask_of_2d_blocks():
    def build(mesh, given):
        return layers.attention_bias_local_2d_block(mesh, *dims("h:2,w:3,m:7,n:1"))

    [mask], _ = run(build)
    assert mask.shape == (2, 3, 4, 6)
    assert mask.dtype == np.float32
    hidden = mask < -1e8
    assert not hidden[:, :, :2].any() and not hidden[:, :, :, :3].any()  # the blocks before it
    at = np.arange(6)
    np.testing.assert_array_equal(hidden[:, :, 2:, 3:].reshape(6, 6), at > at[:, None])


@pytest.mark.parametrize("window, per_split, block", [
    (4, None, 12), (128, None, 12), (4, 4, 4), (2, 6, 6), (0, 3, 3), (1, 1, 1),
])  # fmt: skip
def test_length_of_blocks(window, per_split, block):
    """The largest divisor of length_per_split up to max(window_size, 128)."""

    def build(mesh, given):
        y = layers.masked_local_attention_1d(
            given("batch:2,length:12,io:8"), KV, HEADS, True, window, length_per_split=per_split
        )
        dims_of_blocks = {
            d.size
            for op in mesh.graph.operations
            for t in op.outputs
            for d in t.shape
            if d.name == "query_block_length"
        }
        assert dims_of_blocks == {block}
        return y

    run(build)


@pytest.mark.parametrize(
    "fn, text, at",
    [
        (layers.local_self_attention_spatial_blocks, "batch:2,blocks:3,w:4,io:8", {"w": (-2, -3)}),
        (
            layers.local_2d_self_attention_spatial_blocks,
            "batch:2,rows:2,columns:2,h:2,w:2,io:8",
            {"h": (-3, -5), "w": (-2, -4)},
        ),
    ],
    ids=["1d", "2d"],
)
@pytest.mark.parametrize("which", [0, 1, None], ids=["places", "blocks", "other"])
def test_given_memory_dims_change_nothing(fn, text, at, which):
    """Tensor2Tensor's image transformers give the dimensions of the blocks themselves."""

    def build(given_dims):
        def layer(mesh, given):
            x = given(text)
            memory = {
                f"memory_{name}_dim": x.shape.dims[i[which]] if which is not None else KV
                for name, i in at.items()
            }
            return fn(x, KV, HEADS, True, **(memory if given_dims else {}))

        return layer

    [y], _ = run(build(True))
    [expected], _ = run(build(False))
    harness.assert_close(y, expected, 1e-6)
