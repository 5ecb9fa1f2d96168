"""The first half of the job: a source shard, preprocessed once, into durable files.

The expensive part is done here; what follows only moves bytes. A spill is the shard's records one after
the other, their offsets, their token counts, and a description that is written last: where it exists,
the spill is whole, and a job that starts again takes it as it is.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import numpy as np
from etils import epath

from anystep.errors import AnystepError, ExitCode
from anystep.examples import serialize_example
from anystep.manifest import Feature, canonical_json
from anystep.permutation import round_keys
from anystep.tasks.modules import import_modules

_Result = TypeVar("_Result")

_HEARTBEAT_SECONDS = 1.0
_building = threading.Lock()


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class SplitJob:
  """What the workers need to know to cache one split of one task."""

  task: str
  split: str
  directory: str
  modules: tuple[str, ...]
  source_shards: tuple[str, ...]
  seed: int
  base_seed: int
  num_shards: int | None
  min_shards: int
  max_shards: int
  block_records: int
  container: str
  layout: str
  cache_at: str
  task_feature_lengths: Mapping[str, int] | None
  tfds_data_dir: str | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spill:
  """A finished spill.

  Attributes:
    source_shard: its number.
    examples: how many examples came of it.
    features: dtype and shape by name.
    tokens, max_tokens: of each integer output feature, end and padding ids left out, as SeqIO counts.
  """

  source_shard: int
  examples: int
  features: Mapping[str, Mapping[str, Any]]
  tokens: Mapping[str, int]
  max_tokens: Mapping[str, int]


def spill_path(directory: epath.PathLike, source_shard: int, part: str) -> epath.Path:
  """The path of a spill's `records`, `offsets.npy`, `lengths.npy`, `json` or `progress`."""
  return epath.Path(directory) / f"spill-{source_shard:05d}.{part}"


def read_spill(directory: epath.PathLike, source_shard: int) -> Spill | None:
  """A spill's description; None where it is not finished, or no longer whole."""
  parts = ("records", "offsets.npy", "lengths.npy")
  try:
    spill = Spill(**json.loads(spill_path(directory, source_shard, "json").read_text()))
  except FileNotFoundError:
    return None
  return spill if all(spill_path(directory, source_shard, part).exists() for part in parts) else None


def write_spill(job: SplitJob, source_shard: int) -> Spill:
  """Preprocesses a source shard into its spill; one that is finished is left as it is."""
  finished = read_spill(job.directory, source_shard)
  if finished is not None:
    return finished
  with reported_failures(job, source_shard=job.source_shards[source_shard]):
    return _write_spill(job, source_shard)


def failure_path(directory: epath.PathLike) -> epath.Path:
  """Where a worker that failed says why."""
  return epath.Path(directory) / "failure.json"


@contextlib.contextmanager
def reported_failures(job: SplitJob, **where: object) -> Iterator[None]:
  """Makes an `AnystepError` of what fails in a worker and leaves it where the parent finds it.

  Runners hand the parent some text of what a worker raised, and each another.
  """
  try:
    yield
  except Exception as error:
    failure = error if isinstance(error, AnystepError) else _foreseen(error)
    failure.fields |= {"task": job.task, "split": job.split, **where}
    # On a full disk there is no room for this either.
    with contextlib.suppress(OSError):
      publish(failure_path(job.directory), lambda path: path.write_text(_failure_json(failure)))
    raise failure from error


def read_failure(directory: epath.PathLike) -> AnystepError | None:
  """What a worker failed of; None where none did."""
  try:
    document = json.loads(failure_path(directory).read_text())
  except FileNotFoundError:
    return None
  code = ExitCode(document["code"])
  return AnystepError(code, document["kind"], fix=document["fix"], **document["fields"])


def _failure_json(failure: AnystepError) -> str:
  fields = {name: str(value) for name, value in failure.fields.items()}
  return canonical_json(
    {"code": int(failure.code), "kind": failure.kind, "fix": failure.fix, "fields": fields}
  )


def _foreseen(error: Exception) -> AnystepError:
  got = " ".join(f"{type(error).__name__}: {error}".split())
  again = "run the same command again; what is finished is kept"
  if isinstance(error, OSError):
    return AnystepError(ExitCode.IO, "io_failed", got=got, fix=f"see to the disk or store, and {again}")
  return AnystepError(
    ExitCode.DATA, "preprocessor_failed", got=got, fix=f"mend the task's source or preprocessor, and {again}"
  )


