"""The examples in the docstrings of mtf.debug."""

import doctest
import importlib

import pytest


@pytest.mark.parametrize("module", ["_core.errors", "debug"])
def test_examples(module):
    result = doctest.testmod(importlib.import_module(f"mesh_tensorflow.{module}"))
    assert result.attempted > 0
    assert not result.failed
