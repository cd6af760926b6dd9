"""Gatings of mixtures of experts against routing in plain NumPy; policies that draw; losses."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from helpers.layer_runs import dims
from helpers.transformer import routing

import mesh_tensorflow as mtf
from mesh_tensorflow.transformer import moe

GROUPS, GROUP, EXPERTS = 3, 12, 4
FLOAT = mtf.VariableDType(tf.float32)
LOGITS = 2.0 * np.random.RandomState(0).normal(size=[GROUPS, GROUP, EXPERTS]).astype("float32")
RANKS = (
    np.random.RandomState(1).choice([0.0, 0.5, 1.0, 1.0], size=[GROUPS, GROUP]).astype("float32")
)
DETERMINED = {
    "second_policy_train": "all", "second_policy_eval": "all",
    "switch_policy_train": "argmax", "switch_policy_eval": "argmax",
}  # fmt: skip


def gated(
    gating, logits=LOGITS, capacity=GROUP, importance=None, train=False, dtype=tf.float32,
    num_microbatches=1, gradient=False, kernel=None, **options,
):  # fmt: skip
    """Returns {dispatch, combine, loss} of a gating whose router is the identity or given."""
    groups, group, experts = logits.shape
    with tf.Graph().as_default():
        tf.set_random_seed(4)
        graph = mtf.Graph()
        mesh = mtf.Mesh(graph, "mesh")
        shape = mtf.Shape(dims(f"batch:{groups},group:{group},d_model:{experts}"))
        x = mtf.cast(mtf.import_tf_tensor(mesh, tf.constant(logits), shape), dtype)
        ranks = None
        if importance is not None:
            ranks = mtf.import_tf_tensor(mesh, tf.constant(importance), mtf.Shape(shape.dims[:2]))
        experts_dim, capacity_dim = dims(f"experts:{experts},expert_capacity:{capacity}")
        with tf.variable_scope(f"{gating}_gating"):
            mtf.get_variable(
                mesh, "kernel", mtf.Shape([shape.dims[-1], experts_dim]),
                initializer=tf.constant_initializer(np.eye(experts) if kernel is None else kernel),
            )  # fmt: skip
        arguments = [x, [], experts_dim, capacity_dim]
        if gating == "expert_selection":
            arguments.insert(3, shape.dims[1])
        hparams = moe.MoE1D(num_experts=experts, **{**DETERMINED, **options})._hparams
        dispatch, combine, loss = getattr(moe, f"_{gating}_gating")(
            *arguments, hparams, train, FLOAT, importance=ranks, num_microbatches=num_microbatches
        )
        outputs = {"dispatch": dispatch, "combine": combine, "loss": loss}
        if gradient:
            outputs["gradient"] = mtf.gradients([loss], [x])[0]
        lowering = mtf.Lowering(
            graph, {mesh: mtf.placement_mesh_impl.PlacementMeshImpl("", "", [""])}
        )
        exports = {
            k: tf.cast(lowering.export_to_tf_tensor(t), tf.float32) for k, t in outputs.items()
        }
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            session.run(lowering.copy_masters_to_slices())
            return session.run(exports)


def above(threshold):
    return lambda gate: gate > threshold


REFERENCES = {
    "top_2": lambda g, r, c: routing.top_2(routing.softmax(g), r, c, above(0)),
    "top_n": lambda g, r, c: routing.top_n(routing.softmax(g), r, c, 3, above(0)),
    "switch": lambda g, r, c: routing.no_token_left_behind(routing.softmax(g), r, c, 1),
    "ntlb": lambda g, r, c: routing.no_token_left_behind(routing.softmax(g), r, c, 4),
    "switch_max": lambda g, r, c: routing.keep_best(routing.softmax(g), r, c),
    "expert_selection": routing.expert_choice,
}  # fmt: skip


def expected_combine(reference, importance, capacity, logits=LOGITS):
    importance = np.ones(logits.shape[:2]) if importance is None else importance
    return np.stack([reference(g, r, capacity) for g, r in zip(logits, importance)])


def check(found, expected):
    np.testing.assert_allclose(found["combine"], expected, atol=1e-6)
    np.testing.assert_array_equal(found["dispatch"], (expected > 0).astype("float32"))


@pytest.mark.slow_but(3)
@pytest.mark.slow("ntlb*")
@pytest.mark.parametrize("gating", REFERENCES)
def test_routing(gating):
    """With room for all, with overflow, with padding, and with more places than tokens."""
    for capacity, importance in [(2, None), (4, RANKS), (GROUP, RANKS), (GROUP + 2, None)]:
        expected = expected_combine(REFERENCES[gating], importance, capacity)
        check(gated(gating, capacity=capacity, importance=importance), expected)
    assert (expected_combine(REFERENCES[gating], None, 2) > 0).sum() < GROUPS * GROUP


# The switch policies that change a gating: in training, and otherwise.
POLICIES = ("argmax", "sample", "input_dropout", "input_jitter")
EFFECTIVE = {
    "top_2": ((), ()),
    "top_n": ((), ()),
    "switch": (("sample", "input_dropout", "input_jitter"), ("sample",)),
    "switch_max": (("sample", "input_dropout", "input_jitter"), ("sample",)),
    "ntlb": (("input_jitter",), ()),
    "expert_selection": (("input_dropout", "input_jitter"), ()),
}


@pytest.mark.slow
@pytest.mark.parametrize("gating", EFFECTIVE)
def test_switch_policies_by_gating(gating):
    """As in the classic release, some policies do nothing with some gatings."""
    for train, effective in zip((True, False), EFFECTIVE[gating]):
        found = {}
        for policy in POLICIES:
            options = {"switch_policy_train": policy, "switch_policy_eval": policy}
            noise = {"switch_jitter": 0.9, "switch_dropout": 0.5, "switch_temperature": 5.0}
            found[policy] = gated(gating, capacity=4, train=train, **options, **noise)["combine"]
        changed = [p for p in POLICIES if not np.allclose(found[p], found["argmax"], atol=1e-5)]
        assert changed == list(effective), train


@pytest.mark.slow
@pytest.mark.parametrize("gating", REFERENCES)
def test_balance_without_padding(gating):
    """Padding leaves the load-balancing loss as it is, and a group of padding has no part in it.

    With `balance_padding`, as in the classic release, the loss is smaller the more there is.
    """
    tokens = np.ones([GROUPS, GROUP], "float32")
    tokens[:, 8:] = 0.0
    options = {"use_second_place_loss": True, "capacity": GROUP}
    alone = gated(gating, LOGITS[:, :8], **options)["loss"]
    for padded, importance in (
        (LOGITS, tokens),
        (np.concatenate([LOGITS, LOGITS]), np.concatenate([tokens, 0 * tokens])),
    ):
        found = gated(gating, padded, importance=importance, balance_padding=False, **options)
        np.testing.assert_allclose(found["loss"], alone, rtol=1e-5)
        assert np.isfinite(found["loss"])
        classic = gated(gating, padded, importance=importance, **options)["loss"]
        assert classic < 0.99 * alone or gating == "expert_selection"
    without = gated(gating, balance_padding=False, **options)["loss"]
    np.testing.assert_allclose(without, gated(gating, **options)["loss"], rtol=1e-6)
    nothing = gated(gating, importance=0 * tokens, balance_padding=False, **options)["loss"]
    assert nothing == 0.0


def test_balance_of_groups_is_weighted_by_tokens():
    tokens = np.ones([GROUPS, GROUP], "float32")
    tokens[0, 2:] = 0.0
    each = [
        gated("switch", LOGITS[i : i + 1], importance=tokens[i : i + 1], balance_padding=False)
        for i in range(GROUPS)
    ]
    found = gated("switch", importance=tokens, balance_padding=False)["loss"]
    expected = np.average([e["loss"] for e in each], weights=tokens.sum(1))
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_thresholds_of_second_experts():
    for gating, reference in {
        "top_2": lambda g, r, c: routing.top_2(routing.softmax(g), r, c, above(0.3)),
        "top_n": lambda g, r, c: routing.top_n(routing.softmax(g), r, c, 3, above(0.3)),
    }.items():
        options = {"second_policy_eval": "threshold", "second_threshold_eval": 0.3}
        check(gated(gating, capacity=4, **options), expected_combine(reference, None, 4))
    none = gated("top_2", second_policy_eval="none")["combine"].sum(-1)
    assert ((none > 0).sum(-1) == 1).all()


@pytest.mark.parametrize("n", [1, 2, 9])
def test_numbers_of_experts_per_token(n):
    def reference(g, r, c):
        return routing.top_n(routing.softmax(g), r, c, min(n, EXPERTS), above(0))

    found = gated("top_n", capacity=5, top_n_num_experts_per_token=n)
    check(found, expected_combine(reference, None, 5))


def alike(*logits, tokens=800):
    return np.tile(np.array(logits, "float32"), (1, tokens, 1))


def shares(gating, logits, **options):
    """Returns (how often each expert is chosen, the highest gate with each)."""
    found = gated(gating, logits, capacity=logits.shape[1], **options)["combine"][0]
    axis = 1 if gating == "switch_max" else 2
    gates = found.sum(axis)
    gates = gates.T if gating == "switch_max" else gates
    return (gates > 0).mean(0), gates.max(0)


def test_random_second_experts():
    """A second expert is used with a probability of its gate over the threshold."""
    logits = alike(1.0, 0.3, -0.5, 0.1)
    gates = routing.softmax(logits[0, 0])
    second = gates[1] / (gates[0] + gates[1])
    often, _ = shares("top_2", logits, second_policy_eval="random", second_threshold_eval=0.6)
    np.testing.assert_allclose(often, [1.0, second / 0.6, 0, 0], atol=0.06)
    often, _ = shares("top_2", logits, train=True, second_policy_train="random")
    np.testing.assert_array_equal(often, [1.0, 1.0, 0, 0])


def test_sampled_experts():
    logits = alike(1.0, 0.3, -0.5, 0.1)
    gates = routing.softmax(logits[0, 0])
    for gating in ("switch", "switch_max"):
        often, values = shares(gating, logits, switch_policy_eval="sample", switch_temperature=2.0)
        np.testing.assert_allclose(often, routing.softmax(logits[0, 0] / 2), atol=0.06)
        np.testing.assert_allclose(values, gates, rtol=1e-5)


@pytest.mark.slow
def test_noise_of_the_routers_input_in_training_only():
    logits = alike(1.0, 0.9, -5.0, -5.0)
    for policy in ("input_jitter", "input_dropout"):
        options = {f"switch_policy_{mode}": policy for mode in ("train", "eval")}
        options.update(switch_jitter=0.5, switch_dropout=0.5)
        for gating in ("switch", "ntlb", "switch_max"):
            often, _ = shares(gating, logits, train=True, **options)
            # Dropout is no policy of "ntlb", which takes other experts by their load.
            has_noise = (policy, gating) != ("input_dropout", "ntlb")
            assert (0.2 < often[1] < 0.8) == has_noise, (policy, gating)
            often, _ = shares(gating, logits, **options)
            np.testing.assert_array_equal(often, [1.0, 0, 0, 0])


@pytest.mark.slow
def test_second_place_experts():
    """Sometimes the best expert is passed over, for the second or for one that is drawn."""
    logits = alike(1.0, 0.3, -0.5, 0.1)
    gates = routing.softmax(logits[0, 0])
    rest = gates[1:] / (1 - gates[0])
    for gating in ("switch", "ntlb", "switch_max"):
        options = {"train": True, "use_second_place_expert_prob": 0.5}
        often, values = shares(gating, logits, **options)
        np.testing.assert_allclose(often, [0.5, 0.5, 0, 0], atol=0.06)
        np.testing.assert_allclose(values, [gates[0], rest[0], 0, 0], rtol=1e-5)
        often, values = shares(gating, logits, use_second_place_expert_prob_temp=1.0, **options)
        np.testing.assert_allclose(often, [0.5, *(0.5 * rest)], atol=0.06)
        np.testing.assert_allclose(values, [gates[0], 1, 1, 1], rtol=1e-5)
    often, _ = shares("switch", logits, use_second_place_expert_prob=1.0)
    np.testing.assert_array_equal(often, [1.0, 0, 0, 0])


@pytest.mark.slow
def test_balance_loss():
    """The loss is 1 if experts are used evenly, and the number of experts if one is."""
    even = np.tile(20.0 * np.eye(EXPERTS, dtype="float32"), (1, 3, 1))
    one = np.zeros_like(even)
    one[..., 2] = 20.0
    for gating in ("top_2", "top_n", "switch", "switch_max"):
        assert abs(gated(gating, even)["loss"] - 1.0) < 1e-5
        assert abs(gated(gating, one)["loss"] - EXPERTS) < 1e-4
    assert abs(gated("ntlb", one, ntlb_top_k=1)["loss"] - EXPERTS) < 1e-4
    assert abs(gated("expert_selection", np.zeros_like(even))["loss"] - 1.0) < 1e-5
    of_one_token = np.zeros_like(even)
    of_one_token[:, 5] = 20.0
    assert abs(gated("expert_selection", of_one_token)["loss"] - 12.0) < 1e-3


def test_losses_of_padding_microbatches_and_z():
    padding = (RANKS > 0.6).astype("float32")
    gates, chosen = routing.softmax(LOGITS), np.eye(EXPERTS)[LOGITS.argmax(-1)]
    switch = (gates.mean(1) * chosen.mean(1)).sum(-1) * padding.mean(1) * EXPERTS
    top_2 = (gates * padding[..., None]).mean(1) * (chosen * padding[..., None]).mean(1)
    log_z = np.log(np.exp(LOGITS).sum(-1))
    z = (log_z**2 * padding).sum() / padding.sum()
    for gating, balance in {
        "switch": switch.mean(),
        "top_2": top_2.sum(-1).mean() * EXPERTS,
    }.items():
        found = gated(gating, importance=padding, train=True, num_microbatches=3, z_loss=0.2)
        np.testing.assert_allclose(found["loss"], (balance + 0.2 * z) / 3, rtol=1e-5)
        np.testing.assert_allclose(
            gated(gating, importance=padding, z_loss=0.2)["loss"], balance, rtol=1e-5
        )
    empty = gated("switch", importance=np.zeros_like(padding), train=True, z_loss=0.2)
    assert empty["loss"] == 0 and not empty["combine"].any()


def test_gradient_of_the_loss():
    """Finite differences of the mean gates, the choices being constant."""
    found = gated("switch", gradient=True)["gradient"]
    density = np.eye(EXPERTS)[LOGITS.argmax(-1)].mean(1, keepdims=True)
    gates = routing.softmax(LOGITS.astype("float64"))
    slope = gates * (density - (gates * density).sum(-1, keepdims=True))
    np.testing.assert_allclose(found, slope * EXPERTS / (GROUPS * GROUP), atol=1e-7)


def test_routing_is_in_float32():
    """Logits that bfloat16 cannot tell apart: 1 and 1 + 1/512."""
    inputs = np.zeros([1, 2, EXPERTS], "float32")
    inputs[..., :2] = 1.0, 1 / 512
    kernel = np.eye(EXPERTS)
    kernel[0, 1] = 1.0
    found = gated("switch", inputs, dtype=tf.bfloat16, kernel=kernel)
    assert (found["combine"].sum(-1)[0] > 0).tolist() == [[False, True, False, False]] * 2
    gate = routing.softmax(inputs @ kernel)[0, 0, 1]
    np.testing.assert_allclose(found["combine"].max(), gate, rtol=4e-3)
