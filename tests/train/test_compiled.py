"""Steps that XLA compiles: fit(jit_compile=...), and programs of one device by replicate."""

import re

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.auto_mtf.measured import Auto
from mesh_tensorflow.simd_mesh_impl import SimdMeshImpl, replicate

DIMS = {"x": "batch:8,i:12", "y": "batch:8,o:1"}
X = np.linspace(-1.0, 1.0, 240).reshape(20, 12).astype(np.float32)
DATA = {"x": X, "y": X.sum(1, keepdims=True)}
LAYOUT = {"mesh_shape": "rows:2,cols:2", "layout": "batch:rows,h:cols", "devices": ["cpu:0"] * 4}


class OwnMeshImpl(mtf.placement_mesh_impl.PlacementMeshImpl):
    """A mesh implementation whose methods may be others."""


def model_fn(mesh, features, training):
    x = features["x"]
    h = mtf.layers.dense(
        x, [mtf.Dimension("h", 16)], x.shape.dims[1:], activation=mtf.relu, name="a"
    )
    if training:
        h = mtf.dropout(h, rate=0.2)
        mtf.scalar_summary("mean", mtf.reduce_mean(h))
    y = mtf.layers.dense(h, [mtf.Dimension("o", 1)], h.shape.dims[1:], name="b")
    return mtf.reduce_mean(mtf.square(y - features["y"]))


def trained(fn=model_fn, steps=4, **kwargs):
    return mtf.train.fit(
        fn, DATA, steps, dims=DIMS, log_every=1,
        optimizer=mtf.optimize.AdamWOptimizer(0.01), **{"progress": False, **kwargs},
    )  # fmt: skip


@pytest.mark.slow("microbatches*", "ZeRO*")
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"zero": 3, "zero_axis": "rows", "clip_norm": 0.1, "average": 0.9},
        {"microbatches": 2, "precision": "mixed_bfloat16"},
    ],
    ids=["plain", "ZeRO 3, clipped, averages", "microbatches in bfloat16"],
)
def test_numbers_are_those_of_other_steps(options, tmp_path):
    half = options.get("precision") is not None
    plain = trained(eval_data=DATA, eval_every=2, mesh_shape="rows:1", **options)
    logs, files = str(tmp_path / "logs"), str(tmp_path / "files")
    common = {"eval_data": DATA, "eval_every": 2, "directory": files, **LAYOUT, **options}
    # Begun with XLA, and gone on with from its checkpoint without and with it.
    for steps, compiled in [(2, True), (3, False), (4, True)]:
        result = trained(steps=steps, jit_compile=compiled, logdir=logs, **common)
    error = {"rtol": 2e-2, "atol": 2e-3} if half else {"rtol": 2e-5, "atol": 1e-6}
    np.testing.assert_allclose(result.losses, plain.losses[3:], **error)
    assert result.evaluations[-1]["loss"] == pytest.approx(
        plain.evaluations[-1]["loss"], rel=error["rtol"]
    )
    assert sorted(result.variables) == sorted(plain.variables)
    for name, value in plain.variables.items():
        np.testing.assert_allclose(result.variables[name], value, **error)
    tags = set()
    for path in (tmp_path / "logs").rglob("*tfevents*"):
        for event in tf.train.summary_iterator(str(path)):
            tags |= {value.tag for value in event.summary.value}
    assert "mean" in {tag.rpartition("/")[2] for tag in tags}, tags


@pytest.mark.slow
def test_the_mesh_of_a_mesh_implementation():
    impl = mtf.placement_mesh_impl.PlacementMeshImpl(
        "rows:2", "batch:rows", ["cpu:0"] * 2, zero=1, zero_axis="rows"
    )
    result = trained(mesh_impl=impl, jit_compile=True)
    np.testing.assert_allclose(result.losses, trained(mesh_impl=impl).losses, rtol=2e-5)


@pytest.mark.slow
def test_the_report_is_of_the_mesh_of_the_user(capsys):
    trained(progress=True, jit_compile=True, **LAYOUT)
    shown = capsys.readouterr().err
    assert "rows=2, cols=2: 4 processors on CPU:0" in shown
    assert "allreduce over rows=2" in shown


