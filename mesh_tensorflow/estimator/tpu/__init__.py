"""The forms of TPUEstimator, for programs written with them, on CPUs and GPUs."""

from mesh_tensorflow.estimator.tpu._config import InputPipelineConfig as InputPipelineConfig
from mesh_tensorflow.estimator.tpu._config import RunConfig as RunConfig
from mesh_tensorflow.estimator.tpu._config import TPUConfig as TPUConfig
from mesh_tensorflow.estimator.tpu._estimator import TPUEstimator as TPUEstimator
from mesh_tensorflow.estimator.tpu._spec import TPUEstimatorSpec as TPUEstimatorSpec
