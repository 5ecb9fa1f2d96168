"""Transforms of a task's examples at reading, after the cache (docs/order.md#draws-after-the-cache)."""

from __future__ import annotations

import abc
import hashlib
import re
import typing
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from anystep.errors import AnystepError, ExitCode
from anystep.features.ragged import Batch
from anystep.files.json_files import canonical_json
from anystep.order.permutation import round_keys, sub_keys

# What Python's own repr of an object ends with.
REMAKE_TABLE = "remove the task's unit tables (units/ beside its cache) and start a new plan"
_ADDRESS = re.compile(r"[^\"]* at 0x[0-9a-fA-F]{6,}")


class Records(NamedTuple):
  """Records of a batch of one task's examples.

  Attributes:
    epochs, indices: each row's epoch and index in the cache, `(rows,) int64` each.
    task, split: names of the examples' task and split. seed: the plan's seed.
    place: position of the current transform among the task's transforms, from 0.
  """

  epochs: np.ndarray
  indices: np.ndarray
  task: str
  split: str
  seed: int
  place: int = 0

  def only(self, rows: np.ndarray) -> Records:
    """Return the records of some rows, in the order of `rows`, `(kept,) int64`."""
    return self._replace(epochs=self.epochs[rows], indices=self.indices[rows])


class Transform(abc.ABC):
  """Function from one example to one or none, which does not depend on other examples of the batch.

  Its random draws depend on the example's record only.

  Attributes:
    identity: JSON that identifies the transform: equal identities mean equal results. It is part of a unit
      table's name, and plans hold a hash of it.
    appended_tokens: number of tokens that are appended to each feature, by name, for a transform that else at
      most cuts sequences to the feature lengths. Then lengths follow from the cache's by arithmetic. None if
      lengths are known only by running the transform.
    may_drop: whether examples may be dropped.
    is_random: whether the transform draws random numbers.
    does_nothing: whether every example comes out unchanged, so that the transform can be left out.
  """

  identity: Any
  appended_tokens: Mapping[str, int] | None = None
  may_drop: bool = False
  is_random: bool = False
  does_nothing: bool = False

  @abc.abstractmethod
  def __call__(self, batch: Batch, records: Records) -> Batch:
    """Transform examples, none of which is dropped: as many come out, in the same order.

    Raises:
      AnystepError: 65 `example_dropped` if the transform drops one.
    """

  def survey(self, batch: Batch, records: Records) -> tuple[Batch, np.ndarray]:
    """Transform examples, of which some may be dropped; return the kept ones and their rows, `(kept,)`."""
    return self(batch, records), np.arange(len(records.indices))

  def count_cut_tokens(self, batch: Batch, records: Records) -> np.ndarray | None:
    """Return how many tokens the transform itself cuts off each example to fit lengths, `(rows,) int64`.

    Tokens that it leaves for a converter to cut do not count. None where that is not known. Functions that
    are told no lengths cut nothing to fit them.
    """
    return np.zeros(len(records.indices), np.int64)


Transforms = Mapping[str, Transform | Sequence[Transform]]
"""Transforms by task name: one, or several in order."""


@typing.final
class Chain(Transform):
  """Transforms that run one after the other, each on the examples that the one before keeps.

  Each transform's draws differ, because its position is part of their keys. A chain within the chain is
  replaced by its transforms.
  """

  def __init__(self, transforms: Sequence[Transform]):
    self.transforms: tuple[Transform, ...] = tuple(
      member
      for transform in transforms
      for member in (transform.transforms if isinstance(transform, Chain) else [transform])
    )
    self.identity = [transform.identity for transform in self.transforms]
    self.does_nothing = all(transform.does_nothing for transform in self.transforms)
    self.may_drop = any(transform.may_drop for transform in self.transforms)
    self.is_random = any(transform.is_random for transform in self.transforms)
    self.appended_tokens = _add_up([transform.appended_tokens for transform in self.transforms])

  def __call__(self, batch: Batch, records: Records) -> Batch:
    """See `Transform`."""
    for position, transform in enumerate(self.transforms):
      batch = transform(batch, records._replace(place=position))
    return batch

  def survey(self, batch: Batch, records: Records) -> tuple[Batch, np.ndarray]:
    """See `Transform`."""
    rows = np.arange(len(records.indices))
    for position, transform in enumerate(self.transforms):
      batch, kept_rows = transform.survey(batch, records.only(rows)._replace(place=position))
      rows = rows[kept_rows]
      if not len(rows):
        # Without examples, a transform such as `Map` does not know the features for the next one.
        break
    return batch, rows

  def count_cut_tokens(self, batch: Batch, records: Records) -> np.ndarray | None:
    """See `Transform`."""
    cut_tokens = np.zeros(len(records.indices), np.int64)
    rows = np.arange(len(records.indices))
    for position, transform in enumerate(self.transforms):
      if not len(rows):
        break
      records_of_rows = records.only(rows)._replace(place=position)
      more = transform.count_cut_tokens(batch, records_of_rows)
      if more is None:
        return None
      cut_tokens[rows] += more
      batch, kept_rows = transform.survey(batch, records_of_rows)
      rows = rows[kept_rows]
    return cut_tokens


