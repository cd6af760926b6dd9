"""Uses trained weights without training: `evaluate`, `predict` and `export` of a model function."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Optional, Union

import numpy as np
import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow._calls import arguments_of
from mesh_tensorflow._core.errors import dims_text, explained
from mesh_tensorflow._core.layout import LayoutLike
from mesh_tensorflow._core.shape import ShapeLike
from mesh_tensorflow._mesh.mesh_impl import MeshImpl
from mesh_tensorflow._paths import new_directory
from mesh_tensorflow._pjrt import pjrt
from mesh_tensorflow.ops import Precision
from mesh_tensorflow.optimize import ExponentialMovingAverage
from mesh_tensorflow.train._data import Features, source_of
from mesh_tensorflow.train._engine import SessionEngine
from mesh_tensorflow.train._fit import ELSEWHERE
from mesh_tensorflow.train._model import Model, Output, call_model
from mesh_tensorflow.train._placing import MeshOptions, Placing, Setup, placing_of
from mesh_tensorflow.train._saving import initial_of

__all__ = ["evaluate", "export", "predict"]

Weights = Union[str, "os.PathLike[str]", Mapping[str, Any]]


@explained(ELSEWHERE)
def evaluate(
    model_fn: Callable[..., Any],
    data: Any,
    *,
    directory: Weights,
    dims: Any,
    average: Union[float, ExponentialMovingAverage, None] = None,
    precision: Union[str, Precision, None] = None,
    mesh_shape: ShapeLike = "all:1",
    layout: LayoutLike = "",
    devices: Optional[Sequence[str]] = None,
    simd: bool = False,
    mesh_impl: Union[MeshImpl, str, None] = None,
    variable_layout: Optional[LayoutLike] = None,
    zero: Optional[int] = None,
    zero_axis: Optional[str] = None,
    uneven: bool = False,
    seed: Optional[int] = 0,
) -> dict[str, float]:
    """Returns the means of the loss and the metrics of a trained model over data.

    >>> batch, d_in, d_out = mtf.Dimension("batch", 4), mtf.Dimension("i", 3), mtf.Dimension("o", 1)
    >>> def model_fn(mesh, x):
    ...     y = mtf.layers.dense(x, [d_out], reduced_dims=[d_in], name="linear")
    ...     return mtf.reduce_mean(mtf.square(y - 1.0))
    >>> weights = {"linear/kernel": np.zeros([3, 1], "f"), "linear/bias": np.zeros([1], "f")}
    >>> mtf.train.evaluate(model_fn, np.ones([6, 3]), directory=weights, dims=[batch, d_in])
    {'loss': 1.0}

    Args:
      model_fn: a function as that of `fit`; with a parameter `training`, it gets False.
      data: data as those of `fit`. All are used: the last batch may be smaller.
      directory: where the weights are: the `directory` of a run, for its latest checkpoint; the
        path of a checkpoint; or arrays by name, such as `Result.variables`.
      dims: the dimensions of the features, batch first, in the structure of the data.
      average: that of the run, if its averages of the weights are to be used.
      precision: "mixed_bfloat16" or an mtf.Precision.
      mesh_shape: the shape of the mesh, which may be another than that of the run.
      layout: the layout rules.
      devices: a device for each processor.
      simd: whether all processors run one program.
      mesh_impl: "placement", "simd" or "pjrt", or a mesh implementation; see `fit`.
      variable_layout: rules by which variables are stored in parts.
      zero: the stage of ZeRO.
      zero_axis: the mesh dimension of ZeRO, or several joined by "+".
      uneven: whether all rules of the layout allow sizes that the mesh does not divide, as those do
        that end in "?", such as "batch:rows?".
      seed: the seed of random operations.

    Raises:
      CheckpointError: the checkpoint lacks variables, or has them in other shapes, or is damaged.
      ValueError: an argument is wrong, or there are no data.
    """
    arguments = dict(locals())
    model = Model(model_fn, None, average=average, precision=precision)

    def run(engine: SessionEngine, batches: Any) -> _Used:
        means = engine.evaluate(batches)
        if not means:
            raise ValueError("evaluate: the data have no rows")
        return "dict", means

    _, means = _run_model("evaluate", model, arguments, run)
    return {name: float(mean) for name, mean in means.items()}


@explained(ELSEWHERE)
def predict(
    model_fn: Callable[..., Any],
    data: Any,
    *,
    directory: Weights,
    dims: Any,
    average: Union[float, ExponentialMovingAverage, None] = None,
    precision: Union[str, Precision, None] = None,
    mesh_shape: ShapeLike = "all:1",
    layout: LayoutLike = "",
    devices: Optional[Sequence[str]] = None,
    simd: bool = False,
    mesh_impl: Union[MeshImpl, str, None] = None,
    variable_layout: Optional[LayoutLike] = None,
    zero: Optional[int] = None,
    zero_axis: Optional[str] = None,
    uneven: bool = False,
    seed: Optional[int] = 0,
) -> Any:
    """Returns what a trained model computes for each example of data.

    >>> batch, d_in, d_out = mtf.Dimension("batch", 4), mtf.Dimension("i", 3), mtf.Dimension("o", 1)
    >>> def model_fn(mesh, x):
    ...     return mtf.layers.dense(x, [d_out], reduced_dims=[d_in], name="linear")
    >>> weights = {"linear/kernel": np.ones([3, 1], "f"), "linear/bias": np.zeros([1], "f")}
    >>> data = np.arange(6.0).reshape(2, 3)
    >>> print(mtf.train.predict(model_fn, data, directory=weights, dims=[batch, d_in]))
    [[ 3.]
     [12.]]

    Args:
      model_fn: a function of a Mesh and of the features, as that of `fit`, with the same variables.
        It returns a Tensor with the batch dimension, or a tuple or a dictionary of such. With a
        parameter `training`, it gets False.
      data: data as those of `fit`. All are used: the last batch may be smaller.
      directory: where the weights are; see `evaluate`.
      dims: the dimensions of the features, batch first, in the structure of the data.
      average: that of the run, if its averages of the weights are to be used.
      precision: "mixed_bfloat16" or an mtf.Precision.
      mesh_shape: the shape of the mesh, which may be another than that of the run.
      layout: the layout rules.
      devices: a device for each processor.
      simd: whether all processors run one program.
      mesh_impl: "placement", "simd" or "pjrt", or a mesh implementation; see `fit`.
      variable_layout: rules by which variables are stored in parts.
      zero: the stage of ZeRO.
      zero_axis: the mesh dimension of ZeRO, or several joined by "+".
      uneven: whether all rules of the layout allow sizes that the mesh does not divide, as those do
        that end in "?", such as "batch:rows?".
      seed: the seed of random operations.

    Returns:
      NumPy arrays in the structure of what `model_fn` returns, with the examples in the order of
      the data along the first axis.

    Raises:
      CheckpointError: the checkpoint lacks variables, or has them in other shapes, or is damaged.
      ValueError: an argument is wrong, there are no data, or an output has no batch dimension.
    """
    arguments = dict(locals())
    model = _Predictor(model_fn, None, average=average, precision=precision)

    def run(engine: SessionEngine, batches: Any) -> _Used:
        pieces = engine.predict(batches)
        if not pieces:
            raise ValueError("predict: the data have no rows")
        names = pieces[0]
        return model.kind[0], {n: np.concatenate([piece[n] for piece in pieces]) for n in names}

    kind, outputs = _run_model("predict", model, arguments, run)
    if kind == "dict":
        return outputs
    return tuple(outputs.values()) if kind == "tuple" else outputs["output"]


@explained(ELSEWHERE)
def export(
    model_fn: Callable[..., Any],
    data: Any,
    path: Union[str, os.PathLike[str]],
    *,
    directory: Weights,
    dims: Any,
    average: Union[float, ExponentialMovingAverage, None] = None,
    precision: Union[str, Precision, None] = None,
    seed: Optional[int] = 0,
    mesh_shape: ShapeLike = "all:1",
    layout: LayoutLike = "",
    devices: Optional[Sequence[str]] = None,
    any_batch: bool = False,
) -> None:
    """Writes a SavedModel of what a trained model computes for each example.

    Its signature `serving_default` takes the features by name: those of a dictionary, `x`, or
    `feature_0` and so on of a tuple. It takes at most as many rows at a time as the batch dimension
    says, or any number with `any_batch`, and returns what `predict` does: by the names of a
    dictionary, as `output`, or as `output_0` and so on of a tuple. TensorFlow alone loads and runs
    it: on any device, or on those of a mesh.

    >>> import tempfile, tensorflow as tf
    >>> batch, d_in, d_out = mtf.Dimension("batch", 4), mtf.Dimension("i", 3), mtf.Dimension("o", 1)
    >>> def model_fn(mesh, x):
    ...     return mtf.layers.dense(x, [d_out], reduced_dims=[d_in], name="linear")
    >>> weights = {"linear/kernel": np.ones([3, 1], "f"), "linear/bias": np.zeros([1], "f")}
    >>> path, data = tempfile.mkdtemp() + "/model", np.arange(6, dtype="f").reshape(2, 3)
    >>> mtf.train.export(model_fn, data, path, directory=weights, dims=[batch, d_in])
    >>> serve = tf.saved_model.load(path).signatures["serving_default"]
    >>> print(serve(x=tf.constant(data))["output"].numpy())
    [[ 3.]
     [12.]]

    Args:
      model_fn: a function as that of `predict`.
      data: data as those of `predict`, of which only the dtypes are used; one example does.
      path: where to write it, a directory that is empty or not there.
      directory: where the weights are; see `evaluate`.
      dims: the dimensions of the features, batch first, in the structure of the data.
      average: that of the run, if its averages of the weights are to be used.
      precision: "mixed_bfloat16" or an mtf.Precision.
      seed: the seed of random operations.
      mesh_shape: the shape of the mesh that serves, which may be another than that of the run.
      layout: the layout rules.
      devices: a device for each processor, by the names that they have where it is served.
      any_batch: whether it takes any number of rows, and computes them in pieces of as many as the
        batch dimension says.

    Raises:
      CheckpointError: the checkpoint lacks variables, or has them in other shapes, or is damaged.
      ValueError: an argument is wrong, there are no data, an output has no batch dimension, or
        there is something at `path`.
    """
    arguments = dict(locals())
    target = os.fspath(path)
    if tf.io.gfile.exists(target) and not (
        tf.io.gfile.isdir(target) and not tf.io.gfile.listdir(target)
    ):
        raise ValueError(
            f"export: there is something at {target} already. Give the path of a new directory"
        )
    model = _Predictor(model_fn, None, average=average, precision=precision)

    def run(engine: SessionEngine, batches: Any) -> _Used:
        first = next(batches, None)
        if first is None:
            raise ValueError("export: the data have no rows")
        shapes = Features.of_dims(dims).shapes or []
        # Of the sizes in `dims`, which say how many rows the export takes, whatever the data have.
        batch = [np.zeros(s.to_integer_list, array.dtype) for s, array in zip(shapes, first)]
        # The directory is there when all of it is.
        unfinished = f"{target.rstrip('/')}.temp-{os.getpid()}"
        with new_directory(target, unfinished):
            engine.export(batch, unfinished, any_batch)
            if tf.io.gfile.exists(target):
                # It is an empty directory, as was checked; `rename` refuses a target that is there.
                tf.io.gfile.rmtree(target)
        return model.kind[0], {}

    _run_model("export", model, arguments, run)


@dataclasses.dataclass(frozen=True)
class _Predictor(Model):
    """A model whose outputs are Tensors of the batch.

    Attributes:
      kind: what it returned, once it was called: "dict", "tuple" or "one".
    """

    kind: list[str] = dataclasses.field(default_factory=list)

    def _outputs(
        self, features: Features, mesh: mtf.Mesh, arguments: tuple, training: bool
    ) -> dict[str, Output]:
        returned = call_model(self.fn, mesh, arguments, features.names, training)
        if isinstance(returned, Mapping):
            named, kind = {str(n): x for n, x in returned.items()}, "dict"
        elif isinstance(returned, (tuple, list)):
            named, kind = {f"output_{i}": x for i, x in enumerate(returned)}, "tuple"
        else:
            named, kind = {"output": returned}, "one"
        # In place, since the dataclass is frozen.
        self.kind[:] = [kind]
        return {name: Output(self._of_batch(name, x, features)) for name, x in named.items()}

    def _of_batch(self, name: str, x: Any, features: Features) -> mtf.Tensor:
        if not isinstance(x, mtf.Tensor):
            raise ValueError(
                f"predict: the model function should return mtf Tensors, but {name} is {x!r}"
            )
        batch = features.batch_dim
        if name == "step" or batch not in x.shape.dims:
            raise ValueError(
                f"predict: {name} of the model function has the dimensions [{dims_text(x.shape)}], "
                f"and the name {name!r}, but an output has a value for each {batch.name}, and "
                "another name than 'step'. Leave it out; mtf.train.evaluate gives the means of "
                "losses and metrics"
            )
        # The batch first: along it pieces are joined, and the rows of padding cut off.
        return mtf.transpose(x, mtf.Shape([batch, *(d for d in x.shape if d != batch)]))


# The kind of a result, as `_Predictor.kind` says it, and arrays or numbers by name.
_Used = tuple[str, dict[str, Any]]


def _run_model(
    called: str,
    model: Model,
    arguments: Mapping[str, Any],
    run: Callable[[SessionEngine, Any], _Used],
) -> _Used:
    """Runs a model on all batches of data with weights that are there.

    Args:
      called: the function that was called, for errors.
      model: the model.
      arguments: those of the function, by name.
      run: uses the model, given an engine and the batches; returns its result.
    """
    data, dims, directory = (arguments[name] for name in ("data", "dims", "directory"))
    if dims is None:
        raise ValueError(f"{called}: dims is missing, the dimensions of the features")
    if directory is None or isinstance(directory, tuple):
        raise ValueError(
            f"{called}: directory is where the weights are, a directory of checkpoints, the path "
            f"of one, or arrays by name such as Result.variables, but is {directory!r}"
        )
    placing: Placing = placing_of(MeshOptions(**arguments_of(MeshOptions, arguments)))
    if placing.cluster is not None:
        raise ValueError(
            f"{called}: it is offered in one process: call it in a program of its own, with "
            "mesh_impl='pjrt' for the devices of several"
        )
    features = Features.of_dims(dims)
    source = source_of(data, features)
    if called != "export":  # which reads one batch
        source.check_end(f"{called}: the data")

    # A function, as with several processes of JAX the first one alone calls it.
    def main() -> _Used:
        # Nothing is trained: each use runs the second, the model of evaluations.
        engine = SessionEngine(Setup(model, placing, features, arguments["seed"]))
        try:
            initial = initial_of(directory, what=f"{called}: directory")
            assert initial is not None
            engine.use(initial)
            return run(engine, source.once())
        finally:
            engine.close()

    def share(used: _Used) -> tuple[list[str], list[np.ndarray]]:
        # What JSON can say, and arrays. The kind, too, which only the first process knows.
        kind, named = used
        return [kind, *named], [np.asarray(value) for value in named.values()]

    if not placing.pjrt:
        return main()
    kind, values = pjrt().run_in_chief(main, share)
    if isinstance(values, dict):
        return kind, values
    kind, *names = kind  # in a process that the first one leads
    return kind, dict(zip(names, values))
