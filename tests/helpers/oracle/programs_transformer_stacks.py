"""Programs: stacks of layers and sublayers of transformers; language models of the usual layers; T5."""

import functools

from helpers.oracle.model_harness import (
    CHANNELS,
    DELIMITED,
    PACKED,
    POSITIONS,
    Mix,
    bitransformer,
    given,
    language_model,
    sequence_to_sequence,
    stack,
    usual_layers,
)
from helpers.oracle.oracle_runner import table
from mesh_tensorflow.transformer import transformer as T

TRANSFORMER_STACKS, model = table("batch:x,vocab:y", gradients=False, tolerance=1e-4)


@model()
def layer_losses(p):
    return language_model(p, layer_stack=stack(layers=[(Mix, {"loss": 0.5})]))


@model()
def names_in_blocks(p):
    layers = [Mix, (Mix, "mix"), [Mix, {"loss": 0.1}], [Mix, "last", {"loss": 0.2}]]
    return language_model(p, layer_stack=stack(layers=layers))


@model()
def names_without_blocks(p):
    """The second block uses the variables of the first for the layers that have a name."""
    return language_model(p, layer_stack=stack(layers=[Mix, (Mix, "mix")], block_scope=False))


@model(CHANNELS)
def legacy(p):
    return language_model(p, layer_stack=stack(dropout_rate=0.0, norm_epsilon=1e-3))


@model()
def recomputed(p):
    return language_model(p, layer_stack=stack(recompute_grads=True))


@model()
def reversible(p):
    return language_model(p, layer_stack=stack(cls=T.ReversibleLayerStack, num_layers=3))


@model()
def reversible_recomputed(p):
    return language_model(
        p, layer_stack=stack(cls=T.ReversibleLayerStack, num_layers=3, recompute_grads=True)
    )


@model(CHANNELS)
def sublayers(p):
    """All that are not random."""
    return language_model(
        p,
        layer_stack=stack(
            sublayers_initial=[T.sublayer_true_layer_norm, T.sublayer_mask_padding],
            sublayers_per_layer=[
                T.sublayer_scale_norm,
                functools.partial(T.sublayer_rms_norm, epsilon=0.1, name="inner_norm"),
                T.sublayer_call_layer,
                functools.partial(T.sublayer_rezero, initial_value=0.5),
                T.sublayer_residual,
                T.sublayer_clip_activation_gradient,
            ],
            sublayers_final=[T.sublayer_legacy_final_rms_norm],
        ),
    )


@model("batch:x,length:y")
def sublayer_of_some_channels(p):
    some = functools.partial(T.sublayer_rms_norm_subsampled, percentage=40.0)
    return language_model(p, layer_stack=stack(sublayers_final=[T.sublayer_rms_norm_subsampled, some]))


RELATIVE = {"relative_attention_type": "bias_shared", "relative_attention_num_buckets": 8}
SPLIT_HEADS = "batch:x,heads:y,d_ff:y,vocab:y"


@model(SPLIT_HEADS, "batch:x,d_model:y")
def attention_lm(p):
    return language_model(p, layer_stack=stack(layers=usual_layers(False)))


@model("batch:x,heads:y")
def attention_delimited_lm(p):
    return language_model(
        p, targets=given(p, DELIMITED), input_full_attention=True, loss_on_targets_only=True,
        layer_stack=stack(layers=usual_layers(False)),
    )


@model(SPLIT_HEADS)
def attention_packed_lm(p):
    call = {"sequence_id": given(p, PACKED), "position": given(p, POSITIONS)}
    layers = usual_layers(False, relative_attention_type="bias", relative_attention_num_buckets=8)
    return language_model(p, call=call, layer_stack=stack(layers=layers))


@model()
def attention_reversible(p):
    layers = usual_layers(False, **RELATIVE)
    return language_model(p, layer_stack=stack(cls=T.ReversibleLayerStack, layers=layers, num_layers=1))


@model("ensemble:x,heads:y")
def attention_ensemble(p):
    return language_model(p, ensemble=2, layer_stack=stack(layers=usual_layers(False)))


@model(SPLIT_HEADS, "batch:x,length:y")
def t5(p):
    """With the names of its checkpoints."""
    sides = [
        {
            "layer_stack": stack(layers=usual_layers(d, **RELATIVE), dropout_rate=0.0, norm_epsilon=1e-6),
            "positional_embedding": False, "shared_embedding_and_softmax_weights": True,
        }
        for d in (False, True)
    ]
    return sequence_to_sequence(p, bitransformer(encoder=sides[0], decoder=sides[1]))
