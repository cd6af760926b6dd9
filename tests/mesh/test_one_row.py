"""Products of one row that a row is added to, with oneDNN, which TensorFlow uses on some CPUs only."""

import json

import pytest
from helpers import processes

# Sums of each front end, with and without a split: the optimizer does not know that there is one
# row after `set_shape`, in a loop, and after collectives.
PROGRAM = """
import json
import numpy as np
import tensorflow as tf
import mesh_tensorflow as mtf
from mesh_tensorflow.simd_mesh_impl import SimdMeshImpl, replicate

v1 = tf.compat.v1
CPUS = [f"cpu:{i}" for i in range(4)]
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 4)
CONFIG = v1.ConfigProto(device_count={"CPU": 4})
X = np.linspace(-1, 1, 16).reshape(4, 4).astype(np.float32)
W = np.linspace(1, 2, 32).reshape(4, 8).astype(np.float32)
H = np.linspace(0, 1, 32).reshape(4, 8).astype(np.float32)

def placed(layout):
    return mtf.placement_mesh_impl.PlacementMeshImpl("x:4", layout, CPUS, merge="none")

# The contracted dimension comes first, for which oneDNN has no fused kernel.
SHAPES = [mtf.convert_to_shape(s) for s in ("k:4,rows:4", "k:4,n:8", "rows:4,n:8")]

def imported(mesh, x, w, h):
    [x, w, h] = [mtf.import_tf_tensor(mesh, t, s) for t, s in zip((x, w, h), SHAPES)]
    return h, x, w

def added(h, x, w, act=lambda y: y):
    return act(h + mtf.einsum([x, w], output_shape=h.shape))

def lowered(layout, x, w, h, build):
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    y = build(*imported(mesh, x, w, h))
    return mtf.Lowering(mesh.graph, {mesh: placed(layout)}).export_to_tf_tensor(y)

def unknown(t):
    same = v1.placeholder_with_default(t, [None] * len(t.shape))
    same.set_shape(t.shape)
    return same

def looped(h, x, w):
    [y, _] = mtf.while_loop(
        lambda y, i: mtf.less(i, 2), lambda y, i: [added(y, x, w), i + 1], [h, 0 * mtf.to_int32(
            mtf.reduce_sum(h))])
    return y

def in_session(build):
    with tf.Graph().as_default():
        fetched = build(*map(tf.constant, (X, W, H)))
        with v1.Session(config=CONFIG) as session:
            session.run(v1.global_variables_initializer())
            return session.run(fetched)

def in_function(build):
    given = [tf.TensorSpec([None, None])] * 3
    def fn(*tensors):
        for t, value in zip(tensors, (X, W, H)):
            t.set_shape(value.shape)
        return build(*tensors)
    return tf.function(fn, input_signature=given)(X, W, H).numpy()

def simd(layout, **stored):
    A, C = mtf.convert_to_shape("a:8,c:4").dims
    rows = mtf.Dimension("rows", 8)

    def loss(x):
        b, one = x.shape[0], tf.ones_initializer()
        var = lambda name, dims: mtf.get_variable(x.mesh, name, dims, initializer=one)
        h = x + var("b", [A])
        inner = mtf.tanh(mtf.einsum([h, var("w", [b, C])], reduced_dims=[b]))
        return mtf.reduce_mean(mtf.square(h + mtf.einsum([inner, var("u", [C, b])], [b, A])))

    def program(x):
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        x = mtf.import_tf_tensor(mesh, x, [rows, A])
        found = mtf.optimize.accumulate_gradients(loss, x, rows, 2)
        lowering = mtf.Lowering(mesh.graph, {mesh: SimdMeshImpl("x:4", layout, **stored)})
        return [lowering.export_to_tf_tensor(t) for t in (found.loss, *found.grads)]

    x = np.linspace(-1, 1, 64).reshape(8, 8).astype(np.float32)
    results = in_session(lambda *_: replicate(program, [tf.constant(x)], devices=CPUS))
    return sum(np.sum(value) for value in results)

def arguments_of_loops(layout):
    def program(x, w, h):
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        y = looped(*imported(mesh, x, w, h))
        impl = SimdMeshImpl("x:4", layout)
        return [mtf.Lowering(mesh.graph, {mesh: impl}).export_to_tf_tensor(y)]
    return in_session(lambda *given: replicate(program, given, devices=CPUS)[0])

def told(name, run):
    try:
        found[name] = [float(np.sum(run(layout))) for layout in ("", "rows:x")]
    except tf.errors.OpError as e:
        found[name] = str(e)[:300]

found = {}
def both(build):
    return lambda layout, in_=in_session: in_(
        lambda x, w, h: lowered(layout, unknown(x), w, h, build))
told("session", both(added))
told("activation", both(lambda h, x, w: added(h, x, w, mtf.relu)))
told("loop", both(looped))
told("function", lambda layout: in_function(
    lambda x, w, h: lowered(layout, x, w, h, added)))
told("loop in a function", lambda layout: in_function(
    lambda x, w, h: lowered(layout, x, w, h, looped)))
told("simd", simd)
told("simd, a loop", arguments_of_loops)
told("simd, zero=3", lambda layout: simd(layout, zero=3))
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def sums():
    """Returns the sums by the name of a front end; oneDNN is chosen when TensorFlow is imported."""
    return json.loads(processes.python("-c", PROGRAM, TF_ENABLE_ONEDNN_OPTS="1").stdout)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "session",
        "activation",
        "loop",
        "function",
        "loop in a function",
        "simd",
        "simd, a loop",
        "simd, zero=3",
    ],
)
def test_a_row_that_is_added_is_no_bias(sums, name):
    whole, split = sums[name]
    assert whole == pytest.approx(split, rel=1e-5)
