"""Tests of the digits that examples/mnist.py trains on."""

from __future__ import annotations

import functools
import gzip
import hashlib
import http.server
import pathlib
import socket
import struct
import sys
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import tensorflow as tf
from helpers.paths import EXAMPLES

sys.path.insert(0, str(EXAMPLES))

import mnist_dataset

TRAIN_IMAGES, TRAIN_LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"
TEST_IMAGES, TEST_LABELS = "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"
NAMES = [TRAIN_IMAGES, TRAIN_LABELS, TEST_IMAGES, TEST_LABELS]


def idx_images(count: int, seed: int = 0, magic: int = 2051, size: int = 28) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, [count, size, size], np.uint8)
    return struct.pack(">IIII", magic, count, size, size) + pixels.tobytes()


def idx_labels(count: int, magic: int = 2049) -> bytes:
    labels = np.arange(count, dtype=np.uint8) % 10
    return struct.pack(">II", magic, count) + labels.tobytes()


def mnist_files() -> dict[str, bytes]:
    contents = [idx_images(30), idx_labels(30), idx_images(12, seed=1), idx_labels(12)]
    return dict(zip(NAMES, contents))


def write(
    directory: pathlib.Path, changes: dict[str, bytes | None] | None = None, zipped: bool = False
) -> None:
    """Writes the four files, some with other contents; None leaves a file out."""
    for name, content in {**mnist_files(), **(changes or {})}.items():
        if content is None:
            continue
        if zipped:
            (directory / f"{name}.gz").write_bytes(gzip.compress(content))
        else:
            (directory / name).write_bytes(content)


# --- The digits of scikit-learn ---


@pytest.fixture(scope="module")
def digits() -> mnist_dataset.Mnist:
    return mnist_dataset.load()


def test_digits_are_28_by_28_floats_from_0_to_1(digits: mnist_dataset.Mnist) -> None:
    images = np.concatenate([digits.train_images, digits.test_images])
    assert images.shape == (1797, 28, 28)
    assert images.dtype == np.float32
    assert images.min() == 0.0
    assert images.max() == 1.0
    assert digits.train_labels.dtype == digits.test_labels.dtype == np.int32
    assert "scikit-learn" in digits.source


def test_digits_keep_their_pictures(digits: mnist_dataset.Mnist) -> None:
    from sklearn import datasets

    # The mean of each 3 by 3 square inside the border is close to the original pixel.
    inside = digits.train_images[:300, 2:26, 2:26]
    small = inside.reshape([-1, 8, 3, 8, 3]).mean(axis=(2, 4)).reshape([-1, 64])
    originals = datasets.load_digits()
    distances = ((small[:, None] - originals.data[None] / 16) ** 2).mean(axis=2)
    assert np.array_equal(originals.target[distances.argmin(axis=1)], digits.train_labels[:300])
    assert distances.min(axis=1).max() < 0.01


def test_digits_split_is_disjoint(digits: mnist_dataset.Mnist) -> None:
    train = {image.tobytes() for image in digits.train_images}
    test = {image.tobytes() for image in digits.test_images}
    assert not train & test
    assert len(train) + len(test) == 1797


def test_digits_split_is_stratified(digits: mnist_dataset.Mnist) -> None:
    in_train = np.bincount(digits.train_labels, minlength=10)
    in_test = np.bincount(digits.test_labels, minlength=10)
    assert np.all(np.abs(in_test / (in_train + in_test) - 0.2) < 0.005)


def test_digits_split_is_the_same_every_time(digits: mnist_dataset.Mnist) -> None:
    again = mnist_dataset.load("")
    for name in ["train_images", "train_labels", "test_images", "test_labels"]:
        assert np.array_equal(getattr(again, name), getattr(digits, name))


def test_without_scikit_learn_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(ImportError, match="pip install scikit-learn, or pass --data_dir"):
        mnist_dataset.load()


# --- Batches ---


