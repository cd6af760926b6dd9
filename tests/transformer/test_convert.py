"""T5's weights from Hugging Face's files to checkpoints and back: values, logits, errors, files."""

import json
import os
import pathlib
import runpy
import sys

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from helpers.transformer import t5_models

from mesh_tensorflow.transformer import convert
from mesh_tensorflow.transformer.convert import __main__ as command

pytest.importorskip("safetensors", reason="the extra [transformer]")

FIXTURES = pathlib.Path(__file__).parent / "t5_fixtures"
MODELS = ["t5", "t5_1_1"]
SIZES = (
    "vocab_size",
    "d_model",
    "d_kv",
    "d_ff",
    "num_layers",
    "num_decoder_layers",
    "num_heads",
    "relative_attention_num_buckets",
)


def same(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype, name
        np.testing.assert_array_equal(a[name], b[name], err_msg=name)


@pytest.fixture(params=MODELS)
def model(request):
    return FIXTURES / request.param


# Numbers.


def test_there_and_back_is_exact(model, tmp_path):
    path = convert.from_huggingface(str(model), str(tmp_path / "mesh"), step=7)
    assert path == str(tmp_path / "mesh" / "model.ckpt-7")
    convert.to_huggingface(str(tmp_path / "mesh"), str(tmp_path / "back"))
    tensors, config = convert.read_huggingface(str(model))
    again, new_config = convert.read_huggingface(str(tmp_path / "back"))
    same(again, tensors)
    kept = set(new_config) - {"tie_word_embeddings"}
    assert {k: new_config[k] for k in kept} == {k: config[k] for k in kept}
    assert new_config["tie_word_embeddings"] == config["scale_decoder_outputs"]


def test_names_and_shapes(model):
    variables = convert.huggingface_to_mesh(convert.read_huggingface(str(model))[0])
    shapes = {name: v.shape for name, v in variables.items()}
    expected = {
        "shared/embedding": (128, 16),
        "encoder/block_000/layer_000/SelfAttention/q": (16, 8),
        "encoder/block_000/layer_000/SelfAttention/o": (8, 16),
        "encoder/block_000/layer_000/SelfAttention/relative_attention_bias": (2, 8),
        "encoder/block_001/layer_001/DenseReluDense/wo/kernel": (24, 16),
        "encoder/block_001/layer_001/layer_norm/scale": (16,),
        "encoder/final_layer_norm/scale": (16,),
        "decoder/block_002/layer_001/EncDecAttention/k": (16, 8),
        "decoder/block_002/layer_002/layer_norm/scale": (16,),
        "decoder/final_layer_norm/scale": (16,),
    }
    gated = "1_1" in model.name
    for kernel in ("wi_0", "wi_1") if gated else ("wi",):
        expected[f"decoder/block_000/layer_002/DenseReluDense/{kernel}/kernel"] = (16, 24)
    assert expected.items() <= shapes.items()
    assert shapes.get("decoder/logits/kernel") == ((16, 128) if gated else None)
    renamed = convert.huggingface_to_mesh(
        convert.read_huggingface(str(model))[0], norm_name="rms_norm"
    )
    assert {"encoder/rms_norm/scale", "encoder/block_000/layer_000/rms_norm/scale"} <= set(renamed)
    same(convert.mesh_to_huggingface(renamed)[0], convert.mesh_to_huggingface(variables)[0])


def test_logits_are_those_of_transformers(model, tmp_path):
    """As they were computed once; `test_convert_live.py` computes them."""
    expected = np.load(model / "logits.npz")
    path = convert.from_huggingface(str(model), str(tmp_path))
    config = convert.read_huggingface(str(model))[1]
    sizes = {key: config[key] for key in SIZES}
    found = t5_models.logits(
        path,
        t5_models.bitransformer("1_1" in model.name, **sizes),
        expected["inputs"],
        expected["targets"],
    )
    np.testing.assert_allclose(found, expected["logits"], rtol=1e-4, atol=1e-4)


def test_padding_of_the_vocabulary(model):
    tensors, _ = convert.read_huggingface(str(model))
    short = {k: v[:100] if 128 in v.shape else v for k, v in tensors.items()}
    variables = convert.huggingface_to_mesh(short)
    assert variables["shared/embedding"].shape == (128, 16)
    assert not variables["shared/embedding"][100:].any()
    if "lm_head.weight" in short:
        assert not variables["decoder/logits/kernel"][:, 100:].any()
    back, config = convert.mesh_to_huggingface(variables, vocab_size=100)
    same(back, short)
    assert config["vocab_size"] == 100
    assert convert.mesh_to_huggingface(variables)[1]["vocab_size"] == 128
    wide = convert.huggingface_to_mesh(short, vocab_size=256)
    assert wide["shared/embedding"].shape == (256, 16)


def test_softmax_of_its_own_and_copies_of_the_embedding():
    tensors, config = convert.read_huggingface(str(FIXTURES / "t5"))
    embedding = tensors["shared.weight"]
    copies = {
        "lm_head.weight": embedding,
        "encoder.embed_tokens.weight": embedding,
        "decoder.embed_tokens.weight": embedding,
        "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight": embedding,
    }
    same(convert.huggingface_to_mesh({**tensors, **copies}), convert.huggingface_to_mesh(tensors))
    without = {k: v for k, v in {**tensors, **copies}.items() if k != "shared.weight"}
    same(convert.huggingface_to_mesh(without), convert.huggingface_to_mesh(tensors))
    for start in (tensors, {**tensors, **copies}):
        # Outputs are not scaled: with transformers 5, of models of T5 1.1 that were made tied.
        own = convert.huggingface_to_mesh(start, tied=False)
        np.testing.assert_array_equal(own["decoder/logits/kernel"], embedding.T)
        back, config = convert.mesh_to_huggingface(own)
        assert not config["tie_word_embeddings"] and not config["scale_decoder_outputs"]
        same(back, {**tensors, "lm_head.weight": embedding})
    with pytest.raises(ValueError, match=r"lm_head\.weight differs from shared\.weight"):
        convert.huggingface_to_mesh({**tensors, "lm_head.weight": embedding + 1}, tied=True)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_dtypes(model, tmp_path, dtype):
    low = tf.as_dtype(dtype).as_numpy_dtype
    path = convert.from_huggingface(str(model), str(tmp_path / "mesh"), dtype=dtype)
    variables = convert.read_checkpoint(path)
    assert {v.dtype for v in variables.values()} == {np.dtype(low)}
    convert.to_huggingface(path, str(tmp_path / "same"))
    convert.to_huggingface(path, str(tmp_path / "wide"), dtype="float32")
    tensors = convert.read_huggingface(str(model))[0]
    same(
        convert.read_huggingface(str(tmp_path / "same"))[0],
        {k: v.astype(low) for k, v in tensors.items()},
    )
    same(
        convert.read_huggingface(str(tmp_path / "wide"))[0],
        {k: v.astype(low).astype(np.float32) for k, v in tensors.items()},
    )


# Errors.


def test_all_problems_are_named(model):
    tensors, _ = convert.read_huggingface(str(model))
    variables = convert.huggingface_to_mesh(tensors)
    bad = dict(variables)
    del bad["decoder/final_layer_norm/scale"], bad["encoder/block_000/layer_000/SelfAttention/q"]
    bad["shared/positional_embedding"] = np.zeros([16, 16])
    bad["encoder/block_001/layer_000/SelfAttention/o"] = np.zeros([8, 2, 8])
    bad["encoder/block_001/layer_000/layer_norm/scale"] = np.zeros([17])
    with pytest.raises(ValueError) as error:
        convert.mesh_to_huggingface(bad)
    text = str(error.value)
    assert text.startswith(
        "the checkpoint is no T5 model: missing: decoder/final_layer_norm/scale, "
    )
    for part in (
        "encoder/block_000/layer_000/SelfAttention/q",
        "T5: shared/positional_embedding",
        "SelfAttention/o has shape [8, 2, 8] instead of [heads * d_kv=8, d_model=16]",
        "layer_norm/scale has shape [17] instead of [d_model=16]",
    ):
        assert part in text
    worse = {k: v for k, v in tensors.items() if "decoder.block" not in k}
    worse["decoder.embed_tokens.weight"] = tensors["shared.weight"] + 1
    with pytest.raises(
        ValueError,
        match=(
            "Hugging Face model is no T5 model: it has 2 blocks in its encoder and 0 in its decoder; "
            r"without a place in T5: decoder\.embed_tokens\.weight"
        ),
    ):
        convert.huggingface_to_mesh(worse)
    odd = {
        k: np.zeros([3, 8]) if k.endswith("relative_attention_bias") else v
        for k, v in variables.items()
    }
    with pytest.raises(ValueError, match="8, is no multiple of their number, 3"):
        convert.mesh_to_huggingface(odd)
    with pytest.raises(ValueError, match="is no T5 model: it has 0 blocks"):
        convert.mesh_to_huggingface({})
    with pytest.raises(ValueError, match="norm_name 'x' is none of layer_norm, rms_norm"):
        convert.huggingface_to_mesh(tensors, norm_name="x")


def test_slots_are_left_out():
    variables = convert.huggingface_to_mesh(convert.read_huggingface(str(FIXTURES / "t5"))[0])
    slots = {
        f"shared/embedding{slot}": np.zeros([1])
        for slot in (
            "_slot_vr",
            "_slot_vc",
            "_slot_v",
            "_slot_m",
            "_momentum_v",
            "/adam_m",
            "/adam_v",
        )
    }
    more = {**variables, **slots, "global_step": np.int64(3)}
    same(convert.mesh_to_huggingface(more)[0], convert.mesh_to_huggingface(variables)[0])


# Files.


def files_below(folder):
    return sorted(p.relative_to(folder).as_posix() for p in pathlib.Path(folder).rglob("*"))


def test_checkpoint_files(tmp_path):
    variables = {"a": np.arange(6.0, dtype=np.float32).reshape([2, 3]), "b/c": np.float32(2)}
    path = convert.write_checkpoint(variables, str(tmp_path / "new"), step=12)
    assert files_below(tmp_path / "new") == [
        "checkpoint",
        "model.ckpt-12.data-00000-of-00001",
        "model.ckpt-12.index",
    ]
    assert tf.train.latest_checkpoint(str(tmp_path / "new")) == path
    assert tf.train.load_checkpoint(path).get_tensor("global_step") == 12
    same(
        convert.read_checkpoint(str(tmp_path / "new")),
        {k: np.asarray(v) for k, v in variables.items()},
    )
    with pytest.raises(ValueError, match=r"model\.ckpt-12 exists already"):
        convert.write_checkpoint(variables, str(tmp_path / "new"), step=12)
    with pytest.raises(ValueError, match="no TensorFlow checkpoint at"):
        convert.read_checkpoint(str(tmp_path))
    with pytest.raises(ValueError, match="no TensorFlow checkpoint at"):
        convert.read_checkpoint(str(tmp_path / "nix"))


def test_huggingface_files(model, tmp_path, monkeypatch):
    tensors, config = convert.read_huggingface(str(model))
    same(convert.read_huggingface(str(model / "model.safetensors"))[0], tensors)
    convert.write_huggingface(tensors, config, str(tmp_path / "out"))
    assert files_below(tmp_path / "out") == ["config.json", "model.safetensors"]
    with pytest.raises(ValueError, match=r"model\.safetensors exists already"):
        convert.write_huggingface(tensors, config, str(tmp_path / "out"))
    with pytest.raises(ValueError, match=r"no model\.safetensors in .*safe_serialization=True"):
        convert.read_huggingface(str(tmp_path))

    from safetensors.numpy import save_file

    names = sorted(tensors)
    shards = {"one.safetensors": names[:20], "two.safetensors": names[20:]}
    for file, part in shards.items():
        save_file({name: tensors[name] for name in part}, tmp_path / file)
    weight_map = {name: file for file, part in shards.items() for name in part}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    same(convert.read_huggingface(str(tmp_path))[0], tensors)

    monkeypatch.setitem(sys.modules, "safetensors.numpy", None)
    with pytest.raises(
        ImportError, match=r"package safetensors, which is not .*install 'safetensors"
    ):
        convert.read_huggingface(str(model))


def test_a_failed_write_leaves_nothing(tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        raise OSError("disk full")

    monkeypatch.setattr("safetensors.numpy.save_file", fail)
    with pytest.raises(OSError, match="disk full"):
        convert.write_huggingface({}, {}, str(tmp_path / "there"))
    monkeypatch.setattr(tf.Session, "run", fail)
    with pytest.raises(OSError, match="disk full"):
        convert.write_checkpoint({"a": np.zeros([2])}, str(tmp_path / "back"))
    assert files_below(tmp_path) == ["back", "there"]


def test_command_line(tmp_path):
    mesh, back = str(tmp_path / "mesh"), str(tmp_path / "back")
    command.main(
        [
            "from-huggingface",
            str(FIXTURES / "t5"),
            mesh,
            "--step",
            "3",
            "--no-tied",
            "--norm_name",
            "rms_norm",
            "--dtype",
            "bfloat16",
            "--vocab_size",
            "256",
        ]
    )
    shapes = dict(tf.train.list_variables(mesh))
    assert shapes["decoder/logits/kernel"] == [16, 256] and "decoder/rms_norm/scale" in shapes
    command.main(
        [
            "to-huggingface",
            os.path.join(mesh, "model.ckpt-3"),
            back,
            "--vocab_size",
            "128",
            "--feed_forward",
            "silu",
            "--dtype",
            "float32",
        ]
    )
    tensors, config = convert.read_huggingface(back)
    assert tensors["lm_head.weight"].shape == (128, 16) and config["feed_forward_proj"] == "silu"
    assert tensors["lm_head.weight"].dtype == np.float32


def test_command_line_of_the_module(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["convert", "--help"])
    monkeypatch.delitem(sys.modules, "mesh_tensorflow.transformer.convert.__main__")
    with pytest.raises(SystemExit):
        runpy.run_module("mesh_tensorflow.transformer.convert", run_name="__main__")
    printed = capsys.readouterr().out
    assert "from-huggingface" in printed and "Converts checkpoints of T5 models" in printed


def test_a_checkpoint_with_a_draft(tmp_path):
    """The draft's variables are in a scope; the step is the model's."""
    model = {"decoder/a": np.arange(6.0).reshape(2, 3), "shared/embedding": np.ones(3)}
    draft = {"decoder/a": np.arange(2.0)}
    paths = [
        convert.write_checkpoint(variables, str(tmp_path / name), step)
        for name, variables, step in (("model", model, 7), ("draft", draft, 5))
    ]
    both = str(tmp_path / "both")
    command.main(["with-draft", str(tmp_path / "model"), paths[1], both])
    assert tf.train.latest_checkpoint(both) == f"{both}/model.ckpt-7"
    same(convert.read_checkpoint(both), {**model, "draft/decoder/a": draft["decoder/a"]})
    assert tf.train.load_checkpoint(both).get_tensor("global_step") == 7
    with pytest.raises(ValueError, match="already holds a draft; give the checkpoint of the model"):
        convert.with_draft(both, paths[1], str(tmp_path / "more"))
    with pytest.raises(ValueError, match="no TensorFlow checkpoint at"):
        convert.with_draft(paths[0], str(tmp_path), both)
