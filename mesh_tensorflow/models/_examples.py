"""Texts, prompts with completions, and conversations as rows of ids to train on."""

from __future__ import annotations

import json
import numbers
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Optional, Union

import numpy as np

from mesh_tensorflow._core.errors import check_flag, check_whole, is_integer, reason, warn_once
from mesh_tensorflow.models._tokenizer import Tokenizer

# A JSONL file, or its lines.
Examples = Union[str, "os.PathLike[str]", Iterable[Mapping[str, Any]]]
_LONGEST = 10_000_000  # ids of a row
# Why a text has an id that is not in the vocabulary.
OF_TOKENIZER = ": the tokenizer makes it of the text, and so is not that of the weights"
_OTHER = "."  # a content of a message
_LARGEST = float(np.finfo(np.float32).max)  # of a weight
_KINDS = '{"text": ...}, {"prompt": ..., "completion": ...}, {"messages": [...]} or {"ids": [...]}'


class _Example(NamedTuple):
    """Ids, and the weight of the loss of each."""

    ids: list[int]
    weights: list[float]


def rows_of(
    examples: Examples,
    tokenizer: Optional[Tokenizer],
    end: Optional[int],
    length: int,
    pack: bool,
    vocab: int,
) -> dict[str, np.ndarray]:
    """Returns the features of `LanguageModel.loss`; see `LanguageModel.examples`.

    Args:
      examples: the path of a JSONL file, or dictionaries.
      tokenizer: a Tokenizer; None if all examples are ids.
      end: the id that ends a text, or None.
      length: the number of ids of a row.
      pack: whether a row may have several examples.
      vocab: the number of ids of the model.

    Raises:
      ValueError: there are no examples, or one is of no such form.
    """
    check_whole("examples", "length", length, least=2, most=_LONGEST)
    check_flag("examples", "pack", pack)
    rows: list[list[_Example]] = []
    room = number_cut = 0
    for where, example in _read(examples):
        encoded = _example_of(where, example, tokenizer, end)
        if not encoded.ids:
            raise ValueError(f"examples: {where} has no ids; leave it out")
        # The lookup of an embedding would give zeros for such an id, and no error.
        wrong = [id_ for id_ in encoded.ids if not 0 <= id_ < vocab]
        if wrong:
            raise ValueError(
                f"examples: {where} has the id {wrong[0]}, which is not in the vocabulary, 0 to "
                f"{vocab - 1}{'' if 'ids' in example else OF_TOKENIZER}"
            )
        number_cut += len(encoded.ids) > length
        encoded = _Example(encoded.ids[:length], encoded.weights[:length])
        # In the last row alone: rows keep the order of the examples, and none is looked at twice.
        if not pack or not rows or len(encoded.ids) > room:
            rows.append([])
            room = length
        rows[-1].append(encoded)
        room -= len(encoded.ids)
    if not rows:
        raise ValueError(f"examples: {_name_of(examples)} has none")
    if number_cut:
        warn_once(
            f"examples: {number_cut} are longer than length={length}, and are cut; a larger length "
            "keeps all of them"
        )
    features = _features(rows, length)
    if not features["weights"].any():
        raise ValueError(
            f"examples: {_name_of(examples)} has no id to learn: those count that come after "
            f"another one within length={length}, and whose weight is not 0, as of a completion or "
            "of what the assistant says"
        )
    return features


def _features(rows: Sequence[Sequence[_Example]], length: int) -> dict[str, np.ndarray]:
    shape = [len(rows), length]
    features = {name: np.zeros(shape, np.int32) for name in ("ids", "sequence_id", "position")}
    features["weights"] = np.zeros(shape, np.float32)
    for i, row in enumerate(rows):
        begin = 0
        # From 1, as 0 is that of padding.
        for number, (ids, weights) in enumerate(row, 1):
            place = slice(begin, begin + len(ids))
            features["ids"][i, place] = ids
            features["weights"][i, place] = weights
            features["sequence_id"][i, place] = number
            # Each example begins at position 0, wherever in the row it is.
            features["position"][i, place] = range(len(ids))
            # Nothing of it comes before the first id.
            features["weights"][i, begin] = 0.0
            begin += len(ids)
    return features


def _name_of(examples: Examples) -> str:
    return os.fspath(examples) if isinstance(examples, (str, os.PathLike)) else "the list"


