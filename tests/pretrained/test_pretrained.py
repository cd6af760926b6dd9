"""Models of Hugging Face folders, against what transformers computed for them."""

import functools
import json
import pathlib
import shutil

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.models._weights import names_of, turned

FIXTURES = pathlib.Path(__file__).parent / "fixtures"
NAMES = sorted(path.name for path in FIXTURES.iterdir())
TENSOR = {"mesh_shape": "x:2,y:2", "layout": "batch:x,vocab:y,d_ff:y,heads:y?"}
PLACES = {
    "whole": {},
    "tensor": TENSOR,
    "fully_sharded": {"mesh_shape": "x:2,y:2", "layout": "batch:x", "zero": 3, "zero_axis": "x+y"},
    "sequence": {"mesh_shape": "x:2,y:2", "layout": "length:x,d_ff:y,vocab:y"},
    "simd": {**TENSOR, "mesh_impl": "simd", "zero": 3, "zero_axis": "x"},
}
TRAINED = {
    **PLACES,
    "simd": {"mesh_shape": "x:2", "layout": "batch:x", "simd": True, "zero": 3},
    "pjrt": {"mesh_shape": "x:2,y:2", "layout": "batch:x,d_ff:y,vocab:y", "mesh_impl": "pjrt"},
}
# Each family is computed split by tensors; these in all places.
EVERYWHERE = ("gemma2", "gpt_neox", "llama", "mixtral", "opt_350m")
EXPERTS = ("mixtral", "qwen2_moe", "qwen3_moe")


def cells(places):
    found = [(name, place) for place in places for name in NAMES]
    return [(n, p) for n, p in found if n in EVERYWHERE or p == "tensor"]


def where(name, place, places=PLACES):
    """Returns the arguments of a place; of experts, only one that all tokens go to has `d_ff`."""
    options = dict(places[place])
    if name.startswith(EXPERTS) and "layout" in options:
        rules = "experts:y?" if name in ("mixtral", "qwen3_moe") else "experts:y?,d_ff:y"
        options["layout"] = options["layout"].replace("d_ff:y", rules)
    return options


PROMPTS = [[5, 9, 0, 33], [7], [1, 80, 81, 82, 83, 84, 85, 86, 87, 88, 89]]
SHAPE = "batch:2,length:24"


def expected(name):
    return np.load(FIXTURES / name / "expected.npz")


def close(found, wanted):
    # Gradients of biases of keys are 0, and are rounded to something else.
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-4 * np.abs(wanted).max() + 1e-7)


@pytest.mark.slips  # a model with as many keys as queries has no dimension query_heads
@pytest.mark.slow_but(2)
@pytest.mark.parametrize("name, place", cells(PLACES))
def test_logits_and_ids(name, place):
    wanted = expected(name)
    model = mtf.models.from_pretrained(FIXTURES / name, **where(name, place))
    close(model.logits(wanted["ids"]).numpy(), wanted["logits"])
    # In one batch, of prompts that differ in length, one of them with the id 0.
    ids = [[i for i in row if i >= 0] for row in wanted["generated"].tolist()]
    assert model.generate(PROMPTS, max_new_tokens=32) == ids
    assert model.generate(PROMPTS[:2], max_new_tokens=3) == [row[:3] for row in ids[:2]]


@pytest.mark.slips
@pytest.mark.slow
@pytest.mark.parametrize("name", EXPERTS)
def test_one_prompt_of_a_mixture_of_experts(name):
    """Its row is on all processors, where those of several prompts would be split."""
    model = mtf.models.from_pretrained(FIXTURES / name, **where(name, "tensor"))
    assert model.generate(PROMPTS[1:2], 3) == [expected(name)["generated"][1, :3].tolist()]


