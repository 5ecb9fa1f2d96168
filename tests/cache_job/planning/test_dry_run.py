"""A dry run says what the job would do and about how much it would write, and does nothing."""

import functools
import gzip
import json
import math
import re

import numpy as np
import pytest
import seqio
import small_tasks
import tensorflow as tf
from job_runs import registered, run_job, stamps_of

from anystep.cache_job.completion import completion
from anystep.cache_job.main import main
from anystep.cache_job.options import CacheOptions
from anystep.cache_job.planning import estimates
from anystep.cache_job.planning.estimates import Estimate, estimate_split, format_bytes
from anystep.cache_job.planning.task_work import plan_task
from anystep.caches.cache import open_cache
from anystep.errors import AnystepError
from anystep.tasks.sources import HeldOutDataSource, TextDataSource

LIGHT = (small_tasks.observe, small_tasks.split_and_drop)
TASK = small_tasks.task("small_dry", before=LIGHT, sizes={"train": (4, 3), "validation": (5,)})


def as_targets(dataset):
  return dataset.map(lambda line: {"targets": line})


def drop_all(dataset):
  return dataset.filter(lambda line: False)


def lines_task(directory, *, name="small_lines", before=(as_targets,), num_input_examples=None, files="*"):
  """A task of the lines of the files in a directory, which are bytes once they are cached."""
  return seqio.Task(
    name,
    source=seqio.TextLineDataSource(
      {"train": str(directory / files)},
      num_input_examples=num_input_examples and {"train": num_input_examples},
    ),
    preprocessors=[*before, seqio.CacheDatasetPlaceholder(), seqio.preprocessors.tokenize],
    output_features={"targets": seqio.Feature(small_tasks.VOCABULARY)},
  )


@pytest.fixture
def lines_dir(tmp_path):
  """Two files of lines of words, one of them with nothing."""
  rng = np.random.default_rng(0)
  words = np.array(["".join(rng.choice(list("abcdefgh"), rng.integers(2, 9))) for _ in range(500)])
  lines = [" ".join(rng.choice(words, rng.integers(20, 60))) for _ in range(3000)]
  (tmp_path / "lines").mkdir()
  (tmp_path / "lines" / "0").write_text("")
  (tmp_path / "lines" / "1").write_text("".join(f"{line}\n" for line in lines))
  return tmp_path / "lines"


def job_of(task, root, split="train", **options):
  jobs = plan_task(task, CacheOptions(cache_dir=str(root), **options)).jobs
  return next(job for job in jobs if job.split == split)


def dry_run(cache_dir, capsys, *flags, task=TASK):
  """What it prints, after a check that it changed nothing."""
  before = stamps_of(cache_dir)
  capsys.readouterr()
  run_job(cache_dir, "--dry_run", *flags, tasks=task.name)
  assert stamps_of(cache_dir) == before
  return capsys.readouterr().out.splitlines()


def test_a_dry_run_says_what_is_done_and_what_is_left_to_do(tmp_path, capsys, monkeypatch):
  cache_dir = tmp_path / "cache"
  about = r"about \d examples? in 1 shard, [\d.]+ (Ki)?B and [\d.]+ (Ki)?B of temporary disk"
  about += r", which is read in \d+ ranges"
  with registered(TASK):
    lines = dry_run(cache_dir, capsys, "--output_format=tfrecord")
    assert lines[0] == f"small_dry: to {cache_dir / 'small_dry'}"
    assert re.fullmatch(f"  train: 2 source shards, would be cached as tfrecord: {about}", lines[1])
    assert re.fullmatch(f"  validation: 1 source shard, would be cached as tfrecord: {about}", lines[2])
    assert not cache_dir.exists()

    monkeypatch.setenv("SMALL_TASKS_RAISE_AT", "train-1-2")
    with pytest.raises(AnystepError, match="indigestible"):
      run_job(cache_dir, "--splits=train", tasks=TASK.name)
    # A few examples of the first source shard are tried.
    lines = dry_run(cache_dir, capsys)
    assert lines[1].startswith("  train: 2 source shards, 1 of them preprocessed by an earlier run, would be")
    monkeypatch.delenv("SMALL_TASKS_RAISE_AT")

    run_job(cache_dir, "--splits=train", tasks=TASK.name)
    # What is complete is not tried.
    monkeypatch.setenv("SMALL_TASKS_RAISE_AT", "train-0-1")
    lines = dry_run(cache_dir, capsys)
    assert lines[1] == "  train: complete, left as it is"
    assert lines[2].startswith(
      "  validation: 1 source shard, would be cached as array_record: about 4 examples in 1 shard,"
    )
    assert dry_run(cache_dir, capsys, "--splits=train") == ["small_dry: the cache is complete, left as it is"]


