"""Token ids and other values as text that a person, a terminal and a JSON parser can take."""

import doctest
import json

import numpy as np
import pytest
import seqio

from anystep.features.ragged import Ragged
from anystep.tasks.data_program import stats_page
from anystep.tasks.vocabularies import decoding
from anystep.tasks.vocabularies.decoding import as_text, decode_readable, describe_feature, escape_unprintable

VOCABULARY = seqio.ByteVocabulary(extra_ids=125)


@pytest.mark.parametrize("module", [decoding, stats_page], ids=lambda module: module.__name__)
def test_the_examples_of_a_module_are_true(module):
  results = doctest.testmod(module)
  assert (results.failed, results.attempted > 0) == (0, True)


def test_token_ids_read_as_text_with_sentinels_and_end():
  ids = [*VOCABULARY.encode("a<b"), 383, *VOCABULARY.encode("é"), 259, 1, 0, 0]
  assert decode_readable(np.array(ids), VOCABULARY) == "a<b<0>é<124></s>"
  assert decode_readable(np.array([0, 0]), VOCABULARY) == ""
  assert decode_readable(np.array([], np.int32), VOCABULARY) == ""


def test_padding_between_tokens_is_shown():
  ids = [*VOCABULARY.encode("a"), 0, *VOCABULARY.encode("b"), 0]
  assert decode_readable(np.array(ids), VOCABULARY) == "a<pad>b"


def test_letters_that_a_sentinel_cuts_are_left_out():
  first, second = VOCABULARY.encode("é")
  assert decode_readable(np.array([first, 383, second]), VOCABULARY) == "<0>"


@pytest.mark.parametrize(
  ("values", "expected"),
  [
    (np.int64(7), {"values": 7}),
    (np.array(b"caf\xc3\xa9", object), {"text": "café"}),
    (np.array(b"\xff", object), {"text": "\\xff"}),
    (np.array([b"a", b"b"], object), {"length": 2, "values": ["a", "b"]}),
    (np.array([3, 4], np.int32), {"length": 2, "values": [3, 4]}),
    (np.zeros((0, 2), np.float32), {"length": 0, "values": []}),
    (np.array([[0.5, 1]], np.float32), {"length": 1, "values": [[0.5, 1.0]]}),
    (np.array([np.nan, np.inf], np.float32), {"length": 2, "values": ["nan", "inf"]}),
    (np.array([True]), {"length": 1, "values": [True]}),
    (Ragged(np.array([1, 2, 3]), np.array([2, 0, 1])), {"length": 3, "values": [[1, 2], [], [3]]}),
    (Ragged(np.ones((2, 2)), np.array([2])), {"length": 1, "values": [[[1.0, 1.0], [1.0, 1.0]]]}),
    (
      Ragged(np.array([b"a", b"\xff"], object), np.array([1, 1])),
      {"length": 2, "values": [["a"], ["\\xff"]]},
    ),
  ],
)
def test_values_are_described_as_json(values, expected):
  found = describe_feature(values if isinstance(values, Ragged) else np.asarray(values))
  assert found == expected
  assert json.loads(json.dumps(found, allow_nan=False)) == expected


def test_only_sequences_of_token_ids_are_decoded():
  ids = np.array(VOCABULARY.encode("ab"), np.int32)
  assert describe_feature(ids, VOCABULARY) == {"length": 2, "text": "ab"}
  assert describe_feature(ids.astype(np.float32), VOCABULARY) == {"length": 2, "values": [100.0, 101.0]}
  assert describe_feature(np.asarray(ids[0]), VOCABULARY) == {"values": 100}
  rows = Ragged(np.concatenate([ids, ids[:1]]), np.array([2, 0, 1]))
  assert describe_feature(rows, VOCABULARY) == {"length": 3, "values": ["ab", "", "a"]}


def test_text_stays_on_its_line_and_commands_nothing():
  assert escape_unprintable("a\nb\x1b[31m é\u2028") == "a\\nb\\x1b[31m é\\u2028"
  assert as_text({"length": 3, "text": "a\n"}) == " (3): a\\n"
  assert as_text({"values": 7}) == ": 7"
