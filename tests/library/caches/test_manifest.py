"""A manifest is the same bytes for the same split, and one that contradicts itself is refused."""

import dataclasses
import hashlib
import json

import caches
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import oracle
from anystep.caches.manifest import FileEntry, Fingerprint, Manifest, shard_sizes
from anystep.errors import AnystepError
from anystep.features.feature import Feature
from anystep.files.json_files import canonical_json

TEXT = caches.manifest_of().to_json()
TFRECORD_TEXT = caches.manifest_of(container="tfrecord").to_json()
AS_IS_TEXT = caches.manifest_as_is_of().to_json()
AS_IS_TFRECORD_TEXT = caches.manifest_as_is_of(container="tfrecord").to_json()


def refused_document(change, text=TEXT):
  document = json.loads(text)
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
    caches.manifest_of(container="tfrecord"),
    caches.manifest_of(container="tfrecord", num_examples=0, num_shards=1),
    caches.manifest_as_is_of(),
    caches.manifest_as_is_of(container="tfrecord"),
    caches.manifest_as_is_of(task="a:b", shard_sizes=(0,), block_records=1),
    caches.manifest_as_is_of(shard_sizes=(2**40, 0, 2**40), block_records=100),
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


@pytest.mark.parametrize(
  ("manifest", "sha256"),
  [
    (caches.manifest_of(), "fdb66b80d035222b98ade27499d424f0f8377f1d46ee81665ec3da3e29a080d4"),
    (
      caches.manifest_of(
        num_examples=3,
        num_shards=2,
        cache_at="end",
        task_feature_lengths={"inputs": 512},
        range_examples=10,
        base_seed=3,
        seed=2**40,
      ),
      "56e55515dc6443bc02d9dfeccdd42e7b1e0e3f7490fec620e12f1b26ef3af9ed",
    ),
  ],
)
def test_a_preshuffled_array_record_caches_manifest_is_the_same_bytes_for_ever(manifest, sha256):
  assert hashlib.sha256(manifest.to_json().encode()).hexdigest() == sha256


@pytest.mark.parametrize("text", [TEXT, AS_IS_TEXT])
def test_offsets_are_named_for_tfrecord_alone(text):
  assert set(json.loads(text)["files"]) == {"records", "lengths", "descriptions"}


def test_a_tfrecord_caches_files_are_its_records_lengths_and_offsets():
  manifest = caches.manifest_of(container="tfrecord", num_shards=2)
  assert json.loads(manifest.to_json())["container"] == {"name": "tfrecord", "options": ""}
  assert [(file.name, file.records) for file in manifest.files] == [
    ("train.tfrecord-00000-of-00002", 25),
    ("train.tfrecord-00001-of-00002", 25),
    ("train.lengths-00000-of-00002.npy", 25),
    ("train.lengths-00001-of-00002.npy", 25),
    ("train.tfrecord-00000-of-00002-offsets.npy", 25),
    ("train.tfrecord-00001-of-00002-offsets.npy", 25),
    ("info.train.json", 1),
    ("stats.train.json", 1),
  ]


def test_layout_as_is_describes_files_that_stand_elsewhere():
  manifest = caches.manifest_as_is_of(shard_sizes=(3, 0), container="tfrecord")
  files = [("corpus/demo/train-part0.tfrecord", 3), ("corpus/demo/train-part1.tfrecord", 0)]
  offsets = [
    ("train.tfrecord-00000-of-00002-offsets.npy", 3),
    ("train.tfrecord-00001-of-00002-offsets.npy", 0),
  ]
  assert [(file.name, file.records) for file in manifest.files] == files + offsets
  assert [(shard.name, shard.examples) for shard in manifest.source_shards] == files
  assert (manifest.layout, manifest.num_examples, manifest.num_shards) == ("as_is", 3, 2)


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
    changed("format_version", to=3),
    changed("format_version", to="1"),
    changed("order_version", to=2),
  ],
)
def test_another_version_is_refused_with_both_sides(change):
  error = refused_document(change)
  assert (error.code, error.kind) == (65, "manifest_version")
  assert error.fields["path"] == "demo/manifest.train.json"
  assert error.fields["expected"] == ("anystep-cache", (1, 2), 1)
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


OF_TFRECORD = [
  (("layout",), "as_is"),
  (("num_shards",), 3),
  (("container", "name"), "array_record"),
  (("files", "offsets"), []),
  (("files", "offsets", 1, "records"), 12),
  (("files", "offsets", 0, "name"), "train.tfrecord-00001-of-00004-offsets.npy"),
  (("files", "offsets", 0, "name"), "../train.tfrecord-00000-of-00004-offsets.npy"),
  (("files", "records", 0, "name"), "train.array_record-00000-of-00004"),
]
OF_AS_IS = [
  (("layout",), "preshuffled"),
  (("seed",), 1),
  (("base_seed",), 1),
  (("range_examples",), 5),
  (("task_feature_lengths",), {"inputs": 5}),
  (("num_examples",), 14),
  (("num_shards",), 3),
  (("num_shards",), 0),
  (("files", "records", 0, "records"), 4),
  (("files", "records", 0, "records"), -3),
  (("files", "records", 0, "name"), "corpus/another"),
  (("files", "records"), []),
  (("files", "lengths"), [dataclasses.asdict(FileEntry.of(f"{k}", 1, b"")) for k in range(4)]),
  (("files", "descriptions"), [dataclasses.asdict(FileEntry.of("info.train.json", 1, b""))]),
  (("source_shards", 0, "name"), "corpus/another"),
  (("source_shards", 0, "examples"), 4),
  (("source_shards",), []),
]


