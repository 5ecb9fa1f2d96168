"""Exercises in arithmetic, and letters to copy: examples that are a function of their number."""

import numpy as np
import pytest
import seqio

from anystep.errors import AnystepError
from anystep.tasks.catalogue import arithmetic, copying
from anystep.tasks.catalogue.arithmetic import ArithmeticSource
from anystep.tasks.catalogue.copying import LettersSource
from anystep.tasks.sources.numbered_source import NUM_SOURCE_SHARDS, NumberedSource

SIZES = {"train": 300, "validation": 40, "test": 45}
SPLITS = list(SIZES)
SOURCES = {
  "addition 2": lambda: ArithmeticSource("addition", 2, sizes=SIZES),
  "multiplication 9": lambda: ArithmeticSource("multiplication", 9, sizes=SIZES),
  "reverse 40": lambda: LettersSource("reverse", 40, sizes=SIZES),
  "bits": lambda: LettersSource("reverse", 70, sizes=SIZES, letters="01"),
}
TASKS = {
  *(f"arithmetic_{name}" for name in ("addition_2", "addition_4", "addition_8")),
  *(f"arithmetic_{name}" for name in ("multiplication_2", "multiplication_4")),
  *("copy_8", "copy_32", "reverse_8", "reverse_32"),
}


def pairs_of(source, split, **arguments):
  dataset = source.get_dataset(split, **arguments)
  return [(row["inputs"].decode(), row["targets"].decode()) for row in dataset.as_numpy_iterator()]


@pytest.mark.parametrize("name", SOURCES)
class TestASourceOfNumberedExamples:
  def test_has_as_many_examples_as_asked_for_no_two_of_all_splits_the_same(self, name):
    source = SOURCES[name]()
    texts = {split: [inputs for inputs, _ in pairs_of(source, split)] for split in SPLITS}
    assert {split: len(own) for split, own in texts.items()} == SIZES
    assert {split: source.num_input_examples(split) for split in source.splits} == SIZES
    assert len({text for own in texts.values() for text in own}) == sum(SIZES.values())

  @pytest.mark.parametrize("num_shards", [2, 7])
  def test_has_the_same_examples_in_the_same_order_over_any_number_of_shards(self, name, num_shards):
    source, again = SOURCES[name](), SOURCES[name]()
    shards = [
      pairs_of(again, "validation", shard_info=seqio.ShardInfo(k, num_shards)) for k in range(num_shards)
    ]
    assert [pair for shard in shards for pair in shard] == pairs_of(source, "validation")
    assert max(map(len, shards)) - min(map(len, shards)) <= 1
    assert source.supports_arbitrary_sharding
    assert len(set(source.list_shards("validation"))) == NUM_SOURCE_SHARDS

  def test_makes_an_example_from_its_number_alone(self, name):
    source = SOURCES[name]()
    together = pairs_of(source, "train")
    for number in (0, 1, 299):
      inputs, targets = source.texts_of(np.array([number]))
      assert [(inputs[0], targets[0])] == together[number : number + 1]

  def test_shuffles_where_asked_by_the_seed(self, name):
    source = SOURCES[name]()
    plain, one, again, other = (
      pairs_of(source, "train", shuffle=seed is not None, seed=seed) for seed in (None, 1, 1, 2)
    )
    assert one == again
    assert len({tuple(plain), tuple(one), tuple(other)}) == 3
    assert sorted(plain) == sorted(one) == sorted(other)


def made(source, size):
  """The first examples of all splits, as pairs."""
  return list(zip(*source.texts_of(np.arange(size)), strict=True))


@pytest.mark.parametrize("operation", ["addition", "multiplication"])
@pytest.mark.parametrize("digits", [1, 2, 3, 6, 9])
def test_exercises_have_numbers_of_so_many_digits_and_the_right_results(operation, digits):
  sign = {"addition": "+", "multiplication": "*"}[operation]
  for exercise, result in made(ArithmeticSource(operation, digits, sizes={"train": 55}), 55):
    left, right = exercise.split(sign)
    assert len(left) == len(right) == digits
    assert (str(int(left)), str(int(right))) == (left, right)
    # Python's own whole numbers have no largest one.
    assert int(result) == (int(left) + int(right) if sign == "+" else int(left) * int(right))


@pytest.mark.parametrize(("digits", "smallest", "largest"), [(1, 0, 9), (2, 10, 99)])
def test_all_pairs_of_numbers_come_and_none_again_the_other_way_round(digits, smallest, largest):
  operands = largest - smallest + 1
  num_pairs = operands * (operands + 1) // 2
  source = ArithmeticSource("addition", digits, sizes={"train": num_pairs - 15, "validation": 15})
  pairs = [tuple(map(int, exercise.split("+"))) for exercise, _ in made(source, num_pairs)]
  assert len({frozenset(pair) for pair in pairs}) == len(pairs) == num_pairs
  assert min(map(min, pairs)) == smallest
  assert max(map(max, pairs)) == largest
  # Either way round is as likely.
  ascending = sum(a < b for a, b in pairs)
  assert abs(ascending - (num_pairs - operands) / 2) < 3 * num_pairs**0.5 / 2


