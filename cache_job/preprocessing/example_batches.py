"""Batches of a source range's good examples, as numpy arrays and as records."""

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
  make_raised_problem,
  make_step_finder,
  make_unreadable_error,
)
from anystep.cache_job.preprocessing.example_checks import (
  MAX_RECORD_BYTES,
  Problem,
  check_output_features,
  find_form_problems,
  find_problems,
  list_held_features,
  list_text_features,
  make_size_problem,
  read_features,
  read_static_features,
)
from anystep.cache_job.preprocessing.example_datasets import build_dataset
from anystep.cache_job.state.spill_files import SpilledRecords
from anystep.cache_job.state.split_job import SourceRange, SplitJob
from anystep.errors import AnystepError, ExitCode, one_line
from anystep.features.ragged import Batch, Ragged, select_rows
from anystep.records.writing import serialize_examples
from anystep.tasks.registry.fingerprint import cached_preprocessors

# A batch costs some 0.2 ms of Python, whatever it holds.
_BATCH_EXAMPLES = 512
# The first ones tell how large examples are; the larger they are, the fewer come at a time.
_FIRST_EXAMPLES = 64
# By the directory of a job, the size at which the batches of its last source range settled.
_FITTING: dict[str, list[int]] = {}
_BATCH_BYTES = 1 << 27


class ExampleBatches:
  """Examples of a source range, in batches.

  Args:
    task: the registered task.
    job: its split.
    source: the range.

  Attributes:
    features: of the examples, by name; None before the first example where TensorFlow does not know them.
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
    self._step_names = [_name_step(step) for step in steps]
    # To build a dataset takes some 50 ms: the first iteration takes this one.
    self._built = self._build_first()
    self.features = read_static_features(self._built.element_spec, job.task)
    self.bad = BadExamples(
      limit=job.options.max_bad_examples,
      source_name=source.name,
      find_step=make_step_finder(
        self._step_names, self._find_problems_after, limit=job.options.max_bad_examples
      ),
    )

  def __iter__(self) -> Iterator[tuple[Batch, SpilledRecords]]:
    """Yield batches of good examples, in order, and their records.

    Raises:
      AnystepError: as `BadExamples.add`.
    """
    for place, batch in _read_batches(
      self._take_dataset, fitting=_FITTING.setdefault(self._job.directory, [])
    ):
      if isinstance(batch, Problem):
        self.bad.add(batch, place=place, example=None)
        continue
      self.features = self.features or read_features(batch)
      wrong = find_form_problems(read_features(batch), self.features)
      if wrong:
        self.bad.add(wrong[0], place=place, example=select_row(batch, 0))
      else:
        yield self._drop_bad(batch, place)

  def check_output(self) -> None:
    """Check examples against the task's output features, where no preprocessor comes after the cache.

    Raises:
      AnystepError: 78 `output_feature`.
    """
    cached_steps = cached_preprocessors(self._task, self._job.options.cache_at)
    is_last = len(cached_preprocessors(self._task, "end")) == len(cached_steps)
    if is_last and self.features is not None:
      check_output_features(self._task, self.features)

  def _drop_bad(self, batch: Batch, first_place: int) -> tuple[Batch, SpilledRecords]:
    """Return the good rows of a batch, and their records."""
    wrong, records = self._check(batch)
    if wrong:
      is_good = np.ones(len(records), bool)
      for row in sorted(wrong):
        is_good[row] = False
        self.bad.add(wrong[row], place=first_place + row, example=select_row(batch, row))
      batch = {name: select_rows(feature, is_good) for name, feature in batch.items()}
      records = _serialize(batch)
    return batch, records

  def _check(self, batch: Batch) -> tuple[dict[int, Problem], SpilledRecords]:
    """Return the problems of a batch by row, and the records of all rows."""
    records = _serialize(batch)
    wrong = find_problems(batch, texts=list_text_features(self._task, read_features(batch)))
    for row in np.flatnonzero(records.sizes > MAX_RECORD_BYTES).tolist():
      wrong.setdefault(row, make_size_problem(int(records.sizes[row])))
    return wrong, records

  def _take_dataset(self) -> Any:
    built, self._built = self._built, None
    return build_dataset(self._task, self._job, self._source) if built is None else built

  def _build_first(self) -> Any:
    """Build the dataset; an error names the source or the preprocessor at fault."""
    try:
      return build_dataset(self._task, self._job, self._source)
    except AnystepError:
      raise
    except Exception as error:
      name = next(
        (name for k, name in enumerate([SOURCE, *self._step_names]) if not self._can_be_built(k)), "unknown"
      )
      if name == SOURCE:
        raise make_unreadable_error(one_line(error), source_shard=self._source.name) from error
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
      build_dataset(self._task, self._job, self._source, num_steps=num_steps)
    except Exception:
      return False
    return True

  def _find_problems_after(self, num_steps: int, num_examples: int | None) -> Iterator[Problem]:
    """Yield the problems of the source's first examples after the first preprocessors."""
    source, raised = self._source, 0
    if num_examples is not None:
      stop = source.start + num_examples
      source = dataclasses.replace(source, stop=stop if source.stop is None else min(stop, source.stop))

    def build() -> Any:
      return build_dataset(self._task, self._job, source, num_steps=num_steps)

    for _, batch in _read_batches(build, of=self.features):
      if isinstance(batch, Problem):
        yield batch
        raised += 1
        # A source that cannot be read may raise for ever.
        if raised > self._job.options.max_bad_examples:
          return
      else:
        yield from self._check(batch)[0].values() if batch else ()
        yield from find_form_problems(read_features(batch), self.features or {})[:1]


