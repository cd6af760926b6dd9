"""Ways to split a model of a family over processors, by their names."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any, NamedTuple, Union

from mesh_tensorflow._core.layout import UNEVEN
from mesh_tensorflow._core.shape import JOIN
from mesh_tensorflow._huggingface import read_json
from mesh_tensorflow.models._family import Form, form_of
from mesh_tensorflow.models._gguf import GgufFile

__all__ = ["WAYS", "Way", "of"]


class Way(NamedTuple):
    """A way to split a model.

    Attributes:
      dims: the names of dimensions that are split, of those that the model has.
      zero: the stage of ZeRO over the same processors; 0 for none.
    """

    dims: tuple[str, ...]
    zero: int = 0


# Of decoders and encoders: a model has some of the dimensions.
WAYS: dict[str, Way] = {
    "data": Way(("batch",)),
    "zero2": Way(("batch",), zero=2),
    "zero3": Way(("batch",), zero=3),
    "tensor": Way(("vocab", "heads", "d_ff", "expert_hidden", "num_heads", "intermediate")),
    "expert": Way(("batch", "experts")),
    "sequence": Way(("length",)),
}


def of(
    model: Union[str, os.PathLike[str], Mapping[str, Any]], ways: str
) -> dict[str, Union[str, int]]:
    """Returns the arguments that split a model over a mesh in ways that have names.

    >>> from mesh_tensorflow.models import layouts
    >>> config = {"model_type": "llama", "vocab_size": 32, "hidden_size": 8,
    ...           "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    >>> layouts.of(config, "data:2,tensor:2")["layout"]
    'batch:data,vocab:tensor,heads:tensor,d_ff:tensor'

    They are arguments of `from_pretrained`, of `from_config` and of `mtf.train.fit`:
    `from_pretrained(path, **layouts.of(path, "zero3:8"))`. Sizes that are no multiple of the number
    of processors get a rule that ends in "?".

    Args:
      model: a path, as `from_pretrained` takes it; or what config.json says.
      ways: names in `WAYS`, each with a number of processors, such as "tensor:8" or
        "zero3:4,tensor:2". Each is a dimension of the mesh; neighbors on the last are next to each
        other.

    Returns:
      A dictionary with "mesh_shape" and "layout", and with "zero" and "zero_axis" where ZeRO is.

    Raises:
      ValueError: a way is not known, or is given twice; the family is not known; the model has
        nothing that a way splits, or fewer of it than there are processors.
    """
    form, mesh = _form(model), _parsed(ways)
    sizes = {d: form.sizes[d] for weight in form.weights for d in weight.dims.split()}
    of_calls = ["batch"] if form.encodes else ["batch", "length"]
    rules: dict[str, str] = {}
    for name, processors in mesh.items():
        dims = [d for d in WAYS[name].dims if d in sizes or d in of_calls]
        if {*dims} <= {"batch"} != {*WAYS[name].dims}:
            raise ValueError(
                f"layouts.of: {name}:{processors} splits {', '.join(WAYS[name].dims)}, but the "
                f"model has {', '.join(sorted(sizes))}; leave it out"
            )
        for d in dims:
            size = sizes.get(d, processors)
            if size < processors:
                raise ValueError(
                    f"layouts.of: {name}:{processors} splits {d}={size}, which are fewer; take "
                    f"{name}:{size}, and another way for the rest, as in "
                    f'"data:{-(-processors // size)},{name}:{size}"'
                )
            uneven = UNEVEN if size % processors else ""
            # Several ways may split the batch: then over all of their processors.
            rules[d] = f"{rules[d]}{JOIN}{name}" if d in rules else name + uneven
    found: dict[str, Union[str, int]] = {
        "mesh_shape": ",".join(f"{name}:{size}" for name, size in mesh.items()),
        "layout": ",".join(f"{d}:{name}" for d, name in rules.items()),
    }
    zero = [name for name in mesh if WAYS[name].zero]
    if len(zero) > 1:
        raise ValueError(f"layouts.of: {' and '.join(zero)} are two stages of ZeRO; take one")
    if zero:
        found |= {"zero": WAYS[zero[0]].zero, "zero_axis": zero[0]}
    return found


def _parsed(ways: str) -> dict[str, int]:
    """Returns the numbers of processors by the names of ways."""
    mesh: dict[str, int] = {}
    for text in ways.split(","):
        name, _, number = text.strip().partition(":")
        if name not in WAYS or not re.fullmatch(r"[1-9]\d*", number) or name in mesh:
            raise ValueError(
                f"layouts.of: {ways!r} must be names with numbers of processors, each once, such "
                f'as "data:2,tensor:4"; {text.strip()!r} is not. The names are {", ".join(WAYS)}'
            )
        mesh[name] = int(number)
    return mesh


def _form(model: Union[str, os.PathLike[str], Mapping[str, Any]]) -> Form:
    if isinstance(model, Mapping):
        return form_of("layouts.of", model)
    path = os.fspath(model)
    if path.endswith(".gguf"):
        return form_of(path, GgufFile(path).config)
    return form_of(path, read_json(os.path.join(path, "config.json")))
