"""The tasks on the standard library's files, and their source."""

import collections

import numpy as np
import pytest
import seqio
import tensorflow as tf

from anystep.tasks.catalogue import stdlib

SPLITS = ("train", "validation")
NUM_FILES = 1600
LENGTHS = {"inputs": 64, "targets": 32}


def write_files(directory, names):
  for name in names:
    path = directory / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"# {name}\n")


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
  directory = tmp_path_factory.mktemp("library")
  write_files(directory, [f"part_{k % 7}/module_{k}.py" for k in range(NUM_FILES)])
  skipped = ["site-packages/a.py", "part_1/__pycache__/b.py", "x/dist-packages/y/c.py", "notes.txt", "d.pyc"]
  write_files(directory, skipped)
  return directory


def shards_of(source, split):
  """Names by shard."""
  count = len(source.list_shards(split))
  return [
    [
      example["name"].decode()
      for example in source.get_dataset(
        split, shuffle=False, shard_info=seqio.ShardInfo(k, count)
      ).as_numpy_iterator()
    ]
    for k in range(count)
  ]


def files_of(source, split):
  dataset = source.get_dataset(split, shuffle=False)
  return [example["name"].decode() for example in dataset.as_numpy_iterator()]


def test_the_shards_of_both_splits_hold_every_file_once(directory):
  source = stdlib.PythonFilesSource(str(directory))
  names = [name for split in SPLITS for shard in shards_of(source, split) for name in shard]
  assert sorted(names) == sorted(f"part_{k % 7}/module_{k}.py" for k in range(NUM_FILES))
  for split in SPLITS:
    sizes = [len(shard) for shard in shards_of(source, split)]
    assert len(sizes) == len(set(source.list_shards(split))) == stdlib.NUM_SOURCE_SHARDS
    assert sum(sizes) == source.num_input_examples(split)
    assert max(sizes) - min(sizes) <= 1


def test_one_file_in_64_is_held_out(directory):
  held_out = stdlib.PythonFilesSource(str(directory)).num_input_examples("validation")
  assert abs(held_out - NUM_FILES / 64) < 3 * (NUM_FILES / 64 * 63 / 64) ** 0.5


def test_a_file_s_split_depends_on_its_path_alone(directory, tmp_path):
  names = [f"part_{k % 7}/module_{k}.py" for k in range(0, NUM_FILES, 3)]
  write_files(tmp_path, reversed(names))
  source = stdlib.PythonFilesSource(str(directory))
  fewer = stdlib.PythonFilesSource(str(tmp_path))
  for split in SPLITS:
    assert set(files_of(fewer, split)) == set(files_of(source, split)) & set(names)
  assert fewer.list_shards("train") == source.list_shards("train")


def test_files_come_in_the_same_order_again_whole_and_shuffled_only_if_asked(directory):
  source, again = (stdlib.PythonFilesSource(str(directory)) for _ in range(2))
  assert files_of(source, "train") == files_of(again, "train")
  plain = list(source.get_dataset("validation").as_numpy_iterator())
  shuffled = list(again.get_dataset("validation", shuffle=True, seed=3).as_numpy_iterator())
  assert [example["name"] for example in plain] != [example["name"] for example in shuffled]
  for examples in (plain, shuffled):
    for example in examples:
      assert example["text"].decode() == f"# {example['name'].decode()}\n"
  assert collections.Counter(e["name"] for e in plain) == collections.Counter(e["name"] for e in shuffled)


def test_a_split_without_files_is_empty(tmp_path):
  source = stdlib.PythonFilesSource(str(tmp_path))
  assert [files_of(source, split) for split in SPLITS] == [[], []]


@pytest.mark.parametrize("name", ["stdlib_span_corruption", "stdlib_lm"])
def test_tasks_make_the_same_examples_of_the_interpreter_s_own_files_again(name):
  task = seqio.TaskRegistry.get(name)
  lengths = {feature: LENGTHS[feature] for feature in task.output_features}

  def first_examples():
    tf.random.set_seed(0)
    dataset = task.get_dataset(lengths, "validation", use_cached=False, shuffle=False, seed=0)
    return list(dataset.take(5).as_numpy_iterator())

  examples = first_examples()
  for example, again in zip(examples, first_examples(), strict=True):
    assert example.keys() == lengths.keys() == again.keys()
    for feature, length in lengths.items():
      np.testing.assert_array_equal(example[feature], again[feature])
      assert 0 < len(example[feature]) <= length
      assert example[feature].max() < stdlib.VOCABULARY.vocab_size
  assert stdlib.VOCABULARY.vocab_size % 128 == 0


@pytest.mark.parametrize("name", ["stdlib_span_corruption", "stdlib_lm"])
def test_what_tasks_cache_are_pieces_of_about_800_bytes(name):
  task = seqio.TaskRegistry.get(name)
  dataset = task.source.get_dataset("validation", shard_info=seqio.ShardInfo(0, stdlib.NUM_SOURCE_SHARDS))
  pieces = [example["targets"] for example in task.preprocess_precache(dataset.take(4)).as_numpy_iterator()]
  text = b"".join(example["text"] for example in dataset.take(4).as_numpy_iterator())
  decoded = [bytes((tokens - 3).astype(np.uint8)) for tokens in pieces]
  assert b"".join(decoded) == text
  assert all(len(piece) < stdlib.PIECE_BYTES + 200 for piece in decoded)
  assert task.supports_caching
