"""Encoders of texts: BERT and what is built like it, with the pooling of sentence-transformers.

Devlin et al., "BERT: pre-training of deep bidirectional transformers for language understanding"
(2019). Also RoBERTa (Liu et al., 2019), whose positions begin at the third row of their table, and
MiniLM (Wang et al., 2020). Vectors of texts are those of Reimers and Gurevych, "Sentence-BERT:
sentence embeddings using Siamese BERT-networks" (2019).
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Optional, Union

import numpy as np
import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow._core.errors import check_choice, check_whole, is_real, is_whole
from mesh_tensorflow._huggingface import read_any_json, read_json
from mesh_tensorflow.bert.bert import BertConfig, BertModel
from mesh_tensorflow.models._decoder import activation_of
from mesh_tensorflow.models._family import Config, Form, Weight
from mesh_tensorflow.models._pretrained import (
    Pretrained,
    array_of,
    imported,
    rows_of_ids,
)

MODEL_TYPES = ("bert", "roberta")
# By ours, from the layer on: Hugging Face's names.
_DENSE = {
    "attention/query": ("attention.self.query", "hidden", "num_heads*attention_head"),
    "attention/key": ("attention.self.key", "hidden", "num_heads*attention_head"),
    "attention/value": ("attention.self.value", "hidden", "num_heads*attention_head"),
    "attention/output": ("attention.output.dense", "num_heads*attention_head", "hidden"),
    "feedforward/dense_1": ("intermediate.dense", "hidden", "intermediate"),
    "feedforward/dense_2": ("output.dense", "intermediate", "hidden"),
}
_NORMS = {"attention": "attention.output.LayerNorm", "feedforward": "output.LayerNorm"}
_TABLES = {
    "word_embeddings": "vocab",
    "position_embeddings": "max_position_embeddings",
    "token_type_embeddings": "token_type_vocab",
}
# Programs are traced anew for each length, so that lengths are multiples of this number.
_LENGTHS = 32


def form_of(config: Config) -> Form:
    """Returns the Form of an encoder.

    Args:
      config: its Config.

    Raises:
      ValueError: a field has a value that is not known.
    """
    config.must_be("position_embedding_type", "absolute")
    config.must_be("is_decoder", False)
    config.get("tie_word_embeddings")  # that of logits, which an encoder has none of
    activation = activation_of(config, config.get("hidden_act", "gelu"))
    hidden = config.multiple("hidden_size", "num_attention_heads")
    heads, blocks = config.number("num_attention_heads"), config.parts("num_hidden_layers")
    positions = config.number("max_position_embeddings")
    is_roberta = config.get("model_type") == "roberta"
    # RoBERTa's first rows, up to that of the number of padding's id, are of no position.
    begin = (config.get("pad_token_id", 1) + 1) if is_roberta else 0
    bert = BertConfig(
        vocab_size=config.number("vocab_size"),
        d_model=hidden,
        max_position_embeddings=positions,
        num_blocks=blocks,
        layer_output_dropout_prob=config.get("hidden_dropout_prob", 0.1),
        attention_num_heads=heads,
        attention_probs_dropout_prob=config.get("attention_probs_dropout_prob", 0.1),
        feedforward_intermediate_size=config.number("intermediate_size"),
        feedforward_intermediate_act=activation
        if callable(activation)
        else getattr(mtf, activation),
        type_vocab_size=config.number("type_vocab_size"),
        layer_norm_epsilon=config.real("layer_norm_eps", 1e-12),
    )
    prefix = f"{config.get('model_type')}."
    sizes = {
        "vocab": bert.vocab_size,
        "hidden": hidden,
        "_hidden": hidden,  # the input of a layer from these channels to these
        "num_heads": heads,
        "attention_head": hidden // heads,
        "intermediate": bert.feedforward_intermediate_size,
        "max_position_embeddings": positions,
        "token_type_vocab": bert.type_vocab_size,
    }
    return Form(
        lambda layout, mesh_shape: functools.partial(_Encoder, bert, begin, layout, mesh_shape),
        _weights(blocks, prefix),
        sizes,
        prefix=prefix,
        # Heads of other tasks, and tables that are computed.
        ignored=r"^(cls|classifier|lm_head|qa_outputs)\.|embeddings\.position_ids$",
        # Folders of masked language models have no pooler.
        optional=r"pooler\.",
        encodes=True,
        # As TensorFlow names them, in folders that were made of its checkpoints.
        older={"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"},
    )


class _Encoder(BertModel):
    """A BertModel whose vocabulary is as large as the file's, and whose positions begin at a row.

    Attributes:
      first_position: the row of the first position.
    """

    def __init__(
        self,
        config: BertConfig,
        first_position: int,
        layout: Any,
        mesh_shape: Any,
        ids: mtf.Tensor,
        mask: mtf.Tensor,
        types: mtf.Tensor,
        is_training: bool = False,
    ) -> None:
        self.first_position = first_position
        super().__init__(
            config, is_training, ids, mask, types, mesh_shape=mesh_shape, layout=layout
        )

    @property
    def vocab_dim(self) -> mtf.Dimension:
        return mtf.Dimension("vocab", self.config.vocab_size)


def _weights(blocks: int, prefix: str) -> list[Weight]:
    weights = [
        Weight(
            f"bert/embeddings/{name}",
            f"{rows} hidden",
            f"{prefix}embeddings.{name}.weight",
            f"{rows} hidden",
        )
        for name, rows in _TABLES.items()
    ]
    weights += _norm("bert/embeddings", f"{prefix}embeddings.LayerNorm")
    for number in range(blocks):
        ours, theirs = f"bert/encoder/block_{number}", f"{prefix}encoder.layer.{number}"
        for layer, (name, inputs, outputs) in _DENSE.items():
            weights += _dense(f"{ours}/{layer}", f"{theirs}.{name}", inputs, outputs)
        for layer, name in _NORMS.items():
            weights += _norm(f"{ours}/{layer}", f"{theirs}.{name}")
    kernel, bias = _dense("bert/pooler/dense", f"{prefix}pooler.dense", "_hidden", "hidden")
    # Without a name of its own, a layer's bias is in a second scope.
    return [*weights, kernel, bias._replace(ours="bert/pooler/dense_1/bias")]


def _dense(ours: str, theirs: str, inputs: str, outputs: str) -> list[Weight]:
    dims = f"{inputs} {outputs}".replace("*", " ")
    return [
        # PyTorch computes x W^T, and stores W as [outputs, inputs].
        Weight(f"{ours}/kernel", dims, f"{theirs}.weight", f"{outputs} {inputs}"),
        Weight(f"{ours}/bias", outputs.replace("*", " "), f"{theirs}.bias", outputs),
    ]


def _norm(ours: str, theirs: str) -> list[Weight]:
    return [
        Weight(f"{ours}/layer_norm/{name}", "hidden", f"{theirs}.{kind}", "hidden")
        for name, kind in (("scale", "weight"), ("bias", "bias"))
    ]


# -- vectors of texts


# By fields of older releases of sentence-transformers, of which one is true: modes, as one field of
# newer releases names them.
_MODES = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
}
_MODULES, _LIMITS = "modules.json", "sentence_bert_config.json"
_PROMPTS = "config_sentence_transformers.json"


class Pooling(NamedTuple):
    """How the vectors of tokens become that of a text.

    Attributes:
      mode: "mean", "cls" for that of the first token, or "max".
      normalize: whether vectors get the length 1.
      max_length: the number of tokens that texts are cut to, or None.
      files: the contents of the files that say so, by their names.
      lowers: whether texts are in small letters before they become tokens.
      prompts: what texts may begin with, such as {"query": "query: "}.
      default_prompt: the name of the prompt that texts begin with if none is asked for, or None.
    """

    mode: str = "mean"
    normalize: bool = False
    max_length: Optional[int] = None
    files: Mapping[str, Any] = {}
    lowers: bool = False
    prompts: Mapping[str, str] = {}
    default_prompt: Optional[str] = None

    @classmethod
    def of_folder(cls, path: str) -> Pooling:
        """Returns the pooling that a folder of sentence-transformers describes.

        Args:
          path: a directory; without `modules.json`, vectors are means, and not normalized.

        Raises:
          ValueError: a file is damaged, or has a module or a mode that is not known.
        """
        file = os.path.join(path, _MODULES)
        if not os.path.isfile(file):
            return cls()
        files: dict[str, Any] = {_MODULES: _read_list(file)}
        modes, normalize = ["mean"], False
        for module in files[_MODULES]:
            kind = str(module.get("type")).rpartition(".")[2]
            if kind == "Pooling":
                name = os.path.normpath(os.path.join(str(module.get("path")), "config.json"))
                # It is written back under this name, too.
                if os.path.isabs(name) or name.split(os.sep)[0] == os.pardir:
                    raise ValueError(f"{file} is damaged: {name!r} is outside of the folder")
                files[name] = read_json(os.path.join(path, name))
                modes = _modes(files[name])
            elif kind == "Normalize":
                normalize = True
            elif kind != "Transformer":
                raise ValueError(f"{file} has a module of the type {kind}, which is not known")
        if len(modes) != 1 or modes[0] not in _POOLINGS:
            raise ValueError(
                f"{path} has the pooling {', '.join(modes) or 'of nothing'}, which is not one of "
                f"{', '.join(_POOLINGS)}"
            )
        for name in (_LIMITS, _PROMPTS):
            if os.path.isfile(file := os.path.join(path, name)):
                files[name] = read_json(file)
        limits = files.get(_LIMITS, {})
        length = limits.get("max_seq_length")
        if length is not None and not is_whole(length):
            raise ValueError(
                f"{path}: {_LIMITS} has max_seq_length={length!r}, no positive integer"
            )
        prompts, default = _prompts(path, files.get(_PROMPTS, {}))
        lowers = bool(limits.get("do_lower_case"))
        return cls(modes[0], normalize, length, files, lowers, prompts, default)

    def prompt_of(self, name: Optional[str]) -> str:
        """Returns what each text begins with.

        Args:
          name: that of a prompt of the folder, or None for the default one.

        Raises:
          ValueError: the folder has no such prompt, or its pooling leaves prompts out.
        """
        name = self.default_prompt if name is None else name
        if name is None:
            return ""
        if name not in self.prompts:
            names = ", ".join(map(repr, self.prompts)) or "none"
            raise ValueError(
                f"embed: prompt={name!r} is none of the folder's prompts, {names}; write others in "
                "front of each of texts"
            )
        configs = [content for content in self.files.values() if isinstance(content, Mapping)]
        if self.prompts[name] and not all(x.get("include_prompt", True) for x in configs):
            raise ValueError(
                f"embed: prompt={name!r}, and the folder's pooling leaves tokens of prompts out "
                "(include_prompt is false), which is not known"
            )
        return self.prompts[name]

    def save(self, path: str) -> None:
        """Writes the files to a folder.

        Args:
          path: a directory.
        """
        for name, content in self.files.items():
            file = os.path.join(path, name)
            os.makedirs(os.path.dirname(file), exist_ok=True)
            with open(file, "w", encoding="utf-8") as f:
                json.dump(content, f, indent=2)


def _prompts(path: str, config: Mapping[str, Any]) -> tuple[dict[str, str], Optional[str]]:
    """Returns the prompts of a folder by their names, and the name of the default one."""
    prompts, default = config.get("prompts") or {}, config.get("default_prompt_name")
    if not isinstance(prompts, dict) or not all(isinstance(x, str) for x in prompts.values()):
        raise ValueError(f"{path}: {_PROMPTS} has prompts={prompts!r}, and no texts by their names")
    if default is not None and default not in prompts:
        raise ValueError(
            f"{path}: {_PROMPTS} has default_prompt_name={default!r}, which is none of its prompts"
            f"{''.join(f', {name!r}' for name in prompts)}"
        )
    return prompts, default


def _modes(config: Mapping[str, Any]) -> list[str]:
    """Returns the modes that a module's config.json names; several of them are joined there."""
    newer = config.get("pooling_mode")
    if newer is not None:
        return [str(mode) for mode in (newer if isinstance(newer, list) else [newer])]
    older = [name for name, value in config.items() if name.startswith("pooling_mode_") and value]
    return [_MODES.get(name, name) for name in older] or ["mean"]


