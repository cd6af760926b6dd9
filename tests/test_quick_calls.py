"""Repeated calls of mtf.function do what tf.function does, without calling it."""

import collections
import dataclasses
import enum
import inspect

import numpy as np
import pytest
import tensorflow as tf2

import mesh_tensorflow as mtf
from mesh_tensorflow._mesh.variables.function import QuickCalls


class Counted:
    """A tf.function that counts its calls and traces."""

    def __init__(self, fn, **options):
        self.calls, self.traces = 0, 0

        def traced(*args, **named):
            self.traces += 1
            return fn(*args, **named)

        traced.__signature__ = inspect.signature(fn)
        self.function = tf2.function(traced, autograph=False, **options)
        self.quick = QuickCalls(self, options)

    def __call__(self, *args, **named):
        self.calls += 1
        return self.function(*args, **named)

    def __getattr__(self, name):
        return getattr(self.function, name)

    def repeat(self, *args, **named):
        """Calls it several times; returns how many of these were left to tf.function."""
        before = self.calls
        for _ in range(8):
            result = self.quick(args, named)
            told, told_named = self.quick.told((args, named))
            tf2.nest.map_structure(
                np.testing.assert_array_equal, result, self.function(*told, **told_named)
            )
        return self.calls - before


def difference(a, b=2.0, *, scale=1):
    """A function in which the order of the arguments matters."""
    return {"value": (a - b) * scale, "none": None, "tuple": (a, b)}


X, Y = np.float32([1, 2]), np.float32([5, 7])


@pytest.mark.parametrize(
    "args, named",
    [
        ((tf2.constant(X), tf2.constant(Y)), {}),
        ((X, tf2.constant(Y)), {"scale": 3}),
        ((X, X), {}),
        ((X, float("nan")), {}),
        ((X,), {}),
        ((), {"b": tf2.constant(Y), "a": tf2.constant(X)}),
        ((), {"scale": tf2.constant(Y), "b": X, "a": tf2.constant(X)}),
    ],
)
def test_repeated_calls_are_quick(args, named):
    assert Counted(difference).repeat(*args, **named) == 4


def test_containers_of_tensors():
    features = {"z": X, "a": [tf2.constant(Y), (tf2.constant(X), 3)]}
    counted = Counted(lambda f: f["z"] - f["a"][0] * f["a"][1][0] * f["a"][1][1])
    assert counted.repeat(features) == 4
    assert counted.repeat(dict(reversed(features.items()))) == 0 and counted.traces == 1


@pytest.mark.parametrize(
    "options, args",
    [
        ({}, (tf2.Variable(X), X)),
        ({}, (X, np.float32(3))),
        ({"input_signature": [tf2.TensorSpec([2]), tf2.TensorSpec([2])]}, (X, Y)),
    ],
)
def test_other_arguments_are_left_to_tensorflow(options, args):
    assert Counted(lambda a, b: a - b, **options).repeat(*args) == 8


def test_a_tensor_as_default_is_left_to_tensorflow():
    assert Counted(lambda a, b=tf2.constant(Y): a - b).repeat(X) == 8


def test_other_types_shapes_and_values_are_traced_anew():
    counted = Counted(lambda a, b: a * b)
    calls = [(X, 1), (X, 2), (X.astype(np.int32), 1), (X[:1], 1), (X, tf2.constant(1.0))]
    for _ in range(2):
        for args in calls:
            counted.repeat(*args)
    assert counted.traces == len(calls)
    for args in calls:
        assert counted.repeat(*args) == 0


def test_gradients_of_quick_calls():
    counted = Counted(lambda a: a * a)
    x = tf2.constant(3.0)
    counted.repeat(x)
    with tf2.GradientTape() as tape:
        tape.watch(x)
        y = counted.quick((x,), {})
    assert float(tape.gradient(y, x)) == 6.0
    with tf2.autodiff.ForwardAccumulator(x, tf2.constant(1.0)) as forward:
        y = counted.quick((x,), {})
    assert float(forward.jvp(y)) == 6.0


def test_within_graphs_and_without_functions():
    counted = Counted(lambda a: a + 1.0)
    x = tf2.constant(3.0)
    counted.repeat(x)
    assert float(tf2.function(lambda a: counted.quick((a,), {}) * 2.0)(x)) == 8.0
    traces = counted.traces
    tf2.config.run_functions_eagerly(True)
    try:
        assert float(counted.quick((x,), {})) == 4.0 and counted.traces == traces + 1
    finally:
        tf2.config.run_functions_eagerly(False)


def checked(a):
    """Returns its argument, or an error if it is too large."""
    with tf2.control_dependencies([tf2.debugging.assert_less(a, 5.0, message="too large")]):
        return tf2.identity(a)


def test_errors_are_those_of_tensorflow():
    counted = Counted(checked)
    counted.repeat(tf2.constant(1.0))
    with pytest.raises(tf2.errors.InvalidArgumentError) as expected:
        counted.function(tf2.constant(9.0))
    calls = counted.calls
    with pytest.raises(tf2.errors.InvalidArgumentError) as found:
        counted.quick((tf2.constant(9.0),), {})
    assert counted.calls == calls and "too large" in str(found.value)
    assert found.value.message == expected.value.message


def test_new_shapes_between_many_calls_give_no_warning(monkeypatch):
    warnings = []
    monkeypatch.setattr(tf2.get_logger(), "warning", lambda *args: warnings.append(args))
    function = tf2.function(lambda a: a + 1.0, autograph=False)
    quick = QuickCalls(function, {})
    for size in range(1, 8):
        for _ in range(12):
            quick((np.ones(size, np.float32),), {})
    assert warnings == [] and function.experimental_get_tracing_count() == 7
    for size in range(8, 14):
        quick((np.ones(size, np.float32),), {})
    assert "triggered tf.function retracing" in str(warnings)


def test_variables_of_a_program_are_updated_by_quick_calls():
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


# -- which calls are the same


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
