"""Layers of experts: layouts, models, decoding, hyperparameters, errors."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from helpers.layer_runs import numbers
from helpers.transformer import decoding_models as models
from helpers.transformer import routing
from helpers.transformer.decoding_models import (
    LENGTH,
    ROWS,
    VOCAB,
    RunningSum,
    imported,
    prefixes,
    run,
)
from helpers.transformer.expert_layers import (
    DETERMINED,
    FLOAT,
    ROOMY,
    SMALL,
    TOKENS,
    context_for,
    given,
    trained,
    two_levels,
)

import mesh_tensorflow as mtf
from mesh_tensorflow.testing.harness import WHOLE, Placing, assert_close
from mesh_tensorflow.transformer import heterogeneous_moe, moe, transformer

GATINGS = ("top_2", "top_n", "switch", "ntlb", "switch_max", "expert_selection")

# Data, experts, both, hidden units, channels on the way; one program each.
LAYOUTS = [
    Placing("x:2", "batch:x"),
    Placing("x:2", "experts:x"),
    Placing("x:4", "batch:x,experts:x"),
    Placing("x:2,y:2", "batch:x,experts:x,expert_hidden:y"),
    Placing("x:2,y:2", "batch:x,experts:y"),
    Placing("x:2,y:2", "batch:x,experts:x,d_model_split:y"),
    Placing("x:2,y:2", "batch:x,experts:x,d_model:y", merge="device"),
    Placing("x:2,y:2", "batch:x,experts:x,expert_hidden:y", simd=True),
]


@pytest.mark.slow
@pytest.mark.parametrize("gating", GATINGS)
def test_equal_under_layouts(gating):
    """Values and gradients, with tokens that find no place."""

    def layer():
        return moe.MoE1D(
            **SMALL, **DETERMINED, moe_gating=gating, group_size=8, capacity_factor_train=0.9,
            min_expert_capacity=1, z_loss=0.1, activation=["gelu", "linear"],
        )  # fmt: skip

    expected = run(trained(layer))
    for placing in LAYOUTS if gating == "top_2" else LAYOUTS[2::5]:
        for key, value in run(trained(layer, placing), placing).items():
            assert_close(value, expected[key], 2e-5, f"{placing} {key}")
    assert all(np.abs(value).max() > 0 for value in expected.values())


def test_embeddings_joined_to_split_channels():
    """The router's input has both, and a layout may split what they have in common."""

    def build(mesh):
        layer = moe.MoE1D(**SMALL, **DETERMINED, moe_gating="switch", word_embed_mode="concat")
        x = given(mesh, TOKENS + ",d_model:8")
        context = context_for(mesh)
        context.input_embeddings = mtf.sin(x)
        y = layer.call(context, x)
        variables = [v.outputs[0] for v in mesh.graph.trainable_variables]
        return [y, *mtf.gradients([mtf.reduce_sum(mtf.square(y))], variables)]

    expected = run(build)
    for number, value in run(build, Placing("x:2", "d_model:x")).items():
        assert_close(value, expected[number], 2e-5)


def test_output_is_the_sum_of_experts():
    """Every token through every expert in NumPy, with a switch that drops some."""
    layer = moe.MoE1D(
        **SMALL, **DETERMINED, moe_gating="switch", group_size=16, capacity_factor_eval=1.0,
    )  # fmt: skip

    def build(mesh):
        x = given(mesh, TOKENS + ",d_model:8")
        return {"y": layer.call(context_for(mesh, mode="eval"), x)}

    found = run(build)["y"].reshape(2, 16, 8)
    x = numbers(TOKENS + ",d_model:8").reshape(2, 16, 8)
    gating, wi, wo = (
        models.weights(name, sizes, 1.0) for name, sizes in
        [("switch_gating/kernel", [8, 4]), ("wi/kernel", [4, 8, 8]), ("wo/kernel", [4, 8, 8])]
    )  # fmt: skip
    dropped = 0
    for inputs, outputs in zip(x, found):
        gates = routing.softmax(inputs @ gating)
        combine = routing.no_token_left_behind(gates, np.ones(16), 4, 1).sum(-1)
        by_expert = np.einsum(
            "teh,ehd->ted", np.maximum(np.einsum("td,edh->teh", inputs, wi), 0), wo
        )
        assert_close(outputs, np.einsum("ted,te->td", by_expert, combine).astype("float32"), 1e-5)
        dropped += (combine.sum(-1) == 0).sum()
        assert (np.abs(outputs).max(-1) == 0).sum() == (combine.sum(-1) == 0).sum()
    assert 0 < dropped < 16


