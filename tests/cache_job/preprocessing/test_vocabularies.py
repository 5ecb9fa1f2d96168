"""A cache keeps the files of its vocabularies, and is read with them where the originals are gone."""

import functools
import hashlib
import importlib.util
import json
import pathlib
import shutil

import pytest
import seqio
import small_tasks
from job_runs import digests_of, registered, run_job
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from anystep.caches.cache import open_cache
from anystep.errors import AnystepError
from anystep.files.json_files import canonical_json
from anystep.programs.progress import show_library_work
from anystep.tasks import seqio_internals
from anystep.tasks.registry.fingerprint import check_reader, provenance_difference
from anystep.tasks.registry.modules import registered_tasks
from anystep.tasks.vocabularies import files as vocabulary_files
from anystep.tasks.vocabularies.copies import cached_vocabularies
from anystep.tasks.vocabularies.decoding import describe_feature, rebuild_vocabularies
from anystep.tasks.vocabularies.hugging_face import HuggingFaceVocabulary, use_file

MODEL = pathlib.Path(seqio.__file__).parent / "test_data" / "sentencepiece" / "sentencepiece.model"
NAME = "with_files"
LAYOUTS = [
  pytest.param((), id="shards"),
  pytest.param(("--output_format=tfrecord",), id="tfrecord", marks=pytest.mark.long),
]


@pytest.fixture(autouse=True)
def as_before(monkeypatch):
  """Leaves what stands in for what as it was."""
  monkeypatch.setattr(seqio.vocabularies, "_load_model", seqio_internals.load_sentencepiece_model)
  monkeypatch.setattr(vocabulary_files, "_stand_ins", {})


@pytest.fixture(scope="module")
def made(tmp_path_factory):
  """A folder with the files of two vocabularies, `originals`, and the root of a task's `cache`."""
  folder = tmp_path_factory.mktemp("made")
  originals = folder / "originals"
  originals.mkdir()
  (originals / "sentencepiece.model").write_bytes(MODEL.read_bytes())
  tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
  tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
  special = ["<pad>", "</s>", "<unk>"]
  tokenizer.train_from_iterator(
    ["wörter train validation 0 1 2 3 4 5 6 7 8 9 -:"],
    trainers.BpeTrainer(special_tokens=special, vocab_size=60, show_progress=False),
  )
  tokenizer.save(str(originals / "tokenizer.json"))
  with registered(task_of(pieces(originals), tokens(originals))):
    run_job(folder / "cache", tasks=NAME)
  return folder


@pytest.fixture
def originals(made, tmp_path):
  """The vocabularies' files, in a folder of their own."""
  return shutil.copytree(made / "originals", tmp_path / "originals")


@pytest.fixture
def cached(made, tmp_path):
  """The root of a task's cache, which was made with the same files in another folder."""
  return shutil.copytree(made / "cache", tmp_path / "cache")


def pieces(folder, extra_ids=5):
  return seqio.SentencePieceVocabulary(str(folder / "sentencepiece.model"), extra_ids=extra_ids)


def tokens(folder):
  return HuggingFaceVocabulary(folder / "tokenizer.json", extra_ids=3)


def twice(dataset):
  return dataset.map(lambda example: {"inputs": example["targets"], "targets": example["targets"]})


def task_of(inputs, targets, name=NAME):
  return seqio.Task(
    name,
    source=small_tasks.NumberedTexts({"train": (9, 4), "validation": (3,)}),
    preprocessors=[
      twice,
      functools.partial(seqio.preprocessors.tokenize, copy_pretokenized=False),
      seqio.CacheDatasetPlaceholder(),
    ],
    output_features={"inputs": seqio.Feature(inputs), "targets": seqio.Feature(targets)},
  )


def sha256_of(path):
  return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize("flags", LAYOUTS)
def test_the_job_keeps_the_files_bytes_under_their_sha256(originals, tmp_path, flags):
  with registered(task_of(pieces(originals), tokens(originals))):
    run_job(tmp_path / "cache", *flags, "--splits=validation", tasks=NAME)
    before = digests_of(tmp_path / "cache")
    run_job(tmp_path / "cache", *flags, tasks=NAME)
  folder = tmp_path / "cache" / NAME / "vocabularies"
  assert {path.name: path.read_bytes() for path in folder.iterdir()} == {
    sha256_of(path): path.read_bytes() for path in originals.iterdir()
  }
  after = digests_of(tmp_path / "cache")
  assert before.items() - after.items() == {(f"{NAME}/COMPLETED", before[f"{NAME}/COMPLETED"])}
  cache = open_cache(tmp_path / "cache", NAME, "train")
  cache.verify()
  assert cache.vocabularies == {
    "inputs": sha256_of(originals / "sentencepiece.model"),
    "targets": sha256_of(originals / "tokenizer.json"),
  }


