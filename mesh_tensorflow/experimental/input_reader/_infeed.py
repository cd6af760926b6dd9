"""Infeed: the inputs of a program that all processors run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Optional

import tensorflow.compat.v1 as tf

__all__ = ["Infeed"]


class Infeed:
    """The inputs of each step: the `infeed_queue` of tpu.replicate, or of a program on CPUs.

    Attributes:
      tuple_types: the dtype of each input.
      tuple_shapes: the shape of one processor's slice of each input.
    """

    def __init__(
        self,
        tuple_types: Sequence[tf.DType],
        tuple_shapes: Sequence[Sequence[int]],
        number_of_shards: int,
        dequeue: Optional[Callable[[], list[tf.Tensor]]] = None,
    ):
        """Creates an Infeed.

        Args:
          tuple_types: the dtype of each input.
          tuple_shapes: the shape of one processor's slice of each input.
          number_of_shards: the number of processors.
          dequeue: returns the slices within the program; if None, they come by the infeed of a TPU.
        """
        self.tuple_types = list(tuple_types)
        self.tuple_shapes = [tf.TensorShape(sizes) for sizes in tuple_shapes]
        self._shards = number_of_shards
        self._dequeue = dequeue or self._from_tpu

    @property
    def number_of_tuple_elements(self) -> int:
        """The number of inputs."""
        return len(self.tuple_types)

    @property
    def number_of_shards(self) -> int:
        """The number of processors."""
        return self._shards

    def set_number_of_shards(self, number_of_shards: int) -> None:
        """Checks the number of replicas, for tpu.replicate.

        Args:
          number_of_shards: the number of replicas.

        Raises:
          ValueError: the mesh has another number of processors.
        """
        if number_of_shards != self._shards:
            raise ValueError(
                f"the infeed is for the {self._shards} processors of its mesh, but the program has "
                f"{number_of_shards} replicas. Replicate it over as many as the mesh has"
            )

    def _from_tpu(self) -> list[tf.Tensor]:
        return list(
            tf.raw_ops.InfeedDequeueTuple(dtypes=self.tuple_types, shapes=self.tuple_shapes)
        )

    def generate_dequeue_op(self, tpu_device: int = 0) -> list[tf.Tensor]:
        """Returns the processor's slices of the inputs of a step, within the program.

        Args:
          tpu_device: ignored; each replica has one core.
        """
        del tpu_device
        return self._dequeue()

    def enqueue(self, pieces: Sequence[tf.Tensor], host: str, ordinal: int) -> tf.Operation:
        """Returns a tf.Operation that sends a TPU core its slices of a step.

        Args:
          pieces: a tf.Tensor for each input.
          host: the device of the core's host.
          ordinal: the ordinal of the core on its host.
        """
        with tf.device(host):
            return tf.raw_ops.InfeedEnqueueTuple(
                inputs=list(pieces), shapes=self.tuple_shapes, device_ordinal=ordinal
            )
