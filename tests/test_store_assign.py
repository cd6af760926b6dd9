"""What a store assigns: values that a variable can hold, or an error that names variable and value."""

import numpy as np
import pytest
import tensorflow as tf2

import mesh_tensorflow as mtf

pytestmark = pytest.mark.usefixtures("eight_devices")  # some use JAX
DTYPES = {
    "w": tf2.float32, "h": tf2.bfloat16, "i": tf2.int32, "b": tf2.bool, "c": tf2.complex64,
    "long": tf2.int64,
}  # fmt: skip


ZEROS = tf2.compat.v1.zeros_initializer()


def placed_store():
    """A store with variables in slices, which a function has captured."""

    @mtf.function
    def step():
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        for name, dtype in DTYPES.items():
            mtf.get_variable(mesh, name, "a:4", dtype=dtype, initializer=ZEROS, trainable=False)
        impl = mtf.placement_mesh_impl.PlacementMeshImpl("x:2", "a:x", ["cpu:0"] * 2)
        lowering = mtf.Lowering(mesh.graph, {mesh: impl})
        return [lowering.export_to_tf_tensor(v.value) for v in mesh.graph.all_variables]

    step()
    return step.store


def jax_store():

    @mtf.pjrt.function(mesh_shape="x:2", layout="a:x")
    def step():
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        for name, dtype in DTYPES.items():
            mtf.get_variable(mesh, name, "a:4", dtype=dtype, initializer=ZEROS, trainable=False)
        lowering = mtf.Lowering(mesh.graph, {mesh: mtf.pjrt.mesh_impl()})
        return [lowering.export_to_tf_tensor(v.value) for v in mesh.graph.all_variables]

    step()
    return step.store


@pytest.fixture(scope="module", params=[placed_store, jax_store])
def store(request):
    return request.param()


# variable, value, what is stored
FITS = [
    ("w", [1, 2, 3, 4], [1, 2, 3, 4]),
    ("w", [True, False, True, False], [1, 0, 1, 0]),
    ("w", np.full(4, 0.1), [np.float32(0.1)] * 4),
    ("w", [float("nan"), float("inf"), 0.0, -1.0], [np.nan, np.inf, 0, -1]),
    ("w", tf2.ones([4], tf2.bfloat16), [1] * 4),
    ("h", np.full(4, 1.001), [1] * 4),
    ("i", np.full(4, 2.0), [2] * 4),
    ("i", np.full(4, 2**31 - 1, np.int64), [2**31 - 1] * 4),
    ("b", [1, 0, 1, 0], [True, False, True, False]),
    ("b", [1.0, 0.0, 1.0, 0.0], [True, False, True, False]),
    ("c", [1, 2.5, 3, 4], [1, 2.5, 3, 4]),
    ("c", np.full(4, 1j, np.complex128), [1j] * 4),
    ("long", np.full(4, 2**40), [2**40] * 4),
]
# variable, value, error, text
LOST = [
    ("w", [1j] * 4, TypeError, r"'w' Shape\[a=4\] of float32 .*complex128 values, such as .*1j"),
    ("w", "abc", TypeError, r"'w' .*string values"),
    ("w", ["a", 1.0, 2.0, 3.0], TypeError, "'w' .*is no array of numbers"),
    ("w", np.array([1.0, 1e300, 0.0, 0.0]), ValueError, r"1e\+300.*element at \[1\].*inf"),
    ("w", 3.0, ValueError, r"'w' .*a value of shape \(\): give one of \[4\]"),
    ("w", np.ones([1, 4]), ValueError, r"shape \(1, 4\)"),
    ("w", np.ones(8), ValueError, r"shape \(8,\)"),
    ("w", np.ones(2), ValueError, r"shape \(2,\)"),
    ("h", np.array([1e39] * 4), ValueError, r"'h' .*of bfloat16 .*1e\+39"),
    ("i", [1.7, 2.0, 3.0, 4.0], ValueError, r"'i' .*of int32 .*1\.7.*element at \[0\] of float32"),
    ("i", [1.0, float("nan"), 3.0, 4.0], ValueError, r"nan.*element at \[1\]"),
    ("i", [0, 0, 2**40, 0], ValueError, r"1099511627776.*element at \[2\] of int64"),
    ("b", [0, 1, 2, 0], ValueError, r"'b' .*of bool .*2.*element at \[2\].*True"),
    ("long", [1e30] * 4, ValueError, "'long' .*of int64"),
]


