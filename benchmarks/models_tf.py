"""The workloads in plain TensorFlow, on one device."""

from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf
import tensorflow.compat.v2 as tf2
from feeds import Feeds
from workloads import IMAGE_SIZE, NUM_CLASSES, Workload, weight_shapes


class TfModel:
    """Owns the variables of a workload; `loss` takes their values, read once."""

    def __init__(self, workload: Workload, feeds: Feeds):
        self._w = workload
        self.variables: dict[str, Any] = {}
        for name, (shape, _) in weight_shapes(workload).items():
            if name == "hidden1":  # [row block, column block, row, column] to [row, column]
                shape = (IMAGE_SIZE * IMAGE_SIZE * workload.d_model, workload.d_ff)
            self._add(name, shape, feeds.initializer(name))
        zeros, ones = tf.zeros_initializer(), tf.ones_initializer()
        if workload.kind == "transformer":
            for i in range(workload.layers):
                for norm in ("norm_attention", "norm_ff"):
                    self._add(f"block_{i}/{norm}/scale", [workload.d_model], ones)
                    self._add(f"block_{i}/{norm}/bias", [workload.d_model], zeros)
        if workload.kind == "conv":
            for name, size in (
                ("hidden1", workload.d_ff),
                ("hidden2", workload.d_ff),
                ("logits", NUM_CLASSES),
            ):
                self._add(f"{name}/bias", [size], zeros)

    def _add(self, name: str, shape: Any, initializer: Any) -> None:
        """Makes a resource variable."""
        self.variables[name] = tf.get_variable(
            name, shape, initializer=initializer, use_resource=True
        )

    def loss(self, weights: dict[str, Any], x: Any, target: Any) -> Any:
        """The scalar loss as a function of the weights and data."""
        if self._w.kind == "conv":
            return self._conv_loss(weights, x, target)
        x = tf.reshape(x, [-1, self._w.d_model])
        target = tf.reshape(target, [-1, self._w.d_model])
        for i in range(self._w.layers):
            x = self._block(weights, x, f"block_{i}/")
        return tf.reduce_mean(tf.square(x - target))

    def _dropout(self, x: Any) -> Any:
        """Dropout from uniform random numbers."""
        rate = self._w.dropout
        if not rate:
            return x
        keep = tf.cast(tf.random.uniform(tf.shape(x)) >= rate, x.dtype)
        return x * keep * (1.0 / (1.0 - rate))

    def _block(self, weights: dict[str, Any], x: Any, prefix: str) -> Any:
        """One residual block; pre-norm with attention for transformers."""
        wi, wo = weights[prefix + "wi"], weights[prefix + "wo"]
        if self._w.kind == "ff":
            return x + tf.matmul(tf.nn.relu(tf.matmul(x, wi)), wo)
        y = _layer_norm(x, weights, prefix + "norm_attention/")
        x += self._dropout(self._attention(y, weights, prefix))
        y = _layer_norm(x, weights, prefix + "norm_ff/")
        hidden = self._dropout(tf2.nn.gelu(tf.matmul(y, wi), approximate=True))
        return x + self._dropout(tf.matmul(hidden, wo))

    def _attention(self, x: Any, weights: dict[str, Any], prefix: str) -> Any:
        """Multi-head self-attention without a mask, on flat tokens."""
        w = self._w
        square = [w.d_model, w.d_model]

        def project(name: str) -> Any:
            y = tf.matmul(x, tf.reshape(weights[prefix + name], square))
            y = tf.reshape(y, [w.batch, w.length, w.heads, w.d_kv])
            return tf.transpose(y, [0, 2, 1, 3])

        q, k, v = project("q"), project("k"), project("v")
        logits = tf.matmul(q, k, transpose_b=True) * (w.d_kv**-0.5)
        mixed = tf.matmul(self._dropout(tf.nn.softmax(logits)), v)
        mixed = tf.reshape(tf.transpose(mixed, [0, 2, 1, 3]), [-1, w.d_model])
        return tf.matmul(mixed, tf.reshape(weights[prefix + "o"], square))

    def _conv_loss(self, weights: dict[str, Any], x: Any, target: Any) -> Any:
        """Two convolutions over whole images, two dense layers, ten classes."""
        x = tf.reshape(x, [self._w.batch, IMAGE_SIZE, IMAGE_SIZE, 1])
        for i in range(self._w.layers):
            x = tf.nn.relu(tf.nn.conv2d(x, weights[f"conv{i}"], strides=1, padding="SAME"))
        x = tf.reshape(x, [self._w.batch, -1])
        for name in ("hidden1", "hidden2"):
            x = tf.nn.relu(tf.matmul(x, weights[name]) + weights[f"{name}/bias"])
        logits = tf.matmul(x, weights["logits"]) + weights["logits/bias"]
        return tf.reduce_mean(
            tf.nn.sparse_softmax_cross_entropy_with_logits(labels=target, logits=logits)
        )


def _layer_norm(x: Any, weights: dict[str, Any], prefix: str) -> Any:
    """Layer normalization with scale and bias."""
    x -= tf.reduce_mean(x, axis=-1, keepdims=True)
    variance = tf.reduce_mean(tf.square(x), axis=-1, keepdims=True)
    x *= tf.math.rsqrt(variance + 1e-6)
    return x * weights[prefix + "scale"] + weights[prefix + "bias"]


def whole_image_weights(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Puts the weights that follow image blocks into the order of whole images."""
    result = dict(arrays)
    if "hidden1" in arrays:  # row block, column block, row, column, filter, hidden
        result["hidden1"] = arrays["hidden1"].transpose([0, 2, 1, 3, 4, 5])
    return result


def sgd_step(
    model: TfModel, x: Any, target: Any, rate: float, names: list[str] | None = None
) -> Any:
    """Reads every weight once, and returns the loss after adding the updates."""
    names = names or list(model.variables)
    weights = {name: model.variables[name].read_value() for name in names}
    loss = model.loss(weights, x, target)
    gradients = tf.gradients(loss, [weights[name] for name in names])
    updates = [
        tf.raw_ops.ResourceApplyGradientDescent(
            var=model.variables[name].handle, alpha=tf.constant(rate), delta=gradient
        )
        for name, gradient in zip(names, gradients)
    ]
    return loss, updates
