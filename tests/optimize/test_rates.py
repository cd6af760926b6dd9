"""Learning rates: products of schedules, defaults, other rates for some variables."""

import dataclasses
import types

import gin
import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.utils import counted_steps

optimize = mtf.optimize
PREFIX = "mesh_tensorflow.optimize."


@pytest.fixture
def step(tf_graph):
    """The global step, in a fresh graph."""
    return tf.train.get_or_create_global_step()


def at(step, value, number):
    """Returns the value at a step."""
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        session.run(tf.assign(step, number))
        return session.run(tf.convert_to_tensor(value))


def fraction(step, total_train_steps):
    return tf.cast(step, tf.float32) / tf.cast(total_train_steps, tf.float32)


FACTORS = {
    "none": ([], 0, 1.0),
    "numbers": ([2.0, 3, 0.5], 0, 3.0),
    "schedule": ([2.0, fraction], 0, 2.0 * 6 / 40),
    "two_schedules": ((fraction, fraction), 0, (6 / 40) ** 2),
    "offset": ([fraction, 10], 4, 10 * 2 / 36),
}


@pytest.mark.parametrize("name", FACTORS)
def test_product(name, step):
    factors, offset, expected = FACTORS[name]
    rate = optimize.product_learning_rate(step, 40, factors, offset=offset)
    np.testing.assert_allclose(at(step, rate, 6), expected, rtol=1e-6)


def test_product_of_tensors(step):
    rate = optimize.product_learning_rate(step, 40, [tf.constant(0.5), 3])
    np.testing.assert_allclose(at(step, rate, 6), 1.5)


def test_product_by_gin(step):
    gin.external_configurable(fraction, "fraction_of_steps")
    gin.parse_config(f"""
        {PREFIX}product_learning_rate.factors = [@fraction_of_steps, 0.5]
        {PREFIX}product_learning_rate.offset = 2
    """)
    rate = optimize.product_learning_rate(step, 42)
    np.testing.assert_allclose(at(step, rate, 6), 0.5 * 4 / 40, rtol=1e-6)


@pytest.mark.parametrize(
    "factors, text",
    [
        (
            2.0,
            r"factors must be a list of numbers and schedules, not 2.0; put a single one in brackets",
        ),
        (
            [1.0, None],
            r"a number, a tf scalar or a function of \(step, total_train_steps\), not None",
        ),
    ],
    ids=["no_list", "no_factor"],
)
def test_product_errors(factors, text, step):
    with pytest.raises(ValueError, match=text):
        optimize.product_learning_rate(step, 40, factors)


def test_rate_for_each_schedule(step):
    base = tf.constant(0.25)
    rates = optimize.compute_lr_for_step([None, [2.0, 3.0], [fraction]], base, train_steps=10)
    assert rates[0] is base
    np.testing.assert_allclose([at(step, r, 5) for r in rates], [0.25, 6.0, 0.5])
    assert optimize.compute_lr_for_step([], base) == []


def test_number_of_steps_by_gin(step):
    [rate] = optimize.compute_lr_for_step([[fraction]], 0.1)
    np.testing.assert_allclose(at(step, rate, 2**18), 0.5)
    gin.parse_config(f"{PREFIX}compute_lr_for_step.train_steps = 100")
    [rate] = optimize.compute_lr_for_step([[fraction]], 0.1)
    np.testing.assert_allclose(at(step, rate, 25), 0.25)


@pytest.mark.parametrize("number", [0, 100, 9999, 40000])
@pytest.mark.parametrize(
    "relative, unit_scaling, factor",
    [(True, False, 1.0), (False, False, 0.05), (False, True, 1.0), (True, True, 1.0)],
)
def test_default_rate_of_adafactor(relative, unit_scaling, factor, number, step):
    if unit_scaling:
        gin.parse_config("mesh_tensorflow.layers.unit_scaling_convention.value = True")
    optimizer = optimize.AdafactorOptimizer(multiply_by_parameter_scale=relative)
    expected = factor * min((number + 1) ** -0.5, 0.01)
    np.testing.assert_allclose(at(step, optimizer.learning_rate, number), expected, rtol=1e-5)


@pytest.mark.parametrize("number", [0, 1, 7])
def test_decay_rates_of_adafactor(number, step):
    t = number + 1
    found = at(step, optimize.adafactor_decay_rate_pow(0.6, offset=-2), number)
    np.testing.assert_allclose(found, 1 - (t + 2) ** -0.6, rtol=1e-5)
    found = at(step, optimize.adafactor_decay_rate_adam(0.9), number)
    np.testing.assert_allclose(found, 0.9 * (1 - 0.9**number) / (1 - 0.9**t), rtol=1e-5, atol=1e-7)


ADAFACTORS = {
    "default": lambda: optimize.AdafactorOptimizer(),
    "absolute": lambda: optimize.AdafactorOptimizer(False, beta1=0.5),
    "hparams": lambda: optimize.adafactor_optimizer_from_hparams(
        types.SimpleNamespace(
            optimizer_adafactor_decay_type="Adam",
            optimizer_adafactor_beta2=0.9,
            optimizer_adafactor_multiply_by_parameter_scale=True,
            optimizer_adafactor_beta1=0.0,
            optimizer_adafactor_clipping_threshold=1.0,
            optimizer_adafactor_factored=True,
        ),
        0.1,
    ),
}


