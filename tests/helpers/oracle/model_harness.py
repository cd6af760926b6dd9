"""Transformers of a layer of our own, and of T5's: what `programs_transformer_*` run."""

import functools

import tensorflow.compat.v1 as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.transformer import transformer as T
from mesh_tensorflow.transformer import transformer_layers as TL

CHANNELS = "batch:x,d_model:y"
ROWS = "batch:4,length:8"
PACKED = [[1, 1, 1, 2, 2, 2, 0, 0], [1, 1, 2, 2, 3, 3, 3, 0], [1] * 8, [1, 0, 0, 0, 0, 0, 0, 0]]
POSITIONS = [[0, 1, 2, 0, 1, 2, 0, 0], [0, 1, 0, 1, 0, 1, 2, 0], [*range(8)], [0] * 8]
DELIMITED = [
    [5, 6, 1, 7, 8, 9, 1, 0],
    [3, 1, 4, 1, 5, 1, 6, 1],
    [2, 3, 4, 5, 1, 7, 8, 1],
    [9, 9, 1, 2, 1, 0, 0, 0],
]
# Names of variables whose gradients are compared.
KEPT = (
    "/embedding",
    "layer_norm/scale",
    "layer_000/rms_norm/scale",
    "block_000/layer_000/Mix/k/kernel",
    "logits/kernel",
)


class Mix(T.TransformerLayer):
    """A dense layer, then the mean of what each position sees, and of the encoder's output."""

    def __init__(self, loss=0.0):
        self._loss = loss

    def call(self, context, x):
        d = context.model.model_dim
        inner = mtf.Dimension("inner", d.size)
        y = mtf.layers.dense(
            x,
            inner,
            reduced_dims=[d],
            use_bias=False,
            name="k",
            activation=mtf.tanh,
            expert_dims=context.model.ensemble_dims,
            variable_dtype=context.variable_dtype,
        )
        if self._loss and context.losses is not None:
            context.losses.append(self._loss * mtf.reduce_mean(mtf.square(y)))
        y = self.mean_of_seen(context, y)
        y = mtf.layers.dense(
            y,
            d,
            reduced_dims=[inner],
            use_bias=False,
            name="o",
            expert_dims=context.model.ensemble_dims,
            variable_dtype=context.variable_dtype,
        )
        if context.encoder_output is not None:
            y += mtf.reduce_mean(context.encoder_output, reduced_dim=context.encoder_length_dim)
        for other in context.encoder_layer_outputs or []:
            y += mtf.reduce_mean(other, reduced_dim=other.shape.get_dim_by_name("length")) * 0.1
        return mtf.transpose(y, x.shape)

    def mean_of_seen(self, context, y):
        def memory(t):
            return mtf.rename_dimension(t, "length", "memory_length")

        length = context.length_dim
        memory_dim = mtf.Dimension("memory_length", length.size)
        seen = mtf.ones(context.mesh, mtf.Shape([length, memory_dim]))
        if context.read_priority is not None:
            later = mtf.greater_equal(context.read_priority, memory(context.write_priority))
            seen = mtf.cast(later, tf.float32)
        for ids in (context.sequence_id, context.subsequence_id):
            if ids is not None:
                seen *= mtf.cast(mtf.equal(ids, memory(ids)), tf.float32)
        seen = mtf.cast(seen / length.size, y.dtype)
        return mtf.einsum([seen, memory(y)], reduced_dims=[memory_dim])


SUBLAYERS = {
    "sublayers_initial": [T.sublayer_dropout],
    "sublayers_per_layer": [
        T.sublayer_rms_norm,
        T.sublayer_call_layer,
        T.sublayer_dropout,
        T.sublayer_residual,
    ],
    "sublayers_final": [T.sublayer_rms_norm, T.sublayer_dropout],
}


def stack(cls=T.LayerStack, layers=(Mix,), num_layers=2, block_scope=True, **kwargs):
    kwargs = kwargs if "norm_epsilon" in kwargs else {**SUBLAYERS, **kwargs}
    return T.make_layer_stack(
        layers=list(layers),
        layer_stack_cls=functools.partial(cls, **kwargs),
        num_layers=num_layers,
        block_scope=block_scope,
    )


def unitransformer(layer_stack=None, **kwargs):
    arguments = {
        "d_model": 8,
        "input_vocab_size": 14,
        "output_vocab_size": 14,
        "autoregressive": True,
        "max_length": 8,
        "vocab_divisor": 16,
        **kwargs,
    }
    return T.Unitransformer(layer_stack or stack(), **arguments)


def bitransformer(cls=T.Bitransformer, encoder=None, decoder=None, **kwargs):
    encoder = unitransformer(
        name="encoder", **{"output_vocab_size": None, "autoregressive": False, **(encoder or {})}
    )
    decoder = unitransformer(
        name="decoder", **{"shared_embedding_and_softmax_weights": True, **(decoder or {})}
    )
    return cls(encoder, decoder, **kwargs)


def given(p, values, shape=ROWS):
    return mtf.import_tf_tensor(p.mesh, tf.constant(values, tf.int32), mtf.convert_to_shape(shape))


def outcome(p, logits, loss, **more):
    """Returns logits, loss and some of the loss's gradients, and fills the variables."""
    outputs = {"logits": logits, **more}
    if loss is not None:
        outputs["loss"] = loss
        grads = p.loss_gradients(loss)
        outputs.update({k: g for k, g in grads.items() if k.endswith(KEPT)})
    p.fill_variables()
    return outputs


def language_model(p, call=None, targets=None, **kwargs):
    """A model that predicts the next id; some targets are negative or 0."""
    targets = p.input("ids", ROWS, 16) - 2 if targets is None else targets
    inputs = T.autoregressive_inputs(targets, sequence_id=(call or {}).get("sequence_id"))
    logits, loss = unitransformer(**kwargs).call_simple(inputs, targets, True, **(call or {}))
    return outcome(p, logits, loss)


def sequence_to_sequence(p, model, call=None, target_rows="batch:4,length:6"):
    inputs, targets = p.input("inputs", ROWS, 14), p.input("targets", target_rows, 14)
    logits, loss = model.call_simple(inputs, targets, True, **(call or {}))
    return outcome(p, logits, loss)


def usual_layers(decoder, dropout_rate=0.0, **kwargs):
    """Returns the layers of T5, small."""
    attention = {"num_heads": 2, "key_value_size": 4, "dropout_rate": dropout_rate}
    layers = [(TL.SelfAttention, {**attention, **kwargs}), (TL.DenseReluDense, {"hidden_size": 12})]
    return [*layers[:1], (TL.EncDecAttention, attention), *layers[1:]] if decoder else layers