def _write_spill(job: SplitJob, source_shard: int) -> Spill:
  import seqio

  import_modules(job.modules)
  if job.tfds_data_dir is not None:
    seqio.set_tfds_data_dir_override(job.tfds_data_dir)
  task = seqio.TaskRegistry.get(job.task)
  dataset = _preprocessed(task, job, source_shard)
  features = described_features(dataset.element_spec, job.task)
  sequences = sorted(name for name, feature in features.items() if feature.sequence)
  counter = _TokenCounter(task.output_features, features)
  offsets, lengths = [0], []

  def write_records(path: epath.Path) -> None:
    with path.open("wb") as file:
      for example in _with_heartbeat(dataset.as_numpy_iterator(), job, source_shard):
        record = serialize_example(example)
        file.write(record)
        offsets.append(offsets[-1] + len(record))
        lengths.append([len(example[name]) for name in sequences])
        counter.add(example)

  publish(spill_path(job.directory, source_shard, "records"), write_records)
  publish_array(spill_path(job.directory, source_shard, "offsets.npy"), np.array(offsets, np.uint64))
  publish_array(
    spill_path(job.directory, source_shard, "lengths.npy"),
    np.array(lengths, np.uint32).reshape(len(lengths), len(sequences)),
  )
  spill = Spill(
    source_shard=source_shard,
    examples=len(lengths),
    features={name: dataclasses.asdict(feature) for name, feature in features.items()},
    tokens=counter.tokens,
    max_tokens=counter.max_tokens,
  )
  description = canonical_json(dataclasses.asdict(spill))
  publish(spill_path(job.directory, source_shard, "json"), lambda path: path.write_text(description))
  return spill


def publish(path: epath.Path, write: Callable[[epath.Path], _Result]) -> _Result:
  """Writes a file under a name of its own and then gives it its name; returns what `write` does.

  So a file that is there is whole, and a worker that is run twice shares no file with its double.
  """
  attempt = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
  result = write(attempt)
  attempt.replace(path)
  return result


def publish_array(path: epath.Path, array: np.ndarray) -> None:
  """Publishes an array as `.npy`."""
  content = io.BytesIO()
  np.save(content, array, allow_pickle=False)
  publish(path, lambda attempt: attempt.write_bytes(content.getvalue()))


def preprocess_seed(task: str, split: str, base_seed: int, source_shard: int) -> int:
  """The seed that SeqIO's preprocessors get for a source shard (design section 4).

  >>> preprocess_seed("demo", "train", 0, 3)
  235544420
  """
  return int(round_keys("preprocess", task, split, base_seed, source_shard)[0] % np.uint64(1 << 31))


def _preprocessed(task: Any, job: SplitJob, source_shard: int) -> Any:
  """The source shard's examples as a tf.data dataset, after every preprocessor that is cached."""
  import seqio
  import tensorflow as tf

  seed = preprocess_seed(job.task, job.split, job.base_seed, source_shard)
  # TensorFlow's seed and SeqIO's counter of seeds belong to the whole process, whatever its threads.
  with _building:
    tf.random.set_seed(0)
    dataset = task.source.get_dataset(
      split=job.split,
      shuffle=False,
      seed=seed,
      shard_info=seqio.ShardInfo(index=source_shard, num_shards=len(job.source_shards)),
    )
    dataset = task.preprocess_precache(dataset, seed=seed)
    if job.cache_at == "end":
      dataset = task.preprocess_postcache(dataset, sequence_length=job.task_feature_lengths, seed=seed)
    return dataset.prefetch(tf.data.AUTOTUNE)


def described_features(element_spec: Any, task: str) -> dict[str, Feature]:
  """What a tf.data dataset's elements hold, as a manifest says it.

  Raises:
    AnystepError: 78 `feature_form` for what records cannot hold.
  """
  import tensorflow as tf

  features = {}
  for name, spec in element_spec.items() if isinstance(element_spec, dict) else [("", element_spec)]:
    if not isinstance(spec, tf.TensorSpec) or spec.shape.rank is None or None in spec.shape[1:].as_list():
      raise AnystepError(
        ExitCode.CONFIG,
        "feature_form",
        task=task,
        feature=name,
        expected="tensors whose first dimension alone varies",
        got=str(spec),
        fix="flatten the feature before the cache and restore its form after it",
      )
    shape = spec.shape.as_list()
    features[name] = Feature(dtype=spec.dtype.name, shape=(None, *shape[1:]) if shape else ())
  return features


class _TokenCounter:
  """Counts tokens as SeqIO's stats do: integer output features, without end and padding ids."""

  def __init__(self, output_features: Mapping[str, Any], features: Mapping[str, Feature]):
    self._special_ids = {
      name: [i for i in (feature.vocabulary.eos_id, feature.vocabulary.pad_id) if i is not None]
      for name, feature in output_features.items()
      if name in features and features[name].dtype in ("int32", "int64")
    }
    self.tokens = dict.fromkeys(self._special_ids, 0)
    self.max_tokens = dict.fromkeys(self._special_ids, 0)

  def add(self, example: Mapping[str, np.ndarray]) -> None:
    for name, special_ids in self._special_ids.items():
      values = example[name]
      tokens = values.size - sum(int(np.count_nonzero(values == i)) for i in special_ids)
      self.tokens[name] += tokens
      self.max_tokens[name] = max(self.max_tokens[name], tokens)


def _with_heartbeat(examples: Iterator[Any], job: SplitJob, source_shard: int) -> Iterator[Any]:
  """Passes examples on and writes now and then how many there were, for whoever watches the job."""
  path = spill_path(job.directory, source_shard, "progress")
  next_seconds = time.monotonic() + _HEARTBEAT_SECONDS
  for count, example in enumerate(examples):
    yield example
    if time.monotonic() >= next_seconds:
      path.write_text(str(count + 1))
      next_seconds = time.monotonic() + _HEARTBEAT_SECONDS
