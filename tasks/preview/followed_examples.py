"""Examples of a task followed from the source on, through one preprocessor after the other."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any

import numpy as np
import seqio
import tensorflow as tf

from anystep.errors import AnystepError, ExitCode, one_line
from anystep.order.permutation import preprocess_seed
from anystep.tasks import seqio_internals

# So many more than are followed are run too: what joins examples shows by what it makes of others.
_MORE_EXAMPLES = 4
# So much of the source is read where examples are joined, or where none of the followed ones is left.
_RESTART_EXAMPLES = 2048
_RESTART_SHARDS = 16
# What makes very many of one example, or never ends, is not waited for.
_MOST_RESULTS = 4096
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')


@dataclasses.dataclass(frozen=True)
class Followed:
  """Example that is followed through the steps.

  Attributes:
    label: its number in the source shard, with `.0` for the first of several.
    place: position among all examples at this step.
    siblings: number of results of the same parent.
    parent: position of its parent among the examples followed before the step; None for a new example.
  """

  label: str
  place: int
  siblings: int = 1
  parent: int | None = None


@dataclasses.dataclass(frozen=True)
class Following:
  """Followed examples after a step.

  Attributes:
    examples: tensors of all examples after the step, from the shard's first on.
    spec: TensorFlow's `element_spec` of one example.
    followed: the followed examples that are left.
    dropped: labels of the followed examples that were dropped.
    notes: notes for the user, in sentences.
  """

  examples: Sequence[Any]
  spec: Any
  followed: Sequence[Followed]
  dropped: Sequence[str] = ()
  notes: Sequence[str] = ()


class StepFailed(Exception):
  """A preprocessor raised.

  Attributes:
    message: the error on one line.
    label: label of the example that failed; None if it is not known.
    example: its tensors.
  """

  def __init__(self, cause: Exception, label: str | None = None, example: Any = None):
    super().__init__(cause)
    self.cause = cause
    self.message = format_failure(cause)
    self.label = label
    self.example = example


class FollowedExamples:
  """Run of a task's preprocessors, step by step, that follows examples to their results.

  Random draws are the cache job's for the source shard (those after the cache as with `--cache_at=end`), for
  each preprocessor is given all examples from the shard's first on.

  Args:
    task: whose source is read.
    split: of it.
    source_shard: the shard's number.
    skip: the number, in the shard, of the first example that is followed.
    num_examples: how many are followed.
    base_seed: as `anystep-cache --base_seed`.
    feature_lengths: what preprocessors are told; None for nothing.

  Attributes:
    now: where the examples are.

  Raises:
    AnystepError: 66 `source_unreadable`.
  """

  def __init__(
    self,
    task: seqio.Task,
    *,
    split: str,
    source_shard: int,
    skip: int,
    num_examples: int,
    base_seed: int,
    feature_lengths: Mapping[str, int] | None,
  ):
    self._task, self._split, self._source_shard = task, split, source_shard
    self._num_examples = num_examples
    self._feature_lengths = feature_lengths
    self._base_seed = self._seed = preprocess_seed(task.name, split, base_seed, source_shard)
    self._steps: list[Callable] = []
    # The cache job's, for what draws by TensorFlow's.
    tf.random.set_seed(0)
    with source_errors(task, split):
      source = self._read_source()
      examples = list(source.take(skip + num_examples + _MORE_EXAMPLES))
    places = range(skip, min(skip + num_examples, len(examples)))
    notes = [f"the source shard has {len(examples)} examples"] if len(places) < num_examples else []
    followed = [Followed(str(place), place) for place in places]
    self.now = Following(examples, source.element_spec, followed, notes=notes)

  def step(self, preprocessor: Callable) -> None:
    """Run the next preprocessor.

    Raises:
      StepFailed: for an example that is followed, or for one before it.
    """
    self._steps.append(preprocessor)
    if isinstance(preprocessor, seqio.CacheDatasetPlaceholder):
      self._seed = self._compute_seed_after_cache(len(self._steps) - 1)
      return
    before = self.now
    run, spec = self._build(preprocessor)
    num_given = len(before.examples)
    results, error = run(num_given)
    if error is not None:
      num_given = self._find_last_passing(run)
      if not before.followed or num_given <= before.followed[-1].place:
        labels = {example.place: example.label for example in before.followed}
        failing_example = before.examples[num_given] if num_given >= 0 else None
        raise StepFailed(error, labels.get(num_given), failing_example) from error
      results, _ = run(num_given)
    self.now = self._trace(run, results, num_given, spec)

  def _build(self, preprocessor: Callable) -> tuple[Callable[[int], tuple[list[Any], Exception | None]], Any]:
    """Build a function from a number of examples to the preprocessor's results, and their `element_spec`."""
    before, limit = self.now, [0]
    source = tf.data.Dataset.from_generator(
      lambda: iter(before.examples[: limit[0]]), output_signature=before.spec
    )
    try:
      dataset, self._seed = self._apply(source, preprocessor, self._seed)
    except Exception as error:
      first = before.followed[:1]
      raise StepFailed(
        error, *[example.label for example in first], *[before.examples[example.place] for example in first]
      ) from error

    def run(num_examples: int) -> tuple[list[Any], Exception | None]:
      limit[0] = num_examples
      results: list[Any] = []
      try:
        results.extend(dataset.take(_MOST_RESULTS))
      except Exception as error:
        return results, error
      return results, None

    return run, dataset.element_spec

  def _trace(self, run: Callable, results: list[Any], num_given: int, spec: Any) -> Following:
    """Find the results of each followed example: those that a run with it has, and one without it has not."""
    before = self.now

    @functools.cache
    def run_first(num_examples: int) -> list[Any]:
      return _to_comparable(results if num_examples == num_given else run(num_examples)[0])

    contents = run_first(num_given)
    ranges = [(run_first(example.place), run_first(example.place + 1)) for example in before.followed]
    notes: list[str] = []
    if any(part != contents[: len(part)] for pair in ranges for part in pair):
      if sorted(_to_comparable(run(num_given)[0]), key=repr) == sorted(contents, key=repr):
        note = "what it makes of an example depends on those beside it: other examples, numbered anew"
        return self._restart(note, spec)
      notes.append("each run of it makes something else: it draws, but not by SeqIO's seeds")
    followed, dropped = [], []
    for parent, (example, (without, together)) in enumerate(zip(before.followed, ranges, strict=True)):
      siblings = len(together) - len(without)
      if len(together) >= _MOST_RESULTS:
        notes.append(f"{_MOST_RESULTS:,} come of example {example.label} and those before it, or more")
      if siblings > 0:
        label = example.label if siblings == 1 else f"{example.label}.0"
        followed.append(Followed(label, len(without), siblings, parent))
      else:
        dropped.append(example.label)
    if before.followed and not followed:
      return self._restart("the first that are left, numbered anew", spec, dropped)
    return Following(results, spec, followed, dropped, notes)

  def _restart(self, note: str, spec: Any, dropped: Sequence[str] = ()) -> Following:
    """Follow new examples, the first that pass all steps so far; read as much of the source as needed."""
    # The cache job joins no shards: others are read only where there is too little in this one.
    results = self._run_from_start(1)
    if len(results) < self._num_examples:
      results = self._run_from_start(_RESTART_SHARDS)
    followed = [Followed(f"new {k}", k) for k in range(min(self._num_examples, len(results)))]
    if not followed:
      note = f"nothing is left of the first {_RESTART_EXAMPLES:,} source examples"
    return Following(results, spec, followed, dropped, [note])

  def _run_from_start(self, num_shards: int) -> list[Any]:
    """The first examples after all steps up to here.

    Raises:
      StepFailed: where one of them raises.
    """
    try:
      dataset, seed = self._read_source(num_shards).take(_RESTART_EXAMPLES), self._base_seed
      for place, step in enumerate(self._steps):
        if isinstance(step, seqio.CacheDatasetPlaceholder):
          seed = self._compute_seed_after_cache(place)
        else:
          dataset, seed = self._apply(dataset, step, seed)
      return list(dataset.take(self._num_examples + _MORE_EXAMPLES))
    except Exception as error:
      raise StepFailed(error) from error

  def _read_source(self, num_shards: int = 1) -> tf.data.Dataset:
    """The source's examples from the shard on."""
    names = source_shards(self._task, self._split)
    datasets = [
      source_shard(self._task, self._split, shard, seed=self._base_seed)
      for shard in range(self._source_shard, min(self._source_shard + num_shards, len(names)))
    ]
    return functools.reduce(tf.data.Dataset.concatenate, datasets)

  def _compute_seed_after_cache(self, place: int) -> int:
    """As `seqio.Task.preprocess_postcache` has it."""
    return self._base_seed + 42 * place

  def _apply(
    self, dataset: tf.data.Dataset, preprocessor: Callable, seed: int
  ) -> tuple[tf.data.Dataset, int]:
    """The preprocessor's dataset, and the seed of the next one's draws."""
    bound = seqio.utils.add_kwargs_to_transform(
      preprocessor, sequence_length=self._feature_lengths, output_features=self._task.output_features
    )
    failure: Exception | None = None
    # SeqIO's own context would keep the seed where something is raised in it.
    with seqio.utils.map_seed_manager(seed):
      try:
        dataset = bound(dataset)
        if not isinstance(dataset, tf.data.Dataset):
          failure = TypeError(f"a tf.data.Dataset is to be returned, not {type(dataset).__name__}")
      except Exception as error:
        failure = error
      next_seed = seqio_internals.next_map_seed()
    if failure is not None:
      raise failure
    return dataset, next_seed

  def _find_last_passing(self, run: Callable) -> int:
    """Return the number of examples that pass without an error; -1 if even no example fails."""
    passes, fails = -1, len(self.now.examples)
    while fails - passes > 1:
      middle = (passes + fails) // 2
      passes, fails = (passes, middle) if run(middle)[1] is not None else (middle, fails)
    return passes


