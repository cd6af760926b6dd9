"""PlacementMeshImplInputReader: inputs of a mesh of placed devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow.compat.v1 as tf

from mesh_tensorflow.experimental.input_reader._batches import (
    batched,
    check_elements,
    convert_shapes,
)

__all__ = ["PlacementMeshImplInputReader"]


class PlacementMeshImplInputReader:
    """Gives a model the slices of each processor of a PlacementMeshImpl."""

    def __init__(
        self,
        placement_mesh_impl: Any,
        ds_creator: Callable[[], Any],
        mtf_input_shapes: Sequence[Any],
        ds_prefetch_size: int = -1,
        is_eval_mode: bool = False,
    ):
        """Creates a reader.

        Args:
          placement_mesh_impl: a PlacementMeshImpl.
          ds_creator: a function that returns a tf.data.Dataset of single examples.
          mtf_input_shapes: for each input its Shape, the dimension of the batch first.
          ds_prefetch_size: how many batches to hold ready; -1 leaves it to TensorFlow, 0 is none.
          is_eval_mode: as for SimdMeshImplInputReader; one process reads whole batches always.

        Raises:
          ValueError: the data do not fit the shapes.
        """
        del is_eval_mode
        self._impl = placement_mesh_impl
        self._shapes = convert_shapes(mtf_input_shapes)
        with tf.device("/cpu:0"):
            ds = batched(ds_creator, self._shapes[0][0].size, ds_prefetch_size)
            check_elements(ds, [s.to_integer_list for s in self._shapes], self._shapes)
            self._iterator = tf.data.make_initializable_iterator(ds)

    def initialize(self, sess: tf.Session) -> None:
        """Starts reading at the beginning.

        Args:
          sess: a tf.Session of the reader's graph.
        """
        sess.run(self._iterator.initializer)

    def gpu_placement(self, model_fn: Callable[..., Any]) -> Any:
        """Calls a model with the slices of one step.

        Args:
          model_fn: a function of as many arguments as there are inputs, each a list of tf.Tensors,
            one for each processor, as the LaidOutTensor of the mesh takes them.

        Returns:
          What the model returns.
        """
        with tf.device("/cpu:0"):
            batch = tf.nest.flatten(self._iterator.get_next())
            slices = [self._impl.make_slices(x, shape) for x, shape in zip(batch, self._shapes)]
        return model_fn(*slices)
