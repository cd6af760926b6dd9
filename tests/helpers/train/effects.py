"""Models that assign, print and record, in every front end.

A feature is a function of a mesh and a batch that returns a loss; `EXPECTED` has the variables after
two steps. A front end does the steps, and returns the variables by name.
"""

import tempfile

import numpy as np
import tensorflow as tf2
import tensorflow.compat.v1 as tf

import mesh_tensorflow as mtf
from mesh_tensorflow import estimator
from mesh_tensorflow.simd_mesh_impl import SimdMeshImpl, replicate
from mesh_tensorflow.testing import harness

BATCH, D = mtf.Dimension("batch", 4), mtf.Dimension("d", 4)
STEPS, DECAY = 2, 0.75
DATA = np.random.RandomState(0).randn(STEPS, 4, 4).astype(np.float32)
SMALL = DATA.reshape(STEPS, 2, 2, 4).swapaxes(1, 2)  # microbatches take every second row


def state(mesh, name, shape=(), initial=0.0):
    """Returns a variable that is not trained."""
    fill = tf.constant_initializer(initial)
    return mtf.get_variable(mesh, name, list(shape), initializer=fill, trainable=False)


def loss_of(mesh, x):
    """Returns a mean over the batch."""
    w = mtf.get_variable(mesh, "w", [D], initializer=tf.ones_initializer())
    return mtf.reduce_mean(mtf.square(x * w - 1.0))


def assignment(mesh, x):
    """The mean of the last batch."""
    mtf.assign(state(mesh, "last", [D]), mtf.reduce_mean(x, output_shape=[D]))
    return loss_of(mesh, x)


def counter(mesh, x):
    """The number of steps."""
    count = state(mesh, "count")
    mtf.assign(count, count + 1.0)
    return loss_of(mesh, x)


def added(mesh, x):
    """Sums over all examples, as of the tokens of each expert."""
    flags = mtf.to_float(mtf.greater(x, 0.0))
    mtf.assign_add(state(mesh, "added", [D]), mtf.reduce_sum(flags, output_shape=[D]))
    return loss_of(mesh, x)


def quotient(mesh, x):
    """The mean of what is positive, of all steps so far."""
    flags = mtf.to_float(mtf.greater(x, 0.0))
    mean = mtf.reduce_sum(x * flags) / (mtf.reduce_sum(flags) + 1.0)
    mtf.assign_add(state(mesh, "quotient"), mean)
    return loss_of(mesh, x)


def moving(mesh, x):
    """Batch normalization, whose averages begin at random values."""
    with tf.variable_scope("", initializer=tf.zeros_initializer()):
        y, updates = mtf.layers.batch_norm(x, True, DECAY)
    assert len(updates) == 2
    return loss_of(mesh, y)


def recomputed(mesh, x):
    """Assignments in a function that is computed twice are done once."""

    def block(x):
        y, _ = mtf.layers.batch_norm(x, True, DECAY)
        mtf.assign_add(state(x.mesh, "added"), mtf.reduce_sum(x))
        return mtf.tanh(y)

    return loss_of(mesh, mtf.recompute_grad(block, [x]))


def _moved(microbatches):
    batches = SMALL if microbatches else DATA[:, None]
    mean, variance = 0.0, 1.0
    for parts in batches:
        mean += (1 - DECAY) * (parts.mean(1).mean(0) - mean)
        variance += (1 - DECAY) * (parts.var(1).mean(0) - variance)
    return {"batch_norm/bn_moving_variance": variance}


def expected(feature, microbatches=False):
    """Returns the variables after the steps."""
    positive = DATA > 0
    quotients = (DATA * positive).sum((1, 2)) / (positive.sum((1, 2)) + 1)
    return {
        assignment: {"last": DATA[-1].mean(0)},
        counter: {"count": STEPS},
        added: {"added": positive.sum((0, 1))},
        quotient: {"quotient": quotients.sum()},
        moving: _moved(microbatches),
        recomputed: {"added": DATA.sum(), **_moved(microbatches)},
    }[feature]


FEATURES = [assignment, counter, added, quotient, moving, recomputed]

# -- meshes

MESHES = {
    "one": ("rows:1", "", "device"),
    "merged": ("rows:2", "batch:rows", "device"),
    "placement": ("rows:2,cols:2", "batch:rows,d:cols", "none"),
}


def placed(name):
    """Returns a PlacementMeshImpl on one CPU, whose processors are executed as one, or are not."""
    shape, layout, merge = MESHES[name]
    count = mtf.convert_to_shape(shape).size
    make = mtf.placement_mesh_impl.PlacementMeshImpl
    return make(shape, layout, [""] * count, merge=merge)


