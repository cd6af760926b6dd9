"""How rows of ids are continued: what is asked for, one program of all steps, and who listens."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import itertools
import math
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Optional, Union

import numpy as np
import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow import layers
from mesh_tensorflow._core.errors import check_choice, check_whole, is_real, is_whole
from mesh_tensorflow.models._place import Place
from mesh_tensorflow.models._pretrained import imported
from mesh_tensorflow.models._tokenizer import Tokenizer
from mesh_tensorflow.transformer.transformer import Unitransformer
from mesh_tensorflow.transformer.transformer._decoding import check_numbers

# An id, a text, or several of these; None for those of config.json.
Stop = Union[int, str, Sequence[Union[int, str]], np.ndarray, None]

_SHORTEST = 64  # lengths of programs are this times a power of two
_FEWEST_GIVEN = 16  # and the numbers of given ids, this
_ENDS = 4  # the numbers of ids that end a row are multiples of this
_NO_ID = -1  # which no id equals
_LARGEST_ID = 2**31 - 1  # that programs can compare
_LARGEST = 2**63 - 1  # of seeds
# Programs have room for so many: what is larger is a slip, and would end for lack of memory.
_MOST_BEAMS, _MOST_TOKENS = 10_000, 10_000_000
_END = object()  # comes after the last piece


# -- what is asked for


@dataclasses.dataclass(frozen=True)
class Search:
    """A beam search; the arguments of `LanguageModel.generate`."""

    num_beams: int
    length_penalty: float
    early_stopping: Union[bool, str]
    num_return_sequences: int

    def __post_init__(self) -> None:
        check_whole("generate", "num_beams", self.num_beams, most=_MOST_BEAMS)
        check_whole("generate", "num_return_sequences", self.num_return_sequences)
        penalty = self.length_penalty
        if not is_real(penalty) or not math.isfinite(penalty):
            raise ValueError(
                f"generate: length_penalty={penalty!r} must be a number; larger ones prefer longer "
                "continuations, and 0.0 compares log-probabilities as they are"
            )
        check_choice("generate", "early_stopping", self.early_stopping, (True, False, "never"))


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How ids are chosen, and how many; the arguments of `LanguageModel.generate`."""

    max_new_tokens: int
    temperature: float = 0.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: Optional[int] = None

    def __post_init__(self) -> None:
        check_whole("generate", "max_new_tokens", self.max_new_tokens, most=_MOST_TOKENS)
        if self.top_k != -1:
            check_whole("generate", "top_k", self.top_k, ", or -1 for all ids")
        if self.seed is not None:
            check_whole("generate", "seed", self.seed, least=0, most=_LARGEST)
        names = ("temperature", "top_p", "min_p", "repetition_penalty")
        check_numbers("generate", {name: getattr(self, name) for name in names})

    def numbers(self) -> dict[str, float]:
        """Returns those arguments that are inputs of a program; it has no trace of others."""
        used = {"repetition_penalty": self.repetition_penalty} if self._penalizes else {}
        if self.temperature:
            used["temperature"] = self.temperature
            if self.top_p < 1:
                used["top_p"] = self.top_p
            if self.min_p > 0:
                used["min_p"] = self.min_p
        return used

    @property
    def _penalizes(self) -> bool:
        return self.repetition_penalty != 1


def check_search(search: Search, sampling: Sampling) -> None:
    """Raises a ValueError if arguments do not go together."""
    beams, number = f"num_beams={search.num_beams}", search.num_return_sequences
    if search.num_beams > 1:
        if sampling.temperature:
            raise ValueError(
                f"generate: {beams} searches and temperature={sampling.temperature} draws; set "
                "temperature=0.0 or num_beams=1"
            )
        if number > search.num_beams:
            raise ValueError(
                f"generate: {beams} finds so many continuations, not num_return_sequences={number}"
                "; set num_beams to that, or more"
            )
    elif number > 1 and not sampling.temperature:
        raise ValueError(
            f"generate: num_return_sequences={number} would be equal at temperature=0.0; set a "
            f"temperature, or num_beams={number}"
        )


