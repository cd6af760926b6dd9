"""Engines: what carries out the steps of a run, in a session or by a step function of the user."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Optional, Protocol

import numpy as np
import tensorflow as tf2
import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow._mesh.random_values import keys_by_step
from mesh_tensorflow._mesh.variables import checkpoint_files
from mesh_tensorflow._mesh.variables.checkpoint_files import Faults, ShardSaverBuilder, faults
from mesh_tensorflow._quiet import not_advised
from mesh_tensorflow._stop_signals import StopSignals
from mesh_tensorflow._watching import told_to_user
from mesh_tensorflow.checkpoint import Assignments, CheckpointError, Saver, check_checkpoint
from mesh_tensorflow.estimator.export import any_batch
from mesh_tensorflow.train._data import Batch, Features, rows_of, with_dtype
from mesh_tensorflow.train._model import (
    Afters,
    LoweredModel,
    Means,
    Model,
    check_names,
)
from mesh_tensorflow.train._placing import Agreement, Choosing, Setup
from mesh_tensorflow.train._saving import Initial, InThisThread

CHECKPOINT_NAME = "model.ckpt"


class Engine(Protocol):
    """What carries out steps, evaluations and checkpoints, in a single process by default.

    Attributes:
      lowered: the lowered training program, once there is one; None if others lower it.
      layout: the layout rules as a string, once they are known; None if others know them.
    """

    lowered: Optional[LoweredModel] = None
    layout: Optional[str] = None

    def prepare(self, batch: Batch, checkpoint: Optional[str], initial: Optional[Initial]) -> None:
        """Gets ready for batches like this one, with new variables or those of a checkpoint.

        New ones begin with the weights of `initial`, if there are any.
        """

    def train(self, batch: Batch) -> dict[str, float]:
        """Does a step; returns the loss and the metrics."""

    def evaluate(self, batches: Iterator[Batch]) -> dict[str, float]:
        """Returns the means of the loss and the metrics of some batches."""

    def save(
        self, directory: str, step: int, when_read: Optional[Callable[[], None]] = None
    ) -> tuple[str, list[str]]:
        """Writes a checkpoint; returns its path, and what in it is not a number, or infinite.

        It may call `when_read`, if it is not None in the first call either, before it writes: from
        then on, variables may change.
        """

    def stops(self, step: int, wanted: bool, signals: StopSignals) -> bool:
        """Returns whether to stop after this step; notes the signals of other processes."""
        return wanted

    def settle(self, step: int) -> None:
        """Waits at the end of a run until other processes are done with it, and have saved."""
        return

    def finish(self) -> None:
        """Waits for other processes before this one ends."""
        return

    def values(self) -> dict[str, np.ndarray]:
        """Returns the whole values of all variables, by name."""

    @property
    def trained(self) -> set[str]:
        """The names of trained variables."""

    def close(self) -> None:
        """Frees what it holds."""
        return


def wrong_values(path: str, found: Sequence[Faults], weights: Collection[str]) -> list[str]:
    """Returns the variables of a checkpoint that no run can go on from.

    Args:
      path: the path of the checkpoint.
      found: what is wrong in it.
      weights: the names of trained variables; others may be infinite, such as a least loss so far.

    Raises:
      CheckpointError: it has been written, but cannot be read.
    """
    damaged = [(name, f.why) for f in found for name in f.damaged]
    if damaged:
        name, why = damaged[0]
        raise CheckpointError(
            f"checkpoint {path} was written, but {name} cannot be read from it: {why}. The one "
            "before it is as it was; see whether the disk is in order"
        )
    infinite = [name for f in found for name in f.infinite if name in weights]
    return sorted({*(name for f in found for name in f.not_numbers), *infinite})


# -- a model, in sessions


class _SessionProgram:
    """A program in a tf graph and a session of its own."""

    def __init__(
        self,
        setup: Setup,
        batch: Batch,
        training: bool,
        initial: Optional[Initial] = None,
        padded: bool = False,
    ):
        """Builds a program; `padded` ones take fewer rows than the batch has, too."""
        model, placing, features = setup.model, setup.placing, setup.features
        self.graph = tf.Graph()
        self._cluster = placing.cluster
        self._is_on_one_device = len(set(placing.devices)) == 1
        lowered: list[LoweredModel] = []
        with self.graph.as_default(), self.graph.container(setup.container):
            tf.set_random_seed(setup.seed)
            self.step = tf.train.create_global_step()
            # Read here, the step is that before the program increments it.
            before = tf.identity(self.step.read_value())
            free = [None] if padded else []
            feeds = [tf.placeholder(a.dtype, [*free, *a.shape[len(free) :]]) for a in batch]
            self._feeds = feeds
            self._first = [(array.shape, array.dtype) for array in batch]
            self._features = features

            def program(*tensors: tf.Tensor) -> dict[str, Any]:
                step = None if placing.pjrt else self.step  # else on the other devices
                lowered_step, outputs = model.build(
                    features, tensors, placing.make_impl, step, before, training
                )
                lowered.append(lowered_step)
                return outputs

            inputs = _padded(feeds, batch, features.names) if padded else feeds
            outputs = placing.run(program, inputs)
            self._outputs = outputs
            # The session has the variable, so it counts the step, once XLA's program is done.
            if placing.pjrt and training:
                with tf.control_dependencies([outputs["step"]]):
                    outputs["step"] = tf.identity(self.step.assign_add(1))
            self.lowered = lowered[-1]
            self.variables = {v.op.name: v for v in tf.global_variables()}
            # Before there is an operation that initializes all, which then takes these values.
            if initial is not None and training:
                self._begin_with(initial)
            elif initial is not None:
                named = initial._replace(names=model.averages_of(self.lowered.graph))
                named.load_all(self.own)
            self.agreement = None if self._cluster is None else Agreement(self._cluster)
            self.session = placing.session(self.graph)
            self._names = list(outputs)
            self._run = self._runner([outputs[n] for n in self._names], feeds)
            self._to_slices = self.lowered.lowering.copy_masters_to_slices()
            self._to_masters = self.lowered.lowering.copy_slices_to_masters()
            # Without initial values, a model may be larger than the memory of this process.
            self._restores_all = placing.pjrt
            self._initialize = tf.global_variables_initializer(), tf.local_variables_initializer()
            self._reads: dict[str, tf.Tensor] = {}
            self._assignments = Assignments()

    def _begin_with(self, initial: Initial) -> None:
        """Has the model's variables initialized with given weights, and averages with the same."""
        model = self.lowered
        averages = {w: self.variables[a] for w, a in model.averages.items() if a in self.variables}
        trained = {part.name for v in model.graph.trainable_variables for part in v.parts}
        dims = {p.name: p.shape.dimension_names for v in model.graph.all_variables for p in v.parts}
        initial.load(self.own, trained, averages, dims)

    @property
    def own(self) -> dict[str, Any]:
        """The model's variables by name, without slots and averages."""
        return {name: self.variables[name] for name in self.lowered.own if name in self.variables}

    def _runner(self, fetches: list[tf.Tensor], feeds: list[tf.Tensor]) -> Callable[..., list[Any]]:
        """Returns a function of the values of `feeds` that returns those of `fetches`."""
        if self._cluster is None:
            # A callable skips what session.run does with names and structures at each step.
            return self.session.make_callable(fetches, feeds)
        processes = self._cluster.processes

        def run(*values: np.ndarray) -> list[Any]:
            # A process that is lost is named.
            return processes.run(self.session, fetches, dict(zip(feeds, values)))

        return run

    def initialize(self, checkpoint: Optional[str] = None) -> None:
        """Gives variables their initial values, or in several processes those of a checkpoint.

        Where a checkpoint is going to be restored on devices of JAX, they are given none.
        """
        if self._cluster is not None and self.agreement is not None:
            # First, as the others wait in `initialize` for the chief, and read this afterwards.
            self.agreement.reset(self.session)
            with self.graph.as_default():
                self._cluster.processes.initialize(self.session, checkpoint)
            return
        if checkpoint is not None and self._restores_all:
            # No checkpoint has local variables, so these are initialized all the same.
            self.session.run(self._initialize[1])
            return
        self.session.run(self._initialize)
        # Programs compute with slices, to which masters with values of their own are copied.
        self.session.run(self._to_slices)

    def free(self) -> None:
        """Frees the variables, for which nothing can be run any more."""
        with self.graph.as_default():
            handles = [op for op in self.graph.get_operations() if op.type == "VarHandleOp"]
            freed = []
            for op in handles:
                with tf.device(op.device):
                    freed.append(tf.raw_ops.DestroyResourceOp(resource=op.outputs[0]))
        # Several processes have handles of what the first one has, and one frees it first.
        self.session.run(freed)

    def fitted(self, batch: Batch) -> Batch:
        """Returns a batch with the dtypes of the first one, to which a session would cut it.

        Raises:
          ValueError: it has other shapes than the first one, or values that a dtype lacks.
        """
        fitted = []
        for name, array, (shape, dtype) in zip(self._features.names, batch, self._first):
            if array.shape != shape:
                raise ValueError(
                    f"fit: a batch of the data has the shape {list(array.shape)}, but the first "
                    f"one had {list(shape)}. Without dims, all batches for training have to be of "
                    "one size: leave the last one of an epoch out, as batch(drop_remainder=True) "
                    "does, or give fit dims"
                )
            fitted.append(with_dtype(array, dtype, name))
        return fitted

    def run(self, batch: Batch) -> dict[str, list[Any]]:
        """Runs the program on a batch; returns the parts of each output."""
        outputs: dict[str, list[Any]] = {}
        with told_to_user([self.lowered.lowering.node_names]):
            values = self._run(*batch)
        for name, value in zip(self._names, values):
            # "loss/0" and "loss/1" are parts of one output; "step" is whole.
            outputs.setdefault(name.rpartition("/")[0] or name, []).append(value)
        return outputs

    def export(self, directory: str, rows_at_a_time: Optional[int]) -> None:
        """Writes a SavedModel of a padded program, whose outputs have the batch dimension.

        If `rows_at_a_time` is given, it takes any number of rows.
        """
        with self.graph.as_default(), not_advised():
            # The model also computes the rows of padding; the caller gets as many as it gave.
            rows = tf.shape(self._feeds[0])[0]
            outputs = {
                name.removesuffix("/0"): value[:rows]
                for name, value in self._outputs.items()
                if name != "step"
            }
            signature = tf.saved_model.predict_signature_def(
                {name.replace(" ", "_"): x for name, x in zip(self._features.names, self._feeds)},
                outputs,
            )
            if rows_at_a_time is not None:
                signature = any_batch(signature, rows_at_a_time, "export")
            builder = tf.saved_model.Builder(directory)
            builder.add_meta_graph_and_variables(
                self.session,
                [tf.saved_model.tag_constants.SERVING],
                {tf.saved_model.signature_constants.DEFAULT_SERVING_SIGNATURE_DEF_KEY: signature},
                # Whoever loads it may have other devices, unless there is a mesh of them.
                clear_devices=self._is_on_one_device,
            )
            builder.save()

    def values(self, names: Optional[Iterable[str]] = None) -> dict[str, np.ndarray]:
        """Returns the whole values of variables, by name: of all, or of those that it has."""
        # Made once, since operations that are added at each call let the graph grow.
        if not self._reads:
            with self.graph.as_default():
                self._reads = {n: v.read_value() for n, v in self.variables.items()}
        # Slices are what a step changes. Where masters have values of their own, these are out of
        # date.
        self.session.run(self._to_masters)
        names = self._reads if names is None else names
        return self.session.run({n: self._reads[n] for n in names if n in self._reads})

    def assign(self, values: dict[str, np.ndarray]) -> None:
        """Assigns whole values of variables; leaves out those that the program lacks."""
        self._assignments.run(self.session, self.variables, values)
        self.session.run(self._to_slices)