def test_a_dry_run_ends_as_the_job_would_where_that_is_refused(tmp_path, monkeypatch):
  with registered(TASK):
    with pytest.raises(AnystepError, match="split_unknown"):
      run_job(tmp_path, "--dry_run", "--splits=nothing", tasks=TASK.name)
    monkeypatch.setenv("SMALL_TASKS_RAISE_AT", "train-0-3")
    with pytest.raises(AnystepError, match="train-0-3 is indigestible") as caught:
      run_job(tmp_path, "--dry_run", tasks=TASK.name)
  assert (caught.value.code, caught.value.kind) == (65, "preprocessor_failed")
  expected = {"task": "small_dry", "split": "train", "source_shard": "train part 0", "place": 3}
  assert {name: caught.value.fields[name] for name in expected} == expected
  assert caught.value.fields["preprocessor"] == "observe"
  assert list(tmp_path.iterdir()) == []


def document_of(cache_dir, capsys, *flags, task=TASK):
  """The document of a dry run, which changes nothing, and the error that it ends with."""
  before = stamps_of(cache_dir)
  capsys.readouterr()
  arguments = [f"--tasks={task.name}", f"--output_cache_dir={cache_dir}", "--dry_run", "--format=json"]
  try:
    assert main(["anystep-cache", *arguments, *flags]) == 0
    error = None
  except AnystepError as caught:
    error = caught
  assert stamps_of(cache_dir) == before
  return json.loads(capsys.readouterr().out), error


