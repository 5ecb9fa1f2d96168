"""The reference program gives every golden value of the specification, and has the properties it promises."""

import hashlib
import itertools
import math
import random
from fractions import Fraction

import pytest

import oracle

PRESHUFFLE_KEYS = oracle.round_keys("preshuffle", "demo", "train", 0)


def text_of(batch, lanes):
  """Rows as the specification prints them: 'c0 b100 | c1 b101', a bar between lanes, '-' for padding."""
  words = ["-" if name is None else f"{name}{unit}" for name, unit in batch]
  width = len(words) // lanes
  return " | ".join(" ".join(words[at : at + width]) for at in range(0, len(words), width))


def segment_of(quotas, *, batch_size, lanes, start_step=0, first_stripe=0, first_units=None):
  tasks = {name: {"quota": a, "first_unit": (first_units or {}).get(name, 0)} for name, a in quotas.items()}
  return {
    "start_step": start_step,
    "batch_size": batch_size,
    "lanes": lanes,
    "first_stripe": first_stripe,
    "tasks": tasks,
  }


# docs/order.md#keys-and-permutations


@pytest.mark.parametrize(
  ("word", "golden"),
  [
    (PRESHUFFLE_KEYS[0], 0xD8BE4386703A9658),
    (oracle.sub_keys(oracle.round_keys("epoch", "demo", "train", 0, 1), 0)[0], 0x32381B9EB97196A9),
  ],
)
def test_keys_are_golden(word, golden):
  assert word == golden


@pytest.mark.parametrize(
  ("n", "golden"),
  [
    (10, "4 8 9 5 6 3 2 0"),
    (17, "11 12 14 6 0 5 16 3"),
    (1000, "609 646 780 570 466 978 134 90"),
    (65537, "4332 4931 9881 17851 42351 37885 50485 50793"),
    (
      10**12,
      (
        "349204661437 429362126463 372122766106 490455811715 "
        "49377363775 484704344346 958764897729 732813952822"
      ),
    ),
  ],
)
def test_permutation_is_golden_and_inverts(n, golden):
  values = [oracle.permute(x, n, PRESHUFFLE_KEYS) for x in range(8)]
  assert values == [int(word) for word in golden.split()]
  assert [oracle.unpermute(y, n, PRESHUFFLE_KEYS) for y in values] == list(range(8))


def test_permutation_is_a_bijection_at_every_small_size():
  for n in range(1, 301):
    values = [oracle.permute(x, n, PRESHUFFLE_KEYS) for x in range(n)]
    assert sorted(values) == list(range(n))
    assert [oracle.unpermute(y, n, PRESHUFFLE_KEYS) for y in values] == list(range(n))


def test_sub_keys_wrap_at_the_largest_number():
  assert oracle.sub_keys([5], 2**64 - 1) == [oracle.mix(5 ^ oracle.mix(0))]


# docs/order.md#the-cache


def test_preprocess_seed_is_golden():
  assert oracle.preprocess_seed("demo", "train", 0, 3) == 235544420


@pytest.mark.parametrize(
  ("num_examples", "record_bytes", "golden"),
  [
    *((0, 0, 1), (63, 2**30, 1), (64, 2**30, 2), (2047, 2**30, 32), (2048, 2**30, 64), (10**6, 2**40, 64)),
    *((10**6, 2**21 - 1, 1), (10**6, 2**21, 2), (10**6, 2**26 - 1, 32), (10**6, 2**26, 64)),
  ],
)
def test_default_num_shards(num_examples, record_bytes, golden):
  assert oracle.default_num_shards(num_examples, record_bytes, 32) == golden


def test_every_index_traces_back_to_its_source_shard_and_place():
  sizes = [3, 0, 7, 1, 0]
  places = [(shard, place) for shard, size in enumerate(sizes) for place in range(size)]
  indices = [oracle.index_of(shard, place, "demo", "train", 0, sizes) for shard, place in places]
  assert indices == [oracle.permute(ordinal, 11, PRESHUFFLE_KEYS) for ordinal in range(11)]
  assert [oracle.trace(index, "demo", "train", 0, sizes) for index in indices] == places


