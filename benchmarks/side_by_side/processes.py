"""Commands run as a user runs them, and what they took: time, memory, bytes written."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import subprocess
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence

_SAMPLE_SECONDS = 0.05
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
  """A command that ended.

  Attributes:
    status: its exit status.
    wall_seconds: from its start to its end.
    cpu_seconds: of all its threads and of the processes that it waited for, the system's share included.
    peak_bytes: the most that the resident sets of it and its descendants came to at once, looked at every
      50 ms; pages that they share count for each.
    written_bytes: what it and the processes that it waited for handed to `write` and its like, to files and
      to pipes.
    lines: of stdout and stderr, each with the seconds from the start to its coming.
  """

  status: int
  wall_seconds: float
  cpu_seconds: float
  peak_bytes: int
  written_bytes: int
  lines: Sequence[tuple[float, str]]


def run(
  command: Sequence[str], *, environment: Mapping[str, str], cpus: Collection[int] | None = None
) -> Run:
  """Runs a command to its end.

  Args:
    command: the program and its arguments.
    environment: variables set for it beside this process's own.
    cpus: the only cores that it may use; all of this process's by default.
  """
  pinned = ["taskset", "--cpu-list", ",".join(map(str, cpus))] if cpus is not None else []
  lines = []
  start = time.perf_counter()
  process = subprocess.Popen(
    [*pinned, *command],
    env={**os.environ, **environment},
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
    errors="replace",
  )
  assert process.stdout is not None
  with _peak_of(process.pid) as peak:
    for line in process.stdout:
      lines.append((time.perf_counter() - start, line.rstrip("\n")))
    # It stays a zombie, whose counts can be read, until wait4.
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    wall_seconds = time.perf_counter() - start
  written_bytes = _written_bytes(process.pid)
  _, status, usage = os.wait4(process.pid, 0)
  process.returncode = os.waitstatus_to_exitcode(status)
  process.stdout.close()
  return Run(
    status=process.returncode,
    wall_seconds=wall_seconds,
    cpu_seconds=usage.ru_utime + usage.ru_stime,
    peak_bytes=peak[0],
    written_bytes=written_bytes,
    lines=lines,
  )


def bytes_below(directory: pathlib.Path) -> int:
  """The sum of the sizes of all files below a directory."""
  return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


@contextlib.contextmanager
def _peak_of(pid: int) -> Iterator[list[int]]:
  """A list whose one element grows to the most memory that a process and its descendants had."""
  peak, ended = [0], threading.Event()

  def sample() -> None:
    while not ended.wait(_SAMPLE_SECONDS):
      peak[0] = max(peak[0], _resident_bytes(pid))

  thread = threading.Thread(target=sample, name="memory", daemon=True)
  thread.start()
  try:
    yield peak
  finally:
    ended.set()
    thread.join()


def _resident_bytes(pid: int) -> int:
  """The resident sets of a process and its descendants; 0 of those that have ended meanwhile."""
  process = pathlib.Path("/proc") / str(pid)
  try:
    resident = int((process / "statm").read_text().split()[1]) * _PAGE_BYTES
    children = " ".join((thread / "children").read_text() for thread in (process / "task").iterdir())
  except (FileNotFoundError, ProcessLookupError):
    return 0
  return resident + sum(map(_resident_bytes, map(int, children.split())))


def _written_bytes(pid: int) -> int:
  counts = dict(line.split(": ") for line in pathlib.Path(f"/proc/{pid}/io").read_text().splitlines())
  return int(counts["wchar"])
