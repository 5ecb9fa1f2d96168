"""Fingerprints: the same wherever a task is the same, another where its examples could be."""

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import pathlib
import subprocess
import sys
import types

import pytest
import seqio
import small_tasks
import tensorflow as tf

from anystep.errors import AnystepError
from anystep.files.json_files import canonical_json
from anystep.tasks.registry.fingerprint import (
  cached_preprocessors,
  check_reader,
  fingerprint,
  provenance_part,
  reader_part,
)

TESTS = pathlib.Path(__file__).resolve().parents[2]


def parts_of(task, cache_at="placeholder", lengths=None):
  return json.loads(canonical_json(reader_part(task, cache_at=cache_at, task_feature_lengths=lengths)))


def small(**changes):
  """The small task with other output features or preprocessors."""
  original = seqio.TaskRegistry.get("small")
  arguments = {
    "source": original.source,
    "preprocessors": original.preprocessors,
    "output_features": dict(original.output_features),
  }
  return seqio.Task("small", **{**arguments, **changes})


def feature(**changes):
  return {"targets": seqio.Feature(**{"vocabulary": small_tasks.VOCABULARY, **changes})}


MODEL = pathlib.Path(seqio.__file__).parent / "test_data" / "sentencepiece" / "sentencepiece.model"


class TestReaderPart:
  @pytest.mark.parametrize(
    ("changes", "item"),
    [
      ({"output_features": feature(vocabulary=seqio.ByteVocabulary(extra_ids=11))}, "vocabulary.extra_ids"),
      ({"output_features": feature(vocabulary=seqio.PassThroughVocabulary(size=269))}, "vocabulary.class"),
      ({"output_features": feature(add_eos=False)}, "add_eos"),
      ({"output_features": feature(required=False)}, "required"),
      ({"output_features": feature(dtype=tf.int64)}, "dtype"),
      ({"output_features": feature(rank=2)}, "rank"),
      ({"output_features": {**feature(), "inputs": seqio.Feature(small_tasks.VOCABULARY)}}, "inputs"),
    ],
  )
  def test_names_the_item_of_an_output_feature_that_differs(self, changes, item):
    assert difference_of(small(), small(**changes)).startswith("output_features.")
    assert difference_of(small(), small(**changes)).endswith(item)

  @pytest.mark.parametrize(
    ("before", "item"),
    [
      (small_tasks.BEFORE_CACHE[:-1], "preprocessors"),
      ((*small_tasks.BEFORE_CACHE[:-1], small_tasks.observe), "preprocessors[3].captured"),
      (
        (
          *small_tasks.BEFORE_CACHE[:2],
          functools.partial(seqio.preprocessors.tokenize, copy_pretokenized=True),
          small_tasks.BEFORE_CACHE[3],
        ),
        "preprocessors[2].kwargs.copy_pretokenized",
      ),
    ],
  )
  def test_names_the_preprocessor_that_differs(self, before, item):
    assert difference_of(small(), small_tasks.task("small", before=before)) == item

  def test_holds_what_stands_before_the_placeholder_alone(self):
    assert parts_of(small_tasks.task("small", after=())) == parts_of(small())
    assert len(parts_of(small())["preprocessors"]) == len(small_tasks.BEFORE_CACHE)

  def test_holds_every_preprocessor_and_the_lengths_where_all_is_cached(self):
    at_end = functools.partial(parts_of, cache_at="end")
    assert at_end(small_tasks.task("small", after=())) != at_end(small())
    assert len(at_end(small())["preprocessors"]) == len(small_tasks.BEFORE_CACHE + small_tasks.AFTER_CACHE)
    assert at_end(small(), lengths={"targets": 8}) != at_end(small(), lengths={"targets": 9})
    assert at_end(small()) != parts_of(small())

  def test_does_not_depend_on_the_source_or_the_seeds(self):
    task, elsewhere = small(), small(source=small_tasks.NumberedTexts({"train": (1,)}))
    options = {"cache_at": "placeholder", "task_feature_lengths": None}
    one = fingerprint(task, seed=0, base_seed=0, **options)
    assert one.reader_sha256 == fingerprint(elsewhere, seed=1, base_seed=2, **options).reader_sha256
    assert one.provenance != fingerprint(task, seed=1, base_seed=0, **options).provenance
    assert one.provenance != fingerprint(task, seed=0, base_seed=1, **options).provenance

  def test_knows_a_sentencepiece_model_by_its_content(self, tmp_path):
    copy, cut = tmp_path / "copy.model", tmp_path / "cut.model"
    copy.write_bytes(MODEL.read_bytes())
    # An unknown field at its end: another file of the same pieces.
    cut.write_bytes(MODEL.read_bytes() + b"\xc2\x3e\x01x")
    original, copied, changed = (
      parts_of(small(output_features=feature(vocabulary=seqio.SentencePieceVocabulary(str(path)))))
      for path in (MODEL, copy, cut)
    )
    assert copied == original
    assert changed != original
    described = original["output_features"]["targets"]["vocabulary"]
    assert described["content_sha256"] == hashlib.sha256(MODEL.read_bytes()).hexdigest()

  def test_knows_other_vocabularies_by_their_content_too(self):
    one, other = (
      parts_of(small(output_features=feature(vocabulary=seqio.UnigramVocabulary(pieces))))
      for pieces in (["a", "b"], ["c", "d"])
    )
    assert one != other

  def test_is_json_that_reads_back_as_it_was(self):
    for name in ("small", "small_joined", "small_slow_graph"):
      part = reader_part(seqio.TaskRegistry.get(name), cache_at="end", task_feature_lengths={"targets": 8})
      assert json.loads(canonical_json(part)) == part


