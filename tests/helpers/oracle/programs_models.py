"""Programs: whole models."""

import tensorflow.compat.v1 as tf

import mesh_tensorflow as mtf
from helpers.oracle.oracle_runner import dims, table

MODELS, model = table(gradients=False, tolerance=1e-4)


def mnist_logits(p, images):
    """The convolutional model: 4x4 blocks of 7x7 pixels, two convolutions, two dense layers."""
    batch, rows, cols = images.shape.dims[0], *dims("row_blocks:4,col_blocks:4")
    h, w, one = dims("row_size:7,col_size:7,one_channel:1")
    filters1, filters2, hidden1, hidden2 = dims("filters1:16,filters2:16,hidden1:32,hidden2:32")
    classes = mtf.Dimension("classes", 10)
    x = mtf.reshape(images, [batch, rows, h, cols, w, one])
    x = mtf.transpose(x, [batch, rows, cols, h, w, one])
    for i, (source, filters) in enumerate([(one, filters1), (filters1, filters2)]):
        x = mtf.relu(
            mtf.layers.conv2d_with_blocks(
                x, filters, filter_size=[9, 9], strides=[1, 1], padding="SAME",
                h_blocks_dim=rows, w_blocks_dim=cols, name=f"conv{i}",
                filter_initializer=p.initial(f"conv{i}", [9, 9, source.size, filters.size], 0.05),
            )
        )
    x = mtf.reduce_mean(x, reduced_dim=filters2)
    x = mtf.layers.dense(
        x, hidden1, reduced_dims=x.shape.dims[-4:], activation=mtf.relu, name="hidden1",
        kernel_initializer=p_initializer(p, "hidden1", [4, 4, 7, 7, 32], 0.1),
    )
    x = mtf.layers.dense(
        x, hidden2, reduced_dims=[hidden1], activation=mtf.relu, name="hidden2",
        kernel_initializer=p_initializer(p, "hidden2", [32, 32], 0.2),
    )
    return mtf.layers.dense(
        x, classes, reduced_dims=[hidden2], name="logits",
        kernel_initializer=p_initializer(p, "logits", [32, 10], 0.2),
    ), classes


def p_initializer(p, name, sizes, scale):
    """Returns a dense layer's initializer of seeded numbers."""

    class Seeded(mtf.layers.DenseInitializer):
        def __call__(self, reduced_dims, new_dims):
            return p.initial(name, sizes, scale)

    return Seeded()


def mnist_loss(p, batch=4):
    images = p.input("images", f"batch:{batch},rows:28,cols:28", "positive")
    labels = p.input("labels", f"batch:{batch}", 10)
    logits, classes = mnist_logits(p, images)
    loss = mtf.layers.softmax_cross_entropy_with_logits(
        logits, mtf.one_hot(labels, classes), classes
    )
    return mtf.reduce_mean(loss), logits


@model("batch:x,hidden1:y", "row_blocks:x,col_blocks:y", "batch:x,row_blocks:y", "")
def mnist(p):
    loss, logits = mnist_loss(p)
    return {"loss": loss, "logits": logits, **p.loss_gradients(loss)}


@model("batch:x,row_blocks:y", steps=3)
def mnist_adafactor(p):
    loss, logits = mnist_loss(p)
    p.train(loss, mtf.optimize.AdafactorOptimizer)
    return {"loss": loss, "logits": logits}


