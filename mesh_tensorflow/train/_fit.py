"""fit: trains a model function on data; checks of its arguments."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Optional, Union

import tensorflow.compat.v1 as tf

from mesh_tensorflow._calls import arguments_of
from mesh_tensorflow._core.errors import (
    check_flag,
    check_whole,
    did_you_mean,
    explained,
    is_real,
    is_whole,
    slip,
)
from mesh_tensorflow._core.layout import LayoutLike
from mesh_tensorflow._core.shape import ShapeLike
from mesh_tensorflow._mesh.mesh_impl import MeshImpl
from mesh_tensorflow._mesh.variables import checkpoint_files
from mesh_tensorflow._mesh.variables.store import VariableStore
from mesh_tensorflow._pjrt import pjrt
from mesh_tensorflow._progress import Progress
from mesh_tensorflow.auto_mtf.hardware import Hardware
from mesh_tensorflow.auto_mtf.measured import Auto
from mesh_tensorflow.checkpoint import CheckpointError, Resize, fault_of
from mesh_tensorflow.ops import Precision
from mesh_tensorflow.optimize import ExponentialMovingAverage
from mesh_tensorflow.train._data import AnyDataset, Features, Part, Source, opened, source_of
from mesh_tensorflow.train._engine import Engine, SessionEngine, StepEngine, wrong_values
from mesh_tensorflow.train._loop import Loop, Rates, Result, packed, unpacked
from mesh_tensorflow.train._model import Model, check_optimizer
from mesh_tensorflow.train._placing import (
    Choosing,
    MeshOptions,
    Placing,
    Setup,
    compiled_or_not,
    placing_of,
)
from mesh_tensorflow.train._saving import (
    Best,
    Checkpoints,
    Initial,
    InitialLike,
    Resume,
    ResumePoint,
    damaged,
    find_checkpoint,
    initial_of,
    not_a_number,
    weights_not_numbers,
)
from mesh_tensorflow.train.callbacks import Callback, Run, TensorBoard, has_board
from mesh_tensorflow.visualize import training_report

_BATCH = (
    "the size of a batch is that of the first dimension in dims, such as "
    'dims="batch:32,pixels:784" or {"image": [batch, pixels], "label": [batch]}'
)
_STEPS = (
    "training is counted in steps: give steps = epochs * (rows // batch), such as "
    "steps=3 * (len(images) // batch.size). Data are read again and again, and eval_every=rows // "
    "batch evaluates after each epoch"
)
# Names that other trainers have, and what there is in their place.
ELSEWHERE = {
    "epochs": _STEPS,
    "num_epochs": _STEPS,
    "num_train_epochs": _STEPS,
    "max_epochs": _STEPS,
    "steps_per_epoch": _STEPS,
    "max_steps": "give steps, the number of steps, those of earlier runs included",
    "batch_size": _BATCH,
    "x": "give data, arrays in the structure of dims, such as the tuple (x, y)",
    "y": "give data, arrays in the structure of dims, such as the tuple (x, y)",
    "validation_data": "give eval_data, in the structure of dims",
    "validation_split": "give eval_data, in the structure of dims",
    "validation_freq": "give eval_every, a number of steps",
    "metrics": 'let the model function return them: {"loss": loss, "accuracy": accuracy}',
    "loss": "let the model function return it",
    "lr": "give learning_rate",
    "verbose": "give progress=False to write nothing",
    "model_dir": "give directory",
    "checkpoint_dir": "give directory",
    "output_dir": "give directory",
}


# Arguments that are data, or say nothing about what is trained.
_NOT_TRACKED = ("data", "eval_data", "dims", "store", "init_checkpoint", "callbacks", "progress")


def _settings_to_track(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what trackers show of the arguments of `fit`: numbers, strings and names."""
    shown = {}
    for name, value in arguments.items():
        if value is None or name in _NOT_TRACKED:
            continue
        if name == "optimizer" or callable(value):
            value = getattr(value, "__name__", type(value).__name__)
        shown[name] = value if isinstance(value, (bool, int, float)) else str(value)
    return shown


