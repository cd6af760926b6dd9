"""Programs: layers, dtypes of variables, scopes."""

import gin
import tensorflow.compat.v1 as tf

import mesh_tensorflow as mtf
from helpers.oracle.oracle_runner import array, dims, table, with_variables

LAYERS, layer = table("batch:x,d:y", "d:x")


@layer("batch:x,d:y", "batch:x,h:y", "d:x,h:y", "")
def dense(p):
    x = p.input("x", "batch:4,l:2,d:8")
    d, h, k = dims("d:8,h:6,k:2")
    y = mtf.layers.dense(x, h, reduced_dims=[d], name="one")
    z = mtf.layers.dense(y, [h, k], reduced_dims=[h], activation=mtf.relu, name="same")
    u = mtf.layers.dense(x, [], reduced_dims=x.shape.dims[1:], use_bias=False, name="none")
    v = mtf.layers.dense(x, [h], reduced_dims=[d], expert_dims=[x.shape.dims[1]], name="experts")
    w = mtf.layers.dense(x, h, reduced_dims=[d])
    w = mtf.layers.dense(w, k, reduced_dims=[h])
    return with_variables(p, {"y": y, "z": z, "u": u, "v": v, "w": w})


@layer("batch:x,h:y", "d:x,h:y", tolerance=1e-2)
def dense_bfloat16(p):
    x = mtf.cast(p.input("x", "batch:4,d:8"), tf.bfloat16)
    d, h = dims("d:8,h:6")
    slices = mtf.VariableDType(tf.bfloat16, tf.float32, tf.bfloat16)
    y = mtf.layers.dense(x, h, reduced_dims=[d], name="plain")
    z = mtf.layers.dense(x, h, reduced_dims=[d], variable_dtype=slices, name="given")
    w = mtf.layers.dense(x, h, reduced_dims=[d], slice_dtype=tf.bfloat16, name="slices")
    return with_variables(p, {"y": y, "z": z, "w": w})


@layer("batch:x,h:y", "l:x,h:y", "d:x,h:y")
def dense_more(p):
    x, w = p.input("x", "batch:4,l:2,d:8"), p.input("w", "l:2,d:8,h:6")
    batch, l, d = x.shape.dims
    h, k = dims("h:6,k:2")
    dense = mtf.layers.dense
    first = mtf.layers.get_dense_kernel_weights(x, [h], [d], [l], tf.ones_initializer(), name="made")
    outputs = {
        "two": dense(x, [h, k], reduced_dims=[l, d], activation=mtf.sigmoid, name="two"),
        "last": dense(x, h, name="last"),
        "weights": dense(x, h, reduced_dims=[l, d], kernel_weights=w, name="weights"),
        "initialized": dense(
            x, h, reduced_dims=[d], use_bias=False, name="initialized",
            kernel_initializer=mtf.layers.VarianceScalingInitializer(2.0, "fan_avg", "uniform"),
        ),
        "experts": dense(x, [h, k], reduced_dims=[d], expert_dims=[batch, l], name="experts"),
        "same": dense(x, [l, d], reduced_dims=[l, d], name="same"),
        "made": mtf.layers.us_einsum([x, first], reduced_dims=[d]),
        "dropped": mtf.layers.dense_relu_dense(x, h, False, dropout=0.5, dropout_broadcast_dims=[l], name="ff"),
    }
    return with_variables(p, outputs)


@layer("batch:x,h:y", "d:x,h:y")
def unit_scaling(p):
    """Weights of variance 1, contractions divided instead."""
    x = p.input("x", "batch:4,d:8")
    d, h = dims("d:8,h:6")
    setting = "mesh_tensorflow.layers.unit_scaling_convention.value"
    gin.bind_parameter(setting, True)
    try:
        outputs = {
            "dense": mtf.layers.dense(x, h, reduced_dims=[d], name="one"),
            "product": mtf.layers.dense_product(x, [d], [h], ["relu", None], name="two"),
            "separable": mtf.layers.separable_conv1d(x, h, name="separable"),
            "einsum": mtf.layers.us_einsum([x, x], output_shape=[]),
        }
    finally:
        gin.bind_parameter(setting, False)
    return with_variables(p, outputs)


