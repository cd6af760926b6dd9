"""Convolutions and poolings against tf.nn and NumPy, whole and split."""

import contextlib
import inspect

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import mesh_tensorflow as mtf
from mesh_tensorflow._core.operation import Partial
from mesh_tensorflow.testing import harness

Dim = mtf.Dimension
LAYOUTS = ["", "b:x,i:y", "b:x,o:y", "i:x,o:y"]


def spatial_dims(sizes, prefix=""):
    return [Dim(prefix + c, n) for c, n in zip("dhw"[-len(sizes) :], sizes)]


@contextlib.contextmanager
def program(layout=""):
    with tf.Graph().as_default():
        yield Program(layout)


class Program:
    """An mtf graph on a mesh of four, and one session at the end."""

    def __init__(self, layout):
        self.layout = layout
        self.graph = mtf.Graph()
        self.mesh = mtf.Mesh(self.graph, "mesh")

    def tensor(self, value, dims):
        """Returns (the mtf.Tensor, the tf.Tensor) of a value."""
        tf_value = tf.convert_to_tensor(value)
        return mtf.import_tf_tensor(self.mesh, tf_value, mtf.convert_to_shape(dims)), tf_value

    def random(self, dims, seed=0, dtype="float32"):
        """Returns the same for random numbers."""
        value = np.random.RandomState(seed).normal(size=mtf.Shape(dims).to_integer_list)
        return self.tensor(tf.cast(value, dtype), dims)

    def lower(self):
        self.impl = mtf.placement_mesh_impl.PlacementMeshImpl(
            "x:2,y:2", self.layout, [""] * 4, merge="none"
        )
        self.lowering = mtf.Lowering(self.graph, {self.mesh: self.impl})

    def run(self, tensors, tf_tensors=()):
        """Returns the values of mtf.Tensors, and those of tf.Tensors."""
        self.lower()
        exported = [self.lowering.export_to_tf_tensor(t) for t in tensors]
        with tf.Session() as session:
            values = session.run(exported + list(tf_tensors))
        return values[: len(exported)], values[len(exported) :]

    def counters(self, *names):
        """Returns the totals of the named counters."""
        return [sum(v for key, v in self.lowering.counters if key == name) for name in names]


def close(actual, expected, tolerance=1e-5):
    assert len(actual) == len(expected)
    for a, e in zip(actual, expected):
        assert a.shape == e.shape
        np.testing.assert_allclose(a, e, rtol=tolerance, atol=tolerance * max(1, np.abs(e).max()))


CLASSES = {
    (2, False): mtf.Conv2dOperation,
    (3, False): mtf.Conv3dOperation,
    (2, True): mtf.Conv2dTransposeOperation,
    (3, True): mtf.Conv3dTransposeOperation,
}


def tf_conv(x, f, transposed, strides, padding, output_sizes):
    rank = len(strides)
    strides = [1, *strides, 1]
    if not transposed:
        return (tf.nn.conv2d if rank == 2 else tf.nn.conv3d)(x, f, strides=strides, padding=padding)
    fn = tf.nn.conv2d_transpose if rank == 2 else tf.nn.conv3d_transpose
    return fn(x, f, [x.shape[0], *output_sizes, f.shape[-2]], strides=strides, padding=padding)


# transposed, spatial sizes, window, strides, padding, spatial sizes of the output
CONVOLUTIONS = [
    (False, (5, 6), (3, 2), (1, 1), "SAME", (5, 6)),
    (False, (5, 6), (3, 3), (2, 2), "SAME", (3, 3)),
    (False, (7, 4), (2, 3), (3, 2), "SAME", (3, 2)),
    (False, (5, 6), (3, 2), (1, 1), "VALID", (3, 5)),
    (False, (5, 8), (2, 3), (2, 3), "VALID", (2, 2)),
    (False, (3, 4, 5), (2, 3, 2), (1, 1, 1), "SAME", (3, 4, 5)),
    (False, (3, 4, 5), (2, 2, 2), (2, 1, 2), "SAME", (2, 4, 3)),
    (False, (3, 4, 5), (2, 3, 2), (1, 1, 2), "VALID", (2, 2, 2)),
    (True, (3, 4), (3, 2), (1, 1), "SAME", (3, 4)),
    (True, (3, 4), (3, 3), (2, 3), "SAME", (6, 12)),
    (True, (3, 4), (2, 1), (2, 2), "VALID", (6, 8)),
    (True, (3, 4), (3, 5), (2, 2), "VALID", (7, 11)),
    (True, (2, 3, 2), (3, 2, 3), (2, 1, 2), "SAME", (4, 3, 4)),
    (True, (2, 3, 2), (3, 2, 2), (2, 1, 2), "VALID", (5, 4, 4)),
]


