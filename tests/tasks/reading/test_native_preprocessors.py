"""SeqIO's simple preprocessors in numpy: the same examples as SeqIO makes; and which are understood."""

import functools
import types

import numpy as np
import pytest
import seqio
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from tensorflow.python import pywrap_tfe
from tensorflow.python.framework import constant_op

from anystep.errors import AnystepError
from anystep.features.feature import Feature
from anystep.features.ragged import Ragged
from anystep.tasks.preprocessors import random_chunk, span_corruption
from anystep.tasks.reading import task_reader as reading
from anystep.tasks.reading.native_preprocessors import NativePreprocessors
from anystep.tasks.reading.task_reader import TaskReader
from anystep.transforms.transform import Records

VOCABULARY = seqio.ByteVocabulary()
FEATURES = {
  "inputs": Feature(dtype="int32", shape=(None,)),
  "number": Feature(dtype="int64", shape=()),
  "pairs": Feature(dtype="float32", shape=(None, 2)),
  "score": Feature(dtype="float32", shape=(None,)),
  "small": Feature(dtype="uint8", shape=(None,)),
  "targets": Feature(dtype="int64", shape=(None,)),
  "text": Feature(dtype="string", shape=()),
  "three": Feature(dtype="int16", shape=(3,)),
  "words": Feature(dtype="string", shape=(None,)),
}
CAN_END = ("inputs", "score", "small", "targets", "three")
TRIM_INPUTS_TO_3 = functools.partial(seqio.utils.trim_dataset, sequence_length={"inputs": 3})

append_eos = seqio.preprocessors.append_eos
append_eos_after_trim = seqio.preprocessors.append_eos_after_trim
truncate_inputs_left = seqio.preprocessors.truncate_inputs_left
trim_dataset = seqio.utils.trim_dataset
ended_map = seqio.map_over_dataset(seqio.preprocessors.append_eos_after_trim_impl)
CHAINS = (
  [],
  [append_eos],
  [append_eos_after_trim],
  [ended_map],
  [trim_dataset],
  [truncate_inputs_left],
  [append_eos, append_eos],
  [append_eos, trim_dataset],
  [trim_dataset, append_eos],
  [append_eos, truncate_inputs_left, append_eos_after_trim],
  [functools.partial(append_eos_after_trim, sequence_length={"inputs": 2, "score": None})],
  [functools.partial(append_eos_after_trim, sequence_length=None)],
  [functools.partial(trim_dataset, sequence_length={"pairs": 9, "targets": 9}), append_eos],
  [functools.partial(append_eos, output_features={"inputs": seqio.Feature(VOCABULARY)})],
  [functools.partial(truncate_inputs_left, sequence_length={"inputs": 1}), append_eos],
)


def output_features_of(ends, names=FEATURES):
  return {
    name: seqio.Feature(
      VOCABULARY,
      add_eos=name in ends,
      dtype=tf.as_dtype(FEATURES[name].dtype),
      rank=len(FEATURES[name].shape),
    )
    for name in names
  }


def task_of(preprocessors, output_features, dataset=None):
  return seqio.Task(
    "native",
    source=seqio.FunctionDataSource(lambda split, shuffle_files: dataset, splits=["train"]),
    preprocessors=[seqio.CacheDatasetPlaceholder(), *preprocessors],
    output_features=output_features,
  )


def cache_of(features):
  """As much of a cache as is looked at where nothing has to be tried out."""
  return types.SimpleNamespace(
    manifest=types.SimpleNamespace(features=features, cache_at="placeholder", task="native", split="train")
  )


def native_reader(task, features, feature_lengths):
  """A reader that has no other way than numpy."""
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(reading, "PreprocessorGraph", None)
    return TaskReader(task, cache_of(features), feature_lengths)


def records_of(num_rows):
  return Records(np.zeros(num_rows, np.int64), np.arange(num_rows), "native", "train", 0)


