"""A hook of mkdocs: what the pages of the site have beside their Markdown."""

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import error_messages


def on_page_markdown(markdown, **kwargs):
    """Fills in the index of messages, and removes `no-run` and `raises` from fences."""
    markdown = error_messages.fill_in(markdown)
    return re.sub(r"^( *```python)[ \w-]+$", r"\1", markdown, flags=re.M)
