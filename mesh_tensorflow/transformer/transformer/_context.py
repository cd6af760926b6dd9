"""What the layers of a model share during one call of it, and their base class."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Optional, Union

import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow._core.errors import dims_text
from mesh_tensorflow.ops._random import drops
from mesh_tensorflow.ops._variable import dtype_in_force


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncoderOutputs:
    """What a decoder reads from its encoder; all fields are None without one.

    The fields have the names of the corresponding arguments of Context, of
    `Unitransformer.sample_autoregressive` and of `Unitransformer.beam_search`.

    Attributes:
      encoder_output: a Tensor with dimensions [batch..., memory_length, d_model].
      encoder_sequence_id: an integer Tensor with dimensions [batch..., memory_length].
      encoder_inputs: an integer Tensor with dimensions [batch..., memory_length], the ids.
      encoder_layer_outputs: a list of Tensors, the outputs of the encoder's layers.
      shared_params: a dictionary with the "embedding" and the "positional_embedding" to use
        instead of the decoder's own. It may be set without an encoder, too.
    """

    encoder_output: Optional[mtf.Tensor] = None
    encoder_sequence_id: Optional[mtf.Tensor] = None
    encoder_inputs: Optional[mtf.Tensor] = None
    encoder_layer_outputs: Optional[list[mtf.Tensor]] = None
    shared_params: Optional[dict[str, Any]] = None

    def arguments(self) -> dict[str, Any]:
        """Returns the fields as keyword arguments."""
        # Not dataclasses.asdict, which would copy the lists and dictionaries.
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}


class TransformerLayer:
    """One layer of a transformer: a function of a Tensor, with its hyperparameters.

    Subclasses define `call`. It creates variables in the current variable scope, which the layer
    stack opens.
    """

    _name: Optional[str] = None

    def call(self, context: Context, x: mtf.Tensor) -> mtf.Tensor:
        """Returns the output of the layer.

        Args:
          context: a Context, which the layers of a model share during a call.
          x: a Tensor with dimensions [batch..., length, d_model]; without `length` in mode
            "incremental".

        Returns:
          A Tensor of the same dimensions.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define call(context, x)")

    def to_json(self) -> str:
        """Returns the class and the attributes of the layer as JSON.

        Values that JSON cannot represent are given by their `__name__` or `repr`.
        """
        return json.dumps(self._described(), sort_keys=True)

    def _described(self) -> dict[str, Any]:
        def described(value: object) -> object:
            if isinstance(value, TransformerLayer):
                return value._described()
            if isinstance(value, (list, tuple)):
                return [described(v) for v in value]
            if isinstance(value, dict):
                return {str(k): described(v) for k, v in value.items()}
            plain = value is None or isinstance(value, (bool, int, float, str))
            return value if plain else getattr(value, "__name__", None) or repr(value)

        attributes = {name: described(value) for name, value in vars(self).items()}
        return {"class": type(self).__name__, **attributes}

    def set_name(self, name: Optional[str]) -> None:
        """Sets the name, which is the variable scope that a layer stack opens for the layer."""
        self._name = name

    @property
    def name(self) -> Optional[str]:
        """The name, or None if it was not set."""
        return self._name


def dropout_of(x: mtf.Tensor, context: Context, rate: float) -> mtf.Tensor:
    """Applies dropout in training, with the same mask at all positions."""
    # Asked first: users' own contexts may lack what the mask is made of.
    if not context.train or not drops(rate):
        return x
    # Random numbers are fewer by a factor of the length.
    return mtf.dropout(x, True, rate=rate, noise_shape=x.shape - [context.length_dim])


# The name of the dimension of several positions in one decoding step.
SPECULATED = "speculated"


def memory_length_of(encoder_output: mtf.Tensor) -> mtf.Dimension:
    """Returns the Dimension named "memory_length" of an encoder's output.

    Raises:
      ValueError: it has no such dimension.
    """
    for dim in encoder_output.shape.dims:
        if dim.name == "memory_length":
            return dim
    raise ValueError(
        f"encoder_length_dim: encoder_output {encoder_output.name} {encoder_output.shape} has no "
        "dimension named memory_length; use mtf.layers.rename_length_to_memory_length"
    )


def nonpadding_of(context: Context) -> Union[mtf.Tensor, int, None]:
    """Returns `Context.nonpadding`, also for a user's context without that property."""
    sequence_id = context.sequence_id
    # No Tensor of ones: callers tell by the type that there is nothing to mask.
    if sequence_id is None or isinstance(sequence_id, int):
        return sequence_id
    return mtf.cast(mtf.not_equal(sequence_id, 0), context.activation_dtype)


