"""The page about two runs."""

import math
import re
from xml.etree import ElementTree

import numpy as np
import pytest

from anystep.train.demo.report import loss_plot, write_report
from anystep.train.demo.run_comparison import Comparison
from anystep.train.reports.step_log import StepLog, StepRecord


def points_of(svg):
  """The places of each curve, in pixels."""
  curves = re.findall(r'<polyline class="curve (\w+)" points="([^"]*)"', svg)
  return [
    (style, [tuple(map(float, place.split(","))) for place in places.split()]) for style, places in curves
  ]


def test_the_plot_has_a_curve_for_each_start():
  records = [StepRecord(step, "", 3.0 - step, step) for step in range(3)]
  svg = loss_plot([records], [records[:2], records[1:]])
  curves = dict(points_of(svg))
  assert curves["undisturbed"] == curves["killed"] + curves["resumed"][1:], (
    "equal losses stand at equal places"
  )
  assert curves["undisturbed"] == sorted(curves["undisturbed"]), "steps go to the right, falling losses down"
  assert "resumed from 1" in svg


@pytest.mark.parametrize(
  "losses", [[], [2.0], [5.0, 5.0], [math.nan, 1.0, math.inf], [1e-3, 1e6], [-1.0, 3.0]]
)
def test_every_curve_stands_within_the_plot(losses):
  records = [StepRecord(step, "", loss, step) for step, loss in enumerate(losses)]
  svg = loss_plot([records], [records])
  width, height = map(int, re.search(r'viewBox="0 0 (\d+) (\d+)"', svg).groups())
  for _, places in points_of(svg):
    assert len(places) == sum(map(math.isfinite, losses))
    assert all(0 <= x <= width and 0 <= y <= height for x, y in places)
  ElementTree.fromstring(svg)


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
