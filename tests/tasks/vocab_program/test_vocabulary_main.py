"""`anystep-vocab`: models trained on a task's text before its tokens, the same in every run."""

import csv
import functools
import gzip
import json
import random
import shlex
import time

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import seqio
import tensorflow as tf
from job_runs import registered
from pyarrow import feather

from anystep.errors import AnystepError
from anystep.programs import progress
from anystep.tasks.sources.arrow_rows import JsonRows
from anystep.tasks.vocab_program import main as vocabulary_main
from anystep.tasks.vocab_program.main import main
from anystep.tasks.vocab_program.task_texts import read_task_texts
from anystep.tasks.vocab_program.training import (
  Coverage,
  TrainingOptions,
  cut_lines,
  load_processor,
  train_model,
)

WORDS = ["def", "return", "self", "yield", "None", "import", "raise", "lambda", "wörter", "中文"]


def texts_of(count, seed=0):
  words = random.Random(seed)
  return [" ".join(words.choices(WORDS, k=words.randint(1, 30))) + f" {k}" for k in range(count)]


def write_texts(path, column, texts):
  """Writes texts as a column beside a number."""
  rows = [{"number": k, column: text} for k, text in enumerate(texts)]
  ending, _, compression = path.name.partition(".")[2].partition(".")
  if ending in ("csv", "tsv"):
    with path.open("w", newline="") as file:
      # Tabs need no quotes.
      form = {"delimiter": "\t", "quoting": csv.QUOTE_NONE, "quotechar": None} if ending == "tsv" else {}
      writer = csv.DictWriter(file, ["number", column], **form)
      writer.writeheader()
      writer.writerows(rows)
  elif ending in ("parquet", "arrow"):
    (pq.write_table if ending == "parquet" else feather.write_feather)(pa.Table.from_pylist(rows), path)
  else:
    content = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(content) if compression else content)


class Texts(seqio.DataSource):
  """Three source shards of examples with two texts and a number."""

  def __init__(self):
    super().__init__(splits=("train", "validation"))

  @property
  def supports_arbitrary_sharding(self):
    return False

  def list_shards(self, split):
    return [f"part {k}" for k in range(3)]

  def get_dataset(self, split="train", shuffle=False, seed=None, shard_info=None, num_epochs=1):
    assert not shuffle
    texts = texts_of(60, seed=shard_info.index)
    return tf.data.Dataset.from_tensor_slices(
      {"inputs": [f"question {text}" for text in texts], "targets": texts, "number": list(range(60))}
    )


def upper(dataset):
  return dataset.map(lambda example: {**example, "inputs": tf.strings.upper(example["inputs"])})


def task_of(name="texts", steps=None):
  # Of a vocabulary that is not there nothing is asked.
  vocabulary = seqio.SentencePieceVocabulary("/nowhere/yet.model")
  tokenize = functools.partial(seqio.preprocessors.tokenize, copy_pretokenized=False)
  return seqio.Task(
    name,
    source=Texts(),
    preprocessors=[upper, seqio.CacheDatasetPlaceholder(), tokenize, seqio.preprocessors.append_eos]
    if steps is None
    else steps,
    output_features={"inputs": seqio.Feature(vocabulary), "targets": seqio.Feature(vocabulary)},
  )


