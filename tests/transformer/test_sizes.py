"""Whole models of published sizes: how many parameters they have, and what these are called."""

import functools

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.transformer import transformer, transformer_layers

BFLOAT16 = mtf.VariableDType(tf.bfloat16, tf.float32, tf.bfloat16)


def variables(build, trains):
    """Returns {name: shape} of the variables of a model, of which only the graph is built.

    Args:
      build: a function of a mesh; returns a loss.
      trains: whether to build the gradients too.
    """
    with tf.Graph().as_default():
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        loss = build(mesh)
        if trains:
            grads = mtf.gradients([loss], [v.outputs[0] for v in mesh.graph.trainable_variables])
            assert all(g is not None for g in grads)
        return {v.name: v.shape for v in mesh.graph.all_variables}


def count(shapes):
    return sum(shape.size for shape in shapes.values())


def ids(mesh, length, batch=16):
    return mtf.zeros(mesh, f"batch:{batch},length:{length}", dtype=tf.int32)


# Shazeer et al., "Mesh-TensorFlow: deep learning for supercomputers" (2018), table 2.
LADDER = {-1: 0.141, 0: 0.217, 1: 0.368, 2: 0.670, 3: 1.274, 4: 2.482, 5: 4.898}


@pytest.mark.slow("[1-5]*")
@pytest.mark.parametrize("step", LADDER)
def test_language_models_of_the_paper(step):
    factor = 2.0**step

    def build(mesh):
        layers = [
            (
                transformer_layers.SelfAttention,
                {"num_heads": int(8 * factor), "key_value_size": 256},
            ),
            (transformer_layers.DenseReluDense, {"hidden_size": int(8192 * factor)}),
        ]
        layer_stack = transformer.make_layer_stack(
            layers=layers,
            num_layers=6,
            layer_stack_cls=functools.partial(
                transformer.LayerStack, dropout_rate=0.1, norm_epsilon=1e-6
            ),
        )
        model = transformer.Unitransformer(
            layer_stack,
            d_model=1024,
            input_vocab_size=32000,
            output_vocab_size=32000,
            autoregressive=True,
            max_length=256,
        )
        x = ids(mesh, 256)
        return model.call_simple(x, x, True, variable_dtype=BFLOAT16)[1]

    assert round(count(variables(build, trains=step in (-1, 5))) / 1e9, 3) == LADDER[step]


# Raffel et al., "Exploring the limits of transfer learning with a unified text-to-text
# transformer" (2020): d_model, d_ff, heads, size of keys, blocks of each side, parameters.
T5 = {
    "small": (512, 2048, 8, 64, 6, 60_506_624),
    "base": (768, 3072, 12, 64, 12, 222_903_552),
    "large": (1024, 4096, 16, 64, 24, 737_668_096),
    "3B": (1024, 16384, 32, 128, 24, 2_851_598_336),
    "11B": (1024, 65536, 128, 128, 24, 11_307_321_344),
}


def t5(d_model, d_ff, heads, key_size, blocks):
    """Returns a function of a mesh that makes a T5 model, with the names of its checkpoints."""
    attention = {"num_heads": heads, "key_value_size": key_size, "dropout_rate": 0.1}
    relative = {"relative_attention_type": "bias_shared", "relative_attention_num_buckets": 32}
    self_attention = (transformer_layers.SelfAttention, {**attention, **relative})
    encdec_attention = (transformer_layers.EncDecAttention, attention)
    dense = (transformer_layers.DenseReluDense, {"hidden_size": d_ff, "dropout_rate": 0.1})

    def side(layers, name, **kwargs):
        layer_stack = transformer.make_layer_stack(
            layers=layers,
            num_layers=blocks,
            layer_stack_cls=functools.partial(
                transformer.LayerStack, dropout_rate=0.1, norm_epsilon=1e-6
            ),
        )
        return transformer.Unitransformer(
            layer_stack,
            d_model=d_model,
            input_vocab_size=32128,
            max_length=512,
            name=name,
            positional_embedding=False,
            shared_embedding_and_softmax_weights=True,
            **kwargs,
        )

    def build(mesh):
        encoder = side(
            [self_attention, dense], "encoder", output_vocab_size=None, autoregressive=False
        )
        decoder = side(
            [self_attention, encdec_attention, dense],
            "decoder",
            output_vocab_size=32128,
            autoregressive=True,
        )
        model = transformer.Bitransformer(encoder, decoder)
        return model.call_simple(ids(mesh, 512), ids(mesh, 114), True, variable_dtype=BFLOAT16)[1]

    return build


def t5_names(blocks, d_model, d_ff, inner, heads):
    """Returns {name: sizes} of the variables in the public checkpoints."""
    io, wi = [d_model, inner], [d_model, d_ff]
    expected = {"shared/embedding": [32128, d_model]}
    for side, layers in {
        "encoder": ["SelfAttention", "DenseReluDense"],
        "decoder": ["SelfAttention", "EncDecAttention", "DenseReluDense"],
    }.items():
        expected[f"{side}/final_layer_norm/scale"] = [d_model]
        for block in range(blocks):
            for i, layer in enumerate(layers):
                prefix = f"{side}/block_{block:03d}/layer_{i:03d}"
                expected[f"{prefix}/layer_norm/scale"] = [d_model]
                if layer == "DenseReluDense":
                    expected[f"{prefix}/{layer}/wi/kernel"] = wi
                    expected[f"{prefix}/{layer}/wo/kernel"] = wi[::-1]
                    continue
                expected.update({f"{prefix}/{layer}/{v}": io for v in "qkv"})
                expected[f"{prefix}/{layer}/o"] = io[::-1]
                if layer == "SelfAttention" and block == 0:
                    expected[f"{prefix}/{layer}/relative_attention_bias"] = [heads, 32]
    return expected


@pytest.mark.slow
@pytest.mark.parametrize("size", T5)
def test_t5(size):
    *arguments, parameters = T5[size]
    d_model, d_ff, heads, key_size, blocks = arguments
    found = variables(t5(*arguments), trains=size in ("small", "11B"))
    assert count(found) == parameters
    expected = t5_names(blocks, d_model, d_ff, heads * key_size, heads)
    assert {n: s.to_integer_list for n, s in found.items()} == expected
    assert sum(int(np.prod(s)) for s in expected.values()) == parameters