class TestConvolutions:
    @pytest.mark.parametrize("row", range(len(CONVOLUTIONS)))
    def test_value_gradient_and_second_gradient_are_those_of_tf(self, row):
        transposed, sizes, window, strides, padding, output_sizes = CONVOLUTIONS[row]
        rank = len(sizes)
        with program(LAYOUTS[row % len(LAYOUTS)]) as p:
            b, i, o = Dim("b", 2), Dim("i", 4), Dim("o", 2)
            channels = [o, i] if transposed else [i, o]
            x, tf_x = p.random([b, *spatial_dims(sizes), i])
            f, tf_f = p.random(spatial_dims(window, "f") + channels, seed=1)
            cls = CLASSES[rank, transposed]
            y = cls(x, f, [1, *strides, 1], padding).outputs[0]
            assert y.shape == mtf.Shape([b, *spatial_dims(output_sizes), o])

            dy, tf_dy = p.random(y.shape, seed=2)
            gx, tf_gx = p.random(x.shape, seed=3)
            gf, tf_gf = p.random(f.shape, seed=4)
            dx, df = mtf.gradients([y], [x, f], grad_ys=[dy])
            second = mtf.gradients([dx], [f, dy], grad_ys=[gx])
            second += mtf.gradients([df], [x, dy], grad_ys=[gf])

            tf_y = tf_conv(tf_x, tf_f, transposed, strides, padding, output_sizes)
            tf_dx, tf_df = tf.gradients(tf_y, [tf_x, tf_f], grad_ys=tf_dy)
            tf_second = tf.gradients(tf_dx, [tf_f, tf_dy], grad_ys=tf_gx)
            tf_second += tf.gradients(tf_df, [tf_x, tf_dy], grad_ys=tf_gf)
            close(*p.run([y, dx, df, *second], [tf_y, tf_dx, tf_df, *tf_second]))

    @pytest.mark.slips  # the layout is for two dimensions of batches
    @pytest.mark.parametrize("batch", [[], [2, 4]])
    def test_any_number_of_batch_dimensions(self, batch):
        with program("b0:x,b1:y") as p:
            dims = [Dim(f"b{n}", size) for n, size in enumerate(batch)]
            x, tf_x = p.random([*dims, *spatial_dims((4, 5)), ("i", 2)])
            f, tf_f = p.random([*spatial_dims((3, 3), "f"), ("i", 2), ("o", 3)], seed=1)
            y = mtf.Conv2dOperation(x, f, (1, 2, 1, 1), "SAME", name="mine").outputs[0]
            dx, df = mtf.gradients([y], [x, f])
            flat = tf.reshape(tf_x, [-1, 4, 5, 2])
            tf_y = tf.nn.conv2d(flat, tf_f, strides=[1, 2, 1, 1], padding="SAME")
            tf_dx, tf_df = tf.gradients(tf_y, [tf_x, tf_f])
            tf_y = tf.reshape(tf_y, [*batch, 2, 5, 3])
            close(*p.run([y, dx, df], [tf_y, tf_dx, tf_df]))
            assert y.name == "mine:0"

    @pytest.mark.parametrize("rank", [2, 3])
    @pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
    def test_every_floating_dtype_has_kernels(self, rank, dtype):
        sizes, window = (4, 5, 3)[:rank], (3, 2, 2)[:rank]
        with program("b:x,o:y") as p:
            x, tf_x = p.random([("b", 2), *spatial_dims(sizes), ("i", 2)], dtype=dtype)
            f, tf_f = p.random([*spatial_dims(window, "f"), ("i", 2), ("o", 2)], 1, dtype)
            strides = [2] * rank
            y = CLASSES[rank, False](x, f, [1, *strides, 1], "SAME").outputs[0]
            ours = [y, *mtf.gradients([y], [x, f])]
            assert {t.dtype for t in ours} == {tf.as_dtype(dtype)}
            tf_x, tf_f = tf.cast(tf_x, tf.float64), tf.cast(tf_f, tf.float64)
            tf_y = tf_conv(tf_x, tf_f, False, strides, "SAME", None)
            tolerance = {"bfloat16": 3e-2, "float16": 3e-3, "float64": 1e-12}[dtype]
            actual, expected = p.run(ours, [tf_y, *tf.gradients(tf_y, [tf_x, tf_f])])
            close([a.astype(np.float64) for a in actual], expected, tolerance)

    def test_gradient_of_a_gradient_of_a_size_that_is_no_multiple_of_the_stride(self):
        with program() as p:
            f, tf_f = p.random([*spatial_dims((3, 3), "f"), ("o", 2), ("i", 2)])
            dy, tf_dy = p.random([("b", 2), *spatial_dims((5, 6)), ("o", 2)])
            shape = "b:2,h:3,w:3,i:2"
            dx = mtf.conv2d_transpose_backprop_input(shape, f, dy, [1, 2, 2, 1], "SAME")
            tf_dx = tf.nn.conv2d(tf_dy, tf_f, [1, 2, 2, 1], "SAME")
            close(*p.run(mtf.gradients([dx], [dy, f]), tf.gradients(tf_dx, [tf_dy, tf_f])))

    def test_functions_say_the_gradient_of_the_convolution_in_their_name(self):
        for family in ("conv2d", "conv3d", "conv2d_transpose", "conv3d_transpose"):
            for end in ("backprop_input", "backprop_filter"):
                fn = getattr(mtf, f"{family}_{end}")
                assert fn.__name__ == f"{family}_{end}" and family in inspect.getdoc(fn)
        with program() as p:
            x, _ = p.random([("b", 1), *spatial_dims((4, 4)), ("i", 2)])
            f, _ = p.random([*spatial_dims((3, 3), "f"), ("o", 1), ("i", 2)])
            dy, _ = p.random([("b", 1), *spatial_dims((8, 8)), ("o", 1)])
            dx = mtf.conv2d_transpose_backprop_input(x.shape, f, dy, [1, 2, 2, 1], "SAME")
            df = mtf.conv2d_transpose_backprop_filter(x, f.shape, dy, [1, 2, 2, 1], "SAME")
            assert (dx.shape, df.shape) == (x.shape, f.shape)
            assert dx.name == "conv2d_trans_backprop:0"
            assert df.name == "conv2d_trans_backprop_filter:0"
            assert isinstance(df.operation, mtf.Conv2or3dBackpropFilterOperation)

    def test_counters_and_sums_left_pending(self):
        with program("b:x,i:y") as p:
            x, _ = p.random([("b", 4), *spatial_dims((4, 6)), ("i", 2)])
            f, _ = p.random([*spatial_dims((3, 2), "f"), ("i", 2), ("o", 4)])
            y = mtf.Conv2dOperation(x, f, [1, 2, 2, 1], "SAME").outputs[0]
            dx, df = mtf.gradients([y], [x, f])
            z = y + y  # one allreduce for both
            p.run([z, dx, df])
            expected = {
                "conv2d/forward": 1152,
                "conv2d/backprop_input": 1152,
                "conv2d/backprop_filter": 1152,
                "allreduce/[1]/conv2d_op": 192,
                "allreduce/[0]/conv2d_backprop_filter": 96,
            }
            assert p.counters(*expected) == list(expected.values())
            pending = {t: t.operation.partial_sums(p.impl, {}) for t in (y, dx, df)}
            assert pending == {y: {y: Partial((1,))}, dx: {}, df: {df: Partial((0,))}}
            costs = [t.operation.cost(p.impl) for t in (y, dx, df)]
            assert [(c.flops, c.collectives) for c in costs] == [(2 * 1152, ())] * 3

    def test_sums_of_the_gradient_of_the_input_are_counted_as_those_of_the_convolution(self):
        with program("b:x,o:y") as p:
            x, _ = p.random([("b", 4), *spatial_dims((4, 6, 4)), ("i", 2)])
            f, _ = p.random([*spatial_dims((1, 3, 2), "f"), ("i", 2), ("o", 4)])
            y = mtf.Conv3dOperation(x, f, [1, 1, 1, 1, 1], "SAME").outputs[0]
            dx, df = mtf.gradients([y], [x, f])
            p.run([dx, df])
            assert dx.name == "conv3d/gradients/conv3d_backprop:0"
            assert df.name == "conv3d/gradients/conv3d_backprop_filter:0"
            sums = ["allreduce/[1]/conv3d_op", "allreduce/[0]/conv3d_backprop_filter"]
            assert p.counters(*sums) == [4 * 4 * 6 * 4 * 2 * 2, 6 * 2 * 4 * 2]

    def test_mesh_axes_of_a_sum_are_counted_in_the_order_of_batch_dimensions(self):
        for batch, axes in (("ab", "[1, 0]"), ("ba", "[0, 1]")):
            with program("b:x,a:y") as p:
                x, _ = p.random([*((c, 2) for c in batch), *spatial_dims((2, 2)), ("i", 2)])
                f, _ = p.random([*spatial_dims((1, 1), "f"), ("i", 2), ("o", 3)])
                y = mtf.Conv2dOperation(x, f, [1, 1, 1, 1], "SAME").outputs[0]
                p.run(mtf.gradients([y], [f]))
                assert p.counters(f"allreduce/{axes}/conv2d_backprop_filter") == [2 * 3 * 4]
                assert [c.mesh_axes for _, _, c in p.lowering.collectives] == [(0, 1)]

    def test_transposed_counters(self):
        with program("b:x,o:y") as p:
            x, _ = p.random([("b", 4), *spatial_dims((3, 5)), ("i", 2)])
            f, _ = p.random([*spatial_dims((2, 2), "f"), ("o", 4), ("i", 2)])
            y = mtf.Conv2dTransposeOperation(x, f, [1, 2, 2, 1], "SAME").outputs[0]
            p.run(mtf.gradients([y], [x, f]))
            # Pixels of the larger image are counted; what is computed goes by the smaller one.
            names = ["conv2d_transpose_unique/forward", "conv2d_trans/backprop_input"]
            assert p.counters(*names) == [4 * 6 * 10 * 4 * 2 * 2 * 2] * 2
            sums = ["allreduce/[1]/conv2d_trans_op", "allreduce/[0]/conv2d_trans_backprop_filter"]
            assert p.counters(*sums) == [240, 64]
            assert y.operation.cost(p.impl).flops == 2 * 4 * 3 * 5 * 2 * 2 * 2 * 4


