"""The servers that tests of stores run against do what they say."""

import http.client
import json
import urllib.parse
import urllib.request

import pytest
from store_servers import servers
from store_servers.bad_proxy import FAULTS, SLOW_SECONDS

CONTENT = bytes(range(256)) * 40


@pytest.fixture(scope="module")
def upstream(tmp_path_factory):
  root = tmp_path_factory.mktemp("store")
  with servers.range_server(root) as endpoint:
    servers.make_bucket(endpoint, "bucket")
    servers.put_object(endpoint, "bucket", "folder/object", CONTENT)
    yield endpoint


def ask(endpoint, target, *, method="GET", body=None, **headers):
  """One request on a connection of its own: its status, headers and body."""
  connection = http.client.HTTPConnection(urllib.parse.urlsplit(endpoint).netloc, timeout=10)
  try:
    connection.request(
      method, target, body, {name.replace("_", "-"): value for name, value in headers.items()}
    )
    response = connection.getresponse()
    return response.status, dict(response.getheaders()), response.read()
  finally:
    connection.close()


def ask_or_fail(endpoint):
  """Status and body of the object; where the answer breaks off, the error's class alone."""
  try:
    status, _, body = ask(endpoint, "/bucket/folder/object")
  except (ConnectionResetError, http.client.IncompleteRead) as error:
    return (type(error),)
  return status, body


def test_the_range_server_serves_ranges_under_conditions(upstream):
  status, headers, body = ask(upstream, "/bucket/folder/object", Range="bytes=300-9999999")
  assert (status, body, headers["Content-Range"]) == (206, CONTENT[300:], "bytes 300-10239/10240")
  assert (
    ask(upstream, "/bucket/folder/object", Range="bytes=5-6", If_Match=headers["ETag"])[2] == CONTENT[5:7]
  )
  assert ask(upstream, "/bucket/folder/object", Range="bytes=5-6", If_Match='"other"')[0] == 412
  assert ask(upstream, "/bucket/folder/object", Range="bytes=10240-")[0] == 416
  assert ask(upstream, "/bucket/folder/none")[0] == 404
  assert ask(upstream, "/bucket/folder/object", method="PUT", body=b"x", If_None_Match="*")[0] == 412
  assert ask(upstream, "/bucket/folder/object", method="HEAD")[1]["Content-Length"] == "10240"


def test_the_range_server_counts_requests_by_kind(upstream):
  servers.take_requests(upstream)
  ask(upstream, "/bucket/folder/object")
  ask(upstream, "/bucket?list-type=2&prefix=folder/")
  ask(upstream, "/bucket/folder/object", method="HEAD")
  assert servers.take_requests(upstream) | {"bytes": 0} == {"GET": 1, "LIST": 1, "HEAD": 1, "bytes": 0}


@pytest.mark.parametrize("kind", sorted(FAULTS.keys() - {"stale"}))
def test_the_proxy_spoils_as_many_requests_as_it_is_told_to(upstream, kind):
  with servers.bad_proxy(upstream, {kind: 0.2}, seed=1) as endpoint:
    answers = [ask_or_fail(endpoint) for _ in range(20 if kind == "slow" else 40)]
    counts = servers.count_faults(endpoint)
    spoiled = [answer for answer in answers if answer != (200, CONTENT)]
    assert 0 < counts[kind] < len(answers)
    assert len(spoiled) == (0 if kind in ("slow", "latency") else counts[kind])
    errors = {"reset": ConnectionResetError, "truncated": http.client.IncompleteRead}
    assert {answer[0] if kind in errors else str(answer[0]) for answer in spoiled} <= {errors.get(kind, kind)}


def test_a_slow_first_byte_is_late(upstream):
  with servers.bad_proxy(upstream, {"slow": 1.0}) as endpoint, pytest.raises(TimeoutError):
    urllib.request.urlopen(f"{endpoint}/bucket/folder/object", timeout=SLOW_SECONDS / 2)


def test_the_same_seed_draws_the_same_faults(upstream):
  def statuses(seed):
    with servers.bad_proxy(upstream, {"503": 0.1, "429": 0.1}, seed=seed) as endpoint:
      return [ask(endpoint, "/bucket/folder/object")[0] for _ in range(30)]

  assert statuses(3) == statuses(3) != statuses(4)


def test_a_stale_listing_lacks_what_was_put_since(upstream):
  with servers.bad_proxy(upstream, {}) as endpoint:
    listing = "/bucket?list-type=2&prefix=folder/"
    before = ask(endpoint, listing)[2]
    servers.put_object(endpoint, "bucket", "folder/later", b"later")
    after = ask(endpoint, listing)[2]
    servers.set_rates(endpoint, {"stale": 1.0})
    assert b"folder/later" in after
    assert ask(endpoint, listing)[2] == before
    servers.delete_object(endpoint, "bucket", "folder/later")


def test_an_unknown_fault_is_refused(upstream):
  refused = pytest.raises((ConnectionError, http.client.HTTPException))
  with servers.bad_proxy(upstream, {}) as endpoint, refused:
    ask(endpoint, "/_rates", method="PUT", body=json.dumps({"flood": 1}).encode())


def test_servers_end_with_the_block(tmp_path):
  with servers.range_server(tmp_path) as endpoint:
    servers.make_bucket(endpoint, "bucket")
  with pytest.raises(ConnectionRefusedError):
    ask(endpoint, "/bucket")
