"""TPUEstimator and its configuration, on CPUs and GPUs, for programs written for them."""

import sys as _sys

from mesh_tensorflow.estimator.tpu._config import InputPipelineConfig as InputPipelineConfig
from mesh_tensorflow.estimator.tpu._config import ReplicaContext as TPUContext  # noqa: F401
from mesh_tensorflow.estimator.tpu._config import RunConfig as RunConfig
from mesh_tensorflow.estimator.tpu._config import TPUConfig as TPUConfig
from mesh_tensorflow.estimator.tpu._estimator import TPUEstimator as TPUEstimator
from mesh_tensorflow.estimator.tpu._estimator import TPUEstimatorSpec as TPUEstimatorSpec

# Names that modules of tf.estimator, which this package replaces, had for one another.
_OTHER_NAMES = {
    **dict.fromkeys(
        ["estimator_lib", "model_fn_lib", "run_config_lib", "util_lib"],
        "mesh_tensorflow.estimator",
    ),
    **dict.fromkeys(["tpu_config", "tpu_context", "tpu_estimator"], __name__),
}


def __getattr__(name: str) -> object:
    if name in _OTHER_NAMES:
        return _sys.modules[_OTHER_NAMES[name]]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
