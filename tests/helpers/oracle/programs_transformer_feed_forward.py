"""Programs: feed-forward layers and convolutions of transformers, also when decoding."""

import numpy as np
import tensorflow.compat.v1 as tf

import mesh_tensorflow as mtf
from helpers.oracle.oracle_runner import table, with_variables
from helpers.oracle.programs_transformer_moe import context_for
from mesh_tensorflow.transformer import transformer_layers as T

TRANSFORMER_FEED_FORWARD, program = table("batch:x,d_ff:y", "d_model:x")

IDS = [[0, 6, 7, 8, 9, 3, 0, 0], [0, 2, 3, 0, 5, 6, 7, 8], [1, 2, 3, 4, 5, 6, 7, 8], [0, 3, 3, 3, 0, 0, 0, 0]]
BEGINNINGS = [4, 5, 0, 2]
WINDOW = {"min_relative_pos": -2, "max_relative_pos": 0, "output_size": 8}


def integers(p, values, shape):
    return mtf.import_tf_tensor(p.mesh, tf.constant(np.array(values), tf.int32), mtf.convert_to_shape(shape))


def whole(p, layer, mode="eval", ensemble=None, **kwargs):
    """Returns the output of a layer for all positions, and its states in mode first_part."""
    shape = "batch:4,length:8,d_model:8"
    x = p.input("x", f"ensemble:{ensemble}," + shape if ensemble else shape)
    ids = integers(p, IDS, "batch:4,length:8")
    context = context_for(
        p, x, mode=mode, inputs=ids, sequence_id=mtf.cast(mtf.not_equal(ids, 0), tf.int32),
        new_states=[], initial_position=integers(p, BEGINNINGS, "batch:4"), **kwargs,
    )  # fmt: skip
    if ensemble:
        context.model.ensemble_dim = mtf.Dimension("ensemble", ensemble)
        context.model.ensemble_dims = [context.model.ensemble_dim]
    outputs = {"y": layer.call(context, x)}
    outputs.update({f"state{i}": s * 1.0 for i, s in enumerate(context.new_states)})
    return with_variables(p, outputs)


def step(p, layer, size):
    """Returns the output of a layer for one position, and its new state."""
    x = p.input("x", "batch:4,d_model:8")
    state = p.input("state", f"batch:4,length:{size},d_model:8")
    context = context_for(
        p, x, mode="incremental", inputs=integers(p, [1, 2, 0, 4], "batch:4"), sequence_id=1,
        position=integers(p, BEGINNINGS, "batch:4"), states=[state], new_states=[],
    )  # fmt: skip
    return with_variables(p, {"y": layer.call(context, x), "state": context.new_states[0] * 1.0})


@program()
def dense_relu_dense(p):
    return whole(p, T.DenseReluDense(hidden_size=12, dropout_rate=0.5))


@program("batch:x,d_ff:y")
def dense_relu_dense_bias(p):
    return whole(p, T.DenseReluDense(hidden_size=12, use_bias=True, activation="gelu"))


@program("batch:x,d_ff:y")
def dense_relu_dense_gated(p):
    layer = T.DenseReluDense(hidden_size=12, activation=["gelu", "linear"])
    return whole(p, layer, mode="train")


@program("ensemble:x,d_ff:y")
def dense_relu_dense_ensemble(p):
    return whole(p, T.DenseReluDense(hidden_size=12, use_bias=True), ensemble=2)


@program("batch:x,d_ff:y")
def parallel_layers(p):
    feed_forward = [
        lambda: T.DenseReluDense(hidden_size=12),
        lambda: T.DenseReluDense(hidden_size=4, activation="tanh"),
        lambda: T.SeparableConv1DLayer(**WINDOW),
    ]
    return whole(p, T.ParallelLayer(layer_classes=feed_forward))


@program("batch:x,d_ff:y")
def parallel_layers_shared(p):
    layer_classes = [lambda: T.DenseReluDense(hidden_size=12)] * 2
    return whole(p, T.ParallelLayer(layer_classes=layer_classes, use_scope=False))


def _both(name, make, size=3, **kwargs):
    """Adds a program for all positions, and one for a step of decoding."""

    def all_positions(p):
        return whole(p, make(), mode="first_part")

    def one_position(p):
        return step(p, make(), size)

    all_positions.__name__, one_position.__name__ = name, name + "_step"
    program("batch:x", **kwargs)(all_positions)
    program("batch:x", **kwargs)(one_position)


_both("conv_layer", lambda: T.Conv1DLayer(3, 8))
_both("conv_layer_even", lambda: T.Conv1DLayer(2, 4, activation="relu"), 2)
_both("separable_conv_layer", lambda: T.SeparableConv1DLayer(**WINDOW))
_both("separable_conv_centred", lambda: T.SeparableConv1DLayer(-1, 1, 4, activation="relu"))
_both("lightweight_conv", lambda: T.LightweightConv1DLocalAttn(**WINDOW))
_both("lightweight_conv_shared", lambda: T.LightweightConv1DLocalAttn(**WINDOW, num_unique_depth_filters=2))
_both("dynamic_conv", lambda: T.DynamicConv1DLocalAttn(**WINDOW))
_both("dynamic_conv_shared", lambda: T.DynamicConv1DLocalAttn(**WINDOW, num_unique_depth_filters=4, activation="tanh"))
_both("conv_block", lambda: T.LocalConvAttnBlock(**WINDOW, activation="tanh"))
_both("conv_block_dynamic", lambda: T.LocalConvAttnBlock(**WINDOW, attention_type="dynamic_conv", num_unique_depth_filters=2))
