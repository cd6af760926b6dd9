"""Unitransformer, Bitransformer and StudentTeacher."""

import re

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from helpers.transformer import models
from helpers.transformer.models import (
    DEPTH,
    LENGTH,
    PLACINGS,
    ROWS,
    VOCAB,
    Mix,
    assert_same,
    run,
    some_ids,
    stack,
)

import mesh_tensorflow as mtf
from mesh_tensorflow.transformer import convert, transformer, transformer_layers

PADDED = 16


def log_softmax(x):
    x = x - x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


def expected_loss(logits, targets, smoothing=0.0, z_loss=0.0, weights=None):
    """Returns the loss in float64, by its definition."""
    logits = logits.astype("float64")
    wanted = np.eye(PADDED)[np.maximum(targets, 0)] * (1 - smoothing) + smoothing / PADDED
    loss = -(wanted * log_softmax(logits)).sum(axis=-1)
    loss += z_loss * np.log(np.exp(logits).sum(axis=-1)) ** 2
    weights = targets > 0 if weights is None else weights
    return (loss * weights).sum() / targets.size


@pytest.fixture(scope="module")
def on_one_processor():
    return run(models.language_model())


@pytest.mark.slow_but(2)
@pytest.mark.slow("Placing(mesh='x:2', *simd=False*")
@pytest.mark.parametrize("placing", PLACINGS, ids=str)
def test_layouts(placing, on_one_processor):
    assert_same(run(models.language_model(), placing), on_one_processor)


@pytest.mark.parametrize("mode, z_loss", [("train", 0.02), ("eval", 0.0), ("infer", 0.0)])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_loss(mode, z_loss, smoothing):
    """Label smoothing is over the padded vocabulary; z loss when training; the mean over all."""
    build = models.language_model(
        gradients=False, call={"mode": mode}, z_loss=0.02, label_smoothing=smoothing
    )
    values = run(build)
    expected = expected_loss(values["logits"], some_ids(), smoothing, z_loss)
    np.testing.assert_allclose(values["loss"], expected, rtol=1e-5)


class TwiceTheLoss(transformer.Unitransformer):
    """A model of a user, with a loss in the method that the classic has for it."""

    def _compute_loss(self, context, logits, targets, output_vocab_dim):
        return 2.0 * super()._compute_loss(context, logits, targets, output_vocab_dim)


@pytest.mark.parametrize(
    "loss_fn", [None, lambda model, context, logits, *rest: mtf.reduce_mean(mtf.square(logits))]
)
def test_a_loss_that_a_subclass_overrides(loss_fn):
    once, twice = (
        run(models.language_model(gradients=False, loss_fn=loss_fn, cls=cls))["loss"]
        for cls in (transformer.Unitransformer, TwiceTheLoss)
    )
    np.testing.assert_allclose(twice, 2 * once, rtol=1e-6)


def test_loss_on_targets_only():
    ids = some_ids(low=1)
    ends_before = np.cumsum(ids == 1, axis=1) - (ids == 1)
    values = run(
        models.language_model(ids=ids, gradients=False, loss_on_targets_only=True, z_loss=0.0)
    )
    expected = expected_loss(values["logits"], ids, weights=ends_before % 2 == 1)
    np.testing.assert_allclose(values["loss"], expected, rtol=1e-5)


def test_denominator():
    def build(mesh):
        targets = models.imported(mesh, some_ids())
        return {
            str(i): models.unitransformer(loss_denominator=d).call_simple(
                targets, targets, True, num_microbatches=n
            )[1]
            for i, (d, n) in enumerate([(None, 1), (None, 4), (10.0, 1), (10.0, 4)])
        }

    losses = run(build)
    mean = losses["0"] * ROWS * LENGTH
    np.testing.assert_allclose(losses["1"], losses["0"] / 4, rtol=1e-6)
    np.testing.assert_allclose([losses["2"], losses["3"]], mean / 10.0, rtol=1e-6)


