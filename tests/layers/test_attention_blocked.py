"""Attention by blocks: dropout, gradients of gradients, recomputation, memory, and its errors."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from helpers.layer_runs import dims, run
from helpers.world import World

import mesh_tensorflow as mtf
from mesh_tensorflow.layers import _masks
from mesh_tensorflow.layers._blocked_attention import attention_and_log_sums
from mesh_tensorflow.layers._masks import Buckets
from mesh_tensorflow.testing.harness import WHOLE, Placing, assert_close
from mesh_tensorflow.transformer import attention as A

MEMORY, KEY, VALUE = dims("memory_length:8,d_kv:4,d_v:8")
ARGUMENTS = (MEMORY, KEY, VALUE)
SPLIT = [
    Placing("x:2,y:2", "length:x,memory_length:y"),
    Placing("x:2,y:2", "batch:x,d_kv:y,d_v:y", apart=True),
]
blocked = mtf.layers.blocked_attention


def operands(given):
    return (
        given("batch:2,length:12,heads:2,d_kv:4"),
        given("batch:2,memory_length:8,heads:2,d_kv:4", 1),
        given("batch:2,memory_length:8,heads:2,d_v:8", 2),
    )


def plain_and_blocked(given, with_gradients, **kwargs):
    """Returns the same of the plain form and of blocks."""
    q, k, v = operands(given)
    bias = given("heads:2,length:12,memory_length:8", 3)
    found = []
    for fn, more in ((A.attention, {}), (blocked, {"block_sizes": (5, 3)})):
        y = fn(q, k, v, *ARGUMENTS, bias, **kwargs, **more)
        found += with_gradients(y, [q, k, v, bias])
    return found


def assert_halves_agree(results, tolerance=1e-5):
    half = len(results) // 2
    assert half
    for i, (plain, ours) in enumerate(zip(results[:half], results[half:])):
        assert_close(ours, plain, tolerance, str(i))


@pytest.mark.slow_but(1)
@pytest.mark.parametrize("placing", [WHOLE, SPLIT[0]])
def test_gradients_of_gradients(placing):
    def second(y, xs):
        first = mtf.gradients([mtf.square(y)], xs)
        norm = mtf.add_n([mtf.reduce_sum(mtf.square(dx)) for dx in first])
        return first + mtf.gradients([norm], xs)

    results, _ = run(lambda mesh, given: plain_and_blocked(given, second), placing)
    assert_halves_agree(results)


@pytest.mark.slow
@pytest.mark.parametrize("placing", [WHOLE, SPLIT[0], Placing("x:2", "heads:x")])
def test_biases_of_distances(placing):
    """Values, gradients, and gradients of gradients are those of a bias of all pairs."""

    def second(y, xs):
        first = mtf.gradients([mtf.square(y)], xs)
        norm = mtf.add_n([mtf.reduce_sum(mtf.square(dx)) for dx in first])
        return [y, *first, *mtf.gradients([norm], xs)]

    def build(mesh, given):
        q, k, v = operands(given)
        values = given("heads:2,buckets:6", 3)
        here, there = (
            mtf.range(mesh, x.shape.dims[1], tf.int32) * scale for x, scale in ((q, 2), (k, 3))
        )
        here += mtf.range(mesh, q.shape.dims[0], tf.int32)  # each row of the batch has its own
        of = _masks.Distances(Buckets(6, True, 9), values, values.shape.dims[1], here, there)
        xs = [q, k, v, values]
        plain = A.attention(q, k, v, *ARGUMENTS, _masks.distance_bias(of), blocked=False)
        ours, _ = attention_and_log_sums(q, k, v, *ARGUMENTS, distances=[of], block_sizes=(5, 3))
        return second(plain, xs) + second(ours, xs)

    assert_halves_agree(run(build, placing)[0])


@pytest.mark.parametrize("buckets, found", [
    ((1, False, 8), [0, 0, 0, 0, 0, 0, 0]),
    ((1, True, 8), [0, 0, 0, 0, 0, 0, 0]),
    ((2, True, 8), [0, 0, 0, 0, 1, 1, 1]),
    ((3, True, 8), [0, 0, 0, 0, 1, 1, 1]),
    ((2, False, 8), [1, 1, 1, 0, 0, 0, 0]),
    ((8, True, 2), [3, 2, 1, 0, 5, 6, 7]),
    ((6, False, 3), [5, 2, 1, 0, 0, 0, 0]),
    ((6, False, 1), [5, 2, 1, 0, 0, 0, 0]),
])  # fmt: skip
def test_few_buckets(buckets, found):
    """Of so few, or for so short distances, that none is left for several distances."""
    relative = tf.constant([-9, -2, -1, 0, 1, 2, 9])
    assert _masks.bucket_of(relative, Buckets(*buckets)).numpy().tolist() == found


def test_extra_logit_of_each_head():
    def build(mesh, given):
        extra = given("heads:2", 4)
        return plain_and_blocked(
            given, lambda y, xs: [y, *mtf.gradients([mtf.square(y)], xs)], extra_logit=extra
        )

    assert_halves_agree(run(build, SPLIT[0])[0])


@pytest.mark.slow
def test_recomputed():
    def build(mesh, given):
        xs = operands(given)
        found = []
        for recompute in (lambda fn, xs: fn(*xs), mtf.recompute_grad):
            y = recompute(lambda q, k, v: blocked(q, k, v, *ARGUMENTS, block_sizes=(5, 3)), xs)
            found += [y, *mtf.gradients([mtf.square(y)], xs)]
        return found

    assert_halves_agree(run(build, SPLIT[0])[0])


def weights(given, **kwargs):
    """Returns attention weights as the output of blocks, from values that are an identity."""
    q, k, _ = operands(given)
    out = mtf.Dimension("d_v", MEMORY.size)
    v = mtf.one_hot(mtf.range(q.mesh, MEMORY, tf.int32), out) + mtf.zeros(
        q.mesh, k.shape - KEY + out
    )
    y = blocked(q, k, v, MEMORY, KEY, out, block_sizes=(5, 3), **kwargs)
    return y, q, k, v


@pytest.mark.slow
def test_dropout_has_the_same_mask_in_gradients_and_layouts():
    """The mask is that of the weights; with it, the plain form has the same gradients."""

    def build(mesh, given):
        y, q, k, v = weights(given, dropout_rate=0.25)
        kept, _, _, _ = weights(given)
        dy = given("batch:2,length:12,heads:2,d_v:8", 5)
        ours = mtf.gradients([y], [q, k, v], [dy])
        mask = mtf.rename_dimension(mtf.stop_gradient(y / kept), "d_v", "memory_length")
        logits = mtf.einsum([q, k], output_shape=q.shape - KEY + MEMORY)
        plain = mtf.einsum([mtf.softmax(logits, MEMORY) * mask, v], output_shape=y.shape)
        return [plain, *mtf.gradients([plain], [q, k, v], [dy]), y, *ours]

    whole, _ = run(build)
    assert_halves_agree(whole)
    ratios = np.unique(np.round(whole[4] / np.where(whole[0] == 0, 1, whole[0]), 3))
    assert set(ratios) == {0, 1}
    dropped = (whole[4] == 0).mean()
    assert abs(dropped - 0.25) < 5 * np.sqrt(0.25 * 0.75 / whole[4].size)
    for placing in SPLIT:
        for a, b in zip(run(build, placing)[0], whole):
            assert_close(a, b, 1e-5, str(placing))


def test_dropout_that_is_shared():
    def build(mesh, given):
        q = weights(given)[1]
        rows = dims("length:12,heads:2")
        return [
            weights(given, dropout_rate=0.5, dropout_broadcast_dims=shared)[0]
            for shared in (rows, [MEMORY], q.shape.dims)
        ]

    by_memory, by_row, same = (x == 0 for x in run(build)[0])
    assert (by_memory == by_memory[:, :1, :1]).all()
    assert 0 < by_memory.mean() < 1
    assert (by_row == by_row[..., :1]).all()
    assert 0 < by_row.mean() < 1
    assert (same == same[0, 0, 0]).all()


def test_eagerly_and_in_a_function():
    data = [np.random.RandomState(i).normal(size=[2, 9, 4]).astype(np.float32) for i in range(3)]

    def values():
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        names = ("length", "memory_length", "memory_length")
        q, k, v = (
            mtf.import_tf_tensor(mesh, tf.constant(x), f"batch:2,{name}:9,d_kv:4")
            for x, name in zip(data, names)
        )
        memory, channels = k.shape.dims[1:]
        y = blocked(q, k, v, memory, channels, channels, block_sizes=(2, 4), dropout_rate=0.0)
        found = [y, *mtf.gradients([mtf.square(y)], [q, k, v])]
        impl = mtf.placement_mesh_impl.PlacementMeshImpl("x:3", "length:x", ["cpu:0"] * 3)
        lowering = mtf.Lowering(mesh.graph, {mesh: impl})
        return [lowering.export_to_tf_tensor(x) for x in found]

    eager, function = values(), mtf.function(values)()
    logits = np.einsum("blk,bmk->blm", *data[:2])
    e = np.exp(logits - logits.max(-1, keepdims=True))
    expected = np.einsum("blm,bmk->blk", e / e.sum(-1, keepdims=True), data[2])
    assert_close(eager[0].numpy(), expected, 1e-5)
    for a, b in zip(eager, function):
        assert_close(b.numpy(), a.numpy(), 1e-5)


def test_rows_that_see_nothing_by_infinite_biases():
    """Blocks that are hidden by -inf count for nothing, as in the plain form."""

    def build(mesh, given):
        q, k, v = operands(given)
        hidden = mtf.cast(mtf.less(mtf.range(mesh, MEMORY, tf.int32), 6), tf.float32)
        bias = mtf.log(1.0 - hidden)
        return [
            A.attention(q, k, v, *ARGUMENTS, bias),
            blocked(q, k, v, *ARGUMENTS, bias, block_sizes=(4, 2)),
        ]

    assert_halves_agree(run(build, SPLIT[0])[0])


def test_rows_that_are_masked_everywhere():
    """Such rows have equal weights, also in gradients."""

    def build(mesh, given):
        q, k, v = operands(given)
        ids = mtf.range(mesh, q.shape.dims[1], tf.int32)
        none = mtf.range(mesh, MEMORY, tf.int32) - 6
        bias = A.visibility_mask_to_attention_bias(mtf.equal(ids, none), tf.float32)
        found = []
        for y in (
            A.attention(q, k, v, *ARGUMENTS, bias),
            blocked(q, k, v, *ARGUMENTS, visible=[("equal", ids, none)], block_sizes=(5, 3)),
        ):
            found += [y, *mtf.gradients([mtf.square(y)], [v])]
        return found

    assert_halves_agree(run(build, SPLIT[0])[0])


def largest_tensors(build):
    """Returns the numbers of elements of tensors in the TensorFlow graph of a program."""
    with tf.Graph().as_default() as graph:
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        targets = build(mesh)
        impl = mtf.placement_mesh_impl.PlacementMeshImpl("", "", [""])
        lowering = mtf.Lowering(mesh.graph, {mesh: impl})
        for y in targets:
            lowering.export_to_tf_tensor(y)
        shapes = [y.shape for op in graph.get_operations() for y in op.outputs]
        return max(s.num_elements() or 0 for s in shapes if s.is_fully_defined())


def test_no_tensor_of_all_logits():
    length = 2048

    def build(mesh):
        q = mtf.zeros(mesh, f"length:{length},d_kv:8")
        k = mtf.zeros(mesh, f"memory_length:{length},d_kv:8")
        memory, channels = k.shape.dims
        ids = [mtf.range(mesh, x.shape.dims[0], tf.int32) for x in (q, k)]
        seen = [("greater_equal", *ids)]
        y = blocked(q, k, k, memory, channels, channels, visible=seen, dropout_rate=0.1)
        return [y, *mtf.gradients([y], [q, k])]

    assert largest_tensors(build) <= length * length // 4


X = dims("b:2,l:4,h:2,k:3")
B, L, H, K = X
M, OTHER = dims("m:5,other:2")


def call(q=(B, L, H, K), k=(B, M, H, K), v=(B, M, H, K), bias=None, **kwargs):
    def made(w):
        more = None if bias is None else w.tensor(bias)
        return blocked(*(w.tensor(x) for x in (q, k, v)), M, K, K, more, **kwargs)

    return made


ERRORS = {
    "no_key": (call(q=(B, L, H)), r"q \S+ Shape\[b=2, l=4, h=2\] has no k=3. mtf.transformer"),
    "no_memory": (call(v=(B, L, H, K)), r"v .* has no m=5"),
    "crossed": (call(q=(B, M, K)), r"q .* has the dimension of the memory, m=5; rename it in k and v"),
    "k_and_v": (call(v=(B, M, K)), r"k Shape\[b=2, m=5, h=2, k=3\] and v Shape\[b=2, m=5, k=3\] have other"),
    "k_alone": (call(k=(B, M, OTHER, K), v=(B, M, OTHER, K)), r"k .* has other=2, which q .* lacks"),
    "bias": (call(bias=(OTHER, M)), r"Shape\[other=2, m=5\] has other=2, which the logits \(b=2, l=4, h=2, m=5\) lack"),
    "no_length": (call(q=(B, H, K)), r"q .* has no dimension of its own, such as a length"),
    "dropout": (call(dropout_rate=1.0), r"from 0 to less than 1, not 1.0"),
    "comparison": (call(visible=[("less", None, None)]), r"'less', which is none of equal, greater_equal, less_equal"),
    "block_sizes": (call(block_sizes=(0, 4)), r"block_sizes=\(0, 4\) are numbers of positions.*from 1"),
}  # fmt: skip


@pytest.mark.parametrize("name", ERRORS)
def test_error(name, tf_graph):
    make, text = ERRORS[name]
    with pytest.raises(ValueError, match=text):
        make(World())
