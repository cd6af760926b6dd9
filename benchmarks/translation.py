"""How long TensorFlow takes to translate an operation for XLA, in milliseconds of CPU time.

    python benchmarks/translation.py
    python benchmarks/translation.py --number 100

A function with a chain of one kind of operation is translated to HLO, as `mtf.pjrt` has it done,
and the time of a chain of identities is subtracted. The smallest of three times counts.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import quiet


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--number", type=int, default=40, help="operations in a chain")
    return parser.parse_args()


def operations(tf: Any) -> dict[str, Callable[[Any], Any]]:
    """Operations from a matrix of 8 x 8 to another, by name."""
    return {
        "einsum": lambda x: tf.einsum("ab,bc->ac", x, x),
        "softmax": tf.nn.softmax,
        "exp": tf.exp,
        "relu": tf.nn.relu,
        "rsqrt": tf.math.rsqrt,
        "sigmoid": tf.sigmoid,
        "tanh": tf.tanh,
        "stateless_uniform": lambda x: x + tf.random.stateless_uniform([8, 8], [1, 2]),
        "matmul": lambda x: tf.matmul(x, x),
        "add": lambda x: x + x,
        "mul": lambda x: x * x,
        "erf": tf.math.erf,
        "reduce_sum": lambda x: x + tf.reduce_sum(x, 0),
        "transpose": tf.transpose,
        "reshape": lambda x: tf.reshape(x, [8, 8]),
        "broadcast_to": lambda x: tf.broadcast_to(x[:1], [8, 8]),
        "gather": lambda x: tf.gather(x, tf.range(8)),
    }


def seconds(tf: Any, operation: Callable[[Any], Any], number: int) -> float:
    """CPU seconds for the translation of a chain."""

    def chain(x: Any) -> Any:
        for _ in range(number):
            x = operation(x)
        return x

    spec = tf.TensorSpec([8, 8])
    function = tf.function(chain, autograph=False, jit_compile=True)
    function.get_concrete_function(spec)
    translate = function.experimental_get_compiler_ir(spec)
    found = []
    for _ in range(3):
        start = time.process_time()
        translate(stage="hlo_serialized", platform_name="CPU")
        found.append(time.process_time() - start)
    return min(found)


def main() -> None:
    """Prints a row for each operation."""
    number = parse_arguments().number
    quiet.import_tensorflow()
    import tensorflow as tf

    empty = seconds(tf, tf.identity, number)
    for name, operation in operations(tf).items():
        each = (seconds(tf, operation, number) - empty) / number
        print(f"{name:>18} {1e3 * each:6.2f} ms", flush=True)


if __name__ == "__main__":
    main()
