"""`anystep-data` as a program of its own, with arguments and files as nobody gives them who means well."""

from __future__ import annotations

import json
import os
import pathlib
import re
import subprocess
import sys

import caches
from attacks.attack import HARMLESS, REFUSED, Attempt, Chance
from attacks.mutations import DEEP, mutated

from anystep.plans.plan import Plan
from anystep.plans.tombstones import TombstoneList

_ERROR = re.compile(r"ERROR code=(\d+) kind=\w+ ")
_NUMBERS = [
  "0",
  "-1",
  "1e5000",
  "1e99999999",
  "10",
  str(10**12),
  str(2**63),
  str(10**30),
  "nan",
  "x",
  "",
  "1.5",
]


def prepare(folder: pathlib.Path) -> Attempt:
  """Makes a cache, a plan and a list; returns the attempt."""
  built = caches.build(folder / "cache")
  plan = Plan.start(built.open(), batch_size=6, num_epochs=3)
  listed = TombstoneList.of(built.open(), [1, 4])
  hostile, output = folder / "hostile", folder / "output.json"
  cache = ["--cache_dir", str(built.root), "--task", "demo"]
  made = [*cache, "--output", str(output), "--overwrite"]

  def attempt(chance: Chance) -> str:
    number, steps = chance.choice(_NUMBERS), f"{chance.choice(_NUMBERS)}:{chance.choice(_NUMBERS)}"
    lengths = chance.choice(
      ["[" * DEEP, '{"inputs": ' + chance.choice(_NUMBERS) + "}", "{}", "null", '{"a": [1]}']
    )
    command = chance.choice(
      [
        ["plan", "start", *made, f"--batch_size={number}"],
        ["plan", "start", *made, "--batch_size=6", f"--rates=demo={number}"],
        ["plan", "start", *made, "--batch_size=6", f"--seed={number}"],
        ["plan", "start", *made, "--batch_size=6", f"--lanes={number}"],
        ["plan", "start", *made, "--batch_size=6", f"--num_epochs={number}"],
        ["plan", "start", *made, "--batch_size=6", f"--feature_lengths={lengths}", "--packing=greedy"],
        ["what-was-at", *cache, "--batch_size=6", f"--steps={steps}"],
        ["when-was", *cache, "--batch_size=6", f"--index={number}"],
        ["plan", "show", "--plan", str(hostile)],
        ["plan", "batch", "--plan", str(hostile), "--step=0"],
        ["plan", "diff", str(hostile), str(hostile)],
        ["what-was-at", "--plan", str(hostile), "--cache_dir", str(built.root), "--steps=0:2"],
        ["when-was", *cache, "--batch_size=6", "--tombstones", str(hostile)],
        ["verify", "--cache_dir", str(hostile)],
        ["what-was-at", "--model_dir", str(hostile), "--steps=0:2"],
        ["plan", "start", "--cache_dir", str(built.root), f"--rates={hostile}.json", *made[-3:]],
      ]
    )
    chance.note(" ".join(command)[:250])
    for path in (hostile, hostile.with_name("hostile.json")):
      _make(path, plan, listed, chance)
    done = subprocess.run(
      [sys.executable, "-c", "from anystep.tasks.data_program.main import run; run()", *command],
      capture_output=True,
      text=True,
      errors="replace",
      stdin=subprocess.DEVNULL,
    )
    lines = done.stderr.splitlines()
    if done.returncode in (0, 1) and "Traceback" not in done.stderr:
      # 1 says that two plans differ.
      return HARMLESS
    found = _ERROR.match(lines[-1]) if lines else None
    if found is None or int(found[1]) != done.returncode or sum(map(bool, map(_ERROR.match, lines))) != 1:
      raise RuntimeError(f"it ended with {done.returncode}: {' '.join(done.stderr.split())[-250:]}")
    return REFUSED

  return attempt


def _make(path: pathlib.Path, plan: Plan, listed: TombstoneList, chance: Chance) -> None:
  """A file, or something else, at a path."""
  path.unlink(missing_ok=True) if not path.is_dir() or path.is_symlink() else path.rmdir()
  kind = chance.choice(
    ["plan", "plan", "list", "fifo", "/dev/zero", "/dev/full", "folder", "nowhere", "itself", "none"]
  )
  chance.note(f"{path.name}: {kind}")
  if kind in ("plan", "list"):
    document = json.loads((plan if kind == "plan" else listed).to_json())
    path.write_bytes(mutated(document, chance))
  elif kind == "fifo":
    os.mkfifo(path)
  elif kind == "folder":
    path.mkdir()
  elif kind != "none":
    path.symlink_to(path if kind == "itself" else kind)
