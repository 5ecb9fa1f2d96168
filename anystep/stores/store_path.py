"""Paths on stores: the class that `epath.Path` makes of gs:// and s3:// addresses."""

from __future__ import annotations

import errno
import fnmatch
import glob
import io
import os
import posixpath
import shutil
import sys
from collections.abc import Iterator
from typing import IO, Any, Self

from etils import epath
from etils.epath.stat_utils import StatResult

from anystep.stores import objects
from anystep.stores.addresses import SCHEMES, Address, parse_address
from anystep.stores.clients import are_installed
from anystep.stores.object_files import ObjectWriter, open_for_reading


def register_store_paths() -> None:
  """Let `epath.Path` make store paths of gs:// and s3:// addresses, where the packages are installed.

  Elsewhere etils keeps its own, for programs that use them without us.
  """
  if are_installed():
    epath.register_path_cls([f"{scheme}://" for scheme in SCHEMES])(StorePath)


def is_usable(path: str | os.PathLike[str]) -> bool:
  """Return whether a path is on a store that can be used here."""
  return os.fspath(path).partition("://")[0] in SCHEMES and are_installed()


def list_matches(pattern: str) -> list[str]:
  """Return the paths on a store that match a pattern, in order; a plain path matches where it exists."""
  address = parse_address(pattern)
  root = StorePath(str(address._replace(key="")))
  return [str(path) for path in root.glob(address.key)]


