"""The cache job on real engines: `make engines`, outside continuous integration.

Workers run in an environment of their own, which holds our wheel, with another working directory.
`ENGINES=flink make engines` runs one of them.
"""

import contextlib
import os
import subprocess
import sys

import pytest
from clusters import PROGRAMS, ROOT, flink, kill, prism, wait_until, worker_pool
from job_runs import digests_of

TASK = ("--tasks=small", "--module_import=small_tasks", "--splits=train")
EXAMPLES = 67
SLEEP_SECONDS = 0.2


@pytest.fixture(scope="session")
def worker_programs(tmp_path_factory):
  """The programs of an environment with our wheel and what it asks for."""
  folder = tmp_path_factory.mktemp("workers")
  uv, lock = PROGRAMS / "uv", ROOT / "requirements.lock"
  wheel = [uv, "build", "--quiet", "--wheel", "--no-build-isolation", "--python", sys.executable]
  subprocess.run([*wheel, "--out-dir", folder, ROOT], check=True)
  (path,) = folder.glob("anystep-*.whl")
  subprocess.run([uv, "venv", "--quiet", "--python", sys.executable, folder / "venv"], check=True)
  programs = folder / "venv" / "bin"
  install = [uv, "pip", "install", "--quiet", "--python", programs / "python", "--constraint", lock]
  subprocess.run([*install, f"anystep[cache] @ {path.as_uri()}"], check=True)
  return programs


@pytest.fixture(scope="session")
def expected(tmp_path_factory):
  """Digests of the cache that DirectRunner makes."""
  root = tmp_path_factory.mktemp("direct")
  subprocess.run(command(root, []), cwd=ROOT / "tests", check=True, capture_output=True)
  return digests_of(root)


@pytest.fixture(params=os.environ.get("ENGINES", "prism flink").split())
def engine(request, worker_programs, tmp_path):
  """An engine with a pool of workers, whose tasks take their time and log each example."""
  environment = {
    "PYTHONPATH": str(ROOT / "tests"),
    "SMALL_TASKS_LOG": str(tmp_path / "log"),
    "SMALL_TASKS_SLEEP_SECONDS": str(SLEEP_SECONDS),
  }
  started = {"prism": prism, "flink": flink}[request.param]
  with (
    worker_pool(tmp_path / "pool", worker_programs, environment) as pool,
    started(tmp_path / "engine", pool) as running,
  ):
    yield running


def command(root, flags):
  return [PROGRAMS / "anystep-cache", *TASK, f"--output_cache_dir={root}", *flags]


@contextlib.contextmanager
def submitted(root, engine):
  """The program, once its job is on the engine and some examples are preprocessed."""
  with subprocess.Popen(
    command(root, engine.flags), cwd=ROOT / "tests", stderr=subprocess.PIPE, text=True, start_new_session=True
  ) as process:
    try:
      wait_until(lambda: process.poll() is not None or len(preprocessed(root)) > 3)
      assert process.poll() is None, process.stderr.read()
      yield process
    finally:
      kill(process)


def preprocessed(root):
  """Names of the examples that were preprocessed, each as often as it was."""
  log = root.parent / "log"
  return log.read_text().split() if log.exists() else []


def run_again(root, engine):
  done = subprocess.run(
    command(root, engine.flags), cwd=ROOT / "tests", capture_output=True, text=True, timeout=300
  )
  assert done.returncode == 0, done.stderr


def test_the_bytes_are_those_of_the_direct_runner(engine, expected, tmp_path):
  run_again(tmp_path / "cache", engine)
  assert digests_of(tmp_path / "cache") == expected
  assert len(set(preprocessed(tmp_path / "cache"))) == EXAMPLES


def test_a_job_goes_on_without_its_program_and_the_same_command_waits_for_it(engine, expected, tmp_path):
  with submitted(tmp_path / "cache", engine) as program:
    kill(program)
  seen = len(preprocessed(tmp_path / "cache"))
  run_again(tmp_path / "cache", engine)
  examples = preprocessed(tmp_path / "cache")
  assert seen < len(examples) == len(set(examples)) == EXAMPLES, "another job was started"
  assert digests_of(tmp_path / "cache") == expected


def test_a_job_completes_without_anybody(engine, expected, tmp_path):
  with submitted(tmp_path / "cache", engine) as program:
    kill(program)
  wait_until((tmp_path / "cache" / "small" / "COMPLETED").exists)
  wait_until(lambda: not (tmp_path / "cache" / "small" / ".building").exists())
  (tmp_path / "cache" / "small" / ".lock").unlink()
  assert digests_of(tmp_path / "cache") == expected


def test_a_pool_of_workers_is_killed(engine, expected, tmp_path):
  with submitted(tmp_path / "cache", engine) as program:
    engine.pool()
    program.wait(timeout=300)
  run_again(tmp_path / "cache", engine)
  assert digests_of(tmp_path / "cache") == expected


def test_a_job_is_cancelled_and_run_again(engine, expected, tmp_path):
  with submitted(tmp_path / "cache", engine) as program:
    engine.cancel()
    assert program.wait(timeout=300) != 0
  run_again(tmp_path / "cache", engine)
  assert digests_of(tmp_path / "cache") == expected


def test_a_task_manager_is_killed(engine, expected, tmp_path):
  if not engine.task_managers:
    pytest.skip("this engine has none")
  with submitted(tmp_path / "cache", engine) as program:
    kill(engine.task_managers[0])
    assert program.wait(timeout=300) == 0, program.stderr.read()
  assert digests_of(tmp_path / "cache") == expected
