"""How models of folders continue texts, against what transformers does; see make_generated.py."""

import collections
import io
import json
import pathlib
import shutil
import threading

import numpy as np
import pytest
import tensorflow.compat.v1 as tf
import tokenizers
from helpers import processes
from tokenizers import decoders, models

import mesh_tensorflow as mtf
from mesh_tensorflow import generate
from mesh_tensorflow.testing.harness import Placing
from mesh_tensorflow.transformer.transformer import _decoding

HERE = pathlib.Path(__file__).parent
FIXTURES = HERE / "fixtures"
GENERATED = json.loads((HERE / "generated.json").read_text())
PROMPTS, NEW, MODELS = (GENERATED[name] for name in ("prompts", "new", "models"))
PLACES = {
    "whole": {},
    "tensor": {"mesh_shape": "x:2,y:2", "layout": "batch:x,vocab:y,d_ff:y,heads:y?"},
    "vocab": {"mesh_shape": "x:2", "layout": "vocab:x"},
    "nothing": {"mesh_shape": "x:2", "layout": ""},
    "simd": {"mesh_shape": "x:2,y:2", "layout": "batch:x,vocab:y,heads:y?", "mesh_impl": "simd"},
}


def a_model(name="llama", **place):
    return mtf.models.from_pretrained(FIXTURES / name, **place)


def a_tokenizer():
    """Returns a tokenizer of a letter for each id of the models, two of them control tokens."""
    letters = {chr(161 + i): i for i in range(96)}
    made = tokenizers.Tokenizer(models.BPE(letters, []))
    made.decoder = decoders.Fuse()
    made.add_special_tokens(list(letters)[1:3])
    return mtf.models.Tokenizer(made, "{% for m in messages %}{{ m.content }}{% endfor %}")


def with_texts(tmp_path, **place):
    """Returns a model whose texts have a letter for each id."""
    folder = tmp_path / "model"
    if not folder.exists():
        shutil.copytree(FIXTURES / "llama", folder)
        a_tokenizer().save(folder)
    return mtf.models.from_pretrained(folder, **place)


# -- distributions


def of_arguments(top_k=-1, temperature=1.0, **kwargs):
    return _decoding.Choice(temperature, top_k, -1, False, **kwargs)


@pytest.mark.slow_but(1)
@pytest.mark.parametrize("layout", ["", "vocab:x", "batch:x"])
@pytest.mark.parametrize("number", range(len(GENERATED["distributions"])))
def test_the_distribution_is_that_of_transformers(number, layout):
    """Of logits of a model, also where numbers are Tensors."""
    arguments = GENERATED["distributions"][number]
    expected = MODELS["llama"]["distributions"][number]
    logits = np.stack([a_model().logits([p])[0, -1].numpy() for p in PROMPTS + PROMPTS[:1]])
    for wanted in (expected, [*expected, expected[0]]):
        rows, seen = len(wanted), np.zeros([len(wanted), 96], bool)
        for row, prompt in zip(seen, PROMPTS + PROMPTS[:1]):
            row[prompt] = True
        if layout == "batch:x" and rows % 2:
            continue
        mesh = mtf.Mesh(mtf.Graph(), "mesh", mesh_impl=Placing("x:2", layout).impl())
        x = mtf.constant(mesh, logits[:rows], f"batch:{rows},vocab:96")
        inputs = {n: mtf.constant(mesh, v) for n, v in arguments.items() if n != "top_k"}
        for given in (arguments, {**arguments, **inputs}):
            choice = of_arguments(**given)
            has = mtf.constant(mesh, seen, x.shape, tf.bool)
            penalized = _decoding.penalized(x, has, choice.repetition_penalty)
            scaled = choice.scaled(penalized, x.shape.dims[1])
            p = mtf.softmax(scaled, x.shape.dims[1]).numpy()
            np.testing.assert_allclose(p, wanted, atol=2e-5)
            assert ((p > 0) == (np.array(wanted) > 0)).all()


def chi_squared(counts, p):
    """Asserts that counts may well come from probabilities."""
    expected = np.array(p) * counts.sum()
    assert (counts[expected == 0] == 0).all()
    # Rare ones count together, so that the statistic has the distribution of chi-square.
    rare = (expected > 0) & (expected < 5)
    counts, expected = (np.append(x[expected >= 5], x[rare].sum()) for x in (counts, expected))
    counts, expected = counts[expected > 0], expected[expected > 0]
    freedom = len(expected) - 1
    statistic = ((counts - expected) ** 2 / expected).sum()
    assert statistic < freedom + 4.5 * np.sqrt(2 * freedom) + 6
    return freedom


