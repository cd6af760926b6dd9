"""On devices of JAX: queries that see nothing, and stages of a pipeline that wait."""

import numpy as np
import pytest
import tensorflow as tf
from helpers.layers import seeing_nothing as table

import mesh_tensorflow as mtf


def run(build, mesh_shape, layout):
    @mtf.pjrt.function(mesh_shape=mesh_shape, layout=layout)
    def program():
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        targets = build(mesh)
        lowering = mtf.Lowering(mesh.graph, {mesh: mtf.pjrt.mesh_impl()})
        return [lowering.export_to_tf_tensor(x) for x in targets]

    return [np.asarray(x) for x in program()]


@pytest.mark.slow
@pytest.mark.parametrize("layout, forms", [
    ("length:x,memory:x", ["ring"]),
    ("heads:x", ["whole", "mask_in_blocks"]),
])  # fmt: skip
def test_queries_that_see_nothing(layout, forms):
    cells = [(form, scale) for form in forms for scale in table.SCALES[1:]]
    found = run(lambda mesh: [x for c in cells for x in table.results(mesh, *c)], "x:2", layout)
    for i, (form, scale) in enumerate(cells):
        table.check(found[4 * i : 4 * i + 4], scale, f"{form} {scale}")


@pytest.mark.parametrize("layout", ["batch:rows,heads:cols", "heads:rows"])
def test_attention_by_blocks_stays_where_its_heads_are(layout):
    """Not one processor computes another's heads: with dimensions that became one, all would."""
    batch, heads, groups, length, memory, d_kv = mtf.convert_to_shape(
        "batch:2,heads:2,groups:2,length:8,memory_length:8,d_kv:4"
    ).dims

    @mtf.pjrt.function(mesh_shape="rows:2,cols:2", layout=layout)
    def step(q, k, v):
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        q = mtf.import_tf_tensor(mesh, q, [batch, heads, groups, length, d_kv])
        k, v = (mtf.import_tf_tensor(mesh, x, [batch, heads, memory, d_kv]) for x in (k, v))
        before = "greater_equal", *(mtf.range(mesh, d, tf.int32) for d in (length, memory))
        y = mtf.layers.blocked_attention(
            q, k, v, memory, d_kv, d_kv, visible=[before], dropout_rate=0.1, block_sizes=(4, 4)
        )
        loss = mtf.reduce_sum(mtf.square(y))
        sums = [mtf.reduce_sum(mtf.square(g)) for g in mtf.gradients([loss], [q, k, v])]
        lowering = mtf.Lowering(mesh.graph, {mesh: mtf.pjrt.mesh_impl()})
        return [lowering.export_to_tf_tensor(x) for x in [loss, *sums]]

    memories = np.ones([2, 2, 8, 4], "f")
    lowered = step.lower(np.ones([2, 2, 2, 8, 4], "f"), memories, memories)
    assert {c.kind for c in lowered.collectives()} == {"all-reduce"}


def test_stages_that_wait():
    """An exponential that is infinite of what enters the first stage."""
    stages, batch, d = mtf.convert_to_shape("stages:2,batch:4,d:1").dims
    data = np.array([[100.0], [90.0], [80.0], [70.0]], "f")

    def build(mesh):
        x = mtf.import_tf_tensor(mesh, tf.constant(data), [batch, d])
        w = mtf.import_tf_tensor(mesh, tf.constant([0.001, 5.0]), [stages])
        y = mtf.layers.pipeline(lambda x, w: mtf.exp(x * w), x, [w], stages, batch, 2)
        return [y, *mtf.gradients([mtf.reduce_sum(y)], [x, w])]

    y, dx, dw = run(build, "x:2", "stages:x")
    h = np.exp(data.astype("float64") * 0.001)
    wanted = np.exp(5.0 * h)
    np.testing.assert_allclose(y, wanted, rtol=1e-5)
    np.testing.assert_allclose(dx, wanted * 5.0 * h * 0.001, rtol=1e-4)
    np.testing.assert_allclose(dw, [(wanted * 5.0 * h * data).sum(), (wanted * h).sum()], rtol=1e-4)