def has_split(task: seqio.Task, split: str) -> bool:
  """Return whether the task's source has a split.

  Raises:
    AnystepError: 66 `source_unreadable`.
  """
  with source_errors(task, split):
    return split in task.splits


def source_shards(task: seqio.Task, split: str) -> list[str]:
  """The names of the source's shards.

  Raises:
    AnystepError: 66 `source_unreadable`.
  """
  with source_errors(task, split):
    return list(task.source.list_shards(split))


def source_shard(task: seqio.Task, split: str, shard: int, *, seed: int | None = None) -> tf.data.Dataset:
  """A shard's examples, as the cache job reads them."""
  info = seqio.ShardInfo(index=shard, num_shards=len(task.source.list_shards(split)))
  return task.source.get_dataset(split=split, shuffle=False, seed=seed, shard_info=info)


@contextlib.contextmanager
def source_errors(task: seqio.Task, split: str) -> Iterator[None]:
  """Turn errors of a source into an `AnystepError`."""
  try:
    yield
  except AnystepError:
    raise
  except Exception as error:
    raise AnystepError(
      ExitCode.NO_INPUT,
      "source_unreadable",
      task=task.name,
      split=split,
      got=format_failure(error),
      fix="see to the source's files",
    ) from error


def format_failure(error: Exception) -> str:
  """Format an error on one line, without TensorFlow's graphs, with the line of user code that raised it."""
  if isinstance(error, AnystepError):
    return str(error)
  text = str(getattr(error, "message", None) or error)
  where = ""
  if "in user code:" in text:
    frames = [(path, line) for path, line in _FRAME.findall(text) if "site-packages" not in path]
    where = "".join(f" ({PurePath(path).name}, line {line})" for path, line in frames[-1:])
  text = one_line(error, without_graph=True)
  # What Python raised within a graph, its type first, is of more use than TensorFlow's type for it.
  return re.sub(r"\w+: (?=\w+(Error|Exception): )", "", text, count=1) + where


def _to_comparable(examples: Sequence[Any]) -> list[Any]:
  """Convert examples to comparable values: NaNs, and zeros of either sign, by their bits."""
  return [
    [_to_bits(tensor.numpy()) for tensor in tf.nest.flatten(example, expand_composites=True)]
    for example in examples
  ]


def _to_bits(value: Any) -> Any:
  if isinstance(value, bytes):
    return value
  array = np.asarray(value)
  return array.shape, array.tolist() if array.dtype.hasobject else array.tobytes()
