"""Programs: mixtures of experts, with every gating that draws no random numbers."""

import types

import tensorflow.compat.v1 as tf

import mesh_tensorflow as mtf
from helpers.oracle.oracle_runner import dims, table, with_variables
from mesh_tensorflow.transformer import heterogeneous_moe, moe, transformer

TRANSFORMER_MOE, program = table("batch:x,experts:x", "batch:x,experts:x,expert_hidden:y,d_model_split:y")

SMALL = {"num_experts": 4, "hidden_size": 8, "group_size": 8}
CHOICES = {
    "second_policy_train": "all",
    "second_policy_eval": "all",
    "switch_policy_train": "argmax",
    "switch_policy_eval": "argmax",
}


# The number of groups depends on these; given to a model, they have it the same on one processor.
SPLIT = ("batch:x,outer_batch:y,experts:x,expert_x:x,expert_y:y", "x:2,y:2")


def context_for(p, x, mode="eval", sequence_id=None, split=None, **kwargs):
    """Returns a Context of a model that has nothing but its layout."""
    layout, mesh_shape = split or (p.layout, p.mesh_shape)
    model = types.SimpleNamespace(
        layout=mtf.convert_to_layout_rules(layout),
        mesh_shape=mtf.convert_to_shape(mesh_shape),
        model_dim=mtf.Dimension("d_model", 8),
        ensemble_dim=None,
        ensemble_dims=[],
    )
    context = transformer.Context(
        model, p.mesh, [d for d in x.shape.dims if "batch" in d.name], mtf.Dimension("length", 8),
        mtf.VariableDType(tf.float32, tf.float32, x.dtype), mode=mode, losses=[],
        sequence_id=sequence_id, **kwargs,
    )  # fmt: skip
    context.layer_index = 0
    return context


def call(p, layer, shape="batch:4,length:8,d_model:8", padded=True, embedded=False, **kwargs):
    """Calls a layer; returns its output, its loss, and gradients for variables."""
    x = p.input("x", shape)
    ids = 1
    if padded and "length" in shape:
        tokens = mtf.Shape(x.shape.dims[:-1]).to_string[6:-1].replace("=", ":").replace(" ", "")
        ids = p.input("ids", tokens, 4)
    context = context_for(p, x, sequence_id=ids, **kwargs)
    if embedded:
        context.input_embeddings = p.input("embeddings", shape)
    y = layer.call(context, x)
    outputs = {"loss": context.losses[0]}
    outputs.update({f"y{i}": z for i, z in enumerate(y)} if isinstance(y, list) else {"y": y})
    return with_variables(p, outputs)


def add(name, *layouts, layer=moe.MoE1D, gradients=True, run=None, tolerance=1e-5, **kwargs):
    def fn(p):
        return call(p, layer(**{**(SMALL | CHOICES if layer is not moe.MoE2D else {}), **kwargs}), **(run or {}))

    fn.__name__ = name
    program(*layouts, gradients=gradients, tolerance=tolerance)(fn)


for _gating in ("top_2", "top_n", "switch", "ntlb", "switch_max", "expert_selection"):
    add(f"moe_{_gating}", moe_gating=_gating, ntlb_top_k=2)
    add(
        f"moe_{_gating}_train", "batch:x,experts:y", moe_gating=_gating, z_loss=0.1, loss_coef=0.3,
        capacity_factor_train=0.8, min_expert_capacity=1, group_size=16,
        run={"mode": "train", "num_microbatches": 2},
    )  # fmt: skip

add("moe_threshold", "", second_policy_eval="threshold", second_threshold_eval=0.49, use_second_place_loss=True)
add("moe_none", "", second_policy_eval="none", activation=["gelu", "linear"])
add("moe_top_n_4", "", moe_gating="top_n", top_n_num_experts_per_token=4, use_second_place_loss=True)
add("moe_top_n_2", "", moe_gating="top_n", top_n_num_experts_per_token=2)
add("moe_top_n_1", "", moe_gating="top_n", top_n_num_experts_per_token=1, gradients=False)
add("moe_few_places", "experts:x", capacity_factor_eval=0.5, min_expert_capacity=1, group_size=32)
add("moe_few_places_split", "batch:x,experts:x", capacity_factor_eval=0.5, min_expert_capacity=1, group_size=32, run={"split": SPLIT})
add("moe_unpadded", "", moe_gating="switch", run={"padded": False})
add("moe_output_dim", "batch:x,out:y", output_dim=mtf.Dimension("out", 4), moe_gating="switch")
add("moe_for_attention", "batch:x,heads:y", output_dim=mtf.Dimension("heads", 4), moe_gating="switch", use_experts_attention=True)
for _mode in ("add", "concat", "add_stop_grad", "concat_stop_grad", "embed_only"):
    add(f"moe_embeddings_{_mode}", "", word_embed_mode=_mode, run={"embedded": True})
