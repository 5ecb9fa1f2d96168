"""State of a run's data, kept beside each checkpoint: a plan, or a note that there is none."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from etils import epath

from anystep.errors import AnystepError, ExitCode, make_file_error
from anystep.files import storage
from anystep.files.input_files import read_file
from anystep.files.json_files import MALFORMED, canonical_json, parse_json
from anystep.files.names import DATA_PLAN, DATA_UNCACHED
from anystep.limits import (
  MAX_BATCH_ROWS,
  MAX_JSON_BYTES,
  are_feature_lengths,
  is_count,
  is_name,
  refuse_wrong,
)
from anystep.order.packing import PackingPolicy
from anystep.plans.plan import Plan
from anystep.train.configuration.resume_contract import list_differences

# A run has one of these files; its name says whether the data is exact.
DATA_FILES = (DATA_PLAN, DATA_UNCACHED)
_VERSION = 1
# How a run's data comes, for errors.
_PLANNED, _UNCACHED = "with a plan of its examples", "straight from its source"


@dataclasses.dataclass(frozen=True, kw_only=True)
class UncachedState:
  """State of data that comes straight from its source: its configuration, without a position.

  Attributes:
    mixture_or_task_name, split, batch_size, seed, feature_lengths, packing: see `DatasetConfig`.
  """

  mixture_or_task_name: str
  split: str
  batch_size: int
  seed: int
  feature_lengths: Mapping[str, int]
  packing: str

  def __post_init__(self):
    refuse_wrong(
      mixture_or_task_name=is_name(self.mixture_or_task_name),
      split=is_name(self.split),
      batch_size=is_count(self.batch_size, least=1, most=MAX_BATCH_ROWS),
      seed=is_count(self.seed),
      feature_lengths=are_feature_lengths(self.feature_lengths, least=1),
      packing=self.packing in [policy.value for policy in PackingPolicy],
    )

  @property
  def num_steps(self) -> None:
    """None: the end of the data is not known before."""
    return None

  def to_json(self) -> str:
    """Return the file's text."""
    document = {"version": _VERSION, "exact": False, **dataclasses.asdict(self)}
    return canonical_json(document, indent=1) + "\n"

  @classmethod
  def from_json(cls, text: str | bytes, *, path: object = DATA_UNCACHED) -> UncachedState:
    """Read the file's text.

    Raises:
      AnystepError: 65 `data_uncached_invalid`.
    """
    try:
      document = parse_json(text)
      if (document.pop("version"), document.pop("exact")) != (_VERSION, False):
        raise ValueError("another version")
      return cls(**document)
    except MALFORMED as error:
      raise _invalid(path, error) from error


def _invalid(path: object, error: Exception, kind: str = "data_uncached_invalid") -> AnystepError:
  fix = "restore the file from a copy, or read it with the anystep version that wrote it"
  return make_file_error(kind, error, path=path, fix=fix)


DataState = Plan | UncachedState


def file_name(state: DataState) -> str:
  """Return the name of a state's file."""
  return DATA_PLAN if isinstance(state, Plan) else DATA_UNCACHED


def read_state(path: epath.Path) -> DataState:
  """Read the state in a file of one of `DATA_FILES`' names.

  Raises:
    AnystepError: 66 `plan_missing`; 65 `plan_invalid`, `data_uncached_invalid`.
  """
  if path.name == DATA_PLAN:
    return Plan.read(path, fix="restore the file from a copy")
  try:
    content = read_file(path, limit_bytes=MAX_JSON_BYTES)
  except (ValueError, IsADirectoryError) as error:
    raise _invalid(path, error) from error
  return UncachedState.from_json(content, path=path)


def record_state(model_dir: epath.PathLike, state: DataState, step: int) -> None:
  """Write the state that a run goes on with from a step; rename the file of a different earlier one.

  Raises:
    AnystepError: 65 `plan_invalid`, `data_uncached_invalid` where no file stands at a state's name.
  """
  directory = epath.Path(model_dir)
  directory.mkdir(parents=True, exist_ok=True)
  content, new_name = state.to_json().encode(), file_name(state)
  for name in DATA_FILES:
    path = directory / name
    before = _read_content(path)
    # A damaged file is different too.
    if before is not None and (name != new_name or before != content):
      path.replace(directory / f"{path.stem}_until_step_{step}.json")
  storage.put(directory / new_name, content)


def _read_content(path: epath.Path) -> bytes | None:
  """Read the bytes of a state's file; None if there is none."""
  try:
    return read_file(path, limit_bytes=MAX_JSON_BYTES)
  except FileNotFoundError:
    return None
  except (ValueError, IsADirectoryError) as error:
    kind = "plan_invalid" if path.name == DATA_PLAN else "data_uncached_invalid"
    raise _invalid(path, error, kind) from error


def check_same(before: Mapping[str, Any], now: Mapping[str, Any], fix: str) -> None:
  """Refuse data that differs from what a run began with.

  Raises:
    AnystepError: 76 `resume_contract` with the first field that differs, and all differences.
  """
  fields = [field for field, value in before.items() if now[field] != value]
  if fields:
    differences = [text for field in fields for text in list_differences(before[field], now[field], field)]
    if all(len(document.get("segments", ())) == 1 for document in (before, now)):
      # Of data that never changed, the only segment needs no name.
      differences = [text.removeprefix("segments[0].") for text in differences]
    raise _resume_error(fields[0], expected="what the run began with", got="; ".join(differences), fix=fix)


def require_plan(before: DataState) -> Plan:
  """Return a checkpoint's plan, for a run that has one too.

  Raises:
    AnystepError: 76 `resume_contract` where the run began without one: no file could say what steps saw.
  """
  if isinstance(before, Plan):
    return before
  raise _other_kind(expected=_UNCACHED, got=_PLANNED)


def require_uncached(before: DataState) -> UncachedState:
  """Return a checkpoint's state of data that comes straight from its source, for a run whose data does too.

  Raises:
    AnystepError: 76 `resume_contract` where the run began with a plan.
  """
  if isinstance(before, UncachedState):
    return before
  raise _other_kind(expected=_PLANNED, got=_UNCACHED)


def _other_kind(*, expected: str, got: str) -> AnystepError:
  fix = "set USE_CACHED_TASKS as it was, or train in another MODEL_DIR"
  return _resume_error("data", expected=expected, got=got, fix=fix)


def _resume_error(field: str, *, expected: object, got: object, fix: str) -> AnystepError:
  return AnystepError(ExitCode.MISMATCH, "resume_contract", field=field, expected=expected, got=got, fix=fix)
