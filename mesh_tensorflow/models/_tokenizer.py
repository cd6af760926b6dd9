"""Tokenizers of models, and their chat templates."""

from __future__ import annotations

import datetime
import functools
import glob
import importlib.util
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Optional

from mesh_tensorflow._core.errors import is_whole, missing_package
from mesh_tensorflow._huggingface import check_no_pointer, read_json
from mesh_tensorflow.transformer.vocabulary import Vocabulary

# By llama.cpp's numbers of types: texts have control tokens by their names, which are not decoded;
# and tokens that are found before a text is split, which are.
_CONTROL, _WHOLE = 3, 4
# Into what the tokenizers of GGUF files split texts before they join byte pairs, as the models'
# authors published it: words, with what comes before them; numbers; signs; space.
_ENDINGS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACE = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_SIGNS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
_WORD_OR_SIGN = r"[^\r\n\p{L}\p{N}]?"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _cased(endings: str, numbers: str) -> str:
    """Returns the expression of a split that also cuts between small and capital letters."""
    small = f"{_WORD_OR_SIGN}{_UPPER}*{_LOWER}+{endings}"
    capital = f"{_WORD_OR_SIGN}{_UPPER}+{_LOWER}*{endings}"
    signs = _SIGNS.replace(r"[\r\n]", "[\\r\\n/]")
    return f"{small}|{capital}|{numbers}{signs}{_SPACE}"


_LLAMA3 = rf"{_ENDINGS}|{_WORD_OR_SIGN}\p{{L}}+|\p{{N}}{{1,3}}{_SIGNS}{_SPACE}"


class _Split(NamedTuple):
    """How a tokenizer of byte pairs takes a text apart.

    Attributes:
      pattern: a regular expression of the parts; None for that of GPT-2.
      digits: whether digits are parts of their own before that.
      whole: whether a part that is a token is not joined from pairs, and texts begin with
        `bos_token`, unless the file says otherwise.
      composed: whether letters and their accents are composed first.
    """

    pattern: Optional[str] = None
    digits: bool = False
    whole: bool = False
    composed: bool = False


