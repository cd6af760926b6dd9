"""Runs cases in which a dimension has no elements; a process of its own, for test_size_zero."""

import sys

import numpy as np
import tensorflow.compat.v1 as tf

import mesh_tensorflow as mtf
from helpers.choices import choose
from mesh_tensorflow._core.operation import with_inner_operations
from mesh_tensorflow._core.shape import split_pairs
from mesh_tensorflow.testing import harness
from mesh_tensorflow.testing.cases import CASES, table
from mesh_tensorflow.testing.harness import Placing
from mesh_tensorflow.testing.programs import Program

PLACES = [
    harness.WHOLE,
    Placing("x:2", "b:x"),
    Placing("x:2,y:2", "a:y,b:x", apart=True, merge="device"),
    Placing("x:2,y:2", "a:y,b:x", simd=True),
    Placing("x:2,y:2", "a:x,b:y", simd=True),
]


def may_be(place, graph):
    """Whether a program can be laid out like this."""
    mesh = mtf.convert_to_shape(place.mesh)
    axes = mesh.dimension_names
    rules = {name: axes.index(axis) for name, axis in split_pairs(place.layout, "layout")}
    operations = list(with_inner_operations(graph.operations))
    fixed = {name for op in operations for name in op.unsplittable_dims}
    shapes = [tuple(t.shape) for op in operations for t in op.inputs + op.outputs]
    return not fixed & set(rules) and harness.is_legal(rules, shapes, mesh)


def run(name):
    """Compares a case with NumPy in several layouts; returns how many."""
    [case] = [case for case in CASES if case.name == name]
    with tf.Graph().as_default():
        program = Program(case, case.dtypes[0])
        places = [place for place in PLACES if may_be(place, program.graph)]
        with np.errstate(all="ignore"):
            expected = harness.as_list(case.oracle(*map(table.wide, program.arrays)))
        for lowered, values in program.run(places):
            for y, e in zip(values, expected):
                harness.assert_close(y, e, 1e-4, f"{name} {lowered.placing}")
            for i, g in zip(program.wrt, values[len(expected) :]):
                assert g.shape == program.arrays[i].shape, f"{name} {lowered.placing}"
                assert np.isfinite(g.astype(float)).all(), f"{name} {lowered.placing}"
    return len(places)


if __name__ == "__main__":
    choose()
    tf.disable_v2_behavior()
    for chosen in sys.argv[1:]:
        print(chosen, run(chosen), flush=True)
