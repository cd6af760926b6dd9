"""Graphs: names, text, clones, captured operations; tensors; what may be split."""

import pytest
import tensorflow.compat.v1 as tf

import mesh_tensorflow as mtf

A, B = mtf.Dimension("a", 4), mtf.Dimension("b", 8)


@pytest.fixture
def graph(tf_graph):
    return mtf.Graph()


@pytest.fixture
def mesh(graph):
    return mtf.Mesh(graph, "mesh")


@pytest.fixture
def x(mesh):
    return mtf.import_tf_tensor(mesh, tf.zeros([4, 8]), [A, B])


def test_unique_names(graph):
    names = [graph.unique_name(n) for n in ["op", "op", "OP", "op_1", "op", "other"]]
    assert names == ["op", "op_1", "OP_2", "op_1_1", "op_3", "other"]
    assert len({n.lower() for n in names}) == len(names)
    assert graph.unique_name("other", mark_as_used=False) == "other_1"
    assert graph.unique_name("other") == "other_1"
    with tf.variable_scope("scope"):
        assert graph.unique_name("op") == "scope/op"
        with tf.variable_scope("inner"):
            assert graph.unique_name("op") == "scope/inner/op"


def test_graph_scope(graph):
    with tf.variable_scope("outer"), graph.scope("forward/gradients"):
        assert graph.unique_name("op") == "forward/gradients/op"
        with tf.variable_scope("inner"):
            assert graph.unique_name("op") == "forward/gradients/inner/op"
    with tf.variable_scope("foo"):
        inside = graph.scope("gradients")
        inside.__enter__()
    with tf.variable_scope("foobar"):  # not "foo" and "bar" in it
        assert graph.unique_name("op") == "gradients/foobar/op"
    inside.__exit__(None, None, None)
    assert graph.unique_name("op") == "op"


def test_text(graph, x):
    mtf.exp(x)
    text = graph.to_string
    assert text == str(graph) and len(text.splitlines()) == 2
    assert repr(graph) == "<Graph: 2 operations, 0 variables (0 trainable), 0 parameters>"
    assert text.splitlines()[1] == (
        "SlicewiseOperation[exp: Inputs=(import:0 Shape[a=4, b=8] float32) "
        "Outputs=(exp:0 Shape[a=4, b=8] float32)]"
    )
    assert repr(x) == x.to_string == "Tensor[import:0, Shape[a=4, b=8], <dtype: 'float32'>]"


def test_tensor(graph, mesh, x):
    assert x.shape == mtf.Shape([A, B]) and x.size == 32 and x.dtype == tf.float32
    assert x.graph is graph and x.mesh is mesh and x.name == "import:0"
    assert x.operation.outputs == [x] and bool(x) and {x: 1}[x] == 1
    other = mtf.identity(x)
    assert x != other and x == x and x in [other, x]
    assert mesh.name == "mesh" and mesh.graph is graph


def test_operations_in_order(graph, x):
    y = x + mtf.exp(x)
    assert [op.name for op in graph.operations] == ["import", "exp", "add"]
    assert y.operation.inputs == [x, graph.operations[1].outputs[0]]
    assert y.operation.inputs is not y.operation.inputs
    assert y.operation.graph is graph and y.operation.mesh is x.mesh


class Registered(mtf.Operation):
    """What subclasses of users do in their constructors."""

    def __init__(self, x, fail=False, leave=False):
        super().__init__([x], name="registered")
        self.found = self.graph.operations[-1]
        self.split = self._initialize_all_dimensions_as_splittable()
        if leave:
            self.graph.operations.pop()
        self._outputs = [mtf.Tensor(self, x.shape, x.dtype)]
        self.inner = mtf.exp(x)
        mtf.get_variable(x.mesh, f"inside_{fail}_{leave}", [A])
        if fail:
            raise TypeError("no")


def test_operations_are_in_the_graph_within_their_constructors(tf_graph, graph, x):
    with pytest.raises(TypeError, match="no"):
        Registered(x, fail=True)
    with pytest.raises(TypeError, match="no"):
        Registered(x, fail=True, leave=True)
    assert graph.operations == [x.operation]
    assert not graph.all_variables and not graph.name_to_variable
    op = Registered(x)
    assert op.name == "registered" and op.found is op
    assert op.split == (frozenset(["b", "a"]), frozenset())
    assert graph.operations == [x.operation, op, op.inner.operation, *graph.all_variables]
    away = Registered(x, leave=True)
    assert away.found is away and away not in graph.operations
    assert graph.operations[-2] is away.inner.operation


