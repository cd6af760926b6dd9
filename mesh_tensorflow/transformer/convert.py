"""Converts T5's weights between checkpoints of this package and files for Hugging Face's T5.

    python -m mesh_tensorflow.transformer.convert to-huggingface MODEL_DIR OUTPUT_DIR
    python -m mesh_tensorflow.transformer.convert from-huggingface INPUT_DIR MODEL_DIR
    python -m mesh_tensorflow.transformer.convert with-draft MODEL_DIR DRAFT_DIR BOTH_DIR

One side is a TensorFlow checkpoint with the variables of a Bitransformer of T5 layers; the other is
a directory with `model.safetensors` and `config.json`, which T5ForConditionalGeneration reads and
writes. Weights keep their values and dtypes, so a round trip is exact. Optimizer slots are dropped.
T5: https://arxiv.org/abs/1910.10683. `with-draft` joins checkpoints of a model and of its draft,
for speculative decoding.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Optional

import numpy as np
import tensorflow.compat.v1 as tf

from mesh_tensorflow._core.errors import check_choice
from mesh_tensorflow._huggingface import Folder
from mesh_tensorflow._huggingface import write_folder as write_huggingface
from mesh_tensorflow._mesh.variables import checkpoint_files
from mesh_tensorflow._paths import written_whole
from mesh_tensorflow._programs import parser_of, run_with_parser
from mesh_tensorflow.checkpoint import load_global_step
from mesh_tensorflow.optimize._base import weights_of

__all__ = [
    "from_huggingface",
    "huggingface_to_mesh",
    "main",
    "mesh_to_huggingface",
    "read_checkpoint",
    "read_huggingface",
    "to_huggingface",
    "with_draft",
    "write_checkpoint",
    "write_huggingface",
]

# -- files


Arrays = Mapping[str, np.ndarray]


def read_checkpoint(path: str) -> dict[str, np.ndarray]:
    """Reads the variables of a TensorFlow checkpoint, without optimizer slots.

    Args:
      path: a string, a checkpoint ("dir/model.ckpt-1000"), or a directory, for its latest
        checkpoint.

    Raises:
      ValueError: there is no checkpoint, or it is damaged.
    """
    with _checkpoint_at(path) as checkpoint:
        reader = checkpoint_files.open_reader(checkpoint)
        names = sorted(weights_of(reader.get_variable_to_shape_map()))
        return {name: reader.get_tensor(name) for name in names}


@contextlib.contextmanager
def _checkpoint_at(path: str) -> Iterator[str]:
    """Context that yields the checkpoint of a path; errors of reading say that it is damaged."""
    checkpoint = checkpoint_files.find(path, "convert")
    try:
        yield checkpoint
    except (tf.errors.OpError, IndexError, RuntimeError, ValueError) as error:
        raise ValueError(f"the checkpoint {checkpoint} is damaged: {error}") from error


def _check_weights(arrays: Arrays, file: str) -> None:
    """Checks that weights are finite floating-point numbers.

    Args:
      arrays: a dictionary of NumPy arrays.
      file: the file that they are of, for the message.

    Raises:
      ValueError: one is of another dtype, or has a value that is NaN or infinite.
    """
    for name, array in arrays.items():
        array = np.asarray(array)
        if not tf.as_dtype(array.dtype).is_floating:
            value = f", such as {array.flat[0]}" if array.size else ""
            raise ValueError(
                f"{file}: {name} is of dtype {array.dtype}{value}; weights of T5 are "
                "floating-point numbers"
            )
        finite = np.isfinite(array)
        if not finite.all():
            wrong = np.argwhere(~finite)
            place = tuple(int(i) for i in wrong[0])
            raise ValueError(
                f"{file}: {name} has the value {array[place]} at {list(place)}, and {len(wrong)} "
                f"of its {array.size} values are NaN or infinite; a model with them computes NaN. "
                "Take an earlier checkpoint"
            )


def write_checkpoint(variables: Arrays, directory: str, step: int = 0) -> str:
    """Writes a TensorFlow checkpoint with variables and a global step.

    It is written to a temporary directory first, so that the directory never holds a partial
    checkpoint.

    Args:
      variables: a dictionary of NumPy arrays.
      directory: a string; created if it does not exist.
      step: an integer, the global step.

    Returns:
      The path of the checkpoint, "<directory>/model.ckpt-<step>".

    Raises:
      ValueError: the checkpoint already exists.
    """
    prefix = os.path.join(directory, f"model.ckpt-{step}")
    if tf.io.gfile.exists(f"{prefix}.index"):
        raise ValueError(f"{prefix} exists already; choose another directory or step")
    arrays = {**variables, "global_step": np.int64(step)}
    shards = [checkpoint_files.Shard(name, "", np.asarray(a)) for name, a in arrays.items()]
    name = os.path.basename(prefix)
    # Readers find a checkpoint by its index, which comes last.
    with written_whole(directory, last=f"{name}.index") as folder:
        checkpoint_files.write_parts(os.path.join(folder, name), shards)
    # Those of a training stay in the list, or it would not go on to remove the oldest of them.
    checkpoint_files.record(prefix, keep=sys.maxsize)
    return prefix


def read_huggingface(path: str) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Reads the tensors and the configuration of a Hugging Face model.

    Args:
      path: a string, a directory with `model.safetensors` or, if the model is in several files,
        `model.safetensors.index.json`, whose `weight_map` says which file a tensor is read from; or
        the path of a file.

    Returns:
      A dictionary of NumPy arrays, and the contents of config.json, empty if there is none.

    Raises:
      ImportError: safetensors is not installed.
      ValueError: there are no such files, or one is damaged.
    """
    folder = Folder(path)
    return {name: folder[name] for name in folder}, folder.config


