"""Changes, skips and rewinds repeat and lose nothing: a run counted stripe by stripe has the plan's rows."""

from __future__ import annotations

import dataclasses
import json
import random

import caches
import numpy as np
import pytest

import oracle
from anystep.errors import AnystepError
from anystep.plans.plan import Plan

# (N, S, g) of tasks whose names sort otherwise by bytes than by case.
TASKS = {"a": (70, 4, 4), "b": (50, 1, 8), "B": (90, 6, 4), "c:x": (30, 8, 2), "d": (41, 12, 3)}
# Some, but not all, have a lane number in common, and G is often no whole number of periods.
BATCH_SIZES = [1, 4, 6, 8, 12, 24, 64, 96]
RATES = [1, 1, 2, 3, 5, 0.25, "1/3", 0]
HORIZON = 45


def cache_of(task):
  num_examples, num_shards, block_records = TASKS[task]
  return caches.cache_without_files(
    task=task, num_examples=num_examples, num_shards=num_shards, block_records=block_records
  )


def plan_of(rates, **settings):
  return Plan.start([cache_of(task) for task in rates], rates=rates, **settings)


def rows_of(plan, step):
  """[(task, unit)] of a step; None for padding."""
  task, unit, real = plan.units(step)
  names = [plan.task_names[k] for k in task.tolist()]
  rows = list(zip(names, unit.tolist(), strict=True))
  return rows if real is None else [row if is_real else None for row, is_real in zip(rows, real, strict=True)]


# The same run, counted: no segments, no arithmetic on stripes; what stands before every step is written down.


@dataclasses.dataclass(frozen=True)
class Standing:
  """What holds from a step on, and what every task that ever came gives next; `skipped` are its units.

  `names` and `quotas` are those of `rates`.
  """

  rates: dict
  batch_size: int
  lanes: int
  stripe: int
  next_units: dict
  skipped: frozenset

  @property
  def quotas(self):
    names, quotas, _ = oracle.quotas(self.rates)
    return dict(zip(names, quotas, strict=True))


@dataclasses.dataclass(frozen=True)
class Run:
  """Every step of a run up to HORIZON or the end of data: where it stands before, and its rows."""

  num_epochs: int | None
  standings: list[Standing]
  rows: list[list]

  @classmethod
  def start(cls, rates, *, batch_size, lanes=None, num_epochs=None):
    quotas = dict(zip(*oracle.quotas(rates)[:2], strict=True))
    standing = Standing(
      rates=rates,
      batch_size=batch_size,
      lanes=lanes or default_lanes(batch_size, quotas),
      stripe=0,
      next_units=dict.fromkeys(quotas, 0),
      skipped=frozenset(),
    )
    return cls(num_epochs, [], [])._going_on(standing)

  def change(self, step, *, rates=None, batch_size=None, lanes=None):
    old = self.standings[step]
    new = dataclasses.replace(old, rates=rates or old.rates, batch_size=batch_size or old.batch_size)
    if lanes is None:
      same = (new.batch_size, new.quotas.keys()) == (old.batch_size, old.quotas.keys())
      lanes = old.lanes if same else default_lanes(new.batch_size, new.quotas)
    stripe = old.stripe if new.quotas == old.quotas else 0
    next_units = dict.fromkeys(new.quotas, 0) | old.next_units
    new = dataclasses.replace(new, lanes=lanes, stripe=stripe, next_units=next_units)
    return self._before(step)._going_on(new)

  def skip(self, step, until):
    now, then = self.standings[step], self.standings[until]
    left_out = {
      (name, unit)
      for name, after in then.next_units.items()
      for unit in range(now.next_units.get(name, 0), after)
    }
    return self._before(step)._going_on(dataclasses.replace(then, skipped=now.skipped | left_out))

  def _before(self, step):
    return dataclasses.replace(self, standings=self.standings[:step], rows=self.rows[:step])

  def _going_on(self, standing):
    standings, rows, ended = list(self.standings), list(self.rows), False
    while len(rows) < HORIZON and not ended:
      standings.append(standing)
      batch, standing, ended = self._step(standing)
      rows.append(batch)
    return dataclasses.replace(self, standings=standings, rows=rows)

  def _step(self, standing):
    names, quotas, period = oracle.quotas(standing.rates)
    once, stripes = oracle.one_period(tuple(quotas)), standing.batch_size // standing.lanes
    next_units, batch, ended = dict(standing.next_units), [None] * standing.batch_size, False
    for stripe in range(stripes):
      name = names[once[(standing.stripe + stripe) % period]]
      for lane in range(standing.lanes):
        if not self._ended(name, next_units[name]):
          batch[lane * stripes + stripe] = name, next_units[name]
        next_units[name] += 1
      if ended := self._ended(name, next_units[name]):
        break
    stripe = (standing.stripe + stripes) % period
    return batch, dataclasses.replace(standing, stripe=stripe, next_units=next_units), ended

  def _ended(self, name, unit):
    return self.num_epochs is not None and unit >= self.num_epochs * TASKS[name][0]

  @property
  def ended(self):
    return len(self.rows) < HORIZON

  def check_each_unit_once(self):
    """Each task gives a prefix 0, 1, 2, ... of its units once, but for those that were skipped."""
    given = [row for rows in self.rows for row in rows if row is not None]
    assert len(set(given)) == len(given)
    skipped = self.standings[-1].skipped
    assert not skipped & set(given)
    for name in {name for name, _ in given}:
      units = {unit for task, unit in skipped | set(given) if task == name}
      last = max(unit for task, unit in given if task == name)
      assert set(range(last + 1)) <= units


