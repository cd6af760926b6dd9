"""Stacks that split residuals by length: the same results, by reduce-scatters and allgathers."""

import collections

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from helpers.transformer import models
from helpers.transformer.models import DEPTH, LENGTH, ROWS, assert_same, imported, run, some_ids

import mesh_tensorflow as mtf
from mesh_tensorflow.testing import harness
from mesh_tensorflow.testing.harness import WHOLE, Placing
from mesh_tensorflow.transformer import transformer, transformer_layers

LAYERS = [
    (transformer_layers.SelfAttention, {"num_heads": 4, "key_value_size": 4}),
    (transformer_layers.DenseReluDense, {"hidden_size": 16}),
]
TENSOR = "heads:all,d_ff:all,vocab:all"
MEGATRON = f"{TENSOR},residual_length:all"
PLACINGS = [
    Placing("all:2", MEGATRON),
    Placing("all:4", MEGATRON, simd=True),
    Placing("rows:2,all:2", f"batch:rows,{MEGATRON}"),
    Placing("rows:2,all:4", f"batch:rows,{MEGATRON}", simd=True),
    Placing("all:2", "residual_length:all"),
    Placing("all:2", "residual_length:all,length:all"),
]
IDS = np.where(np.arange(LENGTH) < LENGTH - 2, some_ids(low=1), 0).astype("int32")
DROPPING = {
    "sublayers_initial": None, "sublayers_per_layer": None, "sublayers_final": None,
    "dropout_rate": 0.3, "norm_epsilon": 1e-6,
}  # fmt: skip


def made(layers=LAYERS, ids=IDS, **kwargs):
    """Returns a function of a mesh: logits, loss and gradients of a model of two blocks."""
    stack = models.stack(layers, **kwargs)
    return models.language_model(ids, layer_stack=stack, max_length=None,
                                 positional_embedding=False)  # fmt: skip


@pytest.mark.slow_but(1)
@pytest.mark.slow("placing[13]*")
@pytest.mark.parametrize("placing", PLACINGS)
def test_values_and_gradients(placing):
    assert_same(run(made(sequence_parallel=True), placing), run(made(), WHOLE))


@pytest.mark.slow
@pytest.mark.parametrize("kwargs", [
    {"recompute_grads": True},
    {"cls": transformer.ReversibleLayerStack},
    DROPPING,
], ids=["recomputed", "reversible", "dropout"])  # fmt: skip
def test_kinds_of_stacks(kwargs):
    actual = run(made(sequence_parallel=True, **kwargs), PLACINGS[2])
    assert_same(actual, run(made(**kwargs), WHOLE))


@pytest.mark.slow
def test_recomputed_streams():
    """Streams recomputed from outputs are rounded by layout, so both have the same one."""
    kwargs = {"cls": transformer.ReversibleLayerStack, "recompute_grads": True}
    actual = run(made(sequence_parallel=True, **kwargs), PLACINGS[2])
    assert_same(actual, run(made(**kwargs), Placing("rows:2,all:2", f"batch:rows,{TENSOR}")))


def sent(layout, sequence_parallel):
    """Returns what the loss and its gradients communicate: bytes by kind of collective."""
    with tf.Graph().as_default():
        graph = mtf.Graph()
        mesh = mtf.Mesh(graph, "mesh")
        found = made(sequence_parallel=sequence_parallel)(mesh)
        impl = mtf.placement_mesh_impl.PlacementMeshImpl("all:4", layout, [""] * 4)
        lowering = mtf.Lowering(graph, {mesh: impl})
        for value in found.values():
            lowering.export_to_tf_tensor(value)
        counted, predicted = harness.counted_and_predicted(lowering, list(found.values()))
        assert counted == predicted
        total = collections.Counter()
        for _, _, c in lowering.collectives:
            total[c.kind] += c.bytes
        return total


