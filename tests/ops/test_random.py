"""Random values: the same in every layout and process, otherwise independent."""

import os
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from scipy import stats

import mesh_tensorflow as mtf
from mesh_tensorflow._mesh import random_values
from mesh_tensorflow.testing import harness
from mesh_tensorflow.testing.harness import Placing

A, B = mtf.Dimension("a", 8), mtf.Dimension("b", 48)
PLACINGS = [
    Placing("", ""),
    Placing("x:2", "a:x"),
    Placing("x:4", "b:x"),
    Placing("x:8", "a:x", apart=True),
    Placing("x:2,y:2", "a:x,b:y"),
    Placing("x:2,y:4", "a:y"),
    Placing("x:2,y:4", "b:x,a:y", apart=True),
    Placing("x:2,y:2,z:2", "b:z"),
]


def run(build, placings=(Placing("", ""),), seed=5, runs=1):
    """Returns, for each run of one session and each placing, the values of what `build` makes.

    Each placing is lowered in a graph of its own.
    """
    results = []
    for placing in placings:
        with tf.Graph().as_default():
            if seed is not None:
                tf.set_random_seed(seed)
            graph = mtf.Graph()
            mesh = mtf.Mesh(graph, "mesh")
            tensors = harness.as_list(build(mesh))
            lowered = harness.lower(graph, mesh, placing, tensors)
            with harness.session() as session:
                results.append([session.run(lowered.exports) for _ in range(runs)])
    return [list(per_run) for per_run in zip(*results)]


def sample(build, seed=5):
    """Returns the value of one tensor on one processor."""
    return run(lambda mesh: build(mesh), seed=seed)[0][0][0]


LARGE = [mtf.Dimension("a", 128), mtf.Dimension("b", 512)]

