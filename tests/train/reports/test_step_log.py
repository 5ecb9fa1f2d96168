"""The step log and what is concluded from it."""

import os

import numpy as np
import pytest

from anystep.errors import AnystepError
from anystep.features.digest import batch_digest
from anystep.train.demo.run_comparison import Comparison, compare_runs
from anystep.train.reports.step_log import StepLog, StepRecord, read_step_log

_BATCH = {"tokens": np.arange(6, dtype=np.int32).reshape(2, 3)}


def test_each_start_of_a_run_has_a_log_of_its_own(tmp_path):
  for start_step in (0, 3):
    log = StepLog(tmp_path, start_step=start_step)
    log.write(start_step, _BATCH, 0.1)
    log.close()
  digest = batch_digest(_BATCH)
  assert read_step_log(tmp_path) == [[StepRecord(0, digest, 0.1, 0)], [StepRecord(3, digest, 0.1, 3)]]


def test_a_loss_comes_back_to_the_bit(tmp_path):
  loss = float(np.float32(1) / np.float32(3))
  log = StepLog(tmp_path, start_step=0)
  log.write(0, _BATCH, loss)
  assert read_step_log(tmp_path)[0][0].loss == loss


def test_a_line_that_a_kill_cut_short_is_left_out(tmp_path):
  log = StepLog(tmp_path, start_step=0)
  log.write(0, _BATCH, 1.0)
  log.write(1, _BATCH, 2.0)
  (path,) = (tmp_path / "step_log").iterdir()
  content = path.read_bytes()
  for length in range(len(content)):
    path.write_bytes(content[:length])
    assert [record.step for record in read_step_log(tmp_path)[0]] == list(
      range(content[:length].count(b"\n"))
    )


def test_runs_without_a_log_are_not_compared(tmp_path):
  with pytest.raises(AnystepError) as refused:
    compare_runs(tmp_path, tmp_path)
  assert (refused.value.code, refused.value.kind) == (66, "run_incomplete")


@pytest.mark.parametrize(
  ("change", "identical", "said"),
  [
    ({}, True, "3/3 batches identical, losses identical, parameters identical"),
    ({"identical_batches": 2}, False, "2/3 batches identical"),
    ({"identical_losses": 2}, False, "losses DIFFERENT"),
    ({"parameters": ("a", "b")}, False, "parameters DIFFERENT"),
  ],
)
def test_the_verdict_says_what_differs(change, identical, said):
  same = {"identical_batches": 3, "identical_losses": 3, "parameters": ("a", "a")}
  comparison = Comparison(total_steps=3, killed_at=2, resumed_from=1, **(same | change))
  assert comparison.identical is identical
  assert comparison.verdict.startswith("killed at step 2, resumed from 1: ")
  assert said in comparison.verdict


@pytest.mark.parametrize("loss", [float("nan"), float("inf"), -0.0])
def test_a_loss_that_is_no_number_comes_back_and_is_the_same_as_itself(loss, tmp_path):
  logged = StepLog(tmp_path, start_step=0)
  logged.write(0, _BATCH, loss)
  logged.close()
  assert read_step_log(tmp_path)[0][0].loss.hex() == loss.hex()


LINE = b'{"step": 0, "digest": "d", "loss": 1.0}\n'


@pytest.mark.parametrize(
  ("content", "line"),
  [
    (LINE + LINE.replace(b"digest", b"dig\xe5st"), 2),
    (LINE.replace(b"{", b"") + LINE, 1),
    (LINE + LINE.replace(b"digest", b"digist"), 2),
    (LINE.replace(b"0,", b"-1,"), 1),
    (LINE.replace(b"0,", b"0.0,"), 1),
    (LINE.replace(b'"d"', b"7"), 1),
    (LINE.replace(b"1.0", b"true"), 1),
    (LINE + b"[" * 1000 + b"\n", 2),
    (LINE + b"x" * 10_000, 2),
    (LINE + b"\n", 2),
    (LINE + b"7\n", 2),
  ],
)
def test_a_line_that_no_run_writes_is_refused_by_its_number(content, line, tmp_path):
  (tmp_path / "step_log").mkdir()
  path = tmp_path / "step_log" / "start-00000-from-000000000-process-00000.jsonl"
  path.write_bytes(LINE)
  assert read_step_log(tmp_path) == [[StepRecord(0, "d", 1.0, 0)]]
  path.write_bytes(content)
  with pytest.raises(AnystepError) as refused:
    read_step_log(tmp_path)
  assert (refused.value.code, refused.value.kind) == (65, "step_log_invalid")
  assert (refused.value.fields["path"], refused.value.fields["line"]) == (path, line)


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo], ids=["directory", "fifo"])
def test_a_log_that_is_no_file_is_refused(make, tmp_path):
  (tmp_path / "step_log").mkdir()
  make(tmp_path / "step_log" / "start-00000-from-000000000-process-00000.jsonl")
  with pytest.raises(AnystepError) as refused:
    read_step_log(tmp_path)
  assert (refused.value.code, refused.value.kind) == (65, "step_log_invalid")
