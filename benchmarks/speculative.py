"""Compares greedy decoding with and without a draft: the time of an id.

    python benchmarks/speculative.py

Model and draft learn the source of modules of Python's library, byte by byte, and continue lines of
it. The ids must be equal. The kinds of decoding take turns in one process; the ratio of a turn's
times is taken, and the median of all turns is printed.
"""

import argparse
import sys
import time
from pathlib import Path
from statistics import median

import quiet

MODEL, DRAFT = (512, 8), (128, 1)  # d_model and number of layers


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--steps", type=int, default=300, help="of training; the draft's are thrice"
    )
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--num_draft_ids", default="2,4,6")
    return parser.parse_args()


def main() -> None:
    """Trains both models, and times them."""
    arguments = parse_arguments()
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    quiet.import_tensorflow()
    import byte_models
    import tensorflow.compat.v1 as tf

    tf.disable_v2_behavior()
    model, draft = (byte_models.make_model(*sizes) for sizes in (MODEL, DRAFT))
    with tf.Session() as session:
        for made, scope, steps in (
            (model, "", arguments.steps),
            (draft, "draft", 3 * arguments.steps),
        ):
            trainer = byte_models.Trainer(session, made, scope, "mixed_bfloat16", steps)
            losses = [trainer.step()[0] for _ in range(steps)][-10:]
            print(
                f"{scope or 'model'}: loss {sum(losses) / 10:.2f} after {steps} steps", flush=True
            )
        for batch in map(int, arguments.batches.split(",")):
            kinds = [0, *map(int, arguments.num_draft_ids.split(","))]
            runs = {n: byte_models.decoder(session, model, draft, batch, n) for n in kinds}
            found = {n: run() for n, run in runs.items()}
            for n in kinds:
                if (found[n] != found[0]).any():
                    sys.exit(f"batch {batch}: {n} draft ids lead to other ids")
            share = byte_models.agreement(session, draft, found[0])
            print(f"batch {batch}: the draft agrees with {share:.0%} of the ids")
            seconds: dict[int, list[float]] = {n: [] for n in kinds}
            for turn in range(arguments.turns):
                for n in kinds[:: -1 if turn % 2 else 1]:
                    start = time.perf_counter()
                    runs[n]()
                    seconds[n].append(time.perf_counter() - start)
            for n in kinds:
                ratios = sorted(a / b for a, b in zip(seconds[n], seconds[0], strict=True))
                each = median(seconds[n]) / (byte_models.LENGTH - byte_models.PROMPT)
                line = f"  {n or 'no'} draft ids: {1e3 * each:6.2f} ms an id"
                if n:
                    line += (
                        f"   time / none {median(ratios):.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f})"
                    )
                print(line, flush=True)


if __name__ == "__main__":
    main()
