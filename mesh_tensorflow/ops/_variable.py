"""Variables: an operation whose output is the variable's value at the beginning of a step.

A variable has up to three forms: the master, its whole value as TensorFlow's savers know it; the
slices, in which processors store and update it; and the value in computations. Each has a dtype.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Optional, Protocol, TypeVar, Union

import tensorflow as tf2
import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops as mtf
from mesh_tensorflow._calls import within
from mesh_tensorflow._core.errors import WrongTypeError, slip
from mesh_tensorflow._core.graph import Mesh, leaves_no_node
from mesh_tensorflow._core.operation import Cost, LaidOutLike, Operation, Tensor
from mesh_tensorflow._core.shape import Dimension, Shape, ShapeLike, convert_to_shape
from mesh_tensorflow._mesh.mesh_impl import MeshImpl
from mesh_tensorflow._mesh.random_values import checked_value, seeded_initializer
from mesh_tensorflow._mesh.variables.storage import (
    MasterVariable,
    WholeVariable,
    make_master,
)
from mesh_tensorflow._mesh.variables.store import StoredMaster, VariableStore, store_of
from mesh_tensorflow.utils import outside_all_rewrites

if TYPE_CHECKING:
    from mesh_tensorflow._lowering.lowering import Lowering

__all__ = [
    "Assign",
    "MtfCheckpointSaverListener",
    "MtfRestoreHook",
    "Precision",
    "ReadVariable",
    "StackedVariable",
    "Variable",
    "VariableDType",
    "assign",
    "assign_add",
    "assign_add_slice",
    "assign_slice",
    "assign_sub",
    "assign_sub_slice",
    "get_variable",
    "precision",
    "read_variable",
]


# -- dtypes, and the precision that a part of a program is computed in


class VariableDType:
    """The dtypes of a variable: in checkpoints, in memory and in computations."""

    def __init__(
        self,
        master_dtype: tf.DType = tf.float32,
        slice_dtype: Optional[tf.DType] = None,
        activation_dtype: Optional[tf.DType] = None,
    ):
        """Creates a VariableDType.

        Args:
          master_dtype: dtype of the master, and of checkpoints.
          slice_dtype: dtype of the slices, which are stored and updated; `master_dtype` if None.
          activation_dtype: dtype of the value in computations; `master_dtype` if None.
        """
        self._master_dtype = tf.as_dtype(master_dtype)
        self._slice_dtype = tf.as_dtype(slice_dtype or master_dtype)
        self._activation_dtype = tf.as_dtype(activation_dtype or master_dtype)

    @property
    def master_dtype(self) -> tf.DType:
        """Dtype of the master, and of checkpoints."""
        return self._master_dtype

    @property
    def slice_dtype(self) -> tf.DType:
        """Dtype of the slices, which are stored and updated."""
        return self._slice_dtype

    @property
    def activation_dtype(self) -> tf.DType:
        """Dtype of the value in computations."""
        return self._activation_dtype


F = TypeVar("F", bound=Callable)

_NO_FLOAT16 = (
    ". float16 would need a scale of the loss, which is not offered; bfloat16 has the range of "
    "float32, and needs none"
)


@dataclasses.dataclass(frozen=True)
class Precision:
    """The dtypes of activations and variables of a program; `mtf.precision` applies them.

    >>> print(mtf.Precision("bfloat16"))
    Precision(activation_dtype='bfloat16', slice_dtype='float32', master_dtype='float32')

    Attributes:
      activation_dtype: the dtype in which layers compute, "float32" or "bfloat16".
      slice_dtype: the dtype in which trainable variables are stored and updated. With "bfloat16"
        they take half the memory, but small updates are lost.
      master_dtype: the dtype of trainable variables in checkpoints.
    """

    activation_dtype: Union[str, tf.DType] = "bfloat16"
    slice_dtype: Union[str, tf.DType] = "float32"
    master_dtype: Union[str, tf.DType] = "float32"

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            try:
                dtype = tf.as_dtype(value)
            except TypeError:
                dtype = None
            if dtype not in (tf.float32, tf.bfloat16):
                why = _NO_FLOAT16 if dtype == tf.float16 else ""
                raise ValueError(
                    f"Precision: {name} must be 'float32' or 'bfloat16', not {value!r}{why}"
                )
            # The dataclass is frozen. As names, tf.bfloat16 and "bfloat16" make equal settings.
            object.__setattr__(self, name, dtype.name)

    @property
    def is_mixed(self) -> bool:
        """Whether activations have less precision than float32."""
        return self.activation_dtype != "float32"

    def variable_dtype(self) -> VariableDType:
        """Returns the dtypes of a trainable variable, a VariableDType."""
        return VariableDType(self.master_dtype, self.slice_dtype, self.activation_dtype)


_NAMES = {
    "float32": Precision("float32"),
    "bfloat16": Precision("bfloat16"),
    "mixed_bfloat16": Precision("bfloat16"),
}
# Of each thread, as several may build programs, each in a precision of its own.
_current: contextvars.ContextVar[Optional[Precision]] = contextvars.ContextVar(
    "precision", default=None
)


@contextlib.contextmanager
def precision(setting: Union[str, Precision]) -> Iterator[Precision]:
    """Returns a context in which programs compute in a given precision.

    Within it, when a program is built:

    - trainable variables that are asked for in float32 are stored and saved in float32, and their
      values have the dtype of activations; variables that are not trainable, such as the slots of
      optimizers, stay as they are asked for;
    - `mtf.import_tf_tensor` converts float32 data to the dtype of activations;
    - softmax, normalization and the loss functions of `mtf.layers` compute in float32; losses are
      float32.

    Gradients have the dtype of activations; optimizers convert them to float32.

    >>> with mtf.precision("mixed_bfloat16"):
    ...     x = mtf.import_tf_tensor(mesh, np.ones([4], np.float32), [mtf.Dimension("d", 4)])
    ...     y = mtf.layers.dense(x, [mtf.Dimension("out", 2)], reduced_dims=x.shape.dims)
    >>> print(y.dtype.name, graph.trainable_variables[0].slice_dtype.name)
    bfloat16 float32

    Args:
      setting: a Precision, "mixed_bfloat16", "bfloat16" (the same) or "float32", which restores the
        usual behavior.

    Raises:
      WrongTypeError: the setting is none of these.
    """
    chosen = _NAMES.get(setting) if isinstance(setting, str) else setting
    if not isinstance(chosen, Precision):
        why = _NO_FLOAT16 if "float16" in str(setting) else ""
        raise WrongTypeError(
            f"precision: {setting!r} is neither an mtf.Precision nor one of {sorted(_NAMES)}{why}"
        )
    with within(_current, chosen):
        yield chosen


def current_precision() -> Optional[Precision]:
    """Returns the mixed precision that is in force, or None."""
    chosen = _current.get()
    # That of float32 counts as none: within a mixed one, it restores the usual behavior.
    return chosen if chosen is not None and chosen.is_mixed else None


class InputDType(VariableDType):
    """The dtypes of a variable of a layer whose activations have the dtype of the layer's input."""


