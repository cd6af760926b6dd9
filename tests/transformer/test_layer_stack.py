"""Stacks, their sublayers, the Context and the functions that make stacks."""

import functools
import json
import re

import gin
import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from helpers.transformer import models
from helpers.transformer.models import DEPTH, LENGTH, ROWS, Mix, assert_same, run, some_ids, stack

import mesh_tensorflow as mtf
from mesh_tensorflow.transformer import moe, transformer, transformer_layers

X = np.random.RandomState(1).normal(size=(ROWS, LENGTH, DEPTH)).astype("float32")
REVERSIBLE = transformer.ReversibleLayerStack


def context_of(mesh, model=None, mode="train", ids=None, **kwargs):
    batch, length = mtf.convert_to_shape(f"batch:{ROWS},length:{LENGTH}").dims
    sequence_id = None if ids is None else models.imported(mesh, ids)
    return transformer.Context(
        model or models.unitransformer(), mesh, [batch], length, models.FLOAT, mode=mode,
        sequence_id=sequence_id, **kwargs,
    )  # fmt: skip


def sublayer(fn, mode="train", ids=None, x=X, layer_stack=None, **kwargs):
    """Returns what a sublayer makes of X, and the gradient of a weighted sum for X."""

    def build(mesh):
        shape = mtf.convert_to_shape(f"batch:{ROWS},length:{LENGTH},d_model:{DEPTH}")
        imported = mtf.import_tf_tensor(mesh, tf.constant(x), shape)
        context = context_of(mesh, mode=mode, ids=ids)
        context.current_layer_input = imported
        y = fn(imported, layer_stack or stack(), context, **kwargs)
        dy = mtf.import_tf_tensor(mesh, tf.constant(X[::-1].copy()), shape)
        return [y, mtf.gradients([y], [imported], grad_ys=[dy])[0]]

    return run(build).values()


def test_norm_of_some_channels_that_are_split():
    some = functools.partial(transformer.sublayer_rms_norm_subsampled, percentage=30.0)
    layers = {"layer_stack": stack(num_layers=1, sublayers_final=[some]), "gradients": False}
    models.check_everywhere(models.language_model(**layers), [models.Placing("x:2", "d_model:x")])


@pytest.mark.slow
def test_mixes_of_the_encoder_in_recomputed_layers():
    """The first layer makes them for the others, which may not keep its activations alive."""
    mixing = functools.partial(
        transformer_layers.TransparentEncDecAttention, layers_per_encoder_module=1,
        layers_per_decoder_module=1, encoder_num_modules=2, decoder_num_modules=2, num_heads=2,
        key_value_size=4,
    )  # fmt: skip

    def build(mesh, **kwargs):
        encoder = models.unitransformer(
            name="encoder", autoregressive=False, output_vocab_size=None
        )
        decoder = models.unitransformer(stack([mixing], **kwargs), name="decoder")
        inputs, targets = (models.imported(mesh, some_ids(seed, low=0)) for seed in (0, 1))
        model = transformer.Bitransformer(encoder, decoder)
        return models.trained(model.call_simple(inputs, targets, True)[1])

    stored = run(build)
    assert_same(run(functools.partial(build, recompute_grads=True)), stored)
    assert np.abs(stored["decoder/block_000/layer_000/TransparentEncDecAttention/w"]).max() > 1e-5


def weights(name, sizes):
    return models.decoding_models.weights(name, sizes, 1.0)


def rms(x):
    return np.sqrt((x.astype("float64") ** 2).mean(axis=-1, keepdims=True))


