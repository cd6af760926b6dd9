"""TPUEstimator: an Estimator that passes the batch size to its functions."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Optional, Union, cast

import numpy as np
import tensorflow.compat.v1 as tf

from mesh_tensorflow._pjrt import pjrt
from mesh_tensorflow.estimator._estimator import Estimator
from mesh_tensorflow.estimator._modes import ModeKeys
from mesh_tensorflow.estimator._run_config import RunConfig as _RunConfig
from mesh_tensorflow.estimator._running.model import (
    Model,
    call_input_fn,
    call_model_fn,
    function_name,
    takes,
)
from mesh_tensorflow.estimator.tpu._config import RunConfig
from mesh_tensorflow.estimator.tpu._spec import (
    ReplicaContext,
    TPUEstimatorSpec,
    as_estimator_spec,
    replicated_spec,
    runner_of,
)

if TYPE_CHECKING:
    from mesh_tensorflow.estimator._running.checkpoints import WarmStartSettings

__all__ = ["TPUEstimator"]

_BATCH_SIZE = "batch_size"
_USE_TPU = "use_tpu"
_RESERVED = (_BATCH_SIZE, "context")


class TPUEstimator(Estimator):
    """An Estimator whose functions get the batch size as `params["batch_size"]`.

    It runs on CPUs and GPUs. With `use_tpu=True` and `TPUConfig(num_shards=N)`, the model function
    is one program that N devices run, as the cores of a TPU would: its mesh implementation is a
    SimdMeshImpl. With `TPUConfig(mesh_impl="pjrt")` it is one on devices of JAX, TPUs among them:
    its mesh implementation is an mtf.GspmdMeshImpl.
    """

    def __init__(
        self,
        model_fn: Any = None,
        model_dir: Union[str, os.PathLike[str], None] = None,
        config: Optional[RunConfig] = None,
        params: object = None,
        use_tpu: bool = True,
        train_batch_size: Optional[int] = None,
        eval_batch_size: Optional[int] = None,
        predict_batch_size: Optional[int] = None,
        batch_axis: object = None,
        eval_on_tpu: bool = True,
        export_to_tpu: bool = True,
        export_to_cpu: bool = True,
        warm_start_from: Union[str, os.PathLike[str], WarmStartSettings, None] = None,
        embedding_config_spec: None = None,
        export_saved_model_api_version: object = None,
    ) -> None:
        """Creates a TPUEstimator.

        Args:
          model_fn: a function that returns a TPUEstimatorSpec or an EstimatorSpec. It takes
            `features` and optionally `labels`, `mode`, `params` and `config`.
          model_dir: the directory of checkpoints and summaries; that of `config` by default.
          config: a tpu.RunConfig.
          params: a dict, or an object with `set_hparam`. Both functions get a copy, with
            `batch_size` and `use_tpu` added.
          use_tpu: whether the model function is one program for all processors of a mesh, whose
            number is `num_shards` of the TPUConfig. It gets `params["use_tpu"]`, and
            `params["context"]` with a device assignment.
          train_batch_size: the batch size in training; if given, `input_fn` has to take `params`.
          eval_batch_size: the batch size in evaluation.
          predict_batch_size: the batch size in prediction.
          batch_axis: ignored; only for TPUs.
          eval_on_tpu: whether `use_tpu` applies to evaluation and prediction too.
          export_to_tpu: ignored; only for TPUs.
          export_to_cpu: ignored; only for TPUs.
          warm_start_from: a path or a WarmStartSettings; see `Estimator`.
          embedding_config_spec: must be None.
          export_saved_model_api_version: ignored; only for TPUs.

        Raises:
          TypeError: `config` is not a tpu.RunConfig.
          ValueError: `params` has a reserved key, or a batch size is not positive.
        """
        if not isinstance(config, RunConfig):
            raise TypeError(
                f"TPUEstimator: config should be an estimator.tpu.RunConfig, but is {config!r}"
            )
        _check_params(params)
        self._batch_sizes = {
            ModeKeys.TRAIN: train_batch_size,
            ModeKeys.EVAL: eval_batch_size,
            ModeKeys.PREDICT: predict_batch_size,
        }
        for mode, size in self._batch_sizes.items():
            _check_batch_size(mode, size)
        if embedding_config_spec is not None:
            raise ValueError(
                "TPUEstimator: embedding_config_spec should be None: embeddings on TPUs are not "
                "there; mtf.layers.embedding can be split by a layout"
            )
        self._use_tpu = {
            ModeKeys.TRAIN: use_tpu,
            ModeKeys.EVAL: use_tpu and eval_on_tpu,
            ModeKeys.PREDICT: use_tpu and eval_on_tpu,
        }
        super().__init__(model_fn, model_dir, config, params, warm_start_from)

    def train(
        self,
        input_fn: Callable[..., Any],
        hooks: Optional[Sequence[tf.train.SessionRunHook]] = None,
        steps: Optional[int] = None,
        max_steps: Optional[int] = None,
        saving_listeners: Optional[Sequence[tf.train.CheckpointSaverListener]] = None,
    ) -> Estimator:
        """Trains the model; see `Estimator.train`.

        Args:
          input_fn: as for `Estimator`; takes `params` if there is a batch size.
          hooks: tf.train.SessionRunHooks of the session.
          steps: the number of steps to train.
          max_steps: the global step at which to stop.
          saving_listeners: tf.train.CheckpointSaverListeners.

        Returns:
          the estimator.

        Raises:
          RuntimeError: `use_tpu` is true, and the number of devices is unknown.
        """
        self._check_devices(ModeKeys.TRAIN, "train")
        return super().train(input_fn, hooks, steps, max_steps, saving_listeners)

    def evaluate(
        self,
        input_fn: Callable[..., Any],
        steps: Optional[int] = None,
        hooks: Optional[Sequence[tf.train.SessionRunHook]] = None,
        checkpoint_path: Optional[str] = None,
        name: Optional[str] = None,
    ) -> dict[str, Any]:
        """Evaluates the model; see `Estimator.evaluate`.

        Args:
          input_fn: as for `Estimator`; takes `params` if there is a batch size.
          steps: how many batches, or None until the data end.
          hooks: tf.train.SessionRunHooks of the session.
          checkpoint_path: a checkpoint; the latest one by default.
          name: the name of the evaluation.

        Returns:
          the metrics by name.

        Raises:
          RuntimeError: `use_tpu` and `eval_on_tpu` are true, and the number of devices is
            unknown.
        """
        self._check_devices(ModeKeys.EVAL, "evaluate")
        return super().evaluate(input_fn, steps, hooks, checkpoint_path, name)

    def predict(
        self,
        input_fn: Callable[..., Any],
        predict_keys: Union[str, Sequence[str], None] = None,
        hooks: Optional[Sequence[tf.train.SessionRunHook]] = None,
        checkpoint_path: Optional[str] = None,
        yield_single_examples: bool = True,
    ) -> Iterator[Any]:
        """Yields predictions; see `Estimator.predict`.

        Args:
          input_fn: as for `Estimator`; takes `params` if there is a batch size.
          predict_keys: names of predictions, or None for all.
          hooks: tf.train.SessionRunHooks of the session.
          checkpoint_path: a checkpoint; the latest one by default.
          yield_single_examples: whether to split batches into examples.

        Returns:
          an iterator.

        Raises:
          RuntimeError: `use_tpu` and `eval_on_tpu` are true, and the number of devices is
            unknown.
        """
        self._check_devices(ModeKeys.PREDICT, "predict")
        return super().predict(
            input_fn, predict_keys, hooks, checkpoint_path, yield_single_examples
        )

    def _exported_model(self) -> Model:
        """Returns the model for one device, to be exported as a SavedModel."""
        other = copy.copy(self)
        other._use_tpu = dict.fromkeys(self._use_tpu, False)
        return other._model()

    def _check_devices(self, mode: str, called: str) -> None:
        if not self._use_tpu[mode]:
            return
        config: Any = self.config
        if config.tpu_config.mesh_impl == "pjrt":
            pjrt()  # an error without JAX
            return
        tpus = tf.config.list_physical_devices("TPU")
        if tpus or config.tpu_config.num_shards is None:
            there = f"there are {len(tpus)} TPU cores" if tpus else "there is no TPU"
            raise RuntimeError(
                f"TPUEstimator.{called}: use_tpu is True, but {there}, and this estimator runs on "
                "CPUs and GPUs: pass use_tpu=False, for a model_fn with a PlacementMeshImpl; or, "
                "for one with a SimdMeshImpl, give TPUConfig(num_shards=N), N being the number of "
                "processors of the mesh, to run it on N devices of this machine"
            )

    def _params_with(self, mode: str, **values: object) -> Any:
        params = self.params
        size = self._batch_sizes[mode]
        if size is not None:
            values[_BATCH_SIZE] = size
        for name, value in values.items():
            if hasattr(params, "set_hparam"):
                # HParams refuses to set a name that it lacks.
                known = hasattr(params, name)
                (params.set_hparam if known else params.add_hparam)(name, value)
            else:
                params[name] = value
        return params

    def _call_input_fn(self, input_fn: Callable[..., Any], mode: str) -> Any:
        size = self._batch_sizes[mode]
        if size is not None and not takes(input_fn, "params"):
            raise ValueError(
                f"input_fn {function_name(input_fn)} takes no argument `params`, in which it would "
                f'find params["batch_size"] ({size}): add it, or give the TPUEstimator no batch '
                "size"
            )
        return call_input_fn(input_fn, mode, self._params_with(mode), self.config)

    def _call_model_fn(
        self, features: object, labels: object, mode: str, config: _RunConfig
    ) -> Any:
        config = cast(RunConfig, config)  # which the constructor asks for
        if self._use_tpu[mode]:
            shards = config.tpu_config.num_shards
            context = None if shards is None else ReplicaContext(shards)
            params = self._params_with(mode, use_tpu=True, context=context)
            spec = replicated_spec(
                lambda x, y: call_model_fn(self._model_fn, x, y, mode, params, config),
                features,
                labels,
                runner_of(config),
            )
        else:
            params = self._params_with(mode, use_tpu=False)
            spec = call_model_fn(self._model_fn, features, labels, mode, params, config)
        if isinstance(spec, TPUEstimatorSpec):
            every = config.tpu_config.experimental_host_call_every_n_steps
            return as_estimator_spec(spec, every)
        return spec


def _check_params(params: Any) -> None:
    if params is None:
        return
    if not isinstance(params, dict) and not hasattr(params, "set_hparam"):
        raise TypeError(
            f"TPUEstimator: params should be a dict, to which batch_size is added, but is of type "
            f"{type(params).__name__}"
        )
    taken = [name for name in _RESERVED if name in params]
    if taken:
        raise ValueError(
            f"TPUEstimator: params has {', '.join(map(repr, taken))}, which the estimator sets: "
            "leave it out, and give train_batch_size, eval_batch_size and predict_batch_size"
        )


def _check_batch_size(mode: str, size: Optional[int]) -> None:
    whole = isinstance(size, (int, np.integer)) and not isinstance(size, bool)
    if size is not None and (not whole or size <= 0):
        name = {"train": "train", "eval": "eval", "infer": "predict"}[mode]
        raise ValueError(
            f"TPUEstimator: {name}_batch_size is {size!r}; it should be a whole number of 1 or more"
        )
