"""Handwritten digits for the MNIST example: scikit-learn's by default, MNIST from files.

Without a directory, `load()` returns the 1797 digits that come with scikit-learn, scaled up to
28 by 28 pixels: nothing is downloaded and nothing is written. With a directory it reads the four
idx files of MNIST there, plain or gzipped, and verifies each of them before use. It downloads
missing files only on request.
"""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import http.client
import os
import pathlib
import struct
import urllib.request
import zlib
from collections.abc import Iterator, Mapping

import numpy as np
import tensorflow.compat.v1 as tf

IMAGE_SIZE = 28
NUM_CLASSES = 10

BASE_URL = "https://storage.googleapis.com/cvdf-datasets/mnist/"
# The MNIST file names without ".gz", and the MD5 sum of each gzipped file.
TRAIN_IMAGES = "train-images-idx3-ubyte"
TRAIN_LABELS = "train-labels-idx1-ubyte"
TEST_IMAGES = "t10k-images-idx3-ubyte"
TEST_LABELS = "t10k-labels-idx1-ubyte"
MD5 = {
    TRAIN_IMAGES: "f68b3c2dcbeaaa9fbdd348bbdeb94873",
    TRAIN_LABELS: "d53e105ee54ea40749a09fcbcd1e9432",
    TEST_IMAGES: "9fb629c4189551a2d022fa330f9573f3",
    TEST_LABELS: "ec29112dd5afa0611ce80d1b7f02629c",
}

_IMAGES_MAGIC = 2051  # unsigned bytes, 3 dimensions
_LABELS_MAGIC = 2049  # unsigned bytes, 1 dimension
_SPLIT_SEED = 0
_TEST_FRACTION = 0.2
_CHUNK = 1 << 16

PathLike = str | os.PathLike[str]


@dataclasses.dataclass(frozen=True)
class Mnist:
    """Images [n, 28, 28] as float32 from 0 to 1, and their labels [n] as int32 from 0 to 9."""

    train_images: np.ndarray
    train_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray
    source: str


def load(data_dir: PathLike | None = None, download: bool = False) -> Mnist:
    """Returns the digits of scikit-learn or, given a directory, MNIST from its files.

    Args:
      data_dir: the directory with the four idx files, plain or ".gz"; None or "" for the
        digits of scikit-learn.
      download: whether to download files that are missing from `data_dir`.

    Raises:
      FileNotFoundError: files are missing and `download` is false.
      ValueError: a file is invalid, or `download` is set without `data_dir`.
      ConnectionError: a download failed.
    """
    if data_dir:
        return _load_files(pathlib.Path(data_dir), download)
    if download:
        raise ValueError("download needs a directory to download to: pass --data_dir too")
    return _load_digits()


