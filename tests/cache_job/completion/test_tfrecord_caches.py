"""Caches whose records are TFRecord files: the same examples, for stock SeqIO as well."""

import collections
import contextlib
import functools
import os

import numpy as np
import pytest
import seqio
import small_tasks
import tensorflow as tf
from job_runs import digests_of, registered, run_job

from anystep.caches.cache import open_cache
from anystep.errors import AnystepError

TASK = small_tasks.task("small_tf", after=(), sizes={"train": (7, 0, 9), "validation": (4,)})
OTHER = small_tasks.task("small_tf_other", after=(), sizes={"train": (3, 4)})
MIXTURE = seqio.Mixture("small_tf_mixture", [(TASK, 1), (OTHER, 2)])
FLAGS = ("--output_format=tfrecord", "--num_shards=3", "--block_records=2")
IN_PARALLEL = (
  "--pipeline_options=--runner=DirectRunner,--direct_num_workers=2,--direct_running_mode=multi_threading"
)


@pytest.fixture(autouse=True, scope="module")
def tasks():
  with registered(TASK, OTHER, MIXTURE):
    yield


@pytest.fixture(scope="module")
def built(tmp_path_factory):
  root = tmp_path_factory.mktemp("tfrecord")
  run_job(root, *FLAGS, tasks=MIXTURE.name)
  return root


@pytest.fixture(scope="module")
def array_records(tmp_path_factory):
  root = tmp_path_factory.mktemp("array_record")
  run_job(root, *FLAGS[1:], "--output_format=arrayrecord", tasks=TASK.name)
  return root


@pytest.fixture
def seqio_cache_dir(built, monkeypatch):
  """SeqIO looks for caches where the job wrote them."""
  before = list(seqio.utils.get_global_cache_dirs())
  seqio.set_global_cache_dirs([str(built)])
  yield
  seqio.set_global_cache_dirs(before)
  for task in (TASK, OTHER):
    task._cache_dir = None


def frozen(example):
  """An example as a value that can be counted."""
  return tuple(
    (name, np.asarray(value).dtype.str, np.shape(value), np.asarray(value).tobytes())
    if not isinstance(value, bytes) and np.asarray(value).dtype != object
    else (name, bytes(np.asarray(value, object).item()))
    for name, value in sorted(example.items())
  )


@pytest.mark.parametrize("split", list(TASK.splits))
def test_the_examples_are_those_of_the_other_container(built, array_records, split):
  ours, theirs = (open_cache(root, TASK.name, split) for root in (built, array_records))
  assert (ours.manifest.container, theirs.manifest.container) == ("tfrecord", "array_record")
  assert len(ours) == len(theirs) == sum(small % 3 for small in numbers(split))
  assert [frozen(ours[k]) for k in range(len(ours))] == [frozen(theirs[k]) for k in range(len(theirs))]
  ours.verify()
  for shard in range(3):
    np.testing.assert_array_equal(ours.lengths(shard), theirs.lengths(shard))


def numbers(split):
  return [number for size in TASK.source._sizes[split] for number in range(size)]


def test_each_shard_has_its_offsets_and_nothing_of_the_other_container(built):
  present = {path.name for path in (built / TASK.name).iterdir()}
  shards = [f"{split}.tfrecord-{k:05d}-of-00003" for split in TASK.splits for k in range(3)]
  assert present >= {*shards, *(f"{shard}-offsets.npy" for shard in shards)}
  assert not any("array_record" in name for name in present)


@pytest.mark.parametrize("split", list(TASK.splits))
def test_stock_seqio_reads_the_same_examples(built, seqio_cache_dir, split):
  cache = open_cache(built, TASK.name, split)
  expected = collections.Counter(frozen(cache[k]) for k in range(len(cache)))
  dataset = TASK.get_dataset(split=split, use_cached=True, shuffle=False)
  assert collections.Counter(map(frozen, dataset.as_numpy_iterator())) == expected
  assert TASK.get_cached_stats(split)["examples"] == len(cache)


def test_stock_seqio_reads_a_mixture_through_a_feature_converter(built, seqio_cache_dir):
  length = 16
  caches = [open_cache(built, name, "train") for name in (TASK.name, OTHER.name)]
  expected = {
    tuple(np.pad(example["targets"][:length], (0, max(0, length - len(example["targets"])))).tolist())
    for cache in caches
    for example in (cache[k] for k in range(len(cache)))
  }
  dataset = seqio.get_dataset(
    MIXTURE.name,
    {"targets": length},
    dataset_split="train",
    shuffle=False,
    num_epochs=None,
    seed=0,
    use_cached=True,
    feature_converter=seqio.LMFeatureConverter(pack=False),
  )
  rows = dataset.take(300).as_numpy_iterator()
  assert {tuple(row["decoder_target_tokens"].tolist()) for row in rows} == expected


def test_bytes_do_not_depend_on_the_number_of_workers(built, tmp_path):
  run_job(tmp_path, *FLAGS, IN_PARALLEL, tasks=OTHER.name)
  assert digests_of(tmp_path) == others_digests_of(built)


def others_digests_of(root):
  return {name: digest for name, digest in digests_of(root).items() if name.startswith(f"{OTHER.name}/")}


@pytest.fixture(scope="module")
def moves(tmp_path_factory):
  """How many files an undisturbed job moves to their names."""
  with moves_up_to() as done:
    run_job(tmp_path_factory.mktemp("moves"), *FLAGS, tasks=OTHER.name)
  assert any(name.endswith("-offsets.npy") for name in done)
  return done


