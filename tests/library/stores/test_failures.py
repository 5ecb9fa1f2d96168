"""Failures of stores: repeated while they may pass, and then told without credentials."""

import pytest
from store_servers import servers

from anystep.stores import failures
from anystep.stores.failures import ObjectChangedError


class GenericError(Exception):
  """As obstore's."""


GenericError.__module__ = "obstore.exceptions"


def _answer(text):
  """As obstore quotes a store's."""
  return f"Generic S3 error: Error performing GET http://host - Server returned non-2xx status code: {text}"


@pytest.mark.parametrize(
  ("text", "kind", "shown"),
  [
    (
      _answer(f"403 Forbidden: <Error><Code>InvalidAccessKeyId</Code><AWSAccessKeyId>{servers.ACCESS_KEY}<"),
      PermissionError,
      "the store refuses (403 InvalidAccessKeyId)",
    ),
    (
      _answer("400 Bad Request: <Error><Code>NoGood</Code>"),
      OSError,
      "the store failed (400 NoGood)",
    ),
    (_answer("404 Not Found: "), FileNotFoundError, "no such object"),
    (_answer("412 Precondition Failed"), ObjectChangedError, "another one by now"),
    (_answer("503 Slow Down: <Code>SlowDown</Code>"), OSError, "the store failed (503 SlowDown)"),
    (f"error sending request, signed by {servers.ACCESS_KEY}", ConnectionError, "does not answer"),
  ],
)
def test_a_failure_says_the_store_s_answer_and_no_credentials(monkeypatch, text, kind, shown):
  monkeypatch.setattr(failures, "RETRY_SECONDS", 0.3)
  calls = []

  def fail():
    calls.append(text)
    raise GenericError(text)

  with pytest.raises(kind) as caught:
    failures.retry(fail, "s3://bucket/object")
  assert shown in str(caught.value)
  assert caught.value.filename == "s3://bucket/object"
  assert_no_credentials(caught.value)
  assert (len(calls) > 1) == ("503" in text or "sending" in text)


def test_a_store_that_recovers_is_not_an_error():
  answers = iter([GenericError(_answer("503 Slow Down")), GenericError("broken"), b"content"])

  def ask():
    answer = next(answers)
    if isinstance(answer, Exception):
      raise answer
    return answer

  assert failures.retry(ask, "s3://bucket/object") == b"content"


def assert_no_credentials(error):
  told = f"{error} {error!r} {error.__cause__} {error.args}"
  assert servers.ACCESS_KEY not in told
  assert servers.SECRET_KEY not in told
