"""The table of programs: the language, one family after the other."""

import tensorflow.compat.v1 as tf
from oracle_runner import Program

import mesh_tensorflow as mtf

PROGRAMS = {}
AB = ("a:x,b:y", "a:y", "")


def program(*layouts, **kwargs):
    def decorate(fn):
        assert fn.__name__ not in PROGRAMS
        PROGRAMS[fn.__name__] = Program(fn, layouts or AB, **kwargs)
        return fn

    return decorate


def dims(text):
    return mtf.convert_to_shape(text).dims


# -- elementwise


@program()
def elementwise(p):
    x = p.input("x", "a:4,b:6")
    names = "identity sin cos square exp sigmoid tanh negative swish gelu elu selu softplus relu"
    names += " squared_relu leaky_relu sign abs"
    return {n: getattr(mtf, n)(x) for n in names.split()}


@program()
def elementwise_positive(p):
    x = p.input("x", "a:4,b:6", "positive")
    outputs = {n: getattr(mtf, n)(x) for n in "sqrt rsqrt log reciprocal".split()}
    outputs["pow_2.5"] = mtf.pow(x, 2.5)
    outputs["pow_tensor"] = mtf.pow(x, p.input("y", "a:4,b:6"))
    return outputs


@program()
def elementwise_at_ties(p):
    x = mtf.import_tf_tensor(p.mesh, tf.constant([[-1.0, 0.0], [0.0, 2.0]]), mtf.Shape(dims("a:2,b:2")))
    p.inputs["x"] = x
    return {n: getattr(mtf, n)(x) for n in "relu abs leaky_relu squared_relu sign elu".split()}


@program(gradients=False)
def casts(p):
    x, i, b = p.input("x", "a:4,b:6"), p.input("i", "a:4,b:6", 10), p.input("c", "a:4,b:6", "bool")
    return {
        "to_int32": mtf.to_int32(x * 10.0),
        "to_float": mtf.to_float(i),
        "to_bfloat16": mtf.to_bfloat16(x),
        "cast_bool": mtf.cast(b, tf.float32),
        "cast_to_bool": mtf.cast(i, tf.bool),
        "logical_not": mtf.logical_not(b),
        "same": mtf.cast(x, tf.float32),
        "negative_int": mtf.negative(i),
        "identity_int": mtf.identity(i),
    }


@program(tolerance=1e-2)
def bfloat16(p):
    x = mtf.cast(p.input("x", "a:4,b:6"), tf.bfloat16)
    y = mtf.cast(p.input("y", "b:6"), tf.bfloat16)
    return {"add": x + y, "mul": x * y, "tanh": mtf.tanh(x), "scalar": x * 2.0 + 1.0}


# -- binary


@program()
def binary(p):
    x, y = p.input("x", "a:4,b:6"), p.input("y", "a:4,b:6", "positive")
    return {
        "add": x + y,
        "sub": x - y,
        "mul": x * y,
        "div": x / y,
        "truediv": mtf.divide(x, y),
        "minimum": mtf.minimum(x, y),
        "maximum": mtf.maximum(x, y),
        "neg": -x,
        "add_n": mtf.add_n([x, y, x]),
        "where": mtf.where(mtf.greater(x, y), x, y),
    }


@program("a:x,b:y", "b:x,c:y", "a:x,c:y")
def binary_broadcast(p):
    x, y, z = p.input("x", "a:4,b:6"), p.input("y", "b:6", "positive"), p.input("z", "b:6,c:2")
    s = p.input("s", "", "positive")
    return {
        "add": x + y,
        "add_reversed": y + x,
        "sub": x - y,
        "sub_reversed": y - x,
        "mul": x * y,
        "div": x / y,
        "outer_add": x + z,
        "outer_mul": x * z,
        "output_shape": mtf.add(x, z, output_shape=dims("c:2,a:4,b:6")),
        "sub_output_shape": mtf.sub(x, z, output_shape=dims("c:2,b:6,a:4")),
        "scalar_tensor": (x + s) * s,
        "scalar_tensor_left": s - x,
        "where": mtf.where(mtf.greater(y, 1.0), x, mtf.zeros_like(x)),
        "broadcast": mtf.broadcast(y, dims("c:2,b:6,a:4")),
    }


