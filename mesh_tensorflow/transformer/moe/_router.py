"""Hyperparameters of mixtures of experts, and the router that all gatings share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, Optional, TypeGuard, Union

import tensorflow.compat.v1 as tf

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow import layers
from mesh_tensorflow.layers._masks import MASKED_LOGIT
from mesh_tensorflow.ops._microbatches import mean_over_microbatches
from mesh_tensorflow.transformer.transformer._stack import joined_channels

# What `set_default_moe_hparams` sets. All but the coefficient of the loss have to be
# set: what lacks them was not made for a mixture of experts.
_BASIC: dict[str, Any] = {
    "num_experts": 16,
    "loss_coef": 0.01,
    "gating": "top_2",
    "capacity_factor_train": 1.25,
    "capacity_factor_eval": 2.0,
    "capacity_factor_second_level": 1.0,
    "hidden_size": 4096,
    "group_size": 1024,
    "use_second_place_loss": 0,
    "second_policy_train": "random",
    "second_policy_eval": "random",
    "second_threshold_train": 0.2,
    "second_threshold_eval": 0.2,
}
_OF_TENSOR2TENSOR = ("num_experts", "loss_coef")

# Hyperparameters that objects made for earlier releases lack.
_LATER: dict[str, Any] = {
    "min_expert_capacity": 4,
    "dropout_rate": 0.0,
    "switch_policy_train": "input_jitter",
    "switch_policy_eval": "input_jitter",
    "switch_dropout": 0.1,
    "switch_temperature": 1.0,
    "switch_jitter": 0.01,
    "ntlb_top_k": 4,
    "output_dim": None,
    "top_n_num_experts_per_token": 3,
    "use_experts_attention": False,
    "z_loss": None,
    "balance_padding": True,
    "groups_in_rows": False,
    "word_embed_mode": None,
    "use_second_place_expert_prob": None,
    "use_second_place_expert_prob_temp": None,
    "num_layers": 1,
    "top_n_normalized": None,
    "shared_hidden_size": 0,
    "shared_gate": False,
    "heterogeneous_mask_info": None,
}

# All hyperparameters, without the prefix moe_ of their attributes.
DEFAULTS = {**_BASIC, **_LATER}
_FALLBACKS = {"loss_coef": _BASIC["loss_coef"], **_LATER}


class HParams:
    """Hyperparameters as attributes, such as `moe_num_experts`.

    Any other object with these attributes works too, such as Tensor2Tensor's.
    """

    def __init__(self, **kwargs: object) -> None:
        for k, v in kwargs.items():
            self.add_hparam(k, v)

    def add_hparam(self, k: str, v: object) -> None:
        """Sets the attribute `k`."""
        setattr(self, k, v)


def set_default_moe_hparams(hparams: Any) -> None:
    """Adds the hyperparameters of a mixture of experts to Tensor2Tensor's.

    Args:
      hparams: an object with `add_hparam(name, value)`. Tensor2Tensor's basic hyperparameters have
        `moe_num_experts` and `moe_loss_coef` already: these two are overwritten.
    """
    for name, value in _BASIC.items():
        if name in _OF_TENSOR2TENSOR:
            setattr(hparams, f"moe_{name}", value)
        else:
            hparams.add_hparam(f"moe_{name}", value)


def hparams_of(arguments: Mapping[str, Any], **others: object) -> HParams:
    """Returns the hyperparameters among the arguments of a layer's constructor, and others.

    Args:
      arguments: a dictionary by names of arguments, which may have the prefix moe_; it may have
        arguments that are no hyperparameters.
      **others: further hyperparameters by names without prefix.
    """
    plain = {name.removeprefix("moe_"): value for name, value in arguments.items()}
    chosen = {name: value for name, value in {**plain, **others}.items() if name in DEFAULTS}
    return HParams(**{f"moe_{name}": value for name, value in chosen.items()})


class Routing(NamedTuple):
    """What a router has done with the tokens that are no padding, in float32.

    Attributes:
      chosen: a Tensor with the dimension of the experts, how many tokens chose each.
      gates: one with the same dimension, the sum of the gates of each, before any is left out.
      tokens: a scalar, how many tokens there are.
      placed: a scalar, how many choices were followed; the others found an expert full.
    """

    chosen: mtf.Tensor
    gates: mtf.Tensor
    tokens: mtf.Tensor
    placed: mtf.Tensor


@dataclasses.dataclass(frozen=True)
class Mixture:
    """What all parts of a mixture of experts take into account.

    Attributes:
      hparams: an object with attributes such as moe_num_experts; see `HParams`.
      train: whether the model is being trained.
      variable_dtype: the dtypes of variables: in checkpoints, in memory and in computations.
      layout: a LayoutRules or None.
      mesh_shape: a Shape or None; no group of tokens is split over processors.
      num_microbatches: an integer that losses are divided by, or None.
      routings: a list that a Routing is appended to, or None.
    """

    hparams: object
    train: bool
    variable_dtype: mtf.VariableDType
    layout: Union[mtf.LayoutRules, str, None] = None
    mesh_shape: Union[mtf.Shape, str, None] = None
    num_microbatches: Optional[int] = None
    routings: Optional[list[Routing]] = None

    def hparam(self, name: str) -> Any:
        """Returns `hparams.moe_<name>`, or its default if an earlier release had no such field.

        Raises:
          ValueError: there is no such field and no default.
        """
        if hasattr(self.hparams, f"moe_{name}"):
            return getattr(self.hparams, f"moe_{name}")
        if name not in _FALLBACKS:
            raise ValueError(
                f"mixture of experts: the hyperparameters have no moe_{name}; set it, for example "
                f"with hparams.add_hparam('moe_{name}', ...)"
            )
        return _FALLBACKS[name]

    def of_mode(self, name: str) -> Any:
        """Returns `hparams.moe_<name>_train` or `hparams.moe_<name>_eval`."""
        return self.hparam(f"{name}_{'train' if self.train else 'eval'}")

    def slices(self, dim: mtf.Dimension) -> int:
        """Returns the number of slices of a dimension; 1 without layout and mesh."""
        if self.layout is None or self.mesh_shape is None:
            return 1
        return mtf.tensor_dim_to_mesh_dim_size(self.layout, self.mesh_shape, dim)


def _add(inputs: mtf.Tensor, embeddings: mtf.Tensor) -> mtf.Tensor:
    return inputs + embeddings


def _concat(inputs: mtf.Tensor, embeddings: mtf.Tensor) -> mtf.Tensor:
    return joined_channels([inputs, embeddings])


def _only(inputs: mtf.Tensor, embeddings: mtf.Tensor) -> mtf.Tensor:
    return embeddings


# By mode: how the router's input is made, and whether gradients flow to the embeddings.
_WORD_EMBED_MODES = {
    "add": (_add, True),
    "add_stop_grad": (_add, False),
    "concat": (_concat, True),
    "concat_stop_grad": (_concat, False),
    "embed_only": (_only, True),
}


def _input_dropout(inputs: mtf.Tensor, mixture: Mixture) -> mtf.Tensor:
    return mtf.dropout(inputs, True, rate=mixture.hparam("switch_dropout"))


def _input_jitter(inputs: mtf.Tensor, mixture: Mixture) -> mtf.Tensor:
    return layers.multiplicative_jitter(inputs, mixture.hparam("switch_jitter"))


Noise = Callable[[mtf.Tensor, Mixture], mtf.Tensor]
# By switch policy: the noise that it adds to the router's input when training.
INPUT_NOISE: dict[str, Noise] = {"input_dropout": _input_dropout, "input_jitter": _input_jitter}
_SWITCH_POLICIES = ("argmax", "sample", *INPUT_NOISE)


@dataclasses.dataclass
class Router:
    """The router: expert logits of tokens, and statistics for a gating.

    Everything is computed in float32.

    Attributes:
      mixture: the Mixture that it is part of.
      inputs: a Tensor with dimensions [outer expert dims and batch..., group, d_model].
      experts_dim: a Dimension.
      capacity_dim: a Dimension, the tokens of a group that an expert takes.
      outer_expert_dims: a list of Dimensions; each index has its own router weights.
      importance: a Tensor with dimensions [..., group], or None if all tokens have importance 1.
        A token of importance 0 is not dispatched.
      name: the scope of the variable `kernel`; None for that of the gating.
      token_embeddings: a Tensor of the shape of the inputs, or None.
      group_dim: a Dimension, the tokens of a group.
      logits: a Tensor with dimensions [..., group, experts], of `compute_logits`.
      chosen: a Tensor with dimensions [..., experts], how many tokens of a group chose each expert;
        None for gatings without an Assignment.
    """

    mixture: Mixture
    inputs: mtf.Tensor
    experts_dim: mtf.Dimension
    capacity_dim: mtf.Dimension
    outer_expert_dims: Sequence[mtf.Dimension] = ()
    importance: Optional[mtf.Tensor] = None
    name: Optional[str] = None
    token_embeddings: Optional[mtf.Tensor] = None
    group_dim: mtf.Dimension = dataclasses.field(init=False)
    logits: mtf.Tensor = dataclasses.field(init=False)
    chosen: Optional[mtf.Tensor] = dataclasses.field(default=None, init=False)

    def __post_init__(self) -> None:
        self.group_dim = self.inputs.shape.dims[-2]

    def compute_logits(self, name: str, noise: Optional[Noise] = None) -> None:
        """Computes the logits with a variable `name/kernel`.

        Args:
          name: a string, used if the router has no name of its own.
          noise: a function of the router's input and the Mixture, or None.
        """
        # In float32, also if the model computes in bfloat16: exponentials of rounded logits make
        # training unstable (Fedus et al., 2021, section 2.4).
        x = _with_embeddings(mtf.to_float(self.inputs), self.token_embeddings, self.mixture)
        if noise is not None:
            # For the router alone: the experts get the tokens without noise.
            x = noise(x, self.mixture)
        self.logits = layers.dense(
            x,
            self.experts_dim,
            reduced_dims=x.shape.dims[-1:],
            expert_dims=self.outer_expert_dims,
            use_bias=False,
            variable_dtype=self.mixture.variable_dtype,
            name=name if self.name is None else self.name,
        )
        if self.importance is not None:
            self.importance = mtf.to_float(self.importance)

    def in_first_place(self) -> Optional[mtf.Tensor]:
        """Returns 1.0 where the importance is 1, else 0.0; None without importance."""
        if self.importance is None:
            return None
        return mtf.to_float(mtf.equal(self.importance, 1.0))

    def in_any_place(self) -> Optional[mtf.Tensor]:
        """Returns 1.0 where the importance is above 0, else 0.0; None without importance."""
        if self.importance is None:
            return None
        return mtf.to_float(mtf.greater(self.importance, 0.0))

    def balance(
        self,
        choices: mtf.Tensor,
        gates: mtf.Tensor,
        tokens: Optional[mtf.Tensor] = None,
        counted: Optional[mtf.Tensor] = None,
    ) -> mtf.Tensor:
        """Returns the load-balancing loss: at least 1, which means perfect balance.

        The mean over groups of num_experts * sum over experts of (the share of tokens that
        choose the expert) * (its mean gate); Shazeer et al., "Mesh-TensorFlow" (2018), and
        Fedus et al., "Switch transformers" (2021), section 2.2.

        Args:
          choices: a Tensor with dimensions [..., group, experts] of zeros and ones.
          gates: a Tensor of the same shape, through which gradients flow.
          tokens: a Tensor with dimensions [..., group], the tokens that count; all if None.
          counted: a Tensor of these dimensions, the tokens over which shares and means are taken
            without `balance_padding`; all if None.
        """
        if self.only_tokens(counted):
            return self._balance_of(choices, gates, counted)
        shape = choices.shape - self.group_dim
        # Fedus et al. (2021), equation 4. The shares of tokens are counts and have no gradient; it
        # flows through the mean gates.
        product = mtf.reduce_mean(choices, output_shape=shape) * mtf.reduce_mean(
            gates, output_shape=shape
        )
        if tokens is not None:
            product *= mtf.reduce_mean(tokens, reduced_dim=self.group_dim)
        # The mean over experts divides by their number, the loss multiplies a sum by it: hence the
        # square.
        return mtf.reduce_mean(product) * float(self.experts_dim.size**2)

    def only_tokens(self, counted: Optional[mtf.Tensor]) -> TypeGuard[mtf.Tensor]:
        """Returns whether losses are means over the counted tokens, without padding."""
        return counted is not None and not self.mixture.hparam("balance_padding")

    def _balance_of(
        self, choices: mtf.Tensor, gates: mtf.Tensor, counted: mtf.Tensor
    ) -> mtf.Tensor:
        """Returns the load-balancing loss of some tokens, a mean of groups by their numbers."""
        shape = choices.shape - self.group_dim
        # Equation 4 of Fedus et al. (2021) for each group, with shares of its counted tokens:
        # num_experts * sum over experts of (chosen / number) * (gated / number).
        number = mtf.reduce_sum(counted, reduced_dim=self.group_dim)
        chosen = mtf.reduce_sum(choices * counted, output_shape=shape)
        gated = mtf.reduce_sum(gates * counted, output_shape=shape)
        each = mtf.reduce_sum(chosen * gated, reduced_dim=self.experts_dim)
        # A group without counted tokens has 0 / 1 here, and no weight in the mean.
        return self.mean_of_groups(each / mtf.square(mtf.maximum(number, 1.0)), number) * float(
            self.experts_dim.size
        )

    def mean_of_groups(self, values: mtf.Tensor, number: mtf.Tensor) -> mtf.Tensor:
        """Returns the mean of values of groups, weighted by their numbers of tokens."""
        # Numbers may lack dimensions that values have: along these, each index counts.
        total = mtf.maximum(mtf.reduce_sum(number), 1.0) * (values.shape.size // number.shape.size)
        return mtf.reduce_sum(values * number) / total

    def total_loss(self, loss: mtf.Tensor) -> mtf.Tensor:
        """Adds the router's z-loss in training, and divides by the number of microbatches.

        The z-loss is the mean of log(z)^2 over tokens, where z is the softmax's denominator; Zoph
        et al., "ST-MoE" (2022), section 3.
        """
        coefficient = self.mixture.hparam("z_loss") if self.mixture.train else None
        if coefficient is not None:
            # log(z) is at least the largest logit, and exponentials of large logits magnify
            # rounding errors.
            z = mtf.square(mtf.reduce_logsumexp(self.logits, self.experts_dim))
            loss += coefficient * self._mean_over_tokens(z)
        number = self.mixture.num_microbatches or 1
        if number > 1:
            # Losses of microbatches are summed, and this one is to count once for the batch.
            loss /= number
        loss = mtf.cast(loss, self.inputs.dtype)
        # Balance is that of the tokens which are computed together.
        return loss if number > 1 else mean_over_microbatches(loss)

    def routing(self, dispatch: mtf.Tensor) -> Optional[Routing]:
        """Returns what the router has done; None for gatings in which experts choose.

        Args:
          dispatch: a Tensor with dimensions [..., group, experts, expert_capacity], 1 where a token
            has a place and 0 elsewhere.
        """
        if self.chosen is None:
            return None
        shape, tokens = mtf.Shape([self.experts_dim]), self.in_any_place()
        gates = mtf.softmax(self.logits, self.experts_dim)
        if tokens is None:
            number = self.logits.shape.size // self.experts_dim.size
            count = mtf.constant(gates.mesh, float(number), mtf.Shape([]), tf.float32)
        else:
            gates, count = gates * tokens, mtf.reduce_sum(tokens)
        return Routing(
            mtf.reduce_sum(self.chosen, output_shape=shape),
            mtf.reduce_sum(gates, output_shape=shape),
            count,
            mtf.reduce_sum(mtf.to_float(dispatch)),
        )

    def _mean_over_tokens(self, x: mtf.Tensor) -> mtf.Tensor:
        tokens = self.in_first_place()
        if tokens is None:
            return mtf.reduce_mean(x)
        count = mtf.maximum(mtf.reduce_sum(tokens), 1.0)
        # As in `mean_of_groups`, the importance may lack dimensions of `x`.
        return mtf.reduce_sum(x * tokens) / (count * (x.shape.size // tokens.shape.size))

    def sometimes_without_best(self) -> None:
        """Masks the best expert's logit for randomly chosen tokens, in training.

        The next best expert takes its place; or, if a temperature is set, one sampled from the
        others, whose gate is then 1.
        """
        probability = self.mixture.hparam("use_second_place_expert_prob")
        if probability is None or not self.mixture.train:
            return
        temperature = self.mixture.hparam("use_second_place_expert_prob_temp")
        best = mtf.one_hot(mtf.argmax(self.logits, self.experts_dim), self.experts_dim)
        # Not -inf, which would be NaN times the zeros of the one-hot.
        rest = self.logits + best * MASKED_LOGIT
        if temperature is not None:
            drawn = mtf.sample_with_temperature(rest, self.experts_dim, temperature)
            # The best expert is masked twice now, and only the drawn one not at all.
            rest += (1.0 - mtf.one_hot(drawn, self.experts_dim)) * MASKED_LOGIT
        # One number for each token: the choice is between all of its logits and all of the masked
        # ones.
        chance = mtf.random_uniform(self.logits.mesh, self.logits.shape - self.experts_dim)
        self.logits = mtf.where(mtf.less(chance, probability), rest, self.logits)

    def masked_out(self, x: mtf.Tensor) -> mtf.Tensor:
        """Sets `x` far below all other values for tokens of importance 0."""
        if self.importance is None:
            return x
        # Not -inf, which is NaN times 0, and in the softmax of a group of padding alone.
        return x + mtf.to_float(mtf.equal(self.importance, 0.0)) * MASKED_LOGIT


def _with_embeddings(
    x: mtf.Tensor, embeddings: Optional[mtf.Tensor], mixture: Mixture
) -> mtf.Tensor:
    mode = mixture.hparam("word_embed_mode")
    if mode is None:
        return x
    if mode not in _WORD_EMBED_MODES:
        raise ValueError(
            f"Unimplemented moe word embed mode: {mode!r} is none of "
            f"{', '.join(sorted(_WORD_EMBED_MODES))}"
        )
    if embeddings is None:
        raise ValueError(
            f"mixture of experts: word_embed_mode={mode!r} needs token_embeddings, the "
            "embeddings of the model's input ids; the Context has them as input_embeddings"
        )
    join, trains = _WORD_EMBED_MODES[mode]
    # The router's input is in float32 by now, and both must have one dtype.
    embeddings = mtf.to_float(embeddings)
    return join(x, embeddings if trains else mtf.stop_gradient(embeddings))


def switch_noise(mixture: Mixture, strict: bool, noises: Collection[str]) -> Optional[Noise]:
    """Returns a function that adds the switch policy's noise to the router's input, or None.

    Args:
      mixture: the Mixture.
      strict: whether an unknown policy is an error.
      noises: the policies whose noise the gating adds.

    Raises:
      ValueError: the policy is unknown.
    """
    policy = mixture.of_mode("switch_policy")
    if strict and policy not in _SWITCH_POLICIES:
        raise ValueError(
            f"Unknown Switch gating policy {policy!r}: it is none of {', '.join(_SWITCH_POLICIES)}"
        )
    return INPUT_NOISE[policy] if mixture.train and policy in noises else None


class Assignment:
    """Assigns expert capacity to tokens in the order of their group.

    Tokens beyond the capacity are dropped. The router is told how many chose each expert.

    Attributes:
      combine: the gates of tokens at their places, a Tensor with dimensions [..., group, experts,
        expert_capacity]; None before `place` is called.
    """

    def __init__(self, router: Router) -> None:
        self._group_dim, self._capacity_dim = router.group_dim, router.capacity_dim
        self._experts_dim, self._router = router.experts_dim, router
        self._taken: Optional[mtf.Tensor] = None
        self.combine: Any = None

    def place(self, choices: mtf.Tensor, gates: mtf.Tensor) -> mtf.Tensor:
        """Assigns places after those that are already taken.

        Args:
          choices: a Tensor with dimensions [..., group, experts], 1.0 where a token chooses an
            expert, at most one per token, and 0.0 elsewhere.
          gates: a Tensor with dimensions [..., group], the weights of the tokens' outputs.

        Returns:
          A Tensor with dimensions [..., group], 1.0 where a token got a place.
        """
        # The place of a token is the number of earlier tokens of its group that chose the same
        # expert.
        places = mtf.cumsum(choices, self._group_dim, exclusive=True)
        if self._taken is not None:
            places += self._taken
        capacity = float(self._capacity_dim.size)
        kept = choices * mtf.to_float(mtf.less(places, capacity))
        # A call chooses at most one expert for a token, so the sum is the token's place there.
        # Tokens without one have place 0 here, where `kept` makes their gate 0.
        place = mtf.reduce_sum(places * kept, reduced_dim=self._experts_dim)
        combine = mtf.einsum(
            [
                kept,
                gates,
                mtf.one_hot(mtf.to_int32(place), self._capacity_dim),
            ],
            output_shape=kept.shape + self._capacity_dim,
        )
        # Of all choices, also those that got no place: where there are such, the expert is full
        # anyway.
        taken = mtf.reduce_sum(choices, reduced_dim=self._group_dim)
        self._taken = taken if self._taken is None else self._taken + taken
        self._router.chosen = self._taken
        self.combine = combine if self.combine is None else self.combine + combine
        return mtf.reduce_sum(kept, reduced_dim=self._experts_dim)


def best_of_group(router: Router, scores: mtf.Tensor) -> tuple[mtf.Tensor, mtf.Tensor]:
    """Returns the highest scores of each expert, and their tokens as one-hot vectors.

    Args:
      router: a Router.
      scores: a Tensor with dimensions [..., group, experts].

    Returns:
      (a Tensor with dimensions [..., experts, expert_capacity], one with [..., experts,
      expert_capacity, group]); zeros where the capacity exceeds the group.
    """
    capacity_dim, group_dim = router.capacity_dim, router.group_dim
    # The minimum capacity may exceed the tokens of a small group, and top_k cannot.
    k_dim = mtf.Dimension(capacity_dim.name, min(capacity_dim.size, group_dim.size))
    values, tokens = mtf.top_k(scores, group_dim, k_dim)
    places = mtf.one_hot(tokens, group_dim)
    beyond = [0, capacity_dim.size - k_dim.size]
    if beyond[1]:
        # Gates are 0 in places beyond the tokens, so that nothing is sent there.
        values = mtf.pad(values, beyond, capacity_dim.name)
        places = mtf.pad(places, beyond, capacity_dim.name)
    return values, places