@pytest.mark.slow
def test_auto_times_both_and_keeps_what_it_found(tmp_path, capsys):
    auto = Auto(seconds=20, candidates=1, cache=str(tmp_path / "kept.json"), profile=False)
    for shown in (r"Steps are( not)? compiled", "in an earlier run"):
        result = trained(
            jit_compile="auto",
            layout=auto,
            progress=True,
            mesh_shape="rows:2",
            devices=["cpu:0"] * 2,
        )
        found = capsys.readouterr().err
        assert re.search(r"a step takes [\d.]+ ms if XLA compiles it, [\d.]+ ms if not", found)
        assert re.search(shown, found), found
        np.testing.assert_allclose(result.losses, trained().losses, rtol=2e-5)


@pytest.mark.slow
def test_auto_leaves_what_xla_cannot_compile(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("HOME", str(tmp_path))

    def with_texts(mesh, features, training):
        loss = model_fn(mesh, features, training)
        same = mtf.cwise(
            lambda t: tf.strings.to_number(tf.strings.as_string(t)), [mtf.stop_gradient(loss)]
        )
        return loss + 0.0 * same

    result = trained(with_texts, jit_compile="auto", progress=True)
    assert "XLA does not compile this step: " in capsys.readouterr().err
    np.testing.assert_allclose(result.losses, trained().losses, rtol=1e-6)
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"unsupported operations.*AsString"):
        trained(with_texts, jit_compile=True)


@pytest.mark.slow
def test_what_xla_cannot_print_is_left_out(caplog):
    def printing(mesh, features, training):
        loss = model_fn(mesh, features, training)
        return mtf.Print(loss, [loss], "the loss")

    with caplog.at_level("WARNING", logger="tensorflow"):
        result = trained(printing, jit_compile=True)
    assert "nothing is printed for 'the loss'" in caplog.text
    np.testing.assert_allclose(result.losses, trained().losses, rtol=2e-5)


@pytest.mark.parametrize(
    "options, text",
    [
        ({"jit_compile": "yes"}, r"jit_compile is True, False or \"auto\", but is 'yes'"),
        (
            {"jit_compile": True, "mesh_shape": "rows:2", "devices": ["cpu:0", "cpu:1"]},
            r"compiles a step for one device, but the mesh \[rows=2\] has 2: mesh_impl=\"pjrt\"",
        ),
        ({"jit_compile": True, "mesh_impl": "pjrt"}, "has every step compiled by XLA"),
        (
            {"jit_compile": True, "mesh_impl": OwnMeshImpl("a:1", "", [""])},
            "mesh_impl is of the class OwnMeshImpl, whose methods a compiled step would not call",
        ),
        ({"jit_compile": True, "optimizer": None}, "fit: jit_compile would have no effect here"),
    ],
)
def test_errors(options, text, request):
    if options.get("mesh_impl") == "pjrt":
        request.getfixturevalue("eight_devices")
    step = mtf.function(lambda features: tf.reduce_sum(features["x"]))
    with pytest.raises(ValueError, match=text):
        mtf.train.fit(
            step if "optimizer" in options else model_fn, DATA, 1, dims=DIMS, progress=False,
            **{"optimizer": mtf.optimize.AdamWOptimizer(0.01), **options},
        )  # fmt: skip


def test_replicate_merges_the_processors_of_one_device():
    def program(x):
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        x = mtf.import_tf_tensor(mesh, x, "batch:4,d:6")
        w = mtf.get_variable(mesh, "w", "d:6,h:8", initializer=tf.ones_initializer())
        y = mtf.einsum([x, w], "batch:4,h:8")
        impl = SimdMeshImpl("rows:2,cols:2", "batch:rows,h:cols", zero=3, zero_axis="rows")
        lowering = mtf.Lowering(mesh.graph, {mesh: impl})
        return lowering.export_to_tf_tensor(y)

    values = np.arange(24.0, dtype=np.float32).reshape(4, 6)
    with tf.Graph().as_default():
        fed = tf.placeholder(tf.float32, [4, 6])
        y = replicate(program, [fed], devices=["cpu:0"], jit_compile=True)
        [w] = tf.global_variables()
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            found = session.run(y, {fed: values})
            np.testing.assert_array_equal(session.run(w.read_value()), np.ones([6, 8]))
    np.testing.assert_allclose(found, np.tile(values.sum(1, keepdims=True), [1, 8]), rtol=1e-6)
    with tf.Graph().as_default(), pytest.raises(ValueError, match="one device, but there are 2"):
        replicate(program, [tf.ones([4, 6])], devices=["cpu:0", "cpu:1"], jit_compile=True)