@pytest.mark.slow_but(1)
@pytest.mark.parametrize("number", range(len(GENERATED["distributions"])))
def test_what_is_drawn_has_that_distribution(number):
    arguments = {"temperature": 1.0, **GENERATED["distributions"][number]}
    rows = 2000
    found = a_model().generate(PROMPTS[:1] * rows, 1, seed=number, stop=-1, **arguments)
    counts = np.bincount([row[0] for row in found], minlength=96)
    freedom = chi_squared(counts, MODELS["llama"]["distributions"][number][0])
    assert freedom > 1 or arguments.get("top_p", 1) < 0.6


@pytest.mark.slow
def test_later_ids_are_drawn_from_their_own_distribution():
    """The second of two ids, after each first one; the penalty counts both prompt and first."""
    model, rows = a_model("qwen3"), 3000
    arguments = {"temperature": 2.0, "top_p": 0.8, "repetition_penalty": 1.5}
    pairs = np.array(model.generate(PROMPTS[1:2] * rows, 2, seed=3, stop=-1, **arguments))
    common = np.bincount(pairs[:, 0]).argmax()
    seen = np.zeros([1, 96], bool)
    seen[0, [*PROMPTS[1], common]] = True
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    logits = model.logits([[*PROMPTS[1], common]])[:, -1].numpy()
    x = mtf.constant(mesh, logits, "batch:1,vocab:96")
    choice = of_arguments(**arguments)
    has = mtf.constant(mesh, seen, x.shape, tf.bool)
    penalized = _decoding.penalized(x, has, choice.repetition_penalty)
    scaled = choice.scaled(penalized, x.shape.dims[1])
    counts = np.bincount(pairs[pairs[:, 0] == common, 1], minlength=96)
    assert chi_squared(counts, mtf.softmax(scaled, x.shape.dims[1]).numpy()[0]) > 1


@pytest.mark.slow_but(1)
@pytest.mark.parametrize("place", ["whole", "tensor"])
@pytest.mark.parametrize("name", MODELS)
def test_penalties_give_the_ids_of_transformers(name, place):
    model = a_model(name, **PLACES[place])
    for penalty, expected in zip(GENERATED["penalties"], MODELS[name]["penalized"]):
        assert model.generate(PROMPTS, NEW, repetition_penalty=penalty) == expected


# -- seeds


@pytest.mark.slow
def test_a_seed_gives_the_same_ids_in_every_layout():
    arguments = {"temperature": 1.5, "top_p": 0.9, "stop": -1, "top_k": 40}
    found = {}
    for place, kwargs in PLACES.items():
        model = a_model(**kwargs)
        # Whatever the program's own seed, and the calls before.
        tf.random.set_random_seed(len(found))
        model.generate(PROMPTS, 3, temperature=1.0)
        found[place] = [model.generate(PROMPTS, 8, seed=s, **arguments) for s in (0, 1, 2**30, 0)]
    whole = found.pop("whole")
    assert whole[0] == whole[3]
    assert len({str(ids) for ids in whole}) == 3
    assert all(other == whole for other in found.values())


def test_without_a_seed_that_of_the_program_counts():
    model = a_model()
    texts = []
    for seed in (5, 5, 6):
        tf.random.set_random_seed(seed)
        texts.append([model.generate(PROMPTS, 6, temperature=1.0, stop=-1) for _ in range(2)])
    assert texts[0] == texts[1] != texts[2] and texts[0][0] != texts[0][1]


def test_rows_and_steps_draw_anew():
    rows = a_model().generate(PROMPTS[:1] * 40, 8, temperature=30.0, stop=-1, seed=0)
    assert len({tuple(row) for row in rows}) == 40
    assert len(set(zip(*rows))) == 8


# -- beams


