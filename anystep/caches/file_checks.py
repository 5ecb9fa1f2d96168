"""Checks of a cache's files against its manifest: names, sizes, stamps and hashes."""

from __future__ import annotations

import contextlib
import hashlib
import io
import re
from collections.abc import Collection, Container, Iterator, Mapping

import numpy as np
from etils import epath

from anystep.caches.manifest import FileEntry
from anystep.containers.file_ranges import RESTORE, FileStamp
from anystep.errors import AnystepError, ExitCode
from anystep.files.input_files import open_file
from anystep.files.os_failures import os_failure


def read_content(path: epath.Path, sha256: str, *, num_bytes: int = -1) -> bytes:
  """Return the first bytes of a file, or all of them, which must have that sha256.

  Raises:
    AnystepError: 65 `file_changed`, `file_missing`.
  """
  with _file_errors(path), open_file(path) as file:
    content = file.read(num_bytes)
  _check_sha256(path, sha256, hashlib.sha256(content).hexdigest())
  return content


def read_array(
  path: epath.Path, sha256: str, *, kind: str, dtype: np.dtype, shape: tuple[int, ...]
) -> np.ndarray:
  """Return the array of an npy file, which must have that sha256, dtype and shape.

  Raises:
    AnystepError: 65 `file_changed`, `file_missing`; 65 of the given kind for another dtype or shape.
  """
  content = read_content(path, sha256)
  try:
    array = np.load(io.BytesIO(content), allow_pickle=False)
    form: object = (array.dtype, array.shape)
  except ValueError as error:
    form = str(error)
  if form != (dtype, shape):
    raise AnystepError(ExitCode.DATA, kind, path=path, expected=(dtype, shape), got=form, fix=RESTORE)
  return array


def check_content(path: epath.Path, sha256: str) -> None:
  """Compare the sha256 of a whole file, reading it in pieces.

  Raises:
    AnystepError: 65 `file_changed`, `file_missing`.
  """
  with _file_errors(path), open_file(path) as file:
    file_sha256 = hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]
  _check_sha256(path, sha256, file_sha256)


def stamp_file(path: epath.Path) -> FileStamp:
  """Return the stamp of a file.

  Raises:
    AnystepError: 65 `file_changed`, `file_missing`.
  """
  with _file_errors(path):
    return FileStamp.at(path)


def check_sizes(
  entries: Mapping[epath.Path, FileEntry], listed: Container[epath.Path]
) -> dict[str, FileStamp]:
  """Compare the sizes of files with a manifest.

  Args:
    entries: the manifest's, by path.
    listed: the paths in their directories.

  Returns:
    The files' stamps, by their names in the manifest.

  Raises:
    AnystepError: 65 `file_missing`, `file_size`.
  """
  stamps = {}
  for path, entry in entries.items():
    if path not in listed:
      raise AnystepError(ExitCode.DATA, "file_missing", path=path, fix=RESTORE)
    stamp = stamp_file(path)
    if stamp.size_bytes != entry.bytes:
      raise AnystepError(
        ExitCode.DATA, "file_size", path=path, expected=entry.bytes, got=stamp.size_bytes, fix=RESTORE
      )
    stamps[entry.name] = stamp
  return stamps


def check_foreign(
  paths: Collection[epath.Path], listed: Collection[epath.Path], pattern: re.Pattern[str]
) -> None:
  """Refuse files that look like a split's, but are not in its manifest.

  Args:
    paths: of the manifest's files.
    listed: the paths in the task's directory.
    pattern: matches the names of the split's shards.

  Raises:
    AnystepError: 65 `file_foreign`.
  """
  foreign = sorted((path.name, path) for path in listed if path not in paths and pattern.match(path.name))
  if foreign:
    raise AnystepError(
      ExitCode.DATA,
      "file_foreign",
      path=foreign[0][1],
      expected="only the files that the manifest lists",
      got=f"{len(foreign)} more",
      fix="move files that are not of this cache out of its directory",
    )


def list_directory(directory: epath.Path) -> list[epath.Path]:
  """Return the paths in a directory; none where there is no such directory."""
  try:
    return list(directory.iterdir())
  except (FileNotFoundError, NotADirectoryError):
    return []
  except OSError as error:
    raise os_failure(error) from error


def file_changing(path: epath.Path) -> AnystepError:
  """Return the error for a file that changes while it is read."""
  return AnystepError(
    ExitCode.DATA,
    "file_changed",
    path=path,
    expected="a file that stays as it is while it is read",
    got="one that is being written to, or replaced",
    fix=RESTORE,
  )


@contextlib.contextmanager
def _file_errors(path: epath.Path) -> Iterator[None]:
  """Turn errors of a file that disappeared, or became something else, into AnystepError."""
  try:
    yield
  except (FileNotFoundError, NotADirectoryError) as error:
    raise AnystepError(ExitCode.DATA, "file_missing", path=path, fix=RESTORE) from error
  except (ValueError, IsADirectoryError) as error:
    raise AnystepError(
      ExitCode.DATA, "file_changed", path=path, expected="a file", got=error, fix=RESTORE
    ) from error
  except OSError as error:
    raise os_failure(error) from error


def _check_sha256(path: epath.Path, expected: str, got: str) -> None:
  if got != expected:
    raise AnystepError(ExitCode.DATA, "file_changed", path=path, expected=expected, got=got, fix=RESTORE)