@program("a:x,b:y")
def maximum_broadcast(p):
    x, y = p.input("x", "a:4,b:6"), p.input("y", "b:6")
    return {"maximum": mtf.maximum(x, y), "minimum": mtf.minimum(y, x)}


@program()
def scalars(p):
    x = p.input("x", "a:4,b:6", "positive")
    return {
        "x+2": x + 2,
        "2+x": 2 + x,
        "x-2": x - 2,
        "2-x": 2 - x,
        "x*3": x * 3,
        "3*x": 3 * x,
        "x/4": x / 4,
        "4/x": 4 / x,
        "x+1.5": x + 1.5,
        "maximum": mtf.maximum(x, 1.0),
        "minimum": mtf.minimum(1.0, x),
        "add": mtf.add(2.0, x),
        "mul": mtf.multiply(x, tf.constant(2.5)),
    }


@program(gradients=False)
def binary_without_gradient(p):
    x, z = p.input("x", "a:4,b:6", "positive"), p.input("z", "b:6,c:2")
    return {
        "mod": x % 0.7,
        "floordiv": x // 0.7,
        "with_broadcasting": mtf.binary_op_with_broadcasting(tf.subtract, x, z, output_dtype=tf.float32),
    }


@program()
def ties(p):
    x, y = p.input("x", "a:4,b:6", 3), p.input("y", "a:4,b:6", 3)
    x, y = mtf.to_float(x), mtf.to_float(y)
    p.inputs = {"x": x, "y": y}
    (b,) = dims("b:6")
    return {
        "maximum": mtf.maximum(x, y),
        "minimum": mtf.minimum(x, y),
        "reduce_max": mtf.reduce_max(x, reduced_dim=b),
        "reduce_min": mtf.reduce_min(x, reduced_dim=b),
    }


@program(gradients=False)
def integers_and_comparisons(p):
    x, y = p.input("x", "a:4,b:6", 5), p.input("y", "a:4,b:6", 5)
    z = p.input("z", "b:6", 5) + 1
    f, b = p.input("f", "a:4,b:6"), mtf.greater(x, 2)
    c = mtf.less(y, 3)
    return {
        "add": x + z,
        "sub": x - y,
        "rsub": 7 - x,
        "mul": x * y,
        "neg": -x,
        "floordiv": x // z,
        "mod": x % z,
        "floordiv_scalar": x // 2,
        "mod_scalar": x % 3,
        "minimum": mtf.minimum(x, z),
        "maximum": mtf.maximum(x, 2),
        "less": mtf.less(x, y),
        "greater": mtf.greater(x, z),
        "less_equal": mtf.less_equal(x, y),
        "greater_equal": mtf.greater_equal(x, y),
        "equal": mtf.equal(x, y),
        "not_equal": mtf.not_equal(x, z),
        "less_float": mtf.less(f, 0.0),
        "and": mtf.logical_and(b, c),
        "or": mtf.logical_or(b, c),
        "where": mtf.where(b, x, y),
        "where_scalar": mtf.where(b, f, 0.0),
        "one_like": mtf.ones_like(x),
        "einsum": mtf.einsum([x, y], output_shape=dims("b:6")),
    }


# -- einsum and reductions


