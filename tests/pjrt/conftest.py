"""Tests of mesh_tensorflow.pjrt run on eight CPU devices of JAX."""

import pytest

jax = pytest.importorskip("jax", reason="mesh_tensorflow.pjrt needs jax")


@pytest.fixture(scope="session", autouse=True)
def eight_devices():
    """Other tests use JAX in processes of their own, so that no device is made before."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    assert len(jax.devices()) == 8