def test_numbers_of_groups_and_places():
    """As many groups as the mesh needs, and the capacity of the mode."""
    split = moe._split_into_groups
    assert [split(32, 8, 1), split(32, 8, 4), split(30, 7, 2), split(20, 8, 1)] == [
        (4, 8), (4, 8), (6, 5), (2, 10),
    ]  # fmt: skip
    assert [split(7, 3, 1), split(100, 1024, 4), split(4, 8, 1)] == [(7, 1), (4, 25), (1, 4)]
    with pytest.raises(
        ValueError, match=r"n=12 is not a multiple of mesh_dim_size=5: .* batch size"
    ):
        split(12, 5, 5)

    def places(train, placing=WHOLE, **kwargs):
        with tf.Graph().as_default():
            graph = mtf.Graph()
            x = mtf.zeros(mtf.Mesh(graph, "mesh"), mtf.convert_to_shape(TOKENS + ",d_model:8"))
            hparams = moe.MoE1D(**SMALL, **kwargs)._hparams
            moe.transformer_moe_layer_v1(
                x, x.shape.dims[-1], hparams, train, FLOAT, placing.layout, placing.mesh
            )
        [wi] = [op for op in graph.operations if op.name == "wi/einsum"]
        sizes = {d.name: d.size for d in wi.outputs[0].shape}
        return sizes["batch_unsplit"], sizes["expert_capacity"]

    assert places(True, group_size=16) == (2, 5)
    assert places(False, group_size=16) == (2, 8)
    assert places(False, group_size=16, capacity_factor_eval=9.0) == (2, 16)
    assert places(False, group_size=8, capacity_factor_eval=0.5) == (4, 4)
    assert places(False, Placing("x:8", "batch:x"), group_size=32) == (8, 4)


# -- models


def language_model(layer, **kwargs):
    return models.unitransformer([RunningSum(), layer], **kwargs)


DECODED = {
    **{
        gating: lambda gating=gating: moe.MoE1D(**SMALL, **DETERMINED, **ROOMY, moe_gating=gating)
        for gating in GATINGS[:-1]
    },
    "heterogeneous": lambda: heterogeneous_moe.HeterogeneousMoE1D(
        **SMALL, **DETERMINED, **ROOMY, moe_num_layers=2
    ),
    "two levels": lambda: two_levels(hidden_size=8),
}


def sampled(model, given_ids):
    def build(mesh):
        ids = model().sample_autoregressive(imported(mesh, given_ids), stop_at_token=1)
        inputs = transformer.autoregressive_inputs(ids)
        logits, _ = model().call_simple(inputs, ids, compute_loss=False, mode="eval")
        return {"ids": ids, "logits": logits}

    return build


@pytest.mark.slow
@pytest.mark.parametrize("kind", DECODED)
def test_decoding(kind):
    """One position at a time gives what all at once do, if there is room for all tokens."""
    ids = prefixes((1, 2, 4, 6))
    found = run(sampled(lambda: language_model(DECODED[kind]()), ids))
    assert ((found["ids"] == ids) | (ids == 0)).all()
    best = found["logits"].argmax(-1)
    for row, n, expected in zip(found["ids"], (1, 2, 4, 6), best):
        ends = np.flatnonzero(row[n:] == 1)
        last = n + ends[0] + 1 if len(ends) else LENGTH
        np.testing.assert_array_equal(row[n:last], expected[n:last])
    assert len(np.unique(found["ids"])) > 3


def test_experts_choose_among_what_is_decoded():
    """Which differs from the choice among all positions, but runs and keeps the given ids."""
    ids = prefixes((1, 2, 4, 6))
    layer = moe.MoE1D(**SMALL, moe_gating="expert_selection")
    found = run(sampled(lambda: language_model(layer), ids))
    assert ((found["ids"] == ids) | (ids == 0)).all()
    assert (found["ids"] < VOCAB).all() and (found["ids"][:, -1] > 0).any()


