"""What must raise, and when: as the graph is built or as it is lowered."""

import tensorflow.compat.v1 as tf

import mesh_tensorflow as mtf
from helpers.oracle import oracle_runner

ERRORS = {}


def error(layout="a:x,b:y"):
    def decorate(fn):
        ERRORS[fn.__name__] = (fn, layout)
        return fn

    return decorate


def one(name, fn, layout="a:x,b:y"):
    def run(p):
        x = p.input("x", "a:4,b:6")
        return fn(p, x, *x.shape.dims)

    ERRORS[name] = (run, layout)


D, S = mtf.Dimension, mtf.Shape

one("add_dtypes", lambda p, x, a, b: x + mtf.zeros(p.mesh, [a, b], dtype=tf.int32))
one("multiply_dtypes", lambda p, x, a, b: x * mtf.zeros(p.mesh, [a, b], dtype=tf.int32))
one("maximum_dtypes", lambda p, x, a, b: mtf.maximum(x, mtf.zeros(p.mesh, [a], tf.int32)))
one("reduce_positional", lambda p, x, a, b: mtf.reduce_sum(x, a))
one("reduce_to_new_dimension", lambda p, x, a, b: mtf.reduce_sum(x, output_shape=[D("c", 3)]))
one("reduce_disagrees", lambda p, x, a, b: mtf.reduce_sum(x, output_shape=[a], reduced_dim=a))
one("reduce_absent", lambda p, x, a, b: mtf.reduce_sum(x, reduced_dim=D("c", 3)))
one("einsum_disagrees", lambda p, x, a, b: mtf.einsum([x, x], output_shape=[a], reduced_dims=[a]))
one("reshape_size", lambda p, x, a, b: mtf.reshape(x, [D("c", 5)]))
one("shape_repeats", lambda p, x, a, b: S([a, a]))
one("shape_of_strings", lambda p, x, a, b: S(["a"]))
one("shape_string", lambda p, x, a, b: mtf.convert_to_shape("a: 2"))
one("shape_string_size", lambda p, x, a, b: mtf.convert_to_shape("a:x"))
one("layout_string", lambda p, x, a, b: mtf.convert_to_layout_rules("a"))
one("dimension_of_float", lambda p, x, a, b: mtf.convert_to_dimension(("a", 2.0)))
one("shape_plus_tuple", lambda p, x, a, b: x.shape + (D("c", 2),))
one("shape_minus_absent", lambda p, x, a, b: x.shape - D("c", 2))
one("transpose_other_dims", lambda p, x, a, b: mtf.transpose(x, [a, D("c", 6)]))
one("concat_shapes", lambda p, x, a, b: mtf.concat([x, mtf.zeros(p.mesh, [b])], "b"))
one("concat_absent", lambda p, x, a, b: mtf.concat([x, x], "c"))
one("stack_shapes", lambda p, x, a, b: mtf.stack([x, mtf.zeros(p.mesh, [b])], "c"))
one("split_sizes", lambda p, x, a, b: mtf.split(x, b, [1, 2]))
one("split_uneven", lambda p, x, a, b: mtf.split(x, b, 4))
one("unstack_absent", lambda p, x, a, b: mtf.unstack(x, D("c", 2)))
one("slice_absent", lambda p, x, a, b: mtf.slice(x, 0, 2, "c"))
one("slice_too_long", lambda p, x, a, b: mtf.slice(x, 4, 4, "b"), "")
one("pad_absent", lambda p, x, a, b: mtf.pad(x, [1, 1], "c"))
one("concat_split_dim", lambda p, x, a, b: mtf.concat([x, x], "b"))
one("slice_split_dim", lambda p, x, a, b: mtf.slice(x, 0, 2, "b"))
one("pad_split_dim", lambda p, x, a, b: mtf.pad(x, [1, 1], "b"))
one("unstack_split_dim", lambda p, x, a, b: mtf.unstack(x, b)[0])
one("split_split_dim", lambda p, x, a, b: mtf.split(x, b, 2)[0])
one("stack_split_dim", lambda p, x, a, b: mtf.stack([mtf.reduce_sum(x, reduced_dim=b)] * 6, "b"))
one("shift_absent", lambda p, x, a, b: mtf.shift(x, 1, D("c", 2), True))
one("halo_absent", lambda p, x, a, b: mtf.halo_exchange(x, D("c", 2), b, 1), "")
one("top_k_absent", lambda p, x, a, b: mtf.top_k(x, D("c", 2), D("k", 1)))
one("top_k_too_many", lambda p, x, a, b: mtf.top_k(x, b, D("k", 7))[0], "")
one("cumsum_absent", lambda p, x, a, b: mtf.cumsum(x, D("c", 2)))
one("gather_absent", lambda p, x, a, b: mtf.gather(x, mtf.zeros(p.mesh, [], tf.int32), D("c", 2)))
one("gather_float_indices", lambda p, x, a, b: mtf.gather(x, x, b))
one("where_scalar_true", lambda p, x, a, b: mtf.where(mtf.greater(x, 0.0), 1.0, x))
one("import_shape", lambda p, x, a, b: mtf.import_tf_tensor(p.mesh, tf.zeros([4, 5]), x.shape))
one("import_rank", lambda p, x, a, b: mtf.import_tf_tensor(p.mesh, tf.zeros([4]), x.shape))
one("int_plus_float", lambda p, x, a, b: mtf.to_int32(x) + 1.5)
one("int_divided", lambda p, x, a, b: mtf.to_int32(x) / 2)
one("mean_of_int", lambda p, x, a, b: mtf.reduce_mean(mtf.to_int32(x)))
one("broadcast_drops", lambda p, x, a, b: mtf.broadcast(x, [a, D("c", 2)]))
one("uneven_split", lambda p, x, a, b: x + 1.0, "uneven")
one("two_rules_for_one_dim", lambda p, x, a, b: x + 1.0, "a:x,a:y")
one("two_dims_on_one_axis", lambda p, x, a, b: x + 1.0, "a:x,b:x")
one("anonymous_is_fine", lambda p, x, a, b: mtf.anonymize(x))
one("slicewise_split_dim", lambda p, x, a, b: mtf.slicewise(tf.nn.relu, [x]))
one("slicewise_shape", lambda p, x, a, b: mtf.slicewise(lambda t: t[:1], [x], splittable_dims=[a, b]))
one("dropout_neither", lambda p, x, a, b: mtf.dropout(x, True))
one("dropout_both", lambda p, x, a, b: mtf.dropout(x, True, keep_prob=0.5, rate=0.5))
one("dropout_keep_prob", lambda p, x, a, b: mtf.dropout(x, True, keep_prob=1.5))
one("dropout_noise_shape", lambda p, x, a, b: mtf.dropout(x, True, rate=0.5, noise_shape=[D("c", 2)]))
one("rename_absent", lambda p, x, a, b: mtf.rename_dimension(x, "c", "d"))
one("rename_to_present", lambda p, x, a, b: mtf.rename_dimension(x, "a", "b"))
one("replace_absent", lambda p, x, a, b: mtf.replace_dimensions(x, D("c", 2), D("d", 2)))
one("replace_apart", lambda p, x, a, b: mtf.replace_dimensions(mtf.broadcast(x, [a, D("c", 2), b]), [a, b], D("d", 24)))
one("assign_to_sum", lambda p, x, a, b: mtf.assign(x + x, x))
one("assign_shape", lambda p, x, a, b: mtf.assign(p.variable("v", [a, b]), mtf.reduce_sum(x, reduced_dim=a)))
one("loss_shape", lambda p, x, a, b: mtf.layers.softmax_cross_entropy_with_logits(x, x, D("c", 2)))
one("loss_targets", lambda p, x, a, b: mtf.layers.softmax_cross_entropy_with_logits(x, mtf.reduce_sum(x, reduced_dim=a), b))
one("nested_gradient_of_sign", lambda p, x, a, b: mtf.gradients([mtf.sign(x)], [x])[0] + 1.0)
one("gradient_of_mod", lambda p, x, a, b: mtf.gradients([x % 2.0], [x])[0])
one("gradient_of_comparison", lambda p, x, a, b: mtf.gradients([mtf.to_float(mtf.less(x, 0.0))], [x])[0])
one("conv_split_height", lambda p, x, a, b: mtf.Conv2dOperation(
    mtf.reshape(x, [D("n", 1), a, b, D("c", 1)]),
    mtf.ones(p.mesh, S([D("fh", 3), D("fw", 3), D("c", 1), D("o", 1)])), (1, 1, 1, 1), "SAME").outputs[0], "b:x")
