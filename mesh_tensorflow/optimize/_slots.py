"""Which variables are slots: what an optimizer or an average keeps for each weight."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

__all__ = ["ADAFACTOR", "ADAM", "MOMENTUM", "is_slot", "weights_of"]

# The ends of names that stand in checkpoints of the classic release: names are those of weights
# and these. All other slots are named "<weight>/<slot>".
ADAFACTOR = {slot: f"_slot_{slot}" for slot in ("vr", "vc", "v", "m")}
ADAM = {slot: f"/{slot}" for slot in ("adam_m", "adam_v")}
MOMENTUM = "_momentum_v"
_ENDS = (*ADAFACTOR.values(), *ADAM.values(), MOMENTUM)

# The shape of each variable, by name.
Shapes = Mapping[str, Sequence[int]]


def is_slot(name: str, shapes: Shapes) -> bool:
    """Returns whether a variable is a slot of another.

    A slot of "x/w" is "x/w/adam_m", "x/w_slot_v" or, of any optimizer or average, "x/w/<slot>", of
    the shape of "x/w" or a number without dimensions; it may be in a scope of the optimizer,
    "scope/x/w/<slot>". A bias "x/w/bias" is no slot, since it has another shape.

    Args:
      name: the name of a variable.
      shapes: the shapes of variables by name, of this one and of those that it may be a slot of.
    """
    if name.endswith(_ENDS):
        return True
    shape = tuple(shapes[name])
    return any(w in shapes and shape in (tuple(shapes[w]), ()) for w in _owners(name))


def _owners(name: str) -> Iterator[str]:
    """Yields the names of variables that one of this name may be a slot of."""
    scopes = name.split("/")
    for start in range(len(scopes)):
        for end in range(start + 1, len(scopes)):
            yield "/".join(scopes[start:end])


def weights_of(shapes: Shapes) -> list[str]:
    """Returns the names of the variables that are neither slots nor the global step.

    Args:
      shapes: the shapes of all variables of a checkpoint or a program, by name.
    """
    return [n for n in shapes if n != "global_step" and not is_slot(n, shapes)]
