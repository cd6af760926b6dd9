"""Language models: called, scored, continued, trained and written back."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Optional, Union

import numpy as np
import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow import layers
from mesh_tensorflow._calls import names_taken
from mesh_tensorflow._core.errors import check_flag, check_whole, explained, is_real
from mesh_tensorflow.models import _lora
from mesh_tensorflow.models._examples import OF_TOKENIZER, Examples, questions_of, rows_of
from mesh_tensorflow.models._generation import (
    Ends,
    Generated,
    Generator,
    Listener,
    Sampling,
    Search,
    Stop,
    check_search,
    ends_of,
    eos_of,
)
from mesh_tensorflow.models._pretrained import Pretrained, check_path, rows_of_ids
from mesh_tensorflow.ops._contractions.reduce_broadcast import divided_sum
from mesh_tensorflow.ops._microbatches import mean_over_microbatches
from mesh_tensorflow.transformer import moe, transformer

GENERATION = "generation_config.json"
# Ids, a text, or the messages of a conversation.
Prompt = Union[Sequence[int], str, Sequence[Mapping[str, str]]]
# Names that other libraries have, and what there is in their place.
_NAMES_OF_GENERATE = {
    "max_length": "give max_new_tokens, without the ids of prompts",
    "max_tokens": "give max_new_tokens",
    "do_sample": "give a temperature above 0.0 to draw",
    "eos_token_id": "give stop, ids or texts",
    "stop_strings": "give stop, ids or texts",
}
_BALANCE = 0.001  # the coefficient of the balance loss where config.json does not say it


class LanguageModel(Pretrained):
    """A language model, whose weights are in parts on a mesh.

    They are read when the model is first called, one by one, and stored in slices. Besides the
    attributes of `Pretrained` it has:

    Attributes:
      model: the Unitransformer.
    """

    def __init__(
        self,
        *args: Any,
        pipeline: Optional[Mapping[str, int]] = None,
        generation: Optional[Mapping[str, Any]] = None,
        **kwargs: Any,
    ) -> None:
        """Creates it; `from_pretrained` and `from_config` do so for users."""
        super().__init__(*args, **kwargs)
        self._generation = dict(generation or {})  # the contents of generation_config.json
        self.model = self._form.model(self._mesh_impl.layout_rules, self._mesh_impl.shape)
        self._trained_at = self._place
        self._place = self._place.without(_lora.DIM)  # adapters are of trainings
        if pipeline:
            stack = self.model.layer_stack
            self.model.layer_stack = transformer.PipelinedLayerStack.of(stack, **pipeline)
            self._place = self._place.without("stages")  # calls apply layers in a row
        self._generator = Generator(self.model, self._place, self._dtype, self._function)

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
        return self._generator.logits(self._checked("logits", ids))

    @explained(_NAMES_OF_GENERATE)
    def generate(
        self,
        prompts: Sequence[Prompt],
        max_new_tokens: int = 64,
        temperature: float = 0.0,
        top_k: int = -1,
        stop: Stop = None,
        *,
        top_p: float = 1.0,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        num_beams: int = 1,
        length_penalty: float = 1.0,
        early_stopping: Union[bool, str] = False,
        num_return_sequences: int = 1,
        seed: Optional[int] = None,
        details: bool = False,
    ) -> list[Any]:
        """Returns what the model continues prompts by, without the prompts.

        The arguments that change the distribution have the meaning that those of these names have
        in transformers, and are applied in its order: repetition_penalty, temperature, top_k,
        top_p, min_p.

        Args:
          prompts: a list of lists of ids, of any lengths from 1; of texts; or of conversations,
            lists of dictionaries with "role" and "content". The last two need a tokenizer.
          max_new_tokens: how many ids are added at most.
          temperature: 0.0 takes the id with the largest logit; 1.0 draws from the softmax.
          top_k: how many ids with the largest logits are drawn from; -1 for all.
          stop: the id at which a continuation ends, which it includes; the `eos_token_id` of
            generation_config.json or else of config.json, one or several, if None; and -1 for none.
            A text, with which it ends too; the id that completes the text is the last one. Or a
            list or an array of ids and texts; without ids in it, those of the folder count, too.
          top_p: draws from the fewest ids whose probabilities have at least this sum.
          min_p: draws from ids whose probability is at least this share of the largest one.
          repetition_penalty: a number by which the logits of ids are divided that the prompt or
            the continuation has, or multiplied if they are negative.
          num_beams: searches for the likeliest continuations, with so many of them kept in each
            step, as transformers does, where repetition_penalty is of log-probabilities; 1 for no
            search. Then nothing is drawn.
          length_penalty: a search compares the log-probabilities of continuations divided by
            length ** length_penalty.
          early_stopping: whether a search ends at once when it has num_beams finished ones; if
            not, it ends when no other is expected to be better than these (False), or can be
            ("never").
          num_return_sequences: how many continuations each prompt gets, drawn or found by the
            search, best first.
          seed: with the same seed, the same ids are drawn, in every layout; None draws others in
            each call, by the seed of `tf.random.set_seed` if there is one.
          details: whether to return Generated: ids, text, log-probabilities, and the score of a
            search.

        Returns:
          A list of lists of ids; of texts, for prompts that are none. If num_return_sequences is
          above 1, a list of lists of them, one for each prompt.

        Raises:
          ValueError: an id is not in the vocabulary, a prompt is empty, there is no tokenizer, or
            an argument is out of its range or does not go with another.
        """
        prompts = _listed("generate", prompts)
        sampling = Sampling(
            max_new_tokens, temperature, top_k, top_p, min_p, repetition_penalty, seed
        )
        check_flag("generate", "details", details)
        search = Search(num_beams, length_penalty, early_stopping, num_return_sequences)
        ends = self._ends_of(stop)
        check_search(search, sampling)
        rows = self._rows("generate", prompts, max_new_tokens)
        if not rows:
            return []
        n = num_return_sequences
        each = [row for row in rows for _ in range(n)]
        if ends.texts:
            self._place.check_can_listen("generate")
        listener = Listener(len(each), ends.texts, self.tokenizer) if ends.texts else None
        # Of each prompt its continuations, ids with the score of a search.
        continuations: list[Any]
        if num_beams > 1:
            continuations = self._generator.search(rows, search, sampling, ends.ids, listener)
        else:
            drawn = self._generator.sample(each, sampling, ends.ids, listener)
            continuations = [
                [(ids, None) for ids in drawn[i : i + n]] for i in range(0, len(drawn), n)
            ]
        results: list[list[Any]] = [
            [
                self.tokenizer.decode(ids) if self.tokenizer and _is_text(prompt) else ids
                for ids, _ in of
            ]
            for of, prompt in zip(continuations, prompts)
        ]
        if details:
            # Computed again: what ids were drawn from had a temperature, or was cut.
            wholes = [[*row, *ids] for row, of in zip(rows, continuations) for ids, _ in of]
            log_probs = iter(self._generator.log_probs(wholes))
            for row, of, answers in zip(rows, continuations, results):
                for i, (ids, score) in enumerate(of):
                    text = answers[i] if isinstance(answers[i], str) else None
                    answers[i] = Generated(ids, text, next(log_probs)[len(row) - 1 :], score)
        return results if n > 1 else [of[0] for of in results]

    @explained(_NAMES_OF_GENERATE, names_taken(generate))
    def stream(
        self,
        prompt: Prompt,
        max_new_tokens: int = 64,
        stop: Stop = None,
        **sampling: Any,
    ) -> Iterator[Any]:
        """Returns an iterator of what the model continues a prompt by, piece by piece.

        >>> for piece in model.stream("Once upon a time"):  # doctest: +SKIP
        ...     print(piece, end="", flush=True)

        The pieces are together what `generate` returns; the program and its trace are the same for
        all of them. An iterator that is closed, as at a `break`, ends the program.

        Args:
          prompt: ids, a text, or a conversation, as in `generate`.
          max_new_tokens: how many ids are added at most.
          stop: what ends the continuation, as in `generate`.
          **sampling: temperature, top_k, top_p, min_p, repetition_penalty and seed of `generate`.

        Returns:
          An iterator of texts; of ids, for a prompt of ids.

        Raises:
          ValueError: as `generate` raises.
        """
        self._place.check_can_listen("stream")
        unknown = sorted(sampling.keys() - {field.name for field in dataclasses.fields(Sampling)})
        if unknown:
            raise ValueError(
                f"stream: it draws one continuation, without {', '.join(unknown)}; generate has "
                "what it has not"
            )
        settings = Sampling(max_new_tokens, **sampling)
        ends = self._ends_of(stop)
        rows = self._rows("stream", [prompt], max_new_tokens)
        listener = Listener(
            1, ends.texts, self.tokenizer, tells="texts" if _is_text(prompt) else "ids"
        )
        return listener.pieces(lambda: self._generator.sample(rows, settings, ends.ids, listener))

    def log_probs(self, prompts: Sequence[Prompt]) -> list[list[float]]:
        """Returns the log-probability of each id but the first, given those before it.

        They are the model's own, of no temperature and with nothing left out.

        Args:
          prompts: a list of lists of ids, of any lengths from 1; of texts; or of conversations.

        Returns:
          A list of lists of floats, each shorter by one than the ids.

        Raises:
          ValueError: an id is not in the vocabulary, a prompt is empty, or there is no tokenizer.
        """
        rows = self._rows("log_probs", _listed("log_probs", prompts), 1)
        return self._generator.log_probs(rows) if rows else []

    def _ends_of(self, stop: Stop) -> Ends:
        """Returns what ends continuations, by the argument and the folder."""
        vocab = self.model.input_vocab_dim.size
        of_folder = eos_of("generate", self.config, self._generation)
        return ends_of(stop, of_folder, self.tokenizer, vocab)

    def _write_more(self, folder: str) -> None:
        """Writes the files of a folder that have neither weights nor config.json."""
        super()._write_more(folder)
        if self._generation:
            with open(os.path.join(folder, GENERATION), "w", encoding="utf-8") as f:
                json.dump(self._generation, f, indent=2)

    def _rows(self, what: str, prompts: Sequence[Prompt], new: int) -> list[Any]:
        """Returns the ids of prompts, to which so many new ones are to be added."""
        rows: list[Any] = []
        for i, prompt in enumerate(prompts):
            if not isinstance(prompt, (str, Sequence, np.ndarray)) or isinstance(prompt, bytes):
                raise ValueError(
                    f"{what}: prompt {i} is {prompt!r}, none of ids, a text and a conversation; "
                    "prompts is a list of such, as [[1, 2]] is of one that is ids"
                )
            ids = self._ids(what, prompt)
            if not len(ids):
                raise ValueError(
                    f"{what}: prompt {i} is empty, but has to have at least one id, such as that "
                    "of the beginning of texts"
                )
            # Of the new ids the last one is not read again.
            self._check_length(what, len(ids) + new - 1, f"prompt {i} with {new} new ids")
            why = OF_TOKENIZER if _is_text(prompt) else ""
            rows.append(self._checked(what, [ids], why)[0])
        return rows

    def _check_length(self, what: str, length: int, of: str) -> None:
        """Raises ValueError if there are more positions than the model's table of them has."""
        most = self._generator.most_positions
        if most is not None and length > most:
            raise ValueError(
                f"{what}: {of} takes {length} positions, and the model has a table of {most}; "
                "shorten it"
            )

    def _ids(self, what: str, prompt: Prompt) -> Sequence[int]:
        """Returns the ids of a prompt."""
        if not _is_text(prompt):
            return prompt  # type: ignore[return-value]
        tokenizer = self._tokenizer_for(what, "prompts")
        if isinstance(prompt, str):
            return tokenizer.prompt(prompt)
        return tokenizer.chat(prompt)  # type: ignore[arg-type]

    def _checked(self, what: str, ids: Any, why: str = "") -> np.ndarray:
        rows, vocab = rows_of_ids(what, ids), self.model.input_vocab_dim.size
        # The lookup of an embedding would give zeros for such an id, and no error.
        wrong = rows[(rows < 0) | (rows >= vocab)]
        if wrong.size:
            raise ValueError(
                f"{what}: the id {wrong[0]} is not in the vocabulary, 0 to {vocab - 1}{why}"
            )
        self._check_length(what, rows.shape[1], "a row")
        return rows.astype(np.int32)

    # -- training

    def loss(
        self,
        mesh: mtf.Mesh,
        features: Union[mtf.Tensor, Mapping[str, mtf.Tensor]],
        training: bool = True,
        *,
        balance: Optional[float] = None,
        figures: bool = False,
    ) -> Union[mtf.Tensor, dict[str, mtf.Tensor]]:
        """Returns the mean loss of ids, given those before them.

        It is a model function of `mtf.train.fit`:
        `fit(model.loss, ids, dims="batch:8,length:128", init_checkpoint=model.weights, ...)`. Then
        `assign` takes its `Result.variables`.

        Args:
          mesh: a Mesh.
          features: an int32 Tensor with dimensions [batch, length], ids, of which each but the
            first counts; or what `examples` returns, as Tensors: "ids", "weights", "sequence_id"
            and "position".
          training: whether weights are updated.
          balance: what the loss that balances experts is multiplied by before it is added, as in
            `functools.partial(model.loss, balance=0.01)`. None for what transformers does: the
            `router_aux_loss_coef` of config.json if its `output_router_logits` is true, and 0 if
            not.
          figures: whether to return metrics of the experts, too.

        Returns:
          A scalar. With `figures`, a dictionary of scalars: "loss"; "balance_loss", without its
          factor; "busiest_expert", the share of choices that went to the expert with the most, a
          mean over layers; and "dropped", the share of choices without a place.

        Raises:
          ValueError: the length is 1, or the model has no experts and is asked for them.
        """
        coefficient = coefficient_of(self.config, balance)
        routings: Optional[list] = [] if coefficient or figures else None
        losses, weights = self._losses(mesh, features, training, routings)
        if routings == []:
            raise ValueError(
                f"loss: balance={balance} and figures={figures} are for models with experts, and "
                f"{self.config.get('model_type')!r} has none"
            )
        total = mtf.reduce_sum(losses * weights)
        if isinstance(features, Mapping):
            # A batch of padding alone has the loss 0, and not NaN.
            loss = total / mtf.maximum(mtf.reduce_sum(weights), 1e-6)
        else:
            length = losses.shape.dims[-1]
            loss = divided_sum(total, losses.shape.size // length.size * (length.size - 1))
        if coefficient and routings:
            loss += coefficient * mtf.cast(balance_loss(routings), loss.dtype)
        return {"loss": loss, **figures_of(routings)} if figures and routings else loss

    def _losses(
        self,
        mesh: mtf.Mesh,
        features: Union[mtf.Tensor, Mapping[str, mtf.Tensor]],
        training: bool,
        routings: Optional[list],
    ) -> tuple[mtf.Tensor, mtf.Tensor]:
        """Returns the loss at each position of the id behind it, and the weight of each.

        `routings` is a list that what the routers have done is appended to.
        """
        ids, further = features, {}
        weights: Optional[mtf.Tensor] = None
        if isinstance(features, Mapping):
            ids, weights = features["ids"], features["weights"]
            further = {name: features[name] for name in ("sequence_id", "position")}
        assert isinstance(ids, mtf.Tensor)
        length = ids.shape.dims[-1]
        if length.size < 2:
            raise ValueError(f"loss: rows of one id predict nothing, got {ids.name} {ids.shape}")
        logits, _ = self.model.call_simple(
            ids,
            None,
            compute_loss=False,
            mode="train" if training else "eval",
            # The `precision` of a training says in what activations are, not the model's dtype.
            variable_dtype=mtf.VariableDType(tf.float32),
            routings=routings,
            **further,
        )
        vocab = logits.shape.dims[-1]
        targets = mtf.shift(ids, -1, length, wrap=False)
        losses = layers.softmax_cross_entropy_with_logits(logits, targets, vocab)
        if weights is not None:
            # As the targets: by where the id before each is. First ids of examples weigh nothing.
            return losses, mtf.cast(mtf.shift(weights, -1, length, wrap=False), losses.dtype)
        # The last position has no id behind it.
        has_next = mtf.less(mtf.range(mesh, length, tf.int32), length.size - 1)
        return losses, mtf.cast(has_next, losses.dtype)

    def merge(self, adapters: Union[str, os.PathLike[str]]) -> None:
        """Adds low-rank adapters to the weights, as of the package PEFT or of `finetune`.

        Args:
          adapters: a directory with adapter_config.json and adapter_model.safetensors.

        Raises:
          ValueError: a file is damaged, the adapters are of another kind, or not of this model.
        """
        check_path("merge", adapters, "folder of adapters")
        self.check_weights("merge")
        lora, values = _lora.read(self._form_of_family, adapters)
        self.assign(lora.merged(self.weights, values))

    def exact_match(
        self, examples: Examples, max_new_tokens: int = 64, batch_size: int = 8
    ) -> float:
        """Returns the share of prompts that the model continues, greedily, as an example does.

        Args:
          examples: a JSONL file, or dictionaries, of {"prompt": ..., "completion": ...}; of
            {"messages": [...]} that end with what the assistant says; or of {"ids": [...],
            "weights": [...]} whose weighted ids are at the end.
          max_new_tokens: how many ids are added at most.
          batch_size: how many prompts are continued at once.

        Returns:
          A fraction from 0 to 1, while `mtf.transformer.metrics.exact_match` returns percents, 0 to
          100. Texts are compared without spaces around them.

        Raises:
          ValueError: there are no examples, or one is of no such form.
        """
        check_whole("exact_match", "batch_size", batch_size)
        pairs = questions_of(examples)
        right = 0
        for i in range(0, len(pairs), batch_size):
            batch = pairs[i : i + batch_size]
            answers = self.generate([prompt for prompt, _ in batch], max_new_tokens)
            right += sum(_same(found, answer) for found, (_, answer) in zip(answers, batch))
        return right / len(pairs)

    def examples(self, examples: Examples, length: int, pack: bool = True) -> dict[str, np.ndarray]:
        """Returns texts as rows of ids to train on.

        `rows = model.examples("train.jsonl", 512)`, and then
        `fit(model.loss, rows, dims=dict.fromkeys(rows, "batch:8,length:512"), ...)` trains on them.

        Args:
          examples: the path of a JSONL file, or dictionaries such as its lines are. Of
            {"text": ...} all ids count; of {"prompt": ..., "completion": ...} those of the
            completion; of {"messages": [...]}, with "role" and "content", those of what the
            assistant says; and {"ids": [...]} may have "weights". Texts and completions end with
            the first `eos_token_id`.
          length: the number of ids of a row; longer examples are cut, with a warning.
          pack: whether a row may have several examples, which do not see each other.

        Returns:
          Arrays of [rows, length]: "ids"; "weights" of the loss of each id; "sequence_id", 0 at
          padding and the number of the example elsewhere; "position", from 0 in each example.

        Raises:
          ValueError: there are none, one is of no such form, or longer than the model's table of
            positions, or there is no tokenizer.
        """
        ends = self._ends_of(None).ids
        end, vocab = ends[0] if ends else None, self.model.input_vocab_dim.size
        rows = rows_of(examples, self.tokenizer, end, length, pack, vocab)
        # The lookup of a position that a table lacks would give zeros, and no error.
        self._check_length("examples", int(rows["position"].max()) + 1, "the longest example")
        return rows


def _listed(what: str, prompts: Any) -> list[Prompt]:
    """Returns prompts as a list."""
    if isinstance(prompts, str):
        raise ValueError(f"{what}: prompts is a list; write [text] for one")
    if not isinstance(prompts, Iterable) or isinstance(prompts, (bytes, Mapping)):
        raise ValueError(f"{what}: prompts is a list, such as [text], but is {prompts!r}")
    return list(prompts)


def _same(found: Union[str, Sequence[int]], answer: Union[str, Sequence[int]]) -> bool:
    """Returns whether a continuation is the answer; ids may have an end behind it."""
    if isinstance(found, str) and isinstance(answer, str):
        return found.strip() == answer.strip()
    return list(found[: len(answer)]) == list(answer) and len(found) <= len(answer) + 1


def _is_text(prompt: Prompt) -> bool:
    """Returns whether a prompt is a text or a conversation, rather than ids."""
    return isinstance(prompt, str) or (len(prompt) > 0 and isinstance(prompt[0], Mapping))


# -- how evenly tokens go to experts


def coefficient_of(config: Mapping[str, Any], balance: Optional[float]) -> float:
    """Returns the coefficient of the balance loss.

    Args:
      config: the contents of config.json.
      balance: what the user says; None for that of config.json, if it has `output_router_logits`.

    Raises:
      ValueError: it is no such number.
    """
    if balance is not None:
        if not (is_real(balance) and 0 <= balance < math.inf):
            raise ValueError(
                f"balance={balance!r} must be a number of 0 or more, by which the loss that "
                "balances experts is multiplied"
            )
        return balance
    coefficient = config.get("router_aux_loss_coef")
    return (
        (_BALANCE if coefficient is None else coefficient)
        if config.get("output_router_logits")
        else 0.0
    )


def balance_loss(routings: Sequence[moe.Routing]) -> mtf.Tensor:
    """Returns the balance loss of all layers; it is the number of experts of a token at best.

    Fedus et al., "Switch transformers" (2021), equations 4 to 6, where the tokens of all layers
    count as those of one layer, as they do in transformers.

    Args:
      routings: those of the layers.
    """
    [experts] = routings[0].chosen.shape.dims
    number = mtf.add_n([routing.tokens for routing in routings])
    shares = mtf.add_n([routing.chosen for routing in routings]) / number
    gates = mtf.add_n([routing.gates for routing in routings]) / number
    return mean_over_microbatches(mtf.reduce_sum(shares * gates) * float(experts.size))


def figures_of(routings: Sequence[moe.Routing]) -> dict[str, mtf.Tensor]:
    """Returns scalars to watch, by name.

    Args:
      routings: those of the layers.
    """
    choices = [mtf.reduce_sum(routing.chosen) for routing in routings]
    busiest = [
        mtf.reduce_max(routing.chosen) / number for routing, number in zip(routings, choices)
    ]
    placed, chosen = mtf.add_n([routing.placed for routing in routings]), mtf.add_n(choices)
    return {
        "balance_loss": balance_loss(routings),
        "busiest_expert": mtf.add_n(busiest) / len(busiest),
        # The difference of counts first: 1 minus a quotient can be 6e-8 where none is dropped.
        "dropped": (chosen - placed) / chosen,
    }
