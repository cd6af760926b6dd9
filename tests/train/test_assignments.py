"""What a step does besides its results: assignments, prints, summaries, in every front end."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from helpers.train import effects

import mesh_tensorflow as mtf

SHORT = {("fit", "merged"), ("fit", "simd"), ("session", "placement"), ("function", "merged")}


def _cells():
    number = 0
    for feature in effects.FEATURES:
        for front, mesh in effects.CELLS:
            for micro in (False, True):
                short = (front, mesh) in SHORT and feature in (effects.added, effects.moving)
                others = pytest.mark.every if number % 4 else pytest.mark.slow
                marks = [] if short else [others]
                number += 1
                name = f"{feature.__name__}-{front}-{mesh}{'-microbatches' * micro}"
                yield pytest.param(feature, front, mesh, micro, id=name, marks=marks)


@pytest.mark.slow_but(3)
@pytest.mark.parametrize(("feature", "front", "mesh", "micro"), _cells())
def test_assignments_are_part_of_a_step(feature, front, mesh, micro):
    effects.check(feature, front, mesh, micro)


@pytest.mark.parametrize("mesh", ["one", "merged", "simd"])
def test_evaluations_assign_nothing(mesh):
    """Not even between the batches of one evaluation; and they use what training has assigned."""

    def model(mesh, x):
        count = effects.state(mesh, "count")
        mtf.assign(count, count + 1.0)
        return effects.loss_of(mesh, x) * 0.0 + count

    data = effects.DATA.reshape(-1, 4)
    result = effects.fitted(model, mesh, eval_data=data)
    assert result.losses == [0.0, 1.0] and result.final["eval_loss"] == 2.0
    assert result.variables["count"] == 2.0


@pytest.mark.parametrize("mesh", ["merged", "placement", "simd"])
def test_batch_norm_is_evaluated_with_its_averages(mesh):
    def model(mesh, x, training):
        y, _ = mtf.layers.batch_norm(x, training, momentum=0.0)
        return mtf.reduce_mean(mtf.square(y - 1.0)) + 0.0 * effects.loss_of(mesh, x)

    last = effects.DATA[-1]
    result = effects.fitted(model, mesh, eval_data=last)
    normal = (last - last.mean(0)) / last.std(0)
    np.testing.assert_allclose(result.final["eval_loss"], np.mean((normal - 1) ** 2), rtol=1e-5)


@pytest.mark.parametrize("mesh", ["one", "placement", "simd"])
def test_assignments_to_one_variable_are_in_order(mesh):
    """Also those of the optimizer, after those of the model."""

    def model(mesh, x):
        a, w = effects.state(mesh, "a", initial=1.0), mtf.get_variable(mesh, "w", [effects.D])
        for value in (5.0, 6.0, 7.0):
            mtf.assign(a, mtf.constant(mesh, value))
        mtf.assign(w, mtf.zeros_like(w))
        b = effects.state(mesh, "b")
        mtf.assign(b, mtf.read_variable(a))
        return mtf.reduce_sum(w) + mtf.reduce_mean(x)

    found = mtf.train.fit(
        model,
        effects.DATA.reshape(-1, 4),
        2,
        dims=[effects.BATCH, effects.D],
        optimizer=mtf.optimize.SgdOptimizer(0.5),
        progress=False,
        **effects.fit_arguments(mesh),
    ).variables
    assert found["a"] == 7.0 and found["b"] == 7.0
    np.testing.assert_allclose(found["w"], [-0.5] * 4)


@pytest.mark.parametrize("micro", [False, True], ids=["whole", "microbatches"])
@pytest.mark.parametrize("mesh", ["one", "merged", "placement", "simd"])
def test_prints_that_no_result_depends_on(mesh, micro, capfd):
    def model(mesh, x):
        mtf.Print(x, [mtf.reduce_mean(x)], "looked at ")
        return effects.loss_of(mesh, x)

    effects.fitted(model, mesh, micro)
    assert capfd.readouterr().err.count("looked at ") == effects.STEPS * (2 if micro else 1)


@pytest.mark.slow_but(3)
@pytest.mark.parametrize("micro", [False, True], ids=["whole", "microbatches"])
@pytest.mark.parametrize("mesh", ["one", "merged", "placement", "simd"])
def test_summaries_are_in_the_records(mesh, micro):
    def model(mesh, x):
        mtf.scalar_summary("total", mtf.reduce_sum(x))
        mtf.scalar_summary("loss", mtf.reduce_mean(x))
        mtf.scalar_summary("loss_1", 2 * mtf.reduce_mean(x))
        mtf.scalar_summary("n", 3 * mtf.reduce_mean(x))  # also a name of what shows the progress
        return effects.loss_of(mesh, x)

    history = effects.fitted(model, mesh, micro).history
    means = effects.DATA.mean((1, 2))
    for name, factor in [("total", 16), ("loss_1", 1), ("loss_1_1", 2), ("n", 3)]:
        np.testing.assert_allclose([r[name] for r in history], means * factor, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("micro", [False, True], ids=["whole", "microbatches"])
def test_random_numbers_that_are_assigned(micro):
    """The same on all meshes, and other ones in each step; each microbatch draws some."""

    def model(mesh, x):
        mtf.assign(effects.state(mesh, "drawn", [effects.D]), mtf.random_uniform(mesh, [effects.D]))
        noise = mtf.random_uniform(mesh, x.shape)
        mtf.assign_add(effects.state(mesh, "noise"), mtf.reduce_mean(noise))
        return effects.loss_of(mesh, x * noise)

    results = [
        effects.fitted(model, mesh, micro) for mesh in ("one", "merged", "placement", "simd")
    ]
    for result in results[1:]:
        np.testing.assert_allclose(result.losses, results[0].losses, rtol=1e-5)
        for name in ("drawn", "noise"):
            found, first = (r.variables[name] for r in (result, results[0]))
            np.testing.assert_allclose(found, first, rtol=1e-5)
    assert results[0].losses[0] != results[0].losses[1]


def test_a_loop_carries_out_what_is_in_it(capfd):
    """In a session, too, where nothing else depends on it."""

    def model(mesh, x):
        count = effects.state(mesh, "count")

        def body(i):
            mtf.assign_add(count, mtf.ones_like(count))
            return [mtf.Print(i, [i], "round ") * 0 + i + 1]

        mtf.while_loop(lambda i: mtf.less(i, 3), body, [mtf.constant(mesh, 0, dtype=tf.int32)])
        [i] = mtf.while_loop(
            lambda i: mtf.less(i, 3), body, [mtf.constant(mesh, 0, dtype=tf.int32)]
        )
        mtf.assign(effects.state(mesh, "rounds"), mtf.to_float(i))
        return effects.loss_of(mesh, x)

    result = effects.fitted(model, "merged")
    assert result.variables["rounds"] == 3.0
    assert result.variables["count"] == 6 * effects.STEPS
    assert capfd.readouterr().err.count("round ") == 6 * effects.STEPS


def _read_after(mesh, x):
    count = effects.state(mesh, "count")
    add = mtf.assign_add(count, mtf.ones_like(count))
    return effects.loss_of(mesh, x) + mtf.depend(count, [add])


@pytest.mark.parametrize("mesh", ["one", "placement"])
def test_microbatches_read_before_they_assign(mesh):
    """A read before the assignment has the value of the step's beginning, as elsewhere."""

    def model(mesh, x):
        count = effects.state(mesh, "count")
        before = mtf.read_variable(count)
        mtf.assign(count, before + 1.0)
        return effects.loss_of(mesh, x) * 0.0 + before

    results = [effects.fitted(model, mesh, micro) for micro in (False, True)]
    for result in results:
        assert result.variables["count"] == effects.STEPS
        assert result.losses == list(range(effects.STEPS))


def _read_before_and_after(mesh, x):
    count = effects.state(mesh, "count")
    mtf.assign(count, mtf.read_variable(count) + 1.0)
    return effects.loss_of(mesh, x) + mtf.read_variable(count)


def _largest(mesh, x):
    mtf.assign(effects.state(mesh, "largest"), mtf.reduce_max(x))
    return effects.loss_of(mesh, x)


def _in_loop(mesh, x):
    count = effects.state(mesh, "count")

    def body(i):
        mtf.assign_add(count, mtf.ones_like(count))
        return [i + 1]

    mtf.while_loop(lambda i: mtf.less(i, 3), body, [mtf.constant(mesh, 0, dtype=tf.int32)])
    return effects.loss_of(mesh, x)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (_read_after, "depend reads a variable after an assignment to it"),
        (_read_before_and_after, "read_variable_1 reads a variable after an assignment to it"),
        (_largest, "what is assigned to largest is not known for the whole batch from 2 microbat"),
        (_in_loop, "assigns to count in a loop within the model function"),
    ],
)
def test_what_microbatches_cannot_assign(model, message):
    effects.fitted(model, "one")
    with pytest.raises(ValueError, match=message):
        effects.fitted(model, "one", True)
