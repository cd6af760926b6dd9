"""The funnel: what is pooled and when, decoding from a pooled encoder, layouts, errors."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from helpers.transformer import decoding_models as models
from helpers.transformer import further_models as further
from helpers.transformer.decoding_models import LENGTH, ROWS

import mesh_tensorflow as mtf
from mesh_tensorflow.testing.harness import Placing
from mesh_tensorflow.transformer import transformer
from mesh_tensorflow.transformer.funnel_transformer import (
    BitransformerFunnel,
    FunnelTransformerLayerStack,
)

D = 16
SUBLAYERS = {
    "sublayers_initial": [], "sublayers_final": [],
    "sublayers_per_layer": [transformer.sublayer_call_layer],
}  # fmt: skip


class Recorded(transformer.TransformerLayer):
    """Notes what it is called with, and multiplies with a variable."""

    def __init__(self, number, notes):
        self.number, self.notes = number, notes

    def call(self, context, x, losses=None):
        scope = tf.get_variable_scope().name
        self.notes.append((self.number, scope.split("funnel_")[-1], x.shape.dims[1].size))
        scale = mtf.get_variable(x.mesh, "scale", mtf.Shape([]), initializer=tf.ones_initializer())
        return x * scale


def funnel(layers, sizes=(1, 1), repeats=None, **kwargs):
    for i, layer in enumerate(layers):
        layer.set_name(f"layer_{i:03d}")
    return FunnelTransformerLayerStack(layers, **{
        "n_blocks": len(sizes), "block_param_size": list(sizes),
        "block_repeat_size": repeats or [1] * len(sizes), **SUBLAYERS, **kwargs,
    })  # fmt: skip


def new_context(mesh, ids, **kwargs):
    given = models.imported(mesh, ids)
    rows, length = given.shape.dims
    return transformer.Context(
        None, mesh, [rows], length, further.FLOAT, sequence_id=mtf.minimum(given, 1), inputs=given,
        position=mtf.range(mesh, length, tf.int32), position_is_default=True, **kwargs,
    )  # fmt: skip


def called(sizes, repeats=None, counts=(8, 5, 2, 1), **kwargs):
    """Returns (notes of the layers, values of the output and of the Context)."""
    notes = []
    number = sum(sizes) * kwargs.get("n_submodules", 2)
    x = np.random.RandomState(0).normal(size=(ROWS, LENGTH, D)).astype("float32")
    found = {}

    def build(mesh):
        stack = funnel([Recorded(i, notes) for i in range(number)], sizes, repeats, **kwargs)
        assert stack.context is None
        context = new_context(mesh, further.target_ids(counts=counts))
        shape = mtf.Shape([*context.batch_dims, context.length_dim, mtf.Dimension("d_model", D)])
        y = stack.call(context, mtf.import_tf_tensor(mesh, tf.constant(x), shape))
        assert stack.context is context and context.length_dim == y.shape.dims[1]
        assert context.layer_index == len(notes)
        found["layer_outputs"] = [t.shape.dims[1].size for t in context.layer_outputs]
        return {"y": y, "sequence_id": context.sequence_id, "position": context.position,
                "inputs": context.inputs}  # fmt: skip

    found.update(models.run(build, scale=0.0))
    return x, notes, found


def test_pools_after_the_first_layer_of_a_block():
    _, notes, found = called([1, 2, 1])
    assert [length for *_, length in notes] == [8, 8, 8, 4, 4, 4, 4, 2]
    assert notes[2][1] == "block_001/param_idx_000/submodule_000/Recorded"
    assert notes[5][1] == "block_001/param_idx_001/submodule_001/Recorded"
    assert found["layer_outputs"] == [8, 8, 8, 4, 4, 4, 4, 2, 2]
    np.testing.assert_array_equal(found["position"], [0, 1])


def test_context_of_the_pooled_sequence():
    """Each window keeps its first id; a window is padding if its first is."""
    _, _, found = called([1, 1], n_submodules=1)
    ids = further.target_ids(counts=(8, 5, 2, 1))
    np.testing.assert_array_equal(found["inputs"], ids[:, ::2])
    np.testing.assert_array_equal(found["sequence_id"], ids[:, ::2] > 0)
    np.testing.assert_array_equal(found["position"], [0, 1, 2, 3])


@pytest.mark.parametrize("kind, size", [("mean", 2), ("mean", 4), ("max", 2), ("min", 2)])
def test_pooling(kind, size):
    """With variables of zero only the residual connections are left."""
    with_residual = {"sublayers_per_layer": [transformer.sublayer_call_layer,
                                             transformer.sublayer_residual]}  # fmt: skip
    x, _, found = called([1, 1], pooling_type=kind, pooling_size=size, **with_residual)
    windows = x.reshape(ROWS, LENGTH // size, size, D)
    pooled = getattr(windows, kind)(2)
    np.testing.assert_allclose(found["y"], pooled * found["sequence_id"][..., None], rtol=1e-5)


def test_repeated_modules_use_their_variables_again():
    """Which the classic cannot build."""
    _, notes, found = called([1, 2], repeats=[2, 2], n_submodules=1)
    assert [number for number, *_ in notes] == [0, 0, 1, 1, 2, 2]
    assert [length for *_, length in notes] == [8, 8, 8, 4, 4, 4]
    assert [scope[:23] for _, scope, _ in notes[2:]] == [
        "block_001/param_idx_000", "block_001/param_idx_000",
        "block_001/param_idx_001", "block_001/param_idx_001",
    ]  # fmt: skip


class SeesMemory(transformer.TransformerLayer):
    """Adds the mean of what the encoder made of its nonpadding."""

    def call(self, context, x, losses=None):
        if context.mode == "incremental":
            return x + context.get_constant_state()
        output, length = context.encoder_output, context.encoder_length_dim
        there = mtf.cast(mtf.not_equal(context.encoder_sequence_id, 0), x.dtype)
        mean = mtf.reduce_sum(output * there, reduced_dim=length) / mtf.reduce_sum(
            there, reduced_dim=length
        )
        if context.mode == "first_part":
            context.record_constant_state(mean)
        return x + mean


def model(pooling_type="mean"):
    common = {"d_model": D, "input_vocab_size": models.VOCAB, "max_length": 16, "vocab_divisor": 4}
    layers = [further.Mix() for _ in range(6)]
    encoder = transformer.Unitransformer(
        funnel(layers, [1, 1, 1], pooling_type=pooling_type, sublayers_per_layer=[
            transformer.sublayer_rms_norm, transformer.sublayer_call_layer,
            transformer.sublayer_residual,
        ]),
        output_vocab_size=None, autoregressive=False, name="encoder", **common,
    )  # fmt: skip
    decoder = transformer.Unitransformer(
        models.stack([models.RunningSum(), SeesMemory()]), output_vocab_size=models.VOCAB,
        autoregressive=True, name="decoder", **common,
    )  # fmt: skip
    return BitransformerFunnel(encoder, decoder)


INPUTS = models.prefixes((8, 5, 3, 1), seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mean", "max", "min"])
@pytest.mark.slips
def test_equal_in_layouts(kind):
    def build(mesh):
        inputs, targets = (
            models.imported(mesh, a) for a in (INPUTS, models.prefixes((7, 8, 2, 4)))
        )
        logits, loss = model(kind).call_simple(inputs, targets, compute_loss=True)
        variables = mesh.graph.trainable_variables
        grads = mtf.gradients([loss], [v.outputs[0] for v in variables])
        named = {f"d_{v.name}": g for v, g in zip(variables, grads)}
        return {k: mtf.anonymize(v) for k, v in {"logits": logits, "loss": loss, **named}.items()}

    placings = [Placing("x:2,y:2", "length:x,batch:y")]
    if kind == "mean":
        placings += further.PLACINGS
    further.equal_in_placings(build, placings)


@pytest.mark.slow
@pytest.mark.parametrize("placing", [models.WHOLE, *further.PLACINGS[1:]])
def test_decoding_equals_the_whole_sequence(placing):
    """Every id, by sampling at temperature 0, is the best one by the logits of all positions."""

    def build(mesh):
        funneled, inputs = model(), models.imported(mesh, INPUTS)
        ids = funneled.decode(inputs)
        with tf.variable_scope(tf.get_variable_scope(), reuse=tf.AUTO_REUSE):
            logits, _ = funneled.call_simple(inputs, ids, compute_loss=False, mode="eval")
            beams = funneled.decode(inputs, beam_size=2, alpha=0.0)
        return [mtf.anonymize(t) for t in (ids, logits, beams)]

    ids, logits, beams = models.run(build, placing).values()
    best = logits.argmax(-1)
    for row, wanted, beam in zip(ids, best, beams):
        end = np.flatnonzero(row == 1)
        count = end[0] + 1 if len(end) else np.count_nonzero(row)
        assert count > 0
        np.testing.assert_array_equal(row[:count], wanted[:count])
        assert beam.shape == row.shape and beam[0] > 0


def test_errors():
    notes = []
    layers = [Recorded(i, notes) for i in range(4)]
    with pytest.raises(
        ValueError, match=r"there are 4 layers, but .* has 3 modules of n_submodules=2"
    ):
        funnel(layers, [2, 1])
    with pytest.raises(ValueError, match="must have n_blocks=3 numbers each"):
        funnel(layers, [1, 1], n_blocks=3)
    with pytest.raises(ValueError, match="pooling_type='sum' is none of 'mean', 'max', 'min'"):
        funnel(layers, pooling_type="sum")
    with pytest.raises(ValueError, match="pooling_size=3 does not divide length=8"):
        called([1, 1], pooling_size=3)
    with pytest.raises(ValueError, match="must be a FunnelTransformerLayerStack, not LayerStack"):
        BitransformerFunnel(models.unitransformer([]), models.unitransformer([]))
