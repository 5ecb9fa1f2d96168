"""Caches are read, to the same batches, where nothing is installed but what the library itself needs."""

import ast
import importlib.metadata
import json
import os
import subprocess
import sys

import caches
import pytest
from packaging.requirements import Requirement

from anystep.features.digest import batch_digest
from anystep.features.ragged import Ragged
from anystep.plans.plan import Plan
from anystep.records.parsing import ExampleParser
from anystep.records.writing import serialize_example
from anystep.streams.stream import open_stream


def library_requirements(checkout):
  """What setup.py asks for where no extra is chosen."""
  for statement in ast.parse((checkout / "setup.py").read_text()).body:
    if isinstance(statement, ast.Assign) and statement.targets[0].id == "LIBRARY":
      return ast.literal_eval(statement.value)
  raise AssertionError("setup.py has no LIBRARY")


def distributions_for(requirements):
  """The installed distributions that requirements name, and those that these need."""
  found, seen, pending = {}, set(), [Requirement(text) for text in requirements]
  while pending:
    requirement = pending.pop()
    extras = ("", *sorted(requirement.extras))
    if (requirement.name, extras) not in seen:
      seen.add((requirement.name, extras))
      found[requirement.name] = importlib.metadata.distribution(requirement.name)
      needed = map(Requirement, found[requirement.name].requires or ())
      pending += [n for n in needed if not n.marker or any(n.marker.evaluate({"extra": e}) for e in extras)]
  return found


NUMBA = {"numba", "llvmlite"}


@pytest.fixture(params=[set(), NUMBA], ids=["with_numba", "without_numba"])
def library_environment(request, checkout, tmp_path):
  """A folder to import from, with the library's own needs and nothing beside them, or without numba."""
  folder = tmp_path / "environment"
  folder.mkdir()
  for distribution_name, distribution in distributions_for(library_requirements(checkout)).items():
    if distribution_name in request.param:
      continue
    for name in {file.parts[0] for file in distribution.files} - {"..", "__pycache__"}:
      if not (folder / name).exists():
        (folder / name).symlink_to(distribution.locate_file(name))
  return folder


READER = """
import importlib.util, json, sys

for name in ("tensorflow", "apache_beam", "jax", "seqio"):
  assert importlib.util.find_spec(name) is None, name

import anystep
from anystep.features.digest import batch_digest
from anystep.records.parsing import Ragged

assert (importlib.util.find_spec("numba") is None) == (sys.argv[3] == "without_numba")
cache = anystep.open_cache(sys.argv[1], "demo", "train")
plan = anystep.Plan.start(cache, batch_size=12, num_epochs=3, feature_lengths=json.loads(sys.argv[2]))
with anystep.open_stream(plan, sys.argv[1]) as stream:
  digests = [batch_digest(batch) for batch in stream]
examples = {}
for name, feature in cache.read(range(len(cache))).items():
  ragged = isinstance(feature, Ragged)
  values = feature.values if ragged else feature
  lengths = feature.lengths.tolist() if ragged else None
  examples[name] = [values.dtype.name, values.shape, values.tobytes().hex(), lengths]
print(json.dumps({"plan": plan.sha256, "digests": digests, "examples": examples}))
"""


def test_batches_without_other_packages_are_those_with_them(
  request, checkout, library_environment, shared_cache, tmp_path
):
  given = [shared_cache.root, json.dumps(caches.FEATURE_LENGTHS), request.node.callspec.id]
  done = subprocess.run(
    [sys.executable, "-S", "-c", READER, *given],
    cwd=tmp_path,
    env=os.environ | {"PYTHONPATH": f"{library_environment}{os.pathsep}{checkout}"},
    capture_output=True,
    check=False,
    timeout=120,
  )
  assert (done.returncode, done.stderr.decode()) == (0, "")
  plan = Plan.start(shared_cache.open(), batch_size=12, num_epochs=3, feature_lengths=caches.FEATURE_LENGTHS)
  with open_stream(plan, shared_cache.root) as stream:
    digests = [batch_digest(batch) for batch in stream]
  parser = ExampleParser(caches.FEATURES)
  examples = {}
  for name, feature in parser([serialize_example(example) for example in shared_cache.examples]).items():
    ragged = isinstance(feature, Ragged)
    values = feature.values if ragged else feature
    lengths = feature.lengths.tolist() if ragged else None
    examples[name] = [values.dtype.name, list(values.shape), values.tobytes().hex(), lengths]
  assert json.loads(done.stdout) == {"plan": plan.sha256, "digests": digests, "examples": examples}