# docs/order.md#mixtures


@pytest.mark.parametrize(
  ("shares", "names", "quotas", "period"),
  [
    ({"b": 0.7, "a": 0.3}, ["a", "b"], [3, 7], 10),
    ({"a": 1, "b": 2, "c": 5}, ["a", "b", "c"], [1, 2, 5], 8),
    (
      {"c4": 364868892, "wiki": 7000003, "code": 12345},
      ["c4", "code", "wiki"],
      [1028804, 35, 19737],
      1048576,
    ),
    ({"a": 2, "gone": 0, "b": "4"}, ["a", "b"], [1, 2], 3),
    ({"a": Fraction(1, 3), "b": "1/6"}, ["a", "b"], [2, 1], 3),
    ({"only": 0.1}, ["only"], [1], 1),
    ({"é": 1, "z": 2, "Z": 3}, ["Z", "z", "é"], [3, 2, 1], 6),
    ({"a": 1, "b": 65535}, ["a", "b"], [1, 65535], 65536),
    ({"a": 1, "b": 1, "c": 65535}, ["a", "b", "c"], [1, 1, 65534], 65536),
    ({"a": 4045, "b": 6549555}, ["a", "b"], [81, 130991], 131072),
    ({"a": 1, "b": 10**12}, ["a", "b"], [0, 2**24], 2**24),
  ],
)
def test_quotas(shares, names, quotas, period):
  assert oracle.quotas(shares) == (names, quotas, period)


@pytest.mark.parametrize(
  "shares", [{}, {"a": 0}, {"a": -1}, {"a": math.nan}, {"a": math.inf, "b": 1}, {"a": "1/0"}, {"a": "many"}]
)
def test_rates_that_are_not_finite_and_positive_are_refused(shares):
  with pytest.raises(ValueError, match="expected a"):
    oracle.quotas(shares)


@pytest.mark.parametrize(
  ("shares", "golden"), [({"a": 0.3, "b": 0.7}, "babbabbbab"), ({"a": 1, "b": 2, "c": 5}, "ccbcacbc")]
)
def test_draws_are_golden_and_repeat(shares, golden):
  names, quotas, period = oracle.quotas(shares)
  for start in (0, 3, period, 10**15 * period + 5):
    drawn = oracle.draws(quotas, period, start, start + 2 * period)
    shift = start % period
    assert "".join(names[k] for k in drawn) == (golden * 3)[shift : shift + 2 * period]


def mixtures():
  rng = random.Random(0)
  fixed = [[1], [1, 1], [1, 1, 1], [1, 999], [0, 3, 5], [1, 1, 1, 1, 96], [7, 11, 13, 17, 19, 23]]
  return fixed + [[rng.randint(1, 60) for _ in range(rng.randint(2, 9))] for _ in range(40)]


@pytest.mark.parametrize("quotas", mixtures(), ids=str)
def test_no_task_is_ever_a_whole_stripe_from_its_share(quotas):
  period = sum(quotas)
  given = [0] * len(quotas)
  for n, chosen in enumerate(oracle.draws(quotas, period, 0, period), start=1):
    given[chosen] += 1
    assert all(abs(x * period - a * n) < period for x, a in zip(given, quotas, strict=True))
  assert given == quotas


def test_counts_are_those_of_the_draws():
  quotas, period = [1, 2, 5], 8
  for n in range(30):
    drawn = oracle.draws(quotas, period, 0, n)
    assert oracle.counts(quotas, period, n) == [drawn.count(k) for k in range(3)]
  assert oracle.counts(quotas, period, 10**15 * 8 + 3) == [10**15, 2 * 10**15 + 1, 5 * 10**15 + 2]


@pytest.mark.parametrize("quotas", [[1], [1, 2, 5], [0, 3, 5], [4, 4, 7]], ids=str)
def test_stripe_of_finds_each_draw(quotas):
  seen = [0] * len(quotas)
  for stripe, k in enumerate(oracle.draws(quotas, sum(quotas), 0, 3 * sum(quotas))):
    assert oracle.stripe_of(quotas, k, seen[k]) == stripe
    seen[k] += 1


