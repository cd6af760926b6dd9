"""A single vocabulary, or a pair of vocabularies for inputs and targets."""

from __future__ import annotations

from typing import TYPE_CHECKING

import gin

from mesh_tensorflow.transformer.utils._flags import MODULE

if TYPE_CHECKING:
    from mesh_tensorflow.transformer.dataset._features import Vocabularies
    from mesh_tensorflow.transformer.vocabulary import Vocabulary

__all__ = ["inputs_vocabulary", "separate_vocabularies", "targets_vocabulary"]


def inputs_vocabulary(vocabulary: Vocabularies) -> Vocabulary:
    """Returns the vocabulary of inputs.

    Args:
      vocabulary: a Vocabulary, or a tuple (of inputs, of targets).

    Returns:
      A Vocabulary.
    """
    return vocabulary[0] if isinstance(vocabulary, tuple) else vocabulary


def targets_vocabulary(vocabulary: Vocabularies) -> Vocabulary:
    """Returns the vocabulary of targets.

    Args:
      vocabulary: a Vocabulary, or a tuple (of inputs, of targets).

    Returns:
      A Vocabulary.
    """
    return vocabulary[1] if isinstance(vocabulary, tuple) else vocabulary


@gin.configurable(module=MODULE)
def separate_vocabularies(
    inputs: Vocabulary = gin.REQUIRED, targets: Vocabulary = gin.REQUIRED
) -> tuple:
    """Returns a pair of vocabularies, for a gin file to bind to `utils.run.vocabulary`.

    Args:
      inputs: the Vocabulary of inputs.
      targets: the Vocabulary of targets.

    Returns:
      The tuple (inputs, targets).
    """
    return inputs, targets
