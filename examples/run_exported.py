"""Runs what `mtf.pjrt.export` wrote, with JAX alone: neither TensorFlow nor this package is needed.

    python examples/run_exported.py DIRECTORY DEVICES INPUT.npy ...

It prints the sum of each result, and writes the results to DIRECTORY/results.npz. A program that
trains does --steps=N steps, and the weights after them are written to DIRECTORY/trained.npz. JAX
reads programs by another package: pip install jax flatbuffers.
"""

import argparse
import json
import pathlib
from typing import Any

import jax
import numpy as np
from jax import export

DTYPES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "I16": "int16", "I32": "int32", "I64": "int64",
    "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64",
}  # fmt: skip


def read_safetensors(path: pathlib.Path) -> tuple[dict[str, np.ndarray], dict[str, int]]:
    """Returns the weights by name, and the sizes of the mesh's dimensions by name."""
    content = path.read_bytes()
    begin = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:begin])
    dims = header.pop("__metadata__")["mesh"].split(",")
    weights = {}
    for name, entry in header.items():
        first, last = entry["data_offsets"]
        dtype = jax.numpy.dtype(DTYPES[entry["dtype"]])
        values = np.frombuffer(content[begin + first : begin + last], dtype)
        weights[name] = values.reshape(entry["shape"])
    return weights, {name: int(size) for name, _, size in (d.partition(":") for d in dims)}


class Program:
    """An exported program on a number of devices, with its weights.

    Attributes:
      weights: the values of the weights by name.
      trained: the names of those that each call replaces; none if the program does not train.
    """

    def __init__(self, directory: pathlib.Path, devices: int):
        """Reads the files.

        Args:
          directory: where they are.
          devices: 1, or as many as the program's mesh has.
        """
        program = export.deserialize((directory / f"program_{devices}.bin").read_bytes())
        self.weights, sizes = read_safetensors(directory / "weights.safetensors")
        shape = [1] * len(sizes) if devices == 1 else list(sizes.values())
        mesh = jax.sharding.Mesh(np.array(jax.devices()[:devices]).reshape(shape), tuple(sizes))
        self._shardings = program.in_shardings_jax(mesh)
        tree = program.out_tree
        returned = jax.tree_util.tree_unflatten(tree, range(tree.num_leaves))
        self.trained = tuple(returned[1]) if isinstance(returned, tuple) else ()

        def step(inputs: list, kept: dict[str, jax.Array], trained: dict[str, jax.Array]) -> Any:
            return program.call(inputs, {**kept, **trained})

        # The new values of weights may be computed in the memory of the old ones.
        self._step = jax.jit(step, donate_argnums=2)

    def __call__(self, inputs: list[np.ndarray]) -> list[jax.Array]:
        """Returns the results for inputs."""
        leaves, structure = jax.tree_util.tree_flatten((inputs, self.weights))
        placed = [jax.device_put(leaf, where) for leaf, where in zip(leaves, self._shardings)]
        inputs, kept = jax.tree_util.tree_unflatten(structure, placed)
        returned = self._step(inputs, kept, {name: kept.pop(name) for name in self.trained})
        if not self.trained:
            return list(returned)
        results, new = returned
        self.weights = {**kept, **new}
        return list(results)


def run(directory: pathlib.Path, devices: int, inputs: list[np.ndarray]) -> list[np.ndarray]:
    """Returns the results of an exported program on a number of devices, 1 or those of its mesh."""
    return [np.asarray(result) for result in Program(directory, devices)(inputs)]


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description="Runs what mtf.pjrt.export wrote.")
    parser.add_argument("directory", type=pathlib.Path, help="where the files are")
    parser.add_argument("devices", type=int, help="the number of devices: 1, or that of the mesh")
    parser.add_argument("inputs", nargs="*", help="files of NumPy, one for each argument")
    parser.add_argument("--steps", type=int, default=1, help="of a program that trains")
    options = parser.parse_args()
    jax.config.update("jax_enable_x64", True)  # programs may have dtypes of 64 bits
    jax.config.update("jax_num_cpu_devices", options.devices)
    inputs = [np.load(path) for path in options.inputs]
    program = Program(options.directory, options.devices)
    for _ in range(options.steps):
        results = [np.asarray(result) for result in program(inputs)]
        for result in results:
            print(result.shape, result.dtype, np.sum(result, dtype=np.float64))
    np.savez(options.directory / "results.npz", *results)
    if program.trained:
        weights = {name: np.asarray(value) for name, value in program.weights.items()}
        np.savez(options.directory / "trained.npz", **weights)


if __name__ == "__main__":
    main()
