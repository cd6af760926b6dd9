"""Low-rank adapters: W + s A B in place of a kernel W, where A and B share a small dimension.

Hu et al., "LoRA: low-rank adaptation of large language models" (2021). Only A and B are trained;
the dimension between them is `lora`, which layouts may split like others. Their product is added to
the kernel when it is read, so that no layer knows of it, and any layout serves both.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, Optional, Union

import numpy as np
import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow._core.errors import first_names, is_real, is_whole
from mesh_tensorflow._huggingface import Folder, read_json, safetensors_numpy
from mesh_tensorflow._paths import written_whole
from mesh_tensorflow.models._family import Form, Weight
from mesh_tensorflow.models._weights import shape_of, tensors_of, turned
from mesh_tensorflow.ops._variable import VariableDType

DIM = "lora"  # the name of the dimension between them
_A, _B = "_lora_a", "_lora_b"
_CONFIG, _TENSORS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
# Fields of PEFT's file that say, where they are set, that adapters are computed in another way.
_OTHER_KINDS = (
    "use_dora", "rank_pattern", "alpha_pattern", "modules_to_save", "lora_bias", "use_qalora",
    "layer_replication", "alora_invocation_tokens", "use_bdlora", "arrow_config", "kasa_config",
    "monteclora_config", "trainable_token_indices", "target_parameters",
)  # fmt: skip
# How adapters may have begun; all other ways changed the weights of the model, too, as PEFT does
# again whenever it reads the adapters.
_BEGINNINGS = (True, False, None, "gaussian", "eva", "orthogonal")
_ROUTER = "top_n_gating"  # the part that chooses experts
_MOST = 65_536  # ranks of adapters
_USUAL = 8  # rank and alpha of a file that does not tell them


def _part_of(weight: Weight) -> str:
    """Returns which part of a layer a kernel is, such as "q" or "wi_0"; "" for other weights."""
    return weight.ours.removesuffix("/kernel").rpartition("/")[2] if _inputs(weight) else ""


def _is_router(weight: Weight) -> bool:
    """Returns whether a weight is the kernel of a router."""
    return _part_of(weight) == _ROUTER


def _inputs(weight: Weight) -> list[str]:
    """Returns the dimensions of a kernel's input; none for other weights, and for experts."""
    axes, dims = weight.stored.split(), weight.dims.split()
    # Rows of a table are looked up: it has no input that an adapter could have.
    if len(axes) != 2 or "{}" in weight.theirs or dims[0] in ("vocab", "max_length"):
        return []
    # Kernels have their inputs first, which are one axis of the file, the first or the second.
    return next(names for axis in axes if dims[: len(names := axis.split("*"))] == names)


def _sizes(weight: Weight, form: Form) -> tuple[list[int], list[int]]:
    """Returns the sizes of the dimensions of a kernel's input, and of the others."""
    sizes = [form.sizes[d] for d in weight.dims.split()]
    number = len(_inputs(weight))
    return sizes[:number], sizes[number:]


def _factors(weight: Weight) -> dict[str, Weight]:
    """Returns both factors of a kernel's adapter as weights of a file, by PEFT's names."""
    inputs = _inputs(weight)
    [outputs] = [axis for axis in weight.stored.split() if axis != "*".join(inputs)]
    behind = weight.dims.split()[len(inputs) :]
    a, b = (f"{_PREFIX}{weight.theirs.removesuffix('.weight')}.lora_{x}.weight" for x in "AB")
    return {
        "lora_A": Weight(
            weight.ours + _A, " ".join([*inputs, DIM]), a, f"{DIM} {'*'.join(inputs)}"
        ),
        "lora_B": Weight(
            weight.ours + _B, " ".join([DIM, *behind]), b, f"{outputs} {DIM}", weight.part
        ),
    }


