"""Caches whose records are TFRecord files: the same examples, for stock SeqIO as well."""

import collections
import contextlib
import os

import numpy as np
import pytest
import seqio
import small_tasks
from job_runs import digests_of, registered, run_job

from anystep.cache import open_cache
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
