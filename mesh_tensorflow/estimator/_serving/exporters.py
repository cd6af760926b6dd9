"""Exporters: export models after evaluations."""

from __future__ import annotations

import abc
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Optional

import tensorflow.compat.v1 as tf

if TYPE_CHECKING:
    from mesh_tensorflow.estimator._estimator import Estimator

from mesh_tensorflow._paths import escaped

__all__ = ["BestExporter", "Exporter", "FinalExporter", "LatestExporter"]


class Exporter(abc.ABC):
    """Exports a model during `train_and_evaluate`."""

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """The name of the export directory."""

    @abc.abstractmethod
    def export(
        self,
        estimator: Estimator,
        export_path: str,
        checkpoint_path: str,
        eval_result: Mapping[str, Any],
        is_the_final_export: bool,
    ) -> Optional[bytes]:
        """Exports the model, if this evaluation calls for it.

        Args:
          estimator: an Estimator.
          export_path: the directory of exports.
          checkpoint_path: the checkpoint that was evaluated.
          eval_result: the metrics by name.
          is_the_final_export: whether training has ended.

        Returns:
          the new directory as bytes; None if nothing was exported.
        """


class _SavedModelExporter(Exporter):
    """Exports SavedModels, and removes old ones."""

    def __init__(
        self,
        name: str,
        serving_input_receiver_fn: Optional[Callable[[], Any]],
        assets_extra: Optional[Mapping[str, str]] = None,
        as_text: bool = False,
        exports_to_keep: Optional[int] = None,
    ) -> None:
        if not isinstance(name, str) or not name:
            raise ValueError(f"{type(self).__name__}: name is {name!r}; it should be a string")
        if exports_to_keep is not None and exports_to_keep <= 0:
            raise ValueError(
                f"{type(self).__name__}: exports_to_keep is {exports_to_keep}; it should be 1 or "
                "more, or None for all"
            )
        if not callable(serving_input_receiver_fn):
            raise TypeError(
                f"{type(self).__name__}: serving_input_receiver_fn should be a function that "
                f"returns a ServingInputReceiver, but is {serving_input_receiver_fn!r}"
            )
        self._name = name
        self._receiver_fn = serving_input_receiver_fn
        self._assets_extra = assets_extra
        self._as_text = as_text
        self._exports_to_keep = exports_to_keep

    @property
    def name(self) -> str:
        """The name of the export directory."""
        return self._name

    def _save(self, estimator: Estimator, export_path: str, checkpoint_path: str) -> bytes:
        path = estimator.export_saved_model(
            export_path,
            self._receiver_fn,
            assets_extra=self._assets_extra,
            as_text=self._as_text,
            checkpoint_path=checkpoint_path,
        )
        self._remove_old(export_path)
        return path

    def _remove_old(self, export_path: str) -> None:
        if self._exports_to_keep is None:
            return
        names = [name.rstrip("/") for name in tf.io.gfile.listdir(export_path)]
        # Exports are named by their times; directories with other names are left alone.
        stamps = sorted(int(name) for name in names if name.isdigit())
        for stamp in stamps[: -self._exports_to_keep]:
            tf.io.gfile.rmtree(os.path.join(export_path, str(stamp)))


class LatestExporter(_SavedModelExporter):
    """Exports after each evaluation, and keeps the latest exports."""

    def __init__(
        self,
        name: str,
        serving_input_receiver_fn: Callable[[], Any],
        assets_extra: Optional[Mapping[str, str]] = None,
        as_text: bool = False,
        exports_to_keep: Optional[int] = 5,
    ) -> None:
        """Creates a LatestExporter.

        Args:
          name: the name of the export directory.
          serving_input_receiver_fn: returns a ServingInputReceiver.
          assets_extra: files to add, by their paths within "assets.extra".
          as_text: whether to write text instead of binary protobufs.
          exports_to_keep: the number of exports to keep, or None for all.

        Raises:
          ValueError: the name is empty, or `exports_to_keep` is not positive.
        """
        super().__init__(name, serving_input_receiver_fn, assets_extra, as_text, exports_to_keep)

    def export(
        self,
        estimator: Estimator,
        export_path: str,
        checkpoint_path: str,
        eval_result: Mapping[str, Any],
        is_the_final_export: bool,
    ) -> Optional[bytes]:
        """Exports the model.

        Args:
          estimator: an Estimator.
          export_path: the directory of exports.
          checkpoint_path: the checkpoint that was evaluated.
          eval_result: the metrics by name.
          is_the_final_export: whether training has ended.

        Returns:
          the new directory.
        """
        return self._save(estimator, export_path, checkpoint_path)