def dtype_in_force(dtype: VariableDType, trainable: bool = True) -> VariableDType:
    """Returns the dtypes that a variable gets, by the precision in force.

    Args:
      dtype: the VariableDType that is asked for.
      trainable: whether the variable is trainable.
    """
    chosen = current_precision()
    plain = (dtype.master_dtype, dtype.slice_dtype) == (tf.float32, tf.float32)
    # Slots of optimizers and counts need their digits; who asks for other dtypes gets them.
    if chosen is None or not trainable or not plain:
        return dtype
    other = chosen.variable_dtype()
    # A layer whose variables follow the dtype of its input, or that asks for another one, knows
    # better.
    keeps = isinstance(dtype, InputDType) or dtype.activation_dtype != tf.float32
    activation = dtype.activation_dtype if keeps else other.activation_dtype
    return VariableDType(other.master_dtype, other.slice_dtype, activation)


def imported_dtype(dtype: tf.DType) -> tf.DType:
    """Returns the dtype of imported data, by the precision in force."""
    chosen = current_precision()
    return dtype if chosen is None or dtype != tf.float32 else tf.as_dtype(chosen.activation_dtype)


def widened(x: Any) -> Any:
    """Returns a bfloat16 Tensor in float32 if a mixed precision is in force; all else as it is."""
    is_narrow = isinstance(x, Tensor) and x.dtype == tf.bfloat16
    return mtf.to_float(x) if is_narrow and current_precision() is not None else x


def computed_in_float32(fn: F) -> F:
    """Makes a function of a Tensor compute in float32 if a mixed precision is in force.

    The result has the dtype of the Tensor.
    """

    @functools.wraps(fn)
    def wrapper(x: Any, *args: Any, **kwargs: Any) -> Any:
        wide = widened(x)
        # Without a mixed precision no operation is added, so programs stay those of the classic.
        if wide is x:
            return fn(x, *args, **kwargs)
        named = {name: widened(value) for name, value in kwargs.items()}
        return mtf.cast(fn(wide, *(widened(value) for value in args), **named), x.dtype)

    return wrapper  # type: ignore[return-value]


# -- the operation

Initializer = Callable[..., tf.Tensor]


