"""What a user does in the first hour, each in a process of its own, and the word that then helps.

Every program is a file that the user writes, of at most twelve lines; later ones import earlier ones.
"""

import os
import re
import shutil
import signal
import time

import pytest
from helpers import processes
from helpers.paths import TESTS

import mesh_tensorflow as mtf

MOST_LINES = 12

INSTALL = """
import mesh_tensorflow as mtf
print(mtf.__version__)
"""

FIRST = """
import mesh_tensorflow as mtf
mesh = mtf.Mesh(mtf.Graph(), "mesh")
batch, d_in, hidden = mtf.Dimension("batch", 4), mtf.Dimension("d_in", 3), mtf.Dimension("hidden", 2)
x = mtf.import_tf_tensor(mesh, [[1.0, 2.0, 3.0]] * 4, [batch, d_in])
w = mtf.get_variable(mesh, "w", [d_in, hidden])
h = mtf.relu(x @ w, name="layer")
print(h)
"""

LAYOUTS = """
from first import h, mesh, mtf
devices = ["cpu:0"] * 4
for layout in ["", "batch:rows", "batch:rows,hidden:cols"]:
    mesh.mesh_impl = mtf.placement_mesh_impl.PlacementMeshImpl("rows:2,cols:2", layout, devices)
    print(mesh.mesh_impl, "sum", float(mtf.reduce_sum(h)))
"""

TYPO = """
from first import mesh, mtf
impl = mtf.placement_mesh_impl.PlacementMeshImpl("rows:2", "bacth:rows", ["cpu:0"] * 2)
lowering = mtf.Lowering(mesh.graph, {mesh: impl})
"""

WRONG_SIZE = """
from first import mesh, mtf
impl = mtf.placement_mesh_impl.PlacementMeshImpl("rows:2", "d_in:rows", ["cpu:0"] * 2)
lowering = mtf.Lowering(mesh.graph, {mesh: impl})
"""

NAN = """
from first import h, mtf
with mtf.debug.nan_checks():
    y = mtf.log(-1.0 - h)  # of a negative number
    print(mtf.reduce_sum(y).numpy())
"""

LOOK = """
from first import hidden, mesh, mtf, x
impl = mtf.placement_mesh_impl.PlacementMeshImpl("rows:2", "batch:rows", ["cpu:0"] * 2)
with mtf.debug.collect("layer", processor=1) as values:
    mtf.Lowering(mesh.graph, {mesh: impl})
print("slice", values["layer"].shape, "of", mtf.reduce_sum(x, reduced_dim=x.shape.dims[1]))
"""

ATTEMPT = """
from first import x
x[0]
"""

SUMMARY = """
from first import mesh, mtf
impl = mtf.placement_mesh_impl.PlacementMeshImpl("cols:2", "hidden:cols", ["cpu:0"] * 2)
print(mtf.summary(mesh.graph, impl))
"""

REPORT = """
from first import mesh, mtf
impl = mtf.placement_mesh_impl.PlacementMeshImpl("cols:2", "hidden:cols", ["cpu:0"] * 2)
mtf.visualize.report(mesh.graph, "report.html", impl)
"""

MODEL = """
import numpy as np
import mesh_tensorflow as mtf
batch, pixels, hidden, classes = (mtf.Dimension(*d) for d in
                                  [("batch", 16), ("pixels", 64), ("hidden", 32), ("classes", 4)])
images = np.random.RandomState(0).rand(256, 64).astype(np.float32)
labels = (images @ np.random.RandomState(1).randn(64, 4)).argmax(1).astype(np.int32)
def model_fn(mesh, x, y):
    h = mtf.layers.dense(x, [hidden], [pixels], activation=mtf.relu, name="h")
    logits = mtf.layers.dense(h, [classes], [hidden], name="logits")
    y = mtf.one_hot(y, classes)
    return mtf.reduce_mean(mtf.layers.softmax_cross_entropy_with_logits(logits, y, classes))
"""

TRAIN = """
import sys
from model import *
result = mtf.train.fit(
    model_fn, (images, labels), steps=int(sys.argv[1]), dims=([batch, pixels], [batch]),
    optimizer=mtf.optimize.AdamWeightDecayOptimizer(learning_rate=0.01),
    mesh_shape="rows:2,cols:2", layout=sys.argv[2], directory="run")
print(f"step {result.step}: {result.losses[-1]:.5f}")
"""

