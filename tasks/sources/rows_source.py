"""Sources over files of rows: what is read is cut into shards of whole files, or of ranges of their rows."""

from __future__ import annotations

import abc
import concurrent.futures
import functools
import glob
import itertools
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import seqio
import tensorflow as tf
from etils import epath

from anystep.errors import AnystepError, ExitCode, find_nearest
from anystep.features.feature import Feature
from anystep.features.ragged import Batch, Ragged
from anystep.files import storage
from anystep.records.arrow_columns import check_same_columns
from anystep.stores.store_path import is_usable, list_matches
from anystep.tasks.tensors import to_tensors

SHARD_ROWS = 1 << 20
# Footers that are read at a time.
_OPENED_FILES = 16
_RANGE = re.compile(r"(.*)#rows=(\d+):(\d+)\Z", re.DOTALL)


class FileRows(Protocol):
  """The rows of one file."""

  @property
  def features(self) -> Mapping[str, Feature]:
    """The columns by name, sorted; empty for a file that has no rows and whose format stores no types."""

  @property
  def group_rows(self) -> np.ndarray | None:
    """Rows of each group of them that can be read by itself, `(groups,) int64`.

    None where the file can only be read from its beginning.
    """

  def batches(self, groups: Iterable[int] | None = None) -> Iterator[Batch]:
    """All rows, or those of some groups, some at a time."""


class FilesSource(seqio.FileDataSource, abc.ABC):
  """A source over files, whose shards are files, or parts of them.

  Args:
    split_to_filepattern: by split a pattern of files, or several.
    num_input_examples: by split, where they are known.

  Raises:
    AnystepError: 66 `files_missing`, when shards are listed or a dataset is built.
  """

  def __init__(
    self,
    split_to_filepattern: Mapping[str, str | Iterable[str]],
    *,
    num_input_examples: Mapping[str, int] | None = None,
  ):
    # SeqIO asks again for every dataset.
    self._shards = functools.cache(self.find_shards)
    super().__init__(self.read_shard, split_to_filepattern, num_input_examples=num_input_examples)

  @abc.abstractmethod
  def read_shard(self, shard: tf.Tensor) -> tf.data.Dataset:
    """The examples of a shard, by its name."""

  def find_shards(self, split: str) -> Sequence[str]:
    """Names of the shards: files, where a source cuts none."""
    return self.list_files(split)

  def list_files(self, split: str) -> list[str]:
    """The files, in the order of the patterns and within one of their names.

    Raises:
      AnystepError: 66 `files_missing` where a pattern has none, or has a folder.
    """
    patterns = self._split_to_filepattern[split]
    files: list[str] = []
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
      find = list_matches if is_usable(pattern) else seqio.utils.list_files
      paths = find(str(pattern))
      if not paths or (not glob.has_magic(str(pattern)) and not epath.Path(pattern).exists()):
        raise _make_missing_error(split, str(pattern))
      for path in paths if not storage.is_remote(str(pattern)) else ():
        if os.path.isdir(path):
          raise _make_folder_error(split, str(pattern), path)
      files += paths
    return files

  def all_files(self) -> Iterator[str]:
    """The files of every split, by the splits' names."""
    return (path for split in sorted(self.splits) for path in self.list_files(split))

  def list_shards(self, split: str) -> list[str]:
    """Names of the shards: a file's path, or that with a range of rows."""
    return list(self._shards(split))

  def described(self) -> dict[str, Any]:
    """Description of the data that is read, for a cache's provenance, without the files' location."""
    return {"files": {split: [_describe_file(p) for p in self.list_files(split)] for split in self.splits}}


