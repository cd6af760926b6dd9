"""What all optimizers share: slots, learning rates, the base class; and gradient descent."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Optional, TypeAlias, Union

import gin
import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow._calls import within
from mesh_tensorflow._core.errors import MissingMethodError, WrongTypeError, check_flag, slip
from mesh_tensorflow.ops._source import import_unchanged
from mesh_tensorflow.ops._variable import read_now
from mesh_tensorflow.utils import steps_done

# The ends of names that stand in checkpoints of the classic release: names are those of weights
# and these. All other slots are named "<weight>/<slot>".
ADAFACTOR = {slot: f"_slot_{slot}" for slot in ("vr", "vc", "v", "m")}
ADAM = {slot: f"/{slot}" for slot in ("adam_m", "adam_v")}
MOMENTUM = "_momentum_v"
_ENDS = (*ADAFACTOR.values(), *ADAM.values(), MOMENTUM)

# The shape of each variable, by name.
Shapes = Mapping[str, Sequence[int]]


def is_slot(name: str, shapes: Shapes) -> bool:
    """Returns whether a variable is a slot of another.

    A slot of "x/w" is "x/w/adam_m", "x/w_slot_v" or, of any optimizer or average, "x/w_slot_<slot>"
    or "x/w/<slot>", the latter of the shape of "x/w" or a number without dimensions; it may be in a
    scope of the optimizer, "scope/x/w/<slot>". A bias "x/w/bias" is no slot: it has another shape.

    Args:
      name: the name of a variable.
      shapes: the shapes of variables by name, of this one and of those that it may be a slot of.
    """
    # By the name alone, as Adafactor's slots of rows and columns lack a dimension of their weight.
    if name.endswith(_ENDS) or name.rpartition("_slot_")[0] in shapes:
        return True
    # A bias is named like a slot, "w/bias", so other slots have to have the shape of the weight, or
    # none.
    shape = tuple(shapes[name])
    return any(w in shapes and shape in (tuple(shapes[w]), ()) for w in _owners(name))


def _owners(name: str) -> Iterator[str]:
    """Yields the names of variables that one of this name may be a slot of."""
    scopes = name.split("/")
    for start in range(len(scopes)):
        for end in range(start + 1, len(scopes)):
            yield "/".join(scopes[start:end])


def weights_of(shapes: Shapes) -> list[str]:
    """Returns the names of the variables that are neither slots nor the global step.

    Args:
      shapes: the shapes of all variables of a checkpoint or a program, by name.
    """
    return [n for n in shapes if n != "global_step" and not is_slot(n, shapes)]


# A learning rate or another hyperparameter that may change during training: a number, a scalar, or
# a schedule, which is called with the number of completed steps, a float32 tf scalar.
Rate: TypeAlias = Union[float, tf.Tensor, mtf.Tensor, Callable[[Any], Any]]

# The values of schedules during one call of apply_grads, which all variables share; in a context
# variable, as several threads may build programs at once.
_values_now: contextvars.ContextVar[Optional[dict[Any, Any]]] = contextvars.ContextVar(
    "values_now", default=None
)


def rate_now(rate: Rate) -> Any:
    """Returns the value of a schedule at the current step; any other rate as it is.

    For hyperparameters of an optimizer of one's own. Within `apply_grads`, a schedule is called
    once for all variables.

    >>> rate = mtf.optimize.rate_now(lambda step: 0.1 / (1.0 + step))
    >>> print(float(rate), mtf.optimize.rate_now(0.5))
    0.10000000149011612 0.5

    Args:
      rate: a number, a tf scalar, an mtf scalar Tensor, or a function of the step, the number of
        completed steps as a float32 tf scalar.

    Returns:
      A number, a tf scalar or an mtf scalar Tensor.
    """
    if isinstance(rate, mtf.Tensor) or not callable(rate):
        return rate
    rates = _values_now.get()
    # Outside of `apply_grads` nothing is kept, as the next call may be in another tf graph.
    rates = {} if rates is None else rates
    try:
        hash(rate)
        key = rate  # equal ones are one, as the bound methods of each access are
    except TypeError:
        key = id(rate)
    if key not in rates:
        # With the schedule, since another object could have the id of one that is gone.
        rates[key] = rate, rate(tf.cast(steps_done(), tf.float32))
    return rates[key][1]


def scalar_like(value: Rate, x: mtf.Tensor) -> Union[float, mtf.Tensor]:
    """Returns a learning rate as a scalar that can be multiplied with a Tensor.

    >>> x = mtf.ones(mesh, "d:4")
    >>> rate = mtf.optimize.scalar_like(lambda step: 0.1 * (step + 1.0), x)
    >>> print(rate.shape, rate.dtype.name, (rate * x).shape)
    Shape[] float32 Shape[d=4]

    Args:
      value: a number, a tf scalar, an mtf scalar Tensor or a schedule, which is called with the
        current step.
      x: a Tensor, whose dtype and mesh the scalar gets.

    Returns:
      A number, or a scalar Tensor.
    """
    value = rate_now(value)
    if isinstance(value, mtf.Tensor):
        return mtf.cast(value, x.dtype)
    if tf.is_tensor(value):
        # A precision in force is for activations: bfloat16 would round a rate.
        return import_unchanged(x.mesh, tf.cast(value, x.dtype), mtf.Shape([]))
    return value


# A factor of a learning rate: a value, or a function of (step, total_train_steps).
Factor: TypeAlias = Union[float, tf.Tensor, Callable]


@gin.configurable(module="mesh_tensorflow.optimize")
def product_learning_rate(
    step: Union[int, tf.Tensor],
    total_train_steps: int,
    factors: Sequence[Factor] = gin.REQUIRED,
    offset: int = 0,
) -> Union[float, tf.Tensor]:
    """Computes a learning rate as the product of numbers and schedules.

    >>> print(mtf.optimize.product_learning_rate(10, 100, [0.5, lambda step, total: step / total]))
    0.05

    Args:
      step: an integer tf scalar, the step.
      total_train_steps: an integer, the total number of steps.
      factors: a list of numbers, tf scalars, and functions of (step, total_train_steps).
      offset: the step at which the schedules begin; subtracted from both of their arguments.

    Returns:
      A number or tf scalar.

    Raises:
      ValueError: `factors` is not such a list.
    """
    if not isinstance(factors, (list, tuple)):
        raise ValueError(
            f"product_learning_rate: factors must be a list of numbers and schedules, not "
            f"{factors!r}; put a single one in brackets"
        )
    product: Any = 1.0
    for factor in factors:
        if callable(factor):
            factor = factor(step - offset, total_train_steps - offset)
        elif not isinstance(factor, (int, float)) and not tf.is_tensor(factor):
            raise ValueError(
                f"product_learning_rate: a factor must be a number, a tf scalar or a function of "
                f"(step, total_train_steps), not {factor!r}"
            )
        product *= factor
    return product


@gin.configurable(module="mesh_tensorflow.optimize")
def compute_lr_for_step(
    schedules: Sequence[Optional[Sequence[Factor]]],
    learning_rate: Rate,
    train_steps: int = 524288,
) -> list[Rate]:
    """Returns the learning rate of each schedule at the current global step.

    >>> print(mtf.optimize.compute_lr_for_step([None, [2.0, 0.5]], learning_rate=0.1))
    [0.1, 1.0]

    Args:
      schedules: a list, in which each schedule is a list of factors as for
        `product_learning_rate`, or None.
      learning_rate: a number or tf scalar, used where a schedule is None.
      train_steps: an integer, the total number of steps.

    Returns:
      A list of numbers and tf scalars.
    """
    # An integer, as factors of (step, total) had it in the classic, unlike schedules in `rate_now`.
    step = steps_done()
    return [
        learning_rate if factors is None else product_learning_rate(step, train_steps, factors)
        for factors in schedules
    ]


class Optimizer:
    """Base class of optimizers; a subclass implements `apply_grad` for one variable.

    >>> d = mtf.Dimension("d", 4)
    >>> w = mtf.get_variable(mesh, "w", [d])
    >>> loss = mtf.reduce_mean(mtf.square(w))
    >>> variables = graph.trainable_variables
    >>> grads = mtf.gradients([loss], [v.value for v in variables])
    >>> updates = mtf.optimize.SgdOptimizer(0.1).apply_grads(grads, variables)
    >>> print([v.name for update in updates for v in update.variables])
    ['w']

    Attributes:
      takes_complex: whether it updates complex variables; False for rules of real numbers.
    """

    takes_complex = True

    def apply_grads(
        self, grads: Sequence[Optional[mtf.Tensor]], variables: Sequence[mtf.Variable]
    ) -> list[mtf.Operation]:
        """Returns operations that update variables.

        Args:
          grads: a list with a Tensor or None for each variable. If the numbers of gradients and
            variables differ, the excess is ignored, with a warning.
          variables: a list of Variable operations.

        Returns:
          A list of Assign operations, combined where possible.

        Raises:
          WrongTypeError: a variable is complex, and the rule is one of real numbers; or a Tensor is
            given in place of a variable.
        """
        assignments: list[mtf.Operation] = []
        if len(grads) != len(variables):
            slip(
                f"{type(self).__name__}.apply_grads: {len(grads)} gradients for {len(variables)} "
                f"variables; only the first {min(len(grads), len(variables))} variables are "
                "updated. Give a gradient, or None, for each",
                key="apply_grads",
            )
        # Learning rates and slots are no activations.
        with within(_values_now, {}), mtf.precision("float32"):
            for grad, var in zip(grads, variables):
                if isinstance(var, mtf.Tensor):
                    raise WrongTypeError(
                        f"{type(self).__name__}.apply_grads: {var.name} {var.shape} is a Tensor, "
                        "the value of a variable. Give the Variable itself, which is in "
                        "graph.trainable_variables"
                    )
                if var.master_dtype.is_complex and not self.takes_complex:
                    raise WrongTypeError(
                        f"{type(self).__name__} has a rule for real numbers, and variable "
                        f"{var.name!r} is {var.master_dtype.name}. Make variables of the two "
                        "parts, which mtf.complex joins, or train it by mtf.optimize.SgdOptimizer, "
                        "without momentum"
                    )
                assignments += self.apply_grad(grad, var)
        if not assignments:
            return []
        # One Assign per function and mesh, so that stacks of small variables are assigned to as a
        # whole.
        return variables[0].graph.combine_assignments(assignments)

    def apply_grad(self, grad: Optional[mtf.Tensor], var: mtf.Variable) -> list[mtf.Operation]:
        """Returns operations that update one variable.

        Args:
          grad: a Tensor; or None, in which case the variable is skipped with a log message.
          var: a Variable operation.

        Returns:
          A list of Assign operations.
        """
        raise MissingMethodError(f"{type(self).__name__} has no apply_grad")


def skip_without_gradient(grad: Optional[mtf.Tensor], var: mtf.Variable) -> bool:
    """Returns whether there is no gradient, and logs it: then `apply_grad` returns no update.

    >>> w = mtf.get_variable(mesh, "w", "d:4")
    >>> mtf.optimize.skip_without_gradient(w, graph.trainable_variables[0])
    False

    Args:
      grad: the gradient, or None.
      var: the Variable.
    """
    if grad is None:
        tf.logging.warning("no gradient for variable %s; it is not updated", var.name)
    return grad is None


def float_slot(var: mtf.Variable, name: str, initial: float = 0.0) -> mtf.Tensor:
    """Returns a slot variable of the shape of a variable: float32, and not trained.

    It is split as its variable is, saved under its name, and stored in parts with ZeRO.

    >>> w = mtf.get_variable(mesh, "w", "d:4")
    >>> var = graph.trainable_variables[0]
    >>> slot = mtf.optimize.float_slot(var, f"{var.name}/mean_square")
    >>> print(slot.shape, [v.name for v in graph.all_variables])
    Shape[d=4] ['w', 'w/mean_square']

    Args:
      var: the Variable.
      name: the full name of the slot variable.
      initial: the initial value of its elements.

    Returns:
      A float32 Tensor, its value at the beginning of the step; `mtf.assign` updates it.
    """
    return slot_of_shape(var, name, var.shape, initial)


def slot_of_shape(
    var: mtf.Variable,
    name: str,
    shape: mtf.Shape,
    initial: float = 0.0,
    dtype: Union[mtf.VariableDType, tf.DType] = tf.float32,
) -> mtf.Tensor:
    """Returns a slot variable of another shape or dtype; see `float_slot`."""
    return mtf.get_variable(
        var.mesh,
        name,
        shape,
        dtype=dtype,
        initializer=tf.constant_initializer(initial) if initial else tf.zeros_initializer(),
        trainable=False,
    )


class StoredValue(mtf.ReadVariable):
    """The value of a variable in the dtype of its slices.

    It is that of the beginning of the step; or, if operations are given, that after them.
    """

    def __init__(self, var: mtf.Variable, after: Sequence[mtf.Operation] = ()):
        """Creates the operation.

        Args:
          var: a Variable.
          after: operations that it waits for.
        """
        super().__init__(var, name="stored_value")
        self._after = list(after)
        self._outputs = [mtf.Tensor(self, var.shape, var.slice_dtype)]

    @property
    def dependencies(self) -> Sequence[mtf.Operation]:
        """The operations that it waits for."""
        return self._after

    def lower(self, lowering: mtf.Lowering) -> None:
        """Reads the slices, or takes the values that were read at the beginning of the step."""
        if not self._after:
            # The step's one read of the variable, for which all assignments wait.
            value = lowering.variables[self._var].laid_out_tensor
            lowering.set_tensor_lowering(self.outputs[0], value)
            return
        mesh_impl = lowering.mesh_impl(self)
        if not mesh_impl.supports_control_dependencies:
            raise ValueError(
                f"{self.name}: {type(mesh_impl).__name__} does not support control dependencies, "
                "so the value after an update cannot be read in the same step; leave `after` out"
            )
        # In eager code an assignment is done by now: what it returned is None, and not waited for.
        waits = [lowering.lowered_operation(op) for op in self._after]
        with tf.control_dependencies([w for w in waits if w is not None]):
            value = read_now(lowering, self._var)
        lowering.set_tensor_lowering(self.outputs[0], value)


def stored_value(var: mtf.Variable, after: Sequence[mtf.Operation] = ()) -> mtf.Tensor:
    """Returns the value of a variable in float32, not rounded to the dtype of activations.

    Args:
      var: a Variable.
      after: operations that it waits for; if there are none, it is the value of the beginning of
        the step.
    """
    # The value that the program has read anyway: where dtypes are equal, it is not rounded.
    if not after and var.slice_dtype == var.activation_dtype:
        return mtf.to_float(var.value)
    return mtf.to_float(StoredValue(var, after).outputs[0])


# -- gradient descent


class _Descent(Optimizer):
    """What kinds of gradient descent share: their hyperparameters."""

    def __init__(self, learning_rate: Rate, momentum: Rate):
        """Creates the optimizer.

        Args:
          learning_rate: a number, a tf scalar, an mtf scalar Tensor or a schedule.
          momentum: a number or a tf scalar, the decay of the sum of gradients.
        """
        self._lr = learning_rate
        self._momentum = momentum

    @property
    def lr(self) -> Rate:
        """The learning rate."""
        return self._lr

    @property
    def momentum(self) -> Rate:
        """The decay of the sum of gradients."""
        return self._momentum


@gin.configurable(module="mesh_tensorflow.optimize")
class SgdOptimizer(_Descent):
    """Stochastic gradient descent, with or without momentum.

    Without momentum, it subtracts the learning rate times the gradient. With momentum, it subtracts
    the learning rate times a sum of gradients, m = momentum * m + gradient; or, after Nesterov,
    times gradient + momentum * m: Sutskever et al., "On the importance of initialization and
    momentum in deep learning" (2013). Slot variable with momentum: `<var>/sgd_momentum`.

    >>> optimizer = mtf.optimize.SgdOptimizer(0.1, momentum=0.9, nesterov=True)
    >>> w = mtf.get_variable(mesh, "w", [mtf.Dimension("d", 4)])
    >>> updates = optimizer.apply_grads([mtf.ones_like(w)], graph.trainable_variables)
    >>> print([v.name for v in graph.all_variables])
    ['w', 'w/sgd_momentum']
    """

    def __init__(self, learning_rate: Rate, momentum: Rate = 0.0, nesterov: bool = False):
        """Creates the optimizer.

        Args:
          learning_rate: a number, a tf scalar, an mtf scalar Tensor or a schedule.
          momentum: a number or tf scalar, the decay of the sum of gradients; 0 for none.
          nesterov: whether to look one step ahead.

        Raises:
          ValueError: `nesterov` without momentum.
        """
        write = f"SgdOptimizer({learning_rate!r}, momentum={{value}})"
        check_flag("SgdOptimizer", "nesterov", nesterov, write)
        super().__init__(learning_rate, momentum)
        self._nesterov = bool(nesterov)
        if nesterov and not self._has_momentum:
            raise ValueError(
                "SgdOptimizer: nesterov=True needs a momentum, such as momentum=0.9, not 0"
            )

    @property
    def takes_complex(self) -> bool:  # type: ignore[override]
        """Whether it updates complex variables: if it has no momentum, which is float32."""
        return not self._has_momentum

    @property
    def _has_momentum(self) -> bool:
        return not isinstance(self._momentum, (int, float)) or self._momentum != 0

    def apply_grad(self, grad: Optional[mtf.Tensor], var: mtf.Variable) -> list[mtf.Operation]:
        """Returns operations that update one variable; see `Optimizer.apply_grad`."""
        if skip_without_gradient(grad, var):
            return []
        if self._has_momentum:
            return self._with_momentum(mtf.to_float(grad), var)  # type: ignore[arg-type]
        # Such a rate becomes a Tensor of the mesh, whose slices no assign function is given.
        if callable(self.lr) or isinstance(self.lr, mtf.Tensor):
            return [mtf.assign_sub(var, grad * scalar_like(self.lr, grad))]  # type: ignore[arg-type, operator]
        return [mtf.assign(var, grad, assign_fn=self._descend)]  # type: ignore[arg-type]

    def _with_momentum(self, grad: mtf.Tensor, var: mtf.Variable) -> list[mtf.Operation]:
        m = float_slot(var, f"{var.name}/sgd_momentum")
        momentum = scalar_like(self.momentum, grad)
        # A sum and no average: with a constant gradient g it tends to g / (1 - momentum).
        new_m = m * momentum + grad
        direction = new_m * momentum + grad if self._nesterov else new_m
        # The rate multiplies the sum, so that a schedule scales what earlier gradients left, too.
        update = direction * scalar_like(self.lr, grad)
        return [mtf.assign_sub(var, update), mtf.assign(m, new_m)]

    def _descend(
        self, variable: mtf.Variable, slice_var: tf.Variable, grad: tf.Tensor
    ) -> tf.Operation:
        """Updates one slice in a single pass over its memory."""
        dtype = variable.slice_dtype
        if not hasattr(slice_var, "handle"):  # a value that XLA's partitioner splits
            # It has no resource for the kernel below, which updates one in place.
            change = tf.cast(self.lr, dtype) * tf.cast(grad, dtype)
            return slice_var.assign_sub(change, read_value=False)
        if isinstance(self.lr, (int, float)):
            # The read of the slice is none of its inputs, so that all updates share one constant.
            with tf.control_dependencies(None):
                rate = tf.constant(self.lr, dtype)
        else:
            rate = tf.cast(self.lr, dtype)
        return tf.raw_ops.ResourceApplyGradientDescent(
            var=slice_var.handle,
            alpha=rate,
            delta=tf.cast(grad, dtype),
        )


@gin.configurable(module="mesh_tensorflow.optimize")
class MomentumOptimizer(_Descent):
    """Gradient descent with momentum as in release 0.1.21.

    It subtracts the velocity from before the step, so gradients act one step later than with
    `SgdOptimizer(learning_rate, momentum)`. Slot variable: `<var>_momentum_v`, the velocity.

    >>> optimizer = mtf.optimize.MomentumOptimizer(0.1, momentum=0.9)
    >>> w = mtf.get_variable(mesh, "w", [mtf.Dimension("d", 4)])
    >>> updates = optimizer.apply_grads([mtf.ones_like(w)], graph.trainable_variables)
    >>> print([v.name for v in graph.all_variables])
    ['w', 'w_momentum_v']
    """

    def apply_grad(self, grad: Optional[mtf.Tensor], var: mtf.Variable) -> list[mtf.Operation]:
        """Returns operations that update one variable; see `Optimizer.apply_grad`."""
        if skip_without_gradient(grad, var):
            return []
        v = slot_of_shape(var, var.name + MOMENTUM, var.shape, dtype=var.dtype)
        velocity = v
        if grad.dtype != v.dtype:  # type: ignore[union-attr]
            # Gradients of microbatches are float32, also where values of variables are bfloat16.
            velocity, grad = stored_value(v.operation), mtf.to_float(grad)  # type: ignore[arg-type]
        rate = scalar_like(self.lr, grad)  # type: ignore[arg-type]
        momentum = scalar_like(self.momentum, velocity)
        updated = velocity * momentum + grad * rate  # type: ignore[operator]
        # By the velocity from before, as in the classic, so a gradient first acts in the next step.
        return [mtf.assign(v, updated), mtf.assign_sub(var, velocity)]
