"""One layer of attention at a time: for whole sequences, and position by position."""

import types

import numpy as np
import tensorflow.compat.v1 as tf

import mesh_tensorflow as mtf
from helpers.layer_runs import dims
from helpers.transformer import decoding_models
from mesh_tensorflow.testing.harness import WHOLE
from mesh_tensorflow.transformer import transformer

ROWS, LENGTH, MEMORY, DEPTH = 4, 8, 6, 8
BEGINS, STEPS = (0, 2, 4, 1), 3
SMALL = {"num_heads": 2, "key_value_size": 4}
FLOAT = mtf.VariableDType(tf.float32)


def normal(*sizes, seed=0):
    return np.random.RandomState(seed).normal(size=sizes).astype("float32")


def tensor(mesh, values, shape):
    values = np.asarray(values)
    values = values.astype("float32" if values.dtype.kind == "f" else "int32")
    return mtf.import_tf_tensor(mesh, tf.constant(values), mtf.convert_to_shape(shape))


def model(causal=True, layout=None, mesh_shape=None):
    """Returns what layers know of a model."""
    [d_model] = dims(f"d_model:{DEPTH}")
    return types.SimpleNamespace(
        model_dim=d_model, autoregressive=causal, fully_autoregressive=causal, ensemble_dims=[],
        ensemble_dim=None, input_vocab_size_unpadded=12, layout=layout, mesh_shape=mesh_shape,
    )  # fmt: skip


def context(mesh, mode="eval", causal=True, rows=ROWS, placing=None, **kwargs):
    """Returns a Context of whole sequences."""
    batch, length = dims(f"batch:{rows},length:{LENGTH}")
    layout = {} if placing is None else {"layout": placing.layout, "mesh_shape": placing.mesh}
    priority = mtf.range(mesh, length, tf.int32) if causal else None
    arguments = {
        "model": model(causal, **layout), "mesh": mesh, "batch_dims": [batch], "length_dim": length,
        "variable_dtype": FLOAT, "mode": mode, "position": mtf.range(mesh, length, tf.int32),
        "position_is_default": True, "losses": [], "write_priority": priority,
        "read_priority": priority, "new_states": [], "constant_states": [],
    }  # fmt: skip
    return transformer.Context(**{**arguments, **kwargs})


def layer_input(mesh):
    return tensor(
        mesh, normal(ROWS, LENGTH, DEPTH), f"batch:{ROWS},length:{LENGTH},d_model:{DEPTH}"
    )


def called(layer, *args):
    """Calls a layer in its variable scope."""
    with tf.variable_scope("decoder/block_000/layer_000", reuse=tf.AUTO_REUSE):
        return layer.call(*args)


def decoded(mesh, layer, values, prepare=None, placing=None, begins=BEGINS):
    """Returns outputs for whole sequences, and for some positions one by one.

    Args:
      mesh: a Mesh.
      layer: a layer.
      values: the input, an array [ROWS, LENGTH, DEPTH].
      prepare: a function of a Context that adds to it what the layer needs, or None.
      placing: a Placing or None.
      begins: where decoding begins in each row; None for nothing given, and states of zeros.

    Returns:
      A list of Tensors: the output for all positions, then those for the positions `begins`, and
      the STEPS - 1 after them.
    """
    prepare = prepare or (lambda c: None)
    shape = f"batch:{ROWS},length:{LENGTH},d_model:{DEPTH}"
    whole = context(mesh, placing=placing, sequence_id=1)
    prepare(whole)
    outputs = [called(layer, whole, tensor(mesh, values, shape))]
    from_zeros, begins = begins is None, begins or (0,) * ROWS
    # What comes after the beginning is not known yet.
    known = np.arange(LENGTH)[None, :, None] < np.array(begins)[:, None, None]
    first = context(
        mesh, "first_part", placing=placing, sequence_id=1,
        initial_position=tensor(mesh, begins, f"batch:{ROWS}"),
    )  # fmt: skip
    prepare(first)
    called(layer, first, tensor(mesh, np.where(known, values, 7.0), shape))
    states = first.new_states
    if from_zeros:
        states = [mtf.zeros(mesh, x.shape, x.dtype) for x in states]
    for step in range(STEPS):
        at = np.array(begins) + step
        position = tensor(mesh, at, f"batch:{ROWS}")
        one = context(
            mesh, "incremental", placing=placing, sequence_id=1, position=position,
            position_is_default=False, read_priority=position, states=states,
            constant_states=first.constant_states,
        )  # fmt: skip
        one.at = at
        prepare(one)
        x = tensor(mesh, values[np.arange(ROWS), at], f"batch:{ROWS},d_model:{DEPTH}")
        outputs.append(called(layer, one, x))
        states = one.new_states
    return outputs


def run(build, placing=WHOLE, **kwargs):
    return decoding_models.run(build, placing, **kwargs)


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)
