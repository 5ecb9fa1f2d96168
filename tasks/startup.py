"""Starting TensorFlow as a reader of data: on the CPU, and without remarks."""

from __future__ import annotations

import contextlib
import gc
import importlib.abc
import importlib.machinery
import os
import re
import sys
import tempfile
import types
from collections.abc import Callable, Iterator, Sequence

# What TensorFlow says as it is imported, whatever its settings: of instruction sets, of absent GPUs, and of
# parts for GPUs that another library has registered. Other lines are somebody's own.
_REMARKS = re.compile(
  rb"WARNING: All log messages before absl::InitializeLog|I\d{4} |\d{4}-\d\d-\d\d [^ ]+ I |"
  rb"[WE]\d{4} .*\b(cuda|cudart|computation_placer)\w*\.cc:|\d{4}-\d\d-\d\d [^ ]+ [WE] .*\bcuda\w*\.cc:|"
  rb"To enable the following instructions:"
)


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


def silence_tensorflow_import() -> None:
  """Let the import of TensorFlow pass without its remarks, in worker processes too."""
  if "tensorflow" not in sys.modules and not any(isinstance(finder, _Finder) for finder in sys.meta_path):
    sys.meta_path.insert(0, _Finder())


class _Finder(importlib.abc.MetaPathFinder):
  """Finder of TensorFlow, as the other finders find it, with a loader that keeps its remarks back."""

  def find_spec(
    self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
  ) -> importlib.machinery.ModuleSpec | None:
    if fullname != "tensorflow":
      return None
    others = (finder for finder in sys.meta_path if finder is not self)
    specs = (finder.find_spec(fullname, path, target) for finder in others)
    spec = next((spec for spec in specs if spec is not None), None)
    if spec is not None and spec.loader is not None:
      spec.loader.exec_module = _load_quietly(spec.loader.exec_module)  # type: ignore[assignment,method-assign]
    return spec


def _load_quietly(load: Callable[[types.ModuleType], None]) -> Callable[[types.ModuleType], None]:
  def load_quietly(module: types.ModuleType) -> None:
    with quiet_stderr(remarks=_REMARKS):
      load(module)

  return load_quietly


@contextlib.contextmanager
def quiet_stderr(*, remarks: re.Pattern[bytes] | None = None) -> Iterator[None]:
  """Holds stderr back, native libraries' too, and shows it only where the body fails.

  TensorFlow remarks on its instruction sets and missing GPUs before any of its settings counts.

  Args:
    remarks: beginnings of the lines that are dropped, where others are shown after the body; None for all.
  """
  if sys.stderr is None:
    # Closed, as a daemon's may be.
    yield
    return
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
    else:
      sys.stderr.flush()
      held.seek(0)
      os.write(kept, b"".join(line for line in held if remarks and not remarks.match(line)))
    finally:
      sys.stderr.flush()
      os.dup2(kept, 2)
      os.close(kept)
