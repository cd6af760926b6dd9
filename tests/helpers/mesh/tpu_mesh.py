"""A mesh of eight replicas of a TPU, in an order of its own."""

import itertools

import numpy as np
import tensorflow.compat.v1 as tf

from mesh_tensorflow import Shape

MESH = Shape([("a", 2), ("b", 4)])
L2P = [0, 3, 5, 6, 1, 7, 2, 4]
P2L = [L2P.index(p) for p in range(8)]


def device_assignment(replicas):
    """Returns an assignment of cores of a TPU of 2 x 2 chips with two cores each."""
    cores = np.array(list(itertools.product(range(2), range(2), range(1), range(2))))
    topology = tf.tpu.experimental.Topology(mesh_shape=[2, 2, 1, 2], device_coordinates=cores[None])
    return tf.tpu.experimental.DeviceAssignment(topology, cores[:replicas, None])
