"""Settings that all tests share."""

import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import hypothesis
import pytest
import tensorflow.compat.v1 as tf

hypothesis.settings.register_profile(
    "suite",
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(hypothesis.HealthCheck),
)
hypothesis.settings.load_profile("suite")


@pytest.fixture
def tf_graph():
    """A fresh default tf graph, in which programs are built as with TensorFlow 1."""
    with tf.Graph().as_default() as graph:
        yield graph