class Variable(Operation):
    """A variable, whose output is its value; it has slices once it is lowered."""

    takes_padding = True
    costs_by = ("slice_dtype", "activation_dtype")

    is_stacked = False

    def __init__(
        self,
        mesh: Mesh,
        name: str,
        shape: ShapeLike,
        dtype: Union[VariableDType, tf.DType],
        initializer: Optional[Initializer],
        trainable: bool,
        **kwargs: object,
    ):
        """Creates the master tf variable, and the operation.

        Args:
          mesh: a Mesh.
          name: a string, relative to the variable scope.
          shape: a Shape.
          dtype: a VariableDType, or one dtype for master, slices and activations.
          initializer: a TensorFlow initializer or None.
          trainable: a bool.
          **kwargs: further arguments of tf.get_variable.

        Raises:
          ValueError: a tf variable of this name exists already.
        """
        shape = convert_to_shape(shape)
        if not isinstance(dtype, VariableDType):
            dtype = VariableDType(dtype)
        super().__init__([], mesh=mesh, name="variable")
        self._graph.roll_back_names(self._mark.names)  # it is named after its master
        self._dtype = dtype
        self._trainable = trainable
        # A graph of TensorFlow 1 keeps its variables itself, also within the scope of a store.
        outlives = tf.executing_eagerly_outside_functions()
        self._store: Optional[VariableStore] = store_of(self._graph) if outlives else None
        self._initializer = initializer
        self._master: Any = None
        self._laid_out: Optional[weakref.ref] = None  # of the last Lowering, which keeps it
        self._make_master(name, shape, kwargs)
        self._shape = shape
        self._outputs = [Tensor(self, shape, dtype.activation_dtype)]
        if self._store is not None:
            # tf.get_variable is not called, which would ask the scope for one.
            self._initializer = self._initializer or tf.get_variable_scope().initializer
            self._store.declare(self)
            self._master = StoredMaster(
                self._store, self._name, shape, self.master_dtype, trainable
            )
        # Last, so that a variable that cannot be made is not in the graph's list of them.
        self._graph.register_variable(self, trainable)

    def _make_master(self, name: str, shape: Shape, kwargs: dict) -> None:
        full_name = full_variable_name(name)
        self._name = full_name
        # A VariableStore holds the value, in tf variables that it makes itself.
        if self._store is not None:
            return
        # It takes no memory before it is assigned to, nor if the value is in slices alone.
        kwargs.setdefault("use_resource", True)
        sizes = shape.to_integer_list

        def make_checked(next_creator: Callable, **settings: object) -> MasterVariable:
            """Creates the master, after checking the initial value."""
            first = settings.get("initial_value")
            if callable(first):
                settings["initial_value"] = lambda: checked_value(
                    first(), full_name, sizes, self.master_dtype
                )
            return make_master(next_creator, **settings)

        with (
            tf.device(self._mesh.variable_placer_fn),
            # A program may ask for it within a loop or a branch, but it must outlive that.
            outside_all_rewrites(),
            tf.variable_creator_scope(make_checked),
        ):
            self._master = tf.get_variable(
                name,
                sizes,
                dtype=self.master_dtype,
                initializer=seeded_initializer(self._initializer, full_name, self.master_dtype),
                trainable=self._trainable,
                **kwargs,
            )
        # tf.get_variable refuses only its own names: beside another node, a name is made unique.
        if self._master.op.name != full_name:
            raise ValueError(
                f"variable {full_name!r} became {self._master.op.name!r}: TensorFlow has a "
                f"variable {full_name!r} already. Use another name or variable scope"
            )

    def __repr__(self) -> str:
        return f"Variable({self.value.to_string})" if self._outputs else f"Variable({self._name})"

    @property
    def value(self) -> Tensor:
        """Its value, a Tensor."""
        return self._outputs[0]

    @property
    def shape(self) -> Shape:
        """Its Shape."""
        return self._shape

    @property
    def stored_shape(self) -> Shape:
        """Its Shape, with the names of dimensions by which the layout splits what is stored."""
        return self.value.shape

    @property
    def size(self) -> int:
        """Number of its elements."""
        return self.shape.size

    @property
    def dtype(self) -> VariableDType:
        """Its VariableDType."""
        return self._dtype

    @property
    def master_dtype(self) -> tf.DType:
        """Dtype of the master, and of checkpoints."""
        return self._dtype.master_dtype

    @property
    def slice_dtype(self) -> tf.DType:
        """Dtype of the slices, which are stored and updated."""
        return self._dtype.slice_dtype

    @property
    def activation_dtype(self) -> tf.DType:
        """Dtype of the value in computations."""
        return self._dtype.activation_dtype

    @property
    def trainable(self) -> bool:
        """Whether optimizers update it."""
        return self._trainable

    @property
    def store(self) -> Optional[VariableStore]:
        """The VariableStore that holds it, in a tf.function or in eager code; or None."""
        return self._store

    @property
    def initializer(self) -> Optional[Initializer]:
        """The TensorFlow initializer that it was created with, or None."""
        return self._initializer

    @property
    def master_device(self) -> str:
        """The device of the master."""
        return self._master.device

    @property
    def parts(self) -> Sequence[Variable]:
        """The Variables that it consists of: just itself, unless it is stacked."""
        return [self]

    @property
    def masters(self) -> list[MasterVariable]:
        """The masters of its parts; empty if they are not of class MasterVariable."""
        masters = [part.get_master() for part in self.parts]
        return masters if all(isinstance(m, MasterVariable) for m in masters) else []

    @property
    def tf_master(self) -> Any:
        """The tf variable of the whole value; it is stored from now on."""
        return getattr(self._master, "tf_variable", self._master)

    def get_master(self) -> Any:
        """Returns the master: its whole value, as a tf variable.

        It can be read and assigned to, whether the value is stored whole or in slices.
        """
        return self._master

    @property
    def master(self) -> Any:
        """The master, by the name that early releases have for it; see `get_master`."""
        return self.get_master()

    def set_master(self, master: tf.Variable) -> None:
        """Makes another tf variable the master, before the program is lowered in a session.

        Args:
          master: a tf.Variable of the sizes and the dtype of the master, which takes its place.

        Raises:
          ValueError: it has other sizes or another dtype; or a VariableStore holds the variable.
        """
        sizes = self.shape.to_integer_list
        if self._store is not None:
            raise ValueError(
                f"variable {self._name!r} is held by a VariableStore and has no master of its own: "
                f"store.assign({self._name!r}, value) changes its value"
            )
        if master.shape.as_list() != sizes or master.dtype.base_dtype != self.master_dtype:
            raise ValueError(
                f"the master of variable {self._name!r} {self.shape} must be a tf.Variable of "
                f"{sizes} and {self.master_dtype.name}, not of {master.shape.as_list()} and "
                f"{master.dtype.base_dtype.name}"
            )
        # Else initializers and savers would still find the old one there.
        for name in (tf.GraphKeys.GLOBAL_VARIABLES, tf.GraphKeys.TRAINABLE_VARIABLES):
            collected = tf.get_collection_ref(name)
            collected[:] = [v for v in collected if v is not self._master]
        self._master = master

    def assign_to_slices(self, assign_fn: Callable, values: Sequence[tf.Tensor]) -> tf.Operation:
        """Assigns to its slices in the last Lowering; see `LaidOutVariable.assign_to_slices`.

        Args:
          assign_fn: takes the Variable, a tf variable and a tf.Tensor for it; returns a
            tf.Operation.
          values: the slices of a LaidOutTensor of its shape.

        Raises:
          ValueError: it has not been lowered, or the Lowering is gone.
        """
        laid_out = None if self._laid_out is None else self._laid_out()
        if laid_out is None:
            raise ValueError(
                f"variable {self._name!r} has no slices: make a Lowering of its graph, and keep it"
            )
        return laid_out.assign_to_slices(assign_fn, values)

    def read_master(self) -> tf.Tensor:
        """Returns the value of the master."""
        return self._master.read_value()

    def assign_to_master(self, val: tf.Tensor) -> tf.Operation:
        """Returns a tf operation that assigns `val` to the master."""
        return self._master.assign(val, read_value=False)

    def stored_value(self) -> tf.Tensor:
        """Returns the current whole value as a tf.Tensor; for variables in a VariableStore."""
        assert self._store is not None
        return tf.cast(self._store.value(self._name), self.activation_dtype)

    def lower(self, lowering: mtf.Lowering) -> None:
        """Makes the laid-out variable, and its value at the beginning of the step."""
        mesh_impl = lowering.mesh_impl(self)
        # Slices are kept from step to step, so no loop or branch around the Lowering may own them.
        with outside_all_rewrites():
            laid_out = mesh_impl.LaidOutVariable(self, mesh_impl)
        lowering.variables[self] = laid_out
        self._laid_out = weakref.ref(laid_out)
        # Where nothing of the step is waited for: the value is that of the step's beginning.
        with mesh_impl.at_beginning():
            stored = self._read_once(lowering, laid_out.laid_out_tensor)
            value = self.cast_to_activation(mesh_impl, stored)
        lowering.set_tensor_lowering(self.value, value)
        kind = "trainable" if self._trainable else "untrainable"
        lowering.add_counter(f"variables/{kind}", self.size)

    def _read_once(self, lowering: mtf.Lowering, stored: LaidOutLike) -> LaidOutLike:
        """Returns a value whose slices are tensors: those that it has, or those of tf variables.

        A mesh implementation of the user's own may have variables for slices. Each use would read
        them anew, perhaps after an assignment: they are read once, and assignments wait for that.
        """
        slices = stored.to_laid_out_tensor().all_slices
        if not any(isinstance(t, (tf2.Variable, WholeVariable)) for t in slices):
            return stored
        mesh_impl = lowering.mesh_impl(self)
        if self._store is not None and any(isinstance(t, tf2.Variable) for t in slices):
            raise ValueError(
                f"{type(mesh_impl).__name__}.LaidOutVariable keeps variables of TensorFlow as the "
                f"slices of {self}, and only sessions copy them to the variable itself: in eager "
                "code their values would be lost. Build the program in a tf.Graph and run it in a "
                "tf.Session, or use a mesh implementation of this package"
            )
        values = _values_of(mesh_impl, stored)
        if not tf.executing_eagerly():
            lowering.first_reads[self] = [t.op for t in values.to_laid_out_tensor().all_slices]
        return values

    def cast_to_activation(self, mesh_impl: MeshImpl, laid_out: LaidOutLike) -> LaidOutLike:
        """Returns a laid-out value cast from the slice dtype to the activation dtype."""
        if self.slice_dtype == self.activation_dtype:
            return laid_out
        return mesh_impl.slicewise(lambda t: tf.cast(t, self.activation_dtype), laid_out)

    @property
    def takes_memory(self) -> bool:
        """Whether its value is stored separately from its slices, because the dtypes differ."""
        return self.slice_dtype != self.activation_dtype

    def cost(self, mesh_impl: MeshImpl) -> Cost:
        """Free, or a cast from the slice dtype to the activation dtype."""
        if self.slice_dtype == self.activation_dtype:
            return Cost()  # the slices themselves are used
        # Each element is read in one dtype and written in the other.
        sizes = self.slice_dtype.size + self.activation_dtype.size
        return Cost(0, mesh_impl.laid_out_size(self.stored_shape) * sizes)


