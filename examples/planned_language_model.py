"""A language model that is built as a Choice says: in a pipeline, with ring attention, ...

`mtf.auto_mtf.plan` searches over what it builds; see docs/auto_mtf.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Optional

import tensorflow.compat.v1 as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.auto_mtf.models import OPTIMIZERS, Program
from mesh_tensorflow.auto_mtf.plans import Choice

__all__ = ["planned_language_model"]

_RESIDUAL, _MEMORY = "residual_length", "memory_length"
_WHOLE, _SPLIT_HEADS = "attention_length", "attention_heads"


def planned_language_model(
    choice: Choice,
    batch: int = 8,
    length: int = 64,
    vocab: int = 1024,
    d_model: int = 256,
    layers: int = 2,
    heads: int = 4,
    d_kv: int = 64,
    d_ff: int = 1024,
    dtype: str = "float32",
    optimizer: str = "adafactor",
) -> Program:
    """Builds the training step of a decoder-only transformer in the way of a Choice.

    Vaswani et al., "Attention is all you need" (2017), with a norm before each layer and attention
    by blocks. Its dimensions are batch, length, memory_length, vocab, d_model, heads, d_kv and
    d_ff; with the Choice, also stages (and repeats), residual_length, or attention_length and
    attention_heads.

    Args:
      choice: a Choice.
      batch: the number of sequences.
      length: the number of tokens per sequence.
      vocab: the vocabulary size.
      d_model: the size of the residual stream.
      layers: the number of blocks of attention and two dense layers.
      heads: the number of attention heads.
      d_kv: the size of keys and values of a head.
      d_ff: the size of the hidden dense layer.
      dtype: the name of the dtype of activations; variables are float32.
      optimizer: a name in `models.OPTIMIZERS`.

    Returns:
      A Program whose output is the loss.

    Raises:
      ValueError: stages do not divide the layers, microbatches do not divide the batch, the
        optimizer is unknown, or the Choice is not one.
    """
    choice.check()
    if layers % (choice.stages * choice.repeats):
        raise ValueError(
            f"{layers} layers cannot be {choice.stages} stages, {choice.repeats} times: the number "
            f"of layers is no multiple of {choice.stages * choice.repeats}"
        )
    if optimizer not in OPTIMIZERS:
        raise ValueError(f"optimizer {optimizer!r} is none of {', '.join(OPTIMIZERS)}")
    tf.train.get_or_create_global_step()
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")
    model = _Model(mesh, choice, d_model, heads, d_kv, d_ff, dtype)
    dims = mtf.convert_to_shape(f"batch:{batch},length:{length}").dims
    ids = mtf.import_tf_tensor(mesh, tf.zeros([batch, length], tf.int32), dims, name="tokens")
    loss = model.loss(ids, mtf.Dimension("vocab", vocab), layers)
    variables = graph.trainable_variables
    grads = mtf.gradients([loss], [v.value for v in variables])
    with tf.variable_scope("optimizer"):
        updates = OPTIMIZERS[optimizer]().apply_grads(grads, variables)
    return Program(graph, mesh, [loss], updates)


def _renamed(x: mtf.Tensor, names: dict[str, str]) -> mtf.Tensor:
    """Returns a Tensor with other names of dimensions, which other rules apply to."""
    dims = [mtf.Dimension(names.get(d.name, d.name), d.size) for d in x.shape]
    return mtf.reshape(x, mtf.Shape(dims))


class _Model:
    """The layers, which are applied to all stages at once where there are stages."""

    def __init__(
        self, mesh: mtf.Mesh, choice: Choice, d_model: int, heads: int, d_kv: int, d_ff: int,
        dtype: str,
    ):  # fmt: skip
        self._mesh, self._choice = mesh, choice
        self._d_model = mtf.Dimension("d_model", d_model)
        self._heads = [mtf.Dimension("heads", heads), mtf.Dimension("d_kv", d_kv)]
        self._d_ff = mtf.Dimension("d_ff", d_ff)
        self._dtype = mtf.VariableDType(tf.float32, tf.float32, tf.as_dtype(dtype))
        self._stages: list[mtf.Dimension] = []
        if choice.stages > 1:
            self._stages = [mtf.Dimension("stages", choice.stages)]
        self._repeats: list[mtf.Dimension] = []
        if choice.repeats > 1:
            self._repeats = [mtf.Dimension("repeats", choice.repeats)]

    def _variable(self, name: str, dims: Sequence[mtf.Dimension]) -> mtf.Tensor:
        return mtf.get_variable(self._mesh, name, mtf.Shape(list(dims)), dtype=self._dtype)

    def _weights(self) -> list[mtf.Tensor]:
        """Returns the weights of a block: norm, queries, keys, values, outputs; norm, two dense."""
        front, d = [*self._repeats, *self._stages], self._d_model
        shapes: dict[str, list[mtf.Dimension]] = {
            "norm_1": [d],
            **{name: [d, *self._heads] for name in "qkv"},
            "o": [*self._heads, d],
            "norm_2": [d],
            "wi": [d, self._d_ff],
            "wo": [self._d_ff, d],
        }
        return [self._variable(name, [*front, *dims]) for name, dims in shapes.items()]

    def loss(self, ids: mtf.Tensor, vocab: mtf.Dimension, layers: int) -> mtf.Tensor:
        """Returns the mean loss of predicting each token."""
        choice, d = self._choice, self._d_model
        with tf.variable_scope("embedding"):
            previous = mtf.shift(ids, 1, ids.shape[1], wrap=False)
            x = mtf.gather(self._variable("tokens", [vocab, d]), previous, vocab)
        if choice.sequence_parallel:
            x = _renamed(x, {"length": _RESIDUAL})
        together = layers // (choice.stages * choice.repeats)
        weights = []
        for i in range(together):
            with tf.variable_scope(f"layer_{i}"):
                weights.append(self._weights())
        if choice.stages > 1:
            x = self._pipeline(x, weights)
        else:
            for i, some in enumerate(weights):
                with tf.variable_scope(f"layer_{i}"):
                    x = self._recomputed(x, some)
        with tf.variable_scope("softmax"):
            x = self._norm(x, self._variable("norm", [d]))
            if choice.sequence_parallel:
                x = _renamed(x, {_RESIDUAL: "length"})
            logits = mtf.einsum([x, self._variable("logits", [d, vocab])], reduced_dims=[d])
            losses = mtf.layers.softmax_cross_entropy_with_logits(
                mtf.cast(logits, tf.float32), ids, vocab
            )
            return mtf.reduce_mean(losses)

    def _recomputed(self, x: mtf.Tensor, weights: list[mtf.Tensor]) -> mtf.Tensor:
        if self._choice.recompute:
            return mtf.recompute_grad(self._block, [x, *weights])
        return self._block(x, *weights)

    def _pipeline(self, x: mtf.Tensor, weights: list[list[mtf.Tensor]]) -> mtf.Tensor:
        each = len(weights[0])

        def stage(y: mtf.Tensor, *flat: mtf.Tensor) -> mtf.Tensor:
            for i in range(0, len(flat), each):
                with tf.variable_scope(f"layer_{i // each}"):
                    y = self._block(y, *flat[i : i + each])
            return y

        kwargs: dict[str, Any] = {"recompute": self._choice.recompute}
        repeats: Optional[mtf.Dimension] = self._repeats[0] if self._repeats else None
        return mtf.layers.pipeline(
            stage, x, [w for some in weights for w in some], self._stages[0], x.shape[0],
            self._choice.microbatches, repeats, **kwargs,
        )  # fmt: skip

    def _norm(self, x: mtf.Tensor, scale: mtf.Tensor) -> mtf.Tensor:
        # RMS norm: x / sqrt(mean_d_model(x^2) + epsilon) * scale.
        squares = mtf.reduce_mean(mtf.square(x), reduced_dim=self._d_model)
        return mtf.multiply(x * mtf.rsqrt(squares + 1e-6), scale, output_shape=x.shape)

    def _block(self, x: mtf.Tensor, *weights: mtf.Tensor) -> mtf.Tensor:
        norm_1, q, k, v, o, norm_2, wi, wo = weights
        y = self._entered(self._norm(x, norm_1))
        with tf.variable_scope("attention"):
            x += self._left(self._attention(y, q, k, v, o))
        y = self._entered(self._norm(x, norm_2))
        with tf.variable_scope("feed_forward"):
            return x + self._left(self._dense(mtf.relu(self._dense(y, wi)), wo))

    def _entered(self, x: mtf.Tensor) -> mtf.Tensor:
        return _renamed(x, {_RESIDUAL: "length"}) if self._choice.sequence_parallel else x

    def _left(self, x: mtf.Tensor) -> mtf.Tensor:
        # In a layout that splits `residual_length`, this reshape of a partial sum is a
        # reduce-scatter, and that in `_entered` an allgather: together they send as much as an
        # allreduce.
        return _renamed(x, {"length": _RESIDUAL}) if self._choice.sequence_parallel else x

    def _dense(self, x: mtf.Tensor, w: mtf.Tensor) -> mtf.Tensor:
        """Multiplies with a weight, whose stages are those of the activations."""
        new = [d for d in w.shape if d not in x.shape]
        kept = [d for d in x.shape if d in self._stages or d not in w.shape]
        return mtf.einsum([x, w], output_shape=mtf.Shape([*kept, *new]))

    def _attention(
        self, x: mtf.Tensor, wq: mtf.Tensor, wk: mtf.Tensor, wv: mtf.Tensor, wo: mtf.Tensor
    ) -> mtf.Tensor:
        d_kv = self._heads[1]
        q, k, v = (self._dense(x, w) for w in (wq, wk, wv))
        q *= d_kv.size**-0.5
        here, all_to_all = "length", self._choice.attention == "all_to_all"
        if all_to_all:
            here = _WHOLE
            # In a layout that splits `length` and `attention_heads` over one mesh dimension, each
            # of these is an all-to-all, after which a processor has all positions of some heads.
            q = _renamed(q, {"length": _WHOLE, "heads": _SPLIT_HEADS})
            k, v = (_renamed(t, {"length": _MEMORY, "heads": _SPLIT_HEADS}) for t in (k, v))
        else:
            k, v = (_renamed(t, {"length": _MEMORY}) for t in (k, v))
        length = q.shape.get_dim_by_name(here)
        memory = mtf.Dimension(_MEMORY, length.size)
        rows, columns = (mtf.range(x.mesh, d, tf.int32) for d in (length, memory))
        y = mtf.layers.blocked_attention(
            q, k, v, memory, d_kv, d_kv, visible=[("greater_equal", rows, columns)],
            ring=self._choice.attention == "ring",
        )  # fmt: skip
        if all_to_all:
            y = _renamed(y, {_WHOLE: "length", _SPLIT_HEADS: "heads"})
        return self._dense(y, wo)
