"""Requests: conditions, listings, leftovers, and errors that name no credentials."""

import pytest
from store_servers import servers

from anystep.stores import objects
from anystep.stores.addresses import parse_address
from anystep.stores.clients import open_bucket
from anystep.stores.failures import ObjectChangedError


@pytest.fixture
def address(folder):
  return parse_address(f"{folder}/object")


def test_one_of_many_makes_an_object_that_is_absent(address):
  version = objects.put_if_absent(address, b"first")
  with pytest.raises(FileExistsError):
    objects.put_if_absent(address, b"second")
  # As where the answer to the first try got lost.
  assert objects.put_if_absent(address, b"first") == version
  assert objects.read_version(address) == (b"first", version)


def test_an_object_is_replaced_by_who_knows_its_version(address):
  first = objects.put_if_absent(address, b"first")
  second = objects.put_if_match(address, b"second", first)
  with pytest.raises(ObjectChangedError):
    objects.put_if_match(address, b"third", first)
  assert objects.put_if_match(address, b"second", first) == second
  objects.delete([address])
  with pytest.raises(ObjectChangedError):
    objects.put_if_match(address, b"fourth", second)
  assert not objects.list_below(parse_address(str(address).rpartition("/")[0]))


def test_a_range_is_of_the_content_that_was_seen(address):
  objects.put(address, b"0123456789")
  etag = objects.head(address).etag
  assert objects.read_range(address, 2, 5, etag=etag) == b"234"
  assert objects.read_range(address, 8, 50, etag=etag) == b"89"
  assert objects.read_range(address, 5, 5, etag=etag) == b""
  assert objects.list_directory(parse_address(str(address).rpartition("/")[0])).objects["object"].etag == etag
  objects.put(address, b"9876543210")
  with pytest.raises(ObjectChangedError):
    objects.read_range(address, 2, 5, etag=etag)
  assert objects.read_start(address, 3)[0] == b"987"


def test_a_listing_has_more_than_a_page(address):
  names = [f"{number:04d}" for number in range(1005)]
  for name in names:
    objects.put(address._replace(key=f"{address.key}/{name}"), b"")
  assert list(objects.list_directory(address).objects) == names
  assert list(objects.list_below(address)) == names
  objects.delete(address._replace(key=f"{address.key}/{name}") for name in names)
  assert objects.list_directory(address) == ({}, [])


def test_parts_of_uploads_that_nobody_finished_are_removed(address):
  if address.scheme != "s3":
    pytest.skip("GCS keeps no parts")
  import obstore

  upload = obstore.open_writer(open_bucket(address), address.key, buffer_size=5 << 20)
  upload.write(bytes(12 << 20))
  upload.flush()
  parent = address._replace(key=address.key.rpartition("/")[0])
  assert objects.remove_unfinished_uploads(address._replace(key=f"{parent.key}-other")) == 0
  assert objects.remove_unfinished_uploads(parent) == 1
  assert objects.remove_unfinished_uploads(parent) == 0


@pytest.mark.parametrize("ask", [objects.head, objects.read, lambda address: objects.put(address, b"")])
def test_what_is_not_there_is_said_without_credentials(address, ask):
  with pytest.raises(FileNotFoundError) as caught:
    ask(address._replace(bucket="no-such-bucket"))
  assert caught.value.filename == f"{address.scheme}://no-such-bucket/{address.key}"
  assert_no_credentials(caught.value)


def assert_no_credentials(error):
  told = f"{error} {error!r} {error.__cause__} {error.args}"
  assert servers.ACCESS_KEY not in told
  assert servers.SECRET_KEY not in told
