"""Discovery of the processes of a program from environment variables."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Mapping
from typing import Optional

from tensorflow.python.distribute.cluster_resolver.slurm_cluster_resolver import (
    expand_hostlist,
    expand_tasks_per_node,
)

from mesh_tensorflow._processes.peers import check_addresses, task_index

__all__ = ["addresses_and_index", "check_described"]

_PORT = 8476  # of the first task of a node, if only the nodes are known
# Numbers of processes that launchers set, which do not say where the others are.
_COUNTS = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_SIZE", "MV2_COMM_WORLD_SIZE", "WORLD_SIZE")
_TASKS = ("chief", "master", "worker")  # types of tasks that run the program


def addresses_and_index(environment: Mapping[str, str]) -> Optional[tuple[tuple[str, ...], int]]:
    """Returns the addresses of all processes and the index of this one.

    Args:
      environment: environment variables, such as TF_CONFIG or those of SLURM.

    Returns:
      (strings "host:port", the index); None if they do not describe several processes.

    Raises:
      ValueError: TF_CONFIG or the SLURM variables are malformed.
    """
    if environment.get("TF_CONFIG"):
        return _from_tf_config(environment["TF_CONFIG"])
    if _number(environment, "SLURM_NTASKS", "1") > 1 and "SLURM_PROCID" in environment:
        return _from_slurm(environment)
    return None


def _from_tf_config(text: str) -> tuple[tuple[str, ...], int]:
    try:
        config = json.loads(text)
        cluster, task = config["cluster"], config["task"]
        chief = list(cluster.get("chief") or cluster.get("master") or [])
        workers = chief + list(cluster.get("worker", []))
        kind, index = task["type"], task["index"]
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise ValueError(
            f'TF_CONFIG must be JSON such as {{"cluster": {{"worker": ["host0:port", '
            f'"host1:port"]}}, "task": {{"type": "worker", "index": 0}}}}; got {text!r}'
        ) from e
    if kind not in _TASKS:
        raise ValueError(
            f"TF_CONFIG: this task is {kind} {index}, but all processes here run one program, and "
            f"each is one of {', '.join(_TASKS)}: make it a worker"
        )
    check_addresses(workers)
    index = task_index(index)
    own = range(len(chief), len(workers)) if kind == "worker" else range(len(chief))
    index += own.start
    if index not in own:
        raise ValueError(
            f"TF_CONFIG: task {task} is not one of the {len(workers)} in the cluster {cluster}"
        )
    return tuple(workers), index


def check_described(environment: Mapping[str, str]) -> None:
    """Checks that a launcher that has started several processes says where they are.

    Args:
      environment: environment variables.

    Raises:
      ValueError: it says only how many there are, or not even that.
    """
    if addresses_and_index(environment) is not None:
        return
    for name in _COUNTS:
        count = _number(environment, name, "1")
        if count > 1:
            raise ValueError(
                f"fit: {name}={count} says that there are {count} processes, but not where they "
                "are, so each would train a model of its own. Start them with python -m "
                "mesh_tensorflow.launch --processes N script.py, by SLURM, or set TF_CONFIG in "
                f"each; or unset {name} to train in one process"
            )


def _number(environment: Mapping[str, str], name: str, default: str = "") -> int:
    text = environment.get(name) or default
    if not text.strip().isdecimal():
        launcher = "SLURM" if name.startswith("SLURM") else "a launcher"
        raise ValueError(
            f"{name} should be a number, as {launcher} sets it, but is {text!r}. Unset it, or set "
            f"TF_CONFIG, if {launcher} has not started this process"
        )
    return int(text)


def _from_slurm(environment: Mapping[str, str]) -> tuple[tuple[str, ...], int]:
    nodes = _expand(environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_NODELIST", ""))
    counts = _expand_counts(
        environment.get("SLURM_STEP_TASKS_PER_NODE") or environment.get("SLURM_TASKS_PER_NODE", "")
    )
    count = _number(environment, "SLURM_NTASKS")
    index = _number(environment, "SLURM_PROCID")
    if index >= count:
        raise ValueError(
            f"SLURM_PROCID is {index}, but SLURM_NTASKS says that there are {count} tasks, counted "
            "from 0. Set TF_CONFIG if these variables are not SLURM's own"
        )
    if len(nodes) != len(counts) or sum(counts) != count:
        raise ValueError(
            f"SLURM: {count} tasks, but the nodes are {nodes} with {counts} tasks. Set TF_CONFIG "
            "if these variables are not SLURM's own"
        )
    addresses = [f"{node}:{_PORT + i}" for node, n in zip(nodes, counts) for i in range(n)]
    return tuple(addresses), index


def _expand(nodes: str) -> list[str]:
    """Expands node names in SLURM's short form, such as "gpu[01-03,7],login".

    It calls SLURM's own command if there is one; otherwise it supports the common forms.
    """
    if "[" in nodes and shutil.which("scontrol"):
        done = subprocess.run(
            ["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, check=False
        )
        if done.returncode == 0 and done.stdout.split():
            return done.stdout.split()
    try:
        return expand_hostlist(nodes) if nodes else []
    except ValueError as e:
        raise ValueError(
            f"SLURM_STEP_NODELIST: cannot tell which nodes {nodes!r} are: 'scontrol show hostnames'"
            " does not list them here. Set TF_CONFIG instead"
        ) from e


def _expand_counts(counts: str) -> list[int]:
    """Expands numbers in SLURM's short form, such as "2(x3),1"."""
    try:
        return expand_tasks_per_node(counts) if counts else []
    except ValueError as e:
        raise ValueError(
            'SLURM_STEP_TASKS_PER_NODE should be numbers, as SLURM sets it, such as "2(x3),1", '
            f"but is {counts!r}. Set TF_CONFIG, if this is no task of SLURM"
        ) from e
