"""What version 0.1 wrote opens, goes on, and is made again to the byte; what it printed is printed again."""

import contextlib
import hashlib
import importlib.metadata
import json
import pathlib
import platform
import shutil

import earlier_tasks
import earlier_version
import numpy as np
import pytest
import seqio
import t5_tasks
from earlier_version import COMMANDS, FIXTURE, PRESHUFFLED, SAVED_STEP, run, sha256_of_files
from job_runs import run_job

from anystep.tasks import text_task

BYTES = seqio.ByteVocabulary(extra_ids=125)
PREFIX = "known_by_"
OWN_VOCABULARY = [
  *("arithmetic_addition_2", "arithmetic_multiplication_4", "copy_8", "reverse_32"),
  *("stdlib_span_corruption", "stdlib_lm"),
]


@pytest.fixture(autouse=True)
def copy(tmp_path, monkeypatch):
  """A copy of what version 0.1 made, where programs run."""
  shutil.copytree(FIXTURE, tmp_path / "copy")
  monkeypatch.chdir(tmp_path / "copy")


@pytest.mark.parametrize("name", COMMANDS)
def test_commands_print_the_same(name):
  # Lengths of examples as they are read, which version 0.1 did not count, are an addition to its numbers.
  printed = run("anystep-data", *COMMANDS[name]).replace(', "read": null}', "}")
  assert printed == pathlib.Path("expected", f"{name}.txt").read_text()


def without_origin(path):
  """A manifest without what names the versions of Python and libraries, and what version 0.1 did not note."""
  document = json.loads(path.read_text())
  provenance = document["fingerprint"]["provenance"]
  del provenance["python"], provenance["libraries"]
  assert provenance.pop("calls", {}) or path.parts[0] == "earlier" or path.parts[1] in earlier_version.AS_IS
  return document


def test_caches_are_made_again_to_the_byte():
  pathlib.Path("caches").rename("earlier")
  shutil.copytree("earlier/rows", "caches/rows")
  earlier_version.make_caches("caches")
  earlier, now = sha256_of_files("earlier"), sha256_of_files("caches")
  names = {name for name in earlier if "/units/" not in name}
  assert names == now.keys()
  differing = {name for name in names if earlier[name] != now[name]}
  assert {pathlib.PurePath(name).name for name in differing} <= {"COMPLETED", "manifest.train.json"}
  for task in (*PRESHUFFLED, *earlier_version.AS_IS):
    manifest = pathlib.Path(task, "manifest.train.json")
    assert without_origin("caches" / manifest) == without_origin("earlier" / manifest), task


def test_plans_and_unit_tables_are_made_again_to_the_byte():
  before = sha256_of_files("plans"), sha256_of_files("caches")
  shutil.rmtree("plans")
  pathlib.Path("plans").mkdir()
  earlier_version.make_plans()
  assert (sha256_of_files("plans"), sha256_of_files("caches")) == before


@pytest.mark.parametrize("from_step", [0, SAVED_STEP])
def test_a_run_without_dropout_goes_on_as_it_would_have(from_step):
  """Digests to the bit; losses nearly, for other processors round otherwise."""
  if from_step == 0:
    shutil.rmtree("model")
  earlier_version.train(
    earlier_version.LAST_STEP, *(earlier_version.WITHOUT_DROPOUT if from_step else []), dropout_rate=0.0
  )
  steps = earlier_version.steps_of_the_run()
  expected = json.loads(pathlib.Path("expected/steps_without_dropout.json").read_text())[str(from_step)]
  assert [(step["step"], step["digest"]) for step in steps] == [
    (step["step"], step["digest"]) for step in expected
  ]
  np.testing.assert_allclose([s["loss"] for s in steps], [s["loss"] for s in expected], rtol=1e-5)