def learning_rate_of(rate: Any) -> Any:
    """Returns a learning rate, of an eager tf.Tensor its value.

    Args:
      rate: a number, a function of the step, or None.

    Raises:
      TypeError: it is something else.
      ValueError: it is NaN, infinite or below 0.
    """
    if rate is None or callable(rate):
        return rate
    if isinstance(rate, bool) or not hasattr(type(rate), "__float__"):
        raise TypeError(
            f"fit: learning_rate is a number or a function of the step, but is {rate!r}, a "
            f"{type(rate).__name__}. Give for instance 0.1, or mtf.schedules.cosine(...)"
        )
    # The program is built in a graph, which cannot use a tensor of eager code.
    rate = float(rate) if hasattr(rate, "numpy") else rate
    if is_real(rate) and not math.isfinite(rate):
        raise ValueError(
            f"fit: learning_rate={rate!r} is no finite number: one step would make all weights "
            "NaN. Give for instance 0.1"
        )
    if is_real(rate) and rate < 0:
        raise ValueError(
            f"fit: learning_rate={rate!r} is below 0, so that steps would make the loss larger. "
            "Give for instance 0.1; to make a value larger, return its negative as the loss"
        )
    return rate


def check_callbacks(callbacks: Any, logdir: Optional[str]) -> list[Callback]:
    """Returns callbacks as a list, with one that writes logs; raises TypeError for what are none.

    Args:
      callbacks: objects of class Callback.
      logdir: where a TensorBoard is to write, or None.
    """
    if isinstance(callbacks, (Callback, type)) or not isinstance(callbacks, Iterable):
        raise TypeError(f"fit: callbacks is a list of callbacks, but is {callbacks!r}")
    callbacks = list(callbacks)  # which may come from a generator
    events = [name for name in vars(Callback) if name.startswith("on_")]
    for callback in callbacks:
        if isinstance(callback, type) or not all(hasattr(callback, event) for event in events):
            mend = (
                f"Make an object of it: {callback.__name__}()"
                if isinstance(callback, type) and issubclass(callback, Callback)
                else "Derive its class from mtf.train.Callback, which has all of "
                + ", ".join(events)
            )
            raise TypeError(f"fit: {callback!r} among the callbacks is none. {mend}")
    for name, cls in ((n, type(c)) for c in callbacks for n in dir(c)):
        if name.startswith("on_") and name not in events:
            slip(
                f"fit: {cls.__name__}.{name} is never called; the events are {', '.join(events)}"
                f"{did_you_mean(name, events)}",
                key=f"callback/{cls.__qualname__}.{name}",
            )
    # One that the user gives without a directory writes to this one, too.
    board = [TensorBoard(logdir)] if logdir and not has_board(callbacks, logdir) else []
    return callbacks + board


def check_seed(seed: Optional[int]) -> None:
    """Raises ValueError for what is no seed.

    Args:
      seed: an integer that is not negative, or None.
    """
    if seed is not None and not (is_whole(seed, 0) and seed < 2**63):
        raise ValueError(
            f"fit: seed is None or an integer from 0 to 2**63 - 1, but is {seed!r}. None draws "
            "another one in each run"
        )