class StackedVariable(Variable):
    """Several variables of one shape that share one slice variable on each processor.

    Their masters and names do not change.
    """

    is_stacked = True

    def __init__(self, vs: Sequence[Variable]):
        """Creates a StackedVariable from Variables with equal shapes and dtypes."""
        self._parts = list(vs)
        first = vs[0]
        # Row i is variable i, as `read_master` stacks and `assign_to_master` unstacks the masters.
        shape = Shape([Dimension("stacked", len(vs))]) + first.stored_shape
        # Without an initializer: its slices are made of the masters of its parts.
        super().__init__(
            first.mesh, f"stacked/{first.name}", shape, first.dtype, None, first.trainable
        )

    def _make_master(self, name: str, shape: Shape, kwargs: dict) -> None:
        self._name = name
        # Variables that a VariableStore holds are not stacked.
        self._store = None

    @property
    def parts(self) -> Sequence[Variable]:
        """The Variables that it consists of."""
        return self._parts

    @property
    def original_names(self) -> list[str]:
        """Names of the variables it consists of."""
        return [v.name for v in self._parts]

    @property
    def master_device(self) -> str:
        """The device of the first master."""
        return self._parts[0].master_device

    def get_master(self) -> Any:
        """Returns the values of the masters, stacked."""
        return self.read_master()

    def read_master(self) -> tf.Tensor:
        """Returns the values of the masters, stacked."""
        return tf.stack([v.read_master() for v in self._parts])

    def assign_to_master(self, val: tf.Tensor) -> tf.Operation:
        """Returns a tf operation that assigns each part of `val` to its own master."""
        pieces = tf.unstack(val)
        return tf.group([v.assign_to_master(piece) for v, piece in zip(self._parts, pieces)])