@pytest.mark.parametrize(
  ("text", "path", "value"),
  [(TFRECORD_TEXT, *fact) for fact in OF_TFRECORD]
  + [(AS_IS_TEXT, *fact) for fact in OF_AS_IS]
  + [(AS_IS_TFRECORD_TEXT, *fact) for fact in OF_AS_IS]
  + [(AS_IS_TFRECORD_TEXT, ("files", "offsets"), []), (AS_IS_TEXT, ("container", "name"), "tfrecord")],
)
def test_facts_of_containers_and_layouts_that_contradict_each_other_are_refused(text, path, value):
  error = refused_document(changed(*path, to=value), text)
  assert (error.code, error.kind) == (65, "manifest_invalid")


@pytest.mark.parametrize("text", [TEXT, AS_IS_TEXT])
@pytest.mark.parametrize("offsets", [[], json.loads(TFRECORD_TEXT)["files"]["offsets"]], ids=["none", "some"])
def test_offsets_without_tfrecord_are_refused(text, offsets):
  error = refused_document(changed("files", "offsets", to=offsets), text)
  assert (error.code, error.kind) == (65, "manifest_invalid")


@pytest.mark.parametrize(
  "change",
  [
    lambda document: document["files"]["offsets"].reverse(),
    lambda document: document["files"]["offsets"].pop(),
    lambda document: document["files"].pop("offsets"),
    lambda document: document["files"]["offsets"].append(document["files"]["offsets"][0]),
  ],
)
@pytest.mark.parametrize("text", [TFRECORD_TEXT, AS_IS_TFRECORD_TEXT])
def test_offsets_that_are_not_the_shards_are_refused(text, change):
  assert refused_document(change, text).kind == "manifest_invalid"


@pytest.mark.parametrize("text", [TEXT, TFRECORD_TEXT])
def test_shards_of_other_sizes_than_the_order_gives_are_refused(text):
  def change(document):
    for kind in {"records", "lengths", "offsets"} & set(document["files"]):
      entries = document["files"][kind]
      entries[1]["records"], entries[2]["records"] = entries[2]["records"], entries[1]["records"]

  error = refused_document(change, text)
  assert (error.code, error.kind) == (65, "manifest_invalid")
  assert "files.records" in error.fields["got"]


@pytest.mark.parametrize("text", [AS_IS_TEXT, AS_IS_TFRECORD_TEXT])
def test_files_as_they_are_may_stand_in_any_order_and_more_than_once(text):
  document = json.loads(text)
  for files in (document["files"]["records"], document["source_shards"]):
    files[1], files[2], files[3] = files[2], files[1], files[2]
  for entry, records in zip(document["files"].get("offsets", []), (3, 7, 0, 7), strict=False):
    entry["records"] = records
  document["num_examples"] = 17
  assert Manifest.from_json(json.dumps(document)).shard_records.tolist() == [3, 7, 0, 7]


@pytest.mark.parametrize(
  "name",
  [
    "/etc/passwd", "../corpus/a", "corpus/../../a", "corpus/..", "corpus//a", "corpus/", "", ".", "corpus/.a",
    "corpus\\..\\a", "corpus/a b", "corpus/a\n", "gs://bucket/a", "~/a", "corpus/-a", "ä", None, 3,
  ],
)  # fmt: skip
@pytest.mark.parametrize("shard", [0, 3])
def test_a_file_outside_the_root_is_refused(name, shard):
  def change(document):
    document["files"]["records"][shard]["name"] = name
    document["source_shards"][shard]["name"] = name

  error = refused_document(change, AS_IS_TEXT)
  assert (error.code, error.kind) == (77, "file_name")
  assert error.fields["got"] == repr(name)


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


@pytest.mark.parametrize("text", [TEXT, TFRECORD_TEXT, AS_IS_TEXT, AS_IS_TFRECORD_TEXT])
@pytest.mark.parametrize("split", ["../train", "a/b", ".", "", "/train", "tr ain", 3])
def test_a_split_that_is_a_path_is_refused(split, text):
  def change(document):
    document["split"] = split
    for files in document["files"].values():
      for entry in files:
        if document["layout"] == "preshuffled" or files is not document["files"]["records"]:
          entry["name"] = entry["name"].replace("train", str(split))

  error = refused_document(change, text)
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
    (("num_examples",), 10**30),
    (("files", "records", 0, "records"), 10**30),
    (("container", "options"), None),
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


@given(
  st.sampled_from([TEXT, AS_IS_TFRECORD_TEXT]),
  st.sampled_from(sorted(set(json.loads(TEXT)) - {"num_shards"})),
  JSON,
)
@settings(deadline=None, max_examples=300, derandomize=True)
def test_anything_else_in_any_place_is_read_or_refused_as_foreseen(text, key, value):
  assert outcome_of(json.dumps(json.loads(text) | {key: value})) in {
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


@pytest.mark.parametrize(
  "manifest",
  [
    caches.manifest_of(),
    caches.manifest_of(num_examples=0, num_shards=1),
    caches.manifest_of(num_examples=3, num_shards=7, container="tfrecord"),
    caches.manifest_as_is_of(),
    caches.manifest_as_is_of(shard_sizes=(0, 0, 2**50), container="tfrecord"),
  ],
)
def test_records_of_each_shard_are_the_oracles(manifest):
  assert manifest.shard_records.dtype == np.int64
  assert manifest.shard_records.tolist() == oracle.records_per_shard(json.loads(manifest.to_json()))


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
