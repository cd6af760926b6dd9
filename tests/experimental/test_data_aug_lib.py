"""Augmentations: what they do to numbers, beside NumPy, and how often."""

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from mesh_tensorflow.experimental import data_aug_lib

SIZES = (6, 8, 10)
RANDOM = np.random.RandomState(0)
IMAGE = RANDOM.rand(*SIZES).astype(np.float32)
LABEL = RANDOM.randint(0, 3, SIZES).astype(np.float32)


def runs(build, times=1):
    """Returns the results of several runs of what a function builds."""
    with tf.Graph().as_default(), tf.Session() as session:
        tf.set_random_seed(3)
        results = build()
        return [session.run(results) for _ in range(times)]


def both(fn, *args, times=1, image=IMAGE, label=LABEL, **kwargs):
    return runs(lambda: fn(tf.constant(image), tf.constant(label), *args, **kwargs), times)


# -- flips and turns


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("indicator, flipped", [(0.3, False), (0.5, False), (0.7, True)])
def test_flip(axis, indicator, flipped):
    [(image, label)] = both(data_aug_lib.maybe_flip, axis, indicator)
    np.testing.assert_array_equal(image, np.flip(IMAGE, axis) if flipped else IMAGE)
    np.testing.assert_array_equal(label, np.flip(LABEL, axis) if flipped else LABEL)


def test_flip_is_random():
    found = both(data_aug_lib.maybe_flip, 1, times=100)
    flipped = [np.array_equal(image, np.flip(IMAGE, 1)) for image, _ in found]
    assert flipped == [np.array_equal(label, np.flip(LABEL, 1)) for _, label in found]
    assert 30 < sum(flipped) < 70


# As in the classic.
PLANES = {0: (2, 1), 1: (0, 2), 2: (0, 1)}


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("turns", [0, 1, 2, 3, 4])
def test_quarter_turns(axis, turns):
    [(image, label)] = both(data_aug_lib.maybe_rot180, axis, rot180_k=turns)
    np.testing.assert_array_equal(image, np.rot90(IMAGE, turns, PLANES[axis]))
    np.testing.assert_array_equal(label, np.rot90(LABEL, turns, PLANES[axis]))


def test_half_turns_are_random():
    found = both(data_aug_lib.maybe_rot180, 0, times=100)
    turned = [np.array_equal(image, np.rot90(IMAGE, 2, (1, 2))) for image, _ in found]
    assert all(t or np.array_equal(x, IMAGE) for t, (x, _) in zip(turned, found))
    assert 30 < sum(turned) < 70


def test_no_such_axis():
    with pytest.raises(ValueError, match="static_axis is 3, but a volume has the axes 0, 1 and 2"):
        both(data_aug_lib.maybe_rot180, 3)


# -- projective transforms


def sampled(plane, numbers, nearest):
    """Returns a plane [rows, columns] at the places that eight numbers say, 0 from outside."""
    a0, a1, a2, b0, b1, b2, c0, c1 = numbers
    rows, columns = plane.shape
    padded = np.zeros([rows + 2, columns + 2])
    padded[1:-1, 1:-1] = plane
    y, x = np.meshgrid(np.arange(rows), np.arange(columns), indexing="ij")
    k = c0 * x + c1 * y + 1
    u, v = (a0 * x + a1 * y + a2) / k, (b0 * x + b1 * y + b2) / k
    if nearest:
        u, v = np.round(u), np.round(v)
    u, v = np.clip(u, -1, columns), np.clip(v, -1, rows)
    i, j = (
        np.minimum(np.floor(v), rows - 1).astype(int),
        np.minimum(np.floor(u), columns - 1).astype(int),
    )
    s, t = v - i, u - j
    i, j = i + 1, j + 1
    return (
        padded[i, j] * (1 - s) * (1 - t)
        + padded[i + 1, j] * s * (1 - t)
        + padded[i, j + 1] * (1 - s) * t
        + padded[i + 1, j + 1] * s * t
    )


NUMBERS = [
    [1, 0, 2, 0, 1, -1, 0, 0],
    [0.913, 0.107, 0.311, -0.0531, 1.0973, 0.7117, 0, 0],
    [1.0517, 0.0213, -0.6131, 0.0817, 0.9511, 0.4139, 0.0107, -0.0203],
]


