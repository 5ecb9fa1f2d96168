"""The cache job run in the tests' own process, on tasks that are registered for a while."""

from __future__ import annotations

import contextlib
import hashlib
import pathlib
from collections.abc import Iterator
from typing import Any

import seqio

from anystep.cache_job.main import main


def run_job(cache_dir: pathlib.Path, *flags: str, tasks: str) -> None:
  """Runs the job with these flags; a failure is raised."""
  assert main(["anystep-cache", f"--tasks={tasks}", f"--output_cache_dir={cache_dir}", *flags]) == 0


@contextlib.contextmanager
def registered(*providers: Any) -> Iterator[None]:
  """Registers tasks, and mixtures of them, under names that are free."""
  registries = [
    seqio.MixtureRegistry if isinstance(provider, seqio.Mixture) else seqio.TaskRegistry
    for provider in providers
  ]
  with contextlib.ExitStack() as stack:
    for registry, provider in zip(registries, providers, strict=True):
      registry.add_provider(provider.name, provider)
      stack.callback(registry.remove, provider.name)
    yield


def digests_of(cache_dir: pathlib.Path) -> dict[str, str]:
  """sha256 of every file below, by relative path."""
  return {
    path.relative_to(cache_dir).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
    for path in cache_dir.rglob("*")
    if path.is_file()
  }


def stamps_of(cache_dir: pathlib.Path) -> dict[pathlib.Path, tuple[int, int]]:
  """When everything below was changed, and which file it is."""
  return {path: (path.stat().st_mtime_ns, path.stat().st_ino) for path in cache_dir.rglob("*")}
