"""Hooks that end a training by what evaluations found."""

import math

import pytest
from helpers.estimator import estimator_models as models

from mesh_tensorflow import estimator
from mesh_tensorflow.estimator import experimental
from mesh_tensorflow.estimator.experimental import _is_stale
from mesh_tensorflow.estimator.export import _loss_smaller


def model_fn(features, labels, mode, params):
    return models.linear_model(features, labels, mode, params)


def run(directory, make_hook, lr=0.1, max_steps=20):
    """Trains with an evaluation every 2 steps; returns the step of the end."""
    config = estimator.RunConfig(save_checkpoints_steps=2)
    est = estimator.Estimator(model_fn, str(directory), config, {"lr": lr})
    train = estimator.TrainSpec(models.train_data, max_steps, hooks=[make_hook(est)])
    metrics, _ = estimator.train_and_evaluate(
        est, train, estimator.EvalSpec(models.eval_data, throttle_secs=0)
    )
    return metrics["global_step"]


EVERY = {"run_every_secs": None, "run_every_steps": 1}


@pytest.mark.slow
def test_thresholds(tmp_path):
    def lower(est):
        return experimental.stop_if_lower_hook(est, "loss", 0.5, **EVERY)

    def higher(est):
        return experimental.stop_if_higher_hook(est, "loss", 0.0, min_steps=6, **EVERY)

    end = run(tmp_path / "lower", lower)
    losses = {
        step: v for step, tag, v in models.events(tmp_path / "lower" / "eval") if tag == "loss"
    }
    # The evaluation that is low enough is seen in the step after it.
    below = min(step for step, loss in losses.items() if loss < 0.5)
    assert end == below + 1 < 20
    assert run(tmp_path / "higher", higher) == 7


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, lr, end",
    [
        ("stop_if_no_increase_hook", 0.1, 7),  # the loss falls: the first is the highest
        ("stop_if_no_decrease_hook", 1.5, 7),  # it grows: the first is the lowest
        ("stop_if_no_decrease_hook", 0.1, 20),
    ],
)
def test_no_progress(name, lr, end, tmp_path):
    def hook(est):
        return getattr(experimental, name)(est, "loss", 4, **EVERY)

    assert run(tmp_path, hook, lr) == end


def test_a_function_and_mistakes(tmp_path):
    answers = iter([False, False, True])

    def hook(est):
        return experimental.make_early_stopping_hook(est, lambda: next(answers), **EVERY)

    assert run(tmp_path, hook) == 3
    with pytest.raises(TypeError, match="should_stop_fn should be a function, but is 3"):
        experimental.make_early_stopping_hook(None, 3)
    with pytest.raises(ValueError, match="run_every_secs is 60 and run_every_steps is 2: give one"):
        experimental.make_early_stopping_hook(None, max, run_every_steps=2)


def test_any_number_is_better_than_nan():
    """An evaluation of a loss that was not finite yet is not the best one for ever."""
    assert not _is_stale([(0, math.nan), (10, 3.0), (20, 2.0)], 15, "min")
    assert _is_stale([(0, 1.0), (10, math.nan), (20, 2.0)], 15, "min")
    assert _loss_smaller({"loss": math.nan}, {"loss": 3.0})
    assert not _loss_smaller({"loss": 3.0}, {"loss": math.nan})
