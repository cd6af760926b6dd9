"""A language model to choose layouts for, and to measure them with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Optional

import gin
import tensorflow.compat.v1 as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.layers._masks import MASKED_LOGIT

__all__ = ["OPTIMIZERS", "Program", "language_model"]

OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: mtf.optimize.SgdOptimizer(0.01),
    "adam": lambda: mtf.optimize.AdamWeightDecayOptimizer(0.001),
    "adafactor": mtf.optimize.AdafactorOptimizer,
}


class Program(NamedTuple):
    """A program whose layout is to be chosen.

    Attributes:
      graph: an mtf.Graph.
      mesh: its mtf.Mesh.
      outputs: Tensors, such as the loss.
      updates: operations that update variables; empty without training.
    """

    graph: mtf.Graph
    mesh: mtf.Mesh
    outputs: list[mtf.Tensor]
    updates: list[mtf.Operation]


@gin.configurable(module="mesh_tensorflow.auto_mtf.models")
def language_model(
    batch: int = 8,
    length: int = 64,
    vocab: int = 1024,
    d_model: int = 256,
    layers: int = 2,
    heads: int = 4,
    d_kv: int = 64,
    d_ff: int = 1024,
    dtype: str = "float32",
    slice_dtype: str = "float32",
    optimizer: Optional[str] = "adafactor",
    recompute: bool = False,
    tokens: Optional[tf.Tensor] = None,
) -> Program:
    """Builds the training step of a decoder-only transformer that predicts the next token.

    Vaswani et al., "Attention is all you need" (2017), with layer norm before each layer and
    without dropout; embedding and softmax do not share a variable. Its dimensions are batch,
    length, memory_length, vocab, d_model, heads, d_kv and d_ff.

    Args:
      batch: the number of sequences.
      length: the number of tokens per sequence.
      vocab: the vocabulary size.
      d_model: the size of the residual stream.
      layers: the number of blocks of attention and two dense layers.
      heads: the number of attention heads.
      d_kv: the size of keys and values of a head.
      d_ff: the size of the hidden dense layer.
      dtype: the name of the dtype of activations.
      slice_dtype: the name of the dtype of slice variables.
      optimizer: a name in `OPTIMIZERS`; None for the forward pass alone.
      recompute: whether to recompute the activations of each block in the backward pass.
      tokens: an int32 tf.Tensor [batch, length]; zeros if None.

    Returns:
      A Program whose output is the loss.
    """
    sizes = {"batch": batch, "length": length, "vocab": vocab, "d_model": d_model}
    dims = [mtf.Dimension(name, size) for name, size in sizes.items()]
    inner = [mtf.Dimension(n, s) for n, s in [("heads", heads), ("d_kv", d_kv), ("d_ff", d_ff)]]
    batch_dim, length_dim, vocab_dim, model_dim = dims
    variables = mtf.VariableDType(tf.float32, tf.as_dtype(slice_dtype), tf.as_dtype(dtype))
    tf.train.get_or_create_global_step()
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")
    if tokens is None:
        tokens = tf.zeros([batch, length], tf.int32)
    ids = mtf.import_tf_tensor(mesh, tokens, [batch_dim, length_dim], name="tokens")
    with tf.variable_scope("embedding"):
        # Each position is given the token before it, and predicts its own.
        previous = mtf.shift(ids, 1, length_dim, wrap=False)
        x = mtf.layers.embedding(previous, vocab_dim, model_dim, variables, name="tokens")
        places = mtf.range(mesh, length_dim, tf.int32)
        # Not the name of the length, which the positions have that are looked up in it.
        max_length = mtf.Dimension("max_length", length)
        x += mtf.layers.embedding(places, max_length, model_dim, variables, name="places")
    for i in range(layers):
        with tf.variable_scope(f"layer_{i}"):

            def block(y: mtf.Tensor) -> mtf.Tensor:
                y += _attention(y, inner[:2], variables)
                return y + _feed_forward(y, inner[2], variables)

            x = mtf.recompute_grad(block, [x]) if recompute else block(x)
    with tf.variable_scope("softmax"):
        x = mtf.layers.layer_norm(x, model_dim)
        logits = _dense(x, [vocab_dim], [model_dim], variables, "logits")
        losses = mtf.layers.softmax_cross_entropy_with_logits(
            mtf.cast(logits, tf.float32), mtf.one_hot(ids, vocab_dim), vocab_dim
        )
        loss = mtf.reduce_mean(losses)
    return Program(graph, mesh, [loss], _updates(loss, optimizer))


def _dense(
    x: mtf.Tensor,
    new: Sequence[mtf.Dimension],
    reduced: Sequence[mtf.Dimension],
    dtype: mtf.VariableDType,
    name: str,
) -> mtf.Tensor:
    return mtf.layers.dense(
        x, list(new), reduced_dims=list(reduced), use_bias=False, variable_dtype=dtype, name=name
    )


def _attention(x: mtf.Tensor, inner: list[mtf.Dimension], dtype: mtf.VariableDType) -> mtf.Tensor:
    batch, length, d_model = x.shape.dims
    heads, d_kv = inner
    memory_length = mtf.Dimension("memory_length", length.size)
    with tf.variable_scope("attention"):
        x = mtf.layers.layer_norm(x, d_model)
        # The logits are of each position with each one, and no tensor may have a dimension twice.
        memory = mtf.rename_dimension(x, length.name, memory_length.name)
        # softmax_memory(q k / sqrt(d_kv)) v: `dot_product_attention` leaves the factor to its
        # callers.
        q = _dense(x, inner, [d_model], dtype, "q") * d_kv.size**-0.5
        k, v = (_dense(memory, inner, [d_model], dtype, name) for name in "kv")
        q = mtf.transpose(q, [batch, heads, length, d_kv])
        k, v = (mtf.transpose(t, [batch, heads, memory_length, d_kv]) for t in (k, v))
        earlier, later = (mtf.range(x.mesh, d, tf.int32) for d in (length, memory_length))
        late = mtf.less(earlier, later, output_shape=[length, memory_length])
        # Added to logits, it leaves no weight to positions that come later.
        mask = mtf.cast(late, x.dtype) * MASKED_LOGIT
        y = mtf.layers.dot_product_attention(q, k, v, mask, is_training=True)
        y = mtf.transpose(y, [batch, length, heads, d_kv])
        return _dense(y, [d_model], inner, dtype, "o")


def _feed_forward(x: mtf.Tensor, d_ff: mtf.Dimension, dtype: mtf.VariableDType) -> mtf.Tensor:
    d_model = x.shape.dims[-1]
    with tf.variable_scope("feed_forward"):
        x = mtf.layers.layer_norm(x, d_model)
        hidden = mtf.relu(_dense(x, [d_ff], [d_model], dtype, "wi"))
        return _dense(hidden, [d_model], [d_ff], dtype, "wo")


def _updates(loss: mtf.Tensor, optimizer: Optional[str]) -> list[mtf.Operation]:
    if optimizer is None:
        return []
    if optimizer not in OPTIMIZERS:
        raise ValueError(f"optimizer {optimizer!r} is none of {', '.join(OPTIMIZERS)}, nor None")
    variables = loss.graph.trainable_variables
    grads = mtf.gradients([loss], [v.value for v in variables])
    with tf.variable_scope("optimizer"):
        return OPTIMIZERS[optimizer]().apply_grads(grads, variables)
