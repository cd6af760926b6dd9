"""A Saver that checks a checkpoint before it restores it."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Optional, Union

import numpy as np
import tensorflow as tf2
import tensorflow.compat.v1 as tf

from mesh_tensorflow._core.errors import did_you_mean, first_names, reason, slip
from mesh_tensorflow._core.shape import Shape
from mesh_tensorflow._mesh.devices import host_cpu
from mesh_tensorflow._mesh.variables import checkpoint_files
from mesh_tensorflow._mesh.variables.checkpoint_files import (
    Faults,
    ShardedVariable,
    ShardSaverBuilder,
    faults,
    faults_apart,
    number_of_files,
)
from mesh_tensorflow._mesh.variables.given_values import (
    PartFunction,
    fitting_part,
    given_parts,
    given_shape,
)
from mesh_tensorflow._mesh.variables.storage import MasterVariable, Piece, WholeStorage
from mesh_tensorflow._mesh.variables.store import StoredMaster, whole_form
from mesh_tensorflow._paths import readable
from mesh_tensorflow._progress import Progress
from mesh_tensorflow.optimize._base import is_slot, weights_of

__all__ = [
    "CheckpointError",
    "Resize",
    "Saver",
    "check_checkpoint",
    "choose_initial",
    "fault_of",
    "init_from_checkpoint",
    "last_good",
    "load_global_step",
]

# The maximum number of variable names in an error message.
_LONGEST_LIST = 12
# Errors of a session that concern the program, not files; a monitored session recovers from some of
# them.
_OF_THE_PROGRAM = (
    tf.errors.AbortedError,
    tf.errors.CancelledError,
    tf.errors.DeadlineExceededError,
    tf.errors.FailedPreconditionError,
    tf.errors.InvalidArgumentError,
    tf.errors.UnavailableError,
)
# Errors of reading files; that of another process is unknown to TensorFlow.
_OF_FILES = (
    tf.errors.DataLossError,
    tf.errors.NotFoundError,
    tf.errors.OutOfRangeError,
    tf.errors.UnknownError,
)

# What follows the path of a checkpoint in the names of its files.
_OF_A_FILE = re.compile(r"\.(index|meta|data-\d+-of-\d+)$")

# Variables, or other objects that can be saved; or a dictionary of them by name.
VarList = Union[Mapping[str, Any], Iterable[Any]]


class CheckpointError(ValueError):
    """A checkpoint is missing, damaged, or from another program."""


class Wanted(NamedTuple):
    """The shape and dtype of a variable that a program restores."""

    shape: tuple[int, ...]
    dtype: tf.DType


class Saver(tf.train.Saver):
    """A tf.train.Saver that changes no variable unless it can restore all of them.

    It first compares the names, shapes and dtypes in the checkpoint with those of the program, and
    reports the differences. Variables of programs of `mtf.pjrt.in_session` in several processes are
    written and read part by part, by the processes that have the parts.

    >>> w = mtf.get_variable(mesh, "w", "d:2", initializer=tf.ones_initializer())
    >>> master = w.operation.get_master()
    >>> saver = mtf.checkpoint.Saver([master])
    >>> path = saver.save(None, "model.ckpt", global_step=10)  # in eager code, without a session
    >>> _ = master.assign([5.0, 5.0])
    >>> saver.restore(None, path)
    >>> print(path, master.numpy())
    model.ckpt-10 [1. 1.]
    """

    def __init__(self, var_list: Optional[VarList] = None, **kwargs: object):
        """Creates a saver.

        Args:
          var_list: as for tf.train.Saver: a list of variables, or a dictionary of them by name in
            the checkpoint. If None, all global variables.
          **kwargs: further arguments of tf.train.Saver.

        Raises:
          ValueError: `sharded` is true, in eager code.
        """
        if kwargs.get("sharded") and tf.executing_eagerly():
            raise ValueError(
                "Saver: sharded=True writes a file for each device of a session, and eager code "
                "has none. Leave it out: one file has all variables, also those in slices"
            )
        if var_list is None and not kwargs.get("defer_build"):
            # What tf.train.Saver would choose: `_wanted` needs it before the base class does.
            var_list = tf.global_variables() + tf.get_collection(tf.GraphKeys.SAVEABLE_OBJECTS)
        self._wanted = _wanted(var_list)
        self._apart: dict[str, ShardedVariable] = {}
        if kwargs.get("builder") is None:
            version: Any = kwargs.get("write_version", tf.train.SaverDef.V2)
            kwargs["builder"] = ShardSaverBuilder(version)
        builder = kwargs["builder"]
        if isinstance(builder, ShardSaverBuilder):
            self._apart = builder.apart
        # Last: it calls `build`, which asks for `_wanted`, and where the builder fills `_apart`.
        super().__init__(var_list, **kwargs)

    def build(self) -> None:
        """Creates the operations, if that was deferred."""
        if not self._wanted:
            self._wanted = _wanted(tf.global_variables())
        super().build()

    def restore(self, sess: tf.Session, save_path: str) -> None:
        """Restores all variables, or none.

        Args:
          sess: a session.
          save_path: the path of a checkpoint, as returned by `save`.

        Raises:
          CheckpointError: there is no such checkpoint, it cannot be read, or variables are missing
            in it or have other shapes or dtypes. The message names them.
        """
        save_path = _path(save_path)
        # All data is read before any variable is changed: reads may fail individually, and NaN is
        # reported.
        self._check(save_path)
        try:
            super().restore(sess, readable(save_path))
        except _OF_FILES as e:
            # If files have gone since, or changed, the check tells which; the error does not.
            self._check(save_path)
            raise CheckpointError(f"checkpoint {save_path} could not be read: {reason(e)}") from e

    def _check(self, path: str) -> None:
        check_checkpoint(path, self._wanted)
        _report(path, self._wanted, self.faults(path))

    def faults(self, path: str) -> list[Faults]:
        """Returns what is wrong with the data of a checkpoint of these variables.

        Args:
          path: the path of a checkpoint that has all of them.
        """
        # The processes that have parts read what they are going to restore.
        apart = faults_apart(path, self._apart)
        together = {name: w for name, w in self._wanted.items() if name not in self._apart}
        return [*apart, _faults(path, together)]

    def save(
        self,
        sess: tf.Session,
        save_path: str,
        global_step: Union[int, tf.Tensor, None] = None,
        **kwargs: object,
    ) -> Optional[str]:
        """Saves all variables, or none.

        Args:
          sess: a session.
          save_path: the path of the checkpoint, without the step.
          global_step: a number or tf.Tensor that is appended to the path.
          **kwargs: further arguments of tf.train.Saver.save.

        Returns:
          The path of the checkpoint; None if this process writes nothing.

        Raises:
          CheckpointError: it could not be written, for example because the disk is full. Its
            incomplete files are removed.
        """
        if global_step is not None and not isinstance(global_step, (int, np.integer)):
            # Evaluated here and not by TensorFlow, since the path is needed if the save fails.
            global_step = tf.train.global_step(sess, global_step)
        try:
            return super().save(sess, save_path, global_step=global_step, **kwargs)
        except (tf.errors.OpError, OSError) as e:
            if isinstance(e, _OF_THE_PROGRAM):
                raise
            path = os.fspath(save_path) + ("" if global_step is None else f"-{global_step}")
            _remove_unfinished(path)
            raise CheckpointError(
                f"checkpoint {path} could not be written: {reason(e)}. The checkpoints before it "
                f"are as they were.{_others(path, 'Checkpoints')}. Make room there and see that "
                "this user may write there, or save elsewhere; training goes on from the last one"
            ) from e

    def recover_last_checkpoints(self, checkpoint_paths: Sequence[str]) -> None:
        """Goes on with a list of the checkpoints that are kept; leaves out what is gone.

        Args:
          checkpoint_paths: the paths.
        """
        indices = {path: f"{path}.index" for path in checkpoint_paths}
        existing = {path: index for path, index in indices.items() if tf.io.gfile.exists(index)}
        # Not by TensorFlow's own function of times, which takes paths for patterns.
        self.set_last_checkpoints_with_time(
            [(path, tf.io.gfile.stat(index).mtime_nsec / 1e9) for path, index in existing.items()]
        )

    def _MaybeDeleteOldCheckpoints(self, meta_graph_suffix: str = "meta") -> None:
        """Removes old checkpoints by their names; TensorFlow takes the names for patterns."""
        while self._checkpoints_to_be_deleted:
            path, time = self._checkpoints_to_be_deleted.pop(0)
            # As in TensorFlow: `keep_checkpoint_every_n_hours` makes the first of so many hours
            # stay.
            if time > self._next_checkpoint_time:
                self._next_checkpoint_time += self.saver_def.keep_checkpoint_every_n_hours * 3600
                continue
            try:
                checkpoint_files.remove(path)
            except tf.errors.OpError as e:
                # A checkpoint that stays takes room, which is no reason to end the training.
                tf.logging.warning("%s is of no use, but stays: %s", path, reason(e))


def _path(given: object) -> str:
    """Returns the path to restore; raises a CheckpointError if it is not a path."""
    if given is None:
        raise CheckpointError(
            "restore: save_path is None: tf.train.latest_checkpoint returns None where there is "
            "none yet. Initialize the variables in that case, or name a checkpoint"
        )
    if not isinstance(given, (str, os.PathLike)):
        raise CheckpointError(
            f"restore: save_path should be a path, as `save` returns it, but is {given!r}"
        )
    if not os.fspath(given):
        raise CheckpointError(
            "restore: save_path is '', the empty string: name a checkpoint, such as "
            "'model.ckpt-1000' in its directory, or see what tf.train.latest_checkpoint returns"
        )
    return os.fspath(given)


def _wanted(var_list: Optional[VarList]) -> dict[str, Wanted]:
    """Returns the shape and dtype of each variable, by name in the checkpoint."""
    if isinstance(var_list, Mapping):
        named: Iterable = var_list.items()
    else:
        named = ((_saved_name(v), v) for v in var_list or ())
    return {
        name: Wanted(tuple(v.shape.as_list()), v.dtype.base_dtype)
        for name, v in named
        # A part of a partitioned variable is saved under the name of the whole, as a slice of it.
        if name and hasattr(v, "shape") and not getattr(v, "_save_slice_info", None)
    }


def _saved_name(v: tf.Variable) -> Optional[str]:
    """Returns the name of a variable in checkpoints; eager variables have no tf operation."""
    return getattr(getattr(v, "op", None), "name", None) or getattr(v, "_shared_name", None)


def init_from_checkpoint(
    path: str,
    variables: Union[Mapping[str, Any], Iterable[tuple[str, Any]]],
    *,
    resize: bool = False,
) -> None:
    """Makes variables be initialized with the values in a checkpoint.

    Like `tf.train.init_from_checkpoint`, but also for variables with slices in several processes.
    Call it before they are initialized; in eager code, they get the values at once.

    >>> old = mtf.get_variable(mesh, "old", "d:2", initializer=tf.ones_initializer())
    >>> path = mtf.checkpoint.Saver([old.operation.get_master()]).save(None, "model.ckpt")
    >>> new = mtf.get_variable(mesh, "new", "d:2", initializer=tf.zeros_initializer())
    >>> mtf.checkpoint.init_from_checkpoint(path, {"old": new.operation.get_master()})
    >>> print(new.numpy())
    [1. 1.]

    Args:
      path: the path of a checkpoint, as returned by `Saver.save`; or a directory, for its latest
        checkpoint.
      variables: tf variables by name in the checkpoint; or pairs of a name there and a variable,
        where several variables may have the value of one name.
      resize: whether a variable may have other sizes than in the checkpoint. Then it gets the
        values there from its beginning on, as far as both reach, and keeps the others of its own.

    Raises:
      ValueError: there is no checkpoint, it lacks a variable, or a variable has another shape.
    """
    path = checkpoint_files.find(path, "init_from_checkpoint")
    pairs = list(variables.items() if isinstance(variables, Mapping) else variables)
    while pairs:
        # Each name has one variable in a turn, as TensorFlow's function has it.
        turn: dict[str, Any] = {}
        later = [(name, v) for name, v in pairs if turn.setdefault(name, v) is not v]
        _init_from_names(path, turn, resize)
        pairs = later


def _init_from_names(path: str, variables: Mapping[str, Any], resize: bool) -> None:
    """Makes variables be initialized with values in a checkpoint; see `init_from_checkpoint`."""
    expected, other = _wanted(variables), {}
    if resize:
        shapes = checkpoint_files.open_reader(path).get_variable_to_shape_map()
        sizes = {n: tuple(shapes[n]) for n in variables if n in shapes}
        other = {n: sizes[n] for n in sizes if sizes[n] != expected[n].shape}
        expected.update({n: expected[n]._replace(shape=saved) for n, saved in other.items()})
    # In eager code values are assigned right away, so damage has to be found before the first one.
    check_checkpoint(path, expected, read=tf.executing_eagerly())
    if tf.executing_eagerly():  # they are initialized already
        reader = checkpoint_files.open_reader(path)
        values = {name: reader.get_tensor(name) for name in variables}  # all, before any is changed
        for name, variable in variables.items():
            value = values[name]
            variable.assign(_laid_over(variable.value(), value) if name in other else value)
        return
    # TensorFlow's function allows a variable only one part, and the shape of the file.
    one = {n: v for n, v in variables.items() if n not in other and not _is_in_parts(v)}
    if one:
        tf.train.init_from_checkpoint(readable(path), one)
    for name in [n for n in variables if n not in one]:
        variable = variables[name]
        with tf.device("/device:CPU:0"), tf.name_scope("init_from_checkpoint"):
            [value] = tf.raw_ops.RestoreV2(
                prefix=readable(path),
                tensor_names=[name],
                shape_and_slices=[""],
                dtypes=[variable.dtype.base_dtype],
            )
            value = tf.ensure_shape(value, expected[name].shape)
            if name in other:
                value = _laid_over(variable.initial_value, value)
        _begin_with(variable, value)


def _is_in_parts(variable: Any) -> bool:
    """Returns whether several parts of a variable are saved, each by its process."""
    return len(variable._gather_saveables_for_checkpoint()) > 1


def _begin_with(variable: Any, value: tf.Tensor) -> None:
    """Makes a variable of a graph be initialized with a value."""
    # As the initial value, the whole is cut to parts by the initializer of slices.
    variable._initial_value = value
    if not _is_in_parts(variable):
        variable._initializer_op = variable.assign(value, read_value=False)


def _laid_over(below: Any, value: Any) -> tf.Tensor:
    """Returns a tensor with another one's values from its beginning on, as far as both reach."""
    below, value = tf.convert_to_tensor(below), tf.convert_to_tensor(value)
    common = [min(sizes) for sizes in zip(below.shape.as_list(), value.shape.as_list())]
    added = [[0, size - n] for size, n in zip(below.shape.as_list(), common)]
    inside = tf.pad(tf.ones(common, tf.bool), added)
    return tf2.where(inside, tf.pad(value[tuple(slice(n) for n in common)], added), below)


