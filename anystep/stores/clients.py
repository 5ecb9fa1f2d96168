"""Clients of stores, one for each bucket and process, with the credentials that the platform's tools use."""

from __future__ import annotations

import datetime
import errno
import functools
import importlib
import importlib.util
import os
from collections.abc import Callable
from typing import Any

from anystep.errors import AnystepError, ExitCode
from anystep.forks import UnforkableLibrary
from anystep.stores.addresses import Address, parse_address

# Under these times the library repeats a request by itself; `failures.retry` bounds them all together.
_RETRIES = {"max_retries": 6, "retry_timeout": datetime.timedelta(seconds=60)}
_TIMES = {"connect_timeout": "10s", "read_timeout": "30s", "timeout": "10m"}
# Credentials are asked for again after this time: what rotates is taken up, and finding them is not cheap.
_CREDENTIALS_LIFETIME = datetime.timedelta(minutes=5)
_PACKAGES = ("botocore", "google.cloud.storage", "obstore")
# The project that pays, where a bucket's requester does.
_PAYING_PROJECT = "GOOGLE_CLOUD_QUOTA_PROJECT"
# The clients' threads do not survive a fork.
_LIBRARY = UnforkableLibrary("object stores")


def are_installed() -> bool:
  """Return whether the packages for all stores are installed."""
  try:
    return all(importlib.util.find_spec(name) for name in _PACKAGES)
  except ModuleNotFoundError:
    return False


def check_store(path: str | os.PathLike[str]) -> Address:
  """Return the address that a path names, of a store that can be used here.

  Raises:
    AnystepError: 78 `store_unsupported` for another store, and where the packages are not installed.
  """
  address = parse_address(path)
  if not are_installed():
    raise _make_package_error(address, "one of them is missing")
  return address


def obstore() -> Any:
  """Return the library that reads both stores and writes S3.

  Raises:
    AnystepError: 78 `store_unsupported` where it is not installed.
  """
  return _import("obstore", "a path on a store")


def open_bucket(address: Address) -> Any:
  """Return obstore's client of an address's bucket.

  Raises:
    AnystepError: 78 `store_unsupported` where the packages are not installed; 78 `forked_process`.
  """
  _LIBRARY.use("use stores only after the fork", path=address)
  return _open_bucket(address.scheme, address.bucket, _find_endpoint(address.scheme))


def open_google_bucket(address: Address) -> Any:
  """Return google-cloud-storage's client of an address's bucket, which writes."""
  _LIBRARY.use("use stores only after the fork", path=address)
  return _open_google_bucket(address.bucket, _find_endpoint(address.scheme))


def open_s3_client(address: Address) -> Any:
  """Return botocore's client, which lists and removes unfinished uploads."""
  return _open_s3_client(_find_endpoint(address.scheme))


def _import(name: str, address: str) -> Any:
  try:
    return importlib.import_module(name)
  except ModuleNotFoundError as error:
    raise _make_package_error(address, str(error)) from error


def _make_package_error(address: object, missing: str) -> AnystepError:
  return AnystepError(
    ExitCode.CONFIG,
    "store_unsupported",
    expected="the packages for gs:// and s3://",
    got=f"{address}, and {missing}",
    fix="pip install 'anystep[stores]'",
  )


@functools.cache
def _open_bucket(scheme: str, bucket: str, endpoint: str | None) -> Any:
  open_store = _open_s3_store if scheme == "s3" else _open_google_store
  options = {**_TIMES, "allow_http": bool(endpoint and endpoint.startswith("http:"))}
  return open_store(bucket, endpoint, retry_config=_RETRIES, client_options=options)


