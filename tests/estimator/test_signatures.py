"""What tf.estimator of TensorFlow 2.15 had can be called in the same way.

`data/estimator_api.json` lists parameters with their kinds and defaults, methods and properties.
"""

import inspect
import json
import pathlib

import pytest

from mesh_tensorflow import estimator

API = json.loads((pathlib.Path(__file__).parents[1] / "data" / "estimator_api.json").read_text())


def find(name):
    found = estimator
    for part in name.split("."):
        found = getattr(found, part)
    return found


def same(listed, function, where):
    """Checks that what is listed can be passed, by position too, and has the same default."""
    ours = [p for p in inspect.signature(function).parameters.values() if p.name != "self"]
    if any(p.name == "cls" for p in ours):
        ours = ours[1:]
    by_name = {p.name: p for p in ours}
    names = [p.name for p in ours]
    for i, (name, kind, default) in enumerate(listed):
        if kind in ("VAR_KEYWORD", "VAR_POSITIONAL"):
            assert any(p.kind.name == kind for p in ours), f"{where}: {name}"
            continue
        assert name in by_name, f"{where}: no {name}"
        assert names[i] == name, f"{where}: {name} stands elsewhere"
        if default == "required":
            assert by_name[name].default is inspect.Parameter.empty, f"{where}: {name}"
        elif default != "other":
            assert repr(by_name[name].default) == default, f"{where}: {name}"
    extra = names[len(listed) :]
    assert all(
        by_name[name].default is not inspect.Parameter.empty
        for name in extra
        if by_name[name].kind.name.startswith("POSITIONAL")
    ), f"{where}: {extra}"


@pytest.mark.parametrize("name", sorted(API))
def test_can_be_called_in_the_same_way(name):
    listed, ours = API[name], find(name)
    if not inspect.isclass(ours):
        same(listed["call"], ours, name)
        return
    if listed["call"]:
        same(listed["call"], ours.__new__ if issubclass(ours, tuple) else ours.__init__, name)
    for method, parameters in listed["methods"].items():
        same(parameters, getattr(ours, method), f"{name}.{method}")
    for attribute in listed["properties"]:
        assert hasattr(ours, attribute), f"{name}.{attribute}"
