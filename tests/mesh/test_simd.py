"""SimdMeshImpl in one process: training, state, randomness, communication, size of the program."""

import collections

import numpy as np
import pytest
import tensorflow as tf2
import tensorflow.compat.v1 as tf
from helpers.mesh.residual_network import network, new_session, train

import mesh_tensorflow as mtf
from mesh_tensorflow._mesh import replicate as replication
from mesh_tensorflow._mesh.replicate import SimdProgram
from mesh_tensorflow.placement_mesh_impl import PlacementMeshImpl
from mesh_tensorflow.simd_mesh_impl import SimdMeshImpl, replicate
from mesh_tensorflow.testing import harness

LAYOUTS = [
    ("x:2", "batch:x"),
    ("x:2,y:2", "batch:x,hidden:y"),
    ("x:2,y:4", "hidden:y,width:x"),
    ("x:8", "batch:x"),
    ("x:2,y:2,z:2", "batch:x,hidden:z"),
]


@pytest.fixture(autouse=True)
def own_graph():
    with tf.Graph().as_default():
        tf.set_random_seed(3)
        yield


def cpus(mesh_shape):
    return [f"/cpu:{i}" for i in range(mtf.convert_to_shape(mesh_shape).size)]


def simd(mesh_shape, layout, devices=None, **options):
    def program():
        return network(lambda: SimdMeshImpl(mesh_shape, layout, **options))

    return replicate(program, devices=devices or cpus(mesh_shape))


@pytest.fixture(scope="module")
def placed():
    with tf.Graph().as_default():
        tf.set_random_seed(3)
        return train(network(lambda: PlacementMeshImpl("x:1", "", [""])))


@pytest.mark.slow("x:2,y:2,z:2*", "x:2,y:4*", "x:2-batch*", "x:8*")
@pytest.mark.parametrize("mesh_shape, layout", LAYOUTS)
def test_training_equals_placement(mesh_shape, layout, placed):
    losses, weights = train(simd(mesh_shape, layout))
    np.testing.assert_allclose(losses, placed[0], rtol=1e-5)
    assert sorted(weights) == sorted(placed[1])
    for name, value in weights.items():
        np.testing.assert_allclose(value, placed[1][name], rtol=1e-4, atol=1e-5, err_msg=name)


def test_processors_may_be_in_any_order(placed):
    devices = [f"/cpu:{i}" for i in (3, 1, 0, 2)]
    step = simd("x:2,y:2", "batch:x,hidden:y", devices=devices, logical_to_physical=[2, 0, 3, 1])
    losses, _ = train(step)
    np.testing.assert_allclose(losses, placed[0], rtol=1e-5)


@pytest.mark.slow
def test_checkpoints_go_from_one_implementation_to_the_other(tmp_path):
    def placement():
        return network(lambda: PlacementMeshImpl("x:4", "hidden:x", [""] * 4, merge="none"))

    builders = [
        lambda: simd("x:2,y:2", "batch:x,hidden:y"),
        placement,
        lambda: simd("x:4", "width:x"),
    ]
    expected, path = None, None
    for build in builders:
        with tf.Graph().as_default(), new_session() as session:
            step, saver = build(), mtf.checkpoint.Saver()
            if path is None:
                session.run(tf.global_variables_initializer())
                session.run(step)
            else:
                saver.restore(session, path)
            weights = session.run({v.op.name: v for v in tf.global_variables()})
            path = saver.save(session, str(tmp_path / "model"), write_meta_graph=False)
        expected = expected or weights
        for name, value in weights.items():
            np.testing.assert_array_equal(value, expected[name])


def collective_bytes(concrete_graph):
    found = collections.Counter()
    for op in concrete_graph.get_operations():
        if op.type.startswith("Collective") and "Recv" not in op.type:
            found[op.type] += op.inputs[0].shape.num_elements() * op.inputs[0].dtype.size
    return found