class Resize(NamedTuple):
    """Which dimensions of variables may be larger in a model than in the checkpoint it begins with.

    >>> mtf.checkpoint.Resize.of("my program", "vocab,length")
    Resize(names=('vocab', 'length'), smaller=False)

    Attributes:
      names: the names of these dimensions.
      smaller: whether they may be smaller, too, so that the last values there are left out.
    """

    names: tuple[str, ...]
    smaller: bool = False

    @classmethod
    def of(
        cls, what: str, names: Union[str, Sequence[str]], smaller: bool = False
    ) -> Optional[Resize]:
        """Returns the Resize for names of dimensions; None if there are none.

        Args:
          what: what asks for it, for errors.
          names: names, or a string of them with commas between.
          smaller: whether these dimensions may be smaller in the model, too.

        Raises:
          ValueError: a name is no string or empty, or `smaller` is given without names.
        """
        patterns = names.split(",") if isinstance(names, str) and names else list(names)
        if not all(isinstance(name, str) and name for name in patterns):
            raise ValueError(
                f"{what}: what may be resized are names of dimensions, such as 'vocab', but is "
                f"{names!r}"
            )
        if smaller and not patterns:
            raise ValueError(
                f"{what}: dimensions may be smaller than in the checkpoint, but none is named as "
                "one that may be resized"
            )
        return cls(tuple(patterns), smaller) if patterns else None

    def refusal(self, there: Sequence[int], here: Sequence[int], dims: Sequence[str]) -> str:
        """Returns why a variable may not have these sizes; "" if it may.

        Args:
          there: its shape in the checkpoint.
          here: its shape in the model.
          dims: the names of its dimensions.
        """
        if len(there) != len(here) or len(dims) != len(here):
            return "these are other dimensions"
        for old, new, name in zip(there, here, dims):
            if old != new and name not in self.names:
                return f"{name} is none of the dimensions that may be resized"
            if new < old and not self.smaller:
                return f"the last {old - new} of {name} would be lost, which has to be asked for"
        return ""