@layer("batch:x,h:y", "d:x,h:y")
def dense_product(p):
    x = p.input("x", "batch:4,d:8")
    d, h = dims("d:8,h:6")
    layers = mtf.layers
    y = layers.dense_product(x, [d], [h], activation_functions=["relu", "linear"], name="gated")
    z = layers.dense_product(x, [d], [h], activation_functions="gelu", use_bias=False, name="plain")
    w = layers.dense_product(x, [d], [h], activation_functions=[mtf.sigmoid, None, "tanh"])
    r = layers.dense_relu_dense(x, h, True)
    return with_variables(p, {"y": y, "z": z, "w": w, "r": r})


@layer("batch:x,d:y", "d:x", "")
def layer_norm(p):
    x = p.input("x", "batch:4,d:8")
    d = x.shape.dims[1]
    y = mtf.layers.layer_norm(x, d)
    z = mtf.layers.layer_norm(x, x.shape.dims[0], epsilon=1e-3, name="named")
    return with_variables(p, {"y": y, "z": z})


@layer("batch:x,v:y", "v:x", "")
def losses(p):
    logits, ids = p.input("logits", "batch:4,v:8"), p.input("ids", "batch:4", 8)
    soft, v = mtf.softmax(p.input("soft", "batch:4,v:8"), dims("v:8")[0]), dims("v:8")[0]
    loss = mtf.layers.softmax_cross_entropy_with_logits
    return {
        "hard": loss(logits, ids, v),
        "hard_z": loss(logits, ids, v, z_loss=0.1),
        "soft": loss(logits, mtf.stop_gradient(soft), v),
        "soft_z": loss(logits, mtf.stop_gradient(soft), v, z_loss=0.1),
        "one_hot": loss(logits, mtf.one_hot(ids, v), v),
    }


@layer("batch:x,v:y", "v:x", "")
def more_losses(p):
    logits, targets = p.input("logits", "batch:4,v:8"), p.input("targets", "batch:4,v:8")
    ids = p.input("ids", "batch:4,v:8", 3)
    return {
        "sigmoid": mtf.layers.sigmoid_cross_entropy_with_logits(logits * 30.0, mtf.sigmoid(targets)),
        "weights": mtf.layers.weights_nonzero(ids),
        "weights_bfloat16": mtf.to_float(mtf.layers.weights_nonzero(ids, dtype=tf.bfloat16)),
    }


@layer("batch:x,v:y", "v:x,d:y", "")
def embedding(p):
    ids = p.input("ids", "batch:4", 8)
    v, d = dims("v:8,d:4")
    y = mtf.layers.embedding(ids, v, d, mtf.VariableDType())
    w = mtf.layers.embedding_weights(p.mesh, v, d, mtf.VariableDType(), "other")
    several = mtf.layers.embedding_weights(
        p.mesh, v, d, mtf.VariableDType(tf.float32, tf.float32, tf.float32), "several",
        ensemble_dim=mtf.Dimension("ensemble", 2), initializer=tf.ones_initializer(),
    )
    return with_variables(p, {"y": y, "w": w * 2.0, "several": several * several})


BATCH_NORM = ("batch:x,c:y", "batch:x,l:y", "c:x", "")


@layer(*BATCH_NORM, steps=3)
def batch_norm(p):
    """In training, with the moving averages of three steps."""
    x = p.input("x", "batch:4,l:6,c:2")
    norm = mtf.layers.batch_norm
    outputs, p.update_ops = {}, []
    for name, kwargs in {
        "plain": {},
        "some": {"epsilon": 1e-3, "dims_idx_start": 1, "dims_idx_end": 2, "name": "named"},
        "inner": {"dims_idx_end": 3, "dims_idx_start": 1, "init_zero": True, "name": "inner"},
    }.items():
        outputs[name], updates = norm(x * 2.0 + 1.0, True, 0.9, **kwargs)
        p.update_ops += updates
    target = p.input("target", "batch:4,l:6,c:2")
    loss = mtf.add_n([mtf.reduce_mean(mtf.square(y - target)) for y in outputs.values()])
    return with_variables(p, {**outputs, "loss": loss})


