"""What a step in bfloat16 saves, and what it costs in accuracy.

    python benchmarks/precision.py

A language model learns the source of modules of Python's library, byte by byte: in float32, and
with activations in bfloat16 (`mtf.precision("mixed_bfloat16")`). Both have the same initial values,
batches and learning rates, and take turns in one process.
"""

import argparse
import sys
from pathlib import Path
from statistics import mean, median

import quiet

KINDS = ("float32", "mixed_bfloat16")


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--d_model", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    return parser.parse_args()


def main() -> None:
    """Trains one model in each precision."""
    arguments = parse_arguments()
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    quiet.import_tensorflow()
    import byte_models
    import tensorflow.compat.v1 as tf

    tf.disable_v2_behavior()
    found: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
    with tf.Session() as session:
        trainers = {}
        for kind in KINDS:
            model = byte_models.make_model(arguments.d_model, arguments.layers)
            trainers[kind] = byte_models.Trainer(session, model, kind, kind, arguments.steps)
        first, second = map(tf.trainable_variables, KINDS)
        session.run([y.assign(x) for x, y in zip(first, second, strict=True)])
        for _ in range(arguments.steps):
            for kind in KINDS:
                found[kind].append(trainers[kind].step())
    base = found["float32"]
    for kind in KINDS:
        losses, seconds = zip(*found[kind], strict=True)
        ratio = median(s / b for s, (_, b) in zip(seconds, base, strict=True))
        apart = [abs(x - b) / b for x, (b, _) in zip(losses, base, strict=True)]
        print(
            f"{kind:17}{1e3 * median(seconds):7.0f} ms   time / float32 {ratio:.2f}   loss of the "
            f"last 20 steps {mean(losses[-20:]):.4f}   losses differ by {median(apart):.2%} "
            f"(at most {max(apart):.2%})"
        )


if __name__ == "__main__":
    main()
