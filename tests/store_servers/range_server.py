"""S3 for measurements: objects are the files of a folder, each request is counted, latency can be added.

It speaks what a cache's readers and writers need: GET with ranges and conditions, HEAD, ListObjectsV2, PUT
with conditions, multipart uploads, DELETE. Signatures are not looked at. ETags are made of times and sizes.
`GET /_requests` answers with the numbers of requests so far, by kind, as JSON; `DELETE /_requests` sets them
to 0.

    python -m store_servers.range_server FOLDER [--latency_seconds 0.05]      # prints its port
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import hashlib
import json
import os
import pathlib
import re
import uuid
from collections.abc import Iterator
from xml.sax.saxutils import escape, unescape

from store_servers.http_messages import Request, Response, read_request, wait_for_end_of_stdin

_MAX_KEYS = 1000
_PARTS = "_parts"
_RANGE = re.compile(r"bytes=(\d*)-(\d*)\Z")
_DELETED_KEY = re.compile(r"<Key>([^<]*)</Key>")


class Store:
  """Buckets, which are folders below a root, and their objects, which are files.

  Args:
    root: the folder; made if there is none.
  """

  def __init__(self, root: pathlib.Path):
    self._root = root
    (root / _PARTS).mkdir(parents=True, exist_ok=True)

  def answer(self, request: Request) -> Response:
    """Answer a request."""
    bucket, _, key = request.path.lstrip("/").partition("/")
    if not key:
      return self._answer_bucket(bucket, request)
    return self._answer_object(bucket, key, request)

  def _answer_bucket(self, bucket: str, request: Request) -> Response:
    folder = self._root / bucket
    if request.method == "PUT":
      folder.mkdir(exist_ok=True)
      return Response(200)
    if not folder.is_dir():
      return _error(404, "NoSuchBucket")
    if request.method == "POST" and "delete" in request.query:
      keys = _DELETED_KEY.findall(request.body.decode())
      for key in keys:
        (folder / unescape(key)).unlink(missing_ok=True)
      return _xml("DeleteResult", "".join(f"<Deleted><Key>{key}</Key></Deleted>" for key in keys))
    if request.method == "GET" and "uploads" in request.query:
      return self._list_uploads()
    if request.method in ("GET", "HEAD"):
      return self._list(folder, request)
    return _error(405, "MethodNotAllowed")

  def _list(self, folder: pathlib.Path, request: Request) -> Response:
    query = request.query
    prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
    after = query.get("continuation-token", query.get("start-after", ""))
    limit = min(int(query.get("max-keys", _MAX_KEYS)), _MAX_KEYS)
    names = [name for name in _list_names(folder, prefix, delimiter) if name > after]
    items = []
    for name in names[:limit]:
      if name.endswith("/"):
        items.append(f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>")
      else:
        status = (folder / name).stat()
        items.append(
          f"<Contents><Key>{escape(name)}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
          f"<ETag>{escape(_etag(status))}</ETag><Size>{status.st_size}</Size></Contents>"
        )
    is_truncated = len(names) > limit
    token = (
      f"<NextContinuationToken>{escape(names[limit - 1])}</NextContinuationToken>" if is_truncated else ""
    )
    head = f"<Name>{folder.name}</Name><Prefix>{escape(prefix)}</Prefix><KeyCount>{len(items)}</KeyCount>"
    more = f"<IsTruncated>{str(is_truncated).lower()}</IsTruncated>{token}"
    return _xml("ListBucketResult", head + more + "".join(items))

  def _answer_object(self, bucket: str, key: str, request: Request) -> Response:
    path, query = self._root / bucket / key, request.query
    if request.method in ("GET", "HEAD"):
      return _read(path, request)
    if request.method == "DELETE":
      if "uploadId" in query:
        for part in self._parts_of(query["uploadId"]):
          part.unlink()
      else:
        path.unlink(missing_ok=True)
      return Response(204)
    if request.method == "POST" and "uploads" in query:
      upload = uuid.uuid4().hex
      (self._root / _PARTS / f"{upload}.00000").write_text(key)
      return _xml("InitiateMultipartUploadResult", f"<Key>{escape(key)}</Key><UploadId>{upload}</UploadId>")
    if request.method == "PUT" and "uploadId" in query:
      part = self._root / _PARTS / f"{query['uploadId']}.{int(query['partNumber']):05d}"
      part.write_bytes(request.body)
      return Response(200, {"ETag": f'"{hashlib.md5(request.body).hexdigest()}"'})
    if request.method == "POST" and "uploadId" in query:
      parts = self._parts_of(query["uploadId"])
      if not parts:
        return _error(404, "NoSuchUpload")
      refusal = self._put(path, b"".join(part.read_bytes() for part in parts[1:]), request)
      if refusal is not None:
        return refusal
      for part in parts:
        part.unlink()
      return _xml(
        "CompleteMultipartUploadResult", f"<Key>{escape(key)}</Key><ETag>{_etag(path.stat())}</ETag>"
      )
    if request.method == "PUT":
      return self._put(path, request.body, request) or Response(200, {"ETag": _etag(path.stat())})
    return _error(405, "MethodNotAllowed")

  def _put(self, path: pathlib.Path, content: bytes, request: Request) -> Response | None:
    """Write an object where the request's conditions hold; return the refusal where they do not."""
    expected = request.headers.get("if-match")
    if request.headers.get("if-none-match") == "*" and path.exists():
      return _error(412, "PreconditionFailed")
    if expected is not None and (not path.exists() or _etag(path.stat()) != expected):
      return _error(412, "PreconditionFailed")
    path.parent.mkdir(parents=True, exist_ok=True)
    attempt = self._root / _PARTS / uuid.uuid4().hex
    attempt.write_bytes(content)
    attempt.replace(path)
    return None

  def _parts_of(self, upload: str) -> list[pathlib.Path]:
    return sorted((self._root / _PARTS).glob(f"{upload}.*"))

  def _list_uploads(self) -> Response:
    uploads = [
      f"<Upload><Key>{escape(path.read_text())}</Key><UploadId>{path.stem}</UploadId></Upload>"
      for path in sorted((self._root / _PARTS).glob("*.00000"))
    ]
    return _xml("ListMultipartUploadsResult", "<IsTruncated>false</IsTruncated>" + "".join(uploads))