@pytest.mark.slow_but(1)
@pytest.mark.parametrize("place", ["whole", "tensor"])
@pytest.mark.parametrize("number", range(len(MODELS["llama"]["beams"])))
@pytest.mark.parametrize("name", MODELS)
def test_beams_are_those_of_transformers(name, number, place):
    """In one batch, of prompts that differ in length."""
    case = dict(MODELS[name]["beams"][number])
    expected, ends = case.pop("found"), case.pop("ends") or -1
    model = a_model(name, **PLACES[place])
    case["num_return_sequences"] = case["num_beams"]
    found = model.generate(PROMPTS, NEW, stop=ends, **case)
    assert found == [row["ids"] for row in expected]
    several = model.generate(PROMPTS, NEW, stop=ends, details=True, **case)
    scores = [[one.score for one in of] for of in several]
    np.testing.assert_allclose(scores, [row["scores"] for row in expected], atol=1e-4)
    for of in several:
        for one in of:
            score = sum(one.log_probs) / len(one.ids) ** case["length_penalty"]
            np.testing.assert_allclose(score, one.score, rtol=1e-4)
    del case["num_return_sequences"]
    assert model.generate(PROMPTS, NEW, stop=ends, **case) == [row["ids"][0] for row in expected]


@pytest.mark.slow_but(1)
@pytest.mark.parametrize("place", ["tensor", "whole"])
@pytest.mark.parametrize("number", range(len(MODELS["llama"]["other_beams"])))
@pytest.mark.parametrize("name", MODELS)
def test_beams_with_penalties_and_texts_are_those_of_transformers(name, number, place, tmp_path):
    """Of which scores are what penalties leave of log-probabilities."""
    case = dict(MODELS[name]["other_beams"][number])
    expected, ends, texts = case.pop("found"), case.pop("ends"), case.pop("texts")
    model = a_model(name, **PLACES[place])
    model.tokenizer = a_tokenizer()
    stop = [*(ends or [-1]), *("".join(chr(161 + i) for i in ids) for ids in texts)]
    case["num_return_sequences"] = case["num_beams"]
    found = model.generate(PROMPTS, NEW, stop=stop, details=True, **case)
    assert [[one.ids for one in of] for of in found] == [row["ids"] for row in expected]
    scores = [[one.score for one in of] for of in found]
    np.testing.assert_allclose(scores, [row["scores"] for row in expected], atol=1e-4)


def test_a_search_that_never_stops_early_finds_the_best_of_all():
    """By all continuations of two ids, where the beams hold all of the first ids."""
    model = a_model("qwen3")
    logits = model.logits([[*PROMPTS[0], i] for i in range(96)]).numpy()[:, -2:]
    logits -= np.log(np.exp(logits).sum(-1, keepdims=True))
    total = logits[0, 0][:, None] + logits[:, 1]
    order = np.dstack(np.unravel_index(np.argsort(-total, None)[:5], total.shape))[0]
    found = model.generate(
        PROMPTS[:1], 2, num_beams=96, num_return_sequences=5, stop=-1, early_stopping="never"
    )
    assert found == [order.tolist()]


def test_drawing_several_continuations():
    model = a_model()
    several = model.generate(PROMPTS, 6, temperature=1.0, stop=-1, seed=1, num_return_sequences=3)
    assert [len(of) for of in several] == [3, 3, 3]
    flat = [prompt for prompt in PROMPTS for _ in range(3)]
    again = model.generate(flat, 6, temperature=1.0, stop=-1, seed=1)
    assert [row for of in several for row in of] == again and again[0] != again[1]


# -- lengths


@pytest.mark.slow
@pytest.mark.parametrize("place", [*PLACES, "length"])
@pytest.mark.parametrize("name", ["qwen3", "mistral"])
def test_prompts_of_all_lengths(name, place):
    """Where what is computed at once is as long as the row or shorter, and than a window."""
    kwargs = PLACES.get(place, {"mesh_shape": "x:2,y:2", "layout": "length:x,d_ff:y"})
    model, whole, rows = (
        a_model(name, **kwargs),
        a_model(name),
        np.random.RandomState(0).randint(3, 96, [4, 70]),
    )
    for lengths in ([1, 2], [15, 17], [18, 3, 60], [70, 33, 16, 1]):
        prompts = [row[:n].tolist() for row, n in zip(rows, lengths)]
        found = model.generate(prompts, 5, stop=-1)
        beams = model.generate(prompts, 5, stop=-1, num_beams=2)
        for prompt, new, of_beams in zip(prompts, found, beams):
            logits = whole.logits([prompt + new]).numpy()[0]
            assert logits.argmax(-1)[len(prompt) - 1 : -1].tolist() == new
            total = [sum(whole.log_probs([prompt + ids])[0][-5:]) for ids in (new, of_beams)]
            assert total[1] >= total[0] - 1e-4


