"""Which examples can be cached and come back as they were; others are named, or left out."""

import functools
import json
import random

import numpy as np
import pytest
import seqio
import small_tasks
import tensorflow as tf
from job_runs import digests_of, registered, run_job

from anystep.cache_job.preprocessing import example_batches, example_checks
from anystep.caches.cache import open_cache
from anystep.errors import AnystepError
from anystep.features.feature import Feature
from anystep.features.ragged import Ragged
from anystep.files import names

# Batches are of 512 examples; the rest of a source shard is a smaller one.
SIZES = (515, 0, 40)
LARGEST_RECORD = 4096


@pytest.fixture(autouse=True)
def small_limits(monkeypatch):
  for module in (example_checks, example_batches):
    monkeypatch.setattr(module, "MAX_RECORD_BYTES", LARGEST_RECORD)


def is_one_of(bad, example):
  return tf.reduce_any(example["name"] == tf.constant(bad, tf.string, [len(bad)]))


def raise_in_python(dataset, bad):
  def look(name):
    if name.numpy().decode() in bad:
      raise ValueError(f"{name.numpy().decode()} is indigestible")
    return name

  def through_python(example):
    return {**example, "name": tf.ensure_shape(tf.py_function(look, [example["name"]], tf.string), [])}

  return dataset.map(through_python)


def assert_in_graph(dataset, bad):
  def checked(example):
    tf.debugging.Assert(~is_one_of(bad, example), ["not fit:", example["name"]])
    return example

  return dataset.map(checked, num_parallel_calls=4)


def divide(dataset, bad):
  """Gives floats of which float32 holds all, but of bad examples."""
  floats = [0.5, np.inf, np.nan, -0.0, 2.0**127]
  return dataset.map(
    lambda e: {
      **e,
      "floats": tf.constant(floats, tf.float64)
      + tf.where(is_one_of(bad, e), tf.constant(1e-9, tf.float64), 0.0),
    }
  )


def count_up(dataset, bad):
  largest = tf.constant(np.iinfo(np.int64).max, tf.uint64)
  return dataset.map(lambda e: {**e, "count": tf.where(is_one_of(bad, e), largest + 1, largest)})


def spoil(dataset, bad):
  """Texts, of which bad ones are cut within a character."""
  return dataset.map(
    lambda e: {
      **e,
      "texts": [tf.where(is_one_of(bad, e), tf.strings.substr(t, 0, 1), t) for t in ("ö", "ü€")],
    }
  )


def blow_up(dataset, bad):
  return dataset.map(lambda e: {**e, "blob": tf.repeat("x", tf.where(is_one_of(bad, e), LARGEST_RECORD, 3))})


def claim_pairs(dataset, bad):
  """Gives pairs as it says; of a bad example triples, which its tensors deny."""

  def pairs(number, is_bad):
    return np.full([number % 3 + 1, 3 if is_bad else 2], number, np.int32)

  def through_python(example):
    made = tf.numpy_function(pairs, [example["number"], is_one_of(bad, example)], tf.int32)
    made.set_shape([None, 2])
    return {**example, "pairs": made}

  return dataset.map(through_python)


# By the preprocessor that brings them: kind and feature.
IN_VALUES = {
  divide: ("float64_inexact", "floats"),
  count_up: ("integer_too_large", "count"),
  spoil: ("text_not_utf8", "texts"),
  blow_up: ("record_too_large", ""),
}
RAISING = {
  blow_up: ("record_too_large", ""),
  raise_in_python: ("preprocessor_failed", ""),
  assert_in_graph: ("preprocessor_failed", ""),
  claim_pairs: ("preprocessor_failed", ""),
}


def texts_task(name, *steps, sizes=SIZES, texts=()):
  """A task of numbered texts, which is cached as these steps make it."""
  return seqio.Task(
    name,
    source=small_tasks.NumberedTexts({"train": sizes}),
    preprocessors=[*steps, seqio.CacheDatasetPlaceholder()],
    output_features={
      name: seqio.Feature(seqio.PassThroughVocabulary(1), add_eos=False, dtype=tf.string, rank=rank)
      for name, rank in {"targets": 0, **dict(texts)}.items()
    },
  )


