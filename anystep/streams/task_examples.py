"""Examples of rows: read, parsed in batches, transformed task by task, and put in the order of rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from anystep.caches.cache import Cache
from anystep.errors import AnystepError, ExitCode
from anystep.features.feature import Feature
from anystep.features.ragged import Batch, Ragged, as_sequences
from anystep.order.packing import PackingPolicy
from anystep.plans.plan import BatchRows, Plan
from anystep.plans.tombstones import NEVER
from anystep.records.parsing import ExampleParser
from anystep.streams.gathering import UnitRecords
from anystep.streams.record_reader import FetchAhead, RecordReader, StepUnits
from anystep.transforms.transform import REMAKE_TABLE, Records, Transform


class TaskExamples:
  """Examples of the tasks of a plan.

  A mixture's examples have the features that all its tasks have, with one dtype and shape. As with SeqIO,
  other features are left out.

  Args:
    plan: on its caches.
    caches: by task name.
    transforms: by task name.
    shards_touched: see `RecordReader`.

  Raises:
    AnystepError: 78 `mixture_features`.
  """

  def __init__(
    self,
    plan: Plan,
    caches: Mapping[str, Cache],
    transforms: Mapping[str, Transform],
    *,
    shards_touched: Mapping[str, int],
  ):
    self._plan = plan
    self._names = plan.task_names
    self._caches = [caches[name] for name in self._names]
    self._transforms = [transforms.get(name) for name in self._names]
    self._reader = RecordReader(plan, caches, shards_touched=shards_touched)
    if any(self._transforms):
      # The features that a transform needs are not known: it gets all, and its results are compared.
      self._parsers = [ExampleParser(c.manifest.features) for c in self._caches]
    else:
      features = common_features({c.manifest.task: c.manifest.features for c in self._caches})
      self._parsers = [ExampleParser(features)] * len(self._caches)
    self._common: dict[str, Feature] | None = None

  def fetch_ahead(self, units: Callable[[int], StepUnits]) -> FetchAhead:
    """Return what has later steps' records fetched from stores; see `FetchAhead`."""
    return FetchAhead(self._reader, units)

  def read(self, task: np.ndarray, unit: np.ndarray) -> UnitRecords:
    """Return the records of units, in their order; see `RecordReader.read`."""
    return self._reader.read(task, unit)

  def examples(self, read: UnitRecords) -> tuple[Batch, np.ndarray | None]:
    """Return the examples of records that were read, in their order.

    Returns:
      The examples, and how many each row has, `(rows,) int64`; None where rows are not packed.

    Raises:
      AnystepError: 65 `record_invalid` for a damaged record, `record_length` for one whose length is not that
        of its unit table; and whatever transforms raise.
    """
    batch = self._examples(read.records, read.where)
    if self._plan.packing is PackingPolicy.NONE:
      return batch, None
    self._check_lengths(batch, read)
    return batch, read.counts

  def silent_since(self, where: BatchRows) -> np.ndarray:
    """Return the first step without loss of records by their places, `(records,) int64`."""
    since = np.full(len(where.task), NEVER)
    for k in np.unique(where.task).tolist():
      of_task = np.flatnonzero(where.task == k)
      indices = self._caches[k].index_of(where.shard[of_task], where.place[of_task])
      since[of_task] = self._plan.silent_steps.since(self._names[k], indices)
    return since

  def _examples(self, records: list[bytes], where: BatchRows) -> Batch:
    if not any(self._transforms):
      return self._parse(0, records, where)
    parts, rows = [], []
    for k in np.unique(where.task).tolist():
      of_task = np.nonzero(where.task == k)[0]
      columns = BatchRows(*(column[of_task] for column in where))
      parts.append(self._transform(k, [records[row] for row in of_task.tolist()], columns))
      rows.append(of_task)
    if not parts:
      # With the features that hosts with rows of this step have.
      parts, rows = [{name: feature[:0] for name, feature in self._transform_first(0).items()}], [where.task]
    if len(self._caches) == 1:
      return parts[0]
    common = self._common_of_transformed()
    return {
      name: _join_parts([part[name] for part in parts], rows, feature) for name, feature in common.items()
    }

  def _check_lengths(self, batch: Batch, read: UnitRecords) -> None:
    """Refuse a record that is not as long as its unit table says: its neighbours would not fit."""
    for column, name in enumerate(self._reader.features):
      feature = batch.get(name)
      if not isinstance(feature, Ragged) or read.lengths is None:
        continue
      lengths = np.minimum(feature.lengths, self._plan.feature_lengths[name])
      wrong = np.nonzero(lengths != read.lengths[:, column])[0]
      if wrong.size:
        raise self._locate_error(
          AnystepError(
            ExitCode.DATA,
            "record_length",
            feature=name,
            expected=int(read.lengths[wrong[0], column]),
            got=int(lengths[wrong[0]]),
            fix=f"{REMAKE_TABLE}: what the examples go through after the cache has changed",
          ),
          read.where,
          int(wrong[0]),
        )

  def close(self) -> None:
    """Drop what was read ahead."""
    self._reader.close()

  def _transform(self, k: int, records: list[bytes], where: BatchRows) -> Batch:
    batch = self._parse(k, records, where)
    transform = self._transforms[k]
    if transform is None:
      return batch
    manifest = self._caches[k].manifest
    indices = self._caches[k].index_of(where.shard, where.place)
    which = Records(where.epoch, indices, task=manifest.task, split=manifest.split, seed=self._plan.seed)
    lengths = self._plan.feature_lengths
    transformed = {
      name: as_sequences(feature) if name in lengths else feature
      for name, feature in transform(batch, which).items()
    }
    rows = {name: len(feature) for name, feature in transformed.items() if len(feature) != len(records)}
    if rows:
      raise AnystepError(
        ExitCode.CONFIG,
        "transform_output",
        task=manifest.task,
        expected=f"{len(records)} rows of each feature",
        got=rows,
        fix="let the transform make as many rows as it is given, in their order",
      )
    return transformed

  def _parse(self, k: int, records: list[bytes], where: BatchRows) -> Batch:
    try:
      return self._parsers[k](records)
    except AnystepError as error:
      row = error.fields.get("position")
      if isinstance(row, int):
        self._locate_error(error, where, row)
      raise

  def _locate_error(self, error: AnystepError, where: BatchRows, row: int) -> AnystepError:
    row_of = {name: int(column[row]) for name, column in where._asdict().items()}
    manifest = self._caches[row_of.pop("task")].manifest
    error.add_note(f"in {manifest.task} {manifest.split}: {row_of}")
    return error

  def _transform_first(self, k: int) -> Batch:
    """Return a task's first example that is kept, after its transform."""
    unit = np.zeros(1, np.int64)
    where = BatchRows(np.full(1, k), unit, *self._plan.unit_order.locate(k, unit))
    table = self._plan.unit_tables.get(self._names[k])
    if table is not None:
      where = where._replace(place=table.members(int(where.shard[0]), where.place).places[:1])
    records = self._caches[k].read_single(int(where.shard[0]), where.place.tolist())
    return self._transform(k, records, where)

  def _common_of_transformed(self) -> dict[str, Feature]:
    """Return the features that transformed examples of every task have, from the first example of each."""
    if self._common is None:
      features = {name: _describe_features(self._transform_first(k)) for k, name in enumerate(self._names)}
      self._common = common_features(features)
    return self._common


