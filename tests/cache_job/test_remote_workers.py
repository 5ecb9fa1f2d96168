"""Workers with a search path, a working directory and an environment of their own, behind a job service."""

import contextlib
import importlib.metadata
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import time

import pytest
import small_tasks
from job_runs import digests_of, run_job

from anystep.errors import AnystepError, ExitCode

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROGRAMS = pathlib.Path(sys.executable).parent
# Tasks as the workers have them: importing them says who did it, and where.
SAY_WHO = """
import os, pathlib, sys
pathlib.Path(__file__).with_suffix(".imported").write_text(f"{sys.prefix} {os.getcwd()}")
"""
SPLITS = "--splits=train,validation"


# An environment of their own takes long to install and to compile.
@pytest.fixture(scope="module", params=["parents", pytest.param("own", marks=pytest.mark.soak)])
def worker_programs(request, tmp_path_factory):
  """The workers' programs: the parent's, or of an environment with what pip makes of the sdist's [cache]."""
  if request.param == "parents":
    return PROGRAMS
  folder = tmp_path_factory.mktemp("workers_environment")
  source = folder / "source"
  # From a copy: building in the checkout would leave files there.
  shutil.copytree(
    ROOT,
    source,
    ignore=shutil.ignore_patterns(".*", "build", "demo_output", "tests", "docs", "*.egg-info", "__pycache__"),
  )
  build = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
  subprocess.run([sys.executable, "-c", build, folder], cwd=source, check=True, capture_output=True)
  shutil.rmtree(source)
  (sdist,) = folder.glob("anystep-*.tar.gz")
  uv = PROGRAMS / "uv"
  subprocess.run([uv, "venv", "--quiet", "--python", sys.executable, folder / "environment"], check=True)
  programs = folder / "environment" / "bin"
  install = [uv, "pip", "install", "--quiet", "--python", programs / "python", "--no-build-isolation"]
  lock = ROOT / "requirements.lock"
  subprocess.run([*install, "setuptools", "--constraint", lock], check=True)
  subprocess.run([*install, f"anystep[cache] @ {sdist.as_uri()}", "--constraint", lock], check=True)
  return programs


@pytest.fixture(scope="module")
def workers(worker_programs, tmp_path_factory):
  """`(folder, flags)`: what the workers can import lies in folder, and the flags send the work to them."""
  shipped = tmp_path_factory.mktemp("shipped")
  elsewhere = tmp_path_factory.mktemp("elsewhere")
  tasks = pathlib.Path(small_tasks.__file__).read_text() + SAY_WHO
  for name in ("shipped_tasks", "workers_tasks"):
    (shipped / f"{name}.py").write_text(tasks)
  pool_port, service_port_file = free_port(), elsewhere / "port"
  # The pool starts whatever `python` it finds first.
  path = f"{worker_programs}{os.pathsep}{os.environ['PATH']}"
  pool = (worker_programs / "python", "apache_beam.runners.worker.worker_pool_main")
  service = (sys.executable, "apache_beam.runners.portability.local_job_service_main")
  with (
    running(*pool, f"--service_port={pool_port}", cwd=elsewhere, PATH=path, PYTHONPATH=str(shipped)),
    running(*service, f"--port_file={service_port_file}", cwd=elsewhere),
  ):
    wait_until(lambda: service_port_file.exists() and is_listening(pool_port))
    options = [
      "--runner=PortableRunner",
      f"--job_endpoint=localhost:{service_port_file.read_text()}",
      "--environment_type=EXTERNAL",
      f"--environment_config=localhost:{pool_port}",
    ]
    yield shipped, [f"--pipeline_options={','.join(options)}", SPLITS]


@contextlib.contextmanager
def running(python, module, *arguments, cwd, **environment):
  """A module that runs as a program, and the processes that it starts, until the body ends."""
  lent = ("PYTHONPATH", "XLA_FLAGS")
  own = {name: value for name, value in os.environ.items() if name not in lent}
  with subprocess.Popen(
    [python, "-m", module, *arguments],
    cwd=cwd,
    env={**own, **environment},
    stdout=subprocess.DEVNULL,
    stderr=subprocess.DEVNULL,
    start_new_session=True,
  ) as process:
    try:
      yield
    finally:
      with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def free_port():
  with socket.socket() as probe:
    probe.bind(("localhost", 0))
    return probe.getsockname()[1]


def is_listening(port):
  with socket.socket() as probe:
    return probe.connect_ex(("localhost", port)) == 0


def wait_until(condition, seconds=60):
  end = time.monotonic() + seconds
  while not condition():
    assert time.monotonic() < end
    time.sleep(0.05)