@pytest.mark.parametrize("flat", [False, True])
def test_projective_transform(monkeypatch, flat):
    drawn = iter(NUMBERS)
    monkeypatch.setattr(
        data_aug_lib, "_random_transform", lambda *_: tf.constant(next(drawn), tf.float32)
    )
    [(image, label)] = both(data_aug_lib.projective_transform, 8, 0.1, 0.1, sampled_2d_slices=flat)
    for nearest, start, found in ((False, IMAGE, image), (True, LABEL, label)):
        expected = start
        for numbers, axis in zip(NUMBERS[:1] if flat else NUMBERS, (2, 0, 1)):
            planes = np.moveaxis(expected, axis, 0)
            expected = np.moveaxis(
                np.stack([sampled(p, numbers, nearest) for p in planes]), 0, axis
            )
        np.testing.assert_allclose(found, expected, atol=2e-5)


def test_transforms_stay_within_two_deviations():
    drawn = np.array(runs(lambda: data_aug_lib._random_transform(100, 0.02, 0.05), 400))
    mean = np.array([1, 0, 0, 0, 1, 0, 0, 0])
    stddev = np.array([0.05, 0.05, 2, 0.05, 0.05, 2, 0.05, 0.05])
    assert np.all(np.abs(drawn - mean) <= 2 * stddev + 1e-6)
    np.testing.assert_allclose(drawn.mean(0), mean, atol=0.2 * stddev.max())
    np.testing.assert_allclose(drawn.std(0) / stddev, 0.96, atol=0.12)


def test_no_transform():
    image, label = tf.zeros([4, 4, 4]), tf.ones([4, 4, 4])
    assert data_aug_lib.projective_transform(image, label, 4, 0.0, 0.0)[0] is image


# -- intensities


def test_intensity_shift():
    for image in both(data_aug_lib.intensity_shift, 0.0, 0.1):
        np.testing.assert_allclose(image, IMAGE * np.where(LABEL == 2, 1.1, 0.9), rtol=1e-6)
    factors = []
    for image in both(data_aug_lib.intensity_shift, 0.1, 0.0, times=200):
        ratio = image / IMAGE
        assert np.ptp(ratio[LABEL == 2]) < 1e-5 and np.ptp(ratio[LABEL < 2]) < 1e-5
        factors.append([ratio[LABEL == 2][0], ratio[LABEL < 2][0]])
    factors = np.array(factors)
    assert factors.min() > 0.799 and factors.max() < 1.201
    np.testing.assert_allclose(factors.mean(0), 1.0, atol=0.03)
    np.testing.assert_allclose(factors.std(0), 0.096, atol=0.02)
    assert abs(np.corrcoef(factors.T)[0, 1]) < 0.3


def noise(times, scales, probability, ratio):
    zeros = np.zeros((8, 8, 8), np.float32)
    return np.array(
        runs(
            lambda: data_aug_lib.maybe_add_noise(
                tf.constant(zeros), [8, 8, 8], *scales, probability, ratio
            ),
            times,
        )
    )


def test_noise_is_added_as_often_as_told():
    assert not noise(5, (1, 1), 0.0, 0.5).any()
    found = noise(200, (1, 1), 0.3, 0.5).any(axis=(1, 2, 3))
    assert 0.2 < found.mean() < 0.4


# What the classic's noise has, over 400 images.
@pytest.mark.parametrize(
    "scales, stddev, correlation",
    [((1, 1), 0.79, 0.0), ((1, 2), 0.69, 0.24), ((2, 2), 0.585, 0.70), ((4, 4), 0.60, 0.88)],
)
def test_grains_of_noise(scales, stddev, correlation):
    found = noise(400, scales, 1.0, 1.0)
    assert np.abs(found).max() < 4
    np.testing.assert_allclose(found.std(), stddev, rtol=0.1)
    centered = found - found.mean((1, 2, 3), keepdims=True)
    for axis in (1, 2, 3):
        near = np.take(centered, range(1, 8), axis) * np.take(centered, range(7), axis)
        np.testing.assert_allclose(near.mean() / centered.var(), correlation, atol=0.06)


