"""PlacementMeshImplInputReader: inputs of a PlacementMeshImpl."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow.compat.v1 as tf

from mesh_tensorflow._core.shape import ShapeLike
from mesh_tensorflow.experimental.input_reader._batches import (
    batched,
    check_elements,
    convert_shapes,
)

if TYPE_CHECKING:
    from mesh_tensorflow.placement_mesh_impl import PlacementMeshImpl

__all__ = ["PlacementMeshImplInputReader"]


class PlacementMeshImplInputReader:
    """Gives a model the slices of its inputs for all processors of a PlacementMeshImpl."""

    def __init__(
        self,
        placement_mesh_impl: PlacementMeshImpl,
        ds_creator: Callable[[], tf.data.Dataset],
        mtf_input_shapes: Sequence[ShapeLike],
        ds_prefetch_size: int = -1,
        is_eval_mode: bool = False,
    ):
        """Creates a reader.

        Args:
          placement_mesh_impl: a PlacementMeshImpl.
          ds_creator: a function that returns a tf.data.Dataset of single examples.
          mtf_input_shapes: the Shape of each input, with the batch dimension first.
          ds_prefetch_size: the number of batches to prefetch; -1 lets TensorFlow choose, 0 is none.
          is_eval_mode: ignored; one process always reads whole batches.

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
        """Starts reading at the beginning of the dataset.

        Args:
          sess: a tf.Session of the reader's graph.
        """
        sess.run(self._iterator.initializer)

    def gpu_placement(self, model_fn: Callable[..., Any]) -> Any:
        """Calls a model with the slices of one step.

        Args:
          model_fn: a function with one argument for each input: its slices, a list with one
            tf.Tensor for each processor.

        Returns:
          The result of `model_fn`.
        """
        with tf.device("/cpu:0"):
            batch = tf.nest.flatten(self._iterator.get_next())
            slices = [self._impl.make_slices(x, shape) for x, shape in zip(batch, self._shapes)]
        return model_fn(*slices)
