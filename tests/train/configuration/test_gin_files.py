"""Gin files are read as gin reads them, without importing what they name; mistakes name what was meant."""

import sys

import gin
import pytest

from anystep.errors import AnystepError
from anystep.train.configuration.configuration import load_configuration
from anystep.train.configuration.gin_files import GinFiles, Macro, Reference

_HEAD = """from __gin__ import dynamic_registration
from anystep.train import datasets
from anystep.train import trainer
"""
_DATASET = Reference("", "anystep.train.datasets.DatasetConfig", is_called=True)


@pytest.fixture
def read(tmp_path, monkeypatch):
  """`read({"a.gin": text}, **bindings)`: the files of these texts, read in the order of their names."""
  monkeypatch.chdir(tmp_path)

  def write_and_read(texts, search_paths=(), **bindings):
    for name, text in texts.items():
      (tmp_path / name).parent.mkdir(exist_ok=True)
      (tmp_path / name).write_text(text)
    return GinFiles.read(sorted(texts), bindings, search_paths=search_paths)

  return write_and_read


def refusal(read, *args, **bindings):
  with pytest.raises(AnystepError) as refused:
    read(*args, **bindings)
  assert refused.value.code == 78
  return refused.value


SCOPED = f"""{_HEAD}
SIZE = 8
LENGTHS = {{'inputs': %SIZE, 'targets': [%SIZE, (1, %OTHER)]}}
OTHER = @train/datasets.DatasetConfig()
datasets.DatasetConfig:
  batch_size = %SIZE
  seed = 1
train/datasets.DatasetConfig.seed = 2
train/late/datasets.DatasetConfig.split = 'late'
other.DatasetConfig.seed = 9
trainer.Trainer.train_dataset = @train/datasets.DatasetConfig()
trainer.Trainer.random_seed = %LENGTHS
"""


def test_arguments_are_those_of_the_scope_with_macros_replaced(read):
  files = read({"a.gin": SCOPED, "b.gin": "SIZE = 9\n"}, **{"datasets.DatasetConfig.packing": "'greedy'"})
  plain = {"batch_size": 9, "seed": 1, "packing": "greedy"}
  assert files.find_arguments(_DATASET) == plain
  train = Reference("train", _DATASET.selector, is_called=True)
  assert files.find_arguments(train) == {**plain, "seed": 2}
  late = Reference("train/late", _DATASET.selector, is_called=True)
  assert files.find_arguments(late) == {**plain, "seed": 2, "split": "late"}
  trainer = files.find_arguments(Reference("", "anystep.train.trainer.Trainer", is_called=True))
  assert trainer == {"train_dataset": train, "random_seed": {"inputs": 9, "targets": [9, (1, train)]}}
  assert files.modules == ["anystep.train.datasets", "anystep.train.trainer"]


def test_what_is_read_is_what_gin_queries(read):
  """Gin's own answer to the same files, for every value that is plain."""
  texts = {
    "a.gin": SCOPED.replace("other.DatasetConfig.seed = 9", ""),
    "b.gin": "include 'c/d.gin'\nSIZE = 9\n",
  }
  texts["c/d.gin"] = f"{_HEAD}train/datasets.DatasetConfig.num_epochs = 3\nSIZE = 7\n"
  files = read(dict(sorted(texts.items())), **{"train/datasets.DatasetConfig.seed": "4"})
  load_configuration(files)
  for scope in ("", "train", "train/late"):
    with gin.config_scope(scope or None):
      bound = gin.get_bindings("anystep.train.datasets.DatasetConfig", resolve_references=True)
    assert files.find_arguments(Reference(scope, _DATASET.selector, is_called=True)) == bound


def test_a_macro_of_itself_stays_one(read):
  assert read({"a.gin": "A = %B\nB = %A\n"}).resolve([Macro("A")]) == [Macro("A")]


@pytest.mark.parametrize(
  ("texts", "bindings", "kind", "fields"),
  [
    ({"a.gin": "include 'c/bb.gin'", "c/b.gin": ""}, {}, "gin_file", {"nearest": "c/b.gin"}),
    ({"a.gin": "include 'a.gin'"}, {}, "gin_file", {"got": "ValueError: a.gin includes itself"}),
    ({"a.gin": "SIZE = 8 8"}, {}, "gin_file", {"path": "a.gin"}),
    ({"a.gin": "SIZE = big"}, {}, "gin_file", {"got": "SyntaxError: Failed to parse token 'big' (line 1)"}),
    ({"a.gin": "SIZE = 8\nOTHER = %SIZZE\n"}, {}, "gin_unknown_macro", {"got": "SIZZE", "nearest": "SIZE"}),
    ({"a.gin": "SIZE = 8\nOTHER = %SIZE\n"}, {"SZIE": "1"}, "gin_unknown_macro", {"nearest": "SIZE"}),
    (
      {"a.gin": "SIZE = %gin.REQUIRED\nx.y.z = [%gin.REQUIRED]"},
      {},
      "gin_required",
      {"expected": "values for SIZE, x.y.z"},
    ),
    ({"a.gin": "SIZE = %REQUIRED"}, {}, "gin_required", {"expected": "values for SIZE"}),
    ({"a.gin": "SIZE = 8"}, {"SIZE": "[8"}, "gin_binding", {}),
  ],
)
def test_mistakes_in_the_text_are_refused(read, texts, bindings, kind, fields):
  error = refusal(read, texts, **bindings)
  assert error.kind == kind
  assert {name: error.fields.get(name) for name in fields} == fields


