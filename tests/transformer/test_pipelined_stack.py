"""Stacks whose layers are stages of a pipeline: the same models as stacks of layers in a row."""

import functools
import re

import gin
import keras
import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from helpers.transformer import models
from helpers.transformer.models import LENGTH, Mix, assert_same, imported, some_ids

import mesh_tensorflow as mtf
from mesh_tensorflow.testing import harness
from mesh_tensorflow.testing.harness import WHOLE, Placing
from mesh_tensorflow.transformer import moe, transformer, transformer_layers
from mesh_tensorflow.transformer.transformer._pipelined import alike

run = functools.partial(models.run, scale=0.5)  # of weights, which would grow errors of rounding
ATTENTION = {
    "num_heads": 2, "key_value_size": 4, "dropout_rate": 0.3,
    "relative_attention_type": "bias_shared", "relative_attention_num_buckets": 8,
    "rotary": mtf.layers.RotaryEmbedding(),
}  # fmt: skip
DROPPING = [
    (transformer_layers.SelfAttention, ATTENTION),
    (transformer_layers.DenseReluDense, {"hidden_size": 12, "dropout_rate": 0.2}),
]
STILL = [
    (transformer_layers.SelfAttention, {"num_heads": 2, "key_value_size": 4}),
    (transformer_layers.DenseReluDense, {"hidden_size": 12}),
]
BLOCKED = [
    (transformer_layers.SelfAttention, {**ATTENTION, "attention_kwargs": {"blocked": True}}),
    DROPPING[1],
]
LOSING = [(Mix, {"loss": 2.0, "shares": True})]
# Groups are rows, so that microbatches have the groups of the batch.
EXPERTS = [(moe.MoE1D, {"num_experts": 2, "hidden_size": 8, "group_size": LENGTH, "z_loss": 0.1})]
SWITCHING = [(moe.MoE1D, {**EXPERTS[0][1], "moe_gating": "switch"})]


class ByPosition(transformer.TransformerLayer):
    """Functions of TensorFlow that count axes as in a slice of one stage."""

    def call(self, context, x, losses=None):
        d = context.model.model_dim
        scale = mtf.get_variable(
            context.mesh, "scale", [d], context.variable_dtype, initializer=tf.ones_initializer()
        )

        def summed(x, **options):
            return mtf.slicewise(
                lambda t: tf.cumsum(t, 1, reverse=bool(options)),
                [x],
                splittable_dims=[d],
                grad_function=None if options else lambda op, dy: [summed(dy, reverse=True)],
            )

        x = mtf.cwise(lambda t, s: tf.nn.softplus(t * s), [x, scale])
        mean = mtf.slicewise(
            lambda t: tf.reduce_mean(t, 1), [x], [*context.batch_dims, d], splittable_dims=[d]
        )
        return summed(x) * mean


class Scaled(mtf.Operation):
    """Each row times a scale, with a gradient by the dimensions that a layer knows of."""

    takes_stages = True

    def __init__(self, x, scale, row):
        super().__init__([x, scale], name="scaled")
        self._row = row
        self._outputs = [mtf.Tensor(self, x.shape, x.dtype)]

    def gradient(self, grad_ys):
        x, scale = self.inputs
        dscale = mtf.reduce_sum(grad_ys[0] * x, output_shape=[self._row])
        return [grad_ys[0] * scale - x * dscale, dscale]

    def lower(self, lowering):
        x, scale = self.inputs
        ends = [1] * (x.shape.ndims - scale.shape.ndims)
        scaled = lowering.mesh_impl(self).slicewise(
            lambda x, scale: x * tf.reshape(scale, [*scale.shape, *ends]),
            *[lowering.tensors[t] for t in (x, scale)],
        )
        lowering.set_tensor_lowering(self.outputs[0], scaled)


