"""Programs: optimizers, ten steps from the same weights."""

import tensorflow.compat.v1 as tf

import mesh_tensorflow as mtf
from helpers.oracle.oracle_runner import Program, dims

OPTIMIZERS = {}


def regression(p, make_optimizer, sizes="in:4,h:6", dtype=tf.float32):
    i, h = dims(sizes)
    x, t = p.input("x", mtf.Shape([mtf.Dimension("batch", 8), i])), p.input("t", "batch:8")
    with tf.variable_scope("net"):
        w = p.variable("w", mtf.Shape([i, h]), scale=0.3, dtype=dtype)
        b = p.variable("b", mtf.Shape([h]), scale=0.3, dtype=dtype)
        v = p.variable("v", mtf.Shape([h]), scale=0.3, dtype=dtype)
    batch = x.shape.dims[0]
    hidden = mtf.tanh(mtf.einsum([x, w], output_shape=[batch, h]) + b)
    loss = mtf.reduce_mean(mtf.square(mtf.einsum([hidden, v], output_shape=[batch]) - t))
    p.train(loss, make_optimizer)
    return {"loss": loss}


def layers_in_one(p, make_optimizer):
    """Weights of three layers in one variable, a scalar, and a variable without gradient."""
    x, t = p.input("x", "batch:8,in:6"), p.input("t", "batch:8")
    batch, i = x.shape.dims
    w = p.variable("net/w", "layer:3,in:6,out:6", scale=0.3)
    s = p.variable("net/s", "", scale=0.3)
    p.variable("unused", "in:6")
    for one in mtf.unstack(w, w.shape.dims[0]):
        x = mtf.rename_dimension(mtf.tanh(mtf.einsum([x, one], reduced_dims=[i])), "out", "in")
    loss = mtf.reduce_mean(mtf.square(mtf.reduce_mean(x, output_shape=[batch]) * s - t))
    p.train(loss, make_optimizer)
    return {"loss": loss}


def optimizer(make, name, fn=regression, layouts=("batch:x,h:y", "in:x,h:y", "batch:x"), **kwargs):
    tolerance = kwargs.pop("tolerance", 1e-5)
    OPTIMIZERS[name] = Program(
        lambda p: fn(p, make, **kwargs), layouts, gradients=False, steps=10, tolerance=tolerance
    )


def stacked(make, name):
    optimizer(make, name, layers_in_one, ("batch:x,out:y", "in:x", ""))


def rate_of_step():
    return 0.02 / (tf.cast(tf.train.get_or_create_global_step(), tf.float32) + 2.0)


def bfloat16(make, name):
    """With slices that are bfloat16, so updates are rounded."""
    dtype = mtf.VariableDType(tf.float32, tf.bfloat16, tf.float32)
    optimizer(make, name + "_bfloat16", layouts=("batch:x,h:y",), dtype=dtype, tolerance=1e-2)


