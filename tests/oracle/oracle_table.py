"""All programs, by the fixture file that they share."""

import programs
import programs_models

FAMILIES = {
    "language": programs.PROGRAMS,
    "layers": programs_models.LAYERS,
    "models": programs_models.MODELS,
}
