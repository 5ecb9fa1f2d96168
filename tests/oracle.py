"""The order specification, version 1, in plain Python.

This is the reference program of the published format, with which other implementations are compared. It needs
the standard library alone, follows the text of docs/order.md in order, and prefers clarity to speed. Words
(index, shard, unit, lane, stripe, segment, ...) and letters (N, S, g, R_s, U, E, B, M, G, P) are the text's.
"""

import functools
import hashlib
import math
from bisect import bisect_right
from collections.abc import Iterator
from fractions import Fraction
from itertools import accumulate, islice

Rate = int | float | str | Fraction
Feature = tuple[str, tuple[int, ...], bytes]  # dtype name, shape, little-endian bytes

MASK64 = (1 << 64) - 1
EXACT_PERIOD_LIMIT = 65536
ROUNDED_PERIOD_LIMIT = 1 << 24
PACKING_WINDOW_RECORDS = 256

# docs/order.md#keys-and-permutations


def round_keys(*parts) -> list[int]:
  """Eight 64-bit keys from a purpose and its names and numbers."""
  text = b"\x1f".join(str(part).encode() for part in ("anystep/1", *parts))
  digest = hashlib.blake2b(text, digest_size=64).digest()
  return [int.from_bytes(digest[at : at + 8], "little") for at in range(0, 64, 8)]


def mix(z: int) -> int:
  """A bijection on 64-bit integers that scatters their bits."""
  z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
  z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK64
  return z ^ (z >> 31)


def sub_keys(keys: list[int], x: int) -> list[int]:
  """The keys of case x under `keys`: word j becomes mix(k_j ^ mix(x + 1))."""
  return [mix(key ^ mix((x + 1) & MASK64)) for key in keys]


def half_width(n: int) -> int:
  """w, the bits of one half of the Feistel network: 2w bits hold every number below n."""
  return ((n - 1).bit_length() + 1) // 2


def permute(x: int, n: int, keys: list[int]) -> int:
  """Where x goes in a permutation of [0, n): through a Feistel network until it lands below n."""
  if n == 1:
    return 0
  width = half_width(n)
  mask = (1 << width) - 1
  while True:
    left, right = x >> width, x & mask
    for key in keys:
      left, right = right, left ^ (mix(right ^ key) & mask)
    x = (left << width) | right
    if x < n:
      return x


def unpermute(y: int, n: int, keys: list[int]) -> int:
  """The x with permute(x, n, keys) == y: the same network with the keys backwards."""
  if n == 1:
    return 0
  width = half_width(n)
  mask = (1 << width) - 1
  while True:
    left, right = y >> width, y & mask
    for key in reversed(keys):
      left, right = right ^ (mix(left ^ key) & mask), left
    y = (left << width) | right
    if y < n:
      return y


# docs/order.md#the-cache


def preprocess_seed(task: str, split: str, base_seed: int, source_shard: int) -> int:
  """The seed with which the job preprocesses one source shard."""
  return round_keys("preprocess", task, split, base_seed, source_shard)[0] % 2**31


def default_num_shards(num_examples: int, record_bytes: int, block_records: int) -> int:
  """S: the most shards, 64 or a half of it and so on, that have a MiB and a block of records each; else 1."""
  for shards in (64, 32, 16, 8, 4, 2):
    if shards * 2**20 <= record_bytes and shards * block_records <= num_examples:
      return shards
  return 1


def index_of(
  source_shard: int,
  source_place: int,
  task: str,
  split: str,
  cache_seed: int,
  source_shard_examples: list[int],
) -> int:
  """The index of a source shard's example: its ordinal, preshuffled."""
  ordinal = sum(source_shard_examples[:source_shard]) + source_place
  keys = round_keys("preshuffle", task, split, cache_seed)
  return permute(ordinal, sum(source_shard_examples), keys)


def trace(
  index: int, task: str, split: str, cache_seed: int, source_shard_examples: list[int]
) -> tuple[int, int]:
  """(source shard, place in it) of the example with this index; the inverse of `index_of`."""
  keys = round_keys("preshuffle", task, split, cache_seed)
  ordinal = unpermute(index, sum(source_shard_examples), keys)
  first_ordinals = [0, *accumulate(source_shard_examples)]
  source_shard = bisect_right(first_ordinals, ordinal) - 1
  return source_shard, ordinal - first_ordinals[source_shard]


# docs/order.md#mixtures


