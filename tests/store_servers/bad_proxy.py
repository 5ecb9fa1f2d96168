"""A proxy that does to requests what real stores do now and then: each kind of fault at a rate of its own.

What befalls a request is drawn from the seed and the request's number. `GET /_counts` answers with the
numbers of requests and of faults, by kind, as JSON; `PUT /_rates` replaces the rates by the JSON object sent.

    python -m store_servers.bad_proxy http://127.0.0.1:9000 --rates '{"reset": 0.1}'     # prints its port
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import json
import random
import socket
import struct
import urllib.parse
from collections.abc import Mapping

from store_servers.http_messages import Request, Response, read_request, read_response, wait_for_end_of_stdin

# Seconds of latency; a request that is throttled starts a burst, and so are those that follow it.
LATENCY_SECONDS = 0.05
SLOW_SECONDS = 0.5
BURST_REQUESTS = 3
FAULTS = {
  "latency": f"the request takes {LATENCY_SECONDS} s longer",
  "slow": f"the first byte comes {SLOW_SECONDS} s late",
  "429": f"Too Many Requests, {BURST_REQUESTS} times in a row",
  "503": f"Slow Down, {BURST_REQUESTS} times in a row",
  "reset": "the connection is reset in the middle of the response's body",
  "truncated": "the response's body ends in the middle, in an orderly way",
  "stale": "a listing is answered as the same listing was answered before",
}


class Proxy:
  """Passes requests on to a server, and spoils some.

  Args:
    upstream: the server's address, `http://host:port`.
    rates: for each kind of `FAULTS`, the share of requests that it befalls.
    seed: decides which.
  """

  def __init__(self, upstream: str, rates: Mapping[str, float], *, seed: int):
    address = urllib.parse.urlsplit(upstream)
    self._host, self._port = address.hostname, address.port
    self._seed = seed
    self.counts = collections.Counter[str]()
    self._bursts: list[str] = []
    self._listings: dict[str, Response] = {}
    self.set_rates(rates)

  def set_rates(self, rates: Mapping[str, float]) -> None:
    """Replace all rates."""
    unknown = rates.keys() - FAULTS.keys()
    if unknown:
      raise ValueError(f"faults {sorted(unknown)}, which are none of {sorted(FAULTS)}")
    self._rates = dict(rates)
    self._bursts.clear()

  def _draw(self) -> set[str]:
    """Return the faults that befall the next request."""
    self.counts["requests"] += 1
    if self._bursts:
      return {self._bursts.pop()}
    rng = random.Random(f"{self._seed} {self.counts['requests']}")
    faults = {kind for kind in FAULTS if rng.random() < self._rates.get(kind, 0)}
    for kind in sorted(faults & {"429", "503"}):
      self._bursts = [kind] * (BURST_REQUESTS - 1)
    return faults

  async def answer(self, request: Request, writer: asyncio.StreamWriter) -> bool:
    """Answer a request; return whether the connection can go on."""
    faults = self._draw()
    if "429" in faults or "503" in faults:
      status = 429 if "429" in faults else 503
      self.counts[str(status)] += 1
      text = b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
      await _send(writer, Response(status, {"Content-Type": "application/xml"}, text))
      return True
    if "latency" in faults:
      self.counts["latency"] += 1
      await asyncio.sleep(LATENCY_SECONDS)
    response = self._remember(request, await self._pass_on(request), is_stale="stale" in faults)
    if "slow" in faults:
      self.counts["slow"] += 1
      await asyncio.sleep(SLOW_SECONDS)
    cut = faults & {"reset", "truncated"}
    if not cut or not response.body:
      await _send(writer, response)
      return True
    self.counts.update(sorted(cut)[:1])
    writer.write(response.head() + response.body[: len(response.body) // 2])
    await writer.drain()
    if "reset" in cut:
      # Closing a socket that does not linger resets the connection.
      linger = struct.pack("ii", 1, 0)
      writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
      writer.transport.abort()
    return False

  def _remember(self, request: Request, response: Response, *, is_stale: bool) -> Response:
    """Return the response, or for a stale listing the first one that the same listing had."""
    query = request.query
    is_listing = request.method == "GET" and ("list-type" in query or request.path.endswith("/o"))
    if not is_listing or response.status != 200:
      return response
    earlier = self._listings.setdefault(request.target, response)
    if is_stale and earlier is not response:
      self.counts["stale"] += 1
      return earlier
    return response

  async def _pass_on(self, request: Request) -> Response:
    reader, writer = await asyncio.open_connection(self._host, self._port, limit=1 << 20)
    try:
      skipped = ("connection", "transfer-encoding", "content-length", "expect")
      headers = {name: value for name, value in request.headers.items() if name not in skipped}
      headers |= {"connection": "close"}
      if request.body or request.method in ("PUT", "POST"):
        headers["content-length"] = str(len(request.body))
      lines = [f"{request.method} {request.target} HTTP/1.1", *(f"{n}: {v}" for n, v in headers.items())]
      writer.write(("\r\n".join(lines) + "\r\n\r\n").encode("latin-1") + request.body)
      await writer.drain()
      return await read_response(reader, method=request.method)
    finally:
      writer.close()


async def _send(writer: asyncio.StreamWriter, response: Response) -> None:
  writer.write(response.head())
  writer.write(response.body)
  await writer.drain()


async def serve(proxy: Proxy) -> None:
  """Serve on a free port of loopback, and print the port."""

  async def answer_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
      while (request := await read_request(reader)) is not None:
        if request.path == "/_counts":
          await _send(writer, Response(200, {}, json.dumps(proxy.counts).encode()))
        elif request.path == "/_rates":
          proxy.set_rates(json.loads(request.body))
          await _send(writer, Response(200))
        elif not await proxy.answer(request, writer):
          break
    writer.close()

  server = await asyncio.start_server(answer_connection, "127.0.0.1", 0, limit=1 << 20, backlog=4096)
  print(server.sockets[0].getsockname()[1], flush=True)
  await wait_for_end_of_stdin()


def main() -> None:
  """Serve until stdin ends."""
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("upstream")
  parser.add_argument("--rates", type=json.loads, default={})
  parser.add_argument("--seed", type=int, default=0)
  options = parser.parse_args()
  asyncio.run(serve(Proxy(options.upstream, options.rates, seed=options.seed)))


if __name__ == "__main__":
  main()
