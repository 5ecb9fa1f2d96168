"""Sources over files: Parquet, Arrow, JSON lines, CSV, and plain text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from anystep.errors import AnystepError, ExitCode
from anystep.features.feature import Feature
from anystep.records.parquet_rows import open_parquet
from anystep.stores.local_copies import fetch
from anystep.stores.store_path import is_usable
from anystep.tasks.sources.arrow_rows import ArrowRows, CsvRows, JsonRows, column_type, find_compression
from anystep.tasks.sources.rows_source import FileRows, FilesSource, RowsSource

Patterns = Mapping[str, str | Iterable[str]]


class ParquetDataSource(RowsSource):
  """The rows of Parquet files; see `RowsSource`. Row groups are what a large file is cut into.

  Columns are integers, bool, floats, texts, lists and fixed-size lists of these, and the same in every file
  of every split.
  """

  def open_rows(self, path: str, features: Mapping[str, Feature] | None = None) -> FileRows:
    return open_parquet(path, self._columns)


class ArrowDataSource(RowsSource):
  """The rows of Arrow's own files (feather) and streams; see `RowsSource`.

  Record batches are what a large file is cut into; a stream, as Hugging Face `datasets` writes them, is not.
  """

  def open_rows(self, path: str, features: Mapping[str, Feature] | None = None) -> FileRows:
    return ArrowRows(path, columns=self._columns)


class JsonLinesDataSource(RowsSource):
  """JSON lines, an object a line, compressed or not (.gz, .bz2, .zst, .lz4); see `RowsSource`.

  What columns there are, and of which types, is found out from the first 4 MiB of the first file that has
  rows, or said: a value of another type is refused with its file and row, and so is one that is missing.
  What looks like a date is a text.

  Args:
    split_to_filepattern: by split a pattern of files, or several.
    columns: those that are read; None for all, which every object has to have.
    types: of columns that are guessed wrongly, as `{"score": "float32"}`, by Arrow's names. One that is not
      there is refused as any other column.
    num_input_examples: rows by split, where they are known.
  """

  def __init__(
    self,
    split_to_filepattern: Patterns,
    columns: Sequence[str] | None = None,
    *,
    types: Mapping[str, Any] | None = None,
    num_input_examples: Mapping[str, int] | None = None,
  ):
    self._types = {name: column_type(name, kind) for name, kind in (types or {}).items()}
    # Their files have no ranges.
    super().__init__(split_to_filepattern, columns, shard_rows=None, num_input_examples=num_input_examples)

  def open_rows(self, path: str, features: Mapping[str, Feature] | None = None) -> FileRows:
    return JsonRows(path, columns=self._columns, types=self._types, features=features)

  def described(self) -> dict[str, Any]:
    return {**super().described(), "types": {name: str(kind) for name, kind in self._types.items()}}


class CsvDataSource(RowsSource):
  """Comma or tab separated values, compressed or not (.gz, .bz2, .zst, .lz4); see `RowsSource`.

  Types are found out from the first 16 MiB of the first file that has rows, or said, as of
  `JsonLinesDataSource`. An empty cell is an empty text, and where numbers are it is refused.

  Args:
    split_to_filepattern: by split a pattern of files, or several.
    columns: those that are read; None for all.
    column_names: of files whose first line is a row already; None where that line names the columns.
    delimiter: between values; None for a tab where files end in .tsv, else a comma.
    quoted: whether values may stand in double quotes, and then hold delimiters and line breaks; None for
      yes but where files end in .tsv, whose quotes are usually those of the text.
    types: of columns that are guessed wrongly, as `{"id": "string"}`, by Arrow's names.
    num_input_examples: rows by split, where they are known.
  """

  def __init__(
    self,
    split_to_filepattern: Patterns,
    columns: Sequence[str] | None = None,
    *,
    column_names: Sequence[str] | None = None,
    delimiter: str | None = None,
    quoted: bool | None = None,
    types: Mapping[str, Any] | None = None,
    num_input_examples: Mapping[str, int] | None = None,
  ):
    self._column_names = None if column_names is None else list(column_names)
    self._delimiter = delimiter
    self._quoted = quoted
    self._types = {name: column_type(name, kind) for name, kind in (types or {}).items()}
    super().__init__(split_to_filepattern, columns, shard_rows=None, num_input_examples=num_input_examples)

  def open_rows(self, path: str, features: Mapping[str, Feature] | None = None) -> FileRows:
    has_tabs = ".tsv" in path.rpartition("/")[2]
    return CsvRows(
      path,
      columns=self._columns,
      types=self._types,
      features=features,
      column_names=self._column_names,
      delimiter=self._delimiter or ("\t" if has_tabs else ","),
      quoted=not has_tabs if self._quoted is None else self._quoted,
    )

  def described(self) -> dict[str, Any]:
    options = {"column_names": self._column_names, "delimiter": self._delimiter, "quoted": self._quoted}
    types = {name: str(kind) for name, kind in self._types.items()}
    return {**super().described(), **options, "types": types}


class TextDataSource(FilesSource):
  """Plain text, a line an example, compressed with gzip or not: `{"text": line}`.

  A shard is a file. What a line is, `tf.data.TextLineDataset` decides.

  Args:
    split_to_filepattern: by split a pattern of files, or several.
    column: what the text is called.
    whole_files: whether an example is a file instead, as it is.
    num_input_examples: lines or files by split, where they are known.

  Raises:
    AnystepError: 66 `files_missing`; 78 `file_compression`, when shards are listed or a dataset is built.
  """

  def __init__(
    self,
    split_to_filepattern: Patterns,
    *,
    column: str = "text",
    whole_files: bool = False,
    num_input_examples: Mapping[str, int] | None = None,
  ):
    self._column = column
    self._whole_files = whole_files
    super().__init__(split_to_filepattern, num_input_examples=num_input_examples)

  def find_shards(self, split: str) -> Sequence[str]:
    files = self.list_files(split)
    for path in () if self._whole_files else files:
      if find_compression(path) not in ("", ".gz"):
        raise AnystepError(
          ExitCode.CONFIG,
          "file_compression",
          path=path,
          expected="lines of text, compressed with gzip or not",
          got=find_compression(path),
          fix="decompress the file, or compress it with gzip",
        )
    return files

  def read_shard(self, shard: tf.Tensor) -> tf.data.Dataset:
    if self._is_on_store():
      return tf.data.Dataset.from_tensors(shard).map(_fetch).flat_map(self._read_local)
    return self._read_local(shard)

  def _is_on_store(self) -> bool:
    patterns = self._split_to_filepattern.values()
    return any(is_usable(p) for some in patterns for p in ([some] if isinstance(some, str) else some))

  def _read_local(self, shard: tf.Tensor) -> tf.data.Dataset:
    if self._whole_files:
      return tf.data.Dataset.from_tensors(shard).map(lambda path: {self._column: tf.io.read_file(path)})
    is_packed = tf.strings.regex_full_match(shard, r"(?s).*\.gz(-\d+-of-\d+)?")
    lines = tf.data.TextLineDataset(shard, compression_type=tf.where(is_packed, "GZIP", ""))
    return lines.map(lambda line: {self._column: line})

  def described(self) -> dict[str, Any]:
    return {**super().described(), "whole_files": self._whole_files}


def _fetch(path: tf.Tensor) -> tf.Tensor:
  """A local copy of a store's file: TensorFlow does not read S3, and GCS only by credentials of its own."""
  local = tf.numpy_function(lambda name: fetch(name.decode()).encode(), [path], tf.string)
  local.set_shape([])
  return local