@pytest.mark.slips
@pytest.mark.slow_but(2)
@pytest.mark.parametrize("name, place", cells(TRAINED))
def test_training_and_writing_back(name, place, tmp_path, request):
    if place == "pjrt":
        request.getfixturevalue("eight_devices")
    wanted = expected(name)
    options = where(name, place, TRAINED)
    mesh = {key: options[key] for key in ("mesh_shape", "layout") if options}
    model = mtf.models.from_pretrained(FIXTURES / name, **mesh)
    result = mtf.train.fit(
        model.loss, wanted["ids"].astype(np.int32), steps=1, dims=SHAPE, progress=False,
        optimizer=mtf.optimize.SgdOptimizer(1.0), init_checkpoint=model.weights, **options,
    )  # fmt: skip
    np.testing.assert_allclose(result.losses[0], wanted["loss"], rtol=1e-5)
    for weight in model._form.weights:
        step = model.weights[weight.ours] - result.variables[weight.ours]
        theirs = [wanted[f"gradient/{n}"] for n in names_of(weight, model._form.sizes)]
        gradient = turned(weight, theirs, model._form.sizes)
        close(step, gradient)

    model.save_pretrained(tmp_path / "same")
    for file in ("model.safetensors", "config.json"):
        same, before = (p / file for p in (tmp_path / "same", FIXTURES / name))
        if file == "config.json":
            assert json.loads(same.read_text()) == json.loads(before.read_text())
        else:
            assert same.read_bytes() == before.read_bytes()
    before = model.logits(wanted["ids"]).numpy()
    model.assign(result.variables)
    model.save_pretrained(tmp_path / "trained")
    again = mtf.models.from_pretrained(tmp_path / "trained")
    assert all(np.array_equal(again.weights[v], result.variables[v]) for v in again.weights)
    after = again.logits(wanted["ids"]).numpy()
    np.testing.assert_allclose(model.logits(wanted["ids"]), after, atol=1e-4)
    assert np.abs(after - before).max() > 0.1


@pytest.mark.slow_but(1)
@pytest.mark.parametrize("place", ["whole", "tensor", "sequence"])
@pytest.mark.parametrize("name", ["llama_dynamic", "phi3_long"])
def test_positions_beyond_those_of_training(name, place):
    """Of longrope and dynamic, which have other frequencies for them."""
    wanted = np.load(FIXTURES / name / "beyond.npz")
    model = mtf.models.from_pretrained(FIXTURES / name, **where(name, place))
    close(model.logits(wanted["ids"]).numpy(), wanted["logits"])
    found = model.generate(wanted["ids"].tolist(), max_new_tokens=16, stop=-1)
    assert found == wanted["generated"].tolist()
    if name == "llama_dynamic":  # whose keys are kept as they were turned by then
        # Three rows on two parts: what fills the batch up is no longest row.
        rows = wanted["ids"][[0, 1, 0]].tolist()
        assert model.generate(rows, max_new_tokens=16, stop=-1) == [*found, found[0]]
        return
    # What passes the border is of one kind from its beginning, as states are kept.
    begin = wanted["ids"][:1, :60]
    [added] = model.generate(begin.tolist(), max_new_tokens=8, stop=-1)
    whole = np.concatenate([begin[0], added, wanted["ids"][0, :12]])
    best = model.logits(whole[None]).numpy()[0, 59:67].argmax(-1)
    assert added == best.tolist()


def a_step(model, loss, rows, **options):
    dims = dict.fromkeys(rows, SHAPE) if isinstance(rows, dict) else SHAPE
    return mtf.train.fit(
        loss, rows, steps=1, dims=dims, progress=False,
        optimizer=mtf.optimize.SgdOptimizer(1.0), init_checkpoint=model.weights, **options,
    )  # fmt: skip


def padded_rows(name, lengths):
    """Returns the rows of a fixture as `examples` does, those behind the lengths being padding."""
    there = (np.arange(24) < np.array(lengths)[:, None]).astype(np.int32)
    places = np.tile(np.arange(24, dtype=np.int32), [2, 1])
    ids = expected(name)["ids"].astype(np.int32)
    return {"ids": ids, "weights": there.astype("f"), "sequence_id": there, "position": places}


@pytest.mark.slow_but(1)
@pytest.mark.parametrize("place", ["whole", "tensor", "sequence"])
@pytest.mark.parametrize("rows", ["padded", "whole"])
@pytest.mark.parametrize("name", EXPERTS)
def test_balance_of_experts(name, rows, place):
    """Over tokens that are no padding, on other meshes than that of the model, too."""
    wanted = np.load(FIXTURES / name / "balance.npz")
    model = mtf.models.from_pretrained(FIXTURES / name)
    loss = functools.partial(model.loss, figures=True)
    data, options = padded_rows(name, wanted[f"{rows}/lengths"]), where(name, place)
    without, added = (
        a_step(model, functools.partial(loss, balance=balance), data, **options)
        for balance in (None, 1.0)
    )
    [figures] = added.history
    np.testing.assert_allclose(figures["balance_loss"], wanted[rows], rtol=1e-5)
    np.testing.assert_allclose(added.losses[0] - without.losses[0], wanted[rows], rtol=1e-5)
    layer = "transformer/block_000/layer_001/MoE1D/top_n_gating/kernel"
    gradient = without.variables[layer] - added.variables[layer]
    close(gradient, wanted[f"{rows}/gradient"].T)
    experts = gradient.shape[1]
    assert figures["dropped"] == 0 and 1 / experts < figures["busiest_expert"] < 1
    assert len(without.history) == 1 and without.history[0].keys() == figures.keys()


