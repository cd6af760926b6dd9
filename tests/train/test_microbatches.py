"""Scalar losses in microbatches: those of the whole batch with their gradients, or an error."""

import time

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from helpers.train import effects

import mesh_tensorflow as mtf
from mesh_tensorflow.transformer import transformer, transformer_layers

BATCH, LENGTH, OUT = mtf.convert_to_shape("batch:8,length:4,out:3").dims
_RANDOM = np.random.RandomState(0)
DATA = (_RANDOM.randn(8, 4) * (_RANDOM.rand(8, 4) > 0.4)).astype(np.float32)  # 0 is padding


def weights(x):
    return mtf.get_variable(
        x.mesh, "w", [LENGTH], initializer=tf.constant_initializer([1.0, 0.5, -1.0, 2.0])
    )


def mask(x):
    return mtf.to_float(mtf.not_equal(x, 0.0))


def losses(x):
    return mtf.square(x * weights(x) - 1.0)


def masked(x):
    return mtf.reduce_sum(losses(x) * mask(x)) / mtf.reduce_sum(mask(x))


def gated(x):
    """The weights are trained, too."""
    gates = mtf.sigmoid(x * weights(x))
    return mtf.reduce_sum(gates * losses(x)) / mtf.reduce_sum(gates)


def guarded(x):
    return 0.3 * mtf.reduce_sum(losses(x) * mask(x)) / mtf.maximum(mtf.reduce_sum(mask(x)), 1.0)


def regularizer(x):
    return 0.01 * mtf.reduce_sum(mtf.square(weights(x)))


def flattened(x):
    """Of tokens, which are no longer under the name of the batch."""
    tokens = mtf.Dimension("tokens", x.shape.size)
    x = mtf.reshape(x * weights(x), [tokens])
    return mtf.reduce_sum(mtf.square(x - 1.0) * mask(x)) / mtf.reduce_sum(mask(x))


def in_a_loop(x):
    """A loop over layers adds up means."""

    def body(i, h):
        h = mtf.tanh(h * weights(x))
        return [i + 1, h, mtf.reduce_mean(mtf.square(h))]

    start = [mtf.constant(x.mesh, 0, dtype=tf.int32), x]
    results = mtf.while_loop(
        lambda i, h: mtf.less(i, 3), body, start, has_accumulators=True, maximum_iterations=3
    )
    return results[2] + mtf.reduce_mean(results[1])


def in_a_chain(x):
    """Each variable of a loop gets the value of the next one, and the last one a mean."""
    start = [mtf.constant(x.mesh, value) for value in range(6)]
    start = [mtf.constant(x.mesh, 0, dtype=tf.int32), *map(mtf.to_float, start)]
    mean = mtf.reduce_mean(losses(x))
    return mtf.while_loop(
        lambda i, *_: mtf.less(i, 6),
        lambda i, *values: [i + 1, *values[1:], mean],
        start,
        maximum_iterations=6,
    )[1]


def by_examples(x):
    """Means of examples, of which the mean is taken."""
    each = mtf.reduce_mean(losses(x), reduced_dim=LENGTH)
    return mtf.reduce_mean(mtf.Print(each, [each], "")) + 2.0


def recomputed(x):
    total = mtf.recompute_grad(lambda x: mtf.reduce_sum(losses(x) * mask(x)), [x])
    return total / mtf.reduce_sum(mask(x))


def printing(x):
    """Values of examples are printed beside what is known for the whole batch."""
    w = mtf.Print(weights(x), [x], "")
    mean = mtf.Print(mtf.reduce_mean(losses(x)), [x, w], "")
    root = mtf.Print(mtf.sqrt(mean), [mtf.reduce_max(x)], "")
    return root + 0.01 * mtf.reduce_sum(mtf.square(w))


def waiting(x):
    """What is computed outside of the loop waits for values of a microbatch."""
    w = mtf.depend(weights(x), [x * 2.0, mtf.sin(weights(x))])
    root = mtf.sqrt(mtf.reduce_mean(mtf.square(x * w - 1.0)))
    return mtf.depend(root, [x, root]) + mtf.reduce_mean(mtf.square(mtf.depend(w, [root])))


def centred(x, gradient=lambda mean: mean):
    """A mean over the batch for each position, of which a function is taken."""
    mean = gradient(mtf.reduce_mean(x * weights(x), reduced_dim=x.shape.dims[0]))
    return mtf.reduce_sum(mtf.square(mean)) + mtf.reduce_mean(losses(x))


