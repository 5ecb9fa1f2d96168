"""A task whose functions moved to another module reads its cache where their sources are the same."""

import dataclasses
import functools
import importlib
import json
import logging
import pathlib
import sys
import types

import pytest
import seqio
import small_tasks
from caches import sign
from job_runs import registered, run_job, stamps_of

from anystep.caches.cache import open_cache
from anystep.errors import AnystepError
from anystep.files.json_files import canonical_json
from anystep.tasks.data_program import main as data_main
from anystep.tasks.registry import moved_functions
from anystep.tasks.registry.fingerprint import check_reader, fingerprint, provenance_difference
from anystep.tasks.registry.moved_functions import accept_moved_functions
from anystep.train import main as train_main
from anystep.transforms import identity

HELPERS = """
class Cleaner:
  def run(self, text):
    return strip(text)

def strip(text):
  return text

def clean(example):
  return {"targets": Cleaner().run(example["targets"])}
"""
PARSE = """
def parse(dataset):
  return dataset.map(lambda example: clean(example))
"""
NAME = "moved_task"


@pytest.fixture
def write_module(tmp_path, monkeypatch):
  """Write a module and import it."""
  monkeypatch.syspath_prepend(str(tmp_path))

  def write(name, text):
    (tmp_path / f"{name}.py").write_text(text)
    importlib.invalidate_caches()
    monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module(name)

  yield write
  for name in ("qa_tasks", "qa_moved"):
    sys.modules.pop(name, None)


@pytest.fixture(autouse=True)
def nothing_accepted(monkeypatch):
  monkeypatch.setattr(moved_functions, "_are_accepted", False)
  moved_functions.report_moves.cache_clear()


def task_of(*preprocessors):
  return seqio.Task(
    NAME,
    source=small_tasks.NumberedTexts({"train": (4,)}),
    preprocessors=[
      functools.partial(seqio.preprocessors.rekey, key_map={"targets": "targets"}),
      *preprocessors,
      seqio.preprocessors.tokenize,
      seqio.CacheDatasetPlaceholder(),
    ],
    output_features={"targets": seqio.Feature(small_tasks.VOCABULARY)},
  )


def manifest_of(task, *, without_calls=False):
  made = fingerprint(task, seed=0, base_seed=0, cache_at="placeholder", task_feature_lengths=None)
  provenance = {
    name: value for name, value in made.provenance.items() if not (without_calls and name == "calls")
  }
  made = dataclasses.replace(
    made, reader=json.loads(canonical_json(made.reader)), provenance=json.loads(canonical_json(provenance))
  )
  return types.SimpleNamespace(
    fingerprint=made, cache_at="placeholder", task_feature_lengths=None, seed=0, base_seed=0
  )


def refusal_of(task, manifest):
  with pytest.raises(AnystepError) as caught:
    check_reader(task, manifest)
  assert (caught.value.code, caught.value.kind) == (76, "task_changed")
  return caught.value


def test_a_manifest_notes_what_functions_call_in_their_module_directly_or_not(write_module):
  module = write_module("qa_tasks", HELPERS + PARSE)
  calls = manifest_of(task_of(module.parse)).fingerprint.provenance["calls"]
  assert calls["qa_tasks.parse"].keys() == {"clean", "Cleaner", "strip"}
  assert "tokenize_impl" in calls["seqio.preprocessors.tokenize"]


@pytest.mark.parametrize("text", [HELPERS + PARSE, "from qa_tasks import clean\n" + PARSE])
def test_a_function_that_moved_with_what_it_calls_or_away_from_it_is_the_same(write_module, caplog, text):
  before = write_module("qa_tasks", HELPERS + PARSE)
  manifest = manifest_of(task_of(before.parse))
  now = task_of(write_module("qa_moved", text).parse)
  with caplog.at_level(logging.WARNING):
    check_reader(now, manifest)
    check_reader(now, manifest)
  (message,) = [record.getMessage() for record in caplog.records]
  assert "qa_tasks.parse is qa_moved.parse now" in message
  assert provenance_difference(now, manifest) is None


