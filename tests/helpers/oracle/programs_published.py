"""Programs: models of gin files in the forms that published ones have.

Entries of `make_layer_stack.layers` with names and arguments in every order, names that share
variables between layers, blocks and both sides, and stacks that apply layers again.
"""

import gin

from helpers.oracle.model_harness import sequence_to_sequence
from helpers.oracle.oracle_runner import table
from mesh_tensorflow.transformer import (  # noqa: F401  (moe, universal_transformer: gin's names)
    moe,
    transformer,
    transformer_layers,
    universal_transformer,
)

PUBLISHED, published = table("batch:x,vocab:y,heads:y,d_ff:y", gradients=False, tolerance=1e-4)

COMMON = """
make_layer_stack.num_layers = 2
LayerStack.dropout_rate = 0.0
LayerStack.norm_epsilon = 1e-6
Unitransformer.d_model = 8
Unitransformer.max_length = 8
Unitransformer.vocab_divisor = 16
Unitransformer.positional_embedding = False
Unitransformer.shared_embedding_and_softmax_weights = True
SelfAttention.num_heads = 2
SelfAttention.key_value_size = 4
SelfAttention.dropout_rate = 0.0
SelfAttention.relative_attention_type = "bias_shared"
EncDecAttention.relative_attention_type = None
DenseReluDense.hidden_size = 12
DenseReluDense.dropout_rate = 0.0
"""
UNIVERSAL = """
make_layer_stack.layer_stack_cls = @universal_transformer.UTLayerStack
UTLayerStack.num_vanilla_transformer_layers = 1
UTLayerStack.act_type = "basic"
UTLayerStack.recurrence_type = "basic"
UTLayerStack.act_max_steps = 3
UTLayerStack.act_epsilon = 0.1
UTLayerStack.num_rec_steps = 2
UTLayerStack.num_inrecurrence_layers = 1
UTLayerStack.position_start_index = None
UTLayerStack.add_or_concat_timing_signal = "add"
UTLayerStack.step_timing_signal_type = "learned"
UTLayerStack.add_position_timing_signal = False
UTLayerStack.add_step_timing_signal = True
UTLayerStack.mix_with_transformer_before_ut = True
UTLayerStack.mix_with_transformer_after_ut = False
UTLayerStack.gates_inputs = "i"
UTLayerStack.gate_ffn_layer = "dense"
UTLayerStack.use_gated_transformer = False
UTLayerStack.gating_type = "highway"
"""
ATTENTION = "@transformer_layers.SelfAttention"
MEMORY = "@transformer_layers.EncDecAttention"
DENSE = "@transformer_layers.DenseReluDense"
NARROW = '{"hidden_size": 6}'


def sides(encoder, decoder):
    """Returns bindings of the layers of both sides, lists of entries as text."""
    return "".join(
        f"{side}/make_layer_stack.layers = [{', '.join(entries)}]\n"
        for side, entries in (("encoder", encoder), ("decoder", decoder))
    )


def model(bindings):
    """Returns the model that `make_bitransformer` makes of the bindings."""
    gin.enter_interactive_mode()
    try:
        gin.parse_config(COMMON + bindings)
        return transformer.make_bitransformer(input_vocab_size=14, output_vocab_size=14)
    finally:
        gin.clear_config()
        gin.exit_interactive_mode()


def add(name, bindings, encoder, decoder):
    def fn(p):
        return sequence_to_sequence(p, model(bindings + sides(encoder, decoder)))

    fn.__name__ = f"published_{name}"
    published()(fn)


# One set of variables for both sides; what only the decoder has, has a name of its own.
add(
    "shared_sides",
    'make_bitransformer.encoder_name = "shared"\nmake_bitransformer.decoder_name = "shared"\n',
    [f'("self_attention", {ATTENTION})', f'("ff", {DENSE})'],
    [f'("self_attention", {ATTENTION})', f'("memory", {MEMORY})', f'["ff", {DENSE}]'],
)
# One set of variables for all blocks; and several layers of one set within a block.
add(
    "shared_blocks",
    "make_layer_stack.block_scope = False\n",
    [f'("self_attention", {ATTENTION})', f'("ff", {DENSE})'],
    [f'("self_attention", {ATTENTION})', f'({MEMORY}, "memory")', f'("ff", {DENSE})'],
)
add(
    "shared_blocks_in_part",
    "make_layer_stack.block_scope = False\nencoder/make_layer_stack.num_layers = 1\n",
    [f'("a", {ATTENTION})', f'("ff", {DENSE})', ATTENTION, f'("ff", {DENSE})'],
    [f'("a", {ATTENTION})', MEMORY, f'({NARROW}, "ff", {DENSE})'],
)
# Small layers beside those of a trained model, whose names have to stay.
add(
    "adapters",
    "",
    [f'("layer_000", {ATTENTION})', f'("adapter_0", {NARROW}, {DENSE})', f'("layer_001", {DENSE})'],
    [
        f'("layer_000", {ATTENTION})', f'({NARROW}, {DENSE}, "adapter_0")',
        f'({MEMORY}, "layer_001")', f'("layer_002", {DENSE})', f'["adapter_1", {DENSE}, {NARROW}]',
    ],
)  # fmt: skip
# Blocks of several layers, with arguments of their own.
add(
    "different_layers",
    "make_layer_stack.num_layers = 1\n",
    [
        f'("first", {ATTENTION})', f'("ff_0", {DENSE})',
        f'({{"key_value_size": 6}}, {ATTENTION})', f'({NARROW}, {DENSE})',
    ],
    [
        f'({{"num_heads": 4}}, {ATTENTION})', MEMORY, DENSE,
        f'({{"relative_attention_type": None}}, {ATTENTION})',
        f'({{"num_heads": 4, "key_value_size": 2}}, {MEMORY})', f'("last", {DENSE})',
    ],
)  # fmt: skip
add(
    "universal",
    UNIVERSAL,
    [f'("self_attention", {ATTENTION})', f'("ff", {DENSE})'],
    [f'("self_attention", {ATTENTION})', f'({MEMORY}, "memory")', f'("ff", {DENSE})'],
)
add(
    "synthesizer",
    "Synthesizer.num_heads = 2\nSynthesizer.key_value_size = 4\nSynthesizer.dropout_rate = 0.0\n",
    ['("s", {"synthesize_mode": "factorized"}, @transformer_layers.Synthesizer)', DENSE],
    ['({"synthesize_mode": "factorized"}, @transformer_layers.Synthesizer)', MEMORY, DENSE],
)