@pytest.mark.slow
def test_what_is_communicated():
    """Of each activation, a reduce-scatter and an allgather in place of an allreduce."""
    plain = sent(TENSOR, False)
    split = sent(MEGATRON, True)
    activation = 4 * 4 * ROWS * LENGTH * DEPTH  # bytes of one on four processors, each of them all
    moved = 2 * (2 * len(LAYERS) + 1) * activation  # embedding and layers, forward and backward
    loss = plain["allreduce"] - moved
    assert loss < activation
    norms = 4 * 4 * DEPTH * (2 * len(LAYERS) + 1)  # gradients of their scales
    expected = {"reduce_scatter": moved, "allconcat": moved, "allreduce": loss + norms}
    assert split == expected


def test_a_stream_without_a_rule_costs_nothing():
    assert sent(TENSOR, True) == sent(TENSOR, False)


def test_only_layers_see_all_positions():
    """Norms, residuals and dropout are of the split length: their parts are a fourth."""
    with tf.Graph().as_default():
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        ids = imported(mesh, IDS)
        stack = models.stack(LAYERS, sequence_parallel=True, **DROPPING)
        model = models.unitransformer(stack, max_length=None, positional_embedding=False)
        outputs: list = []
        model.call_simple(ids, ids, True, layer_outputs=outputs)
        kinds = {True: set(), False: set()}
        for op in mesh.graph.operations:
            names = {n for y in op.outputs for n in y.shape.dimension_names}
            if "d_model" in names and names & {"length", "residual_length"}:
                kinds["length" in names].add(type(op).__name__)
        # Gathered for layers, and partial sums that they return.
        assert kinds[True] <= {"ReshapeOperation", "EinsumOperation", "GatherOperation"}
        assert {"AddOperation", "ReshapeOperation", "SlicewiseOperation"} <= kinds[False]
        *streams, last = [x.shape.dims[1] for x in outputs]
        assert {d.name for d in streams} == {"residual_length"} and last.name == "length"
        impl = mtf.placement_mesh_impl.PlacementMeshImpl("all:4", MEGATRON, [""] * 4)
        assert impl.slice_shape(outputs[0].shape) == [ROWS, LENGTH // 4, DEPTH]


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["plain", "transparent"])
def test_encoders_and_decoders(attention):
    """Of an encoder, its output has the memory's length, and transparent attention its layers."""
    of_encoder = {
        "plain": (transformer_layers.EncDecAttention, {"num_heads": 4, "key_value_size": 4}),
        "transparent": (transformer_layers.TransparentEncDecAttention, {
            "num_heads": 4, "key_value_size": 4, "layers_per_encoder_module": 2,
            "layers_per_decoder_module": 2, "encoder_num_modules": 1, "decoder_num_modules": 1,
        }),
    }[attention]  # fmt: skip

    def build(split):
        def build(mesh):
            def part(layers, **kwargs):
                stack = models.stack(layers, 1, sequence_parallel=split)
                return models.unitransformer(
                    stack, max_length=None, positional_embedding=False, **kwargs
                )

            encoder = part(LAYERS, name="encoder", autoregressive=False, output_vocab_size=None)
            model = transformer.Bitransformer(
                encoder, part([of_encoder, LAYERS[1]], name="decoder")
            )
            inputs, targets = imported(mesh, IDS), imported(mesh, IDS[::-1].copy())
            logits, loss = model.call_simple(inputs, targets, True)
            return {"logits": logits, **models.trained(loss)}

        return build

    assert_same(run(build(True), PLACINGS[2]), run(build(False), WHOLE))


@pytest.mark.slow
def test_decoding():
    """Steps have no length, so that a model trained in parts decodes as any other."""

    def build(split):
        stack = models.stack(LAYERS, sequence_parallel=split)
        model = models.unitransformer(stack, max_length=None, positional_embedding=False)
        return lambda mesh: [
            model.sample_autoregressive(imported(mesh, IDS), stop_at_token=-1, temperature=0.0)
        ]

    [found] = run(build(True), PLACINGS[0]).values()
    [expected] = run(build(False), WHOLE).values()
    np.testing.assert_array_equal(found, expected)