# -- names and arrangements


# A bias that old files contain but no model uses.
_UNUSED = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
# The names of the normalization before a layer and at the end of a stack.
_NORM_NAMES = {
    "layer_norm": ("layer_norm", "final_layer_norm"),
    "rms_norm": ("rms_norm", "rms_norm"),
}


class _Entry(NamedTuple):
    """A weight: both names, its dimensions here, and whether Hugging Face's is transposed."""

    mesh: str
    huggingface: str
    dims: tuple[str, ...]
    transposed: bool


class _Form(NamedTuple):
    """The configuration fields that determine the weights."""

    encoder_layers: int
    decoder_layers: int
    gated: bool
    tied: bool


def _layer_entries(
    stack: str, block: int, layer: int, kind: str, gated: bool, norm: str
) -> Iterable[_Entry]:
    ours = f"{stack}/block_{block:03d}/layer_{layer:03d}"
    theirs = f"{stack}.block.{block}.layer.{layer}"
    yield _Entry(f"{ours}/{norm}/scale", f"{theirs}.layer_norm.weight", ("d_model",), False)
    ours, theirs = f"{ours}/{kind}", f"{theirs}.{kind}"
    if kind == "DenseReluDense":
        # PyTorch computes x W^T, and so stores [out, in]; kernels here are [in, out].
        for name in ("wi_0", "wi_1") if gated else ("wi",):
            yield _Entry(
                f"{ours}/{name}/kernel", f"{theirs}.{name}.weight", ("d_model", "d_ff"), True
            )
        yield _Entry(f"{ours}/wo/kernel", f"{theirs}.wo.weight", ("d_ff", "d_model"), True)
        return
    for name in "qkv":
        yield _Entry(f"{ours}/{name}", f"{theirs}.{name}.weight", ("d_model", "heads * d_kv"), True)
    yield _Entry(f"{ours}/o", f"{theirs}.o.weight", ("heads * d_kv", "d_model"), True)
    # All blocks of a stack share the bias of the first one.
    if kind == "SelfAttention" and block == 0:
        name = "relative_attention_bias"
        yield _Entry(f"{ours}/{name}", f"{theirs}.{name}.weight", ("heads", "buckets"), True)