def test_a_halo_moves_nothing_but_the_halo():
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")
    rows, columns = mtf.Dimension("blocks", 4), mtf.Dimension("rows", 8)
    x = mtf.import_tf_tensor(
        mesh,
        tf.reshape(tf.range(4 * 8 * 16.0), [4, 8, 16]),
        [rows, columns, mtf.Dimension("c", 16)],
    )
    y = mtf.halo_exchange(x, rows, columns, 2)
    summed, graphs = mtf.reduce_sum(y), []

    def program():
        lowering = mtf.Lowering(graph, {mesh: SimdMeshImpl("x:4", "blocks:x")})
        graphs.append(tf.get_default_graph())
        return lowering.export_to_tf_tensor(summed)

    total = replicate(program, devices=cpus("x:4"))
    moved = collective_bytes(graphs[0])
    assert moved.pop("CollectiveReduceV2") == 4  # the sum
    assert moved == {"CollectiveBcastSendV2": 2 * 2 * 16 * 4}  # two halos of two rows
    with new_session() as session:
        whole = np.arange(4 * 8 * 16.0).reshape(32, 16)
        halos = sum(whole[8 * i - 2 : 8 * i + 2].sum() for i in (1, 2, 3))
        np.testing.assert_allclose(session.run(total), whole.sum() + halos, rtol=1e-6)


@pytest.mark.slow
def test_many_independent_collectives_do_not_deadlock():
    """200 steps of many collectives in no order, on subgroups of a 2x4 mesh."""
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")
    a, b = mtf.Dimension("a", 8), mtf.Dimension("b", 8)
    x = mtf.import_tf_tensor(mesh, tf.reshape(tf.range(64.0), [8, 8]), [a, b])
    results = []
    for i in range(6):
        y = x * float(i + 1)
        results += [
            mtf.reduce_sum(y),
            mtf.reduce_sum(y, reduced_dim=a),
            mtf.reduce_max(y, reduced_dim=b),
            mtf.shift(y, 1, a, wrap=True),
            mtf.shift(y, -2, b, wrap=True),
            mtf.rename_dimension(y, "a", "whole"),
            mtf.reshape(y, [mtf.Dimension("c", 8), mtf.Dimension("a", 8)]),
        ]
    total = mtf.add_n([mtf.reduce_sum(mtf.square(r)) for r in results])

    def program():
        lowering = mtf.Lowering(graph, {mesh: SimdMeshImpl("x:2,y:4", "a:x,b:y,c:y")})
        return lowering.export_to_tf_tensor(total)

    step = replicate(program, devices=cpus("x:2,y:4"))
    whole = mtf.Lowering(graph, {mesh: PlacementMeshImpl("x:1", "", [""])})
    expected = whole.export_to_tf_tensor(total)
    config = tf.ConfigProto(device_count={"CPU": 8}, inter_op_parallelism_threads=1)
    with tf.Session(config=config) as session:
        run = session.make_callable(step)
        values = {float(run()) for _ in range(200)}
        np.testing.assert_allclose(list(values), session.run(expected), rtol=1e-5)


@pytest.mark.slow
def test_a_step_that_waits_for_a_processor_can_be_limited():
    """A processor that is not there; afterwards the session is as good as before."""

    def loss():
        return network(lambda: SimdMeshImpl("x:2", "batch:x"))["loss"]

    with tf.variable_scope("whole"):
        first = replicate(loss, devices=cpus("x:2"))
    with tf.variable_scope("half"):
        second = replicate(loss, devices=cpus("x:2"), local=[0])
    with new_session() as session:
        session.run(tf.global_variables_initializer())
        expected = session.run(first)
        with pytest.raises(tf.errors.DeadlineExceededError):
            session.run(second, options=tf.RunOptions(timeout_in_ms=1000))
        assert session.run(first) != expected  # the next random numbers


def test_the_program_does_not_grow_with_the_mesh():
    nodes = []
    for n in (2, 4):  # with more than a row each; one alone has a shape that is ensured
        with tf.Graph().as_default():
            sizes = []

            def program(n=n, sizes=sizes):
                step = network(lambda: SimdMeshImpl(f"x:{n}", "batch:x"))
                sizes.append(len(tf.get_default_graph().get_operations()))
                return step

            replicate(program, devices=cpus(f"x:{n}"))
            nodes += sizes
    assert len(set(nodes)) == 1, nodes


