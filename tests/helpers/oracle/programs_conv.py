"""Programs: convolution and pooling."""

import mesh_tensorflow as mtf
from helpers.oracle.oracle_runner import table

PROGRAMS, program = table("a:x,b:y", "a:y", "")


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
