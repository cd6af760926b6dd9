"""Operations that cannot work on parts of a dimension are given whole tensors, wherever they are."""

import warnings

import numpy as np
import pytest
import tensorflow as tf2
import tensorflow.compat.v1 as tf

import mesh_tensorflow as mtf
from mesh_tensorflow import auto_mtf
from mesh_tensorflow.placement_mesh_impl import PlacementMeshImpl
from mesh_tensorflow.simd_mesh_impl import SimdMeshImpl, replicate
from mesh_tensorflow.testing.harness import session as new_session

pytestmark = pytest.mark.usefixtures("eight_devices")  # some use JAX
X = np.array([[3.0, 1.0, 2.0, 0.0], [0.0, 5.0, 4.0, 6.0]], np.float32)
LARGEST = np.maximum.accumulate(X, 1)
MESH = "all:2"


class CumMax(mtf.Operation):
    """The running maximum along d, which each processor computes of what it is given."""

    def __init__(self, x):
        super().__init__([x])
        self._outputs = [mtf.Tensor(self, x.shape, x.dtype)]

    def _unsplittable(self):
        return ["d"]

    def gradient(self, grad_ys):
        return [type(self)(grad_ys[0]).outputs[0]]

    def lower(self, lowering):
        value = lowering.mesh_impl(self).slicewise(
            lambda t: tf.transpose(tf.scan(tf.maximum, tf.transpose(t))),
            lowering.tensors[self.inputs[0]],
        )
        lowering.set_tensor_lowering(self.outputs[0], value)


class ByCall(CumMax):
    """Declares it as the classic's operations do."""

    def __init__(self, x):
        super().__init__(x)
        self._initialize_splittable_and_unsplittable_dims("splittable", ["d"])


class ByRest(CumMax):
    """Declares what may be split."""

    def __init__(self, x):
        super().__init__(x)
        self._initialize_splittable_and_unsplittable_dims("unsplittable", ["b"])


class ByField(CumMax):
    """Sets the fields."""

    def __init__(self, x):
        super().__init__(x)
        self._splittable_dims, self._unsplittable_dims = frozenset(["b"]), frozenset(["d"])


class ByProperty(CumMax):
    """Has a property of its own."""

    unsplittable_dims = frozenset(["d"])


DECLARATIONS = [CumMax, ByCall, ByRest, ByField, ByProperty]


def program(make_impl, layout, within=lambda op, x: op(x).outputs[0], op=CumMax, data=X):
    """Builds and lowers one operation; returns the value of it."""
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    x = mtf.import_tf_tensor(mesh, tf.constant(data), "b:2,d:4")
    v = mtf.get_variable(mesh, "v", "d:4", initializer=tf.zeros_initializer())
    y = within(op, x + v)
    return mtf.Lowering(mesh.graph, {mesh: make_impl(layout)}).export_to_tf_tensor(y)


def placed(layout):
    return PlacementMeshImpl(MESH, layout, ["cpu:0"] * 2)


def in_session(layout, **options):
    with tf.Graph().as_default(), tf.Session() as session:
        y = program(placed, layout, **options)
        session.run(tf.global_variables_initializer())
        return session.run(y)


def in_simd(layout, **options):
    with tf.Graph().as_default(), new_session() as session:
        y = replicate(
            lambda: program(lambda rules: SimdMeshImpl(MESH, rules), layout, **options),
            devices=["/cpu:0", "/cpu:1"],
        )
        session.run(tf.global_variables_initializer())
        return session.run(y)


def in_eager_code(layout, **options):
    return program(placed, layout, **options).numpy()


def in_function(layout, **options):
    return mtf.function(lambda: program(placed, layout, **options))().numpy()


def on_mesh(layout, op=CumMax, within=lambda op, x: op(x).outputs[0]):
    """Looks at the value of a Tensor on a Mesh with an implementation, in eager code."""
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    mesh.mesh_impl = placed(layout)
    return within(op, mtf.import_tf_tensor(mesh, tf.constant(X), "b:2,d:4")).numpy()


def through_jax(layout, **options):
    step = mtf.pjrt.function(
        lambda: program(lambda _: mtf.pjrt.mesh_impl(), layout, **options),
        mesh_shape=MESH,
        layout=layout,
    )
    return np.asarray(step())


FRONT_ENDS = [in_session, in_simd, in_eager_code, in_function, on_mesh, through_jax]


@pytest.mark.slow_but(4)
@pytest.mark.parametrize("run", FRONT_ENDS)
def test_front_ends(run):
    for layout in ("", "b:all", "d:all"):
        np.testing.assert_array_equal(run(layout), LARGEST)


@pytest.mark.parametrize("op", DECLARATIONS)
def test_ways_to_declare(op):
    for layout in ("b:all", "d:all"):
        np.testing.assert_array_equal(on_mesh(layout, op), LARGEST)


def in_loop(op, x):
    def body(i, t):
        return i + 1, op(t).outputs[0]

    start = mtf.constant(x.mesh, 0, [], dtype=tf.int32)
    return mtf.while_loop(lambda i, t: mtf.less(i, 2), body, [start, x])[1]


