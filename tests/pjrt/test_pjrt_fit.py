"""mtf.train.fit on devices of JAX."""

import os

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from helpers.train import linear

import mesh_tensorflow as mtf

PJRT = {"mesh_shape": "rows:2,cols:2", "layout": "batch:rows,in:cols", "mesh_impl": "pjrt"}
EVALUATION = {name: array[:10] for name, array in linear.DATA.items()}


@pytest.mark.slow
def test_trains_evaluates_and_resumes(tmp_path):
    """The last batch of the evaluation has rows that the layout splits, and rows that it cannot."""
    expected = linear.fit(4, eval_data=EVALUATION, eval_every=2)
    directory = str(tmp_path)
    first = linear.fit(2, eval_data=EVALUATION, eval_every=2, directory=directory, **PJRT)
    rest = linear.fit(4, eval_data=EVALUATION, eval_every=2, directory=directory, **PJRT)
    np.testing.assert_allclose([*first.losses, *rest.losses], expected.losses, rtol=1e-5)
    found = [*first.evaluations, *rest.evaluations]
    assert [e["step"] for e in found] == [2, 4]
    for evaluation, other in zip(found, expected.evaluations):
        np.testing.assert_allclose(evaluation["loss"], other["loss"], rtol=1e-5)
    assert set(rest.variables) == set(expected.variables)
    for name, value in expected.variables.items():
        np.testing.assert_allclose(rest.variables[name], value, rtol=1e-4, atol=1e-6)
    elsewhere = linear.fit(5, directory=directory, mesh_shape="rows:2", layout="batch:rows")
    assert elsewhere.step == 5


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"mesh_impl": "magic"}, "mesh_impl='magic': it is one of 'placement', 'simd', 'pjrt'"),
        ({"mesh_impl": "pjrt", "simd": True}, "mesh_impl='pjrt' with simd=True: it is one of"),
        ({"mesh_impl": "pjrt", "devices": ["/cpu:0"]}, "devices are those of TensorFlow, but"),
    ],
)
def test_wrong_arguments(given, message):
    with pytest.raises(ValueError, match=message):
        linear.fit(1, **given)


def test_names_of_the_other_implementations():
    expected = linear.fit(2)
    for name in ("placement", "simd"):
        found = linear.fit(2, **{**PJRT, "mesh_impl": name})
        np.testing.assert_allclose(found.losses, expected.losses, rtol=1e-5)


def test_a_program_with_random_numbers():
    def model(mesh, batch):
        del mesh
        x = mtf.dropout(batch["x"], True, keep_prob=0.5)
        y = mtf.layers.dense(x, mtf.Dimension("out", 2), x.shape.dims[-1:], name="y")
        return mtf.reduce_mean(mtf.square(y))

    def losses(**place):
        data = [{"x": np.ones([8, 4], np.float32)}] * 3
        return mtf.train.fit(
            model, data, optimizer=mtf.optimize.SgdOptimizer(0.1), steps=3, seed=1, progress=False,
            dims={"x": [mtf.Dimension("batch", 8), mtf.Dimension("in", 4)]}, **place,
        ).losses  # fmt: skip

    np.testing.assert_allclose(losses(**PJRT), losses(), rtol=1e-5)


STORED = {"mesh_shape": "rows:2", "layout": "batch:rows", "mesh_impl": "pjrt", "zero": 3}


@pytest.mark.slow
def test_weights_to_begin_with_and_their_use(tmp_path):
    """In a directory with a bracket, with rows that the layout does not split."""
    directory = str(tmp_path / "lr[0.1]")
    weights = linear.fit(2).variables
    arguments = {"init_checkpoint": weights, "average": 0.5}
    expected = linear.fit(1, **arguments)
    found = linear.fit(1, directory=directory, **arguments, **STORED)
    np.testing.assert_allclose(found.losses, expected.losses, rtol=1e-5)
    for name, value in expected.variables.items():
        np.testing.assert_allclose(found.variables[name], value, rtol=1e-4, atol=1e-6)
    assert linear.fit(2, directory=directory, average=0.5, **STORED).history[0]["step"] == 2
    small = {name: array[:7] for name, array in linear.DATA.items()}
    for place in ({}, STORED):
        means = mtf.train.evaluate(
            linear.model_fn, small, directory=found.variables, dims=linear.DIMS, **place
        )
        y = mtf.train.predict(
            lambda mesh, x: mtf.layers.dense(
                x, [linear.OUT], reduced_dims=[linear.IN], name="linear"
            ),
            small["x"],
            directory=found.variables,
            dims=linear.DIMS["x"],
            **place,
        )
        assert means["loss"] == pytest.approx(np.mean(np.square(y - small["y"])), rel=1e-5)


def test_weights_that_are_not_numbers_are_not_saved(tmp_path):
    def model_fn(mesh, features):
        z = mtf.get_variable(mesh, "z", "q:2", initializer=tf.zeros_initializer())
        return mtf.reduce_mean(features["x"]) + mtf.reduce_sum(mtf.sqrt(mtf.square(z)))

    with pytest.raises(mtf.train.NotANumberError, match=r"after step 1, whose loss was .*, z are"):
        linear.fit(
            3,
            model_fn=model_fn,
            optimizer=mtf.optimize.SgdOptimizer(0.1),
            directory=str(tmp_path),
            save_every=1,
            **STORED,
        )
    assert not any(name.startswith("model.ckpt") for name in os.listdir(tmp_path))


def test_a_function_of_jax_as_the_step(tmp_path):
    """It makes its variables without a step, to begin with given weights or go on from a file."""
    average = mtf.optimize.ExponentialMovingAverage(0.75)

    def fit(steps, **arguments):
        @mtf.pjrt.function(mesh_shape="rows:2", layout="d:rows")
        def step(x):
            mesh = mtf.Mesh(mtf.Graph(), "mesh")
            w = mtf.get_variable(mesh, "w", "d:2")
            variables = mesh.graph.trainable_variables
            grad = mtf.ones_like(w) * mtf.import_tf_tensor(mesh, x, "")
            updates = mtf.optimize.SgdOptimizer(1.0).apply_grads([grad], variables)
            average.apply(variables, after=updates)
            lowering = mtf.Lowering(mesh.graph, {mesh: mtf.pjrt.mesh_impl()})
            return lowering.export_to_tf_tensor(mtf.reduce_sum(w))

        return mtf.train.fit(step, [1.0, 2.0], steps, progress=False, **arguments).variables

    given, directory = {"w": np.array([3.0, 5.0], np.float32)}, str(tmp_path)
    first = fit(1, init_checkpoint=given, directory=directory)
    np.testing.assert_allclose(first["w"], [2.0, 4.0])
    np.testing.assert_allclose(first["w/ExponentialMovingAverage"], [2.75, 4.75])
    np.testing.assert_allclose(fit(2, directory=directory)["w"], [0.0, 2.0])