def conv_arguments(
    p, x="b:2,h:4,w:5,i:2", f="fh:3,fw:3,i:2,o:4", strides=(1, 1, 1, 1), padding="SAME", dtypes=None
):
    shapes = [mtf.convert_to_shape(x), mtf.convert_to_shape(f)]
    dtypes = dtypes or [tf.float32, tf.float32]
    return [*(mtf.zeros(p.mesh, s, t) for s, t in zip(shapes, dtypes)), strides, padding]


REFUSED = [
    ({"x": "w:5,i:2"}, r"\[batch..., h, w, channels\], but Shape\[w=5, i=2\] has 2"),
    ({"f": "fw:3,i:2,o:4"}, r"dimensions \[fh, fw, in, out\], but .*o=4\] has 3"),
    ({"f": "fh:3,fw:3,o:4,i:2"}, r"image .* is i=2, .* has o=4 there. .*mtf.transpose"),
    ({"f": "fh:3,fw:3,i:2,b:2"}, r"must not have repeated dimensions: .*mtf.rename_dimension"),
    ({"strides": [1, 2, 1]}, r"strides must be \[1, sh, sw, 1\].*but they are \[1, 2, 1\]"),
    ({"strides": [2, 1, 1, 1]}, r"1 for batch and channels, but they are \[2, 1, 1, 1\]"),
    ({"padding": "same"}, r"Conv2dOperation: padding='same' is none of 'SAME', 'VALID'"),
    ({"dtypes": [tf.float64, tf.float32]}, r"conv2d: dtypes must be equal: .*float64.*mtf.cast"),
    ({"dtypes": [tf.int64] * 2}, r"does not convolve int64 .*mtf.to_float"),
    (
        {"f": "fh:5,fw:3,i:2,o:4", "padding": "VALID"},
        r"window fh=5, fw=3 is larger than the image Shape\[b=2, h=4, w=5, i=2\].*SAME",
    ),
]


