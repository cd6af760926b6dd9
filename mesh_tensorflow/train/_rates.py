"""How fast a run is: steps, examples and tokens per second, and use of the hardware."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Optional, Union

from mesh_tensorflow.auto_mtf.hardware import Hardware, hardware_profile
from mesh_tensorflow.train._engine import Engine
from mesh_tensorflow.train._input.features import Features
from mesh_tensorflow.train.metrics import flops_per_step, model_flops_utilization

__all__ = ["Rates", "SHORT_NAMES"]

# What the progress line calls them; the number of steps per second is there anyway.
SHORT_NAMES = {
    "examples_per_second": "examples/s",
    "tokens_per_second": "tokens/s",
    "model_flops_utilization": "MFU",
}


class Rates:
    """Returns the rates of some steps."""

    def __init__(
        self,
        engine: Engine,
        features: Features,
        tokens_per_batch: Optional[int],
        hardware: Union[str, Hardware, None],
    ):
        """Creates the rates of a run.

        Args:
          engine: the engine, whose program says how much a step computes.
          features: the features, whose batch dimension says how many examples a step has.
          tokens_per_batch: the number of tokens of a step, or None.
          hardware: the profile of a processor, or None.
        """
        self._engine = engine
        self._examples = None if features.shapes is None else features.batch_dim.size
        self._tokens = tokens_per_batch
        self._hardware = None if hardware is None else hardware_profile(hardware)
        self._flops: Optional[int] = None

    def __call__(self, steps: int, seconds: float) -> Mapping[str, float]:
        """Returns rates by name.

        Args:
          steps: a number of steps.
          seconds: how long they took.
        """
        found = {"steps_per_second": steps / seconds}
        if self._examples is not None:
            found["examples_per_second"] = steps * self._examples / seconds
        if self._tokens is not None:
            found["tokens_per_second"] = steps * self._tokens / seconds
        lowered = self._engine.lowered
        if self._hardware is not None and lowered is not None:
            mesh = lowered.graph.operations[0].mesh
            impl = lowered.lowering.requested_impl(mesh)
            # Counted once, as it takes a walk over all operations of the program.
            if self._flops is None:
                self._flops = flops_per_step(lowered.graph, impl)
            found["model_flops_utilization"] = model_flops_utilization(
                self._flops, seconds / steps, self._hardware, impl.size
            )
        return found