@pytest.mark.slow("dtype[1-5]*")
@pytest.mark.parametrize(
    "dtype", [tf.bfloat16, tf.float16, tf.float64, tf.int32, tf.int64, tf.bool]
)
def test_dtypes(dtype):
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")
    a, b = mtf.Dimension("a", 4), mtf.Dimension("b", 4)
    values = np.arange(16).reshape(4, 4)
    x = mtf.import_tf_tensor(mesh, tf.cast(tf.constant(values), dtype), [a, b])
    ys = [
        mtf.rename_dimension(x, "a", "whole"),
        mtf.shift(x, 1, a, wrap=False),
        mtf.reshape(x, [mtf.Dimension("c", 4), mtf.Dimension("a", 4)]),
    ]
    if dtype is not tf.bool:
        ys += [mtf.reduce_sum(x, reduced_dim=a), mtf.reduce_max(x, reduced_dim=a)]

    def program():
        lowering = mtf.Lowering(graph, {mesh: SimdMeshImpl("x:4", "a:x")})
        return [lowering.export_to_tf_tensor(y) for y in ys]

    outputs = replicate(program, devices=cpus("x:4"))
    assert [y.dtype for y in outputs] == [dtype] * len(ys)
    with new_session() as session:
        found = session.run([tf.cast(y, tf.float64) for y in outputs])
    if dtype is tf.bool:
        values = (values != 0).astype(int)
    shifted = np.concatenate([np.zeros([1, 4]), values[:-1]])
    expected = [values, shifted, values, values.sum(0), values.max(0)]
    for y, e in zip(found, expected):
        np.testing.assert_array_equal(y, e)


