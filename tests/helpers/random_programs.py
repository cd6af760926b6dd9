"""Programs put together from lists of small integers, and what comes out of them in a placing."""

from __future__ import annotations

import functools
import random
from typing import NamedTuple, Optional

import numpy as np
import tensorflow.compat.v1 as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.testing import harness
from mesh_tensorflow.testing.harness import Placing

DIMS = [mtf.Dimension(n, s) for n, s in [("a", 4), ("b", 6), ("c", 8), ("d", 12), ("e", 4)]]
INPUTS = [[0, 1], [1, 2], [0, 2, 3], [2, 4], [3]]
VARIABLES = [[1, 3], [2], [2, 3], [2]]
LARGEST = 4096
ROUNDING = 1e-6
STEPS = 2  # the second reads what the first assigned
SHAPES = [
    "x:1",
    "x:2",
    "x:3",
    "x:4",
    "x:6",
    "x:8",
    "x:2,y:2",
    "x:2,y:3",
    "x:3,y:2",
    "x:2,y:4",
    "x:4,y:2",
    "x:1,y:4",
    "x:2,y:2,z:2",
    "x:2,y:1,z:3",
]
SMALL = [shape for shape in SHAPES if mtf.convert_to_shape(shape).size in (2, 3, 4)]
# What is not offered, with a mend in each message.
REFUSED = (
    "Pass it to mtf.while_loop as maximum_iterations",
    "or leave ring out",
    "instead of that of the whole batch",  # a dimension that has its size by chance
    # The loss of a whole batch, from those of its microbatches.
    "joins it with random numbers, which each microbatch draws anew",
    "it is computed in a function with a custom gradient",
    "whose elements weigh differently in it",
    "is no sum or mean over the batch",
    "which may be made of the size of a microbatch",
    "compares examples of a batch with each other",
)
# Slots of Adam are compared, so that no division may enlarge errors of rounding.
OPTIMIZERS = {
    "sgd": lambda: mtf.optimize.SgdOptimizer(0.1),
    "momentum": lambda: mtf.optimize.MomentumOptimizer(0.1, 0.9),
    "adam": lambda: mtf.optimize.AdamWeightDecayOptimizer(0.01, weight_decay_rate=0.1, epsilon=0.1),
    "adamw": lambda: mtf.optimize.AdamWOptimizer(0.01, epsilon=1e-1),
    "adafactor": lambda: mtf.optimize.AdafactorOptimizer(
        learning_rate=0.01, min_dim_size_to_factor=6, beta1=0.9, epsilon1=1e-3
    ),
}


def _tame(x):
    """Keeps values of a size at which rounding stays small."""
    return mtf.tanh(x * 0.7)


class DoesNotFit(Exception):
    """The instruction's operands are not such as it takes."""


def is_refused(error):
    """Whether an error says that a program is not offered in a layout."""
    return isinstance(error, ValueError) and any(text in str(error) for text in REFUSED)


def unless_refused(check):
    """Decorates a check, which ends where a program is not offered in a layout."""

    @functools.wraps(check)
    def checked(*args, **kwargs):
        try:
            check(*args, **kwargs)
        except ValueError as e:
            if not is_refused(e):
                raise

    return checked


