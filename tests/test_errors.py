"""What is wrong raises where it is written, says what and how to mend it, and leaves no trace."""

import re
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

import mesh_tensorflow as mtf
from mesh_tensorflow.placement_mesh_impl import PlacementMeshImpl

A, B, C = mtf.Dimension("a", 8), mtf.Dimension("b", 16), mtf.Dimension("c", 24)
# Names of operations; each must be free or taken as it was before the failed call.
PROBES = """add assign add_n binary_op broadcast cast cond concat constant conv2d custom_gradient
depend divide dropout einsum equal exp gather import identity less mask one_hot pad range random
reduce reduce_max reduce_mean reduce_sum relu rename reshape scalar_add scalar_mul shift slice
slicewise softmax split stack stop_gradient sub top_k transpose unstack variable while_loop v
""".split()


class World:
    """A graph with a few tensors, in which calls go wrong."""

    def __init__(self):
        self.graph = mtf.Graph()
        self.mesh = mtf.Mesh(self.graph, "mesh")
        self.x = self.tensor([A, B])
        self.y = self.tensor([B, C])
        self.i = self.tensor([A], tf.int32)
        self.m = self.tensor([A, B], tf.bool)
        self.other = mtf.import_tf_tensor(mtf.Mesh(self.graph, "other"), tf.zeros([8]), [A])
        self.w = mtf.get_variable(self.mesh, "w", [A, B])
        self.zero = mtf.constant(self.mesh, 0, dtype=tf.int32)

    def tensor(self, dims, dtype=tf.float32):
        shape = mtf.Shape(dims)
        return mtf.import_tf_tensor(self.mesh, tf.zeros(shape.to_integer_list, dtype), shape)

    def state(self):
        """Returns all that a failed call must leave as it is."""
        return (
            list(self.graph.operations),
            [op.name for op in self.graph.operations],
            [self.graph.unique_name(name, mark_as_used=False) for name in PROBES],
            list(self.graph.all_variables),
            list(self.graph.trainable_variables),
            sorted(self.graph.name_to_variable),
        )


class Plain(World):
    """A graph with nothing in it yet."""

    def __init__(self):
        self.graph = mtf.Graph()
        self.mesh = mtf.Mesh(self.graph, "mesh")


def _loop(body, cond=lambda i: mtf.less(i, 3), **kwargs):
    return lambda w: mtf.while_loop(cond, body, [w.zero], **kwargs)


def _custom(returned):
    return After(
        lambda w: mtf.custom_gradient(lambda x: x * w.w, lambda **_: returned(w), [w.x]),
        lambda w, y: mtf.gradients([y], [w.x]),
    )


def _serialized(model, splits=2):
    return lambda w: mtf.serialize_training_step({"x": w.x}, model, A, splits)


class After(NamedTuple):
    """A call that is prepared by one that is right."""

    prepare: Callable
    call: Callable


V, T = ValueError, TypeError

