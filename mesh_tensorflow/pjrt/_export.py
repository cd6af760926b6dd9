"""export: files of a program and its weights, which JAX alone can run."""

from __future__ import annotations

import json
import os
import pathlib
from typing import Any, Union

import jax
import numpy as np
from jax import export as jax_export

from mesh_tensorflow._core.shape import Dimension, Shape
from mesh_tensorflow._mesh.gspmd import GspmdMeshImpl
from mesh_tensorflow.pjrt._devices import all_dtypes, gathered, together
from mesh_tensorflow.pjrt._function import ANY_PLATFORM, CompiledFunction, CompiledProgram

__all__ = ["export"]


def export(
    function: CompiledFunction,
    directory: Union[str, os.PathLike[str]],
    *args: object,
    **named: object,
) -> list[str]:
    """Writes a program and its weights, which JAX can run without TensorFlow.

    `program_N.bin` is the program for the N devices of the function's mesh, and `program_1.bin` the
    same for one device, both as `jax.export` serializes them, for any kind of device. They take a
    list of the arguments that are arrays, and a dictionary of the weights by name, and return a
    list of results. A program that assigns to variables, such as a training step, returns the
    results and a dictionary of the new values. `weights.safetensors` has the weights and, as
    metadata, the mesh. `examples/run_exported.py` runs such files; JAX needs the package
    `flatbuffers` to read them. With several processes, all of them
    have to call it, and the first one writes.

    Args:
      function: a function that `mtf.pjrt.function` compiled.
      directory: where the files are written; it is made if need be.
      *args: arguments of the function: arrays, or what has their shape and dtype.
      **named: arguments of the function by name, likewise.

    Returns:
      The paths of the files.

    Raises:
      ValueError: the program makes random values, or a weight is of a dtype that safetensors lacks.
      OSError: the files cannot be written. If the first of several processes has an error, the
        others raise a RuntimeError.
    """
    function.make_variables(*args, **named)
    program = function.program(*args, **named)
    _check(program, function)
    # By collectives of all processes, if no process has all parts.
    weights = {name: gathered(function.store.array(name)) for name in program.trace.variables}
    folder = pathlib.Path(directory)

    def write() -> None:
        # All contents are made before the first is written, so that an error leaves no part.
        contents = {"weights.safetensors": _safetensors(weights, function.mesh_impl.shape)}
        for one in (function, _on_one_device(function)):
            made = _serialized(one.program(*args, **named))
            contents[f"program_{one.mesh.size}.bin"] = made
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in contents.items():
            (folder / name).write_bytes(content)

    failed = f"mtf.pjrt.export: the first process could not write to {folder}, and says why"
    together(write, RuntimeError(failed), first=True)
    programs = dict.fromkeys(f"program_{n}.bin" for n in (function.mesh.size, 1))
    return [str(folder / name) for name in ["weights.safetensors", *programs]]


def _on_one_device(function: CompiledFunction) -> CompiledFunction:
    """Returns a function that builds the same program for a mesh of one device."""
    impl = function.mesh_impl
    shape = Shape([Dimension(d.name, 1) for d in impl.shape])
    return CompiledFunction(GspmdMeshImpl(shape, impl.layout_rules), None, None, function.fn)


def _check(program: CompiledProgram, function: CompiledFunction) -> None:
    """Raises a ValueError if a program is no function of its arguments and weights."""
    if program.trace.num_keys:
        raise ValueError(
            f"{function!r} makes random values, whose keys are drawn outside of the program: only "
            "programs that are functions of their arguments and weights can be exported. Export "
            "one that evaluates, trains without dropout, or decodes without sampling"
        )


def _serialized(program: CompiledProgram) -> bytes:
    """Returns a program that takes arguments and weights."""

    def step(arguments: list[Any], weights: dict[str, Any]) -> Any:
        kept, assigned = ([weights[n] for n in g] for g in (program.kept, program.assigned))
        results, new = program.call(arguments, [], kept, assigned)
        return (results, dict(zip(program.assigned, new))) if program.assigned else results

    arguments, _, kept, assigned = program.abstract()
    shapes = dict(zip([*program.kept, *program.assigned], [*kept, *assigned]))
    results = (program.results, program.assigned) if program.assigned else program.results
    jitted = jax.jit(
        step,
        in_shardings=(program.arguments, {**program.kept, **program.assigned}),
        out_shardings=results,
    )
    with all_dtypes():
        exported = jax_export.export(jitted, **ANY_PLATFORM)(arguments, shapes)
    return bytes(exported.serialize())


_SAFETENSORS_DTYPES = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "int16": "I16", "int32": "I32", "int64": "I64",
    "float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64",
}  # fmt: skip


def _safetensors(arrays: dict[str, np.ndarray], mesh_shape: Shape) -> bytes:
    """Returns arrays in the format of safetensors: a header in JSON, and the values."""
    mesh = ",".join(f"{d.name}:{d.size}" for d in mesh_shape)
    header: dict[str, Any] = {"__metadata__": {"mesh": mesh}}
    values, end = [], 0
    for name, array in arrays.items():
        if array.dtype.name not in _SAFETENSORS_DTYPES:
            raise ValueError(
                f"variable {name!r} is of {array.dtype.name}, which safetensors does not have: it "
                f"has {', '.join(_SAFETENSORS_DTYPES)}"
            )
        start, end = end, end + array.nbytes
        header[name] = {
            "dtype": _SAFETENSORS_DTYPES[array.dtype.name],
            "shape": list(array.shape),
            "data_offsets": [start, end],
        }
        values.append(np.ascontiguousarray(array).tobytes())
    text = json.dumps(header).encode()
    # The format aligns values by spaces after the header.
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + b"".join(values)
