"""Training, evaluation, prediction and export around a model function.

It replaces `tf.estimator`, which TensorFlow has removed.
"""

import sys as _sys

import tensorflow.compat.v1 as _tf

from mesh_tensorflow._processes.peers import PeerLostError as PeerLostError
from mesh_tensorflow.checkpoint import (
    load_global_step as _load_global_step_from_checkpoint_dir,  # noqa: F401  (programs call it)
)
from mesh_tensorflow.estimator import experimental as experimental
from mesh_tensorflow.estimator import export as export
from mesh_tensorflow.estimator import inputs as inputs
from mesh_tensorflow.estimator import tpu as tpu
from mesh_tensorflow.estimator._estimator import Estimator as Estimator
from mesh_tensorflow.estimator._estimator import EvalSpec as EvalSpec
from mesh_tensorflow.estimator._estimator import TrainSpec as TrainSpec
from mesh_tensorflow.estimator._estimator import step_of_training as step_of_training
from mesh_tensorflow.estimator._estimator import steps_to_look_at as steps_to_look_at
from mesh_tensorflow.estimator._estimator import train_and_evaluate as train_and_evaluate
from mesh_tensorflow.estimator._hooks import NanLossError as NanLossError
from mesh_tensorflow.estimator._hooks import ProfileHook as ProfileHook
from mesh_tensorflow.estimator._install import install as install
from mesh_tensorflow.estimator._install import uninstall as uninstall
from mesh_tensorflow.estimator._model import WarmStartSettings as WarmStartSettings
from mesh_tensorflow.estimator._run_config import RunConfig as RunConfig
from mesh_tensorflow.estimator._spec import EstimatorSpec as EstimatorSpec
from mesh_tensorflow.estimator._spec import ModeKeys as ModeKeys
from mesh_tensorflow.estimator.export import BestExporter as BestExporter
from mesh_tensorflow.estimator.export import Exporter as Exporter
from mesh_tensorflow.estimator.export import FinalExporter as FinalExporter
from mesh_tensorflow.estimator.export import LatestExporter as LatestExporter
from mesh_tensorflow.estimator.processes import run_cluster as run_cluster

# tf.estimator exported these as well.
CheckpointSaverHook = _tf.train.CheckpointSaverHook
CheckpointSaverListener = _tf.train.CheckpointSaverListener
FeedFnHook = _tf.train.FeedFnHook
FinalOpsHook = _tf.train.FinalOpsHook
GlobalStepWaiterHook = _tf.train.GlobalStepWaiterHook
LoggingTensorHook = _tf.train.LoggingTensorHook
NanLossDuringTrainingError = _tf.train.NanLossDuringTrainingError
NanTensorHook = _tf.train.NanTensorHook
ProfilerHook = _tf.train.ProfilerHook
SecondOrStepTimer = _tf.train.SecondOrStepTimer
SessionRunArgs = _tf.train.SessionRunArgs
SessionRunContext = _tf.train.SessionRunContext
SessionRunHook = _tf.train.SessionRunHook
SessionRunValues = _tf.train.SessionRunValues
StepCounterHook = _tf.train.StepCounterHook
StopAtStepHook = _tf.train.StopAtStepHook
SummarySaverHook = _tf.train.SummarySaverHook
VocabInfo = _tf.train.VocabInfo

# Prefixes of names of tf.estimator that this package does not have: canned models and others.
_NOT_HERE = (
    "Baseline",
    "BoostedTrees",
    "DNN",
    "Linear",
    "BinaryClassHead",
    "Head",
    "LogisticRegression",
    "MultiClassHead",
    "MultiHead",
    "MultiLabelHead",
    "PoissonRegression",
    "RegressionHead",
    "add_metrics",
    "classifier_parse_example_spec",
    "regressor_parse_example_spec",
)


# Names that modules of tf.estimator, which this package replaces, had for one another.
_OTHER_NAMES = ("estimator_lib", "model_fn_lib", "run_config_lib", "util_lib")


def __getattr__(name: str) -> object:
    if name in _OTHER_NAMES:
        return _sys.modules[__name__]
    if name.startswith(_NOT_HERE):
        raise AttributeError(
            f"mesh_tensorflow.estimator has no {name}: of tf.estimator it has what runs a model "
            "function, and no ready-made models. Write a model_fn for estimator.Estimator"
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
