"""Kinds of data: the same batches from each, from any position, and in parts."""

import itertools

import numpy as np
import pytest
import tensorflow as tf2
import tensorflow.compat.v1 as tf
from helpers.train import linear

import mesh_tensorflow as mtf
from mesh_tensorflow.train._data import Dataset, Features, Part, source_of, with_dtype

ROWS = 10
X = np.arange(ROWS * 3, dtype=np.float32).reshape(ROWS, 3)
Y = np.arange(ROWS)
FEATURES = Features.of_dims({"x": "batch:4,d:3", "y": "batch:4"})


def examples():
    return [{"x": x, "y": y, "unused": "text"} for x, y in zip(X, Y)]


class Again:
    """An iterable that can be read again."""

    def __init__(self, items):
        self._items = items

    def __iter__(self):
        return iter(self._items)


KINDS = {
    "arrays": lambda: {"x": X.astype(np.float64), "y": Y, "unused": X},
    "examples of tf.data": lambda: tf2.data.Dataset.from_tensor_slices({"x": X, "y": Y}),
    "batches of tf.data": lambda: tf2.data.Dataset.from_tensor_slices({"x": X, "y": Y}).batch(4),
    "iterable of examples": lambda: Again(examples()),
    "iterable of batches": lambda: Again([{"x": X[i : i + 4], "y": Y[i : i + 4]} for i in (0, 4)]),
    "iterator": lambda: itertools.cycle(examples()[:8]),
    "function": lambda: lambda: {"x": X, "y": Y},
}


def take(source, n, start=0):
    return [[a.tolist() for a in b] for b in itertools.islice(source.training(start), n)]


@pytest.mark.parametrize("kind", KINDS)
def test_batches(kind):
    """An epoch has two whole batches; a run may begin at any of them."""
    expected = [[X[i : i + 4].tolist(), Y[i : i + 4].tolist()] for i in (0, 4, 0, 4, 0)]
    assert take(source_of(KINDS[kind](), FEATURES), 5) == expected
    assert take(source_of(KINDS[kind](), FEATURES), 2, start=3) == expected[3:]
    first = next(source_of(KINDS[kind](), FEATURES).training(0))
    assert [a.dtype for a in first] == [np.float32, np.int64]


@pytest.mark.parametrize("kind", sorted(set(KINDS) - {"iterator", "iterable of batches"}))
def test_all_rows_once(kind):
    batches = list(source_of(KINDS[kind](), FEATURES).once())
    assert [len(b[0]) for b in batches] == [4, 4, 2]
    np.testing.assert_array_equal(np.concatenate([b[1] for b in batches]), Y)


@pytest.mark.parametrize("kind", KINDS)
def test_parts_of_a_batch(kind):
    """Two processes have the rows of the same batches; each has zeros in place of the other's."""
    own = [source_of(KINDS[kind](), FEATURES, Part(i, 2)) for i in range(2)]
    whole = take(source_of(KINDS[kind](), FEATURES), 3)
    for first, second, (x, y) in zip(take(own[0], 3), take(own[1], 3), whole):
        assert first[0][2:] == second[0][:2] == [[0.0] * 3] * 2
        joined = sorted(map(tuple, first[0][:2] + second[0][2:]))
        assert joined == sorted(map(tuple, x))
        assert sorted(first[1][:2] + second[1][2:]) == sorted(y)


def test_parts_of_elements_that_are_tuples_of_one():
    features = Features.of_dims((mtf.Shape([("batch", 4), ("d", 3)]),))
    batches = tf2.data.Dataset.from_tensors((X[:4],)).repeat()
    own = [take(source_of(batches, features, Part(i, 2)), 1)[0][0] for i in range(2)]
    assert sorted(own[0][:2] + own[1][2:]) == X[:4].tolist()


def test_parts_of_an_epoch_that_is_no_whole_number_of_batches():
    """All processes have the same batches, also after an epoch whose last examples are left out."""
    values = tf2.data.Dataset.from_tensor_slices({"x": X[[0] * 11], "y": np.arange(11)})
    whole = take(source_of(values, FEATURES), 6)
    own = [take(source_of(values, FEATURES, Part(i, 2)), 6) for i in range(2)]
    assert [sorted(a[1][:2] + b[1][2:]) for a, b in zip(*own)] == [y for _, y in whole]


