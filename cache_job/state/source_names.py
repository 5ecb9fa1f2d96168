"""Names of a split's source shards, in a file, so that what travels to workers does not grow with them."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Iterator, Sequence
from typing import overload

from etils import epath

from anystep.errors import AnystepError, ExitCode, make_file_error
from anystep.files import storage
from anystep.files.json_files import MALFORMED, canonical_json, parse_json

_FILE = "source_shards.json"
_FIX = "run the job once with --noresume, which starts anew"


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredNames(Sequence[str]):
  """Names in a file of the job's directory, which is read when a name is asked for.

  Attributes:
    path: the file's.
    num_names: their number.
    sha256: of the file.
  """

  path: str
  num_names: int
  sha256: str

  def __len__(self) -> int:
    return self.num_names

  @overload
  def __getitem__(self, place: int) -> str: ...
  @overload
  def __getitem__(self, place: slice) -> tuple[str, ...]: ...
  def __getitem__(self, place: int | slice) -> str | tuple[str, ...]:
    return _read_names(self)[place]

  def __iter__(self) -> Iterator[str]:
    return iter(_read_names(self))


def describe_stored(directory: epath.PathLike, names: Sequence[str]) -> StoredNames:
  """Return the names as workers get them; `write_names` makes the file."""
  return StoredNames(
    path=str(epath.Path(directory) / _FILE),
    num_names=len(names),
    sha256=hashlib.sha256(_format_names(names)).hexdigest(),
  )


def write_names(directory: epath.PathLike, names: Sequence[str]) -> None:
  """Write the file of names; a job that goes on has it, for its directory is named by them."""
  path = epath.Path(directory) / _FILE
  if not path.exists():
    storage.put(path, _format_names(names))


def _format_names(names: Sequence[str]) -> bytes:
  return canonical_json(list(names)).encode()


@functools.lru_cache(maxsize=2)
def _read_names(stored: StoredNames) -> tuple[str, ...]:
  """Return the names; a process reads each file once.

  Raises:
    AnystepError: 65 `job_state_invalid`.
  """
  path = epath.Path(stored.path)
  content = path.read_bytes()
  sha256 = hashlib.sha256(content).hexdigest()
  if sha256 != stored.sha256:
    raise AnystepError(
      ExitCode.DATA, "job_state_invalid", path=path, expected=stored.sha256, got=sha256, fix=_FIX
    )
  try:
    return tuple(parse_json(content))
  except MALFORMED as error:
    raise make_file_error("job_state_invalid", error, path=path, expected="names", fix=_FIX) from error