for _gating in ("top_2", "switch", "ntlb", "top_n"):
    add(f"moe_decoding_{_gating}", "experts:x", moe_gating=_gating, gradients=False, run={"shape": "batch:4,d_model:8", "mode": "incremental"})
add("moe_beams", "experts:y", gradients=False, run={"shape": "batch:4,beam:2,d_model:8", "mode": "incremental"})
add("moe_outer_batch", "outer_batch:x,batch:y,experts:y", run={"shape": "outer_batch:2,batch:2,length:8,d_model:8"}, gradients=False)


def _moe_2d(p, shape="batch:4,length:8,d_model:8", train=False, num_microbatches=1, split=None, **kwargs):
    """The classic's MoE2D lacks hyperparameters, so they are given here."""
    hparams = moe.HParams(
        moe_gating="top_2", moe_num_experts=[2, 2], moe_hidden_size=8, moe_group_size=8,
        moe_capacity_factor_train=1.25, moe_capacity_factor_eval=2.0, moe_loss_coef=0.1,
        moe_capacity_factor_second_level=1.0, moe_use_second_place_loss=False,
        moe_second_policy_train="all", moe_second_policy_eval="all", moe_z_loss=None,
        moe_second_threshold_train=0.2, moe_second_threshold_eval=0.2,
        moe_min_expert_capacity=4, moe_word_embed_mode=None, moe_dropout_rate=0.0,
    )  # fmt: skip
    for k, v in kwargs.items():
        hparams.add_hparam(f"moe_{k}", v)
    x = p.input("x", shape)
    layout, mesh_shape = split or (p.layout, p.mesh_shape)
    tokens = mtf.Shape(x.shape.dims[:-1])
    nonpadding = mtf.cast(mtf.not_equal(p.input("ids", tokens, 4), 0), tf.float32)
    y, loss = moe.transformer_moe_layer_v2(
        x, dims("out:4")[0], hparams, train, mtf.VariableDType(tf.float32),
        mtf.convert_to_layout_rules(layout), mtf.convert_to_shape(mesh_shape),
        nonpadding=nonpadding, num_microbatches=num_microbatches,
    )  # fmt: skip
    return with_variables(p, {"y": y, "loss": loss})


@program("batch:x,expert_x:x,expert_y:y", "batch:x,expert_hidden:y")
def moe_2d(p):
    return _moe_2d(p)


@program("")
def moe_2d_train(p):
    return _moe_2d(p, train=True, num_microbatches=2, z_loss=0.1, use_second_place_loss=True)


@program("batch:x,outer_batch:y,expert_x:x,expert_y:y", gradients=False)
def moe_2d_few_places(p):
    return _moe_2d(
        p, "outer_batch:2,batch:2,length:8,d_model:8", min_expert_capacity=1,
        capacity_factor_eval=0.8, second_policy_eval="threshold", second_threshold_eval=0.45, split=SPLIT,
    )  # fmt: skip


MASKS = [
    {"layers": 2, "width": 4, "percent_number": 0.5},
    {"layers": 1, "width": 8, "percent_number": 0.5},
]
HETEROGENEOUS = heterogeneous_moe.HeterogeneousMoE1D
add("moe_heterogeneous", layer=HETEROGENEOUS)
add("moe_heterogeneous_layers", "batch:x,experts:x", layer=HETEROGENEOUS, moe_num_layers=3, activation=["gelu", "linear"])
add("moe_heterogeneous_masks", "batch:x,experts:x", layer=HETEROGENEOUS, heterogeneous_mask_info=MASKS, moe_gating="switch", hidden_size=1)
