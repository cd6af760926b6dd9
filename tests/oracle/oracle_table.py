"""All programs, by the fixture file that they share."""

import programs_attention
import programs_beam_search
import programs_bert
import programs_control
import programs_conv
import programs_conv_layers
import programs_decoding
import programs_elementwise
import programs_experimental
import programs_layers
import programs_models
import programs_optimizers
import programs_reductions
import programs_shapes
import programs_transformer_attention
import programs_transformer_feed_forward
import programs_transformer_functions
import programs_transformer_further
import programs_transformer_heads
import programs_transformer_models
import programs_transformer_moe
import programs_transformer_pairs
import programs_transformer_stacks


def joined(*tables):
    """Returns one table of several."""
    programs = {name: program for table in tables for name, program in table.items()}
    assert len(programs) == sum(len(table) for table in tables), "names must be unique"
    return programs


FAMILIES = {
    "language": joined(
        programs_elementwise.PROGRAMS,
        programs_reductions.PROGRAMS,
        programs_shapes.PROGRAMS,
        programs_conv.PROGRAMS,
        programs_control.PROGRAMS,
    ),
    "layers": joined(programs_layers.LAYERS, programs_conv_layers.LAYERS),
    "attention": programs_attention.ATTENTION,
    "bert": programs_bert.BERT,
    "beam_search": programs_beam_search.BEAM_SEARCH,
    "decoding": joined(programs_decoding.DECODING, programs_decoding.ATTENDING),
    "optimizers": programs_optimizers.OPTIMIZERS,
    "models": programs_models.MODELS,
    "experimental": programs_experimental.EXPERIMENTAL,
    "transformer_attention": joined(
        programs_transformer_attention.TRANSFORMER_ATTENTION,
        programs_transformer_heads.TRANSFORMER_HEADS,
        programs_transformer_functions.TRANSFORMER_FUNCTIONS,
    ),
    "transformer_further": programs_transformer_further.FURTHER,
    "transformer_models": joined(
        programs_transformer_models.TRANSFORMER_MODELS,
        programs_transformer_stacks.TRANSFORMER_STACKS,
        programs_transformer_pairs.TRANSFORMER_PAIRS,
    ),
    "transformer_feed_forward": programs_transformer_feed_forward.TRANSFORMER_FEED_FORWARD,
    "transformer_moe": programs_transformer_moe.TRANSFORMER_MOE,
}