# transposed, sizes, window, strides, padding, mesh, layout, what moves of images
IN_PARTS = [
    (False, (8, 6), (3, 2), (1, 1), "SAME", "x:2,y:2", "h:x,w:y", "shift"),
    (False, (8, 6), (3, 3), (2, 1), "SAME", "x:4", "h:x", "shift"),
    (False, (8, 6), (5, 3), (1, 1), "VALID", "x:2", "h:x", "shift"),
    (False, (12, 6), (1, 3), (3, 1), "VALID", "x:2,y:2", "h:x+y", ""),
    (False, (4, 8, 4), (3, 3, 3), (1, 2, 1), "SAME", "x:2,y:2", "d:y,h:x", "shift"),
    (False, (4, 6, 4), (2, 2, 3), (2, 1, 1), "SAME", "x:2,y:2", "d:y,w:x", "shift"),
    (True, (4, 4), (3, 2), (2, 1), "SAME", "x:2,y:2", "h:x,w:y", "shift"),
    (True, (4, 3), (2, 3), (2, 2), "VALID", "x:2", "h:x", ""),
    (True, (2, 4, 2), (2, 3, 2), (2, 1, 2), "SAME", "x:2,y:2", "h:y,w:x", "shift"),
    # Two dimensions that are padded, and one with halos.
    (False, (4, 6, 5), (3, 3, 3), (1, 1, 1), "SAME", "x:2", "h:x", "shift"),
    # Windows of more than the neighbors have: dimensions are exchanged instead.
    (False, (4, 8), (4, 1), (1, 1), "SAME", "x:4", "h:x", "alltoall"),
    # Images of odd sizes, of which the last slices end in padding.
    (False, (7, 5), (3, 2), (1, 1), "SAME", "x:2,y:2", "h:x?,w:y?", "shift"),
    (False, (9, 5), (3, 3), (2, 1), "VALID", "x:4", "h:x?", "shift"),
    (False, (5, 7, 3), (3, 3, 3), (1, 2, 1), "SAME", "x:2,y:2", "d:y?,h:x?", "shift"),
    (True, (5, 3), (3, 2), (2, 1), "SAME", "x:2,y:2", "h:x?,w:y?", "shift"),
    (True, (3, 5, 2), (2, 3, 2), (2, 1, 2), "VALID", "x:2", "h:x?", "shift"),
]
# transposed, blocks, sizes of a block, window, strides, mesh, layout, what moves
IN_BLOCKS = [
    (False, (4, 2), (3, 4), (3, 5), (1, 1), "x:2,y:2", "v_blocks:x,w_blocks:y", "shift"),
    (False, (4, 2), (4, 4), (5, 3), (2, 1), "x:2", "v_blocks:x", "shift"),
    (False, (2, 4), (2, 3), (2, 2), (2, 1), "x:2,y:2", "v_blocks:x,w_blocks:y", "shift"),
    (False, (2, 2), (2, 4), (2, 2), (2, 2), "x:2,y:2", "v_blocks:x,w_blocks:y", ""),
    (True, (4, 2), (3, 2), (3, 5), (1, 2), "x:2,y:2", "v_blocks:x,w_blocks:y", "shift"),
    (False, (3, 2), (4, 4), (3, 3), (1, 1), "x:2", "v_blocks:x?", "shift"),
    # The halo is more than the neighbors have, or a dimension within blocks is split.
    (False, (4, 2), (1, 4), (5, 3), (1, 1), "x:4", "v_blocks:x", "allconcat"),
    (False, (2, 2), (4, 4), (3, 3), (1, 1), "x:2", "w:x", "alltoall shift"),
]
KINDS = [{}, {"apart": True}, {"simd": True}, {"apart": True, "pairs": True}]