@dataclasses.dataclass(frozen=True)
class Generated:
    """A continuation, with its log-probabilities.

    Attributes:
      ids: its ids.
      text: its text; None for a prompt of ids.
      log_probs: the log-probability of each id, by the model itself: of temperature 1, with nothing
        left out, and without a penalty.
      score: what a search of beams compares, the sum of log_probs divided by
        length ** length_penalty; None without a search.
    """

    ids: list[int]
    text: Optional[str]
    log_probs: list[float]
    score: Optional[float]


class Ends(NamedTuple):
    """What ends a continuation: any of some ids, or of some texts."""

    ids: list[int]
    texts: list[str]


def ends_of(
    stop: Stop,
    of_folder: Sequence[int],
    tokenizer: Optional[Tokenizer],
    vocab: int,
) -> Ends:
    """Returns what ends continuations.

    Args:
      stop: the argument of `generate`.
      of_folder: what `eos_of` returns, which counts if `stop` has no ids.
      tokenizer: a Tokenizer, or None.
      vocab: the number of ids of the model; those of the folder may be others.

    Raises:
      ValueError: something is neither an id of the model nor a text, or there are texts without a
        tokenizer.
    """
    value: Any = stop.tolist() if isinstance(stop, np.ndarray) else stop
    # A text is a Sequence too, of its letters.
    is_one = isinstance(value, (str, bytes)) or not isinstance(value, Sequence)
    ends = [] if value is None else [value] if is_one else value
    texts = [end for end in ends if isinstance(end, str)]
    ids: list[Any] = [end for end in ends if not isinstance(end, str)]
    for end in ids:
        if not is_whole(end, _NO_ID):
            raise ValueError(
                f"generate: stop={stop!r} has {end!r}, which is neither an id (-1 for none) nor a "
                "text"
            )
        if end >= vocab:
            raise ValueError(
                f"generate: stop={stop!r} has the id {end}, which is not in the vocabulary, 0 to "
                f"{vocab - 1}, so that nothing ends with it; -1 is for no id"
            )
    if "" in texts:
        raise ValueError(f"generate: stop={stop!r} has an empty text, with which all begin")
    if texts and tokenizer is None:
        raise ValueError(
            f"generate: stop={stop!r} has a text, and the model has no tokenizer; stop at ids"
        )
    return Ends([int(end) for end in ids or of_folder], texts)


def eos_of(where: str, config: Mapping[str, Any], generation: Mapping[str, Any]) -> list[int]:
    """Returns the ids that end the texts of a folder.

    Args:
      where: what the error names, such as the path of the folder.
      config: the contents of config.json.
      generation: those of generation_config.json.

    Raises:
      ValueError: `eos_token_id` is neither an id nor a list of such.
    """
    name = "eos_token_id"
    # Models that were tuned to converse tell in the first that they end with the end of a turn,
    # too, while the second often is still that of the model before.
    files = {"generation_config.json": generation, "config.json": config}
    file = next((file for file, fields in files.items() if fields.get(name) is not None), None)
    if file is None:
        return []
    value = files[file][name]
    ids = value if isinstance(value, list) else [value]
    if not all(is_whole(id_, _NO_ID) and id_ <= _LARGEST_ID for id_ in ids):
        raise ValueError(f"{where}: {file} has {name}={value!r}, neither an id nor a list of ids")
    return ids


