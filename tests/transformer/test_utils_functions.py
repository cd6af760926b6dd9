"""Functions of transformer.utils that build no model: against the classic, and errors."""

import dataclasses
import inspect
import json

import gin
import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from absl.testing import flagsaver
from helpers.oracle.utils_cases import CASES, Numbers
from helpers.paths import FIXTURES

import mesh_tensorflow as mtf
from mesh_tensorflow.transformer import utils
from mesh_tensorflow.transformer.utils._data import decode_ids
from mesh_tensorflow.transformer.utils._decode import write_resumably
from mesh_tensorflow.transformer.utils._run import _session_config
from mesh_tensorflow.transformer.utils._settings import Settings

FIXTURE = json.loads((FIXTURES / "utils.json").read_text())["functions"]


pytestmark = pytest.mark.usefixtures("parsed_flags")


@pytest.mark.parametrize("name", CASES)
def test_as_the_classic(name):
    with tf.Graph().as_default():
        assert json.loads(json.dumps(CASES[name](utils, mtf))) == FIXTURE[name]


LENGTHS = {"inputs": 8, "targets": 4}


def test_each_argument_is_a_setting():
    """Settings are made of arguments by name, so that one without a field would be lost."""
    fields = {field.name for field in dataclasses.fields(Settings)}
    arguments = set(inspect.signature(utils.tpu_estimator_model_fn).parameters)
    # This one has a warning alone.
    assert arguments - fields == {"weight_decay_checkpoint"}
    others = {"tpu_job_name", "iterations_per_loop", "cluster"}
    assert set(inspect.signature(utils.get_estimator).parameters) - arguments == others


@pytest.mark.parametrize(
    "mesh_impl, devices, count",
    [
        ("placement", ["/device:CPU:0", "cpu:1", "/job:localhost/task:0/device:CPU:3", ""], 4),
        ("placement", ["/device:GPU:0", "/device:GPU:1"], 0),
        ("placement", None, 0),
        ("simd", None, 4),
    ],
)
def test_there_are_as_many_logical_cpus_as_are_named(mesh_impl, devices, count):
    shape = mtf.convert_to_shape("rows:2,cols:2")
    rules = mtf.convert_to_layout_rules("batch:rows,d_ff:cols")
    config = _session_config(mesh_impl, shape, rules, devices)
    assert config.device_count["CPU"] == count


def test_one_number_serves_as_all_lengths():
    assert utils.compute_batch_size(16, "", "", ("tokens_per_batch", 64)) == 4
    assert utils.compute_batch_size(16, "", "", 5) == 5
    assert utils.auto_train_steps(4, 16, 640) == 10
    batch = mtf.Dimension("batch", 8)
    assert utils.serialize_num_microbatches(batch, 16, "", "", 32) == 4
    ids = utils.encode_inputs(["5 6"], Numbers(), "lm", 1, LENGTHS)
    assert ids.tolist() == [[5, 6, 0, 0, 0, 0, 0, 0]]
    pairs = utils.encode_delimited_lm(["5"], ["6"], Numbers(), 1, LENGTHS)
    assert pairs.shape == (1, 12)


def test_packed_inputs_and_targets_on_a_mesh():
    """The length of the sequences may be split."""
    features = {
        "inputs": [[5, 6, 1, 7, 1, 0]],
        "inputs_segmentation": [[1, 1, 1, 2, 2, 0]],
        "targets": [[8, 1, 9, 10, 1, 0]],
        "targets_segmentation": [[1, 1, 2, 2, 2, 0]],
    }
    with tf.Graph().as_default(), tf.Session() as session:
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        dims = [mtf.Dimension("batch", 1), mtf.Dimension("length", 6)]
        y = utils._dynamic_text2self(
            {k: mtf.import_tf_tensor(mesh, tf.constant(v), dims) for k, v in features.items()}
        )
        impl = mtf.placement_mesh_impl.PlacementMeshImpl("a:2", "length:a", ["", ""])
        lowering = mtf.Lowering(mesh.graph, {mesh: impl})
        found = session.run(lowering.export_to_tf_tensor(y["targets"])).tolist()
    assert found == [[5, 6, 1, 8, 1, 7, 1, 9, 10, 1, 0, 0]]


def test_steps_may_be_of_numpy(tmp_path):
    for step in (3, 5):
        (tmp_path / f"model.ckpt-{step}.index").write_text("")
    steps = np.array([3, 5])
    for given in (steps, list(steps), [4, 5, 3]):
        found = utils.get_checkpoint_iterator(given, str(tmp_path))
        assert [utils.get_step_from_checkpoint_path(path) for path in found] == [3, 5]
    [path] = utils.get_checkpoint_iterator(steps[0], str(tmp_path))
    assert path.endswith("model.ckpt-3")