@pytest.mark.parametrize("fn, expected", [
    (transformer.sublayer_rms_norm, lambda: X / rms(X) * weights("rms_norm/scale", [DEPTH])),
    (transformer.sublayer_legacy_rms_norm, lambda: X / rms(X) * weights("layer_norm/scale", [DEPTH])),
    (
        transformer.sublayer_legacy_final_rms_norm,
        lambda: X / rms(X) * weights("final_layer_norm/scale", [DEPTH]),
    ),
    (transformer.sublayer_scale_norm, lambda: X / rms(X) * weights("scale_norm/scale", [])),
    (
        functools.partial(transformer.sublayer_rms_norm_subsampled, percentage=30.0),
        lambda: X / rms(X[..., :3]) * weights("layer_norm_subsampled/scale", [DEPTH]),
    ),
    (transformer.sublayer_rezero, lambda: X * weights("rezero_weight", [])),
    (transformer.sublayer_residual, lambda: X + X),
])  # fmt: skip
def test_sublayer_values(fn, expected):
    values, _ = sublayer(fn)
    np.testing.assert_allclose(values, expected(), rtol=1e-4, atol=1e-5)


def test_padding_is_masked():
    ids = np.where(np.arange(LENGTH) < 5, some_ids(low=1), 0).astype("int32")
    values, _ = sublayer(transformer.sublayer_mask_padding, ids=ids)
    np.testing.assert_array_equal(values, X * (ids > 0)[..., None])
    values, _ = sublayer(transformer.sublayer_mask_padding)
    np.testing.assert_array_equal(values, X)


def test_gradients_are_clipped():
    values, grads = sublayer(transformer.sublayer_clip_activation_gradient, rms_norm=0.01)
    np.testing.assert_array_equal(values, X)
    np.testing.assert_allclose(np.sqrt((grads**2).mean()), 0.01, rtol=1e-5)


@pytest.mark.parametrize("fn", [
    functools.partial(transformer.sublayer_dropout, dropout_rate=0.5),
    functools.partial(
        transformer.sublayer_annealed_dropout, init_dropout_rate=0.5, start_step=5, end_step=9),
    functools.partial(
        transformer.sublayer_legacy_dropout,
        layer_stack=transformer.LayerStack([], dropout_rate=0.5, norm_epsilon=1e-6)),
], ids=["dropout", "annealed", "legacy"])  # fmt: skip
def test_dropout_is_shared_along_the_length(fn):
    ones = np.ones_like(X)
    layer_stack = fn.keywords.pop("layer_stack", None)
    values, _ = sublayer(fn, x=ones, layer_stack=layer_stack)
    assert set(np.unique(values)) == {0.0, 2.0}
    assert np.ptp(values, axis=1).max() == 0
    values, _ = sublayer(fn, x=ones, mode="eval", layer_stack=layer_stack)
    np.testing.assert_array_equal(values, ones)


@pytest.mark.parametrize("step, rate", [(0, 0.5), (5, 0.5), (7, 0.25), (9, 0.0), (20, 0.0)])
def test_dropout_is_annealed(step, rate):
    wide = "batch:400,d_model:8"
    with tf.Graph().as_default():
        global_step = tf.train.get_or_create_global_step()
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        context = context_of(mesh)
        context.batch_dims = mtf.convert_to_shape(wide).dims[:1]
        y = transformer.sublayer_annealed_dropout(
            mtf.ones(mesh, wide), None, context, init_dropout_rate=0.5, start_step=5, end_step=9
        )
        impl = mtf.placement_mesh_impl.PlacementMeshImpl("", "", [""])
        fetch = mtf.Lowering(mesh.graph, {mesh: impl}).export_to_tf_tensor(y)
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            session.run(tf.assign(global_step, step))
            values = session.run(fetch)
    assert abs((values == 0).mean() - rate) < 0.05
    np.testing.assert_allclose(values[values > 0], 1 / (1 - rate), rtol=1e-5)


# -- stacks


@pytest.mark.slow
@pytest.mark.parametrize("cls", [transformer.LayerStack, REVERSIBLE])
@pytest.mark.parametrize("placing", [models.WHOLE, models.PLACINGS[3]])
def test_recomputed_values_are_the_same(cls, placing):
    def build(recompute):
        return models.language_model(
            layer_stack=stack(cls=cls, num_layers=3, recompute_grads=recompute)
        )

    assert_same(run(build(True), placing), run(build(False)))


