"""What T5X is given are the plan's batches, from the step on that it resumes at."""

import types

import caches
import numpy as np
import pytest
import seqio
import tensorflow as tf

from anystep import t5x
from anystep.errors import AnystepError
from anystep.features.converters import EncoderDecoderConverter
from anystep.features.digest import batch_digest
from anystep.plans.plan import Plan
from anystep.streams.stream import open_stream
from anystep.tasks.registry.fingerprint import fingerprint

NAME, LENGTHS, BATCH_SIZE, NUM_EXAMPLES = "t5x_face", {"inputs": 5, "targets": 4}, 12, 50
VOCABULARY = seqio.PassThroughVocabulary(size=2000)
TASK = seqio.TaskRegistry.add(
  NAME,
  source=seqio.FunctionDataSource(lambda split, shuffle_files: None, splits=["train"]),
  preprocessors=[seqio.CacheDatasetPlaceholder()],
  output_features={name: seqio.Feature(VOCABULARY, add_eos=False) for name in LENGTHS},
)
seqio.MixtureRegistry.add(f"{NAME}_mixture", [(NAME, 1)])


@pytest.fixture(scope="module")
def built(tmp_path_factory):
  made = caches.build(tmp_path_factory.mktemp("t5x"), task=NAME, num_examples=NUM_EXAMPLES)
  own = fingerprint(TASK, cache_at="placeholder", task_feature_lengths=None, seed=0, base_seed=0)
  entry = {"reader_sha256": own.reader_sha256, "reader": own.reader, "provenance": own.provenance}
  caches.tamper(made, lambda document: document.update(fingerprint=entry))
  return made


@pytest.fixture(autouse=True)
def cache_dirs(built):
  """SeqIO's cache directories for one test."""
  before = list(seqio.utils.get_global_cache_dirs())
  seqio.set_global_cache_dirs([str(built.root)])
  yield
  seqio.set_global_cache_dirs(before)


def config(**changes):
  """What T5X's own DatasetConfig has."""
  fields = {
    "mixture_or_task_name": NAME,
    "task_feature_lengths": LENGTHS,
    "split": "train",
    "batch_size": BATCH_SIZE,
    "shuffle": True,
    "seed": None,
    "use_cached": True,
    "pack": False,
    "use_custom_packing_ops": False,
    "module": None,
    **changes,
  }
  return types.SimpleNamespace(**fields)


def batches(cfg, shard_id=0, num_shards=1, count=None, **arguments):
  """Called as T5X's trainer calls, and by its names."""
  dataset = t5x.get_deterministic_dataset(
    cfg, shard_id, num_shards, seqio.EncDecFeatureConverter, **arguments
  )
  for spec in dataset.element_spec.values():
    assert spec.shape.as_list()[0] == cfg.batch_size // num_shards
    assert spec.shape.is_fully_defined()
  return list((dataset if count is None else dataset.take(count)).as_numpy_iterator())


def planned(built, **arguments):
  """Digests of the plan's own batches."""
  plan = Plan.start(built.open(), batch_size=BATCH_SIZE, feature_lengths=LENGTHS, **arguments)
  with open_stream(plan, built.root, feature_converter=EncoderDecoderConverter()) as stream:
    return [batch_digest(stream.batch(step)) for step in range(plan.num_steps or 7)]


def digests(several):
  return [batch_digest(batch) for batch in several]


def test_packed_batches_are_the_plans_from_any_step(built, tmp_path):
  lengths = {"inputs": 12, "targets": 10}
  plan = Plan.start(built.open(), batch_size=4, feature_lengths=lengths, num_epochs=2, packing="best_fit")
  with open_stream(plan, built.root, feature_converter=EncoderDecoderConverter()) as stream:
    expected = [stream.batch(step) for step in range(plan.num_steps)]
  assert max(batch["decoder_segment_ids"].max() for batch in expected) > 1
  (tmp_path / "checkpoint_3").mkdir()
  cfg = config(pack=True, task_feature_lengths=lengths, batch_size=4)
  assert digests(batches(cfg, num_epochs=2, model_dir=tmp_path)) == digests(expected[3:])


