"""Values of Tensors in eager code, operators, and what is shown of objects."""

import numpy as np
import pytest
import tensorflow as tf2
import tensorflow.compat.v1 as tf

import mesh_tensorflow as mtf
from mesh_tensorflow._core.errors import NoValueError, WrongTypeError
from mesh_tensorflow.placement_mesh_impl import PlacementMeshImpl

A, B, C = mtf.Dimension("a", 4), mtf.Dimension("b", 2), mtf.Dimension("c", 2)
X = np.arange(1, 9, dtype=np.float32).reshape(4, 2)
Y = np.array([1, -1], np.float32)


@pytest.fixture
def mesh():
    return mtf.Mesh(mtf.Graph(), "mesh")


@pytest.fixture
def x(mesh):
    return mtf.import_tf_tensor(mesh, X, [A, B])


@pytest.fixture
def y(mesh):
    return mtf.import_tf_tensor(mesh, Y, [B])


def implementation(layout="a:rows"):
    return PlacementMeshImpl("rows:2,cols:2", layout, ["cpu:0"] * 4, merge="none")


def test_value(x):
    value = x.numpy()
    assert isinstance(value, np.ndarray) and value.dtype == np.float32
    np.testing.assert_array_equal(value, X)
    np.testing.assert_array_equal(np.asarray(x), X)
    assert np.asarray(x, np.int64).dtype == np.int64
    total = mtf.reduce_sum(x)
    assert (float(total), int(total), bool(total), f"{total:.2f}") == (36.0, 36, True, "36.00")
    assert not bool(0 * total) and total > 35
    mixed = mtf.to_bfloat16(x)
    np.testing.assert_array_equal(mixed.numpy().astype(np.float32), X)


def test_text(x, y):
    start = "Tensor[import_1:0, Shape[b=2], <dtype: 'float32'>]"
    assert y.to_string == start and repr(y) == str(y) == f"{y}" == f"{start} = [ 1. -1.]"
    assert repr(x).splitlines()[0] == f"{x.to_string} =" and len(repr(x).splitlines()) == 5
    assert repr(mtf.reduce_sum(y)).endswith(" = 0.")
    large = mtf.ones(x.mesh, mtf.Shape([mtf.Dimension("n", 100_000)]))
    assert repr(large).endswith("= [1. 1. 1. ... 1. 1. 1.]")
    variable = mtf.get_variable(x.mesh, "v", [B]).operation
    assert repr(variable) == f"Variable({variable.value.to_string})"


def test_repr_computes_only_what_is_small(mesh):
    n, m, k = (mtf.Dimension(name, 2048) for name in "nmk")
    product = mtf.ones(mesh, mtf.Shape([n, m])) @ mtf.ones(mesh, mtf.Shape([m, k]))
    assert repr(product) == f"{product.to_string}, computed by x.numpy()"
    assert product not in mesh.graph.looked_at.tensors
    loop = mtf.while_loop(lambda s: s < 5.0, lambda s: 2 * s, [mtf.ones(mesh, mtf.Shape([]))])[0]
    assert repr(loop).endswith("computed by x.numpy()")
    assert float(loop) == 8 and repr(loop).endswith("= 8.")


def test_repr_of_what_has_no_value(mesh, x):
    class Failing(mtf.Operation):
        def __init__(self, x):
            super().__init__([x])
            self._outputs = [mtf.Tensor(self, x.shape, x.dtype)]

        def lower(self, lowering):
            raise ValueError("out of order")

    y = Failing(x).outputs[0]
    assert repr(y).startswith(f"{y.to_string}, without a value: out of order")
    with pytest.raises(ValueError, match="out of order"):
        y.numpy()
    np.testing.assert_array_equal((x + 1).numpy(), X + 1)