def random_examples(seed, num_examples, features=FEATURES):
  generator = np.random.default_rng(seed)

  def value_of(feature):
    shape = tuple(int(generator.integers(9)) if size is None else size for size in feature.shape)
    if feature.dtype == "string":
      return np.array([b"%d" % k for k in generator.integers(100, size=shape).flat], object).reshape(shape)
    return generator.integers(100, size=shape).astype(feature.dtype)

  return [{name: value_of(feature) for name, feature in features.items()} for _ in range(num_examples)]


def batch_of(examples, features=FEATURES):
  batch = {}
  for name, feature in features.items():
    column = [example[name] for example in examples]
    dtype = np.dtype(object if feature.dtype == "string" else feature.dtype)
    if feature.sequence:
      batch[name] = Ragged.of_rows(column, dtype, feature.shape[1:])
    else:
      batch[name] = np.array([value.item() for value in column], dtype)
  return batch


def rows_of(batch, name):
  return batch[name].rows() if isinstance(batch[name], Ragged) else list(batch[name])


def seqio_examples(preprocessors, output_features, examples, features, feature_lengths, *, trim):
  signature = {
    name: tf.TensorSpec(feature.shape, tf.as_dtype(feature.dtype)) for name, feature in features.items()
  }
  source = tf.data.Dataset.from_generator(lambda: iter(examples), output_signature=signature)
  task = task_of(preprocessors, output_features, source)
  dataset = task.get_dataset(
    feature_lengths, split="train", use_cached=False, shuffle=False, trim_output_features=trim
  )
  return list(dataset.as_numpy_iterator())


@pytest.mark.parametrize("preprocessors", CHAINS)
@settings(max_examples=2, deadline=None)
@given(
  seed=st.integers(0, 2**32),
  num_examples=st.integers(6, 24),
  ends=st.sets(st.sampled_from(CAN_END)),
  outputs=st.sets(st.sampled_from(sorted(FEATURES)), min_size=1),
  feature_lengths=st.dictionaries(
    st.sampled_from(sorted(set(FEATURES) - {"number", "text"})), st.integers(1, 10)
  ),
)
def test_examples_are_seqio_s(preprocessors, seed, num_examples, ends, outputs, feature_lengths):
  output_features = output_features_of(ends, sorted(outputs))
  reader = native_reader(task_of(preprocessors, output_features), FEATURES, feature_lengths)
  examples = random_examples(seed, num_examples)
  batch = batch_of(examples)
  got = reader(batch, records_of(num_examples))
  expected = seqio_examples(preprocessors, output_features, examples, FEATURES, feature_lengths, trim=False)
  for name in FEATURES:
    for one, other in zip(rows_of(got, name), [example[name] for example in expected], strict=True):
      assert np.asarray(one).dtype == np.asarray(other).dtype or FEATURES[name].dtype == "string"
      np.testing.assert_array_equal(one, other)
  assert (reader.may_drop, reader.is_random) == (False, False)
  kept, rows = reader.survey(batch, records_of(num_examples))
  np.testing.assert_array_equal(rows, np.arange(num_examples))
  assert kept.keys() == got.keys()
  cut = {
    name: [min(len(row), length) for row in rows_of(got, name)] for name, length in feature_lengths.items()
  }
  if reader.appended_tokens is not None:
    assert reader.appended_tokens.keys() == {name for name, feature in FEATURES.items() if feature.shape}
    for name, length in feature_lengths.items():
      lengths = [min(len(row) + reader.appended_tokens[name], length) for row in rows_of(batch, name)]
      assert cut[name] == lengths


