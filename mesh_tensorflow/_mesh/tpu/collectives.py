"""Collectives between the cores of a TPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Optional

import tensorflow.compat.v1 as tf

from mesh_tensorflow._core.errors import dims_text, table_lookup
from mesh_tensorflow._core.layout import pnum_to_processor_coordinates, processor_groups
from mesh_tensorflow._core.shape import Shape
from mesh_tensorflow._mesh.reducer import Reducer
from mesh_tensorflow._mesh.slices.functions import reduction_fn
from mesh_tensorflow._mesh.tpu.context import (
    outside_tpu_context,
    tpu_context,
    within_tpu_context,
)

__all__ = ["TpuCollectives"]

# The dtype that each dtype is summed in, without loss or as exactly as float32; other dtypes are
# gathered.
_SUMMED_AS = {
    tf.float32: tf.float32,
    tf.float64: tf.float64,
    tf.float16: tf.float32,
    tf.bfloat16: tf.bfloat16,
    tf.int32: tf.int32,
    tf.uint32: tf.uint32,
    **dict.fromkeys([tf.bool, tf.int8, tf.uint8, tf.int16, tf.uint16], tf.int32),
}
_LOGICAL = {"MAX": tf.reduce_any, "MIN": tf.reduce_all}

# Dtypes that are cast without loss for CollectivePermute, and those that are bitcast.
_CAST = {
    tf.float16: tf.float32,
    **dict.fromkeys([tf.bool, tf.int8, tf.uint8, tf.int16, tf.uint16], tf.int32),
}
_BITCAST = (tf.uint32, tf.int64, tf.uint64, tf.float64)


class TpuCollectives(Reducer[tf.Tensor]):
    """Collectives along the axes of a mesh, within tpu.rewrite, tpu.replicate or tpu.shard.

    Replica i of the computation is the core with physical number i. All cores run one program; its
    groups consist of physical numbers, in the order of the cores' coordinates.
    """

    def __init__(
        self,
        mesh_shape: Shape,
        logical_to_physical: Sequence[int],
        allreduce_in_bfloat16_max_group_size: int = 8,
    ):
        """Creates a TpuCollectives.

        Args:
          mesh_shape: the logical mesh.
          logical_to_physical: the physical number of each logical processor.
          allreduce_in_bfloat16_max_group_size: larger groups sum bfloat16 in float32.

        Raises:
          ValueError: `logical_to_physical` is not a permutation.
        """
        numbers = list(range(mesh_shape.size))
        self._shape = mesh_shape
        self._physical = [int(p) for p in logical_to_physical]
        if sorted(self._physical) != numbers:
            raise ValueError(
                f"logical_to_physical must have each of 0 to {mesh_shape.size - 1} once, for the "
                f"mesh {dims_text(mesh_shape)}; got {self._physical}"
            )
        self._logical = [self._physical.index(p) for p in numbers]
        self._bfloat16_max_group_size = allreduce_in_bfloat16_max_group_size
        self._pnum: Any = None
        self._pnum_context: Any = None

    # -- processor numbers

    def pnum(self) -> tf.Tensor:
        """Returns the logical number of the current core, an int32 scalar.

        Raises:
          ValueError: no replicated computation is being built, or it does not have one replica for
            each processor.
        """
        context = self._context()
        if context is not self._pnum_context:
            with outside_tpu_context():
                # One input of the computation that is another number for each replica: all cores
                # run the same program, and nothing in it tells them apart.
                numbers = [tf.constant(p, tf.int32) for p in range(self._shape.size)]
                physical = tf.raw_ops.TPUReplicatedInput(inputs=numbers, name="physical_pnum")
            with within_tpu_context():
                if self._logical == sorted(self._logical):
                    self._pnum = tf.identity(physical, name="pnum")
                else:
                    self._pnum = tf.gather(
                        tf.constant(self._logical, tf.int32), physical, name="pnum"
                    )
            self._pnum_context = context
        return self._pnum

    def _context(self) -> Any:
        """Returns the context of the computation being built, after checking its replicas."""
        context, _ = tpu_context()
        if context is None:
            raise ValueError(
                f"collectives of the TPU mesh {dims_text(self._shape)} are used outside of a "
                "replicated computation. Build the program in a function and give it to "
                "tf.compat.v1.tpu.rewrite, replicate or shard"
            )
        replicas = context._num_replicas
        if replicas != self._shape.size:
            raise ValueError(
                f"the replicated computation has {replicas} replicas, the mesh "
                f"{dims_text(self._shape)} has {self._shape.size} processors. Replicate it over "
                "a device assignment with a replica for each processor"
            )
        return context

    def own(self, table: Sequence[Any], dtype: tf.DType = tf.int32) -> tf.Tensor:
        """Returns the current core's entry of a table with an entry for each logical processor."""
        if all(entry == table[0] for entry in table):
            return tf.constant(table[0], dtype)
        return tf.gather(tf.constant(list(table), dtype), self.pnum())

    def _by_coordinate(
        self, mesh_axis: int, table: Sequence[Any], dtype: tf.DType = tf.int32
    ) -> tf.Tensor:
        """Returns the entry for the current core's coordinate along a mesh axis."""
        coordinates = [
            pnum_to_processor_coordinates(self._shape, pnum)[mesh_axis]
            for pnum in range(self._shape.size)
        ]
        return self.own([table[c] for c in coordinates], dtype)

    def _groups(self, mesh_axes: Sequence[int]) -> list[list[int]]:
        """Returns groups of physical numbers, with members in order of logical number."""
        self._context()
        groups = processor_groups(self._shape, sorted(mesh_axes))
        return [[self._physical[pnum] for pnum in group] for group in groups]

    # -- collectives

    def allreduce(self, x: tf.Tensor, mesh_axes: Sequence[int], reduction: str) -> tf.Tensor:
        """Reduces over the processors that differ along mesh axes.

        Maxima, minima, and sums of dtypes that TPUs do not sum, are gathered axis by axis and
        reduced on each core. Booleans are reduced by logical or (SUM, MAX) or logical and (MIN).

        Args:
          x: this core's tf.Tensor.
          mesh_axes: mesh axes.
          reduction: "SUM", "MAX" or "MIN".
        """
        reduce_fn = reduction_fn(reduction)
        axes = sorted(axis for axis in set(mesh_axes) if self._shape[axis].size > 1)
        if not axes:
            return x
        if reduction == "SUM" and x.dtype in _SUMMED_AS:
            return self._cross_replica_sum(x, axes)
        if x.dtype == tf.bool:
            reduce_fn = table_lookup(_LOGICAL, reduction, "reduction")
        for axis in axes:
            x = reduce_fn(self.allgather(x, axis), axis=0)
        return x

    def _cross_replica_sum(self, x: tf.Tensor, mesh_axes: Sequence[int]) -> tf.Tensor:
        groups = self._groups(mesh_axes)
        dtype = _SUMMED_AS[x.dtype]
        if dtype == tf.bfloat16 and len(groups[0]) > self._bfloat16_max_group_size:
            dtype = tf.float32
        y = tf.raw_ops.CrossReplicaSum(
            input=tf.cast(x, dtype), group_assignment=tf.constant(groups, tf.int32)
        )
        return tf.cast(y, x.dtype)

    def allgather(self, x: tf.Tensor, mesh_axis: int) -> tf.Tensor:
        """Returns [n, ...]: the slices of the processors along a mesh axis, by coordinate."""
        n = self._shape[mesh_axis].size
        # An exchange in which every part is the whole slice; a sum of slices times one-hots, as in
        # the classic, would spread a NaN to all of them.
        copies = tf.broadcast_to(tf.expand_dims(x, 0), [n, *x.shape.as_list()])
        return self._all_to_all(copies, mesh_axis, 0, 0)

    def alltoall(
        self, x: tf.Tensor, mesh_axis: int, split_axis: int, concat_axis: int
    ) -> tf.Tensor:
        """Sends part i of each slice to processor i along a mesh axis.

        It preserves all bits of any dtype.

        Args:
          x: this core's tf.Tensor.
          mesh_axis: a mesh axis.
          split_axis: the axis along which `x` is split.
          concat_axis: the axis along which received parts are concatenated.

        Raises:
          ValueError: the size of `split_axis` is not divisible by that of the mesh axis.
        """
        n, size = self._shape[mesh_axis].size, x.shape.as_list()[split_axis]
        if size % n:
            raise ValueError(
                f"alltoall cuts axis {split_axis} of a slice of shape {x.shape} in {n} parts, for "
                f"the mesh dimension {dims_text([self._shape[mesh_axis]])}, which does not divide "
                f"{size}. Give the tensor dimension a multiple of the sizes of both mesh dimensions"
            )
        return x if n == 1 else self._all_to_all(x, mesh_axis, split_axis, concat_axis)

    def _all_to_all(
        self, x: tf.Tensor, mesh_axis: int, split_axis: int, concat_axis: int
    ) -> tf.Tensor:
        rank = x.shape.ndims
        return tf.raw_ops.AllToAll(
            input=x,
            group_assignment=tf.constant(self._groups([mesh_axis]), tf.int32),
            concat_dimension=concat_axis % rank,
            split_dimension=split_axis % rank,
            split_count=self._shape[mesh_axis].size,
        )

    def permute(
        self, x: tf.Tensor, mesh_axis: int, source_pcoord: Sequence[Optional[int]]
    ) -> tf.Tensor:
        """Returns the slice of the processor with another coordinate along a mesh axis, or zeros.

        If each slice has at most one receiver, slices are sent point to point.

        Args:
          x: this core's tf.Tensor.
          mesh_axis: a mesh axis.
          source_pcoord: for each coordinate along it that of the source, or None for zeros.

        Raises:
          ValueError: the number of sources is not that of the processors along the axis, or a
            source is out of range.
        """
        sources = list(source_pcoord)
        n = self._shape[mesh_axis].size
        if len(sources) != n or any(s is not None and not 0 <= s < n for s in sources):
            raise ValueError(
                f"source_pcoord names, for each of the {n} coordinates along the mesh dimension "
                f"{dims_text([self._shape[mesh_axis]])}, another of them or None; got {sources}"
            )
        named = [s for s in sources if s is not None]
        # CollectivePermute has one receiver for each sender.
        if len(set(named)) < len(named):
            return self._select(x, mesh_axis, sources)
        pairs = [
            [group[source], group[target]]
            for group in self._groups([mesh_axis])
            for target, source in enumerate(sources)
            if source is not None
        ]
        if not pairs:
            return tf.zeros_like(x)
        there, back = _conversions(x.dtype)
        return back(
            tf.raw_ops.CollectivePermute(
                input=there(x), source_target_pairs=tf.constant(pairs, tf.int32)
            )
        )

    def _select(self, x: tf.Tensor, mesh_axis: int, sources: Sequence[Optional[int]]) -> tf.Tensor:
        """Implements `permute` where a slice has several receivers."""
        y = tf.gather(
            self.allgather(x, mesh_axis),
            self._by_coordinate(mesh_axis, [source or 0 for source in sources]),
        )
        if None not in sources:
            return y
        holds = self._by_coordinate(mesh_axis, [s is not None for s in sources], tf.bool)
        return tf.where(holds, y, tf.zeros_like(y))


def _conversions(dtype: tf.DType) -> tuple[Callable, Callable]:
    """Returns lossless conversions to and from the dtypes of CollectivePermute."""
    if dtype in _CAST:
        return (lambda x: tf.cast(x, _CAST[dtype])), (lambda y: tf.cast(y, dtype))
    if dtype in _BITCAST:
        return (lambda x: tf.bitcast(x, tf.int32)), (lambda y: tf.bitcast(y, dtype))
    return tf.identity, tf.identity
