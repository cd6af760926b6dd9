"""Models of today: from a Hugging Face folder to a model that one string splits over a mesh.

Language models of families are made of a folder, called, continued, trained and written back.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Optional, Union

import numpy as np
import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow import layers
from mesh_tensorflow._core.layout import LayoutLike
from mesh_tensorflow._core.shape import ShapeLike, convert_to_shape
from mesh_tensorflow._huggingface import Folder
from mesh_tensorflow._mesh.variables.function import function
from mesh_tensorflow.models import _bert, _gemma, _gpt, _llama, _tokenizer
from mesh_tensorflow.models._bert import Pooling, TextEncoder
from mesh_tensorflow.models._decoder import Decoder, Experts
from mesh_tensorflow.models._family import Config, Form
from mesh_tensorflow.models._gguf import GgufFile
from mesh_tensorflow.models._pretrained import Pretrained, check_eager, filled_up, imported
from mesh_tensorflow.models._tokenizer import Tokenizer
from mesh_tensorflow.models._weights import Weights
from mesh_tensorflow.placement_mesh_impl import PlacementMeshImpl
from mesh_tensorflow.train._placing import devices_of

__all__ = [
    "Config",
    "Decoder",
    "Experts",
    "Form",
    "LanguageModel",
    "TextEncoder",
    "Tokenizer",
    "from_config",
    "from_pretrained",
    "register_family",
]

_FAMILIES: list[Any] = [_llama, _gemma, _gpt, _bert]
_FORMS: dict[str, Callable[[Config], Form]] = {
    model_type: family.form_of for family in _FAMILIES for model_type in family.MODEL_TYPES
}
_DTYPES = ("float32", "bfloat16")
# Ids, a text, or the messages of a conversation.
Prompt = Union[Sequence[int], str, Sequence[Mapping[str, str]]]
_LENGTHS = 64  # those of programs are multiples of it
_NO_ID = -1  # which no id equals


class LanguageModel(Pretrained):
    """A language model, whose weights are in parts on a mesh.

    They are read when the model is first called, one by one, and stored in slices. Besides the
    attributes of `Pretrained` it has:

    Attributes:
      model: the Unitransformer.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Creates it; `from_pretrained` and `from_config` do so for users."""
        super().__init__(*args, **kwargs)
        self.model = self._form.model(self._mesh_impl.layout_rules, self._mesh_impl.shape)
        self._variable_dtype = mtf.VariableDType(*[tf.as_dtype(self._dtype)] * 3)
        self._logits = function(self._lowered_logits, store=self.store)
        self._continued = function(self._lowered_ids, store=self.store)

    # -- calls

    def logits(self, ids: Any) -> tf.Tensor:
        """Returns the logits of the next id at each position.

        Args:
          ids: an array of ints, [batch, length].

        Returns:
          A tf.Tensor, [batch, length, vocabulary].

        Raises:
          ValueError: an id is not in the vocabulary, or these are not such ids.
        """
        rows = self._checked("logits", ids)
        # The rows that only fill the batch up are left out again.
        return self._logits(tf.constant(filled_up(rows, self._mesh_impl)))[: len(rows)]

    def generate(
        self,
        prompts: Sequence[Prompt],
        max_new_tokens: int = 64,
        temperature: float = 0.0,
        top_k: int = -1,
        stop: Optional[int] = None,
    ) -> list[Any]:
        """Returns what the model continues prompts by, without the prompts.

        Args:
          prompts: a list of lists of ids, of any lengths from 1; of texts; or of conversations,
            lists of dictionaries with "role" and "content". The last two need a tokenizer.
          max_new_tokens: how many ids are added at most.
          temperature: 0.0 takes the id with the largest logit; 1.0 draws from the softmax.
          top_k: how many ids with the largest logits are drawn from; -1 for all.
          stop: the id at which a continuation ends, which it includes; the `eos_token_id` of
            config.json, one or several, if None; and -1 for none.

        Returns:
          A list of lists of ids; of texts, for prompts that are none.

        Raises:
          ValueError: an id is not in the vocabulary, a prompt is empty, or there is no tokenizer.
        """
        if isinstance(prompts, str):
            raise ValueError("generate: prompts is a list; write [text] for one")
        if max_new_tokens < 1:
            raise ValueError(f"generate: max_new_tokens={max_new_tokens} must be 1 or more")
        rows = [self._checked("generate", [self._ids(prompt)])[0] for prompt in prompts]
        if not rows:
            return []
        ends = self._ends(stop)
        lengths = np.array([len(row) for row in rows], np.int32)
        length = max(lengths) - 1 + max_new_tokens
        # One program serves many lengths, as each is traced anew.
        ids = np.zeros([len(rows), -(-length // _LENGTHS) * _LENGTHS], np.int32)
        # Of a prompt the first id is what the first position is fed, and the others are given.
        for row, prompt in zip(ids, rows):
            row[: len(prompt) - 1] = prompt[1:]
        first = np.array([row[0] for row in rows], np.int32)
        tensors = [tf.constant(filled_up(a, self._mesh_impl)) for a in (ids, first, lengths - 1)]
        sampled = self._continued(*tensors, max_new_tokens, temperature, top_k, ends[0]).numpy()
        continuations = [
            _up_to(ends, row[n - 1 : n - 1 + max_new_tokens].tolist())
            for row, n in zip(sampled, lengths)
        ]
        return [
            self.tokenizer.decode(row) if self.tokenizer and _is_text(prompt) else row
            for row, prompt in zip(continuations, prompts)
        ]

    def _ids(self, prompt: Prompt) -> Sequence[int]:
        """Returns the ids of a prompt."""
        if not _is_text(prompt):
            return prompt  # type: ignore[return-value]
        if self.tokenizer is None:
            raise ValueError(
                "generate: the model has no tokenizer, so prompts are lists of ids. It reads "
                "tokenizer.json of the folder where the package tokenizers is installed: "
                "pip install tokenizers"
            )
        if isinstance(prompt, str):
            return self.tokenizer.prompt(prompt)
        return self.tokenizer.chat(prompt)  # type: ignore[arg-type]

    def _ends(self, stop: Optional[int]) -> list[int]:
        """Returns the ids that end a text; the first of them also ends the loop of steps."""
        ends = self.config.get("eos_token_id") if stop is None else stop
        if isinstance(ends, list):
            return ends or [_NO_ID]
        return [_NO_ID if ends is None else ends]

    def _checked(self, what: str, ids: Any) -> np.ndarray:
        rows = np.asarray(ids)
        vocab = self.model.input_vocab_dim.size
        if rows.ndim != 2 or not rows.size or not np.issubdtype(rows.dtype, np.integer):
            raise ValueError(
                f"{what}: ids must be ints, [batch, length], and at least one, but have the shape "
                f"{list(rows.shape)} and dtype {rows.dtype}"
            )
        check_eager(what)
        # The lookup of an embedding would give zeros for such an id, and no error.
        wrong = rows[(rows < 0) | (rows >= vocab)]
        if wrong.size:
            raise ValueError(
                f"{what}: the id {wrong[0]} is not in the vocabulary, 0 to {vocab - 1}"
            )
        return rows.astype(np.int32)

    def _lowered_logits(self, ids: tf.Tensor) -> tf.Tensor:
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        x = imported(mesh, ids, "batch", "length")
        logits, _ = self.model.call_simple(
            x, None, compute_loss=False, mode="infer", variable_dtype=self._variable_dtype
        )
        return self._exported(mesh, logits)

    def _lowered_ids(
        self,
        ids: tf.Tensor,
        first: tf.Tensor,
        num_given: tf.Tensor,
        max_new_tokens: int,
        temperature: float,
        top_k: int,
        stop: int,
    ) -> tf.Tensor:
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        sampled = self.model.sample_autoregressive(
            imported(mesh, ids, "batch", "length"),
            stop_at_token=stop,
            max_steps=max_new_tokens,
            temperature=temperature,
            variable_dtype=self._variable_dtype,
            sampling_keep_top_k=top_k,
            bos_id=imported(mesh, first, "batch"),
            num_given=imported(mesh, num_given, "batch"),
        )
        return self._exported(mesh, sampled)

    def _exported(self, mesh: mtf.Mesh, x: mtf.Tensor) -> tf.Tensor:
        lowering = mtf.Lowering(mesh.graph, {mesh: self._mesh_impl})
        return lowering.export_to_tf_tensor(x)

    # -- training

    def loss(self, mesh: mtf.Mesh, ids: mtf.Tensor, training: bool = True) -> mtf.Tensor:
        """Returns the mean loss of each id but the first, given those before it.

        It is a model function of `mtf.train.fit`:
        `fit(model.loss, ids, dims="batch:8,length:128", init_checkpoint=model.weights, ...)`. Then
        `assign` takes its `Result.variables`.

        Args:
          mesh: a Mesh.
          ids: an int32 Tensor with dimensions [batch, length].
          training: whether weights are updated.

        Returns:
          A scalar.

        Raises:
          ValueError: the length is 1.
        """
        length = ids.shape.dims[-1]
        if length.size < 2:
            raise ValueError(f"loss: rows of one id predict nothing, got {ids.name} {ids.shape}")
        logits, _ = self.model.call_simple(
            ids,
            None,
            compute_loss=False,
            mode="train" if training else "eval",
            variable_dtype=mtf.VariableDType(tf.float32),
        )
        vocab = logits.shape.dims[-1]
        targets = mtf.one_hot(mtf.shift(ids, -1, length, wrap=False), vocab, dtype=logits.dtype)
        losses = layers.softmax_cross_entropy_with_logits(logits, targets, vocab)
        # The last position has no id behind it.
        known = mtf.less(mtf.range(mesh, length, tf.int32), length.size - 1)
        total = mtf.reduce_sum(losses * mtf.cast(known, losses.dtype))
        return total / (losses.shape.size // length.size * (length.size - 1))


def _is_text(prompt: Prompt) -> bool:
    """Returns whether a prompt is a text or a conversation, rather than ids."""
    return isinstance(prompt, str) or (len(prompt) > 0 and isinstance(prompt[0], Mapping))


def _up_to(ends: Sequence[int], ids: list[int]) -> list[int]:
    """Returns the ids up to the first that is an end, with that."""
    at = next((i for i, id_ in enumerate(ids) if id_ in ends), len(ids))
    return ids[: at + 1]


def from_pretrained(
    path: Union[str, os.PathLike[str]],
    *,
    mesh_shape: ShapeLike = "all:1",
    layout: LayoutLike = "",
    devices: Optional[Sequence[str]] = None,
    zero: Optional[int] = None,
    zero_axis: Optional[str] = None,
    uneven: bool = False,
    dtype: Union[str, tf.DType] = "float32",
) -> Union[LanguageModel, TextEncoder]:
    """Returns the model of a folder of Hugging Face, split over a mesh: a LanguageModel usually.

    Dimensions that layouts may split are `batch`, `length`, `vocab`, `d_model`, `d_ff`, `d_kv`,
    `heads` (those of keys and values) and `query_heads` (how many queries share one of them).

    Families: Llama 2 and 3, SmolLM, Mistral, Qwen 2, 2.5 and 3 (dense).

    Args:
      path: a directory with config.json and safetensors files; or a GGUF file, whose weights are
        dequantized.
      mesh_shape: the shape of the mesh.
      layout: the layout rules, such as "heads:all,d_ff:all,vocab:all".
      devices: a device for each processor; by default the GPUs of the process, or its CPUs.
      zero: the stage of ZeRO: 3 to store weights in parts.
      zero_axis: the mesh dimension of ZeRO, or several joined by "+".
      uneven: whether all rules allow sizes that the mesh does not divide, as those do that end in
        "?", such as "heads:all?".
      dtype: "float32" or "bfloat16", of the weights in memory, and of activations.

    Raises:
      ImportError: safetensors, or for GGUF files gguf, is not installed.
      ValueError: the folder has no model, or a file is damaged; the family, or a field of
        config.json, is not known; weights are missing, or have other shapes; or the layout or a
        device is wrong.
    """
    what, stored = "from_pretrained", {"zero": zero, "zero_axis": zero_axis, "uneven": uneven}
    impl = _mesh_impl(what, mesh_shape, layout, devices, **stored)
    name = _dtype_name(what, dtype)
    path = os.fspath(path)
    if path.endswith(".gguf"):
        file = GgufFile(path)
        form, tokenizer = _form_of(path, file.config), _tokenizer.of_gguf(file.metadata)
        return LanguageModel(file.config, form, Weights(file, form), impl, name, tokenizer)
    folder = Folder(path)
    form, tokenizer = _form_of(path, folder.config), _tokenizer.of_folder(path)
    weights = Weights(folder, form)
    if form.encodes:
        pooling = Pooling.of_folder(path)
        return TextEncoder(folder.config, form, weights, impl, name, tokenizer, pooling)
    return LanguageModel(folder.config, form, weights, impl, name, tokenizer)


def from_config(
    config: Mapping[str, Any],
    *,
    mesh_shape: ShapeLike = "all:1",
    layout: LayoutLike = "",
    devices: Optional[Sequence[str]] = None,
    zero: Optional[int] = None,
    zero_axis: Optional[str] = None,
    uneven: bool = False,
    dtype: Union[str, tf.DType] = "float32",
) -> Union[LanguageModel, TextEncoder]:
    """Returns a new model of a family, to be trained from the beginning.

    Args:
      config: what config.json of such a model says, such as {"model_type": "llama",
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "vocab_size": 256}.
      mesh_shape: this and the following arguments are those of `from_pretrained`.
      layout: the layout rules.
      devices: a device for each processor.
      zero: the stage of ZeRO.
      zero_axis: the mesh dimension of ZeRO, or several joined by "+".
      uneven: whether all rules allow sizes that the mesh does not divide.
      dtype: "float32" or "bfloat16".

    Raises:
      ValueError: the family, or a field, is not known; or the layout or a device is wrong.
    """
    what, stored = "from_config", {"zero": zero, "zero_axis": zero_axis, "uneven": uneven}
    impl = _mesh_impl(what, mesh_shape, layout, devices, **stored)
    name = _dtype_name(what, dtype)
    form = _form_of(what, config)
    cls = TextEncoder if form.encodes else LanguageModel
    return cls(config, form, {}, impl, name)


def _mesh_impl(
    what: str,
    mesh_shape: ShapeLike,
    layout: LayoutLike,
    devices: Optional[Sequence[str]],
    **stored: Any,
) -> PlacementMeshImpl:
    shape = convert_to_shape(mesh_shape)
    places = devices_of(shape, devices, what=what)
    return PlacementMeshImpl(shape, layout, places, strict_layout=True, **stored)


def _dtype_name(what: str, dtype: Union[str, tf.DType]) -> str:
    name = tf.as_dtype(dtype).name
    if name not in _DTYPES:
        raise ValueError(f"{what}: dtype={name!r} is none of {', '.join(_DTYPES)}")
    return name


def register_family(model_type: str, form_of: Callable[[Config], Form]) -> None:
    """Makes models of a family known to `from_pretrained` and `from_config`.

    Args:
      model_type: the `model_type` of their config.json.
      form_of: a function of a Config that returns the Form, usually `Decoder(...).form`; a
        ValueError that it raises is what users see of a config.json that does not fit.

    Raises:
      ValueError: there is such a family.
    """
    if model_type in _FORMS:
        raise ValueError(f"register_family: model_type={model_type!r} is there already")
    _FORMS[model_type] = form_of


def _form_of(where: str, config: Mapping[str, Any]) -> Form:
    model_type = config.get("model_type")
    if model_type not in _FORMS:
        raise ValueError(
            f"{where}: config.json has model_type={model_type!r}, which is none of "
            f"{', '.join(_FORMS)}. T5's weights are converted by "
            "`python -m mesh_tensorflow.transformer.convert`"
        )
    return _FORMS[model_type](Config(where, config))
