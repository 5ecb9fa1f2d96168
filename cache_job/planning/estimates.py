"""Estimates of a split's cache, from a few examples of its source."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence
from typing import Any

import zstandard
from etils import epath

from anystep.cache_job.preprocessing.example_batches import ExampleBatches
from anystep.cache_job.preprocessing.example_datasets import build_dataset
from anystep.cache_job.preprocessing.seqio_caches import read_noted_examples
from anystep.cache_job.shuffle.spill import list_sequence_names
from anystep.cache_job.state.failures import make_failure
from anystep.cache_job.state.group_sizes import estimate_ranges
from anystep.cache_job.state.spill_files import SpilledRecords, count_spilled_bytes
from anystep.cache_job.state.split_job import SourceRange, SplitJob, choose_num_shards
from anystep.containers import containers
from anystep.records.writing import serialize_examples

_SAMPLE_EXAMPLES = 256
# A source that does not know how many examples it has is counted so long.
_COUNT_SECONDS = 0.5
_COUNTED_AT_A_TIME = 1024
# How files begin whose bytes are not their examples': gzip, bzip2, xz, zstandard, Parquet, ArrayRecord.
_PACKED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd", b"PAR1", b"\x83\xaf\x70\xd1")
# ArrayRecord files are whole blocks, of which the last is for itself (array_record 0.8).
_ARRAY_RECORD_BLOCK_BYTES = 1 << 16
_CHUNK_HEADER_BYTES = 40
_TABLE_HEADER_BYTES = 128


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate:
  """Estimated sizes of a split's cache.

  Attributes:
    examples: of the cache; None where the source's number of examples is unknown.
    cache_bytes: of the cache's files; where `examples` is None, of each example.
    temporary_bytes: of files that the job removes at its end, likewise.
    num_shards: of the cache; None where `examples` is, and the options do not say.
    ranges: number of ranges of temporary files that sorting and writing read; None where `examples` is.
  """

  examples: int | None
  cache_bytes: int
  temporary_bytes: int
  num_shards: int | None
  ranges: int | None = None

  def __str__(self) -> str:
    sizes = f"{format_bytes(self.cache_bytes)} and {format_bytes(self.temporary_bytes)} of temporary disk"
    if self.examples is None:
      return f"about {sizes} for each example, of which the source does not tell how many it has"
    examples = f"{_round_to_digits(self.examples):,} example{'' if self.examples == 1 else 's'}"
    shards = f"{self.num_shards} shard{'' if self.num_shards == 1 else 's'}"
    ranges = "" if self.ranges is None else f", which is read in {_round_to_digits(self.ranges):,} ranges"
    return f"about {examples} in {shards}, {sizes}{ranges}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Sample:
  """Examples of the first source shard that has some.

  Attributes:
    source: the range of it that was read.
    source_examples: number of examples in that range.
    parts: their records after the preprocessors.
    num_sequences: columns of lengths tables.
  """

  source: SourceRange
  source_examples: int
  parts: Sequence[SpilledRecords]
  num_sequences: int

  @property
  def examples(self) -> int:
    return sum(map(len, self.parts))


def estimate_split(task: Any, job: SplitJob) -> Estimate | None:
  """Estimate a split's cache; nothing is written.

  The preprocessors run on up to 256 examples, as the job would run them.

  Args:
    task: the registered task.
    job: one of its splits, which is to be cached.

  Returns:
    None where no example came of the sample.

  Raises:
    AnystepError: what the job would end with at these examples.
  """
  try:
    sample = _sample_examples(task, job)
    if sample is None or not sample.examples:
      return None
    source_examples = _count_source_examples(task, job, sample)
  except Exception as error:
    raise make_failure(error, job) from error
  cache_bytes = _estimate_example_bytes(job, sample)
  # Everything is written once as it comes, and once sorted by shards.
  temporary_bytes = 2 * count_spilled_bytes(sample.parts) / sample.examples
  examples, ranges, num_shards = None, None, job.options.num_shards
  if source_examples is not None:
    examples = round(source_examples * sample.examples / sample.source_examples)
    record_bytes = examples * sum(part.data.nbytes for part in sample.parts) // sample.examples
    num_shards = choose_num_shards(job, num_examples=examples, record_bytes=record_bytes)
    cache_bytes = examples * cache_bytes + num_shards * _count_shard_bytes(job)
    temporary_bytes *= examples
    ranges = estimate_ranges(
      num_files=_count_ranges(job, source_examples),
      num_examples=examples,
      record_bytes=record_bytes,
      num_shards=num_shards,
      memory_bytes=job.options.worker_memory_mib << 20,
    )
  return Estimate(
    examples=examples,
    cache_bytes=round(cache_bytes),
    temporary_bytes=round(temporary_bytes),
    num_shards=num_shards,
    ranges=ranges,
  )


def _count_ranges(job: SplitJob, source_examples: int) -> int:
  """Return about how many units of preprocessing there are."""
  cut = 0 if job.options.range_examples is None else source_examples // job.options.range_examples
  return max(len(job.source_shards), cut)


def format_bytes(size: int) -> str:
  """Return a number of bytes as text for people.

  >>> format_bytes(900), format_bytes(1536), format_bytes(3 << 30), format_bytes(5 << 50)
  ('900 B', '1.5 KiB', '3.0 GiB', '5,120.0 TiB')
  """
  if size < 1024:
    return f"{size} B"
  power = min((size.bit_length() - 1) // 10, 4)
  return f"{size / 1024**power:,.1f} {'KMGT'[power - 1]}iB"


def _round_to_digits(number: int) -> int:
  """Round to three digits: no more of them are known."""
  return int(float(f"{number:.3g}"))


def _sample_examples(task: Any, job: SplitJob) -> _Sample | None:
  for shard, name in enumerate(job.source_shards):
    stop = min(_SAMPLE_EXAMPLES, job.options.range_examples or _SAMPLE_EXAMPLES)
    source = SourceRange(number=shard, name=name, shard=shard, stop=stop)
    batches = ExampleBatches(task, job, source)
    parts = [records for _, records in batches]
    batches.check_output()
    # The preprocessors may have dropped some, or made several of one.
    source_examples = sum(_count_in_parts(task, job, source))
    if source_examples:
      return _Sample(
        source=source,
        source_examples=source_examples,
        parts=parts,
        num_sequences=len(list_sequence_names(batches.features)),
      )
  return None


def _count_source_examples(task: Any, job: SplitJob, sample: _Sample) -> int | None:
  """Return the source's number of examples; None where it is unknown."""
  if job.seqio_cache is not None:
    return read_noted_examples(job.seqio_cache, job.split)
  num_given = task.source.num_input_examples(job.split)
  if num_given is not None:
    return num_given
  deadline = time.monotonic() + _COUNT_SECONDS
  counted: list[int] = []
  for shard, name in enumerate(job.source_shards):
    of_shard = 0
    for count in _count_in_parts(task, job, SourceRange(number=shard, name=name, shard=shard)):
      of_shard += count
      if time.monotonic() > deadline:
        return _count_by_file_sizes(task, job, sample, counted)
    counted.append(of_shard)
  return sum(counted)


