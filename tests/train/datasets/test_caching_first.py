"""Where caches are missing: made first, or files with random access described where they are."""

import contextlib
import importlib
import io
import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest
import seqio
import tiny_tasks
from job_runs import digests_of, run_job, stamps_of

from anystep.cache_job.main import main as cache_main
from anystep.caches.cache import open_cache
from anystep.containers import containers
from anystep.errors import AnystepError
from anystep.features.digest import batch_digest
from anystep.inspection.rows import what_was_at
from anystep.plans.plan import Plan
from anystep.programs.command_line import run_program
from anystep.records.writing import serialize_example
from anystep.streams.stream import Stream
from anystep.train import main
from anystep.train.datasets import cache_program
from anystep.train.datasets.cache_program import CacheCommand, MissingSplit, make_commands
from anystep.train.demo.run_comparison import compare_runs
from anystep.train.reports.step_log import read_step_log
from anystep.train.runs.trainer import PreparedRun

EVALUATED = {"EVAL_DATASET": "@eval/datasets.DatasetConfig()"}
SPLITS = {"train": 3, "validation": 1}
EXAMPLES_OF_A_FILE = 40

# What a user writes of files that exist: everything runs at reading.
TASKS = """
import seqio
import tensorflow as tf
from anystep.tasks import preprocessors

vocabulary = seqio.ByteVocabulary(extra_ids=125)
tokenize, placeholder = [seqio.preprocessors.tokenize], [seqio.CacheDatasetPlaceholder()]
for name, first in (
  ("in_place", [*placeholder, *tokenize]),
  ("in_haste", [*tokenize, *placeholder]),
  ("in_one", tokenize),
):
  seqio.TaskRegistry.add(
    name,
    source=seqio.TFExampleDataSource(
      {split: FILES + f"/{split}-*" for split in ("train", "validation")},
      feature_description={"targets": tf.io.FixedLenFeature([], tf.string)},
    ),
    preprocessors=[*first, preprocessors.span_corruption, seqio.preprocessors.append_eos],
    output_features={"inputs": seqio.Feature(vocabulary), "targets": seqio.Feature(vocabulary)},
  )
"""


class Killed(BaseException):
  """Stands for the end of the process."""


@pytest.fixture
def programs(monkeypatch):
  """The commands that are run as programs; in this process, for a program takes 10 s to start."""
  commands = []

  def run(command, *, stdout=None, **_):
    start = command.index("anystep.cache_job")
    commands.append(["anystep-cache", *command[start + 1 :]])
    text = io.StringIO()
    with contextlib.redirect_stdout(text), pytest.raises(SystemExit) as ended:
      run_program(lambda: cache_main(commands[-1]))
    if stdout is None:
      print(text.getvalue(), end="")
    return subprocess.CompletedProcess(command, ended.value.code, stdout=text.getvalue())

  monkeypatch.setattr(cache_program.subprocess, "run", run)
  return commands


def write_files(directory):
  """TFRecord files of texts that say where they are."""
  directory.mkdir(parents=True)
  for split, num_files in SPLITS.items():
    for number in range(num_files):
      texts = [f"{split} {number} {place} " + "word " * (place % 7) for place in range(EXAMPLES_OF_A_FILE)]
      records = [serialize_example({"targets": np.array(text.encode(), object)}) for text in texts]
      path = directory / f"{split}-{number}.tfrecord"
      containers.write_shard(containers.TFRECORD, path, records, options="")
  return directory


@pytest.fixture
def tasks_of(tmp_path, monkeypatch):
  """`tasks_of(files)`: registers tasks of these files as a user's module does, for one test."""
  names = ("in_place", "in_haste", "in_one")

  def register(files):
    (tmp_path / "file_tasks.py").write_text(f"FILES = {str(files)!r}\n{TASKS}")
    importlib.import_module("file_tasks")

  monkeypatch.syspath_prepend(str(tmp_path))
  yield register
  for name in names:
    seqio.TaskRegistry.remove(name)
  sys.modules.pop("file_tasks", None)


def in_place(**bindings):
  return {
    "USE_CACHED_TASKS": False,
    "MIXTURE_OR_TASK_NAME": "'in_place'",
    "MIXTURE_OR_TASK_MODULE": "'file_tasks'",
    **bindings,
  }


