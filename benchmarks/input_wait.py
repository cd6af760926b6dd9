"""How long training steps of the transformer package wait for their input.

    python benchmarks/input_wait.py

`utils.run` trains a language model of bytes on lines of Python's library, which are encoded and
packed while it trains, by threads of TensorFlow that work ahead. What a step waits is the time
from the end of the step before to the moment at which its batch is there. `--slow_ms` makes each
line take so long, to see that a wait shows.
"""

import argparse
import importlib
import inspect
import itertools
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import quiet

TEXTS = ("argparse", "typing", "ast", "datetime", "doctest", "pickle", "tarfile", "zipfile")
LENGTH = 128
BINDINGS = f"""
utils.run.model_type = "lm"
utils.run.vocabulary = @vocabulary.ByteVocabulary()
utils.run.sequence_length = {{"targets": {LENGTH}}}
Unitransformer.max_length = {LENGTH}
num_layers = 4
d_model = 256
d_ff = 1024
num_heads = 4
d_kv = 64
utils.get_variable_dtype.activation_dtype = "float32"
utils.run.mesh_shape = ""
utils.run.layout_rules = ""
utils.run.batch_size = ("sequences_per_batch", 16)
utils.run.learning_rate_schedule = @learning_rate_schedules.constant_learning_rate
constant_learning_rate.learning_rate = 0.01
"""


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--slow_ms", type=float, default=0.0, help="how long each line takes")
    return parser.parse_args()


def dataset_of(slow_ms: float) -> Any:
    """Returns the function that makes the dataset of lines, encoded and packed."""
    import numpy as np
    import tensorflow as tf

    from mesh_tensorflow.transformer import dataset

    modules = map(importlib.import_module, TEXTS)
    lines = [line for m in modules for line in inspect.getsource(m).splitlines() if line.strip()]

    def slowly(line: Any) -> Any:
        time.sleep(slow_ms / 1e3)
        return np.asarray(line)

    def training_data(sequence_length: Any, vocabulary: Any, dataset_split: str) -> Any:
        ds = tf.data.Dataset.from_tensor_slices({"targets": lines})
        if slow_ms:
            ds = ds.map(lambda x: {"targets": tf.numpy_function(slowly, [x["targets"]], tf.string)})
            ds = ds.map(lambda x: {"targets": tf.ensure_shape(x["targets"], [])})
        ds = dataset.encode_all_features(ds, vocabulary)
        return dataset.pack_or_pad(ds, sequence_length, pack=True)

    return training_data


def main() -> None:
    """Trains, and prints how long steps wait."""
    arguments = parse_arguments()
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    quiet.import_tensorflow()
    import gin
    import tensorflow.compat.v1 as tf

    from mesh_tensorflow import _elements, estimator
    from mesh_tensorflow.transformer import utils

    tf.logging.set_verbosity(tf.logging.ERROR)
    waits: list[float] = []
    ends: list[float] = []
    advance, plain = _elements.Elements.advance, estimator.tpu.TPUEstimator.train

    def timed(self: Any, session: tf.Session) -> bool:
        start = time.perf_counter()
        more = advance(self, session)
        waits.append(1e3 * (time.perf_counter() - start))
        return more

    class Ends(tf.train.SessionRunHook):
        """Books when steps end."""

        def after_run(self, *_: Any) -> None:
            ends.append(time.perf_counter())

    def train(self: Any, input_fn: Any, hooks: Any = None, **kwargs: Any) -> Any:
        return plain(self, input_fn, hooks=[*(hooks or []), Ends()], **kwargs)

    _elements.Elements.advance = timed  # type: ignore[method-assign]
    estimator.tpu.TPUEstimator.train = train
    with tempfile.TemporaryDirectory() as folder:
        utils.FLAGS(["input_wait"])
        utils.parse_gin_defaults_and_flags(finalize_config=False)
        gin.parse_config(BINDINGS)
        with gin.unlock_config():
            gin.bind_parameter("utils.run.train_steps", arguments.steps)
        utils.run(
            tpu_job_name=None, tpu=None, gcp_project=None, tpu_zone=None,
            model_dir=str(Path(folder) / "model"), train_dataset_fn=dataset_of(arguments.slow_ms),
        )  # fmt: skip
    steps = [1e3 * (y - x) for x, y in itertools.pairwise(ends)][5:]
    print(
        f"{len(steps)} steps of {median(steps):.1f} ms, of which waiting for the batch "
        f"{median(waits[6:]):.3f} ms (at most {max(waits[6:]):.3f}), "
        f"{sum(waits[6:]) / sum(steps):.2%} of all time"
    )


if __name__ == "__main__":
    main()
