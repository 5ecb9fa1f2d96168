"""Layout as_is over the files of a task's source: what readers accept, with nothing copied."""

import json

import caches
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import seqio
import small_tasks
import tensorflow as tf
from array_record.python import array_record_module
from etils import epath
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from job_runs import digests_of, registered, run_job, stamps_of

import anystep
from anystep.cache_job.completion.index_only import _find_tfrecord_offsets
from anystep.caches.manifest import AS_IS, FileEntry, Manifest, SourceShard
from anystep.containers.checked_file import part_checksums, part_table
from anystep.containers.containers import ARRAY_RECORD, CONTAINERS, PARQUET, write_array_record
from anystep.containers.tfrecord import write_tfrecord
from anystep.errors import AnystepError
from anystep.tasks.registry.fingerprint import check_reader
from anystep.tasks.sources import ParquetDataSource

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


AFTER_CACHE = (seqio.CacheDatasetPlaceholder(), seqio.preprocessors.append_eos)


def task_of(pattern, *, read=read_as_it_is, before=(), after=AFTER_CACHE, name=NAME, columns=None):
  split_to_filepattern = {"train": pattern}
  if str(pattern).endswith(PARQUET):
    source = ParquetDataSource(split_to_filepattern, columns)
  else:
    source = seqio.FileDataSource(read, split_to_filepattern)
  return seqio.Task(
    name,
    source=source,
    preprocessors=[*before, *after],
    output_features={"targets": seqio.Feature(seqio.PassThroughVocabulary(5000, eos_id=1))},
  )


def pattern_of(root, container):
  return str(root / "corpus" / NAME / f"train-part*.{container}")


def write_source(root, container, sizes=SIZES, block_records=1):
  """Files below root/corpus and nothing else; the cache that describes them is in another root."""
  if container == PARQUET:
    return write_parquet(root, sizes, group_rows=block_records)
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


COLUMNS = {
  "inputs": pa.list_(pa.int32()),
  "number": pa.int64(),
  "targets": pa.large_list(pa.int32()),
  "weights": pa.list_(pa.list_(pa.float32(), 2)),
}


def write_parquet(root, sizes=SIZES, *, group_rows=2, **options):
  """Files with a row for each example, and the manifest of a cache that describes them."""
  examples = [caches.example_of(ordinal) for ordinal in range(sum(sizes))]
  record_files, offsets_files, start = [], [], 0
  for shard, size in enumerate(sizes):
    path = root / caches.as_is_name(NAME, "train", PARQUET, shard)
    path.parent.mkdir(parents=True, exist_ok=True)
    own = examples[start : start + size]
    columns = {name: pa.array([e[name].tolist() for e in own], kind) for name, kind in COLUMNS.items()}
    pq.write_table(pa.table(columns), path, row_group_size=group_rows, **options)
    content = path.read_bytes()
    record_files.append(FileEntry.of(path.relative_to(root).as_posix(), size, content))
    parts = part_table(part_checksums(content))
    name = f"train.parquet-{shard:05d}-of-{len(sizes):05d}-offsets.npy"
    offsets_files.append(FileEntry.of(name, len(parts), caches.npy(parts)))
    start += size
  manifest = Manifest(
    layout=AS_IS,
    task=NAME,
    split="train",
    seed=0,
    num_examples=sum(sizes),
    num_shards=len(sizes),
    block_records=min(group_rows, max(sizes)),
    container=PARQUET,
    container_options="",
    features=caches.FEATURES,
    record_files=record_files,
    lengths_files=[],
    offsets_files=offsets_files,
    description_files=[],
    source_shards=[SourceShard(name=entry.name, examples=entry.records) for entry in record_files],
    fingerprint=caches.fingerprint_of(NAME),
  )
  folder = root.with_name(f"{root.name}_reference")
  reference = caches.SmallCache(root=folder, task=NAME, split="train", examples=examples)
  reference.directory.mkdir(parents=True)
  caches.sign(reference.directory, "train", manifest.to_json())
  return reference


def index(root, *flags, task=None, container=ARRAY_RECORD):
  task = task or task_of(pattern_of(root, container))
  with registered(task):
    run_job(root, "--index_only", *flags, tasks=task.name)


@pytest.fixture(scope="module", params=[*CONTAINERS, PARQUET])
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