class OwnGradients(transformer.TransformerLayer):
    """Gradient functions that sum over all dimensions but those that a layer knows of."""

    def call(self, context, x, losses=None):
        d, row = context.model.model_dim, context.batch_dims[-1]
        own, shared = (
            functools.partial(
                mtf.get_variable, context.mesh, name, [d], dtype=context.variable_dtype
            )
            for name in ("own", "shared")
        )
        if "shared" not in context.cache:  # by all layers
            context.cache["shared"] = shared()

        def grad_fn(explicit_inputs, output_grads, **_):
            (x, w, shared), [dy] = explicit_inputs, output_grads
            along = mtf.reduce_mean(dy * x, output_shape=[row])
            sums = [mtf.reduce_sum(dy * x * t, output_shape=[d]) for t in (shared, w)]
            return [dy * w * shared - x * along, *sums]

        given = [own(), context.cache["shared"]]

        def body(i, y):
            return [
                i + 1,
                mtf.custom_gradient(lambda x, w, shared: x * w * shared, grad_fn, [y, *given]),
            ]

        i = mtf.zeros(context.mesh, [], tf.int32)
        _, y = mtf.while_loop(lambda i, y: mtf.less(i, 2), body, [i, x])
        y = mtf.cwise(
            tf.tanh,
            [y],
            grad_function=lambda op, dy: [dy - dy * mtf.reduce_mean(dy, output_shape=[row])],
        )
        y = mtf.layers.clip_activation_gradient(y, clip_rms_norm=1e9)
        y = Scaled(y, mtf.reduce_mean(y, output_shape=[row]), row).outputs[0]
        return x + y


BY_POSITION = [(ByPosition, {}), STILL[1]]
OWN_GRADIENTS = [(OwnGradients, {}), STILL[1]]
IDS = np.where(np.arange(LENGTH) < LENGTH - 2, some_ids(low=1), 0).astype("int32")
TWO = {"num_stages": 2, "num_microbatches": 2}
FOUR = {"num_stages": 4, "num_microbatches": 4}
CIRCULAR = {"num_stages": 2, "num_repeats": 2, "num_microbatches": 2}


def stack(layers, pipe=None, blocks=4, **kwargs):
    if pipe:
        kwargs = {"cls": transformer.PipelinedLayerStack, **pipe, **kwargs}
    return models.stack(layers, blocks, **kwargs)


def made(layers, pipe=None, blocks=4, call=None, **kwargs):
    """Returns a function of a mesh: logits, loss and gradients of a model."""
    layer_stack = stack(layers, pipe, blocks, **kwargs)
    return models.language_model(IDS, call=call, layer_stack=layer_stack)


@pytest.mark.slow
@pytest.mark.parametrize("layers, pipe, placing", [
    (STILL, TWO, Placing("x:2", "stages:x")),
    (STILL, FOUR, Placing("x:4", "stages:x")),
    (STILL, CIRCULAR, Placing("x:2,y:2", "stages:x,batch:y", simd=True)),
    (STILL, TWO, Placing("x:2,y:2", "stages:x,heads:y,d_ff:y,vocab:y")),
    (DROPPING, TWO, WHOLE),
    (DROPPING, CIRCULAR, Placing("x:2,y:2", "stages:x,batch:y")),
    (BLOCKED, TWO, Placing("x:2,y:2", "stages:x,batch:y")),
    (BLOCKED, CIRCULAR, Placing("x:2,y:2", "stages:x,heads:y")),
    (LOSING, TWO, Placing("x:2,y:2", "stages:x,batch:y")),
    (LOSING, CIRCULAR, Placing("x:2", "stages:x", simd=True)),
    (EXPERTS, TWO, Placing("x:2", "stages:x")),
    (SWITCHING, CIRCULAR, Placing("x:2,y:2", "stages:x,experts:y")),
    (BY_POSITION, TWO, Placing("x:2,y:2", "stages:x,batch:y")),
    (BY_POSITION, CIRCULAR, Placing("x:2,y:2", "stages:x,d_model:y", simd=True)),
    (OWN_GRADIENTS, TWO, Placing("x:2,y:2", "stages:x,batch:y")),
    (OWN_GRADIENTS, CIRCULAR, Placing("x:2,y:2", "stages:x,d_ff:y", simd=True)),
], ids=lambda value: str(getattr(value, "layout", "")))  # fmt: skip
def test_values_and_gradients(layers, pipe, placing):
    """Variables have the names of the layers in a row; masks of dropout are the same, too."""
    found, expected = run(made(layers, pipe), placing), run(made(layers))
    assert list(found) == list(expected)
    assert_same(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layers", [DROPPING, LOSING, OWN_GRADIENTS], ids=["dropout", "losses", "own gradients"]
)
def test_recomputed(layers):
    found = run(made(layers, TWO, recompute_grads=True), Placing("x:2", "stages:x"))
    assert_same(found, run(made(layers)))


