"""The U-Net example: it finds lesions in volumes that are split over a mesh."""

import re
import sys

import numpy as np
import pytest
from helpers import noise, processes
from helpers.paths import EXAMPLES

sys.path.append(str(EXAMPLES))

import unet_3d as example


def run(*flags, code=0):
    done = processes.run(EXAMPLES / "unet_3d.py", *flags)
    assert done.returncode == code, done.stderr
    noise.check(done)
    return done.stdout if code == 0 else done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("flags", [[], ["--nouse_tpu", "--mesh_shape=all:4", "--layout=batch:all"]])
def test_quick_form_finds_lesions(flags):
    text = run("--quick", *flags)
    lines = re.findall(
        r"^step (\d+)/300  loss ([-\d.]+)  held out: voxels right ([\d.]+)%", text, re.M
    )
    assert [int(step) for step, *_ in lines] == [50, 100, 150, 200, 250, 300]
    assert float(lines[-1][1]) < 0.5 * float(lines[0][1])
    dice = re.search(r"^lesion Dice ([\d.]+) on held-out volumes$", text, re.M)
    assert float(dice[1]) >= example.QUICK_DICE


@pytest.mark.slow
def test_the_fastest_layout_is_trained_with(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    few = ["--quick", "--num_training_loops=1", "--num_train_iterations_per_loop=3"]
    done = processes.run(EXAMPLES / "unet_3d.py", *few, "--layout=auto")
    assert done.returncode == 0, done.stderr
    assert re.search(r"^layout .*: the fastest of \d that were tried$", done.stderr, re.M)
    lines = [
        re.findall(r"^step 3/3  loss ([-\d.]+)", out, re.M) for out in (done.stdout, run(*few))
    ]
    # Roughly: volumes are read by several threads, so that no two runs have the same batches.
    assert float(lines[0][0]) == pytest.approx(float(lines[1][0]), rel=0.1)


@pytest.mark.slow
def test_mistakes():
    text = run("--quick", "--layout=auto", "--master=grpc://no", "--num_data_aug=1", code=2)
    assert "--layout=auto with --master: layouts are tried on the devices of this" in text
    text = run("--quick", "--image_nx_block=3", "--num_data_aug=1", code=2)
    assert "--ct_resolution=16 cannot be cut into --image_nx_block=3 blocks" in text


def test_volumes():
    image, label = example.scan(np.random.RandomState(3), 16)
    assert image.shape == label.shape == (16, 16, 16)
    assert set(np.unique(label)) == {0, 1, 2}
    dark = np.abs(image - example.LESION_HU) < example.NOISE
    assert (dark & (label == 0)).sum() > 5  # organs that are as dark as lesions
    again, _ = example.scan(np.random.RandomState(3), 16)
    np.testing.assert_array_equal(image, again)
