"""Sources give what their files hold, in the files' order, in shards that follow from the files alone."""

import gzip
import json
import pathlib

import caches
import datasets
import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
import seqio
import tensorflow as tf
from job_runs import registered, run_job

import anystep
from anystep.containers.containers import write_array_record
from anystep.containers.tfrecord import write_tfrecord
from anystep.errors import AnystepError
from anystep.records.writing import serialize_example
from anystep.tasks.sources import (
  ArrayRecordDataSource,
  ArrowDataSource,
  CsvDataSource,
  HeldOutDataSource,
  HuggingFaceDataSource,
  JsonLinesDataSource,
  ParquetDataSource,
  TextDataSource,
  files_as_is,
  files_of,
  huggingface_source,
  random_access,
)

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
  with pytest.raises(AnystepError) as caught:
    ParquetDataSource({"train": pattern}).list_shards("train")
  assert (caught.value.code, caught.value.kind) == (78, "files_differ")
  assert caught.value.fields | {"path": ""} == {
    "path": "",
    "feature": "b",
    "expected": "int64[]",
    "got": "float64[]",
  }
  assert caught.value.fields["path"].endswith("1.parquet")
  # Who cuts no files does not open them before they are read.
  with pytest.raises(
    tf.errors.OpError, match=r"files_differ.*1\.parquet feature=b expected=int64.*got=float64"
  ):
    rows_of(ParquetDataSource({"train": pattern}, shard_rows=None))
  assert rows_of(ParquetDataSource({"train": pattern}, ["a"])) == [{"a": 1}] * 2


def test_a_null_is_refused_by_the_column_s_name(tmp_path):
  pq.write_table(pa.table({"a": [1, None]}), tmp_path / "0.parquet")
  with pytest.raises(tf.errors.OpError, match=r"column_null.*0\.parquet feature=a row=1 "):
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
  # Where the files lie is not said, and so no part of the cache's bytes.
  assert [shard.name for shard in cache.manifest.source_shards] == [f"part{k}.parquet" for k in range(3)]
  assert len(cache) == sum(SIZES)
  for index in range(0, len(cache), 50):
    shard, place = (int(column[0]) for column in cache.source_of(np.array([index])))
    expected = row_of(sum(SIZES[:shard]) + place)
    expected["text"] = np.array(expected["text"], object)
    assert all(caches.same_array(value, expected[name]) for name, value in cache[index].items())


def test_bad_examples_are_listed_without_the_place_of_their_files(tmp_path):
  for k in range(2):
    (tmp_path / f"{k}.txt").write_text("1\n2\n" if k else "3\nx\n")

  @seqio.map_over_dataset
  def as_numbers(example):
    return {"targets": tf.strings.to_number(example["text"][None], tf.int32)}

  task = seqio.Task(
    "bad_lines",
    source=TextDataSource({"train": f"{tmp_path}/*.txt"}),
    preprocessors=[as_numbers, seqio.CacheDatasetPlaceholder()],
    output_features={"targets": seqio.Feature(seqio.PassThroughVocabulary(9))},
  )
  with registered(task):
    run_job(tmp_path / "cache", "--max_bad_examples=1", tasks=task.name)
  (line,) = (tmp_path / "cache" / task.name / "quarantine.train.jsonl").read_text().splitlines()
  entry = json.loads(line)
  assert (entry["source_shard"], entry["place"]) == ("0.txt", 1)


TEXTS = [f"tëxt {k}" + ', "more"\tof it' * (k % 4) for k in range(57)]
PARTS = [TEXTS[:20], TEXTS[20:50], TEXTS[50:]]
WORDS = [[f"w{j}" for j in range(k % 3)] for k in range(len(TEXTS))]


def write_arrow(new_writer):
  def write(path, table):
    with pa.OSFile(str(path), "wb") as file, new_writer(file, table.schema) as writer:
      writer.write_table(table, max_chunksize=4)

  return write


def write_json(path, table):
  text = "".join(json.dumps(row) + "\n\n" for row in table.to_pylist()).encode()
  path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)


