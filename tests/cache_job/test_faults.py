"""The job is killed, or its disk fails, at any of its file operations; the same command then finishes it."""

import dataclasses
import errno
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import seqio
import small_tasks  # noqa: F401
from fault_cases import CACHE_JOB
from fault_runs import AFTER, MIDWAY, TESTS, Fault, Run, zygote
from job_runs import digests_of

from anystep.cache_job.completion.completion import complete_task
from anystep.cache_job.options import CacheOptions
from anystep.cache_job.planning.building_directories import prepare_directories
from anystep.cache_job.planning.task_work import plan_task
from anystep.cache_job.shuffle.final_shards import summarize_shards, write_shard
from anystep.cache_job.shuffle.sorted_spills import plan_final, sort_group, summarize_sorted
from anystep.cache_job.shuffle.spill import write_spill
from anystep.cache_job.shuffle.summaries import summarize_spills
from anystep.cache_job.state.job_lock import LOCK
from anystep.cache_job.state.split_job import list_source_ranges, read_plan
from anystep.caches.cache import open_cache
from anystep.errors import AnystepError

TASK = "small:inner"
SIZES = {"train": (6, 5), "validation": (3,)}
FLAGS = (f"--tasks={TASK}", "--module_import=small_tasks", "--num_shards=2")
OLD = (f"--tasks={TASK}", "--module_import=small_tasks", "--num_shards=3", "--seed=7")
PROGRAM = pathlib.Path(sys.executable).with_name("anystep-cache")
# As many runs at a time.
AT_A_TIME = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scenario:
  """A command, where it starts, and how it ends if nothing disturbs it.

  Attributes:
    flags: the command's.
    start: the root of the caches that are there before; None where there are none.
    end: the root of those that it leaves.
    operations: its file operations.
    copies: the caches as they are before each of them, by number.
  """

  flags: tuple[str, ...]
  start: pathlib.Path | None
  end: pathlib.Path
  operations: list[tuple[str, str]]
  copies: pathlib.Path

  def begin(self, root):
    """Makes a root where the command can start."""
    if self.start is not None:
      shutil.copytree(self.start, root)
    return root

  def readable(self, root):
    """What readers find: `new`, `old` or `nothing`, whole and for all splits; whatever else is raised."""
    return one_of({self._readable(root, split) for split in SIZES})

  def _readable(self, root, split):
    try:
      cache = open_cache(root, TASK, split)
    except AnystepError as error:
      if error.kind != "cache_missing":
        raise
      return "nothing"
    cache.verify()
    whole = {"new": self.end} | ({"old": self.start} if self.start else {})
    (found,) = [name for name, where in whole.items() if manifest(where, split) == manifest(root, split)]
    return found

  def assert_finished(self, root):
    """There is what an undisturbed run leaves, and nothing else."""
    assert digests_of(root) == digests_of(self.end)
    assert folders(root) == folders(self.end)


def job_run(root, flags, log, **disturbed):
  """A run of the job; the log gets the names of preprocessed examples."""
  return Run(
    program="anystep.cache_job.main",
    arguments=(f"--output_cache_dir={root}", *flags),
    root=root,
    environment={"SMALL_TASKS_LOG": str(log)},
    **disturbed,
  )


def one_of(values):
  (value,) = values
  return value


def manifest(root, split):
  return (root / "small" / "inner" / f"manifest.{split}.json").read_bytes()


def folders(root):
  return {path.relative_to(root) for path in root.rglob("*") if path.is_dir()}


@pytest.fixture(scope="module")
def jobs():
  with zygote(*CACHE_JOB) as started:
    yield started


@pytest.fixture(scope="module")
def scenarios(jobs, tmp_path_factory):
  """By name: a first cache, and one in another container in the place of one of another seed."""
  folder = tmp_path_factory.mktemp("undisturbed")
  fresh, old, replaced = folder / "fresh", folder / "old", folder / "replaced"
  overwriting = (*FLAGS, "--output_format=tfrecord", "--overwrite")
  log = folder / "log"
  for name in ("fresh_copies", "replaced_copies"):
    (folder / name).mkdir()
  (made, _) = ended = jobs.run_all(
    [
      job_run(fresh, FLAGS, log, copies=folder / "fresh_copies"),
      job_run(old, OLD, log),
    ]
  )
  shutil.copytree(old, replaced)
  remade = jobs.run(job_run(replaced, overwriting, log, copies=folder / "replaced_copies"))
  assert [one.status for one in (*ended, remade)] == [0, 0, 0], remade.stderr
  return {
    "a first cache": Scenario(
      flags=FLAGS, start=None, end=fresh, operations=made.operations, copies=folder / "fresh_copies"
    ),
    "another in the place of an old one": Scenario(
      flags=overwriting,
      start=old,
      end=replaced,
      operations=remade.operations,
      copies=folder / "replaced_copies",
    ),
  }