def test_files_described_in_place_have_copies_too(originals, tmp_path):
  from caches import build_as_is

  root = tmp_path / "data"
  build_as_is(root, task="elsewhere", container="tfrecord")
  vocabulary = pieces(originals)
  task = seqio.Task(
    NAME,
    source=seqio.TFExampleDataSource(
      {"train": [str(path) for path in sorted((root / "corpus").rglob("*.tfrecord"))]},
      feature_description=_feature_description(),
    ),
    preprocessors=[seqio.CacheDatasetPlaceholder()],
    output_features={name: seqio.Feature(vocabulary) for name in ("inputs", "targets")},
  )
  with registered(task):
    run_job(root, "--index_only", tasks=NAME)
  (path,) = (root / NAME / "vocabularies").iterdir()
  assert path.read_bytes() == MODEL.read_bytes()
  open_cache(root, NAME, "train").verify()


def _feature_description():
  import tensorflow as tf

  return {name: tf.io.VarLenFeature(tf.int64) for name in ()} | {
    "number": tf.io.FixedLenFeature([], tf.int64),
    "inputs": tf.io.FixedLenSequenceFeature([], tf.int64, allow_missing=True),
    "targets": tf.io.FixedLenSequenceFeature([], tf.int64, allow_missing=True),
  }


def test_overwriting_leaves_the_copies_of_the_new_vocabulary_alone(originals, cached):
  folder = cached / NAME / "vocabularies"
  (folder / "0123").write_text("an attempt that was cut short")
  with registered(task_of(pieces(originals), small_tasks.VOCABULARY)):
    run_job(cached, "--overwrite", tasks=NAME)
  assert [path.name for path in folder.iterdir()] == [sha256_of(originals / "sentencepiece.model")]
  with registered(task_of(small_tasks.VOCABULARY, small_tasks.VOCABULARY)):
    run_job(cached, "--overwrite", tasks=NAME)
  assert not folder.exists(), "a task without files has a cache without the folder"
  provenance = open_cache(cached, NAME, "train").manifest.fingerprint.provenance
  assert "vocabularies" not in provenance
  assert "tokenizers" not in provenance["libraries"]


@pytest.mark.parametrize(
  ("harm", "kind"),
  [(pathlib.Path.unlink, "file_missing"), (lambda path: path.write_bytes(b"x"), "file_changed")],
)
def test_verify_misses_a_copy_that_is_gone_or_another(originals, cached, harm, kind):
  path = cached / NAME / "vocabularies" / sha256_of(originals / "tokenizer.json")
  harm(path)
  cache = open_cache(cached, NAME, "train")
  with pytest.raises(AnystepError) as failure:
    cache.verify()
  assert (failure.value.code, failure.value.kind) == (65, kind)
  assert str(failure.value.fields["path"]) == str(path)


def test_a_copys_name_cannot_lead_out_of_the_cache(cached):
  cache = open_cache(cached, NAME, "train")
  with pytest.raises(AnystepError) as failure:
    cache.vocabulary("../" * 20 + "etc/passwd")
  assert (failure.value.code, failure.value.kind) == (77, "vocabulary_name")
  assert "sha256" in failure.value.fields["expected"]


def moved(originals):
  """The originals' new place; the old one is empty now."""
  place = originals.with_name("elsewhere")
  originals.rename(place)
  return place


class TestWhereTheOriginalsAreGone:
  def test_a_reader_uses_the_copies_and_says_so(self, originals, cached, capsys):
    place = moved(originals)
    task = task_of(pieces(originals), tokens(originals))
    cache = open_cache(cached, NAME, "train")
    with show_library_work():
      check_reader(task, cache.manifest, cache=cache)
    note = capsys.readouterr().err.splitlines()
    assert len(note) == 2
    assert all(str(originals) in line and str(cached / NAME / "vocabularies") in line for line in note)
    text = "wörter 1 2"
    assert task.output_features["inputs"].vocabulary.encode(text) == pieces(place).encode(text)
    assert task.output_features["targets"].vocabulary.encode(text) == tokens(place).encode(text)
    assert provenance_difference(task, cache.manifest) is None
    check_reader(task, cache.manifest, cache=cache)
    assert capsys.readouterr().err == ""

  def test_the_commands_find_them_too(self, originals, cached):
    moved(originals)
    task = task_of(pieces(originals), tokens(originals))
    with registered(task):
      found = registered_tasks([], [open_cache(cached, NAME, "train")])
    assert found == {NAME: task}

  def test_a_reader_without_the_cache_says_what_is_missing(self, originals, cached):
    moved(originals)
    task = task_of(pieces(originals), tokens(originals))
    with pytest.raises(AnystepError, match="vocabulary_missing"):
      check_reader(task, open_cache(cached, NAME, "train").manifest)

  def test_a_copy_that_is_another_file_is_not_used(self, originals, cached):
    path = cached / NAME / "vocabularies" / sha256_of(originals / "sentencepiece.model")
    path.write_bytes(b"another")
    moved(originals)
    task = task_of(pieces(originals), tokens(originals))
    cache = open_cache(cached, NAME, "train")
    with pytest.raises(AnystepError, match="file_changed"):
      check_reader(task, cache.manifest, cache=cache)

  def test_another_vocabulary_is_still_refused(self, originals, cached):
    moved(originals)
    task = task_of(pieces(originals, extra_ids=6), tokens(originals))
    cache = open_cache(cached, NAME, "train")
    with pytest.raises(AnystepError) as failure:
      check_reader(task, cache.manifest, cache=cache)
    assert failure.value.kind == "task_changed"
    assert failure.value.fields["item"].startswith("output_features.inputs.vocabulary")

  def test_the_job_ends_before_it_begins(self, originals, tmp_path):
    moved(originals)
    with registered(task_of(pieces(originals), tokens(originals))), pytest.raises(AnystepError) as failure:
      run_job(tmp_path / "cache", tasks=NAME)
    assert (failure.value.code, failure.value.kind) == (66, "vocabulary_missing")
    assert not (tmp_path / "cache").exists()

  def test_the_job_takes_what_stands_in_and_makes_the_same_cache(self, originals, cached, tmp_path):
    place = moved(originals)
    for path in place.iterdir():
      use_file(originals / path.name, path)
    with registered(task_of(pieces(originals), tokens(originals))):
      run_job(tmp_path / "again", tasks=NAME)
    assert digests_of(tmp_path / "again") == digests_of(cached)