@dataclasses.dataclass(frozen=True)
class Lora:
    """Adapters of some of a model's kernels.

    Attributes:
      rank: the size of the dimension `lora`.
      alpha: the products are multiplied by alpha / rank.
      inputs: the dimensions of the input of each adapted kernel, by its variable's name.
    """

    rank: int
    alpha: float
    inputs: Mapping[str, Sequence[str]]

    @classmethod
    def of(cls, text: str, form: Form) -> Lora:
        """Returns what "q,v:8" says: the parts, the rank, and perhaps alpha, as in "q,v:8:16".

        Args:
          text: a string; "all" names all parts of layers but routers. Alpha is twice the rank if it
            is not given.
          form: the Form of the model.

        Raises:
          ValueError: it is no such text, or the model has no such part.
        """
        match = re.fullmatch(r"([\w,]+):([1-9]\d*)(?::(\d+(?:\.\d+)?))?", text.replace(" ", ""))
        # With an alpha of 0 adapters add nothing, and nothing is learned.
        if match is None or (match[3] and not float(match[3])):
            raise ValueError(
                f"lora={text!r} is no list of parts with a rank, such as 'q,v:8', and perhaps "
                "alpha above 0, as in 'q,v:8:16'"
            )
        targets, rank = match[1].split(","), int(match[2])
        if rank > _MOST:
            raise ValueError(
                f"lora={text!r} has rank {rank}, and no kernel needs more than {_MOST}"
            )
        parts = {part for weight in form.weights if (part := _part_of(weight))}
        if targets == ["all"]:
            # The logits are not among the layers, and a large vocabulary would make theirs large.
            # Routers have none in PEFT, where they are no linear layers.
            targets = sorted(parts - {"logits", _ROUTER})
        unknown = [part for part in targets if part not in parts]
        if unknown:
            raise ValueError(
                f"lora={text!r}: the model has no {', '.join(unknown)}; it has "
                f"{', '.join(sorted(parts))}"
            )
        inputs = {w.ours: _inputs(w) for w in form.weights if _part_of(w) in targets}
        return cls(rank, float(match[3] or 2 * rank), inputs)

    @property
    def scale(self) -> float:
        """What products are multiplied by."""
        return self.alpha / self.rank

    # -- as `Adapters` of variables

    def trains(self, name: str) -> bool:
        """Returns False: nothing but adapters is trained."""
        return False

    def adapted(
        self, full_name: str, name: str, value: mtf.Tensor, dtype: VariableDType
    ) -> mtf.Tensor:
        """Returns the kernel with its adapter, or another variable as it is."""
        inputs = self.inputs.get(full_name)
        if inputs is None:
            return value
        dims, rank = value.shape.dims, mtf.Dimension(DIM, self.rank)
        shapes = {
            _A: mtf.Shape([*dims[: len(inputs)], rank]),
            _B: mtf.Shape([rank, *dims[len(inputs) :]]),
        }
        # What they begin with is given to `fit`, as the kernels are: see `begin`.
        zeros = tf.zeros_initializer()
        factors = [
            mtf.get_variable(value.mesh, name + suffix, shape, dtype, initializer=zeros)
            for suffix, shape in shapes.items()
        ]
        # One kernel for the layer: its product with x costs what that with W does.
        product = mtf.einsum(factors, output_shape=value.shape)
        return value + mtf.cast(product * self.scale, value.dtype)

    # -- of arrays

    def begin(self, form: Form, seed: Optional[int]) -> dict[str, np.ndarray]:
        """Returns what adapters begin with, by the names of variables.

        Args:
          form: the Form of the model.
          seed: that of the random values; None for others in each run.
        """
        generator = np.random.default_rng(seed)
        values: dict[str, np.ndarray] = {}
        for weight in form.weights:
            if weight.ours not in self.inputs:
                continue
            before, behind = _sizes(weight, form)
            normal = generator.standard_normal([*before, self.rank], np.float32)
            # So x A is about as large as x, whatever the size of the input.
            values[weight.ours + _A] = normal * np.float32(math.prod(before) ** -0.5)
            # Zeros, so that training begins with the model as it is.
            values[weight.ours + _B] = np.zeros([self.rank, *behind], np.float32)
        return values

    def check_saved(self, form: Form) -> None:
        """Checks that PEFT can say these adapters.

        Args:
          form: the Form of the model.

        Raises:
          ValueError: some are of kernels that files have in one tensor with others, or of routers.
        """
        routers = {w.theirs for w in form.weights if w.ours in self.inputs and _is_router(w)}
        if routers:
            raise ValueError(
                f"adapters of {min(routers)} cannot be written for PEFT: it is what chooses "
                "experts, and no linear layer there, which alone have adapters. Leave "
                f"{_ROUTER} out of lora, or leave save_adapters out; the model itself is saved by "
                "save_pretrained"
            )
        shared = {w.theirs for w in form.weights if w.ours in self.inputs and "[" in w.stored}
        if shared:
            raise ValueError(
                f"adapters of {min(shared)} cannot be written for PEFT: several kernels are one "
                "tensor there, and would need one adapter. Leave save_adapters out; the model "
                "itself is saved by save_pretrained"
            )

    def _fan_in_fan_out(self, form: Form) -> bool:
        """Returns whether files have kernels as [inputs, outputs], as those of GPT-2."""
        return any(
            w.stored.split()[0] == "*".join(self.inputs[w.ours])
            for w in form.weights
            if w.ours in self.inputs
        )

    def _modules(self, form: Form) -> list[str]:
        """Returns how names of the adapted modules end, and no others of the model do."""
        adapted = {w.theirs for w in form.weights if w.ours in self.inputs}
        others = [w.theirs for w in form.weights if w.ours not in self.inputs]

        def end_of(name: str) -> str:
            module = name.removesuffix(".weight")
            # GPT-2's c_proj is of attention and of feed-forward layers; and adapters that were read
            # may be of some layers alone.
            ends = (module.rpartition(".")[2], re.sub(r"^.*\.\d+\.", "", module), module)
            return next(x for x in ends if not any(o.endswith(f".{x}.weight") for o in others))

        return sorted({end_of(name) for name in adapted})

    def merged(
        self, weights: Mapping[str, np.ndarray], variables: Mapping[str, Any]
    ) -> dict[str, np.ndarray]:
        """Returns all weights of the model, with the adapters added to those that have some.

        Args:
          weights: arrays by the names of the model's variables.
          variables: arrays by the names of variables, those of adapters among them.
        """
        merged = {name: np.asarray(weights[name]) for name in weights}
        for name in self.inputs:
            a, b = (np.asarray(variables[name + x], np.float32) for x in (_A, _B))
            # In float32 also of a model in bfloat16, in which sums over the rank would be rounded.
            product = np.tensordot(a, b, 1) * self.scale
            merged[name] = merged[name] + product.astype(merged[name].dtype)
        return merged

    def save(
        self, form: Form, variables: Mapping[str, Any], path: Union[str, os.PathLike[str]]
    ) -> None:
        """Writes the adapters as the package PEFT has them.

        Args:
          form: the Form of the model.
          variables: arrays by the names of variables, those of adapters among them.
          path: a directory; created if it does not exist.
        """
        self.check_saved(form)
        adapted = (weight for weight in form.weights if weight.ours in self.inputs)
        factors = [factor for weight in adapted for factor in _factors(weight).values()]
        values = {w.ours: np.asarray(variables[w.ours], np.float32) for w in factors}
        tensors = tensors_of(factors, values, {**form.sizes, DIM: self.rank})
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "r": self.rank,
            "lora_alpha": self.alpha,
            "lora_dropout": 0.0,
            "bias": "none",
            "fan_in_fan_out": self._fan_in_fan_out(form),
            "target_modules": self._modules(form),
        }
        # Adapters that were there before stay, should this one end half-way.
        with written_whole(os.fspath(path), last=_TENSORS) as folder:
            with open(os.path.join(folder, _CONFIG), "w", encoding="utf-8") as f:
                json.dump(config, f, indent=2)
            safetensors_numpy().save_file(tensors, os.path.join(folder, _TENSORS))


