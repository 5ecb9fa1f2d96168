"""Failures of runners and of the workers they start."""

from __future__ import annotations

import re
import socket
import sys
from collections.abc import Iterable

from anystep.errors import AnystepError, ExitCode
from anystep.tasks.registry.modules import import_modules

_MISSING_MODULE = re.compile(r"ModuleNotFoundError: No module named '([^']+)'")
_SHIP_MODULES = (
  "give the workers the module: in their image (--sdk_container_image), with --setup_file or"
  " --extra_package, or on the PYTHONPATH that a worker pool is started with"
)


def runner_failure(error: BaseException) -> AnystepError | None:
  """What a runner's exception says of its workers and its service; None where it says nothing of them.

  Workers unpickle the job's functions before any of them runs, so one without this package can leave
  nothing but a traceback, of which runners pass on the text.

  Returns:
    78 `module_import` for a module that a worker has not; 74 `runner_unreachable`.
  """
  import grpc

  if isinstance(error, grpc.FutureTimeoutError):
    return AnystepError(
      ExitCode.IO,
      "runner_unreachable",
      expected="a job service that answers within --job_server_timeout seconds",
      got="no answer",
      fix="start it, or give its address as --job_endpoint=host:port",
    )
  missing = _MISSING_MODULE.search(str(error))
  if missing is None:
    return None
  return AnystepError(
    ExitCode.CONFIG,
    "module_import",
    module=missing.group(1),
    got=missing.group(),
    fix="install anystep[cache], of the parent's version, and the tasks' modules where the workers run",
  )


def import_in_worker(modules: Iterable[str]) -> None:
  """Imports modules that register tasks where a runner has put the work.

  The parent has imported them before it started the job, so a module that fails here is one that the worker
  has not, or whose own imports it has not.

  Raises:
    AnystepError: 78 `module_import`, with the worker's host and Python.
  """
  try:
    import_modules(modules)
  except AnystepError as error:
    if error.kind == "module_import":
      error.fields = {**error.fields, "host": socket.gethostname(), "python": sys.executable}
      error.fix = _SHIP_MODULES
    raise
