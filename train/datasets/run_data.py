"""What the train loop and the evaluation ask of data, wherever it comes from."""

from __future__ import annotations

import abc
from collections.abc import Iterator, Mapping
from typing import NamedTuple, Protocol

import numpy as np
import seqio
from etils import epath

from anystep.errors import AnystepError, ExitCode
from anystep.features.converters import FeatureConverter, Rows
from anystep.features.ragged import Batch
from anystep.train.datasets.config import DatasetConfig
from anystep.train.datasets.data_state import DataState, record_state


class RunStream(Protocol):
  """Batches from any step on; a context manager."""

  def __iter__(self) -> Iterator[Rows]: ...

  def __next__(self) -> Rows: ...

  def __enter__(self) -> RunStream: ...

  def __exit__(self, *exc_info: object) -> None: ...

  def seek(self, step: int) -> None:
    """Makes `step` the next one."""

  def rows_at(self, step: int) -> np.ndarray:
    """The rows of a step's batch that this stream makes, `(rows,) int64`."""


class EvaluationBatch(NamedTuple):
  """Some examples as the metrics take them, and as the model does.

  Attributes:
    examples: of the rows that are no padding.
    rows: the model's features, `(batch_size, ...)`.
    real: which rows are no padding, `(batch_size,) bool`.
  """

  examples: Batch
  rows: Rows
  real: np.ndarray


class RunDataset(abc.ABC):
  """A task, or the tasks of a mixture, found and checked; no device was touched for it.

  Attributes:
    config: what was asked for.
    tasks: by name.
  """

  config: DatasetConfig
  tasks: Mapping[str, seqio.Task]

  @property
  def task(self) -> seqio.Task:
    """The only task.

    Raises:
      AnystepError: 78 `mixture` for a mixture of several.
    """
    if len(self.tasks) > 1:
      raise AnystepError(
        ExitCode.CONFIG,
        "mixture",
        expected=f"one task, such as {min(self.tasks)}",
        got=self.config.mixture_or_task_name,
        fix="set eval/datasets.DatasetConfig.mixture_or_task_name to one task, or EVAL_DATASET to None",
      )
    return next(iter(self.tasks.values()))

  @abc.abstractmethod
  def run_state(self, checkpointed: tuple[int, DataState] | None = None) -> DataState:
    """What a run that starts, or goes on from a checkpoint's step and state, keeps of the data.

    Raises:
      AnystepError: 76 `resume_contract` where the run began otherwise.
    """

  @abc.abstractmethod
  def under(self, state: DataState, converter: FeatureConverter) -> RunData:
    """The dataset as that state says, with an example read, so that what cannot be fails now."""


class RunData(abc.ABC):
  """A dataset in the order and form in which a run takes it.

  Attributes:
    dataset: what it is of.
  """

  dataset: RunDataset

  @property
  @abc.abstractmethod
  def state(self) -> DataState:
    """What checkpoints keep of it."""

  @property
  @abc.abstractmethod
  def batch_sizes(self) -> list[int]:
    """Rows of a batch, one after another in time."""

  @property
  @abc.abstractmethod
  def num_examples(self) -> int | None:
    """How many examples an evaluation sees; None where nobody knows before."""

  @property
  def caveat(self) -> str | None:
    """What is not guaranteed of a run that trains on it, for people; None where everything is."""
    return None

  @abc.abstractmethod
  def open_stream(self, rows: tuple[int, int] = (0, 1)) -> RunStream:
    """Its batches, from step 0 on; of each the rows of (host, host count)."""

  @abc.abstractmethod
  def evaluation_batches(self) -> Iterator[EvaluationBatch]:
    """Every example once, in order."""

  def record(self, model_dir: epath.PathLike, step: int) -> None:
    """Writes what `anystep-data` needs to know of the data of a run that goes on with a step."""
    record_state(model_dir, self.state, step)