def _padded(feeds: Sequence[tf.Tensor], batch: Batch, names: Sequence[str]) -> list[tf.Tensor]:
    """Returns tensors with at most the rows of a batch, and zeros for the rows that they lack."""
    rows, most = tf.shape(feeds[0])[0], batch[0].shape[0]
    text = f"the model takes at most {most} rows at a time, and as many of each of {names}"
    right = [tf.debugging.assert_less_equal(rows, most, message=text)]
    right += [tf.debugging.assert_equal(tf.shape(x)[0], rows, message=text) for x in feeds[1:]]
    padded = []
    with tf.control_dependencies(right):
        for x, array in zip(feeds, batch):
            x = tf.pad(x, [[0, most - rows], *([0, 0] for _ in array.shape[1:])])
            # With all sizes known again, as dimensions of mtf Tensors have fixed ones.
            padded.append(tf.ensure_shape(x, array.shape))
    return padded


class SessionEngine(Engine):
    """Trains a model; each program has a tf graph and a session of its own."""

    def __init__(
        self,
        setup: Setup,
        eval_model: Optional[Model] = None,
        choosing: Optional[Choosing] = None,
        when_built: Optional[Callable[[], object]] = None,
    ):
        """Creates an engine.

        Args:
          setup: that of training programs.
          eval_model: the model to evaluate, with the same variables; that of `setup` if None.
          choosing: what chooses by the first batch how steps run; None if `setup` says it.
          when_built: called before anything is run of the training program.
        """
        self._when_built = when_built
        self._choosing = choosing
        # Servers of several processes keep variables by name, and outlive a session: a container of
        # its own keeps those of an earlier run from this one.
        cluster = setup.placing.cluster
        container = "" if cluster is None else cluster.next_container()
        self._setup = dataclasses.replace(setup, container=container)
        self._eval_model = setup.model if eval_model is None else eval_model
        self._training: Optional[_SessionProgram] = None
        self._used: Optional[Initial] = None  # the weights of evaluations, without training
        self._evaluations: dict[tuple, _SessionProgram] = {}
        self._made_saver: Optional[Saver] = None
        self._when_read: Optional[Callable[[], None]] = None

    def prepare(self, batch: Batch, checkpoint: Optional[str], initial: Optional[Initial]) -> None:
        """Builds the training program, and initializes or restores its variables."""
        self._setup.features.check(batch)
        if self._choosing is not None:
            chosen = self._choosing.placing(
                self._setup, batch, lambda tried, when: SessionEngine(tried, when_built=when)
            )
            self._setup = dataclasses.replace(self._setup, placing=chosen)
        self.layout = ";".join(f"{d}:{m}" for d, m in self._setup.placing.rules.pairs)
        self._training = _SessionProgram(self._setup, batch, True, initial)
        self.lowered = self._training.lowered
        if self._when_built is not None:
            self._when_built()
        self._training.initialize(checkpoint)
        # Several processes have restored it where they initialized.
        if checkpoint is not None and self._setup.placing.cluster is None:
            with self._training.graph.as_default():
                self._saver().restore(self._training.session, checkpoint)
            self._training.session.run(self._training._to_slices)

    def _saver(self) -> Saver:
        """Returns the saver of the training program, made when it is needed first."""
        assert self._training is not None
        if self._made_saver is None:
            with self._training.graph.as_default():
                # Sharded, so that each process writes the slices that it has.
                tell = None if self._when_read is None else lambda: self._when_read()
                self._made_saver = Saver(sharded=True, builder=ShardSaverBuilder(when_read=tell))
        return self._made_saver

    def use(self, initial: Initial) -> None:
        """Has evaluations and predictions use weights that are there, without training."""
        self._used = initial

    def train(self, batch: Batch) -> dict[str, float]:
        """Does a step; returns the loss and the metrics."""
        assert self._training is not None
        self._setup.features.check(batch)
        outputs = self._training.run(self._training.fitted(batch))
        outputs.pop("step")
        means = Means()
        means.add(outputs, 1)  # one batch: its mean, whatever it counts
        return means.result(self._training.lowered.afters)

    def evaluate(self, batches: Iterator[Batch]) -> dict[str, float]:
        """Returns the means over batches, the last of which may be smaller."""
        means = Means()
        afters: Afters = {}
        for program, outputs, rows in self._outputs(batches):
            means.add(outputs, rows)
            afters = program.lowered.afters
        return means.result(afters)

    def predict(self, batches: Iterator[Batch]) -> list[dict[str, np.ndarray]]:
        """Returns the outputs of some batches, in order."""
        return [
            {name: np.asarray(values[0]) for name, values in outputs.items()}
            for _, outputs, _ in self._outputs(batches)
        ]

    def export(self, batch: Batch, directory: str, any_rows: bool) -> None:
        """Writes a SavedModel that predicts for as many rows as a batch has, or fewer; or for any
        number.
        """
        assert self._used is not None
        # With whole values: what reads them by parts would be in the SavedModel, too.
        program = self._evaluation(batch, padded=True)
        averages = self._eval_model.averages_of(program.lowered.graph)
        program.assign(self._used._replace(names=averages).read_all(program.own))
        program.export(directory, rows_of(batch) if any_rows else None)

    def _outputs(
        self, batches: Iterator[Batch]
    ) -> Iterator[tuple[_SessionProgram, dict[str, list[Any]], int]]:
        """Yields for each batch, or piece of one, its program, the outputs and the rows."""
        # Programs on the servers of several processes share variables by name.
        shared = self._setup.placing.cluster is not None
        fresh: set[tuple] = set()
        for batch in itertools.chain.from_iterable(map(self._pieces, batches)):
            key = tuple((array.shape, array.dtype.name) for array in batch)
            if key not in self._evaluations:
                self._evaluations[key] = self._evaluation(batch)
            program = self._evaluations[key]
            # Each program has a session, and so variables, of its own: they get the weights of now,
            # once for each evaluation. Without training, they began with theirs.
            if key not in fresh and not shared and self._used is None:
                fresh.add(key)
                program.assign(self._values_for(program))
            outputs = program.run(batch)
            outputs.pop("step")
            yield program, outputs, rows_of(batch)

    def _values_for(self, program: _SessionProgram) -> dict[str, np.ndarray]:
        """Returns the values of the variables of an evaluation: averages, where there are any."""
        assert self._training is not None
        averages = self._training.lowered.averages
        sources = {name: averages.get(name, name) for name in program.variables}
        # Of these alone, as the slots of an optimizer may be larger than the weights.
        values = self._training.values(set(sources.values()))
        return {name: values[source] for name, source in sources.items() if source in values}

    def _pieces(self, batch: Batch) -> list[Batch]:
        """Returns a batch in pieces that can be computed: rows that the layout splits equally, and
        the others.
        """
        features, placing = self._setup.features, self._setup.placing
        if features.shapes is None:
            return [batch]
        rows = len(batch[0])
        left = rows % placing.parts_of_batch(features.with_batch(rows).batch_dim)
        if left and placing.given is not None:
            raise ValueError(
                f"fit: the last batch of eval_data has {rows} rows, which the layout of mesh_impl "
                f"does not split equally. Leave the last {left} rows out, or give fit mesh_shape "
                "and layout in place of mesh_impl"
            )
        pieces = [slice(0, rows - left), slice(rows - left, rows)]
        return [[array[p] for array in batch] for p in pieces if p.start < p.stop]

    def _evaluation(self, batch: Batch, padded: bool = False) -> _SessionProgram:
        features = self._setup.features
        # For so few steps, and a last batch of another size, compiling takes longer than it saves.
        placing = dataclasses.replace(self._setup.placing, compiled=False)
        if features.shapes is not None:
            features = features.with_batch(len(batch[0]))
            features.check(batch)
            if features.batch_dim.size % placing.parts_of_batch(features.batch_dim):
                # The rows that are left over are fewer than the parts; they are computed by all
                # processors alike.
                placing = placing.without(features.batch_dim.name)
        setup = dataclasses.replace(
            self._setup, model=self._eval_model, placing=placing, features=features
        )
        program = _SessionProgram(setup, batch, False, None if padded else self._used, padded)
        trained = program.lowered.graph.trainable_variables
        unknown = {part.name for v in trained for part in v.parts}
        if self._training is not None and unknown - set(self._training.variables):
            unknown -= set(self._training.variables)
            raise ValueError(
                f"fit: eval_fn has the variables {', '.join(sorted(unknown))}, which the model "
                "does not train. Give them the same names and variable scopes in both"
            )
        # Several processes have the training program's variables here, which must not begin anew.
        if placing.cluster is None:
            program.initialize()
        return program

    def save(
        self, directory: str, step: int, when_read: Optional[Callable[[], None]] = None
    ) -> tuple[str, list[str]]:
        """Writes a checkpoint; returns its path, and what in it is not a number, or infinite."""
        assert self._training is not None
        self._when_read = when_read
        saver = self._saver()
        session: tf.Session = self._training.session
        # A step changes slices; masters with values of their own are what is saved.
        session.run(self._training._to_masters)
        # The servers of several processes have threads of their own.
        if when_read is not None and self._setup.placing.cluster is None:
            session = InThisThread(session)
        path = os.path.join(directory, CHECKPOINT_NAME)
        with self._training.graph.as_default():
            saved = saver.save(
                session,
                path,
                global_step=step,
                # The graph is made by the program itself; written with each checkpoint, it would
                # take longer than small weights.
                write_meta_graph=False,
                write_state=False,  # the loop lists it, if it is one to go on from
            )
        assert saved is not None
        return saved, wrong_values(saved, saver.faults(saved), self.trained)

    def stops(self, step: int, wanted: bool, signals: StopSignals) -> bool:
        """Returns whether to stop after this step; several processes agree on one."""
        if self._training is None or self._training.agreement is None:
            return wanted
        return self._training.agreement.agreed(self._training.session, step, wanted, signals)

    def settle(self, step: int) -> None:
        """Waits at the end of a run until the process that saves has done so."""
        if self._training is not None and self._training.agreement is not None:
            self._training.agreement.settle(self._training.session, step)

    def finish(self) -> None:
        """Waits for the other processes."""
        if self._setup.placing.cluster is not None:
            self._setup.placing.cluster.finish()

    def values(self) -> dict[str, np.ndarray]:
        """Returns the whole values of all variables, by name."""
        assert self._training is not None
        return self._training.values()

    @property
    def trained(self) -> set[str]:
        """The names of trained variables."""
        assert self._training is not None
        trained = self._training.lowered.graph.trainable_variables
        return {part.name for v in trained for part in v.parts}

    def forget(self) -> None:
        """Frees the variables of training, which servers of several processes would keep."""
        if self._training is not None and self._setup.placing.cluster is not None:
            self._training.free()

    def close(self) -> None:
        """Closes the sessions."""
        for program in filter(None, [self._training, *self._evaluations.values()]):
            program.session.close()


