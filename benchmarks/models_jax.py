"""The workloads in JAX: jit on one device, or partitioned over a mesh by named shardings."""

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import workloads
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from workloads import Workload

__all__ = ["JaxProgram", "TrainingStep"]

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
    x = x - jnp.mean(x, axis=-1, keepdims=True)
    x = x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + 1e-6)
    return x * weights[prefix + "scale"] + weights[prefix + "bias"]


def _attention(w: Workload, x: Any, weights: dict[str, Any], prefix: str) -> Any:
    """Multi-head self-attention without a mask."""
    q, k, v = (jnp.einsum("bld,dhk->blhk", x, weights[prefix + name]) for name in "qkv")
    logits = jnp.einsum("blhk,bmhk->bhlm", q, k) * (w.d_kv**-0.5)
    mixed = jnp.einsum("bhlm,bmhk->blhk", jax.nn.softmax(logits), v)
    return jnp.einsum("blhk,hkd->bld", mixed, weights[prefix + "o"])


def _block(w: Workload, x: Any, weights: dict[str, Any], prefix: str) -> Any:
    """One residual block; pre-norm with attention for transformers."""
    wi, wo = weights[prefix + "wi"], weights[prefix + "wo"]
    if w.kind == "ff":
        return x + jax.nn.relu(x @ wi) @ wo
    x = x + _attention(w, _layer_norm(x, weights, prefix + "norm_attention/"), weights, prefix)
    y = _layer_norm(x, weights, prefix + "norm_ff/")
    return x + jax.nn.gelu(y @ wi, approximate=True) @ wo


class TrainingStep:
    """A compiled step of gradient descent with its weights.

    Attributes:
      seconds: of tracing and lowering ("build"), and of compilation ("lowering").
      nodes: equations of the traced step.
    """

    def __init__(
        self,
        loss: Callable[..., Any],
        weights: dict[str, np.ndarray],
        data: Sequence[np.ndarray],
        learning_rate: float,
        placing: Callable[[str], Any],
    ):
        """Compiles a step.

        Args:
          loss: a function of the weights by name, and of the data.
          weights: initial values.
          data: what each step is given.
          learning_rate: of gradient descent.
          placing: the device or the sharding of a weight by its name, or of "data".
        """
        start = time.perf_counter()
        self._weights = {k: jax.device_put(v, placing(k)) for k, v in weights.items()}
        self._data = [jax.device_put(v, placing("data")) for v in data]
        self.init_seconds = time.perf_counter() - start

        def update(weights: dict[str, Any], *data: Any) -> Any:
            value, gradients = jax.value_and_grad(loss)(weights, *data)
            return value, jax.tree.map(lambda v, g: v - learning_rate * g, weights, gradients)

        start = time.perf_counter()
        traced = jax.jit(update, donate_argnums=0).trace(self._weights, *self._data)
        lowered = traced.lower()
        built = time.perf_counter()
        self._compiled = lowered.compile()
        self.seconds = {"build": built - start, "lowering": time.perf_counter() - built}
        self.nodes = len(traced.jaxpr.eqns)

    def start_step(self) -> jax.Array:
        """Trains one step; returns its loss, which may not be computed yet."""
        loss, self._weights = self._compiled(self._weights, *self._data)
        return loss

    def step(self) -> float:
        """Trains one step; returns its loss."""
        return float(self.start_step())


class JaxProgram(TrainingStep):
    """The training step of a workload of kind "ff" or "transformer"."""

    def __init__(self, w: Workload, mesh_name: str = ""):
        """Compiles a step.

        Args:
          w: the workload.
          mesh_name: one of workloads.MESHES; "" for one device.
        """
        if w.kind not in ("ff", "transformer") or w.dropout:
            raise ValueError(f"there is no JAX form of {w.name}")
        arrays = workloads.make_weights(w)
        if w.kind == "transformer":
            for i in range(w.layers):
                for norm in ("norm_attention", "norm_ff"):
                    arrays[f"block_{i}/{norm}/scale"] = np.ones([w.d_model], np.float32)
                    arrays[f"block_{i}/{norm}/bias"] = np.zeros([w.d_model], np.float32)
        data = list(workloads.make_data(w).values())
        loss = functools.partial(_loss, w)
        super().__init__(loss, arrays, data, w.learning_rate, _placing(w, mesh_name))


def _placing(w: Workload, mesh_name: str) -> Callable[[str], Any]:
    """Returns a function from the name of an array to its sharding."""
    if not mesh_name:
        return lambda name: jax.devices()[0]
    axes = [axis.split(":") for axis in workloads.MESHES[mesh_name].split(";")]
    sizes = [int(size) for _, size in axes]
    names = tuple(name for name, _ in axes)
    mesh = Mesh(np.array(jax.devices()[: int(np.prod(sizes))]).reshape(sizes), names)
    rules = dict(rule.split(":") for rule in workloads.layout(w, mesh_name).split(";"))

    def placing(name: str) -> NamedSharding:
        dims = ("batch",) if name == "data" else _DIMENSIONS.get(name.rpartition("/")[2], ())
        return NamedSharding(mesh, PartitionSpec(*[rules.get(d) for d in dims]))

    return placing


def _loss(w: Workload, weights: dict[str, Any], x: Any, target: Any) -> Any:
    for i in range(w.layers):
        x = _block(w, x, weights, f"block_{i}/")
    return jnp.mean(jnp.square(x - target))
