"""Stores on loopback, each a process of its own on a free port, for as long as a block of code runs."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence

# Strings that no output may have (`tests/attacks`, `docs/stores.md`).
ACCESS_KEY, SECRET_KEY = "AKIDTESTSONLYNAME", "tests/only/secret/key"
_MOTO = """
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""


def s3_environment(endpoint: str) -> dict[str, str]:
  """Return the variables by which S3's clients find a server, and credentials that tests look for."""
  return {
    "AWS_ENDPOINT_URL": endpoint,
    "AWS_ALLOW_HTTP": "true",
    "AWS_ACCESS_KEY_ID": ACCESS_KEY,
    "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
    "AWS_REGION": "us-east-1",
    "AWS_DEFAULT_REGION": "us-east-1",
  }


@contextlib.contextmanager
def moto_server() -> Iterator[str]:
  """S3 as moto emulates it: right in meaning, slow for ranges. Yields its address."""
  with _served([sys.executable, "-c", _MOTO]) as endpoint:
    yield endpoint


@contextlib.contextmanager
def range_server(root: pathlib.Path, *, latency_seconds: float = 0) -> Iterator[str]:
  """S3 on the files below a folder, fast; see `range_server.py`. Yields its address."""
  command = [sys.executable, "-m", "store_servers.range_server", str(root)]
  with _served([*command, f"--latency_seconds={latency_seconds}"]) as endpoint:
    yield endpoint


@contextlib.contextmanager
def bad_proxy(upstream: str, rates: Mapping[str, float], *, seed: int = 0) -> Iterator[str]:
  """A proxy that spoils requests to a server; see `bad_proxy.py`. Yields its address."""
  command = [sys.executable, "-m", "store_servers.bad_proxy", upstream]
  with _served([*command, f"--rates={json.dumps(dict(rates))}", f"--seed={seed}"]) as endpoint:
    yield endpoint


def find_gcs_server() -> str | None:
  """Return the program of fake-gcs-server, where `go install` has put it; None where it is not there."""
  folders = [os.environ.get("GOBIN", ""), os.path.join(os.environ.get("GOPATH", ""), "bin")]
  path = os.pathsep.join([*filter(None, folders), os.path.expanduser("~/go/bin"), os.environ.get("PATH", "")])
  return shutil.which("fake-gcs-server", path=path)


@contextlib.contextmanager
def gcs_server() -> Iterator[str]:
  """Google Cloud Storage as fake-gcs-server emulates it, in memory. Yields its address."""
  program = find_gcs_server()
  if program is None:
    raise FileNotFoundError("fake-gcs-server: go install github.com/fsouza/fake-gcs-server@latest")
  port = _free_port()
  endpoint = f"http://127.0.0.1:{port}"
  command = [program, "-scheme=http", "-host=127.0.0.1", f"-port={port}", "-backend=memory"]
  command += [f"-public-host=127.0.0.1:{port}", f"-external-url={endpoint}", "-log-level=error"]
  with _process(command, stdout=subprocess.DEVNULL):
    _wait_for(f"{endpoint}/storage/v1/b")
    yield endpoint


def make_bucket(endpoint: str, bucket: str) -> None:
  """Make a bucket of an S3 server."""
  _request(f"{endpoint}/{bucket}", "PUT")


def copy_to_bucket(folder: pathlib.Path, endpoint: str, bucket: str) -> None:
  """Put the files below a folder into a bucket of an S3 server, under their relative paths."""
  for path in sorted(folder.rglob("*")):
    if path.is_file():
      put_object(endpoint, bucket, path.relative_to(folder).as_posix(), path.read_bytes())


def put_object(endpoint: str, bucket: str, key: str, content: bytes) -> None:
  """Put an object into a bucket of an S3 server."""
  _request(f"{endpoint}/{bucket}/{urllib.request.quote(key)}", "PUT", content)


def delete_object(endpoint: str, bucket: str, key: str) -> None:
  """Delete an object of an S3 server."""
  _request(f"{endpoint}/{bucket}/{urllib.request.quote(key)}", "DELETE")


def take_requests(endpoint: str) -> dict[str, int]:
  """Return the numbers of requests that a range server had, by kind, since the last call."""
  counts = json.loads(_request(f"{endpoint}/_requests", "GET"))
  _request(f"{endpoint}/_requests", "DELETE")
  return counts


def count_faults(endpoint: str) -> dict[str, int]:
  """Return the numbers of requests and of faults that a bad proxy had, by kind."""
  return json.loads(_request(f"{endpoint}/_counts", "GET"))


def set_rates(endpoint: str, rates: Mapping[str, float]) -> None:
  """Set the rates of a bad proxy anew."""
  _request(f"{endpoint}/_rates", "PUT", json.dumps(dict(rates)).encode())


def _request(url: str, method: str, content: bytes | None = None) -> bytes:
  # moto refuses what is not signed, and does not look at signatures.
  headers = {"Content-Type": "application/octet-stream", "Authorization": f"AWS {ACCESS_KEY}:unsigned"}
  request = urllib.request.Request(url, content, headers, method=method)
  with urllib.request.urlopen(request, timeout=30) as response:
    return response.read()


@contextlib.contextmanager
def _served(command: Sequence[str]) -> Iterator[str]:
  """Start a server that prints its port; yield its address."""
  with _process(command, stdout=subprocess.PIPE) as process:
    assert process.stdout is not None
    port = process.stdout.readline().strip()
    if not port:
      raise RuntimeError(f"{' '.join(command[:4])} ended with {process.wait()} before it printed a port")
    yield f"http://127.0.0.1:{int(port)}"


@contextlib.contextmanager
def _process(command: Sequence[str], *, stdout: int) -> Iterator[subprocess.Popen[str]]:
  folder = pathlib.Path(__file__).parents[1]
  process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=stdout, cwd=folder, text=True)
  try:
    yield process
  finally:
    process.kill()
    process.communicate()


def _free_port() -> int:
  with socket.socket() as listener:
    listener.bind(("127.0.0.1", 0))
    return listener.getsockname()[1]


def _wait_for(url: str, *, seconds: float = 20) -> None:
  deadline = time.monotonic() + seconds
  while True:
    try:
      _request(url, "GET")
      return
    except OSError:
      if time.monotonic() > deadline:
        raise
      time.sleep(0.05)