def manifest_of(task, **options):
  """What of a manifest a reader compares."""
  cached = {"cache_at": "placeholder", "task_feature_lengths": None, **options}
  made = fingerprint(task, seed=0, base_seed=0, **cached)
  made = dataclasses.replace(made, reader=json.loads(canonical_json(made.reader)))
  return types.SimpleNamespace(fingerprint=made, **cached)


def difference_of(cached, now):
  with pytest.raises(AnystepError) as caught:
    check_reader(now, manifest_of(cached))
  assert (caught.value.code, caught.value.kind) == (76, "task_changed")
  assert caught.value.fields["task"] == now.name
  assert caught.value.fields["expected"] != caught.value.fields["got"]
  assert "--overwrite" in caught.value.fix
  return caught.value.fields["item"]


class TestCheckReader:
  @pytest.mark.parametrize(
    "options", [{}, {"cache_at": "end"}, {"cache_at": "end", "task_feature_lengths": {"targets": 8}}]
  )
  def test_accepts_the_task_that_was_cached(self, options):
    check_reader(small(), manifest_of(small(), **options))

  def test_accepts_a_task_that_differs_in_what_runs_at_reading(self):
    check_reader(small_tasks.task("small", after=()), manifest_of(small()))

  def test_refuses_it_where_all_is_cached(self):
    with pytest.raises(AnystepError, match="task_changed"):
      check_reader(small_tasks.task("small", after=()), manifest_of(small(), cache_at="end"))

  def test_shows_the_cached_and_the_registered_value(self):
    with pytest.raises(AnystepError) as caught:
      check_reader(small(output_features=feature(add_eos=False)), manifest_of(small()))
    assert caught.value.fields == {
      "task": "small",
      "item": "output_features.targets.add_eos",
      "expected": True,
      "got": False,
    }

  def test_refuses_a_task_of_another_name(self):
    assert difference_of(small(), small_tasks.task("small2")) == "task"


@pytest.mark.parametrize(
  ("cache_at", "expected"), [("placeholder", small_tasks.BEFORE_CACHE), ("end", "all but the placeholder")]
)
def test_the_job_runs_what_stands_before_the_placeholder_or_all(cache_at, expected):
  everything = [*small_tasks.BEFORE_CACHE, *small_tasks.AFTER_CACHE]
  assert list(cached_preprocessors(small(), cache_at)) == (
    list(expected) if cache_at == "placeholder" else everything
  )
  without = small(preprocessors=everything)
  assert list(cached_preprocessors(without, cache_at)) == everything


