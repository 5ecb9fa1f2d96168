"""Converters make a model's rows of a task's features, as SeqIO's do, packed and not."""

import functools

import caches
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from anystep.errors import AnystepError
from anystep.features.converters import (
  DecoderConverter,
  EncoderConverter,
  EncoderDecoderConverter,
  LMConverter,
  MaxTextConverter,
  PassThroughConverter,
  PrefixLMConverter,
  shift_right,
)
from anystep.features.ragged import Ragged

LENGTHS = {"inputs": 7, "targets": 6}
ALIGNED = {"inputs": 7, "targets": 7}
TARGETS = {"targets": 6}
# By test id: SeqIO's class and its options, ours, and the feature lengths.
CASES = {
  "encoder_decoder": ("EncDec", {"bos_id": 3}, EncoderDecoderConverter(bos_id=3), LENGTHS),
  "lm": ("LM", {"bos_id": 2}, LMConverter(bos_id=2), TARGETS),
  "prefix_lm": ("PrefixLM", {}, PrefixLMConverter(), LENGTHS),
  "prefix_lm_all_loss": (
    *("PrefixLM", {"loss_on_targets_only": False, "bos_id": 2}),
    *(PrefixLMConverter(loss_on_targets_only=False, bos_id=2), LENGTHS),
  ),
  "encoder": ("Encoder", {"mask_id": 4}, EncoderConverter(mask_id=4), ALIGNED),
  "decoder": ("Decoder", {}, DecoderConverter(), TARGETS),
  "decoder_prefix": (
    *("Decoder", {"loss_on_targets_only": False, "bos_id": 5}),
    *(DecoderConverter(loss_on_targets_only=False, bos_id=5), LENGTHS),
  ),
}
# Making a failing example smaller would run SeqIO for minutes.
GENERATE = [Phase.generate]
PREFIX = {"prefix_lm", "prefix_lm_all_loss", "decoder_prefix"}


def sequences(smallest_id, *, min_size=0, max_size=10):
  return st.lists(st.integers(smallest_id, 9), min_size=min_size, max_size=max_size)


def examples(smallest_id, **sizes):
  return st.fixed_dictionaries(
    {"inputs": sequences(smallest_id, **sizes), "targets": sequences(smallest_id, **sizes)}
  )


def ragged(rows, dtype=np.int32):
  return Ragged.of_rows([np.array(row, dtype) for row in rows], np.dtype(dtype))


def batch_of(rows):
  return {name: ragged([row[name] for row in rows]) for name in ("inputs", "targets")}


def filled(rows, length, dtype=np.int32):
  return np.array([(row + [0] * length)[:length] for row in rows], dtype).reshape(len(rows), length)


def packs_of(rows, feature_lengths):
  """Rows in their order, as many together as fit: a plan's greedy packs."""
  packs = []
  for row in rows:
    joined = [*packs[-1], row] if packs else []
    fits = all(
      sum(min(len(example[name]), length) for example in joined) <= length
      for name, length in feature_lengths.items()
    )
    if joined and fits:
      packs[-1].append(row)
    else:
      packs.append([row])
  return packs


def seqio_packs_of(rows, feature_lengths, *, as_one):
  """The rows of SeqIO's packing, which looks at as many examples at a time as the longest length.

  as_one: inputs and targets are packed as one sequence.
  """
  if as_one:
    whole = [{"targets": row["inputs"] + row["targets"], "row": row} for row in rows]
    packs = seqio_packs_of(whole, {"targets": sum(feature_lengths.values())}, as_one=False)
    return [[example["row"] for example in pack] for pack in packs]
  size = max(feature_lengths.values())
  chunks = [rows[k : k + size] for k in range(0, len(rows), size)]
  return [pack for chunk in chunks for pack in packs_of(chunk, feature_lengths)]


def convert(converter, packs, feature_lengths):
  counts = np.array([len(pack) for pack in packs], np.int64)
  return converter(batch_of([row for pack in packs for row in pack]), feature_lengths, counts)


