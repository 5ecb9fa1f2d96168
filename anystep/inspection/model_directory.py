"""The data of a run, as its trainer left it in the model directory: plan, caches and feature converter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from etils import epath

from anystep.errors import AnystepError, ExitCode, make_file_error
from anystep.features.converter_names import converter_from_json
from anystep.features.converters import FeatureConverter
from anystep.files import names
from anystep.files.json_files import MALFORMED, read_json
from anystep.limits import is_count, is_name
from anystep.plans.plan import Plan


class RecordedData(NamedTuple):
  """Data of a run.

  Attributes:
    plan: the plan that it trains by.
    roots: where its caches are; empty where that is not recorded.
    trained_steps: steps of the plan that are done at its newest checkpoint; 0 without one.
    first_step: the model's step at the plan's step 0; 0 but for runs that began with a checkpoint.
  """

  plan: Plan
  roots: Sequence[str]
  trained_steps: int
  first_step: int


class RecordedConverter(NamedTuple):
  """The feature converter of a run's model; None where it is not known, with the problem, for people."""

  converter: FeatureConverter | None
  problem: str = ""


def read_model_dir(path: epath.PathLike) -> RecordedData:
  """Read a run's plan, or else its newest checkpoint's, the roots of its caches and that checkpoint's step.

  Raises:
    AnystepError: 66 `plan_missing`; 65 `plan_invalid`, `caches_invalid`, `run_invalid`.
  """
  directory = epath.Path(path)
  entries = list(directory.iterdir()) if directory.is_dir() else []
  committed = [entry for entry in entries if (entry / names.COMMIT_SUCCESS).exists()]
  steps = [step for entry in committed if (step := names.checkpoint_step(entry.name)) is not None]
  directories = [directory, *(directory / names.checkpoint_name(step) for step in sorted(steps)[-1:])]
  paths = [other / names.DATA_PLAN for other in directories]
  plan_path = next((path for path in paths if path.exists()), paths[0])
  if not plan_path.exists() and (directory / names.DATA_UNCACHED).exists():
    raise AnystepError(
      ExitCode.NO_INPUT,
      "plan_missing",
      path=plan_path,
      expected="a run by a plan",
      got="one straight from its source, USE_CACHED_TASKS = False",
      fix="cache the task to know what a step saw: no plan says it of this run",
    )
  plan = read_plan(plan_path)
  caches = directory / names.DATA_CACHES
  roots = _read_roots(caches) if caches.exists() else []
  first_step = _read_first_step(directory / names.RUN)
  return RecordedData(plan, roots, max([0, *(step - first_step for step in steps)]), first_step)


def read_plan_or_model_dir(path: epath.PathLike) -> Plan:
  """Read the plan of a file, or of a model directory.

  Raises:
    AnystepError: 66 `plan_missing`; 65 `plan_invalid`.
  """
  return read_model_dir(path).plan if epath.Path(path).is_dir() else read_plan(path)


def read_plan(path: epath.PathLike) -> Plan:
  """Read the plan of a file.

  Raises:
    AnystepError: 66 `plan_missing`; 65 `plan_invalid`.
  """
  fix = "give --plan a file of anystep-data plan, or --model_dir the directory of a run that has started"
  return Plan.read(epath.Path(path), fix=fix)


def read_converter(model_dir: epath.PathLike) -> RecordedConverter:
  """Read which feature converter the model of a run has.

  Raises:
    AnystepError: 65 `converter_invalid`.
  """
  path = epath.Path(model_dir) / names.DATA_CONVERTER
  if not path.exists():
    return RecordedConverter(None, f"the run, of an earlier version, has no {names.DATA_CONVERTER}")
  try:
    document = read_json(path)
    converter = converter_from_json(document)
  except (*MALFORMED, IsADirectoryError) as error:
    expected = '{"version": 1, "model": "encoder_decoder", "arguments": {"bos_id": 0}}'
    fix = "name the model with --model, or start the run again, which writes the file"
    raise make_file_error("converter_invalid", error, path=path, expected=expected, fix=fix) from error
  if converter is None:
    return RecordedConverter(None, f"the run's converter, {document['class']}, is not one of anystep's")
  return RecordedConverter(converter)


def _read_first_step(path: epath.Path) -> int:
  if not path.exists():
    return 0
  try:
    # Earlier versions wrote none.
    first_step = read_json(path).get("first_step", 0)
    if not is_count(first_step):
      raise ValueError(f"unexpected first step {first_step!r}")
  except (*MALFORMED, IsADirectoryError) as error:
    expected = '{"version": 1, "run": "...", "first_step": 0}'
    fix = "restore the file from a copy; the run's checkpoints have the first step in integrity.json"
    raise make_file_error("run_invalid", error, path=path, expected=expected, fix=fix) from error
  return first_step


def _read_roots(path: epath.Path) -> list[str]:
  try:
    document = read_json(path)
    if document.keys() != {"version", "cache_dirs"} or document["version"] != 1:
      raise ValueError("no version 1")
    roots = document["cache_dirs"]
    if not (isinstance(roots, list) and all(map(is_name, roots))):
      raise ValueError("cache_dirs is no list of names")
  except (*MALFORMED, IsADirectoryError) as error:
    expected = '{"version": 1, "cache_dirs": ["ROOT"]}'
    fix = "say where the caches are with --cache_dir"
    raise make_file_error("caches_invalid", error, path=path, expected=expected, fix=fix) from error
  return roots