@pytest.mark.slow
@pytest.mark.parametrize("budget", [0, 1000, 1e9])
def test_a_budget_of_activations(budget):
    """With what layers share, too; a model knows its layout, or is not split."""

    def build(**kwargs):
        layers = [(Mix, {"loss": 2.0, "shares": True})]
        return models.language_model(layer_stack=stack(layers, 3, **kwargs))

    assert_same(run(build(recompute_budget=budget)), run(build()))


@pytest.mark.parametrize(
    "options, masks",
    [({}, 1), ({"recompute_grads": True}, 3), ({"cls": REVERSIBLE, "recompute_grads": True}, 3)],
)
def test_layers_share_their_mask_and_angles(options, masks):
    """One for all layers; one for each where it is computed again for gradients."""
    attention = {"num_heads": 2, "key_value_size": 4, "rotary": mtf.layers.RotaryEmbedding()}
    layers = [(transformer_layers.SelfAttention, attention)]
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    model = models.unitransformer(layer_stack=stack(layers, 3, **options))
    length = mtf.Dimension("length", LENGTH)
    ids = mtf.zeros(mesh, mtf.Shape([mtf.Dimension("batch", ROWS), length]), tf.int32)
    model.call_simple(ids, ids, compute_loss=True, mode="train")
    names = [op.name.rpartition("/")[2] for op in mesh.graph.operations]
    assert sum(name.startswith("cos") for name in names) == 2 * masks  # of queries and of keys
    assert sum(name.startswith("logical_not") for name in names) == masks


@pytest.mark.parametrize("size, turned", [(98, 2), (64, 22), (8, 8)])
def test_the_share_of_turned_channels_is_not_rounded_down(size, turned):
    """In floats, 2 / 98 of 98 channels are a little less than 2."""
    rotary = mtf.layers.RotaryEmbedding(fraction=turned / size)
    assert rotary.turned_channels(size) == turned


def test_what_layers_share_can_be_recomputed():
    """Losses of layers, and what they keep in the cache for later ones."""

    def build(recompute):
        layers = [(Mix, {"loss": 2.0, "shares": True})]
        return models.language_model(layer_stack=stack(layers, 3, recompute_grads=recompute))

    assert_same(run(build(True)), run(build(False)))


@pytest.mark.slow("bias_shared*")
@pytest.mark.parametrize("relative", ["bias", "bias_shared"])
def test_recomputed_attention(relative):
    """With what the first layer of attention leaves in the cache for the others."""

    def build(recompute):
        attention = {
            "num_heads": 2, "key_value_size": 4, "dropout_rate": 0.3,
            "relative_attention_type": relative, "relative_attention_num_buckets": 8,
        }  # fmt: skip
        layers = [
            (transformer_layers.SelfAttention, attention),
            (transformer_layers.DenseReluDense, {"hidden_size": 12, "dropout_rate": 0.2}),
        ]
        return models.language_model(layer_stack=stack(layers, recompute_grads=recompute))

    assert_same(run(build(True)), run(build(False)))


def test_recomputed_dropout_is_the_same():

    def build(recompute):
        dropout = functools.partial(transformer.sublayer_dropout, dropout_rate=0.4)
        layer_stack = stack(
            sublayers_per_layer=[*models.SUBLAYERS["sublayers_per_layer"][:2], dropout,
                                 transformer.sublayer_residual],
            recompute_grads=recompute,
        )  # fmt: skip
        return models.language_model(layer_stack=layer_stack)

    assert_same(run(build(True)), run(build(False)))


@pytest.mark.parametrize("cls", [transformer.LayerStack, REVERSIBLE])
def test_layer_outputs(cls):
    def build(mesh):
        outputs = []
        ids = models.imported(mesh, some_ids())
        model = models.unitransformer(
            stack(cls=cls, num_layers=3), autoregressive=False, output_vocab_size=None
        )
        y, _ = model.call_simple(ids, None, False, layer_outputs=outputs)
        return [*outputs, y]

    values = run(build)
    assert len(values) == 5
    np.testing.assert_array_equal(values[3], values[4])
    assert all(np.abs(values[i] - values[i + 1]).max() > 1e-3 for i in range(3))