one("conv_padding", lambda p, x, a, b: mtf.Conv2dOperation(
    mtf.reshape(x, [D("n", 1), a, b, D("c", 1)]),
    mtf.ones(p.mesh, S([D("fh", 3), D("fw", 3), D("c", 1), D("o", 1)])), (1, 1, 1, 1), "FULL").outputs[0], "")
one("conv_channels", lambda p, x, a, b: mtf.Conv2dOperation(
    mtf.reshape(x, [D("n", 1), a, b, D("c", 1)]),
    mtf.ones(p.mesh, S([D("fh", 3), D("fw", 3), D("e", 1), D("o", 1)])), (1, 1, 1, 1), "SAME").outputs[0], "")


@error()
def variable_name_taken(p):
    p.variable("v", "a:4")
    tf.get_variable("other", shape=[4])
    return p.variable("other", "a:4")


@error()
def inner_tensor_of_custom_gradient(p):
    x = p.input("x", "a:4,b:6")
    kept = []

    def fn(x):
        kept.append(mtf.exp(x))
        return kept[0] * 2.0

    mtf.custom_gradient(fn, lambda output_grads, **_: [output_grads[0]], [x])
    return kept[0] + 1.0


@error()
def loop_changes_shape(p):
    x = p.input("x", "a:4,b:6")
    body = lambda y: [mtf.reduce_sum(y, reduced_dim=x.shape.dims[0])]  # noqa: E731
    return mtf.while_loop(lambda y: mtf.less(mtf.reduce_sum(y), 1.0), body, [x])[0]


