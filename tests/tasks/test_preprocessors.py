"""Preprocessors: texts to pieces, examples to random chunks and to corrupted spans."""

import collections
import itertools
import random

import numpy as np
import pytest
import seqio
import tensorflow as tf

from anystep.errors import AnystepError
from anystep.tasks.preprocessors import (
  cut_into_balanced_pieces,
  cut_into_pieces,
  cut_into_token_pieces,
  lm,
  prefix_lm,
  random_chunk,
  span_corruption,
  span_corruption_chunk,
  without_empty_texts,
)

NUM_SPECIAL_IDS, NUM_BYTES = 3, 256


def texts():
  """Texts as files hold them, however odd."""
  generator = random.Random(0)
  lines = [b"", b"\r", b"a", b"x = 1\r", b"\xff\xfe", "zwölf".encode(), b"\0", b" " * 30, b"long " * 40]
  yield from [
    b"",
    b"\n",
    b"\n\n\n",
    b"no final newline",
    b"final newline\n",
    b"a\r\nb\r\n\r\nc",
    b"\xff" * 99,
  ]
  yield from [b"short\n" + b"y" * 500, b"y" * 500 + b"\n" + b"short", b"line of ten\n" * 50, b"\n" * 200]
  for count in range(1, 60, 3):
    yield b"\n".join(generator.choices(lines, k=count))


MARK = b"no text has this line"


def pieces_of(texts, piece_bytes, **names):
  """The pieces of each text, cut in one dataset, where marks stand between texts."""
  feature, output = names.get("feature", "text"), names.get("output", "targets")
  marked = [part for text in texts for part in (text, MARK)]
  dataset = tf.data.Dataset.from_tensor_slices({feature: marked, "other": list(range(len(marked)))})
  by_text = [[]]
  for piece in cut_into_pieces(dataset, piece_bytes=piece_bytes, **names).as_numpy_iterator():
    assert piece.keys() == {output}
    if piece[output] == MARK:
      by_text.append([])
    else:
      by_text[-1].append(piece[output])
  assert by_text.pop() == []
  return by_text


