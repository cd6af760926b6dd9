"""The Funnel-Transformer: an encoder that shortens the sequence from block to block.

See Dai et al., "Funnel-transformer: filtering out sequential redundancy for efficient language
processing" (2020).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Optional

import gin
import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow._core.errors import check_choice
from mesh_tensorflow._core.graph import leaves_no_node
from mesh_tensorflow.transformer import transformer

if TYPE_CHECKING:
    from mesh_tensorflow.transformer.transformer._context import Context
    from mesh_tensorflow.transformer.transformer._unitransformer import Unitransformer

__all__ = ["BitransformerFunnel", "FunnelTransformerLayerStack"]

_MODULE = "mesh_tensorflow.transformer.funnel_transformer"

_POOLS = {"mean": mtf.reduce_mean, "max": mtf.reduce_max, "min": mtf.reduce_min}


def _first_of_windows(x: mtf.Tensor, dim_name: str, size: int) -> mtf.Tensor:
    """Returns the first entry of each window; `x` itself if it lacks the dimension."""
    if dim_name not in x.shape.dimension_names:
        return x
    return mtf.stride_tensor_1d(x, x.shape.get_dim_by_name(dim_name), size)


@gin.configurable(module=_MODULE)
class FunnelTransformerLayerStack(transformer.LayerStack):
    """Blocks of layers; the length is pooled at the beginning of each block except the first.

    A block is `block_param_size` modules, each of `n_submodules` layers, and each module is
    repeated `block_repeat_size` times with the same variables. The length is pooled after the first
    layer of a block, whose attention still covers all positions.

    Attributes:
      n_blocks: an integer.
      block_param_size: a list with the number of modules of each block.
      block_repeat_size: a list with the number of repetitions of each block's modules.
      pooling_size: an integer.
      n_submodules: an integer.
      pool_fn: a function of a Tensor and the name of a dimension.
    """

    def __init__(
        self,
        layers: Sequence[Any],
        n_blocks: int = gin.REQUIRED,
        block_param_size: Sequence[int] = gin.REQUIRED,
        block_repeat_size: Sequence[int] = gin.REQUIRED,
        pooling_size: int = 2,
        sublayers_initial: Optional[Sequence[Callable]] = None,
        sublayers_per_layer: Optional[Sequence[Callable]] = None,
        sublayers_final: Optional[Sequence[Callable]] = None,
        pooling_type: str = "mean",
        n_submodules: int = 2,
    ):
        """Creates the stack.

        Args:
          layers: a list of TransformerLayers, those of all modules; repetitions reuse them.
          n_blocks: an integer.
          block_param_size: a list of `n_blocks` integers.
          block_repeat_size: a list of `n_blocks` integers.
          pooling_size: an integer, the number of positions that are pooled to one.
          sublayers_initial: a list of functions, as for LayerStack.
          sublayers_per_layer: a list of functions, as for LayerStack.
          sublayers_final: a list of functions, as for LayerStack.
          pooling_type: "mean", "max" or "min".
          n_submodules: an integer, the number of layers of a module.

        Raises:
          ValueError: the pooling type is unknown, or the numbers do not match the layers.
        """
        super().__init__(
            layers,
            sublayers_initial=sublayers_initial,
            sublayers_per_layer=sublayers_per_layer,
            sublayers_final=sublayers_final,
            dropout_rate=None,
            norm_epsilon=None,
            recompute_grads=False,
            sequence_parallel=False,  # pooling changes the length between layers
        )
        check_choice("FunnelTransformerLayerStack", "pooling_type", pooling_type, _POOLS)
        self.n_blocks = n_blocks
        self.block_param_size = block_param_size
        self.block_repeat_size = block_repeat_size
        self.pooling_size = pooling_size
        self.n_submodules = n_submodules
        self.pool_fn = lambda x, dim_name: self._pool(_POOLS[pooling_type], x, dim_name)
        self._context: Any = None
        self._calls = self._list_calls()

    def _list_calls(self) -> list[tuple[Any, str, bool]]:
        """Returns the layers to call, with their scopes and whether pooling follows."""
        sizes, repeats = list(self.block_param_size), list(self.block_repeat_size)
        if not len(sizes) == len(repeats) == self.n_blocks:
            raise ValueError(
                f"FunnelTransformerLayerStack: block_param_size={sizes} and block_repeat_size="
                f"{repeats} must have n_blocks={self.n_blocks} numbers each"
            )
        if len(self._layers) != sum(sizes) * self.n_submodules:
            raise ValueError(
                f"FunnelTransformerLayerStack: there are {len(self._layers)} layers, but "
                f"block_param_size={sizes} has {sum(sizes)} modules of n_submodules="
                f"{self.n_submodules} layers each; set make_layer_stack.num_layers = {sum(sizes)}"
                f" with {self.n_submodules} layers"
            )
        layers = iter(self._layers)
        calls = []
        for block in range(self.n_blocks):
            for param in range(sizes[block]):
                scope = f"funnel_block_{block:03d}/param_idx_{param:03d}"
                module = [next(layers) for _ in range(self.n_submodules)]
                # Repetitions have the same scope, and so the same variables.
                for repeat in range(repeats[block]):
                    for i, layer in enumerate(module):
                        # Once for each block, however often its modules are repeated.
                        pools = block > 0 and param == repeat == i == 0
                        calls.append((layer, f"{scope}/submodule_{i:03d}", pools))
        return calls

    def _pool(self, reduce: Callable, x: mtf.Tensor, dim_name: str) -> mtf.Tensor:
        dim = x.shape.get_dim_by_name(dim_name)
        if dim.size % self.pooling_size:
            raise ValueError(
                f"FunnelTransformerLayerStack: pooling_size={self.pooling_size} does not divide "
                f"{dim.name}={dim.size} of {x.name} {x.shape}; the length of the inputs must be a "
                "multiple of pooling_size to the power of the number of blocks less one"
            )
        return mtf.pool_tensor_1d(x, dim, reduce, self.pooling_size)

    def update_context(self, context: Context, x: mtf.Tensor, pool_dim_name: str) -> None:
        """Pools the positions and sequence ids of a Context, after `x` has been pooled.

        Each window keeps its first id, sequence id and priority; positions are counted in windows.

        Args:
          context: the Context of this call of the model: its mode, positions, states and losses.
          x: a Tensor with the pooled dimension.
          pool_dim_name: a string, the name of the dimension.
        """
        # Not pooled like `x`: a mean of ids is no id.
        for name in ("sequence_id", "subsequence_id", "inputs", "read_priority", "write_priority"):
            old = getattr(context, name, None)  # a user's own context class may lack it
            if isinstance(old, mtf.Tensor):
                setattr(context, name, _first_of_windows(old, pool_dim_name, self.pooling_size))
        # Default positions need no change: they are a range along `length_dim`.
        position = context.position
        if isinstance(position, mtf.Tensor):
            first = _first_of_windows(position, pool_dim_name, self.pooling_size)
            # Neighbors are at a distance of 1 again, as relative biases and masks expect.
            context.position = first // self.pooling_size
        # Whatever layers derive from it from here on, such as masks of dropout, has the pooled
        # length.
        context.length_dim = x.shape.get_dim_by_name(pool_dim_name)

    def call(self, context: Context, x: mtf.Tensor) -> mtf.Tensor:
        """Calls the layers; afterwards the Context is that of the pooled sequence.

        Args:
          context: the Context of this call of the model: its mode, positions, states and losses.
          x: a Tensor with dimensions [batch..., length, d_model].

        Returns:
          A Tensor with dimensions [batch..., pooled length, d_model].
        """
        self.set_context(context)
        x = self._call_sublayers(self._sublayers_of("sublayers_initial"), x, context)
        context.layer_outputs.append(x)
        last = len(self._calls) - 1
        for i, (layer, scope, pools) in enumerate(self._calls):
            with tf.variable_scope(scope):
                x = self._layer_fn(x, layer, context)
            if pools:
                length_name = context.length_dim.name
                x = self.pool_fn(x, length_name)
                # Layers from here on read positions and masks of the pooled length.
                self.update_context(context, x, length_name)
            # The last output counts with the final sublayers, after which `_finish` appends it.
            if i != last:
                context.layer_outputs.append(x)
            context.layer_index += 1
        return self._finish(context, x)

    @property
    def context(self) -> Any:
        """The Context of the last call, None before the first."""
        return self._context

    def set_context(self, context: Context) -> None:
        """Sets `context`."""
        self._context = context


@gin.configurable(module=_MODULE)
class BitransformerFunnel(transformer.Bitransformer):
    """A Bitransformer whose encoder has a FunnelTransformerLayerStack.

    The decoder attends to the pooled sequence.
    """

    def __init__(
        self, encoder: Unitransformer, decoder: Unitransformer, shared_embedding: bool = True
    ):
        """Creates the model; see `Bitransformer`.

        Raises:
          ValueError: the encoder's layer stack is not a FunnelTransformerLayerStack.
        """
        if not isinstance(encoder.layer_stack, FunnelTransformerLayerStack):
            raise ValueError(
                "BitransformerFunnel: the encoder's layer stack must be a "
                f"FunnelTransformerLayerStack, not {type(encoder.layer_stack).__name__}; bind "
                "encoder/make_layer_stack.layer_stack_cls = @FunnelTransformerLayerStack"
            )
        super().__init__(encoder, decoder, shared_embedding=shared_embedding)

    def _encoded_sequence_id(self, encoder_sequence_id: mtf.Tensor) -> mtf.Tensor:
        """Returns the sequence ids of the pooled sequence."""
        # The encoder was called just before, and its stack has kept the Context of that call.
        return self.encoder.layer_stack.context.sequence_id

    # The same function, which gin binds arguments of by the name of this class too.
    decode = leaves_no_node(
        gin.configurable(module="BitransformerFunnel")(
            inspect.unwrap(transformer.Bitransformer.decode)
        )
    )