def _read(examples: Examples) -> Iterator[tuple[str, Any]]:
    """Yields where each example is, and the example."""
    name = _name_of(examples)
    if not isinstance(examples, Iterable) and not isinstance(examples, os.PathLike):
        raise ValueError(f"examples: they are a JSONL file or dictionaries, not {examples!r}")
    if not isinstance(examples, (str, os.PathLike)):
        for i, example in enumerate(examples):
            yield f"example {i} of {name}", example
        return
    try:
        file = open(examples, "rb")
    except OSError as error:
        raise ValueError(
            f"examples: {name!r} cannot be read as a JSONL file: {reason(error)}"
        ) from error
    with file:
        for i, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                # Editors of Windows begin a text with a mark, which is no part of the first line.
                text = line.decode("utf-8-sig" if i == 1 else "utf-8")
                yield f"{name}, line {i}", json.loads(text)
            except UnicodeDecodeError as error:
                raise ValueError(f"examples: {name}, line {i} is not in UTF-8: {error}") from error
            except (ValueError, RecursionError) as error:
                raise ValueError(f"examples: {name}, line {i} is no JSON: {error}") from error


def _is_weight(value: object) -> bool:
    # Finite as float32, which they become; with one below 0, an id would be unlearned without end.
    return isinstance(value, numbers.Real) and 0 <= value <= _LARGEST  # type: ignore[operator]


def _numbers(where: str, name: str, given: Any, is_right: Callable[[object], bool]) -> list[Any]:
    """Returns a list of an example, all of which are numbers of a kind."""
    numbers = list(given) if isinstance(given, Iterable) else [given]
    wrong = [x for x in numbers if not is_right(x)]
    if wrong or not isinstance(given, Iterable):
        kind = "ints" if name == "ids" else "finite numbers of 0 or more"
        raise ValueError(
            f"examples: {where} has {name} that are no list of {kind}, such as "
            f"{(wrong or [given])[0]!r}"
        )
    return numbers


def _text(where: str, name: str, value: object) -> str:
    """Returns a field of an example that is a text."""
    try:
        if isinstance(value, str):
            value.encode("utf-8")  # JSON can say half of a pair of UTF-16, which no tokenizer takes
            return value
    except UnicodeEncodeError as error:
        raise ValueError(f"examples: {where} has a {name} that is not in UTF-8: {error}") from error
    raise ValueError(f"examples: {where} has {name}={value!r:.80}, which is no text")


def _messages(where: str, value: Any) -> list[Mapping[str, Any]]:
    """Returns the messages of a conversation; their contents are the template's."""
    is_list = isinstance(value, Sequence) and not isinstance(value, str)
    wrong = [
        x
        for x in (value if is_list else [value])
        if not isinstance(x, Mapping) or not isinstance(x.get("role"), str)
    ]
    if wrong or not is_list:
        raise ValueError(
            f"examples: {where} has messages that are no list of objects, each with a role, such "
            f'as {{"role": "user", "content": ...}}: {(wrong or [value])[0]!r:.80}'
        )
    return list(value)


def _example_of(
    where: str, example: Any, tokenizer: Optional[Tokenizer], end: Optional[int]
) -> _Example:
    fields = set(example) if isinstance(example, Mapping) else set()
    if fields in ({"ids"}, {"ids", "weights"}):
        ids = _numbers(where, "ids", example["ids"], is_integer)
        weights = _numbers(where, "weights", example.get("weights", [1] * len(ids)), _is_weight)
        if len(weights) != len(ids):
            raise ValueError(f"examples: {where} has {len(ids)} ids, but {len(weights)} weights")
        return _Example([int(i) for i in ids], [float(x) for x in weights])
    if not any(fields == known for known in ({"text"}, {"prompt", "completion"}, {"messages"})):
        text = json.dumps(example, ensure_ascii=False, default=str)[:80]
        raise ValueError(f"examples: {where} is none of {_KINDS}: {text}")
    if tokenizer is None:
        raise ValueError(
            f"examples: {where} is of texts, and the model has no tokenizer; give ids, or a folder "
            "with tokenizer.json (pip install tokenizers)"
        )
    if "messages" in fields:
        messages = _messages(where, example["messages"])
        try:
            return _of_conversation(messages, tokenizer)
        except ValueError as error:  # of the template, which does not know where they are from
            raise ValueError(f"examples: {where}: {error}") from error
    ends = [] if end is None else [end]
    if "text" in fields:
        ids = tokenizer.prompt(_text(where, "text", example["text"])) + ends
        return _Example(ids, [1.0] * len(ids))
    prompt = tokenizer.prompt(_text(where, "prompt", example["prompt"]))
    completion = tokenizer.encode(_text(where, "completion", example["completion"])) + ends
    weights = [0.0] * len(prompt) + [1.0] * len(completion)
    return _Example(prompt + completion, weights)


