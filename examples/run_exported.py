"""Runs what `mtf.pjrt.export` wrote, with JAX alone: neither TensorFlow nor this package is needed.

    python examples/run_exported.py DIRECTORY DEVICES INPUT.npy ...

It prints the sum of each result, and writes the results to DIRECTORY/results.npz. JAX reads
programs by another package: pip install jax flatbuffers.
"""

import argparse
import json
import pathlib

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


def run(directory: pathlib.Path, devices: int, inputs: list[np.ndarray]) -> list[np.ndarray]:
    """Returns the results of an exported program on a number of devices, 1 or those of its mesh."""
    program = export.deserialize((directory / f"program_{devices}.bin").read_bytes())
    weights, sizes = read_safetensors(directory / "weights.safetensors")
    shape = [1] * len(sizes) if devices == 1 else list(sizes.values())
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:devices]).reshape(shape), tuple(sizes))
    leaves, structure = jax.tree_util.tree_flatten((inputs, weights))
    shardings = program.in_shardings_jax(mesh)
    placed = [jax.device_put(leaf, where) for leaf, where in zip(leaves, shardings)]
    given = jax.tree_util.tree_unflatten(structure, placed)
    return [np.asarray(result) for result in jax.jit(program.call)(*given)]


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description="Runs what mtf.pjrt.export wrote.")
    parser.add_argument("directory", type=pathlib.Path, help="where the files are")
    parser.add_argument("devices", type=int, help="the number of devices: 1, or that of the mesh")
    parser.add_argument("inputs", nargs="*", help="files of NumPy, one for each argument")
    options = parser.parse_args()
    jax.config.update("jax_enable_x64", True)  # programs may have dtypes of 64 bits
    jax.config.update("jax_num_cpu_devices", options.devices)
    inputs = [np.load(path) for path in options.inputs]
    results = run(options.directory, options.devices, inputs)
    for result in results:
        print(result.shape, result.dtype, np.sum(result, dtype=np.float64))
    np.savez(options.directory / "results.npz", *results)


if __name__ == "__main__":
    main()
