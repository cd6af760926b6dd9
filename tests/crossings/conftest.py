"""Rows on devices of JAX have eight of them, as tests of mesh_tensorflow.pjrt do."""

import pytest


@pytest.fixture(autouse=True)
def eight_devices_here(eight_devices_for_pjrt):
    """Every test of this folder."""
