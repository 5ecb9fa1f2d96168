"""Record of each start of a run: when, where, with what, how far, and how it ended."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import re
import socket
import sys
import time
from collections.abc import Iterator
from typing import Any

import jax
from etils import epath

from anystep.errors import AnystepError
from anystep.files import storage
from anystep.files.json_files import canonical_json

FOLDER = "runs"
_VERSION = 1
_NAME = re.compile(r"(\d{4,})\.json\Z")
_PACKAGES = ("anystep", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "seqio", "tensorflow", "numpy")


class Attempt:
  """A start of a run, in `runs/NNNN.json` of MODEL_DIR.

  Its document has `start_step` and `last_step`; the next one's `start_step` says how many of its steps were
  kept. Where `end` is null, the process still runs or was killed.

  Attributes:
    last_step: number of steps that the run has done until now.
  """

  def __init__(self, model_dir: epath.PathLike, *, start_step: int):
    folder = epath.Path(model_dir) / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    numbers = [int(match[1]) for path in folder.iterdir() if (match := _NAME.match(path.name))]
    self._path = folder / f"{max(numbers, default=-1) + 1:04d}.json"
    self.last_step = start_step
    self._document: dict[str, Any] = {
      "version": _VERSION,
      "start": _now(),
      "end": None,
      "exit_code": None,
      "error": None,
      "start_step": start_step,
      "last_step": None,
      "host": socket.gethostname(),
      "process_id": os.getpid(),
      "devices": [device.device_kind for device in jax.devices()],
      "python": platform.python_version(),
      "packages": {name: _version_of(name) for name in _PACKAGES},
      "command": sys.argv,
    }
    self._write()

  def end(self, exit_code: int, error: str | None) -> None:
    """Record how the attempt ended."""
    self._document |= {
      "end": _now(),
      "exit_code": exit_code,
      "error": error,
      "last_step": self.last_step,
    }
    self._write()

  def _write(self) -> None:
    storage.put(self._path, (canonical_json(self._document, indent=1) + "\n").encode())


@contextlib.contextmanager
def recorded_attempt(model_dir: epath.PathLike, *, start_step: int) -> Iterator[Attempt]:
  """Record an attempt: its start now, its end and how it ended when the body ends."""
  attempt = Attempt(model_dir, start_step=start_step)
  try:
    yield attempt
  except AnystepError as error:
    attempt.end(error.code, error.kind)
    raise
  except KeyboardInterrupt:
    attempt.end(130, "interrupted")
    raise
  except BaseException as error:
    attempt.end(1, type(error).__name__)
    raise
  attempt.end(0, None)


def _now() -> str:
  return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def _version_of(package: str) -> str | None:
  try:
    return importlib.metadata.version(package)
  except importlib.metadata.PackageNotFoundError:
    return None
