"""Rows of the table: small models that use a feature each."""

from __future__ import annotations

import math

import numpy as np
import tensorflow.compat.v1 as tf

import mesh_tensorflow as mtf
from helpers.crossings.feature import RATE, STEPS, Feature, Outcome, weight
from mesh_tensorflow.transformer import moe

__all__ = ["FEATURES"]

PARTS = mtf.Dimension("parts", 4)


def _same(h):
    return h


# -- what a model assigns, prints and records


def _counter(h):
    start = tf.zeros_initializer()
    seen = mtf.get_variable(h.mesh, "seen", [], initializer=start, trainable=False)
    return h, [mtf.assign(seen, seen + 1.0)]


def _counts_steps(outcome: Outcome) -> None:
    [seen] = [v for name, v in outcome.variables.items() if name.endswith("seen")]
    assert seen == STEPS


def _batch_norm(h):
    return mtf.layers.batch_norm(h, is_training=True, momentum=0.5)


def _moves_averages(outcome: Outcome) -> None:
    [variance] = [v for n, v in outcome.variables.items() if n.endswith("bn_moving_variance")]
    assert np.all(np.abs(variance - 1.0) > 1e-3)


def _experts(h):
    hparams = moe.HParams()
    moe.set_default_moe_hparams(hparams)
    for name, value in {
        "num_experts": 2,
        "hidden_size": 8,
        "group_size": 4,
        "gating": "switch",
        "switch_policy_train": "argmax",
        "switch_dropout": 0.0,
        "switch_jitter": 0.0,
        "capacity_factor_train": 4.0,
    }.items():
        setattr(hparams, f"moe_{name}", value)
    tokens = mtf.einsum(
        [h, weight(h.mesh, "tokens", mtf.Shape([mtf.Dimension("length", 2)]))],
        output_shape=[h.shape[0], mtf.Dimension("length", 2), *h.shape[1:]],
    )
    float32 = mtf.VariableDType(tf.float32, tf.float32, tf.float32)
    d = h.shape[-1]
    y, balance = moe.transformer_moe_layer_v1(
        tokens,
        d,
        hparams,
        True,
        float32,
        layout="batch:rows,experts:cols",
        mesh_shape="rows:2,cols:2",
    )
    load = mtf.get_variable(h.mesh, "load", [], initializer=tf.zeros_initializer(), trainable=False)
    y = h + mtf.reduce_mean(y, output_shape=h.shape) + balance
    return y, [mtf.assign(load, load * 0.5 + balance)]


def _moves_load(outcome: Outcome) -> None:
    assert outcome.variables["load"] > 0


def _print(h):
    return mtf.Print(h, [mtf.reduce_sum(h)], "hidden: ")


def _prints_steps(outcome: Outcome) -> None:
    assert outcome.printed.count("hidden: ") == STEPS, outcome.printed


def _summary(h):
    mtf.scalar_summary("hidden_size", mtf.reduce_mean(mtf.square(h)) * 0.0 + 5.0)
    return h


def _records(outcome: Outcome) -> None:
    assert outcome.summaries is not None
    [value] = [v for name, v in outcome.summaries.items() if "hidden_size" in name]
    assert value == 5.0


# -- random values


def _dropout(h):
    return mtf.dropout(h, True, keep_prob=0.6)


def _drops_in_a_loop(h):
    zero = mtf.constant(h.mesh, 0, dtype=tf.int32)
    return mtf.while_loop(
        lambda i, h: mtf.less(i, 3),
        lambda i, h: [i + 1, mtf.dropout(h, True, keep_prob=0.8)],
        [zero, h],
        maximum_iterations=3,
    )[1]


# -- how a model is computed


def _layer(h):
    return mtf.tanh(h * weight(h.mesh, "scale", h.shape[-1:]) + 0.3)


def _odd_layer(h):
    d, odd = h.shape[-1], mtf.Dimension("odd", 7)
    first = weight(h.mesh, "first", mtf.Shape([d, odd]))
    inner = mtf.softmax(mtf.einsum([h, first], reduced_dims=[d]), odd)
    inner = mtf.shift(mtf.concat([inner, inner], "odd"), 1, mtf.Dimension("odd", 14), wrap=True)
    inner = mtf.reshape(mtf.slice(inner, 3, 7, "odd"), inner.shape[:-1] + [odd])
    return h + mtf.einsum(
        [inner, weight(h.mesh, "second", mtf.Shape([odd, d]))], output_shape=h.shape
    )


