"""Language models of bytes, which learn the source of modules of Python's library."""

import importlib
import inspect
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.transformer import transformer, transformer_layers

TEXTS = ("html.entities", "encodings.cp437")
VOCAB, LENGTH, PROMPT, BATCH = 130, 128, 32, 16


def text_ids() -> np.ndarray:
    """The bytes of the texts, as ids from 2 on."""
    text = "".join(inspect.getsource(importlib.import_module(name)) for name in TEXTS)
    ids = np.frombuffer(text.encode("ascii", "replace"), np.uint8)
    return ids.astype(np.int32) + 2


def make_model(d_model: int, num_layers: int) -> transformer.Unitransformer:
    """A language model of bytes."""
    attention = {"num_heads": d_model // 64, "key_value_size": 64}
    layers = [
        [transformer_layers.SelfAttention, {**attention, "relative_attention_type": "bias_shared"}],
        [transformer_layers.DenseReluDense, {"hidden_size": 4 * d_model}],
    ]

    def stack(made: list) -> transformer.LayerStack:
        return transformer.LayerStack(made, dropout_rate=0.0, norm_epsilon=1e-6)

    return transformer.Unitransformer(
        transformer.make_layer_stack(layers, stack, num_layers),
        d_model=d_model,
        input_vocab_size=VOCAB,
        output_vocab_size=VOCAB,
        autoregressive=True,
        max_length=LENGTH,
        positional_embedding=False,
        shared_embedding_and_softmax_weights=True,
    )


def one_processor() -> mtf.placement_mesh_impl.PlacementMeshImpl:
    """A mesh of one processor."""
    return mtf.placement_mesh_impl.PlacementMeshImpl("", "", ["cpu:0"])


class Trainer:
    """A training step of a model, whose variables are in a scope."""

    def __init__(self, session: tf.Session, model: Any, scope: str, precision: str, steps: int):
        """Builds the step and initializes the variables."""
        self._session = session
        self._feed = tf.placeholder(tf.int32, [BATCH, LENGTH])
        graph = mtf.Graph()
        mesh = mtf.Mesh(graph, "mesh")
        ids = mtf.import_tf_tensor(mesh, self._feed, f"batch:{BATCH},length:{LENGTH}")
        step = tf.get_variable(f"{scope or 'model'}_step", initializer=np.int64(0), trainable=False)
        rate = mtf.schedules.cosine(1e-3, total_steps=steps, warmup_steps=steps // 10)(step)
        with mtf.precision(precision), tf.variable_scope(scope, reuse=tf.AUTO_REUSE):
            inputs = transformer.autoregressive_inputs(ids)
            loss = model.call_simple(inputs, ids, compute_loss=True)[1]
            weights = graph.trainable_variables
            gradients = mtf.gradients([loss], [v.outputs[0] for v in weights])
            gradients, _ = mtf.optimize.clip_by_global_norm(gradients, 1.0)
            updates = mtf.optimize.AdamWOptimizer(rate).apply_grads(gradients, weights)
        lowering = mtf.Lowering(graph, {mesh: one_processor()})
        self._loss = lowering.export_to_tf_tensor(mtf.to_float(loss))
        self._train = tf.group(
            [step.assign_add(1), *(lowering.lowered_operation(op) for op in updates)]
        )
        session.run(tf.variables_initializer([step, *tf.global_variables(scope)]))
        self._source, self._rng = text_ids(), np.random.default_rng(0)

    def step(self) -> tuple[float, float]:
        """Trains one step; returns the loss and the seconds."""
        begins = self._rng.integers(0, len(self._source) - LENGTH, BATCH)
        batch = np.stack([self._source[i : i + LENGTH] for i in begins])
        start = time.perf_counter()
        loss, _ = self._session.run([self._loss, self._train], {self._feed: batch})
        return float(loss), time.perf_counter() - start


def decoder(
    session: tf.Session, model: Any, draft: Any, batch: int, num_draft_ids: int
) -> Callable[[], np.ndarray]:
    """Returns a function that continues prompts, without a draft if `num_draft_ids` is 0."""
    source = text_ids()
    prompts = np.zeros((batch, LENGTH), np.int32)
    for row, begin in enumerate(np.linspace(0, len(source) - LENGTH, batch + 1)[1:]):
        prompts[row, :PROMPT] = source[int(begin) :][:PROMPT]
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    partial = mtf.import_tf_tensor(mesh, tf.constant(prompts), f"batch:{batch},length:{LENGTH}")
    options = {"draft_model": draft, "num_draft_ids": num_draft_ids} if num_draft_ids else {}
    with tf.variable_scope("", reuse=True):
        ids = model.sample_autoregressive(partial, never_end=True, **options)
    lowering = mtf.Lowering(mesh.graph, {mesh: one_processor()})
    return session.make_callable(lowering.export_to_tf_tensor(ids))


def agreement(session: tf.Session, draft: Any, ids: np.ndarray) -> float:
    """Returns the share of decoded ids that the draft would choose after the same ones."""
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    whole = mtf.import_tf_tensor(mesh, tf.constant(ids), f"batch:{len(ids)},length:{LENGTH}")
    with tf.variable_scope("draft", reuse=True):
        inputs = transformer.autoregressive_inputs(whole)
        logits, _ = draft.call_simple(inputs, whole, compute_loss=False, mode="eval")
    best = mtf.argmax(logits, logits.shape.dims[-1])
    lowering = mtf.Lowering(mesh.graph, {mesh: one_processor()})
    found = session.run(lowering.export_to_tf_tensor(best))
    return float((found == ids)[:, PROMPT:].mean())
