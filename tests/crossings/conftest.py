"""Devices of JAX are eight CPUs, as for tests of mesh_tensorflow.pjrt."""

import pytest

jax = pytest.importorskip("jax", reason="mesh_tensorflow.pjrt needs jax")


@pytest.fixture(scope="session", autouse=True)
def eight_devices():
    """Other tests use JAX in processes of their own, so that no device is made before."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    assert len(jax.devices()) == 8
