"""A source over Hugging Face `datasets` (https://huggingface.co/docs/datasets)."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

import numpy as np
import seqio
import tensorflow as tf
from etils import epath

from anystep.errors import AnystepError, ExitCode, find_nearest, make_package_error, one_line
from anystep.features.feature import Feature
from anystep.features.ragged import Batch
from anystep.records.arrow_columns import (
  DECODED_ROWS,
  check_same_columns,
  column_features,
  columns_of,
  small_batches,
)
from anystep.tasks.sources.rows_source import (
  SHARD_ROWS,
  check_shard_rows,
  make_rows_dataset,
  make_shards_dataset,
  name_shards,
  parse_shard,
)

# What `save_to_disk` writes beside the data.
_SAVED = ("dataset_dict.json", "state.json")


class HuggingFaceDataSource(seqio.DataSource):
  """A dataset of the Hugging Face hub, of files that `datasets` reads, or of `save_to_disk`.

  A column is a feature, a list a sequence, a text bytes, a class its number. A shard is a range of rows, or
  when streaming one of the dataset's own shards, which is usually a file. Nothing is loaded before somebody
  asks for splits, shards or examples.

  Args:
    path: a directory of `save_to_disk`, or what `datasets.load_dataset` takes: a name on the hub, a directory
      of files, or a format such as "json".
    splits: names, or by a split's name what `datasets` is asked for, as `{"train": "train[:95%]"}`; None for
      all, as the dataset names them.
    columns: those that are read; None for all.
    name: which configuration of the dataset.
    data_files: as `datasets.load_dataset` takes them.
    revision: of a dataset on the hub; without one, its examples may change.
    streaming: whether rows are read where they are, in place of being downloaded and converted first.
    shard_rows: about how many rows a shard has where they can be found; None for one shard.

  Raises:
    AnystepError: when it is loaded: 66 `dataset_missing`; 78 `package_missing`, `column_missing`,
      `feature_form`; 64 `split_unknown`. While rows are read, as `RowsSource`.
  """

  def __init__(
    self,
    path: str,
    *,
    splits: Sequence[str] | Mapping[str, str] | None = None,
    columns: Sequence[str] | None = None,
    name: str | None = None,
    data_files: Any = None,
    revision: str | None = None,
    streaming: bool = False,
    shard_rows: int | None = SHARD_ROWS,
  ):
    check_shard_rows(shard_rows)
    self._path = str(path)
    self._columns = None if columns is None else sorted({columns} if isinstance(columns, str) else columns)
    self._options = {"name": name, "data_files": data_files, "revision": revision}
    self._streaming = streaming
    self._shard_rows = shard_rows
    self._named_splits = dict(splits) if isinstance(splits, Mapping) else splits and {s: s for s in splits}
    self._load = functools.cache(self._load_split)
    self._all_splits = functools.cache(self._find_splits)
    self._features = functools.cache(self._find_features)
    super().__init__(splits=())

  @property
  def splits(self) -> Sequence[str]:
    return tuple(self._named_splits or self._all_splits())

  @property
  def supports_arbitrary_sharding(self) -> bool:
    return False

  def list_shards(self, split: str) -> list[str]:
    """Names of the shards: the split's, with a range of rows or a number where it has several."""
    dataset = self._load(split)
    self._features(split)
    if self._streaming:
      return [f"{split}-{k:05d}-of-{dataset.num_shards:05d}" for k in range(dataset.num_shards)]
    size = len(dataset)
    rows = max(min(self._shard_rows or size, size), 1)
    groups = np.diff([*range(0, size, rows), size])
    return name_shards(split, groups, self._shard_rows)

  def num_input_examples(self, split: str) -> int | None:
    """Number of rows of a split; None when streaming, where it is not known."""
    return None if self._streaming else len(self._load(split))

  def get_dataset(
    self, split="train", shuffle=True, seed=None, shard_info=None, **unused: Any
  ) -> tf.data.Dataset:
    """See `seqio.DataSource.get_dataset`."""
    del unused
    read = self.reader(split)
    shards = self.list_shards(split)
    return make_shards_dataset(shards, read, shuffle=shuffle, seed=seed, shard_info=shard_info)

  def reader(self, split: str) -> Callable[[tf.Tensor], tf.data.Dataset]:
    """Return a function from the name of a split's shard to its dataset."""
    batches, features = functools.partial(self._shard_batches, split), self._features(split)

    # A graph made of Python's code would hide whose errors they are.
    @tf.autograph.experimental.do_not_convert
    def read(shard: tf.Tensor) -> tf.data.Dataset:
      return make_rows_dataset(batches, shard, features=features)

    return read

  def described(self) -> dict[str, Any]:
    """Description of the data that is read, for a cache's provenance, without the files' location."""
    local = epath.Path(self._path).exists()
    options = {name: self._options[name] for name in ("name", "revision")}
    facts = {"columns": self._columns, "streaming": self._streaming, "shard_rows": self._shard_rows}
    splits = {
      split: {"asked": self._find_dataset_split(split), **self._measure_split(split)} for split in self.splits
    }
    path = epath.Path(self._path).name if local else self._path
    return {"path": path, **options, **facts, "splits": splits}

  def _measure_split(self, split: str) -> dict[str, int]:
    """Size of the data, if it is known: it shows that data of one name changed."""
    if self._streaming:
      return {}
    dataset = self._load(split)
    return {"examples": len(dataset), "bytes": dataset.data.nbytes}

  def _shard_batches(self, split: str, shard: str, features: Mapping[str, Feature]) -> Iterator[Batch]:
    dataset, start = self._load(split), 0
    if self._streaming:
      number, _, of = shard.rpartition("-of-")
      dataset = dataset.shard(num_shards=int(of), index=int(number.rpartition("-")[2]))
    else:
      rows = parse_shard(shard)[1]
      start, stop = rows or (0, len(dataset))
      dataset = dataset.select(range(start, stop))
    for table in dataset.with_format("arrow").iter(DECODED_ROWS):
      check_same_columns(shard, column_features(table.schema, shard, list(features)), expected=features)
      for batch in small_batches(table):
        yield columns_of(batch, features, f"{self._path}, {split}", rows=range(start, start + len(batch)))
        start += len(batch)

  def _find_features(self, split: str) -> dict[str, Feature]:
    dataset = self._load(split)
    schema = dataset.features and dataset.features.arrow_schema
    if schema is None:
      with _report_failures(self._path):
        schema = next(iter(dataset.with_format("arrow").iter(DECODED_ROWS))).schema
    return column_features(schema, f"{self._path}, {split}", self._columns)

  def _find_splits(self) -> tuple[str, ...]:
    if is_saved_dataset(self._path):
      from_disk = self._read_from_disk()
      return tuple(from_disk) if isinstance(from_disk, dict) else ("train",)
    package = huggingface_datasets()
    with _report_failures(self._path):
      names = package.get_dataset_split_names(
        self._path, self._options["name"], **self._select_options("data_files", "revision")
      )
    return tuple(names)

  def _load_split(self, split: str) -> Any:
    requested_split = self._find_dataset_split(split)
    if is_saved_dataset(self._path):
      from_disk = self._read_from_disk()
      dataset = from_disk.get(requested_split) if isinstance(from_disk, dict) else from_disk
      if dataset is None or split not in self.splits:
        raise self._make_split_error(split, tuple(from_disk) if isinstance(from_disk, dict) else ("train",))
      return self._select_columns(dataset)
    if self._named_splits is None and split not in self.splits:
      raise self._make_split_error(split, self.splits)
    package = huggingface_datasets()
    options = self._select_options("name", "data_files", "revision")
    with _report_failures(self._path):
      return self._select_columns(
        package.load_dataset(self._path, split=requested_split, streaming=self._streaming, **options)
      )

  def _find_dataset_split(self, split: str) -> str:
    """Name of a split in `datasets`, or of the split that it is made from."""
    return (self._named_splits or {}).get(split, split)

  def _select_columns(self, dataset: Any) -> Any:
    """The dataset without columns that nobody reads, where it has all that are read."""
    if self._columns is None or not set(self._columns) <= set(dataset.column_names or ()):
      return dataset
    return dataset.select_columns(self._columns)

  def _select_options(self, *names: str) -> dict[str, Any]:
    return {name: self._options[name] for name in names if self._options[name] is not None}

  def _read_from_disk(self) -> Any:
    package = huggingface_datasets()
    with _report_failures(self._path):
      dataset = package.load_from_disk(self._path)
    if self._streaming:
      splits = dataset.items() if isinstance(dataset, dict) else [("train", dataset)]
      streams = {split: d.to_iterable_dataset(max(len(d.cache_files), 1)) for split, d in splits}
      return streams if isinstance(dataset, dict) else streams["train"]
    return dataset

  def _make_split_error(self, split: str, known: Sequence[str]) -> AnystepError:
    return AnystepError(
      ExitCode.USAGE,
      "split_unknown",
      path=self._path,
      expected=f"one of {', '.join(known)}",
      got=split,
      fix=f"name a split that the dataset has, such as {find_nearest(split, known)}",
    )


def is_saved_dataset(path: str) -> bool:
  """Return whether `save_to_disk` wrote a directory."""
  return any((epath.Path(path) / name).exists() for name in _SAVED)


def huggingface_datasets() -> ModuleType:
  """The package `datasets`, imported for those alone who use it.

  Raises:
    AnystepError: 78 `package_missing`.
  """
  try:
    import datasets
  except ModuleNotFoundError as error:
    raise make_package_error(
      error, expected="Hugging Face datasets", package="'anystep[huggingface]'"
    ) from error
  return datasets


@contextlib.contextmanager
def _report_failures(path: str) -> Iterator[None]:
  """Tells what `datasets` could not load."""
  try:
    yield
  # Its own errors and those of a format's library have no common class, and some hide what was wrong.
  except Exception as error:
    cause = error.__cause__ or error
    raise AnystepError(
      ExitCode.NO_INPUT,
      "dataset_missing",
      path=path,
      expected="a dataset that can be loaded: a directory of save_to_disk, of files, or a name on the hub",
      got="no rows" if isinstance(cause, StopIteration) else one_line(cause),
      fix="correct the path or name, or see to the network; what was downloaded loads with HF_HUB_OFFLINE=1",
    ) from error
