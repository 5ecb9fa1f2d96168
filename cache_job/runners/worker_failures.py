"""Failures of runners and of the workers they start."""

from __future__ import annotations

import re
import socket
import sys
from collections.abc import Iterable

from anystep.errors import AnystepError, ExitCode, one_line
from anystep.tasks.registry.modules import import_modules

_MISSING_MODULE = re.compile(r"ModuleNotFoundError: No module named '([^']+)'")
_SHIP_MODULES = (
  "give the workers the module: in their image (--sdk_container_image), with --setup_file or"
  " --extra_package, or on the PYTHONPATH that a worker pool is started with"
)


def explain_runner_error(error: BaseException) -> AnystepError | None:
  """Return the error that a runner's exception stands for; None where it tells nothing of workers or service.

  Workers unpickle the job's functions before any of them runs. A worker without this package can only raise,
  and runners pass on the text of its traceback.

  Returns:
    78 `module_import` for a module that a worker lacks; 74 `runner_unreachable`; 73 `job_running` where
    Dataflow has a job of that name.
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
  if type(error).__name__ == "DataflowJobAlreadyExistsError":
    # Its class is there only where apache-beam[gcp] is. Ours are named by the work that they do.
    return AnystepError(
      ExitCode.CANNOT_CREATE,
      "job_running",
      expected="no other job on Dataflow for the same work",
      got=one_line(error, with_type=False),
      fix="wait for that job, or cancel it",
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
  """Import modules that register tasks in a worker.

  The parent has imported them before it started the job, so where one fails here, the worker lacks it or
  something that it imports.

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
