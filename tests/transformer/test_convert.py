"""T5's weights from Hugging Face's files to checkpoints and back: values, logits, errors, files."""

import contextlib
import json
import os
import pathlib
import sys

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
from helpers import processes
from helpers.transformer import t5_models

import mesh_tensorflow as mtf
from mesh_tensorflow._programs import _explains_itself
from mesh_tensorflow.optimize._base import weights_of
from mesh_tensorflow.transformer import convert

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


@pytest.mark.slow
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
    """Ids that only fill up the vocabulary are as unlikely as that of padding."""
    tensors, _ = convert.read_huggingface(str(model))
    short = {k: v[:100] if 128 in v.shape else v for k, v in tensors.items()}
    variables = convert.huggingface_to_mesh(short)
    assert variables["shared/embedding"].shape == (128, 16)
    for name in {"shared/embedding", "decoder/logits/kernel"} & set(variables):
        table = variables[name] if "shared" in name else variables[name].T
        assert table.any() and (table[100:] == table[0]).all()
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
    with pytest.raises(ValueError, match="norm_name='x' is none of 'layer_norm', 'rms_norm'"):
        convert.huggingface_to_mesh(tensors, norm_name="x")


OPTIMIZERS = {
    "adafactor": lambda: mtf.optimize.AdafactorOptimizer(0.1, beta1=0.9, min_dim_size_to_factor=2),
    "adam": lambda: mtf.optimize.AdamWeightDecayOptimizer(0.1),
    "adamw": lambda: mtf.optimize.AdamWOptimizer(0.1),
    "lion": lambda: mtf.optimize.LionOptimizer(0.1),
    "momentum": lambda: mtf.optimize.MomentumOptimizer(0.1, 0.9),
    "sgd": lambda: mtf.optimize.SgdOptimizer(0.1, momentum=0.9),
    "own": lambda: mtf.optimize.elementwise(
        lambda grad, state, value, learning_rate, step: (-grad, state), {"x": 1.0}, name="mine"
    ),
    **{
        f"keras {name}": lambda name=name: mtf.optimize.from_keras(
            getattr(tf.keras.optimizers, name)(0.1)
        )
        for name in ("Adadelta", "Adagrad", "Adam", "Adamax", "AdamW", "Lion", "RMSprop", "SGD")
    },
}


@pytest.mark.slow_but(7)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("scope", [None, "of_training"])
@pytest.mark.slips
def test_slots_of_every_optimizer(optimizer, scope):
    """Also of a scalar, of averages, and of an optimizer in a scope of its own."""
    make = OPTIMIZERS[optimizer]
    if optimizer.startswith("keras"):  # whose learning rate is a variable, read in eager mode
        make = [make()].pop
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")
    with tf.Graph().as_default():
        for name, shape in (("a/w", "d:4,e:6"), ("a/b", "d:4"), ("s", ""), ("a/w_out", "d:4,e:6")):
            mtf.get_variable(mesh, name, shape)
        weights = graph.trainable_variables
        with tf.variable_scope(scope) if scope else contextlib.nullcontext():
            updates = make().apply_grads([mtf.ones_like(w.value) for w in weights], weights)
            for name in ("ExponentialMovingAverage", "averages/slow"):
                average = mtf.optimize.ExponentialMovingAverage(0.9, name=name)
                average.apply(weights, after=updates)
    shapes = {v.name: v.shape.to_integer_list for v in graph.all_variables}
    assert len(shapes) >= 3 * len(weights)
    assert weights_of({**shapes, "global_step": []}) == [w.name for w in weights]


@pytest.mark.parametrize("name", ["x/w/bias", "x/w_2", "x/adam_/w", "slot_/w", "x/w2/m", "x/w/a/b"])
def test_weights_that_are_no_slots(name):
    shapes = {"x/w": [2, 3], name: [3] if name.startswith("x/w/") else [2, 3]}
    assert weights_of(shapes) == list(shapes)


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
    later = convert.write_checkpoint(variables, str(tmp_path / "new"), step=20)
    state = tf.train.get_checkpoint_state(str(tmp_path / "new"))
    assert state.model_checkpoint_path == later
    assert list(state.all_model_checkpoint_paths) == [path, later]
    with pytest.raises(ValueError, match=r"model\.ckpt-12 exists already"):
        convert.write_checkpoint(variables, str(tmp_path / "new"), step=12)
    with pytest.raises(ValueError, match="convert: there is no checkpoint"):
        convert.read_checkpoint(str(tmp_path))
    with pytest.raises(ValueError, match="convert: there is no checkpoint"):
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


