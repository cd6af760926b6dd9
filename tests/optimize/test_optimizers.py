"""Optimizers: slots, variables without gradients, rates that are tensors, hyperparameters."""

import types

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import mesh_tensorflow as mtf

optimize = mtf.optimize
SHAPE = mtf.Shape(mtf.convert_to_shape("layer:2,in:130,out:128").dims)

SLOTS = {
    "sgd": (lambda: optimize.SgdOptimizer(0.1), {}),
    "momentum": (lambda: optimize.MomentumOptimizer(0.1, 0.9), {"net/w_momentum_v": SHAPE}),
    "adam": (
        lambda: optimize.AdamWeightDecayOptimizer(0.1),
        {"net/w/adam_m": SHAPE, "net/w/adam_v": SHAPE},
    ),
    "adafactor": (
        optimize.AdafactorOptimizer,
        {"net/w_slot_vr": SHAPE - SHAPE.dims[1], "net/w_slot_vc": SHAPE - SHAPE.dims[2]},
    ),
    "beta1": (
        lambda: optimize.AdafactorOptimizer(beta1=0.9, factored=False),
        {"net/w_slot_v": SHAPE, "net/w_slot_m": SHAPE},
    ),
    "too_small": (
        lambda: optimize.AdafactorOptimizer(min_dim_size_to_factor=129),
        {"net/w_slot_v": SHAPE},
    ),
    "stacked": (
        lambda: optimize.AdafactorOptimizer(stacked_dim_names=["in"]),
        {"net/w_slot_v": SHAPE},
    ),
    "two": (
        lambda: optimize.AdafactorOptimizer(stacked_dim_names=["in"], min_dim_size_to_factor=2),
        {"net/w_slot_vr": SHAPE - SHAPE.dims[2], "net/w_slot_vc": SHAPE - SHAPE.dims[0]},
    ),
    "schedules": (
        lambda: optimize.AdamWithMultiLRSchedule(["w"], [[0.1]], learning_rate=0.2),
        {"net/w/adam_m": SHAPE, "net/w/adam_v": SHAPE},
    ),
}


class Model:
    """A variable, and one that no gradient reaches."""

    def __init__(self, dtype=tf.float32):
        tf.train.get_or_create_global_step()
        self.graph = mtf.Graph()
        self.mesh = mtf.Mesh(self.graph, "mesh")
        with tf.variable_scope("net"):
            w = mtf.get_variable(
                self.mesh, "w", SHAPE, dtype=dtype, initializer=tf.ones_initializer()
            )
        mtf.get_variable(self.mesh, "unused", SHAPE, dtype=dtype)
        self.variables = list(self.graph.trainable_variables)
        loss = mtf.reduce_sum(mtf.square(mtf.to_float(w)))
        self.grads = mtf.gradients([loss], [v.value for v in self.variables])

    def slots(self):
        return [v for v in self.graph.all_variables if v not in self.variables]


@pytest.mark.parametrize("name", SLOTS)
@pytest.mark.parametrize(
    "dtype", [tf.float32, mtf.VariableDType(tf.bfloat16, tf.float32, tf.bfloat16)]
)
def test_slots(name, dtype, tf_graph, caplog):
    """Not trainable, float32 whatever the variable is; none for a variable without gradient."""
    make, expected = SLOTS[name]
    model = Model(dtype)
    updates = make().apply_grads(model.grads, model.variables)
    slots = {v.name: v for v in model.slots()}
    assert {n: v.shape for n, v in slots.items()} == expected
    assert not any(v.trainable for v in slots.values())
    if name != "momentum":
        assert {v.master_dtype for v in slots.values()} <= {tf.float32}
    assert [v.name for op in updates for v in op.variables].count("net/w") == 1
    assert "no gradient for variable unused; it is not updated" in caplog.text
    assert all("unused" not in v.name for op in updates for v in op.variables)


def test_nothing_to_update(tf_graph):
    model = Model()
    assert optimize.SgdOptimizer(0.1).apply_grads([None, None], model.variables) == []
    assert optimize.SgdOptimizer(0.1).apply_grads([], []) == []


RATES = {
    "number": lambda mesh: 0.25,
    "tf": lambda mesh: tf.constant(0.25),
    "tf_of_another_dtype": lambda mesh: tf.constant(0.25, tf.float64),
    "mtf": lambda mesh: mtf.constant(mesh, 0.25),
}
WITH_RATE = {
    "sgd": (optimize.SgdOptimizer, 0.25 * 2.0),
    "adam": (optimize.AdamWeightDecayOptimizer, 0.25 * 0.2 / ((0.001 * 4.0) ** 0.5 + 1e-6)),
    "adafactor": (lambda rate: optimize.AdafactorOptimizer(learning_rate=rate), 0.25),
}


@pytest.mark.parametrize("optimizer", WITH_RATE)
@pytest.mark.parametrize("rate", RATES)
def test_kinds_of_rates(optimizer, rate, tf_graph):
    make, expected = WITH_RATE[optimizer]
    model = Model()
    updates = make(RATES[rate](model.mesh)).apply_grads(model.grads, model.variables)
    impl = mtf.placement_mesh_impl.PlacementMeshImpl("x:2", "in:x", ["", ""])
    lowering = mtf.Lowering(model.graph, {model.mesh: impl})
    updates = [lowering.lowered_operation(op) for op in updates]
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        session.run(lowering.copy_masters_to_slices())
        session.run(updates)
        session.run(lowering.copy_slices_to_masters())
        [w] = [session.run(v) for v in tf.global_variables() if v.op.name == "net/w"]
    np.testing.assert_allclose(w, 1.0 - expected, rtol=1e-5)