def assert_same_rows(ours, theirs):
  assert all(their.keys() == ours.keys() for their in theirs)
  for name, values in ours.items():
    assert caches.same_array(values, np.stack([their[name] for their in theirs])), name


@functools.cache
def seqio_rows(case, *, pack):
  """What SeqIO's converter makes of examples: a function. Its graph is built once."""
  seqio = pytest.importorskip("seqio")
  tf = pytest.importorskip("tensorflow")
  name, options, _, lengths = CASES[case]
  fed = []
  dataset = tf.data.Dataset.from_generator(
    lambda: iter(fed), output_signature={name: tf.TensorSpec((None,), tf.int32) for name in LENGTHS}
  )
  # A length check would refuse what is longer; a task's own trimming is not part of the converter.
  converter = getattr(seqio, f"{name}FeatureConverter")(pack=pack, apply_length_check=False, **options)
  converted = converter(dataset, lengths)

  def run(rows):
    fed[:] = rows
    return list(converted.as_numpy_iterator())

  return run


@pytest.mark.parametrize("case", CASES)
def test_unpacked_rows_are_seqios(case):
  _, _, converter, lengths = CASES[case]
  run = seqio_rows(case, pack=False)

  @given(st.lists(examples(0), min_size=20, max_size=30))
  @settings(deadline=None, max_examples=3, derandomize=True, phases=GENERATE)
  def check(rows):
    assert_same_rows(converter(batch_of(rows), lengths), run(rows))

  check()


@pytest.mark.parametrize("case", sorted(CASES.keys() - {"decoder"}))
def test_packed_rows_are_seqios_where_no_id_is_0_and_no_sequence_empty(case):
  """SeqIO makes its own packs, greedily; given the same, so do we."""
  _, _, converter, lengths = CASES[case]
  run = seqio_rows(case, pack=True)
  # A prefix LM of SeqIO's cuts inputs and targets together.
  max_size = 6 if case in PREFIX else 8

  @given(st.lists(examples(1, min_size=1, max_size=max_size), min_size=15, max_size=30))
  @settings(deadline=None, max_examples=3, derandomize=True, phases=GENERATE)
  def check(rows):
    packs = seqio_packs_of(rows, lengths, as_one=case in PREFIX)
    theirs = run(rows)
    assert len(theirs) == len(packs)
    assert_same_rows(convert(converter, packs, lengths), theirs)

  check()


class Laid:
  """A packed feature in plain Python: tokens as (segment, place in the example, token)."""

  def __init__(self, packs, name, length):
    self.length = length
    self.rows = [
      [(k, place, token) for k, row in enumerate(pack, 1) for place, token in enumerate(row[name][:length])]
      for pack in packs
    ]

  def of(self, function):
    return filled([[int(function(*token)) for token in row] for row in self.rows], self.length)

  def values(self):
    return self.of(lambda segment, place, token: token)

  def ids(self, name):
    return {
      f"{name}_segment_ids": self.of(lambda segment, place, token: segment),
      f"{name}_positions": self.of(lambda segment, place, token: place),
    }

  def decoder(self):
    shifted = []
    for row in self.rows:
      before = [0, *(token for _, _, token in row)]
      shifted.append([0 if place == 0 else before[k] for k, (_, place, _) in enumerate(row)])
    return {
      "decoder_target_tokens": self.values(),
      "decoder_input_tokens": filled(shifted, self.length),
      "decoder_loss_weights": self.of(lambda *token: 1),
      **self.ids("decoder"),
    }


def joined(packs):
  """inputs and targets of each example as one sequence, cut to their lengths."""
  return [
    [{"targets": row["inputs"][: LENGTHS["inputs"]] + row["targets"][: LENGTHS["targets"]]} for row in pack]
    for pack in packs
  ]


