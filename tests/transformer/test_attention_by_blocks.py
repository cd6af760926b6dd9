"""Layers whose attention works by blocks: the same values and gradients, and masks by block."""

from unittest import mock

import numpy as np
import pytest
from helpers.transformer import attention_layers as base
from helpers.transformer.attention_layers import LENGTH, MEMORY, ROWS, SMALL, normal, run, tensor

import mesh_tensorflow as mtf
from mesh_tensorflow.testing.harness import WHOLE, Placing, assert_close
from mesh_tensorflow.transformer import transformer_layers as T
from mesh_tensorflow.transformer.attention import _dot_product

IDS = np.repeat([[1, 1, 1, 2, 2, 2, 0, 0], [1, 1, 2, 2, 3, 3, 3, 3]], ROWS // 2, 0)
ENCODER_IDS = np.repeat([[1, 1, 2, 2, 0, 0], [1, 2, 2, 3, 3, 3]], ROWS // 2, 0)
LAYERS = {
    "plain": T.SelfAttention,
    "bias": lambda **kw: T.SelfAttention(**kw, relative_attention_type="bias"),
    "bias_of_packed": lambda **kw: T.SelfAttention(**kw, relative_attention_type="bias"),
    "contextual": lambda **kw: T.SelfAttention(**kw, relative_attention_type="contextual"),
    "multi_query": lambda **kw: T.SelfAttention(**{**kw, "num_memory_heads": 1}),
    "shared_kv": lambda **kw: T.SelfAttention(**kw, shared_kv=True),
    "rotary": lambda **kw: T.SelfAttention(**kw, rotary=mtf.layers.RotaryEmbedding()),
    "alibi": lambda **kw: T.SelfAttention(**kw, relative_attention_type="alibi"),
    "soft_cap": lambda **kw: T.SelfAttention(**kw, attention_kwargs={"soft_cap": 0.5}),
    "encoder": T.EncDecAttention,
}
# What has no bias besides the mask, or one of distances.
MASKED = {
    "plain",
    "rotary",
    "multi_query",
    "shared_kv",
    "encoder",
    "bias",
    "bias_of_packed",
    "alibi",
    "soft_cap",
}
POSITIONS = np.repeat([[0, 1, 2, 0, 1, 2, 3, 4], [0, 1, 0, 1, 0, 1, 2, 3]], ROWS // 2, 0)
SPLIT = Placing("x:2,y:2", "batch:x,heads:y")
# Of the largest element: sums are in another order, which makes up to 2e-5 on some CPUs.
TOLERANCE = 5e-5


def both(name, mesh):
    """Returns outputs and gradients with all logits, then by blocks; checks what blocks read."""
    found = []
    for least in (10**6, 1):
        context = base.context(mesh, sequence_id=tensor(mesh, IDS, f"batch:{ROWS},length:{LENGTH}"))
        if name == "encoder":
            memory = f"batch:{ROWS},memory_length:{MEMORY}"
            context.encoder_output = tensor(mesh, normal(ROWS, MEMORY, base.DEPTH, seed=1),
                                            f"{memory},d_model:{base.DEPTH}")  # fmt: skip
            context.encoder_sequence_id = tensor(mesh, ENCODER_IDS, memory)
        if name == "bias_of_packed":
            context.position = tensor(mesh, POSITIONS, f"batch:{ROWS},length:{LENGTH}")
        x = base.layer_input(mesh)
        with mock.patch.object(_dot_product, "LEAST_LENGTH", least):
            y = base.called(LAYERS[name](**SMALL), context, x)
        weights = mesh.graph.trainable_variables
        found += [y, *mtf.gradients([mtf.square(y)], [x, *(w.outputs[0] for w in weights)])]
    kind = "BlockedAttentionOperation"
    [op] = [op for op in mesh.graph.operations if type(op).__name__ == kind]
    pairs = {"length", "memory_length"}
    reads_pairs = any(pairs <= set(t.shape.dimension_names) for t in op.inputs)
    assert reads_pairs == (name not in MASKED)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, placing",
    [
        *((name, WHOLE) for name in LAYERS),
        ("plain", SPLIT),
        ("bias", SPLIT),
        ("bias", Placing("x:2,y:2", "length:x,heads:y")),
        ("bias_of_packed", SPLIT),
        ("bias", Placing("x:2", "length:x", simd=True)),
    ],
)
def test_layers(name, placing):
    results = list(run(lambda mesh: both(name, mesh), placing).values())
    half = len(results) // 2
    assert half > 2
    for i in range(half):
        assert_close(results[half + i], results[i], TOLERANCE, str(i))


def test_masks_of_layers_are_not_computed():
    """Of causal attention to the same segment, TensorFlow computes no mask of all positions."""

    def build(mesh):
        q, k = (mtf.zeros(mesh, f"{n}:{LENGTH},d_kv:4") for n in ("length", "memory_length"))
        ids = tensor(mesh, IDS[0], f"length:{LENGTH}")
        y = 0
        for bias in (
            mtf.layers.attention_mask_autoregressive(ids),
            mtf.layers.attention_mask_same_segment(ids),
        ):
            y += mtf.transformer.attention.attention(
                q, k, k, *k.shape.dims, k.shape.dims[1], bias, blocked=True
            )
        [*_, last] = [op for op in mesh.graph.operations if "blocked_attention" in op.name]
        assert [len(x.shape) for x in last.inputs] == [2, 2, 2, 1, 1]
        return [y]

    run(build)