def write_tsv(path, table):
  rows = [f"{row['text']}|{row['number']}\n" for row in table.to_pylist()]
  path.write_text("text|number\n" + "".join(rows))


def write_records(write):
  def write_file(path, table):
    records = [
      serialize_example(
        {k: np.array(v, object) if isinstance(v, (str, list)) else np.int64(v) for k, v in row.items()}
      )
      for row in table.to_pylist()
    ]
    write(path, records)

  return write_file


def write_text(path, table):
  path.write_text("".join(f"{text}\n" for text in table["text"].to_pylist()))


def array_records(path, records):
  write_array_record(path, records, options="group_size:1")


# By ending: how a file is written, what reads it, its columns, and whether rows can be found.
FORMATS = {
  "array_record": (write_records(array_records), ArrayRecordDataSource, ("number", "text", "words"), True),
  "arrow": (write_arrow(pa.ipc.new_file), ArrowDataSource, ("number", "text", "words"), True),
  "arrows": (write_arrow(pa.ipc.new_stream), ArrowDataSource, ("number", "text", "words"), False),
  "csv": (lambda path, t: pa.csv.write_csv(t, path), CsvDataSource, ("number", "text"), False),
  "jsonl": (write_json, JsonLinesDataSource, ("number", "text", "words"), False),
  "jsonl.gz": (write_json, JsonLinesDataSource, ("number", "text", "words"), False),
  "parquet": (
    lambda path, t: pq.write_table(t, path, row_group_size=4),
    ParquetDataSource,
    ("number", "text", "words"),
    True,
  ),
  "tsv": (
    write_tsv,
    lambda files, **more: CsvDataSource(files, delimiter="|", **more),
    ("number", "text"),
    False,
  ),
  "txt": (write_text, TextDataSource, ("text",), False),
}


def write_files(folder, ending):
  """Some files of a format, and what makes a source of them."""
  write, source, columns, _ = FORMATS[ending]
  start = 0
  for part, texts in enumerate(PARTS):
    rows = range(start, start + len(texts))
    table = pa.table({"text": texts, "number": list(rows), "words": [WORDS[k] for k in rows]})
    write(pathlib.Path(folder) / f"part{part}.{ending}", table.select(sorted(columns)))
    start += len(texts)
  return source, {"train": str(folder / f"part*.{ending}")}


def expected_of(columns, k):
  values = {"number": k, "text": TEXTS[k].encode(), "words": [w.encode() for w in WORDS[k]]}
  return {name: values[name] for name in columns}


def plain(rows):
  return [
    {n: v.tolist() if isinstance(v, (np.ndarray, np.generic)) else v for n, v in row.items()} for row in rows
  ]


