"""Fourier transforms: what is communicated, gradients as TensorFlow's, error texts."""

import numpy as np
import pytest
import tensorflow as tf2
import tensorflow.compat.v1 as tf
from helpers.errors import After, check_building
from helpers.world import A, B

import mesh_tensorflow as mtf
from mesh_tensorflow._core.errors import WrongTypeError
from mesh_tensorflow.simd_mesh_impl import SimdMeshImpl
from mesh_tensorflow.testing import harness

X, Y, Z = mtf.convert_to_shape("x:8,y:8,z:8").dims
K = mtf.convert_to_shape("kx:8,ky:8,kz:8").dims
RNG = np.random.default_rng(0)
BOX = (RNG.normal(size=[8, 8, 8]) + 1j * RNG.normal(size=[8, 8, 8])).astype(np.complex64)
FREQUENCIES = np.fft.fftn(BOX)
N = BOX.size

# Mesh, layout, new dimensions, and what is communicated: the collective, mesh axis and elements.
PENCIL = "x:rows,y:cols"
COMMUNICATION = {
    "whole": ("rows:2,cols:2", "", K, []),
    "pencil": (
        "rows:2,cols:2",
        f"{PENCIL},ky:rows,kz:cols",
        K,
        [("alltoall", 0, N), ("alltoall", 1, N)],
    ),
    "pencil_of_eight": (
        "rows:2,cols:4",
        f"{PENCIL},ky:rows,kz:cols",
        K,
        [("alltoall", 0, N), ("alltoall", 1, N)],
    ),
    "pencil_of_same_names": (
        "rows:2,cols:2",
        PENCIL,
        None,
        [("alltoall", 0, N)] * 2 + [("alltoall", 1, N)] * 2,
    ),
    "slab": ("all:4", "x:all,ky:all", K, [("alltoall", 0, N)]),
    "slab_of_same_names": ("all:4", "x:all", None, [("alltoall", 0, N)] * 2),
    "slab_gathered": ("all:2", "x:all", K, [("allconcat", 0, 2 * N)]),
    "slab_cut": ("all:2", "kx:all", K, []),
    "one_of_two_axes": (
        "rows:2,cols:2",
        "x:rows,kx:cols",
        K,
        [("allconcat", 0, 2 * N), ("alltoall", 0, 2 * N)],
    ),
}


def measured(mesh_shape, layout, new_dims, simd, monkeypatch):
    """Returns the transform, what the Lowering counted, and the collectives that were called."""
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    x = mtf.import_tf_tensor(mesh, tf.constant(BOX), [X, Y, Z])
    y = mtf.signal.fft3d(x, [X, Y, Z], new_dims)
    called = []
    kind = SimdMeshImpl if simd else mtf.placement_mesh_impl.PlacementMeshImpl
    for name in ("alltoall", "allconcat"):
        method = getattr(kind, name)

        def spy(self, x, mesh_axis, *axes, name=name, method=method):
            result = method(self, x, mesh_axis, *axes)
            of = x if name == "alltoall" else result
            called.append((name, mesh_axis, np.prod(of.slice_shape) * self.size))
            return result

        monkeypatch.setattr(kind, name, spy)
    placing = harness.Placing(mesh_shape, layout, simd=simd)
    lowered = harness.lower(mesh.graph, mesh, placing, [y])
    counted = [(c.kind, *c.mesh_axes, c.elements) for _, _, c in lowered.lowering.collectives]
    assert lowered.counted == lowered.predicted
    with harness.session() as session:
        return session.run(lowered.exports[0]), counted, called


@pytest.mark.slow_but(11)
@pytest.mark.parametrize("simd", [False, True])
@pytest.mark.parametrize("name", COMMUNICATION)
def test_communication(name, simd, tf_graph, monkeypatch):
    """All-to-alls, as few as there can be, of each layout; counted as they are predicted."""
    *row, expected = COMMUNICATION[name]
    value, counted, called = measured(*row, simd, monkeypatch)
    np.testing.assert_allclose(value, FREQUENCIES, atol=1e-3)
    assert sorted(counted) == expected
    # Exporting a result in SIMD gathers it.
    assert called[: len(counted)] == counted
    assert simd or called == counted