def full_variable_name(name: str) -> str:
    """Returns `name` under the current variable scope."""
    scope = tf.get_variable_scope().name
    return f"{scope}/{name}" if scope else name


def _check_known(known: Variable, shape: Optional[Shape], dtype: VariableDType) -> None:
    """Checks that an existing variable has the requested shape and dtypes.

    Raises:
      ValueError: it has other sizes.
    """
    if shape is not None and shape != known.shape:
        message = (
            f"variable {known.name!r} is {known.shape}, and is asked for as {shape}. Use another "
            "name or variable scope for another variable, or mtf.reshape on this one"
        )
        # With other sizes no value fits; with other names of dimensions, all do.
        if shape.to_integer_list != known.shape.to_integer_list:
            raise ValueError(message)
        slip(message)
    # By fields: VariableDType defines no equality, and a subclass may say the same.
    if vars(dtype) != vars(known.dtype):
        slip(
            f"variable {known.name!r} is of {_dtype_text(known.dtype)}, and is asked for as "
            f"{_dtype_text(dtype)}: it keeps the first. Ask for one dtype, and mtf.cast the value"
        )


def _dtype_text(dtype: VariableDType) -> str:
    """Returns "float32", or "master float32, slice ..." if the dtypes differ."""
    # The fields are _master_dtype and so on, in the order of the constructor.
    names = {part.strip("_").removesuffix("_dtype"): t.name for part, t in vars(dtype).items()}
    if len(set(names.values())) == 1:
        return names["master"]
    return ", ".join(f"{part} {name}" for part, name in names.items())


@leaves_no_node
def get_variable(
    mesh: Mesh,
    name: str,
    shape: ShapeLike,
    dtype: Union[VariableDType, tf.DType] = tf.float32,
    master_dtype: Optional[tf.DType] = None,
    slice_dtype: Optional[tf.DType] = None,
    activation_dtype: Optional[tf.DType] = None,
    initializer: Optional[Initializer] = None,
    trainable: bool = True,
    **kwargs: object,
) -> Tensor:
    """Returns the value of a variable; creates the variable if none of this name exists.

    >>> w = mtf.get_variable(mesh, "w", "d:3", initializer=tf.ones_initializer())
    >>> print(w.numpy(), [v.name for v in graph.trainable_variables])
    [1. 1. 1.] ['w']
    >>> print(mtf.get_variable(mesh, "w", "d:3") is w)
    True

    Args:
      mesh: a Mesh.
      name: a string, relative to the variable scope.
      shape: a Shape.
      dtype: a VariableDType, or a dtype.
      master_dtype: the dtype of the master, if `dtype` is not a VariableDType; `dtype` if None.
      slice_dtype: the dtype of the slices, likewise.
      activation_dtype: the dtype of the value, likewise.
      initializer: a TensorFlow initializer; TensorFlow's default if None.
      trainable: whether optimizers update it.
      **kwargs: further arguments of tf.get_variable.

    Returns:
      A Tensor. If the variable exists, `initializer` has no effect.

    Raises:
      ValueError: the name is not a nonempty string, or an existing variable has other sizes.
    """
    if not isinstance(name, str) or not name:
        raise ValueError(
            f"get_variable: the name must be a string of at least one letter, not {name!r}"
        )
    if not isinstance(dtype, VariableDType):
        # A plain dtype is the default of all three.
        dtype = VariableDType(
            master_dtype or dtype, slice_dtype or dtype, activation_dtype or dtype
        )
    # Before the look-up, where a second request for a variable is compared with the first one.
    dtype = dtype_in_force(dtype, trainable)
    if mesh.graph.stages is not None:
        # While a pipeline is built, what one stage asks for stands for the variables of all of
        # them. Each is made, and adapted, under its own name.
        return mesh.graph.stages.variable(
            name,
            convert_to_shape(shape),
            dtype,
            initializer=initializer,
            trainable=trainable,
            **kwargs,
        )
    full_name = full_variable_name(name)
    adapters = _adapters.get()
    # After the dtype is known: what is frozen computes in the precision of what is trained.
    trainable = trainable and (adapters is None or adapters.trains(full_name))
    value: Tensor
    if full_name in mesh.graph.name_to_variable:
        known = mesh.graph.name_to_variable[full_name]
        _check_known(known, convert_to_shape(shape), dtype)
        value = known.value
    else:
        value = Variable(mesh, name, shape, dtype, initializer, trainable, **kwargs).value
    if adapters is None:
        return value
    # Variables of adapters have none themselves.
    with within(_adapters, None):
        return adapters.adapted(full_name, name, value, dtype)


