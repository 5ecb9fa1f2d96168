"""Caches that SeqIO wrote, reshuffled: their examples, and nothing of the task that made them runs again."""

import collections
import json
import shutil

import numpy as np
import pytest
import seqio
import small_tasks
import tensorflow as tf
from job_runs import digests_of, registered, run_job, stamps_of
from seqio_caches import write_seqio_cache

import oracle
from anystep.cache_job.options import CacheOptions
from anystep.cache_job.planning.task_work import plan_task
from anystep.cache_job.preprocessing.example_batches import ExampleBatches
from anystep.cache_job.preprocessing.seqio_caches import check_count, list_cached_shards
from anystep.cache_job.state.split_job import list_source_ranges
from anystep.caches.cache import open_cache
from anystep.errors import AnystepError
from anystep.features.ragged import Ragged
from anystep.tasks.reading.task_reader import TaskReader
from anystep.transforms.transform import Records

NAME, SPLIT = "small_seqio:cached", "train"
FLAGS = (f"--splits={SPLIT}", "--num_shards=2", "--block_records=2")
SHARDS = [f"{SPLIT}.tfrecord-{k:05d}-of-00003" for k in range(3)]


@seqio.map_over_dataset
def of_many_kinds(example):
  """A feature of each kind that SeqIO can cache, some of them empty."""
  number = tf.cast(example["number"], tf.int32)
  pieces = tf.RaggedTensor.from_row_lengths(tf.range(3 * number), tf.stack([number, 2 * number]))
  return {
    **example,
    "pieces": pieces,
    "score": tf.cast(number, tf.float32) / 3,
    "flags": tf.range(number) % 2 == 0,
    "words": tf.strings.split(example["name"], "-"),
    "matrix": tf.reshape(tf.range(6 * number), [-1, 2, 3]),
  }


TASK = small_tasks.task(
  NAME,
  before=(small_tasks.split_and_drop, small_tasks.BEFORE_CACHE[2], of_many_kinds),
  after=(seqio.preprocessors.append_eos,),
  sizes={SPLIT: (9, 0, 6), "empty": (1,)},
)


class GoneSource(small_tasks.NumberedTexts):
  """A source that knows its splits and nothing else."""

  def list_shards(self, split):
    raise FileNotFoundError("the source is gone")

  def get_dataset(self, *args, **kwargs):
    raise FileNotFoundError("the source is gone")

  def num_input_examples(self, split):
    raise FileNotFoundError("the source is gone")


def preprocess_again(dataset):
  """What must not run."""
  raise AssertionError("a preprocessor of the cache ran again")


GONE = seqio.Task(
  NAME,
  source=GoneSource({SPLIT: (), "empty": ()}),
  preprocessors=[preprocess_again, seqio.CacheDatasetPlaceholder(), seqio.preprocessors.append_eos],
  output_features=TASK.output_features,
)


@pytest.fixture(scope="module")
def seqio_root(tmp_path_factory):
  """What `seqio_cache_tasks` writes of the task."""
  root = tmp_path_factory.mktemp("by_seqio")
  with registered(TASK):
    write_seqio_cache(root, [NAME])
  return root


@pytest.fixture(autouse=True)
def source_is_gone():
  with registered(GONE):
    yield


@pytest.fixture(scope="module")
def reshuffled(seqio_root, tmp_path_factory):
  root = tmp_path_factory.mktemp("reshuffled")
  with registered(GONE):
    run_job(root, *FLAGS, f"--from_seqio_cache={seqio_root}", tasks=NAME)
  return root


@pytest.fixture
def damaged(seqio_root, tmp_path):
  """A copy of SeqIO's cache, to be damaged."""
  shutil.copytree(seqio_root, tmp_path / "by_seqio")
  return tmp_path / "by_seqio"


def directory_of(root):
  return root.joinpath(*NAME.split(":"))


