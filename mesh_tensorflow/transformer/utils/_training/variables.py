"""Variables: dtypes, filters for training, and loading."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Optional, Union

import gin
import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow.transformer.utils._flags import MODULE

__all__ = [
    "get_variable_dtype",
    "init_checkpoint_variable_mapping",
    "should_load_variable",
    "trained_variables",
    "variable_filter_max_size",
]

Filter = Union[str, Callable[[mtf.Variable], bool], None]


@gin.configurable(module=MODULE)
def get_variable_dtype(
    master_dtype: Union[tf.DType, str] = tf.bfloat16,
    slice_dtype: Union[tf.DType, str] = tf.float32,
    activation_dtype: Union[tf.DType, str] = tf.float32,
) -> mtf.VariableDType:
    """Returns the dtypes of a model's variables and activations.

    Args:
      master_dtype: the dtype of masters and checkpoints; a tf.DType or its name.
      slice_dtype: the dtype of slices, in which variables are updated.
      activation_dtype: the dtype of activations.

    Returns:
      A VariableDType.
    """
    return mtf.VariableDType(
        tf.as_dtype(master_dtype), tf.as_dtype(slice_dtype), tf.as_dtype(activation_dtype)
    )


@gin.configurable(module=MODULE)
def variable_filter_max_size(v: mtf.Variable, max_size: float = 1e7) -> bool:
    """Returns whether a variable is small enough to be trained, as a `variable_filter`.

    Args:
      v: a Variable.
      max_size: the largest number of elements.

    Returns:
      A bool.
    """
    return v.size <= max_size


@gin.configurable(module=MODULE)
def init_checkpoint_variable_mapping(
    name: str, mapping_fn: Optional[Callable[[str], str]] = None
) -> str:
    """Returns the name in the initial checkpoint of a variable of the program.

    Args:
      name: the variable's name.
      mapping_fn: a function of the name, to be set through gin; the same name if None.

    Returns:
      A string.
    """
    return name if mapping_fn is None else mapping_fn(name)


@gin.configurable(module=MODULE)
def should_load_variable(name: str, filter_fn: Optional[Callable[[str], bool]] = None) -> bool:
    """Returns whether a variable is loaded from the initial checkpoint.

    Args:
      name: the variable's name.
      filter_fn: a function of the name, to be set through gin; all are loaded if None.

    Returns:
      A bool.
    """
    return True if filter_fn is None else filter_fn(name)


def trained_variables(graph: mtf.Graph, variable_filter: Filter) -> list[mtf.Variable]:
    """Returns the variables to train.

    Args:
      graph: a Graph.
      variable_filter: None for all that are trainable, a regular expression that is searched for
        in their names, or a function of a Variable.

    Returns:
      A list of Variables.

    Raises:
      ValueError: the filter leaves none.
    """
    if variable_filter is None:
        return list(graph.trainable_variables)
    if isinstance(variable_filter, str):
        found = [v for v in graph.trainable_variables if re.search(variable_filter, v.name)]
    else:
        found = [v for v in graph.trainable_variables if variable_filter(v)]
    if not found:
        names = ", ".join(v.name for v in graph.trainable_variables[:10])
        raise ValueError(
            f"variable_filter={variable_filter!r} leaves no variable to train; the model has "
            f"{len(graph.trainable_variables)}: {names}, ..."
        )
    tf.logging.info(
        "Training %d of %d variables: %s",
        len(found),
        len(graph.trainable_variables),
        ", ".join(v.name for v in found),
    )
    return found
