"""How fast this machine multiplies matrices in TensorFlow.

    python benchmarks/product_rate.py
    python benchmarks/product_rate.py --few_rows

The second shows products of few rows with the kernels of SmolLM2-135M, as steps of decoding have
them, in several forms, beside how fast two threads read: as it is ([inputs, outputs]), as a batch
of one product, by halves of the inputs, by TensorFlow's own kernel in place of oneDNN's, with a
transposed kernel, and with that one on the left. Many kernels take turns, so that none stays in a
cache; times are milliseconds of a product, of the fastest of four passes over them.
"""

import argparse
import functools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import quiet

N = 2048
# (inputs, outputs): of the units, of their output, of queries, of keys, and of the logits
KERNELS = {
    "units": (576, 1536),
    "output": (1536, 576),
    "queries": (576, 576),
    "keys": (576, 192),
    "logits": (576, 49152),
}
ROWS = (1, 8, 32)
BYTES = 2e8  # of all kernels of a size


def product_rate() -> float:
    """GFLOP/s of one large matrix product in TensorFlow."""
    import tensorflow.compat.v1 as tf

    with tf.Graph().as_default():
        x = tf.Variable(tf.random_normal([N, N]))
        with tf.Session() as session:
            session.run(x.initializer)
            run = session.make_callable(tf.matmul(x, x).op)
            run()
            seconds = []
            for _ in range(5):
                start = time.perf_counter()
                run()
                seconds.append(time.perf_counter() - start)
    return 2 * N**3 / min(seconds) / 1e9


def reading_rate(threads: int = 2) -> float:
    """GB/s that threads read together."""
    parts = np.ones([threads, 1 << 26], np.float32)
    seconds = []
    for _ in range(5):
        readers = [threading.Thread(target=part.sum) for part in parts]
        start = time.perf_counter()
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
        seconds.append(time.perf_counter() - start)
    return parts.nbytes / min(seconds) / 1e9


def forms() -> dict[str, tuple[bool, Callable[..., Any]]]:
    """Returns by name whether a form takes a transposed kernel, and the form."""
    import tensorflow as tf

    def halves(x: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
        inputs, outputs = w.shape
        parts = tf.transpose(tf.reshape(x, [-1, 2, inputs // 2]), [1, 0, 2])
        return tf.reduce_sum(tf.matmul(parts, tf.reshape(w, [2, inputs // 2, outputs])), 0)

    return {
        "as it is": (False, tf.matmul),
        "batch": (False, lambda x, w: tf.raw_ops.BatchMatMulV2(x=x, y=w)),
        "halves": (False, halves),
        "own kernel": (False, lambda x, w: tf.raw_ops.BatchMatMulV3(x=x, y=w, Tout=x.dtype)),
        "transposed": (True, lambda x, w: tf.matmul(x, w, transpose_b=True)),
        "on the left": (True, lambda x, w: tf.transpose(tf.matmul(w, x, transpose_b=True))),
    }


def _products(fn: Callable[..., Any], kernels: Sequence[Any], x: Any) -> Any:
    """Returns the last of products with kernels, each of which waits for the one before."""
    import tensorflow as tf

    y = fn(x, kernels[0])
    for kernel in kernels[1:]:
        y = fn(x + 1e-9 * tf.reshape(y, [-1])[0], kernel)
    return y


def few_rows(name: str) -> None:
    """Prints the times of a kernel's products."""
    import tensorflow as tf

    inputs, outputs = KERNELS[name]
    copies = max(2, int(BYTES / (4 * inputs * outputs)))
    for rows in ROWS:
        found = []
        for form, (turned, fn) in forms().items():
            value = np.ones([outputs, inputs] if turned else [inputs, outputs], np.float32)
            kernels = [tf.Variable(value) for _ in range(copies)]
            call = tf.function(functools.partial(_products, fn, kernels))
            x = tf.ones([rows, inputs])
            call(x)
            seconds = []
            for _ in range(4):
                start = time.perf_counter()
                call(x).numpy()
                seconds.append(time.perf_counter() - start)
            found.append(f"{form} {1e3 * min(seconds) / copies:6.3f}")
        print(f"{name:8}{rows:3} rows: {'   '.join(found)}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--few_rows", action="store_true", help="products of steps of decoding")
    arguments = parser.parse_args()
    quiet.import_tensorflow()
    if arguments.few_rows:
        print(f"two threads read {reading_rate():.1f} GB/s")
        for name in KERNELS:
            few_rows(name)
    else:
        print(product_rate())
