"""Whole runs of transformer.utils, written once for both packages: models of seeded weights."""

import os
import zlib

import gin
import numpy as np
import tensorflow.compat.v1 as tf

from helpers.oracle.utils_cases import Numbers

STEP = 7
INPUTS = ["5 6 7", "8 9", "10 11 12 13", "4", "5"]
TARGETS = ["3 2", "8 9 4", "10 11", "4", "5 6"]
CONFIG = """
import mesh_tensorflow.optimize
run.mesh_shape = ""
run.layout_rules = "batch:rows,d_ff:cols,heads:cols,vocab:cols"
run.vocabulary = @utils_runs.numbers()
run.train_dataset_fn = @utils_runs.training_data
run.eval_dataset_fn = @utils_runs.evaluation_data
score_from_dataset.score_dataset_fn = @utils_runs.evaluation_data
run.batch_size = ("sequences_per_batch", 4)
run.sequence_length = {"inputs": 8, "targets": 8}
run.train_steps = 1
run.perplexity_eval_steps = 2
run.eval_checkpoint_step = -1
run.learning_rate_schedule = @learning_rate_schedules.constant_learning_rate
constant_learning_rate.learning_rate = 0.01
run.optimizer = @optimize.AdafactorOptimizer
make_layer_stack.layers = [
    @transformer_layers.SelfAttention, @transformer_layers.DenseReluDense]
decoder/make_layer_stack.layers = [
    @transformer_layers.SelfAttention, @transformer_layers.EncDecAttention,
    @transformer_layers.DenseReluDense]
make_layer_stack.num_layers = 1
Unitransformer.d_model = 16
Unitransformer.max_length = 32
DenseReluDense.hidden_size = 32
SelfAttention.num_heads = 2
SelfAttention.key_value_size = 8
LayerStack.sublayers_initial = []
LayerStack.sublayers_per_layer = [
    @transformer.sublayer_rms_norm, @transformer.sublayer_call_layer,
    @transformer.sublayer_residual]
LayerStack.sublayers_final = [@transformer.sublayer_rms_norm]
get_variable_dtype.master_dtype = "float32"
get_variable_dtype.activation_dtype = "float32"
score_from_strings.inputs = {inputs}
score_from_strings.targets = {targets}
score_from_strings.score_postprocess_fn = @utils_runs.only_scores
score_from_dataset.score_postprocess_fn = @utils_runs.only_scores
""".replace("{inputs}", str(INPUTS)).replace("{targets}", str(TARGETS))  # fmt: skip
# By model type: whether examples have inputs, and what gin binds further.
MODELS = {
    "lm": (False, ""),
    "delimited_lm": (True, ""),
    "aligned": (True, ""),
    "bitransformer": (True, ""),
}
MICROBATCHES = "serialize_num_microbatches.tokens_per_microbatch_per_replica = 16\n"
SCORES = []


def _examples(keys, rows, seed):
    random = np.random.RandomState(seed)
    examples = {key: random.randint(2, 20, [rows, 8]).astype(np.int32) for key in keys}
    for key, x in examples.items():
        x[:, -1 - (key == "targets")] = 1
        x[:, 8 - (key == "targets") :] = 0
    return examples


def _packed(examples):
    """Returns examples as two in each row: of 3 tokens, and of the rest."""
    segments = np.array([1, 1, 1, 2, 2, 2, 2, 2], np.int32)
    positions = np.array([0, 1, 2, 0, 1, 2, 3, 4], np.int32)
    packed = dict(examples)
    for key, x in examples.items():
        packed[f"{key}_segmentation"] = segments * (x != 0)
        packed[f"{key}_position"] = positions * (x != 0)
    return packed


# What the data are made of: features, and whether rows are packed.
STATE = {"keys": ("inputs", "targets"), "packed": False}


def register(package_dataset):
    """Registers data and functions with gin, once in a process."""
    if STATE.pop("registered", False):
        STATE["registered"] = True
        return
    STATE["registered"] = True

    @gin.configurable(module="utils_runs")
    def numbers():
        return Numbers()

    @gin.configurable(module="utils_runs")
    def training_data(sequence_length, vocabulary, dataset_split):
        del sequence_length, vocabulary, dataset_split
        examples = _examples(STATE["keys"], 8, 0)
        examples = _packed(examples) if STATE["packed"] else examples
        return tf.data.Dataset.from_tensor_slices(examples).repeat()

    @gin.configurable(module="utils_runs")
    def evaluation_data(sequence_length, vocabulary, dataset_split):
        del sequence_length, vocabulary, dataset_split

        def dataset_fn(sequence_length=None):
            del sequence_length
            return tf.data.Dataset.from_tensor_slices(_examples(STATE["keys"], 5, 1))

        def postprocess_fn(text, example=None, is_target=False):
            return text

        def exact(targets, predictions):
            STATE["metric"] = (list(targets), list(predictions))
            return {"same": float(np.mean([a == b for a, b in zip(targets, predictions)]))}

        return [package_dataset.EvalDataset("task", dataset_fn, postprocess_fn, [exact])]

    @gin.configurable(module="utils_runs")
    def only_scores(results, vocabulary):
        del vocabulary
        SCORES[:] = [float(r["scores"]) for r in results]
        return list(SCORES)


def call(run, directory, model_type, mode, further="", packed=False):
    """Runs one mode."""
    STATE["packed"] = packed
    has_inputs, own = MODELS[model_type]
    STATE["keys"] = ("inputs", "targets") if has_inputs else ("targets",)
    gin.clear_config()
    split = "train" if mode == "train" else "validation"
    gin.parse_config(
        f'{CONFIG}run.model_type = "{model_type}"\nrun.mode = "{mode}"\n'
        f'run.dataset_split = "{split}"\n{own}{further}'
    )
    return run(tpu_job_name=None, tpu=None, gcp_project=None, tpu_zone=None, model_dir=directory)


def write_checkpoint(directory, shapes):
    """Writes a checkpoint of values that follow from names."""
    with tf.Graph().as_default(), tf.Session() as session:
        for name, shape in shapes.items():
            if name == "global_step":
                tf.get_variable(name, initializer=np.int64(STEP))
                continue
            random = np.random.RandomState(zlib.crc32(name.encode()))
            value = random.randn(*shape).astype(np.float32) * (0.3 if len(shape) > 1 else 0.1)
            value += np.float32(len(shape) == 1)
            tf.get_variable(name, initializer=abs(value) if "_slot_" in name else value)
        session.run(tf.global_variables_initializer())
        return tf.train.Saver().save(
            session, os.path.join(directory, "model.ckpt"), global_step=STEP
        )


def summaries(directory):
    """Returns the last value of each scalar summary in a directory."""
    found = {}
    for name in sorted(os.listdir(directory)):
        if name.startswith("events"):
            for event in tf.train.summary_iterator(os.path.join(directory, name)):
                for value in event.summary.value:
                    if value.HasField("simple_value"):
                        found[value.tag] = value.simple_value
    return found


def decoded_file(directory, run, model_type, further=""):
    """Returns the lines that a file of inputs is decoded into."""
    source, target = os.path.join(directory, "in.txt"), os.path.join(directory, "out")
    with open(source, "w") as f:
        f.write("\n".join(INPUTS) + "\n")
    call(
        run,
        directory,
        model_type,
        "infer",
        (
            f'decode_from_file.input_filename = "{source}"\n'
            f'decode_from_file.output_filename = "{target}"\n{further}'
        ),
    )
    with open(f"{target}-{STEP}") as f:
        return f.read().splitlines()
