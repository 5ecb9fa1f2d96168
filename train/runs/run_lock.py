"""One run at a time: the lock on a MODEL_DIR."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator

from etils import epath

from anystep.files import storage
from anystep.files.directory_lock import locked_directory

_FIX = (
  "wait for that run, or train in another MODEL_DIR; where it is gone from its host, remove the file that"
  " path names"
)


@contextlib.contextmanager
def locked_run(model_dir: epath.PathLike) -> Iterator[None]:
  """Keep other runs out of a MODEL_DIR. A directory that this call made is removed if it is still empty.

  Raises:
    AnystepError: 73 `run_active`, with the process that holds it and the time since when.
  """
  if storage.is_remote(model_dir):
    print(f"{model_dir} is not locked: see that no other run trains there", file=sys.stderr)
    yield
    return
  is_new = not os.path.exists(model_dir)
  try:
    with locked_directory(model_dir, kind="run_active", fix=_FIX):
      yield
  finally:
    if is_new:
      with contextlib.suppress(OSError):
        os.rmdir(model_dir)
