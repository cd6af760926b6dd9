"""Recovers the text of answers as in the paragraph, from tokens."""

from __future__ import annotations

from typing import Optional

import tensorflow.compat.v1 as tf

from mesh_tensorflow._flags import FLAGS
from mesh_tensorflow.bert import tokenization

__all__ = ["get_final_text"]


def _without_spaces(text: str) -> tuple[str, list[int]]:
    """Removes spaces from a text; returns the rest and the original index of each character."""
    places = [i for i, char in enumerate(text) if char != " "]
    return "".join(text[i] for i in places), places


def _left(message: str, *args: str) -> None:
    if FLAGS.verbose_logging:
        tf.logging.info("Unable to find text: " + message, *args)


def _place(pred_text: str, orig_text: str, tok_text: str) -> Optional[tuple[int, int]]:
    """Returns the indices of a prediction's first and last character in the original, or None."""
    start = tok_text.find(pred_text)
    if start == -1:
        _left("'%s' in '%s'", pred_text, orig_text)
        return None
    end = start + len(pred_text) - 1
    chars, places = _without_spaces(orig_text)
    tok_chars, tok_places = _without_spaces(tok_text)
    if len(chars) != len(tok_chars):
        _left("tokens have other characters: '%s', '%s'", chars, tok_chars)
        return None
    number = {place: i for i, place in enumerate(tok_places)}
    if start not in number or end not in number:
        _left("'%s' begins or ends with a space", pred_text)
        return None
    return places[number[start]], places[number[end]]


def get_final_text(pred_text: str, orig_text: str, do_lower_case: bool) -> str:
    """Returns the part of the original text that corresponds to a prediction.

    Tokens are lowercased and without accents, and the original words may contain more than the
    answer: for "Steve Smith's" and the prediction "steve smith" the result is "Steve Smith".

    Args:
      pred_text: tokens joined to words, separated by spaces.
      orig_text: the original words.
      do_lower_case: whether tokens were lowercased.

    Returns:
      A part of `orig_text`; all of it if the prediction cannot be found in it.
    """
    tokenizer = tokenization.BasicTokenizer(do_lower_case=do_lower_case)
    place = _place(pred_text, orig_text, " ".join(tokenizer.tokenize(orig_text)))
    return orig_text if place is None else orig_text[place[0] : place[1] + 1]
