"""One measured process: builds one system, then does steps when it is told to.

It prints a line of JSON when it is ready, reads commands from its input (`steps
N`, `end`) and answers each with a line of JSON. `run.py` is what starts it.
"""

import argparse
import gc
import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

import quiet

HERE = Path(__file__).resolve().parent
SYSTEMS = ("mtf", "classic", "tf", "tf_xla", "jax", "jax_named", "pjrt", "dtensor")
PLACEMENTS = ("one", "logical", "logical_default", "simd", "xla")


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--system", required=True, choices=SYSTEMS)
    parser.add_argument("--workload", required=True)
    parser.add_argument("--mesh", default="2x2")
    parser.add_argument("--placement", default="one", choices=PLACEMENTS)
    parser.add_argument("--warm_up", type=int, default=3)
    parser.add_argument(
        "--profile", default="", help="write a Python profile of building and lowering to this file"
    )
    parser.add_argument(
        "--trace", default="", help="write a TensorFlow timeline of one step to this file"
    )
    return parser.parse_args()


def resident_mb() -> float:
    """Memory resident now, in MB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def peak_mb() -> float:
    """The most memory ever resident in this process, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def count_nodes(graph: Any) -> int:
    """Operations of a graph, and of the functions that it calls."""
    definition = graph.as_graph_def()
    return len(definition.node) + sum(len(f.node_def) for f in definition.library.function)


class Worker:
    """A training step of a system, done when told to."""

    def __init__(self) -> None:
        self._base_mb = 0.0
        self._losses: list[float] = []

    def step(self) -> float:
        """Trains one step; returns its loss."""
        raise NotImplementedError

    def run(self, steps: int) -> dict[str, Any]:
        """Does steps; returns the seconds of each and CPU seconds of all."""
        times = []
        cpu = time.process_time()
        for _ in range(steps):
            start = time.perf_counter()
            loss = self.step()
            times.append(time.perf_counter() - start)
            self._losses.append(loss)
        return {"times": times, "cpu": time.process_time() - cpu}

    def end(self) -> dict[str, Any]:
        """What is known only at the end."""
        return {"peak_mb": peak_mb() - self._base_mb, "losses": self._losses}


class JaxWorker(Worker):
    """A step compiled by JAX."""

    def __init__(self, arguments: argparse.Namespace):
        """Compiles the step, and does the first ones."""
        super().__init__()
        import workloads

        count = 1 if arguments.system == "jax" else workloads.mesh_size(arguments.mesh)
        os.environ["JAX_PLATFORMS"] = "cpu"
        os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={count}"
        import jax

        jax.devices()
        make = _pjrt_program if arguments.system == "pjrt" else _jax_program
        self._base_mb = resident_mb()
        mesh = "" if arguments.system == "jax" else arguments.mesh
        make_program = make()
        gc.collect()
        gc.freeze()
        program = make_program(workloads.WORKLOADS[arguments.workload], mesh)
        self.step = program.step  # type: ignore[method-assign]
        first_seconds = self.run(1)["times"][0]
        self.run(arguments.warm_up)
        self.ready = {
            "nodes": program.nodes,
            "seconds": program.seconds,
            "init_seconds": program.init_seconds,
            "first_step_seconds": first_seconds,
            "tf_version": f"jax {jax.__version__}",
            "base_mb": self._base_mb,
        }


class DTensorWorker(Worker):
    """A step partitioned by DTensor."""

    def __init__(self, arguments: argparse.Namespace):
        """Traces the step, and does the first ones."""
        super().__init__()
        quiet.import_tensorflow()
        import tensorflow as tf
        import workloads

        count = workloads.mesh_size(arguments.mesh)
        [cpu] = tf.config.list_physical_devices("CPU")
        tf.config.set_logical_device_configuration(
            cpu, [tf.config.LogicalDeviceConfiguration()] * count
        )
        import models_dtensor

        gc.collect()
        gc.freeze()
        self._base_mb = resident_mb()
        workload = workloads.WORKLOADS[arguments.workload]
        program = models_dtensor.DTensorProgram(workload, arguments.mesh)
        self.step = program.step  # type: ignore[method-assign]
        first_seconds = self.run(1)["times"][0]
        self.run(arguments.warm_up)
        self.ready = {
            "nodes": program.nodes,
            "seconds": program.seconds,
            "init_seconds": program.init_seconds,
            "first_step_seconds": first_seconds,
            "tf_version": tf.__version__,
            "base_mb": self._base_mb,
        }


