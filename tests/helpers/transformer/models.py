"""Small models of a layer of our own, and what tests of models share."""

import functools

import numpy as np
import tensorflow.compat.v1 as tf

import mesh_tensorflow as mtf
from helpers.transformer import decoding_models
from mesh_tensorflow.testing.harness import WHOLE, Placing, assert_close
from mesh_tensorflow.transformer import transformer

ROWS, LENGTH, VOCAB, DEPTH = 4, 8, 14, 8
FLOAT = mtf.VariableDType(tf.float32)
run, imported = decoding_models.run, decoding_models.imported

# Data, model, both, the sequence; processors executed as one; and a program each.
PLACINGS = [
    Placing("x:2", "batch:x"),
    Placing("x:2", "d_model:x"),
    Placing("x:2", "vocab:x,inner:x"),
    Placing("x:2,y:2", "batch:x,vocab:y,inner:y"),
    Placing("x:2,y:2", "batch:x,length:y"),
    Placing("x:2,y:2", "batch:x,vocab:y,inner:y", merge="device"),
    Placing("x:2,y:2", "batch:x,vocab:y,inner:y", simd=True),
    Placing("x:2", "length:x", simd=True),
]


class Mix(transformer.TransformerLayer):
    """A hidden layer on the mean of the positions that each one sees.

    Args:
      loss: a factor of a loss of its own.
      shares: whether the visible positions are made once for all layers, in the cache.
    """

    def __init__(self, loss=0.0, shares=False):
        self.loss, self.shares = loss, shares

    def call(self, context, x, losses=None):
        d, length = context.model.model_dim, context.length_dim
        inner = mtf.Dimension("inner", 2 * d.size)
        options = {
            "use_bias": False, "variable_dtype": context.variable_dtype,
            "expert_dims": context.model.ensemble_dims,
        }  # fmt: skip
        y = mtf.layers.dense(x, inner, [d], activation=mtf.tanh, name="wi", **options)
        if self.loss and context.losses is not None:
            context.losses.append(mtf.reduce_mean(mtf.square(y)) * self.loss)
        memory = mtf.Dimension("memory_length", length.size)
        y = mtf.einsum(
            [self.seen(context, memory), mtf.rename_dimension(y, length.name, memory.name)],
            reduced_dims=[memory],
        )
        y = mtf.layers.dense(y, d, [inner], name="wo", **options)
        if context.encoder_output is not None:
            y += mtf.reduce_mean(context.encoder_output, reduced_dim=context.encoder_length_dim)
        return mtf.transpose(y, x.shape)

    def seen(self, context, memory):
        if "seen" in context.cache:
            return context.cache["seen"]
        length = context.length_dim
        seen = mtf.ones(context.mesh, mtf.Shape([length, memory]))
        if context.read_priority is not None:
            write = mtf.rename_dimension(context.write_priority, length.name, memory.name)
            seen = mtf.to_float(mtf.greater_equal(context.read_priority, write))
        seen = mtf.cast(seen / length.size, context.activation_dtype)
        if self.shares:
            context.cache["seen"] = seen
        return seen


SUBLAYERS = {
    "sublayers_initial": [],
    "sublayers_per_layer": [
        transformer.sublayer_rms_norm, transformer.sublayer_call_layer, transformer.sublayer_residual,
    ],
    "sublayers_final": [transformer.sublayer_rms_norm],
}  # fmt: skip


def stack(layers=(Mix,), num_layers=2, cls=transformer.LayerStack, **kwargs):
    return transformer.make_layer_stack(
        layers=list(layers), num_layers=num_layers,
        layer_stack_cls=functools.partial(cls, **{**SUBLAYERS, **kwargs}),
    )  # fmt: skip


def unitransformer(layer_stack=None, cls=transformer.Unitransformer, **kwargs):
    arguments = {
        "d_model": DEPTH, "input_vocab_size": VOCAB, "output_vocab_size": VOCAB, "vocab_divisor": 16,
        "autoregressive": True, "max_length": LENGTH, **kwargs,
    }  # fmt: skip
    return cls(layer_stack or stack(), **arguments)


def bitransformer(**kwargs):
    encoder = {"name": "encoder", "autoregressive": False, "output_vocab_size": None}
    return transformer.Bitransformer(
        unitransformer(**{**encoder, **kwargs}), unitransformer(name="decoder", **kwargs)
    )


def some_ids(seed=0, length=LENGTH, low=-1):
    return np.random.RandomState(seed).randint(low, VOCAB, (ROWS, length)).astype("int32")


def trained(loss, trainable=None):
    """Returns a loss with its gradients for all trainable variables, by name."""
    variables = loss.graph.trainable_variables if trainable is None else trainable
    grads = mtf.gradients([loss], [v.outputs[0] for v in variables])
    return {"loss": loss, **{v.name: g for v, g in zip(variables, grads) if g is not None}}


def language_model(ids=None, call=None, gradients=True, **kwargs):
    """Returns a function of a mesh: logits, loss and gradients of a model that makes them."""

    def build(mesh):
        targets = imported(mesh, some_ids() if ids is None else ids)
        inputs = transformer.autoregressive_inputs(targets)
        logits, loss = unitransformer(**kwargs).call_simple(inputs, targets, True, **(call or {}))
        return {"logits": logits, **(trained(loss) if gradients else {"loss": loss})}

    return build


def assert_same(actual, expected, tolerance=1e-5):
    assert set(actual) == set(expected)
    for key, value in expected.items():
        assert_close(actual[key], value, tolerance, key)


def check_everywhere(build, placings=PLACINGS, tolerance=1e-5):
    """Compares what a function of a mesh makes on one processor and in placings."""
    expected = run(build, WHOLE)
    for placing in placings:
        assert_same(run(build, placing), expected, tolerance)
    return expected