BUILD = {
    # shapes
    "reshape": (lambda w: mtf.reshape(w.x, [A, ("b", 15)]), V,
                r"Shape\[a=8, b=16\] of 128 elements to Shape\[a=8, b=15\] of 120"),
    "broadcast": (lambda w: mtf.broadcast(w.x, [B, C]), V, r"lacks a=8; mtf.reduce_sum"),
    "transpose": (lambda w: mtf.transpose(w.x, [B, C]), V,
                  r"Shape\[a=8, b=16\] cannot become Shape\[b=16, c=24\]. mtf.reshape changes"),
    "rename": (lambda w: mtf.rename_dimension(w.x, "z", "y"), V, r"'z' not found in Shape\[a=8, b=16\]"),
    "replace_dimensions": (lambda w: mtf.replace_dimensions(w.x, [B, A], C), V,
                           r"b=16, a=8 do not stand side by side.*mtf.transpose"),
    "replace_no_tensor": (lambda w: mtf.replace_dimensions("x", A, B), V, "a Tensor or a Shape, not str"),
    "add_output_shape": (lambda w: mtf.add(w.x, w.y, output_shape=[A, B]), V,
                         r"to Shape\[a=8, b=16\]: it lacks c=24"),
    "cwise": (lambda w: mtf.cwise(tf.add, [w.x, w.y]), V,
              r"one shape: .*a=8, b=16.*b=16, c=24.*mtf.broadcast"),
    "concat_shapes": (lambda w: mtf.concat([w.x, w.y], "b"), V,
                      r"agree except for the size of 'b': .*a=8, b=16.*b=16, c=24"),
    "concat_unknown": (lambda w: mtf.concat([w.x, w.x], "z"), V, r"'z' not found in Shape\[a=8, b=16\]"),
    "concat_nothing": (lambda w: mtf.concat([], "a"), V, "at least one tensor"),
    "split_sizes": (lambda w: mtf.split(w.x, B, [3, 4]), V, r"\[3, 4\] add up to 7, not to b=16"),
    "split_number": (lambda w: mtf.split(w.x, B, 3), V, r"b=16 .* into 3 equal parts.*divisor of 16"),
    "split_dim": (lambda w: mtf.split(w.x, C, 3), V, r"Shape\[a=8, b=16\] has no dimension c=24"),
    "stack": (lambda w: mtf.stack([w.x, w.y], "new"), V, r"shapes must be equal: .*a=8.*c=24"),
    "stack_nothing": (lambda w: mtf.stack([], "new"), V, "at least one tensor"),
    "unstack": (lambda w: mtf.unstack(w.x, C), V, r"has no dimension c=24; both the name and the size"),
    "slice_range": (lambda w: mtf.slice(w.x, 10, 8, "b"), V, r"10 .. 18 is not within b=16"),
    "slice_unknown": (lambda w: mtf.slice(w.x, 0, 1, "z"), V, r"'z' not found in Shape"),
    "pad_negative": (lambda w: mtf.pad(w.x, [-1, 0], "b"), V, r"0 or more, got \[-1, 0\] for b=16"),
    "pad_one_number": (lambda w: mtf.pad(w.x, [1], "b"), V, r"two numbers \[before, after\]"),
    "repeated_dim": (lambda w: mtf.reshape(w.x, [("a", 8), ("a", 8), ("d", 2)]), V,
                     r"repeated dimensions: Shape\[a=8, a=8, d=2\] repeats a=8.*mtf.rename_dimension"),
    "numpy_size": (lambda w: mtf.reshape(w.x, [("a", np.int64(128))]), V, r"passed through int\(\)"),
    "import_sizes": (lambda w: mtf.import_tf_tensor(w.mesh, tf.zeros([8, 15]), [A, B]), V,
                     r"\(8, 15\), which does not fit Shape\[a=8, b=16\]"),
    "import_rank": (lambda w: mtf.import_tf_tensor(w.mesh, tf.zeros([8]), [A, B]), V, "does not fit"),
    "import_replicated": (lambda w: mtf.import_fully_replicated(w.mesh, tf.zeros([8]), [B]), V,
                          r"\(8,\), which does not fit"),
    "scalar_summary": (lambda w: mtf.scalar_summary("loss", w.x), V,
                       r"'loss': .*Shape\[a=8, b=16\] is no scalar; reduce it with mtf.reduce_mean"),
    # contraction and reduction
    "einsum_reduced_unknown": (lambda w: mtf.einsum([w.x, w.y], reduced_dims=[("z", 3)]), V,
                               r"reduced_dims z=3 are in none of the inputs .*a=8, b=16"),
    "einsum_disagree": (lambda w: mtf.einsum([w.x, w.y], output_shape=[A, C], reduced_dims=[A]), V,
                        r"reduced_dims a=8 do not agree .*reduces b=16.*Give one of the two"),
    "einsum_nothing": (lambda w: mtf.einsum([], output_shape=[]), V, "at least one input"),
    "einsum_dtypes": (lambda w: mtf.einsum([w.x, w.i]), V,
                      r"dtypes must be equal: .*float32; .*int32.*mtf.cast"),
    "reduce_dim": (lambda w: mtf.reduce_sum(w.x, reduced_dim=C), V, r"has no dimension c=24"),
    "reduce_shape": (lambda w: mtf.reduce_max(w.x, output_shape=[A, C]), V,
                     r"dimensions that no input has: c=24.*mtf.broadcast"),
    "reduce_disagree": (lambda w: mtf.reduce_sum(w.x, output_shape=[A], reduced_dim=A), V,
                        r"reduced_dim a=8 does not agree .*reduces b=16"),
    "reduce_positional": (lambda w: mtf.reduce_sum(w.x, [A]), AssertionError, "keyword arguments only"),
    "softmax_dim": (lambda w: mtf.softmax(w.x, C), V, r"softmax: .*has no dimension c=24"),
    "softmax_name": (lambda w: mtf.softmax(w.x, "b"), V, r"'b' .*mtf.Dimension"),
    "logsumexp_dim": (lambda w: mtf.reduce_logsumexp(w.x, C), V, r"no dimension c=24"),
    "top_k_large": (lambda w: mtf.top_k(w.x, A, mtf.Dimension("k", 9)), V, r"k=9 must be between 1 and a=8"),
    "top_1_dim": (lambda w: mtf.top_1(w.x, C), V, r"no dimension c=24"),
    "nth_largest": (lambda w: mtf.nth_largest_element(w.x, 8, A), V, r"between 1 and a=8"),
    "cumsum_dim": (lambda w: mtf.cumsum(w.x, C), V, r"cumsum: .*no dimension c=24"),
    "gather_dim": (lambda w: mtf.gather(w.x, w.i, C), V, r"gather: .*no dimension c=24"),
    "gather_float": (lambda w: mtf.gather(w.y, w.x, B), V, r"must be integers: .*float32; mtf.to_int32"),
    "one_hot_float": (lambda w: mtf.one_hot(w.x, C), V, r"must be integers"),
    "shift_dim": (lambda w: mtf.shift(w.x, 1, C, True), V, r"shift: .*no dimension c=24"),
    "dynamic_shift": (lambda w: mtf.dynamic_shift(w.x, w.i, A, True), V,
                      r"Shape\[a=8\] must not have the shifted dimension a=8"),
    "halo_dim": (lambda w: mtf.halo_exchange(w.x, C, B, 1), V, r"halo_exchange: .*no dimension c=24"),
    "halo_negative": (lambda w: mtf.left_halo_exchange(w.x, A, B, -1), V, r"0 or more, got -1"),
    "pool_1d": (lambda w: mtf.pool_tensor_1d(w.x, B, pool_size=5), V, r"b=16 .*pool_size=5.*divisor of 16"),
    "conv_channels": (After(
        lambda w: [w.tensor([A, ("h", 6), ("w", 6), B]),
                   w.tensor([("fh", 3), ("fw", 3), C, ("o", 4)])],
        lambda w, xs: mtf.Conv2dOperation(*xs, [1, 1, 1, 1], "SAME")), V, r"b=16.*c=24|c=24.*b=16"),
    # dtypes and numbers
    "add_dtypes": (lambda w: w.x + w.i, V, r"dtypes must be equal: .*float32; .*int32.*mtf.cast"),
    "concat_dtypes": (After(lambda w: mtf.cast(w.x, tf.bfloat16),
                            lambda w, y: mtf.concat([w.x, y], "b")), V, "dtypes must be equal"),
    "where_dtypes": (lambda w: mtf.where(w.m, w.x, w.i), V, "dtypes must be equal"),
    "int_plus_float": (lambda w: w.i + 1.5, T, r"Shape\[a=8\] is int32, and 1.5 is no integer. Use mtf.to_float"),
    "int_minus_float": (lambda w: w.i - 0.5, T, r"-0.5 is no integer"),
    "int_times_float": (lambda w: 2.5 * w.i, T, r"2.5 is no integer"),
    "int_divided": (lambda w: w.i / 2, T, r"0.5 is no integer.*// and % to stay with integers"),
    "mean_of_ints": (lambda w: mtf.reduce_mean(w.i), T, r"int32, and 0.125 is no integer"),
    "no_tensor": (lambda w: mtf.binary_op_with_broadcasting(tf.add, 1, 2), V, "must be a mtf.Tensor, got 1 and 2"),
    "number_for_tensor": (lambda w: mtf.exp(3.0), V, r"3.0 is a float, not a mtf.Tensor.*mtf.constant"),
    "array_for_tensor": (lambda w: mtf.einsum([w.x, np.zeros([16])]), V, r"ndarray, not a mtf.Tensor"),
    "tf_for_tensor": (lambda w: mtf.concat([w.x, tf.zeros([8, 16])], "b"), V, r"not a mtf.Tensor"),
    "number_reduced": (lambda w: mtf.reduce_sum(3.0), V, r"3.0 is a float, not a mtf.Tensor"),
    "number_reshaped": (lambda w: mtf.reshape(3.0, []), V, r"3.0 is a float, not a mtf.Tensor"),
    "meshes": (lambda w: w.x + w.other, V, r"must be on one mesh: .*'mesh'.*'other'"),
    "bad_dtype": (lambda w: mtf.random_uniform(w.mesh, [A], dtype="no such"), T, "no such"),
    # random
    "dropout_neither": (lambda w: mtf.dropout(w.x, True), V, r"exactly one of keep_prob and rate.*rate=0.1"),
    "dropout_both": (lambda w: mtf.dropout(w.x, True, keep_prob=0.9, rate=0.1), V, "exactly one"),
    "dropout_legacy_both": (lambda w: mtf.dropout(w.x, 0.9, rate=0.1), V, "exactly one .* besides 0.9"),
    "dropout_zero": (lambda w: mtf.dropout(w.x, True, keep_prob=0.0), V, r"above 0 and at most 1, got 0.0"),
    "dropout_range": (lambda w: mtf.dropout(w.x, rate=-0.5), V, r"above 0 and at most 1, got 1.5"),
    "dropout_noise": (lambda w: mtf.dropout(w.x, rate=0.5, noise_shape=[A, C]), V, r"c=24"),
    # control
    "while_nothing": (lambda w: mtf.while_loop(None, None, []), V, "at least one loop variable"),
    "while_count": (_loop(lambda i: [i, i]), V, r"2 Tensors for 1 loop variables; pass has_accumulators"),
    "while_too_few": (_loop(lambda i: [], has_accumulators=True), V, "0 Tensors for 1"),
    "while_shape": (lambda w: mtf.while_loop(lambda x: mtf.less(mtf.reduce_sum(x), 3.0),
                                             lambda x: [mtf.reduce_sum(x, reduced_dim=A)], [w.x]),
                    V, r"keep its shape and dtype: .*\[a=8, b=16\] float32 became .*\[b=16\]"),
    "while_dtype": (_loop(lambda i: [mtf.to_float(i)]), V, r"int32 became .*float32"),
    "while_cond_shape": (lambda w: mtf.while_loop(lambda x: mtf.less(x, 1.0), lambda x: [x], [w.x]),
                         V, r"boolean scalar, not .*mtf.reduce_any"),
    "while_cond_dtype": (_loop(lambda i: [i], cond=lambda i: i), V, "boolean scalar"),
    "while_cond_number": (_loop(lambda i: [i], cond=lambda i: True), V, r"a mtf.Tensor, not True"),
    "while_body_number": (_loop(lambda i: [3]), V, r"not a mtf.Tensor"),
    "while_body_raises": (_loop(lambda i: [mtf.reshape(i + 1, [A])]), V, "cannot reshape"),
    "custom_count": (_custom(lambda w: [None]), V, r"each of 2 inputs \(import:0, w:0\), but returned 1"),
    "custom_variable": (_custom(lambda w: [mtf.get_variable(w.mesh, "v", [A, B]), None]), V,
                        r"new variables \['v'\]"),
    "custom_shape": (_custom(lambda w: [w.y, None]), V, r"import:0 .*a=8, b=16.*another shape: .*b=16, c=24"),
    "depend": (lambda w: mtf.depend(w.x, [tf.no_op]), V, "neither a mtf.Tensor nor a mtf.Operation"),
    "grad_ys_shape": (After(lambda w: w.x * 2, lambda w, y: mtf.gradients([y], [w.x], [w.y])), V, r"a=8, b=16.*b=16, c=24"),
    "serialize_batch": (_serialized(lambda f: {}, 3), V, r"a=8 is not divisible by num_splits=3; .*divisor of 8"),
    "serialize_no_gradient": (_serialized(lambda f: {"loss": mtf.reduce_sum(f["x"])}), V,
                              r"no gradient reaches the trainable variables \['w'\].*trainable=False"),
    # variables
    "assign_shape": (lambda w: mtf.assign(w.w, w.y), V, r"Shape\[b=16, c=24\] to variable w Shape\[a=8, b=16\]"),
    "assign_no_variable": (After(lambda w: w.x + w.x, lambda w, y: mtf.assign(y, w.x)), V, "does not come from a variable"),
    "assign_import": (lambda w: mtf.assign(w.x, w.x), V, "does not come from a variable"),
    "read_no_variable": (After(lambda w: w.x * w.x, lambda w, y: mtf.read_variable(y)), V, "does not come from a variable"),
    "splittability": (lambda w: w.x.operation._initialize_splittable_and_unsplittable_dims("maybe"),
                      V, "'maybe'"),
}


