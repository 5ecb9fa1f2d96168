"""Public names of rooms are imported when somebody asks for one."""

import importlib
import pathlib

import pytest

import anystep
from anystep import lazy

CHECKOUT = pathlib.Path(anystep.__file__).parents[1]
ROOMS = sorted(
  ".".join(path.relative_to(CHECKOUT).parent.parts)
  for folder in ("anystep", "tasks", "cache_job", "train")
  for path in (CHECKOUT / folder).rglob("__init__.py")
  if "lazy_names(" in path.read_text()
)


@pytest.mark.parametrize("room", ROOMS)
def test_every_public_name_of_a_room_can_be_imported(room):
  package = importlib.import_module(room if room.startswith("anystep") else f"anystep.{room}")
  for name in package.__all__:
    assert getattr(package, name).__name__ == name


def test_other_names_are_refused_as_python_does():
  with pytest.raises(AttributeError, match="module 'somewhere' has no attribute 'other'"):
    lazy.lazy_names("somewhere", {"name": "module"})("other")


def test_functions_of_batches_find_their_keys_where_the_documentation_says():
  from anystep.transforms import random_keys

  assert "anystep.transforms.random_keys" in anystep.MapBatch.__doc__
  assert random_keys is anystep.transforms.transform.random_keys