def test_orders_of_epochs():
    """They differ, hold each row once, and are the same wherever a run begins."""
    data = {"x": X[:8], "y": Y[:8]}
    batches = take(source_of(data, FEATURES, shuffle=True, seed=3), 8)
    epochs = [batches[i][1] + batches[i + 1][1] for i in range(0, 8, 2)]
    assert all(sorted(epoch) == list(range(8)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1
    assert take(source_of(data, FEATURES, shuffle=True, seed=3), 3, start=5) == batches[5:]
    assert take(source_of(data, FEATURES, shuffle=True, seed=4), 8) != batches


def test_a_dataset_of_a_tensorflow_1_graph():
    with tf.Graph().as_default():
        dataset = tf.data.Dataset.from_tensor_slices({"x": X, "y": Y})
        source = source_of(dataset, FEATURES)
        assert take(source, 3)[2] == [X[:4].tolist(), Y[:4].tolist()]
        assert [len(b[0]) for b in source.once()] == [4, 4, 2]


def test_hugging_face(tmp_path):
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_dict({"x": X.tolist(), "y": Y.tolist()})
    expected = take(source_of({"x": X, "y": Y}, FEATURES, shuffle=True, seed=1), 4)
    assert take(source_of(data, FEATURES, shuffle=True, seed=1), 4) == expected
    data.save_to_disk(str(tmp_path / "data"))
    assert take(source_of(str(tmp_path / "data"), FEATURES, shuffle=True, seed=1), 4) == expected


def test_a_function_that_returns_an_iterator_is_called_for_each_pass():
    def rows():
        yield from examples()[:8]

    source = source_of(rows, FEATURES)
    expected = [X[i : i + 4].tolist() for i in (0, 4, 0)]
    assert [batch[0] for batch in take(source, 3)] == expected
    assert [len(list(source.once())) for _ in range(2)] == [2, 2]


def test_datasets_of_eager_code_are_read_by_tf_data():
    dataset = tf2.data.Dataset.from_tensor_slices({"x": X, "y": Y})
    assert isinstance(source_of(dataset, FEATURES), Dataset)
    pairs = tf2.data.Dataset.from_tensor_slices((X, Y)).batch(4)
    pair = Features.of_dims(("batch:4,d:3", "batch:4"))
    assert take(source_of(pairs, pair), 1, start=3) == [[X[4:8].tolist(), Y[4:8].tolist()]]


def test_batches_of_tf_data_in_any_structure():
    """Smaller batches are left out before batches are counted, in a tuple of one, too."""
    expected = [X[4:8].tolist()]
    for data, dims in ((X, "batch:4,d:3"), ((X,), ("batch:4,d:3",))):
        batches = tf2.data.Dataset.from_tensor_slices(data).batch(4)
        assert take(source_of(batches, Features.of_dims(dims)), 1, start=3) == [expected]


def test_without_hugging_face(tmp_path):
    try:
        import datasets  # noqa: F401
    except ImportError:
        with pytest.raises(ImportError, match="pip install datasets"):
            source_of(str(tmp_path), FEATURES)
    else:
        with pytest.raises(Exception, match="is neither a"):
            source_of(str(tmp_path), FEATURES)


def test_evaluations_of_data_without_an_end():
    data = tf2.data.Dataset.from_tensor_slices(linear.DATA).batch(4).repeat()
    with pytest.raises(ValueError, match=r"fit: eval_data repeat without an end, .* take\(n\)"):
        linear.fit(1, eval_data=data)
    weights = linear.fit(1, data, eval_data=data.take(1)).variables
    with pytest.raises(ValueError, match="evaluate: the data repeat without an end"):
        mtf.train.evaluate(linear.model_fn, data, directory=weights, dims=linear.DIMS)


def test_structures():
    one = Features.of_dims("batch:2,d:3")
    assert one.values(X[:2])[0] is not None and one.packed([1]) == (1,)
    pair = Features.of_dims((one.shapes[0], "batch:2"))
    assert pair.packed([1, 2]) == (1, 2) and pair.values((1, 2)) == [1, 2]
    assert FEATURES.packed([1, 2]) == ({"x": 1, "y": 2},)
    assert Features.of_batch({"a": 1}).names == ["a"]
    with pytest.raises(ValueError, match="dims has 2 features, but the data gives a tuple of 3"):
        pair.values((1, 2, 3))


# -- dtypes that change


def means(data, **arguments):
    """The losses of a model that returns the mean of its batch, as float32."""
    dims = mtf.convert_to_shape("batch:2,p:1")

    def model_fn(mesh, x):
        w = mtf.get_variable(mesh, "w", [], initializer=tf.zeros_initializer())
        return mtf.reduce_mean(mtf.cast(x, tf.float32)) + 0.0 * w

    optimizer = mtf.optimize.SgdOptimizer(0.1)
    arguments = {"optimizer": optimizer, "log_every": 1, "progress": False, **arguments}
    return mtf.train.fit(model_fn, data, 2, dims=dims, **arguments).losses


def pair(first, second):
    return [np.array([[value], [value]]) for value in (first, second)]


# The values of two batches, and whether the first one's dtype has the second one's value.
DTYPES = {
    "an int and a fraction": (pair(1, 0.9), False),
    "uint8 and 300": (pair(np.uint8(1), np.int32(300)), False),
    "int32 and 2**40": (pair(np.int32(1), np.int64(2**40)), False),
    "bool and 5": (pair(True, 5), False),
    "uint8 and -1": (pair(np.uint8(1), np.int8(-1)), False),
    "int64 and a large uint64": (pair(np.int64(1), np.uint64(2**63)), False),
    "float16 and 1/3": (pair(np.float16(1), np.float32(1 / 3)), False),
    "a fraction and an int": (pair(0.5, 2), True),
    "int64 and int8": (pair(np.int64(2**40), np.int8(3)), True),
}


@pytest.mark.slow_but(3)
@pytest.mark.parametrize("case", DTYPES)
def test_dtypes_that_change(case):
    """A list has one dtype; what comes one by one keeps its values, or is an error."""
    data, fits = DTYPES[case]
    expected = [float(np.float32(batch[0, 0])) for batch in data]
    assert means(data) == pytest.approx(expected)
    examples = [row for batch in data for row in batch]
    assert means(examples) == pytest.approx(expected)
    for one_by_one in (lambda: (b for b in data), lambda: Again(data), lambda: Again(examples)):
        if fits:
            assert means(one_by_one()) == pytest.approx(expected)
            continue
        text = (
            rf"x of a batch is {data[1].dtype if data[1].dtype != np.float64 else 'float32'} with"
        )
        with pytest.raises(
            ValueError, match=text + r" the value .*, which no .*, the dtype of the"
        ):
            means(one_by_one())


def test_values_without_an_order():
    nan = np.array([np.nan], np.float16)
    assert np.isnan(with_dtype(nan, np.dtype(np.float32), "x")).all()
    for array, dtype in ((nan, np.int32), (np.array([1j]), np.float32), (np.array([1j]), np.int8)):
        with pytest.raises(ValueError, match=r"x of a batch is .*, the dtype of the first batch"):
            with_dtype(array, np.dtype(dtype), "x")


# -- batches of other sizes


def batches_of(*sizes):
    return [np.full([n, 1], i, np.float32) for i, n in enumerate(sizes)]


SOURCES = {
    "list": lambda sizes: batches_of(*sizes),
    "iterable": lambda sizes: Again(batches_of(*sizes)),
    "generator": lambda sizes: (batch for batch in batches_of(*sizes)),
    "function": lambda sizes: lambda: iter(batches_of(*sizes)),
    "tf.data": lambda sizes: tf2.data.Dataset.from_generator(
        lambda: batches_of(*sizes), output_signature=tf2.TensorSpec([None, 1])
    ),
    "endless tf.data": lambda sizes: tf2.data.Dataset.from_generator(
        lambda: batches_of(*sizes), output_signature=tf2.TensorSpec([None, 1])
    ).repeat(),
}


@pytest.mark.parametrize("kind", SOURCES)
def test_batches_of_other_sizes(kind):
    """The last of an epoch may be smaller; else rows would be lost without a word."""
    make, features = SOURCES[kind], Features.of_dims("batch:4,p:1")
    assert [
        b[0][0, 0] for b in itertools.islice(source_of(make([4, 4, 2]), features).training(0), 2)
    ] == [0, 1]
    with pytest.raises(ValueError, match=r"batch 1 of the data has 8 rows, but dims has batch=4"):
        take(source_of(make([4, 8, 4]), features), 3)
    with pytest.raises(ValueError, match="the first batch of the data has 3 rows, but dims has ba"):
        take(source_of(make([3, 3]), features), 3)
    if kind != "endless tf.data":
        assert [len(b[0]) for b in source_of(make([4, 8, 3]), features).once()] == [4, 8, 3]


EVALUATIONS = {
    "array": lambda x: x,
    "examples": lambda x: list(x),
    "batch": lambda x: [x],
    "tf.data": tf2.data.Dataset.from_tensor_slices,
}


@pytest.mark.parametrize("kind", EVALUATIONS)
@pytest.mark.parametrize("rows", [1, 3])
def test_evaluations_of_less_than_a_batch(rows, kind):
    dims = mtf.convert_to_shape("batch:4,p:1")

    def model_fn(mesh, x):
        w = mtf.get_variable(mesh, "w", [], initializer=tf.zeros_initializer())
        return mtf.reduce_mean(x) + 0.0 * w

    result = mtf.train.fit(
        model_fn,
        np.zeros([8, 1], np.float32),
        1,
        dims=dims,
        optimizer=mtf.optimize.SgdOptimizer(0.1),
        eval_data=EVALUATIONS[kind](np.arange(rows, dtype=np.float32)[:, None]),
        progress=False,
    )
    assert result.final["eval_loss"] == pytest.approx(np.mean(np.arange(rows)))
