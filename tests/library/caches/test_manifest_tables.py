"""The manifest of a large cache has tables beside it, and says what one without them says."""

import dataclasses
import json
import pickle

import caches
import numpy as np
import pytest

from anystep.caches.cache import open_cache
from anystep.caches.manifest import Manifest
from anystep.errors import AnystepError
from anystep.files import names


@pytest.fixture
def large(monkeypatch):
  """Every cache counts as large."""
  monkeypatch.setattr("anystep.caches.manifest.LARGE_ROWS", 1)


def put(directory, manifest):
  """Writes a manifest and its tables; returns the manifest's path and text."""
  manifest, tables = manifest.with_tables()
  for name, content in tables.items():
    (directory / name).write_bytes(content)
  path = directory / names.manifest_name(manifest.split)
  path.write_text(manifest.to_json())
  return path, manifest.to_json()


MANIFESTS = [
  caches.manifest_of(),
  caches.manifest_of(num_examples=0, num_shards=1),
  caches.manifest_of(num_examples=3, num_shards=7, block_records=100),
  caches.manifest_of(container="tfrecord"),
]


@pytest.mark.parametrize("manifest", MANIFESTS)
def test_a_manifest_with_tables_says_the_same_as_one_without(manifest, large, tmp_path):
  path, text = put(tmp_path, manifest)
  again = Manifest.from_json(text, path=path)
  assert (again.format_version, again.to_json()) == (2, text)
  for field in dataclasses.fields(Manifest):
    one, other = getattr(again, field.name), getattr(manifest, field.name)
    if field.name != "table_files":
      assert list(one) == list(other) if field.name.endswith(("files", "source_shards")) else one == other
  assert np.array_equal(again.shard_records, manifest.shard_records)
  assert again.record_files[-1] == manifest.record_files[-1]
  assert again.record_files[:2] == list(manifest.record_files[:2])
  assert again.files == [*manifest.files, *again.table_files]


def test_small_caches_and_files_as_they_are_have_no_tables(monkeypatch):
  manifest = caches.manifest_of()
  assert manifest.with_tables() == (manifest, {})
  monkeypatch.setattr("anystep.caches.manifest.LARGE_ROWS", 1)
  as_is = caches.manifest_as_is_of()
  assert as_is.with_tables() == (as_is, {})
  assert manifest.with_tables()[0].format_version == 2


def test_a_cache_with_tables_is_read_by_index_pickled_and_verified(large, tmp_path):
  small = caches.build(tmp_path)
  without_tables = small.open()
  _, text = put(small.directory, without_tables.manifest)
  caches.sign(small.directory, small.split, text)
  cache = open_cache(small.root, small.task, small.split)
  assert cache.manifest.format_version == 2
  cache.verify()
  indices = np.arange(len(cache))
  for one, other in zip(cache.source_of(indices), without_tables.source_of(indices), strict=True):
    assert np.array_equal(one, other)
  copy = pickle.loads(pickle.dumps(cache))
  for index in (0, len(cache) - 1):
    assert all(np.array_equal(copy[index][name], value) for name, value in without_tables[index].items())


@pytest.mark.parametrize("place", range(3))
def test_a_table_that_is_damaged_or_gone_is_named(place, large, tmp_path):
  path, text = put(tmp_path, caches.manifest_of())
  table = tmp_path / names.table_names("train")[place]
  content = table.read_bytes()
  table.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))

  def read():
    return list(Manifest.from_json(text, path=path).source_shards)

  with pytest.raises(AnystepError, match=rf"code=65 kind=file_changed path=\S*{table.name}"):
    read()
  table.unlink()
  with pytest.raises(AnystepError, match=rf"code=65 kind=file_missing path=\S*{table.name}"):
    read()


def test_tables_that_contradict_the_manifest_are_refused(large, tmp_path):
  path, text = put(tmp_path, caches.manifest_of(num_examples=10, num_shards=4))
  for change in (
    {"num_examples": 11},
    {"num_shards": 5},
    {"source_shards": []},
    {"files": {**json.loads(text)["files"], "tables": []}},
    {"files": {**json.loads(text)["files"], "records": []}},
    {"format_version": 1},
  ):
    with pytest.raises(AnystepError, match="kind=manifest_invalid"):
      Manifest.from_json(json.dumps(json.loads(text) | change), path=path)
