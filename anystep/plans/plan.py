"""The plan: which unit of which task is in which row of which step (docs/order.md#plans-segments-rows)."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from etils import epath

from anystep.cached import cached_property
from anystep.caches.cache import Cache
from anystep.caches.manifest import AS_IS
from anystep.limits import are_feature_lengths, is_count, is_name, is_seed, refuse_wrong
from anystep.order.epochs import EpochPolicy, UnitOrder
from anystep.order.packing import PackingPolicy
from anystep.plans import changes, plan_json
from anystep.plans.changes import Rate
from anystep.plans.planned_tables import check_caches, plan_tasks
from anystep.plans.planned_task import PlannedTask
from anystep.plans.schedule import Schedule
from anystep.plans.segments import Segment
from anystep.plans.tombstones import SilentSteps, TombstoneList, Tombstones
from anystep.transforms.transform import Transforms, transforms_by_task
from anystep.units.tables import UnitTable

PADDING_TASK = -1


class BatchRows(NamedTuple):
  """Rows of a batch, `(rows,) int64` each; `task` numbers the plan's tasks in name order.

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
    packing: how examples are put together into rows.
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
    # What was computed from the fields is computed anew where it is needed.
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
    """Return the plan of a run that starts at step 0.

    Where rows are packed, or a transform may drop examples, unit tables are made first, if there are none:
    by arithmetic on lengths files, or in one pass over the examples where the transforms must run.

    Args:
      caches: the task's cache, or the caches of a mixture's tasks; their split is the plan's.
      batch_size: rows of a batch, over all hosts.
      rates: how often each task's examples come, in any proportion; one task needs none.
      feature_lengths: tokens per feature.
      seed, num_epochs: see the class.
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
        `split`, `feature_lengths`; 64 `task_unknown`; 66 `cache_empty`; as `make_unit_table` and
        `transforms_by_task`.
    """
    by_task = changes.group_by_task(caches)
    fields = changes.start_fields(
      by_task,
      batch_size=batch_size,
      rates=rates,
      feature_lengths=dict(feature_lengths or {}),
      seed=seed,
      num_epochs=num_epochs,
      packing=packing,
      epoch_policy=epoch_policy,
      rate_unit=rate_unit,
      lanes=lanes,
      transforms=transforms,
    )
    return cls(**fields).on_caches(by_task)

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
    """Return the plan with another mixture, batch size or lanes from a step on.

    Every task goes on where it stood, even one that left and returns. Segments that start at that step or
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
    step = changes.check_changed_step(self.schedule, step, trained_steps=trained_steps)
    old = self.segment_at(step)
    new_caches = changes.group_by_task(caches)
    changes.check_split(new_caches, self.split)
    unknown = {name: cache for name, cache in new_caches.items() if name not in self.tasks}
    batch_size = old.batch_size if batch_size is None else batch_size
    if rates is None:
      rates = {name: task.rate for name, task in old.tasks.items()}
    changes.check_mixture({**self.tasks, **unknown}, rates, batch_size=batch_size, lanes=lanes)
    new_tasks, new_tables = plan_tasks(
      unknown,
      None if transforms is None else transforms_by_task(transforms, unknown, others=self.tasks),
      with_tables=unknown,
      packing=self.packing,
      feature_lengths=self.feature_lengths,
    )
    tasks = {**self.tasks, **new_tasks}
    tables = {**self.on_caches(new_caches).unit_tables, **new_tables}
    segment = changes.make_segment(
      tasks,
      rates,
      units_per_example=changes.units_per_example(tasks, tables, self.rate_unit),
      start_step=step,
      batch_size=batch_size,
      lanes=lanes,
      first_units=self.schedule.next_units(step),
      reason=reason,
    )
    segment = changes.continue_segment(segment, old, keep_lanes=lanes is None)
    changed = self._with_segments([segment], tasks)
    tables = {name: table for name, table in tables.items() if name in changed.tasks}
    return dataclasses.replace(changed, unit_tables=tables).on_caches(new_caches)

  def skip(self, step: int, until: int, *, trained_steps: int = 0, reason: str | None = None) -> Plan:
    """Return the plan without the batches of steps [step, until): step + i is what until + i was.

    Args:
      step: the first step that is left out; `until` takes its place.
      until: the first step that is trained again.
      trained_steps: as in `change`.
      reason: why, for people.

    Raises:
      AnystepError: 64 `skip`; 78 `step_trained`, `data_ended`.
    """
    new = changes.skip_steps(self.schedule, step, until, trained_steps=trained_steps, reason=reason)
    return self._with_segments(new, self.tasks)

  def tombstone(self, step: int, lists: Iterable[TombstoneList], *, trained_steps: int = 0) -> Plan:
    """Return the plan whose batches give listed examples no loss weight from a step on.

    Rows, and everything else in them, stay as they are.

    Args:
      step: the first step without their loss.
      lists: of examples of the plan's tasks. Those that have no loss by then already are not added again.
      trained_steps: as in `change`.

    Raises:
      AnystepError: 64 `task_unknown`; 78 `split`, `step_trained`, `data_ended`; 76 `plan_cache` for a list of
        another cache's examples.
    """
    step = changes.check_changed_step(self.schedule, step, trained_steps=trained_steps)
    tombstones = changes.add_tombstones(
      self.tombstones, lists, start_step=step, tasks=self.tasks, split=self.split
    )
    return dataclasses.replace(self, tombstones=tombstones)

  def _with_segments(self, new: Sequence[Segment], tasks: Mapping[str, PlannedTask]) -> Plan:
    """Return the plan with new segments, of some of these tasks, in place of those that start later."""
    segments = changes.replace_later_segments(self.segments, new)
    return dataclasses.replace(self, segments=segments, tasks=changes.select_tasks(tasks, segments))

  @cached_property
  def silent_steps(self) -> SilentSteps:
    """The first step without loss of each example that has a tombstone."""
    return SilentSteps(self.tombstones)

  @cached_property
  def task_names(self) -> list[str]:
    """The plan's tasks in name order, which `BatchRows.task` numbers."""
    return sorted(self.tasks, key=str.encode)

  @cached_property
  def schedule(self) -> Schedule:
    """The unit in each row of each step."""
    end_units = None
    if self.num_epochs is not None:
      end_units = {name: self.num_epochs * task.num_units for name, task in self.tasks.items()}
    return Schedule(segments=self.segments, task_names=self.task_names, end_units=end_units)

  def segment_at(self, step: int) -> Segment:
    """Return the segment that a step belongs to.

    Raises:
      TypeError: for a step that is no whole number.
      ValueError: for a step below 0.
    """
    return self.schedule.segment_at(step)

  @property
  def largest_step(self) -> int:
    """The last step of the endless plan whose numbers int64 holds; about 9e18 / batch size."""
    return self.segments[-1].largest_step

  @property
  def num_steps(self) -> int | None:
    """Number of steps until the data ends; None where it never does."""
    return self.schedule.num_steps

  def batch(self, step: int, rows: np.ndarray | None = None) -> BatchRows:
    """Return the rows of a step's batch.

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
    """Return task, unit and whether it is no padding of a step's rows, `(rows,)` each.

    The third is None where the data never ends. Arguments and errors are those of `batch`.
    """
    return self.schedule.units(step, rows)

  def when(self, task: str, unit: int) -> tuple[int, int] | None:
    """Return (step, row) that trains on a task's unit; None where no step up to `largest_step` does."""
    return self.schedule.when(task, unit)

  @cached_property
  def unit_order(self) -> UnitOrder:
    """The epoch, shard and place of each unit; tasks are numbered by `task_names`."""
    unknown = [
      name
      for name, task in self.tasks.items()
      if (task.layout == AS_IS or task.unit_table) and name not in self.shard_units
    ]
    changes.check_argument(not unknown, "plan_caches", changes.NEEDS_CACHES, unknown)
    units = [self.tasks[name].to_task_units(name, self.shard_units.get(name)) for name in self.task_names]
    return UnitOrder(units, split=self.split, seed=self.seed, policy=self.epoch_policy)

  def on_caches(self, caches: Mapping[str, Cache], transforms: Transforms | None = None) -> Plan:
    """Return the plan with the unit tables and shard sizes of these caches, which its JSON does not hold.

    Args:
      caches: by task name.
      transforms: what the tasks' examples go through at reading, where that is known. The plan is refused
        if it was made for others, and records these if it has none yet. A unit table that is not there is
        made anew.

    Raises:
      AnystepError: 76 `plan_cache` for a cache other than the one that the plan was made for, with both
        sides of the first difference; 76 `unit_table` and `plan_transforms` for other transforms; 78
        `feature_lengths` for a cache that was made for other lengths; 66 `unit_table_missing`; as
        `make_unit_table`, `transforms_by_task` and `identity_of`.
    """
    by_task = None if transforms is None else transforms_by_task(transforms, self.tasks, others=caches)
    tasks, tables, shard_units = check_caches(
      self.tasks,
      caches,
      self.unit_tables,
      by_task,
      packing=self.packing,
      feature_lengths=self.feature_lengths,
    )
    shard_units = {**self.shard_units, **shard_units}
    return dataclasses.replace(self, tasks=tasks, unit_tables=tables, shard_units=shard_units)

  @property
  def unknown_transforms(self) -> list[str]:
    """Names of tasks of which the plan does not know what their examples go through at reading."""
    return [name for name in self.task_names if self.tasks[name].transforms is None]

  def to_json(self) -> str:
    """Return the plan's text: equal plans are equal bytes."""
    return plan_json.format_plan({f.name: getattr(self, f.name) for f in dataclasses.fields(self)})

  @property
  def sha256(self) -> str:
    """The plan's name: sha256 of its JSON."""
    return hashlib.sha256(self.to_json().encode()).hexdigest()

  @classmethod
  def read(cls, path: epath.PathLike, *, fix: str) -> Plan:
    """Return the plan of a file; where there is none, the error says `fix`.

    Raises:
      AnystepError: 66 `plan_missing`; 65 `plan_invalid`.
    """
    return plan_json.read_plan(path, cls, fix=fix)

  @classmethod
  def from_json(cls, text: str | bytes, *, path: object = "data_plan.json") -> Plan:
    """Return the plan of a text that `to_json` returned.

    Raises:
      AnystepError: 65 `plan_invalid`, with the path.
    """
    return plan_json.parse_plan(text, cls, path=path)
