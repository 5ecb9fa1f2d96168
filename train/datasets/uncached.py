"""A registered task or mixture straight from its source, through SeqIO: nothing cached, and nothing exact."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping

import numpy as np
import seqio
import tensorflow as tf
from etils import epath

from anystep.errors import AnystepError, ExitCode, one_line, require
from anystep.features.converters import FeatureConverter, Rows
from anystep.features.ragged import Batch, Ragged, make_padding
from anystep.inspection.read_lengths import ReadLengths
from anystep.order.packing import PackingPolicy, pack
from anystep.order.permutation import round_keys
from anystep.tasks.tensors import from_tensors
from anystep.train.datasets.config import DatasetConfig
from anystep.train.datasets.configured_tasks import check_lengths
from anystep.train.datasets.data_state import (
  DataState,
  UncachedState,
  check_same,
  record_state,
  require_uncached,
)
from anystep.train.datasets.run_data import EvaluationBatch

# Number of examples that are packed together.
_PACKED_EXAMPLES = 1024
# Limit of TensorFlow's texts, which can contain stacks.
_MAX_ERROR_CHARACTERS = 500


def restart_seed(state: UncachedState, step: int) -> int:
  """Return SeqIO's seed for a start of a run at a step: each start has an order of its own."""
  name = state.mixture_or_task_name
  return int(round_keys("restart", name, state.split, state.seed, step)[0]) % (1 << 31)


@dataclasses.dataclass(frozen=True)
class UncachedDataset:
  """A task, or a mixture, whose preprocessors run while it is trained on: a `RunDataset`.

  Attributes:
    config: the configuration.
    tasks: registered tasks, by name.
    registered: the task or mixture.
    reason: why its examples are not read in place, by a plan.
  """

  config: DatasetConfig
  tasks: Mapping[str, seqio.Task]
  registered: seqio.Task | seqio.Mixture
  reason: str

  def run_order(self, checkpointed: tuple[int, DataState] | None = None) -> UncachedOrder:
    """Return the dataset with what checkpoints keep of it.

    Raises:
      AnystepError: 76 `resume_contract`; 78 `batch_size`, `feature_length`, and `use_cached` for what needs
        a plan; 66 `split_missing`.
    """
    config = self.config
    before = None if checkpointed is None else require_uncached(checkpointed[1])
    size = config.batch_size
    require(size > 0, "batch_size", expected="at least 1", got=size, fix="set BATCH_SIZE to 1 or more")
    for name, value in (("DATA_PLAN", config.plan), ("epoch_policy", config.epoch_policy)):
      fix = f"leave {name} out, or set USE_CACHED_TASKS = True: no plan says what comes from a source"
      require(value is None, "use_cached", expected=f"None as {name}", got=value, fix=fix)
    splits = sorted({split for task in self.tasks.values() for split in task.splits})
    if config.split not in splits:
      raise AnystepError(
        ExitCode.NO_INPUT,
        "split_missing",
        task=config.mixture_or_task_name,
        expected=", ".join(splits),
        got=config.split,
        fix="name a split that there is; where it is the evaluation's, --gin.EVAL_DATASET=None",
      )
    for task in self.tasks.values():
      check_lengths(task, config.task_feature_lengths)
    state = UncachedState(
      mixture_or_task_name=config.mixture_or_task_name,
      split=config.split,
      batch_size=config.batch_size,
      seed=config.seed,
      feature_lengths=dict(config.task_feature_lengths),
      packing=config.packing,
    )
    if before is not None:
      fix = "run with the configuration that training started with, or in another MODEL_DIR"
      check_same(dataclasses.asdict(before), dataclasses.asdict(state), fix)
    return UncachedOrder(self, state)


@dataclasses.dataclass(frozen=True)
class UncachedOrder:
  """A dataset with what checkpoints keep of it: a `RunOrder`."""

  dataset: UncachedDataset
  state: UncachedState

  def open(self, converter: FeatureConverter) -> UncachedData:
    """Return the data in a converter's form. One example is read and converted first, to find errors early.

    Raises:
      AnystepError: 66 `source_empty`; as `UncachedData.examples` and the converter.
    """
    config = self.dataset.config
    data = UncachedData(self.dataset, self.state, converter)
    for batch in data.batches(data.examples(num_epochs=1), 1, drop_remainder=True):
      converter(batch, config.task_feature_lengths, data.pack_examples(batch)[1])
      return data
    raise AnystepError(
      ExitCode.NO_INPUT,
      "source_empty",
      task=config.mixture_or_task_name,
      split=config.split,
      fix="check that the source's files are where the task looks for them, and what its preprocessors drop",
    )


