"""The page about two runs."""

import numpy as np

from anystep.train.demo.report import loss_plot, write_report
from anystep.train.demo.run_comparison import Comparison
from anystep.train.runs.step_log import StepLog, StepRecord


def test_the_plot_has_a_curve_for_each_start():
  records = [StepRecord(step, "", 3.0 - step) for step in range(3)]
  svg = loss_plot([records], [records[:2], records[1:]])
  assert svg.startswith("<svg")
  assert svg.count('id="line2d') >= 3
  assert "resumed from 1" in svg


def test_the_page_shows_verdict_curves_and_examples_and_escapes_them(tmp_path):
  for name in ("one", "two"):
    log = StepLog(tmp_path / name, start_step=0)
    log.write(0, {"tokens": np.zeros((1, 1))}, 1.0)
    log.close()
  comparison = Comparison(
    total_steps=1, killed_at=1, resumed_from=0, identical_batches=1, identical_losses=0, parameters=("a", "a")
  )
  write_report(
    tmp_path / "report.html",
    comparison=comparison,
    undisturbed=tmp_path / "one",
    interrupted=tmp_path / "two",
    facts={"steps": 1},
    examples=[{"Inputs": "if a <b: <0>"}],
  )
  page = (tmp_path / "report.html").read_text()
  assert 'class="verdict different"' in page
  assert comparison.verdict in page
  assert "if a &lt;b: &lt;0&gt;" in page
  assert "<svg" in page
