"""Optimizers with the rules and hyperparameters of Keras' optimizers."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Optional

import tensorflow as tf2
import tensorflow.compat.v1 as tf
from tensorflow.python.eager import context

from mesh_tensorflow._core.errors import WrongTypeError
from mesh_tensorflow.optimize._adam import Change, ElementwiseOptimizer, ElementwiseStep, Rule

# The hyperparameters of an optimizer, by Keras' names.
Config = Mapping[str, Any]


def _moved(old: tf.Tensor, new: tf.Tensor, share: float) -> tf.Tensor:
    return old + (new - old) * (1.0 - share)


def _sgd(x: ElementwiseStep, config: Config) -> Change:
    momentum = config["momentum"]
    if not momentum:
        return -x.learning_rate * x.grad, {}
    # The rate is within the sum, unlike in SgdOptimizer: when a schedule lowers it, what is left of
    # earlier gradients keeps their rate.
    m = momentum * x.state["m"] - x.learning_rate * x.grad
    return (momentum * m - x.learning_rate * x.grad if config["nesterov"] else m), {"m": m}


def _adam(x: ElementwiseStep, config: Config) -> Change:
    beta_1, beta_2 = config["beta_1"], config["beta_2"]
    m, v = _moved(x.state["m"], x.grad, beta_1), _moved(x.state["v"], tf.square(x.grad), beta_2)
    new = {"m": m, "v": v}
    if config["amsgrad"]:
        v = new["v_hat"] = tf.maximum(x.state["v_hat"], v)
    # Keras corrects the rate and not the moments, so that its epsilon is the "epsilon hat" of
    # Kingma and Ba (2014), section 2, unlike that of AdamWOptimizer.
    rate = x.learning_rate * tf.sqrt(1.0 - tf.pow(beta_2, x.step)) / (1.0 - tf.pow(beta_1, x.step))
    return -m * rate / (tf.sqrt(v) + config["epsilon"]), new


def _lion(x: ElementwiseStep, config: Config) -> Change:
    beta_1, beta_2 = config["beta_1"], config["beta_2"]
    direction = tf.sign(x.state["m"] * beta_1 + x.grad * (1.0 - beta_1))
    return -x.learning_rate * direction, {"m": x.state["m"] * beta_2 + x.grad * (1.0 - beta_2)}


def _rmsprop(x: ElementwiseStep, config: Config) -> Change:
    rho = config["rho"]
    new = {"v": rho * x.state["v"] + (1.0 - rho) * tf.square(x.grad)}
    below = new["v"] + config["epsilon"]
    if config["centered"]:
        new["mean"] = rho * x.state["mean"] + (1.0 - rho) * x.grad
        # The variance, E[g ** 2] - E[g] ** 2, in place of the mean square.
        below -= tf.square(new["mean"])
    change = -x.learning_rate * x.grad / tf.sqrt(below)
    if config["momentum"]:
        # A sum of changes, so of the opposite sign to Keras', which subtracts its own.
        change = new["m"] = config["momentum"] * x.state["m"] + change
    return change, new


def _adagrad(x: ElementwiseStep, config: Config) -> Change:
    v = x.state["v"] + tf.square(x.grad)
    return -x.learning_rate * x.grad / tf.sqrt(v + config["epsilon"]), {"v": v}


def _adadelta(x: ElementwiseStep, config: Config) -> Change:
    rho, epsilon = config["rho"], config["epsilon"]
    v = rho * x.state["v"] + (1.0 - rho) * tf.square(x.grad)
    # -RMS(changes) / RMS(gradients) * g, where this change is not among the changes yet.
    delta = -tf.sqrt(x.state["delta"] + epsilon) * x.grad / tf.sqrt(v + epsilon)
    new = {"v": v, "delta": rho * x.state["delta"] + (1.0 - rho) * tf.square(delta)}
    return x.learning_rate * delta, new


def _adamax(x: ElementwiseStep, config: Config) -> Change:
    beta_1, beta_2 = config["beta_1"], config["beta_2"]
    m, u = _moved(x.state["m"], x.grad, beta_1), tf.maximum(beta_2 * x.state["u"], tf.abs(x.grad))
    # m alone is corrected: a maximum is not drawn towards the 0 with which it begins.
    rate = x.learning_rate / (1.0 - tf.pow(beta_1, x.step))
    return -rate * m / (u + config["epsilon"]), {"m": m, "u": u}


class _Kind(NamedTuple):
    """A class of Keras.

    Attributes:
      rule: takes an ElementwiseStep and the hyperparameters; returns the change and the new slots.
      slots: takes the hyperparameters; returns the initial value of each slot.
      counts_steps: whether the rule depends on the number of updates.
    """

    rule: Callable[[ElementwiseStep, Config], Change]
    slots: Callable[[Config], dict[str, float]]
    counts_steps: bool = False


def _zeros(*names: str, **conditional: str) -> Callable[[Config], dict[str, float]]:
    """Returns slots of zeros: always `names`, and each slot whose hyperparameter is true."""

    def slots(config: Config) -> dict[str, float]:
        chosen = [slot for key, slot in conditional.items() if config[key]]
        return dict.fromkeys([*names, *chosen], 0.0)

    return slots


_ADAM = _Kind(_adam, _zeros("m", "v", amsgrad="v_hat"), counts_steps=True)
_KINDS: dict[str, _Kind] = {
    "Adadelta": _Kind(_adadelta, _zeros("v", "delta")),
    "Adagrad": _Kind(_adagrad, lambda config: {"v": config["initial_accumulator_value"]}),
    "Adam": _ADAM,
    "AdamW": _ADAM,
    "Adamax": _Kind(_adamax, _zeros("m", "u"), counts_steps=True),
    "Lion": _Kind(_lion, _zeros("m")),
    "RMSprop": _Kind(_rmsprop, _zeros("v", momentum="m", centered="mean")),
    "SGD": _Kind(_sgd, _zeros(momentum="m")),
}
# Hyperparameters of all of Keras' optimizers that are no part of an elementwise rule, and what to
# use in their place.
_INSTEAD = {
    "clipnorm": "mtf.optimize.clip_by_global_norm on the gradients",
    "global_clipnorm": "mtf.optimize.clip_by_global_norm on the gradients",
    "use_ema": "mtf.optimize.ExponentialMovingAverage",
    "gradient_accumulation_steps": "mtf.optimize.accumulate_gradients",
    "loss_scale_factor": "mtf.precision with bfloat16, which needs no loss scale",
}
_OTHERS = {
    "Adafactor": "mtf.optimize.AdafactorOptimizer has its rule",
    "LossScaleOptimizer": "give its inner optimizer, and mtf.precision with bfloat16",
}


def _update(
    rule: Callable[[ElementwiseStep, Config], Change],
    config: Config,
    not_decayed: Optional[re.Pattern],
    x: ElementwiseStep,
) -> Change:
    """Returns the change and the new slots of a slice by a rule; see `ElementwiseOptimizer`."""
    clip, decay = config["clipvalue"], config["weight_decay"]
    if clip is not None:
        # Each element by itself, so it may be within the rule; a clipping by a norm may not.
        x = x._replace(grad=tf.clip_by_value(x.grad, -clip, clip))
    change, new = rule(x, config)
    # Keras decays the value before its rule, which is the same, as no rule reads the value.
    if decay and not (not_decayed is not None and re.search(not_decayed, x.var.name)):
        change -= x.value * (decay * x.learning_rate)
    return change, new


def from_keras(optimizer: Any, name: Optional[str] = None) -> ElementwiseOptimizer:
    """Returns an optimizer with the rule and the hyperparameters of one of Keras'.

    The rules are SGD, Adam, AdamW, Lion, RMSprop, Adagrad, Adadelta and Adamax, which treat each
    element alone. The learning rate may be one of Keras' schedules; it is called with the global
    step. Slot variables: `<var>/keras_<class>_<slot>`, where the class is in lower case.

    >>> keras = tf.keras.optimizers.RMSprop(1e-3, rho=0.95, momentum=0.9)
    >>> optimizer = mtf.optimize.from_keras(keras)
    >>> w = mtf.get_variable(mesh, "w", [mtf.Dimension("d", 4)])
    >>> updates = optimizer.apply_grads([mtf.ones_like(w)], graph.trainable_variables)
    >>> print([v.name for v in graph.all_variables])
    ['w', 'w/keras_rmsprop_v', 'w/keras_rmsprop_m']

    Args:
      optimizer: an optimizer of tf.keras. It is read, not used, and has no state.
      name: the beginning of the names of slot variables; `keras_<class>` if None.

    Raises:
      WrongTypeError: it is no optimizer of Keras.
      ValueError: its rule is not one of these, it has an option that is not elementwise, or it was
        made in a tf.Graph.
    """
    kind = type(optimizer).__name__
    if not isinstance(optimizer, tf2.keras.optimizers.Optimizer):
        raise WrongTypeError(
            f"from_keras: give an optimizer of tf.keras, such as tf.keras.optimizers.Adam(1e-3), "
            f"not {optimizer!r}"
        )
    # A class derived from one of Keras' may have its name, and another rule.
    is_keras_own = type(optimizer).__module__.split(".")[0] == "keras"
    if kind not in _KINDS or not is_keras_own:
        why = _OTHERS.get(kind, "write its rule with mtf.optimize.elementwise")
        raise ValueError(
            f"from_keras: the rule of {kind} is not known to be elementwise; known are "
            f"{', '.join(_KINDS)}. Otherwise {why}"
        )
    try:
        with context.eager_mode():  # Keras reads its variable of the learning rate
            config = optimizer.get_config()
    except (NotImplementedError, TypeError) as e:
        raise ValueError(
            f"from_keras: {kind} was made in a tf.Graph, where its learning rate has no value yet; "
            "make it in eager code, before the graph"
        ) from e
    for option, instead in _INSTEAD.items():
        if config.get(option):
            raise ValueError(
                f"from_keras: {kind} has {option}={config[option]!r}, which is no part of an "
                f"elementwise rule; leave it out, and use {instead}"
            )
    if config.get("weight_decay") and getattr(optimizer, "_exclude_from_weight_decay", None):
        raise ValueError(
            f"from_keras: {kind} has excluded variables of Keras from its weight decay, and the "
            "program's are others; exclude them by name, with "
            "optimizer.exclude_from_weight_decay(var_names=[...])"
        )
    rate = config["learning_rate"]
    if isinstance(rate, Mapping):
        # Keras' configuration has that of the schedule; one that is made of it can be called.
        rate = tf2.keras.optimizers.schedules.deserialize(rate)
    excluded = getattr(optimizer, "_exclude_from_weight_decay_pattern", None)
    rule, slots, counts_steps = _KINDS[kind]
    update = functools.partial(_update, rule, dict(config), excluded)
    return Rule(rate, update, slots(config), name or f"keras_{kind.lower()}", counts_steps)