@pytest.mark.parametrize("name", BUILD)
def test_building(name, tf_graph):
    call, kind, text = BUILD[name]
    world = World()
    prepared = []
    if isinstance(call, After):
        prepared, call = [call.prepare(world)], call.call
    before = world.state()
    with pytest.raises(kind) as caught:
        call(world, *prepared)
    assert re.search(text, str(caught.value)), str(caught.value)
    assert world.state() == before


GOOD = {
    "reshape": lambda w: (mtf.reshape(w.x, [B, A]), "reshape"),
    "einsum_dtypes": lambda w: (mtf.einsum([w.x, w.y]), "einsum"),
    "add_dtypes": lambda w: (w.x + w.x, "add"),
    "concat_shapes": lambda w: (mtf.concat([w.x, w.x], "b"), "concat"),
    "softmax_dim": lambda w: (mtf.softmax(w.x, B), "softmax"),
    "while_body_raises": lambda w: (_loop(lambda i: [i + 1])(w)[0], "while_loop"),
    "assign_shape": lambda w: (mtf.assign(w.w, w.x), "assign"),
    "dynamic_shift": lambda w: (mtf.dynamic_shift(w.x, w.i, B, True), "einsum"),
}


@pytest.mark.parametrize("name", GOOD)
def test_name_is_free_after_a_failed_call(name, tf_graph):
    call, kind, _ = BUILD[name]
    world = World()
    with pytest.raises(kind):
        call(world)
    made, expected = GOOD[name](world)
    assert getattr(made, "operation", made).name == expected