class Assignments:
    """Assigns whole values to tf variables of a graph, in a session.

    A graph keeps all that is added to it: one operation of a variable is for all calls.
    """

    def __init__(self) -> None:
        """Creates it without operations."""
        self._made: dict[str, tuple[tf.Tensor, tf.Operation]] = {}

    def run(
        self,
        session: tf.Session,
        variables: Mapping[str, tf.Variable],
        values: Mapping[str, np.ndarray],
    ) -> None:
        """Assigns values to those of the variables that have one.

        Args:
          session: a session of the graph.
          variables: the tf variables, by name.
          values: their whole values, by name; those of other names are ignored.
        """
        named = [name for name in variables if name in values]
        with session.graph.as_default():
            for name in named:
                if name not in self._made:
                    v = variables[name]
                    fed = tf.placeholder(v.dtype.base_dtype, v.shape)
                    self._made[name] = fed, v.assign(fed, read_value=False)
        assignments = [(*self._made[name], values[name]) for name in named]
        session.run([op for _, op, _ in assignments], {fed: value for fed, _, value in assignments})


def init_from_values(
    values: Mapping[str, Any],
    variables: Iterable[tuple[str, Any]],
    progress: Optional[Progress] = None,
) -> None:
    """Makes variables be initialized with given values, of which each part is read by itself.

    One part is read when that before it is assigned, so that no more than one is in memory beside
    the variables. In eager code they get the values at once.

    Args:
      values: arrays by name, as `VariableStore.begin_with` takes them.
      variables: pairs of a name there, and a tf variable. One of another shape gets the values
        from its beginning on, as far as both reach, and keeps the others of its own.
      progress: counts the parts that are read.

    Raises:
      ValueError: an element is no number of the variable's dtype.
    """
    # What a process has read last: the next part there waits for it, and for no other process.
    last: dict[str, list[tf.Operation]] = {}
    for name, variable in variables:
        part = given_parts(values, name)
        if list(given_shape(values, name)) != variable.shape.as_list():
            _lay_over(variable, np.asarray(values[name]))
            continue
        if progress is not None:
            part = _counted(part, progress)
        if tf.executing_eagerly():
            for piece in _pieces(variable):
                piece.assign(_value_of(variable, part, piece.begin, piece.sizes))
            continue
        by_parts: dict[str, list[tf.Operation]] = {}
        for piece in _pieces(variable):
            host = host_cpu(piece.device or "")
            with tf.control_dependencies(last.get(host, [])), tf.device(host):
                done = piece.assign(_read_later(variable, part, piece.begin, piece.sizes))
            last[host] = [done]
            by_parts.setdefault(host, []).append(done)
        with tf.device("/device:CPU:0"):
            sizes = variable.shape.as_list()
            whole = _read_later(variable, part, [0] * len(sizes), sizes)
        groups = {host: tf.group(*ops) for host, ops in by_parts.items()}
        if isinstance(variable, MasterVariable):
            variable.begin_by_parts(whole, groups)
        else:
            variable._initial_value, variable._initializer_op = whole, tf.group(*groups.values())


