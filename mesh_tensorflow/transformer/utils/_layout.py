"""The layout of one program, from a layout that is shared by many models and meshes."""

from __future__ import annotations

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow._core.errors import did_you_mean, slip
from mesh_tensorflow._lowering.checks import rules_that_apply
from mesh_tensorflow.transformer.attention._sharding import names_lent

__all__ = ["layout_of_program"]

# Dimensions that only some models have, or only training or decoding.
_OF_MODELS = frozenset(
    "batch outer_batch ensemble length memory_length d_model d_ff d_kv heads memory_heads vocab "
    "experts expert_hidden beam buckets max_length inner_vocab frequent_vocab n_keys "
    "residual_length attention_heads stages".split()
)
# `tpu_mesh_shape` omits these if their size is 1.
_OF_MESHES = frozenset(["ensemble", "batch", "model"])


def _check_names(layout_rules: mtf.LayoutRules, graph: mtf.Graph) -> None:
    """Reports a slip if a rule's dimension is in attention only because it is in the layout."""
    own = {
        name
        for op in graph.operations
        if isinstance(op, (mtf.Variable, mtf.ImportOperation))
        for x in op.outputs
        for name in x.shape.dimension_names
    }
    for tensor_dim, mesh_dim in layout_rules.pairs:
        if tensor_dim in names_lent(graph) - own - _OF_MODELS:
            slip(
                f"layout rule {tensor_dim}:{mesh_dim} splits attention alone: no variable and no "
                f"input of the model has {tensor_dim!r}. They have {', '.join(sorted(own))}"
                f"{did_you_mean(tensor_dim, own)} Correct the rule or leave it out",
                key=f"lent/{tensor_dim}:{mesh_dim}",
            )


def layout_of_program(
    layout_rules: mtf.LayoutRules, graph: mtf.Graph, mesh_shape: mtf.Shape
) -> mtf.LayoutRules:
    """Removes layout rules for dimensions that only other models or meshes have.

    A remaining rule that splits nothing is a slip; so is one that splits attention alone, which
    takes over any name that the layout has.

    Args:
      layout_rules: LayoutRules.
      graph: the program.
      mesh_shape: a Shape.
    """
    _check_names(layout_rules, graph)
    return rules_that_apply(layout_rules, graph.operations, mesh_shape, _OF_MODELS, _OF_MESHES)
