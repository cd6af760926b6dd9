"""Rows of examples: what they hold, and that packed ones are trained on as if they were alone."""

import json
import pathlib
import warnings

import numpy as np
import pytest
import tokenizers
from tokenizers import models as kinds
from tokenizers import pre_tokenizers

import mesh_tensorflow as mtf

FIXTURES = pathlib.Path(__file__).parent / "fixtures"
EXAMPLES = [
    {"ids": [5, 6, 7, 8], "weights": [0, 0, 1, 1]},
    {"ids": [9, 10]},
    {"ids": [11, 12, 13, 14, 15]},
    {"ids": [16, 17, 18]},
]
TENSOR = {"mesh_shape": "x:2,y:2", "layout": "batch:x,vocab:y,heads:y?"}


def model_of(name="llama", **kwargs):
    return mtf.models.from_pretrained(FIXTURES / name, **kwargs)


def test_rows():
    packed = model_of().examples(EXAMPLES, 7)
    assert packed["ids"].tolist() == [[5, 6, 7, 8, 9, 10, 0], [11, 12, 13, 14, 15, 0, 0],
                                      [16, 17, 18, 0, 0, 0, 0]]  # fmt: skip
    assert packed["weights"].tolist() == [[0, 0, 1, 1, 0, 1, 0], [0, 1, 1, 1, 1, 0, 0],
                                          [0, 1, 1, 0, 0, 0, 0]]  # fmt: skip
    assert packed["sequence_id"].tolist() == [[1, 1, 1, 1, 2, 2, 0], [1, 1, 1, 1, 1, 0, 0],
                                              [1, 1, 1, 0, 0, 0, 0]]  # fmt: skip
    assert packed["position"].tolist() == [[0, 1, 2, 3, 0, 1, 0], [0, 1, 2, 3, 4, 0, 0],
                                           [0, 1, 2, 0, 0, 0, 0]]  # fmt: skip
    alone = model_of().examples(EXAMPLES, 7, pack=False)
    assert alone["sequence_id"].max() == 1 and len(alone["ids"]) == 4


def loss_and_gradients(model, features, **options):
    shape = "batch:{},length:{}".format(*features["ids"].shape)
    result = mtf.train.fit(
        model.loss, features, steps=1, dims=dict.fromkeys(features, shape), progress=False, init_checkpoint=model.weights,
        optimizer=mtf.optimize.SgdOptimizer(1.0), **options,
    )  # fmt: skip
    return result.losses[0], {n: w - result.variables[n] for n, w in model.weights.items()}


@pytest.mark.slips
@pytest.mark.slow_but(1)
@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral", "gemma2"])
def test_packed_examples_are_alone(name):
    """Windows, learned positions and experts, too."""
    model = model_of(name)
    alone = model.examples([*EXAMPLES, {"ids": [3, 4]}], 8, pack=False)
    packed = model.examples([*EXAMPLES, {"ids": [3, 4]}], 8)
    assert len(packed["ids"]) == 3 and len(alone["ids"]) == 5
    # Of even numbers of rows, for layouts; the last is of padding alone.
    packed = {n: np.concatenate([x, np.zeros_like(x[:1])]) for n, x in packed.items()}
    loss, gradients = loss_and_gradients(model, alone)
    # Of experts, groups of tokens join rows, so that a loss of microbatches is not known.
    cases = [{}, TENSOR] if name == "mixtral" else [{}, TENSOR, {"microbatches": 2}]
    for options in cases:
        # Experts ask the model for its layout.
        mesh = {key: options[key] for key in options.keys() & TENSOR.keys()}
        other, others = loss_and_gradients(model_of(name, **mesh), packed, **options)
        np.testing.assert_allclose(other, loss, rtol=1e-5)
        for key, gradient in gradients.items():
            scale = np.abs(gradient).max() + 1e-3
            np.testing.assert_allclose(others[key], gradient, rtol=0, atol=1e-4 * scale)


TEMPLATE = (
    "{% for m in messages %}<s>{{ m.role }}:{{ m.content }}<e>{% endfor %}"
    "{% if add_generation_prompt %}<s>bot:{% endif %}"
)


def model_of_texts():
    """A model whose tokenizer has a token for each letter, and begins texts with <s>."""
    words = {word: i for i, word in enumerate([*"abcdefghijklmnopqrstuvwxyz:!?. ", "user"])}
    made = tokenizers.Tokenizer(kinds.WordLevel(words, unk_token="."))
    made.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex("user|."), "isolated")
    made.add_special_tokens(["<s>", "<e>"])
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", made.token_to_id("<s>"))]
    )
    model = model_of()
    model.tokenizer = mtf.models.Tokenizer(made, TEMPLATE.replace("bot", "assistant"))
    model.config["eos_token_id"] = [made.token_to_id("<e>"), 3]
    return model


