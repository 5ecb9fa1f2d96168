"""Names of the files of a cache and of a run. Names become paths only through these functions."""

from __future__ import annotations

import re

from etils import epath

from anystep.errors import AnystepError, ExitCode

_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\Z")
_SHA256 = re.compile(r"[0-9a-f]{64}\Z")
_PATH = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*(/[A-Za-z0-9_][A-Za-z0-9_.-]*)*\Z")

COMPLETED = "COMPLETED"

# A unit table's header, written last.
UNIT_TABLE = "units.json"

# Below a task's directory, copies of the files that its vocabularies are made of.
VOCABULARIES = "vocabularies"

# Files that a trainer leaves for `anystep-data`: the run's first step; the plan, or a mark that there is
# none; the caches' paths; the model's feature converter; and the marker of a complete checkpoint.
RUN = "run.json"
DATA_PLAN, DATA_UNCACHED, DATA_CACHES = "data_plan.json", "data_uncached.json", "data_caches.json"
DATA_CONVERTER = "data_converter.json"
COMMIT_SUCCESS = "commit_success.txt"
_CHECKPOINT = re.compile(r"checkpoint_(0|[1-9][0-9]*)\Z")


def task_directory(root: epath.PathLike, task: str) -> epath.Path:
  """`<root>/<task name, ':' as '/'>`, the directory of a task's cache (docs/order.md#files-of-a-cache)."""
  for part in task.split(":"):
    _check(part, "task")
  return epath.Path(root).joinpath(*task.split(":"))


def checkpoint_name(step: int) -> str:
  """Return the name of the directory of a step's checkpoint."""
  return f"checkpoint_{step}"


def checkpoint_step(name: str) -> int | None:
  """Return the step of a checkpoint's directory; None where the name is not one of a checkpoint.

  >>> checkpoint_step("checkpoint_50"), checkpoint_step("unreadable_checkpoint_50")
  (50, None)
  """
  match = _CHECKPOINT.match(name)
  return int(match[1]) if match else None


def manifest_name(split: str) -> str:
  """Return the file name of a split's manifest."""
  return f"manifest.{_check(split, 'split')}.json"


def info_name(split: str) -> str:
  """SeqIO's name for the description of a cached split's features."""
  return f"info.{_check(split, 'split')}.json"


def stats_name(split: str) -> str:
  """SeqIO's name for a cached split's counts."""
  return f"stats.{_check(split, 'split')}.json"


def quarantine_name(split: str) -> str:
  """The name of the list of bad examples that were left out of a split."""
  return f"quarantine.{_check(split, 'split')}.jsonl"


def records_name(split: str, container: str, shard: int, num_shards: int) -> str:
  """The name of a shard's records, as SeqIO writes it."""
  return f"{_check(split, 'split')}.{container}-{shard:05d}-of-{num_shards:05d}"


def lengths_name(split: str, shard: int, num_shards: int) -> str:
  """The name of a shard's table of token counts."""
  return f"{_check(split, 'split')}.lengths-{shard:05d}-of-{num_shards:05d}.npy"


def offsets_name(split: str, shard: int, num_shards: int, *, container: str = "tfrecord") -> str:
  """The name of the table of a TFRecord shard's offsets, or of a Parquet shard's parts."""
  return f"{records_name(split, container, shard, num_shards)}-offsets.npy"


def vocabulary_path(directory: epath.PathLike, sha256: str) -> epath.Path:
  """The path of the copy of a vocabulary's file below a task's directory.

  Raises:
    AnystepError: 77 `vocabulary_name` for a name that is no sha256.
  """
  return epath.Path(directory) / VOCABULARIES / _check(sha256, "vocabulary", pattern=_SHA256)


def table_names(split: str) -> tuple[str, str, str]:
  """The names of a large cache's tables: of files, of source shards' names, and of their examples."""
  _check(split, "split")
  return f"{split}.files.npy", f"{split}.source_shards.json", f"{split}.source_examples.npy"


def units_name(split: str, shard: int, num_shards: int) -> str:
  """The name of a shard's part of a unit table."""
  return f"{_check(split, 'split')}.units-{shard:05d}-of-{num_shards:05d}.npy"


def record_path(root: epath.PathLike, name: str) -> epath.Path:
  """The path of a file that a cache in layout `as_is` describes.

  Args:
    root: of the caches.
    name: the file's, relative to the root, its parts joined by `/`.

  Raises:
    AnystepError: 77 `file_name` if the name could lead out of the root.

  >>> record_path("/data", "corpus/part-00000.tfrecord").as_posix()
  '/data/corpus/part-00000.tfrecord'
  """
  return epath.Path(root).joinpath(*check_record_name(name).split("/"))


def check_record_name(name: str) -> str:
  """Return the name if it stays inside the root; each part follows the rules of a task's name.

  Raises:
    AnystepError: 77 `file_name`.
  """
  return _check(name, "file", pattern=_PATH)


def shard_pattern(split: str) -> re.Pattern[str]:
  """Return a pattern of the names of shards, lengths and offsets files that could be of this split."""
  kinds = "array_record|tfrecord|parquet|lengths"
  return re.compile(rf"{re.escape(_check(split, 'split'))}\.({kinds})-\d+-of-\d+(-offsets)?(\.npy)?\Z")


def _check(name: str, subject: str, *, pattern: re.Pattern[str] = _PART) -> str:
  if not isinstance(name, str) or not pattern.match(name):
    allowed = "letters, digits, '_', '-', '.' (not first)"
    expected = {
      _PART: allowed,
      _PATH: f"{allowed}, in one or several parts joined by '/'",
      _SHA256: "a sha256, 64 hexadecimal digits",
    }
    raise AnystepError(
      ExitCode.UNSAFE,
      f"{subject}_name",
      expected=expected[pattern],
      got=repr(name),
      fix=f"rename the {subject}: its name becomes part of a path",
    )
  return name
