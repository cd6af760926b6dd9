"""The suite for mesh implementations: it passes those there are, and finds what is wrong in others."""

import pathlib
import re

import pytest
import tensorflow.compat.v1 as tf
from helpers import processes

import mesh_tensorflow as mtf
from mesh_tensorflow.testing import conformance
from mesh_tensorflow.testing.conformance import check, placement

ROOT = pathlib.Path(__file__).parents[2]
OWN = "examples.mesh_impl_of_your_own:OneDeviceMeshImpl"
BUILT_IN = "mesh_tensorflow.testing.conformance:"


def command(*arguments):
    return processes.run(
        "-m", "mesh_tensorflow.testing.conformance", *arguments, timeout=1200, cwd=ROOT
    )


@pytest.mark.slow
def test_a_part():
    done = command(OWN, "--only", "shift")
    passed = re.search(rf"{OWN}: (\d+) passed, 0 failed", done.stdout)
    assert done.returncode == 0 and passed and int(passed[1]) > 30, done.stdout


@pytest.mark.every
@pytest.mark.slow
@pytest.mark.parametrize("name", [BUILT_IN + "simd", BUILT_IN + "placement", OWN])
def test_all(name):
    """Every case, in few layouts: test_cases.py has those of the built-in ones in more."""
    done = command(name, "--layouts", "1")
    assert done.returncode == 0 and " passed, 0 failed" in done.stdout, done.stdout[-3000:]


class SumsTooLittle(mtf.placement_mesh_impl.PlacementMeshImpl):
    """Sums over the first of several mesh axes only."""

    def allreduce(self, x, mesh_axes, reduction_fn_string):
        return super().allreduce(x, mesh_axes[:1], reduction_fn_string)


def broken(cls):
    return lambda mesh_shape, layout: cls(mesh_shape, layout, [""] * 4, merge="none")


def failed(make_impl, only):
    return {result.name: result.error for result in check(make_impl, only) if result.error}


def test_wrong_sums_are_found():
    found = failed(broken(SumsTooLittle), "einsum_summed")
    assert found and all("target" in error for error in found.values())
    assert not failed(placement, "einsum_summed")


@pytest.mark.slow
def test_trainings_and_checkpoints_are_checked():
    class Forgets(mtf.placement_mesh_impl.PlacementMeshImpl):
        """Adds 1 to what it exports."""

        def export_to_tf_tensor(self, x, laid_out_x):
            return super().export_to_tf_tensor(x, laid_out_x) + tf.cast(1, x.dtype)

    for only in ["training", "checkpoint"]:
        [(name, error)] = failed(broken(Forgets), only).items()
        assert name == only and "losses in ''" in error
        assert not failed(placement, only)


def test_mistakes(capsys):
    with pytest.raises(SystemExit, match="'nothing' should be module:function"):
        conformance.main(["nothing"])
    with pytest.raises(SystemExit, match="2"):
        conformance.main([BUILT_IN + "placement", "--layouts", "-1"])
    assert "--layouts is -1: it has to be 0 or more" in capsys.readouterr().err
