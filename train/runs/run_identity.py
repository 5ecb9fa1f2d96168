"""The run that a MODEL_DIR is of: a random name that each of its checkpoints carries."""

from __future__ import annotations

import re
import uuid

from etils import epath

from anystep.errors import AnystepError, ExitCode, one_line
from anystep.files import storage
from anystep.files.json_files import MALFORMED, canonical_json, read_json

RUN = "run.json"
_VERSION = 1
_NAME = re.compile(r"[0-9a-f]{32}\Z")


def new_run() -> str:
  """A name that no other run has."""
  return uuid.uuid4().hex


def read_run(model_dir: epath.PathLike) -> str | None:
  """The run that a directory is of; None where no run has begun there, or none that had a name.

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


def write_run(model_dir: epath.PathLike, run: str) -> None:
  """Makes a directory that of a run, which it stays."""
  directory = epath.Path(model_dir)
  directory.mkdir(parents=True, exist_ok=True)
  document = {"version": _VERSION, "run": run}
  storage.put(directory / RUN, (canonical_json(document, indent=1) + "\n").encode())
