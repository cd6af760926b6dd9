"""Measures the CPU time of a dropout mask, beside one made by tf.random.uniform.

python benchmarks/masks.py
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import quiet

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
SIZES, KEEP, ROUNDS, RUNS = [512, 1024], 0.9, 9, 30


def cpu_ms(run: Callable) -> float:
    """CPU milliseconds of one run, all threads."""
    start = time.process_time()
    for _ in range(RUNS):
        run()
    return 1e3 * (time.process_time() - start) / RUNS


def main() -> None:
    """Takes turns, and prints medians and the median of the ratios."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    quiet.import_tensorflow()
    import tensorflow.compat.v1 as tf

    from mesh_tensorflow._mesh import random_values

    tf.disable_v2_behavior()
    ours = random_values.random_slice(
        random_values.new_key(1), SIZES, [0, 0], SIZES, random_values.keep_mask, {"keep_prob": KEEP}
    )
    plain = tf.cast(tf.random.uniform(SIZES) < KEEP, tf.float32) / KEEP
    with tf.Session() as session:
        runs = [session.make_callable(mask.op) for mask in (ours, plain)]
        for run in runs:
            cpu_ms(run)
        times = [[cpu_ms(run) for run in runs] for _ in range(ROUNDS)]
    medians = [statistics.median(column) for column in zip(*times)]
    ratio = statistics.median(a / b for a, b in times)
    print(
        f"a mask of {SIZES[0]} x {SIZES[1]}: {medians[0]:.2f} ms, by tf.random.uniform "
        f"{medians[1]:.2f} ms; ratio {ratio:.2f}"
    )


if __name__ == "__main__":
    main()
