"""SavedModels of any number of rows, and of several devices."""

import numpy as np
import pytest
import tensorflow as tf2
import tensorflow.compat.v1 as tf
from helpers import processes
from helpers.train import linear

import mesh_tensorflow as mtf

KERNEL = np.arange(12, dtype=np.float32).reshape(6, 2)
WEIGHTS = {"linear/kernel": KERNEL, "linear/bias": np.ones(2, "f")}
X = np.random.RandomState(1).randn(11, 6).astype("f")
Y = X @ KERNEL + 1
DIMS = {"x": linear.DIMS["x"], "n": [linear.BATCH]}
# Without this package; on two logical CPUs, as it was exported for.
SERVING = """
import sys
import numpy as np
import tensorflow as tf

[cpu] = tf.config.list_physical_devices("CPU")
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
serve = tf.saved_model.load(sys.argv[1]).signatures["serving_default"]
x = np.load(sys.argv[2])
found = [serve(x=tf.constant(x[:n]), n=tf.range(n))["output_0"].numpy() for n in (0, 1, 4, 5, 11)]
graphs = [serve.graph.as_graph_def()]
nodes = [n for g in graphs for n in [*g.node, *(n for f in g.library.function for n in f.node_def)]]
print(sorted({n.device[-5:] for n in nodes if n.device}), "mesh_tensorflow" in sys.modules)
np.savez(sys.argv[3], *found)
"""


def model_fn(mesh, features):
    x = features["x"]
    y = mtf.layers.dense(x, [linear.OUT], reduced_dims=[linear.IN], name="linear")
    return y, features["n"] + 1


def export(path, **arguments):
    data = {"x": X, "n": np.arange(11, dtype=np.int32)}
    mtf.train.export(model_fn, data, path, directory=WEIGHTS, dims=DIMS, **arguments)


def test_any_number_of_rows(tmp_path):
    path = str(tmp_path / "model")
    export(path, any_batch=True)
    serve = tf2.saved_model.load(path).signatures["serving_default"]
    for rows in (0, 3, 4, 11):
        found = serve(x=tf2.constant(X[:rows]), n=tf2.range(rows))
        np.testing.assert_allclose(found["output_0"], Y[:rows], rtol=1e-5)
        np.testing.assert_array_equal(found["output_1"], np.arange(rows) + 1)
    with pytest.raises(tf.errors.InvalidArgumentError, match="not as many rows of each of n, x"):
        serve(x=tf2.constant(X), n=tf2.range(3))
    assert [f.name for f in tmp_path.iterdir()] == ["model"]


MESHES = {
    "batch": {"mesh_shape": "rows:2", "layout": "batch:rows"},
    "weights": {"mesh_shape": "rows:2", "layout": "in:rows"},
}


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
def test_several_devices_in_another_process(mesh, tmp_path):
    path, x, found = (str(tmp_path / name) for name in ("model", "x.npy", "found.npz"))
    devices = ["/device:CPU:0", "/device:CPU:1"]
    export(path, any_batch=True, devices=devices, **MESHES[mesh])
    np.save(x, X)
    done = processes.python("-c", SERVING, path, x, found)
    assert done.stdout.strip() == "['CPU:0', 'CPU:1'] False"
    for output, rows in zip(np.load(found).values(), (0, 1, 4, 5, 11)):
        np.testing.assert_allclose(output, Y[:rows], rtol=1e-5, atol=1e-5)
