"""Changes that a run may not make in silence when it resumes, and the changes that a user accepted."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from etils import epath

from anystep.errors import AnystepError, ExitCode, find_nearest, make_file_error
from anystep.files import storage
from anystep.files.input_files import read_file
from anystep.files.json_files import MALFORMED, canonical_json, parse_json
from anystep.files.names import checkpoint_name, checkpoint_step
from anystep.limits import MAX_JSON_BYTES, is_count

if TYPE_CHECKING:
  from anystep.train.configuration.built_values import Value

ACCEPTED_CHANGES = "accepted_changes"
_ACCEPTED_NAME = re.compile(r"(\d{4,})\.json\Z")
_VERSION = 1
_ABSENT = "absent"
_LONGEST_SIDE = 200


@dataclasses.dataclass(frozen=True, kw_only=True)
class Change:
  """Difference between a value of a checkpoint and the same value of the run that resumes.

  Attributes:
    name: name of the value.
    was, now: a list with the JSON value; an empty list if there is no such value.
    step: step of the checkpoint.
  """

  name: str
  was: list[Value]
  now: list[Value]
  step: int

  def __post_init__(self):
    if not isinstance(self.name, str) or not is_count(self.step):
      raise ValueError(f"unexpected name {self.name!r} or step {self.step!r}")
    if not all(isinstance(side, list) and len(side) < 2 for side in (self.was, self.now)):
      raise ValueError(f"unexpected was {self.was!r} or is {self.now!r}")

  def __str__(self) -> str:
    was, now = (json.dumps(side[0], ensure_ascii=False) if side else _ABSENT for side in (self.was, self.now))
    return f"{self.name}: {was} → {now}"

  def to_json(self) -> str:
    """Return the text of its file."""
    document: dict[str, Any] = {"version": _VERSION, "name": self.name, "step": self.step}
    document |= {key: side[0] for key, side in (("was", self.was), ("is", self.now)) if side}
    return canonical_json(document, indent=1) + "\n"

  @classmethod
  def read(cls, path: epath.PathLike) -> Change:
    """Read its file.

    Raises:
      AnystepError: 65 `accepted_change_invalid`.
    """
    try:
      content = read_file(path, limit_bytes=MAX_JSON_BYTES)
    except (ValueError, IsADirectoryError, FileNotFoundError) as error:
      raise _invalid(path, error) from error
    return cls.from_json(content, path=path)

  @classmethod
  def from_json(cls, text: str | bytes, *, path: object) -> Change:
    """Read its file's text.

    Raises:
      AnystepError: 65 `accepted_change_invalid`.
    """
    try:
      document = parse_json(text)
      if document["version"] != _VERSION:
        raise ValueError("another version")
      was, now = ([document[key]] if key in document else [] for key in ("was", "is"))
      return cls(name=document["name"], was=was, now=now, step=document["step"])
    except MALFORMED as error:
      raise _invalid(path, error) from error

  def is_covered(self, accepted: Change) -> bool:
    """Return whether an accepted change is between the same values, at this step or a later one.

    So a run may fall back to an earlier checkpoint. A value that is changed back must be accepted again.
    """
    same = (self.name, self.was, self.now) == (accepted.name, accepted.was, accepted.now)
    return same and self.step <= accepted.step


def _invalid(path: object, error: Exception) -> AnystepError:
  fix = "restore the file from a copy, or remove it and accept the change again"
  return make_file_error("accepted_change_invalid", error, path=path, fix=fix)


def find_run_change(step: int, run: str | None, now: str | None) -> list[Change]:
  """Return the change of a checkpoint's run, if it is another run's; a checkpoint without a name passes.

  Args:
    step: step of the checkpoint. It is part of the change's name: each checkpoint is accepted separately.
    run: name of the run that wrote the checkpoint; None if it has none.
    now: name of the directory's run; None if it has none.
  """
  if run is None or run == now:
    return []
  return [Change(name=f"{checkpoint_name(step)}/run", was=[run], now=[now] if now else [], step=step)]


def find_value_changes(step: int, was: Mapping[str, Value], now: Mapping[str, Value]) -> list[Change]:
  """Return the values that differ, or that only one side has."""
  changes = []
  for name in sorted(was.keys() | now.keys()):
    sides = [[values[name]] if name in values else [] for values in (was, now)]
    if sides[0] != sides[1]:
      changes.append(Change(name=name, was=sides[0], now=sides[1], step=step))
  return changes


def list_differences(was: Any, now: Any, name: str = "") -> list[str]:
  """Return the parts in which two JSON values differ, each as `name: was → is`.

  >>> list_differences({"sizes": [8, 2], "seed": 0}, {"sizes": [16, 2], "seed": 0, "rate": 0.5})
  ['rate: absent → 0.5', 'sizes[0]: 8 → 16']
  """
  if isinstance(was, Mapping) and isinstance(now, Mapping):
    pairs = {
      f"{name}.{key}".lstrip("."): (was.get(key, _ABSENT), now.get(key, _ABSENT)) for key in {*was, *now}
    }
  elif isinstance(was, (list, tuple)) and isinstance(now, (list, tuple)):
    both = enumerate(itertools.zip_longest(was, now, fillvalue=_ABSENT))
    pairs = {f"{name}[{index}]": pair for index, pair in both}
  elif was == now:
    return []
  else:
    return [f"{name}: {_format_side(was)} → {_format_side(now)}"]
  return [text for part, sides in sorted(pairs.items()) for text in list_differences(*sides, part)]


def _format_side(value: Any) -> str:
  text = value if value == _ABSENT else json.dumps(value, ensure_ascii=False, default=str)
  return text if len(text) <= _LONGEST_SIDE else f"{text[:_LONGEST_SIDE]}…"


@dataclasses.dataclass(frozen=True, kw_only=True)
class AcceptedChanges:
  """Accepted changes: those recorded in a directory, and names that are accepted now.

  Attributes:
    model_dir: the run's directory.
    before: changes that are recorded there.
    names: names of the changes accepted now.
  """

  model_dir: epath.PathLike
  before: Sequence[Change]
  names: Collection[str]

  @classmethod
  def read(cls, model_dir: epath.PathLike, names: Collection[str] = ()) -> AcceptedChanges:
    """Read the changes recorded in a directory, and add names that are accepted now.

    Raises:
      AnystepError: 65 `accepted_change_invalid`.
    """
    before = [Change.read(path) for _, path in _list_files(model_dir)]
    return cls(model_dir=model_dir, before=before, names=names)

  def require(self, changes: Sequence[Change], *, kind: str, expected: str, fix: str) -> list[Change]:
    """Refuse changes that are not accepted; return those that are accepted for the first time.

    Raises:
      AnystepError: 76 `kind`.
    """
    new = [change for change in changes if not any(map(change.is_covered, self.before))]
    refused = [change for change in new if change.name not in self.names]
    if refused:
      flags = " ".join(f"'--accept_change={change.name}'" for change in refused)
      raise AnystepError(
        ExitCode.MISMATCH,
        kind,
        path=epath.Path(self.model_dir) / checkpoint_name(refused[0].step),
        expected=expected,
        got="; ".join(map(str, refused)),
        fix=f"{fix}; or accept {'each' if len(refused) > 1 else 'it'}: {flags}",
      )
    return new

  def check_names(self, value_names: Collection[str]) -> None:
    """Refuse a name that no value has, now or before.

    Raises:
      AnystepError: 64 `accept_change`.
    """
    names = {*value_names, *(change.name for change in self.before)}
    for name in self.names:
      directory, _, value = name.partition("/")
      if name not in names and not (value == "run" and checkpoint_step(directory) is not None):
        raise AnystepError(
          ExitCode.USAGE,
          "accept_change",
          expected="the name of a value that decides parameters or losses",
          got=name,
          nearest=find_nearest(name, names),
          fix="leave it out, and see which names are refused",
        )


def record_accepted(model_dir: epath.PathLike, changes: Sequence[Change]) -> None:
  """Write changes to a directory, with the next numbers; they need not be accepted again."""
  numbers = [number for number, _ in _list_files(model_dir)]
  directory = epath.Path(model_dir) / ACCEPTED_CHANGES
  for number, change in enumerate(changes, start=max(numbers, default=-1) + 1):
    directory.mkdir(parents=True, exist_ok=True)
    storage.put(directory / f"{number:04d}.json", change.to_json().encode())


def _list_files(model_dir: epath.PathLike) -> list[tuple[int, epath.Path]]:
  directory = epath.Path(model_dir) / ACCEPTED_CHANGES
  if not directory.is_dir():
    return []
  matches = [(_ACCEPTED_NAME.match(path.name), path) for path in directory.iterdir()]
  return sorted((int(match[1]), path) for match, path in matches if match)
