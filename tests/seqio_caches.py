"""Caches as SeqIO's own program writes them."""

from __future__ import annotations

import pathlib
import types
from collections.abc import Sequence

import apache_beam as beam
import pytest
from seqio.scripts import cache_tasks_main


def write_seqio_cache(root: pathlib.Path, tasks: Sequence[str]) -> None:
  """Runs `seqio_cache_tasks` on registered tasks, in this process."""
  flags = types.SimpleNamespace(
    base_seed=None, tfds_data_dir=None, min_shards=3, max_shards=0, enable_char_counts=False
  )
  with pytest.MonkeyPatch.context() as patch, beam.Pipeline() as pipeline:
    patch.setattr(cache_tasks_main, "FLAGS", flags)
    cache_tasks_main.run_pipeline(pipeline, list(tasks), str(root))