def expected_prefix_lm(packs, loss_on_targets_only):
  laid = Laid(joined(packs), "targets", sum(LENGTHS.values()))
  widths = [[min(len(row["inputs"]), LENGTHS["inputs"]) for row in pack] for pack in packs]
  visible, weights = [], []
  for row, width in zip(laid.rows, widths, strict=True):
    visible.append([int(place <= width[segment - 1]) for segment, place, _ in row])
    weights.append(
      [int(place >= width[segment - 1] or not loss_on_targets_only) for segment, place, _ in row]
    )
  return {
    **laid.decoder(),
    "decoder_loss_weights": filled(weights, laid.length),
    "decoder_causal_attention": filled(visible, laid.length),
  }


def expected_encoder(packs):
  inputs, targets = (Laid(packs, name, length) for name, length in ALIGNED.items())
  return {
    "encoder_input_tokens": inputs.values(),
    "encoder_target_tokens": targets.values(),
    "encoder_loss_weights": inputs.of(lambda segment, place, token: token == 0),
    **inputs.ids("encoder"),
  }


def expected_max_text(packs):
  laid = Laid(packs, "targets", LENGTHS["targets"])
  decoder = laid.decoder()
  expected = {"inputs": decoder["decoder_input_tokens"], "targets": decoder["decoder_target_tokens"]}
  for name in ("inputs", "targets"):
    expected[f"{name}_segmentation"] = decoder["decoder_segment_ids"]
    expected[f"{name}_position"] = decoder["decoder_positions"]
  return expected


def expected_encoder_decoder(packs):
  inputs, targets = (Laid(packs, name, length) for name, length in LENGTHS.items())
  return {"encoder_input_tokens": inputs.values(), **inputs.ids("encoder"), **targets.decoder()}


def expected_pass_through(packs):
  laid = {name: Laid(packs, name, length) for name, length in LENGTHS.items()}
  return {key: v for name, own in laid.items() for key, v in {name: own.values(), **own.ids(name)}.items()}


@pytest.mark.parametrize(
  ("converter", "expected", "lengths"),
  [
    (EncoderDecoderConverter(), expected_encoder_decoder, LENGTHS),
    (LMConverter(), lambda packs: Laid(packs, "targets", LENGTHS["targets"]).decoder(), LENGTHS),
    (PrefixLMConverter(), functools.partial(expected_prefix_lm, loss_on_targets_only=True), LENGTHS),
    (
      PrefixLMConverter(loss_on_targets_only=False),
      functools.partial(expected_prefix_lm, loss_on_targets_only=False),
      LENGTHS,
    ),
    (EncoderConverter(mask_id=0), expected_encoder, ALIGNED),
    (MaxTextConverter(), expected_max_text, LENGTHS),
    (PassThroughConverter(), expected_pass_through, LENGTHS),
  ],
  ids=lambda value: type(value).__name__ if type(value).__module__ == "anystep.features.converters" else "",
)
def test_packed_rows_follow_from_lengths_whatever_the_tokens(converter, expected, lengths):
  """An id 0 is a token, and an example that is empty in a feature keeps its number."""

  @given(st.lists(examples(0), max_size=8))
  @settings(deadline=None, max_examples=40, derandomize=True)
  def check(rows):
    packs = packs_of(rows, lengths)
    ours, theirs = convert(converter, packs, lengths), expected(packs)
    assert ours.keys() == theirs.keys()
    for name, values in theirs.items():
      assert caches.same_array(ours[name], values), name

  check()


@given(st.lists(examples(0), max_size=8))
@settings(deadline=None, max_examples=40, derandomize=True)
def test_for_max_text_an_example_alone_is_a_row_of_one(rows):
  alone = MaxTextConverter()(batch_of(rows), LENGTHS)
  packed = convert(MaxTextConverter(), [[row] for row in rows], LENGTHS)
  assert alone.keys() == packed.keys()
  assert all(caches.same_array(alone[name], packed[name]) for name in alone)


