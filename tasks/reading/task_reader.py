"""Exact reading of a SeqIO task's examples at any step (docs/order.md#draws-after-the-cache)."""

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
from anystep.tasks.reading.preprocessor_graph import PreprocessorGraph, Seeds, element_spec, validate
from anystep.tasks.reading.uncut_graphs import UncutGraphs
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
  """Return the seed pairs of a random preprocessor for records, `(rows, num_seeds, 2) int64`.

  A record's pairs depend on its index and epoch and on the preprocessor's position after the cache, but not
  on where or with which other records it is read.
  """
  pairs = np.empty((len(records.indices), num_seeds, 2), np.int64)
  for epoch in np.unique(records.epochs).tolist():
    rows = records.epochs == epoch
    record_keys = sub_keys(round_keys("map", task, split, seed, epoch, preprocessor), records.indices[rows])
    for first in range(0, num_seeds, _PAIRS_PER_KEYS):
      words = sub_keys(record_keys, first // _PAIRS_PER_KEYS) & ((np.uint64(1) << _SEED_BITS) - np.uint64(1))
      num_pairs = min(_PAIRS_PER_KEYS, num_seeds - first)
      pairs[rows, first : first + num_pairs] = words.reshape(-1, _PAIRS_PER_KEYS, 2)[:, :num_pairs].astype(
        np.int64
      )
  return pairs


class TaskReader(Transform):
  """A task's preprocessors after the cache: a `Transform` for `anystep.open_stream`.

  If all are known (those that only trim or append end tokens, and this package's own random ones), they run
  without TensorFlow (`NativePreprocessors`). Else they run together in one tf.data graph. Examples and their
  seeds are the graph's inputs, so that a draw does not depend on where and with which other records the
  record is read. A new reader runs the first block in several ways, and refuses preprocessors whose results
  depend on more than the record.

  Args:
    task: the registered task.
    cache: its cache.
    feature_lengths: SeqIO's `sequence_length` for the preprocessors, in tokens.

  Raises:
    AnystepError: 78 `preprocessor_not_one_to_one`, `preprocessor_unseeded`, naming the preprocessor;
      78 `output_features` if the examples do not have the task's output features.
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
      validate(task, types.SimpleNamespace(element_spec=element_spec(self._native.features)))
      return
    self._graph = PreprocessorGraph(task, self._preprocessors, features, feature_lengths)
    self._uncut = UncutGraphs(task, self._preprocessors, features, feature_lengths)
    self._num_seeds = self._graph.num_seeds
    self.is_random = any(self._num_seeds)
    self.may_drop = self._graph.may_drop[-1]
    self._check_preprocessors(cache)
    self._together = self._graph.together(len(self._preprocessors))
    self._one_by_one: Callable | None = None

  def __call__(self, batch: Batch, records: Records) -> Batch:
    """Run the preprocessors on examples, of which they drop none."""
    if self._native is not None:
      return self._native(batch, self._seeds(records))
    result = self._together(batch, self._seeds(records))
    result_sizes = {len(feature) for feature in result.values()}
    if result_sizes != {len(records.indices)}:
      raise AnystepError(
        ExitCode.DATA,
        "example_dropped",
        task=self._task_name,
        expected=f"{len(records.indices)} examples",
        got=", ".join(map(str, sorted(result_sizes))),
        fix=f"{REMAKE_TABLE}: what the preprocessors keep has changed",
      )
    return result

  def survey(self, batch: Batch, records: Records) -> tuple[Batch, np.ndarray]:
    """Run the preprocessors on examples that they may drop; return the kept ones and their rows.

    Raises:
      AnystepError: 78 `preprocessor_not_one_to_one` if a record gives several examples.
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
        self._find_splitting_preprocessor(_take_rows(batch, row), _take_records(records, row)),
        got=f"several of the record of index {records.indices[row[0]]} in epoch {records.epochs[row[0]]}",
      )
    return kept, rows

  def count_cut_tokens(self, batch: Batch, records: Records) -> np.ndarray | None:
    """Return how many tokens the preprocessors cut off each example to fit the feature lengths."""
    seeds = self._seeds(records)
    if self._native is not None:
      return self._native.count_cut_tokens(batch, seeds)
    return self._uncut.count_cut_tokens(batch, seeds, *self.survey(batch, records))

  def _seeds(self, records: Records, num_preprocessors: int | None = None) -> Seeds:
    """The seeds of the first preprocessors."""
    counts = self._num_seeds[:num_preprocessors]
    return {
      str(p): map_seeds(records.task, records.split, records.seed, p, records, count)
      for p, count in enumerate(counts)
      if count
    }

  def _find_splitting_preprocessor(self, batch: Batch, records: Records) -> int:
    """Return the position of the preprocessor that makes several examples of one."""
    seeds = self._seeds(records)
    results = (
      self._graph.one_by_one(position + 1)(batch, seeds) for position in range(len(self._preprocessors))
    )
    return next(position for position, (_, rows) in enumerate(results) if len(rows) > 1)

  def _problem_error(self, problem: str, position: int, **fields: object) -> AnystepError:
    name = seqio.utils.function_name(self._preprocessors[position])
    fields = {"task": self._task_name, "preprocessor": name, **_PROBLEMS[problem], **fields}
    return AnystepError(ExitCode.CONFIG, problem, **fields)  # type: ignore[arg-type]

  def _check_preprocessors(self, cache: Cache) -> None:
    """Refuse preprocessors that make or join examples, or draw without a seed, by name."""
    if any(self._graph.joins):
      raise self._problem_error("preprocessor_not_one_to_one", self._graph.joins.index(True))
    indices = np.arange(min(_CHECKED_RECORDS, len(cache)))
    records = Records(np.zeros_like(indices), indices, cache.manifest.task, cache.manifest.split, 0)
    batch = cache.read(indices)
    if self._find_problem(len(self._preprocessors), batch, records) is None:
      return
    for position in range(len(self._preprocessors)):
      problem = self._find_problem(position + 1, batch, records)
      if problem is not None:
        raise self._problem_error(problem, position)

  def _find_problem(self, num_preprocessors: int, batch: Batch, records: Records) -> str | None:
    """Return the kind of problem of the first preprocessors on some examples; None if there is none."""
    function = self._graph.together(num_preprocessors)
    seeds = self._seeds_of_kept_examples(num_preprocessors, batch, records)
    if seeds is None:
      return "preprocessor_not_one_to_one"
    together, again = (_to_comparable_rows(function(batch, seeds)) for _ in range(2))
    reseeded = self._graph.together(num_preprocessors, graph_seed=1)
    if again != together or _to_comparable_rows(reseeded(batch, seeds)) != together:
      return "preprocessor_unseeded"
    alone = self._run_alone(function, num_preprocessors, batch, records)
    if any(len(rows) > 1 for rows in alone) or [row for rows in alone for row in rows] != together:
      return "preprocessor_not_one_to_one"
    return None

  def _seeds_of_kept_examples(self, num_preprocessors: int, batch: Batch, records: Records) -> Seeds | None:
    """Return each preprocessor's seeds for the examples that earlier ones keep; None if they make more."""
    seeds = dict(self._seeds(records, num_preprocessors))
    for p in map(int, seeds):
      if p and self._graph.may_drop[p - 1]:
        alone = self._run_alone(self._graph.together(p), p, batch, records)
        if any(len(rows) > 1 for rows in alone):
          return None
        seeds[str(p)] = seeds[str(p)][[len(rows) == 1 for rows in alone]]
    return seeds

  def _run_alone(
    self, function: Callable, num_preprocessors: int, batch: Batch, records: Records
  ) -> list[list[dict[str, object]]]:
    """Run the first preprocessors on each example alone; return the results by example."""
    alone = []
    for row in range(len(records.indices)):
      this_row = np.array([row])
      seeds = self._seeds(_take_records(records, this_row), num_preprocessors)
      alone.append(_to_comparable_rows(function(_take_rows(batch, this_row), seeds)))
    return alone