def test_interpolation():
    coarse = RANDOM.rand(4, 3).astype(np.float32)
    [found] = runs(lambda: data_aug_lib.interpolated(tf.constant(coarse), [8, 6]))
    rows = [np.interp(np.arange(8) / 2, np.arange(4), coarse[:, j]) for j in range(3)]
    expected = [np.interp(np.arange(6) / 2, np.arange(3), row) for row in np.array(rows).T]
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize("fraction", [0.0, 0.1, 0.5, 1.0])
def test_masks_have_the_size_they_should(fraction):
    for mask in runs(lambda: data_aug_lib.random_mask((16, 16, 16), 16, fraction), 3):
        assert abs(mask.mean() - fraction) < 1e-3


def test_smooth_noise():
    found = np.array(runs(lambda: data_aug_lib.smooth_noise((32, 32, 32), 32), 60))
    np.testing.assert_allclose(found.var(), 1.0, atol=0.1)
    assert np.abs(np.diff(found, axis=2)).std() < 0.5 * found.std()


def test_corruption():
    label = np.repeat(np.arange(3.0), 8)[:, None, None] * np.ones((24, 24, 24))
    image = np.ones((24, 24, 24), np.float32)
    parts = []
    for found in both(
        data_aug_lib.image_corruption,
        24,
        0.2,
        0.05,
        times=60,
        image=image,
        label=label.astype(np.float32),
    ):
        assert set(np.unique(found)) <= {0.0, 1.0} and found[label == 2].all()
        parts.append((found == 0).mean())
    # A third of the blobs is where lesions are.
    np.testing.assert_allclose(np.mean(parts), 0.2 * 2 / 3, atol=0.03)
    assert np.ptp(parts) > 0.02
    x = tf.constant(IMAGE)
    assert data_aug_lib.image_corruption(x, x, 8, 0.0, 0.0) is x


# -- lesions


def liver(reso=24):
    grid = np.stack(np.meshgrid(*[np.arange(reso)] * 3, indexing="ij"), -1)
    label = (np.square(grid - reso / 2).sum(-1) < 80).astype(np.float32)
    label[np.square(grid - [9, 11, 12]).sum(-1) < 7] = 2
    image = np.array([0.1, 0.6, 0.3])[label.astype(int)] + RANDOM.normal(size=label.shape) * 0.02
    return image.astype(np.float32), label


def fake(ratio, probability, times, image, label):
    return both(
        data_aug_lib.maybe_gen_fake_data_based_on_real_data,
        24,
        ratio,
        probability,
        times=times,
        image=image,
        label=label,
    )


def test_made_up_lesions():
    image, label = liver()
    contrast = 1.15 * (image[label == 1].mean() - image[label == 2].mean())
    parts = []
    for other_image, other_label in fake(0.3, 1.0, 20, image, label):
        assert np.array_equal(other_label > 0, label > 0)
        difference = other_image - image
        np.testing.assert_allclose(
            difference, contrast * ((label == 2).astype(float) - (other_label == 2)), atol=1e-5
        )
        parts.append((other_label == 2).sum() / (label > 0).sum())
    np.testing.assert_allclose(np.mean(parts), 0.3, atol=0.08)


def test_lesions_are_made_up_as_often_as_told():
    image, label = liver()
    changed = [not np.array_equal(new, label) for _, new in fake(0.2, 0.3, 100, image, label)]
    assert 15 < sum(changed) < 45


def without_lesions(image, label):
    return image, np.minimum(label, 1)


def without_liver(image, label):
    return image, label * (label == 2)


def with_bright_lesions(image, label):
    return image + 0.5 * (label == 2).astype(np.float32), label


@pytest.mark.parametrize("change", [without_lesions, without_liver, with_bright_lesions])
def test_volumes_that_lesions_cannot_be_made_up_for(change):
    image, label = change(*liver())
    for new_image, new_label in fake(0.2, 1.0, 3, image, label.astype(np.float32)):
        np.testing.assert_array_equal(new_image, image)
        np.testing.assert_array_equal(new_label, label)