class TestTaskTexts:
  def test_are_the_output_features_before_they_become_tokens(self):
    examples = list(read_task_texts(task_of(), "train"))
    expected = [[f"question {t}".upper(), t] for shard in range(3) for t in texts_of(60, seed=shard)]
    # TensorFlow's upper case is of ASCII letters alone.
    assert [pair[1] for pair in examples] == [pair[1] for pair in expected]
    assert all(pair[0].startswith("QUESTION ") for pair in examples)

  def test_come_in_equal_numbers_from_every_source_shard(self):
    found = [texts[0] for texts in read_task_texts(task_of(), "train", features=["targets"], max_examples=6)]
    assert found == [text for shard in range(3) for text in texts_of(60, seed=shard)[:2]]
    assert len(list(read_task_texts(task_of(), "train", max_examples=7))) == 7

  def test_do_not_come_from_more_source_shards_than_are_wanted(self, monkeypatch):
    opened = []
    get_dataset = Texts.get_dataset

    def watched(source, *arguments, **named):
      opened.append(named["shard_info"].index)
      return get_dataset(source, *arguments, **named)

    monkeypatch.setattr(Texts, "get_dataset", watched)
    assert len(list(read_task_texts(task_of(), "train", max_examples=1))) == 1
    assert opened == [0]

  @pytest.mark.parametrize(
    ("arguments", "code", "kind", "fields"),
    [
      ({"split": "test"}, 64, "split_unknown", {"expected": "train, validation", "got": "test"}),
      ({"features": ["target"]}, 64, "feature_unknown", {"expected": "targets", "got": "target"}),
      ({"features": ["number"]}, 64, "feature_unknown", {"expected": "inputs, targets", "got": "number"}),
    ],
  )
  def test_that_there_are_not_are_refused(self, arguments, code, kind, fields):
    with pytest.raises(AnystepError) as failure:
      next(read_task_texts(task_of(), **{"split": "train", **arguments}))
    error = failure.value
    assert (error.code, error.kind) == (code, kind)
    assert fields.items() <= error.fields.items()

  def test_of_a_task_that_tokenizes_otherwise_are_refused(self):
    with pytest.raises(AnystepError) as failure:
      next(read_task_texts(task_of(steps=[upper]), "train"))
    assert (failure.value.code, failure.value.kind) == (78, "tokenize_missing")
    assert failure.value.fields["got"] == "upper"

  def test_name_the_shard_of_a_source_that_cannot_be_read(self):
    def fail(dataset):
      return dataset.map(lambda example: tf.io.read_file("/nowhere/" + example["inputs"]))

    task = task_of(steps=[fail, seqio.preprocessors.tokenize])
    with pytest.raises(AnystepError) as failure:
      next(read_task_texts(task, "train"))
    assert (failure.value.code, failure.value.kind) == (66, "source_unreadable")
    assert failure.value.fields["source_shard"] == "part 0"


class TestTraining:
  @pytest.mark.parametrize("model_type", ["unigram", "bpe"])
  def test_gives_the_same_bytes_again_with_seqios_special_ids(self, model_type):
    options = TrainingOptions(size=80, model_type=model_type, character_coverage=1.0)
    one, two = (train_model(iter(texts_of(200)), options) for _ in range(2))
    assert one.content == two.content
    processor = load_processor(one.content)
    found = (processor.pad_id(), processor.eos_id(), processor.unk_id(), processor.bos_id())
    assert found == (0, 1, 2, -1)
    assert processor.get_piece_size() == 80
    assert train_model(iter(texts_of(200, seed=1)), options).content != one.content

  def test_holds_out_every_twentieth_text(self):
    texts = texts_of(200)
    trained = train_model(texts, TrainingOptions(size=60))
    assert trained.held_out == texts[19::20]
    assert trained.trained_examples == 190
    few = train_model(texts[:19], TrainingOptions(size=40))
    assert (few.held_out, few.first_texts) == ([], texts[:19])

  def test_counts_what_is_unknown_or_becomes_bytes(self):
    texts = [text.replace("中文", "") for text in texts_of(200)]
    for byte_fallback in (False, True):
      options = TrainingOptions(size=320 if byte_fallback else 70, byte_fallback=byte_fallback)
      model = train_model(texts, options).content
      assert Coverage.of(model, ["def return"]).uncovered_characters == 0
      coverage = Coverage.of(model, ["def 中文 self"])
      assert (coverage.uncovered_characters, coverage.uncovered_bytes) == (2, 6)
      # SentencePiece begins with a space, and here every character is one of the text's.
      assert (coverage.characters, coverage.normalized_bytes, coverage.text_bytes) == (12, 16, 15)
      assert coverage.byte_tokens == (6 if byte_fallback else 0)
      assert coverage.unknown_tokens == (0 if byte_fallback else 1)
      assert coverage.tokens == len(load_processor(model).encode("def 中文 self"))

  @pytest.mark.parametrize(
    ("size", "expected"), [(9000, "at most"), (5, "a size that the texts allow")], ids=["large", "small"]
  )
  def test_refuses_a_size_that_the_texts_do_not_allow(self, size, expected):
    with pytest.raises(AnystepError) as failure:
      train_model(texts_of(50), TrainingOptions(size=size))
    assert (failure.value.code, failure.value.kind) == (64, "vocabulary_size")
    assert failure.value.fields["expected"].startswith(expected)
    assert failure.value.fields["got"] == size

  def test_refuses_texts_that_hold_nothing(self):
    with pytest.raises(AnystepError) as failure:
      train_model(["", "\n"], TrainingOptions(size=50))
    assert (failure.value.code, failure.value.kind) == (66, "texts_empty")

  def test_lets_the_error_of_reading_through(self):
    def broken():
      yield from texts_of(10)
      raise KeyError("gone")

    with pytest.raises(KeyError, match="gone"):
      train_model(broken(), TrainingOptions(size=50))