class TestCutIntoPieces:
  @pytest.mark.parametrize("piece_bytes", [1, 7, 64, 1000])
  def test_gives_the_text_back_in_whole_lines_by_where_they_start(self, piece_bytes):
    for text, pieces in zip(texts(), pieces_of(texts(), piece_bytes), strict=True):
      assert b"".join(pieces) == text
      assert all(pieces)
      assert all(piece.endswith(b"\n") for piece in pieces[:-1])
      lines = text.split(b"\n")
      lines = [line + b"\n" for line in lines[:-1]] + lines[-1:]
      starts = itertools.accumulate(map(len, lines), initial=0)
      by_piece = collections.defaultdict(bytes)
      for start, line in zip(starts, lines, strict=False):
        by_piece[start // piece_bytes] += line
      assert pieces == [piece for piece in by_piece.values() if piece]
      assert max(map(len, pieces), default=0) < piece_bytes + max(map(len, lines))

  def test_reads_and_names_the_features_it_is_told(self):
    assert pieces_of([b"a\nb"], 1, feature="body", output="inputs") == [[b"a\n", b"b"]]


@pytest.mark.parametrize("piece_tokens", [1, 3, 64])
def test_token_pieces_are_of_one_length_but_the_last_and_lose_nothing(piece_tokens):
  sizes = [*range(9), 0, 200, 64, 0, 129, *[7] * 100]
  starts = np.cumsum([0, *sizes])
  ragged = tf.RaggedTensor.from_row_lengths(tf.range(int(starts[-1])), sizes)
  dataset = tf.data.Dataset.from_tensor_slices({"targets": ragged, "other": sizes})
  pieces = cut_into_token_pieces(dataset, piece_tokens=piece_tokens)
  assert pieces.element_spec == {"targets": tf.TensorSpec([None], tf.int32)}
  expected = [
    list(range(start, min(start + piece_tokens, stop)))
    for first, stop in itertools.pairwise(starts.tolist())
    for start in range(first, stop, piece_tokens)
  ]
  assert [piece["targets"].tolist() for piece in pieces.as_numpy_iterator()] == expected


@pytest.mark.parametrize("piece_tokens", [1, 3, 64])
def test_balanced_pieces_are_as_few_and_of_nearly_one_length_and_lose_nothing(piece_tokens):
  sizes = [*range(9), 0, 200, 64, 65, 0, 129, *[7] * 100]
  starts = np.cumsum([0, *sizes])
  ragged = tf.RaggedTensor.from_row_lengths(tf.range(int(starts[-1])), sizes)
  dataset = tf.data.Dataset.from_tensor_slices({"targets": ragged, "other": sizes})
  pieces = cut_into_balanced_pieces(dataset, piece_tokens=piece_tokens)
  assert pieces.element_spec == {"targets": tf.TensorSpec([None], tf.int32)}
  found = [piece["targets"].tolist() for piece in pieces.as_numpy_iterator()]
  assert list(itertools.chain.from_iterable(found)) == list(range(int(starts[-1])))
  by_example = [
    [len(piece) for piece in found if start <= piece[0] < stop]
    for start, stop in itertools.pairwise(starts.tolist())
  ]
  for size, lengths in zip(sizes, by_example, strict=True):
    assert sum(lengths) == size
    assert len(lengths) == -(-size // piece_tokens)
    assert lengths == sorted(lengths, reverse=True)
    assert max(lengths, default=0) - min(lengths, default=0) <= 1


def test_texts_of_white_space_are_left_out():
  dataset = tf.data.Dataset.from_tensor_slices({"targets": ["a", "", " \n\t", " b"]})
  assert [row["targets"] for row in without_empty_texts(dataset).as_numpy_iterator()] == [b"a", b" b"]


def seeded(preprocessor, examples, *args, map_seed=0, **kwargs):
  """What a preprocessor makes of `targets`, drawn as SeqIO draws; one result for each."""
  lengths = [len(example) for example in examples]
  tokens = np.concatenate([np.asarray(example, np.int32) for example in examples])
  ragged = tf.RaggedTensor.from_row_lengths(tokens, lengths)
  dataset = tf.data.Dataset.from_tensor_slices({"targets": ragged, "number": np.arange(len(lengths))})
  with seqio.utils.map_seed_manager(map_seed):
    results = list(preprocessor(dataset, *args, **kwargs).as_numpy_iterator())
  assert [result.pop("number") for result in results] == list(range(len(lengths)))
  return results


def chi_square(counts):
  expected = sum(counts) / len(counts)
  return sum((count - expected) ** 2 / expected for count in counts)


class TestRandomChunk:
  @pytest.mark.parametrize("length", [1, 5, 16])
  def test_takes_a_run_of_the_length_or_the_whole_example(self, length):
    examples = [np.arange(size) + 100 for size in range(40)]
    for example, result in zip(
      examples, seeded(random_chunk, examples, {"targets": length, "inputs": 3}), strict=True
    ):
      chunk = result["targets"]
      assert len(chunk) == min(length, len(example))
      if len(chunk):
        np.testing.assert_array_equal(chunk, np.arange(chunk[0], chunk[0] + length)[: len(chunk)])
        assert set(chunk) <= set(example)

  def test_starts_at_every_place_equally_often(self):
    starts = [result["targets"][0] for result in seeded(random_chunk, [range(24)] * 1500, {"targets": 16})]
    counts = collections.Counter(starts)
    assert sorted(counts) == list(range(9))
    assert chi_square(list(counts.values())) < 26.1  # 0.999 quantile with 8 degrees of freedom

  def test_takes_the_feature_it_is_told(self):
    (result,) = seeded(random_chunk, [range(9)], {"number": 3, "targets": 4}, feature="targets")
    assert len(result["targets"]) == 4


class TestLm:
  def test_targets_are_those_of_random_chunk_and_inputs_empty_where_the_task_has_them(self):
    examples = [np.arange(size) for size in range(30)]
    lengths = {"inputs": 4, "targets": 16}
    chunks = seeded(random_chunk, examples, lengths)
    for names in (("targets",), ("inputs", "targets")):
      results = seeded(lm, examples, lengths, {name: FEATURES[name] for name in names})
      for chunk, result in zip(chunks, results, strict=True):
        assert sorted(result) == list(names)
        np.testing.assert_array_equal(result["targets"], chunk["targets"])
        assert "inputs" not in names or (len(result["inputs"]), result["inputs"].dtype) == (0, np.int32)


class TestPrefixLm:
  @pytest.mark.parametrize("lengths", [(8, 8), (12, 3), (3, 12), (1, 1), (1, 5)])
  def test_inputs_and_targets_together_are_a_run_that_fits(self, lengths):
    lengths = dict(zip(("inputs", "targets"), lengths, strict=True))
    examples = [np.arange(size) + 100 for size in range(30)]
    for example, result in zip(examples, seeded(prefix_lm, examples, lengths), strict=True):
      both = np.concatenate([result["inputs"], result["targets"]])
      assert len(both) == min(len(example), max(lengths.values()))
      if len(both):
        np.testing.assert_array_equal(both, np.arange(both[0], both[0] + len(both)))
      assert all(len(result[name]) <= length for name, length in lengths.items())
      assert len(result["targets"]) or not len(example)
      if len(both) > 1:
        assert len(result["inputs"])

  @pytest.mark.parametrize(("lengths", "places"), [((8, 8), range(1, 8)), ((12, 4), range(8, 12))])
  def test_cuts_at_every_place_that_fits_equally_often(self, lengths, places):
    lengths = dict(zip(("inputs", "targets"), lengths, strict=True))
    counts = collections.Counter(len(r["inputs"]) for r in seeded(prefix_lm, [range(20)] * 1500, lengths))
    assert sorted(counts) == list(places)
    assert chi_square(list(counts.values())) < 22.5  # 0.999 quantile with 6 degrees of freedom

  def test_refuses_lengths_without_room(self):
    with pytest.raises(AnystepError) as caught:
      seeded(prefix_lm, [range(9)], {"inputs": 0, "targets": 5})
    assert (caught.value.code, caught.value.kind) == (78, "feature_length")
    assert caught.value.fields["got"] == {"inputs": 0, "targets": 5}


def features_with(extra_ids, *, add_eos=True):
  vocabulary = seqio.ByteVocabulary(extra_ids=extra_ids)
  feature = seqio.Feature(vocabulary, add_eos=add_eos)
  return {"inputs": feature, "targets": feature}


FEATURES = features_with(125)
VOCABULARY_SIZE = NUM_SPECIAL_IDS + NUM_BYTES + 125
LENGTHS = {"inputs": 512, "targets": 114}
FIRST_SENTINEL = VOCABULARY_SIZE - 1


def is_sentinel(token):
  return token >= NUM_SPECIAL_IDS + NUM_BYTES


def spans_of(tokens):
  """Runs of tokens, each by the sentinel before it; what stands before the first is under None."""
  spans, sentinel = collections.OrderedDict(), None
  for token in tokens:
    if is_sentinel(token):
      sentinel = token
      assert sentinel not in spans
    spans.setdefault(sentinel, [])
    if not is_sentinel(token):
      spans[sentinel].append(token)
  return spans


def restored(result):
  """The chunk: each sentinel of the inputs replaced by its span of the targets."""
  spans = spans_of(result["targets"].tolist())
  tokens = []
  for token in result["inputs"].tolist():
    tokens += spans.pop(token) if is_sentinel(token) else [token]
  assert not any(spans.values()), "spans without a place"
  return tokens


def random_tokens(count, seed):
  return np.random.default_rng(seed).integers(NUM_SPECIAL_IDS, NUM_SPECIAL_IDS + NUM_BYTES, count)


class TestSpanCorruption:
  @pytest.mark.parametrize("add_eos", [True, False])
  @pytest.mark.parametrize(
    "lengths",
    [LENGTHS, {"inputs": 64, "targets": 64}, {"inputs": 200, "targets": 20}, {"inputs": 9, "targets": 9}],
  )
  def test_fills_the_lengths_and_loses_no_token(self, lengths, add_eos):
    sizes = [0, 1, 2, 3, 4, 5, 17, 100, 567, 568, 569, 1000, 3000]
    examples = [random_tokens(size, size) for size in sizes]
    features = features_with(125, add_eos=add_eos)
    room = {name: length - add_eos for name, length in lengths.items()}
    chunk_tokens = span_corruption_chunk(room["inputs"], room["targets"])
    for example, result in zip(examples, seeded(span_corruption, examples, lengths, features), strict=True):
      chunk = restored(result)
      assert len(chunk) == min(len(example), chunk_tokens)
      text, part = (np.asarray(tokens, np.int32).tobytes() for tokens in (example, chunk))
      assert part in text
      for name in room:
        assert len(result[name]) <= room[name]
        assert result[name].dtype == np.int32
      if len(example) >= chunk_tokens:
        # One token more would corrupt at most one more, and open at most one more span.
        assert any(len(result[name]) >= room[name] - 1 for name in room)

  def test_puts_one_sentinel_for_each_span_from_the_vocabulary_s_end_down(self):
    for result in seeded(
      span_corruption, [random_tokens(700, seed) for seed in range(50)], LENGTHS, FEATURES
    ):
      in_inputs, in_targets = ([t for t in result[name].tolist() if is_sentinel(t)] for name in LENGTHS)
      # Both are cut by turns and the inputs begin: so what the last span of the targets hides is the end.
      assert in_targets == list(range(FIRST_SENTINEL, FIRST_SENTINEL - len(in_targets), -1))
      assert in_inputs == in_targets
      inputs, targets = (spans_of(result[name].tolist()) for name in LENGTHS)
      assert None not in targets
      assert inputs.popitem()[1] == []
      assert all(inputs.values())
      assert all(targets.values())

  def test_corrupts_15_percent_of_tokens_in_spans_of_3(self):
    """Over 2000 chunks, more than a million tokens."""
    results = seeded(
      span_corruption, [random_tokens(1000, seed) for seed in range(40)] * 50, LENGTHS, FEATURES
    )
    targets = np.concatenate([result["targets"] for result in results])
    inputs = np.concatenate([result["inputs"] for result in results])
    num_noise, num_clean = np.sum(~is_sentinel(targets)), np.sum(~is_sentinel(inputs))
    assert num_noise / (num_noise + num_clean) == pytest.approx(0.15, abs=0.001)
    assert num_noise / np.sum(is_sentinel(targets)) == pytest.approx(3, abs=0.05)

  def test_corrupts_the_share_and_the_spans_it_is_told(self):
    wider = {"inputs": 400, "targets": 400}
    (result,) = seeded(
      span_corruption, [random_tokens(3000, 0)], wider, FEATURES, noise_density=0.5, mean_span_tokens=5.0
    )
    num_noise = np.sum(~is_sentinel(result["targets"]))
    assert num_noise / len(restored(result)) == pytest.approx(0.5, abs=0.005)
    assert num_noise / np.sum(is_sentinel(result["targets"])) == pytest.approx(5, abs=0.1)

  def test_corrupts_every_set_of_spans_equally_often(self):
    """Ten tokens, four of them corrupted in two spans: 3 ways to part four tokens, 5 to part six."""
    results = seeded(
      span_corruption, [range(10, 20)] * 1500, LENGTHS, FEATURES, noise_density=0.4, mean_span_tokens=2.0
    )
    counts = collections.Counter(result["inputs"].tobytes() for result in results)
    assert len(counts) == 15
    assert chi_square(list(counts.values())) < 36.1  # 0.999 quantile with 14 degrees of freedom

  def test_starts_chunks_at_every_place_equally_often(self):
    lengths = {"inputs": 20, "targets": 10}
    chunk_tokens = span_corruption_chunk(19, 9)
    examples = [np.arange(chunk_tokens + 7) + NUM_SPECIAL_IDS] * 1500
    starts = [restored(result)[0] for result in seeded(span_corruption, examples, lengths, FEATURES)]
    counts = collections.Counter(starts)
    assert sorted(counts) == list(range(NUM_SPECIAL_IDS, NUM_SPECIAL_IDS + 8))
    assert chi_square(list(counts.values())) < 24.3  # 0.999 quantile with 7 degrees of freedom

  def test_draws_anew_for_every_seed(self):
    for map_seed in (0, 1):
      results = seeded(span_corruption, [random_tokens(568, 0)] * 500, LENGTHS, FEATURES, map_seed=map_seed)
      assert len({result["inputs"].tobytes() for result in results}) == 500
      assert len({result["targets"].tobytes() for result in results}) == 500

  def test_draws_chunk_clean_spans_and_corrupted_spans_of_seeds_of_their_own(self):
    """A seed for two of them would tie the clean spans to the corrupted ones."""
    results = seeded(
      span_corruption, [range(10, 22)] * 1500, LENGTHS, FEATURES, noise_density=0.5, mean_span_tokens=3.0
    )
    pairs = collections.Counter()
    for result in results:
      clean = len(spans_of(result["inputs"].tolist())[None])
      noise = len(spans_of(result["targets"].tolist())[FIRST_SENTINEL])
      pairs[clean, noise] += 1
    assert len(pairs) == 25
    assert chi_square(list(pairs.values())) < 51.2  # 0.999 quantile with 24 degrees of freedom

  def test_refuses_a_vocabulary_with_fewer_sentinels_than_spans(self):
    empty = tf.data.Dataset.from_tensors({"targets": tf.zeros([0], tf.int32)})
    spans = 28  # of 568 tokens, 85 are corrupted
    assert span_corruption(empty, LENGTHS, features_with(spans)) is not None
    for extra_ids in (spans - 1, 0):
      with pytest.raises(AnystepError) as caught:
        span_corruption(empty, LENGTHS, features_with(extra_ids))
      assert (caught.value.code, caught.value.kind) == (78, "sentinels")
      assert caught.value.fields == {
        "expected": "28 sentinels for 568 tokens",
        "got": f"extra_ids={extra_ids}",
      }

  @pytest.mark.parametrize("lengths", [{"inputs": 2, "targets": 114}, {"inputs": 512, "targets": 2}])
  def test_refuses_lengths_that_hold_no_chunk(self, lengths):
    empty = tf.data.Dataset.from_tensors({"targets": tf.zeros([0], tf.int32)})
    with pytest.raises(AnystepError) as caught:
      span_corruption(empty, lengths, FEATURES)
    assert caught.value.code == 78


def test_span_corruption_chunk_is_the_longest_that_fits():
  """Measured on what the graph makes of texts of every length."""
  longest = 400
  roomy = {"inputs": 10 * longest, "targets": 10 * longest}
  for options in ({}, {"noise_density": 0.3, "mean_span_tokens": 2.0}):
    features = features_with(2000, add_eos=False)
    results = seeded(span_corruption, [range(size) for size in range(2, longest)], roomy, features, **options)
    sizes = {size: (len(r["inputs"]), len(r["targets"])) for size, r in enumerate(results, 2)}
    generator = random.Random(0)
    for _ in range(300):
      inputs, targets = generator.randint(2, longest // 2), generator.randint(2, longest // 6)
      fitting = [size for size, (i, t) in sizes.items() if i <= inputs and t <= targets]
      assert span_corruption_chunk(inputs, targets, **options) == max(fitting)
  assert span_corruption_chunk(511, 113) == 568