class TestImagesInParts:
    """Processors with parts of images exchange what windows reach over."""

    @pytest.mark.slow_but(5)
    @pytest.mark.parametrize("kind", range(len(KINDS)))
    @pytest.mark.parametrize("row", range(len(IN_PARTS)))
    def test_values_and_gradients_are_those_of_whole_images(self, row, kind, tf_graph):
        transposed, sizes, window, strides, padding, mesh_shape, layout, moves = IN_PARTS[row]
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        channels = [("o", 2), ("i", 3)] if transposed else [("i", 3), ("o", 2)]
        shapes = [
            [("b", 2), *spatial_dims(sizes), ("i", 3)],
            [*spatial_dims(window, "f"), *channels],
        ]
        rng = np.random.RandomState(row)
        x, f = (
            mtf.import_tf_tensor(
                mesh,
                tf.constant(rng.normal(size=mtf.Shape(shape).to_integer_list), tf.float32),
                shape,
            )
            for shape in shapes
        )
        y = CLASSES[len(sizes), transposed](x, f, [1, *strides, 1], padding).outputs[0]
        dx, df = mtf.gradients([mtf.reduce_sum(mtf.square(y))], [x, f])
        both = mtf.reduce_sum(mtf.square(dx)) + mtf.reduce_sum(mtf.square(df))
        targets = [y, dx, df, *mtf.gradients([both], [x, f])]
        placing = harness.Placing(mesh_shape, layout, **KINDS[kind])
        lowered = [harness.lower(mesh.graph, mesh, p, targets) for p in (harness.WHOLE, placing)]
        with harness.session() as session:
            whole, parts = (session.run(one.exports) for one in lowered)
        close(parts, whole)
        assert lowered[1].counted == lowered[1].predicted
        kinds = {c.kind for _, _, c in lowered[1].lowering.collectives} - {"allreduce"}
        assert kinds == ({moves} if moves else set())

    @pytest.mark.slow_but(9)
    @pytest.mark.parametrize("kind", range(len(KINDS)))
    @pytest.mark.parametrize("row", range(len(IN_BLOCKS)))
    def test_blocks_are_convolved_as_the_images_that_they_make(self, row, kind, tf_graph):
        transposed, blocks, sizes, window, strides, mesh_shape, layout, moves = IN_BLOCKS[row]
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        channels = [("o", 2), ("i", 3)] if transposed else [("i", 3), ("o", 2)]
        of = [(f"{name}_blocks", n) for name, n in zip("vw", blocks)]
        shape = mtf.Shape([("b", 2), *of, *spatial_dims(sizes), ("i", 3)])
        rng = np.random.RandomState(row)
        x = tf.constant(rng.normal(size=shape.to_integer_list), tf.float32)
        filter_shape = mtf.Shape([*spatial_dims(window, "f"), *channels])
        f = tf.constant(rng.normal(size=filter_shape.to_integer_list), tf.float32)
        joined = [n * size for n, size in zip(blocks, sizes)]
        whole_x = tf.reshape(tf.transpose(x, [0, 1, 3, 2, 4, 5]), [2, *joined, 3])

        def targets(image, dims, **given):
            inputs = [
                mtf.import_tf_tensor(mesh, image, dims),
                mtf.import_tf_tensor(mesh, f, filter_shape),
            ]
            y = CLASSES[2, transposed](*inputs, [1, *strides, 1], "SAME", **given).outputs[0]
            dx, df = mtf.gradients([mtf.reduce_sum(mtf.square(y))], inputs)
            both = mtf.reduce_sum(mtf.square(dx)) + mtf.reduce_sum(mtf.square(df))
            return [y, dx, df, *mtf.gradients([both], inputs)]

        made = targets(x, shape, blocks=shape.dims[1:3])
        whole = targets(whole_x, [("b", 2), *spatial_dims(joined), ("i", 3)])
        placing = harness.Placing(mesh_shape, layout, **KINDS[kind])
        lowered = [
            harness.lower(mesh.graph, mesh, p, y)
            for p, y in ((harness.WHOLE, whole), (placing, made))
        ]
        with harness.session() as session:
            expected, parts = (session.run(one.exports) for one in lowered)
        assert [y.ndim for y in parts] == [6, 6, 4, 6, 4]
        images = [
            p if p.ndim == 4 else p.transpose(0, 1, 3, 2, 4, 5).reshape(e.shape)
            for p, e in zip(parts, expected)
        ]
        close(images, expected)
        assert lowered[1].counted == lowered[1].predicted
        kinds = {c.kind for _, _, c in lowered[1].lowering.collectives} - {"allreduce"}
        assert kinds == set(moves.split())

    def test_blocks_of_one_processor_exchange_nothing(self):
        with program("vb:x") as p:
            dims = [("b", 2), ("vb", 8), ("wb", 2), *spatial_dims((3, 4)), ("i", 3)]
            x, _ = p.random(dims)
            f, _ = p.random([*spatial_dims((3, 3), "f"), ("i", 3), ("o", 2)], seed=1)
            blocks = mtf.Shape(dims).dims[1:3]
            mtf.Conv2dOperation(x, f, [1, 1, 1, 1], "SAME", blocks=blocks)
            p.lower()
            moved = [(c.kind, c.elements) for _, _, c in p.lowering.collectives]
            counters = dict(p.lowering.counters)
        # A row of 2 images, 2 * 4 columns and 3 channels from either side, by all four processors.
        rows = 4 * 2 * 8 * 3
        assert moved == [("shift", rows)] * 2
        assert (counters["shift[1]"], counters["shift[-1]"]) == (rows, rows)

    def test_halos_are_one_less_than_the_window(self):
        with program("h:x") as p:
            x, _ = p.random([("b", 2), *spatial_dims((8, 6)), ("i", 3)])
            f, _ = p.random([*spatial_dims((3, 3), "f"), ("i", 3), ("o", 2)], seed=1)
            mtf.Conv2dOperation(x, f, [1, 1, 1, 1], "SAME")
            p.lower()
            moved = [(c.kind, c.elements) for _, _, c in p.lowering.collectives]
        # A row from either side: of 2 images, 6 columns and 3 channels, by all four processors.
        assert moved == [("shift", 4 * 2 * 6 * 3)] * 2
        assert ("shift/0/halo", 4 * 2 * 6 * 3) in p.lowering.counters

    @pytest.mark.slips  # the last two rows are in no window
    def test_pooling_where_windows_are_cut(self):
        """Of slices of 4 rows, the first has a window of 3; the next begins with its last row."""
        with program("h:x") as p:
            x, tf_x = p.random([("b", 2), *spatial_dims((8, 6)), ("i", 2)])
            y = mtf.PoolOperation(x, (3, 2), (3, 2), "AVG_2D").outputs[0]
            [dx] = mtf.gradients([mtf.reduce_sum(mtf.square(y))], [x])
            tf_y = tf.nn.avg_pool2d(tf_x, (3, 2), (3, 2), "VALID")
            [tf_dx] = tf.gradients(tf.reduce_sum(tf.square(tf_y)), [tf_x])
            close(*p.run([y, dx], [tf_y, tf_dx]))
            moved = {(k, c.kind, c.elements) for k, _, c in p.lowering.collectives}
            row = 4 * 2 * 6 * 2
            pools = {"PoolOperation", "PoolBackPropOperation"}
            assert {(k, "shift", row) for k in pools} <= moved

    @pytest.mark.slips  # the last rows are in no window
    @pytest.mark.slow_but(3)
    @pytest.mark.parametrize("kind", range(len(KINDS)))
    @pytest.mark.parametrize("reduction", ["MAX", "AVG"])
    def test_pooling_of_odd_sizes(self, reduction, kind, tf_graph):
        mesh = mtf.Mesh(mtf.Graph(), "mesh")
        rng = np.random.RandomState(0)
        shape = [("b", 2), *spatial_dims((11, 7)), ("i", 2)]
        values = tf.constant(rng.normal(size=[2, 11, 7, 2]), tf.float32)
        x = mtf.import_tf_tensor(mesh, values, shape)
        y = mtf.PoolOperation(x, (2, 3), (2, 3), f"{reduction}_2D").outputs[0]
        [dx] = mtf.gradients([mtf.reduce_sum(mtf.square(y))], [x])
        [ddx] = mtf.gradients([mtf.reduce_sum(mtf.square(dx))], [x])
        targets = [y, dx, ddx]
        layouts = ["h:x?", "h:x?,w:y?", "h:x+y?"]
        placings = [harness.Placing("x:2,y:2", layout, **KINDS[kind]) for layout in layouts]
        lowered = [harness.lower(mesh.graph, mesh, p, targets) for p in (harness.WHOLE, *placings)]
        with harness.session() as session:
            whole, *parts = (session.run(one.exports) for one in lowered)
        for one, found in zip(lowered[1:], parts):
            close(found, whole)
            assert one.counted == one.predicted

    def test_pooling_by_windows_that_fit(self):
        with program("h:x") as p:
            x, tf_x = p.random([("b", 2), *spatial_dims((12, 6)), ("i", 2)])
            y = mtf.PoolOperation(x, (3, 2), (3, 2), "AVG_2D").outputs[0]
            z = mtf.PoolOperation(y, (2, 1), (2, 1), "MAX_2D").outputs[0]
            tf_y = tf.nn.avg_pool2d(tf_x, (3, 2), (3, 2), "VALID")
            close(*p.run([y, z], [tf_y, tf.nn.max_pool2d(tf_y, (2, 1), (2, 1), "VALID")]))
            assert not p.lowering.collectives