class Builder:
    """Holds the tensors made so far, and makes one more for each instruction."""

    def __init__(self, recompute=False, keeps_state=False, inputs=None, variables=None):
        self.recompute = recompute
        self.keeps_state = keeps_state  # not in functions, which may be called several times
        self.dims = DIMS
        self.updates = []
        self.graph = mtf.Graph()
        self.mesh = mtf.Mesh(self.graph, "mesh")
        rng = np.random.RandomState(0)
        self.inputs = []
        for places in [INPUTS[n] for n in inputs or range(len(INPUTS))]:
            shape = mtf.Shape([DIMS[i] for i in places])
            value = rng.normal(size=shape.to_integer_list).astype(np.float32)
            self.inputs.append(mtf.import_tf_tensor(self.mesh, value, shape))
        self.variables = [
            mtf.get_variable(
                self.mesh,
                f"v{i}",
                [DIMS[d] for d in VARIABLES[i]],
                initializer=tf.random_normal_initializer(stddev=0.5),
            )
            for i in variables or range(len(VARIABLES))
        ]
        self.pool = [*self.inputs, *self.variables]
        self.states = []
        self.count = 0

    def step(self, op, i, j, k):
        """Carries out one instruction; one that does not fit its operands does nothing."""
        x, y = self.pool[-1 - i % len(self.pool)], self.pool[-1 - j % len(self.pool)]

        def apply(x, y):
            made = OPS[op % len(OPS)](self, x, y, k)
            if made is None or made.size > LARGEST or len(made.shape) > 5:
                raise DoesNotFit
            return _tame(made)

        mark = self.graph.mark()
        try:
            self.pool.append(self.recomputed(apply, k % 4 if self.recompute else 0)(x, y))
        except DoesNotFit:
            self.graph.roll_back(mark)

    def recomputed(self, fn, depth):
        """Returns a function of two tensors in as many `recompute_grad`."""
        if not depth:
            return fn
        inner = self.recomputed(fn, depth - 1)
        return lambda x, y: mtf.recompute_grad(inner, [x, y])

    # -- helpers

    def fresh(self):
        """Returns a name of its own for a new dimension."""
        self.count += 1
        return f"n{self.count}"

    def noise(self, x):
        """Returns random values: no two elements of x + noise tie by accident of rounding."""
        return mtf.random_uniform(self.mesh, x.shape)

    def variable(self, shape, **kwargs):
        """Returns a variable with a name of its own."""
        start = tf.random_normal_initializer(stddev=0.5)
        return mtf.get_variable(
            self.mesh, f"own_{self.fresh()}", shape, initializer=start, **kwargs
        )

    def fits(self, x, y):
        """Whether the two can be broadcast to one shape that is not too large."""
        names = {d.name: d for d in x.shape}
        both = set(x.shape) | set(y.shape)
        clash = any(names.get(d.name, d) != d for d in y.shape)
        return not clash and np.prod([d.size for d in both]) <= LARGEST and len(both) <= 5


def _unary(b, x, y, k):
    fns = [mtf.sin, mtf.sigmoid, mtf.gelu, mtf.softplus, mtf.exp, mtf.negative, mtf.swish, mtf.elu]
    return fns[k % len(fns)](x)


def _number(b, x, y, k):
    return [x * 0.5 + 1.0, 1.0 - x, 2.0 / (mtf.square(x) + 1.0)][k % 3]


def _binary(b, x, y, k):
    if b.fits(x, y):
        return [mtf.add, mtf.sub, mtf.multiply][k % 3](x, y)


def _extreme(b, x, y, k):
    if b.fits(x, y):
        return [mtf.maximum, mtf.minimum][k % 2](x, y + b.noise(y))


def _einsum(b, x, y, k):
    if not b.fits(x, y):
        return None
    dims = list(dict.fromkeys(x.shape.dims + y.shape.dims))
    kept = [d for n, d in enumerate(dims) if k >> n & 1]
    return mtf.einsum([x, y], output_shape=kept) * (1.0 / np.sqrt(mtf.Shape(dims).size))


def _reduce(b, x, y, k):
    if len(x.shape):
        d = x.shape[k % len(x.shape)]
        return mtf.reduce_sum(x, reduced_dim=d) * 0.5 + mtf.reduce_mean(x, reduced_dim=d)


