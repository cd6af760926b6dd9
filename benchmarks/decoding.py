"""Compares decoding with the classic release: tokens per second, greedy and by beam search.

    python benchmarks/decoding.py --oracle_python VENV/bin/python

A round starts a process for each system, with the same weights, and lets them decode in turns;
what they decode must be equal. A ratio is taken within a round; the table gives the median of the
rounds and, in brackets, the smallest and largest. No sequence ends before its length.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
import zlib
from pathlib import Path
from statistics import median
from typing import Any

import quiet

HERE = Path(__file__).resolve().parent
SYSTEMS = ("mtf", "classic")
VOCAB, MAX_LENGTH = 4096, 256

# name: (kind, sizes, rows, length, beams)
SMALL = {"layers": 2, "d_model": 64, "heads": 4, "d_kv": 16, "d_ff": 256}
MIDDLE = {"layers": 4, "d_model": 256, "heads": 8, "d_kv": 32, "d_ff": 1024}
CASES: dict[str, tuple[str, dict[str, int], int, int, int]] = {
    "lm_small": ("lm", SMALL, 4, 64, 1),
    "lm_middle": ("lm", MIDDLE, 8, 64, 1),
    "bi_small": ("bi", SMALL, 4, 64, 1),
    "bi_middle": ("bi", MIDDLE, 8, 64, 1),
    "beam_small": ("bi", SMALL, 4, 64, 4),
    "beam_middle": ("bi", MIDDLE, 4, 64, 4),
}


# -- the measured process


def import_packages(system: str) -> tuple[Any, Any, Any]:
    """Returns mesh_tensorflow and two modules of its transformer package."""
    if system == "classic":
        from unittest import mock

        with contextlib.suppress(ImportError):
            import classic_shim  # noqa: F401
        sys.modules["tensorflow_datasets"] = mock.MagicMock()  # which it imports
    else:
        sys.path.insert(0, str(HERE.parent))
    quiet.import_tensorflow()
    import mesh_tensorflow as mtf
    from mesh_tensorflow.transformer import transformer, transformer_layers

    return mtf, transformer, transformer_layers


def make_stack(transformer: Any, layers: Any, kinds: str, sizes: dict[str, int]) -> Any:
    """Returns a pre-norm stack; `kinds` has a letter for each layer of a block."""
    attention = {"num_heads": sizes["heads"], "key_value_size": sizes["d_kv"]}
    makers = {
        "s": lambda: layers.SelfAttention(**attention),
        "e": lambda: layers.EncDecAttention(**attention),
        "f": lambda: layers.DenseReluDense(hidden_size=sizes["d_ff"]),
    }
    made = [makers[kind]() for kind in kinds * sizes["layers"]]
    for number, layer in enumerate(made):
        layer.set_name(f"layer_{number:03d}")
    return transformer.LayerStack(
        made,
        sublayers_initial=[],
        sublayers_per_layer=[
            transformer.sublayer_rms_norm,
            transformer.sublayer_call_layer,
            transformer.sublayer_residual,
        ],
        sublayers_final=[transformer.sublayer_rms_norm],
    )


def decoded(system: str, case: str, mesh: Any, packages: tuple) -> Any:
    """Returns the ids that a model decodes."""
    mtf, transformer, layers = packages
    import tensorflow.compat.v1 as tf

    kind, sizes, rows, length, beams = CASES[case]

    def model(kinds: str, **kwargs: Any) -> Any:
        arguments = {
            "d_model": sizes["d_model"], "input_vocab_size": VOCAB, "output_vocab_size": VOCAB,
            "autoregressive": True, "max_length": MAX_LENGTH, **kwargs,
        }  # fmt: skip
        stack = make_stack(transformer, layers, kinds, sizes)
        return transformer.Unitransformer(stack, **arguments)

    shape = mtf.Shape(mtf.convert_to_shape(f"batch:{rows},length:{length}").dims)
    if kind == "lm":
        return model("sf").sample_autoregressive(
            mtf.zeros(mesh, shape, tf.int32), has_partial_sequences=False, stop_at_token=VOCAB - 1
        )
    encoder = model("sf", name="encoder", autoregressive=False, output_vocab_size=None)
    both = transformer.Bitransformer(encoder, model("sef", name="decoder"))
    ids = tf.reshape(tf.range(rows * length), [rows, length]) * 37 % (VOCAB - 2) + 2
    return both.decode(mtf.import_tf_tensor(mesh, ids, shape), beam_size=beams)


def weights(name: str, sizes: list[int]) -> Any:
    """Initial values by the name of a variable; those of logits keep the end unlikely."""
    import numpy as np

    rng = np.random.RandomState(zlib.crc32(name.encode()))
    value = rng.normal(size=sizes) * (0.5 if len(sizes) < 2 else sizes[0] ** -0.5)
    return value.astype("float32")


class Worker:
    """A session on a program that decodes."""

    def __init__(self, system: str, case: str, mesh_shape: str, layout: str):
        packages = import_packages(system)
        import tensorflow.compat.v1 as tf

        tf.disable_v2_behavior()
        mtf = packages[0]
        graph = mtf.Graph()
        mesh = mtf.Mesh(graph, "mesh")
        ids = decoded(system, case, mesh, packages)
        n = mtf.convert_to_shape(mesh_shape).size
        impl = mtf.placement_mesh_impl.PlacementMeshImpl(mesh_shape, layout, ["cpu:0"] * n)
        lowering = mtf.Lowering(graph, {mesh: impl})
        export = lowering.export_to_tf_tensor(ids)
        values = {v: weights(v.op.name, v.shape.as_list()) for v in tf.global_variables()}
        feeds = {v: tf.placeholder(tf.float32, v.shape) for v in values}
        fill = [tf.assign(v, feeds[v]) for v in values]
        copy = lowering.copy_masters_to_slices()
        self._session = tf.Session()
        self._session.run(tf.global_variables_initializer())
        self._session.run(fill, {feeds[v]: value for v, value in values.items()})
        self._session.run(copy)
        self._run = self._session.make_callable(export)
        self.ids = self._run()
        self._run()
        self.nodes = len(tf.get_default_graph().get_operations())

    def times(self, count: int) -> dict[str, Any]:
        """Decodes several times; returns seconds, and CPU seconds of all."""
        seconds, cpu = [], time.process_time()
        for _ in range(count):
            start = time.perf_counter()
            self._run()
            seconds.append(time.perf_counter() - start)
        return {"seconds": seconds, "cpu": time.process_time() - cpu}


def serve(arguments: argparse.Namespace) -> None:
    """Answers commands until the end of the input."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not mix with the answers
    worker = Worker(arguments.worker, arguments.case, arguments.mesh, arguments.layout)
    answer: Any = {"ids": worker.ids.tolist(), "nodes": worker.nodes}
    while True:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
        line = sys.stdin.readline()
        if not line:
            return
        answer = worker.times(int(line))