def nodes_of_steps(name, **place):
    """Returns how many nodes of each type the loop of a decoding has."""
    model = a_model(name, **place)
    kinds = collections.Counter()
    lowered = model._generator._lowered_samples

    def graph_of(*args):
        result = lowered(*args)
        for op in tf.get_default_graph().get_operations():
            if op.type in ("While", "StatelessWhile"):
                body = tf.get_default_graph()._get_function(op.get_attr("body").name)
                kinds.update(node.type for node in body.graph.get_operations())
        return result

    model._generator._sampled = model._place.function(graph_of, model.store)
    model.generate([[5, 6, 7]], 2, stop=-1)
    return kinds


@pytest.mark.parametrize("place", [{}, {"mesh_shape": "x:2", "layout": "vocab:x"}])
def test_layers_of_a_step_share_what_depends_on_the_position_alone(place):
    kinds = nodes_of_steps("llama", **place)
    assert kinds["Cos"] == kinds["Sin"] == 1
    # In place: a scatter of updates would copy the whole cache in each step.
    assert kinds["ScatterNdNonAliasingAdd"] and not kinds["TensorScatterUpdate"]


@pytest.mark.parametrize("mesh_impl, rows", [(None, [1, 2, 4]), ("simd", [2, 2, 4])])
def test_a_single_row_is_not_split(mesh_impl, rows):
    """Where programs have layouts of their own, others are filled up for the layout's parts."""
    place = a_model(mesh_shape="x:2", layout="batch:x", mesh_impl=mesh_impl)._place
    assert [len(place.filled_up(np.zeros([n, 3]))) for n in (1, 2, 3)] == rows
    if mesh_impl is None:
        split = nodes_of_steps("llama", mesh_shape="x:2", layout="batch:x")
        assert split["MatMul"] == nodes_of_steps("llama")["MatMul"]


ON_LOGICAL_CPUS = """
import json, sys
import tensorflow as tf
import mesh_tensorflow as mtf

[cpu] = tf.config.list_physical_devices("CPU")
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 4)
prompts = json.loads(sys.argv[2])
where = {"mesh_shape": "x:2,y:2", "layout": "batch:x,vocab:y,d_ff:y,heads:y?"}
model = mtf.models.from_pretrained(sys.argv[1], **where)
found = [model.generate(prompts[:n], 8, stop=-1, num_beams=b) for n in (1, 2, 3) for b in (1, 2)]
impl = model._place.mesh_impl
print(json.dumps([impl.execution_impl.size, len(set(impl.devices)), found]))
"""


@pytest.mark.slow
def test_logical_cpus_compute_as_one():
    """Each would read the same weights from the memory that they share."""
    prompts = [PROMPTS[0], PROMPTS[1], PROMPTS[0]]
    done = processes.python("-c", ON_LOGICAL_CPUS, FIXTURES / "llama", json.dumps(prompts))
    processors, devices, found = json.loads(done.stdout.splitlines()[-1])
    assert (processors, devices) == (1, 4)
    model = a_model()
    assert found == [
        model.generate(prompts[:n], 8, stop=-1, num_beams=b) for n in (1, 2, 3) for b in (1, 2)
    ]


# -- ends


def test_ends_by_ids_and_texts(tmp_path):
    model = with_texts(tmp_path)
    free = model.generate(PROMPTS, 12, stop=-1)
    ends = [free[0][4], free[1][7]]
    cut = [row[: next((i for i, x in enumerate(row) if x in ends), len(row)) + 1] for row in free]
    assert model.generate(PROMPTS, 12, stop=ends) == cut
    assert model.generate(PROMPTS, 12, stop=[*ends, -1, 95, 94, 93]) == cut
    # The id that completes the text is the last one, and control tokens are texts, too.
    tokenizer = model.tokenizer.tokenizer
    text = tokenizer.decode(free[2][3:5], skip_special_tokens=False)
    for stop in (text, [text], ["never", text, -1]):
        found = model.generate(PROMPTS, 12, stop=stop)[2]
        assert found == free[2][: len(found)]
        assert text in tokenizer.decode(found, skip_special_tokens=False)
        assert text not in tokenizer.decode(found[:-1], skip_special_tokens=False)


