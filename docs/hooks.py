"""A hook of mkdocs: words after "python" in a fence are for the tests, not for the site."""

import re


def on_page_markdown(markdown, **kwargs):
    """Removes `no-run` and `raises` from fences."""
    return re.sub(r"^( *```python)[ \w-]+$", r"\1", markdown, flags=re.M)
