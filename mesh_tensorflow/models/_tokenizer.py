"""Tokenizers of models, and their chat templates."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Optional

from mesh_tensorflow._core.errors import missing_package
from mesh_tensorflow._huggingface import read_json
from mesh_tensorflow.transformer.vocabulary import Vocabulary

# Control tokens, by llama.cpp's number of the type; texts have them by their names.
_CONTROL = 3
_TOKENIZER, _TEMPLATE = "tokenizer.json", "chat_template.jinja"
_SETTINGS = "tokenizer_config.json"
# Tokens that templates name, without knowing which they are.
_NAMED = ("bos_token", "eos_token")


class Tokenizer(Vocabulary):
    """The vocabulary of a model, by the package tokenizers.

    Attributes:
      tokenizer: a tokenizers.Tokenizer.
      chat_template: the template of conversations, in jinja2's language; or None.
      named_tokens: what `bos_token` and `eos_token` are in the template.
    """

    def __init__(
        self,
        tokenizer: Any,
        chat_template: Optional[str] = None,
        named_tokens: Optional[Mapping[str, str]] = None,
    ) -> None:
        """Creates it; `of_folder` and `of_gguf` do so for users.

        Args:
          tokenizer: a tokenizers.Tokenizer.
          chat_template: the template of conversations, or None.
          named_tokens: what `bos_token` and `eos_token` are in the template; nothing if None.
        """
        self.tokenizer = tokenizer
        self.chat_template = chat_template
        self.named_tokens = dict(named_tokens or {})

    @property
    def vocab_size(self) -> int:
        """The number of ids."""
        return self.tokenizer.get_vocab_size()

    def encode(self, s: str) -> list[int]:
        """Returns the ids of a text; names of control tokens in it become these.

        Args:
          s: a string.
        """
        return self.tokenizer.encode(s, add_special_tokens=False).ids

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of ids, without control tokens.

        Args:
          ids: integers.
        """
        return self.tokenizer.decode([int(i) for i in ids], skip_special_tokens=True)

    def prompt(self, text: str, max_length: Optional[int] = None) -> list[int]:
        """Returns the ids of a text, with those that begin and end texts of the model.

        Args:
          text: a string.
          max_length: how many ids there are at most, with these: the text is cut; None for any.
        """
        # Cut before the ids that end a text are there, which have to stay.
        encoding = self.tokenizer.encode(text, add_special_tokens=False)
        if max_length is not None:
            encoding.truncate(max(0, max_length - self.tokenizer.num_special_tokens_to_add(False)))
        return self.tokenizer.post_process(encoding).ids

    def chat(self, messages: Sequence[Mapping[str, str]], answers: bool = True) -> list[int]:
        """Returns the ids of a conversation.

        Args:
          messages: dictionaries with "role" ("system", "user" or "assistant") and "content".
          answers: whether the model is to answer: then its answer is begun.

        Raises:
          ImportError: jinja2 is not installed.
          ValueError: the model has no template of conversations, or that does not take these.
        """
        if self.chat_template is None:
            raise ValueError("the model has no template of conversations; give it a text")
        try:
            import jinja2
            from jinja2 import sandbox
        except ImportError as e:
            raise missing_package("a chat template", "jinja2", "pip install jinja2") from e

        def refuse(text: str) -> None:
            raise ValueError(f"it says: {text}")

        # A template is code of whoever wrote the folder.
        # Line breaks around blocks are left out, as transformers does, for which they are written.
        environment = sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        try:
            template = environment.from_string(self.chat_template)
            text = template.render(
                messages=list(messages),
                add_generation_prompt=answers,
                raise_exception=refuse,
                **{**dict.fromkeys(_NAMED, ""), **self.named_tokens},
            )
        except (jinja2.TemplateError, ValueError, TypeError) as e:
            raise ValueError(f"the model's template of conversations refuses these: {e}") from e
        # Not `prompt`: the template itself says whether a conversation begins with `bos_token`.
        return self.encode(text)

    def save(self, path: str) -> None:
        """Writes tokenizer.json, the template of conversations, and its tokens to a folder.

        Args:
          path: a directory.
        """
        self.tokenizer.save(os.path.join(path, _TOKENIZER))
        if self.chat_template is not None:
            with open(os.path.join(path, _TEMPLATE), "w", encoding="utf-8") as f:
                f.write(self.chat_template)
        if self.named_tokens:
            with open(os.path.join(path, _SETTINGS), "w", encoding="utf-8") as f:
                json.dump(self.named_tokens, f, indent=2)


def of_folder(path: str) -> Optional[Tokenizer]:
    """Returns the tokenizer of a folder; None if there is none, or the package is not installed.

    Args:
      path: a directory.

    Raises:
      ValueError: tokenizer.json or tokenizer_config.json is damaged.
    """
    file = os.path.join(path, _TOKENIZER)
    if not os.path.isfile(file) or not _is_installed():
        return None
    import tokenizers

    try:
        made = tokenizers.Tokenizer.from_file(file)
    except Exception as error:  # the package has none of its own
        raise ValueError(f"{file} is damaged: {error}") from error
    # Some have lengths of their training here, to which all texts would be cut or filled up.
    made.no_truncation()
    made.no_padding()
    template_file, settings_file = (os.path.join(path, name) for name in (_TEMPLATE, _SETTINGS))
    settings = read_json(settings_file) if os.path.isfile(settings_file) else {}
    template = settings.get("chat_template")  # where older folders have it
    if os.path.isfile(template_file):
        with open(template_file, encoding="utf-8") as f:
            template = f.read()
    tokens = {name: settings.get(name) for name in _NAMED}
    # A token with settings of its own is an object there.
    tokens = {name: t.get("content") if isinstance(t, dict) else t for name, t in tokens.items()}
    named = {name: t for name, t in tokens.items() if isinstance(t, str)}
    return Tokenizer(made, template if isinstance(template, str) else None, named)


def of_gguf(metadata: Mapping[str, Any]) -> Optional[Tokenizer]:
    """Returns the tokenizer of a GGUF file; None if it is of a kind that is not known.

    Args:
      metadata: its `metadata`.
    """
    # Byte pairs as in GPT-2; before they are joined, some models cut numbers into digits.
    kinds = {"smollm": True, "gpt-2": False, "default": False}
    kind = metadata.get("ggml.pre", "default")
    if metadata.get("ggml.model") != "gpt2" or kind not in kinds or not _is_installed():
        return None
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    tokens = metadata["ggml.tokens"]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    merges = [tuple(pair.split(" ")) for pair in metadata["ggml.merges"]]
    made = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    steps: list[Any] = [pre_tokenizers.ByteLevel(add_prefix_space=False)]
    if kinds[kind]:
        steps.insert(0, pre_tokenizers.Digits(individual_digits=True))
    made.pre_tokenizer = pre_tokenizers.Sequence(steps)
    made.decoder = decoders.ByteLevel()
    types = metadata.get("ggml.token_type", [])
    made.add_special_tokens([token for token, t in zip(tokens, types) if t == _CONTROL])
    ids = {name: metadata.get(f"ggml.{name}_id") for name in _NAMED}
    named = {name: tokens[i] for name, i in ids.items() if i is not None}
    return Tokenizer(made, metadata.get("chat_template"), named)


def _is_installed() -> bool:
    return importlib.util.find_spec("tokenizers") is not None