@explained(ELSEWHERE)
def fit(
    model_fn: Callable[..., Any],
    data: Any,
    steps: int,
    *,
    optimizer: Any = None,
    dims: Any = None,
    learning_rate: Any = None,
    clip_norm: Optional[float] = None,
    norms: bool = False,
    microbatches: int = 1,
    average: Union[float, ExponentialMovingAverage, None] = None,
    precision: Union[str, Precision, None] = None,
    mesh_shape: ShapeLike = "all:1",
    layout: Union[LayoutLike, Auto] = "",
    devices: Optional[Sequence[str]] = None,
    simd: bool = False,
    mesh_impl: Union[MeshImpl, str, None] = None,
    variable_layout: Optional[LayoutLike] = None,
    zero: Optional[int] = None,
    zero_axis: Optional[str] = None,
    uneven: bool = False,
    jit_compile: Union[bool, str] = False,
    eval_data: Any = None,
    eval_every: Optional[int] = None,
    eval_fn: Optional[Callable[..., Any]] = None,
    store: Optional[VariableStore] = None,
    directory: Optional[str] = None,
    save_every: int = 1000,
    save_in_background: bool = False,
    keep: int = 5,
    keep_best: Optional[str] = None,
    resume: Resume = True,
    init_checkpoint: Optional[InitialLike] = None,
    init_strict: bool = False,
    init_resize: Union[str, Sequence[str]] = (),
    init_shrink: bool = False,
    callbacks: Sequence[Callback] = (),
    log_every: int = 10,
    logdir: Optional[str] = None,
    shuffle: bool = False,
    seed: Optional[int] = 0,
    tokens_per_batch: Optional[int] = None,
    hardware: Union[str, Hardware, None] = None,
    progress: bool = True,
) -> Result:
    """Trains a model, with progress, evaluation, checkpoints and resume.

    >>> batch, d_in, d_out = mtf.Dimension("batch", 4), mtf.Dimension("i", 3), mtf.Dimension("o", 1)
    >>> def model_fn(mesh, features):
    ...     y = mtf.layers.dense(features["x"], [d_out], reduced_dims=[d_in], name="linear")
    ...     return mtf.reduce_mean(mtf.square(y - features["y"]))
    >>> x = np.linspace(-1, 1, 24).reshape(8, 3)
    >>> result = mtf.train.fit(
    ...     model_fn,
    ...     {"x": x, "y": x.sum(1, keepdims=True)},
    ...     steps=20,
    ...     dims={"x": [batch, d_in], "y": [batch, d_out]},
    ...     optimizer=mtf.optimize.SgdOptimizer(0.1),
    ...     mesh_shape="rows:2",
    ...     layout="batch:rows",
    ...     progress=False,
    ... )
    >>> result.step, result.losses[-1] < result.losses[0], sorted(result.variables)
    (20, True, ['global_step', 'linear/bias', 'linear/kernel'])

    Args:
      model_fn: a function of a Mesh and of the features, as mtf Tensors, in the structure of
        `dims`: `model_fn(mesh, x)`, `model_fn(mesh, x, y)` for a tuple, or `model_fn(mesh,
        features)` for a dictionary, or with its features by their names. If it has a parameter
        `training`, that is whether weights are updated. It returns the loss, or a dictionary with
        "loss" and metrics, or a pair (loss, metrics). Each is a scalar, the mean of the batch; a
        Tensor with one value for each example; a pair (sum, weight); or one of mtf.train.metrics.
        What it assigns, prints by mtf.Print or records by mtf.scalar_summary is part of each step,
        also the updates of layers such as batch_norm; evaluations assign nothing. Without an
        optimizer, it is a step function: an @mtf.function of the features, as tf.Tensors, that
        trains and returns the loss, or a dictionary with "loss" and metrics, as tf scalars.
      data: a tf.data.Dataset, of examples or of batches; NumPy arrays, one, or a tuple or a
        dictionary of them, with the examples along the first axis; a Hugging Face dataset, or the
        path of one on disk; an iterable of examples or batches; or a function without arguments
        that returns one of these. Data are read again and again; an iterator can be read only once,
        but a function that returns one is called again. float64 becomes float32; batches of other
        dtypes than the first get its dtype, and a value that this does not have is an error.
      steps: the number of steps, those of earlier runs in `directory` included.
      optimizer: an mtf.optimize.Optimizer, or a function that returns one, called within the
        program, with `learning_rate` if that is given: an optimizer class will do. Any object
        whose `apply_grads(grads, variables)` returns Assign operations is one.
      dims: the dimensions of the features, batch first, such as [batch, pixels], in the structure
        of the data. Batches of the data have this size; smaller ones, as the last of an epoch may
        be, are left out, and larger ones are an error. If None, `model_fn` is given tf.Tensors of
        whole batches.
      learning_rate: a number, or a function of the step, an integer tf scalar.
      clip_norm: the largest Euclidean norm of all gradients together; larger ones are scaled down.
        The norm is reported as "gradient_norm", with float("inf") without scaling.
      norms: whether to report "gradient_norm" and "weight_norm", the Euclidean norms of all
        gradients and of all trained weights before the step, each over whole variables in every
        layout. Histograms are written by `TensorBoard(histograms_every=...)`.
      microbatches: the number of equal parts of a batch that are computed one after the other, with
        the memory of one; the loss and its gradients are those of the whole batch. Only the loss is
        reported. A scalar loss is a mean or a sum over the batch, or computed of such, as the
        quotient of two sums is; another one is an error. Assignments are done once a step, of the
        value of the whole batch: see mtf.optimize.accumulate_gradients.
      average: the decay of moving averages of the weights, such as 0.999, or an
        mtf.optimize.ExponentialMovingAverage. Evaluations use the averages.
      precision: "mixed_bfloat16" or an mtf.Precision; see mtf.precision. If None, that of a `with
        mtf.precision(...)` around the call, if there is one.
      mesh_shape: the shape of the mesh, such as "rows:2,cols:2".
      layout: the layout rules, such as "batch:rows,hidden:cols". Or "auto", or an
        mtf.auto_mtf.Auto: then steps are run under those that the cost model prefers, for a minute
        at most, and the fastest is taken; it is the `layout` of the Result.
      devices: a device for each processor, which are all there, unless the program has called
        tf.config.set_soft_device_placement(True). If None, the GPUs; or the logical CPUs, if there
        are enough of them; or one CPU for all processors.
      simd: whether all processors run one program (see SimdMeshImpl), on logical CPUs or GPUs.
      mesh_impl: "placement", "simd", as `simd` is, or "pjrt" for devices of JAX (see mtf.pjrt); or
        a PlacementMeshImpl, in place of `mesh_shape`, `layout` and `devices`.
      variable_layout: rules by which variables are stored in parts, such as "d_model:rows".
      zero: the stage of ZeRO: 1 or 2 to store optimizers' slots in parts, 3 for weights too.
      zero_axis: the mesh dimension of ZeRO, or several joined by "+"; that of a mesh with just
        one if None.
      uneven: whether all rules of the layout allow sizes that the mesh does not divide, as those do
        that end in "?", such as "batch:rows?".
      jit_compile: whether XLA compiles each step of training, for the one device that all
        processors have. It pays for small steps of many operations, and rounds otherwise than
        single operations do. "auto" times a few steps both ways, keeps what it found, as
        layout="auto" does, and leaves steps as they are where XLA does not save 5 % of them.
        `mesh_impl="pjrt"` compiles for several devices.
      eval_data: data to evaluate, of the same kinds as `data`. All of it is used: the last batch
        may be smaller, and rows that the layout does not split equally are computed unsplit.
      eval_every: the number of steps between evaluations; if None, there is one at the end.
      eval_fn: the model function of evaluations; `model_fn` if None. For a step function, a
        function of a batch.
      store: the VariableStore of a step function that is not an @mtf.function.
      directory: where to save checkpoints; None saves none.
      save_every: the number of steps between checkpoints. There is one at the end, too.
      save_in_background: whether steps go on while a checkpoint is written, by a thread to which
        they are preferred where cores are too few. It is listed, and callbacks are told, once its
        files are whole, some steps later. It takes the memory of one copy of the variables on their
        hosts. On devices of JAX in several processes, steps wait.
      keep: the number of the last checkpoints to keep.
      keep_best: a metric of evaluations, whose best checkpoint is kept besides the last ones:
        "loss", of which less is better, or another one with ":max" or ":min", such as
        "accuracy:max". An evaluation that is the best so far is saved, whatever `save_every` is.
        `Result.best` is its path.
      resume: whether to go on from the last checkpoint in `directory`, with the next batch of the
        data. Data that are read in the same order give the losses of an uninterrupted run. If that
        checkpoint is damaged, it is an error, and "last_good" goes on from the last whole one.
      init_checkpoint: weights to begin with: the path of a checkpoint, or a directory, for its
        latest; arrays by name, such as `Result.variables`; or a pair (path, {name in the model:
        name in the checkpoint}) with the names that differ, and None for what begins anew.
        Optimizers begin anew, and steps at 0. A run that goes on from `directory` ignores it. What
        is only in the model or only in the checkpoint is logged.
      init_strict: whether it is an error if weights are in one of the two only.
      init_resize: names of dimensions that may be larger in the model than there, such as "vocab":
        the first values of a variable are those of `init_checkpoint`, the others begin as its
        initializer says. What is loaded, resized, begun anew and left out is written.
      init_shrink: whether these dimensions may be smaller, too: the last values there are left out.
      callbacks: objects of class mtf.train.Callback.
      log_every: the number of steps between records of `Result.history`.
      logdir: where to write logs for TensorBoard; None writes none.
      shuffle: whether to shuffle arrays and Hugging Face datasets, differently in each epoch. A
        tf.data.Dataset shuffles by itself: give it a seed.
      seed: the seed of initial values, of random operations and of `shuffle`; None for another one
        in each run. For a step function it is set by tf.random.set_seed.
      tokens_per_batch: the number of tokens of a batch, for a rate of tokens per second.
      hardware: the profile of a processor, such as "tpu_v3" (see auto_mtf.hardware_profile), for
        the share of its compute rate that the model uses.
      progress: whether to write a progress line and messages, to the standard error stream.

    Returns:
      A Result.

    Raises:
      ValueError: an argument is wrong, or the layout does not fit.
      CheckpointError: the last checkpoint is damaged, or of another model.
      NotANumberError: the loss is not a number, or weights that would be saved or returned are
        not.
      KeyboardInterrupt: the user pressed Ctrl-C; a checkpoint is saved first.
    """
    # First, as later locals would be among the arguments.
    arguments = dict(locals())
    resize = Resize.of("fit: init_resize", init_resize, init_shrink)
    # What can be checked alone comes before data are opened and the program is built, which may
    # take minutes.
    _check_numbers(
        steps=steps,
        save_every=save_every,
        keep=keep,
        log_every=log_every,
        microbatches=microbatches,
    )
    _check_flags_and_paths(arguments)
    learning_rate = learning_rate_of(learning_rate)
    check_optimizer(optimizer, learning_rate)
    callbacks = check_callbacks(callbacks, logdir)
    check_seed(seed)
    best = None if keep_best is None else _best_of(keep_best, directory, eval_data)
    _check_evaluations(eval_every, eval_data)
    of_model = arguments_of(Model, {**arguments, "learning_rate": learning_rate})
    model = Model(model_fn, **of_model)
    layout, auto = _layout_or_auto(layout, mesh_impl)
    mesh = MeshOptions(**arguments_of(MeshOptions, {**arguments, "layout": layout}))
    # Before the data, as it says which rows of each batch this process reads.
    placing = placing_of(mesh)
    _check_several(placing, average, seed)
    placing, is_timed = compiled_or_not(placing, jit_compile)
    features, source = _features_and_source(data, dims, placing, shuffle, seed)
    _check_kind(model, mesh, auto, store)
    cluster = placing.cluster
    # The others would write the same messages, logs and checkpoints once more.
    chief = cluster is None or cluster.processes.is_chief
    if optimizer is None:
        engine: Engine = StepEngine(model_fn, eval_fn, store, features, seed)
    else:
        # Another function, with the precision and the averages that the weights are trained with.
        eval_model = None if eval_fn is None else dataclasses.replace(model, fn=eval_fn)
        choosing = None
        if auto is not None or is_timed:
            choosing = Choosing(auto or Auto(), auto is not None, is_timed, progress and chief)
        engine = SessionEngine(Setup(model, placing, features, seed), eval_model, choosing)
    loop = Loop(
        engine=engine,
        run=Run(steps, directory, logdir, _settings_to_track(arguments)),
        source=source,
        eval_source=_eval_source(eval_data, features),
        checkpoints=Checkpoints(engine.save, directory, keep, save_in_background, best)
        if directory is not None and chief
        else None,
        best=best,
        alone=cluster is None,
        eval_every=eval_every,
        save_every=save_every,
        log_every=log_every,
        callbacks=callbacks if chief else [],
        show=progress and chief,
        rates=Rates(engine, features, tokens_per_batch, hardware),
    )
    try:
        naming = (
            contextlib.nullcontext() if cluster is None else cluster.processes.naming_lost_peers()
        )
        with naming:
            run = _run_in_chief if placing.pjrt else _run
            return run(loop, resume, initial_of(init_checkpoint, init_strict, resize=resize))
    finally:
        engine.close()


