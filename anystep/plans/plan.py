"""The plan: which unit of which task is in which row of which step (docs/order.md#plans-segments-rows)."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
from etils import epath

from anystep.cached import cached_property
from anystep.caches.cache import Cache
from anystep.caches.manifest import AS_IS
from anystep.errors import AnystepError, ExitCode, invalid_file, nearest
from anystep.files.input_files import read_file
from anystep.files.json_files import MALFORMED, canonical_json, parse_json
from anystep.limits import (
  MAX_BATCH_ROWS,
  MAX_COUNT,
  MAX_FEATURE_LENGTH,
  MAX_JSON_BYTES,
  are_feature_lengths,
  is_count,
  is_name,
  is_seed,
  refuse_wrong,
)
from anystep.order.epochs import EpochPolicy, TaskUnits, UnitOrder
from anystep.order.mixing import Mixing, exact_share
from anystep.order.packing import PackingPolicy
from anystep.plans.planned_tables import check_packed_alike, made_tables, table_for, table_missing
from anystep.plans.planned_task import PlannedTask
from anystep.plans.segments import Segment, SegmentTask, default_lanes
from anystep.plans.tombstones import SilentSteps, TombstoneList, Tombstones
from anystep.plans.wanted_rows import checked_rows
from anystep.transforms.transform import Transforms, transforms_by_task
from anystep.units.tables import UnitTable, find_unit_table
from anystep.whole_numbers import is_whole_number, whole_number

PLAN_VERSION = 1
PADDING_TASK = -1
_ON_CACHES = "a plan that knows its caches: plan.on_caches(caches)"

# Fields that the caches tell and the JSON does not.
UNSAID = frozenset({"unit_tables", "shard_units"})

Rate = int | float | str | Fraction


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
class Plan:
  """All the data state there is: the batch of step t follows from the plan and t.

  Attributes:
    split: of every task.
    seed: keys the order of later epochs and the draws at reading; the preshuffle has the cache's own.
    num_epochs: after how many epochs of some task the data ends; None for never.
    feature_lengths: tokens per feature that rows are cut and filled to.
    packing: how many examples share a row.
    epoch_policy: how later epochs are ordered.
    rate_unit: what the segments' rates count, `examples` or `units`.
    tasks: the caches of every task that any segment has, by name.
    segments: by start_step; of those that start at one step the last counts.
    tombstones: examples that keep their rows without being learned from; in the JSON where there are any.
    unit_tables: of the tasks that have one, by name. Not in the JSON: `on_caches` puts it back.
    shard_units: units of each shard, `(S,) int64`, of tasks whose shards may differ by more than one, as
      with a table and in layout `as_is`. Not in the JSON either.
  """

  split: str
  seed: int
  num_epochs: int | None
  feature_lengths: Mapping[str, int]
  epoch_policy: EpochPolicy
  tasks: Mapping[str, PlannedTask]
  segments: Sequence[Segment]
  packing: PackingPolicy = PackingPolicy.NONE
  rate_unit: str = "examples"
  tombstones: Sequence[Tombstones] = ()
  unit_tables: Mapping[str, UnitTable] = dataclasses.field(default_factory=dict, compare=False, repr=False)
  shard_units: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict, compare=False, repr=False)

  def __post_init__(self):
    starts = [segment.start_step for segment in self.segments]
    refuse_wrong(
      split=is_name(self.split),
      seed=is_seed(self.seed),
      num_epochs=self.num_epochs is None or is_count(self.num_epochs, least=1),
      feature_lengths=are_feature_lengths(self.feature_lengths),
      packing=isinstance(self.packing, PackingPolicy)
      and (self.packing is PackingPolicy.NONE or all(task.unit_table for task in self.tasks.values())),
      rate_unit=self.rate_unit in ("examples", "units"),
      segments=starts[:1] == [0] and starts == sorted(starts),
      tasks=all(name in self.tasks for segment in self.segments for name in segment.tasks),
      tombstones=all(isinstance(entry, Tombstones) for entry in self.tombstones),
    )
    # The mixture's first stretch is computed now: no batch, least of all the first, waits for it.
    self.segments[-1].mixing.draws(0, 1)

  def __getstate__(self) -> dict[str, Any]:
    # What was computed of the fields is computed anew where it is needed.
    return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

  @classmethod
  def start(
    cls,
    caches: Cache | Iterable[Cache],
    *,
    batch_size: int,
    rates: Mapping[str, Rate] | None = None,
    feature_lengths: Mapping[str, int] | None = None,
    seed: int = 0,
    num_epochs: int | None = None,
    packing: PackingPolicy | str = PackingPolicy.NONE,
    epoch_policy: EpochPolicy | str | None = None,
    rate_unit: str = "examples",
    lanes: int | None = None,
    transforms: Transforms | None = None,
  ) -> Plan:
    """The plan of a run that starts at step 0.

    Where rows are packed, or a transform may drop examples, the units are found first, if they were not
    before: by arithmetic on lengths files, or in one pass where only running the transforms tells.

    Args:
      caches: the task's cache, or the caches of a mixture's tasks; their split is the plan's.
      batch_size: rows of a batch, over all hosts.
      rates: how often each task's examples come, in any proportion; one task needs none.
      feature_lengths: tokens per feature.
      seed: see the class.
      num_epochs: see the class.
      packing: `none`, `greedy` (in the cache's order, any length of data) or `best_fit` (fuller rows).
      epoch_policy: see the class; by default `reshuffle`, and `global` for layout `as_is`.
      rate_unit: what rates count: `examples`, as SeqIO's do, or `units`.
      lanes: M; hosts whose number divides it read files of their own. Default: the most that the
        order specification allows.
      transforms: what each task's examples go through at reading, as `open_stream` is given it. The plan
        holds a hash of it, and other transforms are refused; None where it is not known yet: then the first
        reader's are taken into its plan.

    Raises:
      AnystepError: 78 `batch_size`, `lanes`, `num_epochs`, `packing`, `epoch_policy`, `rates`, `rate_unit`,
        `task_unknown`, `split`, `feature_lengths`; 66 `cache_empty`; as `make_unit_table` and
        `transforms_by_task`.
    """
    by_name = _by_task(caches)
    manifests = [cache.manifest for cache in by_name.values()]
    splits = {m.split for m in manifests}
    _require(len(splits) == 1, "split", "caches of one split", sorted(splits))
    _require(
      num_epochs is None or is_count(num_epochs, least=1),
      "num_epochs",
      f"None or 1 to {MAX_COUNT}",
      num_epochs,
    )
    _require(is_seed(seed), "seed", "a whole number of 64 bits", seed)
    lengths = dict(feature_lengths or {})
    few = f"whole numbers, 0 to {MAX_FEATURE_LENGTH}"
    _require(are_feature_lengths(lengths), "feature_lengths", few, lengths)
    _require(rate_unit in ("examples", "units"), "rate_unit", "examples or units", rate_unit)
    if epoch_policy is None:
      layouts = {m.layout for m in manifests}
      named = "a policy by name, for a mixture of layouts preshuffled and as_is"
      _require(len(layouts) == 1, "epoch_policy", named, None)
      epoch_policy = EpochPolicy.GLOBAL if layouts == {AS_IS} else EpochPolicy.RESHUFFLE
    packings = [policy.value for policy in PackingPolicy]
    _require(packing in packings, "packing", " or ".join(packings), packing)
    policies = [policy.value for policy in EpochPolicy]
    _require(epoch_policy in policies, "epoch_policy", " or ".join(policies), epoch_policy)
    if rates is None:
      _require(len(by_name) == 1, "rates", f"rates of {', '.join(by_name)}", None)
      rates = dict.fromkeys(by_name, 1)
    _check_asked(by_name, rates, batch_size=batch_size, lanes=lanes)
    wanted = {name: cache for name, cache in by_name.items() if exact_share(name, rates.get(name, 0))}
    own = transforms_by_task(transforms, by_name)
    tables = made_tables(wanted, own, packing=PackingPolicy(packing), feature_lengths=lengths)
    planned = {name: PlannedTask.of(cache, tables.get(name)) for name, cache in by_name.items()}
    if transforms is not None:
      planned = {name: task.knowing(own.get(name), task=name) for name, task in planned.items()}
    segment = _segment(
      planned,
      rates,
      units_per_example=_units_per_example(planned, tables, rate_unit),
      start_step=0,
      batch_size=batch_size,
      lanes=lanes,
      first_units={},
      reason="start",
    )
    return cls(
      split=splits.pop(),
      seed=seed,
      num_epochs=num_epochs,
      feature_lengths=lengths,
      packing=PackingPolicy(packing),
      epoch_policy=EpochPolicy(epoch_policy),
      tasks={name: planned[name] for name in segment.tasks},
      segments=(segment,),
      rate_unit=rate_unit,
      unit_tables={name: table for name, table in tables.items() if name in segment.tasks},
    ).on_caches(by_name)

  def change(
    self,
    step: int,
    *,
    rates: Mapping[str, Rate] | None = None,
    batch_size: int | None = None,
    lanes: int | None = None,
    caches: Cache | Iterable[Cache] = (),
    transforms: Transforms | None = None,
    trained_steps: int = 0,
    reason: str = "change",
  ) -> Plan:
    """The plan with another mixture, batch size or lanes from a step on.

    Every task goes on where it stood, also one that left and returns. Segments that start at that step or
    later are dropped and named in the new one's reason.

    Args:
      step: the first step of the new segment.
      rates: the whole new mixture; a task that is not named, or with rate 0, leaves. None leaves all as is.
      batch_size: rows of a batch; None for as before.
      lanes: M; None for as before, or for the default where batch size or tasks change.
      caches: of tasks that the plan does not know yet; of others too where it was read and has unit tables.
      transforms: of tasks that it does not know yet, as in `start`.
      trained_steps: steps that are trained already, whose data is past: `step` must not be below.
      reason: why, for people.

    Raises:
      AnystepError: 78 `step_trained`, `data_ended`, and as `start`; 76 `plan_cache` for another cache than
        the plan's of a task that it knows.
    """
    step = self._future_step(step, trained_steps)
    old = self.segment_at(step)
    new_caches = _by_task(caches)
    for name, cache in new_caches.items():
      _require(cache.manifest.split == self.split, "split", self.split, f"{cache.manifest.split} of {name}")
    unknown = {name: cache for name, cache in new_caches.items() if name not in self.tasks}
    batch_size = old.batch_size if batch_size is None else batch_size
    if rates is None:
      rates = {name: task.rate for name, task in old.tasks.items()}
    _check_asked({**self.tasks, **unknown}, rates, batch_size=batch_size, lanes=lanes)
    lengths = self.feature_lengths
    own = transforms_by_task(transforms, unknown, others=self.tasks)
    new_tables = made_tables(unknown, own, packing=self.packing, feature_lengths=lengths)
    new_tasks = {name: PlannedTask.of(cache, new_tables.get(name)) for name, cache in unknown.items()}
    if transforms is not None:
      new_tasks = {name: task.knowing(own.get(name), task=name) for name, task in new_tasks.items()}
    planned = {**self.tasks, **new_tasks}
    tables = {**self.on_caches(new_caches).unit_tables, **new_tables}
    segment = _segment(
      planned,
      rates,
      units_per_example=_units_per_example(planned, tables, self.rate_unit),
      start_step=step,
      batch_size=batch_size,
      lanes=lanes,
      first_units=self._units_at(step),
      reason=reason,
    )
    if lanes is None and segment.batch_size == old.batch_size and segment.tasks.keys() == old.tasks.keys():
      segment = dataclasses.replace(segment, lanes=old.lanes)
    if segment.quotas == old.quotas:
      first_stripe = old.standing_at(step, start_step=step, reason=reason).first_stripe
      segment = dataclasses.replace(segment, first_stripe=first_stripe)
    changed = self._with_segments([segment], planned)
    tables = {name: table for name, table in tables.items() if name in changed.tasks}
    return dataclasses.replace(changed, unit_tables=tables).on_caches(new_caches)

  def skip(self, step: int, until: int, *, trained_steps: int = 0, reason: str | None = None) -> Plan:
    """The plan that leaves out the batches of steps [step, until): step + i is what until + i was.

    Args:
      step: the first step that is left out, and whose place `until` takes.
      until: the first step that is trained again.
      trained_steps: as in `change`.
      reason: why, for people.

    Raises:
      AnystepError: 78 `skip`, `step_trained`, `data_ended`.
    """
    step = self._future_step(step, trained_steps)
    _require(_is_step(until) and until > step, "skip", f"steps [{step}, b) with b > {step}", until)
    until = self._future_step(until, 0)
    reason = reason or f"skip of [{step}, {until})"
    standing = self.segment_at(until).standing_at(until, start_step=step, reason=reason)
    # A task that left before `until` returns where it stood then: a segment of no steps says so.
    then, now = self._units_at(until), self._units_at(step)
    left = {name: unit for name, unit in then.items() if name not in standing.tasks and now.get(name) != unit}
    if not left:
      return self._with_segments([standing], self.tasks)
    position = dataclasses.replace(
      standing,
      first_stripe=0,
      tasks={name: SegmentTask(rate="1", quota=1, first_unit=unit) for name, unit in left.items()},
      reason=f"{reason}: where tasks stood that had left",
    )
    return self._with_segments([position, standing], self.tasks)

  def tombstone(self, step: int, lists: Iterable[TombstoneList], *, trained_steps: int = 0) -> Plan:
    """The plan whose batches from a step on have no loss weight where the listed examples are.

    Rows, and everything else in them, stay as they are.

    Args:
      step: the first step without their loss.
      lists: of examples of the plan's tasks. Those that have no loss by then are not taken up again.
      trained_steps: as in `change`.

    Raises:
      AnystepError: 78 `task_unknown`, `split`, `step_trained`, `data_ended`; 76 `plan_cache` for a list of
        another cache's examples.
    """
    step = self._future_step(step, trained_steps)
    tombstones = list(self.tombstones)
    for entry in lists:
      _require(entry.split == self.split, "split", self.split, f"{entry.split} of {entry.task}")
      _require(entry.task in self.tasks, "task_unknown", nearest(entry.task, self.tasks), entry.task)
      self.tasks[entry.task].check_manifest(entry.task, entry.manifest_sha256)
      indices = np.array(entry.indices, np.int64)
      new = indices[SilentSteps(tombstones).since(entry.task, indices) > step]
      if new.size:
        by_task = {entry.task: new.tolist()}
        tombstones.append(Tombstones(start_step=step, indices=by_task, reason=entry.reason))
    return dataclasses.replace(self, tombstones=tuple(tombstones))

  @cached_property
  def silent_steps(self) -> SilentSteps:
    """Since when the plan's tombstones count."""
    return SilentSteps(self.tombstones)

  @cached_property
  def task_names(self) -> list[str]:
    """The plan's tasks in name order, which `BatchRows.task` counts."""
    return sorted(self.tasks, key=str.encode)

  def segment_at(self, step: int) -> Segment:
    """The segment that a step belongs to.

    Raises:
      TypeError: for a step that is no whole number.
      ValueError: for a step below 0.
    """
    step = checked_step(step)
    return next(s for s in reversed(self.segments) if s.start_step <= step)

  @property
  def largest_step(self) -> int:
    """The last step of the endless plan whose numbers int64 holds; about 9e18 / batch size."""
    return self.segments[-1].largest_step

  @cached_property
  def _end(self) -> tuple[int, int] | None:
    """(step, its stripe) right after the data's last stripe; None where it never ends."""
    if self.num_epochs is None:
      return None
    last_units = {name: self.num_epochs * task.num_units for name, task in self.tasks.items()}
    for segment, following in zip(self.segments, [*self.segments[1:], None], strict=True):
      next_start = math.inf if following is None else following.start_step
      if segment.start_step < next_start and (end := segment.end(last_units)) <= (next_start, 0):
        return end
    raise AssertionError("a plan's last segment has no next one, so its data ends in it")

  @property
  def num_steps(self) -> int | None:
    """Steps until the data ends; None where it never does."""
    if self._end is None:
      return None
    step, stripe = self._end
    return step + bool(stripe)

  def batch(self, step: int, rows: np.ndarray | None = None) -> BatchRows:
    """What the batch of a step consists of.

    Args:
      step: any step, 0 <= step < num_steps.
      rows: the rows wanted, `(rows,)`, or a mask of all; all by default.

    Raises:
      AnystepError: 78 `data_ended` for a step after the last, `step_too_large` for one after `largest_step`,
        `rows` for rows that a batch does not have.
      ValueError, TypeError: as `segment_at`.
    """
    task, unit, real = self.units(step, rows)
    batch = BatchRows(task, unit, *self.unit_order.locate(task, unit))
    if real is None:
      return batch
    return BatchRows(np.where(real, task, PADDING_TASK), *(np.where(real, column, 0) for column in batch[1:]))

  def units(
    self, step: int, rows: np.ndarray | None = None
  ) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Task, unit and whether it is no padding of the rows of a step, `(rows,)` each; None where none is."""
    step = self.readable_step(step)
    segment = self.segment_at(step)
    own = segment.rows(step, None if rows is None else checked_rows(rows, segment.batch_size))
    task = self._positions[segment.start_step][own.task]
    if self._end is None:
      return task, own.unit, None
    end_step, end_stripe = self._end
    below_last = own.unit < self._last_units[task]
    before_end = own.stripe < end_stripe if step == end_step else True
    return task, own.unit, below_last & before_end

  def readable_step(self, step: int) -> int:
    """A step that has a batch, as an int.

    Raises:
      AnystepError, ValueError, TypeError: as `batch`.
    """
    step = checked_step(step)
    if self.num_steps is not None and step >= self.num_steps:
      raise self._data_ended(step)
    self.segment_at(step).check_step(step)
    return step

  @cached_property
  def _positions(self) -> dict[int, np.ndarray]:
    """By start step, the places of a segment's tasks among the plan's."""
    place = {name: k for k, name in enumerate(self.task_names)}
    return {s.start_step: np.array([place[name] for name in s.mixing.names]) for s in self.segments}

  @cached_property
  def _last_units(self) -> np.ndarray:
    epochs, endless = self.num_epochs or 0, np.iinfo(np.int64).max
    return np.array([min(epochs * self.tasks[name].num_units, endless) for name in self.task_names], np.int64)

  def when(self, task: str, unit: int) -> tuple[int, int] | None:
    """(step, row) that trains on a task's unit; None where no step does, none up to `largest_step`."""
    unit = whole_number(unit, "unit")
    for segment, following in zip(self.segments, [*self.segments[1:], None], strict=True):
      found = segment.when(task, unit)
      if found is None or (following is not None and found[0] >= following.start_step):
        continue
      step, row = found
      return found if self.is_real(step, row) else None
    return None

  def is_real(self, step: int, row: int) -> bool:
    """Whether there is such a row and it is no padding; only the data's last step has any."""
    if self.num_steps is None or step + 1 < self.num_steps:
      return True
    if step >= self.num_steps:
      return False
    _, _, real = self.units(step, np.array([row]))
    return real is None or bool(real[0])

  @cached_property
  def unit_order(self) -> UnitOrder:
    """Where the units of the plan's tasks lie, by `task_names`."""
    unknown = [
      name
      for name, task in self.tasks.items()
      if (task.layout == AS_IS or task.unit_table) and name not in self.shard_units
    ]
    _require(not unknown, "plan_caches", _ON_CACHES, unknown)
    tasks = [
      TaskUnits(
        task=name,
        num_units=self.tasks[name].num_units,
        num_shards=self.tasks[name].num_shards,
        block_records=self.tasks[name].block_records,
        shard_units=self.shard_units.get(name),
      )
      for name in self.task_names
    ]
    return UnitOrder(tasks, split=self.split, seed=self.seed, policy=self.epoch_policy)

  def on_caches(self, caches: Mapping[str, Cache], transforms: Transforms | None = None) -> Plan:
    """The plan, with what its order needs of these caches and its JSON does not hold.

    Args:
      caches: by task name.
      transforms: what the tasks' examples go through at reading, where that is known: the plan is refused
        if it was made for another, takes it up if it knows of none, and a unit table that is not there is
        made anew.

    Raises:
      AnystepError: 76 `plan_cache` for a cache other than the one that the plan was made for, with both
        sides of the first difference; `feature_lengths` for one that was cached for other lengths;
        `unit_table` and `plan_transforms` for other transforms; 66 `unit_table_missing`; as
        `make_unit_table`, `transforms_by_task` and `identity_of`.
    """
    tasks, tables, shard_units = dict(self.tasks), dict(self.unit_tables), dict(self.shard_units)
    own = None if transforms is None else transforms_by_task(transforms, self.tasks, others=caches)
    how: dict[str, Any] = {"packing": self.packing, "feature_lengths": self.feature_lengths}
    for name in self.tasks.keys() & caches.keys():
      sha256, table = self.tasks[name].unit_table, tables.get(name)
      if table is None and sha256 is not None:
        table = find_unit_table(caches[name], sha256)
      if own is not None:
        table = table_for(caches[name], own.get(name), table, planned=sha256 is not None, **how)
      if table is None and sha256 is not None:
        raise table_missing(caches[name], sha256)
      self.tasks[name].check(caches[name], table, self.feature_lengths)
      if own is not None:
        tasks[name] = self.tasks[name].read_through(own.get(name), task=name)
      if table is not None:
        tables[name], shard_units[name] = table, table.shard_units
      elif caches[name].manifest.layout == AS_IS:
        shard_units[name] = caches[name].manifest.shard_records
    check_packed_alike(tables)
    return dataclasses.replace(self, tasks=tasks, unit_tables=tables, shard_units=shard_units)

  @property
  def unknown_transforms(self) -> list[str]:
    """Names of tasks of which the plan does not know what their examples go through at reading."""
    return [name for name in self.task_names if self.tasks[name].transforms is None]

  def _units_at(self, step: int) -> dict[str, int]:
    """The next unit at a step of every task that had one before."""
    units: dict[str, int] = {}
    starts = [segment.start_step for segment in self.segments[1:]]
    for segment, stop in zip(self.segments, [*starts, step], strict=True):
      if segment.start_step <= step:
        units |= segment.units_at(min(stop, step))
    return units

  def _future_step(self, step: int, trained_steps: int) -> int:
    """A step from which on the data may change, as an int."""
    _require(_is_step(step), "step", "a step, a whole number >= 0", step)
    step = int(step)
    if step < trained_steps:
      raise AnystepError(
        ExitCode.CONFIG,
        "step_trained",
        expected=f"a step not yet trained: {trained_steps} or later",
        got=step,
        fix="change the data from a later step on, or go back to an earlier checkpoint first",
      )
    if self.num_steps is not None and step >= self.num_steps:
      raise self._data_ended(step)
    self.segment_at(step).check_step(step, limit=MAX_COUNT)
    return step

  def _data_ended(self, step: int) -> AnystepError:
    return AnystepError(
      ExitCode.CONFIG,
      "data_ended",
      expected=f"a step below {self.num_steps}",
      got=step,
      fix="train for fewer steps or for more epochs",
    )

  def _with_segments(self, new: Sequence[Segment], tasks: Mapping[str, PlannedTask]) -> Plan:
    """The plan with segments that start at one step in place of those that start later."""
    start_step, names = new[-1].start_step, {name for segment in new for name in segment.tasks}
    kept = [s for s in self.segments if s.start_step <= start_step]
    dropped = [s.start_step for s in self.segments if s.start_step > start_step]
    # One that starts at the same step has no steps left. It stays where it alone says where a task stands.
    while kept and kept[-1].start_step == start_step and kept[-1].tasks.keys() <= names:
      dropped.insert(0, kept.pop().start_step)
    last = new[-1]
    if dropped:
      where = ", ".join(map(str, dropped))
      last = dataclasses.replace(last, reason=f"{last.reason}; dropped what was to start at {where}")
    segments = (*kept, *new[:-1], last)
    used = {name for segment in segments for name in segment.tasks}
    planned = {name: task for name, task in tasks.items() if name in used}
    return dataclasses.replace(self, segments=segments, tasks=planned)

  def to_json(self) -> str:
    """The plan's text: equal plans are equal bytes."""
    left_out = UNSAID if self.tombstones else UNSAID | {"tombstones"}
    fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in left_out}
    several = {
      name: [dataclasses.asdict(entry) for entry in fields[name]]
      for name in fields.keys() & {"segments", "tombstones"}
    }
    tasks = {name: task.to_document() for name, task in self.tasks.items()}
    document = {"version": PLAN_VERSION, **fields, **several, "tasks": tasks}
    return canonical_json(document, indent=1) + "\n"

  @property
  def sha256(self) -> str:
    """Names the plan: sha256 of its JSON."""
    return hashlib.sha256(self.to_json().encode()).hexdigest()

  @classmethod
  def read(cls, path: epath.PathLike, *, fix: str) -> Plan:
    """Reads a plan's file.

    Args:
      path: the file.
      fix: what to do where there is none.

    Raises:
      AnystepError: 66 `plan_missing`; 65 `plan_invalid`.
    """
    try:
      content = read_file(path, limit_bytes=MAX_JSON_BYTES)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
      raise AnystepError(
        ExitCode.NO_INPUT, "plan_missing", path=path, expected="a plan's JSON file", fix=fix
      ) from error
    except ValueError as error:
      raise _invalid(error, path) from error
    return cls.from_json(content, path=path)

  @classmethod
  def from_json(cls, text: str | bytes, *, path: object = "data_plan.json") -> Plan:
    """Reads a plan.

    Raises:
      AnystepError: 65 `plan_invalid`.
    """
    try:
      document = parse_json(text)
      version = document.pop("version")
      if type(version) is not int or version != PLAN_VERSION:
        raise ValueError(f"version {version!r}, not {PLAN_VERSION}")
      return cls._from_document(document)
    except MALFORMED as error:
      raise _invalid(error, path) from error

  @classmethod
  def _from_document(cls, document: dict[str, Any]) -> Plan:
    if UNSAID & document.keys():
      raise ValueError(f"{', '.join(sorted(UNSAID & document.keys()))} is not in the file")
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
    packing = PackingPolicy(document.pop("packing"))
    epoch_policy = EpochPolicy(document.pop("epoch_policy"))
    tombstones = tuple(Tombstones(**entry) for entry in document.pop("tombstones", ()))
    return cls(
      **document,
      packing=packing,
      epoch_policy=epoch_policy,
      tasks=tasks,
      segments=segments,
      tombstones=tombstones,
    )


