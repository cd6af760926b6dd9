"""Explanations say what estimates say; the command line; a measured profile."""

import json

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.auto_mtf import __main__ as command
from mesh_tensorflow.auto_mtf import explanation, hardware, measure, models
from mesh_tensorflow.auto_mtf._units import layer_kind
from mesh_tensorflow.auto_mtf.step_time import StepEstimator

TINY = {
    "batch": 8,
    "length": 8,
    "vocab": 16,
    "d_model": 16,
    "layers": 2,
    "heads": 4,
    "d_kv": 4,
    "d_ff": 32,
}
SLOW = hardware.Hardware("slow", {"float32": 1e9}, 1e8, 1e9, hardware.Link(1e8, 1e-6))
LIMIT = 67.5e3


@pytest.fixture
def explained(tf_graph):
    program = models.language_model(**TINY)
    return mtf.auto_mtf.explain(
        program.graph, "m:2,n:2", program.outputs, memory_limit_bytes=LIMIT, hardware=SLOW
    )


def test_explains_the_best(explained):
    chosen = explained.chosen
    assert chosen == explained.estimator.solve(LIMIT)
    assert chosen.peak_bytes == explained.memory_over_time.max() <= LIMIT
    text = str(explained)
    assert f"layout  {chosen.text}\n" in text and "mesh    m=2, n=2 of slow" in text
    assert f"{chosen.peak_bytes / 1024:.3g} KiB at the peak, fits in 65.9 KiB" in text
    for kind, held in explained.estimator.peak_by_kind(chosen.layout).items():
        assert f"{held / 1024:.3g} KiB {kind}" in text or held < 1024
    assert "layer/attention/gradients" in text
    by_layer = explained.estimator.times.by_layer(chosen.layout)
    assert sum(s.total for s in by_layer.values()) == pytest.approx(chosen.seconds.total)


@pytest.mark.slow
def test_explains_the_others(explained):
    times = [a.estimate.seconds.total for a in explained.alternatives]
    assert times == sorted(times) and len(set(times)) == len(times) >= 3
    large = [a for a in explained.alternatives if a.estimate.peak_bytes > LIMIT]
    assert large and all(a.why.startswith("does not fit: ") for a in large)
    rest = [a for a in explained.alternatives if a not in large]
    assert all("compute" in a.why or "communication" in a.why for a in rest)
    for a in rest:
        assert a.estimate.seconds.total > explained.chosen.seconds.total
    assert "other layouts" in str(explained)


def test_explains_a_layout(tf_graph):
    program = models.language_model(**TINY, optimizer=None)
    given = explanation.explain(
        program.graph, "m:2,n:2", program.outputs, layout="batch:m", hardware=SLOW, alternatives=2
    )
    assert given.chosen.layout == {"batch": "m"}
    best = given.alternatives[0]
    assert len(given.alternatives) == 2
    assert best.estimate.seconds.total < given.chosen.seconds.total and " -" in best.why
    assert "DOES NOT FIT" not in str(given)
    small = hardware.PROFILES["tpu_v2"].replace(memory_bytes=1e3)
    assert "DOES NOT FIT in 1,000 B" in str(
        explanation.explain(
            program.graph, "m:2,n:2", program.outputs, layout="", hardware=small, alternatives=0
        )
    )
    memory = explanation.explain(program.graph, "m:2,n:2", program.outputs, objective="memory")
    rules = mtf.auto_mtf.layout(program.graph, "m:2,n:2", program.outputs)
    assert set(memory.chosen.layout.items()) == rules._pairs


def test_empty_program():
    text = str(mtf.auto_mtf.explain(mtf.Graph(), "m:2"))
    assert "no splits" in text and "0 B at the peak" in text


@pytest.mark.slow
def test_plot(explained, tmp_path):
    path = tmp_path / "layout.png"
    explained.plot(str(path))
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG") and len(data) > 20_000
    path = tmp_path / "layout.svg"
    explained.plot(str(path))
    assert "<svg" in path.read_text() and "time by layer" in path.read_text()


def test_plot_without_matplotlib(explained, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="a plot needs matplotlib: pip install"):
        explained.plot("x.png")


# -- the command line


BINDINGS = [f"--gin_param=language_model.{k}={v}" for k, v in TINY.items()]


@pytest.mark.slow
def test_command(capsys, tmp_path):
    path = tmp_path / "x.png"
    SLOW.save(str(tmp_path / "slow.json"))
    machine = f"--hardware={tmp_path / 'slow.json'}"
    assert command.main(["--mesh_shape=m:2,n:2", *BINDINGS, f"--plot={path}", machine]) == 0
    printed = capsys.readouterr().out
    assert "mesh    m=2, n=2 of slow" in printed and path.exists()
    with tf.Graph().as_default():
        program = models.language_model(**TINY)
        best = StepEstimator(program.graph, "m:2,n:2", program.outputs, SLOW).solve()
    assert f"layout  {best.text}\n" in printed


@pytest.mark.slow
def test_command_with_a_file_and_a_mesh_to_choose(capsys, tmp_path):
    file = tmp_path / "model.gin"
    file.write_text("\n".join(f"language_model.{k} = {v}" for k, v in TINY.items()))
    assert command.main([f"--gin_file={file}", "--processors=4", "--layout=batch:mesh_0"]) == 0
    printed = capsys.readouterr().out
    assert "layout  batch:mesh_0\n" in printed and "mesh_0=" in printed