def test_variables_have_their_present_values(mesh, x):
    w = mtf.get_variable(mesh, "w", [B], initializer=tf.ones_initializer())
    untouched, product = x + 0, x @ w
    update = mtf.assign_add(w, mtf.reduce_mean(x, reduced_dim=A))
    np.testing.assert_array_equal(product.numpy(), X.sum(1))
    np.testing.assert_array_equal(w.numpy(), [1, 1])  # looking changes nothing
    before = mesh.graph.looked_at
    kept = untouched.numpy(), before.tensors[untouched]
    lowering = mtf.Lowering(mesh.graph, {mesh: implementation("b:cols")})
    assert lowering.lowered_operation(update) is None
    np.testing.assert_array_equal(w.numpy(), [5, 6])
    np.testing.assert_array_equal(product.numpy(), X @ [5, 6])
    w.operation.get_master().assign([1.0, 0.0])
    np.testing.assert_array_equal(product.numpy(), X[:, 0])
    assert mesh.graph.looked_at is before and before.tensors[untouched] is kept[1]
    # The slices stay where the Lowering has put them.
    assert len(mesh.graph.variable_store.variables) == 2


def test_reads_of_a_variable(mesh):
    w = mtf.get_variable(mesh, "w", [A], initializer=tf.ones_initializer())
    read = mtf.read_variable(w)
    np.testing.assert_array_equal(read.numpy(), np.ones(4))
    mesh.graph.variable_store.assign("w", 3 * np.ones(4))
    np.testing.assert_array_equal((2 * read).numpy(), 6 * np.ones(4))


def test_only_new_operations_are_lowered(mesh, x, monkeypatch):
    lowered = []
    lower = type(mtf.exp(x).operation).lower
    monkeypatch.setattr(
        type(mtf.exp(x).operation), "lower", lambda op, low: lowered.append(op) or lower(op, low)
    )
    first = mtf.exp(x)
    assert not lowered
    repr(first), first.numpy()
    second = mtf.exp(first)
    repr(second)
    assert lowered == [first.operation, second.operation]


def test_random_values_stay(mesh):
    noise = mtf.random_uniform(mesh, [A, B])
    first = noise.numpy()
    np.testing.assert_array_equal(noise.numpy(), first)
    np.testing.assert_array_equal((noise + 1).numpy(), first + 1)


def test_gradients_and_loops(mesh, x):
    w = mtf.get_variable(mesh, "w", [B], initializer=tf.ones_initializer())
    (out,) = mtf.while_loop(
        lambda s: mtf.less(mtf.reduce_sum(s), 100.0),
        lambda s: s * w * 2,
        [mtf.reduce_sum(x, reduced_dim=A)],
    )
    np.testing.assert_array_equal(out.numpy(), X.sum(0) * 4)
    [grad] = mtf.gradients([mtf.reduce_sum(out)], [w])
    np.testing.assert_allclose(grad.numpy(), 2 * X.sum(0) * 4)
    np.testing.assert_array_equal(out.numpy(), X.sum(0) * 4)


def test_on_a_mesh(mesh, x, y):
    product = x @ y
    np.testing.assert_array_equal(product.numpy(), X @ Y)
    mesh.mesh_impl = implementation("a:rows,b:cols")
    np.testing.assert_array_equal(product.numpy(), X @ Y)
    [(_, impl, collective)] = mesh.graph.looked_at.collectives
    assert impl is mesh.mesh_impl and collective.kind == "allreduce"
    assert mtf.Mesh(mesh.graph, "other", mesh_impl=impl).mesh_impl is impl
    mesh.mesh_impl = "rows:2"
    with pytest.raises(TypeError, match="PlacementMeshImpl"):
        product.numpy()


