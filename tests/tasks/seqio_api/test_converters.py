"""SeqIO's converters serve streams: the stock ones natively, any other through its own graph."""

import caches
import numpy as np
import pytest
import seqio
import tensorflow as tf

from anystep.errors import AnystepError
from anystep.features.converters import (
  DecoderConverter,
  EncoderConverter,
  EncoderDecoderConverter,
  LMConverter,
  PassThroughConverter,
  PrefixLMConverter,
)
from anystep.features.ragged import Ragged
from anystep.tasks.seqio_api.converters import SeqioConverter, native_converter

LENGTHS = {"inputs": 8, "targets": 6}
ROWS = [
  {"inputs": [3, 4, 5], "targets": [8, 1]},
  {"inputs": [7], "targets": [5, 1]},
  {"inputs": [9, 9, 2, 1], "targets": [5, 1]},
  {"inputs": [2, 3, 4, 5, 6, 7, 8, 1], "targets": [4]},
]
COUNTS = np.array([3, 1])


def ragged(rows, dtype=np.int32):
  return Ragged.of_rows([np.array(row, dtype) for row in rows], np.dtype(dtype))


def batch_of(rows):
  return {name: ragged([row[name] for row in rows]) for name in LENGTHS} | {"number": np.arange(len(rows))}


def assert_equal_rows(ours, theirs):
  assert ours.keys() == theirs.keys()
  for name, values in ours.items():
    assert caches.same_array(values, theirs[name]), name


class Reversed(seqio.EncDecFeatureConverter):
  """A converter of a user's own."""

  def _convert_example(self, features):
    return {name: values[::-1] for name, values in super()._convert_example(features).items()}


class EveryOther(seqio.EncDecFeatureConverter):
  """A converter that does not make a row of each example."""

  def _convert_features(self, ds, task_feature_lengths):
    return super()._convert_features(ds, task_feature_lengths).shard(2, 0)


