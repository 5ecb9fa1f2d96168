"""Tombstones: examples that keep their rows, but have no loss from a step on."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
from etils import epath

from anystep.cached import cached_property
from anystep.caches.cache import Cache
from anystep.errors import AnystepError, ExitCode, make_file_error
from anystep.features.converters import Rows
from anystep.files.json_files import MALFORMED, canonical_json, read_json
from anystep.limits import is_count, is_name, is_sha256, refuse_wrong

LIST_VERSION = 1
_MAKE_LIST = "make it with anystep-data tombstone"
NEVER = np.iinfo(np.int64).max
_LOSS_WEIGHTS, _SEGMENT_IDS = "loss_weights", "segment_ids"
# MaxText takes the loss where this is not 0.
_MAXTEXT_SEGMENTS = "targets_segmentation"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TombstoneList:
  """Examples of one cache, as a file lists them for `Plan.tombstone`.

  Attributes:
    task, split, manifest_sha256: the cache.
    indices: of the examples, ascending.
    reason: why, for people.
  """

  task: str
  split: str
  manifest_sha256: str
  indices: Sequence[int]
  reason: str

  def __post_init__(self):
    refuse_wrong(
      task=is_name(self.task),
      split=is_name(self.split),
      manifest_sha256=is_sha256(self.manifest_sha256),
      indices=_are_indices(self.indices),
      reason=isinstance(self.reason, str),
    )

  @classmethod
  def of(cls, cache: Cache, indices: Iterable[int], *, reason: str = "tombstone") -> TombstoneList:
    """Return a list of examples of a cache.

    Raises:
      AnystepError: 64 `index` for one that the cache does not have, or none at all.
    """
    listed, num_examples = sorted(set(indices)), cache.manifest.num_examples
    outside = [index for index in listed if not 0 <= index < num_examples]
    if outside or not listed:
      raise AnystepError(
        ExitCode.USAGE,
        "index",
        task=cache.manifest.task,
        expected=f"at least one index, 0 to {num_examples - 1}",
        got=outside or "none",
        fix="name examples by the index that anystep-data what-was-at prints",
      )
    m = cache.manifest
    return cls(
      task=m.task, split=m.split, manifest_sha256=cache.manifest_sha256, indices=listed, reason=reason
    )

  def check_indices(self, cache: Cache) -> None:
    """Refuse examples that the list's cache does not have.

    Raises:
      AnystepError: 65 `tombstones_invalid`.
    """
    if self.indices[-1] >= len(cache):
      raise AnystepError(
        ExitCode.DATA,
        "tombstones_invalid",
        task=self.task,
        expected=f"indices up to {len(cache) - 1}",
        got=self.indices[-1],
        fix=_MAKE_LIST,
      )

  def to_json(self) -> str:
    """Return the file's text."""
    return canonical_json({"version": LIST_VERSION, **dataclasses.asdict(self)}, indent=1) + "\n"

  @classmethod
  def read(cls, path: epath.PathLike) -> TombstoneList:
    """Return the list of a file.

    Raises:
      AnystepError: 66 `tombstones_missing`; 65 `tombstones_invalid`.
    """
    try:
      document = read_json(path)
      version = document.pop("version")
      if type(version) is not int or version != LIST_VERSION:
        raise ValueError(f"version {version!r}, not {LIST_VERSION}")
      return cls(**document)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
      raise AnystepError(
        ExitCode.NO_INPUT, "tombstones_missing", path=path, expected="a list of examples", fix=_MAKE_LIST
      ) from error
    except MALFORMED as error:
      raise make_file_error("tombstones_invalid", error, path=path, fix=_MAKE_LIST) from error


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tombstones:
  """A plan's entry: from start_step on, these examples, by task and index, have no loss weight."""

  start_step: int
  indices: Mapping[str, Sequence[int]]
  reason: str

  def __post_init__(self):
    refuse_wrong(
      start_step=is_count(self.start_step),
      indices=bool(self.indices)
      and all(map(is_name, self.indices))
      and all(map(_are_indices, self.indices.values())),
      reason=isinstance(self.reason, str),
    )