@model("batch:x,heads:y", "batch:x,ff:y,vocab:y", "batch:x", steps=5)
def language_model(p):
    """A decoder of one block, written with einsums, trained with Adafactor."""
    batch, length, d, heads, kv, ff, vocab = dims("batch:4,length:6,d:8,heads:2,kv:4,ff:16,vocab:12")
    memory = mtf.Dimension("memory", length.size)
    ids = p.input("ids", mtf.Shape([batch, length]), vocab.size)
    inputs = mtf.shift(ids, 1, length, wrap=False)
    embed = p.variable("embedding", mtf.Shape([vocab, d]), scale=0.3)
    position = p.variable("position", mtf.Shape([length, d]), scale=0.3)
    x = mtf.gather(embed, inputs, vocab) + position
    with tf.variable_scope("attention"):
        y = mtf.layers.layer_norm(x, d)
        q, k, v = (
            mtf.einsum([y, p.variable(n, mtf.Shape([d, heads, kv]), scale=0.3)], reduced_dims=[d])
            for n in "qkv"
        )
        k = mtf.rename_dimension(k, "length", "memory")
        v = mtf.rename_dimension(v, "length", "memory")
        logits = mtf.einsum([q, k], reduced_dims=[kv])
        late = mtf.less(mtf.range(p.mesh, length, tf.int32), mtf.range(p.mesh, memory, tf.int32))
        logits += mtf.cast(late, tf.float32) * -1e9
        weights = mtf.softmax(logits, memory)
        o = p.variable("o", mtf.Shape([heads, kv, d]), scale=0.3)
        attended = mtf.einsum([weights, v], reduced_dims=[memory])
        x += mtf.einsum([attended, o], output_shape=x.shape)
    with tf.variable_scope("feed_forward"):
        y = mtf.layers.layer_norm(x, d)
        wi, wo = p.variable("wi", mtf.Shape([d, ff]), scale=0.3), p.variable("wo", mtf.Shape([ff, d]), scale=0.3)
        x += mtf.einsum([mtf.gelu(mtf.einsum([y, wi], reduced_dims=[d])), wo], reduced_dims=[ff])
    logits = mtf.einsum([x, embed], reduced_dims=[d])
    loss = mtf.layers.softmax_cross_entropy_with_logits(logits, ids, vocab, z_loss=1e-3)
    loss = mtf.reduce_mean(loss * mtf.cast(mtf.not_equal(ids, 0), tf.float32))
    p.train(loss, mtf.optimize.AdafactorOptimizer)
    return {"loss": loss, "logits": logits}


@model("batch:x,experts:y", "experts:x", "batch:x")
def mixture_of_experts(p):
    """Top-2 gating with a capacity: one_hot, cumsum, top_k and einsums."""
    batch, tokens, d, experts, hidden, capacity, k = dims(
        "batch:4,tokens:6,d:8,experts:4,hidden:6,capacity:3,k:2"
    )
    x = p.input("x", mtf.Shape([batch, tokens, d]))
    gate = p.variable("gate", mtf.Shape([d, experts]))
    wi = p.variable("wi", mtf.Shape([experts, d, hidden]), scale=0.3)
    wo = p.variable("wo", mtf.Shape([experts, hidden, d]), scale=0.3)
    probs = mtf.softmax(mtf.einsum([x, gate], reduced_dims=[d]), experts)
    gates, index = mtf.top_k(probs, experts, k)
    gate_1, gate_2 = mtf.unstack(gates, k)
    index_1, index_2 = mtf.unstack(index, k)
    mask_1, mask_2 = mtf.one_hot(index_1, experts), mtf.one_hot(index_2, experts)
    place_1 = mtf.cumsum(mask_1, tokens, exclusive=True) * mask_1
    count = mtf.reduce_sum(mask_1, reduced_dim=tokens)
    place_2 = (mtf.cumsum(mask_2, tokens, exclusive=True) + count) * mask_2

    def dispatch(mask, place, gate):
        mask *= mtf.to_float(mtf.less(place, float(capacity.size)))
        flat = mtf.reduce_sum(mask, reduced_dim=experts)
        where = mtf.to_int32(mtf.reduce_sum(place * mask, reduced_dim=experts))
        return mtf.einsum(
            [mask, mtf.one_hot(where, capacity), gate * flat], output_shape=[batch, tokens, experts, capacity]
        )

    total = gate_1 + gate_2 + 1e-9
    combine = dispatch(mask_1, place_1, gate_1 / total) + dispatch(mask_2, place_2, gate_2 / total)
    route = mtf.cast(mtf.cast(combine, tf.bool), tf.float32)
    sent = mtf.einsum([route, x], output_shape=[experts, batch, capacity, d])
    h = mtf.relu(mtf.einsum([sent, wi], output_shape=[experts, batch, capacity, hidden]))
    back = mtf.einsum([h, wo], output_shape=[experts, batch, capacity, d])
    y = mtf.einsum([combine, back], output_shape=x.shape)
    density = mtf.reduce_mean(mask_1, reduced_dim=tokens)
    balance = mtf.reduce_mean(density * mtf.reduce_mean(probs, reduced_dim=tokens)) * 16.0
    loss = mtf.reduce_mean(mtf.square(y - x)) + balance
    return {"y": y, "combine": combine, "loss": loss, **p.loss_gradients(loss)}