@pytest.fixture
def parents_folder(tmp_path, monkeypatch):
  """The working directory of who starts the job; workers do not see what can be imported here."""
  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr(sys, "path", [*sys.path])
  for name in ("shipped_tasks", "parents_tasks"):
    monkeypatch.delitem(sys.modules, name, raising=False)
    (tmp_path / f"{name}.py").write_text("from small_tasks import *\n")
  return tmp_path


@pytest.mark.long
def test_workers_elsewhere_write_the_bytes_of_a_job_in_one_process(workers, worker_programs, parents_folder):
  shipped, flags = workers
  run_job(parents_folder / "remote", *flags, "--module_import=shipped_tasks", tasks="small")
  run_job(parents_folder / "alone", SPLITS, "--module_import=shipped_tasks", tasks="small")
  assert digests_of(parents_folder / "remote") == digests_of(parents_folder / "alone")
  assert "small/COMPLETED" in digests_of(parents_folder / "remote")
  environment, where = (shipped / "shipped_tasks.imported").read_text().split()
  assert pathlib.Path(environment) == worker_programs.parent
  assert pathlib.Path(where).name.startswith("elsewhere")


def test_a_module_that_the_workers_cannot_import_ends_the_job_and_is_named(workers, parents_folder):
  _, flags = workers
  with pytest.raises(AnystepError) as caught:
    run_job(parents_folder / "cache", *flags, "--module_import=parents_tasks", tasks="small")
  assert (caught.value.code, caught.value.kind) == (ExitCode.CONFIG, "module_import")
  assert caught.value.fields["module"] == "parents_tasks"
  assert not (parents_folder / "cache" / "small" / "COMPLETED").exists()


def test_a_module_that_the_workers_alone_can_import_is_refused_before_there_is_a_job(workers, parents_folder):
  shipped, flags = workers
  with pytest.raises(AnystepError, match=r"kind=module_import module=workers_tasks"):
    run_job(parents_folder / "cache", *flags, "--module_import=workers_tasks", tasks="small")
  assert not (parents_folder / "cache").exists()
  assert not (shipped / "workers_tasks.imported").exists()


@pytest.mark.long
def test_a_job_goes_on_without_its_program_and_the_same_command_waits_for_it(tmp_path):
  """The service's workers take their time, so that the job still runs when the second program looks."""
  pool_port, port_file, log = free_port(), tmp_path / "port", tmp_path / "log"
  slow = {"SMALL_TASKS_LOG": str(log), "SMALL_TASKS_SLEEP_SECONDS": "0.5", "PYTHONPATH": str(ROOT / "tests")}
  pool = (PROGRAMS / "python", "apache_beam.runners.worker.worker_pool_main", f"--service_port={pool_port}")
  service = (PROGRAMS / "python", "apache_beam.runners.portability.local_job_service_main")
  cache_dir = tmp_path / "cache"
  with (
    running(*pool, cwd=tmp_path, PATH=f"{PROGRAMS}{os.pathsep}{os.environ['PATH']}", **slow),
    running(*service, f"--port_file={port_file}", cwd=tmp_path),
  ):
    wait_until(lambda: port_file.exists() and is_listening(pool_port))
    command = [PROGRAMS / "anystep-cache", "--tasks=small", "--module_import=small_tasks", "--splits=train"]
    command += [f"--output_cache_dir={cache_dir}", "--runner=PortableRunner", "--environment_type=EXTERNAL"]
    command += [f"--job_endpoint=localhost:{port_file.read_text()}"]
    command += [f"--environment_config=localhost:{pool_port}"]
    first = subprocess.Popen(command, cwd=ROOT / "tests", stderr=subprocess.DEVNULL)
    wait_until(lambda: log.exists() and list(cache_dir.glob("small/.building/*/engine.json")), seconds=120)
    first.kill()
    first.wait()
    seen = len(log.read_text().split())
    second = subprocess.run(command, cwd=ROOT / "tests", capture_output=True, text=True, timeout=300)
  assert second.returncode == 0, second.stderr
  examples = log.read_text().split()
  assert seen < len(examples) == len(set(examples)), "the second program started another job"
  run_job(tmp_path / "alone", "--splits=train", "--module_import=small_tasks", tasks="small")
  assert digests_of(cache_dir) == digests_of(tmp_path / "alone")


def test_the_image_for_workers_has_the_versions_that_start_jobs():
  lines = (ROOT / "Dockerfile").read_text().splitlines()
  lock = (ROOT / "requirements.lock").read_text().splitlines()
  locked = dict(line.split(";")[0].strip().split("==") for line in lock)
  python = f"{sys.version_info.major}.{sys.version_info.minor}"
  assert f"FROM apache/beam_python{python}_sdk:{locked['apache-beam']}" in lines
  sdist = f"anystep-{importlib.metadata.version('anystep')}.tar.gz"
  assert f"COPY requirements.lock dist/{sdist} /tmp/anystep/" in lines
  assert any(f"file:///tmp/anystep/{sdist}" in line for line in lines)