class Adapters(Protocol):
    """What variables are used as, such as sums with products of small matrices."""

    def trains(self, name: str) -> bool:
        """Returns whether a variable is trained, by its full name."""

    def adapted(self, full_name: str, name: str, value: Tensor, dtype: VariableDType) -> Tensor:
        """Returns what is computed with in place of a variable.

        Args:
          full_name: the name of the variable.
          name: the same, relative to the variable scope.
          value: its value.
          dtype: its VariableDType.
        """


_adapters: contextvars.ContextVar[Optional[Adapters]] = contextvars.ContextVar(
    "adapters", default=None
)


def adapting(adapters: Optional[Adapters]) -> contextlib.AbstractContextManager[None]:
    """Returns a context in which what `get_variable` returns is adapted.

    Args:
      adapters: the Adapters; None for variables as they are.
    """
    return within(_adapters, adapters)


# -- assignments, and reads at another point than the beginning of the step


def _variable_of(var: Union[Tensor, Variable], what: str) -> Variable:
    """Returns the Variable that a Tensor is computed from by operations of one input each."""
    x: Any = var.value if isinstance(var, Variable) else var
    while not isinstance(x.operation, Variable):
        if len(x.operation.inputs) != 1:
            raise ValueError(
                f"{what}: {var} does not come from a variable by operations of one input: "
                f"{x.operation} has {len(x.operation.inputs)}"
            )
        x = x.operation.inputs[0]
    return x.operation


def earlier_assignments(lowering: Lowering, variables: Sequence[Variable]) -> list[tf.Operation]:
    """Returns the last assignments so far, if a step carries out all of them, in order."""
    graph = variables[0].graph
    # Where only what is asked for runs, to wait for an assignment would carry it out unasked.
    if graph.assigns != "all" or not lowering.mesh_impl(variables[0]).supports_control_dependencies:
        return []  # a program of a compiler is in order by itself
    last = [lowering.assigned.get(v) for v in variables]
    # One operation may be the last assignment to several variables.
    return list(dict.fromkeys(op for op in last if op is not None))


def read_now(lowering: Lowering, variable: Variable) -> LaidOutLike:
    """Returns the slices of a variable, read at this point of the program.

    Args:
      lowering: the Lowering.
      variable: the Variable.

    Returns:
      A laid-out tensor of the slice dtype.
    """
    laid_out = lowering.variables[variable]
    if hasattr(laid_out, "read"):
        return laid_out.read()
    # A class of the user's own may lack it; then its laid-out tensor has the tf variables.
    return _values_of(lowering.mesh_impl(variable), laid_out.laid_out_tensor)


def _values_of(mesh_impl: MeshImpl, stored: LaidOutLike) -> LaidOutLike:
    """Returns the values that tf variables have at this point of the program."""

    def value_of(v: tf.Variable) -> tf.Tensor:
        # tf.identity of a variable of TensorFlow 1 is its memory, which assignments change.
        is_memory = isinstance(v, tf.Variable) and not hasattr(v, "handle")
        return tf.raw_ops.DeepCopy(x=v) if is_memory else tf.identity(v)

    return mesh_impl.slicewise(value_of, stored)


def note_read(lowering: Lowering, variable: Variable, value: LaidOutLike) -> None:
    """Makes later assignments to a variable wait for a read, where `earlier_assignments` orders.

    Args:
      lowering: the Lowering.
      variable: the Variable.
      value: what was read.
    """
    ordered = lowering.mesh_impl(variable).supports_control_dependencies
    # Eager code, like a compiler's program, is done in the order in which it is written.
    if variable.graph.assigns != "all" or not ordered or tf.executing_eagerly():
        return
    before = lowering.assigned.get(variable)
    reads = [t.op for t in value.to_laid_out_tensor().all_slices]
    # The read takes the place of the last assignment: what waits for that waits for both.
    lowering.assigned[variable] = tf.group([*([] if before is None else [before]), *reads])


