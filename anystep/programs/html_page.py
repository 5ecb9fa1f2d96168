"""HTML pages without external files: frame, style and tables."""

from __future__ import annotations

import html
from collections.abc import Iterable

_STYLE = """
:root { color-scheme: light dark; --text: #1f2328; --page: #ffffff; --soft: #57606a; --line: #d0d7de;
  --bar: #2f6feb; --planned: #8c959f; --shade: #f6f8fa; --bad: #cf222e; --special: #7d4cd9;
  --even: #ddf4ff; --odd: #dafbe1 }
@media (prefers-color-scheme: dark) { :root { --text: #e6edf3; --page: #0d1117; --soft: #9da4ad;
  --line: #3d444d; --bar: #4493f8; --planned: #656c76; --shade: #151b23; --bad: #ff7b72; --special: #b392f9;
  --even: #0c2d6b; --odd: #033a16 } }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--text); background: var(--page);
  max-width: 64rem; margin: 2rem auto; padding: 0 1rem }
h1, h2, h3, p { overflow-wrap: anywhere }
h1 { font-size: 1.5rem } h2 { font-size: 1.2rem; margin-top: 2.5rem } h3 { font-size: 1rem }
.scroll { overflow-x: auto }
table { border-collapse: collapse; font-variant-numeric: tabular-nums }
th, td { padding: .25rem 1rem .25rem 0; text-align: right; border-bottom: 1px solid var(--line);
  white-space: nowrap }
th { color: var(--soft); font-weight: 600 }
th:first-child, td:first-child { text-align: left }
svg { max-width: 100%; height: auto; font: 12px system-ui, sans-serif; fill: var(--text) }
.bar { fill: var(--bar) } .planned { fill: var(--planned) }
.key { display: inline-block; width: .8em; height: .8em; margin: 0 .3em 0 1em }
p { color: var(--soft) }
"""


def html_page(title: str, body: str, *, style: str = "") -> str:
  """A page's HTML.

  Args:
    title: its title and first heading, as text.
    body: the HTML below the heading.
    style: further CSS, for this page only.
  """
  return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{as_html(title)}</title><style>{_STYLE}{style}</style></head>
<body><h1>{as_html(title)}</h1>
{body}
</body></html>
"""


def html_table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
  """A table of texts; it scrolls if it is wider than the page."""
  head = "".join(f"<th>{as_html(name)}</th>" for name in header)
  body = "".join(f"<tr>{''.join(f'<td>{as_html(cell)}</td>' for cell in row)}</tr>" for row in rows)
  return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def as_html(value: object) -> str:
  """A value as text with HTML's characters escaped."""
  return html.escape(str(value))
