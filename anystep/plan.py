"""The plan: which unit of which task is in which row of which step (design section 6)."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from anystep.cache import Cache
from anystep.epochs import EpochPolicy, UnitOrder
from anystep.errors import AnystepError, ExitCode
from anystep.manifest import canonical_json, is_count

PLAN_VERSION = 1
PADDING_TASK = -1


class BatchRows(NamedTuple):
  """What a batch consists of, `(rows,) int64` each; `task` counts the plan's tasks in name order.

  A padding row has task -1 and zeros.
  """

  task: np.ndarray
  unit: np.ndarray
  epoch: np.ndarray
  shard: np.ndarray
  place: np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannedTask:
  """The cache that a plan was made for: resuming on any other is refused."""

  fingerprint: str
  manifest_sha256: str
  num_shards: int
  block_records: int
  num_units: int
  unit_table: str | None = None

  def __post_init__(self):
    _validate(
      fingerprint=isinstance(self.fingerprint, str),
      manifest_sha256=isinstance(self.manifest_sha256, str),
      num_shards=is_count(self.num_shards, least=1),
      block_records=is_count(self.block_records, least=1),
      num_units=is_count(self.num_units),
    )

  @classmethod
  def of(cls, cache: Cache) -> PlannedTask:
    """What a plan remembers of a cache, whose units are its examples."""
    m = cache.manifest
    return cls(
      fingerprint=m.fingerprint.reader_sha256,
      manifest_sha256=cache.manifest_sha256,
      num_shards=m.num_shards,
      block_records=m.block_records,
      num_units=m.num_examples,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class SegmentTask:
  """A task's part in a segment: its rate, its stripes per period, and the unit it starts with."""

  rate: str
  quota: int
  first_unit: int

  def __post_init__(self):
    _validate(quota=is_count(self.quota), first_unit=is_count(self.first_unit))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Segment:
  """A stretch of steps from start_step on, under one batch size and one set of tasks."""

  start_step: int
  batch_size: int
  lanes: int
  first_stripe: int
  tasks: Mapping[str, SegmentTask]
  reason: str

  def __post_init__(self):
    _validate(
      start_step=is_count(self.start_step),
      batch_size=is_count(self.batch_size, least=1),
      lanes=is_count(self.lanes, least=1) and self.batch_size % self.lanes == 0,
      first_stripe=is_count(self.first_stripe),
      tasks=len(self.tasks) == 1,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
  """All the data state there is: the batch of step t follows from the plan and t.

  Attributes:
    split: of every task.
    seed: keys the order of later epochs and the draws at reading; the preshuffle has the cache's own.
    num_epochs: after how many epochs of some task the data ends; None for never.
    feature_lengths: tokens per feature that rows are cut and filled to.
    epoch_policy: how later epochs are ordered.
    tasks: the caches, by task name.
    segments: by start_step.
  """

  split: str
  seed: int
  num_epochs: int | None
  feature_lengths: Mapping[str, int]
  epoch_policy: EpochPolicy
  tasks: Mapping[str, PlannedTask]
  segments: Sequence[Segment]
  packing: str = "none"
  rate_unit: str = "examples"

  def __post_init__(self):
    _validate(
      split=isinstance(self.split, str),
      seed=isinstance(self.seed, int),
      num_epochs=self.num_epochs is None or is_count(self.num_epochs, least=1),
      feature_lengths=all(is_count(length) for length in self.feature_lengths.values()),
      packing=self.packing == "none",
      rate_unit=self.rate_unit == "examples",
      segments=len(self.segments) == 1,
      tasks=all(name in self.tasks for segment in self.segments for name in segment.tasks),
      num_units=all(task.num_units for task in self.tasks.values()),
    )

  @classmethod
  def start(
    cls,
    cache: Cache,
    *,
    batch_size: int,
    feature_lengths: Mapping[str, int] | None = None,
    seed: int = 0,
    num_epochs: int | None = None,
    epoch_policy: EpochPolicy | str = EpochPolicy.RESHUFFLE,
    lanes: int | None = None,
  ) -> Plan:
    """The plan of a run that starts at step 0.

    Args:
      cache: the task's cache; its split is the plan's.
      batch_size: rows of a batch, over all hosts.
      feature_lengths: tokens per feature.
      seed: see the class.
      num_epochs: see the class.
      epoch_policy: see the class.
      lanes: M; hosts whose number divides it read files of their own. Default: the most that the
        order specification allows.

    Raises:
      AnystepError: 78 `batch_size`, `lanes`, `num_epochs`, `epoch_policy`; 66 `cache_empty`.
    """
    planned = PlannedTask.of(cache)
    name = cache.manifest.task
    if planned.num_units == 0:
      raise AnystepError(
        ExitCode.NO_INPUT,
        "cache_empty",
        task=name,
        split=cache.manifest.split,
        path=cache.directory,
        fix="cache the task from a source that yields examples for this split",
      )
    _require(batch_size >= 1, "batch_size", "at least 1 row", batch_size)
    _require(num_epochs is None or num_epochs >= 1, "num_epochs", "None or at least 1", num_epochs)
    policies = [policy.value for policy in EpochPolicy]
    _require(epoch_policy in policies, "epoch_policy", " or ".join(policies), epoch_policy)
    if lanes is None:
      lanes = default_lanes(batch_size, planned.num_shards)
    divisors = [m for m in range(1, batch_size + 1) if batch_size % m == 0]
    _require(lanes in divisors, "lanes", f"a divisor of {batch_size}: {divisors}", lanes)
    segment = Segment(
      start_step=0,
      batch_size=batch_size,
      lanes=lanes,
      first_stripe=0,
      tasks={name: SegmentTask(rate="1", quota=1, first_unit=0)},
      reason="start",
    )
    return cls(
      split=cache.manifest.split,
      seed=seed,
      num_epochs=num_epochs,
      feature_lengths=dict(feature_lengths or {}),
      epoch_policy=EpochPolicy(epoch_policy),
      tasks={name: planned},
      segments=(segment,),
    )

  @property
  def task_names(self) -> list[str]:
    """The plan's tasks in name order, which `BatchRows.task` counts."""
    return sorted(self.tasks, key=str.encode)

  def segment_at(self, step: int) -> Segment:
    """The segment that a step belongs to."""
    return next(s for s in reversed(self.segments) if s.start_step <= step)

  @property
  def num_steps(self) -> int | None:
    """Steps until the data ends; None where it never does."""
    if self.num_epochs is None:
      return None
    segment = self.segments[-1]
    ((name, part),) = segment.tasks.items()
    units_left = self.num_epochs * self.tasks[name].num_units - part.first_unit
    return segment.start_step + -(-units_left // segment.batch_size)

  def batch(self, step: int, rows: np.ndarray | None = None) -> BatchRows:
    """What the batch of a step consists of.

    Args:
      step: any step, 0 <= step < num_steps.
      rows: the rows wanted, `(rows,)`; all by default.

    Raises:
      AnystepError: 78 `data_ended` for a step after the last.
    """
    if step < 0:
      raise ValueError(f"step must be at least 0, not {step}")
    if self.num_steps is not None and step >= self.num_steps:
      raise AnystepError(
        ExitCode.CONFIG,
        "data_ended",
        expected=f"a step below {self.num_steps}",
        got=step,
        fix="train for fewer steps or for more epochs",
      )
    segment = self.segment_at(step)
    wanted = np.arange(segment.batch_size) if rows is None else checked_rows(rows, segment.batch_size)
    stripes = segment.batch_size // segment.lanes
    lane, stripe = np.divmod(wanted, stripes)
    ((name, part),) = segment.tasks.items()
    unit = part.first_unit + ((step - segment.start_step) * stripes + stripe) * segment.lanes + lane
    places = self.unit_order(name).locate(unit)
    task = np.full(unit.shape, self.task_names.index(name), np.int64)
    batch = BatchRows(task, unit, *places)
    if self.num_epochs is None:
      return batch
    real = unit < self.num_epochs * self.tasks[name].num_units
    return BatchRows(np.where(real, task, PADDING_TASK), *(np.where(real, column, 0) for column in batch[1:]))

  def unit_order(self, task: str) -> UnitOrder:
    """The order of a task's units under this plan."""
    planned = self.tasks[task]
    return UnitOrder(
      task=task,
      split=self.split,
      seed=self.seed,
      num_units=planned.num_units,
      num_shards=planned.num_shards,
      block_records=planned.block_records,
      policy=self.epoch_policy,
    )

  def check_caches(self, caches: Mapping[str, Cache]) -> None:
    """Refuses caches other than those that the plan was made for.

    Raises:
      AnystepError: 76 `plan_cache` with both sides of the first difference.
    """
    for name, planned in self.tasks.items():
      found = dataclasses.asdict(PlannedTask.of(caches[name]))
      for field, value in dataclasses.asdict(planned).items():
        if found[field] != value:
          raise AnystepError(
            ExitCode.MISMATCH,
            "plan_cache",
            task=name,
            field=field,
            expected=value,
            got=found[field],
            fix="point the run at the cache that it started with, or start anew in another MODEL_DIR",
          )

  def to_json(self) -> str:
    """The plan's text: equal plans are equal bytes."""
    document = {"version": PLAN_VERSION, **dataclasses.asdict(self)}
    return canonical_json(document, indent=1) + "\n"

  @property
  def sha256(self) -> str:
    """Names the plan: sha256 of its JSON."""
    return hashlib.sha256(self.to_json().encode()).hexdigest()

  @classmethod
  def from_json(cls, text: str, *, path: object = "data_plan.json") -> Plan:
    """Reads a plan.

    Raises:
      AnystepError: 65 `plan_invalid`.
    """
    try:
      document = json.loads(text)
      version = document.pop("version")
      if version != PLAN_VERSION:
        raise ValueError(f"version {version}, not {PLAN_VERSION}")
      return cls._from_document(document)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
      raise AnystepError(
        ExitCode.DATA,
        "plan_invalid",
        path=path,
        got=f"{type(error).__name__}: {error}",
        fix="restore the file from a copy, or resume from another checkpoint",
      ) from error

  @classmethod
  def _from_document(cls, document: dict[str, Any]) -> Plan:
    tasks = {name: PlannedTask(**task) for name, task in document.pop("tasks").items()}
    segments = tuple(
      Segment(
        **{
          **segment,
          "tasks": {name: SegmentTask(**task) for name, task in segment["tasks"].items()},
        }
      )
      for segment in document.pop("segments")
    )
    policy = EpochPolicy(document.pop("epoch_policy"))
    return cls(**document, epoch_policy=policy, tasks=tasks, segments=segments)


def checked_rows(rows: np.ndarray, batch_size: int) -> np.ndarray:
  """Row numbers of a batch as `int64`.

  Raises:
    AnystepError: 78 `rows` for a row that a batch does not have.
  """
  rows = np.asarray(rows, np.int64)
  outside = rows[(rows < 0) | (rows >= batch_size)]
  _require(not outside.size, "rows", f"0 to {batch_size - 1}", outside.tolist())
  return rows


def default_lanes(batch_size: int, num_shards: int) -> int:
  """M for one task: gcd(B, S), so that a lane reads one residue class of the shards."""
  return math.gcd(batch_size, num_shards)


def _validate(**checks: bool) -> None:
  """Raises a ValueError that names the fields whose checks fail."""
  wrong = [name for name, right in checks.items() if not right]
  if wrong:
    raise ValueError(f"wrong {', '.join(wrong)}")


def _require(condition: bool, kind: str, expected: object, got: object) -> None:
  if not condition:
    raise AnystepError(
      ExitCode.CONFIG, kind, expected=expected, got=repr(got), fix=f"change {kind} to what is expected"
    )
