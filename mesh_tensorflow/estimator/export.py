"""Exports of a model as a SavedModel: receivers of inputs, kinds of signatures, and exporters."""

from __future__ import annotations

import abc
import math
import os
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Optional, Union

import tensorflow as tf2
import tensorflow.compat.v1 as tf

from mesh_tensorflow._core.errors import check_whole
from mesh_tensorflow._paths import escaped, new_directory, readable
from mesh_tensorflow.estimator._model import (
    Inputs,
    Model,
    begin_program,
    find_checkpoint,
    with_latest,
)
from mesh_tensorflow.estimator._spec import (
    DEFAULT_SIGNATURE,
    STANDARD_MODES,
    ClassificationOutput,
    EvalOutput,
    ExportOutput,
    ModeKeys,
    PredictOutput,
    RegressionOutput,
)
from mesh_tensorflow.estimator.summaries import scalars_of_steps
from mesh_tensorflow.ops import MtfRestoreHook
from mesh_tensorflow.utils import outside_all_rewrites

if TYPE_CHECKING:
    from mesh_tensorflow.estimator._estimator import Estimator
    from mesh_tensorflow.estimator._spec import EstimatorSpec

__all__ = [
    "ClassificationOutput",
    "EvalOutput",
    "ExportOutput",
    "PredictOutput",
    "RegressionOutput",
    "ServingInputReceiver",
    "TensorServingInputReceiver",
    "build_parsing_serving_input_receiver_fn",
    "build_raw_serving_input_receiver_fn",
]

# -- receivers of inputs

_ONE_FEATURE = "feature"
_ONE_LABEL = "label"
_ONE_RECEIVER = "input"
_EXAMPLES = "examples"


class _ReceiverFields(NamedTuple):
    features: Any
    receiver_tensors: dict[str, Any]
    receiver_tensors_alternatives: Optional[dict[str, dict[str, Any]]]


class ServingInputReceiver(_ReceiverFields):
    """Features by name, and the placeholders from which they are computed."""

    def __new__(
        cls,
        features: Union[tf.Tensor, Mapping[str, tf.Tensor]],
        receiver_tensors: Union[tf.Tensor, Mapping[str, tf.Tensor]],
        receiver_tensors_alternatives: Optional[Mapping[str, Any]] = None,
    ) -> ServingInputReceiver:
        """Creates an instance.

        Args:
          features: a dict of tensors; a single tensor is named "feature".
          receiver_tensors: a dict of tensors to feed; a single tensor is named "input".
          receiver_tensors_alternatives: by name, other dicts of tensors that can be fed instead,
            at later places in the graph.

        Returns:
          a ServingInputReceiver.

        Raises:
          ValueError: a name is not a string, or a value is not a tensor.
        """
        return super().__new__(
            cls,
            _checked("features", features, _ONE_FEATURE),
            _checked("receiver_tensors", receiver_tensors, _ONE_RECEIVER),
            _checked_alternatives(receiver_tensors_alternatives),
        )


class TensorServingInputReceiver(_ReceiverFields):
    """A ServingInputReceiver for model functions whose features are one tensor."""

    def __new__(
        cls,
        features: Union[tf.Tensor, Mapping[str, tf.Tensor]],
        receiver_tensors: Union[tf.Tensor, Mapping[str, tf.Tensor]],
        receiver_tensors_alternatives: Optional[Mapping[str, Any]] = None,
    ) -> TensorServingInputReceiver:
        """Creates an instance.

        Args:
          features: a tensor.
          receiver_tensors: a dict of tensors to feed; a single tensor is named "input".
          receiver_tensors_alternatives: by name, other dicts of tensors that can be fed instead.

        Returns:
          a TensorServingInputReceiver.

        Raises:
          ValueError: `features` is not one tensor.
        """
        if isinstance(features, Mapping):
            raise ValueError(
                "TensorServingInputReceiver: features should be one tensor, but are a dict: use "
                "ServingInputReceiver"
            )
        _checked("features", features, _ONE_FEATURE)
        return super().__new__(
            cls,
            features,
            _checked("receiver_tensors", receiver_tensors, _ONE_RECEIVER),
            _checked_alternatives(receiver_tensors_alternatives),
        )


