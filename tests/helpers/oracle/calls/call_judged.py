"""Differences between what calls give here and in the classic that are meant, each with its reason."""

import fnmatch

MOMENTS = ["text", "environment", "call", "lower", "run"]


def both_fail(expected, found):
    return "error" in expected and "error" in found


def by_accident(error):
    """Whether an error comes from within Python or TensorFlow, or from making another's text."""
    return not error["declared"] or error["error"] == "AttributeError"


def earlier(expected, found):
    """Both fail, here before anything is lowered or run."""
    return both_fail(expected, found) and (
        MOMENTS.index(found["when"]) < MOMENTS.index(expected["when"]))


def clearer(expected, found):
    """The classic fails by accident, within Python or TensorFlow; here an error says what is wrong."""
    return both_fail(expected, found) and by_accident(expected) and found["declared"]


def accidents(expected, found):
    """Both fail within Python or TensorFlow, whichever looks at the argument first."""
    return both_fail(expected, found) and by_accident(expected) and not found["declared"]


def works(expected, found):
    """The classic fails by accident, within Python or TensorFlow; here the call works."""
    return "error" in expected and by_accident(expected) and "value" in found


RULES = {
    earlier: "errors come earlier, and say what to do (docs/errors.md)",
    clearer: "the classic stumbles over the argument; here an error says what is wrong",
    accidents: "a wrong argument on which Python or TensorFlow stumbles in both",
    works: "the classic stumbles over the argument; here it is taken as meant",
}


def nameless(result):
    """Returns a description without names and classes of operations."""
    if isinstance(result, dict):
        if "Tensor" in result:
            return {"Tensor": result["Tensor"][:2], "value": result["value"]}
        if "operation" in result:
            return {"operation": [result["operation"][0], nameless(result["operation"][2])]}
        return {k: nameless(v) for k, v in result.items()}
    return [nameless(v) for v in result] if isinstance(result, list) else result


# Results that are equal but for names and classes of operations: (pattern of calls, reason).
NAMES = [
    ("mtf.* name=*'named')", "the operation has the name that is given"),
    ("mtf.multiply(*name='a/b')", "the operation has the name that is given"),
    ("mtf.gelu(*", "gelu is one operation"),
    ("mtf.swish(*", "swish is one operation"),
    ("mtf.softmax(*", "softmax is one operation"),
    ("mtf.log_softmax(*", "log_softmax is one operation"),
    ("mtf.top_k(*", "top_k is one operation for every k"),
    ("mtf.nth_largest_element(*", "reads one entry of top_k"),
    ("layers.softmax_cross_entropy_with_logits(x, ints, b)", "one operation for ids"),
    ("mtf.where(bools, x, 0)", "adding a product with the number 0 is left out"),
    ("mtf.gradients(*", "the gradient of a square is one product"),
    ("test_utils.NumpyConverter()*", "arrays are imported, however large they are"),
    ("optimize.*.apply_grad(*", "assignments are named after no variable; apply_grads joins them"),
    ("transformer.sinusoid_positional_embedding_weights(*", "no concatenation, so that a layout may split the channels"),
    ("vocab_embeddings.MixtureOfSoftmaxes(*", "softmax before it makes no reduce_logsumexp"),
    ("fixup_layers.sublayer_fixup_*", "a reshape to the same shape is left out"),
]

SLIP = "is not what it says: an error instead of a result that is not meant"
DTYPE = "dtypes may be given as tf.as_dtype takes them"
DTYPE_ERROR = "TensorFlow's own error for what is no dtype"
RULE_PAIRS = "a layout rule is a pair of names; the classic keeps what it can never apply"
SHAPES_EQUAL = "assigns a value of another shape: in the classic an error, or a variable of another shape, when it runs"
STATIC = "the variable's own shape tells what to assign"
RESOURCE = "variables are resource variables (docs/differences.md)"
ONE_ELEMENT = "an array with one element is a number, as it is in the classic's sums and products"
UNREAD = "an argument of another type, which the classic happens not to read on this path"

