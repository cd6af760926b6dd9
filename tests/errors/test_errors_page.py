"""docs/errors_index.md has every message that the package raises, and no subject without messages."""

import ast
import html
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "docs"))

import error_messages as index  # noqa: E402

PAGE = (ROOT / "docs" / "errors_index.md").read_text(encoding="utf-8")
# Re-raised, or from a function that has the text as an argument.
MOST_WITHOUT_TEXT = 21


@pytest.fixture(scope="module")
def messages():
    return index.messages()


@pytest.fixture(scope="module")
def filled():
    page = re.sub(r"<small>.*?</small>|<[^>]+>", "", index.fill_in(PAGE))
    return {html.unescape(line).strip() for line in page.splitlines()}


@pytest.mark.slow
def test_page_has_every_message(messages, filled):
    missing = {m.text for m in messages if index.is_told(m)} - filled
    assert not missing
    silent = [m for m in messages if not index.is_told(m)]
    assert len(silent) <= MOST_WITHOUT_TEXT, silent


@pytest.mark.slow
def test_every_raise_statement_is_read(messages):
    """Counted without the reader: statements that make an error in place."""
    made = 0
    for path in (ROOT / "mesh_tensorflow").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            made += isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)
    assert made == sum(m.error != index.SLIP for m in messages) > 600


@pytest.mark.slow
def test_every_subject_has_messages_and_says_what_to_do(messages):
    places = [p for m in index.MARKER.finditer(PAGE) for p in m["places"].split()]
    assert len(places) == len(set(places)) and index.REST in places
    found = {index.place_of(m.module, places) for m in messages}
    for section in re.split(r"^## ", PAGE, flags=re.M)[1:]:
        title = section.splitlines()[0]
        [marker] = index.MARKER.finditer(section)
        of_section = marker["places"].split()
        if of_section == [index.REST]:
            continue
        for path in (index.PACKAGE / place for place in of_section):
            assert path.exists() or path.with_suffix(".py").exists(), f"{title}: {path} is gone"
        assert found & set(of_section), f"{title} has no messages"
        assert "*What to do:*" in " ".join(section.split()), title


@pytest.mark.slow
def test_examples_of_errors_are_in_the_index(messages):
    """What docs/errors.md shows, which the tests of the documentation raise, is listed."""
    page = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
    shown = re.findall(r"^```python raises\n.*?^```\n\n```text\n(.*?)^```", page, re.M | re.S)
    assert len(shown) > 15
    patterns = [index.pattern(m) for m in messages if index.is_told(m)]
    for text in shown:
        text = " ".join(text.partition("\n  while lowering")[0].split())
        text = text.partition(" (an error by mtf.strict()")[0]
        text = re.sub(r"^… ", "name: ", text)  # the page leaves out the name of an operation
        if "Could not find variable" in text:  # TensorFlow's
            continue
        assert any(p.search(text) for p in patterns), text
