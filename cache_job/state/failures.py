"""What fails in workers, told to the parent through the job's directory."""

from __future__ import annotations

import contextlib
import errno
import logging
from collections.abc import Iterator
from typing import Any

from etils import epath

from anystep.cache_job.state.split_job import SplitJob, find_state
from anystep.errors import AnystepError, ExitCode, one_line
from anystep.files import storage
from anystep.files.json_files import canonical_json

_AGAIN = "run the same command again; what is finished is kept"


def failure_path(job: SplitJob) -> epath.Path:
  """Where a worker that failed says why."""
  return epath.Path(job.directory) / "failure.json"


@contextlib.contextmanager
def reported_failures(job: SplitJob, **where: object) -> Iterator[None]:
  """Makes an `AnystepError` of what fails in a worker and leaves it where the parent finds it.

  Runners hand the parent some text of what a worker raised, and each another.
  """
  try:
    yield
  except Exception as error:
    is_foreseen = isinstance(error, AnystepError)
    failure = failure_of(error, job, **where)
    # On a full disk there is no room for this either.
    with contextlib.suppress(OSError):
      storage.put(failure_path(job), _failure_json(failure).encode())
    if is_foreseen:
      raise
    raise failure from error


def failure_of(error: Exception, job: SplitJob, **where: object) -> AnystepError:
  """The foreseen failure that something raised stands for, with the split that it is of."""
  failure = (
    error if isinstance(error, AnystepError) else _foreseen(error, preprocessing="source_shard" in where)
  )
  failure.fields = {"task": job.task, "split": job.split, **where, **failure.fields}
  return failure


@contextlib.contextmanager
def failures_told_once() -> Iterator[None]:
  """Keeps Beam from logging tracebacks of foreseen failures of workers in this process: the parent tells."""
  logger = logging.getLogger("apache_beam.runners.common")

  def is_news(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, AnystepError)

  logger.addFilter(is_news)
  try:
    yield
  finally:
    logger.removeFilter(is_news)


@contextlib.contextmanager
def full_disks_reported() -> Iterator[None]:
  """Makes an `AnystepError` of a full disk that the parent meets; its other failures are any program's."""
  try:
    yield
  except OSError as error:
    if _is_full(error):
      raise _foreseen(error, preprocessing=False) from error
    raise


def read_failure(job: SplitJob) -> AnystepError | None:
  """What a worker failed of; None where none did."""
  return find_state(failure_path(job), _failure_of)


def _failure_of(document: Any) -> AnystepError:
  code = ExitCode(document["code"])
  return AnystepError(code, document["kind"], fix=document["fix"], **dict(document["fields"]))


def _failure_json(failure: AnystepError) -> str:
  # In pairs, for they are printed in this order.
  fields = [(name, str(value)) for name, value in failure.fields.items()]
  return canonical_json(
    {"code": int(failure.code), "kind": failure.kind, "fix": failure.fix, "fields": fields}
  )


def _is_full(error: OSError) -> bool:
  return error.errno in (errno.ENOSPC, errno.EDQUOT)


def _foreseen(error: Exception, *, preprocessing: bool) -> AnystepError:
  if isinstance(error, OSError):
    kind, fix = ("disk_full", "make room") if _is_full(error) else ("io_failed", "see to the disk or store")
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
