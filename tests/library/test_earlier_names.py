"""Public names of version 0.1 have their earlier modules in descriptions, and load from its pickles."""

import importlib
import types

import pytest

import anystep
from anystep.transforms.identity import describe

# By the module of version 0.1, the public names that it defined.
EARLIER = {
  "anystep.cache": ["Cache", "open_cache"],
  "anystep.converters": [
    *("DecoderConverter", "EncoderConverter", "EncoderDecoderConverter", "FeatureConverter", "LMConverter"),
    *("MaxTextConverter", "PassThroughConverter", "PrefixLMConverter"),
  ],
  "anystep.digest": ["batch_digest", "row_digests"],
  "anystep.epochs": ["EpochPolicy"],
  "anystep.errors": ["AnystepError", "ExitCode"],
  "anystep.examples": ["Ragged"],
  "anystep.mixing": ["Mixing"],
  "anystep.packing": ["PackingPolicy"],
  "anystep.permutation": ["Permutation"],
  "anystep.plan": ["Plan"],
  "anystep.planned_task": ["PlannedTask"],
  "anystep.python_transforms": ["Filter", "Map", "MapBatch", "RandomMap"],
  "anystep.read_pool": ["ReadPool"],
  "anystep.segments": ["Segment"],
  "anystep.stream": ["Stream", "open_stream"],
  "anystep.tasks.deterministic_task": ["DeterministicMixture", "DeterministicTask"],
  "anystep.tombstones": ["TombstoneList"],
  "anystep.transforms": ["Chain", "Records", "Transform"],
}
NAMES = [(module, name) for module, names in EARLIER.items() for name in names]


def test_every_public_name_is_listed():
  newer = {"DiskCache", "FetchBudget"}
  not_public = {"Chain", "PlannedTask", "Ragged", "Segment"}
  assert {name for _, name in NAMES} - not_public == {*anystep.__all__} - newer


@pytest.mark.parametrize(("module", "name"), NAMES)
def test_a_public_name_keeps_its_earlier_module(module, name):
  value = getattr(importlib.import_module(module), name)
  described = describe(value)
  if isinstance(value, types.FunctionType):
    described = described["function"]
  assert described == f"{module}.{name}"
  assert value is getattr(anystep, name, value)