_STEP = "global_step"


# -- a step function of the user


class StepEngine(Engine):
    """Calls a step function, which lowers itself; saves the variables of its VariableStore."""

    def __init__(
        self,
        step_fn: Callable[..., Any],
        eval_fn: Optional[Callable[..., Any]],
        store: Optional[mtf.VariableStore],
        features: Features,
        seed: Optional[int],
    ):
        """Creates an engine.

        Args:
          step_fn: a function of the features of a batch that updates weights and returns the loss,
            or a dictionary with "loss" and metrics.
          eval_fn: the same without updates; or None.
          store: the VariableStore of both; if None, `step_fn.store`.
          features: the structure of a batch.
          seed: the seed of a run, or None.

        Raises:
          ValueError: there is no store.
        """
        self._step_fn, self._eval_fn = step_fn, eval_fn
        store = getattr(step_fn, "store", None) if store is None else store
        if not isinstance(store, mtf.VariableStore):
            raise ValueError(
                f"fit: {getattr(step_fn, '__name__', step_fn)} is given without an optimizer, so "
                "it should be a step function: decorate it with @mtf.function, whose variables "
                "fit saves, or give fit(store=...), the mtf.VariableStore in whose scope it builds "
                "its program. For a model function, give fit an optimizer"
            )
        self._store = store
        self._features = features
        self._seed = seed
        self._step: Any = None

    def prepare(self, batch: Batch, checkpoint: Optional[str], initial: Optional[Initial]) -> None:
        """Begins counting steps, or restores a checkpoint."""
        self._features.check(batch)
        if tf.executing_eagerly():
            # What reads the global step, such as a schedule, counts the steps of this run.
            self._step = tf.train.get_or_create_global_step()
            self._step.assign(0)
            if self._seed is not None:
                tf2.random.set_seed(self._seed)
        if checkpoint is not None:
            self._restore(checkpoint, batch)
        elif initial is not None:
            self._begin_with(initial, batch)

    def _begin_with(self, initial: Initial, batch: Batch) -> None:
        """Sets the variables that the store has before the first step to given weights."""
        if _makes_variables(self._step_fn):
            self._make_variables(batch)
        if not self._store.names:
            raise ValueError(
                "fit: init_checkpoint sets variables before the first step, but the store of this "
                "step function has none yet: decorate the function with @mtf.function, or call "
                "mtf.checkpoint.init_from_checkpoint(path, store.masters) once they are there"
            )
        masters = {n: v for n, v in self._store.masters.items() if n != _STEP}
        trained = {n for n, v in masters.items() if v.trainable}
        # Slots have the name of a weight with "/" or "_" after it; they are left to begin anew.
        roots = tuple(f"{name}{mark}" for name in trained for mark in "/_")
        own = {n: v for n, v in masters.items() if n in trained or not n.startswith(roots)}
        state = self._store._known
        averages = {weight: masters[a] for a, weight in state.averages.items() if a in masters}
        dims = {n: stored.form.shape.dimension_names for n, stored in state.variables.items()}
        initial.load(own, trained, averages, dims)

    def _make_variables(self, batch: Batch) -> None:
        """Traces a function, of TensorFlow or of JAX, which makes its variables."""
        arguments = self._features.packed([tf2.constant(array) for array in batch])
        traced = _traced(self._step_fn)
        make: Any = self._step_fn
        make = make.make_variables if traced is None else traced.get_concrete_function
        # As in a call: the trace is kept for calls, with random keys that depend on the step.
        with keys_by_step(self._step):
            make(*arguments)

    def _call(self, fn: Callable[..., Any], batch: Batch) -> dict[str, float]:
        if self._step is None:
            # In a graph, each batch as a tensor would stay there as a constant.
            returned = fn(*self._features.packed(batch))
        else:
            tensors = [tf2.constant(array) for array in batch]
            with keys_by_step(self._step):
                returned = fn(*self._features.packed(tensors))
        named = returned if isinstance(returned, Mapping) else {"loss": returned}
        check_names(named)
        return {str(name): _number(name, value) for name, value in named.items()}

    def train(self, batch: Batch) -> dict[str, float]:
        """Does a step; returns the loss and the metrics."""
        self._features.check(batch)
        # Read before the call and set after it, as the step function may count the global step
        # itself.
        before = None if self._step is None else int(self._step)
        if before is not None and self._seed is not None and _traced(self._step_fn) is None:
            # Eager operations are seeded by their order in the process; a run that is resumed has
            # had others before.
            tf2.random.set_seed(self._seed + before)
        values = self._call(self._step_fn, batch)
        if before is not None:  # the step function may count steps, too
            self._step.assign(before + 1, read_value=False)
        return values

    def evaluate(self, batches: Iterator[Batch]) -> dict[str, float]:
        """Returns the means over batches, each counted with its rows."""
        if self._eval_fn is None:
            raise ValueError(
                "fit: eval_data is given, but a step function also trains: give fit(eval_fn=...), "
                "a function of a batch that returns the loss and metrics, with the same store"
            )
        means = Means()
        for batch in batches:
            values = self._call(self._eval_fn, batch)
            # Numbers alone: each is taken for the mean over the rows of its batch.
            means.add({name: [value] for name, value in values.items()}, rows_of(batch))
        return means.result({})

    def save(
        self, directory: str, step: int, when_read: Optional[Callable[[], None]] = None
    ) -> tuple[str, list[str]]:
        """Writes a checkpoint; returns its path, and what in it is not a number, or infinite."""
        path = os.path.join(directory, f"{CHECKPOINT_NAME}-{step}")
        # Whole values under their own names and in the dtypes of masters, as a Saver of sessions
        # writes them, so that any program reads these files.
        masters = self._store.masters
        values = {
            **{n: v.astype(masters[n].dtype.as_numpy_dtype) for n, v in self.values().items()},
            _STEP: np.int64(step),
        }
        if when_read is not None:
            when_read()
        tf.raw_ops.SaveV2(
            prefix=path,
            tensor_names=list(values),
            shape_and_slices=[""] * len(values),
            tensors=list(values.values()),
        )
        expected = {name: (tf.as_dtype(np.asarray(v).dtype), [""]) for name, v in values.items()}
        return path, wrong_values(path, [faults(path, expected)], self.trained)

    def _restore(self, path: str, batch: Batch) -> None:
        """Restores a checkpoint.

        A function is traced, and eager code runs once, so that there are variables to restore.
        """
        if _makes_variables(self._step_fn):
            self._make_variables(batch)
        else:
            self._call(self._step_fn, batch)
        masters, tracked = self._store.masters, self._tracked()
        reader = checkpoint_files.open_reader(path)
        # A file of before these were saved lacks all of them.
        tracked = {n: v for n, v in tracked.items() if reader.has_tensor(n)}
        own = {name: masters[name] for name in self._store.names}
        check_checkpoint(path, {**own, **tracked}, read=True)
        for name in own:
            self._store.assign(name, reader.get_tensor(name))
        for name, variable in tracked.items():
            variable.assign(reader.get_tensor(name))
        # Last, as the call above may have counted a step.
        if self._step is not None:
            self._step.assign(int(reader.get_tensor(_STEP)))

    def values(self) -> dict[str, np.ndarray]:
        """Returns the whole values of all variables, by name."""
        own = {name: self._store.value(name).numpy() for name in self._store.names}
        return {**own, **{name: v.numpy() for name, v in self._tracked().items()}}

    def _tracked(self) -> dict[str, tf.Variable]:
        """Returns TensorFlow's variables that the store tracks, but for the number of steps."""
        return {name: v for name, v in self._store._known.saved.tracked.items() if name != _STEP}

    @property
    def trained(self) -> set[str]:
        """The names of trained variables."""
        return {name for name, v in self._store.masters.items() if v.trainable}


def _traced(fn: Callable[..., Any]) -> Any:
    """Returns the tf.function of a function; None if it is eager code."""
    traced = getattr(fn, "tf_function", fn)
    return traced if hasattr(traced, "get_concrete_function") else None


def _makes_variables(fn: Callable[..., Any]) -> bool:
    """Returns whether a function can be traced without a step, and makes its variables then."""
    return _traced(fn) is not None or hasattr(fn, "make_variables")  # one of mtf.pjrt


def _number(name: object, value: Any) -> float:
    """Returns what a step function returned for a name as a float."""
    if np.ndim(value):
        raise ValueError(
            f"fit: {name} of the step function has the shape {np.shape(value)}, but a loss or "
            "metric is a scalar. Take its mean"
        )
    return float(value)
