"""One step of decoding: from the last id to the logits of the next one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow._core.errors import tensors_text
from mesh_tensorflow.transformer.transformer._context import Context
from mesh_tensorflow.transformer.transformer._encoder_outputs import EncoderOutputs
from mesh_tensorflow.transformer.transformer._inputs import autoregressive_inputs

if TYPE_CHECKING:
    from mesh_tensorflow.transformer.transformer._models.unitransformer import Unitransformer

__all__ = ["IncrementalModel"]


class IncrementalModel:
    """A model that is called once for all positions, and then for one position at a time.

    In the first call, in mode "first_part", the layers record their states for the given ids.
    The calls in mode "incremental" take these states and return the next ones.

    Attributes:
      states: a list of Tensors, the states after the first call.
    """

    def __init__(
        self,
        model: Unitransformer,
        ids: mtf.Tensor,
        initial_position: mtf.Tensor,
        variable_dtype: mtf.VariableDType,
        encoded: EncoderOutputs,
        bos_id: int = 0,
    ) -> None:
        """Makes the first call of the model.

        Args:
          model: a Unitransformer.
          ids: an int32 Tensor with dimensions [batch..., length], 0 from `initial_position` on.
          initial_position: an int32 Tensor with dimensions [batch...], the number of given ids.
          variable_dtype: the dtypes of variables: in checkpoints, in memory and in computations.
          encoded: the EncoderOutputs that the model reads.
          bos_id: an int, the input of the first position.

        Raises:
          ValueError: the model is not autoregressive, or the ids are not such a Tensor.
        """
        _check(model, ids)
        self._model = model
        *batch_dims, length_dim = ids.shape.dims
        mesh = ids.mesh
        positions = mtf.range(mesh, length_dim, tf.int32)
        self._write_priority = positions
        if model.input_full_attention:
            # The given ids all see each other. The position after them is fed the last of them.
            later = mtf.greater(positions, initial_position)
            # One priority for all given ids: a position sees what has at most its own.
            self._write_priority = positions * mtf.to_int32(later)
        self._arguments = {
            "model": model,
            "mesh": mesh,
            "batch_dims": batch_dims,
            "length_dim": length_dim,
            "variable_dtype": variable_dtype,
            "sequence_id": None if encoded.encoder_sequence_id is None else 1,
            "constant_states": [],
            "write_priority": self._write_priority,
            **encoded.arguments(),
        }
        context = self._context(
            mode="first_part",
            position=positions,
            position_is_default=True,
            initial_position=initial_position,
            read_priority=self._write_priority,
            inputs=ids,
        )
        inputs = autoregressive_inputs(ids)
        if bos_id:
            first = mtf.constant(mesh, 0, dtype=tf.int32)
            inputs += mtf.one_hot(first, length_dim, bos_id, 0, tf.int32)
        model._call_internal(context, inputs)
        self.states: list[mtf.Tensor] = context.new_states or []

    def first_states(self, given: bool) -> list[mtf.Tensor]:
        """Returns the states before the first step; zeros unless there are given ids."""
        if given:
            return self.states
        return [mtf.zeros(x.mesh, x.shape, x.dtype) for x in self.states]

    def _context(self, **kwargs: Any) -> Context:
        return Context(**self._arguments, new_states=[], **kwargs)

    def step(
        self, position: mtf.Tensor, last_ids: mtf.Tensor, states: Sequence[mtf.Tensor]
    ) -> tuple[mtf.Tensor, list[mtf.Tensor]]:
        """Returns the logits at a position, and the states after it.

        Args:
          position: an int32 Tensor, a scalar or with dimensions [batch...]; or with the dimension
            `speculated` in addition, for several positions that follow each other.
          last_ids: an int32 Tensor with dimensions [batch...], the ids before the position; for
            several positions with dimensions [batch..., speculated].
          states: a list of Tensors, the states before the position.

        Returns:
          (a Tensor with the dimensions of `last_ids` and the vocabulary, a list of Tensors).

        Raises:
          ValueError: the layers record states of other shapes than in mode "first_part".
        """
        context = self._context(
            mode="incremental",
            position=position,
            read_priority=position,
            states=list(states),
            inputs=last_ids,
        )
        # The first call has made all variables. A layer that asks for another one is wrong.
        with tf.variable_scope(tf.get_variable_scope(), reuse=True):
            logits = self._model._call_internal(context, last_ids)
        new_states = context.new_states or []
        if [x.shape for x in new_states] != [x.shape for x in states]:
            raise ValueError(
                f"{self._model.name}: in mode incremental layers must record states of the shapes "
                f"that they recorded in mode first_part, {tensors_text(states)}, not "
                f"{tensors_text(new_states)}"
            )
        return logits, new_states


def _check(model: Unitransformer, ids: mtf.Tensor) -> None:
    if not model.autoregressive:
        raise ValueError(
            f"{model.name} must be autoregressive to be decoded one position at a time; make the "
            "Unitransformer with autoregressive=True"
        )
    if not ids.shape.dims or ids.dtype != tf.int32:
        raise ValueError(
            f"{model.name}: sequences must be an int32 Tensor with dimensions [batch..., length], "
            f"not {tensors_text([ids])}"
        )
