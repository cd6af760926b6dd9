"""Runs calls, and says what came out as JSON: a value's type, shape, dtype and numbers, or an error."""

import linecache
import os
import re
import warnings
import zlib

import numpy as np
import tensorflow.compat.v1 as tf

import mesh_tensorflow as mtf
from helpers.oracle.calls.call_environment import Environment

# Of datasets, how many elements to look at; of arrays, how many entries.
ELEMENTS, ENTRIES = 8, 24


class Random:
    """Wraps a result of which only the shapes and types are compared."""

    def __init__(self, value):
        self.value = value


def number(value):
    """Returns a number for JSON, rounded so that two machines agree."""
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    if isinstance(value, (int, np.integer)):
        return int(value)
    value = float(value)
    if not np.isfinite(value):
        return str(value)
    return float(f"{value:.5g}") if abs(value) > 1e-6 else 0.0


def array(value):
    """Returns [dtype, shape, entries] of a NumPy array or number."""
    value = np.asarray(value)
    if value.dtype == object:
        entries = [v.decode("utf-8", "replace") if isinstance(v, bytes) else str(v) for v in value.reshape(-1)]
        return ["text", list(value.shape), entries[:ENTRIES]]
    flat = value.reshape(-1)
    if value.dtype.kind not in "iufb":
        name = value.dtype.name
        flat = flat.astype("float32") if name == "bfloat16" else flat
    if flat.dtype.kind in "SU":
        return ["text", list(value.shape), [str(v) for v in flat[:ENTRIES]]]
    entries = [number(v) for v in flat[:ENTRIES]]
    if flat.size > ENTRIES:
        entries.append(number(np.linalg.norm(flat.astype("float64"))))
    return [value.dtype.name, list(value.shape), entries]


def bare(name):
    """Returns the name of an operation without what makes it unique."""
    return re.sub(r"_\d+$", "", str(name))


class Describer:
    """Describes a result in two passes: one finds what a session has to compute, one formats."""

    def __init__(self, lowering=None):
        self.lowering = lowering
        self.fetches, self.values = {}, {}
        self.numbers = True

    def fetch(self, key, make):
        """Returns the number of a tf.Tensor, None in the first pass."""
        if not self.numbers:
            return None
        if key in self.values:
            return array(self.values[key])
        if key not in self.fetches:
            self.fetches[key] = make()
        return None

    def __call__(self, value):
        for types, describe in self.table():
            if isinstance(value, types):
                return describe(value)
        if callable(value):
            return "a function" if hasattr(value, "__code__") else "callable " + type(value).__name__
        return "a " + type(value).__name__

    def table(self):
        return [
            (Random, self.random),
            (type(None), lambda v: None),
            ((bool, np.bool_), bool),
            ((int, float, np.integer, np.floating), number),
            (str, lambda v: v),
            (bytes, lambda v: {"bytes": v.decode("utf-8", "replace")}),
            (mtf.Dimension, lambda v: f"Dimension {v.name}={v.size}"),
            (mtf.Shape, lambda v: v.to_string),
            (mtf.Tensor, self.tensor),
            (mtf.Variable, lambda v: {"variable": [v.name, v.shape.to_string, self(v.dtype)]}),
            (mtf.Operation, self.operation),
            (mtf.VariableDType, lambda v: {
                "dtypes": [v.master_dtype.name, v.slice_dtype.name, v.activation_dtype.name]}),
            (mtf.TensorLayout, lambda v: {"layout": list(v.tensor_axis_to_mesh_axis)}),
            (mtf.LayoutRules, lambda v: {"rules": sorted(map(str, v._pairs))}),
            (dict, lambda v: {str(k): self(v[k]) for k in v}),
            ((set, frozenset), lambda v: {"set": sorted(str(self(e)) for e in v)}),
            (tuple, lambda v: {"tuple": [self(e) for e in v]}),
            (list, lambda v: [self(e) for e in v]),
            (tf.data.Dataset, self.dataset),
            (tf.DType, lambda v: {"dtype": v.name}),
            (tf.TensorShape, lambda v: {"TensorShape": str(v)}),
            (tf.Variable, lambda v: {"tf.Variable": [v.op.name, str(v.shape), v.dtype.base_dtype.name]}),
            (tf.Tensor, lambda v: {"tf": [v.dtype.name, self.fetch(("tf", v.name), lambda: v)]}),
            (tf.Operation, lambda v: {"tf.Operation": v.type}),
            (np.ndarray, lambda v: {"array": array(v)}),
            ((type, np.dtype), lambda v: "type " + getattr(v, "__name__", str(v))),
        ] + self.laid_out()

    def laid_out(self):
        """Slices of a mesh implementation."""
        kinds = (mtf.placement_mesh_impl.PlacementMeshImpl.LaidOutTensor,)
        return [(kinds, lambda v: {"slices": [self(t) for t in v.tensor_list]})]

    def random(self, value):
        outer, self.numbers = self.numbers, False
        try:
            return {"random": self(value.value)}
        finally:
            self.numbers = outer

    def tensor(self, value):
        found = [value.shape.to_string, value.dtype.name,
                 bare(value.operation.name), type(value.operation).__name__]
        return {"Tensor": found, "value": self.fetch(
            ("mtf", id(value)), lambda: self.lowering(value.graph).export_to_tf_tensor(value))}

    def operation(self, value):
        found = [type(value).__name__, bare(value.name), [self(t) for t in value.outputs]]
        return {"operation": found}

    def dataset(self, value):
        if ("data", id(value)) not in self.values:
            iterator = tf.data.make_one_shot_iterator(value)
            self.fetches[("data", id(value))] = iterator.get_next()
            return None
        return {"dataset": [{k: array(e) for k, e in element.items()} if isinstance(element, dict)
                            else array(element) for element in self.values["data", id(value)]]}