def default_lanes(batch_size, quotas):
  return oracle.default_lanes(batch_size, [TASKS[name][1] for name in quotas])


def check(plan, run, *, rng, num_sampled=4):
  """The plan's rows are the run's at every step, the oracle's at some; it comes back from its JSON."""
  assert plan.num_steps == (len(run.rows) if run.ended else plan.num_steps)
  assert run.ended or plan.num_steps is None or plan.num_steps >= HORIZON
  assert [rows_of(plan, step) for step in range(len(run.rows))] == run.rows
  run.check_each_unit_once()

  document = json.loads(plan.to_json())
  units_per_epoch = {name: task["num_units"] for name, task in document["tasks"].items()}
  last_step = oracle.last_step(document["segments"], units_per_epoch, plan.num_epochs)
  assert plan.num_steps == (None if last_step is None else last_step + 1)
  again = Plan.from_json(plan.to_json())
  assert again.to_json() == plan.to_json()
  for step in rng.sample(range(len(run.rows)), min(num_sampled, len(run.rows))):
    expected = oracle.rows(document["segments"], step, units_per_epoch, plan.num_epochs)
    assert [row or (None, None) for row in run.rows[step]] == expected
    assert rows_of(again, step) == run.rows[step]
    row = rng.randrange(len(expected))
    if run.rows[step][row] is not None:
      assert plan.when(*run.rows[step][row]) == (step, row)
  for name, unit in rng.sample(sorted(run.standings[-1].skipped), min(3, len(run.standings[-1].skipped))):
    assert plan.when(name, unit) is None


def random_rates(rng):
  while True:
    rates = {task: rng.choice(RATES) for task in rng.sample(sorted(TASKS), rng.randint(1, 4))}
    if any(rates.values()):
      return rates


def random_lanes(rng, batch_size):
  return rng.choice([None, None, *(m for m in range(1, batch_size + 1) if batch_size % m == 0)])