def _read_batches(
  build: Callable[[], Any], *, of: Mapping[str, Any] | None = None, fitting: list[int] | None = None
) -> Iterator[tuple[int, Batch | Problem]]:
  """Yield a dataset's examples in batches; in the place of an example that raises, its problem.

  Examples of one batch have one form: where their forms differ, batches are of one.

  Args:
    build: makes the dataset, the same one at each call.
    of: the features that are read; None for all.
    fitting: number of examples that fit into a batch, as earlier calls found; empty where none has.

  Yields:
    The number of examples before the batch, and the batch.
  """
  from tensorflow.errors import OpError

  from anystep.tasks.tensors import from_tensors

  fitting = [] if fitting is None else fitting
  done, size = 0, fitting[-1] if fitting else _FIRST_EXAMPLES
  while True:
    dataset = build()
    spec = dataset.element_spec
    # Preprocessors may hand each other features in forms that no record holds.
    names = [name for name in list_held_features(spec) if of is None or name in of]
    features = read_static_features({name: spec[name] for name in names}, "") if names else None
    if features is None or size == 1:
      break
    if len(names) < len(spec):
      dataset = dataset.map(functools.partial(_select_features, names=names))
    try:
      for tensors in dataset.skip(done).ragged_batch(size).prefetch(1):
        batch = from_tensors(tensors)
        if read_features(batch) != features:
          # A preprocessor set shapes that its examples do not have: one by one shows which.
          size = 1
          break
        yield done, batch
        num_rows = _count_rows(batch)
        done += num_rows
        if num_rows < size:
          return
        more = min(max(size * _BATCH_BYTES // max(_count_bytes(batch), 1), 1), _BATCH_EXAMPLES)
        if more < size or size == _FIRST_EXAMPLES < more:
          size = more
          fitting[:] = [size]
          break
      else:
        return
    except OpError:
      # One by one shows which example raises.
      size = 1
  elements = iter(dataset.skip(done))
  for place in itertools.count(done):
    try:
      element = next(elements)
    except StopIteration:
      return
    except OpError as error:
      yield place, make_raised_problem(error)
    else:
      yield place, _make_batch({name: _convert_tensor(element[name]) for name in names})


def _select_features(example: Mapping[str, Any], *, names: Sequence[str]) -> dict[str, Any]:
  return {name: example[name] for name in names}


def _convert_tensor(tensor: Any) -> Any:
  """Return one example's feature: an array, or a `Ragged` of its rows."""
  if hasattr(tensor, "row_lengths"):
    return Ragged(tensor.values.numpy(), tensor.row_lengths().numpy())
  value = tensor.numpy()
  return np.array(value, object) if isinstance(value, bytes) else value


def select_row(batch: Batch, row: int) -> dict[str, Any]:
  """Return one example of a batch."""
  return {
    name: feature.rows()[row] if isinstance(feature, Ragged) else feature[row]
    for name, feature in batch.items()
  }


def _count_rows(batch: Batch) -> int:
  return len(next(iter(batch.values())))


def _count_bytes(feature: Any) -> int:
  if isinstance(feature, Mapping):
    return sum(map(_count_bytes, feature.values()))
  if isinstance(feature, Ragged):
    return _count_bytes(feature.values)
  return sum(map(len, feature.reshape(-1))) if feature.dtype.hasobject else feature.nbytes


def _name_step(step: Any) -> str:
  import seqio

  return seqio.utils.function_name(step)


def _make_batch(example: Mapping[str, Any]) -> dict[str, Ragged | np.ndarray]:
  """Return a batch of one example."""
  return {
    name: Ragged(value, np.array([len(value)], np.int64))
    if np.ndim(value) or isinstance(value, Ragged)
    else value.reshape(1)
    for name, value in example.items()
  }


def _serialize(batch: Batch) -> SpilledRecords:
  data, ends = serialize_examples(batch)
  lengths = [feature.lengths for _, feature in sorted(batch.items()) if isinstance(feature, Ragged)]
  return SpilledRecords(
    data,
    np.diff(ends, prepend=0).astype(np.uint32),
    np.array(lengths, np.uint32).reshape(len(lengths), len(ends)).T,
  )
