"""Attention that exchanges positions for heads: equal to whole attention, by all-to-alls."""

import re

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from helpers.transformer import attention_layers as base
from helpers.transformer.attention_layers import DEPTH, LENGTH, ROWS, run, tensor

import mesh_tensorflow as mtf
from mesh_tensorflow.testing import harness
from mesh_tensorflow.testing.harness import WHOLE, Placing, assert_close
from mesh_tensorflow.transformer import transformer_layers as T
from mesh_tensorflow.transformer.utils._program import layout_of_program

IDS = np.repeat([[1, 1, 1, 2, 2, 2, 0, 0], [1, 1, 2, 2, 3, 3, 3, 3]], ROWS // 2, 0)
SIZES = {"num_heads": 4, "key_value_size": 4}
LAYERS = {
    "plain": {},
    "bias": {"relative_attention_type": "bias"},
    "bias_shared": {"relative_attention_type": "bias_shared"},
    "contextual": {"relative_attention_type": "contextual"},
    "alibi": {"relative_attention_type": "alibi"},
    "multi_query": {"num_memory_heads": 1},
    "grouped": {"num_memory_heads": 2},
    "blocked": {"shared_kv": True, "attention_kwargs": {"blocked": True}},
    "z_loss": {"z_loss_coeff": 1.0},
    "dropout": {"dropout_rate": 0.5},
    "rotary": {"rotary": mtf.layers.RotaryEmbedding(), "num_memory_heads": 2},
}
RULES = "length:all,attention_heads:all"
TWO = Placing("all:2", RULES)
PLACINGS = [
    TWO,
    Placing("all:4", RULES),
    Placing("rows:2,all:2", f"batch:rows,{RULES}"),
    Placing("rows:2,all:4", f"batch:rows,{RULES}", simd=True),
    Placing("all:4", RULES, simd=True),
]


def built(name, mode="train", **kwargs):
    """Returns a function of a mesh: the layer's output, losses and gradients."""

    def build(mesh):
        ids = tensor(mesh, IDS, f"batch:{ROWS},length:{LENGTH}")
        context = base.context(mesh, mode, sequence_id=ids)
        x = base.layer_input(mesh)
        y = base.called(T.SelfAttention(**SIZES, **LAYERS[name], **kwargs), context, x)
        loss = mtf.add_n([mtf.reduce_sum(mtf.square(y)), *context.losses])
        weights = mesh.graph.trainable_variables
        # A checkpoint, and a store that a decoding program shares, has them as of other layers.
        assert not any("attention_" in str(w.outputs[0].shape) for w in weights)
        return [y, loss, *mtf.gradients([loss], [x, *(w.outputs[0] for w in weights)])]

    return build


def assert_same(found, expected):
    assert len(found) == len(expected) > 4
    for i, (a, b) in enumerate(zip(found.values(), expected.values())):
        assert_close(a, b, 1e-5, str(i))


@pytest.mark.slow_but(3)
@pytest.mark.parametrize(
    "name, placing",
    [*((name, TWO) for name in LAYERS), *(("bias", placing) for placing in PLACINGS[1:])],
)
def test_values_and_gradients(name, placing):
    found = run(built(name, attention_func="all_to_all"), placing)
    # With dropout, the same program on one processor: the mask is of the same numbers.
    function = "all_to_all" if name == "dropout" else None
    assert_same(found, run(built(name, attention_func=function), WHOLE))


@pytest.mark.parametrize("name, exchanged", [("plain", 4), ("grouped", 4), ("multi_query", 2)])
def test_what_is_communicated(name, exchanged):
    """Queries, keys, values and outputs are exchanged, and no activation is gathered."""
    with tf.Graph().as_default():
        graph = mtf.Graph()
        mesh = mtf.Mesh(graph, "mesh")
        x = mtf.import_tf_tensor(
            mesh, tf.zeros([ROWS, LENGTH, DEPTH]), f"batch:{ROWS},length:{LENGTH},d_model:{DEPTH}"
        )
        layer = T.SelfAttention(**SIZES, **LAYERS[name], attention_func="all_to_all")
        y = base.called(layer, base.context(mesh, "train"), x)
        impl = mtf.placement_mesh_impl.PlacementMeshImpl("all:2", RULES, [""] * 2)
        lowering = mtf.Lowering(graph, {mesh: impl})
        lowering.export_to_tf_tensor(y)
        made, predicted = harness.counted_and_predicted(lowering, [y])
        assert made == predicted
        counted = [c for _, _, c in lowering.collectives]
        exchanges = [c.elements for c in counted if c.kind == "alltoall"]
        assert len(exchanges) == exchanged and max(exchanges) == ROWS * LENGTH * 4 * 4
        others = [c.kind for c in counted if c.elements > 2 * LENGTH and c.kind != "alltoall"]
        assert others == (["allconcat"] * 2 if name == "multi_query" else [])


def test_decoding_is_plain():
    """Steps record and read the states of other layers."""

    def build(mesh):
        layer = T.SelfAttention(**SIZES, attention_func="all_to_all")
        return base.decoded(mesh, layer, base.normal(ROWS, LENGTH, DEPTH))

    found = list(run(build, scale=0.4).values())
    for step, values in enumerate(found[1 : 1 + base.STEPS]):
        expected = found[0][np.arange(ROWS), np.array(base.BEGINS) + step]
        assert_close(values, expected, 1e-5)


def test_experts_refuse():
    layer = T.ExpertsSelfAttention(
        **SIZES, num_experts=2, shared_kv=True, attend_to_memory=True, attention_func="all_to_all"
    )
    message = r"ExpertsSelfAttention: attention_func='all_to_all' is for layers whose keys are not"
    with tf.Graph().as_default(), pytest.raises(ValueError, match=message):
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        base.called(layer, base.context(mesh), base.layer_input(mesh))


@pytest.mark.parametrize("rule", ["attention_heads:all", "residual_length:all"])
def test_rules_of_training_are_no_slips_in_decoding(rule):
    """Of which the program has no such dimension."""
    with tf.Graph().as_default(), mtf.strict():
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        mtf.zeros(mesh, "batch:2,length:4")
        rules = mtf.convert_to_layout_rules(f"batch:all,{rule}")
        kept = layout_of_program(rules, mesh.graph, mtf.convert_to_shape("all:2"))
        assert kept.pairs == [("batch", "all")]


@pytest.mark.parametrize("layout, sizes, message", [
    ("length:all", {}, "exchanges parts of the length, which the layout splits over all, for heads,"
     " which it does not split; add the rule attention_heads:all"),
    (RULES, {"num_heads": 3}, "splits attention_heads=3 over all=2, which does not divide it. Take "
     "a multiple of 2 heads"),
    ("", {"hyperprompt_length_decoder": 2}, "has no prompts; set hyperprompt_length_encoder=None"),
])  # fmt: skip
def test_mistakes(layout, sizes, message):
    placing = Placing("all:2", layout)
    with tf.Graph().as_default(), pytest.raises(ValueError, match=re.escape(message)):
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        layer = T.SelfAttention(**{**SIZES, **sizes}, attention_func="all_to_all")
        base.called(layer, base.context(mesh, placing=placing), base.layer_input(mesh))
