"""The cluster of a run, as described by the environment variable TF_CONFIG."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Optional

import tensorflow.compat.v1 as tf

from mesh_tensorflow._processes.peers import check_addresses, task_index
from mesh_tensorflow._processes.processes import processes, several_of_jax

__all__ = ["TaskType", "Cluster", "device_filters", "read_cluster", "read_tf_config"]

VARIABLE = "TF_CONFIG"


class TaskType:
    """The values of `task_type`."""

    MASTER = "master"
    PS = "ps"
    WORKER = "worker"
    CHIEF = "chief"
    EVALUATOR = "evaluator"


class Cluster(NamedTuple):
    """The processes of a run, and the task of this process."""

    cluster_spec: tf.train.ClusterSpec
    task_type: str
    task_id: int
    is_chief: bool
    master: str
    evaluation_master: str
    num_ps_replicas: int
    num_worker_replicas: int
    global_id_in_cluster: Optional[int]
    service: Optional[Mapping[str, Any]]


def read_tf_config() -> dict[str, Any]:
    """Parses the environment variable TF_CONFIG.

    Returns:
      a dict; empty if the variable is not set.

    Raises:
      ValueError: the variable is not a JSON object.
    """
    text = os.environ.get(VARIABLE, "").strip()
    if not text:
        return {}
    try:
        read = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{VARIABLE} is not JSON ({error}): it is {text!r}. Unset it for a run of one process"
        ) from error
    if not isinstance(read, dict):
        raise ValueError(f"{VARIABLE} should be a JSON object, but is {text!r}")
    return read


def read_cluster(tf_config: Mapping[str, Any]) -> Cluster:
    """Returns the cluster described by the keys "cluster", "task" and others.

    Args:
      tf_config: the result of `read_tf_config`.

    Returns:
      a Cluster.

    Raises:
      ValueError: the values are not consistent.
    """
    spec = tf.train.ClusterSpec(tf_config.get("cluster", {}))
    task = tf_config.get("task", {})
    service = tf_config.get("service")
    if service is not None and not isinstance(service, dict):
        raise ValueError(f'{VARIABLE}: "service" should be an object, but is {service!r}')
    if several_of_jax():
        # Sessions have no servers: the first process has one of its own.
        alone = _alone(tf_config, {}, tf.train.ClusterSpec({}), service)
        return alone._replace(is_chief=processes().is_chief)
    if not spec.as_dict():
        return _alone(tf_config, task, spec, service)
    return _one_of_many(tf_config, task, spec, service)


def _alone(
    tf_config: Mapping[str, Any],
    task: Mapping[str, Any],
    spec: tf.train.ClusterSpec,
    service: Optional[Mapping[str, Any]],
) -> Cluster:
    task_type, task_id = task.get("type", TaskType.WORKER), task_index(task.get("index", 0))
    if task_type != TaskType.WORKER or task_id != 0:
        raise ValueError(
            f'{VARIABLE} has no "cluster", so its "task" should be worker 0, but it is '
            f'{task_type} {task_id}: add "cluster", or leave out "task"'
        )
    return Cluster(
        cluster_spec=spec,
        task_type=task_type,
        task_id=0,
        is_chief=True,
        master=tf_config.get("session_master", ""),
        evaluation_master=tf_config.get("eval_session_master", ""),
        num_ps_replicas=0,
        num_worker_replicas=1,
        global_id_in_cluster=0,
        service=service,
    )


def _one_of_many(
    tf_config: Mapping[str, Any],
    task: Mapping[str, Any],
    spec: tf.train.ClusterSpec,
    service: Optional[Mapping[str, Any]],
) -> Cluster:
    jobs = spec.as_dict()
    chief_job = TaskType.MASTER if TaskType.MASTER in jobs else TaskType.CHIEF
    if len(jobs.get(chief_job, [])) != 1:
        raise ValueError(
            f'{VARIABLE}: "cluster" should have one "chief" with one address, but it has '
            f"{json.dumps(jobs)}"
        )
    check_addresses([address for addresses in jobs.values() for address in addresses])
    task_type, task_id = _checked_task(task, jobs)
    if task_type == TaskType.EVALUATOR:
        return Cluster(
            tf.train.ClusterSpec({}),
            task_type,
            task_id,
            False,
            "",
            tf_config.get("eval_session_master", ""),
            0,
            0,
            None,
            service,
        )
    order = [chief_job, *sorted({TaskType.MASTER, TaskType.CHIEF, TaskType.WORKER} - {chief_job})]
    order += [job for job in sorted(jobs) if job not in [*order, TaskType.PS]] + [TaskType.PS]
    before = sum(len(jobs.get(job, [])) for job in order[: order.index(task_type)])
    several = sum(map(len, jobs.values())) > 1
    own = f"grpc://{jobs[task_type][task_id]}" if several else ""
    return Cluster(
        cluster_spec=spec,
        task_type=task_type,
        task_id=task_id,
        is_chief=task_type == chief_job,
        master=tf_config.get("session_master", own),
        evaluation_master=tf_config.get("eval_session_master", ""),
        num_ps_replicas=len(jobs.get(TaskType.PS, [])),
        num_worker_replicas=len(jobs.get(TaskType.WORKER, [])) + 1,
        global_id_in_cluster=before + task_id,
        service=service,
    )


def _checked_task(task: Mapping[str, Any], jobs: Mapping[str, Sequence[str]]) -> tuple[str, int]:
    if "type" not in task or "index" not in task:
        raise ValueError(
            f'{VARIABLE} has a "cluster", so it needs "task": {{"type": ..., "index": ...}}, which '
            f"process of it this is; it has {json.dumps(task)}"
        )
    task_type, task_id = task["type"], task_index(task["index"])
    if task_type == TaskType.EVALUATOR:
        return task_type, task_id
    if task_type not in jobs:
        raise ValueError(
            f'{VARIABLE}: the "type" of "task" is {task_type!r}, but "cluster" has '
            f"{', '.join(sorted(jobs))}"
        )
    if task_id >= len(jobs[task_type]):
        raise ValueError(
            f'{VARIABLE}: "task" is {task_type} {task_id}, but "cluster" has only '
            f"{len(jobs[task_type])} of {task_type}, counted from 0"
        )
    return task_type, task_id


def device_filters(cluster: Cluster) -> Optional[list[str]]:
    """Returns the device filters of a process: its own devices and those of parameter servers.

    Args:
      cluster: a Cluster.

    Returns:
      strings for ConfigProto.device_filters, or None for no filters.
    """
    filters = {
        TaskType.MASTER: ["/job:ps", "/job:master"],
        TaskType.CHIEF: ["/job:ps", "/job:chief"],
        TaskType.WORKER: ["/job:ps", f"/job:worker/task:{cluster.task_id}"],
        TaskType.PS: ["/job:ps", "/job:worker", "/job:chief", "/job:master"],
    }
    return filters.get(cluster.task_type) if cluster.cluster_spec.as_dict() else None
