"""What files and callers ask for beyond all use is refused by name, before anything is made of it."""

import copy
import hashlib
import json
import os
import random

import caches
import numpy as np
import pytest

from anystep.caches.cache import open_cache
from anystep.caches.read_pool import ReadPool
from anystep.errors import AnystepError
from anystep.features.converters import PassThroughConverter
from anystep.features.feature import Feature
from anystep.files.json_files import canonical_json
from anystep.limits import MAX_BATCH_ROWS, MAX_COUNT, is_count, is_name, is_number, is_text
from anystep.order.mixing import exact_share
from anystep.plans.plan import Plan
from anystep.plans.tombstones import TombstoneList
from anystep.streams.stream import open_stream

LENGTHS = {"inputs": 5, "targets": 4}


def nested(depth):
  value = []
  for _ in range(depth - 1):
    value = [value]
  return value


WRONG = [
  *(None, True, False, 0, 1, -1, 3.5, 1e300, "", "x", "a\0b", "../x", "\ud800", "9" * 5000),
  *([], {}, [[]], [None], ["x"], {"a": {}}, nested(150)),
  *(10**12, 2**31, 2**62, 2**63, 2**64, 10**400),
]


def places(document, at=()):
  """Every place of a JSON document."""
  yield at
  items = document.items() if isinstance(document, dict) else ()
  if isinstance(document, list):
    items = enumerate(document)
  for key, value in items:
    yield from places(value, (*at, key))


def mutants(document, *, seed, share):
  """Copies with one value replaced by a wrong one, a drawn share of all there are; and with one left out."""
  draw = random.Random(seed)
  for at in places(document):
    for value in WRONG:
      if draw.random() < share:
        yield (at, value), replaced(document, at, value)
    if at:
      left_out = copy.deepcopy(document)
      del at_place(left_out, at[:-1])[at[-1]]
      yield (at, "left out"), left_out


def at_place(document, at):
  for key in at:
    document = document[key]
  return document


def replaced(document, at, value):
  if not at:
    return value
  document = copy.deepcopy(document)
  at_place(document, at[:-1])[at[-1]] = value
  return document


def refusals(tries, use):
  """How many of the tries are refused, each by an error of ours; any other fails the test, named."""
  refused = harmless = 0
  for what, document in tries:
    try:
      use(document)
      harmless += 1
    except AnystepError:
      refused += 1
    except Exception as error:
      error.add_note(f"where {what[0]} is {what[1]!r:.80}")
      raise
  return refused, harmless


def signed_again(document):
  """The text of a manifest whose own sha256 of the fingerprint is right."""
  try:
    reader = document["fingerprint"]["reader"]
    document["fingerprint"]["reader_sha256"] = hashlib.sha256(canonical_json(reader).encode()).hexdigest()
  except (KeyError, TypeError, ValueError):
    pass
  return json.dumps(document, indent=1, sort_keys=True) + "\n"


@pytest.mark.parametrize("layout", ["preshuffled", "tfrecord", "as_is"])
def test_a_manifest_with_a_wrong_value_anywhere_is_read_or_refused(tmp_path, layout):
  make = {
    "preshuffled": lambda: caches.build(tmp_path, num_examples=20, num_shards=2),
    "tfrecord": lambda: caches.build(tmp_path, num_examples=20, num_shards=2, container="tfrecord"),
    "as_is": lambda: caches.build_as_is(tmp_path, shard_sizes=(3, 4)),
  }
  built = make[layout]()

  def use(document):
    caches.sign(built.directory, "train", signed_again(document))
    cache = open_cache(built.root, "demo", "train", pool=ReadPool())
    plan = Plan.start(cache, batch_size=4, feature_lengths=LENGTHS)
    with open_stream(plan, built.root, feature_converter=PassThroughConverter()) as stream:
      next(stream)
    cache.source_of(np.arange(min(len(cache), 3)))
    cache.verify()

  refused, harmless = refusals(mutants(built.manifest, seed=layout, share=0.04), use)
  assert refused > 100
  assert harmless < refused


def test_a_plan_with_a_wrong_value_anywhere_is_read_or_refused(tmp_path, own_cache):
  plan = Plan.start(own_cache.open(), batch_size=8, feature_lengths=LENGTHS, num_epochs=3)
  plan = plan.change(3, batch_size=12).tombstone(4, [TombstoneList.of(own_cache.open(), [1, 5])])

  def use(document):
    (tmp_path / "plan.json").write_text(json.dumps(document))
    read = Plan.read(tmp_path / "plan.json", fix="")
    with open_stream(read, own_cache.root, feature_converter=PassThroughConverter()) as stream:
      next(stream)

  refused, harmless = refusals(mutants(json.loads(plan.to_json()), seed=0, share=0.2), use)
  assert refused > 200
  assert harmless < refused


def test_a_list_of_tombstones_with_a_wrong_value_anywhere_is_read_or_refused(tmp_path, own_cache):
  plan = Plan.start(own_cache.open(), batch_size=8)
  listed = TombstoneList.of(own_cache.open(), [1, 5])

  def use(document):
    (tmp_path / "list.json").write_text(json.dumps(document))
    plan.tombstone(2, [TombstoneList.read(tmp_path / "list.json")])

  refused, _ = refusals(mutants(json.loads(listed.to_json()), seed=0, share=1), use)
  assert refused > 100


