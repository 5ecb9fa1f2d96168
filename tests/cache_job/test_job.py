"""The job: what it writes, whatever happens to it, and what it refuses."""

import collections
import contextlib
import functools
import hashlib
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import apache_beam as beam
import numpy as np
import pytest
import seqio
import small_tasks
import tensorflow as tf
from apache_beam.testing.util import assert_that, equal_to
from array_record.python import array_record_module
from seqio import beam_utils

import oracle
from anystep.cache_job import job
from anystep.cache_job.main import main, run, select_tasks
from anystep.caches.cache import open_cache
from anystep.errors import AnystepError
from anystep.tasks.reading.task_reader import TaskReader
from anystep.transforms.transform import Records

TESTS = pathlib.Path(__file__).resolve().parents[1]
PROGRAM = pathlib.Path(sys.executable).with_name("anystep-cache")
SPLITS = list(small_tasks.SOURCE_SIZES)
IN_PARALLEL = "--pipeline_options=--runner=DirectRunner,--direct_num_workers={},--direct_running_mode={}"


@pytest.fixture(autouse=True)
def seqio_as_imported(monkeypatch):
  """SeqIO leaves its seed counter where a preprocessor that raised left it."""
  monkeypatch.setattr(seqio.utils, "_NEXT_MAP_SEED", None)


def flags_of(cache_dir, *flags, tasks="small"):
  return [
    "anystep-cache",
    f"--tasks={tasks}",
    f"--output_cache_dir={cache_dir}",
    "--module_import=small_tasks",
    *flags,
  ]


def cache(cache_dir, *flags, tasks="small"):
  """Runs the job in this process."""
  return main(flags_of(cache_dir, *flags, tasks=tasks))


@pytest.fixture(scope="module")
def built(tmp_path_factory):
  """`built(*flags, tasks=...)`: the root of a cache that no test changes."""

  @functools.cache
  def build(*flags, tasks="small"):
    cache_dir = tmp_path_factory.mktemp("cache")
    assert cache(cache_dir, *flags, tasks=tasks) == 0
    return cache_dir

  return build


def digests_of(cache_dir):
  """sha256 of every file below, by relative path."""
  return {
    path.relative_to(cache_dir).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
    for path in sorted(cache_dir.rglob("*"))
    if path.is_file()
  }


def finished_digests_of(cache_dir):
  return {name: digest for name, digest in digests_of(cache_dir).items() if "/.building/" not in name}


def manifest_of(cache_dir, split, task="small"):
  return json.loads((cache_dir.joinpath(*task.split(":")) / f"manifest.{split}.json").read_text())


@functools.cache
def expected_examples(task_name, split, *, base_seed=0, end_lengths=()):
  """What SeqIO makes of each source shard, run alone with the seed that the order specification gives."""
  task = seqio.TaskRegistry.get(task_name)
  names = task.source.list_shards(split)
  shards = []
  for shard in range(len(names)):
    seed = oracle.preprocess_seed(task_name, split, base_seed, shard)
    tf.random.set_seed(0)
    dataset = task.source.get_dataset(split=split, shard_info=seqio.ShardInfo(shard, len(names)))
    dataset = task.preprocess_precache(dataset, seed=seed)
    if end_lengths:
      dataset = task.preprocess_postcache(dataset, sequence_length=dict(end_lengths), seed=seed)
    shards.append(list(dataset.as_numpy_iterator()))
  return shards


def assert_same_example(got, expected):
  assert got.keys() == expected.keys()
  for name, value in expected.items():
    if isinstance(value, bytes):
      assert got[name] == value
    else:
      assert (got[name].dtype, got[name].shape) == (value.dtype, value.shape)
      np.testing.assert_array_equal(got[name], value)


def values_of(record):
  """A record's features as lists, read by TensorFlow's own message class."""
  features = tf.train.Example.FromString(record).features.feature
  return {name: list(getattr(kind, kind.WhichOneof("kind")).value) for name, kind in features.items()}


def flat(value):
  return [value] if isinstance(value, bytes) else np.asarray(value).reshape(-1).tolist()


