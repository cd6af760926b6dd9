"""Trainings by `fit` whose model, data, options and meshes are drawn by chance.

Each is trained unsplit in one go, and again: in a layout, by some engine, and in most cases in two
runs of which the second goes on where the first ended, in another layout and by another engine.
Records, evaluations and variables have to be the same.

python tests/helpers/random_trainings.py --first 0 --count 100 --minutes 30 --out trainings.jsonl
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import os
import pathlib
import random
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from typing import Any, NamedTuple, Optional

if __name__ == "__main__":
    ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

import jax
import keras
import numpy as np
import tensorflow as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.testing import harness

BATCH, LENGTH, D_MODEL, HIDDEN, VOCAB, CLASSES = (
    mtf.Dimension(name, size)
    for name, size in [
        ("batch", 12),
        ("length", 4),
        ("d", 8),
        ("hidden", 8),
        ("vocab", 16),
        ("classes", 4),
    ]
)
HEADS, CHANNELS = mtf.Dimension("heads", 2), mtf.Dimension("kv", 4)
DIMS = {"x": [BATCH, LENGTH, D_MODEL], "ids": [BATCH, LENGTH], "y": [BATCH]}
MESHES = ["x:1", "x:2", "x:3", "x:4", "x:2,y:2", "x:2,y:3", "x:2,y:4"]
SPEEDS = ("per_second", "seconds", "utilization")  # of records, which no two runs share


# -- models: each part is a function of (its name, activations, ids, whether weights are trained)


def _dense(name, h, ids, training):
    last = h.shape[-1]
    new = D_MODEL if last == HIDDEN else HIDDEN
    return mtf.layers.dense(h, [new], reduced_dims=[last], activation=mtf.tanh, name=name)


def _layer_norm(name, h, ids, training):
    return mtf.layers.layer_norm(h, h.shape[-1], epsilon=0.1, name=name)


def _batch_norm(name, h, ids, training):
    return mtf.layers.batch_norm(h, training, 0.9, epsilon=0.1, name=name)[0]


def _dropout(name, h, ids, training):
    return mtf.dropout(h, rate=0.2) if training else h


def _noise(name, h, ids, training):
    return h + mtf.random_normal(h.mesh, h.shape) * 0.1 if training else h


def _embedding(name, h, ids, training):
    return h + mtf.layers.embedding(ids, VOCAB, h.shape[-1], mtf.VariableDType(), name=name)


def _counter(name, h, ids, training):
    zeros = tf.compat.v1.zeros_initializer()
    count = mtf.get_variable(h.mesh, name, [], initializer=zeros, trainable=False)
    if training:
        mtf.assign(count, count + 1.0)
    return h + mtf.sin(count) * 0.1


def _moving_mean(name, h, ids, training):
    zeros = tf.compat.v1.zeros_initializer()
    mean = mtf.get_variable(h.mesh, name, h.shape[-1:], initializer=zeros, trainable=False)
    if training:
        now = mtf.reduce_mean(mtf.stop_gradient(h), output_shape=h.shape[-1:])
        mtf.assign(mean, mean * 0.5 + now * 0.5)
    return h - mean * 0.1


def _attention(name, h, ids, training):
    dropout = 0.1 if training else 0.0
    return h + mtf.layers.multihead_attention(
        h, None, None, CHANNELS, HEADS, is_training=training, dropout=dropout, name=name
    )


def _blocked_attention(name, h, ids, training):
    memory = mtf.Dimension("memory", LENGTH.size)
    keys = mtf.rename_dimension(h, "length", "memory")
    last = h.shape[-1]
    return h + mtf.layers.blocked_attention(
        h, keys, mtf.sin(keys), memory, last, last, block_sizes=(2, 2)
    )


def _loop(name, h, ids, training):
    def body(i, u):
        return [i + 1, mtf.tanh(u * 1.1 + h * 0.2)]

    start = [mtf.constant(h.mesh, 0, dtype=tf.int32), h]
    return mtf.while_loop(lambda i, u: mtf.less(i, 2), body, start, maximum_iterations=2)[1]


def _recomputed(name, h, ids, training):
    start = tf.compat.v1.random_normal_initializer(stddev=0.5)
    weights = mtf.get_variable(h.mesh, name, h.shape[-1:], initializer=start)
    return mtf.recompute_grad(lambda u: mtf.sin(u * weights) + u * 0.5, [h])


PARTS = {
    function.__name__.strip("_"): function
    for function in [
        _dense,
        _layer_norm,
        _batch_norm,
        _dropout,
        _noise,
        _embedding,
        _counter,
        _moving_mean,
        _attention,
        _blocked_attention,
        _loop,
        _recomputed,
    ]
}
# What a model returns, of the losses of examples and of what each of them weighs.
LOSSES = {
    "mean": lambda losses, weights: mtf.reduce_mean(losses),
    "each": lambda losses, weights: losses,
    "pair": lambda losses, weights: (
        mtf.reduce_sum(losses * weights),
        mtf.reduce_sum(weights),
    ),
    "quotient": lambda losses, weights: mtf.reduce_sum(losses * weights) / mtf.reduce_sum(weights),
    "metrics": lambda losses, weights: {
        "loss": mtf.reduce_mean(losses),
        "share": mtf.reduce_mean(weights),
        "each": losses,
    },
}
# Epsilons keep errors of rounding from growing in a division.
OPTIMIZERS = {
    "sgd": lambda learning_rate=0.1: mtf.optimize.SgdOptimizer(learning_rate),
    "momentum": lambda learning_rate=0.1: mtf.optimize.MomentumOptimizer(learning_rate, 0.9),
    "adam": lambda learning_rate=0.01: mtf.optimize.AdamWeightDecayOptimizer(
        learning_rate, weight_decay_rate=0.1, epsilon=0.1
    ),
    "adamw": lambda learning_rate=0.01: mtf.optimize.AdamWOptimizer(learning_rate, epsilon=0.1),
    "adafactor": lambda learning_rate=0.01: mtf.optimize.AdafactorOptimizer(
        learning_rate=learning_rate, min_dim_size_to_factor=4, beta1=0.9, epsilon1=1e-3
    ),
    "keras": lambda learning_rate=0.01: mtf.optimize.from_keras(
        keras.optimizers.RMSprop(learning_rate, epsilon=0.1)
    ),
}
RATES = {"": None, "number": 0.02, "function": lambda step: 0.05 / (tf.cast(step, tf.float32) + 1)}


def arrays(seed: int, rows: int) -> dict[str, np.ndarray]:
    """Returns features of as many examples."""
    rng = np.random.RandomState(seed)
    return {
        "x": rng.normal(size=(rows, LENGTH.size, D_MODEL.size)).astype(np.float32),
        "ids": rng.randint(0, VOCAB.size, (rows, LENGTH.size)).astype(np.int32),
        "y": rng.randint(0, CLASSES.size, rows).astype(np.int32),
    }


def _examples(of: dict[str, np.ndarray]) -> Iterator[dict[str, np.ndarray]]:
    for row in range(len(of["y"])):
        yield {name: values[row] for name, values in of.items()}


DATA = {
    "arrays": lambda of: of,
    "dataset": tf.data.Dataset.from_tensor_slices,
    "batches": lambda of: tf.data.Dataset.from_tensor_slices(of).batch(
        BATCH.size, drop_remainder=True
    ),
    "generator": lambda of: functools.partial(_examples, of),
    "list": lambda of: list(_examples(of)),
}


class Training(NamedTuple):
    """What is trained.

    Attributes:
      parts: names in PARTS.
      loss: one in LOSSES.
      optimizer: one in OPTIMIZERS.
      rate: one in RATES.
      data: one in DATA.
      evaluates: whether there are evaluations.
      options: other arguments of `fit`.
      steps: the number of steps.
      first_steps: after how many of them the first run ends; there is one run if 0.
      meshes: arguments of `fit` for each run.
    """

    parts: list[str]
    loss: str
    optimizer: str
    rate: str
    data: str
    evaluates: bool
    options: dict[str, Any]
    steps: int
    first_steps: int
    meshes: list[dict[str, Any]]

    def model(self, mesh: mtf.Mesh, features: dict[str, mtf.Tensor], training: bool = True) -> Any:
        """The model function."""
        h = features["x"]
        for n, part in enumerate(self.parts):
            h = PARTS[part](f"part_{n}", h, features["ids"], training)
        rows = h.shape[0]
        mean = mtf.reduce_mean(h, reduced_dim=LENGTH)
        logits = mtf.layers.dense(mean, [CLASSES], reduced_dims=[h.shape[-1]], name="logits")
        losses = mtf.layers.softmax_cross_entropy_with_logits(logits, features["y"], CLASSES)
        weights = mtf.greater(mtf.reduce_sum(features["x"], output_shape=[rows]), -3.0)
        return LOSSES[self.loss](losses, mtf.cast(weights, tf.float32))

    def run(self, mesh: dict[str, Any], steps: int, **where: Any) -> mtf.train.Result:
        """Trains until a step, on a mesh."""
        # Keras' optimizers have rates of their own, and are made in eager code.
        make, rate = OPTIMIZERS[self.optimizer], RATES[self.rate * (self.optimizer != "keras")]
        return mtf.train.fit(
            self.model,
            DATA[self.data](arrays(0, 40)),
            steps,
            dims=DIMS,
            optimizer=make() if rate is None else make,
            learning_rate=rate,
            eval_data=arrays(1, 15) if self.evaluates else None,
            log_every=1,
            progress=False,
            **self.options,
            **mesh,
            **where,
        )


def _mesh(rng: random.Random, sizes: dict[str, int]) -> dict[str, Any]:
    """Returns a mesh, a layout, an engine and what it stores in parts, as arguments of `fit`.

    Each mesh dimension splits one of the dimensions at most, so that all layouts are legal.
    """
    shape = rng.choice(MESHES)
    rules: dict[str, str] = {}
    mesh_dims = list(mtf.convert_to_shape(shape))
    if len(mesh_dims) > 1 and rng.random() < 0.3:
        first, second = rng.sample(mesh_dims, 2)
        joined = mtf.Dimension(f"{first.name}+{second.name}", first.size * second.size)
        mesh_dims = [joined, *(d for d in mesh_dims if d not in (first, second))]
    uneven = rng.random() < 0.4
    for axis in mesh_dims:
        legal = [n for n, size in sizes.items() if uneven or size % axis.size == 0]
        legal = [n for n in legal if n not in rules]
        if legal:
            rules[rng.choice(legal)] = axis.name
    mesh = {"mesh_shape": shape, "layout": ",".join(f"{n}:{a}" for n, a in rules.items())}
    mesh.update({"uneven": True} if uneven else {})
    processors = mtf.convert_to_shape(shape).size
    mesh.update(
        rng.choice(
            [
                {},
                {"mesh_impl": "placement"},
                {"simd": True},
                {"mesh_impl": "pjrt"},
                {"devices": ["cpu:0"] * processors},
                {"devices": ["cpu:0"] * processors, "jit_compile": True},
            ]
        )
    )
    if rng.random() < 0.4:
        axes = harness.mesh_axis_names(shape)
        mesh.update(zero=rng.choice([1, 2, 3]), zero_axis=rng.choice(axes))
    return mesh


def drawn(seed: int) -> Training:
    """Returns the training of a seed."""
    rng = random.Random(seed)
    parts = rng.choices(list(PARTS), k=rng.choice([1, 2, 3, 4, 5]))
    microbatches = rng.choice([1, 1, 2, 3])
    data = rng.choice(list(DATA))
    options = {
        "microbatches": microbatches,
        "clip_norm": rng.choice([None, None, 0.5, float("inf")]),
        "average": rng.choice([None, None, 0.9]),
        "shuffle": data == "arrays" and rng.random() < 0.5,
        "seed": rng.choice([0, 5]),
    }
    sizes = {"batch": BATCH.size // microbatches, "d": 8, "classes": 4, "length": 4}
    if "dense" in parts:
        sizes["hidden"] = HIDDEN.size
    if "embedding" in parts:
        sizes["vocab"] = VOCAB.size
    if "attention" in parts:
        sizes["heads"] = HEADS.size
    steps = rng.choice([3, 4, 6])
    first_steps = rng.choice([0, 0, 1, 2, steps - 1])
    return Training(
        parts,
        rng.choice(list(LOSSES)),
        rng.choice(list(OPTIMIZERS)),
        rng.choice(list(RATES)),
        data,
        rng.random() < 0.5,
        options,
        steps,
        first_steps,
        [_mesh(rng, sizes) for _ in range(1 + (first_steps > 0))],
    )


def differences(expected: mtf.train.Result, result: mtf.train.Result) -> list[str]:
    """Returns a line for each value that two results do not share."""
    lines = []

    def check(name: str, e: Optional[Any], value: Any, error: float) -> None:
        if e is None or not np.allclose(value, e, rtol=10 * error, atol=error):
            lines.append(f"{name}: {value} instead of {e}"[:300])

    # A run that goes on has records of its own steps alone.
    records = {record["step"]: record for record in expected.history}
    for kind, pairs in [
        ("record", [(records[r["step"]], r) for r in result.history]),
        ("evaluation", list(zip(expected.evaluations[-1:], result.evaluations[-1:]))),
    ]:
        for before, record in pairs:
            for name, value in record.items():
                if not name.endswith(SPEEDS):
                    check(f"{kind} {record['step']} {name}", before.get(name), value, 2e-5)
    if bool(expected.evaluations) != bool(result.evaluations):
        lines.append("one of them has evaluations")
    for name in sorted({*expected.variables, *result.variables}):
        check(name, expected.variables.get(name), result.variables.get(name, np.nan), 2e-4)
    return lines


def check(training: Training) -> None:
    """Raises AssertionError if a training depends on its meshes, or on where a run ends."""
    expected = training.run({"mesh_shape": "x:1"}, training.steps)
    with tempfile.TemporaryDirectory() as folder:
        if training.first_steps:
            training.run(training.meshes[0], training.first_steps, directory=folder)
        result = training.run(training.meshes[-1], training.steps, directory=folder, save_every=2)
    lines = differences(expected, result)
    assert not lines, "\n".join([repr(training), *lines])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--count", type=int, default=100, help="the number of seeds")
    parser.add_argument("--minutes", type=float, default=30, help="after which it ends")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("trainings.jsonl"))
    given = parser.parse_args()
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 8)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    end = time.monotonic() + 60 * given.minutes
    for seed in range(given.first, given.first + given.count):
        if time.monotonic() > end:
            break
        try:
            check(drawn(seed))
            found = "same"
        except AssertionError as e:
            found = f"differs: {e}"
        except Exception:
            found = f"crash: {drawn(seed)} {traceback.format_exc(limit=-3)}"
        with open(given.out, "a") as file:
            file.write(json.dumps({"seed": seed, "found": found}) + "\n")
        gc.collect()
    lines = [json.loads(line) for line in given.out.read_text().splitlines()]
    wrong = [line["seed"] for line in lines if line["found"] != "same"]
    print(f"{len(lines)} trainings: {len(lines) - len(wrong)} the same; the others: {wrong}")


if __name__ == "__main__":
    main()