@pytest.mark.parametrize("name", ADAFACTORS)
def test_adafactor_made_once_in_eager_code_follows_the_step(name):
    """Its default rates are those of each step, and not of that at which it was made."""

    def train(optimizer_of_step):
        store = mtf.VariableStore()
        for number in range(3):
            with store.scope(), counted_steps(tf.constant(number)):
                graph = mtf.Graph()
                mesh = mtf.Mesh(graph, "mesh")
                w = mtf.get_variable(mesh, "w", "d:3", initializer=tf.ones_initializer())
                grad = mtf.constant(mesh, [1.0 + number, -2.0, 0.5 * number], w.shape)
                optimizer_of_step().apply_grads([grad], graph.trainable_variables)
                impl = mtf.placement_mesh_impl.PlacementMeshImpl("", "", [""])
                mtf.Lowering(graph, {mesh: impl})
        return {n: v.numpy() for n, v in store.masters.items()}

    with counted_steps(tf.constant(0)):
        once = ADAFACTORS[name]()
    expected, found = train(ADAFACTORS[name]), train(lambda: once)
    for n, value in expected.items():
        np.testing.assert_allclose(found[n], value, rtol=1e-6, err_msg=n)


@dataclasses.dataclass
class Unhashable:
    """A schedule with a list in it, which counts its calls."""

    values: list
    calls: int = 0

    def __call__(self, step):
        self.calls += 1
        return self.values[0] + 0.0 * step


def test_schedule_that_is_not_hashable_is_called_once(step):
    rate = Unhashable([0.1])
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")
    weights = [mtf.get_variable(mesh, n, "d:2") for n in "ab"]
    optimize.SgdOptimizer(rate).apply_grads(weights, graph.trainable_variables)
    assert rate.calls == 1


# -- other rates for some variables


# With gradient 1: Adam's averages are 0.1 and 0.001, without correction.
FIRST_STEP = {
    optimize.AdafactorWithMultiLRSchedule: -0.1,
    optimize.AdamWithMultiLRSchedule: -0.1 * 0.1 / (0.001**0.5 + 1e-6),
}


def changes(cls, *args, **kwargs):
    """Returns the first step of variables "aa", "ab" and "bb", in units of the base rate's."""
    with tf.Graph().as_default():
        tf.train.get_or_create_global_step()
        graph = mtf.Graph()
        mesh = mtf.Mesh(graph, "mesh")
        shape = mtf.Shape([mtf.Dimension("d", 2)])
        if cls is optimize.AdafactorWithMultiLRSchedule:
            kwargs["multiply_by_parameter_scale"] = False
        for name in ("aa", "ab", "bb"):
            mtf.get_variable(mesh, name, shape, initializer=tf.zeros_initializer())
        variables = graph.trainable_variables
        optimizer = cls(*args, learning_rate=0.1, **kwargs)
        updates = optimizer.apply_grads([mtf.ones(mesh, shape)] * 3, variables)
        impl = mtf.placement_mesh_impl.PlacementMeshImpl("", "", [""])
        lowering = mtf.Lowering(graph, {mesh: impl})
        updates = [lowering.lowered_operation(op) for op in updates]
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            session.run(lowering.copy_masters_to_slices())
            session.run(updates)
            session.run(lowering.copy_slices_to_masters())
            step = [
                session.run(v)[0] for v in tf.global_variables() if v.op.name in ("aa", "ab", "bb")
            ]
    return np.array(step) / FIRST_STEP[cls]


ALTERNATIVES = {
    "none": ((), [1, 1, 1]),
    "no_schedules": ((["a"], None), [1, 1, 1]),
    "no_patterns": (([], []), [1, 1, 1]),
    "one": ((["a"], [[0.2]]), [2, 2, 1]),
    "expression": ((["^a.*b$"], [[0.5, 2.0]]), [1, 10, 1]),
    "alternatives": ((["aa|bb"], [[0.3]]), [3, 1, 3]),
    "base_rate": ((["a"], [None]), [1, 1, 1]),
    "last_one_counts": ((["aa", "b"], [[0.2], [0.3]]), [1, 3, 3]),
    "more_schedules": ((["aa"], [[0.2], [0.3]]), [2, 1, 1]),
}


@pytest.mark.slow_but(10)
@pytest.mark.parametrize("cls", FIRST_STEP)
@pytest.mark.parametrize("name", ALTERNATIVES)
def test_alternative_rates(cls, name):
    arguments, expected = ALTERNATIVES[name]
    np.testing.assert_allclose(changes(cls, *arguments), expected, rtol=1e-4)


def test_patterns_without_effect_are_logged(caplog):
    changes(optimize.AdamWithMultiLRSchedule, ["aa", "b"], [[0.2], [0.3]])
    assert (
        "aa matches one of ['aa'], but only the last expression, 'b', has an effect" in caplog.text
    )
    assert "ab matches" not in caplog.text


def test_too_few_schedules(step):
    with pytest.raises(
        ValueError, match=r"each of variable_search \['a', 'b'\] needs one of alt_lr"
    ):
        optimize.AdafactorWithMultiLRSchedule(["a", "b"], [[1.0]], learning_rate=0.1)


def test_alternatives_by_gin(step):
    gin.parse_config(f"""
        {PREFIX}AdamWithMultiLRSchedule.variable_search = ["b"]
        {PREFIX}AdamWithMultiLRSchedule.alt_lr_schedules = [[2.0]]
        {PREFIX}AdamWeightDecayOptimizer.learning_rate = 0.5
        {PREFIX}AdamWeightDecayOptimizer.weight_decay_rate = 0.25
    """)
    optimizer = optimize.AdamWithMultiLRSchedule()
    assert (optimizer.variable_search, optimizer.alt_lr_schedules) == (["b"], [[2.0]])
    assert (optimizer.learning_rate, optimizer.weight_decay_rate) == (0.5, 0.25)
