"""A page about two runs: their losses on one plot, and examples that they saw."""

from __future__ import annotations

import html
import io
from collections.abc import Mapping, Sequence

import matplotlib
from etils import epath

from anystep.train.demo.run_comparison import Comparison
from anystep.train.runs.step_log import StepRecord, read_step_log

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #222 }
body { max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.4rem } h2 { font-size: 1.1rem; margin-top: 2rem }
.verdict { padding: .6rem 1rem; border-left: .4rem solid; background: #f4f4f4; font-weight: 600 }
.same { border-color: #2a7d2a } .different { border-color: #b3261e }
pre { background: #f4f4f4; padding: .6rem 1rem; white-space: pre-wrap; overflow-wrap: anywhere }
table { border-collapse: collapse } td { padding: .1rem 1rem .1rem 0; overflow-wrap: anywhere }
svg { max-width: 100%; height: auto }
"""


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
    facts: shown as a table.
    examples: texts by name, each example a section.
  """
  state = "same" if comparison.identical else "different"
  rows = "".join(f"<tr><td>{_text(name)}<td>{_text(value)}" for name, value in facts.items())
  sections = "".join(
    "".join(f"<p>{_text(name)}<pre>{_text(text)}</pre>" for name, text in example.items()) + "<hr>"
    for example in examples
  )
  page = f"""<!doctype html><html lang="en"><meta charset="utf-8"><title>anystep demo</title>
<style>{_STYLE}</style>
<h1>One run undisturbed, one killed and resumed</h1>
<p class="verdict {state}">{_text(comparison.verdict)}</p>
<h2>Losses</h2>{loss_plot(read_step_log(undisturbed), read_step_log(interrupted))}
<table>{rows}</table>
<h2>Examples from a batch of this run</h2>{sections}
</html>
"""
  epath.Path(path).write_text(page, encoding="utf-8")


def loss_plot(
  undisturbed: Sequence[Sequence[StepRecord]], interrupted: Sequence[Sequence[StepRecord]]
) -> str:
  """Both runs' losses by step, as SVG: the interrupted one in a colour of its own for each start."""
  matplotlib.use("Agg")
  import matplotlib.pyplot as plt

  figure, axes = plt.subplots(figsize=(9, 4))
  for records in undisturbed:
    axes.plot(*_curve(records), color="#bbbbbb", linewidth=6, label="undisturbed")
  for number, records in enumerate(interrupted):
    label = "until it was killed" if number == 0 else f"resumed from {records[0].step}"
    axes.plot(*_curve(records), linewidth=1.5, label=label, linestyle="-" if number else "--")
  axes.set(xlabel="step", ylabel="loss by target token")
  axes.legend(frameon=False)
  axes.spines[["top", "right"]].set_visible(False)
  svg = io.StringIO()
  figure.savefig(svg, format="svg", bbox_inches="tight")
  plt.close(figure)
  # What precedes the element is a prolog for files of their own.
  return svg.getvalue()[svg.getvalue().index("<svg") :]


def _curve(records: Sequence[StepRecord]) -> tuple[list[int], list[float]]:
  return [record.step for record in records], [record.loss for record in records]


def _text(value: object) -> str:
  return html.escape(str(value))
