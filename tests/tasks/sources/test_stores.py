"""Sources, and vocabularies, whose files are on a store give what they give of local files."""

import gzip
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import seqio
from etils import epath
from store_servers.fixtures import store_root

from anystep.containers.containers import write_array_record
from anystep.errors import AnystepError
from anystep.records.writing import serialize_example
from anystep.tasks.sources import (
  ArrayRecordDataSource,
  JsonLinesDataSource,
  ParquetDataSource,
  TextDataSource,
)
from anystep.tasks.vocabularies.files import find_file, watch_models

LINES = [f"line {number}" for number in range(20)]


def write_text(path):
  path.write_text("\n".join(LINES) + "\n")


def write_gzip(path):
  path.write_bytes(gzip.compress("\n".join(LINES).encode()))


def write_json(path):
  path.write_text("".join(json.dumps({"text": line, "number": k}) + "\n" for k, line in enumerate(LINES)))


def write_parquet(path):
  pq.write_table(pa.table({"text": LINES, "number": list(range(20))}), path)


def write_records(path):
  records = [serialize_example({"number": np.array([k], np.int64)}) for k in range(20)]
  write_array_record(path, records, options="group_size:4,zstd:1")


SOURCES = {
  "text": (TextDataSource, "a.txt", write_text),
  "gzip": (TextDataSource, "a.txt.gz", write_gzip),
  "whole": (lambda patterns: TextDataSource(patterns, whole_files=True), "a.txt", write_text),
  "json": (JsonLinesDataSource, "a.jsonl", write_json),
  "parquet": (ParquetDataSource, "a.parquet", write_parquet),
  "array_record": (ArrayRecordDataSource, "a.array_record", write_records),
}


@pytest.fixture(scope="module")
def bucket():
  with store_root("s3") as path:
    yield path


@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.parametrize("pattern", ["{}", "*"])
def test_a_source_on_a_store_gives_what_a_local_one_gives(bucket, tmp_path, kind, pattern):
  make, name, write = SOURCES[kind]
  write(tmp_path / name)
  remote = epath.Path(bucket) / tmp_path.name
  (remote / name).write_bytes((tmp_path / name).read_bytes())
  local_source, remote_source = (
    make({"train": f"{root}/{pattern.format(name)}"}) for root in (tmp_path, remote)
  )
  assert read(remote_source) == read(local_source)
  assert remote_source.described() == local_source.described()
  shards = [
    [shard.rpartition("/")[2] for shard in s.list_shards("train")] for s in (remote_source, local_source)
  ]
  assert shards[0] == shards[1]


def read(source):
  dataset = source.get_dataset(split="train", shuffle=False)
  return [
    {name: np.asarray(value).tolist() for name, value in row.items()} for row in dataset.as_numpy_iterator()
  ]


@pytest.mark.parametrize("pattern", ["none.txt", "none*.txt", "none/*.txt"])
def test_missing_files_on_a_store_are_said(bucket, pattern):
  source = TextDataSource({"train": f"{bucket}/missing/{pattern}"})
  with pytest.raises(AnystepError) as caught:
    source.list_shards("train")
  assert (caught.value.code, caught.value.kind) == (66, "files_missing")


def test_a_vocabulary_on_a_store_is_read_from_a_copy(bucket, tmp_path):
  path = epath.Path(bucket) / "vocabulary.model"
  model = seqio.test_utils.sentencepiece_vocab().sentencepiece_model_file
  path.write_bytes(epath.Path(model).read_bytes())
  watch_models()
  local = find_file(str(path))
  assert epath.Path(local).read_bytes() == path.read_bytes()
  assert find_file(str(path)) == local
  encoded = seqio.SentencePieceVocabulary(str(path)).encode("some text")
  assert encoded == seqio.SentencePieceVocabulary(model).encode("some text")
  path.unlink()
  with pytest.raises(AnystepError) as caught:
    find_file(str(path))
  assert (caught.value.code, caught.value.kind) == (66, "vocabulary_missing")