def counted(model, example):
    """What has a loss is in capitals, and control tokens are signs."""
    rows = model.examples([example], 80)
    number = rows["sequence_id"][0].sum()
    signs, found = {"<s>": "<", "<e>": ">"}, ""
    for id_, weight in zip(rows["ids"][0][:number], rows["weights"][0]):
        token = model.tokenizer.tokenizer.id_to_token(id_)
        token = signs.get(token, token)
        found += token.upper().replace(">", "#") if weight else token
    return found


def test_what_counts_in_texts():
    model = model_of_texts()
    assert counted(model, {"text": "hi there"}) == "<HI THERE#"
    assert counted(model, {"prompt": "one and ", "completion": "two"}) == "<one and TWO#"
    messages = [
        {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes?"},
        {"role": "user", "content": "go"}, {"role": "assistant", "content": "no."},
    ]  # fmt: skip
    found = counted(model, {"messages": messages})
    assert found == "<user:hi><assistant:YES?#<user:go><assistant:NO.#"
    # What the assistant says first, with a template that asks for the first message.
    first = '{% if messages[0].role == "system" %}{{ raise_exception("no system") }}{% endif %}'
    model.tokenizer.chat_template = first + model.tokenizer.chat_template
    found = counted(model, {"messages": messages[1:]})
    assert found == "<assistant:YES?#<user:go><assistant:NO.#"
    # A conversation that ends with a question, whose answer is not there.
    assert counted(model, {"messages": messages[:3]}) == "<user:hi><assistant:YES?#<user:go>"


# Templates that write a message otherwise where it is the last one: what counts of a conversation.
LAST = {
    # As Qwen 3 does: an answer has room for thoughts there alone, and earlier ones lose theirs.
    "thoughts": (
        "{% for m in messages %}<s>{{ m.role }}:{% if loop.last and m.role == 'assistant' %}!!"
        "{% endif %}{{ m.content.split('!')[-1] }}<e>{% endfor %}"
        "{% if add_generation_prompt %}<s>assistant:{% endif %}",
        "<user:hi><assistant:YES?#<user:go><assistant:!!NO.#",
    ),
    # As Mistral's: what the system says is with the last question.
    "system": (
        "{% for m in messages %}{% if m.role == 'user' %}<s>"
        "{% if m == (messages | selectattr('role', 'equalto', 'user') | list)[-1] %}sys {% endif %}"
        "{{ m.content }}<s>{% else %}{{ m.content }}<e>{% endif %}{% endfor %}",
        "<hi<YES?#<sys go<NO.#",
    ),
    # Whose calls of tools have no content.
    "calls": (
        "{% for m in messages %}<s>{{ m.role }}:{% if m.tool_calls %}{{ m.tool_calls[0] }}"
        "{% else %}{{ m.content }}{% endif %}<e>{% endfor %}"
        "{% if add_generation_prompt %}<s>assistant:{% endif %}",
        "<user:hi><assistant:CALL#<user:go><assistant:NO.#",
    ),
}


@pytest.mark.parametrize("name", LAST)
def test_answers_that_are_not_the_last(name):
    model = model_of_texts()
    model.tokenizer.chat_template, expected = LAST[name]
    messages = [
        {"role": "user", "content": "hi"}, {"role": "assistant", "content": "hm!yes?"},
        {"role": "user", "content": "go"}, {"role": "assistant", "content": "no."},
    ]  # fmt: skip
    if name == "system":
        messages[1]["content"] = "yes?"
    if name == "calls":
        messages[1] = {"role": "assistant", "content": None, "tool_calls": ["call"]}
    assert counted(model, {"messages": messages}) == expected


def test_a_line_of_many_brackets(tmp_path):
    file = tmp_path / "train.jsonl"
    file.write_text("[" * 100_000)
    with pytest.raises(ValueError, match=r"train\.jsonl, line 1 is no JSON: maximum recursion"):
        model_of().examples(file, 8)


def test_files(tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_text("\n".join(map(json.dumps, EXAMPLES)) + "\n\n")
    model = model_of()
    for name, array in model.examples(path, 7).items():
        np.testing.assert_array_equal(array, model.examples(EXAMPLES, 7)[name])
    # With the mark that editors of Windows put before a text.
    path.write_text("\n".join(map(json.dumps, EXAMPLES)), encoding="utf-8-sig")
    np.testing.assert_array_equal(
        model.examples(path, 7)["ids"], model.examples(EXAMPLES, 7)["ids"]
    )
    path.write_text('{"ids": [1, 2]}\n{"ids": ')
    with pytest.raises(ValueError, match=r"train.jsonl, line 2 is no JSON"):
        model.examples(path, 7)
    path.write_bytes('{"ids": [1, 2]}\n{"text": "é"}\n'.encode("latin1"))
    with pytest.raises(ValueError, match=r"train.jsonl, line 2 is not in UTF-8: .* 0xe9"):
        model.examples(path, 7)
    for text in ("", "\n \n"):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"examples: .*train.jsonl has none"):
            model.examples(path, 7)


def test_what_is_too_long_is_cut():
    with pytest.warns(mtf.MeshTensorFlowWarning, match="2 are longer than length=3, and are cut"):
        rows = model_of().examples(EXAMPLES, 3)
    assert rows["ids"].tolist() == [[5, 6, 7], [9, 10, 0], [11, 12, 13], [16, 17, 18]]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model_of().examples(EXAMPLES, 5)


@pytest.mark.parametrize(
    "examples, text",
    [
        ([], "the list has none"),
        ([{"words": "a"}], r"example 0 of the list is none of .*\{\"words\": \"a\"\}"),
        ([{"text": "a"}], "example 0 of the list is of texts, and the model has no tokenizer"),
        ([{"ids": []}], "example 0 of the list has no ids"),
        ([{"ids": [1], "weights": [1, 1]}], "has 1 ids, but 2 weights"),
        (["a"], "example 0 of the list is none of"),
        (None, "they are a JSONL file or dictionaries, not None"),
        (
            [{"ids": [1, 2]}, {"ids": [1.5, 2]}],
            "example 1 of the list has ids that are no list of i",
        ),
        ([{"ids": 7}], "has ids that are no list of ints, such as 7"),
        ([{"ids": [1, 96]}], "has the id 96, which is not in the vocabulary, 0 to 95"),
        ([{"ids": [1, -1]}], "has the id -1, which is not in the vocabulary"),
        ([{"ids": [1, 2], "weights": [0, float("nan")]}], "has weights that are no .* such as nan"),
        ([{"ids": [1]}, {"ids": [1, 2], "weights": [1, 0]}], "the list has no id to learn: those"),
        (
            [{"ids": [1, 2], "weights": [1, -0.5]}],
            "no list of finite numbers of 0 or more, .* -0.5",
        ),
        ([{"ids": [1, 2], "weights": [0, 1e39]}], r"has weights that are no .* such as 1e\+39"),
    ],
)
def test_mistakes(examples, text):
    with pytest.raises(ValueError, match=text):
        model_of().examples(examples, 8)


@pytest.mark.parametrize(
    "example, text",
    [
        ({"text": 5}, "has text=5, which is no text"),
        ({"text": "\ud800"}, "has a text that is not in UTF-8: .*surrogates not allowed"),
        ({"prompt": None, "completion": "a"}, "has prompt=None, which is no text"),
        ({"prompt": "a", "completion": ["a"]}, r"has completion=\['a'\], which is no text"),
        ({"messages": "hi"}, r"no list of objects, each with a role, such as .*\.\.\.}: 'hi'"),
        ({"messages": [{"role": "user"}, "hi"]}, r"no list of objects, .*\.\.\.}: 'hi'"),
        ({"messages": [{"content": "hi"}]}, r"each with a role, .*: {'content': 'hi'}"),
        ({"messages": [{"role": "bad"}]}, r"the model's template .* it says: no content"),
    ],
)
def test_texts_that_are_none(example, text):
    model = model_of_texts()
    model.tokenizer.chat_template = (
        "{% for m in messages if m.content is not defined %}{{ raise_exception('no content') }}"
        "{% endfor %}"
    )
    with pytest.raises(ValueError, match=f"^examples: example 1 of the list.* {text}"):
        model.examples([{"text": "hi"}, example], 8)


@pytest.mark.parametrize(
    "example, text",
    [
        ({"prompt": 5, "completion": "a"}, "has prompt=5, which is no text"),
        ({"messages": 5}, "no list of objects, each with a role"),
        ({"messages": [{"role": "user"}, {"role": "assistant"}]}, "has content=None, which is no"),
        ({"ids": 5, "weights": 5}, "has ids that are no list of ints, such as 5"),
    ],
)
def test_questions_that_are_none(example, text):
    with pytest.raises(ValueError, match=f"^examples: example 0 of the list .*{text}"):
        model_of_texts().exact_match([example])


def test_a_length_of_one():
    with pytest.raises(ValueError, match="length=1 must be an integer of at least 2"):
        model_of().examples(EXAMPLES, 1)
