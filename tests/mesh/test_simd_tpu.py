"""SimdMeshImpl as tpu.replicate builds it: operations, variables, and a training step on XLA's CPUs."""

import itertools

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from helpers.mesh import xla_cpu_replicas

import mesh_tensorflow as mtf
from mesh_tensorflow._mesh.random_values import keys_by_step
from mesh_tensorflow._mesh.slice_functions import at_device, constant
from mesh_tensorflow._mesh.tpu_program import outside_tpu_context
from mesh_tensorflow.placement_mesh_impl import PlacementMeshImpl
from mesh_tensorflow.simd_mesh_impl import SimdMeshImpl
from mesh_tensorflow.tpu_variables import ReplicatedVariable

BATCH, WIDTH, HIDDEN = 8, 16, 32
DATA = np.random.RandomState(0).randn(BATCH, WIDTH).astype(np.float32)
L2P = [0, 3, 5, 6, 1, 7, 2, 4]
MESH, LAYOUT = "x:2,y:4", "batch:x,hidden:y"
OPTIMIZERS = {
    "adam": lambda: mtf.optimize.AdamWeightDecayOptimizer(0.01),
    "sgd": lambda: mtf.optimize.SgdOptimizer(0.1),
}


def device_assignment(replicas=8):
    """Returns an assignment of cores of a TPU of 2 x 2 chips with two cores each."""
    cores = np.array(list(itertools.product(range(2), range(2), range(1), range(2))))
    topology = tf.tpu.experimental.Topology(mesh_shape=[2, 2, 1, 2], device_coordinates=cores[None])
    return tf.tpu.experimental.DeviceAssignment(topology, cores[:replicas, None])


def network(make_impl, x, keep_prob, optimizer):
    """Returns (loss, training operation, Lowering) of a step of a small network."""
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")
    batch, d = mtf.Dimension("batch", BATCH), mtf.Dimension("width", WIDTH)
    x = mtf.import_tf_tensor(mesh, x, [batch, d])
    h = mtf.layers.layer_norm(x, d)
    h = mtf.layers.dense(
        h, [mtf.Dimension("hidden", HIDDEN)], reduced_dims=[d], activation=mtf.relu, name="in"
    )
    h = mtf.dropout(h, True, keep_prob=keep_prob)
    y = x + mtf.layers.dense(h, [d], reduced_dims=h.shape.dims[-1:], name="out")
    loss = mtf.reduce_mean(mtf.square(y - mtf.sin(x)))
    variables = graph.trainable_variables
    grads = mtf.gradients([loss], [v.value for v in variables])
    updates = OPTIMIZERS[optimizer]().apply_grads(grads, variables)
    lowering = mtf.Lowering(graph, {mesh: make_impl()})
    train = tf.group([lowering.lowered_operation(op) for op in updates])
    return lowering.export_to_tf_tensor(loss), train, lowering


def simd(**options):
    return SimdMeshImpl(MESH, LAYOUT, device_assignment=device_assignment(), **options)


class Step:
    """A training step, as a function for a Program."""

    def __init__(self, keep_prob, optimizer="adam", **options):
        self.arguments = keep_prob, optimizer
        self.options = options
        self.lowering = None

    def __call__(self, x):
        tf.set_random_seed(3)
        loss, train, self.lowering = network(lambda: simd(**self.options), x, *self.arguments)
        with tf.control_dependencies([train]):
            return tf.identity(loss)

    def start(self):
        """Returns what initializes masters and slices."""
        return [tf.global_variables_initializer(), self.lowering.copy_masters_to_slices()]


def placed(keep_prob, optimizer="adam"):
    """Returns (loss, weights by name after the step)."""
    with tf.Graph().as_default(), tf.Session() as session:
        tf.set_random_seed(3)
        loss, train, _ = network(
            lambda: PlacementMeshImpl("x:1", "", [""]), tf.constant(DATA), keep_prob, optimizer
        )
        session.run(tf.global_variables_initializer())
        loss, _ = session.run([loss, train])
        return loss, session.run({v.op.name: v for v in tf.global_variables()})


