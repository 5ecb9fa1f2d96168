"""Identity of a run: a random name in its MODEL_DIR and in each of its checkpoints."""

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


def write_run(model_dir: epath.PathLike, run: str) -> None:
  """Give a directory its run's name; it keeps this name."""
  directory = epath.Path(model_dir)
  directory.mkdir(parents=True, exist_ok=True)
  document = {"version": _VERSION, "run": run}
  storage.put(directory / RUN, (canonical_json(document, indent=1) + "\n").encode())