@pytest.mark.slow
def test_evaluated_and_split_by_length():
    """Without dropout; and residuals under a name of their own."""
    found = run(
        made(DROPPING, TWO, call={"mode": "eval"}, sequence_parallel=True),
        Placing("x:2,y:2", "stages:x,residual_length:y"),
    )
    assert_same(found, run(made(DROPPING, call={"mode": "eval"})))


def pair(pipe, mode="train"):
    """Returns a function of a mesh: logits, loss and gradients of an encoder and a decoder."""
    reading = (transformer_layers.EncDecAttention, {"num_heads": 2, "key_value_size": 4})

    def build(mesh):
        encoder = models.unitransformer(
            stack(STILL, pipe, 2), name="encoder", autoregressive=False, output_vocab_size=None
        )
        decoder = models.unitransformer(stack([DROPPING[0], reading], pipe, 2), name="decoder")
        model = transformer.Bitransformer(encoder, decoder)
        inputs, targets = imported(mesh, IDS), imported(mesh, IDS[::-1].copy())
        if mode == "decode":
            return [model.decode(inputs, models.FLOAT, temperature=0.0)]
        logits, loss = model.call_simple(inputs, targets, True, mode=mode)
        return {"logits": logits, **models.trained(loss)}

    return build


@pytest.mark.slow
def test_encoders_and_decoders():
    placing = Placing("x:2", "stages:x")
    assert_same(run(pair(TWO), placing), run(pair(None)))


@pytest.mark.slow
def test_decoding():
    """Layers are applied in a row, so that rows need not be a multiple of microbatches."""
    pipe = {"num_stages": 2, "num_microbatches": 3}
    [found] = run(pair(pipe, "decode"), Placing("x:2", "batch:x")).values()
    [expected] = run(pair(None, "decode")).values()
    np.testing.assert_array_equal(found, expected)


def variables(pipe):
    """Returns names, shapes and seeds' values of the variables and slots of a trained model."""
    with tf.Graph().as_default():
        tf.set_random_seed(1)
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        loss = made(STILL, pipe)(mesh)["loss"]
        wanted = mesh.graph.trainable_variables
        grads = mtf.gradients([loss], [v.value for v in wanted])
        mtf.optimize.AdafactorOptimizer(min_dim_size_to_factor=8).apply_grads(grads, wanted)
        masters = {v.name: v.get_master().read_value() for v in mesh.graph.all_variables}
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            return session.run(masters)


@pytest.mark.slow
def test_checkpoints_are_of_layers_in_a_row():
    """Names, shapes and initial values, of slots, too."""
    found, expected = variables(CIRCULAR), variables(None)
    assert set(found) == set(expected)
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value)


def test_layers_of_one_name_share_their_variables():
    def build(pipe):
        layer_stack = stack([Mix], pipe, 2)
        for layer in layer_stack.layers:
            layer.set_name("same")
        return models.language_model(layer_stack=layer_stack)

    assert_same(run(build(TWO), Placing("x:2", "stages:x")), run(build(None)))


def test_communication():
    """Activations to the next stage at each tick, and what is predicted."""
    with tf.Graph().as_default():
        graph = mtf.Graph()
        mesh = mtf.Mesh(graph, "mesh")
        found = made(STILL, TWO)(mesh)
        impl = mtf.placement_mesh_impl.PlacementMeshImpl("x:2", "stages:x", [""] * 2)
        lowering = mtf.Lowering(graph, {mesh: impl})
        for value in found.values():
            lowering.export_to_tf_tensor(value)
        counted, predicted = harness.counted_and_predicted(lowering, list(found.values()))
        assert counted == predicted
        sent = [c.elements for _, _, c in lowering.collectives if c.kind == "shift"]
        microbatch = 2 * LENGTH * models.DEPTH
        assert sent == [2 * microbatch] * 4  # two ticks and their gradients, on two processors


@pytest.fixture
def bindings():
    """Parses bindings, also of what is defined anew."""
    gin.enter_interactive_mode()
    gin.external_configurable(Mix, module="models")
    yield gin.parse_config
    gin.exit_interactive_mode()


