"""mtf.train.fit: meshes, evaluation, checkpoints, resume, errors."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from helpers.train import linear

import mesh_tensorflow as mtf

PLACES = {
    "batch": {"mesh_shape": "rows:2", "layout": "batch:rows"},
    "both": {"mesh_shape": "rows:2,cols:2", "layout": "batch:rows,in:cols"},
    "simd": {"mesh_shape": "rows:2,cols:2", "layout": "batch:rows,out:cols", "simd": True},
    "stored": {"mesh_shape": "rows:2", "layout": "batch:rows", "zero": 3},
}


@pytest.fixture(scope="module")
def alone():
    """Four steps on one processor, with an evaluation after every second one."""
    evaluation = {name: array[:10] for name, array in linear.DATA.items()}
    return linear.fit(4, eval_data=evaluation, eval_every=2)


@pytest.mark.slow_but(2)
@pytest.mark.parametrize("place", PLACES)
def test_meshes_give_the_same_numbers(place, alone):
    evaluation = {name: array[:10] for name, array in linear.DATA.items()}
    result = linear.fit(4, eval_data=evaluation, eval_every=2, **PLACES[place])
    np.testing.assert_allclose(result.losses, alone.losses, rtol=1e-5)
    assert [e["step"] for e in result.evaluations] == [2, 4]
    for found, expected in zip(result.evaluations, alone.evaluations):
        np.testing.assert_allclose(found["loss"], expected["loss"], rtol=1e-5)
    assert set(result.variables) == set(alone.variables)
    for name, value in alone.variables.items():
        np.testing.assert_allclose(result.variables[name], value, rtol=1e-4, atol=1e-6)


def test_a_mesh_implementation_that_is_given(alone):
    np.testing.assert_allclose(linear.fit(4, mesh_impl=IMPL).losses, alone.losses, rtol=1e-5)


def test_evaluation_counts_every_row_once(alone):
    """The last batch has two rows of four; dropout is off."""
    kernel, bias = (alone.variables[f"linear/{name}"] for name in ("kernel", "bias"))
    x, y = linear.DATA["x"][:10], linear.DATA["y"][:10]
    expected = np.mean(np.square(x @ kernel + bias - y))
    np.testing.assert_allclose(alone.evaluations[-1]["error"], expected, rtol=1e-5)
    np.testing.assert_allclose(alone.evaluations[-1]["loss"], expected, rtol=1e-5)
    assert alone.final["eval_loss"] == alone.evaluations[-1]["loss"]


@pytest.mark.parametrize("simd", [False, True])
def test_rows_that_the_layout_does_not_split_equally_are_evaluated(simd):
    result = linear.fit(1, eval_data=UNEVEN, mesh_shape="rows:4", layout="batch:rows", simd=simd)
    kernel, bias = (result.variables[f"linear/{name}"] for name in ("kernel", "bias"))
    expected = np.mean(np.square(UNEVEN["x"] @ kernel + bias - UNEVEN["y"]))
    assert result.final["eval_loss"] == pytest.approx(expected, rel=1e-5)


def test_sums_and_weights_over_batches():
    """The mean of tokens is that of all tokens, not that of the means of batches."""
    length = mtf.Dimension("length", 3)
    data = {
        "loss": np.arange(18, dtype=np.float32).reshape(6, 3) / 10,
        "weight": np.array([[1, 1, 1], [1, 0, 0], [0, 0, 0], [1, 1, 0], [1, 1, 1], [1, 0, 0]]),
    }

    def model_fn(mesh, features):
        scale = mtf.get_variable(mesh, "scale", [], initializer=tf.ones_initializer())
        losses = features["loss"] * scale
        weights = mtf.cast(features["weight"], tf.float32)
        metrics = mtf.train.metrics
        return (
            metrics.mean(losses, weights),
            {
                "pair": (mtf.reduce_sum(losses * weights), mtf.reduce_sum(weights)),
                "perplexity": metrics.perplexity(losses, weights),
            },
        )

    result = mtf.train.fit(
        model_fn,
        data,
        1,
        dims={"loss": [linear.BATCH, length], "weight": [linear.BATCH, length]},
        optimizer=mtf.optimize.SgdOptimizer(0.0),
        eval_data=data,
        progress=False,
        mesh_shape="rows:2",
        layout="batch:rows",
    )
    mean = np.average(data["loss"], weights=data["weight"])
    [found] = result.evaluations
    np.testing.assert_allclose([found["loss"], found["pair"]], mean, rtol=1e-6)
    np.testing.assert_allclose(found["perplexity"], np.exp(mean), rtol=1e-6)
    first = np.average(data["loss"][:4], weights=data["weight"][:4])
    np.testing.assert_allclose(result.history[-1]["perplexity"], np.exp(first), rtol=1e-6)


@pytest.mark.slow
def test_resume_is_exact(tmp_path):
    """Also the dropout and the order of the data, in the middle of an epoch."""
    whole = linear.fit(7, shuffle=True)
    for steps in (2, 5, 7):
        part = linear.fit(
            steps, shuffle=True, directory=str(tmp_path), mesh_shape="rows:2", layout=""
        )
        done = part.history[-1]["step"]
        assert done == steps and part.checkpoint.endswith(f"model.ckpt-{steps}")
        first = part.history[0]["step"]
        assert part.losses == whole.losses[first - 1 : steps]
    for name, value in whole.variables.items():
        np.testing.assert_array_equal(part.variables[name], value)
    few = [{name: array[:4] for name, array in linear.DATA.items()}]
    moved = tmp_path.rename(tmp_path.with_name("moved"))
    again = linear.fit(7, iter(few), directory=str(moved), eval_data=linear.DATA)
    assert again.history == [] and again.step == 7 and len(again.evaluations) == 1
    for file in moved.glob("model.ckpt-7.*"):
        file.unlink()
    with pytest.raises(ValueError, match=r"model\.ckpt-7, whose files are missing.*resume=False"):
        linear.fit(8, directory=str(moved))


def test_resume_in_another_layout(tmp_path, alone):
    linear.fit(2, directory=str(tmp_path), **PLACES["both"])
    rest = linear.fit(4, directory=str(tmp_path), **PLACES["simd"])
    np.testing.assert_allclose(rest.losses, alone.losses[2:], rtol=1e-5)
    names = [name for name, _ in tf.train.list_variables(rest.checkpoint)]
    assert sorted(alone.variables) == names
    reader = tf.train.load_checkpoint(rest.checkpoint)
    np.testing.assert_array_equal(
        reader.get_tensor("linear/kernel"), rest.variables["linear/kernel"]
    )
    fresh = linear.fit(1, directory=str(tmp_path), resume=False)
    assert fresh.losses == pytest.approx(alone.losses[:1], rel=1e-5)


def test_checkpoints_are_kept_as_asked(tmp_path):
    linear.fit(3, directory=str(tmp_path), save_every=1, keep=2)
    linear.fit(4, directory=str(tmp_path), save_every=1, keep=2)
    assert sorted(p.name for p in tmp_path.glob("*.index")) == [
        "model.ckpt-3.index",
        "model.ckpt-4.index",
    ]


def test_schedules_and_functions_that_make_optimizers():
    result = linear.fit(
        3,
        optimizer=mtf.optimize.SgdOptimizer,
        learning_rate=lambda step: 0.1 / (1.0 + tf.cast(step, tf.float32)),
    )
    rates = [record["learning_rate"] for record in result.history]
    np.testing.assert_allclose(rates, [0.1, 0.05, 0.1 / 3], rtol=1e-6)
    assert linear.fit(1, optimizer=mtf.optimize.AdafactorOptimizer).step == 1


class DescentOfAnotherProgram:
    """Has no class of the package as a base, and its rate falls with TensorFlow's global step."""

    def __init__(self, learning_rate):
        self.learning_rate = learning_rate

    def apply_grads(self, grads, variables):
        step = tf.cast(tf.train.get_or_create_global_step(), tf.float32)
        rate = mtf.import_tf_tensor(variables[0].mesh, self.learning_rate / (1.0 + step), [])
        return [mtf.assign_sub(v, g * rate) for g, v in zip(grads, variables)]


