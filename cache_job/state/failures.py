"""Failures of workers, passed to the parent through the job's directory."""

from __future__ import annotations

import contextlib
import errno
import logging
from collections.abc import Iterator
from typing import Any

from etils import epath

from anystep.cache_job.state.job_lock import keep_lock
from anystep.cache_job.state.split_job import SplitJob, find_state, locate_file
from anystep.errors import AnystepError, ExitCode, one_line
from anystep.files import storage
from anystep.files.json_files import canonical_json

_AGAIN = "run the same command again; what is finished is kept"


def locate_failure(job: SplitJob) -> epath.Path:
  """Return the file where a worker that failed notes its error."""
  return locate_file(job, "failure.json")


@contextlib.contextmanager
def report_failures(job: SplitJob, **where: object) -> Iterator[None]:
  """Make an `AnystepError` of a worker's exception, and write it where the parent finds it.

  Runners pass on only a text of the exception, and each another.
  """
  try:
    keep_lock(job)
    yield
  except Exception as error:
    is_foreseen = isinstance(error, AnystepError)
    failure = make_failure(error, job, **where)
    # On a full disk there is no room for this either.
    with contextlib.suppress(OSError):
      storage.put(locate_failure(job), _format_failure(failure).encode())
    if is_foreseen:
      raise
    raise failure from error


def make_failure(error: Exception, job: SplitJob, **where: object) -> AnystepError:
  """Return the `AnystepError` that an exception stands for, with its split."""
  failure = (
    error if isinstance(error, AnystepError) else _explain(error, preprocessing="source_shard" in where)
  )
  failure.fields = {"task": job.task, "split": job.split, **where, **failure.fields}
  return failure


@contextlib.contextmanager
def silence_known_failures() -> Iterator[None]:
  """Keep Beam from logging tracebacks of an `AnystepError` or of Ctrl-C: the parent prints those."""
  logger = logging.getLogger("apache_beam.runners.common")

  def is_news(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, (AnystepError, KeyboardInterrupt))

  logger.addFilter(is_news)
  try:
    yield
  finally:
    logger.removeFilter(is_news)


@contextlib.contextmanager
def report_full_disks() -> Iterator[None]:
  """Make an `AnystepError` of a full disk in the parent; its other errors are those of any program."""
  try:
    yield
  except OSError as error:
    if _is_disk_full(error):
      raise _explain(error, preprocessing=False) from error
    raise


def read_failure(job: SplitJob) -> AnystepError | None:
  """Return the error of a worker; None where none failed."""
  return find_state(locate_failure(job), _parse_failure)


def _parse_failure(document: Any) -> AnystepError:
  code = ExitCode(document["code"])
  return AnystepError(code, document["kind"], fix=document["fix"], **dict(document["fields"]))


def _format_failure(failure: AnystepError) -> str:
  # In pairs, for they are printed in this order.
  fields = [(name, str(value)) for name, value in failure.fields.items()]
  return canonical_json(
    {"code": int(failure.code), "kind": failure.kind, "fix": failure.fix, "fields": fields}
  )


def _is_disk_full(error: OSError) -> bool:
  return error.errno in (errno.ENOSPC, errno.EDQUOT)


def _explain(error: Exception, *, preprocessing: bool) -> AnystepError:
  if isinstance(error, OSError):
    kind, fix = (
      ("disk_full", "make room") if _is_disk_full(error) else ("io_failed", "check the disk or store")
    )
    return AnystepError(ExitCode.IO, kind, got=one_line(error), fix=f"{fix}, and {_AGAIN}")
  if not preprocessing:
    fix = f"give workers more memory, or the cache more and smaller shards, and {_AGAIN}"
    return AnystepError(ExitCode.IO, "worker_failed", got=one_line(error), fix=fix)
  return AnystepError(
    ExitCode.DATA,
    "preprocessor_failed",
    got=one_line(error),
    fix=f"mend the task's source or preprocessor, and {_AGAIN}",
  )