def test_gin(bindings):
    """What is bound for LayerStack holds, too."""
    bindings("""
        make_layer_stack.layers = [@models.Mix]
        make_layer_stack.num_layers = 4
        encoder/make_layer_stack.layer_stack_cls = @transformer.PipelinedLayerStack
        PipelinedLayerStack.num_stages = 2
        PipelinedLayerStack.num_repeats = 2
        encoder/PipelinedLayerStack.num_microbatches = 2
        LayerStack.sublayers_initial = []
        LayerStack.sublayers_per_layer = [@sublayer_call_layer]
        LayerStack.sublayers_final = []
        LayerStack.recompute_grads = True
        Unitransformer.d_model = 8
        Unitransformer.max_length = 16
    """)
    model = transformer.make_bitransformer(input_vocab_size=100, output_vocab_size=100)
    layer_stack = model.encoder.layer_stack
    assert layer_stack.schedule == mtf.layers.PipelineSchedule(2, 2, 2)
    assert layer_stack._sublayers_per_layer == [transformer.sublayer_call_layer]
    assert layer_stack.recompute_grads
    assert type(model.decoder.layer_stack) is transformer.LayerStack


# -- mistakes


class Keeps(Mix):
    """Leaves what it has computed for later layers."""

    def call(self, context, x, losses=None):
        context.cache["kept"] = x * 2.0
        return super().call(context, x)


class Sets(Mix):
    def call(self, context, x, losses=None):
        context.position = None
        return super().call(context, x)


class Counts(Mix):
    def call(self, context, x, losses=None):
        return x * float(context.layer_index)


class Joins(Mix):
    def call(self, context, x, losses=None):
        stages = x.shape.dims[0]
        return x + mtf.reduce_sum(x, reduced_dim=stages)


class Counting(Scaled):
    """It does not say that it takes the slices of all stages."""

    takes_stages = False


class CountsAxes(Mix):
    def call(self, context, x, losses=None):
        row = context.batch_dims[-1]
        return Counting(x, mtf.reduce_mean(x, output_shape=[row]), row).outputs[0]


class WithGradient(Mix):
    """A layer with a gradient function."""

    def call(self, context, x, losses=None):
        return mtf.custom_gradient(lambda x: x * 2.0, functools.partial(self.grad_fn, context), [x])


class JoinsGradients(WithGradient):
    def grad_fn(self, context, output_grads, **_):
        [dy] = output_grads
        return [dy * mtf.reduce_sum(dy, reduced_dim=dy.shape.dims[0])]


class AsksForVariable(WithGradient):
    def grad_fn(self, context, output_grads, **_):
        return [output_grads[0] * mtf.get_variable(context.mesh, "late", [])]


class DescendsShared(Mix):
    """A gradient of what all stages share, within a layer."""

    def call(self, context, x, losses=None):
        if "shared" not in context.cache:
            shared = mtf.get_variable(context.mesh, "shared", [context.model.model_dim])
            context.cache["shared"] = shared
        shared = context.cache["shared"]
        [gradient] = mtf.gradients([mtf.square(x * shared)], [shared])
        return x + gradient


class Unequal(Mix):
    made = 0

    def __init__(self):
        super().__init__()
        Unequal.made += 1
        self.scale = Unequal.made


def _adds(number):
    return lambda x: x + number


def _reads_no_value():
    def function():
        return later

    if False:
        later = 1
    return function


def _reads_one_of_two(first):
    def function():
        return one, other

    if first:
        one = 1
    else:
        other = 1
    return function


@pytest.mark.parametrize("make, others", [
    (_reads_no_value, [lambda: _adds(1)]),
    (lambda: _reads_one_of_two(True), [lambda: _reads_one_of_two(False)]),
    (lambda: tf.constant_initializer(2.0), [lambda: tf.constant_initializer(3.0), tf.zeros_initializer]),
    (lambda: keras.initializers.HeNormal(), [lambda: keras.initializers.HeNormal(seed=1)]),
    (lambda: tf.variance_scaling_initializer(2.0), [lambda: tf.variance_scaling_initializer(2.0, seed=1)]),
    (lambda: _adds(1), [lambda: _adds(2), lambda: _adds]),
    (lambda: functools.partial(_adds, 1), [lambda: functools.partial(_adds, number=1)]),
    (lambda: Mix().call, [lambda: Mix(2.0).call]),
    (lambda: np.arange(9999), [lambda: np.where(np.arange(9999) == 5000, 0, np.arange(9999))]),
])  # fmt: skip
def test_initializers_and_functions_of_layers_are_compared_by_what_they_do(make, others):
    """Each layer has its own, at its own address."""
    of = [[Mix(), Mix()], *([Mix(), Mix()] for _ in others)]
    for (one, two), other in zip(of, [make, *others]):
        one.kept, two.kept = make(), other()
        assert alike(one, two) == (other is make)


