"""Made-up rows with the columns that TensorFlow Datasets says a dataset has; nothing is downloaded."""

from __future__ import annotations

import random
from typing import Any

import seqio
import tensorflow as tf
import tensorflow_datasets as tfds

WORDS = ["the", "kiwi", "bird's", "sings", "<br>", "<b>loud</b>", "it", "Wörter", "don't", "end."]
ROWS = 24
NUM_SHARDS = 2


class MadeUpRows(seqio.DataSource):
  """As many rows a split, in two shards; labels of `test` are not published.

  Args:
    source: of TensorFlow Datasets, whose splits these are.
    directory: where no datasets are.
    hides_a_label: of the first row of every split.
  """

  def __init__(self, source: seqio.TfdsDataSource, directory: Any, *, hides_a_label: bool = False):
    super().__init__(splits=tuple(source.splits))
    self._name = source.tfds_dataset.name
    self._directory = str(directory)
    self._hides_a_label = hides_a_label

  @property
  def supports_arbitrary_sharding(self):
    return False

  def list_shards(self, split):
    return [f"{split}-{k}" for k in range(NUM_SHARDS)]

  def get_dataset(self, split="train", shuffle=False, seed=None, shard_info=None, **unused):
    assert not shuffle
    features = tfds.builder(self._name, data_dir=self._directory).info.features
    rows = rows_of(self._name, split, features)
    if self._hides_a_label:
      rows[0] |= {name: hidden for name, hidden in (("label", -1), ("answers", [])) if name in rows[0]}
    shard = rows[shard_info.index :: shard_info.num_shards] if shard_info else rows
    return tf.data.Dataset.from_generator(lambda: shard, output_signature=features.get_tensor_spec())


def rows_of(name: str, split: str, features: tfds.features.FeaturesDict) -> list[dict[str, Any]]:
  """The rows of a split, the same every time."""
  rng = random.Random(f"{name} {split}")
  rows = [_value(rng, features, split) for _ in range(ROWS)]
  for number, row in enumerate(rows):
    if "wsc" in name:
      _add_pronoun(rng, row)
    if "record" in name:
      row["passage"] = "A bird sang.\n@highlight\nIt flew\n@highlight\n" + row["passage"]
      row["answers"] = [] if split == "test" else row["entities"][: 1 + number % 2]
      row["idx"] = {"passage": number // 3, "query": number}
    if "multirc" in name:
      row["idx"] = {"paragraph": number // 8, "question": number // 4, "answer": number}
  return rows


def _value(rng: random.Random, feature: Any, split: str) -> Any:
  if isinstance(feature, tfds.features.FeaturesDict):
    return {name: _value(rng, inner, split) for name, inner in feature.items()}
  if isinstance(feature, tfds.features.Sequence):
    return [_value(rng, feature.feature, split) for _ in range(3)]
  if isinstance(feature, tfds.features.ClassLabel):
    return -1 if split.startswith("test") else rng.randrange(feature.num_classes)
  if isinstance(feature, tfds.features.Text):
    return " ".join(rng.choices(WORDS, k=rng.randint(1, 9)))
  return round(rng.uniform(0, 5), 3) if feature.np_dtype == "float32" else rng.randrange(1000)


def _add_pronoun(rng: random.Random, row: dict[str, Any]) -> None:
  words = [*row["text"].split(" "), "and", "then", "she"]
  place = rng.randrange(1, len(words) - 1)
  row.update(text=" ".join(words), span2_index=place, span2_text=words[place], span1_text="Her big bird")