def in_condition(op, x):
    def cond(i, t):
        return mtf.less(i, mtf.cast(mtf.reduce_sum(op(x).outputs[0]), tf.int32))

    start = mtf.constant(x.mesh, 100, [], dtype=tf.int32)
    y = mtf.while_loop(cond, lambda i, t: (i + 1, t), [start, x])[1]
    return y


def recomputed(op, x):
    y = mtf.recompute_grad(lambda t: op(t * 1.0).outputs[0] * 1.0, [x])
    return mtf.gradients([y], [x])[0]


PLACES = [in_loop, in_condition, recomputed]


@pytest.mark.slow_but(3)
@pytest.mark.parametrize("run", [in_session, in_function])
@pytest.mark.parametrize("within", PLACES)
def test_inner_operations(within, run):
    whole = run("", within=within)
    for layout in ("b:all", "d:all"):
        np.testing.assert_array_equal(run(layout, within=within), whole)


def test_a_gradient_by_tensorflow():
    """A dimension that the function needs whole is whole in its gradient, too."""

    def within(op, x):
        y = mtf.slicewise(tf.sort, [x], splittable_dims=[x.shape.dims[0]])
        return mtf.gradients([y], [x])[0]

    for layout in ("b:all", "d:all"):
        np.testing.assert_array_equal(in_session(layout, within=within), np.ones([2, 4]))


def test_a_mesh_dimension_of_one_processor_splits_nothing():
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    y = CumMax(mtf.import_tf_tensor(mesh, tf2.constant(X), "b:2,d:4")).outputs[0]
    impl = PlacementMeshImpl("one:1,all:2", "d:one,b:all", ["cpu:0"] * 2)
    value = mtf.Lowering(mesh.graph, {mesh: impl}).export_to_tf_tensor(y)
    np.testing.assert_array_equal(value, LARGEST)


@pytest.mark.parametrize("again, factor", [(False, 1), (True, 4)])
def test_slices_that_are_imported_may_be_split(again, factor):
    """They are in one layout, which no choice of a layout may change, and which need not be none."""
    mesh, impl = mtf.Mesh(mtf.Graph(), "mesh"), placed("d:all")

    def imported():
        slices = [tf2.constant(X[:, :2]), tf2.constant(X[:, 2:])]
        whole = impl.LaidOutTensor.from_tensor_list(slices)
        return mtf.import_laid_out_tensor(mesh, whole, "b:2,d:4")

    y = imported()
    if again:
        y = in_loop(lambda t: (imported() + t).operation, y) + imported()
    value = mtf.Lowering(mesh.graph, {mesh: impl}).export_to_tf_tensor(y)
    np.testing.assert_array_equal(value, factor * X)


def test_layouts_that_are_found():
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    y = CumMax(mtf.import_tf_tensor(mesh, tf2.constant(X), "b:2,d:4")).outputs[0]
    for objective in ("memory", "time"):
        layout = auto_mtf.layout(mesh.graph, MESH, [y], objective=objective)
        assert str(layout) == "LayoutRules{b:all}"


class OneLayout:
    """A mesh implementation from elsewhere, with the methods that the classic's has."""

    def __init__(self, layout):
        self._mesh_impl = placed(layout)

    def __getattr__(self, name):
        if name in ("with_layout", "execution_impl"):
            raise AttributeError(name)
        return getattr(self._mesh_impl, name)


def test_a_mesh_implementation_of_one_layout():
    np.testing.assert_array_equal(program(OneLayout, "b:all"), LARGEST)
    with pytest.raises(
        ValueError,
        match=r"dimension d=4 of CumMax is split over mesh dimension all=2, but CumMax cannot work "
        r"on parts of it, and OneLayout has no with_layout, .*Derive it from mtf\.MeshImpl, drop the "
        r'layout rule d:all, or rename .* mtf\.rename_dimension\(x, "d", "d_unsplit"\)\n  while',
    ):
        program(OneLayout, "d:all")


def test_what_is_gathered_is_told_once():
    """By the first operation of its kind, where there is nothing else that a mesh could split."""

    def run(op, size):
        x = np.zeros([1, size], np.float32)
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        y = op(mtf.import_tf_tensor(mesh, tf.constant(x), f"b:1,d:{size}")).outputs[0]
        lowering = mtf.Lowering(mesh.graph, {mesh: placed("d:all")})
        return [c.kind for _, _, c in lowering.collectives], lowering.export_to_tf_tensor(y)

    class Copied(CumMax):
        def lower(self, lowering):
            lowering.set_tensor_lowering(self.outputs[0], lowering.tensors[self.inputs[0]])

        def _unsplittable(self):
            return ["d"]

    with pytest.warns(
        mtf.MeshTensorFlowWarning,
        match=r"Copied cannot work on parts of d=524288, so that each processor gathers import:0 "
        r"Shape\[b=1, d=524288\], 1,048,576 bytes more than its slice",
    ):
        assert run(Copied, 2**19)[0] == ["allconcat"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert run(Copied, 2**19)[0] == ["allconcat"]
        assert run(CumMax, 4)[0] == ["allconcat"]  # little