@pytest.mark.parametrize(
  ("old", "new", "called"),
  [
    ("return text", "return text + text", "strip"),
    ("Cleaner().run(", "Cleaner().run(text=", "clean"),
    ("def run(self, text)", "def run(self, *, text)", "Cleaner"),
  ],
)
def test_a_function_that_calls_another_one_now_is_refused(write_module, old, new, called):
  manifest = manifest_of(task_of(write_module("qa_tasks", HELPERS + PARSE).parse))
  assert old in HELPERS
  now = task_of(write_module("qa_moved", HELPERS.replace(old, new) + PARSE).parse)
  error = refusal_of(now, manifest)
  assert error.fields["item"] == "what qa_moved.parse calls in its module"
  assert error.fields["got"] == f"another source of {called}"
  assert "--accept_change=module" in error.fix
  accept_moved_functions()
  check_reader(now, manifest)


def test_what_a_function_calls_may_change_where_it_stands_and_is_told(write_module):
  manifest = manifest_of(task_of(write_module("qa_tasks", HELPERS + PARSE).parse))
  changed = HELPERS.replace("return text", "return text + text")
  now = task_of(write_module("qa_tasks", changed + PARSE).parse)
  identity._parse_file.cache_clear()
  check_reader(now, manifest)
  assert provenance_difference(now, manifest).startswith("calls.qa_tasks.parse.strip: ")


@pytest.mark.parametrize(
  ("text", "name", "item"),
  [
    (PARSE.replace("clean(example)", "clean(dict(example))"), "parse", "preprocessors[1].source"),
    (
      PARSE.replace("def parse(dataset)", "def parse(dataset, more=1)"),
      "parse",
      "preprocessors[1].defaults[0]",
    ),
    (PARSE.replace("parse", "parse_all"), "parse_all", "preprocessors[1].function"),
  ],
)
def test_another_function_is_refused_and_nothing_accepts_it(write_module, text, name, item):
  manifest = manifest_of(task_of(write_module("qa_tasks", HELPERS + PARSE).parse))
  now = task_of(getattr(write_module("qa_moved", HELPERS + text), name))
  accept_moved_functions()
  error = refusal_of(now, manifest)
  assert error.fields["item"] == item
  assert "accept" not in error.fix


def test_arguments_that_look_like_a_description_are_no_functions(write_module):
  module = write_module("qa_tasks", HELPERS + PARSE)
  for was, now in (
    ({"function": ["a"]}, {"function": ["b"]}),
    ({"function": "a.parse"}, {"function": "parse"}),
  ):
    step = functools.partial(seqio.preprocessors.rekey, key_map=was)
    manifest = manifest_of(task_of(module.parse, step))
    error = refusal_of(task_of(module.parse, functools.partial(step, key_map=now)), manifest)
    assert error.fields["item"].startswith("preprocessors[2].kwargs.key_map.function")


def test_an_object_of_a_class_that_moved_is_refused(write_module):
  text = "class Parse:\n  def __call__(self, dataset):\n    return dataset\n"
  manifest = manifest_of(task_of(write_module("qa_tasks", text).Parse()))
  accept_moved_functions()
  error = refusal_of(task_of(write_module("qa_moved", text).Parse()), manifest)
  assert error.fields["item"] == "preprocessors[1].object"
  assert (error.fields["expected"], error.fields["got"]) == ("qa_tasks.Parse", "qa_moved.Parse")


def test_a_cache_that_notes_no_calls_needs_the_flag(write_module):
  manifest = manifest_of(task_of(write_module("qa_tasks", HELPERS + PARSE).parse), without_calls=True)
  now = task_of(write_module("qa_moved", HELPERS + PARSE).parse)
  error = refusal_of(now, manifest)
  assert (error.fields["expected"], error.fields["got"]) == ("qa_tasks.parse", "qa_moved.parse")
  assert "--accept_change=module" in error.fix
  accept_moved_functions()
  check_reader(now, manifest)
  assert provenance_difference(now, manifest) is None


