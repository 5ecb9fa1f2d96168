"""Attacks: what is tried again and again, and what came of each try.

Tries run in a process of their own, for one may crash it or never end. Each draws from a generator of its
own, and can be repeated alone: in tests/, `PYTHONPATH=.. python -m attacks.attack NAME FIRST STOP` runs tries
[FIRST, STOP).
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import os
import pathlib
import random
import resource
import shutil
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any

REFUSED, HARMLESS, WRONG, RAW, HUNG = OUTCOMES = ["refused", "harmless", "wrong", "raw", "hung"]
TESTS = pathlib.Path(__file__).resolve().parents[1]
# What a try may take beyond what the process has: a limit makes an error of what would fill the machine.
_MEMORY_BYTES = 2 << 30


class Wrong(Exception):
  """Other data or state than the truth, and no error."""


class Hung(BaseException):
  """A try that did not end in time; nothing in the product catches it."""


class Chance(random.Random):
  """A try's random numbers, and what they made of it, for people."""

  def __init__(self, attack: str, number: int):
    super().__init__(f"{attack} {number}")
    self.number = number

  def note(self, text: str) -> None:
    """Says what is done, before it is done: a crash is told by it."""
    print(json.dumps({"note": text[:300]}), file=sys.__stdout__, flush=True)


Attempt = Callable[[Chance], str | None]
"""A try, which raises what it is refused with, or `Wrong` for other data; it may return another outcome."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Attack:
  """An attack.

  Attributes:
    module: in this folder; its `prepare(folder)` returns the attempt.
    tries: how many the soak has. sample: how many run always.
    least: outcomes that one of twenty tries must have: an attack that never strikes proves nothing.
    never: outcomes that no try may have, beside what is wrong, raw or hung: of what has to go on, not to be
      refused.
    limit_seconds: how long a try may take.
    slow: whether what it is tried on takes long to be made.
  """

  module: str
  tries: int
  sample: int
  least: tuple[str, ...] = (REFUSED,)
  never: tuple[str, ...] = ()
  limit_seconds: float = 10
  slow: bool = False


# By name. A new part joins the attacks on files by a row in `targets.TARGETS`.
ATTACKS = {
  "damage": Attack(module="damage", tries=10_000, sample=150, least=(REFUSED, HARMLESS)),
  "replacements": Attack(module="replacements", tries=10_000, sample=150, least=(REFUSED, HARMLESS)),
  "objects": Attack(module="objects", tries=300, sample=60, least=(REFUSED, HARMLESS), limit_seconds=30),
  "signed manifests": Attack(module="manifests", tries=10_000, sample=150),
  "plans": Attack(module="plans", tries=10_000, sample=150),
  "interrupts": Attack(module="interrupts", tries=10_000, sample=300, least=(HARMLESS,), never=(REFUSED,)),
  "threads": Attack(module="threads", tries=10_000, sample=100, least=(HARMLESS,)),
  # Of what is read there nothing needs a library that survives no fork.
  "forks": Attack(
    module="forks", tries=1_000, sample=40, least=(HARMLESS,), never=(REFUSED,), limit_seconds=60
  ),
  "checkpoints": Attack(module="checkpoints", tries=300, sample=12, limit_seconds=60, slow=True),
  "programs": Attack(module="programs", tries=300, sample=4, limit_seconds=20),
  "Grain's workers": Attack(
    module="grain_workers",
    tries=20,
    sample=1,
    least=(HARMLESS,),
    never=(REFUSED,),
    limit_seconds=120,
    slow=True,
  ),
}
# What the counting itself is tested with.
BROKEN = {"broken": Attack(module="broken", tries=12, sample=12, least=(), limit_seconds=1)}


def main(argv: list[str]) -> None:
  """Runs tries of attacks as lines of stdin, or the command line, name them."""
  known = ATTACKS | BROKEN
  with tempfile.TemporaryDirectory(prefix="anystep-attacks-") as folder:
    home = pathlib.Path(folder, "home")
    os.environ["XDG_CACHE_HOME"] = str(home)
    prepared: dict[str, Attempt] = {}
    for line in [" ".join(argv)] if argv else iter(sys.stdin.readline, ""):
      name, first, stop = line.rsplit(" ", 2)
      if name not in prepared:
        own = pathlib.Path(folder, str(len(prepared)))
        own.mkdir()
        module = importlib.import_module(f"attacks.{known[name].module}")
        shutil.rmtree(home, ignore_errors=True)
        prepared[name] = module.prepare(own)
      for number in range(int(first), int(stop)):
        # A unit table that one try made there would be taken by the next.
        shutil.rmtree(home, ignore_errors=True)
        found = _try(prepared[name], Chance(name, number), known[name].limit_seconds)
        print(json.dumps({"try": number, **found}), flush=True)


def _try(attempt: Attempt, chance: Chance, limit_seconds: float) -> dict[str, Any]:
  from anystep.errors import AnystepError

  try:
    with limits(limit_seconds):
      return {"outcome": attempt(chance) or HARMLESS}
  except AnystepError as error:
    lines = str(error).splitlines()
    told = len(lines) == 1 and lines[0].startswith(f"ERROR code={int(error.code)} kind={error.kind}")
    if told and error.fix:
      return {"outcome": REFUSED, "kind": error.kind}
    return {"outcome": RAW, **_where(error)}
  except Wrong as error:
    return {"outcome": WRONG, **_where(error)}
  except Hung as error:
    return {"outcome": HUNG, **_where(error)}
  except BaseException as error:
    return {"outcome": RAW, **_where(error)}


def _where(error: BaseException) -> dict[str, str]:
  """What was raised, and the innermost line of the product that it came through."""
  frames = traceback.extract_tb(error.__traceback__)
  own = [
    frame for frame in frames if str(TESTS.parent) in frame.filename and str(TESTS) not in frame.filename
  ]
  where = f"{pathlib.Path(own[-1].filename).name}:{own[-1].lineno}" if own else ""
  through = " > ".join(f"{pathlib.Path(frame.filename).name}:{frame.lineno}" for frame in frames[-4:])
  return {"error": f"{type(error).__name__}: {error}"[:300] + f" through {through}", "where": where}


@contextlib.contextmanager
def limits(seconds: float) -> Iterator[None]:
  """Ends the body by `Hung` after some seconds, and by a MemoryError where it takes much memory."""
  with contextlib.ExitStack() as stack:
    if threading.current_thread() is threading.main_thread():
      before = signal.signal(signal.SIGALRM, _hang)
      stack.callback(signal.signal, signal.SIGALRM, before)
      stack.callback(signal.setitimer, signal.ITIMER_REAL, 0)
      signal.setitimer(signal.ITIMER_REAL, seconds, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(pathlib.Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + _MEMORY_BYTES, hard))
    stack.callback(resource.setrlimit, resource.RLIMIT_AS, (soft, hard))
    yield


def _hang(*_: object) -> None:
  raise Hung("it did not end in time")


if __name__ == "__main__":
  # The module by its name, whose classes are those that attempts raise.
  importlib.import_module("attacks.attack").main(sys.argv[1:])