class Listener:
    """Follows rows on the host while they grow: says which end by a text, and tells one row.

    Several processors may tell it of the same step of a row, and at different times.
    """

    def __init__(
        self, rows: int, texts: Sequence[str], tokenizer: Optional[Tokenizer], tells: str = ""
    ) -> None:
        """Creates it.

        Args:
          rows: how many rows are followed; later ones, which only fill a batch up, end at once.
          texts: what ends a row.
          tokenizer: a Tokenizer; None if there are no texts.
          tells: what `pieces` has of the first row, "ids" or "texts".
        """
        self._texts, self._tokenizer, self._tells = texts, tokenizer, tells
        self._told = ""
        self._pieces: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._closed = False
        self._ids: list[list[int]] = [[] for _ in range(rows)]
        self._ended: list[list[bool]] = [[] for _ in range(rows)]  # by row and step
        self._lock = threading.Lock()

    def hear(self, rows: np.ndarray, ids: np.ndarray, step: int) -> np.ndarray:
        """Returns which rows end with this step."""
        with self._lock:
            return np.array([self._of_row(row, id_, step) for row, id_ in zip(rows, ids)], bool)

    def hear_beams(self, beams: np.ndarray, step: int) -> np.ndarray:
        """Returns which of several continuations of rows end with this step.

        Args:
          beams: ids, [rows, continuations, length].
          step: the number of the step.
        """
        ended = [[self._ends(ids[: step + 1]) for ids in of] for of in beams.tolist()]
        return np.array(ended, bool)

    def cut(self, ids: list[int]) -> list[int]:
        """Returns a continuation up to the id with which it ends."""
        lengths = (n for n in range(1, len(ids)) if self._ends(ids[:n]))
        return ids[: next(lengths, len(ids))]

    def _of_row(self, row: int, id_: int, step: int) -> bool:
        if row >= len(self._ids):
            return True
        ids, ended = self._ids[row], self._ended[row]
        if len(ids) == step:
            ids.append(int(id_))
            ended.append(self._ends(ids))
            self._tell(ids)
        return ended[step] or self._closed

    def _ends(self, ids: list[int]) -> bool:
        if not self._texts or self._tokenizer is None:
            return False
        # With control tokens, as texts may be their names.
        text = self._tokenizer.tokenizer.decode(ids, skip_special_tokens=False)
        return any(end in text for end in self._texts)

    def _tell(self, ids: list[int], last: bool = False) -> None:
        """Puts what is new of the first row among the pieces."""
        if self._tells == "ids" and not last:
            self._pieces.put(ids[-1])
        if self._tells == "texts" and self._tokenizer is not None:
            text = self._tokenizer.decode(ids)
            # A letter may be of several ids; until the last one this sign is in its place.
            if len(text) > len(self._told) and (last or not text.endswith("\ufffd")):
                self._pieces.put(text[len(self._told) :])
                self._told = text

    def pieces(self, grow: Callable[[], Any]) -> Iterator[Any]:
        """Yields ids, or pieces of text, of the first row as they come.

        Args:
          grow: a function that returns when all rows have ended, called in a thread of its own.
        """

        def run() -> None:
            try:
                grow()
                self._tell(self._ids[0], last=True)
                self._pieces.put(_END)
            except BaseException as error:  # whoever reads the pieces is told
                self._pieces.put(error)

        # With the contexts of the reader, such as those of mtf.debug.
        thread = threading.Thread(target=contextvars.copy_context().run, args=(run,))
        thread.start()
        try:
            while (piece := self._pieces.get()) is not _END:
                if isinstance(piece, BaseException):
                    raise piece
                yield piece
        finally:
            # Every row ends with the next step that the program tells.
            self._closed = True
            thread.join()

    def length(self, row: int) -> Optional[int]:
        """Returns the number of ids of a row up to the text that ends it; None if none does."""
        ended = self._ended[row]
        return ended.index(True) + 1 if True in ended else None


# -- programs


class _Inputs(NamedTuple):
    """What a program that continues rows is given; the numbers of Python are sizes in it.

    Attributes:
      ids: [batch, length], the ids of prompts after the first, followed by room.
      first: [batch], the first id of each prompt.
      given: [batch], how many of `ids` are given.
      ends: [ends], the ids that end a continuation.
      max_new_tokens: a scalar.
      max_given: the most that `given` may be.
      listener: the number of a Listener, or None.
    """

    ids: tf.Tensor
    first: tf.Tensor
    given: tf.Tensor
    ends: tf.Tensor
    max_new_tokens: tf.Tensor
    max_given: int
    listener: Optional[tf.Tensor]

    def prompts(self, mesh: mtf.Mesh) -> dict[str, Any]:
        """Returns what is given in each row, as arguments of the model's decoding."""
        return {
            "bos_id": imported(mesh, self.first, "batch"),
            "num_given": imported(mesh, self.given, "batch"),
            "max_given": self.max_given,
        }


