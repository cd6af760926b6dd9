"""Flags are as they were after each test."""

import pytest
from absl import flags
from absl.testing import flagsaver
from helpers.experimental import generated_scans


@pytest.fixture(autouse=True)
def small_scans():
    """Flags for small scans, for the time of a test."""
    if not flags.FLAGS.is_parsed():
        flags.FLAGS(["test"])
    with flagsaver.flagsaver():
        generated_scans.set_flags()
        yield