@program("i:x,j:y", "i:x,k:y", "j:x,k:y", "j:x", "", tolerance=1e-4)
def einsum(p):
    x, y, z = p.input("x", "i:4,j:6"), p.input("y", "j:6,k:8"), p.input("z", "k:8,i:4")
    w = p.input("w", "j:6")
    i, j, k, new = dims("i:4,j:6,k:8,n:2")
    return {
        "matmul": mtf.matmul(x, y, output_shape=[i, k]),
        "default": mtf.einsum([x, y]),
        "transposed": mtf.einsum([x, y], output_shape=[k, i]),
        "three": mtf.einsum([x, y, z], output_shape=[]),
        "three_j": mtf.einsum([x, y, z], output_shape=[j]),
        "batched": mtf.einsum([x, y], output_shape=[j, i, k]),
        "no_reduction": mtf.einsum([x, y], reduced_dims=[]),
        "elementwise": mtf.einsum([x, w], output_shape=[i, j]),
        "reduce_own": mtf.einsum([x, y], output_shape=[i]),
        "broadcast": mtf.einsum([x, y], output_shape=[i, new, k]),
        "one": mtf.einsum([x], output_shape=[j]),
        "transpose": mtf.transpose(x, [j, i]),
        "inner": mtf.einsum([w, w], output_shape=[]),
        "reduced_dims": mtf.einsum([x, y, w], reduced_dims=[j]),
        "sum_of_two": mtf.einsum([x, y], output_shape=[i, k]) + mtf.einsum([x, y], output_shape=[i, k]),
    }


@program("a:x,b:y", "b:x,c:y", "a:x,c:y", "")
def reductions(p):
    x = p.input("x", "a:4,b:6,c:2", "distinct")
    a, b, c = x.shape.dims
    outputs = {}
    for n in ("sum", "mean", "max", "min"):
        fn = getattr(mtf, "reduce_" + n)
        outputs[n] = fn(x)
        outputs[n + "_dim"] = fn(x, reduced_dim=b)
        outputs[n + "_shape"] = fn(x, output_shape=[c, a])
        outputs[n + "_same"] = fn(x, output_shape=[a, b, c])
    outputs["first"] = mtf.reduce_first(x, c)
    outputs["twice"] = mtf.reduce_sum(mtf.reduce_sum(x, reduced_dim=b), reduced_dim=a)
    outputs["mean_of_max"] = mtf.reduce_mean(mtf.reduce_max(x, reduced_dim=a))
    outputs["tanh_of_sum"] = mtf.tanh(0.02 * mtf.reduce_sum(x, reduced_dim=b))
    return outputs


@program("a:x,b:y", "b:x", gradients=False)
def reductions_of_others(p):
    x, i = p.input("x", "a:4,b:6", "bool"), p.input("i", "a:4,b:6", 9)
    a, b = x.shape.dims
    return {
        "all": mtf.reduce_all(x),
        "any": mtf.reduce_any(x, reduced_dim=b),
        "all_dim": mtf.reduce_all(x, reduced_dim=a),
        "sum": mtf.reduce_sum(i, reduced_dim=b),
        "max": mtf.reduce_max(i, reduced_dim=a),
        "min": mtf.reduce_min(i),
    }


@program("a:x", "a:x,c:y", "")
def top_k(p):
    x = p.input("x", "a:4,b:12,c:2", "distinct")
    a, b, c = x.shape.dims
    outputs = {}
    for k in (1, 2, 3, 4, 6):
        outputs[f"values_{k}"], outputs[f"indices_{k}"] = mtf.top_k(x, b, mtf.Dimension("k", k))
    outputs["top_1"], outputs["top_1_index"] = mtf.top_1(x, b)
    outputs["argmax"] = mtf.argmax(x, b)
    outputs["largest_0"] = mtf.nth_largest_element(x, 0, b)
    outputs["largest_2"] = mtf.nth_largest_element(x, 2, b)
    outputs["smallest_1"] = mtf.nth_smallest_element(x, 1, b)
    return outputs


@program("b:x", "a:x,b:y")
def top_k_split(p):
    x = p.input("x", "a:4,b:12", "distinct")
    a, b = x.shape.dims
    outputs = {}
    for k in (1, 2, 6):
        outputs[f"values_{k}"], outputs[f"indices_{k}"] = mtf.top_k(x, b, mtf.Dimension("k", k))
    outputs["argmax"] = mtf.argmax(x, b)
    return outputs


