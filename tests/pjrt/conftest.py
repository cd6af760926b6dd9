"""Tests of mesh_tensorflow.pjrt run on eight CPU devices of JAX."""

import pytest


@pytest.fixture(scope="session", autouse=True)
def eight_devices_here(eight_devices):
    """Every test of this folder."""