class ReadVariable(Operation):
    """Reads the value of a variable at this point of the program."""

    takes_padding = True

    def __init__(self, var: Variable, name: Optional[str] = None):
        """Creates the operation; see `read_variable`."""
        # The value of the step's beginning is an input, so that gradients pass through to it.
        super().__init__(var.outputs, name=name or "read_variable")
        self._var = var
        self._outputs = [Tensor(self, var.shape, var.activation_dtype)]

    @property
    def variable(self) -> Variable:
        """The variable that it reads."""
        return self._var

    def gradient(self, grad_ys: Sequence[Optional[Tensor]]) -> Sequence[Optional[Tensor]]:
        """Passes the gradient on."""
        return list(grad_ys)

    def lower(self, lowering: Lowering) -> None:
        """Reads the slice variables, and casts to the activation dtype."""
        mesh_impl = lowering.mesh_impl(self)
        # Otherwise nothing would say whether this read, or the assignment before it, comes first.
        with tf.control_dependencies(earlier_assignments(lowering, [self._var])):
            read = read_now(lowering, self._var)
            value = self._var.cast_to_activation(mesh_impl, read)
        note_read(lowering, self._var, read)
        lowering.set_tensor_lowering(self.outputs[0], value)


def read_variable(var: Union[Tensor, Variable]) -> Tensor:
    """Returns the value of a variable, read at this point of the program.

    >>> w = mtf.get_variable(mesh, "w", "d:3", initializer=tf.ones_initializer())
    >>> update = mtf.assign_add(w, mtf.ones_like(w))
    >>> after = mtf.read_variable(w)
    >>> impl = mtf.placement_mesh_impl.PlacementMeshImpl("x:1", "", [""])
    >>> lowering = mtf.Lowering(graph, {mesh: impl})
    >>> print(lowering.export_to_tf_tensor(after).numpy())
    [2. 2. 2.]

    Args:
      var: a Variable, or a Tensor computed from one by operations of one input each.
    """
    return ReadVariable(_variable_of(var, "read_variable")).outputs[0]


def assign_slice(variable: Variable, slice_var: tf.Variable, val: tf.Tensor) -> tf.Operation:
    """Returns a tf operation that assigns to one slice variable.

    Args:
      variable: a Variable.
      slice_var: one of its slice variables.
      val: a tf.Tensor; cast to the slices' dtype.
    """
    # By default, TensorFlow returns a variable that reads itself when it is used, and no operation.
    return slice_var.assign(tf.cast(val, variable.slice_dtype), read_value=False)


def assign_add_slice(variable: Variable, slice_var: tf.Variable, val: tf.Tensor) -> tf.Operation:
    """Returns a tf operation that adds to one slice variable; see `assign_slice`."""
    return slice_var.assign_add(tf.cast(val, variable.slice_dtype), read_value=False)


def assign_sub_slice(variable: Variable, slice_var: tf.Variable, val: tf.Tensor) -> tf.Operation:
    """Returns a tf operation that subtracts from one slice variable; see `assign_slice`."""
    return slice_var.assign_sub(tf.cast(val, variable.slice_dtype), read_value=False)


class Assign(Operation):
    """Assigns to variables, when its `lowering.lowered_operation` is run."""

    has_effect = True
    takes_padding = True

    def __init__(
        self,
        variables: Sequence[Variable],
        new_values: Sequence[Tensor],
        assign_fn: Callable = assign_slice,
        name: Optional[str] = None,
    ):
        """Creates the operation.

        Args:
          variables: Variable operations.
          new_values: for each variable, a Tensor of its shape.
          assign_fn: takes a Variable, a slice variable and a tf value; returns a tf operation.
          name: a string or None.

        Raises:
          ValueError: a Tensor has another shape than its variable.
        """
        for v, x in zip(variables, new_values, strict=True):
            if v.shape != x.shape:
                raise ValueError(
                    f"cannot assign {x.name} {x.shape} to variable {v.name} {v.shape}: the "
                    "shapes must be equal. mtf.transpose or mtf.broadcast may bring it to it"
                )
        # The variables are no inputs: their values of the beginning of the step are not needed.
        super().__init__(new_values, mesh=variables[0].mesh, name=name or "assign")
        self._variables = list(variables)
        self._assign_fn = assign_fn

    @property
    def assign_fn(self) -> Callable:
        """The function that assigns to one slice variable."""
        return self._assign_fn

    @property
    def variables(self) -> list[Variable]:
        """The variables it assigns to."""
        return list(self._variables)

    def lower(self, lowering: Lowering) -> None:
        """Assigns each variable's slices."""
        if lowering.computes_again:
            return
        if self.graph.assigns == "none":
            # There is an operation to run also where nothing is assigned, as in an evaluation.
            lowering.operations[self] = tf.no_op()
            return
        # Outside of the control dependencies: a sum over processors that is pending until now need
        # not wait for earlier assignments.
        values = [lowering.tensors[x].to_laid_out_tensor().all_slices for x in self.inputs]
        operations = []
        reads = [op for v in self._variables for op in lowering.first_reads.get(v, ())]
        with tf.control_dependencies([*reads, *earlier_assignments(lowering, self._variables)]):
            for v, slices in zip(self._variables, values):
                laid_out = lowering.variables[v]
                operations.append(laid_out.assign_to_slices(self._assign_fn, slices))
        done = operations[0] if len(operations) == 1 else tf.group(operations)
        lowering.operations[self] = done
        # They are done as one: what waits for an assignment to one variable waits for all of them.
        lowering.assigned.update(dict.fromkeys(self._variables, done))

    def cost_key(self) -> tuple:
        """The slice dtypes of the variables."""
        return tuple(v.slice_dtype for v in self._variables)

    def cost(self, mesh_impl: MeshImpl) -> Cost:
        """Bytes read and written."""
        moved = sum(
            # The new value is read, and the slices are written.
            2 * mesh_impl.laid_out_size(v.stored_shape) * v.slice_dtype.size
            for v in self._variables
        )
        return Cost(0, moved)