# -- what is found when a program is lowered

LOWER = {
    "not_divisible": (lambda w: w.tensor([("a", 10)]), "x:4", "a:x",
                      r"not divisible.*a=10 of Shape\[a=10\] .*x=4.*multiple of 4 \(for instance 8 or 12\)"
                      r".*divides 10 \(1, 2, 5, 10\).*drop the layout rule a:x"),
    "two_dims_on_one_axis": (lambda w: w.x * 2, "x:2", "a:x,b:x",
                             r"Two Tensor Dimensions may not map to the same Mesh Dimension: a=8, b=16"
                             r".*x=2.*mtf.rename_dimension"),
    "one_dim_on_two_axes": (lambda w: w.x * 2, "x:2,y:2", "a:x,a:y",
                            r"a=8 maps to multiple mesh dimensions x=2, y=2.*mtf.replace_dimensions"),
    "concat": (lambda w: mtf.concat([w.x, w.x], "b"), "x:2", "b:x",
               r"b=16 of .*x=2, but ConcatOperation concat cannot.*rule b:x.*mtf.rename_dimension\(x, \"b\""),
    "split": (lambda w: mtf.split(w.x, B, 2), "x:2", "b:x", r"SplitOperation split cannot"),
    "stack": (lambda w: mtf.stack([w.x, w.x], "new"), "x:2", "new:x", r"new=2 of .*StackOperation"),
    "unstack": (lambda w: mtf.unstack(w.x, A), "x:2", "a:x", "UnstackOperation"),
    "slice": (lambda w: mtf.slice(w.x, 0, 4, "b"), "x:2", "b:x", "SliceOperation slice cannot"),
    "pad": (lambda w: mtf.pad(w.x, [1, 1], "b"), "x:2", "b:x", "PadOperation pad cannot"),
    "slicewise": (lambda w: mtf.slicewise(tf.sort, [w.x], splittable_dims=[A]), "x:2", "b:x",
                  r"b=16 of .*SlicewiseOperation slicewise cannot work on parts"),
    "top_k": (lambda w: mtf.top_k(w.x, B, mtf.Dimension("k", 4)), "x:2", "k:x", r"k=4"),
    "conv": (lambda w: mtf.Conv2dOperation(
        w.tensor([A, ("h", 6), ("w", 6), B]),
        w.tensor([("fh", 3), ("fw", 3), B, ("o", 4)]), [1, 1, 1, 1], "SAME"), "x:2", "h:x",
        r"h=6 of .*is split over mesh dimension x=2, but Conv2dOperation"),
    "pool": (lambda w: mtf.PoolOperation(w.tensor([A, ("h", 6), ("w", 6), B]), (2, 2), (2, 2), "MAX_2D"),
             "x:2", "h:x", r"h=6 of .*PoolOperation"),
    "random_int": (lambda w: mtf.random_uniform(w.mesh, [A], dtype=tf.int32), "x:2", "", "needs maxval"),
    "random_argument": (lambda w: mtf.random_uniform(w.mesh, [A], mean=1.0), "x:2", "",
                        r"random_uniform does not take mean; it takes dtype, seed, minval, maxval"),
}


