"""A manifest is the same bytes for the same split, and one that contradicts itself is refused."""

import dataclasses
import hashlib
import json

import caches
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import oracle
from anystep.errors import AnystepError
from anystep.manifest import (
  Feature,
  FileEntry,
  Fingerprint,
  Manifest,
  canonical_json,
  default_num_shards,
  shard_sizes,
)

TEXT = caches.manifest_of().to_json()


def refused_document(change):
  document = json.loads(TEXT)
  change(document)
  with pytest.raises(AnystepError) as refused:
    Manifest.from_json(json.dumps(document), path="demo/manifest.train.json")
  return refused.value


def changed(*path, to):
  """A change of the JSON document at a path."""

  def change(document):
    for key in path[:-1]:
      document = document[key]
    document[path[-1]] = to

  return change


def removed(*path):
  def change(document):
    for key in path[:-1]:
      document = document[key]
    del document[path[-1]]

  return change


@pytest.mark.parametrize(
  "manifest",
  [
    caches.manifest_of(),
    caches.manifest_of(num_examples=0, num_shards=1),
    caches.manifest_of(num_examples=3, num_shards=7, block_records=100),
    caches.manifest_of(cache_at="end", task_feature_lengths={"inputs": 512}, range_examples=10, base_seed=3),
    caches.manifest_of(task="Zürich:a", seed=2**40),
  ],
)
def test_a_manifest_comes_back_from_its_json_to_the_byte(manifest):
  text = manifest.to_json()
  again = Manifest.from_json(text)
  assert again.to_json() == text
  assert text.encode("ascii").endswith(b"}\n")
  for field in dataclasses.fields(Manifest):
    one, other = getattr(again, field.name), getattr(manifest, field.name)
    assert list(one) == list(other) if field.name.endswith(("files", "source_shards")) else one == other


def test_json_does_not_depend_on_the_order_in_which_features_are_named():
  features = dict(reversed(caches.FEATURES.items()))
  assert caches.manifest_of(features=features).to_json() == TEXT


def test_the_file_states_versions_and_what_the_order_specification_needs():
  document = json.loads(TEXT)
  versions = {"format": "anystep-cache", "format_version": 1, "order_version": 1}
  numbers = {"layout": "preshuffled", "task": "demo", "split": "train", "seed": 0, "base_seed": 0}
  sizes = {"num_examples": 50, "num_shards": 4, "block_records": 4}
  assert document | versions | numbers | sizes == document
  assert document["features"]["inputs"] == {"dtype": "int32", "shape": [None], "sequence": True}
  assert document["features"]["number"] == {"dtype": "int64", "shape": [], "sequence": False}


@pytest.mark.parametrize(
  "change",
  [
    changed("format", to="seqio"),
    changed("format_version", to=2),
    changed("format_version", to="1"),
    changed("order_version", to=2),
  ],
)
def test_another_version_is_refused_with_both_sides(change):
  error = refused_document(change)
  assert (error.code, error.kind) == (65, "manifest_version")
  assert error.fields["path"] == "demo/manifest.train.json"
  assert error.fields["expected"] == ("anystep-cache", 1, 1)
  document = json.loads(TEXT)
  change(document)
  assert error.fields["got"] == tuple(document[k] for k in ("format", "format_version", "order_version"))


COUNTS = [
  (("num_examples",), 49),
  (("num_examples",), -1),
  (("num_examples",), "50"),
  (("num_examples",), None),
  (("num_shards",), 3),
  (("num_shards",), 0),
  (("num_shards",), -4),
  (("block_records",), 0),
  (("block_records",), -1),
  (("files", "records", 0, "records"), 12),
  (("files", "lengths", 3, "records"), 13),
  (("source_shards", 0, "examples"), 24),
  (("source_shards",), []),
]
OTHER_FACTS = [
  (("layout",), "as_is"),
  (("cache_at",), "start"),
  (("task",), 3),
  (("features",), []),
  (("features", "inputs"), "int32"),
  (("fingerprint",), {}),
  (("fingerprint", "reader", "task"), "another"),
  (("fingerprint", "reader_sha256"), "0" * 64),
  (("files",), {}),
  (("files", "records"), []),
  (("files", "descriptions"), []),
  (("container",), "array_record"),
]


