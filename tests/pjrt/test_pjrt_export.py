"""mtf.pjrt.export: files that JAX alone runs, on the mesh and on one device."""

import resource
import sys

import jax
import numpy as np
import pytest
from helpers import processes
from helpers.paths import EXAMPLES
from helpers.pjrt import DATA, LAYOUT, MESH, losses, on_jax

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


def test_an_export_that_fails_leaves_the_earlier_one(tmp_path):
    program = product("rows:1", "")
    files = mtf.pjrt.export(program, tmp_path, DATA, 2.0)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    program.store.assign("b", program.store.value("b") + 1)
    # As a full disk does: the weights are written whole, and of a program a part.
    least = len(before["weights.safetensors"])
    assert len(files) == 2 and all(len(x) > least for n, x in before.items() if n.endswith(".bin"))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (least, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            mtf.pjrt.export(program, tmp_path, DATA, 2.0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


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
    assert "(8, 6) float32" in processes.python("-c", code).stdout
    np.testing.assert_allclose(np.load(tmp_path / "results.npz")["arr_0"], expected, rtol=1e-6)


def test_a_step_that_trains(tmp_path):
    """Its new weights come back beside its results, and go into the next step."""
    step = on_jax(keep_prob=1.0)
    mtf.pjrt.export(step, tmp_path, DATA)
    expected = losses(step)
    for devices in [1, 4]:
        exported = run_exported.Program(tmp_path, devices)
        found = [float(exported([DATA])[0]) for _ in range(4)]
        np.testing.assert_allclose(found, expected, rtol=1e-5)
        assert exported.weights.keys() == step.store.masters.keys()
        for name in exported.trained:
            np.testing.assert_allclose(
                exported.weights[name], step.store.value(name), rtol=1e-5, atol=1e-6
            )


def test_programs_are_for_all_platforms(tmp_path):
    """Also for those that TensorFlow has no operations for, as its package for CPUs."""
    program = product()
    mtf.pjrt.export(program, tmp_path, DATA, 2.0)
    read = jax.export.deserialize((tmp_path / "program_1.bin").read_bytes())
    for platform in ("cuda", "tpu"):
        again = jax.export.export(jax.jit(read.call), platforms=[platform])(
            *jax.tree_util.tree_unflatten(read.in_tree, read.in_avals)[0]
        )
        assert again.platforms == (platform,) and "stablehlo.dot" in again.mlir_module()


def test_what_cannot_be_exported(tmp_path):
    with pytest.raises(ValueError, match="makes random values, whose keys are drawn outside"):
        mtf.pjrt.export(on_jax(trains=False), tmp_path / "model", DATA)
    assert not (tmp_path / "model").exists()
