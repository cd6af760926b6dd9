"""Cores and hosts of the processors of a SIMD mesh, by logical processor number."""

from __future__ import annotations

import collections
from typing import TYPE_CHECKING

import tensorflow.compat.v1 as tf

if TYPE_CHECKING:
    from mesh_tensorflow.simd_mesh_impl import SimdMeshImpl

__all__ = ["ProcessDevices", "_host_id_to_tf_device"]


def _host_id_to_tf_device(host_id: int, external_worker: bool) -> str:
    """Returns the device string of a TPU's host.

    Args:
      host_id: the task number of the host.
      external_worker: whether the host is a task of the job "tpu_worker" instead of the job of the
        session.
    """
    job = "/job:tpu_worker" if external_worker else ""
    return f"{job}/task:{host_id}/device:CPU:0"


def _host_of(device: str) -> str:
    """Returns the CPU device in the process of a device."""
    return tf.DeviceSpec.from_string(device).replace(device_type="CPU", device_index=0).to_string()


class ProcessDevices:
    """The cores and hosts of the processors of a mesh, in order of logical processor number.

    On CPUs and GPUs, these are the devices of the program that is being replicated.
    """

    def __init__(self, simd_mesh_impl: SimdMeshImpl):
        """Creates a ProcessDevices.

        Args:
          simd_mesh_impl: a SimdMeshImpl.
        """
        assignment = simd_mesh_impl.device_assignment
        numbers = [simd_mesh_impl.l2p(pnum) for pnum in range(simd_mesh_impl.size)]
        if simd_mesh_impl.program.has_infeed:
            assert assignment is not None  # a TPU program has one
            self._tpus = [assignment.tpu_device(replica=n) for n in numbers]
            self._hosts = [assignment.host_device(replica=n) for n in numbers]
            self._ordinals = [assignment.tpu_ordinal(replica=n) for n in numbers]
        else:
            self._tpus = [simd_mesh_impl.devices[n] for n in numbers]
            self._hosts = [_host_of(device) for device in self._tpus]
            specs = [tf.DeviceSpec.from_string(device) for device in self._tpus]
            self._ordinals = [spec.device_index or 0 for spec in specs]
        self._host_ids = [tf.DeviceSpec.from_string(host).task or 0 for host in self._hosts]
        self._pnums_by_host: dict[int, list[int]] = collections.defaultdict(list)
        for pnum, host_id in enumerate(self._host_ids):
            self._pnums_by_host[host_id].append(pnum)

    @property
    def ordered_ordinals(self) -> list[int]:
        """The ordinal of each processor's core on its host."""
        return self._ordinals

    @property
    def ordered_tpus(self) -> list[str]:
        """The device of each processor."""
        return self._tpus

    @property
    def ordered_hosts(self) -> list[str]:
        """The CPU device of each processor's host."""
        return self._hosts

    @property
    def ordered_host_ids(self) -> list[int]:
        """The task number of each processor's host."""
        return self._host_ids

    @property
    def host_id_to_its_pnums(self) -> dict[int, list[int]]:
        """The processors of each host, by its task number."""
        return self._pnums_by_host

    @property
    def num_cores(self) -> int:
        """The number of processors."""
        return len(self._tpus)

    @property
    def num_hosts(self) -> int:
        """The number of hosts of the mesh."""
        return len(self._pnums_by_host)

    @property
    def num_cores_per_host(self) -> int:
        """The number of processors of each host.

        Raises:
          ValueError: hosts have different numbers of processors.
        """
        counts = {host: len(pnums) for host, pnums in self._pnums_by_host.items()}
        if len(set(counts.values())) > 1:
            raise ValueError(
                f"num_cores_per_host: hosts have different numbers of processors, {counts}; "
                "host_id_to_its_pnums lists them"
            )
        return next(iter(counts.values()))