@pytest.mark.parametrize(
  ("preprocessors", "expected"),
  [
    ([], {"inputs": 0, "targets": 0}),
    ([append_eos], {"inputs": 1, "targets": 0}),
    ([ended_map], {"inputs": 1, "targets": 0}),
    ([trim_dataset, append_eos_after_trim], {"inputs": 1, "targets": 0}),
    ([append_eos, append_eos, truncate_inputs_left], {"inputs": 2, "targets": 0}),
    # Cut to what is not the feature length.
    ([functools.partial(append_eos_after_trim, sequence_length={"inputs": 7})], {"inputs": 1, "targets": 0}),
    ([functools.partial(append_eos_after_trim, sequence_length={"inputs": 3})], None),
    ([TRIM_INPUTS_TO_3], None),
    (
      [TRIM_INPUTS_TO_3, append_eos],
      {"inputs": 1, "targets": 0},
    ),
    ([functools.partial(trim_dataset, sequence_length={"targets": 1})], {"inputs": 0, "targets": 0}),
  ],
)
def test_appended_tokens_give_lengths_by_arithmetic_or_are_none(preprocessors, expected):
  features = {name: FEATURES[name] for name in ("inputs", "number", "targets")}
  task = task_of(preprocessors, output_features_of({"inputs"}, features))
  assert native_reader(task, features, {"inputs": 4}).appended_tokens == expected


def test_nothing_of_tensorflow_runs(monkeypatch):
  wide = functools.partial(span_corruption, sequence_length={"inputs": 9, "targets": 9})
  chain = [random_chunk, wide, append_eos_after_trim, trim_dataset, append_eos, truncate_inputs_left]
  vocabulary = seqio.ByteVocabulary(extra_ids=9)
  outputs = {name: seqio.Feature(vocabulary, dtype=tf.int64) for name in ("inputs", "targets")}
  task = task_of(chain, outputs)
  batch = batch_of(random_examples(0, 50))

  def refuse(*args, **kwargs):
    raise AssertionError("TensorFlow was called")

  for module, name in [
    (pywrap_tfe, "TFE_Py_FastPathExecute"),
    (pywrap_tfe, "TFE_Py_Execute"),
    (constant_op, "convert_to_eager_tensor"),
    (tf.Graph, "_create_op_internal"),
  ]:
    monkeypatch.setattr(module, name, refuse)
  with pytest.raises(AssertionError, match="TensorFlow"):
    tf.constant([1])
  reader = native_reader(task, FEATURES, {"inputs": 4, "targets": 5})
  result = reader(batch, records_of(50))
  assert result["inputs"].lengths.max() == 4


def nearly_append_eos(dataset, output_features):
  return append_eos(dataset, output_features)


@pytest.mark.parametrize(
  "preprocessor",
  [
    nearly_append_eos,
    lambda dataset: dataset,
    functools.wraps(append_eos)(nearly_append_eos),
    functools.partial(nearly_append_eos),
    functools.partial(append_eos, "a dataset"),
    functools.partial(append_eos, colour="red"),
    functools.partial(append_eos, output_features=None),
    functools.partial(trim_dataset, sequence_length={"pairs": (3, 1)}),
    functools.partial(trim_dataset, sequence_length={"inputs": -1}),
    functools.partial(trim_dataset, sequence_length={"number": 3}),
    functools.partial(append_eos_after_trim, sequence_length={"inputs": 0}),
    functools.partial(truncate_inputs_left, sequence_length={"inputs": 0}),
    functools.partial(truncate_inputs_left, sequence_length={"inputs": None}),
    seqio.map_over_dataset(append_eos),
    seqio.map_over_dataset(lambda example: example),
    seqio.map_over_dataset(num_seeds=1)(seqio.preprocessors.append_eos_after_trim_impl),
    seqio.preprocessors.append_eos_after_trim_impl,
    seqio.preprocessors.rekey,
    lambda dataset, sequence_length: random_chunk(dataset, sequence_length, feature="inputs"),
    random_chunk,  # There is no length for targets.
    functools.partial(random_chunk, {"targets": 3}),
    functools.partial(random_chunk, sequence_length=None),
    functools.partial(random_chunk, sequence_length={"targets": -1}),
    functools.partial(random_chunk, sequence_length={"targets": 3.0}),
    functools.partial(random_chunk, sequence_length={"targets": 3}, output_features={}),
    functools.partial(random_chunk, sequence_length={"targets": 3}, length=3),
    functools.partial(random_chunk, feature="pairs", sequence_length={"pairs": 3}),
    functools.partial(random_chunk, feature="number", sequence_length={"number": 3}),
    functools.partial(random_chunk, feature="missing", sequence_length={"missing": 3}),
    seqio.map_over_dataset(random_chunk),
  ],
)
def test_what_is_not_understood_is_left_to_tensorflow(preprocessor):
  outputs = output_features_of({"inputs"})
  for chain in ([preprocessor], [append_eos, preprocessor], [preprocessor, append_eos]):
    assert NativePreprocessors.of(chain, FEATURES, outputs, {"inputs": 4}) is None
  assert NativePreprocessors.of([append_eos], FEATURES, outputs, {"inputs": 4}) is not None


