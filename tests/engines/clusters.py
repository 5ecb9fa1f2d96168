"""Engines on this machine, of processes on loopback that end with the body: Flink, and Beam's own Prism.

What they need is downloaded once into `.engines` at the top of the checkout: Flink's jars from PyPI, Beam's
job server for Flink from Maven, Prism by `go install`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tarfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence

import apache_beam

ROOT = pathlib.Path(__file__).resolve().parents[2]
DOWNLOADS = ROOT / ".engines"
PROGRAMS = pathlib.Path(sys.executable).parent
# The newest minor version of which Beam has a job server, and the newest release of it on PyPI.
FLINK_MINOR, FLINK = "2.0", "2.0.2"
# Flink serializes by reflection; a JDK of version 17 opens nothing by itself.
_OPENS = [
  f"--add-opens=java.base/{package}=ALL-UNNAMED"
  for package in ("java.lang", "java.net", "java.io", "java.nio", "sun.nio.ch", "java.text", "java.time")
]
_OPENS += [
  f"--add-opens=java.base/java.util{package}=ALL-UNNAMED"
  for package in ("", ".concurrent", ".concurrent.atomic", ".concurrent.locks")
]
_HEAP = "-Xmx512m"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Engine:
  """A job service and what works for it.

  Attributes:
    flags: of `anystep-cache`, which submit to it.
    pool: starts a pool of workers, of which there must be one; ends the one before.
    task_managers: Flink's processes that run stages; none of another engine.
    cancel: cancels all jobs.
  """

  flags: Sequence[str]
  pool: Callable[[], None]
  task_managers: Sequence[subprocess.Popen]
  cancel: Callable[[], None]


@contextlib.contextmanager
def running(
  *command: object, cwd: pathlib.Path, environment: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen]:
  """Run a program, with what it starts, until the body ends; its output goes to a file beside."""
  lent = ("PYTHONPATH", "XLA_FLAGS")
  own = {name: value for name, value in os.environ.items() if name not in lent}
  cwd.mkdir(parents=True, exist_ok=True)
  with open(cwd / f"{pathlib.Path(str(command[0])).name}-{time.monotonic_ns()}.log", "wb") as log:
    process = subprocess.Popen(
      list(map(str, command)),
      cwd=cwd,
      env={**own, **(environment or {})},
      stdout=log,
      stderr=subprocess.STDOUT,
      start_new_session=True,
    )
  try:
    yield process
  finally:
    kill(process)


def kill(process: subprocess.Popen) -> None:
  """Kill a program and what it has started."""
  with contextlib.suppress(ProcessLookupError):
    os.killpg(process.pid, signal.SIGKILL)
  process.wait()


def wait_until(condition: Callable[[], object], *, seconds: float = 120) -> None:
  """Wait until a condition holds."""
  end = time.monotonic() + seconds
  while not condition():
    assert time.monotonic() < end, "it took too long"
    time.sleep(0.2)


def free_port() -> int:
  with socket.socket() as probe:
    probe.bind(("localhost", 0))
    return probe.getsockname()[1]


def is_listening(port: int) -> bool:
  with socket.socket() as probe:
    return probe.connect_ex(("localhost", port)) == 0


@contextlib.contextmanager
def worker_pool(
  folder: pathlib.Path, programs: pathlib.Path, environment: Mapping[str, str]
) -> Iterator[tuple[int, Callable[[], None]]]:
  """Yield the port of a pool of workers, and what kills it and starts another one there.

  Args:
    folder: the pool's working directory.
    programs: of the environment that workers run in.
    environment: variables that they get.
  """
  port = free_port()
  # A pool starts whatever `python` it finds first.
  environment = {**environment, "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"}
  module = "apache_beam.runners.worker.worker_pool_main"
  with contextlib.ExitStack() as stack:

    def start() -> None:
      stack.close()
      command = (programs / "python", "-m", module, f"--service_port={port}")
      stack.enter_context(running(*command, cwd=folder, environment=environment))
      wait_until(lambda: is_listening(port))

    start()
    yield port, start


@contextlib.contextmanager
def prism(folder: pathlib.Path, pool: tuple[int, Callable[[], None]]) -> Iterator[Engine]:
  """Beam's own engine, in a process by itself."""
  program = _install_prism()
  job_port, web_port = free_port(), free_port()
  with running(program, f"--job_port={job_port}", f"--web_port={web_port}", "--serve_http=false", cwd=folder):
    wait_until(lambda: is_listening(job_port))
    yield Engine(
      flags=_portable_flags(job_port, pool[0]),
      pool=pool[1],
      task_managers=(),
      cancel=lambda: _cancel_all(job_port),
    )


@contextlib.contextmanager
def flink(folder: pathlib.Path, pool: tuple[int, Callable[[], None]]) -> Iterator[Engine]:
  """A cluster of one job manager and two task managers, and Beam's job server for it."""
  with flink_cluster(folder) as (rest_port, task_managers):
    job_port = free_port()
    options = [f"--flink-master=localhost:{rest_port}", f"--artifacts-dir={folder / 'artifacts'}"]
    options += [f"--job-port={job_port}", f"--artifact-port={free_port()}", f"--expansion-port={free_port()}"]
    with running("java", _HEAP, *_OPENS, "-jar", find_job_server(), *options, cwd=folder / "job_server"):
      wait_until(lambda: is_listening(job_port))
      yield Engine(
        flags=[*_portable_flags(job_port, pool[0]), "--parallelism=2"],
        pool=pool[1],
        task_managers=task_managers,
        cancel=lambda: _cancel_all(job_port),
      )