def common_features(features: Mapping[str, Mapping[str, Feature]]) -> dict[str, Feature]:
  """Return the features that all tasks have; a length that differs among tasks is None.

  Raises:
    AnystepError: 78 `mixture_features` where there are none, or tasks differ in a feature's dtype or rank.
  """
  tasks = list(features)
  names = set.intersection(*(set(task_features) for task_features in features.values()))
  for name in sorted(names) or [""]:
    forms = {task: _form(features[task].get(name)) for task in tasks}
    if len(set(forms.values())) > 1 or not name:
      raise AnystepError(
        ExitCode.CONFIG,
        "mixture_features",
        feature=name or "any",
        expected="features of one name, dtype and rank in all tasks of a mixture",
        got={task: forms[task] if name else sorted(features[task]) for task in tasks},
        fix="mix tasks whose preprocessors make the same features",
      )
  common = {}
  for name in sorted(names):
    shapes = {features[task][name].shape for task in tasks}
    shape = shapes.pop() if len(shapes) == 1 else (None, *min(shapes, key=str)[1:])
    common[name] = Feature(dtype=features[tasks[0]][name].dtype, shape=shape)
  return common


def _form(feature: Feature | None) -> tuple[object, ...]:
  return () if feature is None else (feature.dtype, len(feature.shape), *feature.shape[1:])


def _describe_features(batch: Batch) -> dict[str, Feature]:
  described = {}
  for name, feature in batch.items():
    values = feature.values if isinstance(feature, Ragged) else feature
    dtype = "string" if values.dtype == object else values.dtype.name
    shape = (None, *values.shape[1:]) if isinstance(feature, Ragged) else values.shape[1:]
    described[name] = Feature(dtype=dtype, shape=shape)
  return described


def _join_parts(
  parts: list[Ragged | np.ndarray], rows: list[np.ndarray], feature: Feature
) -> Ragged | np.ndarray:
  """Join parts of a batch, whose rows are given; the result is ragged where tasks' lengths differ."""
  order = np.argsort(np.concatenate(rows))
  if None not in feature.shape:
    return np.concatenate([part for part in parts if not isinstance(part, Ragged)])[order]
  every_row = [row for part in parts for row in (part.rows() if isinstance(part, Ragged) else part)]
  first = parts[0]
  dtype = first.values.dtype if isinstance(first, Ragged) else first.dtype
  inner_shape = first.values.shape[1:] if isinstance(first, Ragged) else first.shape[2:]
  return Ragged.of_rows([every_row[k] for k in order.tolist()], dtype, inner_shape)