def test_programs_take_the_flag(write_module, tmp_path, capsys):
  """A cache of version 0.1 in effect: its manifest notes no calls."""
  root, job_flags = tmp_path / "cache", ["--splits=train"]
  with registered(task_of(write_module("qa_tasks", HELPERS + PARSE).parse)):
    run_job(root, *job_flags, tasks=NAME)
  cache = open_cache(root, NAME, "train")
  document = json.loads((cache.directory / "manifest.train.json").read_text())
  del document["fingerprint"]["provenance"]["calls"]
  sign(pathlib.Path(cache.directory), "train", canonical_json(document, indent=1) + "\n")
  show = ["show", f"--cache_dir={root}", f"--task={NAME}", "--batch_size=2", "--steps=0:1"]
  with registered(task_of(write_module("qa_moved", HELPERS + PARSE).parse)):
    before = stamps_of(root)
    for run in (
      lambda: run_job(root, *job_flags, tasks=NAME),
      lambda: data_main.main([*show, "--module_import=qa_moved"]),
    ):
      with pytest.raises(AnystepError, match="task_changed"):
        run()
    data_main.main([*show, "--module_import=qa_moved", "--accept_change=module"])
    assert moved_functions.are_moves_accepted()
    moved_functions._are_accepted = False
    run_job(root, *job_flags, "--accept_change=module", tasks=NAME)
    assert stamps_of(root) == before
    assert moved_functions.are_moves_accepted()


def test_the_trainer_takes_the_flag_beside_names_of_values():
  values, _ = train_main._parse(
    ["anystep-train", "--gin_file=a.gin", "--accept_change=module", "--accept_change=model.z_loss"]
  )
  assert values.accept_change == ["model.z_loss"]
  assert moved_functions.are_moves_accepted()


READS = """
import functools
import re

LIMIT = 3
PATTERN = re.compile("a+")

class Base:
  def base(self, text):
    return text

class Cleaner(Base):
  def __init__(self, size):
    self.size = size
  def run(self, text):
    return self.base(text)

CLEANER = Cleaner(1)

def add(text, amount=LIMIT):
  return text

def drop(text):
  return text

def cut(text, size):
  return text

short = functools.partial(cut, size=2)
first = lambda text: text
second = lambda text: (text)
TABLE = {"a": add, "b": drop}

def make(size):
  def made(text):
    return (text, size)
  return made

made = make(5)

def decorate(function):
  @functools.wraps(function)
  def run(text):
    return function(text)
  return run

@decorate
def decorated(text):
  return text

plain = decorate(drop)

def parse(dataset):
  def inner(example):
    return [LIMIT, PATTERN, CLEANER, add, short, first, second, TABLE, made, decorated, plain] and example
  return dataset.map(lambda example: inner(example))
"""


def test_a_function_that_reads_the_same_from_another_module_is_the_same(write_module):
  manifest = manifest_of(task_of(write_module("qa_tasks", READS).parse))
  check_reader(task_of(write_module("qa_moved", READS).parse), manifest)


@pytest.mark.parametrize(
  ("old", "new"),
  [
    ("LIMIT = 3", "LIMIT = 4"),
    ('"a+"', '"b+"'),
    ("    return text\n\nclass", "    return text * 2\n\nclass"),
    ("Cleaner(1)", "Cleaner(2)"),
    ("size=2", "size=3"),
    ("first = lambda text: text\n", "first = lambda text: text * 2\n"),
    ('{"a": add, "b": drop}', '{"a": drop, "b": add}'),
    ("make(5)", "make(6)"),
    ("    return function(text)\n", "    return function(text * 2)\n"),
    ("decorate(drop)", "decorate(first)"),
    ("decorate(drop)", "drop"),
    ("def drop(text):\n  return text\n", "from small_tasks import drop\n"),
  ],
)
def test_a_function_that_reads_another_value_from_another_module_is_refused(
  write_module, monkeypatch, old, new
):
  assert old in READS
  monkeypatch.setattr(small_tasks, "drop", lambda text: text, raising=False)
  manifest = manifest_of(task_of(write_module("qa_tasks", READS).parse))
  now = task_of(write_module("qa_moved", READS.replace(old, new)).parse)
  assert refusal_of(now, manifest).fields["item"] == "what qa_moved.parse calls in its module"


def test_functions_without_names_that_changed_places_are_refused(write_module):
  text = READS.replace("(text)\n", "text * 2\n")
  manifest = manifest_of(task_of(write_module("qa_tasks", text).parse))
  swapped = text.replace("first = ", "x = ").replace("second = ", "first = ").replace("x = ", "second = ")
  refusal_of(task_of(write_module("qa_moved", swapped).parse), manifest)
