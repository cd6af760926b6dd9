"""All programs, by the fixture file that they share."""

from helpers.oracle import (
    programs_attention,
    programs_beam_search,
    programs_bert,
    programs_control,
    programs_conv,
    programs_conv_layers,
    programs_decoding,
    programs_elementwise,
    programs_experimental,
    programs_layers,
    programs_models,
    programs_optimizers,
    programs_published,
    programs_reductions,
    programs_shapes,
    programs_transformer_attention,
    programs_transformer_feed_forward,
    programs_transformer_functions,
    programs_transformer_further,
    programs_transformer_heads,
    programs_transformer_models,
    programs_transformer_moe,
    programs_transformer_pairs,
    programs_transformer_stacks,
)


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
    "published": programs_published.PUBLISHED,
    "transformer_feed_forward": programs_transformer_feed_forward.TRANSFORMER_FEED_FORWARD,
    "transformer_moe": programs_transformer_moe.TRANSFORMER_MOE,
}