def made_once(context: Optional[Context], key: Hashable, make: Callable[[], Any]) -> Any:
    """Returns a value that all layers of a call of a model share, such as a mask of its positions.

    It is made anew where a Tensor of one layer has no value in another one: within what is
    recomputed for gradients, the stages of a pipeline and loops over layers.

    Args:
      context: a Context, or None.
      key: what the value is made of, by which layers find it: a name, Tensors, sizes and options.
      make: a function without arguments that returns the value.
    """
    # Attention takes contexts of users' own, too, which may have less.
    cache = getattr(context, "cache", None)
    if context is None or cache is None or not hasattr(context, "captured_in"):
        return make()
    graph = context.mesh.graph
    if graph.stages is not None or graph.captured_in is not context.captured_in:
        return make()
    if key not in cache:
        cache[key] = make()
    return cache[key]


def check_one_position(context: Context) -> None:
    """Raises a ValueError if a decoding step computes several positions at once.

    For layers whose steps depend on each other in another way than by `updated_states`.
    """
    position = context.position if context.mode == "incremental" else None
    several = [] if position is None else [d for d in position.shape if d.name == SPECULATED]
    if several:
        layer = getattr(context, "current_layer", context)
        raise ValueError(
            f"{type(layer).__name__} decodes one position at a time; speculative decoding asks for "
            f"{dims_text(several)} in a step. Decode without draft_model, or use SelfAttention, "
            "EncDecAttention and layers without states"
        )