@pytest.mark.parametrize(("path", "value"), COUNTS + OTHER_FACTS)
def test_facts_that_contradict_each_other_are_refused(path, value):
  error = refused_document(changed(*path, to=value))
  assert (error.code, error.kind) == (65, "manifest_invalid")
  assert error.fields["path"] == "demo/manifest.train.json"
  assert error.fields["got"]


def test_a_split_of_no_shards_is_none():
  with pytest.raises(ValueError, match=r"inconsistent num_shards$"):
    caches.manifest_of(num_examples=0, num_shards=0)


@pytest.mark.parametrize(
  "change",
  [
    lambda document: document["files"]["records"].reverse(),
    lambda document: document["files"]["lengths"].reverse(),
    lambda document: document["files"]["descriptions"].reverse(),
    lambda document: document["files"]["records"].pop(),
    lambda document: document["files"]["lengths"].append(document["files"]["lengths"][0]),
    lambda document: document["files"].update(records=document["files"]["lengths"]),
  ],
)
def test_files_out_of_their_order_are_refused(change):
  assert refused_document(change).kind == "manifest_invalid"


@pytest.mark.parametrize(
  "name", ["../train.array_record-00000-of-00004", "/etc/passwd", "a/b", "..", "", None]
)
@pytest.mark.parametrize("files", ["records", "lengths", "descriptions"])
def test_names_that_are_paths_are_refused(files, name):
  error = refused_document(changed("files", files, 0, "name", to=name))
  assert (error.code, error.kind) == (65, "manifest_invalid")


@pytest.mark.parametrize("split", ["../train", "a/b", ".", "", "/train", "tr ain", 3])
def test_a_split_that_is_a_path_is_refused(split):
  def change(document):
    document["split"] = split
    for files in document["files"].values():
      for entry in files:
        entry["name"] = entry["name"].replace("train", str(split))

  error = refused_document(change)
  assert (error.code, error.kind) == (77, "split_name")
  assert error.fields["got"] == repr(split)


@pytest.mark.parametrize("container", ["x/../../array_record", "parquet", ""])
def test_a_container_that_nobody_reads_is_refused(container):
  def change(document):
    document["container"]["name"] = container
    for entry in document["files"]["records"]:
      entry["name"] = entry["name"].replace("array_record", container)

  assert refused_document(change).code in (65, 77)


@pytest.mark.parametrize(
  "path", [("files", "records", 0), ("files", "descriptions", 1), ("source_shards", 0)]
)
def test_unknown_keys_of_files_and_shards_are_refused(path):
  assert refused_document(changed(*path, "unknown", to=1)).kind == "manifest_invalid"


@pytest.mark.parametrize(
  "path", [(), ("container",), ("features", "inputs"), ("fingerprint",), ("files",)], ids=str
)
def test_unknown_keys_are_refused(path):
  assert refused_document(changed(*path, "unknown", to=1)).kind == "manifest_invalid"


@pytest.mark.parametrize(
  ("path", "value"),
  [
    (("num_examples",), 50.0),
    (("block_records",), 4.0),
    (("block_records",), True),
    (("seed",), None),
    (("seed",), "0"),
    (("base_seed",), 0.5),
    (("features", "inputs", "dtype"), "int33"),
    (("features", "inputs", "sequence"), False),
    (("files", "records", 0, "bytes"), "0"),
    (("num_shards",), 10**15),
  ],
)
def test_values_of_another_type_or_beyond_all_measure_are_refused(path, value):
  assert refused_document(changed(*path, to=value)).kind == "manifest_invalid"


@pytest.mark.parametrize("key", sorted(json.loads(TEXT)))
def test_missing_keys_are_refused(key):
  assert refused_document(removed(key)).kind == "manifest_invalid"


