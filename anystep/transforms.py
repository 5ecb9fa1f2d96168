"""What a task's examples go through at reading, after the cache (design section 7)."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from anystep.examples import Batch


class Records(NamedTuple):
  """Which records a batch of one task's examples are.

  Attributes:
    epochs, indices: `(rows,) int64` each.
    task, split: whose they are. seed: the plan's.
  """

  epochs: np.ndarray
  indices: np.ndarray
  task: str
  split: str
  seed: int


class Transform(abc.ABC):
  """One example to one, or to none, whatever stands beside it; random draws follow from its record alone.

  Attributes:
    identity: JSON that names what is done: where it differs, so may results. Part of a unit table's name.
    appended_tokens: by feature, where sequences are at most cut to the feature lengths and given this many
      tokens more: then lengths follow from the cache's by arithmetic. None where only running it tells.
    may_drop: whether some examples may be dropped.
    is_random: whether anything is drawn.
  """

  identity: Any
  appended_tokens: Mapping[str, int] | None = None
  may_drop: bool = False
  is_random: bool = False

  @abc.abstractmethod
  def __call__(self, batch: Batch, records: Records) -> Batch:
    """Transforms examples none of which is dropped: as many come out, in their order.

    Raises:
      AnystepError: 65 `example_dropped` where one is.
    """

  def survey(self, batch: Batch, records: Records) -> tuple[Batch, np.ndarray]:
    """Transforms any examples: those that are kept, and which of the rows they were, `(kept,) int64`."""
    return self(batch, records), np.arange(len(records.indices))