@pytest.mark.parametrize("name", LOWER)
def test_lowering(name, tf_graph):
    call, mesh, layout, text = LOWER[name]
    world = Plain()
    if "x" in call.__code__.co_names:
        world.x = world.tensor([A, B])
    call(world)
    before = list(world.graph.operations)
    impl = PlacementMeshImpl(mesh, layout, [""] * mtf.convert_to_shape(mesh).size)
    with pytest.raises(ValueError) as caught:
        mtf.Lowering(world.graph, {world.mesh: impl})
    assert re.search(text, str(caught.value), re.S), str(caught.value)
    assert "while lowering" in str(caught.value)
    assert world.graph.operations == before


def test_lowering_without_a_mesh_implementation(tf_graph):
    world = World()
    impl = PlacementMeshImpl("x:1", "", [""])
    with pytest.raises(ValueError, match=r"no mesh implementation for mesh 'other'.*PlacementMeshImpl"):
        mtf.Lowering(world.graph, {world.mesh: impl}, autostack=False)


def _lowered(world):
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")
    world.y = mtf.import_tf_tensor(mesh, tf.zeros([8]), [A])
    return mtf.Lowering(graph, {mesh: PlacementMeshImpl("x:1", "", [""])})


def test_export_of_a_tensor_made_after_lowering(tf_graph):
    world = World()
    lowering = _lowered(world)
    late = world.y * 2
    with pytest.raises(ValueError, match=r"scalar_mul:0 .*made after"):
        lowering.export_to_tf_tensor(late)


