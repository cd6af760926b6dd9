"""Utilities that do not depend on meshes."""

from __future__ import annotations

import contextlib
import contextvars
import heapq
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Optional, Union

import tensorflow as tf2
import tensorflow.compat.v1 as tf

from mesh_tensorflow._calls import within
from mesh_tensorflow._replaced import replaceable

if TYPE_CHECKING:
    from tensorflow.tpu.experimental import Topology

__all__ = [
    "BalancedVariablePlacer",
    "SCALAR_SUMMARIES_COLLECTION_KEY",
    "counted_steps",
    "create_host_call",
    "outside_all_rewrites",
    "remove_summaries",
    "steps_done",
    "topology_rank",
]

SCALAR_SUMMARIES_COLLECTION_KEY = "mtf_scalar_summaries"


@contextlib.contextmanager
def outside_all_rewrites() -> Iterator[None]:
    """Clears control dependencies and leaves the control flow context.

    Within a program that is replicated over processors, it leaves that, too.
    """
    building = not tf.executing_eagerly() and tf.get_default_graph().building_function
    # In a tf.function of eager code, an init_scope would run operations at once, and not in each
    # step.
    lift = building and not tf.executing_eagerly_outside_functions()
    with tf.init_scope() if lift else tf.control_dependencies(None):
        yield


def within_program(graph: Optional[tf.Graph]) -> contextlib.AbstractContextManager[object]:
    """Returns a context that undoes `outside_all_rewrites` for what is added to a program.

    Args:
      graph: the graph of the program; None in eager code. If the current graph is none of those
        around it, the context does nothing.
    """
    around = getattr(graph, "outer_graph", None)
    while around is not None and around is not tf.get_default_graph():
        around = getattr(around, "outer_graph", None)
    return contextlib.nullcontext() if around is None else graph.as_default()  # type: ignore[union-attr]


_steps_done: contextvars.ContextVar[Optional[tf.Tensor]] = contextvars.ContextVar(
    "steps_done", default=None
)


def counted_steps(number: tf.Tensor) -> contextlib.AbstractContextManager[None]:
    """Makes `steps_done` return the given tensor within.

    Args:
      number: an integer tf scalar, the number of completed training steps.
    """
    return within(_steps_done, number)


def steps_done() -> tf.Tensor:
    """Returns the number of completed training steps, an integer tf scalar.

    It is the global step, except within `counted_steps`, which training loops use because
    TensorFlow may read the global step before or after a step increments it.
    """
    number = _steps_done.get()
    if number is not None:
        return number
    if tf.executing_eagerly_outside_functions():
        with tf.init_scope():  # a variable outlives the tf.function that makes it
            step = tf.train.get_or_create_global_step()
        return step.read_value()
    return tf.train.get_or_create_global_step()


class BalancedVariablePlacer:
    """Places each variable on the device with the fewest bytes of variables so far."""

    def __init__(self, devices: Sequence[str], init_usage: Optional[Sequence[int]] = None):
        """Creates a placer.

        Args:
          devices: device strings.
          init_usage: bytes already in use on each device; 0 if None.

        Raises:
          ValueError: `devices` is empty, or `init_usage` has another length.
        """
        usage = [0] * len(devices) if init_usage is None else list(init_usage)
        if not devices or len(usage) != len(devices):
            raise ValueError(
                f"init_usage must give a number for each device: {len(devices)} devices, "
                f"{len(usage)} numbers"
            )
        # Pairs compare by bytes first, so the root of the heap is a device with the fewest.
        self._heap = list(zip(usage, devices))
        heapq.heapify(self._heap)
        self._last_device = devices[0]

    def device_function(self, var: tf.Operation) -> str:
        """Returns the device of a tf operation; operations other than variables get the last one.

        Args:
          var: a tf operation.
        """
        if var.type not in ("Variable", "VariableV2", "VarHandleOp"):
            return self._last_device
        usage, device = heapq.heappop(self._heap)
        dtype = tf.as_dtype(var.get_attr("dtype"))
        shape = tf.TensorShape(var.get_attr("shape"))
        heapq.heappush(self._heap, (usage + dtype.size * (shape.num_elements() or 0), device))
        self._last_device = device
        return device


def create_host_call(model_dir: str) -> Optional[tuple]:
    """Returns a host_call that writes the summaries of mtf.scalar_summary.

    Args:
      model_dir: a directory for the summary files.

    Returns:
      (a function, a list of its tensor arguments), or None if there are no summaries.
    """
    summaries = tf.get_collection(SCALAR_SUMMARIES_COLLECTION_KEY)
    if not summaries:
        return None
    names, values = zip(*summaries)
    # The values of all cores are concatenated along the first dimension.
    columns = [tf.reshape(tf.cast(value, tf.float32), [1]) for value in values]
    step = tf.reshape(tf.cast(tf.train.get_or_create_global_step(), tf.int64), [1])

    def write(global_step: tf.Tensor, *tensors: tf.Tensor) -> list:
        writer = tf2.summary.create_file_writer(model_dir)
        # The same as tf.summary.scalar, which requires TensorBoard.
        scalars = tf.SummaryMetadata(
            plugin_data=tf.SummaryMetadata.PluginData(plugin_name="scalars")
        )
        with writer.as_default(), tf2.summary.record_if(True):
            for name, value in zip(names, tensors):
                tf2.summary.write(
                    name, tf.reduce_mean(value), step=global_step[0], metadata=scalars
                )
            return tf.summary.all_v2_summary_ops()

    return write, [step, *columns]


def remove_summaries() -> None:
    """Empties the collection of scalar summaries of the default graph."""
    tf.get_default_graph().clear_collection(SCALAR_SUMMARIES_COLLECTION_KEY)


def topology_rank(topology: Union[Topology, bytes, str]) -> int:
    """Returns the number of dimensions of a TPU topology.

    Args:
      topology: a tf Topology, or a serialized TopologyProto.
    """
    if isinstance(topology, (bytes, str)):
        from tensorflow.python.tpu.topology import Topology

        topology = Topology(serialized=topology)
    if not hasattr(topology, "mesh_shape"):
        raise ValueError(f"topology_rank takes a Topology or a serialized one, not {topology!r}")
    return len(topology.mesh_shape)


# -- the scalars of mtf.scalar_summary as results of the program that has made them


def summaries_so_far() -> int:
    """Returns the number of scalars that the collection of the default graph has."""
    return len(tf.get_collection(SCALAR_SUMMARIES_COLLECTION_KEY))


def taken_summaries(start: int) -> dict[str, tf.Tensor]:
    """Takes scalars out of the collection of mtf.scalar_summary; returns them by name.

    Args:
      start: `summaries_so_far()` before the program was built.

    Returns:
      A float32 tf.Tensor for each name; those of what is within a loop are left out, with a
      warning.
    """
    collection = tf.get_collection_ref(SCALAR_SUMMARIES_COLLECTION_KEY)
    scalars, graph = dict(collection[start:]), tf.get_default_graph()
    del collection[start:]
    # A new node is in the loop or branch, if any, that the program is being built in.
    around = tf.no_op()._get_control_flow_context()
    outside = {
        name: tf.cast(x, tf.float32)
        for name, x in scalars.items()
        if x.graph is graph and x.op._get_control_flow_context() is around
    }
    if len(outside) < len(scalars):
        tf.logging.warning(
            "Summaries of what is within loops are left out: %s",
            ", ".join(scalars.keys() - outside.keys()),
        )
    return outside


replaceable(__name__)