@pytest.mark.parametrize(
  "text", ["word " * 3000, "é" * 5000, "中" * 1365 + "文" + "x", "a\r\nb\n\n", "", "x" * 4096, "x" * 4097]
)
def test_long_lines_are_cut_into_pieces_that_sentencepiece_takes(text):
  pieces = list(cut_lines(text))
  assert "".join(pieces) == "".join(text.splitlines())
  assert all(0 < len(piece.encode()) <= 4096 for piece in pieces)
  assert all(piece.endswith(" ") for piece in pieces[:-1]) or " " not in text


class TestProgram:
  def test_trains_on_a_task_and_prints_the_coverage(self, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(progress, "_SHORT_SECONDS", 0.0)
    outputs = [tmp_path / name for name in ("one.model", "two.model")]
    with registered(task_of()):
      for path in outputs:
        arguments = ["train", "--task=texts", "--size=90", "--feature=targets", "--character_coverage=1"]
        assert main([*arguments, f"--output={path}"]) == 0
    one, two = (path.read_bytes() for path in outputs)
    assert one == two
    printed = capsys.readouterr()
    assert "90 pieces (unigram)" in printed.out
    assert "of 171 texts" in printed.out
    assert "9 texts that were held out" in printed.out
    assert "covered: 100.0000%" in printed.out
    assert "tokens per byte: 0." in printed.out
    assert "read: 180 examples" in printed.err
    vocabulary = seqio.SentencePieceVocabulary(str(outputs[0]), extra_ids=10)
    assert vocabulary.decode(vocabulary.encode("def return self 中文")) == "def return self 中文"
    assert vocabulary.vocab_size == 100

  def test_has_examples_in_its_help(self, capsys):
    with pytest.raises(SystemExit):
      main(["--help"])
    _, _, examples = capsys.readouterr().out.partition("\nexamples:\n")
    lines = [shlex.split(line) for line in examples.splitlines()]
    assert len(lines) == 3
    for program, *arguments in lines:
      assert program == "anystep-vocab"
      vocabulary_main.make_parser().parse_args(arguments)

  def test_trains_on_files(self, tmp_path, capsys):
    contents = ["\n".join(texts_of(100, seed=k)).encode() for k in range(2)]
    (tmp_path / "0.txt").write_bytes(contents[0])
    (tmp_path / "1.txt.gz").write_bytes(gzip.compress(contents[1]))
    (tmp_path / "2.txt").mkdir()
    output = tmp_path / "of_files.model"
    arguments = ["train", f"--files={tmp_path}/*.txt*", "--size=330", "--byte_fallback", "--model_type=bpe"]
    assert main([*arguments, "--max_examples=120", f"--output={output}"]) == 0
    assert "of 114 texts" in capsys.readouterr().out
    texts = [text for k in range(2) for text in texts_of(100, seed=k)[:60]]
    options = TrainingOptions(size=330, model_type="bpe", byte_fallback=True)
    assert output.read_bytes() == train_model(texts, options).content

  @pytest.mark.parametrize("ending", ["jsonl", "json.gz", "csv", "tsv", "parquet", "arrow"])
  def test_trains_on_the_texts_of_files_and_never_on_their_syntax(self, tmp_path, ending):
    texts = [f'"{text}"' for text in texts_of(60)]
    write_texts(tmp_path / f"a.{ending}", "body", texts)
    output = tmp_path / "of_files.model"
    arguments = ["train", f"--files={tmp_path}/a.*", "--column=body", "--size=50", f"--output={output}"]
    assert main([*arguments, "--max_examples=50"]) == 0
    assert output.read_bytes() == train_model(texts[:50], TrainingOptions(size=50)).content

  def test_trains_on_files_of_several_formats_and_of_one_that_is_named(self, tmp_path):
    texts = texts_of(80)
    write_texts(tmp_path / "a.jsonl", "text", texts[:40])
    (tmp_path / "b.txt").write_text("\n".join(texts[40:]), encoding="utf-8")
    (tmp_path / "lines.log").write_text("\n".join(texts), encoding="utf-8")
    output = tmp_path / "of_files.model"
    for flags in ([f"--files={tmp_path}/[ab].*"], [f"--files={tmp_path}/lines.log", "--file_format=txt"]):
      main(["train", *flags, "--size=50", f"--output={output}", "--overwrite"])
      assert output.read_bytes() == train_model(texts, TrainingOptions(size=50)).content

  @pytest.mark.parametrize(
    ("name", "flags", "kind", "fix"),
    [
      ("a.log", [], "format_unknown", "--file_format"),
      ("a", [], "format_unknown", "--file_format"),
      ("a.parquet.gz", [], "format_unknown", "--file_format"),
      ("a.jsonl", ["--column=txet"], "column_missing", "text"),
      ("a.jsonl", ["--file_format=parquet"], "file_container", ""),
      ("a.jsonl", ["--split=train"], "arguments", "--task"),
    ],
  )
  def test_refuses_files_whose_texts_it_cannot_tell(self, tmp_path, name, flags, kind, fix):
    write_texts(tmp_path / "a.jsonl", "text", texts_of(30))
    (tmp_path / "a.jsonl").rename(tmp_path / name)
    with pytest.raises(AnystepError) as failure:
      main(["train", f"--files={tmp_path / name}", *flags, "--size=50", f"--output={tmp_path}/no.model"])
    assert failure.value.kind == kind
    assert fix in failure.value.fix
    assert not (tmp_path / "no.model").exists()

  def test_says_which_file_holds_what_is_no_text(self, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n{"text": [1]}\n')
    with pytest.raises(AnystepError) as failure:
      main(["train", f"--files={tmp_path}/a.jsonl", "--size=50", f"--output={tmp_path}/no.model"])
    assert (failure.value.code, failure.value.kind) == (65, "file_rows")
    assert failure.value.fields["path"].endswith("a.jsonl")
    assert failure.value.fix.startswith("mend the file")

  def test_says_which_file_went_while_it_was_read(self, tmp_path, monkeypatch):
    write_texts(tmp_path / "a.jsonl", "text", texts_of(30))

    def gone(rows, groups=None):
      raise OSError("the disk went")
      yield

    monkeypatch.setattr(JsonRows, "batches", gone)
    with pytest.raises(AnystepError) as failure:
      main(["train", f"--files={tmp_path}/a.jsonl", "--size=50", f"--output={tmp_path}/no.model"])
    assert (failure.value.code, failure.value.kind) == (66, "source_unreadable")
    assert failure.value.fields["source_shard"].endswith("a.jsonl")
    assert failure.value.fix == "mend the file, or say which format it is in with --file_format"

  def test_says_that_sentencepiece_is_at_work(self, monkeypatch, capsys):
    monkeypatch.setattr(vocabulary_main, "_SHOWN_SECONDS", 0.01)
    monkeypatch.setattr(progress, "_PLAIN_PERIOD_SECONDS", 0.02)
    monkeypatch.setattr(progress, "_SHORT_SECONDS", 0.0)
    with vocabulary_main._show_training(TrainingOptions(size=50)):
      time.sleep(0.3)
    working, *_, last = capsys.readouterr().err.splitlines()
    assert working.startswith("train: 0/50 pieces")
    assert working.endswith("SentencePiece is at work")
    assert last.startswith("train: 50/50 pieces")
    with pytest.raises(KeyError), vocabulary_main._show_training(TrainingOptions(size=50)):
      raise KeyError
    assert capsys.readouterr().err.splitlines()[-1].startswith("train: 0/50 pieces")

  @pytest.mark.parametrize(
    ("arguments", "kind"),
    [
      (["--task=text", "--size=50"], "task_unknown"),
      (["--files=/nowhere/*.txt", "--size=50"], "files_missing"),
      (["--files=x", "--feature=targets", "--size=50"], "arguments"),
      (["--files=x", "--size=3"], "arguments"),
      (["--files=x", "--size=50", "--character_coverage=1.5"], "arguments"),
      (["--files=x", "--task=texts", "--size=50"], "arguments"),
      (["--size=50"], "arguments"),
    ],
  )
  def test_refuses_what_it_cannot_do_before_it_reads(self, tmp_path, arguments, kind):
    with registered(task_of()), pytest.raises(AnystepError) as failure:
      main(["train", f"--output={tmp_path}/no.model", *arguments])
    assert failure.value.kind == kind
    assert failure.value.code == (66 if kind == "files_missing" else 64)
    assert not list(tmp_path.iterdir())

  def test_replaces_a_file_when_it_is_told_to(self, tmp_path):
    output = tmp_path / "there.model"
    output.write_text("precious")
    (tmp_path / "a.txt").write_text("\n".join(texts_of(100)), encoding="utf-8")
    arguments = ["train", f"--files={tmp_path}/a.txt", "--size=50", f"--output={output}"]
    with pytest.raises(AnystepError, match="output_exists"):
      main(arguments)
    assert output.read_text() == "precious"
    main([*arguments, "--overwrite"])
    assert load_processor(output.read_bytes()).get_piece_size() == 50

  def test_shows_what_a_model_holds(self, tmp_path, capsys):
    path = tmp_path / "shown.model"
    path.write_bytes(train_model(texts_of(100), TrainingOptions(size=50)).content)
    main(["show", str(path), "--text=def self"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["SentencePiece model, 50 pieces", "ids: padding 0, end 1, unknown 2, begin none"]
    assert lines[2].endswith("tokens: " + lines[2].partition(": ")[2])
    assert "=" in lines[2]
    assert lines[3].startswith("sha256: ")

  def test_shows_what_a_tokenizer_holds(self, tmp_path, capsys):
    from tokenizers import Tokenizer, models

    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "def": 1}, unk_token="<unk>"))
    tokenizer.add_special_tokens(["<end>"])
    path = tmp_path / "tokenizer.json"
    tokenizer.save(str(path))
    main(["show", str(path), "--text=def"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == ["tokenizer.json (WordLevel), 3 tokens", "added: <end> 2", "1 tokens: def=1"]

  @pytest.mark.parametrize(
    ("content", "code", "kind"),
    [
      (None, 66, "vocabulary_missing"),
      (b"", 65, "vocabulary_invalid"),
      (b"version https://git-lfs", 65, "vocabulary_invalid"),
      (b"{}", 65, "vocabulary_invalid"),
    ],
  )
  def test_shows_nothing_of_what_is_no_vocabulary(self, tmp_path, content, code, kind):
    path = tmp_path / "file"
    if content is not None:
      path.write_bytes(content)
    with pytest.raises(AnystepError) as failure:
      main(["show", str(path)])
    assert (failure.value.code, failure.value.kind) == (code, kind)
    assert failure.value.fields["path"] == str(path)