def of_seqio(seqio_root, file):
  """A file's examples, in order, as stock SeqIO reads them."""
  source = seqio.dataset_providers._CachedDataSource(str(directory_of(seqio_root)), SPLIT)
  shard_info = seqio.ShardInfo(file, len(SHARDS))
  return list(source.get_dataset(split=SPLIT, shuffle=False, shard_info=shard_info))


def plain(value):
  """A feature as dtype, row lengths where they vary, and values."""
  if isinstance(value, (Ragged, tf.RaggedTensor)):
    lengths = value.lengths if isinstance(value, Ragged) else value.row_lengths().numpy()
    return (plain(value.values), lengths.tolist())
  value = value.numpy() if isinstance(value, tf.Tensor) else value
  array = np.asarray(value)
  name = "string" if array.dtype.kind in "OS" else array.dtype.name
  return (name, array.shape, np.asarray(value, object).tolist())


def plain_example(example):
  return {name: plain(value) for name, value in example.items()}


def test_every_example_of_every_file_is_in_the_place_that_the_order_gives_it(seqio_root, reshuffled):
  cache = open_cache(reshuffled, NAME, SPLIT)
  files = [of_seqio(seqio_root, file) for file in range(len(SHARDS))]
  sizes = [len(examples) for examples in files]
  assert sum(sizes) == sum(number % 3 for size in (9, 6) for number in range(size)) == len(cache)
  assert [(s.name, s.examples) for s in cache.manifest.source_shards] == list(zip(SHARDS, sizes, strict=True))
  kinds = collections.Counter()
  for file, examples in enumerate(files):
    for place, example in enumerate(examples):
      found = cache[oracle.index_of(file, place, NAME, SPLIT, 0, sizes)]
      assert plain_example(found) == plain_example(example)
      kinds.update({feature.dtype.name for feature in example.values()})
  assert set(kinds) == {"string", "int64", "int32", "float32", "bool"}
  assert cache.manifest.features["pieces"].shape == (None, None)
  cache.verify()


def test_preprocessors_after_the_placeholder_run_at_reading(reshuffled):
  cache = open_cache(reshuffled, NAME, SPLIT)
  indices = np.arange(len(cache))
  batch = cache.read(indices)
  reader = TaskReader(GONE, cache, {"targets": 100})
  read = reader(batch, Records(np.ones(len(indices), np.int64), indices, NAME, SPLIT, 0))
  assert [row.tolist() for row in read["targets"].rows()] == [
    [*row.tolist(), small_tasks.VOCABULARY.eos_id] for row in batch["targets"].rows()
  ]


def test_the_manifest_says_where_the_examples_came_from(seqio_root, reshuffled):
  provenance = open_cache(reshuffled, NAME, SPLIT).manifest.fingerprint.provenance
  assert provenance["source"] == "a cache by seqio_cache_tasks"
  listed = json.dumps(provenance["source_arguments"])
  assert all(name in listed for name in SHARDS)
  assert str(seqio_root) not in listed


def test_the_same_cache_again_is_left_alone_and_seqio_s_own_is_never_touched(seqio_root, reshuffled):
  before, theirs = stamps_of(reshuffled), digests_of(seqio_root)
  run_job(reshuffled, *FLAGS, f"--from_seqio_cache={seqio_root}", tasks=NAME)
  assert stamps_of(reshuffled) == before
  for flags in ((), ("--overwrite",)):
    with pytest.raises(AnystepError) as caught:
      run_job(seqio_root, *FLAGS, *flags, f"--from_seqio_cache={seqio_root}/", tasks=NAME)
    assert (caught.value.code, caught.value.kind) == (64, "flags_exclusive")
  assert digests_of(seqio_root) == theirs


def without_a_file(directory):
  (directory / SHARDS[1]).unlink()


def with_another_s_file(directory):
  shutil.copy(directory / SHARDS[1], directory / f"{SPLIT}.tfrecord-00001-of-00013")


def not_completed(directory):
  (directory / "COMPLETED").unlink()


def without_info(directory):
  (directory / f"info.{SPLIT}.json").unlink()