@pytest.mark.slow
def test_balance_in_microbatches():
    """It is the mean of the microbatches', of which each balances its own tokens."""
    model = mtf.models.from_pretrained(FIXTURES / "mixtral")
    rows = padded_rows("mixtral", [24, 24])
    loss = functools.partial(model.loss, balance=1.0, figures=True)
    halves = [
        a_step(model, loss, {n: np.tile(a[i : i + 1], [2, 1]) for n, a in rows.items()})
        for i in range(2)
    ]
    both = a_step(model, loss, rows, microbatches=2)
    np.testing.assert_allclose(both.losses[0], np.mean([h.losses[0] for h in halves]), rtol=1e-5)
    for name in model.weights:
        means = np.mean([half.variables[name] for half in halves], axis=0)
        close(model.weights[name] - both.variables[name], model.weights[name] - means)
    plain = a_step(model, model.loss, rows["ids"], microbatches=2)
    np.testing.assert_allclose(plain.losses[0], expected("mixtral")["loss"], rtol=1e-5)


@pytest.mark.slow_but(1)
@pytest.mark.parametrize("length", [67, 70])
def test_experts_in_microbatches_of_any_length(length):
    """Groups of tokens are within rows, so that a microbatch computes what the batch does."""
    model = mtf.models.from_pretrained(FIXTURES / "mixtral")
    ids = np.random.RandomState(0).randint(0, 96, [4, length]).astype(np.int32)
    found = [
        mtf.train.fit(
            functools.partial(model.loss, figures=True), ids, steps=1, dims=f"batch:4,length:{length}",
            progress=False, init_checkpoint=model.weights, microbatches=number, learning_rate=1.0,
            optimizer=mtf.optimize.SgdOptimizer,
        )
        for number in (1, 4)
    ]  # fmt: skip
    for one in found[1:]:
        np.testing.assert_allclose(one.losses, found[0].losses, rtol=1e-5)
        for name in model.weights:
            close(
                model.weights[name] - one.variables[name],
                model.weights[name] - found[0].variables[name],
            )


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, place, repeats, recompute",
    [
        ("mixtral", {"mesh_shape": "x:2,y:2", "layout": "stages:x,experts:y,batch:y"}, 1, False),
        ("mixtral", {"mesh_shape": "x:2", "layout": "stages:x"}, 1, True),
        ("qwen3_moe", {}, 2, False),
        ("qwen2_moe", {"mesh_shape": "x:2", "layout": "stages:x", "simd": True}, 1, False),
    ],
)
def test_balance_in_a_pipeline(name, place, repeats, recompute):
    """What routers do is that of all microbatches, in each layer."""
    config = json.loads((FIXTURES / name / "config.json").read_text())
    config.pop("layer_types", None)
    model = mtf.models.from_config({**config, "num_hidden_layers": 4})
    rng, sizes = np.random.RandomState(0), model._form.sizes
    model.assign({
        w.ours: rng.normal(size=[sizes[d] for d in w.dims.split()], scale=0.25).astype("f")
        for w in model._form.weights
    })  # fmt: skip
    rows = {n: np.tile(a, [2, 1]) for n, a in padded_rows(name, [24, 17]).items()}
    rows["ids"][2:] = rows["ids"][2:, ::-1]
    loss = functools.partial(model.loss, balance=0.5, figures=True)
    shape = dict.fromkeys(rows, "batch:4,length:24")

    def step(**options):
        return mtf.train.fit(
            loss, rows, steps=1, dims=shape, progress=False, init_checkpoint=model.weights,
            optimizer=mtf.optimize.SgdOptimizer(1.0), **options,
        )  # fmt: skip

    wanted = step()
    stack = model.model.layer_stack
    stack.recompute_grads = recompute
    model.model.layer_stack = mtf.transformer.transformer.PipelinedLayerStack.of(
        stack, num_stages=2, num_microbatches=2, num_repeats=repeats
    )
    found = step(**place)
    np.testing.assert_allclose(found.losses, wanted.losses, rtol=1e-5)
    for figure in ("balance_loss", "busiest_expert", "dropped"):
        np.testing.assert_allclose(
            found.history[0][figure], wanted.history[0][figure], rtol=1e-5, atol=1e-6
        )
    for weight in model.weights:
        gradient = model.weights[weight] - wanted.variables[weight]
        close(model.weights[weight] - found.variables[weight], gradient)