def seeded(name, shape):
    """Returns numbers for a variable, by its name."""
    return 0.5 * np.random.RandomState(zlib.crc32(name.encode())).normal(size=shape)


class Failed(Exception):
    """An error with the moment at which it came."""

    def __init__(self, when, error):
        super().__init__(when, error)
        self.when, self.error = when, error


def stage(when, fn):
    """Returns fn(); its error becomes a `Failed` that says when it came."""
    try:
        return fn()
    except (Exception, SystemExit) as e:
        raise Failed(when, e) from e


class Lowerings:
    """Lowers each graph once, when a Tensor of it is to be exported, on one processor."""

    def __init__(self, environment):
        self.environment, self.made = environment, {}

    def __call__(self, graph):
        if graph not in self.made:
            given = self.environment.get("lowering")
            if given is None or graph is not self.environment.get("graph"):
                meshes = {op.mesh for op in graph.operations} | {
                    m for m in self.environment.values() if isinstance(m, mtf.Mesh)}
                given = mtf.Lowering(graph, {
                    m: mtf.placement_mesh_impl.PlacementMeshImpl("all:1", "", [""]) for m in meshes})
            self.made[graph] = given
        return self.made[graph]

    def after_filling(self, session):
        session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
        session.run([tf.assign(v, tf.cast(seeded(v.op.name, v.shape.as_list()), v.dtype.base_dtype))
                     for v in tf.global_variables() if v.dtype.base_dtype.is_floating])
        for lowering in self.made.values():
            session.run(lowering.copy_masters_to_slices())


def elements(session, fetch):
    """Returns the first elements of a data set."""
    found = []
    while len(found) < ELEMENTS:
        try:
            found.append(session.run(fetch))
        except tf.errors.OutOfRangeError:
            break
    return found


def evaluate(call):
    """Returns the description of a call's result; raises Failed."""
    environment = Environment(random=Random)
    code = stage("text", lambda: compile(call, "<call>", "eval"))
    stage("environment", lambda: environment.prepare(code))
    value = stage("call", lambda: eval(code, environment))
    lowerings = Lowerings(environment)
    describe = Describer(lowerings)
    found = stage("lower", lambda: describe(value))
    if describe.fetches:
        def compute():
            with tf.Session() as session:
                lowerings.after_filling(session)
                data = {k: t for k, t in describe.fetches.items() if k[0] == "data"}
                rest = {k: t for k, t in describe.fetches.items() if k[0] != "data"}
                describe.values = session.run(rest)
                describe.values.update({k: elements(session, t) for k, t in data.items()})
        stage("run", compute)
        found = describe(value)
    made = sorted([v.op.name, v.shape.as_list()] for v in tf.global_variables())
    return {"value": found, **({"variables": made} if made else {})}


def is_declared(error):
    """Whether the package itself raises this error, rather than Python or TensorFlow within it."""
    at = error.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    if at is None:
        return False
    path = at.tb_frame.f_code.co_filename
    line = linecache.getline(path, at.tb_lineno).strip()
    return f"{os.sep}mesh_tensorflow{os.sep}" in path and line.startswith("raise")


def outcome(call):
    """Returns what a call gives.

    Returns:
      {"value": a description, "variables": ...}, or {"error": names of its type and the bases,
      "when": a moment, "declared": whether the package raises it, "text": what it says}.
    """
    with tf.Graph().as_default(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tf.set_random_seed(1)
        try:
            return evaluate(call)
        except Failed as failed:
            error = failed.error
            names = [t.__name__ for t in type(error).__mro__ if t not in (object, BaseException)]
            return {"error": names, "when": failed.when, "declared": is_declared(error),
                    "text": str(error)[:200]}
