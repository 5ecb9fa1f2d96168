"""Modules that are not there are refused before anything is imported, with the name that was meant."""

import importlib
import sys

import pytest

from anystep.errors import AnystepError
from anystep.programs.module_names import check_modules

# In folders without __init__.py, within a package and within another such folder.
_DEEP = ("my_package/folder/deep/end.py", "my_folder/deep/end.py")


@pytest.fixture(autouse=True)
def directory(tmp_path, monkeypatch):
  """The current directory, with a module that cannot be imported in each place where one may stand."""
  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr(sys, "path", [*sys.path])
  for path in ("my_tasks.py", "my_package/__init__.py", "my_package/inner.py", "my_folder/part.py", *_DEEP):
    (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / path).write_text("raise SystemError('imported')")
  return tmp_path


@pytest.mark.parametrize(
  "name",
  [
    "my_tasks",
    "my_package",
    "my_package.inner",
    "my_folder.part",
    "my_package.folder.deep.end",
    "my_folder.deep.end",
    "json",
    "anystep.tasks",
    "anystep.tasks.stdlib",
  ],
)
def test_a_module_that_is_there_passes_and_is_not_imported(name):
  before = set(sys.modules)
  check_modules([name])
  assert set(sys.modules) == before


def test_a_package_that_makes_modules_of_its_own_may_be_named(directory):
  (directory / "my_maker.py").write_text("import sys; sys.modules[__name__ + '.made'] = sys\n__path__ = []")
  importlib.invalidate_caches()
  (directory / "my_maker").mkdir()
  (directory / "my_maker.py").rename(directory / "my_maker" / "__init__.py")
  # The package's name makes no two of its modules alike.
  (directory / "my_maker" / "read.py").write_text("")
  check_modules(["my_maker.made"])
  assert importlib.import_module("my_maker.made") is sys


@pytest.mark.parametrize("name", ["tensorflow.keras.layers", "tensorflow.data", "tensorflow.compat.v1"])
def test_modules_that_tensorflow_makes_pass(name):
  check_modules([name])


@pytest.mark.parametrize(
  ("name", "nearest"),
  [
    ("my_task", "my_tasks"),
    ("my_pakage.inner", "my_package.inner"),
    ("my_package.iner", "my_package.inner"),
    ("anystep.tasks.stdlb", "anystep.tasks.stdlib"),
    ("qqqq", None),
    ("", None),
    (".my_tasks", None),
    ("a\0b", None),
  ],
)
def test_a_module_that_is_not_there_is_refused_with_the_nearest(name, nearest):
  with pytest.raises(AnystepError) as refused:
    check_modules(["json", name])
  error = refused.value
  assert (error.code, error.kind, error.fields["module"]) == (78, "module_import", name)
  assert error.fields.get("nearest") == nearest
  assert error.fix == "correct the module's name, or run in the directory that it is in"


def test_a_file_in_place_of_a_module_says_the_modules_name():
  with pytest.raises(AnystepError) as refused:
    check_modules(["my_package/inner.py"])
  assert refused.value.fix == "name the module without .py: my_package.inner"