def a_model(folder, tensors, shards=None, config=None):
    """Writes a Hugging Face model; `shards` is a list of (file, names of tensors)."""
    from safetensors.numpy import save_file

    folder.mkdir()
    if config is not None:
        (folder / "config.json").write_text(config)
    if shards is None:
        save_file(tensors, folder / "model.safetensors")
        return {}
    for file, part in shards:
        save_file(part, folder / file)
    return {name: file for file, part in shards for name in part}


def test_the_index_says_which_shard_holds_a_tensor(model, tmp_path):
    """A tensor that stands in two shards is read from the one that weight_map names."""
    tensors, _ = convert.read_huggingface(str(model))
    first = min(tensors)
    stale = {first: tensors[first] + 1.0}
    for old in ("a.safetensors", "z.safetensors"):
        folder = tmp_path / old[0]
        weight_map = a_model(folder, tensors, [(old, stale), ("m.safetensors", tensors)])
        index = folder / "model.safetensors.index.json"
        index.write_text(json.dumps({"weight_map": weight_map}))
        same(convert.read_huggingface(str(folder))[0], tensors)
        index.write_text(json.dumps({"weight_map": {**weight_map, first: old}}))
        same(convert.read_huggingface(str(folder))[0], {**tensors, **stale})


def cut(path, size=-40):
    path.write_bytes(path.read_bytes()[:size])


def header(text):
    data = text.encode()
    return lambda path: path.write_bytes(len(data).to_bytes(8, "little") + data + b"abcd")


def written(text):
    return lambda path: path.write_text(text)


