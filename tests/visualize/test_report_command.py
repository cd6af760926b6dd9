"""`python -m mesh_tensorflow.report`: the program that training would run, without training."""

import pytest
import tensorflow.compat.v1 as tf
from helpers import processes

from mesh_tensorflow import _units as units
from mesh_tensorflow import report as command

ARGUMENTS = [
    "--gin_file=models/lm_base.gin",
    "--gin_param=utils.run.model_type = 'lm'",
    "--gin_param=utils.run.sequence_length = {'targets': 16}",
    "--gin_param=Unitransformer.max_length = 16",
    "--gin_param=num_layers = 1",
    "--gin_param=d_model = 16",
    "--gin_param=d_ff = 32",
    "--gin_param=utils.run.batch_size = 8",
    "--vocab_size=128",
    "--mesh_shape=rows:2,cols:2",
    "--layout=batch:rows,d_ff:cols,vocab:cols",
]


@pytest.mark.slow
def test_command(tf_graph, tmp_path, capsys):
    path = tmp_path / "report.html"
    assert command.main([*ARGUMENTS, f"--output={path}", "--title=A small one"]) == 0
    printed = capsys.readouterr()
    assert "mesh            rows=2, cols=2: 4 processors\n" in printed.out
    assert f"report          {path}\n" in printed.out and "checkpoints" not in printed.err
    text = path.read_text(encoding="utf-8")
    assert "<title>A small one</title>" in text and "batch:rows;d_ff:cols;vocab:cols" in text
    # The embedding [vocab=128, d_model=16] is split in two over cols.
    assert "vocab over cols in 2 parts of 64" in text
    assert units.bytes_text(64 * 16 * 4) in text
    assert not tf.get_default_graph().get_operations()  # built in a graph of its own


def test_mistakes(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        command.main(["--mesh_shape=rows:2"])
    assert ended.value.code == 2
    assert "--gin_file or --gin_param must say what the model is" in capsys.readouterr().err
    with pytest.raises(ValueError, match="The nearest names are"):
        command.main(["--gin_param=utils.run.modle_type = 'lm'", f"--output={tmp_path}/r.html"])


@pytest.mark.slow
def test_command_in_a_process(tmp_path):
    done = processes.python(
        "-m", "mesh_tensorflow.report", *ARGUMENTS, "--no_explanation", cwd=tmp_path
    )
    assert "report          report.html" in done.stdout
    assert "<h2>Communication</h2>" in (tmp_path / "report.html").read_text(encoding="utf-8")
