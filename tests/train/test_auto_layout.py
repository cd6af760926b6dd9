"""Layouts that fit chooses: by steps that are run, of what the cost model prefers."""

import contextlib
import json
import time

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.auto_mtf import hardware
from mesh_tensorflow.auto_mtf.measured import Auto, choose_on
from mesh_tensorflow.auto_mtf.profiles import Processors

DIMS = {"x": "batch:8,i:12", "y": "batch:8,o:1"}
X = np.linspace(-1.0, 1.0, 192).reshape(16, 12).astype(np.float32)
SHAPE = mtf.convert_to_shape("rows:2,cols:2")


def model_fn(mesh, features):
    x = features["x"]
    h = mtf.layers.dense(
        x, [mtf.Dimension("h", 16)], x.shape.dims[1:], activation=mtf.relu, name="a"
    )
    y = mtf.layers.dense(h, [mtf.Dimension("o", 1)], h.shape.dims[1:], name="b")
    return mtf.reduce_mean(mtf.square(y - features["y"]))


def trained(**kwargs):
    return mtf.train.fit(
        model_fn, {"x": X, "y": X.sum(1, keepdims=True)}, 4, dims=DIMS, log_every=1,
        optimizer=mtf.optimize.AdamWOptimizer(0.01), **{"progress": False, **kwargs},
    )  # fmt: skip


@pytest.mark.slow("simd", "pjrt")
@pytest.mark.parametrize("impl", ["placement", "simd", "pjrt"])
def test_the_run_is_that_of_any_layout(impl, tmp_path, capsys, request):
    if impl == "pjrt":
        request.getfixturevalue("eight_devices")
    auto = Auto(seconds=30, candidates=2, cache=str(tmp_path / "layouts.json"))
    options = {"mesh_shape": SHAPE, "mesh_impl": impl, "layout": auto}
    result = trained(**options, progress=True)
    np.testing.assert_allclose(result.losses, trained().losses, rtol=1e-5)
    shown = capsys.readouterr().err
    assert f"layout {result.layout or 'no splits'}: the fastest of" in shown
    assert "predicted ms  measured ms" in shown and "in an earlier run" not in shown
    again = trained(**options, progress=True)
    assert "in an earlier run" in capsys.readouterr().err
    assert again.layout == result.layout
    # As a user writes it.
    written = trained(mesh_shape=SHAPE, mesh_impl=impl, layout=result.layout)
    np.testing.assert_allclose(written.losses, result.losses, rtol=1e-6)


def graph():
    made = mtf.Graph()
    with tf.Graph().as_default():
        given = tf.placeholder(tf.float32, [64, 64])
        x = mtf.import_tf_tensor(mtf.Mesh(made, "mesh"), given, "batch:64,i:64")
        y = mtf.layers.dense(x, [mtf.Dimension("h", 64)], x.shape.dims[1:], name="a")
        mtf.gradients([mtf.reduce_sum(y)], [v.value for v in made.trainable_variables])
    return made


def chosen(run, tmp_path, **kwargs):
    # Sums that take no time, so that all layouts are fast.
    known = hardware.local_machine(4, one_memory=False).replace(link=hardware.Link(1e9, 0.0))
    options = {"hardware": known, "profile": False, **kwargs}
    auto = Auto(cache=str(tmp_path / "layouts.json"), **options)
    machine = Processors(SHAPE, [f"cpu:{i}" for i in range(4)])
    return choose_on(machine, graph(), auto, None, run)


def runner(seconds_of, tried):
    @contextlib.contextmanager
    def run(layout):
        tried.append(layout)
        yield lambda: time.sleep(seconds_of(layout))

    return run


def test_the_machine_decides(tmp_path):
    """Not the cost model, to which what is not split is the slowest."""
    tried = []
    choice = chosen(runner(lambda layout: 0.003 if layout else 0.0, tried), tmp_path)
    assert len(tried) == len(set(tried)) == 4 and tried[-1] == ""
    assert choice.layout == "" and not choice.known
    predicted = {one.layout: one.predicted for one in choice.tried}
    assert max(predicted, key=predicted.get) == ""
    assert [one.measured for one in choice.tried] == sorted(one.measured for one in choice.tried)
    # Of the cache, even where all would be different now; a damaged one is written anew.
    again = chosen(runner(lambda layout: 0.0, tried), tmp_path)
    assert again.known and again[:2] == choice[:2] and len(tried) == 4
    (tmp_path / "layouts.json").write_text("{")
    assert not chosen(runner(lambda layout: 0.0, tried), tmp_path).known
    assert len(json.loads((tmp_path / "layouts.json").read_text())) == 1


def test_time_and_memory_run_out(tmp_path):
    tried = []
    choice = chosen(runner(lambda layout: 0.002, tried), tmp_path, seconds=1e-3, candidates=2)
    assert tried == [choice.layout] and len(choice.tried) == 3
    assert "not tried within 0.001 s" in str(choice)

    def too_large(layout):
        if layout:
            raise tf.errors.ResourceExhaustedError(None, None, "no memory")
        return 0.0

    choice = chosen(runner(too_large, []), tmp_path, candidates=1)
    assert choice.layout == "" and "out of memory" in str(choice)
    with pytest.raises(tf.errors.ResourceExhaustedError):
        chosen(runner(lambda layout: too_large("all"), []), tmp_path, memory_limit_bytes=1e9)
    with pytest.raises(mtf.auto_mtf.step_time.MemoryLimitError, match="no layout fits"):
        chosen(runner(lambda layout: 0.0, []), tmp_path, memory_limit_bytes=10)


def test_on_one_device_nothing_is_split():
    """All layouts are one program; where it is too large, the error is that of any mesh."""
    auto, one, tried = {"cache": "", "profile": False}, Processors(SHAPE, ["cpu:0"] * 4), []
    run = runner(lambda layout: 0.0, tried)
    choice = choose_on(one, graph(), Auto(**auto), None, run)
    assert choice.layout == "" and tried == [""]
    with pytest.raises(mtf.auto_mtf.step_time.MemoryLimitError, match="no layout fits"):
        too_few = Auto(memory_limit_bytes=10, **auto)
        choose_on(one, graph(), too_few, None, run)


def test_mistakes():
    impl = mtf.placement_mesh_impl.PlacementMeshImpl("all:1", "", ["cpu:0"])
    with pytest.raises(ValueError, match="layout='auto' is given besides mesh_impl, which has"):
        trained(layout="auto", mesh_impl=impl)
    with pytest.raises(ValueError, match="seconds must be more than 0, and candidates 1 or more"):
        Auto(seconds=0)


@pytest.mark.parametrize(
    "kind, name",
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("TPU v4", "tpu_v4"),
        ("Tesla V100-SXM2", "v100"),
    ],
)
def test_known_devices(kind, name):
    assert hardware.named_like(kind).name == name
    assert hardware.named_like("NVIDIA L4") is None
