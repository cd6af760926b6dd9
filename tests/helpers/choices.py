"""The choices that change speed and memory and never results, for runs of tests with each of them.

`pytest --choices always` runs tests with every choice taken wherever it is possible, and
`pytest --choices never` with none. Without the option each is taken where it was measured to pay.
"""

from __future__ import annotations

import importlib
import os
from typing import Any, NamedTuple

__all__ = ["ABOUT", "CHOICES", "KINDS", "VARIABLE", "choose", "set_environment"]

KINDS = ("always", "never")
VARIABLE = "MTF_TEST_CHOICES"  # of the environment: one of these, or empty for where it pays
_ANY_SIZE, _NO_SIZE = 0, 2**62


class Choice(NamedTuple):
    """A constant of the package that says from where on a choice pays.

    Attributes:
      what: the choice.
      module: a module of the package.
      name: the constant.
      always: its value if the choice is always taken.
      never: its value if it is never taken.
    """

    what: str
    module: str
    name: str
    always: Any
    never: Any


CHOICES = (
    Choice(
        "attention by blocks",
        "transformer.attention._dot_product",
        "LEAST_LENGTH",
        _ANY_SIZE,
        _NO_SIZE,
    ),
    Choice(
        "gathers in place of products with one-hots",
        "ops._movement.gather",
        "_LARGE",
        _ANY_SIZE,
        _NO_SIZE,
    ),
    Choice(
        "matrix products in place of einsums",
        "_mesh.slice_functions",
        "_SMALL",
        _NO_SIZE,
        _ANY_SIZE,
    ),
    Choice(
        "matrix products in place of large einsums",
        "_mesh.slice_functions",
        "_LARGE",
        frozenset(["ab,bc->ac", "ab,ac->bc", "ab,cb->ac"]),
        frozenset(),
    ),
    Choice(
        "stacks of small variables",
        "_lowering.rewrites",
        "_MAX_STACKED_SLICE",
        2**27,
        _ANY_SIZE,
    ),
    Choice(
        "rings of parts of a tensor",
        "placement_mesh_impl",
        "_MIN_ELEMENTS_TO_SHARD",
        _ANY_SIZE,
        _NO_SIZE,
    ),
)


# Tests of what a choice does, or of when it is taken, as patterns of names.
ABOUT = (
    "mesh/test_masters.py::test_only_slices_hold_memory",
    "mesh/test_matrix_product.py::test_equals_einsum*",
    "mesh/test_matrix_product.py::test_gradients_of_stages_are_products_of_matrices",
    "ops/test_operation_contract.py::test_variables_that_are_joined_under_it",
    "ops/test_variables.py::test_assignments_to_stacked_variables",
    "ops/test_variables.py::test_autostack*True*",
    "ops/test_variables.py::test_stacked_variables_in_loops_and_recomputed_functions",
    # Kernels of bfloat16 other than oneDNN's round more often.
    "oracle/test_oracle.py::test_*dense_bfloat16*",
    # Gradients of a softmax of one element: rounding errors, or exact zeros.
    "oracle/test_oracle.py::test_program?local_attention-one?",
    "oracle/test_oracle.py::test_script?stacked_variables?",
)


def set_environment(kind: str) -> None:
    """Makes TensorFlow take its own choice, oneDNN's kernels; before it is imported.

    Args:
      kind: "always", "never" or "".
    """
    if kind:
        os.environ["TF_ENABLE_ONEDNN_OPTS"] = str(int(kind == "always"))


def choose() -> None:
    """Sets the constants of all choices, as the run of the tests asks: in each of its processes.

    Raises:
      AttributeError: a constant is not there any more.
    """
    kind = os.environ.get(VARIABLE, "")
    if not kind:
        return
    for choice in CHOICES:
        module = importlib.import_module(f"mesh_tensorflow.{choice.module}")
        getattr(module, choice.name)
        setattr(module, choice.name, getattr(choice, kind))
