"""Which calls of mtf.function are the same: Python values are told apart by type."""

import collections
import dataclasses
import enum
import inspect

import numpy as np
import pytest
import tensorflow as tf2

import mesh_tensorflow as mtf


class Level(enum.IntEnum):
    ONE = 1


class Named(str):
    """A string of another type."""


@dataclasses.dataclass(frozen=True)
class Settings:
    size: int = 1
    rate: float = 2.0


@dataclasses.dataclass(frozen=True)
class Nested:
    settings: Settings = Settings()
    names: str = "a"


Pair = collections.namedtuple("Pair", "a b")
Other = collections.namedtuple("Other", "a b")

# Python equates many of these, and TensorFlow with it.
VALUES = [
    1, True, 1.0, 1j, 1 + 0j, Level.ONE, 0, False, 0.0, -0.0, -1, 2, 2.0, None, float("inf"),
    "1", b"1", Named("1"), "", b"", (), [], {}, (1,), [1], (1.0,), (True,), (-0.0,), (0.0,), (1, 2),
    Pair(1, 2), Pair(1, 2.0), Other(1, 2), {"a": 1}, {"a": 1.0}, {"a": True}, {"b": 1},
    {"a": {"b": 1}}, {"a": {"b": 1.0}}, [{"a": 1}], [{"a": 1.0}], [[1]], [(1,)], range(1), [0],
    collections.OrderedDict(a=2), collections.OrderedDict(a=2.0),
    Settings(), Settings(1, 2), Settings(1.0, 2.0), Settings(True), Nested(),
    Nested(Settings(1, 2)), 10**20, 1e20,
]  # fmt: skip


def described(*args, **named):
    """What a function sees of its arguments: types and values, without the tensors' values."""

    def text(x):
        if tf2.is_tensor(x):
            return f"tensor of {x.dtype.name}"
        if isinstance(x, dict):
            return f"dict {[(k, text(v)) for k, v in sorted(x.items())]}"
        if isinstance(x, (list, tuple)):
            return f"{type(x).__name__} {[text(y) for y in x]}"
        return f"{type(x).__name__} {x!r}"

    return tf2.constant(text([args, named]))


@pytest.mark.parametrize("order", [1, -1])
def test_values_that_python_equates(order):
    """Each call is of the function that was traced for such an argument, however often it comes."""
    fn, told = mtf.function(described), set()
    for _ in range(6):
        for value in VALUES[::order]:
            found = fn(value).numpy()
            assert found == described(value).numpy(), value
            told.add(found)
    assert len(told) == len(VALUES)


def test_numpy_numbers_are_tensors():
    fn = mtf.function(described)
    for value in [np.float32(1), 1.0, np.int32(1), 1, np.bool_(True), True, np.float64(1.0)] * 6:
        is_tensor = isinstance(value, np.generic)
        found = fn(value).numpy()
        expected = tf2.convert_to_tensor(value) if is_tensor else value
        assert found == described(expected).numpy()


X1 = tf2.ones([2])
# Calls that have the same values in other places.
CALLS = [
    ((X1,), {"scale": 2.0}),
    (((X1,), {"scale": 2.0}), {}),
    ((((X1,), {"scale": 2.0}),), {}),
    ((), {"x": X1, "scale": 2.0}),
    ((X1, 2.0), {}),
    (((X1, 2.0),), {}),
    (([X1, 2.0],), {}),
    ((X1, {"scale": 2.0}), {}),
    ((), {"x": (X1,), "scale": {"scale": 2.0}}),
    ((X1,), {"scale": 2}),
    ((X1,), {}),
    (((X1,),), {}),
    (((X1,), ()), {}),
    ((X1, ()), {}),
    ((X1,), {"scale": {}}),
    ((X1,), {"scale": None}),
]


def test_values_in_other_places():
    def total(*args, **named):
        bound = inspect.signature(lambda x, scale="default": None).bind(*args, **named)
        bound.apply_defaults()
        return described(*bound.args)

    def fn(x, scale="default"):
        return described(x, scale)

    quick = mtf.function(fn)
    for _ in range(6):
        for args, named in CALLS:
            assert quick(*args, **named).numpy() == total(*args, **named).numpy(), (args, named)


def test_variables_of_a_program_are_updated_by_each_call():
    @mtf.function
    def count():
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        n = mtf.get_variable(mesh, "n", mtf.Shape([]), initializer=tf2.zeros_initializer())
        update = mtf.assign_add(n.operation, mtf.constant(mesh, 1.0, mtf.Shape([])))
        impl = mtf.placement_mesh_impl.PlacementMeshImpl("all:1", "", ["cpu:0"])
        lowering = mtf.Lowering(mesh.graph, {mesh: impl})
        lowering.lowered_operation(update)

    for _ in range(9):
        assert count() is None
    assert float(count.store.value("n")) == 9.0
    count.store.assign("n", 100.0)
    count()
    assert float(count.store.value("n")) == 101.0


def test_gradients_of_calls():
    """A program's call is one of TensorFlow's functions, whose gradients tapes know."""
    fn = mtf.function(lambda a: a * a)
    x = tf2.constant(3.0)
    fn(x)
    with tf2.GradientTape() as tape:
        tape.watch(x)
        y = fn(x)
    assert float(tape.gradient(y, x)) == 6.0
    with tf2.autodiff.ForwardAccumulator(x, tf2.constant(1.0)) as forward:
        y = fn(x)
    assert float(forward.jvp(y)) == 6.0


def test_where_functions_run_eagerly():
    """A function gets its arguments themselves, in all ways in which it may be called."""
    fn = mtf.function(lambda x, flag: x if flag is True else -x)
    with mtf.debug.nan_checks():
        assert [float(fn(tf2.constant(1.0), flag)) for flag in (True, 1, 1.0)] == [1, -1, -1]
    within = tf2.function(lambda x: (fn(x, True), fn(x, 1)))
    assert [float(y) for y in within(tf2.constant(1.0))] == [1, -1]
    tf2.config.run_functions_eagerly(True)
    try:
        assert [float(fn(tf2.constant(1.0), flag)) for flag in (True, 1, 1.0)] == [1, -1, -1]
    finally:
        tf2.config.run_functions_eagerly(False)


def test_a_signature_takes_numbers_as_tensors():
    fn = mtf.function(lambda x: x * 2, input_signature=[tf2.TensorSpec([], tf2.float32)])
    assert [float(fn(x)) for x in (1, 2.0, np.float32(3), tf2.constant(4.0))] == [2, 4, 6, 8]


def test_a_module_with_such_calls_is_saved(tmp_path):
    module = tf2.Module()
    function = mtf.function(lambda x, scale: x * float(scale))
    assert float(function(tf2.constant(2.0), 3)) == 6.0
    module.fn = function.tf_function
    module.fn.get_concrete_function(tf2.TensorSpec([], tf2.float32), 3)
    tf2.saved_model.save(module, str(tmp_path))
    assert float(tf2.saved_model.load(str(tmp_path)).fn(tf2.constant(2.0), 3)) == 6.0
