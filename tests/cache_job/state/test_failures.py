"""What a worker fails of is an error that the parent reads and that says what to do."""

import errno
import pathlib

import apache_beam as beam
import pytest

from anystep.cache_job.options import CacheOptions
from anystep.cache_job.runners.pipelines import start_pipeline
from anystep.cache_job.state.failures import (
  locate_failure,
  make_failure,
  read_failure,
  report_failures,
  silence_known_failures,
)
from anystep.cache_job.state.split_job import SplitJob, make_incomplete_error
from anystep.errors import AnystepError, ExitCode


@pytest.fixture
def job(tmp_path):
  return SplitJob(
    task="t",
    split="train",
    directory=str(tmp_path),
    source_shards=("a",),
    seqio_cache=None,
    options=CacheOptions(cache_dir="cache", modules=("m",)),
  )


@pytest.mark.parametrize(
  ("error", "where", "code", "kind", "fix"),
  [
    (RuntimeError("killed\n  by 9"), {}, 74, "worker_failed", "memory"),
    (RuntimeError("killed\n  by 9"), {"source_shard": "a"}, 65, "preprocessor_failed", "mend"),
    (OSError(errno.ENOSPC, "full"), {}, 74, "disk_full", "make room"),
    (OSError(errno.EIO, "broken"), {"source_shard": "a"}, 74, "io_failed", "check the disk"),
  ],
)
def test_a_parent_reads_what_a_worker_failed_of(job, error, where, code, kind, fix):
  def fail():
    with report_failures(job, **where):
      raise error

  with pytest.raises(AnystepError):
    fail()
  failure = read_failure(job)
  assert (failure.code, failure.kind) == (code, kind)
  assert failure.fields == {
    "task": "t",
    "split": "train",
    **where,
    "got": " ".join(f"{type(error).__name__}: {error}".split()),
  }
  assert fix in failure.fix
  assert "run the same command again" in failure.fix


def test_a_failure_that_no_worker_wrote_is_damage_to_the_jobs_state(job):
  assert read_failure(job) is None
  pathlib.Path(locate_failure(job)).write_text("{")
  with pytest.raises(AnystepError) as caught:
    read_failure(job)
  assert (caught.value.code, caught.value.kind) == (65, "job_state_invalid")
  assert "--noresume" in caught.value.fix


def test_what_workers_did_not_leave_is_named_with_its_split(job):
  failure = make_failure(make_incomplete_error("t", "train", "d/spill", "a spill"), job)
  assert (failure.code, failure.kind) == (74, "job_incomplete")
  assert (failure.fields["path"], failure.fields["expected"]) == ("d/spill", "a spill")


@pytest.mark.parametrize(
  "error",
  [
    pytest.param(KeyboardInterrupt(), id="Ctrl-C"),
    pytest.param(AnystepError(ExitCode.IO, "disk_full", fix="make room"), id="ours"),
    pytest.param(ZeroDivisionError("news"), id="news"),
  ],
)
def test_beam_logs_no_traceback_of_what_the_parent_prints(error, caplog):
  def fail(_):
    raise error

  def fill(pipeline):
    _ = pipeline | beam.Create([1]) | beam.Map(fail)

  with silence_known_failures(), pytest.raises(BaseException):  # noqa: B017, PT011
    start_pipeline(fill, [], name="fails").wait_until_finish()
  assert ("Traceback" in caplog.text) == isinstance(error, ZeroDivisionError)
