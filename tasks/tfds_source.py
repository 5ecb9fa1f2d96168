"""Datasets of TensorFlow Datasets that are on disk already."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import seqio
import tensorflow as tf

from anystep.errors import AnystepError, ExitCode


class TfdsSource(seqio.TfdsDataSource):
  """A dataset of TensorFlow Datasets, which is read and never downloaded.

  SeqIO's own source downloads and builds what is missing at its first use, in each worker of a job. This one
  says what is missing, and the command that makes it.

  Args:
    name: of the dataset, its configuration and version, as "glue/cola:2.0.0".
    splits: those it has: so that they are known without the data.

  Raises:
    AnystepError: of its shards and datasets: 66 `dataset_missing`.
  """

  def __init__(self, name: str, splits: Sequence[str]):
    super().__init__(tfds_name=name, splits=splits, read_only=True)

  def list_shards(self, split: str) -> Sequence[str]:
    """Names of the split's files."""
    self._check()
    return super().list_shards(split)

  def num_input_examples(self, split: str) -> int | None:
    """Number of the split's examples."""
    self._check()
    return super().num_input_examples(split)

  def get_dataset(self, split: str | None = None, *args: Any, **arguments: Any) -> tf.data.Dataset:
    """See `seqio.TfdsDataSource.get_dataset`."""
    self._check()
    return super().get_dataset(split, *args, **arguments)

  def _check(self) -> None:
    loader = self.tfds_dataset
    if loader.info.splits:
      return
    dataset = str(loader.name).partition(":")[0]
    raise AnystepError(
      ExitCode.NO_INPUT,
      "dataset_missing",
      dataset=loader.name,
      expected=f"its files in {loader.builder.data_dir}",
      got="none",
      fix=f"make them with `tfds build {dataset}`, or say where they lie: --tfds_data_dir or TFDS_DATA_DIR",
    )
