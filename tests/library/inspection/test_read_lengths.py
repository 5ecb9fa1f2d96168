"""Lengths as they are read, and what is cut of them, are those that reading every example gives."""

import caches
import numpy as np
import pytest

from anystep.features.converters import DecoderConverter, EncoderDecoderConverter, PrefixLMConverter
from anystep.features.feature import Feature
from anystep.inspection import read_lengths
from anystep.inspection.read_lengths import count_read_lengths
from anystep.order.packing import PackingPolicy
from anystep.transforms.functions import Filter, Map
from anystep.transforms.transform import Chain, Transform

LENGTHS = {"inputs": 4, "targets": 3}
FEATURES = {name: caches.FEATURES[name] for name in ("inputs", "number", "targets")}


@pytest.fixture(scope="module")
def built(tmp_path_factory):
  root = tmp_path_factory.mktemp("lengths")
  return caches.build(root, features=FEATURES, example_of=without_weights)


@pytest.fixture(scope="module")
def built_as_is(tmp_path_factory):
  root = tmp_path_factory.mktemp("as_is")
  return caches.build_as_is(root, shard_sizes=(30, 0, 25), features=FEATURES, example_of=without_weights)


def without_weights(ordinal):
  return {name: value for name, value in caches.example_of(ordinal).items() if name in FEATURES}


class AppendTwo(Transform):
  """Appends two tokens to the inputs: lengths follow from the cache's."""

  identity = "append two"

  def __init__(self):
    self.appended_tokens = {"inputs": 2}

  def __call__(self, batch, records):
    raise AssertionError("the lengths tables say it")


class ChunkOfTwo(Transform):
  """Keeps two tokens of the inputs, and says so."""

  identity = "chunk"

  def __call__(self, batch, records):
    inputs = [row[:2] for row in batch["inputs"].rows()]
    return {**batch, "inputs": type(batch["inputs"]).of_rows(inputs, np.dtype(np.int32))}

  def count_cut_tokens(self, batch, records):
    return np.maximum(batch["inputs"].lengths - 2, 0)


class CutUnknown(ChunkOfTwo):
  """Cuts, and cannot say how much."""

  def count_cut_tokens(self, batch, records):
    return None


def double_inputs(example):
  return {**example, "inputs": np.concatenate([example["inputs"]] * 2)}


def keep_even(example):
  return example["number"] % 2 == 0


def check(found, lengths, *, cut_before=None, dropped=0):
  """Compares counts with those of lists of lengths by feature, one for each example that is kept."""
  count = len(lengths["inputs"])
  before = [0] * count if cut_before is None else cut_before
  beyond = [
    before[k] + sum(max(lengths[name][k] - limit, 0) for name, limit in LENGTHS.items()) for k in range(count)
  ]
  for name, column in lengths.items():
    counts = found.features[name]
    values, numbers = np.unique(column, return_counts=True)
    assert [part.tolist() for part in counts.table] == [values.tolist(), numbers.tolist()]
  assert found.dropped_examples == dropped
  assert found.counted_examples == count + dropped
  assert found.cut_tokens == sum(beyond)
  assert found.cut_examples == sum(cut > 0 for cut in beyond)
  assert found.tokens == sum(map(sum, lengths.values())) + sum(before)
  assert found.cut_examples_percent == pytest.approx(100 * found.cut_examples / count)
  assert found.cut_tokens_percent == pytest.approx(100 * sum(beyond) / found.tokens)
  assert found.mean_tokens == pytest.approx((found.tokens - sum(beyond)) / count)


def lengths_of(examples):
  return {name: [len(example[name]) for example in examples] for name in LENGTHS}


@pytest.mark.parametrize("transform", [None, Chain([])], ids=["no transform", "one that does nothing"])
def test_without_a_transform_lengths_are_the_caches(built, transform):
  found = count_read_lengths(built.open(), transform, feature_lengths=LENGTHS)
  check(found, lengths_of(built.examples))
  assert (found.examples, found.is_all_known) == (50, True)


def test_appended_tokens_are_added_without_running_anything(built):
  lengths = lengths_of(built.examples)
  lengths["inputs"] = [length + 2 for length in lengths["inputs"]]
  check(count_read_lengths(built.open(), AppendTwo(), feature_lengths=LENGTHS), lengths)


def test_other_transforms_run(built):
  transform = Chain([Filter(keep_even), Map(double_inputs)])
  kept = [double_inputs(example) for example in built.examples if keep_even(example)]
  check(
    count_read_lengths(built.open(), transform, feature_lengths=LENGTHS),
    lengths_of(kept),
    dropped=50 - len(kept),
  )


@pytest.mark.parametrize("dropping", [False, True])
def test_what_a_transform_cuts_itself_counts_as_cut(built, dropping):
  examples = [e for e in built.examples if keep_even(e)] if dropping else built.examples
  transform = Chain([Filter(keep_even), ChunkOfTwo()]) if dropping else ChunkOfTwo()
  found = count_read_lengths(built.open(), transform, feature_lengths=LENGTHS)
  lengths = lengths_of(examples)
  before = [max(length - 2, 0) for length in lengths["inputs"]]
  lengths["inputs"] = [min(length, 2) for length in lengths["inputs"]]
  check(found, lengths, cut_before=before, dropped=50 - len(examples))
  assert found.is_all_known