def test_an_original_that_is_there_is_read_whatever_copies_there_are(originals, cached, capsys):
  task = task_of(pieces(originals), tokens(originals))
  cache = open_cache(cached, NAME, "train")
  check_reader(task, cache.manifest, cache=cache)
  assert capsys.readouterr().err == ""


def test_a_file_that_changed_since_its_vocabulary_was_read_is_refused(originals, tmp_path):
  inputs = pieces(originals)
  _ = inputs.vocab_size
  path = originals / "sentencepiece.model"
  path.write_bytes(MODEL.read_bytes() + b"\xc2\x3e\x01x")
  with registered(task_of(inputs, small_tasks.VOCABULARY)), pytest.raises(AnystepError) as failure:
    run_job(tmp_path / "cache", "--splits=validation", tasks=NAME)
  error = failure.value
  assert (error.code, error.kind) == (65, "vocabulary_changed")
  assert (error.fields["feature"], error.fields["path"]) == ("inputs", str(path))
  assert not (tmp_path / "cache" / NAME / "COMPLETED").exists()


def test_caches_older_than_the_copies_are_read_without_a_word(originals, cached):
  directory = cached / NAME
  for split in ("train", "validation"):
    path = directory / f"manifest.{split}.json"
    document = json.loads(path.read_text())
    del document["fingerprint"]["provenance"]["vocabularies"]
    path.write_text(canonical_json(document, indent=1) + "\n")
  splits = ("train", "validation")
  lines = [f"{split} {sha256_of(directory / f'manifest.{split}.json')}\n" for split in splits]
  (directory / "COMPLETED").write_text("".join(lines))
  cache = open_cache(cached, NAME, "train")
  cache.verify()
  task = task_of(pieces(originals), tokens(originals))
  check_reader(task, cache.manifest, cache=cache)
  assert provenance_difference(task, cache.manifest) is None


class TestWithoutTheTask:
  def test_texts_are_read_with_what_the_cache_has(self, originals, cached):
    place = moved(originals)
    found = cached_vocabularies(open_cache(cached, NAME, "train"))
    assert found["targets"] == tokens(place)
    assert found["inputs"].sp_model == pieces(place).sp_model
    ids = found["inputs"].encode("this is a test")
    assert found["inputs"].decode(ids) == "this is a test"

  def test_commands_get_them_by_task(self, originals, cached, monkeypatch):
    caches = {NAME: open_cache(cached, NAME, "train")}
    found = rebuild_vocabularies(caches)
    assert found[NAME]["targets"] == tokens(originals)
    text = describe_feature(caches[NAME][0]["targets"], found[NAME]["targets"])["text"]
    assert "train" in text.replace(" ", "")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert rebuild_vocabularies(caches) == {}

  def test_bytes_need_no_copy(self, tmp_path):
    with registered(task_of(small_tasks.VOCABULARY, seqio.ByteVocabulary())):
      run_job(tmp_path, "--splits=validation", tasks=NAME)
    found = cached_vocabularies(open_cache(tmp_path, NAME, "validation"))
    assert found == {"inputs": small_tasks.VOCABULARY, "targets": seqio.ByteVocabulary()}

  def test_what_a_description_leaves_open_is_not_guessed(self, originals, tmp_path):
    path = str(originals / "sentencepiece.model")
    reversed_ids = seqio.SentencePieceVocabulary(path, extra_ids=5, reverse_extra_ids=False)
    with registered(task_of(reversed_ids, tokens(originals))):
      run_job(tmp_path / "cache", "--splits=validation", tasks=NAME)
    assert cached_vocabularies(open_cache(tmp_path / "cache", NAME, "validation")).keys() == {"targets"}
