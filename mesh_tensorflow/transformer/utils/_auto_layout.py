"""An estimator whose layout is chosen by steps of its first training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Optional

import gin

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow import estimator as mtf_estimator
from mesh_tensorflow.auto_mtf.measured import Auto, layout_of_estimator
from mesh_tensorflow.estimator.tpu import TPUEstimator
from mesh_tensorflow.transformer.utils._program import processor_devices
from mesh_tensorflow.transformer.utils._settings import get_step_from_checkpoint_path

# So that gin files say for how long layouts are looked for: auto_mtf.Auto.seconds = 30.
_ConfiguredAuto = gin.external_configurable(Auto, module="auto_mtf")


def auto_of(layout_rules: Any) -> Optional[Auto]:
    """Returns the Auto that chooses the layout, or None where the layout is given.

    Args:
      layout_rules: a layout, "auto", or an Auto.
    """
    if isinstance(layout_rules, str) and layout_rules == "auto":
        return _ConfiguredAuto()
    return layout_rules if isinstance(layout_rules, Auto) else None


def check_auto(mode: str, batch_size: Any) -> None:
    """Checks what a run says besides layout_rules="auto".

    Args:
      mode: the mode of `run`.
      batch_size: that of `run`.

    Raises:
      ValueError: nothing is trained, or the batch depends on the layout.
    """
    who = 'utils.run: layout_rules="auto"'
    if mode != "train":
        raise ValueError(
            f"{who} chooses a layout by steps of training, but mode is {mode!r}: give a layout, "
            "such as the one that training has printed; all have the same results"
        )
    if isinstance(batch_size, tuple) and batch_size[0].endswith("_per_replica"):
        raise ValueError(
            f"{who} with batch_size={batch_size!r}: the batch would have another size in each "
            "layout. Bind utils.run.batch_size to a number of sequences, or to one of all "
            f'processors, such as ("{batch_size[0].replace("replica", "batch")}", {batch_size[1]})'
        )


class AutoLayoutEstimator(TPUEstimator):
    """A TPUEstimator that chooses its layout when it trains first.

    Without training, nothing is split; all layouts have the same results.
    """

    def __init__(
        self,
        auto: Auto,
        mesh_shape: mtf.Shape,
        mesh_impl: str,
        mesh_devices: Optional[Sequence[str]],
        parts_of: Callable[..., dict[str, Any]],
    ) -> None:
        """Creates an AutoLayoutEstimator.

        Args:
          auto: what the user asks for.
          mesh_shape: the mesh.
          mesh_impl: "placement", "simd" or "pjrt".
          mesh_devices: a device for each processor of the mesh, or None.
          parts_of: returns the arguments of a TPUEstimator, for those of `get_estimator` that are
            given by name and take the place of its own.
        """
        self._auto, self._shape = auto, mesh_shape
        self._impl, self._devices = mesh_impl, mesh_devices
        self._parts_of, self._chosen = parts_of, False
        super().__init__(**parts_of(layout_rules=""))

    def train(
        self,
        input_fn: Callable[..., Any],
        *args: Any,
        max_steps: Optional[int] = None,
        **named: Any,
    ) -> mtf_estimator.Estimator:
        """Chooses the layout, unless that is done or no step is left, and trains.

        Args:
          input_fn: see `TPUEstimator.train`.
          *args: likewise.
          max_steps: likewise.
          **named: likewise.

        Returns:
          the estimator.
        """
        path = self.latest_checkpoint()
        done = get_step_from_checkpoint_path(path) if path else 0
        if (max_steps is None or done < max_steps) and not self._chosen:
            super().__init__(**self._parts_of(layout_rules=self._choose(input_fn)))
            self._chosen = True
        return super().train(input_fn, *args, max_steps=max_steps, **named)

    def _choose(self, input_fn: Callable[..., Any]) -> str:
        """Returns the layout whose steps are the fastest."""
        return layout_of_estimator(
            lambda layout: TPUEstimator(**self._parts_of(layout_rules=layout)),
            input_fn,
            self._shape,
            self._impl,
            processor_devices(self._impl, self._shape, self._devices, self.config),
            self._auto,
        )
