"""Checks of the MNIST example: that a layout and a checkpoint fit its network."""

from __future__ import annotations

from typing import Any

import tensorflow.compat.v1 as tf

import mesh_tensorflow as mtf


def check_layout(graph: mtf.Graph, mesh_impl: Any) -> None:
    """Raises ValueError if the layout names a tensor dimension that is not in the network."""
    known = {d.name for op in graph.operations for x in op.outputs for d in x.shape}
    for mesh_dim in mesh_impl.shape:
        rules = mesh_impl.layout_rules
        for name in rules.mesh_dimension_name_to_tensor_dimension_names(mesh_dim.name):
            if name not in known:
                raise ValueError(
                    f"--layout splits {name!r} over {mesh_dim.name!r}, but the network has no "
                    f"dimension {name!r}: it has {', '.join(sorted(known))}"
                )


def check_checkpoint(model_dir: str) -> None:
    """Raises ValueError if the latest checkpoint is from another network or optimizer."""
    path = tf.train.latest_checkpoint(model_dir)
    if path is None:
        return
    saved = dict(tf.train.list_variables(path))
    expected = {v.op.name: v.shape.as_list() for v in tf.global_variables()}
    for name, shape in expected.items():
        if saved.get(name) != shape:
            found = f"of shape {saved[name]}" if name in saved else "not there"
            raise ValueError(
                f"{path} is of another network: {name} should be of shape {shape}, but is {found}. "
                "Pass the --hidden_size and --optimizer of then, or another --model_dir"
            )
