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
    if not self.tfds_dataset.info.splits:
      raise _make_missing_error(self)


def list_splits(task: seqio.Task) -> list[str]:
  """A task's splits: SeqIO finds those of a dataset of TensorFlow Datasets on disk.

  Raises:
    AnystepError: 66 `dataset_missing` where there are none.
  """
  try:
    return list(task.splits)
  except ValueError as error:
    if not isinstance(task.source, seqio.TfdsDataSource):
      raise
    raise _make_missing_error(task.source) from error


def _make_missing_error(source: seqio.TfdsDataSource) -> AnystepError:
  loader = source.tfds_dataset
  dataset = str(loader.name).partition(":")[0]
  return AnystepError(
    ExitCode.NO_INPUT,
    "dataset_missing",
    dataset=loader.name,
    expected=f"its files in {loader.builder.data_dir}",
    got="none",
    fix=f"make them with `tfds build {dataset}`, or say where they lie: --tfds_data_dir or TFDS_DATA_DIR",
  )
