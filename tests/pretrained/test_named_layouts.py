"""Layouts by names: logits and training of one device, rules for each kind of model, and errors."""

import json
import pathlib

import numpy as np
import pytest
from pretrained.test_pretrained import close, expected

import mesh_tensorflow as mtf
from mesh_tensorflow.models import layouts
from mesh_tensorflow.models._weights import names_of, turned

HERE = pathlib.Path(__file__).parent
FOLDERS = {
    **{name: HERE / "fixtures" / name for name in ("llama", "mixtral", "gpt2")},
    "bert": HERE / "encoders" / "bert",
}
ALONE = [f"{name}:2" for name in layouts.WAYS]
TOGETHER = [
    "data:2,tensor:2", "zero3:2,tensor:2", "zero3:2,expert:2", "expert:2,tensor:2",
    "sequence:2,tensor:2", "data:2,sequence:2", "pipeline:2,data:2",
]  # fmt: skip
CELLS = [
    (name, ways)
    for ways in ALONE + TOGETHER
    for name in ("llama", "mixtral")
    if name == "mixtral" or "expert" not in ways
]


@pytest.mark.slow
@pytest.mark.parametrize("name, ways", CELLS)
def test_logits_and_a_step(name, ways):
    wanted, mesh = expected(name), layouts.of(FOLDERS[name], ways)
    ids = np.tile(wanted["ids"], [2, 1]).astype(np.int32)  # two ways may split the batch
    with mtf.strict():  # each rule splits something
        model = mtf.models.from_pretrained(FOLDERS[name], **mesh)
        close(model.logits(ids).numpy(), np.tile(wanted["logits"], [2, 1, 1]))
        result = mtf.train.fit(
            model.loss, ids, steps=1, dims="batch:4,length:24", init_checkpoint=model.weights,
            optimizer=mtf.optimize.SgdOptimizer(1.0), progress=False, **mesh,
        )  # fmt: skip
    np.testing.assert_allclose(result.losses[0], wanted["loss"], rtol=1e-5)
    for weight in model._form.weights:
        theirs = [wanted[f"gradient/{n}"] for n in names_of(weight, model._form.sizes)]
        step = model.weights[weight.ours] - result.variables[weight.ours]
        close(step, turned(weight, theirs, model._form.sizes))


@pytest.mark.slow
@pytest.mark.parametrize("ways", ["data:3", "zero3:3,tensor:2"])
def test_encoders(ways):
    wanted = np.load(FOLDERS["bert"] / "expected.npz")
    model = mtf.models.from_pretrained(FOLDERS["bert"], **layouts.of(FOLDERS["bert"], ways))
    found = model.encode(wanted["ids"], wanted["mask"], wanted["types"]).numpy()
    tokens = wanted["mask"].astype(bool)
    np.testing.assert_allclose(found[tokens], wanted["hidden"][tokens], atol=1e-3)


RULES = [
    ("llama", "tensor:2", {"layout": "vocab:tensor,heads:tensor,d_ff:tensor"}),
    ("gpt2", "tensor:3", {"layout": "vocab:tensor,heads:tensor?,d_ff:tensor"}),
    ("mixtral", "tensor:2", {"layout": "vocab:tensor,heads:tensor,expert_hidden:tensor"}),
    ("bert", "tensor:2", {"layout": "vocab:tensor,num_heads:tensor,intermediate:tensor"}),
    (
        "mixtral",
        "zero3:2, expert:4",
        {
            "layout": "batch:zero3+expert,batch_unsplit:zero3,experts:expert",
            "zero": 3,
            "zero_axis": "zero3",
        },
    ),
    ("mixtral", "data:2", {"layout": "batch:data,batch_unsplit:data"}),
]


@pytest.mark.parametrize("name, ways, wanted", RULES)
def test_rules(name, ways, wanted):
    config = json.loads((FOLDERS[name] / "config.json").read_text())
    shape = ways.replace(" ", "")
    assert layouts.of(config, ways) == {"mesh_shape": shape, **wanted}
    assert layouts.of(FOLDERS[name], ways) == {"mesh_shape": shape, **wanted}


