"""Models of T5's form in this package, with the weights of a checkpoint."""

import numpy as np
import tensorflow.compat.v1 as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.transformer import convert, transformer, transformer_layers


def bitransformer(
    gated, vocab_size, d_model, d_kv, d_ff, num_layers, num_decoder_layers, num_heads,
    relative_attention_num_buckets=32,
):  # fmt: skip
    """Returns a model of the sizes that Hugging Face's configuration names."""
    heads = {"num_heads": num_heads, "key_value_size": d_kv}
    relative = {
        "relative_attention_type": "bias_shared",
        "relative_attention_num_buckets": relative_attention_num_buckets,
    }
    self_attention = [transformer_layers.SelfAttention, {**heads, **relative}]
    attention = [transformer_layers.EncDecAttention, heads]
    dense = [
        transformer_layers.DenseReluDense,
        {"hidden_size": d_ff, "activation": ["gelu", "linear"] if gated else "relu"},
    ]

    def stack(layers):
        return transformer.LayerStack(layers, dropout_rate=0.0, norm_epsilon=1e-6)

    kwargs = {
        "d_model": d_model,
        "input_vocab_size": vocab_size,
        "max_length": 512,
        "positional_embedding": False,
        "shared_embedding_and_softmax_weights": not gated,
    }
    encoder = transformer.Unitransformer(
        transformer.make_layer_stack([self_attention, dense], stack, num_layers),
        autoregressive=False,
        output_vocab_size=None,
        name="encoder",
        **kwargs,
    )
    decoder = transformer.Unitransformer(
        transformer.make_layer_stack([self_attention, attention, dense], stack, num_decoder_layers),
        autoregressive=True,
        output_vocab_size=vocab_size,
        name="decoder",
        **kwargs,
    )
    return transformer.Bitransformer(encoder, decoder)


def restored(path, build):
    """Returns the values of the Tensor that `build` makes of ids, with a checkpoint's weights.

    Args:
      path: a checkpoint, which must have the model's variables and no others.
      build: a function of a function that imports arrays of ids, [batch, length].
    """
    with tf.Graph().as_default(), tf.Session() as sess:
        graph = mtf.Graph()
        mesh = mtf.Mesh(graph, "mesh")

        def imported(ids):
            sizes = zip(("batch", "length"), np.shape(ids), strict=True)
            shape = mtf.Shape([mtf.Dimension(*size) for size in sizes])
            return mtf.import_tf_tensor(mesh, tf.constant(ids, tf.int32), shape)

        output = build(imported)
        lowering = mtf.Lowering(
            graph, {mesh: mtf.placement_mesh_impl.PlacementMeshImpl([], [], [""])}
        )
        found = lowering.export_to_tf_tensor(output)
        assert {v.op.name for v in tf.global_variables()} == set(convert.read_checkpoint(path))
        tf.train.Saver().restore(sess, path)
        sess.run(lowering.copy_masters_to_slices())
        return sess.run(found)


def logits(path, model, inputs, targets):
    """Returns a model's logits, [batch, length, vocab]."""

    def build(imported):
        return model.call_simple(
            imported(inputs), imported(targets), compute_loss=False, mode="eval"
        )[0]

    return restored(path, build)