def texts_in(value):
  if isinstance(value, dict):
    for key, item in value.items():
      yield key
      yield from texts_in(item)
  elif isinstance(value, (list, tuple)):
    for item in value:
      yield from texts_in(item)
  else:
    yield str(value)


class TestProvenance:
  def test_does_not_depend_on_where_the_program_runs(self, tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("a line")
    monkeypatch.chdir(tmp_path)
    parts = [
      provenance_part(small(source=seqio.TextLineDataSource({"train": pattern})), seed=0, base_seed=0)
      for pattern in ("a.txt", str(tmp_path / "a.txt"))
    ]
    assert parts[0] == parts[1]

  def sources(self, directory):
    pattern = {"train": f"{directory}/train-*", "validation": f"{directory}/validation-*"}
    yield seqio.TextLineDataSource(split_to_filepattern=pattern)
    yield seqio.TFExampleDataSource(split_to_filepattern=pattern, feature_description={})
    yield seqio.FunctionDataSource(lambda split, shuffle_files: None, splits=["train"])
    yield small_tasks.NumberedTexts()
    with contextlib.suppress(ImportError):
      from anystep.tasks.catalogue import stdlib

      yield stdlib.PythonFilesSource(str(directory))

  def test_names_no_place_of_this_machine(self, tmp_path):
    for source in self.sources(tmp_path):
      part = provenance_part(small(source=source), seed=3, base_seed=4)
      for text in texts_in(json.loads(canonical_json(part))):
        assert "/" not in text
        assert str(tmp_path) not in text

  def test_says_what_made_the_examples(self):
    part = provenance_part(small(), seed=3, base_seed=4)
    assert (part["seed"], part["base_seed"]) == (3, 4)
    assert part["source"] == "small_tasks.NumberedTexts"
    assert part["source_arguments"]["sizes"]["train"] == list(small_tasks.SOURCE_SIZES["train"])
    assert part["libraries"]["seqio"] == "0.0.20"
    assert part["libraries"]["tensorflow"] == tf.__version__


REGISTERED = """
import importlib, pkgutil, sys
import anystep.tasks
early = "seqio" in sys.modules
import seqio
for module in pkgutil.walk_packages(anystep.tasks.__path__, "anystep.tasks."):
  if not module.name.startswith("anystep.tasks.catalogue."):
    importlib.import_module(module.name)
registered = [*seqio.TaskRegistry.names(), *seqio.MixtureRegistry.names()]
"""
FINGERPRINTS = """
import seqio, small_tasks, anystep.tasks.stdlib
from anystep.caches.manifest import canonical_json
from anystep.transforms.identity import describe
from anystep.tasks.registry.fingerprint import fingerprint
values = [{"b", "a", "c"}, frozenset(map(str, range(50))), {"y": {"q", "p"}}]
texts = {"values": canonical_json(describe(values))}
for name in ["small", "small_joined", "stdlib_lm", "stdlib_span_corruption"]:
  task = seqio.TaskRegistry.get(name)
  made = fingerprint(task, cache_at="end", task_feature_lengths={"targets": 8}, seed=0, base_seed=0)
  texts[name] = canonical_json([made.reader, made.provenance])
"""


@pytest.mark.long
def test_fingerprints_are_the_same_in_every_process_and_directory(tmp_path):
  """And of the modules of anystep.tasks, the catalogue's alone register tasks, the package nothing."""
  elsewhere = subprocess.run(
    [
      sys.executable,
      "-c",
      f"{REGISTERED}{FINGERPRINTS}\nimport json\nprint(json.dumps([early, registered, texts]))",
    ],
    cwd=tmp_path,
    env=os.environ | {"PYTHONPATH": str(TESTS), "PYTHONHASHSEED": "1", "TF_CPP_MIN_LOG_LEVEL": "3"},
    stdout=subprocess.PIPE,
    text=True,
    check=True,
  )
  early, registered, texts = json.loads(elsewhere.stdout)
  assert (early, registered) == (False, [])
  here = {}
  exec(FINGERPRINTS, here)
  assert texts == here["texts"]