def test_a_rule_that_only_attention_took():
    """Attention is split by any name that the layout has, so that the program has a misspelled one.

    In a call it is told of, and a training is an error, as other rules that split nothing are.
    """
    mesh = {"mesh_shape": "x:2", "layout": "haeds:x,vocab:x"}
    model = mtf.models.from_pretrained(FOLDERS["llama"], **mesh)
    text = "layout rule haeds:x splits attention alone: .* did you mean heads"
    with pytest.warns(mtf.MeshTensorFlowWarning, match=text):
        model.logits([[1, 2]])
    with pytest.raises(ValueError, match=f"fit: {text}"):
        mtf.models.finetune(model, [{"ids": [1, 2, 3]}], 1, length=4, batch_size=1, progress=False)


@pytest.mark.parametrize(
    "name, ways, text",
    [
        ("llama", "expert:2", "expert:2 splits batch, experts, but the model has d_ff, "),
        (
            "llama",
            "tensor:8",
            'splits heads=2, which are fewer; take tensor:2, .* "data:4,tensor:2"',
        ),
        ("mixtral", "expert:8", "expert:8 splits experts=4, which are fewer"),
        ("bert", "sequence:2", "sequence:2 splits length, but the model has "),
        ("llama", "rows:2", "'rows:2' is not. The names are data, zero2, zero3, tensor, expert"),
        ("llama", "data", "'data' is not"),
        ("llama", "data:0", "'data:0' is not"),
        ("llama", "data:2,data:2", "each once, .* 'data:2' is not"),
        ("llama", "zero2:2,zero3:2", "zero2 and zero3 are two stages of ZeRO; take one"),
    ],
)
def test_mistakes(name, ways, text):
    with pytest.raises(ValueError, match=text):
        layouts.of(FOLDERS[name], ways)


@pytest.mark.slow
@pytest.mark.parametrize("name, again, parts", [("llama", False, 2), ("mixtral", True, 1)])
def test_a_plan_is_what_fit_takes(name, again, parts):
    """The best plan of a mesh of four trains as one device does, in microbatches or recomputed."""
    wanted, options = expected(name), {"microbatches": [parts], "recompute": [again], "zero": [3]}
    best = layouts.plan(FOLDERS[name], 4, batch=8, length=24, **options).best
    # What is in the loop over microbatches counts as often as it runs.
    assert sum(best.communication.values()) == pytest.approx(best.seconds.communication)
    assert bool(best.recomputed_seconds) == best.choice.recompute == again
    model = mtf.models.from_pretrained(FOLDERS[name], **best.arguments)
    model.model.layer_stack.recompute_grads = again
    rows = model.examples([{"ids": row} for row in np.tile(wanted["ids"], [4, 1]).tolist()], 24)
    result = mtf.train.fit(
        model.loss, rows, steps=1, dims=dict.fromkeys(rows, "batch:8,length:24"), progress=False,
        microbatches=best.choice.microbatches, optimizer=mtf.optimize.AdamWOptimizer(1e-3),
        init_checkpoint=model.weights, **best.arguments,
    )  # fmt: skip
    np.testing.assert_allclose(result.losses[0], wanted["loss"], rtol=1e-5)


def test_plans_that_there_are_not():
    with pytest.raises(ValueError, match="the model is an encoder; plan is for language models"):
        layouts.plan(FOLDERS["bert"], 4, batch=8, length=24)
    with pytest.raises(ValueError, match=r"no plan fits in 1 KiB .* The nearest is: 4 microbatc"):
        layouts.plan(
            FOLDERS["llama"], 2, batch=8, length=24, memory_limit_bytes=1024, microbatches=[4],
            recompute=[False], zero=[0],
        )  # fmt: skip


def test_searches_share_a_step():
    """What `plan` finds, with programs that are built once for several numbers of processors."""
    step = layouts.training_step(FOLDERS["llama"], batch=8, length=24)
    choice = mtf.auto_mtf.Choice(microbatches=2)
    assert step(choice) is step(choice)
    for processors in (2, 4):
        shared = mtf.auto_mtf.plan(step, processors, [choice], zero=[3], hardware="h100").best
        options = {"microbatches": [2], "recompute": [False], "zero": [3], "hardware": "h100"}
        best = layouts.plan(FOLDERS["llama"], processors, batch=8, length=24, **options).best
        assert shared.arguments == best.arguments
        assert shared.seconds == pytest.approx(best.seconds)