@pytest.mark.parametrize("text", ["", "null", "3", "[]", "{}", '"anystep-cache"', TEXT[:-20], "\0", "NaN"])
def test_text_that_is_no_manifest_is_refused(text):
  with pytest.raises(AnystepError) as refused:
    Manifest.from_json(text, path="somewhere")
  assert (refused.value.code, refused.value.kind) == (65, "manifest_invalid")
  assert refused.value.fields["path"] == "somewhere"


JSON = st.recursive(
  st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.floats(allow_nan=False) | st.text(max_size=5),
  lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
  max_leaves=5,
)


@given(st.sampled_from(sorted(set(json.loads(TEXT)) - {"num_shards"})), JSON)
@settings(deadline=None, max_examples=150, derandomize=True)
def test_anything_else_in_any_place_is_read_or_refused_as_foreseen(key, value):
  assert outcome_of(json.dumps(json.loads(TEXT) | {key: value})) in {
    "read",
    (65, "manifest_invalid"),
    (65, "manifest_version"),
    (77, "split_name"),
  }


def outcome_of(text):
  try:
    Manifest.from_json(text)
  except AnystepError as error:
    return error.code, error.kind
  return "read"


@pytest.mark.parametrize(
  ("num_examples", "num_shards"), [(0, 1), (1, 1), (10, 4), (3, 7), (64, 8), (1001, 64)]
)
def test_shard_sizes_are_the_oracles(num_examples, num_shards):
  manifest = {"layout": "preshuffled", "num_examples": num_examples, "num_shards": num_shards}
  assert shard_sizes(num_examples, num_shards).tolist() == oracle.records_per_shard(manifest)


@pytest.mark.parametrize("block_records", [1, 7, 32])
def test_default_shards_are_the_oracles(block_records):
  for num_examples in (0, 1, 64 * block_records - 1, 64 * block_records, 10**12):
    expected = oracle.default_num_shards(num_examples, block_records)
    assert default_num_shards(num_examples, block_records) == expected


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, 10_000])
def test_a_file_is_described_by_its_bytes_and_the_first_4096(size):
  content = bytes(k % 251 for k in range(size))
  entry = FileEntry.of("name", 3, content)
  assert (entry.name, entry.records, entry.bytes) == ("name", 3, size)
  assert entry.sha256 == hashlib.sha256(content).hexdigest()
  assert entry.head_sha256 == hashlib.sha256(content[:4096]).hexdigest()


def test_columns_of_lengths_tables_are_the_sequences_in_name_order():
  features = dict(reversed(caches.FEATURES.items()))
  assert caches.manifest_of(features=features).sequence_features == ["inputs", "targets", "weights"]
  assert Feature(dtype="int32", shape=(None, 2)).sequence
  assert not Feature(dtype="int32", shape=()).sequence


def test_a_fingerprint_is_named_by_its_reader_part_alone():
  names = {
    Fingerprint(reader=reader, provenance=provenance).reader_sha256
    for reader in ({"a": 1, "b": [2]}, {"b": [2], "a": 1})
    for provenance in ({}, {"version": "2"})
  }
  assert len(names) == 1
  assert Fingerprint(reader={"a": 2, "b": [2]}, provenance={}).reader_sha256 not in names


@given(JSON)
@settings(deadline=None, max_examples=50, derandomize=True)
def test_canonical_json_is_one_text_for_equal_values(value):
  def backwards(v):
    if isinstance(v, dict):
      return {name: backwards(v[name]) for name in reversed(v)}
    return [backwards(item) for item in v] if isinstance(v, list) else v

  for indent in (None, 1, 2):
    text = canonical_json(value, indent=indent)
    assert text.isascii()
    assert json.loads(text) == value
    assert canonical_json(backwards(value), indent=indent) == text


def test_canonical_json_refuses_what_json_does_not_know():
  with pytest.raises(ValueError, match="Out of range"):
    canonical_json(float("nan"))
