"""Objects as files: read by ranges, and written in parts."""

from __future__ import annotations

import contextlib
import io
from types import TracebackType
from typing import Any

from anystep.stores.addresses import Address
from anystep.stores.clients import obstore, open_bucket, open_google_bucket
from anystep.stores.failures import store_errors
from anystep.stores.objects import head, read_range, read_start

# A part of an upload, held until it is sent; S3 takes 10,000 parts, so objects of up to 80 GB.
PART_BYTES = 8 << 20
_PARTS_AT_ONCE = 4
# Reads that follow each other get more and more at a time.
_SMALLEST_RANGE_BYTES = 1 << 16
_LARGEST_RANGE_BYTES = 8 << 20


def open_for_reading(address: Address) -> io.BufferedReader:
  """Open an object as a file; each read gets a range, of the content that was there at opening.

  Raises:
    OSError: as `objects.read_start`, and while it is read as `objects.read_range`.
  """
  return io.BufferedReader(_ObjectReader(address), _SMALLEST_RANGE_BYTES)


class _ObjectReader(io.RawIOBase):
  """An object's content, read by ranges that grow where one follows the other."""

  def __init__(self, address: Address):
    self._address = address
    # With the status comes what small files are whole in.
    self._block, self._status = read_start(address, _SMALLEST_RANGE_BYTES)
    self._block_start = 0
    self._range_bytes = _SMALLEST_RANGE_BYTES
    self._position = 0

  def readable(self) -> bool:
    return True

  def seekable(self) -> bool:
    return True

  def tell(self) -> int:
    return self._position

  def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
    origin = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._status.size_bytes}[whence]
    if origin + offset < 0:
      raise ValueError(f"position {origin + offset}")
    self._position = origin + offset
    return self._position

  def readinto(self, buffer: Any) -> int:
    content = self._read_some(len(buffer))
    buffer[: len(content)] = content
    return len(content)

  def _read_some(self, size: int) -> bytes:
    """Return at least one of the next bytes, and at most `size`; none at the end."""
    stop = min(self._position + size, self._status.size_bytes)
    block_stop = self._block_start + len(self._block)
    if self._position < stop and not self._block_start <= self._position < block_stop:
      follows = self._position == block_stop
      self._range_bytes = (
        min(2 * self._range_bytes, _LARGEST_RANGE_BYTES) if follows else _SMALLEST_RANGE_BYTES
      )
      range_stop = min(max(stop, self._position + self._range_bytes), self._status.size_bytes)
      self._block = read_range(self._address, self._position, range_stop, etag=self._status.etag)
      self._block_start = self._position
    start = self._position - self._block_start
    content = self._block[start : start + stop - self._position] if self._position < stop else b""
    self._position += len(content)
    return content


class ObjectWriter(io.RawIOBase):
  """A new object, sent in parts while it is written.

  It appears when the writer is closed. Where the `with` body fails, or the writer is dropped unclosed, it
  does not, and the parts are removed. Of a process that is killed, S3 keeps the parts until
  `objects.remove_unfinished_uploads`.
  """

  def __init__(self, address: Address):
    self._address = address
    self._position = 0
    # None once it is finished, and where it could not be opened.
    self._upload: Any = None
    self._etag_before = _find_etag(address)
    self._upload = _start_upload(address)

  def writable(self) -> bool:
    return True

  def tell(self) -> int:
    return self._position

  def write(self, content: Any) -> int:
    """Add bytes at the end."""
    if self._upload is None:
      raise ValueError("the file is closed")
    view = memoryview(content).cast("B")
    with store_errors(self._address):
      self._upload.write(bytes(view))
    self._position += len(view)
    return len(view)

  def close(self) -> None:
    """Finish the object, which appears now."""
    upload, self._upload = self._upload, None
    if upload is not None:
      try:
        with store_errors(self._address):
          upload.close()
      except OSError:
        if not self._has_appeared():
          raise
    super().close()

  def abort(self) -> None:
    """Give the object up: nothing appears."""
    upload, self._upload = self._upload, None
    if upload is not None:
      # The next job removes parts that cannot be removed now.
      with contextlib.suppress(Exception):
        if self._address.scheme == "gs":
          upload.terminate()
        else:
          upload.__exit__(RuntimeError, RuntimeError("the upload was given up"), None)
    super().close()

  def _has_appeared(self) -> bool:
    """Return whether the object is there though the answer to its last request got lost."""
    try:
      status = head(self._address)
    except FileNotFoundError:
      return False
    return status.size_bytes == self._position and status.etag != self._etag_before

  def __exit__(
    self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
  ) -> None:
    if kind is None:
      self.close()
    else:
      self.abort()

  def __del__(self) -> None:
    # `io` would close it, as if it were whole.
    self.abort()


def _find_etag(address: Address) -> str | None:
  try:
    return head(address).etag
  except FileNotFoundError:
    return None


def _start_upload(address: Address) -> Any:
  if address.scheme == "gs":
    blob = open_google_bucket(address).blob(address.key)
    return blob.open("wb", chunk_size=PART_BYTES, ignore_flush=True)
  return obstore().open_writer(
    open_bucket(address), address.key, buffer_size=PART_BYTES, max_concurrency=_PARTS_AT_ONCE
  )