def random_edit(plan, run, trained_steps, rng):
  """(plan, run) after one change or skip of some step that is not trained yet."""
  last = len(run.rows) - 1
  step = rng.choice(
    [trained_steps, rng.randint(trained_steps, last), *segment_starts(plan, trained_steps, last)]
  )
  kind = rng.choice(
    ["mixture", "proportions", "batch_size", "lanes", "all", "nothing", "skip", "skip", "skip"]
  )
  if kind == "skip" and step < last:
    until = rng.choice([step + 1, rng.randint(step + 1, last), *segment_starts(plan, step + 1, last)])
    return plan.skip(step, until, trained_steps=trained_steps), run.skip(step, until)
  new = {}
  if kind in ("mixture", "all"):
    new["rates"] = random_rates(rng)
  if kind == "proportions":
    new["rates"] = {name: rng.choice(RATES) or 1 for name in run.standings[step].quotas}
  if kind in ("batch_size", "all"):
    new["batch_size"] = rng.choice(BATCH_SIZES)
  if kind in ("lanes", "all"):
    new["lanes"] = random_lanes(rng, new.get("batch_size", run.standings[step].batch_size))
  unknown = [cache_of(task) for task in new.get("rates", {}) if task not in plan.tasks or rng.random() < 0.2]
  changed = plan.change(step, caches=unknown, trained_steps=trained_steps, **new)
  return changed, run.change(step, **new)


def segment_starts(plan, first, last):
  return [segment.start_step for segment in plan.segments if first <= segment.start_step <= last]


@pytest.mark.parametrize("num_epochs", [None, 2, 6])
@pytest.mark.parametrize("seed", range(40))
def test_chains_of_changes_skips_and_rewinds_repeat_and_lose_nothing(seed, num_epochs):
  rng = random.Random(f"{seed} {num_epochs}")
  rates, batch_size = random_rates(rng), rng.choice(BATCH_SIZES)
  lanes = random_lanes(rng, batch_size)
  plan = plan_of(rates, batch_size=batch_size, lanes=lanes, num_epochs=num_epochs)
  run = Run.start(rates, batch_size=batch_size, lanes=lanes, num_epochs=num_epochs)
  check(plan, run, rng=rng)
  trained_steps, kept = 0, [(0, plan.to_json(), run)]
  for _ in range(7):
    plan, run = random_edit(plan, run, trained_steps, rng)
    check(plan, run, rng=rng)
    trained_steps = rng.randint(trained_steps, min(trained_steps + 12, len(run.rows) - 1))
    kept.append((trained_steps, plan.to_json(), run))
    if rng.random() < 0.25:
      trained_steps, text, run = rng.choice(kept)
      plan = Plan.from_json(text)


# The same, case by case


@pytest.mark.parametrize("seed", range(20))
def test_after_a_skip_a_step_is_row_for_row_what_the_later_one_was(seed):
  rng = random.Random(seed)
  plan = plan_of({"a": 1, "b": 2, "c:x": 5}, batch_size=24, lanes=rng.choice([1, 2, 4, 8]))
  for step in (7, 19, 30):
    plan = plan.change(
      step, rates=random_rates(rng), caches=[cache_of(t) for t in TASKS if t not in plan.tasks]
    )
  step = rng.choice([1, 4, 6, 8, 12])
  until = rng.randint(step + 1, 29)
  skipped = plan.skip(step, until)
  next_segment = next(s for s in (7, 19, 30) if s > until)
  for earlier in range(step):
    assert rows_of(skipped, earlier) == rows_of(plan, earlier)
  for later in range(next_segment - until):
    assert rows_of(skipped, step + later) == rows_of(plan, until + later)
  dropped = [s for s in (7, 19, 30) if s > step]
  assert skipped.segments[-1].reason.startswith(f"skip of [{step}, {until})")
  assert skipped.segments[-1].reason.endswith(
    f"; dropped what was to start at {', '.join(map(str, dropped))}"
  )


def test_a_task_that_left_goes_on_where_the_skipped_steps_would_have_left_it():
  plan = plan_of({"a": 1, "b": 1}, batch_size=4, lanes=1).change(10, rates={"a": 1})
  assert plan.change(30, rates={"a": 1, "b": 1}).segments[-1].tasks["b"].first_unit == 20
  skipped = plan.skip(5, 15)
  assert [unit for name, unit in rows_of(skipped, 5) if name == "a"] == [40, 41, 42, 43]
  back = skipped.change(20, rates={"a": 1, "b": 1}, lanes=1)
  assert back.segments[-1].tasks["b"].first_unit == 20
  assert [plan.when("b", unit) for unit in (9, 10, 19)] == [(4, 3), (5, 1), (9, 3)]
  assert [back.when("b", unit) for unit in (9, 10, 19)] == [(4, 3), None, None]
  assert back.when("b", 20) == (20, 1)
  assert {name for name, _ in rows_of(back, 19)} == {"a"}


