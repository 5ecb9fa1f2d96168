"""A dry run says what the job would do, and does nothing."""

import pytest
import small_tasks
from job_runs import registered, run_job, stamps_of

from anystep.errors import AnystepError

TASK = small_tasks.task("small_dry", sizes={"train": (4, 3), "validation": (5,)})


@pytest.fixture(autouse=True, scope="module")
def tasks():
  with registered(TASK):
    yield


def dry_run(cache_dir, capsys, *flags):
  """What it prints, after a check that it changed nothing."""
  before = stamps_of(cache_dir)
  capsys.readouterr()
  run_job(cache_dir, "--dry_run", *flags, tasks=TASK.name)
  assert stamps_of(cache_dir) == before
  return capsys.readouterr().out.splitlines()


def test_a_dry_run_says_what_is_done_and_what_is_left_to_do(tmp_path, capsys, monkeypatch):
  cache_dir = tmp_path / "cache"
  assert dry_run(cache_dir, capsys, "--output_format=tfrecord") == [
    f"small_dry: to {cache_dir / 'small_dry'}",
    "  train: 2 source shards, would be cached as tfrecord",
    "  validation: 1 source shard, would be cached as tfrecord",
  ]
  assert not cache_dir.exists()

  run_job(cache_dir, "--splits=validation", tasks=TASK.name)
  monkeypatch.setenv("SMALL_TASKS_RAISE_AT", "train-1-2")
  with pytest.raises(AnystepError, match="indigestible"):
    run_job(cache_dir, tasks=TASK.name)
  # With threads, the other source shard may or may not have come to its end.
  done = (cache_dir / "small_dry").glob(".building/train-*/spill-00000.json")
  some = "1 of them preprocessed by an earlier run, " if list(done) else ""
  assert dry_run(cache_dir, capsys) == [
    f"small_dry: to {cache_dir / 'small_dry'}",
    "  validation: complete, left as it is",
    f"  train: 2 source shards, {some}would be cached as array_record",
  ]

  monkeypatch.delenv("SMALL_TASKS_RAISE_AT")
  run_job(cache_dir, tasks=TASK.name)
  assert dry_run(cache_dir, capsys) == ["small_dry: the cache is complete, left as it is"]
  assert len(dry_run(cache_dir, capsys, "--overwrite")) == 3


def test_a_dry_run_ends_as_the_job_would_where_that_is_refused(tmp_path):
  with pytest.raises(AnystepError, match="split_unknown"):
    run_job(tmp_path, "--dry_run", "--splits=nothing", tasks=TASK.name)
  assert list(tmp_path.iterdir()) == []