def changed_positions(**kwargs):
    """Returns, for each position, at which positions the logits change with its input."""

    def logits_of(ids):
        def build(mesh):
            x = models.imported(mesh, ids)
            return [models.unitransformer(**kwargs).call_simple(x, x, True, mode="eval")[0]]

        return run(build)[0]

    ids = np.full((1, LENGTH), 5, "int32")
    ids[0, 3] = 1
    before = logits_of(ids)
    changes = []
    for i in (0, 2, 5, 7):
        other = ids.copy()
        other[0, i] = 6
        changed = np.abs(logits_of(other) - before).max(axis=(0, 2)) > 1e-6
        changes.append(np.flatnonzero(changed).tolist())
    return changes


@pytest.mark.slow
def test_visibility():
    """Of positions 0, 2, 5 and 7; the inputs end at 3, whose end symbol comes in at 4."""
    assert changed_positions() == [[*range(8)], [*range(2, 8)], [5, 6, 7], [7]]
    everything = [*range(8)]
    assert changed_positions(autoregressive=False) == [everything] * 4
    delimited = changed_positions(input_full_attention=True)
    assert delimited == [everything, everything, [5, 6, 7], [7]]


@pytest.mark.slow("kwargs1*")
@pytest.mark.parametrize("kwargs", [{}, {"sinusoid_positional_embedding": True}])
def test_given_positions(kwargs):
    """The same as the default ones; and none if the model has no embeddings of positions."""
    positions = np.tile(np.arange(LENGTH, dtype="int32"), (ROWS, 1))

    def build(mesh):
        targets = models.imported(mesh, some_ids())
        outputs = {}
        for name, at in [
            ("default", None),
            ("same", positions),
            ("other", positions[:, ::-1].copy()),
        ]:
            at = None if at is None else models.imported(mesh, at)
            for has in (True, False):
                with tf.variable_scope("", reuse=tf.AUTO_REUSE):
                    uni = models.unitransformer(positional_embedding=has, **kwargs)
                    call = uni.call_simple(targets, None, False, mode="eval", position=at)
                outputs[f"{name}{has}"] = call[0]
        return outputs

    values = run(build)
    np.testing.assert_allclose(values["sameTrue"], values["defaultTrue"], rtol=1e-5, atol=1e-6)
    assert np.abs(values["otherTrue"] - values["defaultTrue"]).max() > 0.01
    moved = np.abs(values["otherFalse"] - values["defaultFalse"]).max()
    assert moved > 0.01 if kwargs else moved == 0.0


def test_token_dropout():
    """Some ids are 0 in training, none otherwise."""

    def build(mesh):
        shape = mtf.convert_to_shape("batch:64,length:8")
        ids = mtf.constant(mesh, 3, shape, tf.int32)
        outputs = {}
        for mode in ("train", "eval"):
            kept = []
            layer_stack = transformer.LayerStack(
                [], [lambda x, s, c, kept=kept: kept.append(c) or x], [], []
            )
            uni = models.unitransformer(layer_stack, token_dropout_rate=0.25, name=mode)
            uni.call_simple(ids, None, False, mode=mode)
            outputs[mode] = kept[0].input_embeddings
        return outputs

    values = run(build)
    assert np.ptp(values["eval"].reshape(-1, DEPTH), axis=0).max() == 0
    rows = values["train"].reshape(-1, DEPTH)
    share = np.unique(rows[:, 0], return_counts=True)[1] / len(rows)
    assert len(share) == 2 and abs(share.min() - 0.25) < 0.08