def _check_numbers(**numbers: Any) -> None:
    """Raises ValueError for a number that is less than one."""
    for name, value in numbers.items():
        check_whole("fit", name, value)


def _check_evaluations(eval_every: Optional[int], eval_data: object) -> None:
    """Raises ValueError if there is to be an evaluation every so many steps, and nothing for it."""
    if eval_every is None:
        return
    check_whole("fit", "eval_every", eval_every)
    if eval_data is None:
        raise ValueError(
            f"fit: eval_every={eval_every} evaluates nothing without eval_data: give fit eval_data "
            "in the structure of dims, or leave out eval_every"
        )


def _check_flags_and_paths(arguments: Mapping[str, Any]) -> None:
    """Raises ValueError for arguments that are neither true nor false, or no paths."""
    for name, kind in fit.__annotations__.items():
        if kind in (bool, "bool"):
            check_flag("fit", name, arguments[name])
    for name in ("directory", "logdir"):
        if not isinstance(arguments[name], (str, os.PathLike, type(None))):
            raise ValueError(
                f"fit: {name}={arguments[name]!r} is no path of a folder; leave it out for none"
            )


def _changed(settings: Any) -> dict[str, Any]:
    """Returns the fields of a dataclass that have other values than by default."""
    return {
        field.name: value
        for field in dataclasses.fields(settings)
        if field.default is not dataclasses.MISSING
        and (value := getattr(settings, field.name)) is not field.default
        and value != field.default
    }


