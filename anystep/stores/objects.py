"""Requests to stores, each repeated while its failure may pass."""

from __future__ import annotations

import concurrent.futures
import contextlib
import errno
import functools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from anystep.stores.addresses import Address
from anystep.stores.clients import obstore, open_bucket, open_google_bucket, open_s3_client
from anystep.stores.failures import ObjectChangedError, retry

# Objects that one request to S3 removes; GCS takes a request for each.
_DELETED_AT_ONCE = 1000
# Fewer than the connections that the library keeps.
_DELETING_THREADS = 8


class ObjectStatus(NamedTuple):
  """Properties of an object at one time.

  Attributes:
    size_bytes: its size.
    etag: changes with the content; the same from a listing and from the object itself.
    modified_ns: time of its writing by the store's clock, in nanoseconds since 1970; whole seconds.
    generation: GCS's number of the content; None on S3 and in listings.
  """

  size_bytes: int
  etag: str
  modified_ns: int
  generation: int | None = None


class Listing(NamedTuple):
  """Content of a directory: its objects by name, and the names of directories below, both in order."""

  objects: dict[str, ObjectStatus]
  directories: list[str]


def head(address: Address) -> ObjectStatus:
  """Return an object's status.

  Raises:
    OSError: as `failures.retry`; FileNotFoundError if there is no such object.
  """
  store = open_bucket(address)
  return _parse_status(retry(lambda: obstore().head(store, address.key), address))


def read(address: Address) -> tuple[bytes, ObjectStatus]:
  """Return an object's content and status, which belong together."""
  store = open_bucket(address)

  def get() -> tuple[bytes, ObjectStatus]:
    result = obstore().get(store, address.key)
    return bytes(result.bytes()), _parse_status(result.meta)

  return retry(get, address)


def read_start(address: Address, size: int) -> tuple[bytes, ObjectStatus]:
  """Return the first bytes of an object, at most `size`, and its status."""
  store = open_bucket(address)

  def get() -> tuple[bytes, ObjectStatus]:
    result = obstore().get(store, address.key, options={"range": (0, size)})
    return bytes(result.bytes()), _parse_status(result.meta)

  try:
    return retry(get, address)
  except FileNotFoundError:
    raise
  except OSError:
    # No range can be had of an empty object.
    status = head(address)
    if status.size_bytes:
      raise
    return b"", status


def read_range(address: Address, start: int, stop: int, *, etag: str | None = None) -> bytes:
  """Return bytes [start, stop) of an object, as `view_range`."""
  return bytes(view_range(address, start, stop, etag=etag))


def view_range(address: Address, start: int, stop: int, *, etag: str | None = None) -> memoryview:
  """Return bytes [start, stop) of an object, in the memory that they came in; fewer only at its end.

  Args:
    address: the object's.
    start: the first byte; at most the object's size.
    stop: the end.
    etag: the status that was seen before; None to read whatever content is there.

  Raises:
    OSError: as `failures.retry`; ObjectChangedError where the content has another etag.
  """
  if start >= stop:
    return memoryview(b"")
  store = open_bucket(address)
  options: dict[str, Any] = {"range": (start, stop)}
  if etag is not None:
    options["if_match"] = f'"{etag}"'

  def get() -> memoryview:
    result = obstore().get(store, address.key, options=options)
    # Some servers do not know the condition.
    if etag is not None and _parse_status(result.meta).etag != etag:
      raise ObjectChangedError(errno.ESTALE, "the object is another one by now", str(address))
    return memoryview(result.bytes())

  return retry(get, address)


def put(address: Address, content: bytes) -> None:
  """Write an object whole, in one request."""
  retry(lambda: _put(address, content, None), address)


def put_if_absent(address: Address, content: bytes) -> str:
  """Write an object where there is none; return its version, for `put_if_match`.

  The content must differ from every other writer's: an answer that got lost is recognised by it.

  Raises:
    FileExistsError: if there is one.
  """
  return _put_conditionally(address, content, "")


def put_if_match(address: Address, content: bytes, version: str) -> str:
  """Replace an object that still has a version; return the new version.

  Raises:
    ObjectChangedError: if it has another version, or is gone.
  """
  return _put_conditionally(address, content, version)


def read_version(address: Address) -> tuple[bytes, str]:
  """Return an object's content, and its version for `put_if_match`."""
  content, status = read(address)
  return content, _version_of(status)


def copy(source: Address, target: Address) -> None:
  """Copy an object within its bucket, on the store's side."""
  if source.scheme == "gs":
    bucket = open_google_bucket(source)
    retry(lambda: bucket.copy_blob(bucket.blob(source.key), bucket, target.key), source)
  else:
    store = open_bucket(source)
    retry(lambda: obstore().copy(store, source.key, target.key), source)


