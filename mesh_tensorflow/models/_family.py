"""What a family of models is: how its config.json becomes a model, and its weights' two names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Optional


class Weight(NamedTuple):
    """A weight, by both names.

    Attributes:
      ours: the name of the variable.
      dims: the names of its dimensions, in the variable's order, as in "d_model heads d_kv".
      theirs: Hugging Face's name. With "{}" in it, there is a tensor for each index of the first
        dimension of `stored`, such as one for each expert.
      stored: the axes of the tensors in the file's order. Dimensions that are one axis there are
        joined by "*", as in "heads*d_kv d_model". Weights that lie behind each other in one tensor
        are in brackets, as in "[heads*d_kv|heads*d_kv|heads*d_kv] d_model", or for each head, as
        in "heads*[d_kv|d_kv|d_kv] d_model".
      part: which of the weights in brackets it is.
    """

    ours: str
    dims: str
    theirs: str
    stored: str
    part: int = 0


class Form(NamedTuple):
    """A model of a family, as its config.json says.

    Attributes:
      model: a function of a LayoutRules and a mesh Shape that returns the Unitransformer; of an
        encoder, the Encoder.
      weights: its Weights.
      sizes: the sizes of the dimensions that the Weights name.
      prefix: how Hugging Face's names begin, or do not begin in some folders.
      ignored: a regular expression of names that folders may have beside the weights: masks and
        tables that are computed, and second copies.
      optional: one of names that folders may lack.
      encodes: whether it is an encoder.
    """

    model: Callable[[Any, Any], Any]
    weights: Sequence[Weight]
    sizes: Mapping[str, int]
    prefix: str = ""
    ignored: str = r"(?!)"
    optional: str = r"(?!)"
    encodes: bool = False


class Config:
    """The fields of a config.json, for a family to read; errors name the file's folder."""

    def __init__(self, path: str, fields: Mapping[str, Any]) -> None:
        self.path = path
        self._fields = dict(fields)

    def get(self, name: str, default: Any = None) -> Any:
        """Returns a field, or the default if it is missing or null.

        Args:
          name: its name.
          default: any value.
        """
        value = self._fields.get(name)
        return default if value is None else value

    def number(self, name: str, default: Optional[int] = None) -> int:
        """Returns a field that is a positive integer.

        Args:
          name: its name.
          default: what it is if it is missing; None for an error.

        Raises:
          ValueError: it is missing, or is something else.
        """
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{self.path}: config.json has {name}={value!r}, no positive integer")
        return value

    def multiple(self, name: str, divisor: str) -> int:
        """Returns a field that is a multiple of another one, both of them positive integers.

        Args:
          name: its name.
          divisor: the name of the other one.

        Raises:
          ValueError: it is not, or one of them is missing.
        """
        value, part = self.number(name), self.number(divisor)
        if value % part:
            raise ValueError(
                f"{self.path}: config.json has {name}={value}, which is no multiple of "
                f"{divisor}={part}"
            )
        return value

    def must_be(self, name: str, expected: Any) -> None:
        """Checks a field of which the family knows one value.

        Args:
          name: its name.
          expected: the value, which is also meant if the field is missing.

        Raises:
          ValueError: it has another value.
        """
        value = self.get(name, expected)
        if value != expected:
            raise ValueError(
                f"{self.path}: config.json has {name}={value!r}, which is not known for this "
                f"family: only {name}={expected!r} is"
            )


# What makes a Form of a Config, by model type: the families of the package, and those of users.
FORMS: dict[str, Callable[[Config], Form]] = {}


def form_of(where: str, config: Mapping[str, Any]) -> Form:
    """Returns the Form of a model, by the family of its config.json.

    Args:
      where: what the error names, such as the path of its folder.
      config: the contents of config.json.

    Raises:
      ValueError: the family, or a field, is not known.
    """
    model_type = config.get("model_type")
    if model_type not in FORMS:
        raise ValueError(
            f"{where}: config.json has model_type={model_type!r}, which is none of "
            f"{', '.join(FORMS)}. T5's weights are converted by "
            "`python -m mesh_tensorflow.transformer.convert`"
        )
    return FORMS[model_type](Config(where, config))


_SHOWN = 6


def few(names: Sequence[str]) -> str:
    """Returns the first of some names, and how many more there are.

    Args:
      names: a list of strings.
    """
    more = f", and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