class RowsSource(FilesSource):
  """The rows of files, in their order: a column is a feature, a list a sequence, a text bytes.

  A shard is a file or, where the format lets rows be found, a range of the rows of a large one, of whole
  groups: `shard_rows` and what completes the last group. So which examples there are, and which shard has
  them, follows from the files and `shard_rows` alone.

  Args:
    split_to_filepattern: by split a pattern of files, or several.
    columns: those that are read; None for all.
    shard_rows: about how many rows of a larger file a shard has; None for whole files.
    num_input_examples: rows by split, where they are known.

  Raises:
    AnystepError: when shards are listed or a dataset is built: 66 `files_missing`, `files_empty` where a
      format keeps no types and no file has a row; 78 `column_missing`,
      `feature_form`, `package_missing`, `files_differ`; 65 `file_container`, `file_rows`. While rows are
      read, TensorFlow makes an error of its own of those that show only there, and of 65 `column_null`.
  """

  def __init__(
    self,
    split_to_filepattern: Mapping[str, str | Iterable[str]],
    columns: Sequence[str] | None = None,
    *,
    shard_rows: int | None = SHARD_ROWS,
    num_input_examples: Mapping[str, int] | None = None,
  ):
    check_shard_rows(shard_rows)
    self._columns = None if columns is None else sorted({columns} if isinstance(columns, str) else columns)
    self._shard_rows = shard_rows
    self._first_features = functools.cache(self._read_features)
    super().__init__(split_to_filepattern, num_input_examples=num_input_examples)

  @abc.abstractmethod
  def open_rows(self, path: str, features: Mapping[str, Feature] | None = None) -> FileRows:
    """Opens a file.

    Args:
      path: the file.
      features: what the first file has; None where it is that one.
    """

  @property
  def features(self) -> Mapping[str, Feature]:
    """Features of the rows, by name: those of the first file that says what types it has."""
    return self._first_features()

  def num_input_examples(self, split: str) -> int | None:
    """Number of rows of a split, if it was given or files state it without being read."""
    num_given = super().num_input_examples(split)
    if num_given is not None:
      return num_given
    total = 0
    for path in self.list_files(split):
      rows = self.open_rows(path, self.features).group_rows
      if rows is None:
        return None
      total += int(rows.sum())
    return total

  def described(self) -> dict[str, Any]:
    return {**super().described(), "columns": self._columns, "shard_rows": self._shard_rows}

  # A graph made of Python's code would hide whose errors they are.
  @tf.autograph.experimental.do_not_convert
  def read_shard(self, shard: tf.Tensor) -> tf.data.Dataset:
    return make_rows_dataset(self.shard_batches, shard, features=self.features)

  def shard_batches(self, shard: str, features: Mapping[str, Feature]) -> Iterator[Batch]:
    """The rows of a shard in batches, as numpy.

    Raises:
      AnystepError: 78 `files_differ`; as `open_rows`.
    """
    path, rows_range = parse_shard(shard)
    rows = self.open_rows(path, features)
    check_same_columns(path, rows.features, expected=features)
    if rows_range is None:
      return rows.batches()
    assert rows.group_rows is not None, "such shards are not listed"
    stops = np.cumsum(rows.group_rows)
    start, stop = np.searchsorted(stops, rows_range, side="right").tolist()
    return rows.batches(range(start, stop))

  def _read_features(self) -> Mapping[str, Feature]:
    for path in self.all_files():
      features = self.open_rows(path).features
      if features:
        return features
    raise make_no_rows_error(next(self.all_files()))

  def find_shards(self, split: str) -> Sequence[str]:
    files = self.list_files(split)
    features = self.features
    if self._shard_rows is None:
      return files
    with concurrent.futures.ThreadPoolExecutor(_OPENED_FILES) as pool:
      shards = pool.map(functools.partial(self._cut_file, features=features), files)
      return [name for names in shards for name in names]

  def _cut_file(self, path: str, features: Mapping[str, Feature]) -> list[str]:
    rows = self.open_rows(path, features)
    check_same_columns(path, rows.features, expected=features)
    return [path] if rows.group_rows is None else name_shards(path, rows.group_rows, self._shard_rows)


def make_rows_dataset(
  batches: Callable[[str, Mapping[str, Feature]], Iterator[Batch]],
  shard: tf.Tensor,
  *,
  features: Mapping[str, Feature],
) -> tf.data.Dataset:
  """Rows that Python reads in batches, one by one.

  Args:
    batches: gives them for a shard's name and the features.
    shard: its name.
    features: what each row has.
  """

  def tensors(name: bytes) -> Iterator[dict[str, tf.Tensor]]:
    for batch in batches(name.decode(), features):
      yield to_tensors({name: _make_dense(column, features[name]) for name, column in batch.items()})

  signature = {name: _make_spec(feature) for name, feature in features.items()}
  dataset = tf.data.Dataset.from_generator(tensors, output_signature=signature, args=[shard])
  rows = dataset.prefetch(1).unbatch()
  ragged = {name: feature.shape for name, feature in features.items() if None in feature.shape}
  return with_shapes(rows, ragged)


def with_shapes(dataset: tf.data.Dataset, shapes: Mapping[str, Sequence[int | None]]) -> tf.data.Dataset:
  """Says of rows of what was ragged that they are tensors, which TensorFlow does not."""
  # To map rows takes longer than to read them.
  if not shapes:
    return dataset
  return dataset.map(
    lambda row: {**row, **{name: tf.ensure_shape(row[name], shape) for name, shape in shapes.items()}}
  )


