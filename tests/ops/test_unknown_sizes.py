"""Imports of tf.Tensors whose sizes are known only when they run: checked then, in all front ends."""

import numpy as np
import pytest
import tensorflow as tf2
import tensorflow.compat.v1 as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.placement_mesh_impl import PlacementMeshImpl
from mesh_tensorflow.simd_mesh_impl import SimdMeshImpl, replicate
from mesh_tensorflow.testing.harness import session as new_session

X = np.arange(12.0, dtype=np.float32).reshape(4, 3)
SHAPE, MESH, LAYOUT = "batch:4,d:3", "all:2", "batch:all"


def placed():
    return PlacementMeshImpl(MESH, LAYOUT, ["cpu:0"] * 2, merge="none")


def by_import(mesh, x, impl):
    return mtf.import_tf_tensor(mesh, x, SHAPE)


def replicated(mesh, x, impl):
    return mtf.import_fully_replicated(mesh, x, SHAPE)


def by_slices(mesh, x, impl):
    whole = impl.LaidOutTensor.from_tensor_list([x[:2], x[2:]])
    return mtf.import_laid_out_tensor(mesh, whole, SHAPE)


def by_constant(mesh, x, impl):
    return mtf.constant(mesh, x, SHAPE)


def beside(mesh, x, impl):
    return mtf.zeros(mesh, SHAPE) + x


def total(x, how=by_import, impl=placed):
    """Builds and lowers a sum over what is imported, times 2."""
    mesh, impl = mtf.Mesh(mtf.Graph(), "mesh"), impl()
    y = mtf.reduce_sum(how(mesh, x, impl) * 2.0)
    return mtf.Lowering(mesh.graph, {mesh: impl}).export_to_tf_tensor(y)


IMPORTS = [by_import, replicated, by_slices, by_constant, beside]
KNOWN = [[None, 3], [4, None], [None, None], None]
WRONG = [np.ones([2, 3], "f"), np.ones([6, 3], "f"), np.ones([4], "f"), np.ones([4, 3, 1], "f")]


def fits(x, known):
    """Whether TensorFlow takes an array for a tensor of these static sizes."""
    return tf.TensorShape(known).is_compatible_with(x.shape)


# A tensor of unknown rank has no slices, and beside a Tensor it is a number.
FED = [(how, k) for how in IMPORTS for k in KNOWN if k or how not in (by_slices, beside)]


@pytest.mark.parametrize("how, known", FED)
def test_placeholders(how, known):
    with tf.Graph().as_default(), new_session() as session:
        fed = tf.placeholder(tf.float32, known)
        y = total(fed, how)
        assert session.run(y, {fed: X}) == 132.0
        for wrong in (x for x in WRONG if fits(x, known)):
            with pytest.raises(tf.errors.InvalidArgumentError, match=r"must fit Shape\["):
                session.run(y, {fed: wrong})


@pytest.mark.parametrize("known", KNOWN)
@pytest.mark.parametrize("compiled", [mtf.function, None])
def test_functions(compiled, known):
    signature = [tf2.TensorSpec(known, tf.float32)]
    run = (compiled or tf2.function)(total, input_signature=signature, autograph=False)
    assert float(run(tf2.constant(X))) == 132.0
    for wrong in (x for x in WRONG if fits(x, known)):
        with pytest.raises(tf.errors.InvalidArgumentError, match=r"must fit Shape\[batch=4, d=3\]"):
            run(tf2.constant(wrong))


def test_data_sets_in_functions():
    """A data set whose last batch may be smaller gives batches of a size that is not known."""
    run = mtf.function(total, input_signature=[tf2.TensorSpec([None, 3], tf.float32)])
    data = tf2.data.Dataset.from_tensor_slices(np.concatenate([X, X[:2]])).batch(4)
    first, last = data
    assert data.element_spec.shape.as_list() == [None, 3] and float(run(first)) == 132.0
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"its sizes are\] \[2 3\]"):
        run(last)


def test_placeholders_in_simd():
    with tf.Graph().as_default(), new_session() as session:
        fed = tf.placeholder(tf.float32, [None, 3])
        y = replicate(
            lambda: total(fed, impl=lambda: SimdMeshImpl(MESH, LAYOUT)),
            devices=["/cpu:0", "/cpu:1"],
        )
        assert session.run(y, {fed: X}) == 132.0
        for _ in range(10):  # the error itself each time, not what it cancelled on the other one
            with pytest.raises(
                tf.errors.InvalidArgumentError, match=r"must fit Shape\[batch=4, d=3\]"
            ):
                session.run(y, {fed: WRONG[1]})
            assert session.run(y, {fed: X}) == 132.0


def test_gradients_and_loops(tf_graph):
    mesh, impl = mtf.Mesh(mtf.Graph(), "mesh"), placed()
    fed = tf.placeholder(tf.float32, [None, 3])
    x = mtf.import_tf_tensor(mesh, fed, SHAPE)
    start = mtf.constant(mesh, 0, [], dtype=tf.int32)
    _, y = mtf.while_loop(lambda i, t: mtf.less(i, 2), lambda i, t: (i + 1, t * x), [start, x])
    [dx] = mtf.gradients([x * x], [x])
    lowering = mtf.Lowering(mesh.graph, {mesh: impl})
    with tf.Session() as session:
        found = session.run([lowering.export_to_tf_tensor(t) for t in (y, dx)], {fed: X})
    np.testing.assert_allclose(found, [X**3, 2 * X])


def test_what_is_known_is_checked_at_once(tf_graph):
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    fed = tf.placeholder(tf.float32, [None, 3])
    with pytest.raises(ValueError, match=r"does not fit Shape\[batch=4, d=2\]"):
        mtf.import_tf_tensor(mesh, fed, "batch:4,d:2")
    for unknown in (fed, tf.placeholder(tf.float32)):
        with pytest.raises(ValueError, match=r"not all known before it runs: give its shape"):
            mtf.import_tf_tensor(mesh, unknown)