def _reduce_max(b, x, y, k):
    if len(x.shape):
        fn = [mtf.reduce_max, mtf.reduce_min][k % 2]
        return fn(x + b.noise(x), reduced_dim=x.shape[k // 2 % len(x.shape)])


def _sum_of_sums(b, x, y, k):
    """Two sums that may stay pending together."""
    if x.shape == y.shape and len(x.shape):
        d = x.shape[k % len(x.shape)]
        return mtf.reduce_sum(x, reduced_dim=d) + mtf.reduce_sum(y, reduced_dim=d)


def _broadcast(b, x, y, k):
    new = [d for d in b.dims if d.name not in x.shape.dimension_names]
    if new and len(x.shape) < 4:
        at = k % (len(x.shape) + 1)
        return mtf.broadcast(x, x.shape[:at] + [new[k % len(new)]] + x.shape[at:])


def _rename(b, x, y, k):
    if len(x.shape):
        old = x.shape[k % len(x.shape)]
        free = [d.name for d in b.dims if d.name not in x.shape.dimension_names] + [b.fresh()]
        name = free[k // 4 % len(free)]
        known = {d.name: d.size for d in b.dims}
        if known.get(name, old.size) == old.size:
            return mtf.rename_dimension(x, old.name, name)


def _transpose(b, x, y, k):
    if len(x.shape) > 1:
        at = k % len(x.shape)
        return mtf.transpose(x, x.shape[at:] + x.shape[:at])


def _merge(b, x, y, k):
    if len(x.shape) > 1:
        at = k % (len(x.shape) - 1)
        merged = mtf.combined_dimension(x.shape[at : at + 2], name=b.fresh())
        return mtf.replace_dimensions(x, x.shape[at : at + 2], merged)


def _cut(b, x, y, k):
    even = [d for d in x.shape if d.size % 2 == 0]
    if even and len(x.shape) < 4:
        d = even[k % len(even)]
        parts = [mtf.Dimension(b.fresh(), d.size // 2), mtf.Dimension(b.fresh(), 2)]
        return mtf.replace_dimensions(x, d, parts[:: 1 if k & 8 else -1])


def _shift(b, x, y, k):
    if len(x.shape):
        return mtf.shift(x, k - 16, x.shape[k % len(x.shape)], wrap=bool(k & 4))


def _halo(b, x, y, k):
    if len(x.shape) > 1:
        fn = [mtf.halo_exchange, mtf.left_halo_exchange][k & 1]
        return fn(x, x.shape[0], x.shape[1], 1 + k // 2 % 5, wrap=bool(k & 2))


def _softmax(b, x, y, k):
    if len(x.shape):
        d = x.shape[k % len(x.shape)]
        if k % 3 == 0:
            return x - mtf.reduce_logsumexp(x, d)
        return [mtf.softmax, mtf.log_softmax][k % 3 - 1](x, d)


def _cumsum(b, x, y, k):
    if len(x.shape):
        return mtf.cumsum(x, x.shape[k % len(x.shape)], exclusive=bool(k & 4)) * 0.3


def _joined(b, x, y, k):
    if len(x.shape):
        d = x.shape[k % len(x.shape)]
        return mtf.concat([x, x * 0.5, mtf.slice(x, 0, 1, d.name)], d.name)


def _ranges(b, x, y, k):
    if len(x.shape):
        d = x.shape[k % len(x.shape)]
        return mtf.pad(mtf.slice(x, k % d.size, d.size - k % d.size, d.name), [1, 2], d.name)


def _parts(b, x, y, k):
    if len(x.shape) and x.shape[0].size % 2 == 0:
        first, second = mtf.split(x, x.shape[0], 2)
        both = mtf.stack([first, second], b.fresh(), axis=k // 4 % 2)
        return [first, first + second, both][k % 3]


def _unstack(b, x, y, k):
    if len(x.shape):
        parts = mtf.unstack(x, x.shape[k % len(x.shape)])
        return parts[0] * parts[-1]


def _top_k(b, x, y, k):
    if len(x.shape):
        d = x.shape[k % len(x.shape)]
        return mtf.top_k(x + b.noise(x), d, mtf.Dimension(b.fresh(), 1 + k % min(d.size, 5)))[0]


def _gather(b, x, y, k):
    """Indices are those of an input, which is the same in all layouts."""
    source = b.inputs[k % len(b.inputs)]
    d = source.shape[k % len(source.shape)]
    index = mtf.argmax(source, d)
    if d in x.shape and b.fits(x, index):
        return mtf.gather(x, index, d)


def _where(b, x, y, k):
    mask = mtf.greater(b.inputs[k % len(b.inputs)], 0.1)
    if b.fits(x, mask):
        return mtf.where(mask, x, -0.5)


def _dropout(b, x, y, k):
    noise_shape = x.shape[: 1 + k % len(x.shape)] if len(x.shape) else None
    return mtf.dropout(x, rate=0.3, noise_shape=noise_shape)


def _random(b, x, y, k):
    make = [mtf.random_uniform, mtf.random_normal][k % 2]
    return x + make(b.mesh, x.shape[k % 3 :])


def _depend(b, x, y, k):
    return [mtf.stop_gradient(x) + y if b.fits(x, y) else None, mtf.depend(x, [y])][k % 2]


def _recompute(b, x, y, k):
    if b.fits(x, y):
        return mtf.recompute_grad(lambda u: mtf.sin(u * y) + mtf.dropout(u, rate=0.2), [x])


def _custom(b, x, y, k):
    def grad_fn(explicit_inputs, all_inputs, forward_operations, outputs, output_grads):
        return [output_grads[0] * 0.5 + explicit_inputs[0]]

    return mtf.custom_gradient(mtf.square, grad_fn, [x])


def _loop(b, x, y, k):
    if not b.fits(x, y) or any(d not in x.shape for d in y.shape):
        return None
    zero = mtf.constant(b.mesh, 0, dtype=tf.int32)

    def body(i, u):
        u = mtf.tanh(u * 1.1 + y * 0.3)
        if k & 4:
            u = mtf.dropout(u, rate=0.2)
        return [i + 1, u - mtf.reduce_mean(u) * 0.5, mtf.reduce_sum(u, output_shape=y.shape)]

    most = {"maximum_iterations": 1 + k % 3} if k & 8 else {}
    _, last, total = mtf.while_loop(
        lambda i, _: mtf.less(i, 1 + k % 3), body, [zero, x], has_accumulators=True, **most
    )
    return last + total * 0.1


def _slicewise(b, x, y, k):
    if len(x.shape):
        kept = x.shape[:-1]
        axis = len(kept)
        return mtf.slicewise(lambda t: tf.cumsum(t, axis) * 0.5, [x], splittable_dims=kept)


def _cwise(b, x, y, k):
    """TensorFlow's own gradient, of arguments that may be one tensor or made from the other."""
    other = [x, y, mtf.sin(x), mtf.stop_gradient(x)][k % 4]
    if other.shape == x.shape:
        return mtf.cwise(lambda t, u: t * tf.cos(u), [x, other])


def _state(b, x, y, k):
    """A counter, a moving average of a value, or of its mean; what is read is what was before."""
    if not b.keeps_state:
        return None
    kept = x.shape[k % (len(x.shape) + 1) :]
    state = b.variable(kept, trainable=False)
    value = mtf.reduce_mean(mtf.stop_gradient(x), output_shape=kept)
    new = [state + 1.0, state * 0.5 + value * 0.5, state + value][k % 3]
    b.updates.append(mtf.assign(state, new))
    b.states.append(state)
    return x + mtf.sin(state)


def _read(b, x, y, k):
    """A variable that is assigned in the same step, read again."""
    found = [s for s in b.states if b.fits(x, s)]
    return x * found[k % len(found)] if found else None


def _pipeline(b, x, y, k):
    even = [d for d in x.shape if d.size % 2 == 0]
    if not even or len(x.shape) > 3:
        return None
    batch = even[k % len(even)]
    parts = 2 if k & 1 else batch.size
    stages = mtf.Dimension(b.fresh(), 2 if parts == 2 or k & 2 else 4)
    repeats = mtf.Dimension(b.fresh(), 2) if k & 8 and parts >= stages.size else None
    own = [d for d in x.shape if d != batch][:1]
    first = [stages] if repeats is None else [repeats, stages]
    weights = [b.variable(first + own), b.variable(own)]

    def stage(u, w, shared, *sides):
        u = u * 0.7 + mtf.sin(u * w) + shared * 0.1
        for side in sides:
            u = u + mtf.reduce_mean(side, output_shape=[d for d in side.shape if d in u.shape])
        return u - mtf.reduce_mean(u, reduced_dim=own[0]) * 0.3 if own else u

    sides = [y] if k & 16 and batch in y.shape and b.fits(x, y) else []
    return mtf.layers.pipeline(
        stage, x, weights, stages, batch, parts, repeats, sides, recompute=bool(k & 4)
    )


def _attend(b, x, y, k):
    """Attention by blocks; in a layout that splits both lengths alike, around a ring."""
    if len(x.shape) < 2:
        return None
    length, channels = (x.shape[(k + i) % len(x.shape)] for i in range(2))
    memory = mtf.Dimension(b.fresh(), length.size)
    other = y if y.shape == x.shape else x * 0.5
    keys = mtf.rename_dimension(other, length.name, memory.name)
    visible = []
    if k & 1:
        places = [mtf.range(b.mesh, d, tf.int32) for d in (length, memory)]
        visible.append(("greater_equal", *places))
    return mtf.layers.blocked_attention(
        x,
        keys,
        mtf.sin(keys),
        memory,
        channels,
        channels,
        visible=visible,
        dropout_rate=0.2 if k & 2 else 0.0,
        extra_logit=0.3 if k & 4 else None,
        block_sizes=[None, (2, 3), (3, 2)][k % 3],
        ring=[False, True, "contiguous"][k // 8 % 3],
    )


def _more_unary(b, x, y, k):
    """Of those with kinks, arguments are such that rounding moves none over them."""
    fns = [
        lambda x: mtf.rsqrt(mtf.square(x) + 0.5),
        lambda x: mtf.reciprocal(mtf.square(x) + 1.0),
        lambda x: mtf.pow(mtf.square(x) + 0.5, 1.5),
        lambda x: mtf.sqrt(mtf.square(x) + 0.1),
        lambda x: mtf.relu(x + b.noise(x)),
        lambda x: mtf.leaky_relu(x - b.noise(x)),
        lambda x: mtf.abs(x + b.noise(x)),
        mtf.silu,
        mtf.selu,
        mtf.squared_relu,
        mtf.cos,
        mtf.identity,
    ]
    return fns[k % len(fns)](x)


def _einsum_of_three(b, x, y, k):
    z = b.pool[k % len(b.pool)]
    if not b.fits(x, y) or not b.fits(x + y, z):
        return None
    dims = mtf.Shape(list(dict.fromkeys([*x.shape, *y.shape, *z.shape])))
    kept = [d for n, d in enumerate(dims) if k >> n & 1]
    return mtf.einsum([x, y, z], output_shape=kept) * (1.0 / np.sqrt(dims.size))


def _divide(b, x, y, k):
    if b.fits(x, y):
        return mtf.divide(x, mtf.square(y) + 1.0)


def _nth(b, x, y, k):
    if len(x.shape):
        d = x.shape[k % len(x.shape)]
        fn = [mtf.nth_largest_element, mtf.nth_smallest_element][k % 2]
        return fn(x + b.noise(x), k // 2 % d.size, d)


def _pooled(b, x, y, k):
    even = [d for d in x.shape if d.size % 2 == 0]
    if even:
        d = even[k % len(even)]
        if k & 1:
            return mtf.pool_tensor_1d(
                x + b.noise(x), d, [mtf.reduce_mean, mtf.reduce_max][k // 2 % 2]
            )
        return mtf.stride_tensor_1d(x, d)


def _first(b, x, y, k):
    if len(x.shape):
        return mtf.reduce_first(x, x.shape[k % len(x.shape)])


def _dynamic(b, x, y, k):
    """A shift by the values of an input, which are the same in all layouts."""
    source = b.inputs[k % len(b.inputs)]
    offset = mtf.to_int32(mtf.reduce_sum(source, output_shape=source.shape[:1]) * 3.0)
    if len(x.shape) and b.fits(x, offset):
        free = [d for d in x.shape if d not in offset.shape]
        if free:
            return mtf.dynamic_shift(x, offset, free[k % len(free)], wrap=bool(k & 4))


def _truth(b, x, y, k):
    """Comparisons of inputs, and what holds for all or any of a dimension."""
    source = b.inputs[k % len(b.inputs)]
    big, small = mtf.greater(source, 0.3), mtf.less(source, -0.3)
    either = [mtf.logical_or(big, small), mtf.logical_and(big, mtf.logical_not(small))][k % 2]
    mask = [mtf.reduce_any, mtf.reduce_all][k // 2 % 2](either, reduced_dim=source.shape[-1])
    if b.fits(x, mask):
        return x * mtf.cast(mask, tf.float32) + mtf.where(mask, mtf.cos(x), 0.1)


def _dense(b, x, y, k):
    if not len(x.shape):
        return None
    reduced = [x.shape[k % len(x.shape)]]
    new = mtf.Dimension(b.fresh(), [4, 6, 8][k % 3])
    fns = [mtf.relu, None, [mtf.sin, mtf.tanh]]
    if k & 8:
        kinds = ["linear", "sigmoid"]
        return mtf.layers.dense_product(x, reduced, [new], kinds, name=f"own_{b.fresh()}")
    return mtf.layers.dense(
        x, [new], reduced_dims=reduced, activation=fns[k % 3], name=f"own_{b.fresh()}"
    )


def _experts(b, x, y, k):
    """A dense layer that has a kernel for each place along a dimension."""
    if len(x.shape) < 2:
        return None
    expert, reduced = (x.shape[(k + i) % len(x.shape)] for i in range(2))
    new = mtf.Dimension(b.fresh(), 4)
    name = f"own_{b.fresh()}"
    return mtf.layers.dense(x, [new], reduced_dims=[reduced], expert_dims=[expert], name=name)


def _normalized(b, x, y, k):
    if not len(x.shape):
        return None
    if k & 1 or not b.keeps_state or len(x.shape) < 2:
        d = x.shape[k % len(x.shape)]
        return mtf.layers.layer_norm(x, d, epsilon=0.1, name=f"own_{b.fresh()}")
    made, updates = mtf.layers.batch_norm(
        x, is_training=bool(k & 2), momentum=0.9, epsilon=0.1, name=f"own_{b.fresh()}"
    )
    b.updates += updates
    return made


def _embedding(b, x, y, k):
    """Rows of a variable; in a large one they are selected, in a small one multiplied."""
    source = b.inputs[k % len(b.inputs)]
    ids = mtf.argmax(source, source.shape[k % len(source.shape)])
    vocab = mtf.Dimension(b.fresh(), [12, 16, 600][k % 3])
    out = mtf.Dimension(b.fresh(), 4)
    name = f"own_{b.fresh()}"
    return mtf.layers.embedding(ids, vocab, out, mtf.VariableDType(), name=name)


def _cross_entropy(b, x, y, k):
    """Targets are ids of an input, as numbers or as probabilities."""
    source = b.inputs[k % len(b.inputs)]
    d = source.shape[-1]
    ids = mtf.argmax(source, d)
    if d not in x.shape or not b.fits(x, ids) or any(i not in x.shape for i in ids.shape):
        return None
    ids = ids + mtf.zeros(b.mesh, x.shape - d, tf.int32)
    targets = ids if k & 1 else mtf.one_hot(ids, d)
    return mtf.layers.softmax_cross_entropy_with_logits(x, targets, d, z_loss=0.01 * (k & 2))


def _convolution(b, x, y, k):
    """In one or two dimensions, whole or in blocks that a layout may split."""
    if len(x.shape) < 2:
        return None
    new, name = mtf.Dimension(b.fresh(), 4), f"own_{b.fresh()}"
    kind = k % 6
    if kind == 0:
        return mtf.layers.conv1d(x, new, filter_size=1 + k // 6 % 3, name=name)
    if kind == 1:
        return mtf.layers.separable_conv1d(x, new, name=name)
    if len(x.shape) == 2:
        x = mtf.reshape(x, [mtf.Dimension(b.fresh(), 1), *x.shape])
    strides = (1, 1 + k // 6 % 2)
    if kind == 2:
        return mtf.layers.conv2d(x, new, filter_size=(2, 3), strides=strides, name=name)
    if kind == 3:
        return mtf.layers.conv2d_transpose(x, new, strides=strides, name=name)
    if kind == 4:
        h, w = x.shape[-3], x.shape[-2]
        sizes = [2 if d.size % 2 == 0 else 1 for d in (h, w)]
        return [mtf.layers.max_pool2d, mtf.layers.avg_pool2d][k // 6 % 2](x + b.noise(x), sizes)
    h, w = x.shape[-3], x.shape[-2]
    if w.size % 4 or len(x.shape) > 3:
        return None
    blocks, inner = mtf.Dimension(b.fresh(), w.size // 2), mtf.Dimension(b.fresh(), 2)
    cut = mtf.transpose(
        mtf.replace_dimensions(x, w, [blocks, inner]), [blocks, h, inner, x.shape[-1]]
    )
    return mtf.layers.conv2d_with_blocks(cut, new, w_blocks_dim=blocks, name=name)


def _attention_layer(b, x, y, k):
    if len(x.shape) < 2:
        return None
    heads, channels = mtf.Dimension(b.fresh(), 2 + k % 3), mtf.Dimension(b.fresh(), 4)
    given = {"kv_channels": channels, "heads": heads, "is_training": True}
    name = f"own_{b.fresh()}"
    if k % 3 == 0:
        return mtf.layers.masked_local_attention_1d(x, window_size=2 + k % 2, name=name, **given)
    if k % 3 == 1 and x.shape[-2].size % 2 == 0:
        return mtf.layers.multihead_self_attention_memory_compressed(
            x, mask_right=bool(k & 4), compression_factor=2, name=name, **given
        )
    dropout = 0.2 if k & 4 else 0.0
    return mtf.layers.multihead_attention(x, None, None, dropout=dropout, name=name, **given)


def _reversible(b, x, y, k):
    if x.shape != y.shape:
        return None
    halves = [x, None, y, None]
    for fn in [mtf.tanh, lambda u: mtf.dropout(mtf.sin(u), rate=0.2 if k & 1 else 0.0)]:
        halves = mtf.layers.reversible_half_residual_and_swap(*halves, fn)
    return halves[0] + halves[2] * 0.5


OPS = [
    _unary,
    _number,
    _binary,
    _extreme,
    _einsum,
    _einsum,
    _einsum,
    _reduce,
    _reduce_max,
    _sum_of_sums,
    _broadcast,
    _rename,
    _transpose,
    _merge,
    _cut,
    _shift,
    _halo,
    _softmax,
    _cumsum,
    _joined,
    _ranges,
    _parts,
    _unstack,
    _top_k,
    _gather,
    _where,
    _dropout,
    _random,
    _depend,
    _recompute,
    _custom,
    _loop,
    _slicewise,
    _cwise,
    _state,
    _read,
    _pipeline,
    _attend,
    _more_unary,
    _einsum_of_three,
    _divide,
    _nth,
    _pooled,
    _first,
    _dynamic,
    _truth,
    _dense,
    _experts,
    _normalized,
    _embedding,
    _cross_entropy,
    _convolution,
    _attention_layer,
    _reversible,
]


class Program(NamedTuple):
    """A program.

    Attributes:
      instructions: lists of four integers.
      recompute: whether its instructions, some of them in several ways at once, and the program
        as a whole are functions whose inner values are computed again for their gradients.
      microbatches: into how many parts dimension a is cut, whose results are added up.
      optimizer: what updates variables, of OPTIMIZERS; plain descent by assignments if None.
      keeps_state: whether instructions may assign to variables, where they are in no function.
      inputs: the places in INPUTS of those that it has; all if None.
      variables: the places in VARIABLES of those that it begins with; all if None.
    """

    instructions: list
    recompute: bool = False
    microbatches: int = 1
    optimizer: Optional[str] = None
    keeps_state: bool = True
    inputs: Optional[tuple] = None
    variables: Optional[tuple] = None


def _run(b, instructions, *given):
    """Returns the last tensors that the instructions make of those given."""
    b.pool = list(given)
    for instruction in instructions:
        b.step(*instruction)
    return b.pool[len(given) :][-3:]


def _loss(b, made):
    return mtf.add_n([mtf.reduce_mean(mtf.square(x)) for x in made + b.variables])


def _in_microbatches(b, program):
    """Returns [the loss], and the gradients of trainable variables."""
    inputs, small = b.inputs, mtf.Dimension("a", DIMS[0].size // program.microbatches)

    def loss_fn(inputs):
        b.inputs, b.dims = inputs, [small, *DIMS[1:]]
        return _loss(b, _run(b, program.instructions, *inputs, *b.variables))

    found = mtf.optimize.accumulate_gradients(loss_fn, inputs, DIMS[0], program.microbatches)
    return [found.loss], found.grads


def build(program):
    """Returns (the Builder, outputs and gradients, update operations) of a program."""
    in_functions = program.recompute or program.microbatches > 1
    keeps_state = program.keeps_state and not in_functions
    b = Builder(program.recompute, keeps_state, program.inputs, program.variables)
    given, instructions = b.pool, program.instructions
    if program.microbatches > 1:
        targets, grads = _in_microbatches(b, program)
    else:
        if program.recompute:
            made = mtf.recompute_grad(lambda *given: _run(b, instructions, *given), given)
        else:
            made = _run(b, instructions, *given)
        loss = _loss(b, made)
        variables = [v.value for v in b.graph.trainable_variables]
        grads = mtf.gradients([loss], b.inputs + variables)
        targets = [*made, loss, *[g for g in grads[: len(b.inputs)] if g is not None]]
        grads = grads[len(b.inputs) :]
    pairs = [(g, v) for g, v in zip(grads, b.graph.trainable_variables) if g is not None]
    targets += [g for g, _ in pairs]
    if program.optimizer is None:
        updates = [mtf.assign_sub(v.value, g * 0.1) for g, v in pairs]
    else:
        updates = OPTIMIZERS[program.optimizer]().apply_grads(*map(list, zip(*pairs)))
    return b, targets, [*b.updates, *updates]


def placing_of(program, mesh, seed, **kind):
    """Returns a Placing with a random legal layout."""
    with tf.Graph().as_default():
        graph = build(program)[0].graph
        return Placing(mesh, harness.random_layout(graph, mesh, seed), **kind)


def run(program, placing=harness.WHOLE):
    """Returns what each of STEPS training steps gives, and the variables after them."""
    with tf.Graph().as_default(), placing.around():
        tf.set_random_seed(17)
        builder, targets, updates = build(program)
        lowerings = []

        def lowered():
            lowering = mtf.Lowering(builder.graph, {builder.mesh: placing.impl()})
            lowerings.append(lowering)
            exports = [lowering.export_to_tf_tensor(t) for t in targets]
            return exports, tf.group([lowering.lowered_operation(op) for op in updates])

        step = placing.run(lowered)
        [lowering] = lowerings
        _check_collectives(builder, lowering, targets, placing)
        to_slices = lowering.copy_masters_to_slices()
        to_masters = lowering.copy_slices_to_masters()
        with harness.session() as session:
            session.run(tf.global_variables_initializer())
            session.run(to_slices)
            values = [x for _ in range(STEPS) for x in session.run(step)[0]]
            session.run(to_masters)
            return values + session.run(tf.global_variables())


def _check_collectives(builder, lowering, targets, placing):
    counted, predicted = harness.counted_and_predicted(lowering, targets)
    assert counted == predicted, f"{placing}: {counted - predicted} and {predicted - counted}"


def check(program, placing, expected):
    """Raises AssertionError if a program does not give what is expected in a placing."""
    values = run(program, placing)
    assert len(values) == len(expected)
    for i, (value, e) in enumerate(zip(values, expected)):
        # 1 - y**2, the gradient of tanh, has the rounding errors of 1 where y is near 1.
        if np.shape(value) != np.shape(e) or not np.allclose(value, e, rtol=0, atol=ROUNDING):
            harness.assert_close(value, e, 1e-4, f"{placing}, target {i}")


def drawn(seed):
    """Returns the Program of a seed, and the Placings to try it in: one, or two if it is long."""
    rng = random.Random(seed)
    limits = (len(OPS), 4, 16, 32)
    instructions = [
        tuple(rng.randrange(n) for n in limits)
        for _ in range(rng.choice([1, 2, 2, 3, 3, 4, 5, 6, 8, 12]))
    ]
    special = rng.randrange(8)
    program = Program(
        instructions[:12] if special < 2 else instructions,
        recompute=special == 0,
        microbatches=2 if special == 1 else 1,
        optimizer=rng.choice([None, *OPTIMIZERS]),
        # The first input has the dimension of microbatches. Fewer make more programs in a time.
        inputs=(0, *sorted(rng.sample(range(1, len(INPUTS)), rng.choice([1, 2, 4])))),
        variables=tuple(sorted(rng.sample(range(len(VARIABLES)), rng.choice([1, 2, 4])))),
    )
    kinds = [
        {"merge": rng.choice(["none", "memory"])},
        {"apart": True, "merge": rng.choice(["none", "device"]), "pairs": rng.random() < 0.3},
        {"simd": True},
        {"pjrt": True},
    ]
    placings = []
    for kind in rng.sample(kinds, 1 + (len(instructions) > 8)):
        mesh = rng.choice(SHAPES if rng.random() < 0.3 else SMALL)
        if rng.random() < 0.4:
            axes = harness.mesh_axis_names(mesh)
            kind = {**kind, "zero": rng.choice([1, 2, 3]), "zero_axis": rng.choice(axes)}
        placings.append(placing_of(program, mesh, seed, **kind))
    return program, placings