@pytest.mark.parametrize("simd", [False, True])
def test_optimizers_of_other_programs(simd):
    """What has apply_grads is an optimizer, whatever its class."""
    expected = linear.fit(
        3,
        optimizer=mtf.optimize.SgdOptimizer,
        learning_rate=lambda step: 0.1 / (1.0 + tf.cast(step, tf.float32)),
    )
    for optimizer, rate in [(DescentOfAnotherProgram(0.1), None), (DescentOfAnotherProgram, 0.1)]:
        result = linear.fit(3, optimizer=optimizer, learning_rate=rate, simd=simd)
        losses = [[record["loss"] for record in run.history] for run in (result, expected)]
        np.testing.assert_allclose(*losses, rtol=1e-5)


def test_names_of_optimizers_of_other_programs():
    with pytest.raises(TypeError, match=r"such as DescentOfAnotherProgram\(0.001\), or give"):
        linear.fit(1, optimizer=DescentOfAnotherProgram)
    held = DescentOfAnotherProgram(tf.constant(0.1))
    with pytest.raises(ValueError, match=r"\(learning_rate\).* optimizer=DescentOfAnotherProgram"):
        linear.fit(1, optimizer=held)


def _numpy_run(steps, decay=None, clip=None):
    """Returns (losses, norms, evaluations) of gradient descent in NumPy, without dropout."""
    w, b = np.zeros((6, 2)), np.zeros(2)
    means = [w, b]
    losses, norms = [], []
    for step in range(steps):
        x, y = (linear.DATA[n][step % 3 * 4 : step % 3 * 4 + 4].astype(float) for n in "xy")
        error = x @ w + b - y
        losses.append(np.mean(error**2))
        grads = [x.T @ error / 4, error.mean(0)]
        norms.append(np.sqrt(sum(np.sum(g**2) for g in grads)))
        scale = 1 if clip is None else min(1, clip / norms[-1])
        w, b = w - 0.1 * scale * grads[0], b - 0.1 * scale * grads[1]
        if decay is not None:
            means = [decay * m + (1 - decay) * v for m, v in zip(means, (w, b))]
    w, b = (w, b) if decay is None else means
    x, y = linear.DATA["x"], linear.DATA["y"]
    return losses, norms, np.mean((x @ w + b - y) ** 2)


