"""All programs, by the fixture file that they share."""

import programs_attention
import programs_control
import programs_conv
import programs_conv_layers
import programs_elementwise
import programs_layers
import programs_models
import programs_optimizers
import programs_reductions
import programs_shapes


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
    "optimizers": programs_optimizers.OPTIMIZERS,
    "models": programs_models.MODELS,
}
