"""Spills: records and token counts in compressed files, in the order they came or by the shards they go to.

A spill's file is two zstandard frames: the records one after the other, and a table of their sizes and
lengths. A sorted file has a frame for each shard of the cache: the table and the records of that
shard by index. The offsets of the frames stand at its end.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
from collections.abc import Iterable, Iterator, Sequence
from typing import IO, Any

import numpy as np
import zstandard
from etils import epath

from anystep.errors import AnystepError, ExitCode
from anystep.files import storage
from anystep.records.parsing_loops import gather_bytes

# Both kinds of files together take less than 1.5 times the cache, which itself is compressed at level 1 in
# small blocks: 1.73 times at level 1, 1.59 at 3, 1.53 at 5, 1.49 at 6 (words of a Zipf distribution).
_LEVEL = 6
# A file is sorted in memory: a spill that is larger goes on in another file.
FILE_BYTES = 1 << 27


@dataclasses.dataclass(frozen=True, eq=False)
class SpilledRecords:
  """Records in memory.

  Attributes:
    data: their bytes, one after the other.
    sizes: of each: `(records,) uint32`.
    lengths: token counts of each: `(records, features) uint32`.
  """

  data: np.ndarray
  sizes: np.ndarray
  lengths: np.ndarray

  def __len__(self) -> int:
    return len(self.sizes)

  def records(self) -> Iterator[bytes]:
    """Yield the records in order."""
    content, stops = self.data.tobytes(), np.cumsum(self.sizes, dtype=np.int64)
    for start, stop in zip((stops - self.sizes).tolist(), stops.tolist(), strict=True):
      yield content[start:stop]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpillFile:
  """A file of a spill.

  Attributes:
    name: in the job's directory.
    bytes: its size.
    frame_bytes: size of the first frame, that of records.
    records: their number.
    raw_bytes: their size in memory.
  """

  name: str
  bytes: int
  frame_bytes: int
  records: int
  raw_bytes: int

  @classmethod
  def of_row(cls, row: Sequence[Any]) -> SpillFile:
    """Return the file of a row that `dataclasses.astuple` made."""
    name, *numbers = row
    size, frame_bytes, records, raw_bytes = map(int, numbers)
    return cls(name=str(name), bytes=size, frame_bytes=frame_bytes, records=records, raw_bytes=raw_bytes)


class SpillWriter:
  """Writes a spill a batch at a time, into one or more files; `files` are the finished ones.

  Args:
    path: the first part of the files' names.
  """

  def __init__(self, path: epath.PathLike):
    self._path = path
    self._stack = contextlib.ExitStack()
    self._open: _OpenFile | None = None
    self.files: list[SpillFile] = []

  def add(self, records: SpilledRecords) -> None:
    """Add records at the end."""
    if self._open is None:
      path = storage.attempt_path(self._path)
      self._open = _OpenFile(path, self._stack.enter_context(storage.new_file(path)))
    self._open.add(records)
    if self._open.raw_bytes >= FILE_BYTES:
      self.finish()

  def finish(self) -> None:
    """Make the written records durable."""
    if self._open is not None:
      finished = self._open.finish()
      self._stack.close()
      self.files.append(finished)
      self._open = None

  def remove(self) -> None:
    """Remove the written files."""
    paths = [epath.Path(self._path).parent / file.name for file in self.files]
    if self._open is not None:
      paths.append(self._open.path)
      # A file that could not be written cannot be closed without an error either.
      with contextlib.suppress(OSError):
        self._stack.close()
    for path in paths:
      path.unlink(missing_ok=True)


class _OpenFile:
  def __init__(self, path: epath.Path, file: IO[bytes]):
    self.path = path
    self.raw_bytes = 0
    self._file = file
    self._frame = _make_compressor().stream_writer(file, closefd=False)
    self._tables: list[np.ndarray] = []

  def add(self, records: SpilledRecords) -> None:
    self._frame.write(records.data.data)
    self._tables.append(np.column_stack([records.sizes, records.lengths]).astype(np.uint32, copy=False))
    self.raw_bytes += records.data.nbytes

  def finish(self) -> SpillFile:
    self._frame.close()
    frame_bytes = self._file.tell()
    table = np.concatenate(self._tables)
    # Column by column, for sizes are like sizes.
    self._file.write(_make_compressor().compress(np.ascontiguousarray(table.T).tobytes()))
    return SpillFile(
      name=self.path.name,
      bytes=self._file.tell(),
      frame_bytes=frame_bytes,
      records=len(table),
      raw_bytes=self.raw_bytes,
    )


def count_spilled_bytes(parts: Iterable[SpilledRecords]) -> int:
  """Return the bytes of records in a spill's file."""
  file = _OpenFile(epath.Path(), io.BytesIO())
  for part in parts:
    file.add(part)
  return file.finish().bytes


