"""Times of steps by operation, and the log of what is lowered."""

import os

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.debug import trace_files
from mesh_tensorflow.placement_mesh_impl import PlacementMeshImpl

A, B, C = mtf.Dimension("a", 64), mtf.Dimension("b", 64), mtf.Dimension("c", 128)
DATA = np.ones([64, 64], np.float32)


def build(mesh, data):
    x = mtf.import_tf_tensor(mesh, data, [A, B])
    with tf.variable_scope("layer"):
        y = mtf.einsum([x, mtf.ones(mesh, [B, C])], [A, C], name="product")  # the product
    return mtf.reduce_sum(mtf.tanh(y))


def impl():
    return PlacementMeshImpl("x:2", "b:x", ["cpu:0"] * 2, merge="none")


def lowered(data, make_impl=impl):
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    y = build(mesh, data)
    lowering = mtf.Lowering(mesh.graph, {mesh: make_impl()})
    return lowering, lowering.export_to_tf_tensor(y)


def run_session(logdir):
    with tf.Graph().as_default(), tf.Session() as session:
        fed = tf.placeholder(tf.float32, [64, 64])
        _, y = lowered(fed)
        session.run(y, {fed: DATA})
        with mtf.debug.profile(logdir) as profile:
            session.run(y, {fed: DATA})
    return profile


def run_function(logdir):
    step = mtf.function(lambda data: lowered(data)[1])
    step(DATA)
    with mtf.debug.profile(logdir) as profile:
        step(DATA)
    return profile


def run_eager(logdir):
    with mtf.debug.profile(logdir) as profile:
        lowering, _ = lowered(tf.constant(DATA))
    assert lowering.node_names in profile.names
    return profile


def run_replicated(logdir):
    with tf.Graph().as_default():
        fed = tf.placeholder(tf.float32, [64, 64])
        y = mtf.simd_mesh_impl.replicate(
            lambda: lowered(fed, lambda: mtf.simd_mesh_impl.SimdMeshImpl("x:2", "b:x"))[1],
            devices=["/cpu:0", "/cpu:1"],
        )
        with tf.Session(config=tf.ConfigProto(device_count={"CPU": 2})) as session:
            session.run(y, {fed: DATA})
            with mtf.debug.profile(logdir) as profile:
                session.run(y, {fed: DATA})
    return profile


@pytest.mark.parametrize("run", [run_session, run_function, run_eager, run_replicated])
def test_times_by_operation(run, tmp_path):
    profile = run(str(tmp_path))
    times = {(t.name, t.kind): t for t in profile.times()}
    product = times["layer/product", "compute"]
    assert product.type == "EinsumOperation"
    assert 0 < product.seconds < 60
    assert product.executions >= 1
    assert product.site.source.endswith("# the product")
    table = profile.table()
    assert "layer/product" in table
    assert "test_profile_and_log.py:" in table
    assert table.splitlines()[-1].startswith("total")
    if run is not run_eager:
        assert ("tanh", "allreduce") in times  # it is what needs the sum
        assert "allreduce" in profile.table("kind")
        assert len(profile.table("operation", limit=1).splitlines()) == 5
    assert "layer " in profile.table("layer")
    assert "EinsumOperation" in mtf.debug.time_table(str(tmp_path), by="type")
    with pytest.raises(
        ValueError, match="time_table: by='size' is none of 'operation', 'type', 'layer', 'kind'"
    ):
        profile.table("size")


def test_no_profile(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no profile in .*mtf\.debug\.profile"):
        mtf.debug.time_table(str(tmp_path))


def test_log_of_lowering(monkeypatch, capsys):
    lowered(tf.constant(DATA))
    assert "lowering layer/product" not in capsys.readouterr().err
    monkeypatch.setenv("MTF_LOG", "lowering")
    lowered(tf.constant(DATA))
    lines = [li for li in capsys.readouterr().err.splitlines() if li.startswith("lowering ")]
    by_name = {line.split()[1]: line for line in lines}
    product = by_name["layer/product"].split(" | ")
    assert product[0] == "lowering layer/product EinsumOperation"
    assert product[1] == "a=64, c=128 float32, slice [64, 128], whole"
    assert product[-1].startswith("test_profile_and_log.py:")
    assert "a=64, b=64 float32, slice [64, 32], b:x" in by_name["import"]
    assert "allreduce over x: 65,536 bytes" in by_name["tanh"]


def test_the_last_profile_is_the_newest(tmp_path):
    """Of several runs in one directory, whose names say nothing of times."""
    for age, run in ((0, "a"), (100, "b")):
        path = tmp_path / run / "plugins/profile/2020_01_01/host.xplane.pb"
        path.parent.mkdir(parents=True)
        path.write_bytes(b"")
        os.utime(path, (10**9 - age, 10**9 - age))
    assert [f.relative_to(tmp_path).parts[0] for f in trace_files(str(tmp_path))] == ["a"]
