"""Forms of attention, crossed with what queries see, with how a model is run, and with meshes.

Each cell is the loss of a small model and its gradients, or what it decodes, beside the same of
attention with all logits at once, of layers in a row on one processor.
"""

import functools

import numpy as np
import pytest
from helpers.transformer import decoding_models, models
from helpers.transformer.models import ROWS, imported, some_ids, trained

import mesh_tensorflow as mtf
from mesh_tensorflow.testing.harness import WHOLE, Placing, assert_close
from mesh_tensorflow.transformer import transformer
from mesh_tensorflow.transformer import transformer_layers as T

slow = pytest.mark.slow
IDS = some_ids(low=1)
# Padding at the end, also of the encoder's rows that have none: queries there see nothing.
PACKED = np.array([[1, 1, 1, 1, 2, 2, 2, 2], [1, 1, 2, 2, 2, 3, 0, 0]] * (ROWS // 2), "int32")
ENCODER = np.array([[1, 1, 1, 1, 2, 2, 2, 2], [1, 1, 2, 2, 2, 3, 3, 3]] * (ROWS // 2), "int32")
POSITIONS = np.array([[0, 1, 2, 3, 0, 1, 2, 3], [0, 1, 0, 1, 2, 0, 0, 1]] * (ROWS // 2), "int32")

RING = "length:x,memory_length:x"
# Arguments of layers, and the layout that each form is for.
FORMS = {
    "whole": ({"attention_kwargs": {"blocked": False}}, "batch:x"),
    "blocked": ({"attention_kwargs": {"blocked": True}}, "batch:x"),
    "gathered": ({"attention_kwargs": {"blocked": True}}, "length:x"),
    "ring": ({"attention_kwargs": {"ring": True}}, RING),
    "zigzag": ({"attention_kwargs": {"ring": "zigzag"}}, RING),
    "contiguous": ({"attention_kwargs": {"ring": "contiguous"}}, RING),
    "all_to_all": ({"attention_func": "all_to_all"}, "length:x,attention_heads:x"),
    "all_to_all_blocked": (
        {"attention_func": "all_to_all", "attention_kwargs": {"blocked": True}},
        "length:x,attention_heads:x",
    ),
}
# What queries see: arguments of layers, of the model, and of the call.
SIGHTS = {
    "causal": ({}, {}, False),
    "bias": ({"relative_attention_type": "bias"}, {}, False),
    "packed": ({}, {}, True),
    "packed_rotary": ({"rotary": mtf.layers.RotaryEmbedding()}, {}, True),
    "packed_bias": ({"relative_attention_type": "bias"}, {}, True),
    "soft_cap": ({"attention_kwargs": {"soft_cap": 2.0}}, {}, False),
    "packed_alibi": ({"relative_attention_type": "alibi"}, {}, True),
    "visible_alibi": ({"relative_attention_type": "alibi"}, {"autoregressive": False}, False),
    "normalized": (
        {
            "qk_norm_epsilon": 1e-3,
            "qk_norm_over_heads": True,
            "qk_norm_unit_offset": True,
            "query_scale": 0.7,
            "combine_dims": False,
        },
        {},
        False,
    ),
    "packed_shared_bias": ({"relative_attention_type": "bias_shared"}, {}, True),
    "visible": ({"relative_attention_type": "bias"}, {"autoregressive": False}, False),
    "visible_packed": ({}, {"autoregressive": False}, True),
    "dropout": ({"dropout_rate": 0.4}, {}, False),
    "packed_dropout": ({"dropout_rate": 0.4, "relative_attention_type": "bias"}, {}, True),
}
MODES = {
    "train": {},
    "recompute": {"recompute_grads": True},
    "pipeline": {
        "cls": transformer.PipelinedLayerStack, "num_stages": 2, "num_microbatches": 2,
    },
    "pipeline_recompute": {
        "cls": transformer.PipelinedLayerStack, "num_stages": 2, "num_microbatches": 2,
        "recompute_grads": True,
    },
}  # fmt: skip
MESHES = {
    "one": WHOLE,
    "placement": Placing("x:2", ""),
    "merged": Placing("x:2", "", merge="device"),
    "simd": Placing("x:2", "", simd=True),
}


def layers(form, sight):
    """A layer of attention of a form, with heads that two processors share."""
    options = [FORMS[form][0], SIGHTS[sight][0]]
    both = {k: v for given in options for k, v in given.get("attention_kwargs", {}).items()}
    kwargs = {**options[0], **options[1], "attention_kwargs": both}
    return [(T.SelfAttention, {"num_heads": 2, "key_value_size": 4, **kwargs})]


def trains(form, sight, mode, **further):
    """Returns a function of a mesh: the loss and gradients of a model of two layers."""

    def build(mesh):
        _, options, packed = SIGHTS[sight]
        targets = imported(mesh, IDS)
        call = {}
        if packed:
            ids = imported(mesh, PACKED)
            call = {
                "sequence_id": ids,
                "subsequence_id": ids,
                "position": imported(mesh, POSITIONS),
            }
        stack = models.stack(layers(form, sight), 2, **MODES[mode])
        model = models.unitransformer(stack, **options, **further)
        inputs = transformer.autoregressive_inputs(targets)
        _, loss = model.call_simple(inputs, targets, True, mode="train", **call)
        return trained(loss)

    return build


@functools.cache
def expected(sight, form="whole", placing=WHOLE):
    return models.run(trains(form, sight, "train"), placing, scale=0.5)


CELLS = [
    *(("blocked", sight, "train", "placement") for sight in ("causal", "packed_bias")),
    ("ring", "packed_bias", "train", "placement"),
    ("zigzag", "bias", "train", "simd"),
    ("zigzag", "packed", "recompute", "merged"),
    ("contiguous", "visible_packed", "train", "placement"),
    ("all_to_all", "packed_bias", "train", "placement"),
    ("all_to_all_blocked", "packed_shared_bias", "recompute", "simd"),
    ("gathered", "packed_bias", "train", "placement"),
    ("blocked", "packed_bias", "pipeline", "placement"),
    ("blocked", "packed_dropout", "pipeline_recompute", "one"),
    ("ring", "packed_bias", "pipeline", "placement"),
    ("zigzag", "packed_dropout", "pipeline", "simd"),
    ("whole", "packed_shared_bias", "pipeline", "placement"),
]  # fmt: skip
REST = [
    cell
    for form in FORMS
    for sight in SIGHTS
    for mode in MODES
    for mesh in MESHES
    if (cell := (form, sight, mode, mesh)) not in CELLS
    # A fifth of them, in which each pair of entries of two columns is.
    if (list(FORMS).index(form) + 2 * list(SIGHTS).index(sight) + 3 * list(MODES).index(mode)
        + list(MESHES).index(mesh)) % 5 == 0
]  # fmt: skip


@pytest.mark.slow_but(1)
@pytest.mark.slow(
    "*packed_bias-pipeline*", "*packed_bias-train-placement*", "*packed_dropout-pipeline*"
)
@pytest.mark.slips  # names of layouts that only some forms have
@pytest.mark.parametrize("form, sight, mode, mesh", [
    *CELLS,
    *(pytest.param(*cell, marks=pytest.mark.every if i % 15 else slow) for i, cell in enumerate(REST))
])  # fmt: skip
def test_trains(form, sight, mode, mesh):
    placing = MESHES[mesh]
    if placing.mesh:
        placing = placing._replace(layout=FORMS[form][1])
    # Masks of dropout are numbered by blocks otherwise than with all logits at once, and the
    # program of a processor in SIMD, a graph of its own, has random values of its own.
    drops = "dropout" in sight
    of_blocks = drops and form not in ("whole", "all_to_all")
    same = placing._replace(layout="batch:x") if drops and placing.simd else WHOLE
    wanted = expected(sight, "blocked" if of_blocks else "whole", same)
    found = models.run(trains(form, sight, mode), placing, scale=0.5)
    assert set(found) == set(wanted)
    for name, value in wanted.items():
        assert np.isfinite(value).all(), name
        assert_close(found[name], value, 1e-4, name)


# Such a dimension splits the batch once more, in attention alone.
@pytest.mark.slow("*packed_bias*")
@pytest.mark.parametrize("form, sight, mode, mesh, layout", [
    ("ring", "packed", "train", "y:2", "d_ff:y"),
    ("whole", "packed", "pipeline", "y:2", "d_ff:y"),
    ("ring", "packed_bias", "train", "x:2,y:2", f"{RING},d_ff:y"),
    ("blocked", "packed_bias", "train", "x:2,y:2", "batch:x,d_ff:y"),
])  # fmt: skip
@pytest.mark.slips
def test_idle_mesh_dimensions(form, sight, mode, mesh, layout):
    placing = Placing(mesh, layout)
    build = trains(form, sight, mode, layout=layout, mesh_shape=mesh)
    found = models.run(build, placing, scale=0.5)
    for name, value in expected(sight).items():
        assert_close(found[name], value, 1e-4, name)


def crossed(form, encoder_ids, **options):
    """Returns a function of a mesh: a model with an encoder, of whose decoder some see nothing."""

    def build(mesh):
        kwargs = {"num_heads": 2, "key_value_size": 4, **FORMS[form][0]}
        model = transformer.Bitransformer(
            models.unitransformer(
                models.stack([(T.SelfAttention, kwargs)], 1), name="encoder", autoregressive=False,
                output_vocab_size=None, **options,
            ),
            models.unitransformer(
                models.stack([(T.SelfAttention, kwargs), (T.EncDecAttention, kwargs)], 1),
                name="decoder", **options,
            ),
        )  # fmt: skip
        targets = imported(mesh, IDS)
        _, loss = model.call_simple(
            targets, targets, True, mode="train", encoder_sequence_id=imported(mesh, encoder_ids),
            decoder_sequence_id=imported(mesh, PACKED), encoder_position=imported(mesh, POSITIONS),
            decoder_position=imported(mesh, POSITIONS),
        )  # fmt: skip
        return trained(loss)

    return build


@pytest.mark.slow_but(1)
@pytest.mark.slips
@pytest.mark.parametrize("form, mesh", [
    ("blocked", "one"),
    ("contiguous", "placement"),
    ("all_to_all", "placement"),
    pytest.param("ring", "idle", marks=slow),
    *(pytest.param(form, mesh, marks=slow) for form in FORMS for mesh in MESHES
      if form != "zigzag"),
])  # fmt: skip
def test_cross_attention(form, mesh):
    """Padding of the decoder sees nothing of encoders that have none."""
    placing, options = MESHES.get(mesh, WHOLE), {}
    if mesh == "idle":
        placing = Placing("x:2,y:2", FORMS[form][1] + ",d_ff:y")
        options = {"layout": placing.layout, "mesh_shape": placing.mesh}
    elif placing.mesh:
        placing = placing._replace(layout=FORMS[form][1])
    wanted = models.run(crossed("whole", ENCODER), scale=0.5)
    found = models.run(crossed(form, ENCODER, **options), placing, scale=0.5)
    for name, value in wanted.items():
        assert np.isfinite(value).all(), name
        assert_close(found[name], value, 1e-4, name)


def decodes(form, beams, kind):
    """Returns a function of a mesh: what a model continues ids with."""

    def build(mesh):
        kwargs = {"num_heads": 2, "key_value_size": 4, **FORMS[form][0]}
        if kind == "local":
            layer = T.LocalSelfAttention(radius=3, **kwargs)
        else:
            layer = T.SelfAttention(**kwargs, relative_attention_type=kind)
        model = decoding_models.unitransformer([layer])
        ids = decoding_models.imported(mesh, decoding_models.prefixes())
        if beams:
            beam = mtf.Dimension("beam", 2)
            batch, length = ids.shape.dims
            inputs = mtf.broadcast(ids, mtf.Shape([batch, beam, length]))
            return [model.beam_search(inputs, decode_length=5)]
        return [model.sample_autoregressive(ids, temperature=0.0)]

    return build


@pytest.mark.slow_but(1)
@pytest.mark.slips
@pytest.mark.parametrize("form, beams, kind, placing", [
    ("blocked", False, "bias", WHOLE),
    ("blocked", True, None, WHOLE),
    ("blocked", False, "local", WHOLE),
    ("ring", True, "bias", Placing("x:2", RING)),
    pytest.param("blocked", False, "contextual", WHOLE, marks=slow),
    pytest.param("blocked", True, "bias_shared", Placing("x:2", "heads:x"), marks=slow),
    pytest.param("zigzag", False, "bias", Placing("x:2", "heads:x", simd=True), marks=slow),
    pytest.param("all_to_all_blocked", False, "bias", Placing("x:2", "heads:x"), marks=slow),
])  # fmt: skip
def test_decodes(form, beams, kind, placing):
    """Greedily and with beams, the ids of attention with all logits."""
    [wanted] = decoding_models.run(decodes("whole", beams, kind)).values()
    [found] = decoding_models.run(decodes(form, beams, kind), placing).values()
    np.testing.assert_array_equal(found, wanted)
