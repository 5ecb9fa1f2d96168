"""Programs that leave files, one row each: kills, interrupts and failing disks are tried on all of them.

A new program joins by a function that makes what it reads below a folder and returns its `Case`, and a row in
`CASES`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import pathlib
import re
import shutil
import signal
from collections.abc import Callable, Collection, Mapping, Sequence

import caches
from fault_runs import Fault, Run

CACHE_JOB = (
  "anystep.cache_job.main",
  "anystep.cache_job.completion.index_only",
  "anystep.cache_job.job",
  "anystep.cache_job.planning.task_work",
)
TRAINER = (
  "anystep.train.main",
  "anystep.train.configuration.configuration",
  "anystep.train.runs.trainer",
  "tiny_tasks",
)
DATA = ("anystep.tasks.data_program.main", "anystep.units.surveys")
_TOTAL_STEPS = 5
# What a write that was killed may leave beside a file: nobody reads it.
_ATTEMPT = re.compile(r"(\.[0-9a-f]{12}|/?\.[^/]*\.[0-9a-f]{8})\Z")


def nothing(root: pathlib.Path) -> None:
  """Where a program starts that finds nothing."""


def files_of(root: pathlib.Path) -> dict[str, str]:
  """sha256 of every file below but attempts at one, by relative path."""
  return {
    name: hashlib.sha256(path.read_bytes()).hexdigest()
    for path in sorted(root.rglob("*"))
    if path.is_file() and not _ATTEMPT.search(name := path.relative_to(root).as_posix())
  }


def same_files(root: pathlib.Path, end: pathlib.Path) -> None:
  """Asserts that two roots hold the same files."""
  assert files_of(root) == files_of(end)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
  """A program that leaves files below a root, and is finished by the same command.

  Attributes:
    program: the module whose `run` it is. imports: what is imported before it is forked.
    arguments: of its command line, for a root.
    begin: makes the root as the program finds it.
    assert_same: asserts that a root is what an undisturbed run left in another.
    environment: what the program finds there besides what everyone does.
    committed: matches the file that a result counts from.
    is_complete: whether a second one may find that nothing is left to do, though the first has not ended.
    locked: matches the file of the lock that keeps a second one out; None where two may run.
    interrupted: by signal, how it may end with one.
    last_commit: matches the file after which a program that defers signals has nothing left to be saved, so
      that it may also end with 0; None where there is no such file.
    disk_failed: kinds of the error that a disk that fails ends it with.
    passed_over: matches files whose removal may fail: a library that made them goes on without a word.
    leaves_attempts: whether unfinished files may be left where a disk failed, as in a folder of its own.
    every: in the soak, one operation of so many is disturbed.
  """

  program: str
  imports: Sequence[str]
  arguments: Callable[[pathlib.Path], Sequence[str]]
  begin: Callable[[pathlib.Path], object] = nothing
  assert_same: Callable[[pathlib.Path, pathlib.Path], None] = same_files
  environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
  committed: str
  locked: str | None = None
  is_complete: Callable[[pathlib.Path], bool] = lambda root: False
  interrupted: Mapping[int, Collection[int]] = dataclasses.field(
    default_factory=lambda: {signal.SIGINT: {130}, signal.SIGTERM: {-signal.SIGTERM}}
  )
  last_commit: str | None = None
  disk_failed: Collection[str] = ("disk_full", "io_failed")
  passed_over: str | None = None
  leaves_attempts: bool = False
  every: int = 1

  def run(self, root: pathlib.Path, *, fault: Fault | None = None, copies: pathlib.Path | None = None) -> Run:
    """A run of it in a root."""
    arguments = tuple(self.arguments(root))
    return Run(
      program=self.program,
      arguments=arguments,
      root=root,
      environment=self.environment,
      fault=fault,
      copies=copies,
    )

  def may_end_with(self, number: int, *, before: Sequence[tuple[str, str]]) -> set[int]:
    """Exit statuses with which it may end that a signal interrupts after these operations."""
    statuses = set(self.interrupted[number])
    # The marker counts from the moment that it has its name.
    committed = [path for kind, path in before if kind == "replace" and self.last_commit is not None]
    if number == signal.SIGTERM and any(re.match(self.last_commit or "", path) for path in committed):
      statuses.add(0)
    return statuses


def cache_job(folder: pathlib.Path) -> Case:
  """A task is cached."""
  flags = ("--tasks=small:inner", "--module_import=small_tasks", "--num_shards=2")
  return Case(
    program="anystep.cache_job.main",
    imports=CACHE_JOB,
    arguments=lambda root: (f"--output_cache_dir={root}", *flags),
    committed="COMPLETED",
    is_complete=lambda root: (root / "small" / "inner" / "COMPLETED").exists(),
    # `cache_job/test_faults.py` disturbs all of them.
    every=4,
    locked=r"\.lock\Z",
    leaves_attempts=True,
  )


def training(folder: pathlib.Path) -> Case:
  """A small model is trained on a small cache, with a checkpoint at every other step."""
  import tiny_tasks

  from anystep.cache_job.job import CacheOptions, cache_tasks

  cache_tasks([tiny_tasks.NAME], CacheOptions(cache_dir=str(folder / "cache"), num_shards=4, block_records=8))
  values = {
    "CACHE_DIR": repr(str(folder / "cache")),
    "MIXTURE_OR_TASK_NAME": repr(tiny_tasks.NAME),
    "MIXTURE_OR_TASK_MODULE": "'tiny_tasks'",
    "TASK_FEATURE_LENGTHS": "{'inputs': 24, 'targets': 12}",
    "TRAIN_STEPS": _TOTAL_STEPS,
    "CHECKPOINT_PERIOD": 2,
    "BATCH_SIZE": 8,
    "EVAL_DATASET": None,
    **{f"network.T5Config.{name}": size for name, size in TINY_NETWORK.items()},
  }
  gin_file = pathlib.Path(__file__).resolve().parents[1] / "gin_configs" / "examples" / "stdlib_tiny.gin"

  def arguments(root: pathlib.Path) -> list[str]:
    own = {"MODEL_DIR": repr(str(root)), **values}
    return [f"--gin_file={gin_file}", *(f"--gin.{name}={value}" for name, value in own.items())]

  return Case(
    program="anystep.train.main",
    imports=TRAINER,
    arguments=arguments,
    assert_same=_same_training,
    committed=r"checkpoint_\d+/commit_success.txt",
    locked=r"\.lock\Z",
    interrupted={signal.SIGINT: {130}, signal.SIGTERM: {75}},
    last_commit=rf"checkpoint_{_TOTAL_STEPS}/commit_success\.txt",
    passed_over=r"\.orbax-checkpoint-tmp/",
    leaves_attempts=True,
    every=8,
  )


TINY_NETWORK = {
  "emb_dim": 8,
  "num_heads": 2,
  "head_dim": 4,
  "mlp_dim": 16,
  "num_encoder_layers": 1,
  "num_decoder_layers": 1,
}


def _same_training(root: pathlib.Path, end: pathlib.Path) -> None:
  from anystep.train.checkpoints.checkpoints import checkpoint_steps
  from anystep.train.demo.run_comparison import compare_runs

  comparison = compare_runs(end, root)
  assert comparison.identical, comparison.verdict
  assert checkpoint_steps(root) == checkpoint_steps(end)
  assert json.loads((root / "data_plan.json").read_text()) == json.loads((end / "data_plan.json").read_text())


def unit_table(folder: pathlib.Path) -> Case:
  """The units of a packed plan are looked for, and kept beside the cache."""
  built = caches.build(folder / "cache", num_examples=60)
  # Where a table goes that finds no place beside its cache; here none can.
  home = folder / "home"
  home.write_text("no folder")
  flags = ('--feature_lengths={"inputs": 11, "targets": 9}', "--packing=greedy", "--batch_size=6")

  def arguments(root: pathlib.Path) -> Sequence[str]:
    return (
      "plan",
      "start",
      f"--cache_dir={root}",
      "--task=demo",
      *flags,
      f"--output={root}/plan.json",
      "--overwrite",
    )

  return Case(
    program="anystep.tasks.data_program.main",
    imports=DATA,
    arguments=arguments,
    begin=lambda root: shutil.copytree(built.root, root),
    environment={"XDG_CACHE_HOME": str(home)},
    committed=r"units\.json",
    disk_failed=("disk_full", "io_failed", "unit_table_write"),
  )


def plan_change(folder: pathlib.Path) -> Case:
  """A plan is changed from a step on, in its own place."""
  built = caches.build(folder / "cache")
  from anystep.plans.plan import Plan

  plan = Plan.start(built.open(), batch_size=6, num_epochs=3).to_json()

  def begin(root: pathlib.Path) -> None:
    root.mkdir()
    (root / "start.json").write_text(plan)
    (root / "plan.json").write_text(plan)

  def arguments(root: pathlib.Path) -> Sequence[str]:
    change = ("plan", "change", f"--plan={root}/start.json", "--step=3", "--batch_size=12")
    return (*change, f"--output={root}/plan.json", "--overwrite")

  return Case(
    program="anystep.tasks.data_program.main",
    imports=DATA,
    arguments=arguments,
    begin=begin,
    committed=r"plan\.json",
  )


def tombstone_list(folder: pathlib.Path) -> Case:
  """Examples of a cache are listed."""
  built = caches.build(folder / "cache")
  which = ("tombstone", f"--cache_dir={built.root}", f"--task={built.task}", "--index=3", "--index=8")
  return Case(
    program="anystep.tasks.data_program.main",
    imports=DATA,
    arguments=lambda root: (*which, f"--output={root}/list.json", "--overwrite"),
    begin=lambda root: os.mkdir(root),
    committed=r"list\.json",
  )


CASES: Mapping[str, Callable[[pathlib.Path], Case]] = {
  "a cache": cache_job,
  "a training run": training,
  "a unit table": unit_table,
  "a changed plan": plan_change,
  "a list of tombstones": tombstone_list,
}