def make_shards_dataset(
  shards: Sequence[Any],
  read: Callable[..., tf.data.Dataset],
  *,
  shuffle: bool,
  seed: int | None,
  shard_info: seqio.ShardInfo | None,
) -> tf.data.Dataset:
  """The examples of shards as `seqio.FileDataSource` gives those of files.

  Args:
    shards: what is read of each: a name, or a tuple of things.
    read: makes a dataset of these, as tensors.
    shuffle, seed, shard_info: as `seqio.DataSource.get_dataset` takes them.
  """
  if shard_info is not None:
    if len(shards) < shard_info.num_shards:
      raise ValueError(f"{shard_info.num_shards} shards are asked for, and there are {len(shards)}")
    shards = shards[shard_info.index :: shard_info.num_shards]
  columns = tuple(map(list, zip(*shards, strict=True))) if isinstance(shards[0], tuple) else list(shards)
  dataset = tf.data.Dataset.from_tensor_slices(columns)
  if shuffle:
    dataset = dataset.shuffle(len(shards), seed=seed)
  return dataset.interleave(read, cycle_length=16, block_length=16, num_parallel_calls=tf.data.AUTOTUNE)


def name_shards(path: str, group_rows: np.ndarray, shard_rows: int | None) -> list[str]:
  """Names of a file's shards: whole groups of rows, as few as have `shard_rows` together.

  >>> name_shards("a.parquet", np.array([40, 40, 40]), 50)
  ['a.parquet#rows=0:80', 'a.parquet#rows=80:120']
  >>> name_shards("a.parquet", np.array([40, 40, 40]), 120)
  ['a.parquet']
  """
  stops = np.cumsum(group_rows).tolist()
  if shard_rows is None or not stops or stops[-1] <= shard_rows:
    return [path]
  bounds = [0]
  for stop in stops:
    if stop - bounds[-1] >= shard_rows or stop == stops[-1] > bounds[-1]:
      bounds.append(stop)
  return [f"{path}#rows={start}:{stop}" for start, stop in itertools.pairwise(bounds)]


def parse_shard(shard: str) -> tuple[str, tuple[int, int] | None]:
  """The file of a shard, and which rows of it; None for all.

  >>> parse_shard("a.parquet#rows=0:80")
  ('a.parquet', (0, 80))
  """
  match = _RANGE.match(shard)
  return (match[1], (int(match[2]), int(match[3]))) if match else (shard, None)


def check_shard_rows(shard_rows: int | None) -> None:
  """Refuses shards of no rows."""
  if shard_rows is not None and shard_rows < 1:
    raise ValueError(f"shard_rows is {shard_rows}, and has to be at least 1")


def _make_spec(feature: Feature) -> tf.TypeSpec:
  """TensorFlow's spec of some rows of a column."""
  dtype, shape = tf.as_dtype(feature.dtype), [None, *feature.shape]
  if None in feature.shape:
    return tf.RaggedTensorSpec(shape, dtype, ragged_rank=1)
  return tf.TensorSpec(shape, dtype)


def _make_dense(column: Ragged | np.ndarray, feature: Feature) -> Ragged | np.ndarray:
  """A column of lists that are all of one length as an array."""
  if not isinstance(column, Ragged) or None in feature.shape:
    return column
  return column.values.reshape(len(column), *feature.shape)


def _describe_file(path: str) -> list[Any]:
  return [os.path.basename(path), epath.Path(path).stat().length]


def make_no_rows_error(path: object) -> AnystepError:
  """The error where rows would have to say what columns there are, and there are none."""
  return AnystepError(
    ExitCode.NO_INPUT,
    "files_empty",
    path=path,
    expected="a row in one of the files, which says what columns there are and of which types",
    got="none",
    fix="put files there that have rows",
  )


def _make_folder_error(split: str, pattern: str, path: str) -> AnystepError:
  return AnystepError(
    ExitCode.NO_INPUT,
    "files_missing",
    split=split,
    path=pattern,
    expected="files alone",
    got=f"a folder, {path}",
    fix="name the files, such as data/*.jsonl; data/*/*.jsonl are those one folder below",
  )


def _make_missing_error(split: str, pattern: str) -> AnystepError:
  folder = epath.Path(os.path.dirname(pattern) or ".")
  file_names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else None
  got = (
    "no such folder"
    if file_names is None
    else f"{len(file_names)} others"
    if file_names
    else "an empty folder"
  )
  near = find_nearest(os.path.basename(pattern), file_names or ())
  return AnystepError(
    ExitCode.NO_INPUT,
    "files_missing",
    split=split,
    path=pattern,
    expected="a file, or several",
    got=f"{got}, such as {near}" if near else got,
    fix="correct the path, or put the files there; a path that is not absolute begins where the program runs",
  )