def test_a_text_without_quotes_is_told_with_them(read):
  error = refusal(read, {"a.gin": "DIR = 'x'"}, DIR="runs/1")
  assert error.fields["got"] == "--gin.DIR=runs/1: SyntaxError: Failed to parse token 'runs' (line 1)"
  assert error.fix.endswith("""--gin.DIR="'runs/1'\"""")


_REQUIRED_STEPS = f"{_HEAD}trainer.Trainer.total_steps = %gin.REQUIRED\n"
_STEPS_BY_ANOTHER_PATH = """from __gin__ import dynamic_registration
import anystep.train.runs.trainer
anystep.train.runs.trainer.Trainer.total_steps = 3
"""


@pytest.mark.parametrize(
  ("texts", "bindings"),
  [
    ({"a.gin": _REQUIRED_STEPS}, {"trainer.Trainer.total_steps": "3"}),
    ({"a.gin": _REQUIRED_STEPS}, {"Trainer.total_steps": "3"}),
    ({"a.gin": _REQUIRED_STEPS}, {"anystep.train.trainer.Trainer.total_steps": "3"}),
    ({"a.gin": _REQUIRED_STEPS, "b.gin": _STEPS_BY_ANOTHER_PATH}, {}),
    (
      {"a.gin": f"{_HEAD}SIZES = 3\ntrainer.Trainer.total_steps = @SIZES/gin.macro()\nSIZE = 1\nN = %SIZE"},
      {},
    ),
    (
      {"a.gin": f"{_HEAD}import sizes_of_mine\nSIZE = 4\ntrainer.Trainer.total_steps = %SIZES\nN = %SIZE"},
      {},
    ),
    ({"a.gin": f"{_HEAD}import sizes_of_mine\nSIZE = 4\ntrainer.Trainer.total_steps = %SIZES"}, {}),
  ],
)
def test_what_gin_accepts_is_not_refused(read, tmp_path, monkeypatch, texts, bindings):
  """A required value that is set under another name of its class; macros by the long name; constants."""
  (tmp_path / "sizes_of_mine.py").write_text("import gin\ngin.config._CONSTANTS['sizes_of_mine.SIZES'] = 3\n")
  monkeypatch.syspath_prepend(tmp_path)
  monkeypatch.delitem(sys.modules, "sizes_of_mine", raising=False)
  monkeypatch.setattr(gin.config, "_CONSTANTS", gin.config._CONSTANTS.copy())
  files = read(texts, **bindings)
  load_configuration(files)
  with gin.unlock_config():
    assert gin.get_bindings("anystep.train.trainer.Trainer")["total_steps"] == 3


def test_unused_macros_are_reported(read, capsys):
  read({"a.gin": "SIZE = 8\nOTHER_NAME = %SIZE\n"})
  assert capsys.readouterr().err == "OTHER_NAME is set and nothing uses it\n"


@pytest.mark.parametrize(
  ("statement", "expected", "nearest"),
  [
    ("trainer.Trainer.totl_steps = 3", "a parameter of trainer.Trainer: model, model_dir, ", "total_steps"),
    (
      "trainer.Trayner.total_steps = 3",
      "a name of anystep.train.runs.trainer: ",
      "Trainer",
    ),
    ("datasets.DatasetConfg.seed = 3", "a name of anystep.train.datasets: ", "DatasetConfig"),
  ],
)
def test_an_unknown_name_comes_with_the_right_ones(read, statement, expected, nearest):
  files = read({"a.gin": f"{_HEAD}{statement}\n"})
  with pytest.raises(AnystepError) as refused:
    load_configuration(files)
  assert (refused.value.code, refused.value.kind) == (78, "gin_file")
  assert refused.value.fields["expected"].startswith(expected)
  assert refused.value.fields["nearest"] == nearest


@pytest.mark.parametrize(
  ("name", "nearest"),
  [("trainer.Trainer.totl_steps", "total_steps"), ("trainer.Trainr.total_steps", "trainer.Trainer")],
)
def test_an_unknown_name_of_a_binding_comes_with_the_right_ones(read, name, nearest):
  files = read({"a.gin": f"{_HEAD}trainer.Trainer.total_steps = 3\n"}, **{name: "5"})
  with pytest.raises(AnystepError) as refused:
    load_configuration(files)
  assert (refused.value.kind, refused.value.fields["nearest"]) == ("gin_binding", nearest)
  assert refused.value.fix == f"correct --gin.{name}"