def test_what_cannot_be_counted_is_said(built):
  found = count_read_lengths(built.open(), CutUnknown(), feature_lengths=LENGTHS)
  assert not found.is_all_known
  assert found.describe_cut().endswith("; what its preprocessors cut themselves is not known")
  assert not count_read_lengths(
    built.open(), Chain([CutUnknown(), Map(double_inputs)]), feature_lengths=LENGTHS
  ).is_all_known


def test_files_without_lengths_are_read(built_as_is):
  found = count_read_lengths(built_as_is.open(), None, feature_lengths=LENGTHS)
  check(found, lengths_of(built_as_is.examples))


def test_a_sample_of_files_comes_from_all_over_the_split(built_as_is, monkeypatch):
  monkeypatch.setattr(read_lengths, "_SAMPLED_EXAMPLES", 10)
  found = count_read_lengths(built_as_is.open(), None, feature_lengths=LENGTHS)
  check(found, lengths_of([built_as_is.examples[k * 54 // 9] for k in range(10)]))
  assert found.describe_cut().endswith(", of 10 counted")


def test_a_sample_of_a_preshuffled_cache_is_its_first_examples(built, monkeypatch):
  monkeypatch.setattr(read_lengths, "_SAMPLED_EXAMPLES", 20)
  monkeypatch.setattr(read_lengths, "_EXAMPLES_AT_A_TIME", 7)
  done = []
  found = count_read_lengths(built.open(), Map(double_inputs), feature_lengths=LENGTHS, report=done.append)
  check(found, lengths_of([double_inputs(example) for example in built.examples[:20]]))
  assert done == [7, 14, 20]


def test_large_lengths_tables_are_read_in_part_unless_all_are_asked_for(built, monkeypatch):
  monkeypatch.setattr(read_lengths, "_LENGTHS_EXAMPLES", 20)
  by_shard = [example for shard in range(4) for example in built.examples[shard::4]]
  found = count_read_lengths(built.open(), None, feature_lengths=LENGTHS)
  check(found, lengths_of(by_shard[:20]))
  found = count_read_lengths(built.open(), None, feature_lengths=LENGTHS, all_lengths=True)
  check(found, lengths_of(built.examples))


@pytest.mark.parametrize(
  "converter", [PrefixLMConverter(), DecoderConverter()], ids=lambda c: type(c).__name__
)
@pytest.mark.parametrize("transform", [None, Map(double_inputs)], ids=["none", "double"])
def test_a_prefix_lm_cuts_inputs_and_targets_as_one_sequence(built, converter, transform):
  examples = [double_inputs(example) for example in built.examples] if transform else built.examples
  found = count_read_lengths(built.open(), transform, feature_lengths=LENGTHS, converter=converter)
  beyond = [max(len(e["inputs"]) + len(e["targets"]) - 7, 0) for e in examples]
  assert (found.cut_tokens, found.cut_examples) == (sum(beyond), sum(cut > 0 for cut in beyond))
  packed = count_read_lengths(
    built.open(), transform, feature_lengths=LENGTHS, converter=converter, packing=PackingPolicy.GREEDY
  )
  check(packed, lengths_of(examples))


def test_for_a_prefix_lm_what_appends_must_run(built):
  # Whether it also cuts to the features' own lengths, lengths do not say.
  with pytest.raises(AssertionError, match="lengths tables"):
    count_read_lengths(built.open(), AppendTwo(), feature_lengths=LENGTHS, converter=PrefixLMConverter())


def test_other_converters_cut_each_feature_by_itself(built):
  found = count_read_lengths(built.open(), None, feature_lengths=LENGTHS, converter=EncoderDecoderConverter())
  check(found, lengths_of(built.examples))


def test_a_cut_is_large_above_five_percent_of_examples_or_tokens(tmp_path):
  def counted(long_examples, tokens):
    def example_of(ordinal):
      return {"inputs": np.zeros(tokens if ordinal < long_examples else 10, np.int32)}

    features = {"inputs": Feature(dtype="int32", shape=(None,))}
    root = tmp_path / f"{long_examples} {tokens}"
    cache = caches.build(root, num_examples=100, features=features, example_of=example_of).open()
    return count_read_lengths(cache, None, feature_lengths={"inputs": 10})

  assert not counted(5, 12).cuts_much
  assert counted(6, 11).cuts_much
  assert counted(1, 1000).cuts_much
  assert (
    counted(6, 11).describe_cut() == "demo train: 6% of examples and 0.596% of tokens are cut to inputs 10"
  )
  assert counted(0, 0).describe_cut() == "demo train: no example is cut to inputs 10"


def test_without_lengths_nothing_is_cut(built):
  found = count_read_lengths(built.open(), None, feature_lengths={})
  assert (found.cut_examples, found.tokens, found.cuts_much) == (0, 0, False)
  assert found.describe_cut() == "demo train: no feature has a length, so nothing is cut"


def test_an_empty_cache_has_no_lengths(tmp_path):
  cache = caches.build(tmp_path, num_examples=0, num_shards=1, source_sizes=[0]).open()
  found = count_read_lengths(cache, None, feature_lengths=LENGTHS)
  assert (found.examples, found.tokens, found.mean_tokens) == (0, 0, None)
