"""BERT: models of several configurations, their heads and losses, and training them."""

import mesh_tensorflow as mtf
from helpers.oracle import oracle_runner as runner
from helpers.oracle.oracle_runner import dims
from mesh_tensorflow.bert import bert, optimization
from mesh_tensorflow.transformer import moe

BERT, program = runner.table(
    "batch:x,hidden:y", "batch:x,num_heads:y,intermediate:y,vocab:y", gradients=False,
    tolerance=1e-4)

SMALL = {
    "vocab_size": 120, "d_model": 8, "max_position_embeddings": 9, "num_blocks": 2,
    "attention_num_heads": 2, "feedforward_intermediate_size": 12, "type_vocab_size": 2,
    "layer_output_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}
WITHOUT_BIAS = {
    "use_bias": False, "position_signal": "relative_attention_bias", "residual_structure": "direct",
    "initializer_range": None,
}


def ids(p, name, shape, number):
    return p.mtf.import_tf_tensor(
        p.mesh, p.tf.constant(runner.array(number, [d.size for d in dims(shape)], p.name, name)),
        p.mtf.Shape(dims(shape)))


def model(p, mask=True, types=True, is_training=False, **options):
    config = bert.BertConfig(**{**SMALL, **options})
    sequence = "batch:4,seq:8"
    return bert.BertModel(
        config=config, is_training=is_training, input_ids=ids(p, "input_ids", sequence, 120),
        input_mask=ids(p, "input_mask", sequence, 2) if mask else None,
        token_type_ids=ids(p, "token_type_ids", sequence, 2) if types else None,
        mesh_shape=p.mesh_shape, layout=p.layout)


def gradients(p, loss):
    """Gradients of all variables but biases of keys, on which nothing depends: those are noise."""
    found = p.loss_gradients(loss)
    return {name: g for name, g in found.items() if not name.endswith("key/bias")}


def outputs(p, m):
    """What a model gives, and the gradients of a sum of it with seeded weights."""
    p.fill_variables()
    found = {
        "words": m.get_word_embedding_output(), "embedded": m.get_embedding_output(),
        "first": m.get_all_encoder_layers()[0], "sequence": m.get_sequence_output(),
        "pooled": m.get_pooled_output(),
    }
    loss = sum(
        p.mtf.reduce_sum(y * p.input(f"weights_{name}", y.shape))
        for name, y in found.items() if name in ("sequence", "pooled"))
    return {**found, **gradients(p, loss)}


def pretrained(p, m):
    shape = "batch:4,max_predictions_per_seq:3"
    weights = p.mtf.to_float(ids(p, "weights", shape, 2))
    masked = m.get_masked_lm_output(
        ids(p, "positions", shape, 8), ids(p, "labels", shape, 120), weights)
    following = m.get_next_sentence_output(ids(p, "next", "batch:4", 2))
    return masked, following


def of_heads(p, m):
    masked, following = pretrained(p, m)
    names = "loss", "each", "logits"
    return {
        **{f"masked_{n}": x for n, x in zip(names, masked)},
        **{f"next_{n}": x for n, x in zip(names, following)},
    }


@program()
def bert_original(p):
    return outputs(p, model(p))


@program()
def bert_without_mask(p):
    return outputs(p, model(p, mask=False, types=False))


@program()
def bert_direct(p):
    return outputs(p, model(p, **WITHOUT_BIAS))


@program()
def bert_relative_original(p):
    m = model(p, position_signal="relative_attention_bias", num_blocks=1, mask=False)
    return outputs(p, m)


@program()
def bert_direct_with_bias(p):
    m = model(
        p, residual_structure="direct", attention_head_size=3, feedforward_intermediate_act="relu")
    return outputs(p, m)


@program()
def bert_many_layers(p):
    m = model(
        p, block_layers="attention,feedforward,attention,feedforward,feedforward", num_blocks=1,
        feedforward_intermediate_act="relu", residual_structure="direct")
    return outputs(p, m)


@program()
def bert_feedforward_alone(p):
    m = model(p, block_layers="feedforward", feedforward_intermediate_act="tanh")
    return outputs(p, m)


@program()
def bert_key_heads(p):
    """Sizes of key and value heads change nothing."""
    m = model(
        p, num_blocks=1, attention_num_key_heads=1, attention_key_head_size=3,
        attention_num_value_heads=4, attention_value_head_size=5)
    p.notes["dims"] = [str(d) for d in (m.key_dim, m.key_heads_dims, m.value_dim, m.value_heads_dims)]
    return outputs(p, m)


@program()
def bert_scope(p):
    config = bert.BertConfig(**{
        **SMALL, "num_blocks": 1, "feedforward_intermediate_act": "linear"})
    return outputs(
        p, bert.BertModel(config, False, ids(p, "i", "batch:4,length:6", 120), scope="net/inner"))


def of_losses(p, m):
    result = of_heads(p, m)
    p.fill_variables()
    return {**result, **gradients(p, result["masked_loss"] + result["next_loss"])}


@program()
def bert_heads(p):
    return of_losses(p, model(p))


@program()
def bert_heads_without_bias(p):
    return of_losses(
        p, model(p, num_blocks=1, feedforward_intermediate_act="relu", **WITHOUT_BIAS))


@program(gradients=True)
def bert_layer_norms(p):
    d, e = dims("a:4,d:6")
    x = p.input("x", "a:4,d:6")
    y = {
        "plain": bert.layer_norm(x, e, name="plain"),
        "no_mean": bert.layer_norm(x, d, epsilon=1e-2, subtract_mean=False),
        "no_scale": bert.layer_norm(x, e, use_scale=False),
        "nothing": bert.layer_norm(x, e, use_scale=False, use_bias=False, name="nothing"),
    }
    p.fill_variables()
    return y


@program()
def bert_clip(p):
    x, y = p.input("x", "a:4"), p.input("y", "a:4,b:2")
    clipped, norm = optimization.clip_by_global_norm([x, y], mtf.constant(p.mesh, 0.5))
    return {"x": clipped[0], "y": clipped[1], "norm": norm}


def training(name, config, init_lr=0.05, steps=20, warmup=3, **options):
    def fn(p):
        m = model(p, num_blocks=1, is_training=True, **config)
        masked, following = pretrained(p, m)
        loss = masked[0] + following[0]
        p.fill_variables()
        p.tf.train.get_or_create_global_step()
        _, p.update_ops = optimization.create_optimizer(loss, init_lr, steps, warmup, **options)
        return {"loss": loss}

    fn.__name__ = name
    program("batch:x,hidden:y", steps=8)(fn)


# Without attention: of its gradients some are noise, of which optimizers would make steps.
LAYERS = {"block_layers": "feedforward"}
training("bert_adam", LAYERS)
training("bert_adam_whole", LAYERS, clip_gradients=False, warmup=0)
training("bert_adam_some", LAYERS, max_optimized_variable_size=96)
training("bert_adafactor", LAYERS, optimizer="adafactor", steps=6)


# What the classic's BERT does not set of the hyperparameters that its mixtures of experts read.
UNSET = {
    "moe_word_embed_mode": None, "moe_min_expert_capacity": 4, "moe_dropout_rate": 0.0,
    "moe_use_experts_attention": False, "moe_z_loss": None, "moe_ntlb_top_k": 4,
    "moe_switch_policy_train": "argmax", "moe_switch_policy_eval": "argmax",
    "moe_switch_dropout": 0.1, "moe_switch_temperature": 1.0, "moe_switch_jitter": 0.01,
    "moe_use_second_place_expert_prob": None, "moe_use_second_place_expert_prob_temp": None,
    "moe_top_n_num_experts_per_token": 3,
}


@program()
def bert_moe(p):
    """Second experts have a weight of 0.2 or more here, so that no token leaves them by chance."""
    if not runner.APART:
        for name, value in UNSET.items():
            setattr(moe.HParams, name, value)
    m = model(
        p, num_blocks=1, block_layers="attention,moe,moe", moe_num_experts=4,
        moe_intermediate_size=6, residual_structure="direct")
    return {**outputs(p, m), "extra": m.get_extra_loss()}


BERT["bert_moe"].layouts = ()  # by which tokens are grouped otherwise