def exact_rate(rate: Rate) -> Fraction:
  """The rate as it is written: 0.3 is 3/10."""
  try:
    exact = Fraction(str(rate))
  except (ValueError, ZeroDivisionError) as error:
    raise ValueError(f"expected a finite rate >= 0, got {rate!r}") from error
  if exact < 0:
    raise ValueError(f"expected a finite rate >= 0, got {rate!r}")
  return exact


def quotas(shares: dict) -> tuple[list[str], list[int], int]:
  """(names in order, quotas a_k, period P) of a mixture {name: Rate}; zero drops a task."""
  exact = {name: exact_rate(rate) for name, rate in shares.items()}
  names = sorted((name for name in exact if exact[name]), key=str.encode)
  if not names:
    raise ValueError(f"expected a mixture with a positive rate, got {shares}")
  coprime = coprime_integers([exact[name] for name in names])
  if sum(coprime) <= EXACT_PERIOD_LIMIT:
    return names, coprime, sum(coprime)
  return names, *rounded_quotas(coprime)


def coprime_integers(shares: list[Fraction]) -> list[int]:
  """The smallest integers in the proportions of the shares."""
  denominator = math.lcm(*(share.denominator for share in shares))
  integers = [int(share * denominator) for share in shares]
  divisor = math.gcd(*integers)
  return [integer // divisor for integer in integers]


def rounded_quotas(shares: list[int]) -> tuple[list[int], int]:
  """(quotas, P) by largest remainders, with P doubled until every quota is within 1%."""
  period = EXACT_PERIOD_LIMIT
  while True:
    exact = [Fraction(share * period, sum(shares)) for share in shares]
    rounded = largest_remainders(exact, period)
    close = all(abs(a - share) <= share / 100 for a, share in zip(rounded, exact, strict=True))
    if close or period >= ROUNDED_PERIOD_LIMIT:
      return rounded, period
    period *= 2


def largest_remainders(exact: list[Fraction], total: int) -> list[int]:
  """Floors, and one more for the largest remainders, ties in order, up to the total."""
  rounded = [math.floor(share) for share in exact]
  by_remainder = sorted(range(len(exact)), key=lambda k: (rounded[k] - exact[k], k))
  for k in by_remainder[: total - sum(rounded)]:
    rounded[k] += 1
  return rounded


def stripes(quotas: tuple[int, ...]) -> Iterator[int]:
  """The task positions of a mixture, stripe by stripe: Tijdeman's chairman assignment.

  The rule's (D-1)P - D(a_k n - x_k P) over D a_k is compared exactly as an integer: times D, times a common
  multiple of the quotas.
  """
  period, d = sum(quotas), 2 * len(quotas) - 2
  multiple = math.lcm(*(a for a in quotas if a))
  owed = [0] * len(quotas)  # a_k n - x_k P
  while True:
    owed = [debt + a for debt, a in zip(owed, quotas, strict=True)]
    due = [k for k, debt in enumerate(owed) if d * debt >= period] if d else [0]
    chosen = min(due, key=lambda k: ((d - 1) * period - d * owed[k]) * (multiple // quotas[k]))
    owed[chosen] -= period
    yield chosen


@functools.lru_cache(maxsize=16)
def one_period(quotas: tuple[int, ...]) -> tuple[int, ...]:
  """The P stripes that repeat without end."""
  return tuple(islice(stripes(quotas), sum(quotas)))


def draws(quotas: list[int], period: int, start: int, stop: int) -> list[int]:
  """Task positions of stripes [start, stop) of the endless sequence."""
  once = one_period(tuple(quotas))
  return [once[stripe % period] for stripe in range(start, stop)]


def counts(quotas: list[int], period: int, n: int) -> list[int]:
  """Stripes of each task among the first n of the endless sequence."""
  prefix = one_period(tuple(quotas))[: n % period]
  return [n // period * a + prefix.count(k) for k, a in enumerate(quotas)]


# docs/order.md#plans-segments-rows. A segment is the JSON object, and so is a plan's list of them.


def default_lanes(batch_size: int, shard_counts: list[int]) -> int:
  """M for tasks of these numbers of shards."""
  sharded = [shards for shards in shard_counts if shards > 1]
  common = math.gcd(batch_size, *sharded)
  if len(sharded) == 1:
    return common
  fitting = [lanes for lanes in range(1, batch_size // 32 + 1) if common % lanes == 0]
  return max(fitting, default=1) if sharded else 1


def mixture_of(segment: dict) -> tuple[list[str], list[int], int]:
  """(names in order, quotas, period) of a segment."""
  names = sorted(segment["tasks"], key=str.encode)
  task_quotas = [segment["tasks"][name]["quota"] for name in names]
  return names, task_quotas, sum(task_quotas)


def batch_rows(segment: dict, step: int) -> list[tuple[str, int]]:
  """(task name, unit) of each row of a step in the segment, were its data endless.

  The task's j-th stripe since the segment's first gives lane c the unit first_unit + jM + c, and the unit of
  lane c in the step's k-th stripe is row cG + k.
  """
  names, task_quotas, period = mixture_of(segment)
  lanes, origin = segment["lanes"], segment["first_stripe"]
  stripes_per_step = segment["batch_size"] // lanes
  first = origin + (step - segment["start_step"]) * stripes_per_step
  before = counts(task_quotas, period, origin)
  given = [now - then for now, then in zip(counts(task_quotas, period, first), before, strict=True)]
  lane_zero = []
  for k in draws(task_quotas, period, first, first + stripes_per_step):
    lane_zero.append((names[k], segment["tasks"][names[k]]["first_unit"] + given[k] * lanes))
    given[k] += 1
  return [(name, unit + lane) for lane in range(lanes) for name, unit in lane_zero]


# docs/order.md#units-and-epochs


def round_robin(units_per_shard: list[int], u: int) -> tuple[int, int]:
  """(shard, q) of an epoch's unit u: q = 0 of every shard, then q = 1 of those that have it, ...

  Until the next shard runs out the same shards take turns, so those turns are passed at once.
  """
  q = 0
  while True:
    sharing = [shard for shard, units in enumerate(units_per_shard) if units > q]
    next_q = min(units_per_shard[shard] for shard in sharing)
    if u < len(sharing) * (next_q - q):
      return sharing[u % len(sharing)], q + u // len(sharing)
    u -= len(sharing) * (next_q - q)
    q = next_q


def locate(
  unit: int,
  units_per_shard: list[int],
  block_records: int,
  task: str,
  split: str,
  seed: int,
  epoch_policy: str,
) -> tuple[int, int, int]:
  """(epoch, shard, place) of unit v under the policy "same", "reshuffle" or "global"."""
  if epoch_policy not in ("same", "reshuffle", "global"):
    raise ValueError(f"expected epoch policy same, reshuffle or global, got {epoch_policy!r}")
  epoch, u = divmod(unit, sum(units_per_shard))
  if epoch_policy == "global":
    u = permute(u, sum(units_per_shard), round_keys("global", task, split, seed, epoch))
  shard, place = round_robin(units_per_shard, u)
  if epoch_policy == "reshuffle" and epoch >= 1:
    block_keys = sub_keys(round_keys("epoch", task, split, seed, epoch), shard)
    place_keys = sub_keys(round_keys("block", task, split, seed, epoch), shard)
    place = reshuffle(place, units_per_shard[shard], block_records, block_keys, place_keys)
  return epoch, shard, place


def reshuffle(
  q: int, shard_units: int, block_records: int, block_keys: list[int], place_keys: list[int]
) -> int:
  """The place in its shard of turn q: whole blocks change order, then the units within.

  A short block at the end stays there.
  """
  whole_blocks = shard_units // block_records
  block, within = divmod(q, block_records)
  if block < whole_blocks:
    block, size = permute(block, whole_blocks, block_keys), block_records
  else:
    size = shard_units - whole_blocks * block_records
  return block * block_records + permute(within, size, sub_keys(place_keys, block))


# docs/order.md#packing. `lengths` has one tuple for each record of a shard, in the order of `limits`.


def fits(record: tuple[int, ...], room: tuple[int, ...]) -> bool:
  return all(length <= left for length, left in zip(record, room, strict=True))


def less(room: tuple[int, ...], record: tuple[int, ...]) -> tuple[int, ...]:
  return tuple(left - length for left, length in zip(room, record, strict=True))


def pack_greedy(lengths: list[tuple[int, ...]], limits: tuple[int, ...]) -> list[list[int]]:
  """The records of each pack: in order, the current pack while every feature fits."""
  packs: list[list[int]] = []
  room = limits
  for number, record in enumerate(lengths):
    if not packs or not fits(record, room):
      packs.append([])
      room = limits
    packs[-1].append(number)
    room = less(room, record)
  return packs


def pack_best_fit(lengths: list[tuple[int, ...]], limits: tuple[int, ...]) -> list[list[int]]:
  """The records of each pack, every window of 256 records by itself."""
  packs = []
  for start in range(0, len(lengths), PACKING_WINDOW_RECORDS):
    window = pack_window(lengths[start : start + PACKING_WINDOW_RECORDS], limits)
    packs += [[start + number for number in pack] for pack in window]
  return packs


def pack_window(lengths: list[tuple[int, ...]], limits: tuple[int, ...]) -> list[list[int]]:
  """Heaviest record first, each to the pack that it fits in with the least room."""
  product = math.prod(limits)

  def weight(sizes: tuple[int, ...]) -> int:
    return sum(size * (product // limit) for size, limit in zip(sizes, limits, strict=True))

  packs: list[list[int]] = []
  rooms: list[tuple[int, ...]] = []
  for number in sorted(range(len(lengths)), key=lambda number: (-weight(lengths[number]), number)):
    fitting = [pack for pack, room in enumerate(rooms) if fits(lengths[number], room)]
    if not fitting:
      fitting = [len(packs)]
      packs.append([])
      rooms.append(limits)
    chosen = min(fitting, key=lambda pack: (weight(rooms[pack]), pack))
    packs[chosen].append(number)
    rooms[chosen] = less(rooms[chosen], lengths[number])
  return sorted(sorted(pack) for pack in packs)


# docs/order.md#end-of-data. `units_per_epoch` is {task name: U}.


def stripe_of(quotas: list[int], k: int, i: int) -> int:
  """The stripe that is task k's i-th, counted from 0, in the endless sequence."""
  periods, remaining = divmod(i, quotas[k])
  own = [stripe for stripe, task in enumerate(one_period(tuple(quotas))) if task == k]
  return periods * sum(quotas) + own[remaining]


def stripes_until_end(segment: dict, units_per_epoch: dict, num_epochs: int) -> int:
  """Stripes that a segment gives until some task has no unit below E·U left."""
  names, task_quotas, period = mixture_of(segment)
  before = counts(task_quotas, period, segment["first_stripe"])
  ends = []
  for k, name in enumerate(names):
    left = num_epochs * units_per_epoch[name] - segment["tasks"][name]["first_unit"]
    if left <= 0:
      return 0
    if task_quotas[k]:
      last = stripe_of(task_quotas, k, before[k] + math.ceil(Fraction(left, segment["lanes"])) - 1)
      ends.append(last + 1 - segment["first_stripe"])
  return min(ends)


def end_of_data(
  segments: list[dict], units_per_epoch: dict, num_epochs: int | None
) -> tuple[int, int] | None:
  """(step, its stripe) right after the stream's last stripe; None if it is endless.

  What a segment would give after the next one's start does not count.
  """
  if num_epochs is None:
    return None
  next_starts = [*(segment["start_step"] for segment in segments[1:]), math.inf]
  for segment, next_start in zip(segments, next_starts, strict=True):
    stripes_per_step = segment["batch_size"] // segment["lanes"]
    steps, stripe = divmod(stripes_until_end(segment, units_per_epoch, num_epochs), stripes_per_step)
    end = segment["start_step"] + steps, stripe
    if segment["start_step"] < next_start and end <= (next_start, 0):
      return end
  raise AssertionError("a plan's last segment has no next one, so its data ends in it")


def last_step(segments: list[dict], units_per_epoch: dict, num_epochs: int | None) -> int | None:
  """The step that holds the last stripe; None where there is none, -1 where there is no step."""
  end = end_of_data(segments, units_per_epoch, num_epochs)
  if end is None:
    return None
  step, stripe = end
  return step if stripe else step - 1


def rows(
  segments: list[dict], step: int, units_per_epoch: dict, num_epochs: int | None
) -> list[tuple[str | None, int | None]]:
  """(task name, unit) of each row of a step of a plan; padding is (None, None)."""
  segment = [segment for segment in segments if segment["start_step"] <= step][-1]
  endless = batch_rows(segment, step)
  end = end_of_data(segments, units_per_epoch, num_epochs)
  if num_epochs is None or end is None:
    return [*endless]
  stripes_per_step = segment["batch_size"] // segment["lanes"]
  return [
    (name, unit)
    if (step, row % stripes_per_step) < end and unit < num_epochs * units_per_epoch[name]
    else (None, None)
    for row, (name, unit) in enumerate(endless)
  ]


# docs/order.md#digests


def row_digest(features: dict[str, Feature]) -> bytes:
  """sha256 of one row.

  It covers, of each feature in sorted name order: name, dtype as numpy names it, and the shape of the row's
  array in decimal with commas, each followed by byte 0x1F; then the bytes.
  """
  digest = hashlib.sha256()
  for name in sorted(features, key=str.encode):
    dtype, shape, data = features[name]
    digest.update(f"{name}\x1f{dtype}\x1f{','.join(map(str, shape))}\x1f".encode() + data)
  return digest.digest()


def batch_digest(features_by_row: list[dict[str, Feature]]) -> str:
  """sha256 in hexadecimal over the rows' 32-byte digests in order."""
  return hashlib.sha256(b"".join(row_digest(features) for features in features_by_row)).hexdigest()


# docs/order.md#draws-after-the-cache


def map_seeds(
  task: str, split: str, seed: int, epoch: int, preprocessor: int, index: int, num_seeds: int
) -> list[tuple[int, int]]:
  """The seed pairs of one record in one epoch for the p-th preprocessor after the cache."""
  record_keys = sub_keys(round_keys("map", task, split, seed, epoch, preprocessor), index)
  pairs = []
  for j in range(num_seeds):
    words = sub_keys(record_keys, j // 4)
    pairs.append((words[2 * (j % 4)] % 2**31, words[2 * (j % 4) + 1] % 2**31))
  return pairs


def transform_keys(
  task: str, split: str, seed: int, epoch: int, transform: int, index: int
) -> tuple[int, int]:
  """The Philox key of one record in one epoch for the p-th Python transform after the cache."""
  words = sub_keys(round_keys("transform", task, split, seed, epoch, transform), index)
  return words[0], words[1]


def philox(keys: tuple[int, int], num_words: int) -> list[int]:
  """The first 64-bit words that numpy's Philox draws: Philox4x64-10 at counters 1, 2, ..."""
  words: list[int] = []
  for counter in range(1, num_words // 4 + 2):
    (k0, k1), (a, b, c, d) = keys, (counter, 0, 0, 0)
    for _ in range(10):
      left, right = 0xD2E7470EE14C6C93 * a, 0xCA5A826395121157 * c
      a, b, c, d = (right >> 64) ^ b ^ k0, right & MASK64, (left >> 64) ^ d ^ k1, left & MASK64
      k0, k1 = (k0 + 0x9E3779B97F4A7C15) & MASK64, (k1 + 0xBB67AE8584CAA73B) & MASK64
    words += [a, b, c, d]
  return words[:num_words]


# docs/order.md#seeing-it, for a cache of one task without packing


def what_was_at(
  manifest: dict,
  batch_size: int,
  start_step: int,
  stop_step: int,
  seed: int = 0,
  epoch_policy: str = "reshuffle",
  num_epochs: int | None = None,
  lanes: int | None = None,
) -> list[dict]:
  """Every row of steps [start_step, stop_step), padding left out, with its example's origin."""
  task, split, block_records = manifest["task"], manifest["split"], manifest["block_records"]
  if lanes is None:
    lanes = default_lanes(batch_size, [manifest["num_shards"]])
  tasks = {task: {"quota": 1, "first_unit": 0}}
  segment = {"start_step": 0, "batch_size": batch_size, "lanes": lanes, "first_stripe": 0, "tasks": tasks}
  per_shard = records_per_shard(manifest)
  found = []
  for step in range(start_step, stop_step):
    for row, (_, unit) in enumerate(rows([segment], step, {task: sum(per_shard)}, num_epochs)):
      if unit is not None:
        epoch, shard, place = locate(unit, per_shard, block_records, task, split, seed, epoch_policy)
        found.append(
          {"step": step, "row": row, "task": task, "split": split, "epoch": epoch, "unit": unit}
          | {"shard": shard, "place": place, "examples": [example_at(manifest, shard, place)]}
        )
  return found


def records_per_shard(manifest: dict) -> list[int]:
  """R_s without packing; in layout as_is a shard is a file that was there before."""
  if manifest["layout"] == "as_is":
    return [source["examples"] for source in manifest["source_shards"]]
  examples, shards = manifest["num_examples"], manifest["num_shards"]
  return [len(range(shard, examples, shards)) for shard in range(shards)]


def example_at(manifest: dict, shard: int, record: int) -> dict:
  """Index and origin of a record of a shard."""
  sizes = [source["examples"] for source in manifest["source_shards"]]
  if manifest["layout"] == "as_is":
    index = sum(sizes[:shard]) + record
    source_shard, source_place = shard, record
  else:
    index = record * manifest["num_shards"] + shard
    source_shard, source_place = trace(index, manifest["task"], manifest["split"], manifest["seed"], sizes)
  source_name = manifest["source_shards"][source_shard]["name"]
  origin = {"source_shard": source_shard, "source_name": source_name, "source_place": source_place}
  return {"index": index, "record": record, **origin}
