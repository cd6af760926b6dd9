"""A class that defines nothing but `lower` works wherever operations do; so do its defaults."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import mesh_tensorflow as mtf
from mesh_tensorflow import auto_mtf
from mesh_tensorflow._core.operation import with_inner_operations
from mesh_tensorflow._core.placement import walk

A, B = mtf.Dimension("a", 4), mtf.Dimension("b", 6)
X = np.arange(24, dtype=np.float32).reshape(4, 6) / 10
DEVICES = ["cpu:0"] * 4


class OnlyLower(mtf.Operation):
    """2 x + y; it finds its inputs by attributes of its own, one of them in a tuple."""

    def __init__(self, x, y):
        super().__init__([x, y])
        self.first, self.others = x, (y, "kept")
        self._outputs = [mtf.Tensor(self, x.shape, x.dtype)]

    def lower(self, lowering):
        assert [self.first, self.others[0]] == self.inputs
        mesh_impl = lowering.mesh_impl(self)
        x, y = (lowering.tensors[t] for t in (self.first, self.others[0]))
        value = mesh_impl.slicewise(lambda s, t: 2 * s + t, x, y)
        lowering.set_tensor_lowering(self.outputs[0], value)


def only_lower(x, y):
    return OnlyLower(x, y).outputs[0]


@pytest.fixture
def mesh(tf_graph):
    return mtf.Mesh(mtf.Graph(), "mesh")


@pytest.fixture
def x(mesh):
    return mtf.import_tf_tensor(mesh, tf.constant(X), [A, B])


def lowered(mesh, layout="a:x,b:y", mesh_shape="x:2,y:2"):
    impl = mtf.placement_mesh_impl.PlacementMeshImpl(mesh_shape, layout, DEVICES)
    return mtf.Lowering(mesh.graph, {mesh: impl})


def value(lowering, y):
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        session.run(lowering.copy_masters_to_slices())
        return session.run(lowering.export_to_tf_tensor(y))


@pytest.mark.parametrize("layout", ["", "a:x", "b:x", "a:x,b:y"])
def test_layouts(mesh, x, layout):
    y = only_lower(x, x + 1)
    np.testing.assert_allclose(value(lowered(mesh, layout), y), 3 * X + 1, rtol=1e-6)


def test_sums_are_made_before_it_works(mesh, x):
    total = mtf.reduce_sum(x, reduced_dim=B)
    y = only_lower(total, total)
    np.testing.assert_allclose(value(lowered(mesh), y), 3 * X.sum(1), rtol=1e-6)


def test_variables_that_are_joined_under_it(mesh):
    """Those that are alike become one variable, also where attributes refer to them."""
    v, w = (
        mtf.get_variable(mesh, name, [A, B], initializer=tf.constant_initializer(n))
        for name, n in [("v", 1.0), ("w", 2.0)]
    )
    y = only_lower(v, w)
    lowering = lowered(mesh)
    assert len(mesh.graph.all_variables) == 1
    np.testing.assert_allclose(value(lowering, y), np.full([4, 6], 4.0))


def test_copies_read_copies(mesh, x):
    """What is computed again for a gradient reads what was computed again."""

    def fn(t):
        h = mtf.square(t)
        return h * mtf.stop_gradient(only_lower(h, h))

    y = mtf.recompute_grad(fn, [x])
    [grad] = mtf.gradients([y], [x])
    again = [op for op in mesh.graph.operations if isinstance(op, OnlyLower) and op.original]
    assert len(again) == 1 and again[0].first is not again[0].original.first
    np.testing.assert_allclose(value(lowered(mesh), grad), 2 * X * 3 * X**2, rtol=1e-5)


@pytest.mark.parametrize("where", ["condition", "body"])
def test_in_loops(mesh, x, where):
    """It may count on a slice for each processor, so that no mesh is merged then."""

    def cond(i, t):
        limit = only_lower(i, i) if where == "condition" else 3 * i
        return mtf.less(limit, 9)

    def body(i, t):
        return i + 1, (only_lower(t, t) if where == "body" else 3 * t)

    start = mtf.constant(mesh, 0, [], dtype=tf.int32)
    _, y = mtf.while_loop(cond, body, [start, x])
    assert not any(isinstance(op, OnlyLower) for op in mesh.graph.operations)
    assert any(isinstance(op, OnlyLower) for op in with_inner_operations(mesh.graph.operations))
    lowering = lowered(mesh)
    assert lowering.mesh_impl(mesh).size == 4
    np.testing.assert_allclose(value(lowering, y), 27 * X, rtol=1e-5)


def test_a_program_of_the_package_is_merged(mesh, x):
    y = 3 * x
    lowering = lowered(mesh)
    assert lowering.mesh_impl(mesh).size == 1
    np.testing.assert_allclose(value(lowering, y), 3 * X, rtol=1e-6)


@pytest.mark.parametrize("objective", ["memory", "time"])
def test_layouts_are_found_for_it(mesh, x, objective):
    y = only_lower(x, x)
    layout = auto_mtf.layout(
        mesh.graph, mtf.Shape([mtf.Dimension("x", 2)]), [y], objective=objective
    )
    assert str(layout) in ("LayoutRules{a:x}", "LayoutRules{b:x}")


def test_eagerly():
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    x = mtf.import_tf_tensor(mesh, tf.constant(X), [A, B])
    y = only_lower(x, x)
    np.testing.assert_allclose(lowered(mesh).export_to_tf_tensor(y), 3 * X, rtol=1e-6)


def test_defaults(mesh, x):
    impl = mtf.placement_mesh_impl.PlacementMeshImpl("x:2,y:2", "a:x,b:y", DEVICES)
    op = only_lower(x, x).operation
    assert op.loop is None and not op.inner_operations and op.gradient_of is None
    assert op.takes_memory and not op.passes_on({"a", "b"})
    assert not op.may_begin_sum({"a", "b"}) and not op.delays_sums
    assert op.cost_key() is None
    assert op.splittable_dims == {"a", "b"} and not op.unsplittable_dims
    assert walk(mesh.graph.operations, impl).costs[-1][1].flops == 24


class OwnCost(OnlyLower):
    """A class with a cost that says nothing of what that depends on."""

    def cost(self, mesh_impl):
        return super().cost(mesh_impl) + super().cost(mesh_impl)

    def partial_sums(self, mesh_impl, pending):
        return {}


def test_a_cost_that_is_like_no_other(x):
    one, two = OwnCost(x, x), OwnCost(x, x)
    assert one.cost_key() is one and two.cost_key() is two
    # What both inputs and the output have is not summed over.
    assert not one.may_begin_sum({"a", "b"}) and not one.delays_sums


class OwnSums(mtf.ReshapeOperation):
    """A class of the package with other sums, of which the inherited key knows nothing."""

    def partial_sums(self, mesh_impl, pending):
        return None if pending else {}


def test_a_key_is_not_inherited_by_another_cost(x):
    op = OwnSums(x, [B, A])
    assert op.cost_key() is op
    assert mtf.ReshapeOperation(x, [B, A]).cost_key() is None


def test_what_gradients_belong_to(mesh, x):
    y = mtf.square(x)
    mtf.gradients([y], [x])
    made = [op for op in mesh.graph.operations if op.gradient_of is not None]
    assert made and all(op.gradient_of is y.operation for op in made)
    assert all("/gradients/" in op.name for op in made)
    assert mesh.graph.differentiated is None


def every_class(cls=mtf.Operation):
    for sub in cls.__subclasses__():
        yield sub
        yield from every_class(sub)


def test_the_package_says_what_costs_depend_on():
    """Nothing of the package relies on the default for classes with a cost of their own."""
    methods = ("begun_sums", "cost", "partial_sums")
    for cls in every_class():
        if not cls.__module__.startswith("mesh_tensorflow.") or cls.loop is not mtf.Operation.loop:
            continue
        if any(getattr(cls, m) is not getattr(mtf.Operation, m) for m in methods):
            assert cls.cost_key is not mtf.Operation.cost_key or cls.costs_by is not None, cls