def test_for_max_text_no_two_features_are_one_array():
  rows = MaxTextConverter()(batch_of([{"inputs": [], "targets": [5, 6]}]), LENGTHS)
  names = sorted(rows)
  assert names == sorted(
    f"{name}{suffix}" for name in ("inputs", "targets") for suffix in ("", "_position", "_segmentation")
  )
  pairs = [(one, other) for one in names for other in names if one < other]
  assert not any(np.shares_memory(rows[one], rows[other]) for one, other in pairs)


CONVERTERS = [EncoderDecoderConverter(), LMConverter(), PrefixLMConverter(), DecoderConverter()]
kinds = pytest.mark.parametrize("converter", CONVERTERS, ids=lambda converter: type(converter).__name__)


@kinds
def test_an_example_decides_its_own_segment_alone(converter):
  @given(st.lists(examples(0, max_size=4), min_size=2, max_size=5), st.data())
  @settings(deadline=None, max_examples=30, derandomize=True)
  def check(rows, data):
    packs = packs_of(rows, LENGTHS)
    row = data.draw(st.integers(0, len(packs) - 1))
    place = data.draw(st.integers(0, len(packs[row]) - 1))
    changed = {name: [token + 10 for token in tokens] for name, tokens in packs[row][place].items()}
    others = [list(pack) for pack in packs]
    others[row][place] = changed
    before, after = (convert(converter, made, LENGTHS) for made in (packs, others))
    for name, values in before.items():
      ids = before[f"{name.split('_')[0]}_segment_ids"]
      own = np.zeros(values.shape, bool)
      own[row] = ids[row] == place + 1
      if name == "decoder_input_tokens":
        # The last token is read once more, where nothing is learned: on padding, at most.
        own[row] |= ids[row] == 0
      same = values == after[name]
      assert same[~own].all(), name
      tokens = own & (values > 0)
      assert name.endswith("_tokens") == bool((~same).any()) or not tokens.any()

  check()


@kinds
def test_what_stands_in_padding_reaches_nothing_that_has_weight(converter):
  """Decoder inputs made anew of targets with anything in their padding are the same where loss is taken."""

  @given(st.lists(examples(1, min_size=1), min_size=1, max_size=6), st.booleans(), st.integers(1, 99))
  @settings(deadline=None, max_examples=30, derandomize=True)
  def check(rows, packed, junk):
    packs = packs_of(rows, LENGTHS) if packed else [[row] for row in rows]
    made = convert(converter, packs, LENGTHS) if packed else converter(batch_of(rows), LENGTHS)
    targets, weights = made["decoder_target_tokens"], made["decoder_loss_weights"]
    padding = targets == 0
    assert not weights[padding].any()
    dirty = np.where(padding, junk, targets).astype(np.int32)
    inputs = shift_right(dirty, made.get("decoder_segment_ids"))
    np.testing.assert_array_equal(inputs[weights > 0], made["decoder_input_tokens"][weights > 0])
    np.testing.assert_array_equal(inputs[~padding], made["decoder_input_tokens"][~padding])

  check()


@given(st.lists(sequences(0), min_size=1, max_size=5), st.integers(1, 10))
@settings(deadline=None, max_examples=50, derandomize=True)
def test_pass_through_cuts_and_fills_sequences_and_leaves_the_rest(rows, length):
  scalars = np.arange(len(rows), dtype=np.float32)
  batch = {"targets": ragged(rows), "score": scalars}
  converted = PassThroughConverter()(batch, {"targets": length, "unused": 3})
  assert converted.keys() == batch.keys()
  assert caches.same_array(converted["targets"], filled(rows, length))
  assert converted["score"] is scalars


def test_pass_through_leaves_a_feature_without_a_length_ragged():
  batch = {"inputs": ragged([[1], [2, 3]]), "targets": ragged([[4], []])}
  converted = PassThroughConverter()(batch, {"targets": 2})
  assert converted["inputs"] is batch["inputs"]
  assert converted["targets"].tolist() == [[4, 0], [0, 0]]


MIXED = {"flags": (bool, ()), "scores": (np.float32, ()), "boxes": (np.float32, (4,)), "ids": (np.int64, ())}