def in_source_order(root, task):
  """A cache's examples by source shard, each in the source's order."""
  cache = open_cache(root, task, "train")
  cache.verify()
  shards = [[None] * source.examples for source in cache.manifest.source_shards]
  for index, shard, place in zip(range(len(cache)), *cache.source_of(np.arange(len(cache))), strict=True):
    shards[shard][place] = cache[index]
  return shards


def listed_as_bad(root, task):
  """The entries of the file that lists bad examples, which the manifest counts."""
  manifest = open_cache(root, task, "train").manifest
  path = root / task / names.quarantine_name("train")
  entries = [json.loads(line) for line in path.read_text().splitlines()]
  assert manifest.description_files[2].name == path.name
  assert manifest.description_files[2].records == manifest.bad_examples == len(entries)
  return entries


def drawn_places(steps, seed, *, of_each):
  """For each step, some (source shard, place) that no other has; first and last of a batch among them."""
  everywhere = [(shard, place) for shard, size in enumerate(SIZES) for place in range(size)]
  edges = [(0, 0), (0, 511), (0, 512), (0, 514), (2, 0), (2, 39)]
  drawn = random.Random(seed).sample(edges, 4)
  rest = [place for place in everywhere if place not in drawn]
  drawn += random.Random(seed + 1).sample(rest, of_each * len(steps) - len(drawn))
  random.Random(seed + 2).shuffle(drawn)
  return {step: sorted(drawn[k :: len(steps)]) for k, step in enumerate(steps)}


@pytest.mark.parametrize("kinds", [IN_VALUES, RAISING], ids=["values", "raising"])
def test_all_but_the_bad_examples_are_cached_and_those_are_listed(tmp_path, capsys, kinds):
  places = drawn_places(list(kinds), seed=len(kinds), of_each=3)
  number = sum(map(len, places.values()))
  steps = [
    functools.partial(step, bad=tuple(f"train-{shard}-{place}" for shard, place in found))
    for step, found in places.items()
  ]
  task = texts_task("small_bad", *steps, texts={"texts": 1} if spoil in kinds else {})
  with registered(task):
    run_job(tmp_path, f"--max_bad_examples={number}", tasks=task.name)
  assert f"train: {number} bad examples were left out" in capsys.readouterr().out
  expected = [
    {"source_shard": f"train part {shard}", "place": place, "preprocessor": step.__name__,
     "kind": kinds[step][0], "feature": kinds[step][1]}
    for shard, place, step in sorted((*at, step) for step, found in places.items() for at in found)
  ]  # fmt: skip
  entries = listed_as_bad(tmp_path, task.name)
  assert [{name: entry[name] for name in expected[0]} for entry in entries] == expected
  bad = {at for found in places.values() for at in found}
  for shard, examples in enumerate(in_source_order(tmp_path, task.name)):
    good = [place for place in range(SIZES[shard]) if (shard, place) not in bad]
    assert [example["name"].item().decode() for example in examples] == [f"train-{shard}-{k}" for k in good]
    assert [int(example["number"]) for example in examples] == good
    for example in examples[::100] if claim_pairs in kinds else ():
      rows = int(example["number"]) % 3 + 1
      np.testing.assert_array_equal(example["pairs"], np.full([rows, 2], example["number"]))


def test_one_more_than_is_borne_ends_the_job_which_goes_on_where_more_are(tmp_path):
  bad = ("train-0-3", "train-0-7", "train-1-2")
  task = texts_task("small_borne", functools.partial(divide, bad=bad), sizes=(9, 8))

  def refusal(limit):
    with pytest.raises(AnystepError) as caught:
      run_job(tmp_path, f"--max_bad_examples={limit}", tasks=task.name)
    assert caught.value.code == 65
    return caught.value

  with registered(task):
    # Of one source shard, the example is named that is one too many.
    for limit, place in (0, "3"), (1, "7"):
      error = refusal(limit)
      assert error.kind == "float64_inexact"
      assert (error.fields["task"], error.fields["split"]) == (task.name, "train")
      assert (error.fields["source_shard"], error.fields["place"]) == ("train part 0", place)
      assert (error.fields["preprocessor"], error.fields["feature"]) == ("divide", "floats")
      assert "0.500000001" in error.fields["got"]
    # Of several, all of them are finished by then.
    for _ in range(2):
      error = refusal(2)
      assert (error.kind, error.fields["got"], error.fields["expected"]) == ("bad_examples", "3", "at most 2")
    error = refusal(0)
    assert error.kind == "bad_examples"
    run_job(tmp_path, "--max_bad_examples=3", tasks=task.name)
  assert [(entry["source_shard"][-1], entry["place"]) for entry in listed_as_bad(tmp_path, task.name)] == [
    ("0", 3),
    ("0", 7),
    ("1", 2),
  ]


