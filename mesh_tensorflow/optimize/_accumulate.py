"""Around an optimizer: gradients accumulated and clipped before it, weights averaged after it.

In microbatches, activations take the memory of one microbatch. Results are those of the batch.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Optional, Union

import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow._core.errors import WrongTypeError, dims_text
from mesh_tensorflow._core.graph import leaves_no_node
from mesh_tensorflow._mesh.variables.store import whole_form
from mesh_tensorflow.ops._microbatches import (
    InMicrobatches,
    one_at_a_time,
    split_microbatches,
    take_microbatch,
)
from mesh_tensorflow.optimize._base import Rate, rate_now, scalar_like, stored_value

# -- gradients before an update


@leaves_no_node
def global_norm(tensors: Sequence[Optional[mtf.Tensor]]) -> mtf.Tensor:
    """Returns the Euclidean norm of all elements of several Tensors together.

    The sums of squares run over all slices, so it is the same in every layout.

    >>> x = mtf.constant(mesh, 2.0, [mtf.Dimension("d", 3)])
    >>> norm = mtf.optimize.global_norm([x, None, mtf.constant(mesh, 2.0)])
    >>> print(norm.shape.to_integer_list, norm.dtype.name)
    [] float32

    Args:
      tensors: Tensors of any shapes, or None, which does not count.

    Returns:
      A float32 scalar Tensor.

    Raises:
      ValueError: there is no Tensor.
    """
    if isinstance(tensors, mtf.Tensor) or not isinstance(tensors, Sequence):
        raise WrongTypeError(f"global_norm: give a list of mtf.Tensors, not {tensors!r}")
    for x in tensors:
        if x is not None and not isinstance(x, mtf.Tensor):
            raise WrongTypeError(f"global_norm: {x!r} is neither an mtf.Tensor nor None")
    # The norm of a complex number is that of the vector of its two parts.
    lengths = [mtf.abs(x) if x.dtype.is_complex else x for x in tensors if x is not None]
    if not lengths:
        raise ValueError(
            f"global_norm: none of the {len(tensors)} gradients is a Tensor; does the loss depend "
            "on the variables?"
        )
    # In float32, since squares in bfloat16 or float16 lose digits and may overflow. The sums are
    # partial and are added before they are communicated.
    squares = [mtf.reduce_sum(mtf.square(mtf.to_float(x))) for x in lengths]
    return mtf.sqrt(mtf.add_n(squares))


@leaves_no_node
def clip_by_global_norm(
    grads: Sequence[Optional[mtf.Tensor]], max_norm: Rate
) -> tuple[list[Optional[mtf.Tensor]], mtf.Tensor]:
    """Scales gradients down together, if their global norm is more than `max_norm`.

    Pascanu et al., "On the difficulty of training recurrent neural networks" (2013). As with
    tf.clip_by_global_norm, gradients of norm 0 stay, and if the norm is infinite or NaN, all become
    NaN, which shows that something is wrong.

    >>> w = mtf.get_variable(mesh, "w", [mtf.Dimension("d", 4)])
    >>> grads = mtf.gradients([mtf.reduce_sum(mtf.square(w))], [w])
    >>> grads, norm = mtf.optimize.clip_by_global_norm(grads, max_norm=1.0)
    >>> updates = mtf.optimize.SgdOptimizer(0.1).apply_grads(grads, graph.trainable_variables)

    Args:
      grads: Tensors, or None, which stays None: the result of `mtf.gradients`.
      max_norm: a number above 0, a tf scalar or an mtf scalar Tensor; infinity only measures.

    Returns:
      (a list with each gradient, of its shape and dtype; the norm before clipping, a float32
      scalar Tensor).

    Raises:
      ValueError: there is no gradient, or `max_norm` is not above 0.
    """
    if isinstance(max_norm, (int, float)) and not max_norm > 0:
        raise ValueError(f"clip_by_global_norm: max_norm must be above 0, not {max_norm!r}")
    norm = global_norm(grads)
    bound = scalar_like(max_norm, norm)
    if not isinstance(bound, mtf.Tensor):
        bound = mtf.constant(norm.mesh, float(bound), mtf.Shape([]), tf.float32)
    factor = mtf.cwise(_factor, [norm, bound], name="clip_factor")
    return [None if g is None else _scaled(g, factor) for g in grads], norm


def _scaled(g: mtf.Tensor, factor: mtf.Tensor) -> mtf.Tensor:
    """Returns a gradient times a float32 factor, in the dtype that it has."""
    if g.dtype.is_complex:
        return g * mtf.cast(factor, g.dtype)
    # Rounded once: a factor in bfloat16 would itself be off by up to 0.4 %, for all gradients.
    return mtf.cast(mtf.to_float(g) * factor, g.dtype)


def _factor(norm: tf.Tensor, bound: tf.Tensor) -> tf.Tensor:
    """Returns bound / norm, at most 1; NaN if the norm is infinite or NaN."""
    # The difference is 0 for a finite norm, and NaN otherwise. An infinite bound clips nothing.
    return tf.where(norm <= bound, tf.ones_like(norm), bound / norm) + (norm - norm)


# A Tensor, or several in a list, tuple or dictionary.
Inputs = Union[mtf.Tensor, Sequence[mtf.Tensor], Mapping[str, mtf.Tensor]]
# The mean loss, or (a sum of losses, their total weight).
Loss = Union[mtf.Tensor, tuple[mtf.Tensor, mtf.Tensor]]


class AccumulatedLoss(NamedTuple):
    """The loss of a batch and its gradients.

    >>> print(mtf.optimize.AccumulatedLoss._fields)
    ('loss', 'grads', 'variables')

    Attributes:
      loss: a float32 scalar Tensor.
      grads: for each variable a float32 Tensor of its shape, or None if the loss does not depend
        on it.
      variables: the Variables.
    """

    loss: mtf.Tensor
    grads: list[Optional[mtf.Tensor]]
    variables: list[mtf.Variable]


@leaves_no_node
def accumulate_gradients(
    loss_fn: Callable[[Any], Loss],
    inputs: Inputs,
    batch_dim: mtf.Dimension,
    num_microbatches: int,
    variables: Optional[Sequence[mtf.Variable]] = None,
) -> AccumulatedLoss:
    """Computes a loss and its gradients in microbatches, with the memory of one.

    The batch is split into microbatches of equal size, which a loop within one step goes through,
    one after the other. Results are those of the whole batch. Gradients are summed in float32, and
    over processors once, after the loop; from ZeRO's stage 2 on in each microbatch, so that only
    parts are summed.

    A scalar loss may be a mean or a sum over the batch, or a function of such, as is the quotient
    of a weighted sum of losses and the sum of the weights: it is then computed of the totals. One
    that is none of these is an error, as is one that is a function of a mean with several elements,
    whose gradient would take a second loop. `loss_fn` may also return (the weighted sum of losses,
    the sum of weights): the result is the quotient of their totals, with the gradients of it for
    fixed weights.

    Assignments in `loss_fn` are done once, after the loop, of the value of the whole batch in the
    same sense. What layers compute across examples is of a microbatch: batch normalization takes
    the means of one, and its moving averages get the means of these.

    >>> batch, d = mtf.Dimension("batch", 8), mtf.Dimension("d", 4)
    >>> x = mtf.import_tf_tensor(mesh, np.ones([8, 4], np.float32), [batch, d])
    >>> def loss_fn(x):
    ...     y = mtf.layers.dense(x, [mtf.Dimension("out", 2)], reduced_dims=[d])
    ...     return mtf.reduce_mean(mtf.square(y))
    >>> result = mtf.optimize.accumulate_gradients(loss_fn, x, batch, num_microbatches=4)
    >>> updates = mtf.optimize.SgdOptimizer(0.1).apply_grads(result.grads, result.variables)
    >>> print([g.shape.to_string for g in result.grads])
    ['Shape[d=4, out=2]', 'Shape[out=2]']

    Args:
      loss_fn: takes one microbatch of the inputs, a Tensor or a list or dictionary; `batch_dim` is
        smaller in it, with the same name. Returns the loss of the microbatch, a scalar Tensor; or
        (sum, weight), two scalar Tensors.
      inputs: a Tensor, or several in a list, tuple or dictionary. Those without `batch_dim` go
        whole to every microbatch.
      batch_dim: a Dimension.
      num_microbatches: a divisor of its size. Each microbatch has to be divisible by the number of
        parts that the layout splits `batch_dim` into.
      variables: the Variables of the gradients; the trainable ones of the graph if None.

    Raises:
      ValueError: the batch is not divisible by `num_microbatches`, no input has `batch_dim`, the
        loss is not a scalar, or it or what is assigned is not known for the whole batch.
    """
    names, values = _named(inputs)
    _check(values, batch_dim, num_microbatches)
    step = _Microbatch(names, isinstance(inputs, mtf.Tensor), loss_fn, variables)
    if num_microbatches == 1:
        return step.alone(values)
    return _in_loop(step, values, batch_dim, num_microbatches)


def _wide(x: mtf.Tensor) -> mtf.Tensor:
    return x if x.dtype.is_complex else mtf.to_float(x)


@dataclasses.dataclass
class _Microbatch:
    """Computes the loss and the gradients of one microbatch.

    Attributes:
      names: the keys of the inputs, if they are a dictionary.
      single: whether there is one input, and no list.
      loss_fn: a function of inputs.
      chosen: the Variables of the gradients; all that are trainable if None.
      variables: the same, once `loss` has been called.
    """

    names: Optional[list[str]]
    single: bool
    loss_fn: Callable[[Any], Loss]
    chosen: Optional[Sequence[mtf.Variable]]
    variables: list[mtf.Variable] = dataclasses.field(default_factory=list)

    def loss(self, values: list[mtf.Tensor]) -> tuple[mtf.Tensor, Optional[mtf.Tensor]]:
        """Returns the loss, and its weight or None."""
        inputs: Any = values[0] if self.single else values
        if self.names is not None:
            inputs = dict(zip(self.names, values))
        loss, weight = _checked(self.loss_fn(inputs))
        # Asked after the call, as a model function may make its variables when it is called.
        self.variables = list(
            loss.graph.trainable_variables if self.chosen is None else self.chosen
        )
        return loss, weight

    def gradients(self, y: mtf.Tensor) -> list[Optional[mtf.Tensor]]:
        """Returns the gradients of a scalar, in float32; complex ones stay as they are."""
        grads = mtf.gradients([y], [v.value for v in self.variables])
        return [None if g is None else _wide(g) for g in grads]

    def alone(self, values: list[mtf.Tensor]) -> AccumulatedLoss:
        """Returns the loss of a batch that is the only microbatch."""
        loss, weight = self.loss(values)
        grads = self.gradients(loss)
        if weight is None:
            return AccumulatedLoss(_wide(loss), grads, self.variables)
        return self.quotient(_wide(loss), mtf.to_float(weight), grads)

    def quotient(
        self, loss: mtf.Tensor, weight: mtf.Tensor, grads: Sequence[Optional[mtf.Tensor]]
    ) -> AccumulatedLoss:
        """Returns the quotient of a sum of losses with these gradients, and their weight."""
        # With the loss S / W and fixed weights, dL/dv = dS/dv / W: nothing is differentiated by W.
        share = mtf.reciprocal(weight)
        return AccumulatedLoss(loss * share, [_times(share, g) for g in grads], self.variables)


def _checked(result: Loss) -> tuple[mtf.Tensor, Optional[mtf.Tensor]]:
    weighted = isinstance(result, (tuple, list))
    pair = list(result) if isinstance(result, (tuple, list)) else [result]
    scalars = [x for x in pair if isinstance(x, mtf.Tensor) and not x.shape.ndims]
    if len(scalars) != len(pair) or len(pair) > 2 or (weighted and len(pair) < 2):
        raise ValueError(
            "accumulate_gradients: loss_fn must return a scalar Tensor, or two: (sum of "
            f"losses, weight); it returned {result!r}. mtf.reduce_mean makes one of several"
        )
    return pair[0], pair[1] if weighted else None


def _times(factor: Union[float, mtf.Tensor], x: Optional[mtf.Tensor]) -> Optional[mtf.Tensor]:
    """Returns a product with a number or a float32 scalar; None for None."""
    if x is None:
        return None
    return x * (mtf.cast(factor, x.dtype) if isinstance(factor, mtf.Tensor) else factor)


def _in_loop(
    step: _Microbatch, values: list[mtf.Tensor], batch_dim: mtf.Dimension, number: int
) -> AccumulatedLoss:
    """Returns the loss of the batch, of a loop over its microbatches."""
    small = mtf.Dimension(batch_dim.name, batch_dim.size // number)
    micro = mtf.Dimension("microbatch", number)
    split = [batch_dim in x.shape for x in values]
    prepared = [
        split_microbatches(x, batch_dim, small, micro) if s else x for x, s in zip(values, split)
    ]
    whole = InMicrobatches("accumulate_gradients", values[0].graph, batch_dim, number)
    # The Tensors of the body, by which `whole` is asked for their values of the batch.
    built: list[tuple[mtf.Tensor, Optional[mtf.Tensor]]] = []
    # For each term of the loss, its gradients, and the places of those that are not None.
    terms: list[mtf.Tensor] = []
    reached: list[list[bool]] = []

    def body(index: mtf.Tensor) -> list[mtf.Tensor]:
        whole.begin()
        inputs = [take_microbatch(x, index, micro) if s else x for x, s in zip(prepared, split)]
        loss, weight = step.loss(inputs)
        whole.model_is_built([x for x, s in zip(inputs, split) if s])
        built.append((loss, weight))
        if weight is None:
            whole.want(loss, "the loss")
        # In place: what the body finds out is read after the loop, whose body may return Tensors
        # only.
        terms[:] = [loss] if weight is not None else whole.terms(loss)
        # Of each term by itself, as what a term weighs in the loss is known only after the loop.
        grads = [step.gradients(term) for term in terms]
        reached[:] = [[g is not None for g in each] for each in grads]
        # Many microbatches summed in bfloat16 would lose the later ones to rounding.
        loss_sums = [] if weight is None else [_wide(loss), mtf.to_float(weight)]
        summed = [g for each in grads for g in each if g is not None]
        # The index is the only loop variable: the loop sums all that comes after it.
        return [index + 1, *loss_sums, *summed, *whole.results()]

    results = mtf.while_loop(
        lambda index: mtf.less(index, number),
        body,
        [mtf.constant(values[0].mesh, 0, dtype=tf.int32)],
        has_accumulators=True,
        **one_at_a_time(number),
    )
    loss, weight = built[0]
    totals = iter(results[1:])
    pair = [] if weight is None else [next(totals), next(totals)]
    # The body returned no sums for gradients that are None, so these are put in again.
    grads = [[next(totals) if is_reached else None for is_reached in each] for each in reached]
    of_grads = {g: v for each in grads for g, v in zip(each, step.variables) if g is not None}
    whole.finish(list(totals), results[0].operation, of_grads)
    if weight is not None:
        return step.quotient(pair[0], pair[1], grads[0])
    value = whole.value(loss)
    if not whole.is_function(loss):
        share_of_loss = whole.share(loss)
        # dL/dv = share * sum_i dL_i/dv, over microbatches i; the share is 1 for a sum, 1 / number
        # for a mean.
        shared = [_times(share_of_loss, g) for g in grads[0]]
        return AccumulatedLoss(_wide(value), shared, step.variables)
    return AccumulatedLoss(
        _wide(value), _by_terms(whole, value, terms, grads, step.variables), step.variables
    )


def _by_terms(
    whole: InMicrobatches,
    loss: mtf.Tensor,
    terms: Sequence[mtf.Tensor],
    grads: Sequence[Sequence[Optional[mtf.Tensor]]],
    variables: Sequence[mtf.Variable],
) -> list[Optional[mtf.Tensor]]:
    """Returns the gradients of a function of sums over the batch, by the chain rule.

    Args:
      whole: what has the values of the whole batch.
      loss: the loss of the whole batch.
      terms: the sums, as the model function made them.
      grads: the gradients of each of them for the variables, summed over the microbatches.
      variables: the Variables.

    Raises:
      ValueError: a term that variables have a gradient through has several elements.
    """
    totals = [whole.value(term) for term in terms]
    weights = [v.value for v in variables]
    # Outside of the loop alone: what is inside has been differentiated there, term by term.
    outer = mtf.gradients([loss], [*totals, *weights], operations=whole.outside)
    direct = [None if g is None else _wide(g) for g in outer[len(terms) :]]
    for term, d, each in zip(terms, outer, grads):
        # Within the loop all elements of a term weigh the same: what each weighs in the loss is
        # known only after it.
        if term.shape.ndims and d is not None and any(g is not None for g in each):
            raise ValueError(
                "accumulate_gradients: the gradients of the loss are not known for the whole batch "
                f"from {whole.number} microbatches: it is a function of {term.name} {term.shape}, "
                "a mean or sum over the batch, whose elements weigh differently in it. Reduce what "
                "it is made of to scalars first; or make it of each example; or do without "
                "microbatches"
            )
    of_loss = []
    for i in range(len(variables)):
        # dL/dv = sum_T dL/dT * share_T * sum_i dT_i/dv, over terms T and microbatches i, and then
        # what the loss takes of v directly.
        summands = [
            _times(whole.share(term), _times(_wide(d), each[i]))
            for term, d, each in zip(terms, outer, grads)
            if d is not None
        ]
        summed = [x for x in (*summands, direct[i]) if x is not None]
        of_loss.append(mtf.add_n(summed) if summed else None)
    return of_loss


def _named(inputs: Inputs) -> tuple[Optional[list[str]], list[mtf.Tensor]]:
    """Returns (the keys of a dictionary or None, the Tensors)."""
    names = list(inputs) if isinstance(inputs, Mapping) else None
    values = list(inputs.values()) if isinstance(inputs, Mapping) else inputs
    values = [values] if isinstance(values, mtf.Tensor) else values
    if not isinstance(values, (list, tuple)) or not all(isinstance(x, mtf.Tensor) for x in values):
        raise WrongTypeError(
            "accumulate_gradients: inputs must be an mtf.Tensor, or a list or dictionary of them, "
            f"not {inputs!r}"
        )
    return names, list(values)


def _check(values: list[mtf.Tensor], batch_dim: mtf.Dimension, num_microbatches: int) -> None:
    if num_microbatches < 1 or batch_dim.size % num_microbatches:
        raise ValueError(
            f"accumulate_gradients: {dims_text([batch_dim])} is not divisible by num_microbatches="
            f"{num_microbatches}; choose a divisor of {batch_dim.size}"
        )
    if not any(batch_dim in x.shape for x in values):
        shapes = ", ".join(str(x.shape) for x in values)
        raise ValueError(
            f"accumulate_gradients: no input has the dimension {dims_text([batch_dim])}; they are "
            f"of {shapes}"
        )


# -- averages of weights


class ExponentialMovingAverage:
    """Averages of weights over training, which often evaluate better than the last weights.

    After each step, average = decay * average + (1 - decay) * weight: Polyak and Juditsky,
    "Acceleration of stochastic approximation by averaging" (1992). An average begins as the initial
    value of its variable. It is a float32 variable `<var>/ExponentialMovingAverage`, the name that
    TensorFlow's class of this name gives it, so files can be read by both.

    >>> w = mtf.get_variable(mesh, "w", [mtf.Dimension("d", 4)])
    >>> grads = mtf.gradients([mtf.reduce_sum(mtf.square(w))], [w])
    >>> variables = graph.trainable_variables
    >>> updates = mtf.optimize.SgdOptimizer(0.1).apply_grads(grads, variables)
    >>> average = mtf.optimize.ExponentialMovingAverage(0.99)
    >>> updates += average.apply(variables, after=updates)
    >>> print([v.name for v in graph.all_variables])
    ['w', 'w/ExponentialMovingAverage']
    """

    def __init__(
        self,
        decay: Rate,
        num_updates: Optional[Rate] = None,
        name: str = "ExponentialMovingAverage",
    ):
        """Creates averages.

        Args:
          decay: a number between 0 and 1, such as 0.999; a tf scalar or a schedule.
          num_updates: a number, tf scalar or function of the step, the number of updates n; if
            given, the decay is at most (1 + n) / (10 + n), so that averages follow faster at first.
            `lambda step: step` counts training steps.
          name: the end of the names of averages.

        Raises:
          ValueError: the decay is not between 0 and 1.
        """
        if isinstance(decay, (int, float)) and not 0 <= decay <= 1:
            raise ValueError(
                f"ExponentialMovingAverage: decay must be between 0 and 1, not {decay!r}; 0.999 "
                "averages over some 1000 steps"
            )
        self._decay = decay
        self._num_updates = num_updates
        self._name = name

    def average_name(self, variable: mtf.Variable) -> str:
        """Returns the full name of the average of a variable.

        Args:
          variable: a Variable.
        """
        return f"{variable.name}/{self._name}"

    def average(self, variable: mtf.Variable) -> mtf.Tensor:
        """Returns the average of a variable, a float32 Tensor of its shape.

        Args:
          variable: a Variable. Its average is created if `apply` has not been called.
        """
        if variable.store is not None:
            variable.store._known.averages[self.average_name(variable)] = variable.name
        return mtf.get_variable(
            variable.mesh,
            self.average_name(variable),
            variable.shape,
            initializer=_same_beginning(variable),
            trainable=False,
        )

    def apply(
        self, variables: Sequence[mtf.Variable], after: Sequence[mtf.Operation] = ()
    ) -> list[mtf.Operation]:
        """Returns operations that update the averages.

        Args:
          variables: Variables, usually `graph.trainable_variables`.
          after: the operations that update the variables: averages are of the values after them. If
            there are none, averages are of the values at the beginning of the step.

        Returns:
          A list of Assign operations, to be run in each step with `after`.
        """
        updates = []
        for variable in variables:
            average = self.average(variable)
            difference = stored_value(variable, after) - average
            share = 1.0 - _at_most(self._decay, self._num_updates, average)
            # As an addition of a small difference, which loses less to rounding than two products
            # do.
            updates.append(mtf.assign_add(average, difference * share))
        return variables[0].graph.combine_assignments(updates) if updates else []

    def swap(self, variables: Sequence[mtf.Variable]) -> list[mtf.Operation]:
        """Returns operations that exchange variables and their averages.

        Run them before an evaluation, and again after it.

        Args:
          variables: Variables with averages.

        Returns:
          A list of Assign operations.
        """
        updates = []
        for variable in variables:
            average = self.average(variable)
            # Both assign what was read at the step's beginning, so neither sees what the other did.
            updates.append(mtf.assign(average, stored_value(variable)))
            updates.append(mtf.assign(variable, average))
        return variables[0].graph.combine_assignments(updates) if updates else []

    @contextlib.contextmanager
    def averaged(self, store: mtf.VariableStore) -> Iterator[mtf.VariableStore]:
        """Returns a context in which the variables of a store have their averages as values.

        It is for programs in tf.function and for eager ones; those with sessions run `swap`.

        Args:
          store: a VariableStore with variables and their averages.

        Raises:
          ValueError: it has no averages.
        """
        end = f"/{self._name}"
        names = [n.removesuffix(end) for n in store.names if n.endswith(end)]
        names = [n for n in names if n in store.names]
        if not names:
            raise ValueError(
                f"ExponentialMovingAverage: no variable of the store has an average '<var>{end}'; "
                f"there are {store.names}. Call apply, with the updates of the training step"
            )
        # Copies: what `value` returns may be the memory of a slice, which is about to be assigned
        # to.
        weights = {n: tf.identity(store.value(n)) for n in names}
        try:
            for n in names:
                store.assign(n, store.value(n + end))
            yield store
        finally:
            for n, value in weights.items():
                store.assign(n, value)

    def variables_to_restore(self, graph: mtf.Graph) -> dict[str, Any]:
        """Returns the masters of a graph by the names under which a Saver finds averages.

        `mtf.checkpoint.Saver(average.variables_to_restore(graph))` in a graph for evaluation
        restores the averages of a training run as the values of its trainable variables.

        Args:
          graph: a Graph.
        """
        end = f"/{self._name}"
        trained = set(graph.trainable_variables)
        return {
            self.average_name(v) if v in trained else v.name: v.get_master()
            for v in graph.all_variables
            if not v.name.endswith(end)
        }


def _same_beginning(variable: mtf.Variable) -> Any:
    """Returns an initializer that gives the initial value of a variable."""

    def initializer(shape: Sequence[int], dtype: tf.DType = tf.float32, **unused: object) -> Any:
        store = variable.store
        if store is None:
            # Not of the initializer again, which might draw other numbers.
            value = variable.get_master().initial_value
        elif variable.name in store.names:
            # Made before and maybe trained, so the average begins with the value that it has now.
            value = store.value(variable.name)
        else:
            # What the variable will have: a value that the store was given for it; or what its
            # initializer draws, which gets a seed by the name if it has none.
            value = store.first_value(variable, whole_form(variable.shape, variable.master_dtype))
        return tf.cast(value, dtype)

    return initializer


def _at_most(decay: Rate, num_updates: Optional[Rate], average: mtf.Tensor) -> Any:
    """Returns the decay, at most (1 + n) / (10 + n)."""
    decay = rate_now(decay)
    if num_updates is not None:
        n = rate_now(num_updates)
        if isinstance(n, mtf.Tensor) or isinstance(decay, mtf.Tensor):
            raise ValueError(
                "ExponentialMovingAverage: with num_updates, it and the decay must be numbers or "
                "tf scalars, not mtf.Tensors"
            )
        n = tf.cast(n, tf.float32)
        decay = tf.minimum(tf.cast(decay, tf.float32), (1.0 + n) / (10.0 + n))
    return scalar_like(decay, average)
