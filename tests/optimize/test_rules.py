"""Rules of optimizers against NumPy and against Keras, in every front end."""

import numpy as np
import pytest
import tensorflow as tf2
import tensorflow.compat.v1 as tf

import mesh_tensorflow as mtf
from mesh_tensorflow import simd_mesh_impl
from mesh_tensorflow.testing import harness

optimize = mtf.optimize
keras = tf2.keras.optimizers
CPUS = [f"/cpu:{i}" for i in range(4)]
ROWS, COLS = mtf.Dimension("r", 4), mtf.Dimension("c", 6)
START = np.random.RandomState(0).uniform(-1, 1, [4, 6]).astype(np.float32)
SCALE = np.random.RandomState(1).uniform(0.5, 2, [4, 6]).astype(np.float32)
STEPS = 4


def momentum(nesterov):
    """SGD with momentum; returns a function of (w, gradient, state, step)."""

    def rule(w, g, s, t):
        m = s["m"] = 0.9 * s.get("m", 0) + g
        return w - 0.1 * (0.9 * m + g if nesterov else m)

    return rule


def adamw(w, g, s, t, decay=0.1):
    m = s["m"] = 0.9 * s.get("m", 0) + 0.1 * g
    v = s["v"] = 0.99 * s.get("v", 0) + 0.01 * g**2
    return w - 0.1 * (m / (1 - 0.9**t) / (np.sqrt(v / (1 - 0.99**t)) + 1e-8) + decay * w)


def lion(w, g, s, t):
    m = s.get("m", 0)
    s["m"] = 0.99 * m + 0.01 * g
    return w - 0.1 * (np.sign(0.9 * m + 0.1 * g) + 0.2 * w)


def in_numpy(rule):
    """Returns the values after each step."""
    w, state, found = START.astype(np.float64), {}, []
    for t in range(1, STEPS + 1):
        w = rule(w, np.cos(w) * SCALE, state, t)
        found.append(w)
    return found


def by_keras(optimizer):
    """Returns the values after each step of one of Keras' optimizers."""
    v, found = tf2.Variable(START), []
    for _ in range(STEPS):
        optimizer.apply_gradients([(tf.cos(v) * SCALE, v)])
        found.append(v.numpy())
    return found


def rate(step):
    return 0.1 / (1.0 + step)


KERAS = {
    "sgd": lambda: keras.SGD(0.1),
    "sgd_momentum": lambda: keras.SGD(0.1, momentum=0.9, weight_decay=0.1),
    "sgd_nesterov": lambda: keras.SGD(0.1, momentum=0.9, nesterov=True),
    "adam": lambda: keras.Adam(0.1, beta_2=0.99, clipvalue=0.5),
    "amsgrad": lambda: keras.Adam(0.1, amsgrad=True),
    "adamw": lambda: keras.AdamW(0.1, weight_decay=0.1),
    "lion": lambda: keras.Lion(0.1, weight_decay=0.2),
    "rmsprop": lambda: keras.RMSprop(0.1),
    "rmsprop_all": lambda: keras.RMSprop(0.1, momentum=0.5, centered=True),
    "adagrad": lambda: keras.Adagrad(0.1),
    "adadelta": lambda: keras.Adadelta(0.1),
    "adamax": lambda: keras.Adamax(0.1),
}
OWN = {
    "momentum": (lambda: optimize.SgdOptimizer(0.1, 0.9), momentum(False)),
    "nesterov": (lambda: optimize.SgdOptimizer(0.1, 0.9, nesterov=True), momentum(True)),
    "adamw": (lambda: optimize.AdamWOptimizer(0.1, 0.1, beta_2=0.99), adamw),
    "adamw_excluded": (
        lambda: optimize.AdamWOptimizer(
            0.1, 0.1, beta_2=0.99, exclude_from_weight_decay=["_excluded$"]
        ),
        lambda w, g, s, t: adamw(w, g, s, t, decay=0),
    ),
    "lion": (lambda: optimize.LionOptimizer(0.1, 0.2), lion),
    "scheduled": (lambda: optimize.SgdOptimizer(rate), lambda w, g, s, t: w - rate(t - 1) * g),
    "scheduled_lion": (
        lambda: optimize.LionOptimizer(rate),
        lambda w, g, s, t: w - rate(t - 1) * np.sign(g),
    ),
}


class Training:
    """A program in which each optimizer trains a variable of its name."""

    def __init__(self, optimizers):
        self.graph = mtf.Graph()
        self.mesh = mtf.Mesh(self.graph, "mesh")
        scale = mtf.import_tf_tensor(self.mesh, tf.constant(SCALE), [ROWS, COLS])
        self.updates, self.names = [], list(optimizers)
        for name, optimizer in optimizers.items():
            initializer = tf.constant_initializer(START)
            w = mtf.get_variable(self.mesh, name, [ROWS, COLS], initializer=initializer)
            [grad] = mtf.gradients([mtf.reduce_sum(mtf.sin(w) * scale)], [w])
            self.updates += optimizer.apply_grads([grad], [w.operation])


def placement():
    return mtf.placement_mesh_impl.PlacementMeshImpl("x:2,y:2", "r:x,c:y", [""] * 4)