DISTRIBUTIONS = {
    "uniform": lambda mesh, dims, **kw: mtf.random_uniform(mesh, dims, **kw),
    "uniform_range": lambda mesh, dims, **kw: mtf.random_uniform(
        mesh, dims, minval=-3.0, maxval=0.5, **kw
    ),
    "uniform_int": lambda mesh, dims, **kw: mtf.random_uniform(
        mesh, dims, minval=-5, maxval=17, dtype=tf.int32, **kw
    ),
    "uniform_int64": lambda mesh, dims, **kw: mtf.random_uniform(
        mesh, dims, minval=0, maxval=2**40, dtype=tf.int64, **kw
    ),
    "uniform_wide": lambda mesh, dims, **kw: mtf.random_uniform(
        mesh, dims, minval=-(2**63), maxval=2**63 - 1, dtype=tf.int64, **kw
    ),
    "uniform_wide_tensors": lambda mesh, dims, **kw: mtf.random_uniform(
        mesh,
        dims,
        minval=tf.constant(-(2**63), tf.int64),
        maxval=tf.constant(2**63 - 1, tf.int64),
        dtype=tf.int64,
        **kw,
    ),
    "normal": lambda mesh, dims, **kw: mtf.random_normal(mesh, dims, **kw),
    "normal_scaled": lambda mesh, dims, **kw: mtf.random_normal(
        mesh, dims, mean=2.0, stddev=0.3, **kw
    ),
    "truncated_normal": lambda mesh, dims, **kw: mtf.RandomOperation(
        mesh, dims, tf.random.truncated_normal, **kw
    ).outputs[0],
    "uniform_bfloat16": lambda mesh, dims, **kw: mtf.random_uniform(
        mesh, dims, dtype=tf.bfloat16, **kw
    ),
    "normal_float64": lambda mesh, dims, **kw: mtf.random_normal(
        mesh, dims, dtype=tf.float64, **kw
    ),
    "uniform_float64": lambda mesh, dims, **kw: mtf.random_uniform(
        mesh, dims, dtype=tf.float64, **kw
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_same_bits_in_every_layout(name):
    """With a program seed, each of three operations, in two runs."""
    make = DISTRIBUTIONS[name]

    def build(mesh):
        return [make(mesh, [A, B]), make(mesh, [B, A]), make(mesh, [A])]

    for expected, *others in run(build, PLACINGS, runs=2):
        for placing, values in zip(PLACINGS[1:], others):
            for value, e in zip(values, expected):
                assert value.dtype == e.dtype
                np.testing.assert_array_equal(value, e, err_msg=str(placing))


@pytest.mark.slow
def test_same_bits_with_a_seed_of_its_own():
    def build(mesh):
        return mtf.random_normal(mesh, [A, B], seed=11)

    for seed in (None, 5):
        [(expected, *others)] = run(build, PLACINGS, seed=seed)
        for value in others:
            np.testing.assert_array_equal(value[0], expected[0])


def test_without_a_seed_values_differ():
    def build(mesh):
        return mtf.random_uniform(mesh, [A, B])

    [(first, second)] = run(build, PLACINGS[:2], seed=None)
    assert not np.array_equal(first[0], second[0])


def test_runs_operations_and_seeds_differ():
    def build(mesh):
        return [mtf.random_uniform(mesh, [A, B]) for _ in range(3)]

    first, second = (values[0] for values in run(build, runs=2))
    [[other]] = run(build, seed=6)
    arrays = [*first, *second, *other]
    for i, x in enumerate(arrays):
        for y in arrays[:i]:
            assert np.mean(x == y) < 0.01


def test_zeros_are_seeds():
    def build(mesh):
        return mtf.random_uniform(mesh, [A, B], seed=0)

    found = [run(build, seed=0, runs=2) for _ in range(2)]
    np.testing.assert_array_equal(found[0], found[1])
    assert not np.array_equal(*found[0])


def test_equal_slices_are_equal_on_all_processors(tf_graph):
    tf.set_random_seed(3)
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")
    x = mtf.random_normal(mesh, [A])
    with harness.separate_memories():
        impl = Placing("x:2,y:2", "a:x", apart=True).impl()
        lowering = mtf.Lowering(graph, {mesh: impl})
    with harness.session() as session:
        slices = session.run(lowering.tensors[x].to_laid_out_tensor().all_slices)
    np.testing.assert_array_equal(slices[0], slices[1])
    np.testing.assert_array_equal(slices[2], slices[3])
    assert not np.array_equal(slices[0], slices[2])


def _in_loop(mesh):
    zero = mtf.constant(mesh, 0, dtype=tf.int32)
    place = mtf.Dimension("iteration", 4)

    def body(i, total):
        noise = mtf.random_uniform(mesh, [A, B])
        where = mtf.one_hot(i, place)
        return [i + 1, total + mtf.einsum([noise, where], output_shape=[place, A, B])]

    return mtf.while_loop(
        lambda i, _: mtf.less(i, 4), body, [zero, mtf.zeros(mesh, [place, A, B])]
    )[1]


@pytest.mark.slow
def test_iterations_of_a_loop():
    first, second = run(_in_loop, PLACINGS, runs=2)
    for expected, *others in (first, second):
        for value in others:
            np.testing.assert_array_equal(value[0], expected[0])
    rows = [*first[0][0], *second[0][0]]
    for i, x in enumerate(rows):
        for y in rows[:i]:
            assert np.mean(x == y) < 0.01


def _until_drawn(mesh):
    """A loop that ends by chance, as its condition draws anew in each iteration."""

    def goes_on(i, _):
        return mtf.less(mtf.reduce_mean(mtf.random_uniform(mesh, [A])), 0.6)

    zero = mtf.constant(mesh, 0, dtype=tf.int32)
    return mtf.while_loop(
        goes_on,
        lambda i, total: [i + 1, total + mtf.random_uniform(mesh, [A])],
        [zero, mtf.zeros(mesh, [A])],
        maximum_iterations=60,
    )


def test_a_condition_draws_in_each_iteration():
    placings = [*PLACINGS[:2], Placing("x:2", "a:x", simd=True)]
    counts = set()
    for expected, *others in run(_until_drawn, placings, runs=5):
        counts.add(int(expected[0]))
        for values in others:
            for value, e in zip(values, expected):
                np.testing.assert_array_equal(value, e)
    assert len(counts) > 1 and max(counts) < 60


def test_keys_of_iterations_have_no_part_in_common():
    keys = [random_values.fold_key(tf.constant([7, 9], tf.uint32), i) for i in range(16)]
    assert len(np.unique([key.numpy() for key in keys])) == 16 * 4


PROCESS = """
import numpy as np, tensorflow.compat.v1 as tf, mesh_tensorflow as mtf
tf.set_random_seed(9)
with tf.Graph().as_default():
    tf.set_random_seed(9)
    graph = mtf.Graph(); mesh = mtf.Mesh(graph, "mesh")
    x = mtf.random_normal(mesh, "a:8,b:48")
    v = mtf.get_variable(mesh, "v", "a:8,b:48")
    y = mtf.dropout(v + x, rate=0.5)
    impl = mtf.placement_mesh_impl.PlacementMeshImpl("x:4", "b:x", [""] * 4)
    lowering = mtf.Lowering(graph, {mesh: impl})
    out = [lowering.export_to_tf_tensor(t) for t in (x, v, y)]
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        session.run(lowering.copy_masters_to_slices())
        print(*[value.tobytes().hex() for value in session.run(out)])
"""


@pytest.mark.slow
def test_same_bits_in_another_process():
    outputs = set()
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            text=True,
        )
        for hash_seed in ("1", "2")
    ]
    for process in processes:
        outputs.add(process.communicate()[0])
        assert process.returncode == 0
    assert len(outputs) == 1 and len(outputs.pop().split()) == 3


