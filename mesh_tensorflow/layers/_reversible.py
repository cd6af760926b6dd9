"""Reversible residual layers: inputs are recomputed from outputs instead of being stored."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Optional

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow.ops._control.recompute import computed_again, wait_for

__all__ = ["reversible_half_residual_and_swap"]


def reversible_half_residual_and_swap(
    x1: mtf.Tensor,
    x1_backwards: Optional[mtf.Tensor],
    x2: mtf.Tensor,
    x2_backwards: Optional[mtf.Tensor],
    f: Callable[[mtf.Tensor], mtf.Tensor],
    recompute_grads: bool = True,
) -> list:
    """Adds `f(x2)` to `x1` and swaps the two: one step of a reversible network.

    Gomez et al., "The reversible residual network: backpropagation without storing activations"
    (2017). The backward pass recomputes `f(x2)` from the outputs of the step and subtracts it to
    recover `x1`. So neither activations inside `f` nor inputs are stored for it, only the outputs
    of the last step. Recomputed random values and variables in `f` are the same as before.

    A network of layers, each with both halves:

        for f, g in layers:
            a = reversible_half_residual_and_swap(*a, f)
            a = reversible_half_residual_and_swap(*a, g)

    >>> x1, x2 = mtf.ones(mesh, "d:2"), 3.0 * mtf.ones(mesh, "d:2")
    >>> y1, _, y2, _ = mtf.layers.reversible_half_residual_and_swap(x1, None, x2, None, mtf.square)
    >>> print(y1.numpy(), y2.numpy())
    [3. 3.] [10. 10.]

    Args:
      x1: a Tensor.
      x1_backwards: the Tensor that the previous step returned with `x1`; None for the first step.
        Its value has no meaning; its gradient is the recomputed value of `x1`.
      x2: a Tensor of the shape and dtype of `x1`.
      x2_backwards: the Tensor that the previous step returned with `x2`; None for the first step.
      f: a function of a Tensor that returns a Tensor of the same shape.
      recompute_grads: whether to recompute activations; if False, they are stored as usual.

    Returns:
      The first four arguments of the next step: [x2, x2_backwards, x1 + f(x2), x1_backwards].

    Raises:
      ValueError: `x1`, `x2` and `f(x2)` differ in shape or dtype.
    """
    _check_alike("x1 and x2", x1, x2)

    def step(
        x1: mtf.Tensor,
        x1_back: Optional[mtf.Tensor],
        x2: mtf.Tensor,
        x2_back: Optional[mtf.Tensor],
    ) -> tuple:
        residual = f(x2)
        _check_alike("x1 and f(x2)", x1, residual)
        return x2, x2_back, x1 + residual, x1_back

    if not recompute_grads:
        return list(step(x1, x1_backwards, x2, x2_backwards))
    x1_backwards = mtf.zeros_like(x1) if x1_backwards is None else x1_backwards
    x2_backwards = mtf.zeros_like(x2) if x2_backwards is None else x2_backwards
    return list(mtf.custom_gradient(step, _backwards, [x1, x1_backwards, x2, x2_backwards]))


def _check_alike(what: str, a: mtf.Tensor, b: mtf.Tensor) -> None:
    if a.shape != b.shape or a.dtype != b.dtype:
        raise ValueError(
            f"reversible_half_residual_and_swap: {what} must have one shape and one dtype, but "
            f"{a.name} is {a.shape} {a.dtype.name} and {b.name} is {b.shape} {b.dtype.name}"
        )


def _backwards(
    explicit_inputs: Sequence[mtf.Tensor],
    all_inputs: Sequence[mtf.Tensor],
    forward_operations: Sequence[mtf.Operation],
    outputs: Sequence[mtf.Tensor],
    output_grads: Sequence[mtf.Tensor],
) -> list[Optional[mtf.Tensor]]:
    """Returns the gradients of all inputs; those of `x_backwards` are the recomputed inputs."""
    x2 = explicit_inputs[2]
    others = list(all_inputs[len(explicit_inputs) :])
    dy1, y1_again, dy2, y2_again = output_grads
    if isinstance(y1_again.operation, mtf.Constant):
        # No later step recomputed them: these are the zeros of a missing gradient.
        y1_again, y2_again = outputs[0], outputs[2]
    # Wait for the gradients, or all steps would be recomputed at once.
    y1, y2 = wait_for([y1_again, y2_again], [dy1, dy2])
    *inner, addition = forward_operations
    # The last operation of `step` is x1 + f(x2), and the others are those of f.
    residual = addition.inputs[1]
    # x2 = y1, which was not changed, and x1 = y2 - f(y1).
    [residual], (dx2, *d_others) = computed_again(inner, {x2: y1}, [residual], [x2, *others], [dy2])
    # The previous step waits for this one, or activations of both would be stored at once.
    [x1] = wait_for([y2 - residual], [d for d in d_others if d is not None])
    # dx1 = dy2, and dx2 = dy1 + (df/dx2)^T dy2.
    return [dy2, x1, dy1 if dx2 is None else dy1 + dx2, y1, *d_others]
