"""The line of the user's program that made an operation, and errors that tell it."""

import copy
import dataclasses
import functools
import pickle
import re

import numpy as np
import pytest
import tensorflow as tf2
import tensorflow.compat.v1 as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.placement_mesh_impl import PlacementMeshImpl
from mesh_tensorflow.transformer import attention

A, B = mtf.Dimension("a", 4), mtf.Dimension("b", 6)


def new_mesh():
    return mtf.Mesh(mtf.Graph(), "mesh")


def one_device(mesh):
    return mtf.Lowering(mesh.graph, {mesh: PlacementMeshImpl("x:1", "", ["cpu:0"])})


def of_two(mesh):
    impl = PlacementMeshImpl("x:2", "a:x", ["cpu:0"] * 2)
    return mtf.Lowering(mesh.graph, {mesh: impl})


def own_layer(x):
    return mtf.relu(x)  # own layer


@functools.lru_cache
def cached(x):
    return own_layer(x)


class OwnOperation(mtf.Operation):
    """An operation of a user, whose constructor is not what made it."""

    def __init__(self, x):
        super().__init__([x], name="own")
        self._outputs = [mtf.Tensor(self, x.shape, x.dtype)]


@dataclasses.dataclass
class OwnModel:
    """A data class, whose generated constructor has no line."""

    mesh: mtf.Mesh

    def __post_init__(self):
        self.weight = mtf.zeros(self.mesh, [A])  # own weight


def source(op):
    assert op.site.file == __file__
    return op.site.source


def test_site_of_what_a_data_class_makes():
    mesh = new_mesh()
    assert source(OwnModel(mesh).weight.operation).endswith("# own weight")
    dtype = mtf.VariableDType(tf.float32)
    with tf.Graph().as_default():
        attention.AttentionParams(mesh, A, A, A, B, B, [], [], dtype)  # made by the package
    assert source(mesh.graph.operations[-1]).endswith("# made by the package")


def test_site_is_the_innermost_line_of_the_user(tf_graph):
    x = mtf.zeros(new_mesh(), [A, B])  # zeros
    y = cached(x)
    with tf.variable_scope("scope"):
        z = mtf.softmax(y, B)
    own = OwnOperation(z)  # constructed
    assert source(x.operation).endswith("# zeros")
    assert source(y.operation) == "return mtf.relu(x)  # own layer"
    assert y.operation.site.function == "own_layer"
    assert source(z.operation).endswith("mtf.softmax(y, B)")
    assert source(own).endswith("# constructed")
    assert re.fullmatch(r"test_sites\.py:\d+", str(own.site))


def test_site_of_gradients_is_that_of_what_they_are_of(tf_graph):
    x = mtf.zeros(new_mesh(), [A, B])
    y = mtf.tanh(x)  # forward
    first = len(x.graph.operations)
    mtf.gradients([mtf.reduce_sum(y)], [x])
    parts = [op for op in x.graph.operations[first:] if op.gradient_of is y.operation]
    assert parts
    assert all(source(op).endswith("# forward") for op in parts)


def test_site_of_recomputed_operations(tf_graph):
    x = mtf.zeros(new_mesh(), [A, B])
    y = mtf.recompute_grad(own_layer, [x])
    mtf.gradients([y], [x])
    copies = [op for op in x.graph.operations if op.original is not None]
    assert copies
    assert {source(op) for op in copies} == {"return mtf.relu(x)  # own layer"}


class Foreign(Exception):
    """An error with an argument and attributes of its own."""

    def __init__(self, message, number):
        super().__init__(message)
        self.number = number


@pytest.mark.parametrize(
    "error", [Foreign("no", 7), KeyError("key"), ZeroDivisionError(), OSError(2, "no such file")]
)
def test_errors_in_lowering_keep_type_and_attributes(error, tf_graph):
    def fail(_):
        raise error

    mesh = new_mesh()
    x = mtf.zeros(mesh, [A])
    mtf.slicewise(fail, [x], output_dtype=tf.float32, splittable_dims=[A], name="bad")  # bad
    with pytest.raises(type(error)) as caught:
        of_two(mesh)
    assert caught.value is error
    assert getattr(error, "number", 7) == 7
    told = "\n".join([str(error), *getattr(error, "__notes__", [])])
    assert re.search(
        r'while lowering SlicewiseOperation\[bad: .*Shape\[a=4\].*\n +made here:\n +File ".*'
        r'test_sites\.py", line \d+, in test_errors.*\n +.*# bad',
        told,
    )


