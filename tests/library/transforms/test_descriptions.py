"""Descriptions: the same wherever a value is the same, another where what it does could be another."""

import dataclasses
import enum
import fractions
import functools
import importlib.util
import pathlib
import re
import textwrap

import gin
import numpy as np
import pytest
import seqio
import small_tasks
import tensorflow as tf

from anystep.files.json_files import canonical_json
from anystep.transforms.identity import describe


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

  def test_that_gin_gives_arguments_are_told_apart_by_them(self, load):
    step = gin.external_configurable(load("def scaled(x, by=1):\n  return x * by").scaled, "described")
    texts = []
    for binding in ("", "described.by = 5", "described.by = @described"):
      with gin.unlock_config():
        gin.clear_config()
        gin.parse_config(binding)
      texts.append(text_of(step))
    gin.clear_config()
    assert len(set(texts)) == 3
    assert text_of(step) == texts[0]
    assert " at 0x" not in "".join(texts)

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