@pytest.mark.parametrize(
  ("changes", "num_epochs", "options"),
  [
    ({"seed": np.int32(3)}, 2, {"seed": 3, "num_epochs": 2}),
    ({"shuffle": False, "mixture_or_task_name": f"{NAME}_mixture"}, None, {"epoch_policy": "same"}),
    (lambda root: {"mixture_or_task_name": f"{root}/{NAME},0.3"}, 2, {"num_epochs": 2}),
  ],
)
def test_hosts_rows_are_together_the_plan_s_batches(built, changes, num_epochs, options):
  if callable(changes):
    changes = changes(built.root)
  expected = planned(built, **options)
  for num_shards in (1, 3):
    hosts = [
      batches(
        config(**changes),
        shard_id,
        num_shards,
        count=len(expected) + (num_epochs is not None),
        num_epochs=num_epochs,
        continue_from_last_checkpoint=False,
      )
      for shard_id in range(num_shards)
    ]
    joined = [
      {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
      for parts in zip(*hosts, strict=True)
    ]
    assert digests(joined) == expected


def test_a_resumed_run_goes_on_at_the_newest_checkpoint(built, tmp_path):
  whole = digests(batches(config(), num_epochs=2, model_dir=tmp_path / "none"))
  assert len(whole) == -(-2 * NUM_EXAMPLES // BATCH_SIZE)
  for step in range(1, len(whole)):
    (tmp_path / f"checkpoint_{step}").mkdir()
    for unfinished in (f"checkpoint_{step + 90}.tmp-1", f"checkpoint_{step + 90}x", "checkpoint_"):
      (tmp_path / unfinished).mkdir(exist_ok=True)
    # The newest counts, as a number: of 9 and 10 it is 10.
    for older in range(0, step, 4):
      (tmp_path / f"checkpoint_{older}").mkdir(exist_ok=True)
    # Fine-tuning names the step it began at; what it saved since counts.
    resumed = batches(config(), num_epochs=2, model_dir=str(tmp_path), start_step=2)
    assert digests(resumed) == whole[step:]


def test_a_run_without_a_checkpoint_starts_where_it_is_told(built, tmp_path):
  whole = digests(batches(config(), num_epochs=2, continue_from_last_checkpoint=False))
  (tmp_path / "checkpoint_5").mkdir()
  for start_step in (0, 3, len(whole) - 1):
    told = {"num_epochs": 2, "start_step": start_step}
    fresh = batches(config(), model_dir=tmp_path / "none", **told)
    ignoring = batches(config(), model_dir=tmp_path, continue_from_last_checkpoint=False, **told)
    assert digests(fresh) == digests(ignoring) == whole[start_step:]


def test_t5x_s_own_checkpoint_of_the_data_is_the_step(built, tmp_path):
  dataset = t5x.get_deterministic_dataset(
    config(), 0, 1, seqio.EncDecFeatureConverter, model_dir=tmp_path, start_step=4
  )
  iterator = iter(dataset)
  for _ in range(3):
    next(iterator)
  path = tf.train.Checkpoint(ds=iterator).write(str(tmp_path / "train_ds"))
  other = iter(dataset)
  tf.train.Checkpoint(ds=other).read(path).assert_consumed()
  for _ in range(5):
    one, again = next(iterator), next(other)
    assert batch_digest(tf.nest.map_structure(np.asarray, one)) == batch_digest(
      tf.nest.map_structure(np.asarray, again)
    )


def test_features_without_a_length_come_as_they_are(built):
  dataset = t5x.get_deterministic_dataset(
    config(), 0, 1, seqio.PassThroughFeatureConverter, continue_from_last_checkpoint=False
  )
  plan = Plan.start(built.open(), batch_size=BATCH_SIZE, feature_lengths=LENGTHS)
  with open_stream(plan, built.root) as stream:
    for made, expected in zip(dataset.take(3), stream, strict=False):
      assert made["inputs"].shape == (BATCH_SIZE, LENGTHS["inputs"])
      assert np.array_equal(made["weights"].values, expected["weights"].values)
      assert np.array_equal(made["weights"].row_lengths(), expected["weights"].lengths)


def test_the_task_s_module_is_imported_first(tmp_path):
  with pytest.raises(AnystepError) as caught:
    batches(config(module="no_such_module_of_tasks"), model_dir=tmp_path)
  assert caught.value.kind == "module_import"


@pytest.mark.parametrize(
  ("changes", "arguments", "kind", "fix"),
  [
    ({"use_cached": False}, {"model_dir": "."}, "use_cached", "USE_CACHED_TASKS = True"),
    ({}, {}, "model_dir", "model_dir = %MODEL_DIR"),
    ({}, {"num_shards": 5, "model_dir": "nowhere"}, "rows", "[1, 2, 3, 4, 6, 12]"),
    ({}, {"num_epochs": 1, "start_step": 5, "model_dir": "nowhere"}, "data_ended", "epochs"),
  ],
)
def test_what_cannot_be_is_refused(tmp_path, changes, arguments, kind, fix):
  with pytest.raises(AnystepError) as caught:
    batches(config(**changes), **arguments)
  assert (caught.value.code, caught.value.kind) == (78, kind)
  assert fix in caught.value.fix
