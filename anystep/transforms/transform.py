"""What a task's examples go through at reading, after the cache (docs/order.md#draws-after-the-cache)."""

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
  """Which records a batch of one task's examples are.

  Attributes:
    epochs, indices: `(rows,) int64` each.
    task, split: whose they are. seed: the plan's.
    place: the transform's among those that the examples go through, from 0.
  """

  epochs: np.ndarray
  indices: np.ndarray
  task: str
  split: str
  seed: int
  place: int = 0

  def only(self, rows: np.ndarray) -> Records:
    """Some of them, in the order of `rows`, `(kept,) int64`."""
    return self._replace(epochs=self.epochs[rows], indices=self.indices[rows])


class Transform(abc.ABC):
  """One example to one, or to none, whatever stands beside it; random draws follow from its record alone.

  Attributes:
    identity: JSON that names what is done: where it differs, so may results. Part of a unit table's name, and
      plans hold a hash of it.
    appended_tokens: by feature, where sequences are at most cut to the feature lengths and given this many
      tokens more: then lengths follow from the cache's by arithmetic. None where only running it tells.
    may_drop: whether some examples may be dropped.
    is_random: whether anything is drawn.
    does_nothing: whether every example comes out as it went in, so that it is as good as none.
  """

  identity: Any
  appended_tokens: Mapping[str, int] | None = None
  may_drop: bool = False
  is_random: bool = False
  does_nothing: bool = False

  @abc.abstractmethod
  def __call__(self, batch: Batch, records: Records) -> Batch:
    """Transforms examples none of which is dropped: as many come out, in their order.

    Raises:
      AnystepError: 65 `example_dropped` where one is.
    """

  def survey(self, batch: Batch, records: Records) -> tuple[Batch, np.ndarray]:
    """Transforms any examples: those that are kept, and which of the rows they were, `(kept,) int64`."""
    return self(batch, records), np.arange(len(records.indices))


Transforms = Mapping[str, Transform | Sequence[Transform]]
"""What tasks' examples go through at reading, by task name: one transform, or several in order."""


@typing.final
class Chain(Transform):
  """Transforms one after the other, each of what the one before it keeps.

  Two that draw at random draw differently, for each is told its place; those of a chain in the chain take
  places in this one.
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
    self.appended_tokens = _sum([transform.appended_tokens for transform in self.transforms])

  def __call__(self, batch: Batch, records: Records) -> Batch:
    """See `Transform`."""
    for place, transform in enumerate(self.transforms):
      batch = transform(batch, records._replace(place=place))
    return batch

  def survey(self, batch: Batch, records: Records) -> tuple[Batch, np.ndarray]:
    """See `Transform`."""
    rows = np.arange(len(records.indices))
    for place, transform in enumerate(self.transforms):
      batch, kept = transform.survey(batch, records.only(rows)._replace(place=place))
      rows = rows[kept]
      if not len(rows):
        # A transform that makes examples one by one could not tell the next which features they have.
        break
    return batch, rows


def _sum(appended: Sequence[Mapping[str, int] | None]) -> Mapping[str, int] | None:
  known = [tokens for tokens in appended if tokens is not None]
  if len(known) < len(appended):
    return None
  names = sorted({name for tokens in known for name in tokens})
  return {name: sum(tokens.get(name, 0) for tokens in known) for name in names}


def identity_of(transform: Transform | None, *, task: str) -> Any:
  """What names a task's transform in any process, as JSON; None where there is none.

  Raises:
    AnystepError: 78 `transform_identity` where its identity is no JSON, or says where an object lies in
      memory, which another process would not find again.
  """
  if transform is None:
    return None
  try:
    address = _ADDRESS.search(canonical_json(transform.identity))
    got = address and address[0]
  except (TypeError, ValueError) as error:
    got = str(error)
  if got:
    raise AnystepError(
      ExitCode.CONFIG,
      "transform_identity",
      task=task,
      expected="what is the same in every process",
      got=got,
      fix="give the transform an identity=, or let its function capture no such object",
    )
  return transform.identity


def transforms_sha256(transform: Transform | None, *, task: str) -> str:
  """Names what a task's examples go through at reading: sha256 of the identity's canonical JSON.

  Of what does nothing it is that of null.

  Raises:
    AnystepError: as `identity_of`.
  """
  identity = identity_of(transform, task=task)
  named = None if transform is None or transform.does_nothing else identity
  return hashlib.sha256(canonical_json(named).encode()).hexdigest()


def as_transform(value: Transform | Sequence[Transform] | None) -> Transform | None:
  """One transform of what `transforms=` may give for a task; None where there is nothing to do.

  Raises:
    AnystepError: 78 `transform` for what is no transform, such as a plain function.
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
        fix="wrap a function of an example in Map, RandomMap or Filter, one of a batch in MapBatch",
      )
  if not transforms:
    return None
  return transforms[0] if len(transforms) == 1 else Chain(transforms)


def transforms_by_task(
  transforms: Transforms | None, tasks: Collection[str], *, others: Collection[str] = ()
) -> dict[str, Transform]:
  """What `transforms=` gives for tasks that have any.

  Args:
    transforms: by task name, one or several in order. Names of further tasks are passed over, but not while
      one of `tasks` has none: such a name is misspelled.
    tasks: the tasks that are read.
    others: further tasks that may be named.

  Raises:
    AnystepError: 78 `transforms` for what is no mapping; 64 `task_unknown` for a misspelled name; as
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
      expected=f"names of tasks, of which these have no transforms: {', '.join(without)}",
      got=unknown,
      fix="correct the names in transforms, or leave them out",
    )
  by_task = {name: as_transform(value) for name, value in transforms.items()}
  return {name: transform for name, transform in by_task.items() if transform is not None}


def random_keys(records: Records) -> np.ndarray:
  """What a transform's draws for each record are keyed by, `(rows, 2) uint64`: numpy's Philox takes a row.

  They follow from the record's index and epoch and the transform's place, not from how, where or beside what
  the record is read: the first two words of sub_keys(K, index), K the round keys of ("transform", task,
  split, seed, epoch, place).

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