def test_lowered_operation_of_a_replaced_assignment(tf_graph):
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")
    v = mtf.get_variable(mesh, "v", [A])
    old = mtf.assign(v, v * 2)
    graph.combine_assignments([old])
    lowering = mtf.Lowering(graph, {mesh: PlacementMeshImpl("x:1", "", [""])})
    with pytest.raises(ValueError, match="combine_assignments are replaced"):
        lowering.lowered_operation(old)


def test_a_name_that_tensorflow_has(tf_graph):
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")
    tf.Variable(1.0, name="v")
    with pytest.raises(ValueError, match=r"'v' became 'v_1'.*Use another name"):
        mtf.get_variable(mesh, "v", [A])
    assert graph.all_variables == [] and graph.operations == []
    assert graph.unique_name("v", mark_as_used=False) == "v"


# -- meshes and layouts

MESHES = {
    "devices": (lambda: PlacementMeshImpl("x:2,y:4", "", [""] * 6), V,
                r"x=2, y=4 needs 8 devices, but there are 6.*shapes that fit 6: .*x:2,y:3"),
    "devices_tuple": (lambda: PlacementMeshImpl("x:2", "", ("", "")), T,
                      r"a list of device strings, not tuple: pass list\(devices\)"),
    "devices_string": (lambda: PlacementMeshImpl("x:2", "", "cpu"), T, "not str"),
    "strict": (lambda: PlacementMeshImpl("x:2", "a:x,b:z", ["", ""], strict_layout=True), V,
               r"unknown mesh dimension 'z' in LayoutRules{a:x, b:z}: the mesh has x=2"),
    "allreduce": (lambda: PlacementMeshImpl("x:1", "", [""], allreduce="fast"), V,
                  r"unknown allreduce method 'fast'; known are auto, collective, ring"),
    "mesh_string": (lambda: PlacementMeshImpl("x=2", "", []), V, r"malformed shape 'x=2': 'x=2' is not a pair"),
    "mesh_size": (lambda: PlacementMeshImpl("x:two", "", []), V, r"the size 'two' of 'x' is not a whole"),
    "mesh_colons": (lambda: PlacementMeshImpl("x:2:3", "", []), V, r"'x:2:3' is not a pair left:right"),
    "layout_string": (lambda: PlacementMeshImpl("x:1", "a:", []), V, r"malformed layout 'a:'"),
    "layout_space": (lambda: PlacementMeshImpl("x:1", "a : x", []), V, "no space around it"),
    "size_per_split": (lambda: mtf.tensor_dim_to_size_per_split("a:x", "x:3", A), V,
                       r"a=8 cannot be cut into 3 equal parts .*multiple of 3"),
    "dimension": (lambda: mtf.convert_to_dimension("a"), V, r"'a' to Dimension: .*\(str, int\)"),
    "combined": (lambda: mtf.combined_dimension([]), V, "without a name"),
    "transposed": (lambda: mtf.transpose_list_of_lists([]), V, "empty"),
    "parallel_tuple": (lambda: mtf.parallel(("", ""), lambda: 0), V, "must be a list, not tuple"),
    "parallel_length": (lambda: mtf.parallel(["", ""], lambda x: x, [1]), V, r"each of 2 devices, got 1"),
    "reduction": (lambda: mtf.reduction_fn("MEAN"), V, r"'MEAN'; known are MAX, MIN, SUM"),
}


