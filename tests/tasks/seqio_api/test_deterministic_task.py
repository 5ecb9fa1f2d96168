"""SeqIO's own callers get the order specification's examples."""

import itertools

import caches
import numpy as np
import pytest
import seqio
import tensorflow as tf

import anystep
import oracle
from anystep.errors import AnystepError
from anystep.features.feature import Feature
from anystep.tasks.registry.fingerprint import fingerprint

VOCABULARY = seqio.ByteVocabulary(extra_ids=10)
FEATURES = {
  "inputs": Feature(dtype="int32", shape=(None,)),
  "number": Feature(dtype="int64", shape=()),
  "targets": Feature(dtype="int32", shape=(None,)),
  "text": Feature(dtype="string", shape=()),
}
LENGTHS = {"inputs": 5, "targets": 4}
MIXTURE, RATES = "faces_mixture", {"faces:one": 2, "faces_two": 0.5}
# Two reads of 256 rows an epoch, the second of them short.
NUM_EXAMPLES = {"faces:one": 300, "faces_two": 41}


def example_of(ordinal):
  return {
    "inputs": np.arange(ordinal % 7, dtype=np.int32) + 3,
    "number": np.int64(ordinal),
    "targets": np.arange((ordinal + 3) % 6, dtype=np.int32) + 20,
    "text": b"\0%d" % ordinal,
  }


@seqio.map_over_dataset(num_seeds=1)
def draw(example, seed):
  return {**example, "drawn": tf.stack(seed)}


def postprocess(decoded, example, is_target):
  return VOCABULARY.decode(example["targets"].tolist()) if is_target else decoded


def exact_match(targets, predictions):
  return {"exact": float(np.mean([t == p for t, p in zip(targets, predictions, strict=True)]))}


def source(split, shuffle_files, seed=None):
  return tf.data.Dataset.from_tensors({"inputs": [3], "number": np.int64(7), "targets": [4], "text": "x"})


def add_task(name, preprocessors):
  return seqio.TaskRegistry.add(
    name,
    source=seqio.FunctionDataSource(source, splits=["train"]),
    preprocessors=[seqio.CacheDatasetPlaceholder(), *preprocessors],
    output_features={name: seqio.Feature(VOCABULARY, add_eos=True) for name in ("inputs", "targets")},
    postprocess_fn=postprocess,
    metric_fns=[exact_match],
    task_cls=anystep.DeterministicTask,
  )


TASKS = {
  "faces:one": add_task("faces:one", [seqio.preprocessors.append_eos]),
  "faces_two": add_task("faces_two", [draw, seqio.preprocessors.append_eos]),
}
seqio.MixtureRegistry.add(MIXTURE, list(RATES.items()), mixture_cls=anystep.DeterministicMixture)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
  """By task name, a cache that its registered task fits."""
  root = tmp_path_factory.mktemp("faces")
  made = {}
  for name, size in NUM_EXAMPLES.items():
    made[name] = caches.build(root, task=name, num_examples=size, features=FEATURES, example_of=example_of)
    own = fingerprint(TASKS[name], cache_at="placeholder", task_feature_lengths=None, seed=0, base_seed=0)
    entry = {"reader_sha256": own.reader_sha256, "reader": own.reader, "provenance": own.provenance}
    caches.tamper(made[name], lambda document, entry=entry: document.update(fingerprint=entry))
  return made


@pytest.fixture(autouse=True)
def cache_dirs(built):
  """SeqIO's cache directories for one test."""
  before = list(seqio.utils.get_global_cache_dirs())
  seqio.set_global_cache_dirs([str(next(iter(built.values())).root)])
  for task in TASKS.values():
    task._cache_dir = None
  yield
  seqio.set_global_cache_dirs(before)


def order_of(cache, num_units, **order):
  """(epoch, index) of a task's first units."""
  rows = oracle.what_was_at(cache.manifest, num_units, 0, 1, lanes=1, **order)
  return [(row["epoch"], row["examples"][0]["index"]) for row in rows]


def numbers(dataset, count=None):
  dataset = dataset if count is None else dataset.take(count)
  return [int(example["number"]) for example in dataset.as_numpy_iterator()]