def test_a_unit_table_with_a_wrong_value_anywhere_is_read_or_refused(own_cache):
  plan = Plan.start(own_cache.open(), batch_size=8, feature_lengths=LENGTHS, packing="greedy")
  (header,) = own_cache.directory.glob("units/*/units.json")
  planned = json.loads(plan.to_json())

  def use(document):
    header.write_text(json.dumps(document))
    planned["tasks"]["demo"]["unit_table"] = hashlib.sha256(header.read_bytes()).hexdigest()
    read = Plan.from_json(json.dumps(planned))
    read = read.on_caches({"demo": own_cache.open()})
    read.unit_tables["demo"].members(0, read.batch(0).place[:1])

  refused, harmless = refusals(mutants(json.loads(header.read_text()), seed=0, share=0.2), use)
  assert refused > 150
  assert harmless < refused


@pytest.mark.parametrize(
  "text",
  [
    *("1e5000", "1e99999999", "1E+99999999", "1e-5000", "1e-99999999", "1e9_999_999_9", "1e401"),
    *("9" * 1001, "1/" + "9" * 5000, "1e" + "9" * 5000),
    "\u0661e\u0669\u0669\u0669\u0669\u0669\u0669\u0669",
  ],
)
def test_a_rate_of_a_huge_exponent_is_refused_by_its_text(text):
  with pytest.raises(AnystepError) as refused:
    exact_share("a", text)
  assert (refused.value.code, refused.value.kind) == (78, "rates")
  assert "exponent" in refused.value.fix


@pytest.mark.parametrize("text", ["1e400", "1e-400", "5e-324", "1.7976931348623157e308", "9" * 1000])
def test_every_rate_that_floats_have_is_read(text):
  assert exact_share("a", text) > 0


@pytest.mark.parametrize("batch_size", [MAX_BATCH_ROWS + 1, 10**12, 2**63, 10**30])
def test_a_batch_of_more_rows_than_any_is_refused_before_it_is_made(own_cache, batch_size):
  with pytest.raises(AnystepError) as refused:
    Plan.start(own_cache.open(), batch_size=batch_size)
  assert (refused.value.code, refused.value.kind) == (78, "batch_size")
  assert "16,777,216" in refused.value.fields["expected"]


def test_the_lanes_of_a_large_batch_are_looked_up_at_once(own_cache):
  plan = Plan.start(own_cache.open(), batch_size=MAX_BATCH_ROWS, lanes=1 << 20)
  assert plan.segments[0].lanes == 1 << 20


@pytest.mark.parametrize(
  ("value", "right"), [(0, True), (MAX_COUNT, True), (MAX_COUNT + 1, False), (-1, False), (True, False)]
)
def test_a_count_is_a_whole_number_within_its_limits(value, right):
  assert is_count(value) is right


@pytest.mark.parametrize(
  ("value", "text", "name"),
  [
    *[("a b", True, True), ("é\ue000", True, True), ("", True, True)],
    *[("a\nb", True, False), ("a\0", True, False), ("a\x85", True, False), ("a\u2028", True, False)],
    *[("\ud800", False, False), (3, False, False), (None, False, False)],
  ],
)
def test_a_name_is_a_text_without_control_characters(value, text, name):
  assert (is_text(value), is_name(value)) == (text, name)


@pytest.mark.parametrize(
  ("dtype", "shape"),
  [
    *[("object", ()), ("V1000000000", ()), ("M8[s]", ()), ("f4,i4", ()), ("", ()), (None, ()), (3, ())],
    *[([], ()), ("int32", (2**31,)), ("int32", (None, 2**16, 2**16)), ("int32", (1,) * 33)],
  ],
)
def test_a_feature_that_no_record_holds_is_refused(dtype, shape):
  with pytest.raises(ValueError, match=r"wrong dtype|too large a shape"):
    Feature(dtype=dtype, shape=shape)


@pytest.mark.parametrize("name", ["manifest.train.json", "COMPLETED"])
@pytest.mark.parametrize("put", [os.mkfifo, os.mkdir], ids=["fifo", "directory"])
def test_a_cache_whose_files_are_none_is_refused(own_cache, name, put):
  path = own_cache.directory / name
  path.unlink()
  put(path)
  with pytest.raises(AnystepError) as refused:
    own_cache.open()
  assert refused.value.code == 65
  assert str(refused.value.fields["path"]) == str(path)


def test_a_shard_that_a_fifo_replaced_is_not_waited_for(own_cache):
  cache = own_cache.open()
  path = own_cache.directory / cache.manifest.record_files[0].name
  path.unlink()
  os.mkfifo(path)
  with pytest.raises(AnystepError) as refused:
    cache[0]
  assert refused.value.code == 65


@pytest.mark.parametrize(
  ("value", "right"),
  [
    *[(0, True), (-0.5, True), (1.5, True), (np.float64(1.0), True), (2, False), (float("nan"), False)],
    *[(float("inf"), False), (True, False), (None, False), ("1", False), ([1], False)],
  ],
)
def test_numbers_are_ints_and_floats_within_limits(value, right):
  assert is_number(value, least=-0.5, most=1.5) is right
