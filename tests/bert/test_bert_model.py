"""BertModel, its configuration and its optimizer: beside what the classic release gives."""

import importlib.resources
import json

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.bert import bert, optimization

SMALL = {
    "vocab_size": 20,
    "d_model": 8,
    "num_blocks": 1,
    "attention_num_heads": 2,
    "type_vocab_size": 2,
    "feedforward_intermediate_size": 8,
    "max_position_embeddings": 8,
    "moe_num_experts": 4,
    "moe_intermediate_size": 8,
    "layer_output_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}


def build(is_training=False, length=6, mesh_shape="", layout="", mask=None, **options):
    """Returns a model and its mesh; ids count up."""
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")
    shape = mtf.Shape([mtf.Dimension("batch", 4), mtf.Dimension("seq", length)])
    ids = tf.reshape(tf.range(4 * length), [4, length]) % 20
    config = bert.BertConfig(**{**SMALL, **options})
    x = mtf.import_tf_tensor(mesh, ids, shape)
    if mask is not None:
        mask = mtf.import_tf_tensor(mesh, tf.constant(mask, tf.int32), shape)
    model = bert.BertModel(config, is_training, x, mask, mesh_shape=mesh_shape, layout=layout)
    return model, mesh


def evaluated(tensors, mesh, mesh_shape="", layout="", runs=1):
    size = mtf.Shape(mtf.convert_to_shape(mesh_shape).dims).size
    impl = mtf.placement_mesh_impl.PlacementMeshImpl(mesh_shape, layout, [""] * size)
    lowering = mtf.Lowering(mesh.graph, {mesh: impl})
    fetches = [lowering.export_to_tf_tensor(x) for x in tensors]
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        session.run(lowering.copy_masters_to_slices())
        return [session.run(fetches) for _ in range(runs)]


@pytest.fixture(autouse=True)
def graph():
    with tf.Graph().as_default():
        tf.set_random_seed(1)
        yield


@pytest.mark.slow_but(1)
@pytest.mark.parametrize(
    "option",
    [
        "layer_output_dropout_prob",
        "attention_probs_dropout_prob",
        "feedforward_intermediate_dropout_prob",
    ],
)
def test_dropout_is_applied_in_training_alone(option):
    model, mesh = build(True, **{option: 0.5})
    first, second = evaluated([model.sequence_output], mesh, runs=2)
    assert np.abs(first[0] - second[0]).max() > 1e-3
    assert getattr(model.config, option) == 0.5
    with tf.Graph().as_default():
        model, mesh = build(False, **{option: 0.5})
        first, second = evaluated([model.sequence_output], mesh, runs=2)
        np.testing.assert_array_equal(first[0], second[0])
        assert getattr(model.config, option) == 0.0


@pytest.mark.slow
def test_mixture_of_experts():
    layout = "batch:x,experts:x,expert_hidden:y"
    found = []
    for mesh_shape in ("", "x:2,y:2"):
        with tf.Graph().as_default():
            tf.set_random_seed(1)
            model, mesh = build(
                block_layers="attention,moe",
                mesh_shape=mesh_shape,
                layout=layout,
                mask=[[1] * 5 + [0]] * 4,
            )
            loss = model.get_extra_loss()
            assert loss.shape.dims == []
            found += evaluated([model.sequence_output, loss], mesh, mesh_shape, layout)
            names = [v.op.name for v in tf.global_variables() if "/moe/" in v.op.name]
            assert "bert/encoder/block_0/moe/top_2_gating/kernel" in names
    assert found[0][1] > 0
    # Tokens are dispatched in other groups.
    np.testing.assert_allclose(found[0][1], found[1][1], rtol=1e-2)


def test_without_mixture_there_is_no_extra_loss():
    assert build()[0].get_extra_loss() == 0


def test_padding_is_not_seen():
    first, mesh = build(mask=[[1] * 4 + [0] * 2] * 4)
    ((values,),) = evaluated([first.sequence_output], mesh)
    with tf.Graph().as_default():
        tf.set_random_seed(1)
        short, mesh = build(length=4, mask=[[1] * 4] * 4)
        ((others,),) = evaluated([short.sequence_output], mesh)
    # The first sequence of both has the ids 0 to 3.
    np.testing.assert_allclose(values[0, :4], others[0], atol=1e-5)


# -- errors


@pytest.mark.parametrize(
    "options, message",
    [
        ({"position_signal": "sinusoid"}, "unknown position_signal 'sinusoid'.*'embedding'"),
        ({"residual_structure": "x"}, "unknown residual_structure 'x'.*'original', 'direct'"),
        ({"block_layers": "attention,conv"}, "unknown layer type 'conv'.*'attention'"),
        ({"feedforward_intermediate_act": "swish"}, "Unsupported activation: 'swish'.*'gelu'"),
        ({"length": 9}, "sequence length 9: max_position_embeddings is 8"),
        ({"attention_num_heads": 3}, r"hidden size \(8\) is not a multiple of the number.*\(3\)"),
    ],
)
def test_errors_of_models(options, message):
    with pytest.raises(ValueError, match=message):
        build(**options)
    assert not tf.global_variables()


def test_dimensions_that_are_not_defined():
    model, _ = build()
    for name in ("key_dim", "key_heads_dims", "value_dim", "value_heads_dims"):
        with pytest.raises(
            ValueError, match=r"is not defined: the configuration has no attention_"
        ):
            getattr(model, name)


def test_layer_norm_of_an_absent_dimension():
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    x = mtf.zeros(mesh, mtf.Shape([mtf.Dimension("a", 2)]))
    with pytest.raises(ValueError, match="has no dimension b=2"):
        bert.layer_norm(x, mtf.Dimension("b", 2))


# -- configurations


def test_published_configurations():
    """All are read, and describe models of the sizes that they are named after."""
    files = importlib.resources.files("mesh_tensorflow.bert") / "config"
    configs = {f.name: bert.BertConfig.from_json_file(str(f)) for f in files.iterdir()}
    assert len(configs) == 14
    assert {c.vocab_size for c in configs.values()} == {30522}
    assert configs["large.json"].d_model == configs["large_v2.json"].d_model == 1024
    base, renamed = configs["base.json"].to_dict(), configs["base_renamed.json"].to_dict()
    assert base.pop("attention_head_size") is None and renamed.pop("attention_head_size") == 64
    assert base == renamed
    assert configs["moe.json"].block_layers.count("moe") == 1
    assert configs["xxl_v2.json"].initializer_range is None


def test_configuration_to_json_and_back():
    config = bert.BertConfig(vocab_size=7, block_layers="attention, moe", use_bias=False)
    assert config.block_layers == ["attention", "moe"]
    again = bert.BertConfig.from_dict(json.loads(config.to_json_string()))
    assert again.to_dict() == config.to_dict()


def test_keys_of_tf_bert():
    config = bert.BertConfig.from_dict(
        {
            "vocab_size": 7,
            "hidden_size": 8,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "intermediate_size": 5,
            "hidden_act": "relu",
            "hidden_dropout_prob": 0.3,
            "d_model": 16,
            "pooler_type": "first_token_transform",
            "directionality": "bidi",
        }
    )
    assert (config.d_model, config.num_blocks, config.attention_num_heads) == (16, 3, 4)
    assert config.feedforward_intermediate_act == "relu"
    assert config.layer_output_dropout_prob == 0.3


@pytest.mark.parametrize(
    "text, message",
    [
        (
            '{"vocab_size": 5, "d_modle": 3}',
            "c.json.*unknown keys 'd_modle'; near names are d_model",
        ),
        ('{"d_model": 3}', "vocab_size is missing"),
        ("{", "is no JSON"),
        ("[1]", "holds no dictionary"),
        (
            '{"vocab_size": "ten"}',
            "c.json: BertConfig: vocab_size should be a positive integer.*'ten'",
        ),
        ('{"vocab_size": -1}', "vocab_size should be .*: the number of lines of the .* but is -1"),
        ('{"vocab_size": 5, "d_model": 1.5}', "d_model should be a positive integer, but is 1.5"),
    ],
)
def test_errors_of_configurations(tmp_path, text, message):
    path = tmp_path / "c.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        bert.BertConfig.from_json_file(str(path))


# -- checkpoints


def saved(directory, **shapes):
    with tf.Graph().as_default(), tf.Session() as session:
        for name, shape in shapes.items():
            tf.get_variable(name, shape)
        session.run(tf.global_variables_initializer())
        return tf.train.Saver().save(session, str(directory / "m.ckpt"))


def test_assignment_map(tmp_path):
    path = saved(
        tmp_path,
        **{"bert/a": [2], "bert/a/adam_m": [2], "b_slot_v": [2], "global_step": [], "other": [3]},
    )
    variables = [
        tf.get_variable(n, s)
        for n, s in {
            "bert/a": [2],
            "bert/a/adam_m": [2],
            "b_slot_v": [2],
            "global_step": [],
            "new": [1],
        }.items()
    ]
    mapping, names = bert.get_assignment_map_from_checkpoint(variables, path)
    assert dict(mapping) == {"bert/a": "bert/a"}
    assert names == {"bert/a": 1, "bert/a:0": 1}


def test_errors_of_initial_checkpoints(tmp_path):
    path = saved(tmp_path, **{"bert/a": [2]})
    with pytest.raises(
        ValueError, match=r"has bert/a of shape \[2\], but in the model it has \[3\]"
    ):
        bert.get_assignment_map_from_checkpoint([tf.get_variable("bert/a", [3])], path)
    with pytest.raises(ValueError, match=r"is no checkpoint, such as model.ckpt-1000"):
        bert.get_assignment_map_from_checkpoint([], str(tmp_path / "none"))


# -- the optimizer


def loss_of_variables():
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    v = mtf.get_variable(mesh, "v", mtf.Shape([mtf.Dimension("a", 3)]))
    return mtf.reduce_sum(mtf.square(v))


@pytest.mark.parametrize(
    "warmup, expected",
    [
        (4, {0: 0.0, 1: 0.25, 3: 0.75, 4: 0.6, 5: 0.5, 10: 0.0, 12: 0.0}),
        (0, {0: 1.0, 5: 0.5, 10: 0.0}),
    ],
)
def test_learning_rate(warmup, expected):
    """Grows from 0, then is the share of steps that are left."""
    step = tf.train.get_or_create_global_step()
    rate, _ = optimization.create_optimizer(loss_of_variables(), 0.1, 10, warmup)
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        for number, share in expected.items():
            session.run(tf.assign(step, number))
            assert session.run(rate) == pytest.approx(0.1 * share, abs=1e-7)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"optimizer": "sgd"}, "optimizer='sgd' is none of 'adam', 'adafactor'"),
        (
            {"max_optimized_variable_size": 2},
            "no variable is trained.*max_optimized_variable_size=2",
        ),
        ({"num_train_steps": 0}, "num_train_steps is 0; it should be 1 or more"),
        ({"num_warmup_steps": -1}, "num_warmup_steps is -1; it should be 1 or more, or 0"),
    ],
)
def test_errors_of_optimizers(arguments, message):
    arguments = {"num_train_steps": 10, "num_warmup_steps": 1, **arguments}
    with pytest.raises(ValueError, match=message):
        optimization.create_optimizer(loss_of_variables(), 0.1, **arguments)


def test_clipping_keeps_none():
    loss = loss_of_variables()
    clipped, norm = optimization.clip_by_global_norm([None, loss], 1.0)
    assert clipped[0] is None and norm.shape.dims == []
    with pytest.raises(ValueError, match="all gradients are None"):
        optimization.clip_by_global_norm([None], 1.0)


def test_epsilon_of_normalizations():
    """The default is the classic's; that of the published checkpoints is in their configuration."""
    assert "layer_norm_epsilon" not in bert.BertConfig(20).to_dict()
    config = bert.BertConfig.from_dict({"vocab_size": 20, "layer_norm_eps": 1e-12})
    assert bert.BertConfig.from_dict(config.to_dict()).layer_norm_epsilon == 1e-12
    for options, expected in (({}, 1e-6), ({"layer_norm_epsilon": 1e-12}, 1e-12)):
        _, mesh = build(**options)
        found = {op._epsilon for op in mesh.graph.operations if hasattr(op, "_epsilon")}
        assert found == {expected}
