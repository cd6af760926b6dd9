"""Runs a program of the table without sessions: eagerly, or in a tf.function.

Each training step builds the program again, with its variables in one store.
"""

import numpy as np
import tensorflow as tf2
import tensorflow.compat.v1 as tf

import mesh_tensorflow as mtf
from helpers.oracle import oracle_runner


def _build(name, program, mesh_shape, layout):
    """Returns a Case and its outputs."""
    case = oracle_runner.Case(name, mesh_shape, layout)
    outputs = dict(program.fn(case))
    if program.gradients:
        outputs.update(case.gradients(outputs))
    return case, {k: y for k, y in outputs.items() if y is not None}


def run(name, program, mesh_shape, layout, in_function):
    """Returns the values of a program, a dictionary of arrays as in the fixtures.

    Args:
      name: its name.
      program: a Program.
      mesh_shape, layout: where to run it.
      in_function: whether it is built and lowered in a tf.function, or eagerly.
    """
    store, counter = mtf.VariableStore(), tf.train.get_or_create_global_step()
    with store.scope():  # eagerly, which makes the variables
        case, _ = _build(name, program, mesh_shape, layout)
    counter.assign(case.feeds.get("global_step", 0))
    for v in case.graph.all_variables:
        if v.name in case.feeds:
            v.assign_to_master(tf.cast(case.feeds[v.name], v.master_dtype))

    def step():
        with store.scope():
            case, outputs = _build(name, program, mesh_shape, layout)
            lowering = mtf.Lowering(case.graph, {case.mesh: case.impl()})
            for op in case.update_ops:
                lowering.lowered_operation(op)
            return {k: lowering.export_to_tf_tensor(y) for k, y in outputs.items()}

    call = tf2.function(step, autograph=False) if in_function else step
    before = {key: store.value(key) for key in store.names}
    values = call()
    if program.steps:
        for key, value in before.items():
            store.assign(key, value)
        history = []
        for _ in range(program.steps):
            history.append(call()["loss"])
            counter.assign_add(1)
        values["history"] = np.array(history, "float32")
        values.update({"after/" + key: store.value(key) for key in store.names})
        values["after/global_step"] = counter
    return {
        k: oracle_runner.stored(v.numpy() if hasattr(v, "numpy") else v) for k, v in values.items()
    }
