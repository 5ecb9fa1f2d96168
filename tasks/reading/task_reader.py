"""Reads a SeqIO task's examples as at any step, exactly (docs/order.md#draws-after-the-cache)."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import seqio

from anystep.caches.cache import Cache
from anystep.errors import AnystepError, ExitCode
from anystep.features.ragged import Batch, Ragged
from anystep.order.permutation import round_keys, sub_keys
from anystep.tasks.reading.native_preprocessors import NativePreprocessors
from anystep.tasks.reading.preprocessor_graph import PreprocessorGraph, Seeds, element_spec, validated
from anystep.transforms.identity import describe
from anystep.transforms.transform import REMAKE_TABLE, Records, Transform

_SEED_BITS = np.uint64(31)
_PAIRS_PER_KEYS = 4
_CHECKED_RECORDS = 32

_PROBLEMS = {
  "preprocessor_not_one_to_one": {
    "expected": "one example to one or to none, whatever stands beside it",
    "fix": "cache the task with --cache_at=end: what joins or splits examples cannot run at reading",
  },
  "preprocessor_unseeded": {
    "expected": "random draws through seqio.map_over_dataset(num_seeds=n) alone",
    "fix": "take the seeds that seqio.map_over_dataset passes and use TensorFlow's stateless_* functions",
  },
}


def map_seeds(
  task: str, split: str, seed: int, preprocessor: int, records: Records, num_seeds: int
) -> np.ndarray:
  """Seed pairs of a random preprocessor for some records, `(rows, num_seeds, 2) int64`.

  A record's pairs follow from its index and epoch and the preprocessor's place after the cache, not from
  how, where or beside what it is read.
  """
  pairs = np.empty((len(records.indices), num_seeds, 2), np.int64)
  for epoch in np.unique(records.epochs).tolist():
    rows = records.epochs == epoch
    record_keys = sub_keys(round_keys("map", task, split, seed, epoch, preprocessor), records.indices[rows])
    for first in range(0, num_seeds, _PAIRS_PER_KEYS):
      words = sub_keys(record_keys, first // _PAIRS_PER_KEYS) & ((np.uint64(1) << _SEED_BITS) - np.uint64(1))
      wanted = min(_PAIRS_PER_KEYS, num_seeds - first)
      pairs[rows, first : first + wanted] = words.reshape(-1, _PAIRS_PER_KEYS, 2)[:, :wanted].astype(np.int64)
  return pairs


class TaskReader(Transform):
  """A task's preprocessors after the cache: a `Transform` for `anystep.open_stream`.

  Where all are understood (those that only trim or append end tokens, and this package's own random ones),
  they run without TensorFlow (`NativePreprocessors`). Else they run, all together, in one tf.data graph that
  takes examples and their seeds as data, so that a draw is the same wherever and beside whatever the record
  is read. The first block is run in several ways when the reader is made, and what would not be a function
  of the record alone is refused.

  Args:
    task: the registered task.
    cache: its cache.
    feature_lengths: tokens that the preprocessors are told, SeqIO's `sequence_length`.

  Raises:
    AnystepError: 78 `preprocessor_not_one_to_one`, `preprocessor_unseeded`, naming the preprocessor;
      78 `output_features` where the examples do not have the task's.
  """

  def __init__(self, task: seqio.Task, cache: Cache, feature_lengths: Mapping[str, int]):
    self._task_name = task.name
    self._preprocessors = post_cache_preprocessors(task, cache.manifest.cache_at)
    features = cache.manifest.features
    self.identity = {
      "preprocessors": [describe(preprocessor) for preprocessor in self._preprocessors],
      "output_features": {name: describe(feature) for name, feature in task.output_features.items()},
      "feature_lengths": dict(feature_lengths),
    }
    self.does_nothing = not self._preprocessors
    self._native = NativePreprocessors.of(
      self._preprocessors, features, task.output_features, feature_lengths
    )
    if self._native is not None:
      self._num_seeds = self._native.num_seeds
      self.is_random = any(self._num_seeds)
      self.appended_tokens = self._native.appended_tokens
      validated(task, types.SimpleNamespace(element_spec=element_spec(self._native.features)))
      return
    self._graph = PreprocessorGraph(task, self._preprocessors, features, feature_lengths)
    self._num_seeds = self._graph.num_seeds
    self.is_random = any(self._num_seeds)
    self.may_drop = self._graph.may_drop[-1]
    self._check(cache)
    self._together = self._graph.together(len(self._preprocessors))
    self._one_by_one: Callable | None = None

  def __call__(self, batch: Batch, records: Records) -> Batch:
    """Runs the preprocessors on some examples, of which they drop none."""
    if self._native is not None:
      return self._native(batch, self._seeds(records))
    result = self._together(batch, self._seeds(records))
    found = {len(feature) for feature in result.values()}
    if found != {len(records.indices)}:
      raise AnystepError(
        ExitCode.DATA,
        "example_dropped",
        task=self._task_name,
        expected=f"{len(records.indices)} examples",
        got=", ".join(map(str, sorted(found))),
        fix=f"{REMAKE_TABLE}: what the preprocessors keep has changed",
      )
    return result

  def survey(self, batch: Batch, records: Records) -> tuple[Batch, np.ndarray]:
    """Runs the preprocessors on any examples: those that are kept, and which rows they were.

    Raises:
      AnystepError: 78 `preprocessor_not_one_to_one` where a record gives several examples.
    """
    if not self.may_drop:
      return super().survey(batch, records)
    if self._one_by_one is None:
      self._one_by_one = self._graph.one_by_one(len(self._preprocessors))
    kept, rows = self._one_by_one(batch, self._seeds(records))
    (several,) = np.nonzero(np.diff(rows) == 0)
    if len(several):
      row = rows[several[:1]]
      raise self._problem_error(
        "preprocessor_not_one_to_one",
        self._first_that_gives_several(_taken(batch, row), _records_at(records, row)),
        got=f"several of the record of index {records.indices[row[0]]} in epoch {records.epochs[row[0]]}",
      )
    return kept, rows

  def _seeds(self, records: Records, num_preprocessors: int | None = None) -> Seeds:
    """The seeds of the first preprocessors."""
    counts = self._num_seeds[:num_preprocessors]
    return {
      str(p): map_seeds(records.task, records.split, records.seed, p, records, count)
      for p, count in enumerate(counts)
      if count
    }

  def _first_that_gives_several(self, batch: Batch, records: Records) -> int:
    """The place of the preprocessor that makes several examples of one."""
    seeds = self._seeds(records)
    results = (self._graph.one_by_one(place + 1)(batch, seeds) for place in range(len(self._preprocessors)))
    return next(place for place, (_, rows) in enumerate(results) if len(rows) > 1)

  def _problem_error(self, problem: str, place: int, **fields: object) -> AnystepError:
    name = seqio.utils.function_name(self._preprocessors[place])
    fields = {"task": self._task_name, "preprocessor": name, **_PROBLEMS[problem], **fields}
    return AnystepError(ExitCode.CONFIG, problem, **fields)  # type: ignore[arg-type]

  def _check(self, cache: Cache) -> None:
    """Refuses preprocessors that make or join examples, or draw without a seed, by name."""
    if any(self._graph.joins):
      raise self._problem_error("preprocessor_not_one_to_one", self._graph.joins.index(True))
    indices = np.arange(min(_CHECKED_RECORDS, len(cache)))
    records = Records(np.zeros_like(indices), indices, cache.manifest.task, cache.manifest.split, 0)
    batch = cache.read(indices)
    if self._problem(len(self._preprocessors), batch, records) is None:
      return
    for place in range(len(self._preprocessors)):
      problem = self._problem(place + 1, batch, records)
      if problem is not None:
        raise self._problem_error(problem, place)

  def _problem(self, num_preprocessors: int, batch: Batch, records: Records) -> str | None:
    """What is wrong with the first preprocessors, seen on some examples; None where nothing is."""
    function = self._graph.together(num_preprocessors)
    seeds = self._seeds_of_those_that_come(num_preprocessors, batch, records)
    if seeds is None:
      return "preprocessor_not_one_to_one"
    together = _rows(function(batch, seeds))
    reseeded = self._graph.together(num_preprocessors, graph_seed=1)
    if _rows(function(batch, seeds)) != together or _rows(reseeded(batch, seeds)) != together:
      return "preprocessor_unseeded"
    alone = self._alone(function, num_preprocessors, batch, records)
    if any(len(rows) > 1 for rows in alone) or [row for rows in alone for row in rows] != together:
      return "preprocessor_not_one_to_one"
    return None

  def _seeds_of_those_that_come(self, num_preprocessors: int, batch: Batch, records: Records) -> Seeds | None:
    """Seeds of each preprocessor for the examples that those before it keep; None where they make more."""
    seeds = dict(self._seeds(records, num_preprocessors))
    for p in map(int, seeds):
      if p and self._graph.may_drop[p - 1]:
        alone = self._alone(self._graph.together(p), p, batch, records)
        if any(len(rows) > 1 for rows in alone):
          return None
        seeds[str(p)] = seeds[str(p)][[len(rows) == 1 for rows in alone]]
    return seeds

  def _alone(
    self, function: Callable, num_preprocessors: int, batch: Batch, records: Records
  ) -> list[list[dict[str, object]]]:
    """What the first preprocessors make of each example when it is the only one."""
    alone = []
    for row in range(len(records.indices)):
      own = np.array([row])
      seeds = self._seeds(_records_at(records, own), num_preprocessors)
      alone.append(_rows(function(_taken(batch, own), seeds)))
    return alone


def post_cache_preprocessors(task: seqio.Task, cache_at: str) -> Sequence[Callable]:
  """What runs at reading: what stands after the placeholder, and nothing where the cache holds it all."""
  if cache_at == "end" or not task.supports_caching:
    return []
  places = [
    place
    for place, preprocessor in enumerate(task.preprocessors)
    if isinstance(preprocessor, seqio.CacheDatasetPlaceholder)
  ]
  return list(task.preprocessors[places[0] + 1 :])


def _records_at(records: Records, rows: np.ndarray) -> Records:
  return records._replace(epochs=records.epochs[rows], indices=records.indices[rows])


def _taken(batch: Batch, rows: np.ndarray) -> Batch:
  taken = {}
  for name, feature in batch.items():
    if isinstance(feature, Ragged):
      every_row = feature.rows()
      inner_shape = feature.values.shape[1:]
      taken[name] = Ragged.of_rows([every_row[row] for row in rows], feature.values.dtype, inner_shape)
    else:
      taken[name] = feature[rows]
  return taken


def _rows(batch: Batch) -> list[dict[str, object]]:
  """The examples of a batch as things to compare: NaNs, and zeros of either sign, by their bits."""
  columns = {
    name: feature.rows() if isinstance(feature, Ragged) else list(feature) for name, feature in batch.items()
  }
  return [
    {name: _comparable(value) for name, value in zip(columns, row, strict=True)}
    for row in zip(*columns.values(), strict=True)
  ]


def _comparable(value: object) -> tuple[object, ...]:
  if isinstance(value, Ragged):
    return tuple(map(_comparable, value.rows()))
  array = np.asarray(value)
  return array.shape, str(array.tolist()) if array.dtype.hasobject else array.tobytes()
