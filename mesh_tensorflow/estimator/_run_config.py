"""RunConfig: how an estimator runs; and the cluster that TF_CONFIG describes."""

from __future__ import annotations

import copy
import inspect
import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Optional, Union

import tensorflow.compat.v1 as tf

from mesh_tensorflow._core.errors import is_integer, is_real
from mesh_tensorflow._processes.processes import (
    check_addresses,
    processes,
    read_tf_config,
    several_of_jax,
    task_index,
)


class TaskType:
    """The values of `task_type`."""

    MASTER = "master"
    PS = "ps"
    WORKER = "worker"
    CHIEF = "chief"
    EVALUATOR = "evaluator"


class Cluster(NamedTuple):
    """The processes of a run, and the task of this process; by default, it is alone."""

    cluster_spec: tf.train.ClusterSpec = tf.train.ClusterSpec({})
    task_type: str = TaskType.WORKER
    task_id: int = 0
    is_chief: bool = True
    master: str = ""
    evaluation_master: str = ""
    num_ps_replicas: int = 0
    num_worker_replicas: int = 1
    global_id_in_cluster: Optional[int] = 0
    service: Optional[Mapping[str, Any]] = None


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
        raise ValueError(f'TF_CONFIG: "service" should be an object, but is {service!r}')
    alone = Cluster(
        master=tf_config.get("session_master", ""),
        evaluation_master=tf_config.get("eval_session_master", ""),
        service=service,
    )
    if several_of_jax():
        # Sessions have no servers: the first process has one of its own.
        return alone._replace(is_chief=processes().is_chief)
    if spec.as_dict():
        return _one_of_many(alone, spec, task, tf_config.get("session_master"))
    task_type, task_id = task.get("type", TaskType.WORKER), task_index(task.get("index", 0))
    if task_type != TaskType.WORKER or task_id != 0:
        raise ValueError(
            f'TF_CONFIG has no "cluster", so its "task" should be worker 0, but it is '
            f'{task_type} {task_id}: add "cluster", or leave out "task"'
        )
    return alone


def _one_of_many(
    alone: Cluster, spec: tf.train.ClusterSpec, task: Mapping[str, Any], master: Optional[str]
) -> Cluster:
    """Returns the cluster of several jobs, with what is the same for a process that is alone."""
    jobs = spec.as_dict()
    # An older name of the chief's job, which the clusters of old scripts have.
    chief_job = TaskType.MASTER if TaskType.MASTER in jobs else TaskType.CHIEF
    if len(jobs.get(chief_job, [])) != 1:
        raise ValueError(
            f'TF_CONFIG: "cluster" should have one "chief" with one address, but it has '
            f"{json.dumps(jobs)}"
        )
    check_addresses([address for addresses in jobs.values() for address in addresses])
    task_type, task_id = _checked_task(task, jobs)
    # An evaluator reads checkpoints, and needs none of the cluster's servers.
    if task_type == TaskType.EVALUATOR:
        return alone._replace(
            task_type=task_type,
            task_id=task_id,
            is_chief=False,
            master="",
            num_worker_replicas=0,
            global_id_in_cluster=None,
        )
    # Ids count in the order of tf.estimator: the chief, workers, other jobs by name, and parameter
    # servers.
    order = [chief_job, *sorted({TaskType.MASTER, TaskType.CHIEF, TaskType.WORKER} - {chief_job})]
    order += [job for job in sorted(jobs) if job not in [*order, TaskType.PS]] + [TaskType.PS]
    before = sum(len(jobs.get(job, [])) for job in order[: order.index(task_type)])
    several = sum(map(len, jobs.values())) > 1
    # A process that is alone needs no server, and a target of "" is a session of its own.
    own = f"grpc://{jobs[task_type][task_id]}" if several else ""
    return alone._replace(
        cluster_spec=spec,
        task_type=task_type,
        task_id=task_id,
        is_chief=task_type == chief_job,
        master=own if master is None else master,
        num_ps_replicas=len(jobs.get(TaskType.PS, [])),
        # The chief computes as well.
        num_worker_replicas=len(jobs.get(TaskType.WORKER, [])) + 1,
        global_id_in_cluster=before + task_id,
    )


