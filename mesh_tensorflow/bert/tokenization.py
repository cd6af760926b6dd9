"""Word piece tokenization, for BERT's vocabularies."""

from __future__ import annotations

import collections
import dataclasses
import re
import string
import unicodedata
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Optional, Union

import tensorflow.compat.v1 as tf

from mesh_tensorflow._programs import FLAGS, define

__all__ = [
    "BasicTokenizer",
    "FullTokenizer",
    "WordpieceTokenizer",
    "convert_by_vocab",
    "convert_ids_to_tokens",
    "convert_to_unicode",
    "convert_tokens_to_ids",
    "load_vocab",
    "preserve_token",
    "printable_text",
    "validate_case_matches_checkpoint",
    "whitespace_tokenize",
]

define(
    preserve_unused_tokens=(False, "Whether [unused1] and its kin in a text stay whole."),
)

_UNUSED = re.compile(r"\[unused\d+\]")
_UNKNOWN = "[UNK]"
_INNER = "##"  # prefix of pieces that do not begin a word

# Chinese characters, each of which is a token; excludes Korean and Japanese syllables.
_CHINESE = re.compile(
    "[\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0002a6df\U0002a700-\U0002b73f"
    "\U0002b740-\U0002b81f\U0002b820-\U0002ceaf\U0002f800-\U0002fa1f]"
)

# Names of published models, before "/bert_model.ckpt".
_MODEL_NAME = re.compile(r"([A-Za-z0-9_-]+)/bert_model\.ckpt")
_LOWERED = {
    "uncased_L-24_H-1024_A-16",
    "uncased_L-12_H-768_A-12",
    "multilingual_L-12_H-768_A-12",
    "chinese_L-12_H-768_A-12",
}
_CASED = {"cased_L-12_H-768_A-12", "cased_L-24_H-1024_A-16", "multi_cased_L-12_H-768_A-12"}


def preserve_token(token: str, vocab: Collection[str]) -> bool:
    """Returns whether a token such as "[unused1]" is kept whole, as requested by a flag.

    Args:
      token: a string.
      vocab: the vocabulary; only its tokens are kept.
    """
    return bool(FLAGS.preserve_unused_tokens and _UNUSED.fullmatch(token) and token in vocab)


def validate_case_matches_checkpoint(do_lower_case: bool, init_checkpoint: Optional[str]) -> None:
    """Checks that text is lowercased for uncased models, and not for others.

    Args:
      do_lower_case: whether text is lowered.
      init_checkpoint: a path; only names of well-known models are recognized.

    Raises:
      ValueError: `do_lower_case` does not match the model.
    """
    match = _MODEL_NAME.search(init_checkpoint or "")
    if match is None:
        return
    should = False if match[1] in _CASED else True if match[1] in _LOWERED else do_lower_case
    if bool(do_lower_case) != should:
        raise ValueError(
            f"do_lower_case is {bool(do_lower_case)}, but init_checkpoint {init_checkpoint} is of "
            f"{match[1]}, which was trained with text {'lowered' if should else 'as it is'}: pass "
            f"--do_lower_case={should}"
        )


def convert_to_unicode(text: Union[str, bytes]) -> str:
    """Converts text to a string.

    Args:
      text: a string, or bytes in UTF-8; bytes that cannot be decoded are dropped.

    Raises:
      ValueError: it is of another type.
    """
    if isinstance(text, str):
        return text
    if isinstance(text, bytes):
        return text.decode("utf-8", "ignore")
    raise ValueError(f"Unsupported string type: {type(text).__name__}, of {text!r}")


def printable_text(text: Union[str, bytes]) -> str:
    """Converts text to a string for printing; see `convert_to_unicode`.

    Args:
      text: a string or bytes.
    """
    return convert_to_unicode(text)


def _decoded(line: bytes, vocab_file: str, number: int) -> str:
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"vocab_file: line {number} of {vocab_file} is not in UTF-8 ({error.reason} at byte "
            f"{error.start}: {line[:40]!r}), so its token would not be found in texts. Convert the "
            "file, as by `iconv -f latin1 -t utf-8`, or take the model's own vocab.txt"
        ) from error


