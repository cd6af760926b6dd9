"""mtf.pjrt.export: files that JAX alone runs, on the mesh and on one device."""

import subprocess
import sys

import numpy as np
import pytest
from helpers.paths import EXAMPLES
from helpers.pjrt import DATA, LAYOUT, MESH, on_jax

import mesh_tensorflow as mtf

sys.path.append(str(EXAMPLES))

import run_exported


def product(mesh_shape=MESH, layout=LAYOUT):
    """Returns a function of mtf.pjrt with weights of two dtypes, and two results."""

    @mtf.pjrt.function(mesh_shape=mesh_shape, layout=layout)
    def program(data, scale):
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        x = mtf.import_tf_tensor(mesh, data, mtf.Shape([("batch", 8), ("d", 4)]))
        w = mtf.get_variable(mesh, "a/w", mtf.Shape([("d", 4), ("hidden", 6)]))
        b = mtf.get_variable(mesh, "b", mtf.Shape([("hidden", 6)]), mtf.VariableDType())
        y = mtf.relu(mtf.einsum([x, w], mtf.Shape([("batch", 8), ("hidden", 6)])) + b) * scale
        total = mtf.reduce_sum(y)
        lowering = mtf.Lowering(mesh.graph, {mesh: mtf.pjrt.mesh_impl()})
        return lowering.export_to_tf_tensor(y), lowering.export_to_tf_tensor(total)

    return program


def test_runs_without_this_package(tmp_path):
    program = product()
    expected = [np.asarray(value) for value in program(DATA, 2.0)]
    files = mtf.pjrt.export(program, tmp_path / "model", DATA, 2.0)
    assert [path.rpartition("/")[2] for path in files] == [
        "weights.safetensors", "program_4.bin", "program_1.bin",
    ]  # fmt: skip
    for devices in [1, 4]:
        found = run_exported.run(tmp_path / "model", devices, [DATA])
        for ours, theirs in zip(found, expected, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-6)
    weights, sizes = run_exported.read_safetensors(tmp_path / "model" / "weights.safetensors")
    assert list(weights) == ["a/w", "b"] and sizes == {"rows": 2, "cols": 2}
    np.testing.assert_array_equal(weights["a/w"], program.store.value("a/w"))


@pytest.mark.slow
def test_the_script_imports_jax_alone(tmp_path):
    program = product()
    expected = np.asarray(program(DATA, 2.0)[0])
    mtf.pjrt.export(program, tmp_path, DATA, 2.0)
    np.save(tmp_path / "data.npy", DATA)
    code = (
        "import runpy, sys; sys.modules['tensorflow'] = sys.modules['mesh_tensorflow'] = None; "
        f"sys.argv[1:] = [{str(tmp_path)!r}, '4', {str(tmp_path / 'data.npy')!r}]; "
        f"runpy.run_path({str(EXAMPLES / 'run_exported.py')!r}, run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "(8, 6) float32" in done.stdout, done.stderr
    np.testing.assert_allclose(np.load(tmp_path / "results.npz")["arr_0"], expected, rtol=1e-6)


def test_what_cannot_be_exported(tmp_path):
    for step, why in [
        (on_jax(), "assigns to variables"),
        (on_jax(trains=False), "makes random values"),
    ]:
        with pytest.raises(ValueError, match=f"{why}: only programs that are functions of their"):
            mtf.pjrt.export(step, tmp_path / "model", DATA)