def test_a_task_that_came_and_left_within_skipped_steps_goes_on_where_it_left():
  plan = plan_of({"a": 1}, batch_size=4, lanes=1)
  plan = plan.change(10, rates={"a": 1, "b": 1}, lanes=1, caches=cache_of("b")).change(15, rates={"a": 1})
  skipped = plan.skip(5, 20)
  assert all(name == "a" for step in range(30) for name, _ in rows_of(skipped, step))
  back = skipped.change(25, rates={"a": 1, "b": 1})
  assert back.segments[-1].tasks["b"].first_unit == 10
  assert [back.when("b", unit) for unit in (0, 9)] == [None, None]
  # Another skip or change at the very same step keeps it.
  for again in (skipped.skip(5, 8), skipped.change(5, batch_size=8), skipped.change(5, rates={"a": 2})):
    assert again.change(25, rates={"b": 1}).segments[-1].tasks["b"].first_unit == 10
  # An earlier change undoes the skip, which then never was.
  undone = skipped.change(4, batch_size=8)
  assert undone.task_names == ["a"]
  assert undone.change(25, rates={"b": 1}, caches=cache_of("b")).segments[-1].tasks["b"].first_unit == 0


def test_a_task_that_leaves_and_returns_goes_on_where_it_was():
  plan = plan_of({"a": 1, "b": 3}, batch_size=8, lanes=2)
  plan = plan.change(10, rates={"a": 1}).change(20, rates={"b": 1, "a": 0}).change(30, rates={"a": 1, "b": 1})
  first_units = [{name: task.first_unit for name, task in s.tasks.items()} for s in plan.segments]
  assert first_units == [{"a": 0, "b": 0}, {"a": 20}, {"b": 60}, {"a": 100, "b": 140}]


@pytest.mark.parametrize(
  ("change", "first_stripe"),
  [
    ({}, 4),
    ({"batch_size": 32}, 4),
    ({"lanes": 1}, 4),
    ({"rates": {"a": 1, "b": 2, "c:x": 5}}, 4),
    ({"rates": {"a": 0.1, "b": "1/5", "c:x": 0.5, "B": 0}}, 4),
    ({"rates": {"a": 1, "b": 2, "c:x": 4}}, 0),
    ({"rates": {"a": 2, "b": 1, "c:x": 5}}, 0),
    ({"rates": {"a": 1, "c:x": 5}}, 0),
    ({"rates": {"a": 1, "b": 2, "B": 5}}, 0),
    ({"rates": {"a": 1, "b": 2, "c:x": 5, "B": 1}}, 0),
  ],
)
def test_the_mixtures_sequence_goes_on_only_where_tasks_and_quotas_stay(change, first_stripe):
  plan = plan_of({"a": 1, "b": 2, "c:x": 5}, batch_size=16, lanes=4)
  changed = plan.change(1001, caches=cache_of("B"), **change)
  assert changed.segments[-1].first_stripe == first_stripe
  # From 8 stripes a period at 4 a step on, the second change goes on from the first one's.
  again = changed.change(1003, batch_size=48, lanes=16)
  stripes = changed.segments[-1].stripes_per_step
  assert again.segments[-1].first_stripe == (first_stripe + 2 * stripes) % changed.segments[-1].mixing.period


@pytest.mark.parametrize(
  ("change", "lanes"),
  [
    ({}, 4),
    ({"batch_size": 16}, 4),
    ({"rates": {"a": 5, "B": 1}}, 4),
    ({"batch_size": 64}, 2),
    ({"rates": {"a": 1}}, 4),
    ({"rates": {"B": 1}}, 2),
    ({"rates": {"a": 1, "c:x": 1}}, 1),
    ({"batch_size": 128, "rates": {"a": 1, "c:x": 1}}, 4),
    ({"lanes": 8}, 8),
    ({"lanes": 1, "batch_size": 3}, 1),
  ],
)
def test_lanes_stay_unless_batch_size_or_tasks_change(change, lanes):
  plan = plan_of({"a": 1, "B": 1}, batch_size=16, lanes=4)
  assert plan.change(5, caches=cache_of("c:x"), **change).segments[-1].lanes == lanes


