"""Programs: reshape and its kin, shifts, indexing."""

import tensorflow.compat.v1 as tf

import mesh_tensorflow as mtf
from helpers.oracle.oracle_runner import dims, table

PROGRAMS, program = table("a:x,b:y", "a:y", "")


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