def post_cache_preprocessors(task: seqio.Task, cache_at: str) -> Sequence[Callable]:
  """Return the preprocessors that run at reading: those after the placeholder; none if all ran before."""
  if cache_at == "end" or not task.supports_caching:
    return []
  positions = [
    position
    for position, preprocessor in enumerate(task.preprocessors)
    if isinstance(preprocessor, seqio.CacheDatasetPlaceholder)
  ]
  return list(task.preprocessors[positions[0] + 1 :])


def _take_records(records: Records, rows: np.ndarray) -> Records:
  return records._replace(epochs=records.epochs[rows], indices=records.indices[rows])


def _take_rows(batch: Batch, rows: np.ndarray) -> Batch:
  selected = {}
  for name, feature in batch.items():
    if isinstance(feature, Ragged):
      every_row = feature.rows()
      inner_shape = feature.values.shape[1:]
      selected[name] = Ragged.of_rows([every_row[row] for row in rows], feature.values.dtype, inner_shape)
    else:
      selected[name] = feature[rows]
  return selected


def _to_comparable_rows(batch: Batch) -> list[dict[str, object]]:
  """Convert examples to comparable values: NaNs, and zeros of either sign, by their bits."""
  columns = {
    name: feature.rows() if isinstance(feature, Ragged) else list(feature) for name, feature in batch.items()
  }
  return [
    {name: _to_comparable(value) for name, value in zip(columns, row, strict=True)}
    for row in zip(*columns.values(), strict=True)
  ]


def _to_comparable(value: object) -> tuple[object, ...]:
  if isinstance(value, Ragged):
    return tuple(map(_to_comparable, value.rows()))
  array = np.asarray(value)
  return array.shape, str(array.tolist()) if array.dtype.hasobject else array.tobytes()