@program("a:x", gradients=False)
def top_k_ties(p):
    x = mtf.to_float(p.input("x", "a:4,b:12", 3))
    a, b = x.shape.dims
    outputs = {}
    for k in (1, 3, 5):
        outputs[f"values_{k}"], outputs[f"indices_{k}"] = mtf.top_k(x, b, mtf.Dimension("k", k))
    return outputs


# -- softmax


@program("a:x,v:y", "v:x", "a:x")
def softmax(p):
    x, extra = p.input("x", "a:4,v:8"), p.input("extra", "a:4")
    v = x.shape.dims[1]
    return {
        "softmax": mtf.softmax(x, v),
        "log_softmax": mtf.log_softmax(x, v),
        "logsumexp": mtf.reduce_logsumexp(x, v),
        "softmax_extra_0": mtf.softmax(x, v, extra_logit=0.0),
        "log_softmax_extra_1": mtf.log_softmax(x, v, extra_logit=1.0),
        "logsumexp_extra_0": mtf.reduce_logsumexp(x, v, extra_logit=0.0),
        "softmax_extra_tensor": mtf.softmax(x, v, extra_logit=extra),
    }


# -- reshape and its kin


RESHAPES = {
    "rename": lambda x: mtf.rename_dimension(x, "a", "c"),
    "flat": lambda x: mtf.reshape(x, dims("ab:24")),
    "and_back": lambda x: mtf.reshape(mtf.reshape(x, dims("ab:24")), x.shape),
    "split": lambda x: mtf.replace_dimensions(x, x.shape.dims[0], dims("d:2,a2:2")),
    "split_inner": lambda x: mtf.replace_dimensions(x, x.shape.dims[0], dims("a2:2,d:2")),
    "relabel": lambda x: mtf.reshape(x, dims("b:6,a:4")),
    "same": lambda x: mtf.reshape(x, x.shape),
    "one": lambda x: mtf.reshape(x, dims("a:4,one:1,b:6")),
    "anonymize": mtf.anonymize,
    "uneven": lambda x: mtf.reshape(x, dims("d:2,e:12")),
    "of_sum": lambda x: mtf.reshape(mtf.reduce_sum(x, output_shape=dims("b:6")), dims("e:3,d:2")),
}
RESHAPE_LAYOUTS = ("a:x,b:y", "a:x,c:x,b:y", "a:x,c:y", "b:x,c:y", "ab:x", "a:x,ab:x", "a:x,ab:y", "d:x,a:y", "a:x,d:x", "b:x,d:x")


def _reshape_program(name, fn):
    def reshape(p):
        return {"y": fn(p.input("x", "a:4,b:6"))}

    reshape.__name__ = "reshape_" + name
    # Where the result has both b and d, one mesh axis cannot split them.
    layouts = [t for t in RESHAPE_LAYOUTS if not (name.startswith("split") and t == "b:x,d:x")]
    program(*layouts)(reshape)


for _name, _fn in RESHAPES.items():
    _reshape_program(_name, _fn)


@program("a:x,b:y", "b:x,c:y", "")
def transposes(p):
    x = p.input("x", "a:4,b:6,c:2")
    a, b, c = x.shape.dims
    return {
        "cba": mtf.transpose(x, [c, b, a]),
        "bac": mtf.transpose(x, [b, a, c]),
        "same": mtf.transpose(x, [a, b, c]),
    }


