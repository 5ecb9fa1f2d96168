"""Compiled steps, kept for the next start in a folder of the user's own."""

from __future__ import annotations

import hashlib
import os
import platform
import stat
import sys
from pathlib import Path

import jax

_OPTIONS = ("jax_enable_compilation_cache", "jax_compilation_cache_dir")
# Least recently used entries are removed beyond it.
_MAX_BYTES = 4 << 30


def keep_compiled() -> None:
  """Let JAX keep what it compiles in `~/.cache/anystep/compiled`, unless JAX has a cache of its own or none.

  What others could write is never executed: where the folder is not this user's alone, a line says so, and
  nothing is kept. Compiled code is for one kind of processor, and each kind has its own folder.
  """
  is_enabled, folder_of_jax = (getattr(jax.config, name) for name in _OPTIONS)
  if not is_enabled or folder_of_jax is not None:
    return
  try:
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "anystep" / "compiled"
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    problem = _find_problem(root)
    if problem is None:
      folder = root / _name_processor()
      folder.mkdir(mode=0o700, exist_ok=True)
      problem = _find_problem(folder)
  except (OSError, RuntimeError) as error:
    # There may be no home, or one that cannot be written to.
    problem = str(error)
  if problem is not None:
    print(f"compiled steps are not kept for the next start: {problem}", file=sys.stderr)
    return
  jax.config.update("jax_compilation_cache_dir", str(folder))
  jax.config.update("jax_compilation_cache_max_size", _MAX_BYTES)


def _find_problem(folder: Path) -> str | None:
  """Return why others could write into a folder; None if they cannot."""
  status = folder.lstat()
  if not stat.S_ISDIR(status.st_mode):
    return f"{folder} is no directory"
  if status.st_uid != os.geteuid():
    return f"{folder} is another user's"
  if status.st_mode & 0o077:
    return f"{folder} is open to others: chmod 700 it"
  return None


def _name_processor() -> str:
  """Return a name of the processor's kind, by the instructions that it has."""
  try:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
  except OSError:
    lines = []
  # "flags" of x86, "Features" of ARM; all processors of a machine have the same.
  features = next((line for line in lines if line.lower().startswith(("flags", "features"))), "")
  text = f"{platform.machine()} {platform.processor()} {features}"
  return hashlib.sha256(text.encode()).hexdigest()[:16]