PIPELINES = [
    ("llama", {"mesh_shape": "x:2,y:2", "layout": "stages:x,batch:y"}),
    ("llama", {"mesh_shape": "x:4", "layout": "stages:x", "num_microbatches": 4}),
    ("llama", {"mesh_shape": "x:2,y:2", "layout": "stages:x,heads:y?,d_ff:y,vocab:y"}),
    ("llama", {"mesh_shape": "x:2", "layout": "stages:x", "num_repeats": 2, "zero": 3}),
    ("llama", {"num_stages": 4, "num_microbatches": 2}),
    ("llama", {"mesh_shape": "x:2,y:2", "layout": "stages:x,batch:y", "mesh_impl": "pjrt"}),
    ("gpt2", {"mesh_shape": "x:2,y:2", "layout": "stages:x,batch:y"}),
    ("gpt_neox", {"mesh_shape": "x:2", "layout": "stages:x"}),
    ("gemma2", {"mesh_shape": "x:2,y:2", "layout": "stages:x,batch:y"}),
    ("mixtral", {"mesh_shape": "x:2,y:2", "layout": "stages:x,experts:y,batch:y"}),
]


def of_four_blocks(name, tmp_path):
    """Returns a folder with a model of random weights."""
    config = json.loads((FIXTURES / name / "config.json").read_text())
    blocks = "n_layer" if name == "gpt2" else "num_hidden_layers"
    types = config.pop("layer_types", [])
    model = mtf.models.from_config(
        {**config, blocks: 4, **({"layer_types": types * 2} if types else {})}
    )
    rng, sizes = np.random.RandomState(0), model._form.sizes
    model.assign({
        w.ours: rng.normal(size=[sizes[d] for d in w.dims.split()], scale=0.25).astype("f")
        for w in model._form.weights
    })  # fmt: skip
    model.save_pretrained(tmp_path / name)
    return tmp_path / name


@pytest.mark.slow_but(1)
@pytest.mark.parametrize("name, place", PIPELINES)
def test_a_pipeline(name, place, tmp_path, request):
    """Calls, losses and gradients are those of layers in a row, and so are the files."""
    if "mesh_impl" in place:
        request.getfixturevalue("eight_devices")
    folder = of_four_blocks(name, tmp_path)
    plain = mtf.models.from_pretrained(folder)
    model = mtf.models.from_pretrained(folder, **place)
    stack = model.model.layer_stack
    assert stack.schedule.num_stages == (4 if 4 in place.values() or "x:4" in place.values() else 2)
    ids = np.arange(4 * 12).reshape(4, 12).astype(np.int32) % 90
    np.testing.assert_allclose(model.logits(ids), plain.logits(ids), atol=1e-5)
    assert model.generate(PROMPTS, 6) == plain.generate(PROMPTS, 6)

    def step(of, **options):
        return mtf.train.fit(
            of.loss, ids, steps=1, dims="batch:4,length:12", progress=False, seed=0,
            init_checkpoint=of.weights, optimizer=mtf.optimize.SgdOptimizer(1.0), **options,
        )  # fmt: skip

    wanted, found = step(plain), step(model, **model._trained_at.of_fit)
    np.testing.assert_allclose(found.losses, wanted.losses, rtol=1e-5)
    for weight, before in model.weights.items():
        close(before - found.variables[weight], before - wanted.variables[weight])
    model.save_pretrained(tmp_path / "again")
    for file in ("config.json", "model.safetensors"):
        assert (folder / file).read_bytes() == (tmp_path / "again" / file).read_bytes()


@pytest.mark.parametrize(
    "arguments, text",
    [
        ({"num_stages": 3}, r"num_stages=3 does not divide the 4 layers.*choose num_stages from"),
        ({"num_stages": 4}, "differs from .*stages of 1 layers compute the same function"),
        ({"mesh_shape": "x:4", "layout": "stages:x", "num_stages": 2}, "2 is no multiple of the 4"),
        ({"num_microbatches": 2}, "num_microbatches and num_repeats are of a pipeline"),
        ({"num_repeats": 2}, "give num_stages, or a layout that splits them"),
        ({"num_stages": 2.0}, r"num_stages=2\.0 must be an integer of at least 1"),
        (
            {"num_stages": 2, "num_microbatches": 0},
            "num_microbatches=0 must be an integer of at least 1",
        ),
    ],
)
def test_pipelines_that_there_are_not(arguments, text):
    with pytest.raises(ValueError, match=text):
        mtf.models.from_pretrained(FIXTURES / "llama", **arguments)


def test_no_pipeline_of_an_encoder():
    encoders = pathlib.Path(__file__).parent / "encoders"
    with pytest.raises(ValueError, match="num_stages=2, and the model is an encoder"):
        mtf.models.from_pretrained(next(encoders.iterdir()), num_stages=2)


