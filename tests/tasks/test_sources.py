"""Sources give what their files hold, in the files' order, one shard a file."""

import caches
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import seqio
import tensorflow as tf
from job_runs import registered, run_job

import anystep
from anystep.errors import AnystepError
from anystep.tasks.sources import ParquetDataSource

SIZES = (7, 0, 800)
TYPES = {
  "flag": pa.bool_(),
  "half": pa.list_(pa.float16(), 2),
  "number": pa.int64(),
  "pairs": pa.list_(pa.list_(pa.float32(), 2)),
  "targets": pa.list_(pa.int32()),
  "text": pa.string(),
  "wide": pa.float64(),
  "words": pa.list_(pa.binary()),
}


def row_of(k):
  return {
    "flag": np.bool_(k % 3 == 0),
    "half": np.array([k % 100, 0.5], np.float16),
    "number": np.int64(k),
    "pairs": np.arange(2 * (k % 4), dtype=np.float32).reshape(-1, 2) + k,
    "targets": np.arange(k % 6, dtype=np.int32) + k,
    "text": f"tëxt {k}".encode(),
    "wide": np.float64(k / 3),
    "words": np.array([b"word \xff"] * (k % 3), object),
  }


@pytest.fixture(scope="module")
def files(tmp_path_factory):
  """A pattern of files with rows 0, 1, 2, … in their order."""
  folder = tmp_path_factory.mktemp("files")
  start = 0
  for shard, size in enumerate(SIZES):
    rows = [row_of(k) for k in range(start, start + size)]
    columns = {
      name: pa.array([np.asarray(row[name]).tolist() for row in rows], kind) for name, kind in TYPES.items()
    }
    pq.write_table(pa.table(columns), folder / f"part{shard}.parquet", row_group_size=300)
    start += size
  return str(folder / "part*.parquet")


def rows_of(source, **arguments):
  return list(source.get_dataset(split="train", shuffle=False, **arguments).as_numpy_iterator())


def test_a_shard_is_a_file_and_its_rows_are_the_examples(files):
  source = ParquetDataSource({"train": files})
  assert len(source.list_shards("train")) == len(SIZES)
  start = 0
  for shard, size in enumerate(SIZES):
    found = rows_of(source, shard_info=seqio.ShardInfo(index=shard, num_shards=len(SIZES)))
    assert len(found) == size
    for k, row in enumerate(found, start):
      expected = row_of(k)
      assert row.keys() == expected.keys()
      assert all(caches.same_array(row[name], value) for name, value in expected.items())
    start += size


def test_the_elements_say_what_is_known_of_their_shapes(files):
  spec = ParquetDataSource({"train": files}).get_dataset("train", shuffle=False).element_spec
  shapes = {"half": [2], "pairs": [None, 2], "targets": [None], "words": [None]}
  dtypes = {"flag": "bool", "half": "float16", "number": "int64", "targets": "int32", "wide": "float64"}
  dtypes |= {"pairs": "float32", "text": "string", "words": "string"}
  assert spec == {name: tf.TensorSpec(shapes.get(name, []), dtype) for name, dtype in dtypes.items()}


def test_columns_that_are_not_named_are_not_read(files):
  source = ParquetDataSource({"train": files}, ["text", "number"])
  found = rows_of(source, shard_info=seqio.ShardInfo(index=0, num_shards=3))
  assert found == [{"number": k, "text": row_of(k)["text"]} for k in range(7)]


def test_a_file_with_other_columns_is_refused_by_name(tmp_path):
  pq.write_table(pa.table({"a": [1], "b": [2]}), tmp_path / "0.parquet")
  pq.write_table(pa.table({"a": [1], "b": [2.5]}), tmp_path / "1.parquet")
  pattern = str(tmp_path / "*.parquet")
  with pytest.raises(
    tf.errors.OpError, match=r"files_differ.*1\.parquet feature=b expected=int64.*got=float64"
  ):
    rows_of(ParquetDataSource({"train": pattern}))
  assert rows_of(ParquetDataSource({"train": pattern}, ["a"])) == [{"a": 1}] * 2


def test_a_null_is_refused_by_the_column_s_name(tmp_path):
  pq.write_table(pa.table({"a": [1, None]}), tmp_path / "0.parquet")
  with pytest.raises(tf.errors.OpError, match=r"column_null.*0\.parquet feature=a"):
    rows_of(ParquetDataSource({"train": str(tmp_path / "*.parquet")}))


def test_columns_of_other_types_and_absent_ones_are_refused_before_rows_are_read(tmp_path):
  pq.write_table(pa.table({"when": pa.array([1], pa.timestamp("s"))}), tmp_path / "0.parquet")
  for columns, kind, feature in ((None, "feature_form", "when"), (["wen"], "column_missing", "wen")):
    with pytest.raises(AnystepError) as caught:
      rows_of(ParquetDataSource({"train": str(tmp_path / "*.parquet")}, columns))
    assert (caught.value.code, caught.value.kind) == (78, kind)
    assert caught.value.fields["feature"] == feature
  assert "when" in caught.value.fix


def test_a_task_over_it_is_cached_like_any_other(files, tmp_path):
  task = seqio.Task(
    "parquet_rows",
    source=ParquetDataSource({"train": files}, ["number", "targets", "text"]),
    preprocessors=[seqio.CacheDatasetPlaceholder(), seqio.preprocessors.append_eos],
    output_features={"targets": seqio.Feature(seqio.PassThroughVocabulary(5000, eos_id=1))},
  )
  with registered(task):
    run_job(tmp_path, "--num_shards=2", tasks=task.name)
  cache = anystep.open_cache(tmp_path, task.name, "train")
  assert len(cache) == sum(SIZES)
  for index in range(0, len(cache), 50):
    shard, place = (int(column[0]) for column in cache.source_of(np.array([index])))
    expected = row_of(sum(SIZES[:shard]) + place)
    expected["text"] = np.array(expected["text"], object)
    assert all(caches.same_array(value, expected[name]) for name, value in cache[index].items())