class Begun(Mix):
    """A layer with an initializer of Keras, which draws its own seed."""

    def __init__(self):
        super().__init__()
        self.kept = keras.initializers.HeNormal()

    def call(self, context, x, losses=None):
        shape = mtf.Shape([*context.model.ensemble_dims, context.model.model_dim])
        first = mtf.get_variable(context.mesh, "kept", shape, initializer=self.kept)
        new = keras.initializers.HeNormal()
        return x + first * mtf.get_variable(context.mesh, "new", shape, initializer=new)


@pytest.mark.slow_but(2)
@pytest.mark.parametrize("seed", [None, 5])
@pytest.mark.parametrize("pipe", [None, TWO, CIRCULAR])
def test_each_stage_has_initial_values_of_its_own(pipe, seed, tf_graph):
    if seed is not None:
        tf.set_random_seed(seed)
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    made([(Begun, {})], pipe)(mesh)
    variables = [v for v in mesh.graph.all_variables if v.name.endswith(("kept", "new"))]
    layout = "stages:x" if pipe else ""
    impl = mtf.placement_mesh_impl.PlacementMeshImpl("x:2", layout, ["cpu:0"] * 2)
    lowering = mtf.Lowering(mesh.graph, {mesh: impl}, autostack=False)
    with harness.session() as session:
        session.run(tf.global_variables_initializer())
        found = session.run([v.get_master().read_value() for v in variables])
    assert len(found) == 8 and lowering
    assert len({value.tobytes() for value in found}) == 8


def called(layers, pipe=TWO, blocks=4, **kwargs):
    def build(mesh):
        made(layers, pipe, blocks, **kwargs)(mesh)

    return build


@pytest.mark.parametrize("build, text", [
    (
        called([Mix], {"num_stages": 3, "num_microbatches": 2}),
        "num_stages=3 does not divide the 4 layers; choose num_stages from 1, 2, 4",
    ),
    (
        called([Mix], {**CIRCULAR, "num_repeats": 3}),
        "num_stages=2 . num_repeats=3 does not divide the 4 layers",
    ),
    (
        called([Mix], {"num_stages": 2, "num_microbatches": 3}),
        "num_microbatches=3 does not divide the batch batch=4 of .*; choose num_microbatches from "
        "1, 2, 4, or another size of the batch",
    ),
    (
        called([Mix], {**CIRCULAR, "num_microbatches": 1}),
        "num_microbatches=1 is less than stages=2",
    ),
    (
        called([Unequal]),
        r"layer block_002/layer_000 \(Unequal\) differs from block_000/layer_000 \(Unequal\), "
        "which has its place in the first stage",
    ),
    (
        called([(transformer_layers.Conv1DLayer, {"filter_size": 3, "output_size": 8})]),
        r"layer block_000/layer_000 \(Conv1DLayer\), called for all stages at once with "
        r"Shape\[stages=2, .*; use a LayerStack for layers that cannot have the dimension stages",
    ),
    (called([Keeps]), r"leaves .* in context.cache\['kept'\] .*; compute it in each layer, or use"),
    (called([Sets]), "the layers set context.position, which stages of a pipeline cannot share"),
    (called([Counts]), "Counts reads context.layer_index, which differs between the stages"),
    (
        called([CountsAxes]),
        "scaled: an operation of your own, Counting, would lower to slices of stages=2, all stages "
        "of a pipeline at once, .* Write it as mtf.slicewise.* or, .* set takes_stages = True in "
        "the class Counting",
    ),
    (called([JoinsGradients]), r"reduce.* joins the layers of different stages"),
    (
        called([AsksForVariable]),
        "custom_gradient.*: its gradient function asks for the variable late, but in a pipeline it "
        "must use those that the function was given",
    ),
    (called([DescendsShared]), r"joins the layers of different stages"),
    (called([Joins]), r"joins the layers of different stages; .* keep the dimension stages=2"),
])  # fmt: skip
def test_errors(build, text):
    with tf.Graph().as_default(), mtf.strict(), pytest.raises(ValueError) as found:
        build(mtf.Mesh(mtf.Graph(), "mesh"))
    assert re.search(text, str(found.value)), found.value