@pytest.mark.long
def test_files_with_random_access_are_trained_on_in_place_and_exactly(
  command, tasks_of, programs, tmp_path, monkeypatch, capsys
):
  root = tmp_path / "data"
  tasks_of(write_files(root / "files"))
  run_job(root, "--index_only", "--module_import=file_tasks", tasks="in_place")
  before = stamps_of(root)
  bindings = in_place(CACHE_DIR=repr(str(root)), TRAIN_STEPS=5)
  main.main(command("undisturbed", **bindings))
  assert "WARNING: USE_CACHED" not in capsys.readouterr().err

  def next_batch(stream, original=Stream.__next__):
    if stream.step == 4:
      raise Killed
    return original(stream)

  with monkeypatch.context() as patch:
    patch.setattr(Stream, "__next__", next_batch)
    with pytest.raises(Killed):
      main.main(command("killed", **bindings))
  main.main(command("killed", **bindings))
  comparison = compare_runs(tmp_path / "undisturbed", tmp_path / "killed")
  assert comparison.identical, comparison.verdict
  # What was described before is only read.
  assert programs == []
  assert stamps_of(root) == before

  # The rows are those that the plan says, in an order of all examples.
  model_dir = tmp_path / "undisturbed"
  cache = open_cache(root, "in_place", "train")
  plan = Plan.read(model_dir / "data_plan.json", fix="train first").on_caches({"in_place": cache})
  assert plan.epoch_policy == "global"
  run = main.prepare(command("undisturbed", **bindings))
  (records,) = read_step_log(model_dir)
  with run.data.open_stream() as stream:
    assert [record.digest for record in records] == [batch_digest(stream.batch(step)) for step in range(5)]
  rows = [row for step in range(5) for row in what_was_at(plan, {"in_place": cache}, step)]
  places = [(row["examples"][0]["source_name"], row["examples"][0]["source_place"]) for row in rows]
  assert len(set(places)) == len(places) == 40
  assert len({name for name, _ in places}) == 3
  for row in rows[:8]:
    (example,) = row["examples"]
    number = pathlib.Path(example["source_name"]).stem.removeprefix("train-")
    text = cache[example["index"]]["targets"].item().decode()
    assert text.startswith(f"train {number} {example['source_place']} ")


@pytest.mark.long
def test_what_is_not_described_yet_is_described_below_the_run(command, tasks_of, programs, tmp_path, capsys):
  index = tmp_path / "model" / "as_is"
  tasks_of(write_files(index / "files"))
  bindings = in_place(CACHE_DIR=None, **EVALUATED)
  # A dry run only says so.
  assert main.main([*command(**bindings), "--dry_run"]) == 0
  assert "would describe files where they are: anystep-cache --tasks=in_place" in capsys.readouterr().out
  assert [path.name for path in index.iterdir()] == ["files"]
  assert programs == []
  prepared = main.prepare(command(**bindings))
  assert [one for one in programs[0] if "splits" in one or "index" in one] == [
    "--splits=train,validation",
    "--index_only",
  ]
  assert "describing files where they are: anystep-cache --tasks=in_place" in capsys.readouterr().out
  assert prepared.data.plan.tasks["in_place"].layout == "as_is"
  assert sum(len(part.examples["targets"]) for part in prepared.evaluation[0].evaluation_batches()) == 40
  prepared.data.record(tmp_path / "model", 0)
  assert json.loads((tmp_path / "model" / "data_caches.json").read_text())["cache_dirs"] == [str(index)]
  # Once is enough.
  assert main.prepare(command(**bindings)).data.plan == prepared.data.plan
  assert len(programs) == 1


@pytest.mark.parametrize(
  ("name", "reason"),
  [
    ("in_haste", "preprocessors of in_haste stand before its seqio.CacheDatasetPlaceholder()"),
    ("in_one", "in_one has no seqio.CacheDatasetPlaceholder()"),
    (tiny_tasks.NAME, "the source of tiny_span_corruption, a FunctionDataSource, has no random access"),
  ],
)
def test_what_cannot_be_read_in_place_comes_through_seqio_and_says_why(
  name, reason, command, tasks_of, programs, tmp_path
):
  tasks_of(write_files(tmp_path / "files"))
  run = main.prepare(command(**in_place(CACHE_DIR=None, MIXTURE_OR_TASK_NAME=repr(name))))
  assert reason in run.data.caveat
  assert programs == []


