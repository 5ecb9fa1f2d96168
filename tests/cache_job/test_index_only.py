"""Layout as_is over the files of a task's source: what readers accept, with nothing copied."""

import json
import os

import caches
import numpy as np
import pytest
import seqio
import small_tasks
import tensorflow as tf
from array_record.python import array_record_module
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from job_runs import digests_of, registered, run_job, stamps_of

import anystep
from anystep.cache_job.index_only import _tfrecord_offsets
from anystep.containers import ARRAY_RECORD, CONTAINERS, write_array_record, write_tfrecord
from anystep.errors import AnystepError
from anystep.tasks.fingerprint import check_reader

NAME = "indexed"
SIZES = (3, 0, 7, 5)
KINDS = {"int32": tf.int64, "int64": tf.int64, "float32": tf.float32}


def records_of(path):
  """All records of a file, read by the container's own library."""

  def read(name):
    if name.endswith(ARRAY_RECORD.encode()):
      return np.array(array_record_module.ArrayRecordReader(name.decode()).read_all(), object)
    return np.array([r.numpy() for r in tf.data.TFRecordDataset(name.decode())], object)

  return tf.data.Dataset.from_tensor_slices(
    tf.ensure_shape(tf.numpy_function(read, [path], tf.string), [None])
  )


def parsed(record):
  specs = {
    name: tf.io.FixedLenSequenceFeature(f.shape[1:], KINDS[f.dtype], allow_missing=True)
    if f.sequence
    else tf.io.FixedLenFeature(f.shape, KINDS[f.dtype])
    for name, f in caches.FEATURES.items()
  }
  example = tf.io.parse_single_example(record, specs)
  return {name: tf.cast(value, caches.FEATURES[name].dtype) for name, value in example.items()}


def read_as_it_is(path):
  return records_of(path).map(parsed)


def read_and_change(path):
  return read_as_it_is(path).map(lambda example: {**example, "number": example["number"] + 1})


def task_of(pattern, *, read=read_as_it_is, before=(), name=NAME):
  return seqio.Task(
    name,
    source=seqio.FileDataSource(read, {"train": pattern}),
    preprocessors=[*before, seqio.CacheDatasetPlaceholder(), seqio.preprocessors.append_eos],
    output_features={"targets": seqio.Feature(seqio.PassThroughVocabulary(5000, eos_id=1))},
  )


def pattern_of(root, container):
  return str(root / "corpus" / NAME / f"train-part*.{container}")


def write_source(root, container, sizes=SIZES, block_records=1):
  """Files below root/corpus and nothing else; the cache that describes them is in another root."""
  reference = caches.build_as_is(
    root.with_name(f"{root.name}_reference"),
    task=NAME,
    shard_sizes=sizes,
    container=container,
    block_records=block_records,
  )
  for path in (reference.root / "corpus" / NAME).iterdir():
    copy = root / "corpus" / NAME / path.name
    copy.parent.mkdir(parents=True, exist_ok=True)
    copy.write_bytes(path.read_bytes())
  return reference


def index(root, *flags, task=None, container=ARRAY_RECORD):
  task = task or task_of(pattern_of(root, container))
  with registered(task):
    run_job(root, "--index_only", *flags, tasks=task.name)


@pytest.fixture(scope="module", params=CONTAINERS)
def indexed(request, tmp_path_factory):
  """A root that was indexed, and the cache that must have come of it."""
  root = tmp_path_factory.mktemp("indexed")
  reference = write_source(root, request.param, block_records=2)
  before = stamps_of(root)
  index(root, "--block_records=2", container=request.param)
  after = stamps_of(root)
  assert all(after[path] == stamp for path, stamp in before.items() if path.is_file())
  return root, reference


def test_the_manifest_is_that_of_the_files_and_nothing_is_copied(indexed):
  root, reference = indexed
  document = json.loads((root / NAME / "manifest.train.json").read_text())
  expected = reference.manifest
  said_by_the_writer = document["container"].pop("options")
  assert all(option in said_by_the_writer for option in expected["container"].pop("options").split(","))
  for found in (document, expected):
    del found["fingerprint"]
  assert document == expected
  own = {path.name for path in (root / NAME).iterdir()}
  assert own == {"COMPLETED", "manifest.train.json"} | {
    f["name"] for f in document["files"].get("offsets", [])
  }


def test_the_cache_is_opened_verified_and_read(indexed):
  root, reference = indexed
  cache = anystep.open_cache(root, NAME, "train")
  cache.verify()
  check_reader(task_of("unread"), cache.manifest)
  assert len(cache) == len(reference.examples)
  for found, expected in zip(map(cache.__getitem__, range(len(cache))), reference.examples, strict=True):
    assert found.keys() == expected.keys()
    assert all(caches.same_array(found[name], expected[name]) for name in expected)


