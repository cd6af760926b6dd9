"""What a step on devices of JAX does besides its results."""

import numpy as np
import pytest
from helpers.train import effects

import mesh_tensorflow as mtf


def _in_function(feature, micro):
    @mtf.pjrt.function(mesh_shape="rows:2,cols:2", layout="batch:rows,d:cols")
    def step(data):
        return effects.program(feature, data, mtf.pjrt.mesh_impl, micro)[1]

    for batch in effects.DATA:
        step(batch)
    return {name: np.asarray(step.store.value(name)) for name in step.store.names}


def _in_fit(feature, micro):
    return effects.in_fit(feature, "pjrt", micro)


@pytest.mark.parametrize("micro", [False, True], ids=["whole", "microbatches"])
@pytest.mark.parametrize("front", [_in_function, _in_fit])
@pytest.mark.parametrize("feature", effects.FEATURES)
def test_assignments_are_part_of_a_step(feature, front, micro):
    found = front(feature, micro)
    for name, value in effects.expected(feature, micro).items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-6, err_msg=name)


def test_summaries_and_evaluations():
    def model(mesh, x):
        count = effects.state(mesh, "count")
        mtf.assign(count, count + 1.0)
        mtf.scalar_summary("mean", mtf.reduce_mean(x))
        return effects.loss_of(mesh, x) * 0.0 + count

    result = effects.fitted(model, "pjrt", eval_data=effects.DATA.reshape(-1, 4))
    assert result.losses == [0.0, 1.0] and result.final["eval_loss"] == 2.0
    means = effects.DATA.mean((1, 2))
    np.testing.assert_allclose([r["mean"] for r in result.history], means, rtol=1e-5)
