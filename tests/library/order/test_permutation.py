"""Permutations are bijections, those of the order specification, and each key names its own."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import oracle
from anystep.errors import AnystepError
from anystep.order import permutation
from anystep.order.permutation import Permutation, mix, permute, round_keys, sub_keys, unpermute

KEY_PARTS = ("preshuffle", "demo", "train", 0)
KEYS = round_keys(*KEY_PARTS)
ORACLE_KEYS = oracle.round_keys(*KEY_PARTS)
GOLDEN = {
  10: "4 8 9 5 6 3 2 0",
  17: "11 12 14 6 0 5 16 3",
  1000: "609 646 780 570 466 978 134 90",
  65537: "4332 4931 9881 17851 42351 37885 50485 50793",
  10**12: (
    "349204661437 429362126463 372122766106 490455811715 49377363775 484704344346 958764897729 732813952822"
  ),
}
# Around a power of 4 the network's width changes: just above it all but a quarter of its range is outside.
POWERS_AND_NEIGHBOURS = [2**k + d for k in range(5, 62) for d in (-1, 0, 1)] + [2**62 - 1, 2**62]
SIZES = st.one_of(st.integers(1, 40), st.integers(1, 2**62))
UINT64 = st.integers(0, 2**64 - 1)


@pytest.mark.parametrize(("n", "golden"), GOLDEN.items())
def test_first_values_are_the_specifications(n, golden):
  golden = [int(word) for word in golden.split()]
  p = Permutation(n, *KEY_PARTS)
  assert [p(x) for x in range(8)] == golden
  assert p(np.arange(8)).tolist() == golden
  assert p.inverse(np.array(golden)).tolist() == list(range(8))


def test_keys_are_the_specifications():
  assert KEYS[0] == 0xD8BE4386703A9658
  assert sub_keys(round_keys("epoch", "demo", "train", 0, 1), 0)[0] == 0x32381B9EB97196A9


@given(st.lists(st.one_of(st.text(), st.integers())))
@settings(deadline=None, max_examples=50, derandomize=True)
def test_round_keys_equal_the_oracles(parts):
  assert round_keys(*parts).tolist() == oracle.round_keys(*parts)


@given(UINT64)
@settings(deadline=None, max_examples=50, derandomize=True)
def test_mix_equals_the_oracles(z):
  assert mix(np.array([z], np.uint64)).tolist() == [oracle.mix(z)]


@given(st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=5))
@settings(deadline=None, max_examples=50, derandomize=True)
def test_sub_keys_equal_the_oracles_for_an_int_and_for_an_array(xs):
  expected = [oracle.sub_keys(ORACLE_KEYS, x) for x in xs]
  assert sub_keys(KEYS, np.array(xs)).tolist() == expected
  assert [sub_keys(KEYS, x).tolist() for x in xs] == expected
  of_each = sub_keys(np.array(expected, np.uint64), np.array(xs))
  assert of_each.tolist() == [oracle.sub_keys(keys, x) for keys, x in zip(expected, xs, strict=True)]


def test_every_small_size_is_permuted_and_inverted():
  for n in [*range(1, 2001), *(n for n in POWERS_AND_NEIGHBOURS if n <= 2**17 + 1)]:
    image = permute(np.arange(n), n, KEYS)
    assert np.array_equal(np.sort(image), np.arange(n)), n
    assert np.array_equal(unpermute(image, n, KEYS), np.arange(n)), n


def test_every_size_up_to_64_gives_the_oracles_order():
  for n in range(1, 65):
    assert permute(np.arange(n), n, KEYS).tolist() == [oracle.permute(x, n, ORACLE_KEYS) for x in range(n)]


@pytest.mark.parametrize("n", POWERS_AND_NEIGHBOURS)
def test_large_sizes_give_the_oracles_values_and_invert(n):
  x = np.unique(np.linspace(0, n - 1, 9).astype(np.uint64).clip(0, n - 1))
  image = Permutation(n, *KEY_PARTS)(x)
  assert image.tolist() == [oracle.permute(int(v), n, ORACLE_KEYS) for v in x]
  assert Permutation(n, *KEY_PARTS).inverse(image).tolist() == x.tolist()


@given(st.data(), SIZES)
@settings(deadline=None, max_examples=100, derandomize=True)
def test_an_int_gives_the_int_that_an_array_gives(data, n):
  x = data.draw(st.integers(0, n - 1))
  p = Permutation(n, *KEY_PARTS)
  image = p(x)
  assert type(image) is int
  assert image == oracle.permute(x, n, ORACLE_KEYS)
  assert p(np.array([[x]], np.uint64)).tolist() == [[image]]
  assert type(p.inverse(image)) is int
  assert p.inverse(image) == x == oracle.unpermute(image, n, ORACLE_KEYS)


@given(st.lists(st.tuples(SIZES, UINT64, UINT64), min_size=1, max_size=12))
@settings(deadline=None, max_examples=100, derandomize=True)
def test_sizes_and_keys_of_each_value_give_what_they_give_alone(cases):
  x = np.array([draw % n for n, draw, _ in cases])
  n = np.array([n for n, _, _ in cases])
  keys = np.array([oracle.round_keys(key) for _, _, key in cases], np.uint64)
  image = permute(x, n, keys)
  alone = [oracle.permute(int(x[k]), int(n[k]), keys[k].tolist()) for k in range(len(cases))]
  assert image.tolist() == alone
  assert unpermute(image, n, keys).tolist() == x.tolist()
  in_columns = permute(x[:, None], n[:, None], keys[:, None])
  assert in_columns.tolist() == [[value] for value in alone]


def test_one_size_with_keys_of_each_value_and_the_reverse():
  x = np.arange(5)
  keys = sub_keys(KEYS, x)
  assert permute(x, 5, keys).tolist() == [
    oracle.permute(k, 5, oracle.sub_keys(ORACLE_KEYS, k)) for k in range(5)
  ]
  sizes = np.array([5, 9, 17, 40, 1000])
  assert permute(x, sizes, KEYS).tolist() == [oracle.permute(k, int(sizes[k]), ORACLE_KEYS) for k in range(5)]


@pytest.mark.parametrize("shape", [(0,), (2, 0), (3, 4), (2, 3, 2)])
@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint64])
def test_the_image_has_the_shape_of_what_is_mapped(shape, dtype):
  x = np.arange(np.prod(shape, dtype=int)).astype(dtype).reshape(shape)
  image = Permutation(17, *KEY_PARTS)(x)
  assert image.dtype == np.int64
  assert image.shape == shape
  assert image.reshape(-1).tolist() == [oracle.permute(v, 17, ORACLE_KEYS) for v in range(x.size)]


@pytest.mark.parametrize("n", [10**12, 4**19 + 1, 2**62])
def test_a_set_that_no_disk_holds_is_permuted(n):
  x = np.unique(np.random.default_rng(0).integers(0, n, 300_000))
  p = Permutation(n, *KEY_PARTS)
  image = p(x)
  assert image.min() >= 0
  assert image.max() < n
  assert np.unique(image).size == x.size
  assert np.array_equal(p.inverse(image), x)
  ends = [0, 1, n - 2, n - 1]
  assert p(np.array(ends)).tolist() == [oracle.permute(v, n, ORACLE_KEYS) for v in ends]


def test_an_array_of_many_blocks_is_mapped_as_its_pieces_are():
  n = 600_011
  p = Permutation(n, *KEY_PARTS)
  whole = p(np.arange(n))
  assert np.array_equal(np.sort(whole), np.arange(n))
  pieces = np.concatenate([p(piece) for piece in np.array_split(np.arange(n), 1300)])
  assert np.array_equal(whole, pieces)
  assert np.array_equal(p.inverse(whole), np.arange(n))


@pytest.mark.parametrize("function", [permute, unpermute])
def test_chunks_and_blocks_keep_the_sizes_and_keys_of_each_value(function, monkeypatch):
  n = np.random.default_rng(0).integers(1, 300, 1000)
  x = np.arange(1000) % n
  keys = sub_keys(KEYS, np.arange(1000))
  whole = function(x, n, keys)
  monkeypatch.setattr(permutation, "_CHUNK_VALUES", 64)
  monkeypatch.setattr(permutation, "_BLOCK_VALUES", 300)
  assert np.array_equal(function(x, n, keys), whole)
  assert np.array_equal(function(x, n, KEYS), function(x, n, np.broadcast_to(KEYS, (1000, 8))))


@pytest.mark.parametrize("function", [permute, unpermute])
@pytest.mark.parametrize("half_bits", [2, 5, 10, 15, 16, 17])
def test_tables_and_arithmetic_agree(half_bits, function, monkeypatch):
  """Around the number of values from which tables are made, and around the w up to which they are."""
  enough = permutation._VALUES_PER_TABLE_ENTRY << half_bits
  for n in (4 ** (half_bits - 1) + 1, 3 * 4 ** (half_bits - 1), 4**half_bits):
    x = np.random.default_rng(n).integers(0, n, enough)
    at_enough, below = function(x, n, KEYS), function(x[1:], n, KEYS)
    with monkeypatch.context() as without_tables:
      without_tables.setattr(permutation, "_TABLE_BITS", -1)
      arithmetic = function(x, n, KEYS)
    assert np.array_equal(at_enough, arithmetic)
    assert np.array_equal(below, arithmetic[1:])
    by_oracle = oracle.permute if function is permute else oracle.unpermute
    assert arithmetic[:8].tolist() == [by_oracle(int(v), n, ORACLE_KEYS) for v in x[:8]]


def test_what_is_mapped_stays_as_it_was():
  x = np.arange(100, dtype=np.uint64)
  Permutation(100, *KEY_PARTS)(x)
  permute(x, 100, KEYS)
  assert np.array_equal(x, np.arange(100))


@pytest.mark.parametrize(
  "x", [-1, 10, 2**64, np.array([0, 10]), np.array([3, -1]), np.array([2**63], np.uint64)]
)
@pytest.mark.parametrize("direction", ["__call__", "inverse"])
def test_a_number_outside_is_refused(x, direction):
  with pytest.raises(IndexError, match=r"\[0, 10\)"):
    getattr(Permutation(10, *KEY_PARTS), direction)(x)


@pytest.mark.parametrize("x", [2.5, np.array([2.5])])
def test_a_fraction_is_refused(x):
  with pytest.raises((TypeError, IndexError)):
    Permutation(10, *KEY_PARTS)(x)


@pytest.mark.parametrize("n", [0, -1, 2**62 + 1, 2**64])
def test_a_size_that_cannot_be_permuted_is_refused(n):
  with pytest.raises(AnystepError) as refused:
    Permutation(n, *KEY_PARTS)
  assert (refused.value.code, refused.value.kind) == (64, "permutation_size")
  assert refused.value.fields == {"expected": "1 <= n <= 2**62", "got": n}


@pytest.mark.parametrize("n", [17, 100, 4096])
def test_neighbouring_seeds_give_different_orders(n):
  orders = {
    tuple(Permutation(n, "preshuffle", "demo", "train", s)(np.arange(n)).tolist()) for s in range(100)
  }
  assert len(orders) == 100


def test_seeds_epochs_tasks_splits_and_shards_share_no_order_not_even_shifted():
  """Of 4,096 values two random orders agree on about one, under any shift of the places or of the values.

  So many do with probability 1/e/13! = 6e-11, for each of the 4.6 million shifts of pairs.
  """
  names = [("preshuffle", "demo", "train", seed) for seed in range(4)]
  for split in ("train", "validation"):
    names += [("global", "demo", split, seed, epoch) for seed in range(3) for epoch in range(3)]
  names += [("global", "demo2", "train", 0, epoch) for epoch in range(2)]
  keys = [round_keys(*name) for name in names]
  for purpose in ("epoch", "block"):
    for epoch in (1, 2):
      keys += list(sub_keys(round_keys(purpose, "demo", "train", 0, epoch), np.arange(2)))
  keys += list(sub_keys(keys[-1], np.arange(2)))
  orders = [permute(np.arange(4096), 4096, k) for k in keys]
  places = [unpermute(np.arange(4096), 4096, k) for k in keys]
  for one, other in [*itertools.combinations(orders, 2), *itertools.combinations(places, 2)]:
    assert np.bincount((one - other) % 4096).max() < 13


def test_where_parts_are_parted_matters():
  names = [("a", "bc"), ("ab", "c"), ("abc",), ("a", "b", "c"), ("abc", ""), ("", "abc")]
  assert len({round_keys(*parts).tobytes() for parts in names}) == len(names)


def chi_square_deviation(cells, num_cells):
  """How many standard deviations the chi-square of draws of equally likely cells is from its mean."""
  expected = len(cells) / num_cells
  chi_square = ((np.bincount(cells, minlength=num_cells) - expected) ** 2 / expected).sum()
  return (chi_square - (num_cells - 1)) / (2 * (num_cells - 1)) ** 0.5


# The tests below allow six standard deviations. Chance exceeds that once in 10**8, for a chi-square with few
# cells, whose tail is longer, once in 10**6; the tests compare some hundred numbers.
@pytest.mark.parametrize("n", [17, 18, 31, 63, 64, 65, 100, 257])
def test_every_place_is_as_likely_as_any_other(n):
  """Where the first and the last value go under 20,000 keys."""
  keys = sub_keys(KEYS, np.arange(20_000))
  for x in (0, n - 1):
    assert abs(chi_square_deviation(permute(np.full(20_000, x), n, keys), n)) < 6


@pytest.mark.parametrize("n", [17, 18, 31, 63, 64, 65])
def test_neighbours_go_to_every_pair_of_places_as_likely(n):
  """Where two values next to each other go under 40,000 keys: n (n-1) pairs, of 10 draws or more each."""
  keys = sub_keys(KEYS, np.arange(40_000))
  for x in (0, n // 2, n - 2):
    one, other = (permute(np.full(40_000, value), n, keys) for value in (x, x + 1))
    assert abs(chi_square_deviation(one * (n - 1) + other - (other > one), n * (n - 1))) < 6


@pytest.mark.parametrize("n", [17, 100, 1000, 4**5 + 1, 10**5, 4**9 + 1])
def test_an_order_is_not_correlated_with_itself_its_places_or_the_next_seeds(n):
  """Each correlation of random orders has standard deviation 1/sqrt(n - 1) and mean -1/(n-1) or 0."""
  num_seeds = max(2, 4000 // n)
  orders = np.stack([Permutation(n, "global", "demo", "train", s, 1)(np.arange(n)) for s in range(num_seeds)])
  scores = (orders - (n - 1) / 2) / ((n * n - 1) / 12) ** 0.5
  limit = 6 / (n * (num_seeds - 1)) ** 0.5
  for lag in (1, 2, 3, 8, 16, n // 2):
    assert abs((scores * np.roll(scores, lag, axis=1)).mean() + 1 / (n - 1)) < limit, lag
  assert abs((scores[1:] * scores[:-1]).mean()) < limit
  places = (np.arange(n) - (n - 1) / 2) / ((n * n - 1) / 12) ** 0.5
  assert abs((scores * places).mean()) < limit


@pytest.mark.parametrize("n", [10**6, 4**10 + 1, 10**12])
def test_values_next_to_each_other_are_spread_evenly(n):
  """64 thousand successive values, such as one shard's, into 1,000 equal parts, at the start and the end."""
  count = 64_000
  for first in (0, n - count):
    parts = Permutation(n, *KEY_PARTS)(np.arange(first, first + count)) * 1000 // n
    # Drawn without putting back, they vary less by the part that was not drawn.
    left = 1 - count / n
    deviation = chi_square_deviation(parts, 1000)
    mean = (left - 1) * 999 / (2 * 999) ** 0.5
    assert abs(deviation - mean) < 6 * left


def test_its_repr_makes_it_again():
  p = Permutation(1000, *KEY_PARTS)
  again = eval(repr(p), {"Permutation": Permutation})
  assert again(np.arange(1000)).tolist() == p(np.arange(1000)).tolist()
