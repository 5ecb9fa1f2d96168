"""Previews as one page that needs nothing but a browser."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from anystep.programs.html_page import as_html, html_page
from anystep.tasks.preview.values import Example, Piece, Preview, Stage, Value
from anystep.tasks.vocabularies.decoding import escape_unprintable

# So much is shown of what is longer: from its start and from its end.
_CHARACTERS = (1500, 300)
_TOKENS = (400, 80)
_VALUES = (60, 20)

_STYLE = """
ol.stages { list-style: none; padding: 0; margin: 0 }
ol.stages > li { border-left: 3px solid var(--line); margin: 0; padding: .25rem 0 1rem 1rem }
ol.stages > li.cache { border-left: 3px dashed var(--planned); color: var(--soft) }
ol.stages > li.failed { border-left-color: var(--bad) }
h3 { margin: .5rem 0 } h3 small, .note, dt { color: var(--soft); font-weight: normal }
.note { margin: .25rem 0 } .problem, .dropped { color: var(--bad) }
.example { background: var(--shade); border: 1px solid var(--line); border-radius: 6px;
  padding: .5rem .75rem; margin: .5rem 0 }
.example > b { color: var(--soft) }
dl { margin: .25rem 0 } dt b { color: var(--text) } dd { margin: 0 0 .5rem 0; overflow-wrap: anywhere }
dd, td.token { font-family: ui-monospace, monospace; font-size: .85rem; white-space: pre-wrap }
.token { border-radius: 3px } .token:nth-child(even) { background: var(--even) }
.token:nth-child(odd) { background: var(--odd) }
.token.special { color: var(--special); font-weight: 600 }
del, del .token { color: var(--bad); text-decoration: line-through }
.gap { color: var(--soft); font-style: italic }
.aligned th, .aligned td { padding: .1rem .4rem; text-align: center }
.aligned th:first-child { text-align: left; position: sticky; left: 0; background: var(--shade) }
"""


def preview_page(previews: Sequence[Preview], *, full: bool = False) -> str:
  """The page's HTML.

  Args:
    previews: of tasks, one or several.
    full: whether long values are shown whole.
  """
  title = "Preview: " + ", ".join(preview.task for preview in previews)
  return html_page(title, "".join(_format_preview(preview, full) for preview in previews), style=_STYLE)


def _format_preview(preview: Preview, full: bool) -> str:
  where = f"{preview.task} {preview.split}, source shard {preview.source_shard}"
  stages = "".join(_format_stage(k, stage, full) for k, stage in enumerate(preview.stages))
  problem = "" if preview.error is None else f'<p class="problem">{as_html(preview.error)}</p>'
  return f'<h2>{as_html(where)}</h2>{_format_notes(preview.notes)}<ol class="stages">{stages}</ol>{problem}'


def _format_stage(number: int, stage: Stage, full: bool) -> str:
  if stage.kind == "cache":
    return f'<li class="cache">{as_html(stage.name)}</li>'
  parts = [
    f"<h3>{number} {as_html(stage.name)} <small>{as_html(stage.bound)}</small></h3>",
    _format_notes(stage.notes),
  ]
  if stage.left:
    parts.append(f'<p class="dropped">{as_html(stage.left)}</p>')
  if stage.problem is not None:
    parts.append(f'<p class="problem">raised {as_html(stage.problem)}</p>')
  parts += [_format_example(stage, example, full) for example in stage.examples]
  return f'<li class="{"failed" if stage.problem else stage.kind}">{"".join(parts)}</li>'


def _format_notes(notes: Iterable[str]) -> str:
  return "".join(f'<p class="note">{as_html(note)}</p>' for note in notes)


def _format_example(stage: Stage, example: Example, full: bool) -> str:
  prefix = "given: " if stage.problem else ""
  parts = [f"<b>{prefix}example {as_html(example.label)}{example.of_how_many}</b><dl>"]
  for name, value, is_sum in _format_features(stage, example):
    if is_sum:
      parts.append(f"<dt><b>{as_html(name)}</b> sum {np.sum(value.values):,}</dt>")
      continue
    cut = "" if value.kept is None else f", {value.cut:,} cut"
    parts.append(f"<dt><b>{as_html(name)}</b> {value.form}{cut}</dt><dd>{_format_value(value, full)}</dd>")
  parts.append("</dl>")
  same = [name for name in example.features if name not in example.changed]
  parts += [
    f'<p class="note">{title}: {as_html(", ".join(names))}</p>'
    for title, names in (("as before", same), ("gone", example.removed))
    if names
  ]
  if stage.kind == "model":
    parts += [_align(side, features, full) for side, features in example.sides()]
  return f'<div class="example">{"".join(parts)}</div>'


def _format_features(stage: Stage, example: Example) -> Iterable[tuple[str, Value, bool]]:
  if stage.kind == "model":
    return example.lines()
  return [(name, example.features[name], False) for name in example.changed]


def _format_value(value: Value, full: bool) -> str:
  if value.is_tokens:
    used = value.used if value.kept is None else len(value.values)
    kept = used if value.kept is None else value.kept
    padding = (
      f' <span class="gap">{len(value.values) - used:,} of padding</span>' if used < len(value.values) else ""
    )
    cut = f"<del>{_format_tokens(value, kept, used, full)}</del>" if kept < used else ""
    return _format_tokens(value, 0, kept, full) + cut + padding
  described = value.to_json()
  if "text" in described:
    return _shorten(described["text"], _CHARACTERS, "characters", full)
  values = described["values"]
  if not isinstance(values, list):
    return as_html(values)
  head, tail = _VALUES
  texts = [str(v) for v in (values if full or len(values) <= head + tail else values[:head])]
  rest = values[len(texts) :]
  gap = (
    f' <span class="gap">… {len(rest) - tail:,} more …</span> {as_html(", ".join(map(str, rest[-tail:])))}'
    if rest
    else ""
  )
  return as_html(", ".join(texts)) + gap


def _shorten(text: str, limits: tuple[int, int], what: str, full: bool) -> str:
  head, tail = limits
  if full or len(text) <= head + tail:
    return as_html(text)
  gap = f'<span class="gap"> … {len(text) - head - tail:,} {what} … </span>'
  return as_html(text[:head]) + gap + as_html(text[-tail:])


def _format_tokens(value: Value, start: int, stop: int, full: bool) -> str:
  """Tokens as coloured pieces, whose ids show when they are pointed at."""
  head, tail = _TOKENS
  if full or stop - start <= head + tail:
    return "".join(map(_format_token, value.pieces(start, stop)))
  gap = f'<span class="gap"> … {stop - start - head - tail:,} tokens … </span>'
  return (
    "".join(map(_format_token, value.pieces(start, start + head)))
    + gap
    + "".join(map(_format_token, value.pieces(stop - tail, stop)))
  )


def _format_token(piece: Piece) -> str:
  kind = "token special" if piece.is_special else "token"
  return f'<span class="{kind}" title="{piece.id}">{as_html(piece.text) or "·"}</span>'


def _align(side: str, features: Sequence[tuple[str, Value]], full: bool) -> str:
  """The model's features below each other, place by place."""
  length = len(features[0][1].values)
  used = max(value.used for _, value in features)
  stop = length if full else min(used, sum(_TOKENS))
  head = "".join(f"<th>{place}</th>" for place in range(stop))
  rows = [f"<tr><th>place</th>{head}</tr>"]
  for name, value in features:
    if value.is_tokens:
      cells = [
        f'<td title="{p.id}">{as_html(escape_unprintable(p.text)) or "·"}</td>' for p in value.pieces(0, stop)
      ]
    else:
      cells = [f"<td>{as_html(v)}</td>" for v in np.asarray(value.values)[:stop].tolist()]
    rows.append(f"<tr><th>{as_html(name.removeprefix(f'{side}_'))}</th>{''.join(cells)}</tr>")
  rest = (
    f'<p class="note">and {length - stop:,} more places, {length - used:,} of them padding</p>'
    if stop < length
    else ""
  )
  return f'<div class="scroll"><table class="aligned">{"".join(rows)}</table></div>{rest}'
