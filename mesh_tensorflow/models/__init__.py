"""Models of today: from a Hugging Face folder to a model that one string splits over a mesh."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Optional, Union

import tensorflow.compat.v1 as tf

from mesh_tensorflow._calls import arguments_of
from mesh_tensorflow._core.errors import check_choice, check_flag, explained
from mesh_tensorflow._core.layout import LayoutLike
from mesh_tensorflow._core.shape import ShapeLike
from mesh_tensorflow._huggingface import Folder, read_json
from mesh_tensorflow.models import _bert, _gemma, _gpt, _llama, _tokenizer, layouts
from mesh_tensorflow.models._bert import Pooling, TextEncoder
from mesh_tensorflow.models._decoder import Decoder, Experts
from mesh_tensorflow.models._family import FORMS, Config, Form, form_of
from mesh_tensorflow.models._finetune import finetune
from mesh_tensorflow.models._generation import Generated, eos_of
from mesh_tensorflow.models._gguf import GgufFile
from mesh_tensorflow.models._language_model import GENERATION, LanguageModel
from mesh_tensorflow.models._place import place_of
from mesh_tensorflow.models._pretrained import check_path
from mesh_tensorflow.models._tokenizer import Tokenizer
from mesh_tensorflow.models._weights import Weights

__all__ = [
    "Config",
    "Decoder",
    "Experts",
    "Form",
    "Generated",
    "LanguageModel",
    "TextEncoder",
    "Tokenizer",
    "finetune",
    "from_config",
    "from_pretrained",
    "layouts",
    "register_family",
]

_FAMILIES: list[Any] = [_llama, _gemma, _gpt, _bert]
FORMS.update({kind: family.form_of for family in _FAMILIES for kind in family.MODEL_TYPES})
_DTYPES = ("float32", "bfloat16")
# Names that other libraries have, and what there is in their place.
_NAMES_OF_MODELS = {
    "torch_dtype": "give dtype",
    "device": "give devices",
    "device_map": "give mesh_shape, layout and devices",
}


@explained(_NAMES_OF_MODELS)
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
    mesh_impl: Optional[str] = None,
    num_stages: Optional[int] = None,
    num_microbatches: Optional[int] = None,
    num_repeats: int = 1,
    progress: bool = True,
) -> Union[LanguageModel, TextEncoder]:
    """Returns the model of a folder of Hugging Face, split over a mesh: a LanguageModel usually.

    Dimensions that layouts may split are `batch`, `length`, `vocab`, `d_model`, `d_ff`, `d_kv`,
    `heads` (those of keys and values), `query_heads` (how many queries share one of them) and
    `stages`, those of a pipeline, in which losses and their gradients are computed then; other
    calls apply layers in a row.

    Families: Llama, Mistral, Mixtral, Qwen, Phi, OLMo, Gemma, GPT-2, OPT, BERT and others.

    Args:
      path: a directory with config.json and safetensors files; or a GGUF file, whose weights are
        dequantized.
      mesh_shape: the shape of the mesh, such as "rows:2,cols:2"; one processor by default.
      layout: the layout rules, such as "heads:all,d_ff:all,vocab:all".
      devices: a device for each processor; by default the GPUs of the process, or its CPUs.
      zero: the stage of ZeRO: 3 to store weights in parts, and gather each when it is used; 1 and 2
        store those of optimizers alone, so that calls are as without it.
      zero_axis: the mesh dimension of ZeRO, or several joined by "+"; not needed if there is one.
      uneven: whether all rules allow sizes that the mesh does not divide, as those do that end in
        "?", such as "heads:all?".
      dtype: "float32" or "bfloat16", of the weights in memory, and of activations.
      mesh_impl: "placement", or None, to compute on devices of TensorFlow; "simd" to do so by one
        program that each of them runs; "pjrt" on devices of JAX, of all processes if there are
        several, which then all make the same calls.
      num_stages: the number of stages of a pipeline, which cut the layers into equal parts; by
        default as many as processors that the layout splits `stages` over.
      num_microbatches: how many parts of a batch go through a pipeline one behind the other; by
        default as many as there are stages. More of them leave processors idle for less time.
      num_repeats: how many parts of the layers each stage has, in a circular pipeline.
      progress: whether to show on the standard error stream how far the reading of weights is,
        once it takes longer than a moment.

    Raises:
      ImportError: safetensors, or for GGUF files gguf, is not installed.
      ValueError: the folder has no model, or a file is damaged; the family, or a field of
        config.json, is not known; weights are missing, or have other shapes; or the layout or a
        device is wrong.
    """
    arguments = dict(locals())
    what = "from_pretrained"
    check_path(what, path, "folder or of a GGUF file")
    check_flag(what, "progress", progress)
    path = os.fspath(path)
    place = place_of(what, **arguments_of(place_of, arguments), shows=progress)
    pipeline = place.pipeline(what, **arguments_of(place.pipeline, arguments))
    name = _dtype_name(what, dtype)
    if path.endswith(".gguf"):
        file = GgufFile(path)
        form, tokenizer = form_of(path, file.config), _tokenizer.of_gguf(file.metadata, path)
        weights = Weights(file.named_by(form), form)
        return LanguageModel(file.config, form, weights, place, name, tokenizer, pipeline=pipeline)
    folder = Folder(path)
    if not folder.config:
        raise ValueError(
            f"{what}: there is no config.json in {path!r}, or nothing in it; it says of which "
            "family the model is, and how large. Bring it from where the weights are from"
        )
    form, tokenizer = form_of(path, folder.config), _tokenizer.of_folder(path)
    weights = Weights(folder, form)
    if form.encodes:
        _check_no_pipeline(what, pipeline)
        pooling = Pooling.of_folder(path)
        return TextEncoder(folder.config, form, weights, place, name, tokenizer, pooling=pooling)
    settings = os.path.join(path, GENERATION)
    generation = read_json(settings) if os.path.isfile(settings) else {}
    eos_of(path, folder.config, generation)  # what is wrong with it is told now
    further = {"pipeline": pipeline, "generation": generation}
    return LanguageModel(folder.config, form, weights, place, name, tokenizer, **further)


@explained(_NAMES_OF_MODELS)
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
    mesh_impl: Optional[str] = None,
    num_stages: Optional[int] = None,
    num_microbatches: Optional[int] = None,
    num_repeats: int = 1,
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
      mesh_impl: "placement" or None, "simd", or "pjrt".
      num_stages: the number of stages of a pipeline.
      num_microbatches: how many parts of a batch go through it one behind the other.
      num_repeats: how many parts of the layers each stage has.

    Raises:
      ValueError: the family, or a field, is not known; or the layout or a device is wrong.
    """
    arguments = dict(locals())
    what = "from_config"
    if not isinstance(config, Mapping):
        raise ValueError(
            f"{what}: config is a dictionary of what config.json says, not {config!r}; "
            "from_pretrained takes a folder"
        )
    place = place_of(what, **arguments_of(place_of, arguments))
    pipeline = place.pipeline(what, **arguments_of(place.pipeline, arguments))
    name = _dtype_name(what, dtype)
    form = form_of(what, config)
    if form.encodes:
        _check_no_pipeline(what, pipeline)
        return TextEncoder(config, form, {}, place, name)
    return LanguageModel(config, form, {}, place, name, pipeline=pipeline)


def _check_no_pipeline(what: str, pipeline: Mapping[str, int]) -> None:
    if pipeline:
        raise ValueError(
            f"{what}: num_stages={pipeline['num_stages']}, and the model is an encoder, whose "
            "layers are applied in a row; leave num_stages and rules for stages out"
        )


def _dtype_name(what: str, dtype: Union[str, tf.DType]) -> str:
    try:
        name = tf.as_dtype(dtype).name
    except TypeError:
        name = str(dtype)
    check_choice(what, "dtype", name, _DTYPES)
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
    if model_type in FORMS:
        raise ValueError(f"register_family: model_type={model_type!r} is there already")
    FORMS[model_type] = form_of