@pytest.mark.parametrize(("call", "text"), [
    (lambda: utils.tpu_mesh_shape("v3-8", 3), "8 processors of 'v3-8' cannot be divided"),
    (lambda: utils.tpu_mesh_shape("v3-8", 8, 2), "cannot be divided by model_parallelism=8"),
    (lambda: utils.tpu_mesh_shape("v3-8", 0), "cannot be divided by model_parallelism=0"),
    (lambda: utils.tpu_mesh_shape("v3-8", -2), "cannot be divided by model_parallelism=-2"),
    (lambda: utils.tpu_mesh_shape("", 1), "tpu_topology='' names no TPU"),
    (lambda: utils.compute_batch_size(8, "", "", ("tokens", 8)), "method='tokens' is none of"),
    (lambda: utils.compute_batch_size(LENGTHS, "", "", ("tokens_per_batch", 9)),
     "9 is not divisible by 8"),
    (lambda: utils.serialize_num_microbatches(
        mtf.Dimension("batch", 6), 8, "a:4", "batch:a", 8), "batch=6 is not divisible by the 4"),
    (lambda: utils.get_step_from_checkpoint_path("model-3"), "Invalid checkpoint path model-3"),
    (lambda: utils.get_checkpoint_iterator("100", "/"), "should be a step, a list"),
    (lambda: utils.get_checkpoint_iterator(100, "/nowhere"), "No checkpoint files found"),
    (lambda: utils.get_checkpoint_iterator(-1, "/nowhere"), "No checkpoint files found"),
    (lambda: utils.encode_inputs([], Numbers(), "lm", 1, 8), "there are no lines to encode"),
    (lambda: utils.encode_inputs(["5", "x"], Numbers(), "lm", 1, 8),
     "line 2 cannot be encoded: 'x': invalid literal"),
    (lambda: utils.encode_inputs(["5", "6", "100"], Numbers(), "lm", 1, 8),
     "line 3 has the id 100, but the vocabulary is too small, with vocab_size 100"),
    (lambda: utils.encode_inputs(["5", "6"], Numbers(), "lm", 1, 8, unscored_prefix=["5"]),
     "there are 2 lines, but 1 of unscored_prefix"),
    (lambda: utils.encode_delimited_lm(["5", "6"], ["7"], Numbers(), 1, 8),
     "there are 2 inputs, but 1 targets"),
    (lambda: utils.save_scores([], Numbers()), "No examples were scored"),
    (lambda: utils.build_model("lstm", 10, 10), "model_type='lstm' is none of"),
    (lambda: utils.build_model("lm", 10, 2), "output vocabulary is too small, with vocab_size 2"),
])  # fmt: skip
def test_errors(call, text):
    with pytest.raises(ValueError, match=text.replace("(", r"\(")):
        call()


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"good\nb\xff\n", "line 2 is no UTF-8 text .* mend the line, or convert the file"),
        (
            b"a\n\nb",
            "line 2 is empty, but each line is .* Fill or remove it; or, .* bind "
            "utils.get_inputs_from_file.keep_empty_lines = True",
        ),
        (b"\na\n", "line 1 is empty"),
        (b"a\n \t\r\nb\n\n", "lines 2, 4 are empty, .* Fill or remove them"),
        (b"\n" * 12, "lines 1, 2, 3, 4, 5, 6, 7, 8, 9, 10... are empty"),
        (b"# a\n\nb\n", "line 2 is empty"),
    ],
)
def test_lines_that_are_no_inputs_are_named(tmp_path, data, text):
    path = tmp_path / "in.txt"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=f"{path}: {text}"):
        utils.get_inputs_from_file(str(path), ignore_comments=True)


def test_empty_lines_are_kept_if_gin_says_so(tmp_path):
    path = tmp_path / "in.txt"
    path.write_bytes(b"a\n\n \nb\n\n")
    gin.bind_parameter("utils.get_inputs_from_file.keep_empty_lines", True)
    assert utils.get_inputs_from_file(str(path)) == ["a", "", "", "b"]
    gin.clear_config()
    path.write_bytes(b"a\nb\n")
    assert utils.get_inputs_from_file(str(path)) == ["a", "b"]


def test_empty_and_long_lines_are_warned_of(caplog):
    tf.get_logger().propagate = True
    utils.encode_inputs(["5", "", "6 7 8"], Numbers(), "lm", 1, 2)
    tf.get_logger().propagate = False
    assert "1 lines are empty, number 2" in caplog.text
    assert "1 lines are cut to 2 ids, number 3" in caplog.text


