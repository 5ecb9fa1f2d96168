"""Metrics go to every writer, and JSON lines are read back as they were written."""

import json
import sys
import types

import pytest

from anystep.errors import AnystepError
from anystep.train.reports import metric_writers
from anystep.train.reports.metric_writers import JsonLinesWriter, MetricWriters, WandbWriter, read_metrics


def test_lines_of_all_starts_are_read_in_order(tmp_path):
  for start in range(3):
    with MetricWriters([JsonLinesWriter], tmp_path) as writers:
      writers.write(start, "train", {"loss": 0.5 * start})
      writers.write(start, "eval_validation/demo", {"accuracy": float("nan")})
  records = list(read_metrics(tmp_path))
  assert [(record["step"], record["group"]) for record in records] == [
    (start, group) for start in range(3) for group in ("train", "eval_validation/demo")
  ]
  assert [record["values"]["loss"] for record in records[::2]] == [0.0, 0.5, 1.0]
  assert all(record["values"]["accuracy"] != record["values"]["accuracy"] for record in records[1::2])
  assert list(read_metrics(tmp_path / "none")) == []
  # What is left of earlier starts is never written over.
  (tmp_path / "metrics" / "start-00000.jsonl").unlink()
  with MetricWriters([JsonLinesWriter], tmp_path) as writers:
    writers.write(9, "train", {"loss": 1.0})
  assert [record["step"] for record in read_metrics(tmp_path)] == [1, 1, 2, 2, 9]


def test_a_line_that_a_kill_cut_short_is_left_out_and_a_damaged_one_is_named(tmp_path):
  with MetricWriters([JsonLinesWriter], tmp_path) as writers:
    writers.write(1, "train", {"loss": 1.0})
  path = tmp_path / "metrics" / "start-00000.jsonl"
  whole = path.read_text()
  path.write_text(whole + whole[:-5])
  assert [record["step"] for record in read_metrics(tmp_path)] == [1]
  path.write_text(whole + "[}\n")
  with pytest.raises(AnystepError) as refused:
    list(read_metrics(tmp_path))
  assert (refused.value.code, refused.value.kind) == (65, "metrics_invalid")
  assert refused.value.fields["line"] == 2


def test_weights_and_biases_gets_all_groups_as_one_run(tmp_path, monkeypatch):
  calls = []
  run = types.SimpleNamespace(
    log=lambda values, step: calls.append((step, values)), finish=lambda: calls.append("finished")
  )
  package = types.SimpleNamespace(init=lambda **options: calls.append(options) or run)
  monkeypatch.setitem(sys.modules, "wandb", package)
  with MetricWriters(
    [lambda model_dir: WandbWriter(model_dir, "demo", mode="offline")], tmp_path / "runs" / "7"
  ) as writers:
    writers.write(5, "train", {"loss": 2.0})
  options = {"project": "demo", "name": "7", "id": "7", "resume": "allow", "mode": "offline"}
  assert calls == [options | {"dir": str(tmp_path / "runs" / "7")}, (5, {"train/loss": 2.0}), "finished"]


def test_a_package_that_is_not_installed_is_named(tmp_path, monkeypatch):
  monkeypatch.setitem(sys.modules, "wandb", None)
  closed = []
  first = types.SimpleNamespace(close=lambda: closed.append(True))
  with pytest.raises(AnystepError) as refused:
    MetricWriters([lambda _: first, lambda path: WandbWriter(path, "demo")], tmp_path)
  assert (refused.value.code, refused.value.kind) == (78, "package_missing")
  assert closed == [True]


def test_numbers_are_finite_json_or_named_as_python_names_them(tmp_path):
  with MetricWriters([metric_writers.JsonLinesWriter], tmp_path) as writers:
    writers.write(1, "train", {"loss": 1e300})
  line = (tmp_path / "metrics" / "start-00000.jsonl").read_text()
  assert json.loads(line)["values"] == {"loss": 1e300}
