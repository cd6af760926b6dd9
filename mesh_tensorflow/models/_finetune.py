"""Fine-tuning of a language model on texts: rows of examples, `mtf.train.fit`, and adapters."""

from __future__ import annotations

import collections
import dataclasses
import math
import os
import re
from collections.abc import Callable, Mapping
from typing import Any, Optional, Union, cast

import numpy as np
import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow import schedules
from mesh_tensorflow._calls import names_taken
from mesh_tensorflow._core.errors import check_flag, check_whole, explained, is_real
from mesh_tensorflow._core.layout import convert_to_layout_rules
from mesh_tensorflow._core.shape import convert_to_shape
from mesh_tensorflow._mesh.variables.checkpoint_files import check_writable
from mesh_tensorflow._processes.processes import processes
from mesh_tensorflow.auto_mtf.measured import Auto
from mesh_tensorflow.models import _lora
from mesh_tensorflow.models._examples import Examples, questions_of
from mesh_tensorflow.models._family import Form
from mesh_tensorflow.models._language_model import (
    LanguageModel,
    balance_loss,
    coefficient_of,
    figures_of,
)
from mesh_tensorflow.models._lora import Lora
from mesh_tensorflow.ops._variable import Adapters, VariableDType, adapting
from mesh_tensorflow.optimize import AdamWOptimizer
from mesh_tensorflow.train import Result, fit, metrics

Path = Union[str, "os.PathLike[str]"]
_RATE = 1e-4
_FALLS = {"linear": schedules.linear_decay, "cosine": schedules.cosine}
# Arguments of `fit` that say where it trains; without them, on the mesh of the model.
_PLACES = {"mesh_shape", "layout", "devices", "simd", "mesh_impl", "zero", "zero_axis", "uneven"}
_GIVEN = {"model_fn", "data", "eval_data", "dims", "init_checkpoint"}  # by `finetune` itself
_BEHIND_ANSWERS = 8  # ids that exact_match has room for
_EPOCHS = "give epochs, how often all rows are seen; or steps"
# Names that `fit` and other trainers have, and what there is in their place.
_ELSEWHERE = {
    "data": "give examples",
    "dataset": "give examples",
    "train_dataset": "give examples",
    "eval_data": "give eval_examples",
    "eval_dataset": "give eval_examples",
    "dims": "batch_size and length are the sizes of a batch",
    "max_length": "give length, the number of ids of a row",
    "init_checkpoint": "training begins with the weights of the model; give others to model.assign",
    "num_epochs": _EPOCHS,
    "num_train_epochs": _EPOCHS,
    "max_steps": "give steps, the number of steps, those of earlier runs included",
    "lr": "give learning_rate",
    "lr_scheduler_type": "give schedule, such as 'cosine'",
    "warmup_ratio": "give warmup_steps, a number of steps",
    "packing": "give pack",
    "output_dir": "give directory, for checkpoints; model.save_pretrained writes the tuned model",
}


