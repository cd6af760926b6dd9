"""Events of the traces that TensorFlow's profiler writes (`*.xplane.pb`).

The message types are written out here, as far as they are read, because no public module of
TensorFlow has them. Fields have the numbers of tsl/profiler/protobuf/xplane.proto.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

__all__ = ["Event", "read_events", "trace_files"]

# message: (field, number, type, whether it is repeated).
_MESSAGES: dict[str, list[tuple[str, int, str, bool]]] = {
    "XSpace": [("planes", 1, "XPlane", True)],
    "XPlane": [
        ("name", 2, "string", False),
        ("lines", 3, "XLine", True),
        ("event_metadata", 4, "MetadataEntry", True),
    ],
    "MetadataEntry": [("key", 1, "int64", False), ("value", 2, "XEventMetadata", False)],
    "XEventMetadata": [("id", 1, "int64", False), ("name", 2, "string", False)],
    "XLine": [
        ("name", 2, "string", False),
        ("timestamp_ns", 3, "int64", False),
        ("events", 4, "XEvent", True),
    ],
    "XEvent": [
        ("metadata_id", 1, "int64", False),
        ("offset_ps", 2, "int64", False),
        ("duration_ps", 3, "int64", False),
    ],
}


class Event(NamedTuple):
    """Something that took time.

    Attributes:
      name: as the profiler names it; "node:type" of what TensorFlow executes.
      begin: seconds on the clock of the trace.
      seconds: how long it took.
    """

    name: str
    begin: float
    seconds: float


@functools.cache
def _space_class() -> Any:
    """Returns the class of the message XSpace."""
    field_type = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(
        name="mesh_tensorflow_trace.proto", package="mesh_tensorflow_trace", syntax="proto3"
    )
    scalars = {"string": field_type.TYPE_STRING, "int64": field_type.TYPE_INT64}
    for message, fields in _MESSAGES.items():
        declared = file.message_type.add(name=message)
        for name, number, kind, repeated in fields:
            field = declared.field.add(name=name, number=number)
            field.label = field_type.LABEL_REPEATED if repeated else field_type.LABEL_OPTIONAL
            field.type = scalars.get(kind, field_type.TYPE_MESSAGE)
            if kind not in scalars:
                field.type_name = f".{file.package}.{kind}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    found = pool.FindMessageTypeByName(f"{file.package}.XSpace")
    if hasattr(message_factory, "GetMessageClass"):
        return message_factory.GetMessageClass(found)
    return message_factory.MessageFactory(pool).GetPrototype(found)


def trace_files(logdir: str) -> list[Path]:
    """Returns the trace files of the last profile in a directory.

    Args:
      logdir: the directory that the profiler was given, or one within.

    Raises:
      FileNotFoundError: it has none.
    """
    files = sorted(Path(logdir).rglob("*.xplane.pb"))
    if not files:
        raise FileNotFoundError(
            f"no profile in {logdir}: a profile is written at the end of "
            "`with mtf.debug.profile(logdir):`, in plugins/profile/<time>/*.xplane.pb"
        )
    last = max(file.parent for file in files)
    return [file for file in files if file.parent == last]


def read_events(path: Path) -> Iterator[Event]:
    """Yields the events of a trace file.

    Args:
      path: a file `*.xplane.pb`.
    """
    space = _space_class()()
    space.ParseFromString(path.read_bytes())
    for plane in space.planes:
        names = {entry.key: entry.value.name for entry in plane.event_metadata}
        for line in plane.lines:
            for event in line.events:
                yield Event(
                    names.get(event.metadata_id, ""),
                    line.timestamp_ns * 1e-9 + event.offset_ps * 1e-12,
                    event.duration_ps * 1e-12,
                )