# -- the measuring process


class Process:
    """A worker that is running."""

    def __init__(self, system: str, case: str, arguments: argparse.Namespace):
        self.system = system
        python = arguments.oracle_python if system == "classic" else sys.executable
        environment = dict(os.environ, TF_CPP_MIN_LOG_LEVEL="3")
        if system == "classic":
            environment.pop("PYTHONPATH", None)
        self._log = tempfile.TemporaryFile("w+")
        self._process = subprocess.Popen(
            [python, str(HERE / "decoding.py"), "--worker", system, "--case", case,
             "--mesh", arguments.mesh, "--layout", arguments.layout],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True,
            env=environment,
        )  # fmt: skip
        self.ready = self._read()
        self.seconds: list[float] = []
        self.cpu = 0.0

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._log.seek(0)
            raise RuntimeError(f"{self.system}: {self._log.read()[-2000:]}")
        return json.loads(line)

    def decode(self, count: int) -> None:
        """Decodes and books the times."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{count}\n")
        self._process.stdin.flush()
        answer = self._read()
        self.seconds += answer["seconds"]
        self.cpu += answer["cpu"]

    def end(self) -> None:
        """Ends the worker."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def run_round(case: str, arguments: argparse.Namespace, turn: int) -> dict[str, dict[str, float]]:
    """Returns by system: milliseconds, CPU milliseconds, tokens a second, and nodes."""
    systems = [s for s in SYSTEMS if s != "classic" or arguments.oracle_python]
    processes = [Process(s, case, arguments) for s in (systems[::-1] if turn % 2 else systems)]
    found = [p.ready["ids"] for p in processes]
    if any(ids != found[0] for ids in found):
        print(f"{case}: the systems decode different ids", file=sys.stderr)
    for chunk in range(arguments.chunks):
        for process in processes[:: -1 if chunk % 2 else 1]:
            process.decode(arguments.repeats)
    _, _, rows, length, _ = CASES[case]
    results = {}
    for p in processes:
        p.end()
        typical = median(p.seconds)
        results[p.system] = {
            "ms": 1e3 * typical, "tokens": rows * length / typical, "nodes": p.ready["nodes"],
            "cpu_ms": 1e3 * p.cpu / len(p.seconds),
        }  # fmt: skip
    return results


def report(case: str, rounds: list[dict[str, dict[str, float]]]) -> str:
    """Returns a line for each system, and the ratios."""
    lines = []
    for system in rounds[0]:
        mid = {k: median(r[system][k] for r in rounds) for k in rounds[0][system]}
        lines.append(
            f"{case:12} {system:8} {mid['ms']:8.1f} ms {mid['cpu_ms']:8.1f} CPU ms "
            f"{mid['tokens']:8.0f} tokens/s {mid['nodes']:6.0f} nodes"
        )
    if "classic" in rounds[0]:
        for key, text in (("ms", "time"), ("cpu_ms", "CPU")):
            ratios = sorted(r["classic"][key] / r["mtf"][key] for r in rounds)
            lines.append(
                f"{case:12} {text}, classic over mtf: {median(ratios):.2f} "
                f"({ratios[0]:.2f} - {ratios[-1]:.2f})"
            )
    return "\n".join(lines)


def main() -> None:
    """Runs all cases, or those that are named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--oracle_python", default="")
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--chunks", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--mesh", default="")
    parser.add_argument("--layout", default="")
    parser.add_argument("--worker", default="", help="for the measured process")
    parser.add_argument("--case", default="", help="for the measured process")
    arguments = parser.parse_args()
    if arguments.worker:
        serve(arguments)
        return
    for case in arguments.cases.split(","):
        rounds = [run_round(case, arguments, turn) for turn in range(arguments.rounds)]
        print(report(case, rounds), flush=True)


if __name__ == "__main__":
    main()
