"""Addresses on object stores: scheme, bucket and key."""

from __future__ import annotations

import os
from typing import NamedTuple

from anystep.errors import AnystepError, ExitCode

SCHEMES = ("gs", "s3")


class Address(NamedTuple):
  """Address of an object, or of a directory: all objects whose keys begin with its key and a slash.

  Attributes:
    scheme: `gs` or `s3`.
    bucket: the bucket's name.
    key: path within the bucket, without a slash at either end; empty for the bucket itself.

  >>> parse_address("s3://bucket/caches/train/")
  Address(scheme='s3', bucket='bucket', key='caches/train')
  >>> str(parse_address("gs://bucket"))
  'gs://bucket'
  """

  scheme: str
  bucket: str
  key: str

  def __str__(self) -> str:
    return f"{self.scheme}://{self.bucket}" + (f"/{self.key}" if self.key else "")


def is_remote(path: str | os.PathLike[str]) -> bool:
  """Return whether a path is on an object store.

  >>> is_remote("s3://bucket/cache"), is_remote("/data/cache")
  (True, False)
  """
  return "://" in str(path)


def parse_address(path: str | os.PathLike[str]) -> Address:
  """Return the address that a path names.

  Raises:
    AnystepError: 78 `store_unsupported` for any other store, and for a path without a bucket.
  """
  scheme, _, rest = os.fspath(path).partition("://")
  bucket, _, key = rest.partition("/")
  if scheme not in SCHEMES or not bucket:
    raise AnystepError(
      ExitCode.CONFIG,
      "store_unsupported",
      expected="gs://BUCKET/… or s3://BUCKET/…",
      got=path,
      fix="name a bucket on one of these stores, or mount the store and name the directory",
    )
  return Address(scheme, bucket, key.strip("/"))