_SPLITS = {
    **dict.fromkeys(("gpt-2", "default", "olmo", "mpt", "phi-2"), _Split()),
    "smollm": _Split(digits=True),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3"), _Split(_LLAMA3, whole=True)),
    **dict.fromkeys(("dbrx", "smaug-bpe"), _Split(_LLAMA3)),
    **dict.fromkeys(
        ("qwen2", "deepseek-r1-qwen"), _Split(_LLAMA3.replace("{1,3}", ""), composed=True)
    ),
    "gpt-4o": _Split(_cased(f"{_ENDINGS}?", r"\p{N}{1,3}")),
    "tekken": _Split(_cased("", r"\p{N}"), whole=True),
}
_ENDING = ".jinja"
_TOKENIZER, _TEMPLATE = "tokenizer.json", f"chat_template{_ENDING}"
_SETTINGS, _TOKENS = "tokenizer_config.json", "special_tokens_map.json"
_FURTHER = "additional_chat_templates"
_DEFAULT, _WITH_TOOLS = "default", "tool_use"  # names of templates
# Tokens that templates name, without knowing which they are. Most begin a conversation with the
# first, and join it to texts, for which it has to be there.
_BEGIN_AND_END = ("bos_token", "eos_token")
# What a template gets by other arguments of `chat`.
_OF_CHAT = frozenset(["messages", "tools", "documents", "add_generation_prompt"])
_THOUGHTS = ("reasoning_content", "thinking", "reasoning")  # names of what the model thought
_NAMED = (*_BEGIN_AND_END, "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer(Vocabulary):
    """The vocabulary of a model, by the package tokenizers.

    Attributes:
      tokenizer: a tokenizers.Tokenizer.
      chat_template: the template of conversations, in jinja2's language; or None.
      named_tokens: what `bos_token`, `eos_token` and others are in the template.
      further_templates: templates of other purposes by name; "tool_use" is that of conversations
        with tools.
      settings: what tokenizer_config.json says beside templates, which `save` writes again: by its
        `tokenizer_class` transformers takes tokenizer.json as it is, or makes some of it anew.
    """

    def __init__(
        self,
        tokenizer: Any,
        chat_template: Optional[str] = None,
        named_tokens: Optional[Mapping[str, str]] = None,
        further_templates: Optional[Mapping[str, str]] = None,
        settings: Optional[Mapping[str, Any]] = None,
    ) -> None:
        """Creates it; `of_folder` and `of_gguf` do so for users.

        Args:
          tokenizer: a tokenizers.Tokenizer.
          chat_template: the template of conversations, or None.
          named_tokens: what `bos_token`, `eos_token` and others are in the template; nothing if
            None.
          further_templates: templates of other purposes by name; none if None.
          settings: further fields of tokenizer_config.json; none if None.
        """
        self.tokenizer = tokenizer
        self.chat_template = chat_template
        self.named_tokens = dict(named_tokens or {})
        self.further_templates = dict(further_templates or {})
        self.settings = dict(settings or {})

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

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        answers: bool = True,
        tools: Optional[Sequence[Mapping[str, Any]]] = None,
        chat_template_kwargs: Optional[Mapping[str, Any]] = None,
    ) -> list[int]:
        """Returns the ids of a conversation.

        Args:
          messages: dictionaries with "role" ("system", "user" or "assistant") and "content", and
            with what else the template reads, such as "tool_calls"; of what JSON has.
          answers: whether the model is to answer: then its answer is begun.
          tools: the JSON schemas of functions that the model may call, for a template that knows
            of such; None for none.
          chat_template_kwargs: what else the template may ask for by name, such as
            {"enable_thinking": False} for that of Qwen 3; of what JSON has.

        Raises:
          ImportError: jinja2 is not installed.
          ValueError: the model has no template of conversations, or that does not take these; or
            `chat_template_kwargs` has what is given in another way.
        """
        template, more = self.chat_template, _checked_template_kwargs(chat_template_kwargs)
        if tools is not None:
            template = self.further_templates.get(_WITH_TOOLS, template)
        if template is None:
            raise ValueError("the model has no template of conversations; give it a text")
        _environment()  # which may have to be installed, and is no fault of the template
        try:
            text = _compiled(template).render(
                messages=[_message_for_template(message) for message in _as_json(messages)],
                tools=None if tools is None else _as_json(tools),
                documents=None,
                add_generation_prompt=answers,
                **{**dict.fromkeys(_BEGIN_AND_END, ""), **self.named_tokens, **_as_json([more])[0]},
            )
        except Exception as e:  # a template may divide by 0 as well as refuse, or be no template
            raise ValueError(f"the model's template of conversations refuses these: {e}") from e
        # Not `prompt`: the template itself says whether a conversation begins with `bos_token`.
        return self.encode(text)

    def save(self, path: str) -> None:
        """Writes tokenizer.json, the templates of conversations, and their tokens to a folder.

        Args:
          path: a directory.
        """
        self.tokenizer.save(os.path.join(path, _TOKENIZER))
        if self.chat_template is not None:
            with open(os.path.join(path, _TEMPLATE), "w", encoding="utf-8") as f:
                f.write(self.chat_template)
        for name, template in self.further_templates.items():
            os.makedirs(os.path.join(path, _FURTHER), exist_ok=True)
            with open(os.path.join(path, _FURTHER, name + _ENDING), "w", encoding="utf-8") as f:
                f.write(template)
        # A token that settings have as an object, with flags, stays one.
        told = {n: self.settings.get(n) for n in self.named_tokens}
        named = {n: told[n] if _content(told[n]) == t else t for n, t in self.named_tokens.items()}
        if settings := {**self.settings, **named}:
            with open(os.path.join(path, _SETTINGS), "w", encoding="utf-8") as f:
                json.dump(settings, f, indent=2)


@functools.cache
def _environment() -> Any:
    """Returns the jinja2 environment of templates, with what those of transformers have.

    Raises:
      ImportError: jinja2 is not installed.
    """
    try:
        import jinja2.ext
        from jinja2 import nodes, sandbox
    except ImportError as e:
        raise missing_package("a chat template", "jinja2", "pip install 'jinja2>=3.1.6'") from e

    class Answers(jinja2.ext.Extension):
        """The block that says which text is the model's own, which only trainings ask for."""

        tags: ClassVar[set[str]] = {"generation"}

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    def refuse(text: str) -> None:
        raise ValueError(f"it says: {text}")

    def to_json(
        x: Any,
        ensure_ascii: bool = False,
        indent: Any = None,
        separators: Any = None,
        sort_keys: bool = False,
    ) -> str:
        # Templates give these in this order, too, without their names.
        return json.dumps(
            x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )

    # A template is code of whoever wrote the folder.
    # Line breaks around blocks are left out, as transformers does, for which they are written.
    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Answers, jinja2.ext.loopcontrols]
    )
    # jinja2's own is for pages of the web, and writes "<" as an escape.
    environment.filters["tojson"] = to_json
    environment.globals |= {
        "raise_exception": refuse,
        "strftime_now": lambda form: datetime.datetime.now().strftime(form),
    }
    return environment