class SilentSteps:
  """The first step without loss weight of each example.

  Args:
    tombstones: a plan's.
  """

  def __init__(self, tombstones: Iterable[Tombstones]):
    self._first: dict[str, dict[int, int]] = {}
    for entry in tombstones:
      for task, indices in entry.indices.items():
        first = self._first.setdefault(task, {})
        for index in indices:
          first[index] = min(entry.start_step, first.get(index, entry.start_step))

  def since(self, task: str, indices: np.ndarray) -> np.ndarray:
    """Return the first step without loss of each of a task's examples: `(n,) int64`, `NEVER` for none."""
    indices_with_tombstone, steps = self._sorted.get(task, (np.zeros(0, np.int64),) * 2)
    if not indices_with_tombstone.size:
      return np.full(len(indices), NEVER)
    position = np.minimum(np.searchsorted(indices_with_tombstone, indices), len(indices_with_tombstone) - 1)
    return np.where(indices_with_tombstone[position] == indices, steps[position], NEVER)

  def items(self) -> Iterator[tuple[str, int, int]]:
    """Yield (task, index, first step without loss) of each example with a tombstone, in ascending order."""
    for task in sorted(self._first, key=str.encode):
      for index, step in sorted(self._first[task].items()):
        yield task, index, step

  @cached_property
  def _sorted(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    return {
      task: (np.array(sorted(first), np.int64), np.array([first[index] for index in sorted(first)], np.int64))
      for task, first in self._first.items()
    }


def without_loss(rows: Rows, silent: np.ndarray, counts: np.ndarray | None = None) -> Rows:
  """Return rows whose loss weights are 0 where silent examples are; nothing else differs.

  Args:
    rows: the model's features: loss weights are those named `…_loss_weights`, beside `…_segment_ids` where
      rows are packed, and MaxText's `targets_segmentation`.
    silent: of each example, `(examples,) bool`.
    counts: examples of each row, `(rows,) int64`; None where each is a row.

  Raises:
    AnystepError: 78 `tombstones_converter` where rows have no loss weights.
  """
  weights = {name: name.removesuffix(_LOSS_WEIGHTS) + _SEGMENT_IDS for name in rows if _is_weights(name)}
  if _MAXTEXT_SEGMENTS in rows:
    weights[_MAXTEXT_SEGMENTS] = _MAXTEXT_SEGMENTS
  if not weights or (counts is not None and not rows.keys() >= set(weights.values())):
    raise AnystepError(
      ExitCode.CONFIG,
      "tombstones_converter",
      expected="features named …_loss_weights, of packed rows with …_segment_ids",
      got=", ".join(sorted(rows)),
      fix="choose a feature converter that gives the model loss weights: the plan has tombstones",
    )
  if not silent.any():
    return rows
  changed = dict(rows)
  for name, segments in weights.items():
    changed[name] = np.array(rows[name])
    if counts is None:
      changed[name][silent] = 0
    else:
      row = np.repeat(np.arange(len(counts)), counts)[silent]
      segment = (np.arange(len(silent)) - np.repeat(np.cumsum(counts) - counts, counts))[silent] + 1
      is_silent = np.zeros((len(counts), int(counts.max()) + 1), bool)
      is_silent[row, segment] = True
      changed[name][np.take_along_axis(is_silent, np.asarray(rows[segments], np.int64), axis=1)] = 0
  return changed


def _is_weights(name: str) -> bool:
  return name == _LOSS_WEIGHTS or name.endswith(f"_{_LOSS_WEIGHTS}")


def _are_indices(values: object) -> bool:
  return (
    isinstance(values, (list, tuple))
    and bool(values)
    and all(map(is_count, values))
    and all(a < b for a, b in itertools.pairwise(values))
  )