@explained(_ELSEWHERE, names_taken(fit) - _GIVEN)
def finetune(
    model: LanguageModel,
    examples: Examples,
    steps: Optional[int] = None,
    *,
    epochs: Optional[float] = None,
    length: int = 512,
    batch_size: int = 8,
    pack: bool = True,
    eval_examples: Optional[Examples] = None,
    exact_match: bool = False,
    lora: Optional[Path] = None,
    save_adapters: Optional[Path] = None,
    freeze: Optional[str] = None,
    recompute: bool = False,
    balance: Optional[float] = None,
    learning_rate: Any = _RATE,
    schedule: Optional[str] = None,
    warmup_steps: int = 0,
    **options: Any,
) -> Result:
    """Trains a language model on examples, on its own mesh, and gives it what it has learned.

    `finetune(model, "train.jsonl", epochs=3, lora="q,v:8")`, and then
    `model.save_pretrained("tuned")`.

    Args:
      model: a LanguageModel.
      examples: a JSONL file, or dictionaries; see `LanguageModel.examples`.
      steps: the number of steps.
      epochs: in place of it, how often all rows are seen.
      length: the number of ids of a row.
      batch_size: the number of rows of a batch.
      pack: whether a row may have several examples, which do not see each other.
      eval_examples: examples to evaluate, at the end and every `eval_every` steps; or None.
      exact_match: whether the last record of `Result.evaluations` has `LanguageModel.exact_match`
        of `eval_examples`, a fraction from 0 to 1.
      lora: which kernels get low-rank adapters, and their rank, such as "q,v:8", "all:8" or, with
        alpha, "q,v:8:16": only these are trained, and added to the kernels at the end. Or a
        directory of adapters to go on with. None to train the weights themselves.
      save_adapters: a directory to write adapters to, as the package PEFT has them; or None.
      freeze: a regular expression of names of variables that are not trained, such as
        "embedding|block_00[0-3]"; see `model.weights` for them.
      recompute: whether the activations of layers are computed again for gradients, not stored.
      balance: what the loss that balances experts is multiplied by; see `LanguageModel.loss`.
      learning_rate: a number, or a function of the step.
      schedule: how the rate falls from `learning_rate` to 0 at the last step: "linear" or "cosine";
        None for a rate that stays.
      warmup_steps: the steps in which the rate rises from 0 to `learning_rate`.
      **options: further arguments of `mtf.train.fit`, such as `directory`, to save checkpoints and
        go on from them, `optimizer` (AdamW by default), `precision`, `microbatches`, `eval_every`
        and `callbacks`; and `zero`, `mesh_shape` and the like to train on another mesh.

    Returns:
      The Result of `fit`; its values are "loss", the mean of ids that count, and "perplexity"; of a
      model with experts also "balance_loss", "busiest_expert" and "dropped", as of
      `LanguageModel.loss`.

    Raises:
      ValueError: there are no examples, or an argument does not fit the model or another one.
    """
    _check(model, lora, batch_size, steps, epochs)
    _check_schedule(learning_rate, schedule, warmup_steps)
    for name, flag in (("exact_match", exact_match), ("recompute", recompute)):
        check_flag("finetune", name, flag)
    if eval_examples is not None and not isinstance(eval_examples, (str, os.PathLike)):
        eval_examples = list(eval_examples)  # they are gone through twice
    form = model._form_of_family
    adapters, begin = _adapters_of(form, lora, freeze, options.get("seed", 0))
    if save_adapters is not None:
        _check_saved(save_adapters, adapters, form)
    of_evaluations = {"exact_match": exact_match, "eval_every": options.get("eval_every")}
    for name, value in of_evaluations.items():
        if value and eval_examples is None:
            raise ValueError(f"finetune: {name} is of eval_examples, which are not given")
    rows = model.examples(examples, length, pack)
    eval_rows = None
    if eval_examples is not None:
        eval_rows = _filled_up(model.examples(eval_examples, length, pack), batch_size)
        new_tokens = _checked_questions(model, eval_examples) if exact_match else 0
    number = len(rows["ids"])
    if number < batch_size:
        raise ValueError(
            f"finetune: the examples fill {number} rows of length={length}, fewer than one batch, "
            f"batch_size={batch_size}: make batch_size or length smaller"
            f"{', or give pack=False' if pack else ''}, or give more examples"
        )
    if epochs is not None:
        # So many rows in all: `fit` leaves out of an epoch those that fill no batch.
        steps = max(1, math.ceil(epochs * number / batch_size))
    assert steps is not None

    defaults: dict[str, Any] = {"optimizer": AdamWOptimizer, "shuffle": True}
    if not _PLACES & options.keys():
        defaults |= model._trained_at.of_fit
    if model._dtype == "bfloat16":
        # With masters in float32, as small updates would be lost in bfloat16.
        defaults["precision"] = "mixed_bfloat16"
    result = fit(
        _model_fn(model, adapters, recompute, balance, _place_of(model, options)),
        rows,
        steps,
        dims=dict.fromkeys(rows, f"batch:{batch_size},length:{length}"),
        learning_rate=_scheduled(learning_rate, schedule, warmup_steps, steps),
        eval_data=eval_rows,
        # A new model has none, and begins as its variables are initialized.
        # Behind a view of both, so that weights are still read one by one.
        init_checkpoint=collections.ChainMap(begin, cast(Any, model.weights))
        if begin
        else model.weights or None,
        **{**defaults, **options},
    )
    if isinstance(adapters, Lora):
        model.assign(adapters.merged(model.weights, result.variables))
        if save_adapters is not None and processes().is_chief:  # one file, of all processes
            adapters.save(form, result.variables, save_adapters)
    else:
        model.assign(result.variables)
    if exact_match and eval_examples is not None:
        share = model.exact_match(eval_examples, new_tokens, batch_size)
        result.evaluations[-1]["exact_match"] = share
    return result