def read_spill_file(directory: epath.PathLike, file: SpillFile, *, num_features: int) -> SpilledRecords:
  """Read a file that `SpillWriter` wrote.

  Raises:
    AnystepError: 65 `spill_corrupt`.
  """
  path = epath.Path(directory) / file.name
  content = path.read_bytes()
  table = _decompress(path, content[file.frame_bytes :])
  data = _decompress(path, content[: file.frame_bytes])
  return _parse_records(path, table, data, num_records=file.records, num_features=num_features)


class SortedWriter:
  """Writes the frames of a sorted file one after the other."""

  def __init__(self, file: IO[bytes]):
    self._file = file
    self._ends = [0]
    self._compressor = _make_compressor()

  def add(self, records: SpilledRecords, rows: np.ndarray) -> None:
    """Add the next shard's frame: these rows, in this order."""
    table = np.column_stack([records.sizes[rows], records.lengths[rows]])
    sizes = records.sizes[rows].astype(np.int64)
    stops = np.cumsum(records.sizes, dtype=np.int64)[rows]
    content = np.empty(table.nbytes + int(sizes.sum()), np.uint8)
    content[: table.nbytes] = np.ascontiguousarray(table.T).reshape(-1).view(np.uint8)
    gather_bytes(records.data, stops - sizes, stops, content[table.nbytes :])
    self._ends.append(self._ends[-1] + self._file.write(self._compressor.compress(content.data)))

  def close(self) -> None:
    """Write the offsets of the frames."""
    self._file.write(np.array(self._ends, np.uint64).tobytes())


def read_sorted_frame(
  path: epath.PathLike, shard: int, *, num_shards: int, num_records: int, num_features: int
) -> tuple[SpilledRecords, int]:
  """Read a shard's frame of a file that `SortedWriter` wrote; return its records and its size in bytes.

  Raises:
    AnystepError: 65 `spill_corrupt`.
  """
  with epath.Path(path).open("rb") as file:
    file.seek((shard - num_shards - 1) * 8, 2)
    begin, end = np.frombuffer(file.read(16), np.uint64).tolist()
    file.seek(begin)
    content = _decompress(path, file.read(end - begin))
  table_bytes = 4 * num_records * (1 + num_features)
  records = _parse_records(
    path, content[:table_bytes], content[table_bytes:], num_records=num_records, num_features=num_features
  )
  return records, end - begin


def _parse_records(
  path: epath.PathLike, table: np.ndarray, data: np.ndarray, *, num_records: int, num_features: int
) -> SpilledRecords:
  if table.nbytes != 4 * num_records * (1 + num_features):
    raise _make_corrupt_error(path, f"{num_records} records", f"a table of {table.nbytes} bytes")
  columns = table.view(np.uint32).reshape(1 + num_features, num_records)
  sizes = np.ascontiguousarray(columns[0])
  if int(sizes.sum(dtype=np.int64)) != len(data):
    raise _make_corrupt_error(path, f"records of {sizes.sum(dtype=np.int64)} bytes", f"{len(data)} bytes")
  return SpilledRecords(data, sizes, np.ascontiguousarray(columns[1:].T))


def _decompress(path: epath.PathLike, content: bytes) -> np.ndarray:
  try:
    return np.frombuffer(zstandard.ZstdDecompressor().decompressobj().decompress(content), np.uint8)
  except zstandard.ZstdError as error:
    raise _make_corrupt_error(path, "a zstandard frame that is whole", str(error)) from error


def _make_corrupt_error(path: epath.PathLike, expected: str, got: str) -> AnystepError:
  return AnystepError(
    ExitCode.DATA,
    "spill_corrupt",
    path=path,
    expected=expected,
    got=got,
    fix="check the disk, and run the same command again with --noresume",
  )


def _make_compressor() -> zstandard.ZstdCompressor:
  return zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True)