def _lay_over(variable: Any, value: np.ndarray) -> None:
    """Makes a variable of other sizes begin with an array, as far as both reach."""
    if tf.executing_eagerly():
        variable.assign(_laid_over(variable.value(), value))
        return
    read = tf.py_function(lambda: value, [], variable.dtype.base_dtype)
    whole = _laid_over(variable.initial_value, tf.ensure_shape(read, value.shape))
    _begin_with(variable, whole)


def _counted(part: PartFunction, progress: Progress) -> PartFunction:
    def counted(index: tuple[slice, ...]) -> np.ndarray:
        progress.update()
        return part(index)

    return counted


def _pieces(variable: Any) -> list[Piece]:
    is_stored = isinstance(variable, (MasterVariable, StoredMaster))
    return (variable._at_storage() if is_stored else WholeStorage(variable)).pieces()


def _value_of(
    variable: Any, part: PartFunction, begin: Sequence[int], sizes: Sequence[int]
) -> tf.Tensor:
    dims = [(f"axis_{i}", n) for i, n in enumerate(variable.shape.as_list())]
    form = whole_form(Shape(dims), variable.dtype.base_dtype)
    return fitting_part(variable.name.partition(":")[0], form, part, begin, sizes)


def _read_later(
    variable: Any, part: PartFunction, begin: Sequence[int], sizes: Sequence[int]
) -> tf.Tensor:
    """Returns a tensor of a graph that is read when a session runs it."""
    value = tf.py_function(
        lambda: _value_of(variable, part, begin, sizes), [], variable.dtype.base_dtype
    )
    return tf.ensure_shape(value, sizes)