@pytest.mark.slow_but(1)
@pytest.mark.parametrize("place", PLACES)
def test_texts_end_rows_in_every_layout(place, tmp_path):
    model = with_texts(tmp_path, **PLACES[place])
    free = model.generate(PROMPTS, 12, stop=-1)
    text = model.tokenizer.tokenizer.decode(free[2][2:4], skip_special_tokens=False)
    found = model.generate(PROMPTS, 12, stop=[text, -1])
    assert found[2] == free[2][:4] and {len(row) for row in free} == {12}


def test_the_loop_ends_when_all_rows_have(tmp_path):
    """By the number of steps of which a listener hears."""
    model = with_texts(tmp_path, **PLACES["tensor"])
    free = model.generate(PROMPTS[:1], 12, stop=-1)[0]
    steps = []

    class Counter(mtf.models._generation.Listener):
        def hear(self, rows, ids, step):
            steps.append(step)
            return super().hear(rows, ids, step)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mtf.models._language_model, "Listener", Counter)
        assert model.generate(PROMPTS[:1], 12, stop=[free[3], "never"]) == [free[:4]]
        assert max(steps) == 3
        model.generate(PROMPTS[:1], 12, stop=[-1, "never"])
        assert max(steps) == 11


# -- log-probabilities, and pieces


@pytest.mark.slow_but(1)
@pytest.mark.parametrize("place", PLACES)
def test_log_probabilities(place):
    model = a_model("qwen3", **PLACES[place])
    found = model.log_probs([*PROMPTS, [4]])
    assert found[-1] == [] and model.log_probs([]) == []
    for prompt, row in zip(PROMPTS, found):
        logits = model.logits([prompt]).numpy()[0].astype(np.float64)
        logits -= np.log(np.exp(logits).sum(-1, keepdims=True))
        expected = [logits[i, id_] for i, id_ in enumerate(prompt[1:])]
        np.testing.assert_allclose(row, expected, atol=1e-4)


def test_details(tmp_path):
    model = with_texts(tmp_path)
    text = model.tokenizer.tokenizer.decode(PROMPTS[0], skip_special_tokens=False)
    arguments = {"temperature": 1.0, "seed": 2, "top_p": 0.9, "stop": -1}
    plain = model.generate([text, PROMPTS[1]], 6, **arguments)
    with_text, of_ids = model.generate([text, PROMPTS[1]], 6, details=True, **arguments)
    assert (with_text.text, of_ids.text, of_ids.score) == (plain[0], None, None)
    assert of_ids.ids == plain[1] and model.tokenizer.decode(with_text.ids) == plain[0]
    whole = model.log_probs([PROMPTS[1] + of_ids.ids])[0]
    np.testing.assert_allclose(of_ids.log_probs, whole[-6:], rtol=1e-6)
    assert len(with_text.log_probs) == 6


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
def test_streams_have_the_pieces_of_what_is_generated(place, tmp_path):
    model = with_texts(tmp_path, **PLACES[place])
    arguments = {"temperature": 1.0, "seed": 4, "max_new_tokens": 9}
    chat = [{"role": "user", "content": "\xa5\xa9\xc0"}]
    for prompt in (PROMPTS[0], chat[0]["content"], chat):
        [whole] = model.generate([prompt], stop=-1, **arguments)
        pieces = list(model.stream(prompt, stop=-1, **arguments))
        assert len(pieces) > 5
        assert pieces == whole if prompt is PROMPTS[0] else "".join(pieces) == whole
    free = model.generate(PROMPTS[2:], 12, stop=-1)[0]
    text = model.tokenizer.tokenizer.decode(free[2:4], skip_special_tokens=False)
    assert list(model.stream(PROMPTS[2], 12, stop=[text, -1])) == free[:4]
    assert list(model.stream(PROMPTS[2], 12, stop=free[5])) == free[: free.index(free[5]) + 1]
    # Not traced anew for each of them; programs of sessions have no such count.
    if place != "simd":
        assert model._generator._sampled.tf_function.experimental_get_tracing_count() <= 9