def test_texts_of_bytes_are_texts(tmp_path):
    results = [{"targets": np.array([5, 1]), "targets_pretokenized": b"five", "scores": -1}]
    returned = utils.save_scores(results, Numbers(), str(tmp_path / "s"))
    assert returned == ([-1], ["five"])
    assert (tmp_path / "s.targets").read_text() == "five\n"
    utils.write_lines_to_file([b"a", "b"], str(tmp_path / "lines"))
    assert (tmp_path / "lines").read_text() == "a\nb\n"


def test_texts_with_line_breaks_have_one_line(tmp_path):
    """Or the lines of outputs would no longer be those of inputs."""
    texts, file = ["a\nb", "c\r\n d", "e"], tmp_path / "f"
    utils.write_lines_to_file(texts, str(file))
    assert file.read_text() == "a b\nc  d\ne\n"
    write_resumably(str(file), ["1", "2", "3"], 2, lambda start: iter(texts[start:]))
    assert file.read_text() == "a b\nc  d\ne\n"


class _Scores:
    """An estimator that has scored these targets."""

    def __init__(self, *targets):
        self.targets = targets

    def predict(self, input_fn, checkpoint_path):
        for i, ids in enumerate(self.targets):
            yield {"scores": -i, "targets": np.array(ids)}


@pytest.mark.parametrize("number, expected", [(4, [0, -1, -2, -3]), (None, [0, -1, -2])])
def test_examples_without_targets_are_scored(tmp_path, number, expected):
    """Without them, the scores after them would be those of other inputs."""
    (tmp_path / "model.ckpt-3.index").write_text("")
    estimator = _Scores([5, 1], [0, 0], [6, 1], [0, 0], [0, 0])
    found = []
    for score, size in (
        (utils.score_with_estimator, {}),
        (utils.score_with_estimator_lazy, {"num_examples_per_shard": 2}),
    ):
        score(
            estimator, None, 3, str(tmp_path), Numbers(), num_examples=number, **size,
            score_postprocess_fn=lambda some, _, shard_idx=0: found.extend(r["scores"] for r in some),
        )  # fmt: skip
    assert found == 2 * expected


@pytest.mark.parametrize("size, expected", [(2, [2, 2]), (3, [3, 1]), (0, [4])])
def test_examples_in_a_shard(tmp_path, size, expected):
    """Where 0 is all of them, as in the classic."""
    (tmp_path / "model.ckpt-3.index").write_text("")
    shards = {}
    utils.score_with_estimator_lazy(
        _Scores([5, 1], [6, 1], [7, 1], [8, 1]), None, 3, str(tmp_path), Numbers(),
        score_postprocess_fn=lambda some, _, shard_idx: shards.update({shard_idx: len(some)}),
        num_examples_per_shard=size,
    )  # fmt: skip
    assert shards == dict(enumerate(expected))


def _read(input_fn):
    """Returns the rows of an input function, without padding."""
    with tf.Graph().as_default(), tf.Session() as session:
        batch = tf.data.make_one_shot_iterator(input_fn({})).get_next()
        rows = session.run(batch)
    return {key: [[i for i in row if i] for row in x.tolist()] for key, x in rows.items()}


@pytest.mark.parametrize(("inputs", "targets", "paired"), [
    (["5", "6"], ["7", "8", "9", "10"], ([5, 5, 6, 6], [7, 8, 9, 10])),
    (["5", "6", "8"], ["7"], ([5, 6, 8], [7, 7, 7])),
    (["5", "6"], ["7", "8", "9"], "2 inputs, but 3 targets; give each input one target"),
    (["5", "6", "8"], ["7", "8"], "3 inputs, but 2 targets"),
    ([], ["7"], "0 inputs, but 0 targets|0 inputs, but 1 targets"),
])  # fmt: skip
def test_inputs_of_several_targets(tmp_path, inputs, targets, paired):
    """As a file of several outputs for each input has them, or one target that all share."""

    def score(estimator, read, step, model_dir, vocabulary, postprocess, count):
        return _read(read), count

    def scored(model_type):
        count = len(paired[0]) if isinstance(paired, tuple) else 1
        return utils.score_from_strings(
            None, Numbers(), model_type, count, {"inputs": 4, "targets": 4}, "", 3, inputs, targets,
            score_postprocess_fn=len, score_with_estimator_fn=score,
        )  # fmt: skip

    if isinstance(paired, str):
        with pytest.raises(ValueError, match=paired):
            scored("bitransformer")
        return
    before, after = paired
    rows, count = scored("bitransformer")
    assert count == len(before)
    assert rows == {"inputs": [[i, 1] for i in before], "targets": [[i, 1] for i in after]}
    assert scored("lm")[0] == {"targets": [[-i, j] for i, j in zip(before, after)]}