@leaves_no_node
def assign(
    var: Union[Tensor, Variable],
    new_val: Tensor,
    assign_fn: Callable = assign_slice,
    name: Optional[str] = None,
) -> Operation:
    """Returns an operation that assigns to a variable.

    >>> w = mtf.get_variable(mesh, "w", "d:3", initializer=tf.ones_initializer())
    >>> update = mtf.assign(w, 3.0 * mtf.ones_like(w))
    >>> impl = mtf.placement_mesh_impl.PlacementMeshImpl("x:1", "", [""])
    >>> lowering = mtf.Lowering(graph, {mesh: impl})
    >>> print(lowering.export_to_tf_tensor(w).numpy())
    [3. 3. 3.]

    Args:
      var: a Variable, or a Tensor computed from one by operations of one input each.
      new_val: a Tensor of its shape.
      assign_fn: takes a Variable, a slice variable and a tf value; returns a tf operation.
      name: a string or None.

    Returns:
      An Assign operation; run `lowering.lowered_operation` of it.

    Raises:
      ValueError: `var` is not computed from a variable, or the shapes differ.
    """
    return Assign([_variable_of(var, "assign")], [new_val], assign_fn=assign_fn, name=name)


def assign_add(var: Union[Tensor, Variable], new_val: Tensor) -> Operation:
    """Returns an operation that adds to a variable; see `assign`.

    >>> w = mtf.get_variable(mesh, "w", "d:3", initializer=tf.ones_initializer())
    >>> update = mtf.assign_add(w, 3.0 * mtf.ones_like(w))
    >>> impl = mtf.placement_mesh_impl.PlacementMeshImpl("x:1", "", [""])
    >>> lowering = mtf.Lowering(graph, {mesh: impl})
    >>> print(lowering.export_to_tf_tensor(w).numpy())
    [4. 4. 4.]
    """
    return assign(var, new_val, assign_fn=assign_add_slice)


def assign_sub(var: Union[Tensor, Variable], new_val: Tensor) -> Operation:
    """Returns an operation that subtracts from a variable; see `assign`.

    >>> w = mtf.get_variable(mesh, "w", "d:3", initializer=tf.ones_initializer())
    >>> update = mtf.assign_sub(w, 3.0 * mtf.ones_like(w))
    >>> impl = mtf.placement_mesh_impl.PlacementMeshImpl("x:1", "", [""])
    >>> lowering = mtf.Lowering(graph, {mesh: impl})
    >>> print(lowering.export_to_tf_tensor(w).numpy())
    [-2. -2. -2.]
    """
    return assign(var, new_val, assign_fn=assign_sub_slice)


# -- hooks that copy between masters and slices around checkpoints


class MtfRestoreHook(tf.train.SessionRunHook):
    """Copies masters to slices after a session is created or restored."""

    def __init__(self, lowering: Lowering):
        """Creates the hook.

        Args:
          lowering: a Lowering.
        """
        self._lowering = lowering
        self._copy: Any = None

    def begin(self) -> None:
        """Creates the copy operation, before the graph is finalized."""
        with tf.name_scope("mtf_restore_hook"):
            self._copy = self._lowering.copy_masters_to_slices()

    def after_create_session(self, session: tf.Session, coord: tf.train.Coordinator) -> None:
        """Copies masters to slices.

        Args:
          session: the new session.
          coord: unused.
        """
        # A session that replaces a lost one is new, too, and its slices lack what was restored.
        session.run(self._copy)


class MtfCheckpointSaverListener(tf.train.CheckpointSaverListener):
    """Copies slices to masters before each save."""

    def __init__(self, lowering: Lowering):
        """Creates the listener and its copy operation, before the graph is finalized.

        Args:
          lowering: a Lowering.
        """
        self._copy = lowering.copy_slices_to_masters()

    def before_save(self, session: tf.Session, global_step_value: int) -> None:
        """Copies slices to masters.

        Args:
          session: the session whose variables are saved.
          global_step_value: the global step.
        """
        # Savers know the masters alone, and training updates the slices.
        session.run(self._copy)
        tf.logging.info("copied slices to masters at step %d", global_step_value)