class SupervisedInputReceiver(NamedTuple):
    """Features and labels by name, and the placeholders from which they are computed."""

    features: Any
    labels: Any
    receiver_tensors: dict[str, Any]
    receiver_tensors_alternatives: None = None


def _checked(
    argument: str, tensors: Union[tf.Tensor, Mapping[str, tf.Tensor], None], default: str
) -> dict[str, Any]:
    if tensors is None:
        raise ValueError(f"{argument} is None; it should be a dict of tensors")
    by_name = dict(tensors) if isinstance(tensors, Mapping) else {default: tensors}
    for name, tensor in by_name.items():
        if not isinstance(name, str):
            raise ValueError(f"{argument}: the name {name!r} should be a string")
        if not (tf.is_tensor(tensor) or isinstance(tensor, tf.SparseTensor)):
            raise ValueError(f"{argument}: {name!r} should be a tensor, but is {tensor!r}")
    return by_name


def _checked_alternatives(
    alternatives: Optional[Mapping[str, Any]],
) -> Optional[dict[str, dict[str, Any]]]:
    if alternatives is None:
        return None
    if not isinstance(alternatives, Mapping):
        raise ValueError(
            f"receiver_tensors_alternatives should be a dict of dicts, but is {alternatives!r}"
        )
    return {
        name: _checked(f"receiver_tensors_alternatives[{name!r}]", tensors, _ONE_RECEIVER)
        for name, tensors in alternatives.items()
    }


def build_parsing_serving_input_receiver_fn(
    feature_spec: Mapping[str, Any], default_batch_size: Optional[int] = None
) -> Callable[[], ServingInputReceiver]:
    """Returns a serving input receiver function for serialized tf.train.Examples.

    Args:
      feature_spec: features by name, as for tf.io.parse_example.
      default_batch_size: the batch size, or None for any.

    Returns:
      a function that returns a ServingInputReceiver.
    """

    def serving_input_receiver_fn() -> ServingInputReceiver:
        """Creates a placeholder of serialized examples and parses it."""
        examples = tf.placeholder(tf.string, [default_batch_size], name="input_example_tensor")
        features = tf.io.parse_example(examples, feature_spec)
        return ServingInputReceiver(features, {_EXAMPLES: examples})

    return serving_input_receiver_fn


def _placeholders(tensors: Mapping[str, Any], batch_size: Optional[int]) -> dict[str, tf.Tensor]:
    placeholders = {}
    for name, tensor in tensors.items():
        shape = tf.TensorShape(tensor.shape).as_list()
        # A scalar has no batch dimension to leave open.
        if shape:
            shape[0] = batch_size
        placeholders[name] = tf.placeholder(tf.as_dtype(tensor.dtype), shape, name=name)
    return placeholders


def build_raw_serving_input_receiver_fn(
    features: Mapping[str, Any], default_batch_size: Optional[int] = None
) -> Callable[[], ServingInputReceiver]:
    """Returns a serving input receiver function for features that are fed directly.

    Args:
      features: tensors by name, with the shapes and dtypes of the placeholders.
      default_batch_size: the batch size, or None for any.

    Returns:
      a function that returns a ServingInputReceiver.
    """

    def serving_input_receiver_fn() -> ServingInputReceiver:
        """Creates a placeholder for each feature."""
        placeholders = _placeholders(features, default_batch_size)
        return ServingInputReceiver(placeholders, placeholders)

    return serving_input_receiver_fn


