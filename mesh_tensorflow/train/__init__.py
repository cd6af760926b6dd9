"""A trainer: steps, evaluation, checkpoints, resume, logs and progress on every mesh."""

from mesh_tensorflow.train import metrics
from mesh_tensorflow.train._fit import fit
from mesh_tensorflow.train._inference import evaluate, export, predict
from mesh_tensorflow.train._loop import Result
from mesh_tensorflow.train._saving import NotANumberError
from mesh_tensorflow.train.callbacks import (
    Callback,
    CsvLog,
    EarlyStopping,
    JsonLinesLog,
    MLflow,
    Run,
    TensorBoard,
    WandB,
)

__all__ = [
    "Callback",
    "CsvLog",
    "EarlyStopping",
    "JsonLinesLog",
    "MLflow",
    "NotANumberError",
    "Result",
    "Run",
    "TensorBoard",
    "WandB",
    "evaluate",
    "export",
    "fit",
    "metrics",
    "predict",
]
