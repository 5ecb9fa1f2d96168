"""Folders as buckets of an S3 server: what is written there locally is on the store at once."""

from __future__ import annotations

import contextlib
import os
import pathlib
from collections.abc import Iterator, Mapping

import pytest
from store_servers import servers


class ServedFolder:
  """A folder whose folders are buckets.

  Attributes:
    folder: the folder.
    endpoint: the server's address.
  """

  def __init__(self, folder: pathlib.Path, endpoint: str):
    self.folder = folder
    self.endpoint = endpoint

  def path(self, path: os.PathLike[str]) -> str:
    """The address of a file or folder in one of the buckets."""
    return f"s3://{pathlib.Path(path).relative_to(self.folder).as_posix()}"

  def take_requests(self) -> dict[str, int]:
    """Requests since the last call, by kind, without the bytes that were sent."""
    return {kind: n for kind, n in servers.take_requests(self.endpoint).items() if kind != "bytes"}

  @contextlib.contextmanager
  def spoiled(self, rates: Mapping[str, float], *, seed: int = 0) -> Iterator[str]:
    """This process reads through a bad proxy while the block runs; yields the proxy's address."""
    with servers.bad_proxy(self.endpoint, rates, seed=seed) as endpoint, _found(endpoint):
      yield endpoint


@contextlib.contextmanager
def served_folder(folder: pathlib.Path, *, latency_seconds: float = 0) -> Iterator[ServedFolder]:
  """Serve a folder; this process and its children find the server."""
  with servers.range_server(folder, latency_seconds=latency_seconds) as endpoint, _found(endpoint):
    yield ServedFolder(folder, endpoint)


@contextlib.contextmanager
def _found(endpoint: str) -> Iterator[None]:
  with pytest.MonkeyPatch.context() as patches:
    for name, value in servers.s3_environment(endpoint).items():
      patches.setenv(name, value)
    yield