def build_raw_supervised_input_receiver_fn(
    features: Union[tf.Tensor, Mapping[str, tf.Tensor]],
    labels: Union[tf.Tensor, Mapping[str, tf.Tensor]],
    default_batch_size: Optional[int] = None,
) -> Callable[[], SupervisedInputReceiver]:
    """Returns an input receiver function for models exported for evaluation or training.

    Args:
      features: tensors by name, with the shapes and dtypes of the placeholders; or one tensor.
      labels: labels in the same form.
      default_batch_size: the batch size, or None for any.

    Returns:
      a function that returns a SupervisedInputReceiver.

    Raises:
      ValueError: a feature and a label have the same name.
    """
    by_name = [
        x if isinstance(x, Mapping) else {name: x}
        for x, name in [(features, _ONE_FEATURE), (labels, _ONE_LABEL)]
    ]
    both = sorted(set(by_name[0]) & set(by_name[1]))
    if both:
        raise ValueError(f"features and labels are both called {', '.join(both)}: rename them")

    def supervised_input_receiver_fn() -> SupervisedInputReceiver:
        """Creates a placeholder for each feature and each label."""
        placeholders = [_placeholders(x, default_batch_size) for x in by_name]
        # A single tensor was for a model function that takes one, without a dict around it.
        features_of_each = [
            x if isinstance(original, Mapping) else next(iter(x.values()))
            for x, original in zip(placeholders, [features, labels])
        ]
        return SupervisedInputReceiver(
            features_of_each[0], features_of_each[1], {**placeholders[0], **placeholders[1]}
        )

    return supervised_input_receiver_fn


# -- a SavedModel

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


class ExportSettings(NamedTuple):
    """What a SavedModel of a model has.

    Attributes:
      receiver_fns: functions that return a receiver, by mode.
      assets_extra: files to add, by their paths within "assets.extra".
      as_text: whether to write text instead of binary protobufs.
      checkpoint_path: a checkpoint, or None for the latest one.
      strip_default_attrs: whether to omit attributes with default values.
      rows_at_a_time: the number of rows of the model function, if the exported model is to take any
        number; or None.
    """

    receiver_fns: Mapping[str, Callable[[], Any]]
    assets_extra: Optional[Mapping[str, str]]
    as_text: bool
    checkpoint_path: Optional[str]
    strip_default_attrs: bool = True
    rows_at_a_time: Optional[int] = None


def export_all(
    model: Model, export_dir_base: Union[str, bytes, os.PathLike[str]], settings: ExportSettings
) -> bytes:
    """Writes a SavedModel with a graph for each mode.

    Args:
      model: the model.
      export_dir_base: a directory, in which a new subdirectory is created.
      settings: what the SavedModel has.

    Returns:
      the new directory, as bytes.

    Raises:
      ValueError: there is no checkpoint, a mode is unknown, or no signature fits.
    """
    _check(settings.receiver_fns, settings.rows_at_a_time)
    path = find_checkpoint(model.model_dir, settings.checkpoint_path, "export_saved_model")
    if path is None:
        raise ValueError(
            f"export_saved_model: there is no checkpoint in {model.model_dir}: train first, or "
            "pass checkpoint_path="
        )
    base = os.fspath(export_dir_base)
    base = base.decode() if isinstance(base, bytes) else base
    final = _new_directory(base)
    # Servers watch for directories whose names are numbers, and must not load half a model.
    temporary = os.path.join(base, f"temp-{os.path.basename(final)}")
    modes = [mode for mode in STANDARD_MODES if mode in settings.receiver_fns]

    def write(path: str) -> None:
        with new_directory(final, temporary):
            builder = tf.saved_model.Builder(temporary)
            # Training is the first, whose graph has all variables: they are stored once, with the
            # first graph.
            for mode in modes:
                _add_graph(builder, model, mode, path, settings, with_variables=mode == modes[0])
            builder.save(settings.as_text)
            for name, source in (settings.assets_extra or {}).items():
                target = os.path.join(temporary, "assets.extra", name)
                tf.io.gfile.makedirs(os.path.dirname(target))
                tf.io.gfile.copy(source, target)

    with_latest(path, model.model_dir if settings.checkpoint_path is None else None, write)
    return final.encode()


def _check(receiver_fns: Mapping[str, Callable[[], Any]], rows_at_a_time: Optional[int]) -> None:
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
    if rows_at_a_time is None:
        return
    check_whole("export", "rows_at_a_time", rows_at_a_time)
    if list(receiver_fns) != [ModeKeys.PREDICT]:
        raise ValueError(
            "export: rows_at_a_time is for predictions alone, as a loss is that of a whole batch. "
            "Leave it out"
        )