def test_changes_name_the_segments_that_they_drop():
  plan = plan_of({"a": 1}, batch_size=8)
  for step in (10, 20, 30):
    plan = plan.change(step, batch_size=step, reason=f"at {step}")
  assert [segment.start_step for segment in plan.segments] == [0, 10, 20, 30]
  for step, starts, reason in [
    (15, [0, 10, 15], "because; dropped what was to start at 20, 30"),
    (20, [0, 10, 20], "because; dropped what was to start at 20, 30"),
    (25, [0, 10, 20, 25], "because; dropped what was to start at 30"),
    (31, [0, 10, 20, 30, 31], "because"),
    (0, [0], "because; dropped what was to start at 0, 10, 20, 30"),
  ]:
    changed = plan.change(step, batch_size=4, reason="because")
    assert [segment.start_step for segment in changed.segments] == starts
    assert changed.segments[-1].reason == reason
    assert changed.segments[:-1] == plan.segments[: len(starts) - 1]


def test_a_change_leaves_the_plan_that_it_was_made_from_as_it_was():
  plan = plan_of({"a": 1, "b": 1}, batch_size=8)
  text = plan.to_json()
  plan.change(3, rates={"a": 1}).skip(4, 9)
  assert plan.to_json() == text


def test_a_rewound_run_goes_on_from_its_checkpoints_plan_and_the_abandoned_one_does_not_matter():
  plan = plan_of({"a": 1, "b": 1}, batch_size=8)
  text = plan.to_json()
  abandoned = plan.change(10, rates={"b": 1}, trained_steps=10)
  other = Plan.from_json(text).change(5, rates={"a": 1}, trained_steps=5)
  assert [segment.start_step for segment in other.segments] == [0, 5]
  assert other.segments[-1].tasks["a"].first_unit == abandoned.segments[0].units_at(5)["a"]


def test_a_task_that_no_segment_has_any_more_is_no_task_of_the_plan():
  plan = plan_of({"a": 1}, batch_size=8).change(10, rates={"a": 1, "b": 1}, caches=cache_of("b"))
  assert plan.task_names == ["a", "b"]
  assert plan.change(5, batch_size=4).task_names == ["a"]
  assert plan.change(10, rates={"a": 3}).task_names == ["a", "b"]
  assert plan.change(11, rates={"a": 3}).task_names == ["a", "b"]


def test_changes_know_the_shards_of_new_caches_and_of_those_before():
  uneven = {
    name: caches.cache_without_files(task=name, shard_sizes=sizes, block_records=2)
    for name, sizes in [("x", (3, 0, 7)), ("y", (1, 8))]
  }
  plan = (
    Plan.start(uneven["x"], batch_size=4).change(3, rates={"x": 1, "y": 2}, caches=uneven["y"]).skip(5, 6)
  )
  sizes = {"x": [3, 0, 7], "y": [1, 8]}
  assert set(plan.task_names) == {"x", "y"}
  for step in (0, 2, 4, 20):
    for task, unit, *place in zip(*(column.tolist() for column in plan.batch(step)), strict=True):
      name = plan.task_names[task]
      assert tuple(place) == oracle.locate(unit, sizes[name], 2, name, "train", 0, "global")
  again = Plan.from_json(plan.to_json()).on_caches(uneven)
  assert np.array_equal(again.batch(20), plan.batch(20))


