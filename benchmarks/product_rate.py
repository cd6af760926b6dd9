"""How fast this machine multiplies matrices in TensorFlow.

python benchmarks/product_rate.py
"""

import argparse
import time

import quiet

N = 2048


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


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    quiet.import_tensorflow()
    print(product_rate())