def _recomputed(h):
    return mtf.recompute_grad(_layer, [h])


def _loop(h):
    scale, zero = weight(h.mesh, "scale", h.shape[-1:]), mtf.constant(h.mesh, 0, dtype=tf.int32)
    return mtf.while_loop(
        lambda i, h: mtf.less(i, 3),
        lambda i, h: [i + 1, mtf.tanh(h * scale + 0.3)],
        [zero, h],
        maximum_iterations=3,
        back_prop=True,
    )[1]


def _unrolled(h):
    scale = weight(h.mesh, "scale", h.shape[-1:])
    for _ in range(3):
        h = mtf.tanh(h * scale + 0.3)
    return h


def _stage_weights(h):
    stages = mtf.Dimension("stages", 2)
    return stages, weight(h.mesh, "scale", mtf.Shape([stages, *h.shape[-1:]]))


def _pipeline(h):
    stages, scale = _stage_weights(h)
    return mtf.layers.pipeline(
        lambda h, w: mtf.tanh(h * w + 0.3), h, [scale], stages, h.shape[0], num_microbatches=2
    )


def _in_a_row(h):
    stages, scale = _stage_weights(h)
    for w in mtf.unstack(scale, stages):
        h = mtf.tanh(h * w + 0.3)
    return h


def _noisy_pipeline(h):
    """Returns what a pipeline makes of it, whose stages drop values and are computed again."""
    stages, scale = _stage_weights(h)

    def stage(h, w):
        return mtf.dropout(mtf.tanh(h * w + 0.3), True, keep_prob=0.8)

    return mtf.layers.pipeline(
        stage, h, [scale], stages, h.shape[0], num_microbatches=2, recompute=True
    )


def _experts_in_a_pipeline(h):
    y, updates = _experts(h)
    return _pipeline(y), updates


def _experts_in_a_row(h):
    y, updates = _experts(h)
    return _in_a_row(y), updates


# -- variables


def _adapted(h):
    """Returns a layer whose kernel is not trained, with an adapter of rank 2 that is."""
    d, rank = h.shape[-1], mtf.Dimension("rank", 2)
    out = mtf.Dimension("out", d.size)
    kernel = weight(h.mesh, "kernel", mtf.Shape([d, out]), trainable=False)
    factors = [
        weight(h.mesh, f"kernel_lora_{end}", mtf.Shape(dims))
        for end, dims in {"a": [d, rank], "b": [rank, out]}.items()
    ]
    kernel += mtf.einsum(factors, output_shape=kernel.shape)
    y = mtf.einsum([h, kernel], reduced_dims=[d])
    return h + mtf.rename_dimension(mtf.tanh(y), "out", d.name)


def _keeps_the_kernel(outcome: Outcome) -> None:
    found = outcome.variables
    [kernel] = [value for name, value in found.items() if f"{name}_lora_a" in found]
    draws = np.random.RandomState(len("kernel") + kernel.size)
    np.testing.assert_array_equal(kernel, np.float32(draws.randn(*kernel.shape) * 0.5))


def _shared_and_unused(h):
    """Returns two layers with one weight; others are a scalar, and one that has no gradient."""
    shared, gain = weight(h.mesh, "shared", h.shape[-1:]), weight(h.mesh, "gain", [])
    weight(h.mesh, "unused", h.shape[-1:])
    return mtf.tanh(mtf.sin(h * shared) * shared * (1.0 + gain) + 0.1)


_DTYPES = {
    "int": tf.int32,
    "flags": tf.bool,
    "wide": tf.float64,
    "half": tf.float16,
    "short": tf.uint16,
}


