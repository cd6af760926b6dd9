"""Small language models with one part exchanged, and what tests of all parts share."""

import numpy as np
import tensorflow.compat.v1 as tf

import mesh_tensorflow as mtf
from helpers.transformer import decoding_models as models
from mesh_tensorflow.testing.harness import WHOLE, Placing, assert_close
from mesh_tensorflow.transformer import transformer

FLOAT = mtf.VariableDType(tf.float32)
ROWS, LENGTH = models.ROWS, models.LENGTH
VOCAB = 24

# Data, model and both; also of which processors have their own memory, or a program each.
PLACINGS = [
    Placing("x:2", "d_model:x"),
    Placing("x:2,y:2", "batch:x,vocab:y,heads:y,d_ff:y", merge="device"),
    Placing("x:2,y:2", "batch:x,vocab:y,heads:y,d_ff:y", simd=True),
]  # fmt: skip


class Mix(transformer.TransformerLayer):
    """A dense layer that sees the positions up to its own."""

    def call(self, context, x, losses=None):
        summed = mtf.cumsum(x, context.length_dim) * (1.0 / LENGTH)
        return mtf.layers.dense(
            x + summed, x.shape.dims[-1:], x.shape.dims[-1:], activation=mtf.tanh,
            variable_dtype=context.variable_dtype, name="mix",
        )  # fmt: skip


def target_ids(seed=0, counts=(8, 5, 7, 3), vocab=VOCAB):
    ids = np.random.RandomState(seed).randint(1, vocab, (len(counts), LENGTH))
    return np.where(np.arange(LENGTH) < np.array(counts)[:, None], ids, 0).astype("int32")


def language_model(layer_stack, embedding=None, mode="train", gradients=True, ids=None, **kwargs):
    """Returns a function that builds a model on a mesh: its logits, loss and gradients."""

    def build(mesh):
        model = transformer.Unitransformer(layer_stack(), **{
            "d_model": 8, "input_vocab_size": VOCAB, "output_vocab_size": VOCAB, "vocab_divisor": 8,
            "autoregressive": True, "max_length": LENGTH,
            "shared_embedding_and_softmax_weights": True, **kwargs,
        })  # fmt: skip
        targets = models.imported(mesh, target_ids() if ids is None else ids)
        shared = None
        if embedding is not None:
            made = embedding(mesh, model.input_vocab_dim, model.model_dim, FLOAT, "embedding", None)
            shared = {"embedding": made}
        logits, loss = model.call_simple(
            transformer.autoregressive_inputs(targets), targets, compute_loss=True, mode=mode,
            sequence_id=mtf.minimum(targets, 1), shared_params=shared,
        )  # fmt: skip
        outputs = {"logits": logits, "loss": loss}
        if gradients:
            variables = mesh.graph.trainable_variables
            grads = mtf.gradients([loss], [v.outputs[0] for v in variables])
            outputs.update({f"d_{v.name}": g for v, g in zip(variables, grads)})
        return {k: mtf.anonymize(v) for k, v in outputs.items()}

    return build


def equal_in_placings(build, placings=PLACINGS, tolerance=2e-5, scale=0.5):
    """Checks that what a program computes does not depend on the mesh; returns it."""
    expected = models.run(build, WHOLE, scale=scale)
    for placing in placings:
        found = models.run(build, placing, scale=scale)
        for key, value in expected.items():
            assert_close(found[key], value, tolerance, f"{key} {placing}")
    return expected


def weights(name, *sizes, scale=0.5):
    """Returns the numbers that `models.run` gives a variable."""
    return models.weights(name, sizes, scale)


def softmax(x, axis=-1):
    e = np.exp(x - x.max(axis, keepdims=True))
    return e / e.sum(axis, keepdims=True)