def questions_of(examples: Examples) -> list[tuple[Any, Any]]:
    """Returns prompts, each with what is to follow it: texts, conversations or ids.

    Args:
      examples: the path of a JSONL file, or dictionaries.

    Raises:
      ValueError: there are none, or one has no end that can be asked for.
    """
    pairs = [_question_of(where, example) for where, example in _read(examples)]
    if not pairs:
        raise ValueError(f"exact_match: {_name_of(examples)} has no examples")
    return pairs


def _question_of(where: str, example: Any) -> tuple[Any, Any]:
    fields = set(example) if isinstance(example, Mapping) else set()
    if fields == {"prompt", "completion"}:
        prompt, completion = (_text(where, n, example[n]) for n in ("prompt", "completion"))
        return prompt, completion
    if fields == {"messages"}:
        *before, last = _messages(where, example["messages"]) or [{}]
        if before and last.get("role") == "assistant":
            return before, _text(where, "content", last.get("content"))
    if fields == {"ids", "weights"}:
        ids = _numbers(where, "ids", example["ids"], is_integer)
        weights = _numbers(where, "weights", example["weights"], _is_weight)
        # The answer is the last run of ids with a weight: earlier turns may have weights, too.
        begin = len(ids)
        while begin and weights[begin - 1]:
            begin -= 1
        if 0 < begin < len(ids):
            return ids[:begin], ids[begin:]
    raise ValueError(
        f"exact_match: {where} has no prompt with an answer at its end; they are of "
        '{"prompt": ..., "completion": ...}, of {"messages": [...]} that end with the assistant, '
        'or of {"ids": [...], "weights": [...]}'
    )


def _of_conversation(messages: Sequence[Mapping[str, Any]], tokenizer: Tokenizer) -> _Example:
    """Returns a whole conversation; what the assistant says has a weight."""
    ids = tokenizer.chat(messages, answers=False)
    weights = [0.0] * len(ids)
    for i, message in enumerate(messages):
        if message.get("role") == "assistant":
            where = _ids_of_answer(messages, i, ids, tokenizer)
            weights[where] = [1.0] * len(weights[where])
    return _Example(ids, weights)


def _ids_of_answer(
    messages: Sequence[Mapping[str, Any]], i: int, ids: list[int], tokenizer: Tokenizer
) -> slice:
    """Returns which ids of a conversation the model says as one of its messages, up to its end.

    Args:
      messages: those of the conversation.
      i: the number of the message.
      ids: those of the conversation.
      tokenizer: a Tokenizer with a template.
    """

    def other(some: Sequence[Mapping[str, Any]]) -> list[int]:
        changed = [*some[:i], {**some[i], "content": _OTHER}, *some[i + 1 :]]
        return tokenizer.chat(changed, answers=False)

    # Where it is the last one, its end is that of all; and where the model would begin to say it,
    # if it is not the first one: many templates refuse a conversation of nothing.
    alone = tokenizer.chat(messages[: i + 1], answers=False)
    before = tokenizer.chat(messages[:i]) if i else []
    changed = other(messages)
    if changed == ids:  # a template writes calls of tools without the content
        begin, finish = _shared(before, ids), _shared(alone, ids)
    else:
        # By the content, as a message may be another one where it is the last: some templates leave
        # out, of earlier answers, what the model thought, or move the system's message.
        content, last = _difference(ids, changed), _difference(alone, other(messages[: i + 1]))
        begin = content.start
        finish = content.stop + _shared(alone[last.stop :], ids[content.stop :])
    return slice(len(before) if i and ids[: len(before)] == before else begin, finish)


def _shared(a: Sequence[int], b: Sequence[int]) -> int:
    """Returns how many ids at their beginnings are the same."""
    return next((n for n, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def _difference(a: list[int], b: list[int]) -> slice:
    """Returns which ids of the first are others than in the second, between what is the same."""
    begin = _shared(a, b)
    return slice(begin, len(a) - _shared(a[begin:][::-1], b[begin:][::-1]))