def choose_initial(
    what: str,
    path: str,
    variables: Mapping[str, Any],
    trained: Iterable[str],
    strict: bool = False,
    hint: str = "",
    *,
    resize: Optional[Resize] = None,
    dims: Mapping[str, Sequence[str]] = MappingProxyType({}),
    values: Optional[Mapping[str, Any]] = None,
    say: Optional[Callable[[str], None]] = None,
) -> dict[str, Any]:
    """Returns the variables that are in a checkpoint, to begin with their values there.

    What is only in the checkpoint, and what is only in the model, is logged: a model that gets a
    part of its weights trains all the same, and worse. So is what is resized.

    >>> old = mtf.get_variable(mesh, "old", "d:2").operation.get_master()
    >>> path = mtf.checkpoint.Saver([old]).save(None, "model.ckpt")
    >>> mtf.checkpoint.choose_initial("my program", path, {"old": old}, ["old"]).keys()
    dict_keys(['old'])

    Args:
      what: what asks for it, for messages.
      path: the path of a checkpoint.
      variables: the variables of the model, by their names in the checkpoint.
      trained: the names there of those that are trained.
      strict: whether a trained variable that the checkpoint lacks, or a weight there that the model
        lacks, is an error. Slots of optimizers, whose names begin with those of weights, and the
        global step may be on one side only.
      hint: what to do about an error.
      resize: which dimensions may have another size than in the checkpoint; slots that do are left
        out. Pass `resize=True` to `init_from_checkpoint`, too.
      dims: the names of the dimensions of each variable, by its name in the checkpoint, for
        `resize`.
      values: arrays by name, in place of a checkpoint; then `path` says what they are.
      say: is called with what is logged, for users who see no logs; or None.

    Raises:
      ValueError: the checkpoint has no trained variable of the model, or one of another shape; or
        `strict`.
    """
    if values is None:
        saved = checkpoint_files.open_reader(path).get_variable_to_shape_map()
    else:
        saved = {name: given_shape(values, name) for name in values}
    names = set(trained)
    trained = [name for name in variables if name in names]
    in_both = {name: v for name, v in variables.items() if name in saved}
    shapes = {name: list(v.shape) for name, v in variables.items()}
    if resize is not None:
        _check_dims(what, resize, dims)
    differs, resized, slots = [], {}, []
    for name, v in in_both.items():
        old, shape = list(saved[name]), shapes[name]
        if old == shape:
            continue
        why = "" if resize is None else resize.refusal(old, shape, dims.get(name, ()))
        if resize is not None and name not in names and is_slot(name, shapes):
            slots.append(name)
        elif resize is None or why:
            differs.append(
                f"{name} has shape {old}, but {_saved_name(v) or name} in the model has {shape}"
                f"{why and ': '}{why}"
            )
        else:
            resized[name] = f"{name} {old} to {shape}"
    if differs:
        more = f" ({len(differs) - 1} more differ)" if differs[1:] else ""
        raise ValueError(f"{what} {path}: {differs[0]}{more}{hint and '; '}{hint}")
    for name in slots:
        del in_both[name]
    lacking = [name for name in variables if name not in saved]
    # Slots say nothing about which model a checkpoint is of.
    unused = [name for name in sorted(weights_of(saved)) if name not in variables]
    lists = (
        _listed("As they are there", [n for n in in_both if resized and n not in resized])
        + _listed("Resized", list(resized.values()))
        + _listed("Begun anew, as slots of other sizes", slots)
        + _listed("In the model only", lacking)
        + _listed("In the checkpoint only", unused)
    )
    if not any(name in saved for name in trained):
        raise ValueError(
            f"{what} {path}: none of the model's weights is there, so that training would begin "
            f"with random ones{hint and '; '}{hint}.{lists}"
        )
    if strict and (unused or any(name not in saved for name in trained)):
        raise ValueError(
            f"{what} {path}: the checkpoint has other weights than the model, and strict asks for "
            f"the same{hint and '; '}{hint}.{lists}"
        )
    line = f"Initializing {len(in_both)} variables from {path}{lists}"
    tf.logging.info("%s", line)
    if say is not None:
        say(line)
    return in_both


