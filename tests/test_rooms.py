"""The rooms of the house: what stands where, and imports between rooms that go down alone."""

import ast
import functools
import pathlib
import re

import pytest
from module_imports import imports_of

ROOT = pathlib.Path(__file__).parents[1]
PACKAGES = {
  "anystep": "anystep",
  "anystep.tasks": "tasks",
  "anystep.cache_job": "cache_job",
  "anystep.train": "train",
}
MAX_LINES = 400
# Each floor imports from those above it in this table alone, and rooms of one floor nothing from each other.
FLOORS = """
  anystep.compiled anystep.earlier_names anystep.error_kinds anystep.lazy anystep.whole_numbers
  anystep.errors
  anystep.cached anystep.forks anystep.limits
  anystep.stores
  anystep.files
  anystep.features anystep.order anystep.programs
  anystep.records
  anystep.containers
  anystep.caches
  anystep.transforms
  anystep.units
  anystep.plans
  anystep.inspection anystep.streams
  anystep anystep.torch
  anystep.tasks.startup anystep.tasks.tensors anystep.tasks.metrics anystep.tasks.preprocessors
  anystep.tasks.seqio_internals
  anystep.tasks.vocabularies anystep.tasks.sources
  anystep.tasks.text_formats anystep.tasks.registry
  anystep.tasks.reading
  anystep.tasks.seqio_api anystep.tasks.text_tasks anystep.tasks.preview
  anystep.t5x anystep.tasks
  anystep.tasks.catalogue
  anystep.tasks.data_program
  anystep.tasks.vocab_program
  anystep.cache_job.options anystep.cache_job.runners
  anystep.cache_job.state
  anystep.cache_job.preprocessing
  anystep.cache_job.shuffle
  anystep.cache_job.planning
  anystep.cache_job.completion
  anystep.cache_job.job
  anystep.cache_job.main
  anystep.cache_job anystep.cache_job.__main__
  anystep.train.configuration anystep.train.leaves anystep.train.partitioning
  anystep.train.decoding
  anystep.train.network anystep.train.datasets anystep.train.optimizers
  anystep.train.models
  anystep.train.checkpoints
  anystep.train.conversion anystep.train.reports
  anystep.train.runs
  anystep.train.convert anystep.train.loading anystep.train.main
  anystep.train anystep.train.__main__ anystep.train.demo
"""
FLOOR_OF = {room: number for number, line in enumerate(FLOORS.split("\n")) for room in line.split()}


@functools.cache
def modules():
  """Paths by dotted name."""
  found = {}
  for package, folder in PACKAGES.items():
    for path in sorted((ROOT / folder).rglob("*.py")):
      inner = path.relative_to(ROOT / folder).with_suffix("").parts
      found[".".join([package, *(part for part in inner if part != "__init__")])] = path
  return found


@functools.cache
def own_imports(module):
  """The modules of ours that one imports, in functions too; not what types alone need."""
  source = modules()[module].read_text()
  assert not re.search(r"^\s*from \.", source, re.MULTILINE), f"{module} imports relatively"
  return (imports_of(source, package="", with_types=False, modules=modules()) & modules().keys()) - {module}


def room_of(module):
  """The sub-package that a module stands in; a file between rooms is one by itself."""
  package = module if modules()[module].stem == "__init__" else module.rpartition(".")[0]
  return module if package in PACKAGES else package


def rooms():
  return sorted({room_of(module) for module in modules()} - PACKAGES.keys())


def folders():
  return [room for room in rooms() if modules()[room].stem == "__init__"]


def test_every_room_has_a_floor_and_every_floor_a_room():
  assert {room_of(module) for module in modules()} == FLOOR_OF.keys()


@pytest.mark.parametrize("module", modules())
def test_imports_go_down(module):
  own = room_of(module)
  for other in own_imports(module):
    room = room_of(other)
    assert room == own or FLOOR_OF[room] < FLOOR_OF[own], f"{module} imports {other}"


def test_no_imports_go_round():
  open_, done = [], set()

  def visit(module):
    assert module not in open_, " imports ".join([*open_[open_.index(module) :], module])
    if module not in done:
      open_.append(module)
      for other in sorted(own_imports(module)):
        visit(other)
      done.add(open_.pop())

  for module in modules():
    visit(module)
  assert len(done) > 150


@pytest.mark.parametrize("room", folders())
def test_a_room_has_three_to_nine_files_and_says_what_belongs_there(room):
  path = modules()[room]
  files = [other for other in path.parent.glob("*.py") if not other.stem.startswith("__")]
  assert 3 <= len(files) <= 9
  docstring = ast.get_docstring(ast.parse(path.read_text()))
  assert len(docstring.split(".")) > 2, "what belongs there, and what does not"


@pytest.mark.parametrize("module", modules())
def test_a_file_is_read_in_one_sitting(module):
  assert len(modules()[module].read_text().splitlines()) <= MAX_LINES
