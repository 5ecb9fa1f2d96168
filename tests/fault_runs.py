"""The cache job, run in processes of its own in which the k-th file operation is the last, or fails.

Importing what the job needs takes many seconds. So a program that has imported it, and has run none of it,
forks a process for each run.
"""

from __future__ import annotations

import builtins
import contextlib
import dataclasses
import io
import os
import pathlib
import pickle
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Client, Listener
from typing import Any

TESTS = pathlib.Path(__file__).resolve().parent
BEFORE, MIDWAY, AFTER = "before", "midway", "after"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fault:
  """What happens at a file operation below the cache's root.

  Attributes:
    at: the operation's number, from 0.
    when: before it, after it, or midway in it, where half of what is written has been.
    errno: of the error that it raises in place of being done; None to be killed.
    lasting: whether all operations that need room fail from then on, as on a full disk.
  """

  at: int
  when: str = BEFORE
  errno: int | None = None
  lasting: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
  """A run of the program.

  Attributes:
    root: the caches'.
    flags: of the program.
    log: the file that gets the names of preprocessed examples.
    fault: what disturbs it.
    file_bytes: no file may grow larger, as `ulimit -f` says it.
    copies: a folder that gets a copy of the caches as they are before each operation, under its number: what
      would be found had the program been killed there. What it had not yet written is not in them either.
  """

  root: pathlib.Path
  flags: Sequence[str]
  log: pathlib.Path
  fault: Fault | None = None
  file_bytes: int | None = None
  copies: pathlib.Path | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ended:
  """How a run ended.

  Attributes:
    status: as `Popen.returncode` has it.
    operations: kinds and paths, in order, of the run's file operations; none of one that was killed.
    stderr: what it said.
  """

  status: int
  operations: Sequence[tuple[str, str]]
  stderr: str


class Zygote:
  """Runs the job in processes that begin where all imports are done; for several threads."""

  def __init__(self, address: str):
    self._address = address

  def run(self, run: Run) -> Ended:
    """Runs it to its end."""
    (ended,) = self.run_all([run])
    return ended

  def run_all(self, runs: Sequence[Run]) -> list[Ended]:
    """Runs one after the other in one process, none of which may have a fault that kills."""
    with Client(self._address) as connection:
      connection.send(list(runs))
      return connection.recv()


@contextlib.contextmanager
def zygote() -> Iterator[Zygote]:
  """Starts the program that forks."""
  with tempfile.TemporaryDirectory(prefix="anystep-faults-") as folder:
    address = os.path.join(folder, "socket")
    environment = {**os.environ, "PYTHONPATH": str(TESTS)}
    program = [sys.executable, "-c", "import fault_runs, sys; fault_runs.serve(sys.argv[1])", address]
    with subprocess.Popen(program, cwd=TESTS, env=environment, stdout=subprocess.PIPE) as process:
      try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        yield Zygote(address)
      finally:
        process.kill()


def serve(address: str) -> None:
  """Imports all that the job does, and from then on runs what comes; never returns."""
  import anystep.cache_job.index_only
  import anystep.cache_job.job
  import anystep.cache_job.task_work  # noqa: F401

  signal.signal(signal.SIGCHLD, signal.SIG_IGN)
  with Listener(address) as listener:
    print("ready", flush=True)
    while True:
      with listener.accept() as connection:
        if os.fork() == 0:
          signal.signal(signal.SIGCHLD, signal.SIG_DFL)
          connection.send(_run_in_child(connection.recv()))
          os._exit(0)


def _run_in_child(runs: Sequence[Run]) -> list[Ended]:
  """Forks once more: somebody has to see how the runs ended."""
  with tempfile.TemporaryDirectory() as folder:
    files = [pathlib.Path(folder, f"{place}.stderr") for place in range(len(runs))]
    results = pathlib.Path(folder, "results")
    pid = os.fork()
    if pid == 0:
      results.write_bytes(pickle.dumps([_run(run, file) for run, file in zip(runs, files, strict=True)]))
      os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    ended = pickle.loads(results.read_bytes()) if status == 0 else [(status, [])] * len(runs)
    return [
      Ended(status=status, operations=operations, stderr=file.read_text() if file.exists() else "")
      for (status, operations), file in zip(ended, files, strict=True)
    ]


def _run(run: Run, stderr: pathlib.Path) -> tuple[int, list[tuple[str, str]]]:
  """Runs the program in this process; returns its status and its file operations."""
  from anystep.cache_job import main

  seam = Seam(str(run.root), run.fault, run.copies)
  sys.argv = ["anystep-cache", f"--output_cache_dir={run.root}", *run.flags]
  os.environ["SMALL_TASKS_LOG"] = str(run.log)
  sys.stderr.flush()
  for descriptor in (1, 2):
    with open(stderr if descriptor == 2 else os.devnull, "wb") as file:
      os.dup2(file.fileno(), descriptor)
  if run.file_bytes is not None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (run.file_bytes, resource.RLIM_INFINITY))
  status = 0
  try:
    with seam.installed():
      main.run()
  except SystemExit as error:
    status = int(error.code or 0)
  finally:
    sys.stdout.flush()
    sys.stderr.flush()
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
  return status, seam.operations