def test_operands_are_spread_evenly():
  source = ArithmeticSource("addition", 4, sizes={"train": 20_000})
  exercises, _ = source.texts_of(np.arange(20_000))
  left, right = np.array([exercise.split("+") for exercise in exercises]).astype(int).T
  for operand in (left, right):
    counts = np.bincount((operand - 1000) // 900, minlength=10)
    assert np.abs(counts - 2000).max() < 5 * 2000**0.5
  assert abs(np.corrcoef(left, right)[0, 1]) < 5 / 20_000**0.5


@pytest.mark.parametrize("operation", ["copy", "reverse"])
@pytest.mark.parametrize(("length", "letters"), [(1, "abcdefgh"), (5, "ab"), (13, "xyz"), (70, "01")])
def test_letters_are_copied_or_reversed(operation, length, letters):
  for inputs, result in made(LettersSource(operation, length, sizes={"train": 8}, letters=letters), 8):
    named, text = inputs.split(": ")
    assert named == operation
    assert len(text) == length
    assert set(text) <= set(letters)
    assert result == (text if operation == "copy" else text[::-1])


def test_all_words_come_where_as_many_are_asked_for():
  source = LettersSource("copy", 3, sizes={"train": 100, "test": 25}, letters="abcde")
  assert len({result for _, result in made(source, 125)}) == 5**3


def test_letters_are_spread_evenly_at_every_place_and_do_not_follow_each_other():
  _, texts = LettersSource("copy", 40, sizes={"train": 5000}, letters="abcd").texts_of(np.arange(5000))
  letters = np.array([list(text) for text in texts])
  for letter in "abcd":
    assert np.abs((letters == letter).sum(axis=0) - 1250).max() < 5 * 1250**0.5
  codes = letters.view(np.int32).reshape(5000, -1).astype(float)
  correlations = np.corrcoef(codes.T) - np.eye(40)
  assert np.abs(correlations).max() < 6 / 5000**0.5


@pytest.mark.parametrize(
  ("make", "kind", "got", "expected"),
  [
    (lambda: ArithmeticSource("adition", 2, sizes=SIZES), "operation_unknown", "adition", "addition or"),
    (lambda: ArithmeticSource("addition", 0, sizes=SIZES), "digits", 0, "1 to 9"),
    (lambda: ArithmeticSource("addition", 10, sizes=SIZES), "digits", 10, "1 to 9"),
    (lambda: ArithmeticSource("addition", 1, sizes=SIZES), "too_many_examples", "385 of train", "most 55 "),
    (lambda: LettersSource("revers", 2, sizes=SIZES), "operation_unknown", "revers", "copy or reverse"),
    (lambda: LettersSource("copy", 2, sizes=SIZES, letters="a"), "letters", "a", "two or more"),
    (lambda: LettersSource("copy", 2, sizes=SIZES, letters="aba"), "letters", "aba", "different"),
    (lambda: LettersSource("copy", 0, sizes=SIZES), "length", 0, "1 or more"),
    (lambda: LettersSource("copy", 1, sizes=SIZES), "too_many_examples", "385 of train", "most 26 "),
  ],
)
def test_what_cannot_be_made_is_refused(make, kind, got, expected):
  with pytest.raises(AnystepError) as caught:
    make()
  assert (caught.value.code, caught.value.kind) == (78, kind)
  assert str(caught.value.fields["got"]).startswith(str(got))
  assert expected in caught.value.fields["expected"]
  if kind == "operation_unknown":
    assert caught.value.fields["nearest"] in ("addition", "reverse")


@pytest.mark.parametrize("name", sorted(TASKS))
def test_tasks_give_the_exercise_and_its_result_as_bytes(name):
  task = seqio.TaskRegistry.get(name)
  assert isinstance(task.source, NumberedSource)
  lengths = {"inputs": 64, "targets": 64}
  dataset = task.get_dataset(lengths, "test", use_cached=False, shuffle=False)
  assert {split: task.source.num_input_examples(split) for split in SPLITS[1:]} == dict.fromkeys(
    SPLITS[1:], 500
  )
  assert task.source.num_input_examples("train") == (3_000 if name.endswith("_2") else 100_000)
  examples = dataset.take(5).as_numpy_iterator()
  expected = pairs_of(task.source, "test", shard_info=seqio.ShardInfo(0, 100))
  for example, (inputs, targets) in zip(examples, expected, strict=True):
    for feature, text in (("inputs", inputs), ("targets", targets)):
      assert example[feature].tolist() == [*(byte + 3 for byte in text.encode()), 1]
  for metric in task.metric_fns:
    (value,) = metric(["12", "3"], ["12", "4"]).values()
    assert value in (50, 0.5)


def test_tasks_of_other_sizes_and_vocabularies_are_made_in_one_line():
  vocabulary = seqio.ByteVocabulary(extra_ids=3)
  arithmetic.add_task(
    "multiplication", 3, train_examples=7, held_out_examples=2, vocabulary=vocabulary, prefix="mine_"
  )
  copying.add_task("copy", 3, letters="xy", train_examples=4, held_out_examples=1, prefix="mine_")
  sizes = {}
  for name in ("mine_arithmetic_multiplication_3", "mine_copy_3"):
    task = seqio.TaskRegistry.get(name)
    sizes[name] = [len(pairs_of(task.source, split)) for split in SPLITS]
    seqio.TaskRegistry.remove(name)
  assert sizes == {"mine_arithmetic_multiplication_3": [7, 2, 2], "mine_copy_3": [4, 1, 1]}