@pytest.mark.parametrize(
  ("converter", "native", "options"),
  [
    (seqio.EncDecFeatureConverter(bos_id=2), EncoderDecoderConverter, {"bos_id": 2}),
    (seqio.LMFeatureConverter(pack=False, bos_id=3), LMConverter, {"bos_id": 3}),
    (
      seqio.PrefixLMFeatureConverter(loss_on_targets_only=False, bos_id=4),
      PrefixLMConverter,
      {"loss_on_targets_only": False, "bos_id": 4},
    ),
    (seqio.PrefixLMFeatureConverter(), PrefixLMConverter, {"loss_on_targets_only": True, "bos_id": 0}),
    (seqio.EncoderFeatureConverter(mask_id=9), EncoderConverter, {"mask_id": 9}),
    (seqio.PassThroughFeatureConverter(), PassThroughConverter, {}),
  ],
  ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_stock_converters_have_native_ones_of_their_options(converter, native, options):
  made = native_converter(converter)
  assert type(made) is native
  assert vars(made) == options


@pytest.mark.parametrize("loss_on_targets_only", [True, False])
def test_a_decoder_converter_keeps_its_options(loss_on_targets_only):
  options = {"loss_on_targets_only": loss_on_targets_only, "bos_id": 5}
  made = native_converter(seqio.DecoderFeatureConverter(**options))
  assert type(made) is DecoderConverter
  assert_equal_rows(made(batch_of(ROWS), LENGTHS), PrefixLMConverter(**options)(batch_of(ROWS), LENGTHS))
  targets = {"targets": 6}
  assert_equal_rows(made(batch_of(ROWS), targets), LMConverter(bos_id=5)(batch_of(ROWS), targets))


@pytest.mark.parametrize(
  "converter",
  [
    Reversed(pack=False),
    seqio.PrePackedLMFeatureConverter(),
    seqio.PrefixSuffixLMFeatureConverter(),
    seqio.EncDecFeatureConverter(
      pack=False, passthrough_features={"number": seqio.FeatureConverter.FeatureSpec(tf.int64, 0)}
    ),
  ],
  ids=["subclass", "pass_through_subclass", "suffixes", "features_passed_through"],
)
def test_any_other_converter_stays_seqios(converter):
  assert type(native_converter(converter)) is SeqioConverter


def test_a_converter_of_ones_own_converts_each_example_to_its_row():
  converter = SeqioConverter(Reversed(pack=False))
  native = EncoderDecoderConverter()
  for rows in (ROWS, ROWS[::-1], ROWS[:1], []):
    batch = batch_of(rows)
    expected = {name: values[:, ::-1] for name, values in native(batch, LENGTHS).items()}
    assert_equal_rows(converter(batch, LENGTHS), expected)
  # One graph for all of them, another for other lengths.
  assert len(converter._functions) == 1
  shorter = {"inputs": 8, "targets": 2}
  assert converter(batch_of(ROWS), shorter)["decoder_target_tokens"].tolist()[0] == [1, 8]
  assert len(converter._functions) == 2


def test_a_packing_converter_makes_one_row_of_each_rows_examples():
  converter, native = SeqioConverter(seqio.EncDecFeatureConverter()), EncoderDecoderConverter()
  batch = batch_of(ROWS)
  assert_equal_rows(converter(batch, LENGTHS, COUNTS), native(batch, LENGTHS, COUNTS))
  assert_equal_rows(converter(batch, LENGTHS), native(batch, LENGTHS, np.ones(4, np.int64)))
  nothing = np.zeros(0, np.int64)
  assert_equal_rows(converter(batch_of([]), LENGTHS, nothing), native(batch_of([]), LENGTHS, nothing))
  with pytest.raises(AnystepError) as refused:
    converter(batch, LENGTHS, np.array([4]))
  assert (refused.value.code, refused.value.kind) == (78, "converter_rows")
  assert refused.value.fields == {
    "converter": "EncDecFeatureConverter",
    "expected": "rows: 1",
    "got": "rows: 2",
  }


def test_features_that_pass_through_keep_their_rank_and_dtype():
  specs = {
    "flags": seqio.FeatureConverter.FeatureSpec(tf.bool),
    "frames": seqio.FeatureConverter.FeatureSpec(tf.float32, rank=2),
  }
  converter = SeqioConverter(seqio.EncDecFeatureConverter(pack=False, passthrough_features=specs))
  frames = Ragged(np.arange(8, dtype=np.float32).reshape(4, 2), np.array([1, 0, 2, 1]))
  flags = ragged([[True], [], [False, True], [True]], bool)
  batch = {**batch_of(ROWS), "frames": frames, "flags": flags}
  rows = converter(batch, {**LENGTHS, "frames": 2, "flags": 3})
  native = EncoderDecoderConverter()(batch, LENGTHS)
  assert_equal_rows(rows, {**native, "frames": frames.to_padded(2), "flags": flags.to_padded(3)})


def test_what_a_converter_leaves_ragged_stays_so():
  batch = batch_of(ROWS) | {"text": np.array([b"a", b"", b"c", b"d"], object)}
  rows = SeqioConverter(seqio.PassThroughFeatureConverter())(batch, LENGTHS)
  assert rows.keys() == batch.keys()
  for name in LENGTHS:
    assert caches.same_array(rows[name].values, batch[name].values)
    assert caches.same_array(rows[name].lengths, batch[name].lengths)
  assert caches.same_array(rows["number"], batch["number"])
  assert rows["text"].tolist() == batch["text"].tolist()


def test_packed_rows_need_a_converter_that_packs():
  with pytest.raises(AnystepError) as refused:
    SeqioConverter(Reversed(pack=False))(batch_of(ROWS), LENGTHS, COUNTS)
  assert (refused.value.code, refused.value.kind) == (78, "converter_pack")
  assert refused.value.fields["got"] == "Reversed(pack=False)"


def test_a_converter_that_leaves_examples_out_is_refused():
  with pytest.raises(AnystepError) as refused:
    SeqioConverter(EveryOther(pack=False))(batch_of(ROWS), LENGTHS)
  assert (refused.value.code, refused.value.kind) == (78, "converter_rows")
  assert refused.value.fields == {"converter": "EveryOther", "expected": "rows: 4", "got": "rows: 2"}


@pytest.mark.parametrize(
  ("lengths", "said"),
  [
    ({"targets": 6}, "missing features"),
    ({**LENGTHS, "other": 3}, "extra features"),
    ({"inputs": 8, "targets": 1}, "Feature 'targets' has length not less than or equal"),
  ],
)
def test_what_seqio_refuses_is_said_with_its_words(lengths, said):
  with pytest.raises(AnystepError) as refused:
    SeqioConverter(seqio.EncDecFeatureConverter(pack=False))(batch_of(ROWS), lengths)
  assert (refused.value.code, refused.value.kind) == (78, "converter_refused")
  assert refused.value.fields["converter"] == "EncDecFeatureConverter"
  assert said in refused.value.fields["got"].replace("\\", "")


@pytest.fixture
def task():
  name = "converters_test"
  seqio.TaskRegistry.add(
    name,
    source=seqio.FunctionDataSource(
      lambda split, shuffle_files, seed=None: tf.data.Dataset.from_generator(
        lambda: iter(ROWS), output_signature={name: tf.TensorSpec((None,), tf.int32) for name in LENGTHS}
      ),
      splits=["train"],
    ),
    preprocessors=[],
    output_features={
      name: seqio.Feature(seqio.PassThroughVocabulary(100), add_eos=False) for name in LENGTHS
    },
  )
  yield name
  seqio.TaskRegistry.remove(name)


def test_one_task_feeds_either_architecture_by_the_converter_alone(task):
  dataset = seqio.get_mixture_or_task(task).get_dataset(LENGTHS, "train", shuffle=False)
  batch = batch_of(list(dataset.as_numpy_iterator()))
  for converter in (seqio.EncDecFeatureConverter(pack=False), seqio.DecoderFeatureConverter(pack=False)):
    theirs = seqio.get_dataset(
      task, LENGTHS, dataset_split="train", shuffle=False, feature_converter=converter
    ).batch(len(ROWS))
    (expected,) = theirs.as_numpy_iterator()
    assert_equal_rows(native_converter(converter)(batch, LENGTHS), expected)