@model("batch:x,x_blocks:y", "x_blocks:x", "")
def unet_3d(p):
    """Down and up once: 3-d convolutions of blocks, pooling, a transposed convolution."""
    batch, blocks, d, h, w, c = dims("batch:2,x_blocks:2,d:4,h:4,w:4,c:1")
    x = p.input("x", mtf.Shape([batch, blocks, d, h, w, c]))
    f1, f2 = dims("f1:4,f2:4")

    def conv(y, out, name):
        n = y.shape.dims[-1].size
        return mtf.relu(mtf.layers.conv3d_with_blocks(
            y, out, (3, 3, 3), d_blocks_dim=blocks, name=name,
            filter_initializer=p.initial(name, [3, 3, 3, n, out.size], 0.2)))

    first = conv(x, f1, "first")
    down = conv(mtf.layers.max_pool3d(first), f2, "down")
    kernel = p.variable("up", "fd:2,fh:2,fw:2,f1:4,f2:4", scale=0.3)
    up = mtf.Conv3dTransposeOperation(down, kernel, [1, 2, 2, 2, 1], "SAME").outputs[0]
    both = mtf.concat([mtf.rename_dimension(first, "f1", "f"), mtf.rename_dimension(up, "f1", "f")], "f")
    y = mtf.layers.dense(both, c, reduced_dims=both.shape.dims[-1:], name="out",
                         kernel_initializer=p_initializer(p, "out", [8, 1], 0.3))
    loss = mtf.reduce_mean(mtf.square(y))
    return {"y": y, "loss": loss, **p.loss_gradients(loss)}


@model("nx:x,ny:y", "nx:x", "bx:x,by:y")
def halo_diffusion(p):
    """A step of a stencil code: shifts of a periodic field, and the same with blocks and halos."""
    field = p.input("field", "nx:8,ny:8,nz:4")
    nx, ny, nz = field.shape.dims
    laplacian = -6.0 * field
    for dim in field.shape.dims:
        laplacian += mtf.shift(field, 1, dim, wrap=True) + mtf.shift(field, -1, dim, wrap=True)
    bx, by, sx, sy = dims("bx:2,by:2,sx:4,sy:4")
    blocks = mtf.replace_dimensions(mtf.replace_dimensions(field, nx, [bx, sx]), ny, [by, sy])
    blocks = mtf.transpose(blocks, [bx, by, sx, sy, nz])
    padded = mtf.halo_exchange(blocks, bx, sx, 1, wrap=True)
    padded = mtf.halo_exchange(padded, by, sy, 1, wrap=True)

    def stencil(f):
        near = f[..., :-2, 1:-1, :] + f[..., 2:, 1:-1, :] + f[..., 1:-1, :-2, :] + f[..., 1:-1, 2:, :]
        middle = f[..., 1:-1, 1:-1, :]
        return near + tf.roll(middle, 1, -1) + tf.roll(middle, -1, -1) - 6.0 * middle

    by_blocks = mtf.slicewise(
        stencil, [padded], output_shape=blocks.shape, output_dtype=tf.float32, splittable_dims=[bx, by]
    )
    (d_field,) = mtf.gradients([mtf.reduce_sum(mtf.square(by_blocks))], [field])
    (d_shift,) = mtf.gradients([mtf.reduce_sum(mtf.square(laplacian))], [field])
    return {"laplacian": laplacian, "by_blocks": by_blocks, "d_field": d_field, "d_shift": d_shift}
