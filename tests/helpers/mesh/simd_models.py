"""Three models that train on a 2x2 mesh, for placement and SIMD alike."""

import sys

import numpy as np
import tensorflow.compat.v1 as tf

import mesh_tensorflow as mtf
from helpers.paths import EXAMPLES

sys.path.append(str(EXAMPLES))

import mnist as mnist_example
import toy_model_tpu

STEPS = 5
MESH_SHAPE = "x:2;y:2"
LAYOUTS = {
    "mnist": "row_blocks:x;col_blocks:y",
    "toy": "batch:x;hidden:y",
    "transformer": "batch:x;heads:y;d_ff:y;vocab:y",
}
BATCH = 8
RANDOM = np.random.RandomState(5)
IMAGES = RANDOM.rand(BATCH, 28, 28).astype(np.float32)
DIGITS = RANDOM.randint(0, 10, BATCH).astype(np.int32)
IDS = RANDOM.randint(0, 32, [BATCH, 9]).astype(np.int32)


def mnist(mesh):
    images = mnist_example.import_images(mesh, tf.constant(IMAGES))
    logits = mnist_example.network(images, 64)
    classes = logits.shape[-1]
    digits = mtf.import_tf_tensor(mesh, tf.constant(DIGITS), logits.shape - classes)
    return mtf.reduce_mean(
        mtf.layers.softmax_cross_entropy_with_logits(logits, mtf.one_hot(digits, classes), classes)
    )


def toy(mesh):
    kinds = {f"{kind}_dtype": "float32" for kind in ["master", "slice", "activation"]}
    shape = [mtf.Dimension("batch", BATCH), mtf.Dimension("io", 28)]
    x = mtf.import_tf_tensor(mesh, tf.constant(IMAGES[:, 14]), shape)
    y = toy_model_tpu.toy_model(x, {"num_hidden_layers": 2, "hidden_size": 32, **kinds})
    return mtf.reduce_mean(mtf.square(y - x))


def transformer(mesh):
    """A pre-norm block with causal attention between an embedding and its transpose."""
    batch, length = mtf.Dimension("batch", BATCH), mtf.Dimension("length", 8)
    vocab, d_model = mtf.Dimension("vocab", 32), mtf.Dimension("d_model", 16)
    heads, d_kv = mtf.Dimension("heads", 4), mtf.Dimension("d_kv", 8)
    ids = mtf.import_tf_tensor(mesh, tf.constant(IDS[:, :-1]), [batch, length])
    targets = mtf.import_tf_tensor(mesh, tf.constant(IDS[:, 1:]), [batch, length])
    embedding = mtf.get_variable(
        mesh, "embedding", [vocab, d_model], initializer=tf.random_normal_initializer(stddev=0.5)
    )
    x = mtf.gather(embedding, ids, vocab)
    norm = mtf.layers.layer_norm
    x += mtf.layers.masked_local_attention_1d(
        norm(x, d_model, name="norm_1"),
        d_kv,
        heads,
        is_training=True,
        window_size=4,
        name="attention",
    )
    x += mtf.layers.dense_relu_dense(
        norm(x, d_model, name="norm_2"),
        mtf.Dimension("d_ff", 32),
        dropout=0.1,
        is_training=True,
        name="ff",
    )
    logits = mtf.einsum([norm(x, d_model, name="norm_3"), embedding], reduced_dims=[d_model])
    return mtf.reduce_mean(
        mtf.layers.softmax_cross_entropy_with_logits(logits, mtf.one_hot(targets, vocab), vocab)
    )


MODELS = {"mnist": mnist, "toy": toy, "transformer": transformer}


def step_of(name, make_impl):
    """Returns what a training step of a model gives."""
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")
    loss = MODELS[name](mesh)
    variables = graph.trainable_variables
    gradients = mtf.gradients([loss], [v.value for v in variables])
    updates = mtf.optimize.AdafactorOptimizer(learning_rate=0.01).apply_grads(gradients, variables)
    lowering = mtf.Lowering(graph, {mesh: make_impl(MESH_SHAPE, LAYOUTS[name])})
    return {
        "loss": lowering.export_to_tf_tensor(loss),
        "train": tf.group([lowering.lowered_operation(op) for op in updates]),
    }