def _entries(form: _Form, norm: str) -> list[_Entry]:
    """Returns all weights of a T5 model."""
    norm, final_norm = _NORM_NAMES[norm]
    entries = [_Entry("shared/embedding", "shared.weight", ("vocab", "d_model"), False)]
    stacks = {
        "encoder": (form.encoder_layers, ["SelfAttention", "DenseReluDense"]),
        "decoder": (form.decoder_layers, ["SelfAttention", "EncDecAttention", "DenseReluDense"]),
    }
    for stack, (blocks, kinds) in stacks.items():
        for block in range(blocks):
            for layer, kind in enumerate(kinds):
                entries += _layer_entries(stack, block, layer, kind, form.gated, norm)
        entries.append(
            _Entry(
                f"{stack}/{final_norm}/scale",
                f"{stack}.final_layer_norm.weight",
                ("d_model",),
                False,
            )
        )
    if not form.tied:
        entries.append(
            _Entry("decoder/logits/kernel", "lm_head.weight", ("d_model", "vocab"), True)
        )
    return entries


def _layers(names: Iterable[str], pattern: str) -> int:
    numbers = [int(m.group(1)) for m in (re.match(pattern, name) for name in names) if m]
    # By the largest number, not by how many there are: a gap is told as missing weights.
    return max(numbers, default=-1) + 1


def _form(names: Arrays, block: str, gate: str, head: str) -> _Form:
    """Returns the form that the names of weights tell.

    Args:
      names: the names.
      block: how a name in a block of a stack goes on after the stack, with its number as a group.
      gate: what is in the names of feed-forward layers with two kernels.
      head: the softmax's own weight, which a softmax that is tied to the embedding lacks.
    """
    return _Form(
        _layers(names, f"encoder{block}"),
        _layers(names, f"decoder{block}"),
        any(gate in name for name in names),
        head not in names,
    )


def _check(
    source: str, form: _Form, arrays: Arrays, expected: Mapping[str, tuple[str, ...]]
) -> dict[str, int]:
    """Returns the sizes of a model's dimensions.

    Raises:
      ValueError: weights are missing, do not belong to T5, or have inconsistent shapes.
    """
    missing = sorted(set(expected) - set(arrays))
    extra = sorted(set(arrays) - set(expected))
    problems = []
    if not form.encoder_layers or not form.decoder_layers:
        problems.append(
            f"it has {form.encoder_layers} blocks in its encoder and {form.decoder_layers} in its "
            "decoder"
        )
    if missing:
        problems.append(f"missing: {', '.join(missing)}")
    if extra:
        problems.append(f"without a place in T5: {', '.join(extra)}")
    sizes: dict[str, int] = {}
    for name, dims in expected.items():
        shape = arrays[name].shape if name in arrays else None
        if shape is None:
            continue
        fits = len(shape) == len(dims)
        # The first weight with a dimension sets its size, and all others have to agree.
        fits = fits and all(sizes.setdefault(d, n) == n for d, n in zip(dims, shape))
        if not fits:
            text = ", ".join(f"{d}={sizes[d]}" if d in sizes else d for d in dims)
            problems.append(f"{name} has shape {list(shape)} instead of [{text}]")
    if problems:
        raise ValueError(f"{source} is no T5 model: " + "; ".join(problems))
    if sizes["heads * d_kv"] % sizes["heads"]:
        raise ValueError(
            f"{source}: the size of the heads together, {sizes['heads * d_kv']}, is no multiple of "
            f"their number, {sizes['heads']}"
        )
    return sizes


def _config(form: _Form, sizes: Mapping[str, int], feed_forward: Optional[str]) -> dict[str, Any]:
    """Returns the model configuration in config.json."""
    return {
        "architectures": ["T5ForConditionalGeneration"],
        "model_type": "t5",
        "is_encoder_decoder": True,
        "vocab_size": sizes["vocab"],
        "d_model": sizes["d_model"],
        "d_kv": sizes["heads * d_kv"] // sizes["heads"],
        "d_ff": sizes["d_ff"],
        "num_heads": sizes["heads"],
        "num_layers": form.encoder_layers,
        "num_decoder_layers": form.decoder_layers,
        "relative_attention_num_buckets": sizes["buckets"],
        # No weight tells it: it is that of the layers here.
        "relative_attention_max_distance": 128,
        "feed_forward_proj": feed_forward or ("gated-gelu" if form.gated else "relu"),
        "layer_norm_epsilon": 1e-6,
        "tie_word_embeddings": form.tied,
        # What tie_word_embeddings implies for T5; transformers 5 has this field, earlier releases
        # lack it.
        "scale_decoder_outputs": form.tied,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "decoder_start_token_id": 0,
    }