def test_files_elsewhere_are_linked_and_read_through_their_links(tmp_path):
  reference = write_source(tmp_path / "files", "tfrecord")
  task = task_of(pattern_of(tmp_path / "files", "tfrecord"))
  index(tmp_path / "root", task=task)
  cache = anystep.open_cache(tmp_path / "root", NAME, "train")
  cache.verify()
  assert {path.parent for path in (tmp_path / "root" / "linked").rglob("*") if path.is_symlink()} == {
    tmp_path / "root" / "linked" / NAME
  }
  for index_, example in enumerate(reference.examples):
    for name, values in cache[index_].items():
      assert caches.same_array(values, np.asarray(example[name])), (index_, name)
  next(path for path in (tmp_path / "files").rglob("train-part0.*")).write_bytes(b"changed")
  with pytest.raises(AnystepError) as refused_:
    anystep.open_cache(tmp_path / "root", NAME, "train").verify()
  assert refused_.value.code == 65


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
  path = epath.Path(tmp_path / "file.tfrecord")
  offsets = write_tfrecord(path, records)
  found = _find_tfrecord_offsets(path)
  assert found.dtype == np.uint64
  np.testing.assert_array_equal(found, offsets)
  whole = path.read_bytes()
  for size in {len(whole) - 1, len(whole) - 5, len(whole) // 2} - set(offsets.tolist()):
    if 0 < size < len(whole):
      path.write_bytes(whole[:size])
      with pytest.raises(AnystepError, match="file_container"):
        _find_tfrecord_offsets(path)


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

  def test_is_a_file_on_a_store_that_is_not_below_the_root(self, monkeypatch):
    task = task_of(self.pattern)
    monkeypatch.setattr(task.source, "list_shards", lambda split: ["gs://bucket/train-part0.tfrecord"])
    error = refused(self.root, 78, "file_outside_root", task=task)
    assert error.fields["path"] == "gs://bucket/train-part0.tfrecord"

  def test_is_a_task_that_does_not_say_what_runs_at_reading(self):
    without_placeholder = task_of(self.pattern, after=(seqio.preprocessors.append_eos,))
    error = refused(self.root, 78, "preprocessor_before_cache", task=without_placeholder)
    assert error.fields["preprocessor"] == "append_eos"


def numbers_of(root):
  cache = anystep.open_cache(root, NAME, "train")
  return [int(cache[index]["number"]) for index in range(len(cache))]


def test_a_task_without_preprocessors_needs_no_placeholder(tmp_path):
  root = tmp_path / "root"
  write_source(root, "tfrecord", (2, 3))
  index(root, task=task_of(pattern_of(root, "tfrecord"), after=()))
  assert numbers_of(root) == list(range(5))


def digests_of_stream(root, policy="global", **pool):
  cache = anystep.open_cache(root, NAME, "train", pool=anystep.ReadPool(**pool))
  plan = anystep.Plan.start(
    cache, batch_size=4, feature_lengths=caches.FEATURE_LENGTHS, num_epochs=2, epoch_policy=policy
  )
  with anystep.open_stream(plan, {NAME: cache}) as stream:
    return [anystep.batch_digest(batch) for batch in stream]


class TestParquet:
  @pytest.fixture(autouse=True)
  def source(self, tmp_path):
    self.root = tmp_path / "root"
    self.pattern = pattern_of(self.root, PARQUET)

  def path_of(self, shard):
    return self.root / caches.as_is_name(NAME, "train", PARQUET, shard)

  def test_a_block_is_as_large_as_the_largest_row_group(self):
    write_parquet(self.root, (9, 4), group_rows=5)
    index(self.root, "--block_records=3", task=task_of(self.pattern))
    assert anystep.open_cache(self.root, NAME, "train").manifest.block_records == 5
    assert numbers_of(self.root) == list(range(13))

  def test_columns_that_the_source_leaves_out_are_not_in_records(self):
    write_parquet(self.root, (3, 4))
    index(self.root, task=task_of(self.pattern, columns=["targets", "number"]))
    cache = anystep.open_cache(self.root, NAME, "train")
    assert [sorted(cache[index]) for index in range(7)] == [["number", "targets"]] * 7

  @pytest.mark.parametrize("policy", ["same", "reshuffle", "global"])
  def test_the_order_is_the_specification_s_whether_or_not_blocks_can_be_held(self, policy):
    reference = write_parquet(self.root, group_rows=3)
    index(self.root, task=task_of(self.pattern))
    steps = range(-(-2 * sum(SIZES) // 4))
    order = {"batch_size": 4, "num_epochs": 2, "epoch_policy": policy}
    expected = [caches.oracle_digest(caches.expected_batch(reference, step, **order)) for step in steps]
    for pool in ({}, {"budget_bytes": 1, "open_files": 1}):
      assert digests_of_stream(self.root, policy, **pool) == expected

  def test_the_order_is_that_of_the_same_rows_in_tfrecord(self, tmp_path):
    write_parquet(self.root, group_rows=3)
    index(self.root, task=task_of(self.pattern))
    write_source(tmp_path / "other", "tfrecord")
    index(tmp_path / "other", container="tfrecord")
    assert digests_of_stream(self.root) == digests_of_stream(tmp_path / "other")

  def test_a_changed_row_group_is_an_error_when_it_is_read_and_when_all_is_verified(self):
    # Beyond the head that is checked when the file is opened.
    write_parquet(self.root, (4000,), group_rows=1000, compression="none", use_dictionary=False)
    index(self.root, task=task_of(self.pattern))
    caches.flip(self.path_of(0), self.path_of(0).read_bytes().index(np.arange(2000, 2003).tobytes()))
    cache = anystep.open_cache(self.root, NAME, "train")
    for action, kind in ((lambda: cache[2001], "shard_corrupt"), (cache.verify, "file_changed")):
      with pytest.raises(AnystepError) as caught:
        action()
      assert (caught.value.code, caught.value.kind) == (65, kind)
      assert str(caught.value.fields["path"]) == str(self.path_of(0))

  def test_a_file_cut_short_is_an_error_before_and_after_it_is_indexed(self):
    write_parquet(self.root)
    whole = self.path_of(2).read_bytes()
    self.path_of(2).write_bytes(whole[:-20])
    error = refused(self.root, 65, "file_container", task=task_of(self.pattern))
    assert str(error.fields["path"]) == str(self.path_of(2))
    self.path_of(2).write_bytes(whole)
    index(self.root, task=task_of(self.pattern))
    self.path_of(2).write_bytes(whole[:-20])
    with pytest.raises(AnystepError, match="file_size"):
      anystep.open_cache(self.root, NAME, "train")

  def test_files_of_other_columns_are_refused(self):
    write_parquet(self.root, (3, 2))
    other = pa.table({"inputs": [[1.5]], "number": [1], "targets": [[1]], "weights": [[1]]})
    pq.write_table(other, self.path_of(1))
    error = refused(self.root, 78, "files_differ", task=task_of(self.pattern))
    assert (error.fields["feature"], str(error.fields["path"])) == ("inputs", str(self.path_of(1)))

  @pytest.mark.parametrize(
    ("column", "code", "kind"),
    [
      (pa.array([1.0, 2.0], pa.float64()), 78, "feature_form"),
      (pa.array([1, 2], pa.timestamp("s")), 78, "feature_form"),
      (pa.array([1, None]), 65, "column_null"),
    ],
    ids=["float64", "timestamp", "null"],
  )
  def test_a_column_that_records_cannot_hold_is_refused_by_name(self, column, code, kind):
    self.path_of(0).parent.mkdir(parents=True)
    pq.write_table(pa.table({"targets": [[1], [2]], "odd": column}), self.path_of(0))
    assert refused(self.root, code, kind, task=task_of(self.pattern)).fields["feature"] == "odd"
    index(self.root, task=task_of(self.pattern, columns=["targets"]))

  def test_another_source_of_the_files_may_leave_out_columns_but_add_none(self):
    write_parquet(self.root, (3, 2))
    rows_of = ParquetDataSource({"train": self.pattern})._reader

    def task(change):
      source = seqio.FileDataSource(lambda path: rows_of(path).map(change), {"train": self.pattern})
      output_features = {"targets": seqio.Feature(seqio.PassThroughVocabulary(5000))}
      return seqio.Task(
        NAME, source=source, preprocessors=[seqio.CacheDatasetPlaceholder()], output_features=output_features
      )

    more = task(lambda row: {**row, "more": row["number"]})
    assert "more" in refused(self.root, 78, "source_decodes", task=more).fields["got"]
    changed = task(lambda row: {**row, "number": row["number"] + 1})
    refused(self.root, 78, "source_decodes", task=changed)
    index(self.root, task=task(lambda row: {"number": row["number"], "targets": row["targets"]}))
    assert numbers_of(self.root) == list(range(5))