@pytest.mark.parametrize("ending", FORMATS)
class TestEveryFormat:
  def test_gives_all_rows_once_whatever_the_shards_are(self, tmp_path, ending):
    source, files = write_files(tmp_path, ending)
    _, _, columns, has_ranges = FORMATS[ending]
    expected = [expected_of(columns, k) for k in range(len(TEXTS))]
    for shard_rows in (None, 9) if has_ranges else (None,):
      made = source(files) if not has_ranges else source(files, shard_rows=shard_rows)
      shards = made.list_shards("train")
      assert len(shards) == (3 if shard_rows is None else {"array_record": 8}.get(ending, 6))
      parts = [
        plain(rows_of(made, shard_info=seqio.ShardInfo(index=k, num_shards=len(shards))))
        for k in range(len(shards))
      ]
      assert [row for part in parts for row in part] == expected
      if shard_rows == 9:
        sizes = [len(part) for part in parts]
        assert max(sizes) < 9 + 4, "a shard is whole groups"
      dealt = [plain(rows_of(made, shard_info=seqio.ShardInfo(index=k, num_shards=2))) for k in range(2)]
      key = "number" if "number" in columns else "text"
      assert (
        sorted(
          (row for part in dealt for row in part),
          key=lambda r: TEXTS.index(r[key].decode()) if key == "text" else r[key],
        )
        == expected
      )

  def test_says_which_files_there_are_where_a_pattern_has_none(self, tmp_path, ending):
    source, _ = write_files(tmp_path, ending)
    for pattern in (f"{tmp_path}/prat*.{ending}", f"{tmp_path}/part4.{ending}"):
      with pytest.raises(AnystepError) as caught:
        source({"train": pattern}).list_shards("train")
      assert (caught.value.code, caught.value.kind) == (66, "files_missing")
      assert caught.value.fields["path"] == pattern
      assert f"part0.{ending}" in caught.value.fields["got"]
    with pytest.raises(AnystepError, match="no such folder"):
      source({"train": str(tmp_path / "nowhere" / "*")}).list_shards("train")

  def test_names_the_columns_that_there_are(self, tmp_path, ending):
    source, files = write_files(tmp_path, ending)
    if ending == "txt":
      assert rows_of(TextDataSource(files, column="line"))[0] == {"line": TEXTS[0].encode()}
      return
    assert rows_of(source(files, columns=["text"]))[3] == {"text": TEXTS[3].encode()}
    with pytest.raises(AnystepError) as caught:
      source(files, columns=["txet"]).get_dataset("train", shuffle=False)
    assert (caught.value.code, caught.value.kind) == (78, "column_missing")
    assert caught.value.fields["feature"] == "txet"
    assert "number" in caught.value.fields["expected"]
    assert "text" in caught.value.fix

  def test_provenance_names_no_place(self, tmp_path, ending):
    source, files = write_files(tmp_path, ending)
    described = json.dumps(source(files).described())
    assert f"part0.{ending}" in described
    assert str(tmp_path) not in described


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_shuffles_shards_by_the_seed_and_loses_nothing(tmp_path, ending):
  source, files = write_files(tmp_path, ending)
  found = [
    [row["text"] for row in source(files).get_dataset("train", shuffle=True, seed=seed).as_numpy_iterator()]
    for seed in (1, 1, 2, 4)
  ]
  assert found[0] == found[1]
  assert len({tuple(texts) for texts in found}) > 1
  assert all(sorted(texts) == sorted(text.encode() for text in TEXTS) for texts in found)


def refusal(source):
  """What TensorFlow says of rows that cannot be read."""
  with pytest.raises(tf.errors.OpError) as caught:
    rows_of(source)
  return str(caught.value)


