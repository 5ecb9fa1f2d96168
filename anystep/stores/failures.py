"""Failures of stores as operating-system errors, which callers handle as those of files.

A store's answer can name the access key, and the library's text quotes it: of both, only the status and the
store's error code reach the error.
"""

from __future__ import annotations

import contextlib
import errno
import random
import re
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

_Result = TypeVar("_Result")

# Requests are tried again for so long: throttling and short outages pass, and a job's worker does not hang.
RETRY_SECONDS = 60.0
_FIRST_PAUSE_SECONDS = 0.1
_LONGEST_PAUSE_SECONDS = 10.0
_STATUS = re.compile(r"status code: (\d{3})|\A(\d{3}) ")
_CODE = re.compile(r"<Code>([A-Za-z]\w+)</Code>|\"reason\": ?\"([A-Za-z]\w+)\"")
_TRANSIENT = (408, 429, 500, 502, 503, 504)


class ObjectChangedError(OSError):
  """The object is not the one that was expected: another content was put in its place."""


def retry(call: Callable[[], _Result], path: object) -> _Result:
  """Return a call's result; call again, after pauses that grow, as long as its failure may pass.

  Args:
    call: sends requests that have the same effect a second time.
    path: the object's, for errors.

  Raises:
    OSError: as `store_errors`.
  """
  stop, pause = time.monotonic() + RETRY_SECONDS, _FIRST_PAUSE_SECONDS
  with store_errors(path):
    while True:
      # Jitter: clients that failed together do not come back together.
      seconds = random.uniform(pause / 2, pause)
      try:
        return call()
      except Exception as error:
        if not _may_pass(error) or time.monotonic() + seconds > stop:
          raise
      time.sleep(seconds)
      pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)


@contextlib.contextmanager
def store_errors(path: object) -> Iterator[None]:
  """Raise a store library's exceptions as operating-system errors.

  Raises:
    OSError: with the path and what the store answered: FileNotFoundError, PermissionError, FileExistsError,
      ObjectChangedError, ConnectionError where the store cannot be reached; else with errno EIO.
  """
  try:
    yield
  except Exception as error:
    failure = _make_store_error(error, path)
    if failure is None:
      raise
    # Without the cause: its text may hold credentials.
    raise failure from None


def _make_store_error(error: Exception, path: object) -> OSError | None:
  """Return the operating-system error for a store library's exception; None for an exception that is none."""
  name, status, code = type(error).__name__, _find_status(error), _CODE.search(str(error))
  parts = (str(status) if status else "", next(filter(None, code.groups()), "") if code else "")
  answer = " ".join(part for part in parts if part)
  is_of_library = type(error).__module__.partition(".")[0] in ("obstore", "google", "botocore", "requests")
  if isinstance(error, OSError) and error.errno is not None and not is_of_library:
    # Made here already, or of this machine.
    return None
  if isinstance(error, FileNotFoundError) or status == 404:
    kind = "no such bucket" if "NoSuchBucket" in str(error) else "no such object"
    return FileNotFoundError(errno.ENOENT, kind, str(path))
  if name == "AlreadyExistsError":
    return FileExistsError(errno.EEXIST, "the object exists", str(path))
  if status == 412 or name in ("PreconditionError", "NotModifiedError"):
    return ObjectChangedError(errno.ESTALE, "the object is another one by now", str(path))
  if status in (401, 403) or name in ("PermissionDeniedError", "UnauthenticatedError", "NoCredentialsError"):
    return PermissionError(errno.EACCES, f"the store refuses ({answer or 'no credentials'})", str(path))
  if not is_of_library and not isinstance(error, OSError):
    return None
  if status is None and _may_pass(error):
    return ConnectionError(errno.EIO, "the store does not answer", str(path))
  return OSError(errno.EIO, f"the store failed ({answer or name})", str(path))


def _may_pass(error: Exception) -> bool:
  """Return whether the same request may succeed later."""
  if isinstance(error, FileNotFoundError):
    return False
  status = _find_status(error)
  if status is not None:
    return status in _TRANSIENT
  # Connections that could not be made, broke, or ended before the whole body came.
  module, name = type(error).__module__.partition(".")[0], type(error).__name__
  if module == "obstore":
    return name == "GenericError"
  return isinstance(error, (ConnectionError, TimeoutError)) or module == "requests"


def _find_status(error: Exception) -> int | None:
  """Return the HTTP status that a store library's exception tells; None where there was no answer."""
  status = getattr(error, "code", None) or getattr(error, "status_code", None)
  if status is None:
    match = _STATUS.search(str(error))
    return int(next(filter(None, match.groups()))) if match else None
  return int(status)