# docs/order.md#plans-segments-rows


@pytest.mark.parametrize(
  ("batch_size", "shard_counts", "golden"),
  [
    (128, [64], 64),
    (96, [64], 32),
    (96, [64, 1, 1], 32),
    (96, [1, 1], 1),
    (96, [], 1),
    (128, [64, 64], 4),
    (4096, [64, 64], 64),
    (4096, [64, 48, 1], 16),
    (96, [64, 64], 2),
    (16, [64, 64], 1),
    (7, [64], 1),
  ],
)
def test_default_lanes(batch_size, shard_counts, golden):
  assert oracle.default_lanes(batch_size, shard_counts) == golden


@pytest.mark.parametrize(
  ("first_stripe", "step", "golden"),
  [
    (0, 0, "c0 c4 b100 c8 | c1 c5 b101 c9 | c2 c6 b102 c10 | c3 c7 b103 c11"),
    (0, 3, "a4 c32 b112 c36 | a5 c33 b113 c37 | a6 c34 b114 c38 | a7 c35 b115 c39"),
    (5, 0, "c0 b100 c4 c8 | c1 b101 c5 c9 | c2 b102 c6 c10 | c3 b103 c7 c11"),
  ],
)
def test_rows_are_golden(first_stripe, step, golden):
  quotas = {"a": 1, "b": 2, "c": 5}
  segment = segment_of(quotas, batch_size=16, lanes=4, first_stripe=first_stripe, first_units={"b": 100})
  assert text_of(oracle.batch_rows(segment, step), 4) == golden
  segment["start_step"] = 1000
  assert text_of(oracle.batch_rows(segment, step + 1000), 4) == golden


@pytest.mark.parametrize("first_stripe", [0, 5])
def test_steps_of_a_segment_repeat_and_lose_no_unit(first_stripe):
  segment = segment_of({"a": 1, "b": 2, "c": 5}, batch_size=24, lanes=4, first_stripe=first_stripe)
  given = sorted(itertools.chain.from_iterable(oracle.batch_rows(segment, step) for step in range(8)))
  # 8 steps of 6 stripes are 6 periods of 8 stripes of 4 units
  assert given == [
    (name, unit) for name, units in (("a", 24), ("b", 48), ("c", 120)) for unit in range(units)
  ]


# docs/order.md#units-and-epochs


def test_round_robin_is_golden():
  turns = [oracle.round_robin([3, 1, 0, 2], u) for u in range(6)]
  assert turns == [(0, 0), (1, 0), (3, 0), (0, 1), (3, 1), (0, 2)]


@pytest.mark.parametrize("sizes", [[5], [4, 4, 4], [0, 9, 1, 1, 6, 9, 0], [1] * 7])
def test_round_robin_takes_turns_in_order(sizes):
  turns = sorted((q, shard) for shard, size in enumerate(sizes) for q in range(size))
  assert [oracle.round_robin(sizes, u) for u in range(sum(sizes))] == [(shard, q) for q, shard in turns]


@pytest.mark.parametrize(
  ("policy", "unit", "golden"),
  [
    ("reshuffle", 0, (0, 0, 0)),
    ("reshuffle", 1, (0, 1, 0)),
    ("reshuffle", 999, (0, 7, 124)),
    ("reshuffle", 1000, (1, 0, 72)),
    ("reshuffle", 1001, (1, 1, 50)),
    ("reshuffle", 1500, (1, 4, 96)),
    ("reshuffle", 1999, (1, 7, 117)),
    ("reshuffle", 2000, (2, 0, 89)),
    ("global", 0, (0, 0, 61)),
    ("global", 1, (0, 5, 58)),
    ("global", 999, (0, 4, 16)),
    ("global", 1000, (1, 7, 5)),
    ("same", 999, (0, 7, 124)),
    ("same", 1999, (1, 7, 124)),
  ],
)
def test_units_are_golden(policy, unit, golden):
  assert oracle.locate(unit, [125] * 8, 16, "demo", "train", 0, policy) == golden


