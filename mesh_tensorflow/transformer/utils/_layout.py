"""The layout of one program, from a layout that is shared by many models and meshes."""

from __future__ import annotations

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow._lowering.layout_slips import rules_that_apply

__all__ = ["layout_of_program"]

# Dimensions that only some models have, or only training or decoding.
_OF_MODELS = frozenset(
    "batch outer_batch ensemble length memory_length d_model d_ff d_kv heads memory_heads vocab "
    "experts expert_hidden beam buckets max_length inner_vocab frequent_vocab n_keys".split()
)
# `tpu_mesh_shape` omits these if their size is 1.
_OF_MESHES = frozenset(["ensemble", "batch", "model"])


def layout_of_program(
    layout_rules: mtf.LayoutRules, graph: mtf.Graph, mesh_shape: mtf.Shape
) -> mtf.LayoutRules:
    """Removes layout rules for dimensions that only other models or meshes have.

    A remaining rule that splits nothing is a slip.

    Args:
      layout_rules: LayoutRules.
      graph: the program.
      mesh_shape: a Shape.
    """
    return rules_that_apply(layout_rules, graph.operations, mesh_shape, _OF_MODELS, _OF_MESHES)