def _plain(mesh, features):
    """The linear model without dropout, from zero weights."""
    zeros = tf.zeros_initializer()
    y = mtf.layers.dense(
        features["x"],
        [linear.OUT],
        reduced_dims=[linear.IN],
        name="linear",
        kernel_initializer=zeros,
    )
    return mtf.reduce_mean(mtf.square(y - features["y"]))


@pytest.mark.slow_but(1)
@pytest.mark.parametrize("place", [{}, PLACES["both"], PLACES["simd"]])
def test_clipping_microbatches_and_averages(place):
    """Against NumPy; evaluations use the averages."""
    losses, norms, evaluation = _numpy_run(5, decay=0.8, clip=1.5)
    result = linear.fit(
        5,
        model_fn=_plain,
        optimizer=mtf.optimize.SgdOptimizer(0.1),
        clip_norm=1.5,
        microbatches=2,
        average=0.8,
        eval_data=linear.DATA,
        **place,
    )
    np.testing.assert_allclose(result.losses, losses, rtol=1e-5)
    found = [record["gradient_norm"] for record in result.history]
    np.testing.assert_allclose(found, norms, rtol=1e-5)
    assert max(norms) > 1.5 > min(norms) or min(norms) > 1.5
    assert result.final["eval_loss"] == pytest.approx(evaluation, rel=1e-5)
    assert "linear/kernel/ExponentialMovingAverage" in result.variables


def test_precision():
    """Activations are bfloat16, weights float32."""
    seen = []

    def model_fn(mesh, features):
        y = mtf.layers.dense(features["x"], [linear.OUT], reduced_dims=[linear.IN], name="linear")
        seen.append(y.dtype)
        return mtf.reduce_mean(mtf.square(mtf.to_float(y - features["y"])))

    result = linear.fit(3, model_fn=model_fn, precision="mixed_bfloat16", **PLACES["batch"])
    assert seen == [tf.bfloat16] and result.variables["linear/kernel"].dtype == np.float32
    rate = mtf.schedules.constant(0.01)
    adam = {"optimizer": mtf.optimize.AdamWOptimizer, "learning_rate": rate, "average": 0.5}
    linear.fit(1, model_fn=model_fn, precision="mixed_bfloat16", **adam)
    plain = linear.fit(3, model_fn=model_fn, **PLACES["batch"])
    np.testing.assert_allclose(result.losses, plain.losses, rtol=0.05)
    assert result.losses != plain.losses


