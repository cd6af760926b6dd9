"""Fine-tuning: adapters, frozen weights, PEFT's files, and what a model has learned."""

import functools
import json
import pathlib
import random
import signal
import time

import numpy as np
import pytest
import safetensors.numpy
import tensorflow.compat.v1 as tf
from helpers import processes

import mesh_tensorflow as mtf
from mesh_tensorflow import finetune
from mesh_tensorflow.models import _lora

FIXTURES = pathlib.Path(__file__).parent / "fixtures"
EXAMPLES = [{"ids": [5, 6, 7, 8]}, {"ids": [9, 10, 11]}, {"ids": [12, 13, 14, 15, 16]}] * 4
QUESTIONS = [
    {"ids": [5, 6, 70, 71, 2], "weights": [0, 0, 1, 1, 1]},
    {"ids": [15, 16, 80, 81, 2], "weights": [0, 0, 1, 1, 1]},
]
PLACES = {
    "whole": {},
    "tensor": {"mesh_shape": "x:2,y:2", "layout": "batch:x,vocab:y,d_ff:y,heads:y?"},
    "fully_sharded": {"mesh_shape": "x:2,y:2", "layout": "batch:x", "zero": 3, "zero_axis": "x+y"},
    "sequence": {"mesh_shape": "x:2", "layout": "length:x"},
    "compiled": {"mesh_shape": "x:2", "layout": "batch:x", "zero": 3, "jit_compile": True},
    "pipeline": {"mesh_shape": "x:2,y:2", "layout": "stages:x,batch:y"},
    "simd": {"mesh_shape": "x:2", "layout": "batch:x,lora:x", "simd": True, "zero": 3},
    "model_on_simd": {"mesh_shape": "x:2", "layout": "batch:x", "mesh_impl": "simd", "zero": 3},
    "model_on_pjrt": {"mesh_shape": "x:2", "layout": "batch:x", "mesh_impl": "pjrt"},
    "pjrt": {"mesh_shape": "x:2,y:2", "layout": "batch:x,lora:y", "mesh_impl": "pjrt"},
}


def model_of(name="llama", **kwargs):
    return mtf.models.from_pretrained(FIXTURES / name, **kwargs)


def tuned(model, steps=3, **kwargs):
    defaults = {"length": 8, "batch_size": 4, "progress": False, "learning_rate": 0.05}
    return mtf.models.finetune(model, EXAMPLES, steps, **{**defaults, **kwargs})


def adapters_of(result):
    """Names of the adapters' variables, without those of optimizers."""
    return [name for name in result.variables if name.endswith(("_lora_a", "_lora_b"))]


def cells():
    names = ["gemma2", "gpt2", "gpt_neox", "llama", "mixtral", "phi3"]
    found = [(name, place) for place in PLACES for name in names if place != "whole"]
    return [(n, p) for n, p in found if p == "tensor" or n == "llama"]


@pytest.mark.slips
@pytest.mark.slow
@pytest.mark.parametrize("name, place", cells())
def test_adapters_in_each_layout(name, place, request):
    """The same losses and the same merged weights, of which those with adapters have changed."""
    if "pjrt" in place:
        request.getfixturevalue("eight_devices")
    options = dict(PLACES[place])
    if name == "mixtral":
        options["layout"] = options["layout"].replace("d_ff:y", "experts:y")
    where = {} if place in ("compiled", "pjrt", "simd") else options
    models = model_of(name), model_of(name, **where)
    results = [
        tuned(model, lora="all:2", log_every=1, seed=1, **further)
        for model, further in zip(models, ({}, {} if where else options))
    ]
    wanted, found = (result.losses for result in results)
    np.testing.assert_allclose(found, wanted, rtol=1e-4)
    assert wanted[-1] < wanted[0]
    before = model_of(name).weights
    kernels = {n.removesuffix("_lora_b") for n in adapters_of(results[0]) if n.endswith("b")}
    assert len(kernels) >= 8
    for key, value in models[1].weights.items():
        other = models[0].weights[key]
        assert np.array_equal(value, before[key]) == (key not in kernels)
        # Adam's first steps are of size 1 wherever a gradient is not zero, however small.
        assert np.mean(np.abs(value - other) > 1e-3) < 0.01, key


@pytest.mark.slow
@pytest.mark.parametrize("simd", [False, True])
def test_a_layout_that_is_chosen(simd):
    """The same losses as without splits; on one device, nothing is split."""
    auto = mtf.auto_mtf.Auto(seconds=5, candidates=1, profile=False, cache="")
    chosen = {"mesh_shape": "x:2", "layout": auto, "simd": simd}
    wanted, found = (
        tuned(model_of(), lora="q,v:2", log_every=1, seed=1, **where) for where in ({}, chosen)
    )
    np.testing.assert_allclose(found.losses, wanted.losses, rtol=1e-4)
    assert simd or found.layout == ""


