"""What tests share: fixtures, and how hypothesis runs."""

import warnings

import gin
import hypothesis
import pytest
import tensorflow as tf2
import tensorflow.compat.v1 as tf
from tensorflow.python.client.session import BaseSession

from mesh_tensorflow._core import errors

hypothesis.settings.register_profile(
    "suite",
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(hypothesis.HealthCheck),
)
hypothesis.settings.load_profile("suite")

# Where warnings of slips are errors, unless a test is marked as having some.
WITHOUT_SLIPS = {"core", "errors", "ops", "optimize", "test_cases.py"}


@pytest.fixture(autouse=True)
def slips(request):
    """Makes slips errors where there are to be none; forgets those of other tests."""
    errors._told.clear()
    strict = not WITHOUT_SLIPS.isdisjoint(request.node.path.parts)
    allowed = request.node.get_closest_marker("slips") is not None
    with warnings.catch_warnings():
        # Ignored where a test says why there are some: the summary is for those that nobody expects.
        kind = "ignore" if allowed else "error" if strict else "default"
        warnings.simplefilter(kind, errors.MeshTensorFlowWarning)
        yield


def _process_state():
    return {
        "eager": tf.executing_eagerly(),
        "control flow of TensorFlow 2": tf.control_flow_v2_enabled(),
        "resource variables": tf.resource_variables_enabled(),
        "strict": errors.is_strict(),
    }


@pytest.fixture(autouse=True)
def leaves_the_process_as_it_was():
    """Fails the test that changes TensorFlow's behavior for those after it."""
    before = _process_state()
    yield
    assert _process_state() == before


@pytest.fixture(autouse=True)
def own_bindings():
    """What a test binds by gin, and that it locks these, ends with it."""
    yield
    gin.clear_config()


@pytest.fixture(autouse=True)
def same_random_values():
    """Eager programs without a seed of their own draw the same values in every run."""
    tf2.random.set_seed(1)


@pytest.fixture
def parsed_flags():
    """Flags can be read, as after the start of a program."""
    tf.flags.FLAGS(["test"])


@pytest.fixture
def tf_graph():
    """A fresh default tf graph, in which programs are built as with TensorFlow 1."""
    with tf.Graph().as_default() as graph:
        yield graph


@pytest.fixture
def no_graph_rewriting(monkeypatch):
    """TensorFlow does not spend time on rewriting graphs that run once, or a few times."""
    before = tf2.config.optimizer.get_experimental_options()
    tf2.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    begin = BaseSession.__init__

    def begin_as_built(session, target="", graph=None, config=None):
        own = tf.ConfigProto()
        own.CopyFrom(config or own)  # the caller's stays as it is
        own.graph_options.rewrite_options.disable_meta_optimizer = True
        begin(session, target, graph, own)

    monkeypatch.setattr(BaseSession, "__init__", begin_as_built)
    yield
    kept = {"disable_meta_optimizer": False, **before}
    tf2.config.optimizer.set_experimental_options(kept)


# Tests of programs that are rewritten for about as long as they run. All others, the slow ones of
# these, and a run with --all have the graphs that programs of users have.
RUN_AS_BUILT = {"pretrained", "train"}


@pytest.fixture(autouse=True)
def graphs_as_built(request):
    """Leaves out what TensorFlow rewrites, in short runs of the tests of RUN_AS_BUILT."""
    marks = [request.node.get_closest_marker(name) for name in ("slow", "every")]
    if request.config.getoption("--all") or any(marks):
        return
    if not RUN_AS_BUILT.isdisjoint(request.node.path.parts):
        request.getfixturevalue("no_graph_rewriting")


@pytest.fixture(scope="session")
def eight_devices():
    """JAX has eight CPUs as its devices, however many the first program that uses them needs."""
    jax = pytest.importorskip("jax", "0.8", reason="mesh_tensorflow.pjrt needs jax>=0.8")
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    assert len(jax.devices()) == 8, "something in this process has used JAX before"


@pytest.fixture
def eight_devices_for_pjrt(request):
    """`eight_devices` in those rows of a table whose names say that they run there."""
    if "pjrt" in request.node.name:
        request.getfixturevalue("eight_devices")
