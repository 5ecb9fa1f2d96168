"""What came of the tries of attacks, counted."""

from __future__ import annotations

import collections
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from typing import Any

from attacks.attack import ATTACKS, BROKEN, HUNG, OUTCOMES, RAW, TESTS


class Tally:
  """Counts of outcomes and of kinds of errors; each distinct failure with the first try that met it."""

  def __init__(self, name: str):
    self.name = name
    self.outcomes: collections.Counter[str] = collections.Counter()
    self.kinds: collections.Counter[str] = collections.Counter()
    self.failures: dict[tuple[str, str], list[str]] = {}

  def count(self, number: int, notes: list[str], *, outcome: str, kind="", error="", where="") -> None:
    """Takes up a try."""
    self.outcomes[outcome] += 1
    if kind:
      self.kinds[kind] += 1
    if outcome in OUTCOMES[2:]:
      text = f"{outcome}: try {number}, {'; '.join(notes)}: {error} ({where})"
      self.failures.setdefault((outcome, where + error.partition(":")[0]), []).append(text)

  def __str__(self) -> str:
    counts = ", ".join(f"{name} {self.outcomes[name]:,}" for name in OUTCOMES)
    kinds = ", ".join(f"{kind} {count:,}" for kind, count in self.kinds.most_common(12))
    return f"{self.name}: tried {self.outcomes.total():,}, {counts} ({kinds})"

  def assert_clean(self, least: tuple[str, ...], *, never: tuple[str, ...] = ()) -> None:
    """None was wrong, raw or hung, nor what it may never be, and the attack struck."""
    repeat = f"repeat one in tests/: PYTHONPATH=.. python -m attacks.attack {self.name!r} TRY TRY+1"
    shown = [f"{len(texts):,} times such as {texts[0]}" for texts in self.failures.values()]
    assert not self.failures, "\n".join([str(self), *sorted(shown), repeat])
    for outcome in never:
      assert not self.outcomes[outcome], f"{self}: {outcome}"
    for outcome in least:
      assert 20 * self.outcomes[outcome] >= self.outcomes.total(), f"{self}: too few {outcome}"


class Attacker:
  """The process that runs tries; another one where one crashed or hung."""

  def __init__(self):
    self._process: subprocess.Popen[str] | None = None
    self._lines: queue.Queue[str] = queue.Queue()
    self._is_new = True
    self._stderr = tempfile.TemporaryFile("w+")  # noqa: SIM115

  def run(self, name: str, tries: int) -> Tally:
    """Runs tries 0, 1, 2, … of an attack."""
    attack, tally, number = (ATTACKS | BROKEN)[name], Tally(name), 0
    while number < tries:
      self._ask(f"{name} {number} {tries}\n")
      notes: list[str] = []
      while number < tries:
        # The first try of a process waits for what it is tried on to be made.
        line = self._next_line((300 if self._is_new else 0) + 3 * attack.limit_seconds + 2)
        self._is_new = False
        found: dict[str, Any] = json.loads(line) if line else self._died()
        if "note" in found:
          notes.append(found["note"])
          continue
        found.pop("try", None)
        tally.count(number, notes, **found)
        notes, number = [], number + 1
        if not line:
          break
    return tally

  def close(self) -> None:
    """Ends the process."""
    if self._process is not None:
      self._process.kill()
      self._process.wait()
      self._process = None

  def _ask(self, request: str) -> None:
    if self._process is None:
      path = os.pathsep.join([str(TESTS), str(TESTS.parent)])
      self._process = subprocess.Popen(
        [sys.executable, "-m", "attacks.attack"],
        cwd=TESTS,
        env={**os.environ, "PYTHONPATH": path},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=self._stderr,
        text=True,
      )
      self._is_new = True
      self._lines = queue.Queue()
      threading.Thread(target=_pass_on, args=(self._process.stdout, self._lines), daemon=True).start()
    assert self._process.stdin is not None
    self._process.stdin.write(request)
    self._process.stdin.flush()

  def _next_line(self, seconds: float) -> str:
    try:
      return self._lines.get(timeout=seconds)
    except queue.Empty:
      return ""

  def _died(self) -> dict[str, Any]:
    assert self._process is not None
    try:
      status = self._process.wait(1)
    except subprocess.TimeoutExpired:
      status = None
    self.close()
    self._stderr.seek(0)
    said = " ".join(self._stderr.read().split())[-500:]
    self._stderr.seek(0)
    self._stderr.truncate()
    if status is None:
      return {"outcome": HUNG, "error": f"the process did not answer: {said}"}
    return {"outcome": RAW, "error": f"the process ended with {status}: {said}"}


def _pass_on(lines: Any, to: queue.Queue[str]) -> None:
  for line in lines:
    to.put(line)
  to.put("")
