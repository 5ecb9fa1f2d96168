"""Fingerprints: the same wherever a task is the same, another where its examples could be."""

import contextlib
import dataclasses
import enum
import fractions
import functools
import hashlib
import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys
import textwrap
import types

import numpy as np
import pytest
import seqio
import small_tasks
import tensorflow as tf

from anystep.errors import AnystepError
from anystep.manifest import canonical_json
from anystep.tasks.fingerprint import (
  cached_preprocessors,
  check_reader,
  describe,
  fingerprint,
  provenance_part,
  reader_part,
)

TESTS = pathlib.Path(__file__).resolve().parents[1]


def text_of(value):
  return canonical_json(describe(value))


@pytest.fixture
def load(tmp_path):
  """`load(source)`: a module of the name `user_tasks` with that source, each in a file of its own."""

  def load_module(source):
    path = tmp_path / f"copy_{len(list(tmp_path.iterdir()))}" / "user_tasks.py"
    path.parent.mkdir()
    path.write_text(textwrap.dedent(source))
    spec = importlib.util.spec_from_file_location("user_tasks", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

  return load_module


MODULE = '''
import functools
import seqio

OFFSET, REPEAT = 3, 1

def scaled_by(factor):
  def scale(dataset, offset=OFFSET, *, repeat=REPEAT):
    """Scales."""
    def one(example):
      "One."
      return example * factor + offset
    return dataset.map(one)
  return scale

@seqio.map_over_dataset(num_seeds=2)
def draw(example, seeds):
  """Draws."""
  return {**example, "drawn": seeds[0]}

class Step:
  def __init__(self, size):
    self.size = size

  def run(self, dataset):
    return dataset.batch(self.size)

STEPS = [functools.partial(scaled_by(2), offset=5), draw, Step(4).run]
'''

SAME = {
  "comments": ("    def one(example):", "    # A comment.\n    def one(example):  # another"),
  "another docstring": ('"""Scales."""', '"""Scales, as it did.\n\n    And more.\n    """'),
  "no docstring": ('    """Scales."""\n', ""),
  "no docstring of an inner function": ('      "One."\n', ""),
  "line breaks": (
    "return example * factor + offset",
    "return (\n        example\n        * factor + offset\n      )",
  ),
  "quotes": ('"drawn"', "'drawn'"),
  "blank lines before": ("def scaled_by", "\n\n\nA_CONSTANT = 1\n\n\ndef scaled_by"),
  "indentation": (
    '  """Draws."""\n  return {**example, "drawn": seeds[0]}',
    '    """Draws."""\n    return {**example, "drawn": seeds[0]}',
  ),
}
OTHER = {
  "code": ("factor + offset", "factor - offset"),
  "a constant": ('"drawn"', '"draws"'),
  "a name": ("def scale(", "def scales(", "return scale\n", "return scales\n"),
  "a default value": ("OFFSET, REPEAT = 3, 1", "OFFSET, REPEAT = 4, 1"),
  "a keyword's default value": ("OFFSET, REPEAT = 3, 1", "OFFSET, REPEAT = 3, 2"),
  "a closure's value": ("scaled_by(2)", "scaled_by(3)"),
  "a closure's type": ("scaled_by(2)", "scaled_by(2.0)"),
  "a partial's argument": ("offset=5", "offset=6"),
  "a decorator's argument": ("num_seeds=2", "num_seeds=3"),
  "no decorator": ("@seqio.map_over_dataset(num_seeds=2)\n", ""),
  "a method's code": ("dataset.batch(self.size)", "dataset.batch(self.size + 1)"),
  "what a method belongs to": ("Step(4)", "Step(5)"),
  "the order": ("draw, Step(4).run]", "Step(4).run, draw]"),
}


def replaced(source, *changes):
  for old, new in zip(changes[::2], changes[1::2], strict=True):
    assert source.count(old) == 1
    source = source.replace(old, new)
  return source


class TestFunctions:
  @pytest.mark.parametrize("changes", SAME.values(), ids=SAME)
  def test_are_the_same_with_other(self, load, changes):
    assert text_of(load(replaced(MODULE, *changes)).STEPS) == text_of(load(MODULE).STEPS)

  @pytest.mark.parametrize("changes", OTHER.values(), ids=OTHER)
  def test_are_others_with_another(self, load, changes):
    assert text_of(load(replaced(MODULE, *changes)).STEPS) != text_of(load(MODULE).STEPS)

  def test_are_told_apart_by_the_module_they_are_of(self, load):
    module = load(MODULE)
    renamed = load(MODULE)
    renamed.draw.__wrapped__.__module__ = "others_tasks"
    assert text_of(renamed.draw) != text_of(module.draw)

  @pytest.mark.parametrize(
    "source",
    [
      "STEPS = [lambda x: x + 1, lambda x: x + 2]",
      "STEPS = [(lambda x: x), (lambda x: -x)]",
      "STEPS = [lambda x: (lambda y: x), lambda x: (lambda y: y)]",
      "STEPS = list(map(lambda k: lambda x: x + k, [1, 2]))",
      "import functools\nSTEPS = [functools.partial(max, 1), functools.partial(max, 2)]",
      "def deco(f):\n  def inner(x): return f(x)\n  return inner\nSTEPS = [deco(lambda: 1), deco(lambda: 2)]",
    ],
  )
  def test_on_one_line_are_told_apart(self, load, source):
    one, other = load(source).STEPS
    assert text_of(one) != text_of(other)
    assert [text_of(step) for step in load(source).STEPS] == [text_of(one), text_of(other)]

  def test_that_refer_to_each_other_can_be_described(self, load):
    source = """
    def both():
      def ping(x): return pong(x)
      def pong(x): return ping(x) + {}
      return ping
    """
    assert text_of(load(source.format(1)).both()) == text_of(load(source.format(1)).both())
    assert text_of(load(source.format(1)).both()) != text_of(load(source.format(2)).both())

  def test_without_a_source_file_are_told_apart_by_their_constants(self):
    one, other = {}, {}
    exec("def scale(x):\n  return x * 2", one)
    exec("def scale(x):\n  return x * 3", other)
    assert text_of(one["scale"]) != text_of(other["scale"])

  def test_without_a_source_file_are_told_apart_by_what_they_do(self):
    one, other = {}, {}
    exec("def scale(x):\n  return x * 2", one)
    exec("def scale(x):\n  return x + 2", other)
    assert text_of(one["scale"]) != text_of(other["scale"])

  def test_that_are_objects_are_told_apart_by_their_code(self, load):
    source = "class Step:\n  def __call__(self, x):\n    return x * 2\nSTEPS = [Step()]"
    assert text_of(load(source.replace("2", "3")).STEPS) != text_of(load(source).STEPS)


class Colour(enum.Enum):
  RED = 1
  BLUE = 2


@dataclasses.dataclass
class Options:
  size: int
  names: tuple = ()


class Plain:
  def __init__(self, size):
    self.size = size


class TestValues:
  @pytest.mark.parametrize(
    ("one", "other"),
    [
      (1, 2),
      (1, True),
      (1, 1.0),
      ("1", 1),
      (None, False),
      (b"a", b"b"),
      ([1, 2], [2, 1]),
      ({"a": 1}, {"a": 2}),
      ({1, 2}, {1, 3}),
      ({1, 2}, [1, 2]),
      (np.array([1, 2]), np.array([1, 3])),
      (np.array([1, 2], np.int32), np.array([1, 2], np.int64)),
      (np.zeros([2, 3]), np.zeros([3, 2])),
      (np.float32(1), np.float64(1)),
      (np.int32, np.int64),
      (np.dtype("int32"), np.dtype("int64")),
      (tf.int32, tf.int64),
      (Colour.RED, Colour.BLUE),
      (Options(1), Options(2)),
      (Options(1, ("a",)), Options(1, ("b",))),
      (Plain(1), Plain(2)),
      (Plain(1), Options(1)),
      (seqio.Feature(small_tasks.VOCABULARY), seqio.Feature(small_tasks.VOCABULARY, add_eos=False)),
      (functools.partial(len, 1), functools.partial(len, 2)),
      (functools.partial(len, 1), functools.partial(max, 1)),
      (re.compile("a"), re.compile("b")),
      (fractions.Fraction(1, 2), fractions.Fraction(1, 3)),
      (pathlib.PurePosixPath("a"), pathlib.PurePosixPath("b")),
      (range(3), range(4)),
      (slice(3), slice(4)),
      (1j, 2j),
    ],
    ids=lambda value: type(value).__name__,
  )
  def test_are_told_apart(self, one, other):
    assert text_of(one) != text_of(other)

  def test_of_tensors_are_told_apart(self):
    assert text_of(tf.constant([1, 2])) != text_of(tf.constant([1, 3]))

  @pytest.mark.parametrize(
    ("one", "other"),
    [
      ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
      ({"x", "y", "z"}, {"z", "y", "x"}),
      (np.arange(6).reshape(2, 3), np.arange(6).reshape(3, 2).T.copy().T.reshape(2, 3)),
      (np.arange(6)[::2], np.array([0, 2, 4])),
      (Plain(1), Plain(1)),
    ],
  )
  def test_are_the_same_however_they_are_held(self, one, other):
    assert text_of(one) == text_of(other)

  def test_of_an_array_of_texts_are_the_texts(self):
    one, other = (np.array(["".join(["a", "bc"]), "d" * count], object) for count in (20, 20))
    assert one[0] is not other[0]
    assert text_of(one) == text_of(other)

  @pytest.mark.parametrize("number", [float("inf"), float("nan")])
  def test_may_be_any_number(self, number):
    assert text_of(functools.partial(max, number)) != text_of(functools.partial(max, 0.0))


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
  def sources(self, directory):
    pattern = {"train": f"{directory}/train-*", "validation": f"{directory}/validation-*"}
    yield seqio.TextLineDataSource(split_to_filepattern=pattern)
    yield seqio.TFExampleDataSource(split_to_filepattern=pattern, feature_description={})
    yield seqio.FunctionDataSource(lambda split, shuffle_files: None, splits=["train"])
    yield small_tasks.NumberedTexts()
    with contextlib.suppress(ImportError):
      from anystep.tasks import stdlib

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
for module in pkgutil.iter_modules(anystep.tasks.__path__):
  if module.name != "stdlib":
    importlib.import_module("anystep.tasks." + module.name)
registered = [*seqio.TaskRegistry.names(), *seqio.MixtureRegistry.names()]
"""
FINGERPRINTS = """
import seqio, small_tasks, anystep.tasks.stdlib
from anystep.manifest import canonical_json
from anystep.tasks.fingerprint import describe, fingerprint
values = [{"b", "a", "c"}, frozenset(map(str, range(50))), {"y": {"q", "p"}}]
texts = {"values": canonical_json(describe(values))}
for name in ["small", "small_joined", "stdlib_lm", "stdlib_span_corruption"]:
  task = seqio.TaskRegistry.get(name)
  made = fingerprint(task, cache_at="end", task_feature_lengths={"targets": 8}, seed=0, base_seed=0)
  texts[name] = canonical_json([made.reader, made.provenance])
"""


def test_fingerprints_are_the_same_in_every_process_and_directory(tmp_path):
  """And of the modules of anystep.tasks, stdlib alone registers a task, anystep.tasks itself nothing."""
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
