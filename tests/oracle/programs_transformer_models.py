"""Programs: models of mesh_tensorflow.transformer.transformer, with a layer of our own."""

import functools

import gin
import tensorflow.compat.v1 as tf
from oracle_runner import table

import mesh_tensorflow as mtf
from mesh_tensorflow.transformer import transformer as T
from mesh_tensorflow.transformer import transformer_layers as TL

TRANSFORMER_MODELS, model = table("batch:x,vocab:y", gradients=False, tolerance=1e-4)
CHANNELS = "batch:x,d_model:y"
ROWS = "batch:4,length:8"
PACKED = [[1, 1, 1, 2, 2, 2, 0, 0], [1, 1, 2, 2, 3, 3, 3, 0], [1] * 8, [1, 0, 0, 0, 0, 0, 0, 0]]
POSITIONS = [[0, 1, 2, 0, 1, 2, 0, 0], [0, 1, 0, 1, 0, 1, 2, 0], [*range(8)], [0] * 8]
DELIMITED = [
    [5, 6, 1, 7, 8, 9, 1, 0], [3, 1, 4, 1, 5, 1, 6, 1], [2, 3, 4, 5, 1, 7, 8, 1], [9, 9, 1, 2, 1, 0, 0, 0],
]
# Names of variables whose gradients are compared.
KEPT = ("/embedding", "layer_norm/scale", "layer_000/rms_norm/scale", "block_000/layer_000/Mix/k/kernel", "logits/kernel")


class Mix(T.TransformerLayer):
    """A dense layer, then the mean of what each position sees, and of the encoder's output."""

    def __init__(self, loss=0.0):
        self._loss = loss

    def call(self, context, x):
        d = context.model.model_dim
        inner = mtf.Dimension("inner", d.size)
        y = mtf.layers.dense(
            x, inner, reduced_dims=[d], use_bias=False, name="k", activation=mtf.tanh,
            expert_dims=context.model.ensemble_dims, variable_dtype=context.variable_dtype,
        )
        if self._loss and context.losses is not None:
            context.losses.append(self._loss * mtf.reduce_mean(mtf.square(y)))
        y = self.mean_of_seen(context, y)
        y = mtf.layers.dense(
            y, d, reduced_dims=[inner], use_bias=False, name="o",
            expert_dims=context.model.ensemble_dims, variable_dtype=context.variable_dtype,
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
    "sublayers_per_layer": [T.sublayer_rms_norm, T.sublayer_call_layer, T.sublayer_dropout, T.sublayer_residual],
    "sublayers_final": [T.sublayer_rms_norm, T.sublayer_dropout],
}


def stack(cls=T.LayerStack, layers=(Mix,), num_layers=2, block_scope=True, **kwargs):
    kwargs = kwargs if "norm_epsilon" in kwargs else {**SUBLAYERS, **kwargs}
    return T.make_layer_stack(
        layers=list(layers), layer_stack_cls=functools.partial(cls, **kwargs),
        num_layers=num_layers, block_scope=block_scope,
    )


