"""Devices that are not there: what programs that name them do, each in a process that may hang."""

import pytest
import tensorflow.compat.v1 as tf
from helpers import processes

import mesh_tensorflow as mtf
from mesh_tensorflow._mesh import devices
from mesh_tensorflow.simd_mesh_impl import SimdMeshImpl, replicate
from mesh_tensorflow.transformer.utils._program import processor_devices

LIMIT = 60  # seconds; each program takes about 3
WARNING = "has no device 'gpu:6', 'gpu:7'; what is placed there runs elsewhere. It has CPU:0"
ERROR = "this process has no device 'gpu:6', 'gpu:7'. It has CPU:0"

START = """
import sys
import numpy as np
import tensorflow as tf
import mesh_tensorflow as mtf
from mesh_tensorflow.simd_mesh_impl import SimdMeshImpl, replicate

def summed(devices=("gpu:6", "gpu:7"), **more):
    make = mtf.placement_mesh_impl.PlacementMeshImpl
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    impl = make("p:2", "a:p", list(devices), **more)
    total = mtf.reduce_sum(mtf.ones(mesh, "a:4"))
    return mtf.Lowering(mesh.graph, {mesh: impl}).export_to_tf_tensor(total)

def in_session(build, target="", **config):
    with tf.Graph().as_default():
        fetched = build()
        config = tf.compat.v1.ConfigProto(**config)
        with tf.compat.v1.Session(target, config=config) as session:
            print("value", np.ravel(session.run(fetched))[0])

def simd(devices):
    def program():
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        total = mtf.reduce_sum(mtf.ones(mesh, "a:4"))
        lowering = mtf.Lowering(mesh.graph, {mesh: SimdMeshImpl("p:2", "a:p")})
        return [lowering.export_to_tf_tensor(total)]
    return replicate(program, devices=devices)

def fit(**more):
    def loss(mesh, x):
        w = mtf.get_variable(mesh, "w", "d:3", initializer=tf.ones_initializer())
        return mtf.reduce_mean(mtf.square(x - w))
    done = mtf.train.fit(
        loss, np.zeros([4, 3]), 1, dims=mtf.convert_to_shape("batch:4,d:3").dims,
        optimizer=mtf.optimize.SgdOptimizer(0.1), **more)
    print("value", 4 * done.losses[0])
"""
HARD = "tf.config.set_soft_device_placement(False)\n"
SOFT = "tf.config.set_soft_device_placement(True)\n"
OF_MESH = 'mesh_shape="p:2", layout="batch:p", devices=["gpu:6", "gpu:7"]'
APART = "the session has put several of the devices"

# program: (whether it computes 4.0, what it writes to stderr)
PROGRAMS = {
    "eager": ('print("value", float(summed()))', True, WARNING),
    "eager, strict": ("with mtf.strict():\n    summed()", False, "runs elsewhere. It has CPU:0"),
    "eager, no soft placement": (f"{HARD}summed()", False, ERROR),
    "eager, ring": ('print("value", float(summed(allreduce="ring")))', True, WARNING),
    "eager, collective": (
        'summed(allreduce="collective")',
        False,
        "collectives between gpu:6, gpu:7 would wait forever: this process has no device 'gpu:6'",
    ),
    "mesh": (
        'impl = mtf.placement_mesh_impl.PlacementMeshImpl("p:2", "a:p", ["gpu:6", "gpu:7"])\n'
        'mesh = mtf.Mesh(mtf.Graph(), "m", mesh_impl=impl)\n'
        'print("value", float(mtf.reduce_sum(mtf.ones(mesh, "a:4"))))',
        True,
        WARNING,
    ),
    "mtf.function": ('print("value", float(mtf.function(summed)()))', True, WARNING),
    "mtf.function, no soft placement": (f"{HARD}mtf.function(summed)()", False, ERROR),
    "session": ("in_session(summed, allow_soft_placement=True)", True, ""),
    "session, no soft placement": (
        "in_session(summed)",
        False,
        "explicitly assigned to /device:GPU:6 but available devices are [ /job:localhost",
    ),
    "session, collective": (
        'in_session(lambda: summed(allreduce="collective"), allow_soft_placement=True)',
        False,
        "collectives between gpu:6, gpu:7 would wait forever",
    ),
    # Only the session of a server knows what it has.
    "session of a server": (
        'server = tf.distribute.Server({"worker": ["localhost:0"]})\n'
        'at = [f"/job:worker/task:0/gpu:{i}" for i in (6, 7)]\n'
        "in_session(lambda: summed(at), server.target, allow_soft_placement=True)",
        False,
        APART,
    ),
    "simd": ('in_session(lambda: simd(["gpu:6", "gpu:7"]))', False, f"replicate: {ERROR}"),
    "simd, logical CPUs that the session lacks": (
        'in_session(lambda: simd(["cpu:0", "cpu:1"]),\n'
        "    allow_soft_placement=True)",
        False,
        f"{APART} cpu:0, cpu:1 in one place",
    ),
    "simd, the same without soft placement": (
        'in_session(lambda: simd(["cpu:0", "cpu:1"]))',
        False,
        "explicitly assigned to /device:CPU:1 but available devices are [ /job:localhost",
    ),
    "fit": (f"fit({OF_MESH})", False, f"fit: devices: {ERROR}"),
    "fit, soft placement": (f"{SOFT}fit({OF_MESH})", True, WARNING),
    "fit, one device": ('fit(devices=["gpu:6"])', False, "has no device 'gpu:6'. It has CPU:0"),
    "fit, simd": (f"fit({OF_MESH}, simd=True)", False, ERROR),
    "fit, an implementation": (
        'make = mtf.placement_mesh_impl.PlacementMeshImpl\n'
        'fit(mesh_impl=make("p:2", "batch:p", ["gpu:6", "gpu:7"]))',
        False,
        ERROR,
    ),
}  # fmt: skip


@pytest.mark.slow_but(11)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_ends_with_its_value_or_a_clear_error(name):
    program, works, text = PROGRAMS[name]
    done = processes.run("-c", START + program, timeout=LIMIT)
    assert (done.returncode == 0) == works, done.stderr[-3000:]
    assert ("value 4.0" in done.stdout) == works
    assert text in done.stderr


def test_devices_of_utils_run():
    """Its session has soft placement, as the classic's, except on a SIMD mesh."""
    shape, absent = mtf.convert_to_shape("p:2"), ["gpu:6", "gpu:7"]
    with pytest.warns(mtf.MeshTensorFlowWarning, match=WARNING):
        assert processor_devices("placement", shape, absent) == absent
    with pytest.raises(ValueError, match=ERROR):
        processor_devices("simd", shape, absent)
    # Without names: a logical CPU each, or what TensorFlow chooses.
    cpus = ["/device:CPU:0", "/device:CPU:1"]
    assert processor_devices("simd", shape) == devices.devices_for(2) == cpus
    assert processor_devices("placement", shape) == devices.devices_for(2, "") == ["", ""]


def test_names_of_one_device():
    for names in (["gpu", "gpu:0", "/device:GPU:0", "/job:localhost/gpu:0"], ["", "cpu", "cpu:3"]):
        assert len({devices.memory_domain(name) for name in names}) == 1
    assert devices.memory_domain("gpu:0") != devices.memory_domain("/job:worker/task:0/gpu:0")
    with tf.Graph().as_default(), pytest.raises(ValueError, match="names '/device:CPU:0' more"):
        replicate(lambda: SimdMeshImpl("p:2", ""), devices=["cpu", "/job:localhost/cpu:0"])