class TestValues:
  """What is wrong with a row is told with its file, its row and its column."""

  @pytest.mark.parametrize(("ending", "source"), [("jsonl", JsonLinesDataSource), ("csv", CsvDataSource)])
  def test_of_another_type_than_in_the_first_file_are_refused(self, tmp_path, ending, source):
    values = [[1, 2], [3, "x"]]
    for k, numbers in enumerate(values):
      rows = [json.dumps({"a": n, "b": "y"}) if ending == "jsonl" else f"{n},y" for n in numbers]
      head = [] if ending == "jsonl" else ["a,b"]
      (tmp_path / f"{k}.{ending}").write_text("\n".join([*head, *rows]))
    pattern = {"train": str(tmp_path / f"*.{ending}")}
    message = refusal(source(pattern))
    assert "kind=file_rows" in message
    assert f"1.{ending}" in message
    assert "a: int64" in message
    if ending == "csv":
      found = rows_of(source(pattern, types={"a": "string"}))
      assert [row["a"] for row in found] == [b"1", b"2", b"3", b"x"]

  def test_that_are_missing_are_refused(self, tmp_path):
    lines = ['{"a": 1}'] * 3000 + ['{"b": 1}'] + ['{"a": 1}'] * 5
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    source = JsonLinesDataSource({"train": str(tmp_path / "a.jsonl")}, ["a"])
    assert "column_null" in (message := refusal(source))
    assert "feature=a row=3000" in message

  def test_of_columns_that_come_late_are_refused_unless_columns_are_named(self, tmp_path):
    for k, line in enumerate(('{"a": 1}', '{"a": 1, "late": 2}')):
      (tmp_path / f"{k}.jsonl").write_text(line)
    files = {"train": str(tmp_path / "*.jsonl")}
    assert "unexpected field" in refusal(JsonLinesDataSource(files))
    assert rows_of(JsonLinesDataSource(files, ["a"])) == [{"a": 1}] * 2

  def test_of_a_csv_without_a_column_are_refused(self, tmp_path):
    for k, head in enumerate(("a,b", "a,c")):
      (tmp_path / f"{k}.csv").write_text(f"{head}\n1,2\n")
    assert "column_missing" in refusal(CsvDataSource({"train": str(tmp_path / "*.csv")}, ["b"]))
    assert "files_differ" in refusal(CsvDataSource({"train": str(tmp_path / "*.csv")}))

  def test_may_be_longer_than_what_is_read_at_a_time_and_look_like_dates(self, tmp_path, monkeypatch):
    monkeypatch.setattr("anystep.tasks.sources.arrow_rows._READ_BYTES", 64)
    texts = ["2020-01-01T00:00:00Z", "x" * 500, "", "y\\n" * 40, "z"]
    (tmp_path / "a.jsonl").write_text("\n".join(f'{{"text": "{text}"}}' for text in texts))
    found = rows_of(JsonLinesDataSource({"train": str(tmp_path / "a.jsonl")}))
    assert [row["text"].decode() for row in found] == [json.loads(f'"{text}"') for text in texts]

  def test_of_tsv_files_may_hold_quotes_and_of_csv_files_line_breaks(self, tmp_path):
    (tmp_path / "a.tsv").write_text('b\ta\n2"x\t1\n"y\t2\n')
    found = rows_of(CsvDataSource({"train": str(tmp_path / "a.tsv")}))
    assert found == [{"a": 1, "b": b'2"x'}, {"a": 2, "b": b'"y'}]
    (tmp_path / "a.csv").write_text('"x\ny",1\n')
    assert rows_of(CsvDataSource({"train": str(tmp_path / "a.csv")}, column_names=["b", "a"])) == [
      {"a": 1, "b": b"x\ny"}
    ]

  @pytest.mark.parametrize(
    ("source", "empty"),
    [
      (JsonLinesDataSource, ""),
      (JsonLinesDataSource, "\n \n"),
      (CsvDataSource, ""),
      (CsvDataSource, "a,b\n"),
      (ArrayRecordDataSource, None),
    ],
  )
  def test_are_of_the_types_of_the_first_file_with_rows(self, tmp_path, source, empty):
    contents = {JsonLinesDataSource: '{"a": 1, "b": "x"}\n', CsvDataSource: "a,b\n1,x\n"}
    record = serialize_example({"a": np.int64(1), "b": np.array(b"x", object)})
    for k in range(3):
      path = tmp_path / str(k)
      if empty is None:
        array_records(path, [record] * (k == 1))
      else:
        path.write_text(contents[source] if k == 1 else empty)
    assert rows_of(source({"train": f"{tmp_path}/*"})) == [{"a": 1, "b": b"x"}]
    (tmp_path / "1").unlink()
    with pytest.raises(AnystepError) as caught:
      source({"train": [str(tmp_path / "0"), str(tmp_path / "2")]}).list_shards("train")
    assert (caught.value.code, caught.value.kind) == (66, "files_empty")
    assert caught.value.fields["path"] == str(tmp_path / "0")

  @pytest.mark.parametrize(("ending", "source"), [("jsonl", JsonLinesDataSource), ("csv", CsvDataSource)])
  def test_of_columns_that_are_not_there_have_no_types(self, tmp_path, ending, source):
    (tmp_path / "a").write_text('{"score": 1}' if ending == "jsonl" else "score\n1\n")
    with pytest.raises(AnystepError) as caught:
      source({"train": str(tmp_path / "a")}, types={"scroe": "float32"}).list_shards("train")
    assert (caught.value.code, caught.value.kind) == (78, "column_missing")
    assert caught.value.fields["feature"] == "scroe"
    assert "score" in caught.value.fix

  def test_of_unknown_types_are_refused_at_once(self):
    with pytest.raises(AnystepError) as caught:
      JsonLinesDataSource({"train": "a.jsonl"}, types={"a": "strng"})
    assert (caught.value.code, caught.value.kind, caught.value.fields["got"]) == (78, "column_type", "strng")
    assert "string" in caught.value.fix

  @pytest.mark.parametrize(
    ("source", "content"),
    [
      (ArrowDataSource, b"garbage" * 9),
      (ParquetDataSource, b"garbage" * 9),
      (ArrayRecordDataSource, b"garbage" * 9),
    ],
  )
  def test_of_another_format_are_refused_with_the_file(self, tmp_path, source, content):
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(AnystepError) as caught:
      source({"train": str(tmp_path / "a")}).list_shards("train")
    assert (caught.value.code, caught.value.kind) == (65, "file_container")
    assert caught.value.fields["path"] == str(tmp_path / "a")

  def test_of_json_that_is_none_are_refused_with_the_row(self, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"a": 1}\nnot json\n')
    with pytest.raises(AnystepError) as caught:
      JsonLinesDataSource({"train": str(tmp_path / "a.jsonl")}).get_dataset("train")
    assert (caught.value.code, caught.value.kind, caught.value.fields["row"]) == (65, "file_rows", 1)

  def test_of_records_that_are_no_examples_or_vary_are_refused(self, tmp_path):
    varying = [serialize_example({"a": np.int64(1)}), serialize_example({"a": np.float32(1)})]
    for k, records in enumerate(([b"\xff\xff"], varying)):
      array_records(tmp_path / str(k), records)
      with pytest.raises(AnystepError) as caught:
        ArrayRecordDataSource({"train": str(tmp_path / str(k))}).get_dataset("train")
      assert (caught.value.code, caught.value.kind, caught.value.fields["row"]) == (65, "file_rows", k)