@contextlib.contextmanager
def flink_cluster(folder: pathlib.Path) -> Iterator[tuple[int, list[subprocess.Popen]]]:
  """Yield the port of Flink's REST service, and its two task managers."""
  jars = ":".join(str(path) for path in sorted(_install_flink().glob("*.jar")))
  rest_port, rpc_port = free_port(), free_port()
  settings = {
    "jobmanager.rpc.address": "localhost",
    "jobmanager.rpc.port": rpc_port,
    "jobmanager.memory.process.size": "900m",
    "rest.address": "localhost",
    "rest.port": rest_port,
    "taskmanager.host": "localhost",
    "taskmanager.memory.process.size": "900m",
    "taskmanager.numberOfTaskSlots": 1,
    # One that was killed is missed soon, and its work goes to the other one.
    "heartbeat.interval": 1000,
    "heartbeat.timeout": 10000,
    "restart-strategy.type": "fixed-delay",
    "restart-strategy.fixed-delay.attempts": 20,
    "restart-strategy.fixed-delay.delay": "1 s",
  }

  def start(name: str, main_class: str, *arguments: str) -> subprocess.Popen:
    conf = folder / name
    conf.mkdir(parents=True)
    lines = [f"{key}: {value}\n" for key, value in {**settings, "io.tmp.dirs": conf}.items()]
    (conf / "config.yaml").write_text("".join(lines))
    command = ("java", _HEAP, *_OPENS, "-cp", jars, main_class, "--configDir", conf, *arguments)
    return stack.enter_context(running(*command, cwd=conf))

  package = "org.apache.flink.runtime"
  with contextlib.ExitStack() as stack:
    start("job_manager", f"{package}.entrypoint.StandaloneSessionClusterEntrypoint")
    task_managers = [start(f"task_manager{k}", f"{package}.taskexecutor.TaskManagerRunner") for k in range(2)]
    wait_until(lambda: count_task_managers(rest_port) == 2)
    yield rest_port, task_managers


def count_task_managers(rest_port: int) -> int:
  """Return the number of task managers that Flink's job manager knows."""
  try:
    with urllib.request.urlopen(f"http://localhost:{rest_port}/taskmanagers", timeout=5) as response:
      return len(json.load(response)["taskmanagers"])
  except OSError:
    return 0


def _portable_flags(job_port: int, pool_port: int) -> list[str]:
  return [
    "--runner=PortableRunner",
    f"--job_endpoint=localhost:{job_port}",
    "--environment_type=EXTERNAL",
    f"--environment_config=localhost:{pool_port}",
  ]


def _cancel_all(job_port: int) -> None:
  """Cancel all jobs of a job service."""
  import grpc
  from apache_beam.portability.api import beam_job_api_pb2 as messages
  from apache_beam.portability.api import beam_job_api_pb2_grpc

  with grpc.insecure_channel(f"localhost:{job_port}") as channel:
    service = beam_job_api_pb2_grpc.JobServiceStub(channel)
    for job in service.GetJobs(messages.GetJobsRequest()).job_info:
      service.Cancel(messages.CancelJobRequest(job_id=job.job_id))


def _install_prism() -> pathlib.Path:
  """Return the program, of Beam's version, which needs Go once."""
  program = DOWNLOADS / "bin" / "prism"
  if not program.exists():
    package = f"github.com/apache/beam/sdks/v2/go/cmd/prism@v{apache_beam.__version__}"
    folders = {"GOBIN": str(program.parent), "GOPATH": str(DOWNLOADS / "go")}
    subprocess.run(["go", "install", package], check=True, env={**os.environ, **folders})
  return program


def _install_flink() -> pathlib.Path:
  """Return the folder of Flink's jars, from the source distribution of `apache-flink-libraries`."""
  name = f"apache_flink_libraries-{FLINK}"
  lib = DOWNLOADS / name / "deps" / "lib"
  if not lib.exists():
    DOWNLOADS.mkdir(exist_ok=True)
    download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*download, f"apache-flink-libraries=={FLINK}"], check=True, cwd=DOWNLOADS)
    archive = DOWNLOADS / f"{name}.tar.gz"
    with tarfile.open(archive) as members:
      members.extractall(DOWNLOADS, filter="data")
    archive.unlink()
  return lib


def find_job_server() -> str:
  """Return the path of Beam's job server for Flink: from Maven, or what `JOB_SERVER_JAR` names."""
  from apache_beam.runners.portability.job_server import JavaJarJobServer
  from apache_beam.utils.subprocess_server import JavaJarServer

  jar = os.environ.get("JOB_SERVER_JAR")
  if jar is None:
    target = f":runners:flink:{FLINK_MINOR}:job-server:shadowJar"
    jar = JavaJarServer.local_jar(JavaJarJobServer.path_to_beam_jar(target), str(DOWNLOADS))
  return jar