def _check_dims(what: str, resize: Resize, dims: Mapping[str, Sequence[str]]) -> None:
    """Raises ValueError for a name that no variable has, which would have no effect."""
    all_names = {dim for names in dims.values() for dim in names}
    for name in resize.names:
        if name not in all_names:
            raise ValueError(
                f"{what}: {name!r} is to be resized, but no variable has this dimension"
                f"{did_you_mean(name, all_names)}"
            )


def check_checkpoint(
    path: str,
    wanted: VarList,
    read: Union[bool, Mapping[str, Sequence[str]]] = False,
    values: Optional[Mapping[str, Any]] = None,
) -> None:
    """Checks that a checkpoint has the variables of a program.

    >>> w = mtf.get_variable(mesh, "w", "d:2").operation.get_master()
    >>> path = mtf.checkpoint.Saver([w]).save(None, "model.ckpt")
    >>> bias = mtf.get_variable(mesh, "bias", "d:2").operation.get_master()
    >>> mtf.checkpoint.check_checkpoint(path, [w, bias])
    Traceback (most recent call last):
    mesh_tensorflow.checkpoint.CheckpointError: checkpoint model.ckpt is not of this program...
      Missing in the file (1):
        bias [2]
    ...

    Args:
      path: the path of a checkpoint, as returned by `Saver.save`.
      wanted: variables, or a dictionary of them by name in the checkpoint.
      read: whether to also read the data, which finds truncated and damaged files; or the parts
        of each variable that are read, as checkpoints write them, by name.
      values: arrays by name, in place of a checkpoint; then `path` says what they are, and they
        are not read.

    Raises:
      CheckpointError: it does not; the message names the files and variables.
    """
    if not isinstance(wanted, Mapping) or not all(isinstance(w, Wanted) for w in wanted.values()):
        wanted = _wanted(wanted)
    if values is not None:
        # In any dtype, as they become numbers of the variable's when they are assigned.
        dtypes = {name: w.dtype for name, w in wanted.items()}
        given = {n: Wanted(given_shape(values, n), dtypes.get(n, tf.float32)) for n in values}
        _check_names(path, wanted, given)
        return
    path = os.fspath(path)
    # What costs most comes last: names are in the index, and the data, which is read, may be large.
    _check_names(path, wanted, _saved(path))
    _check_files(path)
    if read:
        _report(path, wanted, [_faults(path, wanted, None if read is True else read)])


def _saved(path: str) -> dict[str, Wanted]:
    """Returns the shape and dtype of each variable of a checkpoint, by name, from its index."""
    _check_is_prefix(path)
    if not checkpoint_files.exists(path):
        raise CheckpointError(f"there is no checkpoint {path}.{_others(path, 'Checkpoints')}")
    try:
        reader = checkpoint_files.open_reader(path)
        shapes, dtypes = reader.get_variable_to_shape_map(), reader.get_variable_to_dtype_map()
    except (tf.errors.OpError, ValueError, RuntimeError) as e:
        raise CheckpointError(f"{path}.index cannot be read: {reason(e)}.{_others(path)}") from e
    return {name: Wanted(tuple(shapes[name]), dtypes[name]) for name in shapes}


