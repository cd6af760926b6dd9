"""Runs one program in whichever package is installed, and says what came out.

A program is a function of a `Case`.  It makes inputs and variables through it and returns a
dictionary of mtf Tensors.  The same code runs in the classic release (make_fixtures.py) and in
this package (test_oracle.py); numbers come from generators seeded by names.
"""

import dataclasses
import re
import zlib

import numpy as np
import tensorflow.compat.v1 as tf

import mesh_tensorflow as mtf
from helpers.oracle import structure

MESH = "x:2,y:2"
# Further arguments of PlacementMeshImpl; test_oracle.py sets merge="none" too.
IMPL_ARGUMENTS = {}
# The classic has a slice for each processor; here that has to be asked for.
APART = {"merge": "none"} if hasattr(mtf, "VariableStore") else {}
IMPL_ARGUMENTS = dict(APART)
# What is stored of a larger array: this many entries, evenly spaced, and two sums.
MAX_STORED = 1024


@dataclasses.dataclass
class Program:
    """A program of the table.

    Attributes:
      fn: a function of a Case; returns a dictionary of mtf Tensors.
      layouts: layouts on a 2x2 mesh to run it with; it also runs on one processor.
      gradients: whether to differentiate each floating output by each floating input.
      steps: how many training steps to run, for a program that calls `Case.train`.
      tolerance: of values, relative to the largest of an array.
    """

    fn: object
    layouts: tuple
    gradients: bool = True
    steps: int = 0
    tolerance: float = 1e-5


def table(*default_layouts, **defaults):
    """Returns a dictionary of programs, and a decorator that puts a function into it.

    The decorator takes layouts, those of the table if none, and fields of `Program`.
    """
    programs = {}

    def program(*layouts, **kwargs):
        def decorate(fn):
            assert fn.__name__ not in programs
            programs[fn.__name__] = Program(
                fn, layouts or default_layouts, **{**defaults, **kwargs}
            )
            return fn

        return decorate

    return programs, program


def dims(text):
    """Returns the dimensions of "a:2,b:3"."""
    return mtf.convert_to_shape(text).dims


def with_variables(p, outputs):
    """Adds all variables to the inputs, by which outputs are differentiated, and fills them."""
    for v in p.graph.trainable_variables:
        p.inputs[v.name] = v.outputs[0]
    p.fill_variables()
    return outputs


def generator(*names):
    return np.random.RandomState(zlib.crc32("/".join(names).encode()))


def array(kind, sizes, *names):
    """Returns seeded numbers: "normal", "positive", "distinct", "bool", or n for integers < n."""
    rng = generator(*names)
    if kind == "normal":
        return rng.normal(size=sizes).astype("float32")
    if kind == "positive":
        return rng.uniform(0.3, 2.0, size=sizes).astype("float32")
    if kind == "distinct":
        count = int(np.prod(sizes))
        return (rng.permutation(count).reshape(sizes) / 4.0 - count / 8.0).astype("float32")
    if kind == "bool":
        return rng.uniform(size=sizes) > 0.5
    return rng.randint(kind, size=sizes).astype("int32")