@pytest.mark.parametrize("policy", ["same", "reshuffle", "global"])
@pytest.mark.parametrize("sizes", [[125] * 8, [40, 0, 3, 16, 17, 1], [5]], ids=str)
def test_each_epoch_gives_every_place_once(policy, sizes):
  every = {(shard, place) for shard, size in enumerate(sizes) for place in range(size)}
  for epoch in range(3):
    units = range(epoch * sum(sizes), (epoch + 1) * sum(sizes))
    located = [oracle.locate(unit, sizes, 16, "demo", "train", 0, policy) for unit in units]
    assert {located_epoch for located_epoch, _, _ in located} == {epoch}
    assert len(located) == len(every)
    assert {(shard, place) for _, shard, place in located} == every


def test_reshuffle_reads_whole_blocks_in_sequence():
  places = [oracle.locate(40 + q, [40], 16, "demo", "train", 0, "reshuffle")[2] for q in range(40)]
  blocks = [[place // 16 for place in places[at : at + 16]] for at in (0, 16, 32)]
  assert sorted(blocks) == [[0] * 16, [1] * 16, [2] * 8]
  assert blocks[2] == [2] * 8


def test_an_unknown_epoch_policy_is_refused():
  with pytest.raises(ValueError, match="epoch policy"):
    oracle.locate(0, [1], 1, "demo", "train", 0, "shuffled")


# docs/order.md#packing

ONE_FEATURE = [(6,), (5,), (4,), (3,), (7,), (2,), (3,)]
TWO_FEATURES = [(6, 1), (5, 9), (4, 4), (3, 2), (7, 1), (2, 8), (3, 3)]


@pytest.mark.parametrize(
  ("pack", "lengths", "limits", "golden"),
  [
    (oracle.pack_greedy, ONE_FEATURE, (10,), [[0], [1, 2], [3, 4], [5, 6]]),
    (oracle.pack_best_fit, ONE_FEATURE, (10,), [[0, 2], [1, 5, 6], [3, 4]]),
    (oracle.pack_greedy, TWO_FEATURES, (10, 12), [[0], [1], [2, 3], [4, 5], [6]]),
    (oracle.pack_best_fit, TWO_FEATURES, (10, 12), [[0, 2], [1, 6], [3], [4, 5]]),
    (oracle.pack_best_fit, [(13,), (11,), (8,), (1,)], (20,), [[0], [1, 2, 3]]),
    (oracle.pack_greedy, [], (10,), []),
    (oracle.pack_best_fit, [], (10,), []),
    (oracle.pack_best_fit, [(10,)] * 255 + [(5,), (5,)], (10,), [[n] for n in range(257)]),
  ],
)
def test_packs(pack, lengths, limits, golden):
  assert pack(lengths, limits) == golden


@pytest.mark.parametrize("pack", [oracle.pack_greedy, oracle.pack_best_fit])
def test_packs_hold_every_record_once_and_fit(pack):
  rng = random.Random(0)
  lengths = [(rng.randint(0, 10), rng.randint(0, 12)) for _ in range(600)]
  packs = pack(lengths, (10, 12))
  assert sorted(itertools.chain.from_iterable(packs)) == list(range(600))
  assert packs == sorted(sorted(records) for records in packs)
  for records in packs:
    assert sum(lengths[record][0] for record in records) <= 10
    assert sum(lengths[record][1] for record in records) <= 12


# docs/order.md#end-of-data


@pytest.mark.parametrize(
  ("units", "num_epochs", "last_step", "last_rows"),
  [
    (16, None, None, None),
    (16, 1, 1, "x8 x12 | x9 x13 | x10 x14 | x11 x15"),
    (17, 1, 2, "x16 - | - - | - - | - -"),
    (15, 1, 1, "x8 x12 | x9 x13 | x10 x14 | x11 -"),
    (6, 2, 1, "x8 - | x9 - | x10 - | x11 -"),
  ],
)
def test_one_task_ends_with_its_last_unit(units, num_epochs, last_step, last_rows):
  segments = [segment_of({"x": 1}, batch_size=8, lanes=4)]
  assert oracle.last_step(segments, {"x": units}, num_epochs) == last_step
  if last_step is not None:
    assert text_of(oracle.rows(segments, last_step, {"x": units}, num_epochs), 4) == last_rows
    after = oracle.rows(segments, last_step + 1, {"x": units}, num_epochs)
    assert after == [(None, None)] * 8


def test_a_mixture_ends_with_the_first_task_that_ends():
  segments = [segment_of({"a": 1, "b": 2, "c": 5}, batch_size=16, lanes=4)]  # stripes c c b c a c b c ...
  units = {"a": 100, "b": 6, "c": 100}
  assert oracle.last_step(segments, units, 1) == 1
  last_rows = text_of(oracle.rows(segments, 1, units, 1), 4)
  assert last_rows == "a0 c12 b4 - | a1 c13 b5 - | a2 c14 - - | a3 c15 - -"


def brute_force_end(segments, units, num_epochs, steps):
  """(step, stripe) after the first stripe that leaves some task with no unit, by giving stripe by stripe."""
  for step in range(steps):
    segment = [segment for segment in segments if segment["start_step"] <= step][-1]
    if step == segment["start_step"]:
      next_unit = {name: task["first_unit"] for name, task in segment["tasks"].items()}
      if any(unit >= num_epochs * units[name] for name, unit in next_unit.items()):
        return step, 0
    width = segment["batch_size"] // segment["lanes"]
    for stripe, (name, _) in enumerate(oracle.batch_rows(segment, step)[:width]):
      next_unit[name] += segment["lanes"]
      if next_unit[name] >= num_epochs * units[name]:
        return step + (stripe + 1) // width, (stripe + 1) % width
  raise AssertionError("no end within the steps tried")


@pytest.mark.parametrize("seed", range(20))
def test_the_end_computed_is_the_end_found_by_counting(seed):
  rng = random.Random(seed)
  segments = []
  for start in (0, 2, 5):
    quotas = {name: rng.randint(1, 6) for name in "abc"[: rng.randint(1, 3)]}
    lanes = rng.choice([1, 2, 4])
    segments.append(
      segment_of(
        quotas,
        batch_size=lanes * rng.randint(1, 6),
        lanes=lanes,
        start_step=start,
        first_stripe=rng.randrange(sum(quotas.values())),
        first_units={name: start * rng.randint(0, 4) for name in quotas},
      )
    )
  units, num_epochs = {name: rng.randint(8, 40) for name in "abc"}, rng.randint(1, 3)
  step, stripe = brute_force_end(segments, units, num_epochs, 2000)
  assert oracle.end_of_data(segments, units, num_epochs) == (step, stripe)
  assert oracle.last_step(segments, units, num_epochs) == (step if stripe else step - 1)


@pytest.mark.parametrize(
  ("skip_at", "first_unit", "last_step"), [(1, 16, 0), (0, 16, -1), (1, 15, 1), (3, 16, 1)]
)
def test_a_skip_past_the_end_ends_the_stream_where_it_stands(skip_at, first_unit, last_step):
  before = segment_of({"x": 1}, batch_size=8, lanes=4)
  after = segment_of({"x": 1}, batch_size=8, lanes=4, start_step=skip_at, first_units={"x": first_unit})
  assert oracle.last_step([before, after], {"x": 16}, 1) == last_step


def test_a_stream_ends_with_a_task_that_a_change_removes_as_it_ends():
  before = segment_of({"x": 1}, batch_size=8, lanes=4)
  after = segment_of({"y": 1}, batch_size=8, lanes=4, start_step=2)
  assert oracle.last_step([before, after], {"x": 16, "y": 80}, 1) == 1
  assert oracle.last_step([before, after], {"x": 17, "y": 80}, 1) == 11


def test_a_segment_of_no_steps_ends_nothing():
  first = segment_of({"x": 1}, batch_size=8, lanes=4)
  undone = segment_of({"x": 1}, batch_size=8, lanes=4, start_step=1, first_units={"x": 16})
  last = segment_of({"x": 1}, batch_size=8, lanes=4, start_step=1, first_units={"x": 8})
  assert oracle.last_step([first, undone, last], {"x": 16}, 1) == 1


# docs/order.md#digests


def test_digest_covers_name_dtype_shape_and_bytes_in_name_order():
  row = {"b": ("float32", (), b"\0\0\x80?"), "a": ("int32", (2, 1), bytes(8))}
  covered = b"a\x1fint32\x1f2,1\x1f" + bytes(8) + b"b\x1ffloat32\x1f\x1f\0\0\x80?"
  assert oracle.row_digest(row) == hashlib.sha256(covered).digest()
  joined = oracle.row_digest(row) + oracle.row_digest({})
  assert oracle.batch_digest([row, {}]) == hashlib.sha256(joined).hexdigest()


# docs/order.md#draws-after-the-cache


def test_seed_pairs_are_golden_and_do_not_depend_on_their_number():
  pairs = oracle.map_seeds("demo", "train", 0, 1, 0, 7, 9)
  assert pairs[:2] == [(405977816, 631289882), (1826214654, 1455826295)]
  assert len(set(pairs)) == 9
  assert oracle.map_seeds("demo", "train", 0, 1, 0, 7, 2) == pairs[:2]


# docs/order.md#seeing-it


def manifest_of(layout):
  sizes = [60, 0, 40]
  return {
    "task": "demo",
    "split": "train",
    "seed": 0,
    "layout": layout,
    "num_examples": 100,
    "num_shards": 8 if layout == "preshuffled" else 3,
    "block_records": 4,
    "source_shards": [{"name": f"part-{n}", "examples": size} for n, size in enumerate(sizes)],
  }


@pytest.mark.parametrize(("layout", "policy"), [("preshuffled", "reshuffle"), ("as_is", "global")])
def test_what_was_at_names_every_example_once_an_epoch(layout, policy):
  found = oracle.what_was_at(manifest_of(layout), 16, 0, 14, epoch_policy=policy, num_epochs=2)
  assert [line["unit"] for line in sorted(found, key=lambda line: line["unit"])] == list(range(200))
  for epoch in (0, 1):
    origins = [
      (example["source_name"], example["source_shard"], example["source_place"], example["index"])
      for line in found
      if line["epoch"] == epoch
      for example in line["examples"]
    ]
    assert sorted(origin[:3] for origin in origins) == [
      (f"part-{shard}", shard, place) for shard, size in ((0, 60), (2, 40)) for place in range(size)
    ]
    assert sorted(origin[3] for origin in origins) == list(range(100))


def test_what_was_at_reads_the_index_order_in_the_first_epoch():
  found = oracle.what_was_at(manifest_of("preshuffled"), 16, 2, 3)
  assert found[0] == {
    "step": 2,
    "row": 0,
    "task": "demo",
    "split": "train",
    "epoch": 0,
    "unit": 32,
    "shard": 0,
    "place": 4,
    "examples": found[0]["examples"],
  }
  ordinal = oracle.unpermute(32, 100, PRESHUFFLE_KEYS)
  source_shard, source_place = (0, ordinal) if ordinal < 60 else (2, ordinal - 60)
  assert found[0]["examples"][0] == {
    "index": 32,
    "record": 4,
    "source_shard": source_shard,
    "source_name": f"part-{source_shard}",
    "source_place": source_place,
  }
  assert [line["unit"] for line in found] == [32 + lane + 8 * k for lane in range(8) for k in range(2)]


def test_what_was_at_leaves_padding_out():
  found = oracle.what_was_at(manifest_of("preshuffled"), 16, 6, 9, num_epochs=1)
  assert [(line["step"], line["row"], line["unit"]) for line in found] == [
    (6, 0, 96), (6, 2, 97), (6, 4, 98), (6, 6, 99)
  ]  # fmt: skip
