"""Calls the functions of the user with the arguments that they take."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

__all__ = [
    "MODEL_FN_ARGUMENTS",
    "call_input_fn",
    "call_model_fn",
    "check_input_fn",
    "check_model_fn",
    "function_name",
    "takes",
]

MODEL_FN_ARGUMENTS = ("features", "labels", "mode", "params", "config")


def function_name(function: Callable[..., Any]) -> str:
    """Returns the name of a function, for error messages.

    Args:
      function: a callable.

    Returns:
      a string.
    """
    return getattr(function, "__name__", None) or repr(function)


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    return list(inspect.signature(function).parameters.values())


def takes(function: Callable[..., Any], name: str) -> bool:
    """Returns whether a function takes an argument with a given name.

    Args:
      function: a callable.
      name: the name of the argument.

    Returns:
      a bool.
    """
    return any(
        p.kind is p.VAR_KEYWORD or (p.name == name and p.kind is not p.VAR_POSITIONAL)
        for p in _parameters(function)
    )


def check_model_fn(model_fn: Callable[..., Any], known: Iterable[str] = MODEL_FN_ARGUMENTS) -> None:
    """Checks the signature of a model function.

    Args:
      model_fn: a model function.
      known: the names of the arguments that are available.

    Raises:
      TypeError: `model_fn` is not callable.
      ValueError: `model_fn` takes no features, or an unknown argument.
    """
    if not callable(model_fn):
        raise TypeError(
            f"model_fn should be a function of features, labels, mode, params, but is {model_fn!r}"
        )
    known = tuple(known)
    if not takes(model_fn, "features"):
        raise ValueError(
            f"model_fn {function_name(model_fn)} takes no argument `features`: it is called by "
            f"names, and may take {', '.join(known)}"
        )
    unknown = [
        p.name
        for p in _parameters(model_fn)
        if p.name not in known
        and p.default is p.empty
        and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
    ]
    if unknown:
        raise ValueError(
            f"model_fn {function_name(model_fn)} takes {', '.join(unknown)}, but is given only "
            f"{', '.join(known)}: put what else it needs into params, or give it a default"
        )


def call_model_fn(
    model_fn: Callable[..., Any],
    features: object,
    labels: object,
    mode: str,
    params: object,
    config: object,
) -> Any:
    """Calls a model function with the arguments that it takes.

    Args:
      model_fn: a function of some of features, labels, mode, params and config.
      features: the features.
      labels: the labels, or None.
      mode: a ModeKeys value.
      params: the hyperparameters.
      config: the RunConfig.

    Returns:
      the result of the function.

    Raises:
      ValueError: there are labels, but `model_fn` does not take any.
    """
    name = function_name(model_fn)
    given = {"mode": mode, "params": params, "config": config}
    chosen = {key: value for key, value in given.items() if takes(model_fn, key)}
    if takes(model_fn, "labels"):
        chosen["labels"] = labels
    elif labels is not None:
        raise ValueError(
            f"model_fn {name} takes no argument `labels`, but input_fn returns labels in mode "
            f"{mode!r}: add the argument, or let input_fn return features alone"
        )
    return model_fn(features=features, **chosen)


def call_input_fn(input_fn: Callable[..., Any], mode: str, params: object, config: object) -> Any:
    """Calls an input function with the arguments that it takes.

    Args:
      input_fn: a function of some of mode, params and config.
      mode: a ModeKeys value.
      params: the hyperparameters.
      config: the RunConfig.

    Returns:
      the result of the function.

    Raises:
      ValueError: `input_fn` requires another argument.
    """
    given: Mapping[str, Any] = {
        "mode": mode,
        "params": params,
        "config": config,
        "input_context": None,
    }
    unknown = [
        p.name
        for p in _parameters(input_fn)
        if p.name not in given
        and p.default is p.empty
        and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
    ]
    if unknown:
        raise ValueError(
            f"input_fn {function_name(input_fn)} needs {', '.join(unknown)}, but is given only "
            "mode, params and config: bind what else it needs, by functools.partial for example"
        )
    chosen = {key: value for key, value in given.items() if takes(input_fn, key)}
    return input_fn(**chosen)


def check_input_fn(input_fn: Callable[..., Any], called: str) -> None:
    """Checks that an input function is callable.

    Args:
      input_fn: the input function.
      called: the name of the method that takes it, for error messages.

    Raises:
      TypeError: `input_fn` is not callable.
    """
    if not callable(input_fn):
        raise TypeError(
            f"{called}: input_fn should be a function that returns a tf.data.Dataset or (features, "
            f"labels), but is {input_fn!r}: give the function, not what it returns"
        )
