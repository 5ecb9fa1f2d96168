"""Programs run in processes of their own in which a file operation is the last, fails, or is held.

Importing what a program needs takes many seconds. So a program that has imported it, and has run none of it,
forks a process for each run. What the programs are stands in `fault_cases`.
"""

from __future__ import annotations

import builtins
import contextlib
import dataclasses
import importlib
import io
import os
import pathlib
import pickle
import re
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Client, Listener
from typing import Any

TESTS = pathlib.Path(__file__).resolve().parent
BEFORE, MIDWAY, AFTER = "before", "midway", "after"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fault:
  """What happens at a file operation below the root.

  Attributes:
    at: the operation's number, from 0; or, where one run's numbers are not another's, which it is of those
      whose kind and path match.
    kind: matches the operation's kind, `path` its path below the root; regular expressions.
    when: before it, after it, or midway in it, where half of what is written has been.
    errno: of the error that it raises in place of being done; None to send a signal.
    signal_number: of the signal that the process sends itself.
    after_seconds: how long after the operation the signal comes, as out of Python's sight.
    lasting: whether all operations that need room fail from then on, as on a full disk.
    hold: a file that is made instead; the operation is done once somebody has removed it.
  """

  at: int = 0
  kind: str = ""
  path: str = ""
  when: str = BEFORE
  errno: int | None = None
  signal_number: int = signal.SIGKILL
  after_seconds: float = 0
  lasting: bool = False
  hold: pathlib.Path | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
  """A run of a program.

  Attributes:
    program: the module whose `run` it is.
    arguments: of its command line.
    root: the folder below which its operations are seen.
    environment: what it finds there besides what everyone does.
    fault: what disturbs it.
    file_bytes: no file may grow larger, as `ulimit -f` says it.
    copies: a folder that gets a copy of the root as it is before each operation, under its number: what
      would be found had the program been killed there. What it had not yet written is not in them either.
  """

  program: str
  arguments: Sequence[str]
  root: pathlib.Path
  environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
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
    struck: kind and path of the operation at which its fault struck; None where it never did.
  """

  status: int
  operations: Sequence[tuple[str, str]]
  stderr: str
  struck: tuple[str, str] | None


class Zygote:
  """Runs programs in processes that begin where all imports are done; for several threads."""

  def __init__(self, address: str, process: subprocess.Popen[bytes]):
    self._address = address
    self._process = process

  def run(self, run: Run) -> Ended:
    """Runs it to its end."""
    (ended,) = self.run_all([run])
    return ended

  def run_all(self, runs: Sequence[Run]) -> list[Ended]:
    """Runs one after the other in one process, none of which may have a fault that kills."""
    assert self._process.poll() is None, f"the program that forks ended with {self._process.returncode}"
    with Client(self._address) as connection:
      connection.send(list(runs))
      return connection.recv()


@contextlib.contextmanager
def zygote(*modules: str) -> Iterator[Zygote]:
  """Starts the program that imports these modules and forks."""
  with tempfile.TemporaryDirectory(prefix="anystep-faults-") as folder:
    address = os.path.join(folder, "socket")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)])}
    code = "import fault_runs, sys; fault_runs.serve(*sys.argv[1:])"
    program = [sys.executable, "-c", code, address, *modules]
    with subprocess.Popen(program, cwd=TESTS, env=environment, stdout=subprocess.PIPE) as process:
      try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        yield Zygote(address, process)
      finally:
        process.kill()


def serve(address: str, *modules: str) -> None:
  """Imports the modules, and from then on runs what comes; never returns."""
  for module in modules:
    importlib.import_module(module)
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
    own = [pathlib.Path(folder, str(place)) for place in range(len(runs))]
    results = pathlib.Path(folder, "results")
    pid = os.fork()
    if pid == 0:
      ended = [_run(run, stem) for run, stem in zip(runs, own, strict=True)]
      results.write_bytes(pickle.dumps(ended))
      os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    ended = pickle.loads(results.read_bytes()) if status == 0 else [(status, [])] * len(runs)
    return [
      Ended(status=status, operations=operations, stderr=_text(stem, "stderr"), struck=_struck(stem))
      for (status, operations), stem in zip(ended, own, strict=True)
    ]


def _text(stem: pathlib.Path, suffix: str) -> str:
  path = stem.with_suffix(f".{suffix}")
  return path.read_text(errors="replace") if path.exists() else ""


def _struck(stem: pathlib.Path) -> tuple[str, str] | None:
  kind, _, path = _text(stem, "struck").partition(" ")
  return (kind, path) if kind else None


def _run(run: Run, stem: pathlib.Path) -> tuple[int, list[tuple[str, str]]]:
  """Runs the program in this process; returns its status and its file operations."""
  program = importlib.import_module(run.program)
  seam = Seam(str(run.root), run.fault, run.copies, struck=stem.with_suffix(".struck"))
  sys.argv = [run.program, *run.arguments]
  os.environ.update(run.environment)
  sys.stderr.flush()
  for descriptor in (1, 2):
    with open(stem.with_suffix(".stderr") if descriptor == 2 else os.devnull, "wb") as file:
      os.dup2(file.fileno(), descriptor)
  if run.file_bytes is not None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (run.file_bytes, resource.RLIM_INFINITY))
  status = 0
  try:
    with seam.installed():
      program.run()
  except SystemExit as error:
    status = int(error.code or 0)
  except BaseException:
    # As Python itself would end with it.
    status = 1
    traceback.print_exc()
  finally:
    sys.stdout.flush()
    sys.stderr.flush()
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
  return status, seam.operations


class Seam:
  """Sees every operation that changes files below a root, of Python's and of ArrayRecord's writer.

  Of a root on a store it sees what changes objects there.
  """

  def __init__(
    self,
    root: str,
    fault: Fault | None = None,
    copies: pathlib.Path | None = None,
    *,
    struck: pathlib.Path | None = None,
  ):
    self._root = root
    self._fault = fault
    self._copies = copies
    # The file that says at which operation the fault has struck.
    self._struck = struck
    self._matching = 0
    self._is_over = False
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
    if "://" in self._root:
      places = self._store_places()
    before = [(module, name, getattr(module, name)) for module, name, _ in places]
    for module, name, function in places:
      setattr(module, name, function)
    try:
      yield
    finally:
      for module, name, function in before:
        setattr(module, name, function)

  def _store_places(self) -> list[tuple[Any, str, Any]]:
    """The functions that change objects; when locks are refreshed depends on the clock."""
    from anystep.stores import objects
    from anystep.stores.object_files import ObjectWriter

    def seen(kind: str, function: Callable[..., Any], find_path: Callable[[Any], Any]) -> Callable[..., Any]:
      def wrapped(first: Any, *args: Any) -> Any:
        return self.perform(kind, str(find_path(first)), lambda: function(first, *args))

      return wrapped

    def delete(addresses: Any) -> None:
      # One after the other, so that a kill leaves some.
      for address in addresses:
        self.perform("delete", str(address), lambda address=address: objects_delete([address]))

    objects_delete = objects.delete
    return [
      *(
        (objects, name, seen(name, getattr(objects, name), str)) for name in ("put", "put_if_absent", "copy")
      ),
      (objects, "delete", delete),
      (ObjectWriter, "write", seen("write", ObjectWriter.write, lambda writer: writer._address)),
      (ObjectWriter, "close", seen("finish", ObjectWriter.close, lambda writer: writer._address)),
    ]

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
    name = path[len(self._root) + 1 :]
    self.operations.append((kind, name))
    fault = self._fault
    if fault is None:
      return do()
    if self._is_over:
      if fault.lasting and kind in ("write", "create", "mkdir", "fsync"):
        self._raise(path)
      return do()
    if not (re.search(fault.kind, kind) and re.search(fault.path, name)):
      return do()
    self._matching += 1
    if self._matching <= fault.at:
      return do()
    self._is_over = True
    if self._struck is not None:
      self._struck.write_text(f"{kind} {name}")
    if fault.when == MIDWAY and half is not None:
      half()
    if fault.when == AFTER:
      # An operation may fail, as removing what is not there.
      with contextlib.suppress(OSError):
        done = do()
        return self._strike(path, lambda: done)
    return self._strike(path, do)

  def _is_below(self, path: str) -> bool:
    return path == self._root or path.startswith(f"{self._root}/")

  def _strike(self, path: str, do: Callable[[], Any]) -> Any:
    fault = self._fault
    assert fault is not None
    if fault.errno is not None:
      self._raise(path)
    if fault.hold is not None:
      fault.hold.touch()
      while fault.hold.exists():
        time.sleep(0.005)
      return do()
    if fault.after_seconds:
      threading.Timer(fault.after_seconds, os.kill, (os.getpid(), fault.signal_number)).start()
      return do()
    os.kill(os.getpid(), fault.signal_number)
    if fault.signal_number == signal.SIGKILL:
      time.sleep(60)
    return do()

  def _raise(self, path: str) -> None:
    assert self._fault is not None
    assert self._fault.errno is not None
    raise OSError(self._fault.errno, os.strerror(self._fault.errno), path)

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
      lambda: self._write(content[: len(content) // 2]),
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
