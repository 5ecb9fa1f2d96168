"""A source range's examples in batches, as numpy and as records, without the bad ones."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from anystep.cache_job.preprocessing.bad_examples import (
  SOURCE,
  BadExamples,
  raised_problem,
  source_unreadable,
  step_finder,
)
from anystep.cache_job.preprocessing.example_checks import (
  MAX_RECORD_BYTES,
  Problem,
  features_of,
  form_problems,
  held_features,
  problems,
  size_problem,
  static_features,
  text_features,
)
from anystep.cache_job.preprocessing.example_datasets import preprocessed_dataset
from anystep.cache_job.state.spill_files import SpilledRecords
from anystep.cache_job.state.split_job import SourceRange, SplitJob
from anystep.errors import AnystepError, ExitCode, one_line
from anystep.features.ragged import Batch, Ragged, select_rows
from anystep.records.writing import serialize_examples
from anystep.tasks.registry.fingerprint import cached_preprocessors

# A batch costs some 0.2 ms of Python, whatever it holds.
_BATCH_EXAMPLES = 512
# What is known of their size shows in the first ones; the larger they are, the fewer come at a time.
_FIRST_EXAMPLES = 64
# By the directory of a job, the size at which the batches of its last source range settled.
_FITTING: dict[str, list[int]] = {}
_BATCH_BYTES = 1 << 27


class ExampleBatches:
  """The examples of a source range.

  Args:
    task: the registered task.
    job: its split.
    source: the range.

  Attributes:
    features: what examples hold; None before the first one where TensorFlow cannot tell.
    bad: the examples that were left out so far.

  Raises:
    AnystepError: 65 `preprocessor_failed` and 66 `source_unreadable` where no dataset can be built; 78
      `feature_form` for what records cannot hold.
  """

  def __init__(self, task: Any, job: SplitJob, source: SourceRange):
    self._task = task
    self._job = job
    self._source = source
    steps = [] if job.seqio_cache else cached_preprocessors(task, job.options.cache_at)
    self._step_names = [_step_name(step) for step in steps]
    # To build one takes some 50 ms: the first one that is asked for is this.
    self._built = self._buildable()
    self.features = static_features(self._built.element_spec, job.task)
    self.bad = BadExamples(
      limit=job.options.max_bad_examples,
      source_name=source.name,
      find_step=step_finder(self._step_names, self._problems_after, limit=job.options.max_bad_examples),
    )

  def __iter__(self) -> Iterator[tuple[Batch, SpilledRecords]]:
    """Batches of good examples, in order, and their records.

    Raises:
      AnystepError: as `BadExamples.add`.
    """
    for place, batch in _batches(self._dataset, fitting=_FITTING.setdefault(self._job.directory, [])):
      if isinstance(batch, Problem):
        self.bad.add(batch, place=place, example=None)
        continue
      self.features = self.features or features_of(batch)
      wrong = form_problems(features_of(batch), self.features)
      if wrong:
        self.bad.add(wrong[0], place=place, example=row_of(batch, 0))
      else:
        yield self._without_bad(batch, place)

  def _without_bad(self, batch: Batch, first_place: int) -> tuple[Batch, SpilledRecords]:
    """The rows of a batch with which nothing is wrong, and their records."""
    wrong, records = self._problems(batch)
    if wrong:
      kept = np.ones(len(records), bool)
      for row in sorted(wrong):
        kept[row] = False
        self.bad.add(wrong[row], place=first_place + row, example=row_of(batch, row))
      batch = {name: select_rows(feature, kept) for name, feature in batch.items()}
      records = _records(batch)
    return batch, records

  def _problems(self, batch: Batch) -> tuple[dict[int, Problem], SpilledRecords]:
    """What is wrong with which rows of a batch, and their records."""
    records = _records(batch)
    wrong = problems(batch, texts=text_features(self._task, features_of(batch)))
    for row in np.flatnonzero(records.sizes > MAX_RECORD_BYTES).tolist():
      wrong.setdefault(row, size_problem(int(records.sizes[row])))
    return wrong, records

  def _dataset(self) -> Any:
    built, self._built = self._built, None
    return preprocessed_dataset(self._task, self._job, self._source) if built is None else built

  def _buildable(self) -> Any:
    """The dataset; where none can be built, whose fault that is."""
    try:
      return preprocessed_dataset(self._task, self._job, self._source)
    except AnystepError:
      raise
    except Exception as error:
      name = next(
        (name for k, name in enumerate([SOURCE, *self._step_names]) if not self._can_be_built(k)), "unknown"
      )
      if name == SOURCE:
        raise source_unreadable(one_line(error), source_shard=self._source.name) from error
      raise AnystepError(
        ExitCode.DATA,
        "preprocessor_failed",
        source_shard=self._source.name,
        preprocessor=name,
        got=one_line(error),
        fix="mend the preprocessor and run the same command again; what is finished is kept",
      ) from error

  def _can_be_built(self, num_steps: int) -> bool:
    try:
      preprocessed_dataset(self._task, self._job, self._source, num_steps=num_steps)
    except Exception:
      return False
    return True

  def _problems_after(self, num_steps: int, num_examples: int | None) -> Iterator[Problem]:
    """What is wrong with examples, after so many preprocessors of so many of the source's first."""
    source, raised = self._source, 0
    if num_examples is not None:
      stop = source.start + num_examples
      source = dataclasses.replace(source, stop=stop if source.stop is None else min(stop, source.stop))

    def build() -> Any:
      return preprocessed_dataset(self._task, self._job, source, num_steps=num_steps)

    for _, batch in _batches(build, of=self.features):
      if isinstance(batch, Problem):
        yield batch
        raised += 1
        # A source that cannot be read may raise for ever.
        if raised > self._job.options.max_bad_examples:
          return
      else:
        yield from self._problems(batch)[0].values() if batch else ()
        yield from form_problems(features_of(batch), self.features or {})[:1]


