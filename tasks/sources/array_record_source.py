"""A source over ArrayRecord files of `tf.train.Example` (https://github.com/google/array_record)."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from anystep.containers.array_record_library import open_reader
from anystep.errors import AnystepError, ExitCode, find_nearest
from anystep.records.arrow_columns import DECODED_ROWS
from anystep.tasks.sources.rows_source import (
  SHARD_ROWS,
  FilesSource,
  check_shard_rows,
  make_no_rows_error,
  name_shards,
  parse_shard,
  with_shapes,
)

# Records that are looked at to find out what they hold.
_SAMPLED_RECORDS = 256
_DTYPES = {"bytes_list": tf.string, "float_list": tf.float32, "int64_list": tf.int64}


class ArrayRecordDataSource(FilesSource):
  """The records of ArrayRecord files, in their order: what `seqio.TFExampleDataSource` makes of TFRecords.

  A shard is a file, or a range of `shard_rows` records of a larger one.

  Args:
    split_to_filepattern: by split a pattern of files, or several.
    feature_description: as `tf.io.parse_example` takes it; None to find it out from the first 256 records
      of the first file that has some: a feature that has one value in each of them is a number or a text,
      any other a sequence.
    columns: features that are read; None for all.
    shard_rows: how many records of a larger file a shard has; None for whole files.
    num_input_examples: records by split, where they are known; else the files tell.

  Raises:
    AnystepError: when shards are listed or a dataset is built: 66 `files_missing`, `files_empty` where no
      file has a record; 65 `file_container`, `file_rows` where records are no examples; 78 `column_missing`.
  """

  def __init__(
    self,
    split_to_filepattern: Mapping[str, str | Iterable[str]],
    feature_description: Mapping[str, Any] | None = None,
    *,
    columns: Sequence[str] | None = None,
    shard_rows: int | None = SHARD_ROWS,
    num_input_examples: Mapping[str, int] | None = None,
  ):
    check_shard_rows(shard_rows)
    self._given_description = feature_description
    self._columns = None if columns is None else sorted({columns} if isinstance(columns, str) else columns)
    self._shard_rows = shard_rows
    self._description = functools.cache(self._find_description)
    super().__init__(split_to_filepattern, num_input_examples=num_input_examples)

  @property
  def feature_description(self) -> Mapping[str, Any]:
    """The `features` argument of `tf.io.parse_example`."""
    return self._description()

  def num_input_examples(self, split: str) -> int | None:
    """Number of records of a split."""
    num_given = super().num_input_examples(split)
    return sum(map(_count_records, self.list_files(split))) if num_given is None else num_given

  def find_shards(self, split: str) -> Sequence[str]:
    _ = self.feature_description
    return [name for path in self.list_files(split) for name in self._cut_file(path)]

  def described(self) -> dict[str, Any]:
    kinds = {name: repr(kind) for name, kind in sorted((self._given_description or {}).items())}
    options = {"columns": self._columns, "shard_rows": self._shard_rows, "feature_description": kinds}
    return {**super().described(), **options}

  @tf.autograph.experimental.do_not_convert
  def read_shard(self, shard: tf.Tensor) -> tf.data.Dataset:
    description = self.feature_description
    records = tf.data.Dataset.from_generator(
      _read_batches, output_signature=tf.TensorSpec([None], tf.string), args=[shard]
    )
    parsed = records.prefetch(1).map(functools.partial(tf.io.parse_example, features=description)).unbatch()
    ragged = [name for name, kind in description.items() if isinstance(kind, tf.io.RaggedFeature)]
    return with_shapes(parsed, {name: [None] for name in ragged if not description[name].partitions})

  def _cut_file(self, path: str) -> list[str]:
    records = _count_records(path)
    if self._shard_rows is None:
      return [path]
    groups = np.full(-(-records // self._shard_rows), self._shard_rows)
    groups[-1:] -= groups.sum() - records
    return name_shards(path, groups, self._shard_rows)

  def _find_description(self) -> Mapping[str, Any]:
    first = next(self.all_files())
    if self._given_description is not None:
      description = dict(self._given_description)
    else:
      sampled = next((path for path in self.all_files() if _count_records(path)), None)
      if sampled is None:
        raise make_no_rows_error(first)
      first, description = sampled, _infer_description(sampled)
    for name in self._columns or ():
      if name not in description:
        raise AnystepError(
          ExitCode.CONFIG,
          "column_missing",
          path=first,
          feature=name,
          expected=f"a feature among {', '.join(sorted(description))}",
          got="none of this name",
          fix=f"name one of the features that records have, such as {find_nearest(name, description)}",
        )
    columns = sorted(description) if self._columns is None else self._columns
    return {name: description[name] for name in columns}


def _infer_description(path: str) -> dict[str, Any]:
  """Features of the first records of a file."""
  kinds: dict[str, str] = {}
  counts: dict[str, set[int]] = {}
  with _open_file(path) as reader:
    records = reader.read(0, min(reader.num_records(), _SAMPLED_RECORDS))
  for place, record in enumerate(records):
    try:
      example = tf.train.Example.FromString(record)
    except Exception as error:
      raise _make_rows_error(path, place, str(error)) from error
    for name, feature in example.features.feature.items():
      # A feature that was not there before is one that had no values.
      value_counts = counts.setdefault(name, {0} if place else set())
      kind = feature.WhichOneof("kind")
      if kind is None:
        value_counts.add(0)
        continue
      if kinds.setdefault(name, kind) != kind:
        raise _make_rows_error(path, place, f"{name} is a {kind} here, and a {kinds[name]} before")
      value_counts.add(len(getattr(feature, kind).value))
    for name in counts.keys() - example.features.feature.keys():
      counts[name].add(0)
  return {name: _choose_form(_DTYPES[kind], counts[name]) for name, kind in kinds.items()}


def _choose_form(dtype: tf.DType, counts: set[int]) -> Any:
  if counts == {1}:
    return tf.io.FixedLenFeature([], dtype)
  return tf.io.RaggedFeature(dtype, row_splits_dtype=tf.int64)


def _read_batches(shard: bytes) -> Iterator[np.ndarray]:
  path, rows = parse_shard(shard.decode())
  with _open_file(path) as reader:
    start, stop = rows or (0, reader.num_records())
    for first in range(start, stop, DECODED_ROWS):
      yield np.array(reader.read(first, min(first + DECODED_ROWS, stop)), object)


def _count_records(path: str) -> int:
  with _open_file(path) as reader:
    return reader.num_records()


@contextlib.contextmanager
def _open_file(path: str) -> Iterator[Any]:
  reader = open_reader(path)
  # A reader of another file says so when it is asked, and raises where it is closed.
  if not reader.ok():
    raise AnystepError(
      ExitCode.DATA,
      "file_container",
      path=path,
      expected="an ArrayRecord file, and all of it",
      got="something else",
      fix="fetch or write the file anew",
    )
  try:
    yield reader
  finally:
    reader.close()


def _make_rows_error(path: str, place: int, got: str) -> AnystepError:
  return AnystepError(
    ExitCode.DATA,
    "file_rows",
    path=path,
    row=place,
    expected="a tf.train.Example whose features are of the same kinds as before",
    got=got,
    fix="write the file anew, or read it with a seqio.FileDataSource of your own",
  )