class FunctionWorker(Worker):
    """An mtf.function that XLA compiles."""

    def __init__(self, arguments: argparse.Namespace):
        """Compiles the step, and does the first ones."""
        super().__init__()
        import systems
        import tensorflow.compat.v1 as tf
        import workloads

        gc.collect()
        gc.freeze()
        self._base_mb = resident_mb()
        workload = workloads.WORKLOADS[arguments.workload]
        self._function, clock = systems.build_function(workload, arguments.mesh)
        first_seconds = self.run(1)["times"][0]
        self.run(arguments.warm_up)
        graph = self._function.tf_function.get_concrete_function().graph
        self.ready = {
            "nodes": count_nodes(graph),
            "seconds": clock.seconds,
            "init_seconds": 0.0,
            "first_step_seconds": first_seconds,
            "tf_version": tf.__version__,
            "base_mb": self._base_mb,
        }

    def step(self) -> float:
        """Trains one step; returns its loss."""
        return float(self._function())


def _jax_program() -> Any:
    import models_jax

    return models_jax.JaxProgram


def _pjrt_program() -> Any:
    import models_pjrt
    import tensorflow as tf

    tf.config.list_logical_devices()  # starts TensorFlow's runtime, as jax.devices() did JAX's
    return models_pjrt.PjrtProgram


def _session_config(arguments: argparse.Namespace) -> Any:
    """The devices and threads of a session: by this package, or as the classic leaves them."""
    import tensorflow.compat.v1 as tf
    import workloads

    if arguments.placement == "one" or arguments.system not in ("mtf", "classic"):
        return tf.ConfigProto(device_count={"CPU": 1})
    if arguments.system == "classic" or arguments.placement == "logical_default":
        return tf.ConfigProto(device_count={"CPU": workloads.mesh_size(arguments.mesh)})
    import mesh_tensorflow as mtf

    rules = workloads.layout(workloads.WORKLOADS[arguments.workload], arguments.mesh)
    return mtf.session_config(workloads.MESHES[arguments.mesh], rules)


class SessionWorker(Worker):
    """A session on a built program."""

    def __init__(self, arguments: argparse.Namespace):
        super().__init__()
        quiet.import_tensorflow()
        import systems
        import tensorflow.compat.v1 as tf

        self._arguments = arguments
        build = systems.build(
            arguments.system, arguments.workload, arguments.mesh, arguments.placement
        )
        # A collection of what TensorFlow made at import would land anywhere in what is measured.
        gc.collect()
        gc.freeze()
        self._base_mb = resident_mb()
        config = _session_config(arguments)
        program = self._build(build)
        nodes = count_nodes(tf.get_default_graph())
        start = time.perf_counter()
        self._session = tf.Session(config=config)
        self._session.run(tf.global_variables_initializer(), program.feeds.make())
        if program.copy_masters is not None:
            self._session.run(program.copy_masters)
        init_seconds = time.perf_counter() - start
        self._fetches = [program.loss, program.step]
        self._step = self._session.make_callable(self._fetches)
        first_seconds = self.run(1)["times"][0]
        self.run(arguments.warm_up)
        self.ready = {
            "nodes": nodes,
            "seconds": program.seconds,
            "init_seconds": init_seconds,
            "first_step_seconds": first_seconds,
            "tf_version": tf.__version__,
            "base_mb": self._base_mb,
        }

    def _build(self, build: Any) -> Any:
        """Builds the program, under a profiler if wanted."""
        if not self._arguments.profile:
            return build()
        import cProfile

        profiler = cProfile.Profile()
        program = profiler.runcall(build)
        profiler.dump_stats(self._arguments.profile)
        return program

    def step(self) -> float:
        """Trains one step; returns its loss."""
        return float(self._step()[0])

    def trace(self, path: str) -> None:
        """Writes the timeline of one step, to look at in a browser."""
        import tensorflow.compat.v1 as tf
        from tensorflow.python.client import timeline

        metadata = tf.RunMetadata()
        options = tf.RunOptions(trace_level=tf.RunOptions.FULL_TRACE)
        self._session.run(self._fetches, options=options, run_metadata=metadata)
        Path(path).write_text(timeline.Timeline(metadata.step_stats).generate_chrome_trace_format())


def main() -> None:
    """Serves commands until `end` or the end of the input."""
    arguments = parse_arguments()
    if arguments.system in ("mtf", "pjrt"):
        sys.path.insert(0, str(HERE.parent))
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not mix with the answers

    def answer(value: dict[str, Any]) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    kind: type[Worker] = SessionWorker
    if arguments.system in ("jax", "jax_named", "pjrt"):
        kind = JaxWorker
    elif arguments.system == "dtensor":
        kind = DTensorWorker
    elif arguments.placement == "xla":
        kind = FunctionWorker
    worker = kind(arguments)
    answer(worker.ready)
    for line in sys.stdin:
        words = line.split()
        if words[:1] == ["end"]:
            break
        worker.run(1)  # wakes threads and caches up after a pause
        answer(worker.run(int(words[1])))
    result = worker.end()
    if arguments.trace and isinstance(worker, SessionWorker):
        worker.trace(arguments.trace)
    answer(result)


if __name__ == "__main__":
    main()