CORRUPTED_LENGTHS = {"inputs": 60, "targets": 24}  # Chunks of 66 tokens, with 3 spans.


def corrupted_features(extra_ids=3, names=CORRUPTED_LENGTHS, dtype=tf.int64):
  return {name: seqio.Feature(seqio.ByteVocabulary(extra_ids=extra_ids), dtype=dtype) for name in names}


def corrupted(preprocessor=span_corruption, *, dtype="int64", shape=(None,), **changes):
  """The preprocessor, if it is understood."""
  features = {**FEATURES, "targets": Feature(dtype=dtype, shape=shape)}
  return NativePreprocessors.of([preprocessor], features, corrupted_features(**changes), CORRUPTED_LENGTHS)


@pytest.mark.parametrize("dtype", ["int32", "int64"])
@pytest.mark.parametrize("shape", [(None,), (3,)])
@pytest.mark.parametrize("settings", [{}, {"noise_density": 0.1, "mean_span_tokens": 4}])
def test_span_corruption_makes_inputs_of_the_dtype_of_targets(settings, dtype, shape):
  native = corrupted(functools.partial(span_corruption, **settings), dtype=dtype, shape=shape)
  made = Feature(dtype=dtype, shape=(None,))
  assert native.features == {**FEATURES, "inputs": made, "targets": made}
  assert (native.num_seeds, native.appended_tokens) == ([3], None)


@pytest.mark.parametrize(
  "changed",
  [
    {"preprocessor": functools.partial(span_corruption, **keywords)}
    for keywords in [
      {"colour": "red"},
      {"noise_density": 0},
      {"noise_density": 1.0},
      {"noise_density": float("nan")},
      {"noise_density": np.float32(0.15)},
      {"mean_span_tokens": 0.9},
      {"mean_span_tokens": "3"},
      {"sequence_length": None},
      {"sequence_length": {"inputs": 60}},
      {"sequence_length": {"inputs": 60, "targets": 24.0}},
      {"output_features": None},
    ]
  ]
  + [
    {"preprocessor": functools.partial(span_corruption, CORRUPTED_LENGTHS)},
    {"preprocessor": lambda *args: span_corruption(*args)},
    {"names": ["targets"]},
    {"dtype": "int16"},
    {"dtype": "string"},
    {"shape": ()},
    {"shape": (None, 2)},
    {"extra_ids": 2},
    # Sentinels do not fit in 32 bits.
    {"dtype": "int32", "extra_ids": 2**31},
  ],
)
def test_span_corruption_that_is_not_understood_is_left_to_tensorflow(changed):
  assert corrupted(**changed) is None


def test_span_corruption_without_targets_is_left_to_tensorflow():
  outputs = corrupted_features()
  features = {"inputs": FEATURES["inputs"]}
  assert NativePreprocessors.of([span_corruption], features, outputs, CORRUPTED_LENGTHS) is None


@pytest.mark.parametrize(
  ("extra_ids", "lengths", "kind"),
  [(2, CORRUPTED_LENGTHS, "sentinels"), (3, {"inputs": 2, "targets": 24}, "feature_length")],
)
def test_span_corruption_is_refused_as_by_itself(extra_ids, lengths, kind):
  outputs = corrupted_features(extra_ids)
  with pytest.raises(AnystepError) as caught:
    TaskReader(task_of([span_corruption, append_eos], outputs), cache_of(FEATURES), lengths)
  assert (caught.value.code, caught.value.kind) == (78, kind)
  with pytest.raises(AnystepError) as own:
    span_corruption(None, lengths, outputs)
  assert str(caught.value) == str(own.value)