@pytest.mark.slow
def test_decoding_under_layouts():
    ids = prefixes((1, 2, 4, 6))
    expected = run(sampled(lambda: language_model(moe.MoE1D(**SMALL, **DETERMINED, **ROOMY)), ids))
    for placing in (
        Placing("x:2", "batch:x,experts:x"), Placing("x:2,y:2", "batch:x,experts:y", simd=True),
    ):  # fmt: skip

        def model(placing=placing):
            layer = moe.MoE1D(**SMALL, **DETERMINED, **ROOMY)
            return language_model(layer, layout=placing.layout, mesh_shape=placing.mesh)

        found = run(sampled(model, ids), placing)
        np.testing.assert_array_equal(found["ids"], expected["ids"])


def losses_while_training(layer, steps=12, **options):
    with tf.Graph().as_default():
        tf.set_random_seed(1)
        graph = mtf.Graph()
        mesh = mtf.Mesh(graph, "mesh")
        ids = imported(
            mesh, np.random.RandomState(0).randint(2, VOCAB, (ROWS, LENGTH)).astype("int32")
        )
        model = language_model(layer, **options)
        _, loss = model.call_simple(
            transformer.autoregressive_inputs(ids), ids, compute_loss=True, mode="train"
        )
        tf.train.get_or_create_global_step()
        variables = graph.trainable_variables
        grads = mtf.gradients([loss], [v.value for v in variables])
        assert all(g is not None for g in grads)
        updates = mtf.optimize.AdamWeightDecayOptimizer(0.02).apply_grads(grads, variables)
        lowering = mtf.Lowering(graph, {mesh: Placing("", "").impl()})
        step = tf.group([lowering.lowered_operation(op) for op in updates])
        value = lowering.export_to_tf_tensor(loss)
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            session.run(lowering.copy_masters_to_slices())
            return [session.run([value, step])[0] for _ in range(steps)]


@pytest.mark.slow("switch*", "two*")
@pytest.mark.parametrize("layer", [
    lambda: moe.MoE1D(**SMALL, z_loss=1e-3, dropout_rate=0.1),
    lambda: moe.MoE1D(**SMALL, moe_gating="switch", switch_jitter=0.1, word_embed_mode="concat"),
    lambda: two_levels(hidden_size=8, loss_coef=0.1),
], ids=["top_2", "switch", "two levels"])  # fmt: skip
def test_models_without_sequence_ids_learn(layer):
    losses = losses_while_training(layer())
    assert losses[-1] < 0.8 * losses[0] and np.isfinite(losses).all()


def test_models_in_bfloat16():
    """Activations in bfloat16; the loss of the layer joins that of the model."""

    def build(dtype):
        def made(mesh):
            ids = imported(
                mesh, np.random.RandomState(0).randint(2, VOCAB, (ROWS, LENGTH)).astype("int32")
            )
            layer = moe.MoE1D(**SMALL, **DETERMINED, **ROOMY, z_loss=1e-3)
            _, loss = language_model(layer).call_simple(
                transformer.autoregressive_inputs(ids), ids, compute_loss=True, mode="train",
                variable_dtype=mtf.VariableDType(tf.float32, tf.float32, dtype),
            )  # fmt: skip
            variables = mesh.graph.trainable_variables
            assert all(g is not None for g in mtf.gradients([loss], [v.value for v in variables]))
            return {"loss": mtf.cast(loss, tf.float32)}

        return made

    whole, half = (run(build(dtype))["loss"] for dtype in (tf.float32, tf.bfloat16))
    assert abs(half - whole) < 0.1 * whole


def test_loss_is_added_with_its_coefficient():
    def build(coefficient):
        def made(mesh):
            x = given(mesh, TOKENS + ",d_model:8")
            context = context_for(mesh, num_microbatches=2)
            moe.MoE1D(**SMALL, **DETERMINED, loss_coef=coefficient).call(context, x)
            return {"loss": context.losses[0]}

        return made

    one, small = run(build(1.0))["loss"], run(build(0.01))["loss"]
    assert 0.5 <= one < 2.0  # 1 at least, over two microbatches
    np.testing.assert_allclose(small, one * 0.01, rtol=1e-5)

    def without_losses(mesh):
        context = context_for(mesh)
        context.losses = None
        return {
            "y": moe.MoE1D(**SMALL, **DETERMINED).call(context, given(mesh, TOKENS + ",d_model:8"))
        }

    assert run(without_losses)["y"].any()