class Generator:
    """Continues rows of ids by a model on its mesh.

    A program is traced for each number of rows, for lengths of prompts and of rows (up to a power
    of two), and for each set of arguments that are in use; their values are its inputs.
    """

    def __init__(
        self,
        model: Unitransformer,
        place: Place,
        dtype: str,
        compiled: Callable[[Callable[..., Any]], Callable[..., Any]],
    ) -> None:
        self._model = model
        self._place = place
        # Calls train nothing, so that no variable needs a master of more digits.
        self._variable_dtype = mtf.VariableDType(*[tf.as_dtype(dtype)] * 3)
        self._logits = compiled(self._lowered_logits)
        self._sampled = compiled(self._lowered_samples)
        self._searched = compiled(self._lowered_search)
        self._scored = compiled(self._lowered_log_probs)
        # Traced programs know their listener by a number, which is an input.
        self._listeners: dict[int, Listener] = {}
        self._numbers = itertools.count()

    def logits(self, rows: np.ndarray) -> tf.Tensor:
        """Returns the logits of the next id at each position.

        Args:
          rows: ids, [batch, length].
        """
        # The rows that only fill the batch up are left out again.
        return self._logits(tf.constant(self._place.filled_up(rows)))[: len(rows)]

    def _lowered_logits(self, ids: tf.Tensor) -> tf.Tensor:
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        logits = self._logits_of(imported(mesh, ids, "batch", "length"))
        return self._place.lower(mesh, ids.shape[0]).export_to_tf_tensor(logits)

    def _logits_of(self, ids: mtf.Tensor) -> mtf.Tensor:
        logits, _ = self._model.call_simple(
            ids, None, compute_loss=False, mode="infer", variable_dtype=self._variable_dtype
        )
        return logits

    def sample(
        self,
        rows: Sequence[Sequence[int]],
        sampling: Sampling,
        ends: Sequence[int],
        listener: Optional[Listener] = None,
    ) -> list[list[int]]:
        """Returns the continuation of each row.

        Args:
          rows: ids.
          sampling: a Sampling.
          ends: the ids that end a continuation.
          listener: a Listener, or None.
        """
        seed = sampling.seed
        if seed is None:
            # By TensorFlow's generator, so that tf.random.set_seed makes calls repeatable.
            seed = tf.random.uniform([], maxval=2**60, dtype=tf.int64)
        with self._inputs(rows, sampling.max_new_tokens, ends, listener) as inputs:
            sampled = self._sampled(
                inputs,
                {n: tf.constant(x, tf.float32) for n, x in sampling.numbers().items()},
                # A size in the program, which without a temperature makes no difference.
                int(sampling.top_k) if sampling.temperature else -1,
                tf.cast(seed, tf.int64),
            ).numpy()
        continuations = []
        for i, row in enumerate(rows):
            start = len(row) - 1  # all but the first id are among those that come back
            new = _up_to(ends, sampled[i, start : start + sampling.max_new_tokens].tolist())
            continuations.append(new if listener is None else new[: listener.length(i)])
        return continuations

    @contextlib.contextmanager
    def _inputs(
        self,
        rows: Sequence[Sequence[int]],
        max_new_tokens: int,
        ends: Sequence[int],
        listener: Optional[Listener],
    ) -> Iterator[_Inputs]:
        """Context with the inputs of a program, which knows a listener by a number within."""
        ids, first, lengths = map(tf.constant, self._prompts(rows, max_new_tokens))
        number = next(self._numbers)
        if listener is not None:
            self._listeners[number] = listener
        try:
            yield _Inputs(
                ids,
                first,
                lengths,
                tf.constant(_padded(ends)),
                tf.constant(max_new_tokens, tf.int32),  # also of a number of NumPy
                _at_least(max(map(len, rows)) - 1, _FEWEST_GIVEN),  # rounded up as programs are
                None if listener is None else tf.constant(number, tf.int64),
            )
        finally:
            self._listeners.pop(number, None)

    @property
    def most_positions(self) -> Optional[int]:
        """How many positions a row may have: those of the model's table, or None without one."""
        table = self._model.max_length_dim if self._model.positional_embedding else None
        return None if table is None else table.size - self._model.position_offset

    def _prompts(
        self, rows: Sequence[Sequence[int]], max_new_tokens: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns the ids given in each row, the id fed before them, and their number."""
        lengths = np.array([len(row) - 1 for row in rows], np.int32)
        # One program serves many lengths, as tracing takes longer than what they have too much.
        length = _at_least(max(lengths) + max_new_tokens, _SHORTEST)
        if self.most_positions is not None:
            length = min(length, self.most_positions)
        ids = np.zeros([len(rows), length], np.int32)
        # Of a prompt the first id is what the first position is fed, and the others are given.
        for row, prompt in zip(ids, rows):
            row[: len(prompt) - 1] = prompt[1:]
        first = np.array([row[0] for row in rows], np.int32)
        ids, first, lengths = (self._place.filled_up(a) for a in (ids, first, lengths))
        lengths[len(rows) :] = length  # full, so that no one waits for what is left out again
        return ids, first, lengths

    def _lowered_samples(
        self, inputs: _Inputs, values: Mapping[str, tf.Tensor], top_k: int, seed: tf.Tensor
    ) -> tf.Tensor:
        mesh = mtf.Mesh(mtf.Graph(), "mesh")

        def each_step(rows: tf.Tensor, ids: tf.Tensor, step: tf.Tensor) -> tf.Tensor:
            return self._heard("hear", inputs.listener, rows.shape, rows, ids, step)

        sampled = self._model.sample_autoregressive(
            imported(mesh, inputs.ids, "batch", "length"),
            stop_at_token=imported(mesh, inputs.ends, "ends"),
            max_steps=imported(mesh, inputs.max_new_tokens),
            variable_dtype=self._variable_dtype,
            sampling_keep_top_k=top_k,
            seed=seed,
            each_step=None if inputs.listener is None else each_step,
            **inputs.prompts(mesh),
            **{name: imported(mesh, value) for name, value in values.items()},
        )
        lowering = self._place.lower(mesh, inputs.ids.shape[0])
        return lowering.export_to_tf_tensor(sampled)

    def search(
        self,
        rows: Sequence[Sequence[int]],
        search: Search,
        sampling: Sampling,
        ends: Sequence[int],
        listener: Optional[Listener] = None,
    ) -> list[list[tuple[list[int], float]]]:
        """Returns the continuations found for each row, best first, with their scores.

        Args:
          rows: ids.
          search: a Search.
          sampling: a Sampling, which draws nothing.
          ends: the ids that end a continuation.
          listener: a Listener, or None.
        """
        max_new_tokens, penalty = sampling.max_new_tokens, sampling.repetition_penalty
        # The room for new ids is a size of the program, how many are used is an input.
        new = _at_least(max_new_tokens, _SHORTEST)
        with self._inputs(rows, max_new_tokens, ends, listener) as inputs:
            beams, scores = self._searched(
                inputs,
                # A program without a penalty does not count ids.
                None if penalty == 1 else tf.constant(penalty, tf.float32),
                (search.num_beams, new, float(search.length_penalty), search.early_stopping),
            )
        n = search.num_return_sequences
        found = beams.numpy()[: len(rows), :n, :max_new_tokens].tolist()
        cut = list if listener is None else listener.cut
        return [
            [(cut(_up_to(ends, beam)), score) for beam, score in zip(*both)]
            for both in zip(found, scores.numpy().tolist())
        ]

    def _lowered_search(
        self,
        inputs: _Inputs,
        penalty: Optional[tf.Tensor],
        settings: tuple[int, int, float, Union[bool, str]],
    ) -> tuple[tf.Tensor, tf.Tensor]:
        def ends_fn(step: mtf.Tensor, ids: mtf.Tensor) -> mtf.Tensor:
            return mtf.slicewise(
                each_step, [ids, step], mtf.Shape(ids.shape.dims[:-1]), tf.bool,
                splittable_dims=ids.shape.dims[:1], name="each_step",
            )  # fmt: skip

        def each_step(ids: tf.Tensor, step: tf.Tensor) -> tf.Tensor:
            return self._heard("hear_beams", inputs.listener, ids.shape[:-1], ids, step)

        beams, new, length_penalty, early_stopping = settings
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        partial = imported(mesh, inputs.ids, "batch", "length")
        new_shape = mtf.Shape([partial.shape.dims[0], ("beam", beams), ("new_length", new)])
        best = self._model.beam_search(
            mtf.zeros(mesh, new_shape, tf.int32),
            imported(mesh, inputs.max_new_tokens),
            variable_dtype=self._variable_dtype,
            partial_sequences=partial,
            all_beams=True,
            eos_id=imported(mesh, inputs.ends, "ends"),
            length_penalty=length_penalty,
            early_stopping=early_stopping,
            ends_fn=None if inputs.listener is None else ends_fn,
            repetition_penalty=1.0 if penalty is None else imported(mesh, penalty),
            **inputs.prompts(mesh),
        )
        lowering = self._place.lower(mesh, inputs.ids.shape[0])
        both, scores = (lowering.export_to_tf_tensor(x) for x in best)
        return both, scores

    def log_probs(self, rows: Sequence[Sequence[int]]) -> list[list[float]]:
        """Returns the log-probabilities of the ids of each row but its first.

        Args:
          rows: ids.
        """
        ids, first, lengths = self._prompts(rows, 0)
        # Each position is fed the id before it.
        fed = np.concatenate([first[:, None], ids[:, :-1]], 1)
        log_probs = self._scored(tf.constant(fed), tf.constant(ids)).numpy()
        return [row[:n].tolist() for row, n in zip(log_probs[: len(rows)], lengths)]

    def _lowered_log_probs(self, fed: tf.Tensor, targets: tf.Tensor) -> tf.Tensor:
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        logits = self._logits_of(imported(mesh, fed, "batch", "length"))
        losses = layers.softmax_cross_entropy_with_logits(
            # A softmax over a large vocabulary adds more numbers than bfloat16 can.
            mtf.to_float(logits),
            imported(mesh, targets, "batch", "length"),
            logits.shape.dims[-1],
        )
        lowering = self._place.lower(mesh, fed.shape[0])
        return lowering.export_to_tf_tensor(mtf.negative(losses))

    def _heard(
        self,
        method: str,
        number: Optional[tf.Tensor],
        shape: tf.TensorShape,
        *told: tf.Tensor,
    ) -> tf.Tensor:
        """Returns what a method of a Listener says of each step while the program runs: who ends.

        Args:
          method: the name of a method of the class.
          number: the number of the Listener, an input of the program.
          shape: the shape of what it says.
          *told: its arguments.
        """

        # The program has neither the Listener nor its texts, so that one trace serves all calls.
        def ask(number: int, *arguments: Any) -> np.ndarray:
            return getattr(self._listeners[int(number)], method)(*arguments)

        return tf.ensure_shape(tf.numpy_function(ask, [number, *told], tf.bool), shape)


def _at_least(number: int, first: int) -> int:
    """Returns the least of first, 2 * first, 4 * first, ... that is no less than a number."""
    while first < number:
        first *= 2
    return first


def _padded(ends: Sequence[int]) -> np.ndarray:
    """Returns ids with such after them that no id equals, up to a multiple of their number."""
    missing = -len(ends) % _ENDS if ends else _ENDS
    return np.array([*ends, *[_NO_ID] * missing], np.int32)


def _up_to(ends: Sequence[int], ids: list[int]) -> list[int]:
    """Returns the ids up to the first that is an end, with that."""
    at = next((i for i, id_ in enumerate(ids) if id_ in ends), len(ids))
    return ids[: at + 1]