def _check(
    model: Any,
    lora: Optional[Path],
    batch_size: int,
    steps: Optional[int],
    epochs: Optional[float],
) -> None:
    """Raises ValueError for what is no model to train, or no number of steps."""
    if not hasattr(model, "examples"):  # an encoder, or a path
        raise ValueError(
            f"finetune: model is a LanguageModel, such as mtf.models.from_pretrained(path) returns "
            f"of one, not {model!r}"
        )
    if lora is not None:
        model.check_weights("finetune: with lora")
    check_whole("finetune", "batch_size", batch_size)
    if (steps is None) == (epochs is None):
        raise ValueError("finetune: give steps or epochs, one of them")
    if epochs is not None and not (is_real(epochs) and 0 < epochs < math.inf):
        raise ValueError(f"finetune: epochs={epochs!r} must be a number above 0")


def _check_schedule(rate: Any, schedule: Optional[str], warmup_steps: int) -> None:
    """Raises ValueError for a schedule that is not known, or of a rate that has one already."""
    if schedule is not None and schedule not in _FALLS:
        names = " or ".join(map(repr, _FALLS))
        raise ValueError(
            f"finetune: schedule={schedule!r} is not known; give {names}, or None for a rate that "
            "stays; learning_rate takes any function of the step"
        )
    if (schedule is not None or warmup_steps) and not is_real(rate):
        raise ValueError(
            f"finetune: schedule and warmup_steps are for a learning_rate that is a number, and "
            f"it is {rate!r}"
        )


def _check_saved(save_adapters: Path, adapters: object, form: Form) -> None:
    """Raises ValueError where adapters could not be saved, which would be told after a training."""
    if not isinstance(adapters, Lora):
        raise ValueError("finetune: save_adapters is for adapters; give lora, such as 'q,v:8'")
    if not isinstance(save_adapters, (str, os.PathLike)):
        raise ValueError(f"finetune: save_adapters={save_adapters!r} is no path of a folder")
    adapters.check_saved(form)
    check_writable(os.fspath(save_adapters), "finetune: save_adapters")


def _scheduled(rate: Any, schedule: Optional[str], warmup_steps: int, steps: int) -> Any:
    """Returns the learning rate of a training of so many steps."""
    if schedule is not None:
        return _FALLS[schedule](rate, steps, warmup_steps)
    return schedules.linear_warmup(rate, warmup_steps) if warmup_steps else rate


def _checked_questions(model: LanguageModel, examples: Examples) -> int:
    """Returns how many ids continue prompts: as many as the longest answer has, and some more.

    Raises:
      ValueError: there is no answer, or a prompt is too long, which is found before the training.
    """
    pairs = questions_of(examples)
    tokenizer = model.tokenizer  # which there is where there are texts
    answers = [tokenizer.encode(x) if tokenizer and isinstance(x, str) else x for _, x in pairs]
    # The end of a text is an id, too, and what goes on behind the answer is to be told from it.
    number = max(map(len, answers)) + _BEHIND_ANSWERS
    model._rows("exact_match", [prompt for prompt, _ in pairs], number)
    return number


def _filled_up(rows: Mapping[str, np.ndarray], batch_size: int) -> dict[str, np.ndarray]:
    """Returns rows with such after them that are padding alone, up to whole batches.

    Whatever splits a batch splits the last one, too: the layout, microbatches and pipelines.
    """
    return {
        name: np.pad(array, [(0, -len(array) % batch_size), (0, 0)]) for name, array in rows.items()
    }


def _place_of(model: LanguageModel, options: Mapping[str, Any]) -> tuple[Any, Any]:
    """Returns the layout and the mesh shape of a training; None for those that are not known."""
    if not _PLACES & options.keys():
        return model.model.layout, model.model.mesh_shape
    impl, layout, shape = (options.get(name) for name in ("mesh_impl", "layout", "mesh_shape"))
    if impl is not None and not isinstance(impl, str):
        return impl.layout_rules, impl.shape
    if shape is None or layout == "auto" or isinstance(layout, Auto):
        return None, None
    rules = convert_to_layout_rules(layout or "")
    return rules.allowing_uneven() if options.get("uneven") else rules, convert_to_shape(shape)


