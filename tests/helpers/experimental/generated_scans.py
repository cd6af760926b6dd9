"""Small generated volumes in files, and flags for them."""

import numpy as np
from absl import flags

from mesh_tensorflow.experimental import model_executor, offline_data_aug, unet  # noqa: F401 (flags)

RESO = 8
SETTINGS = {
    "ct_resolution": RESO,
    "batch_size_train": 2,
    "batch_size_eval": 2,
    "image_nx_block": 2,
    "image_ny_block": 2,
    "n_base_filters": 4,
    "network_depth": 2,
    "n_conv_per_block": 1,
    "dropout_keep_p": 1.0,
    "mtf_dtype": "float32",
    "pred_downsample": 2,
    "n_dataset_processes": 2,
    "layout": "image_nx_block:rows,image_ny_block:columns",
    "mesh_shape": "rows:2,columns:2",
}


def set_flags(**values):
    """Sets flags, until the end of the test."""
    for name, value in {**SETTINGS, **values}.items():
        setattr(flags.FLAGS, name, value)


def scan(seed, reso=RESO):
    """Returns (image in Hounsfield units, label) of a liver with a lesion."""
    random = np.random.RandomState(seed)
    grid = np.stack(np.meshgrid(*[np.arange(reso)] * 3, indexing="ij"), -1) + 0.5
    label = (np.square(grid - reso / 2).sum(-1) < (0.45 * reso) ** 2).astype(np.float32)
    center = reso * random.uniform(0.35, 0.65, 3)
    label[np.square(grid - center).sum(-1) < (0.2 * reso) ** 2] = 2
    image = np.array([-300.0, 110.0, 0.0])[label.astype(int)] + 20 * random.normal(size=label.shape)
    return image.astype(np.float32), label


def write(folder, count=4, reso=RESO):
    """Writes raw-*.tfrecords and, scaled to 0 to 1, ready-*.tfrecords; returns the raw scans."""
    scans = [scan(seed, reso) for seed in range(count)]
    for i, (image, label) in enumerate(scans):
        offline_data_aug.save_to_tfrecord(image, label, 0, i, str(folder), "raw")
        scaled = np.clip((image + 512) / 1024, 0, 1)
        offline_data_aug.save_to_tfrecord(scaled, label, 0, i, str(folder), "ready")
    return scans