@error()
def serialize_without_gradient(p):
    x = p.input("x", "batch:8,b:6")
    p.variable("unused", "b:6")
    fn = lambda f: {"loss": mtf.reduce_sum(f["x"])}  # noqa: E731
    return mtf.serialize_training_step({"x": x}, fn, x.shape.dims[0], 2)[0][0]


@error("")
def stack_twice(p):
    p.variable("v", "a:4")
    p.variable("w", "a:4")
    p.graph.rewrite_stack_variables()
    p.graph.rewrite_stack_variables()


@error()
def number_of_devices(p):
    return mtf.placement_mesh_impl.PlacementMeshImpl("x:2,y:2", "", [""] * 3)


def kinds(error):
    """Returns the names of an error's type and of those that it is a kind of."""
    return [t.__name__ for t in type(error).__mro__]


def outcome(name):
    """Returns [when, type, text, types it is a kind of] of the error of a program; "" if none."""
    fn, layout = ERRORS[name]
    with tf.Graph().as_default():
        mesh = oracle_runner.MESH
        if layout == "uneven":
            mesh, layout = "x:4", "b:x"
        case = oracle_runner.Case(name, mesh, layout)
        try:
            y = fn(case)
        except Exception as e:
            return ["build", type(e).__name__, str(e)[:200], kinds(e)]
        try:
            lowering = mtf.Lowering(case.graph, {case.mesh: case.impl()})
            if isinstance(y, (list, tuple)):
                y = y[0]
            if isinstance(y, mtf.Tensor):
                fetch = lowering.export_to_tf_tensor(y)
        except Exception as e:
            return ["lower", type(e).__name__, str(e)[:200], kinds(e)]
        if isinstance(y, mtf.Tensor):
            try:
                with tf.Session() as session:
                    session.run(fetch)
            except Exception as e:
                return ["run", type(e).__name__, str(e)[:100], kinds(e)]
    return ["", "", "", [""]]
