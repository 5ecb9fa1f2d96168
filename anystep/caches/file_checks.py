"""Checks of a cache's files against its manifest: names, sizes, stamps and hashes."""

from __future__ import annotations

import contextlib
import hashlib
import io
import re
from collections.abc import Collection, Iterator, Mapping

import numpy as np
from etils import epath

from anystep.caches.entries import FileEntry
from anystep.containers.file_ranges import RESTORE, FileStamp
from anystep.errors import AnystepError, ExitCode
from anystep.files.input_files import open_file
from anystep.files.os_failures import os_failure
from anystep.stores import objects as store_objects
from anystep.stores.addresses import is_remote, parse_address


def read_content(path: epath.Path, sha256: str, *, num_bytes: int = -1) -> bytes:
  """Return the first bytes of a file, or all of them, which must have that sha256.

  Raises:
    AnystepError: 65 `file_changed`, `file_missing`.
  """
  with _file_errors(path), open_file(path) as file:
    content = file.read(num_bytes)
  check_sha256(path, sha256, hashlib.sha256(content).hexdigest())
  return content


def read_array(
  path: epath.Path,
  sha256: str,
  *,
  kind: str,
  dtype: np.dtype,
  shape: tuple[int, ...],
  content: bytes | None = None,
) -> np.ndarray:
  """Return the array of an npy file, which must have that sha256, dtype and shape.

  Args:
    path: the file.
    sha256: of its content.
    kind: the error's kind for another dtype or shape.
    dtype: the array's.
    shape: the array's.
    content: what was read of the file already; read again where it has another sha256.

  Raises:
    AnystepError: 65 `file_changed`, `file_missing`; 65 of the given kind for another dtype or shape.
  """
  if content is None or hashlib.sha256(content).hexdigest() != sha256:
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
  check_sha256(path, sha256, file_sha256)


def stamp_file(path: epath.Path) -> FileStamp:
  """Return the stamp of a file.

  Raises:
    AnystepError: 65 `file_changed`, `file_missing`.
  """
  with _file_errors(path):
    return FileStamp.at(path)


def check_sizes(
  entries: Mapping[epath.Path, FileEntry], listed: Mapping[epath.Path, FileStamp | None]
) -> dict[str, FileStamp]:
  """Compare the sizes of files with a manifest.

  Args:
    entries: the manifest's, by path.
    listed: the paths in their directories, as `list_directory` returns them.

  Returns:
    The files' stamps, by their names in the manifest.

  Raises:
    AnystepError: 65 `file_missing`, `file_size`.
  """
  stamps = {}
  for path, entry in entries.items():
    if path not in listed and not is_remote(path):
      raise AnystepError(ExitCode.DATA, "file_missing", path=path, fix=RESTORE)
    stamp = listed.get(path)
    if stamp is None or stamp.size_bytes != entry.bytes:
      # What a store's listing says or lacks may be old: the file itself decides.
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
  # A store's listing may be old.
  foreign = [(name, path) for name, path in foreign if not is_remote(path) or path.exists()]
  if foreign:
    raise AnystepError(
      ExitCode.DATA,
      "file_foreign",
      path=foreign[0][1],
      expected="only the files that the manifest lists",
      got=f"{len(foreign)} more",
      fix="move files that are not of this cache out of its directory",
    )


def list_directory(directory: epath.Path) -> dict[epath.Path, FileStamp | None]:
  """Return the paths in a directory, none where there is none; on a store with the objects' stamps."""
  try:
    if not is_remote(directory):
      return dict.fromkeys(directory.iterdir())
    objects = store_objects.list_directory(parse_address(directory)).objects
    return {directory / name: FileStamp.of_object(status) for name, status in objects.items()}
  except (FileNotFoundError, NotADirectoryError):
    return {}
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


def check_sha256(path: epath.Path, expected: str, got: str) -> None:
  """Raise 65 `file_changed` where a file's sha256 is not the expected one."""
  if got != expected:
    raise AnystepError(ExitCode.DATA, "file_changed", path=path, expected=expected, got=got, fix=RESTORE)