def test_command_for_layouts_that_join_mesh_dimensions(capsys):
    arguments = ["--mesh_shape=m:2,n:2", f"--model={__name__}:forward_pair", "--alternatives=12"]
    for joint in ([], ["--joint"]):
        assert command.main([*arguments, *joint]) == 0
        assert (":m+n" in capsys.readouterr().out) == bool(joint)


def forward_pair():
    """A function for --model that returns a graph and its outputs."""
    program = models.language_model(**TINY, optimizer=None)
    return program.graph, program.outputs


def test_command_with_a_function(capsys):
    assert command.main(["--mesh_shape=m:2", f"--model={__name__}:forward_pair"]) == 0
    assert "optimizer" not in capsys.readouterr().out


@pytest.mark.slow_but(3)
@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--memory_limit_bytes=100"], "no layout fits in 100 B"),
        (["--model=nowhere:build"], "--model=nowhere:build: No module named"),
        (["--model=language_model"], "is no function: write it as package.module:function"),
        (["--hardware=abacus"], "unknown hardware 'abacus'"),
        (["--layout=batch"], "malformed layout"),
        (["--gin_param=language_model.optimizer='newton'"], "optimizer 'newton' is none of sgd"),
    ],
)
def test_command_that_fails(capsys, arguments, message):
    code = 1 if "no layout" in message else 2  # there is none, or the command line is wrong
    assert command.main(["--mesh_shape=m:2", *BINDINGS, *arguments]) == code
    assert message in capsys.readouterr().err


def test_layer_kinds():
    kind = layer_kind
    assert kind("layer_3/dense/einsum") == kind("layer_12/dense/relu_4") == "layer/dense"
    assert kind("layer_3/dense/einsum/gradients/einsum_2") == "layer/dense/gradients"
    assert kind("einsum_7") == "einsum" and kind("einsum_7/gradients/add") == "gradients"


# -- measuring


def test_fit():
    columns = np.array([[1.0, 2.0, 0.0], [3.0, 1.0, 0.0], [1.0, 1.0, 0.0], [2.0, 0.0, 0.0]])
    assert measure._fit(columns, columns @ [2.0, 3.0, 0.0]) == pytest.approx([2.0, 3.0, 0.0])
    assert measure._fit(columns, columns @ [2.0, -0.5, 0.0])[1] == 0.0


@pytest.mark.parametrize("milliseconds, lanes", [
    ([1, 2, 4, 8], 4), ([2, 2.1, 4, 8], 8), ([4, 4, 4.1, 8], 16), ([4, 4, 4, 4], 16),
])  # fmt: skip
def test_vectors_by_times_of_convolutions(milliseconds, lanes, monkeypatch):
    """Twice as many channels take twice as long from a full vector on; other load is left out."""
    times = iter([*(3 * t for t in milliseconds), *milliseconds, *(2 * t for t in milliseconds)])
    monkeypatch.setattr(measure, "_seconds_of", lambda *unused: next(times))
    assert measure._lanes(4, 1, lambda: None) == lanes


@pytest.mark.slow
@pytest.mark.parametrize("placement", ["simd", "shared"])
def test_measured_profile(placement, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(measure, "_FITTED", measure._FITTED[:1])
    monkeypatch.setattr(measure, "_LAYOUTS", measure._LAYOUTS[:2])
    monkeypatch.setattr(measure, "_PRODUCTS", measure._PRODUCTS[:1])
    monkeypatch.setattr(measure, "_CONVOLUTIONS", [(4, 10, 1, 2)])
    monkeypatch.setattr(measure, "_ELEMENTS", 1 << 16)
    path = tmp_path / "machine.json"
    assert measure.main([f"--output={path}", "--runs=1", f"--placement={placement}"]) == 0
    printed = capsys.readouterr().out
    assert "memory: " in printed and "each operation: " in printed
    machine = hardware.hardware_profile(str(path))
    assert machine.one_memory == (placement == "shared")
    assert set(machine.flops) == {"float32", *measure._KERNELS}
    assert machine.vector_bytes in (16, 32, 64)
    assert f"vectors of {machine.vector_bytes} bytes" in printed
    assert json.loads(path.read_text())["source"].startswith("measured, ")
    assert machine.operation_seconds >= 0 and machine.link.bandwidth > 0


@pytest.mark.slow_but(1)
@pytest.mark.parametrize("kind", ["lm_base", "bi_base"])
def test_transformers_of_gin_files(kind, capsys):
    sizes = {
        "num_layers": 1,
        "d_model": 16,
        "d_ff": 32,
        "num_heads": 4,
        "d_kv": 4,
        "utils.run.sequence_length": "{'inputs': 16, 'targets': 8}",
        "gin_transformer.vocab_size": 32,
        "gin_transformer.batch_size": 8,
    }
    arguments = [f"--gin_param={k}={v}" for k, v in sizes.items()]
    code = command.main(
        [
            "--mesh_shape=rows:2,cols:2",
            "--model=mesh_tensorflow.auto_mtf.gin_models:gin_transformer",
            "--gin_file=defaults.gin",
            f"--gin_file=models/{kind}.gin",
            "--alternatives=0",
            *arguments,
        ]
    )
    printed = capsys.readouterr()
    assert code == 0, printed.err
    assert ("encoder/" in printed.out) == (kind == "bi_base")
    assert "DenseReluDense" in printed.out and " slots " in printed.out