def _check_kind(
    model: Model, mesh: MeshOptions, auto: Optional[Auto], store: Optional[VariableStore]
) -> None:
    """Raises ValueError for arguments that are for the other kind of function to train."""
    if model.optimizer is None:
        of_mesh = {**_changed(mesh), **({} if auto is None else {"layout": auto})}
        _check_unused(
            "only a model function, with an optimizer, can have", {**_changed(model), **of_mesh}
        )
    elif store is not None:
        _check_unused("only a step function, without an optimizer, can have", {"store": store})


def _check_unused(which: str, given: Mapping[str, Any]) -> None:
    """Raises ValueError for arguments that are given, but would have no effect."""
    if given:
        raise ValueError(
            f"fit: {', '.join(given)} would have no effect here: it is something that {which}. "
            "Leave it out, or see mtf.train.fit for the two kinds of functions"
        )


def _best_of(keep_best: str, directory: Optional[str], eval_data: Any) -> Best:
    """Returns the best checkpoint of a run, which needs checkpoints and evaluations."""
    best = Best(keep_best)
    if directory is None or eval_data is None:
        raise ValueError(
            f"fit: keep_best={keep_best!r} chooses among the checkpoints of a directory by "
            "evaluations: give fit directory and eval_data, and eval_every to have several"
        )
    return best


