"""A converter's name and arguments go into a file and come back; other files are refused."""

import json

import numpy as np
import pytest

from anystep.features.converter_names import (
  CONVERTERS,
  converter_from_json,
  converter_to_json,
  name_of,
  task_feature_of,
)
from anystep.features.converters import (
  DecoderConverter,
  EncoderConverter,
  EncoderDecoderConverter,
  LMConverter,
  MaxTextConverter,
  PassThroughConverter,
  PrefixLMConverter,
)
from anystep.features.ragged import Ragged

EXAMPLES = [
  EncoderDecoderConverter(bos_id=3),
  DecoderConverter(loss_on_targets_only=False, bos_id=2),
  PrefixLMConverter(loss_on_targets_only=False, bos_id=9),
  LMConverter(bos_id=7),
  EncoderConverter(mask_id=6),
  MaxTextConverter(),
  PassThroughConverter(),
]
BATCH = {
  "inputs": Ragged(np.array([5, 6, 6, 8], np.int32), np.array([3, 1])),
  "targets": Ragged(np.array([9, 7], np.int32), np.array([1, 1])),
}


class MyConverter(EncoderDecoderConverter):
  """Another one: it may convert otherwise."""


@pytest.mark.parametrize("converter", EXAMPLES, ids=name_of)
@pytest.mark.parametrize("counts", [None, np.array([2])], ids=["unpacked", "packed"])
def test_a_converter_that_comes_back_converts_as_before(converter, counts):
  again = converter_from_json(json.loads(json.dumps(converter_to_json(converter))))
  lengths = {"inputs": 5, "targets": 4}
  rows, rows_again = converter(BATCH, lengths, counts), again(BATCH, lengths, counts)
  assert rows.keys() == rows_again.keys()
  for name, feature in rows.items():
    np.testing.assert_array_equal(feature, rows_again[name])


def test_each_converter_has_a_name():
  assert {name_of(converter) for converter in EXAMPLES} == CONVERTERS.keys()


def test_another_converter_leaves_its_class_alone():
  document = converter_to_json(MyConverter())
  assert document == {"version": 1, "model": None, "class": f"{__name__}.MyConverter"}
  assert converter_from_json(document) is None


@pytest.mark.parametrize(
  "document",
  [
    [],
    {},
    {"version": 2, "model": "lm", "arguments": {"bos_id": 0}},
    {"version": True, "model": "lm", "arguments": {"bos_id": 0}},
    {"version": 1, "model": "LMConverter", "arguments": {"bos_id": 0}},
    {"version": 1, "model": ["lm"], "arguments": {"bos_id": 0}},
    {"version": 1, "model": "lm", "arguments": {}},
    {"version": 1, "model": "lm", "arguments": {"bos_id": 0, "eos_id": 1}},
    {"version": 1, "model": "lm", "arguments": {"bos_id": True}},
    {"version": 1, "model": "lm", "arguments": {"bos_id": 1 << 31}},
    {"version": 1, "model": "lm", "arguments": {"bos_id": -1}},
    {"version": 1, "model": "prefix_lm", "arguments": {"bos_id": 0, "loss_on_targets_only": 1}},
    {"version": 1, "model": None, "class": 3},
    {"version": 1, "model": None},
  ],
  ids=str,
)
def test_another_document_is_refused(document):
  with pytest.raises((ValueError, TypeError, KeyError)):
    converter_from_json(document)


@pytest.mark.parametrize("converter", EXAMPLES, ids=name_of)
def test_features_with_tokens_know_the_tasks_feature(converter):
  rows = converter(BATCH, {"inputs": 5, "targets": 4}, None)
  features = {name: task_feature_of(converter, name) for name in rows}
  tokens = {name for name, feature in features.items() if feature is not None}
  assert tokens == {name for name in rows if name.endswith("_tokens") or name in ("inputs", "targets")}
  assert set(features.values()) <= {"inputs", "targets", None}
  if "encoder_input_tokens" in rows:
    assert features["encoder_input_tokens"] == "inputs"
