"""Sessions on logical CPUs: as many as the mesh needs, and threads by how tensors are split."""

import json

import pytest
import tensorflow.compat.v1 as tf
from helpers import processes

import mesh_tensorflow as mtf
from mesh_tensorflow._mesh import devices as module

FOUR = "rows:2,cols:2"


@pytest.fixture
def cores(monkeypatch):
    """Sets how many cores the machine is said to have."""
    return lambda count: monkeypatch.setattr(module, "cores", lambda: count)


@pytest.mark.parametrize(
    "layout, cores_here, intra, inter",
    [
        ("batch:rows,d_ff:cols", 2, 1, 2),
        ("batch:rows,d_ff:cols;heads:cols", 4, 1, 4),
        ("batch:rows", 2, 1, 2),
        ("batch:rows", 4, 0, 0),  # two parts for four cores
        ("batch:rows,d_ff:cols", 8, 0, 0),
        ("", 2, 0, 0),
        ("batch:rows,d_ff:cols", 1, 0, 0),
    ],
)
def test_operations_have_one_thread_where_all_cores_have_parts(
    cores, layout, cores_here, intra, inter
):
    cores(cores_here)
    config = mtf.session_config(FOUR, layout)
    assert config.device_count["CPU"] == 4
    threads = config.intra_op_parallelism_threads, config.inter_op_parallelism_threads
    assert threads == (intra, inter)


@pytest.mark.parametrize(
    "devices, count, threads",
    [
        (["cpu:0"] * 4, 1, 0),
        (["cpu:0", "cpu:1"] * 2, 2, 1),
        (["cpu:3", "", "/device:CPU:1", "/job:localhost/task:0/device:CPU:2"], 4, 1),
        ([f"/device:GPU:{i}" for i in range(4)], 1, 0),
        ([f"/job:worker/task:{i}/device:CPU:0" for i in range(4)], 1, 0),
    ],
)
def test_cpus_of_this_process_count(cores, devices, count, threads):
    cores(2)
    config = mtf.session_config(FOUR, "batch:rows,d_ff:cols", devices)
    assert config.device_count["CPU"] == count
    assert config.intra_op_parallelism_threads == threads


def test_threads_of_a_session_are_asked_for_where_layouts_are_tried(monkeypatch):
    """And not in a process that one which does has started: sessions of several cannot have them."""
    monkeypatch.setenv("TF_OVERRIDE_GLOBAL_THREADPOOL", "1")
    monkeypatch.setattr(module, "_threads_are_by_session", False)
    assert not mtf.session_config(FOUR, "batch:rows").use_per_session_threads
    module.threads_by_session()
    assert mtf.session_config(FOUR, "batch:rows").use_per_session_threads
    config = tf.ConfigProto()
    module.set_cpus(config, [0, 1], mtf.convert_to_shape(FOUR), None)
    assert not config.use_per_session_threads


def test_a_number_of_devices_that_does_not_fit_is_an_error():
    with pytest.raises(ValueError, match="the mesh rows=2, cols=2 needs 4 devices, but there are"):
        mtf.session_config(FOUR, "batch:rows", ["cpu:0"])


_STEPS = """
import sys
import numpy as np
import tensorflow.compat.v1 as tf
import mesh_tensorflow as mtf

mesh_shape, layout = "rows:2,cols:2", "batch:rows,hidden:cols"
batch, hidden = mtf.convert_to_shape("batch:8,hidden:16").dims
config = mtf.session_config(mesh_shape, layout) if sys.argv[1] == "ours" else tf.ConfigProto(
    device_count={"CPU": 4})
graph = mtf.Graph()
with tf.Graph().as_default():
    tf.set_random_seed(1)
    mesh = mtf.Mesh(graph, "mesh")
    x = mtf.import_tf_tensor(
        mesh, tf.constant(np.linspace(-1, 1, 8 * 4, dtype="f").reshape(8, 4)),
        mtf.Shape([batch, mtf.Dimension("d", 4)]))
    y = mtf.layers.dense(x, [hidden], reduced_dims=x.shape.dims[1:], activation=mtf.relu)
    loss = mtf.reduce_mean(mtf.square(y - 1))
    weights = graph.trainable_variables
    gradients = mtf.gradients([loss], [v.outputs[0] for v in weights])
    updates = mtf.optimize.SgdOptimizer(0.1).apply_grads(gradients, weights)
    impl = mtf.placement_mesh_impl.PlacementMeshImpl(
        mesh_shape, layout, [f"cpu:{i}" for i in range(4)])
    lowering = mtf.Lowering(graph, {mesh: impl})
    step = tf.group([lowering.lowered_operation(u) for u in updates])
    found = lowering.export_to_tf_tensor(loss)
    with tf.Session(config=config) as session:
        session.run(tf.global_variables_initializer())
        session.run(lowering.copy_masters_to_slices())
        print([float(session.run([found, step])[0]) for _ in range(10)])
"""


def test_threads_do_not_change_results():
    """In processes of their own: the first session decides about threads for all."""
    found = [processes.run("-c", _STEPS, kind) for kind in ("ours", "default")]
    assert [done.returncode for done in found] == [0, 0], found
    ours, default = (json.loads(done.stdout) for done in found)
    assert ours == default
    assert len(ours) == 10 and ours[-1] < ours[0]


@pytest.mark.parametrize("layout", ["", "b:rows", "a:cols,b:rows", "c:cols,b:rows"])
def test_constants_are_computed_before_the_first_step(tf_graph, layout):
    """Also of numbers that processors share: each of them knows them, and waits for none."""
    cpus = [f"/device:CPU:{i}" for i in range(4)]
    impl = mtf.placement_mesh_impl.PlacementMeshImpl(FOUR, layout, cpus)
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    # Too large for TensorFlow to compute it before it knows the devices.
    dims = mtf.convert_to_shape("a:40,b:30,c:100").dims
    a, b, c = (mtf.range(mesh, d, tf.float32) for d in dims)
    waves = mtf.sin(mtf.add_n([a, b, c * mtf.import_tf_tensor(mesh, tf.constant(0.5), [])]))
    y = waves * mtf.random_uniform(mesh, waves.shape)
    lowering = mtf.Lowering(mesh.graph, {mesh: impl})
    metadata, options = tf.RunMetadata(), tf.RunOptions(output_partition_graphs=True)
    with tf.Session(config=mtf.session_config(FOUR, layout)) as session:
        session.run(lowering.export_to_tf_tensor(y), options=options, run_metadata=metadata)
    run = {node.op for graph in metadata.partition_graphs for node in graph.node}
    assert "Mul" in run and "Sin" not in run