# -- distributions

FLOATING = {
    "uniform": stats.uniform(),
    "uniform_range": stats.uniform(-3.0, 3.5),
    "normal": stats.norm(),
    "normal_scaled": stats.norm(2.0, 0.3),
    "truncated_normal": stats.truncnorm(-2, 2),
    "normal_float64": stats.norm(),
    "uniform_float64": stats.uniform(),
}


@pytest.mark.parametrize("name", FLOATING)
def test_distribution(name):
    """Kolmogorov and Smirnov; the seed is fixed, so that the result is."""
    values = sample(lambda mesh: DISTRIBUTIONS[name](mesh, LARGE)).ravel()
    expected = FLOATING[name]
    assert stats.kstest(values, expected.cdf).pvalue > 0.01
    n = values.size
    assert abs(values.mean() - expected.mean()) < 4 * expected.std() / np.sqrt(n)
    assert abs(values.var() / expected.var() - 1) < 0.02
    low, high = expected.support()
    assert values.min() >= low and values.max() <= high


@pytest.mark.parametrize(
    "name, low, high",
    [
        ("uniform_int", -5, 17),
        ("uniform_int64", 0, 2**40),
        ("uniform_wide", -(2**63), 2**63 - 1),
        ("uniform_wide_tensors", -(2**63), 2**63 - 1),
    ],
)
def test_integers(name, low, high):
    values = sample(lambda mesh: DISTRIBUTIONS[name](mesh, LARGE)).ravel()
    assert values.min() >= low and values.max() < high
    buckets = np.histogram(values.astype(np.float64), 22, (low, high))[0]
    assert stats.chisquare(buckets).pvalue > 0.01
    if high - low <= 22:
        assert set(values) == set(range(low, high))


def test_bfloat16_uniform():
    values = sample(lambda mesh: DISTRIBUTIONS["uniform_bfloat16"](mesh, LARGE))
    assert values.dtype == tf.bfloat16.as_numpy_dtype
    values = values.astype(np.float64).ravel()
    assert values.min() == 0.0 and values.max() == 1 - 2.0**-8
    assert stats.chisquare(np.unique(values, return_counts=True)[1]).pvalue > 0.01
    assert len(np.unique(values)) == 256


