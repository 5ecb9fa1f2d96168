"""Files and folders are renamed, replaced by another cache's or written over under a running stream."""

from __future__ import annotations

import os
import pathlib
import shutil
from collections.abc import Callable

from attacks.attack import Attempt, Chance
from attacks.damage import contents, remove, restore
from attacks.targets import TARGETS


def prepare(folder: pathlib.Path) -> Attempt:
  """Makes the files, and others like them of other examples; returns the attempt."""
  targets = [make(folder / f"{name} files", 0) for name, make in TARGETS.items()]
  others = [make(folder / f"{name} others", 1000).root for name, make in TARGETS.items()]
  written = [contents(target.root) for target in targets]

  def attempt(chance: Chance) -> None:
    which = chance.randrange(len(targets))
    target, root, other = targets[which], targets[which].root, others[which]
    when, kind = chance.randint(1, len(target.truth) - 1), chance.choice(list(KINDS))
    chance.note(f"{root.name}, when {when} values were read: {kind}")
    try:
      values = target.read(root)
      target.check(values, stop=when)
      KINDS[kind](root, other, chance)
      target.check(values, start=when)
    finally:
      remove(_aside(root))
      root.mkdir(exist_ok=True)
      restore(root, written[which])

  return attempt


def _aside(root: pathlib.Path) -> pathlib.Path:
  return root.with_name("aside")


def _files(root: pathlib.Path) -> list[pathlib.Path]:
  return sorted(path for path in root.rglob("*") if path.is_file())


def _root_renamed(root: pathlib.Path, other: pathlib.Path, chance: Chance) -> None:
  root.rename(_aside(root))
  shutil.copytree(other, root)


def _task_renamed(root: pathlib.Path, other: pathlib.Path, chance: Chance) -> None:
  (root / "demo").rename(_aside(root))
  shutil.copytree(other / "demo", root / "demo")


def _moved_there_and_back(root: pathlib.Path, other: pathlib.Path, chance: Chance) -> None:
  root.rename(_aside(root))
  _aside(root).rename(root)


def _gone(root: pathlib.Path, other: pathlib.Path, chance: Chance) -> None:
  root.rename(_aside(root))


def _written_over(root: pathlib.Path, other: pathlib.Path, chance: Chance) -> None:
  for path in _files(other):
    _in_place(root / path.relative_to(other), path.read_bytes())


def _one_written_over(root: pathlib.Path, other: pathlib.Path, chance: Chance) -> None:
  path = chance.choice(_files(other))
  _in_place(root / path.relative_to(other), path.read_bytes())


def _replaced(root: pathlib.Path, other: pathlib.Path, chance: Chance) -> None:
  for path in _files(other):
    put(root / path.relative_to(other), path.read_bytes())


def _one_replaced(root: pathlib.Path, other: pathlib.Path, chance: Chance) -> None:
  path = chance.choice(_files(other))
  put(root / path.relative_to(other), path.read_bytes())


def _one_replaced_at_the_same_time(root: pathlib.Path, other: pathlib.Path, chance: Chance) -> None:
  """With the modification time of what was there."""
  path = chance.choice(_files(other))
  place = root / path.relative_to(other)
  before = place.stat() if place.exists() else None
  put(place, path.read_bytes())
  if before is not None:
    os.utime(place, ns=(before.st_atime_ns, before.st_mtime_ns))


def _two_renamed(root: pathlib.Path, other: pathlib.Path, chance: Chance) -> None:
  one, another = chance.sample(_files(root), 2)
  one.rename(_aside(root))
  another.rename(one)
  _aside(root).rename(another)


def _copied(root: pathlib.Path, other: pathlib.Path, chance: Chance) -> None:
  """The same bytes in other files."""
  for path in _files(root):
    put(path, path.read_bytes())


def _touched(root: pathlib.Path, other: pathlib.Path, chance: Chance) -> None:
  for path in _files(root):
    os.utime(path)


def _tail_written_over(root: pathlib.Path, other: pathlib.Path, chance: Chance) -> None:
  """All that stands beyond the first 4 KiB is the other cache's."""
  for path in _files(root):
    twin = other / path.relative_to(root)
    if twin.exists() and path.stat().st_size > 4096:
      _in_place(path, path.read_bytes()[:4096] + twin.read_bytes()[4096:])


def _truncated(root: pathlib.Path, other: pathlib.Path, chance: Chance) -> None:
  path = chance.choice(_files(root))
  os.truncate(path, chance.randrange(path.stat().st_size + 1))


def _in_place(path: pathlib.Path, content: bytes) -> None:
  path.parent.mkdir(parents=True, exist_ok=True)
  with path.open("r+b" if path.exists() else "wb") as file:
    file.write(content)
    file.truncate()


def put(path: pathlib.Path, content: bytes) -> None:
  """Replaces a file by another one."""
  path.parent.mkdir(parents=True, exist_ok=True)
  attempt = path.with_name(f"{path.name}.attempt")
  attempt.write_bytes(content)
  attempt.replace(path)


Replacement = Callable[[pathlib.Path, pathlib.Path, Chance], None]
KINDS: dict[str, Replacement] = {
  "root renamed": _root_renamed,
  "task renamed": _task_renamed,
  "moved there and back": _moved_there_and_back,
  "gone": _gone,
  "written over": _written_over,
  "one written over": _one_written_over,
  "replaced": _replaced,
  "one replaced": _one_replaced,
  "one replaced at the same time": _one_replaced_at_the_same_time,
  "two renamed": _two_renamed,
  "copied": _copied,
  "touched": _touched,
  "tail written over": _tail_written_over,
  "truncated": _truncated,
}
