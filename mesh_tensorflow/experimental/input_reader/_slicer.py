"""SubBatchSlicer: reads a part of each batch on one host and slices it for processors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import tensorflow.compat.v1 as tf

from mesh_tensorflow._core.shape import ShapeLike
from mesh_tensorflow.experimental.input_reader._batches import check_elements, convert_shapes
from mesh_tensorflow.experimental.input_reader._devices import _host_id_to_tf_device

if TYPE_CHECKING:
    from mesh_tensorflow.simd_mesh_impl import SimdMeshImpl

__all__ = ["SubBatchSlicer"]


class SubBatchSlicer:
    """Reads a part of each batch, and slices it for the processors that hold this part."""

    def __init__(
        self,
        sub_batch_ds_creator: Callable[[], tf.data.Dataset],
        host_id: int,
        all_sub_batch_pnums: Sequence[Sequence[int]],
        simd_mesh_impl: SimdMeshImpl,
        mtf_input_shapes: Sequence[ShapeLike],
        external_worker: bool,
        global_batch: bool,
    ):
        """Creates a SubBatchSlicer.

        Args:
          sub_batch_ds_creator: a function that returns a tf.data.Dataset whose elements are this
            part of each batch.
          host_id: the task number of the host that reads.
          all_sub_batch_pnums: for each input, the processors that receive slices of this part.
          simd_mesh_impl: a SimdMeshImpl.
          mtf_input_shapes: the Shape of each input, with the batch dimension first.
          external_worker: whether hosts are tasks of the job "tpu_worker".
          global_batch: whether the part is the whole batch.

        Raises:
          ValueError: the data do not fit the shapes.
        """
        self._pnums = [list(pnums) for pnums in all_sub_batch_pnums]
        self._impl = simd_mesh_impl
        self._shapes = convert_shapes(mtf_input_shapes)
        self._global_batch = global_batch
        self._device = self._host_device(host_id, external_worker)
        with tf.device(self._device):
            ds = sub_batch_ds_creator()
            check_elements(ds, self._sizes(), self._shapes)
            self._iterator = tf.data.make_initializable_iterator(ds)

    def _host_device(self, host_id: int, external_worker: bool) -> str:
        return _host_id_to_tf_device(host_id, external_worker)

    def _sizes(self) -> list[list[int]]:
        """Returns the shape of this part of each input."""
        sizes = [shape.to_integer_list for shape in self._shapes]
        if self._global_batch:
            return sizes
        return [
            [self._impl.slice_shape(shape)[0], *whole[1:]]
            for shape, whole in zip(self._shapes, sizes)
        ]

    @property
    def initializer(self) -> tf.Operation:
        """The tf.Operation that starts reading at the beginning of the dataset."""
        return self._iterator.initializer

    def get_slices(self) -> Iterator[tuple[tf.Tensor, int, int]]:
        """Yields (slice, processor number, input number) for all inputs of one step."""
        with tf.device(self._device):
            parts = tf.nest.flatten(self._iterator.get_next())
            for number, (part, shape) in enumerate(zip(parts, self._shapes)):
                for pnum in self._pnums[number]:
                    begin = self._impl.slice_begin(shape, pnum)
                    if not self._global_batch:
                        begin = [0, *begin[1:]]
                    piece = tf.slice(part, begin, self._impl.slice_shape(shape))
                    yield tf.identity(piece), pnum, number
