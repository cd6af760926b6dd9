"""Input readers: give each processor of a mesh its slices of the batches of a dataset."""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Optional

import tensorflow as tf2
import tensorflow.compat.v1 as tf

from mesh_tensorflow._core.errors import dims_text
from mesh_tensorflow._core.shape import Shape, ShapeLike, convert_to_shape
from mesh_tensorflow._mesh.program import Program

if TYPE_CHECKING:
    from mesh_tensorflow.placement_mesh_impl import PlacementMeshImpl
    from mesh_tensorflow.simd_mesh_impl import SimdMeshImpl

__all__ = [
    "PlacementMeshImplInputReader",
    "ProcessDevices",
    "SimdMeshImplInputReader",
    "SubBatchSlicer",
    "_host_id_to_tf_device",
]


def convert_shapes(mtf_input_shapes: Sequence[ShapeLike]) -> list[Shape]:
    """Returns the Shapes of a dataset's components, batch first.

    Args:
      mtf_input_shapes: Shapes, or what converts to them.

    Raises:
      ValueError: there are none, or their first dimensions differ.
    """
    shapes = [convert_to_shape(shape) for shape in mtf_input_shapes]
    if not shapes or any(not len(s) or s[0] != shapes[0][0] for s in shapes):
        raise ValueError(
            "mtf_input_shapes: each input needs a shape that begins with the dimension of the "
            f"batch, the same for all; got {[str(s) for s in shapes]}"
        )
    return shapes


def batched(
    ds_creator: Callable[[], tf.data.Dataset],
    size: int,
    prefetch_size: int,
    shards: int = 1,
    index: int = 0,
) -> tf.data.Dataset:
    """Returns a dataset of batches; drops the remainder at the end.

    Args:
      ds_creator: a function that returns a tf.data.Dataset of single examples.
      size: the batch size.
      prefetch_size: the number of batches to prefetch; -1 lets TensorFlow choose, 0 is none.
      shards: the number of shards; a shard has one of so many batches.
      index: the number of the shard.
    """
    # A smaller batch at the end would not fit the static shapes of the program.
    ds = ds_creator().batch(size, drop_remainder=True)
    if shards > 1:
        # A whole batch is `shards` of these batches in a row, so each shard has its part of all of
        # them.
        ds = ds.shard(shards, index)
    if prefetch_size == 0:
        return ds
    return ds.prefetch(tf2.data.AUTOTUNE if prefetch_size < 0 else prefetch_size)


def checked_iterator(
    ds: tf.data.Dataset, sizes: Sequence[Sequence[int]], shapes: Sequence[Shape]
) -> Any:
    """Returns an initializable iterator of a dataset whose elements have the right shapes.

    Args:
      ds: a tf.data.Dataset of batches.
      sizes: for each input, the shape of a batch.
      shapes: the Shapes of the inputs, for the error message.

    Raises:
      ValueError: there are more or fewer inputs than shapes, or sizes differ.
    """
    # A wrong shape would otherwise fail in a step, on some processor.
    specs = tf.nest.flatten(tf.data.get_output_shapes(ds))
    fits = len(specs) == len(sizes) and all(
        spec.is_compatible_with(wanted) for spec, wanted in zip(specs, sizes)
    )
    if not fits:
        raise ValueError(
            f"the data set has batches of {[s.as_list() for s in specs]}, but mtf_input_shapes "
            f"say {[dims_text(shape) for shape in shapes]}, of which {[list(s) for s in sizes]} is "
            "read at a time. ds_creator must return single examples, of the same sizes without "
            "the batch"
        )
    return tf.data.make_initializable_iterator(ds)


def _host_id_to_tf_device(host_id: int, external_worker: bool) -> str:
    """Returns the device string of a TPU's host.

    Args:
      host_id: the task number of the host.
      external_worker: whether the host is a task of the job "tpu_worker" instead of the job of the
        session.
    """
    job = "/job:tpu_worker" if external_worker else ""
    return f"{job}/task:{host_id}/device:CPU:0"


