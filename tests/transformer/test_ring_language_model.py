"""A language model whose self-attention passes keys and values around a ring."""

import functools
import re

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.transformer import transformer, transformer_layers

BATCH, LENGTH = 4, 16


def model(ring, **attention):
    """Returns a language model of one block."""
    heads = {"num_heads": 2, "key_value_size": 4, "attention_kwargs": {"ring": ring}}
    stack = transformer.make_layer_stack(
        layers=[
            [transformer_layers.SelfAttention, {**heads, **attention}],
            [transformer_layers.DenseReluDense, {"hidden_size": 16}],
        ],
        num_layers=1,
        layer_stack_cls=functools.partial(
            transformer.LayerStack,
            sublayers_initial=[],
            sublayers_per_layer=[transformer.sublayer_call_layer, transformer.sublayer_residual],
            sublayers_final=[transformer.sublayer_rms_norm],
        ),
    )
    return transformer.Unitransformer(
        stack,
        d_model=8,
        autoregressive=True,
        input_vocab_size=32,
        output_vocab_size=32,
        max_length=LENGTH,
    )


def outcome(ring, mesh_shape, layout, decodes=False, **attention):
    """Returns two losses of training, or decoded ids."""
    with tf.Graph().as_default(), tf.Session(config=config(mesh_shape)) as session:
        tf.set_random_seed(1)
        graph = mtf.Graph()
        mesh = mtf.Mesh(graph, "mesh")
        dims = [mtf.Dimension("batch", BATCH), mtf.Dimension("length", LENGTH)]
        ids = np.random.default_rng(0).integers(1, 32, [BATCH, LENGTH]).astype("i")
        targets = mtf.import_tf_tensor(mesh, tf.constant(ids), dims)
        made = model(ring, **attention)
        updates = []
        if decodes:
            target = made.sample_autoregressive(targets * 0, temperature=0.0)
        else:
            inputs = transformer.autoregressive_inputs(targets)
            target = made.call_simple(inputs, targets, compute_loss=True)[1]
            weights = graph.trainable_variables
            gradients = mtf.gradients([target], [v.outputs[0] for v in weights])
            updates = mtf.optimize.SgdOptimizer(0.5).apply_grads(gradients, weights)
        devices = [f"cpu:{i}" for i in range(mtf.convert_to_shape(mesh_shape).size)]
        impl = mtf.placement_mesh_impl.PlacementMeshImpl(mesh_shape, layout, devices)
        lowering = mtf.Lowering(graph, {mesh: impl})
        fetches = [lowering.export_to_tf_tensor(target)]
        fetches += [lowering.lowered_operation(op) for op in updates]
        session.run(tf.global_variables_initializer())
        session.run(lowering.copy_masters_to_slices())
        if decodes:
            return session.run(fetches)[0].tolist()
        return [float(session.run(fetches)[0]) for _ in range(2)]


def config(mesh_shape):
    """Returns a configuration with a CPU for each processor."""
    return tf.ConfigProto(device_count={"CPU": mtf.convert_to_shape(mesh_shape).size})


@pytest.mark.every("bias_shared*")
@pytest.mark.slow
@pytest.mark.parametrize("relative", [None, "bias_shared"])
def test_losses_equal_those_without_a_ring(relative):
    attention = {"relative_attention_type": relative}
    expected = outcome(False, "x:1", "", **attention)
    layout = "length:x,memory_length:x"
    for mesh_shape, rules in [("x:1", ""), ("x:4", layout), ("x:2,y:2", layout + ",heads:y")]:
        found = outcome(True, mesh_shape, rules, **attention)
        np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.slow
def test_decodes_alike():
    assert outcome(True, "x:1", "", decodes=True) == outcome(False, "x:1", "", decodes=True)


@pytest.mark.slow
def test_biases_that_depend_on_queries_are_an_error():
    with pytest.raises(
        ValueError,
        match=r"relative_attention_type='contextual' makes a bias of length times memory_length, and "
        r"ring=True is for lengths that are too long for it\. Use relative_attention_type='bias_s",
    ):
        outcome(True, "x:4", "length:x,memory_length:x", relative_attention_type="contextual")


@pytest.mark.slow
@pytest.mark.parametrize("ring, place, message", [
    (True, ("x:4", "length:x"), "ring=True passes parts of memory_length=16 around the processors "
     "that have parts of length=16, and nothing is passed where not one mesh dimension splits both; "
     "the layout splits length over x=4 and memory_length over no mesh dimension. Use the rules "
     "length:x;memory_length:x, or leave ring out"),
    ("contiguous", ("x:4", "memory_length:x"), "the layout splits length over no mesh dimension and "
     "memory_length over x=4. Use the rules length:x;memory_length:x"),
    ("zigzag", ("x:2,y:2", "length:x,memory_length:y"), "splits length over x=2 and memory_length "
     "over y=2. Use the rules length:x;memory_length:x"),
])  # fmt: skip
def test_layouts_that_make_no_ring(ring, place, message):
    """They compute the same, and say so."""
    with pytest.warns(mtf.MeshTensorFlowWarning, match=re.escape(message)):
        found = outcome(ring, *place)
    np.testing.assert_allclose(found, outcome(False, "x:1", ""), rtol=1e-5)