@program("a:x,c:y", "c:x", "")
def concat_and_split(p):
    x, y = p.input("x", "a:4,b:6,c:2"), p.input("y", "a:4,b:3,c:2")
    a, b, c = x.shape.dims
    outputs = {"concat": mtf.concat([x, y, x], "b")}
    for i, part in enumerate(mtf.split(x, b, 3)):
        outputs[f"split_{i}"] = part
    for i, part in enumerate(mtf.split(x, b, [1, 2, 3])):
        outputs[f"split_sizes_{i}"] = part
    parts = mtf.unstack(x, b)
    outputs["unstack_sum"] = mtf.add_n([q * float(i) for i, q in enumerate(parts)])
    outputs["stack_0"] = mtf.stack([y, y * 2.0], "s", axis=0)
    outputs["stack_2"] = mtf.stack([y, y * 2.0], "s", axis=2)
    outputs["restack"] = mtf.stack(parts, "b", axis=1)
    return outputs


@program("a:x")
def unstack_in_part(p):
    x = p.input("x", "a:4,b:6")
    return {"first": mtf.unstack(x, x.shape.dims[1])[0]}


@program("a:x,c:y", "c:x", "")
def slice_and_pad(p):
    x = p.input("x", "a:4,b:6,c:2")
    return {
        "slice": mtf.slice(x, 1, 3, "b"),
        "slice_to_end": mtf.slice(x, 2, 4, "b"),
        "pad": mtf.pad(x, [2, 1], "b"),
        "pad_left": mtf.pad(x, [1, 0], "b"),
        "slice_of_pad": mtf.slice(mtf.pad(x, [3, 3], "b"), 1, 8, "b"),
    }


@program("a:x,b:y", "b:x", "b:y,c:x", "")
def shift(p):
    x = p.input("x", "a:4,b:8,c:2")
    (_, b, _) = x.shape.dims
    outputs = {}
    for offset in (-9, -5, -3, 0, 1, 4, 7, 8):
        for wrap in (False, True):
            outputs[f"{offset}_{wrap}"] = mtf.shift(x, offset, b, wrap)
    return outputs


@program("blocks:x,batch:y", "blocks:y", "")
def halo_exchange(p):
    x = p.input("x", "batch:2,blocks:4,size:3")
    _, blocks, size = x.shape.dims
    outputs = {}
    for halo in (0, 1, 2, 3, 4, 7):
        for wrap in (False, True):
            outputs[f"{halo}_{wrap}"] = mtf.halo_exchange(x, blocks, size, halo, wrap)
            outputs[f"left_{halo}_{wrap}"] = mtf.left_halo_exchange(x, blocks, size, halo, wrap)
    return outputs


@program("batch:y")
def halo_without_blocks(p):
    x = p.input("x", "batch:2,size:3")
    return {"y": mtf.halo_exchange(x, None, x.shape.dims[1], 2)}


@program("a:x", "b:x")
def dynamic_shift(p):
    x = p.input("x", "a:4,b:6")
    by = p.input("by", "", 3)
    _, b = x.shape.dims
    return {
        "shift": mtf.dynamic_shift(x, by, b, False),
        "wrap": mtf.dynamic_shift(x, by, b, True),
    }


# -- indexing


