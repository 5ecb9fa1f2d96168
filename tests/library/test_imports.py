"""Imports go one way, have no effect, and the library reads caches where nothing else is installed."""

import json
import os
import subprocess
import sys
import textwrap

import caches
import pytest
from library_modules import MODULES
from module_imports import imports_of
from unimportable import WITHOUT

import anystep
import oracle
from anystep.features.digest import batch_digest
from anystep.plans.plan import Plan
from anystep.streams.stream import open_stream

HEAVY = {"tensorflow", "apache_beam", "jax", "jaxlib", "seqio", "flax"}
# For users of another package, which it imports; nothing else imports these.
FACES = {"streams.grain", "t5x", "torch"}
# Public names that need SeqIO, which is imported when somebody asks for one.
LAZY = {"DeterministicMixture", "DeterministicTask"}
# What stands with the library for users of SeqIO and T5X, but is made of the tasks' package.
MADE_OF_TASKS = {
  "__init__": {"anystep.tasks.seqio_api.deterministic_task"},
  "t5x": {
    "anystep.tasks.registry.modules",
    "anystep.tasks.seqio_api.converters",
    "anystep.tasks.seqio_api.deterministic_task",
    "anystep.tasks.seqio_api.step_datasets",
  },
}
LIBRARY_MODULES = sorted({*MODULES} - FACES)
# What each folder must not import, in a function or outside.
FORBIDDEN = {
  "anystep": {"anystep.tasks", "anystep.cache_job", "anystep.train"},
  "tasks": {"anystep.cache_job", "anystep.train"},
  "cache_job": {"anystep.train"},
  "train": {"anystep.cache_job"},
}


def run_python(checkout, cwd, *arguments, **environment):
  """Runs Python on this checkout and returns its stdout; nothing may stand on stderr."""
  done = subprocess.run(
    [sys.executable, *map(str, arguments)],
    cwd=cwd,
    env={**os.environ, "PYTHONPATH": str(checkout), "PYTHONDONTWRITEBYTECODE": "1", **environment},
    capture_output=True,
    check=False,
    timeout=120,
  )
  assert (done.returncode, done.stderr.decode()) == (0, "")
  return done.stdout


def within(name, packages):
  """Whether a dotted name is one of the packages or lies in one."""
  return any(name == package or name.startswith(f"{package}.") for package in packages)


@pytest.mark.parametrize(
  ("source", "found"),
  [
    ("import a.b as c, d", {"a.b", "d"}),
    ("from a import b, c", {"a", "a.b", "a.c"}),
    ("from . import b", {"x.y", "x.y.b"}),
    ("from .. import b", {"x", "x.b"}),
    ("from ..z import b", {"x.z", "x.z.b"}),
    ("if True:\n  import a", {"a"}),
    ("class A:\n  import a", {"a"}),
    ("try:\n  import a\nexcept ImportError:\n  import b", {"a", "b"}),
    ("def f():\n  import a", {"a"}),
  ],
)
def test_imports_are_found_wherever_they_stand(source, found):
  assert imports_of(source, package="x.y") == found


def test_imports_inside_functions_can_be_told_from_others():
  source = "import a\ndef f():\n  import b\nclass C:\n  import c\n  async def g(self):\n    import d"
  assert imports_of(source, package="x", top_level_only=True) == {"a", "c"}


def test_imports_of_types_can_be_left_out_and_names_told_from_modules():
  source = "from a import b, c\nif TYPE_CHECKING:\n  import d"
  assert imports_of(source, package="x", with_types=False, modules={"a", "a.b"}) == {"a", "a.b"}
  assert imports_of("from a import b", package="x", modules={"a", "a.b"}) == {"a.b"}