@pytest.mark.parametrize("batch_size", [4, 24])
def test_changes_are_exact_at_steps_of_years(batch_size):
  plan = plan_of({"a": 1, "b": 2, "c:x": 5}, batch_size=batch_size, lanes=2)
  for k in range(1, 6):
    plan = plan.change(k * 10**9 + 7, rates={"a": k, "b": 2, "c:x": 5 - k % 2})
  plan = plan.skip(7 * 10**9, 8 * 10**9).change(9 * 10**9, batch_size=2 * batch_size)
  document = json.loads(plan.to_json())
  for step in (0, 10**9 + 6, 10**9 + 7, 5 * 10**9 + 7, 7 * 10**9 - 1, 7 * 10**9, 9 * 10**9, 10**13):
    assert rows_of(plan, step) == oracle.rows(document["segments"], step, {}, None)
  row = rows_of(plan, 10**13)[3]
  assert plan.when(*row) == (10**13, 3)
  given_until_9e9 = (8 * 10**9) * batch_size
  assert sum(task.first_unit for task in plan.segments[-2].tasks.values()) == given_until_9e9
  (first_after_skip, *_), (last_before, *_) = rows_of(plan, 7 * 10**9), rows_of(plan, 7 * 10**9 - 1)
  assert plan.when(last_before[0], last_before[1]) == (7 * 10**9 - 1, 0)
  assert plan.when(first_after_skip[0], first_after_skip[1]) == (7 * 10**9, 0)
  assert plan.when("c:x", plan.segments[-2].tasks["c:x"].first_unit - 1) is None


# End of data


