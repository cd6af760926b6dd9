"""SimdMeshImplInputReader: inputs of a program that all processors run."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Optional

import tensorflow.compat.v1 as tf

from mesh_tensorflow._core.shape import ShapeLike
from mesh_tensorflow._mesh.program import Program
from mesh_tensorflow.experimental.input_reader._batches import (
    batched,
    convert_shapes,
)
from mesh_tensorflow.experimental.input_reader._devices import ProcessDevices
from mesh_tensorflow.experimental.input_reader._infeed import Infeed
from mesh_tensorflow.experimental.input_reader._slicer import SubBatchSlicer

if TYPE_CHECKING:
    from mesh_tensorflow.simd_mesh_impl import SimdMeshImpl

__all__ = ["SimdMeshImplInputReader"]


class _LocalSlicer(SubBatchSlicer):
    """Reads whole batches in this process, for the processors of this process."""

    def _host_device(self, host_id: int, external_worker: bool) -> str:
        return ProcessDevices(self._impl).ordered_hosts[self._pnums[0][0]]


class SimdMeshImplInputReader:
    """Gives each processor of a SimdMeshImpl its slices of the batches of a dataset.

    On a TPU, the hosts send slices by infeed: pass `infeed_queue` to tpu.replicate, and call
    `start_infeed_thread` to send. One host reads whole batches. Of several hosts, one host reads
    each part of the batch that processors share, from its own shard of the dataset. On CPUs and
    GPUs, create the reader within the function that is passed to `replicate`; there,
    `infeed_queue.generate_dequeue_op()` returns the slices.
    """

    def __init__(
        self,
        simd_mesh_impl: SimdMeshImpl,
        ds_creator: Callable[[], tf.data.Dataset],
        mtf_input_shapes: Sequence[ShapeLike],
        ds_prefetch_size: int = -1,
        external_worker: bool = True,
        is_eval_mode: bool = False,
    ):
        """Creates a reader.

        Args:
          simd_mesh_impl: a SimdMeshImpl.
          ds_creator: a function that returns a tf.data.Dataset of single examples. With several
            hosts, it must return the same examples in the same order on each.
          mtf_input_shapes: the Shape of each input, with the batch dimension first.
          ds_prefetch_size: the number of batches to prefetch; -1 lets TensorFlow choose, 0 is none.
          external_worker: whether the hosts of a TPU are tasks of the job "tpu_worker".
          is_eval_mode: whether one host reads whole batches even if there are several hosts.

        Raises:
          ValueError: the data do not fit the shapes.
        """
        self._impl = simd_mesh_impl
        self._ds_creator = ds_creator
        self._shapes = convert_shapes(mtf_input_shapes)
        self._prefetch_size = ds_prefetch_size
        self._external_worker = external_worker
        self._devices = ProcessDevices(simd_mesh_impl)
        self._enqueue: list[tf.Operation] = []
        program = simd_mesh_impl.program
        if program.has_infeed:
            self._make_infeed(is_eval_mode or self._devices.num_hosts == 1)
        else:
            with program.outside():
                self._make_local(program)

    @property
    def infeed_queue(self) -> Infeed:
        """The Infeed from which the program takes its inputs."""
        return self._infeed

    def _infeed_of(
        self, dtypes: Sequence[tf.DType], dequeue: Optional[Callable[[], list[tf.Tensor]]] = None
    ) -> Infeed:
        sizes = [self._impl.slice_shape(shape) for shape in self._shapes]
        return Infeed(dtypes, sizes, self._impl.size, dequeue)

    # -- CPUs and GPUs

    def _make_local(self, program: Program) -> None:
        """Reads whole batches once for all processors of this process."""
        l2p = [self._impl.l2p(pnum) for pnum in range(self._impl.size)]
        here = [pnum for pnum in range(self._impl.size) if l2p[pnum] in program.local]
        slicer = _LocalSlicer(
            self._whole_batches,
            0,
            [here] * len(self._shapes),
            self._impl,
            self._shapes,
            False,
            True,
        )
        pieces: list[list[Any]] = [[None] * self._impl.size for _ in self._shapes]
        for piece, pnum, number in slicer.get_slices():
            pieces[number][l2p[pnum]] = piece
        own = [program.own_tensor(parts) for parts in pieces]
        self._initializers = [slicer.initializer]
        self._infeed = self._infeed_of([x.dtype for x in own], lambda: own)

    def _whole_batches(self) -> tf.data.Dataset:
        return batched(self._ds_creator, self._shapes[0][0].size, self._prefetch_size)

    # -- TPUs

    def _make_infeed(self, global_batch: bool) -> None:
        """Creates slicers on hosts, and the infeed that sends their slices to the cores."""
        slicers = [self._global_slicer()] if global_batch else self._part_slicers()
        self._initializers = [slicer.initializer for slicer in slicers]
        pieces: list[list[Any]] = [[None] * len(self._shapes) for _ in range(self._impl.size)]
        for slicer in slicers:
            for piece, pnum, number in slicer.get_slices():
                pieces[pnum][number] = piece
        self._infeed = self._infeed_of([x.dtype for x in pieces[0]])
        self._enqueue = [
            self._infeed.enqueue(own, host, ordinal)
            for own, host, ordinal in zip(
                pieces, self._devices.ordered_hosts, self._devices.ordered_ordinals
            )
        ]

    def _slicer(
        self,
        creator: Callable[[], tf.data.Dataset],
        host_id: int,
        pnums: Sequence[int],
        global_batch: bool,
    ) -> SubBatchSlicer:
        return SubBatchSlicer(
            creator,
            host_id,
            [pnums] * len(self._shapes),
            self._impl,
            self._shapes,
            self._external_worker,
            global_batch,
        )

    def _global_slicer(self) -> SubBatchSlicer:
        host_id = min(self._devices.host_id_to_its_pnums)
        return self._slicer(self._whole_batches, host_id, range(self._impl.size), True)

    def _part_slicers(self) -> list[SubBatchSlicer]:
        """Returns a slicer for each part of the batch, on a host of a receiving processor."""
        parts: dict[int, list[int]] = {}
        for pnum in range(self._impl.size):
            parts.setdefault(self._impl.slice_begin(self._shapes[0], pnum)[0], []).append(pnum)
        size = self._impl.slice_shape(self._shapes[0])[0]
        load = dict.fromkeys(self._devices.host_id_to_its_pnums, 0)
        slicers = []
        for index, begin in enumerate(sorted(parts)):
            hosts = {self._devices.ordered_host_ids[pnum] for pnum in parts[begin]}
            host_id = min(hosts, key=lambda host: (load[host], host))
            load[host_id] += 1

            def read(index: int = index) -> tf.data.Dataset:
                return batched(self._ds_creator, size, self._prefetch_size, len(parts), index)

            slicers.append(self._slicer(read, host_id, parts[begin], False))
        return slicers

    # -- steps

    def start_infeed_thread(
        self, sess: tf.Session, number_steps: int = -1, initial_wait_sec: float = 0.5
    ) -> threading.Thread:
        """Starts reading at the beginning of the dataset, and on a TPU starts a thread that sends.

        Args:
          sess: a tf.Session of the reader's graph.
          number_steps: the number of steps to send; -1 sends until the data or the session ends.
          initial_wait_sec: seconds that the thread waits before it sends.

        Returns:
          The thread. On CPUs and GPUs, where programs read their own inputs, it does nothing.
        """
        sess.run(self._initializers)

        def send() -> None:
            if not self._enqueue:
                return
            time.sleep(initial_wait_sec)
            step = 0
            while number_steps < 0 or step < number_steps:
                try:
                    sess.run(self._enqueue)
                except (tf.errors.OutOfRangeError, tf.errors.CancelledError, RuntimeError) as e:
                    # The session raises RuntimeError once it is closed.
                    tf.logging.info("Infeed ended after %d steps: %s", step, str(e)[:200])
                    return
                step += 1

        thread = threading.Thread(target=send, name="mtf_infeed", daemon=True)
        thread.start()
        return thread