class TestDocument:
  """A dry run with --format=json prints what docs/caching.md says."""

  def test_says_what_is_done_and_what_is_left_to_do(self, tmp_path, capsys):
    cache_dir = tmp_path / "cache"
    with registered(TASK):
      lines = dry_run(cache_dir, capsys)
      document, error = document_of(cache_dir, capsys)
      assert (error, document["version"], document["runner"], document["lines"]) == (None, 1, None, lines)
      (task,) = document["tasks"]
      directory = str(cache_dir / "small_dry")
      assert {**task, "splits": []} == {
        "task": "small_dry",
        "directory": directory,
        "complete_in": None,
        "splits": [],
        "refusal": None,
      }
      estimate = estimate_split(TASK, job_of(TASK, cache_dir))
      assert task["splits"][0] == {
        "split": "train",
        "action": "cache",
        "source_shards": 2,
        "finished_source_ranges": 0,
        "container": "array_record",
        "num_shards": 1,
        "examples": estimate.examples,
        "cache_bytes": estimate.cache_bytes,
        "temporary_bytes": estimate.temporary_bytes,
        "ranges": estimate.ranges,
        "refusal": None,
      }
      assert task["splits"][1]["split"] == "validation"

      run_job(cache_dir, "--splits=train", tasks=TASK.name)
      manifest = open_cache(cache_dir, TASK.name, "train").manifest
      document, _ = document_of(cache_dir, capsys)
      kept = document["tasks"][0]["splits"][0]
      assert (kept["action"], kept["examples"], kept["num_shards"]) == ("keep", manifest.num_examples, 1)
      assert kept["cache_bytes"] == sum(file.bytes for file in manifest.files)
      assert [split["action"] for split in document["tasks"][0]["splits"]] == ["keep", "cache"]

      other = f"--tasks_additional_cache_dirs={cache_dir}"
      document, _ = document_of(tmp_path / "other", capsys, "--splits=train", other)
      (task,) = document["tasks"]
      assert task["complete_in"] == str(cache_dir)
      assert [(split["action"], split["examples"]) for split in task["splits"]] == [
        ("keep", manifest.num_examples)
      ]

  def test_has_the_refusals_of_every_task_and_split_and_the_job_s_error(self, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("SMALL_TASKS_RAISE_AT", "validation-0-2")
    with registered(TASK):
      document, error = document_of(tmp_path, capsys)
      train, validation = document["tasks"][0]["splits"]
      assert train["refusal"] is None
      assert train["cache_bytes"] > 0
      assert (validation["cache_bytes"], document["lines"]) == (None, [])
      assert (error.code, error.kind) == (65, "preprocessor_failed")
      assert validation["refusal"] == {
        "code": 65,
        "kind": "preprocessor_failed",
        "fields": {name: str(value) for name, value in error.fields.items()},
        "fix": error.fix,
      }
      monkeypatch.delenv("SMALL_TASKS_RAISE_AT")
      run_job(tmp_path, tasks=TASK.name)
      document, error = document_of(tmp_path, capsys, "--seed=5")
      (task,) = document["tasks"]
      assert (error.kind, task["refusal"]["kind"], task["splits"]) == ("cache_options", "cache_options", [])
      assert (task["refusal"]["fields"]["option"], task["directory"]) == ("seed", None)

  def test_has_bytes_of_each_example_where_nobody_knows_how_many_there_are(
    self, tmp_path, capsys, monkeypatch
  ):
    found = Estimate(examples=None, cache_bytes=3, temporary_bytes=7, num_shards=5)
    monkeypatch.setattr("anystep.cache_job.planning.dry_run.estimate_split", lambda *_: found)
    with registered(TASK):
      document, _ = document_of(tmp_path, capsys, "--num_shards=5")
    split = document["tasks"][0]["splits"][0]
    assert (split["examples"], split["cache_bytes"], split["num_shards"]) == (None, None, 5)
    assert (split["cache_bytes_per_example"], split["temporary_bytes_per_example"]) == (3, 7)

  def test_has_the_graph_of_a_runner_that_is_named(self, tmp_path, capsys):
    with registered(TASK):
      lines = dry_run(tmp_path, capsys, "--direct_num_workers=1")
      document, _ = document_of(tmp_path, capsys, "--direct_num_workers=1")
    runner = document["runner"]
    assert (runner["name"], runner["install"]) == ("DirectRunner", None)
    assert lines[-len(runner["stages"]) :] == [f"  {stage}" for stage in runner["stages"]]
    # Beam names the job of each run by the time, which the graph's size depends on.
    without_size = [
      [re.sub(r", [\d,.]+ KiB", "", line) for line in some] for some in (document["lines"], lines)
    ]
    assert without_size[0] == without_size[1]

  def test_is_all_that_stdout_holds(self, tmp_path, capsys, monkeypatch):
    (tmp_path / "talking_module.py").write_text("print('here I am')")
    monkeypatch.syspath_prepend(str(tmp_path))
    with registered(TASK):
      document, _ = document_of(tmp_path / "cache", capsys, "--module_import=talking_module")
    assert document["version"] == 1

  def test_is_of_a_dry_run_alone(self, tmp_path):
    with pytest.raises(AnystepError) as caught:
      main(["anystep-cache", "--tasks=a", f"--output_cache_dir={tmp_path}", "--format=json"])
    assert (caught.value.code, caught.value.kind, caught.value.fix) == (64, "flags", "add --dry_run")


def test_a_task_that_does_not_give_what_it_says_is_told_by_the_dry_run(tmp_path):
  task = small_tasks.task("small_untokenized", before=LIGHT, after=(), sizes={"train": (4,)})
  with pytest.raises(AnystepError) as caught:
    estimate_split(task, job_of(task, tmp_path))
  assert (caught.value.code, caught.value.kind) == (78, "output_feature")
  assert caught.value.fields["got"] == "string of rank 0"


def give_nothing(dataset):
  dataset.map(lambda example: example)


@pytest.mark.parametrize("after", [(), LIGHT])
def test_a_preprocessor_that_returns_no_dataset_is_named(tmp_path, after):
  task = small_tasks.task("small_nothing", before=(give_nothing, *after), after=(), sizes={"train": (4,)})
  with pytest.raises(AnystepError) as caught:
    estimate_split(task, job_of(task, tmp_path))
  assert (caught.value.kind, caught.value.fields["preprocessor"]) == ("preprocessor_failed", "give_nothing")


def test_a_source_that_cannot_be_read_is_told_by_the_dry_run(tmp_path):
  record = tmp_path / "records" / "part"
  record.parent.mkdir()
  record.write_bytes(b"no TFRecord file")
  parse = {"targets": tf.io.FixedLenFeature([], tf.string)}
  task = seqio.Task(
    "small_unreadable",
    source=seqio.TFExampleDataSource({"train": str(record)}, parse),
    preprocessors=[seqio.CacheDatasetPlaceholder()],
    output_features={},
  )
  with pytest.raises(AnystepError, match="DataLossError") as caught:
    estimate_split(task, job_of(task, tmp_path / "cache"))
  assert (caught.value.code, caught.value.kind) == (66, "source_unreadable")
  assert (caught.value.fields["task"], caught.value.fields["source_shard"]) == (task.name, str(record))


@pytest.mark.parametrize("container", ["array_record", pytest.param("tfrecord", marks=pytest.mark.long)])
def test_estimates_are_near_what_the_job_writes(tmp_path, lines_dir, container, monkeypatch):
  monkeypatch.setattr(completion, "_remove_buildings", lambda *_: None)
  # However slow the machine is, it counts to the end.
  monkeypatch.setattr(estimates, "_COUNT_SECONDS", math.inf)
  task = lines_task(lines_dir)
  with registered(task):
    found = estimate_split(task, job_of(task, tmp_path / "c", container=container, num_shards=8))
    run_job(tmp_path / "c", f"--output_format={container}", "--num_shards=8", tasks=task.name)
  manifest = open_cache(tmp_path / "c", task.name, "train").manifest
  assert found.examples == manifest.num_examples == 3000
  assert found.cache_bytes == pytest.approx(sum(file.bytes for file in manifest.files), rel=0.15)
  left = [path.stat().st_size for path in tmp_path.rglob("s*-0000?.*") if path.suffix != ".json"]
  # A source shard without examples leaves no spill.
  assert len(left) == 2
  assert found.temporary_bytes == pytest.approx(sum(left), rel=0.15)


def test_shards_are_as_many_as_the_data_fills_and_a_dry_run_says_so(tmp_path, capsys):
  """2,400 records of 1 to 2 KiB make 2 shards of a MiB; 60 make one; records without text fill none."""
  (tmp_path / "lines").mkdir()
  for shard, (count, tokens) in enumerate([(60, 512), (1200, 512), (1200, 1024), (2400, 1)]):
    (tmp_path / "lines" / str(shard)).write_text("\n".join(["7 " * tokens] * count))
  for files, num_shards in (("0", 1), ("[12]", 2), ("3", 1)):
    task = lines_task(tmp_path / "lines", files=files)
    with registered(task):
      lines = dry_run(tmp_path / f"cache{files}", capsys, task=task)
      run_job(tmp_path / f"cache{files}", tasks=task.name)
    manifest = open_cache(tmp_path / f"cache{files}", task.name, "train").manifest
    assert manifest.num_shards == num_shards
    assert f" in {num_shards} shard{'' if num_shards == 1 else 's'}, " in lines[1]


def test_a_job_that_goes_on_keeps_the_number_of_shards_of_its_plan(tmp_path, lines_dir, capsys, monkeypatch):
  """As of a job of a version with another default, which was stopped after its plan was made."""
  task = lines_task(lines_dir)
  with registered(task):
    with monkeypatch.context() as patch:
      patch.setattr(CacheOptions, "choose_num_shards", lambda *_: 64)
      patch.setattr("anystep.cache_job.job.write_shard", lambda job, shard, _: 1 // (shard < 5))
      with pytest.raises(ZeroDivisionError):
        run_job(tmp_path / "c", tasks=task.name)
    assert " in 64 shards, " in dry_run(tmp_path / "c", capsys, task=task)[1]
    run_job(tmp_path / "c", tasks=task.name)
    run_job(tmp_path / "c", tasks=task.name)
    manifest = open_cache(tmp_path / "c", task.name, "train").manifest
    assert manifest.num_shards == 64
    run_job(tmp_path / "c", "--overwrite", tasks=task.name)
    assert open_cache(tmp_path / "c", task.name, "train").manifest.num_shards == 1


def estimated_examples(task, tmp_path, **options):
  found = estimate_split(task, job_of(task, tmp_path / "cache", **options))
  return found.examples


class TestHowManyExamples:
  """The source tells, or is counted, or the sizes of its files tell; else nobody does."""

  def test_is_what_the_source_says(self, tmp_path, lines_dir):
    assert estimated_examples(lines_task(lines_dir, num_input_examples=70_000), tmp_path) == 70_000

  def test_follows_from_files_that_were_counted(self, tmp_path, lines_dir, monkeypatch):
    (lines_dir / "2").write_bytes((lines_dir / "1").read_bytes() * 9)
    ticks = iter([0.0, *[0.1] * 3, *[9.0] * 99])
    monkeypatch.setattr(estimates.time, "monotonic", lambda: next(ticks))
    assert estimated_examples(lines_task(lines_dir), tmp_path) == 30_000

  def test_follows_from_the_bytes_of_lines(self, tmp_path, lines_dir, monkeypatch):
    monkeypatch.setattr(estimates, "_COUNT_SECONDS", -1)
    assert estimated_examples(lines_task(lines_dir), tmp_path) == pytest.approx(3000, rel=0.1)

  def test_follows_from_the_bytes_of_files_of_which_some_is_held_out(self, tmp_path, lines_dir, monkeypatch):
    monkeypatch.setattr(estimates, "_COUNT_SECONDS", -1)
    (lines_dir / "0").write_bytes((lines_dir / "1").read_bytes())
    lines = TextDataSource({"train": str(lines_dir / "*")}, column="text")
    task = seqio.Task(
      "small_held_out",
      source=HeldOutDataSource(lines, 10),
      preprocessors=[
        functools.partial(seqio.preprocessors.rekey, key_map={"targets": "text"}),
        seqio.CacheDatasetPlaceholder(),
      ],
      output_features={},
    )
    assert estimated_examples(task, tmp_path) == pytest.approx(6000, rel=0.2)

  def test_is_unknown_of_compressed_files_that_take_long_to_count(self, tmp_path, lines_dir, monkeypatch):
    monkeypatch.setattr(estimates, "_COUNT_SECONDS", -1)
    packed = gzip.compress((lines_dir / "1").read_bytes())
    (lines_dir / "1").write_bytes(packed)
    task = lines_task(lines_dir)
    gunzipped = seqio.FileDataSource(
      lambda path: tf.data.TextLineDataset(path, compression_type="GZIP"), {"train": str(lines_dir / "*")}
    )
    task = seqio.Task(
      task.name, source=gunzipped, preprocessors=task.preprocessors, output_features=task.output_features
    )
    found = estimate_split(task, job_of(task, tmp_path / "cache"))
    assert found.examples is None
    assert re.fullmatch(r"about \d+ B and \d+ B of temporary disk for each example, of which .*", str(found))

  def test_is_unknown_where_the_first_give_none(self, tmp_path, lines_dir, capsys):
    task = lines_task(lines_dir, before=(drop_all, as_targets))
    with registered(task):
      run_job(tmp_path / "cache", "--dry_run", tasks=task.name)
    assert "how much cannot be known, for the first examples give none" in capsys.readouterr().out


def test_numbers_are_rounded_and_have_units_that_people_read():
  found = Estimate(examples=123_456, cache_bytes=int(2.5 * 2**30), temporary_bytes=0, num_shards=64)
  assert str(found) == "about 123,000 examples in 64 shards, 2.5 GiB and 0 B of temporary disk"
  assert [format_bytes(1023), format_bytes(1024), format_bytes(2**40)] == ["1023 B", "1.0 KiB", "1.0 TiB"]
