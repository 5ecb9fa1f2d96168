"""Source shards cut into ranges: each range is preprocessed as if it were a source shard."""

import functools
import json
import os

import numpy as np
import pytest
import seqio
import small_tasks
import tensorflow as tf
from job_runs import digests_of, registered, run_job, stamps_of

import oracle
from anystep.caches.cache import open_cache
from anystep.errors import AnystepError


@seqio.map_over_dataset(num_seeds=1)
def draw(example, seed):
  """Tokens that the seed decides, a few."""
  return {**example, "targets": tf.random.stateless_uniform([example["number"]], seed, 3, 99, tf.int32)}


SIZES = (10, 0, 3)
TASK = small_tasks.task(
  "small_ranges",
  before=(small_tasks.observe, small_tasks.split_and_drop, draw),
  after=(),
  sizes={"train": SIZES},
)
FLAGS = ("--num_shards=3", "--block_records=2")
# Names, source shards, starts and stops of ranges of four, and of ranges that hold every shard.
OF_FOUR = [
  ("train part 0[0:4]", 0, 0, 4),
  ("train part 0[4:8]", 0, 4, 8),
  ("train part 0[8:10]", 0, 8, 10),
  ("train part 1[0:0]", 1, 0, 0),
  ("train part 2[0:3]", 2, 0, 3),
]
OF_TEN = [(f"train part {k}[0:{size}]", k, 0, size) for k, size in enumerate(SIZES)]
IN_PARALLEL = (
  "--pipeline_options=--runner=DirectRunner,--direct_num_workers=3,--direct_running_mode=multi_threading"
)


@pytest.fixture(autouse=True, scope="module")
def tasks():
  with registered(TASK):
    yield


@pytest.fixture(scope="module")
def built(tmp_path_factory):
  """`built(n)`: the root of a cache of ranges of n, that no test changes."""

  @functools.cache
  def build(range_examples):
    root = tmp_path_factory.mktemp("ranges")
    run_job(root, f"--range_examples={range_examples}", *FLAGS, tasks=TASK.name)
    return root

  return build


def expected_of(ranges):
  """What SeqIO makes of each range alone, with the seed that the order specification gives its number."""
  expected = []
  for number, (_, shard, start, stop) in enumerate(ranges):
    dataset = TASK.source.get_dataset(split="train", shard_info=seqio.ShardInfo(shard, len(SIZES)))
    numbered = dataset.enumerate().filter(lambda place, _, a=start, b=stop: (place >= a) & (place < b))
    seed = oracle.preprocess_seed(TASK.name, "train", 0, number)
    examples = TASK.preprocess_precache(numbered.map(lambda _, example: example), seed=seed)
    expected.append(list(examples.as_numpy_iterator()))
  return expected


def plain(example):
  """An example as values that can be compared."""
  return {name: np.asarray(value, object).tolist() for name, value in example.items()}


@pytest.mark.parametrize(("range_examples", "ranges"), [(4, OF_FOUR), (10, OF_TEN)])
def test_every_range_is_preprocessed_as_if_it_were_a_source_shard(built, range_examples, ranges):
  """So ranges that hold a whole shard each give what whole shards do, under other names."""
  cache, expected = open_cache(built(range_examples), TASK.name, "train"), expected_of(ranges)
  sizes = [len(examples) for examples in expected]
  manifest = json.loads((built(range_examples) / TASK.name / "manifest.train.json").read_text())
  assert manifest["range_examples"] == range_examples
  assert [(source["name"], source["examples"]) for source in manifest["source_shards"]] == [
    (name, size) for (name, *_), size in zip(ranges, sizes, strict=True)
  ]
  assert len(cache) == sum(sizes) == sum(number % 3 for size in SIZES for number in range(size))
  for number, examples in enumerate(expected):
    for place, example in enumerate(examples):
      index = oracle.index_of(number, place, TASK.name, "train", 0, sizes)
      assert plain(cache[index]) == plain(example)
      assert [int(found[0]) for found in cache.source_of(np.array([index]))] == [number, place]
      assert oracle.trace(index, TASK.name, "train", 0, sizes) == (number, place)
  cache.verify()


def test_how_shards_are_cut_decides_what_is_drawn():
  """Or no test here would see whether seeds are by ranges or by source shards."""
  drawn = [
    [example["targets"].tolist() for examples in expected_of(ranges) for example in examples]
    for ranges in (OF_FOUR, OF_TEN)
  ]
  assert len(drawn[0]) == len(drawn[1])
  assert drawn[0] != drawn[1]


def finished_ranges(root):
  return {int(path.stem.removeprefix("spill-")) for path in root.rglob("spill-*.json")}


def test_a_job_that_failed_names_the_range_and_goes_on_with_more_workers_to_the_same_bytes(
  built, tmp_path, monkeypatch
):
  root, log = tmp_path / "cache", tmp_path / "log"
  monkeypatch.setenv("SMALL_TASKS_RAISE_AT", "train-0-8")
  with pytest.raises(AnystepError, match="0-8 is indigestible") as caught:
    run_job(root, "--range_examples=4", *FLAGS, tasks=TASK.name)
  assert caught.value.fields["source_shard"] == "train part 0[8:10]"
  assert caught.value.fields["place"] == "0"
  finished = finished_ranges(root)
  monkeypatch.delenv("SMALL_TASKS_RAISE_AT")
  monkeypatch.setenv("SMALL_TASKS_LOG", str(log))
  run_job(root, "--range_examples=4", *FLAGS, IN_PARALLEL, tasks=TASK.name)
  assert digests_of(root) == digests_of(built(4))
  assert sorted(log.read_text().split()) == sorted(
    f"train-{shard}-{place}"
    for number, (_, shard, start, stop) in enumerate(OF_FOUR)
    for place in range(start, stop)
    if number not in finished
  )


@pytest.mark.long
@pytest.mark.parametrize(
  "name", ["count-00001.json", "spill-00002.json", "final_plan.json", "final-00000.json"]
)
def test_a_job_whose_machine_went_goes_on_to_the_same_bytes(built, tmp_path, monkeypatch, name):
  """While it counts, preprocesses, plans and writes."""
  replace = os.replace

  def gone(source, target):
    if os.path.basename(target) == name:
      raise OSError("the machine is gone")
    replace(source, target)

  monkeypatch.setattr(os, "replace", gone)
  with pytest.raises(AnystepError, match="the machine is gone"):
    run_job(tmp_path, "--range_examples=4", *FLAGS, tasks=TASK.name)
  monkeypatch.undo()
  run_job(tmp_path, "--range_examples=4", *FLAGS, tasks=TASK.name)
  assert digests_of(tmp_path) == digests_of(built(4))


@pytest.mark.parametrize(("flags", "asked"), [(["--range_examples=5"], 5), ([], None)])
def test_a_complete_cache_of_other_ranges_is_refused(built, flags, asked):
  root = built(4)
  before = stamps_of(root)
  with pytest.raises(AnystepError) as caught:
    run_job(root, *flags, *FLAGS, tasks=TASK.name)
  assert (caught.value.code, caught.value.kind) == (76, "cache_options")
  assert caught.value.fields["option"] == "range_examples"
  assert (caught.value.fields["expected"], caught.value.fields["got"]) == (asked, 4)
  run_job(root, "--range_examples=4", *FLAGS, tasks=TASK.name)
  assert stamps_of(root) == before