def build(fn):
    """Returns the graph of a function as tpu.replicate builds it for 8 cores."""
    with tf.Graph().as_default() as graph:
        tf.tpu.replicate(fn, [[DATA]] * 8, device_assignment=device_assignment())
    return graph


def inside(op):
    return "_tpu_replicate" in op.node_def.attr and op.type != "TPUReplicateMetadata"


# -- a training step


@pytest.mark.slow("0.75-adam*", "1.0*")
@pytest.mark.parametrize("keep_prob, optimizer, l2p", [(1.0, "sgd", None), (0.75, "adam", L2P)])
def test_a_training_step_is_that_of_placement(keep_prob, optimizer, l2p):
    pytest.importorskip("jax")
    step = Step(keep_prob, optimizer, logical_to_physical=l2p)
    program = xla_cpu_replicas.Program(
        lambda x: step(x), [[DATA]] * 8, device_assignment=device_assignment(), start=step.start
    )
    [results] = xla_cpu_replicas.run([program])
    loss, weights = placed(keep_prob, optimizer)
    np.testing.assert_allclose([own[0] for own in results], loss, rtol=1e-5)
    with program.session_after(results) as session:
        session.run(step.lowering.copy_slices_to_masters())
        found = session.run({v.op.name: v for v in tf.global_variables()})
    assert sorted(found) == sorted(weights)
    for name, value in found.items():
        np.testing.assert_allclose(value, weights[name], rtol=1e-4, atol=1e-5, err_msg=name)


def test_operations_of_a_training_step():
    step = Step(0.75, logical_to_physical=L2P)
    graph = build(lambda x: step(x))
    types = {}
    for op in graph.get_operations():
        types.setdefault((op.type, inside(op)), []).append(op)
    groups = [
        tf.make_ndarray(op.inputs[1].op.get_attr("value")).tolist()
        for op in types["CrossReplicaSum", True]
    ]
    along_x = [[L2P[i], L2P[i + 4]] for i in range(4)]
    along_y = [L2P[:4], L2P[4:]]
    # Over hidden the second product and the gradient of the first one's input; over the batch the
    # loss and the gradients of two kernels, two biases, and a scale and a bias.
    assert groups.count(along_y) == 2 and groups.count(along_x) == 7 and len(groups) == 9
    # One key, from the host.
    assert len(types["RandomUniformInt", False]) == 1
    assert not [
        t for t, on_tpu in types if on_tpu and t.startswith(("Random", "Print", "Collective"))
    ]


def test_host_and_computation_share_nothing():
    """Neither constants nor anything else made in the computation is used on the host."""
    step = Step(0.75)
    graph = build(lambda x: step(x))
    with graph.as_default():
        step.lowering.copy_masters_to_slices()
        step.lowering.copy_slices_to_masters()
    for op in graph.get_operations():
        if not inside(op) and op.type != "TPUReplicatedOutput":
            assert not [x for x in op.inputs if inside(x.op)], op.name
            own = not op.name.startswith("output")  # not tpu.replicate's
            assert not [c for c in op.control_inputs if own and inside(c)], op.name


def test_constants_of_host_and_computation():
    made = []

    def computation(x):
        with at_device(""):
            made.extend([constant([1, 2]), constant([1, 2])])
            with outside_tpu_context():
                made.append(constant([1, 2]))
        return x

    build(computation)
    assert made[0] is made[1] and [inside(c.op) for c in made] == [True, True, False]


def test_constants_wait_for_nothing(tf_graph):
    """One that a waiting operation makes is shared with others, which need not wait."""
    with at_device(""), tf.control_dependencies([tf.no_op()]):
        made = constant([1, 2])
    with at_device(""):
        assert constant([1, 2]) is made and not made.op.control_inputs


