"""Output of `anystep-data`: tables for people, JSON lines for programs."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from anystep.inspection.history import Difference
from anystep.tasks.data_program.stats_page import format_bin, format_lengths, format_percent, format_shares
from anystep.tasks.vocabularies.decoding import escape_unprintable

# Of a list that is long.
_SHOWN_ITEMS = 8
# Where no terminal shows them, tables are as wide as they need to be.
_PLAIN_WIDTH = 1 << 16
_BAR_CHARACTERS = 40


def print_objects(objects: Iterable[Mapping[str, Any]]) -> None:
  """Prints JSON objects, one a line."""
  for value in objects:
    print(json.dumps(value))


def print_note(text: str) -> None:
  """Prints a remark for people, which is no part of the output, on stderr."""
  print(text, file=sys.stderr, flush=True)


def print_table(
  title: str, header: Sequence[str], rows: Iterable[Sequence[object]], *, left: Sequence[str] = ()
) -> None:
  """Prints a table: drawn on a terminal, else with aligned columns alone.

  Args:
    title: what stands above it.
    header: the columns' names.
    rows: the cells, numbers or text.
    left: the columns that are aligned to the left; the first is.
  """
  terminal = sys.stdout.isatty()
  table = Table(box=box.SIMPLE_HEAD if terminal else None, pad_edge=False, padding=(0, 2, 0, 0))
  for position, name in enumerate(header):
    table.add_column(name, justify="left" if position == 0 or name in left else "right", overflow="fold")
  for row in rows:
    table.add_row(*(escape_unprintable(_format_cell(cell)) for cell in row))
  if terminal:
    console = Console(markup=False, emoji=False, highlight=False)
    console.print(title, style="bold")
    console.print(table)
    return
  plain = io.StringIO()
  Console(file=plain, width=_PLAIN_WIDTH, color_system=None, markup=False, emoji=False).print(table)
  print(title, *(line.rstrip() for line in plain.getvalue().splitlines()), "", sep="\n")


def print_plan(segments: Sequence[Mapping[str, Any]], whole: Mapping[str, Any]) -> None:
  """Prints a plan's history and totals, as `history` and `totals` give them."""
  facts = {name: value for name, value in whole.items() if name not in ("tasks", "tombstones")}
  facts["num_steps"] = "the data never ends" if whole["num_steps"] is None else whole["num_steps"]
  lengths = [f"{name} {length:,}" for name, length in whole["feature_lengths"].items()]
  facts["feature_lengths"] = ", ".join(lengths)
  rows: list[Sequence[object]] = [(name.replace("_", " "), value) for name, value in facts.items()]
  print_table("Plan", ("field", "value"), rows, left=("value",))
  names = ("num_units", "num_shards", "block_records", "layout", "unit_table")
  rows = [(name, *(task[field] or "" for field in names)) for name, task in whole["tasks"].items()]
  titles = ("task", "units (U)", "shards (S)", "block records", "layout", "unit table")
  print_table("Tasks", titles, rows, left=("unit table",))
  rows = []
  for segment in segments:
    first_cells, reason = [segment[name] for name in ("start_step", "batch_size", "lanes")], segment["reason"]
    for name, task in segment["tasks"].items():
      shares = (task["rate"], format_percent(task["percent"]), task["first_unit"], task["epoch"])
      rows.append((*first_cells, name, *shares, reason))
      # What is the segment's stands in its first line.
      first_cells, reason = ["", "", ""], ""
  header = ("from step", "batch size", "lanes", "task", "rate", "share", "first unit", "epoch", "reason")
  print_table("History", header, rows, left=("task", "reason"))
  rows = [
    (entry["start_step"], name, count, entry["reason"])
    for entry in whole["tombstones"]
    for name, count in entry["examples"].items()
  ]
  if rows:
    print_table("Tombstones", ("from step", "task", "examples", "reason"), rows, left=("task", "reason"))


def print_differences(differences: Sequence[Difference], step: int | None) -> None:
  """Prints in what two plans differ, and from which step on that shows."""
  if differences:
    rows = [(field, *map(_format_side, (one, other))) for field, one, other in differences]
    print_table("Differences", ("field", "one", "other"), rows, left=("one", "other"))
  where = "at no step" if step is None else f"from step {step} on"
  print(f"The plans are {'not ' if differences else ''}the same; their rows differ {where}.")


def print_batch(rows: Sequence[Mapping[str, Any]]) -> None:
  """Prints the rows of a step."""
  names = ("row", "task", "unit", "epoch", "shard", "place")
  lines = [["padding" if n == "task" and row[n] is None else row[n] for n in names] for row in rows]
  print_table(f"Step {rows[0]['step']}", names, lines, left=("task",))


def print_stats(caches: Sequence[Mapping[str, Any]], shares: Sequence[Mapping[str, Any]]) -> None:
  """Prints counts, lengths and shares; arguments are those of `stats_page`."""
  names = ("task", "split", "examples", "source_shards", "shards", "bytes")
  header = [name.replace("_", " ") for name in names]
  print_table("Caches", header, [[cache[name] for name in names] for cache in caches], left=("split",))
  if shares:
    start, stop = shares[0]["steps"]
    print_table(f"Mixture in steps {start}:{stop}", *format_shares(shares))
  for cache in caches:
    _print_lengths(cache)


def _print_lengths(cache: Mapping[str, Any]) -> None:
  title = f"{cache['task']} {cache['split']}"
  if cache["features"] is None:
    print(f"{title}: a cache in layout as_is keeps no lengths tables.\n")
  elif cache["features"]:
    print_table(f"Tokens of {title}, as cached", *format_lengths(cache["features"]))
  if cache["read"] is not None:
    print_table(f"Tokens of {title}, as read", *format_lengths(cache["read"]["features"]))
    print(f"{cache['read']['summary']}\n")
  for name, feature in (cache["features"] or {}).items():
    largest = max((b["examples"] for b in feature["histogram"]), default=0)
    bars = [
      (format_bin(b), b["examples"], "#" * -(-_BAR_CHARACTERS * b["examples"] // largest))
      for b in feature["histogram"]
    ]
    print_table(f"Tokens of {title}: {name}", ("tokens", "examples", ""), bars, left=("",))


def _format_cell(value: object) -> str:
  if isinstance(value, int) and not isinstance(value, bool):
    return f"{value:,}"
  return "-" if value is None else str(value)


def _format_side(value: object) -> str:
  """Format a plan's value of a field; a mapping is a task or segment that only this plan has."""
  if isinstance(value, list) and len(value) > _SHOWN_ITEMS:
    return f"{', '.join(map(str, value[:_SHOWN_ITEMS]))}, … ({len(value):,})"
  return "is there" if isinstance(value, Mapping) else _format_cell(value)
