"""Previews as text for a terminal."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from anystep.tasks.preview.values import Example, Piece, Preview, Stage, Value
from anystep.tasks.vocabularies.decoding import escape_unprintable

# So much is shown of what is longer: from its start and from its end.
_CHARACTERS = (220, 60)
_IDS = (16, 4)
_PLACES = (8, 3)
_INDENT = (0, 0, 0, 2)
_PLAIN_WIDTH, _PICTURE_WIDTH = 110, 100
# A text is no markup of rich's.
_AS_IT_IS: dict[str, Any] = {"markup": False, "emoji": False, "highlight": False}


def preview_text(preview: Preview, *, full: bool = False) -> RenderableType:
  """A preview as something that a rich `Console` prints.

  Args:
    preview: of a task.
    full: whether long values are shown whole.
  """
  head = Text.assemble(
    (escape_unprintable(preview.task), "bold"),
    f" {escape_unprintable(preview.split)}, source shard {escape_unprintable(preview.source_shard)}",
  )
  return Group(
    head,
    *_format_notes(preview.notes),
    *(_format_stage(k, stage, full) for k, stage in enumerate(preview.stages)),
    Text(),
  )


def print_previews(previews: Iterable[Preview], *, full: bool = False) -> None:
  """Prints previews: drawn on a terminal, else as plain lines."""
  if sys.stdout.isatty():
    Console(**_AS_IT_IS).print(*(preview_text(preview, full=full) for preview in previews))
    return
  plain = io.StringIO()
  console = Console(file=plain, width=_PLAIN_WIDTH, color_system=None, **_AS_IT_IS)
  console.print(*(preview_text(preview, full=full) for preview in previews))
  print(*(line.rstrip() for line in plain.getvalue().splitlines()), sep="\n", flush=True)


def preview_picture(previews: Iterable[Preview], *, full: bool = False) -> str:
  """Draw the output of `print_previews` as an SVG picture."""
  console = Console(file=io.StringIO(), record=True, width=_PICTURE_WIDTH, **_AS_IT_IS)
  console.print(*(preview_text(preview, full=full) for preview in previews))
  picture = console.export_svg(title="anystep-data preview", unique_id="preview")
  # The letters stand where they belong in any font: none is fetched.
  return re.sub(r"@font-face \{.*?\}\s*", "", picture, flags=re.DOTALL)


def _format_stage(number: int, stage: Stage, full: bool) -> RenderableType:
  if stage.kind == "cache":
    return Group(Text(), Rule(Text(stage.name, "bold yellow"), align="left", style="yellow"))
  title = Text.assemble(
    (f"{number} ", "dim"),
    (escape_unprintable(stage.name), "bold red" if stage.problem else "bold"),
    (escape_unprintable(stage.bound), "dim"),
  )
  lines: list[RenderableType] = [Text(), Rule(title, align="left", style="dim"), *_format_notes(stage.notes)]
  if stage.left:
    lines.append(Text(stage.left, "yellow"))
  if stage.problem is not None:
    lines.append(Text(f"raised {escape_unprintable(stage.problem)}", "red"))
  for example in stage.examples:
    label = f"{'given: ' if stage.problem else ''}example {escape_unprintable(example.label)}"
    lines += [
      Text.assemble((label, "cyan"), (example.of_how_many, "yellow")),
      _format_features(stage, example, full),
    ]
    if stage.kind == "model":
      lines += [Padding(_align(side, features, full), _INDENT) for side, features in example.sides()]
  return Group(*lines)


def _format_notes(notes: Iterable[str]) -> list[RenderableType]:
  return [Text(escape_unprintable(note), "dim italic") for note in notes]


def _format_features(stage: Stage, example: Example, full: bool) -> RenderableType:
  """Format the changed features with values, and the names of unchanged and removed ones."""
  grid = Table.grid(padding=(0, 1))
  grid.add_column()
  grid.add_column(style="dim", justify="right")
  grid.add_column(overflow="fold", ratio=1)
  if stage.kind == "model":
    for name, value, is_sum in example.lines():
      lines = [("sum", Text(f"{np.sum(value.values):,}"))] if is_sum else _format_model_lines(value, full)
      _add_lines(grid, name, lines)
  else:
    lines_of = _format_cut_lines if stage.kind == "trimmed" else _format_lines
    for name in example.changed:
      _add_lines(grid, name, lines_of(example.features[name], full))
  same = [name for name in example.features if name not in example.changed]
  for title, names in (("as before", same), ("gone", example.removed)):
    if names:
      grid.add_row("", title, Text(escape_unprintable(", ".join(names)), "dim"))
  return Padding(grid, _INDENT)


_Lines = Iterable[tuple[str, Text]]
"""What a value is, and its content."""


def _add_lines(grid: Table, name: str, lines: _Lines) -> None:
  title = Text(escape_unprintable(name), "bold")
  for form, content in lines:
    grid.add_row(title, form, content)
    title = Text()


def _format_lines(value: Value, full: bool) -> _Lines:
  if value.is_tokens:
    ids = np.asarray(value.values).tolist()
    yield value.form, _format_tokens(value, len(ids), full)
    yield "ids", Text(" ".join(_shorten_list(ids, full)), "dim")
    return
  described = value.to_json()
  content = described.get("text", described.get("values"))
  if isinstance(content, list):
    content = f"[{', '.join(_shorten_list(content, full))}]"
  yield value.form, _shorten(str(content), full)


def _format_cut_lines(value: Value, full: bool) -> _Lines:
  yield value.form, _format_cut(value, full)


def _format_cut(value: Value, full: bool) -> Text:
  if not value.cut:
    return Text("nothing is cut", "dim")
  described = value.to_json()
  content = _shorten(str(described.get("cut_text", described.get("cut_values"))), full)
  content.stylize("red strike")
  return Text.assemble((f"{value.cut:,} cut: ", "red"), content)


def _format_model_lines(value: Value, full: bool) -> _Lines:
  if value.is_tokens:
    yield f"{value.used:,} of {len(value.values):,} used", _format_tokens(value, value.used, full)
  else:
    yield from _format_lines(value, full)


def _format_tokens(value: Value, total: int, full: bool) -> Text:
  """Return tokens as text, the middle left out if they are many; sentinels, end and padding stand out."""
  text = Text()
  head, tail = (total, 0) if full or total <= sum(_CHARACTERS) else _CHARACTERS
  text.append_tokens(map(_style_piece, value.pieces(0, head)))
  if head < total:
    text.append(f" … {total - head - tail:,} tokens … ", "dim")
    text.append_tokens(map(_style_piece, value.pieces(total - tail, total)))
  return text


def _style_piece(piece: Piece) -> tuple[str, str]:
  return escape_unprintable(piece.text), "magenta" if piece.is_special else ""


def _shorten(text: str, full: bool) -> Text:
  head, tail = _CHARACTERS
  if full or len(text) <= head + tail:
    return Text(escape_unprintable(text))
  gap = (f" … {len(text) - head - tail:,} characters … ", "dim")
  return Text.assemble(escape_unprintable(text[:head]), gap, escape_unprintable(text[-tail:]))


def _shorten_list(values: Sequence[object], full: bool) -> list[str]:
  head, tail = _IDS
  texts = [
    escape_unprintable(str(value)) for value in (values if full else [*values[:head], *values[head:][-tail:]])
  ]
  if len(texts) < len(values):
    texts.insert(head, f"… {len(values) - len(texts):,} more …")
  return texts


def _align(side: str, features: Sequence[tuple[str, Value]], full: bool) -> Table:
  """Features of the model side by side, place by place."""
  table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
  table.add_column("place", justify="right")
  for name, _ in features:
    table.add_column(escape_unprintable(name.removeprefix(f"{side}_")))
  length = len(features[0][1].values)
  used = max(value.used for _, value in features)
  for place in _choose_places(used, length, full):
    if place is None:
      table.add_row("…")
    else:
      table.add_row(str(place), *(_format_cell(value, place) for _, value in features))
  if used < length and not full:
    table.add_row("…", Text(f"{length - used:,} places of padding", "dim"))
  return table


def _choose_places(used: int, length: int, full: bool) -> list[int | None]:
  head, tail = _PLACES
  if full:
    return list(range(length))
  if used <= head + tail:
    return list(range(used))
  return [*range(head), None, *range(used - tail, used)]


def _format_cell(value: Value, place: int) -> Text:
  if not value.is_tokens:
    return Text(str(np.asarray(value.values)[place]))
  (piece,) = value.pieces(place, place + 1)
  text, style = _style_piece(piece)
  if text and not piece.is_special:
    # Spaces are to be seen; there is no text of a part of a letter.
    text = f"'{text}'"
  return Text.assemble((f"{piece.id:>6} ", "dim"), (text, style))
