"""Why TensorFlow failed, without where in the graph."""

from __future__ import annotations

import re

__all__ = ["reason"]

# Lines that TensorFlow puts around the reason: where an operation was made, and its name.
_AROUND = re.compile(
    r"Graph execution error:|Detected at node .*|Node: .*|\s+File .*|\s*\[\[.*|\d+ root error.*"
    r"|Hint: .*|Original stack trace .*|\s*\(\d+\)\s*|No OpKernel .*"
)


def reason(error: Exception) -> str:
    """Returns in one line why an operation of TensorFlow, or of the file system, failed.

    Args:
      error: what was raised.

    Returns:
      the first line that is about the reason, without a full stop at its end.
    """
    text = str(getattr(error, "message", None) or error)
    lines = [line.strip() for line in text.splitlines() if not _AROUND.fullmatch(line)]
    first = next(filter(None, lines), type(error).__name__)
    return re.sub(r"^\(\d+\) \w+: ", "", first).rstrip(".")
