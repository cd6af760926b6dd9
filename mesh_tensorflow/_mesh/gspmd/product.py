"""Products of two whole values as matrix products, for a compiler that takes long for tf.einsum.

Both are the same operation of XLA in the end. But TensorFlow translates a tf.einsum with a pipeline
of MLIR for it alone, which takes 6 ms, and a tf.matmul in 0.06 ms.
"""

from __future__ import annotations

from typing import Optional

import tensorflow.compat.v1 as tf

__all__ = ["matrix_product"]


def matrix_product(equation: str, *values: tf.Tensor) -> Optional[tf.Tensor]:
    """Returns tf.einsum of values if it is a product of matrices, or of batches of them.

    Args:
      equation: as tf.einsum takes it, with one letter for each dimension.
      *values: whole values.

    Returns:
      A tf.Tensor; None if it is another product, or would need another order of dimensions.
    """
    inputs, _, output = equation.partition("->")
    letters = inputs.split(",")
    batch = output[:-2]
    if len(letters) != 2 or not all(text[:-2] == batch for text in letters):
        return None
    first, second, made = (text[-2:] for text in (*letters, output))
    if len({*first, *second}) != 3 or made[:1] not in first or made[1:] not in second:
        return None
    contracted = "".join({*first} & {*second})
    if len(contracted) != 1 or {*made} != {*first} ^ {*second}:
        return None
    return tf.matmul(
        *values, transpose_a=first[0] == contracted, transpose_b=second[1] == contracted
    )