KNOWN = {
    "mean": lambda x: mtf.reduce_mean(losses(x)),
    "mean, terms of weights": lambda x: mtf.reduce_mean(losses(x)) * 3.0 + regularizer(x) - 1.0,
    "mean of examples": by_examples,
    "sum": lambda x: 0.003 * mtf.reduce_sum(losses(x)),
    "quotient": masked,
    "quotient, trained weights": gated,
    "quotient, guarded": guarded,
    "quotient, terms": lambda x: masked(x) + regularizer(x) + 0.3 * mtf.reduce_mean(losses(x)) + 1,
    "two quotients": lambda x: masked(x) - 2.0 * gated(x),
    "root of a mean": lambda x: mtf.sqrt(mtf.reduce_mean(losses(x))),
    "tokens": flattened,
    "loop": in_a_loop,
    "recomputed": recomputed,
    "product with two that are the same": lambda x: mtf.einsum(
        [mtf.reduce_sum(losses(x)), mtf.reduce_mean(weights(x)), mtf.constant(x.mesh, 0.3)],
        output_shape=[],
    ),
    "weights alone": regularizer,
    "waiting": waiting,
    "printing": printing,
    "chain": in_a_chain,
    "function of means of positions, without gradient": lambda x: centred(x, mtf.stop_gradient),
    "pair": lambda x: (mtf.reduce_sum(losses(x) * mask(x)), mtf.reduce_sum(mask(x))),
}


def found(loss_fn, number, mesh="merged"):
    """Returns the loss and the gradient."""

    @mtf.function
    def step(data):
        mesh_ = mtf.Mesh(mtf.Graph(), "mesh")
        x = mtf.import_tf_tensor(mesh_, data, [BATCH, LENGTH])
        result = mtf.optimize.accumulate_gradients(loss_fn, x, BATCH, number)
        lowering = mtf.Lowering(mesh_.graph, {mesh_: effects.placed(mesh)})
        return [lowering.export_to_tf_tensor(y) for y in (result.loss, *result.grads)]

    return [y.numpy() for y in step(DATA)]


SHORT = {
    "waiting",
    "printing",
    "chain",
    "mean, terms of weights",
    "sum",
    "quotient, terms",
    "root of a mean",
}