optimizer(lambda: mtf.optimize.SgdOptimizer(0.1), "sgd")
optimizer(lambda: mtf.optimize.SgdOptimizer(tf.constant(0.1)), "sgd_tensor_rate")
optimizer(lambda: mtf.optimize.MomentumOptimizer(0.05, 0.9), "momentum")
optimizer(lambda: mtf.optimize.MomentumOptimizer(tf.constant(0.05), tf.constant(0.5)), "momentum_tensors")
optimizer(lambda: mtf.optimize.AdamWeightDecayOptimizer(0.01), "adam")
optimizer(
    lambda: mtf.optimize.AdamWeightDecayOptimizer(
        rate_of_step(), weight_decay_rate=0.2, beta_2=0.9, epsilon=1e-2,
        exclude_from_weight_decay=["^net/[vx]$", "bias"],
    ),
    "adam_options",
)
optimizer(
    lambda: mtf.optimize.AdamWeightDecayOptimizer(
        0.01, weight_decay_rate=0.1, beta_1=0.8, exclude_from_weight_decay=["net/b"]
    ),
    "adam_decay",
)
optimizer(lambda: mtf.optimize.AdafactorOptimizer(), "adafactor")
optimizer(
    lambda: mtf.optimize.AdafactorOptimizer(min_dim_size_to_factor=2, learning_rate=0.02),
    "adafactor_factored",
)
optimizer(
    lambda: mtf.optimize.AdafactorOptimizer(
        min_dim_size_to_factor=2, beta1=0.9, multiply_by_parameter_scale=False
    ),
    "adafactor_beta1",
)
optimizer(
    lambda: mtf.optimize.AdafactorOptimizer(
        decay_rate=mtf.optimize.adafactor_decay_rate_adam(0.9), clipping_threshold=None,
        learning_rate=tf.constant(0.01), exclude_from_parameter_scale=["net/v"],
    ),
    "adafactor_options",
)
optimizer(
    lambda: mtf.optimize.AdafactorOptimizer(), "adafactor_large", sizes="in:128,h:130", tolerance=2e-5
)
optimizer(
    lambda: mtf.optimize.AdafactorOptimizer(stacked_dim_names=["in"], min_dim_size_to_factor=2),
    "adafactor_stacked_dim",
)
optimizer(
    lambda: mtf.optimize.AdafactorOptimizer(factored=False, min_dim_size_to_factor=2, epsilon1=1e-2, epsilon2=0.5),
    "adafactor_unfactored",
)
optimizer(
    lambda: mtf.optimize.AdafactorOptimizer(
        min_dim_size_to_factor=2, clipping_threshold=0.1, learning_rate=rate_of_step(),
        decay_rate=mtf.optimize.adafactor_decay_rate_pow(0.5, offset=-3),
        exclude_from_parameter_scale=["w", "other"], beta1=0.5,
    ),
    "adafactor_clipped",
)
optimizer(lambda: mtf.optimize.AdafactorOptimizer(decay_rate=0.9, learning_rate=0.1), "adafactor_numbers")
stacked(
    lambda: mtf.optimize.AdafactorOptimizer(stacked_dim_names=["layer"], min_dim_size_to_factor=2, beta1=0.3),
    "adafactor_layers",
)
stacked(lambda: mtf.optimize.AdafactorOptimizer(min_dim_size_to_factor=3), "adafactor_ties")
stacked(lambda: mtf.optimize.AdamWeightDecayOptimizer(0.01, weight_decay_rate=0.1), "adam_layers")
stacked(lambda: mtf.optimize.MomentumOptimizer(0.1, 0.5), "momentum_layers")
bfloat16(lambda: mtf.optimize.SgdOptimizer(0.1), "sgd")
bfloat16(lambda: mtf.optimize.MomentumOptimizer(0.05, 0.9), "momentum")
bfloat16(lambda: mtf.optimize.AdamWeightDecayOptimizer(0.01, weight_decay_rate=0.1), "adam")
bfloat16(lambda: mtf.optimize.AdafactorOptimizer(min_dim_size_to_factor=2, beta1=0.5), "adafactor")


# -- by hyperparameters, by schedules


class Hyperparameters:
    """What Tensor2Tensor gives."""

    optimizer = "Adafactor"
    optimizer_adafactor_decay_type = "Adam"
    optimizer_adafactor_beta2 = 0.9
    optimizer_adafactor_memory_exponent = 0.6
    optimizer_adafactor_multiply_by_parameter_scale = False
    optimizer_adafactor_beta1 = 0.2
    optimizer_adafactor_clipping_threshold = 2.0
    optimizer_adafactor_factored = False

    def __init__(self, **others):
        self.__dict__.update(others)


def falling(step, total_train_steps):
    return 1.0 - tf.cast(step, tf.float32) / total_train_steps


optimizer(lambda: mtf.optimize.make_optimizer(Hyperparameters(), 0.005), "made_adafactor")
optimizer(
    lambda: mtf.optimize.adafactor_optimizer_from_hparams(
        Hyperparameters(optimizer_adafactor_decay_type="pow"), 0.005
    ),
    "adafactor_from_hparams",
)
optimizer(lambda: mtf.optimize.make_optimizer(Hyperparameters(optimizer="SGD"), 0.05), "made_sgd")
optimizer(
    lambda: mtf.optimize.SgdOptimizer(
        mtf.optimize.product_learning_rate(tf.train.get_or_create_global_step(), 40, [0.2, falling], offset=-5)
    ),
    "product_learning_rate",
)
for _name, _cls in {
    "adam": mtf.optimize.AdamWithMultiLRSchedule,
    "adafactor": mtf.optimize.AdafactorWithMultiLRSchedule,
}.items():
    optimizer(
        lambda cls=_cls: cls(["net/w|b$"], [[falling, 0.01, 2.0]], learning_rate=0.02), _name + "_schedule"
    )
    optimizer(
        lambda cls=_cls: cls(["w", "v"], [[0.5], [0.01, falling]], learning_rate=rate_of_step()),
        _name + "_schedules",
    )
    optimizer(lambda cls=_cls: cls(learning_rate=0.02), _name + "_no_schedule")
