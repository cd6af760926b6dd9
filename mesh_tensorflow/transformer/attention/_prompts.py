"""Task-specific prompts: learned keys and values, prepended to those of a sequence."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Optional

import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow import layers
from mesh_tensorflow._calls import arguments_of
from mesh_tensorflow.transformer.transformer._stack import joined_channels

if TYPE_CHECKING:
    from mesh_tensorflow.transformer.transformer._context import Context

__all__ = ["concat_hyper_prompts_kv", "make_params_hyperprompt", "make_params_mtlprompt"]


def side_of_scope() -> Optional[str]:
    """Returns "encoder" or "decoder", from the variable scope; None in other models."""
    # A layer does not know which side it is on; the models open scopes of these names around it.
    scopes = tf.get_variable_scope().name.split("/")
    return next((part for part in scopes if part in ("encoder", "decoder")), None)


def _shared(context: Context, scope: Optional[str], name: str) -> mtf.Tensor:
    """Returns the prompt parameters that all layers of one side share."""
    prompts = context.shared_params.get(scope, {})
    if name not in prompts:
        raise ValueError(
            f"prompts: context.shared_params[{scope!r}] has no {name!r}; give the model "
            "shared_params with the prompts of encoder and decoder"
        )
    return prompts[name]


def _task_ids(context: Context) -> mtf.Tensor:
    """Returns the task of each example, a Tensor with the dimensions of the batch."""
    if "task-id" not in context.cache:
        raise ValueError(
            "prompts: context.cache has no 'task-id', the number of each example's task, a Tensor "
            "with dimensions [batch..., 1]; set it before the layers are called"
        )
    ids = context.cache["task-id"]
    return mtf.reshape(ids, ids.shape.dims[:-1])


def _prompts(context: Context, scope: Optional[str], dropout_rate: float) -> mtf.Tensor:
    """Returns normalized prompts [task_num, memory_length, d_model]."""
    prompts = _shared(context, scope, "prompts")
    # The prompts are shared by layers, but each normalizes them with variables in its own scope.
    prompts = layers.layer_norm(prompts, prompts.shape.dims[-1], name="prompts_layernorm")
    return _dropped(prompts, context, dropout_rate)


def _dropped(x: mtf.Tensor, context: Context, dropout_rate: float) -> mtf.Tensor:
    return mtf.dropout(x, context.train, keep_prob=1.0 - dropout_rate)


def _of_task(
    prompts: mtf.Tensor,
    up: mtf.Tensor,
    down: mtf.Tensor,
    hidden: mtf.Dimension,
    context: Context,
    dropout_rate: float,
) -> mtf.Tensor:
    """Returns keys or values of the prompts of each example's task.

    Args:
      prompts: a Tensor [task_num, memory_length, d_model].
      up: a Tensor [task_num, d_model, hidden], or without tasks.
      down: a Tensor [task_num, hidden, heads, d_kv], or without tasks.
      hidden: a Dimension.
      context: the Context of this call of the model: its mode, positions, states and losses.
      dropout_rate: the share of elements that are dropped in training, from 0 to less than 1.

    Returns:
      A Tensor with dimensions [batch..., memory_length, heads, d_kv].
    """
    tasks, length, _ = prompts.shape.dims
    # made[t, m] = relu(prompts[t, m] up[t]) down[t] (He et al., 2022).
    inner = mtf.einsum([prompts, up], output_shape=[tasks, length, hidden])
    inner = _dropped(mtf.relu(inner), context, dropout_rate)
    heads = [d for d in down.shape if d not in (tasks, hidden)]
    prompts_of_tasks = mtf.einsum([inner, down], output_shape=[tasks, length, *heads])
    # Results are gathered, since weights of each example's task would be a matrix per example.
    return mtf.gather(prompts_of_tasks, _task_ids(context), tasks)


def make_params_mtlprompt(
    task_num: int,
    num_heads: int,
    prefix_hidden_dim: int,
    kv_dim: mtf.Dimension,
    context: Context,
    mtlprompt_share: bool,
    dropout_rate: float,
    prompt_length: Optional[int] = None,
) -> tuple[mtf.Tensor, mtf.Tensor]:
    """Returns keys and values of prompts, computed with weights of the layer.

    He et al., "HyperPrompt: prompt-based task-conditioning of transformers" (2022).

    Args:
      task_num: how many tasks there are.
      num_heads: an integer.
      prefix_hidden_dim: the number of hidden channels.
      kv_dim: a Dimension.
      context: a Context; its cache holds the tasks of examples as "task-id"; its shared_params have
        "prompts" under "encoder" or "decoder".
      mtlprompt_share: whether tasks share the weights.
      dropout_rate: the share of elements that are dropped in training, from 0 to less than 1.
      prompt_length: ignored; the length is that of the prompts.

    Returns:
      A tuple (keys, values) of Tensors with dimensions [batch..., memory_length, heads, kv_dim].

    Raises:
      ValueError: the Context has no prompts or tasks.
    """
    channels = _shared(context, side_of_scope(), "prompts").shape.dims[-1]
    hidden = mtf.Dimension("prefix_hidden", prefix_hidden_dim)
    # Without the dimension, the einsums of `_of_task` use the same weights for all tasks.
    tasks = [] if mtlprompt_share else [mtf.Dimension("task_num", task_num)]
    shapes = {
        "up": [*tasks, channels, hidden],
        "down": [*tasks, hidden, mtf.Dimension("heads", num_heads), kv_dim],
    }
    with tf.variable_scope("prompt"):
        weights = [
            [
                mtf.get_variable(
                    context.mesh,
                    f"w_{part}_{way}",
                    mtf.Shape(dims),
                    dtype=context.variable_dtype,
                )
                for way, dims in shapes.items()
            ]
            for part in "kv"
        ]
    prompts = _prompts(context, side_of_scope(), dropout_rate)
    k, v = (_of_task(prompts, up, down, hidden, context, dropout_rate) for up, down in weights)
    return k, v


def _block_number(context: Context) -> int:
    """Returns the number of the block from the variable scope, or else that of the layer."""
    # There is an embedding for each block, while indices of layers count all layers of blocks.
    match = re.search(r"block_(\d+)", tf.get_variable_scope().name)
    return int(match.group(1)) if match else context.layer_index


def _task_embedding(context: Context, scope: Optional[str], dropout_rate: float) -> mtf.Tensor:
    """Returns the task embeddings, inputs of the hypernetworks, [task_num, channels]."""
    raw = _shared(context, scope, "task_raw_embedding")
    one = _shared(context, scope, "task_projector_layer_one")
    two = _shared(context, scope, "task_projector_layer_two")
    of_layers = _shared(context, scope, "layer_embedding")
    tasks, channels = raw.shape.dims
    of_layer = mtf.gather(of_layers, _block_number(context), of_layers.shape.dims[0])
    # A concatenation needs both with the same other dimensions, and the layer has no tasks.
    of_layer = mtf.broadcast(of_layer, mtf.Shape([tasks, channels]))
    # The embedding is norm(relu([task; layer] one) two).
    joined = joined_channels([raw, of_layer])
    inner = mtf.relu(mtf.einsum([joined, one], output_shape=[tasks, one.shape.dims[-1]]))
    inner = _dropped(inner, context, dropout_rate)
    embedding = mtf.einsum([inner, two], output_shape=[tasks, two.shape.dims[-1]])
    return layers.layer_norm(
        embedding, embedding.shape.dims[-1], name="prompt_task_embed_layernorm"
    )


def make_params_hyperprompt(
    task_num: int,
    num_heads: int,
    prefix_hidden_dim: int,
    kv_dim: mtf.Dimension,
    context: Context,
    mtlprompt_share: bool,
    dropout_rate: float,
    prompt_length: Optional[int],
    scope: Optional[str] = None,
) -> tuple[mtf.Tensor, mtf.Tensor]:
    """Returns keys and values of prompts, computed with weights that hypernetworks generate.

    He et al., "HyperPrompt: prompt-based task-conditioning of transformers" (2022): networks that
    the layers share generate the weights from embeddings of task and layer.

    Args:
      task_num: ignored, as are `num_heads`, `kv_dim`, `mtlprompt_share` and `prompt_length`: the
        shared parameters determine them.
      num_heads: an integer.
      prefix_hidden_dim: the number of hidden channels.
      kv_dim: a Dimension.
      context: a Context; its cache holds the tasks of examples as "task-id"; its shared_params have
        under `scope` the "prompts", "task_raw_embedding", "task_projector_layer_one",
        "task_projector_layer_two", "layer_embedding", and "hypernet_w_k_up", "hypernet_w_k_down",
        "hypernet_w_v_up" and "hypernet_w_v_down".
      mtlprompt_share: a bool.
      dropout_rate: the share of elements that are dropped in training, from 0 to less than 1.
      prompt_length: an integer.
      scope: "encoder" or "decoder"; taken from the variable scope if None.

    Returns:
      A tuple (keys, values) of Tensors with dimensions [batch..., memory_length, heads, d_kv].

    Raises:
      ValueError: the Context lacks one of those.
    """
    scope = scope or side_of_scope()
    hidden = mtf.Dimension("prefix_hidden", prefix_hidden_dim)
    prompts = _prompts(context, scope, dropout_rate)
    embedding = _task_embedding(context, scope, dropout_rate)
    tasks, channels = embedding.shape.dims
    of_both = []
    for part in "kv":
        nets = (_shared(context, scope, f"hypernet_w_{part}_{way}") for way in ("up", "down"))
        # Tasks have weights of their own, made of their embeddings: w[t] = embedding[t] net.
        up, down = (
            mtf.einsum([embedding, net], output_shape=[tasks, *(net.shape - channels)])
            for net in nets
        )
        of_both.append(_of_task(prompts, up, down, hidden, context, dropout_rate))
    k, v = of_both
    return k, v


def concat_hyper_prompts_kv(
    k: mtf.Tensor,
    v: mtf.Tensor,
    scope_encoder_or_decoder: Optional[str],
    use_hyperprompt: bool,
    memory_length: mtf.Dimension,
    task_num: int,
    num_heads: int,
    prefix_hidden_dim: int,
    kv_dim: mtf.Dimension,
    context: Context,
    mtlprompt_share: bool,
    dropout_rate: float,
    prompt_length: int,
) -> tuple[mtf.Tensor, mtf.Tensor, mtf.Tensor, mtf.Dimension]:
    """Prepends the keys and values of prompts to those of the sequence.

    Args:
      k: a Tensor with dimensions [batch..., memory_length, heads, kv_dim].
      v: a Tensor with dimensions [batch..., memory_length, heads, kv_dim].
      scope_encoder_or_decoder: "encoder" or "decoder".
      use_hyperprompt: whether hypernetworks generate the prompts' weights.
      memory_length: a Dimension.
      task_num: an integer; this and the following are as in `make_params_mtlprompt` and
        `make_params_hyperprompt`.
      num_heads: an integer.
      prefix_hidden_dim: an integer.
      kv_dim: a Dimension.
      context: the Context of this call of the model: its mode, positions, states and losses.
      mtlprompt_share: a bool.
      dropout_rate: the share of elements that are dropped in training, from 0 to less than 1.
      prompt_length: the number of positions of the prompts.

    Returns:
      A tuple (keys, values, memory_position, memory_length), the last two including the prompts: a
      range and its Dimension.

    Raises:
      ValueError: the Context lacks prompts or tasks, or prompts have another length.
    """
    arguments = arguments_of(make_params_mtlprompt, locals())
    if use_hyperprompt:
        prompts = make_params_hyperprompt(**arguments, scope=scope_encoder_or_decoder)
    else:
        prompts = make_params_mtlprompt(**arguments)
    # Hyperparameters of the layer fix the memory's length before there are prompts to measure.
    length = prompts[0].shape.get_dim_by_name(memory_length.name).size
    if length != prompt_length:
        raise ValueError(
            f"prompts: those of context.shared_params have length {length}, the layer was made for "
            f"hyperprompt_length_{scope_encoder_or_decoder}={prompt_length}"
        )
    # Prompts set the order of dimensions, which has to be the same for a concatenation.
    k, v = (
        mtf.concat([prompt, mtf.transpose(x, prompt.shape.resize_dimension(
            memory_length.name, memory_length.size))], memory_length.name)
        for prompt, x in zip(prompts, (k, v))
    )  # fmt: skip
    longer = mtf.Dimension(memory_length.name, memory_length.size + prompt_length)
    # The prompts have the first positions; biases subtract their number from those of the sequence.
    return k, v, mtf.range(context.mesh, longer, tf.int32), longer
