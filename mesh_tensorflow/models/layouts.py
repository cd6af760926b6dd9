"""Ways to split a model of a family over processors, by their names, and a search for the best."""

from __future__ import annotations

import functools
import itertools
import os
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, Optional, Union

import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow._core.layout import UNEVEN
from mesh_tensorflow._core.shape import JOIN
from mesh_tensorflow._huggingface import read_json
from mesh_tensorflow.auto_mtf.hardware import Hardware, hardware_profile
from mesh_tensorflow.auto_mtf.models import Program
from mesh_tensorflow.auto_mtf.plans import Choice, Plans
from mesh_tensorflow.auto_mtf.plans import plan as search_plans
from mesh_tensorflow.auto_mtf.step_time import ProgramParts
from mesh_tensorflow.models._family import Form, form_of
from mesh_tensorflow.models._gguf import GgufFile
from mesh_tensorflow.optimize import AdamWOptimizer, accumulate_gradients

__all__ = ["WAYS", "Way", "of", "plan", "training_step"]

# A path, as `from_pretrained` takes it, or what config.json says.
Model = Union[str, os.PathLike[str], Mapping[str, Any]]


class Way(NamedTuple):
    """A way to split a model.

    Attributes:
      dims: the names of dimensions that are split, of those that the model has.
      zero: the stage of ZeRO over the same processors; 0 for none.
    """

    dims: tuple[str, ...]
    zero: int = 0


# What experts compute has the batch under another name, as they may be split over its processors.
_BATCH, _BATCH_OF_EXPERTS, _EXPERTS = "batch", "batch_unsplit", "experts"
# Of decoders and encoders: a model has some of the dimensions.
WAYS: dict[str, Way] = {
    "data": Way((_BATCH,)),
    "zero2": Way((_BATCH,), zero=2),
    "zero3": Way((_BATCH,), zero=3),
    "tensor": Way(("vocab", "heads", "d_ff", "expert_hidden", "num_heads", "intermediate")),
    "expert": Way((_BATCH, _EXPERTS)),
    "sequence": Way(("length",)),
    "pipeline": Way(("stages",)),
}


def of(model: Model, ways: str) -> dict[str, Union[str, int]]:
    """Returns the arguments that split a model over a mesh in ways that have names.

    >>> from mesh_tensorflow.models import layouts
    >>> config = {"model_type": "llama", "vocab_size": 32, "hidden_size": 8,
    ...           "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    >>> layouts.of(config, "data:2,tensor:2")["layout"]
    'batch:data,vocab:tensor,heads:tensor,d_ff:tensor'

    They are arguments of `from_pretrained`, of `from_config` and of `mtf.train.fit`:
    `from_pretrained(path, **layouts.of(path, "zero3:8"))`. Sizes that are no multiple of the number
    of processors get a rule that ends in "?".

    Args:
      model: a path, as `from_pretrained` takes it; or what config.json says.
      ways: names in `WAYS`, each with a number of processors, such as "tensor:8" or
        "zero3:4,tensor:2". Each is a dimension of the mesh; neighbors on the last are next to each
        other.

    Returns:
      A dictionary with "mesh_shape" and "layout", and with "zero" and "zero_axis" where ZeRO is.

    Raises:
      ValueError: a way is not known, or is given twice; the family is not known; the model has
        nothing that a way splits, or fewer of it than there are processors.
    """
    form, mesh = _form(model), _parsed(ways)
    sizes = {d: form.sizes[d] for weight in form.weights for d in weight.dims.split()}
    of_calls = [_BATCH] if form.encodes else [_BATCH, "length", "stages"]
    rules: dict[str, str] = {}
    for name, processors in mesh.items():
        dims = [d for d in WAYS[name].dims if d in sizes or d in of_calls]
        # With the batch alone, "expert" would be "data" by another name, and split no experts.
        if {*dims} <= {_BATCH} != {*WAYS[name].dims}:
            raise ValueError(
                f"layouts.of: {name}:{processors} splits {', '.join(WAYS[name].dims)}, but the "
                f"model has {', '.join(sorted(sizes))}; leave it out"
            )
        if _BATCH in dims and _EXPERTS in sizes and _EXPERTS not in dims:
            # Or each processor would gather the others' tokens, and compute all of them.
            dims.append(_BATCH_OF_EXPERTS)
        for d in dims:
            size = sizes.get(d, processors)
            if size < processors:
                raise ValueError(
                    f"layouts.of: {name}:{processors} splits {d}={size}, which are fewer; take "
                    f"{name}:{size}, and another way for the rest, as in "
                    f'"data:{-(-processors // size)},{name}:{size}"'
                )
            uneven = UNEVEN if size % processors else ""
            # Several ways may split the batch: then over all of their processors.
            rules[d] = f"{rules[d]}{JOIN}{name}" if d in rules else name + uneven
    arguments: dict[str, Union[str, int]] = {
        "mesh_shape": ",".join(f"{name}:{size}" for name, size in mesh.items()),
        "layout": ",".join(f"{d}:{name}" for d, name in rules.items()),
    }
    zero = [name for name in mesh if WAYS[name].zero]
    if len(zero) > 1:
        raise ValueError(f"layouts.of: {' and '.join(zero)} are two stages of ZeRO; take one")
    if zero:
        arguments |= {"zero": WAYS[zero[0]].zero, "zero_axis": zero[0]}
    return arguments