def load_vocab(vocab_file: str) -> dict[str, int]:
    """Reads the tokens of a vocabulary with their ids, from 0; repeated tokens have one id.

    As in the classic, a line that repeats a token has no id of its own, so that ids after it are
    not the numbers of lines. Give the model `len(load_vocab(file))` as `vocab_size`.

    Args:
      vocab_file: a file with a token per line.

    Raises:
      ValueError: the file does not exist, is empty, or is not valid UTF-8.
    """
    vocab: dict[str, int] = collections.OrderedDict()
    try:
        with tf.io.gfile.GFile(vocab_file, "rb") as f:
            # Lines end at \n alone: a character that `str.splitlines` takes for an end would shift
            # all ids.
            lines = f.read().split(b"\n")
    except tf.errors.NotFoundError as error:
        raise ValueError(
            f"vocab_file: there is no file {vocab_file}; pass --vocab_file=FILE, the vocab.txt of "
            "the model"
        ) from error
    # Nothing follows the end of the last line, not even an empty token.
    for number, line in enumerate(lines if lines[-1] else lines[:-1], 1):
        # A file from Windows has \r before each \n, which is stripped with other spaces.
        vocab.setdefault(_decoded(line, vocab_file, number).strip(), len(vocab))
    if not vocab:
        raise ValueError(f"vocab_file: {vocab_file} is empty; it should have a token per line")
    return vocab


def convert_by_vocab(vocab: Mapping[Any, Any], items: Iterable[Any]) -> list[Any]:
    """Looks up items in a vocabulary.

    Args:
      vocab: a mapping.
      items: its keys.

    Returns:
      A list.

    Raises:
      KeyError: an item is missing.
    """
    # They are read twice, and an iterator could be read only once.
    items = list(items)
    missing = [item for item in items if item not in vocab]
    if missing:
        raise KeyError(
            f"the vocabulary of {len(vocab)} entries lacks {', '.join(map(repr, missing[:5]))}; "
            f"FullTokenizer.tokenize gives {_UNKNOWN} for words that it lacks"
        )
    return [vocab[item] for item in items]


def convert_tokens_to_ids(vocab: Mapping[str, int], tokens: Iterable[str]) -> list[int]:
    """Converts tokens to ids; see `convert_by_vocab`.

    Args:
      vocab: ids by token.
      tokens: strings.
    """
    return convert_by_vocab(vocab, tokens)


def convert_ids_to_tokens(inv_vocab: Mapping[int, str], ids: Iterable[int]) -> list[str]:
    """Converts ids to tokens; see `convert_by_vocab`.

    Args:
      inv_vocab: tokens by id.
      ids: integers.
    """
    return convert_by_vocab(inv_vocab, ids)


def whitespace_tokenize(text: str) -> list[str]:
    """Splits a text at white space.

    Args:
      text: a string.
    """
    return text.split()


# -- characters


def _is_space(char: str) -> bool:
    return char in " \t\n\r" or unicodedata.category(char) == "Zs"


def _is_control(char: str) -> bool:
    # These three are of the category Cc too, but separate words.
    return char not in "\t\n\r" and unicodedata.category(char) in ("Cc", "Cf")


def _is_punctuation(char: str) -> bool:
    """Returns whether a character is punctuation, or an ASCII symbol such as "$"."""
    return char in string.punctuation or unicodedata.category(char).startswith("P")


def _cleaned(text: str) -> str:
    """Returns text with normalized whitespace and without control characters."""
    # U+FFFD stands for what could not be decoded.
    kept = (c for c in text if c not in "\0\ufffd" and not _is_control(c))
    return "".join(" " if _is_space(c) else c for c in kept)


