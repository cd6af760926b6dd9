"""The gin files: each parses in full, and what programs start from."""

import importlib.resources
import sys
import warnings

import gin
import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from absl.testing import flagsaver

import mesh_tensorflow as mtf
from mesh_tensorflow.transformer import main, transformer, utils

FOLDER = importlib.resources.files("mesh_tensorflow.transformer.gin")


def gin_files(folder, prefix=""):
    for entry in folder.iterdir():
        if entry.is_dir():
            yield from gin_files(entry, f"{prefix}{entry.name}/")
        elif entry.name.endswith(".gin"):
            yield prefix + entry.name


FILES = sorted(gin_files(FOLDER))


def parse(*names):
    gin.parse_config_files_and_bindings([str(FOLDER / name) for name in names], [])


def test_files_are_there():
    folders = [name.rpartition("/")[0] for name in FILES]
    assert {f: folders.count(f) for f in folders} == {
        "": 3,
        "layouts": 11,
        "learning_rate_schedules": 2,
        "models": 14,
        "problems": 5,
    }


@pytest.mark.parametrize("name", FILES)
def test_files_parse_after_the_defaults(name):
    """No binding is unknown, ambiguous, or of an argument that there is not."""
    parse("defaults.gin", name)
    for call in ("run", "SelfAttention", "DenseReluDense", "Unitransformer", "make_layer_stack"):
        assert gin.get_bindings(call, resolve_references=False)


def test_defaults_alone():
    parse("defaults.gin")
    attention = gin.get_bindings("SelfAttention")
    assert attention == {"num_heads": 8, "key_value_size": 128, "dropout_rate": 0.1}
    assert gin.get_bindings("mesh_tensorflow.transformer.transformer.Unitransformer") == {
        "d_model": 1024,
        "shared_embedding_and_softmax_weights": True,
        "max_length": 512,
    }
    assert gin.get_bindings("LayerStack").keys() == {
        "dropout_rate",
        "norm_epsilon",
        "sublayers_initial",
        "sublayers_per_layer",
        "sublayers_final",
    }
    run = gin.get_bindings("run", resolve_references=False)
    assert run["sequence_length"] == {"inputs": 512, "targets": 512}
    assert run["layout_rules"].startswith("ensemble:ensemble,batch:batch,d_ff:model,heads:model")
    assert str(run["mesh_shape"]) == "@mesh_tensorflow.transformer.utils.tpu_mesh_shape()"


def test_later_files_change_sizes_everywhere():
    parse("defaults.gin", "models/bi_moe.gin", "models/tiny.gin", "layouts/single.gin")
    assert gin.get_bindings("SelfAttention")["num_heads"] == 4
    assert gin.get_bindings("DenseReluDense")["hidden_size"] == 512
    assert gin.get_bindings("make_layer_stack")["num_layers"] == 2
    assert gin.get_bindings("MoE1D") == {"num_experts": 8, "hidden_size": 512}
    run = gin.get_bindings("run", resolve_references=False)
    assert (run["mesh_shape"], run["layout_rules"], run["model_type"]) == ("", "", "bitransformer")


def test_data_sets_and_their_vocabularies():
    parse("defaults.gin", "problems/lm1b.gin")
    name = "lm1b/subwords32k"
    assert gin.get_bindings("pretokenized_tfds_dataset") == {
        "dataset_name": name,
        "text2self": True,
    }
    assert gin.get_bindings("get_tfds_vocabulary") == {"dataset_name": name}
    assert gin.get_bindings("run", resolve_references=False)["model_type"] == "lm"


@gin.configurable
def vocabulary_of(vocabulary=None):
    return vocabulary


def test_vocabularies_of_this_package_in_gin():
    gin.parse_config("vocabulary_of.vocabulary = @ByteVocabulary()\nByteVocabulary.extra_ids = 100")
    assert vocabulary_of().vocab_size == 359