def test_letters_of_several_ids_come_whole():
    """Of a byte-level vocabulary, where é is two ids."""
    listener = mtf.models._generation.Listener(1, [], a_byte_tokenizer(), tells="texts")

    def grow():
        for step, id_ in enumerate([*"aé\u20acz".encode(), 0xE2]):
            listener.hear([0], [id_], step)

    assert list(listener.pieces(grow)) == ["a", "é", "\u20ac", "z", "\ufffd"]


def a_byte_tokenizer():
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    order = [letter for letter in map(chr, range(33, 512)) if letter in letters]
    # As GPT-2 numbers them: bytes that are no letters come after those that are.
    printable = [b for b in range(256) if chr(b) in letters]
    numbers = printable + [b for b in range(256) if b not in printable]
    made = tokenizers.Tokenizer(models.BPE(dict(zip(order, numbers)), []))
    made.decoder = decoders.ByteLevel()
    return mtf.models.Tokenizer(made)


def test_a_stream_that_is_left_ends_its_program(tmp_path):
    model, threads = with_texts(tmp_path), threading.active_count()
    stream = model.stream(PROMPTS[0], 10_000, stop=-1)
    assert [next(stream) for _ in range(3)] == model.generate(PROMPTS[:1], 3, stop=-1)[0]
    stream.close()
    assert threading.active_count() == threads
    with pytest.raises(ValueError, match="generate: top_p=0 must be"):
        model.stream(PROMPTS[0], top_p=0)
    # What fails in the program is raised where the pieces are read.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model._generator, "_prompts", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            list(model.stream(PROMPTS[0]))


# -- the command


@pytest.mark.slow
def test_the_command(tmp_path, capsys, monkeypatch):
    model, letters = with_texts(tmp_path), "\xa5\xa9\xc0"
    folder, lines = f"--model={tmp_path / 'model'}", tmp_path / "lines.txt"
    # With the mark that editors of Windows put before a text.
    lines.write_text(f"{letters}\n\n{letters[:2]}\n", encoding="utf-8-sig")

    def told(*arguments):
        assert generate.main([folder, "--max_new_tokens=5", "--stop=-1", *arguments]) == 0
        return capsys.readouterr().out

    expected = model.generate([letters, letters[:2]], 5, stop=-1)
    assert told(f"--prompt={letters}") == expected[0] + "\n"
    found = [
        json.loads(line) for line in told(f"--prompts_file={lines}", "--batch_size=1").splitlines()
    ]
    assert [one["text"] for one in found] == expected
    assert [one["prompt"] for one in found] == [letters, letters[:2]]
    drawn = ["--temperature=2.0", "--top_p=0.9", "--min_p=0.01", "--top_k=50", "--seed=3"]
    drawn += ["--repetition_penalty=1.2", "--mesh_shape=x:2", "--layout=vocab:x"]
    arguments = {"temperature": 2.0, "top_p": 0.9, "min_p": 0.01, "top_k": 50, "seed": 3}
    [whole] = model.generate([letters], 5, stop=-1, repetition_penalty=1.2, **arguments)
    assert told(f"--prompt={letters}", *drawn) == whole + "\n"
    [beams] = model.generate([letters], 5, stop=-1, num_beams=3, length_penalty=0.5)
    assert told(f"--prompt={letters}", "--num_beams=3", "--length_penalty=0.5") == beams + "\n"

    # On devices of JAX all is told at the end.
    assert told(f"--prompt={letters}", "--mesh_impl=pjrt") == expected[0] + "\n"

    monkeypatch.setattr("sys.stdin", io.StringIO(f"{letters}\n{letters[:1]}\n"))
    chat, answers = [{"role": "system", "content": letters[1]}], []
    for line in (letters, letters[:1]):
        chat.append({"role": "user", "content": line})
        answers += model.generate([chat], 5, stop=-1)
        chat.append({"role": "assistant", "content": answers[-1]})
    assert told("--chat", f"--system={letters[1]}") == "\n".join([*answers, ""])