def test_ensemble_members_learn_apart():
    """Each member has the gradient that it has alone; the logits are of the mean probability."""
    values = run(models.language_model(ensemble=2), scale=0.3)
    names = [k for k in values if k.startswith("transformer/")]
    assert all(values[k].shape[0] == 2 for k in names if "logits" not in k)

    weights = {n: models.decoding_models.weights(n, values[n].shape, 0.3) for n in names}

    def member(i):
        own = {n: w if "logits" in n else w[i] for n, w in weights.items()}
        return run_with(models.language_model(), own)

    alone = [member(i) for i in range(2)]
    for name in names:
        if "logits" not in name:
            for i in range(2):
                np.testing.assert_allclose(values[name][i], alone[i][name], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(values["loss"], alone[0]["loss"] + alone[1]["loss"], rtol=1e-5)
    probs = np.mean([np.exp(log_softmax(a["logits"])) for a in alone], axis=0)
    np.testing.assert_allclose(values["logits"], np.log(probs), rtol=1e-4, atol=1e-5)


def run_with(build, weights):
    """Runs with given weights, by name."""
    original = models.decoding_models.weights
    models.decoding_models.weights = lambda name, sizes, scale: weights[name]
    try:
        return run(build)
    finally:
        models.decoding_models.weights = original


def test_bfloat16():
    """Activations in bfloat16, masters in float32: near the values in float32."""
    dtype = mtf.VariableDType(tf.float32, tf.float32, tf.bfloat16)

    def build(mesh):
        outputs = models.language_model(call={"variable_dtype": dtype})(mesh)
        return {k: mtf.to_float(v) for k, v in outputs.items()}

    values, exact = run(build, scale=0.3), run(models.language_model(), scale=0.3)
    assert set(values) == set(exact)
    np.testing.assert_allclose(values["loss"], exact["loss"], rtol=0.05)
    np.testing.assert_allclose(values["logits"], exact["logits"], atol=0.1)


def sequence_to_sequence(mesh, **kwargs):
    inputs, targets = (
        models.imported(mesh, some_ids(0, 8, 0)),
        models.imported(mesh, some_ids(1, 6, 0)),
    )
    logits, loss = models.bitransformer(**kwargs).call_simple(inputs, targets, True)
    return {"logits": logits, **models.trained(loss)}


@pytest.mark.slow
def test_bitransformer_layouts():
    models.check_everywhere(sequence_to_sequence, [PLACINGS[3], PLACINGS[-2]])


def usual_layers(decoder, rate):
    attention = {"num_heads": 2, "key_value_size": 4, "dropout_rate": rate}
    relative = {"relative_attention_type": "bias_shared", "relative_attention_num_buckets": 8}
    layers = [
        (transformer_layers.SelfAttention, {**attention, **relative}),
        (transformer_layers.EncDecAttention, attention),
        (transformer_layers.DenseReluDense, {"hidden_size": 12, "dropout_rate": rate}),
    ]
    return layers if decoder else layers[::2]


@pytest.mark.slow
@pytest.mark.parametrize("placing, rate", [
    (models.Placing("x:2,y:2", "batch:x,heads:y,d_ff:y,vocab:y"), 0.1),
    (models.Placing("x:2", "length:x"), 0.1),
    # Where all outputs are of one program, making slices of the masters draws numbers too.
    (models.Placing("x:2,y:2", "batch:x,heads:y,d_ff:y,vocab:y", simd=True), 0.0),
], ids=str)  # fmt: skip
def test_training_with_attention_and_dropout(placing, rate):
    """Random numbers do not depend on the layout either."""

    def build(mesh):
        encoder, decoder = (
            models.unitransformer(
                stack(usual_layers(d, rate), 1), name="decoder" if d else "encoder", autoregressive=d,
                output_vocab_size=VOCAB if d else None, positional_embedding=False,
            )
            for d in (False, True)
        )  # fmt: skip
        model = transformer.Bitransformer(encoder, decoder)
        inputs, targets = (
            models.imported(mesh, some_ids(0, 8, 0)),
            models.imported(mesh, some_ids(1, 6, 0)),
        )
        logits, loss = model.call_simple(inputs, targets, True)
        return {"logits": logits, **models.trained(loss)}

    assert_same(run(build, placing), run(build), 1e-4)


def test_bitransformer_ignores_padding_of_inputs():
    """What the encoder returns at padding is 0, and what it is fed there changes nothing."""

    def encoded(ids):
        def build(mesh):
            x = models.imported(mesh, ids)
            encoder = models.unitransformer(autoregressive=False, output_vocab_size=None)
            return [encoder.call_simple(x, None, False, sequence_id=mtf.minimum(x, 1))[0]]

        return run(build)[0]

    ids = some_ids(0, 8, 1)
    ids[:, 5:] = 0
    values = encoded(ids)
    assert (values[:, 5:] == 0).all() and (values[:, :5] != 0).all()


def student_teacher(mesh, **kwargs):
    tf.train.get_or_create_global_step()
    pair = transformer.StudentTeacher(models.bitransformer(), models.bitransformer(), **kwargs)
    inputs, targets = (
        models.imported(mesh, some_ids(0, 8, 0)),
        models.imported(mesh, some_ids(1, 6, 0)),
    )
    return pair, pair.call_simple(inputs, targets, True)


def test_teacher_does_not_learn(tf_graph):
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    student_teacher(mesh, temperature=2.0, fraction_soft=0.5)
    names = [v.name for v in mesh.graph.trainable_variables]
    assert len(names) == len(mesh.graph.all_variables) / 2
    assert all(n.startswith("student/") for n in names)


@pytest.mark.slow
def test_student_teacher_layouts():
    def build(mesh):
        logits, loss = student_teacher(
            mesh, temperature=2.0, fraction_soft=0.5, distill_start_step=-1
        )[1]
        return {"logits": logits, **models.trained(loss)}

    models.check_everywhere(build, [PLACINGS[3]])


@pytest.mark.slow("False*")
@pytest.mark.parametrize("both, fraction", [(False, 0.5), (True, 0.5), (True, 0.0)])
def test_weights_of_the_teacher_come_from_its_checkpoint(tmp_path, both, fraction):
    with tf.Graph().as_default():
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        sequence_to_sequence(mesh)
        saved = {v.op.name: v for v in tf.global_variables()}
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            path = tf.train.Saver().save(session, str(tmp_path / "teacher"))
            saved = session.run(saved)
    with tf.Graph().as_default():
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        pair, _ = student_teacher(
            mesh, temperature=2.0, fraction_soft=fraction,
            teacher_checkpoint=str(tmp_path) if both else path, initialize_student_weights=both,
        )  # fmt: skip
        pair.initialize()
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            values = session.run({v.op.name: v for v in tf.global_variables()})
    assert any(name.startswith("teacher/") for name in values) == bool(fraction)
    for name, value in saved.items():
        if fraction:
            np.testing.assert_array_equal(values[f"teacher/{name}"], value)
        if "embedding" in name:
            assert (values[f"student/{name}"] == value).all() == both


def test_teacher_in_a_scope_of_the_program(tmp_path, tf_graph):
    """Its variables are found where the model was called, and nowhere else."""
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    with tf.variable_scope("program"):
        pair, _ = student_teacher(
            mesh, temperature=2.0, fraction_soft=0.5, teacher_checkpoint=str(tmp_path)
        )
        written = {
            v.op.name.removeprefix("program/teacher/"): np.full(v.shape, 3.0, "float32")
            for v in tf.global_variables()
            if "/teacher/" in v.op.name
        }
        convert.write_checkpoint(written, str(tmp_path))
        pair.initialize()
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        for name, value in session.run({v.op.name: v for v in tf.global_variables()}).items():
            assert (value == 3.0).all() == name.startswith("program/teacher/")
    with pytest.raises(ValueError, match="no variables in the scope 'teacher/'; call it after"):
        pair.initialize()


def test_float16_of_an_ensemble():
    """An id that no member expects has a small probability, and not the logarithm of 0."""

    def build(mesh):
        ensemble, vocab = mtf.convert_to_shape("ensemble:2,vocab:3").dims
        logits = mtf.import_tf_tensor(
            mesh, tf.constant([[0, 9, -20], [1, 8, -30]], tf.float16), mtf.Shape([ensemble, vocab])
        )
        return {"y": transformer.reduce_ensemble_logits(logits, ensemble, vocab)}

    values = run(build)["y"]
    assert values.dtype == np.float16 and -20 < values[2] < -10


def error(build):
    with tf.Graph().as_default(), pytest.raises(ValueError) as found:
        build(mtf.Mesh(mtf.Graph(), "mesh"))
    return str(found.value).split("\n")[0]


def call(ids=None, **kwargs):
    def build(mesh):
        x = models.imported(mesh, some_ids() if ids is None else ids)
        models.unitransformer(**kwargs).call_simple(x, x, True)

    return build


@pytest.mark.parametrize("build, text", [
    (call(max_length=4), "a sequence of length=8 exceeds max_length=4.*make the model with a larger max_length"),
    (call(some_ids() + 8), "inputs .* have the id 21, but the vocabulary vocab=16 ends at 15; make the model"),
    (call(output_vocab_size=None), "an autoregressive model needs an output vocabulary; set output_vocab_size"),
    (call(input_vocab_size=None), "input_vocab_size must be set"),
    (
        call(output_vocab_size=40, shared_embedding_and_softmax_weights=True),
        "needs equal vocabularies, got vocab=16 for inputs and vocab=48 for outputs",
    ),
    (call(d_model=7, sinusoid_positional_embedding=True), "d_model=7 must be even.*change d_model"),
    (
        lambda mesh: models.unitransformer().call_simple(models.imported(mesh, some_ids()), None, True),
        "compute_loss needs targets",
    ),
    (
        lambda mesh: models.unitransformer().call_simple(
            mtf.to_float(models.imported(mesh, some_ids())), None, False),
        "inputs .* must be integers, got float32; use mtf.to_int32",
    ),
    (
        lambda mesh: transformer.Bitransformer(
            models.unitransformer(autoregressive=False, output_vocab_size=None),
            models.unitransformer(d_model=16)),
        "got vocab=16, d_model=8 and vocab=16, d_model=16; change the sizes, or set shared_embedding=False",
    ),
    (lambda mesh: student_teacher(mesh, temperature=1.0), "temperature=1.0, fraction_soft=None; bind them"),
    (
        lambda mesh: transformer.StudentTeacher(None, None).initialize(),
        "initialize needs a teacher_checkpoint",
    ),
])  # fmt: skip
def test_errors(build, text):
    found = error(build)
    assert re.search(text, found), found


def test_nothing_is_left_of_a_call_that_fails(tf_graph):
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    x = models.imported(mesh, some_ids())
    before = len(mesh.graph.operations)
    with pytest.raises(ValueError):
        models.unitransformer(max_length=4).call_simple(x, x, True)
    assert len(mesh.graph.operations) == before


def test_vocabulary_sizes_are_rounded_up():
    uni = models.unitransformer(input_vocab_size=129, output_vocab_size=128, vocab_divisor=128)
    assert (uni.input_vocab_dim.size, uni.output_vocab_dim.size) == (256, 128)
    assert (uni.input_vocab_size_unpadded, uni.output_vocab_size_unpadded) == (129, 128)


def test_layer_losses_are_added():
    without = run(models.language_model(gradients=False))["loss"]
    layers = stack(layers=[(Mix, {"loss": 2.0})])
    values = run(models.language_model(gradients=False, layer_stack=layers))
    assert values["loss"] > without + 1e-3
    assert run(lambda mesh: [encoder_loss(mesh, layers)])[0] > 0
    assert run(lambda mesh: [mtf.zeros(mesh, "") + encoder_loss(mesh, stack())])[0] == 0


def encoder_loss(mesh, layer_stack):
    encoder = models.unitransformer(layer_stack, autoregressive=False, output_vocab_size=None)
    return encoder.call_simple(models.imported(mesh, some_ids()), None, True)[1]


def test_name_of_padded_vocabulary_is_vocab():
    assert models.unitransformer().output_vocab_dim == mtf.Dimension("vocab", PADDED)
    assert VOCAB < PADDED