def test_gradient_names(graph, mesh):
    with tf.variable_scope("model"):
        x = mtf.import_tf_tensor(mesh, tf.zeros([4, 8]), [A, B])
        y = mtf.einsum([x, x], output_shape=[A], name="product")
    mtf.gradients([y], [x])
    names = [op.name for op in graph.operations if "gradients" in op.name]
    assert names and all(n.startswith("model/product/gradients/") for n in names)


@pytest.mark.parametrize(
    "make, split, whole",
    [
        (lambda x: mtf.exp(x), {"a", "b"}, set()),
        (lambda x: mtf.einsum([x], output_shape=[A]), {"a", "b"}, set()),
        (lambda x: mtf.concat([x, x], "b"), {"a"}, {"b"}),
        (lambda x: mtf.slice(x, 0, 2, "a"), {"b"}, {"a"}),
        (lambda x: mtf.stack([x, x], "new"), {"a", "b"}, {"new"}),
        (lambda x: mtf.slicewise(tf.sort, [x], splittable_dims=[A]), {"a"}, {"b"}),
        (lambda x: mtf.slicewise(tf.sort, [x]), set(), {"a", "b"}),
        (lambda x: mtf.top_k(x, B, mtf.Dimension("k", 2))[0], {"a", "b"}, {"k"}),
        (
            lambda x: mtf.while_loop(
                lambda y: mtf.less(mtf.reduce_sum(y), 1.0),
                lambda y: [mtf.slice(mtf.concat([y, y], "b"), 0, 8, "b")],
                [x],
            )[0],
            {"a"},
            {"b"},
        ),
    ],
)
def test_splittable_dims(make, split, whole, x):
    op = make(x).operation
    assert op.splittable_dims == split and op.unsplittable_dims == whole


def test_capture_operations(graph, x):
    (y, z), captured = graph.capture_operations(lambda: (mtf.exp(x), mtf.sin(x)))
    assert captured == [y.operation, z.operation]
    assert graph.operations == [x.operation, *captured]


def test_clone_operations(graph, mesh, x):
    w = mtf.get_variable(mesh, "w", [B])
    noise = mtf.random_uniform(mesh, [A, B])
    y = mtf.exp(x * w + noise)
    forward = [*graph.operations[1:], mtf.square(w).operation]
    new = mtf.identity(x)
    before = len(graph.operations)
    clones, mapping = graph.clone_operations(forward, {x: new})
    assert graph.operations[before:] == clones
    # The last one, too, though it reads nothing that changes.
    assert [type(op).__name__ for op in clones] == [
        "EinsumOperation",
        "AddOperation",
        "SlicewiseOperation",
        "SlicewiseOperation",
    ]
    assert clones[0].inputs == [new, w] and clones[1].inputs[1] is noise
    assert mapping[y].operation is clones[2] and mapping[x] is new
    assert clones[2].original is y.operation and clones[2].name != y.operation.name
    assert mapping[y].shape == y.shape and w not in mapping and noise not in mapping


def test_make_variables_untrainable(graph, mesh):
    u, v = (mtf.get_variable(mesh, n, [A]).operation for n in "uv")
    graph.make_variables_untrainable([u])
    assert graph.trainable_variables == [v] and graph.all_variables == [u, v]
    assert not u.trainable and v.trainable


def test_gradients_walk_given_operations_only(graph, x):
    y = mtf.exp(x)
    operations = list(graph.operations)
    z = y * 2
    assert mtf.gradients([z], [x], operations=operations) == [None]
    assert mtf.gradients([z], [x])[0].shape == x.shape


@pytest.mark.parametrize(
    "call, same",
    [
        (lambda x: mtf.cast(x, tf.float32), True),
        (lambda x: mtf.broadcast(x, x.shape), True),
        (lambda x: mtf.reduce_sum(x, output_shape=x.shape), True),
        (lambda x: mtf.reduce_mean(x, output_shape=x.shape), True),
        (lambda x: mtf.reduce_max(x, output_shape=x.shape), True),
        (lambda x: mtf.halo_exchange(x, A, B, 0), True),
        (lambda x: mtf.left_halo_exchange(x, A, B, 0), True),
        (lambda x: mtf.reshape(x, x.shape), False),
        (lambda x: mtf.anonymize(x), False),
        (lambda x: mtf.rename_dimension(x, "a", "a"), False),
        (lambda x: mtf.transpose(x, x.shape), False),
        (lambda x: mtf.shift(x, 0, A, True), False),
    ],
)
def test_what_returns_its_argument(call, same, x):
    assert (call(x) is x) == same


def test_add_n_of_nothing():
    assert mtf.add_n([]) == 0