def variable_names(layer_stack, tf_graph):
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    x = models.imported(mesh, some_ids())
    models.unitransformer(layer_stack).call_simple(x, x, True)
    names = [v.name.removeprefix("transformer/") for v in mesh.graph.all_variables]
    return [n for n in names if not n.startswith(("embedding", "positional", "logits"))]


def test_names(tf_graph):
    names = variable_names(stack(layers=[Mix, (Mix, "mix", {"loss": 1.0})]), tf_graph)
    assert names == [
        f"block_{b:03d}/{layer}/{v}"
        for b in range(2)
        for layer in ("layer_000", "mix")
        for v in ("rms_norm/scale", "Mix/wi/kernel", "Mix/wo/kernel")
    ] + ["rms_norm/scale"]


def test_names_of_a_legacy_stack(tf_graph):
    layer_stack = transformer.make_layer_stack(
        layers=[Mix], num_layers=2, block_scope=False,
        layer_stack_cls=functools.partial(transformer.LayerStack, dropout_rate=0.1, norm_epsilon=1e-6),
    )  # fmt: skip
    assert variable_names(layer_stack, tf_graph) == [
        f"layer_{i:03d}/{v}"
        for i in range(2)
        for v in ("layer_norm/scale", "Mix/wi/kernel", "Mix/wo/kernel")
    ] + ["final_layer_norm/scale"]


def test_layers_with_other_windows_have_a_relative_bias_of_their_own(tf_graph):
    class Window(transformer_layers.SelfAttention):
        def min_relative_position(self, context):
            return -2

    kwargs = {"num_heads": 2, "key_value_size": 4, "relative_attention_type": "bias_shared"}
    layers = [(transformer_layers.SelfAttention, kwargs), (Window, kwargs)]
    names = variable_names(stack(layers=layers), tf_graph)
    assert [n for n in names if "relative" in n] == [
        "block_000/layer_000/SelfAttention/relative_attention_bias",
        "block_000/layer_001/Window/relative_attention_bias",
    ]


KWARGS = {"loss": 0.5}


@pytest.mark.parametrize("order", [
    "c", "nc", "cn", "kc", "ck", "nck", "nkc", "cnk", "ckn", "knc", "kcn", "Nc", "cNn", "kKc",
])  # fmt: skip
@pytest.mark.parametrize("kind", [list, tuple])
def test_entries_of_layers_in_any_order(order, kind):
    parts = {"c": Mix, "n": "named", "k": KWARGS, "N": None, "K": {"shares": True}}
    entry = kind(parts[letter] for letter in order)
    made = transformer.make_layer_stack([entry, Mix], lambda layers: layers, num_layers=2)
    name = "named" if "n" in order else "layer_000"
    assert [layer.name for layer in made] == [
        f"block_{block:03d}/{layer}" for block in range(2) for layer in (name, "layer_001")
    ]
    assert made[0].loss == made[2].loss == (0.5 if "k" in order else 0.0)
    assert made[0].shares == ("K" in order) and made[1].loss == 0.0
    flat = transformer.make_layer_stack([entry, Mix], lambda layers: layers, 2, block_scope=False)
    names = ["named"] * 2 if "n" in order else ["layer_000", "layer_002"]
    assert [layer.name for layer in flat] == [names[0], "layer_001", names[1], "layer_003"]