def test_only_adapters_are_trained():
    result = tuned(model_of(), lora="q, v:4")
    trained = adapters_of(result)
    assert len(trained) == 8  # two layers, q and v, A and B
    a, b = (result.variables[f"transformer/block_000/layer_000/SelfAttention/q_lora_{x}"] for x in "ab")  # fmt: skip
    assert a.shape == (24, 4) and b.shape == (4, 2, 2, 6)
    kept = model_of().weights
    assert all(np.array_equal(result.variables[n], kept[n]) for n in kept)


def test_adapters_of_an_expert_that_all_tokens_go_to(tmp_path):
    """Its hidden units are as many others as those of the layers without experts."""
    model = model_of("qwen2_moe_dense")
    result = tuned(model, 1, lora="wi_0,wo:2", save_adapters=tmp_path)
    layers = "transformer/block_000/layer_00{}/{}/kernel_lora_{}"
    shared, dense = (3, "MoE1D/shared/wo"), (1, "DenseReluDense/wo")
    for (layer, name), units in ((shared, 16), (dense, 40)):
        a, b = (result.variables[layers.format(layer, name, x)] for x in "ab")
        assert a.shape == (units, 2) and b.shape == (2, 24)
    merged = model_of("qwen2_moe_dense")
    merged.merge(tmp_path)
    for name, value in model.weights.items():
        np.testing.assert_allclose(merged.weights[name], value, rtol=1e-6, atol=1e-7)


def test_alpha_is_a_factor():
    results = [tuned(model_of(), 1, lora=f"q:2:{alpha}", optimizer=mtf.optimize.SgdOptimizer(1.0),
                     learning_rate=None) for alpha in (1, 3)]  # fmt: skip
    name = "transformer/block_000/layer_000/SelfAttention/q_lora_b"
    one, three = (result.variables[name] for result in results)
    np.testing.assert_allclose(three, 3 * one, rtol=1e-4, atol=1e-7)


