"""What operations declare of dimensions that no layout may split is checked, wherever they are."""

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
REFUSED = (
    r"dimension d=4 of .* is split over mesh dimension all=2, but {cls} .* cannot work on parts of "
    r"it\. Drop the layout rule d:all, or rename the dimension before this operation with "
    r'mtf\.rename_dimension\(x, "d", "d_unsplit"\)\n  while lowering {cls}'
)


class CumMax(mtf.Operation):
    """The running maximum along d, which each processor computes of its slice."""

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
    before = list(mesh.graph.operations)
    try:
        return mtf.Lowering(mesh.graph, {mesh: make_impl(layout)}).export_to_tf_tensor(y)
    except ValueError:
        assert mesh.graph.operations == before
        raise


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
    for layout in ("", "b:all"):
        np.testing.assert_array_equal(run(layout), LARGEST)
    with pytest.raises(ValueError, match=REFUSED.format(cls="CumMax")):
        run("d:all")


@pytest.mark.parametrize("op", DECLARATIONS)
def test_ways_to_declare(op):
    np.testing.assert_array_equal(on_mesh("b:all", op), LARGEST)
    with pytest.raises(ValueError, match=REFUSED.format(cls=op.__name__)):
        on_mesh("d:all", op)


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
    assert run("b:all", within=within).shape == (2, 4)
    with pytest.raises(ValueError, match=REFUSED.format(cls="CumMax")):
        run("d:all", within=within)


def test_a_gradient_by_tensorflow():
    """A dimension that the function may not be split along is not split in its gradient either."""

    def within(op, x):
        y = mtf.slicewise(tf.sort, [x], splittable_dims=[x.shape.dims[0]])
        return mtf.gradients([y], [x])[0]

    np.testing.assert_array_equal(in_session("b:all", within=within), np.ones([2, 4]))
    with pytest.raises(ValueError, match=REFUSED.format(cls="SlicewiseOperation")):
        in_session("d:all", within=within)


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


def test_nothing_is_changed_by_a_layout_that_is_refused():
    with mtf.VariableStore().scope() as store:
        with pytest.raises(ValueError, match=REFUSED.format(cls="CumMax")):
            program(placed, "d:all")
        assert repr(store) == "<VariableStore: 1 variable, 4 parameters: v>"  # not in slices
        program(placed, "b:all")
        assert "in slices on a mesh all=2" in repr(store)
