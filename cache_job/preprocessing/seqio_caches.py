"""Caches that SeqIO wrote, taken as sources: their examples are reshuffled, and no preprocessor runs."""

from __future__ import annotations

import re
from typing import Any

import seqio
from etils import epath

from anystep.errors import AnystepError, ExitCode
from anystep.files.json_files import read_json
from anystep.files.names import info_name, stats_name
from anystep.tasks import seqio_internals


def list_cached_shards(directory: epath.PathLike, split: str) -> list[str]:
  """Return the names of a split's files in a cache by `seqio_cache_tasks`, with one listing.

  Raises:
    AnystepError: 66 `seqio_cache_missing`; 66 `split_empty`; 65 `seqio_cache_incomplete`.
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
  info = _read_document(path, info_name(split))
  # SeqIO describes a split by one of its examples.
  if not info:
    raise AnystepError(
      ExitCode.NO_INPUT,
      "split_empty",
      path=path / info_name(split),
      split=split,
      expected="at least one example",
      got="none in SeqIO's cache",
      fix="leave the split out with --splits",
    )
  num_shards = info.get("num_shards")
  if not isinstance(num_shards, int) or "features" not in info:
    raise _make_incomplete_error(
      path, f"num_shards and features in {info_name(split)}", f"{', '.join(info)} alone"
    )
  expected = [f"{split}.tfrecord-{k:05d}-of-{num_shards:05d}" for k in range(num_shards)]
  pattern = re.compile(rf"{re.escape(split)}\.tfrecord-\d+-of-\d+\Z")
  shards = {entry.name for entry in path.iterdir() if pattern.match(entry.name)}
  for wrong, what in ((set(expected) - shards, "is missing"), (shards - set(expected), "is no file of it")):
    if wrong:
      raise _make_incomplete_error(
        path, f"{num_shards} files of {split}", f"{len(shards)}, and {min(wrong)} {what}"
      )
  return expected


def read_cached_shard(directory: epath.PathLike, split: str, shard: int) -> Any:
  """Return a file's examples as a tf.data dataset, as SeqIO reads them."""
  num_shards = len(list_cached_shards(directory, split))
  source = seqio_internals.cached_source(str(directory), split)
  shard_info = seqio.ShardInfo(index=shard, num_shards=num_shards)
  return source.get_dataset(split=split, shuffle=False, shard_info=shard_info)


def read_noted_examples(directory: epath.PathLike, split: str) -> int:
  """Return the number of examples that SeqIO noted when it wrote them.

  Raises:
    AnystepError: 65 `seqio_cache_incomplete`.
  """
  name = stats_name(split)
  examples = _read_document(directory, name).get("examples")
  if not isinstance(examples, int):
    raise _make_incomplete_error(directory, f"a number of examples in {name}", str(examples))
  return examples


def check_count(directory: epath.PathLike, split: str, num_examples: int) -> None:
  """Compare a number of examples with the one that SeqIO noted.

  Raises:
    AnystepError: 65 `seqio_cache_incomplete`.
  """
  noted = read_noted_examples(directory, split)
  if noted != num_examples:
    raise _make_incomplete_error(directory, f"{noted} examples of {split}", f"{num_examples} examples")


def _read_document(directory: epath.PathLike, name: str) -> dict[str, Any]:
  """Read one of the two JSON files that SeqIO writes beside a split."""
  try:
    document = read_json(epath.Path(directory) / name)
  except FileNotFoundError as error:
    raise _make_incomplete_error(directory, name, "no such file") from error
  except (ValueError, IsADirectoryError) as error:
    raise _make_incomplete_error(directory, f"JSON in {name}", str(error)) from error
  if not isinstance(document, dict):
    raise _make_incomplete_error(directory, f"a JSON object in {name}", type(document).__name__)
  return document


def _make_incomplete_error(directory: epath.PathLike, expected: str, got: str) -> AnystepError:
  return AnystepError(
    ExitCode.DATA,
    "seqio_cache_incomplete",
    path=directory,
    expected=expected,
    got=got,
    fix="restore the cache, or cache the task from its source without --from_seqio_cache",
  )