def _invalid(error: Exception, path: object) -> AnystepError:
  fix = "restore the file from a copy, or resume from another checkpoint"
  return invalid_file("plan_invalid", error, path=path, fix=fix)


def _check_asked(
  tasks: Collection[str], rates: Mapping[str, Rate], *, batch_size: int, lanes: int | None
) -> None:
  """Refuses what no segment can have before unit tables are made, which may take long."""
  for name in rates:
    if name not in tasks:
      raise AnystepError(
        ExitCode.CONFIG,
        "task_unknown",
        expected=f"tasks whose caches are given: {nearest(name, tasks)}",
        got=name,
        fix="correct the name, or give the task's cache too",
      )
  _require(type(batch_size) is int and batch_size >= 1, "batch_size", "at least 1 row", batch_size)
  _require(batch_size <= MAX_BATCH_ROWS, "batch_size", f"at most {MAX_BATCH_ROWS:,} rows", batch_size)
  if lanes is not None and not (is_count(lanes, least=1) and batch_size % lanes == 0):
    divisors = [m for m in range(1, batch_size + 1) if batch_size % m == 0]
    _require(False, "lanes", f"a divisor of {batch_size}: {divisors}", lanes)


def _segment(
  planned: Mapping[str, PlannedTask],
  rates: Mapping[str, Rate],
  *,
  units_per_example: Mapping[str, Fraction],
  start_step: int,
  batch_size: int,
  lanes: int | None,
  first_units: Mapping[str, int],
  reason: str,
) -> Segment:
  """A segment from the mixture's first stripe on, its quotas made of rates."""
  mixing = Mixing({n: exact_share(n, rate) * units_per_example.get(n, 1) for n, rate in rates.items()})
  if lanes is None:
    lanes = default_lanes(batch_size, [planned[name].num_shards for name in mixing.names])
  return Segment(
    start_step=start_step,
    batch_size=batch_size,
    lanes=lanes,
    first_stripe=0,
    tasks={
      name: SegmentTask(rate=str(rates[name]), quota=int(quota), first_unit=first_units.get(name, 0))
      for name, quota in zip(mixing.names, mixing.quotas, strict=True)
    },
    reason=reason,
  )


