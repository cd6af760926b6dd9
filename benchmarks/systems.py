"""Builds a training step of a workload in each of the systems compared."""

import contextlib
import dataclasses
import random
import sys
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import tensorflow.compat.v1 as tf
import workloads
from feeds import EagerFeeds, Feeds

SEED = 17


@dataclasses.dataclass
class Program:
    """A program with a complete graph, and the cost of building it."""

    step: Any  # what to fetch to train one step
    loss: Any
    feeds: Feeds
    copy_masters: Any | None  # to run after initialisation
    seconds: dict[str, float]


class Clock:
    """Seconds of wall time by name of the phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        """Books the time since the last lap under a name."""
        now = time.perf_counter()
        self.seconds[name] = now - self._last
        self._last = now


def import_mtf(classic: bool, with_transformer: bool) -> Any:
    """The mesh_tensorflow of this process; the classic one may need a shim."""
    if classic:
        with contextlib.suppress(ImportError):
            import classic_shim  # noqa: F401
    import mesh_tensorflow as mtf
    import mesh_tensorflow.layers
    import mesh_tensorflow.optimize

    if with_transformer:
        if classic:
            sys.modules.setdefault("tensorflow_datasets", mock.MagicMock())  # which it imports
        import mesh_tensorflow.transformer.transformer
        import mesh_tensorflow.transformer.transformer_layers
    return mtf


def optimizer(mtf: Any, w: workloads.Workload) -> Any:
    """The optimizer of a workload."""
    if w.optimizer == "adafactor":
        return mtf.optimize.AdafactorOptimizer(learning_rate=w.learning_rate)
    return mtf.optimize.SgdOptimizer(w.learning_rate)


def devices(mesh: str, placement: str) -> list[str]:
    """The device of every processor: one for all, or one each."""
    n = workloads.mesh_size(mesh)
    if placement == "one":
        return ["cpu:0"] * n
    return [f"cpu:{i}" for i in range(n)]


def build_mtf(w: workloads.Workload, mtf: Any, mesh_name: str, placement: str) -> Program:
    """The program in Mesh TensorFlow: ours or the classic one."""
    from models_mtf import MtfModel  # after the import of either package
    from models_transformer import TransformerModel

    feeds = Feeds({**workloads.make_weights(w), **workloads.make_data(w)})
    clock = Clock()
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")
    model = TransformerModel if w.uses_package else MtfModel
    loss = model(mtf, w, mesh, feeds).loss()
    clock.lap("model")
    variables = graph.trainable_variables
    gradients = mtf.gradients([loss], [v.outputs[0] for v in variables])
    clock.lap("gradients")
    updates = optimizer(mtf, w).apply_grads(gradients, variables)
    clock.lap("optimizer")
    shape = mtf.convert_to_shape(workloads.MESHES[mesh_name])
    rules = mtf.convert_to_layout_rules(workloads.layout(w, mesh_name))
    places = devices(mesh_name, placement)

    def lower(make_impl: Callable[..., Any], *arguments: Any) -> tuple[Any, Any, Any]:
        lowering = mtf.Lowering(graph, {mesh: make_impl(shape, rules, *arguments)})
        train = tf.group(*[lowering.lowered_operation(op) for op in updates])
        return train, lowering.export_to_tf_tensor(loss), lowering.copy_masters_to_slices()

    if placement == "simd":
        simd = mtf.simd_mesh_impl
        train, tf_loss = simd.replicate(lambda: lower(simd.SimdMeshImpl)[:2], devices=places)
        copy = None
    else:
        train, tf_loss, copy = lower(mtf.placement_mesh_impl.PlacementMeshImpl, places)
    clock.lap("lowering")
    seconds = clock.seconds
    seconds["build"] = seconds["model"] + seconds["gradients"] + seconds["optimizer"]
    return Program(train, tf_loss, feeds, copy, seconds)


def build_function(w: workloads.Workload, mesh_name: str) -> tuple[Callable[[], Any], Clock]:
    """A step as an mtf.function that XLA compiles, all processors on one device."""
    from models_mtf import MtfModel

    import mesh_tensorflow as mtf

    feeds = EagerFeeds({**workloads.make_weights(w), **workloads.make_data(w)})
    clock = Clock()

    def step() -> Any:
        graph = mtf.Graph()
        mesh = mtf.Mesh(graph, "mesh")
        loss = MtfModel(mtf, w, mesh, feeds).loss()
        variables = graph.trainable_variables
        gradients = mtf.gradients([loss], [v.outputs[0] for v in variables])
        updates = optimizer(mtf, w).apply_grads(gradients, variables)
        impl = mtf.placement_mesh_impl.PlacementMeshImpl(
            mtf.convert_to_shape(workloads.MESHES[mesh_name]),
            mtf.convert_to_layout_rules(workloads.layout(w, mesh_name)),
            devices(mesh_name, "one"),
        )
        lowering = mtf.Lowering(graph, {mesh: impl})
        with tf.control_dependencies([lowering.lowered_operation(op) for op in updates]):
            return tf.identity(lowering.export_to_tf_tensor(loss))

    function = mtf.function(step, jit_compile=True)
    function.tf_function.get_concrete_function()
    clock.lap("build")
    clock.seconds["lowering"] = 0.0
    return function, clock


def build_tf(w: workloads.Workload, use_xla: bool) -> Program:
    """The same in plain TensorFlow on one device, as one XLA program if wanted."""
    from models_tf import TfModel, sgd_step, whole_image_weights

    weights = whole_image_weights(workloads.make_weights(w))
    feeds = Feeds({**weights, **workloads.make_data(w)})
    clock = Clock()
    model = TfModel(w, feeds)
    x, target = feeds.data("x"), feeds.data("target")

    def step(x: Any, target: Any) -> Any:
        loss, updates = sgd_step(model, x, target, w.learning_rate)
        with tf.control_dependencies(updates):
            return tf.identity(loss)

    if use_xla:
        loss = tf.function(step, jit_compile=True, autograph=False)(x, target)
        train = tf.group(loss)
    else:
        loss, updates = sgd_step(model, x, target, w.learning_rate)
        train = tf.group(*updates)
    clock.lap("build")
    clock.seconds["lowering"] = 0.0
    return Program(train, loss, feeds, None, clock.seconds)


def build(system: str, workload: str, mesh: str, placement: str) -> Callable[[], Program]:
    """Imports what a system needs, and returns the function that builds it."""
    tf.disable_v2_behavior()
    tf.set_random_seed(SEED)
    random.seed(SEED)
    w = workloads.WORKLOADS[workload]
    if system in ("mtf", "classic"):
        mtf = import_mtf(system == "classic", w.uses_package)
        return lambda: build_mtf(w, mtf, mesh, placement)
    return lambda: build_tf(w, system == "tf_xla")
