"""Programs: convolution layers."""

import mesh_tensorflow as mtf
from helpers.oracle.oracle_runner import dims, table, with_variables

LAYERS, layer = table()


@layer("batch:x,in:y", "batch:x", "")
def conv_layers(p):
    x, v = p.input("x", "batch:2,h:6,w:4,in:4"), p.input("v", "batch:2,d:4,h:2,w:2,in:4")
    out = mtf.Dimension("out", 2)
    layers = mtf.layers
    y = layers.conv2d(x, out, (3, 3))
    z = layers.conv2d(x, out, (3, 2), strides=(2, 2), name="strided")
    c = layers.conv3d(v, out, (3, 1, 2))
    return with_variables(p, {"y": y, "z": z, "c": c})


@layer("batch:x,in:y")
def conv2d_valid_strided(p):
    x = p.input("x", "batch:2,h:6,w:4,in:4")
    y = mtf.layers.conv2d(x, mtf.Dimension("out", 2), (3, 2), (2, 2), "VALID")
    return with_variables(p, {"y": y})


@layer("hb:x,wb:y", "batch:x,hb:y", "hb:x", "")
def conv2d_with_blocks(p):
    x = p.input("x", "batch:2,hb:2,wb:2,h:4,w:4,in:2")
    _, hb, wb, *_ = x.shape.dims
    out = mtf.Dimension("out", 2)
    fn = mtf.layers.conv2d_with_blocks
    y = fn(x, out, (3, 3), h_blocks_dim=hb, w_blocks_dim=wb, name="odd")
    z = fn(x, out, (5, 1), h_blocks_dim=hb, w_blocks_dim=wb, name="tall")
    return with_variables(p, {"y": y, "z": z})


@layer("db:x,hb:y", "batch:x,db:y", "")
def conv3d_with_blocks(p):
    x = p.input("x", "batch:2,db:2,hb:2,d:2,h:2,w:4,in:2")
    _, db, hb, *_ = x.shape.dims
    out = mtf.Dimension("out", 2)
    fn = mtf.layers.conv3d_with_blocks
    y = fn(x, out, (3, 3, 3), d_blocks_dim=db, h_blocks_dim=hb)
    return with_variables(p, {"y": y})


@layer("hb:x,wb:y")
def conv2d_with_even_blocks(p):
    x = p.input("x", "batch:2,hb:2,wb:2,h:4,w:4,in:2")
    _, hb, wb, *_ = x.shape.dims
    out = mtf.Dimension("out", 2)
    fn = mtf.layers.conv2d_with_blocks
    y = fn(x, out, (2, 2), strides=(2, 2), h_blocks_dim=hb, w_blocks_dim=wb, name="even")
    return with_variables(p, {"y": y})


@layer("batch:x,in:y", "batch:x,out:y", "")
def conv1d(p):
    x, (out,) = p.input("x", "batch:2,l:6,in:4"), dims("out:2")
    y = mtf.layers.conv1d(x, out)
    z = mtf.layers.conv1d(x, out, filter_size=2, stride=2, name="strided")
    return with_variables(p, {"y": y, "z": z})


@layer("batch:x,in:y", "l:x,out:y", "")
def separable_conv1d(p):
    x, (out,) = p.input("x", "batch:2,l:6,in:4"), dims("out:2")
    weights = [p.input(f"k{i}", "in:4") for i in range(3)]
    fn = mtf.layers.separable_conv1d
    y = fn(x, out)
    z = fn(x, out, -3, 0, 2.0, 3.0, name="named", use_bias=False)
    w = fn(x, out, kernel_depth_weights=weights)
    return with_variables(p, {"y": y, "z": z, "w": w})


TRANSPOSED = ("batch:x", "batch:x,in:y", "")


@layer(*TRANSPOSED)
def conv_transpose_layers(p):
    x, v = p.input("x", "batch:2,h:3,w:4,in:4"), p.input("v", "batch:2,d:2,h:2,w:3,in:4")
    (out,) = dims("out:2")
    layers = mtf.layers
    y = layers.conv2d_transpose(x, out)
    z = layers.conv2d_transpose(x, out, (3, 4), strides=(2, 1), name="wide")
    c = layers.conv3d_transpose(v, out)
    return with_variables(p, {"y": y, "z": z, "c": c})


@layer("hb:x,wb:y", "batch:x,hb:y", "")
def conv2d_transpose_with_blocks(p):
    x = p.input("x", "batch:2,hb:2,wb:2,h:3,w:2,in:2")
    _, hb, wb, *_ = x.shape.dims
    y = mtf.layers.conv2d_transpose_with_blocks(x, mtf.Dimension("out", 2), h_blocks_dim=hb, w_blocks_dim=wb)
    return with_variables(p, {"y": y})


@layer("db:x,hb:y", "batch:x,db:y", "")
def conv3d_transpose_with_blocks(p):
    x = p.input("x", "batch:2,db:2,hb:2,d:2,h:2,w:3,in:2")
    _, db, hb, *_ = x.shape.dims
    y = mtf.layers.conv3d_transpose_with_blocks(x, mtf.Dimension("out", 2), d_blocks_dim=db, h_blocks_dim=hb)
    return with_variables(p, {"y": y})
