"""The step log and what is concluded from it."""

import numpy as np
import pytest

from anystep.digest import batch_digest
from anystep.errors import AnystepError
from anystep.train.run_comparison import Comparison, compare_runs
from anystep.train.step_log import StepLog, StepRecord, read_step_log

_BATCH = {"tokens": np.arange(6, dtype=np.int32).reshape(2, 3)}


def test_each_start_of_a_run_has_a_log_of_its_own(tmp_path):
  for start_step in (0, 3):
    log = StepLog(tmp_path, start_step=start_step)
    log.write(start_step, _BATCH, 0.1)
    log.close()
  digest = batch_digest(_BATCH)
  assert read_step_log(tmp_path) == [[StepRecord(0, digest, 0.1)], [StepRecord(3, digest, 0.1)]]


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