@dataclasses.dataclass(frozen=True)
class UncachedData:
  """Such a dataset, in the form that a converter gives it: a `RunData`."""

  dataset: UncachedDataset
  state: UncachedState
  converter: FeatureConverter

  @property
  def batch_sizes(self) -> list[int]:
    """The only batch size."""
    return [self.state.batch_size]

  @property
  def num_examples(self) -> None:
    """None: preprocessors may drop or make examples."""
    return None

  def count_cuts(self) -> list[ReadLengths]:
    """Return nothing: how long examples are is known only as they come."""
    return []

  @property
  def caveat(self) -> str:
    """Warning of what a run loses without a plan."""
    name = self.state.mixture_or_task_name
    return (
      f"USE_CACHED_TASKS = False, and {self.dataset.reason}: {name} is trained on straight from its source,"
      " without exact resume. After a restart the data begins anew in another seeded order; which examples"
      " come depends on the number of hosts, and anystep-data cannot tell what a step saw."
    )

  def open_stream(self, rows: tuple[int, int] = (0, 1)) -> UncachedStream:
    """Open batches of shuffled examples; each host reads its own share of the source.

    Raises:
      AnystepError: 78 `rows` where hosts cannot share a batch.
    """
    host, host_count = rows
    batch_size = self.state.batch_size
    require(
      batch_size % host_count == 0,
      "rows",
      expected=f"a number of hosts that divides {batch_size}",
      got=host_count,
      fix="set BATCH_SIZE to a multiple of the number of hosts",
    )
    shard_info = seqio.ShardInfo(index=host, num_shards=host_count) if host_count > 1 else None
    numbers = np.arange(batch_size).reshape(host_count, -1)[host]

    def batches(step: int) -> Iterator[Rows]:
      examples = self.examples(
        shuffle=True,
        seed=restart_seed(self.state, step),
        num_epochs=self.dataset.config.num_epochs,
        shard_info=shard_info,
      )
      return self._rows(examples, len(numbers))

    return UncachedStream(batches, numbers)

  def record(self, model_dir: epath.PathLike, step: int) -> None:
    """Write that no plan says what the run's steps see, for `anystep-data`."""
    record_state(model_dir, self.state, step)

  def evaluation_batches(self) -> Iterator[EvaluationBatch]:
    """Yield every example once, in the source's order."""
    batch_size = self.state.batch_size
    for examples in self.batches(self.examples(num_epochs=1), batch_size):
      converted = self.converter(examples, self.state.feature_lengths)
      real = np.arange(batch_size) < len(next(iter(examples.values())))
      yield EvaluationBatch(examples, {name: _fill(rows, real) for name, rows in converted.items()}, real)

  def examples(
    self,
    *,
    shuffle: bool = False,
    seed: int | None = None,
    num_epochs: int | None = None,
    shard_info: seqio.ShardInfo | None = None,
  ) -> tf.data.Dataset:
    """Return SeqIO's dataset; by default in the source's order, with the configuration's seed.

    Raises:
      AnystepError: 78 `source_refused`, with what SeqIO or the source says.
    """
    state = self.state
    try:
      return self.dataset.registered.get_dataset(
        dict(state.feature_lengths),
        split=state.split,
        use_cached=False,
        shuffle=shuffle,
        seed=state.seed if seed is None else seed,
        shard_info=shard_info,
        num_epochs=num_epochs,
      )
    except AnystepError:
      raise
    except Exception as error:
      raise AnystepError(
        ExitCode.CONFIG,
        "source_refused",
        task=state.mixture_or_task_name,
        split=state.split,
        got=one_line(error)[:_MAX_ERROR_CHARACTERS],
        fix="mend the task or its source, or cache it: anystep-cache names what fails and where",
      ) from error

  def batches(self, examples: tf.data.Dataset, size: int, *, drop_remainder: bool = False) -> Iterator[Batch]:
    """Yield batches of `size` examples.

    Raises:
      AnystepError: 65 `source_failed`, with what TensorFlow says.
    """
    dataset = examples.ragged_batch(size, drop_remainder=drop_remainder)
    iterator = iter(dataset.prefetch(self.dataset.config.prefetch_batches))
    while True:
      try:
        tensors = next(iterator)
      except StopIteration:
        return
      except tf.errors.OpError as error:
        raise AnystepError(
          ExitCode.DATA,
          "source_failed",
          task=self.state.mixture_or_task_name,
          split=self.state.split,
          got=one_line(error)[:_MAX_ERROR_CHARACTERS],
          fix="mend the task or its source: anystep-cache --dry_run names the preprocessor and the place",
        ) from error
      yield from_tensors(tensors)

  def pack_examples(self, batch: Batch) -> tuple[Batch, np.ndarray | None]:
    """Return examples in the order of their rows, and how many each row has; None without packing."""
    if self.state.packing == PackingPolicy.NONE:
      return batch, None
    features = {
      name: feature
      for name, feature in batch.items()
      if name in self.state.feature_lengths and isinstance(feature, Ragged)
    }
    limits = [self.state.feature_lengths[name] for name in features]
    lengths = np.minimum(np.stack([feature.lengths for feature in features.values()], axis=1), limits)
    starts, order = pack(lengths, limits, self.state.packing)
    return {name: _in_order(feature, order) for name, feature in features.items()}, np.diff(starts)

  def _rows(self, examples: tf.data.Dataset, size: int) -> Iterator[Rows]:
    """Yield the model's features, `size` rows at a time."""
    packed = self.state.packing != PackingPolicy.NONE
    rest: Rows = {}
    for batch in self.batches(examples, _PACKED_EXAMPLES if packed else size, drop_remainder=not packed):
      ordered, counts = self.pack_examples(batch)
      rows = self.converter(ordered, self.state.feature_lengths, counts)
      if rest:
        rows = {name: np.concatenate([rest[name], values]) for name, values in rows.items()}
      num_rows = len(next(iter(rows.values())))
      for start in range(0, num_rows - size + 1, size):
        yield {name: values[start : start + size] for name, values in rows.items()}
      rest = {name: values[num_rows - num_rows % size :] for name, values in rows.items()}