@pytest.mark.slow
def test_loss_in_microbatches_is_the_mean_of_theirs():
    """Also where the router adds its z-loss."""
    layer = {**SMALL, **DETERMINED, **ROOMY, "z_loss": 0.1}
    ids = np.random.RandomState(0).randint(2, VOCAB, (ROWS, LENGTH)).astype("int32")

    def loss_of(ids):
        _, loss = language_model(moe.MoE1D(**layer, loss_coef=10.0)).call_simple(
            transformer.autoregressive_inputs(ids), ids, compute_loss=True, mode="train"
        )
        return loss

    def in_microbatches(mesh):
        given = imported(mesh, ids)
        batch = given.shape.dims[0]
        return {"loss": mtf.optimize.accumulate_gradients(loss_of, given, batch, 2).loss}

    # As in training, where every second row is of one microbatch.
    halves = [run(lambda mesh, i=i: {"loss": loss_of(imported(mesh, ids[i::2]))}) for i in range(2)]
    mean = np.mean([half["loss"] for half in halves])
    np.testing.assert_allclose(run(in_microbatches)["loss"], mean, rtol=1e-5)


@pytest.mark.parametrize("recompute", [False, True])
def test_what_routers_have_done(recompute):
    """Of gatings in which tokens choose; padding does not count."""
    few = {"group_size": 8, "capacity_factor_train": 0.5, "min_expert_capacity": 1}
    ids = np.random.RandomState(0).randint(2, VOCAB, (ROWS, LENGTH)).astype("int32")
    tokens = np.ones_like(ids)
    tokens[0, 3:] = 0

    def build(gating):
        def made(mesh):
            routings = []
            layer = moe.MoE1D(
                **SMALL, **DETERMINED, **few, moe_gating=gating, top_n_num_experts_per_token=2
            )
            model = language_model(layer)
            model.layer_stack = models.stack([RunningSum(), layer], recompute_grads=recompute)
            model.call_simple(
                imported(mesh, ids), imported(mesh, ids), compute_loss=True, mode="train",
                sequence_id=imported(mesh, tokens), routings=routings,
            )  # fmt: skip
            assert len(routings) == (gating != "expert_selection")
            found = {name: x for routing in routings for name, x in routing._asdict().items()}
            for x in [found["gates"]] if routings else []:
                weights = [v.value for v in mesh.graph.trainable_variables]
                grads = mtf.gradients([mtf.reduce_sum(mtf.square(x))], weights)
                found["gradient"] = next(g for g in grads if g is not None)
            return found

        return made

    for gating, number in (("top_n", 2), ("switch", 1)):
        found = run(build(gating))
        np.testing.assert_allclose(found["tokens"], tokens.sum())
        np.testing.assert_allclose(found["chosen"].sum(), number * tokens.sum())
        np.testing.assert_allclose(found["gates"].sum(), tokens.sum(), rtol=1e-5)
        assert 0 < found["placed"] < found["chosen"].sum() and found["gradient"].any()
    run(lambda mesh: {**build("expert_selection")(mesh), "one": mtf.ones(mesh, "a:1")})


# -- hyperparameters, errors


class OfTensor2Tensor:
    """As an object that sets what `set_default_moe_hparams` adds, and no more."""

    def __init__(self):
        self.added = set()

    def add_hparam(self, name, value):
        self.added.add(name)
        setattr(self, name, value)