@pytest.mark.parametrize("name, value, expected", FITS)
def test_what_fits(store, name, value, expected):
    store.assign(name, value)
    np.testing.assert_array_equal(np.asarray(store.value(name)), np.asarray(expected))


@pytest.mark.parametrize("name, value, error, text", LOST)
def test_what_would_be_lost(store, name, value, error, text):
    before = store.value(name).numpy()
    with pytest.raises(error, match=text):
        store.assign(name, value)
    np.testing.assert_array_equal(store.value(name).numpy(), before)


def test_names_that_are_near(store):
    for call in (store.value, lambda name: store.assign(name, 1.0)):
        with pytest.raises(KeyError, match=r"'longs' in the store: it has .*did you mean long\?"):
            call("longs")
    with pytest.raises(KeyError, match="no variable 'w' in the store: it is empty"):
        mtf.VariableStore().value("w")


def test_names_of_a_graph_that_are_near(tf_graph):
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    mtf.get_variable(mesh, "first/kernel", "d:4")
    with pytest.raises(KeyError, match=r"'first/kernal' in the graph; did you mean first/kernel\?"):
        mesh.graph.name_to_variable["first/kernal"]
    assert mesh.graph.name_to_variable.get("first/kernal") is None


class Parts(dict):
    """Arrays by name, of which each part is asked for alone."""

    def parts(self, name):
        return lambda index: self[name][index]

    def shape(self, name):
        return self[name].shape


# Sizes as [a, b, c] of the array that is given, and how its axes become those of the variable.
LARGE = [
    ("straight", [80, 129, 70], (0, 1, 2)),
    ("turned", [1030, 2, 514], (2, 0, 1)),
    ("middle", [65, 130, 71], (2, 1, 0)),
    ("small_axes", [3, 90000, 4], (2, 1, 0)),
]


@pytest.mark.parametrize("layout", ["", "d0:x,d2:y", "d1:x"])
@pytest.mark.parametrize("given, kept", [
    ("bfloat16", "bfloat16"), ("bfloat16", "float32"), ("float16", "float32"),
    ("float32", "float32"), ("float32", "bfloat16"),
])  # fmt: skip
@pytest.mark.parametrize("sizes, order", [case[1:] for case in LARGE], ids=[c[0] for c in LARGE])
def test_large_values_in_any_order_of_axes(sizes, order, given, kept, layout):
    dtype = tf2.as_dtype(given).as_numpy_dtype
    array = np.random.RandomState(0).randn(*sizes).astype(dtype)
    array[0, 0, :3] = [np.nan, np.inf, -0.0]
    view = array.transpose(order)
    expected = view.astype(tf2.as_dtype(kept).as_numpy_dtype)
    store = mtf.VariableStore()
    store.begin_with(Parts(w=view))

    @mtf.function(store=store)
    def step():
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        shape = [mtf.Dimension(f"d{i}", size) for i, size in enumerate(view.shape)]
        w = mtf.get_variable(mesh, "w", shape, dtype=tf2.as_dtype(kept))
        devices = ["cpu:0"] * 4
        impl = mtf.placement_mesh_impl.PlacementMeshImpl("x:2,y:2", layout, devices, uneven=True)
        lowering = mtf.Lowering(mesh.graph, {mesh: impl})
        return lowering.export_to_tf_tensor(w)

    step()
    array[...] = 0  # the variable has memory of its own
    found = store.value("w").numpy()
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(found.astype(np.float32), expected.astype(np.float32))
    store.assign("w", np.ones(view.shape))
    assert np.all(store.value("w").numpy() == 1)
