"""Counts, quantiles, histograms and shares are those that counting every example and row gives."""

import itertools

import caches
import numpy as np
import pytest

from anystep.errors import AnystepError
from anystep.inspection import stats as data_stats
from anystep.inspection.length_counts import LengthCounts
from anystep.inspection.stats import CacheStats, mixture_shares, rows_of_tasks
from anystep.plans.plan import PADDING_TASK, Plan

LENGTHS = {
  "none": [],
  "zeros": [0, 0],
  "one": [7],
  "small": [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 0],
  "around the array's end": [65535, 65536, 65537, 65536, 1],
  "large": [2**32 - 1, 2**20, 2**20, 5],
  "many": np.random.default_rng(0).geometric(0.01, 5000).tolist(),
}


@pytest.fixture(params=LENGTHS)
def lengths(request):
  return LENGTHS[request.param]


def counted(lengths, *, parts=3):
  counts = LengthCounts()
  for part in np.array_split(np.array(lengths, np.int64), parts):
    counts.add(part)
  return counts


# Lengths


def test_sums_are_those_of_the_lengths(lengths):
  counts = counted(lengths)
  assert (counts.examples, counts.tokens, counts.largest) == (
    len(lengths),
    sum(lengths),
    max(lengths, default=0),
  )


@pytest.mark.parametrize("percent", [1, 50, 90, 99, 100])
def test_quantiles_are_lengths_that_occur(lengths, percent):
  expected = np.percentile(lengths, percent, method="inverted_cdf") if lengths else 0
  assert counted(lengths).quantile(percent) == expected


@pytest.mark.parametrize("length", [0, 1, 4, 100, 65536, 2**31])
def test_what_a_feature_length_cuts_is_counted(lengths, length):
  beyond = [found - length for found in lengths if found > length]
  assert counted(lengths).cut(length) == (len(beyond), sum(beyond))


def test_a_histogram_covers_every_example_once(lengths):
  bars = counted(lengths).histogram()
  assert [examples for _, _, examples in bars] == [
    sum(low <= length <= high for length in lengths) for low, high, _ in bars
  ]
  assert sum(examples for _, _, examples in bars) == len(lengths)
  assert all(one[1] + 1 == other[0] for one, other in itertools.pairwise(bars))


def test_a_histograms_bars_double_in_width():
  assert counted([0, 1, 2, 3, 4, 7, 8]).histogram() == [
    (0, 0, 1),
    (1, 1, 1),
    (2, 3, 2),
    (4, 7, 2),
    (8, 15, 1),
  ]
  assert counted([5]).histogram() == [(4, 7, 1)]


# Caches


def test_a_caches_numbers_are_those_of_its_examples(shared_cache, monkeypatch):
  monkeypatch.setattr(data_stats, "_RECORDS_AT_A_TIME", 5)
  done = []
  stats = CacheStats.of(shared_cache.open(), done.append)
  assert done[-1] == 50
  assert done == sorted(done)
  files = shared_cache.directory.glob("train.array_record-*")
  assert stats.to_json() | {"features": None} == {
    "task": "demo",
    "split": "train",
    "layout": "preshuffled",
    "examples": 50,
    "source_shards": 4,
    "shards": 4,
    "bytes": sum(path.stat().st_size for path in files),
    "features": None,
  }
  features = stats.to_json()["features"]
  assert list(features) == ["inputs", "targets", "weights"]
  for name, found in features.items():
    lengths = [len(example[name]) for example in shared_cache.examples]
    assert found["tokens"] == sum(lengths)
    assert found["mean"] == sum(lengths) / 50
    assert found["max"] == max(lengths)
    for percent in (50, 90, 99):
      assert found[f"p{percent}"] == np.percentile(lengths, percent, method="inverted_cdf")
    assert sum(b["examples"] for b in found["histogram"]) == 50
  # What is cached may be cut, or lengthened, after the cache.
  assert not any("feature_length" in feature for feature in features.values())


def test_what_a_length_cuts_stands_beside_the_lengths(lengths):
  counts = counted(lengths).to_json(4)
  cut = [length for length in lengths if length > 4]
  assert counts["feature_length"] == 4
  assert counts["cut_examples"] == len(cut)
  assert counts["cut_examples_percent"] == 100 * len(cut) / max(len(lengths), 1)
  assert counts["cut_tokens"] == sum(cut) - 4 * len(cut)
  assert counts["cut_tokens_percent"] == 100 * (sum(cut) - 4 * len(cut)) / max(sum(lengths), 1)