class TestTask:
  @pytest.mark.parametrize(
    ("shuffle", "num_epochs", "seed", "num_shards"),
    [(True, 2, 3, 3), (False, 2, None, 1), (True, None, None, 2), (False, -1, 5, 7)],
  )
  def test_gives_a_shard_every_num_shards_th_unit(self, built, shuffle, num_epochs, seed, num_shards):
    name = "faces:one"
    cache, ends = built[name], num_epochs not in (None, -1)
    count = num_epochs * NUM_EXAMPLES[name] if ends else 700
    policy = "reshuffle" if shuffle else "same"
    order = order_of(cache, count, seed=seed or 0, epoch_policy=policy)
    expected = [int(cache.examples[index]["number"]) for _, index in order]
    for index in range(num_shards):
      info = seqio.ShardInfo(index, num_shards) if num_shards > 1 else None
      dataset = TASKS[name].get_dataset(
        LENGTHS, "train", use_cached=True, shuffle=shuffle, num_epochs=num_epochs, seed=seed, shard_info=info
      )
      own = expected[index::num_shards]
      assert numbers(dataset, None if ends else len(own)) == own

  def test_gives_what_the_preprocessors_make_of_each_record(self, built):
    """Draws are those of the record's index and epoch; sequences are trimmed; other features pass."""
    cache, seed = built["faces_two"], 9
    dataset = TASKS["faces_two"].get_dataset(LENGTHS, use_cached=True, num_epochs=2, seed=seed)
    rows = list(dataset.as_numpy_iterator())
    order = order_of(cache, 82, seed=seed)
    assert len(rows) == len(order)
    for row, (epoch, index) in zip(rows, order, strict=True):
      assert row.keys() == {*FEATURES, "drawn"}
      raw = cache.examples[index]
      (pair,) = oracle.map_seeds("faces_two", "train", seed, epoch, 0, index, 1)
      assert tuple(row["drawn"]) == pair
      assert row["text"] == raw["text"]
      for name, length in LENGTHS.items():
        np.testing.assert_array_equal(row[name], [*raw[name], VOCABULARY.eos_id][:length])
        assert row[name].dtype == np.int32

  def test_is_left_untrimmed_when_asked(self, built):
    dataset = TASKS["faces:one"].get_dataset(
      LENGTHS, use_cached=True, shuffle=False, trim_output_features=False
    )
    assert {name: spec.shape.rank for name, spec in dataset.element_spec.items()} == {
      "inputs": 1,
      "number": 0,
      "targets": 1,
      "text": 0,
    }
    for row, raw in zip(dataset.take(20).as_numpy_iterator(), built["faces:one"].examples, strict=False):
      np.testing.assert_array_equal(row["inputs"], [*raw["inputs"], VOCABULARY.eos_id])

  def test_goes_on_from_a_tf_data_checkpoint(self, built, tmp_path):
    dataset = TASKS["faces:one"].get_dataset(LENGTHS, use_cached=True, num_epochs=None)
    iterator = iter(dataset)
    for _ in range(297):
      next(iterator)
    path = tf.train.Checkpoint(data=iterator).write(str(tmp_path / "state"))
    tail = [int(next(iterator)["number"]) for _ in range(300)]
    other = iter(dataset)
    tf.train.Checkpoint(data=other).read(path).assert_consumed()
    assert [int(next(other)["number"]) for _ in range(300)] == tail

  def test_is_seqio_s_own_without_the_cache(self):
    (row,) = TASKS["faces:one"].get_dataset(LENGTHS).as_numpy_iterator()
    assert (row["number"], row["inputs"].tolist()) == (7, [3, VOCABULARY.eos_id])

  def test_is_of_its_class_when_replaced(self):
    for name, task in TASKS.items():
      renamed = task.replace(name="renamed", preprocessors=[seqio.preprocessors.append_eos])
      assert type(renamed) is anystep.DeterministicTask
      assert (renamed.name, list(renamed.preprocessors)) == ("renamed", [seqio.preprocessors.append_eos])
      same = task.replace()
      assert same.name == name
      for attribute in ("source", "output_features", "preprocessors", "postprocessor", "shuffle_buffer_size"):
        assert getattr(same, attribute) == getattr(task, attribute), attribute
      assert same.metric_fns == [exact_match]


def mixture_order(built, count):
  """Numbers of the mixture's first rows, as the specification places them."""
  names, quotas, _ = oracle.quotas(RATES)
  tasks = {name: {"quota": q, "first_unit": 0} for name, q in zip(names, quotas, strict=True)}
  segment = {"start_step": 0, "batch_size": count, "lanes": 1, "first_stripe": 0, "tasks": tasks}
  rows = []
  for name, unit in oracle.batch_rows(segment, 0):
    manifest = built[name].manifest
    sizes = oracle.records_per_shard(manifest)
    _, shard, place = oracle.locate(unit, sizes, manifest["block_records"], name, "train", 0, "reshuffle")
    rows.append((name, place * manifest["num_shards"] + shard))
  return [int(built[name].examples[index]["number"]) for name, index in rows]


