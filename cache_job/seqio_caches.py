"""Caches that SeqIO wrote, taken as sources: their examples are reshuffled, and no preprocessor runs."""

from __future__ import annotations

import json
import re
from typing import Any

import seqio
from etils import epath

from anystep.errors import AnystepError, ExitCode


def cached_shards(directory: epath.PathLike, split: str) -> list[str]:
  """The names of a split's files in a cache that `seqio_cache_tasks` wrote.

  Raises:
    AnystepError: 66 `seqio_cache_missing`; 65 `seqio_cache_incomplete`.
  """
  path = epath.Path(directory)
  if not (path / "COMPLETED").exists():
    raise AnystepError(
      ExitCode.NO_INPUT,
      "seqio_cache_missing",
      path=path,
      expected="a complete cache by seqio_cache_tasks",
      fix="give --from_seqio_cache what seqio_cache_tasks had as --output_cache_dir",
    )
  pattern = re.compile(rf"{re.escape(split)}\.tfrecord-\d+-of-\d+\Z")
  shards = sorted(entry.name for entry in path.iterdir() if pattern.match(entry.name))
  info = json.loads(epath.Path(seqio.utils.get_cached_info_path(str(path), split)).read_bytes())
  num_shards = info["num_shards"]
  expected = [f"{split}.tfrecord-{k:05d}-of-{num_shards:05d}" for k in range(num_shards)]
  if shards != expected:
    raise _incomplete(path, f"{num_shards} files, numbered of {num_shards}", f"{len(shards)} files")
  return shards


def read_cached_shard(directory: epath.PathLike, split: str, shard: int) -> Any:
  """A file's examples as a tf.data dataset, as SeqIO reads them."""
  num_shards = len(cached_shards(directory, split))
  source = seqio.dataset_providers._CachedDataSource(str(directory), split)
  shard_info = seqio.ShardInfo(index=shard, num_shards=num_shards)
  return source.get_dataset(split=split, shuffle=False, shard_info=shard_info)


def check_count(directory: epath.PathLike, split: str, num_examples: int) -> None:
  """Compares with the number of examples that SeqIO noted when it wrote them.

  Raises:
    AnystepError: 65 `seqio_cache_incomplete`.
  """
  stats = json.loads(epath.Path(seqio.utils.get_cached_stats_path(str(directory), split)).read_bytes())
  if stats["examples"] != num_examples:
    raise _incomplete(directory, f"{stats['examples']} examples", f"{num_examples} examples")


def _incomplete(directory: epath.PathLike, expected: str, got: str) -> AnystepError:
  return AnystepError(
    ExitCode.DATA,
    "seqio_cache_incomplete",
    path=directory,
    expected=expected,
    got=got,
    fix="restore the cache, or cache the task from its source without --from_seqio_cache",
  )
