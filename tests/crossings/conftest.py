"""Crossings run on eight devices of JAX, as tests of mesh_tensorflow.pjrt do."""

import pytest


@pytest.fixture(scope="session", autouse=True)
def eight_devices_here(eight_devices):
    """Every test of this folder."""