def _checked_task(task: Mapping[str, Any], jobs: Mapping[str, Sequence[str]]) -> tuple[str, int]:
    if "type" not in task or "index" not in task:
        raise ValueError(
            f'TF_CONFIG has a "cluster", so it needs "task": {{"type": ..., "index": ...}}, which '
            f"process of it this is; it has {json.dumps(task)}"
        )
    task_type, task_id = task["type"], task_index(task["index"])
    # No process connects to an evaluator, so that "cluster" need not have its address.
    if task_type == TaskType.EVALUATOR:
        return task_type, task_id
    if task_type not in jobs:
        raise ValueError(
            f'TF_CONFIG: the "type" of "task" is {task_type!r}, but "cluster" has '
            f"{', '.join(sorted(jobs))}"
        )
    if task_id >= len(jobs[task_type]):
        raise ValueError(
            f'TF_CONFIG: "task" is {task_type} {task_id}, but "cluster" has only '
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
    # Without filters, a session connects to all processes, and waits for those that are not there.
    filters = {
        TaskType.MASTER: ["/job:ps", "/job:master"],
        TaskType.CHIEF: ["/job:ps", "/job:chief"],
        TaskType.WORKER: ["/job:ps", f"/job:worker/task:{cluster.task_id}"],
        TaskType.PS: ["/job:ps", "/job:worker", "/job:chief", "/job:master"],
    }
    return filters.get(cluster.task_type) if cluster.cluster_spec.as_dict() else None


UNSET: Any = object()  # the default of arguments for which None has a meaning
DEFAULT_SEED = 1
_DEFAULT_SAVE_SECS = 600


def check_number(called: str, name: str, value: object, least: int) -> None:
    """Checks an argument that is a number.

    Args:
      called: what it is an argument of, for error messages.
      name: its name.
      value: its value, or None.
      least: the smallest number that is right.

    Raises:
      ValueError: it is less, or no number.
    """
    # `not value >= least` and not `value < least`, which a NaN would pass.
    if value is not None and not (is_real(value) and value >= least):
        raise ValueError(f"{called}: {name} is {value!r}; it should be {least} or more")


def _at_least(least: int) -> Callable[[str, object], None]:
    return lambda name, value: check_number("RunConfig", name, value, least)


def _check_integer(name: str, value: object) -> None:
    if not is_integer(value):
        raise ValueError(f"RunConfig: {name} is {value!r}; it should be an integer")


def _check_config(name: str, value: object) -> None:
    if not isinstance(value, tf.ConfigProto):
        raise ValueError(f"RunConfig: {name} should be a tf.ConfigProto, but is {value!r}")


def _check_callable(name: str, value: object) -> None:
    if not callable(value):
        raise ValueError(f"RunConfig: {name} should be a function, but is {value!r}")


def _refuse(name: str, value: object) -> None:
    raise ValueError(
        f"RunConfig: {name} should be None: a mesh and a layout say how a program is distributed, "
        "see PlacementMeshImpl"
    )


# By argument: the check of a value that is not None.
_CHECKS = {
    "tf_random_seed": _check_integer,
    "save_summary_steps": _at_least(0),
    "save_checkpoints_steps": _at_least(0),
    "save_checkpoints_secs": _at_least(0),
    "session_config": _check_config,
    "keep_checkpoint_max": _at_least(0),
    "keep_checkpoint_every_n_hours": _at_least(0),
    "log_step_count_steps": _at_least(1),
    "train_distribute": _refuse,
    "device_fn": _check_callable,
    "eval_distribute": _refuse,
    "experimental_distribute": _refuse,
    "experimental_max_worker_delay_secs": _at_least(0),
    "session_creation_timeout_secs": _at_least(1),
}


def model_dir_of(
    given: Union[str, os.PathLike[str], None], tf_config: Mapping[str, Any]
) -> Optional[str]:
    """Returns the model directory of an argument and TF_CONFIG.

    Args:
      given: the argument `model_dir`, or None.
      tf_config: the parsed TF_CONFIG.

    Returns:
      a path, or None.

    Raises:
      ValueError: the argument is empty, or the two differ.
    """
    named = tf_config.get("model_dir")
    if given is not None and not os.fspath(given):
        raise ValueError("RunConfig: model_dir is empty; leave it out, or name a directory")
    if given is not None and named and os.fspath(given) != named:
        raise ValueError(
            f"RunConfig: model_dir is {os.fspath(given)!r}, but TF_CONFIG says {named!r}: let them "
            "be the same, or leave one out"
        )
    return named if given is None else os.fspath(given)


class _Read(property):
    """A property with the value of its name: an argument of a RunConfig, or what TF_CONFIG says."""

    def __init__(self, *functions: Any) -> None:
        # Its `setter` and the like, by which subclasses change a property, make another of it.
        super().__init__(*(functions or [self._value_in]))

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def _value_in(self, config: RunConfig) -> Any:
        if self._name in config._values:
            return config._values[self._name]
        return getattr(config._cluster, self._name)


_read: Callable[[], Any] = _Read  # the type is that of each value


class RunConfig:
    """How an estimator runs: where and how often it saves, and on which processes.

    Attributes:
      model_dir: the directory of checkpoints and summaries, or None.
      tf_random_seed: the seed of the graph, or None for 1.
      save_summary_steps: steps between summaries, or None for no summaries.
      save_checkpoints_steps: steps between checkpoints, or None.
      save_checkpoints_secs: seconds between checkpoints, or None.
      session_config: the argument; see `effective_session_config`.
      keep_checkpoint_max: the number of checkpoints to keep; 0 or None for all.
      keep_checkpoint_every_n_hours: the period in hours for which one more checkpoint is kept.
      log_step_count_steps: steps between progress reports, or None.
      train_distribute: None: the mesh and the layout determine how a program is distributed.
      device_fn: the device function, or None.
      protocol: the protocol of servers, or None for gRPC.
      eval_distribute: None; see `train_distribute`.
      experimental_max_worker_delay_secs: the maximum delay before a worker starts.
      session_creation_timeout_secs: how long a worker waits for the session of the chief.
      checkpoint_save_graph_def: whether the graph is written next to checkpoints.
      cluster_spec: the addresses of all processes, as TF_CONFIG says, like all that follow.
      task_type: the job of this process: "chief", "worker", "ps" or "evaluator".
      task_id: the index of this process within its job.
      is_chief: whether this process saves checkpoints and summaries.
      master: the target of the session in training; "" for this process.
      evaluation_master: the target of the session in evaluation and prediction.
      num_ps_replicas: the number of parameter servers.
      num_worker_replicas: the number of workers, including the chief.
      global_id_in_cluster: the index of this process in the cluster: first the chief, then workers,
        then servers.
      service: the value of "service" in TF_CONFIG.
    """

    model_dir: Optional[str] = _read()
    tf_random_seed: Optional[int] = _read()
    save_summary_steps: Optional[int] = _read()
    save_checkpoints_steps: Optional[int] = _read()
    save_checkpoints_secs: Optional[float] = _read()
    session_config: Optional[tf.ConfigProto] = _read()
    keep_checkpoint_max: Optional[int] = _read()
    keep_checkpoint_every_n_hours: float = _read()
    log_step_count_steps: Optional[int] = _read()
    train_distribute: None = _read()
    device_fn: Optional[Callable[[tf.Operation], str]] = _read()
    protocol: Optional[str] = _read()
    eval_distribute: None = _read()
    experimental_max_worker_delay_secs: Optional[float] = _read()
    session_creation_timeout_secs: int = _read()
    checkpoint_save_graph_def: bool = _read()
    cluster_spec: tf.train.ClusterSpec = _read()
    task_type: str = _read()
    task_id: int = _read()
    is_chief: bool = _read()
    master: str = _read()
    evaluation_master: str = _read()
    num_ps_replicas: int = _read()
    num_worker_replicas: int = _read()
    global_id_in_cluster: Optional[int] = _read()
    service: Optional[Mapping[str, Any]] = _read()

    def __init__(
        self,
        model_dir: Union[str, os.PathLike[str], None] = None,
        tf_random_seed: Optional[int] = None,
        save_summary_steps: Optional[int] = 100,
        save_checkpoints_steps: Optional[int] = UNSET,
        save_checkpoints_secs: Optional[float] = UNSET,
        session_config: Optional[tf.ConfigProto] = None,
        keep_checkpoint_max: int = 5,
        keep_checkpoint_every_n_hours: float = 10000,
        log_step_count_steps: Optional[int] = 100,
        train_distribute: None = None,
        device_fn: Optional[Callable[[tf.Operation], str]] = None,
        protocol: Optional[str] = None,
        eval_distribute: None = None,
        experimental_distribute: None = None,
        experimental_max_worker_delay_secs: Optional[float] = None,
        session_creation_timeout_secs: int = 7200,
        checkpoint_save_graph_def: bool = True,
    ) -> None:
        """Creates a RunConfig.

        Args:
          model_dir: the directory of checkpoints and summaries.
          tf_random_seed: the seed of the graph; None for 1.
          save_summary_steps: steps between summaries, or None for no summaries.
          save_checkpoints_steps: steps between checkpoints, or None.
          save_checkpoints_secs: seconds between checkpoints, or None; 600 if neither is given. If
            both are None, nothing is saved.
          session_config: a tf.ConfigProto.
          keep_checkpoint_max: the number of checkpoints to keep; 0 or None for all.
          keep_checkpoint_every_n_hours: keep one more checkpoint for each period of so many hours.
          log_step_count_steps: steps between progress reports, or None for no reports.
          train_distribute: must be None.
          device_fn: a device function: returns the device of a tf.Operation.
          protocol: the protocol of servers, or None for gRPC.
          eval_distribute: must be None.
          experimental_distribute: must be None.
          experimental_max_worker_delay_secs: the maximum delay before a worker starts.
          session_creation_timeout_secs: how long a worker waits for the session of the chief.
          checkpoint_save_graph_def: whether to write the graph next to checkpoints.

        Raises:
          ValueError: an argument or TF_CONFIG is invalid.
        """
        # The first iterable of a comprehension is evaluated outside of it, so these are the
        # arguments.
        values = {name: value for name, value in locals().items() if name in _FIELDS}
        values.update(_saving(save_checkpoints_steps, save_checkpoints_secs))
        tf_config = read_tf_config(os.environ)
        values["model_dir"] = model_dir_of(model_dir, tf_config)
        self._values = _checked(values)
        self._cluster: Cluster = read_cluster(tf_config)

    def replace(self, **kwargs: Any) -> RunConfig:
        """Returns a copy with some values changed.

        Args:
          **kwargs: new values by argument; a new `save_checkpoints_steps` sets
            `save_checkpoints_secs` to None, and the reverse.

        Returns:
          a RunConfig.

        Raises:
          ValueError: a name is unknown, or a value is invalid.
        """
        unknown = [name for name in kwargs if name not in _FIELDS]
        if unknown:
            raise ValueError(
                f"RunConfig.replace: {', '.join(unknown)} cannot be replaced; what can: "
                f"{', '.join(_FIELDS)}"
            )
        # Not by the constructor: it would read TF_CONFIG again, and drop what subclasses add.
        new = copy.copy(self)
        saving = {name: kwargs[name] for name in _SAVING if name in kwargs}
        if saving:
            kwargs.update(_saving(*(saving.get(name, UNSET) for name in _SAVING)))
        new._values = _checked({**self._values, **kwargs})
        return new

    def __repr__(self) -> str:
        text = ", ".join(f"{name}={value!r}" for name, value in self._values.items())
        return f"{type(self).__name__}({text}, {self._cluster})"

    @property
    def effective_seed(self) -> int:
        """The seed of the graph: `tf_random_seed`, or 1."""
        return DEFAULT_SEED if self.tf_random_seed is None else self.tf_random_seed

    @property
    def effective_session_config(self) -> tf.ConfigProto:
        """`session_config`, or the default with soft placement and device filters."""
        if self.session_config is not None:
            return self.session_config
        return tf.ConfigProto(
            allow_soft_placement=True, device_filters=device_filters(self._cluster) or []
        )


_SAVING = ("save_checkpoints_steps", "save_checkpoints_secs")
# From the signature, so that `replace` and `repr` know each argument.
_FIELDS = tuple(inspect.signature(RunConfig).parameters)


def _saving(steps: Optional[int], secs: Optional[float]) -> dict[str, Any]:
    if steps is not UNSET and secs is not UNSET and steps is not None and secs is not None:
        raise ValueError(
            f"RunConfig: save_checkpoints_steps is {steps!r} and save_checkpoints_secs is "
            f"{secs!r}: give one of them"
        )
    # One that is given turns the other off; if it is given as None, nothing is saved.
    if steps is UNSET and secs is UNSET:
        return {"save_checkpoints_steps": None, "save_checkpoints_secs": _DEFAULT_SAVE_SECS}
    return {
        "save_checkpoints_steps": None if steps is UNSET else steps,
        "save_checkpoints_secs": None if secs is UNSET else secs,
    }


def _checked(values: dict[str, Any]) -> dict[str, Any]:
    for name, value in values.items():
        if value is not None and name in _CHECKS:
            _CHECKS[name](name, value)
    return values