def test_pass_through_fills_as_seqio_whatever_the_dtype_and_rank():
  seqio = pytest.importorskip("seqio")
  tf = pytest.importorskip("tensorflow")
  generator = np.random.default_rng(0)
  rows = [
    {
      name: generator.integers(-2, 3, (generator.integers(0, 9), *inner)).astype(dtype)
      for name, (dtype, inner) in MIXED.items()
    }
    for _ in range(40)
  ]
  lengths = dict.fromkeys(MIXED, 5)
  dataset = tf.data.Dataset.from_generator(
    lambda: iter(rows),
    output_signature={name: tf.TensorSpec((None, *inner), dtype) for name, (dtype, inner) in MIXED.items()},
  )
  theirs = list(seqio.utils.trim_and_pad_dataset(dataset, lengths).as_numpy_iterator())
  batch = {
    name: Ragged.of_rows([row[name] for row in rows], np.dtype(dtype), inner)
    for name, (dtype, inner) in MIXED.items()
  }
  assert_same_rows(PassThroughConverter()(batch, lengths), theirs)
  kept = PassThroughConverter()(batch, {})
  assert all(kept[name] is batch[name] for name in batch)


def test_packed_pass_through_keeps_dtypes_and_takes_sequences_that_have_a_length_alone():
  batch = {
    "flags": ragged([[True], [], [False, True]], bool),
    "scores": ragged([[0.5, 0.25], [1.5], [0.0]], np.float32),
    "unnamed": ragged([[1], [2], [3]]),
    "boxes": Ragged(np.ones((3, 4), np.float32), np.ones(3, np.int64)),
    "number": np.arange(3),
  }
  lengths = {"flags": 3, "scores": 4, "boxes": 3, "number": 1}
  rows = PassThroughConverter()(batch, lengths, np.array([2, 1]))
  expected = {
    "flags": np.array([[True, False, False], [False, True, False]]),
    "flags_segment_ids": np.array([[1, 0, 0], [1, 1, 0]], np.int32),
    "flags_positions": np.array([[0, 0, 0], [0, 1, 0]], np.int32),
    "scores": np.array([[0.5, 0.25, 1.5, 0], [0, 0, 0, 0]], np.float32),
    "scores_segment_ids": np.array([[1, 1, 2, 0], [1, 0, 0, 0]], np.int32),
    "scores_positions": np.array([[0, 1, 0, 0], [0, 0, 0, 0]], np.int32),
  }
  assert rows.keys() == expected.keys()
  for name, values in expected.items():
    assert caches.same_array(rows[name], values), name


def test_unpacked_sequences_of_any_rank_have_an_encoder_decoders_weights():
  frames = Ragged(np.array([[1.5, 0], [0, 0], [2, 3]], np.float32), np.array([1, 2]))
  rows = EncoderDecoderConverter()({"inputs": frames, "targets": ragged([[1], [2]])}, LENGTHS)
  assert caches.same_array(rows["encoder_input_tokens"], frames.to_padded(7))


def test_padding_inside_targets_has_no_weight_unless_packed():
  batch = {"inputs": ragged([[1]]), "targets": ragged([[5, 0, 6]])}
  lengths = {"inputs": 1, "targets": 4}
  converted = EncoderDecoderConverter()(batch, lengths)
  assert converted["decoder_loss_weights"].tolist() == [[1, 0, 1, 0]]
  assert converted["decoder_input_tokens"].tolist() == [[0, 5, 0, 6]]
  packed = EncoderDecoderConverter()(batch, lengths, np.array([1]))
  assert packed["decoder_loss_weights"].tolist() == [[1, 1, 1, 0]]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("counts", [None, []])
def test_a_batch_of_no_rows_is_converted(case, counts):
  _, _, converter, lengths = CASES[case]
  counts = counts if counts is None else np.array(counts, np.int64)
  rows = converter(batch_of([]), lengths, counts)
  total = sum(lengths.values()) if case in PREFIX else None
  for name, values in rows.items():
    own = lengths.get("inputs" if name.startswith("encoder") else "targets")
    assert (values.dtype, values.shape) == (np.int32, (0, total or own)), name