@pytest.mark.parametrize("folder", FORBIDDEN)
def test_imports_go_one_way(checkout, folder):
  package = "anystep" if folder == "anystep" else f"anystep.{folder}"
  modules = sorted((checkout / folder).rglob("*.py"))
  assert len(modules) > 2
  for path in modules:
    allowed = MADE_OF_TASKS.get(path.stem, set()) if folder == "anystep" else set()
    for name in imports_of(path.read_text(), package=package):
      assert within(name, allowed) or not within(name, FORBIDDEN[folder]), f"{path} imports {name}"
      # In a checkout the folders could be imported by their bare names, installed they cannot.
      assert not within(name, {"tasks", "cache_job", "train"}), f"{path} imports {name}"


def test_the_library_imports_nothing_heavy_at_module_level(checkout):
  assert {"caches.cache", "plans.plan", "streams.stream"} <= set(LIBRARY_MODULES)
  for module in ("__init__", *LIBRARY_MODULES):
    source = (checkout / "anystep" / f"{module.replace('.', '/')}.py").read_text()
    for name in imports_of(source, package="anystep", top_level_only=True):
      assert not within(name, HEAVY), f"anystep/{module}.py imports {name}"


def test_the_package_under_test_is_the_checkouts(checkout):
  assert anystep.__file__ == str(checkout / "anystep" / "__init__.py")


def test_public_names_are_there_and_sorted():
  assert list(anystep.__all__) == sorted(anystep.__all__)
  assert {"Cache", "Permutation", "Plan", "Stream", "open_cache", "open_stream"} <= set(anystep.__all__)
  for name in anystep.__all__:
    assert getattr(anystep, name).__module__.startswith("anystep."), name


ASKS_FOR_NAMES = """
  import anystep
  assert %(lazy)r <= set(dir(anystep))
  for name in %(lazy)r:
    try:
      getattr(anystep, name)
    except anystep.AnystepError as error:
      print(error.code.value, error.kind, name in str(error), "pip install" in error.fix)
  assert not hasattr(anystep, "DeterministicTasks")
"""


def test_names_that_need_seqio_say_so_where_it_is_missing(checkout, tmp_path):
  script = textwrap.dedent("  import sys\n" + WITHOUT + ASKS_FOR_NAMES) % {"heavy": HEAVY, "lazy": LAZY}
  assert run_python(checkout, tmp_path, "-c", script).decode() == "78 package_missing True True\n" * 2


IMPORTS_TORCH = """
  import anystep
  try:
    import anystep.torch
  except anystep.AnystepError as error:
    print(error.code.value, error.kind, "anystep.torch" in str(error), error.fix)
"""


def test_the_datasets_of_pytorch_say_so_where_torch_is_missing(checkout, tmp_path):
  script = textwrap.dedent("  import sys\n" + WITHOUT + IMPORTS_TORCH) % {"heavy": {"torch"}}
  expected = "78 package_missing True pip install 'anystep[torch]'\n"
  assert run_python(checkout, tmp_path, "-c", script).decode() == expected


READER = (
  """
  import importlib.util, json, sys

"""
  + WITHOUT
  + """
  assert not any(map(importlib.util.find_spec, %(heavy)r))
  for module in %(modules)r:
    importlib.import_module(f"anystep.{module}")
  from anystep.caches.cache import open_cache
  from anystep.features.converters import EncoderDecoderConverter
  from anystep.features.digest import batch_digest
  from anystep.plans.plan import Plan
  from anystep.streams.stream import open_stream

  cache = open_cache(sys.argv[1], "demo", "train")
  cache.verify()
  plan = Plan.start(cache, batch_size=12, num_epochs=3, feature_lengths=json.loads(sys.argv[2]))
  with open_stream(plan, sys.argv[1]) as stream:
    digests = [batch_digest(batch) for batch in stream]
  with open_stream(plan, sys.argv[1], feature_converter=EncoderDecoderConverter()) as stream:
    names = sorted(next(stream))
  print(json.dumps({"digests": digests, "plan": plan.sha256, "names": names, "7": cache[7]["number"].item()}))
"""
)