@pytest.mark.parametrize("ends", ["numbers", "tensors"])
@pytest.mark.parametrize("dtype", [tf.bfloat16, tf.float16])
def test_uniform_values_are_below_the_end(dtype, ends):
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    low, high = (1.0, 2.0) if ends == "numbers" else (tf.constant(1.0), tf.constant(2.0))
    x = mtf.random_uniform(mesh, "d:40000", minval=low, maxval=high, dtype=dtype, seed=1)
    values = x.numpy().astype(np.float32)
    assert values.min() == 1.0 and values.max() < 2.0
    np.testing.assert_allclose(values.mean(), 1.5, atol=0.01)


def test_neighbours_operations_and_runs_are_independent():
    def build(mesh):
        return [mtf.random_uniform(mesh, LARGE) for _ in range(2)]

    first, second = (values[0] for values in run(build, runs=2))
    x = first[0]
    bound = 4 / np.sqrt(x.size)
    pairs = [
        (x[:, 1:], x[:, :-1]),
        (x[1:], x[:-1]),
        (x[:, 2:], x[:, :-2]),
        (x[:, 64:], x[:, :-64]),
        (x, first[1]),
        (x, second[0]),
        (first[1], second[0]),
    ]
    for a, b in pairs:
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < bound
    # Each bit of the value is even too.
    bits = (x.ravel() * 2**24).astype(np.int64)
    for bit in range(24):
        assert abs(np.mean(bits >> bit & 1) - 0.5) < 4 * 0.5 / np.sqrt(x.size)


# -- dropout

N = mtf.Shape(LARGE).size


@pytest.mark.parametrize("dtype", [tf.float32, tf.bfloat16])
@pytest.mark.parametrize(
    "call",
    [
        lambda x: mtf.dropout(x, True, keep_prob=0.8),
        lambda x: mtf.dropout(x, True, rate=0.2),
        lambda x: mtf.dropout(x, is_training=True, rate=0.2),
        lambda x: mtf.dropout(x, rate=0.2),
        lambda x: mtf.dropout(x, keep_prob=0.8),
        lambda x: mtf.dropout(x, 0.8),
        lambda x: mtf.dropout(x, True, keep_prob=tf.constant(0.8)),
    ],
    ids=["keep", "rate", "named", "rate_alone", "keep_alone", "legacy", "tf_scalar"],
)
def test_dropout_keeps_and_scales(call, dtype):
    y = sample(lambda mesh: call(mtf.ones(mesh, LARGE, dtype=dtype)))
    assert y.dtype == dtype.as_numpy_dtype
    y = y.astype(np.float64)
    kept = y != 0
    assert abs(kept.mean() - 0.8) < 4 * np.sqrt(0.8 * 0.2 / N)
    np.testing.assert_allclose(y[kept], 1.25, rtol=4e-3)


@pytest.mark.parametrize(
    "call",
    [
        lambda x: mtf.dropout(x, False, rate=0.5),
        lambda x: mtf.dropout(x, False, keep_prob=0.5),
        lambda x: mtf.dropout(x, True, rate=0.0),
        lambda x: mtf.dropout(x, True, keep_prob=1.0),
        lambda x: mtf.dropout(x, 1.0),
    ],
)
def test_dropout_returns_its_argument(call, tf_graph):
    graph = mtf.Graph()
    x = mtf.ones(mtf.Mesh(graph, "mesh"), [A])
    assert call(x) is x and len(graph.operations) == 1


@pytest.mark.parametrize("keep_prob, kept", [(1.0, 1.0), (0.5, 0.0)])
def test_all_bits_are_kept_where_a_schedule_ends(keep_prob, kept, tf_graph):
    bits = tf.constant([2**32 - 1], tf.uint32)
    with tf.Session() as session:
        mask = random_values.keep_where(bits, tf.float32, tf.constant(keep_prob))
        assert session.run(mask) == [kept]


def test_dropout_shares_noise_and_gradient():
    def build(mesh):
        x = mtf.ones(mesh, [A, B])
        y = mtf.dropout(x, rate=0.5, noise_shape=[A])
        return [y, mtf.gradients([y], [x])[0]]

    for values in zip(*run(build, PLACINGS)[0]):
        for value in values:
            np.testing.assert_array_equal(value, values[0])
    [[(y, dx)]] = run(build)
    np.testing.assert_array_equal(y, np.repeat(y[:, :1], B.size, 1))
    np.testing.assert_array_equal(y, dx)
    assert set(np.unique(y)) == {0.0, 2.0}