class TestRefusals:
    @pytest.mark.parametrize("row", range(len(REFUSED)))
    def test_a_convolution_that_does_not_fit_is_refused_and_leaves_nothing(self, row):
        changes, message = REFUSED[row]
        with program() as p:
            arguments = conv_arguments(p, **changes)
            before = list(p.graph.operations)
            with pytest.raises(ValueError, match=message):
                mtf.Conv2dOperation(*arguments)
            assert p.graph.operations == before

    def test_filters_of_integers_are_refused(self):
        with program() as p:
            x, f, *how = conv_arguments(p, dtypes=[tf.int32] * 2)
            y = mtf.Conv2dOperation(x, f, *how).outputs[0]
            with pytest.raises(ValueError, match="backprop_filter: TensorFlow does not convolve"):
                mtf.conv2d_backprop_filter(x, f.shape, y, *how)

    def test_a_gradient_of_another_size_is_refused(self):
        with program() as p:
            x, f, strides, _ = conv_arguments(p)
            dy = mtf.zeros(p.mesh, "b:2,h:4,w:5,o:4")
            with pytest.raises(ValueError, match=r"goes with one of .*h=2, w=3, o=4\], not of "):
                mtf.conv2d_backprop_input(x.shape, f, dy, strides, "VALID")
            with pytest.raises(ValueError, match="has 2 or 3 spatial dimensions, not 1"):
                mtf.Conv2or3dBackpropFilterOperation(1, False, x, f.shape, dy, strides, "SAME")

    def test_a_pooling_that_does_not_fit_is_refused(self):
        with program() as p:
            x, _ = p.random([("b", 2), *spatial_dims((4, 4)), ("i", 2)])
            n, _ = p.tensor(np.zeros([4, 4, 2], np.int32), [*spatial_dims((4, 4)), ("i", 2)])
            for arguments, message in [
                ((x, (2, 2), (1, 1), "MAX_2D"), r"ksize is \(2, 2\) and strides is \(1, 1\)"),
                ((x, 2, 2, "MAX_2D"), "ksize of MAX_2D must be 2 whole numbers .* but is 2"),
                ((x, (2, 2, 2), (2, 2, 2), "AVG_2D"), r"must be 2 .* but is \(2, 2, 2\)"),
                ((x, (2, 0), (2, 0), "AVG_2D"), r"whole numbers from 1.* but is \(2, 0\)"),
                ((x, (5, 2), (5, 2), "MAX_2D"), r"ksize \(5, 2\) is larger than h=4 of "),
                (
                    (x, (2, 2), (2, 2), "MIN_2D"),
                    "pool_fn_string='MIN_2D' is none of 'MAX_2D', 'MAX_3D', 'AVG_2D'",
                ),
                ((n, (2, 2, 2), (2, 2, 2), "MAX_3D"), r"3 spatial dimensions, .* has 3 dim"),
                ((n, (2, 2), (2, 2), "AVG_2D"), "averages floating tensors, not .* int32"),
            ]:
                with pytest.raises(ValueError, match=message):
                    mtf.PoolOperation(*arguments)
            with pytest.raises(ValueError, match=r"gives Shape\[b=2, h=2, w=2, i=2\], but y and"):
                mtf.pool_backprop(x, x, x, (2, 2), (2, 2), "MAX_2D")