def is_folder(path: Union[str, os.PathLike[str]]) -> bool:
    """Returns whether a directory has adapters.

    Args:
      path: any text or path.
    """
    return os.path.isfile(os.path.join(path, _CONFIG))


def read(form: Form, path: Union[str, os.PathLike[str]]) -> tuple[Lora, dict[str, np.ndarray]]:
    """Reads adapters that PEFT or `Lora.save` wrote.

    Args:
      form: the Form of the model.
      path: a directory.

    Returns:
      (the Lora, arrays by the names of the adapters' variables).

    Raises:
      ValueError: a file is damaged, the adapters are of another kind, or not of this model.
    """
    path = os.fspath(path)
    if not is_folder(path):
        raise ValueError(f"no {_CONFIG} in {path!r}: it is no folder of adapters")
    config = read_json(os.path.join(path, _CONFIG))
    other = [name for name in _OTHER_KINDS if config.get(name)]
    for name, known in (("init_lora_weights", _BEGINNINGS), ("bias", ("none", None))):
        if config.get(name) not in known:
            other.append(f"{name}={config[name]!r}")
    if config.get("peft_type") != "LORA" or other:
        raise ValueError(
            f"{path}: {_CONFIG} has {', '.join(other) or 'peft_type'}, and is of no plain LoRA, "
            "which alone is known"
        )
    if not os.path.isfile(os.path.join(path, _TENSORS)):
        raise ValueError(f"no {_TENSORS} in {path!r}, though there is {_CONFIG}")
    file = Folder(os.path.join(path, _TENSORS))
    rank, alpha = (config.get(name, _USUAL) for name in ("r", "lora_alpha"))
    if not is_whole(rank):
        raise ValueError(f"{path}: {_CONFIG} has r={rank!r}, no positive integer")
    if not is_real(alpha) or not math.isfinite(alpha):
        raise ValueError(f"{path}: {_CONFIG} has lora_alpha={alpha!r}, no finite number")
    # Kalajdzievski, "A rank stabilization scaling factor for fine-tuning with LoRA" (2023): they
    # are multiplied by alpha / sqrt(rank).
    alpha *= math.sqrt(rank) if config.get("use_rslora") else 1
    # Kernels that share a tensor share its adapter: A, and each has its part of B.
    by_module: dict[str, list[Weight]] = {}
    for weight in form.weights:
        if _inputs(weight):
            by_module.setdefault(weight.theirs.removesuffix(".weight"), []).append(weight)
    sizes = {**form.sizes, DIM: rank}
    inputs: dict[str, list[str]] = {}
    values: dict[str, np.ndarray] = {}
    for tensor in file:
        module, _, kind = tensor.removesuffix(".weight").removeprefix(_PREFIX).rpartition(".")
        weights = by_module.get(module)
        if weights is not None and kind == "base_layer":
            continue  # the kernel as it was, which PEFT writes beside adapters of logits
        if weights is None or kind not in ("lora_A", "lora_B"):
            raise ValueError(
                f"{path}: {tensor} has no place in the model; adapters are of "
                f"{first_names(sorted(by_module))}"
            )
        file.dtype(tensor)  # that of weights, or an error
        value = file[tensor].astype(np.float32)
        for weight in weights:
            factor = _factors(weight)[kind]
            if list(value.shape) != (shape := shape_of(factor, sizes)):
                raise ValueError(
                    f"{path}: {tensor} has the shape {list(value.shape)} instead of {shape}, "
                    f"with the rank r={rank} of {_CONFIG}"
                )
            inputs[weight.ours] = _inputs(weight)
            values[factor.ours] = turned(factor, [value], sizes)
    lacking = [n + x for n in inputs for x in (_A, _B) if n + x not in values]
    if lacking or not inputs:
        raise ValueError(
            f"{path}: {_TENSORS} has not both parts of each adapter: {first_names(lacking)}"
        )
    return Lora(rank, float(alpha), inputs), values
