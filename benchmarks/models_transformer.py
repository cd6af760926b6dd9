"""Models of the transformer package, of this release and the classic one."""

import functools
from typing import Any

from feeds import Feeds
from workloads import Workload, make_weight


class TransformerModel:
    """Builds the loss of a workload on a mesh; `mtf` is either package."""

    def __init__(self, mtf: Any, workload: Workload, mesh: Any, feeds: Feeds):
        self._mtf = mtf
        self._transformer = mtf.transformer.transformer
        self._layers = mtf.transformer.transformer_layers
        self._w = workload
        self._mesh = mesh
        self._feeds = feeds

    def loss(self) -> Any:
        """The scalar loss, an mtf.Tensor."""
        targets = self._import("target")
        if self._w.kind == "lm":
            inputs = self._transformer.autoregressive_inputs(targets)
        else:
            inputs = self._import("x")
        model = self._model()
        with self._feeds.named_variables(make_weight):
            return model.call_simple(inputs, targets, True)[1]

    def _import(self, key: str) -> Any:
        """The ids as a tensor of the mesh."""
        shape = self._mtf.convert_to_shape(f"batch:{self._w.batch},length:{self._w.length}")
        return self._mtf.import_tf_tensor(self._mesh, self._feeds.data(key), shape)

    def _model(self) -> Any:
        """A language model with learned positions, or T5 with a bias by distance."""
        if self._w.kind == "lm":
            return self._side(autoregressive=True)
        encoder = self._side(
            name="encoder", autoregressive=False, output_vocab_size=None, positional_embedding=False
        )
        decoder = self._side(
            name="decoder", autoregressive=True, crossed=True, positional_embedding=False
        )
        return self._transformer.Bitransformer(encoder, decoder)

    def _side(self, crossed: bool = False, **options: Any) -> Any:
        """A stack of blocks of attention layers and a feed-forward layer."""
        w, t = self._w, self._transformer
        heads: dict[str, Any] = {"num_heads": w.heads, "key_value_size": w.d_kv}
        own = {**heads, "relative_attention_type": "bias_shared"} if w.kind == "encdec" else heads
        layers = [[self._layers.SelfAttention, own]]
        if crossed:
            layers.append([self._layers.EncDecAttention, heads])
        layers.append([self._layers.DenseReluDense, {"hidden_size": w.d_ff}])
        stack = t.make_layer_stack(
            layers=layers,
            num_layers=w.layers,
            layer_stack_cls=functools.partial(
                t.LayerStack,
                sublayers_initial=[],
                sublayers_per_layer=[
                    t.sublayer_rms_norm,
                    t.sublayer_call_layer,
                    t.sublayer_residual,
                ],
                sublayers_final=[t.sublayer_rms_norm],
            ),
        )
        arguments = {
            "d_model": w.d_model,
            "input_vocab_size": w.vocab,
            "output_vocab_size": w.vocab,
            "max_length": w.length,
            **options,
        }
        return t.Unitransformer(stack, **arguments)
