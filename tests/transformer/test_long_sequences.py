"""Encoders and decoders whose lengths are both split: rings, and all-to-alls of heads."""

import re

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from helpers.mesh.launching import run_script
from helpers.transformer import attention_layers as base
from helpers.transformer import long_sequences as long
from helpers.transformer.attention_layers import DEPTH, LENGTH, ROWS, run, tensor

import mesh_tensorflow as mtf
from mesh_tensorflow.placement_mesh_impl import PlacementMeshImpl
from mesh_tensorflow.testing.harness import WHOLE, Placing, assert_close
from mesh_tensorflow.transformer import transformer_layers as T

MEMORY = 16
# Each query sees something: the others have the mean of everything, padding too.
IDS = np.repeat([[1, 1, 1, 2, 2, 2, 0, 0], [1, 1, 2, 2, 3, 3, 3, 3]], ROWS // 2, 0)
MEMORY_IDS = np.repeat([[1] * 5 + [2] * 7 + [0] * 4, [1, 2] + [3] * 14], ROWS // 2, 0)
SIZES = {"num_heads": 4, "key_value_size": 4}
LAYERS = {
    "plain": {},
    "multi_query": {"num_memory_heads": 1},
    "shared": {"shared_kv": True, "z_loss_coeff": 1.0},
    "dropout": {"dropout_rate": 0.5},
}
FUNCTIONS = [long.RING, long.ALL_TO_ALL]


def placing_of(mesh, function, **kwargs):
    """Returns a Placing; the batch is split over rows."""
    rows = "batch:rows," if "rows" in mesh else ""
    return Placing(mesh, rows + long.LAYOUTS[function], **kwargs)


def context(mesh, mode="train", padded=True, **kwargs):
    """Returns a Context with an encoder's output."""
    ids = tensor(mesh, IDS, f"batch:{ROWS},length:{LENGTH}") if padded else 1
    return base.context(
        mesh, mode, sequence_id=ids,
        encoder_output=tensor(
            mesh, base.normal(ROWS, MEMORY, DEPTH, seed=1),
            f"batch:{ROWS},memory_length:{MEMORY},d_model:{DEPTH}",
        ),
        encoder_sequence_id=tensor(mesh, MEMORY_IDS, f"batch:{ROWS},memory_length:{MEMORY}"),
        **kwargs,
    )  # fmt: skip


def built(name, function, padded=True):
    """Returns a function of a mesh: the layer's output, losses and gradients."""

    def build(mesh):
        made = context(mesh, padded=padded)
        x = base.layer_input(mesh)
        layer = T.EncDecAttention(**SIZES, **LAYERS[name], **long.FUNCTIONS[function])
        y = base.called(layer, made, x)
        loss = mtf.add_n([mtf.reduce_sum(mtf.square(y)), *made.losses])
        weights = [w.outputs[0] for w in mesh.graph.trainable_variables]
        return [y, loss, *mtf.gradients([loss], [x, made.encoder_output, *weights])]

    return build


def assert_same(found, expected):
    assert len(found) == len(expected) > 4
    for i, (a, b) in enumerate(zip(found.values(), expected.values())):
        assert_close(a, b, 1e-5, str(i))


CASES = [
    *(("all:2", name, function, {}) for name in LAYERS for function in FUNCTIONS),
    *((mesh, "plain", function, {}) for mesh in ("all:4", "rows:2,all:2") for function in FUNCTIONS),
    *(("all:2", "plain", function, {"simd": True}) for function in FUNCTIONS),
    *(("rows:2,all:4", "plain", function, {"simd": True}) for function in FUNCTIONS),
]  # fmt: skip


@pytest.mark.slow_but(1)
@pytest.mark.parametrize("mesh, name, function, kind", CASES)
def test_attention_to_an_encoder(mesh, name, function, kind):
    found = run(built(name, function), placing_of(mesh, function, **kind))
    # With dropout, the same program on one processor: the mask is of the same numbers.
    alone = function if name == "dropout" else None
    assert_same(found, run(built(name, alone), WHOLE))


@pytest.mark.slow
@pytest.mark.parametrize("function", FUNCTIONS)
def test_without_ids_of_queries(function):
    """Which a decoder has if its examples are not packed: only padding of the memory is hidden."""
    found = run(built("plain", function, False), placing_of("all:2", function))
    assert_same(found, run(built("plain", None, False), WHOLE))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_decodes(function):
    """Steps attend to states that the first part has recorded, all of them split."""

    def build(mesh):
        output = context(mesh).encoder_output

        def prepare(made):
            made.encoder_output = output
            made.layer_index = 0

        layer = T.EncDecAttention(**SIZES, **long.FUNCTIONS[function])
        return base.decoded(mesh, layer, base.normal(ROWS, LENGTH, DEPTH), prepare)

    for placing in (WHOLE, placing_of("all:2", function)):
        found = list(run(build, placing, scale=0.4).values())
        for step, values in enumerate(found[1 : 1 + base.STEPS]):
            expected = found[0][np.arange(ROWS), np.array(base.BEGINS) + step]
            assert_close(values, expected, 1e-5)


def losses_of(impl, function):
    with tf.Graph().as_default():
        tf.set_random_seed(3)
        step = long.step_of(impl, function)
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            return [session.run(step)["loss"] for _ in range(long.STEPS)]


@pytest.mark.slow
def test_no_tensor_has_both_lengths():
    """Nor a loop or a branch of it, of a model that trains in a ring."""
    cpus = [f"/cpu:{i}" for i in range(4)]
    with tf.Graph().as_default() as graph:
        long.step_of(PlacementMeshImpl("all:4", long.LAYOUTS[long.RING], cpus), long.RING)
    definition = graph.as_graph_def(add_shapes=True)
    nodes = [*definition.node, *(n for f in definition.library.function for n in f.node_def)]
    found = [s for n in nodes for s in n.attr["_output_shapes"].list.shape]
    shapes = {tuple(d.size for d in s.dim)[-2:] for s in found}
    # Logits are those of a processor's parts.
    assert (long.LENGTH // 4, long.MEMORY // 4) in shapes
    assert not shapes & {(long.LENGTH, long.MEMORY), (long.MEMORY, long.MEMORY)}


@pytest.mark.every
@pytest.mark.parametrize("count, function", [
    (2, long.RING),
    *(pytest.param(*case, marks=pytest.mark.slow)
      for case in [(2, long.ALL_TO_ALL), (4, long.RING), (4, long.ALL_TO_ALL)]),
])  # fmt: skip
def test_trains_in_processes(count, function, tmp_path):
    """With dropout; each process checks that it communicates what is predicted."""
    path = tmp_path / "losses.npy"
    done = run_script(tmp_path, count, function, path, script="long_sequences_worker.py")
    assert done.returncode == 0, done.stderr
    expected = losses_of(PlacementMeshImpl("", "", [""]), function)
    assert expected[-1] < expected[0]
    np.testing.assert_allclose(np.load(path), expected, rtol=1e-5)


@pytest.mark.parametrize("layer, layout, options, message", [
    (T.EncDecAttention, "length:all,memory_length:all", {"attention_func": "all_to_all"},
     "splits over all, for heads, which it does not split; add the rule attention_heads:all"),
    (T.EncDecAttention, "length:all,attention_heads:all",
     {"attention_func": "all_to_all", "num_heads": 3}, "splits attention_heads=3 over all=2"),
    (T.EncDecAttention, "",
     {"attention_func": "all_to_all", "relative_attention_type": "bias"},
     "relative_attention_type='bias' makes a bias of length times memory_length, which "
     "attention_func='all_to_all' does not exchange. Set relative_attention_type=None"),
    (T.EncDecAttention, "",
     {"attention_kwargs": {"ring": True}, "relative_attention_type": "bias_shared"},
     "and ring=True is for lengths that are too long for it. Use relative_attention_type=None, or"),
    (T.SelfAttention, "length:all,memory_length:all,attention_heads:all",
     {"attention_func": "all_to_all", "mode": "first_part"},
     "exchanges nothing in decoding, whose logits are length times memory_length, and the layout "
     "splits both over all. Decode with a layout without memory_length:all, such as heads:all"),
])  # fmt: skip
def test_mistakes(layer, layout, options, message):
    mode = options.pop("mode", "train")
    with tf.Graph().as_default(), pytest.raises(ValueError, match=re.escape(message)):
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        made = context(mesh, mode, placing=Placing("all:2", layout))
        base.called(layer(**{**SIZES, **options}), made, base.layer_input(mesh))