def test_of_two_classes_or_names_the_last_counts():
    def made(entry):
        [layer] = transformer.make_layer_stack([entry], lambda layers: layers, num_layers=1)
        return layer

    with pytest.warns(mtf.MeshTensorFlowWarning, match="has 2 names, of which only the last"):
        assert made(("first", Mix, "second")).name == "block_000/second"
    with pytest.warns(mtf.MeshTensorFlowWarning, match="has 2 classes, of which only the last"):
        assert isinstance(made((transformer_layers.DenseReluDense, Mix)), Mix)
    assert made((KWARGS, Mix, {"loss": 0.25})).loss == 0.25
    for entry in ("name", KWARGS, (), ("name", KWARGS), ("name", (Mix, KWARGS)), (Mix, 3), Mix()):
        with pytest.raises(ValueError, match="an entry of layers must be a class of layers"):
            made(entry)


def test_layers_of_one_name_share_their_variables(tf_graph):
    layer_stack = stack()
    for layer in layer_stack.layers:
        layer.set_name("same")
    names = variable_names(layer_stack, tf_graph)
    assert names == [
        "same/rms_norm/scale",
        "same/Mix/wi/kernel",
        "same/Mix/wo/kernel",
        "rms_norm/scale",
    ]


@pytest.fixture
def bindings():
    """Parses bindings, also of what is defined anew."""
    gin.enter_interactive_mode()
    gin.external_configurable(Mix, module="models")
    yield gin.parse_config
    gin.exit_interactive_mode()


def test_gin(bindings, tf_graph):
    bindings("""
        make_layer_stack.layers = [@models.Mix, ("named", {"loss": 0.5}, @models.Mix)]
        make_layer_stack.num_layers = 1
        decoder/make_layer_stack.num_layers = 2
        student/encoder/make_layer_stack.num_layers = 3
        transformer.LayerStack.sublayers_initial = []
        LayerStack.sublayers_per_layer = [@transformer.sublayer_rms_norm, @sublayer_call_layer]
        LayerStack.sublayers_final = [@sublayer_rms_norm]
        sublayer_rms_norm.epsilon = 0.5
        Unitransformer.d_model = 8
        mesh_tensorflow.transformer.transformer.Unitransformer.max_length = 16
        encoder/Unitransformer.ensemble = 2
        teacher/decoder/Unitransformer.z_loss = 0.5
        Bitransformer.shared_embedding = False
        StudentTeacher.fraction_soft = 0.25
    """)
    pair = transformer.make_bi_student_teacher(
        input_vocab_size=100, output_vocab_size=200, layout="a:b", mesh_shape="b:2"
    )
    assert (pair.fraction_soft, pair.temperature) == (0.25, None)
    student, teacher = pair.student, pair.teacher
    assert not student.shared_embedding
    assert [m.layer_stack.num_layers for m in (student.encoder, student.decoder)] == [6, 2]
    assert [m.layer_stack.num_layers for m in (teacher.encoder, teacher.decoder)] == [2, 2]
    assert (student.z_loss, teacher.z_loss) == (1e-4, 0.5)
    assert (student.encoder.name, student.decoder.name) == ("encoder", "decoder")
    assert student.encoder.output_vocab_dim is None and not student.encoder.autoregressive
    assert (student.decoder.input_vocab_dim.size, student.output_vocab_dim.size) == (256, 256)
    assert (student.encoder.layout, student.encoder.mesh_shape) == ("a:b", "b:2")
    assert [layer.loss for layer in teacher.encoder.layer_stack.layers] == [0.0, 0.5]
    made = transformer.make_bitransformer(100, 100, encoder_name="a", decoder_name="b")
    assert (made.encoder.name, made.decoder.name) == ("a", "b")
    assert [m.layer_stack.num_layers for m in (made.encoder, made.decoder)] == [2, 4]
    assert made.encoder.ensemble_dims and not made.decoder.ensemble_dims


# -- the Context and the layers' base


def test_states(tf_graph):
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    context = context_of(mesh, states=["a", "b", "c"], new_states=[], constant_states=["x"])
    assert context.get_states(2) == ["a", "b"]
    context.record_new_states(["A", "B"])
    assert context.get_states(1) == ["c"]
    context.record_constant_state("y")
    assert [context.get_constant_state() for _ in range(2)] == ["x", "y"]
    assert (context.new_states, context.constant_states) == (["A", "B"], ["x", "y"])


