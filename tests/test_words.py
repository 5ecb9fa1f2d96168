"""Docstrings say what something is or does; they do not open with a question."""

import ast
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PACKAGES = ("anystep", "tasks", "cache_job", "train")
# Folders that still have such docstrings; remove a folder from here when it is clean.
EXEMPT: tuple[str, ...] = ()
QUESTIONS = frozenset(["What", "How", "Where", "Who", "Whom", "Whose", "Why", "When", "Which", "Whether"])
DEFINITIONS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def source_files():
  paths = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
  names = [path.relative_to(ROOT).as_posix() for path in paths]
  return [name for name in names if not name.startswith(tuple(f"{folder}/" for folder in EXEMPT))]


def docstrings(source):
  """Return the docstrings of a module, its classes and its functions, by line; that of the module by 0."""
  nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, DEFINITIONS)]
  by_line = {getattr(node, "lineno", 0): ast.get_docstring(node) for node in nodes}
  return {line: docstring for line, docstring in by_line.items() if docstring}


def first_word(docstring):
  return docstring.split(maxsplit=1)[0].strip(",.:;")


@pytest.mark.parametrize("name", source_files())
def test_docstrings_open_with_a_verb_or_a_noun(name):
  questions = {
    line: docstring.splitlines()[0]
    for line, docstring in docstrings((ROOT / name).read_text()).items()
    if first_word(docstring) in QUESTIONS
  }
  assert not questions


def test_exempt_folders_exist():
  assert all((ROOT / folder).is_dir() for folder in EXEMPT)


def test_questions_are_found_in_modules_classes_and_functions():
  source = '"""What it is."""\nclass A:\n  """Which."""\n  def b(self):\n    """How, b."""\n'
  assert [first_word(text) in QUESTIONS for text in docstrings(source).values()] == [True] * 3