def windows(x, ksize):
    """Returns `x` [batch, spatial..., channels] as [batch, n0, k0, ..., channels], cropped."""
    counts = [n // k for n, k in zip(x.shape[1:-1], ksize)]
    x = x[(slice(None), *[slice(n * k) for n, k in zip(counts, ksize)])]
    split = [size for pair in zip(counts, ksize) for size in pair]
    return x.reshape(x.shape[0], *split, x.shape[-1])


def numpy_pool(x, dy, g, ksize, is_max):
    """Returns the pooling of `x`, its gradient for `dy`, and the gradient of that for `g`."""
    rank = len(ksize)
    axes = tuple(range(2, 2 * rank + 1, 2))
    w = windows(x, ksize)
    y = (w.max if is_max else w.mean)(axes, keepdims=True)
    goes_to = w == y if is_max else np.full(w.shape, 1 / np.prod(ksize))
    spread = goes_to * dy.reshape(y.shape)
    dx = np.zeros(x.shape)
    covered = [n // k * k for n, k in zip(x.shape[1:-1], ksize)]
    dx[(slice(None), *map(slice, covered))] = spread.reshape(x.shape[0], *covered, x.shape[-1])
    return y.reshape(dy.shape), dx, (windows(g, ksize) * goes_to).sum(axes)


POOLINGS = [
    ("MAX_2D", (4, 6), (2, 3)),
    ("AVG_2D", (4, 6), (2, 3)),
    ("MAX_2D", (5, 7), (2, 2)),
    ("AVG_2D", (5, 7), (3, 2)),
    ("MAX_3D", (4, 3, 4), (2, 3, 2)),
    ("AVG_3D", (4, 3, 4), (2, 3, 2)),
    ("MAX_3D", (5, 4, 3), (2, 2, 2)),
    ("AVG_3D", (5, 4, 3), (2, 1, 2)),
]


@pytest.mark.slips  # some windows leave out the end
class TestPooling:
    @pytest.mark.slow_but(9)
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
    @pytest.mark.parametrize("row", range(len(POOLINGS)))
    def test_value_gradient_and_second_gradient(self, row, dtype):
        kind, sizes, ksize = POOLINGS[row]
        rng = np.random.RandomState(row)
        # Small whole numbers, so that windows have several maxima.
        x, g = (rng.randint(-1, 2, [4, *sizes, 2]).astype(np.float64) for _ in range(2))
        pooled = [n // k for n, k in zip(sizes, ksize)]
        dy = rng.randint(-9, 9, [4, *pooled, 2]).astype(np.float64)
        with program("b:x,c:y") as p:
            dims = [Dim("a", 2), Dim("b", 2), *spatial_dims(sizes), Dim("c", 2)]
            halves = [tf.cast(v.reshape(2, 2, *sizes, 2), dtype) for v in (x, g)]
            mtf_x, mtf_g = (p.tensor(v, dims)[0] for v in halves)
            y = mtf.PoolOperation(mtf_x, ksize, list(ksize), kind).outputs[0]
            mtf_dy, _ = p.tensor(tf.cast(dy.reshape(2, 2, *pooled, 2), dtype), y.shape.dims)
            assert y.shape == mtf.Shape([*dims[:2], *spatial_dims(pooled), dims[-1]])
            (dx,) = mtf.gradients([y], [mtf_x], grad_ys=[mtf_dy])
            assert (y.name, dx.name) == ("pool:0", "pool/gradients/pool_backprop:0")
            (second,) = mtf.gradients([dx], [mtf_dy], grad_ys=[mtf_g])
            actual, _ = p.run([y, dx, second])
            assert not any("allreduce" in key for key, _ in p.lowering.counters)
        expected = numpy_pool(x, dy, g, ksize, kind.startswith("MAX"))
        tolerance = {"float64": 1e-12, "float32": 1e-6, "float16": 2e-3, "bfloat16": 2e-2}[dtype]
        close([a.reshape(4, *a.shape[2:]).astype(np.float64) for a in actual], expected, tolerance)

    @pytest.mark.parametrize("padding", ["SAME", "VALID"])
    @pytest.mark.parametrize("kind", ["MAX_3D", "AVG_3D"])
    def test_pool_fn_pools_dtypes_that_tf_does_not(self, kind, padding):
        with tf.Graph().as_default(), tf.Session() as session:
            x = tf.random.stateless_normal([2, 5, 4, 6, 3], [0, 0])
            ksize, strides = [3, 2, 3], [2, 2, 1]
            tf_fn = tf.nn.max_pool3d if kind == "MAX_3D" else tf.nn.avg_pool3d
            fn = mtf.ops.pool_fn(kind)
            actual = fn(tf.cast(x[tf.newaxis], tf.float64), ksize, strides, padding)[0]
            same = fn(x, ksize, strides, padding)
            close(*np.split(np.array(session.run([actual, tf_fn(x, ksize, strides, padding)])), 2))
            close(*np.split(np.array(session.run([actual, same])), 2))

    def test_whole_numbers_have_maxima(self):
        with program() as p:
            x, _ = p.tensor(np.arange(16, dtype=np.int32).reshape(4, 4, 1), "h:4,w:4,c:1")
            y = mtf.PoolOperation(x, (2, 4), (2, 4), "MAX_2D", name="top").outputs[0]
            (value,), _ = p.run([y])
            np.testing.assert_array_equal(value, [[[7]], [[15]]])

    def test_pool_and_stride_along_one_dimension(self):
        with program("b:x") as p:
            v = np.array([[3.0, 1, 4, 1, 5, 9], [2, 6, 5, 3, 5, 8]], np.float32)
            dim = Dim("length", 6)
            x, _ = p.tensor(v, [("b", 2), dim])
            ours = [
                mtf.pool_tensor_1d(x, dim),
                mtf.pool_tensor_1d(x, dim, mtf.reduce_max, pool_size=3),
                mtf.stride_tensor_1d(x, dim),
                mtf.stride_tensor_1d(x, dim, pool_size=3),
            ]
            assert ours[1].shape == mtf.Shape([("b", 2), ("length", 2)])
            groups = v.reshape(2, 3, 2)
            expected = [groups.mean(-1), [[4, 9], [6, 8]], v[:, ::2], v[:, ::3]]
            close(p.run(ours)[0], [np.array(e, np.float32) for e in expected])
            for fn in (mtf.pool_tensor_1d, mtf.stride_tensor_1d):
                with pytest.raises(ValueError, match=r"length=6 of .* groups of pool_size=4"):
                    fn(x, dim, pool_size=4)
