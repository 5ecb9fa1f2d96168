"""Vocabularies' files: one error where they are missing, and others in their place."""

import pathlib
import sys
import time

import pytest
import seqio
import small_tasks

from anystep.errors import AnystepError
from anystep.tasks import seqio_internals
from anystep.tasks.registry.fingerprint import reader_part
from anystep.tasks.registry.modules import import_modules
from anystep.tasks.vocabularies import files as vocabulary_files
from anystep.tasks.vocabularies.hugging_face import HuggingFaceVocabulary, use_file

MODEL = pathlib.Path(seqio.__file__).parent / "test_data" / "sentencepiece" / "sentencepiece.model"


@pytest.fixture(autouse=True)
def as_before(monkeypatch):
  """Leaves SeqIO and what stands in for what as they were."""
  monkeypatch.setattr(seqio.vocabularies, "_load_model", seqio_internals.load_sentencepiece_model)
  monkeypatch.setattr(vocabulary_files, "_stand_ins", {})
  vocabulary_files._look_for_remotely.cache_clear()


@pytest.fixture
def gone(tmp_path):
  return str(tmp_path / "gone.model")


def task_of(vocabulary):
  original = small_tasks.task("small")
  features = {"targets": seqio.Feature(vocabulary)}
  return seqio.Task(
    "small", source=original.source, preprocessors=original.preprocessors, output_features=features
  )


def described(task):
  return reader_part(task, cache_at="placeholder", task_feature_lengths=None)


@pytest.mark.parametrize("kind", [seqio.SentencePieceVocabulary, HuggingFaceVocabulary])
def test_a_missing_file_is_one_error_that_says_what_to_write_where(gone, kind):
  with pytest.raises(AnystepError) as failure:
    described(task_of(kind(gone)))
  error = failure.value
  assert (error.code, error.kind) == (66, "vocabulary_missing")
  assert error.fields["path"] == gone
  assert error.fields["got"] == "no such file"
  assert f'anystep.tasks.vocabularies.use_file("{gone}", "LOCAL_COPY")' in error.fix


def test_a_directory_is_no_file(tmp_path):
  assert vocabulary_files.explain_missing(str(tmp_path)) == "a directory"


def test_a_module_that_reads_a_missing_vocabulary_as_it_is_imported_ends_with_the_same_error(
  tmp_path, monkeypatch, gone
):
  (tmp_path / "reads_a_vocabulary.py").write_text(
    f"import seqio\nSIZE = seqio.SentencePieceVocabulary({gone!r}).vocab_size\n"
  )
  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr(sys, "path", [*sys.path])
  with pytest.raises(AnystepError, match="vocabulary_missing"):
    import_modules(["reads_a_vocabulary"])


def test_a_store_that_no_file_system_is_for_says_so():
  path = "nosuchstore://bucket/sentencepiece.model"
  with pytest.raises(AnystepError) as failure:
    described(task_of(seqio.SentencePieceVocabulary(path)))
  assert failure.value.kind == "vocabulary_missing"
  assert "nosuchstore" in failure.value.fields["got"]


def test_a_store_that_does_not_answer_is_waited_for_once_and_not_for_long(monkeypatch):
  asked = []

  def silent(path):
    asked.append(path)
    time.sleep(30)

  monkeypatch.setattr(vocabulary_files, "_look_for", silent)
  monkeypatch.setattr(vocabulary_files, "_LOOK_SECONDS", 0.2)
  begin_seconds = time.monotonic()
  for _ in range(3):
    with pytest.raises(AnystepError) as failure:
      vocabulary_files.find_file("gs://bucket/silent.model")
    assert failure.value.fields["got"] == "no answer within 0.2 s"
  assert time.monotonic() - begin_seconds < 5
  assert asked == ["gs://bucket/silent.model"]


def test_a_store_that_answers_late_is_no_matter_where_the_file_is_there(monkeypatch):
  monkeypatch.setattr(vocabulary_files, "_look_for", lambda path: None)
  monkeypatch.setattr(vocabulary_files, "fetch", lambda path: path)
  assert vocabulary_files.find_file("gs://bucket/there.model") == "gs://bucket/there.model"


@pytest.mark.parametrize("content", [b"version https://git-lfs.github.com/spec/v1", b""])
def test_a_file_that_is_no_model_is_named(tmp_path, content):
  path = tmp_path / "pointer.model"
  path.write_bytes(content)
  with pytest.raises(AnystepError) as failure:
    described(task_of(seqio.SentencePieceVocabulary(str(path), extra_ids=3)))
  assert (failure.value.code, failure.value.kind) == (65, "vocabulary_invalid")
  assert failure.value.fields["path"] == str(path)
  assert "Git LFS" in failure.value.fix


class TestUseFile:
  def test_serves_vocabularies_that_are_there_already_and_later_ones(self, gone):
    before, captured = seqio.SentencePieceVocabulary(gone), seqio.SentencePieceVocabulary(gone, extra_ids=5)

    def preprocess(dataset):
      return dataset.map(lambda example: {"targets": captured.encode_tf(example["targets"])})

    use_file(gone, MODEL)
    original = seqio.SentencePieceVocabulary(str(MODEL))
    later = seqio.SentencePieceVocabulary(gone)
    for vocabulary in (before, later):
      assert vocabulary.encode("this is a test") == original.encode("this is a test")
    assert described(task_of(before)) == described(task_of(original))
    assert described(small_tasks.task("small", before=(preprocess,)))
    assert captured.vocab_size == original.vocab_size + 5

  def test_serves_tokenizers_as_well(self, tmp_path, gone):
    from tokenizers import Tokenizer, models

    path = tmp_path / "tokenizer.json"
    Tokenizer(models.WordLevel({"<pad>": 0, "a": 1}, unk_token="a")).save(str(path))
    vocabulary = HuggingFaceVocabulary(gone, eos=None, unk=None)
    use_file(gone, path)
    assert vocabulary.encode("a") == [1]

  def test_follows_what_stands_in_for_what_stands_in(self, tmp_path, gone):
    copied = tmp_path / "copy.model"
    copied.write_bytes(MODEL.read_bytes())
    use_file(gone, MODEL)
    use_file(MODEL, copied)
    assert vocabulary_files.find_file(gone) == vocabulary_files.find_file(MODEL) == str(copied)
    use_file(copied, MODEL)
    use_file(MODEL, MODEL)
    assert pathlib.Path(vocabulary_files.find_file(gone)).read_bytes() == MODEL.read_bytes()

  def test_refuses_a_file_that_is_not_there_either(self, tmp_path, gone):
    with pytest.raises(AnystepError) as failure:
      use_file(gone, tmp_path / "nor.model")
    assert failure.value.fields["path"] == str(tmp_path / "nor.model")

  def test_names_both_files_where_what_stands_in_is_gone_by_now(self, tmp_path, gone):
    copied = tmp_path / "copy.model"
    copied.write_bytes(MODEL.read_bytes())
    use_file(gone, copied)
    copied.unlink()
    with pytest.raises(AnystepError) as failure:
      vocabulary_files.find_file(gone)
    assert failure.value.fields["path"] == str(copied)
    assert failure.value.fields["in_place_of"] == gone
