"""Layers of experts in a Context, and what tests of them share."""

import types

import tensorflow.compat.v1 as tf

import mesh_tensorflow as mtf
from helpers.layer_runs import dims, numbers
from helpers.transformer.decoding_models import imported, prefixes
from mesh_tensorflow.testing.harness import WHOLE
from mesh_tensorflow.transformer import moe, transformer

FLOAT = mtf.VariableDType(tf.float32)
SMALL = {"num_experts": 4, "hidden_size": 8}
DETERMINED = {
    "second_policy_train": "all", "second_policy_eval": "all",
    "switch_policy_train": "argmax", "switch_policy_eval": "argmax",
}  # fmt: skip
ROOMY = {"capacity_factor_train": 8.0, "capacity_factor_eval": 8.0}
TOKENS = "batch:4,length:8"


def context_for(mesh, placing=WHOLE, mode="train", sequence_id=1, **kwargs):
    model = types.SimpleNamespace(
        layout=mtf.convert_to_layout_rules(placing.layout),
        mesh_shape=mtf.convert_to_shape(placing.mesh),
        model_dim=mtf.Dimension("d_model", 8), ensemble_dim=None, ensemble_dims=[],
    )  # fmt: skip
    batch, length = dims(TOKENS)
    return transformer.Context(
        model, mesh, [batch], length, FLOAT, mode=mode, losses=[], sequence_id=sequence_id, **kwargs
    )


def given(mesh, text, seed=0):
    return mtf.import_tf_tensor(mesh, tf.constant(numbers(text, seed)), mtf.convert_to_shape(text))


def trained(layer, placing=WHOLE, padded=True, **kwargs):
    """Returns a function of a mesh: a layer's output, its loss, and gradients."""

    def build(mesh):
        x = given(mesh, TOKENS + ",d_model:8")
        ids = imported(mesh, prefixes((8, 3, 5, 0), seed=2)) if padded else None
        sequence_id = None if ids is None else mtf.minimum(ids, 1)
        context = context_for(mesh, placing, sequence_id=sequence_id, **kwargs)
        y = layer().call(context, x)
        [loss] = context.losses
        variables = mesh.graph.trainable_variables
        target = given(mesh, TOKENS + ",d_model:8", 1)
        total = mtf.reduce_sum(y * target) + loss
        grads = mtf.gradients([total], [x] + [v.value for v in variables])
        return {
            "y": y,
            "loss": loss,
            "x": grads[0],
            **{v.name: g for v, g in zip(variables, grads[1:])},
        }

    return build


def two_levels(**kwargs):
    policies = {"second_policy_train": "all", "second_policy_eval": "all"}
    return moe.MoE2D(
        **{
            "expert_x": 2,
            "expert_y": 2,
            "capacity_factor_second_level": 8.0,
            **policies,
            **ROOMY,
            **kwargs,
        }
    )
