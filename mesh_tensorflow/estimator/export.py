"""Inputs and outputs of exported models."""

from mesh_tensorflow.estimator._serving.export import (
    ServingInputReceiver as ServingInputReceiver,
)
from mesh_tensorflow.estimator._serving.export import (
    TensorServingInputReceiver as TensorServingInputReceiver,
)
from mesh_tensorflow.estimator._serving.export import (
    build_parsing_serving_input_receiver_fn as build_parsing_serving_input_receiver_fn,
)
from mesh_tensorflow.estimator._serving.export import (
    build_raw_serving_input_receiver_fn as build_raw_serving_input_receiver_fn,
)
from mesh_tensorflow.estimator._serving.export_outputs import (
    ClassificationOutput as ClassificationOutput,
)
from mesh_tensorflow.estimator._serving.export_outputs import EvalOutput as EvalOutput
from mesh_tensorflow.estimator._serving.export_outputs import ExportOutput as ExportOutput
from mesh_tensorflow.estimator._serving.export_outputs import PredictOutput as PredictOutput
from mesh_tensorflow.estimator._serving.export_outputs import RegressionOutput as RegressionOutput
