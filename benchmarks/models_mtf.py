"""The workloads as Mesh TensorFlow programs, for this package and the classic one."""

from typing import Any

import tensorflow.compat.v1 as tf
from feeds import Feeds
from workloads import BLOCK_SIZE, FILTER_SIZE, IMAGE_BLOCKS, NUM_CLASSES, Workload


class MtfModel:
    """Builds the loss of a workload on a mesh; `mtf` is either package."""

    def __init__(self, mtf: Any, workload: Workload, mesh: Any, feeds: Feeds):
        self._mtf = mtf
        self._w = workload
        self._mesh = mesh
        self._feeds = feeds
        self._batch = mtf.Dimension("batch", workload.batch)
        self._model = mtf.Dimension("d_model", workload.d_model)
        self._ff = mtf.Dimension("d_ff", workload.d_ff)

    def loss(self) -> Any:
        """The scalar loss, an mtf.Tensor."""
        if self._w.kind == "conv":
            return self._conv_loss()
        dims = [self._batch, self._model]
        if self._w.kind == "transformer":
            dims.insert(1, self._mtf.Dimension("length", self._w.length))
        shape = self._mtf.Shape(dims)
        x = self._import("x", shape)
        target = self._import("target", shape)
        for i in range(self._w.layers):
            with tf.variable_scope(f"block_{i}"):
                x = self._block(x, f"block_{i}")
        return self._mtf.reduce_mean(self._mtf.square(x - target))

    def _import(self, key: str, shape: Any) -> Any:
        """The data as a tensor of the mesh."""
        return self._mtf.import_tf_tensor(self._mesh, self._feeds.data(key), shape)

    def _dropout(self, x: Any) -> Any:
        """Dropout at the workload's rate."""
        if not self._w.dropout:
            return x
        return self._mtf.dropout(x, True, rate=self._w.dropout)

    def _block(self, x: Any, prefix: str) -> Any:
        """One residual block; pre-norm with attention for transformers."""
        if self._w.kind == "ff":
            return x + self._feed_forward(x, prefix, self._mtf.relu)
        norm = self._mtf.layers.layer_norm
        y = self._attention(norm(x, self._model, name="norm_attention"), prefix)
        x += self._dropout(y)
        y = norm(x, self._model, name="norm_ff")
        return x + self._dropout(self._feed_forward(y, prefix, self._mtf.gelu))

    def _feed_forward(self, x: Any, prefix: str, activation: Any) -> Any:
        """Two dense layers without bias."""
        dense = self._mtf.layers.dense
        hidden = dense(
            x,
            self._ff,
            reduced_dims=[self._model],
            use_bias=False,
            activation=activation,
            kernel_initializer=self._feeds.initializer(f"{prefix}/wi"),
            name="wi",
        )
        return dense(
            self._dropout(hidden),
            self._model,
            reduced_dims=[self._ff],
            use_bias=False,
            kernel_initializer=self._feeds.initializer(f"{prefix}/wo"),
            name="wo",
        )

    def _attention(self, x: Any, prefix: str) -> Any:
        """Multi-head self-attention without a mask."""
        mtf = self._mtf
        heads = mtf.Dimension("heads", self._w.heads)
        d_kv = mtf.Dimension("d_kv", self._w.d_kv)
        length = x.shape.dims[1]
        memory = mtf.Dimension("memory_length", length.size)

        def weight(name: str, dims: Any) -> Any:
            initializer = self._feeds.initializer(f"{prefix}/{name}")
            return mtf.get_variable(self._mesh, name, mtf.Shape(dims), initializer=initializer)

        m = mtf.rename_dimension(x, length.name, memory.name)
        q, k, v = [
            mtf.einsum(
                [source, weight(name, [self._model, heads, d_kv])], reduced_dims=[self._model]
            )
            for name, source in (("q", x), ("k", m), ("v", m))
        ]
        logits = mtf.einsum([q, k], reduced_dims=[d_kv]) * (self._w.d_kv**-0.5)
        weights = self._dropout(mtf.softmax(logits, memory))
        mixed = mtf.einsum([weights, v], reduced_dims=[memory])
        output = weight("o", [heads, d_kv, self._model])
        return mtf.einsum([mixed, output], reduced_dims=[heads, d_kv])

    def _conv_loss(self) -> Any:
        """Two convolutions over images in blocks, two dense layers, ten classes."""
        mtf, w, init = self._mtf, self._w, self._feeds.initializer
        row_blocks, col_blocks = [
            mtf.Dimension(name, IMAGE_BLOCKS) for name in ("row_blocks", "col_blocks")
        ]
        rows, cols = [mtf.Dimension(name, BLOCK_SIZE) for name in ("image_rows", "image_cols")]
        channel = mtf.Dimension("channel", 1)
        classes = mtf.Dimension("classes", NUM_CLASSES)
        blocks = [w.batch, IMAGE_BLOCKS, BLOCK_SIZE, IMAGE_BLOCKS, BLOCK_SIZE, 1]
        x = mtf.import_tf_tensor(
            self._mesh,
            tf.reshape(self._feeds.data("x"), blocks),
            mtf.Shape([self._batch, row_blocks, rows, col_blocks, cols, channel]),
        )
        x = mtf.transpose(x, [self._batch, row_blocks, col_blocks, rows, cols, channel])
        for i in range(w.layers):
            x = mtf.relu(
                mtf.layers.conv2d_with_blocks(
                    x,
                    mtf.Dimension(f"filters{i}", w.d_model),
                    filter_size=[FILTER_SIZE, FILTER_SIZE],
                    strides=[1, 1],
                    padding="SAME",
                    h_blocks_dim=row_blocks,
                    w_blocks_dim=col_blocks,
                    filter_initializer=init(f"conv{i}"),
                    name=f"conv{i}",
                )
            )
        for name in ("hidden1", "hidden2"):
            x = mtf.layers.dense(
                x,
                mtf.Dimension(name, w.d_ff),
                reduced_dims=x.shape.dims[1:],
                activation=mtf.relu,
                kernel_initializer=init(name),
                name=name,
            )
        logits = mtf.layers.dense(
            x,
            classes,
            reduced_dims=x.shape.dims[-1:],
            kernel_initializer=init("logits"),
            name="logits",
        )
        labels = self._import("target", mtf.Shape([self._batch]))
        one_hot = mtf.one_hot(labels, classes)
        return mtf.reduce_mean(
            mtf.layers.softmax_cross_entropy_with_logits(logits, one_hot, classes)
        )
