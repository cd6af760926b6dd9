"""Moves particles by their gravity, by the functions of the package flowpm, in blocks."""

import sys
import unittest

import numpy as np
import tensorflow.compat.v1 as tf

tf.disable_v2_behavior()

import flowpm  # noqa: E402
from flowpm import legacy_background  # noqa: E402

# The release imports it by its former name.
sys.modules["flowpm.background"] = legacy_background

from flowpm import mesh_ops, mesh_utils, mtfpm  # noqa: E402

import mesh_tensorflow as mtf  # noqa: E402

CUBE, BLOCKS, HALO = 16, 2, 4
RULES = "nx:row,ny:col,tx:row,ty:col,ty_lr:row,tz_lr:col,nx_block:row,ny_block:col"


def dims(**sizes):
    return [mtf.Dimension(name, size) for name, size in sizes.items()]


def final_density(mesh, start, steps):
    """Returns the density after some steps, as the examples of flowpm compute it."""
    [batch] = dims(batch=1)
    whole = [batch, *dims(nx=CUBE, ny=CUBE, nz=CUBE)]
    blocks = dims(nx_block=BLOCKS, ny_block=BLOCKS, nz_block=1)
    block = dims(sx_block=CUBE // BLOCKS, sy_block=CUBE // BLOCKS, sz_block=CUBE)
    in_blocks = [batch, *blocks, *block]
    waves = [
        mtf.import_tf_tensor(mesh, k.squeeze().astype("float32"), [d])
        for k, d in zip(
            flowpm.kernels.fftk([CUBE] * 3, symmetric=False),
            dims(tx_lr=CUBE, ty_lr=CUBE, tz_lr=CUBE),
        )
    ]
    waves = [waves[1], waves[2], waves[0]]
    field = mtf.import_tf_tensor(mesh, start, whole)
    state = mtfpm.lpt_init_single(field, steps[0], waves, HALO, whole, in_blocks, whole[1:])
    state = mtfpm.nbody_single(state, steps, whole, in_blocks, waves, HALO)
    density = mtf.zeros(mesh, in_blocks)
    for d in block:
        density = mtf.pad(density, [HALO, HALO], d.name)
    density = mesh_utils.cic_paint(density, state[0], HALO)
    for d, size in zip(blocks, density.shape[-3:]):
        density = mesh_ops.halo_reduce(density, d, size, HALO)
    for d in block:
        density = mtf.slice(density, HALO, d.size, d.name)
    return mtf.slicewise(
        lambda x: x[:, 0, 0, 0],
        [density],
        output_dtype=tf.float32,
        output_shape=whole,
        splittable_dims=whole[:-1] + in_blocks[:4],
    )


class FlowPMTest(unittest.TestCase):
    """The same particles on processors of one device, and on four."""

    def density(self, devices, **options):
        start = np.random.RandomState(0).normal(size=[1] + [CUBE] * 3).astype(np.float32) * 0.3
        with tf.Graph().as_default():
            graph = mtf.Graph()
            mesh = mtf.Mesh(graph, "mesh")
            density = final_density(mesh, start, np.linspace(0.1, 1.0, 3))
            impl = mtf.placement_mesh_impl.PlacementMeshImpl(
                "row:2,col:2", RULES, devices, **options
            )
            exported = mtf.Lowering(graph, {mesh: impl}).export_to_tf_tensor(density)
            config = tf.ConfigProto(device_count={"CPU": 4}, allow_soft_placement=True)
            with tf.Session(config=config) as session:
                return session.run(exported)

    def test_mass_is_kept(self):
        density = self.density(["cpu:0"] * 4)
        self.assertAlmostEqual(float(density.mean()), 1.0, places=5)
        self.assertGreater(float(density.std()), 0.01)

    def test_devices(self):
        one = self.density(["cpu:0"] * 4)
        several = self.density([f"cpu:{i}" for i in range(4)])
        np.testing.assert_allclose(several, one, rtol=1e-4, atol=1e-4)
