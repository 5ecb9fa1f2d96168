"""Identity of a run: a random name in its MODEL_DIR and in each of its checkpoints, and its first step."""

from __future__ import annotations

import dataclasses
import re
import sys
import uuid
from typing import TYPE_CHECKING

from etils import epath

from anystep.errors import AnystepError, ExitCode, one_line
from anystep.files import storage
from anystep.files.json_files import MALFORMED, canonical_json, read_json
from anystep.files.names import RUN
from anystep.train.configuration.resume_contract import AcceptedChanges, Change, find_run_change

if TYPE_CHECKING:
  from anystep.train.checkpoints.checkpoints import Checkpoint

_VERSION = 1
_NAME = re.compile(r"[0-9a-f]{32}\Z")


def new_run() -> str:
  """Return a name that no other run has."""
  return uuid.uuid4().hex


def read_run(model_dir: epath.PathLike) -> str | None:
  """Return the name of a directory's run; None if no named run has begun there.

  Raises:
    AnystepError: 65 `run_invalid`.
  """
  path = epath.Path(model_dir) / RUN
  try:
    document = read_json(path)
    if document["version"] == _VERSION and _NAME.match(document["run"]):
      return document["run"]
    reason = "unexpected version or run"
  except FileNotFoundError:
    return None
  except (*MALFORMED, IsADirectoryError) as error:
    reason = one_line(error)
  raise AnystepError(
    ExitCode.DATA,
    "run_invalid",
    path=path,
    got=reason,
    fix="restore the file from a copy, or remove it and accept the newest checkpoint as the error then says",
  )


def write_run(model_dir: epath.PathLike, run: str, *, first_step: int = 0) -> None:
  """Give a directory its run's name, which it keeps, and the step that the run began at."""
  directory = epath.Path(model_dir)
  directory.mkdir(parents=True, exist_ok=True)
  document = {"version": _VERSION, "run": run, "first_step": first_step}
  storage.put(directory / RUN, (canonical_json(document, indent=1) + "\n").encode())


def accept_run(
  checkpoint: Checkpoint | None, run: str | None, run_name: str, accepted: AcceptedChanges
) -> list[Change]:
  """Refuse a checkpoint of another run; return the change if it is accepted for the first time.

  Args:
    checkpoint: the newest one.
    run: name of the directory's run; None if it has none yet.
    run_name: `run`, or the new name that the directory gets.
    accepted: changes accepted now and before.

  Raises:
    AnystepError: 76 `checkpoint_run`.
  """
  if checkpoint is None:
    return []
  if checkpoint.run is None:
    print(
      f"checkpoint_{checkpoint.step} is of an earlier anystep and says neither which run wrote it nor what it"
      " was trained with: it is taken for this run's, trained with this configuration",
      file=sys.stderr,
    )
    return []
  changes = accepted.require(
    find_run_change(checkpoint.step, checkpoint.run, run),
    kind="checkpoint_run",
    expected=f"a checkpoint of this directory's run, {run or 'which no run.json names'}",
    fix="where it was copied here, move it away; where run.json is lost, put it back",
  )
  return [dataclasses.replace(change, now=[run_name]) for change in changes]
