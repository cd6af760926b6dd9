"""One step of decoding: from the last id to the logits of the next one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Optional

import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow._core.errors import tensors_text
from mesh_tensorflow.transformer.transformer._context import Context
from mesh_tensorflow.transformer.transformer._inputs import autoregressive_inputs

__all__ = ["IncrementalModel"]


class IncrementalModel:
    """A model that is called for all positions once, and from then on for one at a time.

    The first call, in mode "first_part", has the layers record their states for what is given of
    the sequences. Those in mode "incremental" take the states and return the next ones.

    Attributes:
      states: a list of Tensors, the states after the first call.
    """

    def __init__(
        self,
        model: Any,
        ids: mtf.Tensor,
        initial_position: mtf.Tensor,
        variable_dtype: mtf.VariableDType,
        encoder_output: Optional[mtf.Tensor] = None,
        encoder_sequence_id: Optional[mtf.Tensor] = None,
        encoder_inputs: Optional[mtf.Tensor] = None,
        shared_params: Optional[dict] = None,
        encoder_layer_outputs: Optional[list] = None,
        bos_id: int = 0,
    ) -> None:
        """Creates the first call.

        Args:
          model: a Unitransformer.
          ids: an int32 Tensor with dimensions [batch..., length], 0 from `initial_position` on.
          initial_position: an int32 Tensor with dimensions [batch...], how much is given.
          variable_dtype: a VariableDType.
          encoder_output: a Tensor with dimensions [batch..., memory_length, d_model], or None.
          encoder_sequence_id: a Tensor with dimensions [batch..., memory_length], or None.
          encoder_inputs: a Tensor with dimensions [batch..., memory_length], or None.
          shared_params: a dictionary, see Context; or None.
          encoder_layer_outputs: a list of Tensors, or None.
          bos_id: an int, the input of the first position.

        Raises:
          ValueError: the model or the ids are of the wrong kind.
        """
        _check(model, ids)
        self._model = model
        *batch_dims, length_dim = ids.shape.dims
        mesh = ids.mesh
        positions = mtf.range(mesh, length_dim, tf.int32)
        self._write_priority = positions
        if model.input_full_attention:
            # What is given sees all of itself; the position after it is fed its last id.
            later = mtf.greater(positions, initial_position)
            self._write_priority = positions * mtf.to_int32(later)
        self._arguments = {
            "model": model,
            "mesh": mesh,
            "batch_dims": batch_dims,
            "length_dim": length_dim,
            "variable_dtype": variable_dtype,
            "sequence_id": None if encoder_sequence_id is None else 1,
            "encoder_output": encoder_output,
            "encoder_sequence_id": encoder_sequence_id,
            "encoder_inputs": encoder_inputs,
            "encoder_layer_outputs": encoder_layer_outputs,
            "shared_params": shared_params,
            "constant_states": [],
            "write_priority": self._write_priority,
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

    def _context(self, **kwargs: Any) -> Context:
        return Context(**self._arguments, new_states=[], **kwargs)

    def step(
        self, position: mtf.Tensor, last_ids: mtf.Tensor, states: Sequence[mtf.Tensor]
    ) -> tuple[mtf.Tensor, list[mtf.Tensor]]:
        """Returns the logits of a position, and the states after it.

        Args:
          position: an int32 Tensor, a scalar or with dimensions [batch...].
          last_ids: an int32 Tensor with dimensions [batch...], the ids before it.
          states: a list of Tensors.

        Returns:
          (a Tensor with dimensions [batch..., vocab], a list of Tensors).
        """
        context = self._context(
            mode="incremental",
            position=position,
            read_priority=position,
            states=list(states),
            inputs=last_ids,
        )
        # All variables are there: a layer that asks for another one is in error.
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


def _check(model: Any, ids: mtf.Tensor) -> None:
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