LAYOUTS = {
  "as it comes": ((), 0, 0),
  "with seeds and shards of one's own": (
    ("--seed=3", "--base_seed=5", "--num_shards=4", "--block_records=2"),
    3,
    5,
  ),
  "in more shards than some splits have examples": (("--num_shards=9", "--block_records=1"), 0, 0),
}


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize(("flags", "seed", "base_seed"), LAYOUTS.values(), ids=LAYOUTS)
class TestEveryRecord:
  def test_is_in_the_shard_and_place_of_its_index(self, built, flags, seed, base_seed, split):
    cache_dir = built(*flags)
    manifest = manifest_of(cache_dir, split)
    shards = expected_examples("small", split, base_seed=base_seed)
    sizes = [len(shard) for shard in shards]
    assert tuple(sizes) == small_tasks.CACHED_SIZES[split]
    assert [source["examples"] for source in manifest["source_shards"]] == sizes
    assert [source["name"] for source in manifest["source_shards"]] == [
      f"{split} part {k}" for k in range(len(sizes))
    ]
    assert (manifest["num_examples"], manifest["seed"], manifest["base_seed"]) == (
      sum(sizes),
      seed,
      base_seed,
    )
    files = [
      array_record_module.ArrayRecordReader(str(cache_dir / "small" / file["name"])).read_all()
      for file in manifest["files"]["records"]
    ]
    assert [len(records) for records in files] == oracle.records_per_shard(manifest)
    for source_shard, examples in enumerate(shards):
      for source_place, example in enumerate(examples):
        index = oracle.index_of(source_shard, source_place, "small", split, seed, sizes)
        record = files[index % manifest["num_shards"]][index // manifest["num_shards"]]
        assert values_of(record) == {name: flat(value) for name, value in example.items()}

  def test_is_read_under_its_index_and_traced_to_its_source(self, built, flags, seed, base_seed, split):
    opened = open_cache(built(*flags), "small", split)
    shards = expected_examples("small", split, base_seed=base_seed)
    assert len(opened) == sum(map(len, shards))
    if not len(opened):
      return
    indices = np.arange(len(opened))
    for index, source_shard, source_place in zip(indices, *opened.source_of(indices), strict=True):
      expected = shards[source_shard][source_place]
      assert (source_shard, source_place) == oracle.trace(
        int(index), "small", split, seed, [len(shard) for shard in shards]
      )
      assert_same_example(opened[int(index)], {**expected, "name": np.array(expected["name"], object)})

  def test_has_its_token_counts_in_the_lengths_tables(self, built, flags, seed, base_seed, split):
    opened = open_cache(built(*flags), "small", split)
    num_shards = opened.manifest.num_shards
    assert opened.manifest.sequence_features == ["pairs", "targets"]
    for shard in range(num_shards):
      examples = [opened[index] for index in range(shard, len(opened), num_shards)]
      counts = [[len(example["pairs"]), len(example["targets"])] for example in examples]
      table = opened.lengths(shard)
      assert table.dtype == np.uint32
      np.testing.assert_array_equal(table, np.array(counts, np.uint32).reshape(-1, 2))

  def test_is_of_a_file_that_the_manifest_vouches_for(self, built, flags, seed, base_seed, split):
    cache_dir = built(*flags)
    open_cache(cache_dir, "small", split).verify()
    listed = {entry["name"] for kind in manifest_of(cache_dir, split)["files"].values() for entry in kind}
    present = {path.name for path in (cache_dir / "small").iterdir() if f"{split}." in path.name}
    assert present == listed | {f"manifest.{split}.json"}


@pytest.mark.parametrize("split", ["train", "validation"])
def test_what_is_drawn_without_a_seed_follows_tensorflow_s_global_seed_0(built, split):
  opened = open_cache(built(tasks="small:inner"), "small:inner", split)
  shards = expected_examples("small:inner", split)
  sources = zip(*opened.source_of(np.arange(len(opened))), strict=True)
  expected = [shards[source_shard][source_place]["noise"] for source_shard, source_place in sources]
  assert [opened[index]["noise"] for index in range(len(opened))] == expected
  assert len(set(expected)) > 1


def test_a_split_whose_records_fill_no_mebibyte_has_one_shard_and_others_as_many_as_are_asked(built):
  for flags in (["--block_records=1"], []):
    assert manifest_of(built(*flags), "train")["num_examples"] >= 64
    for split in ("train", "validation"):
      assert manifest_of(built(*flags), split)["num_shards"] == 1
      assert manifest_of(built(*flags, "--num_shards=5"), split)["num_shards"] == 5


@pytest.mark.parametrize("split", ["train", "validation"])
def test_info_and_stats_are_what_seqio_writes(built, split):
  directory = built() / "small"
  examples = [example for shard in expected_examples("small", split) for example in shard]
  stats = json.loads((directory / f"stats.{split}.json").read_text())
  assert stats["examples"] == len(examples)
  assert stats["targets_tokens"] == sum(len(example["targets"]) for example in examples)
  lengths = [stats.pop(f"{name}_lengths") for name in ("pairs", "targets")]
  assert lengths[0] == lengths[1] == length_bins(examples)
  info = json.loads((directory / f"info.{split}.json").read_text())
  output_features = seqio.TaskRegistry.get("small").output_features
  with beam.Pipeline() as pipeline:
    cached = pipeline | beam.Create(examples)
    assert_that(cached | beam_utils.GetStats(output_features), equal_to([stats]), label="stats")
    assert_that(cached | beam_utils.GetInfo(num_shards=1), equal_to([info]), label="info")


def length_bins(examples):
  """How many targets have 0, 1, 2 to 3, 4 to 7 and so on tokens."""
  bins = collections.Counter()
  for example in examples:
    first = 1 << (len(example["targets"]).bit_length() - 1)
    bins[f"{first}-{2 * first - 1}"] += 1
  return dict(bins)


def test_stats_leave_out_end_and_padding_ids_as_seqio_does(tmp_path):
  end, padding = small_tasks.VOCABULARY.eos_id, small_tasks.VOCABULARY.pad_id

  @seqio.map_over_dataset
  def end_and_pad(example):
    return {**example, "targets": tf.concat([example["targets"], [end, padding, padding]], 0)}

  before = (*small_tasks.BEFORE_CACHE, end_and_pad)
  task = small_tasks.task("small_padded", before=before, after=(), sizes={"train": (5, 4)})
  with registered(task):
    cache(tmp_path, tasks=task.name)
    shards = expected_examples(task.name, "train")
  lengths = [len(example["targets"]) - 3 for shard in shards for example in shard]
  stats = json.loads((tmp_path / task.name / "stats.train.json").read_text())
  del stats["pairs_lengths"], stats["targets_lengths"]
  assert stats == {
    "examples": len(lengths),
    "targets_tokens": sum(lengths),
    "targets_max_tokens": max(lengths),
  }


def test_the_same_job_writes_the_same_bytes(built, tmp_path):
  cache(tmp_path)
  assert digests_of(tmp_path) == digests_of(built())


@pytest.mark.parametrize(
  ("tasks", "workers", "mode"),
  [
    ("small_slow_graph", 2, "multi_threading"),
    pytest.param("small:inner", 1, "multi_processing", marks=pytest.mark.long),
    pytest.param("small", 2, "multi_processing", marks=pytest.mark.soak),
  ],
)
def test_bytes_do_not_depend_on_the_number_of_workers(built, tmp_path, monkeypatch, tasks, workers, mode):
  monkeypatch.setenv("PYTHONPATH", str(TESTS))
  cache(tmp_path, IN_PARALLEL.format(workers, mode), tasks=tasks)
  assert digests_of(tmp_path) == digests_of(built(tasks=tasks))


@pytest.mark.parametrize(
  "flags",
  [
    ["--runner=BundleBasedDirectRunner"],
    pytest.param(["--direct_num_workers=4", "--direct_running_mode=multi_threading"], marks=pytest.mark.soak),
    pytest.param(
      ["--direct_num_workers=4", "--direct_running_mode=multi_processing"], marks=pytest.mark.soak
    ),
  ],
)
def test_bytes_do_not_depend_on_the_runner(built, tmp_path, monkeypatch, flags):
  monkeypatch.setenv("PYTHONPATH", str(TESTS))
  cache(tmp_path, *flags)
  assert digests_of(tmp_path) == digests_of(built())


def test_bytes_are_those_of_every_earlier_version(built, golden):
  # What may change them is a new compressor in array_record (zstd), and with it the records files alone.
  # Anything else is another order, other seeds or another record format: a new version of it.
  records_and_lengths = {
    name: digest for name, digest in digests_of(built()).items() if ".array_record-" in name or "-of-" in name
  }
  assert len(records_and_lengths) == 2 * len(SPLITS)
  golden("small_files.json", json.dumps(records_and_lengths, indent=1) + "\n")


@contextlib.contextmanager
def registered(task):
  """Registers a task for a while, in the place of the one of its name."""
  registry = seqio.TaskRegistry
  before = registry.get(task.name) if task.name in registry.names() else None
  if before is not None:
    registry.remove(task.name)
  registry.add_provider(task.name, task)
  try:
    yield
  finally:
    registry.remove(task.name)
    if before is not None:
      registry.add_provider(task.name, before)


def stamps_of(cache_dir):
  return {path: (path.stat().st_mtime_ns, path.stat().st_ino) for path in cache_dir.rglob("*")}


class TestRunAgain:
  def test_leaves_a_complete_cache_alone_and_says_so(self, built, capsys):
    cache_dir = built()
    before = stamps_of(cache_dir)
    capsys.readouterr()
    assert cache(cache_dir) == 0
    assert stamps_of(cache_dir) == before
    assert "small: the cache is complete" in capsys.readouterr().out

  def test_refuses_a_complete_cache_of_what_the_task_was(self, built):
    cache_dir = built()
    before = stamps_of(cache_dir)
    changed = small_tasks.task("small", before=small_tasks.BEFORE_CACHE[:-1])
    with registered(changed), pytest.raises(AnystepError) as caught:
      cache(cache_dir)
    assert (caught.value.code, caught.value.kind) == (76, "task_changed")
    assert caught.value.fields["task"] == "small"
    assert caught.value.fields["item"] == "preprocessors"
    assert stamps_of(cache_dir) == before

  @pytest.mark.parametrize(
    ("field", "value", "flags"),
    [
      ("seed", 1, ["--seed=1"]),
      ("base_seed", 1, ["--base_seed=1"]),
      ("num_shards", 2, ["--num_shards=2"]),
      ("block_records", 8, ["--block_records=8"]),
      ("cache_at", "end", ["--cache_at=end", '--task_feature_lengths={"targets": 8}']),
    ],
  )
  def test_refuses_a_complete_cache_of_other_options(self, built, field, value, flags):
    cache_dir = built()
    before = stamps_of(cache_dir)
    with pytest.raises(AnystepError) as caught:
      cache(cache_dir, *flags)
    assert (caught.value.code, caught.value.kind) == (76, "cache_options")
    assert (caught.value.fields["option"], caught.value.fields["expected"]) == (field, value)
    assert caught.value.fields["got"] == manifest_of(cache_dir, "train")[field]
    assert stamps_of(cache_dir) == before

  def test_leaves_a_cache_alone_whose_options_are_asked_for_again(self, built):
    flags = ("--seed=3", "--base_seed=5", "--num_shards=4")
    before = stamps_of(built(*flags))
    assert cache(built(*flags), *flags) == 0
    assert stamps_of(built(*flags)) == before

  def test_with_overwrite_makes_the_cache_anew(self, built, tmp_path):
    shutil.copytree(built(), tmp_path, dirs_exist_ok=True)
    assert cache(tmp_path, "--overwrite", "--seed=3", "--base_seed=5", "--num_shards=4") == 0
    expected = built("--seed=3", "--base_seed=5", "--num_shards=4")
    assert digests_of(tmp_path) == digests_of(expected)
    assert digests_of(expected) != digests_of(built())

  def test_with_overwrite_keeps_the_old_cache_until_the_new_one_is_built(self, built, tmp_path, monkeypatch):
    shutil.copytree(built(), tmp_path, dirs_exist_ok=True)
    monkeypatch.setenv("SMALL_TASKS_RAISE_AT", "train-3-9")
    with pytest.raises(Exception, match="train part 3"):
      cache(tmp_path, "--overwrite", "--seed=1")
    assert finished_digests_of(tmp_path) == digests_of(built())
    for split in SPLITS:
      open_cache(tmp_path, "small", split).verify()
    monkeypatch.delenv("SMALL_TASKS_RAISE_AT")
    cache(tmp_path, "--overwrite", "--seed=1")
    assert {manifest_of(tmp_path, split)["seed"] for split in SPLITS} == {1}

  def test_keeps_the_caches_of_tasks_named_below_it(self, built, tmp_path):
    shutil.copytree(built(tasks="small:inner"), tmp_path, dirs_exist_ok=True)
    cache(tmp_path)
    for task in ("small", "small:inner"):
      open_cache(tmp_path, task, "train").verify()


INNER = "small:inner"


@contextlib.contextmanager
def changes_up_to(limit=None):
  """Lists the moves and removals of files, after so many of which the machine is gone."""
  done = []

  def limited(change, *args, **kwargs):
    if len(done) == limit:
      raise OSError("the machine is gone")
    done.append((change.__name__, *map(os.fspath, args)))
    return change(*args, **kwargs)

  with pytest.MonkeyPatch.context() as patch:
    for change in (os.replace, os.rename, os.remove):
      patch.setattr(os, change.__name__, functools.partial(limited, change))
    yield done


@pytest.fixture(scope="module")
def changes(tmp_path_factory):
  """Moves and removals of an undisturbed job that overwrites."""
  cache_dir = tmp_path_factory.mktemp("changes")
  cache(cache_dir, tasks=INNER)
  with changes_up_to() as done:
    cache(cache_dir, "--overwrite", "--seed=1", tasks=INNER)
  assert len(done) > 8
  return done


def stop_after(number, cache_dir, *flags):
  with changes_up_to(number), pytest.raises(Exception, match="the machine is gone"):
    cache(cache_dir, *flags, tasks=INNER)


class TestInterrupted:
  def test_job_that_was_killed_goes_on_where_it_stood(self, built, tmp_path, monkeypatch):
    """Killed without warning while it preprocesses; what was finished is not done again."""
    cache_dir, building = tmp_path / "cache", tmp_path / "cache" / "small" / ".building"
    environment = os.environ | {"SMALL_TASKS_SLEEP_SECONDS": "0.05", "TF_CPP_MIN_LOG_LEVEL": "3"}
    command = [str(PROGRAM), *flags_of(cache_dir)[1:]]
    # The module stands in the current directory, and nowhere else on the path of an installed program.
    killed = subprocess.Popen(command, cwd=TESTS, env=environment, stderr=subprocess.DEVNULL)
    try:
      deadline = time.monotonic() + 100
      while not finished_spills(building) and killed.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    finally:
      killed.kill()
    assert killed.wait() == -signal.SIGKILL
    finished = finished_spills(building)
    sizes = {(split, k): n for split in SPLITS for k, n in enumerate(small_tasks.SOURCE_SIZES[split])}
    unfinished = {shard for shard in sizes if shard not in finished and sizes[shard]}
    assert finished
    assert unfinished
    with pytest.raises(AnystepError, match="cache_missing"):
      open_cache(cache_dir, "small", "train")

    log = tmp_path / "log"
    monkeypatch.setenv("SMALL_TASKS_LOG", str(log))
    assert cache(cache_dir) == 0
    assert sorted(log.read_text().split()) == sorted(
      f"{split}-{k}-{place}" for split, k in unfinished for place in range(sizes[split, k])
    )
    assert digests_of(cache_dir) == digests_of(built())

  def test_job_is_never_seen_with_half_a_description(self, changes):
    """What says that a shard is finished comes by a move, so there is no moment at which it is half there."""
    targets = [pathlib.Path(change[2]) for change in changes if change[0] != "remove"]
    moved = {f"{path.parent.name.partition('-')[0]}/{path.name}" for path in targets}
    assert moved >= {
      "train/spill-00000.json",
      "train/spill-00001.json",
      "train/final-00000.json",
      "validation/spill-00000.json",
      "validation/final-00000.json",
    }

  @pytest.mark.parametrize("share", [0.0, 0.6, 0.8, 0.99])
  def test_job_that_stopped_between_two_changes_of_files_goes_on(self, built, tmp_path, changes, share):
    """The first changes make spills, the next shards, the last ones finish the cache."""
    shutil.copytree(built(tasks=INNER), tmp_path, dirs_exist_ok=True)
    stop_after(int(share * len(changes)), tmp_path, "--overwrite", "--seed=1")
    if finished_digests_of(tmp_path) != digests_of(built(tasks=INNER)):
      with pytest.raises(AnystepError, match="cache_missing"):
        open_cache(tmp_path, INNER, "train")
    assert cache(tmp_path, "--overwrite", "--seed=1", tasks=INNER) == 0
    assert digests_of(tmp_path) == digests_of(built("--seed=1", tasks=INNER))

  @pytest.mark.parametrize(
    ("flags", "share"), [((), 0.9), pytest.param(("--base_seed=1",), 0.5, marks=pytest.mark.soak)]
  )
  def test_job_takes_nothing_of_another_seed(self, built, tmp_path, changes, flags, share):
    """Not even where the other job stopped while it moved its files, whose names are the same."""
    stop_after(int(share * len(changes)) - 1, tmp_path, *flags)
    stop_after(int(share * len(changes)) - 1, tmp_path, "--base_seed=2")
    cache(tmp_path, *flags, tasks=INNER)
    assert digests_of(tmp_path) == digests_of(built(*flags, tasks=INNER))


def finished_spills(building):
  """(split, source shard) of those that have examples and a description, which is written last."""
  return {
    (path.parent.name.rpartition("-")[0], int(path.name[len("spill-") : -len(".json")]))
    for path in building.glob("*/spill-*.json")
    if json.loads(path.read_bytes())["examples"]
  }


class TestCacheAtEnd:
  LENGTHS = {"targets": 16}  # noqa: RUF012
  FLAGS = ("--cache_at=end", '--task_feature_lengths={"targets": 16}')

  @pytest.mark.parametrize("split", SPLITS)
  def test_caches_what_every_preprocessor_makes(self, built, split):
    opened = open_cache(built(*self.FLAGS, tasks="small_joined"), "small_joined", split)
    shards = expected_examples("small_joined", split, end_lengths=tuple(self.LENGTHS.items()))
    sizes = [len(shard) for shard in shards]
    assert len(opened) == sum(sizes)
    for source_shard, examples in enumerate(shards):
      for source_place, example in enumerate(examples):
        index = oracle.index_of(source_shard, source_place, "small_joined", split, 0, sizes)
        assert_same_example(opened[index], example)
    manifest = manifest_of(built(*self.FLAGS, tasks="small_joined"), split, "small_joined")
    assert (manifest["cache_at"], manifest["task_feature_lengths"]) == ("end", self.LENGTHS)

  def test_leaves_the_reader_nothing_to_run(self, built):
    opened = open_cache(built(*self.FLAGS, tasks="small_joined"), "small_joined", "train")
    reader = TaskReader(seqio.TaskRegistry.get("small_joined"), opened, self.LENGTHS)
    indices = np.arange(10)
    batch = opened.read(indices)
    read = reader(batch, Records(np.ones(10, np.int64), indices, "small_joined", "train", 0))
    assert read.keys() == batch.keys()
    for name, feature in batch.items():
      np.testing.assert_array_equal(read[name].values, feature.values)
      np.testing.assert_array_equal(read[name].lengths, feature.lengths)

  def test_is_what_a_task_needs_that_joins_examples_after_the_placeholder(self, built):
    opened = open_cache(built(tasks="small_joined"), "small_joined", "train")
    with pytest.raises(AnystepError, match="--cache_at=end") as caught:
      TaskReader(seqio.TaskRegistry.get("small_joined"), opened, self.LENGTHS)
    assert caught.value.kind == "preprocessor_not_one_to_one"
    assert caught.value.fields["preprocessor"] == "join_and_cut"

  def test_is_refused_without_lengths_before_a_worker_starts(self, tmp_path):
    with pytest.raises(AnystepError) as caught:
      cache(tmp_path, "--cache_at=end", tasks="small_joined")
    assert (caught.value.code, caught.value.kind) == (64, "task_feature_lengths")
    assert caught.value.fields["preprocessor"] == "join_and_cut"


class TestErrors:
  @pytest.mark.parametrize(
    ("flags", "code", "kind"),
    [
      (["--output_cache_dir=c"], 64, "flags"),
      (["--tasks=small"], 64, "flags"),
      (["--tasks=small", "--output_cache_dir=c", "--no_such_flag"], 64, "flags"),
      (["--tasks=small", "--output_cache_dir=c", "small"], 64, "flags"),
      (["--tasks=small", "--output_cache_dir=c", "--num_shards=0"], 64, "flags"),
      (["--tasks=small", "--output_cache_dir=c", "--block_records=0"], 64, "flags"),
      (["--tasks=small", "--output_cache_dir=c", "--seed=one"], 64, "flags"),
      (["--tasks=small", "--output_cache_dir=c", "--cache_at=start"], 64, "flags"),
      (["--tasks=small", "--output_cache_dir=c", "--task_feature_lengths=16"], 64, "task_feature_lengths"),
      (["--tasks=small", "--output_cache_dir=c", "--task_feature_lengths={"], 64, "task_feature_lengths"),
      (["--tasks=smal", "--output_cache_dir=c"], 64, "task_unknown"),
      (["--tasks=small,smal", "--output_cache_dir=c"], 64, "task_unknown"),
      (["--tasks=small", "--output_cache_dir=c", "--module_import=no_such_module"], 78, "module_import"),
      (["--tasks=*", "--output_cache_dir=c"], 64, "task_unknown"),
      (["--tasks=small", "--excluded_tasks=small", "--output_cache_dir=c"], 64, "task_unknown"),
    ],
  )
  def test_say_what_is_wrong_before_anything_is_written(self, tmp_path, monkeypatch, flags, code, kind):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(AnystepError) as caught:
      main(["anystep-cache", *flags])
    assert (caught.value.code, caught.value.kind) == (code, kind)
    assert caught.value.fix
    assert list(tmp_path.iterdir()) == []

  def test_name_the_tasks_nearest_to_an_unknown_one(self, tmp_path):
    with pytest.raises(AnystepError) as caught:
      cache(tmp_path, tasks="smal_joined")
    assert caught.value.fields["got"] == "smal_joined"
    assert caught.value.fields["nearest"].split(", ")[0] == "small_joined"

  def test_say_of_which_source_shard_a_preprocessor_raised_what(self, tmp_path, monkeypatch):
    monkeypatch.setenv("SMALL_TASKS_RAISE_AT", "train-2-4")
    with pytest.raises(AnystepError) as caught:
      cache(tmp_path)
    assert (caught.value.code, caught.value.kind) == (65, "preprocessor_failed")
    fields = caught.value.fields
    assert (fields["task"], fields["split"]) == ("small", "train")
    assert (fields["source_shard"], fields["preprocessor"]) == ("train part 2", "observe")
    assert fields["got"] == "InvalidArgumentError: ValueError: train-2-4 is indigestible"
    assert not (tmp_path / "small" / "COMPLETED").exists()

  def test_call_a_file_that_cannot_be_written_what_it_is(self, tmp_path):
    # The first eight are of the program itself, the next is a worker's.
    with changes_up_to(8), pytest.raises(AnystepError) as caught:
      cache(tmp_path, tasks=INNER)
    assert (caught.value.code, caught.value.kind) == (74, "io_failed")

  def test_refuse_a_feature_of_a_form_that_records_cannot_hold(self, tmp_path):
    with pytest.raises(AnystepError) as caught:
      cache(tmp_path, tasks="small_square")
    assert (caught.value.code, caught.value.kind) == (65, "feature_form_varies")
    fields = caught.value.fields
    assert (fields["task"], fields["feature"], fields["preprocessor"]) == ("small_square", "square", "square")
    assert (fields["source_shard"], fields["place"]) == ("train part 0", "1")

  def test_refuse_a_source_without_shards(self, tmp_path):
    with (
      registered(small_tasks.task("small_void", sizes={"train": ()})),
      pytest.raises(AnystepError) as caught,
    ):
      cache(tmp_path, tasks="small_void")
    assert (caught.value.code, caught.value.kind) == (66, "source_empty")
    assert caught.value.fields == {"task": "small_void", "split": "train"}

  def test_end_the_program_with_one_line_and_their_code(self, tmp_path):
    finished = subprocess.run(
      [PROGRAM, "--tasks=small", "--no_such_flag"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert finished.returncode == 64
    assert finished.stdout == ""
    assert finished.stderr.count("\n") == 1
    assert finished.stderr.startswith("ERROR code=64 kind=flags ")


def test_the_program_ends_with_status_0_where_all_is_cached(built, monkeypatch):
  monkeypatch.setattr(sys, "argv", flags_of(built()))
  with pytest.raises(SystemExit) as caught:
    run()
  assert caught.value.code == 0


def test_tasks_are_selected_by_whole_names_and_left_out_by_whole_names():
  assert select_tasks(["small_.*"], ["small_s.*"]) == ["small_joined"]
  assert select_tasks(["small", "small"], ["small_joined", "mall"]) == ["small"]
  assert select_tasks([".*_joined", "small"], []) == ["small", "small_joined"]


def test_an_unforeseen_failure_of_a_runner_is_raised_as_it_is(tmp_path, monkeypatch):
  """It is not made its own cause, which would make a circle for whoever follows causes."""

  def start_pipeline(*_, name):
    try:
      raise KeyError("what it was doing")
    except KeyError:
      raise RuntimeError("a runner's own") from None

  monkeypatch.setattr(job, "start_pipeline", start_pipeline)
  with pytest.raises(RuntimeError, match="a runner's own") as caught:
    job.cache_tasks(["small:inner"], job.CacheOptions(cache_dir=str(tmp_path)))
  assert caught.value.__cause__ is None