def test_balance_where_it_is_asked_for(tmp_path):
    """As in transformers, config.json may ask for it."""
    asked = a_copy(tmp_path, "mixtral", output_router_logits=True, router_aux_loss_coef=0.5)
    model = mtf.models.from_pretrained(asked)
    losses = a_step(model, model.loss, padded_rows("mixtral", [24, 24])["ids"]).losses
    wanted = np.load(FIXTURES / "mixtral" / "balance.npz")["whole"]
    np.testing.assert_allclose(losses[0], expected("mixtral")["loss"] + 0.5 * wanted, rtol=1e-5)
    dense = mtf.models.from_pretrained(FIXTURES / "llama")
    with pytest.raises(
        ValueError, match=r"balance=0.5 and figures=False are for models with .* 'llama' has none"
    ):
        a_step(dense, functools.partial(dense.loss, balance=0.5), padded_rows("llama", [24, 24]))


@pytest.mark.slow
def test_a_new_model(tmp_path):
    config = json.loads((FIXTURES / "qwen3" / "config.json").read_text())
    model = mtf.models.from_config(config, mesh_shape="x:2", layout="batch:x")
    with pytest.raises(ValueError, match="the model has no weights yet; train it"):
        model.save_pretrained(tmp_path)
    # Rows begin at different numbers, or positions would tell what comes next.
    ids = (10 + (np.arange(24) + 3 * np.arange(4)[:, None]) % 12).astype(np.int32)
    result = mtf.train.fit(
        model.loss, ids, steps=60, dims="batch:4,length:24", progress=False, mesh_shape="x:2",
        optimizer=mtf.optimize.AdamWOptimizer(learning_rate=0.02), layout="batch:x",
    )  # fmt: skip
    model.assign(result.variables)
    assert model.generate([[10, 11, 12]], 5) == [[13, 14, 15, 16, 17]]
    model.save_pretrained(tmp_path)
    again = mtf.models.from_pretrained(tmp_path)
    assert again.generate([[15, 16]], 3) == [[17, 18, 19]]


def test_sampling():
    model = mtf.models.from_pretrained(FIXTURES / "llama")
    tf.random.set_random_seed(0)
    first, second = (model.generate(PROMPTS, 8, temperature=1.0, stop=-1) for _ in range(2))
    assert first != second and {len(row) for row in first + second} == {8}
    # Of the one best id, it draws that.
    assert model.generate(PROMPTS, 8, temperature=1.0, top_k=1) == model.generate(PROMPTS, 8)


@pytest.mark.slow
def test_ends_of_texts(tmp_path):
    """The ids of config.json, one or several, of which any ends a text."""
    free = mtf.models.from_pretrained(FIXTURES / "llama").generate(PROMPTS, 12, stop=-1)
    ends = [free[0][4], free[1][7], 0]
    model = mtf.models.from_pretrained(a_copy(tmp_path, eos_token_id=ends))

    def cut(row, ends):
        return row[: min((i for i, x in enumerate(row) if x in ends), default=len(row)) + 1]

    found = model.generate(PROMPTS, 12)
    assert found == [cut(row, ends) for row in free] and len(found[0]) <= 5
    assert model.generate(PROMPTS, 12, stop=free[2][2])[2] == cut(free[2], free[2][2:3])
    none = mtf.models.from_pretrained(a_copy(tmp_path / "none", eos_token_id=None))
    assert none.generate(PROMPTS, 12) == free
    assert none.generate(PROMPTS, 12, stop=np.array(ends)) == found
    for stop in (np.array(ends[0]), np.int64(ends[0])):
        assert none.generate(PROMPTS, 12, stop=stop) == none.generate(PROMPTS, 12, stop=ends[0])


