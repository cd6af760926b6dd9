"""Ways to start programs of several processes, and to tell a process which one it is."""

import json

from helpers import processes
from helpers.paths import WORKERS


def run_script(directory, count, *arguments, extra=(), script="simd_worker.py", timeout=240):
    """Launches a worker script, which may fail; returns a Done."""
    return processes.launch(
        count, *extra, WORKERS / script, *arguments,
        code=None, timeout=timeout, cwd=directory, TF_CPP_MIN_LOG_LEVEL="3",
    )  # fmt: skip


def tf_config(cluster, kind, index):
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}})}
