"""Local copies of objects, for libraries that read local files alone: TensorFlow and ArrayRecord."""

from __future__ import annotations

import atexit
import collections
import os
import shutil
import tempfile
import threading

from etils import epath

from anystep.forks import start_anew_in_children
from anystep.stores.objects import head
from anystep.stores.store_path import StorePath, is_usable

# What a library was told a moment ago must be there until it has opened it.
_MAX_COPIES = 64


def fetch(path: str | os.PathLike[str]) -> str:
  """Return the path of a local copy of a store's object; that of a local file, and of other stores, as it is.

  The copies of the last objects are kept as long as the process lives.

  Raises:
    OSError: as `objects.read_range`.
  """
  return _copies.find(epath.Path(path)) if is_usable(path) else os.fspath(path)


class _Copies:
  """Copies in a temporary directory of this process, the least recently used ones of which are dropped."""

  def __init__(self) -> None:
    self.start_anew()
    start_anew_in_children(self)

  def start_anew(self) -> None:
    self._lock = threading.Lock()
    self._directory: str | None = None
    self._names: collections.OrderedDict[tuple[str, str], str] = collections.OrderedDict()
    self._count = 0

  def find(self, path: epath.Path) -> str:
    assert isinstance(path, StorePath)
    key = (str(path), head(path.address).etag)
    with self._lock:
      if key not in self._names:
        self._directory = self._directory or _make_directory()
        # With the object's name at its end, by which libraries know compressed files.
        copy = os.path.join(self._directory, f"{self._count}-{path.name}")
        self._count += 1
        with path.open("rb") as source, open(copy, "wb") as target:
          shutil.copyfileobj(source, target, 1 << 20)
        self._names[key] = copy
      self._names.move_to_end(key)
      while len(self._names) > _MAX_COPIES:
        os.unlink(self._names.popitem(last=False)[1])
      return self._names[key]


def _make_directory() -> str:
  """Make a directory that is removed when this process ends, and not when a forked one does."""
  directory, process = tempfile.mkdtemp(prefix="anystep-copies-"), os.getpid()

  def remove() -> None:
    if os.getpid() == process:
      shutil.rmtree(directory, ignore_errors=True)

  atexit.register(remove)
  return directory


_copies = _Copies()