@pytest.mark.slow
def test_mistakes_of_the_command(tmp_path):
    with_texts(tmp_path)
    other = tmp_path / "other.txt"
    other.write_text("\xa5", encoding="latin1")
    command = ["-m", "mesh_tensorflow.generate", f"--model={tmp_path / 'model'}"]
    for arguments, text in [
        (["--prompt=\xa5", "--top_p=0"], "mesh_tensorflow.generate: generate: top_p=0.0 must be"),
        (["--chat", "--prompt=a"], "not allowed with argument"),
        ([f"--prompts_file={other}"], "other.txt is not in UTF-8: "),
        (["--prompts_file=nothing.txt"], "--prompts_file: there is no file 'nothing.txt'"),
        (["--prompt=\xa5", "--ways=data:2", "--layout=vocab:x"], "says what --layout would; give"),
        (["--prompt=\xa5", "--system=\xa5"], "--system is of conversations: give --chat, too"),
        (["--prompt=\xa5", "--length_penalty=2"], "--length_penalty is of a search: give --num_"),
    ]:
        done = processes.python(*command, *arguments, code=2)
        assert text in done.stderr and "Traceback" not in done.stderr
    done = processes.python(*command, "--prompt=\xa5", "--max_new_tokens=3")
    assert len(done.stdout) == 4 and not done.stderr


# -- mistakes

MISTAKES = {
    "top_p=0 must be a number above 0 and at most 1; 1.0 draws from all ids": {"top_p": 0},
    "top_p=1.5 must be a number above 0": {"top_p": 1.5},
    "min_p=2 must be a number between 0 and 1; 0.0 draws": {"min_p": 2},
    "temperature=-1.0 must be a number 0 or more; 0.0 takes the best": {"temperature": -1.0},
    "temperature=nan must be a number 0": {"temperature": float("nan")},
    "temperature='warm' must be a number": {"temperature": "warm"},
    "repetition_penalty=0 must be a number above 0; 1.0 changes": {"repetition_penalty": 0},
    "top_k=0 must be an integer of at least 1, or -1 for all ids": {"top_k": 0},
    "top_k=2.5 must be an integer of at least 1": {"top_k": 2.5},
    "max_new_tokens=True must be an integer of at least 1": {"max_new_tokens": True},
    "seed=-1 must be an integer of at least 0": {"seed": -1},
    "stop=1.5 has 1.5, which is neither an id (-1 for none) nor a text": {"stop": 1.5},
    "stop=[-2] has -2, which is neither": {"stop": [-2]},
    "stop=[None] has None, which is neither an id": {"stop": [None]},
    "details='all' is neither True nor False": {"details": "all"},
    "stop=['a', ''] has an empty text": {"stop": ["a", ""]},
    "num_beams=0 must be an integer of at least 1": {"num_beams": 0},
    "num_beams=2 searches and temperature=1.0 draws; set": {"num_beams": 2, "temperature": 1.0},
    "num_beams=2 finds so many continuations, not num_return_sequences=3; set num_beams":
        {"num_beams": 2, "num_return_sequences": 3},
    "num_return_sequences=3 would be equal at temperature=0.0; set a temperature, or num_beams=3":
        {"num_return_sequences": 3},
    "length_penalty='long' must be a number; larger": {"num_beams": 2, "length_penalty": "long"},
    "early_stopping='soon' is none of True, False, 'never'": {"early_stopping": "soon"},
    "stop='a' has a text, and the model has no tokenizer; stop at ids": {"stop": "a"},
    "stop=b'a' has b'a', which is neither an id": {"stop": b"a"},
    "stop=[3, 96] has the id 96, which is not in the vocabulary, 0 to 95, so": {"stop": [3, 96]},
    f"seed={2**70} must be {2**63 - 1} or less": {"seed": 2**70},
}  # fmt: skip


def test_names_of_other_libraries():
    text = "generate has no argument 'max_length': give max_new_tokens.* 'do_sample': give a temper"
    with pytest.raises(TypeError, match=text):
        a_model().generate([[1]], max_length=4, do_sample=True)


@pytest.mark.parametrize("text", MISTAKES)
def test_mistakes(text):
    with pytest.raises(ValueError) as error:
        a_model().generate([[1]], **MISTAKES[text])
    assert f"generate: {text}" in str(error.value)


PROMPTS_BY_MISTAKE = {
    "prompts is a list, such as [text], but is 5": 5,
    "prompts is a list, such as [text], but is None": None,
    "prompts is a list, such as [text], but is b'ab'": b"ab",
    "prompts is a list, such as [text], but is {'role': 'user'}": {"role": "user"},
    "prompt 0 is 1, none of ids, a text and a conversation; prompts is a list of": [1, 2],
    "prompt 1 is None, none of ids": [[1], None],
    "prompt 1 is empty, but has to have at least one id": [[1], []],
    "ids must be ints, [batch, length]": [[1, "a"]],
    "the id 1099511627776 is not in the vocabulary, 0 to 95": [[2**40]],
    "the model has no tokenizer, so prompts are lists of ids": [[1], "a"],
}