def through_python(dataset, function, dtype=tf.int32):
  """Adds what a function makes of an example's number, of which TensorFlow does not know the shape."""
  return dataset.map(lambda e: {**e, "made": tf.numpy_function(function, [e["number"]], dtype)})


def make_squares(dataset):
  return through_python(dataset, lambda number: np.full([number % 3, 2], number, np.int32))


def make_misfits(dataset):
  """Gives pairs, but scalars, triples and pairs of pairs as well."""
  others = {3: [], 5: [4, 3], 6: [1, 2, 2], 8: [0, 3]}
  return through_python(dataset, lambda number: np.full(others.get(int(number), [2, 2]), number, np.int32))


def test_examples_whose_shapes_tensorflow_does_not_know_are_cached_whole(tmp_path):
  task = texts_task("small_unknown", make_squares, sizes=(7, 0, 5))
  with registered(task):
    run_job(tmp_path, tasks=task.name)
  shards = in_source_order(tmp_path, task.name)
  assert [len(examples) for examples in shards] == [7, 0, 5]
  for examples in shards:
    for number, example in enumerate(examples):
      np.testing.assert_array_equal(example["made"], np.full([number % 3, 2], number), strict=False)
      assert example["made"].dtype == np.int32


def test_of_examples_whose_shapes_tensorflow_does_not_know_the_first_says_what_others_must_be(tmp_path):
  task = texts_task("small_misfits", make_misfits, sizes=(10,))
  with registered(task):
    run_job(tmp_path, "--max_bad_examples=4", tasks=task.name)
  entries = listed_as_bad(tmp_path, task.name)
  assert {(entry["preprocessor"], entry["kind"], entry["feature"]) for entry in entries} == {
    ("make_misfits", "feature_form_varies", "made")
  }
  assert [(entry["place"], entry["got"]) for entry in entries] == [
    (3, "int32[]"),
    (5, "int32[None, 3]"),
    (6, "int32[None, 2, 2]"),
    (8, "int32[None, 3]"),
  ]
  (examples,) = in_source_order(tmp_path, task.name)
  assert [int(example["number"]) for example in examples] == [0, 1, 2, 4, 7, 9]


def test_large_examples_are_taken_fewer_at_a_time_and_are_the_same(tmp_path, monkeypatch):
  step = functools.partial(spoil, bad=("train-0-530",))
  task = texts_task("small_large", step, sizes=(540, 3), texts={"texts": 1})
  found = []
  for batch_bytes in (1 << 27, 4000):
    monkeypatch.setattr(example_batches, "_BATCH_BYTES", batch_bytes)
    root = tmp_path / str(batch_bytes)
    with registered(task):
      run_job(root, "--max_bad_examples=1", tasks=task.name)
    found.append(digests_of(root))
  assert found[0] == found[1]


def test_strings_are_texts_unless_they_are_a_continuous_feature():
  text = seqio.Feature(seqio.PassThroughVocabulary(1), dtype=tf.string, rank=0)
  task = seqio.Task(
    "small_bytes",
    source=small_tasks.NumberedTexts({"train": SIZES}),
    preprocessors=[],
    output_features={"text": text, "image": seqio.ContinuousFeature(dtype=tf.string, rank=0)},
  )
  names = ("text", "image", "other", "inputs_pretokenized")
  features = {name: Feature(dtype="string", shape=()) for name in names}
  assert example_checks.list_text_features(task, features) == ["inputs_pretokenized", "text"]