def fault_of(path: str, nan_too: bool = True) -> str:
    """Returns what is wrong with the files of a checkpoint, in a sentence; "" if it is whole.

    >>> w = mtf.get_variable(mesh, "w", "d:2", initializer=tf.ones_initializer())
    >>> path = mtf.checkpoint.Saver([w.operation.get_master()]).save(None, "model.ckpt-1")
    >>> mtf.checkpoint.fault_of(path)
    ''
    >>> with open("model.ckpt-1.data-00000-of-00001", "r+b") as file:
    ...     _ = file.truncate(3)
    >>> "damaged or cut short" in mtf.checkpoint.fault_of(path)
    True

    Args:
      path: the path of a checkpoint, all of whose data are read.
      nan_too: whether values that are not numbers are wrong.
    """
    try:
        saved = _saved(path)
        _check_files(path)
        faulty = _faults(path, saved)
        _report_damage(path, [faulty])
    except CheckpointError as e:
        return str(e)
    if nan_too and faulty.not_numbers:
        return f"checkpoint {path} has values that are not numbers (NaN) in {faulty.not_numbers[0]}"
    return ""


def last_good(directory: str) -> Optional[str]:
    """Returns the checkpoint of most steps in a directory that is whole, or None.

    The files are looked at themselves: what `checkpoint`, the list there, says does not count.
    Checkpoints that are cut or damaged, or that have NaN, are left out.

    >>> w = mtf.get_variable(mesh, "w", "d:2", initializer=tf.ones_initializer())
    >>> saver = mtf.checkpoint.Saver([w.operation.get_master()])
    >>> for step in (1, 2):
    ...     path = saver.save(None, "run/model.ckpt", global_step=step)
    >>> with open("run/model.ckpt-2.data-00000-of-00001", "r+b") as file:
    ...     _ = file.truncate(3)
    >>> mtf.checkpoint.last_good("run")
    'run/model.ckpt-1'

    Args:
      directory: the directory of checkpoints with names such as model.ckpt-1000.
    """
    # From the last one, since each one that is looked at is read as a whole.
    return next(
        (p for p in reversed(checkpoint_files.numbered(directory)) if not fault_of(p)), None
    )


def load_global_step(path: Union[str, os.PathLike[str]]) -> int:
    """Returns the number of steps of a checkpoint; 0 if there is none, or it does not have it.

    >>> step = tf.Variable(7, name="global_step")
    >>> path = mtf.checkpoint.Saver([step]).save(None, "run/model.ckpt")
    >>> mtf.checkpoint.load_global_step("run")
    7

    Args:
      path: the path of a checkpoint, or a directory, for its latest checkpoint.
    """
    file = checkpoint_files.latest(path) or os.fspath(path)
    if not checkpoint_files.exists(file):
        return 0
    reader = checkpoint_files.open_reader(file)
    name = tf.GraphKeys.GLOBAL_STEP
    return int(reader.get_tensor(name)) if reader.has_tensor(name) else 0


def _check_is_prefix(path: str) -> None:
    """Raises an error that names the checkpoint, if the path is that of its folder or of a file."""
    if tf.io.gfile.isdir(path):
        last = checkpoint_files.latest(path)
        content = (
            f"the last checkpoint in it is {last}: restore that, as tf.train.latest_checkpoint("
            f"{path!r}) gives it"
            if last
            else "its file named 'checkpoint' lists no checkpoint. Give the path of one, such as "
            "model.ckpt-1000, without what follows the number"
        )
        raise CheckpointError(f"{path} is a directory, and {content}")
    prefix = _OF_A_FILE.sub("", path)
    # Only if there is such a checkpoint, since names of checkpoints may end in this way themselves.
    if prefix != path and tf.io.gfile.exists(f"{prefix}.index"):
        raise CheckpointError(f"{path} is one of the files of a checkpoint. Its path is {prefix}")


def _check_names(path: str, wanted: Mapping[str, Wanted], saved: Mapping[str, Wanted]) -> None:
    """Raises an error if a variable is missing or has another shape or dtype."""
    missing = [f"{n} {list(w.shape)}" for n, w in wanted.items() if n not in saved]
    differs = [
        f"{n}: {saved[n].dtype.name} {list(saved[n].shape)} in the file, "
        f"{w.dtype.name} {list(w.shape)} in the program"
        for n, w in wanted.items()
        if n in saved and saved[n] != w
    ]
    if not missing and not differs:
        return
    # Named too, since a variable that was renamed is missing by one name and extra by the other.
    extra = [f"{n} {list(saved[n].shape)}" for n in sorted(saved) if n not in wanted]
    raise CheckpointError(
        f"checkpoint {path} is not of this program; no variable was changed."
        + _listed("Missing in the file", missing)
        + _listed("Of another shape or dtype", differs)
        + _listed("In the file only", extra)
        + "\nBuild the program with the dimensions and names it was saved with, or restore the "
        "variables that match with mtf.checkpoint.Saver(var_list)"
    )


