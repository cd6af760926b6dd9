"""Programs for the tests of auto_mtf, from descriptions of their operations."""

import json

import tensorflow.compat.v1 as tf

import mesh_tensorflow as mtf
from helpers.oracle.random_graphs import random_program
from helpers.paths import FIXTURES

CLASSIC = json.loads((FIXTURES / "auto_mtf.json").read_text())


class AnyOperation(mtf.Operation):
    """An operation of given inputs and outputs; it cannot be lowered."""

    def __init__(self, inputs, outputs, mesh, name, unsplittable=()):
        super().__init__(inputs, mesh=mesh, name=name)
        self._outputs = [
            mtf.Tensor(self, mtf.convert_to_shape(shape), tf.as_dtype(dtype), index=i)
            for i, (shape, dtype) in enumerate(outputs)
        ]
        self._initialize_splittable_and_unsplittable_dims("splittable", unsplittable)


def build(operations):
    """Returns the graph, and its tensors by the names in the description.

    Args:
      operations: lists [name, input names, [[shape, dtype], ...], names not to be split].
    """
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")
    tensors = {}
    for name, inputs, outputs, unsplittable in operations:
        made = AnyOperation([tensors[t] for t in inputs], outputs, mesh, name, unsplittable)
        assert made.name == name
        tensors.update({f"{name}:{i}": t for i, t in enumerate(made.outputs)})
    return graph, tensors


def classic_program(name):
    """Returns (graph, outputs, what the classic says) of a program of the fixture."""
    facts = CLASSIC[name]
    if "operations" in facts:
        operations, outputs = facts["operations"], facts["outputs"]
    else:
        operations, outputs, _ = random_program(int(name.removeprefix("random")))
    graph, tensors = build(operations)
    return graph, [tensors[t] for t in outputs], facts


def two_products():
    """Returns (graph, outputs): X [a, b], Y [b, c], and their products Z [a, c] and W [b, c]."""
    graph, tensors = build(
        [
            ["X", [], [["a:4,b:6", "int32"]], []],
            ["Y", [], [["b:6,c:8", "int32"]], []],
            ["Z", ["X:0", "Y:0"], [["a:4,c:8", "int32"]], []],
            ["W", ["X:0", "Y:0"], [["b:6,c:8", "int32"]], []],
        ]
    )
    return graph, [tensors["Z:0"]]