@pytest.mark.parametrize("text", PROMPTS_BY_MISTAKE)
def test_mistakes_of_prompts(text):
    for call in ("generate", "log_probs"):
        with pytest.raises(ValueError) as error:
            getattr(a_model(), call)(PROMPTS_BY_MISTAKE[text])
        assert str(error.value).startswith(f"{call}: {text}")


def test_prompts_of_other_kinds():
    """A generator, a tuple, an array and a tf.Tensor's values; ids beside a text."""
    model = a_model()
    expected = model.generate([[5, 9], [7, 1]], 3)
    ids = np.array([[5, 9], [7, 1]])
    for prompts in (([*row] for row in ids), ((5, 9), (7, 1)), ids, list(ids.astype(np.uint8))):
        assert model.generate(prompts, 3) == expected
    numbers = {"top_k": np.int64(4), "temperature": np.float32(1), "seed": np.int64(3)}
    assert model.generate(ids, np.int64(3), **numbers) == model.generate(
        ids, 3, top_k=4, temperature=1.0, seed=3
    )
    assert model.generate([]) == [] and model.generate(iter([])) == []


def test_ids_and_texts_in_one_list(tmp_path):
    model = with_texts(tmp_path)
    text = model.tokenizer.decode([5, 9])
    expected = model.generate([[5, 9], [7]], 3)
    found = model.generate([text, [7]], 3)
    assert found == [model.tokenizer.decode(expected[0]), expected[1]]


@pytest.mark.slow("gpt2")
@pytest.mark.parametrize("name", ["gpt2", "opt"])
def test_as_long_as_the_table_of_positions(name):
    """Up to its last row, which a power of two need not reach; and no trace is made of more."""
    model, most = a_model(name), 128
    prompt = [3, 5, 7, 9] * 32
    for call in (
        lambda: model.generate([[1], prompt], 2),
        lambda: model.generate([prompt], 2, num_beams=2),
        lambda: next(model.stream(prompt, 2)),
        lambda: model.log_probs([[*prompt, 1, 2]]),
        lambda: model.logits([[*prompt, 1]]),
    ):
        with pytest.raises(ValueError, match=f"takes 1(29|30) positions, .* a table of {most}"):
            call()
    with pytest.raises(ValueError, match=r"examples: the longest example takes 129 .* of 128; s"):
        model.examples([{"ids": [*prompt, 1]}], 160)
    assert model.examples([{"ids": prompt}] * 2, 256)["ids"].shape == (1, 256)
    found = model.generate([prompt[:100]], 29, details=True)[0]
    assert len(found.ids) == 29 and len(found.log_probs) == 29
    assert model.generate([prompt], 1) == [[int(model.logits([prompt])[0, -1].numpy().argmax())]]
    if name == "gpt2":
        short = mtf.models.from_config({**model.config, "n_positions": 100})
        weights = dict(model.weights)
        table = next(n for n in weights if n.endswith("positional_embedding"))
        short.assign({**weights, table: weights[table][:100]})
        assert short.generate([prompt[:60]], 30) == model.generate([prompt[:60]], 30)


def test_mistakes_of_streams():
    with pytest.raises(
        ValueError, match=r"stream: it draws one continuation, without num_beams; generate"
    ):
        a_model().stream([1], 2, num_beams=2)
    with pytest.raises(TypeError, match=r"stream has no argument 'topp'; did you mean top_p\?"):
        a_model().stream([1], 2, topp=0.5)
    with pytest.raises(ValueError, match="stream: prompt 0 is 1, none of ids"):
        a_model().stream(1)


def test_mistakes_of_sample_autoregressive():
    model = a_model().model
    with tf.Graph().as_default():
        ids = mtf.zeros(mtf.Mesh(mtf.Graph(), "mesh"), "batch:1,length:4", tf.int32)
        with pytest.raises(ValueError, match="sample_autoregressive: top_p=2 must be a number"):
            model.sample_autoregressive(ids, top_p=2)
        with pytest.raises(ValueError, match=r"draft_model: .* have no meaning; leave out either"):
            model.sample_autoregressive(ids, draft_model=model, repetition_penalty=2.0)
