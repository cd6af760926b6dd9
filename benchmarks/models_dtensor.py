"""The workloads in DTensor, TensorFlow's own partitioner, on a mesh of CPU devices."""

import time
from typing import Any

import numpy as np
import tensorflow as tf
import workloads
from tensorflow.experimental import dtensor
from workloads import Workload

__all__ = ["DTensorProgram"]

# Dimensions of weights by the end of their name; others are not split.
_DIMENSIONS = {
    "q": ("d_model", "heads", "d_kv"),
    "k": ("d_model", "heads", "d_kv"),
    "v": ("d_model", "heads", "d_kv"),
    "o": ("heads", "d_kv", "d_model"),
    "wi": ("d_model", "d_ff"),
    "wo": ("d_ff", "d_model"),
}


def _layer_norm(x: Any, weights: dict[str, Any], prefix: str) -> Any:
    """Layer normalization with scale and bias."""
    x -= tf.reduce_mean(x, axis=-1, keepdims=True)
    x *= tf.math.rsqrt(tf.reduce_mean(tf.square(x), axis=-1, keepdims=True) + 1e-6)
    return x * weights[prefix + "scale"] + weights[prefix + "bias"]


def _attention(w: Workload, x: Any, weights: dict[str, Any], prefix: str) -> Any:
    """Multi-head self-attention without a mask."""
    q, k, v = (tf.einsum("bld,dhk->blhk", x, weights[prefix + name]) for name in "qkv")
    logits = tf.einsum("blhk,bmhk->bhlm", q, k) * (w.d_kv**-0.5)
    mixed = tf.einsum("bhlm,bmhk->blhk", tf.nn.softmax(logits), v)
    return tf.einsum("blhk,hkd->bld", mixed, weights[prefix + "o"])


def _block(w: Workload, x: Any, weights: dict[str, Any], prefix: str) -> Any:
    """One residual block; pre-norm with attention for transformers."""
    wi, wo = weights[prefix + "wi"], weights[prefix + "wo"]
    if w.kind == "ff":
        return x + tf.matmul(tf.nn.relu(tf.matmul(x, wi)), wo)
    x += _attention(w, _layer_norm(x, weights, prefix + "norm_attention/"), weights, prefix)
    hidden = tf.einsum("bld,df->blf", _layer_norm(x, weights, prefix + "norm_ff/"), wi)
    return x + tf.einsum("blf,fd->bld", tf.nn.gelu(hidden, approximate=True), wo)


class DTensorProgram:
    """A training step in a tf.function of DTensors, with its weights.

    Attributes:
      seconds: of tracing ("build"); DTensor partitions in the first step.
      nodes: operations of the traced step, before it is partitioned.
    """

    def __init__(self, w: Workload, mesh_name: str):
        """Traces a step.

        Args:
          w: the workload, of kind "ff" or "transformer".
          mesh_name: one of workloads.MESHES.
        """
        if w.kind not in ("ff", "transformer") or w.dropout:
            raise ValueError(f"there is no DTensor form of {w.name}")
        self._w = w
        layout = self._layouts(mesh_name)
        start = time.perf_counter()
        arrays = workloads.make_weights(w)
        if w.kind == "transformer":
            for i in range(w.layers):
                for norm in ("norm_attention", "norm_ff"):
                    arrays[f"block_{i}/{norm}/scale"] = np.ones([w.d_model], np.float32)
                    arrays[f"block_{i}/{norm}/bias"] = np.zeros([w.d_model], np.float32)
        self._weights = {
            k: dtensor.DVariable(dtensor.relayout(self._whole(v), layout(k, v.ndim)))
            for k, v in arrays.items()
        }
        self._data = [
            dtensor.relayout(self._whole(v), layout("data", v.ndim))
            for v in workloads.make_data(w).values()
        ]
        self.init_seconds = time.perf_counter() - start
        start = time.perf_counter()
        self._update = tf.function(self._one_step).get_concrete_function(*self._data)
        self.seconds = {"build": time.perf_counter() - start, "lowering": 0.0}
        self.nodes = len(self._update.graph.get_operations())

    def _layouts(self, mesh_name: str) -> Any:
        """Returns a function from the name and the rank of an array to its layout."""
        axes = [axis.split(":") for axis in workloads.MESHES[mesh_name].split(";")]
        self._mesh = dtensor.create_mesh(
            [(name, int(size)) for name, size in axes], device_type="CPU"
        )
        rules = dict(rule.split(":") for rule in workloads.layout(self._w, mesh_name).split(";"))

        def layout(name: str, rank: int) -> Any:
            dims = ("batch",) if name == "data" else _DIMENSIONS.get(name.rpartition("/")[2], ())
            specs = [rules.get(d, dtensor.UNSHARDED) for d in dims]
            return dtensor.Layout(specs + [dtensor.UNSHARDED] * (rank - len(specs)), self._mesh)

        return layout

    def _whole(self, value: np.ndarray) -> Any:
        """Returns an array on all devices."""
        layout = dtensor.Layout.replicated(self._mesh, rank=value.ndim)
        return dtensor.copy_to_mesh(tf.constant(value), layout)

    def _one_step(self, x: Any, target: Any) -> Any:
        names = list(self._weights)
        with tf.GradientTape() as tape:
            weights = {name: self._weights[name].read_value() for name in names}
            tape.watch(list(weights.values()))
            y = x
            for i in range(self._w.layers):
                y = _block(self._w, y, weights, f"block_{i}/")
            loss = tf.reduce_mean(tf.square(y - target))
        gradients = tape.gradient(loss, [weights[name] for name in names])
        for name, gradient in zip(names, gradients, strict=True):
            self._weights[name].assign_sub(self._w.learning_rate * gradient)
        return loss

    def step(self) -> float:
        """Trains one step; returns its loss."""
        return float(self._update(*self._data))