class ProcessDevices:
    """The cores and hosts of the processors of a mesh, in order of logical processor number.

    On CPUs and GPUs, these are the devices of the program that is being replicated.

    Attributes:
      ordered_ordinals: the ordinal of each processor's core on its host.
      ordered_tpus: the device of each processor.
      ordered_hosts: the CPU device of each processor's host.
      ordered_host_ids: the task number of each processor's host.
      host_id_to_its_pnums: the processors of each host, by its task number.
      num_cores: the number of processors.
      num_hosts: the number of hosts of the mesh.
    """

    def __init__(self, simd_mesh_impl: SimdMeshImpl):
        """Creates a ProcessDevices.

        Args:
          simd_mesh_impl: a SimdMeshImpl.
        """
        assignment = simd_mesh_impl.device_assignment
        if simd_mesh_impl.program.has_infeed:
            assert assignment is not None  # a TPU program has one
            # A layout counts logical processors, and an assignment physical ones.
            numbers = [simd_mesh_impl.l2p(pnum) for pnum in range(simd_mesh_impl.size)]
            self.ordered_tpus = [assignment.tpu_device(replica=n) for n in numbers]
            self.ordered_hosts = [assignment.host_device(replica=n) for n in numbers]
            self.ordered_ordinals = [assignment.tpu_ordinal(replica=n) for n in numbers]
        else:
            self.ordered_tpus = simd_mesh_impl.devices
            specs = [tf.DeviceSpec.from_string(device) for device in self.ordered_tpus]
            # The CPU in the process of a device.
            self.ordered_hosts = [
                spec.replace(device_type="CPU", device_index=0).to_string() for spec in specs
            ]
            self.ordered_ordinals = [spec.device_index or 0 for spec in specs]
        self.ordered_host_ids = [
            tf.DeviceSpec.from_string(host).task or 0 for host in self.ordered_hosts
        ]
        self.host_id_to_its_pnums: dict[int, list[int]] = collections.defaultdict(list)
        for pnum, host_id in enumerate(self.ordered_host_ids):
            self.host_id_to_its_pnums[host_id].append(pnum)
        self.num_cores = len(self.ordered_tpus)
        self.num_hosts = len(self.host_id_to_its_pnums)

    @property
    def num_cores_per_host(self) -> int:
        """The number of processors of each host.

        Raises:
          ValueError: hosts have different numbers of processors.
        """
        counts = {host: len(pnums) for host, pnums in self.host_id_to_its_pnums.items()}
        if len(set(counts.values())) > 1:
            raise ValueError(
                f"num_cores_per_host: hosts have different numbers of processors, {counts}; "
                "host_id_to_its_pnums lists them"
            )
        return next(iter(counts.values()))


class SubBatchSlicer:
    """Reads a part of each batch, and slices it for the processors that hold this part.

    Attributes:
      initializer: the tf.Operation that starts reading at the beginning of the dataset.
    """

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
        if simd_mesh_impl.program.has_infeed:
            self._device = _host_id_to_tf_device(host_id, external_worker)
        else:  # each process of CPUs and GPUs reads for its own
            self._device = ProcessDevices(simd_mesh_impl).ordered_hosts[self._pnums[0][0]]
        with tf.device(self._device):
            self._iterator = checked_iterator(sub_batch_ds_creator(), self._sizes(), self._shapes)
        self.initializer: tf.Operation = self._iterator.initializer

    def _sizes(self) -> list[list[int]]:
        """Returns the shape of this part of each input."""
        sizes = [shape.to_integer_list for shape in self._shapes]
        if self._global_batch:
            return sizes
        return [
            # Along the batch alone: slices of other dimensions are cut from what was read.
            [self._impl.slice_shape(shape)[0], *whole[1:]]
            for shape, whole in zip(self._shapes, sizes)
        ]

    def get_slices(self) -> Iterator[tuple[tf.Tensor, int, int]]:
        """Yields (slice, processor number, input number) for all inputs of one step."""
        with tf.device(self._device):
            tensors = tf.nest.flatten(self._iterator.get_next())
            for number, (part, shape) in enumerate(zip(tensors, self._shapes)):
                for pnum in self._pnums[number]:
                    begin = self._impl.slice_begin(shape, pnum)
                    if not self._global_batch:
                        # What was read begins where the slice does.
                        begin = [0, *begin[1:]]
                    piece = tf.slice(part, begin, self._impl.slice_shape(shape))
                    yield tf.identity(piece), pnum, number


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
            sizes = [shape.to_integer_list for shape in self._shapes]
            self._iterator = checked_iterator(ds, sizes, self._shapes)

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


class Infeed:
    """The inputs of each step: the `infeed_queue` of tpu.replicate, or of a program on CPUs.

    Attributes:
      tuple_types: the dtype of each input.
      tuple_shapes: the shape of one processor's slice of each input.
      number_of_tuple_elements: the number of inputs.
      number_of_shards: the number of processors.
    """

    def __init__(
        self,
        tuple_types: Sequence[tf.DType],
        tuple_shapes: Sequence[Sequence[int]],
        number_of_shards: int,
        own: Optional[list[tf.Tensor]] = None,
    ):
        """Creates an Infeed.

        Args:
          tuple_types: the dtype of each input.
          tuple_shapes: the shape of one processor's slice of each input.
          number_of_shards: the number of processors.
          own: the slices within the program; if None, they come by the infeed of a TPU.
        """
        self.tuple_types = list(tuple_types)
        self.tuple_shapes = [tf.TensorShape(sizes) for sizes in tuple_shapes]
        self.number_of_tuple_elements = len(self.tuple_types)
        self.number_of_shards = number_of_shards
        self._own = own

    def set_number_of_shards(self, number_of_shards: int) -> None:
        """Checks the number of replicas, for tpu.replicate.

        Args:
          number_of_shards: the number of replicas.

        Raises:
          ValueError: the mesh has another number of processors.
        """
        if number_of_shards != self.number_of_shards:
            raise ValueError(
                f"the infeed is for the {self.number_of_shards} processors of its mesh, but the "
                f"program has {number_of_shards} replicas. Replicate it over as many as the mesh "
                "has"
            )

    def generate_dequeue_op(self, tpu_device: int = 0) -> list[tf.Tensor]:
        """Returns the processor's slices of the inputs of a step, within the program.

        Args:
          tpu_device: ignored; each replica has one core.
        """
        del tpu_device
        if self._own is not None:
            return self._own
        return list(
            tf.raw_ops.InfeedDequeueTuple(dtypes=self.tuple_types, shapes=self.tuple_shapes)
        )

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