def test_a_stream_gives_the_rows_that_the_order_specification_says(indexed):
  root, reference = indexed
  cache = anystep.open_cache(root, NAME, "train")
  plan = anystep.Plan.start(cache, batch_size=4, feature_lengths=caches.FEATURE_LENGTHS, num_epochs=2)
  with anystep.open_stream(plan, root) as stream:
    digests = [anystep.batch_digest(batch) for batch in stream]
  expected = [
    caches.oracle_digest(
      caches.expected_batch(reference, step, batch_size=4, num_epochs=2, epoch_policy="global")
    )
    for step in range(len(digests))
  ]
  assert len(digests) == -(-2 * sum(SIZES) // 4)
  assert digests == expected


def test_run_again_it_leaves_the_index_and_refuses_to_cache_over_it(indexed, capsys):
  root, reference = indexed
  before = stamps_of(root)
  container = reference.manifest["container"]["name"]
  index(root, container=container)
  assert "the cache is complete" in capsys.readouterr().out
  with registered(task_of(pattern_of(root, container))), pytest.raises(AnystepError) as caught:
    run_job(root, tasks=NAME)
  assert (caught.value.code, caught.value.kind) == (76, "cache_options")
  assert (caught.value.fields["option"], caught.value.fields["got"]) == ("layout", "as_is")
  assert stamps_of(root) == before


def test_made_anew_it_describes_what_the_files_have_become(tmp_path):
  root = tmp_path / "root"
  for sizes in (SIZES, (2, 9)):
    for path in tmp_path.glob("*/corpus/*/*"):
      path.unlink()
    reference = write_source(root, "tfrecord", sizes)
    # SeqIO lists the files of a pattern once in a process.
    files = [str(root / entry["name"]) for entry in reference.manifest["files"]["records"]]
    index(root, "--overwrite", task=task_of(files))
    anystep.open_cache(root, NAME, "train").verify()
    document = json.loads((root / NAME / "manifest.train.json").read_text())
    assert document["files"] == reference.manifest["files"]
    assert len(list((root / NAME).glob("*-offsets.npy"))) == len(sizes)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(records=st.lists(st.binary(max_size=40)))
def test_offsets_are_those_of_the_writer_and_a_file_cut_anywhere_is_refused(tmp_path, records):
  path = anystep.cache.epath.Path(tmp_path / "file.tfrecord")
  offsets = write_tfrecord(path, records)
  found = _tfrecord_offsets(path)
  assert found.dtype == np.uint64
  np.testing.assert_array_equal(found, offsets)
  whole = path.read_bytes()
  for size in {len(whole) - 1, len(whole) - 5, len(whole) // 2} - set(offsets.tolist()):
    if 0 < size < len(whole):
      path.write_bytes(whole[:size])
      with pytest.raises(AnystepError, match="file_container"):
        _tfrecord_offsets(path)


def refused(root, code, kind, *, task):
  before = digests_of(root)
  with pytest.raises(AnystepError) as caught:
    index(root, task=task)
  assert (caught.value.code, caught.value.kind) == (code, kind)
  assert caught.value.fix
  assert digests_of(root) == before
  return caught.value


class TestRefused:
  @pytest.fixture(autouse=True)
  def source(self, tmp_path):
    self.root = tmp_path / "root"
    write_source(self.root, "tfrecord", (2, 3))
    self.pattern = pattern_of(self.root, "tfrecord")

  def test_is_a_source_without_files(self):
    task = small_tasks.task("small_fileless", before=(), sizes={"train": (2,)})
    error = refused(self.root, 78, "source_not_files", task=task)
    assert error.fields["got"] == "NumberedTexts"

  def test_is_a_preprocessor_that_would_have_had_to_run_before(self):
    task = task_of(self.pattern, before=(small_tasks.split_and_drop,))
    error = refused(self.root, 78, "preprocessor_before_cache", task=task)
    assert error.fields["preprocessor"] == "split_and_drop"

  def test_is_a_file_outside_the_root(self, tmp_path):
    outside = tmp_path / "outside.tfrecord"
    os.rename(next(self.root.rglob("train-part0.*")), outside)
    error = refused(self.root, 78, "file_outside_root", task=task_of([self.pattern, str(outside)]))
    assert error.fields["path"] == str(outside)

  def test_is_a_file_whose_name_no_manifest_may_have(self):
    path = next(self.root.rglob("train-part0.*"))
    path.rename(path.with_name("a b.tfrecord"))
    refused(self.root, 77, "file_name", task=task_of(str(path.with_name("*"))))

  def test_is_a_source_that_makes_something_else_of_its_records(self):
    refused(self.root, 78, "source_decodes", task=task_of(self.pattern, read=read_and_change))

  def test_is_a_source_of_records_that_are_no_examples(self):
    write_tfrecord(next(self.root.rglob("train-part0.*")), [b"\xffno example"])
    task = task_of(self.pattern, read=lambda path: records_of(path).map(lambda record: {"text": record}))
    refused(self.root, 78, "source_decodes", task=task)

  def test_is_a_file_of_another_container_or_of_none(self):
    path = next(self.root.rglob("train-part1.*"))
    write_array_record(path, [b"record"], options="group_size:1")
    error = refused(self.root, 65, "file_container", task=task_of(self.pattern))
    assert str(error.fields["path"]) == str(path)
    path.write_text("no records\n" * 9)
    refused(self.root, 65, "file_container", task=task_of(self.pattern))
