r"""Trains a language model of bytes on the sources of Python's standard library, over a mesh.

Examples of use:

    python examples/transformer_lm.py
    python examples/transformer_lm.py --quick
    python examples/transformer_lm.py --mesh_impl=simd --mesh_shape="all:2" --layout="batch:all"
    python examples/transformer_lm.py --layout=auto
    python examples/transformer_lm.py --zero=3
    python examples/transformer_lm.py --ring
    python examples/transformer_lm.py --pipeline=2
    python examples/transformer_lm.py --layout="batch:rows;length:cols;attention_heads:cols"
    python examples/transformer_lm.py --layout="heads:cols;d_ff:cols;residual_length:cols"
    python examples/transformer_lm.py --text="books/*.txt" --prompt="Call me" --model_dir=lm
    python examples/transformer_lm.py --gin_param="num_layers = 4" --gin_param="d_model = 256"

The default layout splits the sequences of a batch over one dimension of a 2 by 2 mesh of logical
CPUs, and heads, hidden layers and vocabulary over the other. The text is on every machine that has
Python; every tenth file is held out. transformer_lm.gin describes the model.

2000 steps reach 2.14 bits per byte on the held-out files, in three minutes on two busy cores;
expect less than 2.3. A bigram model of bytes needs 3.51. With --quick, 300 steps reach 3.25 in half
a minute; expect less than 3.4. These numbers are for one seed and for the sources of Python
3.11. Samples are drawn byte by byte, with cached keys and values of earlier bytes.

With --model_dir, training resumes from the latest checkpoint, on any mesh, with the same examples
as in an uninterrupted run. SIGTERM or Ctrl-C saves a checkpoint before the program ends.
"""

from __future__ import annotations

import dataclasses
import math
import pathlib
import sys
import sysconfig
from collections.abc import Callable, Iterator
from typing import Optional

sys.path.append(str(pathlib.Path(__file__).resolve().parent))

import transformer_options
from command_line import option

GIN_FILE = "transformer_lm.gin"
HELD_OUT_EVERY = 10  # one file in ten
TEST_BATCHES = 16
QUICK_BITS = 3.4  # per byte; the upper bound with --quick
PROMPTS = ["def __init__(self, ", "    for i in range(", "import os\n", '"""Returns the ']


@dataclasses.dataclass(frozen=True)
class Options(transformer_options.Options):
    """Command-line options; every field is a flag."""

    text: str = option("", "Pattern of the names of files; if empty, the standard library's.")
    prompt: str = option("", "What the samples begin with; if empty, four beginnings of code.")


import numpy as np
import tensorflow.compat.v1 as tf
import transformer_run
from transformer_run import Model

