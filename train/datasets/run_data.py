"""The data of a run as the train loop and the evaluation use it, wherever it comes from.

A run finds its datasets (`RunDataset`), fixes the order in which it takes them (`RunOrder`, whose state
checkpoints keep), and reads them in that order (`RunData`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple, Protocol

import numpy as np
import seqio
from etils import epath

from anystep.errors import AnystepError, ExitCode
from anystep.features.converters import FeatureConverter, Rows
from anystep.features.ragged import Batch
from anystep.inspection.read_lengths import ReadLengths
from anystep.train.datasets.config import DatasetConfig
from anystep.train.datasets.data_state import DataState


class RunStream(Protocol):
  """Batches from any step on; a context manager."""

  def __iter__(self) -> Iterator[Rows]: ...

  def __next__(self) -> Rows: ...

  def __enter__(self) -> RunStream: ...

  def __exit__(self, *exc_info: object) -> None: ...

  def seek(self, step: int) -> None:
    """Make `step` the next one."""

  def rows_at(self, step: int) -> np.ndarray:
    """Return the rows of a step's batch that this stream makes, `(rows,) int64`."""


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


class RunDataset(Protocol):
  """A task, or the tasks of a mixture, found and checked; no device was touched for it."""

  @property
  def config(self) -> DatasetConfig:
    """Configuration that names the data."""

  @property
  def tasks(self) -> Mapping[str, seqio.Task]:
    """Registered tasks, by name."""

  def run_order(self, checkpointed: tuple[int, DataState] | None = None) -> RunOrder:
    """Return the order of a run that starts, or that goes on from a checkpoint's step and state.

    Raises:
      AnystepError: 76 `resume_contract` where the run began otherwise.
    """


class RunOrder(Protocol):
  """A dataset with the order in which a run takes it."""

  @property
  def state(self) -> DataState:
    """State of the data that checkpoints keep."""

  def open(self, converter: FeatureConverter) -> RunData:
    """Return the data in the form that a converter gives it, after reading an example.

    Data that cannot be read fails here, before the run starts.
    """


class RunData(Protocol):
  """A dataset in the order and form in which a run takes it."""

  @property
  def dataset(self) -> RunDataset:
    """The dataset."""

  @property
  def state(self) -> DataState:
    """State of the data that checkpoints keep."""

  @property
  def batch_sizes(self) -> list[int]:
    """Rows of a batch, one size after another in time."""

  @property
  def num_examples(self) -> int | None:
    """Number of examples that an evaluation sees; None where it is not known before."""

  def count_cuts(self) -> list[ReadLengths]:
    """Count, task by task, what the lengths of rows cut of the examples; nothing where no cache says it."""

  @property
  def caveat(self) -> str | None:
    """Warning of what a run on this data loses, for people; None where everything is exact."""

  def open_stream(self, rows: tuple[int, int] = (0, 1)) -> RunStream:
    """Open the batches from step 0 on; of each batch the rows of (host, host count)."""

  def evaluation_batches(self) -> Iterator[EvaluationBatch]:
    """Yield every example once, in order."""

  def record(self, model_dir: epath.PathLike, step: int) -> None:
    """Write what `anystep-data` needs to know of the data of a run that goes on with a step."""


def only_task(dataset: RunDataset) -> seqio.Task:
  """Return the only task of a dataset.

  Raises:
    AnystepError: 78 `mixture` for a mixture of several.
  """
  if len(dataset.tasks) > 1:
    raise AnystepError(
      ExitCode.CONFIG,
      "mixture",
      expected=f"one task, such as {min(dataset.tasks)}",
      got=dataset.config.mixture_or_task_name,
      fix="set eval/datasets.DatasetConfig.mixture_or_task_name to one task, or EVAL_DATASET to None",
    )
  return next(iter(dataset.tasks.values()))