@layer(*BATCH_NORM)
def batch_norm_by_averages(p):
    x = p.input("x", "batch:4,l:6,c:2")
    y, updates = mtf.layers.batch_norm(x, False, 0.9)
    with_variables(p, {})
    p.feeds["batch_norm/bn_moving_variance"] = array("positive", [2], "moving_variance")
    return {"y": y, "updates": mtf.constant(p.mesh, len(updates), dtype=tf.int32)}


@layer("batch:x,d:y", "l:x,d:y", "d:x", "")
def corr(p):
    x = p.input("x", "batch:4,l:2,d:6")
    return {"y": mtf.layers.corr(x, x.shape.dims[2]), "named": mtf.layers.corr(x, x.shape.dims[2], epsilon=0.1, name="named")}


@layer("batch:x,d:y", "d:x", "")
def clip_activation_gradient(p):
    x = p.input("x", "batch:4,d:6")
    clip = mtf.layers.clip_activation_gradient
    return {"none": clip(x), "clipped": clip(x, 0.5), "within": clip(x, clip_rms_norm=50.0)}


def _reversible(p, recompute):
    """Two layers of two halves each, like a reversible transformer's, with a loss in between."""
    a, b = p.input("a", "batch:4,d:6"), p.input("b", "batch:4,d:6")
    (d,) = a.shape.dims[1:]
    state = (a, None, b, None)
    middle = None
    for i in range(4):
        def f(x, i=i):
            h = mtf.layers.dense(x, mtf.Dimension("h", 8), reduced_dims=[d], activation=mtf.tanh, name=f"in{i}")
            return mtf.layers.dense(h, d, reduced_dims=h.shape.dims[-1:], use_bias=False, name=f"out{i}")

        state = mtf.layers.reversible_half_residual_and_swap(*state, f, recompute)
        middle = state[2] if i == 1 else middle
    x1, _, x2, _ = state
    return with_variables(p, {"sum": x1 + 2.0 * x2, "more": x1 - x2 + mtf.square(middle)})


@layer("batch:x,h:y", "d:x,h:y", "")
def reversible(p):
    return _reversible(p, True)


@layer("batch:x,h:y", "")
def reversible_without_recomputation(p):
    return _reversible(p, False)


@layer("a:x,b:y", "b:x", "")
def variable_dtypes(p):
    outputs = {}
    for name, dtype in {
        "plain": tf.float32,
        "master_bf16": mtf.VariableDType(tf.bfloat16, tf.float32, tf.float32),
        "slice_bf16": mtf.VariableDType(tf.float32, tf.bfloat16, tf.float32),
    }.items():
        outputs[name] = p.variable(name, "a:4,b:6", dtype=dtype) * 1.0
    outputs["activation"] = mtf.to_float(
        p.variable("activation", "a:4,b:6", activation_dtype=tf.bfloat16)
    )
    return outputs


@layer("a:x,b:y", gradients=False)
def scopes(p):
    """Names of variables and of operations in scopes."""
    with tf.variable_scope("outer"):
        x = p.variable("w", "a:4,b:6")
        with tf.variable_scope("inner"):
            y = mtf.add(p.variable("w", "b:6"), x)
        with tf.variable_scope("inner", reuse=True):
            z = mtf.relu(mtf.get_variable(p.mesh, "w", dims("b:6")), name="Named")
        z = mtf.relu(z, name="named")
        z = mtf.relu(z, name="named")
    u = mtf.get_variable(p.mesh, "fixed", dims("b:6"), initializer=tf.ones_initializer(), trainable=False)
    return {"y": y, "z": z, "u": u * 2.0}
