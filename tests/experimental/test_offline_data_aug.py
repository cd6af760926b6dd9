"""Augmentation ahead of training: files in, files out."""

import os

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from helpers.experimental.generated_scans import RESO, set_flags, write

from mesh_tensorflow.experimental import offline_data_aug


def read(path):
    with tf.Graph().as_default(), tf.Session() as session:
        ds = tf.data.TFRecordDataset(str(path), "GZIP")
        [record] = [session.run(tf.data.make_one_shot_iterator(ds).get_next())]
    features = tf.train.Example.FromString(record).features.feature
    return [
        np.frombuffer(features[name].bytes_list.value[0], np.float32).reshape([RESO] * 3)
        for name in ("image/ct_image", "image/label")
    ]


def augment(folder, **values):
    set_flags(
        input_file_pattern=str(folder / "raw-*"),
        output_folder=str(folder / "out"),
        process_no=7,
        num_data_aug=12,
        **values,
    )
    with tf.Graph().as_default():
        tf.set_random_seed(1)
        offline_data_aug.main([])
    names = [f"augmented-7-{i}.tfrecords" for i in range(12)]
    assert sorted(os.listdir(folder / "out")) == sorted(names)
    return [read(folder / "out" / name) for name in names]


@pytest.mark.slow
def test_turned_scans(tmp_path):
    scans = write(tmp_path, 2)
    turned = {}
    for i, (_, label) in enumerate(scans):
        for plane in ((), (0, 1), (0, 2), (1, 2)):
            turned[np.flip(label, plane).tobytes()] = i, plane
    found = augment(tmp_path, gen_fake_probability=0.0)
    seen = []
    for image, label in found:
        i, plane = turned[label.tobytes()]
        raw = np.flip(scans[i][0], plane)
        np.testing.assert_allclose(image, np.clip((raw + 512) / 1024, 0, 1), atol=1e-6)
        seen.append((i, plane))
    # Each file is read as often as the other, turned in any of four ways.
    assert [sum(i == j for i, _ in seen) for j in (0, 1)] == [6, 6] and len(set(seen)) > 3


@pytest.mark.slow
def test_made_up_lesions(tmp_path):
    scans = write(tmp_path, 2)
    found = augment(tmp_path, gen_fake_probability=1.0, min_fake_lesion_ratio=0.3)
    real = {
        np.flip(label, plane).tobytes()
        for _, label in scans
        for plane in ((), (0, 1), (0, 2), (1, 2))
    }
    assert not any(label.tobytes() in real for _, label in found)
    livers = {(label > 0).sum() for _, label in scans}
    assert {(label > 0).sum() for _, label in found} <= livers
    assert all(0 <= image.min() and image.max() <= 1 for image, _ in found)


def test_what_is_missing(tmp_path):
    set_flags(output_folder=str(tmp_path), process_no=None)
    with pytest.raises(
        ValueError, match="--process_no must be a number, else processes would write"
    ):
        offline_data_aug.apply_data_aug()
    set_flags(output_folder=str(tmp_path), process_no=0, input_file_pattern="")
    with pytest.raises(ValueError, match="--input_file_pattern='' names no file"):
        offline_data_aug.apply_data_aug()
    with pytest.raises(
        ValueError, match=r"the image has the shape \(2, 2\), but its label \(2, 3\)"
    ):
        offline_data_aug.save_to_tfrecord(
            np.ones([2, 2]), np.ones([2, 3]), 0, 0, str(tmp_path), "x"
        )
