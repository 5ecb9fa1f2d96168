"""The end of the job: manifests, files moved to their places, and last what says that the cache is whole."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import TypeVar

import seqio
from etils import epath

from anystep import containers, names
from anystep.cache_job.final_shards import plan_final_shards, read_shard_files
from anystep.cache_job.spill import Spill, SplitJob, publish, read_spill
from anystep.cache_job.task_work import BUILDING, TaskWork, task_fingerprint
from anystep.errors import AnystepError, ExitCode
from anystep.manifest import AS_IS, Feature, FileEntry, Manifest, SourceShard, canonical_json

_Result = TypeVar("_Result")


def complete(work: TaskWork, manifests: Mapping[str, Manifest]) -> None:
  """Puts the splits that were made where readers look, beside those that are kept.

  Args:
    work: the task's.
    manifests: by split, one for each of its jobs, whose directories hold the files.
  """
  directory = work.directory
  _sign(directory, work.kept)
  for job in work.jobs:
    manifest = manifests[job.split]
    for entry in manifest.offsets_files if manifest.layout == AS_IS else manifest.files:
      (epath.Path(job.directory) / entry.name).replace(directory / entry.name)
    (directory / names.manifest_name(job.split)).write_text(manifest.to_json())
    _remove_foreign_shards(directory, manifest)
  made = {
    split: hashlib.sha256(manifest.to_json().encode()).hexdigest() for split, manifest in manifests.items()
  }
  _remove_buildings(directory, {**work.kept, **made})
  for attempt in directory.glob(f"{names.COMPLETED}.*"):
    attempt.unlink()
  _sign(directory, {**work.kept, **made})


def _sign(directory: epath.Path, manifests: Mapping[str, str]) -> None:
  """Says which splits are complete: they come by one change of files, which is the last."""
  if manifests:
    lines = [f"{split} {sha256}\n" for split, sha256 in sorted(manifests.items())]
    publish(directory / names.COMPLETED, lambda path: path.write_text("".join(lines)))
  else:
    (directory / names.COMPLETED).unlink(missing_ok=True)


def _remove_foreign_shards(directory: epath.Path, manifest: Manifest) -> None:
  """Removes shards of the cache that was here before, which no reader could tell from this one's."""
  pattern, kept = names.shard_pattern(manifest.split), {entry.name for entry in manifest.files}
  for path in directory.iterdir():
    if pattern.match(path.name) and path.name not in kept:
      path.unlink()


def _remove_buildings(directory: epath.Path, splits: Mapping[str, str]) -> None:
  """Removes what made complete splits, by this job and others; what another split's job left stays for it."""
  building = directory / BUILDING
  left = [path for path in building.iterdir() if path.name.rpartition("-")[0] not in splits]
  if not left:
    building.rmtree()
    return
  for path in building.iterdir():
    if path not in left:
      path.rmtree()


def describe(task: seqio.Task, job: SplitJob) -> Manifest:
  """The split's manifest, and SeqIO's own descriptions beside its shards."""
  spills = [
    _finished(job, read_spill(job.directory, k), f"source shard {name}")
    for k, name in enumerate(job.source_shards)
  ]
  examples = [spill.examples for spill in spills]
  shards = [
    _finished(job, read_shard_files(job.directory, work.shard), f"shard {work.shard}")
    for work in plan_final_shards(job, examples)
  ]
  features = spills[0].features
  descriptions = {
    names.info_name(job.split): {
      "num_shards": len(shards),
      "features": {name: {"dtype": f["dtype"], "shape": f["shape"]} for name, f in features.items()},
      "seqio_version": seqio.__version__,
    },
    names.stats_name(job.split): _stats(spills),
  }
  entries = []
  for name, document in descriptions.items():
    content = canonical_json(document, indent=2).encode()
    (epath.Path(job.directory) / name).write_bytes(content)
    entries.append(FileEntry.of(name, 1, content))
  return Manifest(
    task=job.task,
    split=job.split,
    seed=job.seed,
    base_seed=job.base_seed,
    num_examples=sum(examples),
    num_shards=len(shards),
    block_records=job.block_records,
    container=job.container,
    container_options=containers.container_options(job.container, job.block_records),
    features={name: Feature(dtype=f["dtype"], shape=tuple(f["shape"])) for name, f in features.items()},
    record_files=[shard.records for shard in shards],
    lengths_files=[shard.lengths for shard in shards],
    offsets_files=[shard.offsets for shard in shards if shard.offsets],
    description_files=entries,
    source_shards=[
      SourceShard(name=name, examples=count) for name, count in zip(job.source_shards, examples, strict=True)
    ],
    fingerprint=task_fingerprint(task, job),
    cache_at=job.cache_at,
    task_feature_lengths=job.task_feature_lengths,
  )


def _finished(job: SplitJob, result: _Result | None, what: str) -> _Result:
  """What the workers left, which must be there by now."""
  if result is None:
    raise AnystepError(
      ExitCode.IO,
      "job_incomplete",
      task=job.task,
      split=job.split,
      path=job.directory,
      expected=what,
      fix="run the same command again; what is finished is kept",
    )
  return result


def _stats(spills: Sequence[Spill]) -> dict[str, int]:
  """Counts under SeqIO's names."""
  stats = {"examples": sum(spill.examples for spill in spills)}
  for name in spills[0].tokens:
    stats[f"{name}_tokens"] = sum(spill.tokens[name] for spill in spills)
    stats[f"{name}_max_tokens"] = max(spill.max_tokens[name] for spill in spills)
  return stats