ONE, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARD, CONFIG = "s.safetensors", "config.json"
F8 = '{"a": {"dtype": "F8_E5M2", "shape": [4], "data_offsets": [0, 4]}}'
# (which file of a model is damaged, how, the file and what is said of it)
DAMAGED = {
    "cut": (ONE, cut, r"model.safetensors is no whole safetensors file"),
    "empty": (ONE, lambda path: cut(path, 0), r"model.safetensors is no whole safetensors file"),
    "text": (ONE, written("<!DOCTYPE html>"), r"model.safetensors is no whole safetensors"),
    "not fetched": (ONE, written("version https://git-lfs"), r"tensors is not the file itself"),
    "long header": (ONE, lambda path: path.write_bytes(b"\xff" * 99), r"no whole .*header too large"),
    "header": (ONE, header("[" * 999), r"model.safetensors is no whole safetensors file"),
    "dtype": (ONE, header(F8), r"model.safetensors is no whole .*, or has a dtype that NumPy lacks"),
    "shard": (SHARD, cut, r"s.safetensors is no whole safetensors file"),
    "no shard": (SHARD, lambda path: path.unlink(), r"s.safetensors: there is no such file"),
    "index": (INDEX, cut, r"index.json is damaged, it is no JSON"),
    "index of bytes": (INDEX, lambda path: path.write_bytes(b"\xff\xfe{"), r"damaged, it is no JSON"),
    "index of depth": (INDEX, written("[" * 99999), r"index.json is damaged, it is no JSON"),
    "index of a list": (INDEX, written("[]"), r"index.json is damaged: it holds list, not an object"),
    "no map": (INDEX, written('{"weight_map": []}'), r"it has no weight_map of names to files"),
    "outside": (INDEX, written('{"weight_map": {"w": "../a"}}'), r"'../a' for w, no file name"),
    "number": (INDEX, written('{"weight_map": {"w": 3}}'), r"weight_map has 3 for w"),
    "absent": (INDEX, written('{"weight_map": {"w": "s.safetensors"}}'), r"s.safetensors has no w, which"),
    "config": (CONFIG, cut, r"config.json is damaged, it is no JSON"),
    "tied": (CONFIG, written('{"tie_word_embeddings": "yes"}'), r"config.json has 'yes' for scale_dec"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_files_are_named_in_one_message(name, tmp_path):
    damaged, damage, text = DAMAGED[name]
    source = FIXTURES / "t5"
    tensors, _ = convert.read_huggingface(str(source))
    shards = [(SHARD, tensors)] if damaged in (SHARD, INDEX) else None
    config = (source / CONFIG).read_text()
    weight_map = a_model(tmp_path / "hf", tensors, shards, config)
    if shards:
        (tmp_path / "hf" / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    damage(tmp_path / "hf" / damaged)
    arguments = ["from-huggingface", str(tmp_path / "hf"), str(tmp_path / "out")]
    with pytest.raises(ValueError, match=text):
        convert.main(arguments)
    try:
        convert.from_huggingface(*arguments[1:])
    except ValueError as error:
        # Without the frame of this test, which is code of a user's.
        assert _explains_itself(error.with_traceback(error.__traceback__.tb_next))
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_damaged_file_ends_the_program_with_code_2(tmp_path):
    a_model(tmp_path / "hf", convert.read_huggingface(str(FIXTURES / "t5"))[0])
    cut(tmp_path / "hf" / ONE)
    program = ["-m", "mesh_tensorflow.transformer.convert", "from-huggingface"]
    ended = processes.python(*program, tmp_path / "hf", tmp_path / "out", code=2)
    assert "Traceback" not in ended.stderr
    assert "model.safetensors is no whole safetensors file" in ended.stderr


@pytest.mark.parametrize("ending", ["index", "data-00000-of-00001"])
def test_damaged_checkpoints_are_named(ending, model, tmp_path):
    path = convert.from_huggingface(str(model), str(tmp_path / "mesh"))
    cut(pathlib.Path(f"{path}.{ending}"))
    with pytest.raises(ValueError, match=r"the checkpoint .*model.ckpt-0 is damaged"):
        convert.to_huggingface(path, str(tmp_path / "back"))
    assert not (tmp_path / "back").exists()


@pytest.mark.parametrize("dtype, value, text", [
    ("float32", np.nan, r"has the value nan at \[1, 2\], and 1 of its \d+ values"),
    ("float32", -np.inf, r"has the value -inf at \[1, 2\]"),
    ("int32", 3, r"is of dtype int32, such as"),
])  # fmt: skip
def test_weights_that_are_no_finite_floats(dtype, value, text, model, tmp_path):
    """In both directions, with the names of the file and of the weight."""
    tensors, config = convert.read_huggingface(str(model))
    good = convert.huggingface_to_mesh(tensors, config.get("scale_decoder_outputs"))
    name = "encoder.block.0.layer.0.SelfAttention.q.weight"
    wrong = tensors[name].astype(dtype)
    wrong[1, 2] = value
    a_model(tmp_path / "hf", {**tensors, name: wrong}, config=json.dumps(config))
    with pytest.raises(ValueError, match=rf"hf/model.safetensors: {name} {text}"):
        convert.from_huggingface(str(tmp_path / "hf"), str(tmp_path / "mesh"))
    ours = "encoder/block_000/layer_000/SelfAttention/q"
    wrong = good[ours].astype(dtype)
    wrong[1, 2] = value
    path = convert.write_checkpoint({**good, ours: wrong}, str(tmp_path / "own"))
    with pytest.raises(ValueError, match=rf"own/model.ckpt-0: {ours} {text}"):
        convert.to_huggingface(path, str(tmp_path / "back"))
    assert not (tmp_path / "mesh").exists() and not (tmp_path / "back").exists()


def test_weights_that_a_dtype_cannot_hold(model, tmp_path):
    tensors, config = convert.read_huggingface(str(model))
    name = "encoder.final_layer_norm.weight"
    large = tensors[name].astype(np.float32)
    large[1] = 1e6
    a_model(tmp_path / "hf", {**tensors, name: large}, config=json.dumps(config))
    arguments = [str(tmp_path / "hf"), str(tmp_path / "mesh")]
    with pytest.raises(ValueError, match=r"as float16: encoder/final_layer_norm/scale has .* inf"):
        convert.from_huggingface(*arguments, dtype="float16")
    convert.from_huggingface(*arguments, dtype="bfloat16")


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
    convert.main(
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
    convert.main(
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


def test_a_checkpoint_with_a_draft(tmp_path):
    """The draft's variables are in a scope; the step is the model's."""
    model = {"decoder/a": np.arange(6.0).reshape(2, 3), "shared/embedding": np.ones(3)}
    draft = {"decoder/a": np.arange(2.0)}
    paths = [
        convert.write_checkpoint(variables, str(tmp_path / name), step)
        for name, variables, step in (("model", model, 7), ("draft", draft, 5))
    ]
    both = str(tmp_path / "both")
    convert.main(["with-draft", str(tmp_path / "model"), paths[1], both])
    assert tf.train.latest_checkpoint(both) == f"{both}/model.ckpt-7"
    same(convert.read_checkpoint(both), {**model, "draft/decoder/a": draft["decoder/a"]})
    assert tf.train.load_checkpoint(both).get_tensor("global_step") == 7
    with pytest.raises(ValueError, match="already holds a draft; give the checkpoint of the model"):
        convert.with_draft(both, paths[1], str(tmp_path / "more"))
    with pytest.raises(ValueError, match="convert: there is no checkpoint"):
        convert.with_draft(paths[0], str(tmp_path), both)