# By family: (pattern of calls as in fnmatch, or a call, reason).
JUDGED = {
    "core": [
        ("mtf.convert_to_shape('a:-2')", "a negative size " + SLIP),
        ("mtf.convert_to_dimension(('a', True))", "a truth value is no size"),
        ("mtf.convert_to_shape(':2')", "a dimension without a name cannot be meant"),
        ("mtf.combined_dimension([], 'n')", "no dimensions make one of size 1, if it has a name"),
        ("mtf.is_subsequence(None, [1])", UNREAD),
        ("mtf.LayoutRules(*a*)", RULE_PAIRS),
        ("mtf.convert_to_layout_rules(*a*)", RULE_PAIRS),
        ("mtf.tensor_dim_to_mesh_dim_size(layout=[[]'a'],*", RULE_PAIRS),
        ("repr(mtf.LayoutRules([('a', 'rows')]))", "rules are shown as they are written"),
        ("repr(mtf.Graph())", "a graph says what it holds"),
        ("(v, v2, graph.rewrite_stack_variables(max_combined_slice_size='1'))", UNREAD),
        ("*.to_string", "an operation is shown with its name"),
        ("x.operation.has_gradient", "a truth value"),
        ("mtf.get_variable(mesh, 'n', S([[]a, b]), None)", DTYPE_ERROR),
        ("mtf.Variable(mesh, 'n', S([[]a]), tf.float32,*", "a dtype stands for all three of a VariableDType"),
        ("v.get_master()", "the master keeps dtype and placement; its value is a tf.Variable's (docs/differences.md)"),
        ("v.assign_to_master(*", RESOURCE),
    ],
    "elementwise": [
        ("mtf.mod(x, [[]1.0])", ONE_ELEMENT),
        ("mtf.where(bools, x, [[]1.0])", ONE_ELEMENT),
        ("mtf.floordiv(*'a:2,b:3,c:4')", "broadcasts to the output shape, as other operations do"),
        ("mtf.mod(*[[]a, b, c])", "broadcasts to the output shape, as other operations do"),
        ("mtf.cast(*int32*)", DTYPE),
        ("mtf.cwise(tf.sin, *output_dtype=3)", DTYPE),
        ("mtf.zeros(*3)", DTYPE),
        ("mtf.range(*3)", DTYPE),
        ("mtf.ones(mesh, S([[]a, b]), None)", DTYPE_ERROR),
        ("mtf.slicewise(lambda t: (t, t)*", "one dtype serves all outputs"),
        ("mtf.dropout(x, True, rate=*", "a rate that is no probability " + SLIP),
        ("mtf.import_tf_tensor(*placeholder_with_default*", "a size that TensorFlow does not know is taken from the shape"),
        ("mtf.assign*", SHAPES_EQUAL),
        ("mtf.serialize_training_step({'x': mtf.gather*", "features that depend on variables: gradients reach variables through the model function only"),
    ],
    "structure": [
        ("mtf.reduce_first(*", "a dimension that the tensor lacks " + SLIP),
        ("mtf.top_k(x, b, D('k', 4))", "more than there are: the classic fills up with -1e9"),
        ("mtf.nth_largest_element(x, -1, b)", "counts from 0: the classic gives zeros"),
        ("mtf.nth_smallest_element(x, True, b)", "a truth value is no number"),
        ("mtf.concat([[]x, one_row], a)", "a Dimension names the dimension, too"),
        ("mtf.slice(x, 2, -1, 'b')", "a size of -1 goes to the end, as in tf.slice"),
        ("mtf.pad(x, [[]1, 1], a)", "ValueError, as for any name that is not there"),
        ("mtf.one_hot(*dtype='nope')", DTYPE_ERROR),
        ("mtf.gather(*output_shape=*)", "the output of an einsum is broadcast to its shape"),
        ("mtf.cumsum(x, D('a', 3))", "a dimension that the tensor lacks " + SLIP),
        ("mtf.halo_exchange(x, a, b, -1)", "a negative halo " + SLIP),
        ("mtf.compatible_lazy_allreduce_sums(None)", UNREAD),
    ],
    "operations": [
        ("mtf.AddOperation(x, s, S([[]a, b, c]))", "broadcasts to the output shape, as mtf.add does"),
        ("mtf.BinaryOpWithBroadcasting(*", "broadcasts to the output shape, as other operations do"),
        ("mtf.ReduceOperation(x, S([[]b]), 'sum').outputs[[]0]", "the reduction may be written in letters of either case"),
        ("mtf.EinsumOperation([[]x, s], S([[]a, c]))", "an output dimension that no input has; mtf.einsum broadcasts to it"),
        ("mtf.SliceOperation(x, 0, -1, 'a')", "a size of -1 goes to the end, as in tf.slice"),
        ("mtf.SlicewiseOperation(*).has_gradient", "a truth value"),
        ("mtf.StackOperation([[]x, x], 'n', None)", "Python's own error for what is no number"),
        ("mtf.GenericGradOperation(*, [[]])", "outputs without a gradient have none"),
        ("mtf.Assign(*", "as many values as variables: the classic leaves out what has no partner"),
        ("mtf.CustomGradientOperation(None,*", UNREAD),
    ],
    "mesh": [
        ("placement.PlacementMeshImpl('rows:2', '',*", "a wrong number of devices is found at once (docs/errors.md)"),
        ("impl4.allreduce(four, None, 'SUM')", UNREAD),
        ("impl4.allsplit(four, 0, 7)", UNREAD),
        ("impl4.allconcat(four, [[]0], 0)", UNREAD),
        ("impl4.alltoall(four, 'rows', 0, 1)", UNREAD),
        ("impl4.make_slices(tf.range(4), S([[]a]))", "a tensor of another size: the classic leaves out what is too much"),
        ("impl4.import_tf_tensor(x, tf.ones([[]3, 3]))", "a tensor of another size: the classic leaves out what is too much"),
        ("(mtf.assign(v, x), *", RESOURCE),
        ("mtf.assign_slice(*", RESOURCE),
        ("mtf.parallel(*3.0)", "what is no list is for all devices"),
        ("placement.all*_ring([[]], [[]], 0*", "no devices cannot be meant"),
        ("simd.auto_logical_to_physical_tpu(*", "processor numbers also of shapes for which the classic has no tiling"),
    ],
    "layers": [
        ("layers.dense_product(s,*", "a dimension that the tensor lacks " + SLIP),
        ("layers.weights_nonzero(ints, dtype=3)", DTYPE),
        ("layers.conv2d_transpose(*variable_dtype='float32')", DTYPE),
        ("layers.conv2d_with_blocks(*'33')", "Python's own error for what are no numbers"),
        ("layers.corr(*", "where the dimension is not the last, the classic gives no correlation: the diagonal is not 1 (docs/differences.md)"),
        ("layers.annealed_dropout(x, False,*", "without training nothing reads the step"),
        ("layers.annealed_dropout(x, True, 10,*", "an end before the start " + SLIP),
        ("layers.clip_activation_gradient(x, 'a')", UNREAD),
        ("layers.attention_mask_same_segment(*rename*", "the memory may have its final name already"),
        ("layers.attention_mask_ignore_padding(ids, 'float32')", DTYPE),
        ("layers.attention_bias_local_2d_block(*", "works for names other than the classic's"),
    ],
    "optimize": [
        ("optimize.MomentumOptimizer(0.1, None)*", "an error when the step is built, not when it is lowered"),
        ("optimize.Ada*Optimizer(*'*').apply_grad(x, v)", "an error when the step is built, not when it is lowered"),
        ("optimize.SgdOptimizer(0.1).apply_grad(row, v)", SHAPES_EQUAL),
        ("optimize.compute_lr_for_step([[]], 2.0)", "makes the global step, as for other lists"),
        ("optimize.product_learning_rate(*[[]x, s])", "a learning rate is a scalar of TensorFlow"),
        ("(mtf.exp(x), *get_operation_input_names('nope'))", "an operation that is not there"),
        ("auto_mtf.layout_and_mesh_shape(graph, '2')", "Python's own error for what is no number"),
    ],
    "bert": [
        ("bert.BertConfig(*).to_dict()[[]'vocab_size']", "a vocabulary size that is no number is found at once"),
        ("bert.BertConfig.from_dict(*", "keys that are unknown or missing are errors (docs/differences.md)"),
    ],
    "transformer": [
        ("schedules.linear_warmup(*=-1)", "a negative number of steps " + SLIP),
        ("schedules.product_learning_rate(*[[]x])", "a learning rate is a scalar of TensorFlow"),
        ("schedules.slanted_triangular(*cut_fraction=np.int64(1))", "nothing after the cut " + SLIP),
        ("transformer.LayerStack(*)", "layers that are no list: an error at once"),
        ("transformer.ReversibleLayerStack(None)", "layers that are no list: an error at once"),
        ("transformer.sublayer_clip_activation_gradient(*=-1)", "a negative norm " + SLIP),
        ("attention.visibility_mask_to_attention_bias(bools, 'nope')", DTYPE_ERROR),
        ("transformer_layers.LocalSelfAttention('2').window_dim", "text is no number"),
        ("transformer_layers.Conv1DLayer(*", "the channels may have any name; the classic asks for io's"),
        ("transformer_layers.SeparableConv1DLayer(*", "the channels may have any name; the classic asks for io's"),
    ],
    "data": [
        ("dataset.*[[]'nope'])", "a feature that is not there is an error that lists those that are"),
        ("dataset.make_text_line_dataset(*none*", "patterns of files that match none are refused (docs/differences.md)"),
        ("utils.metric_*", RESOURCE),
    ],
}


def matches(call, pattern):
    return call == pattern or fnmatch.fnmatchcase(call, pattern)


def judge(family, call, expected, found, same):
    """Returns (reason, pattern) why a difference is meant, or None.

    Args:
      family: of the call.
      call: its text.
      expected: what the classic gave.
      found: what comes out here.
      same: a function that says whether two descriptions are equal.
    """
    for rule, reason in RULES.items():
        if rule(expected, found):
            return reason, None
    if "value" in expected and "value" in found and same(nameless(expected), nameless(found)):
        for pattern, reason in NAMES:
            if matches(call, pattern):
                return reason, None
    for pattern, reason in JUDGED.get(family, ()):
        if matches(call, pattern):
            return reason, pattern
    return None
