"""Stores that cannot be used here: missing packages, forks, other stores."""

import os
import sys

import pytest
from etils import epath

from anystep.errors import AnystepError
from anystep.stores import clients, objects
from anystep.stores.addresses import parse_address


@pytest.mark.parametrize("path", ["ftp://host/file", "s3://", "s3:///key", "az://bucket/key"])
def test_other_stores_are_refused(path):
  with pytest.raises(AnystepError) as caught:
    clients.check_store(path)
  assert (caught.value.code, caught.value.kind) == (78, "store_unsupported")


def test_missing_packages_are_named_with_what_installs_them(monkeypatch):
  monkeypatch.setattr(clients, "_PACKAGES", ("obstore", "no_such_package"))
  with pytest.raises(AnystepError) as caught:
    clients.check_store("s3://bucket/cache")
  assert (caught.value.code, caught.value.kind) == (78, "store_unsupported")
  assert caught.value.fix == "pip install 'anystep[stores]'"
  monkeypatch.setitem(sys.modules, "obstore", None)
  with pytest.raises(AnystepError) as caught:
    objects.head(parse_address("s3://bucket-of-a-test/object"))
  assert caught.value.kind == "store_unsupported"


def test_credentials_that_cannot_be_had_are_told_by_their_type_alone(monkeypatch, tmp_path):
  (tmp_path / "config").write_text("[profile broken]\ncredential_process = /bin/false secret-of-a-test\n")
  for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
    monkeypatch.delenv(name, raising=False)
  monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
  monkeypatch.setenv("AWS_PROFILE", "broken")
  with pytest.raises(PermissionError) as caught:
    objects.head(parse_address("s3://bucket-without-credentials/object"))
  assert "no valid credentials (CredentialRetrievalError)" in str(caught.value)
  assert "secret" not in repr(caught.value)


def test_a_fork_of_a_process_that_used_stores_is_refused(folder):
  path = epath.Path(folder) / "file"
  path.write_bytes(b"content")
  reader, writer = os.pipe()
  pid = os.fork()
  if pid == 0:
    try:
      path.read_bytes()
    except AnystepError as error:
      os.write(writer, error.kind.encode())
    finally:
      os._exit(0)
  os.close(writer)
  assert os.read(reader, 100) == b"forked_process"
  os.waitpid(pid, 0)