# Equal and hashed by identity, both of which a generated __eq__ would end; a generated repr would
# print the model and every Tensor.
@dataclasses.dataclass(eq=False, repr=False)
class Context:
    """What the layers of a model share during one call of it.

    Decoding calls a model once in mode "first_part", in which the layers record their states for
    all positions, and then in mode "incremental" inside a loop, for one position per call. Layers
    must read states in the order in which they record them.

    Attributes:
      model: the Unitransformer being called.
      mesh: a Mesh.
      batch_dims: a list of Dimensions, including the ensemble's.
      length_dim: the Dimension of positions in the sequence.
      variable_dtype: the dtypes of variables: in checkpoints, in memory and in computations.
      beam_dim: a Dimension, in beam search only.
      mode: "train", "eval", "infer", "score", "first_part" or "incremental".
      position: an integer Tensor with dimensions [batch..., length]; in mode "incremental" a
        scalar, or with dimensions [batch...], and [batch..., speculated] if several positions
        are computed at once; or None.
      position_is_default: whether the positions are 0, 1, 2, ...
      sequence_id: an integer Tensor with dimensions [batch..., length] that numbers the examples
        packed into a row from 1, and is 0 at padding; the number 1 if there is neither packing
        nor padding; or None.
      subsequence_id: like `sequence_id`, for parts of examples that see only themselves.
      states: a list of Tensors, the states before this decoding step.
      new_states: a list that layers append their states to, or None.
      losses: a list that layers append auxiliary losses to, or None.
      initial_position: an integer Tensor, the position where decoding begins.
      layer_outputs: a list that the layer stack appends the outputs of its layers to.
      encoder_output: a Tensor with dimensions [batch..., memory_length, d_model], or None.
      encoder_sequence_id: like `sequence_id`, for the encoder's output.
      constant_states: a list of the states that are the same in all decoding steps.
      next_constant_state: an integer, the index of the one that is returned next.
      shared_params: a dictionary of parameters that several models share, such as embeddings.
      encoder_layer_outputs: `layer_outputs` of the encoder.
      write_priority: an integer Tensor; see read_priority.
      read_priority: an integer Tensor: position i sees position j if
        `read_priority[i] >= write_priority[j]`.
      inputs: an integer Tensor, the ids that the model is fed: in autoregressive models the targets
        shifted by one.
      encoder_inputs: an integer Tensor, the ids of the encoder.
      num_microbatches: an integer, the number of microbatches; a call is for one of them.
      states_length: an integer, how many positions states have that are recorded in mode
        "first_part"; those of `length_dim` if None.
      routings: a list that mixtures of experts append a `moe.Routing` to, or None.
      layer_index: an integer, the index of the layer being called.
      cache: a dictionary for values that layers compute once and share.
      captured_in: that of the graph where the call began; see `made_once`.
      input_embeddings: the embeddings of the ids, set by the model.
      exchanged_length_dim: inside attention that exchanges positions for heads, the Dimension of
        positions outside of it; else None.
      current_layer: the layer being called, set by the layer stack.
      current_layer_input: a Tensor, the input of that layer's sublayers.
      decoder_layers_per_module: weighted sums of the encoder's layers, set by the first
        TransparentEncDecAttention.
    """

    model: Any  # a Unitransformer; layers read attributes of particular models
    mesh: mtf.Mesh
    batch_dims: Sequence[mtf.Dimension]
    length_dim: mtf.Dimension
    variable_dtype: mtf.VariableDType
    beam_dim: Optional[mtf.Dimension] = None
    mode: str = "train"
    position: Optional[mtf.Tensor] = None
    position_is_default: bool = False
    sequence_id: Union[mtf.Tensor, int, None] = None
    subsequence_id: Union[mtf.Tensor, int, None] = None
    states: Optional[Sequence[mtf.Tensor]] = None
    new_states: Optional[list] = None
    losses: Optional[list] = None
    initial_position: Optional[mtf.Tensor] = None
    layer_outputs: Any = None  # None makes a list, and in `shared_params` a dictionary
    encoder_output: Optional[mtf.Tensor] = None
    encoder_sequence_id: Union[mtf.Tensor, int, None] = None
    constant_states: Optional[list] = None
    shared_params: Any = None
    encoder_layer_outputs: Optional[list] = None
    write_priority: Optional[mtf.Tensor] = None
    read_priority: Optional[mtf.Tensor] = None
    inputs: Optional[mtf.Tensor] = None
    encoder_inputs: Optional[mtf.Tensor] = None
    num_microbatches: int = 1
    states_length: Optional[int] = None
    routings: Optional[list] = None
    # Each step of decoding makes a Context, so that its first layer gets the first state again.
    next_constant_state: int = dataclasses.field(default=0, init=False)
    layer_index: int = dataclasses.field(default=0, init=False)
    # Of this call alone: what a step of decoding caches belongs to the body of a loop.
    cache: dict = dataclasses.field(default_factory=dict, init=False)
    captured_in: Optional[object] = dataclasses.field(init=False)
    input_embeddings: Optional[mtf.Tensor] = dataclasses.field(default=None, init=False)
    exchanged_length_dim: Optional[mtf.Dimension] = dataclasses.field(default=None, init=False)
    # Without a value until the stack sets it, so that reading it outside of a stack is an error.
    current_layer: TransformerLayer = dataclasses.field(init=False)
    current_layer_input: mtf.Tensor = dataclasses.field(init=False)
    decoder_layers_per_module: list[mtf.Tensor] = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        # Variables get the precision in force too, and activations have to agree with them.
        self.variable_dtype = dtype_in_force(self.variable_dtype)
        self.captured_in = self.mesh.graph.captured_in
        # Not `or`: an empty list of the caller is one that it reads after the call.
        self.layer_outputs = [] if self.layer_outputs is None else self.layer_outputs
        self.shared_params = {} if self.shared_params is None else self.shared_params

    @property
    def train(self) -> bool:
        """Whether the mode is "train"."""
        return self.mode == "train"

    @property
    def activation_dtype(self) -> tf.DType:
        """The dtype of activations."""
        return self.variable_dtype.activation_dtype

    @property
    def encoder_length_dim(self) -> mtf.Dimension:
        """The Dimension of `encoder_output` named "memory_length".

        Raises:
          ValueError: there is no encoder output, or it has no such dimension.
        """
        if self.encoder_output is None:
            raise ValueError(
                "encoder_length_dim: the Context has no encoder_output; call the model with "
                "encoder_output, as a Bitransformer does"
            )
        return memory_length_of(self.encoder_output)

    @property
    def nonpadding(self) -> Union[mtf.Tensor, int, None]:
        """1 where there is no padding and 0 where there is, in the activation dtype.

        The number 1 if `sequence_id` is, and None if it is None.
        """
        return nonpadding_of(self)

    def get_states(self, n: int) -> list[mtf.Tensor]:
        """Returns the next `n` states: those at the indices of the next `n` new states.

        Raises:
          ValueError: there are fewer; or the step computes several positions.
        """
        check_one_position(self)
        return self.states_of_positions(n)

    def states_of_positions(self, n: int) -> list[mtf.Tensor]:
        """Returns what `get_states` does, for steps of one position or of several.

        Raises:
          ValueError: there are fewer.
        """
        # Layers read before they record: as many states as are recorded come before the next ones.
        states, begin = self.states or [], len(self.new_states or [])
        if len(states) < begin + n:
            raise ValueError(
                f"get_states: {n} states asked for after {begin} recorded ones, but there are "
                f"{len(states)}; layers must record in mode first_part what they ask for in mode "
                "incremental, in the same order"
            )
        return list(states[begin : begin + n])

    def record_new_states(self, new_states: Sequence[mtf.Tensor]) -> None:
        """Records states for `get_states` in the next decoding step."""
        self._recorded("record_new_states", self.new_states).extend(new_states)

    def record_constant_state(self, s: object) -> None:
        """Records a constant state for `get_constant_state` in all later decoding steps."""
        self._recorded("record_constant_state", self.constant_states).append(s)

    def get_constant_state(self) -> Any:
        """Returns the next constant state.

        Raises:
          ValueError: all of them have been returned.
        """
        states = self.constant_states or []
        if self.next_constant_state >= len(states):
            raise ValueError(
                f"get_constant_state: all {len(states)} constant states have been returned; "
                "layers must record in mode first_part what they ask for in mode incremental"
            )
        # By order, as states have no names: layers ask for them in the order of the first part.
        self.next_constant_state += 1
        return states[self.next_constant_state - 1]

    def get_position(self) -> Optional[mtf.Tensor]:
        """Returns the positions; a range along the length if they are the default ones."""
        if self.position_is_default:
            return mtf.range(self.mesh, self.length_dim, dtype=tf.int32)
        return self.position

    def _recorded(self, what: str, states: Optional[list]) -> list:
        if states is None:
            raise ValueError(
                f"{what}: this Context records no states, in mode {self.mode!r}; give it a list"
            )
        return states