@pytest.mark.slow
def test_hyperparameters_of_earlier_releases():
    """They lack what came later: the smallest capacity, the switches, the coefficient."""
    hparams = OfTensor2Tensor()
    moe.set_default_moe_hparams(hparams)
    assert hparams.moe_gating == "top_2" and hparams.moe_capacity_factor_second_level == 1.0
    assert hparams.moe_num_experts == 16 and hparams.moe_loss_coef == 0.01
    assert len(hparams.added) == 11  # Tensor2Tensor's basic ones have these two, so they are set
    assert not hparams.added & {"moe_num_experts", "moe_loss_coef"}
    hparams.moe_num_experts, hparams.moe_hidden_size = 4, 8

    def build(mesh):
        x = given(mesh, TOKENS + ",d_model:8")
        arguments = [x, x.shape.dims[-1], hparams, True, FLOAT]
        y, loss = moe.transformer_moe_layer_v1(*arguments)
        hparams.moe_num_experts = [2, 2]
        with tf.variable_scope("levels"):
            z, _ = moe.transformer_moe_layer_v2(*arguments)
        hparams.moe_num_experts, hparams.moe_gating = 4, "switch"
        with tf.variable_scope("switch"):
            s, _ = moe.transformer_moe_layer_v1(*arguments)
        return {"y": y, "z": z, "s": s, "loss": loss}

    found = run(build)
    assert all(value.any() for value in found.values())


ERRORS = {
    "gating": ({"moe_gating": "best"}, {}, r"unknown hparams.moe_gating=best: it is none of top_2, top_n"),
    "policy": ({"moe_gating": "switch", "switch_policy_eval": "beam"}, {}, r"Unknown Switch gating policy 'beam': it is none of argmax, sample"),
    "second policy": ({"second_policy_eval": "some"}, {}, r"Unknown policy 'some' for second experts: it is none of all, none, random, threshold"),
    "embeddings": ({"word_embed_mode": "add"}, {}, r"word_embed_mode='add' needs token_embeddings"),
    "embed mode": ({"word_embed_mode": "mul"}, {}, r"Unimplemented moe word embed mode: 'mul' is none of add, add_stop_grad, concat"),
    "top_n": ({"moe_gating": "top_n", "top_n_num_experts_per_token": 0}, {}, r"top_n_num_experts_per_token=0 must be at least 1"),
    "ntlb": ({"moe_gating": "ntlb", "ntlb_top_k": 0}, {}, r"ntlb_top_k=0 must be at least 1"),
    "batch": ({}, {"shape": "d_model:8"}, r"needs a dimension of the batch"),
    "shared": ({"shared_hidden_size": 8, "use_experts_attention": True}, {}, r"shared_hidden_size=8 is for feed-forward experts"),
}  # fmt: skip


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name):
    options, call, text = ERRORS[name]
    with tf.Graph().as_default(), pytest.raises(ValueError, match=text):
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        x = mtf.zeros(mesh, mtf.convert_to_shape(call.get("shape", TOKENS + ",d_model:8")))
        moe.MoE1D(**SMALL, **options).call(context_for(mesh, mode="eval"), x)


def test_errors_of_two_levels_and_ensembles():
    with tf.Graph().as_default():
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        x = mtf.zeros(mesh, mtf.convert_to_shape(TOKENS + ",d_model:8"))
        arguments = [x, x.shape.dims[-1]]
        with pytest.raises(
            ValueError, match=r"moe_num_experts=4 must be two numbers, .* transformer_moe_layer_v1"
        ):
            moe.transformer_moe_layer_v2(*arguments, moe.MoE1D(**SMALL)._hparams, True, FLOAT)
        hparams = moe.HParams(**vars(moe.MoE2D()._hparams))
        hparams.add_hparam("moe_gating", "ntlb")
        with pytest.raises(ValueError, match="moe_gating=ntlb: in two levels it must be top_2"):
            moe.transformer_moe_layer_v2(*arguments, hparams, True, FLOAT)
        with pytest.raises(ValueError, match=r"have no moe_group_size; set it, for example"):
            moe.transformer_moe_layer_v1(*arguments, moe.HParams(moe_hidden_size=4), True, FLOAT)
        with pytest.raises(ValueError, match=r"output_dim .* differs from the channels"):
            layer = heterogeneous_moe.HeterogeneousMoE1D(
                **SMALL, moe_num_layers=2, output_dim=mtf.Dimension("out", 4)
            )
            layer.call(context_for(mesh), x)
        context = context_for(mesh)
        context.model.ensemble_dim = mtf.Dimension("ensemble", 2)
        for layer in (moe.MoE1D(), moe.MoE2D(), heterogeneous_moe.HeterogeneousMoE1D()):
            with pytest.raises(
                NotImplementedError,
                match=rf"{type(layer).__name__}: MoE not yet implemented with ensembles",
            ):
                layer.call(context, x)
