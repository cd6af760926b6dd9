"""Functions that build models from parts that gin configures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Optional

import gin

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow._core.errors import slip
from mesh_tensorflow.transformer.transformer._layer import TransformerLayer
from mesh_tensorflow.transformer.transformer._models.bitransformer import Bitransformer
from mesh_tensorflow.transformer.transformer._models.student_teacher import StudentTeacher
from mesh_tensorflow.transformer.transformer._models.unitransformer import Unitransformer
from mesh_tensorflow.transformer.transformer._stack import LayerStack

__all__ = ["make_bi_student_teacher", "make_bitransformer", "make_layer_stack"]

_MODULE = "mesh_tensorflow.transformer.transformer"


def _layer_of(entry: object) -> tuple[Callable[..., TransformerLayer], Optional[str], dict]:
    """Returns (class, name, keyword arguments) for an entry of `layers`.

    Its parts are known by their types, since files of users have them in every order.
    """
    parts: list[Any] = list(entry) if isinstance(entry, (list, tuple)) else [entry]
    names = [p for p in parts if isinstance(p, str)]
    kwargs = [p for p in parts if isinstance(p, dict)]
    classes = [p for p in parts if p is not None and not isinstance(p, (str, dict))]
    if not classes or not all(callable(c) for c in classes):
        raise ValueError(
            "make_layer_stack: an entry of layers must be a class of layers, or a list of it, a "
            f"name (a string) and keyword arguments (a dictionary), got {entry!r}"
        )
    for what, several in (("classes", classes), ("names", names)):
        if len(several) > 1:
            slip(
                f"make_layer_stack: the entry {entry!r} of layers has {len(several)} {what}, of "
                f"which only the last counts, {several[-1]!r}. Give each layer an entry of its own"
            )
    arguments = {name: value for given in kwargs for name, value in given.items()}
    return classes[-1], names[-1] if names else None, arguments


@gin.configurable(module=_MODULE)
def make_layer_stack(
    layers: Sequence[object] = gin.REQUIRED,
    layer_stack_cls: Callable[[list[TransformerLayer]], TransformerLayer] = LayerStack,
    num_layers: int = 6,
    block_scope: bool = True,
) -> TransformerLayer:
    """Returns a stack of blocks of layers.

    A layer is named `block_000/layer_000`, by the indices of the block and of the layer in it;
    without `block_scope` it is named `layer_000`, by its index among all layers. A name in
    `layers` replaces `layer_000`. Layers of the same name share their variables.

    Args:
      layers: a list with an entry for each layer of a block: a class, or a list or tuple of a
        class and, optionally, a name and a dictionary of keyword arguments, in any order.
      layer_stack_cls: a class, or a function that takes the list of layers.
      num_layers: an integer, the number of blocks.
      block_scope: whether the names of layers begin with the name of the block.

    Raises:
      ValueError: `layers` is not such a list.
    """
    if not isinstance(layers, (list, tuple)):
        raise ValueError(
            f"make_layer_stack: layers must be a list of classes of layers, got {layers!r}"
        )
    entries = [_layer_of(entry) for entry in layers]
    made: list[TransformerLayer] = []
    for block in range(num_layers):
        for i, (cls, name, kwargs) in enumerate(entries):
            layer = cls(**kwargs)
            number = i if block_scope else len(made)
            name = name or f"layer_{number:03d}"
            layer.set_name(f"block_{block:03d}/{name}" if block_scope else name)
            made.append(layer)
    return layer_stack_cls(made)


@gin.configurable(module=_MODULE)
def make_bitransformer(
    input_vocab_size: int = gin.REQUIRED,
    output_vocab_size: int = gin.REQUIRED,
    layout: Optional[mtf.LayoutRules] = None,
    mesh_shape: Optional[mtf.Shape] = None,
    encoder_name: str = "encoder",
    decoder_name: str = "decoder",
    bitransformer_cls: Callable[[Unitransformer, Unitransformer], Bitransformer] = Bitransformer,
) -> Bitransformer:
    """Returns a Bitransformer; gin configures its parts in the scopes `encoder` and `decoder`.

    Args:
      input_vocab_size: an integer.
      output_vocab_size: an integer.
      layout: the LayoutRules that the model will be lowered with, for layers that ask.
      mesh_shape: the Shape of the mesh, for layers that ask.
      encoder_name: a string, the variable scope of the encoder.
      decoder_name: a string, the variable scope of the decoder.
      bitransformer_cls: a class, or a function that takes the encoder and the decoder.
    """
    with gin.config_scope("encoder"):
        encoder = Unitransformer(
            layer_stack=make_layer_stack(),
            input_vocab_size=input_vocab_size,
            output_vocab_size=None,
            autoregressive=False,
            name=encoder_name,
            layout=layout,
            mesh_shape=mesh_shape,
        )
    with gin.config_scope("decoder"):
        decoder = Unitransformer(
            layer_stack=make_layer_stack(),
            input_vocab_size=output_vocab_size,
            output_vocab_size=output_vocab_size,
            autoregressive=True,
            name=decoder_name,
            layout=layout,
            mesh_shape=mesh_shape,
        )
    return bitransformer_cls(encoder, decoder)


@gin.configurable(module=_MODULE)
def make_bi_student_teacher(
    input_vocab_size: int = gin.REQUIRED,
    output_vocab_size: int = gin.REQUIRED,
    layout: Optional[mtf.LayoutRules] = None,
    mesh_shape: Optional[mtf.Shape] = None,
) -> StudentTeacher:
    """Returns a StudentTeacher of two Bitransformers.

    Gin configures them in the scopes `student` and `teacher`.

    Args:
      input_vocab_size: an integer.
      output_vocab_size: an integer.
      layout: the LayoutRules that the models will be lowered with, for layers that ask.
      mesh_shape: the Shape of the mesh, for layers that ask.
    """
    models = {}
    for scope in ("student", "teacher"):
        with gin.config_scope(scope):
            models[scope] = make_bitransformer(
                input_vocab_size=input_vocab_size,
                output_vocab_size=output_vocab_size,
                layout=layout,
                mesh_shape=mesh_shape,
            )
    return StudentTeacher(models["student"], models["teacher"])
