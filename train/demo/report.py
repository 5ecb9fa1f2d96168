"""The demo's page: the losses of two runs in one plot, and examples from a batch."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from etils import epath

from anystep.programs.html_page import as_html, html_page
from anystep.train.demo.run_comparison import Comparison
from anystep.train.reports.step_log import StepRecord, read_step_log

_STYLE = """
.verdict { color: var(--text); padding: .6rem 1rem; border-left: .4rem solid; background: var(--shade);
  font-weight: 600 }
.same { border-color: #2a7d2a } .different { border-color: var(--bad) }
pre { background: var(--shade); padding: .6rem 1rem; white-space: pre-wrap; overflow-wrap: anywhere }
.facts td { text-align: left; white-space: normal; overflow-wrap: anywhere }
.axis { stroke: var(--line); fill: none } text { fill: var(--soft) }
.curve { fill: none; stroke-width: 2 } .undisturbed { stroke: var(--line); stroke-width: 7 }
.killed { stroke: var(--special); stroke-dasharray: 6 4 } .resumed { stroke: var(--bar) }
"""
# Of curves, in the order in which they are drawn.
_STYLES = ("undisturbed", "resumed", "killed")
_WIDTH, _HEIGHT = 860, 360
_LEFT, _RIGHT, _TOP, _BOTTOM = 48, 12, 10, 44
_LEGEND_WIDTH, _LEGEND_ROW_HEIGHT, _KEY_WIDTH = 180, 20, 28
_NUM_TICKS = 5


def write_report(
  path: epath.PathLike,
  *,
  comparison: Comparison,
  undisturbed: epath.PathLike,
  interrupted: epath.PathLike,
  facts: Mapping[str, object],
  examples: Sequence[Mapping[str, str]],
) -> None:
  """Writes the page.

  Args:
    path: the HTML file.
    comparison: of the two runs.
    undisturbed, interrupted: their model directories, for the loss curves.
    facts: rows of a table, name to value.
    examples: texts by name, one mapping for each example.
  """
  state = "same" if comparison.identical else "different"
  rows = "".join(f"<tr><td>{as_html(name)}<td>{as_html(value)}" for name, value in facts.items())
  texts = "".join(
    "".join(f"<p>{as_html(name)}<pre>{as_html(text)}</pre>" for name, text in example.items()) + "<hr>"
    for example in examples
  )
  body = f"""<p class="verdict {state}">{as_html(comparison.verdict)}</p>
<h2>Losses</h2>{loss_plot(read_step_log(undisturbed), read_step_log(interrupted))}
<table class="facts">{rows}</table>
<h2>Examples from a batch of this run</h2>{texts}"""
  page = html_page("One run undisturbed, one killed and resumed", body, style=_STYLE)
  epath.Path(path).write_text(page, encoding="utf-8")


def loss_plot(
  undisturbed: Sequence[Sequence[StepRecord]], interrupted: Sequence[Sequence[StepRecord]]
) -> str:
  """Return the losses of both runs by step as SVG, with one curve for each start of a run.

  Args:
    undisturbed, interrupted: records of each start, as `read_step_log` returns them.
  """
  curves = [_Curve("undisturbed", "undisturbed", records) for records in undisturbed]
  for start, records in enumerate(interrupted):
    if start == 0:
      curves.append(_Curve("killed", "until it was killed", records))
    elif records:
      curves.append(_Curve("resumed", f"resumed from {records[0].step}", records))
  step_axis = _Axis.fit([x for curve in curves for x, _ in curve.points], start=_LEFT, stop=_WIDTH - _RIGHT)
  loss_axis = _Axis.fit([y for curve in curves for _, y in curve.points], start=_HEIGHT - _BOTTOM, stop=_TOP)
  # Later starts first: the dashes of the killed one stay visible over the steps that were taken twice.
  drawn = sorted(curves, key=lambda curve: _STYLES.index(curve.style))
  parts = [_axes(step_axis, loss_axis), *(curve.draw(step_axis, loss_axis) for curve in drawn)]
  parts += [_legend_row(row, curve) for row, curve in enumerate(curves)]
  return (
    f'<svg role="img" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}">'
    f"<title>loss by step</title>{''.join(parts)}</svg>"
  )


class _Curve:
  """One start of a run: its style, its name in the legend, and (step, loss) of each step."""

  def __init__(self, style: str, label: str, records: Sequence[StepRecord]):
    self.style = style
    self.label = label
    # A loss that is no number has no place in the plot.
    self.points = [(record.step, record.loss) for record in records if math.isfinite(record.loss)]

  def draw(self, step_axis: _Axis, loss_axis: _Axis) -> str:
    """Return the curve as an SVG element."""
    points = " ".join(f"{step_axis.locate(x):.1f},{loss_axis.locate(y):.1f}" for x, y in self.points)
    return f'<polyline class="curve {self.style}" points="{points}"/>'


@dataclasses.dataclass(frozen=True)
class _Axis:
  """A range of values and the pixels that show it: `first` stands at `start`, `last` at `stop`."""

  first: float
  last: float
  tick_step: float
  start: float
  stop: float

  @classmethod
  def fit(cls, values: Sequence[float], *, start: float, stop: float) -> _Axis:
    """Return an axis that begins and ends at a tick and holds all values."""
    smallest, largest = min(values, default=0), max(values, default=0)
    rough = (largest - smallest) / _NUM_TICKS or 1
    power = 10.0 ** math.floor(math.log10(rough))
    tick_step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    first, last = math.floor(smallest / tick_step), math.ceil(largest / tick_step)
    return cls(first * tick_step, max(last, first + 1) * tick_step, tick_step, start, stop)

  def locate(self, value: float) -> float:
    """Return the pixel of a value."""
    return self.start + (value - self.first) / (self.last - self.first) * (self.stop - self.start)

  def list_ticks(self) -> list[float]:
    """Return the values that are written beside the axis."""
    return [
      self.first + k * self.tick_step for k in range(round((self.last - self.first) / self.tick_step) + 1)
    ]


def _axes(step_axis: _Axis, loss_axis: _Axis) -> str:
  bottom, left = loss_axis.start, step_axis.start
  parts = [f'<path class="axis" d="M{left},{loss_axis.stop}V{bottom}H{step_axis.stop}"/>']
  for value in step_axis.list_ticks():
    parts.append(
      f'<text x="{step_axis.locate(value):.1f}" y="{bottom + 16}" text-anchor="middle">{value:g}</text>'
    )
  for value in loss_axis.list_ticks():
    parts.append(
      f'<text x="{left - 6}" y="{loss_axis.locate(value) + 4:.1f}" text-anchor="end">{value:g}</text>'
    )
  middle, center = (left + step_axis.stop) / 2, (bottom + loss_axis.stop) / 2
  parts.append(f'<text x="{middle}" y="{_HEIGHT - 8}" text-anchor="middle">step</text>')
  rotated = f'x="14" y="{center}" text-anchor="middle" transform="rotate(-90 14 {center})"'
  parts.append(f"<text {rotated}>loss by target token</text>")
  return "".join(parts)


def _legend_row(row: int, curve: _Curve) -> str:
  x, y = _WIDTH - _RIGHT - _LEGEND_WIDTH, _TOP + 14 + row * _LEGEND_ROW_HEIGHT
  return (
    f'<line class="curve {curve.style}" x1="{x}" x2="{x + _KEY_WIDTH}" y1="{y - 4}" y2="{y - 4}"/>'
    f'<text x="{x + _KEY_WIDTH + 8}" y="{y}">{as_html(curve.label)}</text>'
  )
