"""A model function as a program: its calls, its outputs, its metrics."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NoReturn, Optional, Union

import gin
import numpy as np
import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow._calls import names_taken, requires
from mesh_tensorflow._core.errors import dims_text, first_names
from mesh_tensorflow._lowering.lowering import check_rules_apply
from mesh_tensorflow._mesh.mesh_impl import MeshImpl
from mesh_tensorflow._mesh.random_values import keys_by_step
from mesh_tensorflow.optimize import (
    ExponentialMovingAverage,
    Optimizer,
    accumulate_gradients,
    clip_by_global_norm,
    global_norm,
)
from mesh_tensorflow.train._data import Features
from mesh_tensorflow.train.metrics import Metric
from mesh_tensorflow.utils import counted_steps, summaries_so_far, taken_summaries


@dataclasses.dataclass(frozen=True)
class Output:
    """A loss or a metric of a batch.

    Attributes:
      value: a scalar, the mean over the batch; or a Tensor with a value for each example.
      weight: a scalar; then `value` is a sum, and the mean is value / weight. Or None.
      after: a function of the mean over all batches, or None.
    """

    value: mtf.Tensor
    weight: Optional[mtf.Tensor] = None
    after: Optional[Callable[[float], float]] = None

    def mean(self) -> mtf.Tensor:
        """Returns the mean over the batch, a scalar Tensor."""
        if self.weight is not None:
            # mean = sum / weight; the weight may be a count, of an integer dtype.
            return mtf.divide(self.value, mtf.cast(self.weight, self.value.dtype))
        return self.value if not len(self.value.shape) else mtf.reduce_mean(self.value)

    @property
    def parts(self) -> list[mtf.Tensor]:
        """The Tensors to export."""
        return [self.value] if self.weight is None else [self.value, self.weight]


def call_model(
    model_fn: Callable, mesh: mtf.Mesh, arguments: tuple, names: Sequence[str], training: bool
) -> Any:
    """Calls a model function; `training` is passed if it has a parameter of that name.

    A dictionary of features is one argument; or they are arguments by their names, if the function
    takes as many.

    Args:
      model_fn: the function.
      mesh: its first argument.
      arguments: its further arguments.
      names: the names of the features that these are.
      training: whether weights are updated.

    Raises:
      ValueError: it takes other arguments.
    """
    signature = inspect.signature(model_fn)
    named = {"training": training} if "training" in names_taken(model_fn) else {}
    # As they are, and a dictionary's by their names.
    calls: list[tuple[tuple, dict[str, Any]]] = [(arguments, named)]
    if len(arguments) == 1 and isinstance(arguments[0], Mapping):
        calls.append(((), {**arguments[0], **named}))
    mistakes = []
    for positional, by_name in calls:
        # Asked before the call, since an error of this type may also come from within.
        try:
            signature.bind(mesh, *positional, **by_name)
        except TypeError as e:
            mistakes.append(e)
            continue
        return model_fn(mesh, *positional, **by_name)
    name = getattr(model_fn, "__name__", type(model_fn).__name__)
    form, either = ("a dictionary of ", ", or by their names") if len(calls) > 1 else ("", "")
    raise ValueError(
        f"fit: the model function is {name}{signature}, but it is called with the mesh and "
        f"{form}the features {', '.join(names)}: {mistakes[0]}. Give it these arguments, in this "
        f"order{either}"
    ) from None


def outputs_of(returned: Any, batch_dim: Optional[mtf.Dimension]) -> dict[str, Output]:
    """Returns the loss and the metrics that a model function has returned, by name.

    Args:
      returned: a Tensor, the loss; or a dictionary with "loss"; or a pair (loss, dictionary).
        Each is a scalar, a Tensor with the batch dimension, or a pair (sum, weight) of scalars.
      batch_dim: the Dimension of the batch, if it is known.

    Raises:
      ValueError: it is something else.
    """
    named = returned
    # A pair of Tensors is a loss (sum, weight); only with a dictionary is it (loss, metrics).
    if isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], Mapping):
        named = {"loss": returned[0], **returned[1]}
    elif not isinstance(returned, Mapping):
        named = {"loss": returned}
    if "loss" not in named:
        raise ValueError(
            f"fit: the model function returned a dictionary without 'loss': {list(named)}"
        )
    check_names(named)
    return {str(name): _output(str(name), value, batch_dim) for name, value in named.items()}


def check_names(named: Mapping[Any, Any]) -> None:
    """Raises ValueError for a metric with the name of the number of steps.

    Args:
      named: metrics by name.
    """
    if "step" in named:
        raise ValueError(
            "fit: a metric has the name 'step', which the records of a run have for the number of "
            "steps. Give it another name"
        )


def _output(name: str, value: Any, batch_dim: Optional[mtf.Dimension]) -> Output:
    if isinstance(value, Metric):
        return Output(value.total, value.weight, value.after)
    outputs = list(value) if isinstance(value, (tuple, list)) else [value]
    if not 1 <= len(outputs) <= 2 or not all(isinstance(part, mtf.Tensor) for part in outputs):
        raise ValueError(
            f"fit: the model function should return mtf Tensors, but {name} is {value!r}. A loss "
            "or metric is a scalar, a Tensor with the batch dimension, a pair (sum, weight), or "
            "one of mtf.train.metrics"
        )
    # A sum and its weight are of the whole batch, and have no dimensions.
    pair = ""
    if len(outputs) == 2:
        pair = ". A pair is (sum, weight), two scalars; metrics are in a dictionary, with 'loss'"
    allowed = [[]] if len(outputs) == 2 or batch_dim is None else [[], [batch_dim]]
    for part in outputs:
        if part.shape.dims not in allowed:
            also = "" if batch_dim is None else f", or one value for each {batch_dim.name}"
            raise ValueError(
                f"fit: {name} of the model function has the dimensions [{dims_text(part.shape)}], "
                f"but a loss or metric is a scalar{also}. Take mtf.reduce_mean of it"
                f"{pair}"
            )
    return Output(*outputs)


Afters = Mapping[str, Optional[Callable[[float], float]]]


class Means:
    """Means over batches of different sizes.

    A scalar counts with the rows of its batch, a sum with its weight, and values of examples one
    by one.
    """

    def __init__(self) -> None:
        self._sums: dict[str, tuple[float, float]] = {}

    def add(self, outputs: Mapping[str, Sequence[Any]], rows: int) -> None:
        """Adds the values of a batch.

        Args:
          outputs: for each name the exported parts of an Output.
          rows: the number of rows of the batch.
        """
        for name, values in outputs.items():
            # Added up apart: a mean of the batches' means would count small ones too much.
            if len(values) == 2:
                added = float(values[0]), float(values[1])
            elif np.ndim(values[0]):
                # In float64: a loss may be of a dtype with few digits, and examples are many.
                column = np.asarray(values[0], np.float64)
                added = float(column.sum()), float(column.size)
            else:
                # The mean of a batch, of which this makes a sum again.
                added = float(values[0]) * rows, float(rows)
            total, weight = self._sums.get(name, (0.0, 0.0))
            self._sums[name] = total + added[0], weight + added[1]

    def result(self, afters: Afters) -> dict[str, float]:
        """Returns the means, by name; NaN where all weights are zero, as of padding alone.

        Args:
          afters: the function of the mean of each name, or None.
        """
        means = {n: t / w if w else float("nan") for n, (t, w) in self._sums.items()}
        # A float again: JSON has none of NumPy's numbers.
        done = {n: float(after(means[n])) for n in means if (after := afters.get(n)) is not None}
        return {**means, **done}


@dataclasses.dataclass
class LoweredModel:
    """A program that has been lowered.

    Attributes:
      graph: the mtf Graph.
      lowering: the Lowering.
      afters: for each loss or metric, a function of its mean, or None.
      averages: the names of the averages of weights, by the names of the weights.
      own: the names of the model's variables, without slots of optimizers and averages.
    """

    graph: mtf.Graph
    lowering: mtf.Lowering
    afters: Afters
    averages: dict[str, str]
    own: list[str]


@dataclasses.dataclass(frozen=True)
class Model:
    """A model function and how it is trained.

    Attributes:
      fn: the model function.
      optimizer: an Optimizer, or a function that returns one.
      learning_rate: a number or a function of the step that the optimizer's function is given.
      clip_norm: the largest norm of all gradients together, or None.
      microbatches: the number of parts of a batch that are computed one after the other.
      average: moving averages of the weights, or their decay; or None.
      precision: the precision of activations and variables, or None.
      norms: whether to report the norms of gradients and of weights.
    """

    fn: Callable[..., Any]
    optimizer: Any
    learning_rate: Any = None
    clip_norm: Optional[float] = None
    microbatches: int = 1
    average: Union[float, ExponentialMovingAverage, None] = None
    precision: Union[str, mtf.Precision, None] = None
    norms: bool = False

    def build(
        self,
        features: Features,
        tensors: Sequence[tf.Tensor],
        make_impl: Callable[[], MeshImpl],
        step: Optional[tf.Variable],
        before: tf.Tensor,
        training: bool,
    ) -> tuple[LoweredModel, dict[str, Any]]:
        """Builds and lowers the program of a batch.

        Args:
          features: the features.
          tensors: a tf.Tensor for each of them.
          make_impl: returns the mesh implementation.
          step: the global step, which a training program increments; None if it is incremented
            elsewhere.
          before: its value before the step, read outside of the program.
          training: whether to update the weights.

        Returns:
          (the lowered program, what it gives: for each name "output/i" an exported tf.Tensor, and
          "step", the number of steps that are done after it, or an operation that does the step).
        """
        extra: dict[str, Any] = {}
        updates: list[mtf.Operation] = []
        averages: dict[str, str] = {}
        # Without a precision, that of a context around fit is in force.
        chosen = (
            contextlib.nullcontext() if self.precision is None else mtf.precision(self.precision)
        )
        # Rates and random keys follow the number of steps alone, so a resumed run has the same.
        with counted_steps(before), keys_by_step(before), chosen:
            graph = mtf.Graph()
            mesh = mtf.Mesh(graph, "mesh")
            # Programs of one tf graph share its collection of summaries; those of this one come
            # after it.
            start = summaries_so_far()
            arguments = features.imported(mesh, tensors)
            if training:
                outputs, grads = self._gradients(features, mesh, arguments)
                variables = graph.trainable_variables
                _check_gradients(grads, variables)
                # Before the updates make slots and averages, which are not the model's own.
                own = [part.name for v in graph.all_variables for part in v.parts]
                with mtf.precision("float32"):  # learning rates and slots are no activations
                    updates, extra = self._updates(grads, variables, before)
                    if self.average is not None:
                        average = _average_of(self.average)
                        averages = self.averages_of(graph)
                        # Of new weights: average = decay * average + (1 - decay) * weight.
                        updates = updates + average.apply(variables, after=updates)
            else:
                outputs = self._outputs(features, mesh, arguments, training)
                own = [part.name for v in graph.all_variables for part in v.parts]
            # Evaluations compute with the variables as they are.
            graph.assigns = "all" if training else "none"
            mesh_to_impl = {mesh: make_impl()}
            if training:  # which has all the dimensions that rules may be for
                check_rules_apply(graph, mesh_to_impl, _raise_slip)
            lowering = mtf.Lowering(graph, mesh_to_impl)
        gives: dict[str, Any] = {
            f"{name}/0": lowering.export_to_tf_tensor(x) if isinstance(x, mtf.Tensor) else x
            for name, x in extra.items()
        }
        for name, output in outputs.items():
            for i, part in enumerate(output.parts):
                gives[f"{name}/{i}"] = lowering.export_to_tf_tensor(part)
        used = {*outputs, *extra}
        for name, scalar in taken_summaries(start).items():
            if training:
                free = _free_name(name, used)
                used.add(free)  # another summary may have that name itself
                gives[f"{free}/0"] = scalar
        # The step counts as done only after all of it, so that a fetch of the number alone runs
        # everything.
        with tf.control_dependencies([*lowering.effects, *gives.values()]):
            if not training:
                after = tf.identity(before)
            else:
                after = tf.no_op() if step is None else tf.identity(step.assign_add(1))
        afters = {name: output.after for name, output in outputs.items()}
        return LoweredModel(graph, lowering, afters, averages, own), {**gives, "step": after}

    def averages_of(self, graph: mtf.Graph) -> dict[str, str]:
        """Returns the names of the averages of weights, by the names of the weights."""
        if self.average is None:
            return {}
        average = _average_of(self.average)
        return {v.name: average.average_name(v) for v in graph.trainable_variables}

    def _outputs(
        self, features: Features, mesh: mtf.Mesh, arguments: tuple, training: bool
    ) -> dict[str, Output]:
        batch_dim = None if features.shapes is None else features.batch_dim
        if features.shapes is not None and self.microbatches > 1 and training:
            # The model function is given a microbatch, and losses of its examples have this many.
            size = features.batch_dim.size // self.microbatches
            batch_dim = mtf.Dimension(features.batch_dim.name, size)
        return outputs_of(call_model(self.fn, mesh, arguments, features.names, training), batch_dim)

    def _gradients(
        self, features: Features, mesh: mtf.Mesh, arguments: tuple
    ) -> tuple[dict[str, Output], list[Optional[mtf.Tensor]]]:
        """Returns the outputs of the model, and the gradients of the loss for its variables."""
        graph = mesh.graph
        if self.microbatches > 1:
            if features.shapes is None:
                raise ValueError("fit: microbatches need dims, to know the dimension of the batch")

            def loss_fn(small: Sequence[mtf.Tensor]) -> Any:
                outputs = self._outputs(features, mesh, features.packed(small), True)
                loss = outputs["loss"]
                # A pair stays one: the mean of a batch is no mean of its microbatches' quotients.
                return loss.mean() if loss.weight is None else (loss.value, loss.weight)

            inputs = features.unpacked(arguments)
            step = accumulate_gradients(loss_fn, inputs, features.batch_dim, self.microbatches)
            _check_variables(graph)
            return {"loss": Output(step.loss)}, step.grads
        outputs = self._outputs(features, mesh, arguments, True)
        _check_variables(graph)
        weights = [v.value for v in graph.trainable_variables]
        # Of the mean in each form of a loss: those of a sum would grow with the batch.
        return outputs, mtf.gradients([outputs["loss"].mean()], weights)

    def _updates(
        self,
        grads: Sequence[Optional[mtf.Tensor]],
        variables: Sequence[mtf.Variable],
        step: tf.Tensor,
    ) -> tuple[list[mtf.Operation], dict[str, Any]]:
        """Returns the updates of the weights, and further scalars to report, by name."""
        optimizer, extra = self._make_optimizer(step)
        # One norm over all gradients: clipping changes a step's length, and not its direction.
        if self.clip_norm is not None or self.norms:
            # Infinity only measures. It is a part of the update, which ZeRO computes of parts of
            # the gradients: a norm beside it would need them whole.
            largest = math.inf if self.clip_norm is None else self.clip_norm
            grads, extra["gradient_norm"] = clip_by_global_norm(grads, largest)
        if self.norms:
            extra["weight_norm"] = global_norm([v.value for v in variables])
        return optimizer.apply_grads(grads, variables), extra

    def _make_optimizer(self, step: tf.Tensor) -> tuple[Optimizer, dict[str, Any]]:
        """Returns the optimizer, and the learning rate to report if it changes."""
        if _is_optimizer(self.optimizer):
            if self.learning_rate is not None:
                raise ValueError(
                    "fit: learning_rate is given besides an optimizer that has one. Give it to "
                    f"{type(self.optimizer).__name__}, a number or a schedule; or give fit the "
                    "class of the optimizer"
                )
            _check_has_no_tensors(self.optimizer)
            return self.optimizer, {}
        named: dict[str, Any] = {}
        extra: dict[str, Any] = {}
        if self.learning_rate is not None:
            rate = self.learning_rate
            if callable(rate):
                # Called once, so that the value that is reported is the one that the optimizer has.
                rate = tf.cast(rate(step), tf.float32)
                extra["learning_rate"] = rate
            named["learning_rate"] = rate
        optimizer = self.optimizer(**named)
        if not _is_optimizer(optimizer):
            raise TypeError(
                f"fit: optimizer should return an mtf.optimize.Optimizer, "
                f"but returned {optimizer!r}"
            )
        return optimizer, extra


def _free_name(name: str, taken: Collection[str]) -> str:
    """Returns the name of a summary in records, with a number if a metric has it."""
    number = 0
    while (free := f"{name}_{number}" if number else name) in {*taken, "step", "learning_rate"}:
        number += 1
    return free


def _average_of(
    average: Union[float, ExponentialMovingAverage],
) -> ExponentialMovingAverage:
    is_number = isinstance(average, (int, float))
    return ExponentialMovingAverage(average) if is_number else average  # type: ignore[return-value]


def _check_variables(graph: mtf.Graph) -> None:
    """Raises ValueError for a model that has nothing to train."""
    if not graph.trainable_variables:
        raise ValueError(
            "fit: the model has no trainable variables: make them with mtf.get_variable or "
            "layers, on the mesh that the model function is given"
        )


def _check_gradients(
    grads: Sequence[Optional[mtf.Tensor]], variables: Sequence[mtf.Variable]
) -> None:
    """Raises ValueError for a loss whose gradient reaches no variable: no step would change one."""
    if all(g is None for g in grads):
        raise ValueError(
            "fit: no gradient of the loss reaches a trainable variable, of which the model has "
            f"{first_names([v.name for v in variables], 4)}. Compute the loss from them in "
            "floating numbers; mtf.stop_gradient, and casts to integers and booleans, let no "
            "gradient through"
        )


def _raise_slip(message: str, key: str) -> NoReturn:
    """Raises what programs of sessions are only warned of, that share a layout with others."""
    raise ValueError(f"fit: {message}")


def _is_optimizer(value: Any) -> bool:
    """Returns whether an object is an Optimizer, or has what fit calls of one."""
    return not isinstance(value, type) and callable(getattr(value, "apply_grads", None))


def check_optimizer(optimizer: Any, learning_rate: Any) -> None:
    """Raises TypeError for what is neither an optimizer nor makes one."""
    if optimizer is None or _is_optimizer(optimizer):
        return
    example = "mtf.optimize.AdamWOptimizer(0.001)"
    if not callable(optimizer):
        keras = type(optimizer).__module__.startswith("keras")
        example = "mtf.optimize.from_keras(...) of it" if keras else example
        raise TypeError(
            "fit: optimizer should be an mtf.optimize.Optimizer, or a function that returns one, "
            f"but is {optimizer!r}. Give for instance {example}"
        )
    if not isinstance(optimizer, type) or learning_rate is not None:
        return
    # Told now: the class is called within the program, once all of the model has been built.
    if requires(optimizer, "learning_rate") and not _is_bound(optimizer):
        raise TypeError(
            f"fit: {optimizer.__name__} is a class that needs a learning rate. Give an optimizer, "
            f"such as {_as_written(optimizer)}(0.001), or give fit a learning_rate too"
        )


def _as_written(optimizer: type) -> str:
    """Returns the name of a class of optimizers, with the module if it is this package's."""
    own = optimizer.__module__.startswith(Optimizer.__module__.rpartition(".")[0])
    return f"mtf.optimize.{optimizer.__name__}" if own else optimizer.__name__


def _is_bound(optimizer: type) -> bool:
    """Returns whether gin has a learning rate for a class of optimizers."""
    try:
        return gin.query_parameter(f"{optimizer.__name__}.learning_rate") is not None
    except ValueError:
        return False


def _check_has_no_tensors(optimizer: Optimizer) -> None:
    """Raises ValueError for an optimizer with tensors of another graph or of eager code."""
    names = [name for name, value in vars(optimizer).items() if tf.is_tensor(value)]
    if names:
        name = type(optimizer).__name__
        shown = _as_written(type(optimizer))
        raise ValueError(
            f"fit: the optimizer {name} was made outside of the program, with a tf.Tensor in it "
            f"({', '.join(names)}), which would not change from step to step. Give fit a function "
            f"that makes it, such as optimizer={shown}, or lambda: {shown}(...)"
        )