class StorePath(epath.Path):
  """Path of an object, or of a directory: all objects whose keys begin with its key and a slash.

  Directories are nothing by themselves: making one does nothing, and an empty one does not exist. A file
  that is opened for writing appears when it is closed. Renaming copies on the store's side, then removes.

  >>> StorePath("s3://bucket/cache") / "train" / "file"
  StorePath('s3://bucket/cache/train/file')
  """

  if sys.version_info < (3, 12):

    def __new__(cls, *parts: epath.PathLike) -> Self:
      return super().__new__(cls, _to_posix(*parts))

  else:

    def __init__(self, *parts: epath.PathLike):
      super().__init__(_to_posix(*parts))

  @property
  def address(self) -> Address:
    """The path's scheme, bucket and key."""
    return parse_address(str(self))

  def __str__(self) -> str:
    if self.parts[:1] != ("/",):
      return "/".join(self.parts) or "."
    scheme, _, rest = "/".join(self.parts[1:]).partition("/")
    return f"{scheme}://{rest}"

  def __fspath__(self) -> str:
    return str(self)

  def __repr__(self) -> str:
    return f"{type(self).__name__}({str(self)!r})"

  def as_uri(self) -> str:
    return str(self)

  def resolve(self, strict: bool = False) -> Self:
    return self

  def expanduser(self) -> Self:
    return self

  def relative_to(self, *other: epath.PathLike) -> Self:
    return super().relative_to(type(self)(*other))

  def exists(self) -> bool:
    """Return whether there is an object or a directory."""
    return self.is_file() or self.is_dir()

  def is_file(self) -> bool:
    try:
      return bool(self.address.key) and bool(objects.head(self.address))
    except FileNotFoundError:
      return False

  def is_dir(self) -> bool:
    return any(objects.list_directory(self.address))

  def iterdir(self) -> Iterator[Self]:
    """Yield what is in a directory, by one listing, in order of names.

    Raises:
      FileNotFoundError: where nothing is in it.
    """
    listing = objects.list_directory(self.address)
    if not any(listing):
      raise FileNotFoundError(errno.ENOENT, "no such directory", str(self))
    for name in sorted({*listing.objects, *listing.directories}):
      yield self / name

  def glob(self, pattern: str) -> Iterator[Self]:
    """Yield the objects and directories whose names match, in order, by one listing of each directory."""
    first, _, rest = pattern.partition("/")
    if "**" in first:
      raise NotImplementedError(f"** would list the whole store: {pattern}")
    if glob.has_magic(first):
      listing = objects.list_directory(self.address)
      names = listing.directories if rest else sorted({*listing.objects, *listing.directories})
      matches = [self / name for name in names if fnmatch.fnmatchcase(name, first)]
    else:
      matches = [self / first] if rest or (self / first).exists() else []
    for path in matches:
      yield from path.glob(rest) if rest else (path,)

  def stat(self) -> StatResult:
    """Return an object's size and time, or that the path is a directory.

    Raises:
      FileNotFoundError: if it is neither.
    """
    try:
      status = objects.head(self.address)
    except FileNotFoundError:
      if not self.is_dir():
        raise
      return StatResult(is_directory=True, length=0, mtime=0)
    return StatResult(is_directory=False, length=status.size_bytes, mtime=status.modified_ns // 10**9)

  def open(self, mode: str = "r", encoding: str | None = None, **unused: Any) -> IO[Any]:
    """Open an object; one that is written appears when it is closed, and not where the `with` body fails.

    Raises:
      ValueError: for other modes than rb, r and wb: nothing can be appended to an object.
    """
    if mode == "wb":
      return ObjectWriter(self.address)  # type: ignore[return-value]
    if mode not in ("r", "rb"):
      raise ValueError(f"expected mode rb, r or wb on a store, got {mode}")
    file = open_for_reading(self.address)
    return file if mode == "rb" else io.TextIOWrapper(file, encoding=encoding or "utf-8")

  def read_bytes(self) -> bytes:
    return objects.read(self.address)[0]

  def write_bytes(self, data: bytes) -> int:
    objects.put(self.address, bytes(data))
    return len(data)

  def read_text(self, encoding: str | None = None) -> str:
    return self.read_bytes().decode(encoding or "utf-8")

  def write_text(self, data: str, encoding: str | None = None, errors: str | None = None) -> int:
    return self.write_bytes(data.encode(encoding or "utf-8", errors or "strict"))

  def mkdir(self, mode: int | None = None, parents: bool = False, exist_ok: bool = False) -> None:
    """Do nothing: directories come with their objects.

    Raises:
      FileExistsError: unless `exist_ok`, if there is one.
    """
    if not exist_ok and self.exists():
      raise FileExistsError(errno.EEXIST, "File exists", str(self))

  def rmdir(self) -> None:
    """Do nothing: an empty directory does not exist.

    Raises:
      OSError: if it is not empty.
    """
    if self.is_dir():
      raise OSError(errno.ENOTEMPTY, "The directory is not empty", str(self))

  def rmtree(self, missing_ok: bool = False) -> None:
    """Remove all objects below, and the parts of unfinished uploads."""
    address = self.address
    names = list(objects.list_below(address))
    unfinished = objects.remove_unfinished_uploads(address)
    objects.delete(address._replace(key=f"{address.key}/{name}".lstrip("/")) for name in names)
    if not names and not unfinished and not missing_ok:
      raise FileNotFoundError(errno.ENOENT, "no such directory", str(self))

  def unlink(self, missing_ok: bool = False) -> None:
    if not missing_ok:
      objects.head(self.address)
    objects.delete([self.address])

  def copy(self, dst: epath.PathLike, overwrite: bool = False) -> epath.Path:
    """Copy the object; within a bucket, on the store's side."""
    target = epath.Path(dst)
    if not overwrite and target.exists():
      raise FileExistsError(errno.EEXIST, "File exists", str(target))
    if isinstance(target, StorePath) and target.address[:2] == self.address[:2]:
      objects.copy(self.address, target.address)
    else:
      with self.open("rb") as source, target.open("wb") as copied:
        shutil.copyfileobj(source, copied, 1 << 20)
    return target

  def replace(self, target: epath.PathLike) -> epath.Path:
    """Copy the object, then remove it."""
    copied = self.copy(target, overwrite=True)
    self.unlink(missing_ok=True)
    return copied

  def rename(self, target: epath.PathLike) -> epath.Path:
    """Move as `replace`; refuse a target that exists."""
    copied = self.copy(target)
    self.unlink(missing_ok=True)
    return copied


def _to_posix(*parts: epath.PathLike) -> str:
  """Return the path that stands for an address among POSIX paths, which drop double slashes.

  >>> _to_posix("s3://bucket", "key"), _to_posix("/", "s3", "bucket")
  ('/s3/bucket/key', '/s3/bucket')
  """
  path = posixpath.join("", *map(os.fspath, parts))
  scheme, _, rest = path.partition("://")
  return f"/{scheme}/{rest}" if scheme in SCHEMES else path
