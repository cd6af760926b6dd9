"""The master of a variable: what checkpoints hold, in one tf variable or spread over the slices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Optional

import numpy as np
import numpy.typing as npt
import tensorflow.compat.v1 as tf

from mesh_tensorflow._core.shape import Shape
from mesh_tensorflow._mesh.variables.storage import (
    Piece,
    VariableStorage,
    WholeStorage,
    WholeVariable,
)

if TYPE_CHECKING:
    from mesh_tensorflow._mesh.variables.store import VariableStore


class _InStore(VariableStorage):
    """The current slices in a store; another Lowering may change their layout."""

    def __init__(self, store: VariableStore, name: str, shape: Shape, dtype: tf.DType):
        self._store = store
        self._name = name
        self._shape = shape
        self._dtype = dtype

    def pieces(self) -> list[Piece]:
        sizes, holders = self._store.parts(self._name)
        return [
            Piece(
                begin,
                tuple(sizes),
                holders[begin][0].device,
                # Bound as defaults: closures would all find the variables of the last piece.
                lambda v=vs[0]: self._read(v),
                lambda value, vs=tuple(vs): self._assign(vs, value),
            )
            for begin, vs in holders.items()
        ]

    def _read(self, v: tf.Variable) -> tf.Tensor:
        with tf.device(v.device):
            return tf.cast(v.read_value(), self._dtype)

    def _assign(self, vs: Sequence[tf.Variable], value: tf.Tensor) -> tf.Operation:
        made = []
        # Every copy gets the value, as readers take any of them for it.
        for v in vs:
            with tf.device(v.device):
                made.append(v.assign(tf.cast(value, v.dtype), read_value=False))
        return tf.group([op for op in made if op is not None])

    def read(self) -> tf.Tensor:
        return tf.cast(self._store.value(self._name), self._dtype)

    def assign(self, value: tf.Tensor) -> tf.Operation:
        value.shape.assert_is_compatible_with(tf.TensorShape(self._shape.to_integer_list))
        made = [
            piece.assign(value[tuple(slice(b, b + n) for b, n in zip(piece.begin, piece.sizes))])
            for piece in self.pieces()
        ]
        # In eager code an assignment is done at once, and what it returns is None.
        return tf.group([op for op in made if op is not None])

    def is_initialized(self) -> tf.Tensor:
        # A store makes slices with their values, so there are none without.
        return tf.constant(True)


class StoredMaster(WholeVariable):
    """The whole value of a variable that a VariableStore keeps; for eager code.

    It reads, assigns, saves and restores the slices. In a tf.function the slices exist once a
    Lowering has been created.
    """

    _in_graph_mode = False

    def __init__(
        self, store: VariableStore, name: str, shape: Shape, dtype: tf.DType, trainable: bool
    ):
        """Creates a StoredMaster.

        Args:
          store: the VariableStore that keeps the variable.
          name: the full name of the variable.
          shape: its Shape.
          dtype: its dtype in checkpoints.
          trainable: whether optimizers update it.
        """
        super().__init__(trainable)
        self._variable_name = name
        self._shape = shape
        self._dtype = dtype
        self._store = store
        self._storage = _InStore(store, name, shape, dtype)

    def _at_storage(self) -> VariableStorage:
        if self._variable_name not in self._store.names:
            raise ValueError(
                f"variable {self._variable_name!r} has no value yet: in a tf.function the "
                "Lowering makes its slices. Make the Lowering first"
            )
        return self._storage

    @property
    def name(self) -> str:
        """The variable's name, with an output number as TensorFlow's have."""
        return f"{self._variable_name}:0"

    @property
    def device(self) -> str:
        """The device of the first piece."""
        return self._at_storage().pieces()[0].device

    @property
    def dtype(self) -> tf.DType:
        """The dtype in which checkpoints have the variable."""
        return self._dtype

    @property
    def shape(self) -> tf.TensorShape:
        """The static shape of the whole variable."""
        return tf.TensorShape(self._shape.to_integer_list)

    @property
    def initializer(self) -> None:
        """None: the variable is initialized already."""

    def numpy(self) -> np.ndarray:
        """Returns the whole value as a NumPy array; only in eager code."""
        return self.read_value().numpy()

    def __array__(
        self, dtype: Optional[npt.DTypeLike] = None, copy: Optional[bool] = None
    ) -> np.ndarray:
        return np.asarray(self.numpy(), dtype)


class MasterVariable(WholeVariable):
    """The whole value of an mtf variable; stands for a tf.Variable in TensorFlow's collections.

    Initializers, savers, reads and assignments use it through the collections. Before the first
    Lowering, the value is in a tf variable. If nothing in the graph uses that tf variable yet, the
    Lowering binds the MasterVariable to the slices: from then on it reads, assigns, saves and
    restores the slices, and the tf variable takes no memory. Otherwise the tf variable stays next
    to the slices, and values are copied between them.
    """

    _in_graph_mode = True
    _should_act_as_resource_variable = True  # checked by tf.train.init_from_checkpoint

    def __init__(self, tf_variable: tf.Variable, trainable: bool):
        """Creates a MasterVariable.

        Args:
          tf_variable: a resource variable.
          trainable: whether optimizers update it.
        """
        super().__init__(trainable)
        self._tf_variable = tf_variable
        self._initial: Any = tf_variable.initial_value
        self._storage: VariableStorage = WholeStorage(tf_variable)
        self._in_use = False

    # -- where the value is stored

    @property
    def in_use(self) -> bool:
        """Whether the graph uses the tf variable, so that it must stay next to the slices."""
        return self._in_use

    @property
    def is_bound(self) -> bool:
        """Whether only the slices store the value."""
        return not isinstance(self._storage, WholeStorage)

    def keep(self) -> None:
        """Keeps the tf variable next to the slices of a Lowering."""
        self._in_use = True

    def bind(self, storage: VariableStorage) -> None:
        """Makes slices the only storage of the value.

        Args:
          storage: the storage in slices.
        """
        assert not self._in_use and not self.is_bound
        self._storage = storage

    @property
    def tf_variable(self) -> tf.Variable:
        """The tf variable of the whole value, for a Lowering that computes with it."""
        self._in_use = True
        return self._tf_variable

    def _at_storage(self) -> VariableStorage:
        if not self.is_bound:
            self._in_use = True
        return self._storage

    # -- properties of a tf.Variable

    @property
    def name(self) -> str:
        """The name of the tf variable, with its output number."""
        return self._tf_variable.name

    @property
    def op(self) -> tf.Operation:
        """The tf.Operation of the tf variable."""
        return self._tf_variable.op

    @property
    def _shared_name(self) -> str:
        return self.op.name

    @property
    def graph(self) -> tf.Graph:
        """The tf.Graph of the variable."""
        return self._tf_variable.graph

    @property
    def device(self) -> str:
        """The device of the tf variable."""
        return self._tf_variable.device

    @property
    def dtype(self) -> tf.DType:
        """The dtype of the tf variable."""
        return self._tf_variable.dtype

    @property
    def shape(self) -> tf.TensorShape:
        """The static shape of the tf variable."""
        return self._tf_variable.shape

    def __getattr__(self, name: str) -> Any:
        # While a copy is made, __init__ has not run, and to look for the attribute would recurse.
        if name.startswith("__") or "_tf_variable" not in self.__dict__:
            raise AttributeError(name)
        if self.is_bound:
            raise AttributeError(
                f"variable {self.op.name!r} is kept in slices, which have no {name!r}. Make the "
                "Lowering with keep_masters=True to have a tf variable of the whole value too"
            )
        self._in_use = True
        return getattr(self._tf_variable, name)

    # -- initial value; tf.train.init_from_checkpoint sets the two private properties

    @property
    def initial_value(self) -> Any:
        """The initial value, a tf.Tensor of the shape of the variable."""
        return self._initial

    @property
    def _initial_value(self) -> Any:
        return self._initial

    @_initial_value.setter
    def _initial_value(self, value: tf.Tensor) -> None:
        self._initial = value
        if not self.is_bound:
            self._in_use = True
            self._tf_variable._initial_value = value

    @property
    def _initializer_op(self) -> tf.Operation:
        return self.initializer

    @_initializer_op.setter
    def _initializer_op(self, op: tf.Operation) -> None:
        # Slices are initialized from the initial value, which TensorFlow sets as well.
        if not self.is_bound:
            self._in_use = True
            self._tf_variable._initializer_op = op

    @property
    def initializer(self) -> tf.Operation:
        """A tf.Operation that assigns the initial value."""
        return self._at_storage().initializer(self._initial)

    def initialized_value(self) -> tf.Tensor:
        """Returns the value, or the initial value if the variable is not initialized."""
        return tf.cond(self.is_initialized(), self.read_value, lambda: self._initial)

    # -- in a session

    def _as_graph_element(self) -> tf.Tensor:
        return self.read_value()

    def eval(self, session: Optional[tf.Session] = None) -> np.ndarray:
        """Returns the whole value as a NumPy array.

        Args:
          session: the default session if None.
        """
        return self.read_value().eval(session=session)

    def load(self, value: npt.ArrayLike, session: Optional[tf.Session] = None) -> None:
        """Assigns the whole value in a session.

        Args:
          value: an array of the shape of the variable.
          session: the default session if None.
        """
        # `load` may be called anywhere, and must not wait for what is being built there.
        with self.graph.as_default(), tf.control_dependencies(None):
            fed = tf.placeholder(self.dtype, self.shape)
            done = self.assign(fed, read_value=False)
        (session or tf.get_default_session()).run(done, {fed: value})

    def to_proto(self, export_scope: Optional[str] = None) -> Any:
        """Returns a VariableDef; None if the value is in slices."""
        # TensorFlow leaves out of a MetaGraph what has no proto; the slices are not one variable.
        return None if self.is_bound else self._tf_variable.to_proto(export_scope)


def make_master(next_creator: Callable[..., tf.Variable], **kwargs: Any) -> MasterVariable:
    """Creates a MasterVariable; a variable creator for tf.variable_creator_scope.

    Args:
      next_creator: creates the tf variable.
      **kwargs: the arguments that TensorFlow passes to variable creators.
    """
    collections = kwargs.pop("collections", None) or [tf.GraphKeys.GLOBAL_VARIABLES]
    trainable = kwargs.pop("trainable", None)
    trainable = True if trainable is None else trainable
    # Not in the collections itself: savers and initializers shall find the master in its place.
    tf_variable = next_creator(collections=[], trainable=False, **kwargs)
    master = MasterVariable(tf_variable, trainable)
    if trainable and tf.GraphKeys.TRAINABLE_VARIABLES not in collections:
        collections = [*collections, tf.GraphKeys.TRAINABLE_VARIABLES]
    tf.add_to_collections(collections, master)
    return master
