"""ReplicatedVariable: a variable of which each TPU core has its own copy."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, Optional, Union

import tensorflow.compat.v1 as tf
from tensorflow.python.types.core import Tensor as VariableBase

from mesh_tensorflow._core.operation import ArrayLike
from mesh_tensorflow._mesh.tpu_program import tpu_context
from mesh_tensorflow._mesh.variables.storage import add_operators
from mesh_tensorflow.utils import outside_all_rewrites

__all__ = ["ReplicatedVariable", "TF_23", "VariableBase"]

TF_23 = True  # TensorFlow is 2.3 or later

_handle_ids = itertools.count()


class ReplicatedVariable(VariableBase):
    """Variables of one shape that act as one variable in a replicated computation.

    Within `tpu.rewrite` or `tpu.replicate`, replica i reads and assigns `variables[i]`. Outside,
    only `variables[0]` is read and assigned.
    """

    __array_priority__ = 100  # makes NumPy leave arithmetic to this class
    __iter__ = None  # otherwise Python would call __getitem__ endlessly

    def __init__(self, name: str, variables: Sequence[tf.Variable]):
        """Creates a ReplicatedVariable.

        Args:
          name: its name, which is the prefix of the name of its handle within a computation.
          variables: resource variables of one shape and dtype, one for each replica.

        Raises:
          ValueError: there are no variables, or their shapes or dtypes differ.
          TypeError: one of them is not a resource variable.
        """
        if not variables:
            raise ValueError(
                f"ReplicatedVariable {name} got no variables; give one for each replica"
            )
        first = variables[0]
        for v in variables:
            if not hasattr(v, "handle"):
                raise TypeError(
                    f"ReplicatedVariable {name} is made of resource variables; {v.name} is a "
                    f"{type(v).__name__}. Create it with use_resource=True"
                )
            # All cores run one program, which has a single dtype and shape for the variable.
            if v.dtype != first.dtype or v.shape.as_list() != first.shape.as_list():
                raise ValueError(
                    f"the variables of ReplicatedVariable {name} differ: {first.name} is "
                    f"{first.dtype.name} {first.shape}, {v.name} is {v.dtype.name} {v.shape}. "
                    "Each replica's must have the shape and dtype of a slice"
                )
        self._name = name
        self._vars = list(variables)
        self._primary_var = first
        # TensorFlow's context keeps handles by this id, and two variables may have one name.
        self._handle_id = f"{name}/{next(_handle_ids)}"

    @property
    def handle(self) -> tf.Tensor:
        """The resource handle; within a replicated computation, each replica's own."""
        context, _ = tpu_context()
        if context is None:
            return self._primary_var.handle
        return context.get_replicated_var_handle(self._name, self._handle_id, self._vars)

    @property
    def initializer(self) -> tf.Operation:
        """An operation that initializes all variables."""
        with outside_all_rewrites():
            return tf.group(*[v.initializer for v in self._vars])

    # -- attributes that all its variables share

    @property
    def name(self) -> str:
        """Its name."""
        return self._name

    @property
    def _shared_name(self) -> str:
        return self._name

    @property
    def _unique_id(self) -> str:
        return self._primary_var._unique_id

    @property
    def graph(self) -> tf.Graph:
        """The graph of the variables."""
        return self._primary_var.graph

    @property
    def dtype(self) -> tf.DType:
        """The dtype of its values."""
        return self._primary_var.dtype

    @property
    def shape(self) -> tf.TensorShape:
        """The shape of each variable, that of a slice."""
        return self._primary_var.shape

    def get_shape(self) -> tf.TensorShape:
        """Returns the shape of each variable, that of a slice."""
        return self.shape

    @property
    def constraint(self) -> Optional[Callable]:
        """The constraint of the first variable, or None."""
        return self._primary_var.constraint

    @property
    def op(self) -> tf.Operation:
        """The operation that creates the first variable."""
        return self._primary_var.op

    def to_proto(self, export_scope: Optional[str] = None) -> Any:
        """Returns the VariableDef of the first variable.

        Args:
          export_scope: a name scope to remove from names.
        """
        return self._primary_var.to_proto(export_scope=export_scope)

    def get(self) -> tf.Variable:
        """Returns the first variable."""
        return self._primary_var

    @property
    def _in_graph_mode(self) -> bool:
        return self._primary_var._in_graph_mode

    def _should_act_as_resource_variable(self) -> None:
        """Makes tf.gradients differentiate with respect to `handle`, by its existence."""

    # -- values

    def _read_variable_op(self) -> tf.Tensor:
        value = tf.raw_ops.ReadVariableOp(resource=self.handle, dtype=self.dtype)
        value.set_shape(self.shape)
        return value

    def read_value(self) -> tf.Tensor:
        """Returns the value, read after the current control dependencies."""
        return tf.identity(self._read_variable_op())

    def __tf_tensor__(
        self, dtype: Optional[tf.DType] = None, name: Optional[str] = None
    ) -> tf.Tensor:
        """Returns the value.

        Args:
          dtype: the requested dtype, or None.
          name: a name for the operation.

        Raises:
          ValueError: the variable has another dtype.
        """
        if dtype is not None and not tf.as_dtype(dtype).is_compatible_with(self.dtype):
            raise ValueError(
                f"Incompatible type conversion requested to type {tf.as_dtype(dtype).name} for "
                f"ReplicatedVariable {self._name} of type {self.dtype.name}. Cast its value: "
                f"tf.cast({self._name}.read_value(), ...)"
            )
        value = self._read_variable_op()
        return value if name is None else tf.identity(value, name=name)

    def _dense_var_to_tensor(
        self, dtype: Optional[tf.DType] = None, name: Optional[str] = None, as_ref: bool = False
    ) -> tf.Tensor:
        del as_ref  # resource variables have no references
        return self.__tf_tensor__(dtype, name)

    def assign(
        self,
        value: ArrayLike,
        use_locking: Optional[bool] = None,
        name: Optional[str] = None,
        read_value: bool = False,
    ) -> Union[tf.Operation, tf.Tensor]:
        """Assigns a value.

        Args:
          value: an object that converts to a tf.Tensor of its shape and dtype.
          use_locking: ignored; resource variables need no locks.
          name: a name for the operation.
          read_value: whether to return the new value; otherwise the operation is returned.

        Returns:
          The tf operation, or the new value.

        Raises:
          ValueError: the value has another shape.
        """
        return self._update(tf.raw_ops.AssignVariableOp, value, name, read_value)

    def assign_add(
        self,
        delta: ArrayLike,
        use_locking: Optional[bool] = None,
        name: Optional[str] = None,
        read_value: bool = True,
    ) -> Union[tf.Operation, tf.Tensor]:
        """Adds `delta`; see `assign`.

        Args:
          delta: an object that converts to a tf.Tensor of its shape and dtype.
          use_locking: ignored.
          name: a name for the operation.
          read_value: whether to return the new value; otherwise the operation is returned.
        """
        return self._update(tf.raw_ops.AssignAddVariableOp, delta, name, read_value)

    def assign_sub(
        self,
        delta: ArrayLike,
        use_locking: Optional[bool] = None,
        name: Optional[str] = None,
        read_value: bool = True,
    ) -> Union[tf.Operation, tf.Tensor]:
        """Subtracts `delta`; see `assign`.

        Args:
          delta: an object that converts to a tf.Tensor of its shape and dtype.
          use_locking: ignored.
          name: a name for the operation.
          read_value: whether to return the new value; otherwise the operation is returned.
        """
        return self._update(tf.raw_ops.AssignSubVariableOp, delta, name, read_value)

    def _update(
        self, make: Callable, value: ArrayLike, name: Optional[str], read_value: bool
    ) -> Union[tf.Operation, tf.Tensor]:
        value = tf.convert_to_tensor(value, self.dtype)
        if not self.shape.is_compatible_with(value.shape):
            raise ValueError(
                f"ReplicatedVariable {self._name} of shape {self.shape} got a value of shape "
                f"{value.shape}. Each replica assigns its own slice"
            )
        operation = make(resource=self.handle, value=value, name=name)
        if not read_value:
            return operation
        # In eager code the assignment is done, and there is no operation to wait for.
        with tf.control_dependencies([] if operation is None else [operation]):
            return self.read_value()

    def __repr__(self) -> str:
        return (
            f"<mtf ReplicatedVariable {self._name!r} shape={self.shape} dtype={self.dtype.name} "
            f"replicas={len(self._vars)}>"
        )


add_operators(ReplicatedVariable, tf.convert_to_tensor)