def batch_ids(batch_size: int, seed: int, epoch: int, count: int = 10) -> list[list[int]]:
    ids = np.arange(count)
    pairs = list(mnist_dataset.batches(ids, ids * 2, batch_size, seed, epoch))
    assert all(np.array_equal(labels, images * 2) for images, labels in pairs)
    return [list(images) for images, _ in pairs]


def test_batches_drop_the_remainder_and_repeat_nothing() -> None:
    batches = batch_ids(3, seed=0, epoch=0)
    assert [len(batch) for batch in batches] == [3, 3, 3]
    assert len({i for batch in batches for i in batch}) == 9


def test_batches_depend_on_seed_and_epoch_alone() -> None:
    assert batch_ids(10, seed=4, epoch=2) == batch_ids(10, seed=4, epoch=2)
    assert batch_ids(10, seed=4, epoch=2) != batch_ids(10, seed=4, epoch=3)
    assert batch_ids(10, seed=4, epoch=2) != batch_ids(10, seed=5, epoch=2)


@pytest.mark.parametrize("batch_size", [-1, 0, 11])
def test_batches_refuse_impossible_sizes(batch_size: int) -> None:
    with pytest.raises(ValueError, match=f"batch size {batch_size} for 10 training images"):
        batch_ids(batch_size, seed=0, epoch=0)


def test_batches_move_each_image_by_whole_pixels() -> None:
    images = np.zeros([50, 28, 28], np.float32)
    images[:, 10, 20] = 1
    first, second = (next(mnist_dataset.batches(images, images, 50, 0, 0, 2))[0] for _ in "ab")
    assert np.array_equal(first, second)
    assert np.array_equal(first.sum(axis=(1, 2)), np.ones(50))
    _, rows, columns = np.nonzero(first)
    assert set(rows) == set(range(8, 13)) and set(columns) == set(range(18, 23))


def test_batches_refuse_mismatched_labels() -> None:
    with pytest.raises(ValueError, match="3 images but 4 labels"):
        next(mnist_dataset.batches(np.zeros(3), np.zeros(4), 1, 0, 0))


# --- The files of MNIST ---


@pytest.mark.parametrize("zipped", [False, True], ids=["plain", "gz"])
def test_files_are_read(tmp_path: pathlib.Path, zipped: bool) -> None:
    write(tmp_path, zipped=zipped)
    data = mnist_dataset.load(str(tmp_path))
    pixels = np.frombuffer(idx_images(30)[16:], np.uint8).reshape([30, 28, 28])
    assert data.train_images.dtype == np.float32
    assert np.array_equal(np.rint(data.train_images * 255), pixels)
    assert data.train_images.max() == 1.0
    assert data.train_labels.dtype == np.int32
    assert list(data.train_labels) == [i % 10 for i in range(30)]
    assert data.test_images.shape == (12, 28, 28)
    assert data.test_labels.shape == (12,)
    assert data.source == f"MNIST in {tmp_path}"


def test_missing_files_are_listed(tmp_path: pathlib.Path) -> None:
    write(tmp_path, {TRAIN_LABELS: None, TEST_IMAGES: None})
    with pytest.raises(FileNotFoundError) as info:
        mnist_dataset.load(tmp_path)
    text = str(info.value)
    assert f"{tmp_path}: looked for {TRAIN_LABELS}[.gz], {TEST_IMAGES}[.gz]. " in text
    assert "Pass --download" in text


