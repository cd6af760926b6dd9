"""Decoders: the model of a family and the table of its weights, made of one description.

A family fills in a `Decoder` by the fields of its config.json. What is built of it is a
`Unitransformer`, as gin files make it, with the variables that such a model has.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Optional

import mesh_tensorflow.ops_with_redefined_builtins as mtf
from mesh_tensorflow._core.errors import reason
from mesh_tensorflow.layers import RotaryEmbedding
from mesh_tensorflow.models._family import Config, Form, Weight
from mesh_tensorflow.transformer import moe, transformer, transformer_layers, vocab_embeddings

# By Hugging Face's names of activations: functions of the language, or their names.
# `mtf.gelu` is by default the approximation by tanh, with which GPT-2 and Gemma were trained.
_ACTIVATIONS: dict[str, Any] = {
    "gelu": functools.partial(mtf.gelu, approximate=False),
    "gelu_fast": "gelu",
    "gelu_new": "gelu",
    "gelu_pytorch_tanh": "gelu",
    "relu": "relu",
    "silu": "silu",
}
_LAYER_NORM = "true_layer_norm/layer_prepostprocess/layer_norm/layer_norm"
# Tokens of a group are dispatched to experts together, each of which has room for all of them: the
# table of who goes where grows with the square of this number.
_GROUP = 64
# By attributes of a Decoder: the fields of config.json that most families have them in.
_FIELDS = {
    "blocks": "num_hidden_layers",
    "d_model": "hidden_size",
    "d_ff": "intermediate_size",
    "d_kv": "head_dim",
    "heads": "num_attention_heads",
    "groups": "num_key_value_heads",
    "vocab": "vocab_size",
    "max_length": "max_position_embeddings",
    "activation": "hidden_act",
    "epsilon": "rms_norm_eps",
}
# What is computed in no family, where its field says something else.
_MUST_BE: dict[str, Any] = {
    "lm_head_bias": False,
    "rope_interleaved": False,
    "full_attn_mod": 1,
    "interpolate_factor": 1,
}
_EMBEDDING = "transformer/embedding"
_INNER = "inner_vocab"  # the channels of its rows, where these are projected
# Rotary positions have tables of half of them, which are made before any weight is looked at.
_MOST_CHANNELS = 65_536  # of a head
_WINDOW, _WHOLE = "sliding_attention", "full_attention"  # the types of layers


@dataclasses.dataclass(frozen=True)
class Experts:
    """Feed-forward layers of which a router chooses some for each token.

    Attributes:
      number: how many there are.
      per_token: how many of them a token goes to.
      d_ff: the number of hidden units of each.
      loss: the coefficient of the loss that balances them.
      normalized: whether the gates of a token's experts are divided by their sum.
      shared: the number of hidden units of a further expert, which all tokens go to, times the
        sigmoid of a gate; 0 for none.
    """

    number: int
    per_token: int
    d_ff: int
    loss: float
    normalized: bool = True
    shared: int = 0


@dataclasses.dataclass(frozen=True)
class Decoder:
    """What a language model is built of.

    Attributes:
      config: the Config, which errors name.
      names: Hugging Face's name of the module of each part, without ".weight" and ".bias": of
        "embedding", "final_norm" and "logits" (also "positions", and with `embedding_size`
        "embedding_in" and "embedding_out", its projections); and of the parts of a layer,
        after `layer`: "norm" and "post_norm" of attention, "q", "k", "v" and "o", "q_norm" and
        "k_norm"; "ff_norm" and "ff_post_norm", "wi" (gated: "wi_0" and "wi_1") and "wo". Norms are
        there that have a name. "qkv" and "wi_0_1" are names of several in one tensor. With
        experts "{}" is their number in "wi_0", "wi_1" and "wo", and there are "router" and, of an
        expert that all tokens go to, "shared_wi_0", "shared_wi_1", "shared_wo" and "shared_gate";
        those of `dense` blocks are "dense_wi_0", "dense_wi_1" and "dense_wo".
      layer: how names of a layer begin, with "{}" for its number.
      blocks: the number of blocks, each of attention and feed-forward.
      d_model: the number of channels between layers.
      d_ff: the number of hidden units.
      d_kv: the number of channels of a head.
      heads: the number of heads of queries.
      groups: that of heads of keys and values, a divisor of `heads`.
      vocab: the number of ids.
      max_length: the number of positions that the model was made for.
      activation: Hugging Face's name of the function.
      gated: whether hidden units are products of two dense layers, one of them activated.
      epsilon: that of norms.
      rms: whether norms divide by the root mean square, rather than being layer norms with a bias.
      norms_sums: whether norms behind layers are of their sums with their inputs, as in the first
        transformers, rather than of what is added to these.
      unit_offset: whether scales of norms are 1 plus the variable.
      qk_norm_over_heads: whether norms of queries and keys are over all heads.
      parallel: whether attention and feed-forward of a block have the same input, and are added.
      rotary: the RotaryEmbedding of each window, by the windows that blocks have; empty for none.
      unturned: the numbers of blocks that have none, though others have.
      windows: how many positions the queries of each block see, their own the last; 0 for all.
      biases: the projections of attention that have biases, letters of "qkvo".
      ff_biases: whether feed-forward layers have biases.
      logits_bias: whether the logits have one.
      query_scale: what queries are multiplied by; d_kv ** -0.5 if None.
      soft_cap: that of logits of attention, or None.
      logits_soft_cap: that of the model's logits, or None.
      scaled_embedding: whether embeddings are multiplied by the square root of d_model.
      embedding_size: the number of channels of the embedding's rows, which are projected to
        d_model, and from there for logits, which are tied; d_model, without projections, if None.
      position_offset: the row of the first position in the table of positions.
      tied: whether the logits are of the embedding's variable.
      transposed: whether files have kernels as [outputs, inputs], as PyTorch, which computes x W^T.
      by_heads: whether "qkv" has the three behind each other for each head, not as wholes.
      experts: the Experts of each block in place of its feed-forward layer, or None.
      dense: the numbers of blocks that have a feed-forward layer, though others have experts.
      prefix: how names begin, or do not begin in some folders.
      ignored: a regular expression of names that folders may have beside the weights.
    """

    config: Config
    names: Mapping[str, str]
    layer: str
    blocks: int
    d_model: int
    d_ff: int
    d_kv: int
    heads: int
    groups: int
    vocab: int
    max_length: int
    activation: str
    gated: bool
    epsilon: float
    rms: bool = True
    norms_sums: bool = False
    unit_offset: bool = False
    qk_norm_over_heads: bool = False
    parallel: bool = False
    rotary: Mapping[int, RotaryEmbedding] = dataclasses.field(default_factory=dict)
    unturned: Sequence[int] = ()
    windows: Sequence[int] = ()
    biases: str = ""
    ff_biases: bool = False
    logits_bias: bool = False
    query_scale: Optional[float] = None
    soft_cap: Optional[float] = None
    logits_soft_cap: Optional[float] = None
    scaled_embedding: bool = False
    embedding_size: Optional[int] = None
    position_offset: int = 0
    tied: bool = False
    transposed: bool = True
    by_heads: bool = False
    experts: Optional[Experts] = None
    dense: Sequence[int] = ()
    prefix: str = ""
    ignored: str = r"(?!)"

    @classmethod
    def of(
        cls,
        config: Config,
        names: Mapping[str, str],
        fields: Optional[Mapping[str, str]] = None,
        **options: Any,
    ) -> Decoder:
        """Returns the Decoder of a config.json, whose usual fields are read here.

        Args:
          config: the Config.
          names: see the attributes.
          fields: by attributes, the names of fields that the family calls otherwise than Llama.
          **options: the other attributes, or what is not read of a field.

        Raises:
          ValueError: a field is missing, or has a value that no family knows.
        """
        for name, value in _MUST_BE.items():
            config.must_be(name, value)
        config.get("is_decoder")  # they are, whatever it says
        named = {**_FIELDS, **(fields or {})}
        heads, d_model = config.number(named["heads"]), config.number(named["d_model"])
        readers: dict[str, Callable[[], Any]] = {
            "blocks": lambda: config.parts(named["blocks"]),
            "d_ff": lambda: config.number(named["d_ff"]),
            "d_kv": lambda: config.number(named["d_kv"], max(1, d_model // heads)),
            "groups": lambda: config.number(named["groups"], heads),
            "vocab": lambda: config.number(named["vocab"]),
            # Llama's, whose first folders do not say it.
            "max_length": lambda: config.number(named["max_length"], 2048),
            "activation": lambda: config.get(named["activation"], "silu"),
            "gated": lambda: True,
            "epsilon": lambda: config.real(named["epsilon"], 1e-6),
            "biases": lambda: "qkvo" if config.is_true("attention_bias", False) else "",
            "ff_biases": lambda: config.must_be("mlp_bias", False),
            "tied": lambda: config.is_true("tie_word_embeddings", False),
        }
        # What the family gives is not read: its field may be missing, or mean something else.
        read = {name: reader() for name, reader in readers.items() if name not in options}
        options.setdefault("ignored", r"\.rotary_emb\.inv_freq$")  # tables that older folders have
        return cls(config, names, heads=heads, d_model=d_model, **{**read, **options})

    @property
    def form(self) -> Form:
        """The Form of the model.

        Raises:
          ValueError: a field of config.json does not fit.
        """
        if self.heads % self.groups:
            raise ValueError(
                f"{self.config.path}: config.json has num_attention_heads={self.heads}, which is "
                f"no multiple of num_key_value_heads={self.groups}"
            )
        # Here, and not when the model is built, so that from_pretrained tells of it.
        activation_of(self.config, self.activation)
        self._check_pairs()
        self._check()
        # Files of older programs have the embedding twice.
        copy = f"{self.names.get('logits', 'lm_head')}.weight"
        return Form(
            self._model,
            [*self._outer(), *(w for number in range(self.blocks) for w in self._of_block(number))],
            self._sizes,
            self.prefix,
            self.ignored,
            copies={copy: self._embedding} if self.tied else {},
        )

    def _check_pairs(self) -> None:
        """Checks that channels which rotary positions turn are pairs."""
        for rotary in self.rotary.values():
            turned = rotary.turned_channels(self.d_kv)
            if turned % 2 or not turned:
                raise ValueError(
                    f"{self.config.path}: config.json has heads of {self.d_kv} channels, of which "
                    f"positions turn {turned}; these are turned in pairs, so that their number "
                    "must be even, and not 0"
                )

    def _check(self) -> None:
        """Checks what no config.json can say, but whoever adds a family."""
        without = [
            str(w) for w in sorted(set(self._windows)) if self.rotary and w not in self.rotary
        ]
        mistakes = {
            f"windows has {len(self._windows)} entries for blocks={self.blocks}": (
                len(self._windows) != self.blocks
            ),
            f"rotary has none for the windows {', '.join(without)}": bool(without),
            "logits_bias is for logits that are not tied": self.tied and self.logits_bias,
            "embedding_size is for logits that are tied": (
                self.embedding_size is not None and not self.tied
            ),
            "layer norms stand before a layer or behind it, not both; leave one of them out": (
                not self.rms and "norm" in self.names and "post_norm" in self.names
            ),
        }
        reasons = [text for text, wrong in mistakes.items() if wrong]
        if reasons:
            raise ValueError(f"Decoder of {self.config.path}: {'; '.join(reasons)}")

    # -- the model

    def _model(self, layout: Any, mesh_shape: Any) -> transformer.Unitransformer:
        norm, post = self._norm("rms_norm"), self._norm("post_rms_norm")
        # In the order in which they are applied to the input of a layer.
        around: list[Any] = [transformer.sublayer_call_layer, transformer.sublayer_residual]
        # In parallel, a layer norm for each of the two is within the layer; see `_layers`.
        if "norm" in self.names and not self._two_norms:
            around.insert(0, norm)
        if "post_norm" in self.names:
            around.insert(2 if self.norms_sums else -1, post)
        stack = functools.partial(
            transformer.LayerStack,
            sublayers_initial=[],
            sublayers_per_layer=around,
            sublayers_final=[norm] if "final_norm" in self.names else [],
        )
        period = self._period
        layers = [layer for number in range(period) for layer in self._layers(number)]
        cls: Any = transformer.UnscaledVocabEmbedding
        # What is looked up is scaled, and not the variable, which is that of the logits, too.
        if self.scaled_embedding:
            cls = functools.partial(
                transformer.VocabEmbedding, scale_variable_like_classifier_weights=True
            )
        if self.embedding_size is not None:
            cls = functools.partial(
                vocab_embeddings.FactorizedVocabEmbedding,
                inner_dimension_size=self.embedding_size,
                projects_back=True,
            )
        return transformer.Unitransformer(
            transformer.make_layer_stack(
                layers=layers, layer_stack_cls=stack, num_layers=self.blocks // period
            ),
            d_model=self.d_model,
            input_vocab_size=self.vocab,
            output_vocab_size=self.vocab,
            autoregressive=True,
            max_length=self.max_length,
            shared_embedding_and_softmax_weights=self.tied,
            positional_embedding="positions" in self.names,
            vocab_divisor=1,  # the vocabulary of the file, where the classic rounds up to 128
            # The loss that families were trained with, and Hugging Face returns.
            z_loss=0.0,
            vocab_embedding_cls=cls,
            layout=layout,
            mesh_shape=mesh_shape,
            position_offset=self.position_offset,
            logits_bias=self.logits_bias,
            logits_soft_cap=self.logits_soft_cap,
        )

    def _norm(self, name: str) -> Any:
        if not self.rms:
            return functools.partial(transformer.sublayer_true_layer_norm, epsilon=self.epsilon)
        return functools.partial(
            transformer.sublayer_rms_norm,
            epsilon=self.epsilon,
            name=name,
            unit_offset=self.unit_offset,
        )

    @property
    def _two_norms(self) -> bool:
        return self.parallel and "ff_norm" in self.names

    @property
    def _period(self) -> int:
        """After how many blocks their kinds repeat: these are one block of the model."""
        # A stack repeats one block, so what alternates, as Gemma's windows do, is within it.
        kinds = [
            (window, number in self.unturned, number in self.dense)
            for number, window in enumerate(self._windows)
        ]
        return next(
            n
            for n in range(1, self.blocks + 1)
            if self.blocks % n == 0 and kinds == kinds[:n] * (self.blocks // n)
        )

    @property
    def _windows(self) -> list[int]:
        return list(self.windows) or [0] * self.blocks

    def _layers(self, number: int) -> list[Any]:
        """Returns the layers of a block, as `make_layer_stack` takes them."""
        first = [self._attention(number), self._attention_arguments(number)]
        second = self._feed_forward(number)
        if not self.parallel:
            return [first, second]
        both = {
            "layer_classes": [functools.partial(cls, **kwargs) for cls, kwargs in (first, second)],
            "divided": False,
            "norm": self._norm("rms_norm") if self._two_norms else None,
        }
        return [[transformer_layers.ParallelLayer, both]]

    def _attention(self, number: int) -> Any:
        window = self._windows[number]
        return transformer_layers.LocalSelfAttention if window else transformer_layers.SelfAttention

    def _attention_arguments(self, number: int) -> dict[str, Any]:
        window = self._windows[number]
        arguments: dict[str, Any] = {
            "num_heads": self.heads,
            "num_memory_heads": 0 if self.groups == self.heads else self.groups,
            "key_value_size": self.d_kv,
            "combine_dims": False,  # heads stay a dimension, which layouts can split
            # Weights of files are not scaled: queries are, as the model was trained.
            "fold_scaling_into_initializer": False,
            "query_scale": self.query_scale,
            "rotary": None if number in self.unturned else self.rotary.get(window),
            "biases": self.biases,
        }
        if window:
            arguments["radius"] = window
        if self.soft_cap is not None:
            arguments["attention_kwargs"] = {"soft_cap": self.soft_cap}
        if "q_norm" in self.names:
            arguments["qk_norm_epsilon"] = self.epsilon
            arguments["qk_norm_over_heads"] = self.qk_norm_over_heads
            arguments["qk_norm_unit_offset"] = self.unit_offset
        return arguments

    def _experts(self, number: int) -> Optional[Experts]:
        return None if number in self.dense else self.experts

    def _feed_forward(self, number: int) -> list[Any]:
        activation = activation_of(self.config, self.activation)
        if self.gated:
            activation = [activation, "linear"]
        experts = self._experts(number)
        if experts is None:
            options: dict[str, Any] = {"hidden_size": self.d_ff, "use_bias": self.ff_biases}
            return [transformer_layers.DenseReluDense, {**options, "activation": activation}]
        options = {
            "num_experts": experts.number,
            "hidden_size": experts.d_ff,
            "moe_gating": "top_n",
            "top_n_num_experts_per_token": experts.per_token,
            "top_n_normalized": experts.normalized,
            "shared_hidden_size": experts.shared,
            "shared_gate": True,
            "loss_coef": experts.loss,
            "group_size": _GROUP,
            # Weights may be trained on another mesh than the model's.
            "groups_in_rows": True,
            # Room for all tokens of a group at each expert, so that none is ever dropped.
            "capacity_factor_train": float(experts.number),
            "capacity_factor_eval": float(experts.number),
            # All of a token's experts count, as these routers choose them; by default the classic
            # draws whether the second one does.
            "second_policy_train": "all",
            "second_policy_eval": "all",
            "balance_padding": False,
        }
        return [moe.MoE1D, {**options, "activation": activation}]

    # -- its weights

    @property
    def _sizes(self) -> dict[str, int]:
        sizes = {
            "vocab": self.vocab,
            "d_model": self.d_model,
            "d_ff": self.d_ff,
            "d_kv": self.d_kv,
            # Of grouped heads, those of the keys; a single one has no dimension of its own.
            "heads": self.groups if 1 < self.groups < self.heads else self.heads,
            "query_heads": self.heads // self.groups,
            "max_length": self.max_length + self.position_offset,
        }
        if self.experts is not None:
            sizes |= {"experts": self.experts.number, "expert_hidden": self.experts.d_ff}
            # The gate's one output is an axis of files, too.
            sizes |= {self._shared_d_ff: self.experts.shared, "shared_gate": 1}
        if self.embedding_size is not None:
            sizes[_INNER] = self.embedding_size
        return sizes

    @property
    def _embedding(self) -> str:
        """The name of the variable of the embedding."""
        return _EMBEDDING if self.embedding_size is None else f"{_EMBEDDING}1"

    @property
    def _shared_d_ff(self) -> str:
        """The name of the units of the expert of all tokens, which the model calls d_ff."""
        # In the table each name has one size.
        return "shared_d_ff" if self.dense else "d_ff"

    @property
    def _heads(self) -> dict[str, str]:
        """The dimensions of each projection of attention, beside d_model, joined by "*"."""
        # As attention layers have them: queries that share a head of the keys are a dimension.
        query, memory = "heads*query_heads*d_kv", "heads*d_kv"
        if self.groups == self.heads:
            query = memory
        elif self.groups == 1:
            query, memory = memory, "d_kv"
        return {"q": query, "k": memory, "v": memory, "o": query}

    def _outer(self) -> list[Weight]:
        names = self.names
        if self.embedding_size is None:
            weights = [_table(_EMBEDDING, "vocab", names["embedding"])]
        else:
            weights = [_table(self._embedding, "vocab", names["embedding"], _INNER)]
            weights += self._dense(f"{_EMBEDDING}2", names["embedding_in"], _INNER, ["d_model"])
            weights += self._dense(f"{_EMBEDDING}3", names["embedding_out"], "d_model", [_INNER])
        if "positions" in names:
            ours = "transformer/positional_embedding"
            weights.append(_table(ours, "max_length", names["positions"]))
        if "final_norm" in names:
            weights += self._norms("transformer", "rms_norm", names["final_norm"])
        if not self.tied:
            # It is [outputs, inputs] also where kernels of layers are not: no part of a layer.
            weights += self._dense(
                "transformer/logits/kernel", names["logits"], "d_model", ["vocab"], always=True
            )
        if self.logits_bias:
            ours = "transformer/logits/bias"
            weights.append(_vector(ours, f"{names['logits']}.bias", "vocab"))
        return weights

    def _of_block(self, number: int) -> list[Weight]:
        period = self._period
        # Names as the stack gives them: block after block, and in each layer after layer.
        per_block = 1 if self.parallel else 2
        block = f"transformer/block_{number // period:03d}"
        at = per_block * (number % period)
        scopes = [f"{block}/layer_{at + i:03d}" for i in range(per_block)]
        first, second = scopes[0], scopes[-1]
        attention, mlp = (
            f"{first}/{self._attention(number).__name__}",
            f"{second}/{self._feed_forward(number)[0].__name__}",
        )
        norms = {"norm": first, "ff_norm": second}
        if self.parallel:
            parallel = f"{first}/ParallelLayer/parallel_layer"
            attention, mlp = f"{parallel}_0", f"{parallel}_1"
            if self._two_norms:
                norms = {"norm": attention, "ff_norm": mlp}
        begin = self.layer.format(number)
        names = {part: begin + name for part, name in self.names.items()}
        weights: list[Weight] = []
        for part, scope in norms.items():
            if part in names:
                weights += self._norms(scope, "rms_norm", names[part])
            post = part.replace("norm", "post_norm")
            if post in names:
                weights += self._norms(scope, "post_rms_norm", names[post])
        weights += self._of_attention(attention, names)
        weights += self._of_feed_forward(mlp, names, self._experts(number))
        return weights

    def _norms(self, scope: str, name: str, theirs: str) -> list[Weight]:
        if self.rms:
            return [_vector(f"{scope}/{name}/scale", f"{theirs}.weight")]
        return [
            _vector(f"{scope}/{_LAYER_NORM}_{ours}", f"{theirs}.{kind}")
            for ours, kind in (("scale", "weight"), ("bias", "bias"))
        ]

    def _of_attention(self, scope: str, names: Mapping[str, str]) -> list[Weight]:
        heads = self._heads
        # (the variable, Hugging Face's name, inputs, outputs, which of these)
        rows: list[tuple[str, str, str, list[str], int]]
        if "qkv" in names:
            # Three variables, though files have one tensor: layouts split heads, of which queries
            # may have more than keys.
            outputs = [heads[name] for name in "qkv"]
            rows = [(name, names["qkv"], "d_model", outputs, i) for i, name in enumerate("qkv")]
        else:
            rows = [(name, names[name], "d_model", [heads[name]], 0) for name in "qkv"]
        rows.append(("o", names["o"], heads["o"], ["d_model"], 0))
        weights: list[Weight] = []
        for name, theirs, inputs, outputs, part in rows:
            bias = f"{scope}/{name}_bias" if name in self.biases else None
            weights += self._dense(f"{scope}/{name}", theirs, inputs, outputs, bias, part)
        for name in "qk":
            if f"{name}_norm" in names:
                # OLMo 2 has scales for each head; those of Qwen 3 and Gemma 3 are shared by all.
                dims = heads[name] if self.qk_norm_over_heads else "d_kv"
                theirs = f"{names[f'{name}_norm']}.weight"
                weights.append(_vector(f"{scope}/{name}_norm", theirs, dims))
        return weights

    def _of_feed_forward(
        self, scope: str, names: Mapping[str, str], experts: Optional[Experts]
    ) -> list[Weight]:
        if experts is None:
            return self._of_units(scope, _names_with_prefix("dense_", names) or names, "d_ff")
        weights = [
            Weight(
                f"{scope}/top_n_gating/kernel",
                "d_model experts",
                f"{names['router']}.weight",
                "experts d_model",
            ),
            *(_of_each_expert(weight) for weight in self._of_units(scope, names, "expert_hidden")),
        ]
        # The expert of all tokens is stored as a layer without experts, in a scope of its own.
        if experts.shared:
            scope, shared = f"{scope}/shared", _names_with_prefix("shared_", names)
            weights += self._of_units(scope, shared, self._shared_d_ff)
            gate = f"{scope}/gate/kernel"
            weights += self._dense(gate, shared["gate"], "d_model", ["shared_gate"])
        return weights

    def _of_units(self, scope: str, names: Mapping[str, str], hidden: str) -> list[Weight]:
        """Returns the Weights of a feed-forward layer; `hidden` is the dimension of its units."""
        # (the variable's scope, Hugging Face's name, inputs, outputs, which of these)
        rows: list[tuple[str, str, str, list[str], int]] = []
        # Phi 3 has gates and units behind each other in one tensor.
        if "wi_0_1" in names:
            rows += [(f"wi_{i}", names["wi_0_1"], "d_model", [hidden] * 2, i) for i in range(2)]
        else:
            kinds = ["wi_0", "wi_1"] if self.gated else ["wi"]
            rows += [(kind, names[kind], "d_model", [hidden], 0) for kind in kinds]
        rows.append(("wo", names["wo"], hidden, ["d_model"], 0))
        weights: list[Weight] = []
        for kind, theirs, inputs, outputs, part in rows:
            bias = f"{scope}/{kind}/bias" if self.ff_biases else None
            weights += self._dense(f"{scope}/{kind}/kernel", theirs, inputs, outputs, bias, part)
        return weights

    def _dense(
        self,
        ours: str,
        theirs: str,
        inputs: str,
        outputs: Sequence[str],
        bias: Optional[str] = None,
        part: int = 0,
        always: bool = False,
    ) -> list[Weight]:
        """Returns the Weights of a dense layer.

        Args:
          ours: the name of its kernel, [inputs..., outputs...].
          theirs: Hugging Face's name of the module.
          inputs: the names of the input's dimensions, joined by "*".
          outputs: the same of the outputs of all layers that are one tensor in the file.
          bias: the name of its bias, or None.
          part: which of these layers it is.
          always: whether the kernel is [outputs, inputs] whatever `transposed` says.
        """
        axis = outputs[0] if len(outputs) == 1 else f"[{'|'.join(outputs)}]"
        # GPT-NeoX has the query, key and value of one head, then those of the next.
        if len(outputs) > 1 and self.by_heads:
            axis = f"heads*[{'|'.join(['d_kv'] * len(outputs))}]"
        stored = f"{axis} {inputs}" if self.transposed or always else f"{inputs} {axis}"
        dims = f"{inputs} {outputs[part]}".replace("*", " ")
        weights = [Weight(ours, dims, f"{theirs}.weight", stored, part)]
        if bias is not None:
            dims = outputs[part].replace("*", " ")
            weights.append(Weight(bias, dims, f"{theirs}.bias", axis, part))
        return weights


def _vector(ours: str, theirs: str, dims: str = "d_model") -> Weight:
    """Returns a Weight that files have as one axis."""
    return Weight(ours, dims.replace("*", " "), theirs, dims)


def _table(ours: str, rows: str, theirs: str, columns: str = "d_model") -> Weight:
    dims = f"{rows} {columns}"
    return Weight(ours, dims, f"{theirs}.weight", dims)


def _names_with_prefix(begin: str, names: Mapping[str, str]) -> dict[str, str]:
    """Returns the names of parts that begin like that, by what follows."""
    return {part[len(begin) :]: n for part, n in names.items() if part.startswith(begin)}


def _of_each_expert(weight: Weight) -> Weight:
    """Returns the Weight of all experts, made of that of one."""
    return weight._replace(dims=f"experts {weight.dims}", stored=f"experts {weight.stored}")


def activation_of(config: Config, name: str) -> Any:
    """Returns a function of the language, or its name, as feed-forward layers take it.

    Args:
      config: the Config, which the error names.
      name: Hugging Face's name of it.

    Raises:
      ValueError: it is not known.
    """
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        raise ValueError(
            f"{config.path}: config.json has the activation {name!r}, which is none of "
            f"{', '.join(_ACTIVATIONS)}"
        )
    return _ACTIVATIONS[name]


def windows_of(config: Config, size: int, usual: Callable[[int], bool]) -> list[int]:
    """Returns how many positions the queries of each block see; 0 for all.

    Args:
      config: a Config, whose `layer_types` say which blocks have a window.
      size: the size of windows.
      usual: returns whether the block of a number has one where `layer_types` are missing.

    Raises:
      ValueError: `layer_types` are not such a list.
    """
    blocks = config.parts("num_hidden_layers")
    types = config.get("layer_types", [_WINDOW if usual(i) else _WHOLE for i in range(blocks)])
    sizes = {_WINDOW: size, _WHOLE: 0}
    is_list = isinstance(types, list) and len(types) == blocks
    if not is_list or any(name not in sizes for name in types):
        raise ValueError(
            f"{config.path}: config.json has layer_types={types!r}, which is no list of "
            f"num_hidden_layers={blocks} names, each {_WINDOW!r} or {_WHOLE!r}"
        )
    return [sizes[name] for name in types]


def rotary_of(
    config: Config, key_size: int, window: int = 0, partial: bool = False
) -> RotaryEmbedding:
    """Returns the rotary positions that config.json describes.

    Args:
      config: a Config.
      key_size: the number of channels of a head.
      window: that of the blocks that have them, as some families' windows have others.
      partial: whether the family knows positions that turn a part of the channels.

    Raises:
      ValueError: they are of a kind that is not known, or a number is none.
    """
    if key_size > _MOST_CHANNELS:
        raise ValueError(
            f"{config.path}: config.json has heads of {key_size} channels, by head_dim or "
            f"hidden_size, and no model has more than {_MOST_CHANNELS}"
        )
    # Since release 5 of transformers one field has the base, the share of channels and the
    # scaling; before, each had one.
    parameters, scaling = (_object(config, name) for name in ("rope_parameters", "rope_scaling"))
    base, fraction = (config.get(name) for name in ("rope_theta", "partial_rotary_factor"))
    try:
        if _WHOLE in parameters or _WINDOW in parameters:
            # Of each type of layers; those with a window see no positions to scale.
            own = dict(parameters.get(_WINDOW if window else _WHOLE) or {})
            numbers = own if window else {**own, **scaling}
        else:
            # Users add the older field to a folder for longer texts, as model cards tell them to,
            # whichever release wrote it; so it goes before.
            numbers = scaling or parameters
        # 10000 is that of Su et al., "RoFormer" (2021), whose pair i of d channels turns by
        # position * base ** (-2 i / d); scalings change these frequencies.
        base = next(x for x in (numbers.pop("rope_theta", None), base, 10000.0) if x is not None)
        own = numbers.pop("partial_rotary_factor", None)
        fraction = next((x for x in (own, fraction) if x is not None), 1.0)
        if not partial and fraction != 1:
            # transformers has the field in all families, of which most do not look at it.
            raise ValueError(
                f"partial_rotary_factor={fraction!r} is not known for this family: only 1.0 is"
            )
        _complete(config, numbers)
        rotary = RotaryEmbedding(base, fraction, scaling=numbers)
        for length in (0, 2**40):  # numbers that are none are found here
            rotary.frequencies(rotary.turned_channels(key_size), length=length)
        return rotary
    except (TypeError, ValueError) as e:
        text = reason(e)  # without the lines that gin adds
        raise ValueError(f"{config.path}: config.json has unknown rotary positions. {text}") from e


def _object(config: Config, name: str) -> dict[str, Any]:
    """Returns a copy of a field of rotary positions; empty if it is missing."""
    value = config.get(name, {})
    if not isinstance(value, dict):
        raise ValueError(
            f"{config.path}: config.json has unknown rotary positions. {name}={value!r} is no "
            'object, such as {"rope_type": "default"}'
        )
    return dict(value)


def _complete(config: Config, scaling: dict[str, Any]) -> None:
    """Adds what numbers of a scaling follow from other fields of config.json."""
    original = "original_max_position_embeddings"
    known = config.get(original)
    kind = scaling.pop("rope_type", None) or scaling.pop("type", None)
    scaling.pop("type", None)
    if kind == "su" or (kind == "yarn" and config.get("model_type") == "phi3"):
        kind = "longrope"  # older names of it in Phi's folders
    if kind == "dynamic":
        scaling[original] = config.number("max_position_embeddings")
    # Both tell positions of training from further ones: Peng et al., "YaRN" (2023), by how often a
    # pair turns within that length; Ding et al., "LongRoPE" (2024), by a list of divisors for each.
    if kind in ("yarn", "longrope"):
        length = config.number("max_position_embeddings")
        scaling.setdefault(original, length if known is None else known)
        # By it sines and cosines are scaled; Phi's folders tell it by the two lengths alone.
        if scaling.get("factor") is None:
            scaling["factor"] = length / scaling[original]
    if kind == "yarn":
        scaling.pop("finetuned", None)  # how it was trained, as the first folders with it say
        # DeepSeek's two numbers tell it: sharper logits, and how much of that the scale of queries
        # has already. Without both, it follows from the factor alone.
        sharp, known = (scaling.pop(name, None) for name in ("mscale", "mscale_all_dim"))
        if sharp and known and scaling.get("attention_factor") is None:
            grown = 0.1 * math.log(max(1.0, scaling["factor"]))
            scaling["attention_factor"] = (1 + sharp * grown) / (1 + known * grown)
    if kind is not None:
        scaling["rope_type"] = kind