def _new_directory(base: str) -> str:
    for _ in range(_ATTEMPTS):
        stamp = str(int(time.time()))
        directory = os.path.join(base, stamp)
        if not tf.io.gfile.exists(directory):
            return directory
        # Names are whole seconds, so the next one is free a second later.
        time.sleep(1)
    raise RuntimeError(f"export: found no unused name for a directory in {base}")


def _add_graph(
    builder: tf.saved_model.Builder,
    model: Model,
    mode: str,
    path: str,
    settings: ExportSettings,
    with_variables: bool,
) -> None:
    with tf.Graph().as_default():
        begin_program(model.config)
        receiver = settings.receiver_fns[mode]()
        if not hasattr(receiver, "receiver_tensors"):
            raise ValueError(
                f"export: serving_input_receiver_fn returned {receiver!r}; it should return a "
                "ServingInputReceiver"
            )
        # Only receivers for training and evaluation have labels.
        inputs = Inputs(receiver.features, getattr(receiver, "labels", None), [], True)
        spec = model.spec(inputs, mode)
        signatures = _signatures(spec, receiver, mode)
        rows = settings.rows_at_a_time
        if rows is not None:
            signatures = {
                name: any_batch(signature, rows, f"export: the signature {name!r}")
                for name, signature in signatures.items()
            }
        main_op = _main_op(spec, mode)
        # Made last, since a Saver saves the variables that are there when it is made.
        saver = spec.scaffold.saver or tf.train.Saver(sharded=True)
        with tf.Session(config=model.config.effective_session_config) as session:
            saver.restore(session, readable(path))
            arguments = {
                "tags": [_TAGS[mode]],
                "signature_def_map": signatures,
                "assets_collection": tf.get_collection(tf.GraphKeys.ASSET_FILEPATHS),
                "main_op": main_op,
                "saver": saver,
                "strip_default_attrs": settings.strip_default_attrs,
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
    # A local_init_op of the user's own is taken as it is: it may copy masters itself.
    if not lowerings or spec.scaffold.local_init_op is not None:
        return operation
    with outside_all_rewrites():
        return tf.group(operation, *[lowering.copy_masters_to_slices() for lowering in lowerings])


def _signatures(spec: EstimatorSpec, receiver: ServingInputReceiver, mode: str) -> dict[str, Any]:
    if mode != ModeKeys.PREDICT:
        output = EvalOutput(spec.loss, spec.predictions or None, spec.eval_metric_ops, mode)
        name = {ModeKeys.TRAIN: "train", ModeKeys.EVAL: "eval"}[mode]
        return {name: output.as_signature_def(receiver.receiver_tensors)}
    signatures, refused = {}, {}
    alternatives = receiver.receiver_tensors_alternatives or {}
    for name, output in (spec.export_outputs or {}).items():
        for other, tensors in [(None, receiver.receiver_tensors), *alternatives.items()]:
            # The names that tf.estimator's exports have for signatures of further receivers.
            key = name if other is None else f"{other}:{name}"
            try:
                signatures[key] = output.as_signature_def(tensors)
            except ValueError as error:
                # An output may fit some of the receiver's inputs alone, and only the default one
                # has to.
                refused[key] = str(error)
    for name, reason in refused.items():
        tf.logging.warning("export: the signature %r is left out: %s", name, reason)
    if DEFAULT_SIGNATURE not in signatures:
        raise ValueError(
            f"export: no default signature: {refused.get(DEFAULT_SIGNATURE, 'none is given')}"
        )
    return signatures


# -- any number of rows, which are computed piece by piece


def any_batch(signature: Any, rows: int, what: str) -> Any:
    """Returns a signature that takes any number of rows, of one that takes so many at a time.

    Both are of the default graph. The rows are computed in pieces; the last one is filled up with
    zeros, or empty strings, and what comes of those is left out.

    Args:
      signature: a SignatureDef, of which each input and output has the rows first.
      rows: the number of rows of a piece.
      what: what is exported, for errors.

    Raises:
      ValueError: an input or an output has not so many rows, or there is a loop of TensorFlow 1.
    """
    graph = tf.get_default_graph()
    named = [
        {n: graph.get_tensor_by_name(info.name) for n, info in sorted(infos.items())}
        for infos in (signature.inputs, signature.outputs)
        if all(info.name for info in infos.values())  # else sparse tensors, which have several
    ]
    if len(named) < 2:
        raise ValueError(f"{what}: sparse tensors have no rows that could be cut into pieces")
    inputs, outputs = named
    for n, x in {**inputs, **outputs}.items():
        if not x.shape.rank or x.shape[0] not in (None, rows):
            raise ValueError(
                f"{what}: {n!r} has the shape {x.shape}, but a model that takes any number of "
                f"rows, {rows} at a time, has them first in each input and output"
            )
    program = _PieceProgram(graph, inputs, outputs, what)
    free = {n: tf.placeholder(x.dtype, [None, *x.shape[1:]], n) for n, x in inputs.items()}

    @tf2.function(autograph=False)
    def serve(*features: tf.Tensor) -> list[tf.Tensor]:
        return _in_pieces(program, dict(zip(free, features)), rows)

    served = dict(zip(outputs, serve(*free.values())))
    return tf.saved_model.build_signature_def(
        *[{n: tf.saved_model.build_tensor_info(x) for n, x in of.items()} for of in (free, served)],
        signature.method_name,
    )


class _PieceProgram:
    """What a graph computes, to be computed again within functions of the same graph."""

    def __init__(
        self,
        graph: tf.Graph,
        inputs: Mapping[str, tf.Tensor],
        outputs: Mapping[str, tf.Tensor],
        what: str,
    ) -> None:
        self.inputs, self.outputs = inputs, list(outputs.values())
        self._nodes = tf.graph_util.extract_sub_graph(
            graph.as_graph_def(), [x.op.name for x in self.outputs]
        )
        if any(node.op == "Enter" for node in self._nodes.node):
            raise ValueError(
                f"{what}: the model has loops of TensorFlow 1, which cannot be computed in pieces. "
                "Call tf.compat.v1.enable_control_flow_v2() at the beginning of the program"
            )
        self._names = {node.name for node in self._nodes.node}
        # Variables and tables stay in the graph, where those who load it look for them.
        self._held = [
            x
            for op in graph.get_operations()
            for x in op.outputs
            if x.dtype == tf.resource and not op.inputs and op.name in self._names
        ]

    def __call__(self, given: Mapping[str, tf.Tensor]) -> list[tf.Tensor]:
        """Returns the outputs for inputs by name, within a function."""
        values = {x.name: tf.get_default_graph().capture(x) for x in self._held}
        # What an output does not depend on is not there.
        used = {n: x for n, x in self.inputs.items() if x.op.name in self._names}
        values.update({x.name: given[n] for n, x in used.items()})
        return tf.import_graph_def(
            self._nodes, values, [x.name for x in self.outputs], name="piece"
        )


def _in_pieces(
    program: _PieceProgram, features: Mapping[str, tf.Tensor], rows: int
) -> list[tf.Tensor]:
    """Returns the outputs of a program of so many rows for features of any number."""
    count, *others = [tf.shape(x)[0] for x in features.values()]
    text = f"there are not as many rows of each of {', '.join(features)}"
    with tf.control_dependencies(
        [tf.debugging.assert_equal(n, count, message=text) for n in others]
    ):
        count = tf.identity(count)
    # As many rows more as a piece has: the last one is filled up with some of them.
    longer = {
        n: tf.concat([x, tf.zeros(tf.concat([[rows], tf.shape(x)[1:]], 0), x.dtype)], 0)
        for n, x in features.items()
    }

    def piece(start: tf.Tensor) -> list[tf.Tensor]:
        cut = {n: x[start : start + rows] for n, x in longer.items()}
        return program({n: tf.ensure_shape(x, [rows, *x.shape[1:]]) for n, x in cut.items()})

    # One piece at least, which gives outputs their shapes where there are no rows.
    starts = tf.range(0, tf.maximum(count, 1), rows)
    pieces = tf.map_fn(
        piece,
        starts,
        fn_output_signature=[tf.TensorSpec([rows, *x.shape[1:]], x.dtype) for x in program.outputs],
        parallel_iterations=1,  # several at once would need the memory of several
    )
    # From [pieces, rows, ...] to [pieces * rows, ...], without what fills up the last one.
    return [
        tf.reshape(x, tf.concat([[tf.size(starts) * rows], tf.shape(x)[2:]], 0))[:count]
        for x in pieces
    ]


# -- exporters

Metrics = Mapping[str, Any]


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
        eval_result: Metrics,
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
        exports_to_keep: Optional[int] = 5,
    ) -> None:
        """Creates an exporter.

        Args:
          name: the name of the export directory.
          serving_input_receiver_fn: returns a ServingInputReceiver.
          assets_extra: files to add, by their paths within "assets.extra".
          as_text: whether to write text instead of binary protobufs.
          exports_to_keep: the number of exports to keep, or None for all.

        Raises:
          TypeError: a function is not callable.
          ValueError: the name is empty, or `exports_to_keep` is not positive.
        """
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

    def export(
        self,
        estimator: Estimator,
        export_path: str,
        checkpoint_path: str,
        eval_result: Metrics,
        is_the_final_export: bool,
    ) -> Optional[bytes]:
        """Exports the model, if this evaluation calls for it; see `Exporter.export`."""
        if not self._is_due(estimator, export_path, eval_result, is_the_final_export):
            return None
        path = estimator.export_saved_model(
            export_path,
            self._receiver_fn,
            assets_extra=self._assets_extra,
            as_text=self._as_text,
            checkpoint_path=checkpoint_path,
        )
        # After the new one has been written: if that fails, the old ones are still there.
        self._remove_old(export_path)
        return path

    def _is_due(self, estimator: Estimator, path: str, metrics: Metrics, ended: bool) -> bool:
        """Returns whether an evaluation calls for an export."""
        return True

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
        super().__init__(name, serving_input_receiver_fn, assets_extra, as_text, None)

    def _is_due(self, estimator: Estimator, path: str, metrics: Metrics, ended: bool) -> bool:
        return ended