def test_missing_directory_is_not_made(tmp_path: pathlib.Path) -> None:
    with pytest.raises(FileNotFoundError, match="--download"):
        mnist_dataset.load(tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_directory_that_is_none(tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(NotADirectoryError, match="--data_dir has to be a directory"):
        mnist_dataset.load(tmp_path / "file", download=True)
    with pytest.raises(ValueError, match="pass --data_dir too"):
        mnist_dataset.load(download=True)


LABELS_TO_10 = struct.pack(">II", 2049, 30) + bytes(i % 11 for i in range(30))

WRONG = [
    (
        TRAIN_IMAGES,
        idx_images(30)[:-5],
        "expected 23536 bytes for the 30 examples in its header, found 23531 bytes",
    ),
    (
        TEST_LABELS,
        idx_labels(12) + b"x",
        "expected 20 bytes for the 12 examples in its header, found 21 bytes",
    ),
    (TEST_IMAGES, b"\0\0\x08\x03", "expected a header of 16 bytes, found 4 bytes"),
    (TRAIN_LABELS, b"", "expected a header of 8 bytes, found 0 bytes"),
    (TRAIN_IMAGES, idx_labels(30), "expected the magic number 2051, found 2049"),
    (TEST_LABELS, idx_images(12), "expected the magic number 2049, found 2051"),
    (TEST_IMAGES, idx_images(12, size=32), "expected images of 28x28, found 32x32"),
    (TEST_LABELS, idx_labels(0), "expected at least one example, found none"),
    (TRAIN_LABELS, idx_labels(29), "has 29 labels: expected as many labels as images"),
    (TRAIN_LABELS, LABELS_TO_10, "expected labels from 0 to 9, found 10"),
]


@pytest.mark.parametrize("zipped", [False, True], ids=["plain", "gz"])
@pytest.mark.parametrize("name, content, finding", WRONG)
def test_wrong_files_are_explained(
    tmp_path: pathlib.Path, name: str, content: bytes, finding: str, zipped: bool
) -> None:
    write(tmp_path, {name: content}, zipped)
    with pytest.raises(ValueError) as info:
        mnist_dataset.load(tmp_path)
    text = str(info.value)
    assert str(tmp_path / name) + (".gz" if zipped else "") in text
    assert finding in text
    assert "Delete" in text and "run again with --download" in text


def test_mismatched_counts_name_both_files(tmp_path: pathlib.Path) -> None:
    write(tmp_path, {TEST_IMAGES: idx_images(13)})
    with pytest.raises(ValueError) as info:
        mnist_dataset.load(tmp_path)
    assert "t10k-images-idx3-ubyte has 13 images but" in str(info.value)
    assert "Delete t10k-images-idx3-ubyte and t10k-labels-idx1-ubyte" in str(info.value)


@pytest.mark.parametrize("damage", ["cut", "not gzip", "bits"])
def test_damaged_gzip_is_explained(tmp_path: pathlib.Path, damage: str) -> None:
    write(tmp_path, zipped=True)
    path = tmp_path / f"{TRAIN_IMAGES}.gz"
    content = path.read_bytes()
    if damage == "cut":
        content = content[:-100]
    elif damage == "not gzip":
        content = b"<html>Not found</html>"
    else:
        content = content[:500] + bytes(200) + content[700:]
    path.write_bytes(content)
    with pytest.raises(ValueError) as info:
        mnist_dataset.load(tmp_path)
    text = str(info.value)
    assert f"{path}: expected a complete gzip file, found {len(content)} bytes" in text
    assert "run again with --download" in text


# --- Datasets of tf.data ---


@pytest.mark.parametrize("source", ["digits", "files"])
def test_datasets_give_flat_images_and_labels(tmp_path: pathlib.Path, source: str) -> None:
    write(tmp_path)
    directory = str(tmp_path) if source == "files" else None
    data = mnist_dataset.load(directory)
    for dataset, images, labels in [
        (mnist_dataset.train(directory), data.train_images, data.train_labels),
        (mnist_dataset.test(directory), data.test_images, data.test_labels),
    ]:
        assert isinstance(dataset, tf.compat.v1.data.Dataset)
        found_images, found_labels = next(iter(dataset.batch(len(images))))
        assert found_images.dtype == tf.float32 and found_labels.dtype == tf.int32
        assert np.array_equal(found_images.numpy(), images.reshape([-1, 784]))
        assert np.array_equal(found_labels.numpy(), labels)


def test_datasets_work_in_a_graph(tmp_path: pathlib.Path) -> None:
    write(tmp_path)
    with tf.Graph().as_default():
        dataset = mnist_dataset.test(tmp_path).batch(4)
        images, labels = tf.compat.v1.data.make_one_shot_iterator(dataset).get_next()
        with tf.compat.v1.Session() as session:
            found_images, found_labels = session.run([images, labels])
    assert found_images.shape == (4, 784)
    assert list(found_labels) == [0, 1, 2, 3]


# --- Download, from a server of our own ---


class Server(http.server.ThreadingHTTPServer):
    """Serves the four files; `contents` may be changed, `requests` are noted."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.contents = {f"/{n}.gz": gzip.compress(c, mtime=0) for n, c in mnist_files().items()}
        self.md5 = {
            path[1:-3]: hashlib.md5(content).hexdigest() for path, content in self.contents.items()
        }
        self.requests: list[str] = []
        self.missing_bytes = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.server.requests.append(self.path)
        content = self.server.contents.get(self.path)
        if content is None:
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content[: len(content) - self.server.missing_bytes])

    def log_message(self, format: str, *args: object) -> None:
        del format, args


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as running:
        thread = threading.Thread(target=running.serve_forever, daemon=True)
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def test_download_makes_a_directory_that_loads(tmp_path: pathlib.Path, server: Server) -> None:
    target = tmp_path / "new" / "mnist"
    mnist_dataset.fetch(target, base_url=server.url, md5=server.md5)
    assert sorted(path.name for path in target.iterdir()) == sorted(f"{n}.gz" for n in NAMES)
    assert len(mnist_dataset.load(target).train_images) == 30


def test_load_downloads_what_is_missing_and_no_more(
    tmp_path: pathlib.Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, {TEST_LABELS: None})
    fetch = mnist_dataset.fetch
    local = functools.partial(fetch, base_url=server.url, md5=server.md5)
    monkeypatch.setattr(mnist_dataset, "fetch", local)
    data = mnist_dataset.load(tmp_path, download=True)
    assert server.requests == [f"/{TEST_LABELS}.gz"]
    assert len(data.test_labels) == 12
    mnist_dataset.load(tmp_path, download=True)
    assert len(server.requests) == 1


def test_wrong_checksum_leaves_no_file(tmp_path: pathlib.Path, server: Server) -> None:
    name = NAMES[1]
    server.contents[f"/{name}.gz"] = b"something else"
    with pytest.raises(ValueError) as info:
        mnist_dataset.fetch(tmp_path, [name], server.url, server.md5)
    text = str(info.value)
    assert f"{server.url}{name}.gz: expected the MD5 sum {server.md5[name]}" in text
    assert f"found {hashlib.md5(b'something else').hexdigest()}" in text
    assert "Nothing was kept" in text
    assert not list(tmp_path.iterdir())


def test_checked_files_stay_when_a_later_one_is_wrong(
    tmp_path: pathlib.Path, server: Server
) -> None:
    server.contents[f"/{NAMES[1]}.gz"] = b"something else"
    with pytest.raises(ValueError):
        mnist_dataset.fetch(tmp_path, None, server.url, server.md5)
    assert [path.name for path in tmp_path.iterdir()] == [f"{NAMES[0]}.gz"]


@pytest.mark.parametrize("failure", ["not found", "cut off", "no server"])
def test_failed_download_leaves_no_file(
    tmp_path: pathlib.Path, server: Server, failure: str
) -> None:
    url = server.url
    if failure == "not found":
        server.contents.clear()
    elif failure == "cut off":
        server.missing_bytes = 10
    else:
        url = "http://127.0.0.1:9/"
    with pytest.raises((ConnectionError, ValueError)) as info:
        mnist_dataset.fetch(tmp_path, NAMES[:1], url, server.md5, timeout=10)
    assert f"{url}{NAMES[0]}.gz" in str(info.value)
    assert "Nothing was kept" in str(info.value)
    assert not list(tmp_path.iterdir())


def test_silent_server_times_out(tmp_path: pathlib.Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/"
        with pytest.raises(ConnectionError, match="timed out"):
            mnist_dataset.fetch(tmp_path, NAMES[:1], url, timeout=0.2)
    assert not list(tmp_path.iterdir())
