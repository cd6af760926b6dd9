"""Transformers configured by gin files, as programs to choose layouts for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Optional

import gin
import tensorflow.compat.v1 as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.auto_mtf.models import Program
from mesh_tensorflow.transformer import utils

__all__ = ["gin_transformer"]


@gin.configurable(module="mesh_tensorflow.auto_mtf.gin_models")
def gin_transformer(
    model_type: Optional[str] = None,
    vocab_size: int = 32128,
    batch_size: int = 64,
    sequence_length: Optional[Mapping[str, int]] = None,
    optimizer: Optional[Callable[..., Any]] = None,
    train: bool = True,
) -> Program:
    """Builds the training step of a transformer that is configured by gin.

    Args:
      model_type: see `transformer.utils.build_model`; the gin binding of `utils.run` if None.
      vocab_size: the vocabulary size of inputs and targets.
      batch_size: the number of sequences.
      sequence_length: a dictionary of lengths; the gin binding of `utils.run` if None.
      optimizer: a function that creates the optimizer; if None, the gin binding of `utils.run`,
        or else Adafactor.
      train: whether to create gradients and updates.

    Returns:
      A Program whose output is the loss.
    """
    model_type = model_type or bound("utils.run.model_type", "bitransformer")
    lengths = dict(sequence_length or bound("utils.run.sequence_length", _LENGTHS))
    optimizer = optimizer or bound("utils.run.optimizer", mtf.optimize.AdafactorOptimizer)
    model = utils.build_model(
        model_type=model_type, input_vocab_size=vocab_size, output_vocab_size=vocab_size
    )
    tf.train.get_or_create_global_step()
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")
    batch = mtf.Dimension("batch", batch_size)

    def ids(name: str) -> mtf.Tensor:
        shape = [batch, mtf.Dimension("length", lengths[name])]
        return mtf.import_tf_tensor(mesh, tf.ones([d.size for d in shape], tf.int32), shape, name)

    targets = ids("targets")
    two = model_type.startswith("bi")
    # A language model predicts each target from those before it.
    inputs = ids("inputs") if two else mtf.shift(targets, 1, targets.shape[-1], wrap=False)
    _, loss = model.call_simple(
        inputs, targets, compute_loss=True, mode="train", variable_dtype=utils.get_variable_dtype()
    )
    updates: list[Any] = []
    if train:
        variables = graph.trainable_variables
        grads = mtf.gradients([loss], [v.value for v in variables])
        updates = optimizer(learning_rate=0.01).apply_grads(grads, variables)
    return Program(graph, mesh, [loss], updates)


_LENGTHS = {"inputs": 512, "targets": 512}


def bound(name: str, default: object) -> Any:
    """Returns the gin binding of a parameter, or a default.

    Args:
      name: the parameter, such as "utils.run.model_type".
      default: what is returned if there is no binding.
    """
    try:
        value = gin.query_parameter(name)
    except ValueError:
        return default
    # A reference to a configurable is replaced by the configurable itself.
    return value.scoped_configurable_fn if hasattr(value, "scoped_configurable_fn") else value