MODES = ("min", "max")


def is_better(
    value: float, best: Optional[float], mode: str = "min", min_delta: float = 0.0
) -> bool:
    """Returns whether a value of a metric is better than the best one before it.

    NaN is never better, and any number is better than NaN.

    Args:
      value: the value.
      best: the best one before it, or None if there is none.
      mode: "min" if less is better, or "max".
      min_delta: the difference that is no improvement yet.
    """
    # As no comparison with NaN is true, one would stay the best.
    if math.isnan(value) or best is None or math.isnan(best):
        return not math.isnan(value)
    return (best - value if mode == "min" else value - best) > min_delta


def _loss_smaller(best_eval_result: Metrics, current_eval_result: Metrics) -> bool:
    for result in (best_eval_result, current_eval_result):
        if not result or "loss" not in result:
            raise ValueError(
                f"BestExporter compares losses, but the evaluation gave {result!r}: give another "
                "compare_fn"
            )
    return is_better(current_eval_result["loss"], best_eval_result["loss"])


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
        self._best: Optional[Metrics] = None
        self._has_looked = False

    def _is_due(self, estimator: Estimator, path: str, metrics: Metrics, ended: bool) -> bool:
        # Event files contain this evaluation too; it must not be compared with itself.
        # Without the directory, nothing was exported: this one is, whatever came before.
        if not self._has_looked and self._pattern and tf.io.gfile.exists(path):
            self._best = self._best_before(estimator, int(metrics["global_step"]))
        # Once: after that, `_best` has what is to be beaten.
        self._has_looked = True
        better = self._best is None or self._compare_fn(
            best_eval_result=self._best, current_eval_result=metrics
        )
        if better:
            self._best = metrics
        return better

    def _best_before(self, estimator: Estimator, step: int) -> Optional[Metrics]:
        assert self._pattern is not None
        best: Optional[Metrics] = None
        pattern = os.path.join(escaped(estimator.model_dir), self._pattern)
        for known_step, metrics in scalars_of_steps(pattern).items():
            # A run that went on from an earlier checkpoint leaves evaluations of later steps
            # behind.
            if known_step < step and (
                best is None or self._compare_fn(best_eval_result=best, current_eval_result=metrics)
            ):
                best = metrics
        return best