def test_a_task_that_nobody_told_the_program_of_comes_through_seqio(command, tasks_of, programs, tmp_path):
  tasks_of(write_files(tmp_path / "files"))
  run = main.prepare(command(**in_place(CACHE_DIR=None, MIXTURE_OR_TASK_MODULE=None)))
  assert "MIXTURE_OR_TASK_MODULE names no module" in run.data.caveat
  assert programs == []


def test_files_that_the_program_refuses_come_through_seqio(
  command, tasks_of, programs, tmp_path, monkeypatch
):
  tasks_of(write_files(tmp_path / "files"))
  run = lambda program, **_: subprocess.CompletedProcess(program, 78, stdout="")
  monkeypatch.setattr(cache_program.subprocess, "run", run)
  data = main.prepare(command(**in_place(CACHE_DIR=None))).data
  assert "anystep-cache --index_only refuses in_place" in data.caveat


def test_damaged_files_are_refused_however_they_would_be_read(command, tasks_of, programs, tmp_path, capsys):
  files = write_files(tmp_path / "model" / "as_is" / "files")
  tasks_of(files)
  (files / "train-1.tfrecord").write_bytes(b"no records")
  with pytest.raises(AnystepError) as refused:
    main.prepare(command(**in_place(CACHE_DIR=None)))
  assert (refused.value.code, refused.value.kind) == (65, "cache_program")
  assert "kind=file_container" in capsys.readouterr().err


def test_a_missing_cache_is_made_first_as_the_program_makes_it(command, programs, tmp_path, capsys):
  cache_dir = tmp_path / "cache"
  arguments = [*command(cache_dir=cache_dir, TRAIN_STEPS=3, **EVALUATED), "--cache_if_missing"]
  assert main.main([*arguments, "--dry_run"]) == 0
  printed = capsys.readouterr().out
  line = (
    f"anystep-cache --tasks=tiny_span_corruption --output_cache_dir={cache_dir} --module_import=tiny_tasks"
    " --splits=train,validation"
  )
  assert f"would cache first, what is not cached yet: {line}" in printed
  assert "  train: 1 source shard, would be cached as array_record: about 300 examples" in printed
  assert "# would train from step 0, or the newest checkpoint, to step 3" in printed
  assert not cache_dir.exists()

  assert main.main(arguments) == 0
  assert f"caching first, what is not cached yet: {line}" in capsys.readouterr().out
  run_job(tmp_path / "by_hand", "--module_import=tiny_tasks", tasks=tiny_tasks.NAME)
  assert digests_of(cache_dir) == digests_of(tmp_path / "by_hand")
  assert read_step_log(tmp_path / "model")[0][-1].step == 2
  # What is there is not made again, nor looked at by the program.
  count = len(programs)
  assert main.main([*arguments, "--dry_run"]) == 0
  assert "would train from checkpoint_3" in capsys.readouterr().out
  assert len(programs) == count


def test_only_what_is_missing_is_made(command, programs, tmp_path, monkeypatch):
  monkeypatch.setattr(PreparedRun, "run", lambda *_, **named: {})
  cache_dir = tmp_path / "cache"
  run_job(cache_dir, "--splits=train", "--module_import=tiny_tasks", tasks=tiny_tasks.NAME)
  trained = {path: stamp for path, stamp in stamps_of(cache_dir).items() if "train" in path.name}
  bindings = {"MIXTURE_OR_TASK_NAME": repr(tiny_tasks.MIXTURE), **EVALUATED}
  bindings["eval/datasets.DatasetConfig.mixture_or_task_name"] = repr(tiny_tasks.NAME)
  main.main([*command(cache_dir=cache_dir, TRAIN_STEPS=1, **bindings), "--cache_if_missing"])
  runs = [(one[1], one[-1]) for one in programs if "--dry_run" not in one]
  assert runs == [
    ("--tasks=tiny_other", "--splits=train"),
    ("--tasks=tiny_span_corruption", "--splits=validation"),
  ]
  assert {path: stamp for path, stamp in stamps_of(cache_dir).items() if path in trained} == trained


