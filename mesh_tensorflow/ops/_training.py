"""serialize_training_step: the gradients of a batch, summed in a loop over its microbatches.

`mtf.optimize.accumulate_gradients` is the newer form, with means.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops as mtf
from mesh_tensorflow._core.errors import dims_text
from mesh_tensorflow._core.graph import leaves_no_node
from mesh_tensorflow._core.shape import Dimension, Shape
from mesh_tensorflow._core.tensor import Tensor
from mesh_tensorflow.ops._elementwise.slicewise import slicewise
from mesh_tensorflow.ops._microbatches import InMicrobatches

__all__ = ["serialize_training_step"]


def take_microbatch(x: Tensor, index: Tensor, dim: Dimension) -> Tensor:
    """Returns the entry of `x` at a scalar index along its last dimension."""
    shape = x.shape - dim
    return slicewise(
        lambda t, i: tf.gather(t, i, axis=len(shape)),
        [x, index],
        output_shape=shape,
        output_dtype=x.dtype,
        splittable_dims=shape.dims,
        # Features have no gradient; a gather in reverse would need a scatter for each microbatch.
        grad_function=lambda op, dy: [None, None],
        name="microbatch_input",
    )


def split_microbatches(
    x: Tensor, batch_dim: Dimension, small_dim: Dimension, micro_dim: Dimension
) -> Tensor:
    """Returns `x` with its batch split into microbatches, whose number is the last dimension."""
    x = mtf.reshape(x, mtf.replace_dimensions(x.shape, batch_dim, [small_dim, micro_dim]))
    # The number of the microbatch comes second, so that examples of one are not neighbours in the
    # batch: where processors split the batch, each has a part of every microbatch, and nothing
    # moves.
    last = (x.shape - micro_dim) + micro_dim
    return x if x.shape == last else mtf.transpose(x, last)


@leaves_no_node
def serialize_training_step(
    features: Mapping[str, Tensor],
    model_fn: Callable[[dict[str, Tensor]], Mapping[str, Tensor]],
    batch_dim: Dimension,
    num_splits: int,
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Computes losses and gradients of a batch as a sequence of microbatches.

    Losses and gradients are summed over the microbatches, not averaged. Outputs that have the batch
    dimension are concatenated to the whole batch. Assignments in `model_fn` are done once, of the
    value of the whole batch: see mtf.optimize.accumulate_gradients.

    >>> x = mtf.ones(mesh, "batch:4,d:2")
    >>> def model_fn(features):
    ...     w = mtf.get_variable(mesh, "w", "d:2", initializer=tf.ones_initializer())
    ...     return {"loss": mtf.reduce_sum(features["x"] * w)}
    >>> grads, outputs = mtf.serialize_training_step({"x": x}, model_fn, x.shape.dims[0], 2)
    >>> print([g.shape for g in grads], outputs["loss"].shape)
    [Shape[d=2]] Shape[]

    Args:
      features: a dictionary of Tensors, each with `batch_dim`.
      model_fn: takes the features of one microbatch; returns a dictionary of Tensors that includes
        "loss", a scalar.
      batch_dim: a Dimension.
      num_splits: the number of microbatches.

    Returns:
      (gradients of the loss for `graph.trainable_variables`, a dictionary of outputs).

    Raises:
      ValueError: the batch size is not divisible by `num_splits`, a trainable variable has no
        gradient, or what is assigned is not known for the whole batch.
    """
    if batch_dim.size % num_splits:
        raise ValueError(
            f"serialize_training_step: {dims_text([batch_dim])} is not divisible by num_splits="
            f"{num_splits}; choose a divisor of {batch_dim.size}"
        )
    mesh = next(iter(features.values())).mesh
    graph = mesh.graph
    small_dim = Dimension(batch_dim.name, batch_dim.size // num_splits)
    micro_dim = Dimension("microbatch", num_splits)
    names: list[str] = []
    batched: list[bool] = []

    prepared = {
        key: split_microbatches(x, batch_dim, small_dim, micro_dim) for key, x in features.items()
    }

    def to_whole(y: Tensor, index: Tensor) -> Tensor:
        # Loops can only sum further results, so each microbatch adds its rows at its own place, and
        # zeros elsewhere.
        place = mtf.one_hot(index, micro_dim, dtype=y.dtype)
        at = y.shape.dims.index(small_dim) + 1
        shape = Shape(y.shape.dims[:at] + [micro_dim] + y.shape.dims[at:])
        return mtf.einsum([y, place], output_shape=shape)

    whole = InMicrobatches("serialize_training_step", graph, batch_dim, num_splits)

    def body(index: Tensor) -> list[Any]:
        whole.begin()
        given = {key: take_microbatch(x, index, micro_dim) for key, x in prepared.items()}
        outputs = model_fn(dict(given))
        whole.effects_are_built(list(given.values()))
        trainable = [v.value for v in graph.trainable_variables]
        grads = mtf.gradients([outputs["loss"]], trainable)
        missing = [v.name for v, g in zip(graph.trainable_variables, grads) if g is None]
        if missing:
            raise ValueError(
                f"serialize_training_step: no gradient reaches the trainable variables {missing}; "
                "make them with trainable=False, or use them in the loss"
            )
        names[:] = list(outputs)
        batched[:] = [small_dim in y.shape for y in outputs.values()]
        results = [to_whole(y, index) if b else y for y, b in zip(outputs.values(), batched)]
        return [index + 1, *results, *grads, *whole.results()]

    results = mtf.while_loop(
        lambda index: mtf.less(index, num_splits),
        body,
        [mtf.constant(mesh, 0, dtype=tf.int32)],
        has_accumulators=True,
    )
    loop, count = results[0].operation, len(results) - whole.num_results
    whole.finish(results[count:], loop)
    results = results[1:count]
    outputs = {}
    for name, is_batched, y in zip(names, batched, results):
        if is_batched:
            y = mtf.reshape(y, mtf.replace_dimensions(y.shape, [small_dim, micro_dim], batch_dim))
        outputs[name] = y
    return list(results[len(names) :]), outputs