class TestMixture:
  def test_gives_a_shard_every_num_shards_th_row(self, built):
    """One epoch ends with the task whose examples end first: 41 at a fifth of the rows."""
    expected = mixture_order(built, 300)
    shards = []
    for index in range(2):
      mixture = seqio.MixtureRegistry.get(MIXTURE)
      info = seqio.ShardInfo(index, 2)
      dataset = mixture.get_dataset(
        LENGTHS, use_cached=True, num_epochs=1, shard_info=info, passthrough_features=["number"]
      )
      assert dataset.element_spec.keys() == {"inputs", "number", "targets"}
      shards.append(numbers(dataset))
    whole = [n for pair in itertools.zip_longest(*shards) for n in pair if n is not None]
    assert whole == expected[: len(whole)]
    is_of_two = oracle.draws(*oracle.quotas(RATES)[1:], 0, len(whole))
    assert (sum(is_of_two), is_of_two[-1]) == (41, 1)

  def test_feeds_seqio_s_get_dataset(self, built):
    dataset = seqio.get_dataset(
      MIXTURE,
      LENGTHS,
      seqio.EncDecFeatureConverter(pack=False),
      use_cached=True,
      shuffle=True,
      num_epochs=None,
      batch_size=8,
    )
    batch = next(iter(dataset))
    assert batch["encoder_input_tokens"].shape == (8, 5)
    for row, number in zip(batch["decoder_target_tokens"].numpy(), mixture_order(built, 8), strict=True):
      targets = [*example_of(number)["targets"], VOCABULARY.eos_id][:4]
      assert row.tolist() == targets + [0] * (4 - len(targets))

  def test_is_seqio_s_own_without_the_cache(self):
    dataset = seqio.MixtureRegistry.get(MIXTURE).get_dataset(LENGTHS, num_epochs=1)
    assert {tuple(row) for row in dataset.as_numpy_iterator()} == {("inputs", "targets")}


def test_seqio_s_evaluator_sees_each_example_once(built):
  evaluator = seqio.Evaluator(
    "faces:one",
    seqio.EncDecFeatureConverter(pack=False),
    eval_split="train",
    use_cached=True,
    num_examples=20,
  )
  seen = []

  def predict(dataset, *unused, **unused_too):
    for place, features in dataset.as_numpy_iterator():
      targets = features["decoder_target_tokens"]
      seen.append(targets[targets > 0].tolist())
      # Wrong for the first of them.
      yield place, targets if place else np.full_like(targets, 100)

  results, _ = evaluator.evaluate(
    compute_metrics=True, predict_fn=lambda *arguments, **named: list(predict(*arguments, **named))
  )
  assert results.result()["faces:one"]["exact"] == pytest.approx(19 / 20)
  raw = built["faces:one"].examples[:20]
  assert seen == [[*example["targets"], VOCABULARY.eos_id] for example in raw]


class TestRefused:
  def error_of(self, provider, **arguments):
    with pytest.raises(AnystepError) as caught:
      provider.get_dataset(LENGTHS, use_cached=True, **arguments)
    return caught.value

  def test_is_a_task_without_cache_directories(self):
    seqio.set_global_cache_dirs([])
    error = self.error_of(TASKS["faces:one"])
    assert (error.code, error.kind, error.fields["task"]) == (78, "cache_dirs", "faces:one")
    assert "seqio.add_global_cache_dirs" in error.fix

  def test_is_a_task_without_a_cache_with_the_command_that_makes_it(self, tmp_path):
    seqio.set_global_cache_dirs([str(tmp_path)])
    error = self.error_of(TASKS["faces:one"])
    assert (error.code, error.kind) == (66, "cache_missing")
    assert f"anystep-cache --tasks=faces:one --output_cache_dir={tmp_path}" in error.fix

  @pytest.mark.parametrize("content", ["", "COMPLETED"])
  def test_is_a_cache_of_seqio_s_own_job_with_the_command_that_makes_ours(self, tmp_path, content):
    directory = tmp_path / "faces" / "one"
    directory.mkdir(parents=True)
    (directory / "COMPLETED").write_text(content)
    seqio.set_global_cache_dirs([str(tmp_path)])
    error = self.error_of(TASKS["faces:one"])
    assert error.fields["path"] == directory / "COMPLETED"
    if content:
      assert (error.code, error.kind) == (66, "cache_of_seqio")
      assert "anystep-cache --tasks=faces:one" in error.fix

  def test_is_a_damaged_cache_as_what_it_is(self, built, tmp_path):
    directory = tmp_path / "faces" / "one"
    directory.mkdir(parents=True)
    (directory / "COMPLETED").write_text("damaged")
    (directory / "manifest.train.json").write_text("{}")
    seqio.set_global_cache_dirs([str(tmp_path)])
    assert self.error_of(TASKS["faces:one"]).kind == "completed_invalid"

  def test_is_a_task_that_is_not_the_cached_one(self):
    features = {name: seqio.Feature(VOCABULARY, add_eos=False) for name in ("inputs", "targets")}
    error = self.error_of(TASKS["faces:one"].replace(output_features=features))
    assert (error.code, error.kind) == (76, "task_changed")

  @pytest.mark.parametrize(("index", "num_shards"), [(2, 2), (-1, 2), (0, 0)])
  def test_is_a_shard_that_is_not_there(self, index, num_shards):
    error = self.error_of(TASKS["faces:one"], shard_info=seqio.ShardInfo(index, num_shards))
    assert (error.code, error.kind) == (78, "shard_info")

  def test_is_a_split_that_no_task_of_a_mixture_has(self):
    error = self.error_of(seqio.MixtureRegistry.get(MIXTURE), split="test")
    assert (error.code, error.kind, error.fields["expected"]) == (78, "split", "train")