def test_context(tf_graph):
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    context = context_of(mesh, mode="eval", position=models.imported(mesh, some_ids()))
    assert not context.train and context.nonpadding is None
    assert context.get_position() is context.position
    context.sequence_id = 1
    assert context.nonpadding == 1
    context.position_is_default = True
    assert [d.name for d in context.get_position().shape] == ["length"]
    context.encoder_output = mtf.zeros(mesh, "batch:4,memory_length:3,d_model:8")
    assert context.encoder_length_dim == mtf.Dimension("memory_length", 3)


def test_to_json():
    layer = Mix(loss=0.5)
    layer.set_name("mix")
    assert json.loads(layer.to_json()) == {
        "class": "Mix",
        "_name": "mix",
        "loss": 0.5,
        "shares": False,
    }
    described = json.loads(stack(layers=[Mix]).to_json())
    assert [d["_name"] for d in described["_layers"]] == [
        "block_000/layer_000",
        "block_001/layer_000",
    ]


class Halved(transformer.TransformerLayer):
    def call(self, context, x, losses=None):
        return 0.5 * x


class Noted(transformer.LayerStack):
    """Overrides what the classic's stack calls, with its arguments."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.calls = []

    def _call_sublayers(self, sublayers, x, context):
        self.calls.append(len(sublayers))
        return super()._call_sublayers(sublayers, x, context)

    def _layer_fn(self, x, layer, context):
        self.calls.append(type(layer).__name__)
        return 2.0 * super()._layer_fn(x, layer, context)


class Unrolled(Noted):
    """A loop of its own, of the same parts, with a further argument."""

    def call(self, context, x):
        x = self._call_sublayers(self._sublayers_initial, x, context)
        for number, layer in enumerate(self._layers):
            fn = functools.partial(self._layer_fn, layer=layer, context=context)
            x = mtf.recompute_grad(fn, [x]) if self._recompute_grads and number else fn(x)
        return self._call_sublayers(self._sublayers_final, x, context)


@pytest.mark.parametrize("cls", [Noted, Unrolled])
@pytest.mark.parametrize("recompute", [False, True])
def test_stacks_of_ones_own(cls, recompute):
    made = cls(
        [Halved(), Halved()],
        sublayers_initial=[],
        sublayers_per_layer=[transformer.sublayer_call_layer, transformer.sublayer_residual],
        sublayers_final=[lambda x, layer_stack, context: -x],
        recompute_grads=recompute,
    )
    assert made.recompute_grads is recompute
    # A layer, with its residual, is 1.5 of its input, which the stack doubles.
    values, gradient = sublayer(lambda x, _, context: made.call(context, x))
    np.testing.assert_allclose(values, -9 * X, rtol=1e-6)
    np.testing.assert_allclose(gradient, -9 * X[::-1], rtol=1e-6)
    assert made.calls[:6] == [0, "Halved", 2, "Halved", 2, 1]


class Transposes(transformer.TransformerLayer):
    def call(self, context, x, losses=None):
        return mtf.transpose(x, x.shape.dims[::-1])


def call_stack(layer_stack, mode="train"):
    def build(mesh):
        x = models.imported(mesh, some_ids())
        models.unitransformer(layer_stack()).call_simple(x, x, True, mode=mode)

    return build


@pytest.mark.parametrize("build, text", [
    (call_stack(lambda: transformer.LayerStack([])), "sublayers_initial is None; give a list"),
    (lambda mesh: transformer.LayerStack([], dropout_rate=0.1), "dropout_rate=0.1 and norm_epsilon=None must both"),
    (
        call_stack(lambda: stack([Transposes], sublayers_per_layer=[transformer.sublayer_call_layer])),
        "layer block_000/layer_000 .Transposes., with its sublayers, returned .*d_model=8, length=8, "
        "batch=4.* a layer must return the dimensions that it is given",
    ),
    (
        call_stack(lambda: stack([(Mix, {"loss": 1.0})], cls=REVERSIBLE, recompute_grads=True)),
        "layer block_000/layer_000 .Mix. leaves .* use recompute_grads=False, or a LayerStack",
    ),
    (
        call_stack(lambda: stack(cls=REVERSIBLE, recompute_budget=1.0)),
        "ReversibleLayerStack: recompute_budget is for LayerStack alone; set recompute_grads",
    ),
    (lambda mesh: stack(layers=[Mix()]), "an entry of layers must be a class of layers, .*got <.*models.Mix"),
    (lambda mesh: stack(layers=[(Mix, 3)]), "got .*, 3"),
    (lambda mesh: transformer.make_layer_stack(layers=Mix), "layers must be a list of classes of layers"),
    (lambda mesh: transformer.sublayer_annealed_dropout(None, None, None), "start_step and end_step must be set"),
    (
        lambda mesh: transformer.sublayer_rms_norm_subsampled(None, None, None, percentage=0.0),
        "percentage must be above 0 and at most 100, got 0.0",
    ),
    (lambda mesh: context_of(mesh, states=["a"], new_states=["b"]).get_states(1), "1 states asked for after 1"),
    (lambda mesh: context_of(mesh).record_new_states([]), "records no states, in mode 'train'"),
    (lambda mesh: context_of(mesh).record_constant_state(1), "records no states"),
    (lambda mesh: context_of(mesh).get_constant_state(), "all 0 constant states have been returned"),
    (lambda mesh: context_of(mesh).encoder_length_dim, "has no encoder_output"),
    (
        lambda mesh: context_of(mesh, encoder_output=mtf.zeros(mesh, "batch:4,length:3")).encoder_length_dim,
        "no dimension named memory_length; use mtf.layers.rename_length_to_memory_length",
    ),
    (
        lambda mesh: transformer.reduce_ensemble_logits_select(
            mtf.zeros(mesh, "ensemble:2,vocab:3"), mtf.Dimension("ensemble", 2), None, model_id=2),
        "model_id=2 of ensemble=2 is taken as 0; it should be between 0 and 1",
    ),
])  # fmt: skip
def test_errors(build, text):
    with tf.Graph().as_default(), mtf.strict(), pytest.raises(ValueError) as found:
        build(mtf.Mesh(mtf.Graph(), "mesh"))
    assert re.search(text, str(found.value)), found.value


def test_a_layer_must_define_call():
    with pytest.raises(NotImplementedError, match="Nothing does not define call"):
        type("Nothing", (transformer.TransformerLayer,), {})().call(None, None)


LAYERS_THAT_DROP = {
    "attention": lambda rate: (
        transformer_layers.SelfAttention,
        {"dropout_rate": rate, "num_heads": 2, "key_value_size": 4},
    ),
    "feed_forward": lambda rate: (
        transformer_layers.DenseReluDense,
        {"dropout_rate": rate, "hidden_size": 8},
    ),
    "experts": lambda rate: (moe.MoE1D, {"dropout_rate": rate, "hidden_size": 8}),
}


@pytest.mark.parametrize("name", LAYERS_THAT_DROP)
def test_rates_of_dropout_that_are_tensors(name):
    """Of which no one can ask, within a tf.function, whether they are 0."""

    @mtf.function
    def loss(rate):
        graph = mtf.Graph()
        mesh = mtf.Mesh(graph, "mesh")
        dropped = functools.partial(transformer.sublayer_dropout, dropout_rate=rate)
        model = models.unitransformer(
            stack([LAYERS_THAT_DROP[name](rate)], 1, sublayers_initial=[dropped])
        )
        ids = models.imported(mesh, some_ids(low=1))
        value = model.call_simple(ids, ids, True, mode="train")[1]
        impl = mtf.placement_mesh_impl.PlacementMeshImpl("", "", [""])
        return mtf.Lowering(graph, {mesh: impl}).export_to_tf_tensor(value)

    assert loss(tf.constant(0.25)) != loss(tf.constant(0.75))