def test_ends_of_generation_config(tmp_path):
    """Folders of models that converse have the ends of turns there, and another one in config."""
    folder = a_copy(tmp_path, eos_token_id=95)
    free = mtf.models.from_pretrained(folder).generate(PROMPTS[:1], 8, stop=-1)[0]
    settings = {"eos_token_id": [94, free[3]], "temperature": 0.6}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    model = mtf.models.from_pretrained(folder)
    assert model.generate(PROMPTS[:1], 8) == [free[: free.index(free[3]) + 1]]
    assert model.generate(PROMPTS[:1], 8, stop=-1) == [free]
    model.save_pretrained(tmp_path / "again")
    assert json.loads((tmp_path / "again" / "generation_config.json").read_text()) == settings
    # Where it tells of none, config.json does.
    (folder / "generation_config.json").write_text("{}")
    assert mtf.models.from_pretrained(folder)._ends_of(None).ids == [95]
    for wrong in ("2", [2, "x"], [2.5], True):
        text = json.dumps({"eos_token_id": wrong})
        (folder / "generation_config.json").write_text(text)
        with pytest.raises(
            ValueError, match=r"generation_config\.json has eos_token_id=.*, neither"
        ):
            mtf.models.from_pretrained(folder)
    (folder / "generation_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"generation_config\.json is damaged, it is no JSON"):
        mtf.models.from_pretrained(folder)


@pytest.mark.slow("simd")
@pytest.mark.parametrize("place", ["whole", "simd"])
def test_bfloat16(place):
    wanted = expected("qwen3")
    model = mtf.models.from_pretrained(FIXTURES / "qwen3", dtype="bfloat16", **PLACES[place])
    assert len(model.log_probs([[5, 9, 0]])[0]) == 2  # another program, with the same variables
    logits = model.logits(wanted["ids"])
    assert logits.dtype == tf.bfloat16
    error = np.abs(logits.numpy().astype(np.float32) - wanted["logits"])
    assert error.max() < 0.1 * np.abs(wanted["logits"]).max()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_weights_keep_their_dtypes(dtype, tmp_path):
    from safetensors.numpy import load_file, save_file

    folder, numbers = a_copy(tmp_path), tf.as_dtype(dtype).as_numpy_dtype
    file = folder / "model.safetensors"
    save_file({n: a.astype(numbers) for n, a in load_file(file).items()}, file, {"format": "pt"})
    model = mtf.models.from_pretrained(folder)
    assert model.logits([[1, 2]]).dtype == tf.float32
    model.save_pretrained(tmp_path / "again")
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == file.read_bytes()


@pytest.mark.slips
@pytest.mark.slow_but(1)
@pytest.mark.parametrize("place", ["whole", "tensor"])
@pytest.mark.parametrize("name", ["qwen2", "qwen2_moe", "qwen3", "qwen3_moe"])
def test_windows_of_qwen(name, place, tmp_path):
    """Of some blocks, by their numbers or by `layer_types`, which is what transformers writes."""
    wanted = np.load(FIXTURES / name / "windows.npz")
    assert np.abs(wanted["logits"] - expected(name)["logits"]).max() > 0.1
    fields = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
    types = ["full_attention", "sliding_attention"]
    types = types[::-1] if name == "qwen2_moe" else types
    for number, layer_types in enumerate([None, types] if name != "qwen3_moe" else [None]):
        fields["layer_types"] = layer_types
        folder = a_copy(tmp_path / f"{number}", name, **fields)
        model = mtf.models.from_pretrained(folder, **where(name, place))
        close(model.logits(wanted["ids"]).numpy(), wanted["logits"])
        found = model.generate([wanted["ids"][0, :9].tolist()], 32, stop=-1)
        assert found == [wanted["generated"].tolist()]


def a_copy(tmp_path, name="llama", **fields):
    """Returns a copy of a folder, with other fields in its config.json."""
    folder = tmp_path / "model"
    shutil.copytree(FIXTURES / name, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **fields}))
    return folder


