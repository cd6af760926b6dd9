"""ReplicatedVariable: one variable to a replicated computation, many outside of it."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from mesh_tensorflow import tpu_variables
from mesh_tensorflow.tpu_variables import ReplicatedVariable

REPLICAS = 4


@pytest.fixture
def graph():
    with tf.Graph().as_default() as graph:
        yield graph


def variables(n=REPLICAS, shape=(2, 3), dtype=tf.float32, use_resource=True, name="v"):
    return [
        tf.get_variable(
            f"{name}{i}", shape, dtype, tf.constant_initializer(i), use_resource=use_resource
        )
        for i in range(n)
    ]


def run(*fetches, init):
    # No operation of a TPU has a kernel here: only what is fetched is placed.
    options = tf.GraphOptions(place_pruned_graph=True)
    with tf.Session(config=tf.ConfigProto(graph_options=options)) as session:
        session.run(init)
        return [session.run(fetch) for fetch in fetches]


def test_constants():
    assert tpu_variables.TF_23 is True
    assert issubclass(ReplicatedVariable, tpu_variables.VariableBase)
    assert issubclass(tf.Tensor, tpu_variables.VariableBase)


def test_attributes(graph):
    own = variables()
    rv = ReplicatedVariable("rv", own)
    assert rv.name == rv._shared_name == "rv"
    assert rv.handle is own[0].handle and rv.get() is own[0] and rv.op is own[0].op
    assert rv.dtype == tf.float32 and rv.graph is graph
    assert rv.shape.as_list() == rv.get_shape().as_list() == [2, 3]
    assert rv.constraint is None and rv.to_proto() == own[0].to_proto()
    assert tf.is_tensor(rv)
    assert repr(rv) == "<mtf ReplicatedVariable 'rv' shape=(2, 3) dtype=float32 replicas=4>"


def test_outside_it_is_the_first_variable(graph):
    own = variables()
    rv = ReplicatedVariable("rv", own)
    ones = np.ones([2, 3], "float32")
    fetches = [
        rv,
        rv.read_value(),
        rv.assign(5 * ones),
        rv,
        rv.assign(6 * ones, read_value=True),
        rv.assign_add(ones),
        rv.assign_sub(ones, read_value=False),
        rv.assign_sub(2 * ones),
        tf.assign(rv, 9 * ones),
        tf.assign_add(rv, ones),
        own[0],
        own[1],
    ]
    assert isinstance(fetches[2], tf.Operation) and isinstance(fetches[6], tf.Operation)
    fetches = [tf.convert_to_tensor(f) if f is rv else f for f in fetches]
    got = run(*fetches, init=rv.initializer)
    want = [0, 0, None, 5, 6, 7, None, 4, None, 10, 10, 1]
    for value, expected in zip(got, want):
        if expected is not None:
            np.testing.assert_array_equal(value, expected * ones)


def test_initializer_initializes_all(graph):
    own = variables()
    rv = ReplicatedVariable("rv", own)
    (got,) = run(own, init=rv.initializer)
    assert [g[0, 0] for g in got] == [0, 1, 2, 3]


def test_arithmetic(graph):
    rv = ReplicatedVariable("rv", variables(name="w")[2:])
    x = np.full([2, 3], 3, "float32")
    values = [
        rv + 1.0,
        1.0 - rv,
        x * rv,
        rv / 4.0,
        -rv,
        rv[0, :2],
        rv @ x.T,
        rv > 1.0,
        abs(rv),
        tf.matmul(rv, rv, transpose_b=True),
        tf.identity(rv),
        tf.cast(rv, tf.int32),
    ]
    got = run(values, init=rv.initializer)[0]
    two = np.full([2, 3], 2.0)
    want = [
        two + 1,
        1 - two,
        two * x,
        two / 4,
        -two,
        two[0, :2],
        two @ x.T,
        two > 1,
        two,
        two @ two.T,
        two,
        two,
    ]
    for g, w in zip(got, want):
        np.testing.assert_allclose(g, w)
    with pytest.raises(TypeError, match="not iterable"):
        list(rv)


def test_conversion_to_another_dtype(graph):
    rv = ReplicatedVariable("rv", variables())
    assert tf.convert_to_tensor(rv, tf.float32, name="it").name == "it:0"
    with pytest.raises(ValueError, match=r"type float16 for ReplicatedVariable rv of type float32"):
        tf.convert_to_tensor(rv, tf.float16)


def replicate(fn, n=REPLICAS):
    return tf.tpu.replicate(fn, [[tf.fill([2, 3], float(i))] for i in range(n)])


def in_computation(op):
    return b"cluster" in op.node_def.attr["_tpu_replicate"].s


def test_within_a_computation(graph):
    own = variables()
    rv = ReplicatedVariable("scope/rv", own)
    seen = {}

    def computation(x):
        seen["handles"] = [rv.handle, rv.handle]
        seen["assign"] = rv.assign(x)
        with tf.control_dependencies([seen["assign"]]):
            seen["value"] = rv.assign_add(x)
        with tf.control_dependencies([seen["value"]]):
            return rv.read_value() + tf.convert_to_tensor(rv)

    replicate(computation)
    handle = seen["handles"][0]
    assert handle is seen["handles"][1]
    assert handle.op.type == "TPUReplicatedInput" and handle.op.name == "scope/rv/handle"
    assert list(handle.op.inputs) == [v.handle for v in own]
    assert not in_computation(handle.op)  # the input of it, as TensorFlow asks for
    assert seen["assign"].type == "AssignVariableOp" and seen["assign"].inputs[0] is handle
    assert in_computation(seen["assign"])
    assert seen["value"].shape.as_list() == [2, 3]
    reads = [
        op
        for op in graph.get_operations()
        if op.type == "ReadVariableOp" and op.inputs[0] is handle
    ]
    assert len(reads) == 3 and all(in_computation(op) for op in reads)
    assert rv.handle is own[0].handle


def test_rewrite(graph):
    own = variables(1)
    rv = ReplicatedVariable("rv", own)
    handles = []
    tf.tpu.rewrite(lambda: handles.append(rv.handle) or rv.read_value())
    assert list(handles[0].op.inputs) == [own[0].handle]


def test_handles_of_two_with_one_name(graph):
    a, b = (ReplicatedVariable("same", variables(name=name)) for name in "ab")
    handles = []

    def computation(x):
        handles.extend([a.handle, b.handle])
        return a + b + x

    replicate(computation)
    assert handles[0] is not handles[1]
    assert list(handles[1].op.inputs) == [v.handle for v in b._vars]


def test_each_computation_has_its_own_handle(graph):
    rv = ReplicatedVariable("rv", variables())
    handles = []
    for _ in range(2):
        replicate(lambda x: handles.append(rv.handle) or rv + x)
    assert handles[0] is not handles[1]


def test_gradient_within_a_computation(graph):
    rv = ReplicatedVariable("rv", variables())
    seen = []

    def computation(x):
        y = tf.reduce_sum(tf.square(rv) * x)
        seen.extend(tf.gradients(y, [rv]))
        return seen[0]

    replicate(computation)
    assert seen[0] is not None and seen[0].shape.as_list() == [2, 3]


@pytest.mark.parametrize("v2_loops", [False, True])
def test_within_a_loop_and_a_function(graph, v2_loops):
    own = variables()
    rv = ReplicatedVariable("rv", own)

    def computation(x):
        with tf.control_dependencies([rv.assign(x)]):
            _, y = tf.while_loop(
                lambda i, y: i < 3, lambda i, y: (i + 1, y + rv.read_value()), [0, tf.identity(x)]
            )
        return tf.function(lambda y: rv.assign_add(y))(y)

    before = tf.control_flow_v2_enabled()
    (tf.enable_control_flow_v2 if v2_loops else tf.disable_control_flow_v2)()
    try:
        replicate(computation)
    finally:
        (tf.enable_control_flow_v2 if before else tf.disable_control_flow_v2)()
    inputs = [op for op in graph.get_operations() if op.type == "TPUReplicatedInput"]
    assert [list(op.inputs) for op in inputs if op.name == "rv/handle"] == [[v.handle for v in own]]


def test_initializer_from_within(graph):
    rv = ReplicatedVariable("rv", variables())
    groups = []
    replicate(lambda x: groups.append(rv.initializer) or x + 1.0)
    assert not in_computation(groups[0])
    assert run(rv.get(), init=groups[0])[0].shape == (2, 3)


@pytest.mark.parametrize(
    "make, error, text",
    [
        (
            lambda: [],
            ValueError,
            "ReplicatedVariable rv got no variables; give one for each replica",
        ),
        (
            lambda: variables(use_resource=False),
            TypeError,
            "rv is made of resource variables; v0:0 is a RefVariable. Create it with use_resource=True",
        ),
        (
            lambda: variables(1) + variables(1, name="w", shape=[2]),
            ValueError,
            r"rv differ: v0:0 is float32 \(2, 3\), w0:0 is float32 \(2,\). Each replica",
        ),
        (
            lambda: variables(1) + variables(1, name="w", dtype=tf.bfloat16),
            ValueError,
            r"w0:0 is bfloat16",
        ),
    ],
    ids=["none", "reference", "shape", "dtype"],
)
def test_variables_that_do_not_fit(graph, make, error, text):
    with pytest.raises(error, match=text):
        ReplicatedVariable("rv", make())


def test_values_that_do_not_fit(graph):
    rv = ReplicatedVariable("rv", variables())
    for update in (rv.assign, rv.assign_add, rv.assign_sub):
        with pytest.raises(ValueError, match=r"of shape \(2, 3\) got a value of shape \(3, 2\)"):
            update(np.zeros([3, 2], "float32"))