def test_a_precision_around_the_call():
    seen = []

    def model_fn(mesh, features):
        seen.append(features["x"].dtype)
        return linear.model_fn(mesh, features, False)["loss"]

    with mtf.precision("mixed_bfloat16"):
        linear.fit(1, model_fn=model_fn)
        linear.fit(1, model_fn=model_fn, precision="float32")
    assert seen == [tf.bfloat16, tf.float32]


def test_what_is_said(tmp_path, capsys):
    """At the start: mesh, layout, parameters, memory, communication, places; then few lines."""
    linear.fit(2, progress=True, directory=str(tmp_path), eval_data=linear.DATA, **PLACES["both"])
    lines = capsys.readouterr().err.splitlines()
    said = "\n".join(lines)
    for words in (
        "rows=2",
        "batch:rows",
        "14 in 2 variables",
        "allreduce",
        f"checkpoints     {tmp_path}",
    ):
        assert words in said, said
    assert lines[-2].startswith("train: 2/2 steps in")
    assert lines[-1].startswith("step 2: evaluation: loss ")
    assert len(lines) < 20, said


def test_rates():
    result = linear.fit(4, log_every=2, tokens_per_batch=40, hardware="tpu_v3", mesh_shape="x:2")
    assert [record["step"] for record in result.history] == [2, 4]
    last = result.history[-1]
    rate = last["steps_per_second"]
    assert last["examples_per_second"] == pytest.approx(4 * rate)
    assert last["tokens_per_second"] == pytest.approx(40 * rate)
    assert 0 < last["model_flops_utilization"] < 1


def test_microbatches_compute_as_much_as_the_batch():
    flops = []
    for microbatches in (1, 4):
        arguments = {"microbatches": microbatches, "hardware": "tpu_v3"}
        last = linear.fit(1, model_fn=_plain, **arguments).history[-1]
        flops.append(last["model_flops_utilization"] / last["steps_per_second"])
    assert flops[0] <= flops[1] < 2 * flops[0]


def test_tensors_without_dimensions():
    """The model imports batches by itself."""

    def model_fn(mesh, x, y):
        x = mtf.import_tf_tensor(mesh, x, [linear.BATCH, linear.IN])
        y = mtf.import_tf_tensor(mesh, y, [linear.BATCH, linear.OUT])
        found = mtf.layers.dense(x, [linear.OUT], reduced_dims=[linear.IN], name="linear")
        return mtf.reduce_mean(mtf.square(found - y))

    batches = [(linear.DATA["x"][i : i + 4], linear.DATA["y"][i : i + 4]) for i in (0, 4, 8)]
    result = linear.fit(4, batches, dims=None, model_fn=model_fn)
    assert len(result.losses) == 4
    whole = linear.fit(
        4,
        (linear.DATA["x"], linear.DATA["y"]),
        dims=tuple(linear.DIMS.values()),
        model_fn=lambda mesh, x, y: linear.model_fn(mesh, {"x": x, "y": y}, False)["loss"],
    )
    np.testing.assert_allclose(result.losses, whole.losses, rtol=1e-6)


def test_a_loss_that_is_not_a_number(tmp_path):
    with pytest.raises(mtf.train.NotANumberError, match=r"the loss is (inf|nan) at step \d+") as e:
        linear.fit(
            400, optimizer=mtf.optimize.SgdOptimizer(1e6), directory=str(tmp_path), save_every=1
        )
    assert "mtf.debug.nan_checks()" in str(e.value) and "model.ckpt-" in str(e.value)


@pytest.mark.slow
@pytest.mark.parametrize("place", [PLACES["both"], PLACES["simd"]])
def test_nan_checks_name_the_line_of_the_model(place):
    def model_fn(mesh, features):
        y = mtf.layers.dense(features["x"], [linear.OUT], reduced_dims=[linear.IN], name="linear")
        return mtf.reduce_mean(mtf.log(-mtf.square(y)))  # the culprit

    with mtf.debug.nan_checks(), pytest.raises(mtf.debug.NonFiniteError) as e:
        linear.fit(1, model_fn=model_fn, **place)
    assert "log" in str(e.value) and "# the culprit" in str(e.value)


def test_the_data_end():
    batches = ((linear.DATA["x"][:4], linear.DATA["y"][:4]) for _ in range(2))
    result = linear.fit(
        5,
        batches,
        dims=tuple(linear.DIMS.values()),
        model_fn=lambda mesh, x, y: linear.model_fn(mesh, {"x": x, "y": y}, True),
    )
    assert result.step == 2 and result.stopped == "the data ended after 2 steps"
    assert [record["step"] for record in result.history] == [1, 2]