def test_shards_of_no_rows_are_refused():
  for source in (ParquetDataSource, ArrayRecordDataSource):
    with pytest.raises(ValueError, match="shard_rows is 0"):
      source({"train": "a"}, shard_rows=0)


def test_text_is_what_seqio_makes_of_it(tmp_path):
  (tmp_path / "a.txt").write_bytes(b"one\r\n\ntwo\xff\nlast")
  files = {"train": str(tmp_path / "a.txt")}
  expected = rows_of(seqio.TextLineDataSource(files))
  assert [row["text"] for row in rows_of(TextDataSource(files))] == expected
  (tmp_path / "a.txt.gz").write_bytes(gzip.compress((tmp_path / "a.txt").read_bytes()))
  assert [row["text"] for row in rows_of(TextDataSource({"train": f"{files['train']}.gz"}))] == expected
  sharded = tmp_path / "a.txt.gz-00000-of-00001"
  sharded.write_bytes((tmp_path / "a.txt.gz").read_bytes())
  assert [row["text"] for row in rows_of(TextDataSource({"train": str(sharded)}))] == expected
  whole = rows_of(TextDataSource(files, whole_files=True))
  assert whole == [{"text": (tmp_path / "a.txt").read_bytes()}]


def test_what_is_no_file_of_lines_is_refused_before_it_is_read(tmp_path):
  (tmp_path / "a.txt.bz2").write_bytes(b"BZh")
  with pytest.raises(AnystepError) as caught:
    TextDataSource({"train": f"{tmp_path}/*.bz2"}).list_shards("train")
  assert (caught.value.code, caught.value.kind) == (78, "file_compression")
  assert (caught.value.fields["path"], caught.value.fields["got"]) == (f"{tmp_path}/a.txt.bz2", ".bz2")
  (tmp_path / "folder").mkdir()
  for pattern in (f"{tmp_path}/*", f"{tmp_path}/folder"):
    with pytest.raises(AnystepError) as caught:
      TextDataSource({"train": pattern}).list_shards("train")
    assert (caught.value.code, caught.value.kind) == (66, "files_missing")
    assert caught.value.fields["got"] == f"a folder, {tmp_path}/folder"


