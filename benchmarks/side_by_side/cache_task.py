"""The task that cache jobs are compared on; jobs import this module, which registers it.

CACHE_BENCHMARK_TEXTS names the directory of its text files, an example a line.
"""

from __future__ import annotations

import os
import pathlib

import seqio
import tensorflow as tf

TASK = "lines_of_python"
SPLIT = "train"


@seqio.map_over_dataset
def as_targets(line: tf.Tensor) -> dict[str, tf.Tensor]:
  """`{"targets": line}`."""
  return {"targets": line}


def register(texts: pathlib.Path) -> seqio.Task:
  """Registers the task: each line and its bytes as tokens in the cache, end tokens after it."""
  return seqio.TaskRegistry.add(
    TASK,
    source=seqio.TextLineDataSource({SPLIT: str(texts / "*.txt")}),
    preprocessors=[
      as_targets,
      seqio.preprocessors.tokenize,
      seqio.CacheDatasetPlaceholder(),
      seqio.preprocessors.append_eos,
    ],
    output_features={"targets": seqio.Feature(seqio.ByteVocabulary())},
  )


register(pathlib.Path(os.environ["CACHE_BENCHMARK_TEXTS"]))