def list_directory(address: Address) -> Listing:
  """Return the objects and directories in a directory, with statuses; both empty where there is none."""
  store = open_bucket(address)
  result = retry(lambda: obstore().list_with_delimiter(store, address.key or None), address)
  # The empty object that some tools put in a directory's place has the directory's own path.
  found = [item for item in result["objects"] if item["path"] != address.key]
  objects = {_name(item["path"]): _parse_status(item) for item in found}
  directories = sorted(_name(path) for path in result["common_prefixes"])
  return Listing(dict(sorted(objects.items())), directories)


def list_below(address: Address) -> dict[str, ObjectStatus]:
  """Return the statuses of all objects below a directory, by their paths within it, in order."""
  store, prefix = open_bucket(address), f"{address.key}/" if address.key else ""

  def collect() -> Sequence[Any]:
    return obstore().list(store, address.key or None, chunk_size=1000).collect()

  found = {item["path"][len(prefix) :]: _parse_status(item) for item in retry(collect, address)}
  return dict(sorted(found.items()))


def delete(addresses: Iterable[Address]) -> None:
  """Remove objects of one bucket; those that are not there are not missed."""
  pending = list(addresses)
  if not pending:
    return
  if pending[0].scheme == "gs":
    bucket = open_google_bucket(pending[0])
    with concurrent.futures.ThreadPoolExecutor(_DELETING_THREADS) as threads:
      deletions = [threads.submit(_delete_from_gs, bucket, address) for address in pending]
    for deletion in deletions:
      deletion.result()
    return
  store = open_bucket(pending[0])
  for start in range(0, len(pending), _DELETED_AT_ONCE):
    keys = [address.key for address in pending[start : start + _DELETED_AT_ONCE]]
    retry(functools.partial(obstore().delete, store, keys), pending[start])


def remove_unfinished_uploads(address: Address) -> int:
  """Remove the parts of uploads below a directory that nobody finished; return the number of uploads.

  GCS keeps no such parts: uploads that are not finished cost nothing, and are dropped after a week.
  """
  if address.scheme != "s3":
    return 0
  client = open_s3_client(address)

  def remove() -> int:
    pages = client.get_paginator("list_multipart_uploads").paginate(
      Bucket=address.bucket, Prefix=f"{address.key}/"
    )
    uploads = [upload for page in pages for upload in page.get("Uploads", ())]
    for upload in uploads:
      with contextlib.suppress(client.exceptions.NoSuchUpload):
        client.abort_multipart_upload(Bucket=address.bucket, Key=upload["Key"], UploadId=upload["UploadId"])
    return len(uploads)

  return retry(remove, address)


def _delete_from_gs(bucket: Any, address: Address) -> None:
  with contextlib.suppress(FileNotFoundError):
    retry(lambda: bucket.blob(address.key).delete(retry=None), address)


def _put_conditionally(address: Address, content: bytes, version: str) -> str:
  try:
    return retry(lambda: _put(address, content, version), address)
  except (FileExistsError, ObjectChangedError, FileNotFoundError):
    # The first try may have written it, and its answer got lost.
    with contextlib.suppress(FileNotFoundError):
      present, present_version = read_version(address)
      if present == content:
        return present_version
    if version:
      raise ObjectChangedError(errno.ESTALE, "the object is another one by now", str(address)) from None
    raise FileExistsError(errno.EEXIST, "the object exists", str(address)) from None


def _put(address: Address, content: bytes, version: str | None) -> str:
  """Write in one request; return the new version.

  Args:
    address: the object's.
    content: the bytes.
    version: what must be there: None for anything, an empty string for nothing.
  """
  if address.scheme == "gs":
    # GCS takes conditions only where the whole object comes in one request.
    blob = open_google_bucket(address).blob(address.key)
    generation = None if version is None else int(version or 0)
    blob.upload_from_string(
      content, content_type="application/octet-stream", if_generation_match=generation, retry=None
    )
    return str(blob.generation)
  mode: Any = "overwrite" if version is None else {"e_tag": version} if version else "create"
  result = obstore().put(open_bucket(address), address.key, content, mode=mode, use_multipart=False)
  return result["e_tag"] or ""


def _version_of(status: ObjectStatus) -> str:
  return f'"{status.etag}"' if status.generation is None else str(status.generation)


def _parse_status(meta: Any) -> ObjectStatus:
  version = meta["version"]
  return ObjectStatus(
    size_bytes=meta["size"],
    etag=(meta["e_tag"] or "").strip('"'),
    modified_ns=int(meta["last_modified"].timestamp()) * 10**9,
    generation=int(version) if version and version.isdecimal() else None,
  )


def _name(path: str) -> str:
  return path.rstrip("/").rpartition("/")[2]
