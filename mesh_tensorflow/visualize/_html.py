"""Pieces of a web page without scripts or files of its own: tables, sections, style."""

from __future__ import annotations

import html
from collections.abc import Sequence

__all__ = ["details", "facts", "figure", "note", "page", "preformatted", "section", "table"]

# Light and dark paper by the reader's setting; what is wide scrolls in its own box.
_STYLE = """
:root { color-scheme: light dark; --ink: #1f2328; --paper: #ffffff; --muted: #59636e;
  --line: #d1d9e0; --band: #f3f5f7; --accent: #0b57a4; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6edf3; --paper: #12161b; --muted: #9aa6b2; --line: #343c45; --band: #1b2129;
    --accent: #7ab8f5; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1160px; padding: 24px 20px 64px; color: var(--ink);
  background: var(--paper); font: 15px/1.5 system-ui, -apple-system, "Segoe UI", "DejaVu Sans",
  sans-serif; }
h1 { font-size: 26px; line-height: 1.25; margin: 0 0 4px; overflow-wrap: anywhere; }
h2 { font-size: 19px; margin: 40px 0 8px; padding-top: 12px; border-top: 1px solid var(--line); }
p { margin: 6px 0 12px; max-width: 76ch; }
.note { color: var(--muted); }
nav { margin: 14px 0 0; display: flex; flex-wrap: wrap; gap: 4px 16px; }
a { color: var(--accent); }
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 10px;
  margin: 18px 0 0; padding: 0; }
.facts div { background: var(--band); border-radius: 8px; padding: 10px 14px; min-width: 0; }
.facts dt { color: var(--muted); font-size: 13px; }
.facts dd { margin: 0; font-size: 17px; font-weight: 600; overflow-wrap: anywhere; }
.facts small { display: block; font-weight: 400; font-size: 13px; color: var(--muted); }
.wide { overflow-x: auto; margin: 10px 0 16px; border: 1px solid var(--line); border-radius: 8px; }
.figure { padding: 8px; }
.figure svg { display: block; }
table { border-collapse: collapse; font-size: 13.5px; font-variant-numeric: tabular-nums;
  width: 100%; }
th, td { text-align: right; padding: 4px 12px; white-space: nowrap;
  border-bottom: 1px solid var(--line); }
th { background: var(--band); font-weight: 600; }
tr:last-child td { border-bottom: 0; }
th.left, td.left { text-align: left; }
td.code { font-family: ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace;
  font-size: 12.5px; }
td.code:first-child { white-space: normal; overflow-wrap: anywhere; min-width: 34ch; }
tr.sum td { font-weight: 600; background: var(--band); }
pre { margin: 0; padding: 12px; font: 12.5px/1.4 ui-monospace, "DejaVu Sans Mono", Menlo, Consolas,
  monospace; }
summary { cursor: pointer; color: var(--accent); margin: 8px 0; }
@media (max-width: 640px) {
  body { padding: 16px 12px 40px; }
  .figure svg { max-width: 100%; height: auto; }
  th, td { padding: 4px 8px; }
  td.code:first-child { min-width: 16ch; }
}
@media print { body { max-width: none; } .wide { overflow: visible; } }
""".strip()


def facts(pairs: Sequence[tuple[str, str, str]]) -> str:
    """Returns a row of labeled numbers.

    Args:
      pairs: triples (label, number or word, a smaller line or "").
    """
    items = []
    for label, value, small in pairs:
        below = f"<small>{html.escape(small)}</small>" if small else ""
        items.append(
            f"<div><dt>{html.escape(label)}</dt><dd>{html.escape(value)}{below}</dd></div>"
        )
    return f'<dl class="facts">{"".join(items)}</dl>'


def table(
    rows: Sequence[Sequence[str]],
    left: Sequence[int] = (0,),
    code: Sequence[int] = (),
    sums: int = 0,
) -> str:
    """Returns a table in a box that scrolls if the table is wider.

    Args:
      rows: lists of cells; the first has the headings.
      left: numbers of the columns that are aligned to the left.
      code: numbers of the columns of names, in a fixed-width font.
      sums: how many of the last rows are totals.
    """

    def classes(i: int, body: bool) -> str:
        names = (["left"] if i in left else []) + (["code"] if body and i in code else [])
        return f' class="{" ".join(names)}"' if names else ""

    def broken(i: int, cell: str) -> str:
        text = html.escape(cell)
        return text.replace("/", "/<wbr>") if i in code else text  # where long names may break

    head = "".join(
        f"<th{classes(i, False)}>{html.escape(cell)}</th>" for i, cell in enumerate(rows[0])
    )
    lines = [f"<tr>{head}</tr>"]
    for number, row in enumerate(rows[1:], 1):
        cells = "".join(
            f"<td{classes(i, True)}>{broken(i, cell)}</td>" for i, cell in enumerate(row)
        )
        style = ' class="sum"' if number >= len(rows) - sums else ""
        lines.append(f"<tr{style}>{cells}</tr>")
    # tabindex: a box that scrolls can be reached, and then scrolled, by the keyboard.
    return f'<div class="wide" tabindex="0"><table>\n{chr(10).join(lines)}\n</table></div>'


def figure(svg: str) -> str:
    """Returns a picture in a box that scrolls if the picture is wider; on phones it shrinks."""
    return f'<div class="wide figure" tabindex="0">\n{svg}</div>'


def preformatted(text: str) -> str:
    """Returns text in a fixed-width font, in a box that scrolls."""
    return f'<div class="wide" tabindex="0"><pre>{html.escape(text)}</pre></div>'


def note(text: str) -> str:
    """Returns a paragraph of explanation."""
    return f'<p class="note">{html.escape(text)}</p>'


def details(label: str, content: str) -> str:
    """Returns content that is shown when the reader opens it."""
    return f"<details><summary>{html.escape(label)}</summary>\n{content}\n</details>"


def _anchor(title: str) -> str:
    return title.lower().replace(" ", "-")


def section(title: str, *content: str) -> tuple[str, str]:
    """Returns (title, HTML) of a section of a page."""
    body = "\n".join(part for part in content if part)
    text = f'<section id="{_anchor(title)}">\n<h2>{html.escape(title)}</h2>\n{body}\n</section>'
    return title, text


def page(title: str, head: str, sections: Sequence[tuple[str, str]]) -> str:
    """Returns a whole page.

    Args:
      title: its title.
      head: HTML beneath the title.
      sections: results of `section`.
    """
    links = "".join(f'<a href="#{_anchor(name)}">{html.escape(name)}</a>' for name, _ in sections)
    body = "\n".join(text for _, text in sections)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{html.escape(title)}</title>
<style>
{_STYLE}
</style>
</head>
<body>
<h1>{html.escape(title)}</h1>
{head}
<nav>{links}</nav>
{body}
</body>
</html>
"""
