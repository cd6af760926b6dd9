"""Training steps in PyTorch, run operation by operation or compiled. Needs no TensorFlow."""

import re
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import t5_small
import torch
import workloads
from torch.nn import functional
from workloads import Workload

__all__ = ["TorchProgram"]

Loss = Callable[[], torch.Tensor]


def _transformer(w: Workload, device: str) -> tuple[Loss, list[torch.nn.Parameter]]:
    """Returns the loss of a workload of kind "transformer", and its weights."""

    def parameter(array: np.ndarray) -> torch.nn.Parameter:
        return torch.nn.Parameter(torch.tensor(array, device=device))

    weights = {name: parameter(array) for name, array in workloads.make_weights(w).items()}
    scale, bias = np.ones(w.d_model, np.float32), np.zeros(w.d_model, np.float32)
    norms = {
        f"block_{i}/{name}": (parameter(scale), parameter(bias))
        for i in range(w.layers)
        for name in ("norm_attention", "norm_ff")
    }
    inputs, target = (torch.tensor(a, device=device) for a in workloads.make_data(w).values())

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return functional.layer_norm(x, [w.d_model], *norms[name], eps=1e-6)

    def attention(x: torch.Tensor, block: str) -> torch.Tensor:
        q, k, v = (torch.einsum("bld,dhk->bhlk", x, weights[f"{block}/{n}"]) for n in "qkv")
        mixed = functional.scaled_dot_product_attention(q, k, v)
        return torch.einsum("bhlk,hkd->bld", mixed, weights[f"{block}/o"])

    def loss() -> torch.Tensor:
        x = inputs
        for i in range(w.layers):
            block = f"block_{i}"
            x = x + attention(norm(x, f"{block}/norm_attention"), block)
            y = norm(x, f"{block}/norm_ff") @ weights[f"{block}/wi"]
            x = x + functional.gelu(y, approximate="tanh") @ weights[f"{block}/wo"]
        return functional.mse_loss(x, target)

    return loss, [*weights.values(), *(p for pair in norms.values() for p in pair)]


def _t5_value(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """The initial value of a weight of transformers' T5, which is that of this package's."""
    ours = name.replace(".", "/")
    for kind in ("block", "layer"):
        ours = re.sub(rf"{kind}/(\d+)", lambda m, k=kind: f"{k}_{int(m[1]):03}", ours)
    if ours.endswith("norm/weight"):
        return workloads.make_weight(ours.replace("/weight", "/scale"), shape)
    if ours == "shared/weight":
        return workloads.make_weight("shared/embedding", shape)
    # Matrices are transposed there; those of dense layers are called kernels here.
    end = "/kernel" if "DenseReluDense" in ours else ""
    return workloads.make_weight(ours.removesuffix("/weight") + end, shape[::-1]).T


def _t5(device: str) -> tuple[Loss, list[torch.nn.Parameter]]:
    """Returns the loss of T5-small of the package transformers, and its weights."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(decoder_start_token_id=0, dropout_rate=0.0, **t5_small.SIZES)
    model = T5ForConditionalGeneration(config).to(device)
    model.train()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            value = np.ascontiguousarray(_t5_value(name, tuple(parameter.shape)))
            parameter.copy_(torch.tensor(value))
    inputs, targets = (torch.tensor(ids, device=device).long() for ids in t5_small.ids())
    return lambda: model(input_ids=inputs, labels=targets).loss, list(model.parameters())


def _pretrained(folder: str, ids: np.ndarray, device: str) -> tuple[Loss, list[torch.nn.Parameter]]:
    """Returns the loss of a language model of the package transformers, and its weights."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device)
    model.train()
    given = torch.tensor(ids, device=device).long()
    return lambda: model(input_ids=given, labels=given).loss, list(model.parameters())


class TorchProgram:
    """A training step with its weights.

    Attributes:
      seconds: of making it ("build"); what a compiler takes is part of the first step.
    """

    def __init__(self, name: str, compiled: bool, pretrained: Any = None):
        """Makes the weights.

        Args:
          name: one of workloads.WORKLOADS of kind "transformer", or "t5_small".
          compiled: whether torch.compile compiles the loss and its gradients.
          pretrained: of a language model of a folder in place of `name`: the folder, the precision
            of activations, ids and the learning rate, as of models_pjrt.pretrained_step.
        """
        # As XLA's products of float32 are by default on such devices.
        torch.set_float32_matmul_precision("high")
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        start = time.perf_counter()
        self._precision = "float32"
        if pretrained:
            folder, self._precision, ids, rate = pretrained
            loss, self._weights = _pretrained(folder, ids, self._device)
        elif name == "t5_small":
            (loss, self._weights), rate = _t5(self._device), t5_small.LEARNING_RATE
        else:
            w = workloads.WORKLOADS[name]
            (loss, self._weights), rate = _transformer(w, self._device), w.learning_rate
        self._loss = torch.compile(loss) if compiled else loss
        self._optimizer = torch.optim.SGD(self._weights, lr=rate)
        self.seconds = {"build": time.perf_counter() - start}

    def start_step(self) -> torch.Tensor:
        """Trains one step; returns its loss, which may not be computed yet."""
        self._optimizer.zero_grad(set_to_none=True)
        half = self._precision == "mixed_bfloat16"
        with torch.autocast(self._device, torch.bfloat16, enabled=half):
            loss = self._loss()
        loss.backward()
        self._optimizer.step()
        return loss.detach()

    def peak_bytes(self) -> int:
        """The most memory of the device that arrays have had at once; 0 where it is not known."""
        return torch.cuda.max_memory_allocated() if self._device == "cuda" else 0

    def device_name(self) -> Any:
        """What the device is called."""
        return torch.cuda.get_device_name() if self._device == "cuda" else "cpu"
