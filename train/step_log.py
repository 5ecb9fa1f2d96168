"""A run's record of what every step was given and what it lost: what two runs are compared by."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from etils import epath

from anystep.digest import batch_digest

_FOLDER = "step_log"


class StepRecord(NamedTuple):
  """One step: the digest of the arrays that it was given, and its loss per target token."""

  step: int
  digest: str
  loss: float


class StepLog:
  """Appends to one file of its own for each time that a run is started, a line a step.

  Args:
    model_dir: the run's directory.
    start_step: the step that this start begins with; names the file.
    process: this process's number; every process logs the rows that it holds.
  """

  def __init__(self, model_dir: epath.PathLike, *, start_step: int, process: int = 0):
    folder = epath.Path(model_dir) / _FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    starts = len(list(folder.glob(f"start-*-process-{process:05d}.jsonl")))
    self._file = (folder / f"start-{starts:05d}-from-{start_step:09d}-process-{process:05d}.jsonl").open("w")

  def write(self, step: int, batch: Mapping[str, np.ndarray], loss: float) -> None:
    """Records a step; the line is on its way to the disk when this returns."""
    record = StepRecord(step, batch_digest(batch), loss)
    self._file.write(json.dumps(record._asdict()) + "\n")
    self._file.flush()

  def close(self) -> None:
    """Closes the file."""
    self._file.close()


def read_step_log(model_dir: epath.PathLike, *, process: int = 0) -> list[list[StepRecord]]:
  """What a process logged, one list for each time that the run was started.

  A last line that a kill cut short is left out.
  """
  folder = epath.Path(model_dir) / _FOLDER
  starts = []
  for path in sorted(folder.glob(f"start-*-process-{process:05d}.jsonl")):
    complete = path.read_text().rpartition("\n")[0]
    starts.append([StepRecord(**json.loads(line)) for line in complete.splitlines()])
  return starts
