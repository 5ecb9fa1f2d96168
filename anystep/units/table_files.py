"""Files of unit tables: every read is compared with checksums, and no file is mapped into memory."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Hashable, Iterator

import numpy as np
from etils import epath
from google_crc32c import value as checksum

from anystep.caches.manifest import FileEntry
from anystep.caches.read_pool import ReadPool
from anystep.containers.checked_file import PART_BYTES, part_checksums
from anystep.containers.file_ranges import unreadable
from anystep.errors import AnystepError, ExitCode, make_file_error
from anystep.files.input_files import open_file

REMAKE_DIRECTORY = "remove the directory: the table is made anew, identically, when it is needed"
_PART_WORDS = PART_BYTES // 4
# Up to so many parts are read in one piece, even if some in between are not wanted.
_MAX_SPAN_PARTS = 4
_PARTS_AT_A_TIME = 64


class UnitTableFile:
  """One shard's part of a unit table: an npy file of `uint32` words.

  Opening it reads the whole file once and compares it with its sha256. A checksum of every 64 KiB stays in
  memory, and every later read is compared with it; the pool holds the parts as long as it has room. So a file
  that is replaced, changed or cut afterwards is an error, never other units.

  Args:
    path: the file.
    file: its entry, from when it was written.
    num_words: number of its words.
    pool: holds parts of it. key: begins the pool's keys; no other object has it.
    content: the file's bytes, where they were read already; the pool holds them from now on.

  Raises:
    AnystepError: 65 `file_missing`, `file_changed`, `unit_table_invalid`; 74 `shard_unreadable`.
  """

  def __init__(
    self,
    path: epath.Path,
    file: FileEntry,
    *,
    num_words: int,
    pool: ReadPool,
    key: tuple[Hashable, ...],
    content: bytes | None = None,
  ):
    self._path = path
    self._pool = pool
    self._key = key
    sha256, checksums = hashlib.sha256(), []
    head = b""
    for piece in self._iterate_pieces(0) if content is None else [content]:
      head = head or piece[:PART_BYTES]
      sha256.update(piece)
      checksums += part_checksums(piece)
    if sha256.hexdigest() != file.sha256:
      raise self._changed(expected=file.sha256, got=sha256.hexdigest())
    self._checksums = np.array(checksums, np.uint32)
    header_bytes, form = _parse_header(head)
    if form != ((num_words,), np.dtype(np.uint32)):
      raise table_invalid(path, ValueError(f"{form}, not {num_words} uint32"))
    self._header_words = header_bytes // 4
    self._num_words = num_words
    for part, start in enumerate(range(0, len(content or b""), PART_BYTES)):
      self._hold(part, (content or b"")[start : start + PART_BYTES])

  def take(self, places: np.ndarray) -> np.ndarray:
    """Return the words at some places, `(places,) int64`."""
    if not places.size:
      return np.zeros(0, np.int64)
    words = places + self._header_words
    first, last = int(words.min()) // _PART_WORDS, int(words.max()) // _PART_WORDS
    if last - first < _MAX_SPAN_PARTS:
      part_words = [self._read_part(part) for part in range(first, last + 1)]
      within = words - first * _PART_WORDS
    else:
      parts, part_of = np.unique(words // _PART_WORDS, return_inverse=True)
      part_words = [self._read_part(part) for part in parts.tolist()]
      within = part_of * _PART_WORDS + words % _PART_WORDS
    return (part_words[0] if len(part_words) == 1 else np.concatenate(part_words))[within].astype(np.int64)

  def all(self, start: int, stop: int) -> np.ndarray:
    """The words of a range, `(words,) uint32`, read from the file and not held."""
    first_word, last_word = start + self._header_words, stop + self._header_words
    first = first_word // _PART_WORDS
    read, pieces, num_bytes = 0, [], (last_word - first * _PART_WORDS) * 4
    for content in self._iterate_pieces(first):
      self._check(content, first + read // PART_BYTES)
      pieces.append(content)
      read += len(content)
      if read >= num_bytes:
        break
    words = np.frombuffer(b"".join(pieces), "<u4")[first_word - first * _PART_WORDS :]
    if len(words) < stop - start:
      raise self._changed(expected=f"{self._num_words} words", got="fewer")
    return words[: stop - start]

  def _read_part(self, part: int) -> np.ndarray:
    key = (*self._key, part)
    words = self._pool.get(key)
    if words is None:
      content = next(self._iterate_pieces(part, parts_at_a_time=1), b"")
      self._check(content, part)
      words = self._hold(part, content)
    return words

  def _hold(self, part: int, content: bytes) -> np.ndarray:
    words = np.frombuffer(content, "<u4")
    self._pool.hold((*self._key, part), words, len(content))
    return words

  def _iterate_pieces(self, part: int, *, parts_at_a_time: int = _PARTS_AT_A_TIME) -> Iterator[bytes]:
    """Yield the file from a part on, some whole parts at a time."""
    try:
      with open_file(self._path) as file:
        file.seek(part * PART_BYTES)
        while content := file.read(parts_at_a_time * PART_BYTES):
          yield content
    except (FileNotFoundError, NotADirectoryError) as error:
      raise AnystepError(ExitCode.DATA, "file_missing", path=self._path, fix=REMAKE_DIRECTORY) from error
    except (ValueError, IsADirectoryError) as error:
      raise self._changed(expected="a regular file", got=str(error)) from error
    except OSError as error:
      raise unreadable(str(self._path), error) from error

  def _check(self, content: bytes, first_part: int) -> None:
    """Compare parts with the checksums from when the file was opened."""
    for k, start in enumerate(range(0, max(len(content), 1), PART_BYTES)):
      got = checksum(content[start : start + PART_BYTES])
      expected = int(self._checksums[first_part + k]) if first_part + k < len(self._checksums) else None
      if got != expected:
        raise self._changed(
          offset=(first_part + k) * PART_BYTES, expected=f"checksum {expected}", got=f"checksum {got}"
        )

  def _changed(self, **fields: object) -> AnystepError:
    return AnystepError(ExitCode.DATA, "file_changed", path=self._path, **fields, fix=REMAKE_DIRECTORY)


def table_invalid(path: epath.Path, error: Exception) -> AnystepError:
  """Return the error for a file that has its sha256, but is not a table's."""
  return make_file_error("unit_table_invalid", error, path=path, fix=REMAKE_DIRECTORY)


def _parse_header(head: bytes) -> tuple[int, object]:
  """Return the bytes of an npy file's header and (shape, dtype); instead of these, the text of an error."""
  file = io.BytesIO(head)
  try:
    np.lib.format.read_magic(file)
    shape, fortran_order, dtype = np.lib.format.read_array_header_1_0(file)
  except ValueError as error:
    return 0, str(error)
  return file.tell(), (shape, dtype) if not fortran_order else "columns first"