def test_data_ends_at_another_step_after_a_change_or_skip_and_every_host_knows():
  plan = plan_of({"a": 1, "b": 1}, batch_size=10, lanes=1, num_epochs=2)
  # b's 100 units, 5 a step.
  assert plan.num_steps == 20
  ends = {
    "b leaves": (plan.change(4, rates={"a": 1}), 4 + (140 - 20) // 10),
    "a leaves": (plan.change(4, rates={"b": 1}), 4 + (100 - 20) // 10),
    "batch size": (plan.change(4, batch_size=20), 4 + (100 - 20) // 10),
    "skip": (plan.skip(4, 14), 10),
    "skip to the last": (plan.skip(4, 19), 5),
    "third task": (plan.change(4, rates={"a": 1, "b": 1, "c:x": 8}, caches=cache_of("c:x")), 4 + 8),
    "at the last": (plan.change(19, rates={"a": 1}), 19 + 5),
  }
  for changed, num_steps in ends.values():
    assert changed.num_steps == Plan.from_json(changed.to_json()).num_steps == num_steps


# What is refused


def started(**settings):
  return plan_of({"a": 1, "b": 1}, batch_size=10, lanes=1, num_epochs=2, **settings)


def test_steps_that_are_trained_are_past():
  plan = started()
  for edit in (
    lambda: plan.change(4, batch_size=5, trained_steps=5),
    lambda: plan.skip(4, 9, trained_steps=5),
    lambda: plan.change(0, batch_size=5, trained_steps=5),
  ):
    with pytest.raises(AnystepError) as refused:
      edit()
    assert (refused.value.code, refused.value.kind) == (78, "step_trained")
    assert refused.value.fields["expected"] == "a step not yet trained: 5 or later"
    assert refused.value.fields["got"] in (0, 4)
  assert plan.change(5, batch_size=5, trained_steps=5).segments[-1].start_step == 5
  assert plan.skip(5, 9, trained_steps=5).segments[-1].start_step == 5


@pytest.mark.parametrize(
  ("edit", "got"),
  [
    (lambda plan: plan.change(20, batch_size=5), 20),
    (lambda plan: plan.change(10**9, batch_size=5), 10**9),
    (lambda plan: plan.skip(20, 21), 20),
    (lambda plan: plan.skip(3, 20), 20),
    (lambda plan: plan.skip(25, 26), 25),
  ],
)
def test_after_the_data_there_is_nothing_to_change(edit, got):
  with pytest.raises(AnystepError) as refused:
    edit(started())
  assert (refused.value.code, refused.value.kind) == (78, "data_ended")
  assert refused.value.fields == {"expected": "a step below 20", "got": got}


@pytest.mark.parametrize("until", [5, 4, 0, -1, 5.5, True, None, "9"])
def test_a_skip_that_skips_nothing_is_refused(until):
  with pytest.raises(AnystepError) as refused:
    started().skip(5, until)
  assert (refused.value.code, refused.value.kind) == (64, "skip")
  assert refused.value.fields == {"expected": "steps [5, b) with b > 5", "got": repr(until)}


@pytest.mark.parametrize("step", [-1, 1.0, True, None, "3"])
def test_a_change_at_no_step_is_refused(step):
  with pytest.raises(AnystepError) as refused:
    started().change(step, batch_size=5)
  assert (refused.value.code, refused.value.kind) == (78, "step")
  assert refused.value.fields == {"expected": "a step, a whole number >= 0", "got": repr(step)}


@pytest.mark.parametrize(
  ("kind", "change", "fields"),
  [
    (
      "task_unknown",
      {"rates": {"a": 1, "bb": 2}},
      {"expected": "tasks whose caches are given: b", "got": "bb"},
    ),
    ("rates", {"rates": {"a": 1, "b": -1}}, {"task": "b", "expected": "a finite number >= 0", "got": "-1"}),
    (
      "rates",
      {"rates": {"a": 0, "b": 0}},
      {"expected": "1 to 8192 tasks with a rate above zero", "got": "0 of 2 tasks"},
    ),
    ("rates", {"rates": {}}, {"expected": "1 to 8192 tasks with a rate above zero", "got": "0 of 0 tasks"}),
    *[
      ("batch_size", {"batch_size": value}, {"expected": "at least 1 row", "got": repr(value)})
      for value in (0, -1, True, 1.5)
    ],
    *[
      ("lanes", {"lanes": value}, {"expected": "a divisor of 10: [1, 2, 5, 10]", "got": repr(value)})
      for value in (0, -1, 3, 20, True, 2.0)
    ],
    ("lanes", {"batch_size": 9, "lanes": 2}, {"expected": "a divisor of 9: [1, 3, 9]", "got": "2"}),
    (
      "split",
      {"caches": caches.cache_without_files(task="c", split="test"), "rates": {"a": 1, "c": 1}},
      {"expected": "train", "got": "'test of c'"},
    ),
    (
      "caches",
      {"caches": [cache_of("B"), cache_of("B")], "rates": {"a": 1, "B": 1}},
      {"expected": "one cache a task", "got": "['B', 'B']"},
    ),
  ],
)
def test_changes_that_make_no_plan_are_refused(kind, change, fields):
  with pytest.raises(AnystepError) as refused:
    started().change(5, **change)
  assert (refused.value.code, refused.value.kind) == (64 if kind == "task_unknown" else 78, kind)
  assert refused.value.fields == fields


def test_another_cache_of_a_task_that_the_plan_knows_is_refused():
  """Its examples of before would be others."""
  other = caches.cache_without_files(task="a", num_examples=70, num_shards=4, block_records=8)
  plan = started()
  for known in (plan, plan.change(3, rates={"b": 1})):
    with pytest.raises(AnystepError) as refused:
      known.change(5, rates={"a": 1, "b": 1}, caches=other)
    assert (refused.value.code, refused.value.kind) == (76, "plan_cache")
    assert refused.value.fields["task"] == "a"
  assert plan.change(5, rates={"a": 1}, caches=cache_of("a")).tasks == plan.tasks


def test_a_new_task_without_examples_is_refused():
  empty = caches.cache_without_files(task="c", num_examples=0, num_shards=1)
  with pytest.raises(AnystepError) as refused:
    started().change(5, rates={"a": 1, "c": 1}, caches=empty)
  assert (refused.value.code, refused.value.kind) == (66, "cache_empty")
  assert refused.value.fields["task"] == "c"


def test_a_new_task_of_other_feature_lengths_is_refused():
  at_end = caches.cache_without_files(
    task="c", cache_at="end", task_feature_lengths={"inputs": 5, "targets": 4}
  )
  plan = started(feature_lengths={"inputs": 5, "targets": 6})
  with pytest.raises(AnystepError) as refused:
    plan.change(5, rates={"a": 1, "c": 1}, caches=at_end)
  assert (refused.value.code, refused.value.kind) == (78, "feature_lengths")
  assert refused.value.fields == {"task": "c", "feature": "targets", "expected": 6, "got": 4}