class Seam:
  """Sees every operation that changes files below a root, of Python's and of ArrayRecord's writer."""

  def __init__(self, root: str, fault: Fault | None = None, copies: pathlib.Path | None = None):
    self._root = root
    self._fault = fault
    self._copies = copies
    self.operations: list[tuple[str, str]] = []

  @contextlib.contextmanager
  def installed(self) -> Iterator[None]:
    """Puts itself in the place of the functions that change files."""
    from array_record.python import array_record_module

    places: list[tuple[Any, str, Any]] = [
      (os, "replace", self._wrapped("replace", os.replace)),
      (os, "rename", self._wrapped("replace", os.rename)),
      (os, "unlink", self._wrapped("unlink", os.unlink)),
      (os, "remove", self._wrapped("unlink", os.remove)),
      (os, "rmdir", self._wrapped("rmdir", os.rmdir)),
      (os, "mkdir", self._wrapped("mkdir", os.mkdir)),
      (os, "fsync", self._wrapped("fsync", os.fsync)),
      (os, "pwrite", self._wrapped("write", os.pwrite)),
      (os, "ftruncate", self._wrapped("truncate", os.ftruncate)),
      (builtins, "open", self._opened(builtins.open)),
      (io, "open", self._opened(io.open)),
      (array_record_module, "ArrayRecordWriter", self._writer(array_record_module.ArrayRecordWriter)),
    ]
    before = [(module, name, getattr(module, name)) for module, name, _ in places]
    for module, name, function in places:
      setattr(module, name, function)
    try:
      yield
    finally:
      for module, name, function in before:
        setattr(module, name, function)

  def perform(
    self, kind: str, path: str, do: Callable[[], Any], half: Callable[[], Any] | None = None
  ) -> Any:
    """Does an operation, or what the fault makes of it."""
    # Whether a worker says how far it is depends on the clock; and a folder that is there is not made.
    if not self._is_below(path) or path.endswith(".progress") or (kind == "mkdir" and os.path.isdir(path)):
      return do()
    number = len(self.operations)
    if self._copies is not None and os.path.exists(self._root):
      # A process of its own, for this one's functions are those that are wrapped.
      subprocess.run(["cp", "-a", self._root, self._copies / str(number)], check=True)
    self.operations.append((kind, path[len(self._root) + 1 :]))
    fault = self._fault
    if fault is None or number < fault.at:
      return do()
    if number > fault.at:
      needs_room = kind in ("write", "create", "mkdir", "fsync")
      if fault.lasting and needs_room:
        self._strike(path)
      return do()
    if fault.when == MIDWAY and half is not None:
      half()
    if fault.when == AFTER:
      # An operation may fail, as removing what is not there.
      with contextlib.suppress(OSError):
        do()
    self._strike(path)

  def _is_below(self, path: str) -> bool:
    return path == self._root or path.startswith(f"{self._root}/")

  def _strike(self, path: str) -> None:
    assert self._fault is not None
    if self._fault.errno is None:
      os.kill(os.getpid(), signal.SIGKILL)
      time.sleep(60)
    raise OSError(self._fault.errno, os.strerror(self._fault.errno or 0), path)

  def _wrapped(self, kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(path: Any, *args: Any, **kwargs: Any) -> Any:
      return self.perform(kind, _path_of(path, kwargs.get("dir_fd")), lambda: function(path, *args, **kwargs))

    return wrapped

  def _opened(self, function: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(path: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
      if not set(mode) & set("wxa+"):
        return function(path, mode, *args, **kwargs)
      where = _path_of(path, None)
      file = self.perform("create", where, lambda: function(path, mode, *args, **kwargs))
      return _SeenFile(self, where, file) if self._is_below(where) else file

    return wrapped

  def _writer(self, writer_class: Any) -> Callable[..., Any]:
    def wrapped(path: str, options: str) -> Any:
      writer = self.perform("create", path, lambda: writer_class(path, options))
      return _SeenFile(self, path, writer)

    return wrapped


class _SeenFile:
  """A file, or an ArrayRecord writer, each of whose writes reaches the disk at once."""

  def __init__(self, seam: Seam, path: str, file: Any):
    self._seam = seam
    self._path = path
    self._file = file

  def write(self, content: Any) -> Any:
    return self._seam.perform(
      "write",
      self._path,
      lambda: self._write(content),
      lambda: self._write(bytes(content)[: len(bytes(content)) // 2]),
    )

  def _write(self, content: Any) -> Any:
    written = self._file.write(content)
    if hasattr(self._file, "flush"):
      self._file.flush()
    return written

  def __getattr__(self, name: str) -> Any:
    return getattr(self._file, name)

  def __enter__(self) -> _SeenFile:
    return self

  def __exit__(self, *exc_info: object) -> None:
    self._file.close()


def _path_of(path: Any, directory: int | None) -> str:
  if isinstance(path, int):
    return os.readlink(f"/proc/self/fd/{path}")
  path = os.fspath(path)
  return path if directory is None else os.path.join(os.readlink(f"/proc/self/fd/{directory}"), path)
