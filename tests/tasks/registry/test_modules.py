"""The user's modules: where they are looked for, and what is said of those that fail."""

import sys

import pytest

from anystep.errors import AnystepError, ExitCode
from anystep.tasks.registry.modules import import_modules

NAMES = ("first_of_the_user", "second_of_the_user")


@pytest.fixture(autouse=True)
def directory(tmp_path, monkeypatch):
  """A current directory of its own, and a path and modules that are put back."""
  here = tmp_path / "here"
  here.mkdir()
  monkeypatch.chdir(here)
  monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
  yield here
  for name in NAMES:
    sys.modules.pop(name, None)


def test_modules_are_imported_from_the_current_directory_in_order(directory):
  (directory / f"{NAMES[0]}.py").write_text("VALUE = 1")
  (directory / f"{NAMES[1]}.py").write_text(f"import {NAMES[0]}\nVALUE = {NAMES[0]}.VALUE + 1")
  import_modules(NAMES)
  assert [sys.modules[name].VALUE for name in NAMES] == [1, 2]
  path = list(sys.path)
  import_modules(NAMES)
  assert sys.path == path


@pytest.mark.parametrize("known", [False, True], ids=["not on the path", "further back on the path"])
def test_the_current_directory_comes_first(directory, tmp_path, known):
  other = tmp_path / "other"
  other.mkdir()
  sys.path.insert(0, str(other))
  if known:
    sys.path.append(str(directory))
  for place, value in ((directory, "here"), (other, "there")):
    (place / f"{NAMES[0]}.py").write_text(f"VALUE = {value!r}")
  import_modules(NAMES[:1])
  assert sys.modules[NAMES[0]].VALUE == "here"


@pytest.mark.parametrize(
  ("source", "got"),
  [
    (None, f"ModuleNotFoundError: No module named '{NAMES[0]}'"),
    ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
    ("raise ValueError('what the module said')", "ValueError: what the module said"),
    ("def broken(:", "SyntaxError: "),
  ],
)
def test_a_module_that_cannot_be_imported_is_named_with_what_it_said(directory, source, got):
  if source is not None:
    (directory / f"{NAMES[0]}.py").write_text(source)
  with pytest.raises(AnystepError) as caught:
    import_modules(NAMES[:1])
  assert (caught.value.code, caught.value.kind) == (78, "module_import")
  assert caught.value.fields["module"] == NAMES[0]
  assert caught.value.fields["got"].startswith(got)
  # What is not there is refused before anything is imported.
  assert (caught.value.__cause__ is None) == (source is None)


def test_an_error_of_anystep_in_a_module_stays_itself(directory):
  (directory / f"{NAMES[0]}.py").write_text(
    "from anystep.errors import AnystepError, ExitCode\n"
    "raise AnystepError(ExitCode.NO_INPUT, 'source_empty', fix='look for it')"
  )
  with pytest.raises(AnystepError) as caught:
    import_modules(NAMES[:1])
  assert (caught.value.code, caught.value.kind) == (ExitCode.NO_INPUT, "source_empty")


@pytest.mark.parametrize(
  ("source", "name", "fix"),
  [
    (None, NAMES[0], "correct the module's name, or run in the directory that it is in"),
    (None, f"{NAMES[0]}.inner", "correct the module's name, or run in the directory that it is in"),
    ("", f"{NAMES[0]}.py", f"name the module without .py: {NAMES[0]}"),
    ("import no_such_module", NAMES[0], "mend the module: it was found, but its import failed"),
  ],
)
def test_the_fix_says_whether_the_name_or_the_module_is_wrong(directory, source, name, fix):
  if source is not None:
    (directory / f"{NAMES[0]}.py").write_text(source)
  with pytest.raises(AnystepError) as caught:
    import_modules([name])
  assert (caught.value.kind, caught.value.fix) == ("module_import", fix)