@pytest.fixture(
  params=["a first cache", pytest.param("another in the place of an old one", marks=pytest.mark.soak)]
)
def scenario(request, scenarios):
  return scenarios[request.param]


def places_of(operations, *kinds):
  """Numbers of operations of these kinds."""
  return [place for place, (kind, _) in enumerate(operations) if kind in kinds]


def evenly(places, number):
  """So many of them, from the first to the last."""
  return [places[k * (len(places) - 1) // (number - 1)] for k in range(number)]


def unfinished_examples(root):
  """The source's examples of which no finished spill is kept."""
  return sorted(
    f"{split}-{shard}-{place}"
    for split, sizes in SIZES.items()
    for shard, size in enumerate(sizes)
    for place in range(size)
    if not is_spilled(root, split, shard)
  )


def is_spilled(root, split, shard):
  for marker in root.glob(f"small/inner/.building/{split}-*/spill-{shard:05d}.json"):
    files = {
      marker.with_name(file["name"]): file["bytes"] for file in json.loads(marker.read_bytes())["files"]
    }
    return all(path.exists() and path.stat().st_size == size for path, size in files.items())
  return False


def num_finished_shards(root):
  return len(list(root.glob("small/inner/.building/*/final-*.json")))


def preprocessed(log):
  return sorted(log.read_text().split()) if log.exists() else []


def assert_goes_on(jobs, scenario, roots):
  """From what killed jobs left, the same command makes the same files, and repeats nothing.

  Args:
    roots: of the caches, each of another job.
  """
  expected = []
  for root in roots:
    found = scenario.readable(root)
    assert found in ({"nothing", "new"} if scenario.start is None else {"old", "nothing", "new"})
    if scenario.start is not None and found == "nothing":
      assert num_finished_shards(root) == 2 * len(SIZES), "the old cache is gone before the new one is built"
    is_done = found == "new" and "--overwrite" not in scenario.flags
    expected.append([] if is_done else unfinished_examples(root))
  logs = [root.with_name(f"{root.name}.log") for root in roots]
  runs = [job_run(root, scenario.flags, log) for root, log in zip(roots, logs, strict=True)]
  for run, ended, log, examples in zip(runs, in_two_processes(jobs, runs), logs, expected, strict=True):
    assert (ended.status, run.root) == (0, run.root), ended.stderr
    scenario.assert_finished(run.root)
    assert preprocessed(log) == examples


def in_two_processes(jobs, runs):
  with ThreadPoolExecutor(AT_A_TIME) as pool:
    ended = list(pool.map(jobs.run_all, [runs[k::AT_A_TIME] for k in range(AT_A_TIME)]))
  return [ended[k % AT_A_TIME][k // AT_A_TIME] for k in range(len(runs))]


def kill(jobs, scenario, faults, folder):
  """Runs the command once for each fault, which kills it; returns the roots that they leave."""

  def run(place):
    root = scenario.begin(folder / f"killed{place}")
    log = folder / f"killed{place}.first.log"
    ended = jobs.run(job_run(root, scenario.flags, log, fault=faults[place]))
    assert ended.status == -signal.SIGKILL, (faults[place], ended)
    assert ended.struck, faults[place]
    root.mkdir(exist_ok=True)
    if scenario.readable(root) != "new":
      in_flight = {
        name.rpartition("-")[0] for name in set(preprocessed(log)) & set(unfinished_examples(root))
      }
      assert len(in_flight) <= 1, faults[place]
    return root

  with ThreadPoolExecutor(AT_A_TIME) as pool:
    return list(pool.map(run, range(len(faults))))


@pytest.mark.long
def test_what_a_killed_job_leaves_is_no_torn_cache_and_is_finished(jobs, scenario, tmp_path, capsys):
  finish_copies(jobs, scenario, evenly(range(3, len(scenario.operations)), 4), tmp_path, capsys)


@pytest.mark.soak
def test_whatever_a_killed_job_leaves_is_no_torn_cache_and_is_finished(jobs, scenario, tmp_path, capsys):
  finish_copies(jobs, scenario, range(3, len(scenario.operations)), tmp_path, capsys)


def finish_copies(jobs, scenario, places, folder, capsys):
  """Goes on from the state before each of these operations."""
  roots = [shutil.copytree(scenario.copies / str(place), folder / str(place)) for place in places]
  assert_goes_on(jobs, scenario, roots)
  say(capsys, f"{len(roots)} of {len(places)} states of {len(scenario.operations)}")


@pytest.mark.long
def test_a_killed_job_is_finished_by_the_same_command(jobs, scenario, tmp_path, capsys):
  writes, renames = (places_of(scenario.operations, kind) for kind in ("write", "replace"))
  # The last file to get its name is COMPLETED.
  faults = [Fault(at=writes[len(writes) // 2], when=MIDWAY), Fault(at=renames[-1], when=AFTER)]
  assert_goes_on(jobs, scenario, kill(jobs, scenario, faults, tmp_path))
  say(capsys, f"{len(faults)} of {len(faults)} kills")


@pytest.mark.soak
def test_a_job_that_is_killed_at_any_operation_is_finished_by_the_same_command(
  jobs, scenario, tmp_path, capsys
):
  faults = [Fault(at=place) for place in range(len(scenario.operations))]
  faults += [Fault(at=place, when=MIDWAY) for place in places_of(scenario.operations, "write")]
  faults += [Fault(at=len(scenario.operations) - 1, when=AFTER)]
  done = 0
  for first in range(0, len(faults), 20):
    some = faults[first : first + 20]
    folder = tmp_path / str(first)
    folder.mkdir()
    assert_goes_on(jobs, scenario, kill(jobs, scenario, some, folder))
    shutil.rmtree(folder)
    done += len(some)
  say(capsys, f"{done} of {len(faults)} kills at {len(scenario.operations)} operations")


def say(capsys, figures):
  with capsys.disabled():
    print(f"\n{figures}: all finished to the same bytes")


NEEDS_ROOM = ("create", "write", "truncate", "fsync", "replace", "mkdir")
DISKS = {"full": (errno.ENOSPC, True, "disk_full"), "broken": (errno.EIO, False, "io_failed")}


def assert_says(ended, kind, where):
  """The program ended with one line for programs, and nothing of Python's own."""
  assert ended.status == 74, (where, ended.stderr)
  assert "Traceback" not in ended.stderr
  (line,) = [line for line in ended.stderr.splitlines() if line.startswith("ERROR")]
  assert line == ended.stderr.splitlines()[-1]
  assert line.startswith(f"ERROR code=74 kind={kind} ")


def assert_survives(jobs, scenario, faults, folder, kind):
  roots = [scenario.begin(folder / str(place)) for place in range(len(faults))]
  runs = [
    job_run(root, scenario.flags, root.with_name(f"{root.name}.first.log"), **fault)
    for root, fault in zip(roots, faults, strict=True)
  ]
  for run, ended in zip(runs, in_two_processes(jobs, runs), strict=True):
    assert_says(ended, kind, ended.struck)
    if run.fault is not None:
      assert_is_not_left(run, ended)
    run.root.mkdir(exist_ok=True)
  assert_goes_on(jobs, scenario, roots)


def assert_is_not_left(run, ended):
  """A file that could not be written whole takes no room."""
  assert ended.struck == ended.operations[run.fault.at]
  kind, name = ended.struck
  if kind in ("create", "write") and not name.endswith(LOCK):
    assert not (run.root / name).exists()


@pytest.mark.parametrize(
  ("name", "disk"), [("a first cache", "broken"), ("another in the place of an old one", "full")]
)
@pytest.mark.long
def test_a_disk_that_fails_is_told_and_nothing_is_lost(jobs, scenarios, tmp_path, capsys, name, disk):
  places = evenly(places_of(scenarios[name].operations, *NEEDS_ROOM), 4)
  fail_at(jobs, scenarios[name], places, tmp_path, capsys, disk)


@pytest.mark.soak
@pytest.mark.parametrize("disk", DISKS)
def test_a_disk_that_fails_anywhere_is_told_and_nothing_is_lost(jobs, scenario, tmp_path, capsys, disk):
  fail_at(jobs, scenario, places_of(scenario.operations, *NEEDS_ROOM), tmp_path, capsys, disk)


def fail_at(jobs, scenario, places, folder, capsys, disk):
  number, lasting, kind = DISKS[disk]
  faults = [{"fault": Fault(at=place, errno=number, lasting=lasting)} for place in places]
  assert_survives(jobs, scenario, faults, folder, kind)
  say(capsys, f"{len(places)} of {len(places)} {kind}")


@pytest.mark.long
def test_a_shard_that_may_not_grow_is_told_and_nothing_is_lost(jobs, scenarios, tmp_path):
  """ArrayRecord's own writer meets this, out of Python's sight."""
  faults = [{"file_bytes": size} for size in (20_000, 65_536)]
  assert_survives(jobs, scenarios["a first cache"], faults, tmp_path, "io_failed")


@pytest.mark.parametrize("at_a_time", [1, 2], ids=["one after the other", "at the same time"])
def test_workers_that_run_twice_change_nothing(scenarios, tmp_path, at_a_time):
  options = CacheOptions(cache_dir=str(tmp_path / "twice"), modules=("small_tasks",), num_shards=2)
  work = plan_task(seqio.TaskRegistry.get(TASK), options)
  prepare_directories([work])
  for job in work.jobs:
    for source in list_source_ranges(job):
      twice(at_a_time, write_spill, job, source)
    twice(at_a_time, summarize_spills, job, range(len(job.source_shards)))
    twice(at_a_time, plan_final, job)
    plan = read_plan(job)
    for group in range(len(plan.groups)):
      twice(at_a_time, sort_group, job, group)
    twice(at_a_time, summarize_sorted, job, range(len(plan.groups)))
    for shard in range(plan.num_shards):
      twice(at_a_time, write_shard, job, shard)
    twice(at_a_time, summarize_shards, job, range(plan.num_shards))
  twice(at_a_time, complete_task, work.jobs, work.kept)
  scenarios["a first cache"].assert_finished(tmp_path / "twice")


def twice(at_a_time, function, *args):
  together = threading.Barrier(at_a_time)

  def call(_):
    together.wait()
    function(*args)

  with ThreadPoolExecutor(at_a_time) as pool:
    list(pool.map(call, range(2)))


# By system calls: paths below the task's folder; the first such call about the path kills the program.
# Of a rename strace sees the name before. TRAIN stands for the folder where the split is built, `*` for the
# name of an attempt.
STRACED = {
  "rename,renameat,renameat2": [
    "TRAIN/spill-00000.json.*",
    "TRAIN/final-00001.json.*",
    "TRAIN/train.array_record-00001-of-00002.*",
    "manifest.validation.json.*",
    "COMPLETED.*",
  ],
  "fsync,fdatasync": ["TRAIN/spill-00001.*", "TRAIN/train.array_record-00000-of-00002.*", "COMPLETED.*"],
  "write,pwrite64,writev": [
    "TRAIN/spill-00000.*",
    "TRAIN/train.array_record-00000-of-00002.*",
    "TRAIN/train.array_record-00001-of-00002.*",
    "COMPLETED.*",
  ],
  "unlink,unlinkat,rmdir": ["COMPLETED", "TRAIN", ".building"],
}
# Attempts at files have numbers in place of random names, for strace knows no patterns.
NUMBERED_ATTEMPTS = """
import itertools, uuid
_numbers = itertools.count()
uuid.uuid4 = lambda: uuid.UUID(int=next(_numbers) << 80)
"""
ATTEMPTS = 100


@pytest.mark.soak
@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
def test_the_program_that_the_kernel_kills_at_a_system_call_is_finished(jobs, scenarios, tmp_path, capsys):
  """`anystep-cache` as users run it; writes are those of ArrayRecord's own writer too."""
  scenario = scenarios["a first cache"]
  (tmp_path / "site").mkdir()
  (tmp_path / "site" / "sitecustomize.py").write_text(NUMBERED_ATTEMPTS)
  building = next(scenario.copies.glob("*/small/inner/.building/train-*")).name
  for names, paths in STRACED.items():
    roots = []
    for number, path in enumerate(paths):
      root = tmp_path / f"{names.partition(',')[0]}{number}"
      where = root / "small" / "inner" / path.replace("TRAIN", f".building/{building}")
      status, trace = kill_at_call(scenario, root, names.split(","), str(where), tmp_path / "site")
      assert status == -signal.SIGKILL, (names, path)
      # The call that killed it is about the path, and never returned.
      about = [line for line in trace if str(where).rstrip("*") in line]
      assert about, (names, path)
      assert about[-1].endswith(("<unfinished ...>", "= ?")), (names, path)
      roots.append(root)
    assert_goes_on(jobs, scenario, roots)
    say(capsys, f"{len(roots)} of {len(roots)} kills at {names} of {', '.join(paths)}")


def kill_at_call(scenario, root, names, path, site):
  """Runs the program under strace; returns its status and the lines that strace wrote."""
  paths = [path.replace("*", f"{number:012x}") for number in range(ATTEMPTS)] if "*" in path else [path]
  trace = root.with_name(f"{root.name}.strace")
  expressions = ["-e", f"trace={','.join(names)}", "-e", f"inject={','.join(names)}:signal=SIGKILL:when=1"]
  seen = [part for path in paths for part in ("-P", path)]
  command = ["strace", "-f", "-y", "-o", trace, *seen, *expressions, PROGRAM, f"--output_cache_dir={root}"]
  path = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")]))
  environment = os.environ | {"PYTHONPATH": path}
  done = subprocess.run([*command, *scenario.flags], cwd=TESTS, env=environment, capture_output=True)
  return done.returncode, trace.read_text(errors="replace").splitlines()