def plan(
    model: Model,
    processors: int,
    batch: int,
    length: int,
    *,
    hardware: Union[str, Hardware, None] = None,
    memory_limit_bytes: Optional[float] = None,
    microbatches: Iterable[int] = (1, 4, 16),
    recompute: Iterable[bool] = (False, True),
    sequence_parallel: Iterable[bool] = (False,),
    **options: Any,
) -> Plans:
    """Returns the fastest way to train a decoder on a number of processors, by estimates.

    The step is that of `mtf.train.fit` with AdamW in mixed precision: activations in bfloat16,
    weights and slots in float32. Nothing is computed, and there are no weights.

    >>> from mesh_tensorflow.models import layouts
    >>> config = {"model_type": "llama", "vocab_size": 64, "hidden_size": 32,
    ...           "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    >>> plans = layouts.plan(config, 4, batch=8, length=16, microbatches=[1], recompute=[False])
    >>> plans.best.arguments["mesh_shape"]
    'mesh_0:4'

    Args:
      model: a path, as `from_pretrained` takes it; or what config.json says.
      processors: the number of processors.
      batch: the number of rows of a step.
      length: the number of ids of a row.
      hardware: see `mtf.auto_mtf.layout`.
      memory_limit_bytes: the memory that a step may use on one processor; by default all that the
        hardware has.
      microbatches: numbers of microbatches to choose from, as `microbatches` of `fit`.
      recompute: whether layers are recomputed for the gradient, to choose from; a model does so by
        `model.model.layer_stack.recompute_grads = True`.
      sequence_parallel: whether residuals may be split by length where heads are, to choose from; a
        model does so by `model.model.layer_stack.sequence_parallel = True`.
      **options: `zero`, `mesh_shapes`, `max_mesh_shape_dimensions`, `within` and `joint` of
        `mtf.auto_mtf.plan`.

    Returns:
      Plans, whose `best.arguments` are arguments of `fit`, and `best.choice` says whether to
      recompute and in how many microbatches.

    Raises:
      ValueError: the model is an encoder, or an argument is invalid; see `mtf.auto_mtf.plan`.
      auto_mtf.step_time.MemoryLimitError: no plan fits; the error names the nearest.
    """
    profile = hardware_profile(hardware)
    build = training_step(model, batch, length)
    candidates = [
        Choice(microbatches=parts, recompute=again, sequence_parallel=apart)
        for apart, again, parts in itertools.product(sequence_parallel, recompute, microbatches)
    ]
    limit = profile.memory_bytes if memory_limit_bytes is None else memory_limit_bytes
    return search_plans(
        build, processors, candidates, memory_limit_bytes=limit, hardware=profile, **options
    )


def training_step(model: Model, batch: int, length: int) -> Callable[[Choice], ProgramParts]:
    """Returns a function that builds the step of `plan`, each Choice once.

    Several searches by `mtf.auto_mtf.plan` can share it: on other hardware, or on more processors.

    Args:
      model: a path, as `from_pretrained` takes it; or what config.json says.
      batch: the number of rows of a step.
      length: the number of ids of a row.

    Raises:
      ValueError: the model is an encoder.
    """
    form = _form(model)
    if form.encodes:
        raise ValueError("layouts.plan: the model is an encoder; plan is for language models")
    return functools.cache(lambda choice: ProgramParts.of(_step(form, choice, batch, length)))


def _step(form: Form, choice: Choice, batch: int, length: int) -> Program:
    """Returns the training step of a language model."""
    tf.train.get_or_create_global_step()
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    # Groups of tokens, for experts, are smaller than what a processor has in any layout.
    model = form.model(mtf.convert_to_layout_rules(""), mtf.Shape([]))
    model.layer_stack.recompute_grads = choice.recompute
    model.layer_stack.sequence_parallel = choice.sequence_parallel
    rows = mtf.convert_to_shape(f"batch:{batch},length:{length}")
    ids = mtf.import_tf_tensor(mesh, tf.zeros(rows.to_integer_list, tf.int32), rows, name="ids")

    def loss_of(ids: mtf.Tensor) -> mtf.Tensor:
        inputs = mtf.shift(ids, 1, ids.shape.dims[-1], wrap=False)
        with mtf.precision("mixed_bfloat16"):
            _, loss = model.call_simple(inputs, ids, compute_loss=True, mode="train")
        return loss

    accumulated = accumulate_gradients(loss_of, ids, rows.dims[0], choice.microbatches)
    # Any rate: what a step takes does not depend on it.
    updates = AdamWOptimizer(1e-4).apply_grads(accumulated.grads, accumulated.variables)
    return Program(mesh.graph, mesh, [accumulated.loss], updates)


def _parsed(ways: str) -> dict[str, int]:
    """Returns the numbers of processors by the names of ways."""
    mesh: dict[str, int] = {}
    for text in ways.split(","):
        name, _, number = text.strip().partition(":")
        if name not in WAYS or not re.fullmatch(r"[1-9]\d*", number) or name in mesh:
            raise ValueError(
                f"layouts.of: {ways!r} must be names with numbers of processors, each once, such "
                f'as "data:2,tensor:4"; {text.strip()!r} is not. The names are {", ".join(WAYS)}'
            )
        mesh[name] = int(number)
    return mesh


def _form(model: Model) -> Form:
    if isinstance(model, Mapping):
        return form_of("layouts.of", model)
    path = os.fspath(model)
    if path.endswith(".gguf"):
        return form_of(path, GgufFile(path).config)
    return form_of(path, read_json(os.path.join(path, "config.json")))