def _units_per_example(
  planned: Mapping[str, PlannedTask], tables: Mapping[str, UnitTable], rate_unit: str
) -> dict[str, Fraction]:
  """U / N of tasks whose units are not their examples, by which rates of examples become those of units."""
  if rate_unit == "units":
    return {}
  unknown = [name for name, task in planned.items() if task.unit_table and name not in tables]
  _require(not unknown, "plan_caches", _ON_CACHES, unknown)
  return {name: Fraction(table.num_units, table.num_examples) for name, table in tables.items()}


def checked_step(step: int) -> int:
  """A step as an int.

  Raises:
    TypeError: for what is no whole number.
    ValueError: for a step below 0.
  """
  step = whole_number(step, "step")
  if step < 0:
    raise ValueError(f"step must be at least 0, not {step}")
  return step


def _is_step(value: object) -> bool:
  return is_whole_number(value) and int(value) >= 0  # type: ignore[call-overload]


def _by_task(caches: Cache | Iterable[Cache]) -> dict[str, Cache]:
  several = [caches] if isinstance(caches, Cache) else list(caches)
  by_name = {cache.manifest.task: cache for cache in several}
  names = [cache.manifest.task for cache in several]
  _require(len(by_name) == len(names), "caches", "one cache a task", names)
  return by_name


def _require(condition: bool, kind: str, expected: object, got: object) -> None:
  if not condition:
    raise AnystepError(
      ExitCode.CONFIG, kind, expected=expected, got=repr(got), fix=f"change {kind} to what is expected"
    )