PROGRAMS = {
    name.lower(): text
    for name, text in list(globals().items())
    if name.isupper() and isinstance(text, str)
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """Where the user writes the programs."""
    where = tmp_path_factory.mktemp("first_hour")
    for name, text in PROGRAMS.items():
        assert len(text.strip().splitlines()) <= MOST_LINES
        (where / f"{name}.py").write_text(text.lstrip())
    return where


def run(directory, name, *arguments, fails=False):
    """Runs a program; returns (what it printed, what it wrote to stderr)."""
    done = processes.run(directory / f"{name}.py", *arguments, cwd=directory)
    assert (done.returncode != 0) == fails, done.stderr
    if not fails:
        noise = [line for line in done.stderr.splitlines() if re.search(r"E0000|cancelled", line)]
        assert not noise
    return done.stdout, done.stderr


def test_install(directory):
    out, _ = run(directory, "install")
    assert out.strip() == mtf.__version__


@pytest.mark.slow
def test_install_from_source(directory, tmp_path):
    """pip makes a package of the sources that is imported from where it was installed."""
    source, site = tmp_path / "source", tmp_path / "site"
    shutil.copytree(TESTS.parent / "mesh_tensorflow", source / "mesh_tensorflow")
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(TESTS.parent / name, source)
    options = ["-q", "--no-deps", "--no-build-isolation", "--target", site]
    processes.python("-m", "pip", "install", *options, source)
    program = f"{INSTALL}print(mtf.__file__)"
    done = processes.python("-c", program, cwd=tmp_path, PYTHONPATH=str(site))
    assert done.stdout.split() == [mtf.__version__, str(site / "mesh_tensorflow" / "__init__.py")]


def test_first_program(directory):
    out, _ = run(directory, "first")
    assert re.match(
        r"Tensor\[layer:0, Shape\[batch=4, hidden=2\], <dtype: 'float32'>\] =\n\[\[", out
    )


def test_change_of_layout(directory):
    out, _ = run(directory, "layouts")
    lines = out.splitlines()[-3:]
    assert "no layout rules" in lines[0] and "layout batch:rows, hidden:cols" in lines[2]
    sums = [float(line.rpartition("sum ")[2]) for line in lines]
    assert sums == pytest.approx([sums[0]] * 3, rel=1e-6)


def test_typo_in_a_layout(directory):
    _, err = run(directory, "typo")
    assert "layout rule bacth:rows splits nothing" in err and "did you mean batch?" in err
    assert "typo.py:3" in err


def test_size_that_does_not_fit(directory):
    _, err = run(directory, "wrong_size", fails=True)
    assert "Make d_in a multiple of 2 (for instance 2 or 4)" in err.replace("\n", " ")
    assert "first.py" in err


def test_nan(directory):
    _, err = run(directory, "nan", fails=True)
    last = err[err.index("NonFiniteError") :]
    assert "log" in last and "NaN" in last and "nan.py" in last and "y = mtf.log(-1.0 - h)" in last


def test_look_at_a_tensor(directory):
    out, _ = run(directory, "look")
    assert "slice (2, 2) of Tensor[" in out and out.rstrip().endswith("[6. 6. 6. 6.]")


def test_what_a_user_tries(directory):
    _, err = run(directory, "attempt", fails=True)
    assert 'mtf.slice(x, begin, size, "a")' in err


def test_summary(directory):
    out, _ = run(directory, "summary")
    assert re.search(r"\bw\b.*3.*2", out) and "hidden" in out and "24 B" in out


def test_report(directory):
    run(directory, "report")
    page = (directory / "report.html").read_text(encoding="utf-8")
    assert "hidden over cols in 2 parts of 1" in page and "http" not in page.replace(
        "http://www.w3", ""
    )


def test_training_with_progress_and_resume_after_ctrl_c(directory):
    with processes.started(
        directory / "train.py", 1_000_000, "batch:rows", cwd=directory
    ) as training:
        deadline = time.monotonic() + 120
        while not re.search(r"step.*loss", "".join(training.texts())):
            assert training.process.is_alive() and time.monotonic() < deadline, training.texts()
            time.sleep(0.05)
        os.kill(training.process.pid, signal.SIGINT)
        done = training.end(60)
    assert done.returncode != 0 and re.search(r"steps/s, .* left, loss", done.stderr)
    stopped = re.search(r"Ctrl-C: stopped at step (\d+) of 1000000, saved as run\S+", done.stderr)
    assert stopped and "Run the same program again to go on from there" in done.stderr
    step = int(stopped[1])
    out, err = run(directory, "train", step + 20, "batch:rows,hidden:cols")
    assert f"going on from step {step}" in err and f"step {step + 20}" in out