ON_DEVICES = {
    **{name: row for name, row in COMMUNICATION.items() if name != "one_of_two_axes"},
    "joined": ("rows:2,cols:2", "x:rows+cols,kz:rows+cols", K, [("alltoall", 0, N)]),
    # What would be padded is whole, as JAX has no arrays whose last parts are shorter.
    "uneven": ("rows:3", "x:rows?", None, []),
}


@pytest.mark.slow_but(5)
@pytest.mark.usefixtures("eight_devices")
@pytest.mark.parametrize("name", ON_DEVICES)
def test_communication_of_devices_of_jax(name):
    """XLA's partitioner would gather all that it transforms; so it does not see the transforms."""
    mesh_shape, layout, new_dims, expected = ON_DEVICES[name]

    def step(data):
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        x = mtf.import_tf_tensor(mesh, data, [X, Y, Z])
        y = mtf.signal.fft3d(x, [X, Y, Z], new_dims)
        lowering = mtf.Lowering(mesh.graph, {mesh: mtf.pjrt.mesh_impl()})
        return lowering.export_to_tf_tensor(y)

    function = mtf.pjrt.function(step, mesh_shape=mesh_shape, layout=layout)
    np.testing.assert_allclose(function(BOX), FREQUENCIES, atol=1e-3)
    kinds = {"alltoall": "all-to-all", "allconcat": "all-gather"}
    found = [c.kind for c in function.lower(BOX).collectives() for _ in range(c.count)]
    assert found == [kinds[kind] for kind, *_ in expected]
    with mtf.debug.nan_checks():  # for which TensorFlow runs the program
        checked = mtf.pjrt.function(step, mesh_shape=mesh_shape, layout=layout)(BOX)
    np.testing.assert_allclose(checked, FREQUENCIES, atol=1e-3)


@pytest.mark.usefixtures("eight_devices")
def test_there_and_back_on_devices_of_jax():
    """XLA gave whole transforms numbers in an order that its kernel for CPUs refuses."""
    mesh_shape, layout, *_ = COMMUNICATION["pencil"]

    @mtf.pjrt.function(mesh_shape=mesh_shape, layout=layout)
    def step():
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        x = mtf.random_normal(mesh, [X, Y, Z])
        waves = mtf.signal.fft3d(mtf.cast(x, tf.complex64), [X, Y, Z], K)
        number = mtf.add_n([mtf.mtf_range(mesh, k, tf.float32) for k in K])
        there = mtf.signal.ifft3d(waves * mtf.cast(number, waves.dtype), K, [X, Y, Z])
        lowering = mtf.Lowering(mesh.graph, {mesh: mtf.pjrt.mesh_impl()})
        return [lowering.export_to_tf_tensor(t) for t in (x, mtf.real(there))]

    x, found = step()
    number = sum(np.ogrid[:8, :8, :8])
    expected = np.fft.ifftn(np.fft.fftn(x) * number).real
    np.testing.assert_allclose(found, expected, atol=1e-4)


def test_uneven_sizes_are_padded():
    """z cannot be split by rows, yet takes the split of x and y in turn."""
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    x = mtf.zeros(mesh, "x:4,y:8,z:5", tf.complex64)
    d = x.shape.dims
    impl = mtf.placement_mesh_impl.PlacementMeshImpl("rows:2,cols:4", PENCIL, [""] * 8)
    y = mtf.signal.fftn(x, d[:2])
    # z has 6 elements while rows splits it; cols splits x instead of y.
    moved = [(c.kind, *c.mesh_axes, c.elements) for c in y.operation.cost(impl).collectives]
    assert sorted(moved) == [("alltoall", 0, 4 * 8 * 6)] * 2 + [("alltoall", 1, 4 * 8 * 6)] * 2
    small = mtf.signal.fft(x, d[0]).operation.cost(impl)
    assert [c.elements for c in small.collectives] == [192, 192]
    assert small.collectives[0].bytes == 192 * 8
    # 5 n log2(n) for each line of n = 4, zeros along z included.
    assert small.flops == 5 * 4 * 2 * 8 * 6


