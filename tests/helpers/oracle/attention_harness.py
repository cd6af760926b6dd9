"""Layers of attention in a Context: what the programs of `programs_transformer_*` run."""

import types

import numpy as np
import tensorflow.compat.v1 as tf

import mesh_tensorflow as mtf
from helpers.oracle.oracle_runner import dims, with_variables
from mesh_tensorflow.transformer import transformer

BATCH, LENGTH, MEMORY, DEPTH = 2, 6, 5, 8
SMALL = {"num_heads": 2, "key_value_size": 4}
PACKED = [[1, 1, 1, 2, 2, 0], [1, 1, 2, 2, 2, 2]]
ENCODED = [[1, 1, 2, 2, 0], [1, 1, 1, 2, 2]]


def integers(p, values, shape):
    return mtf.import_tf_tensor(
        p.mesh, tf.constant(np.array(values), tf.int32), mtf.convert_to_shape(shape)
    )


def model_for(p, autoregressive, ensemble):
    """Returns what layers know of a model."""
    ensemble_dims = dims(f"ensemble:{ensemble}") if ensemble else []
    return types.SimpleNamespace(
        model_dim=mtf.Dimension("d_model", DEPTH), autoregressive=autoregressive,
        fully_autoregressive=autoregressive, ensemble_dims=ensemble_dims,
        ensemble_dim=ensemble_dims[0] if ensemble else None, input_vocab_size_unpadded=12,
        layout=p.layout, mesh_shape=p.mesh_shape,
    )  # fmt: skip


def context_for(
    p,
    mode="eval",
    autoregressive=True,
    packed=False,
    encoder=False,
    ensemble=None,
    dtype=None,
    **kwargs,
):
    """Returns a Context."""
    [batch], [length] = dims(f"batch:{BATCH}"), dims(f"length:{LENGTH}")
    model = model_for(p, autoregressive, ensemble)
    dtype = dtype or mtf.VariableDType(tf.float32)
    priority = mtf.range(p.mesh, length, tf.int32) if autoregressive else None
    options = {
        "model": model, "mesh": p.mesh, "batch_dims": [*model.ensemble_dims, batch], "length_dim": length,
        "variable_dtype": dtype, "mode": mode, "position": mtf.range(p.mesh, length, tf.int32),
        "position_is_default": True, "losses": [], "write_priority": priority, "read_priority": priority,
        "new_states": [], "constant_states": [],
    }  # fmt: skip
    if packed:
        options["sequence_id"] = integers(p, PACKED, f"batch:{BATCH},length:{LENGTH}")
    if encoder:
        memory = p.input("encoder_output", f"batch:{BATCH},memory_length:{MEMORY},d_model:{DEPTH}")
        options["encoder_output"] = mtf.cast(memory, dtype.activation_dtype)
        if packed:
            options["encoder_sequence_id"] = integers(
                p, ENCODED, f"batch:{BATCH},memory_length:{MEMORY}"
            )
    return transformer.Context(**{**options, **kwargs})


def in_order(state):
    """Returns a state as [batch, memory_length, heads, channels]: its order is of no concern."""
    first = [d for name in ("batch", "memory_length") for d in state.shape.dims if d.name == name]
    rest = sorted(
        (d for d in state.shape.dims if d not in first), key=lambda d: d.name, reverse=True
    )
    return mtf.transpose(state, mtf.Shape(first + rest))


def outputs_of(p, layer, context):
    """Returns the output of a layer, its states and its losses."""
    shape = f"batch:{BATCH},length:{LENGTH},d_model:{DEPTH}"
    if context.mode == "incremental":
        shape = f"batch:{BATCH},d_model:{DEPTH}"
    if context.model.ensemble_dim:
        shape = f"ensemble:{context.model.ensemble_dim.size}," + shape
    x = mtf.cast(p.input("x", shape), context.activation_dtype)
    outputs = {"y": layer.call(context, x)}
    outputs.update({f"state{i}": in_order(s) for i, s in enumerate(context.new_states)})
    outputs.update({f"loss{i}": loss for i, loss in enumerate(context.losses or [])})
    return outputs


def whole(p, layer, **kwargs):
    return with_variables(p, outputs_of(p, layer, context_for(p, **kwargs)))


def step(p, layer, states, **kwargs):
    """Returns the output of a layer for one position after others, and its new states."""
    position = integers(p, [2, 4], f"batch:{BATCH}")
    context = context_for(
        p, mode="incremental", position=position, position_is_default=False, read_priority=position,
        sequence_id=1, states=[p.input(f"state{i}", s) for i, s in enumerate(states)], **kwargs,
    )  # fmt: skip
    return with_variables(p, outputs_of(p, layer, context))


KEYS = f"batch:{BATCH},memory_length:{LENGTH},heads:2,d_kv:4"
NO_GRADIENTS = {"gradients": False}


def made_once(p, layer, *shapes, **kwargs):
    """Returns a step of decoding with constant states of the encoder."""
    states = [p.input(f"constant{i}", s) for i, s in enumerate(shapes)]
    [memory] = dims(f"memory_length:{MEMORY}")
    return step(
        p, layer, [], encoder=True, packed=True, constant_states=[(*states, memory)], **kwargs
    )


MEMORY_KEYS = f"batch:{BATCH},memory_length:{MEMORY},heads:2,d_kv:4"