@dataclasses.dataclass(eq=False, repr=False)
class BasicTokenizer:
    """Splits text at white space, punctuation and Chinese characters.

    Attributes:
      do_lower_case: whether to lowercase words and remove accents.
      vocab: tokens that `preserve_token` may keep whole.
    """

    do_lower_case: bool = True
    vocab: Collection[str] = ()

    def tokenize(self, text: Union[str, bytes]) -> list[str]:
        """Splits a text into words.

        Args:
          text: a string or bytes.
        """
        # Chinese has no spaces between words, so that each character becomes a word of its own.
        spaced = _CHINESE.sub(r" \g<0> ", _cleaned(convert_to_unicode(text)))
        return [token for word in whitespace_tokenize(spaced) for token in self._tokens(word)]

    def _tokens(self, word: str) -> Sequence[str]:
        # First, as its brackets are punctuation, which would be split off.
        if preserve_token(word, self.vocab):
            return [word]
        if self.do_lower_case:
            # NFD makes each accent a character of its own, of the category Mn.
            chars = unicodedata.normalize("NFD", word.lower())
            word = "".join(c for c in chars if unicodedata.category(c) != "Mn")
        return "".join(f" {c} " if _is_punctuation(c) else c for c in word).split()


@dataclasses.dataclass(eq=False, repr=False)
class WordpieceTokenizer:
    """Splits words greedily into the longest pieces of a vocabulary, from the left.

    Wu et al., "Google's neural machine translation system" (2016), section 4.1.

    Attributes:
      vocab: the pieces; those that do not begin a word have the prefix "##".
      unk_token: the token for words that cannot be split.
      max_input_chars_per_word: the maximum word length; longer words become `unk_token`.
    """

    vocab: Collection[str]
    unk_token: str = _UNKNOWN
    max_input_chars_per_word: int = 200

    def tokenize(self, text: Union[str, bytes]) -> list[str]:
        """Splits words into pieces.

        Args:
          text: words separated by spaces, such as the output of a BasicTokenizer.
        """
        words = whitespace_tokenize(convert_to_unicode(text))
        return [piece for word in words for piece in self._pieces(word)]

    def _pieces(self, word: str) -> list[str]:
        # The search takes a time that grows with the square of the length.
        if len(word) > self.max_input_chars_per_word:
            return [self.unk_token]
        pieces: list[str] = []
        start = 0
        while start < len(word):
            prefix = _INNER if start else ""
            ends = range(len(word), start, -1)
            end = next((e for e in ends if prefix + word[start:e] in self.vocab), None)
            # As in training, a word of which a part is not in the vocabulary is unknown as a whole.
            if end is None:
                return [self.unk_token]
            pieces.append(prefix + word[start:end])
            start = end
        return pieces


class FullTokenizer:
    """Splits text into words, and words into pieces.

    Attributes:
      vocab: ids by token.
      inv_vocab: tokens by id.
      basic_tokenizer: a BasicTokenizer.
      wordpiece_tokenizer: a WordpieceTokenizer.
    """

    def __init__(self, vocab_file: str, do_lower_case: bool = True) -> None:
        """Creates a FullTokenizer.

        Args:
          vocab_file: a file with a token per line.
          do_lower_case: whether to lowercase words and remove accents.
        """
        self.vocab = load_vocab(vocab_file)
        self.inv_vocab = {index: token for token, index in self.vocab.items()}
        self.basic_tokenizer = BasicTokenizer(do_lower_case, self.vocab)
        self.wordpiece_tokenizer = WordpieceTokenizer(self.vocab)

    def tokenize(self, text: Union[str, bytes]) -> list[str]:
        """Splits a text into word pieces.

        Args:
          text: a string or bytes.
        """
        pieces: list[str] = []
        for word in self.basic_tokenizer.tokenize(text):
            whole = preserve_token(word, self.vocab)
            pieces += [word] if whole else self.wordpiece_tokenizer.tokenize(word)
        return pieces

    def convert_tokens_to_ids(self, tokens: Iterable[str]) -> list[int]:
        """Converts tokens to ids.

        Args:
          tokens: strings.
        """
        return convert_tokens_to_ids(self.vocab, tokens)

    def convert_ids_to_tokens(self, ids: Iterable[int]) -> list[str]:
        """Converts ids to tokens.

        Args:
          ids: integers.
        """
        return convert_ids_to_tokens(self.inv_vocab, ids)