def _layout_or_auto(
    layout: Union[LayoutLike, Auto], mesh_impl: Any
) -> tuple[LayoutLike, Optional[Auto]]:
    """Returns the layout rules to begin with, and the Auto that will choose others, or None."""
    auto = Auto() if layout == "auto" else layout
    if not isinstance(auto, Auto):
        return auto, None
    if mesh_impl is not None and not isinstance(mesh_impl, str):
        raise ValueError(
            f"fit: layout={layout!r} is given besides mesh_impl, which has a layout. Give "
            'mesh_shape, and the name "placement", "simd" or "pjrt"'
        )
    return "", auto


def _check_several(placing: Placing, average: Any, seed: Optional[int]) -> None:
    """Raises ValueError for arguments that several processes can't have."""
    if placing.cluster is not None and average is not None:
        raise ValueError(
            "fit: average is offered in one process only: several have one copy of the weights, "
            "so evaluations would not see the averages"
        )
    if placing.cluster is not None and seed is None:
        raise ValueError(
            "fit: seed is None, so each process would draw one of its own, and they would not "
            "agree. Give all of them the same seed"
        )


def _features_and_source(
    data: Any, dims: Any, placing: Placing, shuffle: bool, seed: Optional[int]
) -> tuple[Features, Source]:
    """Returns the features, which without `dims` are those of the first batch, and the source."""
    data = opened(data)
    if dims is not None:
        features = Features.of_dims(dims)
    elif isinstance(data, AnyDataset):
        features = Features.of_batch(data.element_spec)
    elif isinstance(data, Iterable) and not hasattr(data, "__array__"):
        first = next(iter(data), None)
        if iter(data) is data and first is not None:  # an iterator gives it only once
            data = itertools.chain([first], data)
        # What a dictionary of arrays gives first is a name, and no batch.
        features = Features.of_batch(data if isinstance(data, Mapping) else first)
    else:
        features = Features.of_batch(data)
    # Without dimensions, no layout says which rows a process needs.
    part = Part() if features.shapes is None else placing.part(features.batch_dim)
    return features, source_of(data, features, part, shuffle, seed)