def hparams(**others):
    return types.SimpleNamespace(
        **{
            "optimizer": "Adafactor",
            "optimizer_adafactor_decay_type": "pow",
            "optimizer_adafactor_beta2": 0.99,
            "optimizer_adafactor_memory_exponent": 0.7,
            "optimizer_adafactor_multiply_by_parameter_scale": False,
            "optimizer_adafactor_beta1": 0.5,
            "optimizer_adafactor_clipping_threshold": None,
            "optimizer_adafactor_factored": False,
            **others,
        }
    )


@pytest.mark.parametrize("decay_type", ["Adam", "pow"])
def test_hyperparameters(decay_type, tf_graph):
    model = Model()
    optimizer = optimize.make_optimizer(hparams(optimizer_adafactor_decay_type=decay_type), 0.3)
    assert type(optimizer) is optimize.AdafactorOptimizer
    assert optimizer.learning_rate == 0.3
    optimizer.apply_grads(model.grads, model.variables)
    assert {v.name for v in model.slots()} == {"net/w_slot_v", "net/w_slot_m"}


def test_gradient_descent_by_hyperparameters():
    optimizer = optimize.make_optimizer(hparams(optimizer="SGD"), 0.3)
    assert type(optimizer) is optimize.SgdOptimizer and optimizer.lr == 0.3


@pytest.mark.parametrize(
    "others, text",
    [
        ({"optimizer": "Adam"}, "hparams: optimizer='Adam' is none of"),
        (
            {"optimizer_adafactor_decay_type": "adam"},
            "optimizer_adafactor_decay_type='adam' is none of",
        ),
    ],
    ids=["optimizer", "decay_type"],
)
def test_unknown_hyperparameters(others, text, tf_graph):
    with pytest.raises(ValueError, match=text):
        optimize.make_optimizer(hparams(**others), 0.3)


def test_an_optimizer_must_say_how(tf_graph):
    model = Model()
    with pytest.raises(NotImplementedError, match="Optimizer has no apply_grad"):
        optimize.Optimizer().apply_grads(model.grads, model.variables)


def test_what_is_updated_are_variables(tf_graph):
    model = Model()
    values = [v.value for v in model.variables]
    with pytest.raises(
        TypeError, match=r"is a Tensor, the value of a variable\. Give the Variable"
    ):
        optimize.SgdOptimizer(0.1).apply_grads(model.grads, values)


def test_momentum_moves_by_the_last_velocity(tf_graph):
    """Not by the velocity of this step's gradient, as in the classic."""
    model = Model()
    updates = optimize.MomentumOptimizer(0.1, 0.5).apply_grads(model.grads, model.variables)
    impl = mtf.placement_mesh_impl.PlacementMeshImpl("", "", [""])
    lowering = mtf.Lowering(model.graph, {model.mesh: impl})
    step = [lowering.lowered_operation(op) for op in updates]
    w, velocity = np.float32(1), np.float32(0)
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        session.run(lowering.copy_masters_to_slices())
        for _ in range(3):
            session.run(step)
            w, velocity = w - velocity, velocity * 0.5 + 0.1 * 2 * w
        session.run(lowering.copy_slices_to_masters())
        values = session.run(model.variables[0].get_master())
    np.testing.assert_allclose(values, np.full(values.shape, w), rtol=1e-6)


class NoDecay(optimize.AdamWeightDecayOptimizer):
    """Decides by name, in the method that the classic has for it."""

    def _do_use_weight_decay(self, param_name):
        return param_name.endswith("/w")


class OwnScale(optimize.AdafactorOptimizer):
    """Overrides what the classic has as methods: default rates, factors, the scale."""

    def _learning_rate_default(self, multiply_by_parameter_scale):
        return tf.constant(0.25)

    def _decay_rate_default(self):
        return tf.constant(0.0)

    def _factored_dims(self, shape):
        dims = super()._factored_dims(shape)
        assert dims == (SHAPE.dims[1], SHAPE.dims[2])  # the largest first
        return dims

    def _parameter_scale(self, var):
        return mtf.reduce_max(var) * 4.0


@pytest.mark.parametrize("optimizer, expected", [(NoDecay(0.5, 0.2), 0.5 * 0.2), (OwnScale, 1.0)])
def test_methods_that_subclasses_override(optimizer, expected, tf_graph):
    model = Model()
    made = optimizer() if callable(optimizer) else optimizer
    w = model.variables[0]
    # No gradient but a decay; or one of ones, whose quotient by its root mean square is 1.
    grad = (mtf.ones_like if optimizer is OwnScale else mtf.zeros_like)(w.value)
    updates = made.apply_grad(grad, w)
    impl = mtf.placement_mesh_impl.PlacementMeshImpl("", "", [""])
    lowering = mtf.Lowering(model.graph, {model.mesh: impl})
    with tf.Session() as session:
        session.run([tf.global_variables_initializer()])
        session.run([lowering.lowered_operation(op) for op in updates])
        found = session.run(lowering.export_to_tf_tensor(w.value))
    np.testing.assert_allclose(found, 1.0 - expected, rtol=1e-6, atol=1e-6)