def test_what_follows_span_corruption_works_on_what_it_makes():
  """Inputs need not be there before; an end token that does not fit what they were fits what they are."""
  text_inputs = {"inputs": Feature(dtype="string", shape=()), "targets": FEATURES["targets"]}
  outputs = corrupted_features()
  task = task_of([span_corruption, append_eos, truncate_inputs_left], outputs)
  for features in (text_inputs, {"targets": FEATURES["targets"]}):
    assert native_reader(task, features, CORRUPTED_LENGTHS).is_random
  assert NativePreprocessors.of([append_eos], text_inputs, outputs, CORRUPTED_LENGTHS) is None


def test_what_span_corruption_makes_is_compared_with_the_task_s_output_features():
  task = task_of([span_corruption], corrupted_features(dtype=tf.int32))
  with pytest.raises(AnystepError) as caught:
    native_reader(task, {"targets": FEATURES["targets"]}, CORRUPTED_LENGTHS)
  assert (caught.value.code, caught.value.kind) == (78, "output_features")


@pytest.mark.parametrize("ended", ["number", "pairs", "text", "words"])
def test_end_tokens_that_are_no_token_of_a_rank_1_sequence_are_left_to_tensorflow(ended):
  for preprocessor in (append_eos, append_eos_after_trim, ended_map):
    assert NativePreprocessors.of([preprocessor], FEATURES, output_features_of({ended}), {}) is None


@pytest.mark.parametrize("eos_id", [None, 256, -1])
def test_end_tokens_outside_the_dtype_are_left_to_tensorflow(eos_id):
  vocabulary = seqio.PassThroughVocabulary(1000, eos_id=eos_id)
  outputs = {"small": seqio.Feature(vocabulary, dtype=tf.uint8)}
  assert NativePreprocessors.of([append_eos], FEATURES, outputs, {}) is None


def test_inputs_that_are_not_there_are_left_to_tensorflow():
  features = {"targets": FEATURES["targets"]}
  assert NativePreprocessors.of([truncate_inputs_left], features, {}, {"inputs": 3}) is None


@pytest.mark.parametrize(
  ("outputs", "word"),
  [
    ({"missing": seqio.Feature(VOCABULARY)}, "missing"),
    ({"targets": seqio.Feature(VOCABULARY, dtype=tf.int32)}, "type"),
    ({"pairs": seqio.Feature(VOCABULARY, dtype=tf.float32, rank=1, add_eos=False)}, "rank"),
    ({"number": seqio.Feature(VOCABULARY, dtype=tf.int64, rank=1, add_eos=False)}, "rank"),
  ],
)
def test_examples_without_the_task_s_output_features_are_refused_as_seqio_does(outputs, word):
  with pytest.raises(AnystepError) as caught:
    native_reader(task_of([append_eos], outputs), FEATURES, {})
  assert (caught.value.code, caught.value.kind) == (78, "output_features")
  assert word in caught.value.fields["got"]
  with pytest.raises(ValueError, match=word) as seqio_s:
    seqio_examples([append_eos], outputs, [], FEATURES, {}, trim=False)
  assert caught.value.fields["got"] == str(seqio_s.value)


def test_an_output_feature_that_is_not_required_may_be_missing():
  outputs = {**output_features_of(()), "missing": seqio.Feature(VOCABULARY, required=False)}
  assert native_reader(task_of([append_eos], outputs), FEATURES, {}).appended_tokens["inputs"] == 0


def test_a_batch_of_no_rows_stays_one():
  task = task_of([append_eos_after_trim], output_features_of(CAN_END))
  got = native_reader(task, FEATURES, {"inputs": 3})(batch_of([]), records_of(0))
  assert {len(feature) for feature in got.values()} == {0}