def unitransformer(layer_stack=None, **kwargs):
    arguments = {
        "d_model": 8, "input_vocab_size": 14, "output_vocab_size": 14, "autoregressive": True,
        "max_length": 8, "vocab_divisor": 16, **kwargs,
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


@model(CHANNELS, "batch:x,vocab:y", "batch:x,length:y")
def lm(p):
    return language_model(p)


@model()
def lm_shared(p):
    return language_model(p, shared_embedding_and_softmax_weights=True)


@model()
def lm_eval_smoothed(p):
    return language_model(p, call={"mode": "eval"}, label_smoothing=0.1)


@model()
def lm_no_positions(p):
    return language_model(p, positional_embedding=False, call={"position": given(p, POSITIONS)})


@model(CHANNELS)
def lm_sinusoids(p):
    return language_model(p, sinusoid_positional_embedding=True, max_length=12)


@model(CHANNELS, "batch:x,length:y")
def lm_packed(p):
    packed, positions = given(p, PACKED), given(p, POSITIONS)
    call = {"sequence_id": packed, "position": positions, "subsequence_id": given(p, POSITIONS)}
    return language_model(p, call=call, max_length=10)


@model(CHANNELS, "batch:x,length:y")
def lm_delimited(p):
    return language_model(
        p, targets=given(p, DELIMITED), input_full_attention=True, loss_on_targets_only=True
    )


@model()
def lm_denominator(p):
    return language_model(p, loss_denominator=7.0, call={"num_microbatches": 4})


@model("outer_batch:x,batch:y")
def lm_outer_batch(p):
    targets = p.input("targets", "outer_batch:2,batch:2,length:8", 14)
    return language_model(p, targets=targets)


@model()
def lm_loss_fn(p):
    def loss_fn(model, context, logits, targets, vocab_dim):
        chosen = logits * mtf.one_hot(targets, vocab_dim)
        return mtf.reduce_sum(chosen) / model.loss_denominator(targets, context.num_microbatches)

    return language_model(p, loss_fn=loss_fn)


@model("ensemble:x,batch:y", CHANNELS)
def lm_ensemble(p):
    return language_model(p, ensemble=2)


@model("ensemble:x,batch:y")
def lm_ensemble_inputs(p):
    targets = p.input("targets", "ensemble:2,batch:2,length:8", 14)
    return language_model(
        p, targets=targets, ensemble=2, shared_embedding_and_softmax_weights=True,
        sinusoid_positional_embedding=True,
    )


@model("ensemble:x,batch:y")
def ensemble_logits(p):
    logits = p.input("logits", "ensemble:4,batch:2,vocab:8")
    ensemble, _, vocab = logits.shape.dims
    arguments = logits, ensemble, vocab
    return {
        "mean_prob": T.reduce_ensemble_logits_mean_prob(*arguments),
        "mean_logit": T.reduce_ensemble_logits_mean_logit(*arguments),
        "select": T.reduce_ensemble_logits_select(*arguments, model_id=2),
        "default": T.reduce_ensemble_logits(*arguments),
        "given": T.reduce_ensemble_logits(*arguments, reduce_fn=T.reduce_ensemble_logits_mean_logit),
    }


@model()
def aligned(p):
    inputs, targets = p.input("inputs", ROWS, 14), p.input("targets", ROWS, 14)
    uni = unitransformer(autoregressive=False)
    logits, loss = uni.call_simple(inputs, targets, True, sequence_id=mtf.minimum(inputs, 1))
    return outcome(p, logits, loss)


@model()
def encoder_alone(p):
    """Vectors instead of logits; the outputs of the layers; no loss but the layers'."""
    uni = unitransformer(
        stack(layers=[(Mix, {"loss": 0.5})]), autoregressive=False, output_vocab_size=None
    )
    outputs = []
    vectors, loss = uni.call_simple(p.input("inputs", ROWS, 14), None, True, layer_outputs=outputs)
    return outcome(p, vectors, loss, **{f"layer{i}": y for i, y in enumerate(outputs)})


@model()
def layer_losses(p):
    return language_model(p, layer_stack=stack(layers=[(Mix, {"loss": 0.5})]))


@model()
def names_in_blocks(p):
    layers = [Mix, (Mix, "mix"), [Mix, {"loss": 0.1}], [Mix, "last", {"loss": 0.2}]]
    return language_model(p, layer_stack=stack(layers=layers))


@model()
def names_without_blocks(p):
    """The second block uses the variables of the first for the layers that have a name."""
    return language_model(p, layer_stack=stack(layers=[Mix, (Mix, "mix")], block_scope=False))


@model(CHANNELS)
def legacy(p):
    return language_model(p, layer_stack=stack(dropout_rate=0.0, norm_epsilon=1e-3))


@model()
def recomputed(p):
    return language_model(p, layer_stack=stack(recompute_grads=True))


@model()
def reversible(p):
    return language_model(p, layer_stack=stack(cls=T.ReversibleLayerStack, num_layers=3))


@model()
def reversible_recomputed(p):
    return language_model(
        p, layer_stack=stack(cls=T.ReversibleLayerStack, num_layers=3, recompute_grads=True)
    )


@model(CHANNELS)
def sublayers(p):
    """All that are not random."""
    return language_model(
        p,
        layer_stack=stack(
            sublayers_initial=[T.sublayer_true_layer_norm, T.sublayer_mask_padding],
            sublayers_per_layer=[
                T.sublayer_scale_norm,
                functools.partial(T.sublayer_rms_norm, epsilon=0.1, name="inner_norm"),
                T.sublayer_call_layer,
                functools.partial(T.sublayer_rezero, initial_value=0.5),
                T.sublayer_residual,
                T.sublayer_clip_activation_gradient,
            ],
            sublayers_final=[T.sublayer_legacy_final_rms_norm],
        ),
    )


@model("batch:x,length:y")
def sublayer_of_some_channels(p):
    some = functools.partial(T.sublayer_rms_norm_subsampled, percentage=40.0)
    return language_model(p, layer_stack=stack(sublayers_final=[T.sublayer_rms_norm_subsampled, some]))


@model(CHANNELS)
def classifier_scale(p):
    a, b, vocab, d = mtf.convert_to_shape("batch:4,length:3,vocab:8,d_model:16").dims
    ids = p.input("ids", mtf.Shape([a, b]), 8)
    outputs = {}
    for scaled in (False, True):
        embedding = T.VocabEmbedding(
            p.mesh, vocab, d, mtf.VariableDType(tf.float32), f"e{scaled}", None,
            scale_variable_like_classifier_weights=scaled,
        )
        outputs[f"vectors{scaled}"] = x = embedding.ids_to_embedding(ids, None)
        outputs[f"logits{scaled}"] = embedding.hidden_to_logits(x, None)
    p.fill_variables()
    return outputs


@model("batch:x,length:y")
def inputs_of_targets(p):
    targets, packed = p.input("targets", ROWS, 6) - 2, given(p, PACKED)
    return {
        "whole": T.autoregressive_inputs(targets),
        "packed": T.autoregressive_inputs(targets, sequence_id=packed),
        "older": T.shift_targets(targets),
        "older_ids": T.shift_targets(targets, bos_id=3, eos_id=2),
        "mask": mtf.cast(T.delimited_lm_inputs_mask(targets), tf.int32),
        "mask_2": mtf.cast(T.delimited_lm_inputs_mask(targets, eos_id=2), tf.int32),
    }


@model("length:x")
def sinusoids(p):
    length, d = mtf.convert_to_shape("length:10,d_model:8").dims
    return {
        "sinusoids": T.sinusoid_positional_embedding_weights(p.mesh, length, d, tf.float32),
        "sinusoids_scaled": T.sinusoid_positional_embedding_weights(p.mesh, length, d, tf.float32, 0.5, 50.0),
    }


def sequence_to_sequence(p, model, call=None, target_rows="batch:4,length:6"):
    inputs, targets = p.input("inputs", ROWS, 14), p.input("targets", target_rows, 14)
    logits, loss = model.call_simple(inputs, targets, True, **(call or {}))
    return outcome(p, logits, loss)


@model(CHANNELS, "batch:x,vocab:y", "batch:x,length:y")
def bitransformer_shared(p):
    return sequence_to_sequence(p, bitransformer())


@model()
def bitransformer_apart(p):
    decoder = {"input_vocab_size": 20, "output_vocab_size": 20, "max_length": 12}
    decoder["shared_embedding_and_softmax_weights"] = False
    return sequence_to_sequence(p, bitransformer(shared_embedding=False, decoder=decoder))


@model(CHANNELS)
def bitransformer_packed(p):
    packed, positions = given(p, PACKED), given(p, POSITIONS)
    call = {
        "encoder_sequence_id": packed, "decoder_sequence_id": packed,
        "decoder_subsequence_id": positions, "encoder_position": positions,
        "decoder_position": positions, "mode": "eval", "num_microbatches": 2,
    }
    return sequence_to_sequence(p, bitransformer(), call, target_rows=ROWS)


@model(CHANNELS)
def bitransformer_one_sinusoid(p):
    return sequence_to_sequence(p, bitransformer(encoder={"sinusoid_positional_embedding": True}))


@model(CHANNELS)
def bitransformer_sinusoids(p):
    sides = {"sinusoid_positional_embedding": True}
    return sequence_to_sequence(p, bitransformer(encoder=sides, decoder=sides))


@model("ensemble:x,batch:y")
def bitransformer_ensemble(p):
    return sequence_to_sequence(p, bitransformer(encoder={"ensemble": 2}, decoder={"ensemble": 2}))


@model()
def bitransformer_layer_losses(p):
    layers = [(Mix, {"loss": 0.5})]
    sides = [{"layer_stack": stack(layers=layers)} for _ in range(2)]
    return sequence_to_sequence(p, bitransformer(encoder=sides[0], decoder=sides[1]))


def distillation(p, call=None, step=1, **kwargs):
    tf.train.get_or_create_global_step()
    p.feeds["global_step"] = step
    student = bitransformer(encoder={"layer_stack": stack(num_layers=1)})
    pair = T.StudentTeacher(student, bitransformer(), **kwargs)
    return sequence_to_sequence(p, pair, call)


@model(CHANNELS)
def student_teacher(p):
    return distillation(p, temperature=2.0, fraction_soft=0.7)


@model()
def student_teacher_before(p):
    return distillation(p, temperature=2.0, fraction_soft=0.7, distill_start_step=1)


@model()
def student_teacher_microbatches(p):
    call = {"num_microbatches": 2, "mode": "eval"}
    return distillation(p, call, step=5, temperature=1.5, fraction_soft=1.0, distill_start_step=3)


@model()
def student_of_language_model(p):
    targets = p.input("targets", ROWS, 16) - 2
    p.feeds["global_step"] = 4
    tf.train.get_or_create_global_step()
    pair = T.StudentTeacher(unitransformer(), unitransformer(), 1.0, 0.25)
    logits, loss = pair.call_simple(T.autoregressive_inputs(targets), targets, True)
    return outcome(p, logits, loss)


BINDINGS = """
make_layer_stack.layer_stack_cls = @mix_stack
make_layer_stack.num_layers = 1
encoder/make_layer_stack.num_layers = 2
teacher/decoder/make_layer_stack.num_layers = 2
transformer.Unitransformer.d_model = 8
Unitransformer.max_length = 8
Unitransformer.vocab_divisor = 16
decoder/Unitransformer.z_loss = 0.01
Bitransformer.shared_embedding = False
StudentTeacher.temperature = 1.0
StudentTeacher.fraction_soft = 0.5
"""


def mix_stack(layers):
    return T.LayerStack(layers, **SUBLAYERS)


def configured(make):
    """Returns what a function makes with the bindings above, and clears them."""
    gin.enter_interactive_mode()
    try:
        gin.external_configurable(mix_stack, module="oracle_programs")
        gin.parse_config(BINDINGS)
        gin.bind_parameter("make_layer_stack.layers", [Mix])
        return make()
    finally:
        gin.clear_config()
        gin.exit_interactive_mode()


@model()
def made_by_gin(p):
    made = configured(lambda: T.make_bitransformer(input_vocab_size=14, output_vocab_size=20))
    return sequence_to_sequence(p, made)


@model()
def pair_made_by_gin(p):
    p.feeds["global_step"] = 1
    tf.train.get_or_create_global_step()
    return sequence_to_sequence(p, configured(lambda: T.make_bi_student_teacher(14, 20)))


def usual_layers(decoder, dropout_rate=0.0, **kwargs):
    """Returns the layers of T5, small."""
    attention = {"num_heads": 2, "key_value_size": 4, "dropout_rate": dropout_rate}
    layers = [(TL.SelfAttention, {**attention, **kwargs}), (TL.DenseReluDense, {"hidden_size": 12})]
    return [*layers[:1], (TL.EncDecAttention, attention), *layers[1:]] if decoder else layers


RELATIVE = {"relative_attention_type": "bias_shared", "relative_attention_num_buckets": 8}
SPLIT_HEADS = "batch:x,heads:y,d_ff:y,vocab:y"


@model(SPLIT_HEADS, "batch:x,d_model:y")
def attention_lm(p):
    return language_model(p, layer_stack=stack(layers=usual_layers(False)))


@model("batch:x,heads:y")
def attention_delimited_lm(p):
    return language_model(
        p, targets=given(p, DELIMITED), input_full_attention=True, loss_on_targets_only=True,
        layer_stack=stack(layers=usual_layers(False)),
    )


@model(SPLIT_HEADS)
def attention_packed_lm(p):
    call = {"sequence_id": given(p, PACKED), "position": given(p, POSITIONS)}
    layers = usual_layers(False, relative_attention_type="bias", relative_attention_num_buckets=8)
    return language_model(p, call=call, layer_stack=stack(layers=layers))


@model()
def attention_reversible(p):
    layers = usual_layers(False, **RELATIVE)
    return language_model(p, layer_stack=stack(cls=T.ReversibleLayerStack, layers=layers, num_layers=1))


@model("ensemble:x,heads:y")
def attention_ensemble(p):
    return language_model(p, ensemble=2, layer_stack=stack(layers=usual_layers(False)))


@model(SPLIT_HEADS, "batch:x,length:y")
def t5(p):
    """With the names of its checkpoints."""
    sides = [
        {
            "layer_stack": stack(layers=usual_layers(d, **RELATIVE), dropout_rate=0.0, norm_epsilon=1e-6),
            "positional_embedding": False, "shared_embedding_and_softmax_weights": True,
        }
        for d in (False, True)
    ]
    return sequence_to_sequence(p, bitransformer(encoder=sides[0], decoder=sides[1]))
