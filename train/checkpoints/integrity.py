"""Sizes and hashes of a checkpoint's files, recorded by the process that wrote them."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Mapping
from typing import Any

import google_crc32c
from etils import epath

from anystep.errors import AnystepError, ExitCode, one_line
from anystep.files import storage
from anystep.files.input_files import open_file, read_file
from anystep.files.json_files import MALFORMED, canonical_json, parse_json
from anystep.files.names import COMMIT_SUCCESS
from anystep.limits import MAX_JSON_BYTES, is_count

COMMITTED = COMMIT_SUCCESS
INTEGRITY = "integrity.json"
# A checkpoint has this file while it is written or removed.
UNFINISHED = "unfinished"
# One of arrays alone, which `anystep-convert` wrote, has this file.
CONVERTED = "converted.json"
# The values that decided a run's parameters.
TRAINED_WITH = "trained_with.json"
_VERSION = 2
# The hash of each version. Files of OCDBT end in their own CRC-32C, so the CRC-32C of any whole file is one
# constant and tells nothing.
_ALGORITHMS = {1: "crc32c", 2: "blake2b"}
# Files may be gigabytes large, so they are hashed in pieces.
_PIECE_BYTES = 1 << 22
_DIGEST_BYTES = 32
_FIX = "restore the file from a copy, or remove this checkpoint to resume from the one before it"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Integrity:
  """Record of a checkpoint's files by its writer.

  Attributes:
    algorithm: algorithm of the hashes.
    files: size and hash of each file, by its path in the checkpoint; see `fingerprint`.
    step: step of the checkpoint; None in version 1, which did not record it.
    run: name of the run that wrote it, see `run_identity`; None in version 1.
    first_step: step that the run began at, with the first step of its data; 0 but for runs that began with
      another checkpoint.
  """

  algorithm: str
  files: Mapping[str, Mapping[str, Any]]
  step: int | None
  run: str | None
  first_step: int = 0


def write_integrity(directory: epath.Path, *, step: int, run: str, first_step: int = 0) -> str:
  """Record all files of a checkpoint; return the text of the marker, a hash of the record."""
  files = {name: fingerprint(directory / name) for name in file_names(directory) if name != UNFINISHED}
  document = {"version": _VERSION, "step": step, "first_step": first_step, "run": run, "files": files}
  text = canonical_json(document, indent=1) + "\n"
  storage.put(directory / INTEGRITY, text.encode())
  return _sha256(text)


def read_integrity(directory: epath.Path) -> Integrity:
  """Read the record, and compare it with the marker.

  Raises:
    AnystepError: 65 `checkpoint_integrity`.
  """
  path = directory / INTEGRITY
  try:
    text = _read_text(path)
    if _read_text(directory / COMMITTED) == _sha256(text):
      return _parse(parse_json(text))
    reason = "not what the marker vouches for"
  except (*MALFORMED, FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
    reason = one_line(error)
  raise AnystepError(ExitCode.DATA, "checkpoint_integrity", path=path, got=reason, fix=_FIX)


def _read_text(path: epath.Path) -> str:
  return read_file(path, limit_bytes=MAX_JSON_BYTES).decode()


def _parse(document: dict[str, Any]) -> Integrity:
  algorithm, files = _ALGORITHMS[document["version"]], document["files"]
  if not all(noted.keys() == {"bytes", algorithm} for noted in files.values()):
    raise ValueError(f"expected of each file its bytes and {algorithm}")
  if document["version"] == 1:
    return Integrity(algorithm=algorithm, files=files, step=None, run=None)
  step, run, first_step = document["step"], document["run"], document.get("first_step", 0)
  if not is_count(step) or not is_count(first_step, most=step) or not isinstance(run, str):
    raise ValueError(f"unexpected step {step!r}, first step {first_step!r} or run {run!r}")
  return Integrity(algorithm=algorithm, files=files, step=step, run=run, first_step=first_step)


def check_files(directory: epath.Path, integrity: Integrity) -> None:
  """Compare every file with its writer's record.

  TensorStore does not notice a flipped bit, so sizes alone are not enough.

  Raises:
    AnystepError: 65 `checkpoint_file`.
  """
  for name, noted in integrity.files.items():
    path = directory / name
    current = fingerprint(path, algorithm=integrity.algorithm)
    if noted != current:
      raise AnystepError(
        ExitCode.DATA, "checkpoint_file", path=path, expected=dict(noted), got=current, fix=_FIX
      )


def fingerprint(path: epath.Path, *, algorithm: str = "blake2b") -> dict[str, Any]:
  """Size and hash of a file; None for both where there is none."""
  if not path.is_file():
    return {"bytes": None, algorithm: None}
  crc32c = algorithm == "crc32c"
  digest: Any = google_crc32c.Checksum() if crc32c else hashlib.blake2b(digest_size=_DIGEST_BYTES)
  size = 0
  try:
    with open_file(path) as file:
      while piece := file.read(_PIECE_BYTES):
        size += len(piece)
        digest.update(piece)
  except ValueError:
    # A FIFO or a device, whose end would not come.
    return {"bytes": None, algorithm: None}
  return {"bytes": size, algorithm: digest.digest().hex()}


def file_names(directory: epath.Path) -> list[str]:
  """All files below a directory, by their path in it."""
  names = []
  for path in sorted(directory.iterdir()):
    names += [f"{path.name}/{name}" for name in file_names(path)] if path.is_dir() else [path.name]
  return names


def flush_to_disk(directory: epath.PathLike) -> None:
  """Make a local file system write files and directory entries to the disk."""
  if not os.path.isdir(directory):
    return
  for folder, _, names in os.walk(directory):
    for path in [*(os.path.join(folder, name) for name in names), folder]:
      storage.sync(path)
  storage.sync(epath.Path(directory).parent)


def _sha256(text: str) -> str:
  return hashlib.sha256(text.encode()).hexdigest()
