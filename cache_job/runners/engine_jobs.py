"""Jobs on engines, by the ids that engines give them: whether one still runs, whoever started it."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from anystep.cache_job.runners.pipelines import create_runner, is_dataflow

if TYPE_CHECKING:
  from apache_beam.options.pipeline_options import PipelineOptions
  from apache_beam.runners.runner import PipelineResult

_POLL_SECONDS = 1.0
_TIMEOUT_SECONDS = 10.0
# What engines call a job that may still do something.
_RUNNING = (
  {"STARTING", "RUNNING", "UPDATING", "DRAINING", "CANCELLING", "RESUMING"}
  | {"INITIALIZING", "CREATED", "RESTARTING", "FAILING", "RECONCILING", "SUSPENDED"}
  | {f"JOB_STATE_{state}" for state in ("QUEUED", "PENDING", "RUNNING", "DRAINING", "CANCELLING")}
)


def get_job_id(result: PipelineResult) -> str | None:
  """Return the id of a job that was submitted; None where the runner is in this process."""
  job_id = getattr(result, "job_id", None)
  return job_id() if callable(job_id) else getattr(result, "_job_id", None)


def wait_for_job(arguments: Iterable[str], *, job_id: str, name: str) -> bool:
  """Wait for a job that an engine runs, as long as it runs; return whether there was one.

  Args:
    arguments: those of Beam's command line with which it was submitted.
    job_id: as `get_job_id` gave it.
    name: the job's.
  """
  find_state = _make_finder(arguments, job_id=job_id, name=name)
  was_running = False
  while find_state() in _RUNNING:
    was_running = True
    time.sleep(_POLL_SECONDS)
  return was_running


def _make_finder(arguments: Iterable[str], *, job_id: str, name: str) -> Callable[[], str | None]:
  """Return what asks for a job's state, None where nobody knows the job."""
  from apache_beam.options.pipeline_options import FlinkRunnerOptions, GoogleCloudOptions, PortableOptions

  runner, options = create_runner(arguments)
  endpoint = options.view_as(PortableOptions).job_endpoint
  flink_master = options.view_as(FlinkRunnerOptions).flink_master
  if is_dataflow(runner):
    return lambda: _ask_dataflow(options, job_id)
  if endpoint:
    return lambda: _ask_job_service(endpoint, job_id)
  if type(runner).__name__ == "FlinkRunner" and not flink_master.startswith("["):
    # Its job service is started with each program, and knows the jobs of that one alone.
    return lambda: _ask_flink(flink_master, options.view_as(GoogleCloudOptions).job_name or name)
  return lambda: None


def _ask_job_service(endpoint: str, job_id: str) -> str | None:
  import grpc
  from apache_beam.portability.api import beam_job_api_pb2, beam_job_api_pb2_grpc

  with grpc.insecure_channel(endpoint) as channel:
    request = beam_job_api_pb2.GetJobStateRequest(job_id=job_id)
    try:
      response = beam_job_api_pb2_grpc.JobServiceStub(channel).GetState(request, timeout=_TIMEOUT_SECONDS)
    except grpc.RpcError:
      return None
  return beam_job_api_pb2.JobState.Enum.Name(response.state)


def _ask_flink(master: str, name: str) -> str | None:
  """Return the state of the newest job of a name."""
  url = f"{master if '://' in master else f'http://{master}'}/jobs/overview"
  try:
    with urllib.request.urlopen(url, timeout=_TIMEOUT_SECONDS) as response:
      jobs = json.load(response)["jobs"]
  except (urllib.error.URLError, TimeoutError):
    return None
  states = [(job["start-time"], job["state"]) for job in jobs if job["name"] == name]
  return max(states)[1] if states else None


def _ask_dataflow(options: PipelineOptions, job_id: str) -> str | None:
  from apache_beam.runners.dataflow.internal import apiclient

  job = apiclient.DataflowApplicationClient(options).get_job(job_id)
  return str(job.current_state.name if hasattr(job.current_state, "name") else job.current_state)
