"""Times the layout search of the classic release on a graph that was written as JSON.

Run it with a Python that has the classic release; see auto_mtf.py.

CLASSIC_PYTHON benchmarks/auto_mtf_classic.py graph.json m:4,n:2
"""

import contextlib
import json
import sys
import time

with contextlib.suppress(ImportError):
    import classic_shim  # noqa: F401
import tensorflow.compat.v1 as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.auto_mtf import layout_optimizer, memory_estimator


class AnyOperation(mtf.Operation):
    """An operation of given inputs and outputs."""

    def __init__(self, inputs, outputs, mesh, name, unsplittable):
        """Makes the operation."""
        super().__init__(inputs, mesh=mesh, name=name)
        self._outputs = [
            mtf.Tensor(self, mtf.convert_to_shape(shape), tf.as_dtype(dtype), index=i)
            for i, (shape, dtype) in enumerate(outputs)
        ]
        self._splittable_dims, self._unsplittable_dims = (
            self._initialize_splittable_and_unsplittable_dims("splittable", unsplittable)
        )


def build(operations):
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")
    tensors = {}
    for name, inputs, outputs, unsplittable in operations:
        op = AnyOperation([tensors[t] for t in inputs], outputs, mesh, name, unsplittable)
        tensors.update({f"{name}:{i}": t for i, t in enumerate(op.outputs)})
    return graph, tensors


def seconds(path, mesh_shape):
    """Returns the seconds of the search, the layout and its peak."""
    with open(path) as f:
        described = json.load(f)
    graph, tensors = build(described["operations"])
    outputs = [tensors[t] for t in described["outputs"]]
    start = time.perf_counter()
    estimator = memory_estimator.MemoryEstimator(graph, mtf.convert_to_shape(mesh_shape), outputs)
    optimizer = layout_optimizer.LayoutOptimizer(estimator)
    layout = optimizer.solve()
    return {
        "seconds": time.perf_counter() - start,
        "layout": layout,
        "peak": optimizer.evaluate_layout(layout),
    }


if __name__ == "__main__":
    print(json.dumps(seconds(*sys.argv[1:])))