def test_more_than_the_limit_is_refused_with_the_command_to_run(command, programs, tmp_path):
  flags = ["--cache_if_missing", "--cache_if_missing_limit_bytes=1000"]
  with pytest.raises(AnystepError) as refused:
    main.main([*command(cache_dir=tmp_path / "cache"), *flags])
  error = refused.value
  assert (error.code, error.kind) == (78, "cache_too_large")
  assert error.fields["expected"] == "caches of at most 1,000 bytes"
  assert int(error.fields["got"].removeprefix("about ").replace(",", "")) > 1000
  assert f"anystep-cache --tasks=tiny_span_corruption --output_cache_dir={tmp_path}/cache" in error.fix
  assert [one[-1] for one in programs] == ["--dry_run"]


def split_of_a_dry_run(action, cache_bytes):
  return {"split": "train", "action": action, "cache_bytes": cache_bytes}


def answer_with(monkeypatch, text):
  """Lets the program answer a text; returns a command."""
  run = lambda command, **_: subprocess.CompletedProcess(command, 0, stdout=text)
  monkeypatch.setattr(cache_program.subprocess, "run", run)
  return CacheCommand(tasks=("a", "b"), cache_dir="cache", modules=("m",))


@pytest.mark.parametrize(
  ("splits", "size"),
  [
    ([[("cache", 1536)]], 1536),
    ([[("cache", 900), ("keep", 10**9)], [("cache", 2048 << 40)]], 900 + (2048 << 40)),
    ([[("keep", 3)], []], 0),
    ([[("cache", 3)], [("cache", None)]], None),
    ([[("index", None)]], None),
  ],
)
def test_the_size_is_the_sum_of_what_would_be_written_or_unknown(splits, size, monkeypatch, capfd):
  tasks = [{"splits": [split_of_a_dry_run(*split) for split in of_task]} for of_task in splits]
  document = {"version": 1, "tasks": tasks, "lines": ["a: to somewhere", "  train: much"]}
  command = answer_with(monkeypatch, json.dumps(document))
  answer = command.dry_run()
  assert (answer.lines, answer.cache_bytes) == (document["lines"], size)
  if size is None:
    with pytest.raises(AnystepError) as refused:
      cache_program.cache_first([command], limit_bytes=1 << 60, dry_run=True)
    assert (refused.value.kind, refused.value.fields["got"]) == ("cache_too_large", "nobody knows how many")
  else:
    cache_program.cache_first([command], limit_bytes=size, dry_run=True)
  assert capfd.readouterr().out.endswith("\na: to somewhere\n  train: much\n")


@pytest.mark.parametrize(
  "text", ["", "a: to somewhere", "[]", '{"version": 1}', '{"version": 2, "tasks": []}']
)
def test_an_answer_that_is_no_dry_run_is_refused(text, monkeypatch):
  with pytest.raises(AnystepError) as refused:
    answer_with(monkeypatch, text).dry_run()
  assert (refused.value.code, refused.value.kind) == (74, "cache_program")
  assert refused.value.fields["expected"] == "a dry run as a document of version 1"


def test_commands_name_each_split_that_is_missing_once_and_no_other():
  missing = [("a", "train", "x"), ("b.c", "train", "x"), ("a", "validation", "x"), ("d", "train", "y")]
  missing += missing[:1]
  commands = make_commands(
    MissingSplit(task=task, split=split, cache_dir=root, modules=("m",)) for task, split, root in missing
  )
  assert list(map(str, commands)) == [
    "anystep-cache --tasks=a --output_cache_dir=x --module_import=m --splits=train,validation",
    "anystep-cache '--tasks=b\\.c' --output_cache_dir=x --module_import=m --splits=train",
    "anystep-cache --tasks=d --output_cache_dir=y --module_import=m --splits=train",
  ]


@pytest.mark.parametrize(
  ("bindings", "flags", "code", "kind", "said"),
  [
    ({}, ["--cache_if_missing_limit_bytes=5"], 64, "flags", "add --cache_if_missing"),
    ({}, ["--cache_if_missing", "--cache_if_missing_limit_bytes=-5"], 64, "flags", "limit_bytes"),
    ({"USE_CACHED_TASKS": False}, ["--cache_if_missing"], 78, "use_cached", "leave --cache_if_missing out"),
    ({"MIXTURE_OR_TASK_MODULE": None}, ["--cache_if_missing"], 78, "module_missing", "tiny_span_corruption"),
    ({"CACHE_DIR": None}, ["--cache_if_missing"], 78, "cache_dir", "CACHE_DIR"),
  ],
)
def test_what_contradicts_caching_first_is_refused(
  bindings, flags, code, kind, said, command, programs, tmp_path
):
  with pytest.raises(AnystepError) as refused:
    main.main([*command(**{"CACHE_DIR": repr(str(tmp_path / "none")), **bindings}), *flags])
  assert (refused.value.code, refused.value.kind) == (code, kind)
  assert said in str(refused.value)
  assert programs == []