def _model_fn(
    model: LanguageModel,
    adapters: Optional[Adapters],
    recompute: bool,
    balance: Optional[float],
    place: tuple[Any, Any],
) -> Callable[..., dict[str, Any]]:
    """Returns the model function of `fit`, with sums and weights that are right over batches."""
    coefficient = coefficient_of(model.config, balance)

    def model_fn(mesh: mtf.Mesh, features: Any, training: bool) -> dict[str, Any]:
        routings: list[Any] = []
        unit, stack = model.model, model.model.layer_stack
        # Set for this program alone: generation with the same stack has no gradients, and layers
        # look at the layout for what no processor would compute.
        before = stack.recompute_grads, unit.layout, unit.mesh_shape
        stack.recompute_grads, (unit.layout, unit.mesh_shape) = recompute, place
        try:
            with adapting(adapters):
                losses, weights = model._losses(mesh, features, training, routings)
        finally:
            stack.recompute_grads, unit.layout, unit.mesh_shape = before
        if balance is not None and not routings:
            raise ValueError(
                f"finetune: balance={balance} is for models with experts, and "
                f"{model.config.get('model_type')!r} has no experts"
            )
        loss = metrics.mean(losses, weights)
        if coefficient and routings:
            # As often as ids count, so that the mean has it once.
            added = coefficient * mtf.cast(balance_loss(routings), tf.float32) * loss.weight
            loss = dataclasses.replace(loss, total=loss.total + added)
        figures = figures_of(routings) if routings else {}
        return {"loss": loss, "perplexity": metrics.perplexity(losses, weights), **figures}

    return model_fn


@dataclasses.dataclass(frozen=True)
class _Frozen:
    """All weights as they are, of which some are not trained.

    Attributes:
      pattern: a regular expression of their names.
    """

    pattern: str

    def trains(self, name: str) -> bool:
        """Returns whether a variable is trained."""
        return not re.search(self.pattern, name)

    def adapted(
        self, full_name: str, name: str, value: mtf.Tensor, dtype: VariableDType
    ) -> mtf.Tensor:
        """Returns the variable as it is."""
        return value


def _adapters_of(
    form: Form, lora: Optional[Path], freeze: Optional[str], seed: Optional[int]
) -> tuple[Optional[Adapters], dict[str, Any]]:
    """Returns what variables are trained as, and the first values of adapters."""
    if lora is not None and freeze is not None:
        raise ValueError(
            "finetune: lora trains adapters alone, and freezes all weights; leave freeze out"
        )
    if lora is not None:
        if not isinstance(lora, (str, os.PathLike)):
            raise ValueError(
                f"finetune: lora={lora!r} is no text, such as 'q,v:8', and no directory of adapters"
            )
        if _lora.is_folder(lora):
            return _lora.read(form, lora)
        # Parts and a rank have no separator: a folder was meant, which is not there.
        if os.path.sep in (text := os.fspath(lora)):
            raise ValueError(
                f"finetune: lora={text!r} is no folder of adapters, such as save_adapters writes, "
                "and no list of parts with a rank, such as 'q,v:8'"
            )
        lora_ = Lora.of(text, form)
        return lora_, lora_.begin(form, seed)
    if freeze is None:
        return None, {}
    try:
        re.compile(freeze)
    except (re.error, TypeError) as error:
        raise ValueError(
            f"finetune: freeze={freeze!r} is no regular expression: {error}"
        ) from error
    # What is found in no name is mistyped; what is found in all leaves nothing to train.
    names = [weight.ours for weight in form.weights]
    frozen = [name for name in names if re.search(freeze, name)]
    if not frozen or len(frozen) == len(names):
        which = "all" if frozen else "none"
        raise ValueError(
            f"finetune: freeze={freeze!r} is found in {which} of the names of the weights, such as "
            f"{names[0]} and {names[-1]}"
        )
    return _Frozen(freeze), {}
