"""One line makes a task of files: it is cached, and read in its style, like any other."""

import contextlib
import gzip
import itertools
import json

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import seqio
from job_runs import run_job

import anystep
from anystep.containers.containers import write_array_record
from anystep.errors import AnystepError
from anystep.records.writing import serialize_example
from anystep.tasks import text_task
from anystep.tasks.reading.task_reader import TaskReader
from anystep.tasks.registry.fingerprint import reader_part
from anystep.tasks.sources import HuggingFaceDataSource, TextDataSource

VOCABULARY = seqio.ByteVocabulary(extra_ids=100)
TEXTS = ["", "short", *(f"text {k}: " + "wörter und mehr " * (k % 9) for k in range(12))]
EOS = VOCABULARY.eos_id


@contextlib.contextmanager
def registered(*arguments, **named):
  task = text_task(*arguments, **{"vocabulary": VOCABULARY, **named})
  try:
    yield task
  finally:
    seqio.TaskRegistry.remove(task.name)


def write_array_records(path, texts):
  records = [serialize_example({"text": np.array(text.encode(), object)}) for text in texts]
  write_array_record(path, records, options="group_size:1")


def write_arrow(path, texts):
  table = pa.table({"text": texts, "other": texts})
  with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
    writer.write_table(table)


def json_lines(texts):
  return "".join(json.dumps({"other": 1, "text": text}) + "\n" for text in texts)


WRITERS = {
  "array_record": write_array_records,
  "arrow": write_arrow,
  "csv": lambda path, texts: path.write_text("text,other\n" + "".join(f"{text},1\n" for text in texts)),
  "feather": write_arrow,
  "jsonl": lambda path, texts: path.write_text(json_lines(texts)),
  "jsonl.gz": lambda path, texts: path.write_bytes(gzip.compress(json_lines(texts).encode())),
  "parquet": lambda path, texts: pq.write_table(pa.table({"text": texts}), path),
  "tsv": lambda path, texts: path.write_text("other\ttext\n" + "".join(f"1\t{text}\n" for text in texts)),
  "txt": lambda path, texts: path.write_text("".join(f"{text}\n" for text in texts)),
}


def tokens_of(text):
  return VOCABULARY.encode(text)


def cached(task):
  """What the task's cache would have of `train`, without the job."""
  dataset = task.source.get_dataset("train", shuffle=False)
  return [example["targets"].tolist() for example in task.preprocess_precache(dataset).as_numpy_iterator()]


@pytest.mark.parametrize(
  ("ending", "shard"), [*((ending, "") for ending in WRITERS), ("jsonl", "-00000-of-00001")]
)
def test_the_ending_says_the_format_and_no_token_is_lost(tmp_path, ending, shard):
  WRITERS[ending](tmp_path / f"a.{ending}{shard}", TEXTS)
  with registered("mine", f"{tmp_path}/*.{ending}{shard and '-*'}", piece_tokens=20) as task:
    pieces = cached(task)
    whole = [tokens_of(text) for text in TEXTS if text]
    assert pieces == [tokens[k : k + 20] for tokens in whole for k in range(0, len(tokens), 20)]
    assert seqio.TaskRegistry.get("mine") is task


@pytest.mark.parametrize(
  ("name", "content"), [("a.csv", "text\n007\n2020-01-01\n"), ("b.tsv", "text\n1\n2\n")]
)
def test_texts_that_look_like_numbers_are_texts(tmp_path, name, content):
  (tmp_path / name).write_text(content)
  with registered("mine", str(tmp_path / name)) as task:
    assert cached(task) == [tokens_of(text) for text in content.split()[1:]]