def _list_names(folder: pathlib.Path, prefix: str, delimiter: str) -> list[str]:
  """Return the keys with a prefix, and common prefixes, which end with the delimiter; sorted."""
  top = prefix.rpartition("/")[0]
  names = set()
  for name in _walk(folder / top, f"{top}/" if top else "", deep=not delimiter):
    if name.startswith(prefix):
      names.add(name)
  return sorted(names)


def _walk(folder: pathlib.Path, prefix: str, *, deep: bool) -> Iterator[str]:
  with contextlib.suppress(FileNotFoundError, NotADirectoryError):
    for entry in os.scandir(folder):
      if not entry.is_dir():
        yield prefix + entry.name
      elif deep:
        yield from _walk(folder / entry.name, f"{prefix}{entry.name}/", deep=True)
      else:
        yield f"{prefix}{entry.name}/"


def _etag(status: os.stat_result) -> str:
  return f'"{status.st_mtime_ns:x}-{status.st_ino:x}-{status.st_size:x}"'


def _read(path: pathlib.Path, request: Request) -> Response:
  """Answer GET and HEAD of an object."""
  try:
    file = os.open(path, os.O_RDONLY)
  except (FileNotFoundError, NotADirectoryError):
    return _error(404, "NoSuchKey")
  try:
    status = os.fstat(file)
    if not path.is_file():
      return _error(404, "NoSuchKey")
    etag, size = _etag(status), status.st_size
    if request.headers.get("if-match", etag) not in (etag, etag.strip('"'), "*"):
      return _error(412, "PreconditionFailed")
    headers = {"ETag": etag, "Accept-Ranges": "bytes", "Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT"}
    if request.method == "HEAD":
      return Response(200, headers, length=size)
    match = _RANGE.match(request.headers.get("range", ""))
    if not match:
      return Response(200, headers, os.pread(file, size, 0))
    first, last = match.groups()
    start = int(first) if first else max(size - int(last), 0)
    stop = min(int(last) + 1, size) if first and last else size
    if start >= stop:
      return _error(416, "InvalidRange")
    headers["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
    return Response(206, headers, os.pread(file, stop - start, start))
  finally:
    os.close(file)


def _xml(name: str, content: str) -> Response:
  text = f'<?xml version="1.0" encoding="UTF-8"?>\n<{name}>{content}</{name}>'
  return Response(200, {"Content-Type": "application/xml"}, text.encode())


def _error(status: int, code: str) -> Response:
  text = f"<Error><Code>{code}</Code><Message>{code}</Message></Error>"
  return Response(status, {"Content-Type": "application/xml"}, text.encode())


def kind_of(request: Request) -> str:
  """Return the kind that a request is counted under.

  >>> kind_of(Request("GET", "/bucket?list-type=2", {}, b"")), kind_of(Request("GET", "/bucket/key", {}, b""))
  ('LIST', 'GET')
  """
  is_bucket = not request.path.strip("/").partition("/")[2]
  return "LIST" if is_bucket and request.method == "GET" else request.method


async def serve(root: pathlib.Path, *, latency_seconds: float) -> None:
  """Serve a folder on a free port of loopback, and print the port."""
  store, counts = Store(root), collections.Counter[str]()
  sent_bytes = 0

  async def answer_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    nonlocal sent_bytes
    with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
      while (request := await read_request(reader)) is not None:
        if request.path == "/_requests":
          response = Response(200, {}, json.dumps({**counts, "bytes": sent_bytes}).encode())
          if request.method == "DELETE":
            counts.clear()
            sent_bytes = 0
        else:
          counts[kind_of(request)] += 1
          if latency_seconds:
            await asyncio.sleep(latency_seconds)
          response = store.answer(request)
          sent_bytes += len(response.body)
        writer.write(response.head())
        writer.write(response.body)
        await writer.drain()
    writer.close()

  server = await asyncio.start_server(answer_connection, "127.0.0.1", 0, limit=1 << 20, backlog=4096)
  print(server.sockets[0].getsockname()[1], flush=True)
  await wait_for_end_of_stdin()


def main() -> None:
  """Serve until stdin ends."""
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("root", type=pathlib.Path)
  parser.add_argument("--latency_seconds", type=float, default=0)
  options = parser.parse_args()
  asyncio.run(serve(options.root, latency_seconds=options.latency_seconds))


if __name__ == "__main__":
  main()
