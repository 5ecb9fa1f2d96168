"""Starting TensorFlow as a reader of data: on the CPU, and without remarks."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import tempfile
from collections.abc import Iterator


def start_tensorflow() -> None:
  """Imports TensorFlow and keeps it off the accelerators, which are the model's."""
  os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
  with quiet_stderr(), imports_without_collections():
    import tensorflow as tf

    # Where the program's caller has started TensorFlow already, the choice was theirs.
    with contextlib.suppress(RuntimeError):
      tf.config.set_visible_devices([], "GPU")
    tf.zeros([])


@contextlib.contextmanager
def imports_without_collections() -> Iterator[None]:
  """Keeps Python from looking for garbage among modules that are being imported: they stay.

  It looks again and again, a sixth of the seconds that TensorFlow, SeqIO and Beam take to import.
  """
  was_enabled = gc.isenabled()
  gc.disable()
  try:
    yield
  finally:
    gc.freeze()
    if was_enabled:
      gc.enable()


@contextlib.contextmanager
def quiet_stderr() -> Iterator[None]:
  """Holds stderr back, native libraries' too, and shows it only where the body fails.

  TensorFlow remarks on its instruction sets and missing GPUs before any of its settings counts.
  """
  sys.stderr.flush()
  kept = os.dup(2)
  with tempfile.TemporaryFile() as held:
    os.dup2(held.fileno(), 2)
    try:
      yield
    except BaseException:
      sys.stderr.flush()
      held.seek(0)
      os.write(kept, held.read())
      raise
    finally:
      sys.stderr.flush()
      os.dup2(kept, 2)
      os.close(kept)