def loss_of(model_type):
    """Returns the loss of the model that gin describes, untrained, on a few sequences."""
    ids = np.random.default_rng(0).integers(2, 100, [4, 8])
    ids[:, -1] = 1
    with tf.Graph().as_default(), tf.Session() as sess:
        graph = mtf.Graph()
        mesh = mtf.Mesh(graph, "mesh")
        shape = mtf.Shape([mtf.Dimension("batch", 4), mtf.Dimension("length", 8)])
        targets = mtf.import_tf_tensor(mesh, tf.constant(ids, tf.int32), shape)
        model = utils.build_model(
            model_type,
            input_vocab_size=128,
            output_vocab_size=128,
            layout_rules=mtf.LayoutRules([]),
            mesh_shape=mtf.Shape([]),
        )
        inputs = targets
        if model_type == "lm":
            inputs = transformer.autoregressive_inputs(targets)
        _, loss = model.call_simple(
            inputs, targets, compute_loss=True, variable_dtype=mtf.VariableDType(tf.float32)
        )
        lowering = mtf.Lowering(
            graph, {mesh: mtf.placement_mesh_impl.PlacementMeshImpl([], [], [""])}
        )
        found = lowering.export_to_tf_tensor(loss)
        sess.run(tf.global_variables_initializer())
        sess.run(lowering.copy_masters_to_slices())
        return sess.run(found), {v.op.name for v in tf.global_variables()}


MODELS = {
    "models/bi_base.gin": ("bitransformer", "decoder/block_001/layer_001/EncDecAttention/q"),
    "models/bi_moe.gin": ("bitransformer", "encoder/block_001/layer_001/MoE1D/wi/kernel"),
    "models/lm_base.gin": ("lm", "transformer/block_001/layer_001/DenseReluDense/wo/kernel"),
    "models/lm_moe.gin": ("lm", "transformer/block_001/layer_003/DenseReluDense/wo/kernel"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_models_of_the_files_compute(name):
    parse("defaults.gin", name, "models/tiny.gin", "layouts/single.gin")
    model_type, variable = MODELS[name]
    loss, variables = loss_of(model_type)
    # Little worse than if all 128 ids were equally likely.
    assert np.log(128) - 0.5 < loss < np.log(128) + 2
    assert variable in variables


@pytest.mark.parametrize("included", [False, True])
def test_a_file_in_another_encoding_is_named_with_its_line(tmp_path, included, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["main"])
    path = tmp_path / "models.gin"
    path.write_bytes("# A first line.\n# caf\u00e9\n".encode("latin1"))
    start = tmp_path / "start.gin"
    start.write_text(f"include '{path}'\n")
    with flagsaver.flagsaver(
        gin_file=[str(start if included else path)], gin_param=[], gin_location_prefix=[]
    ):
        with pytest.raises(ValueError, match=rf"line 2 of {path} is not in UTF-8 .* at byte 5"):
            utils.parse_gin_defaults_and_flags()
        path.write_text("# caf\u00e9\nutils.run.train_steps = 7\n", encoding="utf-8")
        utils.parse_gin_defaults_and_flags(finalize_config=False)
    assert gin.query_parameter("utils.run.train_steps") == 7


def test_the_default_directory_is_warned_of(tmp_path, monkeypatch):
    called = []
    monkeypatch.setattr(sys, "argv", ["main"])
    monkeypatch.setattr(main, "_write_command", called.append)
    monkeypatch.setattr(utils, "parse_gin_defaults_and_flags", lambda: None)
    monkeypatch.setattr(utils, "run", lambda **kwargs: None)
    with pytest.warns(
        mtf.MeshTensorFlowWarning,
        match=r"a name that all users of this machine "
        r"know.*Pass --model_dir=DIR",
    ):
        main.main([])
    with flagsaver.flagsaver(model_dir=str(tmp_path)), warnings.catch_warnings():
        warnings.simplefilter("error")
        main.main([])
    assert called == ["/tmp/transformer_standalone", str(tmp_path)]