# A conversation of a training is rendered several times for each answer in it, and to compile a
# long template takes longer than all of that.
@functools.lru_cache(maxsize=16)
def _compiled(template: str) -> Any:
    """Returns a jinja2 template of its text."""
    return _environment().from_string(template)


def _as_json(given: Any) -> Any:
    """Returns a copy of lists and dictionaries of what JSON has, and of nothing else.

    An object of another kind has methods, of which the sandbox does not know what they do: an array
    of NumPy can write a file.
    """

    def of_mapping(x: Any) -> dict:
        if isinstance(x, Mapping):
            return dict(x)
        raise TypeError(f"{x!r} is a {type(x).__name__}; give texts, numbers, lists, dictionaries")

    return json.loads(json.dumps(list(given), default=of_mapping))


def _checked_template_kwargs(given: Optional[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the argument `chat_template_kwargs`, checked."""
    if given is None:
        return {}
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        raise ValueError(
            f"chat: chat_template_kwargs={given!r} is no dictionary of names in the template and "
            'their values, such as {"enable_thinking": False}'
        )
    if twice := sorted(_OF_CHAT.intersection(given)):
        raise ValueError(
            f"chat: chat_template_kwargs has {', '.join(twice)}, which chat gives to the template "
            "itself: by messages, tools and answers"
        )
    return dict(given)


def _message_for_template(message: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what a template is told of a message, as by transformers.

    Args:
      message: a dictionary.
    """
    # Templates ask whether there is a "tool_calls", and would write None.
    told = {name: value for name, value in message.items() if value is not None}
    thought = next((told[name] for name in _THOUGHTS if name in told), None)
    if thought is None:
        return told
    # Each template reads one of these names, whichever the conversation has.
    return {"thinking": thought, **told, "reasoning_content": thought}


def _templates(path: str, settings: Mapping[str, Any]) -> dict[str, str]:
    """Returns the templates of a folder by name; that of no purpose is "default".

    Args:
      path: a directory.
      settings: what its tokenizer_config.json says, where older folders have them.

    Raises:
      ValueError: a file is not in UTF-8, or a name is none of a file.
    """
    files = {_DEFAULT: os.path.join(path, _TEMPLATE)}
    for file in sorted(glob.glob(os.path.join(glob.escape(path), _FURTHER, f"*{_ENDING}"))):
        files[os.path.basename(file).removesuffix(_ENDING)] = file
    by_name = {name: _text_of(file) for name, file in files.items() if os.path.isfile(file)}
    if by_name:  # those of the other file do not count, as in transformers
        return by_name
    templates = settings.get("chat_template")
    if isinstance(templates, list):
        templates = {t.get("name"): t.get("template") for t in templates if isinstance(t, dict)}
    if not isinstance(templates, dict):
        templates = {_DEFAULT: templates}
    by_name = {n: t for n, t in templates.items() if isinstance(n, str) and isinstance(t, str)}
    for name in by_name:
        # `save` makes a file of each, which has to be in its folder.
        if name in ("", ".", "..") or os.path.basename(name) != name or "\0" in name:
            raise ValueError(f"{path}: {_SETTINGS} has a template {name!r}, which names no file")
    return by_name


def _text_of(file: str) -> str:
    """Returns the contents of a text file."""
    try:
        with open(file, encoding="utf-8") as f:
            return f.read()
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} is damaged, it is not in UTF-8: {error}") from error


def _named_tokens(path: str, settings: Mapping[str, Any]) -> dict[str, str]:
    """Returns the tokens that templates name, of two files.

    Args:
      path: a directory.
      settings: what its tokenizer_config.json says.
    """
    tokens, file = dict(settings), os.path.join(path, _TOKENS)
    # Since release 4.34 of transformers the former has all, and the latter is not read.
    if "added_tokens_decoder" not in settings and os.path.isfile(file):
        tokens |= read_json(file)
    texts = {name: _content(token) for name, token in tokens.items()}
    return {name: texts[name] for name in _NAMED if isinstance(texts.get(name), str)}


def _content(token: Any) -> Any:
    """Returns the text of a token; one with settings of its own is an object."""
    return token.get("content") if isinstance(token, dict) else token


def of_folder(path: str) -> Optional[Tokenizer]:
    """Returns the tokenizer of a folder; None if there is none, or the package is not installed.

    Args:
      path: a directory.

    Raises:
      ValueError: tokenizer.json, or a file of settings or templates, is damaged.
    """
    file = os.path.join(path, _TOKENIZER)
    if not os.path.isfile(file) or not _is_installed():
        return None
    import tokenizers

    try:
        tokenizer = tokenizers.Tokenizer.from_file(file)
    except Exception as error:  # the package has none of its own
        check_no_pointer(file)
        raise ValueError(f"{file} is damaged: {error}") from error
    # Some have lengths of their training here, to which all texts would be cut or filled up.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    settings_file = os.path.join(path, _SETTINGS)
    settings = read_json(settings_file) if os.path.isfile(settings_file) else {}
    templates = _templates(path, settings)
    template = templates.pop(_DEFAULT, None)
    named = _named_tokens(path, settings)
    settings.pop("chat_template", None)
    return Tokenizer(tokenizer, template, named, templates, settings)


def of_gguf(metadata: Mapping[str, Any], where: str = "the GGUF file") -> Optional[Tokenizer]:
    """Returns the tokenizer of a GGUF file; None if it is of a kind that is not known.

    Args:
      metadata: its `metadata`.
      where: what the error names, the path of the file.

    Raises:
      ValueError: what they tell of a tokenizer is damaged.
    """
    kind = metadata.get("ggml.pre", "default")
    split = _SPLITS.get(kind) if isinstance(kind, str) else None
    if metadata.get("ggml.model") != "gpt2" or split is None or not _is_installed():
        return None
    lacking = [n for n in ("ggml.tokens", "ggml.merges") if not isinstance(metadata.get(n), list)]
    if lacking:
        raise ValueError(f"{where} is damaged: its metadata have no list tokenizer.{lacking[0]}")
    try:
        return _of_byte_pairs(metadata, split)
    except Exception as error:  # the package has none of its own
        raise ValueError(
            f"{where} is damaged: no tokenizer can be made of its metadata: {error}"
        ) from error


def _of_byte_pairs(metadata: Mapping[str, Any], split: _Split) -> Tokenizer:
    """Returns the tokenizer that metadata of a GGUF file tell of."""
    import tokenizers
    from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

    tokens = metadata["ggml.tokens"]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    merges = [tuple(pair.split(" ")) for pair in metadata["ggml.merges"]]
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, ignore_merges=split.whole)
    )
    of_gpt2 = split.pattern is None
    steps: list[Any] = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=of_gpt2)]
    if split.pattern is not None:
        steps.insert(0, pre_tokenizers.Split(tokenizers.Regex(split.pattern), "isolated"))
    if split.digits:
        steps.insert(0, pre_tokenizers.Digits(individual_digits=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    if split.composed:
        tokenizer.normalizer = normalizers.NFC()
    types = metadata.get("ggml.token_type", [])
    for kind, special in ((_CONTROL, True), (_WHOLE, False)):
        tokens_of_kind = [token for token, t in zip(tokens, types) if t == kind]
        tokenizer.add_tokens(
            [tokenizers.AddedToken(t, special=special, normalized=False) for t in tokens_of_kind]
        )
    ids = {name: metadata.get(f"ggml.{name}_id") for name in _BEGIN_AND_END}
    for name, i in ids.items():
        # Of a list, -1 would be the last one.
        if i is not None and not (is_whole(i, 0) and i < len(tokens)):
            raise ValueError(f"tokenizer.ggml.{name}_id={i!r} is none of its {len(tokens)} tokens")
    named = {name: tokens[i] for name, i in ids.items() if i is not None}
    # Around each text, unless the file has no such token.
    added = {
        "bos_token": metadata.get("ggml.add_bos_token", split.whole),
        "eos_token": metadata.get("ggml.add_eos_token", False),
    }
    before, after = ([named[n]] if added[n] and n in named else [] for n in _BEGIN_AND_END)
    if before or after:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*before, "$A", *after],
            special_tokens=[(token, vocabulary[token]) for token in {*before, *after}],
        )
    # Else transformers would make a tokenizer of the vocabulary as the family usually has it.
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
    return Tokenizer(tokenizer, metadata.get("chat_template"), named, settings=settings)


def _is_installed() -> bool:
    return importlib.util.find_spec("tokenizers") is not None
