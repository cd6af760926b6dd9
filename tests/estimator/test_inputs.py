"""Input functions of arrays: the batches that tf.estimator's had."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from helpers.estimator import estimator_models as models

from mesh_tensorflow import estimator

numpy_input_fn = estimator.inputs.numpy_input_fn
X, Y = np.arange(10, dtype=np.float32).reshape(5, 2), np.arange(5)


def batches(most=6, **kwargs):
    """Returns the element's specification, and the first batches as lists."""
    with tf.Graph().as_default():
        data = numpy_input_fn(**{"shuffle": False, **kwargs})()
        element = tf.data.make_one_shot_iterator(data).get_next()
        found = []
        with tf.Session() as session:
            while len(found) < most:
                try:
                    found.append(tf.nest.map_structure(lambda a: a.tolist(), session.run(element)))
                except tf.errors.OutOfRangeError:
                    break
        return tf.nest.map_structure(lambda t: (t.dtype, t.shape.as_list()), element), found


# Found with tf.estimator.inputs of TensorFlow 2.15.
BATCHES = {
    "arrays": (
        {"x": X, "y": Y, "batch_size": 2},
        ((tf.float32, [None, 2]), (tf.int64, [None])),
        [
            ([[0, 1], [2, 3]], [0, 1]),
            ([[4, 5], [6, 7]], [2, 3]),
            ([[8, 9]], [4]),
        ],
    ),
    "two_epochs": (
        {"x": {"a": Y}, "y": Y * 2, "batch_size": 2, "num_epochs": 2},
        ({"a": (tf.int64, [None])}, (tf.int64, [None])),
        [({"a": a}, [2 * i for i in a]) for a in [[0, 1], [2, 3], [4, 0], [1, 2], [3, 4]]],
    ),
    "no_end": (
        {"x": {"a": Y}, "y": {"b": -Y}, "batch_size": 3, "num_epochs": None},
        ({"a": (tf.int64, [3])}, {"b": (tf.int64, [3])}),
        [
            ({"a": a}, {"b": [-i for i in a]})
            for a in [[0, 1, 2], [3, 4, 0], [1, 2, 3], [4, 0, 1], [2, 3, 4], [0, 1, 2]]
        ],
    ),
    "default_batch": ({"x": Y}, (tf.int64, [None]), [[0, 1, 2, 3, 4]]),
    "texts": (
        {"x": {"t": np.array(["a", "bc"])}, "batch_size": 1},
        {"t": (tf.string, [None])},
        [{"t": [b"a"]}, {"t": [b"bc"]}],
    ),
    "no_rows": ({"x": X[:0]}, (tf.float32, [None, 2]), []),
    "no_rows_without_end": ({"x": X[:0], "num_epochs": None}, (tf.float32, [128, 2]), []),
}


@pytest.mark.parametrize("name", sorted(BATCHES))
def test_batches(name):
    kwargs, spec, expected = BATCHES[name]
    assert batches(**kwargs) == (spec, expected)


def test_shuffled_rows_come_once_in_an_epoch():
    n = 3000  # more than the capacity that is ignored
    _, [first, second] = batches(
        x=np.arange(n), y=-np.arange(n), batch_size=n, num_epochs=2, shuffle=True
    )
    for rows, labels in (first, second):
        assert sorted(rows) == list(range(n)) and labels == [-i for i in rows]
    assert first[0] != second[0] != list(range(n))


def test_train_and_evaluate(tmp_path):
    """Steps are those of the data, whose arrays are not in the graph that is saved."""
    big = np.concatenate([models.X] * 200)
    data = numpy_input_fn({"x": big}, np.concatenate([models.Y] * 200), 800, 2, shuffle=False)
    config = estimator.RunConfig(model_dir=str(tmp_path))
    trained = estimator.Estimator(models.linear_model, params={"lr": 0.1}, config=config)
    trained.train(data)
    assert trained.get_variable_value("global_step") == 16
    assert (tmp_path / "graph.pbtxt").stat().st_size < 4 * big.nbytes
    exact = numpy_input_fn({"x": models.X}, models.Y, 32, shuffle=False)
    metrics = trained.evaluate(exact)
    assert 0 < metrics["loss"] < 1
    found = list(trained.predict(numpy_input_fn({"x": models.X}, batch_size=10, shuffle=False)))
    assert np.mean(np.abs([p["p"] for p in found] - models.Y)) == pytest.approx(
        metrics["mae"], 1e-5
    )


ERRORS = {
    "shuffle": ({"x": X, "shuffle": None}, ValueError, "shuffle=None must be given, as True"),
    "list": ({"x": [1, 2]}, TypeError, "x must be an array or a dict of arrays, but is a list; np"),
    "labels": ({"x": X, "y": [1]}, TypeError, "y must be an array or a dict"),
    "empty": ({"x": {}}, ValueError, "x is a dict without arrays"),
    "no_labels": ({"x": X, "y": {}}, ValueError, "y is a dict without arrays"),
    "keys": ({"x": {"a": Y, "b": Y}, "y": {"a": Y}}, ValueError, r"both have the keys \['a'\]"),
    "rows": ({"x": {"a": Y}, "y": X[:3]}, ValueError, r"as many rows.* \[\(5,\), \(3, 2\)\]"),
    "number": ({"x": {"a": 3}}, ValueError, r"x\['a'\] has no rows, but is the single value 3"),
    "batch": (
        {"x": X, "batch_size": 0},
        ValueError,
        "batch_size=0 must be an integer of at least 1",
    ),
    "epochs": ({"x": X, "num_epochs": 0}, ValueError, "num_epochs=0 .* or None, for no end"),
}


@pytest.mark.parametrize("name", sorted(ERRORS))
def test_errors(name):
    kwargs, error, text = ERRORS[name]
    with pytest.raises(error, match=text):
        numpy_input_fn(**{"shuffle": False, **kwargs})
