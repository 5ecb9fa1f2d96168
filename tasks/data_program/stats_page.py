"""Counts, lengths and shares as one page that needs nothing but a browser."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from anystep.inspection.length_counts import QUANTILES
from anystep.programs.html_page import as_html, html_page, html_table

_BAR_WIDTH, _VALUE_WIDTH, _ROW_HEIGHT, _LETTER_WIDTH = 480, 150, 20, 7


def stats_page(caches: Sequence[Mapping[str, Any]], shares: Sequence[Mapping[str, Any]]) -> str:
  """The page's HTML.

  Args:
    caches: `CacheStats.to_json` of each, with `read`: `ReadLengths.to_json`, or None.
    shares: what `mixture_shares` says; may be empty.
  """
  title = "Data: " + ", ".join(dict.fromkeys(cache["task"] for cache in caches))
  sections = [_format_mixture(shares)] if shares else []
  sections += [
    f"<h2>{as_html(cache['task'])} {as_html(cache['split'])}</h2>{_format_split(cache)}" for cache in caches
  ]
  return html_page(title, "\n".join([_format_overview(caches), *sections]))


def format_shares(shares: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
  """Return the header and the rows of a mixture's table, of `mixture_shares`."""
  tokens = "tokens" if shares[0]["tokens_as"] == "read" else "tokens as cached"
  header = ["task", "planned share of rows", "real share of rows", "rows", "share of examples", "examples"]
  rows = [
    [
      share["task"],
      format_percent(share["planned_percent"]),
      format_percent(share["real_percent"]),
      f"{share['rows']:,}",
      format_percent(share["example_percent"]),
      f"{share['examples']:,}",
      format_percent(share["token_percent"]),
    ]
    for share in shares
  ]
  return [*header, f"share of {tokens}, estimated"], rows


def format_lengths(features: Mapping[str, Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
  """Return the header and the rows of a table of lengths by feature, of `LengthCounts.to_json`."""
  columns = {name: _format_columns(feature) for name, feature in features.items()}
  titles = list(dict.fromkeys(title for row in columns.values() for title in row))
  rows = [[name, *(row.get(title, "") for title in titles)] for name, row in columns.items()]
  return ["feature", *titles], rows


def _format_columns(feature: Mapping[str, Any]) -> dict[str, str]:
  """A feature's numbers by what they are, as people read them."""
  columns = {
    "tokens": f"{feature['tokens']:,}",
    "mean": f"{feature['mean']:,.1f}",
    **{f"p{percent}": f"{feature[f'p{percent}']:,}" for percent in QUANTILES},
    "max": f"{feature['max']:,}",
  }
  if "feature_length" in feature:
    columns["length"] = f"{feature['feature_length']:,}"
    for what in ("examples", "tokens"):
      share = format_percent(feature[f"cut_{what}_percent"])
      columns[f"{what} cut by rows"] = f"{feature[f'cut_{what}']:,} ({share})"
  return columns


def format_bin(interval: Mapping[str, int]) -> str:
  """The lengths of one bar of a histogram."""
  low, high = interval["from"], interval["to"]
  return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def format_percent(share: float | None) -> str:
  """A share in percent, a dash for one that is not known.

  >>> format_percent(12.5), format_percent(100 / 3), format_percent(0.0001234), format_percent(None)
  ('12.5%', '33.3333%', '0.0001234%', '-')
  """
  return "-" if share is None else f"{share:.6g}%"


def _format_overview(caches: Sequence[Mapping[str, Any]]) -> str:
  names = ("examples", "source_shards", "shards", "bytes")
  header = ["task and split", *(name.replace("_", " ") for name in names)]
  rows = [[f"{c['task']} {c['split']}", *(f"{c[name]:,}" for name in names)] for c in caches]
  return html_table(header, rows)


def _format_mixture(shares: Sequence[Mapping[str, Any]]) -> str:
  start, stop = shares[0]["steps"]
  bars = []
  for share in shares:
    bars.append(
      (share["task"], share["planned_percent"], format_percent(share["planned_percent"]), "planned")
    )
    bars.append(("", share["real_percent"], format_percent(share["real_percent"]), "bar"))
  return (
    f"<h2>Mixture in steps {start}:{stop}</h2>"
    + html_table(*format_shares(shares))
    + '<p><span class="key" style="background: var(--planned)"></span>planned share of rows'
    + '<span class="key" style="background: var(--bar)"></span>real share of rows</p>'
    + _draw_bars(f"planned and real shares of rows in steps {start}:{stop}", bars)
  )


def _format_split(cache: Mapping[str, Any]) -> str:
  parts = []
  if cache["features"] is None:
    parts.append("<p>A cache in layout as_is keeps no lengths tables.</p>")
  elif not cache["features"]:
    parts.append("<p>No feature is a sequence.</p>")
  else:
    parts.append("<h3>As cached</h3>" + html_table(*format_lengths(cache["features"])))
  if cache["read"] is not None:
    parts.append("<h3>As read</h3>" + html_table(*format_lengths(cache["read"]["features"])))
    parts.append(f"<p>{as_html(cache['read']['summary'])}</p>")
  parts += [
    f"<h3>Tokens of {as_html(name)}, as cached</h3>"
    + _draw_bars(
      f"examples by tokens of {name}",
      [(format_bin(b), b["examples"], f"{b['examples']:,}", "bar") for b in feature["histogram"]],
    )
    for name, feature in (cache["features"] or {}).items()
  ]
  return "".join(parts)


def _draw_bars(title: str, bars: Sequence[tuple[str, float | None, str, str]]) -> str:
  """(label, size, what stands behind it, class) as horizontal bars, the largest as wide as there is room."""
  largest = max((size or 0 for _, size, _, _ in bars), default=0) or 1
  left = 16 + _LETTER_WIDTH * max((len(label) for label, *_ in bars), default=0)
  parts = []
  for k, (label, size, text, kind) in enumerate(bars):
    width = _BAR_WIDTH * (size or 0) / largest
    top, baseline = k * _ROW_HEIGHT, k * _ROW_HEIGHT + 14
    parts.append(
      f'<text x="{left - 8}" y="{baseline}" text-anchor="end">{as_html(label)}</text>'
      f'<rect class="{kind}" x="{left}" y="{top + 2}" width="{width:.1f}" height="{_ROW_HEIGHT - 5}"/>'
      f'<text x="{left + width + 8:.1f}" y="{baseline}">{as_html(text)}</text>'
    )
  width, height = left + _BAR_WIDTH + _VALUE_WIDTH, len(bars) * _ROW_HEIGHT
  return (
    f'<svg role="img" viewBox="0 0 {width} {height}" width="{width}" height="{height}">'
    f"<title>{as_html(title)}</title>{''.join(parts)}</svg>"
  )
