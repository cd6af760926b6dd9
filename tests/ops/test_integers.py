"""Numbers beside Tensors: those that a dtype lacks, and those that stand in an array."""

import numpy as np
import pytest
import tensorflow as tf

import mesh_tensorflow as mtf

UNSIGNED = [np.uint8, np.uint16, np.uint32, np.uint64]


def imported(values, dtype):
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    return mtf.import_tf_tensor(mesh, tf.constant(np.array(values, dtype)), "d:4")


@pytest.mark.parametrize(
    "number", [1, np.uint8(1), tf.constant(1, tf.uint32)], ids=["python", "numpy", "tf"]
)
@pytest.mark.parametrize("dtype", [*UNSIGNED, np.int32, np.float32])
def test_a_number_is_subtracted(dtype, number):
    x = imported([1, 2, 3, 4], dtype)
    number = tf.cast(number, x.dtype) if tf.is_tensor(number) else number
    np.testing.assert_array_equal((x - number).numpy(), [0, 1, 2, 3])


@pytest.mark.parametrize("dtype", UNSIGNED)
def test_signs_of_unsigned_numbers(dtype):
    values = np.array([0, 1, 2, np.iinfo(dtype).max], dtype)
    x = imported(values, dtype)
    np.testing.assert_array_equal((-x).numpy(), np.negative(values))
    np.testing.assert_array_equal(mtf.sign(x).numpy(), [0, 1, 1, 1])
    np.testing.assert_array_equal(mtf.abs(x).numpy(), values)


def test_the_least_number_of_numpy_is_subtracted():
    y = imported([1, 2, 3, 4], np.int32) - np.int8(-128)
    np.testing.assert_array_equal(y.numpy(), [129, 130, 131, 132])


def test_the_largest_numbers_are_added():
    y = imported([1, 2, 3, 4], np.uint64) + 2**63
    np.testing.assert_array_equal(y.numpy(), np.uint64(2**63) + np.arange(1, 5, dtype=np.uint64))


@pytest.mark.parametrize("dtype", [*UNSIGNED, np.int8, np.int32, np.int64])
def test_smallest_elements(dtype):
    ends = np.iinfo(dtype)
    x = imported([ends.max, 5, ends.min, 3], dtype)
    found = [mtf.nth_smallest_element(x, n, x.shape.dims[0]).numpy() for n in range(4)]
    assert found == [ends.min, 3, 5, ends.max]


@pytest.mark.parametrize("number", [np.int32(2), np.int64(2), np.uint8(2)])
def test_a_number_of_parts_of_numpy(number):
    x = imported([1, 2, 3, 4], np.float32)
    parts = mtf.split(x, x.shape.dims[0], number)
    assert [part.numpy().tolist() for part in parts] == [[1, 2], [3, 4]]


ONES = {"list": [2], "array": np.array([2]), "square": np.array([[2]]), "tf": tf.constant([2])}


@pytest.mark.parametrize("two", ONES.values(), ids=ONES)
def test_an_array_with_one_element_is_a_number(two):
    x = imported([1, 2, 3, 4], np.int32)
    np.testing.assert_array_equal((x + two).numpy(), [3, 4, 5, 6])
    np.testing.assert_array_equal((x * two).numpy(), [2, 4, 6, 8])
    np.testing.assert_array_equal(mtf.maximum(x, two).numpy(), [2, 2, 3, 4])
    np.testing.assert_array_equal(mtf.gather(x, two, x.shape[0]).numpy(), 3)
    for shape in ("", "d:4", "d:1"):
        filled = mtf.constant(x.mesh, two, shape, tf.int32)
        np.testing.assert_array_equal(filled.numpy(), np.full(filled.shape.to_integer_list, 2))
    for operation in (mtf.ScalarMultiplyOperation, mtf.ScalarAddOperation):
        np.testing.assert_array_equal(operation(x, two).outputs[0].numpy()[1], 4)