def test_a_row_alone_is_gathered():
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    impl = mtf.placement_mesh_impl.PlacementMeshImpl("all:2", "x:all", [""] * 2)
    y = mtf.signal.fft(mtf.zeros(mesh, [X], tf.complex64), X)
    [gather] = y.operation.cost(impl).collectives
    assert (gather.kind, gather.elements) == ("allconcat", 16)


# Of each function: its arguments here, and TensorFlow's function of the last axes.
GRADIENTS = {
    "fft": (lambda x: mtf.signal.fft(x, Z), tf.signal.fft, BOX),
    "ifft": (lambda x: mtf.signal.ifft(x, Z), tf.signal.ifft, BOX),
    "fft3d": (lambda x: mtf.signal.fft3d(x, [X, Y, Z], K), tf.signal.fft3d, BOX),
    "ifft3d": (lambda x: mtf.signal.ifft3d(x, [X, Y, Z], K), tf.signal.ifft3d, BOX),
    "rfft": (lambda x: mtf.signal.rfft(x, Z), tf.signal.rfft, BOX.real),
    "irfft": (
        lambda x: mtf.signal.irfft(x, Z, mtf.Dimension("r", 14)),
        lambda x: tf.signal.irfft(x, [14]),
        BOX,
    ),
    "irfft_odd": (
        lambda x: mtf.signal.irfft(x, Z, mtf.Dimension("r", 15)),
        lambda x: tf.signal.irfft(x, [15]),
        BOX,
    ),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_are_those_of_tensorflow(name):
    """Of a loss that is not linear, in a layout that splits two dimensions."""
    ours, theirs, data = GRADIENTS[name]
    x = tf2.constant(data)
    with tf2.GradientTape() as tape:
        tape.watch(x)
        y = theirs(x)
        loss = tf.reduce_sum(tf.abs(y) ** 2 + tf.math.real(y * y))
    expected = tape.gradient(loss, x).numpy()

    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    mesh.mesh_impl = mtf.placement_mesh_impl.PlacementMeshImpl(
        "rows:2,cols:2", "z:rows,x:cols,ky:rows", [""] * 4, merge="none"
    )
    x = mtf.import_tf_tensor(mesh, data, [X, Y, Z])
    y = ours(x)
    terms = mtf.square(mtf.abs(y)) + mtf.real(y * y)
    [dx] = mtf.gradients([mtf.reduce_sum(terms)], [x])
    scale = np.abs(expected).max()
    np.testing.assert_allclose(dx.numpy() / scale, expected / scale, atol=1e-5)
    assert dx.dtype == x.dtype


def test_second_gradient():
    """The Hessian of the sum of |x|^2 |fft(x)|^2 along a direction, by finite differences."""
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    dim = mtf.Dimension("x", 6)
    at, along = RNG.normal(size=[2, 6])

    def slope(x):
        cubes = mtf.square(mtf.abs(mtf.signal.rfft(x, dim))) * 0.5
        return mtf.gradients([mtf.reduce_sum(mtf.square(cubes))], [x])[0]

    x = mtf.import_tf_tensor(mesh, at, [dim])
    [found] = mtf.gradients([slope(x)], [x], [mtf.import_tf_tensor(mesh, along, [dim])])
    ends = [
        slope(mtf.import_tf_tensor(mesh, at + step * along, [dim])).numpy()
        for step in (1e-4, -1e-4)
    ]
    np.testing.assert_allclose(found.numpy(), (ends[0] - ends[1]) / 2e-4, rtol=1e-5)


def _complex(call):
    return After(lambda w: w.tensor([A, B], tf.complex64), lambda w, z: call(z))


C16 = mtf.Dimension("c", 16)
V, T = ValueError, WrongTypeError
BUILD = {
    "no_such_dimension": (
        _complex(lambda z: mtf.signal.fft(z, C16)),
        V,
        r"fft: import_\d:0 Shape\[a=8, b=16\] has no dimension c=16",
    ),
    "fft_of_real": (
        lambda w: mtf.signal.fft(w.x, A),
        T,
        r"^fft: import:0 .* float32 must be complex64 or complex128\. Write "
        r"mtf\.cast\(x, tf\.complex64\), or for real numbers mtf\.signal\.rfft\(x, dim\)$",
    ),
    "ifft_of_real": (
        lambda w: mtf.signal.ifftn(w.x, [A]),
        T,
        r"^ifft: .*must be complex64 or complex128. Write mtf.cast\(x, tf.complex64\)$",
    ),
    "rfft_of_complex": (
        _complex(lambda z: mtf.signal.rfft(z, B)),
        T,
        r"rfft: .*must be float32 or float64. Write mtf.cast\(x, tf.float32\), or .*mtf.signal.fft",
    ),
    "rfft_of_ints": (lambda w: mtf.signal.rfft(w.i, A), T, r"int32 must be float32 or float64"),
    "irfft_of_real": (
        lambda w: mtf.signal.irfft(w.x, B, mtf.Dimension("x", 30)),
        T,
        "irfft: .*must be complex64 or complex128",
    ),
    "new_size": (
        _complex(lambda z: mtf.signal.fft(z, B, mtf.Dimension("k", 8))),
        V,
        r"fft: b=16 has 16 frequencies, which do not fit k=8. Write mtf.Dimension\('k', 16\)",
    ),
    "rfft_size": (
        lambda w: mtf.signal.rfft(w.x, B, mtf.Dimension("k", 16)),
        V,
        r"rfft: b=16 has 9 frequencies, which do not fit k=16. Write mtf.Dimension\('k', 9\)",
    ),
    "irfft_size": (
        _complex(lambda z: mtf.signal.irfft(z, A, mtf.Dimension("x", 16))),
        V,
        r"irfft: the a=8 frequencies are those of a real signal of size 14 or 15, not of x=16\. "
        "Give the new dimension the size that the signal had",
    ),
    "twice": (
        _complex(lambda z: mtf.signal.fftn(z, [A, A])),
        V,
        r"fft: the dimensions to transform are a=8, a=8; name each once, of import",
    ),
    "none": (_complex(lambda z: mtf.signal.fftn(z, [])), V, r"to transform are none; name each"),
    "too_few": (
        _complex(lambda z: mtf.signal.fftn(z, [A, B], [A])),
        V,
        r"fft: a=8, b=16 cannot become a=8; give as many new dimensions",
    ),
    "taken": (
        After(
            lambda w: w.tensor([A, ("b", 8)], tf.complex64),
            lambda w, z: mtf.signal.fftn(z, [A], [("b", 8)]),
        ),
        V,
        r"repeats b=8",
    ),
    "no_list": (
        _complex(lambda z: mtf.signal.fftn(z, A)),
        T,
        r"takes a list of mtf.Dimensions of import_\d:0 .*, not Dimension",
    ),
    "name": (_complex(lambda z: mtf.signal.fft(z, "k")), V, r"fft: .* has no dimension 'k'\."),
    "not_three": (
        _complex(lambda z: mtf.signal.ifft3d(z, [A, B])),
        V,
        r"ifft3d transforms three dimensions of .*, not a=8, b=16; mtf.signal.ifftn takes any",
    ),
    "number": (lambda w: mtf.signal.fft(3.0, A), T, r"3.0 is a float, not a mtf.Tensor"),
    "fftfreq": (
        lambda w: mtf.signal.fftfreq(w.mesh, mtf.Dimension("x", 0)),
        V,
        r"fftfreq: x=0 has no frequencies; give a dimension of at least 1",
    ),
    "rfftfreq": (
        lambda w: mtf.signal.rfftfreq(w.mesh, A, new_dim=A),
        V,
        r"rfftfreq: a=8 has 5 frequencies, which do not fit a=8. Write mtf.Dimension\('a', 5\)",
    ),
    "fftshift": (lambda w: mtf.signal.fftshift(w.x, C16), V, "fftshift: .*has no dimension c=16"),
    "fftshift_name": (
        lambda w: mtf.signal.fftshift(w.x, 1),
        T,
        r"fftshift: 1 is neither the name of a dimension nor an mtf.Dimension; import:0 has Shape",
    ),
    "empty": (
        After(
            lambda w: w.tensor([A, mtf.Dimension("x", 0)], tf.complex64),
            lambda w, z: mtf.signal.fft(z, mtf.Dimension("x", 0)),
        ),
        V,
        r"fft: x=0 of import_\d:0 .* is empty; a transform takes at least one element",
    ),
}


@pytest.mark.parametrize("name", BUILD)
def test_errors(name):
    check_building(*BUILD[name])