def _of_all_dtypes(h):
    zeros, d = tf.zeros_initializer(), h.shape[-1:]
    ints, flags, wide, half, short = (
        mtf.get_variable(h.mesh, name, d, dtype=dtype, initializer=zeros, trainable=False)
        for name, dtype in _DTYPES.items()
    )
    updates = [
        mtf.assign(ints, ints + 2),
        mtf.assign(flags, mtf.logical_not(flags)),
        mtf.assign(wide, wide + 1.0),
        mtf.assign(half, half + 0.5),
        mtf.assign(short, mtf.cast(mtf.to_int32(short) + 3, tf.uint16)),
    ]
    scale = 1.0 + 0.1 * (mtf.to_float(ints) + mtf.to_float(wide) + mtf.to_float(half))
    return mtf.where(flags, h * scale, mtf.tanh(h) * scale), updates


def _counts_in_all_dtypes(outcome: Outcome) -> None:
    wanted = {"int": 2 * STEPS, "flags": STEPS % 2 == 1, "wide": STEPS, "half": 0.5 * STEPS}
    wanted["short"] = 3 * STEPS
    for name, value in wanted.items():
        [found] = [v for n, v in outcome.variables.items() if n.split("/")[-1] == name]
        assert found.dtype == _DTYPES[name].as_numpy_dtype
        np.testing.assert_array_equal(found, np.full(found.shape, value, found.dtype))


# -- attention over the hidden layer


def _queries_and_memory(h):
    d, memory = mtf.Dimension("d_kv", 4), mtf.Dimension("memory", h.shape[-1].size)
    q, k, v = (h * weight(h.mesh, name, mtf.Shape([d])) for name in ("q", "keys", "values"))
    k, v = (mtf.rename_dimension(x, h.shape[-1].name, memory.name) for x in (k, v))
    return q, k, v, memory, d


def _causal(h, memory):
    return [mtf.range(h.mesh, dim, tf.int32) for dim in (h.shape[-1], memory)]


def _blocked(h, ring=False):
    q, k, v, memory, d = _queries_and_memory(h)
    visible = [("greater_equal", *_causal(h, memory))]
    y = mtf.layers.blocked_attention(
        q, k, v, memory, d, d, visible=visible, block_sizes=(3, 2), ring=ring
    )
    return mtf.reduce_mean(y, reduced_dim=d)


def _ring(h):
    return _blocked(h, ring=True)


def _segments(h, memory):
    """Returns the numbers of the segments of packed rows, the first of them of 5 positions."""
    ids = _causal(h, memory)
    return [mtf.cast(mtf.greater(x, 4), tf.int32) for x in ids]


def _packed_ring(h):
    def attention(h):
        q, k, v, memory, d = _queries_and_memory(h)
        visible = [("greater_equal", *_causal(h, memory)), ("equal", *_segments(h, memory))]
        y = mtf.layers.blocked_attention(
            q, k, v, memory, d, d, visible=visible, block_sizes=(3, 2), ring=True
        )
        return mtf.reduce_mean(y, reduced_dim=d)

    return mtf.recompute_grad(attention, [h])


def _packed_softmax(h):
    return _softmax(h, packed=True)


def _softmax(h, packed=False):
    q, k, v, memory, d = _queries_and_memory(h)
    logits = mtf.einsum([q, k], reduced_dims=[d])
    logits = mtf.where(mtf.greater_equal(*_causal(h, memory)), logits, -1e9)
    if packed:
        logits = mtf.where(mtf.equal(*_segments(h, memory)), logits, -1e9)
    y = mtf.einsum([mtf.softmax(logits, memory), v], reduced_dims=[memory])
    return mtf.reduce_mean(y, reduced_dim=d)


# -- gradients and operations of one's own


def _own_gradient(h):
    def grad_fn(explicit_inputs, all_inputs, forward_operations, outputs, output_grads):
        return [output_grads[0] * 0.5]

    return mtf.custom_gradient(mtf.sin, grad_fn, [h])


def _same_gradient(h):
    return h * 0.5 + mtf.stop_gradient(mtf.sin(h) - h * 0.5)


class Tripled(mtf.Operation):
    """An operation of a user: three times a Tensor."""

    def __init__(self, x, name="tripled"):
        super().__init__([x], name=name)
        self._outputs = [mtf.Tensor(self, x.shape, x.dtype)]

    def gradient(self, grad_ys):
        return [grad_ys[0] * 3.0]

    def lower(self, lowering):
        y = lowering.mesh_impl(self).slicewise(lambda t: t * 3.0, lowering.tensors[self.inputs[0]])
        lowering.set_tensor_lowering(self.outputs[0], y)