@pytest.mark.slow
def test_loops_and_recomputation():
    """A loop with a shift in it, and its gradient, on XLA's CPUs."""
    pytest.importorskip("jax")
    hidden = mtf.Dimension("hidden", WIDTH)

    def results(make_impl, x):
        graph = mtf.Graph()
        mesh = mtf.Mesh(graph, "mesh")
        x = mtf.import_tf_tensor(mesh, x, [mtf.Dimension("batch", BATCH), hidden])
        [last] = mtf.while_loop(
            lambda i, s: mtf.less(i, 3),
            lambda i, s: [i + 1, mtf.shift(s, 1, hidden, wrap=True) * x],
            [mtf.zeros(mesh, [], tf.int32), x],
        )[1:]
        y = mtf.recompute_grad(lambda z: mtf.square(mtf.sin(z)), [x])
        [gradient] = mtf.gradients([mtf.reduce_sum(y)], [x])
        lowering = mtf.Lowering(graph, {mesh: make_impl()})
        return [lowering.export_to_tf_tensor(t) for t in (last, y, gradient)]

    program = xla_cpu_replicas.Program(
        lambda x: results(lambda: simd(logical_to_physical=L2P), x),
        [[DATA]] * 8,
        device_assignment=device_assignment(),
    )
    [found] = xla_cpu_replicas.run([program])
    expected = DATA
    for _ in range(3):
        expected = np.roll(expected, 1, 1) * DATA
    for own in found:
        np.testing.assert_allclose(own[0], expected, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(own[1], np.sin(DATA) ** 2, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(own[2], np.sin(2 * DATA), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_what_goes_on_without_variables():
    """Gathering, exchanging, shifting, maxima and whole tensors on XLA's CPUs."""
    pytest.importorskip("jax")
    a, b = mtf.Dimension("a", 8), mtf.Dimension("b", 8)
    values = np.random.RandomState(1).randn(8, 8).astype(np.float32)

    def computation(x):
        graph = mtf.Graph()
        mesh = mtf.Mesh(graph, "mesh")
        x = mtf.import_tf_tensor(mesh, x, [a, b])
        ys = [
            mtf.rename_dimension(x, "a", "whole"),
            mtf.reshape(x, [mtf.Dimension("c", 8), mtf.Dimension("a", 8)]),
            mtf.shift(x, 3, b, wrap=True),
            mtf.shift(x, -2, a, wrap=False),
            mtf.reduce_max(x, reduced_dim=b),
            mtf.reduce_sum(mtf.cast(x, tf.bfloat16), reduced_dim=a),
            mtf.cumsum(x, b),
        ]
        impl = SimdMeshImpl(
            "x:2,y:4", "a:x,b:y,c:y", device_assignment=device_assignment(), logical_to_physical=L2P
        )
        lowering = mtf.Lowering(graph, {mesh: impl})
        return [lowering.export_to_tf_tensor(y) for y in ys]

    program = xla_cpu_replicas.Program(
        computation, [[values]] * 8, device_assignment=device_assignment()
    )
    [results] = xla_cpu_replicas.run([program])
    shifted = np.concatenate([values[2:], np.zeros([2, 8])])
    expected = [
        values,
        values,
        np.roll(values, 3, 1),
        shifted,
        values.max(1),
        values.sum(0),
        values.cumsum(1),
    ]
    for own in results:
        for i, (found, value) in enumerate(zip(own, expected)):
            tolerance = 0.1 if i == 5 else 1e-5
            np.testing.assert_allclose(found.astype(np.float32), value, tolerance, tolerance)


# -- variables


def variable_names(reuse):
    """Returns the slices of enc/w by name, and their Lowering, with the Lowering made in scope L."""
    lowerings = []

    def computation(x):
        graph = mtf.Graph()
        mesh = mtf.Mesh(graph, "mesh")
        with tf.variable_scope("enc"):
            w = mtf.get_variable(mesh, "w", [mtf.Dimension("a", 4), mtf.Dimension("b", 4)])
        impl = SimdMeshImpl(
            "x:2,y:4", "a:x,b:y", device_assignment=device_assignment(), logical_to_physical=L2P
        )
        with tf.variable_scope("L", reuse=reuse):
            lowerings.append(mtf.Lowering(graph, {mesh: impl}))
        return lowerings[-1].export_to_tf_tensor(w)

    graph = build(computation)
    return {v.op.name: v for v in graph.get_collection("TPU_VAR")}, lowerings[0], graph


@pytest.mark.parametrize("reuse, prefix", [(None, "L/enc/w/"), (tf.AUTO_REUSE, "L/")])
def test_slices(reuse, prefix):
    slices, lowering, graph = variable_names(reuse)
    assert list(slices) == [f"{prefix}enc/w_slice_{p}" for p in range(8)]
    for p, device in enumerate(device_assignment().tpu_device(replica=n) for n in range(8)):
        v = slices[f"{prefix}enc/w_slice_{p}"]
        spec, expected = map(tf.DeviceSpec.from_string, (v.device, device))
        assert spec.device_type == "TPU" and spec.device_index == expected.device_index == p
        assert v.shape.as_list() == [2, 1] and not inside(v.op)
        assert v.trainable
        zeros = graph.get_operation_by_name(v.op.name + "/Assign").inputs[1].op
        assert not inside(zeros) and "CPU" in zeros.device
    trainable = [v.op.name for v in graph.get_collection("trainable_variables")]
    assert trainable == ["enc/w", *slices]
    [master] = graph.get_collection("variables")
    assert master.op.name == "enc/w" and not master.is_bound
    assert "CPU" in master.device
    [laid_out] = lowering.variables.values()
    assert isinstance(laid_out._own, ReplicatedVariable) and laid_out._own.name == "enc/w"
    [handle] = [
        op
        for op in graph.get_operations()
        if op.type == "TPUReplicatedInput" and op.outputs[0].dtype == tf.resource
    ]
    assert [x.op.name for x in handle.inputs] == list(slices)
    impl = laid_out.mesh_impl
    assert impl.devices == [device_assignment().tpu_device(replica=p) for p in L2P]
    assert len(impl.graph_device_function_stacks) == 1


def test_values_of_slices():
    slices, lowering, graph = variable_names(None)
    [laid_out] = lowering.variables.values()
    whole = np.arange(16.0).reshape(4, 4)
    config = tf.ConfigProto(
        graph_options=tf.GraphOptions(place_pruned_graph=True), allow_soft_placement=True
    )
    with graph.as_default(), tf.Session(config=config) as session:
        session.run([v.initializer for v in slices.values()])
        assert not any(v.any() for v in session.run(slices).values())
        [master] = tf.global_variables()
        session.run(master.assign(whole))
        assert not any(v.any() for v in session.run(slices).values())
        session.run(lowering.copy_masters_to_slices())
        for pnum, value in session.run(laid_out.slices).items():
            np.testing.assert_array_equal(value, whole[pnum // 4 * 2 :][:2, pnum % 4 :][:, :1])
        session.run([master.assign(0 * whole)])
        session.run(lowering.copy_slices_to_masters())
        np.testing.assert_array_equal(session.run(master), whole)


@pytest.mark.parametrize("toggle", [tf.enable_control_flow_v2, tf.disable_control_flow_v2])
def test_a_loop_reads_variables_in_each_iteration(toggle):
    def computation(x):
        def body(i):
            step = Step(1.0)
            with tf.control_dependencies([step(x)]):
                return i + 1

        return tf.while_loop(lambda i: i < 3, body, [0])

    before = tf.control_flow_v2_enabled()
    toggle()
    try:
        graph = build(computation)
    finally:
        (tf.enable_control_flow_v2 if before else tf.disable_control_flow_v2)()
    reads = [op for op in graph.get_operations() if op.type == "ReadVariableOp" and inside(op)]
    if toggle is tf.disable_control_flow_v2:
        assert reads
        assert all(op._get_control_flow_context().IsWhileContext() for op in reads)
    else:
        [body] = [
            f for f in graph.as_graph_def().library.function if "while_body" in f.signature.name
        ]
        assert not reads and "ReadVariableOp" in {node.op for node in body.node_def}


# -- random values, printing, dependencies, errors


def random_values(x, tf_fn=tf.random.uniform):
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")
    shape = mtf.convert_to_shape("batch:8,hidden:8")
    operation = mtf.RandomOperation(mesh, shape, tf_fn)
    lowering = mtf.Lowering(graph, {mesh: simd()})
    return lowering.export_to_tf_tensor(operation.outputs[0])


def another_fn(shape, **kwargs):
    return tf.random.uniform(shape, **kwargs) + 1


@pytest.mark.slow
@pytest.mark.parametrize("tf_fn", [tf.random.uniform, another_fn])
def test_random_values_in_a_loop(tf_fn):
    """Equal on all replicas, and new in each iteration."""
    pytest.importorskip("jax")

    def computation(x):
        def body(i, values):
            here = tf.one_hot(i, 3)[:, None, None]
            return i + 1, values + here * random_values(x, tf_fn)

        return tf.while_loop(lambda i, _: i < 3, body, [0, tf.zeros([3, 8, 8])])[1]

    program = xla_cpu_replicas.Program(
        computation, [[DATA]] * 8, device_assignment=device_assignment()
    )
    [results] = xla_cpu_replicas.run([program])
    values = results[0][0]
    for own in results:
        np.testing.assert_array_equal(own[0], values)
    low = 0 if tf_fn is tf.random.uniform else 1
    assert values.min() >= low and values.max() < low + 1
    assert len(np.unique(values)) > 3 * 64 - 3


def test_keys_of_a_step_need_no_host():
    def computation(x):
        tf.set_random_seed(3)
        with keys_by_step(tf.cast(x[0, 0], tf.int32)):
            return random_values(x)

    graph = build(computation)
    assert not [op for op in graph.get_operations() if op.type.startswith("Random")]


def test_functions_of_the_user_are_called_on_the_host():
    graph = build(lambda x: random_values(x, another_fn))
    [op] = [op for op in graph.get_operations() if op.type == "RandomUniform"]
    assert not inside(op)


@pytest.mark.slips
def test_print_and_depend():
    def computation(x, wait):
        graph = mtf.Graph()
        mesh = mtf.Mesh(graph, "mesh")
        x = mtf.import_tf_tensor(
            mesh, x, [mtf.Dimension("batch", BATCH), mtf.Dimension("width", WIDTH)]
        )
        y = mtf.Print(x, [x], "x: ")
        if wait:
            y = mtf.depend(y, [x])
        return mtf.Lowering(graph, {mesh: simd()}).export_to_tf_tensor(y)

    graph = build(lambda x: computation(x, False))
    assert not [op for op in graph.get_operations() if "Print" in op.type]
    with pytest.raises(ValueError, match="SimdMeshImpl does not support control dependencies"):
        build(lambda x: computation(x, True))


def test_errors():
    def made(*args, **kwargs):
        return build(lambda x: SimdMeshImpl(*args, **kwargs) and x)

    with pytest.raises(ValueError, match=r"x=2, y=4 within a TPU computation has no\s+device_assi"):
        made(MESH, LAYOUT)
    with pytest.raises(ValueError, match=r"x=2 has 2 processors.*has 8 replicas.*num_replicas=2"):
        made("x:2", LAYOUT, device_assignment=device_assignment())
    with pytest.raises(ValueError, match=r"each of 0 to 7 once"):
        made(
            MESH, LAYOUT, device_assignment=device_assignment(), logical_to_physical=[(0, 0, 0)] * 8
        )
    outside = simd()
    assert not outside.supports_control_dependencies and outside.l2p(3) == 3
    with pytest.raises(ValueError, match="outside of a replicated computation"):
        outside.laid_out_pnum()
