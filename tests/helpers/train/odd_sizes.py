"""A training whose sizes no mesh divides, run by several processes: images, joins, a vocabulary."""

import json
import sys

import numpy as np

import mesh_tensorflow as mtf

IMAGES = np.random.RandomState(0).randn(21, 7, 5).astype(np.float32)
CLASSES = np.random.RandomState(1).randint(0, 11, 21).astype(np.int32)
BATCH, H, W, C = (mtf.Dimension(n, s) for n, s in [("batch", 7), ("h", 7), ("w", 5), ("c", 11)])


def model_fn(mesh, images, classes):
    """Returns the loss of each image, by a convolution of parts, and both ends of its height."""
    x = mtf.reshape(images, [BATCH, H, W, mtf.Dimension("one", 1)])
    x = mtf.layers.conv2d(x, mtf.Dimension("filters", 3), (3, 3), name="conv")
    x = mtf.concat([mtf.slice(x, 1, 6, "h"), mtf.shift(x, 1, H, wrap=False)], "h")
    logits = mtf.layers.dense(x, [C], reduced_dims=x.shape.dims[1:], name="dense")
    return mtf.layers.softmax_cross_entropy_with_logits(logits, classes, C)


def fit(**options):
    """Trains three steps; returns the Result."""
    return mtf.train.fit(
        model_fn,
        (IMAGES, CLASSES),
        steps=3,
        dims=([BATCH, H, W], [BATCH]),
        optimizer=mtf.optimize.SgdOptimizer(0.1),
        log_every=1,
        progress=False,
        **options,
    )


if __name__ == "__main__":
    layout, out = sys.argv[1:]
    from mesh_tensorflow import launch

    losses = fit(mesh_shape="x:3", layout=layout, uneven=True, simd=True).losses
    with open(f"{out}.{launch.processes().index}", "w", encoding="utf-8") as file:
        json.dump([float(x) for x in losses], file)
