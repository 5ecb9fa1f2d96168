"""Stores for tests of what reads and writes them: an S3 server, and a GCS server where one is installed."""

from __future__ import annotations

import contextlib
import json
import urllib.request
from collections.abc import Iterator

import pytest
from store_servers import servers


@contextlib.contextmanager
def store_root(scheme: str) -> Iterator[str]:
  """Start a store's server and let this process and its children find it; yield an empty bucket's path."""
  serve = {"s3": servers.moto_server, "gs": servers.gcs_server}[scheme]
  with serve() as endpoint, pytest.MonkeyPatch.context() as patches:
    if scheme == "s3":
      for name, value in servers.s3_environment(endpoint).items():
        patches.setenv(name, value)
      servers.make_bucket(endpoint, "bucket")
    else:
      patches.setenv("STORAGE_EMULATOR_HOST", endpoint)
      make_gcs_bucket(endpoint, "bucket")
    yield f"{scheme}://bucket"


def make_gcs_bucket(endpoint: str, bucket: str) -> None:
  """Make a bucket of a GCS server."""
  request = urllib.request.Request(
    f"{endpoint}/storage/v1/b?project=none",
    json.dumps({"name": bucket}).encode(),
    headers={"Content-Type": "application/json"},
    method="POST",
  )
  with urllib.request.urlopen(request, timeout=30):
    pass


# GCS's server is a program of its own: `go install github.com/fsouza/fake-gcs-server@latest`.
SCHEMES = ["s3", pytest.param("gs", marks=pytest.mark.soak)]
