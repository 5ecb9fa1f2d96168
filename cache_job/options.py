"""Options of the cache job: the values of its command line."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from anystep.caches.manifest import AS_IS, PRESHUFFLED
from anystep.containers import containers
from anystep.errors import AnystepError, ExitCode
from anystep.files import storage
from anystep.limits import MAX_COUNT, MAX_FEATURE_LENGTH, MAX_SHARDS, are_feature_lengths, is_count, is_seed
from anystep.order.preshuffle import default_num_shards
from anystep.stores.clients import check_store


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheOptions:
  """Options of the cache job.

  Attributes:
    cache_dir: the root that caches are written below.
    other_cache_dirs: further roots; a task whose cache is complete in one of them is not cached here.
    modules: what workers import to find the tasks.
    splits: those to cache of each task that has them; None for all.
    seed: the preshuffle's.
    base_seed: the preprocessors'.
    num_shards: S; None for the default, within min_shards and max_shards where these are not 0.
    block_records: g.
    container: of the records, `array_record` or `tfrecord`.
    cache_at: `placeholder`, or `end` to cache what stands after it too.
    task_feature_lengths: the lengths that `end` caches for.
    range_examples: source shards are cut into ranges of so many of the source's examples, each preprocessed
      like a source shard; None to take them whole. It decides which examples come.
    char_counts: whether stats count characters too.
    seqio_cache_dir: the root of caches that SeqIO wrote, which are taken in place of the tasks' sources and
      preprocessors; None for those.
    max_bad_examples: so many of a split are left out and listed, where they cannot be cached.
    determinism_check: percent of source shards whose preprocessors are run twice and compared.
    worker_memory_mib: memory of a worker's process, in MiB; the more, the fewer ranges of files are read.
    resume: whether the job goes on with the files of an unfinished one.
    index_only: whether the source's own files are described in place of being cached (layout `as_is`).
    overwrite: whether a complete cache is made anew.
    tfds_data_dir: where TensorFlow Datasets lie, whatever the tasks say.
    pipeline_options: Beam's own, as on its command line.

  Raises:
    AnystepError: 64 `flags_exclusive` for two that contradict each other, `option_limit` for numbers that
      no cache has; 78 `store_unsupported`.
  """

  cache_dir: str
  other_cache_dirs: tuple[str, ...] = ()
  modules: tuple[str, ...] = ()
  splits: tuple[str, ...] | None = None
  seed: int = 0
  base_seed: int = 0
  num_shards: int | None = None
  min_shards: int = 0
  max_shards: int = 0
  block_records: int = 32
  container: str = containers.ARRAY_RECORD
  cache_at: str = "placeholder"
  task_feature_lengths: Mapping[str, int] | None = None
  range_examples: int | None = None
  char_counts: bool = False
  seqio_cache_dir: str | None = None
  max_bad_examples: int = 0
  determinism_check: float = 0.0
  worker_memory_mib: int = 2048
  resume: bool = True
  index_only: bool = False
  overwrite: bool = False
  tfds_data_dir: str | None = None
  pipeline_options: tuple[str, ...] = ()

  @property
  def layout(self) -> str:
    """Layout of the caches, as manifests name it."""
    return AS_IS if self.index_only else PRESHUFFLED

  @property
  def container_options(self) -> str:
    """Options of the container's writer."""
    return containers.container_options(self.container, self.block_records)

  def choose_num_shards(self, num_examples: int, record_bytes: int) -> int:
    """Return the number of shards of a split with so many examples and bytes of serialized records."""
    if self.num_shards:
      return self.num_shards
    return self.bound_num_shards(default_num_shards(num_examples, record_bytes, self.block_records))

  def bound_num_shards(self, num_shards: int) -> int:
    """Return a number of shards within `min_shards` and `max_shards`; the upper bound wins, as in SeqIO.

    >>> bounds = CacheOptions(cache_dir="cache", min_shards=16, max_shards=10)
    >>> bounds.bound_num_shards(1), bounds.bound_num_shards(64)
    (10, 10)
    >>> CacheOptions(cache_dir="cache", min_shards=16).bound_num_shards(1)
    16
    """
    at_least = max(num_shards, self.min_shards)
    return min(at_least, self.max_shards or at_least)

  def values_that_decide_bytes(self) -> dict[str, object]:
    """Return by name the values that decide bytes; a job goes on only with equal ones."""
    return {name: getattr(self, name) for name in _DECIDE_BYTES}

  def __post_init__(self):
    for name in ("cache_dir", "seqio_cache_dir", "tfds_data_dir"):
      path = getattr(self, name)
      if path is not None:
        # Workers have other current directories.
        object.__setattr__(self, name, storage.find_absolute(path))
    if storage.is_remote(self.cache_dir):
      check_store(self.cache_dir)
    self._check_limits()
    if self.task_feature_lengths and self.cache_at != "end":
      raise make_exclusive_error(
        "task_feature_lengths", "cache_at=placeholder", "nothing before the placeholder takes them"
      )
    if self.num_shards is not None and (self.min_shards or self.max_shards):
      raise make_exclusive_error(
        "num_shards", "min_shards or max_shards", "--num_shards alone decides, so give one"
      )
    if self.index_only:
      for name, flag in _NOT_OF_FILES_AS_THEY_ARE.items():
        if getattr(self, name):
          raise make_exclusive_error("index_only", flag, "files that are not written anew stay as they are")
      if self.cache_at == "end":
        raise make_exclusive_error(
          "index_only", "cache_at=end", "no preprocessor runs before the files are read"
        )
    if self.seqio_cache_dir is not None:
      for name in ("base_seed", "range_examples", "determinism_check", "task_feature_lengths"):
        if getattr(self, name):
          raise make_exclusive_error("from_seqio_cache", name, "no preprocessor runs")
      if self.cache_at == "end":
        raise make_exclusive_error(
          "from_seqio_cache", "cache_at=end", "SeqIO's caches stand at the placeholder"
        )
      if storage.find_real(self.seqio_cache_dir) == storage.find_real(self.cache_dir):
        # Files have the same names, so the end of the job would remove its source.
        raise AnystepError(
          ExitCode.USAGE,
          "flags_exclusive",
          expected="another --output_cache_dir than --from_seqio_cache",
          got=self.cache_dir,
          fix="write to another directory",
        )

  def _check_limits(self) -> None:
    """Refuse numbers that no cache has, which would fail or fill the memory later in the job."""
    shards = f"at most {MAX_SHARDS:,}"
    checks = {
      "seed": (is_seed(self.seed), "a whole number of 64 bits"),
      "base_seed": (is_seed(self.base_seed), "a whole number of 64 bits"),
      **{
        name: (getattr(self, name) is None or is_count(getattr(self, name), most=MAX_SHARDS), shards)
        for name in ("num_shards", "min_shards", "max_shards")
      },
      **{
        name: (getattr(self, name) is None or is_count(getattr(self, name)), f"at most {MAX_COUNT}")
        for name in ("block_records", "range_examples", "max_bad_examples")
      },
      "worker_memory_mib": (
        is_count(self.worker_memory_mib, least=MIN_MEMORY_MIB, most=MAX_MEMORY_MIB),
        f"{MIN_MEMORY_MIB} to {MAX_MEMORY_MIB}",
      ),
      "determinism_check": (0 <= self.determinism_check <= 100, "0 to 100"),
      "task_feature_lengths": (
        self.task_feature_lengths is None or are_feature_lengths(self.task_feature_lengths),
        f"whole numbers, 0 to {MAX_FEATURE_LENGTH}",
      ),
    }
    for name, (right, expected) in checks.items():
      if not right:
        raise AnystepError(
          ExitCode.USAGE,
          "option_limit",
          expected=f"--{name}: {expected}",
          got=getattr(self, name),
          fix=f"give --{name} a value in this range",
        )


# Below it TensorFlow and Beam leave none for records.
MIN_MEMORY_MIB, MAX_MEMORY_MIB = 1024, 1 << 20

# A new one is to be left out at its default: the jobs that earlier versions left unfinished know none.
_DECIDE_BYTES = (
  "range_examples",
  "seed",
  "base_seed",
  "num_shards",
  "min_shards",
  "max_shards",
  "block_records",
  "container",
  "layout",
  "cache_at",
  "task_feature_lengths",
  "char_counts",
  "tfds_data_dir",
)

# What a job that writes nothing of its own cannot honour: attributes, and the flags that set them.
_NOT_OF_FILES_AS_THEY_ARE = {
  **{
    name: name for name in ("seed", "base_seed", "num_shards", "min_shards", "max_shards", "range_examples")
  },
  **{name: name for name in ("task_feature_lengths", "max_bad_examples", "determinism_check")},
  "char_counts": "enable_char_counts",
  "seqio_cache_dir": "from_seqio_cache",
}


def make_exclusive_error(one: str, other: str, fix: str) -> AnystepError:
  """Return the error of two flags that contradict each other."""
  return AnystepError(
    ExitCode.USAGE, "flags_exclusive", expected=f"--{one} without --{other}", got="both", fix=fix
  )