def test_rows_may_have_no_length():
  batch = {"inputs": ragged([[1], []]), "targets": ragged([[2], [3, 4]])}
  for converter in (EncoderDecoderConverter(), PrefixLMConverter()):
    for counts in (None, np.array([1, 1])):
      converted = converter(batch, {"inputs": 0, "targets": 0}, counts)
      assert {values.shape for values in converted.values()} == {(2, 0)}


def test_a_prefix_lms_inputs_take_the_targets_dtype():
  batch = {"inputs": ragged([[-1]] * 20, np.int64), "targets": ragged([[2]] * 20)}
  rows = PrefixLMConverter()(batch, {"inputs": 1, "targets": 2})
  assert caches.same_array(rows["decoder_target_tokens"], np.array([[-1, 2, 0]] * 20, np.int32))


def test_shifting_keeps_dtype_and_rows_apart():
  targets = np.array([[5, 6], [7, 8]], np.int64)
  assert caches.same_array(shift_right(targets), np.array([[0, 5], [0, 7]]))
  assert targets.tolist() == [[5, 6], [7, 8]]


@pytest.mark.parametrize(
  ("batch", "missing"),
  [
    ({"inputs": ragged([[1]])}, "targets"),
    ({"targets": ragged([[1]]), "text": np.array([1])}, "inputs"),
    ({"inputs": np.array([1]), "targets": ragged([[1]])}, "inputs"),
  ],
)
@pytest.mark.parametrize("converter", [EncoderDecoderConverter(), PrefixLMConverter()], ids=lambda c: type(c))
def test_a_feature_that_is_not_there_is_named_with_those_that_are(converter, batch, missing):
  with pytest.raises(AnystepError) as refused:
    converter(batch, {"inputs": 4, "targets": 4})
  assert (refused.value.code, refused.value.kind) == (78, "feature_missing")
  assert refused.value.fields == {"expected": missing, "got": ", ".join(sorted(batch))}


def test_a_models_feature_without_a_length_is_refused():
  batch = {"inputs": ragged([[1]]), "targets": ragged([[1]])}
  with pytest.raises(AnystepError) as refused:
    EncoderDecoderConverter()(batch, {"inputs": 4, "target": 4})
  assert (refused.value.code, refused.value.kind) == (78, "feature_length")
  assert refused.value.fields["expected"] == "a length for targets"
  assert refused.value.fields["got"] == {"inputs": 4, "target": 4}
  assert "(named there now: target" in refused.value.fix


@pytest.mark.parametrize(
  ("converter", "counts"),
  [
    (EncoderDecoderConverter(), np.array([1])),
    (PrefixLMConverter(), None),
    (MaxTextConverter(), None),
  ],
  ids=["packed", "prefix_lm", "max_text"],
)
def test_what_can_only_be_of_rank_1_is_refused_otherwise(converter, counts):
  frames = Ragged(np.ones((2, 3), np.float32), np.array([2]))
  with pytest.raises(AnystepError) as refused:
    converter({"inputs": ragged([[1]]), "targets": frames}, LENGTHS, counts)
  assert (refused.value.code, refused.value.kind) == (78, "feature_rank")
  assert refused.value.fields == {"feature": "targets", "expected": "rank 1", "got": 2}


def test_a_decoder_refuses_suffixes():
  batch = {**batch_of([{"inputs": [1], "targets": [2]}]), "suffixes": ragged([[3]])}
  with pytest.raises(AnystepError) as refused:
    DecoderConverter()(batch, {**LENGTHS, "suffixes": 3})
  assert (refused.value.code, refused.value.kind) == (78, "feature_unsupported")
  assert refused.value.fields["got"] == {**LENGTHS, "suffixes": 3}
  assert "SeqioConverter" in refused.value.fix