class FinalExporter(_SavedModelExporter):
    """Exports once, when training has ended."""

    def __init__(
        self,
        name: str,
        serving_input_receiver_fn: Callable[[], Any],
        assets_extra: Optional[Mapping[str, str]] = None,
        as_text: bool = False,
    ) -> None:
        """Creates a FinalExporter.

        Args:
          name: the name of the export directory.
          serving_input_receiver_fn: returns a ServingInputReceiver.
          assets_extra: files to add, by their paths within "assets.extra".
          as_text: whether to write text instead of binary protobufs.

        Raises:
          ValueError: the name is empty.
        """
        super().__init__(name, serving_input_receiver_fn, assets_extra, as_text)

    def export(
        self,
        estimator: Estimator,
        export_path: str,
        checkpoint_path: str,
        eval_result: Mapping[str, Any],
        is_the_final_export: bool,
    ) -> Optional[bytes]:
        """Exports the model if training has ended.

        Args:
          estimator: an Estimator.
          export_path: the directory of exports.
          checkpoint_path: the checkpoint that was evaluated.
          eval_result: the metrics by name.
          is_the_final_export: whether training has ended.

        Returns:
          the new directory, or None before the end of training.
        """
        if not is_the_final_export:
            return None
        return self._save(estimator, export_path, checkpoint_path)


def _loss_smaller(
    best_eval_result: Mapping[str, Any], current_eval_result: Mapping[str, Any]
) -> bool:
    for result in (best_eval_result, current_eval_result):
        if not result or "loss" not in result:
            raise ValueError(
                f"BestExporter compares losses, but the evaluation gave {result!r}: give another "
                "compare_fn"
            )
    # A NaN is smaller than nothing; any number is better than one.
    best, current = best_eval_result["loss"], current_eval_result["loss"]
    return bool(current < best or (best != best and current == current))


class BestExporter(_SavedModelExporter):
    """Exports when an evaluation is better than all before, including those of earlier runs."""

    def __init__(
        self,
        name: str = "best_exporter",
        serving_input_receiver_fn: Optional[Callable[[], Any]] = None,
        event_file_pattern: Optional[str] = "eval/*.tfevents.*",
        compare_fn: Callable[..., bool] = _loss_smaller,
        assets_extra: Optional[Mapping[str, str]] = None,
        as_text: bool = False,
        exports_to_keep: Optional[int] = 5,
    ) -> None:
        """Creates a BestExporter.

        Args:
          name: the name of the export directory.
          serving_input_receiver_fn: returns a ServingInputReceiver.
          event_file_pattern: a file pattern, within the model directory, of the evaluations of
            earlier runs; None to ignore them.
          compare_fn: a function of `best_eval_result` and `current_eval_result` that returns
            whether the current one is better; by default, whether its loss is smaller.
          assets_extra: files to add, by their paths within "assets.extra".
          as_text: whether to write text instead of binary protobufs.
          exports_to_keep: the number of exports to keep, or None for all.

        Raises:
          TypeError: a function is not callable.
          ValueError: the name is empty, or `exports_to_keep` is not positive.
        """
        super().__init__(name, serving_input_receiver_fn, assets_extra, as_text, exports_to_keep)
        if not callable(compare_fn):
            raise TypeError(f"BestExporter: compare_fn should be a function, but is {compare_fn!r}")
        self._compare_fn = compare_fn
        self._pattern = event_file_pattern
        self._best: Optional[Mapping[str, Any]] = None
        self._has_looked = False

    def export(
        self,
        estimator: Estimator,
        export_path: str,
        checkpoint_path: str,
        eval_result: Mapping[str, Any],
        is_the_final_export: bool,
    ) -> Optional[bytes]:
        """Exports the model if this evaluation is the best.

        Args:
          estimator: an Estimator.
          export_path: the directory of exports.
          checkpoint_path: the checkpoint that was evaluated.
          eval_result: the metrics by name.
          is_the_final_export: whether training has ended.

        Returns:
          the new directory, or None if a previous evaluation is as good.
        """
        # Event files contain this evaluation too; it must not be compared with itself.
        if not self._has_looked and self._pattern and tf.io.gfile.exists(export_path):
            self._best = self._best_before(estimator, int(eval_result["global_step"]))
        self._has_looked = True
        better = self._best is None or self._compare_fn(
            best_eval_result=self._best, current_eval_result=eval_result
        )
        if not better:
            return None
        self._best = eval_result
        return self._save(estimator, export_path, checkpoint_path)

    def _best_before(self, estimator: Estimator, step: int) -> Optional[Mapping[str, Any]]:
        best: Optional[Mapping[str, Any]] = None
        assert self._pattern is not None
        for path in sorted(
            tf.io.gfile.glob(os.path.join(escaped(estimator.model_dir), self._pattern))
        ):
            for event in tf.train.summary_iterator(path):
                values = {
                    value.tag: value.simple_value
                    for value in event.summary.value
                    if value.HasField("simple_value")
                }
                # A run that went on from an earlier checkpoint leaves evaluations of later steps
                # behind.
                if not values or event.step >= step:
                    continue
                if best is None or self._compare_fn(
                    best_eval_result=best, current_eval_result=values
                ):
                    best = values
        return best
