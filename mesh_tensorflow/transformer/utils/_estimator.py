"""The estimator of a transformer, and its model function."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Optional, Union

import gin
import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow import estimator
from mesh_tensorflow._mesh.devices import set_cpus
from mesh_tensorflow.estimator import ModeKeys
from mesh_tensorflow.estimator.processes import programs_over
from mesh_tensorflow.transformer.utils._prediction import prediction_spec
from mesh_tensorflow.transformer.utils._program import (
    Settings,
    build_model,
    check_tiling,
    processor_devices,
)
from mesh_tensorflow.transformer.utils._settings import (
    MODULE,
    Lengths,
    inputs_vocabulary,
    targets_vocabulary,
)
from mesh_tensorflow.transformer.utils._training import evaluation_spec, training_spec

if TYPE_CHECKING:
    from mesh_tensorflow.transformer.dataset._features import Vocabularies
    from mesh_tensorflow.transformer.utils._program import Filter


_SPECS: dict[str, Callable[[Settings, Mapping[str, tf.Tensor]], Any]] = {
    ModeKeys.TRAIN: training_spec,
    ModeKeys.EVAL: evaluation_spec,
    ModeKeys.PREDICT: prediction_spec,
}


@gin.configurable(module=MODULE, denylist=["predict_fn"])
def tpu_estimator_model_fn(
    model_type: str,
    transformer_model: Any,
    vocabulary: Vocabularies,
    model_dir: Optional[str],
    use_tpu: Union[str, bool, None],
    mesh_shape: Union[mtf.Shape, str],
    layout_rules: Union[mtf.LayoutRules, str],
    batch_size: int,
    sequence_length: Lengths,
    autostack: bool,
    keep_checkpoint_max: Optional[int],
    save_checkpoints_steps: Optional[int],
    learning_rate_schedule: Any = None,
    optimizer: Any = None,
    outer_batch_size: int = 1,
    tpu_summaries: bool = False,
    predict_fn: Optional[Callable[..., mtf.Tensor]] = None,
    score_in_predict_mode: bool = False,
    variable_filter: Filter = None,
    init_checkpoint: Optional[str] = None,
    init_variable_filter: str = "",
    ensemble_inputs: Optional[int] = None,
    mesh_devices: Optional[Sequence[str]] = None,
    model_info_file: Optional[str] = None,
    hierarchical_tiling_spec: Optional[Sequence[Any]] = None,
    weight_decay_checkpoint: Optional[str] = None,
    mesh_impl: Optional[str] = None,
    init_checkpoint_strict: bool = False,
) -> Callable[..., Any]:
    """Returns a model function for an estimator.

    Args:
      model_type: such as "lm"; see `build_model`.
      transformer_model: the model.
      vocabulary: a Vocabulary, or a pair of them, of inputs and of targets.
      model_dir: the directory of checkpoints.
      use_tpu: whether there is a TPU.
      mesh_shape: the mesh.
      layout_rules: the layout.
      batch_size: the number of sequences in a batch.
      sequence_length: an integer, or a dictionary of them by feature.
      autostack: whether to stack small variables that are alike.
      keep_checkpoint_max: how many checkpoints to keep; all if None.
      save_checkpoints_steps: the number of steps between checkpoints.
      learning_rate_schedule: a function of the step, a list of factors, a number or None.
      optimizer: an optimizer class, called with the learning rate; required for training.
      outer_batch_size: the size of the dimension outer_batch, a divisor of the batch size.
      tpu_summaries: whether training writes the scalars of mtf.scalar_summary, in addition to the
        loss and the learning rate. On a TPU, the host writes all of them.
      predict_fn: a function to decode with instead of the model's own, of `model`, `features` and
        `variable_dtype`, that returns a Tensor [batch, length] of ids.
      score_in_predict_mode: whether prediction computes scores of given targets.
      variable_filter: which variables are trained: None for all, a regular expression that is
        searched for in their names, or a function of a Variable.
      init_checkpoint: a checkpoint to initialize variables from, or its directory.
      init_variable_filter: a regular expression; only variables with a match in their names are
        loaded from `init_checkpoint`.
      ensemble_inputs: the number of ensemble members, if each gets different inputs in training.
      mesh_devices: a device for each processor; by default GPUs, if there are as many, or
        TensorFlow's choice.
      model_info_file: a path, to which training writes variable sizes and counters.
      hierarchical_tiling_spec: how the mesh is mapped to a TPU, pairs such as
        [["batch", None], ["model", [2, 2]]]; see `mtf.simd_mesh_impl.HierarchicalTiling`. Elsewhere
        it is only checked against `mesh_shape`.
      weight_decay_checkpoint: ignored with a warning, as in the classic release: optimizers decay
        towards zero.
      mesh_impl: "placement" for one graph with the operations of all processors, "simd" for one
        program that every processor runs, or "pjrt" for devices of JAX; "placement" if None.
      init_checkpoint_strict: whether `init_checkpoint` has to have exactly the weights of the
        model; by default the names on one side only are logged.

    Returns:
      A function of features, labels, mode and params that returns an EstimatorSpec; for a
      TPUEstimator with `use_tpu`, a TPUEstimatorSpec.

    Raises:
      ValueError: `mesh_impl` is unknown, the batch is not divisible, or `hierarchical_tiling_spec`
        describes another mesh.
    """
    del use_tpu
    if weight_decay_checkpoint:
        tf.logging.warning("weight_decay_checkpoint has no effect: optimizers decay towards zero")
    mesh = mtf.convert_to_shape(mesh_shape)
    mesh_impl = mesh_impl or "placement"
    processor_devices(mesh_impl, mesh, mesh_devices)
    check_tiling(hierarchical_tiling_spec, mesh)
    settings = Settings(
        model_type=model_type,
        model=transformer_model,
        vocabulary=vocabulary,
        model_dir=model_dir,
        mesh_shape=mesh,
        layout_rules=mtf.convert_to_layout_rules(layout_rules),
        batch_size=batch_size,
        sequence_length=sequence_length,
        autostack=autostack,
        keep_checkpoint_max=keep_checkpoint_max,
        save_checkpoints_steps=save_checkpoints_steps,
        learning_rate_schedule=learning_rate_schedule,
        optimizer=optimizer,
        outer_batch_size=outer_batch_size,
        predict_fn=predict_fn,
        scoring=score_in_predict_mode,
        variable_filter=variable_filter,
        init_checkpoint=init_checkpoint,
        init_variable_filter=init_variable_filter,
        init_checkpoint_strict=init_checkpoint_strict,
        ensemble_inputs=ensemble_inputs,
        mesh_devices=mesh_devices,
        model_info_file=model_info_file,
        mesh_impl=mesh_impl,
        tpu_summaries=tpu_summaries,
        hierarchical_tiling_spec=hierarchical_tiling_spec,
    )
    # For its error: a batch that cannot be divided is told before any data are read.
    settings.batch_dims()

    def my_model_fn(
        features: Mapping[str, tf.Tensor],
        labels: object,
        mode: str,
        params: object = None,
        config: Any = None,
    ) -> Any:
        """Returns the EstimatorSpec of a mode."""
        del labels
        context = params.get("context") if isinstance(params, Mapping) else None
        own = dataclasses.replace(settings, config=config, context=context)
        return _SPECS[mode](own, features)

    return my_model_fn


def _session_config(
    mesh_impl: str,
    mesh_shape: mtf.Shape,
    layout_rules: mtf.LayoutRules,
    mesh_devices: Optional[Sequence[str]],
    processes: int = 1,
) -> tf.ConfigProto:
    """Returns a session configuration with as many logical CPUs as the mesh needs."""
    config = tf.ConfigProto(allow_soft_placement=mesh_impl != "simd")
    # Soft placement would silently put all of them on the first.
    named = [tf.DeviceSpec.from_string(device) for device in mesh_devices or ()]
    cpus = [d.device_index or 0 for d in named if d.device_type == "CPU"]
    if mesh_devices is None and (mesh_impl == "simd" or processes > 1):
        cpus.append(-(-mesh_shape.size // processes) - 1)
    if cpus:
        set_cpus(config, cpus, mesh_shape, layout_rules if processes == 1 else None)
    return config


def _mesh_impl(mesh_impl: Optional[str], use_tpu: Union[str, bool, None]) -> str:
    """Returns the mesh implementation: the argument, the gin binding, or the default."""
    if mesh_impl is None:
        with contextlib.suppress(ValueError):  # raised by gin if nothing is bound
            mesh_impl = gin.query_parameter(f"{MODULE}.tpu_estimator_model_fn.mesh_impl")
    if mesh_impl == "pjrt" and use_tpu:
        raise ValueError(
            f"mesh_impl 'pjrt' and use_tpu={use_tpu!r} exclude each other: 'pjrt' runs on the "
            "devices of JAX, TPUs among them. Leave use_tpu, or the flag --tpu, out"
        )
    return mesh_impl or ("simd" if use_tpu else "placement")


def get_estimator(
    model_type: str,
    vocabulary: Vocabularies,
    mesh_shape: Union[mtf.Shape, str],
    layout_rules: Union[mtf.LayoutRules, str],
    model_dir: str,
    batch_size: int,
    sequence_length: Lengths,
    autostack: bool,
    learning_rate_schedule: Any,
    keep_checkpoint_max: Optional[int],
    save_checkpoints_steps: Optional[int],
    optimizer: Any,
    predict_fn: Optional[Callable[..., mtf.Tensor]],
    variable_filter: Filter,
    ensemble_inputs: Optional[int],
    use_tpu: Union[str, bool, None],
    tpu_job_name: Optional[str],
    iterations_per_loop: int,
    cluster: Any,
    init_checkpoint: Optional[str] = None,
    mesh_devices: Optional[Sequence[str]] = None,
    score_in_predict_mode: bool = False,
    mesh_impl: Optional[str] = None,
) -> estimator.tpu.TPUEstimator:
    """Creates an estimator, which runs on CPUs and GPUs.

    Args:
      model_type: such as "lm"; see `build_model`.
      vocabulary: a Vocabulary, or a pair of them, of inputs and of targets.
      mesh_shape: the mesh.
      layout_rules: the layout.
      model_dir: the directory of checkpoints.
      batch_size: the number of sequences in a batch.
      sequence_length: an integer, or a dictionary of them by feature.
      autostack: whether to stack small variables that are alike.
      learning_rate_schedule: a function of the step, a list of factors, a number or None.
      keep_checkpoint_max: how many checkpoints to keep; all if None.
      save_checkpoints_steps: the number of steps between checkpoints.
      optimizer: an optimizer class; required for training.
      predict_fn: see `tpu_estimator_model_fn`.
      variable_filter: see `tpu_estimator_model_fn`.
      ensemble_inputs: the number of ensemble members, if each gets different inputs in training.
      use_tpu: the name of a TPU, or None or ""; True to run one program on all processors of the
        mesh by `TPUEstimator`, on as many CPUs or GPUs.
      tpu_job_name: the job of the TPU.
      iterations_per_loop: for TPUs only.
      cluster: a ClusterResolver, or None.
      init_checkpoint: a checkpoint to initialize variables from.
      mesh_devices: a device for each processor of the mesh.
      score_in_predict_mode: whether prediction computes scores of given targets.
      mesh_impl: "placement", "simd" or "pjrt", see `tpu_estimator_model_fn`; "simd" on a TPU, and
        "placement" elsewhere if None.

    Returns:
      A TPUEstimator.
    """
    mesh = mtf.convert_to_shape(mesh_shape)
    layout_rules = mtf.convert_to_layout_rules(layout_rules)
    mesh_impl = _mesh_impl(mesh_impl, use_tpu)
    model = build_model(
        model_type=model_type,
        input_vocab_size=inputs_vocabulary(vocabulary).vocab_size,
        output_vocab_size=targets_vocabulary(vocabulary).vocab_size,
        layout_rules=layout_rules,
        mesh_shape=mesh,
    )
    # A gin binding replaces a default, not an argument.
    given = {"mesh_devices": mesh_devices, "score_in_predict_mode": score_in_predict_mode or None}
    model_fn = tpu_estimator_model_fn(
        model_type=model_type,
        transformer_model=model,
        vocabulary=vocabulary,
        model_dir=model_dir,
        use_tpu=use_tpu,
        mesh_shape=mesh,
        layout_rules=layout_rules,
        batch_size=batch_size,
        sequence_length=sequence_length,
        autostack=autostack,
        keep_checkpoint_max=keep_checkpoint_max,
        save_checkpoints_steps=save_checkpoints_steps,
        learning_rate_schedule=learning_rate_schedule,
        optimizer=optimizer,
        predict_fn=predict_fn,
        variable_filter=variable_filter,
        init_checkpoint=init_checkpoint,
        ensemble_inputs=ensemble_inputs,
        mesh_impl=mesh_impl,
        **{name: value for name, value in given.items() if value is not None},
    )
    processes = max(1, len(programs_over(estimator.RunConfig().cluster_spec)))
    config = estimator.tpu.RunConfig(
        cluster=cluster,
        model_dir=model_dir,
        session_config=_session_config(mesh_impl, mesh, layout_rules, mesh_devices, processes),
        save_checkpoints_steps=None,
        save_checkpoints_secs=None,
        log_step_count_steps=100,
        tpu_config=estimator.tpu.TPUConfig(
            iterations_per_loop=iterations_per_loop,
            tpu_job_name=tpu_job_name,
            # If a TPU is named, nothing else should stand in for it.
            num_shards=mesh.size if not use_tpu or use_tpu is True else None,
        ),
    )
    return estimator.tpu.TPUEstimator(
        model_fn=model_fn,
        config=config,
        use_tpu=bool(use_tpu),
        train_batch_size=batch_size * (ensemble_inputs or 1),
        eval_batch_size=batch_size,
        predict_batch_size=batch_size,
    )
