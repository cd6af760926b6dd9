"""Calls that are wrong: each raises where it is written, and leaves no trace."""

import re
from collections.abc import Callable
from typing import NamedTuple

import pytest

import mesh_tensorflow as mtf
from helpers.world import World


class After(NamedTuple):
    """A call that is prepared by one that is right."""

    prepare: Callable
    call: Callable


def strictly(call):
    """Makes what is hardly meant an error."""

    def called(world):
        with mtf.strict():
            return call(world)

    return called


def check_building(call, kind, text):
    """Checks the error of a call, and that the graph is as it was before."""
    world = World()
    prepared = []
    if isinstance(call, After):
        prepared, call = [call.prepare(world)], call.call
    before = world.state()
    with pytest.raises(kind) as caught:
        call(world, *prepared)
    assert re.search(text, str(caught.value)), str(caught.value)
    assert world.state() == before


def check_name_is_free(wrong, kind, right):
    """Checks that a right call after a wrong one has the name that it has without it."""
    world = World()
    with pytest.raises(kind):
        wrong(world)
    made, expected = right(world)
    assert getattr(made, "operation", made).name == expected
