"""Record files read and written in whole blocks."""

from __future__ import annotations

from collections.abc import Sequence

from array_record.python import array_record_module
from etils import epath

from anystep.errors import AnystepError, ExitCode

# The only container so far. Zstandard's fastest level: token ids shrink to a third at a cost below parsing's.
ARRAY_RECORD = "array_record"


def array_record_options(block_records: int) -> str:
  """What the writer of a cache's shards is told: a block is one chunk."""
  return f"group_size:{block_records},zstd:1"


def write_array_record(path: epath.PathLike, records: Sequence[bytes], *, options: str) -> None:
  """Writes a shard; its bytes depend on the records and options alone."""
  writer = array_record_module.ArrayRecordWriter(str(path), options)
  for record in records:
    writer.write(record)
  writer.close()


class ArrayRecordBlocks:
  """A shard's records by block.

  Args:
    path: the file.
    num_records: what the manifest says it holds.
    block_records: g.

  Raises:
    AnystepError: 65 `shard_corrupt` or `shard_records`.
  """

  def __init__(self, path: epath.PathLike, *, num_records: int, block_records: int):
    self._path = str(path)
    self._block_records = block_records
    self._num_records = num_records
    try:
      # Blocks are asked for one at a time: the reader's own read-ahead would only read what is not wanted.
      self._reader = array_record_module.ArrayRecordReader(
        self._path, options="readahead_buffer_size:0,max_parallelism:0"
      )
      found = self._reader.num_records()
    except (ValueError, RuntimeError) as error:
      raise _corrupt(self._path, error) from error
    if found != num_records:
      raise AnystepError(
        ExitCode.DATA,
        "shard_records",
        path=self._path,
        expected=num_records,
        got=found,
        fix="restore the file from where the cache was made, or cache the task again with --overwrite",
      )

  def read_block(self, block: int) -> list[bytes]:
    """Records [g·b, g·(b+1)) of the shard, fewer in its last block."""
    start = block * self._block_records
    stop = min(start + self._block_records, self._num_records)
    try:
      records = self._reader.read(start, stop)
    except (ValueError, RuntimeError, IndexError) as error:
      raise _corrupt(self._path, error) from error
    if len(records) != stop - start:
      raise _corrupt(self._path, f"{len(records)} records in place of {stop - start}")
    return records

  def close(self) -> None:
    """Closes the file."""
    self._reader.close()


def _corrupt(path: str, reason: object) -> AnystepError:
  return AnystepError(
    ExitCode.DATA,
    "shard_corrupt",
    path=path,
    got=str(reason),
    fix="restore the file from where the cache was made, or cache the task again with --overwrite",
  )
