"""Failures of runners and of workers without the modules that register tasks."""

import socket
import sys

import pytest

from anystep.cache_job.runners.worker_failures import explain_runner_error, import_in_worker
from anystep.errors import AnystepError, ExitCode


def test_a_worker_without_the_module_says_who_it_is_and_how_to_give_it_the_module():
  import_in_worker(["json"])
  with pytest.raises(AnystepError) as caught:
    import_in_worker(["json", "no_such_tasks"])
  error = caught.value
  assert (error.code, error.kind) == (ExitCode.CONFIG, "module_import")
  assert error.fields["module"] == "no_such_tasks"
  assert error.fields["host"] == socket.gethostname()
  assert error.fields["python"] == sys.executable
  assert all(way in error.fix for way in ("--sdk_container_image", "--setup_file", "PYTHONPATH"))


def test_a_module_that_workers_cannot_unpickle_from_is_named():
  """As Beam's runners pass on what a worker said."""
  trace = 'Traceback (most recent call last):\n  File "pickler.py", line 1, in loads\n'
  failure = explain_runner_error(
    RuntimeError(f"{trace}ModuleNotFoundError: No module named 'parents_own'\n\n")
  )
  assert (failure.code, failure.kind) == (ExitCode.CONFIG, "module_import")
  assert failure.fields["module"] == "parents_own"


def test_other_failures_are_nothing_that_we_know_of():
  assert explain_runner_error(ValueError("No module is to blame")) is None


def test_a_job_that_dataflow_has_by_that_name_is_one_that_runs():
  class DataflowJobAlreadyExistsError(Exception):
    pass

  failure = explain_runner_error(DataflowJobAlreadyExistsError("There is already active job named anystep-1"))
  assert (failure.code, failure.kind) == (ExitCode.CANNOT_CREATE, "job_running")
  assert "anystep-1" in failure.fields["got"]