# (fields of config.json, what is said of them)
CONFIGS = {
    "family": (
        {"model_type": "gpt5"},
        "model_type='gpt5', which is none of llama, mistral, mixtral",
    ),
    "activation": ({"hidden_act": "tanh"}, "the activation 'tanh', which is none of gelu, "),
    "mlp_bias": (
        {"model_type": "mistral", "mlp_bias": True},
        "mlp_bias=True, .* only mlp_bias=False is",
    ),
    "rope": (
        {"rope_parameters": {"rope_type": "proportional", "factor": 2.0}},
        "unknown rotary positions",
    ),
    "rope_of_text": ({"rope_parameters": "linear"}, "unknown rotary positions"),
    "rope_base": ({"rope_parameters": {"rope_theta": "large"}}, "unknown rotary positions"),
    "long_rope": (
        {"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}},
        r"short_factor has the shape \[1\], but there are 3 frequencies",
    ),
    "rope_factor": ({"rope_parameters": {"rope_type": "linear", "factor": "4"}}, "unknown rotary"),
    "rope_nan": (
        {"rope_parameters": {"rope_type": "linear", "factor": float("nan")}},
        "factor=nan of the scaling 'linear' must be above 0, and finite$",
    ),
    "rope_divisors": (
        {
            "rope_parameters": {
                "rope_type": "longrope",
                "short_factor": [1, 1, 0],
                "long_factor": [2] * 3,
            }
        },
        r"short_factor=\[1, 1, 0\] of the scaling 'longrope' must be above 0, and finite",
    ),
    "rope_truncate": (
        {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "truncate": 1.0}},
        "truncate=1.0 of the scaling 'yarn' must be true or false",
    ),
    "rope_order": (
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 4.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
        "low_freq_factor=4.0 of the scaling 'llama3' must be below high_freq_factor=4.0",
    ),
    "large_end": ({"eos_token_id": 2**31}, "eos_token_id=2147483648, neither an id nor"),
    "odd_heads": ({"head_dim": 5}, "heads of 5 channels, of which positions turn 5; .* be even"),
    "odd_part": (
        {"model_type": "phi3", "partial_rotary_factor": 0.5},
        "heads of 6 channels, of which positions turn 3;",
    ),
    "part": (
        {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        r"rotary positions\. partial_rotary_factor=0\.5 is not known for this family: only 1\.0 is",
    ),
    # Nothing is allocated for them before.
    "large_heads": (
        {"head_dim": 10**12},
        "heads of 1000000000000 channels, by head_dim or hidden_size, and no model has more than",
    ),
    "large_model": ({"hidden_size": 10**12, "head_dim": None}, "heads of 250000000000 channels"),
    "ends": ({"eos_token_id": "</s>"}, "config.json has eos_token_id='</s>', neither an id nor"),
    "heads": ({"num_key_value_heads": 3}, "num_attention_heads=4, which is no multiple of .*=3"),
    "number": ({"hidden_size": "24"}, "hidden_size='24', no positive integer"),
    "vocabulary": (
        {"vocab_size": 97},
        r"embed_tokens.weight has shape \[96, 24\] instead of \[vocab=97",
    ),
    "layers": ({"num_hidden_layers": 3}, "missing: model.layers.2.input_layernorm.weight, "),
    "fewer": ({"num_hidden_layers": 1}, "without a place in the model: model.layers.1.input_lay"),
    "untied": ({"tie_word_embeddings": False}, "missing: lm_head.weight"),
    "window": (
        {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": "4"},
        "sliding_window='4', no integer from 1 on",
    ),
    "windows": (
        {"model_type": "qwen3", "use_sliding_window": True, "max_window_layers": -1},
        "max_window_layers=-1, no integer from 0 on",
    ),
    "no windows": (
        {"model_type": "qwen3", "layer_types": ["full_attention", "sliding_attention"]},
        "layer_types with windows, which are off without use_sliding_window=True",
    ),
    "sparse": (
        {"model_type": "qwen2_moe", "decoder_sparse_step": 0},
        "decoder_sparse_step=0, no positive integer",
    ),
    "mlp_only": (
        {"model_type": "qwen2_moe", "mlp_only_layers": ["1"]},
        r"mlp_only_layers=\['1'\], which is no list of numbers of layers",
    ),
    "unturned": (
        {"model_type": "smollm3", "no_rope_layers": [1]},
        r"no_rope_layers=\[1\], which is no list of 0 and 1 for each of num_hidden_layers=2",
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_that_does_not_fit(name, tmp_path):
    fields, text = CONFIGS[name]
    with pytest.raises(ValueError, match=text):
        mtf.models.from_pretrained(a_copy(tmp_path, **fields))


SMALL = {
    "names": {"norm": "n", "post_norm": "p"}, "layer": "l.{}.", "blocks": 2, "d_model": 8, "d_ff": 8,
    "d_kv": 4, "heads": 2, "groups": 2, "vocab": 9, "max_length": 8, "activation": "relu",
    "gated": False, "epsilon": 1e-6,
}  # fmt: skip


@pytest.mark.parametrize(
    "fields, text",
    [
        ({"windows": [0]}, "windows has 1 entries for blocks=2"),
        (
            {"windows": [0, 5], "rotary": {0: mtf.layers.RotaryEmbedding()}},
            "rotary has none for the windows 5",
        ),
        ({"tied": True, "logits_bias": True}, "logits_bias is for logits that are not tied"),
        ({"rms": False}, "layer norms stand before a layer or behind it, not both"),
    ],
)
def test_a_decoder_that_there_is_not(fields, text):
    with pytest.raises(ValueError, match=f"Decoder of there: {text}"):
        mtf.models.Decoder(mtf.models.Config("there", {}), **{**SMALL, **fields}).form  # noqa: B018


def test_a_family_is_registered_once():
    with pytest.raises(ValueError, match="model_type='llama' is there already"):
        mtf.models.register_family("llama", lambda config: None)


def test_files_that_are_missing_or_cut(tmp_path):
    with pytest.raises(ValueError, match=r"no model\.safetensors in .*safe_serialization=True"):
        mtf.models.from_pretrained(tmp_path)
    folder = a_copy(tmp_path)
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-100])
    with pytest.raises(ValueError, match="is no whole safetensors file"):
        mtf.models.from_pretrained(folder)
    file.write_bytes((2**60).to_bytes(8, "little") + whole[8:])
    with pytest.raises(ValueError, match="is no whole safetensors file"):
        mtf.models.from_pretrained(folder)
    file.rename(folder / "one.safetensors")
    index = {"weight_map": {"model.norm.weight": "two.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"two\.safetensors: there is no such file"):
        mtf.models.from_pretrained(folder)


def test_programs_of_several_shapes_are_no_mistake(caplog, monkeypatch):
    """TensorFlow warns of functions that are traced often, as those of models are meant to be."""
    monkeypatch.setattr(tf.get_logger(), "propagate", True)
    for n in range(1, 9):
        mtf.models.from_pretrained(FIXTURES / "llama_one").logits([[1] * n])
    assert "retracing" not in caplog.text


def test_loss_stores_no_one_hot_of_targets():
    model = mtf.models.from_pretrained(FIXTURES / "llama")
    ids = np.array([[5, 17, 3, 95], [0, 1, 1, 60]], np.int32)
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    model.loss(mesh, mtf.import_tf_tensor(mesh, ids, "batch:2,length:4"))
    kinds = [type(op).__name__ for op in mesh.graph.operations]
    # The one of ids looks up the embedding, and is lowered to a gather.
    assert "CrossEntropyOperation" in kinds and kinds.count("OneHotOperation") == 1


def test_mistakes(tmp_path):
    model = mtf.models.from_pretrained(FIXTURES / "llama")
    for prompts, text in [
        ([[1], []], "at least one"), ([[96]], "id 96 is not in the vocabulary, 0 to 95"),
        ([[-1]], "id -1 is not"), ([[0.5]], "must be ints"),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=text):
            model.generate(prompts)
    # Nothing is allocated for them before.
    for name, most in [("max_new_tokens", 10**7), ("num_beams", 10**4)]:
        with pytest.raises(ValueError, match=f"{name}=1000000000000 must be {most} or less"):
            model.generate([[1]], **{name: 10**12})
    with pytest.raises(ValueError, match="max_new_tokens=0 must be an integer of at least 1"):
        model.generate([[1]], max_new_tokens=0)
    with pytest.raises(ValueError, match="rows of one id predict nothing"):
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        model.loss(mesh, mtf.import_tf_tensor(mesh, [[1]], "batch:1,length:1"))
    with pytest.raises(ValueError, match=r"ids must be ints, \[batch, length\]"):
        model.logits([1, 2])
    with pytest.raises(
        ValueError, match=r"logits: rows are of one length, but have 2, 1; generate"
    ):
        model.logits([[1, 2], [3]])
    with pytest.raises(ValueError, match="the variables lack transformer/embedding"):
        model.assign({})
    with pytest.raises(ValueError, match=r"assign: variables are arrays by name, .* not None"):
        model.assign(None)
    with pytest.raises(ValueError, match=r"path is that of a folder or of a GGUF file, not None"):
        mtf.models.from_pretrained(None)
    with pytest.raises(ValueError, match="from_pretrained: mesh_shape=None is no mesh; leave it"):
        mtf.models.from_pretrained(FIXTURES / "llama", mesh_shape=None)
    with pytest.raises(ValueError, match=r"from_config: config is a dictionary .* takes a folder"):
        mtf.models.from_config(str(FIXTURES / "llama"))
    with pytest.raises(ValueError, match="dtype='half a float' is none of 'float32', 'bfloat16'"):
        mtf.models.from_pretrained(FIXTURES / "llama", dtype="half a float")
    wrong = {**model.weights, "transformer/rms_norm/scale": np.ones([3])}
    with pytest.raises(ValueError, match=r"rms_norm/scale has shape \[3\] instead of \[24\]"):
        model.assign(wrong)
    with pytest.raises(ValueError, match="exists already"):
        model.save_pretrained(FIXTURES / "llama")
    with pytest.raises(ValueError, match="mesh dimension"):
        mtf.models.from_pretrained(FIXTURES / "llama", mesh_shape="x:2", layout="vocab:y")
    for layout in ("auto", mtf.auto_mtf.Auto()):
        with pytest.raises(
            ValueError, match=r"layout=.* is of trainings, .* mtf.models.layouts.of"
        ):
            mtf.models.from_pretrained(FIXTURES / "llama", mesh_shape="x:2", layout=layout)
    with pytest.raises(ValueError, match="dtype='float16' is none of 'float32', 'bfloat16'"):
        mtf.models.from_pretrained(FIXTURES / "llama", dtype="float16")
    with tf.Graph().as_default(), pytest.raises(ValueError, match="needs eager code"):
        model.logits([[1]])
    assert model.generate([]) == []