def test_saved_datasets_and_other_sources_are_taken_as_files_are(tmp_path):
  datasets.disable_progress_bars()
  data = datasets.Dataset.from_dict({"text": TEXTS, "n": list(range(len(TEXTS)))})
  data.save_to_disk(str(tmp_path / "saved"))
  expected = [tokens_of(text) for text in TEXTS if text]
  WRITERS["txt"](tmp_path / "a.txt", TEXTS)
  for files in (tmp_path / "saved", TextDataSource({"train": str(tmp_path / "a.txt")})):
    with registered("mine", files, piece_tokens=None) as task:
      assert cached(task) == expected
  with registered("mine", "hf://nobody/nothing") as task:
    assert isinstance(task.source, HuggingFaceDataSource)
    assert task.source._path == "nobody/nothing"


def test_end_tokens_end_texts_and_not_pieces(tmp_path):
  WRITERS["txt"](tmp_path / "a.txt", TEXTS)
  for style in ("lm", "prefix_lm"):
    with registered("mine", str(tmp_path / "a.txt"), style=style, piece_tokens=20) as task:
      ended = [[*tokens_of(text), EOS] for text in TEXTS if text]
      assert cached(task) == [tokens[k : k + 20] for tokens in ended for k in range(0, len(tokens), 20)]


