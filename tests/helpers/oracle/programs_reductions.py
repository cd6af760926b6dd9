"""Programs: einsum, reductions, softmax."""

import mesh_tensorflow as mtf
from helpers.oracle.oracle_runner import dims, table

PROGRAMS, program = table("a:x,b:y", "a:y", "")


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