def test_the_program_s_failure_is_the_trainer_s(command, programs, tmp_path, capsys):
  (tmp_path / "cache").write_text("no directory")
  with pytest.raises(AnystepError) as failed:
    main.main([*command(cache_dir=tmp_path / "cache"), "--cache_if_missing"])
  assert (failed.value.code, failed.value.kind) == (73, "cache_program")
  assert failed.value.fields["got"] == "exit status 73"
  assert "kind=cannot_create" in capsys.readouterr().err


def test_without_beam_the_package_to_install_is_named(command, monkeypatch, tmp_path):
  monkeypatch.setattr(cache_program.importlib.util, "find_spec", lambda name: None)
  with pytest.raises(AnystepError) as refused:
    main.main([*command(cache_dir=tmp_path / "cache"), "--cache_if_missing"])
  assert (refused.value.code, refused.value.kind) == (78, "package_missing")
  assert "anystep[cache]" in refused.value.fix


def mixture_string(root):
  return f"{root}/{tiny_tasks.NAME},0.3;{root}/{tiny_tasks.OTHER_NAME},0.1"


@pytest.mark.parametrize("is_file", [True, False])
def test_a_mixture_of_caches_is_trained_on_at_its_weights(is_file, command, tiny_cache, tmp_path):
  text = mixture_string(tiny_cache)
  if is_file:
    parts = [part.split(",") for part in text.split(";")]
    document = {f"part {k}": {"path": path, "weight": float(w)} for k, (path, w) in enumerate(parts)}
    (tmp_path / "mixture.json").write_text(json.dumps(document))
    text = str(tmp_path / "mixture.json")
  run = main.prepare(command(MIXTURE_OR_TASK_NAME=repr(text), CACHE_DIR=None))
  assert run.data.plan.segments[0].quotas == {tiny_tasks.NAME: 3, tiny_tasks.OTHER_NAME: 1}
  run.data.record(tmp_path / "model", 0)
  caches = json.loads((tmp_path / "model" / "data_caches.json").read_text())
  assert caches["cache_dirs"] == [str(tiny_cache)]


def test_a_mixture_of_caches_of_tasks_that_are_not_registered_is_refused(command, tiny_cache):
  removed = seqio.TaskRegistry.get(tiny_tasks.OTHER_NAME)
  seqio.TaskRegistry.remove(tiny_tasks.OTHER_NAME)
  try:
    with pytest.raises(AnystepError) as refused:
      main.prepare(command(MIXTURE_OR_TASK_NAME=repr(mixture_string(tiny_cache)), CACHE_DIR=None))
  finally:
    seqio.TaskRegistry.add_provider(tiny_tasks.OTHER_NAME, removed)
  assert (refused.value.code, refused.value.kind) == (64, "task_unknown")
  assert refused.value.fields["got"] == tiny_tasks.OTHER_NAME


def test_a_mixture_of_caches_needs_them(command, tiny_cache):
  bindings = {"MIXTURE_OR_TASK_NAME": repr(mixture_string(tiny_cache)), "USE_CACHED_TASKS": False}
  with pytest.raises(AnystepError) as refused:
    main.prepare(command(**bindings))
  assert (refused.value.code, refused.value.kind) == (78, "use_cached")


@pytest.mark.soak
def test_the_real_program_is_run_and_its_progress_is_seen(command, tmp_path):
  environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, pathlib.Path(__file__).parents[3:1:-1]))}
  program = [str(pathlib.Path(sys.executable).with_name("anystep-train"))]
  arguments = [*command(cache_dir=tmp_path / "cache", TRAIN_STEPS=3)[1:], "--cache_if_missing"]
  done = subprocess.run([*program, *arguments], env=environment, capture_output=True, text=True, check=True)
  assert "tiny_span_corruption: cached" in done.stdout
  assert "preprocess: 1/1 source shards" in done.stderr
  assert read_step_log(tmp_path / "model")[0][-1].step == 2