def _open_s3_store(bucket: str, endpoint: str | None, **options: Any) -> Any:
  address = f"s3://{bucket}"
  session = _open_s3_session(address)
  credentials = _try_credentials(session.get_credentials, address)

  def find_credentials() -> dict[str, Any]:
    frozen = credentials.get_frozen_credentials()
    return {
      "access_key_id": frozen.access_key,
      "secret_access_key": frozen.secret_key,
      "token": frozen.token,
      "expires_at": datetime.datetime.now(datetime.UTC) + _CREDENTIALS_LIFETIME,
    }

  if credentials is not None:
    _try_credentials(find_credentials, address)
  signs = credentials is not None and os.environ.get("AWS_SKIP_SIGNATURE", "").lower() not in ("1", "true")
  return _import("obstore.store", address).S3Store(
    bucket,
    region=_find_region(session),
    **({"endpoint": endpoint} if endpoint else {}),
    **({"credential_provider": find_credentials} if signs else {"skip_signature": True}),
    **options,
  )


def _open_google_store(bucket: str, endpoint: str | None, **options: Any) -> Any:
  address = f"gs://{bucket}"
  credentials = _find_google_credentials(address)

  def find_token() -> dict[str, Any]:
    if not credentials.valid:
      credentials.refresh(_import("google.auth.transport.requests", address).Request())
    expires_at = credentials.expiry and credentials.expiry.replace(tzinfo=datetime.UTC)
    return {"token": credentials.token, "expires_at": expires_at}

  if credentials is not None:
    _try_credentials(find_token, address)
  if project := os.environ.get(_PAYING_PROJECT):
    options["client_options"]["default_headers"] = {"x-goog-user-project": project}
  return _import("obstore.store", address).GCSStore(
    bucket,
    **({"base_url": endpoint} if endpoint else {}),
    **({"skip_signature": True} if credentials is None else {"credential_provider": find_token}),
    **options,
  )


def _try_credentials(find: Callable[[], Any], address: str) -> Any:
  """Find credentials where their failure can be told: the library takes it for the store's silence."""
  try:
    return find()
  except Exception as error:
    # Its type alone: the text may hold what is secret.
    raise PermissionError(errno.EACCES, f"no valid credentials ({type(error).__name__})", address) from None


@functools.cache
def _open_google_bucket(bucket: str, endpoint: str | None) -> Any:
  address = f"gs://{bucket}"
  credentials = _find_google_credentials(address)
  if credentials is None:
    credentials = _import("google.auth.credentials", address).AnonymousCredentials()
  client = _import("google.cloud.storage", address).Client(
    # The client looks for a project where none is given, though only new buckets need one.
    project="none",
    credentials=credentials,
    client_options={"api_endpoint": endpoint} if endpoint else None,
  )
  return client.bucket(bucket, user_project=os.environ.get(_PAYING_PROJECT))


@functools.cache
def _open_s3_client(endpoint: str | None) -> Any:
  session = _open_s3_session("s3://")
  config = _import("botocore.config", "s3://").Config(
    connect_timeout=10, read_timeout=30, retries={"mode": "standard", "max_attempts": 6}
  )
  return session.create_client("s3", endpoint_url=endpoint, region_name=_find_region(session), config=config)


def _open_s3_session(address: str) -> Any:
  return _import("botocore.session", address).get_session()


def _find_region(session: Any) -> str:
  return session.get_config_variable("region") or os.environ.get("AWS_REGION") or "us-east-1"


def _find_endpoint(scheme: str) -> str | None:
  """Return the server's address where it is not the store's own, as the platforms' tools find it."""
  if scheme == "s3":
    return os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or None
  host = os.environ.get("STORAGE_EMULATOR_HOST")
  return (host if "://" in host else f"http://{host}") if host else None


def _find_google_credentials(address: str) -> Any:
  """Return the application default credentials; None for a test server, and where there are none."""
  auth = _import("google.auth", address)
  if _find_endpoint("gs"):
    return None
  try:
    scope = "https://www.googleapis.com/auth/devstorage.read_write"
    return auth.default(scopes=[scope])[0]
  except auth.exceptions.DefaultCredentialsError:
    return None