# -- sampling


def test_sample_with_temperature_frequencies():
    rows, choices = mtf.Dimension("rows", 20000), mtf.Dimension("choices", 5)
    logits = np.array([0.3, -1.0, 2.0, 0.0, 0.9], np.float32)
    for temperature in (1.0, 0.5, 3.0):

        def build(mesh, temperature=temperature):
            x = mtf.import_tf_tensor(mesh, logits, [choices])
            x = mtf.broadcast(x, [rows, choices])
            return mtf.sample_with_temperature(x, choices, temperature)

        drawn = sample(build)
        assert drawn.dtype == np.int32 and drawn.shape == (rows.size,)
        weights = np.exp(logits.astype(np.float64) / temperature)
        expected = weights / weights.sum() * rows.size
        assert stats.chisquare(np.bincount(drawn, minlength=5), expected).pvalue > 0.01


@pytest.mark.slow
def test_sample_with_temperature_zero_and_layouts():
    logits = np.random.RandomState(0).normal(size=[8, 48]).astype(np.float32)

    def build(mesh):
        x = mtf.import_tf_tensor(mesh, logits, [A, B])
        return [
            mtf.sample_with_temperature(x, B, 0.0),
            mtf.sample_with_temperature(x, B, 0.7),
            mtf.sample_with_temperature(mtf.cast(x, tf.bfloat16), B, 0.7),
        ]

    expected, *others = run(build, PLACINGS)[0]
    np.testing.assert_array_equal(expected[0], logits.argmax(1))
    for values in others:
        for value, e in zip(values, expected):
            np.testing.assert_array_equal(value, e)


# -- initial values

INITIALIZERS = {
    "default": None,
    "normal": tf.random_normal_initializer(stddev=0.1),
    "uniform": tf.random_uniform_initializer(-0.1, 0.1),
    "truncated": tf.truncated_normal_initializer(),
    "scaling": tf.variance_scaling_initializer(),
    "class": tf.random_normal_initializer,
    "of_keras": keras.initializers.GlorotUniform(),
    "constant": tf.constant_initializer(3.0),
}


def initial_values(placing, names, seed=7, initializer=None):
    with tf.Graph().as_default(), harness.separate_memories():
        tf.set_random_seed(seed)
        graph = mtf.Graph()
        mesh = mtf.Mesh(graph, "mesh")
        variables = [
            mtf.get_variable(mesh, name, [A, B], initializer=initializer) for name in names
        ]
        impl = placing.impl()
        lowering = mtf.Lowering(graph, {mesh: impl})
        values = [lowering.export_to_tf_tensor(v) for v in variables]
        with harness.session() as session:
            session.run(tf.global_variables_initializer())
            session.run(lowering.copy_masters_to_slices())
            return dict(zip(names, session.run(values)))


@pytest.mark.slow_but(4)
@pytest.mark.parametrize("name", INITIALIZERS)
def test_initial_values(name):
    kwargs = {"initializer": INITIALIZERS[name]}
    expected = initial_values(PLACINGS[0], ["u", "v"], **kwargs)
    for placing in PLACINGS[1:5]:
        values = initial_values(placing, ["u", "v"], **kwargs)
        for key, value in values.items():
            np.testing.assert_array_equal(value, expected[key])
    # They go by name: neither the order of the variables nor others beside them matter.
    other = initial_values(PLACINGS[0], ["more", "v", "u"], **kwargs)
    np.testing.assert_array_equal(other["v"], expected["v"])
    if name != "constant":
        assert not np.array_equal(expected["u"], expected["v"])
        changed = initial_values(PLACINGS[0], ["u"], seed=8, **kwargs)
        assert not np.array_equal(changed["u"], expected["u"])


def test_initial_values_of_one_name_in_two_scopes_differ():
    values = initial_values(PLACINGS[0], ["first/kernel", "second/kernel"])
    assert np.mean(values["first/kernel"] == values["second/kernel"]) < 0.01