@pytest.mark.slow_but(2)
@pytest.mark.parametrize(
    "name", [n if n in SHORT else pytest.param(n, marks=pytest.mark.slow) for n in KNOWN]
)
def test_losses_and_gradients_of_the_whole_batch(name):
    expected = found(KNOWN[name], 1)
    for number, mesh in ((2, "merged"), (4, "one")):
        for value, wanted in zip(found(KNOWN[name], number, mesh), expected, strict=True):
            np.testing.assert_allclose(value, wanted, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("mesh", ["placement", "simd"])
def test_a_masked_mean_in_fit(mesh):
    def model(mesh, x):
        return masked(x) + regularizer(x)

    def trained(**arguments):
        return mtf.train.fit(
            model,
            DATA,
            3,
            dims=[BATCH, LENGTH],
            optimizer=mtf.optimize.SgdOptimizer(0.05),
            progress=False,
            log_every=1,
            **arguments,
        ).losses

    expected = trained()
    arguments = (
        effects.fit_arguments(mesh)
        if mesh == "simd"
        else {"mesh_shape": "rows:2", "layout": "length:rows"}
    )
    np.testing.assert_allclose(trained(microbatches=4, **arguments), expected, rtol=1e-5)


def test_a_tuple_of_one_feature():
    arguments = {"optimizer": mtf.optimize.SgdOptimizer(0.05), "progress": False, "log_every": 1}
    dims = ([BATCH, LENGTH],)
    model = lambda mesh, x: masked(x)  # noqa: E731
    expected, found = (
        mtf.train.fit(model, (DATA,), 2, dims=dims, microbatches=n, **arguments).losses
        for n in (1, 2)
    )
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def _compared(x):
    y = mtf.rename_dimension(x * weights(x), "batch", "other")
    products = mtf.einsum([x, y], reduced_dims=[LENGTH])
    return mtf.reduce_mean(mtf.reduce_logsumexp(products, products.shape.dims[-1]))


def _noisy(x):
    return mtf.sqrt(mtf.reduce_sum(losses(x))) * mtf.random_uniform(x.mesh, [])


UNKNOWN = {
    "maximum": (
        lambda x: mtf.reduce_max(losses(x)),
        r"the loss is not known for the whole batch from 2 microbatches: reduce_max .* is no sum",
    ),
    "size of a microbatch": (
        lambda x: mtf.reduce_sum(losses(x)) / x.shape.dims[0].size,
        r"multiplies a sum over the batch by 0.25, which may be made of the size of a microbatch",
    ),
    "size as a number of NumPy": (
        lambda x: mtf.reduce_sum(losses(x)) * np.float64(1 / x.shape.dims[0].size),
        r"multiplies a sum over the batch by 0.25, which may",
    ),
    "size of the batch": (
        lambda x: mtf.reduce_sum(losses(x)) / mtf.constant(x.mesh, 8.0),
        r"by 0.125, which .* Return \(sum, weight\), two scalars",
    ),
    "comparison": (_compared, r"compares examples of a batch with each other \(batch=4, other=4"),
    "custom gradient": (
        lambda x: mtf.recompute_grad(masked, [x]),
        "it is computed in a function with a custom gradient, custom_gradient",
    ),
    "function of means of positions": (
        centred,
        r"the gradients of the loss are not known for the whole batch from 2 microbatches: it is a "
        r"function of reduce_mean\S*/scalar_mul:0 .*length=4.*, whose elements weigh differently.*"
        "Reduce what it is made of to scalars first; or make it of each example",
    ),
    "random numbers": (_noisy, "joins it with random numbers, which each microbatch draws anew"),
    "whole batch in a shape": (
        lambda x: mtf.reduce_mean(
            mtf.broadcast(mtf.reduce_sum(losses(x), output_shape=[]), [BATCH])
        ),
        r"microbatches of batch=4, but broadcast has the dimension of the whole batch, batch=8.*"
        r"x\.shape\.dims\[0\]",
    ),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_losses_that_microbatches_do_not_tell(name):
    loss_fn, message = UNKNOWN[name]
    found(loss_fn, 1)
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    x = mtf.import_tf_tensor(mesh, DATA, [BATCH, LENGTH])
    before = mesh.graph.to_string
    with pytest.raises(ValueError, match=message):
        mtf.optimize.accumulate_gradients(loss_fn, x, BATCH, 2)
    assert mesh.graph.to_string == before


def noted(x, events, event):
    """Returns x; notes an event whenever a value of it is computed, and then takes its time."""

    def note(t):
        def wait(value):
            events.append(event)
            time.sleep(0.02)
            return value

        y = tf.numpy_function(wait, [t], t.dtype)
        y.set_shape(t.shape)
        return y

    return mtf.slicewise(
        note, [x], output_shape=x.shape, output_dtype=x.dtype, splittable_dims=x.shape.dims,
        grad_function=lambda op, dy: [noted(dy, events, f"gradient of {event}")],
    )  # fmt: skip


def accumulate(mesh, events):
    x = mtf.import_tf_tensor(mesh, DATA, [BATCH, LENGTH])

    def fn(x):
        return mtf.reduce_mean(mtf.square(noted(x * weights(x), events, "forward")))

    return mtf.optimize.accumulate_gradients(fn, x, BATCH, 4).grads


def serialize(mesh, events):
    x = mtf.import_tf_tensor(mesh, DATA, [BATCH, LENGTH])

    def fn(features):
        y = noted(features["x"] * weights(x), events, "forward")
        return {"loss": mtf.reduce_sum(mtf.square(y))}

    return mtf.serialize_training_step({"x": x}, fn, BATCH, 4)[0]


def differentiate_a_loop(mesh, events):
    """The gradient of a loop computes each iteration again from its tape."""
    x = mtf.import_tf_tensor(mesh, DATA, [BATCH, LENGTH])
    i = mtf.constant(mesh, 0, dtype=tf.int32)
    y = mtf.while_loop(
        lambda i, y: mtf.less(i, 4),
        lambda i, y: [i + 1, y + mtf.square(noted(y * weights(x), events, "forward"))],
        [i, x],
        maximum_iterations=4,
    )[1]
    grads = mtf.gradients([mtf.reduce_sum(y)], [v.value for v in mesh.graph.trainable_variables])
    return grads


@pytest.mark.parametrize("front_end", ["session", "function"])
@pytest.mark.parametrize("build", [accumulate, serialize, differentiate_a_loop])
def test_one_at_a_time(build, front_end):
    """Several iterations at once would take the memory of several."""
    events = []

    def lowered():
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        [grad] = build(mesh, events)
        impl = mtf.placement_mesh_impl.PlacementMeshImpl("all:1", "", ["cpu:0"])
        return mtf.Lowering(mesh.graph, {mesh: impl}).export_to_tf_tensor(grad)

    if front_end == "function":
        mtf.function(lowered)()
    else:
        with tf.Graph().as_default(), tf.Session() as session:
            grad = lowered()
            session.run(tf.global_variables_initializer())
            session.run(grad)
    assert events[-8:] == ["forward", "gradient of forward"] * 4


@pytest.mark.slow
@pytest.mark.parametrize("denominator", [None, 100.0])
def test_transformers(denominator):
    """Their loss is divided by the number of positions of a microbatch, or by a number given."""
    length = mtf.Dimension("length", 8)
    ids = np.arange(16 * 8).reshape(16, 8) % 30 + 1
    ids[::3, 5:] = 0

    def model(mesh, ids):
        layers = [transformer_layers.DenseReluDense(hidden_size=16)]
        stack = transformer.LayerStack(
            layers,
            sublayers_initial=[],
            sublayers_per_layer=[transformer.sublayer_call_layer],
            sublayers_final=[],
        )
        made = transformer.Unitransformer(
            stack, 8, 32, 32, autoregressive=True, max_length=8, loss_denominator=denominator
        )
        inputs = transformer.autoregressive_inputs(ids)
        return made.call_simple(inputs, ids, compute_loss=True, mode="train")[1]

    def trained(number):
        return mtf.train.fit(
            model,
            ids,
            3,
            dims=[BATCH, length],
            optimizer=mtf.optimize.SgdOptimizer(0.5),
            microbatches=number,
            progress=False,
            log_every=1,
        ).losses

    np.testing.assert_allclose(trained(4), trained(1), rtol=1e-5)