def test_batches_of_two_sizes_without_dimensions():
    def model_fn(mesh, x):
        x = mtf.import_tf_tensor(mesh, x, mtf.Shape([("batch", x.shape[0]), linear.IN]))
        return mtf.reduce_mean(mtf.layers.dense(x, [linear.OUT], reduced_dims=[linear.IN]))

    batches = [linear.DATA["x"][:4], linear.DATA["x"][4:7]]
    with pytest.raises(ValueError, match=r"shape \[3, 6\], but the first one had \[4, 6\]"):
        linear.fit(3, batches, dims=None, model_fn=model_fn)


def _fit_with(**arguments):
    return lambda: linear.fit(1, **arguments)


def _elsewhere(mesh, features):
    with tf.variable_scope("other"):
        return linear.model_fn(mesh, features, False)


UNEVEN = {name: array[:7] for name, array in linear.DATA.items()}
IMPL = mtf.placement_mesh_impl.PlacementMeshImpl("rows:2", "batch:rows", ["cpu:0"] * 2)
ERRORS = {
    "steps": (lambda: linear.fit(0), "steps=0 must be an integer of at least 1"),
    "steps that are a bool": (
        lambda: linear.fit(True),
        "steps=True must be an integer of at least 1",
    ),
    "a seed that is a bool": (_fit_with(seed=True), "seed is None or an integer .* but is True"),
    "names": (
        _fit_with(dims={"x": "batch:4,in:6", "z": "batch:4"}),
        "dims has 'z', which is not in the data: it has x, y",
    ),
    "structure": (_fit_with(dims="batch:4,in:6"), "dims has one feature, but the data gives a dic"),
    "batch": (
        _fit_with(dims={"x": "batch:4,in:6", "y": "other:4,out:2"}),
        "all features begin with the same dimension",
    ),
    "sizes": (
        _fit_with(dims={"x": "batch:4,in:5", "y": "batch:4,out:2"}),
        r"x should be \[batch=4, in=5\], but a batch of the data has the shape \[4, 6\]",
    ),
    "few rows": (
        _fit_with(dims={"x": "batch:16,in:6", "y": "batch:16,out:2"}),
        "the data have 12 rows, fewer than one batch, batch=16",
    ),
    "no dims": (_fit_with(dims=None), "dims is missing"),
    "kind": (_fit_with(data=7), "data should be a tf.data.Dataset, NumPy arrays"),
    "splits": (
        _fit_with(data={"train": iter([linear.DATA]), "test": None}),
        r"it is a dict with train, test. If these are splits, give one, such as data\['train'\]",
    ),
    "path": (_fit_with(data="/no/such"), "there is no such directory"),
    "loss": (_fit_with(model_fn=lambda mesh, features: 3.0), "should return mtf Tensors, but loss"),
    "shape": (
        _fit_with(model_fn=lambda mesh, features: features["x"]),
        r"loss of the model function has the dimensions \[batch=4, in=6\]",
    ),
    "no loss": (_fit_with(model_fn=lambda mesh, features: {}), "a dictionary without 'loss'"),
    "step": (
        _fit_with(model_fn=lambda mesh, features: dict.fromkeys(["loss", "step"], 1.0)),
        "a metric has the name 'step', which the records of a run have",
    ),
    "no variables": (
        _fit_with(model_fn=lambda mesh, features: mtf.reduce_sum(features["x"])),
        "no trainable variables",
    ),
    "no gradient": (
        _fit_with(
            model_fn=lambda mesh, features: mtf.to_int32(
                linear.model_fn(mesh, features, True)["loss"]
            )
        ),
        "no gradient of the loss reaches a trainable variable, of which the model has linear/kern",
    ),
    "optimizer name": (
        _fit_with(optimizer="adam"),
        "or a function that returns one, but is 'adam'. Give for instance mtf.optimize.AdamW",
    ),
    "optimizer class": (
        _fit_with(optimizer=mtf.optimize.SgdOptimizer),
        "SgdOptimizer is a class that needs a learning rate. Give an optimizer, such as mtf.optim",
    ),
    "optimizer": (_fit_with(optimizer=lambda: 3), "optimizer should return an mtf.optimize.Opt"),
    "no step function": (_fit_with(optimizer=None), "decorate it with @mtf.function"),
    "two rates": (_fit_with(learning_rate=0.1), "learning_rate is given besides an optimizer"),
    "microbatches": (_fit_with(microbatches=3), "batch=4 is not divisible by num_microbatches=3"),
    "mesh_impl": (_fit_with(mesh_impl=4), "mesh_impl should be a mesh implementation, but is 4"),
    "rows": (
        _fit_with(eval_data=UNEVEN, mesh_impl=IMPL),
        "the last batch of eval_data has 3 rows, which the layout of mesh_impl does not split",
    ),
    "two meshes": (
        _fit_with(mesh_impl=IMPL, simd=True),
        "mesh_impl is given besides mesh_shape, layout, devices or simd",
    ),
    "eval_every": (_fit_with(eval_every=0), "eval_every=0 must be an integer of at least 1"),
    "eval_every alone": (
        _fit_with(eval_every=2),
        "eval_every=2 evaluates nothing without eval_data: give fit eval_data in the structure",
    ),
    "unused": (
        _fit_with(optimizer=None, clip_norm=1.0, layout="batch:rows"),
        "clip_norm, layout would have no effect here: it is something that only a model function",
    ),
    "store": (
        _fit_with(store=mtf.VariableStore()),
        "store would have no effect here: it is something that only a step function",
    ),
    "eval_fn": (
        _fit_with(eval_data=linear.DATA, eval_fn=_elsewhere),
        "eval_fn has the variables other/linear/bias, other/linear/kernel, which the model does",
    ),
    "eval_data": (
        _fit_with(eval_data=iter([])),
        "eval_data gave no batch. An iterator can be read only once",
    ),
    "arguments": (
        lambda: linear.fit(1, linear.DATA["x"], model_fn=lambda x: x, dims=linear.DIMS["x"]),
        r"is <lambda>\(x\), but it is called with the mesh and the features x: too many positional",
    ),
    "arguments by name": (
        lambda: linear.fit(1, model_fn=lambda mesh, x, z: x),
        r"but it is called with the mesh and a dictionary of the features x, y: missing a required "
        r"argument: 'z'\. Give it these arguments, in this order, or by their names",
    ),
    "dtype": (
        _fit_with(data={**linear.DATA, "y": np.array([["a", "b"]] * 12)}),
        "y has the dtype <U1, which no mtf Tensor can have",
    ),
}