@pytest.mark.parametrize("is_given", [True, False])
def test_array_records_are_what_seqio_makes_of_the_same_tfrecords(tmp_path, is_given):
  records = [
    serialize_example(
      {"n": np.int64(k), "x": np.arange(k % 3, dtype=np.float32), "t": np.array(b"t", object)}
    )
    for k in range(40)
  ]
  array_records(tmp_path / "a", records)
  write_tfrecord(tmp_path / "b", records)
  description = {
    "n": tf.io.FixedLenFeature([], tf.int64),
    "t": tf.io.FixedLenFeature([], tf.string),
    "x": tf.io.RaggedFeature(tf.float32, row_splits_dtype=tf.int64),
  }
  stock = seqio.TFExampleDataSource({"train": str(tmp_path / "b")}, description)
  source = ArrayRecordDataSource(
    {"train": str(tmp_path / "a")}, description if is_given else None, shard_rows=7
  )
  assert source.feature_description == description
  assert source.num_input_examples("train") == 40
  assert source.get_dataset("train").element_spec == stock.get_dataset("train").element_spec
  assert plain(rows_of(source, shard_info=seqio.ShardInfo(0, 6))) == plain(rows_of(stock)[:7])


class TestHuggingFace:
  @pytest.fixture(autouse=True)
  def saved(self, tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    datasets.disable_progress_bars()
    rows = {"text": TEXTS, "number": list(range(len(TEXTS))), "words": WORDS}
    data = datasets.Dataset.from_dict(rows)
    self.expected = [expected_of(("number", "text", "words"), k) for k in range(len(TEXTS))]
    self.folder = tmp_path / "saved"
    datasets.DatasetDict(train=data, test=data.select([5, 3])).save_to_disk(
      str(self.folder), num_shards={"train": 3, "test": 1}
    )
    data.shuffle(seed=1).save_to_disk(str(tmp_path / "one"))
    write_files(tmp_path, "jsonl")
    self.files = str(tmp_path / "part*.jsonl")

  @pytest.mark.parametrize("streaming", [False, True])
  def test_saved_datasets_have_their_splits_and_shards(self, streaming):
    source = HuggingFaceDataSource(str(self.folder), streaming=streaming, shard_rows=20)
    assert source.splits == ("train", "test")
    shards = source.list_shards("train")
    assert len(shards) == 3
    parts = [rows_of(source, shard_info=seqio.ShardInfo(k, 3)) for k in range(3)]
    assert plain(row for part in parts for row in part) == self.expected
    found = source.get_dataset("test", shuffle=False).as_numpy_iterator()
    assert plain(found) == [self.expected[5], self.expected[3]]
    assert str(self.folder) not in json.dumps(source.described())

  @pytest.mark.parametrize("streaming", [False, True])
  def test_files_are_read_through_the_library(self, streaming):
    source = HuggingFaceDataSource(
      "json", splits=["train"], data_files={"train": self.files}, streaming=streaming, columns=["text"]
    )
    texts = sorted(row["text"] for row in rows_of(source))
    assert texts == sorted(text.encode() for text in TEXTS)
    assert source.num_input_examples("train") == (None if streaming else len(TEXTS))

  def test_a_dataset_that_changed_under_its_name_is_told_apart(self, tmp_path):
    described = []
    for text in ("a", "ab"):
      datasets.Dataset.from_dict({"text": [text]}).save_to_disk(str(tmp_path / text / "same"))
      described.append(HuggingFaceDataSource(str(tmp_path / text / "same")).described())
    assert described[0]["splits"]["train"]["examples"] == described[1]["splits"]["train"]["examples"]
    assert described[0] != described[1]

  def test_splits_may_be_parts_of_those_of_the_dataset(self):
    source = HuggingFaceDataSource("json", splits={"train": "train[:10]"}, data_files={"train": self.files})
    assert [row["number"] for row in rows_of(source)] == list(range(10))

  def test_what_is_missing_is_named(self, tmp_path, monkeypatch):
    (tmp_path / "bad.jsonl").write_text("no json")
    (tmp_path / "empty.jsonl").write_text("")
    for name, streaming in (("bad", False), ("bad", True), ("empty", False), ("empty", True)):
      files = str(tmp_path / f"{name}.jsonl")
      source = HuggingFaceDataSource("json", splits=["t"], data_files={"t": files}, streaming=streaming)
      with pytest.raises(AnystepError, match="dataset_missing") as caught:
        source.list_shards("t")
      assert ("no rows" if name == "empty" else "JSON parse error") in caught.value.fields["got"]
    for source, code, kind in (
      (HuggingFaceDataSource(str(tmp_path / "nowhere"), splits=["train"]), 66, "dataset_missing"),
      (HuggingFaceDataSource("json", splits=["t"], data_files={"train": self.files}), 66, "dataset_missing"),
      (HuggingFaceDataSource(str(self.folder), splits=["trian"]), 64, "split_unknown"),
      (HuggingFaceDataSource(str(self.folder), columns=["txet"]), 78, "column_missing"),
    ):
      with pytest.raises(AnystepError) as caught:
        source.list_shards(source.splits[0])
      assert (caught.value.code, caught.value.kind) == (code, kind)
      assert caught.value.fix
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(AnystepError) as caught:
      huggingface_source.huggingface_datasets()
    assert (caught.value.code, caught.value.kind) == (78, "package_missing")


class TestHeldOut:
  def source_of(self, tmp_path, examples, ending="jsonl"):
    source, files = write_files(tmp_path, ending)
    return HeldOutDataSource(source(files), examples)

  @pytest.mark.parametrize("examples", [1, 8])
  def test_examples_are_as_many_as_were_asked_for_and_in_one_split(self, tmp_path, examples):
    source = self.source_of(tmp_path, examples)
    assert source.num_input_examples("validation") == examples
    found = {}
    for split in source.splits:
      shards = source.list_shards(split)
      parts = [
        source.get_dataset(split, shuffle=False, shard_info=seqio.ShardInfo(k, len(shards)))
        for k in range(len(shards))
      ]
      found[split] = [row["number"] for part in parts for row in part.as_numpy_iterator()]
    assert len(found["validation"]) == examples
    assert sorted(found["train"] + found["validation"]) == list(range(len(TEXTS)))
    assert found["train"] == sorted(found["train"])

  def test_files_that_have_too_few_are_named(self, tmp_path):
    source = self.source_of(tmp_path, 24)
    with pytest.raises(AnystepError) as caught:
      source.list_shards("validation")
    assert (caught.value.code, caught.value.kind) == (78, "validation_examples")
    assert caught.value.fields["got"] == 7
    assert caught.value.fields["shard"].endswith("part2.jsonl")
    with pytest.raises(ValueError, match="examples is 0"):
      HeldOutDataSource(ParquetDataSource({"train": "a"}), 0)


@pytest.mark.parametrize("ending", ["parquet", "array_record", "arrow", "jsonl", "txt"])
def test_files_that_can_be_trained_from_as_they_are_are_told(tmp_path, ending):
  source, files = write_files(tmp_path, ending)
  has_ranges = FORMATS[ending][3]
  made = source(files, shard_rows=9) if has_ranges else source(files)
  paths = sorted(map(str, tmp_path.iterdir()))
  assert files_of(made, "train") == paths
  can_be = ending in ("parquet", "array_record")
  assert random_access(made) == can_be
  assert files_as_is(made) == ((ending, {"train": paths}) if can_be else None)
  stock = seqio.TFExampleDataSource({"train": files["train"]}, {})
  assert files_as_is(stock) == ("tfrecord", {"train": paths})


@pytest.mark.parametrize("ending", ["parquet", "array_record"])
def test_files_that_are_cut_into_shards_are_indexed_as_they_are(tmp_path, ending):
  source, files = write_files(tmp_path, ending)
  task = seqio.Task(
    "as_they_are",
    source=source(files, shard_rows=9, columns=["number", "text"]),
    preprocessors=[seqio.CacheDatasetPlaceholder()],
    output_features={"text": seqio.Feature(seqio.PassThroughVocabulary(1), dtype=tf.string, rank=0)},
  )
  with registered(task):
    run_job(tmp_path, "--index_only", tasks=task.name)
  cache = anystep.open_cache(tmp_path, task.name, "train")
  assert cache.manifest.num_shards == 3
  assert [int(cache[k]["number"]) for k in range(len(TEXTS))] == list(range(len(TEXTS)))