def test_a_run_with_the_dropout_of_version_0_1_is_refused_unless_that_is_accepted(capsys):
  with pytest.raises(RuntimeError):
    earlier_version.train(earlier_version.LAST_STEP)
  error = capsys.readouterr().err
  assert "resume_contract" in error
  assert "model.module.config.dropout_masks: absent → " in error
  earlier_version.train(earlier_version.LAST_STEP, "--accept_change=model.module.config.dropout_masks")
  expected = [json.loads(line) for line in pathlib.Path("expected/steps.jsonl").read_text().splitlines()]
  found = [(step["step"], step["digest"]) for step in earlier_version.steps_of_the_run()]
  assert found == [(step["step"], step["digest"]) for step in expected]


@contextlib.contextmanager
def catalogue_on_bytes():
  """The catalogue's tasks, on bytes where their own vocabulary lies on a server."""
  from anystep.tasks.catalogue import arithmetic, c4, copying, glue, stdlib, super_glue, wmt  # noqa: F401

  registries = (seqio.TaskRegistry, seqio.MixtureRegistry)
  before = [{*registry.names()} for registry in registries]
  for module in (c4, glue, super_glue, wmt):
    module.register(BYTES, prefix=PREFIX)
  added = [{*registry.names()} - names for registry, names in zip(registries, before, strict=True)]
  try:
    yield sorted([*added[0], *OWN_VOCABULARY])
  finally:
    for registry, names in zip(registries, added, strict=True):
      for name in names:
        registry.remove(name)


def fingerprints_of(tasks):
  """By task, sha256 of what a cache knows of its preprocessors and its source's kind."""
  from anystep.tasks.registry import fingerprint

  found = {}
  for name in tasks:
    task = seqio.TaskRegistry.get(name)
    steps = fingerprint.cached_preprocessors(task, "end")
    described = [fingerprint.describe(step) for step in steps]
    described += [fingerprint.describe(type(task.source))]
    found[name] = hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()
  return found


def test_fingerprints_are_those_of_every_earlier_version(golden):
  """No cache that exists is refused because a function moved."""
  with catalogue_on_bytes() as names:
    found = fingerprints_of(names)
  found |= fingerprints_of(earlier_tasks.NAMES)
  with t5_tasks.registered() as (tasks, _):
    found |= fingerprints_of(tasks)
  assert len(found) > 95
  golden("fingerprints.json", json.dumps(found, indent=1) + "\n")


def test_an_unfinished_job_goes_on_with_the_number_of_shards_that_it_had(monkeypatch, capsys):
  """It was killed when its plan was made, of 64 shards as was the default then."""
  lines = pathlib.Path("lines")
  lines.mkdir()
  for shard in range(2):
    (lines / f"{shard}.txt").write_text("".join(f"line {shard} {k % 7}\n" for k in range(1100)))
  building = pathlib.Path("continued/early_lines/.building")
  building.parent.mkdir(parents=True)
  shutil.copytree("unfinished", building)
  (job,) = building.iterdir()
  provenance = json.loads((job / "provenance.json").read_text())
  # A job goes on with the same versions alone.
  provenance |= {"python": platform.python_version()}
  provenance["libraries"] = {name: importlib.metadata.version(name) for name in provenance["libraries"]}
  (job / "provenance.json").write_text(json.dumps(provenance))
  vocabulary = seqio.ByteVocabulary(extra_ids=100)
  task = text_task("early_lines", "lines/*.txt", vocabulary=vocabulary, style="lm", piece_tokens=None)
  try:
    run_job("continued", "--dry_run", tasks=task.name)
    planned = capsys.readouterr().out
    assert "2 of them preprocessed by an earlier run" in planned
    assert "in 64 shards" in planned
    run_job("continued", tasks=task.name)
    run_job("anew", "--num_shards=64", tasks=task.name)
    run_job("as_now", "--dry_run", tasks=task.name)
    assert "in 1 shard," in capsys.readouterr().out
  finally:
    seqio.TaskRegistry.remove(task.name)
  continued, anew = sha256_of_files("continued"), sha256_of_files("anew")
  assert continued == anew