# --- Data ---


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Bytes of text; every tenth file is held out."""

    source: str
    train: np.ndarray
    held_out: np.ndarray


def load(pattern: str) -> Corpus:
    """Returns the corpus of the files that match a pattern, in the order of their names.

    Args:
      pattern: a path pattern; if empty, the standard library's modules without its packages.

    Raises:
      ValueError: there are fewer than two files, or they are too short.
    """
    library = pathlib.Path(sysconfig.get_path("stdlib"))
    names = sorted(tf.io.gfile.glob(pattern)) if pattern else sorted(map(str, library.glob("*.py")))
    source = pattern or f"{library}/*.py"
    if len(names) < 2:
        hint = "one of them is held out" if pattern else "pass --text with the names of others"
        raise ValueError(f"{source} names {len(names)} files, but two are needed at least: {hint}")
    texts = [pathlib.Path(name).read_bytes() for name in names]
    last = HELD_OUT_EVERY - 1 if len(texts) >= HELD_OUT_EVERY else len(texts) - 1
    parts: dict[bool, list[bytes]] = {False: [], True: []}
    for i, text in enumerate(texts):
        parts[i % HELD_OUT_EVERY == last].append(text)
    train, held_out = (np.frombuffer(b"".join(parts[key]), np.uint8) for key in (False, True))
    return Corpus(f"{len(texts)} files {source}", train, held_out)


def check_sizes(corpus: Corpus, length: int, rows: int) -> None:
    """Raises ValueError if there is too little text for training and a test of `rows` rows."""
    for name, text, needed in [
        ("to train on", corpus.train, 2 * length),
        ("held out", corpus.held_out, rows * length),
    ]:
        if len(text) < needed:
            raise ValueError(
                f"{corpus.source} have {len(text)} bytes {name}, but {needed} are needed: pass "
                "--text with the names of more files"
            )


def train_rows(text: np.ndarray, length: int, seed: int) -> Iterator[bytes]:
    """Yields pieces of the text from random positions, indefinitely."""
    places = np.random.default_rng(seed)
    while True:
        start = places.integers(len(text) - length + 1)
        yield text[start : start + length].tobytes()


def test_rows(text: np.ndarray, length: int, count: int) -> Iterator[bytes]:
    """Yields `count` pieces that are spread over the text and do not overlap."""
    for start in np.linspace(0, len(text) - length, count).astype(int):
        yield text[start : start + length].tobytes()


def dataset(rows: Callable[[], Iterator[bytes]], model: Model) -> tf.data.Dataset:
    """Returns rows as a data set of {"targets": [length]}."""
    length = model.sequence_length["targets"]
    texts = tf.data.Dataset.from_generator(rows, output_signature=tf.TensorSpec([], tf.string))
    return texts.map(
        lambda text: {"targets": tf.ensure_shape(model.vocabulary.encode_tf(text), [length])}
    )


def pair_bits(corpus: Corpus) -> float:
    """Returns the held-out bits per byte of a bigram model."""
    counts = np.ones([256, 256])
    np.add.at(counts, (corpus.train[:-1], corpus.train[1:]), 1)
    bits = -np.log2(counts / counts.sum(axis=1, keepdims=True))
    return float(bits[corpus.held_out[:-1], corpus.held_out[1:]].mean())


# --- The command ---


def act(model: Model, options: Options, corpus: Corpus) -> float:
    """Trains, tests and samples, and returns the held-out bits per byte."""
    length, rows = model.sequence_length["targets"], TEST_BATCHES * model.batch_size
    check_sizes(corpus, length, rows)
    prompts = [options.prompt] if options.prompt else PROMPTS
    if len(model.vocabulary.encode(options.prompt)) >= length:
        raise ValueError(f"--prompt has to be shorter than the {length} bytes of a sample")

    def test() -> float:
        found = model.evaluate(
            lambda: dataset(lambda: test_rows(corpus.held_out, length, rows), model), TEST_BATCHES
        )
        return -float(found["neg_log_perplexity"]) / math.log(2)

    bits: list[float] = []

    def say() -> str:
        bits.append(test())
        return f"held out {bits[-1]:.3f} bits per byte"

    model.train(lambda: dataset(lambda: train_rows(corpus.train, length, options.seed), model), say)
    print(f"held out, by the byte before alone: {pair_bits(corpus):.3f} bits per byte")
    last = bits[-1] if bits else test()
    print(f"held out, by the model: {last:.3f} bits per byte", flush=True)
    for prompt, text in zip(prompts, model.decode(prompts, "lm")):
        print(f"--- {prompt!r} goes on:\n{prompt}{text}")
    return last


def run(options: Options) -> Optional[float]:
    """Trains with the given options, prints progress, and returns the held-out bits per byte.

    Raises:
      ValueError, OSError: the options or the data are invalid.
    """
    transformer_run.check(options)
    corpus = load(options.text)
    print(
        f"data  {corpus.source}: {len(corpus.train)} bytes to train on, "
        f"{len(corpus.held_out)} held out",
        flush=True,
    )
    usual = {"batch_size": 16, "train_steps": 2000, "steps_per_checkpoint": 500}
    if options.quick:
        usual = {"batch_size": 16, "train_steps": 300, "steps_per_checkpoint": 300}
    return transformer_run.run(
        options, GIN_FILE, lambda model: act(model, options, corpus), **usual
    )


if __name__ == "__main__":
    transformer_run.command(Options, run)