def test_a_cache_as_is_is_counted_and_has_no_lengths(tmp_path):
  stats = CacheStats.of(caches.build_as_is(tmp_path).open())
  assert (stats.examples, stats.source_shards, stats.shards, stats.features) == (15, 4, 4, None)
  assert stats.to_json()["features"] is None
  assert stats.tokens_per_example({}) is None


def test_an_empty_cache_has_numbers_too(tmp_path):
  stats = CacheStats.of(caches.build(tmp_path, num_examples=0, num_shards=1, source_sizes=[0]).open())
  assert stats.to_json()["features"]["inputs"] == {
    **dict.fromkeys(["tokens", "mean", "max", "p50", "p90", "p99"], 0),
    "histogram": [],
  }


def test_a_lengths_table_that_was_changed_is_refused(own_cache):
  path = own_cache.directory / "train.lengths-00002-of-00004.npy"
  caches.flip(path, path.stat().st_size - 1)
  with pytest.raises(AnystepError) as refused:
    CacheStats.of(own_cache.open())
  assert (refused.value.code, refused.value.kind) == (65, "file_changed")


# Mixtures

A = caches.cache_without_files(task="a", num_examples=23)
B = caches.cache_without_files(task="b", num_examples=10, num_shards=2)


def mixture(**settings):
  return Plan.start([A, B], rates={"a": 3, "b": 2}, batch_size=8, **settings)


def stats_of(task, examples, lengths):
  return CacheStats(
    task=task,
    split="train",
    layout="preshuffled",
    examples=examples,
    source_shards=1,
    shards=1,
    bytes=1,
    features={name: counted(found) for name, found in lengths.items()},
  )


PLANS = {
  "endless": mixture(),
  "ends": mixture(num_epochs=2),
  "ends in lanes": mixture(num_epochs=2, lanes=4),
  "changed": mixture().change(3, rates={"a": 1}).change(7, rates={"b": 1, "a": 9}, batch_size=4).skip(9, 12),
}


@pytest.mark.parametrize("steps", [range(30), range(2, 8), range(5, 6), range(1, 1000)], ids=str)
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_rows_of_tasks_are_those_of_the_batches(plan, steps):
  expected = {"a": 0, "b": 0}
  for step in range(steps.start, steps.stop if plan.num_steps is None else min(steps.stop, plan.num_steps)):
    for position in plan.batch(step).task.tolist():
      if position != PADDING_TASK:
        expected[plan.task_names[position]] += 1
  assert rows_of_tasks(plan, steps) == expected


def test_shares_are_planned_by_quotas_real_by_rows_and_estimated_in_tokens():
  plan = PLANS["changed"]
  stats = {
    "a": stats_of("a", 2, {"inputs": [10, 2], "text": [100, 100]}),
    "b": stats_of("b", 1, {"inputs": [5], "text": [0]}),
  }
  a, b = mixture_shares(plan, range(9), stats, feature_lengths={"inputs": 6})
  rows = rows_of_tasks(plan, range(9))
  planned_a = (3 * 8 * 3 / 5 + 4 * 8 + 2 * 4 * 9 / 10) / (7 * 8 + 2 * 4)
  assert a["planned_percent"] == pytest.approx(100 * planned_a)
  assert b["planned_percent"] == pytest.approx(100 - 100 * planned_a)
  assert (a["rows"], b["rows"]) == (rows["a"], rows["b"])
  assert a["real_percent"] == 100 * rows["a"] / 64
  # Cut to 6, the examples of a have 6 and 2 tokens, that of b 5.
  assert a["token_percent"] == pytest.approx(100 * 4 * rows["a"] / (4 * rows["a"] + 5 * rows["b"]))
  assert a["steps"] == b["steps"] == [0, 9]


def test_tokens_are_of_all_features_where_none_has_a_length():
  stats = stats_of("a", 2, {"inputs": [10, 2], "text": [100, 100]})
  assert stats.tokens_per_example({}) == stats.tokens_per_example({"absent": 1}) == 106


def test_shares_of_tokens_are_unknown_where_a_tasks_lengths_are():
  stats = {"a": stats_of("a", 1, {"inputs": [3]})}
  shares = mixture_shares(mixture(), range(4), stats, feature_lengths={})
  assert [share["token_percent"] for share in shares] == [None, None]
  assert sum(share["real_percent"] for share in shares) == 100
