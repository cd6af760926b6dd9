"""What a family of models is: how its config.json becomes a model, and its weights' two names."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Optional

from mesh_tensorflow._core.errors import first_names, is_flag, is_real, is_whole, slip


class Weight(NamedTuple):
    """A weight, by both names.

    Attributes:
      ours: the name of the variable.
      dims: the names of its dimensions, in the variable's order, as in "d_model heads d_kv".
      theirs: Hugging Face's name. With "{}" in it, there is a tensor for each index of the first
        dimension of `stored`, such as one for each expert.
      stored: the axes of the tensors in the file's order. Dimensions that are one axis there are
        joined by "*", as in "heads*d_kv d_model". Weights that lie behind each other in one tensor
        are in brackets, as in "[heads*d_kv|heads*d_kv|heads*d_kv] d_model", or for each head, as
        in "heads*[d_kv|d_kv|d_kv] d_model".
      part: which of the weights in brackets it is.
    """

    ours: str
    dims: str
    theirs: str
    stored: str
    part: int = 0


class Form(NamedTuple):
    """A model of a family, as its config.json says.

    Attributes:
      model: a function of a LayoutRules and a mesh Shape that returns the Unitransformer; of an
        encoder, the Encoder.
      weights: its Weights.
      sizes: the sizes of the dimensions that the Weights name.
      prefix: how Hugging Face's names begin, or do not begin in some folders.
      ignored: a regular expression of names that folders may have beside the weights: masks and
        tables that are computed, and second copies.
      optional: one of names that folders may lack.
      encodes: whether it is an encoder.
      copies: names of tensors that folders may have beside, by which variable they are equal to.
      older: how names end in some folders, by how they end in the others.
    """

    model: Callable[[Any, Any], Any]
    weights: Sequence[Weight]
    sizes: Mapping[str, int]
    prefix: str = ""
    ignored: str = r"(?!)"
    optional: str = r"(?!)"
    encodes: bool = False
    copies: Mapping[str, str] = MappingProxyType({})
    older: Mapping[str, str] = MappingProxyType({})


# Fields that say nothing of what a model computes: where it is from, how it was trained, how texts
# are drawn of it, and what functions return.
_OF_NO_MATTER = re.compile(
    r"model_type|architectures|auto_map|name_or_path|(torch_)?dtype|torchscript|use_bfloat16"
    r"|unsloth_\w+|transformers_?(version|\.js_config)|_name_or_path|_attn_implementation(_\w+)?"
    r"|_commit_hash|_flash_attn_2_enabled|attn_implementation|use_flash_attn\w*|is_llama_config"
    r"|initializer_(range|factor)|init_std|gradient_checkpointing|pretraining_tp|neftune_noise_alpha"
    r"|\w*dropout(_prob)?|\w+_pdrop|layerdrop"
    r"|output_(past|attentions|hidden_states|router_logits|scores)|router_aux_loss_coef|use_cache"
    r"|return_dict\w*|chunk_size_feed_forward|cache_implementation|tf_legacy_loss"
    r"|max_sequence_length|sliding_window_size|create_position_ids_from_padding"
    r"|problem_type|_?num_labels|id2label|label2id|finetuning_task|task_specific_params|summary_\w+"
    r"|tokenizer_class|prefix|\w+_token_id|model_max_length|n_ctx|directionality|pooler_\w+"
    r"|max_length|min_length|do_sample|early_stopping|num_beams|num_beam_groups|num_return_sequences"
    r"|temperature|top_[kp]|typical_p|\w*(repetition|length|diversity)_penalty|bad_words_ids"
    r"|(encoder_)?no_repeat_ngram_size|(begin_)?suppress_tokens|remove_invalid_values"
)
_MOST_PARTS = 10_000
# What all families must have in these fields.
_MUST_BE: dict[str, Any] = {
    "is_encoder_decoder": False,
    "tie_encoder_decoder": False,
    "add_cross_attention": False,
    "pruned_heads": {},
    "quantization_config": None,
}


def _is_positive(value: object) -> bool:
    return is_real(value) and 0 < value < math.inf


def _is_coefficient(value: object) -> bool:
    return is_real(value) and 0 <= value < math.inf


class Config:
    """The fields of a config.json, for a family to read; errors name the file's folder.

    A field that no one has read is one that the family does not know: `tell_unknown`.
    """

    def __init__(self, path: str, fields: Mapping[str, Any]) -> None:
        self.path = path
        self._fields = dict(fields)
        self._known: set[str] = set()

    def complete(self, fields: Mapping[str, Any]) -> None:
        """Sets fields that are missing; those that are null stay so.

        Args:
          fields: what the family means by a field that is not there.
        """
        self._fields = {**fields, **self._fields}

    def get(self, name: str, default: Any = None) -> Any:
        """Returns a field, or the default if it is missing or null.

        Args:
          name: its name.
          default: any value.
        """
        self._known.add(name)
        value = self._fields.get(name)
        return default if value is None else value

    def _checked(
        self, name: str, default: Any, is_right: Callable[[Any], bool], otherwise: str
    ) -> Any:
        """Returns a field; if it is not of a kind, an error says what it is otherwise."""
        value = self.get(name, default)
        if not is_right(value):
            raise ValueError(f"{self.path}: config.json has {name}={value!r}, {otherwise}")
        return value

    def number(self, name: str, default: Optional[int] = None) -> int:
        """Returns a field that is a positive integer.

        Args:
          name: its name.
          default: what it is if it is missing; None for an error.

        Raises:
          ValueError: it is missing, or is something else.
        """
        return self._checked(name, default, is_whole, "no positive integer")

    def parts(self, name: str) -> int:
        """Returns a field that is a number of layers or experts, each with tensors of its own.

        Args:
          name: its name.

        Raises:
          ValueError: it is missing, or is something else, or larger than that of any model.
        """
        value = self.number(name)
        # Of each of them names are made, before they are looked for in a file.
        if value > _MOST_PARTS:
            raise ValueError(
                f"{self.path}: config.json has {name}={value}, and no model has more than "
                f"{_MOST_PARTS}"
            )
        return value

    def real(self, name: str, default: Optional[float] = None) -> float:
        """Returns a field that is a positive number.

        Args:
          name: its name.
          default: what it is if it is missing; None for an error.

        Raises:
          ValueError: it is missing, or is something else.
        """
        return float(self._checked(name, default, _is_positive, "no positive number"))

    def coefficient(self, name: str, default: float) -> float:
        """Returns a field that is a number of 0 or more.

        Args:
          name: its name.
          default: what it is if it is missing.

        Raises:
          ValueError: it is something else.
        """
        return float(self._checked(name, default, _is_coefficient, "no number of 0 or more"))

    def is_true(self, name: str, default: bool) -> bool:
        """Returns a field that is true or false.

        Args:
          name: its name.
          default: what it is if it is missing.

        Raises:
          ValueError: it is something else.
        """
        return bool(self._checked(name, default, is_flag, "neither true nor false"))

    def multiple(self, name: str, divisor: str) -> int:
        """Returns a field that is a multiple of another one, both of them positive integers.

        Args:
          name: its name.
          divisor: the name of the other one.

        Raises:
          ValueError: it is not, or one of them is missing.
        """
        value, part = self.number(name), self.number(divisor)
        if value % part:
            raise ValueError(
                f"{self.path}: config.json has {name}={value}, which is no multiple of "
                f"{divisor}={part}"
            )
        return value

    def must_be(self, name: str, expected: Any) -> Any:
        """Returns a field of which the family knows one value.

        Args:
          name: its name.
          expected: the value, which is also meant if the field is missing.

        Raises:
          ValueError: it has another value.
        """
        value = self.get(name, expected)
        if value != expected:
            raise ValueError(
                f"{self.path}: config.json has {name}={value!r}, which is not known for this "
                f"family: only {name}={expected!r} is"
            )
        return value

    def tell_unknown(self) -> None:
        """Warns of fields that have not been read, but for those that say nothing of the model.

        transformers ignores what a family of its does not know, and so folders have such fields.

        Raises:
          ValueError: there are some, within `mtf.strict()`.
        """
        unknown = [
            f"{name}={value!r}"
            for name, value in self._fields.items()
            if value is not None and name not in self._known and not _OF_NO_MATTER.fullmatch(name)
        ]
        if unknown:
            slip(
                f"{self.path}: config.json has {first_names(unknown)}, which the family "
                f"{self._fields.get('model_type')!r} does not know and ignores. If the model was "
                "trained by code of its own, which computes something else with it, add a family: "
                "mtf.models.register_family"
            )


# What makes a Form of a Config, by model type: the families of the package, and those of users.
FORMS: dict[str, Callable[[Config], Form]] = {}


def form_of(where: str, config: Mapping[str, Any]) -> Form:
    """Returns the Form of a model, by the family of its config.json.

    Args:
      where: what the error names, such as the path of its folder.
      config: the contents of config.json.

    Raises:
      ValueError: the family, or a value of a field, is not known.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in FORMS:
        raise ValueError(
            f"{where}: config.json has model_type={model_type!r}, which is none of "
            f"{', '.join(FORMS)}. T5's weights are converted by "
            "`python -m mesh_tensorflow.transformer.convert`"
        )
    read = Config(where, config)
    for field, value in _MUST_BE.items():
        read.must_be(field, value)
    form = FORMS[model_type](read)
    read.tell_unknown()
    return form