@pytest.mark.parametrize("dtype", [np.uint32, np.uint64])
def test_unsigned_numbers_beyond_the_signed_ones(dtype):
    """TensorFlow's collectives have no unsigned dtypes."""
    top = np.iinfo(dtype).max
    values = np.array([3, top, top // 2 + 1, 7], dtype)
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")
    a = mtf.Dimension("a", 4)
    x = mtf.import_tf_tensor(mesh, tf.constant(values), [a])
    ys = [mtf.reduce_max(x), mtf.reduce_min(x), mtf.reduce_sum(x), mtf.shift(x, 1, a, wrap=True)]

    def program():
        lowering = mtf.Lowering(graph, {mesh: SimdMeshImpl("x:2", "a:x")})
        return [lowering.export_to_tf_tensor(y) for y in ys]

    outputs = replicate(program, devices=cpus("x:2"))
    with new_session() as session:
        found = session.run(outputs)
    expected = [values.max(), values.min(), values.sum(dtype=dtype), np.roll(values, 1)]
    for y, e in zip(found, expected):
        np.testing.assert_array_equal(y, e)


def test_sums_of_bfloat16_in_large_groups_are_made_in_float32():
    def sums(limit):
        graph = mtf.Graph()
        mesh = mtf.Mesh(graph, "mesh")
        x = mtf.import_tf_tensor(mesh, tf.ones([4], tf.bfloat16), [mtf.Dimension("a", 4)])
        y, types = mtf.reduce_sum(x), []

        def program():
            impl = SimdMeshImpl("x:4", "a:x", allreduce_in_bfloat16_max_group_size=limit)
            value = mtf.Lowering(graph, {mesh: impl}).export_to_tf_tensor(y)
            ops = tf.get_default_graph().get_operations()
            types.extend(op.get_attr("T") for op in ops if op.type == "CollectiveReduceV2")
            return value

        replicate(program, devices=cpus("x:4"))
        return types

    assert sums(4) == [tf.bfloat16]
    assert sums(3) == [tf.float32]


def test_errors():
    with pytest.raises(ValueError, match=r"within a program that all processors run.*replicate"):
        SimdMeshImpl("x:2", "")
    with pytest.raises(
        ValueError, match=r"x=2, y=2 needs 4 devices, but there are 2.*Mesh shapes that fit 2"
    ):
        replicate(lambda: SimdMeshImpl("x:2,y:2", ""), devices=cpus("x:2"))
    with pytest.raises(ValueError, match=r"each of 0 to 1 once.*\[1, 1\]"):
        replicate(lambda: SimdMeshImpl("x:2", "", logical_to_physical=[1, 1]), devices=cpus("x:2"))
    with pytest.raises(ValueError, match=r"a device of its own, but .* names '/device:CPU:0' more"):
        replicate(lambda: SimdMeshImpl("x:2", ""), devices=["cpu:0", "/cpu:0"])
    with pytest.raises(ValueError, match="within a program that is being replicated"):
        replicate(lambda: replicate(lambda: tf.constant(1)), devices=["/cpu:0"])


def test_variables_of_no_mesh():
    with tf.variable_scope("", use_resource=True):
        outside = tf.get_variable("outside", [], initializer=tf.ones_initializer())

    def program():
        SimdMeshImpl("x:2,y:2", "")
        inside = tf.get_variable("inside", [], initializer=tf.zeros_initializer())
        step = tf.train.get_or_create_global_step()
        assert tf.train.get_global_step() is step
        before = tf.identity(outside)
        with tf.control_dependencies([before]):
            adds = [tf.assign_add(outside, 2.0), tf.assign_add(inside, 1.0), tf.assign_add(step, 1)]
        return {"before": before, "train": tf.group(adds)}

    result = replicate(program, devices=cpus("x:4"))
    variables = {v.op.name: v for v in tf.global_variables()}
    assert set(variables) == {"outside", "inside", "global_step"}
    with new_session() as session:
        session.run(tf.global_variables_initializer())
        for i in range(3):
            assert session.run(result)["before"] == 1 + 2 * i
        assert session.run(variables) == {"outside": 7, "inside": 3, "global_step": 3}


@pytest.mark.parametrize("layout", ["", "a:x", "a:y,b:x"])
def test_values_are_exported_outside_of_rewrites_too(layout):
    whole = np.arange(24, dtype=np.float32).reshape(4, 6)

    def program():
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        y = mtf.import_tf_tensor(mesh, tf.constant(whole), "a:4,b:6") * 2
        total = mtf.reduce_sum(y)
        lowering = mtf.Lowering(mesh.graph, {mesh: SimdMeshImpl("x:2,y:2", layout)})
        with mtf.utils.outside_all_rewrites():
            return {name: lowering.export_to_tf_tensor(t) for name, t in [("y", y), ("sum", total)]}

    result = replicate(program, devices=cpus("x:4"))
    with new_session() as session:
        got = session.run(result)
    np.testing.assert_array_equal(got["y"], whole * 2)
    assert got["sum"] == whole.sum() * 2


def test_variables_of_no_mesh_in_loops_and_branches():
    """Each is assigned to once, and read by all, as outside of them."""
    with tf.variable_scope("", use_resource=True):
        names = ("looped", "chosen", "read")
        looped, chosen, read = (
            tf.get_variable(n, [], initializer=tf.ones_initializer()) for n in names
        )

    def program():
        SimdMeshImpl("x:4", "")

        def body(i):
            def add():
                return tf.identity(tf.assign_add(chosen, read))

            with tf.control_dependencies([tf.assign_add(looped, 2.0)]):
                more = tf.cond(i > 0, add, lambda: tf.constant(1.0))
            return i + tf.cast(more > 0, tf.int32)

        return tf.while_loop(lambda i: i < 3, body, [tf.constant(0)])

    result = replicate(program, devices=cpus("x:4"))
    with new_session() as session:
        session.run(tf.global_variables_initializer())
        assert session.run(result) == 3
        assert session.run([looped, chosen, read]) == [7, 3, 1]


@pytest.mark.parametrize("task, copied", [(0, [False, True, True]), (1, [True, False, True])])
def test_a_variable_is_assigned_to_by_a_processor_of_its_process(task, copied):
    devices = [f"/job:worker/task:{t}/cpu:{i}" for t, i in ((0, 0), (1, 0), (1, 1))]
    program = SimdProgram(devices, [0, 1, 2])
    with tf.variable_scope("", use_resource=True), tf.device(f"/job:worker/task:{task}"):
        v = tf.get_variable("v", [], initializer=tf.ones_initializer())
    function = tf2.function(lambda: v.assign_add(1.0, read_value=False) and None)
    found = [replication._copies(program, function.get_concrete_function(), p) for p in range(3)]
    assert [bool(each) for each in found] == copied
    with tf.variable_scope("", use_resource=True), tf.device("/job:ps/task:0"):
        w = tf.get_variable("w", [], initializer=tf.ones_initializer())
    function = tf2.function(lambda: w.assign_add(1.0, read_value=False) and None)
    with pytest.raises(ValueError, match=r"assigns to the variable w of /job:ps.*no processor is"):
        replication._copies(program, function.get_concrete_function(), 0)


def test_variables_that_are_no_resources_are_refused():
    with tf.variable_scope("", use_resource=False):
        v = tf.get_variable("v", [], initializer=tf.ones_initializer())
    with pytest.raises(TypeError, match=r"is no resource variable: call tf\.compat\.v1\.enable"):
        replicate(lambda: tf.assign_add(v, 1.0), devices=cpus("x:2"))


def test_print_and_control_dependencies(capfd):
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")
    x = mtf.import_tf_tensor(mesh, tf.range(4.0), [mtf.Dimension("a", 4)])
    y = mtf.Print(x, [x], "slice of the first: ")
    count = mtf.get_variable(mesh, "count", [], initializer=tf.zeros_initializer())
    after = mtf.depend(count, [mtf.assign_add(count, mtf.ones(mesh, []))])

    def program():
        lowering = mtf.Lowering(graph, {mesh: SimdMeshImpl("x:2", "a:x")})
        return [lowering.export_to_tf_tensor(t) for t in (y, after)]

    outputs = replicate(program, devices=cpus("x:2"))
    with new_session() as session:
        session.run(tf.global_variables_initializer())
        for i in range(2):
            values = session.run(outputs)
            np.testing.assert_array_equal(values[0], [0, 1, 2, 3])
            assert values[1] == i + 1
    told = capfd.readouterr().err
    assert told.count("slice of the first: [0 1]") == 2 and "Instructions for updating" not in told


def test_random_values_are_those_of_placement():
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")
    shape = mtf.convert_to_shape("a:8,b:16")
    ys = [
        mtf.random_uniform(mesh, shape),
        mtf.random_normal(mesh, shape),
        mtf.dropout(mtf.ones(mesh, shape), True, 0.5, noise_shape=shape[:1]),
    ]
    outputs = []
    for mesh_shape, layout in [("x:2,y:2", "a:x,b:y"), ("x:4", "b:x")]:

        def program(mesh_shape=mesh_shape, layout=layout):
            lowering = mtf.Lowering(graph, {mesh: SimdMeshImpl(mesh_shape, layout)})
            return [lowering.export_to_tf_tensor(y) for y in ys]

        outputs.append(replicate(program, devices=cpus(mesh_shape)))
    lowering = mtf.Lowering(graph, {mesh: PlacementMeshImpl("x:1", "", [""])})
    outputs.append([lowering.export_to_tf_tensor(y) for y in ys])
    with harness.session() as session:
        first, second, placed = session.run(outputs)
    for values in zip(first, second, placed):
        np.testing.assert_array_equal(values[0], values[2])
        np.testing.assert_array_equal(values[1], values[2])


def test_variables_of_other_processes_are_made_when_asked_for():
    """A process of many builds the slice variables of its own processors."""
    w = mtf.Dimension("w", 64)
    with tf.Graph().as_default() as tf_graph:
        graph = mtf.Graph()
        mesh = mtf.Mesh(graph, "mesh")

        def program():
            v = mtf.get_variable(mesh, "a/v", [w], initializer=tf.ones_initializer())
            updates = [mtf.assign_add(v.operation, v)]
            impl = mtf.simd_mesh_impl.SimdMeshImpl("all:64", "w:all")
            lowering = mtf.Lowering(graph, {mesh: impl})
            return [lowering.variables[v.operation], lowering.lowered_operation(updates[0])]

        laid_out = []

        def keeping(made):
            laid_out.append(made[0])
            return made[1]

        mtf.simd_mesh_impl.replicate(
            lambda: keeping(program()),
            devices=[f"/job:worker/task:{i // 8}/cpu:{i % 8}" for i in range(64)],
            local=range(8, 16),
        )

        def names():
            return {op.name for op in tf_graph.get_operations() if op.type == "VarHandleOp"}

        slices = {name for name in names() if "_slice_" in name}
        assert slices == {f"a/v_slice_{i}" for i in range(8, 16)}
        [placed] = laid_out
        assert len(placed.slices) == 64 and not {"a/v_slice_3"} & names()
        other = placed.slices[3]
        assert (other.op.name, other.device) == ("a/v_slice_3", "/job:worker/task:0/device:CPU:3")
        assert placed.slices[3] is other and other.dtype == tf.float32
        assert placed.copy_master_to_slices is not None
        tf.group([m.initializer for m in tf.global_variables()])
        assert len({name for name in names() if "_slice_" in name}) == 64
