"""Where this package means to differ from the classic, and why.

Every entry is checked both ways where that can be done: a difference that is gone must leave
the table.
"""

# -- what the classic cannot do; ours must

CLASSIC_FAILS = {
    "unstack_in_part": "gradient of an unstack of which not every part is used (SEMANTICS 33)",
    "halo_without_blocks": "halo exchange without a dimension of blocks (SEMANTICS 14)",
    "conv2d_strided_uneven": "SAME with a stride that does not divide the size (SEMANTICS 34)",
    "conv2d_valid_strided": "strided VALID convolutions get a wrong size (SEMANTICS 34)",
    "conv2d_with_even_blocks": "blocks with an even filter",
    "conv2d_transposed": "transposed convolutions with split output channels",
    "conv2d_transposed_wide": "transposed convolutions with split output channels",
    "conv3d_transposed": "transposed convolutions with split output channels",
    "while_loop": "on one processor, shapes of loop variables are mistaken for one another",
    "reshape_split": "a reshape that the classic cannot lay out",
    "reshape_split_inner": "a reshape that the classic cannot lay out",
    "reshape_relabel": "a reshape that the classic cannot lay out",
    "reshape_uneven": "a reshape that the classic cannot lay out",
    "reshape_of_sum": "a reshape that the classic cannot lay out",
    "lm_sinusoids": "sinusoids of positions with split channels",
    "bitransformer_one_sinusoid": "sinusoids of positions with split channels",
    "bitransformer_sinusoids": "sinusoids of positions with split channels",
    "embedding_adaptive": "concatenates clusters along a split vocabulary",
    "embedding_mixtape": "concatenates frequent and other tokens along a split vocabulary",
    "adaptive_softmax_probabilities": "concatenates clusters along a split vocabulary",
    "universal_act": "both sides of a kernel are named d_model",
}

# Layouts with which the classic computes something else than on one processor.
CLASSIC_WRONG = {
    ("reshape_rename", "a:x,c:y"): "the new axis is cut from what the old one already cut",
    ("reshape_flat", "a:x,ab:y"): "the new axis is cut from what the old one already cut",
    ("bfloat16", "a:x,b:y"): "sums of bfloat16 round differently in another order",
    ("bfloat16", "a:y"): "sums of bfloat16 round differently in another order",
    ("dense_bfloat16", "batch:x,h:y"): "sums of bfloat16 round differently in another order",
    ("dense_bfloat16", "d:x,h:y"): "sums of bfloat16 round differently in another order",
}

# Values that have another shape: the classic leaves these gradients in the output's shape.
SUMMED_GRADIENTS = {"maximum_broadcast": ["d_maximum/d_y", "d_minimum/d_y"]}

# Gradients that the classic gives whole to both sides where they tie, by the first side's: the
# second side gets none, as in TensorFlow.
SECOND_AT_TIES = {
    "ties": {"d_maximum/d_y": "d_maximum/d_x", "d_minimum/d_y": "d_minimum/d_x"},
}

# Gradients that are zero, of which the classic computes what rounding leaves: a softmax over one
# position is 1 whatever its logit.
ROUNDED_ZEROS = {"local_attention": ["d_y_1_4_True/d_q", "d_y_1_4_True/d_k"]}

# -- names and classes of the operations that make a result: (class here, reason)

NAMES_DIFFER = {
    "loss_dice": "multiplied by a number instead of by a tensor of it",
    "SoftmaxOperation": "softmax is one operation",
    "NormalizeOperation": "normalization is one operation",
    "CrossEntropyOperation": "the cross entropy of ids is one operation",
    "gelu": "one operation",
    "swish": "one operation",
    "logsumexp": "softmax before it made no reduce_logsumexp, which shifts the numbers of scopes",
    "logsumexp_extra_0": "as above",
    "softmax_extra_0": "as above",
    "softmax_extra_tensor": "as above",
    "where_scalar": "adding a product with the number 0 is left out",
    "broadcast": "a broadcast einsum is an einsum and a broadcast",
    "values_*": "top_k is one operation for every k",
    "indices_*": "top_k is one operation for every k",
    "largest_*": "reads one entry of top_k",
    "y": "serialize_training_step reshapes what has the batch dimension",
    "z": "gelu of dense_product",
    "attention_*": "a reshape to the same shape is left out",
    "sinusoids*": "no concatenation, so that a layout may split the channels",
}

# -- counters: regular expressions of names, by program

