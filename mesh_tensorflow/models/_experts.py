"""How evenly tokens go to experts: the loss that balances them, and figures to watch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Optional

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow._core.errors import is_real
from mesh_tensorflow.ops._microbatches import mean_over_microbatches
from mesh_tensorflow.transformer import moe

_USUAL = 0.001  # where config.json does not say it


def coefficient_of(config: Mapping[str, Any], balance: Optional[float]) -> float:
    """Returns the coefficient of the balance loss.

    Args:
      config: the contents of config.json.
      balance: what the user says; None for that of config.json, if it has `output_router_logits`.

    Raises:
      ValueError: it is no such number.
    """
    if balance is not None:
        if not (is_real(balance) and 0 <= balance < math.inf):
            raise ValueError(
                f"balance={balance!r} must be a number of 0 or more, by which the loss that "
                "balances experts is multiplied"
            )
        return balance
    given = config.get("router_aux_loss_coef")
    return (_USUAL if given is None else given) if config.get("output_router_logits") else 0.0


def balance_loss(routings: Sequence[moe.Routing]) -> mtf.Tensor:
    """Returns the balance loss of all layers; it is the number of experts of a token at best.

    Fedus et al., "Switch transformers" (2021), equations 4 to 6, where the tokens of all layers
    count as those of one layer, as they do in transformers.

    Args:
      routings: those of the layers.
    """
    [experts] = routings[0].chosen.shape.dims
    number = mtf.add_n([routing.tokens for routing in routings])
    shares = mtf.add_n([routing.chosen for routing in routings]) / number
    gates = mtf.add_n([routing.gates for routing in routings]) / number
    return mean_over_microbatches(mtf.reduce_sum(shares * gates) * float(experts.size))


def figures_of(routings: Sequence[moe.Routing]) -> dict[str, mtf.Tensor]:
    """Returns scalars to watch, by name.

    Args:
      routings: those of the layers.
    """
    choices = [mtf.reduce_sum(routing.chosen) for routing in routings]
    busiest = [
        mtf.reduce_max(routing.chosen) / number for routing, number in zip(routings, choices)
    ]
    placed, chosen = mtf.add_n([routing.placed for routing in routings]), mtf.add_n(choices)
    return {
        "balance_loss": balance_loss(routings),
        "busiest_expert": mtf.add_n(busiest) / len(busiest),
        # The difference of counts first: 1 minus a quotient can be 6e-8 where none is dropped.
        "dropped": (chosen - placed) / chosen,
    }
