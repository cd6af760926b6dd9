"""Reads examples from SQuAD files."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, Optional

import tensorflow.compat.v1 as tf

from mesh_tensorflow._flags import FLAGS
from mesh_tensorflow.bert import tokenization

__all__ = ["SquadExample", "read_squad_examples"]

_SPACES = " \t\r\n\u202f"


class SquadExample:
    """A question about a paragraph.

    Attributes:
      qas_id: the question's id.
      question_text: the question.
      doc_tokens: the words of the paragraph.
      orig_answer_text: the answer, or None if it is unknown.
      start_position: the index of its first word.
      end_position: the index of its last word.
      is_impossible: whether the paragraph does not contain an answer.
    """

    def __init__(
        self,
        qas_id: str,
        question_text: str,
        doc_tokens: list[str],
        orig_answer_text: Optional[str] = None,
        start_position: Optional[int] = None,
        end_position: Optional[int] = None,
        is_impossible: bool = False,
    ) -> None:
        self.qas_id = qas_id
        self.question_text = question_text
        self.doc_tokens = doc_tokens
        self.orig_answer_text = orig_answer_text
        self.start_position = start_position
        self.end_position = end_position
        self.is_impossible = is_impossible

    def __str__(self) -> str:
        answer = f", answer={self.orig_answer_text!r}" if self.orig_answer_text else ""
        return f"SquadExample({self.qas_id!r}, {self.question_text!r}{answer})"

    __repr__ = __str__


class _Answer(NamedTuple):
    """An answer, with the indices of its first and last word."""

    text: Optional[str] = None
    start: Optional[int] = None
    end: Optional[int] = None


_IMPOSSIBLE = _Answer("", -1, -1)


def _words(text: str) -> tuple[list[str], list[int]]:
    """Returns the words of a text, and the word index of each character.

    White space belongs to the word before it.
    """
    words: list[str] = []
    of_char: list[int] = []
    inside = False
    for char in text:
        space = char in _SPACES
        if not space:
            if inside:
                words[-1] += char
            else:
                words.append(char)
        inside = not space
        of_char.append(len(words) - 1)
    return words, of_char


def _answer(question: Mapping[str, Any], words: list[str], of_char: list[int]) -> Optional[_Answer]:
    """Returns the answer to train on; None if the words do not contain its text."""
    found = question["answers"]
    if len(found) != 1:
        raise ValueError(
            f"For training, each question should have exactly 1 answer, but {question['id']!r} has "
            f"{len(found)}; with --version_2_with_negative it may be marked is_impossible"
        )
    text, offset = found[0]["text"], found[0]["answer_start"]
    start, end = of_char[offset], of_char[offset + len(text) - 1]
    there = " ".join(words[start : end + 1])
    if " ".join(tokenization.whitespace_tokenize(text)) not in there:
        tf.logging.warning(
            "Could not find answer: '%s' vs. '%s' of question %s, which is left out",
            there,
            text,
            question["id"],
        )
        return None
    return _Answer(text, start, end)


def _questions(paragraph: Mapping[str, Any], is_training: bool) -> Iterator[SquadExample]:
    words, of_char = _words(paragraph["context"])
    for question in paragraph["qas"]:
        impossible = False
        answer: Optional[_Answer] = _Answer()
        if is_training:
            impossible = FLAGS.version_2_with_negative and bool(question["is_impossible"])
            answer = _IMPOSSIBLE if impossible else _answer(question, words, of_char)
        if answer is not None:
            yield SquadExample(
                question["id"],
                question["question"],
                words,
                answer.text,
                answer.start,
                answer.end,
                impossible,
            )


def read_squad_examples(input_file: str, is_training: bool) -> list[SquadExample]:
    """Reads the questions of a file.

    Rajpurkar et al., "SQuAD: 100,000+ questions for machine comprehension of text" (2016).

    Args:
      input_file: a JSON file in the format of SQuAD.
      is_training: whether to read answers. A question whose answer is not found in its paragraph is
        skipped with a warning.

    Returns:
      A list of SquadExamples.

    Raises:
      ValueError: the file does not exist or is malformed, or a question does not have exactly one
        answer.
    """
    try:
        with tf.io.gfile.GFile(input_file, "r") as f:
            entries = json.load(f)["data"]
        return [
            example
            for entry in entries
            for paragraph in entry["paragraphs"]
            for example in _questions(paragraph, is_training)
        ]
    except tf.errors.NotFoundError as error:
        raise ValueError(f"read_squad_examples: there is no file {input_file}") from error
    except (KeyError, TypeError, IndexError, json.JSONDecodeError) as error:
        raise ValueError(
            f"read_squad_examples: {input_file} is not of SQuAD's form, with data, paragraphs, "
            f"context, qas, question, answers: {type(error).__name__} {error}"
        ) from error