def test_the_files_of_peft(tmp_path):
    """PEFT's names and shapes; read again, and gone on with, they are the same adapters."""
    model = model_of()
    result = tuned(model, lora="q,o,wi_0:2", save_adapters=tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["r"] == 2 and config["lora_alpha"] == 4 and config["peft_type"] == "LORA"
    assert config["target_modules"] == ["gate_proj", "o_proj", "q_proj"]
    tensors = safetensors.numpy.load_file(tmp_path / "adapter_model.safetensors")
    prefix = "base_model.model.model.layers.1.self_attn.q_proj.lora_"
    theirs = safetensors.numpy.load_file(FIXTURES / "llama" / "model.safetensors")
    outputs, inputs = theirs["model.layers.1.self_attn.q_proj.weight"].shape
    assert tensors[prefix + "A.weight"].shape == (2, inputs)
    assert tensors[prefix + "B.weight"].shape == (outputs, 2)
    model.save_pretrained(tmp_path / "whole")
    merged = safetensors.numpy.load_file(tmp_path / "whole" / "model.safetensors")
    for name in ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj"):
        name = f"model.layers.0.{name}"
        a, b = (tensors[f"base_model.model.{name}.lora_{x}.weight"] for x in "AB")
        wanted = theirs[f"{name}.weight"] + 2.0 * b @ a
        np.testing.assert_allclose(merged[f"{name}.weight"], wanted, atol=1e-5)
    other = model_of(mesh_shape="x:2", layout="vocab:x")
    other.merge(tmp_path)
    for name, value in model.weights.items():
        np.testing.assert_allclose(other.weights[name], value, atol=1e-6)
    further = tuned(model_of(), 1, lora=tmp_path, learning_rate=0.0)
    for name in adapters_of(result):
        np.testing.assert_allclose(further.variables[name], result.variables[name], atol=1e-7)


SHARDED = {
    "both": {"layout": "batch:x", "zero_axis": "x+y"},
    "tensor": {"layout": "batch:x,heads:y?,d_ff:y,vocab:y", "zero_axis": "x"},
    "pipeline": {"layout": "stages:x,batch:y", "zero_axis": "y"},
}


@pytest.mark.slips
@pytest.mark.slow
@pytest.mark.parametrize("mesh_impl", ["placement", "simd", "pjrt"])
@pytest.mark.parametrize("place", SHARDED)
def test_from_a_layout_to_adapters_and_on_to_another(place, mesh_impl, tmp_path, request):
    """Weights are in parts while adapters are trained; their files, and merged ones, know of none."""
    if mesh_impl == "pjrt":
        request.getfixturevalue("eight_devices")
    ids = np.arange(4 * 12).reshape(4, 12) % 90
    where = {"mesh_shape": "x:2,y:2", "zero": 3, "mesh_impl": mesh_impl, **SHARDED[place]}
    model = model_of(**where)
    tuned(
        model, lora="q,o,wi_0:2", optimizer=mtf.optimize.SgdOptimizer, learning_rate=0.1,
        save_adapters=tmp_path / "adapters",
    )  # fmt: skip
    model.save_pretrained(tmp_path / "merged")
    wanted = model.logits(ids)
    for options in (PLACES["whole"], PLACES["tensor"], PLACES["fully_sharded"]):
        other = model_of(**options)
        assert np.abs(other.logits(ids) - wanted).max() > 0.1
        other.merge(tmp_path / "adapters")
        merged = mtf.models.from_pretrained(tmp_path / "merged", **options)
        for found in (other, merged):
            np.testing.assert_allclose(found.logits(ids), wanted, atol=1e-4)


@pytest.mark.slow
def test_killed_at_any_moment(tmp_path):
    """What goes on from the last checkpoint ends with the same weights, bit by bit."""
    lines = tmp_path / "train.jsonl"
    lines.write_text("".join(f"{json.dumps(example)}\n" for example in EXAMPLES))

    def command(name):
        options = {
            "model": FIXTURES / "llama", "train_file": lines, "steps": 150, "length": 8,
            "batch_size": 2, "lora": "all:2", "learning_rate": 0.01, "save_every": 1,
            "directory": tmp_path / name, "output": tmp_path / f"{name}_tuned",
            "mesh_shape": "x:2", "layout": "batch:x", "zero": 3,
        }  # fmt: skip
        return ["-m", "mesh_tensorflow.finetune", *(f"--{n}={x}" for n, x in options.items())]

    def last():
        return tf.train.latest_checkpoint(str(tmp_path / "killed"))

    moments = random.Random(0)
    for _ in range(3):
        before, limit = last(), time.monotonic() + 60
        with processes.started(*command("killed")) as running:
            while last() == before and running.process.is_alive() and time.monotonic() < limit:
                time.sleep(0.01)
            time.sleep(moments.uniform(0, 0.2))  # some steps, in any of which it ends
            running.process.kill()
            running.process.join()
        assert running.process.exitcode == -signal.SIGKILL and last() != before
    for name in ("killed", "straight"):
        done = processes.run(*command(name))
        assert done.returncode == 0, done.stderr
    files = [tmp_path / f"{name}_tuned" / "model.safetensors" for name in ("killed", "straight")]
    assert files[0].read_bytes() == files[1].read_bytes()
    assert files[0].read_bytes() != (FIXTURES / "llama" / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    "name, module",
    [
        ("gpt2", "transformer.h.1.attn.c_attn"),
        ("gpt_neox", "gpt_neox.layers.0.attention.query_key_value"),
        ("phi3", "model.layers.0.self_attn.qkv_proj"),
        ("phi3", "model.layers.1.mlp.gate_up_proj"),
        ("phi3", "lm_head"),
    ],
)
def test_adapters_of_tensors_with_several_kernels(name, module, tmp_path):
    """PEFT has one for the tensor: each kernel gets the whole of A, and its part of B."""
    model, weight = model_of(name), f"{module}.weight"
    before = safetensors.numpy.load_file(FIXTURES / name / "model.safetensors")
    into, out = before[weight].shape if name == "gpt2" else before[weight].shape[::-1]
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal(shape).astype(np.float32) for shape in ([3, into], [out, 3]))
    factors = {f"base_model.model.{module}.lora_{n}.weight": x for n, x in (("A", a), ("B", b))}
    # Beside adapters of logits PEFT writes these themselves.
    base = {f"base_model.model.{module}.base_layer.weight": before[weight]}
    safetensors.numpy.save_file({**factors, **base}, tmp_path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 3, "lora_alpha": 6, "bias": "none"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    model.merge(tmp_path)
    model.save_pretrained(tmp_path / "merged")
    after = safetensors.numpy.load_file(tmp_path / "merged" / "model.safetensors")
    added = 2.0 * (b @ a)
    for tensor, value in before.items():
        change = (added.T if name == "gpt2" else added) if tensor == weight else 0.0
        np.testing.assert_allclose(after[tensor], value + change, rtol=1e-5, atol=1e-5)


def test_tables_have_no_adapters():
    """Of the 350m's embedding, whose rows are projected, the projections may have some."""
    with pytest.raises(ValueError, match="no table; it has embedding2, embedding3, k, o, q, v, w"):
        tuned(model_of("opt_350m"), lora="table:2")


def test_gpt2s_modules_are_told_apart(tmp_path):
    tuned(model_of("gpt2"), 1, lora="o:2", save_adapters=tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["target_modules"] == ["attn.c_proj"] and config["fan_in_fan_out"]


@pytest.mark.parametrize("place", ["whole", "pipeline"])
def test_frozen_weights(place):
    """In a pipeline, where the second block is in the second stage, too."""
    model = model_of(**PLACES[place])
    tuned(model, freeze="embedding|block_000")
    before = model_of().weights
    changed = {n for n in before if not np.array_equal(model.weights[n], before[n])}
    assert changed and not any("embedding" in n or "block_000" in n for n in changed)
    assert any("block_001" in n for n in changed)


@pytest.mark.slow
@pytest.mark.slips
@pytest.mark.parametrize("further", [{}, {"microbatches": 2}, {"recompute": True}])
def test_experts_are_balanced(further):
    """The loss has it once, whatever is computed at a time; its figures are shown."""
    options = {"log_every": 1, "optimizer": mtf.optimize.SgdOptimizer(0.1), "learning_rate": None}
    plain, balanced = (
        tuned(model_of("mixtral"), 1, balance=b, **options, **further) for b in (0.0, 0.5)
    )
    added = balanced.losses[0] - plain.losses[0]
    if not further:
        np.testing.assert_allclose(added, 0.5 * balanced.history[0]["balance_loss"], rtol=1e-3)
        assert 0.25 < balanced.history[0]["busiest_expert"] < 1.0
        assert balanced.history[0]["dropped"] == 0.0
    assert 0.9 < added < 1.5  # two experts for each token: 2 at best
    with pytest.raises(ValueError, match="'llama' has no experts"):
        tuned(model_of(), balance=0.1)


@pytest.mark.slow_but(1)
@pytest.mark.parametrize("lora", ["all:2", None])
def test_recomputed_and_in_microbatches(lora):
    wanted = tuned(model_of(), lora=lora)
    other = tuned(model_of(), lora=lora, recompute=True, microbatches=2)
    np.testing.assert_allclose(other.losses, wanted.losses, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("place", ["pipeline", "tensor"])
@pytest.mark.parametrize("number", [3, 7])
def test_any_number_of_rows_is_evaluated(place, number):
    """Whatever splits a batch, and the last one is not whole."""
    rows = [{"ids": list(range(i + 1, i + 3 + i % 4))} for i in range(number)]
    options = {"pack": False, "eval_examples": rows, "optimizer": mtf.optimize.SgdOptimizer}
    wanted, found = (tuned(model_of(**PLACES[p]), 1, **options) for p in ("whole", place))
    for name in ("eval_loss", "eval_perplexity"):
        np.testing.assert_allclose(found.final[name], wanted.final[name], rtol=1e-5)
    untrained = [
        tuned(model_of(), 1, **options, batch_size=size, learning_rate=0.0).final["eval_loss"]
        for size in (1, number)
    ]
    np.testing.assert_allclose(untrained[0], untrained[1], rtol=1e-5)


def test_going_on(tmp_path):
    wanted = tuned(model_of(), 4, lora="q,v:2")
    tuned(model_of(), 2, lora="q,v:2", directory=str(tmp_path))
    result = tuned(model_of(), 4, lora="q,v:2", directory=str(tmp_path))
    assert result.history[0]["step"] == 4  # two further ones
    np.testing.assert_allclose(result.losses[-1], wanted.losses[-1], rtol=1e-5)


@pytest.mark.slow
@pytest.mark.slips
def test_it_learns_what_it_is_asked():
    model = model_of(mesh_shape="x:2", layout="vocab:x,d_ff:x")
    assert model.exact_match(QUESTIONS) == 0.0
    result = mtf.models.finetune(
        model, QUESTIONS * 4, epochs=60, length=8, batch_size=4, lora="all:4", learning_rate=0.02,
        eval_examples=QUESTIONS, exact_match=True, progress=False,
    )  # fmt: skip
    assert result.step == 120
    [evaluation] = result.evaluations
    assert evaluation["exact_match"] == 1.0
    np.testing.assert_allclose(evaluation["perplexity"], np.exp(evaluation["loss"]), rtol=1e-5)
    assert model.generate([[5, 6]], 3) == [[70, 71, 2]]


def test_answers_of_any_length():
    """Prompts have room for the longest one, and what is too long is told before a training."""
    long = [{"ids": [5, 6, *range(10, 90), 2], "weights": [0, 0, *[1] * 81]}]
    model = model_of()
    result = mtf.models.finetune(
        model, long * 2, 100, length=83, batch_size=1, learning_rate=0.02, lora="all:4",
        eval_examples=long, exact_match=True, progress=False,
    )  # fmt: skip
    assert result.evaluations[-1]["exact_match"] == 1.0
    text = "exact_match: prompt 0 with 9 new ids takes 133 positions, .* a table of 128"
    questions = [{"ids": [5] * 125 + [6], "weights": [0] * 125 + [1]}]
    with pytest.raises(ValueError, match=text):
        tuned(model_of("gpt2"), length=126, eval_examples=questions, exact_match=True)


@pytest.mark.parametrize(
    "options, text",
    [
        ({"lora": "q,v"}, "lora='q,v' is no list of parts with a rank, such as 'q,v:8'"),
        ({"lora": "q:8:0.0"}, "lora='q:8:0.0' is no list .* alpha above 0, as in 'q,v:8:16'"),
        ({"learning_rate": float("nan")}, "fit: learning_rate=nan is no finite number: one step"),
        ({"learning_rate": -1}, "fit: learning_rate=-1 is below 0, so that steps would make the l"),
        ({"pack": "no"}, "examples: pack='no' is neither True nor False"),
        ({"recompute": "x"}, "finetune: recompute='x' is neither True nor False"),
        ({"exact_match": "loss"}, "finetune: exact_match='loss' is neither True nor False"),
        ({"shuffle": "no"}, "fit: shuffle='no' is neither True nor False"),
        ({"directory": 5}, "fit: directory=5 is no path of a folder; leave it out for none"),
        ({"balance": float("nan")}, "balance=nan must be a number of 0 or more, by which"),
        (
            {"eval_examples": "no.jsonl"},
            "examples: 'no.jsonl' cannot be read as a JSONL file: .*No",
        ),
        ({"eval_examples": "/"}, "examples: '/' cannot be read as a JSONL file: .*Is a directory"),
        ({"lora": "runs/adapters"}, "lora='runs/adapters' is no folder of adapters"),
        ({"lora": "q,up:8"}, "the model has no up; it has k, o, q, v, wi_0, wi_1, wo"),
        ({"save_adapters": "x"}, "save_adapters is for adapters; give lora"),
        ({"lora": "q:2", "save_adapters": 5}, "save_adapters=5 is no path of a folder"),
        ({"lora": "q:2", "save_adapters": __file__}, "save_adapters '.*' cannot be written: .* in"),
        # Nothing is allocated for them before.
        (
            {"lora": "q:1000000000000"},
            "has rank 1000000000000, and no kernel needs more than 65536",
        ),
        ({"length": 10**12}, "examples: length=1000000000000 must be 10000000 or less"),
        ({"lora": "q:2", "freeze": "a"}, "leave freeze out"),
        ({"freeze": "decoder"}, "freeze='decoder' is found in none of the names of the weights"),
        ({"freeze": ""}, "freeze='' is found in all of the names"),
        ({"epochs": 1}, "give steps or epochs, one of them"),
        ({"exact_match": True}, "exact_match is of eval_examples, which are not given"),
        ({"eval_every": 2}, "eval_every is of eval_examples, which are not given"),
        (
            {"exact_match": True, "eval_examples": EXAMPLES},
            "example 0 of the list has no prompt with an answer at its end",
        ),
    ],
)
def test_mistakes(options, text):
    with pytest.raises(ValueError, match=text):
        tuned(model_of(), **options)


def test_weights_that_the_last_step_made_no_numbers(tmp_path):
    """The model keeps those that it had, and there are no checkpoints to say it."""
    model = model_of()
    before = model.weights
    options = {"learning_rate": lambda step: tf.constant(float("nan"))}
    text = "after step 1, whose loss was a finite number, .* are not numbers, or infinite"
    for directory in (None, str(tmp_path)):
        with pytest.raises(mtf.train.NotANumberError, match=text):
            tuned(model, 1, directory=directory, **options)
    for name, value in before.items():
        np.testing.assert_array_equal(model.weights[name], value)


def test_what_is_no_model_or_has_no_weights(tmp_path):
    encoder = mtf.models.from_pretrained(FIXTURES.parent / "encoders" / "bert")
    for other in (encoder, str(FIXTURES / "llama")):
        with pytest.raises(ValueError, match="finetune: model is a LanguageModel, such as"):
            tuned(other)
    config = json.loads((FIXTURES / "llama" / "config.json").read_text())
    new = mtf.models.from_config(config)
    with pytest.raises(ValueError, match="finetune: with lora: the model has no weights yet"):
        tuned(new, lora="q:2")
    with pytest.raises(ValueError, match="merge: the model has no weights yet"):
        new.merge(tmp_path)
    with pytest.raises(ValueError, match=r"no adapter_config.json in .*: it is no folder of adap"):
        model_of().merge(tmp_path)
    with pytest.raises(ValueError, match="merge: path is that of a folder of adapters, not None"):
        model_of().merge(None)
    with pytest.raises(ValueError, match=r"save_pretrained: path is that of a folder, .* not None"):
        model_of().save_pretrained(None)
    with pytest.raises(
        ValueError, match=r"save_pretrained: path '.*' cannot be written: .* in the"
    ):
        model_of().save_pretrained(__file__)
    losses = tuned(new, 20, log_every=1).losses  # without lora it is trained from the beginning
    assert new.weights and losses[-1] < losses[0]


def test_a_rule_of_adapters_splits_nothing_else():
    """Calls of a model have no adapters, and do not tell of its rule."""
    mesh = {"mesh_shape": "x:2", "layout": "lora:x"}
    with mtf.strict():
        model = mtf.models.from_pretrained(FIXTURES / "llama", **mesh)
        model.logits([[1, 2]])
        tuned(model, 1, lora="q:2")


@pytest.mark.parametrize("layout", ["batch:x", "batch:x,d_ff:y"])
def test_on_another_mesh_than_the_models(layout):
    """Where the model's layout leaves processors idle in attention, and that of training does not."""
    wanted = tuned(model_of(), batch_size=2)
    model = model_of(mesh_shape="x:2", layout="vocab:x")
    found = tuned(model, batch_size=2, mesh_shape="x:2,y:2", layout=layout, zero=3, zero_axis="x")
    np.testing.assert_allclose(found.losses, wanted.losses, rtol=1e-5)
    assert str(model.model.layout) == str(model_of(mesh_shape="x:2", layout="vocab:x").model.layout)


def test_what_peft_cannot_say(tmp_path):
    with pytest.raises(ValueError, match=r"c_attn.weight cannot be written for PEFT: several"):
        tuned(model_of("gpt2"), lora="q,v:2", save_adapters=tmp_path)
    with pytest.raises(ValueError, match=r"sparse_moe.gate.weight cannot be written for PEFT: it"):
        tuned(model_of("mixtral"), lora="q,top_n_gating:2", save_adapters=tmp_path)


def test_all_adapters_of_a_mixture_of_experts(tmp_path):
    """PEFT reads those of linear layers alone: a router is none in transformers 5."""
    tuned(model_of("qwen2_moe"), 1, lora="all:2", save_adapters=tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert set(config["target_modules"]) == {
        "q_proj", "k_proj", "v_proj", "o_proj", "shared_expert_gate",
        *(f"mlp.shared_expert.{name}_proj" for name in ("gate", "up", "down")),
    }  # fmt: skip


def test_adapters_of_one_layer_are_of_it_alone(tmp_path):
    """Modules that are named in the file, and have no adapter there, would get one by PEFT."""
    tuned(model_of(), 1, lora="q,wi_0:2", save_adapters=tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    tensors = safetensors.numpy.load_file(file)
    kept = {n: x for n, x in tensors.items() if ".layers.0." not in n or "gate_proj" in n}
    safetensors.numpy.save_file(kept, file)
    tuned(model_of(), 1, lora=tmp_path, save_adapters=tmp_path / "again")
    config = json.loads((tmp_path / "again" / "adapter_config.json").read_text())
    assert config["target_modules"] == ["gate_proj", "model.layers.1.self_attn.q_proj"]


def test_damaged_adapters(tmp_path):
    tuned(model_of(), 1, lora="q:2", save_adapters=tmp_path)
    model = model_of()
    config = json.loads((tmp_path / "adapter_config.json").read_text())

    def refused(text, **fields):
        (tmp_path / "adapter_config.json").write_text(json.dumps({**config, **fields}))
        with pytest.raises(ValueError, match=text):
            model.merge(tmp_path)

    refused("has use_dora, and is of no plain LoRA", use_dora=True)
    refused(r"lora_A.weight has the shape \[2, 24\] instead of \[3, 24\], with the rank r=3", r=3)
    refused("adapter_config.json has r='2', no positive integer", r="2")
    refused("adapter_config.json has lora_alpha=nan, no finite number", lora_alpha=float("nan"))
    refused("has lora_alpha=None, no finite number", lora_alpha=None)
    # PEFT changes the weights of the model, too, when it reads such.
    refused("has init_lora_weights='pissa', and is of no plain LoRA", init_lora_weights="pissa")
    refused("has lora_bias, use_qalora, and is of no", lora_bias=True, use_qalora=True)
    refused("has bias='lora_only', and is of no plain LoRA", bias="lora_only")
    refused("has target_parameters, and is of no", target_parameters=["mlp.experts.gate_up_proj"])
    refused("has trainable_token_indices, and is of", trainable_token_indices=[1, 2])
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="has no place in the model; adapters are of"):
        model_of("gpt2").merge(tmp_path)
    tensors = safetensors.numpy.load_file(tmp_path / "adapter_model.safetensors")
    tensors.pop(next(name for name in tensors if "lora_B" in name))
    safetensors.numpy.save_file(tensors, tmp_path / "adapter_model.safetensors")
    refused("has not both parts of each adapter")
    safetensors.numpy.save_file(
        {name: x.astype(np.int32) for name, x in tensors.items()},
        tmp_path / "adapter_model.safetensors",
    )
    refused("is of dtype I32, but weights are of F64")
    (tmp_path / "adapter_model.safetensors").unlink()
    refused("no adapter_model.safetensors in .*, though there is adapter_config.json")
    for name, value in model_of().weights.items():
        np.testing.assert_array_equal(model.weights[name], value)


def test_scales_of_peft(tmp_path):
    """What a file leaves out is 8, as it is in PEFT; and ranks may be stabilized by their root."""
    tuned(model_of(), 1, lora="q:4:12", save_adapters=tmp_path)
    file = tmp_path / "adapter_config.json"
    config = json.loads(file.read_text())

    def scale(**fields):
        kept = {name: x for name, x in {**config, **fields}.items() if x is not None}
        file.write_text(json.dumps(kept))
        return _lora.read(model_of()._form, tmp_path)[0].scale

    assert scale() == 3.0
    assert scale(init_lora_weights="gaussian", use_rslora=True) == 6.0
    assert scale(lora_alpha=None) == 2.0
    assert scale(lora_alpha=0) == 0.0


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"recompute": True}, {"microbatches": 2}], ids=str)
def test_experts_are_balanced_if_the_model_says_so(options):
    """As `model.loss` does: with `output_router_logits` of config.json."""
    plain, balanced, fresh = (model_of("mixtral") for _ in range(3))
    balanced.config |= {"output_router_logits": True, "router_aux_loss_coef": 0.5}
    arguments = {"steps": 1, "batch_size": 12, "pack": False, "shuffle": False, **options}
    without, added = (tuned(model, **arguments).losses[0] for model in (plain, balanced))
    rows = fresh.examples(EXAMPLES, 8, pack=False)
    halves = [slice(i, None, 2) for i in range(2)] if "microbatches" in options else [slice(None)]

    def balance_of(half):
        data = {n: a[half] for n, a in rows.items()}
        result = mtf.train.fit(
            functools.partial(fresh.loss, figures=True), data, steps=1, progress=False,
            dims=dict.fromkeys(data, f"batch:{len(data['ids'])},length:8"), learning_rate=0.0,
            optimizer=mtf.optimize.SgdOptimizer, init_checkpoint=fresh.weights,
        )  # fmt: skip
        return result.history[0]["balance_loss"]

    balance = np.mean([balance_of(half) for half in halves])
    np.testing.assert_allclose(added - without, 0.5 * balance, rtol=1e-4)


@pytest.mark.parametrize(
    "arguments, text",
    [
        ({"batch_size": 0}, "batch_size=0 must be an integer of at least 1"),
        ({"batch_size": 2.0}, "batch_size=2.0 must be an integer of at least 1"),
        ({"steps": None, "epochs": 0}, "epochs=0 must be a number above 0"),
        ({"steps": None, "epochs": float("nan")}, "epochs=nan must be a number above 0"),
        ({"lora": 4}, "lora=4 is no text, such as 'q,v:8', and no directory of adapters"),
        ({"freeze": "("}, r"freeze='\(' is no regular expression: missing \)"),
        ({"length": "8"}, "examples: length='8' must be an integer of at least 2"),
        ({"schedule": "cos"}, "schedule='cos' is not known; give 'linear' or 'cosine', or None"),
        ({"warmup_steps": 2, "learning_rate": abs}, "for a learning_rate that is a number, and"),
        (
            {"warmup_steps": 2, "schedule": "linear"},
            "warmup_steps=2 must be less than total_steps=1",
        ),
    ],
)
def test_arguments_by_mistake(arguments, text):
    model = mtf.models.from_pretrained(FIXTURES / "llama")
    with pytest.raises(ValueError, match=text):
        mtf.models.finetune(
            model, [{"ids": [1, 2, 3]}] * 8, pack=False, **{"steps": 1, "length": 8, **arguments}
        )


@pytest.mark.parametrize(
    "arguments, text",
    [
        ({"batch": 4}, "finetune has no argument 'batch'; did you mean batch_size"),
        ({"warmup": 4}, "finetune has no argument 'warmup'."),
        ({"keep_bset": "loss"}, "'keep_bset'; did you mean keep_best"),  # of fit
        ({"dims": "batch:4"}, "'dims': batch_size and length are the sizes of a batch"),
        ({"num_epochs": 3}, "'num_epochs': give epochs"),
        ({"lr_scheduler_type": "cosine"}, "'lr_scheduler_type': give schedule, such as 'cosine'"),
        ({"options": {}}, "finetune has no argument 'options'"),
    ],
)
def test_arguments_that_there_are_not(arguments, text):
    model = mtf.models.from_pretrained(FIXTURES / "llama")
    with pytest.raises(TypeError, match=text):
        mtf.models.finetune(model, [{"ids": [1, 2, 3]}], 1, **arguments)


@pytest.mark.parametrize(
    "arguments, rates",
    [
        ({"schedule": "linear", "warmup_steps": 2}, [0.0, 0.5, 1.0, 0.75, 0.5, 0.25]),
        ({"schedule": "cosine"}, [0.5 + 0.5 * np.cos(np.pi * step / 6) for step in range(6)]),
        ({"warmup_steps": 4}, [0.0, 0.25, 0.5, 0.75, 1.0, 1.0]),
    ],
)
def test_schedules(arguments, rates):
    """They end at the last step, also where epochs say how many steps there are."""
    model = mtf.models.from_pretrained(FIXTURES / "llama")
    result = mtf.models.finetune(
        model, [{"ids": [5, 7, 9]}] * 4, epochs=3, length=8, batch_size=2, pack=False,
        learning_rate=1e-3, log_every=1, progress=False, **arguments,
    )  # fmt: skip
    found = [record["learning_rate"] for record in result.history]
    np.testing.assert_allclose(found, 1e-3 * np.array(rates), atol=1e-9)


def test_examples_that_fill_no_batch():
    model = mtf.models.from_pretrained(FIXTURES / "llama")
    text = "fill 2 rows of length=8, fewer than one batch, batch_size=4: .* or give pack=False"
    with pytest.raises(ValueError, match=text):
        mtf.models.finetune(model, [{"ids": [1, 2, 3]}] * 4, 1, length=8, batch_size=4)


def test_examples_of_a_generator():
    """Those to evaluate are gone through twice."""
    rows = [{"ids": [5, 7, 9], "weights": [0, 0, 1]}] * 2
    found = [
        mtf.models.finetune(
            mtf.models.from_pretrained(FIXTURES / "llama"),
            kind(rows),
            1,
            eval_examples=kind(rows),
            exact_match=kind is iter,
            length=8,
            batch_size=1,
            pack=False,
            progress=False,
        )
        for kind in (list, iter)
    ]
    assert found[0].evaluations[-1]["loss"] == found[1].evaluations[-1]["loss"]
    assert "exact_match" in found[1].evaluations[-1]


@pytest.mark.slow
def test_the_command(tmp_path, capsys, eight_devices):
    """It prints the same, and writes the same model, on devices of TensorFlow and of JAX."""
    lines = tmp_path / "questions.jsonl"
    lines.write_text("".join(f"{json.dumps(example)}\n" for example in QUESTIONS))
    printed, written = [], []
    places = {
        "one": [],
        "placement": ["--mesh_shape=x:2,y:2", "--layout=batch:x,vocab:y,d_ff:y", "--zero=3", "--zero_axis=x"],
        "pjrt": ["--mesh_shape=x:2,y:2", "--layout=batch:x,vocab:y,d_ff:y", "--mesh_impl=pjrt"],
        "simd": ["--mesh_shape=x:2,y:2", "--layout=batch:x,vocab:y,d_ff:y", "--zero=3", "--zero_axis=x", "--mesh_impl=simd"],
        "ways": ["--ways=zero3:2,tensor:2"],
        "pipeline": ["--mesh_shape=x:2", "--layout=stages:x", "--num_microbatches=1"],
    }  # fmt: skip
    for name, place in places.items():
        command = [f"--model={FIXTURES / 'llama'}", f"--train_file={lines}", f"--eval_file={lines}"]
        command += ["--steps=80", "--length=5", "--batch_size=2", "--learning_rate=0.01"]
        command += ["--exact_match", "--no_pack", f"--output={tmp_path / name}", *place]
        assert finetune.main(command) == 0
        told, where = capsys.readouterr().out.splitlines()
        assert where == f"The model is in {tmp_path / name}"
        printed.append(dict(part.split(" ") for part in told.split(", ")))
        written.append(safetensors.numpy.load_file(tmp_path / name / "model.safetensors"))
    for found, weights in zip(printed, written):
        assert found["eval_exact_match"] == "100.0%" and found.keys() == printed[0].keys()
        for key in ("eval_loss", "eval_perplexity"):
            assert float(found[key]) == pytest.approx(float(printed[0][key]), rel=0.02)
        for name, value in weights.items():
            np.testing.assert_allclose(value, written[0][name], atol=0.02)