def _check_files(path: str) -> None:
    """Raises an error if a data file that the index counts is missing.

    Files with another count do not belong to it: they are left over from a save that was killed.
    """
    count = number_of_files(path)
    if count is None:
        raise CheckpointError(
            f"{path}.index cannot be read: it does not begin with the number of data files."
            f"{_others(path)}"
        )
    expected = [f"{os.path.basename(path)}.data-{i:05d}-of-{count:05d}" for i in range(count)]
    directory = os.path.dirname(path) or "."
    try:
        present = set(tf.io.gfile.listdir(directory))
    except tf.errors.PermissionDeniedError:  # then files can still be opened by their names
        present = {f for f in expected if tf.io.gfile.exists(os.path.join(directory, f))}
    missing = [name for name in expected if name not in present]
    if missing:
        raise CheckpointError(
            f"checkpoint {path} has not all of its data files: "
            f"{first_names(missing, _LONGEST_LIST)} {'is' if len(missing) == 1 else 'are'} "
            f"missing.{_others(path)}"
        )


def _remove_unfinished(path: str) -> None:
    """Removes the files of a failed save; a checkpoint with an index is complete."""
    directory, name = os.path.split(path)
    # Files that are not whole yet end in .tempstate and a number, or are in a folder _temp.
    unfinished = re.compile(re.escape(name) + r"(\.data-\d{5}-of-\d{5}|_temp)(\.tempstate\d*|/)?")
    with contextlib.suppress(tf.errors.OpError):  # no directory, or no permission to write
        if tf.io.gfile.exists(f"{path}.index"):
            return
        for file in tf.io.gfile.listdir(directory or "."):
            if unfinished.fullmatch(file):
                tf.io.gfile.rmtree(os.path.join(directory, file))


def _faults(
    path: str, wanted: Mapping[str, Wanted], parts: Optional[Mapping[str, Sequence[str]]] = None
) -> Faults:
    """Reads the parts of the variables, the wholes if None, and returns what is wrong with them."""
    return faults(
        path, {n: (w.dtype, [""] if parts is None else parts[n]) for n, w in wanted.items()}
    )


def _report_damage(path: str, found: Sequence[Faults]) -> None:
    """Raises an error if the data of a variable cannot be read."""
    damaged = list(dict.fromkeys(name for f in found for name in f.damaged))
    why = next((f.why for f in found if f.damaged), "")
    if damaged:
        raise CheckpointError(
            f"the data of checkpoint {path} is damaged or cut short ({why}); no variable was "
            f"changed.{_listed('Variables that cannot be read', damaged)}"
            f"\n  {_others(path).strip()}"
        )


def _report(path: str, wanted: Mapping[str, Wanted], found: Sequence[Faults]) -> None:
    """Raises an error if the data of a variable cannot be read; warns if it has NaN."""
    _report_damage(path, found)
    not_numbers = list(dict.fromkeys(name for f in found for name in f.not_numbers))
    if not_numbers:
        slip(
            f"checkpoint {path} has values that are not numbers (NaN) in {len(not_numbers)} of "
            f"{len(wanted)} variables: {first_names(not_numbers, _LONGEST_LIST)}. What is computed "
            f"with them will be NaN too; go on from one before.{_others(path)}"
        )


def _listed(title: str, lines: list[str]) -> str:
    if not lines:
        return ""
    more = [f"... and {len(lines) - _LONGEST_LIST} more"] if len(lines) > _LONGEST_LIST else []
    shown = "".join(f"\n    {line}" for line in lines[:_LONGEST_LIST] + more)
    return f"\n  {title} ({len(lines)}):{shown}"


def _others(path: str, title: str = "Other checkpoints") -> str:
    """Returns a sentence about the other files of the directory."""
    directory, name = os.path.split(path)
    try:
        files = tf.io.gfile.listdir(directory or ".")
    except tf.errors.NotFoundError:
        return f" There is no directory {directory!r}"
    except tf.errors.PermissionDeniedError:  # which would hide the error that this is a part of
        return f" Which others there are, {directory or '.'} does not let this user see"
    stems = [f[: -len(".index")] for f in files if f.endswith(".index")]
    # By their numbers, so that those that are shown, the last ones, are the newest.
    others = sorted((s for s in stems if s != name), key=checkpoint_files.by_step)
    if not others:
        return f" There is no other in {directory or '.'}"
    return f" {title} in {directory or '.'}: {', '.join(others[-_LONGEST_LIST:])}"
