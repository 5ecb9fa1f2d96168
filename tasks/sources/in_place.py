"""Files of sources that can be trained from as they are."""

from __future__ import annotations

import seqio
import tensorflow as tf

from anystep.containers import containers
from anystep.tasks.sources.array_record_source import ArrayRecordDataSource
from anystep.tasks.sources.file_sources import ParquetDataSource
from anystep.tasks.sources.rows_source import FilesSource


def random_access(source: seqio.DataSource) -> bool:
  """Return whether training can read a source's files as they are (layout `as_is`); opens no file."""
  return _find_container(source) is not None


def files_as_is(source: seqio.DataSource) -> tuple[str, dict[str, list[str]]] | None:
  """The container and the files by split of a source that can be trained from as it is; None of others.

  Examples of the source are the files' records, one after the other. What else layout `as_is` asks of files
  (no nulls, nothing that records do not hold, TFRecords that are not compressed) shows when they are indexed.

  Returns:
    `array_record`, `tfrecord` or `parquet`, and paths in the order of the examples.

  Raises:
    AnystepError: 66 `files_missing`.
  """
  container = _find_container(source)
  if container is None:
    return None
  return container, {split: files_of(source, split) for split in source.splits}


def files_of(source: seqio.FileDataSource, split: str) -> list[str]:
  """The files of a split, in the order of the examples: where large ones are cut, its shards are not those.

  Raises:
    AnystepError: 66 `files_missing`, of sources of this package.
  """
  return list(source.list_files(split) if isinstance(source, FilesSource) else source.list_shards(split))


def _find_container(source: seqio.DataSource) -> str | None:
  if isinstance(source, ParquetDataSource):
    return containers.PARQUET
  if isinstance(source, ArrayRecordDataSource):
    return containers.ARRAY_RECORD
  # A reader of another class may read something else.
  if isinstance(source, seqio.TFExampleDataSource) and source.reader_cls is tf.data.TFRecordDataset:
    return containers.TFRECORD
  return None
