"""Layers of experts in two levels, and of experts of several sizes."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from helpers.layer_runs import numbers
from helpers.transformer import decoding_models as models
from helpers.transformer.decoding_models import run
from helpers.transformer.expert_layers import (
    DETERMINED,
    FLOAT,
    TOKENS,
    context_for,
    given,
    trained,
    two_levels,
)

import mesh_tensorflow as mtf
from mesh_tensorflow.testing.harness import WHOLE, Placing, assert_close
from mesh_tensorflow.transformer import heterogeneous_moe, moe

# -- two levels


@pytest.mark.slow
def test_two_levels_under_layouts():
    def layer():
        return two_levels(hidden_size=8, group_size=8, loss_coef=0.1, capacity_factor_train=1.5)

    # Of the same number of groups in both levels as on one processor.
    both = "batch:x,outer_batch:y,expert_x:x,expert_y:y"
    expected = run(trained(layer))
    for placing in (
        Placing("x:2", "batch:x,expert_x:x"), Placing("x:2,y:2", "expert_y:x,expert_hidden:y"),
        Placing("x:2,y:2", both.replace("outer_batch:y,", ""), simd=True),
    ):  # fmt: skip
        for key, value in run(trained(layer, placing), placing).items():
            assert_close(value, expected[key], 2e-5, f"{placing} {key}")

    def with_outer_batch(placing):
        def build(mesh):
            x = given(mesh, "outer_batch:2,batch:2,length:8,d_model:8")
            y, loss = moe.transformer_moe_layer_v2(
                x, x.shape.dims[-1], two_levels(hidden_size=8, group_size=8)._hparams, True, FLOAT,
                placing.layout, placing.mesh,
            )  # fmt: skip
            return {"y": y, "loss": loss}

        return build

    placing = Placing("x:2,y:2", both)
    expected = run(with_outer_batch(WHOLE))
    for key, value in run(with_outer_batch(placing), placing).items():
        assert_close(value, expected[key], 2e-5, key)


def test_two_levels_of_one_expert_are_a_dense_layer():
    def build(mesh):
        x = given(mesh, TOKENS + ",d_model:8")
        layer = two_levels(expert_x=1, expert_y=1, hidden_size=8, group_size=8)
        y = layer.call(context_for(mesh, mode="eval"), x)
        return {"y": y}

    h = np.maximum(
        numbers(TOKENS + ",d_model:8") @ models.weights("wi/kernel", [1, 1, 8, 8], 1.0)[0, 0], 0
    )
    assert_close(
        run(build)["y"],
        (h @ models.weights("wo/kernel", [1, 1, 8, 8], 1.0)[0, 0]).astype("float32"),
        1e-5,
    )


# -- experts of several sizes


@pytest.mark.parametrize("shares", [(0.34, 0.33), (3, 3), (3.0, 0.33)])
def test_masks_of_heterogeneous_experts(shares):
    """Fractions of the experts, or numbers of them."""
    kinds = [
        {"layers": 1, "width": 2, "percent_number": shares[0]},
        {"layers": 3, "width": 4, "percent_number": shares[1]},
        {"layers": 2, "width": 1, "percent_number": 0.33},
    ]

    def build(mesh):
        experts = mtf.Dimension("experts", 10)
        masks = heterogeneous_moe.generate_heterogeneous_expert_masks(kinds, 10, experts, mesh, 1)
        assert masks.shape.to_string == "Shape[expert_hidden=4, num_expert_layers=3, experts=10]"
        return {"masks": masks}

    masks = run(build)["masks"]
    np.testing.assert_array_equal(masks[:, 0].sum(0), [2] * 3 + [4] * 3 + [1] * 4)
    np.testing.assert_array_equal(masks[0].sum(0), [1] * 3 + [3] * 3 + [2] * 4)
    with (
        tf.Graph().as_default(),
        pytest.raises(ValueError, match="asks for 11 experts, but there are 10"),
    ):
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        too_many = [{**kinds[0], "percent_number": 1.1}, kinds[1]]
        heterogeneous_moe.generate_heterogeneous_expert_masks(
            too_many, 10, mtf.Dimension("experts", 10), mesh, 1
        )
    with tf.Graph().as_default(), pytest.raises(ValueError, match="mask_info is empty"):
        heterogeneous_moe.generate_heterogeneous_expert_masks(
            [], 10, mtf.Dimension("experts", 10), mesh, 1
        )


@pytest.mark.slow
def test_heterogeneous_experts_under_layouts():
    kinds = [
        {"layers": 2, "width": 4, "percent_number": 0.5},
        {"layers": 1, "width": 8, "percent_number": 0.5},
    ]

    def layer():
        return heterogeneous_moe.HeterogeneousMoE1D(
            num_experts=4, hidden_size=1, group_size=8, heterogeneous_mask_info=kinds, **DETERMINED,
        )  # fmt: skip

    expected = run(trained(layer))
    for key, value in expected.items():
        if key.startswith("expert_layer_0/wi"):
            assert not value[:2, :, 4:].any() and value[2:, :, 4:].any()
        if key.startswith("expert_layer_1/wi"):
            assert value[:2, :, :4].any() and not value[2:].any()
    for placing in (
        Placing("x:2", "batch:x,experts:x"), Placing("x:2,y:2", "batch:x,experts:x,expert_hidden:y"),
    ):  # fmt: skip
        for key, value in run(trained(layer, placing), placing).items():
            assert_close(value, expected[key], 2e-5, f"{placing} {key}")
