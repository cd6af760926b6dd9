"""The layout that fit chooses: steps of the user's own program under the best candidates."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import tensorflow as tf2
import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow._core.layout import convert_to_layout_rules, stored_layout
from mesh_tensorflow._mesh.devices import threads_by_session
from mesh_tensorflow._pjrt import pjrt
from mesh_tensorflow.auto_mtf.hardware import Hardware, hardware_profile, local_machine, named_like
from mesh_tensorflow.auto_mtf.measured import Auto, choose
from mesh_tensorflow.auto_mtf.profiles import Processors
from mesh_tensorflow.placement_mesh_impl import PlacementMeshImpl
from mesh_tensorflow.train._data import Batch, Features
from mesh_tensorflow.train._model import Model
from mesh_tensorflow.train._placing import Placing

if TYPE_CHECKING:
    from mesh_tensorflow.train._engine import SessionEngine


@dataclasses.dataclass(frozen=True)
class AutoLayout:
    """Chooses the layout of a run.

    Attributes:
      auto: what the user asks for.
      show: whether the user is told of it.
    """

    auto: Auto
    show: bool

    def placing(
        self,
        model: Model,
        placing: Placing,
        features: Features,
        batch: Batch,
        engine_of: Callable[[Placing], SessionEngine],
    ) -> Placing:
        """Returns where the run is placed, with the layout whose steps are the fastest.

        Args:
          model: the model to train.
          placing: where programs run, without a layout.
          features: the features of a training batch.
          batch: a batch, which all steps that are timed are of.
          engine_of: returns a new engine for a Placing.
        """

        @contextlib.contextmanager
        def run(layout: str) -> Iterator[Callable[[], Any]]:
            engine = engine_of(_with_layout(placing, layout))
            try:
                engine.prepare(batch, None, None)
                yield lambda: engine.train(batch)
            finally:
                engine.close()

        threads_by_session()
        choice = choose(
            _graph_of(model, features, batch),
            placing.shape,
            self.auto,
            _hardware_of(self.auto, placing),
            stored_layout(placing.shape, **placing.stored) if placing.stored else None,
            f"simd={placing.simd} pjrt={placing.pjrt} {_kind_of(placing)} {placing.devices}",
            run,
            None if placing.pjrt else Processors(placing.shape, placing.devices, placing.simd),
            self.show,
        )
        if self.show:
            print(choice, file=sys.stderr, flush=True)
        return _with_layout(placing, choice.layout)


def _with_layout(placing: Placing, layout: str) -> Placing:
    return dataclasses.replace(placing, rules=convert_to_layout_rules(layout))


def _graph_of(model: Model, features: Features, batch: Batch) -> mtf.Graph:
    """Returns the program of a step, which is the same for each layout."""
    with tf.Graph().as_default():
        step = tf.train.create_global_step()
        tensors = [tf.placeholder(array.dtype, array.shape) for array in batch]
        one = PlacementMeshImpl("all:1", "", [""])
        lowered, _ = model.build(features, tensors, lambda: one, step, step.read_value(), True)
    return lowered.graph


def _kind_of(placing: Placing) -> str:
    """Returns what the devices are called by their maker; "" for CPUs."""
    if placing.pjrt:
        return pjrt().device_kind(placing.shape)
    if not any("gpu" in device.lower() for device in placing.devices):
        return ""
    [gpu, *_] = tf2.config.list_physical_devices("GPU")
    return tf2.config.experimental.get_device_details(gpu).get("device_name", "")


def _hardware_of(auto: Auto, placing: Placing) -> Hardware:
    if auto.hardware is not None:
        return hardware_profile(auto.hardware)
    kind = _kind_of(placing)
    if not kind:
        return local_machine(placing.shape.size, one_memory=not placing.simd and not placing.pjrt)
    return named_like(kind) or hardware_profile()