def _batches(
  build: Callable[[], Any], *, of: Mapping[str, Any] | None = None, fitting: list[int] | None = None
) -> Iterator[tuple[int, Batch | Problem]]:
  """A dataset's examples in batches, or in the place of an example that raises, the problem.

  Examples of one batch have one form: where their forms differ, batches are of one.

  Args:
    build: makes the dataset, the same one at each call.
    of: the features that are looked at; None for all.
    fitting: how many examples fit into a batch, as earlier calls found; nothing where none has.

  Yields:
    How many examples came before, and the batch.
  """
  from tensorflow.errors import OpError

  from anystep.tasks.tensors import from_tensors

  fitting = [] if fitting is None else fitting
  done, size = 0, fitting[-1] if fitting else _FIRST_EXAMPLES
  while True:
    dataset = build()
    spec = dataset.element_spec
    # What preprocessors hand each other may be in forms that no record holds.
    names = [name for name in held_features(spec) if of is None or name in of]
    features = static_features({name: spec[name] for name in names}, "") if names else None
    if features is None or size == 1:
      break
    if len(names) < len(spec):
      dataset = dataset.map(functools.partial(_features_named, names=names))
    try:
      for tensors in dataset.skip(done).ragged_batch(size).prefetch(1):
        batch = from_tensors(tensors)
        if features_of(batch) != features:
          # A preprocessor set shapes that its examples do not have: which do, shows one by one.
          size = 1
          break
        yield done, batch
        num_rows = _num_rows(batch)
        done += num_rows
        if num_rows < size:
          return
        more = min(max(size * _BATCH_BYTES // max(_num_bytes(batch), 1), 1), _BATCH_EXAMPLES)
        if more < size or size == _FIRST_EXAMPLES < more:
          size = more
          fitting[:] = [size]
          break
      else:
        return
    except OpError:
      # Which one it is, shows one by one.
      size = 1
  elements = iter(dataset.skip(done))
  for place in itertools.count(done):
    try:
      element = next(elements)
    except StopIteration:
      return
    except OpError as error:
      yield place, raised_problem(error)
    else:
      yield place, _batch_of({name: _value(element[name]) for name in names})


def _features_named(example: Mapping[str, Any], *, names: Sequence[str]) -> dict[str, Any]:
  return {name: example[name] for name in names}


def _value(tensor: Any) -> Any:
  """One example's feature: an array, or a `Ragged` of its rows."""
  if hasattr(tensor, "row_lengths"):
    return Ragged(tensor.values.numpy(), tensor.row_lengths().numpy())
  value = tensor.numpy()
  return np.array(value, object) if isinstance(value, bytes) else value


def row_of(batch: Batch, row: int) -> dict[str, Any]:
  """One example of a batch."""
  return {
    name: feature.rows()[row] if isinstance(feature, Ragged) else feature[row]
    for name, feature in batch.items()
  }


def _num_rows(batch: Batch) -> int:
  return len(next(iter(batch.values())))


def _num_bytes(feature: Any) -> int:
  if isinstance(feature, Mapping):
    return sum(map(_num_bytes, feature.values()))
  if isinstance(feature, Ragged):
    return _num_bytes(feature.values)
  return sum(map(len, feature.reshape(-1))) if feature.dtype.hasobject else feature.nbytes


def _step_name(step: Any) -> str:
  import seqio

  return seqio.utils.function_name(step)


def _batch_of(example: Mapping[str, Any]) -> dict[str, Ragged | np.ndarray]:
  """A batch of one."""
  return {
    name: Ragged(value, np.array([len(value)], np.int64))
    if np.ndim(value) or isinstance(value, Ragged)
    else value.reshape(1)
    for name, value in example.items()
  }


def _records(batch: Batch) -> SpilledRecords:
  data, ends = serialize_examples(batch)
  lengths = [feature.lengths for _, feature in sorted(batch.items()) if isinstance(feature, Ragged)]
  return SpilledRecords(
    data,
    np.diff(ends, prepend=0).astype(np.uint32),
    np.array(lengths, np.uint32).reshape(len(lengths), len(ends)).T,
  )
