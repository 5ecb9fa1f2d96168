"""What --determinism_check finds: preprocessors that make something else of an example the second time."""

import random
import time

import numpy as np
import pytest
import small_tasks
import tensorflow as tf
from job_runs import digests_of, registered, run_job

from anystep.cache_job.shuffle import spill
from anystep.caches.cache import open_cache
from anystep.errors import AnystepError

ALL = "--determinism_check=100"
SIZES = {"train": (6, 0, 5)}


def texts_task(name, *steps, sizes=SIZES):
  return small_tasks.task(name, before=steps, sizes=sizes)


def add(dataset, value_of, name="drawn"):
  """Adds what a function outside TensorFlow's graph returns for an example's name."""

  def look(example_name):
    return np.float32(value_of(example_name.numpy().decode()))

  def through_python(example):
    return {**example, name: tf.ensure_shape(tf.py_function(look, [example["name"]], tf.float32), [])}

  return dataset.map(through_python)


def draw(dataset):
  return add(dataset, lambda _: random.random())


def draw_when_traced(dataset):
  return dataset.map(lambda example: {**example, "drawn": tf.constant(random.random())})


def clock(dataset):
  return add(dataset, lambda _: time.monotonic() % 1000)


def shuffle_by_itself(dataset):
  return dataset.shuffle(100, seed=random.randrange(1 << 30))


def drop_by_itself(dataset):
  return dataset.take(4 - len(AGAIN))


def long_row(dataset):
  """Differs in the middle of what is too long to be shown, and by less than is shown of a number."""
  row = np.full(5000, 1, np.float32)
  row[2500] += len(AGAIN) * np.finfo(np.float32).eps
  return dataset.map(lambda example: {**example, "row": row})


# Has something in it while preprocessors run the second time.
AGAIN = []


@pytest.fixture(autouse=True)
def watched(monkeypatch):
  """The source shards that are checked."""
  checked, check = [], spill._check_again

  def watch(job, source, *rest):
    checked.append(source.number)
    AGAIN.append(source.number)
    check(job, source, *rest)
    AGAIN.clear()

  monkeypatch.setattr(spill, "_check_again", watch)
  yield checked
  AGAIN.clear()


def refusal(root, task, *flags):
  with registered(task), pytest.raises(AnystepError) as caught:
    run_job(root, *flags, tasks=task.name)
  return caught.value


def test_preprocessors_that_draw_by_their_seeds_pass_and_the_bytes_are_the_same(tmp_path):
  steps = (*small_tasks.BEFORE_CACHE, small_tasks.jitter)
  task = texts_task("small_drawn_well", *steps, sizes={"train": (9,)})
  with registered(task):
    for root, *flags in ("checked", ALL), ("unchecked",):
      run_job(tmp_path / root, *flags, tasks=task.name)
  assert digests_of(tmp_path / "checked") == digests_of(tmp_path / "unchecked")


@pytest.mark.parametrize(
  ("step", "place", "features"),
  [
    (draw, "0", "drawn"),
    pytest.param(draw_when_traced, "0", "drawn", marks=pytest.mark.long),
    pytest.param(clock, "0", "drawn", marks=pytest.mark.long),
    (long_row, "0", "row"),
    (drop_by_itself, "3", ""),
  ],
)
def test_those_that_draw_otherwise_are_named_with_the_example_and_its_features(
  tmp_path, step, place, features
):
  task = texts_task("small_drawn", step)
  error = refusal(tmp_path, task, ALL)
  assert (error.code, error.kind) == (65, "preprocessors_differ")
  assert (error.fields["task"], error.fields["split"]) == (task.name, "train")
  assert (error.fields["source_shard"], error.fields["place"]) == ("train part 0", place)
  assert error.fields["features"] == features
  assert error.fields["expected"] != error.fields["got"]


@pytest.mark.long
def test_another_order_is_a_difference(tmp_path):
  task = texts_task("small_shuffled", shuffle_by_itself, sizes={"train": (40,)})
  error = refusal(tmp_path, task, ALL)
  assert (error.kind, "name" in error.fields["features"]) == ("preprocessors_differ", True)


def test_the_first_source_shard_is_checked_for_any_percentage_and_none_for_0(tmp_path):
  task = texts_task("small_drawn", draw)
  assert refusal(tmp_path, task, "--determinism_check=0.001").fields["source_shard"] == "train part 0"
  with registered(task):
    run_job(tmp_path, tasks=task.name)
  assert len(open_cache(tmp_path, task.name, "train")) > 0


def checked_shards(watched, root, task, *flags):
  watched.clear()
  with registered(task):
    run_job(root, *flags, tasks=task.name)
  return sorted(watched)


def test_a_percentage_is_a_share_of_source_shards_and_always_the_same_ones(tmp_path, watched):
  task = texts_task("small_shares", sizes={"train": (1,) * 12})
  shares = [
    checked_shards(watched, tmp_path / str(run), task, f"--determinism_check={percent}")
    for run, percent in enumerate([25, 25, 60])
  ]
  assert shares[0] == shares[1]
  # A larger share has the smaller one within it.
  assert {0} < set(shares[0]) < set(shares[2]) < set(range(12))


def test_a_job_that_was_stopped_checks_what_it_finished_without_being_asked(tmp_path, monkeypatch, watched):
  task = texts_task("small_resumed", small_tasks.observe)
  monkeypatch.setenv("SMALL_TASKS_RAISE_AT", "train-2-4")
  assert refusal(tmp_path, task).kind == "preprocessor_failed"
  monkeypatch.delenv("SMALL_TASKS_RAISE_AT")
  assert checked_shards(watched, tmp_path, task, ALL) == [0, 1, 2]


def test_a_job_that_was_stopped_does_not_check_again_what_it_has_checked(tmp_path, monkeypatch, watched):
  task = texts_task("small_resumed", small_tasks.observe)
  monkeypatch.setenv("SMALL_TASKS_RAISE_AT", "train-2-4")
  assert refusal(tmp_path, task, ALL).kind == "preprocessor_failed"
  monkeypatch.delenv("SMALL_TASKS_RAISE_AT")
  assert checked_shards(watched, tmp_path, task, ALL) == [2]


def test_examples_that_are_left_out_are_left_out_of_the_comparison(tmp_path, monkeypatch):
  task = texts_task("small_left_out", small_tasks.observe)
  monkeypatch.setenv("SMALL_TASKS_RAISE_AT", "train-0-2")
  with registered(task):
    run_job(tmp_path, ALL, "--max_bad_examples=2", tasks=task.name)
  assert open_cache(tmp_path, task.name, "train").manifest.bad_examples == 1
