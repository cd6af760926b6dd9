"""Fine-tuning of a language model on texts: rows of examples, `mtf.train.fit`, and adapters."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any, Optional, Union

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow.models._examples import Examples
from mesh_tensorflow.models._lora import Lora
from mesh_tensorflow.ops._variables.variable import adapting
from mesh_tensorflow.train import Result, fit

if TYPE_CHECKING:
    from mesh_tensorflow.models import LanguageModel


def finetune(
    model: LanguageModel,
    examples: Examples,
    steps: int,
    *,
    length: int = 512,
    batch_size: int = 8,
    pack: bool = True,
    eval_examples: Optional[Examples] = None,
    lora: Optional[str] = None,
    save_adapters: Union[str, os.PathLike[str], None] = None,
    learning_rate: Any = 1e-4,
    **options: Any,
) -> Result:
    """Trains a language model on examples, on its own mesh, and assigns what it has learned.

    Args:
      model: a LanguageModel.
      examples: a JSONL file, or dictionaries; see `LanguageModel.examples`.
      steps: the number of steps.
      length: the number of ids of a row.
      batch_size: the number of rows of a batch.
      pack: whether a row may have several examples.
      eval_examples: examples to evaluate; or None.
      lora: which kernels get low-rank adapters, and their rank, such as "q,v:8" or, with alpha,
        "q,v:8:16": only these are trained, and added to the kernels at the end. None to train all
        weights.
      save_adapters: a directory to write adapters to, as the package PEFT has them; or None.
      learning_rate: a number, or a function of the step.
      **options: further arguments of `mtf.train.fit`, such as `directory`, `optimizer`, `precision`
        and `eval_every`.

    Returns:
      The Result of `fit`. Its metrics have "perplexity", the exponential of the loss.

    Raises:
      ValueError: there are no examples, or `lora` does not fit the model.
    """
    adapters = None if lora is None else Lora.of(lora, model._form)
    if save_adapters is not None and adapters is None:
        raise ValueError("finetune: save_adapters is for adapters; give lora, such as 'q,v:8'")
    rows = model.examples(examples, length, pack)
    eval_rows = None if eval_examples is None else model.examples(eval_examples, length, pack)

    def model_fn(mesh: mtf.Mesh, features: Any, training: bool) -> dict[str, mtf.Tensor]:
        within: Any = contextlib.nullcontext() if adapters is None else adapting(adapters)
        with within:
            loss = model.loss(mesh, features, training)
        return {"loss": loss, "perplexity": mtf.exp(loss)}

    options.setdefault("optimizer", mtf.optimize.AdamWOptimizer)
    result = fit(
        model_fn,
        rows,
        steps,
        dims=dict.fromkeys(rows, f"batch:{batch_size},length:{length}"),
        learning_rate=learning_rate,
        eval_data=eval_rows,
        init_checkpoint=model.weights,
        mesh_impl=model._mesh_impl,
        **options,
    )
    if adapters is None:
        model.assign(result.variables)
        return result
    if save_adapters is not None:
        adapters.save(model._form, result.variables, save_adapters)
    model.assign(adapters.merged(model.weights, result.variables))
    return result
