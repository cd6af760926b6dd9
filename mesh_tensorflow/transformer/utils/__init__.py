"""Training, evaluating, decoding, scoring and exporting transformers, configured by gin."""

from mesh_tensorflow._programs import FLAGS
from mesh_tensorflow._replaced import replaceable
from mesh_tensorflow.transformer.utils._data import (
    clean_decodes,
    encode_delimited_lm,
    encode_inputs,
    get_inputs_from_file,
    write_lines_to_file,
)
from mesh_tensorflow.transformer.utils._data import dynamic_text2self as _dynamic_text2self
from mesh_tensorflow.transformer.utils._decode import (
    decode,
    decode_from_dataset,
    decode_from_file,
    infer_model,
)
from mesh_tensorflow.transformer.utils._evaluation import (
    compute_log_likelihoods,
    eval_model,
    save_scores,
    save_scores_to_tfrecords,
    score_from_dataset,
    score_from_strings,
    score_with_estimator,
    score_with_estimator_lazy,
)
from mesh_tensorflow.transformer.utils._evaluation import (
    maybe_add_pretokenized_features as _maybe_add_pretokenized_features,
)
from mesh_tensorflow.transformer.utils._model_fn import (
    flexible_ckpt_init_mapping,
    init_checkpoint_variable_mapping,
    metric_max,
    metric_sum,
    should_load_variable,
    tpu_estimator_model_fn,
)
from mesh_tensorflow.transformer.utils._program import (
    build_model,
    get_variable_dtype,
    variable_filter_max_size,
)
from mesh_tensorflow.transformer.utils._run import export_model, get_estimator, run, train_model
from mesh_tensorflow.transformer.utils._settings import (
    auto_train_steps,
    compute_batch_size,
    get_checkpoint_iterator,
    get_step_from_checkpoint_path,
    inputs_vocabulary,
    parse_gin_defaults_and_flags,
    separate_vocabularies,
    serialize_num_microbatches,
    targets_vocabulary,
    tpu_mesh_shape,
)

__all__ = [
    "FLAGS",
    "_dynamic_text2self",
    "_maybe_add_pretokenized_features",
    "auto_train_steps",
    "build_model",
    "clean_decodes",
    "compute_batch_size",
    "compute_log_likelihoods",
    "decode",
    "decode_from_dataset",
    "decode_from_file",
    "encode_delimited_lm",
    "encode_inputs",
    "eval_model",
    "export_model",
    "flexible_ckpt_init_mapping",
    "get_checkpoint_iterator",
    "get_estimator",
    "get_inputs_from_file",
    "get_step_from_checkpoint_path",
    "get_variable_dtype",
    "infer_model",
    "init_checkpoint_variable_mapping",
    "inputs_vocabulary",
    "metric_max",
    "metric_sum",
    "parse_gin_defaults_and_flags",
    "run",
    "save_scores",
    "save_scores_to_tfrecords",
    "score_from_dataset",
    "score_from_strings",
    "score_with_estimator",
    "score_with_estimator_lazy",
    "separate_vocabularies",
    "serialize_num_microbatches",
    "should_load_variable",
    "targets_vocabulary",
    "tpu_estimator_model_fn",
    "tpu_mesh_shape",
    "train_model",
    "variable_filter_max_size",
    "write_lines_to_file",
]

replaceable(__name__)
