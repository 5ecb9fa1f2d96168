"""Step log of a run: a digest of each step's batch, and its loss. Two runs are compared by it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
from etils import epath

from anystep.errors import make_file_error
from anystep.features.digest import batch_digest
from anystep.files.input_files import open_file
from anystep.files.json_files import MALFORMED, parse_json
from anystep.limits import is_count

_FOLDER = "step_log"
# A line has some 150 bytes.
_MAX_LINE_BYTES = 1 << 12
_INTEGER = re.compile(r"-?\d+\Z")


class StepRecord(NamedTuple):
  """Record of a step: the digest of its batch's arrays, and its loss per target token.

  `step` is the model's, `data_step` that of the run's data: another where the run began with a checkpoint.
  """

  step: int
  digest: str
  loss: float
  data_step: int


class StepLog:
  """Writer of a step log. Each start of a run has its own file, with one line for each step.

  Args:
    model_dir: the run's directory.
    start_step: first step of this start; part of the file's name.
    first_step: step that the run began at, with the first step of its data.
    process: number of this process; each process logs its own rows.
  """

  def __init__(self, model_dir: epath.PathLike, *, start_step: int, first_step: int = 0, process: int = 0):
    folder = epath.Path(model_dir) / _FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    self._first_step = first_step
    starts = len(list(folder.glob(f"start-*-process-{process:05d}.jsonl")))
    self._file = (folder / f"start-{starts:05d}-from-{start_step:09d}-process-{process:05d}.jsonl").open("w")

  def write(self, step: int, batch: Mapping[str, np.ndarray], loss: float) -> None:
    """Record a step, and flush the line to the operating system."""
    record = StepRecord(step, batch_digest(batch), loss, step - self._first_step)
    self._file.write(json.dumps(record._asdict()) + "\n")
    self._file.flush()

  def close(self) -> None:
    """Close the file."""
    self._file.close()


def read_step_log(model_dir: epath.PathLike, *, process: int = 0) -> list[list[StepRecord]]:
  """Return the records of a process, one list for each start of the run.

  A last line that a kill cut short is left out.

  Raises:
    AnystepError: 65 `step_log_invalid` if a line is not one that a run writes.
  """
  folder = epath.Path(model_dir) / _FOLDER
  return [list(_read(path)) for path in sorted(folder.glob(f"start-*-process-{process:05d}.jsonl"))]


def _read(path: epath.Path) -> Iterator[StepRecord]:
  number = 0
  try:
    with open_file(path) as file:
      while (line := file.readline(_MAX_LINE_BYTES)).endswith(b"\n"):
        number += 1
        yield _parse_record(line)
      if len(line) == _MAX_LINE_BYTES:
        number += 1
        raise ValueError(f"more than {_MAX_LINE_BYTES:,} bytes")
  except (*MALFORMED, IsADirectoryError, FileNotFoundError) as error:
    raise make_file_error(
      "step_log_invalid",
      error,
      path=path,
      line=number,
      expected="the step, digest and loss of a step in each line",
      fix="restore the file from a copy, or train anew in another MODEL_DIR",
    ) from error


def _parse_record(line: bytes) -> StepRecord:
  document = parse_json(line, number=_number)
  # Lines of earlier versions have one step.
  record = StepRecord(**({"data_step": document["step"]} | document))
  is_step = is_count(record.step) and is_count(record.data_step, most=record.step)
  if not (is_step and isinstance(record.digest, str) and isinstance(record.loss, float)):
    raise ValueError(f"unexpected step {record.step!r}, digest {record.digest!r} or loss {record.loss!r}")
  return record


def _number(text: str) -> int | float:
  """Parse a number; a loss may be NaN or infinite."""
  return int(text) if _INTEGER.match(text) else float(text)