def batches(
    images: np.ndarray,
    labels: np.ndarray,
    batch_size: int,
    seed: int,
    epoch: int,
    max_shift: int = 0,
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields the training batches of one epoch.

    They depend only on `seed` and `epoch`, so a resumed run sees the same batches. An incomplete
    last batch is dropped, with different examples in each epoch. With `max_shift`, every image is
    shifted at random by up to that many pixels in both directions.
    """
    if len(images) != len(labels):
        raise ValueError(f"{len(images)} images but {len(labels)} labels")
    if not 1 <= batch_size <= len(images):
        raise ValueError(
            f"batch size {batch_size} for {len(images)} training images: "
            f"choose one from 1 to {len(images)}"
        )
    rng = np.random.default_rng([seed, epoch])
    order = rng.permutation(len(images))
    for start in range(0, len(images) - batch_size + 1, batch_size):
        chosen = order[start : start + batch_size]
        moved = _move_at_random(images[chosen], max_shift, rng) if max_shift else images[chosen]
        yield moved, labels[chosen]


def _move_at_random(images: np.ndarray, most: int, rng: np.random.Generator) -> np.ndarray:
    _, height, width = images.shape
    padded = np.pad(images, [(0, 0), (most, most), (most, most)])
    corners = rng.integers(0, 2 * most + 1, [len(images), 2])
    return np.stack([x[i : i + height, j : j + width] for x, (i, j) in zip(padded, corners)])


def train(directory: PathLike | None = None) -> tf.data.Dataset:
    """Returns the training examples as a dataset of (784 floats from 0 to 1, int32 label)."""
    data = load(directory)
    return _as_tf_dataset(data.train_images, data.train_labels)


def test(directory: PathLike | None = None) -> tf.data.Dataset:
    """Returns the test examples as a dataset of (784 floats from 0 to 1, int32 label)."""
    data = load(directory)
    return _as_tf_dataset(data.test_images, data.test_labels)


def _as_tf_dataset(images: np.ndarray, labels: np.ndarray) -> tf.data.Dataset:
    # Bytes, since images become a constant in the graph, and bytes are a quarter of the size.
    pixels = np.rint(images.reshape([len(images), -1]) * 255).astype(np.uint8)
    dataset = tf.data.Dataset.from_tensor_slices((pixels, labels))
    return dataset.map(lambda image, label: (tf.cast(image, tf.float32) / 255.0, label))


# --- The digits of scikit-learn ---


def _load_digits() -> Mnist:
    try:
        from sklearn import datasets
    except ImportError as error:
        raise ImportError(
            "the default digits come with scikit-learn, which is not installed: "
            "pip install scikit-learn, or pass --data_dir with the files of MNIST"
        ) from error
    digits = datasets.load_digits()
    images = _enlarge(digits.images / 16.0)
    labels = digits.target.astype(np.int32)
    train_ids, test_ids = _stratified_split(labels)
    return Mnist(
        images[train_ids],
        labels[train_ids],
        images[test_ids],
        labels[test_ids],
        source=f"scikit-learn digits ({len(images)} images of 8x8, enlarged to 28x28)",
    )


def _enlarge(images: np.ndarray) -> np.ndarray:
    """Enlarges [n, 8, 8] to [n, 28, 28]: three times by cubic splines, then a black border.

    Spline interpolation is linear and separable, so a single 24 by 8 matrix of interpolated unit
    vectors computes it. Values are rounded to the 256 gray levels of MNIST.
    """
    from scipy import ndimage  # scikit-learn depends on it

    weights = ndimage.zoom(np.eye(8), [3, 1], order=3, mode="grid-constant", grid_mode=True)
    large = np.einsum("yh,nhw,xw->nyx", weights, images, weights)
    gray = np.rint(np.clip(large, 0.0, 1.0) * 255)
    border = (IMAGE_SIZE - gray.shape[1]) // 2
    padded = np.pad(gray, [(0, 0), (border, border), (border, border)])
    return padded.astype(np.float32) / np.float32(255)


def _stratified_split(labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns shuffled training and test indices, with equal shares of each class in both."""
    rng = np.random.default_rng(_SPLIT_SEED)
    train_parts, test_parts = [], []
    for label in range(NUM_CLASSES):
        members = rng.permutation(np.flatnonzero(labels == label))
        num_test = round(len(members) * _TEST_FRACTION)
        test_parts.append(members[:num_test])
        train_parts.append(members[num_test:])
    return rng.permutation(np.concatenate(train_parts)), rng.permutation(np.concatenate(test_parts))


# --- The files of MNIST ---


def _load_files(directory: pathlib.Path, download: bool) -> Mnist:
    if directory.exists() and not directory.is_dir():
        raise NotADirectoryError(f"{directory} is a file: --data_dir has to be a directory")
    missing = [name for name in MD5 if _find(directory, name) is None]
    if missing and download:
        fetch(directory, missing)
    elif missing:
        looked_for = ", ".join(f"{name}[.gz]" for name in missing)
        raise FileNotFoundError(
            f"no MNIST in {directory}: looked for {looked_for}. Pass --download to fetch "
            "them, or leave out --data_dir to use the digits of scikit-learn"
        )
    train_images, train_labels = _read_pair(directory, TRAIN_IMAGES, TRAIN_LABELS)
    test_images, test_labels = _read_pair(directory, TEST_IMAGES, TEST_LABELS)
    return Mnist(train_images, train_labels, test_images, test_labels, f"MNIST in {directory}")


def _find(directory: pathlib.Path, name: str) -> pathlib.Path | None:
    for candidate in (directory / name, directory / f"{name}.gz"):
        if candidate.is_file():
            return candidate
    return None


def _read_pair(
    directory: pathlib.Path, images_name: str, labels_name: str
) -> tuple[np.ndarray, np.ndarray]:
    images_path, labels_path = _find(directory, images_name), _find(directory, labels_name)
    if images_path is None or labels_path is None:
        raise FileNotFoundError(f"no {images_name}[.gz] or no {labels_name}[.gz] in {directory}")
    pixels = _read_idx(images_path, _IMAGES_MAGIC, (IMAGE_SIZE, IMAGE_SIZE))
    labels = _read_idx(labels_path, _LABELS_MAGIC, ())
    if len(pixels) != len(labels):
        raise ValueError(
            f"{images_path} has {len(pixels)} images but {labels_path} has {len(labels)} labels: "
            f"expected as many labels as images. {_mend(images_path, labels_path)}"
        )
    if labels.max() >= NUM_CLASSES:
        raise ValueError(
            f"{labels_path}: expected labels from 0 to {NUM_CLASSES - 1}, found {labels.max()}. "
            f"{_mend(labels_path)}"
        )
    return pixels.astype(np.float32) / np.float32(255), labels.astype(np.int32)


def _read_idx(path: pathlib.Path, magic: int, example_shape: tuple[int, ...]) -> np.ndarray:
    """Reads a file of unsigned bytes [n] + example_shape and checks its header and size."""
    content = _read_bytes(path)
    header_size = 4 * (2 + len(example_shape))
    if len(content) < header_size:
        raise ValueError(
            f"{path}: expected a header of {header_size} bytes, found {len(content)} bytes in "
            f"all. {_mend(path)}"
        )
    found_magic, count, *found_shape = struct.unpack(
        f">{2 + len(example_shape)}I", content[:header_size]
    )
    if found_magic != magic:
        raise ValueError(
            f"{path}: expected the magic number {magic}, found {found_magic}. {_mend(path)}"
        )
    if tuple(found_shape) != example_shape:
        raise ValueError(
            f"{path}: expected images of {_by(example_shape)}, found {_by(found_shape)}. "
            f"{_mend(path)}"
        )
    if count == 0:
        raise ValueError(f"{path}: expected at least one example, found none. {_mend(path)}")
    size = header_size + count * int(np.prod(example_shape, dtype=np.int64))
    if len(content) != size:
        raise ValueError(
            f"{path}: expected {size} bytes for the {count} examples in its header, found "
            f"{len(content)} bytes. {_mend(path)}"
        )
    return np.frombuffer(content, np.uint8, offset=header_size).reshape([count, *example_shape])


def _read_bytes(path: pathlib.Path) -> bytes:
    if path.suffix != ".gz":
        return path.read_bytes()
    try:
        with gzip.open(path) as stream:
            return stream.read()
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(
            f"{path}: expected a complete gzip file, found {path.stat().st_size} bytes that do "
            f"not unpack ({error}). {_mend(path)}"
        ) from error


def _by(shape: tuple[int, ...] | list[int]) -> str:
    return "x".join(map(str, shape))


def _mend(*paths: pathlib.Path) -> str:
    names = " and ".join(path.name for path in paths)
    return f"Delete {names} and run again with --download"


# --- Download ---


def fetch(
    directory: PathLike,
    names: list[str] | None = None,
    base_url: str = BASE_URL,
    md5: Mapping[str, str] = MD5,
    timeout: float = 30.0,
) -> None:
    """Downloads MNIST files as `<name>.gz`; each file appears only after its MD5 sum is verified.

    Args:
      directory: the target directory, created if necessary.
      names: the file names without ".gz"; None for all in `md5`.
      base_url: the URL that file names are appended to.
      md5: the MD5 sum of each gzipped file.
      timeout: seconds to wait for data from the server.

    Raises:
      ConnectionError: a download failed.
      ValueError: a file has another MD5 sum than expected.
    """
    directory = pathlib.Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    for name in md5 if names is None else names:
        url = f"{base_url.rstrip('/')}/{name}.gz"
        _fetch_one(url, directory / f"{name}.gz", md5[name], timeout)


def _fetch_one(url: str, target: pathlib.Path, md5: str, timeout: float) -> None:
    partial = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        found = _download(url, partial, timeout)
        if found != md5:
            raise ValueError(
                f"{url}: expected the MD5 sum {md5}, found {found}. Nothing was kept: try again, "
                f"or put the right {target.name} into {target.parent} yourself"
            )
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)


def _download(url: str, path: pathlib.Path, timeout: float) -> str:
    """Downloads `url` to `path` and returns its MD5 sum."""
    digest = hashlib.md5(usedforsecurity=False)
    with open(path, "wb") as output:
        for chunk in _chunks(url, path.parent, timeout):
            digest.update(chunk)
            output.write(chunk)
    return digest.hexdigest()


def _chunks(url: str, directory: pathlib.Path, timeout: float) -> Iterator[bytes]:
    try:
        with urllib.request.urlopen(url, timeout=timeout) as response:
            while chunk := response.read(_CHUNK):
                yield chunk
    except (OSError, http.client.HTTPException) as error:
        raise ConnectionError(
            f"could not download {url}: {error}. Nothing was kept: try again, or put "
            f"{url.rsplit('/', 1)[-1]} into {directory} yourself"
        ) from error