def test_features_by_their_names():
    """Of a dictionary, also where a microbatch has parts of them."""

    def named(mesh, y, x, training):
        return linear.model_fn(mesh, {"x": x, "y": y}, training)

    for options in ({}, {"microbatches": 2}):
        results = [linear.fit(2, model_fn=f, **options) for f in (linear.model_fn, named)]
        assert results[0].losses == results[1].losses


@pytest.mark.parametrize("case", ERRORS)
def test_errors_say_what_to_do(case):
    call, text = ERRORS[case]
    with pytest.raises((ValueError, TypeError), match=text):
        call()


def test_within_the_scope_of_a_store(alone):
    """The program of fit has variables of its own, with the same names as elsewhere."""
    store = mtf.VariableStore()
    with store.scope():
        mtf.get_variable(mtf.Mesh(mtf.Graph(), "mesh"), "linear/kernel", "in:4")
        result = linear.fit(4)
    assert set(result.variables) == set(alone.variables)
    np.testing.assert_allclose(result.losses, alone.losses, rtol=1e-5)
    assert store.names == ["linear/kernel"]


TYPOS = {
    "dimension": ({"layout": "bach:rows"}, r"fit: layout rule bach:rows .*did you mean batch\?"),
    "mesh": ({"layout": "batch:row"}, r"fit: layout rule batch:row .*did you mean rows\?"),
    "order": ({"layout": "rows:batch"}, r"fit: layout rule rows:batch .*did you mean batch:rows\?"),
    "variables": ({"variable_layout": "bach:rows"}, r"fit: variable_layout rule bach:rows "),
}


@pytest.mark.parametrize("simd", [False, True])
@pytest.mark.parametrize("typo", TYPOS)
def test_a_typo_in_a_layout(typo, simd):
    given, text = TYPOS[typo]
    options = {"mesh_shape": "rows:2", "layout": "batch:rows", **given}
    with pytest.raises(ValueError, match=text):
        linear.fit(1, simd=simd, **options)