def in_session(make, simd=False):
    """Returns the values of each variable after each step."""
    with tf.Graph().as_default(), harness.session() as session:
        step = tf.train.get_or_create_global_step()
        masters = {}

        def program():
            training = Training(make())
            impl = simd_mesh_impl.SimdMeshImpl("x:2,y:2", "r:x,c:y") if simd else placement()
            lowering = mtf.Lowering(training.graph, {training.mesh: impl})
            masters.update({v.name: v.get_master() for v in training.graph.all_variables})
            return [
                tf.group([lowering.lowered_operation(op) for op in training.updates]),
                *([] if simd else [lowering]),
            ]

        if simd:
            train = simd_mesh_impl.replicate(lambda: program()[0], devices=CPUS)
            before = []
        else:
            train, lowering = program()
            before = lowering.copy_masters_to_slices()
        session.run(tf.global_variables_initializer())
        session.run(before)
        found = {name: [] for name in make()}
        for number in range(STEPS):
            session.run(tf.assign(step, number))
            session.run(train)
            for name, values in found.items():
                values.append(session.run(masters[name].read_value()))
    return found


def in_function(make):
    step = tf2.compat.v1.train.get_or_create_global_step()

    @mtf.function
    def train():
        training = Training(make())
        lowering = mtf.Lowering(training.graph, {training.mesh: placement()})
        with tf.control_dependencies([lowering.lowered_operation(op) for op in training.updates]):
            return tf.constant(0)

    return stepwise(train, lambda name: train.store.value(name), step, list(make()))


def eagerly(make):
    step = tf2.compat.v1.train.get_or_create_global_step()
    store = mtf.VariableStore()

    def train():
        with store.scope():
            training = Training(make())
            mtf.Lowering(training.graph, {training.mesh: placement()})

    return stepwise(train, store.value, step, list(make()))


def stepwise(train, value, step, names):
    found = {name: [] for name in names}
    for number in range(STEPS):
        step.assign(number)
        train()
        for name, values in found.items():
            values.append(value(name).numpy())
    step.assign(0)
    return found


def own():
    return {name: make() for name, (make, _) in OWN.items()}


FRONT_ENDS = {
    "session": in_session,
    "simd": lambda make: in_session(make, simd=True),
    "function": in_function,
    "eager": eagerly,
}


@pytest.mark.slow_but(1)
@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_numpy(front_end):
    found = FRONT_ENDS[front_end](own)
    for name, (_, rule) in OWN.items():
        np.testing.assert_allclose(found[name], in_numpy(rule), rtol=2e-5, atol=1e-6, err_msg=name)


@pytest.mark.slow
def test_keras():
    """Keras' formulas by `from_keras`; also this package's own, where they are the same."""
    expected = {name: by_keras(make()) for name, make in KERAS.items()}
    given = {name: make() for name, make in KERAS.items()}
    found = in_session(
        lambda: {name: optimize.from_keras(k, name="k") for name, k in given.items()}
    )
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=5e-5, atol=1e-5, err_msg=name)
    same = {
        "sgd_nesterov": lambda: optimize.SgdOptimizer(0.1, 0.9, nesterov=True),
        "adamw": lambda: optimize.AdamWOptimizer(0.1, 0.1),
        "lion": lambda: optimize.LionOptimizer(0.1, 0.2),
    }
    found = in_session(lambda: {name: make() for name, make in same.items()})
    for name in same:
        np.testing.assert_allclose(found[name], expected[name], rtol=5e-5, atol=1e-5, err_msg=name)


def test_schedule_of_keras():
    decay = keras.schedules.ExponentialDecay(0.1, 2, 0.5)
    expected = by_keras(keras.SGD(decay))
    for front_end in (in_session, eagerly):
        found = front_end(lambda: {"w": optimize.from_keras(keras.SGD(decay))})
        np.testing.assert_allclose(found["w"], expected, rtol=1e-5)


SLOTS = {
    "sgd": (lambda: optimize.SgdOptimizer(0.1, momentum=0.9), ["w/sgd_momentum"]),
    "adamw": (lambda: optimize.AdamWOptimizer(0.1), ["w/adamw_m", "w/adamw_v", "w/adamw_t"]),
    "lion": (lambda: optimize.LionOptimizer(0.1), ["w/lion_m"]),
    "adagrad": (lambda: optimize.from_keras(keras.Adagrad()), ["w/keras_adagrad_v"]),
    "amsgrad": (
        lambda: optimize.from_keras(keras.Adam(amsgrad=True), name="a"),
        ["w/a_m", "w/a_v", "w/a_v_hat", "w/a_t"],
    ),
    "elementwise": (
        lambda: optimize.elementwise(lambda g, s, w, r, t: (-g, {"a": g}), {"a": 0.0}),
        ["w/elementwise_a", "w/elementwise_t"],
    ),
}