def indivisible(x):
    """Computes 7 // x, which fails for 0 when it is run."""
    return 7 // x  # divide


def run_function(data):
    @mtf.function
    def step(x):
        mesh = new_mesh()
        y = indivisible(mtf.import_tf_tensor(mesh, x, [A]))
        return of_two(mesh).export_to_tf_tensor(y)

    return step(data)


def run_eager(data):
    mesh = new_mesh()
    y = indivisible(mtf.import_tf_tensor(mesh, tf.constant(data), [A]))
    return of_two(mesh).export_to_tf_tensor(y)


def run_session(data):
    with tf.Graph().as_default(), tf.Session() as session:
        mesh = new_mesh()
        fed = tf.placeholder(tf.int32, [4])
        y = indivisible(mtf.import_tf_tensor(mesh, fed, [A]))
        result = of_two(mesh).export_to_tf_tensor(y)
        with mtf.debug.user_errors():
            return session.run(result, {fed: data})


def run_replicated(data):
    with tf.Graph().as_default():
        fed = tf.placeholder(tf.int32, [4])

        def program():
            mesh = new_mesh()
            y = indivisible(mtf.import_tf_tensor(mesh, fed, [A]))
            impl = mtf.simd_mesh_impl.SimdMeshImpl("x:2", "a:x")
            return mtf.Lowering(mesh.graph, {mesh: impl}).export_to_tf_tensor(y)

        y = mtf.simd_mesh_impl.replicate(program, devices=["/cpu:0", "/cpu:1"])
        config = tf.ConfigProto(device_count={"CPU": 2})
        with tf.Session(config=config) as session, mtf.debug.user_errors():
            return session.run(y, {fed: data})


@pytest.mark.parametrize("run", [run_function, run_eager, run_session, run_replicated])
def test_errors_at_run_time_tell_the_users_line(run):
    assert np.array_equal(run(np.array([1, 2, 7, 8], np.int32)), [7, 3, 1, 0])
    with pytest.raises(tf2.errors.InvalidArgumentError) as caught:
        run(np.array([1, 2, 0, 8], np.int32))
    assert "made here:" in str(caught.value)
    assert "return 7 // x  # divide" in str(caught.value)
    assert str(caught.value).count("made here:") == 1


def test_explain(tf_graph):
    mesh = new_mesh()
    fed = tf.placeholder(tf.int32, [4])
    y = indivisible(mtf.import_tf_tensor(mesh, fed, [A]))
    lowering = one_device(mesh)
    with tf.Session() as session, pytest.raises(tf.errors.InvalidArgumentError) as caught:
        session.run(lowering.export_to_tf_tensor(y), {fed: [0] * 4})
    assert "# divide" in mtf.debug.explain(caught.value, lowering)
    assert "made here" not in str(caught.value)
    other = new_mesh()
    mtf.zeros(other, [A])
    assert mtf.debug.explain(caught.value, one_device(other)).startswith("no mtf operation was")


def test_no_more_nodes(tf_graph):
    """Names cost nothing in TensorFlow's graph."""
    mesh = new_mesh()
    one_device(mesh)
    x = mtf.import_tf_tensor(mesh, tf.zeros([4]), [A])
    before = len(tf.get_default_graph().get_operations())
    mtf.relu(mtf.inspect(x, "x"))
    mtf.Lowering(mesh.graph, {mesh: PlacementMeshImpl("x:1", "", ["cpu:0"])})
    assert [op.type for op in tf.get_default_graph().get_operations()[before:]] == ["Relu"]


def test_a_graph_with_sites_is_pickled_and_a_copied_tensor_is_shown():
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    x = mtf.ones(mesh, "a:2") * 2
    site = x.operation.site
    again = pickle.loads(pickle.dumps(site))
    assert (again.file, again.line, again.function) == (site.file, site.line, site.function)
    assert again.source == site.source
    assert "without a value" in repr(copy.copy(x))
