"""Initial values are made part by part, and equal those of other implementations to the bit."""

import numpy as np
import pytest
import tensorflow as tf2
import tensorflow.compat.v1 as tf

pytest.importorskip("jax", "0.8", reason="mesh_tensorflow.pjrt needs jax>=0.8")


import mesh_tensorflow as mtf
from mesh_tensorflow.pjrt import _store

INITIALIZERS = {
    "default": None,
    "zeros": tf.zeros_initializer(),
    "constant": tf.constant_initializer(2.5),
    "uniform": tf.random_uniform_initializer(-1.0, 3.0),
    "normal": tf.random_normal_initializer(1.0, 0.5),
    "truncated": tf.truncated_normal_initializer(stddev=0.1),
    "scaled": tf.variance_scaling_initializer(2.0, "fan_out"),
    "of TensorFlow 2": tf2.keras.initializers.Constant(3.0),
    "a function": lambda shape, dtype, **_: tf.random.normal(shape, seed=4, dtype=dtype) / 3,
}
SHAPES = [[6, 10], [2, 3, 4, 10], [1, 2, 30], [64], []]


def made(make_impl, decorate, initializer, sizes):
    """Returns the store of a program with a variable."""
    names = [mtf.Dimension(f"d{i}", size) for i, size in enumerate(sizes)]

    @decorate
    def program():
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        v = mtf.get_variable(mesh, "v", mtf.Shape(names), initializer=initializer)
        return mtf.Lowering(mesh.graph, {mesh: make_impl()}).export_to_tf_tensor(v)

    tf2.random.set_seed(5)
    program()
    return program.store


def compare(initializer, sizes, layout):
    on_jax = mtf.pjrt.function(mesh_shape="rows:2", layout=layout)
    ours = made(mtf.pjrt.mesh_impl, on_jax, initializer, sizes)
    placed = mtf.placement_mesh_impl.PlacementMeshImpl("one:1", "", [""])
    theirs = made(lambda: placed, mtf.function, initializer, sizes)
    np.testing.assert_array_equal(ours.value("v"), theirs.value("v"))
    return ours.array("v")


@pytest.mark.slow_but(5)
@pytest.mark.slips  # layouts of dimensions that are not there
@pytest.mark.parametrize("name", INITIALIZERS)
def test_parts_are_those_of_the_whole(name, monkeypatch):
    monkeypatch.setattr(_store, "_MOST_ELEMENTS", 16)
    counts = []
    values = _store._Flat.values
    monkeypatch.setattr(
        _store._Flat,
        "values",
        lambda self, begin, count: counts.append(count) or values(self, begin, count),
    )
    for layout in ["d0:rows", "d1:rows"]:
        array = compare(INITIALIZERS[name], [6, 10], layout)
        assert len({str(s.index) for s in array.addressable_shards}) == 2
    assert counts and max(counts) <= 16


@pytest.mark.slips
@pytest.mark.parametrize("sizes", SHAPES, ids=str)
def test_shapes(sizes, monkeypatch):
    monkeypatch.setattr(_store, "_MOST_ELEMENTS", 12)
    last = f"d{len(sizes) - 1}:rows"
    for layout in {"", last if sizes else ""}:
        compare(tf.truncated_normal_initializer(), sizes, layout)


def test_other_initializers_make_the_whole():
    array = np.arange(60.0, dtype="float32").reshape(6, 10)
    found = compare(lambda shape, dtype, **_: tf.cumsum(tf.constant(array)), [6, 10], "d0:rows")
    np.testing.assert_array_equal(found, np.cumsum(array, 0))


def test_values_without_a_seed_differ(monkeypatch):
    monkeypatch.setattr(_store, "program_seed", lambda: None)
    initializer = tf.random_normal_initializer()
    stores = []
    for _ in range(2):
        on_jax = mtf.pjrt.function(mesh_shape="rows:2", layout="d0:rows")
        stores.append(made(mtf.pjrt.mesh_impl, on_jax, initializer, [8, 8]))
    first, second = (store.value("v").numpy() for store in stores)
    assert 0.5 < np.std(first) < 1.5 and not np.any(first == second)