@contextlib.contextmanager
def moves_up_to(limit=None):
  """Lists the moves of files, after so many of which the machine is gone."""
  done, replace = [], os.replace

  def limited(source, target, **kwargs):
    if len(done) == limit:
      raise OSError("the machine is gone")
    done.append(os.fspath(target))
    return replace(source, target, **kwargs)

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(os, "replace", limited)
    patch.setattr(os, "rename", limited)
    yield done


@pytest.mark.parametrize("share", [0.4, 0.7, 0.95])
def test_a_job_that_stopped_between_two_moves_goes_on_to_the_same_bytes(built, tmp_path, moves, share):
  with moves_up_to(int(share * len(moves))), pytest.raises(Exception, match="the machine is gone"):
    run_job(tmp_path, *FLAGS, tasks=OTHER.name)
  with pytest.raises(AnystepError, match="cache_missing"):
    open_cache(tmp_path, OTHER.name, "train")
  run_job(tmp_path, *FLAGS, tasks=OTHER.name)
  assert digests_of(tmp_path) == others_digests_of(built)


def test_one_container_takes_the_other_s_place_only_where_that_is_asked_for(built, tmp_path):
  run_job(tmp_path, *FLAGS[1:], tasks=OTHER.name)
  with pytest.raises(AnystepError) as caught:
    run_job(tmp_path, *FLAGS, tasks=OTHER.name)
  assert (caught.value.code, caught.value.kind) == (76, "cache_options")
  assert (caught.value.fields["option"], caught.value.fields["got"]) == ("container", "array_record")
  run_job(tmp_path, *FLAGS, "--overwrite", tasks=OTHER.name)
  assert {name for name in digests_of(tmp_path) if "array_record" in name} == set()
  open_cache(tmp_path, OTHER.name, "train").verify()


class WholeTexts(small_tasks.NumberedTexts):
  """The texts, also of all shards at a time, as SeqIO asks for them where there is no cache."""

  def get_dataset(self, split="train", *args, shard_info=None, **kwargs):
    number = len(self.list_shards(split))
    wanted = [shard_info] if shard_info else [seqio.ShardInfo(k, number) for k in range(number)]
    get = super().get_dataset
    datasets = [get(split, *args, shard_info=shard, **kwargs) for shard in wanted]
    return functools.reduce(tf.data.Dataset.concatenate, datasets)


def beginnings(dataset):
  """Tokenized targets whose text's first ones are inputs; some are longer than rows, some empty."""
  return dataset.map(
    lambda example: {
      "inputs": example["targets"][: tf.cast(2 * example["number"], tf.int32)],
      "targets": example["targets"][tf.cast(example["number"] % 5, tf.int32) * 4 :],
    }
  )


def drawing_nothing(name, *, size):
  """A task without anything random, so that SeqIO makes the same of it with and without a cache."""
  return seqio.Task(
    name,
    source=WholeTexts({"train": (size, 0, 4)}),
    preprocessors=[
      *small_tasks.BEFORE_CACHE[1:3],
      beginnings,
      seqio.CacheDatasetPlaceholder(),
      seqio.preprocessors.append_eos_after_trim,
    ],
    output_features={feature: seqio.Feature(small_tasks.VOCABULARY) for feature in ("inputs", "targets")},
  )


PAIRS = (drawing_nothing("small_pairs", size=9), drawing_nothing("small_pairs:other", size=14))
# SeqIO's own sampling ends with the first task that has nothing left, wherever the others are.
PAIR_MIXTURE = seqio.Mixture(
  "small_pair_mixture",
  [(PAIRS[0], 1), (PAIRS[1], 2)],
  sample_fn=functools.partial(tf.data.Dataset.sample_from_datasets, stop_on_empty_dataset=False),
)


@pytest.fixture(scope="module")
def cached_pairs(tmp_path_factory):
  """Two tasks of which one call cached both, and where SeqIO looks for them."""
  root = tmp_path_factory.mktemp("pairs")
  with registered(*PAIRS, PAIR_MIXTURE), pytest.MonkeyPatch.context() as patch:
    run_job(root, *FLAGS, tasks=PAIR_MIXTURE.name)
    patch.setattr(seqio.utils, "_GLOBAL_CACHE_DIRECTORIES", [str(root)])
    assert all(task.cache_dir for task in PAIRS)
    yield root


@pytest.mark.parametrize(
  ("converter", "lengths"),
  [
    (seqio.EncDecFeatureConverter(pack=False), {"inputs": 12, "targets": 16}),
    (seqio.LMFeatureConverter(pack=False), {"targets": 16}),
  ],
  ids=["encoder and decoder", "decoder"],
)
def test_stock_seqio_makes_the_batches_of_a_mixture_that_it_makes_without_a_cache(
  cached_pairs, converter, lengths
):
  made = [
    seqio.get_dataset(
      PAIR_MIXTURE.name,
      lengths,
      dataset_split="train",
      shuffle=False,
      num_epochs=1,
      seed=0,
      use_cached=use_cached,
      feature_converter=converter,
    )
    for use_cached in (True, False)
  ]
  cached, uncached = (collections.Counter(map(frozen, dataset.as_numpy_iterator())) for dataset in made)
  assert cached == uncached
  assert cached.total() == sum(number % 3 for size in (9, 14, 4, 4) for number in range(size))


def test_stock_seqio_reads_a_cached_task_as_it_makes_it_without_a_cache(cached_pairs):
  cached, uncached = (
    PAIRS[1].get_dataset(
      {"inputs": 12, "targets": 16}, "train", use_cached=use_cached, shuffle=False, num_epochs=1
    )
    for use_cached in (True, False)
  )
  assert cached.element_spec == uncached.element_spec
  found, expected = (collections.Counter(map(frozen, d.as_numpy_iterator())) for d in (cached, uncached))
  assert found == expected
  assert found