def _count_in_parts(task: Any, job: SplitJob, source: SourceRange) -> Iterator[int]:
  """Yield numbers of examples, whose sum is the source range's."""
  dataset = build_dataset(task, job, source, num_steps=0)
  cardinality = int(dataset.cardinality())
  if cardinality >= 0:
    yield cardinality
  else:
    for ones in dataset.map(lambda *_: 1).batch(_COUNTED_AT_A_TIME):
      yield len(ones)


def _count_by_file_sizes(task: Any, job: SplitJob, sample: _Sample, counted: Sequence[int]) -> int | None:
  """Estimate the number of examples in files from their sizes and the files that are counted."""
  from anystep.tasks.sources.held_out_source import HELD_OUT_BEFORE

  paths = [epath.Path(name.partition(HELD_OUT_BEFORE)[0]) for name in job.source_shards]
  if not all(path.exists() for path in paths):
    return None
  sizes = [path.stat().length for path in paths]
  if sum(counted):
    return round(sum(sizes) * sum(counted) / sum(sizes[: len(counted)]))
  with paths[sample.source.shard].open("rb") as file:
    if file.read(8).startswith(_PACKED):
      return None
  source_bytes = _measure_source_bytes(task, job, sample)
  return None if not source_bytes else round(sum(sizes) * sample.source_examples / source_bytes)


def _measure_source_bytes(task: Any, job: SplitJob, sample: _Sample) -> int | None:
  """Return the sample's bytes in a file of lines or of `tf.train.Example` records; None for another file."""
  import tensorflow as tf

  from anystep.tasks.tensors import from_tensors

  dataset = build_dataset(task, job, sample.source, num_steps=0)
  spec = dataset.element_spec
  if spec == tf.TensorSpec([], tf.string):
    return sum(len(line) + 1 for line in dataset.as_numpy_iterator())
  if not isinstance(spec, dict) or not all(isinstance(s, tf.TensorSpec) for s in spec.values()):
    return None
  data, _ = serialize_examples(from_tensors(next(iter(dataset.ragged_batch(_SAMPLE_EXAMPLES)))))
  return len(data)


def _count_shard_bytes(job: SplitJob) -> float:
  """Return the bytes that a shard's files have beside those of its examples."""
  # Half of a file's last block but one is empty, and the last.
  is_padded = job.options.container == containers.ARRAY_RECORD
  return _TABLE_HEADER_BYTES + (1.5 * _ARRAY_RECORD_BLOCK_BYTES if is_padded else 0)


def _estimate_example_bytes(job: SplitJob, sample: _Sample) -> float:
  """Return the bytes of an example in the cache, without headers that a file has once."""
  records = [record for part in sample.parts for record in part.records()]
  of_tables = 4 * sample.num_sequences
  if job.options.container == containers.TFRECORD:
    framing, offset = 16, 8
    return sum(map(len, records)) / len(records) + framing + offset + of_tables
  level = int(job.options.container_options.rpartition(":")[2])
  compressor = zstandard.ZstdCompressor(level=level)
  chunks = [
    b"".join(records[start : start + job.options.block_records])
    for start in range(0, len(records), job.options.block_records)
  ]
  of_chunks = sum(len(compressor.compress(chunk)) + _CHUNK_HEADER_BYTES for chunk in chunks)
  return of_chunks / len(records) + of_tables