@pytest.mark.parametrize("name", MESHES)
def test_meshes_and_layouts(name):
    call, kind, text = MESHES[name]
    with pytest.raises(kind) as caught:
        call()
    assert re.search(text, str(caught.value), re.S), str(caught.value)


# -- no gradient is None, not an error

NO_GRADIENT = {
    "sign": lambda w: mtf.sign(w.x),
    "stop_gradient": lambda w: mtf.stop_gradient(w.x),
    "comparison": lambda w: mtf.to_float(mtf.less(w.x, 0.5)),
    "indices": lambda w: mtf.to_float(mtf.argmax(w.x, A)),
    "cast_to_int_and_back": lambda w: mtf.to_float(mtf.to_int32(w.x)),
    "unrelated": lambda w: w.y * 2,
    "tf_function": lambda w: mtf.binary_op_with_broadcasting(tf.atan2, w.x, w.x),
    "one_hot": lambda w: mtf.one_hot(mtf.argmax(w.x, A), C),
}


@pytest.mark.parametrize("name", NO_GRADIENT)
def test_no_gradient_is_none(name, tf_graph):
    world = World()
    assert mtf.gradients([NO_GRADIENT[name](world)], [world.x]) == [None]


def test_gradient_of_a_gradient_of_a_loop(tf_graph):
    world = World()
    [y] = mtf.while_loop(lambda x: mtf.less(mtf.reduce_sum(x), 9.0), lambda x: [x * x], [world.x])
    [dx] = mtf.gradients([y], [world.x])
    with pytest.raises(NotImplementedError, match="gradient of a loop has no gradient itself; unroll"):
        mtf.gradients([dx], [world.x])
