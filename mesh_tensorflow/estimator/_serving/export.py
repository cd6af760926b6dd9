"""Writes SavedModels."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Optional, Union

import tensorflow.compat.v1 as tf

from mesh_tensorflow._paths import readable
from mesh_tensorflow.estimator._modes import DEFAULT_SIGNATURE, STANDARD_MODES, ModeKeys
from mesh_tensorflow.estimator._running.checkpoints import find_checkpoint
from mesh_tensorflow.estimator._running.inputs import Inputs
from mesh_tensorflow.estimator._running.model import Model, make_global_step
from mesh_tensorflow.estimator._serving.export_outputs import EvalOutput
from mesh_tensorflow.ops import MtfRestoreHook
from mesh_tensorflow.utils import outside_all_rewrites

if TYPE_CHECKING:
    from mesh_tensorflow.estimator._serving.receivers import ServingInputReceiver
    from mesh_tensorflow.estimator._spec import EstimatorSpec

__all__ = ["export_all"]

# By mode: the tag of the graph, and the fields of the spec with hooks.
_TAGS = {
    ModeKeys.TRAIN: "train",
    ModeKeys.EVAL: "eval",
    ModeKeys.PREDICT: tf.saved_model.tag_constants.SERVING,
}
_HOOKS = {
    ModeKeys.TRAIN: ("training_hooks", "training_chief_hooks"),
    ModeKeys.EVAL: ("evaluation_hooks",),
    ModeKeys.PREDICT: ("prediction_hooks",),
}
_ATTEMPTS = 10


def export_all(
    model: Model,
    export_dir_base: Union[str, bytes, os.PathLike[str]],
    receiver_fns: Mapping[str, Callable[[], Any]],
    assets_extra: Optional[Mapping[str, str]],
    as_text: bool,
    checkpoint_path: Optional[str],
    strip_default_attrs: bool,
) -> bytes:
    """Writes a SavedModel with a graph for each mode.

    Args:
      model: the model.
      export_dir_base: a directory, in which a new subdirectory is created.
      receiver_fns: functions that return a receiver, by mode.
      assets_extra: files to add, by their paths within "assets.extra".
      as_text: whether to write text instead of binary protobufs.
      checkpoint_path: a checkpoint, or None for the latest one.
      strip_default_attrs: whether to omit attributes with default values.

    Returns:
      the new directory, as bytes.

    Raises:
      ValueError: there is no checkpoint, a mode is unknown, or no signature fits.
    """
    _check(receiver_fns)
    path = find_checkpoint(model.model_dir, checkpoint_path, "export_saved_model")
    if path is None:
        raise ValueError(
            f"export_saved_model: there is no checkpoint in {model.model_dir}: train first, or "
            "pass checkpoint_path="
        )
    base = os.fspath(export_dir_base)
    base = base.decode() if isinstance(base, bytes) else base
    final = _new_directory(base)
    temporary = os.path.join(base, f"temp-{os.path.basename(final)}")
    try:
        _write(
            model, temporary, receiver_fns, assets_extra or {}, as_text, path, strip_default_attrs
        )
    except BaseException:
        if tf.io.gfile.exists(temporary):
            tf.io.gfile.rmtree(temporary)
        raise
    tf.io.gfile.rename(temporary, final)
    return final.encode()


def _write(
    model: Model,
    directory: str,
    receiver_fns: Mapping[str, Callable[[], Any]],
    assets_extra: Mapping[str, str],
    as_text: bool,
    path: str,
    strip_default_attrs: bool,
) -> None:
    builder = tf.saved_model.Builder(directory)
    with_variables = True
    for mode in STANDARD_MODES:
        if mode in receiver_fns:
            _add_graph(
                builder, model, mode, receiver_fns[mode], path, strip_default_attrs, with_variables
            )
            with_variables = False
    builder.save(as_text)
    for name, source in assets_extra.items():
        target = os.path.join(directory, "assets.extra", name)
        tf.io.gfile.makedirs(os.path.dirname(target))
        tf.io.gfile.copy(source, target)


def _check(receiver_fns: Mapping[str, Callable[[], Any]]) -> None:
    if not receiver_fns:
        raise ValueError("export: there is no function for any mode")
    for mode, function in receiver_fns.items():
        if mode not in _TAGS:
            raise ValueError(
                f"export: the mode {mode!r} is not known; it should be one of "
                f"{', '.join(map(repr, _TAGS))}"
            )
        if not callable(function):
            raise TypeError(
                "export: serving_input_receiver_fn should be a function that returns a "
                f"ServingInputReceiver, but is {function!r}"
            )


def _new_directory(base: str) -> str:
    for _ in range(_ATTEMPTS):
        stamp = str(int(time.time()))
        directory = os.path.join(base, stamp)
        if not tf.io.gfile.exists(directory):
            return directory
        time.sleep(1)
    raise RuntimeError(f"export: found no unused name for a directory in {base}")


def _add_graph(
    builder: tf.saved_model.Builder,
    model: Model,
    mode: str,
    receiver_fn: Callable[[], Any],
    path: str,
    strip_default_attrs: bool,
    with_variables: bool,
) -> None:
    with tf.Graph().as_default() as graph:
        tf.set_random_seed(model.config.effective_seed)
        make_global_step(graph)
        receiver = receiver_fn()
        if not hasattr(receiver, "receiver_tensors"):
            raise ValueError(
                f"export: serving_input_receiver_fn returned {receiver!r}; it should return a "
                "ServingInputReceiver"
            )
        inputs = Inputs(receiver.features, getattr(receiver, "labels", None), [], True)
        spec = model.spec(inputs, mode)
        signatures = _signatures(spec, receiver, mode)
        main_op = _main_op(spec, mode)
        saver = spec.scaffold.saver or tf.train.Saver(sharded=True)
        with tf.Session(config=model.config.effective_session_config) as session:
            saver.restore(session, readable(path))
            arguments = {
                "tags": [_TAGS[mode]],
                "signature_def_map": signatures,
                "assets_collection": tf.get_collection(tf.GraphKeys.ASSET_FILEPATHS),
                "main_op": main_op,
                "saver": saver,
                "strip_default_attrs": strip_default_attrs,
            }
            if with_variables:
                builder.add_meta_graph_and_variables(session, **arguments)
            else:
                builder.add_meta_graph(**arguments)


def _main_op(spec: EstimatorSpec, mode: str) -> tf.Operation:
    """Returns the operation that a loader runs after restoring the variables.

    Hooks are not exported. This operation copies masters to slices as MtfRestoreHook does, since
    files do not have slices.
    """
    operation = spec.scaffold.local_init_op
    if operation is None:
        operation = tf.group(tf.local_variables_initializer(), tf.tables_initializer())
    hooks = [hook for name in _HOOKS[mode] for hook in getattr(spec, name)]
    lowerings = [hook._lowering for hook in hooks if isinstance(hook, MtfRestoreHook)]
    if not lowerings or spec.scaffold.local_init_op is not None:
        return operation
    with outside_all_rewrites():
        return tf.group(operation, *[lowering.copy_masters_to_slices() for lowering in lowerings])


def _signatures(spec: EstimatorSpec, receiver: ServingInputReceiver, mode: str) -> dict[str, Any]:
    if mode != ModeKeys.PREDICT:
        output = EvalOutput(spec.loss, spec.predictions or None, spec.eval_metric_ops, mode)
        name = {ModeKeys.TRAIN: "train", ModeKeys.EVAL: "eval"}[mode]
        return {name: output.as_signature_def(receiver.receiver_tensors)}
    made, refused = {}, {}
    alternatives = receiver.receiver_tensors_alternatives or {}
    for name, output in (spec.export_outputs or {}).items():
        for other, tensors in [(None, receiver.receiver_tensors), *alternatives.items()]:
            key = name if other is None else f"{other}:{name}"
            try:
                made[key] = output.as_signature_def(tensors)
            except ValueError as error:
                refused[key] = str(error)
    for name, reason in refused.items():
        tf.logging.warning("export: the signature %r is left out: %s", name, reason)
    if DEFAULT_SIGNATURE not in made:
        raise ValueError(
            f"export: no default signature: {refused.get(DEFAULT_SIGNATURE, 'none is given')}"
        )
    return made
