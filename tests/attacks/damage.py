"""Files are damaged before they are opened, before they are read, or between two reads."""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
from collections.abc import Callable

from attacks.attack import HARMLESS, Attempt, Chance, Wrong
from attacks.targets import TARGETS

_FLIPS = 8


def prepare(folder: pathlib.Path) -> Attempt:
  """Makes the files and returns the attempt."""
  targets = [make(folder / f"{name} files", 0) for name, make in TARGETS.items()]
  written = [contents(target.root) for target in targets]

  def attempt(chance: Chance) -> str:
    which = chance.randrange(len(targets))
    target, root = targets[which], targets[which].root
    # 0: before anything is opened; 1: before anything is read; later: between two reads.
    when = chance.choice([0, 0, 1, chance.randrange(len(target.truth))])
    chance.note(f"{root.name}, when {when} values were read")
    try:
      values = target.read(root)
      target.check(values, stop=when)
      damage(root, chance)
      target.check(values, start=when)
      target.verify(root)
      changed = {name for name, content in contents(root).items() if written[which].get(name) != content}
      # COMPLETED may say the same in other words, and a unit table is read by who needs it.
      if {
        name for name in changed & written[which].keys() if "units/" not in name and "COMPLETED" not in name
      }:
        raise Wrong(f"verify takes {sorted(changed)} for what was written")
      return HARMLESS
    finally:
      restore(root, written[which])

  return attempt


def contents(root: pathlib.Path) -> dict[str, bytes]:
  """Every plain file below, by relative path."""
  files = (path for path in root.rglob("*") if path.is_file() and not path.is_symlink())
  return {path.relative_to(root).as_posix(): path.read_bytes() for path in files}


def restore(root: pathlib.Path, written: dict[str, bytes]) -> None:
  """Puts back what was written, and removes what was not."""
  for path in list(root.rglob("*")):
    name = path.relative_to(root).as_posix()
    plain = path.is_file() and not path.is_symlink()
    is_folder = path.is_dir() and not path.is_symlink()
    if not (plain and name in written) and not (is_folder and _is_parent(name, written)):
      remove(path)
  for name, content in written.items():
    path = root / name
    if not path.exists() or path.read_bytes() != content:
      path.parent.mkdir(parents=True, exist_ok=True)
      path.write_bytes(content)


def _is_parent(name: str, written: dict[str, bytes]) -> bool:
  return any(other.startswith(f"{name}/") for other in written)


def remove(path: pathlib.Path) -> None:
  """Removes whatever is there."""
  if path.is_dir() and not path.is_symlink():
    shutil.rmtree(path)
  else:
    with contextlib.suppress(FileNotFoundError):
      path.unlink()


def damage(root: pathlib.Path, chance: Chance) -> None:
  """Damages a file or two, if there are any: damage before may have deleted the folder."""
  paths = sorted(path for path in root.rglob("*") if path.is_file())
  if not paths:
    return
  path, kind = chance.choice(paths), chance.choice(list(KINDS))
  chance.note(f"{kind}: {path.relative_to(root)}")
  KINDS[kind](path, paths, chance)


def _flip(path: pathlib.Path, paths: object, chance: Chance) -> None:
  content = bytearray(path.read_bytes())
  for _ in range(chance.randint(1, _FLIPS) if content else 0):
    content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
  path.write_bytes(content)


def _truncate(path: pathlib.Path, paths: object, chance: Chance) -> None:
  os.truncate(path, chance.randrange(max(path.stat().st_size, 1)))


def _extend(path: pathlib.Path, paths: object, chance: Chance) -> None:
  with path.open("ab") as file:
    file.write(chance.choice([b"\0", b"\n", b"x" * 100, path.read_bytes(), bytes(1 << 16)]))


def _zero(path: pathlib.Path, paths: object, chance: Chance) -> None:
  content = bytearray(path.read_bytes())
  start, stop = sorted(chance.randrange(len(content) + 1) for _ in range(2))
  content[start:stop] = bytes(stop - start)
  path.write_bytes(content)


def _shift(path: pathlib.Path, paths: object, chance: Chance) -> None:
  content = path.read_bytes()
  place = chance.randrange(len(content) + 1)
  path.write_bytes(content[:place] + chance.choice([b"\0" + content[place:], content[place + 1 :]]))


def _noise(path: pathlib.Path, paths: object, chance: Chance) -> None:
  path.write_bytes(chance.randbytes(chance.choice([0, 1, path.stat().st_size])))


def _no_text(path: pathlib.Path, paths: object, chance: Chance) -> None:
  """Bytes that are not UTF-8."""
  content = path.read_bytes()
  place = chance.randrange(len(content) + 1)
  path.write_bytes(content[:place] + chance.choice([b"\xff", b"\xc3(", b"\xed\xa0\x80"]) + content[place:])


def _swap(path: pathlib.Path, paths: list[pathlib.Path], chance: Chance) -> None:
  other = chance.choice([p for p in paths if p.suffix == path.suffix or "-of-" in p.name] or paths)
  contents = path.read_bytes(), other.read_bytes()
  path.write_bytes(contents[1])
  other.write_bytes(contents[0])


def _copy_over(path: pathlib.Path, paths: list[pathlib.Path], chance: Chance) -> None:
  path.write_bytes(chance.choice(paths).read_bytes())


def _delete(path: pathlib.Path, paths: object, chance: Chance) -> None:
  path.unlink()


def _delete_folder(path: pathlib.Path, paths: object, chance: Chance) -> None:
  shutil.rmtree(path.parent)


def _foreign(path: pathlib.Path, paths: object, chance: Chance) -> None:
  other = chance.choice([("-00000-", "-00007-"), ("-of-00004", "-of-00008"), (path.name, "x")])
  path.with_name(path.name.replace(*other)).write_bytes(path.read_bytes())


def _folder(path: pathlib.Path, paths: object, chance: Chance) -> None:
  path.unlink()
  path.mkdir()


def _fifo(path: pathlib.Path, paths: object, chance: Chance) -> None:
  path.unlink()
  os.mkfifo(path)


def _link(path: pathlib.Path, paths: list[pathlib.Path], chance: Chance) -> None:
  to = chance.choice(["/dev/null", "/dev/zero", "/dev/full", "nowhere", path.name, chance.choice(paths).name])
  chance.note(f"to {to}")
  path.unlink()
  path.symlink_to(to)


def _file_for_folder(path: pathlib.Path, paths: object, chance: Chance) -> None:
  shutil.rmtree(path.parent)
  path.parent.write_bytes(b"a file where a folder was")


Damage = Callable[[pathlib.Path, list[pathlib.Path], Chance], None]
KINDS: dict[str, Damage] = {
  "flip": _flip,
  "truncate": _truncate,
  "extend": _extend,
  "zero": _zero,
  "shift": _shift,
  "noise": _noise,
  "no text": _no_text,
  "swap": _swap,
  "copy over": _copy_over,
  "delete": _delete,
  "delete folder": _delete_folder,
  "foreign": _foreign,
  "folder": _folder,
  "fifo": _fifo,
  "link": _link,
  "file for folder": _file_for_folder,
}
