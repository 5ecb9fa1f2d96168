"""Clients of stores, one for each bucket and process, with the credentials that the platform's tools use."""

from __future__ import annotations

import datetime
import functools
import importlib
import importlib.util
import os
from typing import Any

from anystep.errors import AnystepError, ExitCode
from anystep.forks import UnforkableLibrary
from anystep.stores.addresses import SCHEMES, Address

# Under these times the library repeats a request by itself; `failures.retry` bounds them all together.
_RETRIES = {"max_retries": 6, "retry_timeout": datetime.timedelta(seconds=60)}
_TIMES = {"connect_timeout": "10s", "read_timeout": "30s", "timeout": "10m"}
# Credentials are asked for again after this time: what rotates is taken up, and finding them is not cheap.
_CREDENTIALS_LIFETIME = datetime.timedelta(minutes=5)
_PACKAGES = {"gs": ("obstore", "google.cloud.storage"), "s3": ("obstore", "botocore")}
# The clients' threads do not survive a fork.
_LIBRARY = UnforkableLibrary("object stores")


def are_installed() -> bool:
  """Return whether the packages for all stores are installed."""
  try:
    return all(importlib.util.find_spec(name) for scheme in SCHEMES for name in _PACKAGES[scheme])
  except ModuleNotFoundError:
    return False


def open_bucket(address: Address) -> Any:
  """Return obstore's client of an address's bucket.

  Raises:
    AnystepError: 78 `store_unsupported` where the packages are not installed; 78 `forked_process`.
  """
  _LIBRARY.use("use stores only after the fork", path=address)
  return _open_bucket(address.scheme, address.bucket)


def open_google_bucket(address: Address) -> Any:
  """Return google-cloud-storage's client of an address's bucket, which writes."""
  _LIBRARY.use("use stores only after the fork", path=address)
  return _open_google_bucket(address.bucket)


def open_s3_client(address: Address) -> Any:
  """Return botocore's client, which lists and removes unfinished uploads."""
  return _open_s3_client()


def _import(name: str, address: str) -> Any:
  try:
    return importlib.import_module(name)
  except ModuleNotFoundError as error:
    raise AnystepError(
      ExitCode.CONFIG,
      "store_unsupported",
      expected="the packages for gs:// and s3://",
      got=f"{address}, and {error}",
      fix="pip install 'anystep[stores]'",
    ) from error


@functools.cache
def _open_bucket(scheme: str, bucket: str) -> Any:
  address = f"{scheme}://{bucket}"
  stores = _import("obstore.store", address)
  if scheme == "s3":
    session, endpoint = _s3_session(address), _s3_endpoint()
    credentials = session.get_credentials()

    def find_s3_credentials() -> dict[str, Any]:
      frozen = credentials.get_frozen_credentials()
      return {
        "access_key_id": frozen.access_key,
        "secret_access_key": frozen.secret_key,
        "token": frozen.token,
        "expires_at": datetime.datetime.now(datetime.UTC) + _CREDENTIALS_LIFETIME,
      }

    signs = credentials is not None and not _is_true("AWS_SKIP_SIGNATURE")
    return stores.S3Store(
      bucket,
      region=session.get_config_variable("region") or "us-east-1",
      **({"endpoint": endpoint} if endpoint else {}),
      **({"credential_provider": find_s3_credentials} if signs else {"skip_signature": True}),
      client_options={**_TIMES, "allow_http": bool(endpoint and endpoint.startswith("http:"))},
      retry_config=_RETRIES,
    )
  endpoint, google = _google_endpoint(), _google_credentials(address)

  def find_token() -> dict[str, Any]:
    if google is None:
      return {"token": "", "expires_at": None}
    if not google.valid:
      google.refresh(_import("google.auth.transport.requests", address).Request())
    expires_at = google.expiry and google.expiry.replace(tzinfo=datetime.UTC)
    return {"token": google.token, "expires_at": expires_at}

  project = os.environ.get("GOOGLE_CLOUD_QUOTA_PROJECT")
  options = {**_TIMES, "allow_http": bool(endpoint and endpoint.startswith("http:"))}
  if project:
    options["default_headers"] = {"x-goog-user-project": project}
  return stores.GCSStore(
    bucket,
    **({"base_url": endpoint} if endpoint else {}),
    **({"skip_signature": True} if google is None else {"credential_provider": find_token}),
    client_options=options,
    retry_config=_RETRIES,
  )


@functools.cache
def _open_google_bucket(bucket: str) -> Any:
  address = f"gs://{bucket}"
  storage = _import("google.cloud.storage", address)
  credentials = _google_credentials(address)
  if credentials is None:
    credentials = _import("google.auth.credentials", address).AnonymousCredentials()
  # A project is for making buckets alone, and the client looks for one where none is given.
  client = storage.Client(project="none", credentials=credentials)
  return client.bucket(bucket, user_project=os.environ.get("GOOGLE_CLOUD_QUOTA_PROJECT"))


@functools.cache
def _open_s3_client() -> Any:
  session = _s3_session("s3://")
  return session.create_client(
    "s3",
    endpoint_url=_s3_endpoint(),
    region_name=session.get_config_variable("region") or "us-east-1",
    config=_import("botocore.config", "s3://").Config(
      connect_timeout=10, read_timeout=30, retries={"mode": "standard", "max_attempts": 6}
    ),
  )


def _s3_session(address: str) -> Any:
  return _import("botocore.session", address).get_session()


def _s3_endpoint() -> str | None:
  return os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")


def _google_endpoint() -> str | None:
  host = os.environ.get("STORAGE_EMULATOR_HOST")
  return host and (host if "://" in host else f"http://{host}")


def _google_credentials(address: str) -> Any:
  """Return the application default credentials; None for a test server, and where there are none."""
  auth = _import("google.auth", address)
  if _google_endpoint():
    return None
  try:
    scope = "https://www.googleapis.com/auth/devstorage.read_write"
    return auth.default(scopes=[scope])[0]
  except auth.exceptions.DefaultCredentialsError:
    return None


def _is_true(variable: str) -> bool:
  return os.environ.get(variable, "").lower() in ("1", "true", "yes")