def reader_script():
  return textwrap.dedent(READER) % {"heavy": HEAVY, "modules": LIBRARY_MODULES}


def test_a_cache_is_read_where_nothing_else_is_installed(checkout, shared_cache, tmp_path):
  lengths = json.dumps(caches.FEATURE_LENGTHS)
  found = json.loads(run_python(checkout, tmp_path, "-c", reader_script(), shared_cache.root, lengths))
  plan = Plan.start(shared_cache.open(), batch_size=12, num_epochs=3, feature_lengths=caches.FEATURE_LENGTHS)
  with open_stream(plan, [shared_cache.root]) as stream:
    assert found == {
      "digests": [batch_digest(batch) for batch in stream],
      "plan": plan.sha256,
      "names": [
        "decoder_input_tokens",
        "decoder_loss_weights",
        "decoder_target_tokens",
        "encoder_input_tokens",
      ],
      "7": int(shared_cache.examples[7]["number"]),
    }


# In a process of its own: others may have imported, defined and registered before.
EFFECTS = """
  import sys
  from absl import flags
  before = set(flags.FLAGS)
  import importlib
  for name in sys.argv[1:]:
    importlib.import_module(name)
  assert set(flags.FLAGS) == before, set(flags.FLAGS) - before
  heavy = %(heavy)r & sys.modules.keys()
  assert not heavy, heavy
"""


@pytest.mark.parametrize(
  "modules",
  [
    ["anystep", "anystep.tasks", "anystep.cache_job", "anystep.train"],
    [f"anystep.{module}" for module in LIBRARY_MODULES],
  ],
  ids=["packages", "library"],
)
def test_importing_defines_no_flags_loads_nothing_heavy_and_prints_nothing(checkout, tmp_path, modules):
  """Where SeqIO is not loaded, nothing can have been registered in it."""
  script = textwrap.dedent(EFFECTS) % {"heavy": HEAVY}
  assert run_python(checkout, tmp_path, "-c", script, *modules) == b""


@pytest.mark.parametrize("output_format", ["jsonl", "text"])
def test_what_was_at_is_the_same_bytes_in_any_surroundings(checkout, shared_cache, tmp_path, output_format):
  other = tmp_path / "Zürich 2"
  other.mkdir()
  surroundings = [
    (tmp_path, {"PYTHONHASHSEED": "1", "LC_ALL": "C", "TZ": "UTC", "COLUMNS": "20"}),
    (other, {"PYTHONHASHSEED": "2", "LC_ALL": "C.UTF-8", "TZ": "Asia/Kathmandu", "COLUMNS": "200"}),
  ]
  arguments = [
    *(
      "-m",
      "anystep.tasks.data_program.main",
      "what-was-at",
      f"--cache_dir={shared_cache.root}",
      "--task=demo",
    ),
    *("--batch_size=12", "--steps=2:9", "--seed=5", f"--format={output_format}"),
  ]
  one, two = (run_python(checkout, cwd, *arguments, **environment) for cwd, environment in surroundings)
  assert one == two
  if output_format == "jsonl":
    rows = [json.loads(line) for line in one.splitlines()]
    assert rows == oracle.what_was_at(shared_cache.manifest, 12, 2, 9, seed=5)
  else:
    assert len(one.splitlines()) == 84


def test_plans_and_batches_are_the_same_in_any_surroundings(checkout, shared_cache, tmp_path):
  arguments = ["-c", reader_script(), shared_cache.root, json.dumps(caches.FEATURE_LENGTHS)]
  one, two = (
    run_python(checkout, cwd, *arguments, PYTHONHASHSEED=seed, LC_ALL=locale, TZ=zone)
    for cwd, seed, locale, zone in [(tmp_path, "1", "C", "UTC"), (checkout, "2", "C.UTF-8", "Asia/Kathmandu")]
  )
  assert one == two
