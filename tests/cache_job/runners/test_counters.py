"""Beam's counters have what the cache has, whatever the runner, and also where work was done before."""

import pathlib

import numpy as np
import pytest
import small_tasks
from job_runs import registered, run_job

from anystep.cache_job import job
from anystep.cache_job.options import CacheOptions
from anystep.cache_job.planning.estimates import estimate_split
from anystep.cache_job.planning.task_work import plan_work
from anystep.cache_job.runners.counters import read_counters
from anystep.caches.cache import open_cache

NAME = "small_counted"
SIZES = {"train": (40, 0, 50, 30), "validation": (3,)}


@pytest.fixture
def counters(monkeypatch):
  """The counters of each job, in order."""
  seen = []
  monkeypatch.setattr(job, "report_counters", lambda result: seen.append(read_counters(result)))
  return seen


def values_of(counters, stage):
  return {name.removeprefix(f"{stage}_"): value for name, value in counters.items() if name.startswith(stage)}


@pytest.mark.parametrize("flags", [(), ("--range_examples=20",)], ids=["whole", "cut"])
def test_counters_are_those_of_the_manifest(counters, tmp_path, flags):
  with registered(small_tasks.task(NAME, sizes=SIZES)):
    run_job(tmp_path, "--num_shards=3", *flags, tasks=NAME)
  for split in SIZES:
    cache = open_cache(tmp_path, NAME, split)
    (of_job,) = counters
    preprocess, sort, write = (
      values_of(of_job[f"{NAME}/{split}"], s) for s in ("preprocess", "sort", "write")
    )
    record_bytes = sum(len(record) for record in all_records(cache))
    assert (preprocess["examples"], preprocess["bytes"]) == (len(cache), record_bytes)
    assert preprocess["milliseconds"] > 0
    assert (sort["examples"], write["examples"]) == (len(cache), len(cache))
    assert write["bytes"] == sum(
      file.bytes for file in (*cache.manifest.record_files, *cache.manifest.lengths_files)
    )
    assert ("count_examples" in of_job[f"{NAME}/{split}"]) == bool(flags)


def all_records(cache):
  return cache.read_records(*cache.locate(np.arange(len(cache))))


def test_ranges_that_are_read_are_those_that_the_dry_run_says(counters, tmp_path, monkeypatch):
  # So that a few examples make several groups, each of several spills.
  for module in ("spill_files", "group_sizes"):
    monkeypatch.setattr(f"anystep.cache_job.state.{module}.FILE_BYTES", 1 << 15)
  monkeypatch.setattr("anystep.cache_job.state.group_sizes._PROCESS_BYTES", 2048 << 20)
  with registered(small_tasks.task(NAME, sizes={"train": (64,) * 8})):
    options = CacheOptions(cache_dir=str(tmp_path), num_shards=4)
    (work,) = plan_work([NAME], options)
    (planned,) = work.jobs
    estimate = estimate_split(work.task, planned)
    run_job(tmp_path, "--num_shards=4", tasks=NAME)
  values = counters[0][f"{NAME}/train"]
  ranges = values["sort_ranges"] + values["write_ranges"]
  assert values["write_ranges"] > 2 * 4
  assert estimate.ranges == pytest.approx(ranges, rel=0.25)
  read = values["sort_range_bytes"] + values["write_range_bytes"]
  assert estimate.temporary_bytes == pytest.approx(read, rel=0.35)


def test_what_an_earlier_job_preprocessed_is_counted_too(counters, tmp_path, monkeypatch):
  with registered(small_tasks.task(NAME, sizes={"train": (5, 6)})):
    monkeypatch.setenv("SMALL_TASKS_RAISE_AT", "train-1-2")
    with pytest.raises(Exception, match="indigestible"):
      run_job(tmp_path, tasks=NAME)
    monkeypatch.delenv("SMALL_TASKS_RAISE_AT")
    run_job(tmp_path, tasks=NAME)
  cache = open_cache(tmp_path, NAME, "train")
  assert counters[-1][f"{NAME}/train"]["preprocess_examples"] == len(cache) > 5
  assert not list(pathlib.Path(tmp_path).rglob(".building"))
