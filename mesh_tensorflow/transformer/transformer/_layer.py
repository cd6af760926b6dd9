"""The base class of a transformer's layers."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Optional

import mesh_tensorflow.ops_with_redefined_builtins as mtf

if TYPE_CHECKING:
    from mesh_tensorflow.transformer.transformer._context import Context

__all__ = ["TransformerLayer"]


class TransformerLayer:
    """One layer of a transformer: a function of a Tensor, with its hyperparameters.

    Subclasses define `call`. It creates variables in the current variable scope, which the layer
    stack opens.
    """

    _name: Optional[str] = None

    def call(self, context: Context, x: mtf.Tensor) -> mtf.Tensor:
        """Returns the output of the layer.

        Args:
          context: a Context, which the layers of a model share during a call.
          x: a Tensor with dimensions [batch..., length, d_model]; without `length` in mode
            "incremental".

        Returns:
          A Tensor of the same dimensions.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define call(context, x)")

    def to_json(self) -> str:
        """Returns the class and the attributes of the layer as JSON.

        Values that JSON cannot represent are given by their `__name__` or `repr`.
        """
        return json.dumps(self._described(), sort_keys=True)

    def _described(self) -> dict[str, Any]:
        def described(value: object) -> object:
            if isinstance(value, TransformerLayer):
                return value._described()
            if isinstance(value, (list, tuple)):
                return [described(v) for v in value]
            if isinstance(value, dict):
                return {str(k): described(v) for k, v in value.items()}
            plain = value is None or isinstance(value, (bool, int, float, str))
            return value if plain else getattr(value, "__name__", None) or repr(value)

        attributes = {name: described(value) for name, value in vars(self).items()}
        return {"class": type(self).__name__, **attributes}

    def set_name(self, name: Optional[str]) -> None:
        """Sets the name, which is the variable scope that a layer stack opens for the layer."""
        self._name = name

    @property
    def name(self) -> Optional[str]:
        """The name, or None if it was not set."""
        return self._name