def _add_up(appended: Sequence[Mapping[str, int] | None]) -> Mapping[str, int] | None:
  """Add up appended tokens by feature; return None if a transform's are not known."""
  counts = [tokens for tokens in appended if tokens is not None]
  if len(counts) < len(appended):
    return None
  names = sorted({name for tokens in counts for name in tokens})
  return {name: sum(tokens.get(name, 0) for tokens in counts) for name in names}


def identity_of(transform: Transform | None, *, task: str) -> Any:
  """Return the identity of a task's transform as JSON; None without a transform.

  Raises:
    AnystepError: 78 `transform_identity` if the identity is no JSON, or contains an object's address in
      memory, which differs in every process.
  """
  if transform is None:
    return None
  try:
    address = _ADDRESS.search(canonical_json(transform.identity))
    problem = address and address[0]
  except (TypeError, ValueError) as error:
    problem = str(error)
  if problem:
    raise AnystepError(
      ExitCode.CONFIG,
      "transform_identity",
      task=task,
      expected="an identity that is the same in every process",
      got=problem,
      fix="give the transform an identity=, or let its function capture no such object",
    )
  return transform.identity


def transforms_sha256(transform: Transform | None, *, task: str) -> str:
  """Return the sha256 of the canonical JSON of the identity of a task's transform.

  For no transform, or one that does nothing, the JSON is null.

  Raises:
    AnystepError: as `identity_of`.
  """
  identity = identity_of(transform, task=task)
  effective = None if transform is None or transform.does_nothing else identity
  return hashlib.sha256(canonical_json(effective).encode()).hexdigest()


def as_transform(value: Transform | Sequence[Transform] | None) -> Transform | None:
  """Return a task's value in `transforms=` as one transform; None if there is none.

  Raises:
    AnystepError: 78 `transform` for a value that is no transform, such as a plain function.
  """
  if value is None:
    return None
  transforms = value if isinstance(value, Sequence) else [value]
  for transform in transforms:
    if not isinstance(transform, Transform) or not hasattr(transform, "identity"):
      raise AnystepError(
        ExitCode.CONFIG,
        "transform",
        expected="transforms, each with an identity",
        got=repr(transform),
        fix="wrap a function of an example in Map, RandomMap or Filter, and one of a batch in MapBatch",
      )
  if not transforms:
    return None
  return transforms[0] if len(transforms) == 1 else Chain(transforms)


def transforms_by_task(
  transforms: Transforms | None, tasks: Collection[str], *, others: Collection[str] = ()
) -> dict[str, Transform]:
  """Return the transforms of those tasks that have any.

  Args:
    transforms: by task name, one or several in order. Unknown names are ignored, unless one of `tasks` has no
      transform: then an unknown name is likely misspelled.
    tasks: names of the tasks that are read.
    others: names of further tasks that are allowed.

  Raises:
    AnystepError: 78 `transforms` for a value that is no mapping; 64 `task_unknown` for a misspelled name; as
      `as_transform`.
  """
  if transforms is None:
    return {}
  if not isinstance(transforms, Mapping):
    raise AnystepError(
      ExitCode.CONFIG,
      "transforms",
      expected="transforms by task name",
      got=repr(transforms),
      fix=f"name the task: transforms={{{min(tasks, default='task')!r}: ...}}",
    )
  unknown = sorted(transforms.keys() - {*tasks, *others}, key=str)
  without = sorted(set(tasks) - transforms.keys())
  if unknown and without:
    raise AnystepError(
      ExitCode.USAGE,
      "task_unknown",
      expected=f"names of tasks; these have no transforms: {', '.join(without)}",
      got=unknown,
      fix="correct the names in transforms, or leave them out",
    )
  by_task = {name: as_transform(value) for name, value in transforms.items()}
  return {name: transform for name, transform in by_task.items() if transform is not None}


def random_keys(records: Records) -> np.ndarray:
  """Return the key of a transform's draws for each record, `(rows, 2) uint64`: numpy's Philox takes a row.

  A key is the first two words of sub_keys(K, index), where K are the round keys of ("transform", task, split,
  seed, epoch, place). So it does not depend on where and with which other records the record is read.

  >>> records = Records(np.array([1]), np.array([7]), "demo", "train", 0)
  >>> [hex(word) for word in random_keys(records)[0]]
  ['0x1db52cb941bce55', '0xc9ba6b5a6cb07a0d']
  """
  keys = np.empty((len(records.indices), 2), np.uint64)
  for epoch in np.unique(records.epochs).tolist():
    rows = records.epochs == epoch
    epoch_keys = round_keys("transform", records.task, records.split, records.seed, epoch, records.place)
    keys[rows] = sub_keys(epoch_keys, records.indices[rows])[:, :2]
  return keys