def _eval_source(data: Any, features: Features) -> Optional[Source]:
    """Returns the source of evaluation data, or None."""
    if data is None:
        return None
    # All rows in each process: what the layout cannot split equally, all processors compute.
    source = source_of(data, features)
    source.check_end("fit: eval_data")
    return source


@contextlib.contextmanager
def _damage_reported(last: Optional[ResumePoint]) -> Iterator[None]:
    """Context that restores a checkpoint, or none: an error within says if the file is damaged."""
    try:
        yield
    except (CheckpointError, tf.errors.OpError) as e:
        # A file is read through only after a failure, of which it need not be the reason.
        fault = "" if last is None else fault_of(last.path, nan_too=False)
        if last is None or not fault:  # it is of another program
            raise
        raise damaged(last.path, fault) from e


def _run_in_chief(loop: Loop, resume: Resume, initial: Optional[Initial]) -> Result:
    """Runs on devices of JAX: in the first process, whose result the others get."""
    result = pjrt().run_in_chief(lambda: _run(loop, resume, initial), packed)
    return result if isinstance(result, Result) else unpacked(*result)


def _run(loop: Loop, resume: Resume, initial: Optional[Initial]) -> Result:
    """Restores, or begins with given weights or new ones; trains, and returns the result."""
    run, engine = loop.run, loop.engine
    last = find_checkpoint(run.directory, resume)
    if last is not None:
        run.step, run.checkpoint = last.step, last.path
        if last.note:
            loop.say(last.note)
    done = run.step >= run.steps  # then a batch is needed for its shape only
    # A finished run writes nothing there, and need not be able to.
    if run.directory is not None and loop.checkpoints is not None and not done:
        # Told before the first step, not at the first checkpoint, when those until then are lost.
        checkpoint_files.check_writable(run.directory, "fit: directory")
    # From the batch after the last step that is done, so that a resumed run sees each batch once,
    # like an uninterrupted one.
    batches = loop.source.training(0 if done else run.step)
    first = next(batches, None)
    if first is None:
        raise ValueError(
            "fit: the data have no batch"
            + (f" after step {run.step}, where this run goes on" if run.step else "")
            + ": there are too few examples, or the data can be read only once"
        )
    # Without a last line: small models are read before there is a first. Its clock starts with the
    # first part, as the program, which is built before that, says nothing of their rate.
    progress = Progress(None, "read weights", unit="part", leave=False, show=loop.show)
    if last is not None:
        initial = None  # a run that goes on has weights of its own
    elif initial is not None:
        say = loop.say if initial.resize is not None else None
        initial = initial._replace(progress=progress, say=say)
    with contextlib.closing(progress), _damage_reported(last):
        engine.prepare(first, None if last is None else last.path, initial)
    # The report goes over the whole program, which takes a while for a large one.
    if engine.lowered is not None and loop.show:
        places = {"checkpoints": run.directory, "logs": run.logdir}
        used_places = {name: place for name, place in places.items() if place}
        loop.say(training_report(engine.lowered.lowering, places=used_places))
    if last is not None:
        loop.say(f"going on from step {run.step}, {last.path}")
    if done:
        loop.say(f"nothing to do: step {run.step} of {run.steps} is done. Give fit more steps")
    # The first batch was read for its shape and its dtypes; it is trained on, too.
    loop.train(itertools.chain([first], batches))
    values = engine.values()
    if run.directory is None and not done:  # else checkpoints have been checked, also the last
        wrong = wrong_values("", [checkpoint_files.faults_of(values)], engine.trained)
        if wrong:
            raise not_a_number(weights_not_numbers(run.step, wrong), None)
    return Result(
        run.step,
        loop.history,
        loop.evaluations,
        run.stopped,
        run.checkpoint,
        values,
        None if loop.best is None else loop.best.checkpoint,
        engine.layout,
    )