def stored(value):
    """Returns what is kept of an array."""
    value = np.asarray(value)
    if value.dtype not in ("int32", "bool", "int64", "float32"):
        value = value.astype("float32")
    if value.size <= MAX_STORED:
        return value
    flat = value.reshape(-1).astype("float64")
    some = flat[:: -(-flat.size // MAX_STORED)]
    root = np.sqrt(flat.size)
    return np.concatenate([some, [flat.sum() / root, np.linalg.norm(flat) / root]]).astype(
        "float32"
    )


class Case:
    """One run of a program on one mesh."""

    def __init__(self, name, mesh_shape, layout):
        self.name = name
        self.mtf, self.tf = mtf, tf
        self.mesh_shape, self.layout = mesh_shape, layout
        self.size = mtf.Shape(mtf.convert_to_shape(mesh_shape).dims).size
        self.graph = mtf.Graph()
        self.mesh = mtf.Mesh(self.graph, "mesh")
        self.inputs = {}
        self.feeds = {}
        self.update_ops = []
        self.tf_outputs = {}
        self.notes = {}

    def input(self, name, shape, kind="normal"):
        """Returns an imported Tensor of seeded numbers."""
        shape = mtf.convert_to_shape(shape)
        value = array(kind, shape.to_integer_list, self.name, name)
        x = mtf.import_tf_tensor(self.mesh, tf.constant(value), shape)
        self.inputs[name] = x
        return x

    def variable(self, name, shape, kind="normal", scale=1.0, **kwargs):
        """Returns a variable whose initial values are seeded numbers."""
        shape = mtf.convert_to_shape(shape)
        value = scale * array(kind, shape.to_integer_list, self.name, name)
        x = mtf.get_variable(
            self.mesh, name, shape, initializer=tf.constant_initializer(value), **kwargs
        )
        self.inputs[name] = x
        return x

    def initial(self, name, sizes, scale=1.0):
        """Returns an initializer of seeded numbers for a variable that a layer makes."""
        return tf.constant_initializer(scale * array("normal", sizes, self.name, name))

    def fill_variables(self, scale=0.3):
        """Gives all variables made so far seeded initial values, by name."""
        for v in self.graph.all_variables:
            sizes = v.shape.to_integer_list
            self.feeds[v.name] = scale * array("normal", sizes, self.name, v.name)

    def gradients(self, outputs):
        """Returns gradients of each floating output for each floating input."""
        found = {}
        xs = {n: x for n, x in self.inputs.items() if x.dtype.is_floating}
        for key, y in outputs.items():
            if not y.dtype.is_floating or not xs:
                continue
            dy = array("normal", y.shape.to_integer_list, self.name, "dy", key)
            dy = mtf.import_tf_tensor(self.mesh, tf.cast(tf.constant(dy), y.dtype), y.shape)
            for (n, x), dx in zip(xs.items(), mtf.gradients([y], list(xs.values()), grad_ys=[dy])):
                found[f"d_{key}/d_{n}"] = dx
        return found

    def loss_gradients(self, loss):
        """Returns the gradients of a loss for all trainable variables, by name."""
        variables = self.graph.trainable_variables
        grads = mtf.gradients([loss], [v.outputs[0] for v in variables])
        return {f"d_{v.name}": g for v, g in zip(variables, grads)}

    def train(self, loss, make_optimizer):
        """Makes the update operations of a training step."""
        tf.train.get_or_create_global_step()
        grads = mtf.gradients([loss], [v.outputs[0] for v in self.graph.trainable_variables])
        optimizer = make_optimizer()
        self.update_ops = optimizer.apply_grads(grads, self.graph.trainable_variables)

    def impl(self):
        return mtf.placement_mesh_impl.PlacementMeshImpl(
            self.mesh_shape, self.layout, [""] * self.size, **IMPL_ARGUMENTS
        )


def master_names():
    return [[v.op.name, v.shape.as_list(), v.dtype.base_dtype.name] for v in tf.global_variables()]


def describe(y):
    """Returns the shape and the dtype of a Tensor, or None."""
    return y if y is None else [str(y.shape.to_string), y.dtype.name]


def made_by(y):
    """Returns the name, without its number, and the class of the operation that made a Tensor."""
    return [re.sub(r"_\d+$", "", y.operation.name), type(y.operation).__name__]


def run(name, program, mesh_shape, layout, feed_reads=False):
    """Returns (values, facts) of a program.

    In the classic release the updates of a training step may run before another update has
    read its inputs, on one processor nearly always.  With `feed_reads` every variable is read
    by the caller before a step and fed to it, so that the step is what its definition says.

    Returns:
      (a dictionary of arrays, a dictionary for JSON: outputs, names, counters, variables).
    """
    before = tf.resource_variables_enabled()
    if feed_reads:
        tf.enable_resource_variables()
    try:
        return _run(name, program, mesh_shape, layout, feed_reads)
    finally:
        if not before:
            tf.disable_resource_variables()


def _run(name, program, mesh_shape, layout, feed_reads):
    with tf.Graph().as_default():
        case = Case(name, mesh_shape, layout)
        outputs, structure_facts = structure.of(program, case)
        names = [k for k in outputs if not k.startswith("d_")]
        if program.gradients:
            outputs.update(case.gradients(outputs))
        facts = {
            "outputs": {k: describe(y) for k, y in outputs.items()},
            "names": {k: made_by(outputs[k]) for k in names},
            "structure": structure_facts,
        }
        outputs = {k: y for k, y in outputs.items() if y is not None}
        lowering = mtf.Lowering(case.graph, {case.mesh: case.impl()})
        fetches = {k: lowering.export_to_tf_tensor(y) for k, y in outputs.items()}
        fetches.update(case.tf_outputs)
        facts["counters"] = communication(lowering.counters)
        facts["variables"] = master_names()
        updates = [lowering.lowered_operation(op) for op in case.update_ops]
        if case.update_ops:
            with tf.control_dependencies(updates):  # which may have read the step
                updates.append(tf.assign_add(tf.train.get_or_create_global_step(), 1))
        fill = [
            tf.assign(v, tf.cast(case.feeds[v.op.name], v.dtype.base_dtype))
            for v in tf.global_variables()
            if v.op.name in case.feeds
        ]
        to_slices = lowering.copy_masters_to_slices()
        to_masters = lowering.copy_slices_to_masters()
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            session.run(tf.local_variables_initializer())
            session.run(fill)
            session.run(to_slices)
            values = session.run(fetches)
            if program.steps:
                history = []
                reads = variable_reads() if feed_reads else {}
                for _ in range(program.steps):
                    feed = {t: session.run(v) for t, v in reads.items()}
                    history.append(session.run([fetches["loss"], updates], feed)[0])
                values["history"] = np.array(history, "float32")
                session.run(to_masters)
                for v in tf.global_variables():
                    values["after/" + v.op.name] = session.run(v)
        facts.update(case.notes)
    return {k: stored(v) for k, v in values.items()}, facts


def variable_reads():
    """Returns the variable that each tf.Tensor of the graph reads, resource variables only."""
    graph = tf.get_default_graph()
    by_handle = {v.handle.op.name: v for v in tf.global_variables()}
    return {
        op.outputs[0]: by_handle[op.inputs[0].op.name]
        for op in graph.get_operations()
        if op.type == "ReadVariableOp"
        and op.inputs[0].op.name in by_handle
        and not any(c.type.startswith("Assign") for c in op.control_inputs)
    }


def communication(counters):
    """Returns the counters that say what moves and what convolutions compute, summed by name."""
    result = {}
    for key, value in counters:
        if not key.startswith(("output", "einsum")):
            result[key] = result.get(key, 0) + int(value)
    return result