def _with_vocab(tensors: Arrays, rows: int) -> dict[str, np.ndarray]:
    """Truncates the tensors of the vocabulary to `rows`, or pads them with the row of padding."""
    changed = dict(tensors)
    for name in {"shared.weight", "lm_head.weight"} & set(tensors):
        table = tensors[name]
        # Zeros would have the logit 0, which in many models is larger than that of any id. The id
        # of padding is one that training makes unlikely.
        added = np.repeat(table[:1], max(0, rows - len(table)), axis=0)
        changed[name] = np.concatenate([table[:rows], added])
    return changed


def mesh_to_huggingface(
    variables: Arrays, feed_forward: Optional[str] = None, vocab_size: Optional[int] = None
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Converts the weights of a T5 model to Hugging Face's names and shapes.

    Args:
      variables: a dictionary of NumPy arrays by the names of this package. Normalization may be
        called `layer_norm` (as in T5's public checkpoints) or `rms_norm`. Optimizer slots and the
        global step are dropped.
      feed_forward: a string, Hugging Face's name of the activation; by default "relu", or
        "gated-gelu" if there are two kernels, as in T5 1.1. Variable names do not tell the
        activation.
      vocab_size: an integer, the number of rows that the embedding is truncated or padded to; by
        default, all of its rows, including those that only pad the vocabulary.

    Returns:
      A dictionary of NumPy arrays, and the configuration, a dictionary.

    Raises:
      ValueError: weights are missing, do not belong to T5, or have inconsistent shapes; the message
        names all of them.
    """
    weights = {n: variables[n] for n in weights_of({n: np.shape(v) for n, v in variables.items()})}
    norm = "rms_norm" if "encoder/rms_norm/scale" in weights else "layer_norm"
    form = _form(weights, r"/block_(\d+)/", "/wi_0/", "decoder/logits/kernel")
    entries = _entries(form, norm)
    sizes = _check("the checkpoint", form, weights, {e.mesh: e.dims for e in entries})
    tensors = {e.huggingface: _turned(weights[e.mesh], e.transposed) for e in entries}
    sizes["vocab"] = vocab_size or sizes["vocab"]
    return _with_vocab(tensors, sizes["vocab"]), _config(form, sizes, feed_forward)


def huggingface_to_mesh(
    tensors: Arrays,
    tied: Optional[bool] = None,
    norm_name: str = "layer_norm",
    vocab_size: Optional[int] = None,
) -> dict[str, np.ndarray]:
    """Converts the weights of a T5 model to the names and shapes of this package.

    Args:
      tensors: a dictionary of NumPy arrays by Hugging Face's names. Copies of the embedding for
        encoder and decoder are ignored.
      tied: a boolean, whether the softmax uses the embedding, on outputs scaled by
        d_model ** -0.5, as in T5 1.0. If not, the softmax has its own weights, as in T5 1.1:
        `lm_head.weight`, or a copy of the embedding. By default, whether there is no
        `lm_head.weight` or it equals the embedding.
      norm_name: a string, "layer_norm" for the names in T5's public checkpoints, "rms_norm" for
        those of models configured by defaults.gin.
      vocab_size: an integer, the number of rows that the embedding is truncated or padded to; by
        default, the next multiple of 128, as in models of this package.

    Returns:
      A dictionary of NumPy arrays.

    Raises:
      ValueError: weights are missing, do not belong to T5, or have inconsistent shapes; the message
        names all of them.
    """
    check_choice("huggingface_to_mesh", "norm_name", norm_name, _NORM_NAMES)
    weights = dict(tensors)
    weights.pop(_UNUSED, None)
    embedding = weights.get("shared.weight")
    for name in ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight"):
        if embedding is None and name in weights:
            embedding = weights["shared.weight"] = weights[name]
        copy = weights.get(name)
        # A copy that differs remains, and is reported as a weight that T5 does not have.
        if copy is not None and embedding is not None and np.array_equal(copy, embedding):
            del weights[name]
    head = weights.get("lm_head.weight")
    same = head is None or (embedding is not None and np.array_equal(head, embedding))
    tied = same if tied is None else tied
    if tied and not same:
        raise ValueError(
            "the configuration ties the softmax to the embedding (tie_word_embeddings, "
            "scale_decoder_outputs), but lm_head.weight differs from shared.weight; say which it "
            "is by `tied`"
        )
    if tied:
        weights.pop("lm_head.weight", None)
    elif head is None and embedding is not None:
        # A file holds weights that are shared only once.
        weights["lm_head.weight"] = embedding
    form = _form(weights, r"\.block\.(\d+)\.", ".wi_0.", "lm_head.weight")._replace(tied=tied)
    entries = _entries(form, norm_name)
    dims = {e.huggingface: e.dims[:: -1 if e.transposed else 1] for e in entries}
    sizes = _check("the Hugging Face model", form, weights, dims)
    # A Unitransformer rounds its vocabulary up to a multiple of 128 by default.
    weights = _with_vocab(weights, vocab_size or -(-sizes["vocab"] // 128) * 128)
    return {e.mesh: _turned(weights[e.huggingface], e.transposed) for e in entries}


def _turned(array: np.ndarray, transposed: bool) -> np.ndarray:
    return np.ascontiguousarray(array.T if transposed else array)


_DTYPES = {"float32": tf.float32, "float16": tf.float16, "bfloat16": tf.bfloat16}


def _cast(arrays: Arrays, dtype: Optional[str]) -> Arrays:
    if dtype is None:
        return arrays
    with np.errstate(over="ignore"):  # is told below
        cast = {name: a.astype(_DTYPES[dtype].as_numpy_dtype) for name, a in arrays.items()}
    _check_weights(cast, f"as {dtype}")
    return cast


def to_huggingface(
    checkpoint: str,
    directory: str,
    feed_forward: Optional[str] = None,
    vocab_size: Optional[int] = None,
    dtype: Optional[str] = None,
) -> None:
    """Converts a checkpoint of this package to a directory for T5ForConditionalGeneration.

    Args:
      checkpoint: a string, a checkpoint, or a directory, for its latest checkpoint.
      directory: a string, the directory to write to.
      feed_forward: a string or `None`; see `mesh_to_huggingface`.
      vocab_size: an integer or `None`; see `mesh_to_huggingface`.
      dtype: a string, "float32", "float16" or "bfloat16"; by default each weight keeps its own.

    Raises:
      ImportError: safetensors is not installed.
      ValueError: this is not a T5 model, a weight is of integers or not finite, or the directory
        already holds a model.
    """
    variables = read_checkpoint(checkpoint)
    _check_weights(variables, checkpoint)
    tensors, config = mesh_to_huggingface(variables, feed_forward, vocab_size)
    write_huggingface(_cast(tensors, dtype), config, directory)


def from_huggingface(
    path: str,
    directory: str,
    step: int = 0,
    tied: Optional[bool] = None,
    norm_name: str = "layer_norm",
    vocab_size: Optional[int] = None,
    dtype: Optional[str] = None,
) -> str:
    """Converts a directory of T5ForConditionalGeneration to a checkpoint of this package.

    Args:
      path: a string, the directory or a safetensors file.
      directory: a string, the model directory to write to.
      step: an integer, the global step.
      tied: a boolean; see `huggingface_to_mesh`. By default, the value in config.json.
      norm_name: a string; see `huggingface_to_mesh`.
      vocab_size: an integer or `None`; see `huggingface_to_mesh`.
      dtype: a string, "float32", "float16" or "bfloat16"; by default each weight keeps its own.

    Returns:
      The path of the checkpoint.

    Raises:
      ImportError: safetensors is not installed.
      ValueError: a file is damaged, this is not a T5 model, a weight is of integers or not finite,
        or the checkpoint already exists.
    """
    folder = Folder(path)
    tensors, config = {name: folder[name] for name in folder}, folder.config
    # By file, so that the error names the one to get anew.
    for name, array in tensors.items():
        _check_weights({name: array}, folder.file_of(name))
    if tied is None:
        # The newer field comes first; configurations of earlier releases have the other one alone.
        tied = config.get("scale_decoder_outputs", config.get("tie_word_embeddings"))
        if tied not in (None, True, False):
            raise ValueError(
                f"{path}: config.json has {tied!r} for scale_decoder_outputs or "
                "tie_word_embeddings; say by `tied` whether the softmax uses the embedding"
            )
    variables = huggingface_to_mesh(tensors, tied, norm_name, vocab_size)
    return write_checkpoint(_cast(variables, dtype), directory, step)


def with_draft(checkpoint: str, draft: str, directory: str) -> str:
    """Writes a checkpoint of a model together with its draft, for decoding.

    The draft's variables are in the scope "draft", where `draft_model` of
    `Unitransformer.sample_autoregressive` and `Bitransformer.decode` has them.

    Args:
      checkpoint: a string, a checkpoint, or a directory, for its latest checkpoint.
      draft: the same, of the draft, which is trained like any model.
      directory: a string, the model directory to write to.

    Returns:
      The path of the checkpoint, which has the model's step.

    Raises:
      ValueError: there is no such checkpoint, the first one has a draft already, or the result
        already exists.
    """
    variables = read_checkpoint(checkpoint)
    if any(name.startswith("draft/") for name in variables):
        raise ValueError(
            f"{checkpoint} already holds a draft; give the checkpoint of the model alone"
        )
    # The scope in which decoding makes the variables of a draft.
    small = {f"draft/{name}": value for name, value in read_checkpoint(draft).items()}
    with _checkpoint_at(checkpoint) as whole:
        step = load_global_step(whole)
    return write_checkpoint({**variables, **small}, directory, step)


# -- the command line


def _options(argv: Optional[Sequence[str]]) -> argparse.Namespace:
    """Returns what the command line says."""
    parser = parser_of(
        "transformer.convert",
        "Converts checkpoints of T5 models to and from Hugging Face's format; joins checkpoints of "
        "a model and its draft.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    forth = commands.add_parser("to-huggingface", help="a checkpoint to model.safetensors")
    forth.add_argument("checkpoint", help="a checkpoint, or a directory: its latest")
    forth.add_argument("directory", help="where to write")
    forth.add_argument("--feed_forward", help="activation; by default relu or gated-gelu")
    back = commands.add_parser("from-huggingface", help="model.safetensors to a checkpoint")
    back.add_argument("path", help="a directory or a safetensors file")
    back.add_argument("directory", help="the model directory, where to write")
    back.add_argument("--step", type=int, default=0, help="the global step")
    back.add_argument(
        "--tied",
        action=argparse.BooleanOptionalAction,
        help="whether the softmax uses the embedding; by default what config.json says",
    )
    back.add_argument(
        "--norm_name", choices=_NORM_NAMES, default="layer_norm", help="names of norms"
    )
    both = commands.add_parser("with-draft", help="two checkpoints to one, for decoding")
    both.add_argument("checkpoint", help="a checkpoint, or a directory: its latest")
    both.add_argument("draft", help="the same, of the draft")
    both.add_argument("directory", help="the model directory, where to write")
    for command in (forth, back):
        command.add_argument("--vocab_size", type=int, help="rows of the embedding")
        command.add_argument("--dtype", choices=_DTYPES, help="by default unchanged")
    return parser.parse_args(argv)


def main(argv: Optional[Sequence[str]] = None) -> None:
    """Runs the command line.

    Args:
      argv: a list of strings; by default, those of the process.
    """
    args = vars(_options(argv))
    functions: dict[str, Callable[..., Any]] = {
        "to-huggingface": to_huggingface,
        "from-huggingface": from_huggingface,
        "with-draft": with_draft,
    }
    functions[args.pop("command")](**args)
    source = args.get("path") or args["checkpoint"]
    print(f"converted {source}; the result is in {args['directory']}")


if __name__ == "__main__":
    run_with_parser(main, "mesh_tensorflow.transformer.convert")