@pytest.mark.parametrize("name", SLOTS)
def test_names_of_slots(name):
    """In float32, whatever the variable is, and none of them trainable."""
    make, expected = SLOTS[name]
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    dtype = mtf.VariableDType(tf.float32, tf.float32, tf.bfloat16)
    w = mtf.get_variable(mesh, "w", [ROWS], dtype=dtype)
    updates = make().apply_grads([mtf.ones_like(w), None], [w.operation, w.operation])
    slots = [v for v in mesh.graph.all_variables if v.name != "w"]
    assert [v.name for v in slots] == expected
    assert {v.dtype.activation_dtype for v in slots} == {tf.float32}
    assert mesh.graph.trainable_variables == [w.operation]
    assert {v.name for op in updates for v in op.variables} == {"w", *expected}


def test_masters_are_not_rounded(tf_graph):
    """With bfloat16 activations, weight decay is that of the float32 value."""
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    dtype = mtf.VariableDType(tf.float32, tf.float32, tf.bfloat16)
    initializer = tf.constant_initializer(1 + 2**-12)
    w = mtf.get_variable(mesh, "w", [ROWS], dtype=dtype, initializer=initializer)
    optimizer = optimize.AdamWOptimizer(1.0, weight_decay_rate=1.0)
    updates = optimizer.apply_grads([mtf.zeros_like(w)], [w.operation])
    impl = mtf.placement_mesh_impl.PlacementMeshImpl("x:2", "r:x", [""] * 2)
    lowering = mtf.Lowering(mesh.graph, {mesh: impl})
    with harness.session() as session:
        session.run(tf.global_variables_initializer())
        session.run(lowering.copy_masters_to_slices())
        session.run([lowering.lowered_operation(op) for op in updates])
        values = session.run(w.operation.get_master().read_value())
    np.testing.assert_array_equal(values, np.zeros(4))


def test_keras_in_a_graph(tf_graph):
    with pytest.raises(ValueError, match=r"SGD was made in a tf.Graph, .* make it in eager code"):
        optimize.from_keras(keras.SGD())


class Own(keras.SGD):
    """A class derived from one of Keras'."""


def wrong_slots(g, s, w, r, t):
    return -g, {"n": g}


def excluding():
    """Returns an optimizer of Keras that leaves out one of Keras' variables from its decay."""
    optimizer = keras.AdamW()
    optimizer.exclude_from_weight_decay(var_list=[tf2.keras.Variable([1.0])])
    return optimizer


ERRORS = {
    "keras_variables": (
        lambda: optimize.from_keras(excluding()),
        r"AdamW has excluded variables of Keras .*exclude_from_weight_decay\(var_names=",
    ),
    "class": (lambda: optimize.from_keras(keras.Nadam()), "the rule of Nadam is not known to be"),
    "derived": (lambda: optimize.from_keras(Own()), "the rule of Own is not known to be elementw"),
    "adafactor": (
        lambda: optimize.from_keras(keras.Adafactor()),
        "AdafactorOptimizer has its rule",
    ),
    "clipnorm": (
        lambda: optimize.from_keras(keras.SGD(clipnorm=1.0)),
        "SGD has clipnorm=1.0, .* use mtf.optimize.clip_by_global_norm",
    ),
    "ema": (lambda: optimize.from_keras(keras.SGD(use_ema=True)), "ExponentialMovingAverage"),
    "no_keras": (lambda: optimize.from_keras(optimize.SgdOptimizer(0.1)), "optimizer of tf.keras"),
    "nesterov": (
        lambda: optimize.SgdOptimizer(0.1, nesterov=True),
        "nesterov=True needs a momentum, such as momentum=0.9",
    ),
    "beta": (
        lambda: optimize.AdamWOptimizer(0.1, beta_2=1.0),
        "AdamWOptimizer: beta_2 must be at least 0 and less than 1, not 1.0",
    ),
    "excluded": (
        lambda: optimize.LionOptimizer(0.1, exclude_from_weight_decay="bias"),
        r"must be a list of regular expressions or a function .*'bias'; write \['bias'\]",
    ),
    "norm": (
        lambda: optimize.elementwise(lambda g, s, w, r, t: (-g / tf.norm(g), {})),
        "the change of 'elementwise' is not elementwise: on part of a matrix it differs",
    ),
    "rows": (
        lambda: optimize.elementwise(
            lambda g, s, w, r, t: (-g, {"a": s["a"] - tf.reduce_mean(g, -1, keepdims=True)}),
            {"a": 0.0},
        ),
        "the slot 'a' of 'elementwise' is not elementwise",
    ),
    "shape": (
        lambda: optimize.elementwise(lambda g, s, w, r, t: (tf.reduce_sum(g), {})),
        "the change of 'elementwise' is not elementwise",
    ),
    "slots": (
        lambda: optimize.elementwise(wrong_slots, {"m": 0.0}),
        r"returned the slots \['n'\], but has \['m'\]",
    ),
    "slot_t": (
        lambda: optimize.elementwise(wrong_slots, {"t": 0.0}),
        "a slot 't' has the name of the number of updates",
    ),
    "name": (
        lambda: optimize.elementwise(wrong_slots, name="a/b"),
        "name must be a word, for names of variables, not 'a/b'",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name):
    make, text = ERRORS[name]
    with pytest.raises(ValueError, match=text):
        make()