class Largest(Tripled):
    """One that needs the last dimension whole."""

    def _unsplittable(self):
        return [self.inputs[0].shape[-1].name]


def _foreign(h):
    return Tripled(h).outputs[0]


def _unsplittable(h):
    return Largest(h).outputs[0]


def _logarithm(h):
    return mtf.log(mtf.stop_gradient(h) - 100.0, name="logarithm") + h


# -- movement


def _lookup(h):
    vocab = mtf.Dimension("vocab", 16)
    ids = mtf.cast(mtf.abs(mtf.reduce_sum(h, output_shape=h.shape[:-1])) * 3.0, tf.int32)
    table = weight(h.mesh, "table", mtf.Shape([vocab, *h.shape[-1:]]))
    return h + mtf.gather(table, mtf.minimum(ids, 15), vocab)


def _one_hot(h):
    vocab = mtf.Dimension("vocab", 16)
    ids = mtf.cast(mtf.abs(mtf.reduce_sum(h, output_shape=h.shape[:-1])) * 3.0, tf.int32)
    table = weight(h.mesh, "table", mtf.Shape([vocab, *h.shape[-1:]]))
    return h + mtf.einsum([mtf.one_hot(mtf.minimum(ids, 15), vocab), table], reduced_dims=[vocab])


def _image(h, blocks):
    """Returns a hidden layer as images of two columns, cut into some blocks of rows."""
    rows = h.shape[-1].size // 2
    names = [
        ("h_blocks", blocks),
        ("w_blocks", 1),
        ("h", rows // blocks),
        ("w", 2),
        ("channels", 1),
    ]
    return mtf.reshape(h, h.shape[:-1] + mtf.Shape([mtf.Dimension(*n) for n in names]).dims)


def _convolution(h, blocks=2):
    x = _image(h, blocks)
    values = np.linspace(-1, 1, 9).reshape(3, 3, 1, 1).astype(np.float32)
    y = mtf.layers.conv2d_with_blocks(
        x,
        mtf.Dimension("out", 1),
        h_blocks_dim=x.shape.dims[-5],
        w_blocks_dim=x.shape.dims[-4],
        filter_initializer=tf.constant_initializer(values),
        name="conv",
    )
    return h + mtf.reshape(y, h.shape)


def _uncut(h):
    return _convolution(h, 1)


# -- training


def _schedule(step):
    return 0.4 / (1.0 + tf.cast(step, tf.float32)) ** 2


def _adam(learning_rate):
    return mtf.optimize.AdamWeightDecayOptimizer(learning_rate, epsilon=0.1)


class TwoOptimizers(mtf.optimize.Optimizer):
    """One of a user: Adam for the decoder, plain descent for all other variables."""

    def __init__(self, learning_rate):
        self._kinds = {True: _adam(learning_rate), False: mtf.optimize.SgdOptimizer(learning_rate)}

    def apply_grad(self, grad, var):
        return self._kinds[var.name.startswith("decode")].apply_grad(grad, var)


def _averages_follow(outcome: Outcome) -> None:
    for name in _first_values():
        average = outcome.variables[f"{name}/ExponentialMovingAverage"]
        assert not np.allclose(average, outcome.variables[name], rtol=1e-3)


def _clipped(outcome: Outcome) -> None:
    moved = sum(
        np.sum(np.square(outcome.variables[name] - first))
        for name, first in _first_values().items()
    )
    assert math.sqrt(moved) <= STEPS * RATE * 0.05 * 1.001


def _first_values():
    def value(name, sizes):
        return np.random.RandomState(len(name) + math.prod(sizes)).randn(*sizes) * 0.5

    return {"encode": value("encode", [4, 8]), "decode": value("decode", [8, 4])}


IN_A_ROW = "make_layer_stack.num_layers = 2\n"
PIPELINE = (
    f"{IN_A_ROW}make_layer_stack.layer_stack_cls = @transformer.PipelinedLayerStack\n"
    "PipelinedLayerStack.num_stages = 2\nPipelinedLayerStack.num_microbatches = 2\n"
)
EXPERTS = """
make_layer_stack.layers = [@moe.MoE1D]
MoE1D.num_experts = 2
MoE1D.hidden_size = 8
MoE1D.group_size = 8
MoE1D.switch_policy_train = "argmax"
MoE1D.moe_gating = "switch"
MoE1D.switch_jitter = 0.0
"""
FEATURES = {
    feature.name: feature
    for feature in (
        Feature("counter", _counter, check=_counts_steps),
        Feature("batch norm", _batch_norm, check=_moves_averages),
        Feature(
            "MoE with its balance",
            _experts,
            layout="batch:rows,experts:cols",
            check=_moves_load,
            gin=EXPERTS,
            plain_gin=EXPERTS,
            gin_layout="batch:rows,experts:cols",
        ),
        Feature("Print", _print, _same, check=_prints_steps),
        Feature("scalar_summary", _summary, _same, check=_records),
        Feature("dropout", _dropout, is_random=True),
        Feature("dropout in a loop", _drops_in_a_loop, is_random=True),
        Feature("microbatches", _layer, options={"microbatches": 2}),
        Feature(
            "counter in microbatches",
            _counter,
            options={"microbatches": 2},
            check=_counts_steps,
        ),
        Feature("recompute_grad", _recomputed, _layer, gin="LayerStack.recompute_grads = True\n"),
        Feature("while_loop", _loop, _unrolled),
        Feature(
            "ZeRO 1",
            _layer,
            options={"zero": 1, "zero_axis": "rows"},
            optimizer=_adam,
        ),
        Feature(
            "ZeRO 3",
            _layer,
            options={"zero": 3, "zero_axis": "rows"},
            optimizer=_adam,
        ),
        Feature(
            "pipeline",
            _pipeline,
            _in_a_row,
            layout="batch:rows,stages:cols",
            gin=PIPELINE,
            plain_gin=IN_A_ROW,
            gin_layout="batch:rows,stages:cols",
        ),
        Feature(
            "blocked attention",
            _blocked,
            _softmax,
            layout="batch:rows,memory:cols",
            gin='SelfAttention.attention_kwargs = {"blocked": True}\n',
            plain_gin='SelfAttention.attention_kwargs = {"blocked": False}\n',
        ),
        Feature(
            "ring attention",
            _ring,
            _softmax,
            layout="batch:rows,hidden:cols,memory:cols",
            gin='SelfAttention.attention_kwargs = {"ring": True}\n',
            plain_gin='SelfAttention.attention_kwargs = {"blocked": False}\n',
            gin_layout="batch:rows,length:cols,memory_length:cols",
        ),
        Feature(
            "mixed precision",
            _layer,
            options={"precision": "mixed_bfloat16"},
            tolerance=0.03,
            gin="",
        ),
        Feature("clipping by the global norm", _same, options={"clip_norm": 0.05}, check=_clipped),
        Feature("custom gradient", _own_gradient, _same_gradient),
        Feature("Operation of one's own", _foreign, lambda h: h * 3.0),
        Feature(
            "Operation that cannot work on parts",
            _unsplittable,
            lambda h: h * 3.0,
        ),
        Feature("nan_checks", _layer, _layer, around=mtf.debug.nan_checks),
        Feature(
            "nan_checks of a NaN",
            _logarithm,
            around=mtf.debug.nan_checks,
            raises="NaN (or Inf )?in .*logarithm",
        ),
        Feature("checkpoint of another mesh", _layer, optimizer=_adam, begins=("", "")),
        Feature(
            "schedule of the global step",
            _layer,
            options={"learning_rate": _schedule},
            gin="run.learning_rate_schedule = @learning_rate_schedules.truncated_rsqrt\n"
            "truncated_rsqrt.warmup_steps = 2\n",
            plain_gin="run.learning_rate_schedule = @learning_rate_schedules.truncated_rsqrt\n"
            "truncated_rsqrt.warmup_steps = 2\n",
        ),
        Feature("gather", _lookup, _one_hot, layout="batch:rows,vocab:cols"),
        Feature("convolution with halos", _convolution, _uncut, layout="batch:rows,h_blocks:cols"),
        Feature(
            "sizes that the mesh does not divide",
            _odd_layer,
            layout="batch:rows,odd:cols?",
            options={"zero": 1, "zero_axis": "rows"},
            optimizer=_adam,
            gin_layout="batch:rows,odd:cols?,d_ff:cols",
        ),
        Feature(
            "joined mesh dimensions",
            _layer,
            layout="batch:cols+rows",
            options={"zero": 3, "zero_axis": "rows+cols"},
            optimizer=_adam,
            gin_layout="batch:rows+cols",
        ),
        Feature(
            "ZeRO of bfloat16 in clipped microbatches",
            _layer,
            options={
                "microbatches": 2,
                "precision": mtf.Precision("bfloat16", "bfloat16", "bfloat16"),
                "zero": 3,
                "zero_axis": "rows",
                "clip_norm": 0.5,
            },
            optimizer=_adam,
            tolerance=0.05,
            gin="",
        ),
        Feature(
            "pipeline with dropout computed again",
            _noisy_pipeline,
            layout="batch:rows,stages:cols",
            gin_layout="batch:rows,stages:cols",
            is_random=True,
        ),
        Feature(
            "pipeline with ZeRO in microbatches",
            _pipeline,
            _in_a_row,
            layout="batch:rows,stages:cols",
            gin=PIPELINE,
            plain_gin=IN_A_ROW,
            gin_layout="batch:rows,stages:cols",
            options={"microbatches": 2, "zero": 2, "zero_axis": "rows"},
            optimizer=_adam,
        ),
        Feature(
            "MoE and pipeline with ZeRO",
            _experts_in_a_pipeline,
            _experts_in_a_row,
            layout="batch:rows,experts:cols,stages:cols",
            gin=EXPERTS + PIPELINE,
            plain_gin=EXPERTS + IN_A_ROW,
            gin_layout="batch:rows,stages:cols",
            options={"zero": 3, "zero_axis": "rows"},
            optimizer=_adam,
        ),
        Feature(
            "ring attention of packed rows computed again",
            _packed_ring,
            _packed_softmax,
            layout="batch:rows,hidden:cols,memory:cols",
        ),
        Feature(
            "adapters of a frozen kernel with ZeRO",
            _adapted,
            layout="batch:rows,hidden:cols",
            options={"zero": 3, "zero_axis": "rows"},
            optimizer=_adam,
            check=_keeps_the_kernel,
        ),
        Feature(
            "averages of weights with ZeRO",
            _same,
            options={"average": 0.5, "zero": 3, "zero_axis": "rows"},
            check=_averages_follow,
        ),
        Feature(
            "shared, scalar and unused weights",
            _shared_and_unused,
            options={"clip_norm": 0.5, "zero": 1, "zero_axis": "cols"},
            optimizer=_adam,
        ),
        Feature(
            "variables of all dtypes",
            _of_all_dtypes,
            begins=("", ""),
            check=_counts_in_all_dtypes,
        ),
        Feature(
            "two optimizers with a schedule",
            _layer,
            options={"learning_rate": _schedule},
            optimizer=TwoOptimizers,
        ),
        Feature("evaluation of a counter", _counter, evaluates="between", check=_counts_steps),
        Feature(
            "evaluation between steps of ZeRO 3",
            _layer,
            options={"zero": 3, "zero_axis": "rows"},
            optimizer=_adam,
            evaluates="between",
        ),
        Feature("evaluation of averages", _layer, options={"average": 0.5}, evaluates="after"),
        Feature(
            "masters of bfloat16",
            _layer,
            options={"precision": mtf.Precision("bfloat16", "float32", "bfloat16")},
            optimizer=_adam,
            begins=("session", ""),
            tolerance=0.03,
        ),
        *(
            Feature(f"checkpoint of a {front_end} {place}", _layer, optimizer=_adam, begins=begins)
            for front_end, place, begins in [
                ("session", "on merged devices", ("session", "merged")),
                ("fit", "of one program", ("fit", "SIMD")),
                ("TPUEstimator", "of one program", ("TPUEstimator", "SIMD")),
                ("pjrt.function", "of JAX", ("pjrt.function", "pjrt")),
            ]
        ),
    )
}
