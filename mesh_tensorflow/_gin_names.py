"""Names in gin files: a user's function by a name that only this package adds is the one meant."""

from __future__ import annotations

import gin
from gin.selector_map import SelectorMap

__all__ = ["ADDED", "prefer_names_of_users"]

# What the classic did not register, so that a gin file may mean a function of the user's.
ADDED = frozenset(
    f"mesh_tensorflow.{name}"
    for name in [
        "auto_mtf.gin_models.gin_transformer",
        "auto_mtf.models.language_model",
        "layers.RotaryEmbedding",
        "optimize.AdamWOptimizer",
        "optimize.LionOptimizer",
        *[f"schedules.{kind}_schedule" for kind in ("constant", "cosine", "noam", "piecewise")],
        *[f"schedules.{kind}_schedule" for kind in ("linear_decay", "linear_warmup", "rsqrt")],
        "schedules.join_schedules",
        "stored_layout",
        "transformer.transformer.PipelinedLayerStack",
        "transformer.transformer.UnscaledVocabEmbedding",
        "transformer.utils.get_inputs_from_file",
        "transformer.vocabulary.ByteVocabulary",
        "transformer.vocabulary.SentencePieceVocabulary",
    ]
)


# What gin.tf names TensorFlow's functions; the classic registered none of them.
_OF_TENSORFLOW = "tf."


class _UsersFirst(SelectorMap):
    """A table of selectors in which an added one matches only what no other one matches."""

    def matching_selectors(self, partial_selector: str) -> list[str]:
        """Returns the selectors that end like a part of one, without those that give way."""
        selectors: list[str] = super().matching_selectors(partial_selector)
        return [
            selector
            for selector in selectors
            if selector not in ADDED and not selector.startswith(_OF_TENSORFLOW)
        ] or selectors


def prefer_names_of_users() -> None:
    """Lets a name that ADDED shares with one function of a user's mean that one, in gin files."""
    # gin has no public way to give one of two a name that both end in: it would be ambiguous.
    gin.config._REGISTRY.__class__ = _UsersFirst