def _read_list(file: str) -> list[dict[str, Any]]:
    content = read_any_json(file)
    if not isinstance(content, list) or not all(isinstance(x, dict) for x in content):
        raise ValueError(f"{file} is damaged: it holds no list of objects")
    return content


def _mean(x: mtf.Tensor, mask: mtf.Tensor, length: mtf.Dimension) -> mtf.Tensor:
    # A row of padding alone, such as one that fills a batch up, has the vector 0.
    number = mtf.maximum(mtf.reduce_sum(mask, reduced_dim=length), 1e-9)
    return mtf.reduce_sum(x * mask, reduced_dim=length) / number


def _max(x: mtf.Tensor, mask: mtf.Tensor, length: mtf.Dimension) -> mtf.Tensor:
    # Not infinite: times 0 at tokens, that would be NaN.
    return mtf.reduce_max(x + (mask - 1.0) * 1e9, reduced_dim=length)


def _first(x: mtf.Tensor, mask: mtf.Tensor, length: mtf.Dimension) -> mtf.Tensor:
    return mtf.gather(x, 0, length)


_POOLINGS: dict[str, Callable[..., mtf.Tensor]] = {"mean": _mean, "cls": _first, "max": _max}
Text = Union[str, Sequence[int]]


class TextEncoder(Pretrained):
    """An encoder of texts, whose weights are in parts on a mesh; it computes in float32.

    Besides the attributes of `Pretrained` it has:

    Attributes:
      model: a function of three int32 Tensors with dimensions [batch, seq] (ids; 1 at tokens and 0
        at padding; types of tokens) that returns a `BertModel`, for programs.
      pooling: the Pooling of `embed`.
    """

    def __init__(self, *args: Any, pooling: Optional[Pooling] = None, **kwargs: Any) -> None:
        """Creates it; `from_pretrained` and `from_config` do so for users."""
        super().__init__(*args, **kwargs)
        self.pooling = Pooling() if pooling is None else pooling
        if self._dtype != "float32":
            raise ValueError(f"encoders compute in float32; leave dtype={self._dtype!r} out")
        self.model = self._form.model(self._mesh_impl.layout_rules, self._mesh_impl.shape)
        self._encoded = self._function(self._lowered)

    def encode(self, ids: Any, mask: Any = None, types: Any = None) -> tf.Tensor:
        """Returns the vectors of all tokens.

        Args:
          ids: an array of ints, [batch, length].
          mask: an array of the same shape, 1 at tokens and 0 at padding; None for no padding.
          types: the types of the tokens, an array of the same shape; 0 everywhere if None.

        Returns:
          A float32 tf.Tensor, [batch, length, hidden].

        Raises:
          ValueError: the arrays are not such ones, or are longer than the model.
        """
        arrays = self._checked("encode", ids, mask, types)
        return self._encoded(*self._filled_up(arrays), None, False)[: len(arrays[0])]

    def embed(
        self,
        texts: Sequence[Text],
        batch_size: int = 32,
        pooling: Optional[str] = None,
        normalize: Optional[bool] = None,
        prompt: Optional[str] = None,
    ) -> np.ndarray:
        """Returns the vectors of texts.

        Args:
          texts: a list of texts, for which a tokenizer is needed; or of lists of ids, which begin
            and end as the model wants it.
          batch_size: how many of them are computed together, those of like lengths.
          pooling: "mean", "cls" or "max"; what the folder says if None.
          normalize: whether vectors get the length 1; what the folder says if None.
          prompt: the name of a prompt of the folder, such as "query", with which each text begins;
            its default prompt if None, and none if there is no default. Lists of ids get none.

        Returns:
          A float32 array, [texts, hidden].

        Raises:
          ValueError: there is no tokenizer, a text has no tokens, or the pooling or the prompt is
            not known.
        """
        if isinstance(texts, str):
            raise ValueError("embed: texts is a list; write [text] for one")
        if not isinstance(texts, Iterable):
            raise ValueError(f"embed: texts is a list, such as [text], but is {texts!r}")
        check_whole("embed", "batch_size", batch_size)
        mode = self.pooling.mode if pooling is None else pooling
        check_choice("embed", "pooling", mode, _POOLINGS)
        normalized = self.pooling.normalize if normalize is None else normalize
        begin = self.pooling.prompt_of(prompt)
        rows = [
            self._ids(i, begin + text if isinstance(text, str) else text)
            for i, text in enumerate(texts)
        ]
        result = np.zeros([len(rows), self._form.sizes["hidden"]], np.float32)
        order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
        for at in range(0, len(order), batch_size):
            some = order[at : at + batch_size]
            longest = -(-len(rows[some[-1]]) // _LENGTHS) * _LENGTHS
            # Not up to positions that the table lacks; rows that need such are an error below.
            longest = min(longest, max(self._max_length, len(rows[some[-1]])))
            ids, mask = (np.zeros([len(some), longest], np.int32) for _ in range(2))
            for i, row in enumerate(some):
                ids[i, : len(rows[row])], mask[i, : len(rows[row])] = rows[row], 1
            arrays = self._checked("embed", ids, mask, None)
            vectors = self._encoded(*self._filled_up(arrays), mode, normalized)
            result[some] = vectors.numpy()[: len(some)]
        return result

    @property
    def _max_length(self) -> int:
        return self._form.sizes["max_position_embeddings"] - self.model.args[1]

    def _ids(self, i: int, text: Text) -> list[int]:
        if not isinstance(text, str):
            ids = array_of("embed", text)
            if ids.ndim != 1 or not ids.size or not np.issubdtype(ids.dtype, np.integer):
                raise ValueError(f"embed: text {i} is {text!r}, neither a text nor a list of ids")
            return ids.tolist()
        tokenizer = self._tokenizer_for("embed", "texts")
        # Newer releases of sentence-transformers have the limit among the tokenizer's settings.
        limit = self.pooling.max_length or tokenizer.settings.get("model_max_length")
        most = min(limit, self._max_length) if is_real(limit) else self._max_length
        return tokenizer.prompt(text.lower() if self.pooling.lowers else text, int(most))

    def _checked(self, what: str, ids: Any, mask: Any, types: Any) -> list[np.ndarray]:
        ids = rows_of_ids(what, ids)
        arrays = {"ids": ids, "mask": np.ones_like(ids) if mask is None else np.asarray(mask)}
        arrays["types"] = np.zeros_like(ids) if types is None else np.asarray(types)
        largest = (self._form.sizes["vocab"], 2, self._form.sizes["token_type_vocab"])
        for (name, array), number in zip(arrays.items(), largest):
            if array.shape != ids.shape:
                raise ValueError(
                    f"{what}: {name} has the shape {list(array.shape)}, but ids have "
                    f"{list(ids.shape)}"
                )
            # The lookup of an embedding would give zeros for such a number, and no error.
            wrong = array[(array < 0) | (array >= number)]
            if wrong.size:
                raise ValueError(
                    f"{what}: {name} has {wrong[0]}, which is not in 0 to {number - 1}"
                )
        if ids.shape[1] > self._max_length:
            raise ValueError(
                f"{what}: {ids.shape[1]} tokens are more than the model's {self._max_length} "
                "positions; cut the text"
            )
        return [array.astype(np.int32) for array in arrays.values()]

    def _filled_up(self, arrays: Sequence[np.ndarray]) -> list[tf.Tensor]:
        return [tf.constant(self._place.filled_up(array)) for array in arrays]

    def _lowered(
        self,
        ids: tf.Tensor,
        mask: tf.Tensor,
        types: tf.Tensor,
        mode: Optional[str],
        normalize: bool,
    ) -> tf.Tensor:
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        xs = [imported(mesh, x, "batch", "seq") for x in (ids, mask, types)]
        x = self.model(*xs).get_sequence_output()
        if mode is not None:
            _, seq, hidden = x.shape.dims
            seen = mtf.cast(xs[1], x.dtype)
            x = _POOLINGS[mode](x, seen, seq)
            if normalize:
                square = mtf.reduce_sum(mtf.square(x), reduced_dim=hidden)
                # A length of 1e-12 at least, as PyTorch has it: the vector 0 stays what it is.
                x *= mtf.rsqrt(mtf.maximum(square, 1e-24))
        return self._place.lower(mesh, ids.shape[0]).export_to_tf_tensor(x)

    def _write_more(self, folder: str) -> None:
        super()._write_more(folder)
        self.pooling.save(folder)
