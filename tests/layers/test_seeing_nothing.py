"""Queries that see nothing: the mean of all values, in each form of attention and each layout."""

import types

import numpy as np
import pytest
import tensorflow as tf2
import tensorflow.compat.v1 as tf
from helpers.layers import seeing_nothing as table

import mesh_tensorflow as mtf
from mesh_tensorflow.testing import harness
from mesh_tensorflow.testing.harness import WHOLE, Placing
from mesh_tensorflow.transformer import attention as A

RING = Placing("x:2", "length:x,memory:x")
slow = pytest.mark.slow


def run(build, placing=WHOLE):
    """Returns the values of the Tensors that `build` makes of a Mesh; in SIMD, of a session."""
    if not placing.simd:
        with tf2.init_scope(), harness.separate_memories() if placing.apart else tf.name_scope(""):
            mesh = mtf.Mesh(mtf.Graph(), "mesh")
            targets = build(mesh)
            lowering = mtf.Lowering(mesh.graph, {mesh: placing.impl()})
            return [lowering.export_to_tf_tensor(x).numpy() for x in targets]
    with tf.Graph().as_default():
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        targets = build(mesh)
        lowered = harness.lower(mesh.graph, mesh, placing, targets)
        with harness.session() as session:
            return session.run(lowered.exports)


@pytest.mark.slow("*length:x,memory:x*")
@pytest.mark.parametrize("placing, forms, dtype", [
    (WHOLE, list(table.FORMS), tf.float32),
    pytest.param(WHOLE, list(table.FORMS), tf.bfloat16, marks=slow),
    (RING, ["ring", "blocks"], tf.float32),
    pytest.param(RING._replace(mesh="x:4"), table.OF_RING, tf.float32, marks=slow),
    (RING._replace(simd=True), ["ring"], tf.float32),
    pytest.param(RING._replace(simd=True), table.OF_RING, tf.float32, marks=slow),
    pytest.param(RING._replace(apart=True, merge="device"), table.OF_RING, tf.float32, marks=slow),
    (Placing("x:2", "memory:x"), ["blocks", "layers"], tf.float32),
    pytest.param(Placing("x:2,y:2", "length:x,memory:y"), [f for f in table.FORMS if f not in
                 ("ring", "contiguous")], tf.float32, marks=slow),
    pytest.param(Placing("x:2,y:2", "heads:x,memory:y", simd=True),
                 ["blocks", "whole", "mask_in_blocks", "layers"], tf.float32, marks=slow),
], ids=str)  # fmt: skip
def test_forms(placing, forms, dtype):
    cells = [(form, scale) for form in forms for scale in table.SCALES]
    values = run(
        lambda mesh: [x for cell in cells for x in table.results(mesh, *cell, dtype)], placing
    )
    for i, (form, scale) in enumerate(cells):
        table.check(values[4 * i : 4 * i + 4], scale, f"{form} {scale}", dtype)


@pytest.mark.parametrize("form", ["whole", "blocks", "narrow_mask", "narrow_mask_in_blocks"])
@pytest.mark.parametrize("dtype", [tf.float16, tf.float32])
def test_masks_of_float16(form, dtype):
    """Which has no number as low as those that masks of other dtypes hide by."""
    table.check(run(lambda mesh: table.results(mesh, form, 1.0, dtype)), 1.0, form, tf.float16)


@pytest.mark.parametrize("form", ["whole", "blocks", "mask_in_blocks"])
def test_with_an_extra_logit_it_is_zero(form):
    """Which is all of the softmax then."""
    y, dq, dk, dv = run(lambda mesh: table.results(mesh, form, 1.0, extra_logit=0.0))
    for x in (y, dq, dk, dv):
        np.testing.assert_array_equal(x[1], 0.0)
    np.testing.assert_array_equal(y[0, table.BLIND], 0.0)
    assert np.abs(y[0, 0]).max() > 0.01


def test_gradients_of_gradients():
    """Blocks compute them with all logits: they are the same."""

    def build(mesh):
        found = []
        for form in ("whole", "blocks"):
            y, dq, dk, dv = table.results(mesh, form, 1.0)
            loss = mtf.add_n([mtf.reduce_sum(mtf.square(x)) for x in (y, dq, dk, dv)])
            names = ("length", "memory", "memory")
            inputs = [op.outputs[0] for op in mesh.graph.operations if not op.inputs]
            wide = [x for x in inputs if len(x.shape) == 4][-4:-1]
            assert [x.shape.dims[1].name for x in wide] == list(names)
            found += mtf.gradients([loss], wide)
        return found

    values = run(build)
    for plain, blocked in zip(values[:3], values[3:], strict=True):
        assert np.isfinite(plain).all()
        harness.assert_close(blocked, plain, 1e-5)


def test_z_loss_is_finite():
    def build(mesh):
        found = []
        for blocked in (False, True):
            context = types.SimpleNamespace(
                model=None, mode="train", train=True, losses=[], nonpadding=None
            )
            given = mtf.ones(mesh, "batch:2,length:3,d:4"), mtf.ones(mesh, "batch:2,memory:3,d:4")
            q, k = given
            memory, d = k.shape.dims[1:]
            bias = mtf.constant(mesh, [0.0, -1e9, -1e9], [q.shape.dims[1]])
            bias = mtf.add(bias, mtf.zeros(mesh, [memory]), output_shape=[*bias.shape, memory])
            A.attention(q, k, k, memory, d, d, bias, context=context, z_loss_coeff=1.0,
                        blocked=blocked)  # fmt: skip
            found += [*context.losses, *mtf.gradients(context.losses, [q, k])]
        return found

    values = run(build)
    assert all(np.isfinite(x).all() for x in values)
    for plain, blocked in zip(values[:3], values[3:], strict=True):
        harness.assert_close(blocked, plain, 1e-5)
    np.testing.assert_array_equal(values[1][:, 1:], 0.0)


@pytest.mark.parametrize("splits", [1, 2, 4])
@pytest.mark.parametrize("causal", [True, False])
def test_local_attention_has_the_mean_of_its_neighborhood(splits, causal):
    """Which does not depend on blocks, nor so on the layout; what is beyond the ends is no part."""
    length, radius = 8, 3
    rng = np.random.default_rng(1)
    values = rng.normal(size=[length, 2]).astype("f")

    def build(mesh):
        [dim, d] = mtf.convert_to_shape(f"length:{length},d:2").dims
        x = mtf.import_tf_tensor(mesh, tf.constant(values), [dim, d])
        positions = mtf.range(mesh, dim, tf.int32)
        ids = mtf.import_tf_tensor(mesh, tf.constant([1] * 8), [dim])
        y = A.local_attention_1d(
            x * 50.0, x, x, dim, d, d, fully_autoregressive=causal, length_dim_num_splits=splits,
            radius=radius, sequence_id=ids, write_priority=positions + 100, read_priority=positions,
        )  # fmt: skip
        return [y, *mtf.gradients([y], [x])]

    y, dx = run(build, Placing("x:2", "length:x") if splits == 2 else WHOLE)
    assert np.isfinite(dx).all()
    near = [
        [j for j in range(length) if -radius < j - i <= (0 if causal else radius)]
        for i in range(length)
    ]
    np.testing.assert_allclose(y, [values[js].mean(0) for js in near], rtol=1e-5, atol=1e-5)
    counts = [sum(1 / len(js) for js in near if j in js) for j in range(length)]
    np.testing.assert_allclose(dx, np.repeat(np.array(counts)[:, None], 2, 1), rtol=1e-5)