STOCK = ("bool", "float32", "int32", "int64", "string")
FOREIGN = ("bfloat16", "float16", "int16", "int8", "uint16", "uint32", "uint8")
EDGES = {
  "bool": [True, False, True],
  "string": [b"", b"\xff\x00", "wörter".encode()],
  **{dtype: [tf.as_dtype(dtype).min, 0, tf.as_dtype(dtype).max] for dtype in STOCK[1:4] + FOREIGN},
}


def in_forms(dtype):
  """Texts of no text but a value, a sequence, pairs and rows whose lengths differ."""
  edges = tf.constant(np.array(EDGES[dtype], tf.as_dtype(dtype).as_numpy_dtype))

  def with_forms(example):
    number = tf.cast(example["number"], tf.int32)
    values = tf.gather(edges, tf.range(2 * (number % 4) + 2) % 3)
    lengths = [number % 4, 0, number % 4 + 2]
    return {
      "number": example["number"],
      f"{dtype}_scalar": values[number % 2],
      f"{dtype}_sequence": values,
      f"{dtype}_pairs": tf.reshape(values, [-1, 2]),
      f"{dtype}_rows": tf.RaggedTensor.from_row_lengths(values, lengths),
    }

  return with_forms


def in_all_forms(dataset, dtypes):
  return dataset.map(
    lambda example: {name: value for dtype in dtypes for name, value in in_forms(dtype)(example).items()}
  )


def bits_of(value):
  """A value to the bit, whoever read it."""
  if isinstance(value, (Ragged, tf.RaggedTensor)):
    lengths = value.lengths if isinstance(value, Ragged) else value.row_lengths().numpy()
    return bits_of(value.values), lengths.tolist()
  value = value.numpy() if isinstance(value, tf.Tensor) else value
  array = np.array(value, object) if isinstance(value, bytes) else np.asarray(value)
  return array.dtype.name, array.shape, array.tolist() if array.dtype.hasobject else array.tobytes()


def by_number(examples):
  found = {int(example["number"]): {n: bits_of(v) for n, v in example.items()} for example in examples}
  return dict(sorted(found.items()))


def forms_task(step, *, size):
  source = small_tasks.NumberedTexts({"train": (size,)})
  preprocessors = [step, seqio.CacheDatasetPlaceholder()]
  return seqio.Task("small_forms", source=source, preprocessors=preprocessors, output_features={})


@pytest.fixture
def seqio_cache_dirs():
  before = list(seqio.utils.get_global_cache_dirs())
  yield seqio.set_global_cache_dirs
  seqio.set_global_cache_dirs(before)


@pytest.mark.parametrize("container", ["array_record", "tfrecord"])
def test_values_of_every_dtype_and_form_come_back_to_the_bit(tmp_path, capsys, seqio_cache_dirs, container):
  dtypes = STOCK if container == "tfrecord" else STOCK + FOREIGN
  step = functools.partial(in_all_forms, dtypes=dtypes)
  task = forms_task(step, size=40)
  expected = by_number(step(task.source.get_dataset("train", shard_info=seqio.ShardInfo(0, 1))))
  with registered(task):
    run_job(tmp_path, f"--output_format={container}", tasks=task.name)
  (examples,) = in_source_order(tmp_path, task.name)
  assert by_number(examples) == expected
  assert len(expected) == 40
  if container == "tfrecord":
    assert "stock SeqIO cannot read" not in capsys.readouterr().out
    seqio_cache_dirs([str(tmp_path)])
    assert by_number(task.get_dataset(split="train", use_cached=True, shuffle=False)) == expected


def test_dtypes_that_seqio_cannot_parse_are_said_where_it_could_read_the_rest(tmp_path, capsys):
  step = functools.partial(in_all_forms, dtypes=("int8", "float32"))
  task = forms_task(step, size=3)
  with registered(task):
    run_job(tmp_path, "--output_format=tfrecord", tasks=task.name)
  (line,) = [line for line in capsys.readouterr().out.splitlines() if "stock SeqIO cannot read" in line]
  for name in "int8_scalar", "int8_sequence", "int8_pairs", "int8_rows":
    assert name in line
  assert "float32_" not in line