@pytest.mark.slips
def test_without_a_value(x):
    with tf.Graph().as_default():
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        inside = mtf.import_tf_tensor(mesh, tf.constant(X), [A, B])
        assert repr(inside) == inside.to_string and bool(inside)
        for ask in (lambda: inside.numpy(), lambda: float(inside), lambda: np.asarray(inside)):
            with pytest.raises(NoValueError, match=r"lowering\.export_to_tf_tensor\(x\)"):
                ask()
        with pytest.warns(mtf.MeshTensorFlowWarning, match=r"Write mtf\.where"):
            assert inside < 3
    with pytest.raises(NoValueError, match=r"fetch with session\.run"):
        inside.numpy()
    texts = []

    @tf2.function(autograph=False)
    def traced(data):
        z = mtf.import_tf_tensor(mtf.Mesh(mtf.Graph(), "mesh"), data, [A, B])
        texts.append(repr(z))
        return float(z)

    with pytest.raises(NoValueError, match=r"tf\.function"):
        traced(tf.constant(X))
    assert texts == ["Tensor[import:0, Shape[a=4, b=2], <dtype: 'float32'>]"]
    for ask, name in ((float, "float"), (int, "int"), (bool, "bool")):
        with pytest.raises(NoValueError, match=rf"{name}\(x\): import:0 Shape\[a=4, b=2\] has 8"):
            ask(x)


def test_a_look_assigns_nothing(mesh, x):
    seen = mtf.get_variable(mesh, "seen", [], initializer=tf.zeros_initializer())

    def body(i, x):
        mtf.assign_add(seen, mtf.ones_like(seen))
        return [i + 1.0, x * 2.0]

    [_, y] = mtf.while_loop(lambda i, _: mtf.less(i, 3.0), body, [mtf.zeros(mesh, []), x])
    with pytest.raises(NoValueError, match=r"a loop that assigns to seen, .* runs the loop once"):
        y.numpy()
    assert "without a value" in repr(y) and float(seen) == 0.0
    lowering = mtf.Lowering(mesh.graph, {mesh: implementation("a:rows")})
    np.testing.assert_array_equal(lowering.export_to_tf_tensor(y), X * 8)
    assert float(seen) == 3.0


def test_operators(x, y):
    flags = x < 3
    expected = [
        (x @ y, X @ Y),
        (abs(y), np.abs(Y)),
        (+y, Y),
        (y**2, [1, 1]),
        (y**3, Y),
        (y**0, [1, 1]),
        (y**-1, Y),
        (x**-2.0, X**-2),
        (x**0.5, np.sqrt(X)),
        (x**-0.5, 1 / np.sqrt(X)),
        (x**1.5, X**1.5),
        (x**y, X**Y),
        (2**y, 2**Y),
        (x < 3, X < 3),
        (x <= y, X <= Y),
        (x > 3, X > 3),
        (3 >= x, X <= 3),
        (flags | (x > 6), (X < 3) | (X > 6)),
        (flags & ~(x > 1), (X < 3) & (X <= 1)),
    ]
    for found, value in expected:
        np.testing.assert_allclose(found.numpy(), value, rtol=1e-5)
    [grad] = mtf.gradients([mtf.reduce_sum(y**3)], [y])
    np.testing.assert_allclose(grad.numpy(), 3 * Y**2)
    assert x == x and x != y and {x: 1, y: 2}[y] == 2


def on_another_mesh(x):
    return mtf.ones(mtf.Mesh(mtf.Graph(), x.mesh.name), x.shape)