class SimdMeshImplInputReader:
    """Gives each processor of a SimdMeshImpl its slices of the batches of a dataset.

    On a TPU, the hosts send slices by infeed: pass `infeed_queue` to tpu.replicate, and call
    `start_infeed_thread` to send. One host reads whole batches. Of several hosts, one host reads
    each part of the batch that processors share, from its own shard of the dataset. On CPUs and
    GPUs, create the reader within the function that is passed to `replicate`; there,
    `infeed_queue.generate_dequeue_op()` returns the slices.

    Attributes:
      infeed_queue: the Infeed from which the program takes its inputs.
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
        self._sizes = [simd_mesh_impl.slice_shape(shape) for shape in self._shapes]
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

    # -- CPUs and GPUs

    def _make_local(self, program: Program) -> None:
        """Reads whole batches once for all processors of this process."""
        l2p = [self._impl.l2p(pnum) for pnum in range(self._impl.size)]
        local = [pnum for pnum in range(self._impl.size) if l2p[pnum] in program.local]
        # One for all of them: within the program, each processor would read all batches again.
        slicer = self._slicer(self._whole_batches, 0, local, True)
        pieces: list[list[Any]] = [[None] * self._impl.size for _ in self._shapes]
        for piece, pnum, number in slicer.get_slices():
            # The layout counts logical processors, and the program its devices.
            pieces[number][l2p[pnum]] = piece
        # One program is traced for all: within it, each of these is a processor's own piece.
        own = [program.own_tensor(parts) for parts in pieces]
        self._initializers = [slicer.initializer]
        self.infeed_queue = Infeed([x.dtype for x in own], self._sizes, self._impl.size, own)

    def _whole_batches(self) -> tf.data.Dataset:
        return batched(self._ds_creator, self._shapes[0][0].size, self._prefetch_size)

    # -- TPUs

    def _make_infeed(self, global_batch: bool) -> None:
        """Creates slicers on hosts, and the infeed that sends their slices to the cores."""
        if global_batch:
            host_id = min(self._devices.host_id_to_its_pnums)
            every = range(self._impl.size)
            slicers = [self._slicer(self._whole_batches, host_id, every, True)]
        else:
            slicers = self._part_slicers()
        self._initializers = [slicer.initializer for slicer in slicers]
        pieces: list[list[Any]] = [[None] * len(self._shapes) for _ in range(self._impl.size)]
        for slicer in slicers:
            for piece, pnum, number in slicer.get_slices():
                pieces[pnum][number] = piece
        self.infeed_queue = Infeed([x.dtype for x in pieces[0]], self._sizes, self._impl.size)
        # From each core's own host, also what another one read: ordinals count the cores of a host.
        self._enqueue = [
            self.infeed_queue.enqueue(own, host, ordinal)
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

    def _part_slicers(self) -> list[SubBatchSlicer]:
        """Returns a slicer for each part of the batch, on a host of a receiving processor."""
        parts: dict[int, list[int]] = {}
        for pnum in range(self._impl.size):
            parts.setdefault(self._impl.slice_begin(self._shapes[0], pnum)[0], []).append(pnum)
        # All inputs begin with the same dimension, so the first one tells the parts of all.
        size = self._impl.slice_shape(self._shapes[0])[0]
        load = dict.fromkeys(self._devices.host_id_to_its_pnums, 0)
        slicers = []
        for index, begin in enumerate(sorted(parts)):
            hosts = {self._devices.ordered_host_ids[pnum] for pnum in parts[begin]}
            # Of the hosts that need a part, the one that reads the fewest parts so far.
            host_id = min(hosts, key=lambda host: (load[host], host))
            load[host_id] += 1

            # As a default, the index is that of this part; a closure would see the last one.
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
        # Not in the thread, whose errors the caller would not see.
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

        # A daemon, or a program that ends by an error would wait for a thread that may never end.
        thread = threading.Thread(target=send, name="mtf_infeed", daemon=True)
        thread.start()
        return thread