COUNTERS_DIFFER = [
    ("*", r"allconcat/\d/top_k_op", "the classic does not count the communication of top_k"),
    ("bert_*", r"allreduce/.*", "normalization is one operation: fewer sums of gradients"),
    ("layer_norm", r"allreduce/.*/einsum_op", "one sum for mean and variance"),
    ("batch_norm", r"allreduce/.*", "scale and deviation are multiplied before the images: fewer sums in gradients"),
    ("unet_volumes", r"allreduce/.*", "batch normalization, as above"),
    ("unet_slices", r"allreduce/.*", "batch normalization, as above"),
    ("unet_convolution", r"allreduce/.*", "batch normalization, as above"),
    ("corr", r"allreduce/.*", "divides by the deviations before the product: fewer sums"),
    ("clip_activation_gradient", r"allreduce/.*", "one mean for two summaries"),
    ("ada*_schedules", r"allreduce/.*", "the update of each variable is built once, for one schedule"),
    ("maximum_broadcast", r"allreduce/.*", "sums the gradient to the shape of the input"),
    ("reshape_*", r"allconcat/.*", "more is moved where the classic is wrong"),
    ("multihead_attention", r"allconcat/.*", "as above; there the mask has the same places wrong"),
    (
        "masked_local_attention*",
        r"shift\[.*|allreduce/.*",
        "halos are no wider than the block, beyond which nothing is seen",
    ),
    ("recompute_grad", r"allreduce/.*", "no sum of gradients to force an order"),
    ("recomputed", r"allreduce/.*", "no sum of gradients to force an order"),
    ("sublayers", r"allreduce/.*", "layer norm sums fewer gradients, clipped ones too"),
    ("self_attention_bias_shared", r"allreduce/.*", "what two layers add to a gradient is summed once"),
    ("talking_heads_*", r"allreduce/.*", "static and dynamic projections are applied apart"),
    ("branched_*", r"allreduce/.*", "branches are weighted and summed in one product"),
    ("unet_slices", r"shift\[.*", "a halo is exchanged again for a filter's gradient, not kept"),
    ("local_attention*", r"shift\[.*", "positions beside a block are counted, not moved"),
    ("hybrid_attention", r"allreduce/.*", "the two kinds of weights are mixed by one product"),
    ("beam_search_*", ".*", "candidates are chosen where the vocabulary is, beams by index"),
    ("sample_*", ".*", "the last id and the end of a row are carried along"),
    ("decode_from_encoder", ".*", "as above"),
    ("greedy_decode", ".*", "nothing is printed, and the end of a row is carried along"),
    ("topk_scores_and_seq", ".*", "chosen by index"),
    ("embedding_mixtape*", r"allreduce/.*", "what frequent tokens have is made as long as the vocabulary"),
    ("adaptive_softmax_*", r"allreduce/.*|allconcat/.*", "clusters are not split with the vocabulary"),
    ("product_key_memory", r"allreduce/.*|allconcat/.*", "one weighted sum of vectors, not one a head"),
    ("universal_basic", r"allreduce/.*", "layer norm sums fewer gradients"),
    ("moe_*_train", r"allreduce/.*/reduce_op", "losses are summed in fewer steps"),
    ("shift", r"shift\[-?2\]", "not counted where only zeros would arrive"),
    ("halo_exchange", r"shift\[-?2\]", "not counted where only zeros would arrive"),
]

# -- errors

EARLIER = """reduce_to_new_dimension slice_too_long int_plus_float int_divided mean_of_int
broadcast_drops assign_shape conv_padding""".split()

# By name: (type here, reason).
ERRORS_DIFFER = {
    "split_uneven": ("ValueError", "instead of an assertion without text"),
    "dropout_keep_prob": ("ValueError", "the classic lets it pass"),
    "dropout_noise_shape": ("ValueError", "the classic lets it pass"),
    "number_of_devices": ("ValueError", "the classic finds out later, if at all"),
    "concat_split_dim": ("", "it works in every layout"),
    "slice_split_dim": ("", "it works in every layout"),
    "pad_split_dim": ("", "it works in every layout"),
    "stack_split_dim": ("", "it works in every layout"),
    "unstack_split_dim": ("", "it works in every layout"),
    "conv_split_height": ("", "it works in every layout"),
    "slicewise_split_dim": ("", "splittable_dims may be left out; it works in every layout"),
    "gradient_of_mod": ("", "the gradient of % is None, as of a comparison"),
    "where_scalar_true": ("", "a number in both places"),
}

# -- scripts: results that differ, by key

SCRIPTS_DIFFER = {
    ("assignments_in_order", "stale"): "a whole slice in the memory of the master is the master",
    ("laid_out_tensors", "python_numbers"): "processor numbers are tensors",
    ("stacked_variables", "apart/slices"): "processors in one memory share equal slices",
    ("stacked_variables", "stacked/slices"): "processors in one memory share equal slices",
}
# These look at slices, so they need a slice for each processor.
NEEDS_SLICES = {"laid_out_tensors", "custom_operations", "stacked_variables"}

# Programs whose results are others where assignments happen at their place in the program, as in
# eager code and in a tf.function; in a session they happen when they are run.
IN_SESSIONS_ONLY = ["assignments"]

# -- dimension names of variables

_BIAS = "its kernel cannot have d_model twice, and the bias has the kernel's name for what comes out"
# {program: {pattern of variables: why}}. A name that the classic has twice in one variable is in no need of it.
DIMENSIONS_DIFFER = {
    "universal_act": {
        "transformer/sigmoid_activation_for_pondering/dense_1/bias": _BIAS,
    },
    "universal_act_accumulated": {
        "transformer/sigmoid_activation_for_pondering/dense_1/bias": _BIAS,
    },
    "evolved": {
        "*/separable_conv1d/*": "the classic has d_model twice in the convolution, of two sizes, "
        "and can't split it; ours is split around the convolution",
    },
    "beam_search_one_beam": {
        "loop_var_0": "the classic has its loop's state in a variable, ours in the loop",
    },
}
