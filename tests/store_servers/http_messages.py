"""The little of HTTP/1.1 that the tests' own servers speak."""

from __future__ import annotations

import asyncio
import dataclasses
import http
import os
import sys
import urllib.parse
from collections.abc import Mapping

# Responses to these have no body, whatever Content-Length says.
_WITHOUT_BODY = (204, 304)


@dataclasses.dataclass(frozen=True)
class Request:
  """A request. Header names are in lower case; `target` is as it was sent."""

  method: str
  target: str
  headers: Mapping[str, str]
  body: bytes

  @property
  def path(self) -> str:
    return urllib.parse.unquote(self.target.partition("?")[0])

  @property
  def query(self) -> dict[str, str]:
    return dict(urllib.parse.parse_qsl(self.target.partition("?")[2], keep_blank_values=True))


@dataclasses.dataclass(frozen=True)
class Response:
  """A response. `length` is what Content-Length says where that is not the body's: of HEAD."""

  status: int
  headers: Mapping[str, str] = dataclasses.field(default_factory=dict)
  body: bytes = b""
  length: int | None = None

  def head(self) -> bytes:
    """The lines before the body."""
    headers = {name: value for name, value in self.headers.items() if name.lower() != "content-length"}
    if self.status not in _WITHOUT_BODY:
      headers["Content-Length"] = str(len(self.body) if self.length is None else self.length)
    lines = [f"HTTP/1.1 {self.status} {http.HTTPStatus(self.status).phrase}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


async def read_request(reader: asyncio.StreamReader) -> Request | None:
  """Read the next request of a connection; None at its end."""
  head = await _read_head(reader)
  if head is None:
    return None
  (method, target, _), headers = head
  return Request(method, target, headers, await _read_body(reader, headers))


async def read_response(reader: asyncio.StreamReader, *, method: str) -> Response:
  """Read a response whole; its length is the body's."""
  head = await _read_head(reader)
  if head is None:
    raise ConnectionResetError("no response")
  (_, status, *_), headers = head
  number = int(status)
  if method == "HEAD" or number in _WITHOUT_BODY:
    return Response(number, headers, length=int(headers.get("content-length", 0)))
  if "content-length" in headers or "transfer-encoding" in headers:
    body = await _read_body(reader, headers)
  else:
    body = await reader.read()
  skipped = ("transfer-encoding", "connection")
  return Response(number, {name: value for name, value in headers.items() if name not in skipped}, body)


async def wait_for_end_of_stdin() -> None:
  """Wait until stdin ends: with the process that started a server, however that ends."""
  ended = asyncio.Event()
  asyncio.get_running_loop().add_reader(sys.stdin.fileno(), lambda: os.read(0, 4096) or ended.set())
  await ended.wait()


async def _read_head(reader: asyncio.StreamReader) -> tuple[list[str], dict[str, str]] | None:
  try:
    content = await reader.readuntil(b"\r\n\r\n")
  except (asyncio.IncompleteReadError, ConnectionError):
    return None
  first, *lines = content.decode("latin-1").split("\r\n")[:-2]
  pairs = [line.partition(":") for line in lines]
  return first.split(" ", 2), {name.strip().lower(): value.strip() for name, _, value in pairs}


async def _read_body(reader: asyncio.StreamReader, headers: Mapping[str, str]) -> bytes:
  if headers.get("transfer-encoding", "").lower() != "chunked":
    return await reader.readexactly(int(headers.get("content-length", 0)))
  pieces = []
  while size := int((await reader.readline()).partition(b";")[0], 16):
    pieces.append(await reader.readexactly(size))
    await reader.readline()
  await reader.readuntil(b"\r\n")
  return b"".join(pieces)