def test_the_given_function_scores(tmp_path):
    """Also if it is not told what to do with scores."""
    (tmp_path / "model.ckpt-3.index").write_text("")
    seen = []

    def score(estimator, input_fn, eval_checkpoint_step, model_dir, vocabulary, num_examples):
        seen.append((eval_checkpoint_step, num_examples))
        return "returned"

    returned = utils.score_from_strings(
        _Scores(), Numbers(), "lm", 2, 4, str(tmp_path), 3, [], ["5", "6"],
        score_with_estimator_fn=score,
    )  # fmt: skip
    assert (returned, seen) == ("returned", [(3, 2)])


@pytest.mark.parametrize("ids_only", [False, True])
def test_scores_as_records(tmp_path, ids_only):
    results = [
        {"inputs": np.array([5, 1, 0]), "targets": np.array([7, 1]), "scores": -1.5},
        {"inputs": "id7 a text", "targets": np.array([7, 1]), "scores": -2.0},
        # A language model has what it was given among its targets; nothing scored it.
        {"targets": np.array([-6, -8, 7, 1])},
        {"targets": np.array([7, 1]), "scores": 0.5},
    ]
    utils.save_scores_to_tfrecords(
        results, Numbers(), str(tmp_path / "s"), shard_idx=3, save_ids_only=ids_only
    )
    found = []
    for record in tf.io.tf_record_iterator(str(tmp_path / "s_3.tfrecord")):
        features = tf.train.Example.FromString(record).features.feature
        texts = [features[name].bytes_list.value[0] for name in ("input", "target")]
        found.append((*texts, *features["score"].float_list.value))
    inputs = [b"5", b"id7", b"6", b""] if ids_only else [b"5 1", b"id7 a text", b"6 8", b""]
    assert found == list(zip(inputs, [b"7 1"] * 4, [-1.5, -2.0, 0.0, 0.5]))


def test_dtypes_filters_and_mappings():
    dtype = utils.get_variable_dtype("float32", slice_dtype=tf.float32)
    assert (dtype.master_dtype, dtype.activation_dtype) == (tf.float32, tf.float32)
    assert utils.get_variable_dtype().master_dtype == tf.bfloat16
    with tf.Graph().as_default():
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        v = mtf.get_variable(mesh, "v", [mtf.Dimension("a", 10)]).operation
    assert utils.variable_filter_max_size(v) and not utils.variable_filter_max_size(v, 9)
    assert utils.should_load_variable("a") and not utils.should_load_variable("a", "b".__eq__)
    assert utils.init_checkpoint_variable_mapping("a") == "a"
    assert utils.init_checkpoint_variable_mapping("a", str.upper) == "A"
    assert utils.inputs_vocabulary((1, 2)) == 1 and utils.targets_vocabulary((1, 2)) == 2
    assert utils.separate_vocabularies(1, 2) == (1, 2) and utils.targets_vocabulary(5) == 5


@pytest.mark.parametrize(("binding", "text"), [
    ("utils.run.bath_size = 3", "doesn't have a parameter named 'bath_size'(.|\n)*batch_size"),
    ("utils.runn.mode = 'a'", "No configurable matching 'utils.runn'(.|\n)*utils.run"),
    ("utils.run.train_dataset_fn = @unknown_thing",
     "No configurable matching reference '@unknown_thing'(.|\n)*may have to be imported"),
])  # fmt: skip
def test_unknown_names_in_gin_parameters(binding, text):
    with flagsaver.flagsaver(gin_param=[binding]), pytest.raises(ValueError, match=text):
        utils.parse_gin_defaults_and_flags()


def test_gin_files_and_parameters(tmp_path):
    (tmp_path / "my.gin").write_text(
        "import gin.tf.external_configurables\nget_variable_dtype.slice_dtype = %tf.bfloat16\n"
        "init_checkpoint_variable_mapping.mapping_fn = @tf.identity\nd_model = 64\nunknown.x = 1\n"
    )
    flags = {
        "gin_file": ["my.gin"],
        "gin_location_prefix": [str(tmp_path)],
        "gin_param": ["d_model = 32"],
    }
    with flagsaver.flagsaver(**flags):
        utils.parse_gin_defaults_and_flags(skip_unknown=["unknown"], finalize_config=False)
        assert gin.query_parameter("%d_model") == 32
        assert utils.get_variable_dtype().slice_dtype == tf.bfloat16
        assert utils.get_variable_dtype().activation_dtype == tf.bfloat16
        assert not gin.config_is_locked()
        utils.parse_gin_defaults_and_flags(skip_unknown=True)
        assert gin.config_is_locked()


@pytest.mark.parametrize(
    ("row", "text"), [([5, 1, 0, 0], "5 1"), ([0, 5, 0, 6], "0 5 0 6"), ([0, 0], ""), ([], "")]
)
def test_vocabularies_get_rows_without_the_padding_at_their_end(row, text):
    assert decode_ids(Numbers(), np.array(row, np.int32)) == text