def wrong_calls():
    """(what a user tries, the error, what it says)."""
    values = np.ones([2, 2], np.float32)
    return [
        (lambda x, y: x[0], WrongTypeError, r"mtf\.slice\(x, begin, size, \"a\"\)"),
        (lambda x, y: list(x), WrongTypeError, r"mtf\.unstack\(x, dim\)"),
        (lambda x, y: len(x), WrongTypeError, r"x\.size"),
        (lambda x, y: x @ values, WrongTypeError, r"mtf\.import_tf_tensor\(mesh, array, shape\)"),
        (lambda x, y: tf.constant(values) @ x, TypeError, r"mtf\.import_tf_tensor"),
        (lambda x, y: x + np.ones(3), ValueError, r"mtf\.import_tf_tensor\(mesh, array, shape\)"),
        (lambda x, y: x @ x, ValueError, r"share a=4, b=2\. .*mtf\.einsum\(\[x, w\], output_shape"),
        (lambda x, y: y @ mtf.reduce_sum(x), ValueError, "share none"),
        (lambda x, y: x & y, WrongTypeError, r"mtf\.cast\(x, tf\.bool\)"),
        (lambda x, y: (-2) ** x, WrongTypeError, "must be a positive number"),
        (lambda x, y: x**None, WrongTypeError, r"\*\* None: the exponent is a NoneType; it must"),
        (lambda x, y: x ** "2", WrongTypeError, r"\*\* '2': the exponent is a str; it must be a"),
        (lambda x, y: mtf.to_int32(x) ** -1, WrongTypeError, r"mtf\.to_float\(x\) \*\* -1"),
        (lambda x, y: x and y, NoValueError, r"Write `x is not None`"),
        (lambda x, y: x.mean(), AttributeError, r"Write mtf\.reduce_mean\(x, reduced_dim=dim\)"),
        (lambda x, y: x.T, AttributeError, r"Write mtf\.transpose"),
        (lambda x, y: x.nothing, AttributeError, "has no attribute 'nothing'$"),
        (
            lambda x, y: mtf.mean(x),
            AttributeError,
            r"'mean'\. Write mtf\.reduce_mean\(x, reduced_dim",
        ),
        (lambda x, y: mtf.cat([x, y]), AttributeError, r"Write mtf\.concat\(xs, dim_name\)"),
        (lambda x, y: mtf.dense(x), AttributeError, r"It is mtf\.layers\.dense$"),
        (lambda x, y: mtf.reduce_sums(x), AttributeError, r"; did you mean reduce_sum\?"),
        (lambda x, y: mtf.qqq(x), AttributeError, r"has no attribute 'qqq'\.$"),
        (
            lambda x, y: mtf.reduce_sum(x, axis=1),
            TypeError,
            "'axis': axes have names; give reduced",
        ),
        (lambda x, y: mtf.softmax(x, "c"), ValueError, r"softmax: .* has no dimension 'c'\."),
        (lambda x, y: mtf.reduce_sum(x, reduced_dim=["a"]), WrongTypeError, "give output_shape"),
        (lambda x, y: mtf.where(x > 0, 1.0, 2.0), WrongTypeError, "input 1.0 is a float"),
        (lambda x, y: x + on_another_mesh(x), ValueError, "different Mesh objects of one name, 'm"),
        (lambda x, y: tf.add(x, 1.0), TypeError, r"x\.numpy\(\) in eager code"),
        (lambda x, y: mtf.where(x == 0, x, y), ValueError, "mtf.equal"),
    ]


@pytest.mark.parametrize(
    "call",
    [
        lambda x, d: mtf.reduce_sum(x, reduced_dim=d),
        lambda x, d: mtf.reduce_mean(x, reduced_dim=d, output_shape=[A]),
        lambda x, d: mtf.reduce_max(x, reduced_dim=d),
        lambda x, d: mtf.reduce_any(x > 3, reduced_dim=d),
        lambda x, d: mtf.reduce_first(x, d),
        lambda x, d: mtf.reduce_logsumexp(x, d),
        lambda x, d: mtf.softmax(x, d),
        lambda x, d: mtf.log_softmax(x, d, extra_logit=0.0),
        lambda x, d: mtf.cumsum(x, d),
        lambda x, d: mtf.argmax(x, d),
        lambda x, d: mtf.top_k(x, d, mtf.Dimension("k", 1))[0],
        lambda x, d: mtf.nth_smallest_element(x, 0, d),
        lambda x, d: mtf.signal.fftshift(x, d),
        lambda x, d: mtf.real(mtf.signal.fft(mtf.cast(x, tf.complex64), d)),
        lambda x, d: mtf.imag(mtf.signal.rfft(x, d)),
        lambda x, d: mtf.split(x, d, 1)[0],
        lambda x, d: mtf.unstack(x, d)[1],
        lambda x, d: mtf.shift(x, 1, d, wrap=True),
        lambda x, d: mtf.dynamic_shift(x, mtf.constant(x.mesh, 1, dtype=tf.int32), d, wrap=True),
    ],
)
def test_dimensions_by_name(x, call):
    named, given = call(x, "b"), call(x, B)
    assert named.shape == given.shape
    np.testing.assert_array_equal(named.numpy(), given.numpy())
    impl = implementation("b:rows")
    lowering = mtf.Lowering(x.graph, {x.mesh: impl})
    np.testing.assert_allclose(lowering.export_to_tf_tensor(named), given.numpy(), rtol=1e-6)