def fit_arguments(name):
    """Returns the arguments of fit for a mesh."""
    if name in MESHES:
        return {"mesh_impl": placed(name)}
    return {"mesh_shape": "rows:2", "layout": "batch:rows", "mesh_impl": name}


# -- front ends


def program(feature, data, make_impl, microbatches=False):
    """Builds and lowers a step; returns its Lowering and its loss."""
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    x = mtf.import_tf_tensor(mesh, data, [BATCH, D])
    if microbatches:
        found = mtf.optimize.accumulate_gradients(lambda x: feature(mesh, x), x, BATCH, 2)
        loss, grads = found.loss, found.grads
    else:
        loss = feature(mesh, x)
        grads = mtf.gradients([loss], [v.value for v in mesh.graph.trainable_variables])
    mtf.optimize.SgdOptimizer(0.0).apply_grads(grads, mesh.graph.trainable_variables)
    lowering = mtf.Lowering(mesh.graph, {mesh: make_impl()})
    return lowering, lowering.export_to_tf_tensor(loss)


def in_session(feature, mesh, microbatches=False):
    """A session that runs the effects of the program."""
    with tf.Graph().as_default(), harness.session() as session:
        tf.set_random_seed(1)
        fed = tf.placeholder(tf.float32, [4, 4])
        lowered = []

        def build():
            make = (lambda: SimdMeshImpl("rows:2", "batch:rows")) if mesh == "simd" else None
            lowering, loss = program(feature, fed, make or (lambda: placed(mesh)), microbatches)
            lowered.append(lowering)
            with tf.control_dependencies(lowering.effects):
                return tf.identity(loss)

        simd = mesh == "simd"
        cpus = ["/cpu:0", "/cpu:1"]
        loss = replicate(build, devices=cpus) if simd else build()
        lowering = lowered[0]
        to_masters = lowering.copy_slices_to_masters()
        session.run(tf.global_variables_initializer())
        session.run(lowering.copy_masters_to_slices())
        for batch in DATA:
            session.run(loss, {fed: batch})
        session.run(to_masters)
        return {v.op.name: session.run(v.read_value()) for v in tf.global_variables()}


def _of_store(store):
    return {name: store.value(name).numpy() for name in store.names}


def in_function(feature, mesh, microbatches=False):
    """An mtf.function."""

    @mtf.function
    def step(data):
        return program(feature, data, lambda: placed(mesh), microbatches)[1]

    for batch in DATA:
        step(batch)
    return _of_store(step.store)


def eagerly(feature, mesh, microbatches=False):
    """Eager code."""
    store = mtf.VariableStore()
    for batch in DATA:
        with store.scope():
            program(feature, tf2.constant(batch), lambda: placed(mesh), microbatches)
    return _of_store(store)


def in_fit(feature, mesh, microbatches=False, **arguments):
    """mtf.train.fit."""
    return fitted(feature, mesh, microbatches, **arguments).variables


def fitted(feature, mesh, microbatches=False, **arguments):
    """Returns the Result of mtf.train.fit."""
    return mtf.train.fit(
        feature,
        DATA.reshape(-1, 4),
        STEPS,
        dims=[BATCH, D],
        optimizer=mtf.optimize.SgdOptimizer(0.0),
        microbatches=2 if microbatches else 1,
        progress=False,
        log_every=1,
        **fit_arguments(mesh),
        **arguments,
    )


def in_estimator(feature, mesh, microbatches=False):
    """An Estimator, whose model function has the effects in its train operation."""

    def model_fn(features, mode):
        lowering, loss = program(feature, features, lambda: placed(mesh), microbatches)
        step = tf.train.get_global_step()
        return estimator.EstimatorSpec(
            mode,
            loss=loss,
            train_op=tf.group(*lowering.effects, tf.assign_add(step, 1)),
            training_hooks=[mtf.MtfRestoreHook(lowering)],
        )

    with tempfile.TemporaryDirectory() as folder:
        config = estimator.RunConfig(tf_random_seed=1, log_step_count_steps=None)
        made = estimator.Estimator(model_fn, folder, config)
        made.train(lambda: tf2.data.Dataset.from_tensor_slices(DATA), max_steps=STEPS)
        return {name: made.get_variable_value(name) for name in made.get_variable_names()}


FRONTS = {
    "session": (in_session, [*MESHES, "simd"]),
    "function": (in_function, list(MESHES)),
    "eager": (eagerly, list(MESHES)),
    "fit": (in_fit, [*MESHES, "simd"]),
    "estimator": (in_estimator, ["one", "merged"]),
}
CELLS = [(front, mesh) for front, (_, meshes) in FRONTS.items() for mesh in meshes]


def check(feature, front, mesh, microbatches):
    """Asserts that a front end gives the expected variables."""
    found = FRONTS[front][0](feature, mesh, microbatches)
    for name, value in expected(feature, microbatches).items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-6, err_msg=name)
