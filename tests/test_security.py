"""What docs/security.md says: which files run code, which are only read, and what listens."""

import ast
import importlib.util
import pathlib
import pickle
import re
import sys

import gin
import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import mesh_tensorflow as mtf
from mesh_tensorflow import launch
from mesh_tensorflow.bert import bert, tokenization
from mesh_tensorflow.transformer import utils

PACKAGE = pathlib.Path(mtf.__file__).parent
TEXT = (pathlib.Path(__file__).parents[1] / "docs" / "security.md").read_text()
# Functions that make code of data, and modules that do.
RUNS = {"eval", "exec", "compile", "__import__"}
MODULES = {
    "pickle",
    "cPickle",
    "dill",
    "cloudpickle",
    "joblib",
    "marshal",
    "shelve",
    "yaml",
    "torch",
}
DOWNLOADS = {"urllib", "requests", "http", "ftplib", "wget", "httpx"}
# What makes names that can be foreseen.
NAMES = {"mktemp"}


def sources():
    for path in sorted(PACKAGE.rglob("*.py")):
        yield path, ast.parse(path.read_text())


def imported(node):
    if isinstance(node, ast.Import):
        return {alias.name.split(".")[0] for alias in node.names}
    if isinstance(node, ast.ImportFrom):
        return {(node.module or "").split(".")[0]}
    return set()


@pytest.mark.slow
def test_nothing_in_the_package_makes_code_of_data_or_downloads():
    found = []
    for path, tree in sources():
        for node in ast.walk(tree):
            bad = imported(node) & (MODULES | DOWNLOADS)
            if isinstance(node, ast.Call):
                name = getattr(node.func, "id", None)
                attribute = getattr(node.func, "attr", None)
                bad |= {name} & RUNS | {attribute} & NAMES
                bad |= {k.arg for k in node.keywords} & {"allow_pickle", "shell"}
            if bad:
                found.append(f"{path.relative_to(PACKAGE)}:{node.lineno}: {', '.join(bad)}")
    assert not found, found


class Evil:
    """What runs code when it is unpickled."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return (open, (str(self.mark), "w"))


@pytest.fixture
def evil(tmp_path):
    """A file that would leave a mark if something unpickled it, and code as text."""
    path, mark = tmp_path / "evil-1.index", tmp_path / "mark"
    path.write_bytes(pickle.dumps(Evil(mark)))
    yield path
    assert not mark.exists(), "the file was run"
    pickle.loads(path.read_bytes()).close()
    assert mark.exists(), "the file would not have been seen to run"
    mark.unlink()


def test_a_checkpoint_is_data(evil):
    (evil.parent / "evil-1.data-00000-of-00001").write_bytes(evil.read_bytes())
    with pytest.raises(mtf.checkpoint.CheckpointError, match=r"evil-1.index cannot be read"):
        mtf.checkpoint.check_checkpoint(str(evil)[: -len(".index")], {}, read=True)


def test_vocabularies_texts_and_configurations_are_data(evil):
    code = f"__import__('pathlib').Path({str(evil.parent / 'mark')!r}).touch()"
    path = evil.parent / "code.txt"
    path.write_text(f"{code}\t{code}\n")
    with pytest.raises(ValueError, match="is not in UTF-8"):
        tokenization.load_vocab(str(evil))
    assert list(tokenization.load_vocab(str(path))) == [f"{code}\t{code}"]
    assert utils.get_inputs_from_file(str(path)) == [f"{code}\t{code}"]
    path.write_text(code)
    with pytest.raises(ValueError, match="is no JSON"):
        bert.BertConfig.from_json_file(str(path))


def test_records_are_data(evil):
    path = str(evil.parent / "records")
    with tf.io.TFRecordWriter(path) as writer:
        writer.write(evil.read_bytes())
    with tf.Graph().as_default(), tf.Session() as session:
        record = tf.data.make_one_shot_iterator(tf.data.TFRecordDataset(path)).get_next()
        parsed = tf.parse_single_example(record, {"x": tf.FixedLenFeature([], tf.int64)})
        # TensorFlow fails to put the bytes into its message.
        with pytest.raises((tf.errors.InvalidArgumentError, UnicodeDecodeError)):
            session.run(parsed)


@pytest.mark.skipif(importlib.util.find_spec("safetensors") is None, reason="needs safetensors")
def test_safetensors_are_data(evil):
    from mesh_tensorflow.transformer import convert

    target = evil.parent / "model.safetensors"
    target.write_bytes(evil.read_bytes())
    (evil.parent / "config.json").write_text("{}")
    with pytest.raises(Exception, match=r"(?i)header|safetensors|invalid"):
        convert.from_huggingface(str(evil.parent), str(evil.parent / "out"))


def test_gin_files_are_code(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "imported_by_gin.py").write_text(
        "import pathlib\npathlib.Path(__file__).with_name('mark').touch()\n"
    )
    (tmp_path / "file.gin").write_text("import imported_by_gin\n")
    gin.parse_config_files_and_bindings([str(tmp_path / "file.gin")], [], finalize_config=False)
    sys.modules.pop("imported_by_gin")
    assert (tmp_path / "mark").exists()
    assert "an `import` line imports a Python module" in TEXT


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/net")
def test_servers_listen_on_all_interfaces_as_the_document_says():
    address = launch._free_addresses(1)[0]
    assert launch.Processes((address,), 0).start_server()
    number = f"{int(address.rpartition(':')[2]):04X}"
    listening = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        if pathlib.Path(table).exists():
            rows = [line.split() for line in pathlib.Path(table).read_text().splitlines()[1:]]
            listening += [
                row[1].rpartition(":")[0]
                for row in rows
                if row[1].endswith(f":{number}") and row[3] == "0A"
            ]
    assert listening and all(set(host) == {"0"} for host in listening), (
        "the server listens on some interfaces only: docs/security.md says otherwise"
    )
    assert "**It listens on all interfaces**" in re.sub(r"\s+", " ", TEXT)


def test_texts_come_to_their_place_whole(tmp_path, monkeypatch):
    """Under a temporary name with a random part; an error leaves what was there."""
    path, names = tmp_path / "texts", []
    rename = tf.io.gfile.rename
    monkeypatch.setattr(
        tf.io.gfile,
        "rename",
        lambda old, new, overwrite=False: (names.append(old), rename(old, new, overwrite))[1],
    )
    for line in "ab":
        utils.write_lines_to_file([line], str(path))
    assert path.read_text() == "b\n" and [p.name for p in tmp_path.iterdir()] == ["texts"]
    assert len(set(names)) == 2
    for name in names:
        assert re.fullmatch(r"texts\.[0-9a-f]{32}\.tmp", pathlib.Path(name).name), name
    assert np.all([pathlib.Path(name).parent == tmp_path for name in names])