def test_a_number_for_what_is_chosen(x):
    np.testing.assert_array_equal(mtf.where(x > 3, 1.5, x).numpy(), np.where(X > 3, 1.5, X))
    [grad] = mtf.gradients([mtf.where(x > 3, 1.5, x)], [x])
    np.testing.assert_array_equal(grad.numpy(), X <= 3)


@pytest.mark.parametrize("attempt", wrong_calls(), ids=lambda row: row[2])
def test_operators_that_cannot_work(x, y, attempt):
    call, kind, text = attempt
    before = list(x.graph.operations)
    with pytest.raises(kind, match=text):
        call(x, y)
    assert x.graph.operations[: len(before)] == before


def test_a_failed_product_leaves_nothing(x):
    before = len(x.graph.operations)
    for attempt in (lambda: x @ x, lambda: x ** "2", lambda: x & x):
        with pytest.raises((TypeError, ValueError)):
            attempt()
    assert len(x.graph.operations) == before


def test_what_objects_hold(mesh, x):
    w = mtf.get_variable(mesh, "w", [B], trainable=False)
    assert repr(mesh.graph) == ("<Graph: 2 operations, 1 variable (0 trainable), 2 parameters>")
    impl = implementation("a:rows,b:cols")
    assert repr(impl) == (
        "<PlacementMeshImpl rows=2, cols=2; layout a:rows, b:cols; 4 processors on cpu:0>"
    )
    one = PlacementMeshImpl("", "", [""])
    assert "one processor; no layout rules; 1 processor on a device of TensorFlow's" in repr(one)
    assert repr(mesh) == "Mesh('mesh')"
    mesh.mesh_impl = impl
    assert repr(mesh) == f"Mesh('mesh', {impl!r})"
    store = mesh.graph.variable_store
    assert repr(store) == "<VariableStore: 1 variable, 2 parameters: w>"
    x @ w
    lowering = mtf.Lowering(mesh.graph, {mesh: impl})
    assert repr(store) == (
        "<VariableStore: 1 variable, 2 parameters, in slices on a mesh rows=2, cols=2: w>"
    )
    assert repr(lowering).splitlines() == [
        f"<Lowering of {mesh.graph!r}",
        f"  'mesh' on {impl!r}",
        "  1 parameter on each processor; 0 collectives of 0 elements in all>",
    ]
    float(mtf.reduce_sum(mtf.import_tf_tensor(mesh, lowering.export_to_tf_tensor(w), [B])))


def test_values_after_a_call_that_failed():
    """What it had added is gone, and operations on another mesh have taken its places."""
    graph = mtf.Graph()
    mesh, other = mtf.Mesh(graph, "mesh"), mtf.Mesh(graph, "other", mesh_impl=implementation())
    x = mtf.import_tf_tensor(mesh, X, [A, B])
    mark = graph.mark()
    mtf.relu(mtf.relu(x)).numpy()
    graph.roll_back(mark)
    y = mtf.relu(mtf.import_tf_tensor(other, X, [A, B]))
    z = mtf.relu(x)
    np.testing.assert_array_equal(z.numpy(), X)
    np.testing.assert_array_equal(y.numpy(), X)