@program("b:x,v:y", "v:x,d:y", "b:x,d:y", "")
def gather(p):
    w, i = p.input("w", "v:8,d:4"), p.input("i", "b:4,l:2", 8)
    out = p.input("out", "b:4", 12) - 2
    v, d = w.shape.dims
    return {
        "gather": mtf.gather(w, i, v),
        "gather_shape": mtf.gather(w, i, v, output_shape=[d] + i.shape.dims),
        "out_of_range": mtf.gather(w, out, v),
        "one_hot": mtf.one_hot(i, v),
        "one_hot_values": mtf.one_hot(i, v, on_value=0.9, off_value=0.1),
        "one_hot_out": mtf.one_hot(out, v),
        "one_hot_int": mtf.one_hot(i, v, dtype=tf.int32, on_value=1, off_value=0),
        "gather_int": mtf.gather(mtf.to_int32(w * 10.0), i, v),
        "gather_bool": mtf.gather(mtf.greater(w, 0.0), i, v),
        "shared": mtf.gather(mtf.rename_dimension(mtf.gather(w, i, v), "d", "v2"), mtf.argmax(w, v) // 2, mtf.Dimension("l", 2)),
    }


@program("a:x,b:y", "b:x", "")
def cumsum_and_range(p):
    x, i = p.input("x", "a:4,b:6"), p.input("i", "a:4,b:6", 5)
    a, b = x.shape.dims
    return {
        "cumsum": mtf.cumsum(x, b),
        "exclusive": mtf.cumsum(x, b, exclusive=True),
        "first": mtf.cumsum(x, a),
        "int": mtf.cumsum(i, b),
        "range": mtf.range(p.mesh, b, tf.int32),
        "range_float": mtf.range(p.mesh, a, tf.float32),
        "mask": mtf.less(mtf.range(p.mesh, a, tf.int32), mtf.range(p.mesh, b, tf.int32)),
        "constant": mtf.constant(p.mesh, 3.5, [a, b]),
        "scalar": mtf.constant(p.mesh, 2, dtype=tf.int32),
        "zeros": mtf.zeros(p.mesh, [b, a]),
        "ones": mtf.ones(p.mesh, [b], dtype=tf.int32),
        "zeros_like": mtf.zeros_like(x),
        "replicated": mtf.import_fully_replicated(p.mesh, tf.constant([1.0, 2.0, 3.0, 4.0]), [a]),
    }


@program("a:x", "b:x", "a:x,b:y")
def groups_1d(p):
    x = p.input("x", "a:4,b:12")
    b = x.shape.dims[1]
    return {
        "pool": mtf.pool_tensor_1d(x, b, pool_size=3),
        "pool_max": mtf.pool_tensor_1d(x, b, reduce_fn=mtf.reduce_max, pool_size=2),
        "stride": mtf.stride_tensor_1d(x, b, pool_size=2),
    }


# -- convolution and pooling


def conv(p, rank, kind, strides, padding, sizes=(8, 6, 4), filters=(3, 3, 3)):
    letters = "dhw"[-rank:]
    spatial = ",".join(f"{c}:{n}" for c, n in zip(letters, sizes))
    x = p.input("x", f"batch:2,{spatial},in:4")
    ends = "out:2,in:4" if "transpose" in kind else "in:4,out:2"
    f = p.input("f", ",".join(f"f{c}:{n}" for c, n in zip(letters, filters)) + "," + ends)
    op = getattr(mtf, f"Conv{rank}d{kind.capitalize()}Operation")
    return op(x, f, [1, *strides, 1], padding).outputs[0]


CONV = ("batch:x,in:y", "batch:x,out:y", "in:x,out:y", "")


@program(*CONV)
def conv2d_same(p):
    return {"y": conv(p, 2, "", (1, 1), "SAME")}


@program(*CONV)
def conv2d_valid(p):
    return {"y": conv(p, 2, "", (1, 1), "VALID")}


@program(*CONV)
def conv2d_strided(p):
    return {"y": conv(p, 2, "", (2, 2), "SAME")}


@program("batch:x")
def conv2d_strided_uneven(p):
    return {"y": conv(p, 2, "", (2, 3), "SAME", sizes=(7, 5))}


@program(*CONV)
def conv2d_even_filter(p):
    return {"y": conv(p, 2, "", (2, 2), "SAME", filters=(4, 2))}


@program("batch:x,in:y", "in:x,out:y")
def conv2d_batches(p):
    x, f = p.input("x", "batch:2,more:2,h:4,w:4,in:4"), p.input("f", "fh:3,fw:3,in:4,out:2")
    return {"y": mtf.Conv2dOperation(x, f, (1, 1, 1, 1), "SAME").outputs[0]}


@program(*CONV)
def conv3d_same(p):
    return {"y": conv(p, 3, "", (1, 1, 1), "SAME", sizes=(4, 4, 4))}


@program("batch:x,in:y", "in:x,out:y")
def conv3d_strided(p):
    return {"y": conv(p, 3, "", (2, 2, 2), "SAME", sizes=(4, 4, 4))}


@program(*CONV)
def conv2d_transposed(p):
    return {"y": conv(p, 2, "transpose", (2, 2), "SAME", sizes=(3, 4), filters=(2, 2))}


@program("batch:x,in:y", "in:x,out:y")
def conv2d_transposed_wide(p):
    return {"y": conv(p, 2, "transpose", (2, 2), "SAME", sizes=(3, 4), filters=(3, 3))}


@program("batch:x,in:y", "in:x,out:y")
def conv3d_transposed(p):
    return {"y": conv(p, 3, "transpose", (2, 2, 2), "SAME", sizes=(2, 2, 2), filters=(2, 2, 2))}


@program("batch:x,c:y", "")
def pooling(p):
    x = p.input("x", "batch:2,h:4,w:6,c:2", "distinct")
    v = p.input("v", "batch:2,d:4,h:4,w:2,c:2", "distinct")
    layers = mtf.layers
    return {
        "max_2d": layers.max_pool2d(x),
        "avg_2d": layers.avg_pool2d(x, ksize=(2, 3)),
        "max_3d": layers.max_pool3d(v),
        "avg_3d": layers.avg_pool3d(v, ksize=(2, 2, 1)),
        "none": layers.max_pool2d(x, ksize=(1, 1)),
        "operation": mtf.PoolOperation(x, (2, 2), (2, 2), "MAX_2D").outputs[0],
    }


# -- gradients by hand, functions of one's own


@program("a:x", "a:y", "")
def slicewise_and_cwise(p):
    x, y = p.input("x", "a:4,b:6"), p.input("y", "a:4,b:6")
    a, b = x.shape.dims
    return {
        "cwise": mtf.cwise(lambda u, v: u * tf.sin(v), [x, y]),
        "cwise_grad": mtf.cwise(tf.tanh, [x], grad_function=lambda op, dy: [dy * 3.0]),
        "cwise_dtype": mtf.cwise(lambda u: tf.cast(u > 0, tf.int32), [x], output_dtype=tf.int32),
        "slicewise": mtf.slicewise(lambda u: tf.exp(-u), [x], splittable_dims=[a, b]),
        "slicewise_shape": mtf.slicewise(
            lambda u, v: tf.einsum("ab,ab->a", u, v), [x, y],
            output_shape=mtf.Shape([a]), output_dtype=tf.float32, splittable_dims=[a],
        ),
    }


@program()
def custom_gradient(p):
    x, y = p.input("x", "a:4,b:6"), p.input("y", "b:6")
    w = p.variable("w", "b:6")

    def fn(x, y):
        return mtf.tanh(x * w) + y, x * y

    def grad_fn(explicit_inputs, all_inputs, forward_operations, outputs, output_grads):
        x, y = explicit_inputs
        others = all_inputs[2:]
        return [output_grads[0] * 2.0, mtf.reduce_sum(output_grads[1], output_shape=y.shape)] + [
            mtf.reduce_sum(output_grads[0], output_shape=o.shape) * 5.0 for o in others
        ]

    u, v = mtf.custom_gradient(fn, grad_fn, [x, y])
    return {"u": u + v, "single": mtf.custom_gradient(
        lambda z: z * z, lambda output_grads, **_: [output_grads[0]], [x])}


@program()
def recompute_grad(p):
    x, w, v = p.input("x", "a:4,b:6"), p.variable("w", "b:6,c:4"), p.variable("v", "c:4,b:6")

    def block(x):
        return x + mtf.einsum([mtf.relu(mtf.einsum([x, w], output_shape=[x.shape.dims[0], w.shape.dims[1]])), v], output_shape=x.shape)

    y = x
    for _ in range(3):
        y = mtf.recompute_grad(block, [y])
    return {"y": y, "plain": block(x)}


@program()
def stop_gradient_and_depend(p):
    x = p.input("x", "a:4,b:6")
    y = mtf.square(x)
    return {"stop": mtf.stop_gradient(y) * x, "depend": mtf.depend(y, [mtf.exp(x)])}


@program(gradients=False)
def assignments(p):
    x, v = p.input("x", "a:4,b:6"), p.variable("v", "a:4,b:6")
    first = mtf.assign(v, x)
    read = mtf.depend(v, [first])
    w = p.variable("w", "b:6")
    add = mtf.assign_add(w, mtf.reduce_mean(x, output_shape=w.shape))
    sub = mtf.assign_sub(w, mtf.ones_like(w))
    p.update_ops = []
    return {"read": read, "w": mtf.depend(mtf.read_variable(w.operation), []), "names": mtf.zeros_like(mtf.depend(w, [add, sub]))}


@program(gradients=False)
def while_loop(p):
    x = p.input("x", "a:4,b:6")
    w = p.variable("w", "b:6,c:6", scale=0.3)
    n = mtf.constant(p.mesh, 0, dtype=tf.int32)

    def body(i, y):
        z = mtf.einsum([y, w], output_shape=[y.shape.dims[0], w.shape.dims[1]])
        return [i + 1, mtf.tanh(mtf.rename_dimension(z, "c", "b"))]

    i, y = mtf.while_loop(lambda i, y: mtf.less(i, 4), body, [n, x])
    none, same = mtf.while_loop(lambda i, y: mtf.less(i, 0), body, [n, x])
    (t,) = mtf.while_loop(
        lambda v: mtf.less(mtf.reduce_sum(v), 100.0), lambda v: [v + 1.0], [mtf.zeros_like(x)]
    )
    return {"i": i, "y": y, "none": none, "same": same, "t": t}


@program(gradients=False)
def while_loop_that_makes_variables(p):
    x = p.input("x", "a:4,b:6")

    def body(i, y):
        return [i + 1, y * p.variable("inside", "b:6")]

    n = mtf.constant(p.mesh, 0, dtype=tf.int32)
    _, y = mtf.while_loop(lambda i, y: mtf.less(i, 3), body, [n, x])
    return {"y": y}


def _accumulate(p, with_dimension):
    x = p.input("x", "a:4,b:6")
    b = x.shape.dims[1]

    def body(i, y):
        z = y * 0.5
        total = mtf.reduce_sum(z, output_shape=[b] if with_dimension else [])
        return [i + 1, z, total]

    n = mtf.constant(p.mesh, 0, dtype=tf.int32)
    i, z, total = mtf.while_loop(
        lambda i, y: mtf.less(i, 3), body, [n, x], has_accumulators=True
    )
    return {"i": i, "z": z, "total": total, "later": mtf.tanh(total) + 1.0}


@program(gradients=False)
def while_loop_accumulator(p):
    return _accumulate(p, True)


@program(gradients=False)
def while_loop_scalar_accumulator(p):
    return _accumulate(p, False)


@program("batch:x,d:y", "d:x", "batch:x", gradients=False)
def serialize_training_step(p):
    x, t = p.input("x", "batch:8,d:4"), p.input("t", "batch:8")
    w = p.variable("w", "d:4,h:6")
    v = p.variable("v", "h:6")

    def model(features):
        h = mtf.tanh(mtf.einsum([features["x"], w], output_shape=[features["x"].shape.dims[0], w.shape.dims[1]]))
        y = mtf.einsum([h, v], output_shape=[h.shape.dims[0]])
        return {"loss": mtf.reduce_sum(mtf.square(y - features["t"])), "y": y}

    grads, outputs = mtf.serialize_training_step({"x": x, "t": t}, model, x.shape.dims[0], 4)
    return {"loss": outputs["loss"], "y": outputs["y"], "dw": grads[0], "dv": grads[1]}
