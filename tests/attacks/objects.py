"""Objects on a store are replaced, damaged and removed, each as a whole, under a running stream."""

from __future__ import annotations

import contextlib
import os
import pathlib

from attacks.attack import Attempt, Chance
from attacks.damage import contents, remove, restore
from attacks.replacements import KINDS, Replacement, put
from attacks.targets import TARGETS
from store_servers import servers

# What a store cannot do: objects are not written in place.
_IN_PLACE = ("written over", "one written over", "tail written over", "truncated")
# The server runs as long as this process.
_servers = contextlib.ExitStack()


def prepare(folder: pathlib.Path) -> Attempt:
  """Makes the files, which a server serves as buckets, and others like them; returns the attempt."""
  buckets = folder / "buckets"
  targets = [make(buckets / f"bucket{k}", 0) for k, make in enumerate(TARGETS.values())]
  others = [make(folder / f"{name} others", 1000).root for name, make in TARGETS.items()]
  written = [contents(target.root) for target in targets]
  endpoint = _servers.enter_context(servers.range_server(buckets))
  # A try may take little memory beyond what there is, and threads' stacks count.
  os.environ.update(servers.s3_environment(endpoint), ANYSTEP_STORE_REQUESTS="4")

  def attempt(chance: Chance) -> None:
    which = chance.randrange(len(targets))
    target, root, other = targets[which], targets[which].root, others[which]
    when, kind = chance.randrange(len(target.truth)), chance.choice(list(CHANGES))
    chance.note(f"{list(TARGETS)[which]}, when {when} values were read: {kind}")
    try:
      values = target.read(f"s3://{root.name}")
      target.check(values, stop=when)
      CHANGES[kind](root, other, chance)
      target.check(values, start=when)
    finally:
      remove(root.with_name("aside"))
      root.mkdir(exist_ok=True)
      restore(root, written[which])

  return attempt


def _damaged(root: pathlib.Path, other: pathlib.Path, chance: Chance) -> None:
  """One object has another content, of the same length or of another."""
  path = chance.choice(sorted(path for path in root.rglob("*") if path.is_file()))
  content = bytearray(path.read_bytes())
  if not content or chance.random() < 0.3:
    put(path, bytes(content[: chance.randrange(len(content) + 1)]))
    return
  content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
  put(path, bytes(content))


def _one_gone(root: pathlib.Path, other: pathlib.Path, chance: Chance) -> None:
  chance.choice(sorted(path for path in root.rglob("*") if path.is_file())).unlink()


CHANGES: dict[str, Replacement] = {
  **{name: change for name, change in KINDS.items() if name not in _IN_PLACE},
  "damaged": _damaged,
  "one gone": _one_gone,
}