class UncachedStream(Iterator[Rows]):
  """Batches that begin anew at each `seek`.

  Args:
    batches: returns the batches of a start at a step.
    rows: numbers of this host's rows in a whole batch, `(rows,) int64`.
  """

  def __init__(self, batches: Callable[[int], Iterator[Rows]], rows: np.ndarray):
    self._batches = batches
    self._rows = rows
    self._iterator: Iterator[Rows] | None = None
    self.step = 0

  def __next__(self) -> Rows:
    if self._iterator is None:
      self._iterator = self._batches(self.step)
    try:
      batch = next(self._iterator)
    except StopIteration:
      raise AnystepError(
        ExitCode.CONFIG,
        "data_ended",
        step=self.step,
        expected="another batch",
        got="the end of num_epochs",
        fix="train for fewer steps or for more epochs",
      ) from None
    self.step += 1
    return batch

  def seek(self, step: int) -> None:
    """Make `step` the next one, with the data from its beginning, in that step's own order."""
    self.close()
    self.step = step

  def rows_at(self, step: int) -> np.ndarray:
    """Return the rows of any step's batch that this stream makes, `(rows,) int64`."""
    del step
    return self._rows

  def close(self) -> None:
    """Drop what was read ahead."""
    self._iterator = None

  def __enter__(self) -> UncachedStream:
    return self

  def __exit__(self, *exc_info: object) -> None:
    self.close()


def _in_order(feature: Ragged, order: np.ndarray) -> Ragged:
  rows = feature.rows()
  return Ragged.of_rows([rows[row] for row in order], feature.dtype, feature.shape[2:])


def _fill(rows: np.ndarray | Ragged, real: np.ndarray) -> np.ndarray:
  """Return rows, filled with zeros to a whole batch."""
  assert isinstance(rows, np.ndarray), "a model's features are dense"
  filled = make_padding((len(real), *rows.shape[1:]), rows.dtype)
  filled[: len(rows)] = rows
  return filled
