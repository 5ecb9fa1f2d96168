"""A row that is taken apart has the tokens of each of its examples, and loses none."""

import numpy as np
import pytest

from anystep.features.converters import (
  DecoderConverter,
  EncoderDecoderConverter,
  LMConverter,
  MaxTextConverter,
  PassThroughConverter,
  PrefixLMConverter,
)
from anystep.features.ragged import Ragged
from anystep.inspection.model_rows import take_apart

LENGTHS = {"inputs": 9, "targets": 8}
COUNTS = np.array([3, 1, 2])
# The second example has no inputs, the fifth holds id 0.
INPUTS = [[5, 6], [], [7], [8, 9, 10], [0, 11], [12]]
TARGETS = [[21], [22, 23], [24], [25], [26, 0, 27], []]


def batch_of(rows_of_inputs, rows_of_targets):
  columns = {"inputs": rows_of_inputs, "targets": rows_of_targets}
  return {
    name: Ragged.of_rows([np.array(row, np.int32) for row in rows], np.dtype(np.int32))
    for name, rows in columns.items()
  }


CONVERTERS = [
  EncoderDecoderConverter(),
  DecoderConverter(),
  PrefixLMConverter(loss_on_targets_only=False),
  LMConverter(bos_id=3),
  MaxTextConverter(),
  PassThroughConverter(),
]


@pytest.mark.parametrize("converter", CONVERTERS, ids=lambda c: type(c).__name__)
def test_a_packed_example_is_that_of_a_row_of_its_own(converter):
  rows = converter(batch_of(INPUTS, TARGETS), LENGTHS, COUNTS)
  number = 0
  for position, count in enumerate(COUNTS.tolist()):
    parts = take_apart(rows, position, count)
    assert (len(parts.examples), parts.rest) == (count, {})
    for example in parts.examples:
      alone = converter(batch_of([INPUTS[number]], [TARGETS[number]]), LENGTHS, np.array([1]))
      (expected,) = take_apart(alone, 0, 1).examples
      assert example.keys() == expected.keys() == rows.keys()
      for name, values in expected.items():
        is_numbering = name.endswith(("_segment_ids", "_segmentation"))
        if is_numbering:
          assert len(example[name]) == len(values)
        else:
          np.testing.assert_array_equal(example[name], values)
      number += 1
  assert number == len(INPUTS)


@pytest.mark.parametrize("converter", CONVERTERS, ids=lambda c: type(c).__name__)
def test_parts_and_padding_are_the_whole_row(converter):
  rows = converter(batch_of(INPUTS, TARGETS), LENGTHS, COUNTS)
  for position, count in enumerate(COUNTS.tolist()):
    parts = take_apart(rows, position, count)
    for name, feature in rows.items():
      joined = np.concatenate([example[name] for example in parts.examples])
      np.testing.assert_array_equal(feature[position][: len(joined)], joined)
      if not name.endswith("input_tokens") and name != "inputs":
        # A decoder's input after the last example is its beginning.
        assert not feature[position][len(joined) :].any()
    for numbering, (used, total) in parts.used.items():
      assert (used, total) == (np.count_nonzero(rows[numbering][position]), rows[numbering].shape[1])


def test_an_unpacked_row_is_its_examples(capsys):
  rows = {
    "tokens": np.arange(6, dtype=np.int32).reshape(2, 3),
    "number": np.array([7, 8]),
    "text": np.array([b"one", b"two"], object),
    "words": Ragged(np.array([b"a", b"b", b"c"], object), np.array([1, 2])),
  }
  (example,), rest, used = take_apart(rows, 1, None)
  assert (rest, used) == ({}, {})
  assert example["tokens"].tolist() == [3, 4, 5]
  assert (example["number"].shape, example["number"].item()) == ((), 8)
  assert (example["text"].shape, example["text"].item()) == ((), b"two")
  assert example["words"].tolist() == [b"b", b"c"]


def test_what_belongs_to_no_example_of_a_packed_row_is_left_over():
  rows = {
    "decoder_target_tokens": np.array([[4, 5, 0]]),
    "decoder_segment_ids": np.array([[1, 2, 0]]),
    "image": np.zeros((1, 2, 2)),
  }
  parts = take_apart(rows, 0, 2)
  assert [example["decoder_target_tokens"].tolist() for example in parts.examples] == [[4], [5]]
  assert list(parts.rest) == ["image"]
  assert parts.used == {"decoder_segment_ids": (2, 3)}