def with_half_of_info(directory):
  (directory / f"info.{SPLIT}.json").write_text('{"num_shards": ')


def with_info_of_something_else(directory):
  (directory / f"info.{SPLIT}.json").write_text('{"shards": 3}')


def without_examples(directory):
  """As SeqIO leaves a split of which its preprocessors dropped everything."""
  shutil.copy(directory / "info.empty.json", directory / f"info.{SPLIT}.json")


@pytest.mark.parametrize(
  ("damage", "code", "kind", "got"),
  [
    (without_a_file, 65, "seqio_cache_incomplete", f"2, and {SHARDS[1]} is missing"),
    (with_another_s_file, 65, "seqio_cache_incomplete", "4, and train.tfrecord-00001-of-00013 is no file"),
    (not_completed, 66, "seqio_cache_missing", None),
    (without_info, 65, "seqio_cache_incomplete", "no such file"),
    (with_half_of_info, 65, "seqio_cache_incomplete", "Expecting value"),
    (with_info_of_something_else, 65, "seqio_cache_incomplete", "shards alone"),
    (without_examples, 66, "split_empty", "none"),
  ],
)
def test_a_damaged_cache_is_refused_before_anything_is_written(damaged, tmp_path, damage, code, kind, got):
  damage(directory_of(damaged))
  root = tmp_path / "cache"
  with pytest.raises(AnystepError) as caught:
    run_job(root, *FLAGS, f"--from_seqio_cache={damaged}", tasks=NAME)
  assert (caught.value.code, caught.value.kind) == (code, kind)
  assert (got or "") in caught.value.fields.get("got", "")
  assert str(directory_of(damaged)) in str(caught.value.fields["path"])
  assert caught.value.fix
  assert not root.exists()


@pytest.mark.parametrize("cut_bytes", [1, 100])
def test_a_file_that_was_cut_short_is_named(damaged, tmp_path, cut_bytes):
  cut = max((directory_of(damaged) / name for name in SHARDS), key=lambda path: path.stat().st_size)
  cut.write_bytes(cut.read_bytes()[:-cut_bytes])
  options = CacheOptions(cache_dir=str(tmp_path / "c"), seqio_cache_dir=str(damaged), splits=(SPLIT,))
  (job,) = plan_task(GONE, options).jobs
  (source,) = [s for s in list_source_ranges(job) if s.name == cut.name]
  with pytest.raises(AnystepError) as caught:
    list(ExampleBatches(GONE, job, source))
  assert (caught.value.code, caught.value.kind) == (66, "source_unreadable")
  assert caught.value.fields["source_shard"] == cut.name
  assert "DataLossError" in caught.value.fields["got"]


def test_a_cache_with_fewer_examples_than_seqio_noted_is_refused(damaged, tmp_path):
  """As where a file was cut between two records, which only their number tells."""
  stats = directory_of(damaged) / f"stats.{SPLIT}.json"
  noted = json.loads(stats.read_text())["examples"]
  stats.write_text(json.dumps({"examples": noted + 1}))
  root = tmp_path / "cache"
  with pytest.raises(AnystepError) as caught:
    run_job(root, *FLAGS, f"--from_seqio_cache={damaged}", tasks=NAME)
  assert (caught.value.code, caught.value.kind) == (65, "seqio_cache_incomplete")
  assert caught.value.fields["expected"] == f"{noted + 1} examples of {SPLIT}"
  assert caught.value.fields["got"] == f"{noted} examples"
  assert not list(root.rglob("COMPLETED"))


@pytest.mark.parametrize("content", ["{}", '{"examples": "many"}', "[]"])
def test_stats_without_a_number_of_examples_are_refused(damaged, content):
  directory = directory_of(damaged)
  (directory / f"stats.{SPLIT}.json").write_text(content)
  assert list_cached_shards(directory, SPLIT) == SHARDS
  with pytest.raises(AnystepError, match="seqio_cache_incomplete"):
    check_count(directory, SPLIT, 0)
