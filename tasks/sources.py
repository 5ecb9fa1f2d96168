"""Sources for SeqIO tasks that SeqIO has none of."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import seqio
import tensorflow as tf

from anystep.examples import Ragged
from anystep.manifest import Feature
from anystep.parquet_rows import check_same_columns, open_parquet


class ParquetDataSource(seqio.FileDataSource):
  """The rows of Parquet files, in their order: a column is a feature, a list a sequence.

  A shard is a file. Columns are integers, bool, floats, texts, lists and fixed-size lists of these, and the
  same in every file of every split. Texts are bytes, as everywhere in TensorFlow.

  Args:
    split_to_filepattern: by split a pattern of files, or several.
    columns: those that are read; None for all.
    num_input_examples: rows by split, where they are known.

  Raises:
    AnystepError: of its datasets: 78 `feature_form` for a column of another type, `column_missing`,
      `package_missing`; `files_differ` for a file with other columns than the first. While rows are read,
      TensorFlow makes an error of its own of them, and of 65 `column_null`.
  """

  def __init__(
    self,
    split_to_filepattern: Mapping[str, str | Iterable[str]],
    columns: Sequence[str] | None = None,
    *,
    num_input_examples: Mapping[str, int] | None = None,
  ):
    self._columns = None if columns is None else list(columns)
    super().__init__(self._rows_of, split_to_filepattern, num_input_examples=num_input_examples)

  # A graph made of Python's code would hide whose errors they are.
  @tf.autograph.experimental.do_not_convert
  def _rows_of(self, path: tf.Tensor) -> tf.data.Dataset:
    # The elements' types are asked for before there is a path.
    first = next(files[0] for split in sorted(self.splits) if (files := self.list_shards(split)))
    features = open_parquet(first, self._columns).features
    signature = {name: _spec(feature) for name, feature in features.items()}
    batches = functools.partial(_batches, columns=self._columns, features=features)
    dataset = tf.data.Dataset.from_generator(batches, output_signature=signature, args=[path]).unbatch()
    # A row of what is ragged is a tensor, which TensorFlow does not say of it.
    return dataset.map(
      lambda example: {name: tf.ensure_shape(example[name], f.shape) for name, f in features.items()}
    )


def _spec(feature: Feature) -> tf.TypeSpec:
  """What some rows of a column are to TensorFlow."""
  dtype, shape = tf.as_dtype(feature.dtype), [None, *feature.shape]
  if None in feature.shape:
    return tf.RaggedTensorSpec(shape, dtype, ragged_rank=1)
  return tf.TensorSpec(shape, dtype)


def _batches(
  path: bytes, *, columns: Sequence[str] | None, features: Mapping[str, Feature]
) -> Iterator[dict[str, Any]]:
  rows = open_parquet(path.decode(), columns)
  check_same_columns(path.decode(), rows.features, expected=features)
  for batch in rows.batches():
    yield {name: _tensor(column, features[name]) for name, column in batch.items()}


def _tensor(column: Ragged | np.ndarray, feature: Feature) -> Any:
  if not isinstance(column, Ragged):
    return column
  if None in feature.shape:
    return tf.RaggedTensor.from_row_lengths(column.values, column.lengths, validate=False)
  return column.values.reshape(len(column), *feature.shape)