def test_balanced_tails_leave_no_short_piece_and_are_another_task(tmp_path):
  WRITERS["txt"](tmp_path / "a.txt", TEXTS)
  descriptions = []
  for tails in ({}, {"tails": "short"}, {"tails": "balanced"}):
    with registered("mine", str(tmp_path / "a.txt"), style="lm", piece_tokens=20, **tails) as task:
      descriptions.append(reader_part(task, cache_at="placeholder", task_feature_lengths=None))
      pieces = cached(task)
  assert descriptions[0] == descriptions[1] != descriptions[2]
  ended = [[*tokens_of(text), EOS] for text in TEXTS if text]
  assert list(itertools.chain.from_iterable(pieces)) == list(itertools.chain.from_iterable(ended))
  assert len(pieces) == sum(-(-len(tokens) // 20) for tokens in ended)
  assert min(map(len, pieces)) >= min(10, *map(len, ended))


LENGTHS = {
  "lm": {"targets": 24},
  "prefix_lm": {"inputs": 24, "targets": 24},
  "span_corruption": {"inputs": 60, "targets": 30},
}
# Long enough for several spans, of which the last one is always at the end.
PIECE_TOKENS = {"lm": 22, "prefix_lm": 22, "span_corruption": 58}


def text_of(row, style):
  """The text that a row asks for, of whose spans sentinels are left out."""
  names = ("inputs", "targets") if style == "prefix_lm" else ("targets",)
  ids = [int(i) for name in names for i in row[name] if i and i != EOS and i < 259]
  return bytes(i - 3 for i in ids)


@pytest.mark.parametrize("style", LENGTHS)
def test_each_style_is_cached_and_read(tmp_path, style):
  WRITERS["jsonl"](tmp_path / "a.jsonl", TEXTS)
  lengths, piece_tokens = LENGTHS[style], PIECE_TOKENS[style]
  with registered(
    "mine", str(tmp_path / "*.jsonl"), style=style, piece_tokens=piece_tokens, validation_examples=3
  ) as task:
    run_job(tmp_path / "cache", tasks="mine")
    splits = {split: anystep.open_cache(tmp_path / "cache", "mine", split) for split in task.splits}
    # Of the first three texts one is empty.
    counts = {
      split: sum(-(-(len(tokens_of(t)) + (style != "span_corruption")) // piece_tokens) for t in texts if t)
      for split, texts in {"train": TEXTS[3:], "validation": TEXTS[:3]}.items()
    }
    assert {split: len(cache) for split, cache in splits.items()} == counts
    cache = splits["train"]
    reader = TaskReader(task, cache, lengths)
    transforms = {"mine": reader}
    plan = anystep.Plan.start(
      cache, batch_size=4, feature_lengths=lengths, transforms=transforms, num_epochs=2
    )
    with anystep.open_stream(plan, tmp_path / "cache", transforms=transforms) as stream:
      batches = list(stream)
    with anystep.open_stream(plan, tmp_path / "cache", transforms=transforms) as stream:
      stream.seek(5)
      assert anystep.batch_digest(next(stream)) == anystep.batch_digest(batches[5])
  rows = [{name: batch[name][k] for name in lengths} for batch in batches for k in range(4)]
  text = "".join(TEXTS).encode()
  found = [text_of(row, style) for row in rows]
  if style == "span_corruption":
    asked = [name for row in rows for name in lengths if EOS in row[name]]
    assert asked.count("inputs") == asked.count("targets") == 2 * counts["train"]
  else:
    assert all(piece in text for piece in found)
    assert sum(map(len, found)) == 2 * len("".join(TEXTS[3:]).encode()), "in two epochs every byte twice"
  again = {row["targets"].tobytes() for row in rows}
  assert (len(again) > 1.2 * counts["train"]) == (style != "lm"), "what is random differs among epochs"


def refused(kind, *arguments, **named):
  with pytest.raises(AnystepError) as caught, registered("mine", *arguments, **named):
    pass
  assert (caught.value.code, caught.value.kind, caught.value.fields["task"]) == (78, kind, "mine")
  assert "mine" not in seqio.TaskRegistry.names()
  return caught.value


def test_what_is_mistyped_is_refused_with_what_is_near(tmp_path):
  error = refused("style_unknown", "a.txt", style="prefixlm")
  assert (error.fields["got"], error.fix) == ("prefixlm", "name one of these, such as prefix_lm")
  error = refused("tails_unknown", "a.txt", tails="balance")
  assert (error.fields["got"], error.fix) == ("balance", "name one of these, such as balanced")
  error = refused("options_exclusive", "a.txt", tails="balanced", piece_tokens=None)
  assert error.fields["expected"].startswith("either tails or piece_tokens=None")
  for pattern, got in (("a.jsnl", "jsnl"), ("a.parquet.gz", "parquet.gz"), ("data/*", "no ending")):
    error = refused("format_unknown", pattern)
    assert (error.fields["path"], error.fields["got"]) == (pattern, got)
  assert "jsonl" in refused("format_unknown", "a.jsnl").fix
  error = refused("formats_differ", {"train": "a.txt", "validation": "b.csv"})
  assert error.fields["got"] == "a.txt: txt, b.csv: csv"
  assert refused("sentinels", "a.txt", vocabulary=seqio.ByteVocabulary()).fields["got"] == "extra_ids=0"
  for named in ({"validation": "b.txt"}, {"validation_examples": 3}):
    assert (
      refused("options_exclusive", {"train": "a.txt", "validation": "b.txt"}, **named).fields["got"] == "both"
    )
  source = TextDataSource({"train": "a.txt"})
  assert "file_format" in refused("options_exclusive", source, file_format="txt").fields["expected"]


def test_a_missing_column_is_named_when_the_task_is_used(tmp_path):
  WRITERS["jsonl"](tmp_path / "a.jsonl", TEXTS)
  with registered("mine", str(tmp_path / "a.jsonl"), column="txt"), pytest.raises(AnystepError) as caught:
    run_job(tmp_path / "cache", tasks="mine")
  assert (caught.value.code, caught.value.kind, caught.value.fields["feature"]) == (
    78,
    "column_missing",
    "txt",
  )


def test_splits_formats_and_metrics_may_be_given(tmp_path):
  WRITERS["txt"](tmp_path / "a.log", TEXTS[:5])
  WRITERS["txt"](tmp_path / "b.log", TEXTS[5:])
  with registered(
    "mine",
    tmp_path / "a.log",
    validation=[tmp_path / "b.log"],
    file_format="txt",
    style="lm",
    column="line",
    metric_fns=[],
  ) as task:
    assert set(task.splits) == {"train", "validation"}
    assert not task.metric_fns
    assert list(task.output_features) == ["targets"]
    assert len(cached(task)) == 4
